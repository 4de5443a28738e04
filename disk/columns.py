"""The arrays of a store, and the optional columns of its edges and nodes.

    edge_weight    float32 [M]    not negative: how likely an edge is drawn, relative to the others in its list
    edge_type      uint8 or uint16 [M]  its relation, numbered from 0; each neighbour list is sorted by it
    edge_time      int64 [M]      when an edge appeared; each list, or each type's part of it, is sorted by it. With
                                  node_time and no edge_time it is that of the edge's source
    edge_features  [M, D]         of a dtype in DTYPES, for layers that see edges
    node_time      int64 [V]      the time at which a node is classified
    node_names     nodes.txt      the original names of the nodes: node i in line i + 1

V nodes and M edges of the graph, D width of the edges' features. This file needs disk/files.py, numpy and torch.
"""

import numpy as np
import torch

from disk import files
from disk.files import StoreError, integers, refuse

OF_EDGES = ("edge_weight", "edge_type", "edge_time", "edge_features")
COLUMNS = (*OF_EDGES, "node_time")
NAMES = "nodes.txt"
MOST_TYPES = 1 << 15


def arrays_of(meta) -> dict:
    """Return {name: (dtype, shape)} that meta.json implies for the arrays a store may have, the split aside."""
    V, M, dtype = meta["num_nodes"], meta["num_edges"], meta.get("edge_dtype", "float32")
    types = meta.get("num_edge_types", 0)
    multi_label = meta["files"]["labels.npy"]["dtype"] == "int8"
    return {
        "indptr": ("int64", [V + 1]),
        "indices": ("int32" if V < 1 << 31 else "int64", [M]),
        "labels": ("int8", [V, meta["num_classes"]]) if multi_label else ("int64", [V]),
        "edge_weight": ("float32", [M]),
        "edge_type": (np.min_scalar_type(max(types - 1, 0)), [M]),
        "edge_time": ("int64", [M]),
        "edge_features": (files.storage_dtype(dtype), [M, meta.get("edge_dim")]),
        "node_time": ("int64", [V]),
    }


def check_columns(num_edges, num_nodes, node_names, columns, edge_types=None) -> tuple[dict, dict]:
    """Check every value of `columns` {name of COLUMNS: array or None} in chunks; StoreError for a wrong shape or dtype,
    NaN, infinity, a negative weight or a repeated node name. Times may be whole floats, edge_features may be [M].

    Returns ({name: numpy array} of those that are not None, bfloat16 as int16, node_names unchanged; their entries for
    meta.json: edge_dim and edge_dtype of edge_features, num_edge_types and edge_types).
    """
    checked, meta = {}, {}
    if edge_types is not None and columns.get("edge_type") is None:
        raise StoreError("edge_types names types, and there is no edge_type")
    for name, values in columns.items():
        if values is None:
            continue
        values, item = files.array_like(name, values), name.partition("_")[0]
        shape, count = tuple(values.shape), num_nodes if item == "node" else num_edges
        max_dims, width = (2, ", D") if name == "edge_features" else (1, "")
        fits = shape[:1] == (count,) and len(shape) <= max_dims and 0 not in shape[1:]
        if not fits or isinstance(values, files.Rows):
            needed = f"an array [{count}{width}] is needed, a row for each {item}"
            raise StoreError(f"{name} is a {type(values).__name__} {list(shape)}: {needed}")
        if name in ("edge_time", "node_time"):
            checked[name] = files.whole_times(name, values)
        elif name == "edge_type":
            values = integers(name, values)
            why = f"types are numbered from 0, and there are up to {MOST_TYPES:,}"
            refuse((values < 0) | (values >= MOST_TYPES), name, values, why)
            types = int(values.max(initial=0)) + 1
            if edge_types is not None:
                meta["edge_types"] = names = [*map(str, edge_types)]
                distinct = types <= len({*names}) == len(names)
                if not (distinct and all(map(str.isprintable, names))):
                    needed = f"{types} different names of printable text are needed"
                    raise StoreError(f"edge_types {names}: {needed}")
                types = len(names)
            meta["num_edge_types"] = types
            checked[name] = values.astype(np.min_scalar_type(max(types - 1, 0)))
        else:
            if name == "edge_features":
                values = values.reshape(-1, 1) if len(shape) == 1 else values
                meta |= {"edge_dim": values.shape[1], "edge_dtype": files.row_dtype(name, values)}
            _check_values(name, values)
            tensor = isinstance(values, torch.Tensor)
            if tensor and name == "edge_weight":
                values = values.float()  # numpy has no bfloat16
            checked[name] = files.as_numpy(values.detach().cpu()) if tensor else np.asarray(values)
    if node_names is not None:
        _check_names(node_names, num_nodes)
        checked["node_names"] = node_names
    return checked, meta


def _check_values(name, values):
    """Check every edge weight, or every edge feature, in chunks."""
    for first, chunk in files.chunked(name, values):
        chunk = files.as_rows(name, chunk)
        if name == "edge_features":
            files.check_finite(name, chunk, first)
            continue
        if chunk.is_complex():
            raise StoreError(f"{name} has dtype {chunk.dtype}: real numbers are needed")
        exact, kept = chunk.double(), chunk.float()  # torch compares no uint16, uint32 and uint64
        bad = ~(torch.isfinite(kept) & (exact >= 0)) | (kept == 0) & (exact > 0)
        why = "a weight says how likely an edge is drawn: float32 must hold it, finite and positive or 0"
        refuse(bad, name, chunk, why, first)


def _check_names(names, num_nodes):
    """Raise StoreError unless there are V distinct names of one line each."""
    if len(names) != num_nodes:
        raise StoreError(f"node_names has {len(names)} names: {num_nodes} are needed, one a node")
    seen = set()
    for node, name in enumerate(map(str, names)):
        if name in seen:
            raise StoreError(f"node_names holds {name!r} more than once")
        if "\n" in name or "\r" in name or name != name.encode(errors="replace").decode():
            raise StoreError(f"node_names: name {node}, {name!r}, is not one line of text")
        seen.add(name)


def read_names(path, record):
    """Yield the names of the nodes of the store at `path`, in order; StoreError if the file is damaged. record: its entry
    in meta.json."""
    file, count = files.check_size(path, NAMES, record), 0
    lacks = f"it does not have {record['shape'][0]:,} whole lines"
    with files.reading(file, "; rebuild the store"):
        with open(file, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                if not line.endswith("\n"):
                    raise ValueError(lacks)
                count += 1
                yield line[:-1]
        if count != record["shape"][0]:
            raise ValueError(lacks)


def node_ids(name, values, num_nodes, names=None) -> torch.Tensor:
    """Look up the nodes that `values` stand for; see `GraphStore.node_ids`. name: of the values, for messages. names:
    of the nodes, in order, which are read once; None: values are row numbers."""
    values = np.asarray(files.array_like(name, values))
    if names is None:
        if values.dtype.kind in "US":
            why = "the nodes have no names: row numbers, integers, are needed"
            raise StoreError(f"{name} is text, and {why}")
        ids = integers(name, values)
        bad = ids[(ids < 0) | (ids >= num_nodes)]
        if bad.size:
            raise StoreError(f"{name} has node {bad[0]}: node ids lie in [0, {num_nodes})")
        return torch.from_numpy(ids)
    if values.dtype.kind == "S":
        with files.reading(name):
            values = np.char.decode(values, "utf-8")
    if values.size and values.dtype.kind not in "iuU":
        needed = "names of nodes, text or integers, are needed"
        raise StoreError(f"{name} has dtype {values.dtype}: {needed}")
    distinct, which = np.unique(values, return_inverse=True)
    rows, first = dict.fromkeys(map(str, distinct.tolist()), -1), []
    for row, node in enumerate(names):
        if node in rows:
            rows[node] = row
        if row < 3:
            first.append(repr(node))
    ids = np.array([*rows.values()], np.int64)[which].reshape(values.shape)
    if (ids < 0).any():
        unknown = str(values[ids < 0][0])
        such = f"names of nodes are such as {', '.join(first)} (nodes.txt)"
        raise StoreError(f"{name} has node {unknown!r}: {such}")
    return torch.from_numpy(np.asarray(ids))


def write_arrays(path, arrays, rows=None) -> dict:
    """Write {name: numpy array} and node_names to files in chunks -> their records for meta.json. rows: int64 [M'], the
    input edge that each stored edge comes from; None where edges are stored in the order of the input."""
    records = {}
    for name, array in arrays.items():
        if name == "node_names":
            (path / NAMES).write_bytes("".join(f"{line}\n" for line in array).encode())
            whole = all(type(name) in (int, np.int64) for name in array)
            dtype = "int64" if whole and np.asarray(array).dtype.kind == "i" else "str"
            records[NAMES] = files.file_record(path / NAMES, dtype, [len(array)])
            continue
        dtype = {"edge_weight": "float32"}.get(name, array.dtype)
        dtype = files.storage_dtype("uint8" if dtype == np.bool_ else dtype)
        at = rows if name in OF_EDGES else None
        count, step = len(array if at is None else at), files.chunk_rows(array)
        cuts = [slice(a, a + step) for a in range(0, count, step)]
        chunks = (array[cut] if at is None else array.take(at[cut], 0) for cut in cuts)
        file, shape = f"{name}.npy", [count, *array.shape[1:]]
        records[file] = files.write_npy(path / file, dtype, shape, chunks)
    return records


def out_of_order(indptr, types, times) -> int | None:
    """Return the first edge that breaks the order by type, then time, within its neighbour list, or None. indptr: int64
    [V+1]; types, times: [M] numpy arrays or None."""
    first, *second = [keys for keys in (types, times) if keys is not None] or [np.empty(0)]
    step = files.chunk_rows(first)
    for a in range(0, max(len(first) - 1, 0), step):
        chunk, *then = (keys[a : a + step + 1] for keys in (first, *second))
        wrong = chunk[1:] < chunk[:-1]
        for keys in then:
            wrong |= (chunk[1:] == chunk[:-1]) & (keys[1:] < keys[:-1])
        falls = np.flatnonzero(wrong) + a + 1
        # except where a new list begins
        falls = falls[indptr[np.searchsorted(indptr, falls)] != falls]
        if len(falls):
            return int(falls[0])
    return None


def described_types(node_types) -> str:
    """Describe the types of nodes for a log line, in the order of their ids."""
    types = node_types.items()
    return ", ".join(f"{n:,} {name} ({width or 'no'} features)" for name, (n, width) in types)


def types_called(name, names) -> list[int]:
    """Return the numbers of the edge types, such as "user,buys,item", with this name or this relation ("buys")."""
    return [i for i, kind in enumerate(names) if name in (kind, *kind.split(",")[1:2])]


def described(graph) -> str:
    """Describe what edges and nodes carry for a log line."""
    words = ["weight"] if graph.edge_weight is not None else []
    if graph.edge_type is not None:
        names = f" ({'; '.join(graph.edge_types)})" if graph.edge_types else ""
        words.append(f"{graph.num_edge_types} types{names}")
    if graph.edge_features is not None:
        words.append(f"features {graph.edge_dim} x {graph.meta['edge_dtype']}")
    for name, times in (("time", graph.edge_time), ("nodes' time", graph.node_time)):
        if times is not None:
            first, last = map(int, torch.aminmax(times)) if len(times) else (0, 0)
            first = "-inf" if first == files.ALWAYS else first
            words.append(f"{name} {first} to {last}")
    return ", ".join(words) or "none"
