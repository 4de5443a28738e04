"""Link prediction: edges as examples. Negatives, scorers, losses, evaluation.

    graph = split_edges(store, "85/5/10", seed=0)      # messages go along training edges; graph.pairs: of each part
    links = Links(graph, graph.indptr, graph.indices, negatives=1, seed=0)
    net.scorer = Scorer("dot", width)
    for batch in NodeLoader(graph, graph.split["train"], [10, 10], sampler=..., ring=..., draw=links.draw):
        loss = links.loss(net.scorer, net(batch.blocks, batch.x), batch.y)
    figures = Evaluation(graph)(net.scorer, embeddings, "test")     # MRR, Hits@K, ROC-AUC, average precision

    python train.py --task link --dataset cora

A positive is a pair of nodes with an edge from the first to the second; an edge and its reverse are one pair, in one part
of the split. A step samples the union of the ends of its pairs once; the edges of its positives and their reverses carry
no messages, or a positive could be read off its own edge. Draws depend only on the seed, the step and the pair's number.
With times, both ends of a pair and its negatives see the edges up to the time of the pair.

P pairs of a batch have K negatives each; D is the width of an embedding.
"""

import copy
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from disk.columns import NAMES, types_called
from disk.files import SPLITS, StoreError, plural, reading, sha256_of
from extras import extra
from extras.common_neighbours import COMMON, CommonNeighbours, destinations_of
from extras.edge_split import (
    HELD_OUT,
    Edges,
    checked_pairs,
    counts_of,
    split_edges,
    split_type,
    view_of,
)
from native import kernels
from sampler import expand, mix, random_bits
from sources.splits import say_empty_parts
from tasks.metrics import METRICS, metrics_with, ranking
from tasks.task import Task, described, gnn, in_chunks, numbered_columns, open_graph, rows_of_nodes

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
        self.ends = torch.tensor([0, *(counts or [num_nodes])]).cumsum(0)
        self.upto = None
        if degrees is not None:  # integers have the same sum on every device
            weights = (degrees.double().pow(0.75) * 1024).long()
            self.upto = F.pad(weights.cumsum(0), (1, 0))

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
        node, bad = self.attempts(key, numbers, pairs, count)
        return self.looked_up(pairs, node, bad) if bad.any() else node

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
        if not len(pairs):
            return torch.zeros(0, dtype=torch.bool)
        ranges = torch.stack([pairs[:, 0], *self.same_type(pairs[:, 1])], 1)
        ranges, which = ranges.unique(dim=0, return_inverse=True)
        source, first, end = ranges.unbind(1)
        degree = self.edges.sources.bincount(minlength=self.num_nodes)[source]
        full = degree >= end - first - 1
        hubs = full.nonzero().squeeze(1)
        counts = (end - first)[hubs]
        parts = ((counts.cumsum(0) - 1) // CHUNK).bincount().tolist()
        for some, sizes in zip(hubs.split(parts), counts.split(parts)):
            hub = some.repeat_interleave(sizes)
            free = ~self._bad(source[hub], expand(first[some], sizes))
            full[hub[free]] = False
        return full[which]

    def pairs(self, key, pairs):
        """Draw a pair without an edge for each of `pairs` [P, 2], with a drawn source as well -> int64 [P, 2]."""
        numbers = torch.arange(len(pairs))
        source = self._node(mix(key), numbers, 0 * numbers, *self.same_type(pairs[:, 0]))
        pairs = torch.stack([source, pairs[:, 1]], 1)
        return torch.stack([source, self.draw(key, numbers, pairs, 1).squeeze(1)], 1)


# ---- training


def distinct(x):
    """List the distinct values of an int64 tensor, ascending -> (values, index of each of x in these), as `unique` does. A
    GPU is not waited for: there values have as many entries as x, with zeros behind the distinct ones."""
    if not x.numel() or not kernels.is_gpu(x.device):
        return x.unique(return_inverse=True)
    ordered, order = x.flatten().sort()
    rank = F.pad(ordered[1:] != ordered[:-1], (1, 0)).cumsum(0)
    place = torch.empty_like(rank).scatter_(0, order, rank)
    return torch.zeros_like(ordered).scatter_(0, rank, ordered), place.view_as(x)


def at_times(nodes, times, num_nodes):
    """Find the distinct (node, time), int64 of one shape -> (nodes [S], times [S], index of each, of that shape); on a GPU
    more of these follow, see `distinct`."""
    values, rank = distinct(times)
    both, place = distinct(nodes + num_nodes * rank)
    return both % num_nodes, values[both // num_nodes], place


class Scorer(nn.Module):
    """Scores pairs of embeddings, as the logit of an edge: "dot", the dot product; "distmult", with a weight per column
    (arXiv 1412.6575); "mlp", a network with one hidden layer on the elementwise product; "ncn", as distmult of embeddings of
    length 3, plus a weighted sum of what the nodes have in common (`CommonNeighbours`: so many columns)."""

    def __init__(self, kind, width, columns=4):
        super().__init__()
        self.kind = kind
        self.columns = columns if kind == "ncn" else 0
        weighted = kind in ("distmult", "ncn")
        self.relation = nn.Parameter(torch.ones(width)) if weighted else 1.0
        if kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        if self.columns:
            self.common = nn.Linear(columns, 1)
            nn.init.constant_(self.common.weight, 0.4 / columns)

    def forward(self, source, destination, features=None):
        """Score source [..., D] with destination [..., D], which broadcast -> logits [...]. features: [..., columns] of the
        pairs, or more columns, for "ncn"."""
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
        """Score source [n, D] with every row of table [V, D] -> logits [n, V]. features: [n, V, columns], for "ncn"."""
        if self.kind == "mlp":
            return self(source.unsqueeze(1), table)
        source, table = self._scaled(source, table)
        return self._with_common(source * self.relation @ table.t(), features)


class Baseline(NamedTuple):
    """A scorer without a network: a column of `CommonNeighbours`."""

    column: int
    kind = "baseline"
    columns = True

    def __call__(self, source, destination, features):
        return features[..., self.column]

    against_all = __call__

    def on_host(self, dtype):
        return self


class Links:
    """Training pairs as the examples of a `NodeLoader`: draws the nodes to sample for a batch, and computes the loss.

    graph: of `split_edges`. indptr, indices: its edges that carry messages, on the sampler's device. negatives: K per
    pair, drawn by `seed`; by_degree: in proportion to degree^0.75; checked: avoid the edges that carry messages.
    softmax: the loss is the cross-entropy of a pair among its negatives, else of each logit alone. exclude: leave the
    positives of the step out of its messages; False shows the leak. common: `CommonNeighbours` of the same edges, if the
    scorer takes what pairs have in common.
    """

    def __init__(
        self,
        graph,
        indptr,
        indices,
        *,
        negatives=1,
        seed=0,
        by_degree=False,
        checked=True,
        softmax=False,
        exclude=True,
        common=None,
    ):
        self.count = negatives
        self.common = common
        self.softmax = softmax
        self.exclude = exclude
        # ~2 is no step: the sampler's key of a hop is mix(mix(mix(seed) ^ step) ^ hop)
        self.key = mix(mix(seed) ^ ~2)
        self.pairs = graph.pairs["train"].to(indices.device)
        self.times = None
        if graph.pair_times is not None:
            self.times = graph.pair_times["train"].to(indices.device)
        self.edges = common.edges if common else Edges(indptr, indices)
        self.negatives = Negatives(
            self.edges if checked else None,
            graph.num_nodes,
            indptr.diff() if by_degree else None,
            graph.node_counts,
        )

    def draw(self, batch):
        """Draw a batch, as `draw` of a `NodeLoader` whose seeds are ids of training pairs -> (nodes: distinct ends of
        the pairs and negatives; options of the sampler, which exclude the edges of the whole step's pairs; y int64
        [P, 2 + K]: positions among the nodes of each pair's source, destination and negatives; with `common` followed by
        its columns for destination and negatives, the bits of float64)."""
        seeds = self._of_pairs(batch.seeds)
        pairs = self.pairs[seeds]
        key = mix(self.key ^ (batch.global_step & (1 << 64) - 1))
        negatives, bad = self.negatives.attempts(key, seeds, pairs, self.count)
        nodes, times, y = self._ends(seeds, pairs, negatives)
        step_pairs = self._of_pairs(batch.step_seeds) if self.exclude else seeds[:0]
        first, counts = self.edges.ranges(self.pairs[step_pairs])
        last = F.pad(y.flatten(), (1, 0), value=-1).amax()  # a part of a step may be empty
        # the host waits for the GPU here only
        left, last, num_edges = torch.stack([bad.sum(), last, counts.sum()]).tolist()
        if left:
            negatives = self.negatives.looked_up(pairs, negatives, bad)
            nodes, times, y = self._ends(seeds, pairs, negatives)
            last = int(y.amax())
        options = {}
        if self.exclude:
            options["exclude"] = self.edges.listed(first, counts, num_edges)
        if self.times is not None:
            options["times"] = times[: last + 1]
        if self.common:
            y = torch.cat([y, self._features(seeds, pairs, negatives)], 1)
        return nodes[: last + 1], options, y

    def _features(self, seeds, pairs, negatives):
        """Compute what the sources of pairs [P, 2] have in common with destinations and negatives -> int64 [P, (1 + K) columns]."""
        ends = torch.stack([pairs[:, :1].expand_as(negatives), negatives], 2)
        ends = torch.cat([pairs.unsqueeze(1), ends], 1)  # [P, 1 + K, 2]
        times = None
        if self.times is not None:
            times = self.times[seeds].repeat_interleave(ends.shape[1])
        features = self.common.pair_features(ends.view(-1, 2), times)
        return features.double().view(torch.int64).view(len(pairs), -1)

    def _of_pairs(self, seeds):
        """Copy numbers of pairs to the device of the pairs."""
        if self.pairs.is_cuda:
            seeds = seeds.pin_memory()
        return seeds.to(self.pairs.device, non_blocking=True)

    def _ends(self, seeds, pairs, negatives):
        """Find the distinct ends of pairs [P, 2] and their negatives [P, K] -> (nodes, times or None, index of each
        [P, 2 + K]), see `at_times`."""
        nodes = torch.cat([pairs, negatives], 1)
        if self.times is None:
            nodes, y = distinct(nodes)
            return nodes, None, y
        times = self.times[seeds].unsqueeze(1).expand_as(nodes)
        return at_times(nodes, times, self.negatives.num_nodes)

    def loss(self, scorer, h, y):
        """Sum over pairs of the softmax cross-entropy, or of half the pair's binary cross-entropy plus half the mean of
        its negatives'. h: [S, D] embeddings. y: int64 [P, 2 + K], as from `draw`, rows of h; of -1: no pair."""
        y, features = y.tensor_split([2 + self.count], 1)
        if self.common:
            features = features.contiguous().view(torch.float64).view(len(y), 1 + self.count, -1)
            features = features.where(y[:, :1, None] >= 0, 0)  # -1 is NaN as a float64
        rows = y.clamp(min=0)
        source = h.index_select(0, rows[:, 0]).unsqueeze(1)  # [P, 1, D]
        others = h.index_select(0, rows[:, 1:].flatten())
        others = others.view(len(y), y.shape[1] - 1, h.shape[1])  # [P, 1 + K, D]
        logits = scorer(source, others, features)  # [P, 1 + K]
        if self.softmax:
            first = y[:, 0].clamp(max=0)
            return F.cross_entropy(logits, first, reduction="sum", ignore_index=-1)
        losses = F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).mean(1)
        return losses.where(y[:, 0] >= 0, 0).sum() / 2


# ---- evaluation


class Examples(NamedTuple):
    """What a part is evaluated on. If pairs have times, `nodes` and `times` say whose embeddings are needed and the ends
    of pairs are indices into these; else they are node ids."""

    pairs: torch.Tensor  # int64 [P, 2], source and destination
    random: torch.Tensor  # int64 [P, 2], without an edge
    others: torch.Tensor | None  # int64 [P, K], nodes to rank each pair against; None: all
    ranked: torch.Tensor  # bool [P], which of the pairs have anything to be ranked against
    nodes: torch.Tensor | None = None  # int64 [n]
    times: torch.Tensor | None = None  # int64 [n]


class Evaluation:
    """Scores of embeddings and a scorer on the pairs of a part: MRR and Hits@K of each pair's rank among pairs with the
    same source, ROC-AUC and average precision against as many random pairs without an edge. graph: of `split_edges`.

    A pair is ranked against all nodes of its destination's type if the graph has at most SMALL nodes, without other
    edges of the source, else against RANKED_AGAINST fixed ones; ties get their mean rank. A pair whose source has an edge
    to every such node has nothing to be ranked against: MRR and Hits@K leave it out, and are None if no pair is left.
    Negatives are checked against the whole graph and are the same in every run. Of more than MOST pairs every n-th is
    evaluated.

    If pairs have times, both ends and all negatives have embeddings at the time of the pair; then a pair is ranked
    against fixed nodes in any graph, and at most MOST_TIMED pairs are evaluated.

    Attributes:
        examples: {part: Examples}. timed: pairs have times. common: `CommonNeighbours` of the edges that carry messages, for
        scorers with `columns`.
    """

    def __init__(self, graph, strict=False):
        self.graph = graph
        self.timed = graph.pair_times is not None
        self.common = CommonNeighbours(
            Edges(graph.indptr, graph.indices), graph.edge_time if self.timed else None, strict
        )
        self.negatives = Negatives(graph.known_edges, graph.num_nodes, counts=graph.node_counts)
        self.lists = None
        if graph.num_nodes <= SMALL and not self.timed:
            self.lists = destinations_of(graph.known_edges)
        self.examples = {part: self._examples(part) for part in HELD_OUT}

    def _examples(self, part):
        pairs = self.graph.pairs[part]
        count = min(len(pairs), MOST_TIMED if self.timed else MOST)
        chosen = torch.arange(count) * len(pairs) // max(count, 1)
        pairs = pairs[chosen]
        key = mix(EVALUATION ^ SPLITS.index(part))
        random = self.negatives.pairs(mix(key), pairs)
        ranked = ~self.negatives.without(pairs)
        if self.lists:
            return Examples(pairs, random, None, ranked)
        numbers = ranked.nonzero().squeeze(1)
        others = pairs.new_zeros(len(pairs), RANKED_AGAINST)
        others[ranked] = self.negatives.draw(key, numbers, pairs[ranked], RANKED_AGAINST)
        if not self.timed:
            return Examples(pairs, random, others, ranked)
        ends = torch.cat([pairs, random, others], 1)
        times = self.graph.pair_times[part][chosen].unsqueeze(1).expand_as(ends)
        nodes, times, place = at_times(ends, times, self.graph.num_nodes)
        return Examples(*place.tensor_split([2, 4], 1), ranked, nodes, times)

    @torch.no_grad()
    def __call__(self, scorer, h, part, ranks=None):
        """Evaluate part "valid" or "test" -> {metric: value}, the same on every rank; None without pairs.
        h: float [V, D] embeddings of all nodes, on the CPU; if pairs have times, [n, D] of those of the `Examples`."""
        examples = self.examples[part]
        count = len(examples.pairs)
        if not count:
            return None
        scorer = scorer.on_host(h.dtype)
        mine = ranks.part(count) if ranks else slice(None)
        pairs = examples.pairs[mine]
        others = None if examples.others is None else examples.others[mine]
        features = partial(self.features, examples) if scorer.columns else None
        columns = [
            score_pairs(scorer, h, pairs, features),
            score_pairs(scorer, h, examples.random[mine], features),
            # 0: with nothing to be ranked against
            self._ranks(scorer, h, pairs, others, features) * examples.ranked[mine],
        ]
        results = torch.stack(columns, 1)
        if ranks:
            results = torch.cat(ranks.gather(results))
        positive, negative, place = results.unbind(1)
        scores = torch.cat([positive, negative])
        y = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
        by_name = {
            name: METRICS[name].from_scores(scores, y) for name in metrics_with("from_scores")
        }
        return ranking(place[place != 0]) | by_name

    def baselines(self, part, ranks=None):
        """Evaluate the columns of `common` as scorers -> {name: {metric: value}}, or {} without pairs."""
        count = self.graph.num_nodes if not self.timed else len(self.examples[part].nodes)
        h = torch.zeros(count, 1)
        names = self.common.columns
        found = {names[j]: self(Baseline(j), h, part, ranks) for j in range(len(names))}
        return {name: scores for name, scores in found.items() if scores}

    def features(self, examples, source, destination):
        """Compute the features of pairs of nodes, or of indices into `nodes` of the examples, that broadcast -> [..., columns]."""
        pairs = torch.stack(torch.broadcast_tensors(source, destination), -1)
        times = None
        if self.timed and examples:  # else as of the end of time
            times = examples.times[pairs[..., 0]].flatten()
            pairs = examples.nodes[pairs]
        return self.common.pair_features(pairs.view(-1, 2), times).view(*pairs.shape[:-1], -1)

    def _ranks(self, scorer, h, pairs, others, features):
        """Rank each pair [n, 2] against `others` [n, K], or all nodes if None -> ranks [n], from 1."""
        width = self.graph.num_nodes if others is None else others.shape[1]
        if others is not None or scorer.kind == "mlp":
            width *= h.shape[1]
        elif features:
            width *= len(self.common.columns)
        places = [h.new_zeros(0)]
        for rows in torch.arange(len(pairs)).split(max(1, CHUNK // width)):
            source, destination = pairs[rows].unbind(1)
            destination = destination.unsqueeze(1)
            if others is None:
                pair_features = self.common.against_all(source) if features else None
                scores = scorer.against_all(h[source], h, pair_features)
                sums = scores.sum(1)
                positive = scores.gather(1, destination)
                scores[self._left_out(source)] = -torch.inf
                if len(self.negatives.ends) > 2:  # of several types
                    first, end = self.negatives.same_type(destination)
                    node = torch.arange(len(h))
                    scores[(node < first) | (node >= end)] = -torch.inf
                scores.scatter_(1, destination, -torch.inf)
            else:  # in one product: another would round the scores of equal embeddings otherwise
                both = torch.cat([destination, others[rows]], 1)
                pair_features = features(source.unsqueeze(1), both) if features else None
                scores = scorer(h[source].unsqueeze(1), F.embedding(both, h), pair_features)
                sums = scores.sum(1)
                positive = scores[:, :1]
                scores = scores[:, 1:]
            mask = torch.empty_like(scores)  # floats: torch would convert bools to integers to sum
            above = torch.gt(scores, positive, out=mask).sum(1)
            equal = torch.eq(scores, positive, out=mask).sum(1)
            place = 1 + above + equal / 2
            # NaN compares as not above: a pair with such a score would rank first
            places.append(torch.where(sums.isfinite(), place, torch.nan))
        return torch.cat(places)

    def _left_out(self, source):
        """List what to leave out when ranking for sources [n]: themselves and their destinations -> (rows, nodes)."""
        indptr, destinations = self.lists
        rows = torch.arange(len(source))
        counts = indptr.diff()[source]
        neighbours = destinations[expand(indptr[source], counts)].long()
        return torch.cat([rows.repeat_interleave(counts), rows]), torch.cat([neighbours, source])


@torch.no_grad()
def score_pairs(scorer, h, pairs, features=None):
    """Score pairs int64 [n, 2] of embeddings h [V, D] -> logits [n]; all in host memory. features: function(source,
    destination) of int64 [n] -> [n, columns], if the scorer takes them."""
    logits = [h.new_zeros(0)]
    for part in pairs.split(1 << 16):
        source, destination = part.unbind(1)
        pair_features = features(source, destination) if features else None
        logits.append(scorer(h[source], h[destination], pair_features))
    return torch.cat(logits)


# ---- the task


def number_of_type(store, name):
    """Look up the number of the edge type that --edge-type names; StoreError unless there is exactly one."""
    if store.edge_type is None:
        raise StoreError(f"--edge-type {name}: the edges of {store.path} have no types")
    names = store.edge_types or [*map(str, range(store.num_edge_types))]
    numbers = types_called(name, names)
    if len(numbers) != 1:
        raise StoreError(
            f"--edge-type {name}: "
            f"there is {'more than one' if numbers else 'none'} among {'; '.join(names)}"
        )
    return numbers[0]


def joined_to_scorer(network, _, output):
    """Add 0 times the scorer's parameters: DistributedDataParallel takes those that a network's output does not depend
    on for unused, and fails when the loss uses them."""
    if not isinstance(output, torch.Tensor):
        return output  # refused by `output_of_own`
    return output + 0 * sum(p.sum() for p in network.scorer.parameters())


class LinkTask(Task):
    """Link prediction: learn embeddings of nodes from which a scorer tells edges from other pairs."""

    name = "link"
    examples = "edges"
    are_links = True
    padded = True
    told_by = "indptr.", "indices."
    metrics = metrics_with("from_ranks") + metrics_with("from_scores")
    widths = "feature_dim", "edge_dim", "num_edge_types", "node_types"
    unused = {
        "is for --task node: --task link has --edge-split": "split",
        "is for --task node: the examples of --task link have no classes": "class_weights",
        "is for --task node: --task link writes embeddings, or scores of --pairs": "predict_what",
        "is for --task node: embeddings of --task link are those at the end of time": "window",
    }

    def __init__(self, args, path, say=print):
        store = open_graph(args, path, say)
        edge_type = None if args.edge_type is None else number_of_type(store, args.edge_type)
        file = args.edge_split if args.edge_split.endswith(".npz") else None
        if NAMES in store.meta["files"] and (file or args.pairs):
            say(f"names   files of pairs hold names of nodes, those of {NAMES}")
        graph = split_edges(
            store,
            args.edge_split,
            args.seed,
            timed=getattr(args, "temporal", "off") != "off",
            edge_type=edge_type,
            say=say,
        )
        files = store.meta["files"]
        if file:  # part of what identifies the data of a checkpoint
            files = {**files, file: {"bytes": 0, "sha256": sha256_of(file).hexdigest()}}
        # outputs are embeddings
        self.store = view_of(graph, meta={**store.meta, "files": files}, num_classes=args.hidden)
        if store.edge_type is not None:
            of = f"of type {args.edge_type}" if args.edge_type else "of all types, see --edge-type"
            nodes = ", negatives nodes of the destination's type" if store.node_types else ""
            say(f"links   pairs are edges {of}{nodes}")
        if args.edge_split != "none":
            say_empty_parts(self.store.split, "edges", say)
        self.metric = args.metric or self.metrics[0]
        self.evaluation = Evaluation(self.store, strict=args.temporal == "before")
        self._say_what_is_not_ranked(say)
        if args.pairs:  # refused before anything is trained
            self._read_pairs(args.pairs, edge_type, say)

    def _say_what_is_not_ranked(self, say):
        left_out = {part: ~some.ranked for part, some in self.evaluation.examples.items()}
        if any(mask.any() for mask in left_out.values()):
            every = "every node of the type" if self.store.node_types else "every node"
            say(
                f"ranks   the source of {counts_of(left_out)} pairs has an edge to {every}: "
                "MRR and Hits leave these pairs out"
            )

    def _read_pairs(self, file, edge_type, say):
        """Read the file of --pairs, an array or a table. asked: int64 [n, 2] nodes; named: [n, 2] as in the file."""
        with reading(name := f"--pairs {file}"):
            with open(file, "rb") as stream:
                is_array = stream.read(6) == b"\x93NUMPY"
            if is_array:
                pairs = np.load(file, allow_pickle=False)
            else:
                of_table = extra(".graph_tables", name).pairs_of_table
                pairs = of_table(file, self.store, lambda line: say(f"pairs   {line}"))
            self.asked = checked_pairs(name, pairs, self.store, edge_type)
            self.named = np.char.decode(pairs, "utf-8") if pairs.dtype.kind == "S" else pairs

    @staticmethod
    def network(args, widths, custom=None):
        network = gnn(args, widths, args.hidden) if custom is None else custom
        if hasattr(network, "scorer"):
            raise StoreError(
                f"--model {args.model} has a `scorer`: --task link gives the network one of that name"
                ", rename yours"
            )
        columns = len(COMMON) + 2 * (args.temporal in ("at", "before"))
        network.add_module("scorer", Scorer(args.scorer, args.hidden, columns))
        if custom is not None and args.scorer != "dot":  # which has no parameters
            network.register_forward_hook(joined_to_scorer)
        return network

    @staticmethod
    def defaults(flags):
        values = {"temporal": "off", "dropout": 0.3}
        if not flags.fanout:
            values["num_layers"] = 2
        if "temporal" not in flags.typed or flags.temporal == "off":  # gcn knows no degrees by time
            values["model"] = "gcn"
        return values

    def seeds_per_example(self, args):
        return 2 + args.negatives

    def seeds(self):
        return torch.arange(self.store.num_nodes)

    def num_scored(self):
        if METRICS[self.metric].from_ranks:
            return int(self.evaluation.examples["valid"].ranked.sum())
        return super().num_scored()

    def attach(self, ranks, args, used, indptr, indices):
        self.links = Links(
            self.store,
            indptr,
            indices,
            negatives=args.negatives,
            seed=args.seed,
            by_degree=args.negatives_by == "degree",
            checked=not args.unchecked_negatives,
            softmax=args.link_loss == "softmax",
            common=self._common(args, indptr, indices),
        )
        self.draw = self.links.draw

    def _common(self, args, indptr, indices):
        """Return the `CommonNeighbours` of --scorer ncn, else None."""
        if args.scorer != "ncn":
            return None
        common = self.evaluation.common
        if indices.device.type == "cpu":
            return common
        times = self.store.edge_time.to(indices.device) if self.evaluation.timed else None
        return CommonNeighbours(Edges(indptr, indices), times, common.strict)

    def loss(self, network, output, y):
        return self.links.loss(network.scorer, output, y)

    def scores(self, run, part, h=None):
        """Compute the metrics of a part -> {metric: value}; None without pairs. h: exact embeddings [V, D]."""
        examples = self.evaluation.examples[part]
        if not len(examples.pairs):
            return None
        if self.evaluation.timed:
            h = run.sampled(examples.nodes, examples.times)
        elif h is None:
            h = run.exact()
        return self.evaluation(run.model.scorer, h, part, run.ranks)

    def validate(self, run):
        scores = self.scores(run, "valid")
        return {"valid": scores}, scores and scores[self.metric]

    def score_text(self, score):
        return f"{METRICS[self.metric].title} {score:.4f}"

    def evaluate(self, run, report):
        """Report scores and write embeddings, or the logits of --pairs -> {"part name": score}."""
        args = run.plan
        h = None if self.evaluation.timed and not args.predict else run.exact()
        scores = {part: self.scores(run, part, h) for part in HELD_OUT}
        line, baselines = self._baselines(run)
        exact = report.scores(scores, line, baselines=baselines)
        if args.predict and args.pairs:
            evaluation = self.evaluation
            scorer = run.model.scorer.on_host(h.dtype)
            features = partial(evaluation.features, None) if scorer.columns else None
            scores = score_pairs(scorer, h, self.asked, features)
            report.write(lambda: scores, self.rows_of_pairs(scores))
        elif args.predict:
            report.write(lambda: h, rows_of_nodes(self.store, h, numbered_columns))
        return exact

    def _baselines(self, run):
        """Evaluate scorers without a network on the same pairs -> (line to print, {part: {name: {metric: value}}})."""
        part = "test" if len(self.evaluation.examples["test"].pairs) else "valid"
        figures = self.evaluation.baselines(part, run.ranks)
        scores = [(name, values[self.metric]) for name, values in figures.items()]
        text = ", ".join(f"{name} {score:.4f}" for name, score in scores if score is not None)
        line = f"without a network  {part} {METRICS[self.metric].title}: {text}" if text else ""
        return line, {part: figures}

    def rows_of_pairs(self, scores):
        """Yield a table of --pairs in chunks, {column: values}: their nodes as in the file, and scores [n]."""
        for rows in in_chunks(len(scores), 1):
            source, destination = self.named[rows].T
            yield {"source": source, "destination": destination, "score": scores[rows].numpy()}

    def lines(self, args, split, parameters):
        features, network, fanout = described(args, self.store)
        yield (
            f"data    {features}, {self.store.num_edges:,} edges carry messages; "
            f"pairs to predict: {split} (--edge-split {args.edge_split})"
        )
        how = args.negatives_by
        if args.unchecked_negatives:
            how += ", unchecked"
        yield (
            f"model   {network}, scorer {args.scorer}, {parameters}; {fanout}; "
            f"{plural(args.negatives, 'negative')} a pair ({how}), loss {args.link_loss}"
        )
        pairs = len(self.store.split["train"])
        if args.total_batch * 2 > pairs:
            yield (
                f"advice  a step leaves its own {args.total_batch:,} of {pairs:,} pairs out of the "
                "messages, so that nodes have few neighbours left: give a smaller --batch-size"
            )


TASK = LinkTask


def flags(kinds):
    """Declare the flags of --task link."""
    return {
        "input_dropout": dict(
            edge_split=kinds.per_graph(
                kinds.parsed_by(split_type, "A/B/C"),
                "85/5/10",
                "percent of edges for train, valid and test, drawn by --seed; time:A/B/C: by time; none: all for train; FILE.npz with valid, test [n, 2]",
                group="links",
            ),
            edge_type=kinds.per_graph(
                kinds.text("TYPE"),
                None,
                "predict edges of a type, as user,buys,item (default: all)",
            ),
            scorer=kinds.fixed(
                kinds.one_of("ncn", "dot", "distmult", "mlp"),
                "ncn",
                "how pairs are scored; ncn: also by common neighbours",
            ),
            negatives=kinds.fixed(
                kinds.COUNT, 1, "negatives per training edge, none of them an edge"
            ),
            negatives_by=kinds.fixed(
                kinds.one_of("uniform", "degree"), "uniform", "degree: in proportion to degree^0.75"
            ),
            unchecked_negatives=kinds.fixed(kinds.SWITCH, False, "negatives may be edges"),
            link_loss=kinds.fixed(
                kinds.one_of("bce", "softmax"),
                "bce",
                "bce: each pair alone; softmax: edge against its negatives",
            ),
            pairs=kinds.free(
                kinds.text("FILE"),
                None,
                "node ids [n, 2], .npy or a table, to score",
                needs=[kinds.prediction],
            ),
        )
    }
