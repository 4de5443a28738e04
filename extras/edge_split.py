"""Split edges into pairs to train on, to validate and to test: `split_edges`; an edge and its reverse are one pair."""

import argparse
import re
from types import SimpleNamespace

import numpy as np
import torch

from disk.columns import ALWAYS, EDGE_TIME, NAMES, NODE_TIME, OF_EDGES, node_ids
from disk.convert import by_part, from_edge_index
from disk.files import SPLITS, StoreError, reading
from extras import number_before
from native import kernels
from sampler import DAMAGED, DamagedGraph, expand, mix, outside, prefix_sum, random_bits

HELD_OUT = SPLITS[1:]  # parts whose pairs carry no messages


class Edges:
    """Batched look-up of edges in a CSC graph, by binary search in its neighbour lists.

    indptr: int64 [V+1], indices: [M], on the same device. sources: [M], `indices` if ascending within each list, else a
    sorted copy (of edges sorted by time, say). order: [M], index of each of `sources` in `indices`; None without copy.
    """

    def __init__(self, indptr, indices):
        self.indptr = indptr.contiguous()
        self.sources = indices.contiguous()
        self.order = None
        falls = (indices[1:] < indices[:-1]).nonzero().squeeze(1) + 1
        if (self.indptr[torch.searchsorted(self.indptr, falls)] != falls).any():  # within a list
            keys = torch.repeat_interleave(indptr.diff()) * (indptr.numel() - 1) + indices
            self.order = keys.argsort(stable=True)
            self.sources = indices[self.order]

    def place(self, source, destination, strict=True):
        """Look up edges source -> destination, int64 [n] -> the index in `sources` of the first of each, or where it would
        be; if not strict, of the edge behind the last."""
        low = self.indptr[destination]
        degree = self.indptr[destination + 1] - low
        return low + number_before(self.sources, low, degree, source, strict)

    def has(self, source, destination):
        """Check which edges source -> destination exist, int64 of the same shape -> bool of that shape."""
        start = source.flatten()
        end = destination.flatten()
        place = self.place(start, end)
        exists = place < self.indptr[end + 1]
        if len(self.sources):  # place 0 stands in where there is no edge
            exists &= self.sources.index_select(0, place * exists) == start
        return exists.view_as(source)

    def any_of(self, source, destination, wanted):
        """Check for which of source, destination int64 [n] any of the edges from one to the other is wanted -> bool [n].
        wanted: function of their indices in `sources` [m] and, for each, which of the n it is [m] -> bool [m]."""
        first = self.place(source, destination)
        counts = self.place(source, destination, strict=False) - first
        row = torch.repeat_interleave(counts)
        row = row[wanted(expand(first, counts), row)]
        return torch.zeros_like(source, dtype=torch.bool).index_fill_(0, row, True)

    def ranges(self, pairs):
        """Find the edges of each pair int64 [n, 2], then those of each reverse pair -> (index in `sources` of the first
        [2n], how many they are [2n])."""
        if code := kernels.load_links(self.sources.dtype, pairs.device):
            first, counts = pairs.new_empty(2, 2 * len(pairs))
            values = {
                "pairs": pairs.contiguous(),
                "P": len(pairs),
                "indptr": self.indptr,
                "sources": self.sources,
                "first": first,
                "counts": counts,
            }
            code.run("between", len(first), values)
            return first, counts
        source, destination = torch.cat([pairs, pairs.flip(1)]).unbind(1)
        first = self.place(source, destination)
        return first, self.place(source, destination, strict=False) - first

    def listed(self, first, counts, total=None):
        """List the edges of `ranges` -> their indices in `indices`. total: the sum of counts, for which a GPU then need not
        be waited."""
        places = expand(first, counts, total)
        return places if self.order is None else self.order[places]

    def between(self, pairs):
        """Find all edges between the nodes of each pair [n, 2], in either direction -> (their indices in `indices`; for
        each the row of its pair)."""
        first, counts = self.ranges(pairs)
        rows = torch.arange(len(pairs), device=first.device).repeat(2).repeat_interleave(counts)
        return self.listed(first, counts), rows


def split_type(text):
    """Check the value of --edge-split, as an argparse type -> the text."""
    if text != "none" and not text.endswith(".npz") and not shares(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write the percent of "
            "train/valid/test, as in 85/5/10, or time:85/5/10, an .npz file, or none"
        )
    return text


def shares(text):
    """Parse '85/5/10' or 'time:85/5/10' -> [85, 5, 10]; None for another form, no train, or another sum than 100."""
    match = re.fullmatch(r"(?:time:)?(\d{1,3})/(\d{1,3})/(\d{1,3})", text, re.ASCII)
    if not match:
        return None
    percent = [int(number) for number in match.groups()]
    return percent if sum(percent) == 100 and percent[0] else None


def split_edges(store, how, seed=0, *, timed=False, edge_type=None, say=lambda line: None):
    """Split the edges of a store for link prediction -> a view of it. Takes about 60 bytes of memory per edge;
    DamagedGraph for an indptr that falls or an offset or node id outside the graph.

    Args:
        store: GraphStore, or anything with indptr, indices, num_nodes and perhaps edge_time.
        how: "85/5/10": percent of the pairs for train, valid and test, drawn by `seed`; "time:85/5/10": the latest are
            for test, those before for valid, and if not timed, no message goes along an edge later than all of train; the
            name of an .npz file with `valid` and `test`, perhaps `train`, each integers or text [n, 2], source and
            destination, as for `GraphStore.node_ids`; "none": all pairs are for training.
        timed: give each pair the time of the first edge between its nodes, in either direction; see `times_of`.
        edge_type: number of the type whose edges are the pairs; None: of all types. Messages go along all types.
        say: prints a line; called with how many pairs of a file are edges.

    Returns:
        A shallow copy of the store, where indptr, indices, num_edges and the edge columns lack the pairs of valid and
        test and their reverses: messages go along the rest. pairs: {part: int64 [n, 2], source and destination}.
        pair_times: {part: int64 [n]}, or None. split: {part: ids of its pairs}. known_edges: `Edges` of the whole graph,
        and of pairs given that are not in it; known_of_type: of these, those of the type. node_counts: nodes of each
        type, [] without types.
    """
    name = getattr(store, "path", "the graph")
    if getattr(store, EDGE_TIME.name, None) is None and (timed or how.startswith("time:")):
        flag = "--temporal" if timed else f"--edge-split {how}"
        raise StoreError(f"{flag} goes by the times of edges, and {name} has none")
    ranges = (store.indptr, store.indices.numel() + 1), (store.indices, store.num_nodes)
    if (store.indptr.diff() < 0).any() or any(outside(*pair) is not None for pair in ranges):
        raise DamagedGraph(DAMAGED)
    edges = Edges(store.indptr, store.indices)
    typed_edges = edges if edge_type is None else edges_of(store, edge_type)
    until = None
    if how.endswith(".npz"):
        pairs = pairs_of_file(store, how, edge_type)
        found = {part: typed_edges.has(*pairs[part].unbind(1)) for part in HELD_OUT}
        of = "the graph" if edge_type is None else "the type to predict"
        say(f"edges   of {how}: {counts_of(found)} pairs are edges of {of}")
    elif how == "none":
        pairs = dict.fromkeys(HELD_OUT, torch.zeros(0, 2, dtype=torch.int64))
    else:
        pairs = drawn_pairs(store, edges, typed_edges, how, seed)
        if how.startswith("time:") and not timed and len(pairs["train"]):
            until = times_of(store, edges, pairs["train"][-1:], how)  # the latest
    held = torch.cat([pairs[part] for part in HELD_OUT])
    messages = without_edges(store, edges, held, until)
    if until is not None:
        kept = f"{messages.num_edges:,} of {store.indices.numel():,}"
        say(f"edges   {kept} carry messages: none later than training pairs")
    rest = edges_of(messages, edge_type)
    if "train" not in pairs:
        pairs["train"] = positives(rest, seed)
    elif how.endswith(".npz") and len(bad := pairs["train"][~rest.has(*pairs["train"].unbind(1))]):
        raise StoreError(
            f"--edge-split {how}: {called(store, bad[0])} in train is no edge, or is held out"
        )
    if not len(pairs["train"]):
        raise StoreError(f"--edge-split {how}: {name} has no edges left to train on")
    known = joined(edges, held)
    return view_of(
        messages,
        pairs=pairs,
        pair_times={p: times_of(store, edges, pairs[p], how) for p in SPLITS} if timed else None,
        split={part: torch.arange(len(pairs[part])) for part in SPLITS},
        known_edges=known,
        known_of_type=known if edge_type is None else joined(typed_edges, held),
        node_counts=[count for count, _ in getattr(store, "node_types", {}).values()],
    )


def view_of(store, **attributes):
    """Return a shallow copy of a store, or of a named tuple as `Graph`, with other or further attributes."""
    if isinstance(store, tuple):
        return SimpleNamespace(**{"num_nodes": store.num_nodes, **store._asdict(), **attributes})
    view = type(store).__new__(type(store))  # copy.copy would open a GraphStore again
    vars(view).update(vars(store) | attributes)
    return view


def without_edges(store, edges, pairs, until=None):
    """Return a view of a store without the edges between the nodes of pairs [n, 2], in either direction, and those later
    than the time until. edges: `Edges` of the store."""
    if until is None and not len(pairs):
        return store
    keep = torch.ones(store.indices.numel(), dtype=torch.bool)
    if until is not None:
        keep = there_since(store) <= until
    keep[edges.between(pairs)[0]] = False
    indptr, indices = lists_of(store, keep)
    stored = [name for name in OF_EDGES if getattr(store, name, None) is not None]
    return view_of(
        store,
        indptr=indptr,
        indices=indices,
        num_edges=indices.numel(),
        sampled_indices=indices,
        sampling_threads=None,
        **{name: getattr(store, name)[keep] for name in stored},
    )


def joined(edges, pairs):
    """Return `Edges` with those of pairs [n, 2] as well: pairs of a file may be no edges of the graph."""
    if edges.has(*pairs.unbind(1)).all():
        return edges
    ends = torch.stack([edges.sources.long(), torch.repeat_interleave(edges.indptr.diff())])
    return Edges(*from_edge_index(torch.cat([ends, pairs.T], 1), edges.indptr.numel() - 1))


def edges_of(graph, edge_type):
    """Return the `Edges` of one type in a graph; edge_type None: of all."""
    if edge_type is None:
        return Edges(graph.indptr, graph.indices)
    return Edges(*lists_of(graph, graph.edge_type.to(torch.int32) == edge_type))


def lists_of(graph, keep):
    """Select the edges of a graph where the mask keep [M] is True -> (indptr, indices)."""
    return prefix_sum(keep)[graph.indptr], graph.indices[keep]


def positives(edges, seed):
    """List every pair of different nodes with an edge once -> int64 [P, 2], source and destination; if its reverse is
    an edge, too, the direction is drawn."""
    destination = torch.repeat_interleave(edges.indptr.diff())
    source = edges.sources.long()
    both = edges.has(destination, source)
    keep = (source < destination) | ((source > destination) & ~both)
    # keep the first of equal edges
    keep[1:] &= (source[1:] != source[:-1]) | (destination[1:] != destination[:-1])
    pairs = torch.stack([source, destination], 1)[keep]
    flip = both[keep] & (bits_of(pairs, mix(seed) ^ 1) < 1 << 52)
    return torch.where(flip.unsqueeze(1), pairs.flip(1), pairs)


def times_of(store, edges, pairs, how):
    """Find the time of the first edge between the nodes of each pair [P, 2], in either direction -> int64 [P]."""
    places, which = edges.between(pairs)
    times = torch.zeros(len(pairs), dtype=torch.int64)
    times.scatter_reduce_(0, which, there_since(store)[places], "amin", include_self=False)
    if len(lost := pairs[which.bincount(minlength=len(pairs)) == 0]):
        raise StoreError(
            f"--edge-split {how}: the pair {called(store, lost[0])} has no time, for it is no edge"
            "; --temporal off takes it"
        )
    return times


def there_since(store):
    """Return the time of each edge, int64 [M]. Where edges have the times of their sources, as those get that have none of
    their own, it is the later one of both ends: an edge is there once they are."""
    times = getattr(store, NODE_TIME.name, None)
    if times is None:
        return store.edge_time
    of_sources = times[store.indices.long()]
    if not ((store.edge_time == of_sources) | (store.edge_time == ALWAYS)).all():
        return store.edge_time
    return torch.maximum(store.edge_time, times.repeat_interleave(store.indptr.diff()))


def bits_of(pairs, key):
    """Draw 53 random bits for each pair [P, 2], the same for a pair and its reverse -> int64 [P]."""
    ends = pairs.unbind(1)
    return random_bits(mix(key), torch.minimum(*ends), torch.maximum(*ends), bits=53)


def drawn_pairs(store, edges, typed_edges, how, seed):
    """Split the pairs of the `Edges` typed_edges by percent, in the order drawn by `seed` or of their times (see
    `split_edges`) -> {part: int64 [n, 2]}. edges: `Edges` of the store."""
    pairs = positives(typed_edges, seed)
    if how.startswith("time:"):
        key = times_of(store, edges, pairs, how)
    else:
        key = bits_of(pairs, mix(seed))
    valid, test = (len(pairs) * share // 100 for share in shares(how)[1:])
    parts = pairs[key.argsort(stable=True)].split([len(pairs) - valid - test, valid, test])
    return dict(zip(SPLITS, parts))


def pairs_of_file(store, file, edge_type):
    """Read the pairs of an .npz file (see `split_edges`) -> {part: int64 [n, 2]}; StoreError for self-loops, and for a
    pair in valid and in test. "train" only if the file has it."""
    name = f"--edge-split {file}"
    arrays = dict.fromkeys(HELD_OUT, np.zeros((0, 2), np.int64))
    with reading(name), np.load(file, allow_pickle=False) as content:
        arrays |= by_part(name, content)
    pairs = {
        part: checked_pairs(f"{name}: {part}", arrays[part], store, edge_type) for part in arrays
    }
    for part, ends in pairs.items():
        if len(loops := ends[ends[:, 0] == ends[:, 1]]):
            raise StoreError(f"{name}: leave the self-loop {called(store, loops[0])} out of {part}")
    base = torch.tensor([store.num_nodes, 1])
    valid, test = (pairs[part].sort(1)[0] @ base for part in HELD_OUT)
    if len(twice := pairs["valid"][torch.isin(valid, test)]):
        raise StoreError(f"{name}: {called(store, twice[0])} is in valid and in test: keep one")
    return pairs


def counts_of(masks):
    """Count what is true in masks {part: bool [n]} -> text, for messages."""
    counts = [f"{int(mask.sum()):,} of {len(mask):,} {part}" for part, mask in masks.items()]
    return " and ".join(counts)


def check_types(name, pairs, store, edge_type):
    """Raise StoreError for one of the pairs [n, 2] whose ends edges of a type (None: of any) do not join."""
    node_types = [*store.node_types]
    ends = torch.tensor([count for count, _ in store.node_types.values()]).cumsum(0)
    edge_types = store.edge_types if edge_type is None else [store.edge_types[edge_type]]
    allowed = torch.zeros(len(ends), len(ends), dtype=torch.bool)
    for source, _, destination in (kind.split(",") for kind in edge_types):
        allowed[node_types.index(source), node_types.index(destination)] = True
    kinds = torch.bucketize(pairs, ends, right=True)
    bad = ~allowed[kinds.unbind(1)]
    if bad.any():
        goes = " to ".join(node_types[kind] for kind in kinds[bad][0].tolist())
        starts = zip(node_types, [0, *ends.tolist()])
        count = ", ".join(f"{kind} from {start}" for kind, start in starts)
        raise StoreError(
            f"{name}: {pairs[bad][0].tolist()} goes from {goes}: "
            f"edges are {'; '.join(edge_types)}; ids count all nodes, {count}"
        )


def checked_pairs(name, pairs, store, edge_type):
    """Look up the nodes of pairs [n, 2] -> int64 tensor [n, 2]; StoreError for another shape, dtype or an unknown node,
    and for ends that edges of the type do not join."""
    pairs = np.asarray(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iuUS":
        raise StoreError(
            f"{name} is {list(pairs.shape)} {pairs.dtype}: "
            "integers or names [n, 2] are needed, source and destination"
        )
    if hasattr(store, "node_ids"):
        if edge_type is not None and store.node_types and NAMES in store.meta["files"]:
            ends = zip(pairs.T, store.edge_types[edge_type].split(",")[::2])
            pairs = torch.stack([store.node_ids(ids, name, of) for ids, of in ends], 1)
        else:
            pairs = store.node_ids(pairs, name)
    else:
        pairs = node_ids(name, pairs, store.num_nodes)
    if getattr(store, "edge_types", None) and store.node_types:
        check_types(name, pairs, store, edge_type)
    return pairs


def called(store, pair):
    """Return the names of the nodes of a pair [2], or their row numbers, for messages."""
    names = store.node_names() if hasattr(store, "node_names") else None
    return [names[node] for node in pair] if names else pair.tolist()
