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
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

import torch

from bench import gpu_speed
from bench.gpu_speed import GPU_MODES, GRAPHS, epochs_of, flags_of, graph_name
from bench.tools import (
    chosen_parts,
    hardware,
    in_groups,
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

START = "spawn"  # CUDA does not survive a fork
HERE = Path(__file__).parents[1]


class Record:
    """A part's entry in gpu.json: its figures as they come, and what failed."""

    def __init__(self, args, part, seconds):
        self.args, self.part, self.seconds, self.start = args, part, seconds, time.time()
        self.file, self.figures = Path(args.out, "gpu.json"), {}

    def keep(self, **figures):
        """Add figures to the entry; the file is whole at any time."""
        self.figures |= figures
        content = read_json(self.file)
        content["parts"][self.part] = self.figures
        write_json(self.file, content)

    def fail(self, what):
        """Write down and print what failed."""
        print(f"FAILED  {what}", flush=True)
        self.keep(failed=[*self.figures["failed"], what])

    @contextlib.contextmanager
    def attempt(self, what):
        """Go on after an exception in the body, a failure."""
        try:
            yield
        except (Exception, SystemExit) as error:  # SystemExit: what train.py's command line refuses
            traceback.print_exc()
            line = (str(error).strip().splitlines() or [""])[0][:300]
            self.fail(f"{what}: {type(error).__name__}: {line}")


def bench_gpu(args):
    """Run the parts -> {"failed": names of parts}."""
    if not torch.cuda.is_available():
        sees = f"torch {torch.__version__} sees no GPU here"
        raise StoreError(f"gpu needs a CUDA GPU and torch's CUDA build; {sees}")
    names, rows = chosen_parts(args, PARTS), {}
    args.out = args.out or (str(Path(args.root, "gpu-quick")) if args.quick else "results")
    if args.quick:
        args.batch_size, args.hidden, args.fanout, args.rounds = 64, 16, [5, 4, 3], 1
    file, end = Path(args.out, "gpu.json"), time.time() + 60 * args.minutes
    head = {"machine": hardware(gpu=True), "arguments": vars(args)}
    write_json(file, head | {"parts": read_json(file).get("parts", {})})  # not run again, they stay

    def records():
        for name in names:
            # a rehearsal may run on an emulated GPU
            seconds = min(PARTS[name][1] * (10 if args.quick else 1), end - time.time())
            print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
            record = Record(args, name, seconds)
            record.keep(finished=False, failed=[], seconds=0)  # in place of an older run's
            if seconds > 0:
                yield record
            else:
                record.fail(f"no time left of --minutes {args.minutes:g}")

    for record, code in in_groups(work, records(), lambda record: record.seconds, context=START):
        record.figures = read_json(file)["parts"][record.part]
        if code is None:
            record.fail(f"stopped after {record.seconds:.0f} s")
        elif not record.figures["finished"]:
            record.fail(f"its process ended with exit code {code}")
        record.keep(seconds=time.time() - record.start)
    for name in names:
        entry = read_json(file)["parts"][name]
        state = f"{len(entry['failed'])} failed" if entry["failed"] else "done"
        summary = entry.get("summary", "")
        rows[name] = {"seconds": round(entry["seconds"]), "state": state, "in short": summary}
    print()
    print_table("part", rows)
    print(f"written: {file}")
    return {"failed": [name for name, row in rows.items() if row["state"] != "done"]}


def work(record):
    """Run a part, in a process of its own."""
    settle(record.args.threads)
    with record.attempt(record.part):
        PARTS[record.part][0](record.args, record)
    record.keep(finished=True)


def stores(args, record):
    """Build what the other parts read, or find it."""
    seconds = {}
    for size in GRAPHS:
        start = time.time()
        with record.attempt(size):
            prepare.prepare(graph_name(args, size), args.root)
            seconds[size] = round(time.time() - start)
            record.keep(built_s=seconds, summary=str(seconds))


def losses(args, record):
    """Two epochs of each mode, model and precision beside the CPU's: fp32 to the printed digits, bf16 within 2 %."""
    found, rows = {}, {}
    options = ["--epochs", 2, "--fanout", "5,4,3", "--hidden", 64]
    options += ["--batch-size", 64 if args.quick else 256]
    convs = list(CONVS)[:2] if args.quick else CONVS
    for precision, conv, mode in itertools.product(
        ("fp32", "bf16"), convs, ("cpu-cpu", *GPU_MODES)
    ):
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
    drawn = importlib.util.find_spec("matplotlib")  # train.py refuses --timeline without it
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
    record.keep(files=made, summary=f"{len(made)} files in gpu-pictures.zip")


def tests(args, record):
    """pytest's own count of the tests that have gpu or cuda in their names."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda", "test_all.py"]
    # pytest cuts what failed to the terminal's width
    code, lines = output_of(command, COLUMNS="300")
    record.keep(summary=lines[-1].strip("= "))
    failed = [line[:300] for line in lines if re.match("FAILED |ERROR ", line)]
    for line in failed or [f"exit code {code}: {lines[-1]}"] * bool(code):
        record.fail(line)


def sanitizer(args, record):
    """memcheck on the checks below, of them two without torch's cache of memory, which hides what is out of bounds; capture
    of CUDA graphs needs it. (racecheck looks at shared memory, which no kernel uses.)"""
    toolkit, said = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), {}
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=toolkit)
    if not program:
        return record.keep(summary="not installed; it comes with the CUDA toolkit")
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    checks = {
        "sampler": ("check_sampler()", uncached),
        "layers": (f"check_steps({args.root!r}, 'off')", uncached),
        "graphs": (f"check_steps({args.root!r}, 'on')", {}),
    }
    for name, (call, environment) in checks.items():
        words = [sys.executable, "-c", f"from bench import gpu; gpu.{call}"]
        code, lines = output_of([program, "--error-exitcode", "9", *words], **environment)
        said[name] = ([line.strip("= ") for line in lines if "SUMMARY" in line] or lines)[-1]
        record.keep(said=said, summary=str(said))
        if code:
            record.fail(f"{name} ended with exit code {code}: {said[name]}")


def output_of(command, **environment):
    """Run a program in the project's folder -> (exit code, lines that it printed, at least one)."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, cwd=HERE, env=os.environ | environment, **both)
    return done.returncode, done.stdout.strip().splitlines() or [""]


def check_sampler():
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


def check_steps(root, graphs):
    """Four steps and the validation of every model in both precisions; graphs: "on" or "off"."""
    args = argparse.Namespace(quick=True, root=root, batch_size=64, fanout=[5, 4, 3], hidden=16)
    for conv, precision in itertools.product(CONVS, ("fp32", "bf16")):
        words = ["--epochs", "1", "--model", conv, "--cuda-graph", graphs]
        epochs_of(flags_of(args, "small", "cuda-cuda", precision, *words))


PARTS = {  # name: (function, seconds it may take)
    "stores": (stores, 120),
    "sampling": (gpu_speed.sampling, 45),
    "products": (partial(gpu_speed.training, size="products"), 200),
    "arxiv": (partial(gpu_speed.training, size="arxiv"), 80),
    "losses": (losses, 100),
    "transfer": (gpu_speed.transfer, 40),
    "trace": (trace, 50),
    "tests": (tests, 120),
    "sanitizer": (sanitizer, 120),
}
