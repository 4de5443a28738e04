"""What a run tells: its lines, its log, TensorBoard, the time of each stage and a picture of it, a trace.

This file needs ddp.py and graphs.py.
"""

import functools
import json
import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from graphs import scores_line

STAGES = ("sample", "fetch", "transfer", "forward", "backward", "optimizer", "stall")


class Clock:
    """When each stage began and ended; CUDA work is timed by events, resolved at the end without stopping the GPU."""

    def __init__(self, cuda):
        self.cuda, self.laps, self.events = cuda, [], []  # laps: (stage, start, end, thread or GPU)
        self.zero = time.perf_counter()
        self.first = self.mark() if cuda else None

    def mark(self):
        """A point on the training thread: seconds on CPU, an event of the current stream on CUDA."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, stage, start, end):
        """Record a stage between two marks."""
        if self.cuda:
            self.events.append((stage, start, end))
        else:
            self.add(stage, start, end)

    def add(self, stage, start, end):
        """Record a stage between two times of the host; any thread may call."""
        self.laps.append((stage, start - self.zero, end - self.zero, threading.current_thread().name))

    def resolve(self):
        """Turn events into times; waits for the GPU -> laps."""
        if self.events:
            torch.cuda.synchronize()
        at = lambda event: self.first.elapsed_time(event) / 1e3  # noqa: E731
        self.laps += [(stage, at(start), at(end), "GPU") for stage, start, end in self.events]
        self.events = []
        return self.laps

    def totals(self):
        """Seconds of each stage that was timed."""
        laps = self.resolve()
        found = {name for name, *_ in laps}
        return {stage: sum(b - a for name, a, b, _ in laps if name == stage) for stage in STAGES if stage in found}


def draw_timeline(laps, path, steps=8):
    """Draw a Gantt chart of the first steps: one row for each stage and thread, so that overlap can be seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ends = sorted(b for stage, _, b, _ in laps if stage == "optimizer")
    if not ends:
        return  # an epoch that was resumed at its end has no steps
    until = ends[min(steps, len(ends)) - 1]
    laps = [lap for lap in laps if lap[1] < until]
    rows = sorted({(thread, STAGES.index(stage)) for stage, _, _, thread in laps}, key=lambda row: (row[1], row[0]))
    figure, axis = pyplot.subplots(figsize=(12, 0.4 * len(rows) + 1.2), layout="constrained")
    for stage, a, b, thread in laps:
        number = STAGES.index(stage)
        axis.barh(rows.index((thread, number)), 1e3 * (b - a), left=1e3 * a, color=f"C{number}", edgecolor="white")
    axis.set_yticks(range(len(rows)), [f"{STAGES[number]} ({thread})" for thread, number in rows])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    axis.set_title(f"{min(steps, len(ends))} training steps")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@contextmanager
def profile(ranks, args):
    """Trace what runs inside with torch.profiler -> --profile FILE, with the rank in its name."""
    with torch.profiler.profile() as trace:
        yield
    path = Path(args.profile)
    trace.export_chrome_trace(str(path.with_name(f"{path.stem}.rank{ranks.rank}.json")))


def report(ranks, args, figures, line):
    """Print a line, append the figures to --log and write them for TensorBoard, on rank 0."""
    if ranks.leads:
        tqdm.write(line)
        if args.log:
            with open(args.log, "a") as file:
                file.write(json.dumps(figures) + "\n")
        if args.tensorboard and "epoch" in figures:
            writer = tensorboard(args.tensorboard)
            for name, value in figures.items():
                if isinstance(value, float):
                    writer.add_scalar(name, value, figures["epoch"])
            writer.flush()


@functools.lru_cache(maxsize=1)
def tensorboard(folder):
    """TensorBoard's writer for a folder."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def describe(ranks, args, store, model):
    """Print every derived quantity before the work starts."""
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    split = " / ".join(f"{name} {nodes.numel():,}" for name, nodes in store.split.items())
    threads = f"{torch.get_num_threads()} CPU threads each"
    if ranks.gpus and ranks.world > 1:
        threads += f", rank 0 on cores {min(os.sched_getaffinity(0))}-{max(os.sched_getaffinity(0))}, next to its GPU"
    where = f"{ranks.world} x {torch.cuda.get_device_name() if ranks.gpus else 'CPU'}"
    precision = "tf32 products (--precision fp32 for full ones)" if args.precision == "tf32" else args.precision
    if args.task == "graph":
        lines = (
            f"graphs  {store.path}: {len(store):,} graphs; {split}",
            f"model   edge-gated regressor, {args.num_layers} layers, hidden {args.hidden}, {parameters}",
        )
    else:
        lines = (
            f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, "
            f"{store.feature_dim} features, {store.num_classes} classes; {split}",
            f"model   {args.model}, {args.num_layers} layers, hidden {args.hidden}, {parameters}; "
            f"fanout {','.join(map(str, args.fanout))} from the seeds outward",
        )
    for line in (
        *lines,
        f"run     {where}, mode {args.mode}, {precision}, {threads}; batch {args.batch_size} x "
        f"{ranks.world}{f' x {args.accumulate}' if args.accumulate > 1 else ''} = {args.total_batch} seeds, {args.steps} steps an epoch",
    ):
        if line:
            print(line, flush=True)


def epoch_line(args, figures):
    """The dense line of one epoch. Sampling and fetching run beside the rest; `stall` is what they cost."""
    stages = "  ".join(f"{stage} {figures[stage]:.2f}" for stage in (*STAGES, "exchange") if stage in figures)
    from_step = f" from step {figures['first_step'] + 1}" if figures["first_step"] else ""
    valid = scores_line(figures["valid"]) if "valid" in figures else f"{percent(figures['valid_sampled'])} (sampled)"
    return (
        f"epoch {figures['epoch']:>3}/{args.epochs}{from_step}  loss {figures['loss']:.4f}  valid {valid}  {figures['seconds']:.2f} s  "
        f"{figures['seeds_per_s']:,.0f} seeds/s  [{stages} s]  peak {figures['peak_bytes'] / 2**30:.2f} GiB"
    )


def percent(accuracy):
    """0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def peak_memory(ranks):
    """Peak bytes of this process: of GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
