"""Edges in any order -> CSC, in bounded memory: sorted by destination, then type and time (if any), then source.

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
FEW_EDGES = 1 << 14  # edges that are sorted with their numbers and times in the cache
SORT_EDGES = 1 << 27  # so many edges are sorted in memory, 1 GiB of keys; more by way of the disk


def edge_chunks(edge_index, indptr, indices, num_nodes, options, numbered) -> Iterator[tuple]:
    """(sources, destinations), EDGE_CHUNK edges at a time, checked, with self-loops and reverses as asked for; with
    `numbered` the number of each edge in the input as well, and of a reverse that number plus M."""
    num_edges = edge_index.shape[1] if indptr is None else indices.shape[0]
    for a in range(0, num_edges, EDGE_CHUNK):
        b = min(a + EDGE_CHUNK, num_edges)
        if indptr is None:
            pairs = np.asarray(edge_index[:, a:b])
            # half the bytes to go over
            src, dst = pairs if pairs.dtype == np.int32 else integers("edge_index", pairs)
        else:
            src = integers("indices", indices[a:b])
            first, last = np.searchsorted(indptr, a, "right") - 1, np.searchsorted(indptr, b)
            counts = np.diff(np.clip(indptr[first : last + 1], a, b))
            dst = np.repeat(np.arange(first, last), counts)
        if min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num_nodes:
            bad = np.flatnonzero((src < 0) | (src >= num_nodes) | (dst < 0) | (dst >= num_nodes))[0]
            ends = f"from node {src[bad]} to node {dst[bad]}"
            raise StoreError(f"edge {a + bad} goes {ends}: node ids lie in [0, {num_nodes})")
        numbers = [np.arange(a, b)] if numbered else []
        if options["drop_self_loops"]:
            keep = np.flatnonzero(src != dst)
            src, dst, *numbers = (array[keep] for array in (src, dst, *numbers))
        yield src, dst, *numbers
        if options["symmetrize"]:
            yield dst, src, *(array + num_edges for array in numbers)


def sorted_sources(graph, options, indptr, folder, order=None, by=(), progress=False):
    """Sort edges by destination, then what they carry, then source -> chunks of the sorted sources.

    (destination, source) of an edge are packed into one 64-bit key: numpy sorts those in vector registers. Edges with
    numbers, by which rows of other arrays follow them, are sorted a quarter at a time: equal ones stay in the order of
    the input, reverses behind the edges that were given. Of equal ones, of one type, `drop_duplicates` keeps the earliest,
    else the first.

    Args:
        graph: edge_index [2, M], or None and the indptr and indices of CSC. options: those of `build_store`.
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: where 8 bytes an edge, 16 with numbers, are kept for a while if there is more than one range.
        order: binary file, into which goes int64 [M'], which edge of the input each sorted edge is; or None.
        by: (types, times), of the edges of the input, integers [M] or None; empty without `order`.
    """
    bits, numbered = max(len(indptr) - 2, 1).bit_length(), order is not None
    most = max(1, SORT_EDGES >> 2) if numbered else SORT_EDGES
    num_nodes = len(indptr) - 1
    num_edges = (graph[2] if graph[0] is None else graph[0]).shape[-1]
    edges = functools.partial(edge_chunks, *graph, num_nodes, options, numbered)
    for keys, numbers in _ranges(edges, num_nodes, bits, most, numbered, folder, progress):
        unique = options["drop_duplicates"]
        if numbered:
            parts = _sorted_with_numbers(keys, numbers, num_edges, by, unique, bits)
        else:
            parts = _sorted_keys(keys, unique)
        for chunk, number in parts:
            dst = (chunk >> np.uint64(bits)).view(np.int64)
            if len(dst):
                indptr[dst[0] + 1 : dst[-1] + 2] += np.bincount(dst - dst[0])
            if numbered:
                order.write(np.ascontiguousarray(number).data)
            yield chunk & np.uint64((1 << bits) - 1)
        keys = numbers = parts = chunk = None  # a view would keep this range beside the next one
    np.cumsum(indptr, out=indptr)


def _sorted_keys(keys, drop_duplicates) -> Iterator[tuple]:
    keys.sort()
    for a in range(0, len(keys), EDGE_CHUNK):
        chunk = keys[a : a + EDGE_CHUNK]
        if drop_duplicates:
            chunk = chunk[np.append(not a or keys[a - 1] != chunk[0], chunk[1:] != chunk[:-1])]
        yield chunk, None


def _sorted_with_numbers(keys, numbers, num_edges, by, drop_duplicates, bits) -> Iterator[tuple]:
    for some in _few_destinations(keys, bits):
        few, number = keys[some], numbers[some]
        kind, time = ([] if of is None else [np.asarray(of[number % num_edges])] for of in by)
        order = np.lexsort((number, few, *time, *kind, few >> np.uint64(bits)))
        if drop_duplicates:  # the first of each stays
            same = few
            for values in kind:  # few of them, so that both numbers fit into 64 bits
                same = np.unique(few, return_inverse=True)[1] << 16 | values
            order = order[np.sort(np.unique(same[order], return_index=True)[1])]
        yield few[order], number[order] % num_edges


def _few_destinations(keys, bits) -> Iterator[np.ndarray]:
    """Cut edges, given by their keys [n], by destination -> positions of so few at a time that they are sorted in the
    cache. Numbers of 16 bits are sorted by their digits: in a few passes, however many edges there are."""
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


def _ranges(edges, num_nodes, bits, most, numbered, folder, progress) -> Iterator[tuple]:
    """Cut the nodes into ranges of destinations of up to `most` edges -> of each the keys uint64 [n] of (destination,
    source), not sorted, and the numbers of the edges int64 [n] or None. One pass counts the edges, another writes each
    to where its range is, in a temporary file if there are several."""
    cuts, counts = _cut(edges, num_nodes, most)
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
            elif folder:  # in vector registers: faster than to look for the edges of each range
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
    """An array [count] in a file without a name in a folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a hole would end the process on a full disk
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=count)


def _cut(edges, num_nodes, most) -> tuple[list[int], np.ndarray]:
    """Cut the nodes into ranges, of neighbouring buckets of destinations, in a pass over the edges -> (cuts, edges of
    each range): one range of up to `most` edges, several of an eighth of that."""
    shift = max(0, max(num_nodes - 1, 1).bit_length() - 16)
    ends = np.zeros(((num_nodes - 1) >> shift) + 2, np.int64)
    for _, dst, *_ in edges():
        ends[1:] += np.bincount(dst >> shift, minlength=len(ends) - 1)
    np.cumsum(ends, out=ends)
    if ends[-1] > most:
        # which are sorted faster than larger ones, once the edges are parted anyway
        most = max(1, most >> 3)
    buckets = [0]
    while buckets[-1] < len(ends) - 1:
        first = buckets[-1]
        buckets.append(max(first + 1, int(np.searchsorted(ends, ends[first] + most, "right")) - 1))
    return [min(bucket << shift, num_nodes) for bucket in buckets], np.diff(ends[buckets])


def checked_indices(indices, num_nodes, progress) -> Iterator[np.ndarray]:
    """Chunks of `indices` in the order given, each checked."""
    for first, chunk in chunked("indices", indices, EDGE_CHUNK, progress):
        chunk = integers("indices", chunk)
        why = f"node ids lie in [0, {num_nodes})"
        refuse((chunk < 0) | (chunk >= num_nodes), "indices", chunk, why, first)
        yield chunk
