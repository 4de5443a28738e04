"""Pictures and traces of training: --curve, --timeline and --profile."""

import math
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from disk.files import StoreError, plural, write_whole

DRAWN = 8  # training steps in a timeline


def write_picture(path, figure):
    """Write a figure of matplotlib to a .png file."""
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))


def timeline(report, laps):
    """Draw a Gantt chart of the first training steps, one row per stage and thread. laps: of a `Clock`."""
    from matplotlib.figure import Figure

    from run.report import STAGES  # which imports the flags, and they this file

    ends = sorted(end for stage, _, end, _ in laps if stage in ("optimizer", "step"))[:DRAWN]
    if not ends:
        return  # an epoch that was resumed at its end has no steps
    rows = {}
    laps = [lap for lap in laps if lap[1] < ends[-1]]
    for stage, start, end, thread in sorted(laps, key=lambda lap: (STAGES.index(lap[0]), lap[3])):
        rows.setdefault((stage, thread), []).append((1e3 * start, 1e3 * (end - start)))
    figure = Figure(figsize=(12, 0.4 * len(rows) + 1), layout="constrained")
    axis = figure.subplots()
    for y, ((stage, _), bars) in enumerate(rows.items()):
        axis.broken_barh(
            bars,
            (y - 0.4, 0.8),
            # white edges would cover bars below 0.5 % of the width
            linewidth=[width > 5 * ends[-1] for _, width in bars],
            color=f"C{STAGES.index(stage)}",
            edgecolor="white",
        )
    axis.set_yticks(range(len(rows)), [f"{stage} ({thread})" for stage, thread in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds since the epoch began")
    axis.set_title(
        f"First {plural(len(ends), 'training step')} of an epoch: stages, with the threads they run on",
        loc="left",
    )
    write_picture(report.flags.timeline, figure)


def curve(report, task, best):
    """Draw loss, validation score and learning rate of each epoch of this run. best: what train.py keeps of the best epoch."""
    from matplotlib.figure import Figure

    flags = report.flags
    epochs = report.epochs
    if not epochs:
        print(f"curve   no epoch was completed: {flags.curve} is not drawn")
        return
    kept = best["epoch"] if best["model"] else epochs[-1]["epoch"]
    metric = task.metric
    numbers = [figures["epoch"] for figures in epochs]
    rows = {"training loss": [figures["loss"] for figures in epochs]}
    valid = [figures.get("valid") or {metric: figures.get("valid_sampled")} for figures in epochs]
    metric = metric if metric in valid[-1] else next(iter(valid[-1]))  # the first error of targets
    if any(scores.get(metric) is not None for scores in valid):
        rows[f"validation {metric}"] = [scores.get(metric) for scores in valid]
    rows["learning rate"] = [figures["lr"] for figures in epochs]
    figure = Figure(figsize=(8, 2 * len(rows) + 1), layout="constrained")
    axes = figure.subplots(len(rows), sharex=True)
    for color, (axis, (name, values)) in enumerate(zip(axes, rows.items())):
        values = [math.nan if value is None else value for value in values]
        axis.plot(numbers, values, f"C{color}", marker="o", markersize=3)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        if kept in numbers:
            axis.axvline(kept, color="gray", linestyle="--", linewidth=1)
            axis.plot(kept, values[numbers.index(kept)], "ko", markersize=6)
    axes[-1].ticklabel_format(axis="y", scilimits=(-2, 4))
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("epoch")
    where = "dashed" if kept in numbers else "before this run"
    name = Path(flags.dataset).name
    if len(name) > 70:
        name = f"{name[:67]}..."
    title = f"{flags.model} on {name}, seed {flags.seed}"
    axes[0].set_title(f"{title}\nweights kept: epoch {kept} ({where})", loc="left")
    write_picture(flags.curve, figure)


@contextmanager
def profile(report):
    """Trace all threads (torch 2.6: only this one) with torch.profiler -> --profile FILE.rank0.json, for
    Perfetto."""
    every_thread = None
    with suppress(TypeError):  # torch 2.6 has no such option
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as trace:
        yield
    path = Path(report.flags.profile)
    path = path.with_name(f"{path.stem}.rank{report.rank}.json")
    with report.attempt("profile"), tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "trace.json")
        trace.export_chrome_trace(str(exported))  # raises nothing if the disk is full
        data = exported.read_bytes()
        if not data.rstrip().endswith(b"}"):
            raise StoreError(f"{folder} has no room for the trace")
        write_whole(path, lambda file: file.write(data))
        if report.leads and report.flags.gpus and b'"cat": "kernel"' not in data:
            print("profile the trace lacks the GPU: CUPTI, which records kernels, did not start")


def flags(kinds):
    """Declare the flags of pictures and traces."""
    both = dict(needs=[kinds.training, kinds.library("matplotlib")], endings=(".png",))
    return {
        "tensorboard": dict(
            curve=kinds.free(
                kinds.text("FILE.png"),
                None,
                "draw loss, validation score and learning rate",
                **both,
            ),
            timeline=kinds.free(
                kinds.text("FILE.png"),
                None,
                "draw the stages of the second epoch's first steps",
                **both,
            ),
            profile=kinds.free(
                kinds.text("FILE"),
                None,
                "torch.profiler trace of epoch 2: FILE.rank0.json",
                needs=[kinds.training],
                endings=("",),
            ),
        )
    }
