"""Graphs on disk, one copy for every process: build a store, open it, verify it, say what training on it takes.

A store is a directory of plain .npy files beside a meta.json; features are either one more .npy (backend "mmap") or
an LMDB file whose values are blocks of consecutive rows (backend "lmdb"). It is built in a hidden directory beside
the target and renamed at the end: a store is complete or not there. Every process opens it by its path; the pages
are shared by all of them. Many small graphs (molecules, crystals) make a `GraphDataset`: LMDB with a graph a value.

    build_store("graph", edge_index=edge_index, features=x, labels=y, split={"train": ..., "valid": ..., "test": ...})
    graph = GraphStore.open("graph")
    rows = graph.features.gather(ids)

    build_graphs("molecules", [block_diagonal(num_nodes, num_edges, edge_index, x, e, y)], split={"train": ...})
    batch = GraphDataset.open("molecules").batch(ids)

    python store.py build edges.csv.gz PATH --features x.csv.gz --labels y.csv --symmetrize      # needs datasets.py
    python store.py info PATH       # sizes, degrees, options, source
    python store.py verify PATH     # every checksum and every index
    python store.py estimate PATH --gpus 4 --fanout 15,10,5     # memory in each mode, what fits, the mode to choose

Letters: V nodes and M edges of the graph, F feature width, C classes. The graph is CSC over in-edges: the sources of
the edges into v are indices[indptr[v]:indptr[v+1]]. G graphs side by side have N nodes, E edges, D columns of edge
features, T targets. This file needs torch, numpy and tqdm (lmdb for what is in LMDB).

What guards a store: meta.json carries a checksum of itself, and a SHA-256 of every file that never changes. An LMDB
file changes in transactions, which LMDB completes or forgets whatever happens to the process; its values are raw arrays
behind a fixed header with their CRC-32. The first `put_rows` takes the file's SHA-256 out of meta.json, and from then
on the CRCs and LMDB's own structure stand for it. `open` checks the size and the head of every file and is safe on any
bytes; `verify` reads everything and trusts nothing. Reading from an LMDB file that was damaged behind its head is what
`verify` is there to prevent: LMDB detects most of it, and may end the process on the rest.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import mmap
import os
import platform
import shutil
import struct
import sys
import threading
import uuid
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

FORMAT, GRAPHS_FORMAT, VERSION = "ringblock-graph", "ringblock-graphs", 2
SPLITS = ("train", "valid", "test")
BACKENDS = {"mmap": "features.npy", "lmdb": "features.lmdb"}
DTYPES = ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64")

MODES = ("cuda-cuda", "pinned-cuda", "cpu-cuda", "cpu-cpu")  # where graph and features live - where training runs

GPU_BYTES = 1 << 30  # of a GPU that training takes beside its tensors: context, libraries, communication
RANK_BYTES = 1 << 29  # of host memory, for each process
EDGE_CHUNK = 1 << 22  # edges handled at a time
SORT_EDGES = 1 << 27  # edges sorted at a time: 1 GiB of keys, whatever the size of the graph
ROW_BYTES = 1 << 24  # bytes of rows handled at a time
READ_THREADS = 32  # that wait for a disk; the processor has little to do with it
MAP_ROOM = 1 << 30  # address space beyond the end of an LMDB file; it doubles when that is used up
BLOCK_HEADER = struct.Struct("<4sIIII")  # magic, rows, row width, bytes per element, CRC-32 of the rows behind it
GRAPH_HEADER = np.dtype([("magic", "S4"), ("nodes", "<u4"), ("edges", "<u4"), ("crc", "<u4")])  # before each graph


class StoreError(ValueError):
    """What is wrong with a graph, a store or a data set, in one sentence for its user."""


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


# ---------------------------------------------------------------------------------------------------------------------
# building


def build_store(path, *, edge_index=None, indptr=None, indices=None, features, labels, split, backend="mmap",
                num_classes=None, symmetrize=False, drop_self_loops=False, drop_duplicates=False, block_rows=None,
                source="", progress=False) -> Path:
    """Write a graph to disk as a store; complete, or not there at all.

    Arrays may be numpy arrays, torch CPU tensors or anything with .shape, .dtype and slicing (a memmap, say), which
    is then read a piece at a time. With edge_index the neighbour lists come out sorted by source, in bounded memory
    and independent of the order of the input; indptr and indices are stored as they are unless an option changes them.

    Args:
        path: directory to create; its parents are created as well.
        edge_index: integers [2, M], row 0 the sources, row 1 the destinations; or give
        indptr, indices: the graph in CSC form, integers [V + 1] and [M] (indices may be `Rows`).
        features: [V, F] of a dtype in DTYPES, without NaN or infinity (may be `Rows`).
        labels: integers [V] in [0, C); -1 for a node without a label, which no split may hold.
        split: dict with node ids for "train" (not empty), "valid" and "test" (each may be missing); disjoint.
        backend: "mmap" or "lmdb", for the features.
        num_classes: C; the largest label + 1 when None.
        symmetrize: add the reverse of every edge.
        drop_self_loops: leave out edges from a node to itself.
        drop_duplicates: keep one of several equal edges (after symmetrizing).
        block_rows: rows per LMDB value; what four pages hold, 16 KiB with headers, when None.
        source: where the graph comes from, kept in meta.json: a string or a dict of JSON values.
        progress: show a bar where stderr is a terminal.

    Returns:
        The path of the store.

    Raises:
        StoreError: for input that makes no sense, a target that exists, a full disk. Nothing is left behind.
    """
    path = Path(path)
    if backend not in BACKENDS:
        raise StoreError(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    num_nodes, width, dtype = _check_features(features)
    labels, num_classes = _check_labels(labels, num_nodes, num_classes)
    split = _check_split(split, labels)
    edge_index, indptr, indices, num_edges = _check_graph(edge_index, indptr, indices, num_nodes)
    options = {"symmetrize": bool(symmetrize), "drop_self_loops": bool(drop_self_loops),
               "drop_duplicates": bool(drop_duplicates)}
    row_bytes = width * _storage(dtype).itemsize
    block_rows = max(1, ((1 << 14) - 64) // row_bytes) if block_rows is None else int(block_rows)
    if not 1 <= block_rows * row_bytes < 1 << 31:
        raise StoreError(f"block_rows is {block_rows}: at least one row and less than 2 GiB of rows are needed")
    meta = {"format": FORMAT, "format_version": VERSION, "num_nodes": num_nodes, "num_edges": num_edges,
            "num_classes": num_classes, "feature_dim": width, "feature_dtype": dtype, "backend": backend,
            "block_rows": block_rows, "options": options, "source": json.loads(json.dumps(source))}
    arrays = dict(indptr=indptr, labels=labels, **split)
    with _complete_or_not_there(path, num_nodes * (row_bytes + 16) + num_edges * (4 << symmetrize)) as building:
        _write_store(building, meta, edge_index, indices, arrays, features, progress)
    return path


@contextlib.contextmanager
def _complete_or_not_there(path, need):
    """A hidden directory to write into, which becomes `path` at the end; it takes about `need` bytes."""
    if os.path.lexists(path):
        raise StoreError(f"{path} exists already: remove it or choose another path")
    building = path.with_name(f".{path.name}.building.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead_builds(path)
        building.mkdir()
        yield building
        for file in [*building.iterdir(), building]:
            _sync(file)
        os.rename(building, path)
        _sync(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise StoreError(f"{path} exists already: another process completed it first") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            shutil.rmtree(building, ignore_errors=True)
            free = shutil.disk_usage(path.parent).free
            raise StoreError(f"no room for {path} on its disk: it takes about {_size(need)} and {_size(free)} are "
                             "free; free some or build it elsewhere") from error
        raise StoreError(f"cannot build {path}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write_store(path, meta, edge_index, indices, arrays, features, progress):
    """Write every file of a store, meta.json last, and see to it that they are on the disk."""
    num_nodes, options, files = meta["num_nodes"], meta["options"], {}
    if edge_index is None and not any(options.values()):
        chunks = _checked_indices(indices, num_nodes, progress)
    else:
        if isinstance(indices, Rows):
            raise StoreError("indices given as Rows is stored as it is: no graph option can be applied to it")
        edges = functools.partial(_edge_chunks, edge_index, arrays["indptr"], indices, num_nodes, options)
        arrays["indptr"] = np.zeros(num_nodes + 1, np.int64)
        chunks = _sorted_sources(edges, arrays["indptr"], options["drop_duplicates"], progress)
    most = meta["num_edges"] * (2 if options["symmetrize"] else 1)
    files["indices.npy"] = _write_npy(path / "indices.npy", _index_dtype(num_nodes), [most], chunks)
    meta["num_edges"] = files["indices.npy"]["shape"][0]
    for name, array in arrays.items():
        files[f"{name}.npy"] = _write_npy(path / f"{name}.npy", "int64", [len(array)], [array])
    file = path / BACKENDS[meta["backend"]]
    shape, dtype = [num_nodes, meta["feature_dim"]], _storage(meta["feature_dtype"])
    rows = _feature_rows(features, meta["feature_dtype"], progress)
    if meta["backend"] == "mmap":
        files[file.name] = _write_npy(file, dtype, shape, rows)
    else:
        files[file.name] = _write_lmdb(file, dtype, shape, rows, meta["block_rows"])
    (path / "meta.json").write_bytes(_dump_meta(dict(meta, files=files)))


def _check_features(features) -> tuple[int, int, str]:
    """(V, F, dtype name) of the features."""
    shape = tuple(getattr(features, "shape", ()))
    if len(shape) != 2 or 0 in shape:
        raise StoreError(f"features has shape {list(shape)}: [V, F] with at least one node and one column is needed")
    dtype = features.dtype
    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    if dtype not in DTYPES:
        raise StoreError(f"features has dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    return int(shape[0]), int(shape[1]), dtype


def _check_labels(labels, num_nodes, num_classes) -> tuple[np.ndarray, int]:
    """Labels as int64 [V] and C."""
    labels = _integers("labels", labels)
    if labels.shape != (num_nodes,):
        raise StoreError(f"labels has shape {list(labels.shape)}: [{num_nodes}] is needed, a label per row of features")
    num_classes = max(int(labels.max()) + 1, 1) if num_classes is None else int(num_classes)
    if num_classes < 1:
        raise StoreError(f"num_classes is {num_classes}: at least one is needed")
    bad = np.flatnonzero((labels < -1) | (labels >= num_classes))
    if len(bad):
        raise StoreError(f"labels[{bad[0]}] is {labels[bad[0]]}: labels lie in [0, {num_classes}), or are -1 where "
                         "there is none")
    return labels, num_classes


def _check_split(split, labels, what="node") -> dict[str, np.ndarray]:
    """Ids as int64 for each of SPLITS, disjoint, in range and labelled; of nodes, some have to be for training."""
    unknown = set(split) - set(SPLITS)
    if unknown:
        raise StoreError(f"split has a part {min(unknown)!r}: its parts are {', '.join(SPLITS)}")
    split = {name: _integers(f"split {name!r}", split.get(name, ())) for name in SPLITS}
    owner = np.full(len(labels), -1, np.int8)
    for part, (name, ids) in enumerate(split.items()):
        if ids.ndim != 1:
            raise StoreError(f"split {name!r} has shape {list(ids.shape)}: one dimension is needed")
        bad = np.flatnonzero((ids < 0) | (ids >= len(labels)))
        if len(bad):
            raise StoreError(f"split {name!r} holds {what} {ids[bad[0]]}: {what} ids lie in [0, {len(labels)})")
        bad = np.flatnonzero(owner[ids] >= 0)
        if len(bad):
            raise StoreError(f"{what} {ids[bad[0]]} is in split {SPLITS[owner[ids[bad[0]]]]!r} and in {name!r}: "
                             "the parts must not overlap")
        owner[ids] = part
        if np.count_nonzero(owner == part) != len(ids):
            values, counts = np.unique(ids, return_counts=True)
            raise StoreError(f"split {name!r} holds {what} {values[counts > 1][0]} more than once")
        bad = np.flatnonzero(labels[ids] < 0)
        if len(bad):
            raise StoreError(f"split {name!r} holds {what} {ids[bad[0]]}, which has no label (-1)")
    if what == "node" and not len(split["train"]):
        raise StoreError("split 'train' is empty: at least one node is needed")
    return split


def _check_graph(edge_index, indptr, indices, num_nodes):
    """(edge_index, indptr, indices, M): one of the two forms, with its shapes and its indptr checked."""
    if (edge_index is None) == (indptr is None) or (indptr is None) != (indices is None):
        raise StoreError("the graph is given either as edge_index or as indptr and indices, and as one of them only")
    if num_nodes > 1 << 32:
        raise StoreError(f"features has {num_nodes} rows: a store holds at most 2^32 nodes")
    if edge_index is not None:
        if isinstance(edge_index, (list, tuple)):
            edge_index = np.asarray(edge_index)
        if len(edge_index.shape) != 2 or edge_index.shape[0] != 2:
            raise StoreError(f"edge_index has shape {list(edge_index.shape)}: [2, M] is needed, sources over "
                             "destinations")
        return edge_index, None, None, int(edge_index.shape[1])
    indptr = _integers("indptr", indptr)
    indices = np.asarray(indices) if isinstance(indices, (list, tuple)) and not isinstance(indices, Rows) else indices
    if indptr.shape != (num_nodes + 1,) or len(indices.shape) != 1:
        raise StoreError(f"indptr has shape {list(indptr.shape)} and indices {list(indices.shape)}: "
                         f"[{num_nodes + 1}] and [M] are needed, with {num_nodes} rows of features")
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        v = falls[0]
        raise StoreError(f"indptr falls from {indptr[v]} to {indptr[v + 1]} at node {v}: it must not decrease")
    if indptr[0] != 0 or indptr[-1] != indices.shape[0]:
        raise StoreError(f"indptr runs from {indptr[0]} to {indptr[-1]}: it must run from 0 to the "
                         f"{indices.shape[0]} edges of indices")
    return None, indptr, indices, int(indices.shape[0])


def _integers(name, values) -> np.ndarray:
    """`values` as int64, refusing what is not a whole number."""
    values = np.asarray(values)
    if values.size and values.dtype.kind not in "iu":
        raise StoreError(f"{name} has dtype {values.dtype}: integers are needed")
    return values.astype(np.int64, copy=False)


def _edge_chunks(edge_index, indptr, indices, num_nodes, options) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(sources, destinations), EDGE_CHUNK edges at a time, checked, with self-loops and reverses as asked for."""
    num_edges = edge_index.shape[1] if indptr is None else indices.shape[0]
    for a in range(0, num_edges, EDGE_CHUNK):
        b = min(a + EDGE_CHUNK, num_edges)
        if indptr is None:
            pairs = np.asarray(edge_index[:, a:b])
            src, dst = pairs if pairs.dtype == np.int32 else _integers("edge_index", pairs)  # half the bytes to go over
        else:
            src = _integers("indices", indices[a:b])
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


def _sorted_sources(edges, indptr, drop_duplicates, progress) -> Iterator[np.ndarray]:
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


def _checked_indices(indices, num_nodes, progress) -> Iterator[np.ndarray]:
    """Chunks of `indices` in the order given, each checked."""
    for first, chunk in _chunks(indices, EDGE_CHUNK, "indices", progress):
        chunk = _integers("indices", chunk)
        if len(chunk) and (chunk.min() < 0 or chunk.max() >= num_nodes):
            bad = np.flatnonzero((chunk < 0) | (chunk >= num_nodes))[0]
            raise StoreError(f"indices[{first + bad}] is {chunk[bad]}: node ids lie in [0, {num_nodes})")
        yield chunk


def _feature_rows(features, dtype, progress) -> Iterator[np.ndarray]:
    """Chunks of rows as they are stored, each checked for NaN and infinity."""
    width = features.shape[1]
    rows = max(1, ROW_BYTES // (width * _storage(dtype).itemsize))
    for first, chunk in _chunks(features, rows, "features", progress):
        if not isinstance(chunk, Tensor):
            chunk = torch.from_numpy(np.require(chunk, np.asarray(chunk).dtype.newbyteorder("="), "CW"))
        if chunk.dtype != getattr(torch, dtype) or chunk.shape[1:] != (width,):
            raise StoreError(f"features came with rows of {list(chunk.shape[1:])} {chunk.dtype}, [{width}] {dtype} "
                             "was announced")
        _check_finite("features", chunk, first)
        yield (chunk.view(torch.int16) if dtype == "bfloat16" else chunk).detach().cpu().numpy()


def _check_finite(name, rows, first=0):
    if rows.is_floating_point() and not torch.isfinite(rows).all():
        row, column = (~torch.isfinite(rows)).nonzero()[0].tolist()
        raise StoreError(f"{name}[{first + row}, {column}] is {rows[row, column].item()}: every value must be finite")


def _chunks(array, rows, name, progress) -> Iterator:
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


def _write_npy(path, dtype, shape, chunks) -> dict:
    """Write chunks of rows as one .npy file; returns its record for meta.json. shape[0] may come out smaller."""
    header = _npy_header(dtype, shape)
    digest, rows = hashlib.sha256(header), 0
    with open(path, "wb") as file:
        file.write(header)
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
            rows += len(chunk)
        shape = [rows, *shape[1:]]
        file.seek(0)
        file.write(_npy_header(dtype, shape))
    if _npy_header(dtype, shape) != header:
        digest = _digest(path)
    return _record(path, dtype, shape, digest)


def _record(path, dtype, shape, digest) -> dict:
    size, sha256 = path.stat().st_size, digest.hexdigest()
    return {"dtype": np.dtype(dtype).name, "shape": shape, "bytes": size, "sha256": sha256}


def _npy_header(dtype, shape) -> bytes:
    """The 128 bytes in front of the data of a .npy file of format 1.0: one spelling, so that it can be compared."""
    shape = tuple(int(n) for n in shape)
    text = repr({"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.encode().ljust(117) + b"\n"


def _write_lmdb(path, dtype, shape, chunks, block_rows) -> dict:
    """Write chunks of rows as LMDB blocks of `block_rows` rows; returns the record for meta.json."""
    blocks = (_block_value(rows) for rows in _regroup(chunks, block_rows))
    with contextlib.closing(_Lmdb(path, sync=False)) as file:
        while batch := list(itertools.islice(blocks, 1024)):
            file.append(batch)
    return _record(path, dtype, shape, _digest(path))


def _block_value(rows) -> bytes:
    data = rows.tobytes()
    return BLOCK_HEADER.pack(b"RBK2", *rows.shape, rows.itemsize, zlib.crc32(data)) + data


def _regroup(chunks, rows) -> Iterator[np.ndarray]:
    """The same rows, `rows` at a time; fewer at the end."""
    held = None
    for chunk in chunks:
        held = chunk if held is None else np.concatenate([held, chunk])
        whole = len(held) - len(held) % rows
        yield from (held[a:a + rows] for a in range(0, whole, rows))
        held = held[whole:]
    if len(held):
        yield held


def _remove_dead_builds(path):
    """Remove what builds of the same target left on this host when their process was killed."""
    prefix = f".{path.name}.building.{_host()}."
    for entry in path.parent.iterdir():
        pid = entry.name.removeprefix(prefix).split(".")[0]
        if entry.name.startswith(prefix) and pid.isdigit():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(entry, ignore_errors=True)
            except (PermissionError, OverflowError):
                pass  # alive, and somebody else's


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _sync(path):
    """Have a file or a directory on the disk before anything that comes after."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
    return digest


# ---------------------------------------------------------------------------------------------------------------------
# meta.json


def _storage(dtype) -> np.dtype:
    """The numpy dtype in which features are stored; numpy has no bfloat16."""
    return np.dtype("int16" if dtype == "bfloat16" else dtype).newbyteorder("<")


def _index_dtype(num_nodes) -> str:
    return "int32" if num_nodes < 1 << 31 else "int64"


def _dump_meta(meta) -> bytes:
    """meta.json with a checksum over itself, in the one spelling that `_read_meta` accepts."""
    meta = {k: v for k, v in meta.items() if k != "checksum"}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    return (json.dumps(dict(meta, checksum=digest), indent=1, sort_keys=True) + "\n").encode()


def _read_meta(path, form) -> dict:
    """Read and check meta.json, of this format or of any: every number in it is sane and agrees with the others."""
    try:
        data = (Path(path) / "meta.json").read_bytes()
        meta = json.loads(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"{path} is no store: there is no {Path(path) / 'meta.json'}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot read meta.json: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: meta.json is damaged: {error}; rebuild the store") from error
    known = {FORMAT: "one graph: open it as GraphStore (train.py --task node)",
             GRAPHS_FORMAT: "many small graphs: open it as GraphDataset (train.py --task graph)"}
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), str) or meta["format"] not in known:
        raise StoreError(f"{path}: meta.json does not describe a store (its format is none of {', '.join(known)})")
    if meta["format"] != (form or meta["format"]):
        raise StoreError(f"{path} holds {known[meta['format']]}")
    if meta.get("format_version") != VERSION:
        raise StoreError(f"{path}: store format {meta.get('format_version')!r}; this store.py reads {VERSION}; "
                         "rebuild it")

    def need(name, fine):
        if name not in meta or not fine(meta[name]):
            raise StoreError(f"{path}: meta.json has {name} = {meta.get(name)!r}, which is no sane value; "
                             "rebuild the store")
        return meta[name]

    def within(low, high):
        return lambda n: type(n) is int and low <= n <= high

    files = need("files", lambda n: isinstance(n, dict) and all(isinstance(r, dict) for r in n.values()))
    if meta["format"] == FORMAT:
        count = num_nodes = need("num_nodes", within(1, 1 << 32))
        num_edges = need("num_edges", within(0, 1 << 48))
        need("num_classes", within(1, 1 << 40))
        width = need("feature_dim", within(1, 1 << 31))
        dtype = need("feature_dtype", lambda n: n in DTYPES)
        backend = need("backend", lambda n: isinstance(n, str) and n in BACKENDS)
        need("block_rows", within(1, 1 << 31))
        need("options", lambda n: isinstance(n, dict))
        expected = {"indptr.npy": ("int64", [num_nodes + 1]), "indices.npy": (_index_dtype(num_nodes), [num_edges]),
                    "labels.npy": ("int64", [num_nodes]), BACKENDS[backend]: (_storage(dtype).name, [num_nodes, width])}
    else:
        for name in ("node", "edge", "target"):
            need(f"{name}_dim", within(0, 1 << 24))
            need(f"{name}_dtype", lambda n: n in DTYPES)
        count, expected = 1 << 40, {"graphs.lmdb": ("bytes", [])}
    for name in SPLITS:
        shape = files.get(f"{name}.npy", {}).get("shape")
        known = isinstance(shape, list) and len(shape) == 1 and within(0, count)(shape[0])
        expected[f"{name}.npy"] = ("int64", shape if known else None)
    for name in expected.keys() | files.keys():
        record = files.get(name, {})
        kind, shape = expected.get(name, (None, None))
        fine = shape is not None and (record.get("dtype"), record.get("shape")) == (kind, shape)
        size = record.get("bytes")
        if fine and name.endswith(".npy"):
            size = 128 + math.prod(shape) * np.dtype(kind).itemsize
        fine = fine and within(1, 1 << 60)(size) and record.get("bytes") == size
        if not fine or "sha256" not in record and name.endswith(".npy"):
            raise StoreError(f"{path}: meta.json describes {name} as {record}, which does not fit the graph; "
                             "rebuild the store")
    if data != _dump_meta(meta):
        raise StoreError(f"{path}: meta.json was altered: its checksum does not fit; rebuild the store")
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# opening


class GraphStore:
    """A graph on disk, read through memory maps that all processes share.

    Attributes:
        indptr: int64 [V + 1] and
        indices: int32 or int64 [M], the graph in CSC form; both read-only: writing to them kills the process.
        labels: int64 [V], -1 where there is none.
        split: dict of int64 node ids for "train", "valid" and "test".
        features: `MmapFeatures` or `LmdbFeatures`, with .shape, .dtype and .gather(ids, out=None).
        num_nodes, num_edges, num_classes, feature_dim: V, M, C, F.
        path: the directory.
        meta: the contents of meta.json.
    """

    def __init__(self, path, meta):
        self.path, self.meta = Path(path), meta
        self.num_nodes, self.num_edges = meta["num_nodes"], meta["num_edges"]
        self.num_classes, self.feature_dim = meta["num_classes"], meta["feature_dim"]
        self.indptr, self.indices, self.labels = (self._map(n) for n in ("indptr.npy", "indices.npy", "labels.npy"))
        self.split = {name: self._map(f"{name}.npy") for name in SPLITS}
        if self.indptr[0] != 0 or self.indptr[-1] != self.num_edges:
            raise StoreError(f"{path}: indptr.npy runs from {self.indptr[0]} to {self.indptr[-1]} instead of from 0 "
                             f"to {self.num_edges}")
        shape, dtype = (self.num_nodes, self.feature_dim), getattr(torch, meta["feature_dtype"])
        large = math.prod(shape) * dtype.itemsize > _free_host()
        if meta["backend"] == "mmap":
            table = _map_npy(self.path, "features.npy", meta["files"]["features.npy"], ahead=not large)
            self.features = MmapFeatures(table.view(dtype), large)
        else:
            file = _check_file(self.path, "features.lmdb", meta["files"]["features.lmdb"])
            self.features = LmdbFeatures(file, shape, dtype, meta["block_rows"], large)

    @classmethod
    def open(cls, path) -> GraphStore:
        """Open a store after checking its meta.json, the size and header of every file, and the ends of indptr.

        Args:
            path: directory that `build_store` made.

        Returns:
            The open store; nothing has been read into memory.

        Raises:
            StoreError: if it is no store, of another format version, incomplete or damaged.
        """
        return cls(path, _read_meta(path, FORMAT))

    def _map(self, name) -> Tensor:
        return _map_npy(self.path, name, self.meta["files"][name])


def _map_npy(path, name, record, ahead=True) -> Tensor:
    """Map a .npy file whose header is known; no header is parsed, so a damaged one cannot do harm."""
    array = np.memmap(_check_file(path, name, record), record["dtype"], "r", offset=128, shape=tuple(record["shape"]))
    if not ahead and hasattr(mmap, "MADV_RANDOM"):  # read what is asked for, not what lies beside it
        array._mmap.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


class MmapFeatures:
    """Feature rows in a memory-mapped array.

    A table that is larger than the memory that is free is read by many threads, so that the disk has many requests to
    work on, and without reading ahead.

    Attributes:
        large: True for such a table.
        tensor: [V, F], read-only, without a copy; not there when large: rows go through `gather`.
        shape: (V, F).
        dtype: torch dtype.
    """

    def __init__(self, table, large=False):
        self._table, self.shape, self.dtype, self.large = table, tuple(table.shape), table.dtype, large
        if not large:
            self.tensor = table

    def gather(self, ids, out=None) -> Tensor:
        """Copy rows.

        Args:
            ids: int32 or int64 [n] node ids, in any order, repeats allowed.
            out: [n, F] of this dtype to write into; a tensor is made when None.

        Returns:
            [n, F], `out` if that was given.

        Raises:
            IndexError: for an id that is no row.
        """
        out = _gather_target(self, ids, out)
        if not self.large:
            return torch.index_select(self._table, 0, ids, out=out)
        source, target, ids = _as_numpy(self._table), _as_numpy(out), ids.numpy()
        cuts = np.linspace(0, len(ids), 4 * READ_THREADS + 1).astype(int).tolist()
        with ThreadPoolExecutor(READ_THREADS) as pool:
            list(pool.map(lambda a, b: np.take(source, ids[a:b], 0, target[a:b], "clip"), cuts, cuts[1:]))
        return out


class LmdbFeatures:
    """Feature rows in an LMDB file, `block_rows` consecutive rows per value; many threads and processes may use it.

    Attributes:
        shape: (V, F).
        dtype: torch dtype.
        large: True when all rows together are more than the memory that is free.
    """

    def __init__(self, path, shape, dtype, block_rows, large=False):
        self.file, self.shape, self.dtype, self.block_rows, self.large = _Lmdb(path), shape, dtype, block_rows, large
        self._storage = _storage(str(dtype).removeprefix("torch."))

    def gather(self, ids, out=None) -> Tensor:
        """Copy rows, each block looked up once and all at one moment; see `MmapFeatures.gather`."""
        out = _gather_target(self, ids, out)
        target = _as_numpy(out)
        if self.large:  # have many threads wait for the disk first
            blocks = np.unique(ids.numpy() // self.block_rows)
            with ThreadPoolExecutor(READ_THREADS) as pool:
                list(pool.map(self._touch, np.array_split(blocks, 4 * READ_THREADS)))
        with self.file.transaction() as txn:
            for number, where, rows in self._blocks(ids):
                target[where] = self._block(txn, number)[rows]
        return out

    def put_rows(self, ids, rows):
        """Replace rows, all at one moment: whoever reads sees all of them or none, after a crash as well.

        Args:
            ids: int32 or int64 [n] node ids; of one that repeats, the last row counts.
            rows: [n, F] of this dtype, finite. The blocks they are in are held in memory.

        Raises:
            IndexError: for an id that is no row.
            StoreError: for rows of another shape or dtype, NaN or infinity, a full disk; the rows are as they were.
        """
        ids, rows = torch.as_tensor(ids), torch.as_tensor(rows)
        source = _as_numpy(_gather_target(self, ids, rows, "rows"))
        _check_finite("rows", rows)

        def change(txn):
            _forget_digest(self.file.path)
            for number, where, at in self._blocks(ids):
                block = self._block(txn, number, check=True).copy()
                block[at] = source[where]
                txn.put(_key(number), _block_value(block))

        with _nothing_changed(self.file.path):
            self.file.write(change)

    def _touch(self, blocks):
        """Bring blocks into memory: py-lmdb reads a page of each value after the other, other threads run meanwhile."""
        with self.file.transaction() as txn:
            for number in blocks.tolist():
                txn.get(_key(number))

    def _blocks(self, ids) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(block, positions in ids, rows inside the block) for every block that ids touch, in order."""
        ids = ids.numpy()
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        blocks = ids // self.block_rows
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        rows = ids - blocks * self.block_rows
        for a, b in zip(starts, [*starts[1:], len(ids)]):
            yield int(blocks[a]), order[a:b], rows[a:b]

    def _block(self, txn, number, check=False) -> np.ndarray:
        """Block `number` as [rows, F], without a copy, valid inside the transaction; `check` compares its checksum."""
        value, (rows, width, itemsize) = txn.get(_key(number)), (self.block_rows, self.shape[1], self._storage.itemsize)
        rows = min(rows, self.shape[0] - number * rows)
        if value is not None and len(value) == BLOCK_HEADER.size + rows * width * itemsize:
            *head, crc = BLOCK_HEADER.unpack_from(value)
            block = np.frombuffer(value, self._storage, offset=BLOCK_HEADER.size).reshape(rows, width)
            if head == [b"RBK2", rows, width, itemsize] and not (check and zlib.crc32(block) != crc):
                return block
        raise StoreError(f"{self.file.path}: block {number} is missing or damaged; rebuild the store")

    def verify(self):
        """Raise StoreError for the first block whose checksum does not fit."""
        with self.file.transaction() as txn:
            for number in range(-(-self.shape[0] // self.block_rows)):
                self._block(txn, number, check=True)


class _Lmdb:
    """An LMDB file whose keys are 0, 1, 2, ...: opened by each process for itself, grown when it is full.

    LMDB allows one environment for each file and process, and no transaction while its map is replaced. So the objects
    on one file share an environment, the map is replaced and the process forked between transactions only, and a child
    closes what it inherited.
    """

    _turn, _running, _wanted = threading.Condition(), 0, 0  # transactions of this process, and who waits for their end
    _open = weakref.WeakValueDictionary()

    def __init__(self, path, sync=True):
        self.path, self.sync, self._env, self._pid = Path(path), sync, None, None
        if not sync:  # a build: nobody else reads it, and it is brought to the disk as a whole
            self.path.touch()

    @contextlib.contextmanager
    def transaction(self, write=False):
        """A transaction at one state of the file; what is written becomes part of it at the end, or never."""
        lmdb = _import_lmdb()
        try:
            txn = self._begin(write)
            try:
                with txn:
                    yield txn
            finally:
                self._end()
        except lmdb.Error as error:
            if write:
                raise
            raise StoreError(f"{self.path} cannot be read: {error}; rebuild the store") from error

    def write(self, change):
        """Run change(txn) in a transaction, again in a larger map when this one is full."""
        lmdb = _import_lmdb()
        while True:
            try:
                with self.transaction(write=True) as txn:
                    return change(txn)
            except lmdb.MapFullError:
                if not self._env.reader_check():  # a reader that was killed holds on to pages that could be used again
                    self._resize(2 * self._env.info()["map_size"])
            except lmdb.Error as error:
                # a write that the disk takes in part is reported by LMDB as an input/output error
                full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
                full = full or shutil.disk_usage(self.path.parent).free < 4 * ROW_BYTES
                raise OSError(errno.ENOSPC if full else errno.EIO, f"{self.path}: {error}") from error

    def append(self, values):
        """Add values behind the last key, all of them or none."""

        def change(txn):
            for number, value in enumerate(values, txn.stat()["entries"]):
                txn.put(_key(number), value, append=True)

        self.write(change)

    def close(self):
        """Close the environment, which nobody else may be using."""
        if self._env is not None:
            self._env.close()

    def _begin(self, write):
        lmdb = _import_lmdb()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._wanted)
                env = self._environment(lmdb)
                _Lmdb._running += 1
            try:
                return env.begin(write=write, buffers=True)
            except lmdb.MapResizedError:  # another process made the file larger than our map
                self._end()
                self._resize(0)
            except BaseException:
                self._end()
                raise

    def _end(self):
        with self._turn:
            _Lmdb._running -= 1
            self._turn.notify_all()

    def _resize(self, size):
        self._hold()
        try:
            self._env.set_mapsize(size)
        finally:
            self._release()

    @classmethod
    def _hold(cls):
        """Wait until no transaction is under way, and let none begin before `_release`."""
        cls._turn.acquire()
        cls._wanted += 1
        cls._turn.wait_for(lambda: not cls._running)
        cls._wanted -= 1

    @classmethod
    def _release(cls):
        cls._turn.notify_all()
        cls._turn.release()

    def _environment(self, lmdb):
        if self._pid != os.getpid():
            for (pid, *_), env in list(self._open.items()):
                if pid != os.getpid():
                    env.close()  # inherited over a fork
            stat, writable = os.stat(self.path), os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
            key = (os.getpid(), stat.st_dev, stat.st_ino)
            try:
                if (lock := writable and self.sync) and hasattr(os, "posix_fallocate"):
                    with open(f"{self.path}-lock", "ab") as file:  # LMDB maps it: on a full disk a hole would kill
                        os.posix_fallocate(file.fileno(), 0, 1 << 16)
                self._env = self._open.get(key) or lmdb.open(
                    str(self.path), subdir=False, readahead=False, map_size=stat.st_size + MAP_ROOM, max_readers=1000,
                    readonly=not writable, lock=lock, sync=self.sync)
            except (lmdb.Error, OSError) as error:
                raise StoreError(f"{self.path} cannot be opened: {error}") from error
            self._open[key], self._pid = self._env, os.getpid()
        return self._env


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_Lmdb._hold, after_in_parent=_Lmdb._release, after_in_child=_Lmdb._release)


@contextlib.contextmanager
def _nothing_changed(path):
    """Say in one sentence why a change of a store failed."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write to {path}: {error.strerror}; what is in it is as it was") from error


def _key(number) -> bytes:
    return number.to_bytes(8, "big")


def _as_numpy(rows) -> np.ndarray:
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _gather_target(features, ids, out, name="out") -> Tensor:
    """`out`, or a tensor for it, after checking both it and the ids."""
    if len(ids):
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= features.shape[0]:
            raise IndexError(f"node {low if low < 0 else high} is out of range: ids lie in [0, {features.shape[0]})")
    shape = (len(ids), features.shape[1])
    if out is None:
        return torch.empty(shape, dtype=features.dtype)
    if tuple(out.shape) != shape or out.dtype != features.dtype:
        raise StoreError(f"{name} is {list(out.shape)} {out.dtype}: {list(shape)} {features.dtype} is needed")
    return out


def _forget_digest(file):
    """Take the checksum of an LMDB file out of meta.json before the file changes; its values have their own."""
    meta = _read_meta(file.parent, FORMAT)
    if meta["files"][file.name].pop("sha256", None):
        part = file.with_name(".meta.json.part")  # one writer at a time: this is called inside its transaction
        part.write_bytes(_dump_meta(meta))
        _sync(part)
        os.replace(part, file.with_name("meta.json"))
        _sync(file.parent)


def _check_file(path, name, record) -> Path:
    """Check that a file is there, as long as recorded, and starts as it should."""
    file = Path(path) / name
    try:
        size = file.stat().st_size
        if size < record["bytes"] or size > record["bytes"] and name.endswith(".npy"):
            raise StoreError(f"{file} is {'truncated' if size < record['bytes'] else 'too long'}: it has {size} bytes "
                             f"and should have {record['bytes']}; rebuild the store")
        if name.endswith(".lmdb"):
            _check_lmdb_head(file, size)
        else:
            with open(file, "rb") as data:
                if data.read(128) != _npy_header(record["dtype"], record["shape"]):
                    raise StoreError(f"{file} does not start as it should: its header is damaged; rebuild the store")
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}; rebuild the store") from error
    return file


def _check_lmdb_head(file, size):
    """Check the two meta pages of an LMDB file: two successive states of a file that has all pages of the later one."""
    with open(file, "rb") as data:
        head = data.read(1 << 17)
    try:  # type of page, magic, version, page size, flags, flags of the tree, its root, last page, transaction
        size_of_page = struct.unpack_from("<I", head, 40)[0]
        metas = [struct.unpack_from("<10xH4xII16xIH42x4xH34xQQQ", head, at) for at in (0, size_of_page)]
    except struct.error:
        metas = [()]
    if any(meta[:6] != (8, 0xBEEFC0DE, 1, size_of_page, 0x4008, 0) for meta in metas):
        raise StoreError(f"{file} does not start as it should: its header is damaged; rebuild the store")
    older, newer = sorted(metas, key=lambda meta: meta[-1])
    root, last, number = newer[-3:]
    empty = root == (1 << 64) - 1
    if number - older[-1] != 1 or metas[number % 2] is not newer or not (empty or 1 < root <= last):
        raise StoreError(f"{file} has a header that makes no sense: it is damaged; rebuild the store")
    if (last + 1) * size_of_page > size and _lmdb_problems(file):  # the last pages may be free and never written
        raise StoreError(f"{file} is truncated: it has {size} bytes and should have {(last + 1) * size_of_page}; "
                         "rebuild the store")


def _lmdb_problems(file) -> list[str]:
    """What is wrong with the structure of an LMDB file, found without giving it to LMDB."""
    verify_lmdb = _import_lmdb().verify
    try:
        return verify_lmdb.verify(str(file), subdir=False)
    except Exception as error:  # whatever damaged bytes make of a reader written in Python
        return [str(error) or repr(error)]


def _import_lmdb():
    try:
        import lmdb.verify
    except ImportError as error:
        raise StoreError("a store in LMDB needs the lmdb package: pip install 'lmdb>=3'") from error
    return lmdb


# ---------------------------------------------------------------------------------------------------------------------
# many small graphs


class GraphBatch(NamedTuple):
    """Graphs side by side as one graph, block-diagonal: no edge leads from one to another."""

    indptr: Tensor  # int32 [N+1]: the edges into node v are indices[indptr[v]:indptr[v+1]]
    indices: Tensor  # int32 [E] sources, positions among the N nodes
    graph_ids: Tensor  # int64 [N] which of the graphs a node belongs to, in ascending order
    x: Tensor  # [N, F] node features
    e: Tensor  # [E, D] edge features, in the order of indices
    y: Tensor  # [G, T] targets

    def to(self, device, non_blocking=False):
        """The same batch on a device."""
        return GraphBatch(*(t.to(device, non_blocking=non_blocking) for t in self))

    def record_stream(self, stream):
        """Keep the memory until what the CUDA stream has been given is done."""
        for tensor in self:
            tensor.record_stream(stream)


def block_diagonal(num_nodes, num_edges, edge_index, x, e, y) -> GraphBatch:
    """Put graphs given by their edge lists side by side.

    Args:
        num_nodes, num_edges: integers [G], at least one node each.
        edge_index: integers [2, E], sources over destinations, graph after graph, counted from 0 in each graph.
        x: [N, F], e: [E, D] features of nodes and edges, graph after graph. y: [G, T].

    Returns:
        GraphBatch, the edges sorted by destination, then source.

    Raises:
        StoreError: for shapes that do not fit, or an edge that leaves its graph.
    """
    num_nodes, num_edges = _integers("num_nodes", num_nodes), _integers("num_edges", num_edges)
    src, dst = _integers("edge_index", edge_index)
    first = np.cumsum(num_nodes) - num_nodes
    graphs, nodes = {len(num_nodes), len(num_edges), len(y)}, {num_nodes.sum(), len(x)}
    edges, least = {num_edges.sum(), len(src), len(e)}, min(num_nodes.min(initial=1), num_edges.min(initial=0) + 1)
    if max(len(graphs), len(nodes), len(edges)) > 1 or least < 1:
        raise StoreError(f"num_nodes holds {len(num_nodes)} numbers, {num_nodes.sum()} in all, num_edges "
                         f"{len(num_edges)}, {num_edges.sum()} in all; edge_index has {len(src)} columns, x {len(x)} rows, e {len(e)}, "
                         f"y {len(y)}: they do not fit, or a graph has no node")
    limit = np.repeat(num_nodes, num_edges)
    bad = np.flatnonzero((np.minimum(src, dst) < 0) | (np.maximum(src, dst) >= limit))
    if len(bad):
        raise StoreError(f"edge {bad[0]} goes from node {src[bad[0]]} to node {dst[bad[0]]}: node ids lie in "
                         f"[0, {limit[bad[0]]}) in its graph")
    shift, total = np.repeat(first, num_edges), int(num_nodes.sum())
    order = np.argsort((dst + shift) * total + src, kind="stable")
    indptr = np.zeros(total + 1, np.int32)
    np.cumsum(np.bincount(dst + shift, minlength=total), out=indptr[1:])
    return GraphBatch(torch.from_numpy(indptr), torch.from_numpy((src + shift)[order].astype(np.int32)),
                      torch.from_numpy(np.repeat(np.arange(len(num_nodes)), num_nodes)), torch.as_tensor(x),
                      torch.as_tensor(e)[torch.from_numpy(order)], torch.as_tensor(y))


def build_graphs(path, batches, *, split=None, source="", progress=False) -> Path:
    """Write many small graphs to disk as a `GraphDataset`; complete, or not there at all.

    Args:
        path: directory to create; its parents are created as well.
        batches: iterable of GraphBatch, read once; the first one fixes the widths and dtypes of x, e and y.
        split: dict with graph numbers for "train", "valid" and "test", disjoint; each may be missing.
        source: where the graphs come from, kept in meta.json: a string or a dict of JSON values.
        progress: show a bar where stderr is a terminal.

    Returns:
        The path of the data set.

    Raises:
        StoreError: for input that makes no sense, a target that exists, a full disk. Nothing is left behind.
    """
    path, batches = Path(path), iter(batches)
    first = next(batches, None)
    if first is None:
        raise StoreError("batches is empty: at least one batch of graphs is needed")
    parts = {"node": first.x, "edge": first.e, "target": first.y}
    meta = {"format": GRAPHS_FORMAT, "format_version": VERSION, "source": json.loads(json.dumps(source))}
    for name, rows in parts.items():
        dtype = str(rows.dtype).removeprefix("torch.")
        if rows.ndim != 2 or dtype not in DTYPES:
            raise StoreError(f"{name} rows are {list(rows.shape)} {dtype}: two dimensions of one of "
                             f"{', '.join(DTYPES)} are needed")
        meta.update({f"{name}_dim": rows.shape[1], f"{name}_dtype": dtype})
    with _complete_or_not_there(path, first.x.numel() * first.x.itemsize) as building:
        graphs = GraphDataset(building, dict(meta, files={}), sync=False)
        with tqdm(desc="graphs", unit="graph", unit_scale=True, disable=None if progress else True) as bar, \
                contextlib.closing(graphs.file):
            for batch in itertools.chain([first], batches):
                graphs.file.append(graphs._values(batch))
                bar.update(len(batch.y))
            count = len(graphs)
        files = {"graphs.lmdb": {"dtype": "bytes", "shape": [], "bytes": (building / "graphs.lmdb").stat().st_size}}
        for name, ids in _check_split(split or {}, np.zeros(count, np.int64), "graph").items():
            files[f"{name}.npy"] = _write_npy(building / f"{name}.npy", "int64", [len(ids)], [ids])
        (building / "meta.json").write_bytes(_dump_meta(dict(meta, files=files)))
    return path


class GraphDataset:
    """Many small graphs in one LMDB file, a graph a value, read at random and appended to.

    Attributes:
        split: dict of int64 graph numbers for "train", "valid" and "test".
        node_dim, edge_dim, target_dim: F, D, T. node_dtype, edge_dtype, target_dtype: torch dtypes.
        path: the directory. meta: the contents of meta.json.
    """

    def __init__(self, path, meta, sync=True):
        self.path, self.meta, self.file = Path(path), meta, _Lmdb(Path(path) / "graphs.lmdb", sync)
        self.node_dim, self.edge_dim, self.target_dim = (meta[f"{name}_dim"] for name in ("node", "edge", "target"))
        self.node_dtype, self.edge_dtype, self.target_dtype = (
            getattr(torch, meta[f"{name}_dtype"]) for name in ("node", "edge", "target"))
        files = meta["files"]
        self.split = {name: _map_npy(path, f"{name}.npy", files[f"{name}.npy"]) for name in SPLITS if files}

    @classmethod
    def open(cls, path) -> GraphDataset:
        """Open a data set after checking its meta.json and the size and header of every file.

        Args:
            path: directory that `build_graphs` made.

        Raises:
            StoreError: if it is none, of another format version, incomplete or damaged.
        """
        meta = _read_meta(path, GRAPHS_FORMAT)
        _check_file(path, "graphs.lmdb", meta["files"]["graphs.lmdb"])
        return cls(path, meta)

    def __len__(self):
        with self.file.transaction() as txn:
            return txn.stat()["entries"]

    def append(self, batch):
        """Add the graphs of a batch behind the last one: all of them or none, after a crash as well.

        Args:
            batch: GraphBatch with the widths and dtypes of this data set.

        Raises:
            StoreError: for another width or dtype, an edge between two graphs, NaN or infinity, a full disk.
        """
        values = self._values(batch)
        with _nothing_changed(self.file.path):
            self.file.append(values)

    def batch(self, ids) -> GraphBatch:
        """Read graphs, in the order given, as one block-diagonal graph.

        Args:
            ids: int [G] numbers of graphs, repeats allowed.

        Returns:
            GraphBatch.

        Raises:
            IndexError: for a number that is no graph.
            StoreError: for a graph whose bytes differ from their checksum.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if ids and min(ids) < 0:
            raise IndexError(f"graph {min(ids)} is out of range: numbers start at 0")
        with self.file.transaction() as txn:
            values = [txn.get(_key(i)) for i in ids]
            if None in values:
                raise IndexError(f"graph {ids[values.index(None)]} is out of range: there are {txn.stat()['entries']}")
            return self._joined(ids, values)

    def verify(self):
        """Raise StoreError for the first graph whose bytes differ from their checksum or make no graph."""
        count = len(self)
        for first in range(0, count, 1024):
            self._values(self.batch(range(first, min(first + 1024, count))))

    def _values(self, batch) -> list[bytes]:
        """The LMDB value of every graph of a batch: header, then indptr, indices, x, e, y of that graph alone."""
        for name, rows in (("node", batch.x), ("edge", batch.e), ("target", batch.y)):
            want, dtype = self.meta[f"{name}_dim"], self.meta[f"{name}_dtype"]
            if rows.ndim != 2 or rows.shape[1] != want or rows.dtype != getattr(torch, dtype):
                raise StoreError(f"{name} rows are {list(rows.shape)} {rows.dtype}: [., {want}] {dtype} is needed")
            _check_finite(f"{name} rows", rows)
        indptr, indices, graph_ids = (t.numpy().astype(np.int64) for t in batch[:3])
        nodes = np.bincount(graph_ids, minlength=len(batch.y))
        lengths = (len(indptr) - 1, len(graph_ids), len(batch.x), len(indices), int(indptr[-1]), len(batch.e))
        if len(nodes) != len(batch.y) or len({*lengths[:3]}) > 1 or len({*lengths[3:]}) > 1 or not nodes.all():
            what = "{} nodes in indptr, {} in graph_ids, {} in x, {} edges in indices, {} in indptr, {} in e"
            raise StoreError(f"a batch has {what.format(*lengths)}, {len(nodes)} graphs in graph_ids, {len(batch.y)} "
                             "in y: they do not fit, or a graph has no node")
        last = np.cumsum(nodes)
        first = last - nodes
        edges = indptr[last] - indptr[first]
        start, limit = np.repeat(first, edges), np.repeat(nodes, edges)
        local = indices - start
        if (np.diff(graph_ids) < 0).any() or (np.diff(indptr) < 0).any() or ((local < 0) | (local >= limit)).any():
            raise StoreError("a batch has graph_ids or an indptr that falls, or an edge between two graphs: graphs "
                             "stand one after the other, each with edges of its own")
        counts = np.empty(len(indptr) - 1 + len(nodes), np.int32)  # indptr of each graph alone, from 0
        counts[first + np.arange(len(nodes))] = 0
        counts[np.arange(len(indptr) - 1) + graph_ids + 1] = indptr[1:] - np.repeat(indptr[first], nodes)
        parts = [(counts, nodes + 1), (local.astype(np.int32), edges), (_as_numpy(batch.x), nodes),
                 (_as_numpy(batch.e), edges), (_as_numpy(batch.y), np.ones_like(nodes))]
        views, cuts = [], []
        for array, rows in parts:
            array = np.ascontiguousarray(array)
            views.append(memoryview(array.tobytes()))
            cuts.append([0, *np.cumsum(rows * (array.nbytes // max(len(array), 1))).tolist()])
        values = []
        for i, (n, m) in enumerate(zip(nodes.tolist(), edges.tolist())):
            data = b"".join([view[cut[i]:cut[i + 1]] for view, cut in zip(views, cuts)])
            values.append(struct.pack("<4sIII", b"RBG1", n, m, zlib.crc32(data)) + data)
        return values

    def _joined(self, ids, values) -> GraphBatch:
        """Values side by side: each field of all graphs is joined as bytes, so that no graph costs a torch call."""
        size = GRAPH_HEADER.itemsize
        heads = np.frombuffer(b"".join([value[:size] for value in values]).ljust(size * len(values)), GRAPH_HEADER)
        nodes, edges = heads["nodes"].astype(np.int64), heads["edges"].astype(np.int64)
        widths = (4, 4, self.node_dim * self.node_dtype.itemsize, self.edge_dim * self.edge_dtype.itemsize,
                  self.target_dim * self.target_dtype.itemsize)
        ends = size + np.cumsum([(nodes + 1) * 4, edges * 4, nodes * widths[2], edges * widths[3],
                                 np.full_like(nodes, widths[4])], 0)
        fine = (ends[-1] == [len(value) for value in values]) & (heads["magic"] == b"RBG1")
        fine &= heads["crc"] == [zlib.crc32(value[size:]) for value in values]
        if not fine.all():
            raise StoreError(f"{self.file.path}: graph {ids[int(fine.argmin())]} differs from its checksum; rebuild it")
        starts = np.concatenate([np.full_like(ends[:1], size + 4), ends[:-1]]).tolist()  # without each indptr's 0
        indptr, indices, x, e, y = (
            bytearray().join([value[a:b] for value, a, b in zip(values, first, last)])
            for first, last in zip(starts, ends.tolist()))

        def tensor(data, dtype, rows, width):
            return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).view(int(rows), width)

        indptr, indices = (np.frombuffer(data, "<i4") for data in (indptr, indices))
        indptr = np.concatenate([[0], indptr + np.repeat(np.cumsum(edges) - edges, nodes)]).astype(np.int32)
        indices = (indices + np.repeat(np.cumsum(nodes) - nodes, edges)).astype(np.int32)
        graph_ids = torch.from_numpy(np.repeat(np.arange(len(nodes)), nodes))
        return GraphBatch(torch.from_numpy(indptr), torch.from_numpy(indices), graph_ids,
                          tensor(x, self.node_dtype, nodes.sum(), self.node_dim),
                          tensor(e, self.edge_dtype, edges.sum(), self.edge_dim),
                          tensor(y, self.target_dtype, len(values), self.target_dim))


# ---------------------------------------------------------------------------------------------------------------------
# what fits where


class Placement(NamedTuple):
    """Bytes that a mode takes: what stays for the whole run, and what a batch adds at most."""

    gpu: int  # of each GPU, stays
    gpu_step: int
    rank: int  # host memory of each process, stays
    rank_step: int
    shared: int  # host memory, one copy for all processes of the machine


def _placements(store, fanout, batch_size, hidden, prefetch) -> dict[str, Placement]:
    """The Placement of every mode.

    A batch of S seeds and fanout k1,k2,... has at most n1 = S (k1 + 1), n2 = n1 (k2 + 1), ... nodes after each hop
    and n1 k2, ... edges; no hop has more than V nodes or M edges, and k = -1 counts as all of them. Input rows, nodes
    and edges are held for `prefetch` + 1 batches. A GraphSAGE layer keeps (in + 3 out) floats for each of its
    destinations and as many for the gradients: the mean, and the result before and after ReLU and dropout.
    """
    V, M, F = store.num_nodes, store.num_edges, store.feature_dim
    id_bytes, row_bytes = store.indices.element_size(), F * store.features.dtype.itemsize
    nodes, edges = [min(batch_size, V)], []
    for k in fanout:
        edges.append(M if k < 0 else min(nodes[-1] * k, M))
        nodes.append(V if k < 0 else min(nodes[-1] * (k + 1), V))
    widths = [F] + [hidden] * (len(fanout) - 1) + [store.num_classes]
    layers = list(zip(nodes[-2::-1], widths, widths[1:]))  # outermost first
    compute = sum(8 * n * (a + 3 * b) + 32 * a * b for n, a, b in layers)  # and weights, gradients, Adam's two moments
    ahead = prefetch + 1
    batch = nodes[-1] * row_bytes + id_bytes * (2 * sum(nodes) + sum(edges))
    arrays = 8 * (2 * V + 1) + id_bytes * M + row_bytes * V
    step = ahead * batch + compute
    return {"cuda-cuda": Placement(GPU_BYTES + arrays + id_bytes * V, step, RANK_BYTES, 0, 0),
            "pinned-cuda": Placement(GPU_BYTES + id_bytes * V, step, RANK_BYTES, 0, arrays),
            "cpu-cuda": Placement(GPU_BYTES, step, RANK_BYTES, 2 * ahead * batch, 0),  # pinning rounds up
            "cpu-cpu": Placement(0, 0, RANK_BYTES, step, 0)}


def estimate(store, gpus=0, *, procs=1, fanout=(15, 10, 5), batch_size=1024, hidden=256, prefetch=2, free_gpu=None,
             free_host=None) -> dict:
    """Say what training on a store takes in each mode and what fits.

    Args:
        store: GraphStore or the path of one.
        gpus: GPUs of this machine, a process each; with 0, `procs` processes train on CPU.
        fanout: one number for each layer, from the seeds outward.
        batch_size: seeds of a process. hidden: width of the inner layers. prefetch: batches prepared ahead.
        free_gpu: free bytes of the fullest GPU; asked of the current one when None.
        free_host: free bytes of host memory; asked of the system when None.

    Returns:
        dict: "modes" {mode: dict of `Placement` and "possible" (what stays fits), "fits" (a batch as well),
        "largest_batch" (that fits; up to all training nodes)}, "sums" {mode: what it takes of what is free, a line},
        "mode" (the first that fits, else the most modest that is possible, else None), "backend" and "backend_why".

    Raises:
        StoreError: if there is no store.
    """
    store = store if isinstance(store, GraphStore) else GraphStore.open(store)
    if free_gpu is None and torch.cuda.is_available():
        free_gpu = torch.cuda.mem_get_info()[0]
    free_host = _free_host() if free_host is None else free_host
    ranks, choices = gpus or procs, MODES[:3] if gpus else MODES[3:]

    def fits(mode, batch_size):
        p = _placements(store, fanout, batch_size, hidden, prefetch)[mode]
        step = batch_size > 0
        return (p.gpu + step * p.gpu_step <= (free_gpu or 0)
                and ranks * (p.rank + step * p.rank_step) + p.shared <= free_host)

    modes = {}
    for mode, placement in _placements(store, fanout, batch_size, hidden, prefetch).items():
        sizes = range(1, len(store.split["train"]) + 1)
        largest = bisect.bisect_left(sizes, True, key=lambda n: not fits(mode, n))
        modes[mode] = dict(placement._asdict(), possible=fits(mode, 0), fits=fits(mode, batch_size),
                           largest_batch=largest)
    mode = next((m for m in choices if modes[m]["fits"]), None)
    mode = mode or next((m for m in reversed(choices) if modes[m]["possible"]), None)
    arrays = modes["pinned-cuda"]["shared"]
    in_memory = arrays <= free_host
    why = (f"graph and features take {_size(arrays)} and {_size(free_host)} of host memory are free: "
           + ("the mapped file stays in it" if in_memory else "LMDB reads the blocks asked for and nothing ahead"))
    sums = {m: _sum(m, placement, ranks, free_gpu, free_host) for m, placement in modes.items()}
    return {"modes": modes, "sums": sums, "mode": mode, "backend": "mmap" if in_memory else "lmdb", "backend_why": why}


def choose_mode(store, gpus=0, mode="auto", **options) -> tuple[str, str]:
    """Choose where graph and features live, or check a choice, before anything is loaded.

    Args:
        store, gpus, options: see `estimate`.
        mode: "auto" or one of MODES.

    Returns:
        (mode, the sum that was done, in one line).

    Raises:
        StoreError: for a mode that cannot work: what stays in memory for the whole run is more than there is. (A batch
            that may not fit is only said in the line: its size is an upper bound.)
    """
    found = estimate(store, gpus, **options)
    chosen = mode if mode != "auto" else found["mode"] or ("cpu-cuda" if gpus else "cpu-cpu")
    line, placement = f"mode {chosen}: {found['sums'][chosen]}", found["modes"][chosen]
    if not placement["possible"]:
        other = f"; mode {found['mode']} can" if found["mode"] else ""
        raise StoreError(f"{line}: this cannot work here{other}")
    if not placement["fits"]:
        line += f"; a batch may be too large, {placement['largest_batch']:,} seeds surely are not"
    return chosen, line


def _sum(mode, p, ranks, free_gpu, free_host) -> str:
    """What a mode takes of what is free, with its terms; p is its entry of `estimate`."""
    shared = f" + {_size(p['shared'])} shared" if p["shared"] else ""
    host = (f"host {ranks} x ({_size(p['rank'])} + {_size(p['rank_step'])} for batches){shared} = "
            f"{_size(ranks * (p['rank'] + p['rank_step']) + p['shared'])} of {_size(free_host)} free")
    if mode == "cpu-cpu":
        return host
    free = "(no GPU here)" if free_gpu is None else f"of {_size(free_gpu)} free"
    return (f"each GPU {_size(p['gpu'])} + {_size(p['gpu_step'])} for batches = {_size(p['gpu'] + p['gpu_step'])} {free}, "
            + host)


def _free_host(root="/") -> int:
    """Bytes of host memory that this process may still take: what is available, or what its cgroups leave if less."""
    root = Path(root)
    try:
        free = int((root / "proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
        groups = [line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for controller, path in groups:
        if controller not in ("", "memory"):
            continue
        v1 = controller == "memory"
        limit, usage = (f"memory.{n}" for n in (("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current")))
        base = root / "sys/fs/cgroup" / controller
        for folder in [base / path.strip("/"), *(base / path.strip("/")).parents]:
            try:
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # given up on demand
                free = min(free, int((folder / limit).read_text()) - int((folder / usage).read_text()) + cache)
            except (OSError, ValueError):
                pass  # no such group here, or no limit ("max")
            if folder == base:
                break
    return max(free, 0)


# ---------------------------------------------------------------------------------------------------------------------
# verifying, and the command line


def verify(path) -> list[str]:
    """Read a whole store, or a `GraphDataset`, and compare it with its checksums and with what a graph has to be.

    Args:
        path: directory of the store; nothing may be writing to it meanwhile.

    Returns:
        A sentence per problem, starting with the name of the file and a colon; empty when all is well.

    Raises:
        StoreError: if there is no store.
    """
    path, problems = Path(path), []
    try:
        meta = _read_meta(path, None)
    except StoreError as error:
        if not (path / "meta.json").exists():
            raise
        return [f"meta.json: {error}"]
    for name, record in meta["files"].items():
        try:
            _check_file(path, name, record)
            digest = record.get("sha256") and _digest(path / name).hexdigest()
            if digest != record.get("sha256"):
                problems.append(f"{name}: its sha256 is {digest[:16]}..., meta.json has {record['sha256'][:16]}...")
            elif digest is None:
                problems += [f"{name}: {problem}" for problem in _lmdb_problems(path / name)[:1]]
        except (StoreError, OSError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        return problems  # what differs from its checksum is not worth interpreting
    try:
        graph = (GraphStore if meta["format"] == FORMAT else GraphDataset).open(path)
    except StoreError as error:
        return [f"meta.json: {error}"]
    for name in meta["files"]:
        if name.endswith(".lmdb"):
            try:
                getattr(graph, "features", graph).verify()
            except StoreError as error:
                return [f"{name}: {error}"]
    if isinstance(graph, GraphDataset):
        labels, what = np.zeros(len(graph), np.int64), "graph"
    else:
        labels, what = graph.labels.numpy(), "node"
        if (graph.indptr.diff() < 0).any():
            problems.append("indptr.npy: it decreases")
        try:
            for _ in _checked_indices(graph.indices.numpy(), graph.num_nodes, False):
                pass
        except StoreError as error:
            problems.append(f"indices.npy: {error}")
    try:
        if what == "node":
            _check_labels(labels, graph.num_nodes, graph.num_classes)
        _check_split({name: ids.numpy() for name, ids in graph.split.items()}, labels, what)
    except StoreError as error:
        name = next((name for name in SPLITS if repr(name) in str(error)), "labels")
        problems.append(f"{name}.npy: {error}")
    return problems


def _size(count) -> str:
    power = min(4, max(0, len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def _info(path) -> str:
    meta = _read_meta(path, None)
    if meta["format"] == GRAPHS_FORMAT:
        graphs = GraphDataset.open(path)
        lines = [("graphs", f"{len(graphs):,}")]
        lines += [(part, f"{meta[f'{part}_dim']} x {meta[f'{part}_dtype']}") for part in ("node", "edge", "target")]
    else:
        graphs = GraphStore.open(path)
        degrees = np.diff(graphs.indptr.numpy())
        lines = [("nodes", f"{graphs.num_nodes:,}"), ("edges", f"{graphs.num_edges:,}"),
                 ("in-degree", f"min {degrees.min()}, mean {degrees.mean():.2f}, max {degrees.max():,}"),
                 ("features", f"{graphs.feature_dim} x {meta['feature_dtype']}, backend {meta['backend']}"),
                 ("classes", f"{graphs.num_classes}"),
                 ("options", ", ".join(name for name, on in meta["options"].items() if on) or "none")]
    lines += [("split", ", ".join(f"{name} {len(ids):,}" for name, ids in graphs.split.items())),
              ("source", meta.get("source") or "unknown"), ("format", meta["format_version"])]
    lines += [(name, _size(record["bytes"])) for name, record in sorted(meta["files"].items())]
    return "\n".join(f"{name:<14} {value}" for name, value in lines)


def _estimate_lines(graph, options) -> str:
    found = estimate(graph, **options)
    disk = {name: record["bytes"] for name, record in graph.meta["files"].items()}
    features = disk.pop(BACKENDS[graph.meta["backend"]])
    lines = [("on disk", f"graph {_size(sum(disk.values()))}, features {_size(features)}")]
    for mode, placement in found["modes"].items():
        lines.append((mode, f"{found['sums'][mode]}; batches of up to {placement['largest_batch']:,} seeds fit"))
    lines.append(("mode", found["mode"] or "none fits (--free-gpu GB asks about another machine's GPUs)"))
    lines.append(("features", f"{found['backend']}: {found['backend_why']}"))
    return "\n".join(f"{name:<14} {value}" for name, value in lines)


def _fanout(text) -> list[int]:
    fanout = [int(k) for k in text.split(",")]
    if any(k == 0 or k < -1 for k in fanout):
        raise ValueError
    return fanout


def _build_from(source, args):
    """Build from a file; how files are read is what datasets.py is for."""
    sys.modules.setdefault("store", sys.modules[__name__])  # so that its StoreError is the one caught below
    try:
        import datasets
    except ImportError as error:
        raise StoreError("build reads files with datasets.py, which is not beside this store.py") from error
    split = {name: getattr(args, name) for name in SPLITS if getattr(args, name)}
    datasets.build(source, args.path, features=args.features, labels=args.labels, split=split, seed=args.seed,
                   backend=args.backend, symmetrize=args.symmetrize, drop_self_loops=args.drop_self_loops,
                   drop_duplicates=args.drop_duplicates, progress=True)


def main(argv=None) -> int:
    """The command line; returns the exit code (0 fine, 1 damaged, 2 no store)."""
    parser = argparse.ArgumentParser(prog="store.py", description="Build a graph store, or look at one.")
    parser.add_argument("command", choices=["build", "info", "verify", "estimate"])
    parser.add_argument("path", nargs="+", help="directory of the store; for build, its SOURCE before it")
    group = parser.add_argument_group("build", "SOURCE is an .npz file or the .csv or .csv.gz file of the edges")
    group.add_argument("--features", metavar="FILE", help="csv: a line of numbers for each node")
    group.add_argument("--labels", metavar="FILE", help="csv: a label for each node, -1 where there is none")
    for name in SPLITS:
        group.add_argument(f"--{name}", metavar="FILE", help=f"csv: ids of the {name} nodes")
    group.add_argument("--backend", default="mmap", choices=list(BACKENDS), help="of the features (default mmap)")
    group.add_argument("--symmetrize", action="store_true", help="add the reverse of every edge")
    group.add_argument("--drop-self-loops", action="store_true", help="leave out edges from a node to itself")
    group.add_argument("--drop-duplicates", action="store_true", help="keep one of several equal edges")
    group.add_argument("--seed", type=int, default=0, help="draws the split where there is none (default 0)")
    group = parser.add_argument_group("estimate")
    group.add_argument("--gpus", type=int, default=0, help="GPUs, a process each; 0: CPU (default 0)")
    group.add_argument("--procs", type=int, default=1, help="processes on CPU (default 1)")
    group.add_argument("--fanout", type=_fanout, default=[15, 10, 5], help="from the seeds outward (default 15,10,5)")
    group.add_argument("--batch-size", type=int, default=1024, help="seeds of a process (default 1024)")
    group.add_argument("--hidden", type=int, default=256, help="width of the inner layers (default 256)")
    group.add_argument("--free-gpu", type=float, metavar="GB", help="to ask about another machine's GPUs")
    args = parser.parse_args(argv)
    if len(args.path) != (2 if args.command == "build" else 1):
        parser.error("build takes a SOURCE and a PATH, every other command one PATH")
    *source, args.path = args.path
    try:
        if args.command == "build":
            _build_from(*source, args)
        if args.command in ("build", "info"):
            print(_info(args.path))
            return 0
        if args.command == "estimate":
            names = ("gpus", "procs", "fanout", "batch_size", "hidden")
            options = {name: getattr(args, name) for name in names}
            options["free_gpu"] = args.free_gpu and int(args.free_gpu * 1e9)
            print(_estimate_lines(GraphStore.open(args.path), options))
            return 0
        problems = verify(args.path)
    except StoreError as error:
        print(f"store.py: {error}", file=sys.stderr)
        return 2
    names = {problem.partition(":")[0] for problem in problems} | {file.name for file in Path(args.path).iterdir()}
    names = {name for name in names if not name.endswith("-lock")}  # LMDB's own, of the processes at work
    for name in sorted(names):
        bad = [problem for problem in problems if problem.startswith(f"{name}:")]
        print(f"BAD {bad[0]}" if bad else f"OK  {name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
