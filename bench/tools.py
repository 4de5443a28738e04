"""What the commands share: contenders timed in turn, tables, memory, processes of their own, figures."""

import contextlib
import functools
import json
import math
import mmap
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import statistics
import subprocess
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from disk.files import StoreError, write_whole
from run import allocator
from sampler import import_dgl
from sources import prepare
from store import GraphStore


def hardware(gpu=False):
    """Processor, memory, versions and, with `gpu`, the GPU and its libraries -> dict."""
    cpuinfo = Path("/proc/cpuinfo")
    named = cpuinfo.exists() and re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    figures = {
        "cpu": named[1].strip() if named else platform.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if gpu:  # without a CUDA context, since some GPUs serve one process at a time
        fields = "name,memory.total,compute_cap,driver_version,power.limit,clocks.max.sm"
        command = ["nvidia-smi", f"--query-gpu={fields},pcie.link.gen.max", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            figures["gpu"], _, figures["gpu_details"] = done.stdout.splitlines()[0].partition(", ")
        figures["cuda"] = torch.version.cuda
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
    steps, rounds, *, warmup=2, twice=False, note=None, timed=on_host, attempt=without_others
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
                if note:
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
    """Print {row: {column: figure}}, aligned -> the same; figures that are dicts or lists are for the JSON file alone."""
    cells = [(c, v) for row in rows.values() for c, v in row.items()]
    columns = list(dict.fromkeys(c for c, v in cells if not isinstance(v, dict | list)))
    lines = [[what, *columns]]
    for name, row in rows.items():
        lines.append([str(name), *(figure_text(row.get(column)) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
    return rows


def turned(rows):
    """{row: {column: figure}} <-> {column: {row: figure}}; the first has all entries of the others."""
    first = next(iter(rows.values()))
    return {column: {name: row.get(column) for name, row in rows.items()} for column in first}


def print_times(what, times, unit="ms", **columns):
    """Print a row for each contender {name: [seconds]}, with further columns {name: figure} -> {name: its row}.

    The ratio is to the median of the first contender.
    """
    factor, rows, first = {"ms": 1e3, "s": 1}[unit], {}, next(iter(times))
    for name, median in medians(times).items():
        rows[name] = {f"median_{unit}": factor * median, f"min_{unit}": factor * min(times[name])}
        rows[name][f"time / {first}"] = factor * median / rows[first][f"median_{unit}"]
        rows[name] |= {column: figures.get(name) for column, figures in columns.items()}
    return print_table(what, rows)


def read_json(file):
    """The content of a JSON file; {} where there is none."""
    return json.loads(Path(file).read_text()) if Path(file or "").is_file() else {}


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
    """An executor of one process with memory of its own."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=settle, initargs=(threads,))


def alone(threads, function, *args):
    """What function(*args) returns, called in a process of its own, which has ended then."""
    with own_process(threads) as process:
        return process.submit(function, *args).result()


def in_own_process(threads, prepare_step, *args, **options):
    """Prepare a contender in a process of its own -> its step, which is taken there."""
    process = own_process(threads)
    process.submit(_prepare, partial(prepare_step, *args, **options)).result()
    return lambda *words: process.submit(_take, words).result()


def _prepare(prepare_step):
    _take.step = prepare_step()


def _take(words):
    return _take.step(*words)


def in_groups(function, jobs, workers=1, *, seconds, context="fork"):
    """Call function(job) for every job in a process that leads a group, some at a time, for at most seconds(job); yield
    (job, exit code; None: it took too long) as they end. The groups are killed."""
    running, jobs, start = {}, iter(jobs), multiprocessing.get_context(context).Process
    try:
        while True:
            while len(running) < workers and (job := next(jobs, None)):
                process = start(target=_in_group, args=(function, job))
                process.start()
                running[process] = job, time.monotonic() + seconds(job)
            if not running:
                return
            multiprocessing.connection.wait([process.sentinel for process in running], 1)
            for process, (job, end) in list(running.items()):
                code = process.exitcode
                if code is not None or time.monotonic() > end:
                    del running[process]
                    _kill_group(process)
                    yield job, code
    finally:
        for process in running:
            _kill_group(process)


def _in_group(function, job):
    os.setsid()
    function(job)


def _kill_group(process):
    # it may not lead a group yet
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def memory_of_process(file):
    """Figures of this process from /proc/self/`file` ("status" or "smaps_rollup") -> {field: bytes}."""
    lines = [line.split() for line in Path("/proc/self", file).read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


@contextlib.contextmanager
def watch():
    """Watch this process while the body runs; yields a dict, which is filled when the body ends.

    seconds; peak_anonymous and grown, bytes of anonymous memory; mapped, bytes of files; from_disk, bytes read.
    """
    memory, done = lambda: memory_of_process("status"), threading.Event()
    read = lambda: int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])  # noqa: E731
    seen, before, first, peaks = {}, memory(), read(), [0]

    def sample():
        while not done.wait(0.02):
            peaks.append(memory()["RssAnon"])

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        yield seen
        seen["seconds"] = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    after = memory()
    seen |= {"peak_anonymous": max(peaks), "grown": after["RssAnon"] - before["RssAnon"]}
    seen |= {"mapped": after["RssFile"], "from_disk": read() - first}


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


def forward(layers, blocks, h, dropout=0.0, call=lambda layer, block, h, last: layer(block, h)):
    """Apply a layer to each block, with ReLU and dropout between them."""
    for layer, block in zip(layers, blocks):
        h = call(layer, block, h, layer is layers[-1])
        h = h if layer is layers[-1] else F.dropout(F.relu(h), dropout)
    return h


def descend(optimizer, loss):
    """Backward and a step of the optimizer -> the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def exit_code(main, words):
    """What a command line ends with."""
    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code
