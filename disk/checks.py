"""What may become a store: the arrays of a graph are checked before any file is written.

A value that makes no sense is a StoreError that names the argument, the value and what would have worked. This file
needs disk/files.py, disk/sort.py, numpy and torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from disk.files import (
    MAX_SPLITS,
    ROW_BYTES,
    SPLITS,
    StoreError,
    array_like,
    check_finite,
    integers,
    largest_of,
    readable_size,
    row_dtype,
    storage_dtype,
)
from disk.sort import chunked

MAX_CLASSES = 1 << 24  # the logits of a batch of 1,024 are 64 GiB then


def check_features(features) -> tuple[int, int, str]:
    """(V, F, dtype name) of the features."""
    shape = tuple(getattr(features, "shape", ()))
    if len(shape) != 2 or 0 in shape:
        raise StoreError(
            f"features has shape {list(shape)}: [V, F] with at least one node and one column is needed"
        )
    return int(shape[0]), int(shape[1]), row_dtype("features", features)


def check_labels(labels, num_nodes, num_classes=None) -> tuple[np.ndarray, int]:
    """Labels as int64 [V], or int8 [V, C] of 0 and 1, and C, which is counted when None; StoreError for what cannot be
    meant. Of None, -1 for all nodes."""
    if labels is None:
        return np.full(num_nodes, -1), num_classes or 1
    if "float" in (dtype := str(getattr(labels, "dtype", ""))):
        raise StoreError(
            f"labels has dtype {dtype.removeprefix('torch.')}: integers are needed, the class of each node; node "
            "regression is not supported"
        )
    labels = integers("labels", labels)
    if labels.shape[:1] != (num_nodes,) or labels.ndim > 2:
        raise StoreError(
            f"labels has shape {list(labels.shape)}: [{num_nodes}] is needed, a label per row of features, or "
            f"[{num_nodes}, C] of 0 and 1"
        )
    if labels.ndim == 2:
        return _check_rows_of_labels(labels, num_classes)
    largest = int(labels.max())
    if largest == -1:
        raise StoreError(
            f"labels: none of the {num_nodes} nodes has a label, all are -1: there is nothing to learn"
        )
    if num_classes is None:
        num_classes = max(largest + 1, 1)
        present = len(np.unique(labels[labels >= 0])) if num_classes > 1000 else 1
        if num_classes > 1000 + 10 * present:
            raise StoreError(
                f"labels run up to {largest:,} and {present:,} different ones occur: {num_classes:,} classes "
                f"make a last layer of {num_classes:,} x 128 (--hidden) x 4 bytes, "
                f"{readable_size(num_classes * 512)}; number them from 0 with numpy.unique(labels, "
                "return_inverse=True)"
            )
    if not 1 <= num_classes <= MAX_CLASSES:
        raise StoreError(f"num_classes is {num_classes}: from 1 to {MAX_CLASSES:,} are possible")
    bad = np.flatnonzero((labels < -1) | (labels >= num_classes))
    if len(bad):
        raise StoreError(
            f"labels[{bad[0]}] is {labels[bad[0]]}: labels lie in [0, {num_classes}), or are -1 where "
            "there is none"
        )
    return labels, num_classes


def _check_rows_of_labels(labels, num_classes):
    """Several labels a node: int8 [V, C] of 0 and 1, or a row of -1, and C."""
    if not 2 <= labels.shape[1] <= MAX_CLASSES or num_classes not in (None, labels.shape[1]):
        raise StoreError(
            f"labels has shape {list(labels.shape)}: several labels a node are [V, C] with C from 2 to "
            f"{MAX_CLASSES:,}{'' if num_classes is None else f', and num_classes is {num_classes}'}"
        )
    known = (labels != -1).any(1)
    if not known.any():
        raise StoreError(
            f"labels: none of the {len(labels)} nodes has labels, all are -1: there is nothing to learn"
        )
    bad = np.argwhere(known[:, None] & (labels != 0) & (labels != 1))
    if len(bad):
        row, column = bad[0]
        raise StoreError(
            f"labels[{row}, {column}] is {labels[row, column]}: of several labels a node each is 0 or 1, or a "
            "whole row is -1 where there are none"
        )
    return labels.astype(np.int8), labels.shape[1]


def check_graph(edge_index, indptr, indices, num_nodes):
    """(edge_index, indptr, indices, M): one of the two forms, with its shapes and its indptr checked."""
    if (edge_index is None) == (indptr is None) or (indptr is None) != (indices is None):
        raise StoreError(
            "the graph is given either as edge_index or as indptr and indices, and as one of them only"
        )
    if num_nodes > 1 << 32:
        raise StoreError(f"features has {num_nodes} rows: a store holds at most 2^32 nodes")
    if edge_index is not None:
        edge_index = array_like("edge_index", edge_index)
        if len(edge_index.shape) != 2 or edge_index.shape[0] != 2:
            raise StoreError(
                f"edge_index has shape {list(edge_index.shape)}: [2, M] is needed, sources over "
                "destinations"
            )
        return edge_index, None, None, int(edge_index.shape[1])
    indptr = integers("indptr", indptr)
    indices = array_like("indices", indices)
    if indptr.shape != (num_nodes + 1,) or len(indices.shape) != 1:
        raise StoreError(
            f"indptr has shape {list(indptr.shape)} and indices {list(indices.shape)}: "
            f"[{num_nodes + 1}] and [M] are needed, with {num_nodes} rows of features"
        )
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        v = falls[0]
        raise StoreError(
            f"indptr falls from {indptr[v]} to {indptr[v + 1]} at node {v}: it must not decrease"
        )
    if indptr[0] != 0 or indptr[-1] != indices.shape[0]:
        raise StoreError(
            f"indptr runs from {indptr[0]} to {indptr[-1]}: it must run from 0 to the "
            f"{indices.shape[0]} edges of indices"
        )
    return None, indptr, indices, int(indices.shape[0])


def feature_rows(features, dtype, progress, largest) -> Iterator[np.ndarray]:
    """Chunks of rows as they are stored, each checked for NaN and infinity; `largest` is given the largest number of
    each."""
    width = features.shape[1]
    rows = max(1, ROW_BYTES // (width * storage_dtype(dtype).itemsize))
    for first, chunk in chunked(features, rows, "features", progress):
        if not isinstance(chunk, Tensor):
            chunk = torch.from_numpy(
                np.require(chunk, np.asarray(chunk).dtype.newbyteorder("="), "CW")
            )
        chunk = chunk.to(torch.uint8) if chunk.dtype == torch.bool else chunk
        if chunk.dtype != getattr(torch, dtype) or chunk.shape[1:] != (width,):
            raise StoreError(
                f"features came with rows of {list(chunk.shape[1:])} {chunk.dtype}, [{width}] {dtype} "
                "was announced"
            )
        check_finite("features", chunk, first)
        largest.append(largest_of(chunk))
        yield (chunk.view(torch.int16) if dtype == "bfloat16" else chunk).detach().cpu().numpy()


def _ids(name, values, labels, what) -> np.ndarray:
    """A part of a split as int64 ids; it may be a mask of booleans."""
    values = array_like(f"split {name!r}", values)
    if values.dtype not in (np.bool_, torch.bool):
        return integers(f"split {name!r}", values)
    if tuple(values.shape) != labels.shape:
        raise StoreError(
            f"split {name!r} is a mask of shape {list(values.shape)}: one of [{len(labels)}], or {what} ids, are needed"
        )
    return np.flatnonzero(values)


def check_splits(splits, labels) -> dict[str, np.ndarray]:
    """A split of nodes as int64 ids [n] for each of SPLITS, or a list of K of them as [K, n], rows filled up by -1."""
    known = labels if labels.ndim == 1 else labels.min(1)
    if isinstance(splits, dict):
        return check_split(splits, known)
    if not 1 <= len(splits) <= MAX_SPLITS:
        raise StoreError(f"split is a list of {len(splits)}: from 1 to {MAX_SPLITS} are possible")
    checked = []
    for number, split in enumerate(splits):
        try:
            checked.append(check_split(split, known))
        except StoreError as error:
            raise StoreError(f"of {len(splits)} splits, number {number}: {error}") from error
    rows = {}
    for name in SPLITS:
        rows[name] = np.full((len(checked), max(len(split[name]) for split in checked)), -1)
        for row, split in zip(rows[name], checked):
            row[: len(split[name])] = split[name]
    return rows


def row_of_split(ids, number):
    """The ids of split `number` out of [K, n], or out of [n] where there is one -> int64 [n]."""
    return ids if ids.ndim == 1 else ids[number][ids[number] >= 0]


def check_split(split, labels, what="node") -> dict[str, np.ndarray]:
    """Ids (or masks) as int64 ids for each of SPLITS: disjoint, in range, labelled; of nodes, some are for training."""
    unknown = set(split) - set(SPLITS)
    if unknown:
        raise StoreError(f"split has a part {min(unknown)!r}: its parts are {', '.join(SPLITS)}")
    split = {name: _ids(name, split.get(name, ()), labels, what) for name in SPLITS}
    owner = np.full(len(labels), -1, np.int8)
    for part, (name, ids) in enumerate(split.items()):
        if ids.ndim != 1:
            raise StoreError(f"split {name!r} has shape {list(ids.shape)}: one dimension is needed")
        bad = np.flatnonzero((ids < 0) | (ids >= len(labels)))
        if len(bad):
            raise StoreError(
                f"split {name!r} holds {what} {ids[bad[0]]}: {what} ids lie in [0, {len(labels)})"
            )
        bad = np.flatnonzero(owner[ids] >= 0)
        if len(bad):
            raise StoreError(
                f"{what} {ids[bad[0]]} is in split {SPLITS[owner[ids[bad[0]]]]!r} and in {name!r}: "
                "the parts must not overlap"
            )
        owner[ids] = part
        if np.count_nonzero(owner == part) != len(ids):
            values, counts = np.unique(ids, return_counts=True)
            raise StoreError(f"split {name!r} holds {what} {values[counts > 1][0]} more than once")
        bad = np.flatnonzero(labels[ids] < 0)
        if len(bad):
            raise StoreError(f"split {name!r} holds {what} {ids[bad[0]]}, which has no label (-1)")
    if what == "node" and not len(split["train"]) and (labels >= 0).any():
        raise StoreError("split 'train' is empty: at least one node is needed")
    return split
