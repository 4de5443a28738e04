"""python bench.py sampler: one batch of this sampler beside one of DGL's, GraphBolt's, pyg-lib's and torch-sparse's.

A contender is a function of the number of a batch: it samples the batch and returns how many edges it drew, and how
many source nodes its outermost hop has.
"""

import functools
import statistics
from concurrent.futures import ThreadPoolExecutor

import torch

from allocator import keep_freed_memory
from bench_tools import dgl_graph, in_memory, interleave, made, medians, opened, print_table, print_times, random_lines
from sampler import DGLAdapter, NeighborSampler, import_dgl


def ours(draw, seeds, **options):
    """A NeighborSampler of this project; options: those of `sample`, a list with one for each batch."""
    return lambda i: size(draw.sample(seeds[i], i, **{name: values[i] for name, values in options.items()}))


def size(blocks):
    """Edges of all blocks, sources of the outermost."""
    return sum(block.num_edges for block in blocks), blocks[0].num_src


def restricted(draw, graph, seeds):
    """Contenders that draw from less than the graph: without the edges that a batch of links excludes (two for each
    seed), and by time. The times of an edge list are even over 0 .. 2^20; all seeds have the last one, or each its
    own. Seeds with times of their own have few sources in common: beside them, a plain batch with as many sources."""
    indptr, indices = graph
    degree, generator = indptr.diff(), torch.Generator().manual_seed(2)
    rank = torch.arange(indices.numel()).sub_(indptr[:-1].repeat_interleave(degree))
    when = rank.mul_(1 << 20).div_(degree.repeat_interleave(degree), rounding_mode="floor")
    when = in_memory(when)
    timed, latest = draw(edge_times=when), draw(edge_times=when, method="latest")
    end, own = [], []
    for nodes in seeds:
        end.append(torch.full_like(nodes, 1 << 20))
        own.append(torch.randint(1 << 19, 1 << 20, nodes.shape, generator=generator))
    gone = [torch.cat([indptr[nodes], indptr[nodes + 1] - 1]).clamp(0, indices.numel() - 1) for nodes in seeds]
    plain, own_times = draw(), ours(timed, seeds, times=own)
    return {
        "native, edges excluded": ours(plain, seeds, exclude=gone),
        "native, one time": ours(timed, seeds, times=end),
        "native, own times": own_times,
        "native, as many sources": ours(plain, with_sources(plain, own_times(0)[1], seeds)),
        "native, latest": ours(latest, seeds, times=own),
    }


def with_sources(draw, wanted, seeds):
    """As many batches as in `seeds`, of more or fewer seeds: so many that a batch has about `wanted` sources."""
    generator, batch_size = torch.Generator().manual_seed(4), seeds[0].numel()

    def batch():
        return torch.randperm(draw.num_nodes, generator=generator)[:batch_size]

    for _ in range(6):
        batch_size = round(batch_size * wanted / draw.sample(batch(), 0)[0].num_src)
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
    batches = iter(gb.ItemSampler(items, batch_size=seeds[0].numel()).sample_neighbor(graph, fanouts[::-1]))

    def sample(i):
        batch = next(batches)
        return sum(hop.sampled_csc.indices.numel() for hop in batch.sampled_subgraphs), batch.input_nodes.numel()

    return sample


def pyg_lib(indptr, indices, fanouts, seeds):
    """The operator behind PyG's NeighborLoader."""
    import pyg_lib

    indices, sample = in_memory(indices, torch.int64), pyg_lib.sampler.neighbor_sample

    def run(i):
        row, _, nodes, *_ = sample(indptr, indices, seeds[i], fanouts, csc=True)
        return row.numel(), nodes.numel()

    return run


def torch_sparse(indptr, indices, fanouts, seeds):
    """The operator that PyG falls back to."""
    import torch_sparse  # noqa: F401  registers the operator

    indices, sample = in_memory(indices, torch.int64), torch.ops.torch_sparse.neighbor_sample

    def run(i):
        nodes, row, *_ = sample(indptr, indices, seeds[i], fanouts, False, True)
        return row.numel(), nodes.numel()

    return run


def bench_sampler(args):
    """Time one batch of every sampler; returns the figures. Freed memory is kept for all of them, as train.py does."""
    keep_freed_memory()
    store, generator = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    seeds = [torch.randperm(store.num_nodes, generator=generator)[: args.batch_size] for _ in range(args.rounds + 2)]
    graph = in_memory(store.indptr), in_memory(store.indices)
    draw = functools.partial(NeighborSampler, *graph, args.fanout, check=False)
    native = draw(threads=args.threads, backend="native")
    if native.backend != "native":
        raise ImportError("the native sampler, to which the others are compared, needs a C compiler (cc)")
    task = *graph, args.fanout, seeds
    contenders = {
        "native": ours(native, seeds),
        "native, 1 thread": ours(draw(threads=1), seeds),
        "torch ops": ours(draw(backend="torch"), seeds),
    } | restricted(functools.partial(draw, threads=args.threads), graph, seeds) | made({
        "DGL fused, int64": lambda: dgl(*task, fused=True),
        "DGL unfused, int64": lambda: dgl(*task, fused=False),
        "GraphBolt": lambda: graphbolt(*task),
        "pyg-lib": lambda: pyg_lib(*task),
        "torch-sparse": lambda: torch_sparse(*task),
    })  # fmt: skip
    drawn = {name: [] for name in contenders}
    times = interleave(contenders, args.rounds, note=lambda name, found: drawn[name].append(found))
    edges, sources = ({name: statistics.mean(pair[which] for pair in pairs) for name, pairs in drawn.items()}
                      for which in (0, 1))  # fmt: skip
    rate = {name: edges[name] / seconds for name, seconds in medians(times).items()}
    median, least = print_times("sampler", times, "ms", 1, **{
        "edges": {name: f"{count / 1e3:.0f} k" for name, count in edges.items()},
        "sources": {name: f"{count / 1e3:.0f} k" for name, count in sources.items()},
        "edges/s": {name: f"{speed / 1e6:.1f} M" for name, speed in rate.items()},
        "ns/source": {name: f"{1e9 * seconds / sources[name]:.1f}" for name, seconds in medians(times).items()},
    })  # fmt: skip
    figures = {"contenders": {
        name: {"median_ms": ms, "min_ms": least[name], "edges": edges[name], "sources": sources[name],
               "edges_per_s": rate[name], "ratio_to_native": ms / median["native"]} for name, ms in median.items()
    }}  # fmt: skip
    figures["rows"] = rows(functools.partial(draw, threads=args.threads), store, args.batch_size)
    figures["floor"] = floor(args, native, seeds)
    figures["two_python_threads"] = python_threads(args, draw(threads=1), seeds)
    figures["dgl_dataloader"] = dgl_loader(args, native, seeds) if "DGL fused, int64" in contenders else None
    if args.larger:
        figures["larger"] = larger(args, native, seeds)
    return figures


LABORS = {  # ways to draw: options of a NeighborSampler
    "uniform": {}, "LABOR": {"method": "labor"}, "LABOR, layer": {"method": "labor", "layer_dependency": True},
    "LABOR, batch 4": {"method": "labor", "batch_dependency": 4},
    "LABOR, layer, batch 4": {"method": "labor", "layer_dependency": True, "batch_dependency": 4},
}  # fmt: skip


def rows(draw, store, batch_size, batches=17):
    """Input rows of a batch of training nodes by way of drawing, and how many of them the batch before did not have."""
    nodes, figures = store.split["train"], {}
    order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(3))]
    row = store.feature_dim * store.features.dtype.itemsize
    for name, options in LABORS.items():
        sampler, seen, needed, others = draw(**options), torch.zeros(store.num_nodes, dtype=torch.bool), [], []
        for step, seeds in enumerate(order.split(batch_size)[:batches]):
            src = sampler.sample(seeds, step)[0].src_nodes.long()
            needed.append(src.numel())
            others.append(src.numel() - int(seen[src].sum()))
            seen.zero_()[src] = True
        others = others[1:] or [0]
        figures[name] = {"rows": statistics.mean(needed), "bytes": row * statistics.mean(needed),
                         "rows_not_in_the_batch_before": statistics.mean(others)}  # fmt: skip
    table = [[name, f"{f['rows'] / 1e3:.1f} k", f"{f['bytes'] / 1e6:.1f} MB",
              f"{f['rows_not_in_the_batch_before'] / 1e3:.1f} k"] for name, f in figures.items()]  # fmt: skip
    print_table(table, ["drawing", "input rows of a batch", "bytes read", "not in the batch before"])
    return figures


def floor(args, native, seeds):
    """What a batch must touch, divided by the bandwidth at which index_select reads random places on this machine.

    A batch may take less: some lines are in the cache, and prefetching keeps more misses in flight than index_select.
    """
    blocks = native.sample(seeds[0], 0)
    lines = sum(block.num_dst + block.num_edges for block in blocks)  # one for each row of indptr, one for each edge
    took = medians(interleave({"lines": random_lines(native.indices), "ours": ours(native, seeds)}, args.rounds))
    bandwidth = (64 << 20) / took["lines"]
    seconds = 64 * lines / bandwidth
    print(f"floor: {lines:,} cache lines of 64 bytes at {bandwidth / 1e9:.1f} GB/s of random access = "
          f"{seconds * 1e3:.1f} ms; native takes {took['ours'] / seconds:.2f} times that")  # fmt: skip
    return {"lines": lines, "random_access_bytes_per_s": bandwidth, "floor_ms": seconds * 1e3,
            "native_over_floor": took["ours"] / seconds}  # fmt: skip


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
        times = interleave({
            "one": lambda i: sample(i, 0, 16), "two": lambda i: list(pool.map(sample, [i, i], [0, 8])),
            "bare one": lambda i: read(i, 1), "bare two": lambda i: read(i, 2),
        }, args.rounds)  # fmt: skip
    torch.set_num_threads(args.threads)
    gain = statistics.median(one / two for one, two in zip(times["one"], times["two"]))
    bare = statistics.median(one / two for one, two in zip(times["bare one"], times["bare two"]))
    print(f"two Python threads, eight batches each: {gain:.2f} times the batches/s of one (bare random access gains "
          f"{bare:.2f} times from a second thread)")  # fmt: skip
    return {"gain": gain, "random_access_gain": bare}


def dgl_loader(args, native, seeds):
    """Batches a second of DGL's DataLoader with its own NeighborSampler and with this one in its place."""
    load, nodes = import_dgl().dataloading, torch.cat(seeds)
    graph = dgl_graph(native.indptr, in_memory(native.indices, torch.int64))
    samplers = {"adapter": DGLAdapter(native), "DGL": load.NeighborSampler(args.fanout[::-1])}
    loaders = {name: load.DataLoader(graph, nodes, one, batch_size=args.batch_size) for name, one in samplers.items()}
    passes = {name: lambda i, loader=loader: list(map(len, loader)) for name, loader in loaders.items()}
    rate = {name: len(seeds) / seconds for name, seconds in medians(interleave(passes, 5, warmup=1)).items()}
    gain = rate["adapter"] / rate["DGL"]
    print(f"DGL's DataLoader: {rate['DGL']:.1f} batches/s with its NeighborSampler, {rate['adapter']:.1f} with the "
          f"adapter, {gain:.2f} times")  # fmt: skip
    return {**rate, "gain": gain}


def larger(args, native, seeds):
    """The time of a sampled edge on the graph --larger over that on the graph at hand."""
    store, generator = opened(args.larger, args.root), torch.Generator().manual_seed(1)
    graph = in_memory(store.indptr), in_memory(store.indices)
    big = NeighborSampler(*graph, args.fanout, check=False, threads=args.threads)
    others = [torch.randint(store.num_nodes, (args.batch_size,), generator=generator).unique() for _ in seeds]
    drawn = {"small": [], "big": []}
    runs = {"small": ours(native, seeds), "big": ours(big, others)}
    took = medians(interleave(runs, args.rounds, note=lambda name, found: drawn[name].append(found[0])))
    cost = {name: seconds / sum(drawn[name]) for name, seconds in took.items()}
    ratio, times = cost["big"] / cost["small"], store.num_nodes / native.num_nodes
    print(f"{args.larger} ({times:.1f} times the nodes): {ratio:.2f} times the time for an edge")
    return {"dataset": args.larger, "time_per_edge_ratio": ratio}
