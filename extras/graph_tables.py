"""Tables of nodes and edges -> arrays: what each column holds, and which nodes it refers to.

    x, nodes = features("x.csv.gz", folder)                   # float32 [V, F]; a column of ids names the nodes
    y = node_column("y.csv", nodes, "labels")                    # float64 [V] or [V, C], NaN: no label; or text [V]
    edge_index, more = edges("edges.csv", folder, nodes, {"edge_weight": ["w"]})        # int64 [2, M]

Rows of features are the nodes 0 to V-1, unless there is a column of ids, wherever it stands (`_id_column`): a permutation
of 0 to V-1 reorders the rows, other ids and text name the nodes in row order. A table of edges names its ends
(`_end_columns`); another table of the same edges is joined to it by its ends, by ids of edges, or by row (`edge_rows`). Each
function prints how it read the columns.
"""

import functools
import os
import re
import tempfile
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

from disk.columns import COLUMNS, EDGE_TIME, EDGE_TYPE, OF_EDGES
from disk.convert import DATE, SAMPLED, RoundedRows, spool
from disk.files import StoreError, plural
from extras.tables import (
    ID,
    NUMBER,
    TIME,
    digits,
    joined,
    kind_of,
    meanings,
    opened,
    stacked,
    trimmed,
    whole_of,
    words_of,
    written,
)
from sources.arrays import MISSING, short

# names of columns, in lower case, that hold a split
SPLIT = re.compile(
    "(is)?(train|val|valid|validation|test|dev)(ing)?(mask|set|idx)?|(cv)?fold|split|subset"
)
ANSWERS = "labels", "targets"
SEVERAL = "|"  # between several values in a cell of text
MOST_VALUES = 100  # of a column of text that becomes features
YEAR_2000 = np.datetime64("2000", "us")
DECADE = np.timedelta64(315_569_520, "s")
LARGE = 10  # mean absolute value of a feature, from which on training is slow
HEADER = "; a header is known by names such as id, source, destination and label"


def read_tables(sources, tables, columns, folder, ignore):
    """Read the arrays of a graph from tables -> ({name as in an .npz file: array}, with the names in `edge_types` if types
    are text; {type of nodes: its `Nodes`}).

    Args:
        sources: {type of nodes, or "source,relation,destination" of edges: file of a table}; for a graph of one type
            {"": the table of edges}.
        tables: {name of an array: file of a table}, of several types TYPE=FILE; of one type "features" is required.
        columns: {name of a column of a store: as in `tables`, or columns of the tables of edges}.
        folder: for files without a name that large arrays are mapped from.
        ignore: names of columns to leave out, of any of the tables.
    """
    edge_tables = {tuple(kind.split(",")): file for kind, file in sources.items() if "," in kind}
    node_tables = {kind: file for kind, file in sources.items() if "," not in kind}
    if "" in sources:
        edge_tables = {("", "", ""): sources[""]}
        if "features" not in tables:
            with opened(sources[""]):  # refuses what is no table
                how = "features are needed, a line for each node"
                raise StoreError(f"{sources['']} holds edges alone: {how}, as --features FILE")
        node_tables[""] = tables.pop("features")
    for kind in edge_tables or [()]:
        if len(kind) != 3 or not {*kind[::2]} <= node_tables.keys():
            problem = f"{','.join(kind) or 'edges'}: TYPE,RELATION,TYPE=FILE is needed"
            raise StoreError(f"{problem}, of types with a table: {', '.join(node_tables)}")
    ignore = dict.fromkeys(ignore, 0)
    edge_columns = {name: source for name, source in columns.items() if name in OF_EDGES}
    tables_by_name = {
        name: _type_and_file(name, source, node_tables)
        for name, source in (tables | columns).items()
        if name not in OF_EDGES
    }
    arrays = {}
    nodes = {}

    def add(kind, values):
        suffix = f":{kind}" if kind else ""
        arrays.update({name + suffix: value for name, value in values.items()})

    for kind, file in node_tables.items():
        others = [other for of, other in tables_by_name.values() if of == kind]
        pairs = [edges for ends, edges in edge_tables.items() if {*ends[::2]} == {kind}]
        called = {kind} | _called_elsewhere(others, pairs, ignore)
        x, nodes[kind] = features(file, folder, ignore, called, kind)
        add(kind, {"features": x, "num_nodes": nodes[kind].count})
    for name, (kind, file) in tables_by_name.items():
        add(kind, {name: node_column(file, nodes[kind], name, ignore)})
    used = set()
    for kind, file in edge_tables.items():
        ends = Ends(nodes[kind[0]], nodes[kind[2]])
        found = _columns_there(file, edge_columns, ends) if kind[0] else edge_columns
        used |= found.keys()
        add(",".join(kind).strip(","), _edges_and_columns(file, folder, ends, found, ignore))
    if unused := sorted(edge_columns.keys() - used):
        where = ", ".join(edge_tables.values())
        raise StoreError(f"none of {where} has the column {edge_columns[unused[0]]}")
    if unused := [name for name, tables in ignore.items() if not tables]:
        raise StoreError(f"ignore: none of the tables has a column {unused[0]!r}")
    return arrays, nodes


def _type_and_file(name, source, types):
    """Split TYPE=FILE, the table of an array of nodes -> (type, file); where nodes have no types, ("", file)."""
    kind, equals, file = ("", "=", source) if "" in types else str(source).partition("=")
    if kind not in types or not equals:
        raise StoreError(f"{name}: {source} is not TYPE=FILE, with a type among {', '.join(types)}")
    return kind, file


def _columns_there(file, columns, ends):
    """Return those of `columns` {name: file or names of columns} that a table of edges has, and those that are files."""
    with opened(file, heads=ends.heads) as table:
        names = table.names or ()
    return {
        name: source
        for name, source in columns.items()
        if os.path.isfile(source) or {*_words(name, source)} <= {*names}
    }


def _words(name, source) -> list[str]:
    return source.split(",") if COLUMNS[name].wide else [source]


def _edges_and_columns(file, folder, ends, columns, ignore):
    """Read a table of edges and its `columns` {name: file of a table, or columns of this one} -> {name of an array: values}."""
    own_files = {name: source for name, source in columns.items() if os.path.isfile(source)}
    keep = {name: _words(name, source) for name, source in columns.items()}
    ids = set()
    for name, source in own_files.items():
        keep[name] = []
        with opened(source, ignore, ends.heads) as table:
            ids |= {table.names[j] for j in _edge_ids(table)}
    pairs, kept = edges(file, folder, ends, keep, ignore, ids=ids)
    keys = Keys(file, ends, pairs, kept.pop("ids", {}))
    for name, source in own_files.items():
        kept |= edge_rows(source, folder, name, ignore, keys)
    return {"edge_index": pairs, **kept}


def _called_elsewhere(node_tables, edge_tables, ignore) -> set[str]:
    """Return the names by which other tables may call the ids of the nodes: names of columns of the tables of nodes, and
    what the names of two ends have in common."""
    called = set()
    for file in node_tables:
        with opened(file, ignore) as table:
            names = table.names or ()
            ids = {names[j] for j in table.named("id")}
            called |= ids or {name for name in names if not meanings(name)}
    for file in edge_tables:
        with opened(file, ignore) as table:
            if not table.named("source"):
                called |= {" ".join(stem) for stem, _ in _twins(table)}
    return called


class Nodes:
    """How tables refer to the V nodes, the rows of the feature table `source`: by number, or by `names` [V], integers
    or strings. by_row: whether row i of a table without ids is node i. type: of the nodes, "" if there is one. id_name: of the
    column of ids, or None. feature_names: of the columns, or None; class_names: of the columns of several labels, or None."""

    type = ""
    id_name = feature_names = class_names = None

    def __init__(self, count, source, names=None, by_row=True):
        self.count = count
        self.source = source
        self.names = names
        self.by_row = by_row
        self._numbers = {name: i for i, name in enumerate(names or ())}
        self.kind = str if names and type(names[0]) is str else ID  # of cells that refer to nodes

    @functools.cached_property
    def _trimmed(self):
        return {name.strip(): i for name, i in self._numbers.items()}

    def find(self, cell) -> int | None:
        """Return the number of the node that a cell of `Table.sample` may refer to; None if there is none."""
        if self.kind is str:
            return self._trimmed.get(cell)
        number = whole_of(cell)
        if self.names:
            return self._numbers.get(number)
        return number if number is not None and 0 <= number < self.count else None

    def have(self, cells) -> bool:
        """Whether all cells of `Table.sample` may refer to nodes."""
        return None not in map(self.find, cells)

    def heads(self, rows) -> bool:
        """Whether the first of some rows of a table is its header: columns below hold names of nodes alone, where it has
        no such names, or it has the name of the column of ids."""
        first, *rest = rows
        if self.kind is not str or any(a in b for a, b in zip(first, zip(*rest))):
            return False
        are_nodes = [self.have(column) for column in zip(*rest)]
        named = [cell for cell, of in zip(first, are_nodes) if of and self.have([cell])]
        return (any(are_nodes) or self.id_name in first) and not named

    def numbers(self, table, first, cells) -> np.ndarray:
        """Look up the nodes that cells of `kind` refer to -> int64 [r]. first: row of the first cell, for messages."""
        cells = cells.to_pylist() if self.kind is str else cells
        nodes = cells
        if self.names:
            nodes = np.array([self._numbers.get(name, -1) for name in cells], np.int64)
        bad = (nodes < 0) | (nodes >= self.count)
        if bad.any():
            row = int(bad.argmax())
            has = f"{self.source} has {self.count:,}{'' if self.names else ', from 0'}"
            hint = "" if table.names or first + row else HEADER
            cell = short(repr(cells[row]) if self.kind is str else str(cells[row]))
            raise table.error(first + row, f"there is no {self.type or 'node'} {cell}: {has}{hint}")
        return nodes


class Ends(NamedTuple):
    """The nodes that the two ends of edges are."""

    source: Nodes
    destination: Nodes

    def heads(self, rows) -> bool:
        """Whether the first of some rows of a table is its header, see `Nodes.heads`."""
        return all(nodes.heads(rows) for nodes in self)


def _check_header(table, columns):
    """Refuse a header whose cells are names of nodes: it may be a row. columns: {column: `Nodes`}."""
    if table.names and all(
        nodes.kind is str and nodes.have([table.names[j]]) for j, nodes in columns.items()
    ):
        header = short(",".join(table.names))
        raise StoreError(f"{table.name}: its header {header} names nodes: put one above it")


def _id_column(table, ids, things="nodes") -> int | None:
    """Choose among the columns that may hold the ids of the rows: the only one whose cells differ in the first rows, if there
    are several; StoreError for two of these, or for none."""
    if len(ids) < 2:
        return next(iter(ids), None)
    distinct = [j for j in ids if table.identifies(j)]
    if len(distinct) == 1:
        return distinct[0]
    both = " and ".join(map(table.column, (distinct or ids)[:2]))
    first = (distinct or ids)[0]
    why = f"if {table.column(first)} holds none, drop it{table.flag(first)}"
    why = why if distinct else "both repeat"
    raise StoreError(f"{table.name}: {both} look like ids of the {things}: {why}")


def features(file, folder, ignore=(), called=(), kind=""):
    """Spool a table with one row per node to a file in `folder` -> (memmap float32 [V, F], its `Nodes`).

    A column of ids is not a feature, wherever it stands, see `_node_column`. A first column of another name that holds the
    numbers 0 to V-1 or 1 to V in any order is refused. A column of lists is as many features as a list has numbers, one of text
    as it has values (`_categories`); dates are decades since 2000. kind: name of the nodes' type, which may have no features,
    None.
    """

    def heads(rows):
        return bool(kind) and any(_is_called(cell, {kind}) for cell in rows[0])

    with opened(file, ignore, heads) as table:
        node = _node_column(table, called)
        kept = [j for j in range(table.width) if j != node]
        for j in table.named("label"):
            cure = f"drop {table.column(j)}{table.flag(j)}, or rename it if it is none"
            raise StoreError(f"{file}: features must not tell the label: {cure}")
        _refuse_splits(table, "feature", "^is|mask$")
        if not kept and not kind:
            raise StoreError(f"{file} has no features: its column {table.column(0)} holds ids")
        dates = [j for j in kept if table.dated(j)]
        texts = [j for j in kept if table.kinds[j] == "text" and kind_of(table.sample(j)) == "text"]
        texts = [j for j in texts if j not in dates]
        categories = {}
        if texts:
            with opened(file, ignore, heads) as again:
                categories = _categories(again, texts)
        kinds = dict.fromkeys(kept, list)
        kinds |= dict.fromkeys(dates, TIME) | dict.fromkeys(texts, str)
        if node is not None:
            kinds[node] = str
        ids = []
        rounded = RoundedRows(SAMPLED, 1)

        def numbers(j, cells):
            if j in categories:
                return _one_hot(cells, categories[j])
            return (cells - YEAR_2000) / DECADE if j in dates else cells

        def rows():
            start = 0
            for _, columns in table.read(kinds):
                if node is not None:
                    ids.append(columns[node])
                if not kept:
                    continue
                columns = [numbers(j, columns[j]) for j in kept]
                x = stacked(columns, np.float32)
                if start < SAMPLED:
                    as_read = torch.from_numpy(stacked(columns, np.float64))
                    rounded.add(start, as_read, torch.from_numpy(x))
                start += len(x)
                yield x

        names = [_feature_names(table, j, categories) for j in kept]
        x = spool(folder, rows(), np.float32, max(1, sum(map(len, names))))
        nodes = Nodes(table.rows, file)
        if node is not None:
            x, nodes = _name(table, folder, x, table.identified(node, joined(ids)), node)
            nodes.id_name = table.names and table.names[node]
        elif len(kept) > 1 and len(x) > 1:
            _check_counting(table, [*zip(kept, names)], x)
        nodes.type = kind
        if table.names:
            nodes.feature_names = sum(names, [])
        if loss := rounded.loss(nodes.feature_names):
            table.notes.append(f"read as float32: {loss}")
        sizes = abs(x[:SAMPLED]).mean(0) if kept else []
        if large := [name for name, size in zip(sum(names, []), sizes) if size > LARGE]:
            table.notes.append(
                f"large numbers in {short(', '.join(large))}: best scaled to -1 to 1"
            )
        for j in dates:
            table.notes.append(f"{table.column(j)} in decades since 2000")
        for j, values in categories.items():
            table.notes.append(f"{table.column(j)} one-hot, {plural(len(values), 'value')}")
        table.say(plural(len(sum(names, [])), "feature"))
    return x if kept else None, nodes


def _node_column(table, called) -> int | None:
    """Find the column of ids of a table of features: by its name (see `Table.named`; `called`: the names that other tables have
    for it), else the column of text, one that holds no dates and no lists as A|B if there is such."""
    named = {*table.named("id")}
    for j, name in enumerate(table.names or ()):
        if _is_called(name, called) and table.identifies(j):
            named.add(j)
    texts = [
        j
        for j, kind in enumerate(table.kinds)
        if kind == "text" and (j == 0 or table.identifies(j))
    ]
    plain = [j for j in texts if not table.dated(j) and SEVERAL not in "".join(table.sample(j))]
    node = _id_column(table, sorted(named) or plain or texts)
    for j in named - {node}:
        table.notes.append(f"{table.column(j)} repeats and is a feature")
    return node


def _is_called(name, called) -> bool:
    """Whether the name of a column is one of `called`, which may be words, perhaps with "id" at its end."""
    words = words_of(name)
    stem = " ".join(words[:-1] if words[1:] and words[-1] == "id" else words)
    return bool({name, " ".join(words), stem} & {*called})


def _feature_names(table, j, categories) -> list[str]:
    """Name the features that a column becomes."""
    name = table.column(j) if table.names is None else table.names[j]
    if j in categories:
        return [f"{name}={value}" for value in categories[j]]
    width = table.widths[j]
    return [f"{name}[{i}]" for i in range(width)] if width > 1 else [name]


def _categories(table, columns) -> dict:
    """Read the different values of columns of text, of which a cell may hold several, as A|B -> {column: values, sorted};
    StoreError for one with too many, or none in two rows."""
    found = {j: set() for j in columns}
    counts = dict.fromkeys(columns, 0)
    for _, cells in table.read(dict.fromkeys(columns, str)):
        for j, values in found.items():
            given = _values_of(cells[j])[0]
            counts[j] += len(given)
            values |= {*given.unique().to_pylist()}
        if any(len(values) > MOST_VALUES for values in found.values()):
            break
    for j, values in found.items():
        many = len(values) > MOST_VALUES
        if many or len(values) == counts[j]:
            has = f"over {MOST_VALUES} values" if many else "another value in every row"
            cure = "or make its values nodes of a type of their own, with a table of edges to them"
            problem = f"is text with {has}, no feature: drop it{table.flag(j)}, {cure}"
            raise StoreError(f"{table.name}: {table.column(j)} {problem}")
    return {j: sorted(values) for j, values in found.items()}


def _values_of(cells):
    """Split cells of text at SEVERAL -> (their values, a pyarrow array [n], without empty ones; the row of each, int64 [n])."""
    import pyarrow.compute as compute

    parts = compute.split_pattern(written(cells), SEVERAL)
    counts = compute.list_value_length(parts).fill_null(0).to_numpy()
    values = written(parts.flatten())
    there = values.is_valid()
    rows = np.repeat(np.arange(len(cells)), counts)
    return values.filter(there), rows[there.to_numpy(zero_copy_only=False)]


def _one_hot(cells, categories) -> np.ndarray:
    """Return a column for each category, 1 where a cell holds it, else 0 -> float32 [r, n]."""
    import pyarrow
    import pyarrow.compute as compute

    values, rows = _values_of(cells)
    columns = compute.index_in(values, value_set=pyarrow.array(categories))
    x = np.zeros((len(cells), len(categories)), np.float32)
    x[rows, columns.to_numpy()] = 1
    return x


def _check_counting(table, kept, x):
    """Refuse a first column that holds the numbers 0 to V-1 or 1 to V in any order; name others in a line. kept: (column, names
    of its features) of x [V, F]."""
    first = 0
    for j, names in kept:
        values = x[:, first]
        first += len(names)
        if not table.identifies(j) or values.min() not in (0, 1):
            continue
        counted = np.arange(len(x), dtype=np.float32) + values.min()
        if not np.array_equal(np.sort(values), counted):
            continue
        if j == 0:
            cure = f"call it id or drop it{table.flag(0)}"
            raise StoreError(f"{table.name}: {table.column(0)} counts the rows: {cure}")
        table.notes.append(f"{table.column(j)} counts the rows: call it id if it names the nodes")


def _name(table, folder, x, ids, node):
    """Take the ids of the rows as names of the nodes; if they are 0 to V-1, sort the rows by them -> (x, `Nodes`)."""
    column = table.column(node)
    different, counts = np.unique(ids, return_counts=True)
    empty = np.array([cell == "" or cell != cell for cell in ids])  # or NaN
    table.refuse(0, node, empty, "is empty: an id is needed")
    if (counts > 1).any():
        again = short(str(different[counts.argmax()]))
        raise StoreError(f"{table.name}: {column} holds ids, but {again!r} occurs more than once")
    if isinstance(ids, list) or not np.array_equal(different, np.arange(len(ids))):
        table.notes.append(f"{column} names the nodes, such as {short(str(ids[0]))}")
        return x, Nodes(len(ids), table.name, list(ids), by_row=False)
    table.notes.append(f"{column} numbers the nodes")
    if not (in_order := np.array_equal(ids, different)):
        table.notes.append("the rows are put in their order")
        x = _ordered(folder, x, np.argsort(ids)) if len(x) else x
    return x, Nodes(len(ids), table.name, by_row=in_order)


def _rows_of_nodes(table, nodes, node, kinds, missing):
    """Read a table with one row per node or, if column `node` holds ids, for some nodes -> (int64 [n], distinct nodes;
    {column: values [n], or those that `Table.identified` returns for text})."""
    if node is None and not nodes.by_row:
        raise StoreError(f"{table.name} has no column of ids: it needs one, as {nodes.source} has")
    if node is not None:
        kinds = {**kinds, node: nodes.kind}
    parts = []
    for _, columns in table.read(kinds, missing):
        if node is None and table.rows > nodes.count:
            hint = "" if table.names else HEADER
            raise table.error(nodes.count, f"more rows than in {nodes.source}{hint}")
        parts.append(columns)
    columns = {j: joined([part[j] for part in parts]) for j in kinds}
    for j, kind in kinds.items():
        if kind is str and j != node:
            columns[j] = table.identified(j, trimmed(columns[j]))
    if node is None:
        if table.rows < nodes.count:
            rows = f"{table.name} has {table.rows:,} rows"
            raise StoreError(f"{rows}, {nodes.source} has {nodes.count:,}")
        return np.arange(nodes.count), columns
    _check_header(table, {node: nodes})
    rows = nodes.numbers(table, 0, columns.pop(node))
    again = np.setdiff1d(np.arange(len(rows)), np.unique(rows, return_index=True)[1])
    if len(again):
        row = rows[again[0]]
        problem = f"node {nodes.names[row] if nodes.names else row} occurs a second time"
        if table.width == 1 and not nodes.names and rows.max() <= 1:
            problem = "this looks like a mask of 0 and 1: ids of nodes are needed, one a line"
        raise table.error(int(again[0]), problem)
    return rows, columns


def node_column(file, nodes, name, ignore=()) -> np.ndarray:
    """Read a table for nodes.

    Args:
        name: "targets": columns of numbers -> float64 [V] or [V, T], NaN for a missing one; "labels": a column of numbers or text, or multi-label columns of 0 and 1 -> float64 [V] or [V, C], NaN:
            no label, or text [V]; a column of nodes of a store: its values [V]; both may have a column of ids as well, with
            which labels may be for some nodes only. Other names: a column of ids of distinct nodes -> int64 [n].
    """
    with opened(file, ignore, nodes.heads) as table:
        is_labels = name in ANSWERS
        column = COLUMNS.get(name)
        if is_labels and table.width > 1 + bool(table.named("id")):
            _refuse_splits(table, "label")
        node = _ids_of_nodes(table, nodes, name)
        columns = [j for j in range(table.width) if j != node]
        several = is_labels and all(table.kinds[j] in ("whole", "real", "empty") for j in columns)
        if len(columns) != (is_labels or name in COLUMNS) and not (columns and several):
            actual = short(", ".join(map(table.column, range(table.width))))
            cure = "; --ignore leaves columns out" if table.names else ""
            raise StoreError(f"{file} has the columns {actual}, which are no {name}{cure}")
        if columns and node is not None:
            which = ", ".join(map(table.column, columns))
            table.notes.append(f"{table.column(node)} taken as ids, {which} as {name}")
        kind = str if name == "labels" else TIME if column and column.timed else float
        kinds = dict.fromkeys(columns, kind)
        rows, cells = _rows_of_nodes(table, nodes, node, kinds, is_labels)
        for j in columns if name == "labels" else ():
            _check_labels(table, j, cells[j], len(columns))
        table.say()
    if is_labels and (len(columns) > 1 or name == "targets") and table.names:
        nodes.class_names = [table.names[j] for j in columns]
    if not columns:
        return rows
    cells = np.stack([cells[j] for j in columns], 1)
    if is_labels and cells.dtype.kind != "U":
        cells = cells.astype(np.float64)
    if not is_labels and len(missing := np.setdiff1d(np.arange(nodes.count), rows)):
        what = name.removeprefix("node_")
        raise StoreError(f"{file} has no {what} for node {missing[0]}: every node needs one")
    empty = {"U": "", "f": np.nan}.get(cells.dtype.kind, 0)
    y = np.full((nodes.count, len(columns)), empty, cells.dtype)
    y[rows] = cells
    return y if len(columns) > 1 else y[:, 0]


def _ids_of_nodes(table, nodes, name) -> int | None:
    """Find the column of ids in a table for nodes, see `node_column`: by its name, or that of the features' column of ids, or
    because all of its cells are nodes; of two columns else the first."""
    if name not in (*ANSWERS, *COLUMNS):
        return 0 if table.width == 1 else None
    names = table.names or ()
    ids = {*table.named("id"), *(j for j, name in enumerate(names) if name == nodes.id_name)}
    if not ids and (nodes.kind is str or table.width == 2):
        others = table.named("label" if name in ANSWERS else "more of an edge")
        refer = [j for j in range(table.width) if j not in others]
        ids = [j for j in refer if table.identifies(j) and nodes.have(table.sample(j))]
        if table.width == 2 and len(ids) != 1:
            ids = refer[:1]
    return _id_column(table, sorted(ids))


def _refuse_splits(table, thing, having=""):
    """Refuse a column whose name says that it holds a split, if it matches the pattern `having`, as a feature or a label."""
    for j, name in enumerate(table.names or ()):
        word = re.sub(r"[\W_\d]", "", name.lower())
        if SPLIT.fullmatch(word) and re.search(having, word):
            problem = f"{table.column(j)} looks like a split, not like a {thing}"
            cure = f"drop it{table.flag(j)} and give ids of nodes as --train FILE, or rename it"
            raise StoreError(f"{table.name}: {problem}: {cure}")


def _check_labels(table, j, cells, count):
    """Refuse what is no label in one of `count` columns of them: text in one of several, fractions, numbers below -1."""
    why = "labels are 0 or more, or -1 for none"
    how = "{:g}"
    if isinstance(cells, list):
        how = "{!r:.60}"
        why = "labels are whole numbers or text"
        fitting = {"0", "1", "-1", *MISSING}
        if count == 1:
            if table.kinds[j] == "text" or not all(
                cell in MISSING or NUMBER.fullmatch(cell) for cell in cells
            ):
                return  # names of classes
            fitting = {cell for cell in cells if cell in MISSING or float(cell).is_integer()}
        bad = np.array([cell not in fitting for cell in cells])
    else:
        bad = (cells < -1) | (cells > (1 if count > 1 else np.inf))
    why = "of several labels each is 0, 1 or empty" if count > 1 else why
    table.refuse(0, j, bad, f"is {how}: {why}; numbers to learn are --targets FILE", cells)


def edges(file, folder, nodes, keep=(), ignore=(), *, ids=(), say=print):
    """Spool a table with one row per edge to a file in `folder` -> (edge_index int64 [2, M], mapped; {name in `keep`:
    values as in `edge_rows`, "ids": {name in `ids`: pyarrow array of strings [M]}}).

    Source and destination are the columns that `_end_columns` finds, else the first two.
    nodes: `Nodes` of both ends, or `Ends`. keep: {name of a column of a store: columns of the table, by name or number from 1,
    none of one that another table has}; None: there can be none. A column of dates is kept as times, if there are no others.
    ids: names of columns that other tables of these edges have as ids, too. Other columns are refused. say: prints a line.
    """
    nodes = nodes if isinstance(nodes, Ends) else Ends(nodes, nodes)
    with opened(file, ignore, nodes.heads) as table:
        kept = {
            name: [_column(table, w) for w in words]
            for name, words in dict(keep or ()).items()
            if words
        }
        ends = _end_columns(table, nodes, sum(kept.values(), []))
        _check_header(table, dict(zip(ends, nodes)))
        keys = [j for j in range(table.width) if table.names and table.names[j] in ids]
        taken = [*ends, *sum(kept.values(), [])]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is used for two things")
        extra = [j for j in range(table.width) if j not in [*taken, *keys]]
        dates = [j for j in extra if table.dated(j)]
        if len(dates) == 1 and keep is not None and EDGE_TIME.name not in keep:
            kept[EDGE_TIME.name] = dates
            extra.remove(dates[0])
        if extra:
            columns = short(", ".join(map(table.column, extra)))
            cure = f"drop it{table.flag(*extra)}, or name it, as by --weights"
            cure = "pairs are two columns of nodes" if keep is None else cure
            raise StoreError(f"{file}: no use for {columns}: {cure}")
        keys = [j for j in keys if j not in taken]
        arrays = _spooled(table, folder, {"ends": ends, **kept}, nodes, keys)
        notes = [f"{name} from {', '.join(map(table.column, js))}" for name, js in kept.items()]
        table.say(*notes, say=say)
    return arrays.pop("ends").T, arrays


def pairs_of_table(file, store, say=print) -> np.ndarray:
    """Read pairs of nodes of a store from a table of sources and destinations, as in a table of edges -> their names, int64 or
    text, or their numbers if they have none, [n, 2]. say: prints a line."""
    import pyarrow

    names = store.node_names()
    numbers = digits(pyarrow.array(names or [], "string"))
    names = names if not names or numbers is None else numbers.tolist()
    nodes = Nodes(store.num_nodes, store.path, names)
    pairs = edges(file, tempfile.gettempdir(), nodes, None, say=say)[0].T
    return np.array(nodes.names)[pairs] if nodes.names else pairs


class Keys(NamedTuple):
    """What tells the M edges of a table apart, for other tables of the same edges."""

    source: str  # file of the table
    nodes: Ends
    ends: np.ndarray  # int64 [2, M]
    ids: dict  # {name of a column: pyarrow array of strings [M]}

    def end_keys(self, ends):
        """Pack the ends [2, n] of edges into a pyarrow array of n integers."""
        import pyarrow

        return pyarrow.array(ends[0] * self.nodes.destination.count + ends[1])

    def called(self, key) -> str:
        """Name an edge by its key, for messages."""
        if type(key) is str:
            return key
        pair = divmod(key, self.nodes.destination.count)
        names = [of.names[node] if of.names else node for of, node in zip(self.nodes, pair)]
        return " -> ".join(map(str, names))

    def have_ends(self, table, columns) -> bool:
        """Whether two columns hold the ends of an edge in each of the first rows."""
        pairs = [[*map(of.find, table.sample(j))] for of, j in zip(self.nodes, columns)]
        if None in sum(pairs, []):
            return False
        return bool(np.isin(self.end_keys(np.array(pairs)), self.end_keys(self.ends)).all())

    def order(self, table, edge_keys, row_keys):
        """Find the row of each edge, by equal keys, pyarrow arrays [M] -> int64 [M], or None if they are in order."""
        import pyarrow.compute as compute

        if row_keys.equals(edge_keys):
            return None
        for source, cells in ((self.source, edge_keys), (table.name, row_keys)):
            if len(cells.unique()) < len(cells):
                counts = cells.value_counts()
                twice = counts.field("values")[int(np.argmax(counts.field("counts")))].as_py()
                why = "its rows and those of the edges cannot be joined, unless both have one order"
                raise StoreError(
                    f"{source} has the edge {self.called(twice)} more than once: {why}"
                )
        order = compute.index_in(edge_keys, value_set=row_keys)
        if order.null_count:
            lost = edge_keys[order.is_null().index(True).as_py()].as_py()
            lost = f"no row for the edge {self.called(lost)} of {self.source}"
            raise StoreError(f"{table.name} has {lost}")
        if len(row_keys) > len(edge_keys):
            row = compute.is_in(row_keys, value_set=edge_keys).index(False).as_py()
            edge = self.called(row_keys[row].as_py())
            raise table.error(row, f"{self.source} has no edge {edge}")
        return order.to_numpy().astype(np.int64)


def edge_rows(file, folder, name, ignore, keys):
    """Spool a separate table with one row per edge -> {name: mapped edge_features float32 [M, D], edge_weight float64 [M],
    edge_type int64 [M] or edge_time [M], int64 or datetime64[us] for dates}; see `_spooled`.

    keys: `Keys` of the edges. Rows are joined to these by the columns of ends, if there are such, or by a column of ids that
    the table of edges has, too, or that holds 0 to M-1; else row i is of edge i.
    """
    import pyarrow

    with opened(file, ignore, keys.nodes.heads) as table:
        ends = [None]
        if table.width > 1:
            ends = _found_ends(table, keys.nodes)
        if None in ends and table.width > 2 and keys.have_ends(table, [0, 1]):
            ends = [0, 1]
        ends = [] if None in ends else ends
        ids = _id_column(table, [j for j in _edge_ids(table) if j not in ends], "edges")
        named = ids is not None and table.names[ids] in keys.ids
        columns = [j for j in range(table.width) if j not in [ids, *ends]]
        if not columns or len(columns) > 1 and not COLUMNS[name].wide:
            needed = "some are" if COLUMNS[name].wide else "one is"
            count = plural(len(columns), "column")
            raise StoreError(f"{file} has {count} for {name}: {needed} needed")
        by_ids = named or ids is not None and not ends
        fields = {name: columns, "ends": ends}
        arrays = _spooled(table, folder, fields, keys.nodes, [ids] if by_ids else [])
        order = None
        how = "row by row"
        if by_ids:
            how = f"by {table.column(ids)}"
            counted = pyarrow.array(np.arange(keys.ends.shape[1])).cast("string")
            known = keys.ids[table.names[ids]] if named else counted
            order = keys.order(table, known, arrays.pop("ids")[table.names[ids]])
        ends_of_rows = arrays.pop("ends").T
        if ends:
            both = f"{table.column(ends[0])} and {table.column(ends[1])}"
            if not by_ids:
                how = f"by {both}" if ids is None else f"by {both}, {table.column(ids)} not used"
                order = keys.order(table, keys.end_keys(keys.ends), keys.end_keys(ends_of_rows))
            elif not np.array_equal(
                ends_of_rows if order is None else ends_of_rows[:, order], keys.ends
            ):
                raise StoreError(f"{file}: {both} are not the ends of the edges in {keys.source}")
        if order is not None:
            arrays[name] = _ordered(folder, arrays[name], order)
        table.say(f"taken as {name}, {how}")
        return arrays


def _edge_ids(table) -> list[int]:
    """List the columns that may hold ids of edges."""
    return [j for j in table.named("id") if meanings(table.names[j]) <= {"id"}]


def _ordered(folder, values, order):
    """Spool rows of `values` in another order."""
    parts = np.array_split(order, len(order) // 4096 + 1)
    return spool(folder, (values[part] for part in parts), values.dtype, *values.shape[1:])


def _spooled(table, folder, fields, nodes, keys=()):
    """Spool `fields` {name: columns} of a table of edges as records in one file -> {name: view of its field, "ids": {name of
    a column in `keys`: its cells, a pyarrow array of strings}}. Types that are text are numbered in the order of their
    first rows; "edge_types" then holds their names."""
    import pyarrow

    record = []
    kinds = dict.fromkeys(keys, str)
    for name, which in fields.items():
        column = COLUMNS.get(name)
        dtype = np.int64
        if column:
            # types may be text
            kind = str if column is EDGE_TYPE else TIME if column.timed else float
            kind = list if column.wide else kind
            dtype = np.int64 if column.timed else column.cells
            kinds |= dict.fromkeys(which, kind)
        else:
            kinds |= {j: of.kind for j, of in zip(which, nodes)}
        record.append((name, dtype, (sum(table.widths[j] for j in which),)))
    record = np.dtype(record, align=True)
    numbers = {}
    ids = {table.names[j]: [] for j in keys}

    def type_codes(first, j, cells):
        coded = written(cells).dictionary_encode()
        missing = coded.is_null().to_numpy(zero_copy_only=False)
        table.refuse(first, j, missing, "is empty or nan")
        names = coded.dictionary.to_pylist()
        codes = np.array([numbers.setdefault(name, len(numbers)) for name in names])
        return codes[coded.indices.to_numpy()]

    def chunks():
        for first, columns in table.read(kinds):
            for j in keys:
                ids[table.names[j]].append(columns[j])
            for j, of in zip(fields.get("ends", ()), nodes):
                columns[j] = of.numbers(table, first, columns[j])
            for j in fields.get(EDGE_TYPE.name, ()):
                columns[j] = type_codes(first, j, columns[j])
            chunk = np.empty(table.rows - first, record)
            for name, which in fields.items():
                if which:
                    chunk[name] = stacked([columns[j] for j in which], record[name].base)
            yield chunk

    rows = spool(folder, chunks(), record)
    arrays = {name: rows[name] for name in fields}
    for name in arrays.keys() & COLUMNS.keys():
        if not COLUMNS[name].wide:
            arrays[name] = rows[name][:, 0]
            # dates in parquet, or text none of which is a number
            if COLUMNS[name].timed and table.kinds[fields[name][0]] in ("dates", "text"):
                arrays[name] = arrays[name].view(DATE)
    for j in fields.get(EDGE_TYPE.name, ()):
        names = table.identified(j, pyarrow.array([*numbers]))
        if isinstance(names, list):
            arrays["edge_types"] = names
        else:
            arrays[EDGE_TYPE.name] = _ordered(folder, names, arrays[EDGE_TYPE.name])
    if keys:
        arrays["ids"] = {name: joined(parts).combine_chunks() for name, parts in ids.items()}
    return arrays


def _column(table, word) -> int:
    """Find the column with a name, or with a number from 1."""
    if table.names and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and (place := int(word) - 1) in table.places:
        return table.places.index(place)
    names = short(", ".join(table.names or map(str, range(1, table.width + 1))))
    raise StoreError(f"{short(word)} is neither a file nor one of {table.name}'s columns, {names}")


def _end_columns(table, nodes, taken=()) -> list[int]:
    """Find the columns of sources and of destinations, see `_found_ends`; else they are the first that are not `taken`."""
    if table.width < 2:
        raise StoreError(f"{table.name} has one column: two are needed, with a comma between them")
    ends = _found_ends(table, nodes, taken)
    free = [j for j in range(table.width) if j not in [*taken, *ends]]
    ends = [free.pop(0) if j is None and free else j for j in ends]
    ends = [0, 1] if None in ends else ends
    if not (table.named("source") and table.named("destination")):
        source, destination = map(table.column, ends)
        what = [of.type or end for of, end in zip(nodes, nodes._fields)]
        table.notes.append(f"{source} taken as {what[0]}, {destination} as {what[1]}")
    return ends


def _found_ends(table, nodes, taken=()) -> list:
    """Find the columns of sources and of destinations, None for one that is not found: see `_found_pair` and, for ends of two
    types, `_column_of_type`. StoreError for one end of a pair that is called by a known name."""
    if nodes.source is nodes.destination:
        return _found_pair(table, nodes.source, taken) or [None, None]
    free = [j for j in range(table.width) if j not in taken]
    ends = [_column_of_type(table, of, end, free) for of, end in zip(nodes, nodes._fields)]
    return ends if ends[0] != ends[1] else [None, None]


def _column_of_type(table, nodes, end, free) -> int | None:
    """Find the column among `free` that refers to nodes: by the name of their type or of their ids, as movie and movieId; if
    names are text, as the only one whose cells are such names; by a name of the `end`."""
    called = {nodes.type, nodes.id_name}
    found = [j for j in free if table.names and _is_called(table.names[j], called)]
    if not found and nodes.kind is str:
        found = [j for j in free if nodes.have(table.sample(j))]
    found = found or [j for j in free if j in table.named(end)]
    return found[0] if len(found) == 1 else None


def _found_pair(table, nodes, taken=()) -> list[int] | None:
    """Find two columns of nodes of one type: by known names; by the name of the ids, as protein_a and protein_b are of
    `protein`; if names of nodes are text, as the two columns of such names."""
    sources = table.named("source")
    destinations = table.named("destination")
    if len(sources) == len(destinations) == 1:
        return sources + destinations
    if sources or destinations:
        names = short(", ".join(table.names))
        raise StoreError(f"{table.name} has the columns {names}: call one source, one destination")
    id_words = [words_of(nodes.id_name or ""), words_of(nodes.type)]
    twins = [(stem, pair) for stem, pair in _twins(table) if not {*pair} & {*taken}]
    pairs = [pair for stem, pair in twins if stem in id_words or "id" in meanings("".join(stem))]
    if len(pairs) != 1 and nodes.kind is str:
        free = [j for j in range(table.width) if j not in taken]
        named = [j for j in free if nodes.have(table.sample(j))]
        pairs = [pair for _, pair in twins if {*pair} == {*named}] or [named]
    return pairs[0] if len(pairs) == 1 and len(pairs[0]) == 2 else None


def _twins(table) -> list:
    """List the pairs of columns whose names differ in one word, such as user1 and user2 -> (words that they share, the numbers
    of the columns in the order of the words that differ: letters, digits, or source and target)."""
    words = [words_of(name) for name in table.names or ()]
    twins = []
    for j, k in combinations(range(len(words)), 2):
        pairs = [*zip(words[j], words[k])]
        differing = [(a, b) for a, b in pairs if a != b]
        if len(words[j]) != len(words[k]) or len(pairs) < 2 or len(differing) != 1:
            continue
        a, b = differing[0]
        if {"source", "destination"} <= meanings(a) | meanings(b):
            in_order = "source" in meanings(a)
        elif len(a) == len(b) == 1:
            in_order = a < b
        else:
            continue
        stem = [a for a, b in pairs if a == b]
        twins.append((stem, [j, k] if in_order else [k, j]))
    return twins
