"""Read rows of a table in a file at the disk's full rate, with many requests in flight.

    reader = RowReader("features.npy", offset=4096, row_bytes=1024, rows=V)
    reader.read(ids, out)              # out[i] = row ids[i], in any order, repeats allowed

A memory map requests one page per thread at a time and waits. Here rows that are close together are one request, and
DEPTH threads of C code wait for the disk at once (native/rows.c). Through the page cache, repeated rows need no disk
access while their pages stay; O_DIRECT, where the file system supports it, leaves the page cache to others.

To copy this file, also take native/, disk/convert.py and disk/files.py. It needs Linux and a C compiler.
"""

import functools
import mmap
import os
import sys
import threading

import torch

from disk import files
from disk.convert import RowsByIndex, check_ids
from disk.files import StoreError, reading
from native import build

DEPTH = 64  # requests in flight
KEPT = 1 / 2  # use buffered reads if the page cache has room for this share of the table
ENDED = 100000  # as in native/rows.c: the file ends before the row does
FLAGS = ["-O2", "-fPIC", "-shared", "-pthread"]


@functools.cache
def library(name="rows"):
    """Load the C code of native/NAME.c; None if this is not Linux or, after a warning, if it cannot be compiled."""
    if sys.platform != "linux":
        return None
    return build.load_c(name, build.read_source(f"{name}.c"), FLAGS)


class RowReader:
    """Reads rows of a table of `rows` rows that starts at byte `offset` of a file. Any number of threads may read at
    once, and forked processes. Only where `library()` is not None.

    Attributes:
        file: descriptor. bytes_read: bytes requested from the file so far. direct: whether the page cache is bypassed.
        block: requests are multiples of this many bytes.
    """

    def __init__(self, path, offset, row_bytes, rows, direct=True):
        self.path = str(path)
        self.offset = offset
        self.row_bytes = row_bytes
        self.rows = rows
        self.bytes_read = 0
        self.lock = threading.Lock()
        with reading(self.path):
            self.file, self.block, self.direct = self._open(direct)

    def _open(self, direct):
        for block in (512, 4096) if direct else ():
            try:
                file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                break  # a file system without it
            try:
                os.preadv(file, [mmap.mmap(-1, block)], 0)
                return file, block, True
            except OSError:  # it has larger blocks
                os.close(file)
        file = os.open(self.path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file, 1, False

    def read(self, ids, out, places=None):
        """Read rows -> `out`; IndexError for an id out of range, StoreError if the disk fails or the file ends too soon.

        Args:
            ids: int32 or int64 [n] row ids, in any order, repeats allowed.
            out: contiguous CPU tensor whose rows have row_bytes bytes; not checked.
            places: int64 [n], the row of `out` for each of ids; None: 0 to n - 1.
        """
        check_ids(ids, self.rows)
        ids = ids.to(torch.int64).contiguous()
        if places is not None:
            check_ids(places, len(out))
            places = places.to(torch.int64).contiguous()
        depth = max(1, min(DEPTH, (1 << 26) // self.row_bytes))
        failed_at = torch.empty(1, dtype=torch.int64, device="cpu")
        code = library().rows_read(
            self.file,
            self.offset,
            self.row_bytes,
            self.block,
            depth,
            ids,
            places,
            len(ids),
            out,
            failed_at,
        )
        if code < 0:
            why = "it was cut short after it was opened" if code == -ENDED else os.strerror(-code)
            raise StoreError(f"{self.path} cannot be read at byte {failed_at.item():,}: {why}")
        with self.lock:
            self.bytes_read += code
        return out

    def __del__(self):
        if hasattr(self, "file"):
            os.close(self.file)


class MappedRows(RowsByIndex):
    """Feature rows in a memory-mapped array.

    A table larger than the free memory is not read through the map but, with a C compiler, by many requests at a time,
    see `RowReader`: buffered if the page cache has room for a share of KEPT of the table, else by direct I/O.

    Attributes:
        shape, dtype: (V, F), torch dtype. large: True if the table is larger than the free memory.
        beside: bytes of memory that the graph and caches take and that the table's pages therefore cannot use.
        share: of the table that is read. path, name: its folder, and file there; None: it is in memory.
        tensor: [V, F], without a copy; missing if large: use `gather`.
    """

    def __init__(self, table, large=False, path=None, head=0, beside=0):
        self._table, self.large = table, large
        self.shape, self.dtype = tuple(table.shape), table.dtype
        self.path, self._head, self.beside = path, head, beside
        self.share = 1
        if not large:
            self.tensor = table
        self.reserve(0)  # opens the file: the store may be renamed or removed later

    @property
    def paged(self):
        """Whether there are a file, Linux and a C compiler, and so a `reader`."""
        return self.path is not None and library() is not None

    def reader(self, direct=None) -> RowReader | None:
        """Return a reader of these rows from disk, or None. direct: past the page cache; None: unless that has room."""
        if not self.paged:
            return None
        return RowReader(
            self.path / self.name,
            self._head,
            self.shape[1] * self.dtype.itemsize,
            self.shape[0],
            direct=not self.stays() if direct is None else direct,
        )

    def reserve(self, count, share=1):
        """Leave `count` more bytes of memory to others than the table's pages, of which only a share is read from here on,
        and choose again how to read these."""
        self.beside += count
        self.share *= share
        self._reader = self.reader() if self.large else None

    def room(self) -> int:
        """Return the bytes of free memory that the table's pages may use."""
        return files.free_host_bytes() - self.beside

    def stays(self) -> bool:
        """Return whether the page cache has room for KEPT of what is read of the table."""
        return self.room() >= KEPT * self.share * self._table.nbytes

    def read(self, ids, out):
        if self._reader and out.is_contiguous():
            return self._reader.read(ids, out)
        return torch.index_select(self._table, 0, ids, out=out)
