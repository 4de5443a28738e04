"""The arrays of a store, and the optional columns of its edges and nodes.

    edge_weight    float32 [M]    not negative: how likely an edge is drawn, relative to the others in its list
    edge_type      uint8 or uint16 [M]  its relation, numbered from 0; each neighbour list is sorted by it
    edge_time      int64 [M]      when an edge appeared; each list, or each type's part of it, is sorted by it
    edge_features  [M, D]         of a dtype in DTYPES, for layers that see edges
    node_time      int64 [V]      the time at which a node is classified
    node_names     nodes.txt      the original names of the nodes: node i in line i + 1

V nodes and M edges of the graph, D width of the edges' features. This file needs disk/files.py, numpy and torch.
"""

import functools
from collections.abc import Iterator

import numpy as np
import torch

from disk import files
from disk.files import StoreError, integers, refuse

COLUMNS = ("edge_weight", "edge_type", "edge_time", "edge_features", "node_time")
OF_NODES = {"node_time", "node_names"}
NAMES = "nodes.txt"
MOST_TYPES = 1 << 15


def arrays_of(meta) -> dict:
    """{name: (dtype, shape)} of the arrays that a store may have, but the split, as its meta.json tells."""
    V, M, dtype = meta["num_nodes"], meta["num_edges"], meta.get("edge_dtype", "float32")
    types = meta.get("num_edge_types", 0)
    known = {"edge_dtype": files.DTYPES, "num_edge_types": range(MOST_TYPES + 1)}
    for name, value in (("edge_dtype", dtype), ("num_edge_types", types)):
        if type(value) not in (str, int) or value not in known[name]:
            raise ValueError(f"it has {name} = {value!r:.200}, which is no sane value")
    several = meta["files"]["labels.npy"]["dtype"] == "int8"  # labels a node
    return {
        "indptr": ("int64", [V + 1]),
        "indices": ("int32" if V < 1 << 31 else "int64", [M]),
        "labels": ("int8", [V, meta["num_classes"]]) if several else ("int64", [V]),
        "edge_weight": ("float32", [M]),
        "edge_type": (np.min_scalar_type(max(types - 1, 0)), [M]),
        "edge_time": ("int64", [M]),
        "edge_features": (files.storage_dtype(dtype), [M, meta.get("edge_dim")]),
        "node_time": ("int64", [V]),
    }


def types_of(meta) -> tuple[dict, list | None]:
    """({name: (nodes, width of their features)}, names of the types of edges or None) in a meta.json; ValueError where they
    are not those of its nodes and edges."""
    entries, names = meta.get("node_types", []), meta.get("edge_types")
    types = {str(name): (int(count), int(width)) for name, count, width in entries}
    counts, widths = zip(*types.values()) if types else ([meta["num_nodes"]], [1])
    named = len(types) == len(entries) and all(map(str.isprintable, [*types, *(names or [])]))
    counted = min(counts) >= 0 and sum(counts) == meta["num_nodes"]
    featured = [width > 0 for width in widths]
    first = featured == sorted(featured)[::-1]  # those with features
    if not (named and counted and first) or max(widths) > meta["feature_dim"]:
        raise ValueError(f"it has node_types = {entries!r:.200}, which are not those of its nodes")
    if names is not None and (len(names), {*map(type, names)}) != (meta["num_edge_types"], {str}):
        raise ValueError(f"it has edge_types = {names!r:.200}, which are no names of its types")
    return types, names


def check_columns(num_edges, num_nodes, node_names, columns, edge_types=None) -> tuple[dict, dict]:
    """Look at every value of the columns {name of COLUMNS: array or None}, a piece at a time; StoreError for another shape
    or dtype, NaN, infinity, a negative weight, a name that is there twice. Times may be floats that are whole, features [M].

    Returns ({name: numpy array} of those that are not None, with bfloat16 as int16, node_names as they are; what meta.json
    keeps of them: the width and dtype of edge_features, the number of types and their names).
    """
    checked, widths = {}, {}
    if edge_types is not None and columns.get("edge_type") is None:
        raise StoreError("edge_types names types, and there is no edge_type")
    for name, values in columns.items():
        if values is None:
            continue
        values, of = files.array_like(name, values), name.partition("_")[0]
        shape, count = tuple(values.shape), num_nodes if of == "node" else num_edges
        most, width = (2, ", D") if name == "edge_features" else (1, "")
        fits = shape[:1] == (count,) and len(shape) <= most and 0 not in shape[1:]
        if not fits or isinstance(values, files.Rows):
            needed = f"an array [{count}{width}] is needed, a row for each {of} that is given"
            raise StoreError(f"{name} is a {type(values).__name__} {list(shape)}: {needed}")
        if name in ("edge_time", "node_time"):
            values = np.asarray(values)
            if values.dtype.kind == "f":
                bad = ~(np.abs(values) <= 1 << 53) | (values != np.rint(values))
                why = "whole numbers are needed; of finer times give a multiple"
                refuse(bad, name, values, why)
                values = values.astype(np.int64)
            checked[name] = integers(name, values)
        elif name == "edge_type":
            values = integers(name, np.asarray(values))
            why = f"types are numbered from 0, and there are up to {MOST_TYPES:,}"
            refuse((values < 0) | (values >= MOST_TYPES), name, values, why)
            types = int(values.max(initial=0)) + 1
            if edge_types is not None:
                widths["edge_types"] = names = [*map(str, edge_types)]
                if not types <= len({*names}) == len(names):
                    needed = f"{types} different ones are needed"
                    raise StoreError(f"edge_types has {len(names)} names: {needed}")
                types = len(names)
            widths["num_edge_types"] = types
            checked[name] = values.astype(np.min_scalar_type(max(types - 1, 0)))
        else:
            if name == "edge_features":
                values = values.reshape(-1, 1) if len(shape) == 1 else values
                widths |= {"edge_dim": values.shape[1], "edge_dtype": files.row_dtype(name, values)}
            _check_values(name, values)
            tensor = isinstance(values, torch.Tensor)
            checked[name] = files.as_numpy(values.detach().cpu()) if tensor else np.asarray(values)
    if node_names is not None:
        _check_names(node_names, num_nodes)
        checked["node_names"] = node_names
    return checked, widths


def _check_values(name, values):
    """Look at every weight, or every feature, of edges."""
    for first, chunk in files.chunked(name, values):
        chunk = files.as_rows(name, chunk)
        if name == "edge_features":
            files.check_finite(name, chunk, first)
            continue
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


def write_arrays(path, arrays, rows=None) -> dict:
    """Write {name: numpy array} and node_names as files, a piece at a time -> their records for meta.json. rows: int64
    [M'], which edge of the input each stored edge is; None where the edges are stored as they came."""
    records = {}
    for name, array in arrays.items():
        if name == "node_names":
            (path / NAMES).write_bytes("".join(f"{line}\n" for line in array).encode())
            records[NAMES] = files.file_record(path / NAMES, "str", [len(array)])
            continue
        dtype = {"edge_weight": "float32"}.get(name, array.dtype)
        dtype = files.storage_dtype("uint8" if dtype == np.bool_ else dtype)
        sorted_rows = rows if name in COLUMNS and name not in OF_NODES else None
        count, step = len(array if sorted_rows is None else sorted_rows), files.chunk_rows(array)
        cuts = [slice(a, a + step) for a in range(0, count, step)]
        chunks = (array[cut if sorted_rows is None else sorted_rows[cut]] for cut in cuts)
        file, shape = f"{name}.npy", [count, *array.shape[1:]]
        records[file] = files.write_npy(path / file, dtype, shape, chunks)
    return records


def out_of_order(indptr, types, times) -> int | None:
    """The first edge that is of a smaller type than the one before it in its list, or of the same and earlier, or None;
    of indptr int64 [V+1], types and times [M], numpy arrays or None."""
    first, *second = [keys for keys in (types, times) if keys is not None] or [np.empty(0)]
    step = files.chunk_rows(first)
    for a in range(0, max(len(first) - 1, 0), step):
        chunk, *then = (keys[a : a + step + 1] for keys in (first, *second))
        wrong = chunk[1:] < chunk[:-1]
        for keys in then:
            wrong |= (chunk[1:] == chunk[:-1]) & (keys[1:] < keys[:-1])
        falls = np.flatnonzero(wrong) + a + 1
        # those where no list begins
        falls = falls[indptr[np.searchsorted(indptr, falls)] != falls]
        if len(falls):
            return int(falls[0])
    return None


def column_checks(graph) -> Iterator[tuple]:
    """(file, function that raises StoreError where it is wrong) of the columns of an open store."""

    arrays = graph.indptr, graph.edge_type, graph.edge_time
    indptr, types, times = (None if array is None else array.numpy() for array in arrays)

    def in_order(how, *keys):
        if types is not None:
            why = f"meta.json tells of {graph.num_edge_types}"
            refuse(types >= graph.num_edge_types, "edge_type", types, why)
        if (edge := out_of_order(indptr, *keys)) is not None:
            raise StoreError(f"edge {edge} is {how} than the one before it in its list")

    for name in ("edge_weight", "edge_features"):
        if (values := getattr(graph, name)) is not None:
            yield f"{name}.npy", functools.partial(_check_values, name, values)
    yield "edge_type.npy", functools.partial(in_order, "of a smaller type", types, None)
    if times is not None:
        yield "edge_time.npy", functools.partial(in_order, "earlier", types, times)


def described_types(node_types) -> str:
    """The types of nodes in words, in the order of their ids."""
    of = node_types.items()
    return ", ".join(f"{count:,} {name} ({width or 'no'} features)" for name, (count, width) in of)


def types_called(name, names) -> list[int]:
    """The numbers of the types of edges, such as "user,buys,item", with this name or this middle."""
    return [i for i, kind in enumerate(names) if name in (kind, *kind.split(",")[1:2])]


def described(graph) -> str:
    """What edges and nodes carry, in words."""
    words = ["weight"] if graph.edge_weight is not None else []
    if graph.edge_type is not None:
        names = f" ({'; '.join(graph.edge_types)})" if graph.edge_types else ""
        words.append(f"{graph.num_edge_types} types{names}")
    if graph.edge_features is not None:
        words.append(f"features {graph.edge_dim} x {graph.meta['edge_dtype']}")
    for name, times in (("time", graph.edge_time), ("nodes' time", graph.node_time)):
        if times is not None:
            first, last = map(int, torch.aminmax(times)) if len(times) else (0, 0)
            words.append(f"{name} {first} to {last}")
    return ", ".join(words) or "none"
