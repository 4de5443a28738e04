"""What the first rows of a table say: its separator, whether it has a header, what its columns hold and are called."""

from __future__ import annotations

import collections
import csv
import re

WHOLE = re.compile(r"[+-]?[0-9]{1,25}")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
MISSING = ("", "nan", "NaN", "NAN", "Nan")
LIKE_NUMBERS = {"na", "n/a", "null", "none", "inf", "-inf", "?", "-"}  # in no header
SOURCES = {"source", "src", "from", "u"}  # names of columns, as `forms` has them
DESTINATIONS = {"destination", "dest", "dst", "target", "to", "v"}
LABELS = {"label", "labels", "class", "category", "target", "y"}
# the last two are pandas'
IDS = {"id", "node", "nodeid", "nid", "index", "unnamed0", "indexlevel0"}
MORE = {"weight", "w", "time", "timestamp", "t"}  # what edges may have besides their ends
KNOWN = SOURCES | DESTINATIONS | LABELS | IDS | MORE
LEAKS = {"label", "labels", "class"}  # a feature of that name would tell what is to be learnt


def is_header(rows) -> bool:
    """Whether the first row has names: no number where others have numbers, or else names that are known."""
    first, rest = rows[0], rows[1:]
    numbered = [str(j) for j in range(len(first))]  # how pandas names columns without names
    if first == numbered and rest:
        fractions = all(
            all(map(NUMBER.fullmatch, row)) and not all(map(WHOLE.fullmatch, row)) for row in rest
        )
        return len(first) > 2 or len(first) == 2 and fractions
    # "" for the index
    if len(first) > 1 and first[1:] == numbered[:-1] and is_known(first[0], 0) and rest:
        index = [row[0] for row in rest]
        in_order = index == [str(i) for i in range(len(index))]
        return bool(first[0]) or in_order or not any(map(like_number, index))
    if any(map(like_number, first[1:])):
        return False
    if like_number(first[0]) and (first[0] or len(first) == 1):
        return False
    if all(cell[:1] in "0123456789.+-" for cell in first):  # damaged numbers
        return False
    if any(all(map(NUMBER.fullmatch, column)) for column in zip(*rest)):
        return True
    known = any(map(is_known, first, range(len(first))))
    return known and not set(first) & {cell for row in rest for cell in row}


def forms(name) -> set[str]:
    """A column's name in small letters, and without a final "id" or "node": `from_node_id`, `Source ID`."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return {word, word.removesuffix("id").removesuffix("node")} - {""}


def names_ids(name, j) -> bool:
    """Whether the name of column j says that it holds ids; the first column's may be empty, or end in id."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return (
        word in IDS or j == 0 and (word == "" or word.endswith("id") and not forms(name) & LABELS)
    )


def is_known(name, j) -> bool:
    """Whether a header names column j by a word that is understood, or as ids."""
    return bool(forms(name) & KNOWN) or names_ids(name, j)


def guess_separator(lines) -> tuple[str, int]:
    """(separator, width): the first that all lines agree on, else that most do; one column has "," in no line."""
    found = []
    for rank, separator in enumerate("\t;, "):
        widths = collections.Counter(len(cells_of(line, separator)) for line in lines)
        width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
        if width > 1 and 2 * count >= len(lines):
            found.append((count == len(lines), -rank, separator, width))
    return max(found)[2:] if found else (",", 1)


def cells_of(line, separator) -> list[str]:
    """The cells of one line."""
    if separator == " " and '"' not in line:
        return line.split()
    row = next(csv.reader([line], delimiter=separator, skipinitialspace=separator != " "), [])
    return [cell.strip() for cell in row]


def kind_of(cells) -> str:
    """What the cells of a column are."""
    cells = [cell for cell in cells if cell not in MISSING]
    if all(map(NUMBER.fullmatch, cells)):
        return "whole" if all(map(WHOLE.fullmatch, cells)) else "real"
    return "mixed" if any(map(like_number, cells)) else "text"


def like_number(cell) -> bool:
    """Whether a cell is a number or stands for a missing one."""
    return cell in MISSING or cell.lower() in LIKE_NUMBERS or bool(NUMBER.fullmatch(cell))
