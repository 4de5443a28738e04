"""Tables with a row for each edge -> arrays: which columns are the ends, which ones weights, times or features.

edge_index, more = edges("edges.csv", "spool-e", nodes, {"edge_weight": ["w"]})     # int64 [2, M]
times = edge_rows("times.csv", "spool-t", "edge_time")    # int64 [M], of a table of its own
"""

from __future__ import annotations

import contextlib

import numpy as np

from disk.files import StoreError
from sources.header import DESTINATIONS, SOURCES
from sources.tables import opened, plural, short, spool, stacked


def edges(file, target, nodes, keep=()) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Spool a table with a row for each edge into the file `target` and others with that prefix -> (a memmap of int64
    [2, M]; {name: what was kept, as `edge_rows` has it}).

    Source and destination are the columns of these names (or src, from, u; dst, target, to, v), else the first two.
    keep: {"edge_weight", "edge_time" or "edge_features": names or numbers from 1 of further columns}; any other column
    is refused.
    """
    with opened(file) as table, contextlib.ExitStack() as files:
        ends = _end_columns(table)
        more = {name: [_column(table, w) for w in words] for name, words in dict(keep).items()}
        taken = [*ends, *sum(more.values(), [])]
        if twice := [j for j in taken if taken.count(j) > 1]:
            raise StoreError(f"{file}: {table.column(twice[0])} is taken for two things")
        if extra := [table.column(j) for j in range(table.width) if j not in taken]:
            raise StoreError(
                f"{file} has more columns than are understood, {short(', '.join(extra), '')}: leave them "
                "out, or say what they are by --weights, --times, --edge-features"
                + ("" if table.names else "; names in a header would tell which is which")
            )
        kinds, dtypes = dict.fromkeys(ends, nodes.kind), {}
        for name, columns in more.items():
            dtypes[name] = _dtype(table, name, columns)
            kinds |= dict.fromkeys(columns, int if dtypes[name] == np.int64 else float)
        out = {name: files.enter_context(open(f"{target}-{name}", "wb")) for name in more}

        def pairs():
            for line, columns in table.read(kinds):
                for name, which in more.items():
                    out[name].write(stacked(columns, which, dtypes[name]).data)
                yield np.stack([nodes.numbers(table, line, columns[j]) for j in ends], 1)

        found = spool(target, pairs(), np.int64, 2)
        if not len(found):
            raise StoreError(f"{file} has a header and no rows")
        table.say(*(f"{name} from {', '.join(map(table.column, js))}" for name, js in more.items()))
    kept = {name: np.memmap(f"{target}-{name}", dtype, "r") for name, dtype in dtypes.items()}
    if "edge_features" in kept:
        kept["edge_features"] = kept["edge_features"].reshape(len(found), -1)
    return found.T, kept


def _dtype(table, name, columns):
    """In which numbers a column of edges is kept."""
    if name == "edge_time" and table.kinds[columns[0]] == "whole":
        return np.int64
    return np.float32 if name == "edge_features" else np.float64


def _column(table, word) -> int:
    """The column of a name, or of a number from 1."""
    if table.names and word in table.names:
        return table.names.index(word)
    if word.isdecimal() and 1 <= int(word) <= table.width:
        return int(word) - 1
    names = f"columns 1 to {table.width}, without names"
    names = short(", ".join(table.names), "") if table.names else names
    raise StoreError(
        f"{table.name} has no column {short(word)}, and there is no file of that name: it has {names}"
    )


def edge_rows(file, target, name) -> np.ndarray:
    """Spool a table of its own with a row for each edge -> a memmap: edge_features float32 [M, D], edge_time int64 [M]
    or, if the first are no integers, float64 [M], edge_weight float64 [M]."""
    with opened(file) as table:
        if name != "edge_features" and table.width != 1:
            raise StoreError(
                f"{file} has {plural(table.width, 'column')}: one is needed, the {name} of each edge"
            )
        every, dtype = list(range(table.width)), _dtype(table, name, [0])
        kinds = dict.fromkeys(every, int if dtype == np.int64 else float)
        rows = (stacked(columns, every, dtype) for _, columns in table.read(kinds))
        found = spool(target, rows, dtype, table.width)
        table.say(f"taken as {name}")
        return found if name == "edge_features" else found[:, 0]


def _end_columns(table) -> list[int]:
    """The columns of sources and destinations."""
    found = [table.named(words) for words in (SOURCES, DESTINATIONS)]
    if table.width < 2:
        raise StoreError(
            f"{table.name} has one column: two are needed, source and destination, with a comma, a "
            "semicolon, a tab or a space between them"
        )
    if [len(columns) for columns in found] == [1, 1]:
        return [found[0][0], found[1][0]]
    if any(found):
        raise StoreError(
            f"{table.name} has the columns {short(', '.join(table.names), '')}: call one of them source "
            "and one destination"
        )
    table.notes.append(f"{table.column(0)} taken as source, {table.column(1)} as destination")
    return [0, 1]
