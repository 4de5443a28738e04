"""Shared by the commands: contenders timed in turn, tables, memory, subprocesses, figures."""

import contextlib
import functools
import io
import json
import mmap
import multiprocessing
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F

from disk.files import StoreError, write_whole
from run import allocator
from sampler import import_dgl
from sources import prepare
from store import GraphStore


def hardware(gpu=False):
    """Return processor, memory, versions and, with `gpu`, the GPU and its libraries, as a dict."""
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
    if gpu:  # without a CUDA context, as some GPUs serve one process at a time
        fields = "name,memory.total,compute_cap,driver_version,power.limit,clocks.max.sm"
        with contextlib.suppress(OSError):
            command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
            printed = subprocess.run(command, capture_output=True, text=True).stdout
            figures["gpu"], _, figures["gpu_details"] = printed.partition("\n")[0].partition(", ")
        figures["cuda"] = torch.version.cuda
    return figures


def settle(threads):
    """Set the number of threads, silence warnings and bound oneDNN's caches as train.py does."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    allocator.before_torch()  # oneDNN reads its variables at its first product


@functools.cache
def opened(dataset, root):
    """Open the store of a data set, built under `root` if missing -> GraphStore, cached per process."""
    return GraphStore.open(prepare.prepare(dataset, root))


@contextlib.contextmanager
def without_others(name):
    """Leave out a contender of another library, whose import can raise anything; errors of ours propagate."""
    try:
        yield
    except Exception as error:
        if not name.startswith(("DGL", "GraphBolt", "PyG")):
            raise
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        print(f"left out: {name} ({reason[:120]})")


def on_host(step, i):
    """Run step(i) -> (seconds, its result)."""
    # the OpenMP threads of the step before spin for a while and would slow this one down
    time.sleep(0.02)
    start = time.perf_counter()
    result = step(i)
    return time.perf_counter() - start, result


def compare(
    what, contenders, rounds, *, warmup=2, twice=False, timed=on_host, attempt=without_others
):
    """Prepare {name: function that returns step(i)}, take a step of each in turn in every round, and print their times.

    The first `warmup` rounds do not count. With `twice`, an untimed step precedes each timed one, so that a contender finds
    memory and caches as it left them itself. A contender that raises is dropped if the context
    attempt(name) suppresses the exception.

    Returns:
        {name: {"median_ms", "min_ms", "time / FIRST", means of the figures where steps return a dict}}.
    """
    steps = {}
    for name, prepare_step in contenders.items():
        with attempt(name):
            steps[name] = prepare_step()
    taken = {name: [] for name in steps}
    for i in range(warmup + rounds):
        for name in list(steps):
            with attempt(name):
                if twice:
                    steps[name](i)
                taken[name].append(timed(steps[name], i))
                continue
            del steps[name]
    rows = {}
    for name in steps:
        seconds, figures = zip(*taken[name][warmup:])
        median = 1e3 * statistics.median(seconds)
        rows[name] = row = {"median_ms": median, "min_ms": 1e3 * min(seconds)}
        first = next(iter(rows))
        row[f"time / {first}"] = median / rows[first]["median_ms"]
        for key in figures[0] if isinstance(figures[0], dict) else ():
            row[key] = statistics.mean(figure[key] for figure in figures)
    return print_table(what, rows)


def print_table(what, rows):
    """Print {row: {column: figure}}, aligned -> the same. Dicts and lists among the figures are not printed."""

    def text(value):
        if isinstance(value, int | float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return "" if value is None else str(value)

    cells = [(c, v) for row in rows.values() for c, v in row.items()]
    columns = list(dict.fromkeys(c for c, v in cells if not isinstance(v, dict | list)))
    lines = [[what, *columns]]
    for name, row in rows.items():
        lines.append([str(name), *(text(row.get(column)) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in [lines[0], ["-" * width for width in widths], *lines[1:]]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
    return rows


def read_json(file):
    """Return the content of a JSON file; {} if there is none."""
    return json.loads(Path(file).read_text()) if Path(file or "").is_file() else {}


def write_json(file, content):
    """Write or replace a JSON file atomically."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    text = f"{json.dumps(content, indent=1)}\n".encode()
    write_whole(Path(file), lambda out: out.write(text))


def write_figures(args, figures):
    """Write the figures to --json, with the machine and the arguments."""
    if args.json:
        write_json(args.json, {"machine": hardware(), "arguments": vars(args), **figures})


def chosen_parts(args, parts):
    """Return the names in --parts, or of all `parts`."""
    names = args.parts.split(",") if args.parts else list(parts)
    if unknown := set(names) - set(parts):
        raise StoreError(f"--parts {','.join(sorted(unknown))}: choose from {','.join(parts)}")
    return names


def in_memory(tensor, dtype=None):
    """Copy a tensor into huge pages, where the system has them: fewer TLB misses of random access, for every contender.

    The memory is mapped anew: what malloc reuses is in small pages, and stays so.
    """
    dtype = dtype or tensor.dtype
    size = tensor.numel() * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=dtype, count=tensor.numel())
    return copy.view(tensor.shape).copy_(tensor)


def dgl_graph(indptr, indices):
    """Return the CSC graph (int64 tensors) as a DGL graph that shares its memory."""
    return import_dgl().graph(("csc", (indptr, indices, [])), num_nodes=indptr.numel() - 1)


class Elsewhere:
    """A contender in its own process, with its own memory: call it to take a step there.

    Args:
        make: a function of this package, called as make(args, *words, **options); args: of the command line. Returns
            the step.
        python: another interpreter, possibly with another torch; None: this one.
    """

    def __init__(self, make, args, *words, python=None, **options):
        self.pipe, theirs = multiprocessing.Pipe()
        code = f"from bench.tools import serve; serve({theirs.fileno()})"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        pipes = {"pass_fds": [theirs.fileno()], "stdout": subprocess.DEVNULL}
        command = [python or sys.executable, "-c", code]
        self.process = subprocess.Popen(command, env=environment, **pipes)
        theirs.close()
        self(args.threads, functools.partial(make, args, *words, **options))

    def __call__(self, *words):
        self.pipe.send(words)
        error, result = self.pipe.recv()
        if error:
            raise RuntimeError(error)
        return result


def serve(handle):
    """Serve the other end of `Elsewhere`: prepare a contender, then run its steps, as the pipe asks."""
    pipe = Connection(handle)
    step = None
    while True:
        try:
            words = pipe.recv()
            if step:
                answer = None, step(*words)
            else:
                threads, prepare = words
                settle(threads)
                step = prepare()
                answer = None, None
        except EOFError:
            return
        except Exception as error:
            answer = f"{type(error).__name__}: {error}", None
        pipe.send(answer)


def elsewhere(work, args, *words, **options):
    """Call work(args, *words) in its own process -> its result; options: of `Elsewhere`, or of `work`."""
    prepare = functools.partial(functools.partial, work)  # nothing: the step is all of the work
    contender = Elsewhere(prepare, args, *words, **options)
    try:
        return contender()
    finally:
        contender.pipe.close()  # ends the process
        contender.process.wait()


def memory():
    """Return this process's resident bytes -> (anonymous, of files)."""
    pages, files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (pages - files) * mmap.PAGESIZE, files * mmap.PAGESIZE


def watch(work):
    """Call work() -> (its result, {seconds; peak_anonymous: bytes of memory; mapped: bytes of files in memory;
    from_disk: bytes read})."""
    done = threading.Event()
    peaks = [memory()[0]]

    def sample():
        while not done.wait(0.02):
            peaks.append(memory()[0])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    read = 512 * (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - blocks)
    return result, {
        "seconds": seconds,
        "peak_anonymous": max(peaks),
        "mapped": memory()[1],
        "from_disk": read,
    }


def take_rounds(step, path, rounds, each, begin=int):
    """Call begin() and take rounds of `each` steps, with the files of a store, which no process maps, dropped from the page
    cache before -> figures of `watch`, and of all rounds but the first quarter, in which caches fill: batches_per_s, the
    median rate; read, bytes from the disk a batch; cpu, seconds of all threads a batch. rates: of each round; last_loss,
    equal for all contenders that draw uniformly."""
    for file in Path(path).iterdir():
        with open(file, "rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rates = []
    used = [resource.getrusage(resource.RUSAGE_SELF)]

    def run():
        begin()
        for _ in range(rounds):
            start = time.perf_counter()
            losses = [step(i)["loss"] for i in range(each)]
            rates.append(each / (time.perf_counter() - start))
            used.append(resource.getrusage(resource.RUSAGE_SELF))
        return losses[-1]

    loss, figures = watch(run)
    skipped = rounds // 4
    first = used[skipped]
    last = used[-1]
    batches = each * (rounds - skipped)
    return figures | {
        "batches_per_s": statistics.median(rates[skipped:]),
        "read": 512 * (last.ru_inblock - first.ru_inblock) / batches,
        "cpu": (last.ru_utime + last.ru_stime - first.ru_utime - first.ru_stime) / batches,
        "last_loss": loss,
        "rates": rates,
    }


def forward(layers, blocks, h, dropout=0.0, call=lambda layer, block, h, last: layer(block, h)):
    """Apply a layer to each block, with ReLU and dropout in between -> the last layer's output."""
    for layer, block in zip(layers, blocks):
        last = layer is layers[-1]
        h = call(layer, block, h, last)
        if not last:
            h = F.dropout(F.relu(h), dropout)
    return h


def descend(loss, *optimizers):
    """Run backward and a step of the optimizers -> the loss, a tensor."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss


def counted(blocks):
    """Count what was drawn, in blocks of ours or of DGL -> {edges: of all hops, sources: of the outermost hop}."""
    if hasattr(blocks[0], "num_src"):
        return {"edges": sum(block.num_edges for block in blocks), "sources": blocks[0].num_src}
    edges = sum(block.num_edges() for block in blocks)
    return {"edges": edges, "sources": blocks[0].num_src_nodes()}


def training_log(words):
    """Run train.py's command line in this process -> (entries of its log, what it printed)."""
    import train

    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = exit_code(train.main, [*words, "--log", f"{folder}/log"])
        if code:
            last = printed.getvalue().strip().rpartition("\n")[2]
            raise StoreError(f"train.py ended with exit code {code}: {last}")
        lines = Path(folder, "log").read_text().splitlines()
    return [json.loads(line) for line in lines], printed.getvalue()


def epochs_of(args, dataset, *flags):
    """Run train.py with the sizes of `args`, without the exact inference at its end -> log entries of its epochs."""
    from tasks.node import NodeTask

    words = ["--dataset", dataset, "--root", args.root, "--hidden", args.hidden]
    words += ["--batch-size", args.batch_size, "--fanout", ",".join(map(str, args.fanout)), *flags]
    no_scores = lambda task, run, report: dict.fromkeys(task.store.split)  # noqa: E731
    with mock.patch.object(NodeTask, "evaluate", no_scores):
        entries, printed = training_log(words)
    if "on" in words and (why := re.search("no CUDA graphs: (.*)", printed)):
        raise RuntimeError(f"asked for CUDA graphs: {why[1]}")
    return [entry for entry in entries if "epoch" in entry]


def exit_code(main, words):
    """Call a command line's main -> its exit code."""
    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code
