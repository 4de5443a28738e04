"""Checkpoints: a run's exact state in one atomically written file, checked before it is used.

    model = load_model("run.pt")                     # the trained network, in eval mode
    state = read_checkpoint("run.pt")                # everything in the file, as a dict

There is no generator or scheduler state: draws depend only on --seed and the step. On resume, flags are

    fixed     the checkpoint's; another value is refused. --model FILE.py:NAME must be typed again, since a checkpoint
              never names code; a changed file is reported
    per_graph   the same, but they may differ if --predict only predicts
    kept      the checkpoint's unless typed again, which takes effect from the next epoch on (the cosine spans all of
              --epochs). --batch-size x --accumulate x processes must stay the same. --dataset: any path to the same
              graph, or any graph of the same widths if --predict only predicts
    built     the same while the graph's store is missing and built anew
    alike     this command's, the same on all ranks
    free      this command's: where it runs, what it writes

as run/flags.py declares each of them.

A graph is recognised by the SHA-256 of its files in meta.json, not by its path; so is a file of --edge-split. An LMDB file
may change by design: once it has, it is no longer compared.

`trained` has a number for each training node or graph, `Task.keys`, so that scores of a checkpoint can leave out what it was
trained on.

A checkpoint is untrusted input: its pickle may hold only tensors and dicts, its flags are what the command-line parser
makes of them, none names code or a file to write, and its tensors must fit the network they describe.
"""

import errno
import hashlib
import io
import os
import pickletools
import re
import socket
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from disk.columns import COLUMNS, EDGE_ORDER, NAMES
from disk.files import FORMATS, SPLITS, StoreError, read_meta, reading, write_whole
from extras import extra
from model import CONVS, Conv
from run.flags import (
    FLAGS,
    SAVED,
    TASKS,
    Flags,
    declared,
    make_parser,
    model_or_default,
    parsed,
    unused,
)
from run.kinds import ON_OFF, spelled, text_of
from run.own_model import is_own, load

# widths that early checkpoints lack, and what they stand for
LATER_WIDTHS = {
    **dict.fromkeys("num_edge_types node_types edge_types class_dim targets".split(), 0),
    **dict.fromkeys("labels several classes feature_names times kept_as".split()),
}
# the only names a pickle may contain
HARMLESS = r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage"


def save_checkpoint(run, optimizer, best, epoch, step):
    """Write the state of a run after `step` optimizer steps of epoch `epoch`, both counted from 0, to --checkpoint."""
    plan = run.plan
    described = described_run(run)
    described["graph"] |= {"path": str(run.store.path), "files": digests(run.store)}
    state = {
        **described,
        "total_batch": plan.total_batch,
        "model": run.model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "best": best,
        "epoch": epoch,
        "step": step,
        "code": run.digest,
        "trained": run.trained,
    }
    write_whole(plan.checkpoint, lambda file: torch.save(state, file))


def described_run(run):
    """Return {"flags": those that are saved, "graph": widths and names of the data} of a run."""
    store = run.store
    graph = {
        **{name: store.meta.get(name, 0) for name in run.task.widths},
        **names_of(store),
        "kept_as": store.kept_as,
        "several": run.task.several,
        "times": None,
    }
    if run.used.times is not None:
        graph["times"] = extra(".time_units").usual_times(run.plan, run.task)
    return {"flags": {name: getattr(run.plan, name) for name in SAVED}, "graph": graph}


def claimed(path):
    """Claim a checkpoint -> socket, a context that ends the claim, as the end of its process does; StoreError if another
    run on this machine writes the file. Only Linux has names for sockets that leave no files."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    try:
        claim.bind(f"\0ringblock-{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            raise StoreError(
                f"--checkpoint {path}: another run writes it: give each its own --checkpoint"
            ) from error
    return claim


def names_of(store):
    """Return {"edge_types": names, "classes": names, "feature_names": names} of a store, in the order of their numbers; None
    without names."""
    return {
        "edge_types": store.meta.get("edge_types"),
        "classes": store.class_names,
        "feature_names": store.feature_names,
    }


def digests(store):
    """Return {file: SHA-256 or None} of the files of a store that runs read, of a part those of the whole, and of the file of
    --edge-split."""
    files = {
        name: record.get("sha256", record.get("built"))
        for name, record in store.meta["files"].items()
        if name != f"{EDGE_ORDER.name}.npy"  # which no run reads
    }
    for name, digest in store.whole.items():
        # rows of a part may have changed
        files[name] = files.get(name) and digest
    if (scale := store.meta.get("feature_scale")) is not None:
        files["the scale of features"] = hashlib.sha256(repr(scale).encode()).hexdigest()
    return files


def files_here(store):
    """Return `digests`, and those of columns that the store lacks: "none"."""
    return {f"{name}.npy": "none" for name in COLUMNS} | digests(store)


def load_model(path, model=None):
    """Load the network of a checkpoint in eval mode, with the weights of the best epoch if the run kept them.

    `inference(model, indptr, indices, x)` of inference.py gives the logits of all nodes. For your own network pass it
    as `model`, an nn.Module: a checkpoint never names code to run. Raises StoreError for other files.
    """
    state = read_checkpoint(path)
    if model is None and is_own(custom := state["flags"]["model"]):
        raise StoreError(f"{path} holds weights of {custom}: build it and give it as `model`")
    model = described_network(state, model)
    with reading(f"checkpoint {path}"):
        model.load_state_dict(state["best"]["model"] or state["model"])
    return model.eval()


def described_network(state, custom=None):
    """Build the network that the flags and widths of a checkpoint, or of config.json, describe, with initial weights.
    custom: of a user's file, which these name but never run: its network, or the class of its layer."""
    flags = Flags(**state["flags"])
    if custom is None and is_own(flags.model):
        raise StoreError(
            f"these are weights of {flags.model}: give its network, or the class of its layer"
        )
    if isinstance(custom, type):
        flags = replace(flags, model=custom)
        custom = None
    return TASKS[flags.task].network(flags, state["graph"], custom)


# ---- reading


def read_checkpoint(path, data=None):
    """Read a checkpoint (or its bytes) -> dict with flags, total_batch, graph, model, optimizer, best, epoch, step,
    code and trained; tensors on the CPU. Raises StoreError if it is damaged, forged or not a checkpoint. Fields that are not checked
    here are checked where they are used, inside `reading`."""
    if data is None:
        if os.path.exists(os.path.join(path, "model.safetensors")):
            raise StoreError(f"{path} is an exported network: give the file of --checkpoint")
        with reading(path):
            data = Path(path).read_bytes()
    try:
        state = torch.load(checked_archive(data), map_location="cpu", weights_only=True)
        check_state(state, len(data))
    except Exception as error:  # torch.load also raises AssertionError
        reason = (str(error) or repr(error)).splitlines()[0]
        raise StoreError(f"{path} is not a checkpoint of train.py: {reason[:300]}") from error
    return state


def checked_archive(data):
    """Copy the entries of a ZIP file, whose checksums are verified, to a new one in memory -> file object. torch locates
    entries by other rules than zipfile and ignores checksums: from the copy it can only read what was checked."""
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(copy, "w") as checked:
        if sum(entry.file_size for entry in archive.infolist()) > len(data):
            raise ValueError("its entries are larger than the file")
        for entry in archive.infolist():
            content = archive.read(entry)
            if entry.filename.endswith(".pkl"):
                for code, symbol, _ in pickletools.genops(content):
                    if code.name == "GLOBAL" and not re.fullmatch(HARMLESS, symbol):
                        raise ValueError("it holds more than tensors and dicts")
            checked.writestr(entry.filename, content)
    copy.seek(0)
    return copy


def check_state(state, size):
    """Raise unless a checkpoint of `size` bytes has flags that the command line accepts, counts in range, and tensors
    that fit the network it describes, built on the meta device. Adds what early checkpoints lack."""
    best = state["best"]
    state["graph"] = {**LATER_WIDTHS, **state["graph"]}
    flags = parsed_flags(state["flags"])
    state["flags"] = settled_flags(flags, state["graph"], state["model"])
    for count in (state["epoch"], state["step"], state["total_batch"], best["epoch"]):
        if type(count) is not int or not 0 <= count < 1 << 32:
            raise ValueError("a count in it is no whole number from 0 to 2^32 - 1")
    trained = state.setdefault("trained", None)
    if trained is not None and (trained.dtype != torch.int64 or trained.dim() != 1):
        raise ValueError("what it was trained on is no list of int64")
    best["score"] = float(best["score"])
    if any(tensor.nbytes > size for tensor in state["model"].values()):
        raise ValueError("a tensor in it is larger than the file")
    if not is_own(state["flags"]["model"]):
        with torch.device("meta"):
            described_network(state).load_state_dict(dict(state["model"]), assign=True)


def settled_flags(flags, graph, weights):
    """Return a checkpoint's flags, {name: value}, with what they meant in early ones: edge features were open, and rgat had
    one head whatever --heads."""
    conv = CONVS.get(flags.model)
    if conv and flags.edge_features is None:
        sees = conv.sees_edges() and graph["edge_dim"] > 0
        flags = replace(flags, edge_features=sees)
    queries = weights.get("layers.0.query")
    if conv and queries is not None and queries.shape[:1] == (graph["num_edge_types"],):
        flags = replace(flags, heads=1)
    return {name: getattr(flags, name) for name in SAVED}


def parsed_flags(saved):
    """Return what the command-line parser makes of a checkpoint's flags, with those that early ones lack -> Flags."""
    words = []
    early = {
        "heads": Conv.heads,
        "pooling": "mean",
        "weights": "best" if saved.get("early_stop") else "last",
    }
    for name in SAVED:
        flag = FLAGS[name]
        value = {name: flag.default, **early, **saved}[name]
        if value is not None and (value is not False or flag.kind is ON_OFF):
            words.append(spelled(name, value, "="))

    def refuse(message):
        raise ValueError(f"among its flags, {message}")

    parser = make_parser()
    parser.error = refuse
    flags = parsed(parser, words)
    # early checkpoints of graphs name a layer, which was not used
    return replace(flags, model=model_or_default(flags))


# ---- resuming


def adopted(flags, state, path):
    """Return flags with the checkpoint's values of those that were not typed; other values of `fixed` ones are refused."""
    saved = state["flags"]
    values = {name: value for name, value in saved.items() if name not in flags.typed}
    # flags of other tasks are refused later, with a better reason
    idle = unused(TASKS[saved["task"]])
    for name in declared("fixed", *["per_graph"] * flags.trains):
        here = getattr(flags, name)
        was = saved[name]
        differs = here != was and not (is_own(here) and is_own(was))
        if name in flags.typed and name not in idle and differs:
            raise StoreError(
                f"checkpoint {path} was made with {spelled(name)} {text_of(was)}, this run has {text_of(here)}"
            )
    if is_own(custom := values.get("model")):
        raise StoreError(f"checkpoint {path} holds weights of {custom}: give --model FILE.py:NAME")
    with reading(f"checkpoint {path}"):
        store_is_here = os.path.isfile(os.path.join(state["graph"]["path"], "meta.json"))
    if "dataset" not in flags.typed and store_is_here:
        values["dataset"] = state["graph"]["path"]  # found there whatever --root is
        for name in {*declared("built")} - {*flags.typed}:
            values[name] = FLAGS[name].default
    if "dataset" in flags.typed and os.path.isfile(os.path.join(flags.dataset, "meta.json")):
        check_kind(replace(flags, task=saved["task"]), path, flags.dataset)
    if not flags.trains:
        values["early_stop"] = None
    return replace(flags, **values)


def check_kind(flags, file, path):
    """Raise StoreError unless the store at `path` is of the kind that the checkpoint `file` was trained on: a graph, or many
    small ones."""
    form = read_meta(path)["format"]
    if form.endswith("graphs") == TASKS[flags.task].placed:
        raise StoreError(
            f"checkpoint {file} is of --task {flags.task}, {path} holds {FORMATS[form].partition(':')[0]}"
        )


def common_state(ranks, flags):
    """Read the state to resume; the rank whose file is furthest ahead broadcasts it, as machines need not share a disk
    -> (state, its path, flags with those of the state), or (None, None, flags). --resume auto and a restart by
    torchrun read the file of --checkpoint. StoreError if ranks differ in flags that they need to have in common."""
    kept = flags.checkpoint
    local = kept if kept and os.path.isfile(kept) else None
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path = local if flags.resume == "auto" or local and restarted else flags.resume
    state = read_checkpoint(path) if path else None
    progress = ranks.gather((state["epoch"] << 28) + state["step"] if state else -1)
    if max(progress) >= 0:
        path = path or kept or flags.resume
        source = progress.index(max(progress))
        if ranks.world > 1:
            data = Path(path).read_bytes() if ranks.rank == source else None
            state = read_checkpoint(path, ranks.broadcast(data, source))
        flags = adopted(flags, state, path)
    common = {
        spelled(name): text_of(getattr(flags, name))
        for name in declared("fixed", "per_graph", "kept", "alike")
    }
    # files may lie in another folder; what is in them is compared with the data
    del common["--dataset"]
    common["--model"] = flags.model.rpartition(":")[2]
    common = {name: ".npz" if value.endswith(".npz") else value for name, value in common.items()}
    files = "predict", "pairs", "gpus"
    common |= {f"--{name}": bool(getattr(flags, name)) for name in files}
    check_same(ranks, common | {"training": flags.trains})
    return state, path, flags


def check_same(ranks, values):
    """Raise StoreError, on every rank, unless all ranks have the same values, {name: value}."""
    first, *others = ranks.gather(values)
    for rank, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            if (value := first.get(name)) != (other := theirs.get(name)):
                raise StoreError(
                    f"{name} is {value!s:.200} on rank 0, {other!s:.200} on rank {rank}"
                    ": all machines need the same flags and data"
                )


def check_graph(ranks, state, path, plan, task):
    """Raise StoreError unless all ranks have the same data, with the graph of the checkpoint, if state is not None, and
    as many seeds a step as there. To predict, only the widths must match, and the graph may have fewer classes and edge
    types than the checkpoint, these in another order: returns options of NeighborSampler by which blocks have the numbers
    there."""
    store = task.store
    # the file of --edge-split may lie in another folder
    common = {os.path.basename(name): digest for name, digest in digests(store).items()}
    if is_own(plan.model):
        common["--model's file"] = load(plan.model)[1]
    check_same(ranks, common)
    if not state:
        return {}
    graph = state["graph"]
    with reading(f"checkpoint {path}"):
        check_widths(task, plan, graph, path)
        numbers = match_names(ranks, task, plan, graph, path)
        here = store.kept_as
        if graph["kept_as"] not in (None, here):
            ranks.say(
                f"data    features are {here or 'not rounded'}, those that the network was trained on "
                f"{graph['kept_as'] or 'not rounded'}: scores may differ"
            )
        files = files_here(store)
        was = graph["files"]
        if graph["classes"] or task.placed and files.get("labels.npy") != was.get("labels.npy"):
            # predictions are of the checkpoint's classes
            store.take(class_names=graph["classes"] and [*map(str, graph["classes"])])
        other = [name for name in was if was[name] and files.get(name) not in (None, was[name])]
    if not plan.trains:
        if graph["times"] and not task.are_links:
            ranks.say(extra(".time_units").other_times(plan, task, graph["times"]))
        if other and "dataset" not in plan.typed:
            ranks.say(
                f"data    {', '.join(other)} of {store.path} changed since this checkpoint was trained"
            )
        ranks.say(tell_trained(task, plan, state, files))
        return {} if numbers is None else {"type_numbers": numbers}
    if other:
        raise StoreError(
            f"checkpoint {path} is of other data: {', '.join(other)} in {store.path} is not the same; "
            "give its graph, or another --checkpoint to start anew"
        )
    if (was := state["total_batch"]) != plan.total_batch:
        raise StoreError(
            f"checkpoint {path} was made with --batch-size x --accumulate x processes = {was}, "
            f"this run has {plan.total_batch}"
        )
    task.trained = state["trained"]  # also where it began, after --init
    return {}


def tell_trained(task, plan, state, files):
    """Give a task what its checkpoint was trained on -> the line to print if that cannot be told for its data. files:
    {name: digest} of these."""
    was = state["graph"]["files"]
    changed = [
        name
        for name in {**was, **files}
        if name.startswith(task.told_by) and was.get(name, "") != files.get(name, "")
    ]
    why = f"{', '.join(changed)} is not the same" if changed else ""
    if task.are_links:
        other = [
            name for name in declared("per_graph") if getattr(plan, name) != state["flags"][name]
        ]
        why = why or other and "other pairs are held out"
    elif state["trained"] is None:  # an early checkpoint
        return ""
    elif NAMES in was and NAMES in files:
        why = ""
    elif NAMES in was or NAMES in files:
        why = "only one of the two graphs has names of nodes"
    if not why:
        task.trained = state["trained"]
        return ""
    scored = any(len(task.store.split[part]) for part in SPLITS[1:])
    line = f"data    scores may be of {task.examples} that were trained on, which cannot be told: {why}"
    return line if scored else ""


def check_widths(task, plan, graph, path):
    """Raise StoreError unless a task's data have the widths of the graph of the checkpoint at `path`, and give its store
    the numbers of classes and edge types there."""
    store = task.store
    trained = f"checkpoint {path} was trained on a graph"
    for name in task.compared(plan):
        here = store.meta.get(name, 0)
        was = graph[name]
        # another graph may have fewer, or none
        lenient = (
            name in ("num_classes", "num_edge_types") or name == "targets" and not store.labelled
        )
        differs = was is not None and here != was
        if differs and (plan.trains or not lenient or here > was):
            raise StoreError(f"{trained} with {name} {was}, {store.path} has {here}")
        if lenient:
            store.take(**{name: int(was)})
    if (was := graph["several"]) is not None:
        if store.labelled and task.several != was:
            labels = "several labels" if was else "one label"
            raise StoreError(f"{trained} of {labels} a node, {store.path} has others")
        task.several = bool(was)


def match_names(ranks, task, plan, graph, path):
    """Match names of edge types, classes and features with those of the graph of the checkpoint at `path`, and put the columns
    of features into the order there -> numbers [T] of the edge types there, or None if they are the same. StoreError for other
    names, for classes in another order, and to train with edge types in another order."""
    store = task.store
    compared = task.compared(plan)
    numbers = None
    for name, here in names_of(store).items():
        was = graph[name]
        noun = name.replace("feature_names", "features").replace("_", " ")
        of_own_model = name == "edge_types" and plan.conv is None
        if not (f"num_{name}" in compared or name == "feature_names" or of_own_model):
            continue
        if not (here and was):
            if (here or was) and (store.labelled or name != "classes"):
                lacks = f"{store.path} has" if was else "the checkpoint has"
                ranks.say(f"data    {noun} go by number: {lacks} no names of them")
            continue
        if was[: len(here)] == here:
            continue
        others = sorted({*here} - {*was})
        by_name = name == "feature_names" or name == "edge_types" and not plan.trains
        if others or not by_name:
            raise StoreError(
                f"checkpoint {path} was trained on a graph whose {noun} are {'; '.join(was)[:300]}; "
                f"{store.path} has {'; '.join(others)[:300] or 'them in another order'}"
            )
        ranks.say(
            f"data    {store.path} has the {noun} of {path} in another order: they go by name"
        )
        if name == "edge_types":
            numbers = torch.tensor([was.index(kind) for kind in here])
        else:
            store.take_columns(was)
    return numbers


def restore(run, state, path, optimizer, best):
    """Load a checkpoint, whose graph was checked, into a run's model, optimizer and best -> (epoch, steps done in it)."""
    ranks = run.ranks
    plan = run.plan
    with reading(f"checkpoint {path}"):
        for weights in (state["best"]["model"] or state["model"], state["model"]):
            run.model.load_state_dict(weights)
    if is_own(plan.model) and str(state.get("code")) != run.digest:
        ranks.say(f"model   {plan.model} has changed since the checkpoint was written")
    if plan.trains:
        changes = []
        for name in declared("kept", "built"):
            was = state["flags"][name]
            here = getattr(plan, name)
            if name in plan.typed and here != was:
                changes.append(f"{spelled(name)[2:]} {was} -> {here}")
        ranks.say(changes and f"changed  {', '.join(changes)}")
        parameters = list(run.model.parameters())
        with reading(f"checkpoint {path}"):
            for index, moments in state["optimizer"].items():
                shapes = {name: value.shape for name, value in moments.items()}
                shape = parameters[index].shape
                if shapes != {"step": (), "exp_avg": shape, "exp_avg_sq": shape}:
                    raise ValueError(f"parameter {index} has no moments of Adam")
            # groups are of this run's flags
            optimizer.load_state_dict(optimizer.state_dict() | {"state": state["optimizer"]})
    best.update(state["best"])
    if not best["model"]:
        best["epoch"] = state["epoch"]  # --early-stop counts from here
    return state["epoch"], state["step"]
