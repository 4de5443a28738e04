"""python -m bench sampler: one batch of this sampler beside one of DGL's and GraphBolt's.

A contender is a function of the number of a batch: it samples the batch and returns how many edges it drew, and how
many source nodes its outermost hop has.
"""

import functools
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.tools import (
    dgl_graph,
    in_memory,
    interleave,
    made,
    medians,
    opened,
    print_table,
    print_times,
)
from run.allocator import keep_freed_memory
from sampler import DGLAdapter, NeighborSampler, import_dgl

LABOR = {"method": "labor"}
LABORS = {  # ways to draw: options of a NeighborSampler; train.py has flags of the same names
    "uniform": {},
    "LABOR": LABOR,
    "LABOR, layer": {**LABOR, "layer_dependency": True},
    "LABOR, batch 4": {**LABOR, "batch_dependency": 4},
    "LABOR, layer, batch 4": {**LABOR, "layer_dependency": True, "batch_dependency": 4},
}


def ours(draw, seeds, **options):
    """A NeighborSampler of this project; options: those of `sample`, a list with one for each batch."""

    def sample(i):
        blocks = draw.sample(seeds[i], i, **{name: values[i] for name, values in options.items()})
        return sum(block.num_edges for block in blocks), blocks[0].num_src

    return sample


def restricted(draw, graph, seeds):
    """Contenders that draw from less than the graph: without the edges that a batch of links excludes (two for each
    seed), and by time. The times of an edge list are even over 0 .. 2^20; all seeds have the last one, or each its
    own. Seeds with times of their own have few sources in common: beside them, a plain batch with as many sources."""
    indptr, indices = graph
    degree, random = indptr.diff(), torch.Generator().manual_seed(2)
    rank = torch.arange(indices.numel()).sub_(indptr[:-1].repeat_interleave(degree))
    when = rank.mul_(1 << 20).div_(degree.repeat_interleave(degree), rounding_mode="floor")
    when = in_memory(when)
    timed, latest, plain = draw(edge_times=when), draw(edge_times=when, method="latest"), draw()
    end = [torch.full_like(nodes, 1 << 20) for nodes in seeds]
    own = [torch.randint(1 << 19, 1 << 20, nodes.shape, generator=random) for nodes in seeds]
    ends = [torch.cat([indptr[nodes], indptr[nodes + 1] - 1]) for nodes in seeds]
    own_times = ours(timed, seeds, times=own)
    return {
        "native, edges excluded": ours(
            plain, seeds, exclude=[e.clamp(0, indices.numel() - 1) for e in ends]
        ),
        "native, one time": ours(timed, seeds, times=end),
        "native, own times": own_times,
        "native, as many sources": ours(plain, with_sources(plain, own_times(0)[1], seeds)),
        "native, latest": ours(latest, seeds, times=own),
    }


def with_sources(draw, wanted, seeds):
    """As many batches as in `seeds`, of more or fewer seeds: so many that a batch has about `wanted` sources."""
    random, size = torch.Generator().manual_seed(4), seeds[0].numel()
    batch = lambda: torch.randperm(draw.num_nodes, generator=random)[:size]  # noqa: E731
    for _ in range(6):
        size = round(size * wanted / draw.sample(batch(), 0)[0].num_src)
    return [batch() for _ in seeds]


def dgl(indptr, indices, fanouts, seeds, fused):
    """DGL's NeighborSampler, called directly."""
    graph = dgl_graph(in_memory(indptr), in_memory(indices, torch.int64))
    theirs = import_dgl().dataloading.NeighborSampler(fanouts[::-1], fused=fused)

    def sample(i):
        sources, _, blocks = theirs.sample(graph, seeds[i])
        return sum(block.num_edges() for block in blocks), sources.numel()

    return sample


def graphbolt(indptr, indices, fanouts, seeds):
    """GraphBolt's pipeline, one for all rounds, as in training: it is not set up again for every batch."""
    import dgl.graphbolt as gb

    graph = gb.fused_csc_sampling_graph(indptr, indices)
    items = gb.ItemSet(torch.cat(seeds).to(indices.dtype), names="seed_nodes")
    items = gb.ItemSampler(items, batch_size=seeds[0].numel())
    batches = iter(items.sample_neighbor(graph, fanouts[::-1]))

    def sample(i):
        batch = next(batches)
        edges = sum(hop.sampled_csc.indices.numel() for hop in batch.sampled_subgraphs)
        return edges, batch.input_nodes.numel()

    return sample


def bench_sampler(args):
    """Time one batch of every sampler; returns the figures. Freed memory is kept for all of them, as train.py does."""
    keep_freed_memory()
    store, random = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    batches = range(args.rounds + 2)
    seeds = [torch.randperm(store.num_nodes, generator=random)[: args.batch_size] for _ in batches]
    graph = in_memory(store.indptr), in_memory(store.indices)
    draw = functools.partial(NeighborSampler, *graph, args.fanout, check=False)
    native = draw(threads=args.threads, backend="native")
    if native.backend != "native":
        raise ImportError(
            "the native sampler, to which the others are compared, needs a C compiler (cc)"
        )
    task = *graph, args.fanout, seeds
    one, threaded = draw(threads=1), functools.partial(draw, threads=args.threads)
    contenders = {"native": ours(native, seeds), "native, 1 thread": ours(one, seeds)}
    contenders |= {
        "torch ops": ours(draw(backend="torch"), seeds),
        **restricted(threaded, graph, seeds),
    }
    contenders |= made(
        {
            "DGL fused, int64": lambda: dgl(*task, fused=True),
            "DGL unfused, int64": lambda: dgl(*task, fused=False),
            "GraphBolt": lambda: graphbolt(*task),
        }
    )
    figures = {"contenders": time_samplers(args, contenders)}
    figures["rows"] = rows(threaded, store, args.batch_size)
    figures["floor"] = floor(args, native, seeds)
    figures["two_python_threads"] = python_threads(args, one, seeds)
    with_dgl = "DGL fused, int64" in contenders
    figures["dgl_dataloader"] = dgl_loader(args, native, seeds) if with_dgl else None
    return figures | ({"larger": larger(args, native, seeds)} if args.larger else {})


def time_samplers(args, contenders):
    """The table of all contenders -> {name: figures}."""
    drawn = {name: [] for name in contenders}
    times = interleave(contenders, args.rounds, note=lambda name, found: drawn[name].append(found))
    seconds, mean = medians(times), statistics.mean
    edges = {name: mean(pair[0] for pair in pairs) for name, pairs in drawn.items()}
    sources = {name: mean(pair[1] for pair in pairs) for name, pairs in drawn.items()}
    columns = {
        "edges": {name: f"{count / 1e3:.0f} k" for name, count in edges.items()},
        "sources": {name: f"{count / 1e3:.0f} k" for name, count in sources.items()},
        "edges/s": {name: f"{edges[name] / s / 1e6:.1f} M" for name, s in seconds.items()},
        "ns/source": {name: f"{1e9 * s / sources[name]:.1f}" for name, s in seconds.items()},
    }
    median, least = print_times("sampler", times, "ms", 1, **columns)
    return {
        name: {
            "median_ms": ms,
            "min_ms": least[name],
            "edges": edges[name],
            "sources": sources[name],
            "edges_per_s": edges[name] / seconds[name],
            "ratio_to_native": ms / median["native"],
        }
        for name, ms in median.items()
    }


def rows(draw, store, batch_size, batches=17):
    """Input rows of a batch of training nodes by way of drawing, and how many of them the batch before did not have."""
    nodes, figures, table = store.split["train"], {}, []
    order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(3))]
    row = store.feature_dim * store.features.dtype.itemsize
    for name, options in LABORS.items():
        sampler, seen = draw(**options), torch.zeros(store.num_nodes, dtype=torch.bool)
        needed, others = [], []
        for step, seeds in enumerate(order.split(batch_size)[:batches]):
            src = sampler.sample(seeds, step)[0].src_nodes.long()
            needed.append(src.numel())
            others.append(src.numel() - int(seen[src].sum()))
            seen.zero_()[src] = True
        count, new = statistics.mean(needed), statistics.mean(others[1:] or [0])
        figures[name] = {"rows": count, "bytes": row * count, "rows_not_in_the_batch_before": new}
        table.append(
            [name, f"{count / 1e3:.1f} k", f"{row * count / 1e6:.1f} MB", f"{new / 1e3:.1f} k"]
        )
    print_table(
        table, ["drawing", "input rows of a batch", "bytes read", "not in the batch before"]
    )
    return figures


def random_lines(tensor, count=1 << 20):
    """A contender that gathers `count` cache lines of 64 bytes from random places of a tensor's memory."""
    lines = tensor.view(torch.uint8)[: tensor.nbytes // 64 * 64].view(torch.int64).view(-1, 8)
    picks = [torch.randint(0, lines.shape[0], (count,)) for _ in range(5)]
    out = torch.empty(count, 8, dtype=torch.int64)
    return lambda i: torch.index_select(lines, 0, picks[i % 5], out=out)


def floor(args, native, seeds):
    """What a batch must touch, divided by the bandwidth at which index_select reads random places on this machine.

    A batch may take less: some lines are in the cache, and prefetching keeps more misses in flight than index_select.
    """
    blocks = native.sample(seeds[0], 0)
    # one for each row of indptr, one for each edge
    lines = sum(block.num_dst + block.num_edges for block in blocks)
    runs = {"lines": random_lines(native.indices), "ours": ours(native, seeds)}
    took = medians(interleave(runs, args.rounds))
    bandwidth = (64 << 20) / took["lines"]
    seconds = 64 * lines / bandwidth
    said = f"{bandwidth / 1e9:.1f} GB/s of random access = {seconds * 1e3:.1f} ms"
    ratio = took["ours"] / seconds
    print(
        f"floor: {lines:,} cache lines of 64 bytes at {said}; native takes {ratio:.2f} times that"
    )
    figures = {"lines": lines, "random_access_bytes_per_s": bandwidth}
    return {**figures, "floor_ms": seconds * 1e3, "native_over_floor": ratio}


def python_threads(args, draw, seeds):
    """Batches a second of two Python threads over those of one; each samples eight, so that its start costs little."""
    lines = random_lines(draw.indices)

    def sample(i, first, count=8):
        for step in range(i + first, i + first + count):
            draw.sample(seeds[step % len(seeds)], step)

    def read(i, threads):
        torch.set_num_threads(threads)
        lines(i)

    with ThreadPoolExecutor(2) as pool:
        runs = {
            "one": lambda i: sample(i, 0, 16),
            "two": lambda i: list(pool.map(sample, [i, i], [0, 8])),
            "bare one": lambda i: read(i, 1),
            "bare two": lambda i: read(i, 2),
        }
        times = interleave(runs, args.rounds)
    torch.set_num_threads(args.threads)
    gain, bare = (
        statistics.median(a / b for a, b in zip(times[f"{kind}one"], times[f"{kind}two"]))
        for kind in ("", "bare ")
    )
    said = f"{gain:.2f} times the batches/s of one (bare random access gains {bare:.2f} times from a second thread)"
    print(f"two Python threads, eight batches each: {said}")
    return {"gain": gain, "random_access_gain": bare}


def dgl_loader(args, native, seeds):
    """Batches a second of DGL's DataLoader with its own NeighborSampler and with this one in its place."""
    load, nodes = import_dgl().dataloading, torch.cat(seeds)
    graph = dgl_graph(native.indptr, in_memory(native.indices, torch.int64))
    samplers = {"adapter": DGLAdapter(native), "DGL": load.NeighborSampler(args.fanout[::-1])}
    passes = {}
    for name, one in samplers.items():
        loader = load.DataLoader(graph, nodes, one, batch_size=args.batch_size)
        passes[name] = lambda i, loader=loader: list(map(len, loader))
    times = medians(interleave(passes, 5, warmup=1))
    rate = {name: len(seeds) / seconds for name, seconds in times.items()}
    gain = rate["adapter"] / rate["DGL"]
    said = f"{rate['DGL']:.1f} batches/s with its NeighborSampler, {rate['adapter']:.1f} with the adapter"
    print(f"DGL's DataLoader: {said}, {gain:.2f} times")
    return {**rate, "gain": gain}


def larger(args, native, seeds):
    """The time of a sampled edge on the graph --larger over that on the graph at hand."""
    store, random = opened(args.larger, args.root), torch.Generator().manual_seed(1)
    graph, size = (in_memory(store.indptr), in_memory(store.indices)), (args.batch_size,)
    big = NeighborSampler(*graph, args.fanout, check=False, threads=args.threads)
    others = [torch.randint(store.num_nodes, size, generator=random).unique() for _ in seeds]
    drawn, runs = {"small": 0, "big": 0}, {"small": ours(native, seeds), "big": ours(big, others)}

    def note(name, found):
        drawn[name] += found[0]

    took = medians(interleave(runs, args.rounds, note=note))
    cost = {name: seconds / drawn[name] for name, seconds in took.items()}
    ratio, times = cost["big"] / cost["small"], store.num_nodes / native.num_nodes
    print(f"{args.larger} ({times:.1f} times the nodes): {ratio:.2f} times the time for an edge")
    return {"dataset": args.larger, "time_per_edge_ratio": ratio}
