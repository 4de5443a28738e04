"""Read csv and parquet tables in batches with pyarrow; separator and header are detected.

    with opened("edges.csv.gz") as table:                     # table.names, table.width, table.kinds
        for first, columns in table.read({0: int, 1: int, 2: float}):
            ...                                               # {0: int64 [r], 1: int64 [r], 2: float64 [r]}

Supported: text separated by commas, semicolons, tabs or spaces, with or without a header, comments (#) above the rows,
quotes, gzip, bzip2 and xz (detected by content); and parquet. Errors give the line number, which does not count blank
lines. r is the number of rows in a batch.
"""

import bz2
import contextlib
import csv
import gzip
import io
import lzma
import re
import tempfile
from pathlib import Path

import numpy as np

from disk.files import StoreError, plural, reading

# bytes of text parsed at a time: no line may be longer, and the layout is guessed from the first
BLOCK = 1 << 23
SAMPLE = 1000  # rows from which the layout is guessed
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
TYPES = {int: "int64", float: "float64", str: "string"}
WORDS = {"int64": "whole number of 64 bits", "double": "number", "string": "text"}
WHOLE = re.compile(r"[+-]?[0-9]{1,25}")
CODE = re.compile(r"[+-]?0[0-9]+")  # a name written in digits: as a number it would lose its zeros
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
MISSING = ("", "nan", "NaN", "NAN", "Nan")
LIKE_NUMBERS = {"na", "n/a", "null", "none", "inf", "-inf", "?", "-"}  # never in a header
MEANINGS = {  # what a column holds: the names by which it is recognised
    "source": "source src from u head subject",
    "destination": "destination dest dst target to v tail object",
    "label": "label labels class category target y",
    "leak": "label labels class",  # a feature of that name would leak the label
    "id": "id node nodeid nid index unnamed0 indexlevel0",  # the last two are pandas'
    "more of an edge": "weight w time timestamp t type relation edgetype",
}


class Table:
    """A table in a seekable binary file, whose rows can be read once.

    Attributes:
        names: list of the columns' names, or None. width: number of columns. rows: number of rows read so far.
        kinds: [width] "whole", "coded" (with leading zeros), "real", "text" (no cell is a number), "mixed" or "empty",
            judged by the first rows.
        notes: phrases on what was guessed, for `say`.
    """

    def __init__(self, stream, name):
        self.name = str(name)
        self.names, self.rows, self.notes = None, 0, []
        self._stream, self._skipped, self._separator = stream, 0, None
        with reading(self.name):
            magic = stream.read(6)
            stream.seek(0)
            for start, unpack in COMPRESSED.items():
                if magic.startswith(start):
                    self._stream = unpack(stream)
            rows = self._guess_parquet() if magic.startswith(b"PAR1") else self._guess_text()
        if self.names and len(set(self.names)) < self.width:
            twice = max(self.names, key=self.names.count)
            raise StoreError(f"{name} has two columns called {twice!r}")
        self.kinds = list(map(kind_of, zip(*rows or [[""] * self.width])))

    def read(self, kinds, missing=False):
        """Read the rows in batches -> yields (number of the first row, {column: [r] int64, float64 or list of str}).

        Args:
            kinds: {column: int, float or str}, each column of the table once.
            missing: allow empty cells and `nan`, read as NaN among numbers and as "" in text; else they are errors.
        """
        # whole numbers may be written as floats
        real = {j: float for j, kind in kinds.items() if kind is int and self.kinds[j] == "real"}
        types = [TYPES[real.get(j, kinds[j])] for j in range(self.width)]
        with reading(self.name):
            for batch in self._batches(types):
                first, self.rows = self.rows, self.rows + len(batch[0])
                values = {j: self._values(first, j, kinds[j], batch[j], missing) for j in kinds}
                yield first, values
        if not self.rows:
            raise StoreError(f"{self.name} has a header and no rows")

    def _values(self, first, j, kind, cells, missing):
        """Convert a column of a batch to what `read` yields, checking it."""
        import pyarrow.compute as compute

        if kind is str:
            cells = cells.fill_null("")
            broken = compute.match_substring_regex(cells, "[\r\n]").to_numpy(zero_copy_only=False)
            self._refuse(first, j, broken, "has a quote that does not end in its line")
            cells = [cell.strip() for cell in cells.to_pylist()]
            if self._separator:  # pyarrow keeps quotes that follow a space
                cells = [re.sub('^"(.*)"$', r"\1", c) if '"' in c else c for c in cells]
            return cells
        values = cells.to_numpy(zero_copy_only=False)  # missing cells become NaN
        bad = ~np.isfinite(values) & (not missing)
        self._refuse(first, j, bad, "is empty, nan or infinite: a number is needed")
        if kind is int and values.dtype.kind == "f":
            bad = (values != np.floor(values)) | (abs(values) >= 1 << 53)
            self._refuse(first, j, bad, "is {}, which is no whole number", values)
            values = values.astype(np.int64)
        return values

    def _refuse(self, first, j, bad, problem, values=None):
        if bad.any():
            row = int(bad.argmax())
            problem = problem.format(None if values is None else values[row])
            raise self.error(first + row, f"{self.column(j)} {problem}")

    def column(self, j) -> str:
        """Name a column for messages."""
        return repr(self.names[j]) if self.names and self.names[j] else f"column {j + 1}"

    def named(self, meaning) -> list[int]:
        """List the columns whose names have a meaning, one of MEANINGS."""
        return [j for j, name in enumerate(self.names or ()) if meaning in meanings(name, j)]

    def error(self, row, problem) -> StoreError:
        """Make a StoreError that names the file and the line of a row."""
        return StoreError(f"{self.name}, line {self._skipped + row + 1}: {problem}")

    def say(self, *notes):
        """Print one line: what was guessed, the number of rows, and `notes`."""
        rows = plural(self.rows, "row")
        print(f"{Path(self.name).name}: {', '.join([*self.notes, rows, *notes])}")

    def _batches(self, types):
        """Yield the columns of each batch; pyarrow's errors are reworded with the line and the column's name."""
        import pyarrow.csv

        if self._separator is None:
            for batch in self._file.iter_batches(max(1, (1 << 20) // self.width)):
                columns = []
                for j, kind in enumerate(types):
                    with reading(f"{self.name}: {self.column(j)}"):
                        columns.append(batch.column(j).cast(kind))
                yield columns
            return
        types = {str(j): kind for j, kind in enumerate(types)}
        read = dict(use_threads=False, block_size=BLOCK, skip_rows=self._skipped)
        try:
            for batch in pyarrow.csv.open_csv(
                self._stream,
                pyarrow.csv.ReadOptions(**read, column_names=[*types]),
                pyarrow.csv.ParseOptions(delimiter=self._separator),
                pyarrow.csv.ConvertOptions(column_types=types, null_values=[*MISSING]),
            ):
                yield batch.columns
        except ValueError as error:
            message = re.sub(
                r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)",
                lambda at: f"line {at[2]}: {self.column(int(at[1]))} is no {WORDS.get(at[3])}",
                str(error),
            ).replace("CSV parse error: Row #", "line ")
            raise StoreError(f"{self.name}, {message[:300]}") from error

    def _guess_parquet(self) -> list[list[str]]:
        """Set names, width and notes -> the first rows as text."""
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(self._stream)
        schema = self._file.schema_arrow
        for column, kind in zip(schema.names, schema.types):
            if pyarrow.types.is_nested(kind) or pyarrow.types.is_temporal(kind):
                raise StoreError(f"{self.name}: {column!r} holds {kind}: give numbers or text")
        self.names = schema.names
        self.width = len(self.names)
        self.notes = [plural(self.width, "column"), f"header {short(','.join(self.names))}"]
        batch = next(self._file.iter_batches(SAMPLE), ())
        batch = (c.cast(pyarrow.int8()) if c.type == pyarrow.bool_() else c for c in batch)
        return list(zip(*(c.cast(pyarrow.string()).fill_null("").to_pylist() for c in batch)))

    def _guess_text(self) -> list[list[str]]:
        """Skip comments and guess separator, width and header -> cells of the first rows."""
        head, above = self._stream.read(BLOCK), ""
        if len(head) == BLOCK and not (head := head[: head.rfind(b"\n") + 1]):
            raise StoreError(f"{self.name}: its first line is longer than {BLOCK >> 20} MiB")
        if b"\0" in head:
            raise StoreError(f"{self.name} is no text in UTF-8: unpack archives, save it as csv")
        lines = re.split("\r\n|\n|\r", head.decode("utf-8-sig"))
        while lines and (not lines[0].strip(" ") or lines[0].lstrip(" ").startswith("#")):
            above = lines.pop(0).strip()
            self._skipped += 1
        lines = [line for line in lines if line.strip(" ")][:SAMPLE]
        if not lines:
            raise StoreError(f"{self.name} is empty: it has no rows")
        # the first separator that splits the first line
        self._separator = next((s for s in "\t;, " if len(cells_of(lines[0], s)) > 1), ",")
        self.width = len(cells_of(lines[0], self._separator))
        if self._separator == " " and any(line.split() != line.split(" ") for line in lines):
            self._stream.seek(0)  # columns aligned by several spaces: collapse them
            text = re.sub(rb"(?m)^ +| +(?=\r?$)| +(?= )", b"", self._stream.read())
            self._stream = io.BytesIO(text)
        self._stream.seek(0)
        cells = [cells_of(line, self._separator) for line in lines]
        rows = [row for row in cells if len(row) == self.width]  # `read` refuses the others
        if is_header(rows):
            self.names = rows.pop(0)
            self._skipped += 1
        elif above.startswith("#"):  # numpy writes a header as a comment
            names = cells_of(above.lstrip("# "), self._separator)
            if len(names) == self.width and any(map(meanings, names, range(self.width))):
                self.names = names
        name = {"\t": "tab", " ": "space"}.get(self._separator, repr(self._separator))
        by = f" by separator {name}" * (self.width > 1)
        header = "no header"
        if self.names:
            header = f"header {short(self._separator.join(self.names))}"
        elif cells[0] == ["0", "1"]:
            header += " (0,1 is a row: if pandas wrote it, put names in its place)"
        self.notes = [plural(self.width, "column") + by, header]
        return rows


def is_header(rows) -> bool:
    """Whether the first row is a header: it has no numbers and a column below is numeric, or its names are known;
    ValueError if it may number the columns, as pandas does for columns without names."""
    first, rest = rows[0], rows[1:]
    width, counted = len(first), [str(j) for j in range(len(first))]
    counts = width > 2 or width == 2 and all(kind_of(row) == "real" for row in rest)
    index = width > 1 and first[1:] == counted[:-1] and meanings(first[0], 0)
    if rest and (index or counts and first == counted):
        raise ValueError(f"its first row is {short(','.join(first))}: write names, such as id,a,b")
    # pandas leaves the name of the index empty
    named = first[1:] if width > 1 and not first[0] else first
    digits = all(cell[:1] in "0123456789.+-" for cell in first)  # numbers, perhaps damaged
    if digits or any(map(like_number, named)):
        return False
    if any(all(map(NUMBER.fullmatch, column)) for column in zip(*rest)):
        return True
    named = any(map(meanings, first, range(len(first))))
    return named and not set(first) & {cell for row in rest for cell in row}


def meanings(name, j) -> set[str]:
    """Return those of MEANINGS that fit the name of column j, also if "node" or "id" follow: `from_node_id`. The first
    column holds ids, too, if its name is empty or ends in id."""
    word = re.sub(r"[\W_]", "", name.lower())
    forms = {word, word.removesuffix("id").removesuffix("node")}
    fitting = {meaning for meaning, words in MEANINGS.items() if forms & {*words.split()}}
    like_id = word == "" or word.endswith("id") and "label" not in fitting
    return fitting | {"id"} if j == 0 and like_id else fitting


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
        if not all(map(WHOLE.fullmatch, cells)):
            return "real"
        return "coded" if any(map(CODE.fullmatch, cells)) else "whole"
    return "mixed" if any(map(NUMBER.fullmatch, cells)) else "text"


def like_number(cell) -> bool:
    """Whether a cell is a number or stands for a missing one."""
    return cell in MISSING or cell.lower() in LIKE_NUMBERS or bool(NUMBER.fullmatch(cell))


@contextlib.contextmanager
def opened(file):
    """Context manager: the `Table` in a file."""
    with reading(file):
        stream = open(file, "rb")
    with stream:
        yield Table(stream, file)


def spool(folder, chunks, dtype, *row) -> np.memmap:
    """Write chunks [r, *row] to a file without a name in a folder, to be read several times -> memmap [rows, *row]."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
        shape = (out.tell() // (int(np.prod(row)) * np.dtype(dtype).itemsize), *row)
        out.flush()
        return np.memmap(out, dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


def stacked(columns, which, dtype) -> np.ndarray:
    """Stack n of the columns to [r, n]; what float32 cannot hold becomes infinite, which a store refuses."""
    with np.errstate(over="ignore"):
        return np.stack([columns[j] for j in which], 1).astype(dtype, copy=False)


def short(text) -> str:
    """Shorten a text to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."
