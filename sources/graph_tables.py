"""Tables of nodes and edges -> arrays: what each column holds, and which nodes it refers to.

    x, nodes = features("x.csv.gz", folder)                   # float32 [V, F]; a column of ids names the nodes
    y = of_nodes("y.csv", nodes, "labels")                    # float64 [V] or [V, C], NaN: no label; or text [V]
    edge_index, more = edges("edges.csv", folder, nodes, {"edge_weight": ["w"]})        # int64 [2, M]

Rows of features are the nodes 0 to V-1, unless there is a column of ids: a permutation of 0 to V-1 reorders the rows,
other ids and text name the nodes in row order. Each function prints how it read the columns.
"""

import os
import re

import numpy as np
import torch

from disk.columns import COLUMNS, EDGE_TYPE, OF_EDGES
from disk.convert import DATE, SAMPLED, RoundedRows, spool
from disk.files import StoreError, plural
from sources.tables import ID, MISSING, NUMBER, TIME, opened, short, stacked

SLICE = 1 << 20  # edges renumbered at a time
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
    arrays["features"], nodes = features(tables.pop("features"), folder, ignore)
    for name, source in {**tables, **columns}.items():
        if name not in OF_EDGES:
            arrays[name] = of_nodes(source, nodes, name, ignore)
        elif os.path.isfile(source):
            arrays |= edge_rows(source, folder, name, ignore)
        else:
            keep[name] = source.split(",") if COLUMNS[name].width else [source]
    arrays["edge_index"], kept = edges(file, folder, nodes, keep, ignore)
    if unused := [name for name, tables in ignore.items() if not tables]:
        raise StoreError(f"ignore: none of the tables has a column {unused[0]!r}")
    return arrays | kept, nodes


class Nodes:
    """How tables refer to the V nodes, the rows of the feature table `source`: by number, or by `names` [V], integers
    or strings. by_row: whether row i of a table without ids is node i. feature_names: of the columns, or None; class_names:
    of the columns of several labels, or None."""

    feature_names = class_names = None

    def __init__(self, count, source, names=None, by_row=True):
        self.count = count
        self.source = source
        self.names = names
        self.by_row = by_row
        self._numbers = {name: i for i, name in enumerate(names or ())}
        self.kind = str if names and type(names[0]) is str else ID  # of cells that refer to nodes

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
            cell = short(str(cells[row])) or "''"
            raise table.error(first + row, f"there is no node {cell}: {has}{hint}")
        return nodes


def features(file, folder, ignore=()):
    """Spool a table with one row per node to a file in `folder` -> (memmap float32 [V, F], its `Nodes`).

    A column of ids is not a feature. It is recognised by its name (id, node, index, ..., or for the first column
    anything that ends in id), or is the first column if that holds text; a first column of another name that holds the
    numbers 0 to V-1 or 1 to V in any order is refused. A column of lists is as many features as a list has numbers.
    """
    with opened(file, ignore) as table:
        text = [0] if table.kinds[0] == "text" else []
        ids = table.named("id")
        if len(ids) > 1:
            both = " and ".join(map(table.column, ids[:2]))
            one = f"if the first holds none, drop it{table.flag(ids[0])}"
            raise StoreError(f"{file}: {both} look like ids of the nodes: {one}")
        node = next(iter([*ids, *text]), None)
        kept = [j for j in range(table.width) if j != node]
        for j in table.named("label"):
            cure = f"drop {table.column(j)}{table.flag(j)}, or rename it if it is none"
            raise StoreError(f"{file}: features must not tell the label: {cure}")
        for j in _parts_of_split(table, "^is|mask$"):
            cure = f"drop it{table.flag(j)}, or rename it"
            raise StoreError(
                f"{file}: {table.column(j)} looks like a split, not like a feature: {cure}"
            )
        if not kept:
            raise StoreError(f"{file} has no features: its column {table.column(0)} holds ids")
        kinds = table.measures(kept)
        firsts = []  # values of the first column
        if node is not None:
            kinds[node] = str
        first = node or 0

        rounded = RoundedRows(SAMPLED, 1)

        def rows():
            start = 0
            for _, columns in table.read(kinds):
                if kinds[first] is not list:
                    firsts.append(columns[first])
                x = stacked(columns, kept, np.float32)
                if start < SAMPLED:
                    as_read = torch.from_numpy(stacked(columns, kept, np.float64))
                    rounded.add(start, as_read, torch.from_numpy(x))
                start += len(x)
                yield x

        x = spool(folder, rows(), np.float32, sum(table.widths[j] for j in kept))
        nodes = Nodes(len(x), file)
        if node is not None:
            x, nodes = _name(table, folder, x, table.identified(node, firsts), node)
        elif len(kept) > 1 and len(x) > 1 and firsts:
            values = np.sort(np.concatenate(firsts))
            if values[0] in (0, 1) and np.array_equal(values, values[0] + np.arange(len(x))):
                cure = f"call it id or drop it{table.flag(0)}"
                raise StoreError(f"{file}: {table.column(0)} counts the rows: {cure}")
        nodes.feature_names = table.names and _names_of(table, kept)
        if loss := rounded.loss(nodes.feature_names):
            table.notes.append(f"read as float32: {loss}")
        table.say(plural(x.shape[1], "feature"))
    return x, nodes


def _names_of(table, kept) -> list[str]:
    """Name the numbers of some columns: by the column, and for a column of lists `name[0]`, `name[1]`, ..."""
    names = []
    for j in kept:
        name = table.names[j]
        width = table.widths[j]
        names += [name] if width == 1 else [f"{name}[{i}]" for i in range(width)]
    return names


def _name(table, folder, x, ids, node):
    """Take the ids of the rows as names of the nodes; if they are 0 to V-1, sort the rows by them -> (x, `Nodes`)."""
    column = table.column(node)
    if not isinstance(ids, list) and ids.dtype.kind == "f":
        row = int(np.isnan(ids).argmax())
        raise table.error(row, f"{column} is empty, nan or infinite: an id is needed")
    different, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        again = short(str(different[counts.argmax()]))
        raise StoreError(f"{table.name}: {column} holds ids, but {again!r} occurs more than once")
    if different[0] == "":
        raise StoreError(f"{table.name}: {column} holds ids, but one is empty")
    if isinstance(ids, list) or not np.array_equal(different, np.arange(len(x))):
        table.notes.append(f"{column} names the nodes, such as {short(str(ids[0]))}")
        return x, Nodes(len(x), table.name, list(ids), by_row=False)
    table.notes.append(f"{column} numbers the nodes")
    if not (in_order := np.array_equal(ids, different)):
        table.notes.append("the rows are put in their order")
        rows = np.array_split(np.argsort(ids), len(x) // 4096 + 1)
        x = spool(folder, (x[part] for part in rows), np.float32, x.shape[1])
    return x, Nodes(len(x), table.name, by_row=in_order)


def _rows_of_nodes(table, nodes, node, kinds, missing):
    """Read a table with one row per node or, if column `node` holds ids, for some nodes -> (int64 [n], distinct nodes;
    {column: values [n], or those that `Table.identified` returns for text})."""
    import pyarrow

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
    columns = {}
    for j, kind in kinds.items():
        values = [part[j] for part in parts]
        if kind is not str:
            columns[j] = np.concatenate(values)
        elif j == node:
            columns[j] = pyarrow.chunked_array(values)
        else:
            columns[j] = table.identified(j, values)
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


def of_nodes(file, nodes, name, ignore=()) -> np.ndarray:
    """Read a table for nodes.

    Args:
        name: "labels": a column of numbers or text, or multi-label columns of 0 and 1 -> float64 [V] or [V, C], NaN:
            no label, or text [V]; a column of nodes of a store: its values [V]; both may have a column of ids as well, with
            which labels may be for some nodes only. Other names: a column of ids of distinct nodes -> int64 [n].
    """
    with opened(file, ignore) as table:
        node = next(iter(table.named("id")), None)
        is_labels = name == "labels"
        parts = _parts_of_split(table) if is_labels else ()
        if parts and table.width > 1 + len(table.named("id")[:1]):
            cure = f"give ids of nodes as --train FILE, and drop it{table.flag(*parts)}"
            raise StoreError(
                f"{file}: {table.column(parts[0])} looks like a split, not like a label: {cure}"
            )
        column = COLUMNS.get(name)
        if not (is_labels or column):
            node = 0 if table.width == 1 else None
        elif node is None and table.width == 2:
            named = table.named("label")
            node = 1 - named[0] if is_labels and len(named) == 1 else 0
        columns = [j for j in range(table.width) if j != node]
        several = is_labels and all(table.kinds[j] in ("whole", "real", "empty") for j in columns)
        if len(columns) != (is_labels or name in COLUMNS) and not (columns and several):
            actual = short(", ".join(map(table.column, range(table.width))))
            cure = "; --ignore leaves columns out" if table.names else ""
            raise StoreError(f"{file} has the columns {actual}, which are no {name}{cure}")
        if columns and node is not None:
            which = ", ".join(map(table.column, columns))
            table.notes.append(f"{table.column(node)} taken as ids, {which} as {name}")
        kinds = dict.fromkeys(columns, TIME if column and column.timed else float)
        if is_labels:
            kinds |= {j: str for j in columns if table.may_be_text(j)}
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


def _parts_of_split(table, having="") -> list[int]:
    """List the columns whose names say that they hold a split, and match the pattern `having`."""
    words = [re.sub(r"[\W_\d]", "", name.lower()) for name in table.names or ()]
    return [j for j, word in enumerate(words) if SPLIT.fullmatch(word) and re.search(having, word)]


def _check_labels(table, j, cells, count):
    """Refuse what is no label in one of `count` columns of them: text in one of several, fractions in csv, numbers below -1."""
    if not isinstance(cells, list):
        bad = (cells < -1) | (cells > (1 if count > 1 else np.inf))
        if bad.any():
            row = int(bad.argmax())
            why = (
                "of several labels each is 0, 1 or empty"
                if count > 1
                else "labels are 0 or more, or -1 for none"
            )
            raise table.error(row, f"{table.column(j)} is {cells[row]:g}: {why}")
        return
    numbers = all(cell in MISSING or NUMBER.fullmatch(cell) for cell in cells)
    fractions = numbers and table.kinds[j] != "text"
    for row, cell in enumerate(cells):
        if count > 1 and cell not in ("0", "1", "-1", *MISSING):
            why = "of several labels each is 0, 1 or empty"
        elif fractions and cell not in MISSING and not float(cell).is_integer():
            why = "labels are whole numbers or text (node regression is not supported)"
        else:
            continue
        raise table.error(row, f"{table.column(j)} is {short(cell)!r}: {why}")


def edges(file, folder, nodes, keep=(), ignore=()):
    """Spool a table with one row per edge to a file in `folder` -> (edge_index int64 [2, M], mapped; {name in `keep`:
    values as in `edge_rows`}).

    Source and destination are the columns of these names (or src, from, u, head; dst, to, v, tail; ...), else the first two.
    keep: {name of a column of a store: columns of the table, by name or number from 1}; other columns are refused.
    """
    with opened(file, ignore) as table:
        ends = _end_columns(table)
        nodes.check_header(table, ends)
        kept = {name: [_column(table, w) for w in words] for name, words in dict(keep).items()}
        taken = [*ends, *sum(kept.values(), [])]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is used for two things")
        if extra := [j for j in range(table.width) if j not in taken]:
            columns = short(", ".join(map(table.column, extra)))
            cure = f"drop it{table.flag(*extra)}, or name it, as by --weights"
            raise StoreError(f"{file}: no use for {columns}: {cure}")
        arrays = _spooled(table, folder, {"ends": ends, **kept}, nodes)
        table.say(*(f"{name} from {', '.join(map(table.column, js))}" for name, js in kept.items()))
    return arrays.pop("ends").T, arrays


def edge_rows(file, folder, name, ignore):
    """Spool a separate table with one row per edge -> {name: mapped edge_features float32 [M, D], edge_weight float64 [M],
    edge_type int64 [M] or edge_time [M], int64 or datetime64[us] for dates}; see `_spooled`."""
    with opened(file, ignore) as table:
        if not COLUMNS[name].width and table.width != 1:
            raise StoreError(f"{file} has {table.width} columns: one is needed, of {name}")
        arrays = _spooled(table, folder, {name: list(range(table.width))})
        table.say(f"taken as {name}")
        return arrays


def _spooled(table, folder, fields, nodes=None):
    """Spool `fields` {name: columns} of a table of edges as records in one file -> {name: view of its field}. Types that
    are text are numbered in the order of their first rows; "edge_types" then holds their names."""
    ends = fields.get("ends", ())
    record = []
    kinds = {}
    for name, which in fields.items():
        column = COLUMNS.get(name)
        dtype = column.cells if column else np.int64
        kind = int if dtype is np.int64 else float
        if column and column.timed:
            kind = TIME
            dtype = np.int64
        record.append((name, dtype, (sum(table.widths[j] for j in which),)))
        kinds |= dict.fromkeys(which, kind)
        if column and column.width:
            kinds |= table.measures(which)
    record = np.dtype(record, align=True)
    kinds |= {j: nodes.kind for j in ends}
    texts = [j for j in fields.get(EDGE_TYPE.name, ()) if table.may_be_text(j)]
    kinds |= dict.fromkeys(texts, str)
    numbers = {}

    def chunks():
        for first, columns in table.read(kinds):
            columns |= {j: nodes.numbers(table, first, columns[j]) for j in ends}
            for j in texts:
                coded = columns[j].dictionary_encode()
                names = coded.dictionary.to_pylist()
                if missing := [name for name in names if name in MISSING]:
                    row = first + columns[j].index(missing[0]).as_py()
                    raise table.error(row, f"{table.column(j)} is empty or nan")
                codes = np.array([numbers.setdefault(name, len(numbers)) for name in names])
                columns[j] = codes[coded.indices.to_numpy()]
            chunk = np.empty(table.rows - first, record)
            for name, which in fields.items():
                chunk[name] = stacked(columns, which, record[name].base)
            yield chunk

    rows = spool(folder, chunks(), record)
    import pyarrow

    arrays = {name: rows[name] for name in fields}
    for name in arrays.keys() & COLUMNS.keys():
        if not COLUMNS[name].width:
            arrays[name] = rows[name][:, 0]
            if COLUMNS[name].timed and table.dated(fields[name][0]):
                arrays[name] = arrays[name].view(DATE)
    for j in texts:
        names = table.identified(j, [pyarrow.array([*numbers])])
        if isinstance(names, list):
            arrays["edge_types"] = names
        elif not np.array_equal(names, np.arange(len(names))):
            codes = np.array_split(arrays[EDGE_TYPE.name], len(rows) // SLICE + 1)
            arrays[EDGE_TYPE.name] = spool(folder, (names[part] for part in codes), np.int64)
    return arrays


def _column(table, word) -> int:
    """Find the column with a name, or with a number from 1."""
    if table.names and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and (place := int(word) - 1) in table.places:
        return table.places.index(place)
    names = short(", ".join(table.names or map(str, range(1, table.width + 1))))
    raise StoreError(f"{short(word)} is neither a file nor one of {table.name}'s columns, {names}")


def _end_columns(table) -> list[int]:
    """Find the columns of sources and of destinations."""
    sources = table.named("source")
    destinations = table.named("destination")
    if table.width < 2:
        raise StoreError(f"{table.name} has one column: two are needed, with a comma between them")
    if len(sources) == len(destinations) == 1:
        return sources + destinations
    if sources or destinations:
        names = short(", ".join(table.names))
        raise StoreError(f"{table.name} has the columns {names}: call one source, one destination")
    table.notes.append(f"{table.column(0)} taken as source, {table.column(1)} as destination")
    return [0, 1]
