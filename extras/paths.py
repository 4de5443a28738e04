"""Paths of three edges between the nodes of a pair, as a feature of it. They tell missing edges where common neighbours are
none, or many (Kovács et al., Nature Communications 10, 1240, 2019: L3).

A path between u and v is of four different nodes, u <- a <- b -> v, so that no edge between u and v, in either direction, is on
it. It weighs 1 / sqrt(d) of both a and b, of in-degree d, in units of the weight of a node of typical degree; equal edges are one.
Neither a nor b is a hub: of the pairs of a dense graph such paths tell less, and with them one source may take millions of steps.
"""

from functools import cached_property

import torch

from native import kernels

# a node with more edges than both of these is a hub
HUB = 128
MEANS = 4  # times the mean
CHUNK = 1 << 22  # most elements of a dense matrix
LANES = 1024  # most threads of a GPU for a pair
THREADS = 1 << 21  # and for all pairs, about


def lanes_of(pairs):
    """Return how many threads read the neighbours of each of pairs [P, 2]: on a GPU many, for those of a hub."""
    return min(LANES, THREADS // max(len(pairs), 1) + 1) if pairs.is_cuda else 1


class Paths:
    """Counts weighted paths in a graph. edges: `Edges`. weights: float32 [V] of nodes, on their device."""

    def __init__(self, edges, weights):
        self.edges = edges
        degree = edges.indptr.diff()
        most = max(HUB, MEANS * len(edges.sources) // max(len(degree), 1))
        self.weights = weights.masked_fill(degree > most, 0)

    def between(self, pairs):
        """Sum the weights of the paths of each pair int64 [P, 2] -> float32 [P]."""
        if pairs.is_cuda:
            return self._sums(pairs)
        order = pairs[:, 0].argsort()  # pairs of one source share the steps from it
        sums = torch.empty(len(pairs))
        sums[order] = self._sums(pairs[order])
        return sums

    def _sums(self, pairs):
        """`between`, on the CPU faster for pairs of the same source in a row."""
        edges = self.edges
        code = kernels.load_links(edges.sources.dtype, pairs.device)
        if not code:
            return self._by_torch(pairs)
        lanes = lanes_of(pairs)
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
        return self._sums(torch.cartesian_prod(sources, nodes)).view(len(sources), -1)

    def _by_torch(self, pairs):
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
