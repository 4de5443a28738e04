"""What a person gives -> numpy arrays and tensors, checked: lists, columns of pandas, sparse matrices, masks, streams.

    x = as_rows("features", table)                  # a tensor [n, F]; StoreError names what was given
    ids = integers("labels", column, num_nodes)     # int64 [V]
    for first, rows in chunked("x", memmap):        # a piece at a time; `Rows` come in pieces
        check_finite("x", as_rows("x", rows), first)

This file needs disk/files.py, numpy and torch.
"""

import math
import tempfile
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disk.files import SPLITS, StoreError, free_host_bytes, listed, plural, progress_bar, reading

VALID = ("val", "valid", "validation")  # names of the part called valid
DTYPES = ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64")
# dtypes that float features may be rounded to; int8 for codes, 256 evenly spaced values of each column
KEPT_AS = ("bfloat16", "float16", "int8")
ROW_BYTES = 1 << 24  # bytes of rows handled at a time
SAMPLED = 1024  # rows of a type whose values are counted before and after rounding, at most
SAMPLED_VALUES = 1 << 22  # the same of all columns
NAMED = 3  # columns
DATE = "datetime64[us]"  # dates are stored in microseconds since 1970, UTC
# what NaT of numpy and pandas becomes as an integer, also divided by 10^3, 10^6 or 10^9, rounded either way
NO_DATE = sorted(
    {cut for k in (0, 3, 6, 9) for cut in (-(1 << 63) // 10**k, -((1 << 63) // 10**k))}
)
NO_TIME = "a missing time; for what was always there give the earliest of all, or leave it out"
MISSING = ("", "nan", "NaN", "NAN", "Nan", "NaT")  # text for what is missing
# text that is no name of a class or a column
LIKE_NUMBERS = {"na", "n/a", "null", "none", "inf", "-inf", "?", "-"}


class Rows(NamedTuple):
    """A stream of rows, to be read once and in order, for arrays that are never in memory as a whole."""

    shape: tuple  # of the whole array, the number of rows first
    dtype: Any  # numpy or torch dtype of every chunk
    chunks: Iterable  # arrays [r, ...] whose row counts add up to shape[0]


def chunk_rows(array) -> int:
    """Return how many rows of an array to handle at a time."""
    return max(1, ROW_BYTES // (8 * max(1, math.prod(array.shape[1:]))))


def chunked(name, array, progress=False):
    """Yield (index of the first row, rows): slices of an array, or the chunks of `Rows`, which must add up."""
    count = array.shape[0]
    first = 0
    rows = chunk_rows(array)
    pieces = (array[a : a + rows] for a in range(0, count, rows))
    with progress_bar(progress, total=count, desc=name, unit="row") as bar:
        for chunk in array.chunks if isinstance(array, Rows) else pieces:
            yield first, chunk
            first += len(chunk)
            bar.update(len(chunk))
    if first != count:
        raise StoreError(f"{name} came with {first} rows, {count} were announced")


def as_numpy(rows) -> np.ndarray:
    """View a CPU tensor as a numpy array of the same memory; bfloat16, which numpy lacks, as int16."""
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


def as_rows(name, rows) -> Tensor:
    """Convert rows to a tensor, see `as_tensor`; bool becomes uint8."""
    rows = as_tensor(name, rows)
    return rows.to(torch.uint8) if rows.dtype == torch.bool else rows


def as_tensor(name, values) -> Tensor:
    """Convert what `array_like` takes to a tensor in host memory, in native byte order, of a dtype that torch can index."""
    values = array_like(name, values)
    with reading(name):
        if isinstance(values, np.ndarray):
            if values.dtype.kind not in "biufc":
                raise StoreError(f"{name} has dtype {values.dtype}: numbers are needed")
            values = np.require(values, values.dtype.newbyteorder("="), "CW")
        values = torch.as_tensor(values, device="cpu")
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        values = torch.from_numpy(integers(name, values))
    return values


def array_like(name, values):
    """Return what a person gives as an array, the one place where other forms become one; StoreError for others.

    What has shape, dtype and slicing (array, memmap, `Rows`) stays as it is, a tensor is taken to host memory. Numbers,
    lists of them or of arrays of one shape, columns and tables of pandas (by position, whatever their index), and sparse
    matrices of scipy or torch, if there is room for all of their zeros, become arrays; objects of Python must be text.
    """
    with reading(name):
        if type(values) in (list, tuple, range, int, float):
            values = _stacked(name, values)
        elif is_sparse(values):
            values = _dense(name, values)
        elif isinstance(values, Tensor):
            values = values.detach().cpu()
        elif hasattr(values, "iloc") and values.ndim == 2:
            values = np.column_stack(
                [
                    array_like(f"{name}, column {c!r},", values.iloc[:, i])
                    for i, c in enumerate(values)
                ]
            )
        elif hasattr(values, "to_numpy"):
            zoned = getattr(values.dtype, "tz", None) is not None  # of pandas, to UTC
            values = values.to_numpy(f"datetime64[{values.dtype.unit}]" if zoned else None)
        if not hasattr(values, "shape"):
            raise StoreError(f"{name} is {kind_of(values)}: an array is needed")
        _ = values.dtype
        if np.ma.is_masked(values):
            raise ValueError("it has masked entries: give them a value, as .filled(0) does")
    if values.dtype != object:
        return values
    others = {type(value).__name__ for value in values.flat} - {"str"}
    if others:
        raise StoreError(
            f"{name} holds objects of Python ({', '.join(sorted(others))}): "
            "give numbers as .astype(int) or .astype(float), text as .astype(str), "
            f'dates as .astype("{DATE}"), none missing'
        )
    return values.astype(str)


def column_names(table) -> list[str] | None:
    """Return the names of the columns of a DataFrame; None where they are numbered, and for other forms of an array."""
    names = [*getattr(table, "columns", ())]
    return None if names == [*range(len(names))] else [*map(str, names)]


def _stacked(name, values):
    """Convert a number, or a list of numbers or of arrays, to an array, of tensors to a tensor."""
    if type(values) not in (list, tuple):
        return np.asarray(values)
    parts = [array_like(name, part) if hasattr(part, "shape") else part for part in values]
    rows = [part for part in parts if getattr(part, "shape", isinstance(part, list | tuple))]
    sizes = sorted({*map(len, rows)})
    if len(sizes) > 1:
        raise StoreError(f"{name} has parts of lengths {sizes[0]} and {sizes[1]}: one is needed")
    tensors = parts and all(isinstance(part, Tensor) for part in parts)
    return torch.stack(parts) if tensors else np.asarray(parts)


def is_sparse(values) -> bool:
    """Return whether values are a sparse matrix of scipy or torch."""
    if isinstance(values, Tensor):
        return values.layout != torch.strided
    return hasattr(values, "tocoo")


def _dense(name, matrix):
    size = math.prod(matrix.shape) * matrix.dtype.itemsize
    free = free_host_bytes()
    if size > free:
        raise StoreError(f"{name} is sparse: dense it takes {size:,} bytes, and {free:,} are free")
    return matrix.toarray() if hasattr(matrix, "toarray") else matrix.detach().cpu().to_dense()


def adjacency(name, matrix):
    """Read a sparse matrix of scipy, torch or torch_sparse as edges, A[i, j] as one from i to j -> (int tensor [2, M], its
    values [M] or None if all are 1, its number of rows)."""
    with reading(name):
        if hasattr(matrix, "tocoo"):
            matrix = matrix.tocoo()
            rows, columns, values = map(torch.as_tensor, (matrix.row, matrix.col, matrix.data))
            count = matrix.shape[0]
        elif isinstance(matrix, Tensor):
            matrix = matrix.detach().cpu().to_sparse_coo().coalesce()
            rows, columns = matrix.indices()
            values = matrix.values()
            count = matrix.shape[0]
        else:  # of torch_sparse
            indptr, columns, values = matrix.csr()
            rows = torch.repeat_interleave(indptr.diff())
            count = len(indptr) - 1
        if values is not None and bool((values == 1).all()):
            values = None
        return torch.stack([rows, columns]), values, count


def edge_pairs(name, values, num_sources, num_destinations):
    """Return edges [2, M], not checked further, of what `array_like` takes; or of a sparse matrix of ones [num_sources,
    num_destinations], see `adjacency`."""
    if is_sparse(values):
        shaped(name, values, num_sources, num_destinations)
        values, weights, _ = adjacency(name, values)
        if weights is not None:
            raise StoreError(
                f"{name} is a matrix with values other than 1: "
                "give it as [rows, columns] of its entries, and values that are weights as edge_weight"
            )
    return shaped(name, array_like(name, values), 2, "M")


def from_edge_index(edge_index, num_nodes, edge_order=False):
    """Convert edges from COO to CSC, as the sampler needs -> (indptr int64 [V+1], indices [M], int32 below 2^31 nodes), with
    edge_order=True also order, int64 [M].

    edge_index: integers [2, M], row 0 the sources, row 1 the destinations, as in PyG: a tensor, an array, two of either
    or two lists; or a sparse matrix of scipy or torch [V, V], whose entry i, j is an edge from i to j and must be 1.
    Edges are sorted by destination, then source, and equal ones keep their order. order[e] is the column of edge_index that
    edge e of `indices` was: w[order] are weights for a sampler, order[block.edge_ids] the columns of a block's edges, and
    order.argsort() has the position in `indices` of each column. Types and times, by which lists must rise, need
    `build_store`.
    ValueError for another shape, values that are not integers, or a node id outside [0, num_nodes).
    """
    edges = edge_pairs("edge_index", edge_index, num_nodes, num_nodes)
    edges = integers("edge_index", edges)
    within("edge_index", edges, num_nodes, "nodes")
    source, destination = torch.from_numpy(edges)
    keys = (destination * num_nodes + source).numpy()
    if edge_order:
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
    else:  # one int64 key per edge: numpy sorts these fastest
        keys = np.sort(keys)
    indptr = np.searchsorted(keys, np.arange(num_nodes + 1) * num_nodes)
    indices = (keys % max(num_nodes, 1)).astype(np.int32 if num_nodes < 1 << 31 else np.int64)
    arrays = (indptr, indices, order) if edge_order else (indptr, indices)
    return tuple(map(torch.from_numpy, arrays))


def integers(name, values, *shape) -> np.ndarray:
    """Convert `values` to int64; StoreError for another kind of dtype, or a shape that differs from one given."""
    with reading(name):
        values = np.asarray(array_like(name, values))
    if values.size and values.dtype.kind not in "iu":
        raise StoreError(f"{name} has dtype {values.dtype}: integers are needed")
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise StoreError(f"{name} holds {values.max()}: whole numbers below 2^63 are needed")
    values = values.astype(np.int64, copy=False)
    return shaped(name, values, *shape) if shape else values


def shaped(name, array, *shape):
    """Return `array` if its shape matches `shape`, where a str matches any size; else raise StoreError."""
    if len(array.shape) != len(shape) or not all(
        isinstance(want, str) or n == want for n, want in zip(array.shape, shape)
    ):
        raise StoreError(
            f"{name} has shape {list(array.shape)}: [{', '.join(map(str, shape))}] is needed"
        )
    return array


def by_part(name, given) -> dict:
    """Return {part of SPLITS: values} of a dict whose names may be `val` or `validation` for `valid`; StoreError for
    another name, or two for one part."""
    parts = {}
    for word, values in given.items():
        part = "valid" if word in VALID else word
        if part not in SPLITS:
            raise StoreError(f"{name} has a part {word!r}: parts are {', '.join(SPLITS)}")
        if part in parts:
            both = " and ".join(repr(other) for other in given if other in VALID)
            raise StoreError(f"{name} has {both}, which mean the same: keep one")
        parts[part] = values
    return parts


def part_ids(name, values, count) -> np.ndarray:
    """Convert a part of a split of `count` nodes or graphs, ids or a bool mask [count], to int64 ids [n]."""
    values = array_like(name, values)
    if values.dtype in (np.bool_, torch.bool):
        return np.flatnonzero(shaped(f"{name}, a mask,", values, count))
    return integers(name, values, "n")


def row_dtype(name, rows) -> str:
    """Return the name of the dtype in which rows are stored; StoreError unless it is one of DTYPES."""
    dtype = rows.dtype if isinstance(rows.dtype, torch.dtype) else np.dtype(rows.dtype).name
    dtype = str(dtype).removeprefix("torch.").replace("bool", "uint8")
    if dtype not in DTYPES:
        raise StoreError(f"{name} has dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    return dtype


def refuse(bad, name, values, why, first=0):
    """Raise StoreError for the first value where the mask `bad` is true; values[0] is at index `first` of `name`."""
    if bad.any():
        at = torch.as_tensor(bad, device="cpu").nonzero()[0].tolist()
        place = [first + at[0], *at[1:]]
        value = values[tuple(at)]
        # nanoseconds would print as a number
        value = value if isinstance(value, np.datetime64) else value.item()
        raise StoreError(f"{name}{place} is {value}: {why}")


def within(name, values, end, kind, first=0):
    """Raise StoreError for the first value outside [0, end), as "NAME[3] is 9: KIND lie in [0, 5)"; see `refuse`."""
    refuse((values < 0) | (values >= end), name, values, f"{kind} lie in [0, {end})", first)


def whole_times(name, values, refuse=refuse) -> np.ndarray:
    """Convert times to int64, or dates (datetime64 of any unit) to datetime64[us]; StoreError for missing ones, fractions,
    and numbers from which on their dtype rounds. refuse: as below, to name rows of a table."""
    with reading(name):
        values = array_like(name, values)
        dtype = str(values.dtype).removeprefix("torch.")
        if isinstance(values, Tensor):
            values = (values.double() if values.is_floating_point() else values).numpy()
    if values.dtype.kind == "M":
        refuse(np.isnat(values), name, values, NO_TIME)
        with reading(name):
            dates = values.astype(DATE)
        why = f"dates are stored in microseconds: round it, as .astype({DATE!r}) of numpy does"
        refuse(dates.astype(values.dtype) != values, name, values, why)
        return dates
    if values.dtype.kind == "f":
        refuse(np.isnan(values), name, values, NO_TIME)
        most = int(2 / torch.finfo(getattr(torch, dtype, torch.float64)).eps)
        why = f"{dtype} rounds whole numbers above {most:,}: give times as int64, of before they were rounded"
        refuse(np.abs(values) > most, name, values, why)
        why = "whole numbers are needed; give finer times in smaller units"
        refuse(values != np.rint(values), name, values, why)
        values = values.astype(np.int64)
    times = integers(name, values)
    if times.min(initial=0) <= NO_DATE[-1]:
        refuse(np.isin(times, NO_DATE), name, times, f"NaT as a number, {NO_TIME}")
    return times


def check_finite(name, rows, first=0):
    """Raise StoreError for NaN or infinity in rows [r, F]; rows[0] is row `first` of `name`."""
    if rows.is_floating_point():
        refuse(~torch.isfinite(rows), name, rows, "every value must be finite", first)


def check_answers(name, y, labels):
    """Raise StoreError unless y, a tensor [G, T], can be what small graphs are trained on: numbers, or if `labels` whole
    ones, with T > 1 only 0 and 1. NaN, or for a label also -1, stands for a missing one."""
    refuse(y.isinf(), name, y, "every value must be finite, or NaN for a missing one")
    if not labels:
        return
    missing = y.isnan()
    why = "labels are whole numbers, or NaN for a missing one; fractions are `targets`"
    wide = y.double()
    refuse(~missing & ((wide != wide.round()) | (wide.abs() >= 1 << 53)), name, y, why)
    if y.shape[1] > 1:
        why = "several labels per graph are each 0 or 1, or -1 or NaN for a missing one"
        refuse(~missing & ((y < -1) | (y > 1)), name, y, why)


def spool(folder, chunks, dtype, *row) -> np.memmap:
    """Write chunks [r, *row] to a file without a name in a folder, to be read several times -> memmap [rows, *row]."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
        shape = (out.tell() // (int(np.prod(row)) * np.dtype(dtype).itemsize), *row)
        out.flush()
        return np.memmap(out, dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


def largest_of(rows) -> float:
    """Return the largest absolute value of a tensor, 0 if it is empty."""
    return max(map(abs, map(float, rows.aminmax()))) if rows.numel() else 0.0


class RoundedRows:
    """Feature rows before and after they are rounded: a sample, evenly spaced among the rows of each type.

    Args: rows: number of all rows. width: F. types: (name, nodes, feature width or 0) of each type of nodes; may be empty.
    """

    def __init__(self, rows, width, types=()):
        counts = {name: count for name, count, is_typed in types if is_typed}
        if len(counts) < 2:
            counts = {"": rows}
        self.types = [*counts]
        most = max(1, min(SAMPLED, SAMPLED_VALUES // width))
        parts = [
            torch.arange(a, b, -(-(b - a) // most) or 1, device="cpu")
            for a, b in pairwise(accumulate(counts.values(), initial=0))
        ]
        self.bounds = [*accumulate(map(len, parts), initial=0)]
        self.ids = torch.cat(parts)
        self.largest = 0.0
        self.before = []
        self.after = []

    def add(self, first, before, after):
        """Take those of the sample of a chunk of rows, whose first row is `first`."""
        self.largest = max(self.largest, largest_of(before))
        start, stop = np.searchsorted(self.ids.numpy(), [first, first + len(before)])
        at = self.ids[start:stop] - first
        self.before.append(before[at])
        self.after.append(after[at])

    def loss(self, names=None) -> str:
        """Describe the columns that keep half as many different values as they had, or fewer, and far fewer than a dtype
        has; "" if there are none. names: of the columns, F."""
        if not self.before:
            return ""
        before, after = map(torch.cat, (self.before, self.after))
        if before.dtype == after.dtype:
            return ""
        levels = 256
        if after.is_floating_point():
            levels = int(2 / torch.finfo(after.dtype).eps)
        lost = []
        for kind, (a, b) in zip(self.types, pairwise(self.bounds)):
            had = _different(before[a:b])
            have = _different(after[a:b])
            for column in (2 * have <= had.clamp(max=levels // 4)).nonzero().flatten().tolist():
                name = names[column] if names else column
                of = f" of {kind}" if kind else ""
                lost.append(f"{name}{of} ({have[column]} of {had[column]})")
        if not lost:
            return ""
        return (
            f"few different values are left of {plural(len(lost), 'column')}, {listed(lost, NAMED)}, "
            f"in {plural(len(before), 'row')} looked at"
        )


def _different(rows):
    """Count the different values of each column, 1 if there are no rows."""
    return rows.sort(0).values.diff(dim=0).ne(0).sum(0) + 1


class RowsByIndex:
    """Base of features of a store. Subclasses have .shape, .dtype, `read(ids, out)`, which fills and returns `out`, and
    `_put(ids, rows)` if rows may change."""

    def gather(self, ids, out=None) -> Tensor:
        """Gather rows -> [n, F].

        Args:
            ids: int32 or int64 [n] node ids, in any order, repeats allowed; IndexError if one is out of range.
            out: [n, F] of this dtype to write into and return; None: a new tensor.
        """
        return self.read(ids, gather_target(self, ids, out))

    def put_rows(self, ids, rows):
        """Replace rows, with backend lmdb: atomically, readers see all of them or none, after a crash as well.

        Args:
            ids: int32 or int64 [n] node ids; of an id that repeats, the last row counts.
            rows: [n, F] of this dtype, finite. All blocks to be changed are held in memory.

        Raises IndexError for an id out of range, StoreError for invalid rows, values beyond the range of a column of codes,
        another backend or a full disk; then nothing is changed.
        """
        ids = torch.as_tensor(ids)
        self._put(ids, gather_target(self, ids, torch.as_tensor(rows), "rows"))

    def _put(self, ids, rows):
        raise StoreError("put_rows needs a store with backend lmdb: rows of mmap stay as built")

    def __getitem__(self, ids) -> Tensor:
        """Gather the rows of a list or array of ids [n], of a mask bool [V] or of a slice -> [n, F]."""
        count = self.shape[0]
        ids = range(*ids.indices(count)) if isinstance(ids, slice) else ids
        return self.gather(torch.from_numpy(part_ids("ids", ids, count)))

    def __repr__(self):
        return f"{type(self).__name__}({[*self.shape]}, {self.dtype})"


def check_ids(ids, count):
    """Raise IndexError unless ids, a tensor, lie in [0, count)."""
    for bad in map(int, ids.aminmax()) if len(ids) else ():
        if not 0 <= bad < count:
            raise IndexError(f"node {bad} is out of range: ids lie in [0, {count})")


def gather_target(features, ids, out, name="out") -> Tensor:
    """Check the ids [n] and `out` [n, F] of a gather -> `out`, or a new tensor if it is None."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 1:
        raise StoreError(f"ids is {kind_of(ids)}: an int32 or int64 tensor [n] is needed")
    check_ids(ids, features.shape[0])
    shape = (len(ids), features.shape[1])
    if out is None:
        return torch.empty(shape, dtype=features.dtype, device="cpu")
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != features.dtype:
        raise StoreError(f"{name} is {kind_of(out)}: {features.dtype} {list(shape)} is needed")
    return out


def kind_of(value) -> str:
    """Name what was given, for messages: "None", "a list", of an array its shape and dtype."""
    if hasattr(value, "dtype"):
        return f"{[*value.shape]} {value.dtype}"
    return "None" if value is None else f"a {type(value).__name__}"


def shown(kind, fields) -> str:
    """Format an object with the shapes of its arrays and the lengths of its lists, as PyG does."""
    parts = []
    for name, value in fields.items():
        if isinstance(value, list | tuple) and len(value) > 8:
            value = [len(value)]
        parts.append(f"{name}={[*value.shape] if hasattr(value, 'shape') else repr(value)}")
    return f"{kind}({', '.join(parts)})"
