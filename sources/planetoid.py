"""Cora, Citeseer and Pubmed from their original files, downloaded -> a store.

    build_planetoid("data/cora", "cora", root="data")

The files are pickles: they are read by an unpickler that knows arrays, sparse matrices and dicts of lists, and nothing
that runs code.
"""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path

import numpy as np

from disk.files import StoreError, integers, reading
from sources.ogb import download
from store import build_store

PLANETOID_URL = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
PLANETOID = ("cora", "citeseer", "pubmed")


def build_planetoid(path, name, root, *, backend="mmap", progress=False) -> Path:
    """Build cora, citeseer or pubmed from the eight original files, with the public split (arXiv 1603.08861).

    Args:
        path: directory of the store.
        name: one of PLANETOID.
        root: the files `ind.NAME.*` are looked for here and in root/planetoid, else downloaded into the latter.
        backend, progress: as in `build_store`.
    """
    parts = {}
    for part in ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index"):
        file = Path(root) / f"ind.{name}.{part}"
        if not file.is_file():
            file = Path(root) / "planetoid" / file.name
            url = os.environ.get("RINGBLOCK_PLANETOID_URL", PLANETOID_URL)
            download(f"{url}/{file.name}", file, progress=False)
        parts[part] = (
            np.loadtxt(file, np.int64, ndmin=1) if part == "test.index" else _read_pickle(file)
        )
    # Row i of tx belongs to node test.index[i]. Citeseer lacks some of these: isolated nodes without features or label.
    test, allx, ally, train = (parts["test.index"], parts["allx"], parts["ally"], len(parts["y"]))
    num_nodes = max(len(allx) + len(test), len(parts["graph"]))
    _check_planetoid(name, parts, num_nodes)
    features = np.zeros((num_nodes, allx.shape[1]), np.float32)
    onehot = np.zeros((num_nodes, ally.shape[1]), np.int64)
    features[: len(allx)], onehot[: len(allx)] = allx, ally
    features[test], onehot[test] = parts["tx"], parts["ty"]
    features /= np.maximum(features.sum(1, keepdims=True), 1e-12)
    labels = np.where(onehot.any(1), onehot.argmax(1), -1)
    edges = [(u, v) for v, sources in parts["graph"].items() for u in sources]
    edges = integers(f"ind.{name}.graph", np.array(edges or [(0, 0)])[: len(edges)]).T
    split = dict(
        train=np.arange(train),
        valid=np.arange(train, min(train + 500, len(allx))),
        test=np.sort(test),
    )
    return build_store(
        path,
        edge_index=edges,
        features=features,
        labels=labels,
        num_classes=onehot.shape[1],
        split=split,
        backend=backend,
        symmetrize=True,
        drop_self_loops=True,
        drop_duplicates=True,
        source=dict(dataset=name, row_normalize=1),
        progress=progress,
    )


def _check_planetoid(name, parts, num_nodes):
    """Refuse arrays of Planetoid files whose shapes or values do not fit each other."""
    test, width, classes = parts["test.index"], parts["allx"].shape[1:], parts["ally"].shape[1:]
    for part, rows, columns in (
        ("x", len(parts["y"]), width),
        ("tx", len(test), width),
        ("ally", len(parts["allx"]), classes),
        ("ty", len(test), classes),
    ):
        if parts[part].shape != (rows, *columns) or len(columns) != 1:
            raise StoreError(
                f"ind.{name}.{part} is {list(parts[part].shape)}: {[rows, *columns]} is needed, to fit the other files"
            )
    for part in ("ally", "ty"):
        if not np.isin(parts[part], (0, 1)).all():
            raise StoreError(
                f"ind.{name}.{part} holds values other than 0 and 1: one-hot rows are needed"
            )
    if test.min() < 0 or test.max() >= num_nodes:
        raise StoreError(
            f"ind.{name}.test.index holds {test.min() if test.min() < 0 else test.max()}: its nodes lie in [0, {num_nodes})"
        )


class _Matrix:
    """A pickled scipy.sparse.csr_matrix: its attributes."""

    def dense(self):
        rows, columns = (int(n) for n in getattr(self, "_shape", None) or self.shape)
        dense = np.zeros((rows, columns), np.float32)
        if len(self.indices) and not 0 <= self.indices.min() <= self.indices.max() < columns:
            raise ValueError(f"its matrix has entries outside of columns 0 to {columns - 1}")
        dense[np.repeat(np.arange(rows), np.diff(self.indptr)), self.indices] = self.data
        return dense


def _number(name, *_):
    """A dtype of numpy's own, which no state in the pickle changes."""
    if name not in ("f4", "f8", "i4", "i8"):
        raise ValueError(
            f"it holds an array of type {name!r}, which has no place in a Planetoid file"
        )
    return np.dtype(name)


class _Unpickler(pickle.Unpickler):
    """Reads what the Planetoid files hold and nothing else, by its modules' names in Python 2, in numpy 1 and 2, and in
    older and newer scipy."""

    admitted = {
        "ndarray": np.ndarray,
        "dtype": _number,
        "_reconstruct": np.empty(0).__reduce__()[0],
        "csr_matrix": _Matrix,
        "_reconstructor": lambda *_: _Matrix(),
        "defaultdict": collections.defaultdict,
        "list": list,
        "object": object,
        "encode": lambda text, _: text.encode("latin1"),  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module, name):
        if name not in self.admitted or not module.startswith(
            ("numpy", "scipy.sparse", "copy", "collections", "builtins", "__builtin__", "_codecs")
        ):
            raise ValueError(f"it asks for {module}.{name}, which has no place in a Planetoid file")
        return self.admitted[name]


def _read_pickle(file):
    """A Planetoid file: a dense array, the dense array of a sparse matrix, or a dict of lists."""
    with reading(file), open(file, "rb") as data:
        value = _Unpickler(data, encoding="latin1").load()
        if isinstance(value, np.ndarray):
            return value
        return value.dense() if isinstance(value, _Matrix) else dict(value)
