"""Edges in any order -> CSC: sorted by destination, then type and time (if any), then source. In bounded memory, except
for the edges into one node, which are sorted together: with columns they take about 140 bytes each.

    indptr = np.zeros(num_nodes + 1, np.int64)
    for sources in sorted_sources(edges, indptr, options, folder, by=None, progress=False):
        ...                                   # the next part of `indices`; indptr is complete after the last one

V nodes, M edges. This file needs disk/convert.py, disk/files.py and numpy.
"""

import functools
import os
import tempfile
from itertools import pairwise
from typing import BinaryIO, NamedTuple

import numpy as np

from disk.convert import chunked, integers, refuse, within
from disk.files import StoreError, progress_bar

EDGE_CHUNK = 1 << 22  # edges handled at a time
FEW_EDGES = 1 << 14  # edges sorted at a time with their numbers and times, to stay in the CPU cache
SORT_EDGES = 1 << 27  # most edges to sort in memory, 1 GiB of keys; more go through the disk


class SortBy(NamedTuple):
    """What edges are sorted by before their sources, and where their order goes."""

    order: BinaryIO  # file for int64 [M'], the number in the input of each sorted edge
    types: np.ndarray | None  # integers [M]
    times: np.ndarray | None  # integers [M]
    # int64 [V]: an edge, also a reverse, has the time of its source
    node_time: np.ndarray | None


def edge_chunks(edges, options, numbered):
    """Yield EDGE_CHUNK of `GivenEdges` at a time, checked, with self-loops dropped and reverses added as `options` say:
    (sources [n], destinations [n], their numbers [n] in the input, for a reverse plus M; None unless `numbered`)."""
    for a in range(0, edges.num_edges, EDGE_CHUNK):
        b = min(a + EDGE_CHUNK, edges.num_edges)
        src, dst = _ends(edges, a, b)
        _check_ends(src, dst, a, edges.num_nodes)
        numbers = np.arange(a, b) if numbered else None
        if options["drop_self_loops"]:
            keep = np.flatnonzero(src != dst)
            src = src[keep]
            dst = dst[keep]
            numbers = numbers[keep] if numbered else None
        yield src, dst, numbers
        if options["symmetrize"]:
            yield dst, src, numbers + edges.num_edges if numbered else None


def _ends(edges, a, b):
    """Return the sources and destinations of edges a to b."""
    if edges.indptr is None:
        pairs = np.asarray(edges.edge_index[:, a:b])
        # int32 is kept: half the bytes to read
        src, dst = pairs if pairs.dtype == np.int32 else integers("edge_index", pairs)
        return src, dst
    first = np.searchsorted(edges.indptr, a, "right") - 1
    last = np.searchsorted(edges.indptr, b)
    counts = np.diff(np.clip(edges.indptr[first : last + 1], a, b))
    return integers("indices", edges.indices[a:b]), np.repeat(np.arange(first, last), counts)


def _check_ends(src, dst, first, num_nodes):
    """Raise StoreError for the first edge with an end that is no node; src[0] is that of edge `first`."""
    largest = max(src.max(), dst.max())
    if min(src.min(), dst.min()) >= 0 and largest < num_nodes:
        return
    bad = np.flatnonzero((src < 0) | (src >= num_nodes) | (dst < 0) | (dst >= num_nodes))[0]
    hint = "; do they count from 1?" if largest == num_nodes else ""
    raise StoreError(
        f"edge {first + bad} goes from node {src[bad]} to node {dst[bad]}: "
        f"node ids lie in [0, {num_nodes}){hint}"
    )


def sorted_sources(edges, indptr, options, folder, *, by, progress):
    """Sort edges by destination, then type and time, then source -> yields chunks of the sorted sources.

    (destination, source) of an edge are packed into one 64-bit key: numpy sorts those with SIMD instructions. With
    `by` edges carry their numbers in the input and are sorted a quarter as many at a time; equal ones stay in input
    order, reverses after the edges that were given. Of equal edges of one type `drop_duplicates` keeps the earliest by
    time, without times the first.

    Args:
        edges: `GivenEdges` of disk/checks.py. indptr: int64 [V + 1] of zeros; complete when the iterator is used up.
        options: those of `build_store`.
        folder: for a temporary file of 8 bytes per edge, 16 with `by`, if there is more than one range.
        by: `SortBy`, if edges have columns; None: they have none.
    """
    bits = _source_bits(edges.num_nodes)
    for keys, *numbers in _ranges(edges, options, by is not None, folder, progress):
        if by is None:
            parts = _sorted_keys(keys, options["drop_duplicates"])
        else:
            parts = _sorted_with_numbers(keys, *numbers, edges, by, options["drop_duplicates"])
        for chunk, number in parts:
            dst = (chunk >> bits).view(np.int64)
            if len(dst):
                indptr[dst[0] + 1 : dst[-1] + 2] += np.bincount(dst - dst[0])
            if by is not None:
                by.order.write(np.ascontiguousarray(number).data)
            yield chunk & (1 << bits) - 1
        keys = numbers = parts = chunk = None  # free this range before the next
    np.cumsum(indptr, out=indptr)


def _source_bits(num_nodes) -> int:
    """Return how many bits of a key hold the source; the destination is above them."""
    return max(num_nodes - 1, 1).bit_length()


def _sorted_keys(keys, drop_duplicates):
    """Yield (sorted keys [n], None), a chunk at a time."""
    keys.sort()
    for a in range(0, len(keys), EDGE_CHUNK):
        chunk = keys[a : a + EDGE_CHUNK]
        if drop_duplicates:
            chunk = chunk[np.append(not a or keys[a - 1] != chunk[0], chunk[1:] != chunk[:-1])]
        yield chunk, None


def _sorted_with_numbers(keys, numbers, edges, by, drop_duplicates):
    """Yield (sorted keys [n], the numbers of the edges that were given [n]), few destinations at a time."""
    bits = _source_bits(edges.num_nodes)
    for part in _few_destinations(keys, bits):
        few = keys[part]
        number = numbers[part]
        given = number % edges.num_edges  # of a reverse that of its edge
        ranks = [number, few]  # in rising order of precedence
        if by.node_time is not None:
            ranks.append(by.node_time[few & (1 << bits) - 1])
        elif by.times is not None:
            ranks.append(np.asarray(by.times[given]))
        same = few
        if by.types is not None:
            types = np.asarray(by.types[given])
            ranks.append(types)
            if drop_duplicates:  # the rank among few edges and a 16-bit type fit into 64 bits
                same = np.unique(few, return_inverse=True)[1] << 16 | types
        order = np.lexsort((*ranks, few >> bits))
        if drop_duplicates:  # the first of each stays
            order = order[np.sort(np.unique(same[order], return_index=True)[1])]
        yield few[order], given[order]


def _few_destinations(keys, bits):
    """Partition edges, given by their keys [n], by destination -> yields the positions of few enough edges to be sorted
    in the CPU cache. The parts have 16-bit numbers, which numpy sorts by radix: in linear time."""
    if not len(keys):
        return
    low, high = (int(key) >> bits for key in (keys.min(), keys.max()))
    parts = min(max(1, len(keys) // FEW_EDGES), 1 << 14)
    shift = max(0, (high - low).bit_length() - parts.bit_length())
    part = ((keys >> bits + shift) - (low >> shift)).astype(np.uint16)
    ends = np.cumsum(np.bincount(part))
    order = np.argsort(part, kind="stable")
    for a, b in pairwise([0, *ends]):
        if a < b:
            yield order[a:b]


def _ranges(edges, options, numbered, folder, progress):
    """Partition edges by ranges of destinations, of up to SORT_EDGES edges -> yields for each range the unsorted keys
    uint64 [n] of (destination, source) and, if `numbered`, the numbers of the edges, int64 [n]. One pass counts the edges, a
    second writes each to its range, in a temporary file if there are several."""
    chunks = functools.partial(edge_chunks, edges, options, numbered)
    bits = _source_bits(edges.num_nodes)
    most = max(1, SORT_EDGES >> 2) if numbered else SORT_EDGES
    cuts, counts = _cut(chunks, edges.num_nodes, most)
    several = len(counts) > 1
    room = functools.partial(_on_disk, folder) if several else np.empty
    ends = np.cumsum(counts)
    total = int(ends[-1])
    filled = ends - counts
    with progress_bar(progress, total=2 * total, desc="edges", unit="edge") as bar:
        spools = [room(total, np.uint64)]
        if numbered:
            spools.append(room(total, np.int64))
        for sources, destinations, numbers in chunks():
            packed = destinations.astype(np.int64)
            packed <<= bits
            packed |= sources
            arrays = [packed.view(np.uint64), numbers]
            if several and numbered:
                order = np.argsort(arrays[0])
                arrays = [array[order] for array in arrays]
            elif several:  # SIMD: faster than selecting the edges of each range
                arrays[0].sort()
            inner = np.searchsorted(arrays[0], np.array(cuts[1:-1], np.uint64) << bits)
            for i, (a, b) in enumerate(pairwise([0, *inner, len(packed)])):
                for spool, array in zip(spools, arrays):
                    spool[filled[i] : filled[i] + b - a] = array[a:b]
                filled[i] += b - a
            bar.update(len(packed))
        in_memory = np.array if several else np.asarray
        for a, b in pairwise([0, *ends]):
            # without a name for them here: the next range is made after these are freed
            yield [in_memory(spool[a:b]) for spool in spools]
            bar.update(int(b - a))


def _on_disk(folder, count, dtype) -> np.ndarray:
    """Create an array [count] in an unnamed temporary file in `folder`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):  # a hole would kill the process on a full disk
            os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
        return np.memmap(file, dtype, "r+", shape=count)


def _cut(chunks, num_nodes, cap):
    """Cut the destinations into ranges of adjacent buckets, in one pass over the edges -> (boundaries, edges of each
    range): one range if there are up to `cap` edges, else several of up to an eighth of that, or one bucket."""
    shift = max(0, _source_bits(num_nodes) - 16)
    ends = np.zeros(((num_nodes - 1) >> shift) + 2, np.int64)
    for _, destinations, _ in chunks():
        ends[1:] += np.bincount(destinations >> shift, minlength=len(ends) - 1)
    np.cumsum(ends, out=ends)
    if ends[-1] > cap:
        # the edges are partitioned anyway, and smaller ranges sort faster
        cap = max(1, cap >> 3)
    buckets = [0]
    while buckets[-1] < len(ends) - 1:
        first = buckets[-1]
        buckets.append(max(first + 1, int(np.searchsorted(ends, ends[first] + cap, "right")) - 1))
    return [min(bucket << shift, num_nodes) for bucket in buckets], np.diff(ends[buckets])


def places_of(order, edges) -> np.ndarray:
    """Find edges by their numbers in the order given -> positions among the stored edges, int64 [n'].

    Positions are in the order of `edges`; of an edge that is stored with its reverse there are two, ascending.

    Args:
        order: int64 [M'], the number of each stored edge. edges: int64 [n].

    Raises:
        StoreError: for an edge that is not stored; names the first.
    """
    places = np.argsort(order, kind="stable")
    numbers = order[places]
    first = np.searchsorted(numbers, edges)
    counts = np.searchsorted(numbers, edges, "right") - first
    largest = np.max(order, initial=-1)
    refuse(
        counts == 0,
        "edges",
        edges,
        f"stored edges have numbers up to {largest}, less those of dropped duplicates and self-loops",
    )
    before = np.cumsum(counts) - counts
    return places[np.arange(counts.sum()) + np.repeat(first - before, counts)]


def checked_indices(indices, num_nodes, progress):
    """Yield chunks of `indices` as int64, in the order given, their node ids checked."""
    for first, chunk in chunked("indices", indices, progress):
        chunk = integers("indices", chunk)
        within("indices", chunk, num_nodes, "node ids", first)
        yield chunk
