"""Side-by-side measurement: every contender on the same graph, in one process, in turn.

    python bench.py sampler                          # this sampler against DGL, pyg-lib, torch-sparse, GraphBolt
    python bench.py sampler --larger synthetic:nodes=24490290,degree=50,features=1,classes=47 --json results/sampler.json
    python bench.py step                             # one training step against DGL's, and what each trick is worth
    python bench.py features                         # the ring against a plain copy; four processes on one store
    python bench.py scaling --procs 1,2,4            # epochs of train.py with as many processes, equal total batch
    python bench.py store                            # building, training from disk, many small graphs
    python bench.py store --edges 200000000 --features-gb 32 --graphs 1000000 --json results/store.json
    python bench.py inference --rounds 3             # exact inference against DGL's layer-wise loop; --model gat and others
    python bench.py accuracy --threads 1             # ten seeds on real graphs against published figures; --dataset cora
    python bench.py picture results/*.json           # throughput against DGL, drawn from what the others wrote

Contenders that cannot be imported are left out, with the reason. GraphBolt needs the torch that DGL was built for:

    python3 -m venv graphbolt && graphbolt/bin/pip install torch==2.2.1 dgl==2.1.0 torchdata==0.7.1 "numpy<2" \\
        pandas pydantic pyyaml lmdb tqdm setuptools==69.5.1
    graphbolt/bin/python bench.py sampler

A time is the median over --rounds; within a round the contenders follow each other, so that a slow moment of the
machine meets all of them.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import allocator
import datasets
import fused
import features
import model
import sampler
import train
from disk import StoreError
from graphs import GraphDataset, block_diagonal, build_graphs
from store import GraphStore, build_store

WORKLOAD = "synthetic:nodes=2449029,degree=50,features=100,classes=47"  # the size of ogbn-products


def hardware():
    """Processor, memory, GPU and versions -> dict."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def interleave(contenders, rounds, warmup=2):
    """Run every contender once a round -> {name: [seconds]}; a contender is a function of the round's number."""
    times = {name: [] for name in contenders}
    for i in range(warmup + rounds):
        for name, run in contenders.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            getattr(run, "prepare", lambda i: None)(i)
            time.sleep(0.02)  # OpenMP threads of the one before spin for a while; they must not slow this one down
            start = time.perf_counter()
            run(i)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def print_table(rows, header):
    """Print rows of strings under a header, columns aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * w for w in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |")


def in_memory(tensor, dtype=None):
    """A copy in huge pages where the system gives them: random access then misses the TLB less, for every contender."""
    copy = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
    if sys.platform == "linux":
        first, last = -(-copy.data_ptr() // 4096) * 4096, (copy.data_ptr() + copy.numel() * copy.element_size()) // 4096 * 4096
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(last - first, 0)), 14)  # MADV_HUGEPAGE
    return copy.copy_(tensor)


def random_lines(tensor, count=1 << 20):
    """A contender that gathers `count` 64-byte lines from random places of a tensor's memory."""
    lines = tensor.view(torch.uint8)[: tensor.numel() * tensor.element_size() // 64 * 64].view(torch.int64).view(-1, 8)
    picks, out = [torch.randint(0, lines.shape[0], (count,)) for _ in range(5)], torch.empty(count, 8, dtype=torch.int64)
    return lambda i: torch.index_select(lines, 0, picks[i % 5], out=out)


# ---------------------------------------------------------------------------------------------------------------------
# sampler


def _dgl(indptr, indices, fanouts, dtype, fused):
    dgl = sampler.import_dgl()
    empty = torch.empty(0, dtype=dtype)
    graph = dgl.graph(("csc", (in_memory(indptr, dtype), in_memory(indices, dtype), empty)), num_nodes=indptr.numel() - 1)
    theirs = dgl.dataloading.NeighborSampler(fanouts[::-1], fused=fused)
    return lambda seeds, step: sum(block.num_edges() for block in theirs.sample(graph, seeds.to(dtype))[2])


def _graphbolt(indptr, indices, fanouts, seeds):
    import dgl.graphbolt as gb

    graph = gb.fused_csc_sampling_graph(indptr, indices)
    items = gb.ItemSet(torch.cat(seeds).to(indices.dtype), names="seed_nodes")
    pipe = gb.ItemSampler(items, batch_size=seeds[0].numel()).sample_neighbor(graph, fanouts[::-1])
    batches = iter(pipe)  # one pipeline over all rounds, as in its use: it is not set up for every batch
    return lambda _, step: sum(hop.sampled_csc.indices.numel() for hop in next(batches).sampled_subgraphs)


def _pyg_lib(indptr, indices, fanouts):
    import pyg_lib

    indices = in_memory(indices, torch.int64)
    return lambda seeds, step: pyg_lib.sampler.neighbor_sample(indptr, indices, seeds, fanouts, csc=True)[0].numel()


def _torch_sparse(indptr, indices, fanouts):
    import torch_sparse  # noqa: F401  registers the operator

    indices, sample = in_memory(indices, torch.int64), torch.ops.torch_sparse.neighbor_sample
    return lambda seeds, step: sample(indptr, indices, seeds, fanouts, False, True)[1].numel()


def _ours(indptr, indices, fanouts, **options):
    ours = sampler.NeighborSampler(indptr, indices, fanouts, check=False, **options)
    if options["backend"] != ours.backend:
        raise ImportError(f"backend {options['backend']} is not there")
    return lambda seeds, step: sum(block.num_edges for block in ours.sample(seeds, step))


def sampler_contenders(indptr, indices, fanouts, threads, seeds):
    """{name: function (seeds, step) -> edges}, ours first; prints why one is missing."""
    makers = {
        "native": lambda: _ours(indptr, indices, fanouts, backend="native", threads=threads),
        "native, 1 thread": lambda: _ours(indptr, indices, fanouts, backend="native", threads=1),
        "torch ops": lambda: _ours(indptr, indices, fanouts, backend="torch"),
        "DGL fused, int64": lambda: _dgl(indptr, indices, fanouts, torch.int64, True),
        "DGL unfused, int64": lambda: _dgl(indptr, indices, fanouts, torch.int64, False),
        "GraphBolt": lambda: _graphbolt(indptr, indices, fanouts, seeds),
        "pyg-lib": lambda: _pyg_lib(indptr, indices, fanouts),
        "torch-sparse": lambda: _torch_sparse(indptr, indices, fanouts),
    }
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as error:  # whatever an import of another library raises: it is left out, and named
            print(f"left out: {name} ({type(error).__name__}: {str(error).strip().splitlines()[0][:90]})")
    return made


def bench_sampler(args):
    """Time one batch of every sampler; returns the figures. Freed memory is kept for all of them, as train.py does."""
    allocator.keep_freed_memory()
    store = GraphStore.open(datasets.prepare(args.dataset, args.root))
    indptr, indices = in_memory(store.indptr), in_memory(store.indices)
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randperm(store.num_nodes, generator=generator)[: args.batch_size] for _ in range(args.rounds + 2)]
    contenders = sampler_contenders(indptr, indices, args.fanout, args.threads, seeds)
    edges = {}

    def contender(name, run):
        def one(i):
            edges.setdefault(name, []).append(run(seeds[i], i))

        return one

    times = interleave({name: contender(name, run) for name, run in contenders.items()}, args.rounds)
    ours = statistics.median(times["native"])
    figures = {}
    for name, seconds in times.items():
        median, drawn = statistics.median(seconds), statistics.mean(edges[name])
        figures[name] = {"median_ms": median * 1e3, "min_ms": min(seconds) * 1e3, "edges": drawn,
                         "edges_per_s": drawn / median, "ratio_to_native": median / ours}  # fmt: skip
    print_table(
        [[name, f"{f['median_ms']:.1f}", f"{f['min_ms']:.1f}", f"{f['edges'] / 1e3:.0f} k", f"{f['edges_per_s'] / 1e6:.1f} M",
          f"{f['ratio_to_native']:.2f}"] for name, f in figures.items()],
        ["sampler", "median ms", "min ms", "edges", "edges/s", "time / native"],
    )  # fmt: skip
    figures = {"contenders": figures}
    figures["floor"] = sampler_floor(args, indptr, indices, seeds)
    figures["two_python_threads"] = sampler_threads(args, indptr, indices, seeds)
    figures["dgl_dataloader"] = sampler_dgl_loader(args, indptr, indices, seeds)
    if args.larger:
        figures["larger"] = sampler_larger(args, indptr, indices, seeds)
    return figures


def sampler_floor(args, indptr, indices, seeds):
    """What a batch must touch, divided by the random-access bandwidth that index_select reaches on this machine.

    A batch that comes in under this floor is possible: some of the lines are in the cache, and prefetching keeps
    more misses in flight than index_select does.
    """
    ours = sampler.NeighborSampler(indptr, indices, args.fanout, check=False, threads=args.threads)
    lines = sum(block.num_dst + block.num_edges for block in ours.sample(seeds[0], 0))  # one a row of indptr, one an edge
    times = interleave({"lines": random_lines(indices), "ours": lambda i: ours.sample(seeds[i], i)}, args.rounds)
    bandwidth, took = (64 << 20) / statistics.median(times["lines"]), statistics.median(times["ours"])
    floor = 64 * lines / bandwidth
    print(f"floor: {lines:,} cache lines of 64 bytes at {bandwidth / 1e9:.1f} GB/s of random access = {floor * 1e3:.1f} ms; "
          f"native takes {took / floor:.2f} times that")  # fmt: skip
    return {"lines": lines, "random_access_bytes_per_s": bandwidth, "floor_ms": floor * 1e3, "native_over_floor": took / floor}


def sampler_threads(args, indptr, indices, seeds):
    """Batches a second from one Python thread and from two at once, each call on one thread of its own. They work for a
    tenth of a second before anyone waits for the other: what is measured is sampling, not the start and the end."""
    ours = sampler.NeighborSampler(indptr, indices, args.fanout, check=False, threads=1)

    def several(i, first, count=8):
        for step in range(i + first, i + first + count):
            ours.sample(seeds[step % len(seeds)], step)

    lines = random_lines(indices)

    def plain(i, threads):
        torch.set_num_threads(threads)
        lines(i)

    with ThreadPoolExecutor(2) as pool:
        run = {"one": lambda i: several(i, 0, 16), "two": lambda i: list(pool.map(several, [i, i], [0, 8])),
               "bare one": lambda i: plain(i, 1), "bare two": lambda i: plain(i, 2)}  # fmt: skip
        times = interleave(run, args.rounds)
    torch.set_num_threads(args.threads)
    gain, bare = (statistics.median(one / two for one, two in zip(times[f"{kind}one"], times[f"{kind}two"])) for kind in ("", "bare "))
    print(f"two Python threads, eight batches each: {gain:.2f} times the batches/s of one (bare random access gains {bare:.2f} "
          "times from a second thread)")  # fmt: skip
    return {"gain": gain, "random_access_gain": bare}


def sampler_dgl_loader(args, indptr, indices, seeds):
    """Batches a second of DGL's DataLoader with its own NeighborSampler and with ours in its place."""
    try:
        dgl = sampler.import_dgl()
    except ImportError as error:
        print(f"left out: DGL's DataLoader ({error})")
        return None
    empty, nodes = torch.empty(0, dtype=torch.int64), torch.cat(seeds)
    graph = dgl.graph(("csc", (indptr, in_memory(indices, torch.int64), empty)), num_nodes=indptr.numel() - 1)
    ours = sampler.DGLAdapter(sampler.NeighborSampler(indptr, indices, args.fanout, check=False, threads=args.threads))
    loaders = {
        name: dgl.dataloading.DataLoader(graph, nodes, theirs, batch_size=args.batch_size, num_workers=0)
        for name, theirs in (("adapter", ours), ("DGL", dgl.dataloading.NeighborSampler(args.fanout[::-1])))
    }
    times = interleave({name: lambda i, loader=loader: list(map(len, loader)) for name, loader in loaders.items()}, 5, 1)
    rate = {name: len(seeds) / statistics.median(seconds) for name, seconds in times.items()}
    gain = rate["adapter"] / rate["DGL"]
    print(f"DGL's DataLoader: {rate['DGL']:.1f} batches/s with its NeighborSampler, {rate['adapter']:.1f} with the adapter, "
          f"{gain:.2f} times")  # fmt: skip
    return {**rate, "gain": gain}


def sampler_larger(args, indptr, indices, seeds):
    """Time for a sampled edge on a larger graph over that on the graph at hand."""
    store = GraphStore.open(datasets.prepare(args.larger, args.root))
    big = sampler.NeighborSampler(in_memory(store.indptr), in_memory(store.indices), args.fanout, check=False, threads=args.threads)
    small = sampler.NeighborSampler(indptr, indices, args.fanout, check=False, threads=args.threads)
    generator = torch.Generator().manual_seed(1)
    others = [torch.randint(store.num_nodes, (args.batch_size,), generator=generator).unique() for _ in seeds]
    edges = {"small": 0, "big": 0}

    def run(name, ours, batches):
        def one(i):
            edges[name] += sum(block.num_edges for block in ours.sample(batches[i], i))

        return one

    times = interleave({"small": run("small", small, seeds), "big": run("big", big, others)}, args.rounds)
    cost = {name: statistics.median(seconds) / edges[name] for name, seconds in times.items()}
    ratio = cost["big"] / cost["small"]
    print(f"{args.larger} ({store.num_nodes / (indptr.numel() - 1):.1f} times the nodes): {ratio:.2f} times the time for an edge")
    return {"dataset": args.larger, "time_per_edge_ratio": ratio}


# ---------------------------------------------------------------------------------------------------------------------
# step


class AsItComes:
    """A contender in a process of its own, whose memory glibc manages as it does for any program."""

    def __init__(self, kind, args, **options):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=AsItComes.serve, args=(theirs, kind, args, options), daemon=True)
        self.process.start()
        theirs.close()
        if isinstance(error := self.pipe.recv(), Exception):
            raise error

    @staticmethod
    def serve(pipe, kind, args, options):
        """Make the contender; run a step for each number that comes."""
        torch.set_num_threads(args.threads)
        warnings.simplefilter("ignore")
        try:
            store, nodes = step_data(args)
            seeds, run = nodes.split(args.batch_size), kind(store, args, nodes=nodes, **options)
            pipe.send(None)
            while True:
                i = pipe.recv()
                pipe.send(run(seeds[i], i))
        except EOFError:
            pass
        except Exception as error:
            pipe.send(error)

    def __call__(self, seeds, step):
        """One step -> loss."""
        self.pipe.send(step)
        loss = self.pipe.recv()
        if isinstance(loss, Exception):
            raise loss
        return loss


class Ours:
    """A training step of this project; each trick can be left out."""

    def __init__(self, store, args, *, nodes=None, native_sampler=True, first_hop=True, native_layers=True, ring=True,
                 bf16=False, dropout=0.5):  # fmt: skip
        self.first_hop, self.native_layers, self.ring, self.bf16 = first_hop, native_layers, ring, bf16
        self.store, self.buffer = store, None
        self.sampler = sampler.NeighborSampler(store.indptr, store.indices, args.fanout, check=False, threads=args.threads,
                                               backend="native" if native_sampler else "torch")  # fmt: skip
        torch.manual_seed(0)
        self.model = model.SAGE(store.feature_dim, args.hidden, store.num_classes, num_layers=len(args.fanout), dropout=dropout)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003, fused=True)
        self.stages = dict.fromkeys(("sample + load", "forward", "backward", "optimizer"), 0.0)

    def kept(self, rows, width, dtype):
        """A kept buffer, or a fresh one without the ring."""
        if not self.ring:
            return torch.empty(rows, width, dtype=dtype)
        if self.buffer is None or self.buffer.shape[0] < rows:
            self.buffer = torch.empty(rows + rows // 8, width, dtype=dtype)
        return self.buffer[:rows]

    def load(self, seeds, step):
        """Sample and fetch -> (blocks, x, y)."""
        blocks = self.sampler.sample(seeds, step, relabel_outer=not self.first_hop)
        table, dtype = self.store.features.tensor, torch.bfloat16 if self.bf16 else torch.float32
        outer = blocks[0]
        if self.first_hop:
            x = self.kept(outer.num_dst, 2 * table.shape[1], dtype)
            model.self_and_mean(outer.indptr, outer.indices, table, outer.src_nodes, x)
        else:
            x = torch.index_select(table, 0, outer.src_nodes, out=self.kept(outer.num_src, table.shape[1], table.dtype))
        return blocks, x, self.store.labels.index_select(0, seeds)

    def __call__(self, seeds, step):
        """One step -> loss."""
        fused.use_native(self.native_layers)
        start = time.perf_counter()
        blocks, x, y = self.load(seeds, step)
        loaded = time.perf_counter()
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(self.model(blocks, x, aggregated=self.first_hop).float(), y)
        forward = time.perf_counter()
        self.optimizer.zero_grad()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        ends = (start, loaded, forward, backward, time.perf_counter())
        for name, a, b in zip(self.stages, ends, ends[1:]):
            self.stages[name] += b - a
        return loss.item()


class Dgl:
    """The same step with DGL's DataLoader and SAGEConv, as its own examples write it."""

    graph = None  # one for all contenders: it takes 2 GB

    def __init__(self, store, args, *, nodes, dropout=0.5):
        dgl = sampler.import_dgl()
        import dgl.nn

        if Dgl.graph is None:
            empty = torch.empty(0, dtype=torch.int64)
            Dgl.graph = dgl.graph(("csc", (store.indptr, store.indices.long(), empty)), num_nodes=store.num_nodes)
            Dgl.graph.ndata["feat"], Dgl.graph.ndata["label"] = store.features.tensor.clone(), store.labels.clone()
        ours = dgl.dataloading.NeighborSampler(args.fanout[::-1], prefetch_node_feats=["feat"], prefetch_labels=["label"])
        self.loader = iter(dgl.dataloading.DataLoader(Dgl.graph, nodes, ours, batch_size=args.batch_size, num_workers=0))
        widths = [store.feature_dim] + [args.hidden] * (len(args.fanout) - 1) + [store.num_classes]
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.003)
        self.dropout = torch.nn.Dropout(dropout)

    def __call__(self, seeds, step):
        """One step -> loss."""
        _, _, blocks = next(self.loader)
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(self.layers, blocks):
            h = layer(block, h)
            h = h if layer is self.layers[-1] else self.dropout(F.relu(h))
        loss = F.cross_entropy(h, blocks[-1].dstdata["label"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


TRICKS = {
    "all tricks": {},
    "without the native sampler": {"native_sampler": False},
    "without the first hop from the table": {"first_hop": False},
    "without kept buffers": {"ring": False},
    "without native layers and dropout": {"native_layers": False},
    "none of them": {"native_sampler": False, "first_hop": False, "native_layers": False, "ring": False},
}


def step_data(args):
    """The store and the seeds of all steps."""
    store = GraphStore.open(datasets.prepare(args.dataset, args.root))
    generator = torch.Generator().manual_seed(0)
    return store, torch.randperm(store.num_nodes, generator=generator)[: 2 * args.batch_size * (args.rounds + 2)]


def bench_step(args):
    """Time one training step of every contender; returns the figures.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in processes of their own.
    """
    allocator.keep_freed_memory()
    store, nodes = step_data(args)
    seeds = nodes.split(args.batch_size)
    makers = {name: functools.partial(Ours, store, args, **options) for name, options in TRICKS.items()}
    makers["without kept malloc memory"] = functools.partial(AsItComes, Ours, args)
    makers["none of them, nor kept memory"] = functools.partial(AsItComes, Ours, args, **TRICKS["none of them"])
    makers["bf16"] = functools.partial(Ours, store, args, bf16=True)
    makers["no dropout"] = functools.partial(Ours, store, args, dropout=0.0)
    makers["DGL as shipped"] = functools.partial(AsItComes, Dgl, args)
    makers["DGL, malloc kept"] = functools.partial(Dgl, store, args, nodes=nodes)
    makers["DGL as shipped, no dropout"] = functools.partial(AsItComes, Dgl, args, dropout=0.0)
    makers["DGL, malloc kept, no dropout"] = functools.partial(Dgl, store, args, nodes=nodes, dropout=0.0)
    runs = {}
    for name, make in makers.items():
        try:
            runs[name] = make()
        except ImportError as error:
            print(f"left out: {name} ({error})")

    def contender(run):
        def one(i):
            run(seeds[i], i)

        one.prepare = one  # a step that is not timed: memory and caches are then as this contender leaves them
        return one

    times = interleave({name: contender(run) for name, run in runs.items()}, args.rounds)
    median = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    ours = median["all tricks"]
    print_table([[name, f"{ms:.0f}", f"{min(times[name]) * 1e3:.0f}", f"{ms / ours:.2f}"] for name, ms in median.items()],
          ["one step", "median ms", "min ms", "time / all tricks"])  # fmt: skip
    ratios = step_ratios(median)
    stages = {name: 1e3 * s / (2 * args.rounds + 4) for name, s in runs["all tricks"].stages.items()}
    print("all tricks: " + "  ".join(f"{name} {ms:.0f} ms" for name, ms in stages.items()))
    return {"median_ms": median, "min_ms": {n: min(s) * 1e3 for n, s in times.items()}, "ratios": ratios, "stages_ms": stages,
            "losses": step_losses(store, args, seeds)}  # fmt: skip


def step_ratios(median):
    """DGL's time over ours for each pairing that compares like with like; prints and returns them."""
    pairs = {
        "fp32, dropout 0.5, DGL as shipped": ("DGL as shipped", "all tricks"),
        "fp32, dropout 0.5, DGL with malloc kept": ("DGL, malloc kept", "all tricks"),
        "fp32, no dropout, DGL as shipped": ("DGL as shipped, no dropout", "no dropout"),
        "fp32, no dropout, DGL with malloc kept": ("DGL, malloc kept, no dropout", "no dropout"),
        "bf16, dropout 0.5, DGL as shipped (fp32)": ("DGL as shipped", "bf16"),
    }
    ratios = {name: median[a] / median[b] for name, (a, b) in pairs.items() if a in median}
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} times as fast as DGL")
    return ratios


def step_losses(store, args, seeds):
    """The loss curve with all tricks and with none of them, dropout 0: the same within rounding."""
    curves = {name: [] for name in ("all tricks", "none of them")}
    for name, curve in curves.items():
        run = Ours(store, args, **TRICKS[name], dropout=0.0)
        curve += [run(batch, step) for step, batch in enumerate(seeds[:10])]
    apart = max(abs(a / b - 1) for a, b in zip(*curves.values()))
    print(f"loss over 10 steps, all tricks against none: {curves['all tricks'][0]:.6f} .. {curves['all tricks'][-1]:.6f}, "
          f"at most {apart:.1e} apart (relative)")  # fmt: skip
    return {**curves, "largest_relative_difference": apart}


# ---------------------------------------------------------------------------------------------------------------------
# features


def bench_features(args):
    """Gather rows through the ring against the bandwidth of a plain copy, in the same run; returns the figures."""
    copied = torch.empty(1 << 28, dtype=torch.uint8)
    source = torch.ones_like(copied)
    figures, rows = {}, []
    for row_bytes in (64, 400, 2048):
        num_rows, n = (1 << 30) // row_bytes, (1 << 28) // row_bytes
        table = torch.ones(num_rows, row_bytes // 4)
        labels = torch.zeros(num_rows, dtype=torch.int64)
        ring = features.FeatureRing(table, labels, slots=3, log=lambda line: None, gather=model.gather_rows)
        picks = [torch.randint(num_rows, (n,)) for _ in range(3)]
        blocks = [[sampler.Block(torch.zeros(2), ids[:1], ids)] for ids in picks]
        run = {
            "ring": lambda i: ring.fetch(i % 3, blocks[i % 3]),  # noqa: B023  run within this iteration
            "fresh tensor": lambda i: table[picks[i % 3]],  # noqa: B023
            "copy": lambda i: copied.copy_(source),
        }
        times = interleave(run, args.rounds, warmup=3)
        rate = {name: (1 << 28) / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
        share = statistics.median(copy / ring for copy, ring in zip(times["copy"], times["ring"]))  # of one round
        figures[row_bytes] = {**rate, "share_of_copy": share}
        rows.append([str(row_bytes), *(f"{rate[name]:.1f}" for name in run), f"{100 * share:.0f}%"])
    print_table(rows, ["bytes a row", "ring GB/s", "fresh tensor GB/s", "plain copy GB/s", "ring / copy"])
    return {"gb_per_s": figures, "memory": memory_of_processes(args)}


def _measured(path, reports, all_done, leave):
    """Read every feature row of a store once through a ring; report PSS and private memory in KiB when all have."""
    store = GraphStore.open(path)
    ring = features.FeatureRing(store.features.tensor, store.labels, slots=3, log=lambda line: None)
    for i, ids in enumerate(torch.arange(store.num_nodes).split(1 << 18)):
        ring.fetch(i % 3, [sampler.Block(torch.zeros(2), ids[:1], ids)])
    all_done.wait()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    reports.put((kib["Pss"], kib["Pss_Anon"]))
    leave.wait()


def memory_of_processes(args, procs=4):
    """Four processes that have read all of one store: their memory, each page counted once, over what must be there."""
    if not Path("/proc/self/smaps_rollup").exists():
        return None
    path = datasets.prepare(args.shared, args.root)
    feature_bytes = GraphStore.open(path).meta["files"]["features.npy"]["bytes"]
    context = multiprocessing.get_context("spawn")
    reports, first_done, done = context.Queue(), context.Barrier(procs), context.Event()
    processes = [context.Process(target=_measured, args=(path, reports, first_done, done)) for _ in range(procs)]
    for process in processes:
        process.start()
    sums = [sum(column) * 1024 for column in zip(*(reports.get(timeout=600) for _ in processes))]
    done.set()
    for process in processes:
        process.join()
    ratio = sums[0] / (feature_bytes + sums[1])
    print(f"{procs} processes on {feature_bytes / 1e9:.2f} GB of features: summed PSS {sums[0] / 1e9:.2f} GB, of it "
          f"{sums[1] / 1e9:.2f} GB of their own; {ratio:.2f} times features plus own")  # fmt: skip
    return {"processes": procs, "feature_bytes": feature_bytes, "pss": sums[0], "own": sums[1], "ratio": ratio}


# ---------------------------------------------------------------------------------------------------------------------
# scaling


def bench_scaling(args):
    """Epochs of train.py with 1, 2, ... processes at an equal total batch; returns the figures."""
    store = GraphStore.open(datasets.prepare(args.dataset, args.root))
    nodes = store.split["train"]
    seeds = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(0))[: args.batch_size]]
    indptr, indices = store.indptr, store.indices
    draw = sampler.NeighborSampler(indptr, indices, args.fanout, check=False)
    rows = {}  # that a step computes, over all processes: what the parts of a batch have in common is computed twice
    for procs in args.procs:
        parts = [seeds[train.ddp.Ranks(rank, procs).part(seeds.numel())] for rank in range(procs)]
        rows[procs] = sum(block.num_dst for part in parts for block in draw.sample(part, 0))
    epochs = {procs: [] for procs in args.procs}
    for _ in range(args.rounds):
        for procs in args.procs:
            epochs[procs] += epochs_of(args, procs)
    median = {procs: {name: statistics.median(e[name] for e in found) for name in found[0] if isinstance(found[0][name], (int, float))}
              for procs, found in epochs.items()}  # fmt: skip
    cells, figures = [], {}
    one = median[args.procs[0]]["seconds"]
    for procs, figure in median.items():
        seconds, times = figure["seconds"], [e["seconds"] for e in epochs[procs]]
        speedup = one / seconds
        efficiency = speedup * args.procs[0] / procs if args.gpus else speedup  # on CPU all have the same cores
        costs = {
            "rows that several processes compute": seconds * (1 - rows[args.procs[0]] / rows[procs]),
            "exchange of gradients and waiting for each other": figure.get("exchange", 0),
            "waiting for data": figure["stall"],
            "the optimizer, which every process runs": figure["optimizer"],
        }
        cells.append([f"{procs}", f"{1e3 * seconds:.0f}", f"{1e3 * min(times):.0f}", f"{speedup:.2f}", f"{100 * efficiency:.0f} %",
                      f"{1e3 * figure.get('exchange', 0):.0f}", f"{1e3 * figure['stall']:.0f}", f"{rows[procs] / rows[args.procs[0]]:.2f}",
                      max(costs, key=costs.get)])  # fmt: skip
        figures[procs] = {"n": len(times), "median_s": seconds, "min_s": min(times), "speedup": speedup, "efficiency": efficiency,
                          "rows": rows[procs], "costs_s": costs}  # fmt: skip
    header = ["processes", "epoch ms", "min ms", "speed-up", "efficiency", "exchange ms", "stall ms", "rows", "costs most"]
    print_table(cells, header)
    return {"scaling": figures}


def epochs_of(args, procs):
    """Run train.py with so many processes -> the log entries of its epochs but the first."""
    place = ["--gpus", procs] if args.gpus else ["--gpus", 0, "--procs", procs]
    with tempfile.TemporaryDirectory() as folder:
        words = ["--dataset", args.dataset, "--root", args.root, "--fanout", ",".join(map(str, args.fanout)), "--hidden", args.hidden,
                 "--batch-size", args.batch_size // procs, "--epochs", 4, "--log", f"{folder}/log", *place]  # fmt: skip
        script = Path(__file__).with_name("train.py")
        subprocess.run([sys.executable, script, *map(str, words)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [json.loads(line) for line in open(f"{folder}/log")][1:4]


# ---------------------------------------------------------------------------------------------------------------------
# store


class Watch:
    """What a process takes while the body runs: .seconds, .peak and .grown bytes of anonymous memory, .mapped bytes of
    files, .faults that waited for the disk."""

    def __enter__(self):
        self.before, self.peak, self.done = self._memory(), 0, threading.Event()
        self.faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        self.start = time.perf_counter()
        return self

    def __exit__(self, *exc):
        self.seconds = time.perf_counter() - self.start
        self.done.set()
        self.thread.join()
        self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - self.faults_before
        after = self._memory()
        self.grown, self.mapped = after["RssAnon"] - self.before["RssAnon"], after["RssFile"]

    def _sample(self):
        while not self.done.wait(0.02):
            self.peak = max(self.peak, self._memory()["RssAnon"])

    @staticmethod
    def _memory():
        lines = Path("/proc/self/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}


def _in_process(function, *args):
    """Run function(*args) in a process of its own, so that its memory is its own -> what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def _forget(path):
    """Have the kernel drop a store's pages from memory, so that it is read from the disk."""
    for file in Path(path).iterdir():
        with open(file, "rb") as data:
            os.fsync(data.fileno())
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _build_edges(folder, num_edges):
    """Build a store of random edges, with the reverse of each -> figures."""
    num_nodes, random = max(2, num_edges // 25), np.random.default_rng(0)
    edges = np.memmap(folder / "edges", np.int32, "w+", shape=(2, num_edges))
    for a in range(0, num_edges, 1 << 22):
        b = min(a + (1 << 22), num_edges)
        edges[:, a:b] = random.integers(0, num_nodes, (2, b - a), np.int32)
    edges.flush()
    edges = np.memmap(folder / "edges", np.int32, "r", shape=(2, num_edges))
    rest = {"features": np.zeros((num_nodes, 1), np.float32), "labels": np.zeros(num_nodes, np.int64), "split": {"train": [0]}}
    with Watch() as watch:
        build_store(folder / "built", edge_index=edges, symmetrize=True, **rest)
    stored = GraphStore.open(folder / "built").num_edges
    return {"input_edges": num_edges, "stored_edges": stored, "seconds": watch.seconds,
            "input_edges_per_s": num_edges / watch.seconds, "peak_anonymous": watch.peak}  # fmt: skip


def _train_from_disk(path, args, cache):
    """Train `--batches` batches with the features where they are on disk -> figures."""
    torch.set_num_threads(args.threads)
    store = GraphStore.open(path)
    table = getattr(store.features, "tensor", store.features)
    if cache:
        visits = features.expected_visits(store.indptr, store.indices, store.split["train"], args.fanout, args.batch_size)
        table = features.CachedFeatures(store.features, visits, cache)
    allocator.keep_freed_memory()
    ours = sampler.NeighborSampler(store.indptr, store.indices, args.fanout, check=False, threads=args.threads)
    ring = features.FeatureRing(table, store.labels, slots=3, log=lambda line: None, aggregate=model.self_and_mean)
    torch.manual_seed(0)
    net = model.SAGE(store.feature_dim, args.hidden, store.num_classes, num_layers=len(args.fanout))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003, fused=True)
    nodes = store.split["train"][torch.randperm(len(store.split["train"]))]
    batches = [(i, nodes[torch.arange(i * args.batch_size, (i + 1) * args.batch_size) % len(nodes)].unique())
               for i in range(args.batches)]  # fmt: skip
    _forget(path)

    def load(item, slot):
        return ring.fetch(slot, ours.sample(item[1], item[0], relabel_outer=not ring.first_hop))

    with Watch() as watch:
        for batch in features.prefetch(load, batches, depth=2):
            loss = F.cross_entropy(net(batch.blocks, batch.x, aggregated=ring.first_hop), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"batches_per_s": args.batches / watch.seconds, "peak_anonymous": watch.peak, "mapped": watch.mapped,
            "major_faults": watch.faults, "loss": loss.item(), "cache_hit_rate": getattr(table, "hit_rate", None)}  # fmt: skip


def _write_graphs(path, count):
    """Write random graphs of about 30 nodes in batches of 4,096 -> figures; making them is not timed."""
    random, making = np.random.default_rng(0), 0.0

    def batches():
        nonlocal making
        for first in range(0, count, 4096):
            start = time.perf_counter()
            nodes = random.integers(20, 41, min(4096, count - first))
            ends = random.integers(0, np.repeat(nodes, 2 * nodes), (2, 2 * nodes.sum()))
            x, e = random.integers(0, 100, (nodes.sum(), 9), np.uint8), random.integers(0, 5, (2 * nodes.sum(), 3), np.uint8)
            batch = block_diagonal(nodes, 2 * nodes, ends, x, e, random.random((len(nodes), 1), np.float32))
            making += time.perf_counter() - start
            yield batch

    with Watch() as watch:
        build_graphs(path, batches())
    return {"graphs": count, "graphs_per_s": count / (watch.seconds - making), "peak_anonymous": watch.peak, "grown": watch.grown}


def _read_graphs(path, batch_size=256):
    """Read every graph once, in random order -> figures."""
    graphs = GraphDataset.open(path)
    order = torch.randperm(len(graphs)).split(batch_size)
    for ids in order[:8]:
        graphs.batch(ids)
    with Watch() as watch:
        for ids in order:
            graphs.batch(ids)
    return {"graphs_per_s": len(graphs) / watch.seconds, "peak_anonymous": watch.peak, "grown": watch.grown, "mapped": watch.mapped}


def bench_store(args):
    """Build, train from disk, and many small graphs; each in a process of its own; returns the figures."""
    gb = lambda size: f"{size / 1e9:.2f} GB"  # noqa: E731
    Path(args.root).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.root, prefix="bench-store-") as folder:
        folder = Path(folder)
        built = _in_process(_build_edges, folder, args.edges)
        print(f"build: {built['input_edges']:,} edges -> {built['stored_edges']:,} in {built['seconds']:.1f} s, "
              f"{built['input_edges_per_s'] / 1e6:.1f} M input edges/s, at most {gb(built['peak_anonymous'])} anonymous memory")  # fmt: skip
        shutil.rmtree(folder / "built")
        (folder / "edges").unlink()

        size = int(args.features_gb * 1e9)
        dataset = f"synthetic:nodes={max(1000, size // 1024)},degree=8,features=256,classes=47"
        cache = int(args.cache_gb * 1e9)
        trained, sizes = {}, {}
        for backend, ways in (("mmap", {"mmap": 0, "mmap, RAM cache": cache}), ("lmdb", {"LMDB": 0})):
            path = datasets.prepare(dataset, folder, backend=backend)  # one at a time: disks end
            sizes[backend] = sum(file.stat().st_size for file in path.iterdir())
            for name, budget in ways.items():
                trained[name] = _in_process(_train_from_disk, path, args, budget)
            shutil.rmtree(path)
        print_table(
            [[name, f"{f['batches_per_s']:.2f}", gb(f["peak_anonymous"]), gb(f["mapped"]), f"{f['major_faults']:,}"]
             for name, f in trained.items()],
            [f"{args.features_gb:g} GB of features", "batches/s", "anonymous", "mapped", "major page faults"],
        )  # fmt: skip

        graphs = {"write": _in_process(_write_graphs, folder / "many", args.graphs)}
        graphs["read"] = _in_process(_read_graphs, folder / "many")
        for name, f in graphs.items():
            print(f"graphs: {name} {f['graphs_per_s']:,.0f}/s of {args.graphs:,}, anonymous memory at most "
                  f"{gb(f['peak_anonymous'])}, {f['grown'] / 1e6:+.0f} MB from first to last")  # fmt: skip
    return {"build": built, "training": trained, "store_bytes": sizes, "cache_bytes": cache, "graphs": graphs}


# ---------------------------------------------------------------------------------------------------------------------
# inference


def dgl_twin(layer):
    """DGL's layer of the same name, with the weights of ours."""
    sampler.import_dgl()
    import dgl.nn

    if isinstance(layer, model.GINConv):
        mlp = torch.nn.Sequential(*(type(m)(*m.weight.shape[::-1]) if hasattr(m, "weight") else m for m in layer.mlp))
        mlp.load_state_dict(layer.mlp.state_dict())
        return dgl.nn.GINConv(mlp, "sum", layer.eps.item(), learn_eps=True)
    if isinstance(layer, model.GCNConv):
        twin = dgl.nn.GraphConv(layer.linear.in_features, layer.out_dim, norm="both")
        twin.weight.data, twin.bias.data = layer.linear.weight.data.t().clone(), layer.bias.data.clone()
        return twin
    if isinstance(layer, model.GATv2Conv):
        twin = dgl.nn.GATv2Conv(layer.src_linear.in_features, layer.attn.shape[1], layer.heads)
        twin.attn.data, names = layer.attn.data[None].clone(), {"fc_src": "src_linear", "fc_dst": "dst_linear"}
    else:
        kind = "pool" if isinstance(layer, model.SAGEPoolConv) else "mean"
        twin = dgl.nn.SAGEConv(layer.self_linear.in_features, layer.out_dim, kind)
        names = {"fc_self": "self_linear", "fc_neigh": "neigh_linear", "fc_pool": "pool_linear"}
    for theirs, ours in names.items():
        if hasattr(layer, ours):
            getattr(twin, theirs).load_state_dict(getattr(layer, ours).state_dict())
    return twin


def dgl_inference(graph, x, layers, widths, batch_size):
    """Layer-wise inference as DGL's own example (node_classification.py) writes it -> logits [V, C]."""
    dgl = sampler.import_dgl()
    everyone = torch.arange(graph.num_nodes())
    for layer, width in zip(layers, widths):
        full = dgl.dataloading.MultiLayerFullNeighborSampler(1)
        loader = dgl.dataloading.DataLoader(graph, everyone, full, batch_size=batch_size, num_workers=0)
        y = torch.empty(graph.num_nodes(), width)
        for sources, targets, blocks in loader:
            h = layer(blocks[0], x[sources])
            if h.dim() == 3:  # heads: side by side, averaged in the last layer
                h = h.mean(1) if layer is layers[-1] else h.flatten(1)
            y[targets[0] : targets[-1] + 1] = h if layer is layers[-1] else F.relu(h)
        x = y
    return x


def bench_inference(args):
    """Time exact inference on every node with the same weights; returns the figures and how far the logits are apart.

    GCN is timed in ours alone: DGL's loop divides by the out-degrees of a chunk's block and is not exact there.
    """
    allocator.keep_freed_memory()
    store = GraphStore.open(datasets.prepare(args.dataset, args.root))
    x, depth = in_memory(store.features.tensor), len(args.fanout)
    torch.manual_seed(0)
    net = model.GNN(x.shape[1], args.hidden, store.num_classes, conv=args.model, num_layers=depth, heads=4).eval()
    indptr, indices, logits = in_memory(store.indptr), in_memory(store.indices), {}
    contenders = {"ours": lambda: model.inference(net, indptr, indices, x),
                  "ours, tables in files": lambda: model.inference(net, indptr, indices, x, memory=0)}  # fmt: skip
    try:
        dgl = sampler.import_dgl()
        layers = [dgl_twin(layer) for layer in net.layers]
        looped = model.with_self_loops(indptr, indices) if args.model == "gat" else (indptr, indices.long())
        graph = dgl.graph(("csc", (*looped, torch.empty(0, dtype=torch.int64))), num_nodes=store.num_nodes)
        for batch in (4096, 65536) if args.model != "gcn" else ():
            loop = functools.partial(dgl_inference, graph, x, layers, [layer.out_dim for layer in net.layers], batch)
            contenders[f"DGL, {batch} nodes at a time"] = loop
    except ImportError as error:
        print(f"left out: DGL ({error})")

    def contender(name):
        def one(i):
            with torch.no_grad():
                logits[name] = contenders[name]()

        return one

    times = interleave({name: contender(name) for name in contenders}, args.rounds, warmup=1)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    apart = {name: (out - logits["ours"]).abs().max().item() for name, out in logits.items()}
    print_table([[name, f"{s:.2f}", f"{min(times[name]):.2f}", f"{s / median['ours']:.2f}", f"{apart[name]:.1e}"]
                 for name, s in median.items()], ["inference", "median s", "min s", "time / ours", "logits apart"])  # fmt: skip
    return {"median_s": median, "min_s": {name: min(s) for name, s in times.items()}, "logits_apart": apart}


# ---------------------------------------------------------------------------------------------------------------------
# accuracy

WORDS = [  # settings to choose from: (words of a bag of words, flags); row_normalize=0 leaves them 0 and 1
    (words, f"--lr {lr} --weight-decay {decay} --dropout {p} --input-dropout {p}")
    for words in ("", ":row_normalize=0") for lr, decay in ((0.01, 5e-4), (0.03, 1e-4)) for p in (0.5, 0.7)
]  # fmt: skip
REAL = {  # data set: (flags of every run, those of full batches where they fit, those of sampled ones, settings)
    "cora": ("--hidden 64 --epochs 200 --early-stop 50", "--fanout -1,-1 --batch-size 140", "--fanout 10,10 --batch-size 64", WORDS),
    "citeseer": ("--hidden 64 --epochs 200 --early-stop 50", "--fanout -1,-1 --batch-size 120", "--fanout 10,10 --batch-size 64", WORDS),
    "amazon_computers": ("--hidden 64 --epochs 300 --early-stop 50", "--fanout -1,-1 --batch-size 200",
                         "--fanout 10,10 --batch-size 200", WORDS),
    "coauthor_cs": ("--hidden 64 --epochs 40 --early-stop 10", "--fanout -1,-1 --batch-size 100",
                    "--fanout 10,10 --batch-size 100", WORDS),
    "ogbn_arxiv_nofeat": ("--hidden 128 --norm layer --lr-schedule cosine --epochs 15", None, "--fanout 10,10,10 --batch-size 1024",
                          [("", "--lr 0.01 --dropout 0.3"), ("", "--lr 0.005 --dropout 0.5")]),
}  # fmt: skip
FOR_MODEL = {"gat": "--heads 8", "gin": "--norm layer"}
TRIAL_SEED, TRIAL_RUNS = 100, 2  # seeds, and so splits, that no row of the table uses
PUBLISHED = {  # test accuracy and its standard deviation where one is published, in percent; ../shared/data/README.md
    ("cora", "gcn"): (81.5, None), ("cora", "gat"): (83.0, None), ("citeseer", "gcn"): (70.3, None),
    ("amazon_computers", "gcn"): (82.6, 2.4), ("amazon_computers", "sage"): (82.4, 1.8),
    ("coauthor_cs", "gcn"): (91.1, 0.5), ("coauthor_cs", "sage"): (91.3, 2.8),
}  # fmt: skip


def bench_accuracy(args):
    """Train through train.py with seeds 0 .. --runs - 1: every model on all neighbours, two of them sampled, and an MLP.

    The settings of a model on a data set are those of REAL with the highest validation accuracy over seeds of their
    own, on all neighbours where that is run. On the three small data sets all neighbours means full batches: every
    training node in one step. The MLP is GraphSAGE on the graph without edges. Amazon Computers is its largest connected
    component, as in the paper that published the figures (arXiv 1811.05868). --json FILE is written after each row, and
    keeps the rows that it had.
    """
    names = [args.dataset] if args.dataset in REAL else [n for n in REAL if Path(args.data, f"{n}.npz").is_file()]
    figures = json.loads(Path(args.json).read_text())["accuracy"] if args.json and Path(args.json).exists() else {}
    rows = []
    for name in names:
        flags, full, sampled, settings = REAL[name]
        for conv in ["mlp", *model.CONVS]:
            if args.models and conv not in args.models.split(","):
                continue
            common = f"--model {conv.replace('mlp', 'sage')} {flags} {FOR_MODEL.get(conv, '')}"
            graph = functools.partial(accuracy_of, args, name, edges=conv != "mlp")
            ways = {"no edges" if conv == "mlp" else "all neighbours" if full else "sampled": full or sampled}
            if full and conv in ("sage", "gcn"):
                ways["sampled"] = sampled
            first = f"{common} {full or sampled}"
            trials = {tried: graph(first, *tried, TRIAL_SEED, TRIAL_RUNS)["valid"] for tried in settings}
            best = max(trials, key=trials.get)
            for how, batches in ways.items():
                figure = graph(f"{common} {batches}", *best, 0, args.runs)
                published, spread = PUBLISHED.get((name, conv), (None, None))
                figure |= {"trials": {" ".join(tried).strip(): valid for tried, valid in trials.items()},
                           "published": published, "published_std": spread}  # fmt: skip
                figures[f"{name}, {conv}, {how}"] = figure
                keep_figures(args, {"accuracy": figures})
                rows.append([name, conv, how, f"{figure['test']:.2f} +- {figure['std']:.2f}",
                             f"{published or '-'}{f' +- {spread}' if spread else ''}", f"{figure['seconds']:.0f}"])  # fmt: skip
                print("  ".join(rows[-1]), flush=True)
        if name == "ogbn_arxiv_nofeat" and "labels" in (args.models or "labels").split(","):
            figures[f"{name}, label propagation"] = figure = label_propagation(args, Path(args.data, f"{name}.npz"))
            keep_figures(args, {"accuracy": figures})
            rows.append([name, "label propagation", "-", f"{figure['test']:.2f} +- {figure['std']:.2f}", "68.3 (all labels)", "-"])
            print("  ".join(rows[-1]), flush=True)
    print_table(rows, ["data set", "model", "training", f"test %, n = {args.runs}", "published", "seconds"])
    return {"accuracy": figures}


def label_propagation(args, file, alphas=(0.5, 0.6, 0.7, 0.8, 0.9), rounds=50):
    """What the labels that the models see as features give without a model (as in Correct and Smooth, arXiv 2010.13993):
    y <- alpha D^-1/2 A D^-1/2 y + (1 - alpha) y_0, clamped to 0 .. 1; alpha by validation accuracy."""
    tests = []
    for seed in range(args.runs):
        with tempfile.TemporaryDirectory() as scratch:
            graph = GraphStore.open(datasets.prepare(file, scratch, seed=seed, progress=False))
            labels, known = graph.labels.clone(), graph.features.gather(torch.arange(graph.num_nodes))
            matrix = torch.sparse_csr_tensor(graph.indptr, graph.indices.long(), torch.ones(graph.num_edges), (len(labels),) * 2)
            scale, accuracy = graph.indptr.diff().clamp(min=1).rsqrt().unsqueeze(1), {}
            for alpha in alphas:
                y = known
                for _ in range(rounds):
                    y = (alpha * scale * (matrix @ (scale * y)) + (1 - alpha) * known).clamp_(0, 1)
                right = y.argmax(1) == labels
                accuracy[alpha] = [right[graph.split[name]].double().mean().item() for name in ("valid", "test")]
            tests.append(100 * max(accuracy.values(), key=lambda pair: pair[0])[1])  # that of the best validation accuracy
    return {"test": statistics.mean(tests), "std": statistics.stdev(tests), "n": args.runs}


def accuracy_of(args, name, flags, words, settings, seed, runs, *, edges):
    """Run train.py in this process -> accuracies in percent: mean, standard deviation, seconds of all runs."""
    with tempfile.TemporaryDirectory() as scratch:
        data, log = Path(scratch, f"{name}.npz"), Path(scratch, "log")
        write_graph(Path(args.data, f"{name}.npz"), data, component=name == "amazon_computers", edges=edges)
        said = f"{flags} {settings} --seed {seed} --runs {runs}".split()
        start, where = time.perf_counter(), ["--dataset", f"{data}{words}", "--root", scratch, "--log", str(log)]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                train.main([*where, *said])
            except SystemExit as stop:
                if stop.code:
                    raise StoreError(f"train.py {' '.join(said)} ended with code {stop.code}") from None
        last = json.loads(log.read_text().splitlines()[-1])
    return {"flags": " ".join(["--dataset", f"{name}.npz{words}", *said]), "n": runs, "test": 100 * last["mean"]["test"],
            "std": 100 * last["std"]["test"], "valid": 100 * last["mean"]["valid"],
            "seconds": time.perf_counter() - start}  # fmt: skip


def write_graph(source, target, *, component, edges):
    """Copy an .npz graph, cut down to its largest connected component or without its edges."""
    with np.load(source, allow_pickle=False) as file:
        data = dict(file)
    if component:
        src, dst = data["edge_index"]
        label = np.arange(len(data["labels"]))
        while (label[src] != label[dst]).any():  # every node takes the smallest number around it
            np.minimum.at(label, dst, label[src])
            np.minimum.at(label, src, label[dst])
            label = label[label]
        keep = label == np.bincount(label).argmax()
        lengths = np.diff(data["feat_indptr"])
        data["edge_index"] = (np.cumsum(keep) - 1)[data["edge_index"][:, keep[src]]]
        data["feat_indices"] = data["feat_indices"][np.repeat(keep, lengths)]
        data["feat_indptr"] = np.concatenate([[0], np.cumsum(lengths[keep])])
        data["feat_shape"], data["labels"] = np.array([keep.sum(), data["feat_shape"][1]]), data["labels"][keep]
    if not edges:
        data["edge_index"] = data["edge_index"][:, :0]
    np.savez(target, **data)


# ---------------------------------------------------------------------------------------------------------------------
# picture


def bench_picture(args):
    """Draw times against DGL from result files -> results/throughput.png, or --png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {}
    for file in args.files or sorted(str(path) for path in Path("results").glob("*.json")):
        content = json.loads(Path(file).read_text())
        found.setdefault(content["arguments"]["what"], content)  # of two the first
    labels = {"native": "ringblock", "torch ops": "ringblock, torch ops", "all tricks": "ringblock, fp32",
              "bf16": "ringblock, bf16", "ours": "ringblock", "ours, tables in files": "ringblock, tables in files"}  # fmt: skip
    draws = {  # section: (title, milliseconds of each contender, those that are drawn)
        "sampler": ("sampling a batch", lambda f: {name: c["median_ms"] for name, c in f["contenders"].items()},
                    ["native", "torch ops", "DGL fused, int64", "DGL unfused, int64", "GraphBolt"]),
        "step": ("a training step, dropout 0.5", lambda f: f["median_ms"],
                 ["bf16", "all tricks", "DGL, malloc kept", "DGL as shipped"]),
        "inference": ("exact inference, all nodes", lambda f: {name: 1e3 * s for name, s in f["median_s"].items()},
                      ["ours", "ours, tables in files", "DGL, 65536 nodes at a time", "DGL, 4096 nodes at a time"]),
    }  # fmt: skip
    charts = []
    for section, (title, read, names) in draws.items():
        if section in found:
            times = read(found[section])
            charts.append((title, {labels.get(name, name): times[name] for name in names if name in times}))
    if not charts:
        raise StoreError(f"nothing to draw in {args.files}: give what bench.py sampler, step or inference --json wrote")
    figure, axes = pyplot.subplots(1, len(charts), figsize=(4.2 * len(charts), 2.4), layout="constrained", squeeze=False)
    for axis, (title, times) in zip(axes[0], charts):
        colors = ["C0" if name.startswith("ringblock") else "C7" for name in times]
        bars = axis.barh(list(times), [1e3 / ms for ms in times.values()], color=colors)
        axis.bar_label(bars, [f" {ms:.0f} ms" if ms < 1e4 else f" {ms / 1e3:.0f} s" for ms in times.values()], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.tick_params(labelsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("times a second (longer is faster)", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.png, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {args.png}")
    return {}


def keep_figures(args, figures):
    """Write the figures to --json, with the machine and the arguments."""
    if args.json:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps({"machine": hardware(), "arguments": vars(args), **figures}, indent=1) + "\n")


def main(argv=None):
    """Run the command line -> exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    runs = {"sampler": bench_sampler, "step": bench_step, "features": bench_features, "scaling": bench_scaling,
            "store": bench_store, "inference": bench_inference, "accuracy": bench_accuracy, "picture": bench_picture}  # fmt: skip
    parser.add_argument("what", choices=list(runs))
    parser.add_argument("files", nargs="*", help="picture: what the others wrote with --json (default: results/*.json)")
    parser.add_argument("--dataset", help=f"default: {WORKLOAD}, for scaling: synthetic, for accuracy: all")
    parser.add_argument("--root", default="data", help="folder for built stores")
    parser.add_argument("--fanout", default="15,10,5", type=lambda text: [int(k) for k in text.split(",")])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2, help="threads of every contender")
    parser.add_argument("--shared", default="synthetic:nodes=2500000,degree=1,features=400", metavar="DATASET",
                        help="features: the store that four processes share, 4 GB")  # fmt: skip
    parser.add_argument("--procs", default="1,2", type=lambda text: [int(k) for k in text.split(",")],
                        help="scaling: numbers of processes; --batch-size is the total batch then")  # fmt: skip
    parser.add_argument("--gpus", action="store_true", help="scaling: a GPU for each process")
    parser.add_argument("--edges", type=int, default=10_000_000, help="store: edges to build from, their reverses are added")
    parser.add_argument("--features-gb", type=float, default=0.5, help="store: size of the feature table to train from")
    parser.add_argument("--cache-gb", type=float, default=0.1, help="store: size of the cache before it")
    parser.add_argument("--batches", type=int, default=10, help="store: batches of the training run")
    parser.add_argument("--graphs", type=int, default=50_000, help="store: number of small graphs")
    parser.add_argument("--rounds", type=int, help="default: 20, for scaling 5 runs of 4 epochs")
    parser.add_argument("--model", default="sage", choices=list(model.CONVS), help="inference: the model")
    parser.add_argument("--data", default="../shared/data", metavar="DIR", help="accuracy: folder of the real graphs; --dataset "
                        "names one of them, else it is all")  # fmt: skip
    parser.add_argument("--models", metavar="A,B", help="accuracy: only these, of mlp,sage,sage-pool,gcn,gat,gin,labels")
    parser.add_argument("--runs", type=int, default=10, help="accuracy: seeds, at least 2")
    parser.add_argument("--png", default="results/throughput.png", metavar="FILE", help="picture: where it goes")
    parser.add_argument("--larger", metavar="DATASET", help="also compare the cost of an edge on a larger graph")
    parser.add_argument("--json", metavar="FILE", help="write the figures here as well")
    args = parser.parse_args(argv)
    if args.files and args.what != "picture":
        parser.error(f"{args.files[0]}: files are for picture, not for {args.what}")
    if args.runs < 2:
        parser.error(f"--runs {args.runs}: a standard deviation needs 2 or more")
    if unknown := set((args.models or "mlp").split(",")) - {"mlp", "labels", *model.CONVS}:
        parser.error(f"--models {','.join(sorted(unknown))}: choose from mlp,{','.join(model.CONVS)},labels")
    args.dataset = args.dataset or ("synthetic" if args.what == "scaling" else WORKLOAD)
    args.rounds = args.rounds or (5 if args.what == "scaling" else 20)
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # as train.py sets them
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
    print("  ".join(f"{name} {value}" for name, value in hardware().items()))
    if args.what in ("sampler", "step", "features", "inference"):
        print(f"{args.dataset}  batch {args.batch_size}  fanout {args.fanout}  {args.threads} threads  n = {args.rounds}")
    try:
        figures = runs[args.what](args)
    except StoreError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    keep_figures(args, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
