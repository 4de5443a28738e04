"""python -m bench gpu: what only a GPU can tell, within --minutes (4); --parts chooses.

    law        samples of CPU and CUDA, bit for bit; kernels of links, norms and the outermost hop beside C and torch
    commands   losses of 29 command lines of train.py on GPU and CPU
    losses     losses of every mode, model and precision beside the CPU's
    ranks      two ranks on one GPU, over gloo, beside one
    tests      the tests that need a GPU, counted
    kernels    each kernel of a step alone, beside the time that bench predict expected
    steps      epochs of train.py: every model, precision and mode, batches sampled at once on the CPU; links, times, LABOR,
               features and types of edges, a user's layer, with launches
    sampling   a batch, beside torch operations; its rows through the ring and read in place
    inference  exact inference on all nodes, by layers and in batches
    papers     a graph of the size of ogbn-papers100M in GPU memory
    sanitizer  a run under compute-sanitizer, where it is installed
    trace      a Chrome trace (Perfetto opens it) and the picture of the stages, for each mode

Checks come first, since a part for which no time is left is a failure: law to tests run side by side. What is timed runs
alone. On a GPU that is rented for ten minutes, two commands leave something in any case (OUT: the folder that is kept):

    python -m bench gpu --minutes 3.3 --parts law,commands,losses,ranks,tests; cp results/gpu* "$OUT"
    python -m bench gpu --minutes 6 --parts kernels,steps,sampling,inference,papers; cp results/gpu* "$OUT"

Graphs are made in GPU memory (bench/gpu_graph.py). Every part is a process that writes its figures into results/gpu.json
as they come; pictures and traces are in gpu-pictures.zip beside it. A failure in a part (exception, crash or time limit) is
written to gpu.json and printed, what it measured before stays, and the next part runs. --quick rehearses on tiny graphs, in
ROOT/gpu-quick, with the programs of the real ones: what it compiled can be carried to the GPU, see docs/gpu.md.
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from bench import gpu_parts, tools
from bench.tools import print_table, read_json, write_json
from disk.files import StoreError, locked


class Record:
    """A part's entry in gpu.json: figures as they come, and failures."""

    def __init__(self, args, part):
        self.args = args
        self.part = part
        self.file = Path(args.out, "gpu.json")
        self.figures = {}

    def keep(self, **figures):
        """Add figures to the entry; the file is written atomically."""
        self.figures |= figures
        with locked(self.file.parent):  # parts that run side by side write it too
            content = read_json(self.file)
            content["parts"][self.part] = self.figures
            write_json(self.file, content)

    def fail(self, what):
        print(f"FAILED  {what}", flush=True)
        self.keep(failed=[*self.figures["failed"], what])

    @contextlib.contextmanager
    def attempt(self, what):
        """Continue after an exception in the body, which is recorded as a failure."""
        try:
            yield
        except (Exception, SystemExit) as error:  # SystemExit: what train.py's command line refuses
            traceback.print_exc()
            line = (str(error).strip().splitlines() or [""])[0][:300]
            self.fail(f"{what}: {type(error).__name__}: {line}")


def bench_gpu(args):
    """Run the parts -> {"failed": names of parts that failed}."""
    if not torch.cuda.is_available():
        sees = f"torch {torch.__version__} sees no GPU here"
        raise StoreError(f"gpu needs a CUDA GPU and torch's CUDA build; {sees}")
    names = tools.chosen_parts(args, PARTS)
    rows = {}
    args.out = "results"
    if args.quick:
        args.out = str(Path(args.root, "gpu-quick"))
        args.batch_size = 64
        args.fanout = [5, 4, args.fanout[-1]]
        args.rounds = 1
    file = Path(args.out, "gpu.json")
    end = time.time() + 60 * args.minutes
    head = {"machine": tools.hardware(gpu=True), "arguments": vars(args)}
    write_json(file, head | {"parts": read_json(file).get("parts", {})})  # not run again, they stay
    chosen = [name for name in PARTS if name in names]
    # a part that runs alone is a group of its own
    group_of = lambda name: PARTS[name].beside or name  # noqa: E731
    for _, group in itertools.groupby(chosen, group_of):
        for name, entry in run_parts(args, group, end).items():
            rows[name] = {"seconds": round(entry["seconds"]), "failed": len(entry["failed"])}
    print()
    print_table("part", rows)
    print(f"written: {file}")
    return {"failed": [name for name, row in rows.items() if row["failed"]]}


def run_parts(args, names, end):
    """Run parts at the same time, each in its own process, until `end` (time.time()) at most -> {name: entry in gpu.json}."""
    running = {}
    start = time.time()
    for name in names:
        record = Record(args, name)
        record.keep(failed=[], seconds=0)  # replaces an older run's
        # a rehearsal may run on a slow, emulated GPU
        seconds = min(PARTS[name].seconds * (10 if args.quick else 1), end - start)
        print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
        if seconds <= 0:
            record.fail(f"no time left of --minutes {args.minutes:g}")
            running[name] = record, None, start
            continue
        process = multiprocessing.get_context(gpu_parts.START).Process(target=work, args=[record])
        process.start()
        running[name] = record, process, start + seconds
    for record, process, limit in running.values():
        if process:
            finish(record, process, start, limit)
    return {name: record.figures for name, (record, _, _) in running.items()}


def finish(record, process, start, limit):
    """Wait for a part until `limit` at most, end it and complete its entry."""
    try:
        process.join(max(0, limit - time.time()))
        code = process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    record.figures = read_json(record.file)["parts"][record.part]
    seconds = time.time() - start
    if code is None:
        record.fail(f"stopped after {seconds:.0f} s")
    elif code:
        record.fail(f"its process ended with exit code {code}")
    record.keep(seconds=seconds)


def work(record):
    os.setsid()  # to end with the processes that it starts
    tools.settle(record.args.threads)
    with record.attempt(record.part):
        PARTS[record.part].run(record.args, record)


class Part(NamedTuple):
    """A part of the command: run(args, record), the seconds it may take, the name of those beside which it runs."""

    run: Callable
    seconds: int
    beside: str = ""


PARTS = {
    "law": Part(gpu_parts.law, 180, "checks"),
    "commands": Part(gpu_parts.commands, 180, "checks"),
    "losses": Part(gpu_parts.losses, 180, "checks"),
    "ranks": Part(gpu_parts.ranks, 180, "checks"),
    "tests": Part(gpu_parts.tests, 180, "checks"),
    "kernels": Part(gpu_parts.kernels, 100),
    "steps": Part(gpu_parts.steps, 160),
    "sampling": Part(gpu_parts.sampling, 40),
    "inference": Part(gpu_parts.inference, 80),
    "papers": Part(gpu_parts.papers, 60),
    "sanitizer": Part(gpu_parts.sanitizer, 60),
    "trace": Part(gpu_parts.trace, 50),
}
