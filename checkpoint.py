"""A run's exact state in a file: written whole or not at all, checked before it is used.

    model = load_model("run.pt")                     # the trained network, in eval mode
    state = read_checkpoint("run.pt")                # all that is in the file, as a dict

Sampling and dropout are functions of --seed and the step, and the learning rate is one of the epoch, so no generator
and no schedule has a state to keep: weights, optimizer, the best epoch of --early-stop and the number of the step are
all there is. What becomes of train.py's flags when a run goes on from a checkpoint:

    --task --fanout --accumulate --model --hidden     the checkpoint's; another value is refused. --model FILE.py:NAME
    --model-args --num-layers --heads --norm          is given again, because code is only run where it is typed; a
    --residual --dropout --input-dropout --seed       changed file is reported in a line
    --split --metric --edge-split --scorer            --edge-split may be another one where --predict only predicts
    --negatives --negatives-by --unchecked-negatives
    --link-loss --sampler --layer-dependency
    --batch-dependency --temporal
    --batch-size                                      the checkpoint's unless given again; times --accumulate and
                                                      processes it has to stay the same
    --lr --lr-schedule --weight-decay --precision     the checkpoint's unless given again: then another one from the
    --epochs --early-stop --checkpoint-activations    next epoch on, the cosine over all of --epochs
    --dataset --symmetrize                            the checkpoint's unless given again: any path to the same graph,
                                                      or any graph of the same widths where --predict only predicts
    all others: where it runs, what it writes         this command's own

A graph is recognised by the SHA-256 of its files, as meta.json has them, not by its path. An LMDB file may change by
design: once it has, it is no longer compared.

A checkpoint is input that a stranger may have made. Its pickle may name tensors and dicts alone; its flags pass through
the parser of the command line, none names code or a file to write; the network that they describe is compared with the
tensors before either takes memory. This file needs disk.py, flags.py, model.py, own_model.py, graphs.py and link.py.
"""

import io
import pickletools
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace

import torch

from disk import DTYPES, StoreError, write_whole
from flags import check_network, checkpoint_to_resume, make_parser, spelled, text_of
from graphs import Regressor
from link import Scorer
from model import EDGE_CONVS, GNN
from own_model import is_own

FIXED = ("task", "fanout", "accumulate", "model", "model_args", "hidden", "num_layers", "heads", "norm", "residual",
         "dropout", "input_dropout", "sampler", "layer_dependency", "batch_dependency", "temporal", "seed", "split",
         "metric", "edge_split", "scorer", "negatives", "negatives_by", "unchecked_negatives", "link_loss")  # fmt: skip
KEPT = ("dataset", "symmetrize", "batch_size", "lr", "lr_schedule", "weight_decay", "epochs", "early_stop", "precision",
        "checkpoint_activations")  # fmt: skip
WIDTHS = {"node": ("feature_dim", "num_classes", "edge_dim"),  # what a network has to know of a graph, by --task
          "link": ("feature_dim", "edge_dim"),
          "graph": ("node_dim", "edge_dim", "target_dim", "node_dtype", "edge_dtype")}  # fmt: skip
HARMLESS = r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage"  # what a pickle may name


def save_checkpoint(path, args, store, model, optimizer, best, epoch, step):
    """Write the state of a run after `step` optimizer steps of epoch `epoch`, both counted from 0."""
    graph = {name: store.meta.get(name, 0) for name in WIDTHS[args.task]}
    graph["path"] = str(Path(store.path).absolute())
    graph["files"] = {name: record.get("sha256") for name, record in store.meta["files"].items()}
    state = {"flags": {name: getattr(args, name) for name in (*FIXED, *KEPT)}, "total_batch": args.total_batch,
             "graph": graph, "model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "best": best,
             "epoch": epoch, "step": step, "code": getattr(args, "model_digest", None)}  # fmt: skip
    write_whole(path, lambda file: torch.save(state, file))


def load_model(path, model=None):
    """The network in a checkpoint, in eval mode, with its weights, or the best epoch's where --early-stop kept them.

    `inference(model, indptr, indices, x)` of model.py gives the logits of all nodes. A model of one's own is given as
    the nn.Module to load the weights into: a checkpoint names no code to be run.

    Raises:
        StoreError: for a file that is no checkpoint, or not one of this model.
    """
    state = read_checkpoint(path)
    if model is None and is_own(state["flags"]["model"]):
        raise StoreError(f"{path} holds weights of {state['flags']['model']}: build it and give it as `model`")
    model = build_network(SimpleNamespace(**state["flags"]), state["graph"]) if model is None else model
    load_weights(model, state["best"]["model"] or state["model"], path)
    return model.eval()


def build_network(args, widths):
    """The built-in network of the flags, with initial weights, for a graph of these widths (a dict with the names in
    WIDTHS)."""
    if args.task == "graph":
        dtypes = {name: getattr(torch, widths[name]) for name in ("node_dtype", "edge_dtype")}
        return Regressor(widths["node_dim"], widths["edge_dim"], args.hidden, widths["target_dim"],
                         num_layers=args.num_layers, dropout=args.dropout, **dtypes)  # fmt: skip
    width = args.hidden if args.task == "link" else widths["num_classes"]
    net = GNN(widths["feature_dim"], args.hidden, width, conv=args.model, num_layers=args.num_layers, heads=args.heads,
              dropout=args.dropout, input_dropout=args.input_dropout, norm=args.norm, residual=args.residual,
              recompute=args.checkpoint_activations,
              edge_dim=widths["edge_dim"] if args.model in EDGE_CONVS else 0)  # fmt: skip
    if args.task == "link":
        net.scorer = Scorer(args.scorer, width)
    return net


def load_weights(model, weights, path):
    """Put the weights of the checkpoint `path` into a network; StoreError where they are not its own."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise StoreError(f"checkpoint {path} does not fit the model: {' '.join(str(error).split())[:300]}") from error


# ---------------------------------------------------------------------------------------------------------------------
# reading


def read_checkpoint(path, data=None):
    """Read a checkpoint (or its bytes) and check everything in it -> dict with flags, total_batch, graph, model,
    optimizer, best, epoch and step; tensors on the CPU.

    Raises:
        StoreError: where it is damaged, forged or no checkpoint.
    """
    try:
        data = Path(path).read_bytes() if data is None else data
        check_archive(data)
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        check_state(state)
    except Exception as error:  # zipfile, pickletools and torch.load raise a dozen types on a damaged file
        said = (str(error) or repr(error)).splitlines()[0]
        raise StoreError(f"{path} is not a checkpoint of train.py: {said[:300]}") from error
    return state


def check_archive(data):
    """Raise unless the bytes are a ZIP file, whole and not compressed, with a pickle of tensors and dicts only."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed")
        if folder := next((entry for entry in archive.infolist() if entry.external_attr & 0x10), None):
            raise ValueError(f"{folder.filename} in it is marked as a folder")  # torch would take it as empty
        if damaged := archive.testzip():  # torch.load does not look at the checksums
            raise ValueError(f"{damaged} in it is damaged")
        for name in filter(lambda name: name.endswith(".pkl"), archive.namelist()):
            for operation, named, _ in pickletools.genops(archive.read(name)):
                if operation.name == "GLOBAL" and not re.fullmatch(HARMLESS, named):
                    raise ValueError(f"it names {named!r}")


def check_state(state):
    """Raise unless everything in a checkpoint is of its type and fits the rest."""
    need(state, flags=check_flags, epoch=within(0, 1 << 24), step=within(0, 1 << 28), total_batch=within(1, 1 << 62),
         optimizer=lambda value: type(value) is dict)  # fmt: skip
    flags, graph, best, weights = state["flags"], state["graph"], state["best"], tensors(state["model"])
    need(graph, path=is_word, files=lambda files: type(files) is dict and all(
        is_word(name) and (digest is None or is_word(digest)) for name, digest in files.items()))  # fmt: skip
    for name in WIDTHS[flags["task"]]:
        need(graph, **{name: DTYPES.__contains__ if name.endswith("dtype") else within(name != "edge_dim", 1 << 32)})
    need(best, score=lambda value: type(value) is float, epoch=within(0, 1 << 24), model=lambda value: True)
    if flags["num_layers"] > len(weights):
        raise ValueError(f"--num-layers is {flags['num_layers']}, and there are {len(weights)} tensors")
    if not is_own(flags["model"]):
        with torch.device("meta"):  # without memory: sizes that a stranger chose cost nothing
            compare(weights, build_network(SimpleNamespace(**flags), graph).state_dict())
    if best["model"] is not None:
        compare(tensors(best["model"]), weights)
    list(map(tensors, state["optimizer"].values()))


def check_flags(saved):
    """Raise unless these are all of the flags that a checkpoint keeps, with values that can be typed -> True."""
    if type(saved) is not dict or set(saved) != {*FIXED, *KEPT}:
        raise ValueError("some of its flags are missing or unknown")
    words = []
    for name, value in saved.items():
        values = value if type(value) is list and len(value) <= 64 else [value]
        if not all(v is None or is_word(v) or type(v) in (bool, float) or within(-1, 1 << 63)(v) for v in values):
            raise ValueError(f"its {spelled(name)} is no value of a flag")
        if value is not None and value is not False:
            words.append(spelled(name) + ("" if value is True else f"={text_of(value)}"))

    def refuse(message):
        raise ValueError(f"among its flags, {message}")

    parser = make_parser()
    parser.error = refuse
    args = parser.parse_args(words)
    check_network(parser, args)
    for name, value in saved.items():
        if getattr(args, name) != value:
            refuse(f"{spelled(name)} {text_of(value)} is no value that the command line accepts")
    return True


def need(values, **tests):
    """Raise unless `values` is a dict in which each of these names passes its test."""
    for name, test in tests.items():
        if type(values) is not dict or name not in values or not test(values[name]):
            raise ValueError(f"it has no sound {name}")


def within(low, end):
    """A test for `need`: a whole number from low to end - 1."""
    return lambda value: type(value) is int and low <= value < end


def is_word(value):
    """A test for `need`: text of one line."""
    return type(value) is str and len(value) < 4096 and value.isprintable()


def tensors(values):
    """`values`, which have to be a dict of tensors, none larger than the memory that it has in the file."""
    fits = lambda t: type(t) is torch.Tensor and t.nbytes <= t.untyped_storage().nbytes()  # noqa: E731
    if not isinstance(values, dict) or not all(type(name) is str and fits(value) for name, value in values.items()):
        raise ValueError("it has something else in the place of tensors")
    return values


def compare(found, expected):
    """Raise unless two dicts of tensors have the same names, shapes and kinds of numbers."""
    for name in sorted(found.keys() | expected.keys()):
        there, needed = (values[name].shape if name in values else "nothing" for values in (found, expected))
        if there != needed or found[name].is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"its tensor {name!r} is {there}, or of other numbers: {needed} is needed")


# ---------------------------------------------------------------------------------------------------------------------
# going on with a run


def complete(args):
    """Fill in the flags that the checkpoint to go on from has kept, where there is one."""
    if path := checkpoint_to_resume(args):
        adopt(args, read_checkpoint(path), path)


def adopt(args, state, path):
    """Take the flags of a checkpoint's state that were not given; refuse another value of one that is fixed."""
    for name, value in state["flags"].items():
        typed = getattr(args, name)
        if name not in args.typed:
            setattr(args, name, value)
        elif (
            name in FIXED
            and typed != value
            and not (is_own(typed) and is_own(value) or name == "edge_split" and not args.trains)
        ):
            made = f"{spelled(name)} {text_of(value)}"
            raise StoreError(f"checkpoint {path} was made with {made}, this run has {text_of(typed)}")
    if is_own(args.model) and "model" not in args.typed:
        raise StoreError(f"checkpoint {path} holds weights of {args.model}: give --model FILE.py:NAME, to be run")
    if "dataset" not in args.typed and Path(state["graph"]["path"], "meta.json").is_file():
        args.dataset = state["graph"]["path"]  # whatever --root is
    if not args.trains:
        args.early_stop = None


def common_state(ranks, args):
    """The state to go on from, the same on all ranks, whose flags it takes over -> (state, path), or (None, None).

    Machines need not share a disk: the rank that has the most advanced file gives it to the others.
    """
    path = checkpoint_to_resume(args)
    state = read_checkpoint(path) if path else None
    progress = ranks.gather((state["epoch"] << 28) + state["step"] if state else -1)
    if max(progress) < 0:
        return None, None
    path, source = path or args.checkpoint or args.resume, progress.index(max(progress))
    if ranks.world > 1:
        data = Path(path).read_bytes() if ranks.rank == source else None
        state = read_checkpoint(path, ranks.broadcast(data, source))
    adopt(args, state, path)
    return state, path


def check_graph(state, path, args, store):
    """Raise StoreError unless a store holds the graph of the checkpoint and its steps have as many seeds; to predict, a
    graph of the same widths will do, and one in which some classes do not occur."""
    blind = args.task != "graph" and args.model not in EDGE_CONVS
    for name in (name for name in WIDTHS[args.task] if not (blind and name == "edge_dim")):
        there, was = store.meta.get(name, 0), state["graph"][name]
        if there != was and (args.trains or name != "num_classes" or there > was):
            raise StoreError(f"checkpoint {path} was trained on a graph with {name} {was}, {store.path} has {there}")
    if not args.trains:
        return
    files = {name: record.get("sha256") for name, record in store.meta["files"].items()}
    was = state["graph"]["files"]
    if changed := [name for name in was if was[name] and files.get(name) not in (None, was[name])]:
        raise StoreError(f"checkpoint {path} was made with other data: {', '.join(changed)} in {store.path} is not the "
                         "same; give the graph it was trained on, or another --checkpoint to start anew")  # fmt: skip
    if state["total_batch"] != args.total_batch:
        batch = state["total_batch"] * args.batch_size // args.total_batch
        raise StoreError(f"checkpoint {path} was made with --batch-size x --accumulate x processes = "
                         f"{state['total_batch']}, this run has {args.total_batch}; give --batch-size {batch}")
    if state["step"] > args.steps:
        raise StoreError(f"checkpoint {path} is damaged: it has done {state['step']} of {args.steps} steps of an epoch")


def restore(state, path, ranks, args, model, optimizer, best):
    """Bring model, optimizer and best to a checkpoint's state, whose graph was checked -> (epoch, steps done in it)."""
    load_weights(model, state["model"], path)
    if ranks.leads and is_own(args.model) and str(state.get("code")) != args.model_digest:
        print(f"model   {args.model} is not the text that the checkpoint was made with")
    if args.trains:
        parameters = dict(enumerate(model.parameters()))
        for number, moments in state["optimizer"].items():
            shape = parameters[number].shape if number in parameters else None
            shapes = {name: value.shape for name, value in moments.items()}
            if shapes != {"step": (), "exp_avg": shape, "exp_avg_sq": shape}:
                raise StoreError(f"checkpoint {path} is damaged: the moments of parameter {number} are not Adam's")
        rates = optimizer.state_dict()["param_groups"]  # of this run's flags
        optimizer.load_state_dict({"state": state["optimizer"], "param_groups": rates})
    best.update(state["best"])
    if not best["model"]:
        best["epoch"] = state["epoch"]  # --early-stop counts from here
    return state["epoch"], state["step"]
