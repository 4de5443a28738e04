"""train.py's flags, each declared once, and the two records made of them.

`Flags` holds what was typed, or what the checkpoint to resume or the defaults say; `Plan` what a run does, once its data
and machine are known. Both are frozen. To add a flag, add it to `CORE`, or to `flags` of an extra: its attribute, the
parser, --help, checkpoints and the refusal of flags without effect follow from it.
"""

import argparse
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
from model import CONVS, NORMS, Conv
from run import kinds
from run.kinds import (
    COUNT,
    COUNT_OR_0,
    ON_OFF,
    PROBABILITY,
    SAMPLERS,
    SIZE,
    SWITCH,
    alike,
    built,
    built_in_model,
    fanout,
    fixed,
    free,
    gpu_for,
    kept,
    layer_with,
    layers_taking,
    layers_where,
    library,
    model_or,
    one_of,
    one_run,
    parsed_by,
    per_graph,
    positive,
    prediction,
    spelled,
    text,
)
from run.own_model import conv_of, is_own, words_of
from tasks.node import NodeTask

SEEDS = 1024  # default of --batch-size
TASKS = {"node": NodeTask} | {name: of.TASK for name, of in extras.present(extras.TASKS).items()}
MODELS = [model for task in TASKS.values() for model in task.models or ()]  # of a task with its own

# ---- what a flag needs to have an effect: functions of all flags that return what speaks against it, or None


def model_or_default(flags):
    """Return the model, or the default of a task that has models of its own and not this one, nor one of a file."""
    models = TASKS[flags.task].models or [flags.model]
    return flags.model if flags.model in models or is_own(flags.model) else [*models][0]


def model_of_the_task(flags):
    """Refuse a layer where the task has models of its own, and these models elsewhere."""
    models = TASKS[flags.task].models
    if flags.conv is None:
        return None
    if (flags.model in MODELS) != bool(models):
        own = "" if models is None else ", and networks of a file, not layers"
        return f"is not for --task {flags.task}, which has {', '.join(models or CONVS)}{own}"


def used_width(flags):
    """Refuse --hidden of a network of a file, which has its own width, unless its outputs are embeddings."""
    # of another task the embeddings of any network
    if not TASKS[flags.task].are_links:
        return built_in_model(flags)


def layers_or_hops(flags):
    """Refuse --num-layers of a network of a file that gets no hops, but whole graphs."""
    if not TASKS[flags.task].placed:
        return built_in_model(flags)


def own_network(flags):
    """Refuse a layer: this flag is for a network of a file."""
    if flags.conv is not None:
        return f"is for --model FILE.py:NAME, --model is {flags.model}"


def no_early_stop(flags):
    """Refuse --weights last with --early-stop, which goes back to the best."""
    if flags.early_stop and flags.weights == "last":
        return f"contradicts --early-stop {flags.early_stop}, which takes the best"


def logits_before_the_last_layer(flags):
    """Refuse embeddings of networks without an inner layer that could give them."""
    if flags.predict_what == "embeddings" and flags.conv and flags.num_layers == 1:
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
    if flags.mode == "cpu-cpu" and flags.gpus:
        return f"trains on CPU: leave out --gpus {flags.gpus}"


def room_for_processes(flags):
    """Refuse --procs with GPUs, under torchrun, or beyond free memory."""
    if flags.gpus:
        return "is for --gpus 0; with GPUs there is one process for each"
    most = max(1, free_host_bytes() // RANK_BYTES)
    if flags.procs > most:
        return f"is too many: memory is free for {most} processes"
    if under_torchrun():
        return "has no effect under torchrun: use its --nproc-per-node"


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


def table_library(flags):
    """Refuse a table of predictions without the library that writes it."""
    if flags.predict.endswith((".csv", ".parquet")):
        return library("pyarrow")(flags)


# ---- flags

CORE = dict(
    task=fixed(
        one_of(*TASKS),
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
        parsed_by(fanout, "15,10,5"),
        None,
        "neighbours per node, hop by hop from the seeds (DGL: 5,10,15); -1: all; with edge types per type, or by name: writes=10:cites=5,writes=5 (default: 10 a layer)",
        group="sampling",
    ),
    sampler=fixed(
        one_of(*SAMPLERS),
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
        parsed_by(words_of, "A=1,B=x"),
        None,
        "your model is made by NAME(features, classes, A=1, B='x') (default: none)",
        needs=[own_network],
    ),
    hidden=fixed(
        COUNT,
        128,
        "width of the hidden layers, all heads together (default: 128; graphs: 64)",
        needs=[used_width],
    ),
    num_layers=fixed(
        COUNT, None, "number of layers (default: one per fanout, else 3)", needs=[layers_or_hops]
    ),
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
    dropout=fixed(
        PROBABILITY,
        0.5,
        f"after hidden layers and on {', '.join(layers_taking('dropout'))}'s attention (default: 0.5; links: 0.3, graphs: 0.2)",
        needs=[built_in_model],
    ),
    input_dropout=fixed(
        PROBABILITY, 0.0, "probability on the input features (default: 0)", needs=[built_in_model]
    ),
    lr=kept(
        parsed_by(positive(float), "RATE"), 0.003, "Adam's learning rate", group="optimisation"
    ),
    lr_schedule=kept(
        one_of("constant", "cosine", "linear"),
        "constant",
        "cosine, linear: falls to 0 over --epochs",
    ),
    warmup=kept(COUNT, None, "optimizer steps over which the rate rises to --lr (default: none)"),
    clip_norm=kept(
        parsed_by(positive(float), "NORM"),
        None,
        "largest norm of the gradients of all weights together (default: any)",
    ),
    weight_decay=kept(
        parsed_by(positive(float, zero=True), "X"),
        None,
        "Adam's L2 term (default: 0.07 / training nodes; links and graphs: 0)",
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
        "default: accuracy (several labels: f1); links: mrr; graphs: roc_auc; numbers: rmse",
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
        parsed_by(positive(int, zero=True, below=2**63), "N"),
        0,
        "for initial weights, drawn splits, order, sampling and dropout (default: 0)",
    ),
    runs=alike(
        COUNT, 1, "N seeds: mean and standard deviation; files get names as FILE-seed0 (default: 1)"
    ),
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
        text("FILE"), None, "write the state each epoch, on Ctrl-C", group="files", endings=("",)
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
        needs=[table_library],
        endings=(".npy", ".csv", ".parquet"),
    ),
    predict_what=alike(
        one_of("classes", "scores", "logits", "embeddings"),
        "classes",
        "scores: probabilities; embeddings: the input of the last layer (default: classes)",
        needs=[prediction, logits_before_the_last_layer],
        default_is_off=False,
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
)


def with_extras(flags):
    """Put the flags of extras among those of the core, each behind the one that their `flags` names."""
    names = [*flags]
    for module in extras.present({file: file for file in extras.FLAGS}).values():
        for before, more in module.flags(kinds).items():
            place = names.index(before) + 1
            names[place:place] = more
            flags = flags | more
    return {name: flags[name] for name in names}


FLAGS = with_extras(CORE)
OF_EXTRAS = {name: file for file, names in extras.FLAGS.items() for name in names.split()}
Typed = make_dataclass(
    "Typed",
    [(n, Any, flag.default) for n, flag in FLAGS.items()],
    namespace=dict.fromkeys(OF_EXTRAS.keys() - FLAGS),  # None where their files are missing
    frozen=True,
)


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
        """Whether this command trains: a checkpoint may also be there to predict, export or report only."""
        from_file = self.resume not in (None, "auto")
        on = {"epochs", "checkpoint"}.isdisjoint(self.typed)
        return not ((self.predict or self.export or self.report) and from_file and on)

    def settled(self, **values):
        """Return the Plan of a run, with values of what was open."""
        return Plan(**vars(self) | values)

    def values(self):
        """Return {name: value}, without what is not on the command line."""
        return {n: v for n, v in vars(self).items() if n not in ("typed", "run", "turn")}


def unused(task):
    """Return {flag: why it has no effect} of a task's class: those of other tasks, and those that it names."""
    idle = {name: why for why, names in task.unused.items() for name in names.split()}
    for other, file in extras.TASKS.items():
        if other != task.name:
            why = f"is for --task {other}, --task is {task.name}"
            idle |= dict.fromkeys(extras.FLAGS[file].split(), why)
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
    files = {spelled(name): file for name, file in OF_EXTRAS.items()}
    parser.missing = {flag: extras.lacking(files, flag) for flag in files}
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


def files_of_seed(flags, seed):
    """Name the files that one seed of --runs writes, but for --log, to which all append -> {flag: file}."""
    names = [name for name, flag in FLAGS.items() if flag.endings and name != "log"]
    return {n: seed_path(file, seed) for n in names if (file := getattr(flags, n))}
