"""Edges in any order -> CSC, sorted by destination, then source or time, in bounded memory.

    edges = functools.partial(edge_chunks, edge_index, None, None, num_nodes, options)
    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources in sorted_sources(edges, indptr, folder, drop_duplicates=False, progress=False):
        ...                                   # the next part of `indices`; indptr is complete after the last one
    for sources, rows in sorted_edges(numbered, indptr, folder, M, times, drop_duplicates=False, progress=False):
        ...                                   # the same, and beside it which edges of the input they are

Letters: V nodes, M edges. This file needs disk.py, numpy and tqdm.
"""

from __future__ import annotations

import collections
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from disk import StoreError, integers

EDGE_CHUNK = 1 << 22  # edges handled at a time
FEW_EDGES = 1 << 14  # edges that are sorted with their numbers and times in the cache
SORT_EDGES = 1 << 27  # so many edges are sorted in memory, 1 GiB of keys; more by way of the disk


class Rows(NamedTuple):
    """Rows that are produced once and in order, for arrays that are never in memory as a whole.

    Args:
        shape: of the whole array, rows first.
        dtype: numpy or torch dtype of every chunk.
        chunks: iterable of arrays [r, ...] whose row counts add up to shape[0].
    """

    shape: tuple
    dtype: Any
    chunks: Iterable


def ahead(function, stop, step) -> Iterator:
    """function(0), function(step), ... in order, computed a little ahead on threads (numpy releases the GIL)."""
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        pending = collections.deque()
        for first in range(0, stop, step):
            pending.append(pool.submit(function, first))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def edge_chunks(edge_index, indptr, indices, num_nodes, options, numbered=False) -> Iterator[tuple[np.ndarray, ...]]:
    """(sources, destinations), EDGE_CHUNK edges at a time, checked, with self-loops and reverses as asked for; with
    `numbered` the number of each edge in the input as well, and of a reverse that number plus M."""
    num_edges = edge_index.shape[1] if indptr is None else indices.shape[0]
    for a in range(0, num_edges, EDGE_CHUNK):
        b = min(a + EDGE_CHUNK, num_edges)
        if indptr is None:
            pairs = np.asarray(edge_index[:, a:b])
            src, dst = pairs if pairs.dtype == np.int32 else integers("edge_index", pairs)  # half the bytes to go over
        else:
            src = integers("indices", indices[a:b])
            first, last = np.searchsorted(indptr, a, "right") - 1, np.searchsorted(indptr, b, "left")
            dst = np.repeat(np.arange(first, last), np.diff(np.clip(indptr[first:last + 1], a, b)))
        if min(src.min(), dst.min()) < 0 or max(src.max(), dst.max()) >= num_nodes:
            bad = np.flatnonzero((src < 0) | (src >= num_nodes) | (dst < 0) | (dst >= num_nodes))[0]
            raise StoreError(f"edge {a + bad} goes from node {src[bad]} to node {dst[bad]}: node ids lie in "
                             f"[0, {num_nodes})")
        numbers = [np.arange(a, b)] if numbered else []
        if options["drop_self_loops"]:
            keep = np.flatnonzero(src != dst)
            src, dst, *numbers = (array[keep] for array in (src, dst, *numbers))
        yield src, dst, *numbers
        if options["symmetrize"]:
            yield dst, src, *(array + num_edges for array in numbers)


def sorted_sources(edges, indptr, folder, drop_duplicates, progress) -> Iterator[np.ndarray]:
    """Sort edges by destination, then source, a range of destinations at a time, in bounded memory.

    (destination, source) of an edge are packed into one 64-bit key: numpy sorts those in vector registers.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations).
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: where 8 bytes an edge are kept for a while, if there is more than one range.

    Returns:
        Iterator over chunks of the sorted sources.
    """
    bits = _bits(indptr)
    for _, _, keys, _ in _ranges(edges, indptr, SORT_EDGES, folder, progress):
        keys.sort()
        for a in range(0, len(keys), EDGE_CHUNK):
            chunk = keys[a:a + EDGE_CHUNK]
            if drop_duplicates:
                chunk = chunk[np.concatenate([keys[a - 1:a] != chunk[:1] if a else [True], chunk[1:] != chunk[:-1]])]
            dst = (chunk >> np.uint64(bits)).view(np.int64)
            if len(dst):
                indptr[dst[0] + 1:dst[-1] + 2] += np.bincount(dst - dst[0])
            yield chunk & np.uint64((1 << bits) - 1)
        keys = chunk = None  # a view would keep this range beside the next one
    np.cumsum(indptr, out=indptr)


def sorted_edges(edges, indptr, folder, num_edges, times, drop_duplicates, progress) -> Iterator[tuple]:
    """Sort edges whose rows of other arrays have to follow them: as `sorted_sources`, a quarter of the edges at a time.

    Equal edges stay in the order of the input, reverses behind the edges that were given. With times, each list is
    sorted by time, edges of one time by source. Of equal edges `drop_duplicates` keeps the earliest, else the first.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations, numbers), as `edge_chunks`
            has them with `numbered`.
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: where 16 bytes an edge are kept for a while, if there is more than one range.
        num_edges: M of the input. times: int64 [M] of these edges, or None.

    Returns:
        Iterator over chunks of (sorted sources, numbers of these edges in the input).
    """
    bits = _bits(indptr)
    for _, _, keys, numbers in _ranges(edges, indptr, max(1, SORT_EDGES >> 2), folder, progress):
        for some in _few_destinations(keys, bits):
            few, number = keys[some], numbers[some]
            time = [] if times is None else [np.asarray(times[number % num_edges])]
            order = np.lexsort((number, *time, few))
            if drop_duplicates:
                ordered = few[order]
                order = order[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
            if time:
                order = order[np.lexsort((time[0][order], few[order] >> np.uint64(bits)))]
            few = few[order]
            dst = (few >> np.uint64(bits)).view(np.int64)
            indptr[dst[0] + 1:dst[-1] + 2] += np.bincount(dst - dst[0])
            yield few & np.uint64((1 << bits) - 1), number[order] % num_edges
        keys = numbers = None
    np.cumsum(indptr, out=indptr)


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
    """Bytes on the disk that `sorted_sources`, or with `numbered` `sorted_edges`, take for a while."""
    if numbered:
        return 16 * num_edges * (num_edges > SORT_EDGES >> 2)
    return 8 * num_edges * (num_edges > SORT_EDGES)


def _bits(indptr) -> int:
    """Bits that hold a node, of which two have to fit into 64."""
    if len(indptr) - 1 > 1 << 32:
        raise StoreError(
            f"edges of {len(indptr) - 1:,} nodes are to be sorted: up to 2^32 can be; give indptr and indices"
        )
    return max(len(indptr) - 2, 1).bit_length()


def _ranges(edges, indptr, most, folder, progress) -> Iterator[tuple]:
    """Cut the nodes into ranges of destinations of up to `most` edges -> (low, high, keys, numbers) of each.

    However many there are, two passes: one counts the edges, one writes each of them to where its range lies, in a
    temporary file if there is more than one range. What is then read and sorted is a range at a time.

    Returns:
        Iterator over first node, node behind the last, keys uint64 [n] of (destination, source), not sorted, and the
        numbers of the edges int64 [n], or None where `edges` has none.
    """
    bits = _bits(indptr)
    cuts, counts = _cut(edges, len(indptr) - 1, most)
    ends, several = np.cumsum(counts), len(counts) > 1
    filled, numbered, total = ends - counts, False, int(ends[-1])
    with tqdm(total=2 * total, desc="edges", unit="edge", unit_scale=True,
              disable=None if progress else True) as bar:  # None: off where stderr is not a terminal
        keys, numbers = _Spool(total, np.uint64, several and folder), _Spool(0, np.int64, False)
        for src, dst, *number in edges():
            packed = _packed(src, dst, bits)
            if number and not numbered:
                numbers, numbered = _Spool(total, np.int64, several and folder), True
            if several and number:
                order = np.argsort(packed)
                packed, number = packed[order], [number[0][order]]
            elif several:
                packed.sort()  # in vector registers: faster than to look for the edges of each range
            inner = np.searchsorted(packed, np.array(cuts[1:-1], np.uint64) << np.uint64(bits))
            for i, (a, b) in enumerate(zip([0, *inner], [*inner, len(packed)])):
                keys.write(filled[i], packed[a:b])
                if number:
                    numbers.write(filled[i], number[0][a:b])
                filled[i] += b - a
            bar.update(len(src))
        for low, high, a, b in zip(cuts, cuts[1:], ends - counts, ends):
            yield low, high, keys.read(a, b), numbers.read(a, b) if numbered else None
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
            self.array[at:at + len(part)] = part

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
        most = max(1, most >> 3)  # which are sorted faster than larger ones, once the edges are parted anyway
    buckets = [0]
    while buckets[-1] < len(ends) - 1:
        first = buckets[-1]
        buckets.append(max(first + 1, int(np.searchsorted(ends, ends[first] + most, "right")) - 1))
    return [min(bucket << shift, num_nodes) for bucket in buckets], np.diff(ends[buckets])


def _packed(src, dst, bits) -> np.ndarray:
    """Destination and source of each edge in one number each, uint64 [n]."""
    keys = dst.astype(np.int64)
    keys <<= bits
    keys |= src
    return keys.view(np.uint64)


def without_reverse(indptr, indices, exact=1 << 20, sample=1 << 16, ascending=True) -> tuple[int, int]:
    """Count edges (u -> v) without an edge (v -> u) -> (how many, of how many edges that were looked at).

    Args:
        indptr: int64 [V + 1]. indices: integers [M], the sources of each destination.
        exact: graphs of at most so many edges are looked at as a whole, of others `sample` random edges.
        ascending: whether these sources are in ascending order; if not, all edges are read.
    """
    num_edges = len(indices)
    edges = np.arange(num_edges)
    if num_edges > exact:
        edges = np.sort(np.random.default_rng(0).integers(0, num_edges, sample))
    dst, src = np.searchsorted(indptr, edges, "right") - 1, indices[edges]
    if not ascending:
        return _without_reverse_among_all(indptr, indices, src.astype(np.uint64), dst.astype(np.uint64)), len(edges)
    low, high = indptr[src], indptr[src + 1]  # dst is looked for among the sources of src, by halves
    while (left := low < high).any():
        middle = (low + high) // 2
        below = indices[np.minimum(middle, num_edges - 1)] < dst
        low, high = np.where(left & below, middle + 1, low), np.where(left & ~below, middle, high)
    found = (low < indptr[src + 1]) & (indices[np.minimum(low, num_edges - 1)] == dst)
    return int((~found).sum()), len(edges)


def _without_reverse_among_all(indptr, indices, src, dst) -> int:
    """How many of the edges src -> dst [n] have no reverse, in one pass over all edges."""
    nodes = np.uint64(len(indptr) - 1)
    wanted, times = np.unique(src * nodes + dst, return_counts=True)  # keys of reverses: destination, then source
    found = np.zeros(len(wanted), bool)
    for a in range(0, len(indices), EDGE_CHUNK):
        chunk = indices[a:a + EDGE_CHUNK].astype(np.uint64)
        ends = np.searchsorted(indptr, np.arange(a, a + len(chunk)), "right") - 1
        keys = ends.astype(np.uint64) * nodes + chunk
        place = np.searchsorted(wanted, keys).clip(max=len(wanted) - 1)
        found[place[wanted[place] == keys]] = True
    return int(times[~found].sum())


def checked_indices(indices, num_nodes, progress) -> Iterator[np.ndarray]:
    """Chunks of `indices` in the order given, each checked."""
    for first, chunk in chunked(indices, EDGE_CHUNK, "indices", progress):
        chunk = integers("indices", chunk)
        if len(chunk) and (chunk.min() < 0 or chunk.max() >= num_nodes):
            bad = np.flatnonzero((chunk < 0) | (chunk >= num_nodes))[0]
            raise StoreError(f"indices[{first + bad}] is {chunk[bad]}: node ids lie in [0, {num_nodes})")
        yield chunk


def chunked(array, rows, name, progress) -> Iterator:
    """(number of the first row, rows): pieces of an array or the chunks of `Rows`, which must add up."""
    pieces = array.chunks if isinstance(array, Rows) else (
        array[a:a + rows] for a in range(0, array.shape[0], rows))
    first = 0
    with tqdm(total=array.shape[0], desc=name, unit="row", unit_scale=True, disable=None if progress else True) as bar:
        for chunk in pieces:
            yield first, chunk
            first += len(chunk)
            bar.update(len(chunk))
    if first != array.shape[0]:
        raise StoreError(f"{name} came with {first} rows, {array.shape[0]} were announced")


def index_dtype(num_nodes) -> str:
    """The narrower of the two dtypes of `indices` that holds every node."""
    return "int32" if num_nodes < 1 << 31 else "int64"
