"""What two nodes have in common, as features of a pair: sums over their common neighbours, which tell missing edges better
than embeddings of the two nodes alone (NCN, arXiv 2302.00890; BUDDY, arXiv 2209.15486).

    common = CommonNeighbours(Edges(indptr, indices))
    common.pair_features(pairs)             # float32 [P, len(common.columns)]
    common.against_all(sources)             # float32 [n, V, ...]: of sources with every node

A common neighbour of u and v is an in-neighbour of both, other than u and v themselves: what is said about a pair does not
depend on its own edge, nor on the reverse. Each counts once, by a function of its degree d, see `by_degree`. With times it
counts if both of its edges are seen at the time of the pair, and d is the number of edges that it has then.

A column is log(1 + s) of such a sum s, in units of the weight of a node of typical degree. Without times the next one is the
same of the sum of extras/paths.py. The last columns are about the destination alone: log(1 + n) for n edges into it that
are seen and, with times, how recent the last of them is: log((T + 1) / (a + 1)) for an age a, where T is the span of all
times; 0 without any, or if that one is `ALWAYS` seen. Of these edges only those before the time of the pair are seen: in
training a pair's own edge is at that time.
"""

from functools import cached_property

import torch
from torch.nn import functional as F

from disk.columns import ALWAYS
from extras.paths import Paths, lanes_of
from extras.times import number_before
from loader import from_edge_index
from native import kernels
from sampler import expand

COMMON = "common neighbours", "by 1/sqrt(d)", "Adamic-Adar", "resource allocation"
POPULARITY = "popularity"
LAST_USE = "last use"
PATHS = "paths of 3 edges"
CHUNK = 1 << 22  # most edges to look up at a time


def by_degree(degree):
    """Weigh common neighbours of degree int64 [n], at least 1 -> float32 [n, 4], in the order of `COMMON`."""
    d = degree.clamp(min=1).double()
    weights = torch.ones_like(d), d.rsqrt(), (d + 1).log().reciprocal(), d.reciprocal()
    return torch.stack(weights, -1).float()


class CommonNeighbours:
    """Features of pairs from the edges that carry messages.

    Args:
        edges: `Edges`. times: int64 [M] of its `indices`; None: all edges are seen.
        strict: edges are seen before the time of a pair; False: also at it.

    Attributes:
        columns: their names. weights: float32 [D + 1, 4] of neighbours by degree, relative to that of typical degree.
    """

    def __init__(self, edges, times=None, strict=False):
        self.edges = edges
        self.strict = strict
        more = (PATHS, POPULARITY) if times is None else (POPULARITY, LAST_USE)
        self.columns = COMMON + more
        indptr = edges.indptr
        degree = indptr.diff()
        typical = degree.clamp(min=1).double().log().mean().exp().round().long()
        degrees = torch.arange(int(degree.max()) + 1, device=indptr.device)
        self.weights = by_degree(degrees) / by_degree(typical)
        self.times = self.ordered = None
        if times is None:
            self.paths = Paths(edges, self.weights[degree, 1])
        else:  # of `sources`, and of each list in ascending order
            self.times = times if edges.order is None else times[edges.order]
            list_ids = torch.repeat_interleave(degree)
            order = times.argsort(stable=True)
            self.ordered = times[order[list_ids[order].argsort(stable=True)]]
            dated = times[times != ALWAYS].double()
            self.span = float(dated.max() - dated.min()) if len(dated) else 0.0

    def pair_features(self, pairs, times=None, count=None):
        """Compute the first `count` columns, or all, of pairs int64 [P, 2], at times int64 [P] or, if None, with all edges ->
        float32 [P, count]."""
        code = kernels.load_links(self.edges.sources.dtype, pairs.device)
        sums = self._by_kernel(code, pairs, times) if code else self._summed(pairs, times)
        columns = [sums.log1p()]
        count = count or len(self.columns)
        if count > len(COMMON):
            if self.times is None:
                columns.append(self.paths.between(pairs).log1p().unsqueeze(1))
            columns.append(self._of_destination(pairs[:, 1], times))
        return torch.cat(columns, 1)[:, :count]

    def _by_kernel(self, code, pairs, times):
        lanes = lanes_of(pairs)
        sums = torch.zeros(len(pairs), lanes, len(COMMON), device=pairs.device)
        values = {
            "pairs": pairs.contiguous(),
            "P": len(pairs),
            "lanes": lanes,
            "indptr": self.edges.indptr,
            "sources": self.edges.sources,
            "pair_times": times,
            "times": None if times is None else self.times,
            "ordered": None if times is None else self.ordered,
            "strict": self.strict,
            "weights": self.weights,
            "sums": sums,
        }
        code.run("common", len(pairs) * lanes, values)
        return sums.sum(1)

    def _seen(self, places, times):
        return self.times[places] < times if self.strict else self.times[places] <= times

    def _degrees(self, nodes, times, strict):
        """Count the edges into nodes [n] that are seen at times [n], or all -> int64 [n]."""
        start = self.edges.indptr[nodes]
        degree = self.edges.indptr[nodes + 1] - start
        if times is None:
            return degree
        return number_before(self.ordered, start, degree, times, strict)

    def _summed(self, pairs, times):
        """Sum over common neighbours with torch operations -> float32 [P, 4]."""
        edges = self.edges
        degree = edges.indptr.diff()[pairs]
        few, many = torch.where(degree[:, :1] <= degree[:, 1:], pairs, pairs.flip(1)).unbind(1)
        sums = torch.zeros(len(pairs), len(COMMON), device=pairs.device)
        counts = degree.amin(1)
        for rows in chunks_of(counts, CHUNK):
            places = expand(edges.indptr[few[rows]], counts[rows])
            row = rows.repeat_interleave(counts[rows])
            if times is not None:
                kept = self._seen(places, times[row])
                places = places[kept]
                row = row[kept]
            nodes = edges.sources[places].long()
            nodes, row = _once(nodes, row, pairs)
            if times is None:
                when = None
                kept = edges.has(nodes, many[row])
            else:
                when = times[row]
                seen = lambda places, i: self._seen(places, when[i])  # noqa: B023, E731
                kept = edges.any_of(nodes, many[row], seen)
                when = when[kept]
            degrees = self._degrees(nodes[kept], when, self.strict)
            sums.index_add_(0, row[kept], self.weights[degrees])
        return sums

    def _of_destination(self, nodes, times):
        """Compute the columns of destinations [P] -> float32 [P, columns]."""
        degree = self._degrees(nodes, times, True)
        columns = [degree.float().log1p()]
        if self.times is not None:
            last = self.ordered[(self.edges.indptr[nodes] + degree - 1).clamp(min=0)]
            now = self.ordered.max() if times is None else times
            age = (now.double() - last.double()).clamp(min=0)  # as int64 it may wrap around
            recent = ((self.span + 1) / (age + 1)).log().clamp(min=0)
            columns.append(torch.where(degree > 0, recent, 0).float())
        return torch.stack(columns, 1)

    def against_all(self, sources, count=None):
        """Compute the first `count` columns, or all, of sources int64 [n] with every node, with all edges -> float32
        [n, V, count]."""
        edges = self.edges
        V = edges.indptr.numel() - 1
        indptr, destinations = self.reverse
        first = edges.indptr[sources]
        degree = edges.indptr[sources + 1] - first
        row = torch.repeat_interleave(degree)
        nodes = edges.sources[expand(first, degree)].long()
        nodes, row = _once(nodes, row, sources.unsqueeze(1))
        counts = indptr.diff()[nodes]
        others = destinations[expand(indptr[nodes], counts)].long()
        nodes = nodes.repeat_interleave(counts)
        row = row.repeat_interleave(counts)
        kept = others != nodes
        sums = torch.zeros(len(sources) * V, len(COMMON))
        nodes = nodes[kept]
        sums.index_add_(0, (row * V + others)[kept], self.weights[edges.indptr.diff()[nodes]])
        sums = sums.view(len(sources), V, -1)
        sums[torch.arange(len(sources)), sources] = 0
        columns = [sums.log1p_()]
        count = count or len(self.columns)
        if count > len(COMMON) and self.times is None:
            columns.append(self.paths.from_all(sources).log1p_().unsqueeze(2))
        columns.append(self.node_features.expand(len(sources), -1, -1))
        return torch.cat(columns, 2)[..., :count]

    @cached_property
    def reverse(self):
        """The destinations of each node, see `destinations_of`."""
        return destinations_of(self.edges)

    @cached_property
    def node_features(self):
        """The columns of every node as a destination, with all edges, [V, columns]."""
        nodes = torch.arange(self.edges.indptr.numel() - 1)
        return self._of_destination(nodes, None)


def chunks_of(counts, most):
    """Split rows with `counts` [n] entries each into parts of about `most` entries -> indices of the rows of each."""
    parts = (counts.cumsum(0) // most).unique_consecutive(return_counts=True)[1].tolist()
    return torch.arange(len(counts), device=counts.device).split(parts)


def _once(nodes, row, ends):
    """Keep the first of equal nodes [n] of each row [n], ascending, but none of its `ends` [rows, k] -> (nodes, rows)."""
    kept = (nodes != ends[row].T).all(0)
    kept[1:] &= (nodes[1:] != nodes[:-1]) | (row[1:] != row[:-1])
    return nodes[kept], row[kept]


def destinations_of(edges):
    """List the destinations of each node in `Edges`, each once, in CSR form -> (indptr [V + 1], destinations [n])."""
    destinations = torch.repeat_interleave(edges.indptr.diff())
    reverse = torch.stack([destinations, edges.sources.long()])
    first = F.pad((reverse[:, 1:] != reverse[:, :-1]).any(0), (1, 0), value=True)
    return from_edge_index(reverse[:, first], edges.indptr.numel() - 1)
