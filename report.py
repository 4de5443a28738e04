"""What a run tells: its lines, its log, TensorBoard, the time of each stage and a picture of it, a trace.

This file needs disk.py, metrics.py and own_model.py.
"""

import json
import os
import platform
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function
from tqdm import tqdm

from disk import StoreError, readable_size, write_whole
from metrics import scores_line
from own_model import is_own

STAGES = ("sample", "fetch", "transfer", "forward", "backward", "optimizer", "step", "stall")  # step: the three before


class Clock:
    """When each stage began and ended; CUDA work is timed by events, resolved at the end without stopping the GPU.

    `mark` and `now` take the name of the stage that begins there, for the trace of --profile; none ends the last one.
    """

    def __init__(self, cuda):
        self.cuda, self.laps, self.events = cuda, [], []  # laps: (stage, start, end, thread or GPU)
        traced = torch.autograd.profiler._is_profiler_enabled
        self.named = threading.local() if traced else None  # the stage that each thread is in
        self.zero = time.perf_counter()
        self.first = self.mark() if cuda else None

    def now(self, stage=None):
        """A point on any thread, in seconds of the host."""
        if self.named:
            if stage_before := getattr(self.named, "stage", None):
                stage_before.__exit__(None, None, None)
            self.named.stage = stage and record_function(stage).__enter__()
        return time.perf_counter()

    def mark(self, stage=None):
        """A point on the training thread: seconds on CPU, an event of the current stream on CUDA."""
        now = self.now(stage)
        if not self.cuda:
            return now
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

    @contextmanager
    def timed(self, stage):
        """Record what runs inside as a stage, on any thread."""
        start = self.now(stage)
        yield
        self.add(stage, start, self.now())

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


def draw_timeline(runs, path, steps=8):
    """Draw Gantt charts of the first steps, one below the other on the same axis: a row for each stage and thread, so
    that overlap can be seen.

    Args:
        runs: {title: laps of a Clock}; one without a training step is left out.
        path: a .png file.
        steps: training steps of each run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    charts = []
    for title, laps in runs.items():
        if ends := sorted(end for stage, _, end, _ in laps if stage in ("optimizer", "step"))[:steps]:
            laps = [lap for lap in laps if lap[1] < ends[-1]]
            rows = sorted({(STAGES.index(stage), thread) for stage, _, _, thread in laps})
            charts.append((f"{title}: {len(ends)} training steps in {1e3 * ends[-1]:.0f} ms", laps, rows))
    if not charts:
        return  # an epoch that was resumed at its end has no steps
    heights = [len(rows) for *_, rows in charts]
    size = 12, 0.4 * sum(heights) + 1.2 * len(charts)
    figure, axes = pyplot.subplots(len(charts), sharex=True, squeeze=False, figsize=size, height_ratios=heights,
                                   layout="constrained")  # fmt: skip
    for axis, (title, laps, rows) in zip(axes[:, 0], charts):
        for stage, start, end, thread in laps:
            number = STAGES.index(stage)
            row, color = rows.index((number, thread)), f"C{number}"
            axis.barh(row, 1e3 * (end - start), left=1e3 * start, color=color, edgecolor="white")
        axis.set_yticks(range(len(rows)), [f"{STAGES[number]} ({thread})" for number, thread in rows])
        axis.invert_yaxis()
        axis.set_title(title)
    axes[-1, 0].set_xlabel("milliseconds")
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
    finally:
        pyplot.close(figure)


@contextmanager
def profile(report, rank):
    """Trace what runs inside, on all threads, with torch.profiler -> --profile FILE.rank0.json, for Perfetto."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as trace:
        yield
    path = Path(report.args.profile)
    with report.attempt("profile"), tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "trace.json")
        trace.export_chrome_trace(str(exported))  # which says nothing where the disk is full
        data = exported.read_bytes()
        if not data.rstrip().endswith(b"}"):
            raise StoreError(f"{folder} has no room for the trace")
        write_whole(path.with_name(f"{path.stem}.rank{rank}.json"), lambda file: file.write(data))


class Report:
    """Where a run's figures go: to the terminal, to --log and to --tensorboard, on rank 0.

    What cannot be written is said once, and training goes on.

    Attributes:
        failed: the flags whose files could not be written.
    """

    def __init__(self, ranks, args):
        self.args, self.leads, self.failed, self.board = args, ranks.leads, set(), None
        if self.leads and args.log:
            versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
            self._append({"flags": flags_of(args), "versions": versions, "hardware": hardware(ranks),
                          "began": time.strftime("%Y-%m-%dT%H:%M:%S%z")})  # fmt: skip
        if self.leads and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.attempt("tensorboard"):
                self.board = SummaryWriter(args.tensorboard)

    def tell(self, line, figures):
        """Print a line and append the figures to --log; an epoch's are drawn by TensorBoard, too."""
        if self.leads:
            tqdm.write(line)
            if self.args.log:
                self._append(figures)
            if self.board and "epoch" in figures:
                with self.attempt("tensorboard"):
                    for name, value in figures.items():
                        if isinstance(value, float):
                            self.board.add_scalar(name, value, figures["epoch"])
                    self.board.flush()

    def scores(self, scores):
        """Tell the final figures of graphs or links, {part: {name: number} or None} -> {"part name": number}."""
        self.tell("\n".join(f"{name:<5}  {scores_line(values)}" for name, values in scores.items()), {"scores": scores})
        exact = {f"{part} {name}": value for part, values in scores.items() if values for name, value in values.items()}
        self.results({f"exact/{name.replace(' ', '_')}": value for name, value in exact.items()}, self.args.epochs)
        return exact

    def results(self, figures, epoch):
        """Give the final figures of each split, {name: value}, to TensorBoard, beside the flags that led to them."""
        if self.board:
            figures = {name: value for name, value in figures.items() if value is not None}
            flags = {name: value if isinstance(value, (int, float)) else str(value)
                     for name, value in flags_of(self.args).items()}  # fmt: skip
            with self.attempt("tensorboard"):
                for name, value in figures.items():
                    self.board.add_scalar(name, value, epoch)
                self.board.add_hparams(flags, figures, run_name=".")
                self.board.close()

    @contextmanager
    def attempt(self, flag):
        """Go on where the body cannot write what a flag asks for, after saying so the first time."""
        try:
            yield
        except (OSError, StoreError) as error:
            if flag not in self.failed:
                said = f"train.py: --{flag} {getattr(self.args, flag)}: {getattr(error, 'strerror', None) or error}"
                print(f"{said}; training goes on without it", file=sys.stderr)
            self.failed.add(flag)

    def _append(self, figures):
        """Append a JSON line to --log: all of it, or none where the disk is full."""
        with self.attempt("log"), open(self.args.log, "ab", buffering=0) as file:
            line = json.dumps({"run": self.args.run, **figures}).encode() + b"\n"
            before = os.fstat(file.fileno()).st_size
            if file.write(line) < len(line):
                file.truncate(before)
                raise OSError("no space left on its disk")


def flags_of(args):
    """The flags of a run, without what parse_args adds -> {name: value}."""
    return {
        name: value for name, value in vars(args).items() if name not in ("typed", "trains", "again", "run", "turn")
    }


def hardware(ranks):
    """What a run runs on -> {name: value}."""
    try:
        names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    except OSError:
        names = []
    return {"host": platform.node(), "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if ranks.gpus else None, "processes": ranks.world}  # fmt: skip


def describe(ranks, args, store, model):
    """Print every derived quantity before the work starts."""
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    split = " / ".join(f"{name} {nodes.numel():,}" for name, nodes in store.split.items())
    threads = f"{torch.get_num_threads()} CPU threads each"
    if ranks.gpus and ranks.world > 1:
        threads += f", rank 0 on cores {min(os.sched_getaffinity(0))}-{max(os.sched_getaffinity(0))}, next to its GPU"
    where = f"{ranks.world} x {torch.cuda.get_device_name() if ranks.gpus else 'CPU'}"
    precision = "tf32 products (--precision fp32 for full ones)" if args.precision == "tf32" else args.precision
    if args.precision == "tf32" and not ranks.gpus:
        precision = "fp32, for tf32 needs a GPU"
    network = f"{args.num_layers} {'hops' if is_own(args.model) else f'layers, hidden {args.hidden}, norm {args.norm}'}"
    fanout = f"fanout {','.join(map(str, args.fanout))} from the seeds outward"
    if args.task == "link":
        lines = (
            f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges that carry messages, "
            f"{store.feature_dim} features; pairs: {split} ({args.edge_split})",
            f"model   {args.model}, {network}, scorer {args.scorer}, {parameters}; {fanout}; {args.negatives} "
            f"negatives a pair, {args.negatives_by}{', unchecked' if args.unchecked_negatives else ''}, "
            f"{args.link_loss}",
            args.total_batch * 2 > len(store.split["train"])
            and f"advice  a step leaves the {args.total_batch:,} pairs that it is "
            f"to predict out of the messages, and there are {len(store.split['train']):,}: give a smaller --batch-size",
        )
    elif args.task == "graph":
        lines = (
            f"graphs  {store.path}: {len(store):,} graphs; {split}",
            f"model   edge-gated regressor, {args.num_layers} layers, hidden {args.hidden}, {parameters}",
        )
    else:
        lines = (
            f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges, "
            f"{store.feature_dim} features, {store.num_classes} classes; {split}",
            f"model   {args.model}, {network}, {parameters}; {fanout}",
        )
    for line in (
        *lines,
        f"run     {where}, mode {args.mode}, {precision}, {threads}; batch {args.batch_size} x "
        f"{ranks.world}{f' x {args.accumulate}' if args.accumulate > 1 else ''} = {args.total_batch} seeds, "
        f"{args.steps} steps an epoch, {args.epochs} epochs; lr {args.lr:g}, weight decay {args.weight_decay:.2g}",
    ):
        if line:
            print(line, flush=True)


def epoch_line(args, figures):
    """The line of one epoch, at most 120 columns: of the stages' seconds, all in --log, as many as there is room for.

    Sampling and fetching run beside the rest; `stall` is what the training thread waited for them.
    """
    from_step = f" from step {figures['first_step'] + 1}" if figures["first_step"] else ""
    scores = figures.get("valid")
    if scores:
        scores = {name: value for name, value in scores.items() if name != "rmse_of_the_mean" and "hits" not in name}
    valid = scores_line(scores) if "valid" in figures else f"{percent(figures['valid_sampled'])} (sampled)"
    line = (f"epoch {figures['epoch']:>3}/{args.epochs}{from_step}  loss {figures['loss']:.4f}  valid {valid}  "
            f"{figures['seconds']:.2f} s  {figures['seeds_per_s']:,.0f} seeds/s")  # fmt: skip
    rest = {"": f"{figures['peak_bytes'] / 2**30:.2f} GiB "}
    if "bytes_read" in figures:
        rest["read"] = f"{readable_size(figures['bytes_read'])}, MIN {readable_size(figures['bytes_min'])} "
    for stage in ("stall", "sample", "fetch", "forward", "backward", "step", "exchange", "transfer"):
        if stage in figures:
            rest[stage] = f"{figures[stage]:.2f}"
    for name, value in rest.items():
        more = f" {name} {value}"
        line += more if len(line + more) <= 120 else ""
    return line


def percent(accuracy):
    """0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def peak_memory(ranks):
    """Peak bytes of this process: of GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
