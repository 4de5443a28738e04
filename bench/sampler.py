"""python -m bench sampler: one batch of our, DGL's and GraphBolt's sampler; edges and rows of each sampling method.

A contender returns its step, which samples batch i and returns the numbers of edges and of source nodes in the outermost hop.
"""

import itertools
import statistics
from functools import partial

import torch

from bench import graphbolt, tools
from bench.tools import Elsewhere, dgl_graph, in_memory, opened
from sampler import DGLAdapter, NeighborSampler, import_dgl

LABORS = {  # ways to draw: options of a NeighborSampler; train.py has flags of the same names
    "uniform": {},
    "LABOR": dict(method="labor"),
    "LABOR, layer": dict(method="labor", layer_dependency=True),
    "LABOR, batch 4": dict(method="labor", batch_dependency=4),
    "LABOR, layer, batch 4": dict(method="labor", layer_dependency=True, batch_dependency=4),
}


def ours(draw, seeds, **options):
    """Prepare a NeighborSampler's steps; options: keyword arguments of `sample`, each a list with one value a batch."""

    def step(i):
        batch_options = {name: values[i] for name, values in options.items()}
        return tools.counted(draw.sample(seeds[i], i, **batch_options))

    return lambda: step


def restricted(draw, indptr, indices, seeds):
    """Return contenders that draw from part of the graph: without the edges that a batch of links excludes (two for
    each seed), and by time. Times in a neighbour list are even over 0 .. 2^20; seeds have the last one, or one each."""
    degree = indptr.diff()
    random = torch.Generator().manual_seed(2)
    rank = torch.arange(indices.numel()).sub_(indptr[:-1].repeat_interleave(degree))
    when = rank.mul_(1 << 20).div_(degree.repeat_interleave(degree), rounding_mode="floor")
    when = in_memory(when)
    end = [torch.full_like(nodes, 1 << 20) for nodes in seeds]
    own = [torch.randint(1 << 19, 1 << 20, nodes.shape, generator=random) for nodes in seeds]
    ends = [torch.cat([indptr[nodes], indptr[nodes + 1] - 1]) for nodes in seeds]
    excluded = [edges.clamp(0, indices.numel() - 1) for edges in ends]
    timed = draw(edge_times=when)
    return {
        "native, edges excluded": ours(draw(), seeds, exclude=excluded),
        "native, one time": ours(timed, seeds, times=end),
        "native, own times": ours(timed, seeds, times=own),
        "native, latest": ours(draw(edge_times=when, method="latest"), seeds, times=own),
    }


def cache_lines(native, seeds):
    """Prepare the physical limit: gather as many 64-byte cache lines, from random places, as a batch touches, one for
    each row of indptr and for each edge. A batch may take less, with lines in the cache and more misses in flight."""
    blocks = native.sample(seeds[0], 0)
    memory = native.indices.view(torch.uint8)
    lines = memory[: memory.numel() // 64 * 64].view(torch.int64).view(-1, 8)
    count = sum(block.num_dst + block.num_edges for block in blocks)
    picks = [torch.randint(len(lines), (count,)) for _ in range(5)]
    out = torch.empty(count, 8, dtype=torch.int64)

    def step(i):
        torch.index_select(lines, 0, picks[i % 5], out=out)

    return step


def dgl(indptr, indices, seeds, make_sampler, loading=False):
    """Prepare steps of a sampler for DGL, called directly or, with `loading`, by DGL's DataLoader."""
    graph = dgl_graph(in_memory(indptr), in_memory(indices, torch.int64))
    sampler = make_sampler()
    if loading:
        load = import_dgl().dataloading.DataLoader
        loader = load(graph, torch.cat(seeds), sampler, batch_size=seeds[0].numel())
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        return lambda i: tools.counted(next(batches)[2])
    return lambda i: tools.counted(sampler.sample(graph, seeds[i])[2])


def bench_sampler(args):
    """Time one batch of every sampler -> the figures."""
    store = opened(args.dataset, args.root)
    random = torch.Generator().manual_seed(0)
    batches = range(args.rounds + 2)
    seeds = [torch.randperm(store.num_nodes, generator=random)[: args.batch_size] for _ in batches]
    graph = in_memory(store.indptr), in_memory(store.indices)
    draw = partial(NeighborSampler, *graph, args.fanout, check=False)
    threaded = partial(draw, threads=args.threads)
    native = threaded(backend="native")
    if native.backend != "native":
        raise ImportError("the native sampler, beside which others are timed, needs a C compiler")
    theirs = partial(dgl, *graph, seeds)

    def neighbours(**options):
        return import_dgl().dataloading.NeighborSampler(args.fanout[::-1], **options)

    contenders = {
        "native": ours(native, seeds),
        "native, 1 thread": ours(draw(threads=1), seeds),
        "torch ops": ours(draw(backend="torch"), seeds),
        **restricted(threaded, *graph, seeds),
        "its cache lines alone": partial(cache_lines, native, seeds),
        "DGL fused, int64": partial(theirs, partial(neighbours, fused=True)),
        "DGL unfused, int64": partial(theirs, partial(neighbours, fused=False)),
        "DGL's DataLoader": partial(theirs, neighbours, True),
        "DGL's DataLoader, adapter": partial(theirs, partial(DGLAdapter, native), True),
    }
    if args.graphbolt:
        other = partial(Elsewhere, graphbolt.sampling, args, python=args.graphbolt)
        contenders["GraphBolt"] = other
    figures = tools.compare("sampler", contenders, args.rounds)
    return {"contenders": figures, "rows": input_rows(threaded, store, args.batch_size)}


def input_rows(draw, store, batch_size, batches=17):
    """Count the input rows of a training batch for each way of drawing, and those not in the batch before."""
    nodes = store.split["train"]
    random = torch.Generator().manual_seed(3)
    steps = nodes[torch.randperm(nodes.numel(), generator=random)].split(batch_size)[:batches]
    figures = {}
    for name, options in LABORS.items():
        sampler = draw(**options)
        rows = [sampler.sample(seeds, step)[0].src_nodes for step, seeds in enumerate(steps)]
        new = [len(b) - int(torch.isin(b, a).sum()) for a, b in itertools.pairwise(rows)]
        mean_new = statistics.mean(new or [0])
        mean = statistics.mean(map(len, rows))
        figures[name] = {"rows": mean, "rows_not_in_the_batch_before": mean_new}
    return tools.print_table("input of a batch", figures)
