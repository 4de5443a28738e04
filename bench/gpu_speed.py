"""How fast the GPU samples, trains and is fed: the parts sampling, products, arxiv and transfer of python -m bench gpu.

A part is a function of the command line's arguments and a `Record` of bench/gpu.py, to which it gives its figures.
"""

import gc
import itertools
import re
import statistics
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F

from bench.contenders import training_log
from bench.tools import forward, interleave, medians, opened, prepared, print_table, turned
from features import MODES, FeatureRing, gpu_view, place, share
from model import SAGE, gather_rows, self_and_mean
from native import layers
from sampler import NeighborSampler
from tasks.node import NodeTask

GPU_MODES = MODES[:3]
GRAPHS = {
    "products": "synthetic:nodes=2449029,degree=50,features=100,classes=47,train=196615,valid=39323",
    "arxiv": "synthetic:nodes=169343,degree=13.7,features=128,classes=40,train=90941,valid=29799",
    # of losses
    "small": "synthetic:nodes=20000,degree=15,features=32,classes=8,train=2000,valid=500",
}
# in the place of each
QUICK = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"
WINDOW = 20  # steps of the plain version that are timed at once
PINNED, ON_CPU = "native, graph in pinned memory", "native, on CPU"  # not the speed of GPU memory


def on_gpu(step, i):
    """Take a step -> (seconds from an idle GPU to an idle GPU by CUDA events, what it returned)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    result = step(i)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, result


def median_ms(steps, rounds, record, **options):
    """Time contenders in turn, after a round that does not count -> {name: median in ms}; failures are recorded."""
    how = {"warmup": 1, "timed": on_gpu, "attempt": record.attempt}
    times = interleave(steps, rounds, **how, **options)
    return {name: 1e3 * max(seconds, 1e-9) for name, seconds in medians(times).items()}


def graph_name(args, size):
    """The data set of a size."""
    return QUICK if args.quick else GRAPHS[size]


def flags_of(args, size, mode, precision, *more):
    """Words of train.py's command line."""
    words = ["--dataset", graph_name(args, size), "--root", args.root, "--hidden", args.hidden]
    words += ["--batch-size", args.batch_size, "--fanout", ",".join(map(str, args.fanout))]
    words += ["--precision", precision, "--mode", mode, "--gpus", int(mode != "cpu-cpu")]
    return [*words, *more]


def epochs_of(words):
    """Run train.py in this process, without its exact inference at the end -> the log entries of its epochs."""
    no_scores = lambda task, run, report: dict.fromkeys(task.store.split)  # noqa: E731
    with mock.patch.object(NodeTask, "finish", no_scores):
        entries, printed = training_log(words)
    if "on" in words and (why := re.search("no CUDA graphs: (.*)", printed)):
        raise RuntimeError(f"asked for CUDA graphs: {why[1]}")
    return [entry for entry in entries if "epoch" in entry]


def sampling(args, record):
    """One batch of every sampler, and what it moves over what a device copy moves in the same time."""
    store = opened(graph_name(args, "products"), args.root)
    seeds = store.split["train"].split(args.batch_size)
    host, device = [store.indptr, store.indices], [store.indptr.cuda(), store.indices.cuda()]
    blocks = {}

    def ours(graph, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*graph, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        return lambda i: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)

    contenders = {
        "native": partial(ours, device),
        "native, outermost hop in global ids": partial(ours, device, relabel_outer=False),
        PINNED: lambda: ours([gpu_view(array, "cuda") for array in share(host)]),
        "torch operations": partial(ours, device, backend="torch"),
        ON_CPU: partial(ours, host),
    }
    steps = prepared(contenders, record.attempt)
    source = torch.ones(1 << (20 if args.quick else 30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    steps["device copy"] = lambda i: target.copy_(source)
    ms = median_ms(steps, 4 * args.rounds, record, note=blocks.__setitem__)
    bandwidth = 2 * source.numel() / ms.pop("device copy")  # bytes a millisecond
    moved = {name: bytes_of_batch(blocks[name]) for name in ms}
    of_copy = {name: moved[name] / ms[name] / bandwidth for name in ms.keys() - {PINNED, ON_CPU}}
    figures = {"median_ms": ms, "bytes": moved, "share_of_copy": of_copy}
    print_table("sampling a batch", turned(figures))
    record.keep(**figures, copy_gb_per_s=bandwidth / 1e6)
    ratio = ms["torch operations"] / ms["native"]
    summary = f"native {ms['native']:.3f} ms, {ratio:.2f} times as fast as torch operations (goal: "
    summary += f"2; the paper: 1.52), {100 * of_copy['native']:.0f} % of copy bandwidth"
    record.keep(ratio_to_torch=ratio, summary=summary)


def bytes_of_batch(blocks):
    """What sampling moves at least: sectors of 32 bytes at random places, and the blocks themselves.

    A sector of indptr for each destination; one of indices for each edge, and one of the table of numbers where the
    hop is relabelled.
    """
    total = 0
    for block in blocks:
        relabelled = block.num_src > block.num_dst
        total += 32 * (block.num_dst + block.num_edges * (1 + relabelled))
        total += sum(tensor.nbytes for tensor in block if tensor is not None)
    return total


def plain(args, size, mode):
    """Time steps without what this project is about, in fp32 -> figures.

    Sampling by torch operations, nothing prepared ahead, rows gathered into fresh tensors and copied, layers of torch
    operations, torch's own dropout.
    """
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
            h = forward(net.layers, blocks, h, 0.5)
            optimizer.zero_grad()
            F.cross_entropy(h, y).backward()
            optimizer.step()

    layers.use_native(False)
    try:
        seconds = [on_gpu(window, i)[0] for i in range(4)][1:]
    finally:
        layers.use_native(True)
    return {"step_ms": 1e3 * statistics.median(seconds) / WINDOW}


def epochs(words, steps):
    """Time train.py: figures of the median of its epochs without the first, each of a number of steps."""
    entries = epochs_of(words)[1:]
    median = statistics.median(entry["seconds"] for entry in entries)
    stall = statistics.median(entry.get("stall", 0) / entry["seconds"] for entry in entries)
    figures = {"step_ms": 1e3 * median / steps, "epoch_s": median, "stall_share": stall}
    return figures | {"stages": entries[-1]}


def training(args, record, size):
    """Whole epochs of train.py, and windows of steps of the plain version, one after the other."""
    nodes = opened(graph_name(args, size), args.root).split["train"]
    steps, figures, contenders = -(-nodes.numel() // args.batch_size), {}, {}
    record.keep(graph=graph_name(args, size), steps_in_epoch=steps, contenders=figures)
    # the most wanted first; --cuda-graph where the GPU can read the features
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
                row["plain fp32 / this"] = beside["step_ms"] / row["step_ms"]
            figures[name] = row
            like = {n: f.get("plain fp32 / this", 1) for n, f in figures.items() if "fp32" in n}
            best = max(like, key=like.get, default=name)
            summary = f"fp32 {like.get(best, 1):.2f} times as fast as plain ({best}; goal: 3; the "
            record.keep(contenders=figures, summary=f"{summary}paper: 1.80)")
            print(f"{name}: {row['step_ms']:.2f} ms", flush=True)
    print_table("training", figures)


def transfer(args, record):
    """What a batch reads from host memory, by way of the ring and in place, beside a copy of page-locked memory."""
    store = opened(graph_name(args, "products"), args.root)
    features = store.features.tensor
    draw = NeighborSampler(store.indptr, store.indices, args.fanout, check=False)
    seeds, row = store.split["train"][: args.batch_size], features[:1].nbytes
    blocks, hop = draw.sample(seeds, 0), draw.sample(seeds, 0, relabel_outer=False)[0].to("cuda")
    ids, own, drawn = blocks[0].src_nodes.cuda(), hop.src_nodes[: hop.num_dst], seeds.cuda()
    options = {"slots": 1, "device": "cuda", "gather": gather_rows, "log": lambda line: None}
    ring = FeatureRing(features, store.labels, **options)
    pinned = torch.empty(ids.numel() * row, dtype=torch.uint8, pin_memory=True)
    device, copies = torch.empty_like(pinned, device="cuda"), []

    def fetch(i):
        batch = ring.fetch(0, blocks)
        batch.ready.synchronize()
        copies.append(batch.began.elapsed_time(batch.ready))

    link = "page-locked copy"
    steps = {
        link: lambda i: device.copy_(pinned, non_blocking=True),
        "ring: gather and copy": fetch,
    }
    with record.attempt("reads in place"):
        arrays = [gpu_view(a, "cuda") for a in share([store.indptr, store.indices, features])]
        *graph, table = arrays
        over_link = NeighborSampler(*graph, args.fanout, check=False)
        steps["rows in place, torch"] = lambda i: table.index_select(0, ids)
        steps["rows in place"] = lambda i: gather_rows(table, ids)
        steps["first hop in place"] = lambda i: self_and_mean(hop.indptr, hop.indices, table, own)
        steps["sampling in place"] = lambda i: over_link.sample(drawn, i)
    ms = median_ms(steps, 2 * args.rounds, record)
    if copies[1:]:
        ms["ring: copy alone"] = statistics.median(copies[1:])
    size = dict.fromkeys(ms, pinned.nbytes) | {
        "first hop in place": row * (hop.num_edges + hop.num_dst),
        "sampling in place": 32 * sum(block.num_dst + block.num_edges for block in blocks),
    }
    rate = {name: size[name] / 1e6 / t for name, t in ms.items()}
    share_of_link = {name: speed / rate[link] for name, speed in rate.items()}
    figures = {"median_ms": ms, "bytes": size, "gb_per_s": rate, "share_of_link": share_of_link}
    print_table("from host memory", turned(figures))
    parts = ", ".join(
        f"{name} {100 * p:.0f} %" for name, p in share_of_link.items() if name != link
    )
    record.keep(**figures, summary=f"of the link's speed: {parts}")
