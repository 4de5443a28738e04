"""The tables of a graph of one's own -> its arrays: which column is what, and which node is meant.

    x, nodes = features("x.csv.gz", "spool-x")                # float32 [V, F]; a column of ids names the nodes
    y, classes = labels("y.csv", nodes)                       # int64 [V], -1: no label; the names of text classes
    edge_index, more = edges("edges.csv", "spool-e", nodes, {"edge_weight": ["w"]})     # int64 [2, M]
    times = edge_rows("times.csv", "spool-t", "edge_time")    # int64 [M], of a table of its own
    train = ids("train.csv", nodes)                           # int64 [n]

The features come first, for their rows are the nodes 0 to V-1, unless they have a column of ids. Ids that are 0 to V-1
in any order are the nodes' numbers, and the rows are put in that order; other ids, text as well, name the nodes, which
are numbered in the order of the rows. Each function prints in one line what it took for what, and refuses with file and
line what does not fit. How tables may be written is told in tables.py.

Letters: V nodes and M edges of the graph, F feature width, C classes, r rows of a chunk.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re

import numpy as np

from disk import StoreError
from tables import NONE, opened, plural, short, spool

SOURCES = {"source", "src", "from", "u"}  # names of columns, in the forms that _forms gives
DESTINATIONS = {"destination", "dest", "dst", "target", "to", "v"}
LABELS = {"label", "labels", "class", "category", "target", "y"}
IDS = {"id", "node", "nodeid", "nid", "index", "unnamed0", "indexlevel0"}  # the last two are pandas'
MORE = {"weight", "w", "time", "timestamp", "t"}  # what edges may have besides their ends
KNOWN = SOURCES | DESTINATIONS | LABELS | IDS | MORE
LEAKS = {"label", "labels", "class"}  # a feature of that name would tell what is to be learnt


def _forms(name) -> set[str]:
    """A column's name in small letters, and without a final "id" or "node": `from_node_id`, `Source ID`."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return {word, word.removesuffix("id").removesuffix("node")} - {""}


def _is_id(name, j) -> bool:
    """Whether the name of column j says that it holds ids; the first column's may be empty, or end in id."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return word in IDS or j == 0 and (word == "" or word.endswith("id") and not _forms(name) & LABELS)


def _known(name, j) -> bool:
    return bool(_forms(name) & KNOWN) or _is_id(name, j)


def _named(table, words) -> list[int]:
    """The columns with one of these names."""
    return [j for j, name in enumerate(table.names or ()) if _forms(name) & words]


def _id_column(table) -> int | None:
    """The first column whose name says that it holds ids."""
    return next((j for j, name in enumerate(table.names or ()) if _is_id(name, j)), None)


class Nodes:
    """How tables name nodes.

    Args:
        count: V. source: the table whose rows they are.
        names: None where a node's number is its name, else [V] different ones: int64, or a list of strings.
        by_row: whether row i of a table without ids is node i.
    """

    def __init__(self, count, source, names=None, by_row=True):
        self.count, self.source, self.names, self.by_row = count, source, names, by_row
        self._text = isinstance(names, list)
        if self._text:
            self._numbers = {name: i for i, name in enumerate(names)}
        elif names is not None:
            self._order = np.argsort(names)
            self._sorted = names[self._order]

    def chunks(self, table, columns, whole=(), real=(), text=(), missing=False):
        """As `Table.chunks`, with the nodes that `columns` name, int64 [r, len(columns)], after the lines."""
        n = len(columns)
        if self._text:
            for lines, whole_, real_, text_ in table.chunks(whole, real, [*columns, *text], missing):
                number = self._numbers.get
                nodes = np.array([[number(name, -1) for name in names] for names in text_[:n]], np.int64).T
                self._check(table, lines, nodes, lambda row, column, names=text_: names[column][row])
                yield lines, nodes, whole_, real_, text_[n:]
            return
        if self.names is None and any(table.kinds[j] == "text" for j in columns):
            table.hint = f"; nodes are named by text where {self.source} has a column of ids"
        for lines, whole_, real_, text_ in table.chunks([*columns, *whole], real, text, missing):
            names = nodes = whole_ if n == whole_.shape[1] else whole_[:, :n]
            if self.names is not None:
                place = np.searchsorted(self._sorted, names).clip(max=self.count - 1)
                nodes = np.where(self._sorted[place] == names, self._order[place], -1)
            self._check(table, lines, nodes, lambda row, column, names=names: names[row, column])
            yield lines, nodes, whole_[:, n:], real_, text_

    def _check(self, table, lines, nodes, name):
        if nodes.size and (nodes.min() < 0 or nodes.max() >= self.count):
            row, column = np.argwhere((nodes < 0) | (nodes >= self.count))[0]
            there = f"has the nodes 0 to {self.count - 1:,}" if self.names is None else "has no such id"
            what = f"there is no node {short(str(name(row, column)), '')}"
            raise table.error(lines[row], f"{what}: {self.source} {there}")


def features(file, target) -> tuple[np.ndarray, Nodes]:
    """Spool a table of features.

    A column of ids never becomes a feature. It is known by its name (id, node, index, ..., or for the first column
    anything that ends in id), or is the first one and holds text, or the numbers 0 to V-1 or 1 to V in any order.

    Args:
        file: path of a table with a row for each node. target: path of a file to write.

    Returns:
        (a memmap of float32 [V, F], how the nodes are named).

    Raises:
        StoreError: for a cell that is no finite float32, an id that occurs twice, a column that is called label.
    """
    with opened(file, _known) as table:
        node = _id_column(table)
        node = 0 if node is None and table.kinds[0] == "text" else node
        text = node is not None and table.kinds[node] in ("text", "mixed")
        real = [j for j in range(table.width) if j != node]
        for j in _named(table, LEAKS):
            raise StoreError(f"{file} has a column {table.column(j)}, and features must not tell the label: leave it "
                             "out, or give it another name if it is something else")
        if not real:
            raise StoreError(f"{file} has no features: its only column, {table.column(0)}, holds ids")
        table.hint = "; rename the column if it holds no ids"
        ids, perhaps = [], node is None and len(real) > 1

        def rows():
            nonlocal perhaps
            kinds = {} if node is None else {"text" if text else "whole": [node]}
            for lines, whole, numbers, strings in table.chunks(real=real, **kinds):
                chunk = _float32(table, lines, numbers, real)
                first = numbers[:, 0] if perhaps else np.zeros(1)
                perhaps &= bool((first == np.floor(first)).all() and first.min() >= 0 and first.max() < 1 << 53)
                if node is not None or perhaps:
                    ids.append(first.astype(np.int64) if perhaps else strings[0] if text else whole[:, 0])
                yield chunk

        x = spool(target, rows(), np.float32, len(real))
        if not len(x):
            raise StoreError(f"{file} has a header and no rows")
        nodes = Nodes(len(x), file)
        if perhaps:
            first = np.sort(np.concatenate(ids))
            perhaps = len(x) > 1 and any(np.array_equal(first, np.arange(a, a + len(x))) for a in (0, 1))
            node, x = (0, x[:, 1:]) if perhaps else (None, x)
        if node is not None:
            ids = [name for part in ids for name in part] if text else np.concatenate(ids)
            x, nodes = _name(table, target, x, ids, node)
        table.say(plural(x.shape[1], "feature"))
    return x, nodes


def _name(table, target, x, ids, node) -> tuple[np.ndarray, Nodes]:
    """Name the nodes by the ids of the rows, or put the rows in the order of their numbers."""
    total, column = len(x), table.column(node)
    if isinstance(ids, list):
        numbered = False
        again = [name for name, times in collections.Counter(ids).items() if times > 1 or not name]
    else:
        ordered = np.sort(ids)
        numbered, again = np.array_equal(ordered, np.arange(total)), ordered[1:][ordered[1:] == ordered[:-1]]
    if len(again):
        what = f"{short(str(again[0]), '')} is there more than once" if again[0] != "" else "a cell is empty"
        raise StoreError(f"{table.name}: {column} holds the ids of the nodes, but {what}; rename it if it holds no ids")
    if not numbered:
        table.notes.append(f"{column} names the nodes, such as {short(str(ids[0]), '')}")
        return x, Nodes(total, table.name, ids, by_row=False)
    in_order = bool((ids == np.arange(total)).all())
    table.notes.append(f"{column} numbers the nodes" + ("" if in_order else ", the rows are put in their order"))
    if not in_order:
        ordered = np.memmap(f"{target}-ordered", np.float32, "w+", shape=x.shape)
        for a in range(0, total, 4096):
            ordered[ids[a:a + 4096]] = x[a:a + 4096]
        os.remove(target)
        x = ordered
    return x, Nodes(total, table.name, by_row=in_order)


def labels(file, nodes) -> tuple[np.ndarray, list[str] | None]:
    """Read a table of labels: a column of them, perhaps with a column of ids beside it.

    Args:
        file: path of a table: a row for each node, or with ids for those that have a label. Labels are integers, or
            text, numbered in sorted order; an empty cell, `nan` or -1 means none.
        nodes: `Nodes`, as `features` returns them.

    Returns:
        (int64 [V], -1 where there is none; the names of text labels, or None).

    Raises:
        StoreError: for labels that are neither, for the wrong number of rows, a node that is there twice.
    """
    with opened(file, _known) as table:
        label, node = _label_columns(table)
        if node is None and not nodes.by_row:
            raise StoreError(f"{file} has no column of ids: {nodes.source} has one, which is not 0 to V-1 in order, so "
                             "labels need a column id as well")
        if node is not None:
            table.notes.append(f"{table.column(node)} taken as ids, {table.column(label)} as labels")
        y, classes = np.full(nodes.count, -1), {}
        seen = np.zeros(nodes.count, bool)
        number = table.kinds[label] != "text"
        kinds = dict(real=[label], missing=True) if number else dict(text=[label])
        for lines, named, _, real, text in nodes.chunks(table, [] if node is None else [node], **kinds):
            if table.rows > nodes.count:
                hint = "" if table.names else "; a header is known by the name label"
                what = f"there are more labels than the {nodes.count:,} rows of {nodes.source}"
                raise table.error(lines[-1], what + hint)
            rows = named[:, 0] if node is not None else np.arange(table.rows - len(lines), table.rows)
            _once(table, lines, rows, seen)
            if number:
                values = np.where(np.isnan(real[:, 0]), -1, real[:, 0])
                bad = np.flatnonzero((values != np.floor(values)) | (values < -1) | (values >= 1 << 53))
                if len(bad):
                    raise table.error(lines[bad[0]], f"label {values[bad[0]]:.17g} is no class 0, 1, ... (-1: none)")
                y[rows] = values
            else:
                y[rows] = [-1 if name.lower() in NONE else classes.setdefault(name, len(classes)) for name in text[0]]
        if node is None and table.rows < nodes.count:
            raise StoreError(f"{file} has {table.rows:,} labels, {nodes.source} has {nodes.count:,} rows of features")
        missing = np.count_nonzero(y < 0)
        if missing == nodes.count:
            raise StoreError(f"{file} has no label for any node of {nodes.source}")
        names = None if number else _sort_classes(y, classes)
        if table.kinds[label] == "real":
            table.notes.append("floats that are whole numbers taken as labels")
        found = f"classes {', '.join(names[:3])}{', ...' * (len(names) > 3)}" if names else f"labels up to {y.max()}"
        table.say(found, *([f"{plural(missing, 'node')} without a label"] if missing else []))
    return y, names


def _label_columns(table) -> tuple[int, int | None]:
    """(column of the labels, column of ids or None)."""
    node = _id_column(table)
    named = [j for j in _named(table, LABELS) if j != node]
    if table.width == 1 and node is None:
        return 0, None
    if table.width == 2:
        node = node if node is not None else 1 - named[0] if len(named) == 1 else 0
        return 1 - node, node
    found = short(", ".join(map(table.column, range(table.width))), "")
    raise StoreError(f"{table.name} has the columns {found}: one of labels is needed, or one of ids and one of labels")


def _sort_classes(y, classes) -> list[str]:
    """Number classes in the order of their names."""
    names = sorted(classes)
    place = np.empty(len(names) + 1, np.int64)
    place[[classes[name] for name in names]] = np.arange(len(names))
    place[-1] = -1  # y of -1 looks here
    y[:] = place[y]
    return names


def _once(table, lines, nodes, seen):
    """Mark nodes as seen, each for the first time."""
    first = np.unique(nodes, return_index=True)[1]
    again = seen[nodes]
    again[np.setdiff1d(np.arange(len(nodes)), first)] = True
    if again.any():
        row = int(again.argmax())
        raise table.error(lines[row], f"node {nodes[row]} is there for the second time")
    seen[nodes] = True


def edges(file, target, nodes, keep=()) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Spool a table of edges.

    Source and destination are the columns of these names (or src, from, u; dst, target, to, v), else the first two.

    Args:
        file: path of a table with a row for each edge. target: path of a file to write; others get it as a prefix.
        nodes: `Nodes`, as `features` returns them.
        keep: {"edge_weight", "edge_time" or "edge_features": further columns to read, each a name or a number from 1};
            every other column is refused.

    Returns:
        (a memmap of int64 [2, M], sources over destinations; what was kept: edge_weight float64 [M], edge_time int64
        [M] or, if the first times are no integers, float64, edge_features float32 [M, D]).

    Raises:
        StoreError: for nodes that are not there, for columns that are not there or that nobody asked for.
    """
    with opened(file, _known) as table, contextlib.ExitStack() as files:
        ends = _end_columns(table)
        more = {name: [_column(table, word) for word in words] for name, words in dict(keep).items()}
        taken = [*ends, *(j for columns in more.values() for j in columns)]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is taken for two things")
        extra = [table.column(j) for j in range(table.width) if j not in taken]
        if extra:
            raise StoreError(f"{file} has more columns than are understood, {short(', '.join(extra), '')}: leave them "
                             "out, or say what they are by --weights, --times, --edge-features"
                             + ("" if table.names else "; names in a header would tell which is which"))
        whole = [name for name, columns in more.items() if name == "edge_time" and table.kinds[columns[0]] == "whole"]
        real = {name: columns for name, columns in more.items() if name not in whole}
        out = {name: files.enter_context(open(f"{target}-{name}", "wb")) for name in more}
        cuts = np.cumsum([len(columns) for columns in real.values()])[:-1]

        def pairs():
            kinds = dict(
                whole=[more[name][0] for name in whole], real=[j for columns in real.values() for j in columns]
            )
            for lines, pair, integers, floats, _ in nodes.chunks(table, ends, **kinds):
                found = dict(zip(whole, integers.T)) | dict(zip(real, np.split(floats, cuts, axis=1)))
                if "edge_features" in found:
                    found["edge_features"] = _float32(table, lines, found["edge_features"], real["edge_features"])
                for name, values in found.items():
                    out[name].write(np.ascontiguousarray(values).tobytes())
                yield pair

        found = spool(target, pairs(), np.int64, 2)
        if not len(found):
            raise StoreError(f"{file} has a header and no rows")
        table.say(*(f"{name} from {', '.join(map(table.column, columns))}" for name, columns in more.items()))
        files.close()
        dtypes = {
            name: np.int64 if name in whole else np.float32 if name == "edge_features" else np.float64 for name in more
        }
        kept = {name: np.memmap(f"{target}-{name}", dtype, "r") for name, dtype in dtypes.items()}
        if "edge_features" in kept:
            kept["edge_features"] = kept["edge_features"].reshape(len(found), -1)
        return found.T, kept


def _column(table, word) -> int:
    """The column of a name, or of a number from 1."""
    if table.names and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and 1 <= int(word) <= table.width:
        return int(word) - 1
    names = short(", ".join(table.names), "") if table.names else f"columns 1 to {table.width}, without names"
    raise StoreError(f"{table.name} has no column {short(word)}, and there is no file of that name: it has {names}")


def _float32(table, lines, numbers, columns) -> np.ndarray:
    """float64 [r, len(columns)] as float32, refused where they are too large for it."""
    with np.errstate(over="ignore"):
        chunk = numbers.astype(np.float32)
    if not np.isfinite(chunk).all():
        row, j = np.argwhere(~np.isfinite(chunk))[0]
        what = f"{table.column(columns[j])} is {numbers[row, j]}, which is too large for float32"
        raise table.error(lines[row], what)
    return chunk


def edge_rows(file, target, name) -> np.ndarray:
    """Spool a table of its own with a row for each edge, in the order of the table of edges.

    Args:
        file: path of the table. target: path of a file to write. name: "edge_weight", "edge_time" or "edge_features".

    Returns:
        A memmap: edge_features float32 [M, D], edge_time int64 [M] or, if the first are no integers, float64 [M],
        edge_weight float64 [M].
    """
    with opened(file, _known) as table:
        if name != "edge_features" and table.width != 1:
            raise StoreError(f"{file} has {plural(table.width, 'column')}: one is needed, the {name} of each edge")
        whole = name == "edge_time" and table.kinds[0] == "whole"
        every = list(range(table.width))

        def rows():
            for lines, integers, floats, _ in table.chunks(**{"whole" if whole else "real": every}):
                yield (
                    integers if whole else _float32(table, lines, floats, every) if name == "edge_features" else floats
                )

        dtype = np.int64 if whole else np.float32 if name == "edge_features" else np.float64
        found = spool(target, rows(), dtype, table.width)
        table.say(f"taken as {name}")
        return found if name == "edge_features" else found[:, 0]


def node_times(file, nodes) -> np.ndarray:
    """Read a table of the nodes' times: a column of them, perhaps with a column of ids beside it -> int64 [V]."""
    with opened(file, _known) as table:
        node = _id_column(table) if table.width > 1 else None
        node = 0 if node is None and table.width == 2 else node
        if table.width > 2 or node is None and not nodes.by_row:
            raise StoreError(f"{file} has {plural(table.width, 'column')}: a column of times is needed, "
                             + ("and one of ids" if not nodes.by_row else "or one of ids and one of times"))
        times, seen = np.zeros(nodes.count, np.int64), np.zeros(nodes.count, bool)
        kinds, first = {"whole": [1 - node if node is not None else 0]}, 0
        for lines, named, whole, *_ in nodes.chunks(table, [] if node is None else [node], **kinds):
            rows = named[:, 0] if node is not None else np.arange(first, first + len(lines))
            if table.rows > nodes.count:
                raise table.error(lines[-1], f"there are more times than the {nodes.count:,} rows of {nodes.source}")
            _once(table, lines, rows, seen)
            times[rows], first = whole[:, 0], first + len(lines)
        if not seen.all():
            raise StoreError(f"{file} has no time for node {int((~seen).argmax())}, and every node needs one")
        table.say("taken as the nodes' times")
    return times


def _end_columns(table) -> list[int]:
    """The columns of sources and destinations."""
    found = [_named(table, words) for words in (SOURCES, DESTINATIONS)]
    if table.width < 2:
        raise StoreError(f"{table.name} has one column: two are needed, source and destination, with a comma, a "
                         "semicolon, a tab or spaces between them")
    if [len(columns) for columns in found] == [1, 1]:
        return [found[0][0], found[1][0]]
    if any(found):
        raise StoreError(f"{table.name} has the columns {short(', '.join(table.names), '')}: call one of them source "
                         "and one destination")
    table.notes.append(f"{table.column(0)} taken as source, {table.column(1)} as destination")
    return [0, 1]


def ids(file, nodes) -> np.ndarray:
    """Read a table of one column that names nodes, each once -> int64 [n]; StoreError for a mask, or for no rows."""
    with opened(file, _known) as table:
        if table.width != 1:
            raise StoreError(f"{file} has {table.width} columns: one is needed, the ids of nodes")
        seen, found = np.zeros(nodes.count, bool), []
        for lines, named, *_ in nodes.chunks(table, [0]):
            if nodes.names is None and len(lines) > 2 and named.max() <= 1:
                raise StoreError(f"{file} looks like a mask of 0 and 1: the ids of the nodes are needed, one a line")
            _once(table, lines, named[:, 0], seen)
            found.append(named[:, 0])
        if not found:
            raise StoreError(f"{file} has a header and no rows")
        table.say()
    return np.concatenate(found)
