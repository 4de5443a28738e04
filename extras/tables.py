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

import bisect
import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import shlex
from pathlib import Path

import numpy as np

from disk.convert import LIKE_NUMBERS, MISSING, whole_times
from disk.files import StoreError, plural, reading, short

# bytes of text parsed at a time: no line may be longer, and the layout is guessed from the first
BLOCK = 1 << 23
SAMPLE = 1000  # rows from which the layout is guessed
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
SEVERAL = "|"  # between several values in a cell of text
ID = "id"  # kind of a column of whole numbers that identify
TIME = "time"  # kind of a column of times: whole numbers or dates
WORDS = {"int64": "whole number of 64 bits", "double": "number", "string": "text"}
CONVERSION = r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)"
WHOLE = re.compile(r"[+-]?[0-9]{1,25}")
# a whole number as it is printed: as 7, as 7.0, or as 7.000e+00
PRINTED = re.compile(r"-?[0-9]+(\.0+)?|-?[0-9](\.[0-9]+)e\+[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")  # 1,5
DATES = "dates as numbers, such as days, by (x - x.min()).dt.days of pandas"
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
KINDS = {  # of a column, see `Table.kinds`: the types of parquet, as pyarrow writes them
    "whole": "u?int|bool",
    "real": "half|float|double|decimal",
    "list": r"\w*list<[^:]*: (u?int|bool|half|float|double|decimal)",
    "dates": "timestamp|date",
    "empty": "null",
    "text": r"\w*(string|binary)",
}
UNLIKE = {
    "list": list,
    "dates": TIME,
    "other": None,
}  # kinds of columns that can be read in one way
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
    cells of the first rows -> whether the first is a header, where its names are not known; None: then it is none.

    Attributes:
        names: list of the columns' names, empty without a header; one without a name has that of pandas, "Unnamed: 0" for
            the first.
        width: number of columns, without those left out. places: [width] their numbers in the file, from 0.
        rows: number of rows read so far.
        kinds: [width] "whole", "real", "text" (no cell is a number), "mixed" or "empty", judged by the first rows, or by
            the type in parquet, where there are also "list" (of numbers), "dates" and "other".
        widths: [width] numbers in a cell: 1, or those of a list.
        notes: phrases on what was guessed, for `say`.
    """

    def __init__(self, stream, name, ignore=(), heads=None):
        self.name = str(name)
        self.names = []
        self.rows = 0
        self._stream = stream
        self._skipped = 0
        self._separator = None
        self._index = ()  # names of the columns that are the index of pandas
        with reading(self.name):
            magic = stream.read(6)
            stream.seek(0)
            for start, unpack in COMPRESSED.items():
                if magic.startswith(start):
                    self._stream = unpack(stream)
            if magic.startswith(b"PAR1"):
                kinds, cells = self._guess_parquet()
            else:
                kinds, cells = self._guess_text(heads)
        self.places = [*range(len(kinds))]
        if self.names:
            self._leave_out(ignore)
        self.width = len(self.places)
        self.kinds = [kinds[j] for j in self.places]
        self._first_cells = [cells[j] for j in self.places]
        self.widths = [1] * self.width
        for j, kind in enumerate(self.kinds):
            if kind == "list" and self._first_cells[j]:
                self.widths[j] = len(self._first_cells[j][0] or ())
                if not self.widths[j]:
                    raise self.error(0, f"{self.column(j)} is empty: a list of numbers is needed")
        if self.names and len(set(self.names)) < self.width:
            raise StoreError(
                f"{name} has two columns called {max(self.names, key=self.names.count)!r}"
            )

    def _leave_out(self, ignore):
        """Leave out the columns to ignore, see above."""
        ignored = [name for name in self.names if name in ignore]
        for name in ignored:
            ignore[name] += 1
        if ignored:
            self.notes.append(f"{', '.join(map(repr, ignored))} ignored")
        self.places = [j for j in self.places if self.names[j] not in ignored]
        if not self.places:
            raise StoreError(f"{self.name} has no other columns than those to ignore")
        self.names = [self.names[j] for j in self.places]

    def read(self, kinds, missing=False, whole=()):
        """Read the rows in batches -> yields (number of the first row, {column: values}).

        Args:
            kinds: {column: kind} of the columns to read. int and float: numbers in any form -> int64 or float64
                [r]. ID: whole numbers as they are printed -> int64 [r]. TIME: whole numbers in any form -> int64 [r], or
                dates -> datetime64[us] [r]. str -> pyarrow array of r strings. list: as float, or lists of
                one length -> float64 [r, length].
            missing: allow empty cells and `nan` among float and int, read as NaN; else they are errors. Text keeps them.
            whole: columns that `self.whole` has at the end, {column: its values of all rows, those of text chunked}.
        """
        types = {j: self._type(j, kind) for j, kind in kinds.items()}
        parts = {j: [] for j in whole}
        with reading(self.name):
            for batch in self._batches(types):
                first = self.rows
                self.rows += len(next(iter(batch.values())))
                columns = {j: self._values(first, j, kinds[j], batch[j], missing) for j in kinds}
                for j in whole:
                    parts[j].append(columns[j])
                yield first, columns
        if not self.rows:
            raise StoreError(f"{self.name} has a header and no rows")
        self.whole = {j: joined(parts[j]) for j in whole}

    def _type(self, j, kind) -> str | None:
        """Return the type in which pyarrow reads a column; None for lists and for times in parquet, which keep theirs."""
        has = self.kinds[j]
        if has in UNLIKE and kind is not UNLIKE[has]:
            held = self._file.schema_arrow.types[self.places[j]]
            give = f"give {DATES if has == 'dates' else 'numbers or text'}"
            raise StoreError(
                f"{self.name}: {self.column(j)} holds {held}: {give}, or drop it{self.flag(j)}"
            )
        if kind is str or kind is ID and self._separator or kind in (ID, TIME) and has == "text":
            return "string"
        if has in UNLIKE or kind is TIME and not self._separator:
            return None
        # whole numbers may be written as floats
        return "float64" if kind in (float, list) or has == "real" else "int64"

    def _values(self, first, j, kind, cells, missing):
        """Convert a column of a batch to what `read` yields, checking it."""
        if kind is TIME:
            return self._times(first, j, cells)
        if self.kinds[j] == "list":
            return self._lists(first, j, cells)
        if kind is str:
            return self._text(first, j, cells)
        if cells.type == "string":
            values = self._printed(first, j, cells)
        else:
            values = cells.to_numpy(zero_copy_only=False)  # missing cells become NaN
        bad = ~np.isfinite(values) & (not missing or kind is ID)
        self.refuse(first, j, bad, "is empty, nan or infinite: a number is needed")
        if kind in (int, ID) and values.dtype.kind == "f":
            bad = (values != np.floor(values)) | (abs(values) >= 1 << 53)
            self.refuse(first, j, bad, "is {}, which is no whole number", values)
            values = values.astype(np.int64)
        return values

    def _text(self, first, j, cells):
        """Return the cells of a batch as they are written, without quotes around them."""
        import pyarrow.compute as compute

        cells = cells.fill_null("")
        for end in "\r\n":  # faster than a pattern of both
            broken = compute.match_substring(cells, end).to_numpy(zero_copy_only=False)
            self.refuse(first, j, broken, "has a quote that does not end in its line")
        return cells

    def _times(self, first, j, cells) -> np.ndarray:
        """Check times; dates that are text are written as by ISO 8601, without a zone or all with one."""
        import pyarrow
        import pyarrow.compute as compute

        if cells.type == "string":
            text = written(self._text(first, j, cells))
            text = compute.replace_substring_regex(text, r"([.][0-9]{6})000", r"\1")  # nanoseconds
            zoned = compute.any(compute.match_substring_regex(text, ":.*([Zz]|[+-][0-9:]+)$"))
            dates = pyarrow.timestamp("us", "UTC" if zoned.as_py() else None)
            form = "time, written as 2024-01-31 or 2024-01-31 23:59:59.999999, with a zone (Z or +01:00) in every row or in none"
            cells = self._parsed(first, j, text, lambda part: converted(part, dates), form)
        values = cells.to_numpy(zero_copy_only=False)

        def refuse(bad, name, values, why):
            self.refuse(first, j, bad, f"is {{}}: {why}", values)

        return whole_times(f"{self.name}: {self.column(j)}", values, refuse)

    def _printed(self, first, j, cells) -> np.ndarray:
        """Read whole numbers, written in one form in the whole column: that of the first."""
        like = next((cell for cell in self.sample(j) if cell not in MISSING), None)
        cells = self._text(first, j, cells)
        form = "whole number, written as 7, or as 7.0 in every row"
        return self._parsed(first, j, cells, lambda part: as_printed(part, like), form)

    def _parsed(self, first, j, cells, parse, form):
        """Return parse(cells), a function that returns None for an array with a cell that it cannot read: that one is refused.
        form: what cells are, and how they are written."""
        values = parse(cells)
        if values is None:
            row = first_bad(cells, parse)
            problem = f"{self.column(j)} is no {form}: {short(cells[row].as_py())!r}"
            raise self.error(first + row, problem)
        return values

    def _lists(self, first, j, cells) -> np.ndarray:
        """Read lists of numbers, all as long as the first -> float64 [r, length]."""
        import pyarrow.compute as compute

        width = self.widths[j]
        lengths = compute.if_else(cells.is_valid(), compute.list_value_length(cells), 0).to_numpy()
        problem = f"is a list of {{}} numbers, where the first row has {width}"
        self.refuse(first, j, lengths != width, problem, lengths)
        values = cells.flatten().cast("float64").to_numpy(zero_copy_only=False).reshape(-1, width)
        bad = ~np.isfinite(values).all(1)
        self.refuse(first, j, bad, "has an element that is empty, nan or infinite")
        return values

    def identified(self, j, cells):
        """Decide what the cells of a whole column, a pyarrow array of strings, identify -> int64 [n], float64 with NaN for
        missing cells, or list of str; a note says why a column with numbers is text."""
        numbers = None if self.kinds[j] == "text" else as_printed(cells)
        if numbers is not None:
            return numbers
        text = cells.to_pylist()
        typed = not self._separator and self.kinds[j] == "text"
        if not typed and any(map(NUMBER.fullmatch, text)):
            row = first_bad(cells, as_printed)
            why, first = (repr(short(cell)) for cell in (text[row], text[0]))
            beside = f" beside {first}" * (why != first)
            self.notes.append(f"{self.column(j)} is text, not numbers, because of {why}{beside}")
        return text

    def refuse(self, first, j, bad, problem, values=None):
        """Refuse the first cell of a column where `bad` [r] is true. first: row of bad[0]; problem: with {} for the value."""
        if bad.any():
            row = int(bad.argmax())
            problem = problem.format(None if values is None else values[row])
            raise self.error(first + row, f"{self.column(j)} {problem}")

    def column(self, *columns) -> str:
        """Name columns for messages."""
        return ", ".join(repr(self.names[j]) if self.names else f"column {j + 1}" for j in columns)

    def flag(self, *columns) -> str:
        """Return the flag that drops columns, in brackets, for messages."""
        names = ",".join(self.names[j] for j in columns) if self.names else ""
        return f" (--ignore {shlex.quote(names)})" if names else ""

    def named(self, meaning) -> list[int]:
        """List the columns whose names have a meaning, one of MEANINGS. Those of ids are also the index of pandas, and names
        that end in id, as "userid" and "acid" do, if the column `identifies` its rows."""
        found = []
        for j, name in enumerate(self.names):
            fitting = meanings(name)
            perhaps = name.lower().endswith("id") and not fitting and self.identifies(j)
            if meaning in fitting or meaning == "id" and (perhaps or name in self._index):
                found.append(j)
        return found

    def sample(self, j) -> list[str]:
        """Return the cells of a column in the first rows, without spaces around them."""
        return ["" if cell is None else str(cell).strip() for cell in self._first_cells[j]]

    def identifies(self, j) -> bool:
        """Whether a column may hold ids of the rows: text or whole numbers, in the first rows all different, no dates and no
        several values in a cell."""
        cells = self.sample(j)
        several = SEVERAL in "".join(cells)
        if self.kinds[j] in ("empty", *UNLIKE) or several or self.form(j) is TIME:
            return False
        whole = self.kinds[j] != "real" or None not in map(whole_of, filter(None, cells))
        return whole and len({*cells}) == len(cells)

    def form(self, j):
        """Return the kind as which `read` can read a feature, by the first rows: TIME for dates, in parquet by their type, str for
        text, list for numbers, which text in parquet may spell, too."""
        import pyarrow

        cells = [cell for cell in self.sample(j) if cell not in MISSING]
        if self.kinds[j] == "text" and kind_of(cells) == "text":
            with contextlib.suppress(StoreError):
                self._times(0, j, pyarrow.array(cells))
                return TIME
            return str
        return TIME if self.kinds[j] == "dates" else list

    def error(self, row, problem) -> StoreError:
        """Make a StoreError that names the file and the line of a row."""
        return StoreError(f"{self.name}, line {self._skipped + row + 1}: {problem}")

    def say(self, *notes, say=print):
        """Print one line: what was guessed, the number of rows, and `notes`."""
        notes = [*self.notes, plural(self.rows, "row"), *notes]
        say(f"{Path(self.name).name}: {', '.join(notes)}")

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
                        column = column.cast("uint8") if column.type == "bool" else column
                        columns[j] = column.cast(kind) if kind else column
                yield columns
            return
        names = [*map(str, range(self._columns))]
        kept = {str(self.places[j]): kind for j, kind in types.items()}
        try:
            for batch in pyarrow.csv.open_csv(
                self._stream,
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=BLOCK, skip_rows=self._skipped, column_names=names
                ),
                pyarrow.csv.ParseOptions(delimiter=self._separator),
                pyarrow.csv.ConvertOptions(
                    column_types=kept, include_columns=[*kept], null_values=[*MISSING]
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
                cure = (
                    f"write {DATES}, or for times a date in every row," if dates else "correct it"
                )
                hint = f"; {cure} or drop the column{self.flag(j)}"
            if re.search(f"invalid value '{COMMA.pattern}'", message):
                hint = ": a decimal comma; write 1.5, as by to_csv of pandas"
            raise StoreError(f"{self.name}, {message[:300]}{hint}") from error

    def _guess_parquet(self):
        """Set names and notes -> the kinds of the columns, and their cells in the first rows."""
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(self._stream)
        schema = self._file.schema_arrow
        self.names = schema.names
        if pandas := (schema.metadata or {}).get(b"pandas"):
            self._index = json.loads(pandas).get("index_columns", ())
        self.notes = [plural(len(self.names), "column"), f"header {short(','.join(self.names))}"]
        kinds = [*map(kind_of_type, schema.types)]
        cells = [()] * len(kinds)
        if first := next(self._file.iter_batches(SAMPLE), None):
            # dates may be finer than those of Python
            cells = [
                [None] * len(column) if kind in ("dates", "other") else column.to_pylist()
                for kind, column in zip(kinds, first.columns)
            ]
        return kinds, cells

    def _guess_text(self, heads):
        """Skip comments and guess separator and header; set names and notes -> as `_guess_parquet`."""
        head, above = self._stream.read(BLOCK), ""
        if len(head) == BLOCK and not (head := head[: head.rfind(b"\n") + 1]):
            raise StoreError(f"{self.name}: its first line is longer than {BLOCK >> 20} MiB")
        start = head[:200].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
        for sign, what in FOREIGN.items():
            if re.match(sign, start, re.DOTALL):
                raise StoreError(
                    f"{self.name} is {what} and no table: docs/data.md has a line of Python that reads it"
                )
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
        self._columns = width = len(cells_of(lines[0], self._separator))  # of the file
        if self._separator == " " and any(line.split() != line.split(" ") for line in lines):
            self._stream.seek(0)  # columns aligned by several spaces: collapse them
            text = re.sub(rb"[ \t]+", b" ", self._stream.read())
            self._stream = io.BytesIO(re.sub(rb"(?m)^ | (?=\r?$)", b"", text))
        self._stream.seek(0)
        cells = [cells_of(line, self._separator) for line in lines]
        rows = [row for row in cells if len(row) == width]  # `read` refuses the others
        if is_header(rows) or heads and heads(rows):
            self.names = [name or f"Unnamed: {j}" for j, name in enumerate(rows.pop(0))]
            self._skipped += 1
        elif above:  # numpy writes a header as a comment
            names = cells_of(above.lstrip("#% "), self._separator)
            if len(names) == width and are_known(names):
                self.names = names
        name = {"\t": "tab", " ": "space"}.get(self._separator, repr(self._separator))
        by = f" by separator {name}" * (width > 1)
        header = "no header"
        if self.names:
            header = f"header {short(self._separator.join(self.names))}"
        elif cells[0] == ["0", "1"]:
            header += " (0,1 is a row: if pandas wrote it, put names in its place)"
        self.notes = [plural(width, "column") + by, header]
        columns = [*zip(*rows)] or [("",)] * width
        return [*map(kind_of, columns)], columns


def is_header(rows) -> bool:
    """Whether the first row is a header: it has no numbers and a column below is numeric, or its names are known;
    ValueError if it may number the columns, as pandas does for columns without names."""
    first, *rest = rows
    width = len(first)
    counted = [*map(str, range(width))]
    counts = width > 2 or width == 2 and all(kind_of(row) == "real" for row in rest)
    index = width > 1 and first[1:] == counted[:-1] and are_known(first[:1])
    if rest and (index or counts and first == counted):
        raise ValueError(f"its first row is {short(','.join(first))}: write names, such as id,a,b")
    # pandas leaves the name of the index empty
    named = first[1:] if width > 1 and not first[0] else first
    digits = all(cell[:1] in "0123456789.+-" for cell in first)  # numbers, perhaps damaged
    if digits or any(c in MISSING or c.lower() in LIKE_NUMBERS or numeric(c) for c in named):
        return False
    if any(all(map(numeric, column)) for column in zip(*rest)):
        return True
    return are_known(first) and not set(first) & {cell for row in rest for cell in row}


def is_text(rows) -> bool:
    """Take the first row for a header, of a table that needs one; ValueError if it has numbers."""
    if any(map(numeric, rows[0])):
        raise ValueError(
            f"its first row is {short(','.join(rows[0]))}: put names of columns above it"
        )
    return True


def meanings(name) -> set[str]:
    """Return those of MEANINGS that fit the name of a column, also if "node" or "id" follow: `from_node_id`. A name whose
    last word is id, as in user_id and userId, is that of ids unless it is that of a label."""
    word = re.sub(r"[\W_]", "", name.lower())
    forms = {word, word.removesuffix("id").removesuffix("node")}
    fitting = {meaning for meaning, words in MEANINGS.items() if forms & {*words.split()}}
    if word.endswith(("label", "labels")):
        fitting.add("label")
    elif words_of(name)[-1:] == ["id"] and "label" not in fitting:
        fitting.add("id")
    return fitting


def are_known(names) -> bool:
    """Whether one of these names of columns has a meaning, or the first may be that of ids; pandas leaves its index's empty."""
    first = names[0].lower()
    return first == "" or first.endswith("id") or any(map(meanings, names))


def words_of(name) -> list[str]:
    """Split the name of a column into words in lower case: source_id, SourceID and "Source Id" are source and id, user1 is
    user and 1."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[^\W\d_])(?=\d)", " ", name)
    return [word for word in re.split(r"[\W_]+", spaced.lower()) if word]


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


def kind_of_type(kind) -> str:
    """Classify a column of parquet by its type, see `Table.kinds`; "other" if it holds neither numbers nor text."""
    kind = str(kind).removeprefix("dictionary<values=")
    return next((name for name, types in KINDS.items() if re.match(types, kind)), "other")


def converted(cells, kind):
    """Convert a pyarrow array to another type; None if a cell cannot be."""
    with contextlib.suppress(ValueError):
        return cells.cast(kind)


def first_bad(cells, parse) -> int:
    """Find the first cell with which `parse`, a function of an array that ends with it, returns None."""
    rows = range(len(cells))
    return bisect.bisect_left(rows, True, key=lambda row: parse(cells[: row + 1]) is None)


def digits(cells):
    """Read text as whole numbers printed as 7 -> int64 [r], or float64 with NaN for null; None if a cell is written
    otherwise, as 07 and 0x7, which pyarrow also reads."""
    numbers = converted(cells, "int64")
    if numbers is None or not numbers.cast("string").equals(cells):
        return None
    return numbers.to_numpy(zero_copy_only=False)


def as_printed(cells, like=None):
    """Read text as whole numbers, all written as they are printed in one form.

    Args:
        cells: pyarrow array of strings [r], perhaps chunked. like: a cell of this form; None: the first that is not missing.

    Returns int64 [r], or float64 with NaN for missing cells, or None if a cell is written otherwise.
    """
    import pyarrow
    import pyarrow.compute as compute

    numbers = None if "." in (like or "") else digits(cells)
    if numbers is not None:  # most often there is nothing else
        return numbers
    cells = written(cells)
    form = PRINTED.fullmatch(like or [*cells.drop_null()[:1].to_pylist(), "0"][0])
    if not form:
        return None
    zeros, decimals = form.groups("")
    if decimals:
        numbers = [cell and whole_of(cell) for cell in cells.to_pylist()]
        printed = [n if n is None else format(n, f".{len(decimals) - 1}e") for n in numbers]
        if printed != cells.to_pylist():
            return None
        cells = pyarrow.array([n if n is None else str(n) for n in numbers], "string")
    elif zeros:
        if not compute.all(compute.ends_with(cells, zeros)).as_py():
            return None
        cells = compute.utf8_slice_codeunits(cells, 0, -len(zeros))
    return digits(cells)


def trimmed(cells):
    """Return a pyarrow array of strings without spaces around them, and without quotes, which pyarrow keeps after a space."""
    import pyarrow.compute as compute

    return compute.replace_substring_regex(compute.utf8_trim_whitespace(cells), '^"(.*)"$', r"\1")


def written(cells):
    """Return a pyarrow array of strings `trimmed`, null where they stand for nothing."""
    import pyarrow
    import pyarrow.compute as compute

    cells = trimmed(cells)
    return compute.if_else(compute.is_in(cells, pyarrow.array(MISSING)), None, cells)


def joined(parts):
    """Join the cells of a column of several batches: a chunked array of pyarrow's, or an array of numpy's."""
    import pyarrow

    is_numpy = isinstance(parts[0], np.ndarray)
    return np.concatenate(parts) if is_numpy else pyarrow.chunked_array(parts)


def whole_of(cell) -> int | None:
    """Return the whole number in a cell, however it is written, or None."""
    if WHOLE.fullmatch(cell):
        return int(cell)
    return int(float(cell)) if NUMBER.fullmatch(cell) and float(cell).is_integer() else None


def numeric(cell) -> bool:
    """Whether a cell is a number, perhaps with a decimal comma, which `Table.read` refuses."""
    return bool(NUMBER.fullmatch(cell) or COMMA.fullmatch(cell))


@contextlib.contextmanager
def opened(file, ignore=(), heads=None):
    """Context manager: the `Table` in a file; see there."""
    with reading(file):
        stream = open(file, "rb")
    with stream:
        yield Table(stream, file, ignore, heads)


def stacked(columns, dtype) -> np.ndarray:
    """Put columns [r] or [r, length] side by side -> [r, n]; what float32 cannot hold becomes infinite, which a store refuses."""
    with np.errstate(over="ignore"):
        return np.column_stack(columns).astype(dtype, copy=False)
