"""Checkpoints: a run's exact state in one atomically written file, checked before it is used.

    model = load_model("run.pt")                     # the trained network, in eval mode
    state = read_checkpoint("run.pt")                # everything in the file, as a dict

There is no generator or scheduler state: draws depend only on --seed and the step. On resume, flags are

    FIXED       the checkpoint's; another value is refused. --model FILE.py:NAME must be typed again, since a checkpoint
                never names code; a changed file is reported. --split, --edge-split and --edge-type may differ if
                --predict only predicts
    KEPT        the checkpoint's unless typed again, which takes effect from the next epoch on (the cosine spans all of
                --epochs). --batch-size x --accumulate x processes must stay the same. --dataset: any path to the same
                graph, or any graph of the same widths if --predict only predicts
    all others  this command's: where it runs, what it writes

A graph is recognised by the SHA-256 of its files in meta.json, not by its path; so is a file of --edge-split. An LMDB file
may change by design: once it has, it is no longer compared.

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
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from disk.files import StoreError, reading, write_whole
from run.flags import TASKS, changed, make_parser, spelled, text_of
from run.own_model import is_own, load

FIXED = """task fanout model model_args hidden num_layers heads norm residual dropout
input_dropout sampler layer_dependency batch_dependency temporal window seed split metric edge_split scorer bases
edge_type negatives negatives_by unchecked_negatives link_loss""".split()
BUILT = {"symmetrize": False, "drop_duplicates": False, "feature_dtype": None}  # into a store; off
KEPT = f"""dataset {" ".join(BUILT)} batch_size accumulate lr lr_schedule weight_decay epochs early_stop
weights precision checkpoint_activations""".split()
# what all ranks need to have in common, beside the data
SAME = {*FIXED, *KEPT, *"mode cuda_graph runs checkpoint_every predict_what".split()}
SAME = sorted(SAME - {"dataset", *BUILT})
# flags and widths that early checkpoints lack, and what they stand for
LATER = dict(drop_duplicates=False, feature_dtype=None, window=None, bases=0, edge_type=None)
LATER_WIDTHS = dict(
    num_edge_types=0,
    node_types=0,
    edge_types=0,
    class_dim=0,
    labels=None,
    several=None,
    classes=None,
    feature_names=None,
)
# the only names a pickle may contain
HARMLESS = r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage"


def save_checkpoint(path, args, store, model, optimizer, best, epoch, step):
    """Write the state of a run after `step` optimizer steps of epoch `epoch`, both counted from 0."""
    graph = {name: store.meta.get(name, 0) for name in TASKS[args.task].widths}
    graph |= names_of(store) | {"path": str(store.path), "files": digests(store)}
    graph["feature_names"] = getattr(store, "feature_names", None)
    state = {
        "flags": {name: getattr(args, name) for name in (*FIXED, *KEPT)},
        "total_batch": args.total_batch,
        "graph": {**graph, "several": getattr(store, "several", None)},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "best": best,
        "epoch": epoch,
        "step": step,
        "code": getattr(model, "digest", None),
    }
    write_whole(path, lambda file: torch.save(state, file))


def claimed(path):
    """Claim a checkpoint -> socket, a context that ends the claim, as the end of its process does; StoreError if another
    run on this machine writes the file. Only Linux has names for sockets that leave no files."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()
    try:
        if sys.platform == "linux":
            claim.bind(f"\0ringblock-{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            claim.close()
            why = "another run writes it: give each its own --checkpoint"
            raise StoreError(f"--checkpoint {path}: {why}") from error
    return claim


def names_of(store):
    """Return {"edge_types": names, "classes": names} of a store, in the order of their numbers; None without names."""
    classes = getattr(store, "class_names", store.meta.get("classes"))
    return {"edge_types": store.meta.get("edge_types"), "classes": classes}


def digests(store):
    """Return {file: SHA-256 or None} of the files of a store, and of the file of --edge-split."""
    records = store.meta["files"].items()
    return {name: record.get("sha256", record.get("built")) for name, record in records}


def load_model(path, model=None):
    """Load the network of a checkpoint in eval mode, with the weights of the best epoch if the run kept them.

    `inference(model, indptr, indices, x)` of inference.py gives the logits of all nodes. For your own network pass it
    as `model`, an nn.Module: a checkpoint never names code to run. Raises StoreError for other files.
    """
    state = read_checkpoint(path)
    if model is None and is_own(custom := state["flags"]["model"]):
        raise StoreError(f"{path} holds weights of {custom}: build it and give it as `model`")
    model = described_network(state) if model is None else model
    with reading(f"checkpoint {path}"):
        model.load_state_dict(state["best"]["model"] or state["model"])
    return model.eval()


def described_network(state):
    """Build the network that a checkpoint's flags and widths describe, with initial weights."""
    flags = state["flags"]
    return TASKS[flags["task"]].network(SimpleNamespace(**flags), state["graph"])


# ---- reading


def read_checkpoint(path, data=None):
    """Read a checkpoint (or its bytes) -> dict with flags, total_batch, graph, model, optimizer, best, epoch, step and
    code; tensors on the CPU. Raises StoreError if it is damaged, forged or not a checkpoint. Fields that are not checked
    here are checked where they are used, inside `reading`."""
    if data is None:
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
                codes = pickletools.genops(content)
                named = [symbol for code, symbol, _ in codes if code.name == "GLOBAL"]
                if not all(re.fullmatch(HARMLESS, symbol) for symbol in named):
                    raise ValueError("it holds more than tensors and dicts")
            checked.writestr(entry.filename, content)
    copy.seek(0)
    return copy


def check_state(state, size):
    """Raise unless a checkpoint of `size` bytes has flags that the command line accepts, counts in range, and tensors
    that fit the network it describes, built on the meta device. Adds what early checkpoints lack."""
    best = state["best"]
    state["flags"] = parsed_flags(state["flags"])
    state["graph"] = {**LATER_WIDTHS, **state["graph"]}
    counts = state["epoch"], state["step"], state["total_batch"], best["epoch"]
    if not all(type(count) is int and 0 <= count < 1 << 32 for count in counts):
        raise ValueError("a count in it is no whole number from 0 to 2^32 - 1")
    best["score"] = float(best["score"])
    if any(tensor.nbytes > size for tensor in state["model"].values()):
        raise ValueError("a tensor in it is larger than the file")
    if not is_own(state["flags"]["model"]):
        with torch.device("meta"):
            network = described_network(state)
        network.load_state_dict(dict(state["model"]), assign=True)


def parsed_flags(saved):
    """Return what the command-line parser makes of a checkpoint's flags, with those that early ones lack."""
    saved, words = {**LATER, "weights": "best" if saved["early_stop"] else "last", **saved}, []
    for name in (*FIXED, *KEPT):
        if saved[name] is not None and (saved[name] is not False or name == "residual"):
            words.append(spelled(name, saved[name], "="))

    def refuse(message):
        raise ValueError(f"among its flags, {message}")

    parser = make_parser()
    parser.error = refuse
    args = parser.parse_args(words)
    return {name: getattr(args, name) for name in (*FIXED, *KEPT)}


# ---- resuming


def adopted(args, state, path):
    """Return args with the checkpoint's values of flags that were not typed; other values of FIXED ones are refused."""
    flags = {name: value for name, value in state["flags"].items() if name not in args.typed}
    for name in (name for name in FIXED if name in args.typed):
        typed, value = getattr(args, name), state["flags"][name]
        of_data = name in ("edge_split", "edge_type", "split") and not args.trains
        if typed != value and not (is_own(typed) and is_own(value) or of_data):
            was = f"checkpoint {path} was made with {spelled(name)} {text_of(value)}"
            raise StoreError(f"{was}, this run has {text_of(typed)}")
    if is_own(custom := flags.get("model")):
        raise StoreError(f"checkpoint {path} holds weights of {custom}: give --model FILE.py:NAME")
    with reading(f"checkpoint {path}"):
        store_is_here = os.path.isfile(os.path.join(state["graph"]["path"], "meta.json"))
    if "dataset" not in args.typed and store_is_here:
        flags["dataset"] = state["graph"]["path"]  # found there whatever --root is
        # that store was built with these flags
        flags |= {name: off for name, off in BUILT.items() if name not in args.typed}
    if not args.trains:
        flags["early_stop"] = None
    return changed(args, **flags)


def common_state(ranks, args):
    """Read the state to resume; the rank whose file is furthest ahead broadcasts it, as machines need not share a disk
    -> (state, its path, args with the flags of the state), or (None, None, args). --resume auto and a restart by
    torchrun read the file of --checkpoint. StoreError if ranks differ in flags that they need to have in common."""
    local = args.checkpoint if args.checkpoint and os.path.isfile(args.checkpoint) else None
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    path = local if args.resume == "auto" or local and restarted else args.resume
    state = read_checkpoint(path) if path else None
    progress = ranks.gather((state["epoch"] << 28) + state["step"] if state else -1)
    if max(progress) >= 0:
        path, source = path or args.checkpoint or args.resume, progress.index(max(progress))
        if ranks.world > 1:
            data = Path(path).read_bytes() if ranks.rank == source else None
            state = read_checkpoint(path, ranks.broadcast(data, source))
        args = adopted(args, state, path)
    flags = {spelled(name): text_of(getattr(args, name)) for name in SAME}
    # a file may lie in another folder; that of --edge-split is compared with the data
    flags["--model"] = args.model.rpartition(":")[2]
    flags["--edge-split"] = ".npz" if args.edge_split.endswith(".npz") else args.edge_split
    flags |= {f"--{name}": bool(getattr(args, name)) for name in ("predict", "pairs", "gpus")}
    check_same(ranks, flags | {"training": args.trains})
    return state, path, args


def check_same(ranks, values):
    """Raise StoreError, on every rank, unless all ranks have the same values, {name: value}."""
    first, *others = ranks.gather(values)
    for rank, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            if (value := first.get(name)) != (other := theirs.get(name)):
                differ = f"{name} is {value} on rank 0, {other} on rank {rank}"
                raise StoreError(f"{differ}: all machines need the same flags and data")


def check_graph(ranks, state, path, args, task):
    """Raise StoreError unless all ranks have the same data, with the graph of the checkpoint, if state is not None, and
    as many seeds a step as there. To predict, only the widths must match, and the graph may have fewer classes and edge
    types than the checkpoint, these in another order: returns the numbers [T] of the graph's edge types there, or None
    if they are the same."""
    code = {"--model's file": load(args.model)[1]} if is_own(args.model) else {}
    # the file of --edge-split may lie in another folder
    check_same(ranks, code | {os.path.basename(k): v for k, v in digests(task.store).items()})
    if not state:
        return None
    numbers = None
    store, graph, compared = task.store, state["graph"], task.compared(args)
    trained = f"checkpoint {path} was trained on a graph"
    with reading(f"checkpoint {path}"):
        for name in compared:
            here, was = store.meta.get(name, 0), graph[name]
            lenient = name in ("num_classes", "num_edge_types")  # another graph may have fewer
            differs = was is not None and here != was
            if differs and (args.trains or not lenient or here > was):
                raise StoreError(f"{trained} with {name} {was}, {store.path} has {here}")
            if lenient:
                setattr(store, name, int(was))
        if (was := graph["several"]) is not None:
            if store.labelled and store.several != was:
                labels = "several labels" if was else "one label"
                raise StoreError(f"{trained} of {labels} a node, {store.path} has others")
            store.several = bool(was)
        for name, here in names_of(store).items():
            was, noun = graph[name], name.replace("_", " ")
            numbered = f"num_{name}" in compared or name == "edge_types" and is_own(args.model)
            if numbered and not (here and was) and (here or was) and store.labelled:
                lacks = f"{store.path} has" if was else "the checkpoint has"
                ranks.say(f"data    {noun} go by number: {lacks} no names of them")
            if not (here and was and numbered) or was[: len(here)] == here:
                continue
            if args.trains or name != "edge_types" or {*here} - {*was}:
                were = "; ".join(was)[:300]
                has = f"{'; '.join(here)[:300]}"
                if {*here} == {*was}:
                    has = "them in another order"
                raise StoreError(f"{trained} whose {noun} are {were}; {store.path} has {has}")
            numbers = torch.tensor([was.index(kind) for kind in here])
            ranks.say(f"graph   edges have the {noun} of {path} in another order: they go by name")
        name_features(ranks, store, graph["feature_names"], trained)
        files, was = digests(store), graph["files"]
        if graph["classes"] or files.get("labels.npy") != was.get("labels.npy"):
            # predictions are of the checkpoint's classes
            store.class_names = graph["classes"] and [*map(str, graph["classes"])]
        other = [name for name in was if was[name] and files.get(name) not in (None, was[name])]
    if not args.trains:
        if other and "dataset" not in args.typed:
            changed_files = f"{', '.join(other)} of {store.path}"
            ranks.say(f"data    {changed_files} changed since this checkpoint was trained")
        return numbers
    if other:
        start = f"checkpoint {path} is of other data: {', '.join(other)} in {store.path} is not the same"
        raise StoreError(f"{start}; give its graph, or another --checkpoint to start anew")
    if (was := state["total_batch"]) != args.total_batch:
        start = f"checkpoint {path} was made with --batch-size x --accumulate x processes = {was}"
        raise StoreError(f"{start}, this run has {args.total_batch}")
    return None


def name_features(ranks, store, was, trained):
    """Put the feature columns of a store into the order of a checkpoint's names `was`; StoreError for other names. If one
    of them has no names, columns go by position, and a line says so. trained: beginning of messages."""
    here = getattr(store, "feature_names", None)
    if not (here and was):
        lacks = f"{store.path} has" if was else "the checkpoint has"
        ranks.say((here or was) and f"data    features go by position: {lacks} no names of columns")
    elif sorted(here) != sorted(was):
        lost, other = (min({*a} - {*b}, key=a.index) for a, b in ((was, here), (here, was)))
        differ = f"{store.path} lacks it and has {other!r} instead: name the columns alike"
        raise StoreError(f"{trained} with the feature {lost!r}; {differ}")
    elif here != was:
        store.take_columns(was)
        ranks.say("data    feature columns are put into the checkpoint's order by name")


def restore(state, path, ranks, args, model, optimizer, best):
    """Load a checkpoint, whose graph was checked, into model, optimizer and best -> (epoch, steps done in it)."""
    with reading(f"checkpoint {path}"):
        for weights in (state["best"]["model"] or state["model"], state["model"]):
            model.load_state_dict(weights)
    if is_own(args.model) and str(state.get("code")) != model.digest:
        ranks.say(f"model   {args.model} has changed since the checkpoint was written")
    if args.trains:
        saved = state["flags"]
        new = {name: getattr(args, name) for name in KEPT if name in args.typed}
        changes = [f"{spelled(k)[2:]} {saved[k]} -> {v}" for k, v in new.items() if v != saved[k]]
        ranks.say(changes and f"changed  {', '.join(changes)}")
        parameters = list(model.parameters())
        with reading(f"checkpoint {path}"):
            for index, moments in state["optimizer"].items():
                shapes = {name: value.shape for name, value in moments.items()}
                shape = parameters[index].shape
                if shapes != {"step": (), "exp_avg": shape, "exp_avg_sq": shape}:
                    raise ValueError(f"parameter {index} has no moments of Adam")
            groups = optimizer.state_dict()["param_groups"]  # of this run's flags
            optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
    best.update(state["best"])
    if not best["model"]:
        best["epoch"] = state["epoch"]  # --early-stop counts from here
    return state["epoch"], state["step"]
