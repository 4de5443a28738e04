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
from typing import NamedTuple

import numpy as np
import torch

from disk.columns import COLUMNS, EDGE_TIME, EDGE_TYPE, OF_EDGES
from disk.convert import DATE, SAMPLED, RoundedRows, spool
from disk.files import StoreError, plural
from extras.tables import (
    ID,
    NUMBER,
    SEVERAL,
    TIME,
    digits,
    is_text,
    joined,
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
MOST_VALUES = 100  # of a column of text that becomes features
YEAR_2000 = np.datetime64("2000", "us")
DECADE = np.timedelta64(315_569_520, "s")
LARGE = 30  # a feature with larger values is named: networks learn from it slowly
HEADER = "; a header is known by names such as id, source, destination and label"


def read_tables(sources, tables, columns, folder, ignore):
    """Read the arrays of a graph from tables -> {name as in an .npz file: array, or list of names}.

    Args:
        sources: {type of nodes, or "source,relation,destination" of edges: file of a table}; for a graph of one type
            {"": of features, or None; ",,": of edges}.
        tables: {name of an array: file of a table}, of several types TYPE=FILE.
        columns: {name of a column of a store: as in `tables`, or columns of the tables of edges}.
        folder: for files without a name that large arrays are mapped from.
        ignore: names of columns to leave out, of any of the tables.
    """
    if None in sources.values():
        with opened(sources[",,"]):  # refuses what is no table
            how = "features are needed, a line for each node"
            raise StoreError(f"{sources[',,']} holds edges alone: {how}, as --features FILE")
    types = [kind for kind in sources if "," not in kind]
    relations = [kind for kind in sources if "," in kind]
    for kind in relations or ["edges"]:
        if kind.count(",") != 2 or not {*kind.split(",")[::2]} <= {*types}:
            those = f"of types with a table: {', '.join(types)}"
            raise StoreError(f"{kind}: TYPE,RELATION,TYPE=FILE is needed, {those}")
    ignore = dict.fromkeys(ignore, 0)
    edge_columns = {name: columns.pop(name) for name in OF_EDGES if name in columns}
    others = tables | columns
    nodes = {}
    arrays = {}

    def add(kind, values):
        arrays.update({f"{name}:{kind}".rstrip(":,"): value for name, value in values.items()})

    for kind in types:
        called = {kind}
        if not kind:
            called = _called_elsewhere(others.values(), sources[",,"], ignore)
        x, of = features(sources[kind], folder, ignore, called, kind)
        nodes[kind] = of
        names = {"node_names": of.names, "feature_names": of.feature_names}
        add(kind, {"features": x, "num_nodes": of.count, **names})
    for name, source in others.items():
        kind, _, file = source.partition("=") if types[0] else ("", "", source)
        if kind not in nodes:
            those = ", ".join(types)
            raise StoreError(f"{name}: {source} is not TYPE=FILE, of the types {those}")
        values = node_column(file, nodes[kind], name, ignore)
        add(kind, {name: values, "class_names": nodes[kind].class_names})
    for kind in relations:
        ends = Ends(*(nodes[end] for end in kind.split(",")[::2]))
        add(kind, _edges_and_columns(sources[kind], folder, ends, edge_columns, ignore))
    if unused := sorted(edge_columns.keys() - {name.partition(":")[0] for name in arrays}):
        where = ", ".join(map(sources.get, relations))
        raise StoreError(f"none of {where} has the column {edge_columns[unused[0]]}")
    if unused := [name for name, tables in ignore.items() if not tables]:
        raise StoreError(f"ignore: none of the tables has a column {unused[0]!r}")
    return arrays


def _edges_and_columns(file, folder, ends, columns, ignore):
    """Read a table of edges and its `columns` {name: file of a table, or columns of this one} -> {name of an array: values}."""
    keep = {}
    own_files = {}
    ids = set()
    for name, source in columns.items():
        keep[name] = source.split(",") if COLUMNS[name].wide else [source]
        if os.path.isfile(source):
            keep[name] = []
            own_files[name] = source
            with opened(source, ignore, ends.source.heads) as table:
                ids |= {table.names[j] for j in _edge_ids(table)}
    pairs, kept = edges(file, folder, ends, keep, ignore, ids=ids)
    keys = Keys(file, ends, pairs, kept.pop("ids", {}))
    for name, source in own_files.items():
        kept |= edge_rows(source, folder, name, ignore, keys)
    return {"edge_index": pairs, **kept}


def _called_elsewhere(node_tables, edge_table, ignore) -> set[str]:
    """Return the names by which other tables may call the ids of the nodes: names of columns of the tables of nodes, and
    what the names of two ends have in common."""
    called = set()
    for file in node_tables:
        with opened(file, ignore) as table:
            names = table.names or ()
            ids = {names[j] for j in table.named("id")}
            called |= ids or {name for name in names if not meanings(name)}
    with opened(edge_table, ignore) as table:
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
        no such names, or it has the name of the column of ids. Tables of several types have one."""
        if self.type:
            return is_text(rows)
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

    def called(self) -> list[str]:
        """Return what columns of them are called: their types, or source and destination."""
        return [nodes.type or end for nodes, end in zip(self, self._fields)]


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
    numbers 0 to V-1 or 1 to V in any order is refused. Dates become decades since 2000. A column of lists is as many features as
    a list has numbers; one of text, behind the others, as it has values, see `_one_hot`. kind: the nodes' type; such nodes may
    have no features, None.
    """
    with opened(file, ignore, is_text if kind else lambda rows: False) as table:
        node = _node_column(table, called)
        kept = [j for j in range(table.width) if j != node]
        for j in table.named("label"):
            cure = f"drop {table.column(j)}{table.flag(j)}, or rename it if it is none"
            raise StoreError(f"{file}: features must not tell the label: {cure}")
        _refuse_splits(table, "feature", "^is|mask$")
        if not kept and not kind:
            raise StoreError(f"{file} has no features: its column {table.column(0)} holds ids")
        kinds = {j: table.form(j) for j in kept}
        dates = [j for j in kept if kinds[j] is TIME]
        texts = [j for j in kept if kinds[j] is str]
        numbers = [j for j in kept if kinds[j] is not str]
        whole = {j: [] for j in [*texts, node] if j is not None}
        kinds |= dict.fromkeys(whole, str)
        rounded = RoundedRows(SAMPLED, 1)

        def rows():
            start = 0
            for _, columns in table.read(kinds):
                for j, parts in whole.items():
                    parts.append(columns[j])
                for j in dates:
                    columns[j] = (columns[j] - YEAR_2000) / DECADE
                if not numbers:
                    continue
                columns = [columns[j] for j in numbers]
                x = stacked(columns, np.float32)
                if start < SAMPLED:
                    as_read = torch.from_numpy(stacked(columns, np.float64))
                    rounded.add(start, as_read, torch.from_numpy(x))
                start += len(x)
                yield x

        called = table.names or table.places
        widths = [(called[j], table.widths[j]) for j in numbers]
        names = [f"{name}[{i}]" if n > 1 else name for name, n in widths for i in range(n)]
        x = spool(folder, rows(), np.float32, max(1, len(names)))
        tables = [x] * bool(numbers)
        for j in texts:
            values, columns = _one_hot(table, j, joined(whole[j]))
            names += [f"{called[j]}={value}" for value in values]
            tables.append(columns)
        if texts:
            first = range(0, table.rows, SAMPLED)
            parts = (np.hstack([part[a : a + SAMPLED] for part in tables]) for a in first)
            x = spool(folder, parts, np.float32, len(names))
        nodes = Nodes(table.rows, file)
        if node is not None:
            x, nodes = _name(table, folder, x, table.identified(node, joined(whole[node])), node)
            nodes.id_name = table.names and table.names[node]
        elif len(kept) > 1 and len(x) > 1:
            _check_counting(table, numbers, x)
        nodes.type = kind
        if table.names:
            nodes.feature_names = names
        if loss := rounded.loss(nodes.feature_names):
            table.notes.append(f"read as float32: {loss}")
        if dates:
            table.notes.append(f"{', '.join(map(table.column, dates))} in decades since 2000")
        sizes = zip(nodes.feature_names or (), abs(x[:SAMPLED]).max(0, initial=0))
        if large := [name for name, size in sizes if size > LARGE]:
            table.notes.append(f"large numbers in {short(', '.join(large))}: scale them")
        table.say(plural(len(names), "feature"))
    return x if kept else None, nodes


def _node_column(table, called) -> int | None:
    """Find the column of ids of a table of features: by its name (see `Table.named`; `called`: the names that other tables have
    for it), else the column of text."""
    named = {*table.named("id")}
    for j, name in enumerate(table.names or ()):
        if _is_called(name, called) and table.identifies(j):
            named.add(j)
    # text that repeats is a category, if it is not the first column
    texts = [j for j, kind in enumerate(table.kinds) if kind == "text"]
    texts = [j for j in texts if j == 0 or table.identifies(j)]
    node = _id_column(table, sorted(named) or texts)
    for j in named - {node}:
        table.notes.append(f"{table.column(j)} repeats and is a feature")
    return node


def _is_called(name, called) -> bool:
    """Whether the name of a column, perhaps without "id", is one of `called`."""
    return name in called or " ".join(word for word in words_of(name) if word != "id") in called


def _one_hot(table, j, cells):
    """Turn a column of text, of which a cell may hold several values, as A|B -> (the values, sorted; a column of 0 and 1 for
    each, uint8 [V, n]); StoreError for too many, or none that two rows have."""
    lists = [cell.split(SEVERAL) for cell in trimmed(cells).to_pylist()]
    given = [(row, value.strip()) for row, values in enumerate(lists) for value in values]
    rows, given = zip(*(pair for pair in given if pair[1] not in MISSING))
    values, places = np.unique(given, return_inverse=True)
    if len(values) > MOST_VALUES or len(values) == len(given):
        problem = f"{plural(len(values), 'value')} in {table.rows:,} rows, up to {MOST_VALUES} that repeat are features"
        cure = f"drop it{table.flag(j)}, or make its values nodes of a type of their own"
        raise StoreError(f"{table.name}: {table.column(j)} is text with {problem}: {cure}")
    x = np.zeros((len(lists), len(values)), np.uint8)
    x[rows, places] = 1
    table.notes.append(f"{table.column(j)} one-hot, {plural(len(values), 'value')}")
    return values, x


def _check_counting(table, numbers, x):
    """Refuse a first column that holds the numbers 0 to V-1 or 1 to V in any order; name others in a line. numbers: columns of
    the table that are the first features in x [V, F]."""
    first = 0
    for j in numbers:
        values = x[:, first]
        first += table.widths[j]
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
        name: "targets": columns of numbers -> float64 [V] or [V, T], NaN for a missing one. "labels": a column of numbers or
            text, or multi-label columns of 0 and 1 -> float64 [V] or [V, C], NaN: no label, or text [V]. A column of nodes of
            a store: its values [V]. All may have a column of ids as well, with which labels and targets may be for some nodes
            only. Other names: a column of ids of distinct nodes -> int64 [n].
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
    called = {nodes.type, nodes.id_name}
    ids = {*table.named("id"), *(j for j, name in enumerate(names) if _is_called(name, called))}
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
    none of one that another table has}, where nodes have types those that it has; None: there can be none. A column of dates is kept as times, if there are no others.
    ids: names of columns that other tables of these edges have as ids, too. Other columns are refused. say: prints a line.
    """
    nodes = nodes if isinstance(nodes, Ends) else Ends(nodes, nodes)
    with opened(file, ignore, nodes.source.heads) as table:
        kept = {
            name: [_column(table, word) for word in words]
            for name, words in dict(keep or ()).items()
            if words and (not nodes.source.type or {*words} <= {*(table.names or ())})
        }
        ends = _end_columns(table, nodes, sum(kept.values(), []))
        _check_header(table, dict(zip(ends, nodes)))
        keys = [j for j in range(table.width) if table.names and table.names[j] in ids]
        taken = [*ends, *sum(kept.values(), [])]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is used for two things")
        extra = [j for j in range(table.width) if j not in [*taken, *keys]]
        dates = [j for j in extra if table.form(j) is TIME]
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
        import pyarrow

        if row_keys.equals(edge_keys):
            return None
        codes = pyarrow.concat_arrays([edge_keys, row_keys]).dictionary_encode()
        parts = np.split(codes.indices.to_numpy(), [len(edge_keys)])
        counts = [np.bincount(part, minlength=len(codes.dictionary)) for part in parts]
        if different := np.flatnonzero((counts[0] != 1) | (counts[1] != 1))[:1].tolist():
            of_edges, rows = (plural(int(count[different[0]]), "row") for count in counts)
            edge = self.called(codes.dictionary[different[0]].as_py())
            problem = f"{self.source} has {of_edges} of the edge {edge}, {table.name} has {rows}"
            raise StoreError(f"{problem}: one of each is needed, unless both have one order")
        return np.argsort(parts[1])[parts[0]]


def edge_rows(file, folder, name, ignore, keys):
    """Spool a separate table with one row per edge -> {name: mapped edge_features float32 [M, D], edge_weight float64 [M],
    edge_type int64 [M] or edge_time [M], int64 or datetime64[us] for dates}; see `_spooled`.

    keys: `Keys` of the edges. Rows are joined to these by the columns of ends, if there are such, or by a column of ids that
    the table of edges has, too, or that holds 0 to M-1; else row i is of edge i.
    """
    import pyarrow

    with opened(file, ignore, keys.nodes.source.heads) as table:
        ends = None
        if table.width > 1:
            ends = _found_ends(table, keys.nodes)
        if ends is None and table.width > 2 and keys.have_ends(table, [0, 1]):
            ends = [0, 1]
        ends = ends or []
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
    if ends is None:
        ends = [j for j in range(table.width) if j not in taken][:2]
        ends = ends if len(ends) == 2 else [0, 1]
    if not (table.named("source") and table.named("destination")):
        source, destination = map(table.column, ends)
        what = nodes.called()
        table.notes.append(f"{source} taken as {what[0]}, {destination} as {what[1]}")
    return ends


def _found_ends(table, nodes, taken=()) -> list[int] | None:
    """Find the columns of sources and of destinations: by known names; by the name of the ids or of the type, as protein_a and
    protein_b are of `protein`, and user and movieId of two types; if names of nodes are text, as the two columns of such names.
    None without; StoreError for one."""
    of = nodes.source
    found = [table.named(end) for end in nodes._fields]
    if of is not nodes.destination:
        names = [*enumerate(table.names or ())]
        called = [[j for j, name in names if _is_called(name, {n.type, n.id_name})] for n in nodes]
        found = called if any(called) else found
    if [*map(len, found)] == [1, 1]:
        return sum(found, [])
    if any(found):
        names = short(", ".join(table.names))
        ends = ", one ".join(nodes.called())
        raise StoreError(f"{table.name} has the columns {names}: call one {ends}")
    if of is not nodes.destination:
        return None
    free = [j for j in range(table.width) if j not in taken]
    id_words = [words_of(of.id_name or ""), words_of(of.type)]
    twins = [(stem, pair) for stem, pair in _twins(table) if not {*pair} & {*taken}]
    pairs = [pair for stem, pair in twins if stem in id_words or "id" in meanings("".join(stem))]
    if len(pairs) != 1 and of.kind is str:
        named = [j for j in free if of.have(table.sample(j))]
        pairs = [pair for _, pair in twins if {*pair} == {*named}] or [named]
    return pairs[0] if len(pairs) == 1 and len(pairs[0]) == 2 else None


def _twins(table) -> list:
    """List the pairs of columns whose names differ in one word that is a letter, a digit or a name of an end, such as user1 and
    user2 -> (words that they share, the numbers of the columns, the source's first)."""
    columns = {}
    for j, name in enumerate(table.names or ()):
        words = words_of(name)
        for place, word in enumerate(words):
            ends = meanings(word) & {"source", "destination"}
            if len(words) > 1 and (ends or len(word) == 1):
                stem = (place, *words[:place], *words[place + 1 :])
                columns.setdefault(stem, []).append(("destination" in ends, word, j))
    twins = [(stem, sorted(pair)) for stem, pair in columns.items() if len(pair) == 2]
    return [([*stem[1:]], [j for *_, j in pair]) for stem, pair in twins]
