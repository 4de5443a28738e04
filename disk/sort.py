"""Edges in any order -> CSC: sorted by destination, then type and time (if any), then source. In bounded memory, except
for the edges into one node, which are sorted together: with columns they take about 140 bytes each.

    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources in sorted_sources((edge_index, None, None), options, indptr, folder):
        ...                                   # the next part of `indices`; indptr is complete after the last one

V nodes, M edges. This file needs disk/files.py and numpy.
"""

import functools
import os
import tempfile
from collections.abc import Iterator

import numpy as np

from disk.files import StoreError, chunked, integers, progress_bar, refuse

EDGE_CHUNK = 1 << 22  # edges handled at a time
FEW_EDGES = 1 << 14  # edges sorted at a time with their numbers and times, to stay in the CPU cache
SORT_EDGES = 1 << 27  # most edges to sort in memory, 1 GiB of keys; more go through the disk


def edge_chunks(edge_index, indptr, indices, num_nodes, options, numbered) -> Iterator[tuple]:
    """Yield (sources, destinations) of EDGE_CHUNK edges at a time, checked, with self-loops dropped and reverses added
    as `options` say; numbered: also the number of each edge in the input, for a reverse plus M."""
    num_edges = edge_index.shape[1] if indptr is None else indices.shape[0]
    for a in range(0, num_edges, EDGE_CHUNK):
        b = min(a + EDGE_CHUNK, num_edges)
        if indptr is None:
            pairs = np.asarray(edge_index[:, a:b])
            # int32 is kept: half the bytes to read
            src, dst = pairs if pairs.dtype == np.int32 else integers("edge_index", pairs)
        else:
            src = integers("indices", indices[a:b])
            first, last = np.searchsorted(indptr, a, "right") - 1, np.searchsorted(indptr, b)
            counts = np.diff(np.clip(indptr[first : last + 1], a, b))
            dst = np.repeat(np.arange(first, last), counts)
        if min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num_nodes:
            bad = np.flatnonzero((src < 0) | (src >= num_nodes) | (dst < 0) | (dst >= num_nodes))[0]
            ends = f"from node {src[bad]} to node {dst[bad]}"
            hint = "; do they count from 1?" if max(src.max(), dst.max()) == num_nodes else ""
            why = f"node ids lie in [0, {num_nodes}){hint}"
            raise StoreError(f"edge {a + bad} goes {ends}: {why}")
        numbers = [np.arange(a, b)] if numbered else []
        if options["drop_self_loops"]:
            keep = np.flatnonzero(src != dst)
            src, dst, *numbers = (array[keep] for array in (src, dst, *numbers))
        yield src, dst, *numbers
        if options["symmetrize"]:
            yield dst, src, *(array + num_edges for array in numbers)


def sorted_sources(
    graph, options, indptr, folder, order=None, by=(), node_time=None, progress=False
):
    """Sort edges by destination, then type and time, then source -> yields chunks of the sorted sources.

    (destination, source) of an edge are packed into one 64-bit key: numpy sorts those with SIMD instructions. With
    `order` edges carry their numbers in the input and are sorted a quarter as many at a time; equal ones stay in input
    order, reverses after the edges that were given. Of equal edges of one type `drop_duplicates` keeps the earliest by
    time, without times the first.

    Args:
        graph: edge_index [2, M], or None and the indptr and indices of CSC. options: those of `build_store`.
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: for a temporary file of 8 bytes per edge, 16 with `order`, if there is more than one range.
        order: binary file to write int64 [M'] to, the number in the input of each sorted edge; or None.
        by: (types, times) of the edges of the input, integers [M] or None each; empty without `order`.
        node_time: int64 [V]: an edge, also a reverse, has the time of its source; None: that of `by`, if any.
    """
    bits, numbered = max(len(indptr) - 2, 1).bit_length(), order is not None
    max_edges = max(1, SORT_EDGES >> 2) if numbered else SORT_EDGES
    num_nodes = len(indptr) - 1
    num_edges = (graph[2] if graph[0] is None else graph[0]).shape[-1]
    edges = functools.partial(edge_chunks, *graph, num_nodes, options, numbered)
    for keys, numbers in _ranges(edges, num_nodes, bits, max_edges, numbered, folder, progress):
        unique = options["drop_duplicates"]
        if numbered:
            columns = num_edges, by, node_time
            parts = _sorted_with_numbers(keys, numbers, *columns, unique, bits)
        else:
            parts = _sorted_keys(keys, unique)
        for chunk, number in parts:
            dst = (chunk >> np.uint64(bits)).view(np.int64)
            if len(dst):
                indptr[dst[0] + 1 : dst[-1] + 2] += np.bincount(dst - dst[0])
            if numbered:
                order.write(np.ascontiguousarray(number).data)
            yield chunk & np.uint64((1 << bits) - 1)
        keys = numbers = parts = chunk = None  # free this range before the next
    np.cumsum(indptr, out=indptr)


def _sorted_keys(keys, drop_duplicates) -> Iterator[tuple]:
    keys.sort()
    for a in range(0, len(keys), EDGE_CHUNK):
        chunk = keys[a : a + EDGE_CHUNK]
        if drop_duplicates:
            chunk = chunk[np.append(not a or keys[a - 1] != chunk[0], chunk[1:] != chunk[:-1])]
        yield chunk, None


def _sorted_with_numbers(
    keys, numbers, num_edges, by, node_time, drop_duplicates, bits
) -> Iterator[tuple]:
    for part in _few_destinations(keys, bits):
        few, number = keys[part], numbers[part]
        kind, time = ([] if a is None else [np.asarray(a[number % num_edges])] for a in by)
        if node_time is not None:
            time = [node_time[few & np.uint64((1 << bits) - 1)]]
        order = np.lexsort((number, few, *time, *kind, few >> np.uint64(bits)))
        if drop_duplicates:  # the first of each stays
            same = few
            for values in kind:  # the rank among few edges and a 16-bit type fit into 64 bits
                same = np.unique(few, return_inverse=True)[1] << 16 | values
            order = order[np.sort(np.unique(same[order], return_index=True)[1])]
        yield few[order], number[order] % num_edges


def _few_destinations(keys, bits) -> Iterator[np.ndarray]:
    """Partition edges, given by their keys [n], by destination -> yields the positions of few enough edges to be sorted
    in the CPU cache. The parts have 16-bit numbers, which numpy sorts by radix: in linear time."""
    if not len(keys):
        return
    low, high = (int(key >> np.uint64(bits)) for key in (keys.min(), keys.max()))
    parts = min(max(1, len(keys) // FEW_EDGES), 1 << 14)
    shift = max(0, (high - low).bit_length() - parts.bit_length())
    part = ((keys >> np.uint64(bits + shift)) - np.uint64(low >> shift)).astype(np.uint16)
    ends = np.cumsum(np.bincount(part))
    order = np.argsort(part, kind="stable")
    for a, b in zip([0, *ends[:-1]], ends):
        if a < b:
            yield order[a:b]


def _ranges(edges, num_nodes, bits, max_edges, numbered, folder, progress) -> Iterator[tuple]:
    """Partition edges by ranges of destinations, of up to `max_edges` edges -> yields for each range the unsorted keys
    uint64 [n] of (destination, source) and the numbers of the edges, int64 [n] or None. One pass counts the edges, a
    second writes each to its range, in a temporary file if there are several."""
    cuts, counts = _cut(edges, num_nodes, max_edges)
    ends, folder = np.cumsum(counts), folder if len(counts) > 1 else None
    filled, total = ends - counts, int(ends[-1])
    with progress_bar(progress, total=2 * total, desc="edges", unit="edge") as bar:
        room = functools.partial(_on_disk, folder) if folder else np.empty
        spools = [room(total, dtype) for dtype in (np.uint64, np.int64)[: 1 + numbered]]
        for src, dst, *number in edges():
            packed = dst.astype(np.int64)
            packed <<= bits
            packed |= src
            arrays = [packed.view(np.uint64), *number]
            if folder and numbered:
                order = np.argsort(arrays[0])
                arrays = [array[order] for array in arrays]
            elif folder:  # SIMD: faster than selecting the edges of each range
                arrays[0].sort()
            inner = np.searchsorted(arrays[0], np.array(cuts[1:-1], np.uint64) << np.uint64(bits))
            for i, (a, b) in enumerate(zip([0, *inner], [*inner, len(src)])):
                for spool, array in zip(spools, arrays):
                    spool[filled[i] : filled[i] + b - a] = array[a:b]
                filled[i] += b - a
            bar.update(len(src))
        for a, b in zip(ends - counts, ends):
            parts = (np.array(spool[a:b]) if folder else spool[a:b] for spool in spools)
            yield *parts, *[None] * (not numbered)
            bar.update(int(b - a))


def _on_disk(folder, count, dtype) -> np.ndarray:
    """Create an array [count] in an unnamed temporary file in `folder`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a hole would kill the process on a full disk
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=count)


def _cut(edges, num_nodes, cap) -> tuple[list[int], np.ndarray]:
    """Cut the destinations into ranges of adjacent buckets, in one pass over the edges -> (boundaries, edges of each
    range): one range if there are up to `cap` edges, else several of up to an eighth of that, or one bucket."""
    shift = max(0, max(num_nodes - 1, 1).bit_length() - 16)
    ends = np.zeros(((num_nodes - 1) >> shift) + 2, np.int64)
    for _, dst, *_ in edges():
        ends[1:] += np.bincount(dst >> shift, minlength=len(ends) - 1)
    np.cumsum(ends, out=ends)
    if ends[-1] > cap:
        # the edges are partitioned anyway, and smaller ranges sort faster
        cap = max(1, cap >> 3)
    buckets = [0]
    while buckets[-1] < len(ends) - 1:
        first = buckets[-1]
        buckets.append(max(first + 1, int(np.searchsorted(ends, ends[first] + cap, "right")) - 1))
    return [min(bucket << shift, num_nodes) for bucket in buckets], np.diff(ends[buckets])


def checked_indices(indices, num_nodes, progress=False) -> Iterator[np.ndarray]:
    """Yield chunks of `indices` as int64, in the order given, their node ids checked."""
    for first, chunk in chunked("indices", indices, EDGE_CHUNK, progress):
        chunk = integers("indices", chunk)
        why = f"node ids lie in [0, {num_nodes})"
        refuse((chunk < 0) | (chunk >= num_nodes), "indices", chunk, why, first)
        yield chunk
