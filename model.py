"""GraphSAGE over sampled blocks, and exact layer-wise inference over the whole graph.

This file stands alone: copy it into your own code. A block is anything with the fields of `sampler.Block`.

    model = SAGE(in_dim, hidden, num_classes, num_layers=3)
    logits = model(blocks, x)                       # x: features of blocks[0].src_nodes -> one row for each seed
    logits = inference(model, indptr, indices, x)   # all V nodes, all their neighbours

Letters: V nodes of the graph; S destinations, N sources, E edges of a block; F, D feature widths; C classes.
"""

import torch
from torch import nn
from torch.nn import functional as F


def mean_neighbours(indptr, indices, h):
    """Mean of the rows of h over every destination's edges; zero for a destination without edges.

    Args:
        indptr: [S+1], indices: [E] rows of h, of one integer dtype.
        h: float [N, D].

    Returns:
        [S, D]. One fused gather and segment mean: no [E, D] intermediate.
    """
    return F.embedding_bag(indices, h, indptr, mode="mean", include_last_offset=True)


class SAGEConv(nn.Module):
    """GraphSAGE layer, mean aggregator (Hamilton, Ying, Leskovec, arXiv 1706.02216): W_self h_v + W_neigh mean(h_u)."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.self_linear = nn.Linear(in_dim, out_dim)
        self.neigh_linear = nn.Linear(in_dim, out_dim, bias=False)
        self.project_first = in_dim > out_dim  # the mean commutes with W_neigh: aggregate the narrower side

    def forward(self, block, h):
        """h [N, F] of the block's sources -> [S, D] of its destinations."""
        return self.combine(block.indptr, block.indices, self.message(h), h[: block.num_dst])

    def message(self, h):
        """What neighbours send: [N, F] -> [N, D] when projecting first, else h itself."""
        return self.neigh_linear(h) if self.project_first else h

    def combine(self, indptr, indices, message, h_dst):
        """Aggregate messages [N, .] over the edges and join them with the destinations' own h_dst [S, F]."""
        mean = mean_neighbours(indptr, indices, message)
        return self.self_linear(h_dst) + (mean if self.project_first else self.neigh_linear(mean))


class SAGE(nn.Module):
    """GraphSAGE: num_layers convolutions with ReLU and dropout between them.

    Args:
        in_dim: F. hidden: width of the inner layers. out_dim: C.
        num_layers: one for each block. dropout: probability, applied after each inner layer.
    """

    def __init__(self, in_dim, hidden, out_dim, *, num_layers=3, dropout=0.5):
        super().__init__()
        widths = [in_dim] + [hidden] * (num_layers - 1) + [out_dim]
        self.layers = nn.ModuleList(SAGEConv(a, b) for a, b in zip(widths, widths[1:]))
        self.dropout = dropout

    def forward(self, blocks, x):
        """x [N, F] features of blocks[0].src_nodes -> logits [S, C] of the last block's destinations."""
        for layer, block in zip(self.layers, blocks, strict=True):
            x = self.activate(layer, layer(block, x))
        return x

    def activate(self, layer, h):
        """What stands between two layers; nothing after the last."""
        return h if layer is self.layers[-1] else F.dropout(F.relu(h), self.dropout, self.training)


@torch.no_grad()
def inference(model, indptr, indices, x, *, chunk=65536):
    """Exact predictions of all nodes from all their neighbours, layer by layer.

    Args:
        model: SAGE. indptr: int64 [V+1], indices: [M]: the graph. x: float [V, F], on the model's device or moved there.
        chunk: destinations handled at a time; bounds the memory beside two [V, width] tables.

    Returns:
        Logits [V, C] on the model's device.
    """
    training, device, num_nodes = model.training, next(model.parameters()).device, indptr.numel() - 1
    model.eval()
    h = x.to(device)
    bounds = list(range(0, num_nodes, chunk)) + [num_nodes]
    for layer in model.layers:
        message = torch.cat([layer.message(h[a:b]) for a, b in zip(bounds, bounds[1:])]) if layer.project_first else h
        out = h.new_empty(num_nodes, layer.self_linear.out_features, dtype=torch.float32)
        for a, b in zip(bounds, bounds[1:]):
            first, last = int(indptr[a]), int(indptr[b])
            edges = indices[first:last].to(device)
            offsets = (indptr[a : b + 1] - first).to(device, edges.dtype)
            out[a:b] = model.activate(layer, layer.combine(offsets, edges, message, h[a:b]))
        h = out
    model.train(training)
    return h
