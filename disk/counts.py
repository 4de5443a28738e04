"""Count anomalies in a graph's edges: duplicates, self loops, missing reverses, isolated nodes.

    meta["edges"] = count_edges(indptr, indices)      # once, when a store is built
    print(edge_line(store))                           # 4,300 edges: 2,000 duplicates, 300 self loops, ...

V nodes, M edges.
"""

import numpy as np

from disk.files import plural

EDGE_CHUNK = 1 << 22  # edges read at a time
# with up to EXACT edges the reverse of each is looked up, with more those of SAMPLE random edges
EXACT, SAMPLE = 1 << 20, 1 << 16
COUNTED = ("duplicates", "self_loops", "isolated", "one_way", "one_way_of")


def count_edges(indptr, indices, types=None) -> dict[str, int]:
    """Count unusual edges in one pass, EDGE_CHUNK or one neighbour list at a time; lists may be in any order.

    Args:
        indptr: int64 [V + 1]. indices, types: integers [M], perhaps memory-mapped; None without types.

    Returns:
        `duplicates`: edges that repeat another of their type; `self_loops`; `isolated`: nodes without any edge;
        `one_way`: edges without a reverse, among the `one_way_of` edges that were looked up.
    """
    num_nodes, num_edges = len(indptr) - 1, len(indices)
    looked_up = np.arange(num_edges)
    if num_edges > EXACT:
        looked_up = np.sort(np.random.default_rng(0).integers(0, num_edges, SAMPLE))
    src, dst = indices[looked_up], np.searchsorted(indptr, looked_up, "right") - 1
    reverses, counts = np.unique(_keys(src, dst, num_nodes), return_counts=True)
    exists = np.zeros(len(reverses), bool)
    touched, first, duplicates, self_loops = indptr[1:] > indptr[:-1], 0, 0, 0
    while first < num_nodes:  # neighbour lists of up to EDGE_CHUNK edges in all, or one longer list
        last = int(np.searchsorted(indptr, indptr[first] + EDGE_CHUNK, "right")) - 1
        last = max(last, first + 1)
        src, sizes = indices[indptr[first] : indptr[last]], np.diff(indptr[first : last + 1])
        dst = np.repeat(np.arange(first, last), sizes)
        self_loops += int((src == dst).sum())
        touched[src] = True
        keys = _keys(dst, src, num_nodes)
        kinds = keys if types is None else types[indptr[first] : indptr[last]]
        order = np.lexsort([kinds, keys])  # fast where the lists are sorted
        keys, kinds = keys[order], kinds[order]
        duplicates += int(((keys[1:] == keys[:-1]) & (kinds[1:] == kinds[:-1])).sum())
        low, high = np.searchsorted(reverses, _keys([first, last], 0, num_nodes))
        wanted = reverses[low:high]
        exists[low:high] |= np.searchsorted(keys, wanted, "right") > np.searchsorted(keys, wanted)
        first = last
    one_way, isolated = int(counts[~exists].sum()), int((~touched).sum())
    return dict(zip(COUNTED, (duplicates, self_loops, isolated, one_way, len(looked_up))))


def _keys(rows, columns, count) -> np.ndarray:
    """Pack pairs (row, column < count) into uint64 keys that sort as the pairs do."""
    keys = np.asarray(rows).astype(np.uint64)
    keys *= np.uint64(count)
    keys += np.asarray(columns).astype(np.uint64)
    return keys


def edge_line(store) -> str | None:
    """Describe what is unusual about a store's edges in one line; None for a large store built without counts."""
    counted = store.meta.get("edges")
    if type(counted) is not dict or any(type(counted.get(name)) is not int for name in COUNTED):
        if store.num_edges > EXACT:
            return None
        types = None if store.edge_type is None else store.edge_type.numpy()
        counted = count_edges(store.indptr.numpy(), store.indices.numpy(), types)
    share = 100 * counted["one_way"] / max(counted["one_way_of"], 1)
    rounded = "over 99" if 99 < share < 100 else "under 1" if share < 1 else f"{share:.0f}"
    words = {
        "duplicates": plural(counted["duplicates"], "duplicate"),
        "self_loops": plural(counted["self_loops"], "self loop"),
        "one_way": f"{rounded} % without a reverse",
        "isolated": plural(counted["isolated"], "isolated node"),
    }
    unusual = ", ".join(text for name, text in words.items() if counted[name])
    looked_up, every = counted["one_way_of"], "every edge"
    if looked_up < store.num_edges:
        every = f"each of {plural(looked_up, 'edge')} drawn"
    unusual = unusual or f"no duplicates or self loops, {every} has its reverse"
    return f"{store.num_edges:,} edges: {unusual}"
