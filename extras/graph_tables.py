"""Tables of a graph -> its arrays: which columns of a table of edges are ends, and what the others hold.

    arrays = read_tables({"": "x.csv", ",,": "edges.csv"}, {"labels": "y.csv"}, {"edge_weight": "w"}, folder, ())
    edge_index, more = edges("edges.csv", folder, nodes, {"edge_weight": ["w"]})        # int64 [2, M]

Tables of nodes are read by node_tables.py. A table of edges names its ends (`_end_columns`); another table of the same edges is
joined to it by its ends, by ids of edges, or by row (`edge_rows`). Each function prints how it read the columns.
"""

import os
import tempfile
from typing import NamedTuple

import numpy as np

from disk.columns import COLUMNS, EDGE_TIME, EDGE_TYPE, OF_EDGES
from disk.convert import DATE, spool
from disk.files import StoreError, plural, short
from extras.node_tables import (
    Nodes,
    check_header,
    columns_called,
    features,
    id_column,
    node_column,
    ordered,
)
from extras.tables import TIME, digits, meanings, opened, stacked, words_of, written

CELLS = {
    float: np.float64,
    list: np.float32,
}  # dtype in which cells of a kind are kept, if not int64


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
            raise StoreError(
                f"{sources[',,']} holds edges alone: "
                "features are needed, a line for each node, as --features FILE"
            )
    types = [kind for kind in sources if "," not in kind]
    relations = [kind for kind in sources if "," in kind]
    for kind in relations or ["edges"]:
        if kind.count(",") != 2 or not {*kind.split(",")[::2]} <= {*types}:
            raise StoreError(
                f"{kind}: TYPE,RELATION,TYPE=FILE is needed, of types with a table: {', '.join(types)}"
            )
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
            raise StoreError(f"{name}: {source} is not TYPE=FILE, of the types {', '.join(types)}")
        values = node_column(file, nodes[kind], name, ignore)
        add(kind, {name: values, "class_names": nodes[kind].class_names})
    for kind in relations:
        ends = Ends(*(nodes[end] for end in kind.split(",")[::2]))
        add(kind, _edges_and_columns(sources[kind], folder, ends, edge_columns, ignore))
    if unused := sorted(edge_columns.keys() - {name.partition(":")[0] for name in arrays}):
        raise StoreError(
            f"none of {', '.join(map(sources.get, relations))} has the column {edge_columns[unused[0]]}"
        )
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
    keys = Keys(file, ends, pairs, kept.pop("ids"))
    for name, source in own_files.items():
        kept |= edge_rows(source, folder, name, ignore, keys)
    return {"edge_index": pairs, **kept}


def _called_elsewhere(node_tables, edge_table, ignore) -> set[str]:
    """Return the names by which other tables may call the ids of the nodes: names of columns of the tables of nodes, and
    what the names of two ends have in common."""
    called = set()
    for file in node_tables:
        with opened(file, ignore) as table:
            ids = {table.names[j] for j in table.named("id")}
            called |= ids or {name for name in table.names if not meanings(name)}
    with opened(edge_table, ignore) as table:
        if not table.named("source"):
            called |= {" ".join(stem) for stem, _ in _twins(table)}
    return called


class Ends(NamedTuple):
    """The nodes that the two ends of edges are."""

    source: Nodes
    destination: Nodes

    def called(self) -> list[str]:
        """Return what columns of them are called: their types, or source and destination."""
        return [nodes.type or end for nodes, end in zip(self, self._fields)]


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
            if words and (not nodes.source.type or {*words} <= {*table.names})
        }
        taken = sum(kept.values(), [])
        columns = _end_columns(table, nodes, taken)
        taken = [*columns, *taken]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is used for two things")
        ends = dict(zip(columns, nodes))
        check_header(table, ends)
        keys = [j for j, name in enumerate(table.names) if name in ids and j not in taken]
        extra = [j for j in range(table.width) if j not in [*taken, *keys]]
        dates = [j for j in extra if table.form(j) is TIME]
        if len(dates) == 1 and keep is not None and EDGE_TIME.name not in keep:
            kept[EDGE_TIME.name] = dates
            extra.remove(dates[0])
        if extra:
            cure = f"drop it{table.flag(*extra)}, or name it, as by --weights"
            cure = "pairs are two columns of nodes" if keep is None else cure
            raise StoreError(f"{file}: no use for {short(table.column(*extra))}: {cure}")
        arrays = _spooled(table, folder, ends, kept, keys)
        notes = [f"{name} from {table.column(*columns)}" for name, columns in kept.items()]
        table.say(*notes, say=say)
    return arrays.pop("ends").T, arrays


def pairs_of_table(file, store, edge_type=None, say=print) -> np.ndarray:
    """Read pairs of nodes of a store from a table of sources and destinations, as in a table of edges -> their names, int64 or
    text, or their numbers if they have none, [n, 2]. edge_type: number of the type of their edges: columns may be called as its
    types of nodes. say: prints a line."""
    import pyarrow

    names = store.node_names()
    numbers = digits(pyarrow.array(names or [], "string"))
    names = names if not names or numbers is None else numbers.tolist()
    types = [""]
    if edge_type is not None and store.node_types:
        types = store.edge_types[edge_type].split(",")[::2]
    nodes = {kind: Nodes(store.num_nodes, store.path, names) for kind in types}
    for kind, of in nodes.items():
        of.id_name = kind
    ends = Ends(nodes[types[0]], nodes[types[-1]])
    pairs = edges(file, tempfile.gettempdir(), ends, None, say=say)[0].T
    return np.array(names)[pairs] if names else pairs


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
        counts = np.stack([np.bincount(part, minlength=len(codes.dictionary)) for part in parts])
        different = (counts != 1).any(0)
        if different.any():
            first = int(different.argmax())
            of_edges, rows = (plural(count, "row") for count in counts[:, first].tolist())
            key = codes.dictionary[first].as_py()
            raise StoreError(
                f"{self.source} has {of_edges} of the edge {self.called(key)}, "
                f"{table.name} has {rows}: one of each is needed, unless both have one order"
            )
        return np.argsort(parts[1])[parts[0]]


def edge_rows(file, folder, name, ignore, keys):
    """Spool a separate table with one row per edge -> {name: mapped edge_features float32 [M, D], edge_weight float64 [M],
    edge_type int64 [M] or edge_time [M], int64 or datetime64[us] for dates}; see `_spooled`.

    keys: `Keys` of the edges. Rows are joined to these by the columns of ends, if there are such, or by a column of ids that
    the table of edges has, too, or that holds 0 to M-1; else row i is of edge i.
    """
    import pyarrow

    with opened(file, ignore, keys.nodes.source.heads) as table:
        ends = _found_ends(table, keys.nodes) if table.width > 1 else []
        if not ends and table.width > 2 and keys.have_ends(table, [0, 1]):
            ends = [0, 1]
        ids = id_column(table, [j for j in _edge_ids(table) if j not in ends], "edges")
        named = ids is not None and table.names[ids] in keys.ids
        columns = [j for j in range(table.width) if j not in [ids, *ends]]
        if not columns or len(columns) > 1 and not COLUMNS[name].wide:
            needed = "some are" if COLUMNS[name].wide else "one is"
            raise StoreError(
                f"{file} has {plural(len(columns), 'column')} for {name}: {needed} needed"
            )
        by_ids = named or ids is not None and not ends
        key = [ids] if by_ids else []
        arrays = _spooled(table, folder, dict(zip(ends, keys.nodes)), {name: columns}, key)
        row_ids = arrays.pop("ids")
        row_ends = arrays.pop("ends").T
        both = " and ".join(map(table.column, ends))
        order = None
        how = "row by row"
        if by_ids:
            how = f"by {table.column(ids)}"
            counted = pyarrow.array(np.arange(keys.ends.shape[1])).cast("string")
            edge_ids = keys.ids[table.names[ids]] if named else counted
            order = keys.order(table, edge_ids, row_ids[table.names[ids]])
        elif ends:
            how = f"by {both}" if ids is None else f"by {both}, {table.column(ids)} not used"
            order = keys.order(table, keys.end_keys(keys.ends), keys.end_keys(row_ends))
        if order is not None:
            arrays[name] = ordered(folder, arrays[name], order)
            row_ends = row_ends[:, order]
        if ends and not np.array_equal(row_ends, keys.ends):
            raise StoreError(f"{file}: {both} are not the ends of the edges in {keys.source}")
        table.say(f"taken as {name}, {how}")
        return arrays


def _edge_ids(table) -> list[int]:
    """List the columns that may hold ids of edges."""
    return [j for j in table.named("id") if meanings(table.names[j]) <= {"id"}]


def _spooled(table, folder, ends, fields, keys):
    """Spool a table of edges as records in one file.

    Args:
        ends: {column: its `Nodes`}, of sources and of destinations; may be empty.
        fields: {name of a column of a store: columns}.
        keys: columns to return as they are.

    Returns:
        {name in `fields`: view of its field; "ends": int64 [M, 2], or [M, 0]; "ids": {name of a column in `keys`: its cells, a
        pyarrow array of strings}}. Types that are text are numbered in the order of their first rows; "edge_types" then
        holds their names.
    """
    import pyarrow

    kinds = {j: of.kind for j, of in ends.items()} | dict.fromkeys(keys, str)
    record = [("ends", np.int64, (len(ends),))]
    for name, which in fields.items():
        column = COLUMNS[name]
        kind = TIME if column.timed else column.cells
        kinds |= dict.fromkeys(which, kind)
        width = (sum(table.widths[j] for j in which),) if column.wide else ()
        record.append((name, CELLS.get(kind, np.int64), width))
    record = np.dtype(record, align=True)
    numbers = {}

    def chunks():
        for first, columns in table.read(kinds, whole=keys):
            for j, of in ends.items():
                columns[j] = of.numbers(table, first, columns[j])
            for j in fields.get(EDGE_TYPE.name, ()):
                coded = written(columns[j]).dictionary_encode()
                missing = coded.is_null().to_numpy(zero_copy_only=False)
                table.refuse(first, j, missing, "is empty or nan")
                names = coded.dictionary.to_pylist()
                codes = np.array([numbers.setdefault(name, len(numbers)) for name in names])
                columns[j] = codes[coded.indices.to_numpy()]
            chunk = np.empty(table.rows - first, record)
            for name, which in {"ends": ends, **fields}.items():
                if which:
                    values = stacked([columns[j] for j in which], record[name].base)
                    chunk[name] = values.reshape(chunk[name].shape)
            yield chunk

    rows = spool(folder, chunks(), record)
    arrays = {name: rows[name] for name in record.names}
    for j in fields.get(EDGE_TIME.name, ()):
        # dates in parquet, or text none of which is a number
        if table.kinds[j] in ("dates", "text"):
            arrays[EDGE_TIME.name] = arrays[EDGE_TIME.name].view(DATE)
    for j in fields.get(EDGE_TYPE.name, ()):
        names = table.identified(j, pyarrow.array([*numbers]))
        if isinstance(names, list):
            arrays["edge_types"] = names
        else:
            arrays[EDGE_TYPE.name] = ordered(folder, names, arrays[EDGE_TYPE.name])
    arrays["ids"] = {table.names[j]: table.whole[j].combine_chunks() for j in keys}
    return arrays


def _column(table, word) -> int:
    """Find the column with a name, or with a number from 1."""
    if word in table.names:
        return table.names.index(word)
    if word.isdecimal() and (place := int(word) - 1) in table.places:
        return table.places.index(place)
    names = short(", ".join(table.names or map(str, range(1, table.width + 1))))
    raise StoreError(f"{short(word)} is neither a file nor one of {table.name}'s columns, {names}")


def _end_columns(table, nodes, taken) -> list[int]:
    """Find the columns of sources and of destinations, see `_found_ends`; else they are the first that are not `taken`."""
    if table.width < 2:
        raise StoreError(f"{table.name} has one column: two are needed, with a comma between them")
    ends = _found_ends(table, nodes, taken)
    if not ends:
        ends = [j for j in range(table.width) if j not in taken][:2]
        ends = ends if len(ends) == 2 else [0, 1]
    if not (table.named("source") and table.named("destination")):
        source, destination = map(table.column, ends)
        what = nodes.called()
        table.notes.append(f"{source} taken as {what[0]}, {destination} as {what[1]}")
    return ends


def _found_ends(table, nodes, taken=()) -> list[int]:
    """Find the columns of sources and of destinations: by known names; by the name of the ids or of the type, as protein_a and
    protein_b are of `protein`, and user and movieId of two types; if names of nodes are text, as the two columns of such names.
    Empty without; StoreError for one."""
    of = nodes.source
    found = [table.named(end) for end in nodes._fields]
    if of is not nodes.destination:
        called = [columns_called(table, {end.type or end.id_name, end.id_name}) for end in nodes]
        # in a table of pairs the other column is the other end
        if any(called) and not of.type and table.width == 2:
            source, destination = called
            called = [source or [1 - destination[0]], destination or [1 - source[0]]]
        found = called if any(called) else found
    if [*map(len, found)] == [1, 1]:
        return sum(found, [])
    if any(found):
        raise StoreError(
            f"{table.name} has the columns {short(', '.join(table.names))}: "
            f"call one {', one '.join(nodes.called())}"
        )
    if of is not nodes.destination:
        return []
    id_words = [words_of(of.id_name or ""), words_of(of.type)]
    twins = [(stem, pair) for stem, pair in _twins(table) if not {*pair} & {*taken}]
    pairs = [pair for stem, pair in twins if stem in id_words or "id" in meanings("".join(stem))]
    if len(pairs) != 1 and of.kind is str:
        free = [j for j in range(table.width) if j not in taken]
        named = [j for j in free if of.have(table.sample(j))]
        pairs = [pair for _, pair in twins if {*pair} == {*named}] or [named]
    return pairs[0] if len(pairs) == 1 and len(pairs[0]) == 2 else []


def _twins(table) -> list:
    """List the pairs of columns whose names differ in one word that is a letter, a digit or a name of an end, such as user1 and
    user2 -> (words that they share, the numbers of the columns, the source's first)."""
    columns = {}
    for j, name in enumerate(table.names):
        words = words_of(name)
        for place, word in enumerate(words):
            ends = meanings(word) & {"source", "destination"}
            if len(words) > 1 and (ends or len(word) == 1):
                stem = (place, *words[:place], *words[place + 1 :])
                columns.setdefault(stem, []).append(("destination" in ends, word, j))
    twins = [(stem, sorted(pair)) for stem, pair in columns.items() if len(pair) == 2]
    return [([*stem[1:]], [j for *_, j in pair]) for stem, pair in twins]
