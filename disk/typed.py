"""Nodes and edges of several types as one graph: the nodes of each type have contiguous ids.

    build_store(                        # calls `flatten` where edge_index is a dict
        "typed",
        node_types={"author": 3, "paper": 5},
        edge_index={("author", "writes", "paper"): edges},      # [2, M_r], ids within their types
        features={"paper": x},                                  # authors have none
        labels={"paper": y},
        split={"train": a, "valid": b, "test": c},              # ids of papers
    )

Types with features come first: only they have rows in the feature table.
"""

import functools
import itertools

import numpy as np
import torch
from torch.nn.functional import pad

from disk import files
from disk.files import Rows, StoreError, array_like, integers, part_ids, reading, refuse, shaped

BY_TYPE = ("features", "labels", "node_time", "edge_weight", "edge_time", "edge_features")


def flatten(args):
    """Turn a graph given by type into keyword arguments of `build_store` for one graph, where node_types is {name:
    (nodes, feature width or 0)}, in the order of their ids, and edge_types a list of names.

    args: the arguments of `build_store`. features {type: [V_t, F_t]} may be None or missing for a type, narrower ones
    are padded with zeros; labels are those of one type, and `split` holds ids of that type, or masks; edge columns are
    {type: [M_r, ...]}, narrower edge_features are padded too. With symmetrize the reverse of an edge has the edge's type if
    both ends are of one type, else the type `rev_NAME`. With node_time {type: [V_t]}, edges of a type without edge_time
    have the time of their source. Nodes of a type without node_time see everything, and are always seen: they have the
    latest time, their edges ALWAYS.
    """
    node_types, edge_index = args["node_types"] or {}, args["edge_index"]
    split = args["split"]
    columns = {name: args[name] for name in BY_TYPE if args[name] is not None}
    for name, values in columns.items():
        if not isinstance(values, dict):
            raise StoreError(f"{name}: {{type: values}} is needed, as edge_index is given by type")
    features, labels, times = (columns.pop(name, {}) for name in BY_TYPE[:3])
    counts = integers("node_types", [*node_types.values()])
    refuse(counts < 0, "node_types", counts, "a number of nodes is 0 or more")
    node_types = dict(zip(node_types, counts.tolist()))
    _check_names(node_types, edge_index)
    names = sorted(node_types, key=lambda name: features.get(name) is None)
    first = dict(zip(names, itertools.accumulate((node_types[n] for n in names), initial=0)))
    for name, values in {"features": features, "labels": labels, "node_time": times}.items():
        if unknown := values.keys() - node_types.keys():
            raise StoreError(f"{name} of {min(unknown)}: types of nodes are {', '.join(names)}")
    if len(labels) > 1:
        raise StoreError(f"{' and '.join(labels)} have labels: keep those of one type")
    edges = {kind: _edges(kind, node_types, pairs) for kind, pairs in edge_index.items()}
    for name, values in columns.items():
        different = values.keys() ^ edges.keys()
        if name == "edge_time" and times:
            different = values.keys() - edges.keys()
        if different:
            raise StoreError(f"{name}: give it for all types of edges or none: {min(different)}")
    columns = {name: dict(values) for name, values in columns.items()}
    if args["symmetrize"]:
        _add_reverses(edges, columns)
    graph = dict.fromkeys([*BY_TYPE, "split"])
    if times:
        graph["node_time"] = _spread("node_time", times, first, node_types)
        own = columns.setdefault("edge_time", {})
        for kind, (sources, _) in edges.items():
            if kind in own:
                own[kind] = files.whole_times(f"edge_time of {','.join(kind)}", own[kind])
            elif kind[0] in times:
                own[kind] = graph["node_time"][first[kind[0]] + sources]
            else:
                own[kind] = np.full(len(sources), files.ALWAYS)
    for name, values in columns.items():
        graph[name] = _column(name, values, edges)
    moved = [pairs + [[first[a]], [first[b]]] for (a, _, b), pairs in edges.items()]
    graph["edge_index"] = np.concatenate(moved, 1)
    graph["edge_type"] = np.repeat(np.arange(len(moved)), [pairs.shape[1] for pairs in moved])
    graph["edge_types"] = [",".join(kind) for kind in edges]
    tables = {}
    for name in filter(lambda name: features.get(name) is not None, names):
        title = f"features of {name}"
        tables[name] = shaped(title, array_like(title, features[name]), node_types[name], "F")
    graph["features"] = _joined(tables)
    widths = {name: table.shape[1] for name, table in tables.items()}
    graph["node_types"] = {name: (node_types[name], widths.get(name, 0)) for name in names}
    if labels:
        graph["labels"] = _spread("labels", labels, first, node_types, rest=-1)
    if labels and split is not None:
        start = first[next(iter(labels))]
        ids = functools.partial(part_ids, count=len(*labels.values()))
        splits = split if isinstance(split, list) else [split]
        moved = [{p: start + ids(f"split {p!r}", v) for p, v in s.items()} for s in splits]
        graph["split"] = moved if splits is split else moved[0]
    elif split:
        raise StoreError("split is of nodes with labels, and no type of nodes has any")
    return graph


def _check_names(node_types, edge_index):
    """Raise StoreError if there are no types of edges, or for a type without a usable name."""
    if not edge_index:
        raise StoreError("edge_index is empty: there are no types of edges")
    for kind in edge_index:
        if not isinstance(kind, tuple) or len(kind) != 3:
            raise StoreError(f"edges {kind!r}: (source type, name, destination type) is needed")
    for word in (*node_types, *itertools.chain(*edge_index)):
        if not isinstance(word, str) or not word.isprintable() or not word or "," in word:
            raise StoreError(f"the type {word!r} has no name: printable text without a comma")


def _edges(kind, node_types, pairs) -> np.ndarray:
    """Check the edges of a type -> int64 [2, M_r]."""
    source, _, destination = kind
    if unknown := {source, destination} - node_types.keys():
        sizes = f"sizes are given of {', '.join(node_types)} alone"
        raise StoreError(f"edges {','.join(kind)} join {min(unknown)}: {sizes}")
    name = f"edges {','.join(kind)}"
    pairs = files.edge_pairs(name, pairs, node_types[source], node_types[destination])
    pairs = integers(name, pairs)
    for row, end in zip(pairs, (source, destination)):
        why = f"ids of {end} lie in [0, {node_types[end]})"
        refuse((row < 0) | (row >= node_types[end]), name, row, why)
    return pairs


def _add_reverses(edges, columns):
    """Add the reverse of each edge to {type: edges} and {column: {type: values}}, in place."""
    for kind, pairs in list(edges.items()):
        source, name, destination = kind
        reverse = kind if source == destination else (destination, f"rev_{name}", source)
        parts = [pairs[::-1]] if reverse != kind else [pairs, pairs[::-1]]
        if reverse != kind and reverse in edges:
            raise StoreError(f"symmetrize adds edges {','.join(reverse)}, which are there already")
        edges[reverse] = np.concatenate(parts, 1)
        for values in (values for values in columns.values() if kind in values):
            values[reverse] = torch.cat([files.as_rows("edges", values[kind])] * len(parts))


def _column(name, values, edges) -> torch.Tensor:
    """Join a column {type: values} in the order of the edges {type: pairs}."""
    with reading(name):
        rows = {f"{name} of {','.join(k)}": files.as_rows(name, values[k]) for k in edges}
        if name == "edge_features":
            rows = {n: part[:, None] if part.dim() == 1 else part for n, part in rows.items()}
            width = max(part.shape[1] for part in rows.values())
            rows = {n: pad(part, (0, width - part.shape[1])) for n, part in rows.items()}
        for (label, part), pairs in zip(rows.items(), edges.values()):
            shaped(label, part, pairs.shape[1], *part.shape[1:])
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in rows.values()))
        return torch.cat([_converted(*item, dtype) for item in rows.items()])


def _joined(tables):
    """Join feature tables {type: [V_t, F_t]} to one, padded to the widest; [[0]] if there are none."""
    if empty := [name for name, table in tables.items() if not table.shape[1]]:
        raise StoreError(f"features of {empty[0]} have no columns: leave them out")
    if len(tables) < 2:
        return next(iter(tables.values()), np.zeros((1, 1), np.float32))
    dtypes = [getattr(torch, files.row_dtype(f"features of {n}", t)) for n, t in tables.items()]
    dtype = functools.reduce(torch.promote_types, dtypes)
    width = max(t.shape[1] for t in tables.values())

    def chunks():
        for name, table in tables.items():
            title = f"features of {name}"
            for first, rows in files.chunked(title, table):
                rows = _converted(title, files.as_rows(title, rows), dtype, first)
                yield pad(rows, (0, width - rows.shape[1]))

    return Rows((sum(t.shape[0] for t in tables.values()), width), dtype, chunks())


def _converted(name, rows, dtype, first=0):
    """Convert rows to the dtype that all types get; StoreError for a whole number that it would round."""
    kept = rows.to(dtype)
    if dtype.is_floating_point and not rows.is_floating_point():
        why = f"{dtype}, which the values of all types are stored as, rounds it: give them in one dtype"
        refuse(kept.long() != rows.long(), name, rows, why, first)
    return kept


def _spread(name, values, first, node_types, rest=None) -> np.ndarray:
    """Join {type: integers [V_t] or [V_t, C]} to an array over all nodes, `rest` (None: the largest) for other types."""
    values = {kind: integers(f"{name} of {kind}", v) for kind, v in values.items()}
    if rest is None:
        rest = max((int(part.max()) for part in values.values() if part.size), default=0)
    shape = next(iter(values.values())).shape[1:]
    joined = np.full((sum(node_types.values()), *shape), rest)
    for kind, part in values.items():
        shaped(f"{name} of {kind}", part, node_types[kind], *shape)
        joined[first[kind] : first[kind] + len(part)] = part
    return joined
