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

from disk.columns import COLUMNS, EDGE_TYPE, OF_EDGES
from disk.convert import DATE, SAMPLED, RoundedRows, spool
from disk.files import StoreError, plural
from extras.tables import (
    ID,
    NUMBER,
    TIME,
    digits,
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
HEADER = "; a header is known by names such as id, source, destination and label"


def read_tables(file, tables, columns, folder, ignore):
    """Read the arrays of a graph from tables -> ({name as in an .npz file: array}, with the names in `edge_types` if types
    are text; its `Nodes`).

    Args:
        file: the table of edges. tables: {name of an array: file of a table}; "features" is required.
        columns: {name of a column of a store: file of a table, or columns of the table of edges}.
        folder: for files without a name that large arrays are mapped from.
        ignore: names of columns to leave out, of any of the tables.
    """
    if "features" not in tables:
        with opened(file):  # refuses what is no table
            how = "features are needed, a line for each node"
            raise StoreError(f"{file} holds edges alone: {how}, as --features FILE")
    ignore = dict.fromkeys(ignore, 0)
    arrays = {}
    keep = {}
    own_files = {}
    feature_table = tables.pop("features")
    sources = {**tables, **columns}
    node_tables = [source for name, source in sources.items() if name not in OF_EDGES]
    called = _called_elsewhere(node_tables, file, ignore)
    arrays["features"], nodes = features(feature_table, folder, ignore, called)
    for name, source in sources.items():
        if name not in OF_EDGES:
            arrays[name] = node_column(source, nodes, name, ignore)
        elif os.path.isfile(source):
            own_files[name] = source
        else:
            keep[name] = source.split(",") if COLUMNS[name].wide else [source]
    ids = set()
    for source in own_files.values():
        with opened(source, ignore, nodes.heads) as table:
            ids |= {table.names[j] for j in _edge_ids(table)}
    arrays["edge_index"], kept = edges(file, folder, nodes, keep, ignore, ids=ids)
    keys = Keys(file, nodes, arrays["edge_index"], kept.pop("ids", {}))
    for name, source in own_files.items():
        arrays |= edge_rows(source, folder, name, ignore, keys)
    if unused := [name for name, tables in ignore.items() if not tables]:
        raise StoreError(f"ignore: none of the tables has a column {unused[0]!r}")
    return arrays | kept, nodes


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
    or strings. by_row: whether row i of a table without ids is node i. id_name: of the column of ids, or None. feature_names:
    of the columns, or None; class_names: of the columns of several labels, or None."""

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

    def check_header(self, table, columns):
        """Refuse a header whose cells in these columns are names of nodes: it may be a row."""
        if table.names and all(table.names[j] in self._numbers for j in columns):
            header = short(",".join(table.names))
            raise StoreError(f"{table.name}: its header {header} names nodes: put one above it")

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
            raise table.error(first + row, f"there is no node {cell}: {has}{hint}")
        return nodes


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


def features(file, folder, ignore=(), called=()):
    """Spool a table with one row per node to a file in `folder` -> (memmap float32 [V, F], its `Nodes`).

    A column of ids is not a feature, wherever it stands. It is recognised by its name (see `Table.named`; `called`: the names
    that other tables have for it), or else is the column of text. A first column of another name that holds the numbers 0 to
    V-1 or 1 to V in any order is refused. A column of lists is as many features as a list has numbers.
    """
    with opened(file, ignore) as table:
        named = {*table.named("id")}
        for j, name in enumerate(table.names or ()):
            if {name, " ".join(words_of(name))} & {*called} and table.identifies(j):
                named.add(j)
        # text that repeats is no feature either: `read` refuses it by its name
        texts = [
            j
            for j, kind in enumerate(table.kinds)
            if kind == "text" and (j == 0 or table.identifies(j))
        ]
        node = _id_column(table, sorted(named) or texts)
        kept = [j for j in range(table.width) if j != node]
        for j in table.named("label"):
            cure = f"drop {table.column(j)}{table.flag(j)}, or rename it if it is none"
            raise StoreError(f"{file}: features must not tell the label: {cure}")
        _refuse_splits(table, "feature", "^is|mask$")
        if not kept:
            raise StoreError(f"{file} has no features: its column {table.column(0)} holds ids")
        for j in named - {node}:
            table.notes.append(f"{table.column(j)} repeats and is a feature")
        kinds = dict.fromkeys(kept, list)
        if node is not None:
            kinds[node] = str
        ids = []
        rounded = RoundedRows(SAMPLED, 1)

        def rows():
            start = 0
            for _, columns in table.read(kinds):
                if node is not None:
                    ids.append(columns[node])
                columns = [columns[j] for j in kept]
                x = stacked(columns, np.float32)
                if start < SAMPLED:
                    as_read = torch.from_numpy(stacked(columns, np.float64))
                    rounded.add(start, as_read, torch.from_numpy(x))
                start += len(x)
                yield x

        x = spool(folder, rows(), np.float32, sum(table.widths[j] for j in kept))
        nodes = Nodes(len(x), file)
        if node is not None:
            x, nodes = _name(table, folder, x, table.identified(node, joined(ids)), node)
            nodes.id_name = table.names and table.names[node]
        elif len(kept) > 1 and len(x) > 1:
            _check_counting(table, kept, x)
        if table.names:
            widths = [(table.names[j], table.widths[j]) for j in kept]
            nodes.feature_names = [
                f"{name}[{i}]" if width > 1 else name
                for name, width in widths
                for i in range(width)
            ]
        if loss := rounded.loss(nodes.feature_names):
            table.notes.append(f"read as float32: {loss}")
        table.say(plural(x.shape[1], "feature"))
    return x, nodes


def _check_counting(table, kept, x):
    """Refuse a first column that holds the numbers 0 to V-1 or 1 to V in any order; name others in a line. x [V, F]: the
    features, of the columns `kept`."""
    first = 0
    for j in kept:
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
    if isinstance(ids, list) or not np.array_equal(different, np.arange(len(x))):
        table.notes.append(f"{column} names the nodes, such as {short(str(ids[0]))}")
        return x, Nodes(len(x), table.name, list(ids), by_row=False)
    table.notes.append(f"{column} numbers the nodes")
    if not (in_order := np.array_equal(ids, different)):
        table.notes.append("the rows are put in their order")
        x = _ordered(folder, x, np.argsort(ids))
    return x, Nodes(len(x), table.name, by_row=in_order)


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
    nodes.check_header(table, [node])
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
        name: "labels": a column of numbers or text, or multi-label columns of 0 and 1 -> float64 [V] or [V, C], NaN:
            no label, or text [V]; a column of nodes of a store: its values [V]; both may have a column of ids as well, with
            which labels may be for some nodes only. Other names: a column of ids of distinct nodes -> int64 [n].
    """
    with opened(file, ignore, nodes.heads) as table:
        is_labels = name == "labels"
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
        kind = str if is_labels else TIME if column and column.timed else float
        kinds = dict.fromkeys(columns, kind)
        rows, cells = _rows_of_nodes(table, nodes, node, kinds, is_labels)
        for j in columns if is_labels else ():
            _check_labels(table, j, cells[j], len(columns))
        table.say()
    if is_labels and len(columns) > 1 and table.names:
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
    if name != "labels" and name not in COLUMNS:
        return 0 if table.width == 1 else None
    names = table.names or ()
    ids = {*table.named("id"), *(j for j, name in enumerate(names) if name == nodes.id_name)}
    if not ids and (nodes.kind is str or table.width == 2):
        others = table.named("label" if name == "labels" else "more of an edge")
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
        why = "labels are whole numbers or text (node regression is not supported)"
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
    table.refuse(0, j, bad, f"is {how}: {why}", cells)


def edges(file, folder, nodes, keep=(), ignore=(), *, ids=(), say=print):
    """Spool a table with one row per edge to a file in `folder` -> (edge_index int64 [2, M], mapped; {name in `keep`:
    values as in `edge_rows`, "ids": {name in `ids`: pyarrow array of strings [M]}}).

    Source and destination are the columns that `_end_columns` finds, else the first two.
    keep: {name of a column of a store: columns of the table, by name or number from 1}; None: there can be none. ids: names
    of columns that other tables of these edges have as ids, too. Other columns are refused. say: prints a line.
    """
    with opened(file, ignore, nodes.heads) as table:
        kept = {
            name: [_column(table, w) for w in words] for name, words in dict(keep or ()).items()
        }
        ends = _end_columns(table, nodes, sum(kept.values(), []))
        nodes.check_header(table, ends)
        keys = [j for j in range(table.width) if table.names and table.names[j] in ids]
        taken = [*ends, *sum(kept.values(), [])]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is used for two things")
        if extra := [j for j in range(table.width) if j not in [*taken, *keys]]:
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
    nodes: Nodes
    ends: np.ndarray  # int64 [2, M]
    ids: dict  # {name of a column: pyarrow array of strings [M]}

    def end_keys(self, ends):
        """Pack the ends [2, n] of edges into a pyarrow array of n integers."""
        import pyarrow

        return pyarrow.array(ends[0] * self.nodes.count + ends[1])

    def called(self, key) -> str:
        """Name an edge by its key, for messages."""
        if type(key) is str:
            return key
        names = self.nodes.names or range(self.nodes.count)
        return " -> ".join(str(names[node]) for node in divmod(key, self.nodes.count))

    def have_ends(self, table, columns) -> bool:
        """Whether two columns hold the ends of an edge in each of the first rows."""
        pairs = [[self.nodes.find(cell) for cell in table.sample(j)] for j in columns]
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
        kind = nodes.kind
        dtype = np.int64
        if column:
            # types may be text
            kind = str if column is EDGE_TYPE else TIME if column.timed else float
            kind = list if column.wide else kind
            dtype = np.int64 if column.timed else column.cells
        kinds |= dict.fromkeys(which, kind)
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
            for j in fields.get("ends", ()):
                columns[j] = nodes.numbers(table, first, columns[j])
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
    """Find the columns of sources and of destinations, see `_found_ends`; else they are the first two that are not `taken`."""
    if table.width < 2:
        raise StoreError(f"{table.name} has one column: two are needed, with a comma between them")
    ends = _found_ends(table, nodes, taken)
    if ends is None:
        ends = [j for j in range(table.width) if j not in taken][:2]
        ends = ends if len(ends) == 2 else [0, 1]
    if not (table.named("source") and table.named("destination")):
        source, destination = map(table.column, ends)
        table.notes.append(f"{source} taken as source, {destination} as destination")
    return ends


def _found_ends(table, nodes, taken=()) -> list[int] | None:
    """Find the columns of sources and of destinations: by known names; by the name of the ids, as protein_a and protein_b
    are of `protein`; if names of nodes are text, as the two columns of such names. None without; StoreError for one."""
    sources = table.named("source")
    destinations = table.named("destination")
    if len(sources) == len(destinations) == 1:
        return sources + destinations
    if sources or destinations:
        names = short(", ".join(table.names))
        raise StoreError(f"{table.name} has the columns {names}: call one source, one destination")
    id_words = words_of(nodes.id_name or "")
    twins = [(stem, pair) for stem, pair in _twins(table) if not {*pair} & {*taken}]
    pairs = [pair for stem, pair in twins if stem == id_words or "id" in meanings("".join(stem))]
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
