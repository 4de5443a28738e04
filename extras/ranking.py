"""Scores of pairs of nodes, and their evaluation: negatives, scorers, ranks. The training pairs are those of extras/links.py.

    negatives = Negatives(graph.known_edges, graph.num_nodes)
    others = negatives.draw(key, numbers, pairs, 100)               # int64 [P, 100], to which the sources have no edge
    figures = Evaluation(graph)(Scorer("dot", width), embeddings, "test")       # graph: of `split_edges`

Draws depend only on a key and the number of the pair. P pairs have K negatives each; D is the width of an embedding.
"""

import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from disk.files import SPLITS, StoreError
from extras import number_before
from extras.common_neighbours import COMMON, CommonNeighbours, chunks_of, destinations_of
from extras.edge_split import HELD_OUT, Edges, there_since
from native import kernels
from sampler import expand, mix, prefix_sum, random_bits
from tasks.metrics import METRICS, at_k, check_scores, metrics_with, ranking

RANKED_AGAINST = 100  # fixed negatives per pair in a graph of more than SMALL nodes
SMALL = 1 << 14  # with up to this many nodes a pair is ranked against all of them
MOST = 1 << 17  # most pairs of a part to evaluate
MOST_TIMED = 1 << 13  # the same for pairs with times, which need separate embeddings
CHUNK = 1 << 22  # most scores, or elements of their embeddings, to hold at a time
TRIES = 64  # draws of a negative before all nodes are looked up
EVALUATION = mix(0xE7A1)  # key of the fixed negatives, the same in every run


# ---- negatives


class Negatives:
    """Draws negatives: nodes that replace the destination of a pair and have its type. Each is a function of a key, the
    number of its pair and its own number.

    Args:
        edges: Edges to avoid; None: only pairs of a node with itself are avoided.
        degrees: [V]: a node is drawn in proportion to its degree^0.75 (word2vec, arXiv 1310.4546); None: uniformly.
        counts: nodes of each type, in the order of their ids; None or empty: all are of one type.
    """

    def __init__(self, edges, num_nodes, degrees=None, counts=None):
        self.edges = edges
        self.num_nodes = num_nodes
        self.ends = prefix_sum(torch.tensor(counts or [num_nodes]))
        self.upto = None
        if degrees is not None:  # integers have the same sum on every device
            weights = (degrees.double().pow(0.75) * 1024).long()
            self.upto = prefix_sum(weights)

    def same_type(self, nodes):
        """Look up the range of ids of each node's type -> (first, end), int64 of the shape of nodes."""
        self.ends = self.ends.to(nodes.device)
        kind = torch.bucketize(nodes.contiguous(), self.ends[1:], right=True)
        return self.ends[kind], self.ends[kind + 1]

    def _node(self, key, numbers, which, first, end):
        """Draw nodes in [first, end), draw `which` of the pairs with these numbers; all int64 of the same shape."""
        drawn = random_bits(key, numbers, which, bits=53)
        if self.upto is None:
            # masked: the product of 2^31 nodes or more is unsigned
            return first + ((drawn >> 21) * (end - first) >> 32 & (1 << 32) - 1)
        before = self.upto[first]
        place = before + (drawn.double() * ((self.upto[end] - before).double() / 2**53)).long()
        return torch.searchsorted(self.upto[1:], place, right=True)

    def _bad(self, source, node):
        bad = source == node
        return bad | self.edges.has(source, node) if self.edges else bad

    def draw(self, key, numbers, pairs, count):
        """Draw `count` negative destinations for each pair, to which its source has no edge -> int64 [P, count]. key:
        int of 64 bits. numbers: int64 [P], of the pairs. pairs: int64 [P, 2]. StoreError for a source that has an edge
        to every node."""
        return self.looked_up(pairs, *self.attempts(key, numbers, pairs, count))

    def attempts(self, key, numbers, pairs, count):
        """Draw as `draw`, each negative TRIES times at most -> (nodes int64 [P, count]; bool [P, count], those that are no
        negatives still). Does not wait for a GPU, unless it has no kernels."""
        edges = self.edges
        code = kernels.load_links(edges.sources.dtype if edges else torch.int32, pairs.device)
        if not code:
            return self._attempts(key, numbers, pairs, count)
        self.ends = self.ends.to(pairs.device)
        node = pairs.new_empty(len(pairs), count)
        bad = torch.empty_like(node, dtype=torch.bool)
        values = {
            "pairs": pairs.contiguous(),
            "numbers": numbers.contiguous(),
            "n": node.numel(),
            "count": count,
            "tries": TRIES,
            "key": key,
            "indptr": edges and edges.indptr,
            "sources": edges and edges.sources,
            "ends": self.ends,
            "types": len(self.ends) - 1,
            "upto": self.upto,
            "nodes": node,
            "bad": bad,
        }
        code.run("negatives", node.numel(), values)
        return node, bad

    def _attempts(self, key, numbers, pairs, count):
        """`attempts` as torch operations."""
        which = torch.arange(count, device=pairs.device).expand(len(pairs), count)
        numbers = numbers.unsqueeze(1).expand_as(which)
        source = pairs[:, :1].expand_as(which)
        first, end = (ids.expand_as(which) for ids in self.same_type(pairs[:, 1:]))
        node = self._node(key, numbers, which, first, end)
        bad = self._bad(source, node)
        for attempt in range(1, TRIES):
            places = bad.nonzero(as_tuple=True)
            if not len(places[0]):
                break
            draws = which[places] + attempt * count
            node[places] = self._node(key, numbers[places], draws, first[places], end[places])
            bad[places] = self._bad(source[places], node[places])
        return node, bad

    def looked_up(self, pairs, node, bad):
        """Replace the bad of the nodes from `attempts`, whose sources have edges to most nodes of a type: take one of its
        others or, if there is none, of all nodes."""
        source = pairs[:, :1].expand_as(node)
        first, end = (ids.expand_as(node) for ids in self.same_type(pairs[:, 1:]))
        left = torch.stack([source[bad], first[bad], end[bad]], 1).unique(dim=0)
        for hub, low, high in left.tolist():
            nodes = torch.arange(low, high, device=pairs.device)
            width = 64
            while not len(free := nodes[~self._bad(torch.full_like(nodes, hub), nodes)]):
                if len(nodes) == self.num_nodes:
                    raise StoreError(
                        f"node {hub} has an edge to every node, so it has no negative: --edge-split none"
                        " --unchecked-negatives trains without evaluation"
                    )
                width = min(8 * width, self.num_nodes)
                nodes = (hub + torch.arange(width, device=pairs.device)) % self.num_nodes
            places = bad & (source == hub) & (first == low)
            node[places] = free[node[places] % len(free)]
        return node

    def without(self, pairs):
        """Find the pairs [P, 2] whose source has an edge to every node of the destination's type but itself: they have
        no negative of that type -> bool [P]."""
        ranges = torch.stack([pairs[:, 0], *self.same_type(pairs[:, 1])], 1)
        ranges, which = ranges.unique(dim=0, return_inverse=True)
        source, first, end = ranges.unbind(1)
        degree = self.edges.sources.bincount(minlength=self.num_nodes)[source]
        full = degree >= end - first - 1
        counts = (end - first) * full
        for part in chunks_of(counts, CHUNK):
            hub = part.repeat_interleave(counts[part])
            free = ~self._bad(source[hub], expand(first[part], counts[part]))
            full[hub[free]] = False
        return full[which]

    def pairs(self, key, pairs):
        """Draw a pair without an edge for each of `pairs` [P, 2], with a drawn source as well -> int64 [P, 2]."""
        numbers = torch.arange(len(pairs))
        source = self._node(mix(key), numbers, 0 * numbers, *self.same_type(pairs[:, 0]))
        pairs = torch.stack([source, pairs[:, 1]], 1)
        return torch.stack([source, self.draw(key, numbers, pairs, 1).squeeze(1)], 1)


def distinct(x):
    """List the distinct values of an int64 tensor, ascending -> (values, index of each of x in these), as `unique` does. A
    GPU is not waited for: there values have as many entries as x, with zeros behind the distinct ones."""
    if not x.numel() or not kernels.is_gpu(x.device):
        return x.unique(return_inverse=True)
    ordered, order = x.flatten().sort()
    rank = prefix_sum(ordered[1:] != ordered[:-1])
    place = torch.empty_like(rank).scatter_(0, order, rank)
    return torch.zeros_like(ordered).scatter_(0, rank, ordered), place.view_as(x)


def at_times(nodes, times, num_nodes):
    """Find the distinct (node, time), int64 of one shape -> (nodes [S], times [S], index of each, of that shape); on a GPU
    more of these follow, see `distinct`."""
    values, rank = distinct(times)
    both, place = distinct(nodes + num_nodes * rank)
    return both % num_nodes, values[both // num_nodes], place


# ---- scorers


# scorers that see what the nodes of a pair have in common: how many columns of `CommonNeighbours`, of pairs without times
COLUMNS = {"ncn": len(COMMON), "paths": len(COMMON) + 1}


class Scorer(nn.Module):
    """Scores pairs of embeddings, as the logit of an edge: "dot", the dot product; "distmult", with a weight per column
    (arXiv 1412.6575); "mlp", a network with one hidden layer on the elementwise product; "ncn", as distmult of embeddings of
    length 3, plus a weighted sum of what the nodes have in common (`CommonNeighbours`: its first `columns`; None: as in COLUMNS); "paths",
    the same."""

    def __init__(self, kind, width, columns=None):
        super().__init__()
        self.kind = kind
        self.columns = COLUMNS.get(kind, 0) if columns is None else columns
        weighted = self.columns or kind == "distmult"
        self.relation = nn.Parameter(torch.ones(width)) if weighted else 1.0
        if kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        if self.columns:
            self.common = nn.Linear(self.columns, 1)
            nn.init.constant_(self.common.weight, 0.4 / self.columns)

    def forward(self, source, destination, features=None):
        """Score source [..., D] with destination [..., D], which broadcast -> logits [...]. features: [..., columns] of the
        pairs, or more columns, if it takes them."""
        if self.kind == "mlp":
            return self.mlp(source * destination).squeeze(-1)
        source, destination = self._scaled(source, destination)
        return self._with_common((source * self.relation * destination).sum(-1), features)

    def _scaled(self, *embeddings):
        if self.columns:
            return [3 * F.normalize(h, dim=-1) for h in embeddings]
        return embeddings

    def _with_common(self, logits, features):
        if not self.columns:
            return logits
        features = features[..., : self.columns].to(logits.dtype)
        # times 5: Adam changes few large weights too slowly otherwise
        return logits + 5 * self.common(features).squeeze(-1)

    def on_host(self, dtype):
        """Return a copy in host memory."""
        return copy.deepcopy(self).to("cpu", dtype)

    def against_all(self, source, table, features=None):
        """Score source [n, D] with every row of table [V, D] -> logits [n, V]. features: [n, V, columns]."""
        if self.kind == "mlp":
            return self(source.unsqueeze(1), table)
        source, table = self._scaled(source, table)
        return self._with_common(source * self.relation @ table.t(), features)


class Baseline(NamedTuple):
    """A scorer without a network: a column of `CommonNeighbours`."""

    column: int
    kind = "baseline"

    @property
    def columns(self):
        return self.column + 1

    def __call__(self, source, destination, features):
        return features[..., self.column]

    against_all = __call__

    def on_host(self, dtype):
        return self


# ---- evaluation


class Examples(NamedTuple):
    """What a part is evaluated on. If pairs have times, `nodes` and `times` say whose embeddings are needed and the ends
    of pairs are indices into these; else they are node ids."""

    pairs: torch.Tensor  # int64 [P, 2], source and destination
    random: torch.Tensor  # int64 [P, 2], without an edge
    others: torch.Tensor | None  # int64 [P, K], nodes to rank each pair against; None: all
    ranked: torch.Tensor  # bool [P], which of the pairs have anything to be ranked against
    queries: (
        torch.Tensor
    )  # int64 [P], the same for the same source, time, and type of the destination
    nodes: torch.Tensor | None = None  # int64 [n]
    times: torch.Tensor | None = None  # int64 [n]


class Evaluation:
    """Scores of embeddings and a scorer on the pairs of a part: MRR and Hits@K of each pair's rank among pairs with the
    same source, MAP, NDCG and Recall at k of each source's list of these and all of its pairs, ROC-AUC and average precision
    against as many random pairs without an edge. graph: of `split_edges`.

    A pair is ranked against all nodes of its destination's type if the graph has at most SMALL nodes, without other
    edges of the source, else against RANKED_AGAINST fixed ones; ties get their mean rank. A pair whose source has an edge
    to every such node has nothing to be ranked against: MRR and Hits@K leave it out, and are None if no pair is left.
    Negatives are checked against the whole graph and are the same in every run. Of more than MOST pairs every n-th is
    evaluated.

    If pairs have times, both ends and all negatives have embeddings at the time of the pair; then a pair is ranked
    against fixed nodes in any graph, and at most MOST_TIMED pairs are evaluated.

    historical: negatives are earlier destinations of the same source (`_earlier`), also those of the ROC-AUC and average
    precision; where there are fewer, the others are random.

    Attributes:
        examples: {part: Examples}. timed: pairs have times. common: `CommonNeighbours` of the edges that carry messages, for
        scorers with `columns`.
    """

    def __init__(self, graph, strict=False, historical=False, k=10):
        self.graph = graph
        self.k = k
        self.timed = graph.pair_times is not None
        self.common = CommonNeighbours(
            Edges(graph.indptr, graph.indices), there_since(graph) if self.timed else None, strict
        )
        self.negatives = Negatives(graph.known_edges, graph.num_nodes, counts=graph.node_counts)
        self.historical = historical
        self.lists = None
        if graph.num_nodes <= SMALL and not self.timed:
            self.lists = destinations_of(graph.known_edges)
        self.examples = {part: self._examples(part) for part in HELD_OUT}

    def _examples(self, part):
        pairs = self.graph.pairs[part]
        count = min(len(pairs), MOST_TIMED if self.timed else MOST)
        chosen = torch.arange(count) * len(pairs) // max(count, 1)
        pairs = pairs[chosen]
        times = self.graph.pair_times[part][chosen] if self.timed else 0 * chosen
        asked = torch.stack([pairs[:, 0], times, self.negatives.same_type(pairs[:, 1])[0]])
        queries = asked.unique(dim=1, return_inverse=True)[1]
        key = mix(EVALUATION ^ SPLITS.index(part))
        random = self.negatives.pairs(mix(key), pairs)
        ranked = ~self.negatives.without(pairs)
        others = None
        if not self.lists:
            numbers = ranked.nonzero().squeeze(1)
            others = pairs.new_zeros(len(pairs), RANKED_AGAINST)
            others[ranked] = self.negatives.draw(key, numbers, pairs[ranked], RANKED_AGAINST)
        if not self.timed:
            return Examples(pairs, random, others, ranked, queries)
        if self.historical:
            earlier = self._earlier(pairs, times, others[:, :1])
            earlier = torch.cat([pairs[:, :1], earlier], 1)
            random = torch.where(ranked.unsqueeze(1), earlier, random)
            others = self._earlier(pairs, times, others)
        ends = torch.cat([pairs, random, others], 1)
        times = times.unsqueeze(1).expand_as(ends)
        nodes, times, place = at_times(ends, times, self.graph.num_nodes)
        return Examples(*place.tensor_split([2, 4], 1), ranked, queries, nodes, times)

    def _earlier(self, pairs, times, others):
        """Replace negatives int64 [P, K] by historical ones (arXiv 2207.10128): destinations to which the sources of pairs [P, 2]
        had an edge before the pairs' times [P], and have none at them. Of more than K, they are spread over time."""
        trained = self.graph.pairs["train"]
        first = self.graph.pair_times["train"]
        order = np.lexsort((first, trained[:, 0]))
        degree = trained[:, 0].bincount(minlength=self.graph.num_nodes)
        source = pairs[:, 0]
        start = (degree.cumsum(0) - degree)[source]
        count = number_before(first[order], start, degree[source], times, True).unsqueeze(1)
        K = others.shape[1]
        place = ((torch.arange(K) + 0.5) * (count / K).clamp(min=1)).long()
        found = place < count
        row = found.nonzero()[:, 0]
        nodes = trained[order, 1][start[row] + place[found]]
        common = self.common
        kept = ~common.edges.any_of(
            source[row], nodes, lambda places, i: common.times[places] == times[row[i]]
        )
        first, end = (ids[row] for ids in self.negatives.same_type(pairs[:, 1]))
        kept &= (nodes >= first) & (nodes < end)
        return others.masked_scatter(found.masked_scatter(found, kept), nodes[kept])

    def __call__(self, scorer, h, part, ranks=None):
        """Evaluate part "valid" or "test" -> {metric: value}, the same on every rank; None without pairs.
        h: float [V, D] embeddings of all nodes, on the CPU; if pairs have times, [n, D] of those of the `Examples`."""
        return self.several([scorer], h, part, ranks)[0]

    @torch.no_grad()
    def several(self, scorers, h, part, ranks=None):
        """Evaluate with each of the scorers, for which features of pairs are computed once -> list, as of calls."""
        examples = self.examples[part]
        count = len(examples.pairs)
        if not count:
            return [None] * len(scorers)
        scorers = [scorer.on_host(h.dtype) for scorer in scorers]
        mine = ranks.part(count) if ranks else slice(None)
        pairs = examples.pairs[mine]
        if examples.others is None:
            places = self._among_all(scorers, h, pairs)
        else:
            places = self._among(scorers, h, pairs, examples.others[mine], examples)
        found = []
        for scorer, place in zip(scorers, places.unbind(1)):
            columns = [
                self.logits(scorer, h, pairs, examples),
                self.logits(scorer, h, examples.random[mine], examples),
                place * examples.ranked[mine],  # 0: with nothing to be ranked against
                examples.queries[mine],
            ]
            results = torch.stack(columns, 1)
            if ranks:
                results = torch.cat(ranks.gather(results))
            found.append(self._figures(*results.unbind(1)))
        return found

    def _figures(self, positive, negative, place, queries):
        """Compute {metric: value} of the scores of pairs and of random ones, the pairs' ranks and queries, all [P]."""
        scores = torch.cat([positive, negative])
        y = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
        by_name = {
            name: METRICS[name].from_scores(scores, y) for name in metrics_with("from_scores")
        }
        ranked = place != 0
        by_source = at_k(self.k, place[ranked], queries[ranked]) if ranked.any() else {}
        return ranking(place[ranked]) | by_name | by_source

    def baselines(self, part, ranks):
        """Evaluate the columns of `common` as scorers -> {name: {metric: value}}, or {} without pairs."""
        if not len(self.examples[part].pairs):
            return {}
        count = self.graph.num_nodes if not self.timed else len(self.examples[part].nodes)
        names = self.common.columns
        scorers = [Baseline(j) for j in range(len(names))]
        return dict(zip(names, self.several(scorers, torch.zeros(count, 1), part, ranks)))

    @torch.no_grad()
    def logits(self, scorer, h, pairs, examples=None):
        """Score pairs int64 [n, 2] of nodes, as of the end of time, or of `examples` -> logits [n]. h: [V, D] or, of examples with
        times, as for a call; all in host memory."""
        logits = [h.new_zeros(0)]
        for part in pairs.split(1 << 16):
            source, destination = part.unbind(1)
            features = self._features(scorer.columns, examples, source, destination)
            logits.append(scorer(h[source], h[destination], features))
        return torch.cat(logits)

    def _features(self, count, examples, source, destination):
        """Compute the first `count` features of pairs of nodes, or of indices into `nodes` of the examples, that broadcast ->
        [..., count]; None for 0."""
        if not count:
            return None
        pairs = torch.stack(torch.broadcast_tensors(source, destination), -1)
        times = None
        if self.timed and examples:  # else as of the end of time
            times = examples.times[pairs[..., 0]].flatten()
            pairs = examples.nodes[pairs]
        features = self.common.pair_features(pairs.view(-1, 2), times, count)
        return features.view(*pairs.shape[:-1], count)

    def _every_chunk(self, scorers, h, sources):
        """Yield sources int64 [n] in chunks -> (index of the first, sources [m], their features with every node [m, V, columns]
        or None), as many as can be scored at a time."""
        count = max(scorer.columns for scorer in scorers)
        wide = any(scorer.kind == "mlp" for scorer in scorers)
        width = len(h) * (h.shape[1] if wide else max(count, 1))
        first = 0
        for some in sources.split(max(1, CHUNK // width)):
            yield first, some, self.common.against_all(some, count) if count else None
            first += len(some)

    def _among_all(self, scorers, h, pairs):
        """Rank each pair [n, 2] against all nodes by each scorer -> ranks [n, S], from 1."""
        places = h.new_zeros(len(pairs), len(scorers))
        nodes, which = pairs[:, 0].unique(return_inverse=True)
        for first, source, features in self._every_chunk(scorers, h, nodes):
            mine = ((which >= first) & (which < first + len(source))).nonzero().squeeze(1)
            known = left_out(self.lists, source)
            for j, scorer in enumerate(scorers):
                every = scorer.against_all(h[source], h, features)
                sums = every.sum(1)
                positive = every[which[mine] - first, pairs[mine, 1]].unsqueeze(1)
                every[known] = -torch.inf
                for some, scored in zip(mine.split(len(source)), positive.split(len(source))):
                    row = which[some] - first
                    destination = pairs[some, 1:]
                    scores = every[row].scatter_(1, destination, -torch.inf)
                    if len(self.negatives.ends) > 2:  # of several types
                        low, high = self.negatives.same_type(destination)
                        node = torch.arange(len(h))
                        scores[(node < low) | (node >= high)] = -torch.inf
                    places[some, j] = place_of(scored, scores, sums[row])
        return places

    def _among(self, scorers, h, pairs, others, examples):
        """Rank each pair [n, 2] against `others` [n, K] by each scorer -> ranks [n, S], from 1."""
        places = h.new_zeros(len(pairs), len(scorers))
        count = max(scorer.columns for scorer in scorers)
        for rows in torch.arange(len(pairs)).split(max(1, CHUNK // others.shape[1] // h.shape[1])):
            source, destination = pairs[rows].split(1, 1)
            # in one product: another would round the scores of equal embeddings otherwise
            both = torch.cat([destination, others[rows]], 1)
            features = self._features(count, examples, source, both)
            for j, scorer in enumerate(scorers):
                scores = scorer(h[source], F.embedding(both, h), features)
                places[rows, j] = place_of(scores[:, :1], scores[:, 1:], scores.sum(1))
        return places

    @torch.no_grad()
    def best(self, scorer, h, k):
        """Yield the k best destinations of every node of a type that training pairs go from, among the nodes of a type that they
        go to, without edges of the type to predict, in chunks -> (sources, destinations, int64 [n], scores [n], the best first)."""
        scorer = scorer.on_host(h.dtype)
        lists = destinations_of(self.graph.known_of_type)
        pairs = self.graph.pairs["train"]
        while len(pairs):
            firsts, ends = self.negatives.same_type(pairs)
            pairs = pairs[(firsts != firsts[0]).any(1)]
            low, first = firsts[0].tolist()
            high, end = ends[0].tolist()
            for _, source, features in self._every_chunk([scorer], h, torch.arange(low, high)):
                scores = scorer.against_all(h[source], h, features)
                check_scores(scores)
                scores[left_out(lists, source)] = -torch.inf
                scores, nodes = scores[:, first:end].topk(min(k, end - first))
                found = scores.isfinite()
                source = source.unsqueeze(1).expand_as(nodes)
                yield source[found], first + nodes[found], scores[found]


def place_of(positive, scores, sums):
    """Rank each of positive [n, 1] among scores [n, K], ties in the middle -> [n], from 1. sums [n]: of all scores, not finite
    where one is NaN: NaN compares as not above, so that a pair with such a score would rank first."""
    mask = torch.empty_like(scores)  # floats: torch would convert bools to integers to sum
    above = torch.gt(scores, positive, out=mask).sum(1)
    equal = torch.eq(scores, positive, out=mask).sum(1)
    place = 1 + above + equal / 2
    return torch.where(sums.isfinite(), place, torch.nan)


def left_out(lists, source):
    """List what to leave out when ranking for sources [n]: themselves and their destinations -> (rows, nodes). lists: as from
    `destinations_of`."""
    indptr, destinations = lists
    rows = torch.arange(len(source))
    counts = indptr.diff()[source]
    neighbours = destinations[expand(indptr[source], counts)].long()
    return torch.cat([rows.repeat_interleave(counts), rows]), torch.cat([neighbours, source])
