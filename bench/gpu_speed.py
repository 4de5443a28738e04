"""How fast the GPU samples, trains and is fed: the parts sampling, products, arxiv and transfer of python -m bench gpu.

A part is a function of the command line's arguments and a `Record` of bench/gpu.py, to which it gives its figures.
"""

import contextlib
import functools
import gc
import io
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch.nn import functional as F

import train
from bench.tools import interleave, medians, opened, print_table
from features import MODES, FeatureRing, gpu_view, place, share
from model import SAGE, gather_rows, self_and_mean
from native import layers
from sampler import NeighborSampler

GPU_MODES = MODES[:3]
GRAPHS = {
    "products": "synthetic:nodes=2449029,degree=50,features=100,classes=47,train=196615,valid=39323",
    "arxiv": "synthetic:nodes=169343,degree=13.7,features=128,classes=40,train=90941,valid=29799",
    # of losses
    "small": "synthetic:nodes=20000,degree=15,features=32,classes=8,train=2000,valid=500",
}
# in the place of each
QUICK = "synthetic:nodes=2000,degree=8,features=16,classes=4,train=256,valid=64"
WINDOW = 20  # steps timed at once where a step takes SLOW or more; else whole epochs are
SLOW = 5e-3
PINNED, ON_CPU = "native, graph in pinned memory", "native, on CPU"  # not the speed of GPU memory


# ---------------------------------------------------------------------------------------------------------------------
# timing


def on_gpu(run, *args):
    """Call a contender -> (seconds from an idle GPU to an idle GPU by CUDA events, what it returned)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    result = run(*args)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, result


def median_ms(contenders, rounds, record):
    """Time contenders in turn, after a round that does not count -> {name: median in ms}; failures are recorded."""
    how = {"warmup": 1, "timed": on_gpu, "attempt": record.attempt}
    times = interleave(contenders, rounds, **how)
    return {name: 1e3 * seconds for name, seconds in medians(times).items()}


def gb_per_s(nbytes, ms):
    """Bytes in milliseconds -> GB/s."""
    return nbytes / 1e6 / max(ms, 1e-6)


def graph_name(args, size):
    """The data set of a size."""
    return QUICK if args.quick else GRAPHS[size]


def flags_of(args, size, mode, precision="fp32", *more):
    """Words of train.py's command line."""
    words = {
        "--dataset": graph_name(args, size),
        "--root": args.root,
        "--batch-size": args.batch_size,
        "--fanout": ",".join(map(str, args.fanout)),
        "--hidden": args.hidden,
        "--precision": precision,
        "--mode": mode,
        "--gpus": int(mode != "cpu-cpu"),
    }
    return [str(word) for pair in words.items() for word in pair] + list(more)


def epochs_of(words):
    """Run train.py in this process, without its exact inference at the end -> the log entries of its epochs."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        with mock.patch.object(train, "finish", lambda *args: None):
            code = train.main([*words, "--log", f"{folder}/log"])
        log = Path(folder, "log")
        lines = log.read_text().splitlines() if log.exists() else []
    if code:
        raise RuntimeError(f"train.py ended with exit code {code}")
    if "on" in words and (why := re.search("no CUDA graphs: (.*)", said.getvalue())):
        raise RuntimeError(f"asked for CUDA graphs: {why[1]}")
    return [entry for entry in map(json.loads, lines) if "epoch" in entry]


# ---------------------------------------------------------------------------------------------------------------------
# sampling


def sampling(args, record):
    """One batch of every sampler, and what it moves over what a device copy moves in the same time."""
    store = opened(graph_name(args, "products"), args.root)
    seeds = store.split["train"].split(args.batch_size)
    host, device = [store.indptr, store.indices], [store.indptr.cuda(), store.indices.cuda()]
    seen, contenders = {}, {}

    def ours(name, graph, relabel_outer=True, backend="native"):
        draw = NeighborSampler(*graph, args.fanout, backend=backend, check=False)
        if draw.backend != backend:
            raise RuntimeError(f"there is no {backend} backend here")
        return lambda i: seen.update(
            {name: draw.sample(seeds[i % len(seeds)], i, relabel_outer=relabel_outer)}
        )

    makers = {
        "native": lambda name: ours(name, device),
        "native, outermost hop in global ids": lambda name: ours(name, device, False),
        PINNED: lambda name: ours(name, [gpu_view(a, "cuda") for a in share(host)]),
        "torch operations": lambda name: ours(name, device, backend="torch"),
        ON_CPU: lambda name: ours(name, host),
    }
    for name, make in makers.items():
        with record.attempt(name):
            contenders[name] = make(name)
    source = torch.ones(1 << (20 if args.quick else 30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    contenders["device copy"] = lambda i: target.copy_(source)
    ms = median_ms(contenders, 4 * args.rounds, record)
    bandwidth, share_of_copy, rows = gb_per_s(2 * source.numel(), ms.pop("device copy")), {}, []
    moved = {name: bytes_of_batch(blocks) for name, blocks in seen.items() if name in ms}
    for name, t in ms.items():
        part = gb_per_s(moved[name], t) / bandwidth
        if name not in (PINNED, ON_CPU):
            share_of_copy[name] = part
        cells = [f"{t:.3f}", f"{t / ms.get('native', t):.2f}", f"{moved[name] / 1e6:.1f}"]
        rows.append([name, *cells, f"{100 * part:.1f} %" if name in share_of_copy else ""])
    said = f"of a device copy's {bandwidth:.0f} GB/s"
    print_table(rows, ["sampling a batch", "median ms", "time / native", "MB moved", said])
    record.keep(median_ms=ms, bytes=moved, copy_gb_per_s=bandwidth, share_of_copy=share_of_copy)
    if {"native", "torch operations"} <= ms.keys():
        ratio = ms["torch operations"] / ms["native"]
        summary = f"native {ms['native']:.3f} ms, {ratio:.2f} times as fast as torch operations, "
        summary += f"{100 * share_of_copy['native']:.0f} % of copy bandwidth"
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


# ---------------------------------------------------------------------------------------------------------------------
# training


class Plain:
    """The same step without what this project is about, in fp32.

    Sampling by torch operations, nothing prepared ahead, rows gathered into fresh tensors and copied, layers of torch
    operations.
    """

    def __init__(self, args, size, mode):
        self.args, self.store = args, opened(graph_name(args, size), args.root)
        arrays = [self.store.indptr, self.store.indices, self.store.labels, self.store.features]
        indptr, indices, self.labels, self.features = place(
            *(share(arrays) if mode == "pinned-cuda" else arrays), mode, "cuda"
        )
        self.sampler = NeighborSampler(indptr, indices, args.fanout, backend="torch", check=False)
        widths = self.store.feature_dim, args.hidden, self.store.num_classes
        self.model = SAGE(*widths, num_layers=len(args.fanout)).cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def __call__(self, epoch, steps):
        torch.set_float32_matmul_precision("highest")
        nodes = self.store.split["train"]
        order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(epoch))]
        layers.use_native(False)
        try:
            for i, seeds in enumerate(order.split(self.args.batch_size)[:steps]):
                blocks = self.sampler.sample(seeds, epoch * 1000 + i)
                x = self.features.index_select(0, blocks[0].src_nodes).cuda()
                y = self.labels.index_select(0, seeds.to(self.labels.device)).cuda()
                logits = self.forward([block.to("cuda") for block in blocks], x)
                self.optimizer.zero_grad()
                F.cross_entropy(logits, y).backward()
                self.optimizer.step()
        finally:
            layers.use_native(True)

    def forward(self, blocks, h):
        """Logits [S, C]; dropout is torch's own."""
        for layer, block in zip(self.model.layers, blocks):
            h = layer(block, h)
            h = h if block is blocks[-1] else F.dropout(F.relu(h), 0.5)
        return h


def training(args, record, size):
    """Whole epochs, of slow contenders windows of steps, of train.py and of the plain version, one after the other."""
    nodes = opened(graph_name(args, size), args.root).split["train"]
    whole, found = -(-nodes.numel() // args.batch_size), {}
    record.keep(graph=graph_name(args, size), steps_in_epoch=whole)
    for name, run in training_contenders(args, size, whole).items():
        if time.time() > record.deadline - 10:
            record.fail(f"{name}: no time left")
            continue
        with record.attempt(name):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found[name] = run() | {"peak_bytes": torch.cuda.max_memory_allocated() - before}
            record.keep(contenders=found)
            print(f"{name}: {found[name]['step_ms']:.2f} ms", flush=True)
    show_training(record, found)


def training_contenders(args, size, whole):
    """{name: function -> figures}, the most wanted first; eager and graph: --cuda-graph off and on, where the GPU can
    read the features."""
    makers = {}
    for precision in ("fp32", "bf16", "tf32"):
        for mode in GPU_MODES:
            for how, word in (("eager", "off"), ("graph", "on"))[: 1 if mode == "cpu-cuda" else 2]:
                words = flags_of(args, size, mode, precision, "--epochs", "4", "--cuda-graph", word)
                makers[f"{mode} {precision} {how}"] = functools.partial(epochs_timed, words, whole)
            if precision == "fp32":
                plain = functools.partial(Plain, args, size, mode)
                makers[f"{mode} fp32 plain"] = functools.partial(steps_timed, plain, whole)
    return makers


def epochs_timed(words, whole):
    """Figures of train.py: the median of its epochs without the first."""
    entries = epochs_of(words)[1:]
    seconds = statistics.median(entry["seconds"] for entry in entries)
    stall = statistics.median(entry.get("stall", 0) / entry["seconds"] for entry in entries)
    return figures_of(seconds, whole, whole) | {"stall_share": stall, "stages": entries[-1]}


def steps_timed(make, whole):
    """Figures of a contender, a function (epoch, steps) that takes the first steps of an epoch."""
    run, steps = make(), min(WINDOW, whole)
    run(0, min(5, whole))
    seconds = statistics.median(on_gpu(run, 1 + i, steps)[0] for i in range(3))
    if seconds / steps < SLOW:
        steps = whole
        seconds = statistics.median(on_gpu(run, 4 + i, steps)[0] for i in range(3))
    return figures_of(seconds, steps, whole)


def figures_of(seconds, steps, whole):
    """Figures from the seconds of a number of steps."""
    return {
        "step_ms": 1e3 * seconds / steps,
        "steps_timed": steps,
        "epoch_s": seconds if steps == whole else None,
    }


def show_training(record, found):
    """Print the table and keep the ratios: the plain version's time of the same mode over each contender's."""
    ratio, rows = {}, []
    for name, figures in found.items():
        plain = found.get(f"{name.split()[0]} fp32 plain")
        if plain:
            ratio[name] = plain["step_ms"] / figures["step_ms"]
        epoch, stall = figures["epoch_s"], figures.get("stall_share")
        cells = [f"{figures['step_ms']:.2f}", f"{ratio[name]:.2f}" if plain else ""]
        cells += [f"{epoch:.3f}" if epoch else "", "" if stall is None else f"{100 * stall:.0f} %"]
        rows.append([name, *cells, f"{figures['peak_bytes'] / 2**30:.2f}"])
    print_table(rows, ["training", "step ms", "plain fp32 / this", "epoch s", "stall", "peak GiB"])
    record.keep(ratio_to_plain=ratio)
    like = {n: r for n, r in ratio.items() if n.endswith(("fp32 eager", "fp32 graph"))}
    if like:
        best, fastest = max(like, key=like.get), min(found, key=lambda n: found[n]["step_ms"])
        said = f"fastest step {found[fastest]['step_ms']:.2f} ms ({fastest}); "
        record.keep(summary=f"{said}fp32 {like[best]:.2f} times as fast as plain ({best})")


# ---------------------------------------------------------------------------------------------------------------------
# transfer


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

    size = {
        "ring: copy alone": pinned.nbytes,
        "first hop in place": row * (hop.num_edges + hop.num_dst),
        "sampling in place": 32 * sum(block.num_dst + block.num_edges for block in blocks),
    }
    copy = "page-locked copy"
    runs = {copy: lambda i: device.copy_(pinned, non_blocking=True), "ring: gather and copy": fetch}
    with record.attempt("reads in place"):
        arrays = [gpu_view(a, "cuda") for a in share([store.indptr, store.indices, features])]
        *graph, table = arrays
        over_link = NeighborSampler(*graph, args.fanout, check=False)
        runs["rows in place, torch"] = lambda i: table.index_select(0, ids)
        runs["rows in place"] = lambda i: gather_rows(table, ids)
        runs["first hop in place"] = lambda i: self_and_mean(hop.indptr, hop.indices, table, own)
        runs["sampling in place"] = lambda i: over_link.sample(drawn, i)
    ms = median_ms(runs, 2 * args.rounds, record)
    if copies[1:]:
        ms["ring: copy alone"] = statistics.median(copies[1:])
    size = {name: size.get(name, pinned.nbytes) for name in ms}
    rate, part, rows = {}, {}, []
    for name, t in ms.items():
        rate[name] = gb_per_s(size[name], t)
        part[name] = rate[name] / rate[copy]
        cells = [f"{size[name] / 1e6:.1f}", f"{t:.2f}", f"{rate[name]:.1f}"]
        rows.append([name, *cells, f"{100 * part[name]:.0f} %"])
    print_table(rows, ["from host memory", "MB", "median ms", "GB/s", "of the copy's"])
    said = ", ".join(f"{name} {100 * p:.0f} %" for name, p in part.items() if name != copy)
    record.keep(bytes=size, median_ms=ms, gb_per_s=rate, share_of_link=part)
    record.keep(summary=f"of the link's speed: {said}")
