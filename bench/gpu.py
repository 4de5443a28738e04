"""python -m bench gpu: what this project does on a GPU, measured in one go, within --minutes (9).

    stores     synthetic graphs of the size of ogbn-products and ogbn-arxiv, kept under --root
    sampling   a batch, beside torch operations, with the bytes it moves over what a device copy moves a second
    products   epochs of train.py in every mode and precision, with and without CUDA graphs, beside the plain version:
    arxiv      step, epoch, stall, peak memory
    losses     every mode, model and precision for two epochs: the losses of the CPU
    transfer   the ring's copies, and rows, first hops and neighbour lists read in place, beside a copy of pinned memory
    trace      a Chrome trace (Perfetto opens it) and the picture of the stages, for each mode
    tests      the tests that need a GPU, counted
    sanitizer  compute-sanitizer's memcheck on the sampler, the layers and a step as CUDA graphs, where it is installed

Every part is a process that writes its figures into gpu.json under --out as they come; pictures and traces are in
gpu-pictures.zip beside it. What fails in a part, be it an exception, a crash or the time limit, is written there and
printed, and the next part runs. --quick takes tiny graphs, to rehearse.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from bench import gpu_speed
from bench.gpu_speed import GPU_MODES, GRAPHS, epochs_of, flags_of, graph_name
from bench.tools import (
    chosen_parts,
    hardware,
    kill_group,
    print_table,
    read_json,
    settle,
    write_json,
)
from disk.files import StoreError
from features import gpu_view, share
from model import CONVS
from sampler import NeighborSampler
from sources import prepare

PROCESSES = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
HERE = Path(__file__).parents[1]
ENDS = ("failed", "left_out")  # lists of sentences
GOALS = "goals: 2 times for sampling, 3 times for training; the paper's figures are 1.52 and 1.80"


class Record:
    """A part's entry in gpu.json: its figures as they come, and what failed."""

    def __init__(self, args, part, deadline):
        self.file, self.part, self.deadline = Path(args.out, "gpu.json"), part, deadline
        self.figures = {}

    def keep(self, **figures):
        """Add figures to the entry; the file is whole at any time."""
        self.figures |= figures
        content = {"parts": {}} | read_json(self.file)
        content["parts"][self.part] = self.figures
        write_json(self.file, content)

    def fail(self, what, entry="failed"):
        """Write down and print what failed."""
        print(f"{'FAILED ' if entry == 'failed' else 'left out:'} {what}", flush=True)
        self.keep(**{entry: [*self.figures[entry], what]})

    @contextlib.contextmanager
    def attempt(self, what, optional=False):
        """Go on after an exception in the body: a failure, unless it is an optional package that is not installed."""
        try:
            yield
        except (Exception, SystemExit) as error:  # SystemExit: what train.py's command line refuses
            line = (str(error).strip().splitlines() or [""])[0][:300]
            if optional and isinstance(error, ImportError):
                self.fail(f"{what}: {line}", "left_out")
            else:
                traceback.print_exc()
                self.fail(f"{what}: {type(error).__name__}: {line}")


def bench_gpu(args):
    """Run the parts -> {"failed": names of parts}."""
    if not torch.cuda.is_available():
        sees = f"torch {torch.__version__} sees no GPU here"
        raise StoreError(f"gpu needs a CUDA GPU and torch's CUDA build; {sees}")
    names = chosen_parts(args, PARTS)
    args.out = args.out or (str(Path(args.root, "gpu-quick")) if args.quick else "results")
    if args.quick:
        args.batch_size, args.hidden, args.fanout, args.rounds = 64, 16, [5, 4, 3], 1
    Path(args.out).mkdir(parents=True, exist_ok=True)
    file, end, rows, failed = Path(args.out, "gpu.json"), time.time() + 60 * args.minutes, {}, []
    head = {"machine": hardware(gpu=True), "arguments": vars(args)}
    write_json(file, head | {"parts": read_json(file).get("parts", {})})  # not run again, they stay
    for name in names:
        function, limit = PARTS[name]
        # a rehearsal may run on an emulated GPU
        seconds = min(limit * (10 if args.quick else 1), end - time.time())
        print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
        entry = run_part(name, function, seconds, args)
        failed += [name] if entry["failed"] else []
        counts = [f"{len(entry[what])} {what.replace('_', ' ')}" for what in ENDS if entry[what]]
        state, summary = (counts or ["done"])[0], entry.get("summary", "")
        rows[name] = {"seconds": round(entry["seconds"]), "state": state, "in short": summary}
    print()
    print_table("part", rows)
    print(f"{GOALS}; written: {file}")
    return {"failed": failed}


def run_part(name, function, seconds, args):
    """Run one part in a process of its own -> its entry."""
    start = time.time()
    record = Record(args, name, start + seconds)
    record.keep(finished=False, failed=[], left_out=[], seconds=0)  # in place of an older run's
    if seconds <= 0:
        record.fail(f"no time left of --minutes {args.minutes:g}")
        return record.figures
    process = PROCESSES.Process(target=_in_process, args=(function, args, record))
    process.start()
    try:
        process.join(seconds)
    finally:
        late = process.exitcode is None
        kill_group(process)
    record.figures = read_json(record.file)["parts"][name]
    if late:
        record.fail(f"stopped after {seconds:.0f} s")
    elif not record.figures["finished"]:
        record.fail(f"its process ended with exit code {process.exitcode}")
    record.keep(seconds=time.time() - start)
    return record.figures


def _in_process(function, args, record):
    os.setsid()  # a group of its own, so that what it starts can be stopped with it
    settle(args.threads)
    with record.attempt(record.part):
        function(args, record)
    record.keep(finished=True)


def stores(args, record):
    """Build what the other parts read, or find it."""
    seconds = {}
    for size in GRAPHS:
        start = time.time()
        with record.attempt(size):
            prepare.prepare(graph_name(args, size), args.root)
            seconds[size] = time.time() - start
            said = "  ".join(f"{name} {s:.0f} s" for name, s in seconds.items())
            record.keep(built_s=seconds, summary=said)
            print(said, flush=True)


def losses(args, record):
    """Two epochs of each mode, model and precision beside the CPU's: fp32 to the printed digits, bf16 within 2 %."""
    found, rows = {}, {}
    options = ["--epochs", 2, "--fanout", "5,4,3", "--hidden", 64]
    options += ["--batch-size", 64 if args.quick else 256]
    convs = list(CONVS)[:2] if args.quick else CONVS
    runs = itertools.product(("fp32", "bf16"), convs, ("cpu-cpu", *GPU_MODES))
    for precision, conv, mode in runs:
        name, cpu = f"{conv} {precision} {mode}", f"{conv} {precision} cpu-cpu"
        with record.attempt(name):
            words = flags_of(args, "small", mode, precision, *options, "--model", conv)
            first, second = found[name] = [entry["loss"] for entry in epochs_of(words)]
            record.keep(losses=found)
            apart = [abs(a - b) for a, b in zip(found[name], found[cpu])]
            most = 1.01e-4 if precision == "fp32" else 0.02 * max(found[cpu])
            same = all(a < most for a in apart)  # a loss that is no number is not
            rows[name] = {"epoch 1": first, "epoch 2": second, "apart": max(apart), "same": same}
            if not same:
                record.fail(f"{name}: losses {found[name]}, on the CPU {found[cpu]}")
    print_table("losses beside the CPU's", rows)
    same = sum(row["same"] for name, row in rows.items() if not name.endswith("cpu-cpu"))
    record.keep(summary=f"{same} of {2 * len(convs) * len(GPU_MODES)} runs give the CPU's losses")


def trace(args, record):
    """A trace and a picture of the second epoch, of twelve steps, for each mode, in gpu-pictures.zip."""
    drawn = bool(importlib.util.find_spec("matplotlib"))  # train.py refuses --timeline without it
    with record.attempt("timelines", optional=True):
        if not drawn:
            raise ImportError("matplotlib is not installed")
    with tempfile.TemporaryDirectory() as folder:
        for mode in GPU_MODES:
            with record.attempt(mode):
                words = flags_of(args, "arxiv", mode, "fp32", "--epochs", "2")
                words[1] = words[1].replace("train=90941", f"train={12 * args.batch_size}")
                words += ["--profile", f"{folder}/trace-{mode}.json"]
                words += ["--timeline", f"{folder}/timeline-{mode}.png"] if drawn else []
                epochs_of(words)
            shutil.make_archive(str(Path(args.out, "gpu-pictures")), "zip", folder)
        made = sorted(file.name for file in Path(folder).iterdir())
    print(f"gpu-pictures.zip: {', '.join(made)}", flush=True)
    record.keep(files=made, summary=f"{len(made)} files in gpu-pictures.zip")


def tests(args, record):
    """pytest's own count of the tests that have gpu or cuda in their names."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda", "test_all.py"]
    # pytest cuts what failed to the terminal's width
    environment = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=environment)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}
    record.keep(counts=counts, summary=last.strip("= "))
    print(last)
    for line in failed:
        record.fail(line[:300])
    if done.returncode and not failed:
        record.fail(f"pytest ended with exit code {done.returncode}: {last}")


def sanitizer(args, record):
    """memcheck on the three checks below, of them two without torch's cache of memory, which hides what is out of bounds.
    (racecheck looks at shared memory, which no kernel uses.)"""
    toolkit, said = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), {}
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=toolkit)
    with record.attempt("compute-sanitizer", optional=True):
        if not program:
            raise ImportError("it is not installed; it comes with the CUDA toolkit")
        for check in (check_sampler, check_layers, check_graphs):
            name, uncached = check.__name__, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            environment = os.environ | ({} if check is check_graphs else uncached)
            code = f"from bench import gpu; gpu.{name}({args.root!r})"
            command = [program, "--error-exitcode", "9", sys.executable, "-c", code]
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=HERE, env=environment
            )
            lines = (done.stdout + done.stderr).strip().splitlines()
            summaries = [line.strip("= ") for line in lines if "SUMMARY" in line]
            said[name] = (summaries or lines or [""])[-1]
            print(f"{name}: {said[name]}", flush=True)
            short = "  ".join(map(": ".join, said.items()))
            record.keep(said=said, summary=short)
            if done.returncode:
                record.fail(f"{name} ended with exit code {done.returncode}: {said[name]}")


def check_sampler(root):
    """Sample a small graph on the GPU, also from pinned memory, and on the CPU: the same blocks."""
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 40, (5000,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(0, 5000, (int(indptr[-1]),), generator=generator, dtype=torch.int32)
    graph, pinned = [indptr, indices], [gpu_view(a, "cuda") for a in share([indptr, indices])]
    for method in ("uniform", "labor"):
        samplers = [
            NeighborSampler(*arrays, [15, 10, 5], method=method, check=False)
            for arrays in (graph, [a.cuda() for a in graph], pinned)
        ]
        for step in range(2):
            seeds = torch.randperm(5000, generator=generator)[:64]
            host, *others = [draw.sample(seeds, step) for draw in samplers]
            for found in others:
                for a, b in zip(host, found):
                    assert all(torch.equal(x, y.cpu()) for x, y in zip(a[:3], b[:3])), method


def check_layers(root, graphs="off"):
    """Four steps and the evaluation of every model in both precisions."""
    args = argparse.Namespace(quick=True, root=root, batch_size=64, fanout=[5, 4, 3], hidden=16)
    for conv in CONVS:
        for precision in ("fp32", "bf16"):
            words = ["--epochs", "1", "--model", conv, "--cuda-graph", graphs]
            epochs_of(flags_of(args, "small", "cuda-cuda", precision, *words))


def check_graphs(root):
    """The same, a step as CUDA graphs; memory is checked in whole blocks of torch's cache, which capture needs."""
    check_layers(root, "on")


PARTS = {  # name: (function, seconds it may take)
    "stores": (stores, 120),
    "sampling": (gpu_speed.sampling, 45),
    "products": (functools.partial(gpu_speed.training, size="products"), 200),
    "arxiv": (functools.partial(gpu_speed.training, size="arxiv"), 80),
    "losses": (losses, 100),
    "transfer": (gpu_speed.transfer, 40),
    "trace": (trace, 50),
    "tests": (tests, 120),
    "sanitizer": (sanitizer, 120),
}
