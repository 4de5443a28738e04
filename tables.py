"""A table in a file -> chunks of its rows, never whole in memory: csv in all its kinds, and parquet.

    with opened("edges.csv.gz", known) as table:              # table.names, table.width, table.kinds
        for lines, whole, real, text in table.chunks(whole=[0, 1], real=[2]):
            ...                                               # int64 [r, 2], float64 [r, 1]
    array = spool("file", chunks, np.float32, width)          # a memmap of what is read several times

Understood are the separators `,` `;` tab and spaces, a header, comments (#), quotes, a byte-order mark, both ends of
lines, blank lines, a separator at the end of each row, gzip, bzip2 and xz, known by their content. What is guessed is
kept in words, to be printed. Every row must have as many cells as the others, and every cell be what its column is for;
what is not is refused with its line. Text goes through memory half a megabyte at a time.

Letters: r rows of a chunk. This file needs numpy and StoreError; pyarrow for parquet alone.
"""

from __future__ import annotations

import bz2
import collections
import contextlib
import csv
import gzip
import io
import itertools
import lzma
import math
import os
import re
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np

from disk import StoreError

PIECE = 1 << 19  # bytes of text parsed at once: they stay in the cache
LINE = 1 << 23  # bytes of the longest line
SAMPLE = 1000  # rows at most from which the layout is guessed
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

WHOLE = re.compile(r"[+-]?[0-9]{1,25}")
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
NONE = {"", "nan"}  # cells of a label that is missing
LIKE_NUMBERS = NONE | {"na", "n/a", "null", "none", "inf", "-inf", "?", "-"}  # in no header
ZIP, ZSTD, XZ, PARQUET, GZIP, BZIP2 = b"PK\3\4", b"(\xb5/\xfd", b"\xfd7zXZ\0", b"PAR1", b"\x1f\x8b", b"1AY&SY"


class Table:
    """A table in a file: its layout, guessed from its first rows, and its rows in chunks, once and in order.

    Args:
        stream: binary file at its beginning: text, compressed or not, or parquet (which has to be seekable).
        name: what messages call it.
        known: function of a name and the number of its column, by which a header over columns of text is known.

    Attributes:
        names: list of the columns' names, or None. width: number of columns. rows: number of rows read so far.
        kinds: [width] "whole", "real", "text" (no cell is like a number) or "mixed", as far as was looked.
        notes: what was guessed, in words. hint: the end of a message about what is no integer.

    Raises:
        StoreError: for what is no table of equal rows, here or while reading.
    """

    def __init__(self, stream, name, known=lambda name, j: False):
        self._known, self.name, self.names, self.rows, self.notes, self.hint = known, str(name), None, 0, [], ""
        self._separator, self._trailing, self._text, self._unit, self._line = ",", False, False, "line", 0
        self._skipped = collections.Counter()
        stream = stream if hasattr(stream, "peek") else io.BufferedReader(stream)
        with self._readable():
            magic = stream.peek(10)[:10]
        if magic.startswith((ZIP, ZSTD)):
            raise StoreError(f"{name} is a zip or zstd archive: unpack it; gzip, bzip2 and xz are read as they are")
        if magic.startswith(PARQUET):
            self.names, data = self._parquet(stream)
        elif magic.startswith(XZ):
            data = _unxz(stream)
        else:
            if magic.startswith(GZIP):
                stream = gzip.open(stream)
            elif magic.startswith(b"BZh") and magic.endswith(BZIP2):
                stream = bz2.open(stream)
            data = iter(lambda: stream.read(PIECE), b"")
        self._pieces = self._cut(data)
        self._guess()

    def chunks(self, whole=(), real=(), text=(), missing=False):
        """Read the rows.

        Args:
            whole: numbers of the columns of integers, which fit int64; 3.0 and 3e2 are taken as well, below 2^53.
            real: those of finite numbers. text: those of anything. The three name every column once.
            missing: read an empty cell or `nan` as NaN in the real columns.

        Yields:
            (lines [r], int64 [r, len(whole)], float64 [r, len(real)], a list of r strings for each text column).
        """
        whole, real, text = list(whole), list(real), list(text)
        self._text = bool(text)
        for line, piece in self._pieces:
            numbers = None if text else self._plain(piece, whole, real)
            if numbers is not None:
                lines, strings = range(line, line + len(numbers[0])), []
            else:
                lines, cells = self._split(line, piece)
                numbers = (self._numbers(lines, cells, whole, np.int64),
                           self._numbers(lines, cells, real, np.float64, missing))
                strings = [cells[j] for j in text]
            self.rows += len(lines)
            if len(lines):
                yield lines, *numbers, strings

    def column(self, j) -> str:
        """What messages call a column."""
        return repr(self.names[j]) if self.names and self.names[j] else f"column {j + 1}"

    def error(self, line, what) -> StoreError:
        """An error to raise, which names the file and the line."""
        return StoreError(f"{self.name}, {self._unit} {line}: {what}")

    def say(self, *more):
        """Print in one line what was guessed and found."""
        counts = [plural(number, what) for what, number in {**self._skipped, "row": self.rows}.items() if number]
        print(f"{Path(self.name).name}: {', '.join([*self.notes, *counts, *more])}")

    # -----------------------------------------------------------------------------------------------------------------
    # bytes -> lines -> cells -> numbers

    @contextlib.contextmanager
    def _readable(self):
        try:
            yield
        except DAMAGED as error:
            raise StoreError(f"{self.name} cannot be read beyond {self._unit} {self._line}, it is damaged or cut off: "
                             f"{error}") from error

    def _parquet(self, stream):
        """(names of the columns, iterator over the rows as text, which holds the very same numbers)."""
        try:
            import pyarrow
            import pyarrow.csv
            import pyarrow.parquet
        except ImportError as error:
            raise StoreError(f"{self.name} is parquet: reading it needs pyarrow (pip install pyarrow)") from error
        self._unit = "row"

        def pieces():
            try:
                file = pyarrow.parquet.ParquetFile(stream)
                yield file.schema_arrow.names
                for batch in file.iter_batches(max(1, (1 << 16) // len(file.schema_arrow))):
                    out = io.BytesIO()
                    pyarrow.csv.write_csv(batch, out, pyarrow.csv.WriteOptions(include_header=False))
                    yield out.getvalue()
            except (pyarrow.ArrowException, OSError, ZeroDivisionError) as error:
                raise StoreError(f"{self.name} cannot be read as parquet: {error}") from error

        found = pieces()
        return next(found), found

    def _cut(self, data):
        """(number of the first line, whole lines) of a stream of bytes, with a line feed after each line."""
        rest, piece = b"", b" "
        while piece:
            with self._readable():
                piece = next(data, b"")
            text = rest + piece
            end = text.rfind(b"\n") + 1 if piece else len(text)
            text, rest = text[:end], text[end:]
            line = self._line + 1
            if text:
                text = text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text
                text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in text else text
                text = text if text.endswith(b"\n") else text + b"\n"
                self._line += np.count_nonzero(np.frombuffer(text, np.uint8) == 10)
                yield line, text
            if len(rest) > LINE:
                raise self.error(self._line + 1, f"it goes on for more than {LINE >> 20} MiB without an end")

    def _lines(self, line, text) -> tuple[list[int], list[str]]:
        """(numbers, lines) of a piece, those that hold rows."""
        try:
            lines = text.decode().split("\n")[:-1]
        except UnicodeDecodeError as error:
            line += text.count(b"\n", 0, error.start)
            raise self.error(line, f"byte {text[error.start]:#x} is not UTF-8; save the table as UTF-8") from None
        numbers = range(line, line + len(lines))
        if self._unit == "row":
            return numbers, lines
        for bad in (b"\0", b"\xef\xbb\xbf"):
            if bad in text:
                line += text.count(b"\n", 0, text.find(bad))
                raise self.error(line, "it holds a zero byte or a byte-order mark, which are no text")
        starts = [line.lstrip(" ")[:1] for line in lines]
        if "#" in starts and self._text:
            n = starts.index("#")
            raise self.error(numbers[n], f"{short(lines[n])} is a comment, or else text that has to be in quotes")
        if "#" in starts or "" in starts:
            self._skipped.update({"comment": starts.count("#"), "blank line": starts.count("")})
            keep = [start not in ("#", "") for start in starts]
            numbers, lines = list(itertools.compress(numbers, keep)), list(itertools.compress(lines, keep))
        return numbers, lines

    def _split(self, line, text) -> tuple[list[int], list[list[str]]]:
        """(line numbers, columns of cells) of a piece."""
        numbers, lines = self._lines(line, text)
        width, cells = self.width + self._trailing, []
        with contextlib.suppress(csv.Error):
            for row in _csv_rows(lines, self._separator):
                if len(row) != width:
                    break
                cells += row
        if len(cells) != width * len(lines):
            for n, line in zip(numbers, lines):
                row = _cells(line, self._separator)
                if row is None:
                    raise self.error(n, f"{short(line)} has a quote that does not end in its line, or an endless cell")
                if len(row) != width:
                    found = plural(len(row), "column") + self._by()
                    raise self.error(n, f"{short(line)} has {found}, the others have {width}")
        cells = [cell.strip() for cell in cells]
        columns = [cells[j::width] for j in range(width)]
        if self._trailing and any(last := columns.pop()):
            n = next(n for n, cell in zip(numbers, last) if cell)
            raise self.error(n, f"it has {plural(width, 'column')}, of which the last was empty above")
        return numbers, columns

    def _plain(self, text, whole, real):
        """(int64 [r, len(whole)], float64 [r, len(real)]) of a piece of nothing but plain numbers, else None."""
        every = list(range(self.width))
        if self._trailing:
            return None
        if not real and (values := _parse(text, self.width, self._separator, np.int64)) is not None:
            return values if whole == every else values[:, whole], np.empty((len(values), 0))
        values = _parse(text, self.width, self._separator, np.float64)
        if values is None or not np.isfinite(values).all():
            return None
        exact = values[:, whole]
        if (exact != np.floor(exact)).any() or (np.abs(exact) >= 1 << 53).any():
            return None
        return exact.astype(np.int64), values if real == every else values[:, real]

    def _numbers(self, lines, columns, wanted, dtype, missing=False) -> np.ndarray:
        """[r, len(wanted)] numbers of cells."""
        if not wanted:
            return np.empty((len(lines), 0), dtype)
        cells = [columns[j] for j in wanted]
        text = "".join(f"{row}\n" for row in map(",".join, zip(*cells)))
        values = _parse(text.encode(), len(wanted), ",", dtype)
        if values is None or not np.isfinite(values).all():
            values = [[self._number(n, cell, j, dtype, missing) for j, cell in zip(wanted, row)]
                      for n, *row in zip(lines, *cells)]
        return np.array(values, dtype).reshape(-1, len(wanted))

    def _number(self, line, cell, j, dtype, missing):
        """The number in a cell, as _parse reads it where it is plain."""
        if dtype == np.int64 and WHOLE.fullmatch(cell):
            if -1 << 63 <= int(cell) < 1 << 63:
                return int(cell)
        elif NUMBER.fullmatch(cell):
            value = float(cell)
            if math.isfinite(value) and (dtype == np.float64 or value == math.floor(value) and abs(value) < 1 << 53):
                return dtype(value)
        elif missing and cell.lower() in NONE:
            return math.nan
        what = f"a whole number of 64 bits{self.hint}" if dtype == np.int64 else "a finite number"
        raise self.error(line, f"{self.column(j)} is {short(cell)}, which is not {what}")

    # -----------------------------------------------------------------------------------------------------------------
    # guesses

    def _guess(self):
        """Find separator, width, header and kinds of columns in the first rows, then put these back."""
        head, sample, start, above, skipped = [], [], 0, b"", self._skipped.copy()
        for line, text in self._pieces:
            numbers, lines = self._lines(line, text)
            if head or numbers:
                start = start or numbers[0]
                head.append((line, text))
                sample += lines[:SAMPLE]
                size = sum(len(text) for _, text in head)
                if size >= PIECE and len(sample) > 1 or size > 2 * LINE:
                    break
            else:  # nothing but comments so far
                above, skipped = text, self._skipped.copy()
        if not sample:
            raise StoreError(f"{self.name} is empty: it has no rows")
        lines = sample[:SAMPLE]
        line, text = head[0]
        *over, text = text.split(b"\n", start - line)
        comments = sum(line.lstrip().startswith(b"#") for line in over)
        skipped.update({"comment": comments, "blank line": len(over) - comments})
        self._skipped = skipped
        if self._unit == "row":
            self.width = len(self.names)
        else:
            self._separator, self.width = self._guess_separator(lines)
        cells = [_cells(line, self._separator) for line in lines]
        rows = [row for row in cells if row and len(row) == self.width]  # the others are refused when they are read
        if self._unit == "line":
            if self.width > 1 and not any(row[-1] for row in rows):
                self._trailing, self.width = True, self.width - 1
                rows = [row[:-1] for row in rows]
            if rows and len(cells[0] or ()) == self.width + self._trailing and self._is_header(rows):
                self.names, start, text = rows.pop(0), start + 1, text.partition(b"\n")[2]
            else:
                self.names = self._names_in_comment((over or above.split(b"\n")[:-1] or [b""])[-1])
        if self.names and len(set(self.names)) < self.width:
            raise StoreError(f"{self.name} has two columns called {max(self.names, key=self.names.count)!r}")
        self.kinds = list(map(_kind, zip(*rows or [[""] * self.width])))
        self._pieces = itertools.chain([(start, text)] if text else [], head[1:], self._pieces)
        more = self._by() * (self.width + self._trailing > 1) + " and one at the end of each row" * self._trailing
        self.notes = [plural(self.width, "column") + more,
                      f"header {short(self._separator.join(self.names), '')}" if self.names else "no header"]
        if not self.names and self.width > 1 and lines[0] == self._separator.join(map(str, range(self.width))):
            self.notes[1] += f" ({lines[0]} is a row)"

    def _names_in_comment(self, line) -> list[str] | None:
        """The names that numpy writes into the comment above the rows, if they are known."""
        line = line.decode().strip()
        names = _cells(line.lstrip("# "), self._separator) or []
        known = len(names) == self.width and any(map(self._known, names, itertools.count()))
        return names if line.startswith("#") and known else None

    def _guess_separator(self, lines) -> tuple[str, int]:
        """(separator, width): the first that all lines agree on, else that most do; one column has "," in no line."""
        found = []
        for rank, separator in enumerate("\t;, "):
            widths = collections.Counter(len(_cells(line, separator) or ()) for line in lines)
            width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
            if width > 1 and 2 * count >= len(lines):
                found.append((count == len(lines), -rank, separator, width))
        return max(found)[2:] if found else (",", 1)

    def _is_header(self, rows) -> bool:
        """Whether the first row has names: no number where others have numbers, or else names that are known."""
        first, rest = rows[0], rows[1:]
        numbered = [str(j) for j in range(len(first))]  # how pandas names columns without names
        if first == numbered and rest:
            fractions = all(all(map(NUMBER.fullmatch, row)) and not all(map(WHOLE.fullmatch, row)) for row in rest)
            return len(first) > 2 or len(first) == 2 and fractions
        if len(first) > 1 and first[1:] == numbered[:-1] and self._known(first[0], 0) and rest:  # "" for the index
            index = [row[0] for row in rest]
            return bool(first[0]) or index == [str(i) for i in range(len(index))] or not any(map(_like_number, index))
        if any(map(_like_number, first[1:])) or _like_number(first[0]) and (first[0] or len(first) == 1):
            return False
        if all(cell[:1] in "0123456789.+-" for cell in first):  # damaged numbers
            return False
        if any(all(map(NUMBER.fullmatch, column)) for column in zip(*rest)):
            return True
        known = any(map(self._known, first, itertools.count()))
        return known and set(first).isdisjoint(itertools.chain.from_iterable(rest))

    def _by(self) -> str:
        name = {"\t": "tab", " ": "space"}.get(self._separator, repr(self._separator))
        return f" by separator {name}" if self._unit == "line" else ""


@contextlib.contextmanager
def opened(file, known):
    """The `Table` in the file at a path; StoreError if it cannot be read."""
    try:
        stream = open(file, "rb")
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error
    with stream:
        yield Table(stream, file, known)


def spool(file, chunks, dtype, width) -> np.memmap:
    """Put chunks [r, width] into a file, for what is read several times -> [rows, width]."""
    with open(file, "wb") as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
    rows = os.path.getsize(file) // (width * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype, "r", shape=(rows, width)) if rows else np.empty((0, width), dtype)


def _csv_rows(lines, separator):
    """Rows of cells; raises csv.Error for a quote that never ends."""
    if separator == " ":  # columns may be aligned with several
        lines = (line if '"' in line else " ".join(filter(None, line.split(" "))) for line in lines)
    rows = csv.reader(lines, delimiter=separator, skipinitialspace=separator != " ", strict=True)
    return (row or [""] for row in rows)


def _cells(line, separator) -> list[str] | None:
    """The cells of one line; None where a quote does not end in it."""
    try:
        return [cell.strip() for row in _csv_rows([line], separator) for cell in row]
    except csv.Error:
        return None


def _parse(text, width, separator, dtype):
    """[r, width] numbers of a piece of text in which every line is plain, else None.

    Plain are digits (for floats `+-.eE` as well) between width - 1 separators: then numpy's parser, which is fast and
    takes much for a number, has no choice.
    """
    shape = text.translate(None, b"0123456789" if dtype == np.int64 else b"0123456789+-.eE")
    line = separator.encode() * (width - 1) + b"\n"
    if shape != line * (len(shape) // width):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            text = text.replace(b"\n", b",")
            text = text.replace(separator.encode(), b",") if separator != "," else text
            values = np.fromstring(text, dtype, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    if len(values) != len(shape) or dtype == np.int64 and values.max(initial=0) == (1 << 63) - 1:
        return None  # an empty cell, or a number beyond int64
    return values.reshape(-1, width)


def _unxz(stream):
    """Unpack .xz, giving it at most 256 MiB for its dictionary, whatever it asks for."""
    data = b"\0"
    while data := data.lstrip(b"\0") or stream.read(PIECE).lstrip(b"\0"):  # streams may follow one another, and zeros
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=1 << 28)
        while not decoder.eof:
            yield decoder.decompress(data, PIECE)
            data = stream.read(PIECE) if decoder.needs_input and not decoder.eof else b""
            if decoder.needs_input and not decoder.eof and not data:
                raise EOFError("it ended before its end-of-stream marker was reached")
        data = decoder.unused_data


def _kind(cells) -> str:
    """What the cells of a column are."""
    cells = [cell for cell in cells if cell.lower() not in NONE]
    if all(map(NUMBER.fullmatch, cells)):
        return "whole" if all(map(WHOLE.fullmatch, cells)) else "real"
    return "mixed" if any(map(_like_number, cells)) else "text"


def _like_number(cell) -> bool:
    return cell.lower() in LIKE_NUMBERS or NUMBER.fullmatch(cell) is not None


def plural(number, what) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def short(text, quote="'") -> str:
    """The beginning of a text, in quotes."""
    return f"{quote}{text if len(text) <= 60 else text[:57] + '...'}{quote}"
