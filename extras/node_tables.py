"""Tables of nodes -> features, labels and other columns, and how tables refer to nodes.

    x, nodes = features("x.csv.gz", folder)                   # float32 [V, F]; a column of ids names the nodes
    y = node_column("y.csv", nodes, "labels")                    # float64 [V] or [V, C], NaN: no label; or text [V]

Rows of features are the nodes 0 to V-1, unless there is a column of ids, wherever it stands (`id_column`): a permutation
of 0 to V-1 reorders the rows, other ids and text name the nodes in row order. Each function prints how it read the columns.
"""

import functools
import re

import numpy as np
import torch

from disk.columns import COLUMNS
from disk.convert import MISSING, SAMPLED, RoundedRows, spool
from disk.files import StoreError, plural, short
from extras.tables import (
    ID,
    NUMBER,
    SEVERAL,
    TIME,
    is_text,
    opened,
    stacked,
    trimmed,
    whole_of,
    words_of,
)

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
        nodes = cells = cells.to_pylist() if self.kind is str else cells
        if self.names:
            nodes = np.array([self._numbers.get(name, -1) for name in cells], np.int64)
        bad = (nodes < 0) | (nodes >= self.count)
        if bad.any():
            row = int(bad.argmax())
            hint = "" if table.names or first + row else HEADER
            cell = short(repr(cells[row]) if self.kind is str else str(cells[row]))
            raise table.error(
                first + row,
                f"there is no {self.type or 'node'} {cell}: {self.source} has {self.count:,}"
                f"{'' if self.names else ', from 0'}{hint}",
            )
        return nodes


def check_header(table, columns):
    """Refuse a header whose cells are names of nodes: it may be a row. columns: {column: `Nodes`}."""
    if table.names and all(
        nodes.kind is str and nodes.have([table.names[j]]) for j, nodes in columns.items()
    ):
        raise StoreError(
            f"{table.name}: its header {short(','.join(table.names))} names nodes: put one above it"
        )


def id_column(table, ids, things="nodes") -> int | None:
    """Choose among the columns that may hold the ids of the rows: the only one whose cells differ in the first rows, if there
    are several; StoreError for two of these, or for none."""
    distinct = [j for j in ids if table.identifies(j)]
    choice = distinct or ids
    if len(choice) < 2:
        return next(iter(choice), None)
    first, second = map(table.column, choice[:2])
    why = f"if {first} holds none, drop it{table.flag(choice[0])}" if distinct else "both repeat"
    raise StoreError(f"{table.name}: {first} and {second} look like ids of the {things}: {why}")


def columns_called(table, names) -> list[int]:
    """List the columns whose names, perhaps without "id", are among `names`."""
    return [
        j
        for j, name in enumerate(table.names)
        if name in names or " ".join(word for word in words_of(name) if word != "id") in names
    ]


def features(file, folder, ignore=(), called=(), kind=""):
    """Spool a table with one row per node to a file in `folder` -> (memmap float32 [V, F], its `Nodes`).

    A column of ids is not a feature, wherever it stands, see `_node_column`. A first column of another name that holds the
    numbers 0 to V-1 or 1 to V in any order is refused. Dates become decades since 2000. A column of lists is as many features as
    a list has numbers; one of text, behind the others, as it has values, see `_one_hot`. kind: the nodes' type; such nodes may
    have no features, None.
    """
    with opened(file, ignore, is_text if kind else None) as table:
        node = _node_column(table, called)
        kept = [j for j in range(table.width) if j != node]
        for j in table.named("label"):
            raise StoreError(
                f"{file}: features must not tell the label: "
                f"drop {table.column(j)}{table.flag(j)}, or rename it if it is none"
            )
        _refuse_splits(table, "feature", "^is|mask$")
        if not kept and not kind:
            raise StoreError(f"{file} has no features: its column {table.column(0)} holds ids")
        kinds = {j: table.form(j) for j in kept}
        dates = [j for j in kept if kinds[j] is TIME]
        texts = [j for j in kept if kinds[j] is str]
        numbers = [j for j in kept if kinds[j] is not str]
        whole = [j for j in [*texts, node] if j is not None]
        kinds |= dict.fromkeys(whole, str)
        rounded = RoundedRows(SAMPLED, 1)

        def rows():
            for first, columns in table.read(kinds, whole=whole):
                for j in dates:
                    columns[j] = (columns[j] - YEAR_2000) / DECADE
                if not numbers:
                    continue
                columns = [columns[j] for j in numbers]
                x = stacked(columns, np.float32)
                if first < SAMPLED:
                    as_read = torch.from_numpy(stacked(columns, np.float64))
                    rounded.add(first, as_read, torch.from_numpy(x))
                yield x

        called = table.names or table.places
        widths = [(called[j], table.widths[j]) for j in numbers]
        names = [f"{name}[{i}]" if n > 1 else name for name, n in widths for i in range(n)]
        x = spool(folder, rows(), np.float32, max(1, len(names)))
        tables = [x] * bool(numbers)
        for j in texts:
            values, columns = _one_hot(table, j, table.whole[j])
            names += [f"{called[j]}={value}" for value in values]
            tables.append(columns)
        if texts:
            first = range(0, table.rows, SAMPLED)
            parts = (np.hstack([part[a : a + SAMPLED] for part in tables]) for a in first)
            x = spool(folder, parts, np.float32, len(names))
        nodes = Nodes(table.rows, file)
        if node is not None:
            x, nodes = _name(table, folder, x, table.identified(node, table.whole[node]), node)
        elif len(kept) > 1 and len(x) > 1:
            _check_counting(table, numbers, x)
        nodes.type = kind
        if table.names:
            nodes.feature_names = names
        if loss := rounded.loss(nodes.feature_names):
            table.notes.append(f"read as float32: {loss}")
        if dates:
            table.notes.append(f"{table.column(*dates)} in decades since 2000")
        sizes = zip(nodes.feature_names or (), abs(x[:SAMPLED]).max(0, initial=0))
        if large := [name for name, size in sizes if size > LARGE]:
            table.notes.append(f"large numbers in {short(', '.join(large))}: scale them")
        table.say(plural(len(names), "feature"))
    return x if kept else None, nodes


def _node_column(table, called) -> int | None:
    """Find the column of ids of a table of features: by its name (see `Table.named`; `called`: the names that other tables have
    for it), else the column of text."""
    named = {*table.named("id"), *filter(table.identifies, columns_called(table, called))}
    # text that repeats is a category, if it is not the first column
    texts = [j for j, kind in enumerate(table.kinds) if kind == "text"]
    texts = [j for j in texts if j == 0 or table.identifies(j)]
    node = id_column(table, sorted(named) or texts)
    for j in named - {node}:
        table.notes.append(f"{table.column(j)} repeats and is a feature")
    return node


def _one_hot(table, j, cells):
    """Turn a column of text, of which a cell may hold several values, as A|B -> (the values, sorted; a column of 0 and 1 for
    each, uint8 [V, n]); StoreError for too many, or none that two rows have."""
    lists = [cell.split(SEVERAL) for cell in trimmed(cells).to_pylist()]
    given = [(row, value.strip()) for row, values in enumerate(lists) for value in values]
    rows, given = zip(*(pair for pair in given if pair[1] not in MISSING))
    values, places = np.unique(given, return_inverse=True)
    count = plural(len(values), "value")
    if len(values) > MOST_VALUES or len(values) == len(given):
        raise StoreError(
            f"{table.name}: {table.column(j)} is text with {count} in {table.rows:,} rows, "
            f"up to {MOST_VALUES} that repeat are features: drop it{table.flag(j)}, "
            "or make its values nodes of a type of their own"
        )
    x = np.zeros((len(lists), len(values)), np.uint8)
    x[rows, places] = 1
    table.notes.append(f"{table.column(j)} one-hot, {count}")
    return values, x


def _check_counting(table, numbers, x):
    """Refuse a first column that holds the numbers 0 to V-1 or 1 to V in any order; name others in a line. numbers: columns of
    the table that are the first features in x [V, F]."""
    first = 0
    for j in numbers:
        values = x[:, first]
        first += table.widths[j]
        if not table.identifies(j):
            continue
        values = np.sort(values)
        counted = np.arange(len(x), dtype=np.float32) + values[0]
        if values[0] not in (0, 1) or not np.array_equal(values, counted):
            continue
        counts = f"{table.column(j)} counts the rows: call it id"
        if j == 0:
            raise StoreError(f"{table.name}: {counts} or drop it{table.flag(j)}")
        table.notes.append(f"{counts} if it names the nodes")


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
        nodes = Nodes(len(ids), table.name, list(ids), by_row=False)
    else:
        table.notes.append(f"{column} numbers the nodes")
        nodes = Nodes(len(ids), table.name, by_row=np.array_equal(ids, different))
        if not nodes.by_row:
            table.notes.append("the rows are put in their order")
            x = ordered(folder, x, np.argsort(ids)) if len(x) else x
    nodes.id_name = table.names[node] if table.names else None
    return x, nodes


def ordered(folder, values, order):
    """Spool rows of `values` in another order."""
    parts = np.array_split(order, len(order) // 4096 + 1)
    return spool(folder, (values[part] for part in parts), values.dtype, *values.shape[1:])


def _rows_of_nodes(table, nodes, node, kinds):
    """Read a table with one row per node or, if column `node` holds ids, for some nodes -> (int64 [n], distinct nodes;
    {column: values [n], or those that `Table.identified` returns for text})."""
    if node is None and not nodes.by_row:
        raise StoreError(f"{table.name} has no column of ids: it needs one, as {nodes.source} has")
    if node is not None:
        kinds = {**kinds, node: nodes.kind}
    for _ in table.read(kinds, missing=True, whole=kinds):
        if node is None and table.rows > nodes.count:
            hint = "" if table.names else HEADER
            raise table.error(nodes.count, f"more rows than in {nodes.source}{hint}")
    columns = table.whole
    for j, kind in kinds.items():
        if kind is str and j != node:
            columns[j] = table.identified(j, trimmed(columns[j]))
    if node is None:
        if table.rows < nodes.count:
            raise StoreError(
                f"{table.name} has {table.rows:,} rows, {nodes.source} has {nodes.count:,}"
            )
        return np.arange(nodes.count), columns
    check_header(table, {node: nodes})
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
            cure = "; --ignore leaves columns out" if table.names else ""
            raise StoreError(
                f"{file} has the columns {short(table.column(*range(table.width)))}, "
                f"which are no {name}{cure}"
            )
        if columns and node is not None:
            table.notes.append(
                f"{table.column(node)} taken as ids, {table.column(*columns)} as {name}"
            )
        kind = str if name == "labels" else TIME if column and column.timed else float
        rows, cells = _rows_of_nodes(table, nodes, node, dict.fromkeys(columns, kind))
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
    y = np.zeros((nodes.count, len(columns)), cells.dtype)
    if cells.dtype.kind == "f":
        y[:] = np.nan
    y[rows] = cells
    return y if len(columns) > 1 else y[:, 0]


def _ids_of_nodes(table, nodes, name) -> int | None:
    """Find the column of ids in a table for nodes, see `node_column`: by its name, or that of the features' column of ids, or
    because all of its cells are nodes; of two columns else the first."""
    if name not in (*ANSWERS, *COLUMNS):
        return 0 if table.width == 1 else None
    ids = {*table.named("id"), *columns_called(table, {nodes.type, nodes.id_name})}
    if not ids and (nodes.kind is str or table.width == 2):
        others = table.named("label" if name in ANSWERS else "more of an edge")
        refer = [j for j in range(table.width) if j not in others]
        ids = [j for j in refer if table.identifies(j) and nodes.have(table.sample(j))]
        if table.width == 2 and len(ids) != 1:
            ids = refer[:1]
    return id_column(table, sorted(ids))


def _refuse_splits(table, thing, having=""):
    """Refuse a column whose name says that it holds a split, if it matches the pattern `having`, as a feature or a label."""
    for j, name in enumerate(table.names):
        word = re.sub(r"[\W_\d]", "", name.lower())
        if SPLIT.fullmatch(word) and re.search(having, word):
            raise StoreError(
                f"{table.name}: {table.column(j)} looks like a split, not like a {thing}: "
                f"drop it{table.flag(j)} and give ids of nodes as --train FILE, or rename it"
            )


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
