"""train.py's command line, from the declarations in run/flags.py: defaults that depend on other flags, refused combinations.

`parse_args` exits with code 2 and one sentence on bad input, before anything is loaded.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import torch

from disk.files import check_name, plural
from run.flags import FLAGS, SEEDS, TASKS, make_parser, model_or_default, parsed, unused
from run.kinds import spelled, text_of


def parse_args(argv, complete):
    """Parse the words after "train.py" -> Flags. complete: function(flags) that fills in those of the checkpoint to resume."""
    parser = make_parser()
    flags = parsed(parser, argv)
    if flags.resume == "auto" and not flags.checkpoint:
        parser.error("--resume auto takes the file of --checkpoint, which is missing")
    completed = complete(flags)
    flags = filled_in(completed, fresh=completed is flags)
    check_values(parser, flags)
    check_files(parser, flags)
    return flags


def filled_in(flags, fresh):
    """Return the flags with the defaults that depend on other flags filled in. fresh: they are not those of a checkpoint."""
    task = TASKS[flags.task]
    defaults = task.defaults(flags) if fresh else {}
    flags = replace(flags, **{n: defaults[n] for n in {*defaults} & {*FLAGS} - {*flags.typed}})
    if "model" not in {*flags.typed, *defaults}:
        flags = replace(flags, model=model_or_default(flags))
    conv = flags.layer
    fanout = flags.fanout or [10] * (flags.num_layers or 3)
    values = {
        "fanout": fanout,
        "num_layers": flags.num_layers or len(fanout),
        "batch_size": flags.batch_size or (SEEDS if task.placed else None),
        "norm": flags.norm or conv.norm,
        "heads": flags.heads or conv.heads,
    }
    by_graph = task.classes_agree and conv.residual == "if classes disagree"  # `settle` decides
    if flags.residual is None and not by_graph:
        values["residual"] = conv.residual == "yes"
    if flags.gpus is None:
        single = flags.procs == 1 and flags.mode != "cpu-cpu"
        values["gpus"] = int(single and torch.cuda.is_available())
    return replace(flags, **values)


def check_values(parser, flags):
    """Reject a network that cannot work, and flags that were typed but have no effect, or not the one they name."""
    task = TASKS[flags.task]
    conv = flags.layer
    whose = "" if "task" in flags.typed or not flags.resume else f" (the task of {flags.resume})"
    idle = unused(task)
    for name, flag in FLAGS.items():
        value = getattr(flags, name)
        if name not in flags.typed or value == flag.default and flag.default_is_off:
            continue
        for why in [name in idle and idle[name] + whose, *(need(flags) for need in flag.needs)]:
            if why:
                parser.error(f"{spelled(name, value)} {why}")
    hops = len(flags.fanout)
    if hops != flags.num_layers:
        parser.error(
            f"--fanout {text_of(flags.fanout)} has {plural(hops, 'hop')}, "
            f"--num-layers is {flags.num_layers}: one fanout a layer is needed"
        )
    if "heads" in conv.takes and flags.hidden % flags.heads:
        parser.error(f"--hidden {flags.hidden} is no multiple of --heads {flags.heads}: give one")
    if flags.norm == "batch" and flags.checkpoint_activations:
        parser.error("--norm batch counts twice with --checkpoint-activations: use --norm layer")
    if flags.metric and flags.metric not in task.metrics:
        parser.error(
            f"--metric {flags.metric}: --task {flags.task} has {', '.join(task.metrics) or 'none'}"
        )
    if flags.task == "graph" and flags.precision == "fp64":
        parser.error("--precision fp64 is not for --task graph: take fp32")


def check_files(parser, flags):
    """Reject files that cannot be written, or that another flag names too."""
    data = re.match(r"(.*\.(npz|pth?))(:|$)", flags.dataset, re.DOTALL)
    taken = {}
    for flag in (
        "dataset pairs edge_split resume init checkpoint predict report log curve timeline".split()
    ):
        name = getattr(flags, flag)
        if flag == "dataset":
            name = data and data[1]
        if not name or os.path.exists(name) and not os.path.isfile(name):
            continue
        other = taken.setdefault(os.path.realpath(name), flag)
        if other != flag and [other, flag] != ["resume", "checkpoint"]:
            parser.error(
                f"--{flag} {name}: that is the file of {spelled(other)}, give another name"
            )
    for flag, declared in FLAGS.items():
        name = getattr(flags, flag)
        folder = declared.kind.get("metavar") == "DIR"
        if name is None or not (declared.endings or folder):
            continue
        path = Path(name).absolute()
        check_name(path)
        if folder:
            continue
        if not name.endswith(declared.endings):
            parser.error(
                f"--{flag} {name}: give a name that ends in {' or '.join(declared.endings)}"
            )
        # --log is appended to; the other files are written under a temporary name and renamed. Functions of Path would
        # raise where the system refuses to look
        in_place = os.path.exists(path) and (flag == "log" or not os.path.isfile(path))
        if os.path.isdir(path) or not os.access(path if in_place else path.parent, os.W_OK):
            parser.error(f"--{flag} {name}: a file cannot be written there")
