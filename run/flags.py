"""train.py's command line: every flag, defaults that depend on others, combinations that cannot work.

`parse_args` exits with code 2 and one sentence on bad input, before anything is loaded.
"""

import argparse
import importlib.util
import math
import os
import re
import secrets
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import torch

from ddp import under_torchrun
from disk.files import check_name
from features import MODES
from model import AVERAGING, CONVS, EDGE_CONVS, NORMALISED, NORMS, RESIDUAL
from run.own_model import is_own, name_of, words_of
from tasks.link import shares, split_type

METRICS = {
    "node": ["accuracy", "roc_auc", "f1"],
    "link": ["mrr", "hits@1", "hits@10", "roc_auc", "ap"],
    "graph": [],
}
LINK = "edge_split scorer negatives negatives_by unchecked_negatives link_loss pairs"
BUILT_IN = "heads norm residual dropout input_dropout checkpoint_activations"
NOT_GRAPH = "fanout model norm residual input_dropout checkpoint_activations backend mode cache"


def parse_args(argv, complete):
    """Parse the command line.

    Args:
        argv: the words after "train.py".
        complete: function of the flags parsed so far that fills in those of the checkpoint to
            resume (`checkpoint.complete`).

    Returns:
        The flags, and beside them `typed`, the names of those on the command line; `trains`, False
        where a checkpoint only predicts; `again`, the command that resumes this run; `run`, a name
        for its lines in --log; `turn`, which of --runs it is.

    Raises:
        SystemExit: with code 2 after one sentence, for flags that cannot work.
        StoreError: for a checkpoint that cannot be resumed.
    """
    parser, argv = make_parser(), spelled_out(map(str, argv))
    args = parser.parse_args(argv)
    absent = object()
    again = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), absent)))
    args.typed = [name for name, value in vars(again).items() if value is not absent]
    from_file = args.resume not in (None, "auto")
    args.trains = not (
        args.predict and from_file and {"epochs", "checkpoint"}.isdisjoint(args.typed)
    )
    args.run, args.again, args.turn = secrets.token_hex(4), command_again(argv), 0
    if from_file and not os.path.isfile(args.resume):
        parser.error(f"--resume {args.resume}: no such file")
    if args.resume == "auto" and not args.checkpoint:
        parser.error("--resume auto takes the file of --checkpoint, which is missing")
    complete(args)
    fill_in(args)
    check_values(parser, args)
    check_files(parser, args)
    check_effects(parser, args)
    return args


def checkpoint_to_resume(args):
    """The checkpoint to resume, or None; --resume auto, and a restart by torchrun, mean --checkpoint."""
    own = args.checkpoint if args.checkpoint and os.path.isfile(args.checkpoint) else None
    if args.resume == "auto":
        return own
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return own if own and restarted else args.resume


def make_parser():
    """Every flag, in groups; --help fits on two screens."""
    parser = argparse.ArgumentParser(
        usage="python train.py [flags]",
        formatter_class=_Help,
        description="Train a graph neural network by neighbour sampling.",
    )
    count, rate, from_zero = positive(int), positive(float), positive(float, zero=True)
    probability, count_from_zero = positive(float, zero=True, below=1), positive(int, zero=True)

    def group(title):
        add = parser.add_argument_group(title).add_argument
        return add, lambda flag, *choices: add(flag, default=choices[0], choices=choices)

    add, choose = group("data")
    choose(
        "--task", "node", "link", "graph"
    ).help = "node: classes of nodes; link: edges; graph: targets of many small graphs"
    add("--dataset", default="synthetic", metavar="NAME").help = (
        "synthetic, synthetic:nodes=..., a store folder, an .npz file, cora, citeseer, pubmed, "
        "ogbn-arxiv, ogbn-products, ogbn-papers100M (default: %(default)s)"
    )
    add("--root", default="data", metavar="DIR").help = "folder for downloads and built stores"
    choose("--backend", "mmap", "lmdb").help = "how a newly built store keeps features"
    add(
        "--split", type=count_from_zero
    ).help = "which of several splits, from 0 (default: the first; --runs: each in turn)"
    add("--symmetrize", action="store_true").help = "add the reverse of every edge of an .npz file"
    add("--drop-duplicates", action="store_true").help = "keep one of equal edges of such a file"

    add, choose = group("sampling")
    add("--fanout", type=fanout, metavar="15,10,5").help = (
        "neighbours taken by each seed, then by each of those, ...; -1 takes all; PyG's order, "
        "DGL lists the same as 5,10,15 (default: 10 a layer)"
    )
    choose("--sampler", "uniform", "labor", "weighted", "latest").help = (
        "labor: seeds share neighbours where they can (arXiv 2210.13339); weighted: by edge weight; "
        "latest: the last before the seed's time"
    )
    add(
        "--layer-dependency", action="store_true"
    ).help = "labor: all hops draw alike, so that a batch has fewer input rows"
    add(
        "--batch-dependency", type=count, default=1
    ).help = "labor: N steps in a row draw alike, so that rows are needed again"
    choose("--temporal", "auto", "at", "before", "off").help = (
        "edges that a seed sees: at its time or before, only before, off: all (default: at, where "
        "edges and nodes have times; link: off)"
    )
    add("--batch-size", type=count, default=1024).help = "seeds of a process in one pass"
    add("--accumulate", type=count, default=1).help = "passes of an optimizer step"

    add, choose = group("model")
    add(
        "--model", type=name_of(CONVS | EDGE_CONVS), default="sage", metavar="NAME"
    ).help = f"{', '.join(CONVS | EDGE_CONVS)}, or yours: FILE.py:NAME"
    add(
        "--model-args", type=words_of, metavar="A=1,B=x"
    ).help = "yours is NAME(features, classes, A=1, B='x') (default: none)"
    add("--hidden", type=count, default=128).help = "width of the inner layers, all heads together"
    add("--num-layers", type=count).help = "layers (default: one for each fanout, else 3)"
    add("--heads", type=count, default=4).help = "attention heads of gat"
    add(
        "--norm", choices=list(NORMS)
    ).help = f"after inner layers (default: layer for {', '.join(NORMALISED)}, else none)"
    add("--residual", action=argparse.BooleanOptionalAction).help = (
        f"add each layer's input to its output (default: for {', '.join(RESIDUAL)}; for "
        f"{', '.join(AVERAGING)} where neighbours' classes hardly agree)"
    )
    add(
        "--dropout", type=probability, default=0.5, metavar="P"
    ).help = "probability after each inner layer and of gat's attention"
    add(
        "--input-dropout", type=probability, default=0.0, metavar="P"
    ).help = "probability of the features (default: 0)"

    add, choose = group("links")
    add("--edge-split", type=split_type, default="85/5/10", metavar="A/B/C").help = (
        "percent of edges to train, validate and test on, drawn by --seed; time:A/B/C by their "
        "time; none: train on all; or FILE.npz with valid and test [n, 2]"
    )
    choose("--scorer", "dot", "distmult", "mlp").help = "of two embeddings"
    add("--negatives", type=count, default=1).help = "drawn for each training edge, none an edge"
    choose("--negatives-by", "uniform", "degree").help = "degree: by degree^0.75"
    add("--unchecked-negatives", action="store_true").help = "negatives may be edges"
    choose("--link-loss", "bce", "softmax").help = "bce: one by one; softmax: edge among negatives"
    add(
        "--pairs", metavar="FILE.npy"
    ).help = "node ids [n, 2] whose scores --predict writes instead of embeddings"

    add, choose = group("optimisation")
    add("--lr", type=rate, default=0.003, metavar="RATE").help = "Adam's learning rate"
    choose("--lr-schedule", "constant", "cosine").help = "cosine: falls to 0 over --epochs"
    add(
        "--weight-decay", type=from_zero, metavar="X"
    ).help = "Adam's L2 term (default: 0.07 / training nodes)"
    add("--epochs", type=count).help = "default: 10, or 200 optimizer steps"
    add("--metric", choices=list(dict.fromkeys(sum(METRICS.values(), []))), metavar="NAME").help = (
        "accuracy, roc_auc, f1 (default: accuracy, of several labels a node f1); of links mrr, "
        "hits@1, hits@10, roc_auc, ap (default: mrr)"
    )
    add("--early-stop", type=count).help = (
        "end after N epochs without a better validation --metric, keep the best epoch's weights "
        "(default: off)"
    )
    add("--weights", choices=["best", "last"]).help = (
        "which to keep at the end: of the epoch with the best validation --metric, or the last "
        "(default: best; last for links and graphs, and without validation nodes)"
    )
    add(
        "--seed", type=positive(int, zero=True, below=2**63), default=0
    ).help = "fixes weights, order, sampling and dropout"
    add("--runs", type=count, default=1).help = "train with N seeds; mean and standard deviation"
    add("--precision", choices=["fp32", "tf32", "bf16", "fp64"]).help = (
        "of matrix products; fp64 is for comparing runs (default: tf32 on a GPU that has it, else "
        "fp32)"
    )
    add(
        "--checkpoint-activations", action="store_true"
    ).help = "recompute inner layers in the backward pass: less memory, more time"

    add, choose = group("processes and placement")
    add(
        "--gpus", type=count_from_zero
    ).help = "GPUs, one process each; 0 trains on CPU (default: 1 when there is one)"
    add("--procs", type=count, default=1).help = "processes with --gpus 0; they share the cores"
    choose("--mode", "auto", *MODES).help = "where graph and features live - where training runs"
    add("--cache", type=size, default=0, metavar="4GiB").help = (
        "feature rows kept by each GPU (cpu-cuda, pinned-cuda) or process (cpu-cpu) (default: "
        "none; an eighth or half of what is free if features exceed it)"
    )
    add(
        "--lookahead", type=count_from_zero
    ).help = (
        "on CPU keep pages used soonest in the next N batches (default: enough to use each twice)"
    )
    add("--prefetch", type=count_from_zero, default=2).help = "batches prepared ahead; 0: none"
    add("--sample-threads", type=count, default=1).help = "threads that sample and fetch"
    choose("--cuda-graph", "auto", "on", "off").help = (
        "a step as CUDA graphs where GPUs read the features; off: kernels launched one by one; on: "
        "say why where it cannot be"
    )
    choose(
        "--allocator", "tuned", "system"
    ).help = "tuned: on CPU freed memory is kept, on CUDA segments can grow; system: left alone"

    add, choose = group("files")
    add(
        "--checkpoint", metavar="FILE"
    ).help = "write the run's state here after each epoch and on Ctrl-C"
    add("--checkpoint-every", type=count).help = "and after N optimizer steps (default: off)"
    add("--resume", metavar="FILE").help = (
        "continue from a checkpoint, with its data, sampling, model and optimisation flags; auto: "
        "from that of --checkpoint, once it exists"
    )
    add("--predict", metavar="FILE.npy").help = (
        "write exact predictions for every node; with --resume FILE nothing is trained unless "
        "--epochs or --checkpoint is given"
    )
    choose("--predict-what", "classes", "scores", "logits", "embeddings").help = (
        "classes, int64 [V]; scores (probabilities), logits, float32 [V, classes]; embeddings: "
        "the last layer's input, [V, hidden]"
    )
    add(
        "--log", "--log-file", metavar="FILE"
    ).help = "append JSON lines: the flags, then each epoch (under torchrun write --log-file)"
    add("--tensorboard", metavar="DIR").help = "write the epochs' figures for TensorBoard"
    add(
        "--timeline", metavar="FILE.png"
    ).help = "draw the first steps of the second epoch as a Gantt chart"
    add(
        "--profile", metavar="FILE"
    ).help = "write a torch.profiler trace of the second epoch, FILE.rank0.json and so on"
    return parser


def fill_in(args):
    """Choose what the command line leaves open and other flags decide."""
    args.norm = args.norm or ("layer" if args.model in NORMALISED else "none")
    if args.residual is None and (args.model not in AVERAGING or args.task != "node"):
        args.residual = args.model in RESIDUAL and args.task != "graph"  # else the graph decides
    args.fanout = args.fanout or [10] * (args.num_layers or 3)
    args.num_layers = args.num_layers or len(args.fanout)
    if args.task == "link" and args.temporal == "auto":
        args.temporal = "off"
    if args.gpus is None:
        args.gpus = min(gpus_here(), 1) if args.procs == 1 and args.mode != "cpu-cpu" else 0


def gpus_here():
    """The number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_values(parser, args):
    """Refuse a network, or a way to train it, that cannot work on any machine."""
    if len(args.fanout) != args.num_layers:
        parser.error(
            f"--fanout {text_of(args.fanout)} has {len(args.fanout)} hops, --num-layers is "
            f"{args.num_layers}; give one fanout for each layer"
        )
    if args.model == "gat" and args.hidden % args.heads:
        parser.error(
            f"--hidden {args.hidden} cannot be shared by --heads {args.heads}; give a multiple of "
            f"{args.heads}"
        )
    if args.norm == "batch" and args.checkpoint_activations:
        parser.error(
            "--checkpoint-activations would count each batch twice in --norm batch; use --norm layer"
        )
    if args.metric and args.metric not in METRICS[args.task]:
        known = ", ".join(METRICS[args.task]) or "none"
        parser.error(f"--metric {args.metric}: --task {args.task} has {known}")
    if args.task == "link" and args.early_stop and (shares(args.edge_split) or [0, 1])[1] == 0:
        parser.error(
            f"--early-stop {args.early_stop} goes by validation edges: --edge-split "
            f"{args.edge_split} has none"
        )


def check_effects(parser, args):
    """Refuse flags that were typed and can have no effect, or not the one they name, in this run."""
    own, on_gpu = is_own(args.model), args.gpus > 0
    graph, link = args.task == "graph", args.task == "link"
    embeddings = args.predict_what == "embeddings"
    here = gpus_here()

    def refuse(where, flags, why):
        for flag in flags.split() if where else ():
            value = getattr(args, flag)
            # the defaults of these two are no "off"
            off = value == parser.get_default(flag) and flag not in ("heads", "predict_what")
            if flag in args.typed and not off:
                shown = spelled(flag if value is not False else f"no_{flag}")
                shown += "" if type(value) is bool else f" {text_of(value)}"
                parser.error(f"{shown} {why.format(**vars(args))}")

    missing = lambda library: importlib.util.find_spec(library) is None  # noqa: E731
    refuse(not link, LINK, "is for --task link, --task is {task}")
    refuse(graph, f"{NOT_GRAPH} lookahead", "has no effect with --task graph: leave it out")
    refuse(graph, "sampler temporal early_stop weights split predict runs", "is for --task node")
    why = "contradicts --early-stop {early_stop}, which takes the best epoch's"
    refuse(args.early_stop and args.weights == "last", "weights", why)
    refuse(graph and args.precision == "fp64", "precision", "is for --task node")
    refuse(link, "split", "is for --task node: --task link has --edge-split")
    why = "is for --task node: --task link writes embeddings, or scores of --pairs"
    refuse(link, "predict_what", why)
    refuse(not args.predict, "predict_what", "needs --predict FILE to write to")
    refuse(not args.predict, "pairs", "needs --predict FILE.npy to write their scores to")
    refuse(not args.checkpoint, "checkpoint_every", "needs --checkpoint FILE to write to")
    why = "is for the built-in models; give {model} what it needs by --model-args"
    refuse(own, BUILT_IN if link else f"{BUILT_IN} hidden", why)
    why = "is for the built-in models, --model is {model}; take logits"
    refuse(own and embeddings, "predict_what", why)
    why = "would be the features with --num-layers 1"
    refuse(embeddings and args.num_layers == 1, "predict_what", why)
    refuse(not own, "model_args", "is for --model FILE.py:NAME, --model is {model}")
    refuse(args.model != "gat", "heads", "is for --model gat, --model is {model}")
    why = "is for --sampler labor, --sampler is {sampler}"
    refuse(args.sampler != "labor", "layer_dependency batch_dependency", why)
    why = "is for one run, --runs is {runs}"
    refuse(args.runs > 1, "checkpoint resume predict timeline profile", why)
    why = "shows training; --resume FILE with --predict trains nothing"
    refuse(not args.trains, "timeline profile", why)
    refuse(here == 0 < args.gpus, "gpus", "needs CUDA; leave it out to train on CPU")
    refuse(args.gpus > here, "gpus", f"is more than this machine has; give at most {here}")
    refuse(on_gpu, "procs", "is for --gpus 0; with GPUs there is one process for each")
    why = "has no effect under torchrun, which starts the processes: use its --nproc-per-node"
    refuse(under_torchrun(), "procs", why)
    needs_gpu = "needs a CUDA GPU and --gpus 1 or more; leave it out on CPU"
    refuse(args.cuda_graph == "on" and not on_gpu, "cuda_graph", needs_gpu)
    refuse(args.mode.endswith("cuda") and not on_gpu, "mode", needs_gpu)
    refuse(args.precision == "tf32" and not on_gpu, "precision", needs_gpu)
    refuse(args.mode == "cpu-cpu" and on_gpu, "mode", "trains on CPU: leave out --gpus {gpus}")
    why = "is for features outside of GPU memory; --mode cuda-cuda has all of them there"
    refuse(args.mode == "cuda-cuda", "cache", why)
    refuse(missing("tensorboard"), "tensorboard", "needs: pip install tensorboard")
    refuse(missing("matplotlib"), "timeline", "needs: pip install matplotlib")


def check_files(parser, args):
    """Refuse names of files that cannot be written."""
    for flag in ("checkpoint", "predict", "log", "timeline", "profile"):
        name, suffix = getattr(args, flag), {"predict": ".npy", "timeline": ".png"}.get(flag, "")
        if name is None:
            continue
        path = Path(name).absolute()
        check_name(path)
        if not name.endswith(suffix):
            parser.error(f"--{flag} {name}: give a name that ends in {suffix}")
        if not path.parent.is_dir():
            parser.error(f"--{flag} {name}: the folder {path.parent} does not exist")
        # other files than --log are written beside it and renamed
        in_place = path.exists() and (flag == "log" or not path.is_file())
        if path.is_dir() or not os.access(path if in_place else path.parent, os.W_OK):
            parser.error(f"--{flag} {name}: a file cannot be written there")


def command_again(argv):
    """The command line that resumes the run of `argv` from its --checkpoint."""
    words = [word for word in argv if not word.startswith("--resume=")]
    if "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    program = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    launcher = "torchrun [its flags]" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    return f"{launcher} {shlex.join([program, *words, '--resume', 'auto'])}"


def spelled(name):
    """batch_size -> --batch-size."""
    return f"--{name.replace('_', '-')}"


def text_of(value):
    """A flag's value as it is typed: [15, 10] -> 15,10."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def spelled_out(argv):
    """--batch_size 8 -> --batch-size 8; --gpu-cache (DGL's name) -> --cache; --fanout -1,5 ->
    --fanout=-1,5, which argparse would take for a flag."""
    words = []
    for word in argv:
        if words and words[-1] == "--fanout":
            words[-1] += f"={word}"
        elif word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-").replace("--gpu-cache", "--cache") + equals + value)
        else:
            words.append(word)
    return words


def fanout(text):
    """Parse '15,10,5'."""
    with suppress(ValueError):
        numbers = [int(part) for part in text.split(",")]
        if all(k > 0 or k == -1 for k in numbers):
            return numbers
    raise argparse.ArgumentTypeError(
        f"{text!r}: write positive numbers, or -1 for all neighbours, as in 15,10,5"
    )


def size(text):
    """Parse '4GiB', '512MiB' or a number of bytes."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "": 1}
    number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", text.strip().lower(), re.DOTALL).groups()
    with suppress(KeyError, ValueError):
        return int(float(number) * units[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB, 512MiB or bytes")


def positive(kind, zero=False, below=None):
    """An argparse type: a finite number above 0 (or from 0 on); whole numbers are below 2^31."""
    below = below or (2**31 if kind is int else math.inf)

    def parse(text):
        with suppress(ValueError):
            if 0 < (value := kind(text)) < below or zero and value == 0:
                return value
        what = "whole number" if kind is int else "number"
        limit = f" and below {below}" if below < math.inf else ""
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a {what} {'of at least' if zero else 'above'} 0{limit}"
        )

    return parse


class _Help(argparse.HelpFormatter):
    """Shows defaults; N stands for a number."""

    def _get_default_metavar_for_optional(self, action):
        return "N"

    def _get_help_string(self, action):
        hidden = (None, False, argparse.SUPPRESS)
        shown = action.help and "default" not in action.help and action.default not in hidden
        return f"{action.help} (default: %(default)s)" if shown else action.help
