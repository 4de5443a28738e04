"""Networks for many small graphs: edge-gated convolutions, pooled over each graph, and ALIGNN, which sees angles.

targets = Regressor(...)(GraphDataset.open("molecules").batch(ids))     # one row for each graph
"""

import torch
from torch import nn
from torch.nn import functional as F

from disk.convert import shaped
from disk.reader import library
from extras.regression import Scale
from model import drawn_seed, drop_byte, dropout, edge_dst, layer_seed, summable

ANGLES = 40  # radial basis functions of the cosine of an angle, as in ALIGNN


class EdgeGatedConv(nn.Module):
    """Edge-gated graph convolution with residuals (Bresson, Laurent, arXiv 1711.07553), as ALIGNN uses it. An edge's
    gate is computed from its features and those of its two ends; a node averages its neighbours' messages, each channel
    weighted by the gates, or with `counts` adds them up. LayerNorm replaces BatchNorm, so that a graph's output does not
    depend on its batch."""

    def __init__(self, width, last, counts=False):
        super().__init__()
        self.counts = counts
        self.nodes = nn.Linear(width, 4 * width)
        self.edges = nn.Linear(width, width)
        self.node_norm = nn.LayerNorm(width)
        self.edge_norm = None if last else nn.LayerNorm(width)

    def forward(self, src, dst, h, e):
        """Update node features h [N, W] and features e [E, W] of edges src [E] -> dst [E]; the last layer leaves e."""
        root, message, gate_src, gate_dst = summable(self.nodes(h)).chunk(4, 1)
        gate = self.edges(e) + gate_src.index_select(0, src) + gate_dst.index_select(0, dst)
        weight = gate.sigmoid()
        sent = weight * message.index_select(0, src)
        if self.counts:
            mixed = sums(sent, dst, len(h))
        else:
            total, weights = sums(torch.cat([sent, weight], 1), dst, len(h)).chunk(2, 1)
            mixed = total / (weights + 1e-6)
        h = h + F.silu(self.node_norm(root + mixed))
        if self.edge_norm is not None:
            e = e + F.silu(self.edge_norm(gate))
        return h, e


class Categories(nn.Module):
    """Embeds categories: uint8 [n, columns] -> [n, width], the sum of an embedding per column."""

    def __init__(self, columns, width):
        super().__init__()
        self.table = nn.Embedding(256 * columns, width)
        self.register_buffer("first", 256 * torch.arange(columns), persistent=False)

    def forward(self, x):
        return self.table(x + self.first).sum(1)


def embedding(dim, dtype, width):
    """Build the map from features [n, dim] to [n, width]: of categories if the dtype is uint8, else of numbers."""
    if dtype == torch.uint8:
        return Categories(dim, width)
    return nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, width))


def convolutions(width, count, pooling):
    """Build `count` layers; with other pooling than "mean" they add up messages."""
    counts = pooling != "mean"
    return nn.ModuleList(EdgeGatedConv(width, i == count - 1, counts) for i in range(count))


def sums(rows, groups, count):
    """Sum rows [n, ...] by group, int [n] -> [count, ...]."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, groups, rows)


def means(rows, groups, count):
    """Average rows [n, W] by group, int [n] -> [count, W]; zero for a group without rows."""
    sizes = sums(torch.ones_like(groups), groups, count)  # bincount waits for a GPU
    return sums(summable(rows), groups, count) / sizes.clamp(min=1).unsqueeze(1)


def maxima(rows, groups, count):
    """Take the maximum of rows [n, W] by group, int [n], in each column -> [count, W]; zero for a group without rows."""
    places = groups.long().unsqueeze(1).expand_as(rows)
    zeros = rows.new_zeros(count, rows.shape[1])
    return zeros.scatter_reduce(0, places, rows, "amax", include_self=False)


def attended(rows, groups, count, scores):
    """Average rows [n, W] by group, int [n], weighted by the softmax of scores [n, 1] in each group -> [count, W]."""
    scores = summable(scores)
    top = maxima(scores.detach(), groups, count)
    weights = (scores - top.index_select(0, groups)).exp()
    totals = sums(torch.cat([weights * rows, weights], 1), groups, count)
    return totals[:, :-1] / totals[:, -1:].clamp(min=1e-12)


# of --pooling; attention also takes scores of the rows
POOLS = {
    "sum": lambda rows, *groups: sums(summable(rows), *groups),
    "mean": means,
    "max": maxima,
    "attention": attended,
}


def line_graph(indptr, indices, vectors):
    """Pair the bonds of a batch that share an atom, u -> v and v -> w, except a bond and the way back over it.

    Args:
        indptr [N+1], indices [E]: as of a `GraphBatch`. vectors: float [E, 3], which tell bonds in a crystal apart that
            join the same two atoms.

    Returns:
        first, second: int32 [L], positions of the two bonds among the E, in ascending order of the second.

    Raises:
        StoreError: for vectors of another shape, as of a batch without.
    """
    vectors = shaped("edge_vector", vectors, len(indices), 3).detach().float().contiguous()
    indptr = indptr.int()
    indices = indices.int()
    counts = indptr.diff().index_select(0, indices)
    most = int(counts.sum())
    if indices.device.type == "cpu" and (native := library("line_graph")):
        first = indices.new_empty(most)
        second = indices.new_empty(most)
        nodes = len(indptr) - 1
        count = native.bond_pairs(indptr, indices, nodes, vectors, first, second)
        return first[:count], second[:count]
    second = torch.repeat_interleave(counts, output_size=most)
    before = counts.cumsum(0) - counts
    place = torch.arange(most, device=indices.device) - before[second]
    first = indptr[indices[second]] + place
    dst = edge_dst(indptr, indices)
    apart = (vectors[first] + vectors[second]).square().sum(1)
    back = (indices[first] == dst[second]) & (apart <= 1e-6 * vectors[first].square().sum(1))
    return first[~back].int(), second[~back].int()


class Regressor(Scale):
    """Edge-gated convolutions, pooling over the nodes of each graph, and a two-layer head.

    node_dim, edge_dim: F, D; a dtype of uint8 stands for categories, others for numbers. hidden: width W. out_dim: T.
    pooling: of `POOLS`; except with "mean", layers add up messages, too. dropout: in the head, between its two layers, with a mask as in `GNN`, in which each graph is a row.
    Buffers mean and std, float [T]: of the targets; the layers predict standardised ones. size: nodes of a graph in the mean,
    by which sums are divided.
    """

    name = "edge-gated"
    uses_vectors = False

    def __init__(
        self,
        node_dim,
        edge_dim,
        hidden,
        out_dim,
        *,
        node_dtype,
        edge_dtype,
        num_layers,
        dropout,
        pooling="mean",
    ):
        super().__init__(out_dim)
        self.pooling = pooling
        self.nodes = embedding(node_dim, node_dtype, hidden)
        self.edges = embedding(edge_dim, edge_dtype, hidden)
        self.layers = convolutions(hidden, num_layers, pooling)
        # the third does nothing: it keeps the name of the last one's weights
        inner = nn.Linear(hidden, hidden)
        self.head = nn.Sequential(inner, nn.SiLU(), nn.Identity(), nn.Linear(hidden, out_dim))
        self.drop = drop_byte(dropout)
        if pooling == "attention":
            self.scores = nn.Linear(hidden, 1)
        # not in early checkpoints, which have means
        if pooling == "sum":
            self.register_buffer("size", torch.ones(()))

    def forward(self, graph, ids=None, key=None):
        """Predict targets [G, T] for a batch of graphs with .indptr, .indices, .graph_ids, .x, .e and .y [G, T].

        In training, ids int64 [G] of the graphs (None: their positions) and `key`, an int, as for `GNN`, key dropout.
        """
        dst = torch.repeat_interleave(graph.indptr.diff(), output_size=graph.indices.numel())
        x, e = (rows if rows.dtype == torch.uint8 else rows.float() for rows in (graph.x, graph.e))
        h = self.nodes(x)
        e = self.edges(e)
        h = self.convolved(graph, dst, h, e)
        inner, activation, _, last = self.head
        groups = graph.graph_ids, len(graph.y)
        if self.pooling == "attention":
            groups += (self.scores(h),)
        h = POOLS[self.pooling](h, *groups)
        if self.pooling == "sum":
            h = h / self.size
        h = activation(inner(h))
        if self.training and self.drop:
            ids = torch.arange(len(h), device=h.device) if ids is None else ids
            seed = layer_seed(drawn_seed() if key is None else key, len(self.layers))
            h = dropout(h, ids, seed, self.drop)
        return super().forward(last(h))

    def convolved(self, graph, dst, h, e):
        """Run the layers on node features h [N, W] and features e [E, W] of edges into dst [E] -> [N, W]."""
        for layer in self.layers:
            h, e = layer(graph.indices, dst, h, e)
        return h


class OwnRegressor(Scale):
    """A network of a user's file, called as net(graph) with a `GraphBatch` -> [G, T], of targets standardised as `Regressor`'s."""

    uses_vectors = False
    pooling = None

    def __init__(self, net, out_dim):
        super().__init__(out_dim)
        self.net = net

    def forward(self, graph, ids=None, key=None):
        """Predict targets or logits [G, T]; StoreError for output of another shape."""
        output = shaped("the output of the model", self.net(graph), len(graph.y), len(self.mean))
        return super().forward(output)


class ALIGNN(Regressor):
    """The regressor that sees angles (Choudhary, DeCost, arXiv 2106.14829): each layer is an edge-gated convolution on the
    line graph, whose nodes are the bonds and whose edges are pairs of them, then one on the graph. A pair's features
    are a radial basis of the cosine of its angle, which stays the same if a graph is rotated.

    Unlike ALIGNN's, pooling begins with the pairs: their mean is added to each bond, that of bonds to each atom. The
    weights of an atom's messages sum to one, so pooling of atoms alone would give all crystals of one element, whose
    messages are all alike, the same output."""

    name = "alignn"
    uses_vectors = True

    def __init__(self, *dims, **options):
        super().__init__(*dims, **options)
        width = self.head[0].in_features
        self.angles = embedding(ANGLES, torch.float32, width)
        self.lines = convolutions(width, len(self.layers), self.pooling)
        self.register_buffer("centres", torch.linspace(-1, 1, ANGLES), persistent=False)

    def convolved(self, graph, dst, h, e):
        first, second = line_graph(graph.indptr, graph.indices, graph.edge_vector)
        ways = F.normalize(graph.edge_vector)
        cosine = -(ways.index_select(0, first) * ways.index_select(0, second)).sum(1, keepdim=True)
        a = self.angles((-((cosine - self.centres) * (ANGLES - 1) / 2).square()).exp())
        for line, layer in zip(self.lines, self.layers):
            e, a = line(first, second, e, a)
            h, e = layer(graph.indices, dst, h, e)
        return h + means(e + means(a, second, len(e)), dst, len(h))


MODELS = {model.name: model for model in (Regressor, ALIGNN)}  # of --model, the default first
