"""The arrays that a file or a graph object brings, by name: checked where they are taken, and none skipped in silence.

    arrays = Arrays("mine.npz", Npz("mine.npz"), ignore=["edge_weight"])
    y = arrays.labels()                      # int64 [V], -1 where there is none
    x = arrays.features()                    # [V, F], a dense array or the rows of a CSR matrix
    split = arrays.split(len(y))             # ids, masks, or one of several masks -> {"train": ids, ...}
    arrays.close(len(y), num_edges)          # names what was not taken, refuses what would have changed the result

An .npz file is untrusted: a member is read when it is asked for, after its declared shape was compared with its size in
the archive and with the memory that is free.

Letters: V nodes and M edges of the graph, F feature width, K splits. This file needs store.py and what that needs.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import os
import re
import zipfile
from collections.abc import Mapping

import numpy as np
import torch

from csc import Rows
from disk import SPLITS, StoreError, integers, readable_size
from store import free_host_bytes

EDGES = ("edge_index", "edges", "adj_t")
FEATURES = ("features", "x", "feat", "node_features", "feat_indptr")
LABELS = ("labels", "y", "label", "node_labels")
OF_EDGES = {  # a column of a store: the names it may have; DGL's have "edata." before them
    "edge_weight": ("edge_weight", "edata.weight", "edata.edge_weight", "edata.w"),
    "edge_time": ("edge_time", "time", "edata.time", "edata.edge_time", "edata.timestamp"),
    "edge_features": ("edge_features", "edge_attr", "edata.feat", "edata.edge_features", "edata.edge_attr"),
}
PARTS = {part: [f"{word}_{kind}" for word in words for kind in ("idx", "mask", "masks")]
         for part, words in zip(SPLITS, (["train"], ["val", "valid"], ["test"]))}  # fmt: skip
MATTERS = re.compile("edge|edata|weight|time|train|val|test|mask|split|adj|attr|feat|label|idx|index")
PIECE = 1 << 22  # bytes of a member read at a time, and numbers of a CSR matrix made dense at a time


class Npz(Mapping):
    """The arrays of an .npz file, each read when it is asked for.

    Args:
        file: path of a zip archive of .npy members, stored or deflated, as numpy writes it.

    Raises:
        StoreError: here or where an array is asked for, if the bytes make no such thing or do not fit into memory.
    """

    def __init__(self, file):
        self.file = str(file)
        if not os.path.isfile(file):
            raise StoreError(f"cannot read {file}: there is no regular file of that name")
        with self._readable("its directory"), zipfile.ZipFile(self.file) as archive:
            self._members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            twice = [name for name, times in collections.Counter(archive.namelist()).items() if times > 1]
        if twice:
            raise StoreError(f"{file} cannot be read: it holds more than one {twice[0]}")

    def __iter__(self):
        return iter(self._members)

    def __len__(self):
        return len(self._members)

    def __getitem__(self, name):
        """An array, in this machine's byte order."""
        with self._open(name) as (stream, shape, fortran_order, dtype):
            size, free = math.prod(shape) * dtype.itemsize, free_host_bytes()
            if size > free:
                raise StoreError(f"{self.file}: {name} is {list(shape)} {dtype}, {readable_size(size)} unpacked, and "
                                 f"{readable_size(free)} of memory are free")
            data = np.empty(size, np.uint8)
            for a in range(0, size, PIECE):
                piece = stream.read(min(PIECE, size - a))  # the last one compares the member with its checksum
                data[a:a + len(piece)] = np.frombuffer(piece, np.uint8)
            array = data.view(dtype).reshape(shape, order="F" if fortran_order else "C")
            return array.astype(dtype.newbyteorder("="), copy=False)

    def shape(self, name):
        """The declared shape of an array, which is not read; () where it cannot be known."""
        with contextlib.suppress(StoreError), self._open(name) as (_, shape, _, _):
            return shape
        return ()

    @contextlib.contextmanager
    def _open(self, name):
        """(stream at its data, shape, Fortran order, dtype) of a member that is as long as the array it declares."""
        member = self._members[name]
        with self._readable(name), zipfile.ZipFile(self.file) as archive, archive.open(member) as stream:
            stored = member.compress_type == zipfile.ZIP_STORED
            if not stored and member.compress_type != zipfile.ZIP_DEFLATED:
                raise ValueError(f"its compression, number {member.compress_type}, is not numpy's")
            start = stream.read(12)
            length = start[8:10] if start[6:7] == b"\1" else start[8:12]
            length = 8 + len(length) + int.from_bytes(length, "little")
            if start[:6] != b"\x93NUMPY" or not 12 <= length <= 1 << 14:
                raise ValueError("it is no .npy array")
            header = io.BytesIO(start + stream.read(length - 12))
            first = np.lib.format.read_magic(header) == (1, 0)
            read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
            shape, fortran_order, dtype = read(header)
            if dtype.hasobject or not dtype.itemsize:
                raise ValueError(f"its dtype {dtype} holds no numbers")
            held = member.file_size - length
            most = os.path.getsize(self.file) * (1 if stored else 1032)  # more than that deflate does not unpack
            if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != held or held > most:
                raise ValueError(f"it is declared as {list(shape)} {dtype}, which does not fit its {held} bytes")
            yield stream, shape, fortran_order, dtype

    @contextlib.contextmanager
    def _readable(self, name):
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # zipfile, zlib and numpy raise a dozen types on damaged bytes
            reason = (str(error) or repr(error)).splitlines()[0][:300]
            raise StoreError(f"{self.file} cannot be read as .npz: {name}: {reason}") from error


class Arrays:
    """Arrays by name; what is asked for counts as taken, and `close` looks at the rest.

    Args:
        source: what messages call the file or object.
        values: mapping from names to arrays or tensors; one that is None is not there.
        ignore: names of arrays to do without.

    Raises:
        StoreError: for a name to ignore that is not there, and in every method for what cannot be meant.
    """

    def __init__(self, source, values, ignore=()):
        self.source, self._values, self._taken, self._adjacent = str(source), values, set(), None
        self._there = [name for name in values if isinstance(values, Npz) or values[name] is not None]
        for name in ignore:
            self.find(name, needed=True)
        self._there = [name for name in self._there if name not in ignore]

    def error(self, text) -> StoreError:
        """An error that names the source."""
        return StoreError(f"{self.source}: {text}")

    def say(self, text):
        """Tell in a line what was decided."""
        print(f"{os.path.basename(self.source)}: {text}")

    def _do_without(self, name):
        file = isinstance(self._values, Npz)
        how = f"{os.path.basename(self.source)}:ignore={name}" if file else f"ignore=[{name!r}]"
        return f"go on without it: {how}"

    def find(self, *names, needed=False):
        """That one of several names which is there, or None."""
        found = [name for name in names if name in self._there]
        if len(found) > 1:
            way = self._do_without(found[1])
            raise self.error(f"it has {found[0]} and {found[1]}, which mean the same: keep one, or {way}")
        if needed and not found:
            raise self.error(f"it has no array {' or '.join(names)}; its arrays are {', '.join(self._there) or 'none'}")
        return found[0] if found else None

    def __getitem__(self, name):
        """An array of numbers, which counts as taken: numpy, or a tensor of bfloat16."""
        self.find(name, needed=True)
        self._taken.add(name)
        value = self._values[name]
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = value.detach().cpu()
            return value if value.dtype == torch.bfloat16 else value.numpy()
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise self.error(f"{name} is a {type(value).__name__} that makes no array: {error}") from error
        if array.dtype.kind not in "biuf":
            raise self.error(f"{name} holds {array.dtype} ({type(value).__name__}): an array of numbers is needed")
        return array

    def integers(self, name):
        """An array of whole numbers as int64."""
        return integers(f"{self.source}: {name}", self[name])

    # -----------------------------------------------------------------------------------------------------------------
    # the parts of a graph

    def edge_index(self, num_nodes):
        """Numbers [2, M], sources over destinations: of `edge_index`, of `edges` [M, 2] or of PyG's `adj_t`."""
        name = self.find(*EDGES, needed=True)
        if name == "adj_t":
            return self._transposed_adjacency(num_nodes)
        edges = self[name]
        if name == "edges" and (edges.ndim != 2 or edges.shape[1] != 2):
            raise self.error(f"edges is {list(edges.shape)}: [M, 2] is needed, source and destination of each edge")
        return edges if name == "edge_index" else edges.T

    def _transposed_adjacency(self, num_nodes):
        """adj_t, a SparseTensor of torch_sparse or of torch: its row v holds the sources of the edges into v."""
        self._taken.add("adj_t")
        matrix = self._values["adj_t"]
        if isinstance(matrix, torch.Tensor):
            matrix = matrix.to_sparse_csr()
            indptr, indices, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
        else:
            indptr, indices, values = matrix.csr()
        if len(indptr) != num_nodes + 1:
            raise self.error(f"adj_t has {len(indptr) - 1} rows, there are {num_nodes} nodes")
        if values is not None and not bool((values == 1).all()):
            self._adjacent = values.detach().cpu()
        return torch.stack([indices, torch.repeat_interleave(indptr.diff())]).cpu().numpy()

    def columns(self, num_nodes, num_edges):
        """What edges carry, by the names that a store has for it, and `node_time`; `edge_index` comes before this."""
        found = {column: name for column, names in OF_EDGES.items() if (name := self.find(*names))}
        if self._adjacent is not None and "edge_weight" in found:
            raise self.error(f"adj_t has values other than 1, and there is {found['edge_weight']}: keep one of them")
        if self.find("node_time"):
            found["node_time"] = "node_time"
        columns = {column: self[name] for column, name in found.items()}
        for column, name in found.items():
            shape, count = list(columns[column].shape), num_nodes if column == "node_time" else num_edges
            if shape[:1] != [count]:
                things = "nodes" if column == "node_time" else "edges"
                raise self.error(
                    f"{name} is {shape}: a row for each of the {count} {things} is needed; drop the array, or "
                    f"{self._do_without(name)}"
                )
            if column != "edge_features" and shape[1:] == [1]:
                columns[column] = columns[column].reshape(-1)
        if self._adjacent is not None:
            found["edge_weight"], columns["edge_weight"] = "values of adj_t", self._adjacent
        if found:
            names = (column if column == name else f"{column} (called {name})" for column, name in found.items())
            self.say(f"it has {', '.join(names)}")
        return columns

    def labels(self):
        """Class labels int64 [V], or several a node [V, C] of 0 and 1: -1 (of several a row) is no label, and so is
        NaN; whole numbers may come as floats, and classes as [V, 1]. None where there is no such array."""
        name = self.find(*LABELS)
        if name is None:
            return None
        values = self[name]
        if values.ndim == 0 or values.ndim > 2 and values.size != max(values.shape):
            raise self.error(
                f"{name} is {list(values.shape)}: a label for each node, [V], is needed, or [V, C] of 0 and 1"
            )
        if values.size == max(values.shape):
            values = values.reshape(-1)
        elif (values.sum(1) == 1).all() and ((values == 0) | (values == 1)).all():
            raise self.error(f"{name} is {list(values.shape)}, one-hot rows: of one class a node take {name}.argmax(1)")
        if values.dtype.kind != "f":
            values = values.astype(np.int8) if values.dtype == bool else values
            return integers(f"{self.source}: {name}", values)
        values = values.astype(np.float64)
        missing = np.isnan(values)
        bad = np.argwhere(~missing & ((values != np.rint(values)) | (np.abs(values) > 1 << 53)))
        if len(bad):
            place = ", ".join(map(str, bad[0]))
            raise self.error(f"{name}[{place}] is {values[tuple(bad[0])]}: labels are whole numbers, or NaN where "
                             "there is none")
        if missing.any():
            self.say(f"{missing.sum():,} of {values.size:,} in {name} are NaN: these nodes have no label (-1)")
        return np.where(missing, -1, values).astype(np.int64)

    def features(self, row_normalize=None):
        """[V, F]: a dense array as it is, or the `Rows` of a CSR matrix; None where there are none.

        Args:
            row_normalize: whether each row of a CSR matrix is divided by its sum; None: if it holds counts.
        """
        name = self.find(*FEATURES)
        if name == "feat_indptr":
            return self._csr_rows(row_normalize)
        if row_normalize is not None:
            raise self.error(f"row_normalize={row_normalize} has no effect: it is for a CSR matrix of features")
        return None if name is None else self[name]

    def _csr_rows(self, row_normalize):
        """Dense rows of feat_indptr, feat_indices, feat_data (ones) and feat_shape; equal places are added up."""
        indptr, indices = self.integers("feat_indptr"), self.integers("feat_indices")
        data = self.find("feat_data")
        values = self[data] if data else np.ones(indices.shape, np.int8)
        if indptr.ndim != 1 or len(indptr) < 2 or indices.ndim != 1 or values.shape != indices.shape:
            raise self.error(f"feat_indptr is {list(indptr.shape)}, feat_indices {list(indices.shape)} and feat_data "
                             f"{list(values.shape)}: [V + 1] and twice [n] are needed")
        num_nodes = len(indptr) - 1
        if indptr[0] != 0 or indptr[-1] != len(indices) or (np.diff(indptr) < 0).any():
            raise self.error(f"feat_indptr must rise from 0 to the {len(indices)} entries of feat_indices")
        shape = [num_nodes, int(indices.max(initial=0)) + 1]
        if self.find("feat_shape"):
            shape = self.integers("feat_shape").tolist()
            shape = shape[::-1] if shape[1:] == [num_nodes] else shape  # some files list columns first
        if len(shape) != 2 or shape[0] != num_nodes or not 1 <= shape[1] <= PIECE:
            raise self.error(f"its CSR matrix of features has shape {shape}: {num_nodes} rows and from 1 to {PIECE:,} "
                             "columns are needed")
        bad = np.flatnonzero((indices < 0) | (indices >= shape[1]))
        if len(bad):
            raise self.error(f"feat_indices[{bad[0]}] is {indices[bad[0]]}: columns lie in [0, {shape[1]})")
        counts = values.dtype.kind != "f"
        normalize = counts if row_normalize is None else bool(row_normalize)
        if normalize and values.min(initial=0) < 0:
            raise self.error(f"feat_data[{values.argmin()}] is {values.min()}: rows with values below 0 are not "
                             "divided by their sum; give row_normalize=0")
        if data:
            self.say(f"features are the {'counts' if counts else 'values'} in feat_data, "
                     + ("each row divided by its sum (row_normalize=0 leaves them)" if normalize else "as they are"))
        dtype = np.float32 if counts else values.dtype

        def rows(first, last):
            a, b = indptr[first], indptr[last]
            place = np.repeat(np.arange(last - first), np.diff(indptr[first:last + 1])) * shape[1] + indices[a:b]
            dense = np.bincount(place, values[a:b], (last - first) * shape[1]).reshape(last - first, shape[1])
            if normalize:
                total = dense.sum(1, keepdims=True)
                dense /= np.where(total, total, 1)
            return dense.astype(dtype)

        step = max(1, PIECE // shape[1])
        return Rows(shape, dtype, (rows(a, min(a + step, num_nodes)) for a in range(0, num_nodes, step)))

    def part(self, part):
        """The name of the array that holds a part of the split, or None."""
        return self.find(*PARTS[part])

    def split(self, count, choice=None):
        """The split of `count` nodes or graphs, {part: ids}; a list of them where there are several, empty where none.

        Ids are [n], of several splits [K, n] (or [n, K] where that fits all parts), short rows filled up with -1. Masks
        are [count], of several splits [K, count] or [count, K], and hold nothing but 0 and 1.

        Args:
            choice: which of several splits to take alone, from 0.
        """
        names = {part: name for part in SPLITS if (name := self.part(part))}
        if names and "train" not in names:
            raise self.error(f"it has {' and '.join(names.values())}, but no {' or '.join(PARTS['train'])} to train on")
        lists = [self[name].shape for name in names.values() if self._of_ids(name)]
        lists = [shape for shape in lists if len(shape) == 2 and min(shape) > 1]
        turned = len({shape[1] for shape in lists}) == 1 < len({shape[0] for shape in lists})
        splits = {part: self._splits(name, count, turned) for part, name in names.items()}  # [K or 1, n] each
        several = sorted({len(rows) for rows in splits.values()} - {1})
        if len(several) > 1:
            raise self.error(f"it has {' and '.join(map(str, several))} splits in {', '.join(names.values())}: the "
                             "same number is needed")
        if choice is not None and not several:
            raise self.error(f"split={choice} has no effect: it has {'one' if names else 'no'} split")
        if choice is not None and not 0 <= choice < several[0]:
            raise self.error(f"split={choice} is out of range: its {several[0]} splits count from 0")

        def ids(row, several):
            return np.flatnonzero(row) if row.dtype == bool else row[row != -1] if several else row

        def split(number):
            return {part: ids(rows[number if len(rows) > 1 else 0], len(rows) > 1) for part, rows in splits.items()}

        return [split(number) for number in range(several[0])] if several and choice is None else split(choice or 0)

    def _of_ids(self, name):
        return "mask" not in name and self[name].dtype != bool

    def _splits(self, name, count, turned):
        """A part of one split or of K as [K, n]: ids (`turned`: given as [n, K]), or bool where they are masks."""
        values = self[name]
        shape = list(values.shape)
        if self._of_ids(name):
            if values.ndim == 2 and min(shape) > 1:
                return values.T if turned else values
            if values.ndim == 0 or values.size != max(shape):
                raise self.error(f"{name} is {shape}: ids are [n], of K splits [K, n]")
            return values.reshape(1, -1)
        if count not in shape or len(shape) > 2 or shape == [count, count] != [1, 1]:
            raise self.error(f"{name} is {shape}: a mask is [{count}], of K splits [K, {count}] or [{count}, K]")
        if not ((values == 0) | (values == 1)).all():
            raise self.error(f"{name} holds values other than 0 and 1; ids belong into {name.partition('_')[0]}_idx")
        return (values if shape[-1] == count and len(shape) == 2 else values.reshape(count, -1).T).astype(bool)

    def close(self, num_nodes=None, num_edges=None):
        """Name what was not taken; what seems to say something of edges, splits, features or labels is refused."""
        rest = [name for name in self._there if name not in self._taken]
        for name in rest:
            value = self._values
            shape = value.shape(name) if isinstance(value, Npz) else getattr(value[name], "shape", ())
            of_edges = num_nodes != num_edges and tuple(shape[:1]) == (num_edges,)
            if of_edges or MATTERS.search(str(name).lower()):
                why = "what edges carry is called edge_weight, edge_time or edge_features"
                why = why if of_edges or "edge" in name else "its name is not understood"
                raise self.error(f"{name} is not used: {why}; drop the array, or {self._do_without(name)}")
        if rest:
            self.say(f"not used: {', '.join(map(str, rest))}")
