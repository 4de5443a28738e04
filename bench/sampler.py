"""python -m bench sampler: one batch of this sampler beside one of DGL's and GraphBolt's.

A step samples a batch and returns how many edges it drew, and how many source nodes its outermost hop has.
"""

import statistics
from functools import partial

import torch

from bench import tools
from bench.tools import dgl_graph, in_memory, interleave, medians, opened, print_table
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
    """Steps of a NeighborSampler; options: those of `sample`, a list with one for each batch."""

    def step(i):
        blocks = draw.sample(seeds[i], i, **{name: values[i] for name, values in options.items()})
        return sum(block.num_edges for block in blocks), blocks[0].num_src

    return step


def restricted(draw, indptr, indices, seeds):
    """Steps that draw from less than the graph: without the edges that a batch of links excludes (two for each seed),
    and by time. The times of an edge list are even over 0 .. 2^20; all seeds have the last one, or each its own. Seeds
    with times of their own have few sources in common: beside them, a plain batch with as many sources."""
    degree, random = indptr.diff(), torch.Generator().manual_seed(2)
    rank = torch.arange(indices.numel()).sub_(indptr[:-1].repeat_interleave(degree))
    when = rank.mul_(1 << 20).div_(degree.repeat_interleave(degree), rounding_mode="floor")
    when = in_memory(when)
    timed, latest, plain = draw(edge_times=when), draw(edge_times=when, method="latest"), draw()
    end = [torch.full_like(nodes, 1 << 20) for nodes in seeds]
    own = [torch.randint(1 << 19, 1 << 20, nodes.shape, generator=random) for nodes in seeds]
    ends = [torch.cat([indptr[nodes], indptr[nodes + 1] - 1]) for nodes in seeds]
    own_times, size = ours(timed, seeds, times=own), seeds[0].numel()
    random, sources = torch.Generator().manual_seed(4), own_times(0)[1]
    batch = lambda: torch.randperm(plain.num_nodes, generator=random)[:size]  # noqa: E731
    for _ in range(6):
        size = round(size * sources / plain.sample(batch(), 0)[0].num_src)
    excluded = [edges.clamp(0, indices.numel() - 1) for edges in ends]
    return {
        "native, edges excluded": ours(plain, seeds, exclude=excluded),
        "native, one time": ours(timed, seeds, times=end),
        "native, own times": own_times,
        "native, as many sources": ours(plain, [batch() for _ in seeds]),
        "native, latest": ours(latest, seeds, times=own),
    }


def dgl(indptr, indices, fanouts, seeds, fused):
    """Steps of DGL's NeighborSampler, called directly."""
    graph = dgl_graph(in_memory(indptr), in_memory(indices, torch.int64))
    sampler = import_dgl().dataloading.NeighborSampler(fanouts[::-1], fused=fused)

    def step(i):
        sources, _, blocks = sampler.sample(graph, seeds[i])
        return sum(block.num_edges() for block in blocks), sources.numel()

    return step


def graphbolt(indptr, indices, fanouts, seeds):
    """Steps of GraphBolt's pipeline, one for all rounds, as in training: it is not set up again for every batch."""
    import dgl.graphbolt as gb

    graph = gb.fused_csc_sampling_graph(indptr, indices)
    items = gb.ItemSet(torch.cat(seeds).to(indices.dtype), names="seed_nodes")
    items = gb.ItemSampler(items, batch_size=seeds[0].numel())
    batches = iter(items.sample_neighbor(graph, fanouts[::-1]))

    def step(i):
        batch = next(batches)
        edges = sum(hop.sampled_csc.indices.numel() for hop in batch.sampled_subgraphs)
        return edges, batch.input_nodes.numel()

    return step


def bench_sampler(args):
    """Time one batch of every sampler; returns the figures. Freed memory is kept for all of them, as train.py does."""
    keep_freed_memory()
    store, random = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    batches = range(args.rounds + 2)
    seeds = [torch.randperm(store.num_nodes, generator=random)[: args.batch_size] for _ in batches]
    graph = in_memory(store.indptr), in_memory(store.indices)
    draw = partial(NeighborSampler, *graph, args.fanout, check=False)
    native = draw(threads=args.threads, backend="native")
    if native.backend != "native":
        raise ImportError("the native sampler, beside which others are timed, needs a C compiler")
    theirs = {
        "DGL fused, int64": partial(dgl, *graph, args.fanout, seeds, fused=True),
        "DGL unfused, int64": partial(dgl, *graph, args.fanout, seeds, fused=False),
        "GraphBolt": partial(graphbolt, *graph, args.fanout, seeds),
    }
    threaded = partial(draw, threads=args.threads)
    steps = {
        "native": ours(native, seeds),
        "native, 1 thread": ours(draw(threads=1), seeds),
        "torch ops": ours(draw(backend="torch"), seeds),
        **restricted(threaded, *graph, seeds),
        **tools.prepared(theirs),
    }
    figures = {
        "contenders": time_samplers(args, steps),
        "rows": input_rows(threaded, store, args.batch_size),
        "floor": floor(args, native, seeds),
    }
    if "DGL fused, int64" in steps:
        figures["dgl_dataloader"] = dgl_loader(args, native, seeds)
    if args.larger:
        figures["larger"] = larger(args, native, seeds)
    return figures


def time_samplers(args, steps):
    """The table of all contenders -> {name: figures}."""
    drawn, figures = {name: [] for name in steps}, {}
    times = interleave(steps, args.rounds, note=lambda name, counts: drawn[name].append(counts))
    for name, median in medians(times).items():
        edges, sources = (statistics.mean(counts) for counts in zip(*drawn[name]))
        figures[name] = {"edges": edges, "sources": sources, "edges_per_s": edges / median}
        figures[name]["ns_per_source"] = 1e9 * median / sources
    return tools.print_times("sampler", times, **tools.turned(figures))


def input_rows(draw, store, batch_size, batches=17):
    """Input rows of a batch of training nodes by way of drawing, and how many of them the batch before did not have."""
    nodes, figures = store.split["train"], {}
    order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(3))]
    for name, options in LABORS.items():
        sampler, seen = draw(**options), torch.zeros(store.num_nodes, dtype=torch.bool)
        needed, others = [], []
        for step, seeds in enumerate(order.split(batch_size)[:batches]):
            src = sampler.sample(seeds, step)[0].src_nodes.long()
            needed.append(src.numel())
            others.append(src.numel() - int(seen[src].sum()))
            seen.zero_()[src] = True
        rows, new = statistics.mean(needed), statistics.mean(others[1:] or [0])
        size = rows * store.feature_dim * store.features.dtype.itemsize
        figures[name] = {"rows": rows, "bytes": size, "rows_not_in_the_batch_before": new}
    return print_table("input of a batch", figures)


def random_lines(tensor, count=1 << 20):
    """A step that gathers `count` cache lines of 64 bytes from random places of a tensor's memory."""
    lines = tensor.view(torch.uint8)[: tensor.nbytes // 64 * 64].view(torch.int64).view(-1, 8)
    picks = [torch.randint(0, lines.shape[0], (count,)) for _ in range(5)]
    out = torch.empty(count, 8, dtype=torch.int64)
    return lambda i: torch.index_select(lines, 0, picks[i % 5], out=out)


def floor(args, native, seeds):
    """What a batch must touch, divided by the bandwidth at which index_select reads random places on this machine.

    A batch may take less: some lines are in the cache, and prefetching keeps more misses in flight than index_select.
    """
    # one for each row of indptr, one for each edge
    lines = sum(block.num_dst + block.num_edges for block in native.sample(seeds[0], 0))
    steps = {"lines": random_lines(native.indices), "ours": ours(native, seeds)}
    took = medians(interleave(steps, args.rounds))
    bandwidth = (64 << 20) / took["lines"]
    least = 64 * lines / bandwidth
    figures = {"lines": lines, "random_access_bytes_per_s": bandwidth, "floor_ms": 1e3 * least}
    figures["native_over_floor"] = took["ours"] / least
    return print_table("floor", {"cache lines": figures})["cache lines"]


def dgl_loader(args, native, seeds):
    """Batches a second of DGL's DataLoader with its own NeighborSampler and with this one in its place."""
    load, nodes = import_dgl().dataloading, torch.cat(seeds)
    graph = dgl_graph(native.indptr, in_memory(native.indices, torch.int64))
    samplers = {"adapter": DGLAdapter(native), "DGL": load.NeighborSampler(args.fanout[::-1])}
    steps = {}
    for name, sampler in samplers.items():
        loader = load.DataLoader(graph, nodes, sampler, batch_size=args.batch_size)
        steps[name] = lambda i, loader=loader: list(map(len, loader))
    times = medians(interleave(steps, 5, warmup=1))
    figures = {name: len(seeds) / seconds for name, seconds in times.items()}
    figures["gain"] = figures["adapter"] / figures["DGL"]
    return print_table("DGL's DataLoader", {"batches/s": figures})["batches/s"]


def larger(args, native, seeds):
    """The time of a sampled edge on the graph --larger over that on the graph at hand."""
    store, random = opened(args.larger, args.root), torch.Generator().manual_seed(1)
    graph, size = (in_memory(store.indptr), in_memory(store.indices)), (args.batch_size,)
    big = NeighborSampler(*graph, args.fanout, check=False, threads=args.threads)
    others = [torch.randint(store.num_nodes, size, generator=random).unique() for _ in seeds]
    figures = time_samplers(args, {"native": ours(native, seeds), args.larger: ours(big, others)})
    small, large = (row["edges_per_s"] for row in figures.values())
    print_table("larger graph", {args.larger: {"time of an edge / native": small / large}})
    return {"dataset": args.larger, "time_per_edge_ratio": small / large}
