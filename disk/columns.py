"""The optional columns of a store's edges and nodes, each declared once in COLUMNS.

    arrays, meta = check_columns({"edge_weight": w}, edges, None)      # before they are written
    records = write_arrays(folder, arrays)                                          # edge_weight.npy

A column is an argument of `build_store`, an attribute of `GraphStore`, NAME.npy in a store, an array of .npz files, of PyG
and DGL graphs under any of its aliases, and a flag of `store.py build` for tables. Sorting, mirroring and dropping edges
takes all columns of edges along. What a run does with a column is said by `use` of the file that COLUMNS of extras/__init__.py names.

The names of nodes are in extras/names.py. V nodes and M edges of the graph, D
width of the edges' features. This file needs disk/files.py, disk/convert.py, numpy and torch.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from disk.convert import (
    Rows,
    array_like,
    as_numpy,
    as_rows,
    check_finite,
    chunk_rows,
    chunked,
    integers,
    refuse,
    row_dtype,
    whole_times,
    within,
)
from disk.files import StoreError, storage_dtype, write_npy

NAMES = "nodes.txt"
MOST_TYPES = 1 << 15
ALWAYS = -(1 << 63)  # the time of an edge that is seen at all times; cannot be given


# ---- checks: (name for messages, values) -> (numpy array, its entries for meta.json); StoreError for invalid values


def check_weights(name, weights):
    """Refuse weights that float32 cannot hold, which they are stored as, or that are negative."""
    for first, chunk in chunked(name, weights):
        chunk = as_rows(name, chunk)
        if chunk.is_complex():
            raise StoreError(f"{name} has dtype {chunk.dtype}: real numbers are needed")
        exact = chunk.double()  # torch compares no uint16, uint32 and uint64
        kept = chunk.float()
        bad = ~(torch.isfinite(kept) & (exact >= 0)) | (kept == 0) & (exact > 0)
        refuse(
            bad,
            name,
            chunk,
            "a weight says how likely an edge is drawn: float32 must hold it, finite and positive or 0",
            first,
        )
    if isinstance(weights, torch.Tensor):
        weights = weights.float()  # numpy has no bfloat16
    return np.asarray(weights), {}


def check_types(name, types):
    """Refuse what is no number of a type; num_edge_types is the largest one + 1."""
    types = integers(name, types)
    within(name, types, MOST_TYPES, "numbers of types")
    count = int(types.max(initial=0)) + 1
    return types.astype(types_dtype(count)), {"num_edge_types": count}


def check_times(name, times):
    """Refuse times that are neither dates nor whole numbers, which may be written as floats; time_unit is "us" for dates."""
    times = whole_times(name, times)
    return times.view(np.int64), {"time_unit": "us"} if times.dtype.kind == "M" else {}


def check_features(name, rows):
    """Refuse NaN, infinity and dtypes that are not in DTYPES; [M] is taken as [M, 1]. bfloat16 becomes int16."""
    rows = rows.reshape(-1, 1) if len(rows.shape) == 1 else rows
    meta = {"edge_dim": rows.shape[1], "edge_dtype": row_dtype(name, rows)}
    for first, chunk in chunked(name, rows):
        check_finite(name, as_rows(name, chunk), first)
    return as_numpy(rows) if isinstance(rows, torch.Tensor) else np.asarray(rows), meta


def check_order(name, numbers):
    """Refuse what are no whole numbers."""
    return integers(name, numbers), {}


def latest(times):
    """Return the latest of some times, 0 of none."""
    return times.max() if times.size else 0


# ---- what `GraphStore` and the log say about a column of an open graph


def described_times(name, times, unit=None) -> str:
    """Describe the span of some times, as "time 0 to 99", or of dates, whose unit is "us"."""
    if not len(times):
        return f"{name} 0 to 0"
    return f"{name} {span_of(*map(int, torch.aminmax(times)), unit)}"


def span_of(first, last, unit) -> str:
    """Write the first and the last of some times, see `described_times`."""
    words = []
    for time in (first, last):
        word = str(np.datetime64(time, unit)).partition(".")[0] if unit else str(time)
        words.append("-inf" if time == ALWAYS else word)
    return " to ".join(words)


def described_edge_types(graph) -> str:
    """Describe the types of edges, as "2 types (cites; writes)"."""
    names = f" ({'; '.join(graph.edge_types)})" if graph.edge_types else ""
    return f"{graph.num_edge_types} types{names}"


def types_dtype(count) -> np.dtype:
    """Return the dtype of the numbers of `count` types."""
    return np.min_scalar_type(max(count - 1, 0))


# ---- the columns


USAGE = {  # what the flag of a column takes, and its help, by what the column is of
    "edge": (
        "COLUMN",
        "tables: an edge column (name, or number from 1), or a file with a row per edge",
    ),
    "node": ("FILE", "tables: a row per node"),
}


@dataclass(frozen=True)
class Column:
    """A column of a store. Adding one takes a record in COLUMNS and whatever uses it."""

    name: str  # argument of build_store, attribute of GraphStore, NAME.npy
    _: KW_ONLY
    of: str  # "edge" or "node": it has a row for each
    check: Callable  # see above
    # names of its array in .npz files, PyG and, after "edata.", DGL; those of an earlier column are that one's
    aliases: tuple
    # of `store.py build` for tables, with underscores as an argument of sources.prepare.build; None: no data of a run,
    # but numbers of the edges, which a build is asked to keep by NAME=True
    flag: str | None
    describe: Callable  # of an open graph -> words for the log
    dtype: str | None = None  # of the file; None: that of the checked array
    takes: tuple | None = None  # metavar and help of the flag; None: as in USAGE
    cells: type = float  # of tables; those of str identify, and are numbered if they are text
    wide: bool = False  # whether its rows are vectors: [M, D] or [V, D]
    # of nodes, which need it: its values [n] of some types -> that of nodes of types without it
    elsewhere: Callable | None = None

    @property
    def timed(self):
        """Whether it holds times: whole numbers or dates."""
        return self.check is check_times

    @property
    def asked(self):
        """True for the numbers of edges, see `flag`."""
        return self.flag is None

    def usage(self):
        """Return the metavar and the help of its flag."""
        return self.takes or USAGE[self.of]

    def checked(self, values, rows):
        """Check what a person gives for `rows` edges or nodes -> see `check`."""
        values = array_like(self.name, values)
        shape = tuple(values.shape)
        if (
            isinstance(values, Rows)
            or shape[:1] != (rows,)
            or len(shape) > 1 + self.wide
            or 0 in shape[1:]
        ):
            width = ", D" if self.wide else ""
            raise StoreError(
                f"{self.name} is a {type(values).__name__} {[*shape]}: "
                f"an array [{rows}{width}] is needed, a row for each {self.of}"
            )
        return self.check(self.name, values)


EDGE_WEIGHT = Column(  # how likely an edge is drawn, relative to the others in its list
    "edge_weight",
    of="edge",
    check=check_weights,
    dtype="float32",
    aliases=("edge_weight", "edata.weight", "edata.edge_weight", "edata.w"),
    flag="weights",
    describe=lambda graph: "weight",
)
EDGE_TYPE = Column(  # its relation, numbered from 0; each neighbour list is sorted by it
    "edge_type",
    of="edge",
    check=check_types,
    aliases=("edge_type", "edata.edge_type", "edata.etype", "edata._TYPE"),
    flag="types",
    cells=str,
    describe=described_edge_types,
)
EDGE_TIME = Column(  # when an edge appeared; each list, or each type's part of it, is sorted by it
    "edge_time",  # with node_time and without edge_time it is that of the edge's source
    of="edge",
    check=check_times,
    dtype="int64",
    aliases=("edge_time", "time", "edata.time", "edata.edge_time", "edata.timestamp"),
    flag="times",
    describe=lambda graph: described_times("time", graph.edge_time, graph.meta.get("time_unit")),
)
EDGE_FEATURES = Column(  # for layers that see edges
    "edge_features",
    of="edge",
    check=check_features,
    wide=True,
    aliases=("edge_features", "edge_attr", "edata.feat", "edata.edge_features", "edata.edge_attr"),
    flag="edge_features",
    takes=("COLUMNS", f"{USAGE['edge'][1]}; several columns as a,b,c"),
    cells=list,
    describe=lambda graph: f"features {graph.edge_dim} x {graph.meta['edge_dtype']}",
)
NODE_TIME = Column(  # the time at which a node is classified
    "node_time",
    of="node",
    check=check_times,
    dtype="int64",
    aliases=("node_time", "time"),
    flag="node_times",
    takes=("FILE", "tables: a time per node"),
    describe=lambda graph: described_times(
        "nodes' time", graph.node_time, graph.meta.get("time_unit")
    ),
    elsewhere=latest,  # they see everything
)
EDGE_ORDER = Column(  # the number that each stored edge has in the order given
    "edge_order",
    of="edge",
    check=check_order,
    dtype="int64",
    aliases=(),
    flag=None,
    describe=lambda graph: "the order given",
)
COLUMNS = {
    column.name: column
    for column in (EDGE_WEIGHT, EDGE_TYPE, EDGE_TIME, EDGE_FEATURES, EDGE_ORDER, NODE_TIME)
}
OF_EDGES = [column.name for column in COLUMNS.values() if column.of == "edge"]


def rows_of_arrays(meta) -> dict:
    """Return how many rows the arrays have that a store may have, the split and the features aside -> {name: rows}."""
    rows = {
        "indptr": meta["num_nodes"] + 1,
        "indices": meta["num_edges"],
        "labels": meta["num_nodes"],
    }
    return rows | {name: meta[f"num_{column.of}s"] for name, column in COLUMNS.items()}


def check_columns(values, edges, edge_types):
    """Check `values` {name of a column: what a person gives, or None} of a graph with these `GivenEdges`, and the names of
    the edge types. edge_order=True asks for a column that follows from sorting.

    Returns ({name: numpy array} of those that are not None; their entries for meta.json).
    """
    checked = {}
    meta = {}
    units = {}
    for name, column in COLUMNS.items():
        value = values.get(name)
        if value is not None and not (column.asked and isinstance(value, bool)):
            checked[name], entries = column.checked(value, getattr(edges, f"num_{column.of}s"))
            meta |= entries
            if column.timed:
                units[name] = entries.get("time_unit")
    check_units(units)
    if edge_types is not None:
        if EDGE_TYPE.name not in checked:
            raise StoreError("edge_types names types, and there is no edge_type")
        names = [*edge_types]
        count = max(meta["num_edge_types"], len(names))
        meta["edge_types"] = names = check_names("edge_types", names, count)
        if not all(map(str.isprintable, names)):
            raise StoreError(f"edge_types {names}: names of printable text are needed")
        meta["num_edge_types"] = count
        checked[EDGE_TYPE.name] = checked[EDGE_TYPE.name].astype(types_dtype(count), copy=False)
    return checked, meta


def check_units(units):
    """Raise StoreError if some times are dates and others numbers. units: {name of times: "us" for dates, or None}."""
    names = {bool(unit): name for name, unit in reversed(units.items())}  # the first of each
    if len(names) > 1:
        raise StoreError(
            f"{names[True]} holds dates and {names[False]} numbers: "
            "give both as dates, or both as whole numbers in one unit"
        )


def check_names(what, names, count) -> list[str]:
    """Convert names to strings; StoreError unless there are `count` different ones."""
    names = [*map(str, names)]
    if len(names) != count:
        raise StoreError(f"{what} has {len(names)} names: {count} are needed")
    for name, times in Counter(names).items():
        if times > 1:
            raise StoreError(f"{what} holds {name!r} more than once")
    return names


def order_given(store):
    """Return the numbers of the edges of a store in the order given, see `GraphStore.given_edges`; StoreError without them."""
    order = getattr(store, EDGE_ORDER.name)
    if order is None:
        raise StoreError(
            f"{store.path} does not have the order in which edges were given: "
            "build it with edge_order=True (--edge-order)"
        )
    return order


def node_ids(name, values, num_nodes, names=None) -> torch.Tensor:
    """Look up the nodes that `values` stand for; see `GraphStore.node_ids`. name: of the values, for messages. names:
    of the nodes, in order, which are read once; None: values are row numbers."""
    values = np.asarray(array_like(name, values))
    if names is None:
        if values.dtype.kind in "US":
            raise StoreError(
                f"{name} is text, and the nodes have no names: row numbers, integers, are needed"
            )
        ids = integers(name, values)
        within(name, ids, num_nodes, "node ids")
        return torch.from_numpy(ids)
    from extras import extra

    return torch.from_numpy(extra(".names", "a name of a node").find(name, values, names))


def write_arrays(path, arrays, order=None) -> dict:
    """Write {name: numpy array} to files in chunks -> their records for meta.json. order: int64 [M'], the input edge that
    each stored edge comes from; None where edges are stored in the order of the input."""
    records = {}
    for name, array in arrays.items():
        dtype = array.dtype
        if name in COLUMNS:
            dtype = COLUMNS[name].dtype or dtype
        dtype = storage_dtype("uint8" if dtype == np.bool_ else dtype)
        rows = order if name in OF_EDGES else None
        count = len(array if rows is None else rows)
        step = chunk_rows(array)
        chunks = (
            array[a : a + step] if rows is None else array.take(rows[a : a + step], 0)
            for a in range(0, count, step)
        )
        file = f"{name}.npy"
        records[file] = write_npy(path / file, dtype, [count, *array.shape[1:]], chunks)
    return records


def described_types(node_types) -> str:
    """Describe the types of nodes for a log line, in the order of their ids."""
    return ", ".join(
        f"{count:,} {name} ({width or 'no'} features)"
        for name, (count, width) in node_types.items()
    )


def types_called(name, names) -> list[int]:
    """Return the numbers of the edge types, such as "user,buys,item", with this name or this relation ("buys")."""
    return [i for i, kind in enumerate(names) if name in (kind, *kind.split(",")[1:2])]


def described(graph) -> str:
    """Describe what edges and nodes carry for a log line, times last."""
    carried = [
        column.describe(graph)
        for column in sorted(COLUMNS.values(), key=lambda column: column.timed)
        if getattr(graph, column.name) is not None
    ]
    return ", ".join(carried) or "none"


def summary(graph, part=None) -> dict:
    """Describe an open graph -> {what: words}. part: words for the part of a store that it is."""
    degrees = np.diff(graph.indptr.numpy())
    width = graph.feature_dim if graph.has_features else 0
    kept_as = graph.meta["feature_dtype"]
    kept_as += ", codes of float32" * ("feature_scale" in graph.meta)
    features = f"{width} x {kept_as}, backend {graph.meta['backend']}"
    if part:
        features += f"; {part}"
    several = " numbers a node" if graph.targets else " labels, several a node"
    classes = f"{graph.num_classes}{several * (graph.labels.dim() == 2)}"
    return {
        "nodes": f"{graph.num_nodes:,}",
        "types": described_types(graph.node_types) or "one",
        "edges": f"{graph.num_edges:,}",
        "in-degree": f"min {degrees.min()}, mean {degrees.mean():.2f}, max {degrees.max():,}",
        "features": features,
        "columns": described(graph),
        "classes": classes if graph.labelled else "no labels",
        "options": ", ".join(graph.options) or "none",
    }
