"""python -m bench gpu: all GPU measurements in one go, within --minutes (9).

    stores     synthetic graphs of the size of ogbn-products and ogbn-arxiv, kept under --root
    sampling   a batch, beside torch operations; its rows through the ring and read in place, beside a copy of as many
    products   epochs of train.py in every mode and precision, with and without CUDA graphs, beside the plain version:
    arxiv      step, epoch, stall, peak memory
    losses     every mode, model and precision for two epochs, compared with the CPU's losses
    trace      a Chrome trace (Perfetto opens it) and the picture of the stages, for each mode
    tests      the tests that need a GPU, counted

Every part is a process that writes its figures into results/gpu.json as they come; pictures and traces are in
gpu-pictures.zip beside it. A failure in a part (exception, crash or time limit) is written to gpu.json and printed, and
the next part runs. --quick rehearses on tiny graphs, in ROOT/gpu-quick.
"""

import contextlib
import gc
import importlib.util
import itertools
import multiprocessing
import os
import re
import shutil
import signal
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
from bench.tools import opened, print_table, read_json, write_json
from disk.files import StoreError
from features import MODES, FeatureRing, gpu_view, place, share
from model import CONVS, SAGE, gather_rows
from sampler import NeighborSampler
from sources import prepare

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
    names, rows, args.out = tools.chosen_parts(args, PARTS), {}, "results"
    if args.quick:
        args.out = str(Path(args.root, "gpu-quick"))
        args.batch_size, args.hidden, args.fanout, args.rounds = 64, 16, [5, 4, 3], 1
    file, end = Path(args.out, "gpu.json"), time.time() + 60 * args.minutes
    head = {"machine": tools.hardware(gpu=True), "arguments": vars(args)}
    write_json(file, head | {"parts": read_json(file).get("parts", {})})  # not run again, they stay
    for name in names:
        # a rehearsal may run on a slow, emulated GPU
        seconds = min(PARTS[name][1] * (10 if args.quick else 1), end - time.time())
        print(f"\n== {name}, at most {max(seconds, 0):.0f} s", flush=True)
        entry = run_part(Record(args, name), seconds)
        rows[name] = {"seconds": round(entry["seconds"]), "failed": len(entry["failed"])}
    print()
    print_table("part", rows)
    print(f"written: {file}")
    return {"failed": [name for name, row in rows.items() if row["failed"]]}


def run_part(record, seconds):
    """Run a part in its own process, for at most `seconds` -> its entry in gpu.json."""
    record.keep(failed=[], seconds=0)  # replaces an older run's
    if seconds <= 0:
        record.fail(f"no time left of --minutes {record.args.minutes:g}")
        return record.figures
    start = time.time()
    process = multiprocessing.get_context(START).Process(target=work, args=[record])
    process.start()
    try:
        process.join(seconds)
        code = process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    record.figures = read_json(record.file)["parts"][record.part]
    if code is None:
        record.fail(f"stopped after {seconds:.0f} s")
    elif code:
        record.fail(f"its process ended with exit code {code}")
    record.keep(seconds=time.time() - start)
    return record.figures


def work(record):
    os.setsid()  # to end with the processes that it starts
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


def graph_name(args, size):
    return QUICK if args.quick else GRAPHS[size]


def epochs_of(args, dataset, mode, precision, *flags):
    """Run train.py in a mode -> log entries of its epochs."""
    words = ["--precision", precision, "--mode", mode, "--gpus", int(mode != "cpu-cpu")]
    return tools.epochs_of(args, dataset, *words, *flags)


def sampling(args, record):
    """Time a batch of every sampler, and its rows read from host memory."""
    store = opened(graph_name(args, "products"), args.root)
    seeds, table = store.split["train"].split(args.batch_size), store.features.tensor
    host, device = [store.indptr, store.indices], [store.indptr.cuda(), store.indices.cuda()]
    blocks = NeighborSampler(*host, args.fanout, check=False).sample(seeds[0], 0)
    ids = blocks[0].src_nodes.cuda()
    pinned = torch.empty(len(ids), *table.shape[1:], dtype=table.dtype, pin_memory=True)

    def ours(graph, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*graph, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        return lambda i: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)

    def rows_through_ring():
        ring = FeatureRing(table, store.labels, slots=1, device="cuda", gather=gather_rows)
        return lambda i: ring.fetch(0, blocks).ready.synchronize()

    def rows_in_place():
        shared = gpu_view(*share([table]), "cuda")
        return lambda i: gather_rows(shared, ids)

    contenders = {
        "native": partial(ours, device),
        "native, outermost hop in global ids": partial(ours, device, relabel_outer=False),
        "native, graph in pinned memory": lambda: ours([gpu_view(a, "cuda") for a in share(host)]),
        "torch operations": partial(ours, device, backend="torch"),
        "native, on CPU": partial(ours, host),
        "rows through the ring": rows_through_ring,
        "rows read in place": rows_in_place,
        "copy of as many pinned rows": lambda: lambda i: pinned.cuda(),
    }
    options = {"warmup": 1, "timed": on_gpu, "attempt": record.attempt}
    rows = tools.compare("a batch", contenders, 4 * args.rounds, **options)
    record.keep(contenders=rows, bytes_of_rows=pinned.nbytes)


def plain(args, size, mode):
    """Time steps of a plain version in fp32 -> figures: sampling, layers and dropout of torch
    operations, no prefetching, rows gathered into fresh tensors and copied."""
    store = opened(graph_name(args, size), args.root)
    arrays = [store.indptr, store.indices, store.labels, store.features]
    arrays = share(arrays) if mode == "pinned-cuda" else arrays
    indptr, indices, labels, features = place(*arrays, mode, "cuda")
    sampler = NeighborSampler(indptr, indices, args.fanout, backend="torch", check=False)
    widths = store.feature_dim, args.hidden, store.num_classes
    net = SAGE(*widths, num_layers=len(args.fanout)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    nodes = store.split["train"]
    order = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))]
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


def epochs(args, size, mode, precision, graphs, steps):
    """Run train.py -> figures of the median epoch without the first; steps: in an epoch."""
    flags = "--epochs", 4, "--cuda-graph", graphs
    entries = epochs_of(args, graph_name(args, size), mode, precision, *flags)[1:]
    median = statistics.median(entry["seconds"] for entry in entries)
    stall = statistics.median(entry.get("stall", 0) / entry["seconds"] for entry in entries)
    figures = {"median_ms": 1e3 * median / steps, "epoch_s": median, "stall_share": stall}
    return figures | {"stages": entries[-1]}


def training(args, record, size):
    """Time whole epochs of train.py, and windows of steps of the plain version, one after the other."""
    nodes = opened(graph_name(args, size), args.root).split["train"]
    steps, figures, contenders = -(-nodes.numel() // args.batch_size), {}, {}
    record.keep(graph=graph_name(args, size), steps_in_epoch=steps)
    # the most interesting first; CUDA graphs only where the GPU can read the features
    for precision, mode in itertools.product(("fp32", "bf16", "tf32"), GPU_MODES):
        if precision == "fp32":
            contenders[f"{mode} fp32 plain"] = partial(plain, args, size, mode)
        for how, graphs in (("eager", "off"), ("graph", "on"))[: 1 if mode == "cpu-cuda" else 2]:
            run = partial(epochs, args, size, mode, precision, graphs, steps)
            contenders[f"{mode} {precision} {how}"] = run
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
            record.keep(contenders=figures)
            print(f"{name}: {row['median_ms']:.2f} ms", flush=True)
    print_table("training", figures)


def losses(args, record):
    """Compare two epochs' losses of each mode, model and precision with the CPU's: fp32 as printed, bf16 within 2 %."""
    by_run, rows, graph = {}, {}, graph_name(args, "small")
    flags = ["--epochs", 2, "--fanout", "5,4,3", "--hidden", 64]
    flags += ["--batch-size", 64 if args.quick else 256]
    convs, modes = list(CONVS)[:2] if args.quick else CONVS, ("cpu-cpu", *GPU_MODES)
    for precision, conv, mode in itertools.product(("fp32", "bf16"), convs, modes):
        name, cpu = f"{conv} {precision} {mode}", f"{conv} {precision} cpu-cpu"
        with record.attempt(name):
            entries = epochs_of(args, graph, mode, precision, *flags, "--model", conv)
            by_run[name] = ours = [entry["loss"] for entry in entries]
            apart = max(abs(a - b) for a, b in zip(ours, by_run[cpu]))
            record.keep(losses=by_run)
            # `not <`: a NaN fails too
            if not apart < (1.01e-4 if precision == "fp32" else 0.02 * max(by_run[cpu])):
                raise RuntimeError(f"losses {ours}, on the CPU {by_run[cpu]}")
            rows[name] = {"first": ours[0], "last": ours[1], "apart": apart}
    print_table("losses beside the CPU's", rows)


def trace(args, record):
    """Write a trace and a timeline of the second epoch, of twelve steps, for each mode, into gpu-pictures.zip."""
    drawn = importlib.util.find_spec("matplotlib")  # train.py refuses --timeline without it
    with tempfile.TemporaryDirectory() as folder:
        for mode in GPU_MODES:
            with record.attempt(mode):
                nodes = f"train={12 * args.batch_size}"
                dataset = re.sub(r"train=\d+", nodes, graph_name(args, "arxiv"))
                flags = ["--epochs", 2, "--profile", f"{folder}/trace-{mode}.json"]
                flags += ["--timeline", f"{folder}/timeline-{mode}.png"] if drawn else []
                epochs_of(args, dataset, mode, "fp32", *flags)
            shutil.make_archive(str(Path(args.out, "gpu-pictures")), "zip", folder)
        record.keep(files=sorted(file.name for file in Path(folder).iterdir()))


def tests(args, record):
    """Run the tests with gpu or cuda in their names, and record pytest's counts."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "gpu or cuda", "test_all.py"]
    # pytest cuts the names of failures to the terminal's width
    options = {"cwd": HERE, "env": os.environ | {"COLUMNS": "300"}, "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    lines = done.stdout.strip().splitlines() or [""]
    record.keep(counts=lines[-1].strip("= "))
    print(lines[-1])
    failed = [line[:300] for line in lines if re.match("FAILED |ERROR ", line)]
    for line in failed or [f"exit code {done.returncode}: {lines[-1]}"] * bool(done.returncode):
        record.fail(line)


PARTS = {  # name: (function, seconds it may take)
    "stores": (stores, 120),
    "sampling": (sampling, 85),
    "products": (partial(training, size="products"), 200),
    "arxiv": (partial(training, size="arxiv"), 80),
    "losses": (losses, 100),
    "trace": (trace, 50),
    "tests": (tests, 120),
}
