"""Write a graph as a store: its files in a directory, meta.json last.

    graph = checked(given)                        # the arguments of `build_store`; StoreError for invalid ones
    with complete_or_not_there(path, bytes_needed(graph)) as building:
        write_store(building, graph, progress)

Edges and features may be larger than memory: they are read, sorted and written in chunks.
"""

import json
import tempfile
from typing import Any, NamedTuple

import numpy as np

from disk import checks, columns, convert, files, lmdb_rows, sort
from disk.files import StoreError
from extras import extra

FORMAT = "ringblock-graph"
OPTIONS = ("symmetrize", "drop_self_loops", "drop_duplicates")
BACKENDS = {"mmap": "features.npy", "lmdb": "features.lmdb"}


class Checked(NamedTuple):
    """A graph that can be written as a store."""

    edges: checks.GivenEdges
    features: Any  # as `convert.array_like` returns them
    arrays: dict  # labels, the parts of the split and the columns, by name
    node_names: Any  # V names, or None
    meta: dict  # entries of meta.json that are known before the edges are sorted
    ordered: bool  # whether the order in which edges were given is kept


def checked(given) -> Checked:
    """Check the arguments of `build_store` for one graph; features and edges, in chunks, only as they are written."""
    # scipy has sparse matrices that are dicts
    if isinstance(given.edge_index, dict) and not convert.is_sparse(given.edge_index):
        vars(given).update(extra(".typed").flatten(given))
    elif given.node_types and not all(isinstance(of, tuple) for of in given.node_types.values()):
        raise StoreError(
            "node_types is for a graph that is given by type: give "
            "edge_index as {(source type, name, destination type): [2, M]}"
        )
    if given.backend not in BACKENDS:
        raise StoreError(
            f"backend {given.backend!r} is unknown: choose one of {', '.join(BACKENDS)}"
        )
    features = convert.array_like("features", given.features)
    rows, width, dtype = checks.check_features(features, given.feature_dtype)
    num_nodes = rows
    if given.node_types is not None:
        num_nodes = sum(nodes for nodes, _ in given.node_types.values())
    numbers = given.targets is not None
    if numbers and given.labels is not None:
        raise StoreError("labels are of classes, targets are numbers: give one of them")
    if numbers:
        labels, num_classes = checks.check_targets("targets", given.targets, num_nodes)
    else:
        labels, num_classes = checks.check_labels(given.labels, num_nodes, given.num_classes)
    labelled = numbers or given.labels is not None
    split = {} if given.split is None else given.split
    drawn = isinstance(split, dict) and not split and labelled and (numbers or labels.ndim == 1)
    if drawn:
        split = checks.drawn_nodes(labels, np.random.default_rng(0))
    node_names = given.node_names
    if node_names is not None:
        node_names = [*node_names]
        if given.node_types is None:  # else distinct within a type, see `typed.flatten`
            extra(".names", "node_names").check("node_names", node_names, num_nodes)
    split = checks.check_splits(split, labels, node_names)
    edges = checks.check_graph(given.edge_index, given.indptr, given.indices, num_nodes)
    carried, entries = columns.check_columns(given.columns, edges, given.edge_types)
    names = (
        convert.column_names(given.features) if given.feature_names is None else given.feature_names
    )
    if names is not None:
        entries["feature_names"] = columns.check_names("feature_names", names, width)
    if given.always is not None:
        carried[columns.EDGE_TIME.name][given.always] = columns.ALWAYS
    if given.node_types is not None:
        entries["node_types"] = [[name, *of] for name, of in given.node_types.items()]
    if drawn:
        entries["split"] = checks.DRAWN_NODES if numbers else checks.DRAWN
    if numbers:
        entries["targets"] = num_classes
    meta = {
        "format": FORMAT,
        "format_version": files.VERSION,
        "num_nodes": num_nodes,
        "num_edges": edges.num_edges,
        "num_classes": num_classes,
        "feature_dim": width,
        "feature_dtype": dtype,
        "backend": given.backend,
        "block_rows": _block_rows(given.block_rows, width * files.storage_dtype(dtype).itemsize),
        "options": {name: bool(getattr(given, name)) for name in OPTIONS},
        "source": json.loads(json.dumps(given.source)),
        "labelled": labelled,
        **entries,
    }
    return Checked(
        edges,
        features,
        arrays={"labels": labels, **split, **carried},
        node_names=node_names,
        meta=meta,
        ordered=given.columns.get(columns.EDGE_ORDER.name) is True,
    )


def _block_rows(asked, row_bytes) -> int:
    """Return how many rows of features an LMDB value holds: as `asked`, or with None as many as four pages hold."""
    rows = max(1, ((1 << 14) - 64) // row_bytes) if asked is None else int(asked)
    if not 1 <= rows * row_bytes < 1 << 31:
        raise StoreError(f"block_rows is {rows}: 1 or more, of less than 2 GiB, are needed")
    return rows


def bytes_needed(graph) -> int:
    """Estimate the size of a store before it is written: its nodes and features, and its edges unless some may be dropped."""
    meta = graph.meta
    row_bytes = meta["feature_dim"] * files.storage_dtype(meta["feature_dtype"]).itemsize
    rows = graph.features
    if isinstance(rows, convert.Rows) and checks.become_codes(rows, meta["feature_dtype"]):
        row_bytes *= 5  # with the float32 rows, which are written to a file first
    need = meta["num_nodes"] * 16 + rows.shape[0] * row_bytes
    options = meta["options"]
    if options["drop_self_loops"] or options["drop_duplicates"]:
        return need
    return need + (meta["num_edges"] * 4 << options["symmetrize"])


def write_store(path, graph, progress):
    """Write every file of a store, meta.json last."""
    records = _write_graph(path, graph, progress)
    names = ["indptr", "indices", *graph.arrays.keys() & {columns.EDGE_TYPE.name}]
    arrays = [np.load(path / f"{name}.npy", mmap_mode="r") for name in names]
    node_types = graph.meta.get("node_types", [["", graph.meta["num_nodes"], 0]])
    counts = {
        "num_edges": len(arrays[1]),
        "edges": checks.count_edges(*arrays, node_types=node_types),
    }
    if graph.node_names is not None:
        records[columns.NAMES] = extra(".names").write(path, graph.node_names)
    records |= _write_features(path, graph, progress)
    files.write_meta(path, graph.meta | counts, records)


def _write_graph(path, graph, progress) -> dict:
    """Write all but the features and the names of nodes, edges and their columns in the order of neighbour lists."""
    edges, options = graph.edges, graph.meta["options"]
    indptr = edges.indptr
    types = graph.arrays.get(columns.EDGE_TYPE.name)
    times = graph.arrays.get(columns.EDGE_TIME.name)
    # edges without times get those of their sources
    source_times = graph.arrays.get(columns.NODE_TIME.name) if times is None else None
    sorts = [types, times, source_times]
    as_given = edges.edge_index is None and not any(options.values())
    by = None
    if as_given and all(keys is None for keys in sorts):
        chunks = sort.checked_indices(edges.indices, edges.num_nodes, progress)
    elif isinstance(edges.indices, convert.Rows):
        raise StoreError(
            "indices given as Rows is stored as it is: there are no graph options, types and times"
        )
    else:
        if graph.arrays.keys() & columns.OF_EDGES or source_times is not None or graph.ordered:
            by = sort.SortBy(tempfile.TemporaryFile(dir=path), *sorts)
        indptr = np.zeros(edges.num_nodes + 1, np.int64)
        chunks = sort.sorted_sources(edges, indptr, options, path, by=by, progress=progress)
    dtype = "int32" if edges.num_nodes < 1 << 31 else "int64"
    file = path / "indices.npy"
    most = edges.num_edges << options["symmetrize"]
    records = {file.name: files.write_npy(file, dtype, [most], chunks)}
    written = np.load(file, mmap_mode="r")
    order = None
    if by:
        by.order.flush()
        order = np.memmap(by.order, np.int64, "r") if len(written) else np.empty(0, np.int64)
    records |= columns.write_arrays(path, {"indptr": indptr, **graph.arrays}, order)
    if source_times is not None:
        records |= columns.write_arrays(path, {columns.EDGE_TIME.name: source_times}, written)
    if graph.ordered:
        numbers = np.arange(len(written)) if order is None else order
        records |= columns.write_arrays(path, {columns.EDGE_ORDER.name: numbers})
    return records


def _write_features(path, graph, progress) -> dict:
    """Write the features -> {name of the file: its record}."""
    meta = graph.meta
    file = path / BACKENDS[meta["backend"]]
    shape = [graph.features.shape[0], meta["feature_dim"]]
    kept_as = meta["feature_dtype"]
    types = meta.get("node_types", [])
    features = graph.features
    encode = None
    if checks.become_codes(features, kept_as):
        features, scale, encode = extra(".int8", "int8").encoder(features, types, path, progress)
        meta |= {"feature_scale": scale.tolist(), "format_version": files.CODED_VERSION}
    rounded = convert.RoundedRows(*shape, types)
    rows = checks.feature_rows(features, kept_as, encode=encode, rounded=rounded, progress=progress)
    record = write_rows(file, meta, shape, rows)
    if loss := rounded.loss(meta.get("feature_names")):
        meta["rounded"] = f"features kept as {kept_as}: {loss}"
        print(meta["rounded"])
    return {file.name: record | {"largest": rounded.largest}}


def write_rows(file, meta, shape, chunks) -> dict:
    """Write chunks of feature rows as they are stored -> the file's record."""
    dtype = files.storage_dtype(meta["feature_dtype"])
    if meta["backend"] == "lmdb":
        return lmdb_rows.write_blocks(file, dtype, shape, chunks, meta["block_rows"])
    # the first row starts at a disk block
    return files.write_npy(file, dtype, shape, chunks, head=4096)
