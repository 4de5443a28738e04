"""train.py's flags, each declared once, and the two records made of them.

`Flags` holds what was typed, or what the checkpoint to resume or the defaults say; `Plan` what a run does, once its data
and machine are known. Both are frozen. To add a flag, add it to `CORE`, or to `flags` of an extra: its attribute, the
parser, --help, checkpoints and the refusal of flags without effect follow from it.
"""

import argparse
import os
import secrets
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import torch

import extras
from ddp import under_torchrun
from disk.files import RANK_BYTES, free_host_bytes, readable_size
from disk.terminal import Parser
from features import MODES
from model import CONVS, NORMS, Conv, layers_where
from run import kinds
from run.kinds import (
    COUNT,
    COUNT_OR_0,
    FANOUT,
    MODEL_ARGS,
    NUMBER,
    ON_OFF,
    PROBABILITY,
    RATE,
    SAMPLERS,
    SEED,
    SIZE,
    SWITCH,
    alike,
    built,
    fixed,
    free,
    gpu_for,
    kept,
    layer_with,
    layers_taking,
    library,
    model_or,
    one_of,
    one_run,
    parsed_by,
    per_graph,
    prediction,
    text,
    training,
)
from run.own_model import conv_of
from tasks.node import NodeTask

SEEDS = 1024  # default of --batch-size
TASKS = {"node": NodeTask} | {name: of.TASK for name, of in extras.present(extras.TASKS).items()}
MODELS = [model for task in TASKS.values() for model in task.models or ()]  # of a task with its own
extras.present(extras.LAYERS)  # `CONVS` knows the layers of modules that are imported

# ---- what a flag needs to have an effect: functions of all flags that return what speaks against it, or None


def built_in_model(flags):
    """Refuse a network of a file: only a layer goes into the network that has this flag."""
    if flags.conv is None:
        return f"is for the built-in models; give {flags.model} what it needs by --model-args"


def model_or_default(flags):
    """Return the model, or the default of a task that has models of its own and not this one."""
    models = TASKS[flags.task].models or [flags.model]
    return flags.model if flags.model in models else [*models][0]


def model_of_the_task(flags):
    """Refuse a layer where the task has models of its own, and these models elsewhere."""
    models = TASKS[flags.task].models
    if (flags.model in MODELS) != bool(models):
        return f"is not for --task {flags.task}, which has {', '.join(models or CONVS)}"


def used_width(flags):
    """Refuse --hidden of a network of a file, which has its own width, unless its outputs are embeddings."""
    # of another task the embeddings of any network
    if not TASKS[flags.task].are_links:
        return built_in_model(flags)


def own_network(flags):
    """Refuse a layer: this flag is for a network of a file."""
    if flags.conv is not None:
        return f"is for --model FILE.py:NAME, --model is {flags.model}"


def layer_with_or_without_edges(flags):
    """Refuse --edge-features of a layer that cannot use them, and --no-edge-features of one that needs them."""
    unable = "no" if flags.edge_features else "must"
    if flags.layer.edge_features == unable:
        able = [name for name, conv in CONVS.items() if conv.edge_features != unable]
        return f"is for --model {', '.join(able)}, --model is {flags.model}"


def no_early_stop(flags):
    """Refuse --weights last with --early-stop, which goes back to the best."""
    if flags.early_stop and flags.weights == "last":
        return f"contradicts --early-stop {flags.early_stop}, which takes the best"


def logits_before_the_last_layer(flags):
    """Refuse embeddings of networks without an inner layer that could give them."""
    if flags.predict_what != "embeddings":
        return None
    if flags.conv is None:
        return f"is for the built-in models; take logits of {flags.model}"
    if flags.num_layers == 1:
        return "would be the features with --num-layers 1"


def checkpoint_file(flags):
    """Refuse a flag of checkpoints if none are written."""
    if not flags.checkpoint:
        return "needs --checkpoint FILE to write to"


def gpus_here(flags):
    """Refuse more GPUs than this machine has, unless --free-gpu plans for another one."""
    count = torch.cuda.device_count() if flags.gpus else 0
    if flags.gpus <= count or flags.free_gpu:
        return None
    if count:
        return f"needs as many CUDA GPUs: give at most {count}"
    build = "" if torch.version.cuda else f"{torch.__version__} is a build for CPU; "
    return f"needs a CUDA GPU, and torch sees none: {build}see docs/gpu.md"


def cpu_for_its_mode(flags):
    """Refuse the mode of the CPU with GPUs."""
    if flags.mode == MODES[3] and flags.gpus:
        return f"trains on CPU: leave out --gpus {flags.gpus}"


def features_off_gpu(flags):
    """Refuse a cache of rows that are all in GPU memory."""
    if flags.mode == MODES[0]:
        return f"has no effect: --mode {MODES[0]} has all on the GPU"


def room_for_processes(flags):
    """Refuse --procs with GPUs, under torchrun, or beyond free memory."""
    if flags.gpus:
        return "is for --gpus 0; with GPUs there is one process for each"
    most = max(1, free_host_bytes() // RANK_BYTES)
    if flags.procs > most:
        return f"is too many: memory is free for {most} processes"
    if under_torchrun():
        return "has no effect under torchrun: use its --nproc-per-node"


def several_gpus_or_machines(flags):
    """Refuse --split-features where there is only one memory, or one copy is shared."""
    if flags.mode == MODES[1]:
        return f"has no effect: in --mode {MODES[1]} the GPUs of a machine share one copy"
    if flags.gpus < 2 and not under_torchrun() and not flags.dry_run:
        return "needs several GPUs or machines to split them over: --gpus N or torchrun --nnodes N"


def one_process(flags):
    """Refuse --dry-run under torchrun."""
    if under_torchrun():
        return "plans for all processes of --gpus or --procs in one: leave out torchrun"


def dry(flags):
    """Refuse --free-gpu of a run, which looks how much is free."""
    if not flags.dry_run:
        return "is for --dry-run; a run looks how much is free"


def free_here(flags):
    """Refuse more host memory than is free, unless --dry-run plans for another machine."""
    free = free_host_bytes()
    if flags.free_host > free and not flags.dry_run:
        return f"is for --dry-run; {readable_size(free)} are free here"


def folder_to_write(flags):
    """Refuse a folder that cannot be made or written to, and a store."""
    path = os.path.abspath(flags.export)
    if os.path.exists(os.path.join(path, "meta.json")):
        return "is a store: give a folder of its own"
    while not os.path.isdir(path):
        if os.path.lexists(path):
            return f"cannot be made: {path} is no folder"
        path = os.path.dirname(path)
    if not os.access(path, os.W_OK):
        return f"cannot be written in {path}"


def table_library(flags):
    """Refuse a table of predictions without the library that writes it."""
    if flags.predict.endswith((".csv", ".parquet")):
        return library("pyarrow")(flags)


# ---- flags

CORE = dict(
    task=fixed(
        one_of(*TASKS, tables=[extras.TASKS]),
        "node",
        "classify nodes, predict edges, or predict targets of small graphs",
        group="data",
    ),
    dataset=kept(
        text("NAME"),
        "synthetic",
        "synthetic, synthetic:nodes=..., synthetic-mag, a store, an .npz or .pt file, cora, citeseer, pubmed, ogbn-arxiv, -products, -papers100M, -mag (default: synthetic)",
    ),
    root=free(text("DIR"), "data", "folder for downloads and built stores"),
    backend=free(one_of("mmap", "lmdb"), "mmap", "feature storage of a newly built store"),
    feature_dtype=built(
        one_of("bfloat16", "float16", "int8"),
        None,
        "round float features of a new store to half the bytes; int8: to a quarter",
    ),
    split=per_graph(
        COUNT_OR_0,
        None,
        "which split of several, from 0 (default: the first; --runs: each in turn)",
    ),
    symmetrize=built(SWITCH, False, "add the reverse of every edge of an .npz file"),
    drop_duplicates=built(SWITCH, False, "keep one of several equal edges of an .npz file"),
    fanout=fixed(
        FANOUT,
        None,
        "neighbours per node, hop by hop from the seeds (DGL: 5,10,15); -1: all; with edge types per type, or by name: writes=10:cites=5,writes=5 (default: 10 a layer)",
        group="sampling",
    ),
    sampler=fixed(
        one_of(*SAMPLERS, tables=[extras.RULES]),
        [*SAMPLERS][0],
        "; ".join(f"{name}: {rule.help}" for name, rule in SAMPLERS.items() if rule.help),
    ),
    batch_size=kept(
        COUNT,
        None,
        "seeds per process and pass (default: 1,024; graphs: 16 to 256, or up to --max-nodes)",
    ),
    accumulate=kept(COUNT, 1, "forward and backward passes per optimizer step"),
    model=fixed(
        parsed_by(model_or(MODELS), "NAME"),
        [*CONVS][0],
        f"{', '.join(CONVS)} or FILE.py:NAME (default: {[*CONVS][0]})"
        + "".join(
            f"; --task {name}: {task.about_models}" for name, task in TASKS.items() if task.models
        ),
        group="model",
        needs=[model_of_the_task],
        default_is_off=False,
    ),
    model_args=fixed(
        MODEL_ARGS,
        None,
        "your model is made by NAME(features, classes, A=1, B='x') (default: none)",
        needs=[own_network],
    ),
    hidden=fixed(COUNT, 128, "width of the hidden layers, all heads together", needs=[used_width]),
    num_layers=fixed(COUNT, None, "number of layers (default: one per fanout, else 3)"),
    heads=fixed(
        COUNT,
        None,
        f"attention heads (default: {', '.join(f'{CONVS[name].heads} for {name}' for name in layers_taking('heads'))})",
        needs=[layer_with("heads")],
    ),
    norm=fixed(
        one_of(*NORMS),
        None,
        f"after hidden layers (default: layer for {', '.join(layers_where(norm='layer'))}, else none)",
        needs=[built_in_model],
    ),
    residual=fixed(
        ON_OFF,
        None,
        f"add each layer's input to its output (default: {', '.join(layers_where(residual='yes'))}; {', '.join(layers_where(residual='if classes disagree'))} if classes disagree)",
        needs=[built_in_model],
    ),
    edge_features=fixed(
        ON_OFF,
        None,
        f"layers see the features of edges (default: {', '.join(layers_where(edge_features='can') + layers_where(edge_features='must'))} if there are any)",
        needs=[built_in_model, layer_with_or_without_edges],
    ),
    dropout=fixed(
        PROBABILITY,
        0.5,
        f"probability after hidden layers and on {', '.join(layers_taking('dropout'))}'s attention, in 256ths",
        needs=[built_in_model],
    ),
    input_dropout=fixed(
        PROBABILITY, 0.0, "probability on the input features (default: 0)", needs=[built_in_model]
    ),
    lr=kept(RATE, 0.003, "Adam's learning rate", group="optimisation"),
    lr_schedule=kept(one_of("constant", "cosine"), "constant", "cosine: falls to 0 over --epochs"),
    weight_decay=kept(
        NUMBER, None, "Adam's L2 term (default: 0.07 / training nodes; links and graphs: 0)"
    ),
    class_weights=fixed(
        one_of("none", "balanced"),
        "none",
        "balanced: rare classes weigh as much in the loss as frequent ones",
    ),
    epochs=kept(
        COUNT,
        None,
        "default: 10 to 200, as many as make 600 optimizer steps (links: 200, graphs: 2,000)",
    ),
    metric=fixed(
        one_of(*dict.fromkeys(m for task in TASKS.values() for m in task.metrics)),
        None,
        "nodes: accuracy, roc_auc, f1 (default: accuracy, or f1 for several labels); links: mrr, hits@1, hits@10, roc_auc, ap (default: mrr); graphs: roc_auc, accuracy, f1 (default: roc_auc; several classes: accuracy), or of targets rmse, mae",
    ),
    early_stop=kept(
        COUNT, None, "after N epochs without a better --metric keep the best weights (default: off)"
    ),
    weights=kept(
        one_of("best", "last"),
        None,
        "final: of the best epoch by validation --metric (default; links, graphs: last)",
        needs=[no_early_stop],
    ),
    seed=fixed(
        SEED, 0, "for initial weights, drawn splits, order, sampling and dropout (default: 0)"
    ),
    runs=alike(COUNT, 1, "N seeds: mean and standard deviation"),
    precision=kept(
        one_of("fp32", "tf32", "bf16", "fp64"),
        None,
        "of matrix products; fp64 compares runs (default: tf32 on a GPU with it, else fp32)",
        needs=[gpu_for("precision", "tf32")],
    ),
    checkpoint_activations=kept(
        SWITCH,
        False,
        "recompute hidden layers in the backward pass: less memory, more time",
        needs=[built_in_model],
    ),
    gpus=free(
        COUNT_OR_0,
        None,
        "GPUs, one process each; 0 trains on CPU (default: 1 if there is one)",
        group="processes and placement",
        needs=[gpus_here],
    ),
    procs=free(
        COUNT, 1, "CPU processes, with --gpus 0; they share the cores", needs=[room_for_processes]
    ),
    mode=alike(
        one_of("auto", *MODES),
        "auto",
        "where graph and features live - where training runs",
        needs=[gpu_for("mode", *MODES[:3]), cpu_for_its_mode],
    ),
    cache=free(
        SIZE,
        0,
        "feature rows cached by each GPU, or process of cpu-cpu (default: see docs/disk.md)",
        needs=[features_off_gpu],
    ),
    # not beside extras/split.py: the memory plan and the loader ask for it
    split_features=alike(
        SWITCH,
        False,
        "split feature rows over the GPUs (cuda-cuda) or machines (cpu-cuda, cpu-cpu)",
        needs=[several_gpus_or_machines],
    ),
    prefetch=free(
        COUNT_OR_0, None, "batches prepared ahead; 0: none (default: --sample-threads + 1)"
    ),
    sample_threads=free(
        COUNT, None, "batches sampled at once (default: 1; cpu-cuda: 1 for 4 cores, up to 4)"
    ),
    allocator=free(
        one_of("tuned", "system"),
        "tuned",
        "tuned: keep freed memory (CPU), grow segments (CUDA); system: as is",
    ),
    dry_run=free(
        SWITCH,
        False,
        "print memory of each mode and the plan, build a missing store, then stop",
        needs=[one_process],
    ),
    free_gpu=free(
        SIZE,
        None,
        "--dry-run: plan for GPUs with so much free memory (default: this machine's)",
        needs=[dry],
    ),
    free_host=free(
        SIZE, None, "host memory to plan with (default: what is free)", needs=[free_here]
    ),
    checkpoint=free(
        text("FILE"),
        None,
        "write the state each epoch, on Ctrl-C (--runs: FILE-seed0)",
        group="files",
        endings=("",),
    ),
    checkpoint_every=alike(
        COUNT, None, "also write it every N optimizer steps (default: off)", needs=[checkpoint_file]
    ),
    resume=free(
        text("FILE"),
        None,
        "continue from a checkpoint, with its flags; auto: that of --checkpoint, if there",
        needs=[one_run],
    ),
    predict=free(
        text("FILE"),
        None,
        "exact predictions for every node or small graph: .npy, or .csv, .parquet with names; with --resume FILE it trains only with --epochs or --checkpoint",
        needs=[one_run, table_library],
        endings=(".npy", ".csv", ".parquet"),
    ),
    predict_what=alike(
        one_of("classes", "scores", "logits", "embeddings"),
        "classes",
        "classes [V] (several labels: 0/1 [V, classes]); scores (probabilities), logits [V, classes]; embeddings: the last layer's input, [V, hidden]",
        needs=[prediction, logits_before_the_last_layer],
        default_is_off=False,
    ),
    export=free(
        text("DIR"),
        None,
        "write the trained network as model.safetensors and config.json",
        needs=[one_run, folder_to_write, library("safetensors")],
    ),
    verbose=free(SWITCH, False, "also print memory plan, settings and stage times"),
    log=free(
        text("FILE"),
        None,
        "append JSON lines: flags, epochs (torchrun: --log-file)",
        also=["--log-file"],
        endings=("",),
    ),
    tensorboard=free(
        text("DIR"),
        None,
        "write each epoch's metrics for TensorBoard",
        needs=[library("tensorboard")],
    ),
    profile=free(
        text("FILE"),
        None,
        "torch.profiler trace of epoch 2: FILE.rank0.json",
        needs=[one_run, training],
        endings=("",),
    ),
)


def with_extras(flags):
    """Put the flags of extras among those of the core, each behind the one that their `flags` names."""
    names = [*flags]
    for module in extras.present(extras.FLAGS).values():
        for before, more in module.flags(kinds).items():
            place = names.index(before) + 1
            names[place:place] = more
            flags = flags | more
    return {name: flags[name] for name in names}


FLAGS = with_extras(CORE)
Typed = make_dataclass("Typed", [(n, Any, flag.default) for n, flag in FLAGS.items()], frozen=True)


@dataclass(frozen=True)
class Flags(Typed):
    """The flags of a command."""

    typed: tuple = ()  # names of the flags that were
    run: str = ""  # a name for the lines in --log
    turn: int = 0  # which of --runs

    @property
    def conv(self):
        """The layer that --model names; None for a network of a file, see `conv_of`."""
        return conv_of(self.model)

    @property
    def layer(self):
        """The same, but for a network of a file `Conv`, which takes nothing."""
        return self.conv or Conv

    @property
    def trains(self):
        """Whether this command trains: a checkpoint may also be there to predict or export only."""
        from_file = self.resume not in (None, "auto")
        on = {"epochs", "checkpoint"}.isdisjoint(self.typed)
        return not ((self.predict or self.export) and from_file and on)

    def settled(self, **values):
        """Return the Plan of a run, with values of what was open."""
        return Plan(**vars(self) | values)

    def values(self):
        """Return {name: value}, without what is not on the command line."""
        others = ("typed", "run", "turn")
        return {name: value for name, value in vars(self).items() if name not in others}


def unused(task):
    """Return {flag: why it has no effect} of a task's class: those of other tasks, and those that it names."""
    idle = {name: why for why, names in task.unused.items() for name in names.split()}
    for other, module in extras.present(extras.TASKS).items():
        if other != task.name:
            for flags in module.flags(kinds).values():
                idle |= dict.fromkeys(flags, f"is for --task {other}, --task is {task.name}")
    return idle


def declared(*words):
    """Return the names of the flags that are declared by these words."""
    return [name for name, flag in FLAGS.items() if flag.resume in words]


SAVED = declared("fixed", "per_graph", "kept", "built")


@dataclass(frozen=True, kw_only=True)
class Plan(Flags):
    """The flags of a run whose data and machine are known. No longer open are: mode, metric, weights, residual, precision,
    epochs, weight_decay, split, sample_threads, prefetch and, for a layer, edge_features."""

    total_batch: int  # seeds of an optimizer step, over all processes
    steps: int  # of an epoch


# ---- flags as words


def parsed(parser, words):
    """Parse words -> Flags, without checks that involve several flags."""
    given = vars(parser.parse_args(words))
    return Flags(**given, typed=tuple(given), run=secrets.token_hex(4))


def make_parser():
    """Build the parser of all flags; its results have those that are typed."""
    parser = Parser(
        usage="python train.py [flags]",
        description="Train a graph neural network by neighbour sampling.",
    )
    for name, flag in FLAGS.items():
        if flag.group:
            group = parser.add_argument_group(flag.group)
        help = flag.help
        is_said = flag.default is None or flag.default is False or "default" in help
        if not is_said:
            help += f" (default: {flag.default})"
        names = [spelled(name), *flag.also]
        group.add_argument(*names, dest=name, default=argparse.SUPPRESS, help=help, **flag.kind)
    return parser


def seed_path(path, seed):
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
