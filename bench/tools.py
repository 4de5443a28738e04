"""What the commands share: contenders timed in turn, tables, memory, processes for them alone, figures."""

import contextlib
import ctypes
import importlib.metadata
import json
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
import types
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from run import allocator
from sampler import import_dgl
from sources import prepare
from store import GraphStore

GPU_FIELDS = {  # of nvidia-smi; asked without a CUDA context, since some GPUs serve one process at a time
    "gpu": "name",
    "gpu_memory": "memory.total",
    "capability": "compute_cap",
    "driver": "driver_version",
    "power_limit": "power.limit",
    "sm_clock": "clocks.max.sm",
    "memory_clock": "clocks.max.mem",
    "pcie": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.max",
}


def hardware(gpu=False):
    """Processor, memory, versions and, with `gpu`, the GPU and its libraries -> dict."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    found = {
        "cpu": named[1].strip() if named else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if gpu:
        query = f"--query-gpu={','.join(GPU_FIELDS.values())}"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            found |= dict(zip(GPU_FIELDS, done.stdout.splitlines()[0].split(", ")))
        for package in ("numpy", "nvidia-cuda-nvrtc"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[package] = importlib.metadata.version(package)
    return found


def settle(threads):
    """Set the number of threads, silence warnings and bound oneDNN's caches as train.py does."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    allocator.before_torch()  # oneDNN reads its variables at its first product


def opened(dataset, root):
    """The store of a data set, built under `root` if it is not there -> GraphStore."""
    return GraphStore.open(prepare.prepare(dataset, root))


def made(makers):
    """Call {name: function that makes a contender} -> {name: contender}; prints which are left out, and why."""
    contenders = {}
    for name, make in makers.items():
        try:
            contenders[name] = make()
        except Exception as error:  # importing another library can raise anything
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            print(f"left out: {name} ({reason[:120]})")
    return contenders


def on_host(run, i):
    """Call a contender -> (seconds, what it returned)."""
    # the OpenMP threads of the one before spin for a while and would slow this one down
    time.sleep(0.02)
    start = time.perf_counter()
    result = run(i)
    return time.perf_counter() - start, result


def interleave(
    contenders,
    rounds,
    *,
    warmup=2,
    twice=False,
    note=lambda name, result: None,
    timed=on_host,
    attempt=contextlib.nullcontext,
):
    """Time contenders {name: function of the round's number}, each once a round, in turn -> {name: [seconds]}.

    The first `warmup` rounds do not count. With `twice`, an untimed run precedes each timed one, so that a contender
    finds memory and caches as it left them itself. note(name, result) is called with what each run returned; a run
    that raises in the context attempt(name) takes part no longer, if that context goes on.
    """
    times = {name: [] for name in contenders}
    for i in range(warmup + rounds):
        for name in list(times):
            seconds = None
            with attempt(name):
                if twice:
                    contenders[name](i)
                seconds, result = timed(contenders[name], i)
            if seconds is None:
                del times[name]
                continue
            if i >= warmup:
                times[name].append(seconds)
            note(name, result)
    return times


def medians(times):
    """{name: [seconds]} -> {name: median}."""
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def print_table(rows, header):
    """Print rows of strings under a header, columns aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def print_times(what, times, unit, digits, **columns):
    """Print a row for each contender, with further columns {header: {name: cell}} -> its median, its minimum.

    Both are {name: number} in the unit, "ms" or "s"; the ratio is to the median of the first contender.
    """
    factor, first = {"ms": 1e3, "s": 1}[unit], next(iter(times))
    median = {name: factor * seconds for name, seconds in medians(times).items()}
    least = {name: factor * min(seconds) for name, seconds in times.items()}
    rows = []
    for name in times:
        cells = [f"{median[name]:.{digits}f}", f"{least[name]:.{digits}f}"]
        ratio = f"{median[name] / median[first]:.2f}"
        rows.append([name, *cells, ratio, *(column[name] for column in columns.values())])
    print_table(rows, [what, f"median {unit}", f"min {unit}", f"time / {first}", *columns])
    return median, least


def keep_figures(args, machine, figures):
    """Write the figures to --json, with the machine (`hardware`) and the arguments."""
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        everything = {"machine": machine, "arguments": vars(args), **figures}
        Path(args.json).write_text(json.dumps(everything, indent=1) + "\n")


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


class OwnProcess:
    """What make(*args, **options) returns, in a process whose memory is its own; calls are passed on to it."""

    held = None  # in that process: what was made

    def __init__(self, threads, make, *args, **options):
        spawn = multiprocessing.get_context("spawn")
        self.process = ProcessPoolExecutor(1, spawn, initializer=settle, initargs=(threads,))
        self.process.submit(OwnProcess._make, make, args, options).result()

    def __call__(self, *args):
        return self.process.submit(OwnProcess._call, args).result()

    def shutdown(self):
        self.process.shutdown()

    @staticmethod
    def _make(make, args, options):
        OwnProcess.held = make(*args, **options)

    @staticmethod
    def _call(args):
        return OwnProcess.held(*args)


def memory_of_process(file, pid="self"):
    """Figures of a process from /proc/PID/`file` ("status" or "smaps_rollup") -> {field: bytes}."""
    lines = [line.split() for line in Path("/proc", str(pid), file).read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def bytes_from_disk(pid="self"):
    """Bytes that a process has had read from disks so far."""
    return int(Path("/proc", str(pid), "io").read_text().split("\nread_bytes: ")[1].split()[0])


@contextlib.contextmanager
def watch():
    """Watch this process while the body runs; yields a namespace, which is filled when the body ends.

    .seconds; .peak and .grown, bytes of anonymous memory; .mapped, bytes of files; .faults that waited for the disk;
    .read, bytes from the disk.
    """
    seen, done = types.SimpleNamespace(peak=0), threading.Event()

    def sample():
        while not done.wait(0.02):
            seen.peak = max(seen.peak, memory_of_process("status")["RssAnon"])

    before, faults = memory_of_process("status"), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    read, thread = bytes_from_disk(), threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        yield seen
        seen.seconds = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    after = memory_of_process("status")
    seen.faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    seen.grown, seen.mapped = after["RssAnon"] - before["RssAnon"], after["RssFile"]
    seen.read = bytes_from_disk() - read


def forget_pages(path, mapped=()):
    """Make the kernel drop the files of a store from memory, so that they are read from the disk.

    mapped: tensors over them in this process, whose pages would stay.
    """
    for tensor in mapped:
        start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    for file in Path(path).iterdir():
        with open(file, "rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def end_with_the_parent():
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
