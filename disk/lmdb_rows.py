"""Values in LMDB under the keys 0, 1, 2, ..., read by many threads and processes while one writes.

    file = LmdbFile(path)             # which exists; to make one, LmdbFile(path, sync=False).append(values)
    value = file.read(lambda txn: bytes(txn.get(key(3))))     # a consistent snapshot, whatever others write
    file.append([b"...", b"..."])                             # all of them or none, even after a crash

`LmdbFeatures` keeps feature rows in such a file. This file needs disk/convert.py, disk/files.py, torch, numpy and lmdb.
"""

import contextlib
import itertools
import os
import shutil
import struct
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from disk import files
from disk.convert import RowsByIndex, as_numpy, check_finite
from disk.files import StoreError, reading

READ_THREADS = 32  # they mostly wait for the disk, whatever the number of cores
EMPTY = (1 << 64) - 1  # root page of an empty tree
# magic, rows, row width, bytes per element, CRC-32 of the rows that follow
BLOCK_HEADER = struct.Struct("<4sIIII")
META = struct.Struct("<H46xH34xQQQ")  # of LMDB's meta pages, see `Meta`
MOST = 256  # concurrent transactions of a process
PATIENCE = 30  # seconds to retry a read that a writer overtook
MAP = 1 << 42  # bytes of address space, not memory, for an LMDB file: the most it can grow to
MAP_ROOM = 1 << 30  # bytes to map beyond the file's end instead if address space is limited


class Meta(NamedTuple):
    """What is checked of one of the two meta pages of an LMDB file."""

    flags: int  # of the file
    tree_flags: int
    root: int  # page of the tree, or EMPTY
    last: int  # page of the file
    txn: int  # number of the transaction that wrote it


class LmdbFile:
    """An LMDB file with the keys 0, 1, 2, ... LMDB allows one environment per file and process. So objects on the same
    file share it, until the last is gone, and a child closes those that it inherited. That would end their transactions
    in the parent, too: forks wait until there are none."""

    _lock = threading.Lock()
    _permits = threading.Semaphore(MOST)
    _open = weakref.WeakValueDictionary()

    def __init__(self, path, sync=True):
        self.path = Path(path)
        self.sync = sync
        self._env = self._pid = None
        if not sync:  # a build: there are no readers yet, and the whole file is fsynced at the end
            self.path.touch()

    def __reduce__(self):
        return LmdbFile, (self.path,)

    @contextlib.contextmanager
    def transaction(self, write=False):
        """Context manager: a transaction on a snapshot of the file, whose writes are committed at the end, all or none.
        StoreError if the file cannot be read or written."""
        lmdb = import_lmdb()
        with self._lock:
            env = self._environment(lmdb)
            self._permits.acquire()
        try:
            if write:  # free the pages that killed readers still hold
                env.reader_check()
            with env.begin(write=write, buffers=True) as txn:
                yield txn
        except lmdb.Error as error:
            if not write:
                raise StoreError(f"{self.path} cannot be read: {error}; rebuild it") from error
            free = files.readable_size(shutil.disk_usage(self.path.parent).free)
            raise StoreError(
                f"{self.path} cannot be written: {error}; "
                f"{free} are free on its disk, nothing was written"
            ) from error
        finally:
            self._permits.release()

    def read(self, work):
        """Run work(txn) on a snapshot of the file -> its result, which must not point into the file.

        A process that may not write takes no part in LMDB's locking: pages of its snapshot can be overwritten by the
        third commit after it, which may begin once the second is done. So if there was a second, the work is repeated,
        also if it failed on damaged pages, for PATIENCE seconds, and then StoreError is raised.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() <= end:
            with self.transaction() as txn:
                try:
                    result = work(txn)
                except (StoreError, import_lmdb().Error):
                    if not self._overtaken(txn):
                        raise
                else:
                    if not self._overtaken(txn):
                        return result
        raise StoreError(
            f"{self.path}: no consistent snapshot in {PATIENCE} s: "
            "a writer changes it too fast for a reader that may not write to its folder"
        )

    def _overtaken(self, txn):
        return not self._env.flags()["lock"] and self._env.info()["last_txnid"] > txn.id() + 1

    def count(self, txn):
        """Return the number of values; StoreError if LMDB's count and the last key disagree."""
        entries = txn.stat()["entries"]
        with txn.cursor() as cursor:  # closed, or an error's traceback would keep the file open
            last = bytes(cursor.key()) if cursor.last() else None
        if last != (key(entries - 1) if 0 < entries < 1 << 63 else None):
            raise StoreError(f"{self.path}: its last key does not fit {entries} values; rebuild it")
        return entries

    def append(self, values):
        """Append values after the last key, all of them or none."""
        with self.transaction(write=True) as txn:
            for number, value in enumerate(values, self.count(txn)):
                txn.put(key(number), value, append=True)

    def _environment(self, lmdb):
        if self._pid == os.getpid():
            return self._env
        for (pid, *_), env in list(self._open.items()):
            if pid != os.getpid():
                env.close()  # inherited through a fork
        with reading(self.path):
            stat = os.stat(self.path)
            key = (os.getpid(), stat.st_dev, stat.st_ino)
            self._env = self._open.get(key) or self._opened(lmdb, stat.st_size)
        self._open[key] = self._env
        self._pid = os.getpid()
        return self._env

    def _opened(self, lmdb, size):
        """Open the environment, once per process: closing the lock file a second time would drop the process's POSIX lock
        on it, without which writers take its readers for dead."""
        writable = all(os.access(place, os.W_OK) for place in (self.path, self.path.parent))
        lock = writable and self.sync
        if lock:  # a hole in this memory-mapped file would kill the process on a full disk
            handle = os.open(f"{self.path}-lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with open(handle, "r+b"):
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, 1 << 16)
        options = dict(
            path=os.fsencode(self.path),
            subdir=False,
            readonly=not writable,
            lock=lock,
            sync=self.sync,
            readahead=False,
            max_readers=1000,
        )
        try:
            return lmdb.open(map_size=MAP, **options)
        except lmdb.MemoryError:  # limited address space, as by ulimit -v
            return lmdb.open(map_size=size + MAP_ROOM, **options)

    @classmethod
    def _hold(cls):
        """Before a fork: wait until no transaction is open, and let none begin before `_release`."""
        cls._lock.acquire()
        for _ in range(MOST):
            cls._permits.acquire()

    @classmethod
    def _release(cls):
        """After a fork, in the parent and in the child."""
        cls._permits.release(MOST)
        cls._lock.release()


os.register_at_fork(
    before=LmdbFile._hold, after_in_parent=LmdbFile._release, after_in_child=LmdbFile._release
)


def key(number) -> bytes:
    """Return the key of value `number`, big-endian: keys sort by number."""
    return number.to_bytes(8, "big")


def check_lmdb(path, name, record):
    """Check that an LMDB file exists, is not truncated and that its two meta pages are of successive commits: LMDB opens
    the later one, or silently the earlier if the number of the later was damaged."""
    file = files.check_size(path, name, record)
    with reading(file, "; rebuild the store"):
        with open(file, "rb") as data:
            head = data.read(1 << 17)
        page_size = struct.unpack_from("<I", head, 40)[0]
        metas = [Meta(*META.unpack_from(head, at + 44)) for at in (0, page_size)]
        older, newer = sorted(metas, key=lambda meta: meta.txn)
        sound = all(
            (meta.flags, meta.tree_flags) == (0x4008, 0)
            and (meta.root == EMPTY or 1 < meta.root <= meta.last)
            for meta in metas
        )
        if not (
            sound
            and newer.txn == older.txn + 1
            and metas[newer.txn % 2] is newer
            # a file starts empty and only grows
            and older.last <= newer.last
            and (older.txn > 0 or older.root == EMPTY)
        ):
            raise ValueError("its header makes no sense")
        # free pages at the end may never have been written
        if (newer.last + 1) * page_size > file.stat().st_size:
            check_structure(file)


def check_structure(file):
    """Raise StoreError for a fault in the structure of an LMDB file, found without opening it in LMDB."""
    with reading(file, "; rebuild the store"):
        if problems := import_lmdb().verify.verify(os.fsencode(file), subdir=False):
            raise ValueError(f"{problems[0]} (LMDB's structure)")


def import_lmdb():
    """Import the lmdb package; StoreError with the pip command if it is not installed."""
    try:
        import lmdb.verify
    except ImportError as error:
        raise StoreError("a store in LMDB needs the lmdb package: pip install 'lmdb>=3'") from error
    return lmdb


def write_blocks(path, dtype, shape, chunks, block_rows) -> dict:
    """Write chunks of rows as LMDB blocks of `block_rows` rows; returns the record for meta.json."""
    blocks = (_block_value(rows) for rows in _regroup(chunks, block_rows))
    file = LmdbFile(path, sync=False)
    while batch := [*itertools.islice(blocks, 1024)]:
        file.append(batch)
    return files.file_record(path, dtype, shape)


def _block_value(rows) -> bytes:
    data = rows.tobytes()
    return BLOCK_HEADER.pack(b"RBK2", *rows.shape, rows.itemsize, zlib.crc32(data)) + data


def _regroup(chunks, rows):
    """Yield the rows of all chunks, `rows` at a time, fewer at the end."""
    held = None
    for chunk in chunks:
        held = chunk if held is None else np.concatenate([held, chunk])
        full = len(held) - len(held) % rows
        yield from (held[a : a + rows] for a in range(0, full, rows))
        held = held[full:]
    if len(held):
        yield held


class LmdbFeatures(RowsByIndex):
    """Feature rows in an LMDB file, `block_rows` consecutive rows per value; many threads and processes may use it.

    Attributes:
        shape, dtype: (V, F), torch dtype. large: whether all rows together exceed the free memory.
    """

    def __init__(self, path, shape, dtype, block_rows, large):
        self.file = LmdbFile(path)
        self.shape = shape
        self.dtype = dtype
        self.block_rows = block_rows
        self.large = large
        self._storage = files.storage_dtype(str(dtype).removeprefix("torch."))

    def read(self, ids, out):
        """Copy rows of one snapshot, looking up each block once."""
        target = as_numpy(out)
        if self.large:  # many threads wait for the disk first: get() reads a page of each value
            blocks = np.unique(ids.numpy() // self.block_rows)

            def touch(blocks):
                self.file.read(lambda txn: [txn.get(key(n)) for n in blocks.tolist()].clear())

            with ThreadPoolExecutor(READ_THREADS) as pool:
                list(pool.map(touch, np.array_split(blocks, 4 * READ_THREADS)))

        def copy(txn):
            for number, where, rows in self._blocks(ids):
                target[where] = self._block(txn, number)[rows]

        self.file.read(copy)
        return out

    def _put(self, ids, rows):
        check_finite("rows", rows)
        source = as_numpy(rows)
        with self.file.transaction(write=True) as txn:
            _forget_sha256(self.file.path)
            for number, where, at in self._blocks(ids):
                block = self._block(txn, number, check=True).copy()
                block[at] = source[where]
                txn.put(key(number), _block_value(block))

    def _blocks(self, ids):
        """Yield (block, positions in ids, rows inside the block) for every block that ids touch, in order."""
        order = np.argsort(ids.numpy(), kind="stable")
        blocks, rows = np.divmod(ids.numpy()[order], self.block_rows)
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        for a, b in itertools.pairwise([*starts, len(ids)]):
            yield int(blocks[a]), order[a:b], rows[a:b]

    def _block(self, txn, number, check=False) -> np.ndarray:
        """View block `number` as [rows, F], valid inside the transaction; check: compare its checksum as well."""
        value = txn.get(key(number), b"")
        rows = min(self.block_rows, self.shape[0] - number * self.block_rows)
        width = self.shape[1]
        itemsize = self._storage.itemsize
        if len(value) == BLOCK_HEADER.size + rows * width * itemsize:
            *head, crc = BLOCK_HEADER.unpack_from(value)
            block = np.frombuffer(value, self._storage, offset=BLOCK_HEADER.size)
            if head == [b"RBK2", rows, width, itemsize]:
                if not check or zlib.crc32(block) == crc:
                    return block.reshape(rows, width)
        raise StoreError(f"{self.file.path}: block {number} is missing or damaged; rebuild it")

    def verify(self):
        """Raise StoreError for the first block whose checksum does not match."""

        def check(txn):
            for number in range(-(-self.shape[0] // self.block_rows)):
                self._block(txn, number, check=True)

        self.file.read(check)


def _forget_sha256(file):
    """Remove an LMDB file's checksum and largest value from meta.json before it changes; its blocks have CRCs."""
    meta = files.read_meta(file.parent)
    record = meta["files"][file.name]
    record.pop("largest", None)
    if record.pop("sha256", None):
        # one writer at a time: this is called inside its transaction
        files.write_whole(file.with_name("meta.json"), lambda out: out.write(files.dump_meta(meta)))


def verify_directory(path, form, check) -> list[str]:
    """Compare every file of a directory with its checksum -> a list of problems, "FILE: ..."; StoreError if there is no
    store. Nothing may be written to the directory meanwhile.

    Args:
        form: the required format, one of `files.FORMATS`.
        check: function of the path that opens the directory and raises StoreError for a value in LMDB that differs from
            its own checksum; called if all files are as they were written.
    """
    path = Path(path)
    problems = []
    try:
        with reading(path / "meta.json"):
            records = dict(files.read_meta(path, form)["files"])
    except StoreError as error:
        if not os.path.lexists(path / "meta.json"):
            raise
        return [f"meta.json: {error}"]
    for name, record in records.items():
        try:
            check_file = check_lmdb if name.endswith(".lmdb") else files.check_size
            check_file(path, name, record)
            if (wanted := record.get("sha256")) is None:
                check_structure(path / name)
                continue
            with reading(path / name):
                digest = files.sha256_of(path / name).hexdigest()
                if digest != wanted:
                    raise StoreError(f"its sha256 is {digest[:12]}, not {wanted[:12]}")
        except StoreError as error:
            problems.append(f"{name}: {error}")
    try:
        if not problems:
            with reading(path):
                check(path)
    except StoreError as error:
        name = next((name for name in records if name in str(error)), "meta.json")
        problems.append(f"{name}: {error}")
    return problems
