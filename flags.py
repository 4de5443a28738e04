"""The command line of train.py: every flag, what depends on what, and what cannot work.

`parse_args` exits with code 2 and one sentence on bad input, before anything is loaded. This file needs checkpoint.py,
features.py and model.py.
"""

import argparse
import importlib.util
import os
import re
from pathlib import Path

import torch

from checkpoint import checkpoint_to_resume, flags_of_checkpoint
from features import MODES
from model import CONVS


def parse_args(argv):
    """Parse the command line; argparse exits with code 2 and one line on bad input."""
    parser, argv = make_parser(), spelled_out(argv)
    args = parser.parse_args(argv)
    if path := checkpoint_to_resume(args):  # what the checkpoint fixes need not be said again
        parser.set_defaults(**flags_of_checkpoint(path))
        args = parser.parse_args(argv)
    check_args(parser, args)
    return args


def make_parser():
    """Every flag, in groups; --help fits on two screens."""
    parser = argparse.ArgumentParser(usage="python train.py [flags]", formatter_class=_Defaults,
                                     description="Train a graph neural network by neighbour sampling.")  # fmt: skip
    count, number, from_zero = positive(int), positive(float), positive(float, zero=True)

    add = parser.add_argument_group("data").add_argument
    add("--task", default="node", choices=["node", "graph"], help="classes of nodes, or targets of many small graphs")
    add("--dataset", default="synthetic", metavar="NAME", help="synthetic, synthetic:nodes=..., a store folder, an .npz file, "
        "cora, citeseer, pubmed, ogbn-arxiv, ogbn-products, ogbn-papers100M (default: %(default)s)")  # fmt: skip
    add("--root", default="data", metavar="DIR", help="folder for downloads and built stores")
    add("--backend", default="mmap", choices=["mmap", "lmdb"], help="how a newly built store keeps features")

    add = parser.add_argument_group("sampling").add_argument
    add("--fanout", type=fanout, metavar="15,10,5", help="neighbours taken by each seed, then by each of those, ...; -1 takes all; "
        "PyG's order, DGL lists the same as 5,10,15 (default: 10 a layer)")  # fmt: skip
    add("--batch-size", type=count, default=1024, metavar="N", help="seeds of a process in one pass")
    add("--accumulate", type=count, default=1, metavar="N", help="passes whose gradients make one optimizer step")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="sage", choices=list(CONVS), help="GraphSAGE (mean or max-pooling), GCN, GATv2, GIN")
    add("--hidden", type=count, default=128, metavar="N", help="width of the inner layers, all heads together")
    add("--num-layers", type=count, metavar="N", help="layers (default: one for each fanout, else 3)")
    add("--heads", type=count, default=4, metavar="N", help="attention heads of gat")
    add("--norm", default="none", choices=["none", "layer", "batch"], help="after each inner layer")
    add("--residual", action="store_true", help="add each layer's input to its output")
    add("--dropout", type=from_zero, default=0.5, metavar="P", help="probability after each inner layer and of gat's attention")
    add("--input-dropout", type=from_zero, default=0.0, metavar="P", help="probability of the features (default: 0)")

    add = parser.add_argument_group("optimisation").add_argument
    add("--lr", type=number, default=0.003, metavar="RATE", help="Adam's learning rate")
    add("--lr-schedule", default="constant", choices=["constant", "cosine"], help="cosine: falls to 0 over --epochs")
    add("--weight-decay", type=from_zero, default=0.0, metavar="X", help="Adam's L2 term (default: 0)")
    add("--epochs", type=count, default=10, metavar="N", help="passes over the training nodes")
    add("--early-stop", type=count, metavar="N", help="end after N epochs without a better sampled validation accuracy and take "
        "the best epoch's weights (default: off)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="fixes weights, order, sampling and dropout")
    add("--runs", type=count, default=1, metavar="N", help="train with N seeds from --seed on; mean and standard deviation")
    add("--precision", choices=["fp32", "tf32", "bf16", "fp64"], help="of the matrix products; fp64 is for comparing runs "
        "(default: tf32 on a GPU that has it, else fp32)")  # fmt: skip
    add("--checkpoint-activations", action="store_true", help="compute inner layers again in the backward pass instead of "
        "keeping them: less memory, more time")  # fmt: skip

    add = parser.add_argument_group("processes and placement").add_argument
    add("--gpus", type=positive(int, zero=True), metavar="N", help="GPUs, one process each; 0 trains on CPU (default: 1 when "
        "there is one)")  # fmt: skip
    add("--procs", type=count, default=1, metavar="N", help="processes with --gpus 0; they share the cores")
    add("--mode", default="auto", choices=["auto", *MODES], help="where graph and features live - where training runs")
    add("--gpu-cache", "--cache", dest="cache", type=size, default=0, metavar="4GiB", help="memory for the hottest feature rows: "
        "of each GPU in mode cpu-cuda, of the host before an lmdb store in mode cpu-cpu (default: none)")  # fmt: skip
    add("--prefetch", type=positive(int, zero=True), default=2, metavar="N", help="batches prepared ahead; 0: none")
    add("--sample-threads", type=count, default=1, metavar="N", help="threads that sample and fetch")
    add("--allocator", default="tuned", choices=["tuned", "system"], help="tuned: on CPU freed memory is kept, on CUDA segments "
        "can grow; system: as it comes")  # fmt: skip

    add = parser.add_argument_group("files").add_argument
    add("--checkpoint", metavar="FILE", help="write the run's state here after each epoch and on Ctrl-C")
    add("--checkpoint-every", type=count, metavar="STEPS", help="and after so many optimizer steps (default: off)")
    add("--resume", metavar="FILE", help="go on from a checkpoint; data, sampling and model flags are the checkpoint's; auto: "
        "from that of --checkpoint, once it is there")  # fmt: skip
    add("--predict", metavar="FILE.npy", help="write the class of every node, int64 [V], from exact inference; with --resume nothing "
        "is trained")  # fmt: skip
    add("--log", "--log-file", metavar="FILE", help="append one JSON line an epoch (under torchrun write --log-file)")
    add("--tensorboard", metavar="DIR", help="write the epochs' figures for TensorBoard")
    add("--timeline", metavar="FILE.png", help="draw the first steps of the second epoch as a Gantt chart")
    add("--profile", metavar="FILE", help="write a torch.profiler trace of the second epoch, one a rank")
    return parser


def check_args(parser, args):
    """Fill in what depends on other flags and on the machine; refuse what cannot work, before anything is loaded."""
    if args.fanout is None:
        args.fanout = [10] * (args.num_layers or 3)
    args.num_layers = args.num_layers or len(args.fanout)
    if len(args.fanout) != args.num_layers:
        parser.error(f"--fanout {','.join(map(str, args.fanout))} has {len(args.fanout)} hops, --num-layers is "
                     f"{args.num_layers}; give one fanout for each layer")  # fmt: skip
    for flag in ("dropout", "input_dropout"):
        if getattr(args, flag) >= 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} must be below 1")
    if args.cache and args.mode in ("cuda-cuda", "pinned-cuda"):
        parser.error(f"--gpu-cache is for --mode cpu-cuda (or an lmdb store on CPU); {args.mode} reads features in place")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.gpus is None:
        args.gpus = min(there, 1) if args.procs == 1 and args.mode != "cpu-cpu" else 0
    if args.gpus > there:
        parser.error(f"--gpus {args.gpus}: this machine has {there} usable; give {f'at most {there}' if there else '--gpus 0'}")
    if args.gpus and args.procs > 1:
        parser.error(f"--procs {args.procs} is for --gpus 0; with GPUs there is one process for each")
    if args.mode.endswith("cuda") and not args.gpus:
        parser.error(f"--mode {args.mode} needs a CUDA GPU and --gpus 1 or more; --mode cpu-cpu works here")
    if args.mode == "cpu-cpu" and args.gpus:
        parser.error(f"--mode cpu-cpu trains on CPU: give --gpus 0 instead of --gpus {args.gpus}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: give a whole number from 0 to 2^63 - 1")
    for flag, off in (("early_stop", None), ("predict", None), ("runs", 1)):
        if args.task == "graph" and getattr(args, flag) != off:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)} is for --task node")
    if args.precision == "fp64" and args.task == "graph":
        parser.error("--precision fp64 is for --task node; use fp32 or bf16")
    if args.precision == "tf32" and not args.gpus:
        parser.error("--precision tf32 needs a CUDA GPU; use fp32 or bf16 on CPU")
    if args.model == "gat" and args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} cannot be shared by --heads {args.heads}: give a multiple of {args.heads}")
    if args.norm == "batch" and args.checkpoint_activations:
        parser.error("--checkpoint-activations would count each batch twice in --norm batch; use --norm layer")
    for flag in ("checkpoint", "resume", "predict", "timeline", "profile"):
        if args.runs > 1 and getattr(args, flag):
            parser.error(f"--{flag} {getattr(args, flag)} is for one run, --runs is {args.runs}")
    for flag in ("checkpoint", "predict", "log", "timeline", "profile"):
        if getattr(args, flag) is None:
            continue
        path = Path(getattr(args, flag)).absolute()
        if not path.parent.is_dir():
            parser.error(f"--{flag} {getattr(args, flag)}: the folder {path.parent} does not exist")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"--{flag} {getattr(args, flag)}: a file cannot be written there")
    if args.predict and not args.predict.endswith(".npy"):
        parser.error(f"--predict {args.predict}: the classes are written as .npy; give a name that ends in .npy")
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        parser.error("--tensorboard needs tensorboard: pip install tensorboard")
    if args.timeline and not args.timeline.endswith(".png"):
        parser.error(f"--timeline {args.timeline}: the picture is a PNG; give a name that ends in .png")
    if args.timeline and importlib.util.find_spec("matplotlib") is None:
        parser.error("--timeline needs matplotlib: pip install matplotlib")
    if args.checkpoint_every and not args.checkpoint:
        parser.error(f"--checkpoint-every {args.checkpoint_every} needs --checkpoint FILE to write to")
    if args.resume == "auto" and not args.checkpoint:
        parser.error("--resume auto goes on from the file of --checkpoint, which is not given")
    if args.resume not in (None, "auto") and not Path(args.resume).is_file():
        parser.error(f"--resume {args.resume}: no such file")


def spelled_out(argv):
    """--batch_size 8 -> --batch-size 8; --fanout -1,5 -> --fanout=-1,5, which argparse would take for a flag."""
    words = []
    for word in argv:
        if words and words[-1] == "--fanout":
            words[-1] += f"={word}"
        else:
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
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
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB, 512MiB or a number of bytes") from None


def positive(kind, zero=False):
    """An argparse type: a finite number above 0 (or from 0 on)."""

    def parse(text):
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not (0 <= number < float("inf")) or (number == 0 and not zero):
            word = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {word} {'of at least' if zero else 'above'} 0")
        return number

    return parse


class _Defaults(argparse.HelpFormatter):
    """Show a default where there is one to show."""

    def _get_help_string(self, action):
        says = action.help and "default" not in action.help and action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if says else action.help
