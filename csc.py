"""Edges in any order -> CSC, sorted by destination, then source, in bounded memory.

    edges = functools.partial(edge_chunks, edge_index, None, None, num_nodes, options)
    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources in sorted_sources(edges, indptr, drop_duplicates=False, progress=False):
        ...                                   # the next part of `indices`; indptr is complete after the last one

Letters: V nodes, M edges. This file needs disk.py, numpy and tqdm.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def edge_chunks(edge_index, indptr, indices, num_nodes, options) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(sources, destinations), EDGE_CHUNK edges at a time, checked, with self-loops and reverses as asked for."""
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
        if options["drop_self_loops"]:
            keep = np.flatnonzero(src != dst)
            src, dst = src[keep], dst[keep]
        yield src, dst
        if options["symmetrize"]:
            yield dst, src


def sorted_sources(edges, indptr, drop_duplicates, progress) -> Iterator[np.ndarray]:
    """Sort edges by destination, then source, a range of destinations at a time, in bounded memory.

    The first pass counts edges per bucket of destinations. Neighbouring buckets then form ranges of up to SORT_EDGES
    edges; each range is one more pass over the edges, which packs (destination, source) into one 64-bit key: numpy
    sorts those in vector registers.

    Args:
        edges: function that starts another pass: an iterator over (sources, destinations).
        indptr: int64 [V + 1] of zeros; complete when the iterator is used up.

    Returns:
        Iterator over chunks of the sorted sources.
    """
    num_nodes = len(indptr) - 1
    bits = max(num_nodes - 1, 1).bit_length()
    shift = max(0, bits - 16)
    ends = np.zeros(((num_nodes - 1) >> shift) + 2, np.int64)
    for _, dst in edges():
        ends[1:] += np.bincount(dst >> shift, minlength=len(ends) - 1)
    np.cumsum(ends, out=ends)
    off = None if progress else True  # None: off where stderr is not a terminal
    first, bar = 0, tqdm(total=int(ends[-1]), desc="edges", unit="edge", unit_scale=True, disable=off)
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + SORT_EDGES, "right")) - 1)
        low, high = first << shift, min(last << shift, num_nodes)
        keys, filled = np.empty(ends[last] - ends[first], np.uint64), 0
        for src, dst in edges():
            if high - low < num_nodes:
                inside = np.flatnonzero((dst >= low) & (dst < high))  # positions: faster to pick by than a mask
                src, dst = src[inside], dst[inside]
            part = keys[filled:filled + len(src)].view(np.int64)
            np.subtract(dst, low, out=part, dtype=np.int64)
            part <<= bits
            part |= src
            filled += len(src)
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
        first, keys, part, chunk = last, None, None, None  # a view would keep this range beside the next one
    np.cumsum(indptr, out=indptr)
    bar.close()


def without_reverse(indptr, indices, exact=1 << 20, sample=1 << 16) -> tuple[int, int]:
    """Count edges (u -> v) without an edge (v -> u) -> (how many, of how many edges that were looked at).

    Args:
        indptr: int64 [V + 1]. indices: integers [M], the sources of each destination in ascending order.
        exact: graphs of at most so many edges are looked at as a whole, of others `sample` random edges.
    """
    num_edges = len(indices)
    edges = np.arange(num_edges)
    if num_edges > exact:
        edges = np.sort(np.random.default_rng(0).integers(0, num_edges, sample))
    dst, src = np.searchsorted(indptr, edges, "right") - 1, indices[edges]
    low, high = indptr[src], indptr[src + 1]  # dst is looked for among the sources of src, by halves
    while (left := low < high).any():
        middle = (low + high) // 2
        below = indices[np.minimum(middle, num_edges - 1)] < dst
        low, high = np.where(left & below, middle + 1, low), np.where(left & ~below, middle, high)
    found = (low < indptr[src + 1]) & (indices[np.minimum(low, num_edges - 1)] == dst)
    return int((~found).sum()), len(edges)


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
