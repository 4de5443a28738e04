"""Tables of nodes -> arrays: which column is what, and which node is meant.

    x, nodes = features("x.csv.gz", "spool-x")                # float32 [V, F]; a column of ids names the nodes
    y = labels("y.csv", nodes)                                # float64 [V] or [V, C], NaN: no label; or text [V]
    train = ids("train.csv", nodes)                           # int64 [n]

The rows of the features are the nodes 0 to V-1, unless they have a column of ids: 0 to V-1 in another order put the
rows in that order, other ids and text name the nodes in the order of the rows. Each function prints what it took for
what. V nodes, M edges, F features, C classes; r rows of a batch.
"""

from __future__ import annotations

import os

import numpy as np

from disk.files import StoreError
from sources.header import LABELS, LEAKS
from sources.tables import opened, plural, short, spool, stacked


class Nodes:
    """How tables name the V nodes that are the rows of the table `source`: by their numbers, or by `names` [V], int64
    or a list of strings. by_row: whether row i of a table without ids is node i."""

    def __init__(self, count, source, names=None, by_row=True):
        self.count, self.source, self.names, self.by_row = count, source, names, by_row
        self.kind = str if isinstance(names, list) else int  # of the cells that name nodes
        if self.kind is str:
            self._numbers = {name: i for i, name in enumerate(names)}
        elif names is not None:
            self._order = np.argsort(names)
            self._sorted = names[self._order]

    def numbers(self, table, line, cells) -> np.ndarray:
        """The nodes int64 [r] that the cells of a column name; StoreError for one that is not there."""
        if self.kind is str:
            nodes = np.array([self._numbers.get(name, -1) for name in cells], np.int64)
        elif self.names is not None:
            place = np.searchsorted(self._sorted, cells).clip(max=self.count - 1)
            nodes = np.where(self._sorted[place] == cells, self._order[place], -1)
        else:
            nodes = cells
        if len(nodes) and (nodes.min() < 0 or nodes.max() >= self.count):
            row = int(((nodes < 0) | (nodes >= self.count)).argmax())
            what = f"there is no node {short(str(cells[row]), '')}: {self.source} has "
            what += f"the nodes 0 to {self.count - 1:,}" if self.names is None else "no such id"
            raise table.error(line + row, what)
        return nodes


def features(file, target) -> tuple[np.ndarray, Nodes]:
    """Spool a table with a row for each node into the file `target` -> (a memmap of float32 [V, F], how the nodes are
    named).

    A column of ids never becomes a feature. It is known by its name (id, node, index, ..., or for the first column
    anything that ends in id), or is the first one and holds text, or the numbers 0 to V-1 or 1 to V in any order.
    """
    with opened(file) as table:
        node = table.id_column()
        node = 0 if node is None and table.kinds[0] == "text" else node
        real = [j for j in range(table.width) if j != node]
        for j in table.named(LEAKS):
            raise StoreError(
                f"{file} has a column {table.column(j)}, and features must not tell the label: leave it "
                "out, or give it another name if it is something else"
            )
        if not real:
            raise StoreError(
                f"{file} has no features: its only column, {table.column(0)}, holds ids"
            )
        kinds, found = dict.fromkeys(real, float), []
        if node is not None:
            kinds[node] = str if table.kinds[node] in ("text", "mixed") else int

        def rows():
            for _, columns in table.read(kinds):
                if node is not None or len(real) > 1:
                    found.append(columns[node or 0])
                yield stacked(columns, real, np.float32)

        x = spool(target, rows(), np.float32, len(real))
        if not len(x):
            raise StoreError(f"{file} has a header and no rows")
        if node is None and len(real) > 1 and len(x) > 1:
            first = np.sort(np.concatenate(found))
            if any(np.array_equal(first, np.arange(a, a + len(x))) for a in (0, 1)):
                node, x = 0, x[:, 1:]
                found = [column.astype(np.int64) for column in found]
        nodes = Nodes(len(x), file)
        if node is not None:
            text = kinds[node] is str
            found = [name for part in found for name in part] if text else np.concatenate(found)
            x, nodes = _name(table, target, x, found, node)
        table.say(plural(x.shape[1], "feature"))
    return x, nodes


def _name(table, target, x, ids, node) -> tuple[np.ndarray, Nodes]:
    """Name the nodes by the ids of the rows, or put the rows in the order of their numbers."""
    column, (different, times) = table.column(node), np.unique(ids, return_counts=True)
    if (again := different[times > 1]).size or different[0] == "":
        what = "a cell is empty" if different[0] == "" else f"{again[0]} is there more than once"
        raise StoreError(
            f"{table.name}: {column} holds the ids of the nodes, but {what}; rename it if it holds no ids"
        )
    if isinstance(ids, list) or not np.array_equal(different, np.arange(len(x))):
        table.notes.append(f"{column} names the nodes, such as {short(str(ids[0]), '')}")
        return x, Nodes(len(x), table.name, ids, by_row=False)
    in_order = bool((ids == different).all())
    table.notes.append(
        f"{column} numbers the nodes" + ("" if in_order else ", the rows are put in their order")
    )
    if not in_order:
        ordered = np.memmap(f"{target}-ordered", np.float32, "w+", shape=x.shape)
        for a in range(0, len(x), 4096):
            ordered[ids[a : a + 4096]] = x[a : a + 4096]
        os.remove(target)
        x = ordered
    return x, Nodes(len(x), table.name, by_row=in_order)


def _rows_of_nodes(table, nodes, node, kinds, missing=False):
    """Read a table with a row for each node, or with ids in column `node` for some -> (nodes int64 [n], each once,
    {column: values})."""
    if node is None and not nodes.by_row:
        raise StoreError(
            f"{table.name} has no column of ids: {nodes.source} has one, which is not 0 to V-1 in order, so "
            f"{table.name} needs a column id as well"
        )
    seen, found, parts, first = np.zeros(nodes.count, bool), [], [], 0
    kinds = kinds if node is None else {**kinds, node: nodes.kind}
    for line, columns in table.read(kinds, missing):
        if table.rows > nodes.count:
            what = f"there are more rows than the {nodes.count:,} of {nodes.source}"
            what += "" if table.names else "; a header is known by names such as id and label"
            raise table.error(line + nodes.count - first, what)
        if node is None:
            rows = np.arange(first, table.rows)
        else:
            rows = nodes.numbers(table, line, columns.pop(node))
        first = table.rows
        again = seen[rows]
        again[np.setdiff1d(np.arange(len(rows)), np.unique(rows, return_index=True)[1])] = True
        if again.any():
            row = int(again.argmax())
            what = f"node {rows[row]} is there for the second time"
            if table.width == 1 and nodes.names is None and rows.max() <= 1:
                what = "this looks like a mask of 0 and 1: ids of nodes are needed, one a line"
            raise table.error(line + row, what)
        seen[rows] = True
        found.append(rows)
        parts.append(columns)
    if not found:
        raise StoreError(f"{table.name} has a header and no rows")
    if node is None and not seen.all():
        raise StoreError(
            f"{table.name} has {table.rows:,} rows, {nodes.source} has {nodes.count:,} rows of features"
        )
    return np.concatenate(found), {j: np.concatenate([p[j] for p in parts]) for j in parts[0]}


def labels(file, nodes) -> np.ndarray:
    """Read a table of labels: a column of numbers or text, or of several labels a node columns of 0 and 1; a row for each
    node, or with a column of ids for those that have a label -> float64 [V] or [V, C], or text [V]; NaN or "" for a node
    without a label."""
    with opened(file) as table:
        columns, node = _label_columns(table)
        if node is not None:
            which = ", ".join(map(table.column, columns))
            table.notes.append(f"{table.column(node)} taken as ids, {which} as labels")
        kind = str if len(columns) == 1 and table.kinds[columns[0]] == "text" else float
        kinds = dict.fromkeys(columns, kind)
        rows, found = _rows_of_nodes(table, nodes, node, kinds, missing=True)
        found = np.stack([found[j] for j in columns], 1)
        y = np.full((nodes.count, len(columns)), "" if kind is str else np.nan, found.dtype)
        y[rows] = found
        table.say()
    return y if len(columns) > 1 else y[:, 0]


def _label_columns(table) -> tuple[list[int], int | None]:
    """(columns of the labels, column of ids or None)."""
    node = table.id_column()
    named = [j for j in table.named(LABELS) if j != node]
    if table.width == 1 and node is None:
        return [0], None
    if table.width == 2:
        node = node if node is not None else 1 - named[0] if len(named) == 1 else 0
        return [1 - node], node
    columns = [j for j in range(table.width) if j != node]
    if columns and all(table.kinds[j] == "whole" for j in columns):
        return columns, node
    found = short(", ".join(map(table.column, range(table.width))), "")
    raise StoreError(
        f"{table.name} has the columns {found}: one of labels is needed, or one of ids and one of labels, "
        "or of several labels a node columns of 0 and 1"
    )


def node_times(file, nodes) -> np.ndarray:
    """Read a table of the nodes' times: a column of them, perhaps with a column of ids beside it -> int64 [V]."""
    with opened(file) as table:
        node = table.id_column() if table.width > 1 else None
        node = 0 if node is None and table.width == 2 else node
        if table.width > 2:
            raise StoreError(
                f"{file} has {plural(table.width, 'column')}: a column of times is needed, or one of ids and one of times"
            )
        when = 0 if node is None else 1 - node
        rows, found = _rows_of_nodes(table, nodes, node, {when: int})
        times, seen = np.zeros(nodes.count, np.int64), np.zeros(nodes.count, bool)
        times[rows], seen[rows] = found[when], True
        if not seen.all():
            raise StoreError(
                f"{file} has no time for node {int((~seen).argmax())}, and every node needs one"
            )
        table.say("taken as the nodes' times")
    return times


def ids(file, nodes) -> np.ndarray:
    """Read a table of one column that names nodes, each once -> int64 [n]; StoreError for a mask, or for no rows."""
    with opened(file) as table:
        if table.width != 1:
            raise StoreError(f"{file} has {table.width} columns: one is needed, the ids of nodes")
        found, _ = _rows_of_nodes(table, nodes, 0, {})
        table.say()
    return found
