"""What edges and nodes carry beside the graph: weights, times and features of edges, times and names of nodes.

    columns, widths = check_columns(M, V, edge_weight=w, edge_time=t, edge_features=e, node_time=s)   # each may be None
    files = write_columns(folder, columns, rows)      # rows [M']: which edge of the input each stored edge is
    columns = map_columns(folder, meta)               # of an open store
    problems = list(column_problems(graph))           # what `verify` finds wrong with them

    edge_weight    float32 [M]    not negative: how likely an edge is drawn, compared with the others of its list
    edge_time      int64 [M]      when an edge came to be; each neighbour list is sorted by it
    edge_features  [M, D]         of a dtype in DTYPES, for layers that see edges
    node_time      int64 [V]      the time at which a node is classified
    node_names     nodes.txt      what a node was called where the graph comes from: node i in line i + 1

Who sorts, mirrors or drops edges moves these rows along, a piece at a time: see `csc.sorted_edges`.

Letters: V nodes and M edges of the graph, D width of the edges' features. This file needs disk/files.py, disk/sort.py and torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from disk.sort import Rows
from disk.files import (
    DTYPES,
    ROW_BYTES,
    StoreError,
    array_like,
    as_numpy,
    check_finite,
    map_npy,
    row_dtype,
    storage_dtype,
    whole_numbers,
    write_lines,
    write_npy,
)

# arrays, each in a file NAME.npy
COLUMNS = ("edge_weight", "edge_time", "edge_features", "node_time")
OF_NODES = {"node_time", "node_names"}
NAMES = "nodes.txt"


def check_columns(num_edges, num_nodes, **columns) -> tuple[dict, dict]:
    """Look at every value of the columns that are given, a piece at a time.

    Args:
        columns: by the names in COLUMNS: arrays, memmaps or tensors, or None. Weights may be any real numbers, times
            also floats that are whole, features [M] for a single one. node_names: [V] strings or numbers, or None.

    Returns:
        ({name: numpy array} of those that are not None, with bfloat16 as int16, node_names as they are; the width and
        dtype of edge_features as meta.json keeps them, {} without).

    Raises:
        StoreError: for another shape or dtype, NaN, infinity, a negative weight, a name that is there twice.
    """
    checked, widths = {}, {}
    for name, values in columns.items():
        if values is None:
            continue
        if name == "node_names":
            _check_names(values, num_nodes)
            checked[name] = values
            continue
        values, count = array_like(name, values), num_nodes if name == "node_time" else num_edges
        shape = tuple(values.shape)
        if (
            isinstance(values, Rows)
            or shape[:1] != (count,)
            or len(shape) > 1 + (name == "edge_features")
            or 0 in shape[1:]
        ):
            what, wanted = ("node", f"[{count}]") if name == "node_time" else ("edge", f"[{count}]")
            wanted = f"[{count}, D]" if name == "edge_features" else wanted
            raise StoreError(
                f"{name} is a {type(values).__name__} {list(shape)}: an array {wanted} is needed, a row for "
                f"each {what} that is given"
            )
        if name in ("edge_time", "node_time"):
            checked[name] = whole_numbers(name, values)
            continue
        if name == "edge_features":
            values = values.reshape(-1, 1) if len(shape) == 1 else values
            widths = {"edge_dim": int(values.shape[1]), "edge_dtype": row_dtype(name, values)}
        for first, chunk in _pieces(values):
            (_check_weights if name == "edge_weight" else check_finite)(name, chunk, first)
        checked[name] = (
            as_numpy(values.detach().cpu())
            if isinstance(values, torch.Tensor)
            else np.asarray(values)
        )
    return checked, widths


def _pieces(values) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the first row, rows as a tensor), some rows at a time."""
    step = _step(values)
    for a in range(0, values.shape[0], step):
        chunk = values[a : a + step]
        if not isinstance(chunk, torch.Tensor):
            chunk = torch.from_numpy(
                np.require(chunk, np.asarray(chunk).dtype.newbyteorder("="), "CW")
            )
        yield a, chunk


def _step(values) -> int:
    """How many rows to handle at a time."""
    return max(1, ROW_BYTES // (8 * max(1, int(np.prod(values.shape[1:])))))


def _check_weights(name, chunk, first):
    if chunk.is_complex():
        raise StoreError(
            f"{name} has dtype {str(chunk.dtype).removeprefix('torch.')}: real numbers are needed"
        )
    bad = (~(torch.isfinite(chunk.float()) & (chunk >= 0))).nonzero()
    if len(bad):
        row = int(bad[0])
        raise StoreError(
            f"{name}[{first + row}] is {chunk[row].item()}: a weight says how likely an edge is drawn, so it "
            "is finite and not negative; other numbers can be edge_features"
        )


def _check_names(names, num_nodes):
    """Raise StoreError unless there are V different names, each of one line."""
    if len(names) != num_nodes:
        raise StoreError(
            f"node_names has {len(names)} names: {num_nodes} are needed, one for each row of features"
        )
    seen = set()
    for node, name in enumerate(map(str, names)):
        if name in seen:
            raise StoreError(f"node_names holds {name!r} more than once")
        if "\n" in name or "\r" in name or name != name.encode(errors="replace").decode():
            raise StoreError(f"node_names: name {node}, {name!r}, is no text of one line")
        seen.add(name)


def write_columns(path, columns, rows=None) -> dict:
    """Write columns as files, a piece at a time -> their records for meta.json.

    Args:
        columns: as `check_columns` returns them.
        rows: int64 [M'], which edge of the input each stored edge is; None where the edges are stored as they came.
    """
    files = {}
    for name, array in columns.items():
        if name == "node_names":
            files[NAMES] = write_lines(path / NAMES, array)
            continue
        picked = None if name == "node_time" else rows
        dtype = {
            "edge_weight": "float32",
            "edge_features": storage_dtype(_uint8_for_bool(array.dtype)),
        }.get(name, "int64")
        shape, step = (
            [len(array) if picked is None else len(picked), *array.shape[1:]],
            _step(array),
        )
        cuts = [slice(a, a + step) for a in range(0, shape[0], step)]
        chunks = (array[cut if picked is None else picked[cut]] for cut in cuts)
        files[f"{name}.npy"] = write_npy(path / f"{name}.npy", dtype, shape, chunks)
    return files


def _uint8_for_bool(dtype):
    return np.dtype("uint8") if dtype == bool else dtype


def map_columns(path, meta) -> dict:
    """{name: tensor, or None where there is none} of the arrays in COLUMNS."""
    expected = {
        "edge_weight": ("float32", [meta["num_edges"]]),
        "edge_time": ("int64", [meta["num_edges"]]),
        "node_time": ("int64", [meta["num_nodes"]]),
    }
    dtype = meta.get("edge_dtype", "float32")
    if dtype not in DTYPES:
        raise StoreError(f"{path}: meta.json has edge_dtype = {dtype!r:.200}; rebuild the store")
    expected["edge_features"] = storage_dtype(dtype), [meta["num_edges"], meta.get("edge_dim")]
    found = dict.fromkeys(COLUMNS)
    for name in COLUMNS:
        if record := meta["files"].get(f"{name}.npy"):
            found[name] = map_npy(path, f"{name}.npy", record, *expected[name])
    if found["edge_features"] is not None:
        found["edge_features"] = found["edge_features"].view(getattr(torch, dtype))
    return found


def out_of_order(indptr, times) -> int | None:
    """The first edge that is earlier than the one before it in its list, or None.

    Args:
        indptr: int64 [V+1], times: int64 [M], numpy arrays.
    """
    step = ROW_BYTES // 8
    for a in range(0, max(len(times) - 1, 0), step):
        chunk = times[a : a + step + 1]
        falls = np.flatnonzero(chunk[1:] < chunk[:-1]) + a + 1
        place = np.searchsorted(indptr, falls)
        falls = falls[indptr[np.minimum(place, len(indptr) - 1)] != falls]  # no list begins there
        if len(falls):
            return int(falls[0])
    return None


def column_problems(graph) -> Iterator[str]:
    """Sentences about what is wrong with the columns of an open store whose indptr is in order."""
    for name, check in (("edge_weight", _check_weights), ("edge_features", check_finite)):
        values = getattr(graph, name)
        try:
            for first, chunk in () if values is None else _pieces(values):
                check(name, chunk, first)
        except StoreError as error:
            yield f"{name}.npy: {error}"
    if graph.edge_time is not None:
        edge = out_of_order(graph.indptr.numpy(), graph.edge_time.numpy())
        if edge is not None:
            yield f"edge_time.npy: edge {edge} is earlier than the one before it in its list"


def described(graph) -> str:
    """What edges and nodes carry, in words."""
    words = ["weight"] if graph.edge_weight is not None else []
    if graph.edge_features is not None:
        words.append(f"features {graph.edge_dim} x {graph.meta['edge_dtype']}")
    for name, times in (("time", graph.edge_time), ("nodes' time", graph.node_time)):
        if times is not None:
            first, last = map(int, torch.aminmax(times)) if len(times) else (0, 0)
            words.append(f"{name} {first} to {last}")
    return ", ".join(words) or "none"
