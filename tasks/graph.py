"""Targets of many small graphs: an edge-gated regressor, batches read from disk, scores.

targets = Regressor(...)(GraphDataset.open("molecules").batch(ids))     # one row for each graph

python train.py --task graph --dataset molecules.npz
"""

import torch
from torch import nn
from torch.nn import functional as F

from disk.files import StoreError, plural
from disk.graphs import GraphBatch, GraphDataset
from features import CudaCopies, Fetched
from model import summable
from sources.splits import say_empty_parts
from tasks.metrics import binary_cross_entropy, errors, score
from tasks.task import OF_LINKS, Task


class EdgeGatedConv(nn.Module):
    """Edge-gated graph convolution with residuals (Bresson, Laurent, arXiv 1711.07553), as ALIGNN uses it. An edge's
    gate is computed from its features and those of its two ends; a node averages its neighbours' messages, each channel
    weighted by the gates. LayerNorm replaces BatchNorm, so that a graph's output does not depend on its batch."""

    def __init__(self, width, last=False):
        super().__init__()
        self.nodes, self.edges = nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.node_norm, self.edge_norm = nn.LayerNorm(width), None if last else nn.LayerNorm(width)

    def forward(self, src, dst, h, e):
        """Update node features h [N, W] and features e [E, W] of edges src [E] -> dst [E]; the last layer leaves e."""
        root, message, gate_src, gate_dst = summable(self.nodes(h)).chunk(4, 1)
        gate = self.edges(e) + gate_src.index_select(0, src) + gate_dst.index_select(0, dst)
        weight = gate.sigmoid()
        both = torch.cat([weight * message.index_select(0, src), weight], 1)  # [E, 2W]
        sums = both.new_zeros(h.shape[0], both.shape[1]).index_add_(0, dst, both)
        total, weights = sums.chunk(2, 1)
        h = h + F.silu(self.node_norm(root + total / (weights + 1e-6)))
        return h, e if self.edge_norm is None else e + F.silu(self.edge_norm(gate))


class Categories(nn.Module):
    """Embeds categories: uint8 [n, columns] -> [n, width], the sum of an embedding per column."""

    def __init__(self, columns, width):
        super().__init__()
        self.table = nn.Embedding(256 * columns, width)
        self.register_buffer("first", 256 * torch.arange(columns), persistent=False)

    def forward(self, x):
        return self.table(x + self.first).sum(1)


class Regressor(nn.Module):
    """Edge-gated convolutions, mean pooling over the nodes of each graph, and a two-layer head.

    node_dim, edge_dim: F, D; a dtype of uint8 stands for categories, others for numbers. hidden: width W. out_dim: T.
    dropout: in the head. Buffers mean and std, float [T]: of the targets; the layers predict standardised ones.
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
        """Predict targets [G, T] for a batch of graphs with .indptr, .indices, .graph_ids, .x, .e and .y [G, T]."""
        dst = torch.repeat_interleave(graph.indptr.diff(), output_size=graph.indices.numel())
        x, e = (rows if rows.dtype == torch.uint8 else rows.float() for rows in (graph.x, graph.e))
        h, e = self.nodes(x), self.edges(e)
        for layer in self.layers:
            h, e = layer(graph.indices, dst, h, e)
        pooled = h.new_zeros(len(graph.y), h.shape[1]).index_add_(0, graph.graph_ids, h)
        sizes = graph.graph_ids.bincount(minlength=len(graph.y)).clamp(min=1)
        return self.head(pooled / sizes.unsqueeze(1)) * self.std + self.mean


class GraphTask(Task):
    """Regression on whole graphs, or classification if every target of its split is 0 or 1 (`binary`); seeds are graph ids.
    mean, std: float64 [T] of the training targets, which the regression loss is scaled by."""

    name, examples, placed = "graph", "graphs", False
    widths = "node_dim", "edge_dim", "target_dim", "node_dtype", "edge_dtype"
    unused = {
        "is for --task link, --task is graph": OF_LINKS,
        "has no effect with --task graph: leave it out": "fanout model norm residual input_dropout "
        "checkpoint_activations backend mode cache lookahead cuda_graph",
        "is not for --task graph": "sampler temporal window early_stop weights split predict runs",
    }

    def __init__(self, args, path, say=print):
        self.store = graphs = GraphDataset.open(path)
        graphs.check_split()
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        say_empty_parts(graphs.split, "graphs", say)

    @staticmethod
    def network(args, widths, custom=None):
        dtypes = {name: getattr(torch, widths[name]) for name in ("node_dtype", "edge_dtype")}
        sizes = widths["node_dim"], widths["edge_dim"], args.hidden, widths["target_dim"]
        return Regressor(*sizes, num_layers=args.num_layers, dropout=args.dropout, **dtypes)

    def attach(self, ranks, args, *_):
        """Compute mean and std of the training targets; on a GPU, prepare to copy batches to it."""
        self.copies = CudaCopies(ranks.device, args.sample_threads) if ranks.gpus else None
        graphs = self.store
        ids = torch.cat([*graphs.split.values()])  # those of training first
        y = torch.cat([graphs.batch(part).y for part in ids.split(1024)]).double()
        self.binary, y = bool(((y == 0) | (y == 1)).all()), y[: len(graphs.split["train"])]
        self.mean, self.std = y.mean(0), y.std(0, correction=0).clamp(min=1e-12)

    def prepare(self, network):
        if not self.binary:
            network.mean.copy_(self.mean), network.std.copy_(self.std)

    def load(self, batch, slot):
        """Read the graphs with ids batch.seeds to the training device -> Fetched; there is no sampling."""
        graph = self.store.batch(batch.seeds)
        if not self.copies:
            return Fetched([graph], graph.x, graph.y)
        with self.copies.stream(slot):
            graph = GraphBatch(*(self.copies.copy(tensor.pin_memory()) for tensor in graph))
            return Fetched([graph], graph.x, graph.y, self.copies.event())

    def output(self, run, network, batch, key):
        """Compute targets, or logits if `binary`, of a batch's graphs [G, T]."""
        return network(batch.blocks[0])

    def loss(self, network, output, y):
        """Sum over graphs of the mean over targets of the binary cross-entropy or the squared error, in units of the
        targets' standard deviation; targets are rounded as outputs are: that of a constant target is no error."""
        if self.binary:
            return binary_cross_entropy(output, y)
        return ((output - y.to(output.dtype)) / network.std).square().mean(1).sum()

    def scores(self, run, part):
        """Compute the metrics of a part -> {name: value}, the same on all ranks; None without graphs."""
        ids = self.store.split[part]
        if not ids.numel():
            return None
        both = lambda batch: torch.cat([run.model(batch.blocks[0]), batch.y.double()], 1)  # noqa: E731
        loader = run.loader(ids, shuffle=False, accumulate=1)
        rows = run.rows(run.model, loader, len(self.store), both)
        output, y = rows[ids].chunk(2, 1)
        if self.binary:
            auc = score("roc_auc", output, y)
            return None if auc is None else {"roc_auc": auc}
        return errors(output, y, self.mean)

    def validate(self, run):
        return {"valid": self.scores(run, "valid")}, None

    def finish(self, run, report):
        return report.scores({part: self.scores(run, part) for part in self.store.split})

    def lines(self, args, split, parameters):
        yield f"graphs  {self.store.path}: {len(self.store):,} graphs; {split}"
        layers = f"{plural(args.num_layers, 'layer')}, hidden {args.hidden}"
        yield f"model   edge-gated regressor, {layers}, {parameters}"
