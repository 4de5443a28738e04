"""python bench.py gpu: what this project does on a GPU, measured in one go, within --minutes (15) on an H100 or H200.

    tests      the tests that need a GPU, counted
    stores     synthetic graphs of the size of ogbn-products and ogbn-arxiv, kept under --root
    losses     every mode and model for two epochs: the losses of the CPU
    sampling   a batch, beside torch operations and PyG, with the bytes it moves over what a device copy moves a second
    products   steps and whole epochs of train.py in every mode and precision, with and without CUDA graphs, beside the
    arxiv      plain version and PyG; stages, stall and peak memory
    transfer   the ring's copies and rows read in place beside a copy of page-locked memory
    trace      a Chrome trace (Perfetto opens it) and the picture of the stages, for each mode
    sanitizer  compute-sanitizer's memcheck and racecheck on the sampler, where it is installed

Each part is a process of its own and writes its figures to gpu-PART.json under --out as they come. What fails in it, be
it an exception, a crash or the time limit, is written there and printed, and the next part runs. --quick takes tiny
graphs, to rehearse. A time is a median over --rounds, taken by CUDA events with the GPU idle at both ends, of
contenders that take turns after a round that does not count.
"""

import contextlib
import functools
import gzip
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

import datasets
import train
from bench_gpu_speed import GPU_MODES, GRAPHS, flags_of, graph_name, quiet, sampling, training, transfer
from bench_tools import hardware, print_table, settle
from disk import StoreError
from model import CONVS
from sampler import NeighborSampler

PROCESSES = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
ARGUMENTS = "what fanout batch_size hidden threads rounds window quick minutes parts root out".split()
FIELDS = "driver_version power.limit clocks.max.sm clocks.max.mem pcie.link.gen.max pcie.link.width.max".split()
PACKAGES = "numpy nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 cuda-bindings torch_geometric pyg-lib dgl".split()
GOALS = "goals: 2 times for sampling, 3 times for training; the paper's figures are 1.52 and 1.80"


# ---------------------------------------------------------------------------------------------------------------------
# parts, their files and what goes wrong in them


class Record:
    """The file of a part: where it was measured, how, its figures as they come, and what failed."""

    def __init__(self, args, part, seconds=0):
        self.path, self.deadline = Path(args.out, f"gpu-{part}.json"), time.time() + seconds
        arguments = {name: getattr(args, name) for name in ARGUMENTS}
        self.content = {"machine": None, "arguments": arguments, "part": part, "finished": False}
        self.content |= {"failed": [], "left_out": []}

    def keep(self, **figures):
        """Add figures to the file, which is whole at any time."""
        self.content |= figures
        aside = self.path.with_suffix(".aside")
        aside.write_text(json.dumps(self.content, indent=1) + "\n")
        aside.replace(self.path)

    def fail(self, what):
        """Write down and print what failed."""
        print(f"FAILED  {what}", flush=True)
        self.keep(failed=[*self.content["failed"], what])

    @contextlib.contextmanager
    def attempt(self, what, optional=False):
        """Go on after an exception in the body: a failure, but for something optional that is not installed."""
        try:
            yield
        except (Exception, SystemExit) as error:  # SystemExit: what train.py's command line refuses
            line = (str(error).strip().splitlines() or [""])[0][:300]
            if optional and isinstance(error, ImportError):
                print(f"left out: {what} ({line})", flush=True)
                self.keep(left_out=[*self.content["left_out"], f"{what}: {line}"])
            else:
                traceback.print_exc()
                self.fail(f"{what}: {type(error).__name__}: {line}")


def bench_gpu(args):
    """Run the parts -> {"failed": names of parts}."""
    if not torch.cuda.is_available():
        raise StoreError(f"gpu needs a CUDA GPU and torch's CUDA build; torch {torch.__version__} sees no GPU here")
    names = args.parts.split(",") if args.parts else list(PARTS)
    if unknown := set(names) - set(PARTS):
        raise StoreError(f"--parts {','.join(sorted(unknown))}: choose from {','.join(PARTS)}")
    args.out = args.out or (str(Path(args.root, "gpu-quick")) if args.quick else "results")
    args.window = 20  # steps timed at once
    if args.quick:
        args.batch_size, args.hidden, args.fanout, args.rounds, args.window = 64, 16, [5, 4, 3], 1, 2
    return run_parts({name: PARTS[name] for name in names}, args)


def run_parts(parts, args):
    """Run {name: (function of args and a Record, seconds it may take)} in turn -> {"failed": names}."""
    Path(args.out).mkdir(parents=True, exist_ok=True)
    end, contents = time.time() + 60 * args.minutes, {}
    for name, (function, limit) in parts.items():
        seconds = min(limit * (4 if args.quick else 1), end - time.time())  # a rehearsal may run on an emulated GPU
        print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
        contents[name] = run_part(name, function, seconds, args)
    rows = []
    for name, content in contents.items():
        left_out = f"{len(content['left_out'])} left out" if content["left_out"] else ""
        state = f"{len(content['failed'])} failed" if content["failed"] else left_out or "done"
        rows.append([name, f"{content['seconds']:.0f}", state, content.get("summary", "")])
    print()
    print_table(rows, ["part", "seconds", "state", "in short"])
    print(f"{GOALS}; files: {args.out}/gpu-*.json")
    return {"failed": [name for name, content in contents.items() if content["failed"]]}


def run_part(name, function, seconds, args):
    """Run one part in a process of its own -> what its file holds."""
    record, start = Record(args, name), time.time()
    record.keep()  # in the place of an older run's
    if seconds <= 0:
        record.fail(f"no time left of --minutes {args.minutes:g}")
        record.keep(seconds=0)
        return record.content
    process = PROCESSES.Process(target=_in_process, args=(name, function, seconds, args))
    process.start()
    try:
        process.join(seconds)
    finally:
        alive = process.exitcode is None
        if alive:
            with contextlib.suppress(ProcessLookupError):  # it has not become the leader of its group yet
                os.killpg(process.pid, signal.SIGKILL)  # with what it started
            process.kill()
            process.join()
    record.content = json.loads(record.path.read_text())
    if alive:
        record.fail(f"stopped after {seconds:.0f} s")
    elif not record.content["finished"]:
        record.fail(f"its process ended with exit code {process.exitcode}")
    record.keep(seconds=time.time() - start)
    return record.content


def _in_process(name, function, seconds, args):
    os.setsid()  # a group of its own, so that what it starts can be stopped with it
    settle(args.threads)
    record = Record(args, name, seconds)
    record.keep(machine=machine())
    with record.attempt(name):
        function(args, record)
    record.keep(finished=True)


def machine():
    """The processor and versions, the GPU, its driver and libraries -> dict."""
    found = {**hardware(), "gpu": None, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": device.name,
            "gpu_memory_gib": round(device.total_memory / 2**30, 1),
            "capability": f"{device.major}.{device.minor}",
            "multiprocessors": device.multi_processor_count,
        }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()[0]
        found |= dict(zip(FIELDS, line.split(", ")))
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def gpu_machine():
    """What `machine` says, asked in a process that ends: some GPUs serve one at a time, and the parts come after."""
    with PROCESSES.Pool(1) as pool:
        return pool.apply(machine)


# ---------------------------------------------------------------------------------------------------------------------
# tests, stores, losses


def tests(args, record):
    """pytest's own count of the tests that have gpu or cuda in their names."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda", Path(__file__).with_name("test_all.py")]
    environment = {**os.environ, "COLUMNS": "300"}  # pytest cuts what failed to the terminal's width
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, env=environment)
    last = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""])[-1]
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (\w+)", last.partition(" in ")[0])}
    record.keep(counts=counts, summary=last.strip("= "))
    print(last)
    for line in failed:
        record.fail(line[:300])
    if done.returncode and not failed:
        record.fail(f"pytest ended with exit code {done.returncode}: {last}")


def stores(args, record):
    """Build what the other parts read, or find it."""
    seconds = {}
    for size in GRAPHS:
        start = time.time()
        with record.attempt(size):
            datasets.prepare(graph_name(args, size), args.root)
            seconds[size] = time.time() - start
            record.keep(built_s=seconds, summary="  ".join(f"{name} {s:.0f} s" for name, s in seconds.items()))
            print(f"{size}: {graph_name(args, size)}, {seconds[size]:.1f} s", flush=True)


def losses(args, record):
    """Two epochs of each mode, model and precision beside the CPU's: fp32 to the printed digits, bf16 within 2 %."""
    found, rows, same = {}, [], 0
    options = ["--epochs", "2", "--fanout", "5,4,3", "--hidden", "64", "--batch-size", "64" if args.quick else "256"]
    for precision in ("fp32", "bf16"):
        for conv in CONVS:
            more = [*options, "--model", conv]
            cpu = None
            for mode in ("cpu-cpu", *GPU_MODES):
                name = f"{conv} {precision} {mode}"
                with record.attempt(name):
                    found[name] = losses_of_run(flags_of(args, "small", mode, precision, *more))
                    cpu = found[name] if mode == "cpu-cpu" else cpu
                    if not cpu:
                        raise RuntimeError("the CPU's own run failed")
                    apart = [abs(a - b) for a, b in zip(found[name], cpu, strict=True)]
                    most = 1.01e-4 if precision == "fp32" else 0.02 * max(cpu)
                    fine = all(a < most for a in apart)  # a loss that is no number is not
                    said = "  ".join(f"{loss:.4f}" for loss in found[name])
                    rows.append([name, said, f"{max(apart):.1e}", "same" if fine else "DIFFERS"])
                    record.keep(losses=found)
                    if not fine:
                        record.fail(f"{name}: losses {found[name]}, on the CPU {cpu}")
                    same += fine and mode != "cpu-cpu"
    print_table(rows, ["run", "losses of two epochs", "apart", "beside the CPU"])
    record.keep(summary=f"{same} of {2 * len(CONVS) * len(GPU_MODES)} runs give the CPU's losses")


def losses_of_run(words):
    """Run train.py here -> the loss of each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with quiet():
            code = train.main([*words, "--log", str(log)])
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if code:
        raise RuntimeError(f"train.py ended with exit code {code}")
    return [entry["loss"] for entry in entries if "epoch" in entry]


def trace(args, record):
    """gpu-trace-MODE.json.gz and gpu-timeline-MODE.png of the second epoch, of twelve steps."""
    made = []
    for mode in GPU_MODES:
        with record.attempt(mode), tempfile.TemporaryDirectory() as folder:
            words = flags_of(args, "arxiv", mode, "fp32", "--epochs", "2", "--profile", f"{folder}/trace.json")
            words[1] = words[1].replace("train=90941", f"train={12 * args.batch_size}")
            if importlib.util.find_spec("matplotlib"):
                words += ["--timeline", str(Path(args.out, f"gpu-timeline-{mode}.png"))]
            with quiet():
                code = train.main(words)
            if code:
                raise RuntimeError(f"train.py ended with exit code {code}")
            target = Path(args.out, f"gpu-trace-{mode}.json.gz")
            with open(f"{folder}/trace.rank0.json", "rb") as source, gzip.open(target, "wb") as file:
                shutil.copyfileobj(source, file)
            made += [target.name] + [Path(words[-1]).name] * ("--timeline" in words)
            record.keep(files=made, summary=f"{len(made)} files")
            print(f"{mode}: {', '.join(made[-2:])}", flush=True)
    if not importlib.util.find_spec("matplotlib"):
        with record.attempt("timelines", optional=True):
            raise ImportError("matplotlib is not installed")


def sanitizer(args, record):
    """compute-sanitizer on `check_sampler`, without torch's cache of memory, which would hide what is out of bounds."""
    folders = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [*folders, *os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
    program = shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, places)))
    said = {}
    with record.attempt("compute-sanitizer", optional=True):
        if not program:
            raise ImportError("it is not installed; it comes with the CUDA toolkit")
        for tool in ("memcheck", "racecheck"):
            code = "import bench_gpu; bench_gpu.check_sampler()"
            command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent,
                                  env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})  # fmt: skip
            lines = (done.stdout + done.stderr).strip().splitlines()
            said[tool] = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), (lines or [""])[-1])
            print(f"{tool}: {said[tool]}", flush=True)
            record.keep(said=said, summary="  ".join(f"{name}: {line}" for name, line in said.items()))
            if done.returncode:
                record.fail(f"{tool} ended with exit code {done.returncode}: {said[tool]}")


def check_sampler():
    """Sample a small graph on the GPU and on the CPU, which must agree."""
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 40, (5000,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(0, 5000, (int(indptr[-1]),), generator=generator, dtype=torch.int32)
    for method in ("uniform", "labor"):
        host, device = (
            NeighborSampler(a, b, [15, 10, 5], method=method)
            for a, b in ((indptr, indices), (indptr.cuda(), indices.cuda()))
        )
        assert device.backend == "native", f"the GPU's backend is {device.backend}"
        for step in range(2):
            seeds = torch.randperm(5000, generator=generator)[:64]
            for a, b in zip(host.sample(seeds, step), device.sample(seeds, step)):
                assert all(torch.equal(x, y.cpu()) for x, y in zip(a[:3], b[:3])), (
                    f"{method}: the GPU draws other blocks"
                )


PARTS = {  # name: (function, seconds it may take)
    "tests": (tests, 200),
    "stores": (stores, 150),
    "losses": (losses, 150),
    "sampling": (sampling, 60),
    "products": (functools.partial(training, size="products"), 260),
    "arxiv": (functools.partial(training, size="arxiv"), 120),
    "transfer": (transfer, 60),
    "trace": (trace, 60),
    "sanitizer": (sanitizer, 180),
}
