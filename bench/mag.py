"""python -m bench mag: R-GCN on a graph with the types and the size of ogbn-mag, sampling alone and whole steps.

Contenders take the same seeds, draw as many neighbours of each type and have networks of the same widths: a mean and a
matrix for each type, one for a node's own row, a linear map of the papers' features and learned rows, updated by batch, for
the others. GraphBolt's is of DGL's HeteroGraphConv, with SparseAdam beside Adam.
"""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from bench import tools
from bench.tools import in_memory, interleave, on_host, opened, prepared
from features import FeatureRing
from loader import NodeLoader
from model import GNN, gather_rows
from run.adam import Adam
from run.allocator import keep_freed_memory
from sampler import NeighborSampler

LAYERS, DROPOUT = 2, 0.5
if not hasattr(torch, "uint16"):  # in the torch that GraphBolt needs; types are uint8 here
    torch.uint16 = torch.int16


def ours(args, store, seeds, learn):
    """Steps of this loop."""
    graph, types = (in_memory(store.indptr), in_memory(store.indices)), store.num_edge_types
    fanouts = [[k] * types for k in args.fanout]
    options = {"edge_type": store.edge_type, "threads": args.threads, "check": False}
    sampler = NeighborSampler(*graph, fanouts, **options)
    if not learn:
        return lambda i: counted(sampler.sample(seeds[i], i))
    ring = FeatureRing(store.features.tensor, store.labels, slots=1, gather=gather_rows)
    given = dict(batch_size=len(seeds[0]), shuffle=False, depth=0, sampler=sampler, ring=ring)
    loader = NodeLoader(store, torch.cat(seeds), fanouts, **given)
    given = dict(conv="rgcn", num_types=types, num_layers=LAYERS, dropout=DROPOUT)
    given["node_types"] = [*store.node_types.values()]
    net = GNN(0, args.hidden, store.num_classes, **given)
    optimizer, batches = Adam(net.parameters(), lr=0.003), iter(loader)

    def step(i):
        batch = next(batches)
        tools.descend(optimizer, F.cross_entropy(net(batch.blocks, batch.x), batch.y))
        return counted(batch.blocks)

    return step


def counted(blocks):
    """(edges of all hops, nodes of the outermost)."""
    return sum(block.num_edges for block in blocks), blocks[0].num_src


class Hetero(nn.Module):
    """R-GCN of DGL's layers; convs: function of in and out width -> layer of dicts."""

    def __init__(self, store, hidden, convs):
        super().__init__()
        types, widths = store.node_types.items(), [hidden] * LAYERS + [store.num_classes]
        self.maps = nn.ModuleDict({n: nn.Linear(w, hidden) for n, (_, w) in types if w})
        rows = {n: nn.Embedding(count, hidden, sparse=True) for n, (count, w) in types if not w}
        self.rows, pairs = nn.ModuleDict(rows), [*zip(widths, widths[1:])]
        self.convs = nn.ModuleList(convs(*pair) for pair in pairs)
        self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairs)
        dense = [p for n, p in self.named_parameters() if not n.startswith("rows.")]
        sparse = torch.optim.SparseAdam([*self.rows.parameters()], lr=0.003)
        self.optimizers = torch.optim.Adam(dense, lr=0.003), sparse

    def inputs(self, nodes, x):
        """Rows of {type: ids} and {type: features}."""
        made = lambda n, ids: self.maps[n](x[n]) if n in x else self.rows[n](ids)  # noqa: E731
        return {name: made(name, ids) for name, ids in nodes.items() if len(ids)}

    def finish(self, i, sent, h, counts):
        """Own rows of the destinations {type: count} added, and what stands between two layers."""
        there = {n: count for n, count in counts.items() if count and n in h}
        h = {n: self.own[i](h[n][:count]) + sent.get(n, 0) for n, count in there.items()}
        last = i == LAYERS - 1
        return h if last else {n: F.dropout(F.relu(rows), DROPOUT) for n, rows in h.items()}

    def learn(self, logits, labels):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def graphbolt(args, store, seeds, learn):
    """Steps of GraphBolt's pipeline."""
    import dgl
    import dgl.graphbolt as gb

    counts = torch.tensor([0, *(count for count, _ in store.node_types.values())])
    kinds = [kind.replace(",", ":") for kind in store.edge_types]
    graph = gb.fused_csc_sampling_graph(
        in_memory(store.indptr),
        in_memory(store.indices),
        node_type_offset=counts.cumsum(0),
        type_per_edge=store.edge_type.clone(),
        node_type_to_id={name: i for i, name in enumerate(store.node_types)},
        edge_type_to_id={kind: i for i, kind in enumerate(kinds)},
    )
    (target, *_), nodes = store.node_types, torch.cat(seeds).to(store.indices.dtype)
    items = gb.ItemSet((nodes, store.labels[nodes.long()]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(gb.ItemSetDict({target: items}), batch_size=len(seeds[0]))
    fanouts = [torch.full((len(kinds),), k) for k in args.fanout[::-1]]
    batches, x = iter(pipe.sample_neighbor(graph, fanouts)), store.features.tensor

    def convs(a, b):
        layer = lambda: dgl.nn.GraphConv(a, b, norm="right", bias=False)  # noqa: E731
        made = {tuple(kind.split(":")): layer() for kind in kinds}
        return dgl.nn.HeteroGraphConv(made, aggregate="sum")

    net = Hetero(store, args.hidden, convs) if learn else None

    def step(i):
        batch = next(batches)
        if learn:
            ids = batch.input_nodes
            h = net.inputs(ids, {target: x[ids[target].long()]})
            for i, block in enumerate(batch.blocks):
                sizes = {name: block.num_dst_nodes(name) for name in block.dsttypes}
                h = net.finish(i, net.convs[i](block, h), h, sizes)
            net.learn(h[target], batch.labels[target])
        hops = [csc for hop in batch.sampled_subgraphs for csc in hop.sampled_csc.values()]
        edges = sum(csc.indices.numel() for csc in hops)
        return edges, sum(map(len, batch.input_nodes.values()))

    return step


def some_seeds(args, store):
    """The seeds of each round, the same in every process."""
    nodes, random = store.split["train"], torch.Generator().manual_seed(0)
    count = (args.rounds + 2) * args.batch_size
    epochs = [torch.randperm(len(nodes), generator=random) for _ in range(-(-count // len(nodes)))]
    return nodes[torch.cat(epochs)[:count]].split(args.batch_size)


def elsewhere(args, learn):
    """Steps of GraphBolt in the interpreter --graphbolt, which answers the number of a round by the step's seconds."""
    options = vars(args) | {"learn": learn, "root": str(Path(args.root).resolve())}
    command = [args.graphbolt, "-m", "bench.mag", json.dumps(options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes)

    def step(i):
        print(i, file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    if process.stdout.readline() != "ready\n":
        raise ImportError(f"{args.graphbolt} cannot run it")
    return step


def serve(args):
    """The other end of `elsewhere`."""
    tools.settle(args.threads)
    keep_freed_memory()
    store = opened(args.dataset, args.root)
    step = graphbolt(args, store, some_seeds(args, store), args.learn)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(on_host(step, int(line))), flush=True)


def bench_mag(args):
    """Time all contenders in turn; returns the figures."""
    keep_freed_memory()
    store, figures = opened(args.dataset, args.root), {}
    seeds = some_seeds(args, store)
    for what, learn in (("sampling", False), ("step", True)):
        makers = {"ringblock": partial(ours, args, store, seeds, learn)}
        if args.graphbolt:
            makers["GraphBolt"] = partial(elsewhere, args, learn)
        steps, drawn = prepared(makers), {}

        def timed(step, i):
            seconds, counts = on_host(step, i)
            return (seconds, counts) if isinstance(counts[0], int) else counts

        note = lambda name, counts: drawn.setdefault(name, []).append(counts)  # noqa: E731
        times = interleave(steps, args.rounds, note=note, timed=timed)
        means = {name: [statistics.mean(c) for c in zip(*drawn[name])] for name in times}
        columns = {"edges": {n: m[0] for n, m in means.items()}}
        columns["nodes"] = {n: m[1] for n, m in means.items()}
        figures[what] = tools.print_times(what, times, **columns)
    return figures


if __name__ == "__main__":
    serve(SimpleNamespace(**json.loads(sys.argv[1])))
