"""LMDB's own rules: values under the keys 0, 1, 2, ... that many threads and processes read while one changes them.

    file = LmdbFile(path)
    with file.transaction() as txn:           # one state of the file, whatever others write meanwhile
        value = txn.get(key(3))
    file.append([b"...", b"..."])             # all of them or none, after a crash as well

`LmdbFeatures` keeps feature rows in such a file. This file needs disk.py, torch and numpy, and lmdb once a file is
opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import struct
import threading
import weakref
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from disk import (
    ROW_BYTES,
    StoreError,
    as_numpy,
    check_finite,
    check_npy,
    check_size,
    dump_meta,
    file_record,
    gather_target,
    read_meta,
    sha256_of,
    storage_dtype,
    sync,
)

READ_THREADS = 32  # that wait for a disk; the processor has little to do with it
EMPTY = (1 << 64) - 1  # the root of a tree without pages
BLOCK_HEADER = struct.Struct("<4sIIII")  # magic, rows, row width, bytes per element, CRC-32 of the rows behind it
MAP_ROOM = 1 << 30  # address space beyond the end of an LMDB file; it doubles when that is used up


class LmdbFile:
    """An LMDB file whose keys are 0, 1, 2, ...: opened by each process for itself, grown when it is full.

    LMDB allows one environment for each file and process, and no transaction while its map is replaced. So the objects
    on one file share an environment, the map is replaced and the process forked between transactions only, and a child
    closes what it inherited.
    """

    _turn, _running, _wanted = threading.Condition(), 0, 0  # transactions of this process, and who waits for their end
    _open = weakref.WeakValueDictionary()

    def __init__(self, path, sync=True):
        self.path, self.sync, self._env, self._pid = Path(path), sync, None, None
        if not sync:  # a build: nobody else reads it, and it is brought to the disk as a whole
            self.path.touch()

    @contextlib.contextmanager
    def transaction(self, write=False):
        """A transaction at one state of the file; what is written becomes part of it at the end, or never."""
        lmdb = import_lmdb()
        try:
            txn = self._begin(write)
            try:
                with txn:
                    yield txn
            finally:
                self._end()
        except lmdb.Error as error:
            if write:
                raise
            raise StoreError(f"{self.path} cannot be read: {error}; rebuild the store") from error

    def read(self, work):
        """work(txn) at one state of the file -> what it returns, which must not point into the file.

        A process that may not write takes no part in LMDB's locking, and a writer does not know what it reads: pages of
        a state can be overwritten by the third commit after it, which begins when the second is there. So the work is
        done again, damage it met included, when there was a second.
        """
        while True:
            with self.transaction() as txn:
                try:
                    result = work(txn)
                except (StoreError, import_lmdb().Error):
                    if not self._overtaken(txn):
                        raise
                else:
                    if not self._overtaken(txn):
                        return result

    def _overtaken(self, txn):
        return not self._locks and self._env.info()["last_txnid"] > txn.id() + 1

    def write(self, change):
        """Run change(txn) in a transaction, again in a larger map when this one is full."""
        lmdb = import_lmdb()
        while True:
            try:
                with self.transaction(write=True) as txn:
                    return change(txn)
            except lmdb.MapFullError:
                if not self._env.reader_check():  # a reader that was killed holds on to pages that could be used again
                    self._resize(2 * self._env.info()["map_size"])
            except lmdb.Error as error:
                # a write that the disk takes in part is reported by LMDB as an input/output error
                full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
                full = full or shutil.disk_usage(self.path.parent).free < 4 * ROW_BYTES
                raise OSError(errno.ENOSPC if full else errno.EIO, f"{self.path}: {error}") from error

    def count(self, txn):
        """How many values there are, as LMDB has counted them and as the last key says."""
        entries = txn.stat()["entries"]
        with txn.cursor() as cursor:  # closed, or an error's traceback would keep the file open
            last = bytes(cursor.key()) if cursor.last() else None
        if last != (key(entries - 1) if 0 < entries < 1 << 63 else None):
            raise StoreError(f"{self.path} counts {entries} values, and the last is not of that number: it is damaged; "
                             "rebuild the store")
        return entries

    def append(self, values):
        """Add values behind the last key, all of them or none."""

        def change(txn):
            for number, value in enumerate(values, self.count(txn)):
                txn.put(key(number), value, append=True)

        self.write(change)

    def close(self):
        """Close the environment, which nobody else may be using."""
        if self._env is not None:
            for key in [key for key, env in self._open.items() if env is self._env]:
                del self._open[key]  # its number may be that of another file, once this one is removed
            self._env.close()

    def _begin(self, write):
        lmdb = import_lmdb()
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._wanted)
                env = self._environment(lmdb)
                LmdbFile._running += 1
            try:
                return env.begin(write=write, buffers=True)
            except lmdb.MapResizedError:  # another process made the file larger than our map
                self._end()
                self._resize(0)
            except BaseException:
                self._end()
                raise

    def _end(self):
        with self._turn:
            LmdbFile._running -= 1
            self._turn.notify_all()

    def _resize(self, size):
        self._hold()
        try:
            self._env.set_mapsize(size)
        finally:
            self._release()

    @classmethod
    def _hold(cls):
        """Wait until no transaction is under way, and let none begin before `_release`."""
        cls._turn.acquire()
        cls._wanted += 1
        cls._turn.wait_for(lambda: not cls._running)
        cls._wanted -= 1

    @classmethod
    def _release(cls):
        cls._turn.notify_all()
        cls._turn.release()

    def _environment(self, lmdb):
        if self._pid != os.getpid():
            for (pid, *_), env in list(self._open.items()):
                if pid != os.getpid():
                    env.close()  # inherited over a fork
            stat, writable = os.stat(self.path), os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
            key = (os.getpid(), stat.st_dev, stat.st_ino)
            try:
                writable = writable and (not self.sync or self._room_for_locks())
                self._locks = writable and self.sync
                self._env = self._open.get(key) or lmdb.open(
                    str(self.path), subdir=False, readahead=False, map_size=stat.st_size + MAP_ROOM, max_readers=1000,
                    readonly=not writable, lock=self._locks, sync=self.sync)
            except (lmdb.Error, OSError) as error:
                raise StoreError(f"{self.path} cannot be opened: {error}") from error
            self._open[key], self._pid = self._env, os.getpid()
        return self._env

    def _room_for_locks(self):
        """Take the blocks of LMDB's lock file, which it maps: a hole would kill the process on a full disk -> whether
        there is room."""
        lock = Path(f"{self.path}-lock")
        there = lock.exists()
        try:
            with open(lock, "ab") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, 1 << 16)
            return True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not there:
                lock.unlink(missing_ok=True)
            return False

    @classmethod
    def _begin_in_child(cls):
        """A fork: whoever waited in the parent does not here."""
        cls._turn, cls._running, cls._wanted = threading.Condition(), 0, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=LmdbFile._hold, after_in_parent=LmdbFile._release, after_in_child=LmdbFile._begin_in_child)


@contextlib.contextmanager
def nothing_changed(path):
    """Say in one sentence why a change of a store failed."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write to {path}: {error.strerror}; what is in it is as it was") from error


def key(number) -> bytes:
    """The key of value `number`."""
    return number.to_bytes(8, "big")


def check_lmdb(path, name, record) -> Path:
    """Check that an LMDB file is there and not cut, and its two meta pages -> its path.

    These are two successive states of a file that has all pages of the later one.
    """
    file = check_size(path, name, record)
    try:
        with open(file, "rb") as data:
            head, size = data.read(1 << 17), os.fstat(data.fileno()).st_size
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}; rebuild the store") from error
    try:  # type of page, magic, version, page size, flags, flags of the tree, its root, last page, transaction
        size_of_page = struct.unpack_from("<I", head, 40)[0]
        metas = [struct.unpack_from("<10xH4xII16xIH42x4xH34xQQQ", head, at) for at in (0, size_of_page)]
    except struct.error:
        metas = [()]
    if any(meta[:6] != (8, 0xBEEFC0DE, 1, size_of_page, 0x4008, 0) for meta in metas):
        raise StoreError(f"{file} does not start as it should: its header is damaged; rebuild the store")
    older, newer = sorted(metas, key=lambda meta: meta[-1])
    last, number = newer[-2:]
    in_turn = number - older[-1] == 1 and metas[number % 2] is newer
    # a file grows, and begins empty: else the later state was damaged, and LMDB would go back to the one before
    grows = older[-2] <= last and (older[-1] > 0 or older[-3] == EMPTY)
    if not (in_turn and grows and all(root == EMPTY or 1 < root <= end for *_, root, end, _ in metas)):
        raise StoreError(f"{file} has a header that makes no sense: it is damaged; rebuild the store")
    if (last + 1) * size_of_page > size and structure_problems(file):  # the last pages may be free and never written
        raise StoreError(f"{file} is truncated: it has {size} bytes and should have {(last + 1) * size_of_page}; "
                         "rebuild the store")
    return file


def structure_problems(file) -> list[str]:
    """What is wrong with the structure of an LMDB file, found without giving it to LMDB."""
    verify_lmdb = import_lmdb().verify
    try:
        return verify_lmdb.verify(str(file), subdir=False)
    except Exception as error:  # whatever damaged bytes make of a reader written in Python
        return [str(error) or repr(error)]


def import_lmdb():
    """The lmdb package; StoreError that names the pip line where it is not installed."""
    try:
        import lmdb.verify
    except ImportError as error:
        raise StoreError("a store in LMDB needs the lmdb package: pip install 'lmdb>=3'") from error
    return lmdb


# ---------------------------------------------------------------------------------------------------------------------
# feature rows


def write_blocks(path, dtype, shape, chunks, block_rows) -> dict:
    """Write chunks of rows as LMDB blocks of `block_rows` rows; returns the record for meta.json."""
    blocks = (_block_value(rows) for rows in _regroup(chunks, block_rows))
    with contextlib.closing(LmdbFile(path, sync=False)) as file:
        while batch := list(itertools.islice(blocks, 1024)):
            file.append(batch)
    return file_record(path, dtype, shape, sha256_of(path))


def _block_value(rows) -> bytes:
    data = rows.tobytes()
    return BLOCK_HEADER.pack(b"RBK2", *rows.shape, rows.itemsize, zlib.crc32(data)) + data


def _regroup(chunks, rows) -> Iterator[np.ndarray]:
    """The same rows, `rows` at a time; fewer at the end."""
    held = None
    for chunk in chunks:
        held = chunk if held is None else np.concatenate([held, chunk])
        whole = len(held) - len(held) % rows
        yield from (held[a:a + rows] for a in range(0, whole, rows))
        held = held[whole:]
    if len(held):
        yield held


class LmdbFeatures:
    """Feature rows in an LMDB file, `block_rows` consecutive rows per value; many threads and processes may use it.

    Attributes:
        shape: (V, F).
        dtype: torch dtype.
        large: True when all rows together are more than the memory that is free.
    """

    def __init__(self, path, shape, dtype, block_rows, large=False):
        self.file, self.shape, self.dtype, self.block_rows, self.large = LmdbFile(path), shape, dtype, block_rows, large
        self._storage = storage_dtype(str(dtype).removeprefix("torch."))

    def __reduce__(self):
        return LmdbFeatures, (self.file.path, self.shape, self.dtype, self.block_rows, self.large)

    def gather(self, ids, out=None) -> Tensor:
        """Copy rows, each block looked up once and all at one moment; see `MmapFeatures.gather`."""
        out = gather_target(self, ids, out)
        target = as_numpy(out)
        if self.large:  # have many threads wait for the disk first
            blocks = np.unique(ids.numpy() // self.block_rows)
            with ThreadPoolExecutor(READ_THREADS) as pool:
                list(pool.map(self._touch, np.array_split(blocks, 4 * READ_THREADS)))

        def copy(txn):
            for number, where, rows in self._blocks(ids):
                target[where] = self._block(txn, number)[rows]

        self.file.read(copy)
        return out

    def put_rows(self, ids, rows):
        """Replace rows, all at one moment: whoever reads sees all of them or none, after a crash as well.

        Args:
            ids: int32 or int64 [n] node ids; of one that repeats, the last row counts.
            rows: [n, F] of this dtype, finite. The blocks they are in are held in memory.

        Raises:
            IndexError: for an id that is no row.
            StoreError: for rows of another shape or dtype, NaN or infinity, a full disk; the rows are as they were.
        """
        ids, rows = torch.as_tensor(ids), torch.as_tensor(rows)
        source = as_numpy(gather_target(self, ids, rows, "rows"))
        check_finite("rows", rows)

        def change(txn):
            _forget_sha256(self.file.path)
            for number, where, at in self._blocks(ids):
                block = self._block(txn, number, check=True).copy()
                block[at] = source[where]
                txn.put(key(number), _block_value(block))

        with nothing_changed(self.file.path):
            self.file.write(change)

    def _touch(self, blocks):
        """Bring blocks into memory: py-lmdb reads a page of each value after the other, other threads run meanwhile."""

        def touch(txn):
            for number in blocks.tolist():
                txn.get(key(number))

        self.file.read(touch)

    def _blocks(self, ids) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(block, positions in ids, rows inside the block) for every block that ids touch, in order."""
        ids = ids.numpy()
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        blocks = ids // self.block_rows
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        rows = ids - blocks * self.block_rows
        for a, b in zip(starts, [*starts[1:], len(ids)]):
            yield int(blocks[a]), order[a:b], rows[a:b]

    def _block(self, txn, number, check=False) -> np.ndarray:
        """Block `number` as [rows, F], without a copy, valid inside the transaction; `check` compares its checksum."""
        value, (rows, width, itemsize) = txn.get(key(number)), (self.block_rows, self.shape[1], self._storage.itemsize)
        rows = min(rows, self.shape[0] - number * rows)
        if value is not None and len(value) == BLOCK_HEADER.size + rows * width * itemsize:
            *head, crc = BLOCK_HEADER.unpack_from(value)
            block = np.frombuffer(value, self._storage, offset=BLOCK_HEADER.size).reshape(rows, width)
            if head == [b"RBK2", rows, width, itemsize] and not (check and zlib.crc32(block) != crc):
                return block
        raise StoreError(f"{self.file.path}: block {number} is missing or damaged; rebuild the store")

    def verify(self):
        """Raise StoreError for the first block whose checksum does not fit."""

        def check(txn):
            for number in range(-(-self.shape[0] // self.block_rows)):
                self._block(txn, number, check=True)

        self.file.read(check)


def _forget_sha256(file):
    """Take the checksum of an LMDB file out of meta.json before the file changes; its values have their own."""
    meta = read_meta(file.parent)
    if meta["files"][file.name].pop("sha256", None):
        part = file.with_name(".meta.json.part")  # one writer at a time: this is called inside its transaction
        part.write_bytes(dump_meta(meta))
        sync(part)
        os.replace(part, file.with_name("meta.json"))
        sync(file.parent)


# ---------------------------------------------------------------------------------------------------------------------
# verifying


def verify_directory(path, read, interpret) -> list[str]:
    """Read every file of a directory, compare it with its checksum, and look at what the files hold together.

    Args:
        path: the directory; nothing may be writing to it meanwhile.
        read: function of the path: meta.json, checked.
        interpret: function of the path, called when no file is damaged: iterator over problems.

    Returns:
        A sentence per problem, starting with the name of the file and a colon; empty when all is well.

    Raises:
        StoreError: if there is no store.
    """
    path, problems = Path(path), []
    try:
        meta = read(path)
    except StoreError as error:
        if not (path / "meta.json").exists():
            raise
        return [f"meta.json: {error}"]
    for name, record in meta["files"].items():
        try:
            check = {".lmdb": check_lmdb, ".npy": check_npy}.get(Path(name).suffix, check_size)
            check(path, name, record)
            if "sha256" in record:
                digest = sha256_of(path / name).hexdigest()
                if digest != record["sha256"]:
                    problems.append(f"{name}: its sha256 is {digest[:16]}..., meta.json has {record['sha256'][:16]}...")
            else:
                problems += [f"{name}: {problem}" for problem in structure_problems(path / name)[:1]]
        except (StoreError, OSError) as error:
            problems.append(f"{name}: {error}")
    return problems or list(interpret(path))  # what differs from its checksum is not worth interpreting
