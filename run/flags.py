"""train.py's command line: flags, defaults that depend on other flags, refused combinations.

`parse_args` exits with code 2 and one sentence on bad input, before anything is loaded. Its result is never modified:
`changed` makes a copy.
"""

import argparse
import importlib.util
import math
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from ddp import under_torchrun
from disk.files import RANK_BYTES, check_name, free_host_bytes, plural
from disk.terminal import Parser
from features import MODES
from model import CONVS, NORMS, layers_where
from run.own_model import conv_of, is_own, words_of
from sampler import SAMPLERS
from tasks.edge_split import split_type
from tasks.graph import GraphTask
from tasks.link import LinkTask
from tasks.node import NodeTask

TASKS = {task.name: task for task in (NodeTask, LinkTask, GraphTask)}
BUILT_IN = "heads bases norm residual dropout input_dropout checkpoint_activations"
# flag | values | help. Several values: choices, the default first (- for none); X = D: default D; no value: a switch
FLAGS = f"""
data
--task | {" ".join(TASKS)} | classify nodes, predict edges, or predict targets of small graphs
--dataset | NAME = synthetic | synthetic, synthetic:nodes=..., synthetic-mag, a store, an .npz or .pt file, cora, citeseer, pubmed, ogbn-arxiv, -products, -papers100M, -mag (default: %(default)s)
--root | DIR = data | folder for downloads and built stores
--backend | mmap lmdb | feature storage of a newly built store
--feature-dtype | - bfloat16 float16 | round float features of a newly built store to half the bytes
--split | N0 | which split of several, from 0 (default: the first; --runs: each in turn)
--symmetrize | | add the reverse of every edge of an .npz file
--drop-duplicates | | keep one of several equal edges of an .npz file
sampling
--fanout | 15,10,5 | neighbours per node, hop by hop from the seeds (DGL: 5,10,15); -1: all; with edge types per type, or by name: writes=10:cites=5,writes=5 (default: 10 a layer)
--sampler | {" ".join(SAMPLERS)} | {"; ".join(f"{name}: {rule.help}" for name, rule in SAMPLERS.items() if rule.help)}
--layer-dependency | | labor: same random draws in all hops, for fewer input rows per batch
--batch-dependency | N = 1 | labor: same random draws for N steps in a row, so that rows are reused
--temporal | auto at before off | edges that a seed sees: at: up to its time, before: only earlier, off: all (default: at if edges and nodes have times; link: off)
--window | TIME | a seed sees only edges later than its time minus N (default: all)
--batch-size | N = 1024 | seeds per process and pass
--accumulate | N = 1 | forward and backward passes per optimizer step
model
--model | MODEL = sage | {", ".join(CONVS)} or FILE.py:NAME
--model-args | A=1,B=x | your model is made by NAME(features, classes, A=1, B='x') (default: none)
--hidden | N = 128 | width of the hidden layers, all heads together
--num-layers | N | number of layers (default: one per fanout, else 3)
--heads | N = 4 | attention heads of gat
--bases | N0 = 0 | rgcn, rgat: mix the matrix of each type from N bases (default: 0, off)
--norm | - {" ".join(NORMS)} | after hidden layers (default: layer for {", ".join(layers_where(norm="layer"))}, else none)
--residual | on/off | add each layer's input to its output (default: {", ".join(layers_where(residual="yes"))}; {", ".join(layers_where(residual="if classes disagree"))} if neighbours' classes hardly agree)
--dropout | P = 0.5 | probability after hidden layers and on gat's attention, in 256ths
--input-dropout | P = 0 | probability on the input features (default: 0)
links
--edge-split | A/B/C = 85/5/10 | percent of edges for train, valid and test, drawn by --seed; time:A/B/C: by time; none: all for train; FILE.npz with valid, test [n, 2]
--edge-type | TYPE | predict edges of a type, as user,buys,item (default: all)
--scorer | dot distmult mlp | how two embeddings are scored
--negatives | N = 1 | negatives per training edge, none of them an edge
--negatives-by | uniform degree | degree: in proportion to degree^0.75
--unchecked-negatives | | negatives may be edges
--link-loss | bce softmax | bce: each pair alone; softmax: edge against its negatives
--pairs | FILE.npy | node ids [n, 2] whose scores --predict writes
optimisation
--lr | RATE = 0.003 | Adam's learning rate
--lr-schedule | constant cosine | cosine: falls to 0 over --epochs
--weight-decay | X | Adam's L2 term (default: 0.07 / training nodes; links and graphs: 0)
--epochs | N | default: at least 10, and at least 200 optimizer steps
--metric | - {" ".join(dict.fromkeys(m for task in TASKS.values() for m in task.metrics))} | nodes: accuracy, roc_auc, f1 (default: accuracy, or f1 for several labels per node); links: mrr, hits@1, hits@10, roc_auc, ap (default: mrr); labels of graphs: roc_auc, accuracy, f1 (default: roc_auc, or accuracy for more than two classes)
--early-stop | N | after N epochs without a better --metric keep the best weights (default: off)
--weights | - best last | final weights: of the epoch with the best validation --metric, or the last (default: best; last for links and graphs, and without validation nodes)
--seed | SEED = 0 | for initial weights, drawn splits, order, sampling and dropout (default: 0)
--runs | N = 1 | N seeds: mean and standard deviation
--precision | - fp32 tf32 bf16 fp64 | of matrix products; fp64 compares runs (default: tf32 on a GPU with it, else fp32)
--checkpoint-activations | | recompute hidden layers in the backward pass: less memory, more time
processes and placement
--gpus | N0 | GPUs, one process each; 0 trains on CPU (default: 1 if there is one)
--procs | N = 1 | CPU processes, with --gpus 0; they share the cores
--mode | auto {" ".join(MODES)} | where graph and features live - where training runs
--cache | 4GiB = 0 | feature rows cached by each GPU (cpu-cuda, pinned-cuda) or process (cpu-cpu) (default: none; an eighth or half of free memory if features exceed it)
--lookahead | N0 | CPU: keep the pages used soonest in the next N batches (default: two uses of each)
--prefetch | N0 | batches prepared ahead; 0: none (default: --sample-threads + 1)
--sample-threads | N | batches sampled at once (default: 1; cpu-cuda: 1 for 4 cores, up to 4)
--cuda-graph | auto on off | run a step as CUDA graphs if GPUs read the features; off: launch kernels one by one; on: print why if it is impossible
--allocator | tuned system | tuned: keep freed memory (CPU), grow segments (CUDA); system: as is
files
--checkpoint | FILE | write the state each epoch, on Ctrl-C (--runs: FILE-seed0)
--checkpoint-every | N | also write it every N optimizer steps (default: off)
--resume | FILE | continue from a checkpoint, with its data, sampling, model and optimisation flags; auto: from the file of --checkpoint, if it exists
--predict | FILE | exact predictions for every node: .npy, or .csv, .parquet with names; with --resume FILE it trains only with --epochs or --checkpoint
--predict-what | classes scores logits embeddings | classes [V] (several labels: 0/1 [V, classes]); scores (probabilities), logits [V, classes]; embeddings: the last layer's input, [V, hidden]
--verbose | | also print memory plan, settings and stage times
--log --log-file | FILE | append JSON lines: flags, epochs (torchrun: --log-file)
--tensorboard | DIR | write each epoch's metrics for TensorBoard
--curve | FILE.png | draw loss, validation score and learning rate
--timeline | FILE.png | draw the stages of the second epoch's first steps
--profile | FILE | torch.profiler trace of epoch 2: FILE.rank0.json
"""


def parse_args(argv, complete):
    """Parse the words after "train.py". complete: function(args) that fills in the flags of the checkpoint to resume.

    The result also has `typed`, names of flags on the command line; `trains`, False where a checkpoint only predicts;
    `run`, a name for its lines in --log; `turn`, which of --runs it is.
    """
    parser = make_parser()
    args, absent = parser.parse_args(argv), object()
    explicit = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), absent)))
    typed = [name for name, value in vars(explicit).items() if value is not absent]
    from_file = args.resume not in (None, "auto")
    only_predicts = args.predict and from_file and {"epochs", "checkpoint"}.isdisjoint(typed)
    if args.resume == "auto" and not args.checkpoint:
        parser.error("--resume auto takes the file of --checkpoint, which is missing")
    extra = {"typed": typed, "trains": not only_predicts, "run": secrets.token_hex(4), "turn": 0}
    args = filled_in(complete(changed(args, **extra)))
    check_values(parser, args)
    check_files(parser, args)
    return args


def changed(args, **values):
    """Return a copy of the flags with some values changed."""
    return argparse.Namespace(**{**vars(args), **values})


def make_parser():
    """Build the parser from FLAGS."""
    about = "Train a graph neural network by neighbour sampling."
    parser = Parser(usage="python train.py [flags]", description=about)
    kinds = {
        "N": (positive(int), "N"),
        "N0": (positive(int, zero=True), "N"),
        "SEED": (positive(int, zero=True, below=2**63), "N"),
        "TIME": (positive(int, below=2**63), "N"),
        "RATE": (positive(float), "RATE"),
        "X": (positive(float, zero=True), "X"),
        "P": (positive(float, zero=True, below=1), "P"),
        "MODEL": (model_name, "NAME"),
        "A=1,B=x": (words_of, "A=1,B=x"),
        "A/B/C": (split_type, "A/B/C"),
        "15,10,5": (fanout, "15,10,5"),
        "4GiB": (size, "4GiB"),
    }
    for line in FLAGS.strip().splitlines():
        flags, *rest = line.split("|", 2)
        if not rest:
            group = parser.add_argument_group(flags)
            continue
        values, options = rest[0].split(), {"help": rest[1].strip()}
        if not values or values == ["on/off"]:
            options["action"] = argparse.BooleanOptionalAction if values else "store_true"
        elif len(values) == 1 or values[1] == "=":
            kind, options["metavar"] = kinds.get(values[0], (str, values[0]))
            options |= {"type": kind, "default": kind(values[2]) if len(values) > 1 else None}
        else:
            options["default"] = None if values[0] == "-" else values[0]
            options["choices"] = [value for value in values if value != "-"]
        if options.get("default") and "default" not in options["help"]:
            options["help"] += " (default: %(default)s)"
        group.add_argument(*flags.split(), **options)
    return parser


def filled_in(args):
    """Return the flags with the defaults that depend on other flags filled in."""
    task, conv, values = TASKS[args.task], conv_of(args.model), {}
    values["norm"] = args.norm or (conv.norm if conv else "none")
    residual = conv.residual if conv else "no"
    # else `settle` decides, by the graph
    if args.residual is None and not (task.classes_agree and residual == "if classes disagree"):
        values["residual"] = residual == "yes"
    values["fanout"] = args.fanout or [10] * (args.num_layers or 3)
    values["num_layers"] = args.num_layers or len(values["fanout"])
    if args.temporal == "auto":
        values["temporal"] = task.temporal
    if args.gpus is None:
        single = args.procs == 1 and args.mode != "cpu-cpu"
        values["gpus"] = int(single and torch.cuda.is_available())
    return changed(args, **values)


def check_values(parser, args):
    """Reject a network that cannot work, and flags that were typed but have no effect, or not the one they name."""
    task = TASKS[args.task]
    conv, custom = conv_of(args.model), is_own(args.model)
    on_gpu = args.gpus > 0
    gpus, embeddings = on_gpu and torch.cuda.device_count(), args.predict_what == "embeddings"
    if (hops := len(args.fanout)) != args.num_layers:
        fanouts = f"--fanout {text_of(args.fanout)} has {plural(hops, 'hop')}"
        parser.error(f"{fanouts}, --num-layers is {args.num_layers}: one fanout a layer is needed")
    if conv and "heads" in conv.takes and args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} is no multiple of --heads {args.heads}: give one")
    if args.norm == "batch" and args.checkpoint_activations:
        parser.error("--norm batch counts twice with --checkpoint-activations: use --norm layer")
    if args.metric and args.metric not in task.metrics:
        metrics = ", ".join(task.metrics) or "none"
        parser.error(f"--metric {args.metric}: --task {args.task} has {metrics}")
    if args.task == "graph" and args.precision == "fp64":
        parser.error("--precision fp64 is not for --task graph: take fp32")

    def refuse(condition, flags, why):
        for flag in flags.split() if condition else ():
            value = getattr(args, flag)
            # the defaults of these two do not mean "off"
            off = value == parser.get_default(flag) and flag not in ("heads", "predict_what")
            if flag in args.typed and not off:
                parser.error(f"{spelled(flag, value)} {why.format(**vars(args))}")

    for why, unused in task.unused.items():
        refuse(True, unused, why)
    not_best = args.early_stop and args.weights == "last"
    refuse(not_best, "weights", "contradicts --early-stop {early_stop}, which takes the best")
    refuse(not args.predict, "predict_what pairs", "needs --predict FILE to write to")
    refuse(not args.checkpoint, "checkpoint_every", "needs --checkpoint FILE to write to")
    built_in, why = BUILT_IN + " hidden" * (not task.embeds), "is for the built-in models; "
    refuse(custom, built_in, why + "give {model} what it needs by --model-args")
    refuse(custom and embeddings, "predict_what", why + "take logits of {model}")
    one_layer = embeddings and args.num_layers == 1
    refuse(one_layer, "predict_what", "would be the features with --num-layers 1")
    refuse(not custom, "model_args", "is for --model FILE.py:NAME, --model is {model}")
    for option in ("heads", "bases"):
        models = " or ".join(name for name, of in CONVS.items() if option in of.takes)
        unused = conv is None or option not in conv.takes
        refuse(unused, option, f"is for --model {models}, --model is {{model}}")
    refuse(args.temporal == "off", "window", "is of times, --temporal is off")
    samplers = " or ".join(name for name, rule in SAMPLERS.items() if rule.by_source)
    why = f"is for --sampler {samplers}, --sampler is {{sampler}}"
    unused = not SAMPLERS[args.sampler].by_source
    refuse(unused, "layer_dependency batch_dependency", why)
    why = "is for one run, --runs is {runs}"
    refuse(args.runs > 1, "resume predict curve timeline profile", why)
    refuse(not args.trains, "curve timeline profile", "shows training; this command only predicts")
    why = f"needs as many CUDA GPUs: give at most {gpus}"
    if not gpus:
        build = "" if torch.version.cuda else f"{torch.__version__} is a build for CPU; "
        why = f"needs a CUDA GPU, and torch sees none: {build}see docs/gpu.md"
    refuse(args.gpus > gpus, "gpus", why)
    refuse(on_gpu, "procs", "is for --gpus 0; with GPUs there is one process for each")
    most = max(1, free_host_bytes() // RANK_BYTES)
    refuse(args.procs > most, "procs", f"is too many: memory is free for {most} processes")
    refuse(under_torchrun(), "procs", "has no effect under torchrun: use its --nproc-per-node")
    needs_gpu = "needs a CUDA GPU and --gpus 1 or more; leave it out on CPU"
    refuse(args.cuda_graph == "on" and not on_gpu, "cuda_graph", needs_gpu)
    refuse(args.mode.endswith("cuda") and not on_gpu, "mode", needs_gpu)
    refuse(args.precision == "tf32" and not on_gpu, "precision", needs_gpu)
    refuse(args.mode == "cpu-cpu" and on_gpu, "mode", "trains on CPU: leave out --gpus {gpus}")
    refuse(args.mode == "cuda-cuda", "cache", "has no effect: --mode cuda-cuda has all on the GPU")
    libraries = {"tensorboard": "tensorboard", "timeline": "matplotlib", "curve": "matplotlib"}
    if args.predict and args.predict.endswith((".csv", ".parquet")):
        libraries["predict"] = "pyarrow"
    for flag, library in libraries.items():
        refuse(not importlib.util.find_spec(library), flag, f"needs: pip install {library}")


def check_files(parser, args):
    """Reject files that cannot be written, or that another flag names too."""
    data, taken = re.match(r"(.*\.(npz|pth?))(:|$)", args.dataset, re.DOTALL), {}
    for flag in "dataset pairs edge_split resume checkpoint predict log curve timeline".split():
        name = getattr(args, flag) if flag != "dataset" else data and data[1]
        if not name or os.path.exists(name) and not os.path.isfile(name):
            continue
        other = taken.setdefault(os.path.realpath(name), flag)
        if other != flag and [other, flag] != ["resume", "checkpoint"]:
            of_other = f"that is the file of {spelled(other)}, give another name"
            parser.error(f"--{flag} {name}: {of_other}")
    suffixes = {"predict": (".npy", ".csv", ".parquet")}
    suffixes |= dict.fromkeys(("curve", "timeline"), (".png",))
    for flag in ("checkpoint", "predict", "log", "curve", "timeline", "profile"):
        name, endings = getattr(args, flag), suffixes.get(flag, ("",))
        if name is None:
            continue
        path = Path(name).absolute()
        check_name(path)
        if not name.endswith(endings):
            parser.error(f"--{flag} {name}: give a name that ends in {' or '.join(endings)}")
        # --log is appended to; the other files are written under a temporary name and renamed. Functions of Path would
        # raise where the system refuses to look
        in_place = os.path.exists(path) and (flag == "log" or not os.path.isfile(path))
        if os.path.isdir(path) or not os.access(path if in_place else path.parent, os.W_OK):
            parser.error(f"--{flag} {name}: a file cannot be written there")


def of_seed(path, seed):
    """Name the file of one seed of --runs: run.pt -> run-seed3.pt."""
    path = Path(path)
    return str(path.with_name(f"{path.stem}-seed{seed}{path.suffix}"))


def spelled(name, value=True, equals=" "):
    """Spell a flag: batch_size -> --batch-size; with a value, as it is typed: --batch-size 8, --no-residual."""
    flag = f"--{'no_' * (value is False)}{name}".replace("_", "-")
    return flag if isinstance(value, bool) else f"{flag}{equals}{text_of(value)}"


def text_of(value):
    """Return a flag's value as it is typed: [15, 10] -> 15,10."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def model_name(text):
    """Check that text is a layer's name or FILE.py:NAME -> the text."""
    file, _, name = text.rpartition(":")
    if text in CONVS or file.endswith(".py") and name.isidentifier():
        return text
    names = ", ".join(CONVS)
    raise argparse.ArgumentTypeError(f"{text!r}: choose one of {names}, or FILE.py:NAME")


def fanout(text):
    """Parse '15,10,5' -> [15, 10, 5]; a hop with numbers by edge type, 'writes=10:cites=5', stays text."""
    number = "(-1|0*[1-9][0-9]{0,8})"
    wrong = rf"any=|[^,]*=(?!{number}:)[-.\d]+:"  # a name may hold : and =, as a URI does
    hop, rest = f"({number}|(?!{wrong})[^,]+={number})", f"(,{number})*"
    hops = re.sub(r"\s*,\s*", ",", text.strip())
    if re.fullmatch(f"{hop}(,{hop})*|any={number}{rest}", hops):
        return [part if "=" in part else int(part) for part in hops.split(",")]
    how = "write numbers above 0 and below 10^9, or -1 for all: 15,10,5; by types writes=10:cites=5 or any=15,10"
    if " " in text:
        how = f"put commas between the hops: {','.join(re.split('[ ,]+', text.strip()))}"
    raise argparse.ArgumentTypeError(f"{text!r}: {how}")


def size(text):
    """Parse '4GiB', '4G' (the same), '512MiB' or a number of bytes -> bytes, an int."""
    units = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "kb": 1e3, "mb": 1e6, "gb": 1e9}
    units |= {f"{unit}ib": units[unit] for unit in "kmg"}
    number, unit = re.fullmatch(r"([0-9.]*)\s*(.*)", text.strip().lower(), re.DOTALL).groups()
    with suppress(KeyError, ValueError):
        return int(float(number) * units[unit])
    raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 4GiB, 512MiB or bytes")


def positive(kind, zero=False, below=None):
    """Make an argparse type: a finite number above 0 (zero: at least 0), and below 2^31 if whole, or `below`."""
    below = below or (2**31 if kind is int else math.inf)
    needed = f"{'whole ' * (kind is int)}number {'of at least 0' if zero else 'above 0'}"

    def parse(text):
        with suppress(ValueError):
            if 0 < (value := kind(text)) < below or zero and value == 0:
                return value
        limit = f" and below {below}" if below < math.inf else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a {needed}{limit}")

    return parse
