"""Targets of many small graphs: an edge-gated regressor, batches read from disk, scores.

targets = Regressor(...)(GraphDataset.open("molecules").batch(ids))     # one row for each graph

python train.py --task graph --dataset molecules.npz
"""

import torch
from torch import nn
from torch.nn import functional as F

from disk.files import StoreError
from disk.graphs import GraphBatch, GraphDataset
from features import CudaCopies, Fetched
from sources.splits import say_empty_parts
from tasks.metrics import binary_cross_entropy, errors, score
from tasks.task import OF_LINKS, Task


class EdgeGatedConv(nn.Module):
    """Edge-gated graph convolution with residuals (Bresson, Laurent, arXiv 1711.07553), as ALIGNN uses it. An edge's gate
    is made of its own features and those of its ends; a node adds up its neighbours' messages, each channel weighed by
    the gates. LayerNorm stands for BatchNorm: a graph's output does not depend on its batch."""

    def __init__(self, width, last=False):
        super().__init__()
        self.nodes, self.edges = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.node_norm, self.edge_norm = nn.LayerNorm(width), None if last else nn.LayerNorm(width)

    def forward(self, src, dst, h, e):
        """h [N, W], e [E, W] of the edges src [E] -> dst [E] -> both after the layer; the last one needs no e."""
        own, message, gate_src, gate_dst = self.nodes(h).chunk(4, 1)
        gate = self.edges(e) + gate_src.index_select(0, src) + gate_dst.index_select(0, dst)
        weight = gate.sigmoid()
        both = torch.cat([weight * message.index_select(0, src), weight], 1)  # [E, 2W]
        sums = both.new_zeros(h.shape[0], both.shape[1]).index_add_(0, dst, both)
        total, weights = sums.chunk(2, 1)
        h = h + F.silu(self.node_norm(own + total / (weights + 1e-6)))
        return h, e if self.edge_norm is None else e + F.silu(self.edge_norm(gate))


class Categories(nn.Module):
    """uint8 [n, columns] -> [n, width]: the sum of an embedding for each column."""

    def __init__(self, columns, width):
        super().__init__()
        self.table = nn.Embedding(256 * columns, width)
        self.register_buffer("first", 256 * torch.arange(columns), persistent=False)

    def forward(self, x):
        return self.table(x + self.first).sum(1)


class Regressor(nn.Module):
    """Edge-gated convolutions, the mean over the nodes of each graph, and a small head.

    node_dim, edge_dim: F, D; their dtypes uint8 for categories, otherwise numbers. hidden: width W. out_dim: T. dropout:
    before the head. Buffers mean and std, float [T], of the targets: the network itself works on standardised ones.
    """

    def __init__(
        self, node_dim, edge_dim, hidden, out_dim, *, node_dtype, edge_dtype, num_layers, dropout
    ):
        super().__init__()
        self.nodes, self.edges = (
            Categories(dim, hidden)
            if dtype == torch.uint8
            else nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for dim, dtype in ((node_dim, node_dtype), (edge_dim, edge_dtype))
        )
        layers = [EdgeGatedConv(hidden, last=i == num_layers - 1) for i in range(num_layers)]
        self.layers, inner = nn.ModuleList(layers), (nn.Linear(hidden, hidden), nn.SiLU())
        self.head = nn.Sequential(*inner, nn.Dropout(dropout), nn.Linear(hidden, out_dim))
        self.register_buffer("mean", torch.zeros(out_dim))
        self.register_buffer("std", torch.ones(out_dim))

    def forward(self, graph):
        """Targets [G, T] of the graphs of a batch with .indptr, .indices, .graph_ids, .x, .e and .y [G, T]."""
        dst = torch.repeat_interleave(graph.indptr.diff(), output_size=graph.indices.numel())
        x, e = (rows if rows.dtype == torch.uint8 else rows.float() for rows in (graph.x, graph.e))
        h, e = self.nodes(x), self.edges(e)
        for layer in self.layers:
            h, e = layer(graph.indices, dst, h, e)
        pooled = h.new_zeros(len(graph.y), h.shape[1]).index_add_(0, graph.graph_ids, h)
        sizes = graph.graph_ids.bincount(minlength=len(graph.y)).clamp(min=1)
        return self.head(pooled / sizes.unsqueeze(1)) * self.std + self.mean


class GraphTask(Task):
    """Learn numbers, or 0 and 1 where every training target is (`binary`), for whole graphs: a batch of seeds is a batch
    of graphs. mean, std: [T] of the training targets, which losses are measured in."""

    name, examples, placed = "graph", "graphs", False
    widths = "node_dim", "edge_dim", "target_dim", "node_dtype", "edge_dtype"
    unused = {
        "is for --task link, --task is graph": OF_LINKS,
        "has no effect with --task graph: leave it out": "fanout model norm residual input_dropout "
        "checkpoint_activations backend mode cache lookahead",
        "is for --task node": "sampler temporal window early_stop weights split predict runs",
    }

    def __init__(self, args, path, say=print):
        self.store = graphs = GraphDataset.open(path)
        graphs.check_split()
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        say_empty_parts(graphs.split, "graphs", say)

    @staticmethod
    def network(args, widths, own=None):
        dtypes = {name: getattr(torch, widths[name]) for name in ("node_dtype", "edge_dtype")}
        sizes = widths["node_dim"], widths["edge_dim"], args.hidden, widths["target_dim"]
        return Regressor(*sizes, num_layers=args.num_layers, dropout=args.dropout, **dtypes)

    def attach(self, ranks, args, *_):
        """Learn the scale of the targets; on a GPU prepare to copy batches there."""
        self.copies = CudaCopies(ranks.device, args.sample_threads) if ranks.gpus else None
        graphs = self.store
        y = torch.cat([graphs.batch(ids).y for ids in graphs.split["train"].split(1024)]).double()
        self.binary = bool(((y == 0) | (y == 1)).all())
        self.mean, self.std = y.mean(0).float(), y.std(0, correction=0).clamp(min=1e-12).float()

    def prepare(self, network):
        if not self.binary:
            network.mean.copy_(self.mean), network.std.copy_(self.std)

    def load(self, batch, slot):
        """The graphs numbered batch.seeds, on the training device -> Fetched; nothing is drawn."""
        graph = self.store.batch(batch.seeds)
        if not self.copies:
            return Fetched([graph], graph.x, graph.y)
        with self.copies.stream(slot):
            graph = GraphBatch(*(self.copies.copy(tensor.pin_memory()) for tensor in graph))
            return Fetched([graph], graph.x, graph.y, self.copies.event())

    def output(self, run, network, batch, key):
        """Targets, or logits, of a batch's graphs [G, T]."""
        return network(batch.blocks[0])

    def loss(self, network, output, y):
        """Summed over the graphs, a mean over the targets of each: cross-entropy, or squared error in units of the
        targets' standard deviation."""
        if self.binary:
            return binary_cross_entropy(output, y)
        return ((output - y) / network.std).square().mean(1).sum()

    @torch.no_grad()
    def scores(self, run, part):
        """Figures for the graphs of a part, on rank 0 -> {name: value}; None without graphs."""
        ids = self.store.split[part]
        if not ids.numel() or not run.ranks.leads:
            return None
        run.model.eval()
        loader = run.loader(ids, shuffle=False, accumulate=1, rank=0, world=1)
        pairs = [(run.model(batch.blocks[0]).cpu(), batch.y.cpu()) for batch in loader]
        output, y = (torch.cat(part).float() for part in zip(*pairs))
        if self.binary:
            found = score("roc_auc", output.view(-1, 1), y.view(-1, 1))
            return None if found is None else {"roc_auc": found}
        return errors(output, y, self.mean)

    def validate(self, run):
        return {"valid": self.scores(run, "valid")}, None

    def finish(self, run, report):
        return report.scores({part: self.scores(run, part) for part in self.store.split})

    def lines(self, args, split, parameters):
        yield f"graphs  {self.store.path}: {len(self.store):,} graphs; {split}"
        layers = f"{args.num_layers} layers, hidden {args.hidden}"
        yield f"model   edge-gated regressor, {layers}, {parameters}"
