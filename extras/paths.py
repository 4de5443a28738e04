"""Paths of three edges between the nodes of a pair, as a feature of it. They tell missing edges where common neighbours are
none, or many (Kovács et al., Nature Communications 10, 1240, 2019: L3).

A path between u and v is of four different nodes, u <- a <- b -> v, so that no edge between u and v, in either direction, is on
it. It weighs 1 / sqrt(d) of both a and b, of in-degree d, in units of the weight of a node of typical degree; equal edges are one.
"""

from functools import cached_property

import torch

from native import kernels
from sampler import expand

MANY = 100_000  # edges of two steps from a source, which take longer than a training step for it
CHUNK = 1 << 22  # most elements of a dense matrix


def num_steps(indptr, indices, sources):
    """Count the edges of two steps from sources int64 [n], in the mean: what paths from a source cost."""
    degree = indptr.diff()
    neighbours = indices[expand(indptr[sources], degree[sources])].long()
    return int(degree[neighbours].sum()) // max(len(sources), 1)


class Paths:
    """Counts weighted paths in a graph. edges: `Edges`. weights: float32 [V] of nodes, on their device."""

    def __init__(self, edges, weights):
        self.edges = edges
        self.weights = weights

    def between(self, pairs):
        """Sum the weights of the paths of each pair int64 [P, 2] -> float32 [P]."""
        edges = self.edges
        code = kernels.load_links(edges.sources.dtype, pairs.device)
        if not code:
            return self._between(pairs)
        lanes = 128 if pairs.is_cuda else 4
        sums = torch.zeros(len(pairs), lanes, device=pairs.device)
        values = {
            "pairs": pairs.contiguous(),
            "P": len(pairs),
            "lanes": lanes,
            "V": len(self.weights),
            "indptr": edges.indptr,
            "sources": edges.sources,
            "weights": self.weights,
            "sums": sums,
        }
        code.run("paths", sums.numel(), values)
        return sums.sum(1)

    def from_all(self, sources):
        """Sum the weights of the paths from sources int64 [n] to every node -> float32 [n, V]."""
        nodes = torch.arange(len(self.weights))
        return self.between(torch.cartesian_prod(sources, nodes)).view(len(sources), -1)

    def _between(self, pairs):
        """`between` as torch operations."""
        nodes, row = pairs[:, 0].unique(return_inverse=True)
        sums = self.weights.new_zeros(len(pairs))
        rows = max(1, CHUNK // len(self.weights))
        for first in range(0, len(nodes), rows):
            mine = (row // rows == first // rows).nonzero().squeeze(1)
            every = self._to_all(nodes[first : first + rows])
            sums[mine] = every[row[mine] - first, pairs[mine, 1]]
        return sums

    def _to_all(self, sources):
        """Sum the weights of the paths from sources int64 [n] to every node -> float32 [n, V]."""
        weights = self.weights.double()
        matrix = self.matrix
        before = matrix.index_select(0, sources).to_dense()
        behind = matrix.t().index_select(0, sources).to_dense()
        steps = (matrix.t() @ (before * weights).t()).t()  # of two edges
        steps[torch.arange(len(sources)), sources] = 0
        sums = (matrix @ (steps * weights).t()).t()
        back = matrix @ weights - behind * weights[sources].unsqueeze(1)  # by v itself as a
        return (sums - before * weights * back).clamp(min=0).float()

    @cached_property
    def matrix(self):
        """Sparse float64 [V, V], 1 where an edge goes from the node of the column to that of the row, another one."""
        V = len(self.weights)
        ends = torch.stack([torch.repeat_interleave(self.edges.indptr.diff()), self.edges.sources])
        ends = ends[:, ends[0] != ends[1]]
        ones = torch.ones(ends.shape[1], dtype=torch.float64, device=ends.device)
        matrix = torch.sparse_coo_tensor(ends, ones, (V, V), check_invariants=True).coalesce()
        matrix.values().fill_(1)  # of equal edges
        return matrix
