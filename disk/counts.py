"""Count what is unusual about a graph's edges: duplicates, self loops, missing reverses, isolated nodes.

    meta["edges"] = count_edges(indptr, indices)      # once, when a store is built
    print(edge_line(store))                           # 4,300 edges: 2,000 duplicates, 300 self loops, ...

Letters: V nodes, M edges. This file needs numpy.
"""

from __future__ import annotations

import numpy as np

EDGE_CHUNK = 1 << 22  # edges read at a time
# reverses are looked up for every edge of a graph of up to EXACT edges, else for a SAMPLE
EXACT, SAMPLE = 1 << 20, 1 << 16
COUNTED = ("duplicates", "self_loops", "isolated", "one_way", "one_way_of")


def count_edges(indptr, indices) -> dict[str, int]:
    """Count in one pass over the edges, in bounded memory, whatever the order within a neighbour list.

    Args:
        indptr: int64 [V + 1]. indices: integers [M], perhaps mapped.

    Returns:
        `duplicates`: edges that repeat another; `self_loops`; `isolated`: nodes without any edge; `one_way`: edges
        without a reverse, among the `one_way_of` edges that were looked up.
    """
    duplicates = self_loops = 0
    touched = indptr[1:] > indptr[:-1]
    for a, b, nodes in _lists(indptr, np.arange(len(indptr) - 1)):
        src, dst = indices[a:b], np.repeat(nodes, np.diff(indptr[nodes[0] : nodes[-1] + 2]))
        self_loops += int((src == dst).sum())
        touched[src] = True
        same = dst[1:] == dst[:-1]
        if (same & (src[1:] < src[:-1])).any():
            keys = _keys(dst, src, len(indptr))
            keys.sort()
            duplicates += int((keys[1:] == keys[:-1]).sum())
        else:
            duplicates += int((same & (src[1:] == src[:-1])).sum())
    one_way, one_way_of = without_reverse(indptr, indices)
    isolated = int((~touched).sum())
    return dict(zip(COUNTED, (duplicates, self_loops, isolated, one_way, one_way_of)))


def without_reverse(indptr, indices) -> tuple[int, int]:
    """Count edges (u -> v) without an edge (v -> u) -> (how many, of how many edges that were looked up)."""
    num_edges = len(indices)
    if num_edges <= EXACT:
        edges = np.arange(num_edges)
    else:
        edges = np.sort(np.random.default_rng(0).integers(0, num_edges, SAMPLE))
    dst, src = np.searchsorted(indptr, edges, "right") - 1, indices[edges].astype(np.int64)
    wanted, times = np.unique(_keys(src, dst, len(indptr)), return_counts=True)
    found = np.zeros(len(wanted), bool)
    for *_, nodes in _lists(indptr, np.unique(src)):
        counts = indptr[nodes + 1] - indptr[nodes]
        ends = np.cumsum(counts)
        at = np.arange(ends[-1]) + np.repeat(indptr[nodes] - ends + counts, counts)
        keys = _keys(np.repeat(nodes, counts), indices[at], len(indptr))
        low, high = np.searchsorted(wanted, _keys(nodes[[0, -1]] + [0, 1], 0, len(indptr)))
        found[low:high] |= np.isin(wanted[low:high], keys)
    return int(times[~found].sum()), len(edges)


def _lists(indptr, nodes):
    """Cut ascending nodes into runs whose lists have up to EDGE_CHUNK edges together (or one node) -> (first edge,
    edge behind the last, nodes) of each."""
    ends = np.cumsum(indptr[nodes + 1] - indptr[nodes])
    first = 0
    while first < len(nodes):
        most = (ends[first - 1] if first else 0) + EDGE_CHUNK
        last = max(first + 1, int(np.searchsorted(ends, most, "right")))
        yield indptr[nodes[first]], indptr[nodes[last - 1] + 1], nodes[first:last]
        first = last


def _keys(rows, columns, count) -> np.ndarray:
    """One uint64 for each pair, in the order of the pairs."""
    keys = np.asarray(rows).astype(np.uint64)
    keys *= np.uint64(count)
    keys += np.asarray(columns).astype(np.uint64)
    return keys


def edge_line(store) -> str | None:
    """What is unusual about the edges of an open store, for one line; None where a large one was not counted."""
    found = store.meta.get("edges")
    if type(found) is not dict or any(type(found.get(name)) is not int for name in COUNTED):
        if store.num_edges > EXACT:
            return None
        found = count_edges(store.indptr.numpy(), store.indices.numpy())
    share = 100 * found["one_way"] / max(found["one_way_of"], 1)
    one_way = f"{share:.0f} %" if share >= 1 else f"{found['one_way']:,}"
    if 0 < share < 1 and found["one_way_of"] < store.num_edges:
        one_way = "under 1 %"
    parts = [
        f"{found['duplicates']:,} duplicates" * bool(found["duplicates"]),
        f"{found['self_loops']:,} self loops" * bool(found["self_loops"]),
        f"{one_way} without a reverse" * bool(found["one_way"]),
        f"{found['isolated']:,} isolated nodes" * bool(found["isolated"]),
    ]
    return f"{store.num_edges:,} edges: " + (
        ", ".join(filter(None, parts)) or "no duplicates or self loops, every edge has its reverse"
    )
