"""A table in a file -> chunks of its rows, never whole in memory: csv in all its kinds, and parquet.

    with opened("edges.csv.gz") as table:                     # table.names, table.width, table.numeric
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

from store import StoreError

PIECE = 1 << 19  # bytes of text parsed at once: they stay in the cache
LINE = 1 << 24  # bytes of the longest line
SAMPLE = 1000  # rows at most from which the layout is guessed
DAMAGED = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

SOURCES = {"source", "src", "from", "u"}  # names of columns, in the forms that _forms gives
DESTINATIONS = {"destination", "dest", "dst", "target", "to", "v"}
LABELS = {"label", "labels", "class", "category", "target", "y"}
IDS = {"id", "node", "nodeid", "nid", "index", "unnamed0", "indexlevel0"}  # the last two are pandas'
KNOWN = SOURCES | DESTINATIONS | LABELS | IDS | {"weight", "time", "timestamp"}

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

    Attributes:
        names: list of the columns' names, or None. width: number of columns. rows: number of rows read so far.
        numeric, whole: [width] bool, whether a column holds numbers, and integers, as far as was looked.
        notes: what was guessed, in words. hint: how a number could have been text, to end an error with.

    Raises:
        StoreError: for what is no table of equal rows, here or while reading.
    """

    def __init__(self, stream, name):
        self.name, self.names, self.rows, self.notes, self.hint = str(name), None, 0, [], ""
        self._separator, self._trailing, self._unit, self._line = "", False, "line", 0
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
        for line, piece in self._pieces:
            numbers = None if text else self._plain(piece, whole, real)
            if numbers is not None:
                lines, strings = range(line, line + len(numbers[0])), []
            else:
                lines, rows = self._split(line, piece)
                numbers = (self._numbers(lines, rows, whole, np.int64),
                           self._numbers(lines, rows, real, np.float64, missing))
                strings = [[row[j] for row in rows] for j in text]
            self.rows += len(lines)
            if len(lines):
                yield lines, *numbers, strings

    def named(self, words) -> list[int]:
        """The columns with one of these names."""
        return [j for j, name in enumerate(self.names or ()) if _forms(name) & words]

    def id_column(self) -> int | None:
        """The column that holds ids, by its name."""
        return next((j for j, name in enumerate(self.names or ()) if _is_id(name, j)), None)

    def column(self, j) -> str:
        """What messages call a column."""
        return repr(self.names[j]) if self.names else f"column {j + 1}"

    def error(self, line, what) -> StoreError:
        """An error to raise, which names the file and the line."""
        return StoreError(f"{self.name}, {self._unit} {line}: {what}")

    def say(self, *more):
        """Print in one line what was guessed and found."""
        skipped = [f"{count:,} {what}" for what, count in self._skipped.items() if count]
        print(f"{Path(self.name).name}: {', '.join([*self.notes, *skipped, f'{self.rows:,} rows', *more])}")

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
        self._unit, self._separator = "row", ","
        no_header = pyarrow.csv.WriteOptions(include_header=False)

        @contextlib.contextmanager
        def readable():
            try:
                yield
            except (pyarrow.ArrowException, OSError) as error:
                raise StoreError(f"{self.name} cannot be read as parquet: {error}") from error

        def pieces():
            with readable():
                for batch in file.iter_batches(max(1, (1 << 16) // len(names))):
                    out = io.BytesIO()
                    pyarrow.csv.write_csv(batch, out, no_header)
                    yield out.getvalue()

        with readable():
            file = pyarrow.parquet.ParquetFile(stream)
            names = file.schema_arrow.names
        return names, pieces()

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

    def _lines(self, line, text) -> list[tuple[int, str]]:
        """(number, line) of the lines of a piece that hold rows."""
        try:
            lines = list(enumerate(text.decode().split("\n")[:-1], line))
        except UnicodeDecodeError as error:
            line += text.count(b"\n", 0, error.start)
            raise self.error(line, f"byte {text[error.start]:#x} is not UTF-8; save the table as UTF-8") from None
        if self._unit == "row":
            return lines
        for bad in (b"\0", b"\xef\xbb\xbf"):
            if bad in text:
                line += text.count(b"\n", 0, text.find(bad))
                raise self.error(line, "it holds a zero byte or a byte-order mark, which are no text")
        kept = [(n, row) for n, row in lines if row.strip(" ") and not row.lstrip().startswith("#")]
        blank = sum(not row.strip(" ") for _, row in lines) if len(kept) < len(lines) else 0
        self._skipped.update({"lines of comments": len(lines) - len(kept) - blank, "blank lines": blank})
        return kept

    def _cells(self, lines, separator) -> list:
        """A list of cells for each line; None where a quote does not end in its line."""
        options = dict(delimiter=separator or "\x1f", skipinitialspace=separator != " ", strict=True)
        try:
            rows = list(csv.reader(lines, **options))
        except csv.Error:
            rows = []
        if len(rows) != len(lines):
            return [None] if len(lines) == 1 else [self._cells([line], separator)[0] for line in lines]
        if separator == " ":  # columns may be aligned with several
            return [[cell.strip() for cell in row if cell] for row in rows]
        return [[cell.strip() for cell in row] or [""] for row in rows]

    def _split(self, line, text) -> tuple[list[int], list[list[str]]]:
        """(line numbers, rows of `width` cells) of a piece."""
        lines = self._lines(line, text)
        rows, width = self._cells([line for _, line in lines], self._separator), self.width + self._trailing
        for (n, line), row in zip(lines, rows):
            if row is None:
                raise self.error(n, f"{_short(line)} has a quote that does not end in its line")
            if len(row) != width:
                raise self.error(n, f"{_short(line)} has {_count(len(row))}, the others have {width}{self._by()}")
            if self._trailing and row.pop():
                raise self.error(n, f"{_short(line)} has {_count(width)}, of which the last was empty above")
        return [n for n, _ in lines], rows

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

    def _numbers(self, lines, rows, columns, dtype, missing=False) -> np.ndarray:
        """[r, len(columns)] numbers of cells."""
        values = None
        if columns:
            text = "".join(",".join([row[j] for j in columns]) + "\n" for row in rows)
            values = _parse(text.encode(), len(columns), ",", dtype)
        if values is None or not np.isfinite(values).all():
            values = [[self._number(n, row[j], j, dtype, missing) for j in columns] for n, row in zip(lines, rows)]
        return np.array(values, dtype).reshape(len(rows), len(columns))

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
        what = "a whole number of 64 bits" if dtype == np.int64 else "a finite number"
        raise self.error(line, f"{self.column(j)} is {_short(cell)}, which is not {what}{self.hint}")

    # -----------------------------------------------------------------------------------------------------------------
    # guesses

    def _guess(self):
        """Find separator, width, header and kinds of columns in the first rows, then put these back."""
        head, sample = b"", []
        for line, text in self._pieces:
            head, sample = head + text, sample + self._lines(line, text)
            if len(sample) > 2:
                break
        if not sample:
            raise StoreError(f"{self.name} is empty: it has no rows")
        lines, start = [line for _, line in sample[:SAMPLE]], sample[0][0]
        if self._unit == "row":
            self.width = len(self.names)
        else:
            self._separator, self.width = self._guess_separator(lines)
        first, *rest = self._cells(lines, self._separator)
        rest = [row for row in rest if row and len(row) == self.width]
        if first is None or len(first) != self.width:  # a row as bad as others, to be refused when it is read
            rows = rest
        else:
            rows = [first, *rest]
        if self.width > 1 and not any(row[-1] for row in rows) and self._unit == "line":
            self._trailing, self.width = True, self.width - 1
            rows = [row[:-1] for row in rows]
        above = head.split(b"\n", start)[:start - 1]
        if self._unit == "line" and rows and len(first or ()) == self.width + self._trailing and self._is_header(rows):
            self.names, start = rows.pop(0), start + 1
        elif above and above[-1].lstrip().startswith(b"#"):  # where numpy writes the names
            names = self._cells([above[-1].decode().strip().lstrip("# ")], self._separator)[0] or []
            if len(names) == self.width and any(_forms(name) & KNOWN for name in names):
                self.names = names
        if self.names and len(set(self.names)) < self.width:
            raise StoreError(f"{self.name} has two columns called {max(self.names, key=self.names.count)!r}")
        columns = list(zip(*rows)) or [()] * self.width
        self.numeric, self.whole = ([all(cell.lower() in NONE or pattern.fullmatch(cell) for cell in column)
                                     for column in columns] for pattern in (NUMBER, WHOLE))
        comments = sum(line.lstrip().startswith(b"#") for line in above)
        self._skipped = collections.Counter({"lines of comments": comments, "blank lines": len(above) - comments})
        head = head.split(b"\n", start - 1)[-1]
        self._pieces = itertools.chain([(start, head)] if head else [], self._pieces)
        ends = " and one at the end of each row" if self._trailing else ""
        self.notes += [f"{_count(self.width)}{self._by()}{ends}",
                       f"header {self._separator.join(self.names)}" if self.names else "no header"]

    def _guess_separator(self, lines) -> tuple[str, int]:
        """(separator, width): the first that all lines agree on, else that most do; "" and 1 if none is there."""
        found = []
        for rank, separator in enumerate("\t;, "):
            widths = collections.Counter(len(row or ()) for row in self._cells(lines, separator))
            width, count = max(widths.items(), key=lambda item: (item[1], item[0]))
            if width > 1 and 2 * count >= len(lines):
                found.append((count == len(lines), -rank, separator, width))
        return max(found)[2:] if found else ("", 1)

    def _is_header(self, rows) -> bool:
        """Whether the first row has names: no number where others have numbers, or else names that are known."""
        first, rest = rows[0], rows[1:]
        if any(_like_number(cell) for cell in first[1:]):  # pandas names columns 0, 1, ... and the index not at all
            index = [row[0] for row in rest]
            plausible = first[0] or index == [str(i) for i in range(len(index))] or not any(map(_like_number, index))
            counted = first[1:] == [str(j) for j in range(len(first) - 1)]
            return bool(rest and plausible and counted and _is_id(first[0], 0))
        if _like_number(first[0]) and (first[0] or len(first) == 1):
            return False
        if any(all(NUMBER.fullmatch(cell) for cell in column) for column in zip(*rest)):
            return True
        known = any(_forms(name) & KNOWN or _is_id(name, j) for j, name in enumerate(first))
        return known and set(first).isdisjoint(itertools.chain.from_iterable(rest))

    def _by(self) -> str:
        names = {"\t": "tab", " ": "space"}
        return f" by separator {names.get(self._separator, repr(self._separator))}" if self._separator else ""


@contextlib.contextmanager
def opened(file):
    """The table in the file at a path; StoreError if it cannot be read."""
    try:
        stream = open(file, "rb")
    except OSError as error:
        raise StoreError(f"cannot read {file}: {error.strerror}") from error
    with stream:
        yield Table(stream, file)


def spool(file, chunks, dtype, width) -> np.memmap:
    """Put chunks [r, width] into a file, for what is read several times -> [rows, width]."""
    with open(file, "wb") as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
    rows = os.path.getsize(file) // (width * np.dtype(dtype).itemsize)
    return np.memmap(file, dtype, "r", shape=(rows, width)) if rows else np.empty((0, width), dtype)


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
            text = text.replace(separator.encode(), b",") if separator not in ("", ",") else text
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


def _forms(name) -> set[str]:
    """A column's name in small letters, and without a final "id" or "node": `from_node_id`, `Source ID`."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return {word, word.removesuffix("id").removesuffix("node")} - {""}


def _is_id(name, j) -> bool:
    """Whether the name of column j says that it holds ids; the first column's may be empty, or end in id."""
    word = re.sub("[^a-z0-9]", "", name.lower())
    return word in IDS or j == 0 and (word == "" or word.endswith("id") and not _forms(name) & LABELS)


def _like_number(cell) -> bool:
    return cell.lower() in LIKE_NUMBERS or NUMBER.fullmatch(cell) is not None


def _count(columns) -> str:
    return f"{columns} column{'s' * (columns != 1)}"


def _short(text) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
