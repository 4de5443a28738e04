"""Edges in any order -> CSC, sorted by destination, then source or time, in bounded memory.

    edges = functools.partial(edge_chunks, edge_index, None, None, num_nodes, options)
    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources, _ in sorted_edges(edges, indptr, folder, drop_duplicates=False, progress=False):
        ...                                   # the next part of `indices`; indptr is complete after the last one

V nodes, M edges. This file needs disk/files.py and numpy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np

from disk.files import StoreError, chunked, integers, progress_bar, refuse

EDGE_CHUNK = 1 << 22  # edges handled at a time
FEW_EDGES = 1 << 14  # edges that are sorted with their numbers and times in the cache
SORT_EDGES = 1 << 27  # so many edges are sorted in memory, 1 GiB of keys; more by way of the disk


def edge_chunks(edge_index, indptr, indices, num_nodes, options, numbered=False) -> Iterator[tuple]:
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


def sorted_edges(edges, indptr, folder, drop_duplicates, progress, *, num_edges=None, times=None):
    """Sort edges by destination, then source, a range of destinations at a time, in bounded memory.

    (destination, source) of an edge are packed into one 64-bit key: numpy sorts those in vector registers. Edges with
    numbers, by which rows of other arrays follow them, are sorted a quarter at a time: equal ones stay in the order of
    the input, reverses behind the edges that were given. With times each list is sorted by time, edges of one time by
    source. Of equal edges `drop_duplicates` keeps the earliest, else the first.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations), or (sources, destinations,
            numbers) as `edge_chunks` has them with `numbered`.
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: where 8 bytes an edge, 16 with numbers, are kept for a while if there is more than one range.
        num_edges: M of the input, where edges have numbers. times: int64 [M] of these edges, or None.

    Returns:
        Iterator over chunks of (sorted sources, numbers of these edges in the input or None).
    """
    bits, numbered = max(len(indptr) - 2, 1).bit_length(), num_edges is not None
    most = max(1, SORT_EDGES >> 2) if numbered else SORT_EDGES
    for keys, numbers in _ranges(edges, len(indptr) - 1, bits, most, numbered, folder, progress):
        if numbered:
            parts = _sorted_with_numbers(keys, numbers, num_edges, times, drop_duplicates, bits)
        else:
            parts = _sorted_keys(keys, drop_duplicates)
        for chunk, number in parts:
            dst = (chunk >> np.uint64(bits)).view(np.int64)
            if len(dst):
                indptr[dst[0] + 1 : dst[-1] + 2] += np.bincount(dst - dst[0])
            yield chunk & np.uint64((1 << bits) - 1), number
        keys = numbers = parts = chunk = None  # a view would keep this range beside the next one
    np.cumsum(indptr, out=indptr)


def _sorted_keys(keys, drop_duplicates) -> Iterator[tuple]:
    keys.sort()
    for a in range(0, len(keys), EDGE_CHUNK):
        chunk = keys[a : a + EDGE_CHUNK]
        if drop_duplicates:
            chunk = chunk[np.append(not a or keys[a - 1] != chunk[0], chunk[1:] != chunk[:-1])]
        yield chunk, None


def _sorted_with_numbers(keys, numbers, num_edges, times, drop_duplicates, bits) -> Iterator[tuple]:
    for some in _few_destinations(keys, bits):
        few, number = keys[some], numbers[some]
        time = [] if times is None else [np.asarray(times[number % num_edges])]
        order = np.lexsort((number, few, *time, few >> np.uint64(bits)))
        if drop_duplicates:  # the first of each stays
            order = order[np.sort(np.unique(few[order], return_index=True)[1])]
        yield few[order], number[order] % num_edges


def _few_destinations(keys, bits) -> Iterator[np.ndarray]:
    """Cut edges, given by their keys [n], by destination -> positions of so few at a time that they are sorted in the
    cache.

    Numbers of 16 bits are sorted by their digits: in a few passes over the edges, however many there are.
    """
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


def spooled_bytes(num_edges, numbered) -> int:
    """Bytes on the disk that `sorted_edges` takes for a while."""
    size, most = (16, SORT_EDGES >> 2) if numbered else (8, SORT_EDGES)
    return size * num_edges * (num_edges > most)


def spooled_sources(edges, file) -> Iterator[np.ndarray]:
    """The sources of sorted edges; which edges of the input they are goes into a file, int64."""
    with open(file, "wb") as out:
        for sources, numbers in edges:
            out.write(np.ascontiguousarray(numbers).data)
            yield sources


def _ranges(edges, num_nodes, bits, most, numbered, folder, progress) -> Iterator[tuple]:
    """Cut the nodes into ranges of destinations of up to `most` edges -> (keys, numbers) of each.

    However many there are, two passes: one counts the edges, one writes each of them to where its range lies, in a
    temporary file if there is more than one range. What is then read and sorted is a range at a time.

    Returns:
        Iterator over keys uint64 [n] of (destination, source), not sorted, and the numbers of the edges int64 [n], or
        None where `edges` has none.
    """
    cuts, counts = _cut(edges, num_nodes, most)
    ends, folder = np.cumsum(counts), folder if len(counts) > 1 else None
    filled, total = ends - counts, int(ends[-1])
    with progress_bar(progress, total=2 * total, desc="edges", unit="edge") as bar:
        spools = [_Spool(total, dtype, folder) for dtype in (np.uint64, np.int64)[: 1 + numbered]]
        for src, dst, *number in edges():
            packed = dst.astype(np.int64)
            packed <<= bits
            packed |= src
            arrays = [packed.view(np.uint64), *number]
            if folder and numbered:
                order = np.argsort(arrays[0])
                arrays = [array[order] for array in arrays]
            elif folder:
                arrays[
                    0
                ].sort()  # in vector registers: faster than to look for the edges of each range
            inner = np.searchsorted(arrays[0], np.array(cuts[1:-1], np.uint64) << np.uint64(bits))
            for i, (a, b) in enumerate(zip([0, *inner], [*inner, len(src)])):
                for spool, array in zip(spools, arrays):
                    spool.write(filled[i], array[a:b])
                filled[i] += b - a
            bar.update(len(src))
        for a, b in zip(ends - counts, ends):
            yield [spool.read(a, b) for spool in spools] + [None] * (not numbered)
            bar.update(int(b - a))


class _Spool:
    """An array [count] that is written and read in parts: in memory, or in a file without a name in a folder."""

    def __init__(self, count, dtype, folder):
        self.dtype = np.dtype(dtype)
        self.file = tempfile.TemporaryFile(dir=folder) if folder else None
        self.array = None if folder else np.empty(count, dtype)

    def write(self, at, part):
        if self.file:
            self.file.seek(int(at) * self.dtype.itemsize)
            self.file.write(part.data)
        else:
            self.array[at : at + len(part)] = part

    def read(self, a, b):
        if not self.file:
            return self.array[a:b]
        self.file.seek(int(a) * self.dtype.itemsize)
        return np.fromfile(self.file, self.dtype, int(b - a))


def _cut(edges, num_nodes, most) -> tuple[list[int], np.ndarray]:
    """Cut the nodes into ranges -> (cuts, edges of each range): one of up to `most` edges, several of an eighth of
    that.

    A pass over the edges counts them per bucket of destinations, and neighbouring buckets form a range.
    """
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
        if len(chunk) and (chunk.min() < 0 or chunk.max() >= num_nodes):
            bad, why = (chunk < 0) | (chunk >= num_nodes), f"node ids lie in [0, {num_nodes})"
            refuse(bad, "indices", chunk, why, first)
        yield chunk


def index_dtype(num_nodes) -> str:
    """The narrower of the two dtypes of `indices` that holds every node."""
    return "int32" if num_nodes < 1 << 31 else "int64"
