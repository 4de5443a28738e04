"""Names of nodes, the lines of nodes.txt: node i is called what line i + 1 says; and of the columns of features.

To copy this file, also take disk/ and extras/__init__.py.
"""

import numpy as np
import torch

from disk.columns import NAMES, check_names
from disk.convert import RowsByIndex
from disk.files import StoreError, check_size, file_record, reading


def check(what, names, num_nodes):
    """Raise StoreError unless there are V different names of one line each. what: they are, for messages."""
    for node, name in enumerate(check_names(what, names, num_nodes)):
        if "\n" in name or "\r" in name or name != name.encode(errors="replace").decode():
            raise StoreError(f"{what}: name {node}, {name!r}, is not one line of text")


def read(path, record):
    """Yield the names of the nodes of the store at `path`, in order; StoreError if the file is damaged. record: its entry
    in meta.json."""
    file = check_size(path, NAMES, record)
    count = 0
    lacks = f"it does not have {record['shape'][0]:,} whole lines"
    with reading(file, "; rebuild the store"):
        with open(file, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    raise ValueError(lacks)
                count += 1
                yield line[:-1]
        if count != record["shape"][0]:
            raise ValueError(lacks)


def find(name, values, names):
    """Look up the nodes that `values` stand for -> int64 array of their shape; see `GraphStore.node_ids`. name: of the values, for
    messages. names: of the nodes, in order, which are read once."""
    if values.dtype.kind == "S":
        with reading(name):
            values = np.char.decode(values, "utf-8")
    if values.size and values.dtype.kind not in "iuU":
        raise StoreError(
            f"{name} has dtype {values.dtype}: names of nodes, text or integers, are needed"
        )
    distinct, which = np.unique(values, return_inverse=True)
    rows = dict.fromkeys(map(str, distinct.tolist()), -1)
    first = []
    for row, node in enumerate(names):
        if node in rows:
            if rows[node] >= 0:
                why = "is of several types: give the type, for pairs --edge-type"
                raise StoreError(f"{name} has node {node!r}, which {why}")
            rows[node] = row
        if row < 3:
            first.append(repr(node))
    ids = np.array([*rows.values()], np.int64)[which].reshape(values.shape)
    if (ids < 0).any():
        unknown = str(values[ids < 0][0])
        raise StoreError(
            f"{name} has node {unknown!r}: names of nodes are such as {', '.join(first)} (nodes.txt)"
        )
    return np.asarray(ids)


def write(path, names) -> dict:
    """Write the names of the nodes, one a line -> the record of the file for meta.json."""
    (path / NAMES).write_bytes("".join(f"{name}\n" for name in names).encode())
    whole = all(type(name) in (int, np.int64) for name in names)
    dtype = "int64" if whole and np.asarray(names).dtype.kind == "i" else "str"
    return file_record(path / NAMES, dtype, [len(names)])


class ReorderedFeatures(RowsByIndex):
    """Feature rows whose columns are read in another order. features: those of a `GraphStore`; order: int64 [F],
    the column of `features` that each column is."""

    def __init__(self, features, order):
        self._features = features
        self._order = order
        self.shape = features.shape
        self.dtype = features.dtype

    def read(self, ids, out):
        return torch.index_select(self._features.gather(ids), 1, self._order, out=out)


def reordered(store, names):
    """Return the features of a store with their columns in the order of `names`, see `GraphStore.take_columns`."""
    if sorted(names) != sorted(store.feature_names or ()):
        have = ", ".join(store.feature_names or ()) or "no names"
        raise StoreError(f"{store.path}: columns {', '.join(names)} are asked for, it has {have}")
    order = torch.tensor([store.feature_names.index(name) for name in names])
    return ReorderedFeatures(store.features, order)
