"""Logging: console, JSON lines, TensorBoard; stage timing, timeline, profiler trace."""

import json
import os
import platform
import re
import resource
import statistics
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function
from tqdm import tqdm

from disk.files import SPLITS, StoreError, listed, plural, readable_size, write_whole
from extras import extra
from run.kinds import spelled
from tasks.metrics import METRICS, scores_line

# step: forward, backward and optimizer as CUDA graphs
STAGES = ("sample", "fetch", "transfer", "forward", "backward", "optimizer", "step", "stall")
# flags without effect where nothing is trained
OF_TRAINING = "lr lr_schedule warmup clip_norm weight_decay early_stop accumulate checkpoint_activations".split()


class Clock:
    """Records start and end of stages on any thread; CUDA work is timed by events, which only `totals` reads. zero:
    host time of the start (time.perf_counter). laps: [(stage, start, end, thread or "GPU")], seconds since zero."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.laps = []
        self.events = []
        self.zero = time.perf_counter()
        self.traced = torch.autograd.profiler._is_profiler_enabled
        self.first = cuda and self.mark()

    def mark(self):
        """Record an event on the current stream -> the event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def timed(self, stage, on_gpu=False):
        """Time the body as a stage, also in the trace of --profile. on_gpu: time what it launches on a GPU, if any."""
        by_events = on_gpu and self.cuda
        with record_function(stage) if self.traced else nullcontext():
            start = self.mark() if by_events else time.perf_counter()
            yield
            if by_events:
                self.events.append((stage, start, self.mark()))
            else:
                self.add(stage, start, time.perf_counter())

    def add(self, stage, start, end):
        """Record a stage between two host times (time.perf_counter)."""
        thread = threading.current_thread().name
        self.laps.append((stage, start - self.zero, end - self.zero, thread))

    def totals(self):
        """Return {stage: seconds} of the stages that were timed; synchronises with the GPU."""
        if self.events:
            torch.cuda.synchronize()
        at = lambda event: self.first.elapsed_time(event) / 1e3  # noqa: E731
        self.laps += [(stage, at(start), at(end), "GPU") for stage, start, end in self.events]
        sums = dict.fromkeys(STAGES, 0)
        for stage, start, end, _ in self.laps:
            sums[stage] += end - start
        return {stage: seconds for stage, seconds in sums.items() if seconds}


def write_table(path, chunks):
    """Write chunks {column: array or list [n]} of rows as a .csv or .parquet file -> (number of rows, columns)."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    library = pyarrow.csv.CSVWriter if path.endswith(".csv") else pyarrow.parquet.ParquetWriter
    first = pyarrow.table(next(chunks))
    count = 0

    def write(file):
        nonlocal count
        with library(file, first.schema) as writer:
            for chunk in chain([first], map(pyarrow.table, chunks)):
                writer.write_table(chunk)
                count += len(chunk)

    write_whole(path, write)
    return count, first.column_names


class Report:
    """Writes a run's figures on rank 0: to the terminal, --log and --tensorboard. A file that
    cannot be written is reported once, and training continues; failed: the flags of such files. epochs: the figures of
    each epoch so far. result: the last line of a run, see `print_result`."""

    def __init__(self, ranks, flags):
        self.flags = flags
        self.rank = ranks.rank
        self.leads = ranks.leads
        self.failed = set()
        self.board = None
        self.epochs = []
        self.result = ""
        if self.leads and flags.log:
            self._append(
                {
                    "flags": flags.values(),
                    "versions": {
                        "python": platform.python_version(),
                        "torch": torch.__version__,
                        "numpy": np.__version__,
                    },
                    "hardware": hardware(ranks),
                    "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                }
            )
        if self.leads and flags.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.attempt("tensorboard"):
                self.board = SummaryWriter(flags.tensorboard)

    def tell(self, line, figures):
        """Print a line unless it is empty, append the figures to --log and, for an epoch, to TensorBoard."""
        if self.leads and line:
            tqdm.write(line)
        if self.leads and self.flags.log:
            self._append(figures)
        if "epoch" not in figures:
            return
        self.epochs.append(figures)
        if self.board:
            with self.attempt("tensorboard"):
                valid = figures.get("valid") or {}  # a dict for links and graphs
                flat = figures | {f"valid/{name}": value for name, value in valid.items()}
                for name, value in flat.items():
                    if isinstance(value, float):
                        self.board.add_scalar(name, value, figures["epoch"])
                self.board.flush()

    def scores(self, scores, line="", **figures):
        """Report the final scores of links or graphs, {part: {metric: value} or None} -> {"part metric": value}. line: to print,
        figures: for --log beside them."""
        lines = [f"{part:<5}  {scores_line(values)}" for part, values in self.known(scores)]
        heads = [" " * 8] * (len(lines) - 1) + ["result  "]
        self.result = "\n".join(head + line for head, line in zip(heads, lines))
        self.tell(line, {"scores": scores, **figures})
        exact = {
            f"{part} {name}": value
            for part, values in scores.items()
            for name, value in (values or {}).items()
        }
        self.results(exact)
        return exact

    def exact(self, metric, figures, how):
        """Report the exact score of each part of the nodes, {part: score or None}; how: they were computed."""
        parts = [f"{part} {percent(figure)}" for part, figure in self.known(figures)]
        if parts:
            self.result = f"result  {metric}: {'  '.join(parts[::-1])}  ({how})"
        self.tell("", {"exact": figures, "seed": self.flags.seed})
        self.results(figures)

    def others(self, task, scored):
        """Report how many examples of each part a checkpoint was trained on, and the scores of the others. scored: function
        of their ids -> score, {metric: value} or None."""
        counts = {}
        scores = {}
        for part, mask in task.fresh().items():
            counts[part] = int((~mask).sum())
            score = scores[part] = scored(task.store.split[part][mask])
            score = scores_line(score) if isinstance(score, dict) else percent(score)
            self.result = (
                f"trained the checkpoint was trained on {counts[part]:,} of {len(mask):,} {part} {task.examples}; "
                f"without them {part} {score}\n{self.result}"
            )
        if counts:
            self.tell("", {"trained_on": counts, "without_them": scores})

    def runs(self, title, columns):
        """Report the mean and the standard deviation over --runs of scores {name: values}; some runs may lack one."""
        mean = {name: statistics.mean(values) for name, values in columns.items()}
        std = {name: statistics.stdev(v) if len(v) > 1 else None for name, v in columns.items()}
        count = self.flags.runs
        line = ""
        if columns:
            line = f"\nresult  {title} over {count} seeds (mean +- standard deviation)"
        # as each run prints them; the names of scores of links and graphs begin with a part
        parts = SPLITS[::-1]
        for name in sorted(columns, key=lambda name: parts.index(name.partition(" ")[0])):
            values = columns[name]
            of_targets = any(metric in name for metric in ("rmse", "mae", "r2"))
            scale, digits, unit = (1, 4, "") if of_targets else (100, 2, "%")
            spread = "" if std[name] is None else f" +- {scale * std[name]:.{digits}f}"
            of = f" of {len(values)}" if len(values) < count else ""
            line += f"  {name} {scale * mean[name]:.{digits}f}{spread}{unit}{of}"
        self.tell(line, {"runs": count, "mean": mean, "std": std})

    def print_result(self):
        """Print the final scores: the last line of a run, after an empty one unless others of --runs follow."""
        if self.leads and self.result:
            line = f"\n{self.result}"
            if self.flags.runs > 1:
                line = self.result.replace("result", "exact ")
            tqdm.write(line)

    def known(self, figures):
        """Return the (part, score) pairs to print; a run that only predicts leaves out parts without examples."""
        return [item for item in figures.items() if item[1] is not None or self.flags.trains]

    def stopped(self, epoch, step):
        """Report that a signal ended training, and how to resume."""
        file = self.flags.checkpoint
        kept = f"go on with --resume {file} --checkpoint {file}" if file else "nothing is kept"
        self.tell(f"stopped in epoch {epoch} after step {step}; {kept}", {"stopped": [epoch, step]})

    def draw(self, name, *what):
        """Draw what a flag of extras/pictures.py asks for; what: other arguments of the function of its name there."""
        if self.leads and getattr(self.flags, name):
            with self.attempt(name):
                getattr(extra(".pictures"), name)(self, *what)

    def traced(self):
        """Context for the epoch that --profile traces."""
        return extra(".pictures").profile(self) if self.flags.profile else nullcontext()

    def write(self, array, chunks):
        """Write the file of --predict and print what is in it. array: function that returns the tensor of an .npy file;
        chunks: of the rows of a table, see `write_table`."""
        if not self.leads:
            return
        path = self.flags.predict
        if path.endswith(".npy"):
            values = array().numpy()
            write_whole(path, lambda file: np.save(file, values))
            print(f"wrote {path}: {values.dtype} {list(values.shape)}")
        else:
            count, columns = write_table(path, chunks)
            print(f"wrote {path}: {plural(count, 'row')} of {listed(columns, 6)}")

    def results(self, figures):
        """Write the final scores, {name: value or None}, to TensorBoard, beside the flags."""
        if not self.board:
            return
        scores = {f"exact/{k.replace(' ', '_')}": v for k, v in figures.items() if v is not None}
        flags = self.flags.values().items()
        flags = {k: v if isinstance(v, int | float) else str(v) for k, v in flags}
        with self.attempt("tensorboard"):
            self.board.add_hparams(flags, scores, run_name=".", global_step=self.flags.epochs)
            self.board.close()

    @contextmanager
    def attempt(self, flag):
        """Context for writing what a flag asks for: if that fails, report it the first time and continue."""
        try:
            yield
        except (OSError, StoreError) as error:
            if flag not in self.failed:
                print(
                    f"train.py: --{flag} {getattr(self.flags, flag)}: {error}; training goes on without it",
                    file=sys.stderr,
                )
            self.failed.add(flag)

    def _append(self, figures):
        """Append a JSON line to --log: the whole line, or nothing if the disk is full."""
        line = json.dumps({"run": self.flags.run, **figures}).encode() + b"\n"
        with self.attempt("log"), open(self.flags.log, "ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            if file.write(line) < len(line):
                file.truncate(before)
                raise OSError("no space left on its disk")


def hardware(ranks):
    """Describe the machine of a run, as a dict for --log."""
    cpu = platform.processor()
    with suppress(OSError, TypeError):  # no such file, or no such line as on ARM
        cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))[1]
    return {
        "host": platform.node(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if ranks.gpus else None,
        "processes": ranks.world,
    }


def describe(run, file, epoch, step):
    """Print every derived quantity before training starts, and where the checkpoint in `file` resumes."""
    ranks = run.ranks
    plan = run.plan
    trained = plan.trains and epoch < plan.epochs
    lines = []
    if plan.verbose or not plan.turn:
        lines = plan_lines(ranks, plan, run.task, run.model, trained)
        mode = f", mode {plan.mode}" * run.task.placed
        if plan.sample_threads > 1 and plan.prefetch:
            mode += f", {plan.sample_threads} of {plan.prefetch} batches ahead sampled at once"
        lines.append(f"run     {where(ranks)}, {precision(ranks, plan)}{mode}")
    if file and trained:
        lines.append(f"resume  from epoch {epoch + 1}, step {step + 1}")
    elif file:
        why = f", as --epochs is {plan.epochs}" * plan.trains
        if idle := [spelled(name) for name in OF_TRAINING if name in plan.typed]:
            why += f": no effect of {', '.join(idle)}"
        lines.append(f"resume  after epoch {epoch}: nothing is trained{why}")
    if plan.trains and plan.checkpoint not in (None, file) and os.path.isfile(plan.checkpoint):
        resume = "auto" if plan.runs == 1 else plan.checkpoint
        lines.append(
            f"replace {plan.checkpoint} of an earlier run; --resume {resume} would go on with it"
        )
    if trained and not (plan.checkpoint or plan.export or plan.turn):
        lines.append("keep    no --checkpoint FILE is given: the trained model is lost at the end")
    ranks.say("\n".join(lines))


def plan_lines(ranks, plan, task, model, trained):
    """List the lines about data and network and, if it is `trained`, about steps and rates."""
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    split = " / ".join(f"{name} {ids.numel():,}" for name, ids in task.store.split.items())
    lines = [*task.lines(plan, split, parameters)]
    if not trained:
        return lines
    parts = [f"{plan.accumulate} passes"] * (plan.accumulate > 1)
    parts += [f"{ranks.world} processes"] * (ranks.world > 1)
    batch = f"{plan.batch_size:,}"
    if parts:
        batch += f" x {' x '.join(parts)} = {plan.total_batch:,}"
    steps = plural(plan.steps, "step")
    batch += f" {task.examples}"
    if task.limits:
        most = {"nodes": plan.max_nodes, "edges": plan.max_edges, task.examples: plan.batch_size}
        most = [f"{n:,} {noun}" for noun, n in most.items() if n and n < task.limits.unlimited]
        batch = " x ".join([f"up to {' and '.join(most)}", *parts])
        steps = f"about {steps}"
    rates = f"learning rate {plan.lr:g}, weight decay {plan.weight_decay:.2g}"
    if plan.warmup:
        rates += f", {plural(plan.warmup, 'step')} of warm-up"
    if plan.clip_norm:
        rates += f", gradients clipped to the norm {plan.clip_norm:g}"
    lines.append(f"train   {plural(plan.epochs, 'epoch')} of {steps}, each of {batch}; {rates}")
    return lines


def where(ranks):
    """Describe the devices of a run, its processes and their threads."""
    threads = plural(torch.get_num_threads(), "thread")
    if not ranks.gpus and ranks.world == 1:
        return f"CPU, {threads}"
    if not ranks.gpus:
        return f"{ranks.world} CPU processes, {threads} each"
    return f"{ranks.world} x {torch.cuda.get_device_name()}, {threads} each"


def precision(ranks, plan):
    """Describe the precision of matrix products."""
    if plan.precision != "tf32":
        return plan.precision
    if ranks.gpus:
        return "tf32 products (--precision fp32 for full ones)"
    return "fp32, as tf32 needs a GPU"


def epoch_line(plan, figures, examples="seeds"):
    """Format the line of an epoch, at most 120 columns: what does not fit is in --log. examples: what is trained on."""
    valid = "n/a"
    sampled = figures.get("valid_sampled")
    if sampled is not None:
        valid = f"{METRICS[plan.metric].title} {percent(sampled)} (sampled)"
    elif figures.get("valid"):
        left_out = re.compile("@|r2|rmse_of")
        scores = figures["valid"].items()
        valid = scores_line({k: v for k, v in scores if k == plan.metric or not left_out.search(k)})
        valid += " (sampled)" * (examples == "nodes")
    from_step = f" from step {figures['first_step'] + 1}" if figures["first_step"] else ""
    # an epoch that was resumed after its last step has no loss
    loss = "n/a" if figures["loss"] is None else f"{figures['loss']:.4f}"
    line = f"epoch {figures['epoch']:>3}/{plan.epochs}{from_step}  loss {loss}  valid {valid}"
    line += f"  {figures['seconds']:.2f} s  {figures['seeds_per_s']:,.0f} {examples}/s"
    parts = [f"memory {figures['peak_bytes'] / 2**30:.2f} GiB"]
    if "bytes_read" in figures:
        hits = " + ".join(f"{share:.0%}" for share in figures["tiers"].values())
        parts = [f"hits {hits}", f"read {readable_size(figures['bytes_read'])}", *parts]
    if "stall" in figures:
        parts.append(f"waited {figures['stall']:.2f} s")
    for part in parts:
        line += f"  {part}" if len(f"{line}  {part}") <= 120 else ""
    return line


def stages_line(figures):
    """Format the seconds of an epoch's stages: sampling, fetching and copies overlap with the training thread's."""

    def seconds(*stages):
        return "  ".join(f"{stage} {figures[stage]:.2f}" for stage in stages if stage in figures)

    line = f"{'':8}seconds: {seconds('stall', 'forward', 'backward', 'optimizer', 'step')}"
    beside = seconds("sample", "fetch", "transfer", "exchange")
    return f"{line}; meanwhile {beside}" if beside else line


def best_line(plan, start, epoch, score):
    """Format the line of the epoch whose weights are kept; training that found them in its last tenth may have ended
    too early. start: epochs before this run."""
    epochs = max(start, plan.epochs)
    last = plan.trains and 10 * epoch > 9 * epochs
    more = "; it is among the last, more --epochs may help" * last
    return f"best    weights of epoch {epoch} of {epochs}: valid {score}{more}"


def exchange(parallel):
    """Return the mean seconds per step that the all-reduce of gradients was not hidden by the backward pass."""
    times = parallel._get_ddp_logging_data()  # without the last step
    communication = times.get("avg_backward_comm_time", 0)
    overlap = times.get("avg_backward_compute_comm_overlap_time", 0)
    return (communication - overlap) / 1e9


def advice(ranks, figures):
    """Return a line of advice if one process would be as fast, judging by an epoch, else "": processes
    without GPUs share the cores of their machine, and all wait for the gradient all-reduce."""
    units = ranks.world if ranks.gpus else ranks.world // ranks.local_world
    seconds = figures["seconds"]
    exchange = figures.get("exchange", 0)
    alone = units * (seconds - exchange)
    if alone >= seconds:
        return ""
    return (
        f"advice  {ranks.world} processes spend {exchange:.2f} of {seconds:.2f} s on the exchange of gradients: "
        f"one alone would take about {alone:.2f} s"
    )


def percent(accuracy):
    """Format an accuracy: 0.8123 -> '81.23%'; None -> 'n/a'."""
    return "n/a" if accuracy is None else f"{100 * accuracy:.2f}%"


def peak_memory(ranks):
    """Return the peak bytes of this process: GPU memory on CUDA, resident memory on CPU."""
    if ranks.gpus:
        return torch.cuda.max_memory_allocated()
    # not ru_maxrss, which counts the process that started this one
    with suppress(OSError, TypeError):
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
