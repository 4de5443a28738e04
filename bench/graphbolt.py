"""GraphBolt's side of `python -m bench sampler | store | mag` with --graphbolt PYTHON.

These contenders run in that interpreter, as GraphBolt needs the torch that DGL was built for; bench/__main__.py says
how to install both.
"""

import mmap
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bench import tools
from bench.tools import descend, in_memory, opened
from run.allocator import keep_freed_memory

if not hasattr(torch, "uint16"):  # GraphBolt's torch has none; edge types are uint8 here
    torch.uint16 = torch.int16
DROPOUT = 0.5


def seeds_of(args, nodes, batches):
    """Return the training nodes of that many batches, epoch after epoch, the same in every process."""
    random = torch.Generator().manual_seed(0)
    count = batches * args.batch_size
    epochs = [torch.randperm(len(nodes), generator=random) for _ in range(-(-count // len(nodes)))]
    return nodes[torch.cat(epochs)[:count]]


def sampling(args):
    """Prepare steps that sample a batch of nodes."""
    import dgl.graphbolt as gb

    keep_freed_memory()
    store = opened(args.dataset, args.root)
    graph = gb.fused_csc_sampling_graph(in_memory(store.indptr), in_memory(store.indices))
    seeds = seeds_of(args, torch.arange(store.num_nodes), args.rounds + 2)
    items = gb.ItemSet(seeds.to(store.indices.dtype), names="seed_nodes")
    items = gb.ItemSampler(items, batch_size=args.batch_size)
    batches = iter(items.sample_neighbor(graph, args.fanout[::-1]))

    def step(i):
        batch = next(batches)
        edges = sum(hop.sampled_csc.indices.numel() for hop in batch.sampled_subgraphs)
        return {"edges": edges, "sources": batch.input_nodes.numel()}

    return step


def train_from_disk(args, path, rounds, each, *, advised):
    """Take rounds of `each` steps with features on disk, as GraphBolt's documentation has them -> figures of
    `take_rounds`.

    advised: the kernel is told not to read ahead of each row.
    """
    import dgl.graphbolt as gb
    from dgl.nn import SAGEConv

    store = tools.GraphStore.open(path)
    seeds = seeds_of(args, store.split["train"], rounds * each + 8)
    arrays = (np.load(Path(path, f"{name}.npy")) for name in ("indptr", "indices", "labels"))
    indptr, indices, labels = map(torch.from_numpy, arrays)
    # as `OnDiskDataset` opens it with `in_memory: false`
    table = np.load(Path(path, "features.npy"), mmap_mode="r+")
    if advised:
        table._mmap.madvise(mmap.MADV_RANDOM)
    table = gb.TorchBasedFeature(torch.as_tensor(table))
    features = gb.BasicFeatureStore({("node", None, "feat"): table})
    pipe = gb.ItemSet((seeds.to(indices.dtype), labels[seeds]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(pipe, batch_size=args.batch_size)
    graph = gb.fused_csc_sampling_graph(indptr, indices)
    pipe = pipe.sample_neighbor(graph, args.fanout[::-1])  # the outermost hop first
    batches = iter(gb.DataLoader(pipe.fetch_feature(features, node_feature_keys=["feat"])))
    widths = [store.feature_dim, *[args.hidden] * (len(args.fanout) - 1), store.num_classes]
    torch.manual_seed(0)
    layers = nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

    def step(i):
        batch = next(batches)
        h = tools.forward(layers, batch.blocks, batch.node_features["feat"].float(), DROPOUT)
        return {"loss": descend(F.cross_entropy(h, batch.labels), optimizer).item()}

    return tools.take_rounds(step, path, rounds, each)


class Hetero(nn.Module):
    """R-GCN made of DGL's layers; convs: function of input and output width -> layer on dicts."""

    def __init__(self, store, hidden, layers, convs):
        super().__init__()
        self.maps = nn.ModuleDict()
        self.rows = nn.ModuleDict()
        for name, (count, width) in store.node_types.items():
            if width:
                self.maps[name] = nn.Linear(width, hidden)
            else:
                self.rows[name] = nn.Embedding(count, hidden, sparse=True)
        widths = [hidden] * layers + [store.num_classes]
        pairs = [*zip(widths, widths[1:])]
        self.convs = nn.ModuleList(convs(*pair) for pair in pairs)
        self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairs)

    def forward(self, blocks, nodes, x):
        """Apply to DGL's blocks, {type: ids} of their sources, {type: features} -> {type: rows} of the seeds."""
        rows_of = lambda n, ids: self.maps[n](x[n]) if n in x else self.rows[n](ids)  # noqa: E731
        h = {name: rows_of(name, ids) for name, ids in nodes.items() if len(ids)}
        for conv, own, block in zip(self.convs, self.own, blocks):
            sent = conv(block, h)
            counts = {n: block.num_dst_nodes(n) for n in block.dsttypes}
            present = {n: count for n, count in counts.items() if count and n in h}
            h = {n: own(h[n][:count]) + sent.get(n, 0) for n, count in present.items()}
            if block is not blocks[-1]:
                h = {n: F.dropout(F.relu(rows), DROPOUT) for n, rows in h.items()}
        return h


def relations(args, learn):
    """Prepare steps on a graph with node and edge types: sampling alone, or with `learn` training
    an R-GCN, of DGL's HeteroGraphConv, by SparseAdam and Adam."""
    import dgl
    import dgl.graphbolt as gb

    keep_freed_memory()
    store = opened(args.dataset, args.root)
    counts = torch.tensor([0, *(count for count, _ in store.node_types.values())])
    kinds = [kind.replace(",", ":") for kind in store.edge_types]
    numbered = lambda names: {name: i for i, name in enumerate(names)}  # noqa: E731
    graph = gb.fused_csc_sampling_graph(
        in_memory(store.indptr),
        in_memory(store.indices),
        node_type_offset=counts.cumsum(0),
        type_per_edge=store.edge_type.clone(),
        node_type_to_id=numbered(store.node_types),
        edge_type_to_id=numbered(kinds),
    )
    nodes = seeds_of(args, store.split["train"], args.rounds + 2)
    target = next(iter(store.node_types))
    items = (nodes.to(store.indices.dtype), store.labels[nodes])
    items = gb.ItemSetDict({target: gb.ItemSet(items, names=("seed_nodes", "labels"))})
    pipe = gb.ItemSampler(items, batch_size=args.batch_size)
    fanouts = [torch.full((len(kinds),), k) for k in args.fanout[::-1]]
    batches = iter(pipe.sample_neighbor(graph, fanouts))
    x = store.features.tensor

    def convs(a, b):
        layer = lambda: dgl.nn.GraphConv(a, b, norm="right", bias=False)  # noqa: E731
        made = {tuple(kind.split(":")): layer() for kind in kinds}
        return dgl.nn.HeteroGraphConv(made, aggregate="sum")

    net = Hetero(store, args.hidden, len(fanouts), convs)
    learned = set(net.rows.parameters())
    dense = [p for p in net.parameters() if p not in learned]
    optimizers = [torch.optim.Adam(dense, lr=0.003)]
    optimizers.append(torch.optim.SparseAdam([*learned], lr=0.003))

    def step(i):
        batch = next(batches)
        if learn:
            ids = batch.input_nodes
            out = net(batch.blocks, ids, {target: x[ids[target].long()]})[target]
            descend(F.cross_entropy(out, batch.labels[target]), *optimizers)
        hops = [csc for hop in batch.sampled_subgraphs for csc in hop.sampled_csc.values()]
        sources = sum(map(len, batch.input_nodes.values()))
        return {"edges": sum(csc.indices.numel() for csc in hops), "sources": sources}

    return step
