"""What the commands share: contenders timed in turn, tables, memory, processes of their own, figures."""

import contextlib
import ctypes
import functools
import json
import math
import mmap
import multiprocessing
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from disk.files import StoreError, write_whole
from run import allocator
from sampler import import_dgl
from sources import prepare
from store import GraphStore

# asked of nvidia-smi without a CUDA context, since some GPUs serve one process at a time
GPU_FIELDS = "name memory.total compute_cap driver_version power.limit clocks.max.sm clocks.max.mem"
GPU_FIELDS = [*GPU_FIELDS.split(), "pcie.link.gen.max", "pcie.link.width.max"]


def hardware(gpu=False):
    """Processor, memory, versions and, with `gpu`, the GPU and its libraries -> dict."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    figures = {
        "cpu": named[1].strip() if named else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if gpu:
        figures["cuda"] = torch.version.cuda
        command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            answers = done.stdout.splitlines()[0].split(", ")
            figures |= dict(zip(["gpu", *GPU_FIELDS[1:]], answers))
    return figures


def settle(threads):
    """Set the number of threads, silence warnings and bound oneDNN's caches as train.py does."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    allocator.before_torch()  # oneDNN reads its variables at its first product


@functools.cache
def opened(dataset, root):
    """The store of a data set, built under `root` if it is not there -> GraphStore, one for a process."""
    return GraphStore.open(prepare.prepare(dataset, root))


@contextlib.contextmanager
def without_others(name):
    """Leave out a contender of another library, whose import can raise anything; one of ours must not fail."""
    try:
        yield
    except Exception as error:
        if not name.startswith(("DGL", "GraphBolt", "PyG")):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        print(f"left out: {name} ({reason[:120]})")


def prepared(contenders, attempt=without_others):
    """Call {name: function that prepares a contender and returns its step} -> {name: step}."""
    steps = {}
    for name, prepare_step in contenders.items():
        with attempt(name):
            steps[name] = prepare_step()
    return steps


def on_host(step, i):
    """Take a step -> (seconds, what it returned)."""
    # the OpenMP threads of the step before spin for a while and would slow this one down
    time.sleep(0.02)
    start = time.perf_counter()
    result = step(i)
    return time.perf_counter() - start, result


def interleave(
    steps,
    rounds,
    *,
    warmup=2,
    twice=False,
    note=lambda name, result: None,
    timed=on_host,
    attempt=without_others,
):
    """Time contenders {name: step, a function of the round's number}, once a round each, in turn -> {name: [seconds]}.

    The first `warmup` rounds do not count. With `twice`, an untimed run precedes each timed one, so that a contender
    finds memory and caches as it left them itself. note(name, result) is called with what each run returned; a
    contender that raises in the context attempt(name) takes part no longer, if that context goes on.
    """
    times = {name: [] for name in steps}
    for i in range(warmup + rounds):
        for name in list(times):
            with attempt(name):
                if twice:
                    steps[name](i)
                seconds, result = timed(steps[name], i)
                note(name, result)
                times[name] += [seconds] * (i >= warmup)
                continue
            del times[name]
    return times


def medians(times):
    """{name: [seconds]} -> {name: median}."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def figure_text(value):
    """A number with four digits and k, M or G; anything else as it is, None as nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "" if value is None else str(value)
    thousands = min(max(0, len(str(abs(round(value)))) - 2) // 3, 3)
    return f"{value / 1000**thousands:.4g}{('', ' k', ' M', ' G')[thousands]}"


def print_table(what, rows):
    """Print {row: {column: figure}}, aligned; figures that are dicts or lists are for the JSON file alone."""
    cells = [(c, v) for row in rows.values() for c, v in row.items()]
    columns = list(dict.fromkeys(c for c, v in cells if not isinstance(v, dict | list)))
    lines = [[what, *columns]]
    for name, row in rows.items():
        lines.append([str(name), *(figure_text(row.get(column)) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")


def by_row(columns):
    """{column: {row: figure}} -> {row: {column: figure}}; the first column has all rows."""
    first = next(iter(columns.values()))
    return {row: {name: column.get(row) for name, column in columns.items()} for row in first}


def print_times(what, times, unit="ms", **columns):
    """Print a row for each contender, with further columns {header: {name: figure}} -> its median, its minimum.

    Both are {name: number} in the unit, "ms" or "s"; the ratio is to the median of the first contender.
    """
    factor, first = {"ms": 1e3, "s": 1}[unit], next(iter(times))
    median = {name: factor * seconds for name, seconds in medians(times).items()}
    least = {name: factor * min(seconds) for name, seconds in times.items()}
    ratio = {name: value / median[first] for name, value in median.items()}
    shown = {f"median {unit}": median, f"min {unit}": least, f"time / {first}": ratio}
    print_table(what, by_row(shown | columns))
    return median, least


def read_json(file):
    """The content of a JSON file; {} where there is none."""
    return json.loads(Path(file).read_text()) if Path(file).exists() else {}


def write_json(file, content):
    """Write or replace a JSON file, which is whole at any time."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    write_whole(Path(file), lambda out: out.write(text.encode()))


def keep_figures(args, machine, figures):
    """Write the figures to --json, with the machine (`hardware`) and the arguments."""
    if args.json:
        write_json(args.json, {"machine": machine, "arguments": vars(args), **figures})


def chosen_parts(args, parts):
    """The parts in --parts, or all of `parts`."""
    names = args.parts.split(",") if args.parts else list(parts)
    if unknown := set(names) - set(parts):
        raise StoreError(f"--parts {','.join(sorted(unknown))}: choose from {','.join(parts)}")
    return names


def in_memory(tensor, dtype=None):
    """A copy in huge pages, where the system has them: random access then misses the TLB less, for every contender.

    Its memory comes from the system: what malloc has had before is in small pages, and stays so.
    """
    dtype = dtype or tensor.dtype
    size, flags = tensor.numel() * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(size, 1), flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=dtype, count=tensor.numel())
    return copy.view(tensor.shape).copy_(tensor)


def dgl_graph(indptr, indices):
    """The CSC graph (int64 tensors) as a DGL graph, which shares its memory."""
    return import_dgl().graph(("csc", (indptr, indices, [])), num_nodes=indptr.numel() - 1)


def own_process(threads):
    """An executor of one process whose memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=settle, initargs=(threads,))


def alone(threads, function, *args):
    """What function(*args) returns, called in a process of its own."""
    with own_process(threads) as process:
        return process.submit(function, *args).result()


def in_own_process(threads, prepare_step, *args, **options):
    """Prepare a contender in a process of its own -> its step, which is taken there."""
    process = own_process(threads)
    process.submit(_prepare, prepare_step, args, options).result()
    return lambda *words: process.submit(_take, words).result()


def _prepare(prepare_step, args, options):
    _take.step = prepare_step(*args, **options)


def _take(words):
    return _take.step(*words)


def memory_of_process(file):
    """Figures of this process from /proc/self/`file` ("status" or "smaps_rollup") -> {field: bytes}."""
    lines = [line.split() for line in Path("/proc/self", file).read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def disk_reads():
    """(bytes that this process has had read from disks, page faults that waited for one) so far."""
    read = Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0]
    return int(read), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


@contextlib.contextmanager
def watch():
    """Watch this process while the body runs; yields a dict, which is filled when the body ends.

    seconds; peak_anonymous and grown, bytes of anonymous memory; mapped, bytes of files; major_faults, which waited
    for the disk; from_disk, bytes.
    """
    seen, done, peaks = {}, threading.Event(), [0]

    def sample():
        while not done.wait(0.02):
            peaks.append(memory_of_process("status")["RssAnon"])

    before, (read, faults) = memory_of_process("status"), disk_reads()
    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        yield seen
        seen["seconds"] = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    after, (read_after, faults_after) = memory_of_process("status"), disk_reads()
    seen |= {"peak_anonymous": max(peaks), "grown": after["RssAnon"] - before["RssAnon"]}
    seen |= {"mapped": after["RssFile"], "major_faults": faults_after - faults}
    seen["from_disk"] = read_after - read


def watched_rounds(step, rounds, each):
    """Take `each` steps a round -> what `watch` sees of every round, with batches_per_s and losses."""
    figures = []
    for _ in range(rounds):
        with watch() as seen:
            losses = [step() for _ in range(each)]
        figures.append(seen | {"batches_per_s": each / seen["seconds"], "losses": losses})
    return figures


def forget_pages(path):
    """Make the kernel drop the files of a store, which no process maps, from memory: they are read from the disk."""
    for file in Path(path).iterdir():
        with open(file, "rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def exit_code(main, words):
    """What a command line ends with."""
    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code


def end_with_the_parent():
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def kill_group(process):
    """End a process, which may or may not lead a group by now, with what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
