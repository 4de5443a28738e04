"""python -m bench gpu: all GPU measurements in one go, within --minutes (9).

    stores     synthetic graphs of the size of ogbn-products and ogbn-arxiv, kept under --root
    sampling   a batch, beside torch operations; bytes moved relative to the rate of a device copy
    products   epochs of train.py in every mode and precision, with and without CUDA graphs, beside the plain version:
    arxiv      step, epoch, stall, peak memory
    losses     every mode, model and precision for two epochs, compared with the CPU's losses
    transfer   the ring's copies, and rows, first hops and neighbour lists read in place, beside a copy of pinned memory
    trace      a Chrome trace (Perfetto opens it) and the picture of the stages, for each mode
    tests      the tests that need a GPU, counted
    sanitizer  compute-sanitizer's memcheck on sampler, layers and steps as CUDA graphs, where it is installed

Every part is a process that writes its figures into results/gpu.json as they come; pictures and traces are in
gpu-pictures.zip beside it. A failure in a part (exception, crash or time limit) is written to gpu.json and printed, and
the next part runs. --quick rehearses on tiny graphs, in ROOT/gpu-quick.
"""

import argparse
import contextlib
import gc
import importlib.util
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F

from bench import tools
from bench.tools import opened, print_table, read_json, training_log, write_json
from disk.files import StoreError
from features import MODES, FeatureRing, gpu_view, place, share
from model import CONVS, SAGE, gather_rows, self_and_mean
from sampler import NeighborSampler
from sources import prepare
from tasks.node import NodeTask

START = "spawn"  # CUDA does not survive a fork
HERE = Path(__file__).parents[1]
GPU_MODES = MODES[:3]
GRAPHS = {
    "products": "synthetic:nodes=2449029,degree=50,features=100,classes=47,train=196615,valid=39323",
    "arxiv": "synthetic:nodes=169343,degree=13.7,features=128,classes=40,train=90941,valid=29799",
    # for the part `losses`
    "small": "synthetic:nodes=20000,degree=15,features=32,classes=8,train=2000,valid=500",
}
# with --quick, instead of each
QUICK = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"
WINDOW = 20  # steps of the plain version per timing
PINNED, ON_CPU = "native, graph in pinned memory", "native, on CPU"  # not the speed of GPU memory


class Record:
    """A part's entry in gpu.json: figures as they come, and failures."""

    def __init__(self, args, part):
        self.args, self.part = args, part
        self.file, self.figures = Path(args.out, "gpu.json"), {}

    def keep(self, **figures):
        """Add figures to the entry; the file is written atomically."""
        self.figures |= figures
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
    names, rows = tools.chosen_parts(args, PARTS), {}
    args.out = str(Path(args.root, "gpu-quick")) if args.quick else "results"
    if args.quick:
        args.batch_size, args.hidden, args.fanout, args.rounds = 64, 16, [5, 4, 3], 1
    file, end = Path(args.out, "gpu.json"), time.time() + 60 * args.minutes
    head = {"machine": tools.hardware(gpu=True), "arguments": vars(args)}
    write_json(file, head | {"parts": read_json(file).get("parts", {})})  # not run again, they stay
    for name in names:
        # a rehearsal may run on a slow, emulated GPU
        seconds = min(PARTS[name][1] * (10 if args.quick else 1), end - time.time())
        print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
        entry = run_part(Record(args, name), seconds)
        state = f"{len(entry['failed'])} failed" if entry["failed"] else "done"
        summary = entry.get("summary", "")
        rows[name] = {"seconds": round(entry["seconds"]), "state": state, "in short": summary}
    print()
    print_table("part", rows)
    print(f"written: {file}")
    return {"failed": [name for name, row in rows.items() if row["state"] != "done"]}


def run_part(record, seconds):
    """Run a part in its own process, for at most `seconds` -> its entry in gpu.json."""
    record.keep(failed=[], seconds=0)  # replaces an older run's
    if seconds <= 0:
        record.fail(f"no time left of --minutes {record.args.minutes:g}")
        return record.figures
    start = time.time()
    code = tools.limited(work, record, seconds, START)
    record.figures = read_json(record.file)["parts"][record.part]
    if code is None:
        record.fail(f"stopped after {seconds:.0f} s")
    elif code:
        record.fail(f"its process ended with exit code {code}")
    record.keep(seconds=time.time() - start)
    return record.figures


def work(record):
    tools.settle(record.args.threads)
    with record.attempt(record.part):
        PARTS[record.part][0](record.args, record)


def stores(args, record):
    """Build the stores that the other parts read, unless they exist."""
    for size in GRAPHS:
        prepare.prepare(graph_name(args, size), args.root)


def on_gpu(step, i):
    """Run step(i) -> (seconds by CUDA events between two synchronisations, its result)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    result = step(i)
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) / 1e3, 1e-9), result


# contenders on the GPU in turn, after a round that does not count
compare = partial(tools.compare, warmup=1, timed=on_gpu)


def graph_name(args, size):
    return QUICK if args.quick else GRAPHS[size]


def flags_of(args, size, mode, precision, *more):
    """Return the words of a train.py command line."""
    words = ["--dataset", graph_name(args, size), "--root", args.root, "--hidden", args.hidden]
    words += ["--batch-size", args.batch_size, "--fanout", ",".join(map(str, args.fanout))]
    words += ["--precision", precision, "--mode", mode, "--gpus", int(mode != "cpu-cpu")]
    return [*words, *more]


def epochs_of(words):
    """Run train.py in this process, without the exact inference at its end -> log entries of its epochs."""
    no_scores = lambda task, run, report: dict.fromkeys(task.store.split)  # noqa: E731
    with mock.patch.object(NodeTask, "finish", no_scores):
        entries, printed = training_log(words)
    if "on" in words and (why := re.search("no CUDA graphs: (.*)", printed)):
        raise RuntimeError(f"asked for CUDA graphs: {why[1]}")
    return [entry for entry in entries if "epoch" in entry]


def sampling(args, record):
    """Time a batch of every sampler; relate the bytes it moves to those of a device copy in the same time."""
    store = opened(graph_name(args, "products"), args.root)
    seeds = store.split["train"].split(args.batch_size)
    host, device = [store.indptr, store.indices], [store.indptr.cuda(), store.indices.cuda()]
    moved = {}

    def ours(name, graph, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*graph, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        step = lambda i: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)  # noqa: E731
        moved[name] = bytes_of_batch(step(0))
        return step

    outer = "native, outermost hop in global ids"
    source = torch.ones(1 << (18 if args.quick else 28), device="cuda")
    target = torch.empty_like(source)
    contenders = {
        "native": partial(ours, "native", device),
        outer: partial(ours, outer, device, relabel_outer=False),
        PINNED: lambda: ours(PINNED, [gpu_view(array, "cuda") for array in share(host)]),
        "torch operations": partial(ours, "torch operations", device, backend="torch"),
        ON_CPU: partial(ours, ON_CPU, host),
        "device copy": lambda: lambda i: target.copy_(source),
    }
    rows = compare("sampling a batch", contenders, 4 * args.rounds, attempt=record.attempt)
    bandwidth = 2 * source.nbytes / rows.pop("device copy")["median_ms"]  # bytes a millisecond
    for name, row in rows.items():
        row["bytes"] = moved[name]
        if name not in (PINNED, ON_CPU):
            row["share_of_copy"] = moved[name] / row["median_ms"] / bandwidth
    record.keep(contenders=rows, copy_gb_per_s=bandwidth / 1e6)
    native, plain = rows["native"], rows["torch operations"]
    summary = f"native {native['median_ms']:.3f} ms, {plain['time / native']:.2f} times as fast as torch operations (goal: "
    summary += f"2; the paper: 1.52), {100 * native['share_of_copy']:.0f} % of copy bandwidth"
    record.keep(summary=summary)


def bytes_of_batch(blocks):
    """Return the least bytes that sampling moves: the blocks, and 32-byte sectors, one of indptr for each destination,
    one of indices for each edge, and one of the relabelling table for each edge of a relabelled hop."""
    total = 0
    for block in blocks:
        relabelled = block.num_src > block.num_dst
        total += 32 * (block.num_dst + block.num_edges * (1 + relabelled))
        total += sum(tensor.nbytes for tensor in block if tensor is not None)
    return total


def plain(args, size, mode):
    """Time steps of a plain version in fp32 -> figures: sampling, layers and dropout of torch
    operations, no prefetching, rows gathered into fresh tensors and copied."""
    store = opened(graph_name(args, size), args.root)
    arrays = [store.indptr, store.indices, store.labels, store.features]
    arrays = share(arrays) if mode == "pinned-cuda" else arrays
    indptr, indices, labels, features = place(*arrays, mode, "cuda")
    sampler = NeighborSampler(indptr, indices, args.fanout, backend="torch", check=False)
    widths, nodes = (store.feature_dim, args.hidden, store.num_classes), store.split["train"]
    net = SAGE(*widths, num_layers=len(args.fanout)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(0))]
    batches = itertools.cycle(enumerate(order.split(args.batch_size)))
    torch.set_float32_matmul_precision("highest")

    def window(i):
        for step, seeds in itertools.islice(batches, WINDOW):
            blocks = sampler.sample(seeds, step)
            h = features.index_select(0, blocks[0].src_nodes).cuda()
            y = labels.index_select(0, seeds.to(labels.device)).cuda()
            blocks = [block.to("cuda") for block in blocks]
            h = tools.forward(net.layers, blocks, h, 0.5)
            tools.descend(F.cross_entropy(h, y), optimizer)

    with mock.patch("model.fused", None):
        seconds = [on_gpu(window, i)[0] for i in range(4)][1:]
    return {"median_ms": 1e3 * statistics.median(seconds) / WINDOW}


def epochs(words, steps):
    """Run train.py -> figures of the median epoch without the first; steps: in an epoch."""
    entries = epochs_of(words)[1:]
    median = statistics.median(entry["seconds"] for entry in entries)
    stall = statistics.median(entry.get("stall", 0) / entry["seconds"] for entry in entries)
    figures = {"median_ms": 1e3 * median / steps, "epoch_s": median, "stall_share": stall}
    return figures | {"stages": entries[-1]}


def training(args, record, size):
    """Time whole epochs of train.py, and windows of steps of the plain version, one after the other."""
    nodes = opened(graph_name(args, size), args.root).split["train"]
    steps, figures, contenders = -(-nodes.numel() // args.batch_size), {}, {}
    record.keep(graph=graph_name(args, size), steps_in_epoch=steps, contenders=figures)
    # the most interesting first; CUDA graphs only where the GPU can read the features
    for precision, mode in itertools.product(("fp32", "bf16", "tf32"), GPU_MODES):
        if precision == "fp32":
            contenders[f"{mode} fp32 plain"] = partial(plain, args, size, mode)
        for how, word in (("eager", "off"), ("graph", "on"))[: 1 if mode == "cpu-cuda" else 2]:
            words = flags_of(args, size, mode, precision, "--epochs", "4", "--cuda-graph", word)
            contenders[f"{mode} {precision} {how}"] = partial(epochs, words, steps)
    for name, run in contenders.items():
        with record.attempt(name):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            row = run() | {"peak_bytes": torch.cuda.max_memory_allocated() - before}
            if beside := figures.get(f"{name.split()[0]} fp32 plain"):
                row["plain fp32 / this"] = beside["median_ms"] / row["median_ms"]
            figures[name] = row
            gains = {n: f.get("plain fp32 / this", 1) for n, f in figures.items() if "fp32" in n}
            best = max(gains, key=gains.get, default=name)
            summary = f"fp32 {gains.get(best, 1):.2f} times as fast as plain ({best}; goal: 3; the "
            record.keep(contenders=figures, summary=f"{summary}paper: 1.80)")
            print(f"{name}: {row['median_ms']:.2f} ms", flush=True)
    print_table("training", figures)


def transfer(args, record):
    """Time what a batch reads from host memory, through the ring and in place, beside a copy of page-locked memory."""
    store = opened(graph_name(args, "products"), args.root)
    features = store.features.tensor
    draw = NeighborSampler(store.indptr, store.indices, args.fanout, check=False)
    seeds, row = store.split["train"][: args.batch_size], features[:1].nbytes
    blocks, hop = draw.sample(seeds, 0), draw.sample(seeds, 0, relabel_outer=False)[0].to("cuda")
    ids, own, drawn = blocks[0].src_nodes.cuda(), hop.src_nodes[: hop.num_dst], seeds.cuda()
    options = {"slots": 1, "device": "cuda", "gather": gather_rows, "log": lambda line: None}
    ring = FeatureRing(features, store.labels, **options)
    pinned = torch.empty(ids.numel() * row, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(pinned, device="cuda")

    def fetch(i):
        batch = ring.fetch(0, blocks)
        batch.ready.synchronize()
        return {"copy_ms": batch.began.elapsed_time(batch.ready)}

    link = "page-locked copy"
    steps = {
        link: lambda i: device.copy_(pinned, non_blocking=True),
        "ring: gather and copy": fetch,
    }
    with record.attempt("reads in place"):
        shared = share([store.indptr, store.indices, features])
        *graph, table = (gpu_view(array, "cuda") for array in shared)
        over_link = NeighborSampler(*graph, args.fanout, check=False)
        steps["rows in place, torch"] = lambda i: table.index_select(0, ids)
        steps["rows in place"] = lambda i: gather_rows(table, ids)
        steps["first hop in place"] = lambda i: self_and_mean(hop.indptr, hop.indices, table, own)
        steps["sampling in place"] = lambda i: over_link.sample(drawn, i)
    contenders = {name: lambda step=step: step for name, step in steps.items()}
    rows = compare("from host memory", contenders, 2 * args.rounds, attempt=record.attempt)
    size = dict.fromkeys(rows, pinned.nbytes) | {
        "first hop in place": row * (hop.num_edges + hop.num_dst),
        "sampling in place": 32 * sum(block.num_dst + block.num_edges for block in blocks),
    }
    for name, figures in rows.items():
        figures["gb_per_s"] = size[name] / 1e6 / figures["median_ms"]
        figures["share_of_link"] = figures["gb_per_s"] / rows[link]["gb_per_s"]
    parts = [f"{n} {100 * f['share_of_link']:.0f} %" for n, f in rows.items() if n != link]
    record.keep(contenders=rows, summary=f"of the link's speed: {', '.join(parts)}")


def losses(args, record):
    """Compare two epochs' losses of each mode, model and precision with the CPU's: fp32 as printed, bf16 within 2 %."""
    by_run, rows, modes = {}, {}, ("cpu-cpu", *GPU_MODES)
    options = ["--epochs", 2, "--fanout", "5,4,3", "--hidden", 64]
    options += ["--batch-size", 64 if args.quick else 256]
    convs = list(CONVS)[:2] if args.quick else CONVS
    for precision, conv, mode in itertools.product(("fp32", "bf16"), convs, modes):
        name, cpu = f"{conv} {precision} {mode}", f"{conv} {precision} cpu-cpu"
        with record.attempt(name):
            words = flags_of(args, "small", mode, precision, *options, "--model", conv)
            by_run[name] = ours = [entry["loss"] for entry in epochs_of(words)]
            apart = max(abs(a - b) for a, b in zip(ours, by_run[cpu]))
            record.keep(losses=by_run)
            # `not <`: a NaN fails too
            if not apart < (1.01e-4 if precision == "fp32" else 0.02 * max(by_run[cpu])):
                raise RuntimeError(f"losses {ours}, on the CPU {by_run[cpu]}")
            rows[name] = {"first": ours[0], "last": ours[1], "apart": apart}
            same = sum(not name.endswith("cpu-cpu") for name in rows)
            runs = 2 * len(convs) * len(GPU_MODES)
            record.keep(summary=f"{same} of {runs} runs give the CPU's losses")
    print_table("losses beside the CPU's", rows)


def trace(args, record):
    """Write a trace and a timeline of the second epoch, of twelve steps, for each mode, into gpu-pictures.zip."""
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
    """Run the tests with gpu or cuda in their names, and record pytest's counts."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda", "test_all.py"]
    # pytest cuts the names of failures to the terminal's width
    code, lines = output_of(command, COLUMNS="300")
    record.keep(summary=lines[-1].strip("= "))
    failed = [line[:300] for line in lines if re.match("FAILED |ERROR ", line)]
    for line in failed or [f"exit code {code}: {lines[-1]}"] * bool(code):
        record.fail(line)


def sanitizer(args, record):
    """Run memcheck on `check_steps`. Without CUDA graphs torch's caching allocator is off too, as it hides
    accesses out of bounds; capture needs it. (racecheck looks at shared memory, which no kernel uses.)"""
    toolkit, said = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), {}
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=toolkit)
    if not program:
        return record.keep(summary="not installed; it comes with the CUDA toolkit")
    for graphs, environment in {"off": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "on": {}}.items():
        name = f"CUDA graphs {graphs}"
        call = f"from bench import gpu; gpu.check_steps({args.root!r}, {graphs!r})"
        words = [program, "--error-exitcode", "9", sys.executable, "-c", call]
        code, lines = output_of(words, **environment)
        said[name] = ([line.strip("= ") for line in lines if "SUMMARY" in line] or lines)[-1]
        record.keep(said=said, summary=str(said))
        if code:
            record.fail(f"{name} ended with exit code {code}: {said[name]}")


def output_of(command, **environment):
    """Run a program in the project's folder -> (exit code, the lines it printed, at least one)."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, cwd=HERE, env=os.environ | environment, **both)
    return done.returncode, done.stdout.strip().splitlines() or [""]


def check_steps(root, graphs):
    """Train and validate every model for an epoch in both precisions, GCN with LABOR; graphs: "on" or "off"."""
    args = argparse.Namespace(quick=True, root=root, batch_size=64, fanout=[5, 4, 3], hidden=16)
    for conv, precision in itertools.product(CONVS, ("fp32", "bf16")):
        words = ["--epochs", "1", "--model", conv, "--cuda-graph", graphs]
        words += ["--sampler", "labor"] if conv == "gcn" else []
        epochs_of(flags_of(args, "small", "cuda-cuda", precision, *words))


PARTS = {  # name: (function, seconds it may take)
    "stores": (stores, 120),
    "sampling": (sampling, 45),
    "products": (partial(training, size="products"), 200),
    "arxiv": (partial(training, size="arxiv"), 80),
    "losses": (losses, 100),
    "transfer": (transfer, 40),
    "trace": (trace, 50),
    "tests": (tests, 120),
    "sanitizer": (sanitizer, 120),
}
