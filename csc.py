"""Edges in any order -> CSC, sorted by destination, then source or time, in bounded memory.

    edges = functools.partial(edge_chunks, edge_index, None, None, num_nodes, options)
    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources in sorted_sources(edges, indptr, folder, drop_duplicates=False, progress=False):
        ...                                   # the next part of `indices`; indptr is complete after the last one
    for sources, rows in sorted_edges(numbered, indptr, M, times, folder, drop_duplicates=False, progress=False):
        ...                                   # the same, and beside it which edges of the input they are

Letters: V nodes, M edges. This file needs disk.py, numpy and tqdm.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from disk import StoreError, integers

EDGE_CHUNK = 1 << 22  # edges handled at a time
SORT_EDGES = 1 << 27  # edges sorted at a time: 1 GiB of keys, whatever the size of the graph


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

    (Destination, source) are packed into one 64-bit key: numpy sorts those in vector registers. However many ranges there
    are, the edges are gone over twice: to count them, and to deal them out.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations).
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        folder: for temporary files of 8 bytes an edge, where there is more than one range.

    Returns:
        Iterator over chunks of the sorted sources.
    """
    num_nodes, bits = len(indptr) - 1, _bits(indptr)
    ranges = _ranges(edges, num_nodes, SORT_EDGES)
    with _bar(ranges, progress) as bar:
        for (low, _, _), (keys,) in zip(ranges, _dealt(edges, ranges, bits, num_nodes, folder)):
            keys.sort()
            for a in range(0, len(keys), EDGE_CHUNK):
                chunk = keys[a:a + EDGE_CHUNK]
                bar.update(len(chunk))
                if drop_duplicates:
                    chunk = chunk[np.concatenate([keys[a - 1:a] != chunk[:1] if a else [True], chunk[1:] != chunk[:-1]])]
                dst = (chunk >> np.uint64(bits)).view(np.int64) + low
                if len(dst):
                    indptr[dst[0] + 1:dst[-1] + 2] += np.bincount(dst - dst[0])
                yield chunk & np.uint64((1 << bits) - 1)
            keys = chunk = None  # a view would keep this range beside the next one
    np.cumsum(indptr, out=indptr)


def sorted_edges(edges, indptr, num_edges, times, folder, drop_duplicates, progress) -> Iterator[tuple]:
    """Sort edges whose rows of other arrays have to follow them: as `sorted_sources`, in ranges of an eighth.

    Equal edges stay in the order of the input, reverses behind the edges that were given. With times, each list is
    sorted by time, edges of one time by source. Of equal edges `drop_duplicates` keeps the earliest, else the first.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations, numbers), as `edge_chunks`
            has them with `numbered`.
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        num_edges: M of the input. times: int64 [M] of these edges, or None.
        folder: for temporary files of 16 bytes an edge, where there is more than one range.

    Returns:
        Iterator over chunks of (sorted sources, numbers of these edges in the input).
    """
    num_nodes, bits = len(indptr) - 1, _bits(indptr)
    ranges = _ranges(edges, num_nodes, max(1, SORT_EDGES >> 3))
    with _bar(ranges, progress) as bar:
        for (low, high, count), (keys, numbers) in zip(ranges, _dealt(edges, ranges, bits, num_nodes, folder, [np.int64])):
            time = [] if times is None else [np.asarray(times[numbers % num_edges])]
            order = np.lexsort((numbers, *time, keys))
            if drop_duplicates:
                ordered = keys[order]
                order = order[np.concatenate([ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1]])]
            if time:
                order = order[np.lexsort((time[0][order], keys[order] >> np.uint64(bits)))]
            indptr[low + 1:high + 1] = np.bincount((keys[order] >> np.uint64(bits)).view(np.int64), minlength=high - low)
            for a in range(0, len(order), EDGE_CHUNK):
                some = order[a:a + EDGE_CHUNK]
                yield keys[some] & np.uint64((1 << bits) - 1), numbers[some] % num_edges
            bar.update(count)
            keys = numbers = time = order = some = None
    np.cumsum(indptr, out=indptr)


def _bits(indptr) -> int:
    """Bits that hold a node."""
    return max(len(indptr) - 2, 1).bit_length()


def _ranges(edges, num_nodes, most) -> list[tuple[int, int, int]]:
    """Cut the nodes into ranges of destinations, each with up to `most` edges or a single bucket -> [(low, high, edges)].

    A pass over the edges counts them per bucket of destinations, and neighbouring buckets form a range.
    """
    shift = max(0, max(num_nodes - 1, 1).bit_length() - 16)
    ends = np.zeros(((num_nodes - 1) >> shift) + 2, np.int64)
    for _, dst, *_ in edges():
        ends[1:] += np.bincount(dst >> shift, minlength=len(ends) - 1)
    np.cumsum(ends, out=ends)
    ranges, first = [], 0
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + most, "right")) - 1)
        ranges.append((first << shift, min(last << shift, num_nodes), int(ends[last] - ends[first])))
        first = last
    return ranges


def _dealt(edges, ranges, bits, num_nodes, folder, more=()) -> Iterator[list[np.ndarray]]:
    """The edges of each range in turn, in the order of the input: keys of (destination - low, source), uint64, and with
    them the arrays of dtypes `more` that the chunks have behind sources and destinations.

    One pass; where there are several ranges it spills each into files of its own, which go as they are read."""
    dtypes = [np.dtype(np.uint64), *map(np.dtype, more)]
    if len(ranges) < 2:
        for low, _, count in ranges:
            parts, filled = [np.empty(count, dtype) for dtype in dtypes], 0
            for src, dst, *others in edges():
                place = slice(filled, filled + len(src))
                for part, array in zip(parts, [_packed(src, dst, low, bits), *others]):
                    part[place] = array
                filled += len(src)
            yield parts
        return
    names = [[Path(folder, f"spilled-{i}-{j}") for j in range(len(dtypes))] for i in range(len(ranges))]
    shift = max(0, max(num_nodes - 1, 1).bit_length() - 16)  # of the buckets that ranges are made of
    lows = np.array([low for low, _, _ in ranges])
    range_of = np.searchsorted(lows, np.arange((num_nodes - 1 >> shift) + 1) << shift, "right") - 1
    range_of = range_of.astype(np.uint16)  # numpy sorts those by digits
    for src, dst, *others in edges():
        which = range_of[dst >> shift]
        order, ends = np.argsort(which, kind="stable"), np.cumsum(np.bincount(which, minlength=len(ranges)))
        arrays = [array[order] for array in (_packed(src, dst, lows[which], bits), *others)]
        for row, a, b in zip(names, [0, *ends], ends):
            for name, array in zip(row, arrays) if a < b else ():
                with open(name, "ab") as file:
                    file.write(array[a:b].data)
    for (_, _, count), row in zip(ranges, names):
        parts = [np.fromfile(name, dtype) if count else np.empty(0, dtype) for name, dtype in zip(row, dtypes)]
        for name in row if count else ():
            name.unlink()
        yield parts
        parts.clear()  # or they would stay beside those of the next range


def _packed(src, dst, low, bits):
    """Destination - low and source of each edge as one number each, uint64."""
    keys = np.subtract(dst, low, dtype=np.int64)
    keys <<= bits
    keys |= src
    return keys.view(np.uint64)


def _bar(ranges, progress):
    total = sum(count for _, _, count in ranges)
    off = None if progress else True  # None: off where stderr is not a terminal
    return tqdm(total=total, desc="edges", unit="edge", unit_scale=True, disable=off)


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
    return "int32" if num_nodes < 1 << 31 else "int64"
