"""The command line of train.py: every flag, what depends on what, and what cannot work.

`parse_args` ends with code 2 and one sentence on bad input, before anything is loaded. This file needs features.py,
link.py, model.py and own_model.py.
"""

import argparse
import importlib.util
import math
import os
import re
import secrets
import shlex
import sys
from pathlib import Path

import torch

from features import MODES
from link import shares, split_type
from model import CONVS, EDGE_CONVS, NORMALISED, NORMS
from own_model import is_own, name_of, words_of

_NOT_GIVEN = object()
METRICS = {"node": ["accuracy", "roc_auc", "f1"], "link": ["mrr", "hits@1", "hits@10", "roc_auc", "ap"], "graph": []}
LINK_FLAGS = ("edge_split", "scorer", "negatives", "negatives_by", "unchecked_negatives", "link_loss", "pairs")
NOT_FOR_GRAPHS = ("fanout", "model", "norm", "residual", "input_dropout", "checkpoint_activations", "backend", "mode",
                  "cache", "lookahead")  # fmt: skip


def parse_args(argv, complete):
    """Parse the command line.

    Args:
        argv: the words behind "train.py".
        complete: function of the flags parsed so far, which fills in what the checkpoint to go on from has kept
            (`checkpoint.complete`).

    Returns:
        The flags, and beside them `typed`, the names of those that were given; `trains`, False where a checkpoint only
        predicts; `again`, the command that goes on with this run; `run`, a name for its lines in --log; `turn`, which
        of --runs it is.

    Raises:
        SystemExit: with code 2 after one sentence, for flags that cannot work.
        StoreError: for a checkpoint that cannot be gone on from.
    """
    parser, argv = make_parser(), spelled_out(map(str, argv))
    args = parser.parse_args(argv)
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), _NOT_GIVEN))))
    args.typed = [name for name, value in given.items() if value is not _NOT_GIVEN]
    from_file = args.resume not in (None, "auto")
    args.trains = not (args.predict and from_file) or not {"epochs", "checkpoint"}.isdisjoint(args.typed)
    args.run, args.again, args.turn = secrets.token_hex(4), command_again(argv), 0
    if from_file and not Path(args.resume).is_file():
        parser.error(f"--resume {args.resume}: no such file")
    if args.resume == "auto" and not args.checkpoint:
        parser.error("--resume auto goes on from the file of --checkpoint, which is not given")
    complete(args)
    check_network(parser, args)
    check_typed(parser, args)
    check_machine(parser, args)
    check_files(parser, args)
    return args


def checkpoint_to_resume(args):
    """The file to go on from, or None: --resume auto, and every restart by torchrun, mean that of --checkpoint."""
    own = args.checkpoint if args.checkpoint and Path(args.checkpoint).is_file() else None
    if args.resume == "auto":
        return own
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return own if own and restarted else args.resume


def make_parser():
    """Every flag, in groups; --help fits on two screens."""
    parser = argparse.ArgumentParser(usage="python train.py [flags]", formatter_class=_Defaults,
                                     description="Train a graph neural network by neighbour sampling.")  # fmt: skip
    count, number, from_zero = positive(int), positive(float), positive(float, zero=True)

    add = parser.add_argument_group("data").add_argument
    add("--task", default="node", choices=["node", "link", "graph"], metavar="KIND",
        help="node: classes of nodes; link: edges; graph: targets "
        "of many small graphs")  # fmt: skip
    add("--dataset", default="synthetic", metavar="NAME",
        help="synthetic, synthetic:nodes=..., a store folder, an .npz file, "
        "cora, citeseer, pubmed, ogbn-arxiv, ogbn-products, ogbn-papers100M (default: %(default)s)")  # fmt: skip
    add("--root", default="data", metavar="DIR", help="folder for downloads and built stores")
    add("--backend", default="mmap", choices=["mmap", "lmdb"], help="how a newly built store keeps features")
    add("--split", type=positive(int, zero=True), metavar="K",
        help="which of several splits to take, from 0 (default: the first; "
        "--runs: each in turn)")  # fmt: skip
    add("--symmetrize", action="store_true", help="add the reverse of every edge of an .npz file")

    add = parser.add_argument_group("sampling").add_argument
    add("--fanout", type=fanout, metavar="15,10,5",
        help="neighbours taken by each seed, then by each of those, ...; -1 takes all; "
        "PyG's order, DGL lists the same as 5,10,15 (default: 10 a layer)")  # fmt: skip
    add("--sampler", default="uniform", choices=["uniform", "labor", "weighted", "latest"], metavar="KIND",
        help="uniform; labor: seeds take the same neighbours where they can (arXiv 2210.13339); weighted: by the "
        "edges' weights; latest: the last before the seed's time")  # fmt: skip
    add("--layer-dependency", action="store_true",
        help="labor: all hops draw alike, so that a batch has fewer input rows")  # fmt: skip
    add("--batch-dependency", type=count, default=1, metavar="K",
        help="labor: K steps in a row draw alike, so that rows come again")  # fmt: skip
    add("--temporal", default="auto", choices=["auto", "at", "before", "off"], metavar="WHEN",
        help="edges that a seed sees: at its time or before, only before, off: all (default: at, where edges and nodes "
        "have times; link: off)")  # fmt: skip
    add("--batch-size", type=count, default=1024, metavar="N", help="seeds of a process in one pass")
    add("--accumulate", type=count, default=1, metavar="N", help="passes whose gradients make one optimizer step")

    add = parser.add_argument_group("model").add_argument
    add("--model", type=name_of(CONVS | EDGE_CONVS), default="sage", metavar="NAME",
        help=f"{', '.join(CONVS | EDGE_CONVS)}, or yours: FILE.py:NAME")  # fmt: skip
    add("--model-args", type=words_of, metavar="A=1,B=x",
        help="your own is NAME(features, classes, A=1, B='x') (default: none)")  # fmt: skip
    add("--hidden", type=count, default=128, metavar="N", help="width of the inner layers, all heads together")
    add("--num-layers", type=count, metavar="N", help="layers (default: one for each fanout, else 3)")
    add("--heads", type=count, default=4, metavar="N", help="attention heads of gat")
    add("--norm", choices=list(NORMS), metavar="KIND",
        help="after inner layers: none, layer, batch (default: layer for "
        f"{', '.join(NORMALISED)})")  # fmt: skip
    add("--residual", action="store_true", help="add each layer's input to its output")
    add("--dropout", type=from_zero, default=0.5, metavar="P",
        help="probability after each inner layer and of gat's attention")  # fmt: skip
    add("--input-dropout", type=from_zero, default=0.0, metavar="P", help="probability of the features (default: 0)")

    add = parser.add_argument_group("links").add_argument
    add("--edge-split", type=split_type, default="85/5/10", metavar="A/B/C",
        help="percent of edges to train, validate and test on, "
        "drawn by --seed; time:A/B/C by their time; none: train on all; or FILE.npz with valid and test "
        "[n, 2]")  # fmt: skip
    add("--scorer", default="dot", choices=["dot", "distmult", "mlp"], metavar="KIND",
        help="of two embeddings: dot, distmult, mlp")  # fmt: skip
    add("--negatives", type=count, default=1, metavar="N", help="drawn for each edge in training, none of them an edge")
    add("--negatives-by", default="uniform", choices=["uniform", "degree"], metavar="KIND",
        help="uniform, or degree: by degree^0.75")  # fmt: skip
    add("--unchecked-negatives", action="store_true", help="negatives may be edges")
    add("--link-loss", default="bce", choices=["bce", "softmax"], metavar="KIND",
        help="bce: one by one; softmax: edge among negatives")  # fmt: skip
    add("--pairs", metavar="FILE.npy", help="node ids [n, 2] whose scores --predict writes instead of embeddings")

    add = parser.add_argument_group("optimisation").add_argument
    add("--lr", type=number, default=0.003, metavar="RATE", help="Adam's learning rate")
    add("--lr-schedule", default="constant", choices=["constant", "cosine"], help="cosine: falls to 0 over --epochs")
    add("--weight-decay", type=from_zero, metavar="X", help="Adam's L2 term (default: 0.07 / training nodes)")
    add("--epochs", type=count, metavar="N",
        help="passes over the training nodes (default: 10, or 200 optimizer steps)")  # fmt: skip
    add("--metric", choices=list(dict.fromkeys(sum(METRICS.values(), []))), metavar="NAME",
        help="accuracy, roc_auc, f1 "
        "(default: accuracy, of several labels a node f1); of links mrr, hits@1, hits@10, roc_auc, ap "
        "(default: mrr)")  # fmt: skip
    add("--early-stop", type=count, metavar="N",
        help="end after N epochs without a better validation --metric and take "
        "the best epoch's weights (default: off)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="fixes weights, order, sampling and dropout")
    add("--runs", type=count, default=1, metavar="N",
        help="train with N seeds from --seed on; mean and standard deviation")  # fmt: skip
    add("--precision", choices=["fp32", "tf32", "bf16", "fp64"],
        help="of the matrix products; fp64 is for comparing runs "
        "(default: tf32 on a GPU that has it, else fp32)")  # fmt: skip
    add("--checkpoint-activations", action="store_true",
        help="compute inner layers again in the backward pass instead of "
        "keeping them: less memory, more time")  # fmt: skip

    add = parser.add_argument_group("processes and placement").add_argument
    add("--gpus", type=positive(int, zero=True), metavar="N",
        help="GPUs, one process each; 0 trains on CPU (default: 1 when "
        "there is one)")  # fmt: skip
    add("--procs", type=count, default=1, metavar="N", help="processes with --gpus 0; they share the cores")
    add("--mode", default="auto", choices=["auto", *MODES], help="where graph and features live - where training runs")
    add("--cache", type=size, default=0, metavar="4GiB",
        help="feature rows kept by each GPU (cpu-cuda, pinned-cuda) or process "
        "(cpu-cpu); others stay behind (default: none; an eighth or half of what is free if features "
        "exceed it)")  # fmt: skip
    add("--lookahead", type=positive(int, zero=True), metavar="N",
        help="on CPU keep rows used soonest in the next N batches "
        "(default: 10 caches full, or more)")  # fmt: skip
    add("--prefetch", type=positive(int, zero=True), default=2, metavar="N", help="batches prepared ahead; 0: none")
    add("--sample-threads", type=count, default=1, metavar="N", help="threads that sample and fetch")
    add("--cuda-graph", default="auto", choices=["auto", "on", "off"],
        help="a step as CUDA graphs, without the host, with "
        "features that GPUs read; off: its kernels one by one; on: say why where it cannot be")  # fmt: skip
    add("--allocator", default="tuned", choices=["tuned", "system"],
        help="tuned: on CPU freed memory is kept, on CUDA segments "
        "can grow; system: left alone")  # fmt: skip

    add = parser.add_argument_group("files").add_argument
    add("--checkpoint", metavar="FILE", help="write the run's state here after each epoch and on Ctrl-C")
    add("--checkpoint-every", type=count, metavar="STEPS", help="and after so many optimizer steps (default: off)")
    add("--resume", metavar="FILE", help="go on from a checkpoint, with its data, sampling, model and optimisation "
        "flags; auto: from that of --checkpoint, once it is there")  # fmt: skip
    add("--predict", metavar="FILE.npy", help="write exact predictions for every node; with --resume FILE nothing is "
        "trained unless --epochs or --checkpoint is given")  # fmt: skip
    add("--predict-what", default="classes", choices=["classes", "scores", "logits", "embeddings"], metavar="KIND",
        help="classes, "
        "int64 [V]; scores (probabilities), logits, float32 [V, classes]; embeddings: what the last layer is given, "
        "[V, hidden]")  # fmt: skip
    add("--log", "--log-file", metavar="FILE", help="append JSON lines: the flags, then each epoch (under torchrun "
        "write --log-file)")  # fmt: skip
    add("--tensorboard", metavar="DIR", help="write the epochs' figures for TensorBoard")
    add("--timeline", metavar="FILE.png", help="draw the first steps of the second epoch as a Gantt chart")
    add("--profile", metavar="FILE", help="write a torch.profiler trace of the second epoch, FILE.rank0.json and so on")
    return parser


def check_network(parser, args):
    """Fill in what depends on other flags; refuse a network and a way to train it that cannot work, on any machine."""
    if is_own(args.model):
        for flag in ("hidden",) * (args.task != "link") + (
            "heads",
            "norm",
            "residual",
            "dropout",
            "input_dropout",
            "checkpoint_activations",
        ):
            if getattr(args, flag) not in (parser.get_default(flag), "none"):
                parser.error(
                    f"{spelled(flag)} is for the built-in models; give {args.model} what it needs by --model-args"
                )
        if args.task == "graph":
            parser.error(f"--model {args.model} is for --task node")
        if args.predict_what == "embeddings":
            parser.error(f"--predict-what embeddings is for the built-in models, --model is {args.model}; take logits")
    elif args.model_args:
        parser.error(f"--model-args {text_of(args.model_args)} is for --model FILE.py:NAME, --model is {args.model}")
    args.norm = args.norm or ("layer" if args.model in NORMALISED else "none")
    if args.fanout is None:
        args.fanout = [10] * (args.num_layers or 3)
    args.num_layers = args.num_layers or len(args.fanout)
    if len(args.fanout) != args.num_layers:
        parser.error(f"--fanout {text_of(args.fanout)} has {len(args.fanout)} hops, --num-layers is "
                     f"{args.num_layers}; give one fanout for each layer")  # fmt: skip
    for flag in ("dropout", "input_dropout"):
        if getattr(args, flag) >= 1:
            parser.error(f"{spelled(flag)} {getattr(args, flag)} must be below 1")
    if args.model == "gat" and args.hidden % args.heads:
        parser.error(
            f"--hidden {args.hidden} cannot be shared by --heads {args.heads}; give a multiple of {args.heads}"
        )
    if args.norm == "batch" and args.checkpoint_activations:
        parser.error("--checkpoint-activations would count each batch twice in --norm batch; use --norm layer")
    for flag, off in (("layer_dependency", False), ("batch_dependency", 1)):
        if args.sampler != "labor" and getattr(args, flag) != off:
            parser.error(f"{spelled(flag)} is for --sampler labor, --sampler is {args.sampler}")
    for flag, off in (("sampler", "uniform"), ("temporal", "auto")):
        if args.task == "graph" and getattr(args, flag) != off:
            parser.error(f"--{flag} {getattr(args, flag)} is for --task node")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: give a whole number from 0 to 2^63 - 1")
    for flag in LINK_FLAGS:
        if args.task != "link" and getattr(args, flag) != parser.get_default(flag):
            parser.error(f"{spelled(flag)} {getattr(args, flag)} is for --task link, --task is {args.task}")
    if args.metric and args.metric not in METRICS[args.task]:
        known = ", ".join(METRICS[args.task]) or "none"
        parser.error(f"--metric {args.metric}: --task {args.task} has {known}")
    for flag in ("early_stop", "split"):
        if args.task == "graph" and getattr(args, flag) is not None:
            parser.error(f"{spelled(flag)} {getattr(args, flag)} is for --task node")
    if args.task == "link" and args.split is not None:
        parser.error(f"--split {args.split} is for --task node: --task link has --edge-split")
    if args.task == "link" and args.temporal == "auto":
        args.temporal = "off"
    if args.task == "link" and args.early_stop and (shares(args.edge_split) or [0, 1])[1] == 0:
        parser.error(
            f"--early-stop {args.early_stop} goes by validation edges: --edge-split {args.edge_split} has none"
        )
    if args.task == "graph" and args.precision == "fp64":
        parser.error("--precision fp64 is for --task node; use fp32 or bf16")


def check_typed(parser, args):
    """Refuse what was typed and would have no effect."""
    for flag in NOT_FOR_GRAPHS:
        if args.task == "graph" and flag in args.typed and getattr(args, flag) != parser.get_default(flag):
            value = text_of(getattr(args, flag))
            parser.error(f"{spelled(flag)} {value} has no effect with --task graph: leave it out")
    if args.model != "gat" and "heads" in args.typed:
        parser.error(f"--heads {args.heads} is for --model gat, --model is {args.model}")


def check_machine(parser, args):
    """Decide on GPUs; refuse what this machine or this place for the features cannot do."""
    if args.cache and args.mode == "cuda-cuda":
        parser.error("--cache is for features outside of GPU memory; --mode cuda-cuda has all of them there")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.gpus is None:
        args.gpus = min(there, 1) if args.procs == 1 and args.mode != "cpu-cpu" else 0
    if args.gpus > there:
        works = f"at most {there}" if there else "--gpus 0"
        parser.error(f"--gpus {args.gpus}: this machine has {there} usable; give {works}")
    if args.gpus and args.procs > 1:
        parser.error(f"--procs {args.procs} is for --gpus 0; with GPUs there is one process for each")
    if args.cuda_graph == "on" and not args.gpus:
        parser.error("--cuda-graph on needs a CUDA GPU and --gpus 1 or more; leave it out on CPU")
    if args.mode.endswith("cuda") and not args.gpus:
        parser.error(f"--mode {args.mode} needs a CUDA GPU and --gpus 1 or more; --mode cpu-cpu works here")
    if args.mode == "cpu-cpu" and args.gpus:
        parser.error(f"--mode cpu-cpu trains on CPU: give --gpus 0 instead of --gpus {args.gpus}")
    if args.precision == "tf32" and not args.gpus and "precision" in args.typed:  # a checkpoint's means fp32 on CPU
        parser.error("--precision tf32 needs a CUDA GPU; use fp32 or bf16 on CPU")


def check_files(parser, args):
    """Refuse files that cannot be written, and flags about them that would have no effect."""
    for flag, off in (("predict", None), ("runs", 1)):
        if args.task == "graph" and getattr(args, flag) != off:
            parser.error(f"--{flag} {getattr(args, flag)} is for --task node")
    for flag in ("checkpoint", "resume", "predict", "timeline", "profile"):
        if args.runs > 1 and getattr(args, flag):
            parser.error(f"--{flag} {getattr(args, flag)} is for one run, --runs is {args.runs}")
    for flag in ("timeline", "profile"):
        if getattr(args, flag) and not args.trains:
            parser.error(f"--{flag} {getattr(args, flag)} shows training; --resume FILE with --predict trains nothing")
    if args.pairs and not args.predict:
        parser.error(f"--pairs {args.pairs} needs --predict FILE.npy to write their scores to")
    if args.task == "link" and "predict_what" in args.typed:
        parser.error(f"--predict-what {args.predict_what} is for --task node: --task link writes embeddings, or "
                     "scores of --pairs")  # fmt: skip
    for flag in ("checkpoint", "predict", "log", "timeline", "profile"):
        if getattr(args, flag) is None:
            continue
        path = Path(getattr(args, flag)).absolute()
        if not path.parent.is_dir():
            parser.error(f"--{flag} {getattr(args, flag)}: the folder {path.parent} does not exist")
        in_place = path.exists() and (flag == "log" or not path.is_file())  # other files are replaced, in their folder
        if path.is_dir() or not os.access(path if in_place else path.parent, os.W_OK):
            parser.error(f"--{flag} {getattr(args, flag)}: a file cannot be written there")
    if args.predict and not args.predict.endswith(".npy"):
        parser.error(f"--predict {args.predict}: an array is written as .npy; give a name that ends in .npy")
    if args.predict_what == "embeddings" and args.num_layers == 1:
        parser.error("--predict-what embeddings: with --num-layers 1 the last layer is given the features; take them")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs tensorboard: pip install tensorboard")
    if args.timeline and not args.timeline.endswith(".png"):
        parser.error(f"--timeline {args.timeline}: the picture is a PNG; give a name that ends in .png")
    if args.timeline and importlib.util.find_spec("matplotlib") is None:
        parser.error("--timeline needs matplotlib: pip install matplotlib")
    for flag, needs in (("checkpoint_every", "checkpoint"), ("predict_what", "predict")):
        if flag in args.typed and not getattr(args, needs):
            parser.error(f"{spelled(flag)} {getattr(args, flag)} needs --{needs} FILE to write to")


def command_again(argv):
    """The command line that goes on with the run of `argv` once its --checkpoint is there."""
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
    """--batch_size 8 -> --batch-size 8; --gpu-cache -> --cache; --fanout -1,5 -> --fanout=-1,5, which argparse would
    take for a flag."""
    words = []
    for word in argv:
        if words and words[-1] == "--fanout":
            words[-1] += f"={word}"
        else:
            name, equals, value = word.partition("=")
            name = name.replace("_", "-").replace("--gpu-cache", "--cache")  # what it is called elsewhere
            words.append(name + equals + value if word.startswith("--") else word)
    return words


def fanout(text):
    """Parse '15,10,5'."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or any(k == 0 or k < -1 for k in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: write positive numbers, or -1 for all neighbours, as in 15,10,5")
    return numbers


def size(text):
    """Parse '4GiB', '512MiB' or a number of bytes."""
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9, "": 1}
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    try:
        return int(float(found[1]) * units[found[2]])
    except (TypeError, KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write it as 4GiB, 512MiB or a number of bytes"
        ) from None


def positive(kind, zero=False):
    """An argparse type: a finite number above 0 (or from 0 on); a whole one below 2^31."""

    def parse(text):
        try:
            number = kind(text)
        except ValueError:
            number = None
        limit = 2**31 if kind is int else math.inf
        if number is None or not (0 <= number < limit) or (number == 0 and not zero):
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {word} {'of at least' if zero else 'above'} 0"
                                             f"{' and below 2^31' if kind is int and number else ''}")  # fmt: skip
        return number

    return parse


class _Defaults(argparse.HelpFormatter):
    """Show a default where there is one to show."""

    def _get_help_string(self, action):
        says = action.help and "default" not in action.help and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if says else action.help
