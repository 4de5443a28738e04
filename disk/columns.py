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

V nodes and M edges of the graph, D width of the edges' features. This file needs disk/files.py, numpy and torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from disk import files
from disk.files import StoreError, integers, reading, refuse

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
        values, of = files.array_like(name, values), name.partition("_")[0]
        shape, count = tuple(values.shape), num_nodes if of == "node" else num_edges
        most, width = (2, ", D") if name == "edge_features" else (1, "")
        if (
            isinstance(values, files.Rows)
            or shape[:1] != (count,)
            or len(shape) > most
            or 0 in shape[1:]
        ):
            raise StoreError(
                f"{name} is a {type(values).__name__} {list(shape)}: an array [{count}{width}] is needed, a row "
                f"for each {of} that is given"
            )
        if name in ("edge_time", "node_time"):
            checked[name] = _whole_numbers(name, values)
            continue
        if name == "edge_features":
            values = values.reshape(-1, 1) if len(shape) == 1 else values
            widths = {"edge_dim": int(values.shape[1]), "edge_dtype": files.row_dtype(name, values)}
        _check_values(name, values)
        is_tensor = isinstance(values, torch.Tensor)
        checked[name] = files.as_numpy(values.detach().cpu()) if is_tensor else np.asarray(values)
    return checked, widths


def _check_values(name, values):
    """Look at every weight, or every feature, of edges."""
    for first, chunk in files.chunked(name, values):
        check = _check_weights if name == "edge_weight" else files.check_finite
        check(name, files.as_rows(name, chunk), first)


def _whole_numbers(name, values) -> np.ndarray:
    """`values` [n] as int64; they may be floats that are whole."""
    values = np.asarray(values)
    if values.dtype.kind != "f":
        return integers(name, values)
    bad = ~(np.abs(values) <= 1 << 53) | (values != np.rint(values))
    refuse(bad, name, values, "whole numbers are needed; of finer times give a multiple")
    return values.astype(np.int64)


def _check_weights(name, chunk, first):
    if chunk.is_complex():
        raise StoreError(f"{name} has dtype {chunk.dtype}: real numbers are needed")
    bad = ~(torch.isfinite(chunk.float()) & (chunk >= 0))
    why = "a weight says how likely an edge is drawn, so it is finite and not negative"
    refuse(bad, name, chunk, why, first)


def _check_names(names, num_nodes):
    """Raise StoreError unless there are V different names, each of one line."""
    if len(names) != num_nodes:
        raise StoreError(f"node_names has {len(names)} names: {num_nodes} are needed, one a node")
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
    records = {}
    for name, array in columns.items():
        if name == "node_names":
            (path / NAMES).write_bytes("".join(f"{line}\n" for line in array).encode())
            records[NAMES] = files.file_record(
                path / NAMES, "str", [len(array)], files.sha256_of(path / NAMES)
            )
            continue
        picked = slice(None) if name in OF_NODES or rows is None else rows
        dtype = {"edge_weight": "float32", "edge_features": array.dtype}.get(name, "int64")
        dtype = "uint8" if name == "edge_features" and array.dtype.kind == "b" else dtype
        count, step = (
            len(array) if isinstance(picked, slice) else len(picked),
            files.chunk_rows(array),
        )
        cuts = [slice(a, a + step) for a in range(0, count, step)]
        chunks = (array[cut if isinstance(picked, slice) else picked[cut]] for cut in cuts)
        shape = [count, *array.shape[1:]]
        records[f"{name}.npy"] = files.write_npy(
            path / f"{name}.npy", files.storage_dtype(dtype), shape, chunks
        )
    return records


def map_columns(path, meta) -> dict:
    """{name: tensor, or None where there is none} of the arrays in COLUMNS."""
    M, V, dtype = meta["num_edges"], meta["num_nodes"], meta.get("edge_dtype", "float32")
    if dtype not in files.DTYPES:
        raise StoreError(f"{path}: meta.json has edge_dtype = {dtype!r:.200}; rebuild the store")
    features = files.storage_dtype(dtype), [M, meta.get("edge_dim")]
    kinds = dict(zip(COLUMNS, (("float32", [M]), ("int64", [M]), features, ("int64", [V]))))
    found = dict.fromkeys(COLUMNS)
    for name, kind in kinds.items():
        if record := meta["files"].get(f"{name}.npy"):
            found[name] = files.map_npy(path, f"{name}.npy", record, *kind)
    if found["edge_features"] is not None:
        found["edge_features"] = found["edge_features"].view(getattr(torch, dtype))
    return found


def read_names(path, records) -> list[str] | None:
    """The names of nodes in a store, or None; StoreError where the file holds something else."""
    if NAMES not in records:
        return None
    file, count = files.check_size(path, NAMES, records[NAMES]), records[NAMES]["shape"][0]
    with reading(file, "; rebuild the store"):
        lines = file.read_bytes().decode().split("\n")
        if lines.pop() or len(lines) != count:
            raise ValueError(f"it does not have {count:,} whole lines")
    return lines


def out_of_order(indptr, times) -> int | None:
    """The first edge that is earlier than the one before it in its list, or None.

    Args:
        indptr: int64 [V+1], times: int64 [M], numpy arrays.
    """
    step = files.chunk_rows(times)
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
    for name in ("edge_weight", "edge_features"):
        try:
            if (values := getattr(graph, name)) is not None:
                _check_values(name, values)
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
