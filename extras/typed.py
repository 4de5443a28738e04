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

from disk.checks import check_targets
from disk.columns import (
    COLUMNS,
    EDGE_ORDER,
    EDGE_TIME,
    EDGE_TYPE,
    NODE_TIME,
    OF_EDGES,
    check_units,
    node_ids,
)
from disk.convert import (
    Rows,
    array_like,
    as_rows,
    chunked,
    column_names,
    edge_pairs,
    integers,
    part_ids,
    refuse,
    row_dtype,
    shaped,
    whole_times,
    within,
)
from disk.files import StoreError, reading
from extras import extra

ONE_GRAPH = ("indptr", "indices", "edge_types")


def flatten(given) -> dict:
    """Turn a graph given by type into arguments of `build_store` for one graph, where node_types is {name: (nodes, feature
    width or 0)}, in the order of their ids, and edge_types a list of names.

    given: the arguments of `build_store`. features {type: [V_t, F_t]} may be None or missing for a type, narrower ones
    are padded with zeros; labels are those of one type, and `split` holds ids of that type, or masks; edge columns are
    {type: [M_r, ...]}, narrower edge_features are padded too. With symmetrize the reverse of an edge has the edge's type if
    both ends are of one type, else the type `rev_NAME`. With node_time {type: [V_t]}, edges of a type without edge_time
    have the time of their source. Nodes of a type without node_time see everything, and are always seen: they have the
    latest time, their edges ALWAYS, where `always`, a mask [M] or None, is true. Times of all types are dates, or none.
    """
    by_type = _given_by_type(given)
    features = by_type.get("features", {})
    answers = "targets" if "targets" in by_type else "labels"
    labels = by_type.get(answers, {})
    node_types = given.node_types or {}
    counts = integers("node_types", [*node_types.values()])
    refuse(counts < 0, "node_types", counts, "a number of nodes is 0 or more")
    node_types = dict(zip(node_types, counts.tolist()))
    _check_names(node_types, given.edge_index)
    names = sorted(node_types, key=lambda name: features.get(name) is None)
    first = dict(zip(names, itertools.accumulate((node_types[n] for n in names), initial=0)))
    if len(labels) > 1:
        raise StoreError(f"{' and '.join(labels)} have labels: keep those of one type")
    edges = {kind: _edges(kind, node_types, pairs) for kind, pairs in given.edge_index.items()}
    sizes = node_types | {kind: pairs.shape[1] for kind, pairs in edges.items()}
    for name, values in by_type.items():
        if name not in OF_EDGES:
            if unknown := values.keys() - node_types.keys():
                raise StoreError(f"{name} of {min(unknown)}: types of nodes are {', '.join(names)}")
            continue
        different = values.keys() ^ edges.keys()
        if COLUMNS[name].timed or COLUMNS[name].wide:
            different = values.keys() - edges.keys()
        if different:
            raise StoreError(f"{name}: give it for all types of edges or none: {min(different)}")
    if given.columns.get(EDGE_ORDER.name) is True:  # counted through all types
        ends = np.cumsum([sizes[kind] for kind in edges])
        by_type[EDGE_ORDER.name] = dict(zip(edges, np.split(np.arange(ends[-1]), ends[:-1])))
    parts = _checked_columns({n: v for n, v in by_type.items() if n in COLUMNS}, sizes)
    edge_columns = {name: values for name, values in parts.items() if name in OF_EDGES}
    node_columns = {name: values for name, values in parts.items() if name not in OF_EDGES}
    if given.symmetrize:
        _add_reverses(edges, edge_columns)
    counts = [pairs.shape[1] for pairs in edges.values()]
    columns = {}
    always = None
    for name, values in node_columns.items():
        dtype = None if COLUMNS[name].timed else COLUMNS[name].dtype
        values = {kind: np.asarray(part, dtype) for kind, part in values.items()}
        rest = COLUMNS[name].elsewhere(np.concatenate([*values.values()]))
        columns[name] = _spread(name, values, first, node_types, rest)
    node_columns = node_columns.get(NODE_TIME.name, {})
    if node_columns or EDGE_TIME.name in edge_columns:
        times = edge_columns.setdefault(EDGE_TIME.name, {})
        timed = {*times} | {kind for kind in edges if kind[0] in node_columns}
        node_times = columns.get(NODE_TIME.name)
        if node_times is None:
            node_times = np.zeros(sum(node_types.values()), next(iter(times.values())).dtype)
        for kind in edges.keys() - times.keys():
            times[kind] = node_times[first[kind[0]] + edges[kind][0]]
        always = np.repeat([kind not in timed for kind in edges], counts)
    for name, values in edge_columns.items():
        columns[name] = _edge_column(COLUMNS[name], values, edges)
    columns[EDGE_TYPE.name] = np.repeat(np.arange(len(edges)), counts)
    moved = [pairs + [[first[a]], [first[b]]] for (a, _, b), pairs in edges.items()]
    tables = _tables(features, names, node_types)
    widths = {name: table.shape[1] for name, table in tables.items()}
    return {
        "node_types": {name: (node_types[name], widths.get(name, 0)) for name in names},
        "edge_types": [",".join(kind) for kind in edges],
        "edge_index": np.concatenate(moved, 1),
        "columns": columns,
        "always": always,
        "features": _joined(tables),
        "feature_names": _feature_names(features, widths, by_type.get("feature_names", {})),
        "node_names": _node_names(by_type.get("node_names"), names, node_types),
        "symmetrize": False,
        **_labels(answers, labels, given.split, first, node_types),
    }


def _given_by_type(given) -> dict:
    """Return the arguments that are given by type, {name: {type: values}}; StoreError for those of one graph."""
    names = ("features", "labels", "targets", "node_names", "feature_names", *ONE_GRAPH)
    values = given.columns | {name: getattr(given, name) for name in names}
    if isinstance(values.get(EDGE_ORDER.name), bool):  # asks for the order as given
        del values[EDGE_ORDER.name]
    by_type = {name: values for name, values in values.items() if values is not None}
    for name, values in by_type.items():
        if name in (*ONE_GRAPH, EDGE_TYPE.name):
            raise StoreError(f"{name} is not for a graph that is given by type")
        if not isinstance(values, dict):
            raise StoreError(f"{name}: {{type: values}} is needed, as edge_index is given by type")
    return by_type


def _checked_columns(columns, sizes) -> dict:
    """Convert columns {name: {type: values}} of types of `sizes` {type: edges or nodes} to arrays of times, int64 [n] or
    datetime64[us] [n], and tensors [n] or [n, D]."""
    checked = {}
    units = {}
    for name, by_type in columns.items():
        column = COLUMNS[name]
        checked[name] = {}
        for kind, values in by_type.items():
            title = f"{name} of {called(kind)}"
            if column.timed:
                part = whole_times(title, values)
                units[title] = part.dtype.kind == "M"
            else:
                part = as_rows(title, values)
            if column.wide and part.ndim == 1:
                part = part[:, None]
            checked[name][kind] = shaped(title, part, sizes[kind], *part.shape[1:])
    check_units(units)
    return checked


def called(kind) -> str:
    """Name a type of nodes, or of edges as "source,name,destination"."""
    return kind if isinstance(kind, str) else ",".join(kind)


def _labels(name, labels, split, first, node_types) -> dict:
    """Return the labels or, by this name, targets {type: those of its nodes} of one type and the split as those of one graph."""
    if not labels:
        if split:
            raise StoreError("split is of nodes with labels, and no type of nodes has any")
        return {"labels": None, "split": None}
    ((kind, values),) = labels.items()
    title = f"{name} of {kind}"
    if name == "targets":
        values = check_targets(title, values, node_types[kind])[0]
    else:
        values = integers(title, values)
    rest = np.nan if name == "targets" else -1
    joined = _spread(name, {kind: values}, first, node_types, rest)
    splits = split if isinstance(split, list) else [split or {}]
    moved = [
        {
            part: first[kind] + part_ids(f"split {part!r}", ids, len(values))
            for part, ids in one.items()
        }
        for one in splits
    ]
    return {"labels": None, name: joined, "split": moved if splits is split else moved[0]}


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
        raise StoreError(
            f"edges {','.join(kind)} join {min(unknown)}: sizes are given of {', '.join(node_types)} alone"
        )
    name = f"edges {','.join(kind)}"
    pairs = edge_pairs(name, pairs, node_types[source], node_types[destination])
    pairs = integers(name, pairs)
    for row, end in zip(pairs, (source, destination)):
        within(name, row, node_types[end], f"ids of {end}")
    return pairs


def _add_reverses(edges, columns):
    """Add the reverse of each edge to {type: edges} and {column: {type: values}}, in place, but none of a type whose
    reverses are there, as the type `rev_NAME`."""
    given = dict(edges)
    for kind, pairs in given.items():
        source, name, destination = kind
        if (destination, name.removeprefix("rev_"), source) in given and name.startswith("rev_"):
            continue
        reverse = (destination, f"rev_{name}", source)
        if reverse in given:
            _check_reverses(kind, reverse, edges)
            continue
        parts = [pairs[::-1]]
        if source == destination:
            reverse = kind
            parts = [pairs, pairs[::-1]]
        edges[reverse] = np.concatenate(parts, 1)
        rows = np.tile(np.arange(pairs.shape[1]), len(parts))
        for values in (values for values in columns.values() if kind in values):
            values[reverse] = values[kind][rows]


def _check_reverses(kind, reverse, edges):
    """Raise StoreError unless the edges of a type are the reverses of another's."""
    ends = edges[kind], edges[reverse][::-1]
    if not np.array_equal(*(pairs[:, np.lexsort(pairs)] for pairs in ends)):
        raise StoreError(
            f"symmetrize: edges {','.join(reverse)} are not the reverses of {','.join(kind)}: "
            "rename or drop one of the types"
        )


def _edge_column(column, values, kinds):
    """Join a column {type: values} in the order of the types of edges."""
    parts = [
        values[kind] if kind in values else torch.zeros(pairs.shape[1], 0, dtype=torch.uint8)
        for kind, pairs in kinds.items()
    ]
    if column.timed:
        return np.concatenate(parts)
    with reading(column.name):
        if column.wide:
            width = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, width - part.shape[1])) for part in parts]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        titles = [f"{column.name} of {called(kind)}" for kind in kinds]
        return torch.cat([_converted(*item, dtype) for item in zip(titles, parts)])


def _tables(features, names, node_types) -> dict:
    """Return the features {type: [V_t, F_t]} as arrays, of the types that have any, in the order of `names`."""
    tables = {}
    for name in filter(lambda name: features.get(name) is not None, names):
        title = f"features of {name}"
        tables[name] = shaped(title, array_like(title, features[name]), node_types[name], "F")
    return tables


def _node_names(given, names, node_types):
    """Join names of nodes {type: names} or None in the order of the types `names`; nodes without names are called by their number
    within their type. node_types: {type: V_t}."""
    if not given:
        return None
    for kind, some in given.items():
        extra(".names", "node_names").check(f"node_names of {kind}", some, node_types[kind])
    return [*itertools.chain(*(given.get(kind, range(node_types[kind])) for kind in names))]


def _feature_names(tables, widths, given):
    """Name the columns of the joined features as `given` {type: names}, or after the DataFrames among {type: table}, with the
    type where several have features; None without any. widths: {type: F_t}."""
    names = {kind: given.get(kind) or column_names(tables[kind]) for kind in widths}
    if not any(names.values()):
        return None
    if len(names) == 1:
        return next(iter(names.values()))
    return [
        ", ".join(f"{name[j]} of {kind}" for kind, name in names.items() if name and j < len(name))
        or f"column {j}"
        for j in range(max(widths.values()))
    ]


def _joined(tables):
    """Join feature tables {type: [V_t, F_t]} to one, padded to the widest; [[0]] if there are none."""
    if empty := [name for name, table in tables.items() if not table.shape[1]]:
        raise StoreError(f"features of {empty[0]} have no columns: leave them out")
    if len(tables) < 2:
        return next(iter(tables.values()), np.zeros((1, 1), np.float32))
    dtypes = (getattr(torch, row_dtype(f"features of {n}", t)) for n, t in tables.items())
    dtype = functools.reduce(torch.promote_types, dtypes)
    width = max(t.shape[1] for t in tables.values())

    def chunks():
        for name, table in tables.items():
            title = f"features of {name}"
            for first, rows in chunked(title, table):
                rows = _converted(title, as_rows(title, rows), dtype, first)
                yield pad(rows, (0, width - rows.shape[1]))

    return Rows((sum(t.shape[0] for t in tables.values()), width), dtype, chunks())


def _converted(name, rows, dtype, first=0):
    """Convert rows to the dtype that all types get; StoreError for a whole number that it would round."""
    kept = rows.to(dtype)
    if dtype.is_floating_point and not rows.is_floating_point():
        refuse(
            kept.long() != rows.long(),
            name,
            rows,
            f"{dtype}, which the values of all types are stored as, rounds it: give them in one dtype",
            first,
        )
    return kept


def _spread(name, parts, first, node_types, rest) -> np.ndarray:
    """Join {type: array [V_t] or [V_t, C]} to an array over all nodes, `rest` for those of other types."""
    some = next(iter(parts.values()))
    joined = np.full((sum(node_types.values()), *some.shape[1:]), rest, some.dtype)
    for kind, part in parts.items():
        shaped(f"{name} of {kind}", part, node_types[kind], *some.shape[1:])
        joined[first[kind] : first[kind] + len(part)] = part
    return joined


def ids_within(store, type, name, values, names):
    """Look up nodes of a type, see `GraphStore.node_ids`. names: of all nodes, in order; None: values are numbers within it."""
    first = 0
    for kind, (count, _) in store.node_types.items():
        if kind == type:
            names = names and itertools.islice(names, first, first + count)
            return first + node_ids(name, values, count, names)
        first += count
    types = ", ".join(store.node_types) or "none"
    raise StoreError(f"{name}: there is no type {type!r}; types of nodes are {types}")
