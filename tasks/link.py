"""Link prediction: edges as examples. Splits of edges, negatives, scorers, losses, evaluation.

    graph = split_edges(store, "85/5/10", seed=0)      # messages go along training edges; graph.pairs has the rest
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

import argparse
import copy
import functools
import re

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from disk.columns import types_called
from disk.files import SPLITS, StoreError, reading, sha256_of
from loader import from_edge_index
from sampler import DAMAGED, DamagedGraph, expand, mix, number_before, outside, random_bits
from sources.splits import say_empty_parts
from tasks.metrics import average_precision, ranking, roc_auc
from tasks.task import Task, described, gnn, open_graph

RANKED_AGAINST = 100  # fixed negatives of a pair, where the graph has more than SMALL nodes
SMALL = 1 << 14  # with no more nodes a pair is ranked against all of them
MOST = 1 << 17  # pairs of a part that are evaluated
MOST_TIMED = 1 << 13  # where they have times, and each needs embeddings of its own
CHUNK = 1 << 22  # numbers of scores, or of what they are made of, held at a time
TRIES = 64  # draws of a negative before the nodes after the last one are tried in turn
EVALUATION = mix(0xE7A1)  # the key of fixed negatives, the same in every run
EDGE_COLUMNS = ("edge_weight", "edge_type", "edge_time", "edge_features")
# bits(key, numbers, which): 53 random bits for draw `which` of each item in `numbers`, int64 of one shape
bits = functools.partial(random_bits, bits=53)


# ---------------------------------------------------------------------------------------------------------------------
# which edges there are


class Edges:
    """Look-ups of many edges at once in a CSC graph, by binary search in its neighbour lists.

    indptr: int64 [V+1], indices: [M], on one device. sources: [M], `indices` ascending in each list: a sorted copy where
    they are not (edges sorted by time, say). order: [M], where each of them is in `indices`; None without a copy.
    """

    def __init__(self, indptr, indices):
        self.indptr, self.sources, self.order = indptr, indices, None
        falls = (indices[1:] < indices[:-1]).nonzero().squeeze(1) + 1
        if falls.numel() and not torch.isin(falls, indptr).all():
            keys = torch.repeat_interleave(indptr.diff()) * (indptr.numel() - 1) + indices
            self.order = keys.argsort(stable=True)
            self.sources = indices[self.order]

    def first(self, source, destination):
        """Look up edges source -> destination, int64 of one shape -> (where each is, or would be, among the sorted
        edges; whether it is there), of that shape."""
        low, wanted = self.indptr[destination].flatten(), source.flatten()
        degree = self.indptr[destination + 1].flatten() - low
        below = number_before(self.sources, low, degree, wanted, strict=True)
        found, place = below < degree, low + below
        found[found.clone()] = self.sources[place[found]] == wanted[found]
        return place.view_as(source), found.view_as(source)

    def has(self, source, destination):
        """Whether there are edges source -> destination, int64 of one shape -> bool of that shape."""
        return self.first(source, destination)[1]

    def between(self, pairs):
        """The places in `indices` of all edges between the nodes of each pair [n, 2], in either direction, and of each
        place which of the n it is for."""
        source, destination = torch.cat([pairs, pairs.flip(1)]).unbind(1)
        first, found = self.first(source, destination)
        first, source, past = first[found], source[found], self.indptr[destination[found] + 1]
        counts = number_before(self.sources, first, past - first, source, strict=False)
        places = expand(first, counts)
        which = torch.repeat_interleave(found.nonzero().squeeze(1) % len(pairs), counts)
        return places if self.order is None else self.order[places], which


# ---------------------------------------------------------------------------------------------------------------------
# splits


def split_type(text):
    """The argparse type of --edge-split -> the text, checked."""
    if text != "none" and not text.endswith(".npz") and not shares(text):
        forms = "train/valid/test, as in 85/5/10, or time:85/5/10, an .npz file, or none"
        raise argparse.ArgumentTypeError(f"{text!r}: write the percent of {forms}")
    return text


def shares(text):
    """'time:85/5/10' -> [85, 5, 10]; None for what has not this form or does not add up to 100."""
    found = re.fullmatch(r"(?:time:)?(\d{1,3})/(\d{1,3})/(\d{1,3})", text, re.ASCII)
    numbers = [int(number) for number in found.groups()] if found else [0]
    return numbers if sum(numbers) == 100 and numbers[0] else None


def split_edges(store, how, seed=0, timed=False, edge_type=None):
    """A view of a store for link prediction: a part of its edges to train on, the others to be predicted.

    Args:
        store: GraphStore, or anything with indptr, indices, num_nodes and perhaps edge_time.
        how: "85/5/10": percent of the pairs for train, valid and test, drawn by `seed`; "time:85/5/10": the latest are
            for test, those before for valid; the name of an .npz file with `valid` and `test`, perhaps `train`, each
            integers [n, 2], source and destination; "none": all pairs are for training.
        timed: give each pair the time of the first edge between its nodes, in either direction.
        edge_type: number of the type whose edges are the pairs; None: all edges are. Messages go along all types.

    Returns:
        A copy of the store with: indptr, indices, num_edges (and edge columns) of the edges that carry messages:
        without the pairs of valid and test and their reverses. pairs: {part: int64 [n, 2], source and destination}.
        pair_times: {part: int64 [n]}, or None. split: {part: the numbers of its pairs}. known: `Edges` of the whole
        graph. node_counts: nodes of each type, [] without. It takes about 60 bytes of memory for each edge. DamagedGraph
        for a list or a node outside of the graph.
    """
    name, edge_time = getattr(store, "path", "the graph"), getattr(store, "edge_time", None)
    if edge_time is None and (timed or how.startswith("time:")):
        flag = "--temporal" if timed else f"--edge-split {how}"
        raise StoreError(f"{flag} goes by the times of edges, and {name} has none")
    if (store.indptr.diff() < 0).any() or outside(store.indices, store.num_nodes) is not None:
        raise DamagedGraph(DAMAGED)
    graph, edges = copy.copy(store), Edges(store.indptr, store.indices)
    among = edges if edge_type is None else edges_of(store, edge_type)
    pairs = pairs_of(store, edges, among, how, seed)
    held = torch.cat([pairs["valid"], pairs["test"]])
    keep = torch.ones(store.indices.numel(), dtype=torch.bool)
    keep[edges.between(held)[0]] = False
    graph.known = edges
    # given, and not in the graph: no negative is to be one of them
    if not edges.has(*held.unbind(1)).all():
        both = torch.stack([edges.sources.long(), torch.repeat_interleave(store.indptr.diff())])
        graph.known = Edges(*from_edge_index(torch.cat([both, held.t()], 1), store.num_nodes))
    if len(held):
        graph.indptr, graph.indices = lists_of(store, keep)
        graph.num_edges = graph.indices.numel()
        graph.sampled_indices, graph.sampling_threads = graph.indices, None
        for column in EDGE_COLUMNS:
            if getattr(store, column, None) is not None:
                setattr(graph, column, getattr(store, column)[keep])
    left = edges_of(graph, edge_type)
    if "train" not in pairs:
        pairs["train"] = positives(left, seed)
    elif not left.has(*pairs["train"].unbind(1)).all():
        raise StoreError(f"--edge-split {how}: `train` has pairs that are not edges, or held out")
    if not len(pairs["train"]):
        raise StoreError(f"--edge-split {how}: {name} has no edges left to train on")
    graph.pairs, graph.pair_times = {part: pairs[part] for part in SPLITS}, None
    if timed:
        graph.pair_times = {p: times_of(edges, edge_time, pairs[p], how) for p in SPLITS}
    graph.split = {part: torch.arange(len(pairs[part])) for part in SPLITS}
    graph.node_counts = [count for count, _ in getattr(store, "node_types", {}).values()]
    return graph


def edges_of(graph, edge_type):
    """The `Edges` of a type in a graph, or all with None."""
    if edge_type is None:
        return Edges(graph.indptr, graph.indices)
    return Edges(*lists_of(graph, graph.edge_type.to(torch.int32) == edge_type))


def lists_of(graph, keep):
    """Neighbour lists of the edges of a graph where keep [M] is True -> indptr, indices."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])
    return before[graph.indptr], graph.indices[keep]


def positives(edges, seed):
    """Every pair of different nodes with an edge, once -> int64 [P, 2]; where its reverse is an edge too, a coin is
    tossed."""
    destination, source = torch.repeat_interleave(edges.indptr.diff()), edges.sources.long()
    both = edges.has(destination, source)
    keep = (source < destination) | ((source > destination) & ~both)
    # of equal edges the first
    keep[1:] &= (source[1:] != source[:-1]) | (destination[1:] != destination[:-1])
    pairs = torch.stack([source, destination], 1)[keep]
    turn = both[keep] & (bits_of(pairs, mix(seed) ^ 1) < 1 << 52)
    return torch.where(turn.unsqueeze(1), pairs.flip(1), pairs)


def times_of(edges, edge_time, pairs, how):
    """The time of the first edge between the two nodes of each pair [P, 2], in either direction -> int64 [P]."""
    never = torch.iinfo(torch.int64).max
    places, which = edges.between(pairs)
    times = torch.full((len(pairs),), never)
    times.scatter_reduce_(0, which, edge_time[places], "amin")
    if len(lost := pairs[times == never]):
        why = f"the pair {lost[0].tolist()} has no time, for it is no edge"
        raise StoreError(f"--edge-split {how}: {why}; --temporal off takes it")
    return times


def bits_of(pairs, key):
    """53 random bits for each pair [P, 2], the same for a pair and its reverse -> int64 [P]."""
    return bits(mix(key), pairs.amin(1), pairs.amax(1))


def pairs_of(store, edges, among, how, seed):
    """Split the pairs of `among` as `split_edges` says -> {part: int64 [n, 2]} in the order drawn; without "train" for
    "none", and for a file without it."""
    if how.endswith(".npz"):
        name, none = f"--edge-split {how}", np.zeros((0, 2), np.int64)
        with reading(name), np.load(how, allow_pickle=False) as content:
            arrays = {"valid": none, "test": none, **content}
        if unknown := set(arrays) - set(SPLITS):
            names = ", ".join(SPLITS)
            raise StoreError(f"{name} has an array {min(unknown)!r}: its arrays are {names}")
        V = store.num_nodes
        pairs = {part: checked_pairs(f"{name}: {part}", arrays[part], V) for part in arrays}
        for part, ends in pairs.items():
            if len(loops := ends[ends[:, 0] == ends[:, 1]]):
                raise StoreError(f"{name}: {part} has {loops[0].tolist()}, a node and itself")
        valid, test = (pairs[part].sort(1)[0] @ torch.tensor([V, 1]) for part in SPLITS[1:])
        if len(twice := pairs["valid"][torch.isin(valid, test)]):
            raise StoreError(f"{name}: the pair {twice[0].tolist()} is in valid and in test")
        return pairs
    if how == "none":
        return dict.fromkeys(("valid", "test"), torch.zeros(0, 2, dtype=torch.int64))
    pairs, percent = positives(among, seed), shares(how)
    by_time = how.startswith("time:")
    key = times_of(edges, store.edge_time, pairs, how) if by_time else bits_of(pairs, mix(seed))
    valid, test = (len(pairs) * share // 100 for share in percent[1:])
    parts = pairs[key.argsort(stable=True)].split([len(pairs) - valid - test, valid, test])
    return dict(zip(SPLITS, parts))


def checked_pairs(name, pairs, num_nodes):
    """Integers [n, 2] below V as an int64 tensor; StoreError for anything else."""
    pairs = np.asarray(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        found = f"{list(pairs.shape)} {pairs.dtype}"
        raise StoreError(f"{name} is {found}: integers [n, 2] are needed, source and destination")
    pairs = torch.from_numpy(pairs.astype(np.int64))
    if (bad := outside(pairs, num_nodes)) is not None:
        raise StoreError(f"{name} has node {bad}: node ids lie in [0, {num_nodes})")
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# negatives


class Negatives:
    """Nodes for pairs that are no edges, each a function of a key, the number of its pair and its own number, of the type
    of the node in whose place it is.

    Args:
        edges: Edges in which no negative occurs; None: a node is not paired with itself, and that is all.
        degrees: [V]: a node is drawn in proportion to its degree^0.75 (word2vec, arXiv 1310.4546); None: all alike.
        counts: nodes of each type, in the order of their ids; all are of one type without.
    """

    def __init__(self, edges, num_nodes, degrees=None, counts=None):
        self.edges, self.num_nodes, self.upto = edges, num_nodes, None
        self.ends = torch.tensor([0, *(counts or [num_nodes])]).cumsum(0)
        if degrees is not None:  # whole numbers add up to the same sum on every device
            self.upto = F.pad((degrees.double().pow(0.75) * 1024).long().cumsum(0), (1, 0))
        if num_nodes < 2 or self.upto is not None and not self.upto[-1]:
            raise StoreError(f"no negatives: the graph has {num_nodes} nodes, or none with an edge")

    def same_type(self, nodes):
        """The first node of the type of each of these, int64, and the one behind the last."""
        self.ends = self.ends.to(nodes.device)
        kind = torch.bucketize(nodes.contiguous(), self.ends[1:], right=True)
        return self.ends[kind], self.ends[kind + 1]

    def _node(self, key, numbers, which, first, end):
        """The node drawn `which`-th of first .. end - 1, int64, for pairs of these numbers, int64; all of one shape."""
        drawn = bits(key, numbers, which)
        if self.upto is None:
            return first + ((drawn >> 21) * (end - first) >> 32)
        before = self.upto[first]
        place = before + (drawn.double() * ((self.upto[end] - before).double() / 2**53)).long()
        return torch.searchsorted(self.upto[1:], place, right=True)

    def _bad(self, source, node):
        return source == node if not self.edges else (source == node) | self.edges.has(source, node)

    def draw(self, key, numbers, pairs, count):
        """Destinations for `count` negatives of each pair -> int64 [P, count]: from its source there is no edge to any of
        them. key: int of 64 bits. numbers: int64 [P]. pairs: int64 [P, 2]. StoreError for a source that has an edge to
        every node."""
        which = torch.arange(count, device=pairs.device).expand(len(pairs), count)
        columns = numbers, pairs[:, 0], *self.same_type(pairs[:, 1])
        numbers, source, first, end = (ids.unsqueeze(1).expand_as(which) for ids in columns)
        node = self._node(key, numbers, which, first, end)
        bad = self._bad(source, node)
        for attempt in range(1, TRIES + 2 * self.num_nodes):
            places = bad.nonzero(as_tuple=True)
            if not len(places[0]):
                return node
            low, high = first[places], end[places]
            if attempt < TRIES:
                draws = which[places] + attempt * count
                node[places] = self._node(key, numbers[places], draws, low, high)
            else:
                # those of the type in turn, then, if the source has an edge to each, all nodes
                tried, after = attempt < TRIES + high - low, node[places] + 1
                of_type = low + (after - low) % (high - low)
                node[places] = torch.where(tried, of_type, after % self.num_nodes)
            bad[places] = self._bad(source[places], node[places])
        full = f"node {int(source[bad][0])} has an edge to every node"
        raise StoreError(f"{full}, so it has no negative: --unchecked-negatives takes any")

    def pairs(self, key, pairs):
        """As many pairs of nodes without an edge between them as `pairs` [P, 2]; the sources are drawn, too."""
        numbers, (first, end) = torch.arange(len(pairs)), self.same_type(pairs[:, 0])
        drawn = bits(mix(key), numbers, torch.zeros_like(numbers)) >> 21
        pairs = torch.stack([first + (drawn * (end - first) >> 32), pairs[:, 1]], 1)
        return torch.stack([pairs[:, 0], self.draw(key, numbers, pairs, 1).squeeze(1)], 1)


# ---------------------------------------------------------------------------------------------------------------------
# training


def at_times(nodes, times, num_nodes):
    """The distinct pairs of a node and a time, int64 of one shape -> (nodes [S], times [S], where each is, of that shape)."""
    values, rank = times.unique(return_inverse=True)
    both, place = (nodes + num_nodes * rank).unique(return_inverse=True)
    return both % num_nodes, values[both // num_nodes], place


class Scorer(nn.Module):
    """How likely an edge is between two embeddings, as a logit: "dot", the dot product; "distmult", with a weight for
    each column (arXiv 1412.6575); "mlp", a network of one hidden layer on their product, column by column."""

    def __init__(self, kind, width):
        super().__init__()
        self.kind = kind
        self.relation = nn.Parameter(torch.ones(width)) if kind == "distmult" else 1.0
        if kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, source, destination):
        """source [..., D] and destination [..., D], which broadcast -> logits [...]."""
        if self.kind == "mlp":
            return self.mlp(source * destination).squeeze(-1)
        return (source * self.relation * destination).sum(-1)

    def against_all(self, source, table):
        """Logits [n, V] of source [n, D] with every row of a table [V, D]."""
        if self.kind == "mlp":
            return self(source.unsqueeze(1), table)
        return source * self.relation @ table.t()


class Links:
    """Training pairs as the examples of a `NodeLoader`: which nodes are sampled for a batch of them, and the loss.

    graph: of `split_edges`. indptr, indices: its edges that carry messages, on the device of the sampler. negatives: K,
    decided on by seed; by_degree: drawn by degree^0.75; checked: against the training edges. softmax: the loss is the
    cross-entropy of a pair among its negatives; else that of each alone. exclude: leave the positives of the step out of
    its messages; off for a test that shows what it is for.
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
    ):
        self.count, self.softmax, self.exclude = negatives, softmax, exclude
        self.key, device = mix(mix(seed) ^ 2), indices.device
        self.pairs, self.edges = graph.pairs["train"].to(device), Edges(indptr, indices)
        self.times = None if graph.pair_times is None else graph.pair_times["train"].to(device)
        degrees = indptr.diff() if by_degree else None
        known = self.edges if checked else None
        self.negatives = Negatives(known, graph.num_nodes, degrees, graph.node_counts)

    def draw(self, batch):
        """The `draw` of a `NodeLoader` over the numbers of training pairs -> (nodes: ends of the pairs and their negatives;
        options of the sampler: edges of the whole step's pairs are excluded; y int64 [P, 2 + K]: where among the nodes
        the source, the destination and the negatives of each pair are)."""
        seeds, step_seeds = (ids.to(self.pairs.device) for ids in (batch.seeds, batch.step_seeds))
        pairs, key = self.pairs[seeds], mix(self.key ^ (batch.global_step & (1 << 64) - 1))
        nodes = torch.cat([pairs, self.negatives.draw(key, seeds, pairs, self.count)], 1)
        options = {}
        if self.times is None:
            nodes, y = nodes.unique(return_inverse=True)
        else:
            times = self.times[seeds].unsqueeze(1).expand_as(nodes)
            nodes, options["times"], y = at_times(nodes, times, self.negatives.num_nodes)
        if self.exclude:
            options["exclude"] = self.edges.between(self.pairs[step_seeds])[0]
        return nodes, options, y

    def loss(self, scorer, h, y):
        """Summed over pairs: cross-entropy, of the pair and, averaged, its negatives in equal parts, or of a softmax.
        h: [S, D] embeddings. y: int64 [P, 2 + K] rows of it."""
        source = h.index_select(0, y[:, 0])
        others = h.index_select(0, y[:, 1:].flatten()).view(len(y), -1, h.shape[1])
        logits = scorer(source.unsqueeze(1), others)  # [P, 1 + K]
        if self.softmax:
            return F.cross_entropy(logits, torch.zeros_like(y[:, 0]), reduction="sum")
        return (F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).mean(1)).sum() / 2


# ---------------------------------------------------------------------------------------------------------------------
# evaluation


class Evaluation:
    """What embeddings and a scorer say of the pairs of a part: MRR and Hits@K of each pair's rank among others with the
    same source, ROC-AUC and average precision against as many random pairs without an edge. graph: of `split_edges`.

    A pair is ranked against all nodes of its destination's type where there are at most SMALL nodes, leaving out other
    edges of the source, else against RANKED_AGAINST fixed ones; of equal scores the mean rank counts. Negatives are
    checked against the whole graph and are the same in every run. Of more than MOST pairs the first are taken.

    Where pairs have times, both ends and all negatives have embeddings at the time of the pair; then a pair is ranked
    against fixed nodes in any graph, and of more than MOST_TIMED the first are taken.

    Attributes:
        seen: where pairs have times, {part: (nodes int64 [n], times int64 [n]) of which embeddings are asked for}.
        examples: {part: (pairs [P, 2], as many random ones [P, 2], what the former are ranked against: [P, K], or None
            for all nodes)}: nodes, or numbers of what is `seen`.
    """

    def __init__(self, graph):
        self.graph, self.timed = graph, graph.pair_times is not None
        self.seen, self.lists = {}, None
        if graph.num_nodes <= SMALL and not self.timed:  # destinations of each source
            destinations = torch.repeat_interleave(graph.known.indptr.diff())
            reverse = torch.stack([destinations, graph.known.sources.long()])
            self.lists = from_edge_index(reverse, graph.num_nodes)
        self.negatives = Negatives(graph.known, graph.num_nodes, counts=graph.node_counts)
        self.examples = {part: self._examples(part) for part in ("valid", "test")}

    def _examples(self, part):
        pairs = self.graph.pairs[part][: MOST_TIMED if self.timed else MOST]
        key, numbers = mix(EVALUATION ^ SPLITS.index(part)), torch.arange(len(pairs))
        random, others = self.negatives.pairs(mix(key), pairs), None
        if not self.lists:
            others = self.negatives.draw(key, numbers, pairs, RANKED_AGAINST)
        if not self.timed:
            return pairs, random, others
        nodes = torch.cat([pairs, random, others], 1)
        times = self.graph.pair_times[part][: len(nodes)].unsqueeze(1).expand_as(nodes)
        *self.seen[part], place = at_times(nodes, times, self.graph.num_nodes)
        return place.tensor_split([2, 4], 1)

    @torch.no_grad()
    def __call__(self, scorer, h, part, ranks=None):
        """Figures {name: number} of "valid" or "test", the same on every rank; None for a part without pairs.
        h: float [V, D] embeddings of all nodes, on the CPU; where pairs have times, [n, D] of what is `seen`."""
        pairs, random, others = self.examples[part]
        if not len(pairs):
            return None
        scorer = copy.deepcopy(scorer).to("cpu", h.dtype)
        mine = ranks.part(len(pairs)) if ranks else slice(None)
        positive, negative = (score_pairs(scorer, h, some[mine]) for some in (pairs, random))
        place = self._ranks(scorer, h, pairs[mine], None if others is None else others[mine])
        found = torch.stack([positive, negative, place], 1)
        every = torch.cat(ranks.gather(found)) if ranks else found
        positive, negative, place = every.unbind(1)
        y = torch.cat([torch.ones_like(positive), torch.zeros_like(negative)])
        both = torch.cat([positive, negative]), y
        return {**ranking(place), "roc_auc": roc_auc(*both), "ap": average_precision(*both)}

    def _ranks(self, scorer, h, pairs, others):
        """The rank of each pair [n, 2], from 1 -> [n]."""
        width, found = self.graph.num_nodes if others is None else others.shape[1], []
        if others is not None or scorer.kind == "mlp":
            width *= h.shape[1]
        for some in torch.arange(len(pairs)).split(max(1, CHUNK // width)):
            source, destination = pairs[some].unbind(1)
            if others is None:
                scores = scorer.against_all(h[source], h)
                sums = scores.sum(1)
                own = scores.gather(1, destination.unsqueeze(1))
                scores[self._known(source)] = -torch.inf
                if len(self.negatives.ends) > 2:  # of several types
                    first, end = (n.unsqueeze(1) for n in self.negatives.same_type(destination))
                    node = torch.arange(len(h))
                    scores[(node < first) | (node >= end)] = -torch.inf
                scores.scatter_(1, destination.unsqueeze(1), -torch.inf)
            else:
                own = scorer(h[source], h[destination]).unsqueeze(1)
                scores = scorer(h[source].unsqueeze(1), h[others[some]])
                sums = scores.sum(1)
            place = 1 + (scores > own).sum(1) + (scores == own).sum(1).to(h.dtype) / 2
            # NaN is never above another score: such a pair would come first
            found.append(torch.where(sums.isfinite(), place, torch.nan))
        return torch.cat(found) if found else h.new_zeros(0)

    def _known(self, source):
        """(row, node) of what is left out of the ranking of sources [n]: themselves and where they have edges to."""
        (indptr, destinations), rows = self.lists, torch.arange(len(source))
        counts = indptr.diff()[source]
        known = destinations[expand(indptr[source], counts)].long()
        return torch.cat([rows.repeat_interleave(counts), rows]), torch.cat([known, source])


@torch.no_grad()
def score_pairs(scorer, h, pairs):
    """Logits [n] of pairs int64 [n, 2] for embeddings h [V, D] and a scorer, both in host memory."""
    parts = [scorer(*(h[ends] for ends in some.unbind(1))) for some in pairs.split(1 << 16)]
    return torch.cat(parts) if parts else h.new_zeros(0)


# ---------------------------------------------------------------------------------------------------------------------
# the task


class LinkTask(Task):
    """Learn embeddings of nodes that tell which pairs are edges."""

    name, examples, temporal = "link", "edges", "off"
    timed_pairs = embeds = True
    metrics = "mrr", "hits@1", "hits@10", "roc_auc", "ap"
    widths = "feature_dim", "edge_dim", "num_edge_types", "node_types"
    unused = {
        "is for --task node: --task link has --edge-split": "split",
        "is for --task node: --task link writes embeddings, or scores of --pairs": "predict_what",
        "is for --task node: embeddings of --task link are those at the end of time": "window",
    }

    def __init__(self, args, path, say=print):
        store, number = open_graph(path, say), None
        if args.edge_type is not None:
            if store.edge_type is None:
                raise StoreError(f"--edge-type {args.edge_type}: the edges of {path} have no types")
            names = store.edge_types or [*map(str, range(store.num_edge_types))]
            number, *more = types_called(args.edge_type, names) or [None]
            if number is None or more:
                why = f"there is {'more than one' if more else 'none'} among {'; '.join(names)}"
                raise StoreError(f"--edge-type {args.edge_type}: {why}")
        timed = args.temporal != "off"
        self.store = split_edges(store, file := args.edge_split, args.seed, timed, number)
        if file.endswith(".npz"):  # by which a checkpoint recognises the graph, too
            of_file = {file: {"bytes": 0, "sha256": sha256_of(file).hexdigest()}}
            self.store.meta = {**store.meta, "files": {**store.meta["files"], **of_file}}
        self.store.num_classes = args.hidden  # the width of embeddings
        if store.edge_type is not None:
            of = f"of type {args.edge_type}" if args.edge_type else "of all types, see --edge-type"
            nodes = ", negatives nodes of the type of a pair's second" * bool(store.node_types)
            say(f"links   pairs are edges {of}{nodes}")
        if args.edge_split != "none":
            say_empty_parts(self.store.split, "edges", say)
        if args.pairs:  # refused before anything is trained
            with reading(name := f"--pairs {args.pairs}"):
                asked = np.load(args.pairs, allow_pickle=False)
                self.asked = checked_pairs(name, asked, store.num_nodes)
        self.metric = args.metric or "mrr"

    @staticmethod
    def network(args, widths, own=None):
        network = own or gnn(args, widths, args.hidden)
        if hasattr(network, "scorer"):
            needed = "--task link gives the network one of that name"
            raise StoreError(f"--model {args.model} has a `scorer`: {needed}, call it otherwise")
        network.scorer = Scorer(args.scorer, args.hidden)
        return network

    def sampled_for(self, args):
        return 2 + args.negatives

    def seeds(self):
        return torch.arange(self.store.num_nodes)

    def attach(self, ranks, args, used, indptr, indices):
        options = {"negatives": args.negatives, "checked": not args.unchecked_negatives}
        options |= {"by_degree": args.negatives_by == "degree", "seed": args.seed}
        options["softmax"] = args.link_loss == "softmax"
        self.links = Links(self.store, indptr, indices, **options)
        self.draw, self.evaluation = self.links.draw, Evaluation(self.store)

    def loss(self, network, output, y):
        return self.links.loss(network.scorer, output, y)

    def scores(self, run, part, h=None):
        """MRR, ROC-AUC and so on of the pairs of a part; None where there are none. h: exact embeddings [V, D]."""
        if not len(self.store.split[part]):
            return None
        if self.evaluation.timed:
            h = run.sampled(*self.evaluation.seen[part])
        return self.evaluation(run.model.scorer, run.exact() if h is None else h, part, run.ranks)

    def validate(self, run):
        scores = self.scores(run, "valid")
        return {"valid": scores}, scores and scores[self.metric]

    def finish(self, run, report):
        """Report scores, write embeddings or the logits of --pairs -> {"part name": score}."""
        args = run.args
        h = None if self.evaluation.timed and not args.predict else run.exact()
        exact = report.scores({part: self.scores(run, part, h) for part in ("valid", "test")})
        if args.predict and args.pairs:
            scorer = copy.deepcopy(run.model.scorer).to("cpu", h.dtype)
            h = score_pairs(scorer, h, self.asked)
        if args.predict:
            report.write(h)
        return exact

    def lines(self, args, split, parameters):
        graph, network, fanout = described(args, self.store)
        pairs, features = len(self.store.split["train"]), self.store.feature_dim
        how = args.negatives_by + ", unchecked" * args.unchecked_negatives
        negatives = f"{args.negatives} negatives a pair, {how}"
        yield f"{graph} that carry messages, {features} features; pairs: {split} ({args.edge_split})"
        network += f", scorer {args.scorer}, {parameters}"
        yield f"model   {network}; {fanout}; {negatives}, {args.link_loss}"
        if args.total_batch * 2 > pairs:
            left = f"its own {args.total_batch:,} of {pairs:,} pairs out of the messages"
            yield f"advice  a step leaves {left}: give a smaller --batch-size"
