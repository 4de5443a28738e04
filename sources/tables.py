"""Tables in csv and parquet files, read by pyarrow in batches; their separator and header are guessed.

    with opened("edges.csv.gz") as table:              # table.names, table.width, table.kinds
        for line, columns in table.read({0: int, 1: int, 2: float}):
            ...                                               # {0: int64 [r], 1: int64 [r], 2: float64 [r]}
    array = spool("file", chunks, np.float32, width)          # a memmap of what is read several times

Read are text separated by commas, semicolons, tabs or spaces, with or without a header, comments (#) above the rows,
quotes, gzip, bzip2 and xz (by their content), and parquet. Every cell must be what its column is for: an error names
the line, in whose number blank lines do not count. r is the number of rows in a batch.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import re
from pathlib import Path

import numpy as np

from disk.files import StoreError, reading
from sources.header import (
    MISSING,
    cells_of,
    forms,
    guess_separator,
    is_header,
    is_known,
    kind_of,
    names_ids,
)

HEAD = 1 << 20  # bytes of text from which the layout is guessed
BLOCK = 1 << 23  # bytes of text parsed at once: the longest line
SAMPLE = 1000  # rows from which the layout is guessed
COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
WORDS = {"int64": "whole number of 64 bits", "double": "number", "string": "text"}


class Table:
    """A table in a file, whose rows are read once.

    Args:
        stream: seekable binary file: text, compressed or not, or parquet.
        name: what messages call it.

    Attributes:
        names: list of the columns' names, or None. width: number of columns. rows: number of rows read so far.
        kinds: [width] "whole", "real", "text" (no cell is like a number) or "mixed", in the first rows.
        notes: what was guessed, in words.
    """

    def __init__(self, stream, name):
        self.name, self.names, self.rows, self.notes = str(name), None, 0, []
        self._stream, self._skipped, self._separator = stream, 0, None
        with reading(self.name):
            magic = stream.read(6)
            stream.seek(0)
            if magic.startswith(b"PAR1"):
                import pyarrow.parquet

                self._file = pyarrow.parquet.ParquetFile(stream)
                rows = self._guess_parquet()
            else:
                for start, unpack in COMPRESSED.items():
                    if magic.startswith(start):
                        self._stream = unpack(stream)
                head = self._stream.read(HEAD)
                if head.count(b"\n") < 3 and len(head) == HEAD:
                    head += self._stream.read(BLOCK)
                if len(head) >= HEAD:  # without the line that is cut off
                    head = head[: head.rfind(b"\n") + 1] or head
                rows = self._guess_text(head)
                self._stream.seek(0)
        if self.names and len(set(self.names)) < self.width:
            twice = max(self.names, key=self.names.count)
            raise StoreError(f"{name} has two columns called {twice!r}")
        self.kinds = list(map(kind_of, zip(*rows or [[""] * self.width])))

    def read(self, kinds, missing=False):
        """Read the rows, a batch at a time.

        Args:
            kinds: {column: int, float or str}, each column of the table once.
            missing: read an empty cell or `nan` as NaN among numbers and as "" in text; else it is an error.

        Yields:
            (number of the batch's first line, {column: int64, float64 or list of str [r]}).
        """
        import pyarrow

        types = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
        # whole numbers may be written as floats
        as_float = {j for j, kind in kinds.items() if kind is int and self.kinds[j] == "real"}
        types = [types[float if j in as_float else kinds[j]] for j in range(self.width)]
        with reading(self.name):
            for batch in self._batches(types):
                line, columns = self._skipped + self.rows + 1, {}
                self.rows += len(batch[0])
                for j, kind in kinds.items():
                    if kind is str:
                        columns[j] = self._texts(line, j, batch[j].to_pylist())
                        continue
                    columns[j] = batch[j].to_numpy(zero_copy_only=False)
                    bad = ~np.isfinite(columns[j])  # of a missing cell, NaN
                    if not missing and bad.any():
                        what = f"{self.column(j)} is empty, nan or infinite: a number is needed"
                        raise self.error(line + int(bad.argmax()), what)
                for j in as_float:
                    bad = (columns[j] != np.floor(columns[j])) | (abs(columns[j]) >= 1 << 53)
                    if bad.any():
                        what = f"{self.column(j)} is {columns[j][bad][0]}, which is no whole number"
                        raise self.error(line + int(bad.argmax()), what)
                    columns[j] = columns[j].astype(np.int64)
                yield line, columns

    def _texts(self, line, j, cells) -> list[str]:
        cells = [cell or "" for cell in cells]
        if broken := [i for i, cell in enumerate(cells) if "\n" in cell or "\r" in cell]:
            what = f"{self.column(j)} has a quote that does not end in its line"
            raise self.error(line + broken[0], what)
        cells = [cell.strip() for cell in cells]
        if self._separator:  # pyarrow keeps quotes behind a space
            cells = [re.sub('^"(.*)"$', r"\1", cell) for cell in cells]
        return cells

    def column(self, j) -> str:
        """What messages call a column."""
        return repr(self.names[j]) if self.names and self.names[j] else f"column {j + 1}"

    def named(self, words) -> list[int]:
        """The columns with one of these names."""
        return [j for j, name in enumerate(self.names or ()) if forms(name) & words]

    def id_column(self) -> int | None:
        """The first column whose name says that it holds ids."""
        return next((j for j, name in enumerate(self.names or ()) if names_ids(name, j)), None)

    def error(self, line, what) -> StoreError:
        """An error to raise, which names the file and the line."""
        return StoreError(f"{self.name}, line {line}: {what}")

    def say(self, *more):
        """Print in one line what was guessed and found."""
        rows = plural(self.rows, "row")
        print(f"{Path(self.name).name}: {', '.join([*self.notes, rows, *more])}")

    def _batches(self, types):
        """Columns of each batch; what pyarrow says of a cell or a row, with its line and the column's name."""
        import pyarrow.csv

        try:
            if self._separator is None:
                for batch in self._file.iter_batches(max(1, (1 << 20) // self.width)):
                    yield [batch.column(j).cast(types[j]) for j in range(self.width)]
                return
            names = list(map(str, range(self.width)))
            for batch in pyarrow.csv.open_csv(
                self._stream,
                pyarrow.csv.ReadOptions(
                    use_threads=False, block_size=BLOCK, skip_rows=self._skipped, column_names=names
                ),
                pyarrow.csv.ParseOptions(delimiter=self._separator),
                pyarrow.csv.ConvertOptions(
                    column_types=dict(zip(names, types)), null_values=list(MISSING)
                ),
            ):
                yield batch.columns
        except ValueError as error:
            said = re.sub(
                r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)",
                lambda at: f"line {at[2]}: {self.column(int(at[1]))} is no {WORDS.get(at[3])}",
                str(error),
            ).replace("CSV parse error: Row #", "line ")
            raise StoreError(f"{self.name}, {said[:300]}") from error

    def _guess_parquet(self) -> list[list[str]]:
        """Take the names; return some rows as text."""
        import pyarrow

        self.names = self._file.schema_arrow.names
        self.width = len(self.names)
        self.notes = [plural(self.width, "column"), f"header {short(','.join(self.names), '')}"]
        batch = next(self._file.iter_batches(SAMPLE), None)
        if batch is None:
            return []
        return list(
            zip(*([cell or "" for cell in c.cast(pyarrow.string()).to_pylist()] for c in batch))
        )

    def _guess_text(self, head) -> list[list[str]]:
        """Find comments, separator, header and width; return the first rows."""
        if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise StoreError(
                f"{self.name} is no text: archives have to be unpacked, and other tables saved as csv"
            )
        try:
            text = head.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise StoreError(
                f"{self.name}: byte {head[error.start]:#x} is not UTF-8; save the table as UTF-8"
            ) from error
        lines = re.split("\r\n|\n|\r", text)
        if len(lines[0]) > BLOCK:
            raise StoreError(f"{self.name}: its first line is longer than {BLOCK >> 20} MiB")
        while lines and (not lines[0].strip(" ") or lines[0].lstrip(" ").startswith("#")):
            above = lines.pop(0).strip()
            self._skipped += 1
        lines = [line for line in lines if line.strip(" ")][:SAMPLE]
        if not lines:
            raise StoreError(f"{self.name} is empty: it has no rows")
        self._separator, self.width = guess_separator(lines)
        if self._separator == " " and any(line.split() != line.split(" ") for line in lines):
            self._stream.seek(0)  # columns that are aligned
            text = re.sub(rb"(?m)^ +| +(?=\r?$)| +(?= )", b"", self._stream.read())
            self._stream = io.BytesIO(text)
        cells = [cells_of(line, self._separator) for line in lines]
        rows = [row for row in cells if len(row) == self.width]  # others are refused when read
        if rows and rows[0] == cells[0] and is_header(rows):
            self.names = rows.pop(0)
            self._skipped += 1
        elif self._skipped and above.startswith("#"):  # numpy writes a header as a comment
            names = cells_of(above.lstrip("# "), self._separator)
            if len(names) == self.width and any(map(is_known, names, range(self.width))):
                self.names = names
        name = {"\t": "tab", " ": "space"}.get(self._separator, repr(self._separator))
        by = f" by separator {name}" * (self.width > 1)
        header = f"header {short(self._separator.join(self.names or []), '')}"
        self.notes = [plural(self.width, "column") + by, header if self.names else "no header"]
        numbered = self._separator.join(map(str, range(self.width)))
        if not self.names and self.width > 1 and lines[0] == numbered:
            self.notes[1] += (
                f" ({numbered} is a row: if pandas wrote it as a header, put names in its place)"
            )
        return rows


@contextlib.contextmanager
def opened(file):
    """The `Table` in the file at a path; StoreError if it cannot be read."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise StoreError(f"{file} cannot be read: it is no regular file")
    with contextlib.ExitStack() as stack:
        with reading(file):
            stream = stack.enter_context(open(file, "rb"))
        yield Table(stream, file)


def spool(file, chunks, dtype, width) -> np.memmap:
    """Put chunks [r, width] into a file, for what is read several times -> [rows, width]."""
    with open(file, "wb") as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
    rows = os.path.getsize(file) // (width * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype, "r", shape=(rows, width)) if rows else np.empty((0, width), dtype)


def stacked(columns, which, dtype) -> np.ndarray:
    """Columns as [r, n]; beyond float32 they become infinite, which a store refuses."""
    with np.errstate(over="ignore"):
        return np.stack([columns[j] for j in which], 1).astype(dtype, copy=False)


def plural(number, what) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def short(text, quote="'") -> str:
    """The beginning of a text, in quotes."""
    return f"{quote}{text if len(text) <= 60 else text[:57] + '...'}{quote}"
