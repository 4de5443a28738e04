"""Logging: console, JSON lines, TensorBoard; stage timing, timeline, profiler trace."""

import json
import os
import platform
import re
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function
from tqdm import tqdm

from disk.files import StoreError, readable_size, write_whole
from tasks.metrics import scores_line

# step: forward, backward and optimizer as CUDA graphs
STAGES = ("sample", "fetch", "transfer", "forward", "backward", "optimizer", "step", "stall")


class Clock:
    """Start and end of each stage. CUDA work is timed by events, resolved at the end without a wait.

    `mark` and `now` take the stage that begins there, for the trace of --profile; None ends the last.
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
        self.laps.append(
            (stage, start - self.zero, end - self.zero, threading.current_thread().name)
        )

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
        sums = {}
        for stage, start, end, _ in self.resolve():
            sums[stage] = sums.get(stage, 0) + end - start
        return {stage: sums[stage] for stage in STAGES if stage in sums}


def draw_timeline(runs, path, steps=8):
    """Draw a Gantt chart of the first training steps, a row for each run, stage and thread.

    Args:
        runs: {title: laps of a Clock}; one without a training step is left out.
        path: a .png file.
        steps: training steps of each run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {}
    for title, laps in runs.items():
        ends = sorted(end for stage, _, end, _ in laps if stage in ("optimizer", "step"))[:steps]
        laps = [lap for lap in laps if ends and lap[1] < ends[-1]]
        for stage, start, end, thread in sorted(laps, key=lambda lap: STAGES.index(lap[0])):
            label = f"{title}: {stage} ({thread})"
            rows.setdefault((label, stage), []).append((1e3 * start, 1e3 * (end - start)))
    if not rows:
        return  # an epoch that was resumed at its end has no steps
    size = 12, 0.4 * len(rows) + 1
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    for y, ((_, stage), bars) in enumerate(rows.items()):
        axis.broken_barh(bars, (y - 0.4, 0.8), color=f"C{STAGES.index(stage)}", edgecolor="white")
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.invert_yaxis()
    axis.set_xlabel(f"milliseconds, the first {steps} training steps")
    try:
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=120))
    finally:
        pyplot.close(figure)


@contextmanager
def profile(report, rank):
    """Trace the body on all threads with torch.profiler -> --profile FILE.rank0.json, for Perfetto."""
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as trace:
        yield
    path = Path(report.args.profile)
    with report.attempt("profile"), tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "trace.json")
        trace.export_chrome_trace(str(exported))  # silent where the disk is full
        data = exported.read_bytes()
        if not data.rstrip().endswith(b"}"):
            raise StoreError(f"{folder} has no room for the trace")
        write_whole(path.with_name(f"{path.stem}.rank{rank}.json"), lambda file: file.write(data))


class Report:
    """Where rank 0 puts a run's figures: the terminal, --log, --tensorboard.

    A file that cannot be written is reported once, and training continues.

    Attributes:
        failed: the flags whose files could not be written.
    """

    def __init__(self, ranks, args):
        self.args, self.leads, self.failed, self.board = args, ranks.leads, set(), None
        if self.leads and args.log:
            versions = {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            }
            began = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            start = {"flags": flags_of(args), "versions": versions, "hardware": hardware(ranks)}
            self._append({**start, "began": began})
        if self.leads and args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.attempt("tensorboard"):
                self.board = SummaryWriter(args.tensorboard)

    def tell(self, line, figures):
        """Print a line unless it is empty, append the figures to --log, an epoch's to TensorBoard."""
        if self.leads:
            if line:
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
        """Report the final figures of graphs or links, {part: {name: number} or None} -> {"part name": number}."""
        shown = known(scores, self.args)
        lines = (f"{name:<5}  {scores_line(values)}" for name, values in shown.items())
        self.tell("\n".join(lines), {"scores": scores})
        exact = {
            f"{part} {name}": value
            for part, values in scores.items()
            for name, value in (values or {}).items()
        }
        named = {f"exact/{name.replace(' ', '_')}": value for name, value in exact.items()}
        self.results(named, self.args.epochs)
        return exact

    def exact(self, name, figures):
        """Report the exact score of each part of the nodes, {part: score or None}."""
        shown = known(figures, self.args)
        line = "  ".join(f"{part} {percent(figure)}" for part, figure in shown.items())
        self.tell(line and f"{name}  {line}", {"exact": figures, "seed": self.args.seed})
        named = {f"exact/{part}": figure for part, figure in figures.items()}
        self.results(named, self.args.epochs)

    def best(self, best):
        """Report which weights --early-stop has kept."""
        if self.leads:
            score = f"{self.args.metric} {best['score']:.4f}"
            if self.args.task == "node":
                score = f"{percent(best['score'])} (sampled)"
            print(f"best    weights of epoch {best['epoch']}: valid {score}")

    def stopped(self, epoch, step):
        """Report that a signal ended training, and how to resume."""
        kept = f"go on with: {self.args.again}"
        kept = kept if self.args.checkpoint else "nothing kept: no --checkpoint"
        line = f"stopped in epoch {epoch} after step {step}; {kept}"
        self.tell(line, {"stopped": [epoch, step]})

    def write(self, tensor):
        """Write the array of --predict and report what it is."""
        if self.leads:
            path, array = self.args.predict, tensor.numpy()
            write_whole(path, lambda file: np.save(file, array))
            print(f"wrote {path}: {array.dtype} {list(array.shape)}")

    def results(self, figures, epoch):
        """Give the final figures, {name: value or None}, to TensorBoard, beside the flags."""
        if self.board:
            figures = {name: value for name, value in figures.items() if value is not None}
            flags = {
                name: value if isinstance(value, int | float) else str(value)
                for name, value in flags_of(self.args).items()
            }
            with self.attempt("tensorboard"):
                for name, value in figures.items():
                    self.board.add_scalar(name, value, epoch)
                self.board.add_hparams(flags, figures, run_name=".")
                self.board.close()

    @contextmanager
    def attempt(self, flag):
        """Continue where the body cannot write what a flag asks for, reporting it the first time."""
        try:
            yield
        except (OSError, StoreError) as error:
            if flag not in self.failed:
                why = getattr(error, "strerror", None) or error
                said = f"train.py: --{flag} {getattr(self.args, flag)}: {why}"
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
    added = ("typed", "trains", "again", "run", "turn")
    return {name: value for name, value in vars(args).items() if name not in added}


def hardware(ranks):
    """What a run runs on -> {name: value}."""
    cpu = platform.processor()
    with suppress(OSError):
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return {
        "host": platform.node(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if ranks.gpus else None,
        "processes": ranks.world,
    }


def describe(run, file, epoch, step):
    """Print every derived quantity before the work starts, and where a checkpoint `file` goes on."""
    ranks, args, store = run.ranks, run.args, run.store
    parameters = f"{sum(p.numel() for p in run.model.parameters()):,} parameters"
    split = " / ".join(f"{name} {nodes.numel():,}" for name, nodes in store.split.items())
    where = f"{ranks.world} x {torch.cuda.get_device_name() if ranks.gpus else 'CPU'}"
    threads = f"{torch.get_num_threads()} CPU threads each"
    if ranks.gpus and ranks.world > 1:
        cores = os.sched_getaffinity(0)
        threads += f", rank 0 on cores {min(cores)}-{max(cores)}, next to its GPU"
    precision = args.precision
    if precision == "tf32":
        on_gpu = "tf32 products (--precision fp32 for full ones)"
        precision = on_gpu if ranks.gpus else "fp32, for tf32 needs a GPU"
    for line in run.task.lines(args, split, parameters):
        print(line)
    passes = f" x {args.accumulate}" if args.accumulate > 1 else ""
    print(
        f"run     {where}, mode {args.mode}, {precision}, {threads}; batch {args.batch_size} x "
        f"{ranks.world}{passes} = {args.total_batch} seeds, {counted(args.steps, 'step')} an epoch, "
        f"{counted(args.epochs, 'epoch')}; lr {args.lr:g}, weight decay {args.weight_decay:.2g}",
        flush=True,
    )
    if file:
        trains = args.trains and epoch < args.epochs
        done = f"after epoch {epoch}: nothing is trained"
        print(f"resume  {f'from epoch {epoch + 1}, step {step}' if trains else done}")
    if args.trains and args.checkpoint not in (None, file) and os.path.isfile(args.checkpoint):
        print(
            f"replace {args.checkpoint} holds an earlier run and will be replaced; --resume auto would go on "
            "with it"
        )


def counted(number, what):
    """1, 'step' -> '1 step'; 2, 'step' -> '2 steps'."""
    return f"{number} {what}{'s' * (number != 1)}"


def epoch_line(args, figures):
    """The line of one epoch, at most 120 columns; as many stages as fit, all of them are in --log.

    Sampling and fetching overlap with the rest; `stall` is what the training thread waited for them.
    """
    valid = f"{percent(figures.get('valid_sampled'))} (sampled)"
    if "valid" in figures:
        rest = {
            name: value
            for name, value in (figures["valid"] or {}).items()
            if name != "rmse_of_the_mean" and "hits" not in name
        }
        valid = scores_line(rest or None)
    from_step = f" from step {figures['first_step'] + 1}" if figures["first_step"] else ""
    line = (
        f"epoch {figures['epoch']:>3}/{args.epochs}{from_step}  loss {figures['loss']:.4f}  "
        f"valid {valid}  {figures['seconds']:.2f} s  {figures['seeds_per_s']:,.0f} seeds/s"
    )
    more = [f" {figures['peak_bytes'] / 2**30:.2f} GiB "]
    if "bytes_read" in figures:
        more += [f"read {readable_size(figures['bytes_read'])} "]
    stages = "stall sample fetch forward backward step exchange transfer".split()
    more += [f"{stage} {figures[stage]:.2f}" for stage in stages if stage in figures]
    for part in more:
        line += f" {part}" if len(f"{line} {part}") <= 120 else ""
    return line


def advice(ranks, figures):
    """A line where one process would be as fast, judged by an epoch: processes without GPUs share the cores of their
    machine, and all wait for the exchange of gradients."""
    units = ranks.world if ranks.gpus else ranks.world // ranks.local_world
    seconds, exchange = figures["seconds"], figures.get("exchange", 0)
    if units * (seconds - exchange) >= seconds:
        return ""
    return (
        f"advice  {ranks.world} processes spend {exchange:.2f} of {seconds:.2f} s on the exchange of gradients"
        f"{'' if ranks.gpus else ' and share the cores'}: one will be as fast"
    )


def known(figures, args):
    """The figures to print, {part: figure or None}: a run that only predicts leaves out parts without examples."""
    return {part: figure for part, figure in figures.items() if figure is not None or args.trains}


def percent(accuracy):
    """0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def peak_memory(ranks):
    """Peak bytes of this process: GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
