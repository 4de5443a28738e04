"""Read csv and parquet tables in batches with pyarrow; separator and header are detected.

    with opened("edges.csv.gz") as table:                     # table.names, table.width, table.kinds
        for first, columns in table.read({0: ID, 1: ID, 2: float}):
            ...                                               # {0: int64 [r], 1: int64 [r], 2: float64 [r]}

Supported: text separated by commas, semicolons, tabs or spaces, with or without a header, comments (# or %) above the
rows, quotes, gzip, bzip2 and xz (detected by content); and parquet. Errors give the line number, which does not count
blank lines. r is the number of rows in a batch.

A column that measures may write a number in any way. One that identifies nodes, classes or types holds whole numbers
only if all cells are written in one form as these are printed, 7, 7.0 or 7.000e+00, so that different cells are
different numbers; else it is text, and so are strings in parquet.
"""

import bz2
import contextlib
import csv
import functools
import gzip
import io
import json
import lzma
import re
import shlex
from pathlib import Path

import numpy as np

from disk.convert import whole_times
from disk.files import StoreError, plural, reading

# bytes of text parsed at a time: no line may be longer, and the layout is guessed from the first
BLOCK = 1 << 23
SAMPLE = 1000  # rows from which the layout is guessed
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
ID = "id"  # kind of a column of whole numbers that identify
TIME = "time"  # kind of a column of times: whole numbers or dates
TYPES = {int: "int64", float: "float64", str: "string", ID: "string"}
WORDS = {"int64": "whole number of 64 bits", "double": "number", "string": "text"}
CONVERSION = r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)"
# the smallest and the largest number of so many digits, in 64 bits; longer text has zeros in front
LEAST = np.array([0, 0, *(10**n for n in range(1, 19)), 1])
MOST = np.array([-1, *(10**n - 1 for n in range(1, 19)), (1 << 63) - 1, 0])
WHOLE = re.compile(r"[+-]?[0-9]{1,25}")
PRINTED = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,30}(e[+-][0-9]{2,3})?)?")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")  # 1,5
DATES = "dates as numbers, such as days, by (x - x.min()).dt.days of pandas"
MISSING = ("", "nan", "NaN", "NAN", "Nan")
COMMENT = re.compile(" *(#|%(?![0-9A-Fa-f]{2}))")  # %20 begins a name in a URL
FOREIGN = {  # how files that are no tables begin, in lower case
    b"%%matrixmarket": "a Matrix Market file",
    rb"\*(vertices|network)": "a Pajek file",
    rb"<\?xml|<graphml": "an XML file, such as GraphML,",
    rb"\x93numpy": "an array of NumPy (.npy)",
    rb"pk.{,60}\.npy": "an .npz file of NumPy",
    rb"pk.{,60}data\.pkl": "a file of torch.save",
    rb"\x80[\x02-\x05]": "a pickle",
}
LIKE_NUMBERS = {"na", "n/a", "null", "none", "inf", "-inf", "?", "-"}  # never in a header
MEANINGS = {  # what a column holds: the names by which it is recognised
    "source": "source src from u head subject",
    "destination": "destination dest dst target to v tail object",
    "label": "label labels class category target y",
    "id": "id node nodeid nid uid key index unnamed0 indexlevel0",  # the last two are pandas'
    "more of an edge": "weight w time timestamp t type relation edgetype",
}


class Table:
    """A table in a seekable binary file, whose rows can be read once.

    ignore: {name of a column to leave out: number of tables that had it}, which is counted up. heads: function of the
    cells of the first rows -> whether the first is a header, where its names are not known.

    Attributes:
        names: list of the columns' names, or None; one without a name has that of pandas, "Unnamed: 0" for the first.
        width: number of columns, without those left out. places: [width] their numbers in the file, from 0.
        rows: number of rows read so far.
        kinds: [width] "whole", "real", "text" (no cell is a number), "mixed" or "empty", judged by the first rows, or by
            the type in parquet, where there are also "list" and "dates".
        widths: [width] numbers in a cell: 1, or those of a list.
        notes: phrases on what was guessed, for `say`.
    """

    def __init__(self, stream, name, ignore=(), heads=lambda rows: False):
        self.name = str(name)
        self.names, self.rows, self.notes = None, 0, []
        self._stream, self._skipped, self._separator = stream, 0, None
        self._ignore = ignore
        self._heads = heads
        self._index = ()  # names of the columns that are the index of pandas
        self._forms = {}
        self._asked = {}
        with reading(self.name):
            magic = stream.read(6)
            stream.seek(0)
            for start, unpack in COMPRESSED.items():
                if magic.startswith(start):
                    self._stream = unpack(stream)
            if magic.startswith(b"PAR1"):
                self._guess_parquet()
            else:
                rows = self._guess_text() or [[""] * self.width]
                self._first_cells = [*zip(*rows)]
                self.kinds = list(map(kind_of, self._first_cells))
                self.widths = [1] * self.width
        self._columns = range(self.width)  # of the file
        self.places = [*self._columns]
        if self.names:
            self._leave_out()
        if self.names and len(set(self.names)) < self.width:
            twice = max(self.names, key=self.names.count)
            raise StoreError(f"{name} has two columns called {twice!r}")

    def _leave_out(self):
        """Leave out the columns to ignore."""
        ignored = [name for name in self.names if name in self._ignore]
        for name in ignored:
            self._ignore[name] += 1
        if not ignored:
            return
        self.notes.append(f"{', '.join(map(repr, ignored))} ignored")
        self.places = kept = [j for j in self.places if self.names[j] not in ignored]
        if not kept:
            raise StoreError(f"{self.name} has no other columns than those to ignore")
        columns = self.names, self.kinds, self.widths
        self.names, self.kinds, self.widths = ([values[j] for j in kept] for values in columns)
        self.width = len(kept)

    def read(self, kinds, missing=False):
        """Read the rows in batches -> yields (number of the first row, {column: values}).

        Args:
            kinds: {column: kind} of the columns to read. int and float: numbers in any form -> int64 or float64
                [r]. ID: whole numbers as they are printed -> int64 [r]. TIME: whole numbers in any form -> int64 [r], or
                dates -> datetime64[us] [r], see `dated`. str -> pyarrow array of r strings. list: lists of one length ->
                float64 [r, length].
            missing: allow empty cells and `nan` among float and int, read as NaN; else they are errors. Text keeps them.
        """
        self._asked = kinds
        types = {j: self._type(j, kind) for j, kind in kinds.items()}
        with reading(self.name):
            for batch in self._batches(types):
                first = self.rows
                self.rows += len(next(iter(batch.values())))
                values = {j: self._values(first, j, kinds[j], batch[j], missing) for j in kinds}
                yield first, values
        if not self.rows:
            raise StoreError(f"{self.name} has a header and no rows")

    def _type(self, j, kind) -> str | None:
        """Return the type in which pyarrow reads a column; None for lists."""
        dates = self.kinds[j] == "dates"
        if (self.kinds[j] == "list") != (kind is list) or dates and kind is not TIME:
            has = self._file.schema_arrow.types[self.places[j]]
            give = f"give {DATES if dates else 'numbers or text'}, or drop it{self.flag(j)}"
            raise StoreError(f"{self.name}: {self.column(j)} holds {has}: {give}")
        typed = self._separator is None and self.kinds[j] != "text"
        if kind is TIME:  # numbers and dates in parquet keep their type
            number = int if self.kinds[j] == "whole" else float
            kind = str if self.kinds[j] == "text" else None if typed else number
        kind = int if kind is ID and typed else kind
        # whole numbers may be written as floats
        kind = float if kind is int and self.kinds[j] == "real" else kind
        return TYPES.get(kind)

    def dated(self, j) -> bool:
        """Whether a column of times holds dates: in parquet by its type, else where no cell is a number."""
        return self.kinds[j] in ("text", "dates")

    def _values(self, first, j, kind, cells, missing):
        """Convert a column of a batch to what `read` yields, checking it."""
        if kind is TIME:
            return self._times(first, j, cells)
        if kind is list:
            return self._lists(first, j, cells)
        if kind is str:
            return self._text(first, j, cells)
        if cells.type == "string":
            values = self._printed(first, j, cells)
        else:
            values = cells.to_numpy(zero_copy_only=False)  # missing cells become NaN
        bad = ~np.isfinite(values) & (not missing or kind is ID)
        self._refuse(first, j, bad, "is empty, nan or infinite: a number is needed")
        if kind in (int, ID) and values.dtype.kind == "f":
            bad = (values != np.floor(values)) | (abs(values) >= 1 << 53)
            self._refuse(first, j, bad, "is {}, which is no whole number", values)
            values = values.astype(np.int64)
        return values

    def _text(self, first, j, cells):
        """Return the cells of a batch as they are written, without quotes around them."""
        import pyarrow.compute as compute

        cells = cells.fill_null("")
        broken = compute.match_substring_regex(cells, "[\r\n]").to_numpy(zero_copy_only=False)
        self._refuse(first, j, broken, "has a quote that does not end in its line")
        return cells

    def _times(self, first, j, cells) -> np.ndarray:
        """Check times; dates that are text are written as by ISO 8601, without a zone or all with one."""
        import pyarrow
        import pyarrow.compute as compute

        if cells.type == "string":
            text = trimmed(self._text(first, j, cells))
            missing = compute.is_in(text, pyarrow.array([*MISSING, "NaT"]))
            text = compute.if_else(missing, None, text)
            text = compute.replace_substring_regex(text, r"([.][0-9]{6})000", r"\1")  # nanoseconds
            zoned = compute.any(compute.match_substring_regex(text, ":.*([Zz]|[+-][0-9:]+)$"))
            dates = pyarrow.timestamp("us", "UTC" if zoned.as_py() else None)
            try:
                cells = text.cast(dates)
            except pyarrow.ArrowInvalid:
                row = next(i for i in range(len(text)) if not is_date(text[i], dates))
                how = "written as 2024-01-31 or 2024-01-31 23:59:59.999999"
                how += ", with a zone (Z or +01:00) in every row or in none"
                cell = short(str(text[row]))
                raise self.error(
                    first + row, f"{self.column(j)} is no time, {how}: {cell!r}"
                ) from None
        values = cells.to_numpy(zero_copy_only=False)

        def refuse(bad, name, values, why):
            self._refuse(first, j, bad, f"is {{}}: {why}", values)

        return whole_times(f"{self.name}: {self.column(j)}", values, refuse)

    def _printed(self, first, j, cells) -> np.ndarray:
        """Read whole numbers, written in one form in the whole column."""
        values, form = as_printed(cells, self._forms.get(j))
        if values is None:
            cells = trimmed(self._text(first, j, cells))
            values, form = as_printed(cells, self._forms.get(j))
        self._forms[j] = form
        if values is None:
            cells = cells.to_pylist()
            row = next(i for i, cell in enumerate(cells) if not is_printed(cell, form))
            how = "written as 7, or as 7.0 in every row"
            cell = short(cells[row])
            raise self.error(first + row, f"{self.column(j)} is no whole number, {how}: {cell!r}")
        return values

    def _lists(self, first, j, cells) -> np.ndarray:
        """Read lists of numbers, all as long as the first -> float64 [r, length]."""
        import pyarrow.compute as compute

        width = self.widths[j]
        lengths = compute.if_else(cells.is_valid(), compute.list_value_length(cells), 0).to_numpy()
        problem = f"is a list of {{}} numbers, where the first row has {width}"
        self._refuse(first, j, lengths != width, problem, lengths)
        values = cells.flatten().cast("float64").to_numpy(zero_copy_only=False).reshape(-1, width)
        bad = ~np.isfinite(values).all(1)
        self._refuse(first, j, bad, "has an element that is empty, nan or infinite")
        return values

    def identified(self, j, parts):
        """Decide what the cells of a whole column identify, given as arrays of text -> int64 [n], float64 with NaN for
        missing cells, or list of str; a note says why a column with numbers is text."""
        form, numbers = None, []
        for part in parts if self.kinds[j] != "text" else ():
            values, form = as_printed(trimmed(part), form)
            if values is None:
                break
            numbers.append(values)
        else:
            if numbers:
                return np.concatenate(numbers)
        cells = [cell for part in parts for cell in part.to_pylist()]
        if self._separator and any(map(NUMBER.fullmatch, cells)):
            why = next(cell for cell in cells if not is_printed(cell.strip(), form))
            why, first = (repr(short(cell)) for cell in (why, cells[0]))
            beside = f" beside {first}" * (why != first)
            self.notes.append(f"{self.column(j)} is text, not numbers, because of {why}{beside}")
        return cells

    def _refuse(self, first, j, bad, problem, values=None):
        if bad.any():
            row = int(bad.argmax())
            problem = problem.format(None if values is None else values[row])
            raise self.error(first + row, f"{self.column(j)} {problem}")

    def may_be_text(self, j) -> bool:
        """Whether a column that identifies is to be read as text, which `identified` decides about: all but numbers with
        a type."""
        return self._separator is not None or self.kinds[j] in ("text", "empty")

    def measures(self, columns) -> dict:
        """Return {column: kind} by which `read` takes columns of numbers or of lists of them."""
        return {j: list if self.kinds[j] == "list" else float for j in columns}

    def column(self, j) -> str:
        """Name a column for messages."""
        return repr(self.names[j]) if self.names else f"column {j + 1}"

    def flag(self, *columns) -> str:
        """Return the flag that drops columns, in brackets, for messages."""
        return flag(*(self.names[j] for j in columns)) if self.names else ""

    def named(self, meaning) -> list[int]:
        """List the columns whose names have a meaning, one of MEANINGS. Those of ids are also the index of pandas, and names
        that end in id, as "userid" and "acid" do, if the column `identifies` its rows."""
        found = [j for j, name in enumerate(self.names or ()) if meaning in meanings(name)]
        if meaning != "id":
            return found
        index = [j for j, name in enumerate(self.names or ()) if name in self._index]
        perhaps = [j for j, name in enumerate(self.names or ()) if name.lower().endswith("id")]
        perhaps = [j for j in perhaps if not meanings(self.names[j]) and self.identifies(j)]
        return sorted({*found, *index, *perhaps})

    def sample(self, j) -> list[str]:
        """Return the cells of a column in the first rows, without spaces around them."""
        if self._separator:
            return self._first_cells[self.places[j]]
        batch = self._first_batch
        cells = batch.column(self.places[j]).to_pylist() if batch else ()
        return ["" if cell is None else str(cell).strip() for cell in cells]

    @functools.cached_property
    def _first_batch(self):
        return next(self._file.iter_batches(SAMPLE), None)

    def identifies(self, j) -> bool:
        """Whether a column may hold ids of the rows: text or whole numbers, in the first rows all different."""
        if self.kinds[j] in ("list", "empty", "dates"):
            return False
        cells = self.sample(j)
        whole = self.kinds[j] != "real" or None not in map(whole_of, filter(None, cells))
        return whole and len({*cells}) == len(cells)

    def distinct(self, columns) -> list[int]:
        """List those of some columns whose cells all differ, in a second reading of the file."""
        import pyarrow

        cells = {j: [] for j in columns}
        with opened(self.name, dict.fromkeys(self._ignore, 0), self._heads) as again:
            for batch in again._batches(dict.fromkeys(columns, "string")):
                for j in columns:
                    cells[j].append(batch[j])
        cells = {j: pyarrow.chunked_array(parts) for j, parts in cells.items()}
        return [j for j in columns if len(cells[j].unique()) == len(cells[j])]

    def error(self, row, problem) -> StoreError:
        """Make a StoreError that names the file and the line of a row."""
        return StoreError(f"{self.name}, line {self._skipped + row + 1}: {problem}")

    def say(self, *notes, say=print):
        """Print one line: what was guessed, the number of rows, and `notes`."""
        rows = plural(self.rows, "row")
        say(f"{Path(self.name).name}: {', '.join([*self.notes, rows, *notes])}")

    def _batches(self, types):
        """Yield the columns {column: cells} of `types` {column: type} in each batch; pyarrow's errors are reworded with the
        line and the column's name."""
        import pyarrow.csv

        if self._separator is None:
            read = [self.names[j] for j in types]
            size = max(1, (1 << 20) // sum(self.widths[j] for j in types))
            for batch in self._file.iter_batches(size, columns=read):
                columns = {}
                for j, kind in types.items():
                    hint = f"; correct it or drop the column{self.flag(j)}"
                    with reading(f"{self.name}: {self.column(j)}", hint):
                        column = batch.column(self.names[j])
                        columns[j] = column.cast(kind) if kind else column
                yield columns
            return
        names = [*map(str, self._columns)]
        kept = [str(self.places[j]) for j in types]
        of_kept = dict(zip(kept, types.values()))
        read = dict(use_threads=False, block_size=BLOCK, skip_rows=self._skipped)
        try:
            for batch in pyarrow.csv.open_csv(
                self._stream,
                pyarrow.csv.ReadOptions(**read, column_names=names),
                pyarrow.csv.ParseOptions(delimiter=self._separator),
                pyarrow.csv.ConvertOptions(
                    column_types=of_kept, include_columns=kept, null_values=[*MISSING]
                ),
            ):
                yield dict(zip(types, batch.columns))
        except ValueError as error:
            message, hint = str(error).replace("CSV parse error: Row #", "line "), ""
            if at := re.match(CONVERSION, message):
                j = self.places.index(int(at[1]))
                kind = WORDS.get(at[3])
                message = f"line {at[2]}: {self.column(j)} is no {kind}{message[at.end() :]}"
                dates = re.search("invalid value '[0-9]{4}-", message)
                times = "dates in every row or in none"
                which = times if self._asked.get(j) is TIME else DATES
                cure = f"write {which}," if dates else "correct it"
                hint = f"; {cure} or drop the column{self.flag(j)}"
            if re.search(f"invalid value '{COMMA.pattern}'", message):
                hint = ": a decimal comma; write 1.5, as by to_csv of pandas"
            raise StoreError(f"{self.name}, {message[:300]}{hint}") from error

    def _guess_parquet(self):
        """Set names, width, kinds, widths and notes."""
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(self._stream)
        schema = self._file.schema_arrow
        self.kinds = list(map(kind_of_type, schema.types))
        for column, kind, of in zip(schema.names, self.kinds, schema.types):
            if kind is None and column not in self._ignore:
                give = f"give numbers or text, or drop it{flag(column)}"
                raise StoreError(f"{self.name}: {column!r} holds {of}: {give}")
        self.names = schema.names
        if pandas := (schema.metadata or {}).get(b"pandas"):
            index = json.loads(pandas).get("index_columns", ())
            self._index = [name for name in index if name in self.names]
        self.width = len(self.names)
        self.notes = [plural(self.width, "column"), f"header {short(','.join(self.names))}"]
        self.widths = [1] * self.width
        if "list" in self.kinds:
            first = next(self._file.iter_batches(1), None)
            for j, kind in enumerate(self.kinds):
                if kind == "list" and first and self.names[j] not in self._ignore:
                    self.widths[j] = len(first.column(j)[0].as_py() or ())
                    if not self.widths[j]:
                        raise self.error(
                            0, f"{self.column(j)} is empty: a list of numbers is needed"
                        )

    def _guess_text(self):
        """Skip comments and guess separator, width and header -> cells of the first rows."""
        head, above = self._stream.read(BLOCK), ""
        if len(head) == BLOCK and not (head := head[: head.rfind(b"\n") + 1]):
            raise StoreError(f"{self.name}: its first line is longer than {BLOCK >> 20} MiB")
        start = head[:200].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        for sign, what in FOREIGN.items():
            if re.match(sign, start, re.DOTALL):
                how = "docs/data.md has a line of Python that reads it"
                raise StoreError(f"{self.name} is {what} and no table: {how}")
        if b"\0" in head:
            raise StoreError(f"{self.name} is no text in UTF-8: unpack archives, save it as csv")
        lines = re.split("\r\n|\n|\r", head.decode("utf-8-sig"))
        while lines and (not lines[0].strip(" ") or COMMENT.match(lines[0])):
            above = lines.pop(0).strip()
            self._skipped += 1
        lines = [line for line in lines if line.strip(" ")][:SAMPLE]
        if not lines:
            raise StoreError(f"{self.name} is empty: it has no rows")
        # the first separator that splits the first line; KONECT's numbers may have both spaces and tabs between them
        words = lines[0].split()
        both = {" ", "\t"} <= set(lines[0].strip()) and all(map(NUMBER.fullmatch, words))
        separators = " " if both else "\t;, "
        self._separator = next((s for s in separators if len(cells_of(lines[0], s)) > 1), ",")
        self.width = len(cells_of(lines[0], self._separator))
        if self._separator == " " and any(line.split() != line.split(" ") for line in lines):
            self._stream.seek(0)  # columns aligned by several spaces: collapse them
            text = re.sub(rb"[ \t]+", b" ", self._stream.read())
            self._stream = io.BytesIO(re.sub(rb"(?m)^ | (?=\r?$)", b"", text))
        self._stream.seek(0)
        cells = [cells_of(line, self._separator) for line in lines]
        rows = [row for row in cells if len(row) == self.width]  # `read` refuses the others
        known = is_header(rows)
        by_nodes = not known and self._heads(rows)
        if known or by_nodes:
            self.names = [name or f"Unnamed: {j}" for j, name in enumerate(rows.pop(0))]
            self._skipped += 1
        elif above:  # numpy writes a header as a comment
            names = cells_of(above.lstrip("#% "), self._separator)
            if len(names) == self.width and (any(map(meanings, names)) or like_id(names[0])):
                self.names = names
        name = {"\t": "tab", " ": "space"}.get(self._separator, repr(self._separator))
        by = f" by separator {name}" * (self.width > 1)
        header = "no header"
        if self.names:
            header = f"header {short(self._separator.join(self.names))}"
            header += ", which names no nodes" * by_nodes
        elif cells[0] == ["0", "1"]:
            header += " (0,1 is a row: if pandas wrote it, put names in its place)"
        self.notes = [plural(self.width, "column") + by, header]
        return rows


def is_header(rows) -> bool:
    """Whether the first row is a header: it has no numbers and a column below is numeric, or its names are known;
    ValueError if it may number the columns, as pandas does for columns without names."""
    first, *rest = rows
    width = len(first)
    counted = [str(j) for j in range(width)]
    counts = width > 2 or width == 2 and all(kind_of(row) == "real" for row in rest)
    index = width > 1 and first[1:] == counted[:-1] and (meanings(first[0]) or like_id(first[0]))
    if rest and (index or counts and first == counted):
        raise ValueError(f"its first row is {short(','.join(first))}: write names, such as id,a,b")
    # pandas leaves the name of the index empty
    named = first[1:] if width > 1 and not first[0] else first
    digits = all(cell[:1] in "0123456789.+-" for cell in first)  # numbers, perhaps damaged
    if digits or any(c in MISSING or c.lower() in LIKE_NUMBERS or numeric(c) for c in named):
        return False
    if any(all(map(numeric, column)) for column in zip(*rest)):
        return True
    named = any(map(meanings, first)) or like_id(first[0])
    return named and not set(first) & {cell for row in rest for cell in row}


def meanings(name) -> set[str]:
    """Return those of MEANINGS that fit the name of a column, also if "node" or "id" follow: `from_node_id`. A name whose
    last word is id, as in user_id and userId, is that of ids unless it is that of a label."""
    word = re.sub(r"[\W_]", "", name.lower())
    forms = {word, word.removesuffix("id").removesuffix("node")}
    fitting = {meaning for meaning, words in MEANINGS.items() if forms & {*words.split()}}
    if word.endswith(("label", "labels")):
        fitting.add("label")
    of_ids = words_of(name)[-1:] == ["id"] and "label" not in fitting
    return fitting | {"id"} if of_ids else fitting


def like_id(name) -> bool:
    """Whether the first column may hold ids by its name: pandas leaves that of the index empty."""
    return name == "" or name.lower().endswith("id")


def words_of(name) -> list[str]:
    """Split the name of a column into words in lower case: source_id, SourceID and "Source Id" are source and id, user1 is
    user and 1."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[^\W\d_])(?=\d)", " ", name)
    return [word for word in re.split(r"[\W_]+", spaced.lower()) if word]


def flag(*names) -> str:
    """Return the flag that drops columns with these names, in brackets, for messages."""
    return f" (--ignore {shlex.quote(','.join(names))})"


def cells_of(line, separator) -> list[str]:
    """Split one line into cells."""
    if separator == " " and '"' not in line:
        return line.split()
    row = next(csv.reader([line], delimiter=separator, skipinitialspace=separator != " "), [])
    return [cell.strip() for cell in row]


def kind_of(cells) -> str:
    """Classify the cells of a column, see `Table.kinds`."""
    cells = [cell for cell in cells if cell not in MISSING]
    if not cells:
        return "empty"
    if all(map(NUMBER.fullmatch, cells)):
        return "whole" if all(map(WHOLE.fullmatch, cells)) else "real"
    return "mixed" if any(map(numeric, cells)) else "text"


def kind_of_type(kind) -> str | None:
    """Classify a column of parquet by its type, see `Table.kinds`; None for one that holds neither numbers nor text."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list" if kind_of_type(kind.value_type) in ("whole", "real") else None
    if types.is_timestamp(kind) or types.is_date(kind):
        return "dates"
    if types.is_nested(kind) or types.is_temporal(kind):
        return None
    if types.is_integer(kind) or types.is_boolean(kind):
        return "whole"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "real"
    return "empty" if types.is_null(kind) else "text"


def is_date(cell, dates) -> bool:
    """Whether a cell, a string of pyarrow, is missing or converts to the type `dates`."""
    with contextlib.suppress(ValueError):
        cell.cast(dates)
        return True
    return False


def form_of(cell) -> str:
    """Return the form in which a cell may print a whole number: "d" for 7, ".0" for 7.0, ".00" for 7.00, ".2e" for
    7.00e+00; "" for other text."""
    printed = PRINTED.fullmatch(cell)
    if not printed:
        return ""
    decimals, exponent = printed.groups(default="")
    if exponent:
        return f".{len(decimals) - len(exponent) - 1}e"
    if decimals.strip(".0"):
        return ""  # a fraction
    return decimals or "d"


def whole_number(cell, form) -> int | None:
    """Return the whole number that is printed as this cell in this form; None if there is none."""
    if not form or form_of(cell) != form:
        return None
    if form.endswith("e"):
        number = int(float(cell))
        most = 1 << 53
        printed = format(number, form)
    else:
        number = int(cell.partition(".")[0])
        most = 1 << 63
        printed = f"{number}{form.removeprefix('d')}"
    return number if abs(number) < most and printed == cell else None


def is_printed(cell, form) -> bool:
    """Whether a cell is missing or a whole number in this form."""
    return cell in MISSING or whole_number(cell, form) is not None


def as_printed(cells, form):
    """Read text as whole numbers, all written as they are printed in one form.

    Args:
        cells: pyarrow array of strings [r]. form: that of the rows above, see `form_of`; None: that of the first cell.

    Returns (int64 [r], or float64 with NaN for missing cells, or None if a cell is written otherwise; the form).
    """
    import pyarrow
    import pyarrow.compute as compute

    if form in (None, "d"):
        numbers = _digits(cells)  # most often there is nothing else
        if numbers is not None and len(cells):
            return numbers, "d"
    missing = compute.is_in(cells, pyarrow.array(MISSING))
    cells = compute.if_else(missing, None, cells)
    if cells.null_count == len(cells):
        return np.full(len(cells), np.nan), form
    if form is None:
        form = form_of(cells.drop_null()[0].as_py())
    if form.endswith("e"):
        coded = cells.dictionary_encode()
        values = [whole_number(cell, form) for cell in coded.dictionary.to_pylist()]
        if None in values:
            return None, form
        values = pyarrow.array(values, "int64")
        numbers = pyarrow.DictionaryArray.from_arrays(coded.indices, values).dictionary_decode()
        return numbers.to_numpy(zero_copy_only=False), form
    if form.startswith("."):
        if not compute.all(compute.ends_with(cells, form)).as_py():
            return None, form
        cells = compute.utf8_slice_codeunits(cells, 0, -len(form))
    return _digits(cells) if form else None, form


def trimmed(cells):
    """Return a pyarrow array of strings without spaces around them, and without quotes, which pyarrow keeps after a space."""
    import pyarrow.compute as compute

    return compute.replace_substring_regex(compute.utf8_trim_whitespace(cells), '^"(.*)"$', r"\1")


def _digits(cells) -> np.ndarray | None:
    """Read text as whole numbers without a sign + or zeros in front -> int64 [r], or float64 with NaN for null; None if
    a cell is written otherwise."""
    import pyarrow
    import pyarrow.compute as compute

    try:
        numbers = cells.cast("int64")
    except pyarrow.ArrowInvalid:
        return None
    # pyarrow also reads zeros in front, -0 and hexadecimal numbers
    values = numbers.fill_null(0).to_numpy()
    digits = compute.binary_length(cells).fill_null(1).to_numpy() - (values < 0)
    digits = np.minimum(digits, 20)
    size = abs(values)
    if ((size < LEAST[digits]) | (size > MOST[digits])).any():
        return None
    if digits.max(initial=0) > 11:  # a hexadecimal number may be as long as it is in decimals
        if compute.any(compute.match_substring(cells, "x", ignore_case=True)).as_py():
            return None
    return numbers.to_numpy(zero_copy_only=False)


def whole_of(cell) -> int | None:
    """Return the whole number in a cell, however it is written, or None."""
    if WHOLE.fullmatch(cell):
        return int(cell)
    return int(float(cell)) if NUMBER.fullmatch(cell) and float(cell).is_integer() else None


def numeric(cell) -> bool:
    """Whether a cell is a number, perhaps with a decimal comma, which `Table.read` refuses."""
    return bool(NUMBER.fullmatch(cell) or COMMA.fullmatch(cell))


@contextlib.contextmanager
def opened(file, ignore=(), heads=lambda rows: False):
    """Context manager: the `Table` in a file; see there."""
    with reading(file):
        stream = open(file, "rb")
    with stream:
        yield Table(stream, file, ignore, heads)


def stacked(columns, which, dtype) -> np.ndarray:
    """Put columns [r] or [r, length] side by side -> [r, n]; what float32 cannot hold becomes infinite, which a store refuses."""
    with np.errstate(over="ignore"):
        return np.column_stack([columns[j] for j in which]).astype(dtype, copy=False)


def short(text) -> str:
    """Shorten a text to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."
