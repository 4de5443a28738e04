"""A directory of checksummed files that is complete or not there: what graphs on disk are made of.

    with complete_or_not_there(path, need) as building:       # a hidden directory, renamed to path at the end
        record = write_npy(building / "labels.npy", "int64", [V], chunks)
        (building / "meta.json").write_bytes(dump_meta({..., "files": {"labels.npy": record}}))
    labels = map_npy(path, "labels.npy", record)              # a tensor over the file, shared by all processes
    write_whole("ids.npy", lambda file: np.save(file, ids))   # a single file: its old content or its new one is there

Every array is a plain .npy file of format 1.0 with one spelling of its header; meta.json holds the size and the SHA-256
of every file that never changes, and a checksum of itself. Whoever opens a directory checks sizes and heads, which is
safe on any bytes; whoever verifies it reads everything. This file needs torch, numpy and tqdm.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import mmap
import os
import re
import secrets
import shutil
import stat
import struct
import uuid
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "valid", "test")
DTYPES = ("float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64")
VERSION = 3
READABLE = (2, 3)  # 2 has no columns of edges, no node times, one split and one label a node
MAX_SPLITS = 1 << 16
HEADS = (128, 4096)  # bytes in front of an array's data
ROW_BYTES = 1 << 24  # bytes of rows handled at a time
FORMATS = {
    "ringblock-graph": "one graph: open it as GraphStore (train.py --task node)",
    "ringblock-graphs": "many small graphs: open it as GraphDataset (train.py --task graph)",
}


class StoreError(ValueError):
    """What is wrong with a graph, a store or a data set, in one sentence for its user.

    It may quote a file that a stranger made: what cannot be printed is escaped.
    """

    def __str__(self):
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in super().__str__())


# ---------------------------------------------------------------------------------------------------------------------
# writing


@contextlib.contextmanager
def complete_or_not_there(path, need):
    """A hidden directory to write into, which becomes `path` at the end; it takes about `need` bytes."""
    refuse_existing(path)
    try:
        with scratch_folder(path) as building:
            try:
                if need > shutil.disk_usage(path.parent).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield building
                for file in [*building.iterdir(), building]:
                    sync(file)
                os.rename(building, path)
                sync(path.parent)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                shutil.rmtree(building, ignore_errors=True)
                free = shutil.disk_usage(path.parent).free
                raise StoreError(f"no room for {path} on its disk: it takes about {readable_size(need)} and "
                                 f"{readable_size(free)} are free; free some or build it elsewhere") from error
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and os.path.lexists(path):
            raise StoreError(f"{path} exists already: another process completed it first") from error
        raise StoreError(f"cannot build {path}: {error.strerror or error}") from error


def refuse_existing(path):
    """Raise StoreError unless a directory can be made at a path."""
    if os.path.lexists(path):
        raise StoreError(f"{path} exists already: remove it or choose another path")
    if path.name in ("", ".."):
        raise StoreError(f"{path} has no name of its own: choose another path")
    if len(os.fsencode(path.name)) > 255:
        raise StoreError(f"{path.name[:20]}... is a name of {len(os.fsencode(path.name))} bytes: 255 are possible")


@contextlib.contextmanager
def scratch_folder(path):
    """A hidden folder beside `path`, made with the folders above it, and gone at the end unless it was renamed.

    It is locked for as long as its process lives, in whatever container that is. What dead builds of the same target
    left is what is not locked; it is removed here.
    """
    name = path.name if len(os.fsencode(path.name)) <= 200 else hashlib.sha256(os.fsencode(path.name)).hexdigest()
    above = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(above):
        sync(folder.parent)
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{name}.building."):
            _remove_unless_locked(entry)
    while True:
        folder = path.with_name(f".{name}.building.{uuid.uuid4().hex[:12]}")
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(
            OSError
        ):  # some network file systems have no locks, and then nothing is taken for dead
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # not taken for dead before it was locked
            break
        os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        for folder in above:
            with contextlib.suppress(OSError):  # what was built is in it
                folder.rmdir()


def _remove_unless_locked(folder):
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # its process lives
    finally:
        os.close(lock)


def sync(path):
    """Have a file or a directory on the disk before anything that comes after."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path, write):
    """Write one file so that its old content or its new one is there, never a part of it.

    The bytes go into a file beside it that nobody else can have named or opened, which is synced and takes the place of
    `path` at the end. A device or a pipe cannot be replaced: it is written to as it stands. A symbolic link of one's
    own is followed, one of another user is refused. What writers of this path left when they were killed is removed.

    Args:
        path: the file. Its folder has to exist.
        write: function of a binary file, which writes all of it; it may not seek.

    Raises:
        StoreError: for a full disk and whatever else the system objects to. What was at `path` stays.
    """
    path, part = Path(path), None
    try:
        if path.exists() and not path.is_file():
            content = io.BytesIO()
            write(content)
            with open(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
                file.write(content.getbuffer())
            return
        if path.is_symlink():
            if path.lstat().st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, "it is a symbolic link of another user")
            path = Path(os.path.realpath(path))
        with contextlib.suppress(OSError):  # a folder that may be written to but not listed
            _remove_parts(path)
        part, handle = _locked_part(path)
        with open(handle, "wb") as file:
            if path.exists():
                os.fchmod(handle, stat.S_IMODE(path.stat().st_mode))
            write(file)
            file.flush()
            os.fsync(handle)
            os.replace(part, path)
        part = None
        with contextlib.suppress(OSError):
            sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise StoreError(f"{path} could not be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if part:
            part.unlink(missing_ok=True)


def _locked_part(path):
    """A file beside `path` under a name drawn at random, locked as long as it is open -> (its path, its descriptor)."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, handle
        os.close(handle)  # another writer took it for a leftover before the lock was there


def _remove_parts(path):
    """Remove what writers of `path` left when they were killed: parts that nobody holds a lock on."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}\.part")
    for entry in filter(lambda entry: name.fullmatch(entry.name), os.scandir(path.parent)):
        with contextlib.suppress(OSError):
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(handle)


def write_npy(path, dtype, shape, chunks, head=128) -> dict:
    """Write chunks of rows, behind a header of `head` bytes, as one .npy file; returns its record for meta.json.
    shape[0] may come out smaller."""
    header = npy_header(dtype, shape, head)
    digest, rows = hashlib.sha256(header), 0
    with open(path, "wb") as file:
        file.write(header)
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
            rows += len(chunk)
        shape = [rows, *shape[1:]]
        file.seek(0)
        file.write(npy_header(dtype, shape, head))
    if npy_header(dtype, shape, head) != header:
        digest = sha256_of(path)
    return file_record(path, dtype, shape, digest)


def write_lines(path, lines) -> dict:
    """Write strings as UTF-8, one a line, none of which has a line's end in it; returns the record for meta.json."""
    digest, count = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for line in lines:
            data = f"{line}\n".encode()
            file.write(data)
            digest.update(data)
            count += 1
    return file_record(path, "str", [count], digest)


def read_lines(path, name, record) -> list[str]:
    """The strings that `write_lines` wrote; StoreError where the file holds something else."""
    file = check_size(path, name, record)
    try:
        lines = file.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; rebuild the store") from error
    if lines.pop() or len(lines) != record["shape"][0]:
        raise StoreError(f"{file} does not have {record['shape'][0]:,} whole lines: it is damaged; rebuild the store")
    return lines


def file_record(path, dtype, shape, digest) -> dict:
    """What meta.json says of a file: dtype ("str": a text of shape[0] lines), shape, bytes and digest."""
    size, sha256 = path.stat().st_size, digest.hexdigest()
    return {"dtype": np.dtype(dtype).name, "shape": shape, "bytes": size, "sha256": sha256}


def npy_header(dtype, shape, head=128) -> bytes:
    """The `head` bytes in front of the data of a .npy file of format 1.0: one spelling, so that it can be compared."""
    shape = tuple(int(n) for n in shape)
    text = repr({"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape})
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", head - 10) + text.encode().ljust(head - 11) + b"\n"


def head_of(record) -> int:
    """Bytes in front of the data of the .npy file with this record in meta.json."""
    return record["bytes"] - math.prod(record["shape"]) * np.dtype(record["dtype"]).itemsize


def sha256_of(path):
    """hashlib's SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
    return digest


# ---------------------------------------------------------------------------------------------------------------------
# meta.json


def storage_dtype(dtype) -> np.dtype:
    """The numpy dtype in which features are stored; numpy has no bfloat16."""
    return np.dtype("int16" if dtype == "bfloat16" else dtype).newbyteorder("<")


def dump_meta(meta) -> bytes:
    """meta.json with a checksum over itself, in the one spelling that `read_meta` accepts."""
    meta = {k: v for k, v in meta.items() if k != "checksum"}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    return (json.dumps(dict(meta, checksum=digest), indent=1, sort_keys=True) + "\n").encode()


def read_meta(path, form=None, describe=None) -> dict:
    """Read and check meta.json; anything but the bytes that `dump_meta` wrote is refused.

    Args:
        path: the directory.
        form: one of FORMATS, which it has to have; any when None.
        describe: function of need(name, test), which takes a sane value out of meta.json; returns what the format's
            files have to be, {file: (dtype, shape)}; without it the numbers of the format are not looked at.

    Raises:
        StoreError: if it is no store, of another format or version, damaged or altered.
    """
    try:
        data = _read_regular(Path(path) / "meta.json", 1 << 24)
        meta = json.loads(data)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"{path} is no store: there is no {Path(path) / 'meta.json'}") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot read meta.json: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: meta.json is damaged: {error}; rebuild the store") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("format"), str) or meta["format"] not in FORMATS:
        raise StoreError(f"{path}: meta.json does not describe a store (its format is none of {', '.join(FORMATS)})")
    if form and meta["format"] != form:
        raise StoreError(f"{path} holds {FORMATS[meta['format']]}")
    if meta.get("format_version") not in READABLE:
        raise StoreError(f"{path}: store format {meta.get('format_version')!r:.200}; this code reads "
                         f"{' and '.join(map(str, READABLE))}; rebuild it")

    def need(name, test):
        if name not in meta or not test(meta[name]):
            raise StoreError(f"{path}: meta.json has {name} = {meta.get(name)!r:.200}, which is no sane value; "
                             "rebuild the store")
        return meta[name]

    files = need("files", lambda n: isinstance(n, dict) and all(isinstance(r, dict) for r in n.values()))
    expected = describe(need) if describe else {}
    for name in expected.keys() | files.keys() if describe else ():
        record = files.get(name, {})
        if not _fits(name, record, *expected.get(name, (None, None))):
            raise StoreError(f"{path}: meta.json describes {name!r:.200} as {record!r:.200}, which does not fit the "
                             "graph; rebuild the store")
    if data != dump_meta(meta):
        raise StoreError(f"{path}: meta.json was altered: its checksum does not fit; rebuild the store")
    return meta


def _read_regular(file, most) -> bytes:
    """The bytes of a file, which has to be a regular one (a pipe would wait, a device would never end) of at most
    `most`."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with open(handle, "rb") as data:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            raise ValueError(f"it is no regular file of at most {readable_size(most)}")
        return data.read(most)


def within(low, high):
    """A test for `need`: a whole number from low to high."""
    return lambda n: type(n) is int and low <= n <= high


def split_files(need, count):
    """What the files of a split have to be: each as long as recorded, with at most `count` ids; of K splits K rows."""
    files, shapes, rows = need("files", bool), {}, set()
    for name in SPLITS:
        shape = files.get(f"{name}.npy", {}).get("shape")
        sane = isinstance(shape, list) and len(shape) in (1, 2) and within(0, count)(shape[-1])
        sane = sane and within(1, MAX_SPLITS)(shape[0] if len(shape) == 2 else 1)
        shapes[f"{name}.npy"] = ("int64", shape if sane else None)
        rows.add(tuple(shape[:-1]) if sane else None)
    return shapes if len(rows) == 1 else dict.fromkeys(shapes, ("int64", None))


def _fits(name, record, dtype, shape):
    """Whether a file's record in meta.json is that of an array of a dtype and shape."""
    if shape is None or (record.get("dtype"), record.get("shape")) != (dtype, shape):
        return False
    size = record.get("bytes")
    if not name.endswith(".lmdb") and "sha256" not in record:  # LMDB's files alone change
        return False
    if name.endswith(".npy") and (type(size) is not int or head_of(record) not in HEADS):
        return False
    digest = record.get("sha256", "0" * 64)
    return within(1, 1 << 60)(size) and isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None


# ---------------------------------------------------------------------------------------------------------------------
# reading


def map_npy(path, name, record, ahead=True) -> Tensor:
    """Map a .npy file whose header is known; no header is parsed, so a damaged one cannot do harm."""
    file, head = check_npy(path, name, record), head_of(record)
    array = np.memmap(file, record["dtype"], "r", offset=head, shape=tuple(record["shape"]))
    if not ahead and hasattr(mmap, "MADV_RANDOM"):  # read what is asked for, not what lies beside it
        array._mmap.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def check_size(path, name, record) -> Path:
    """Check that a file is there and as long as recorded (LMDB's may have grown) -> its path."""
    file, grows = Path(path) / name, name.endswith(".lmdb")
    try:
        status = file.stat()
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}; rebuild the store") from error
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{file} is no regular file; rebuild the store")
    size = status.st_size
    if size < record["bytes"] or size > record["bytes"] and not grows:
        raise StoreError(f"{file} is {'truncated' if size < record['bytes'] else 'too long'}: it has {size} bytes and "
                         f"should have {record['bytes']}; rebuild the store")
    return file


def check_npy(path, name, record) -> Path:
    """Check that an array's file is there, as long as recorded, and starts as it should -> its path."""
    file = check_size(path, name, record)
    try:
        with open(file, "rb") as data:
            head = head_of(record)
            if data.read(head) == npy_header(record["dtype"], record["shape"], head):
                return file
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}; rebuild the store") from error
    raise StoreError(f"{file} does not start as it should: its header is damaged; rebuild the store")


def as_numpy(rows) -> np.ndarray:
    """A CPU tensor as a numpy array over the same memory; bfloat16, which numpy lacks, as int16."""
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


def readable_size(count) -> str:
    """1234567 -> '1.23 MB'."""
    power = min(4, max(0, len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


# ---------------------------------------------------------------------------------------------------------------------
# what goes into it


def gather_target(features, ids, out, name="out") -> Tensor:
    """`out`, or a tensor for it, after checking both it and the ids."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 1:
        what = f"{list(ids.shape)} {ids.dtype}" if hasattr(ids, "dtype") else type(ids).__name__
        raise StoreError(f"ids is {what}: an int32 or int64 tensor [n] is needed (torch.as_tensor)")
    if len(ids):
        low, high = (int(n) for n in torch.aminmax(ids))
        if low < 0 or high >= features.shape[0]:
            raise IndexError(f"node {low if low < 0 else high} is out of range: ids lie in [0, {features.shape[0]})")
    shape = (len(ids), features.shape[1])
    if out is None:
        return torch.empty(shape, dtype=features.dtype)
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != features.dtype:
        what = f"{list(out.shape)} {out.dtype}" if hasattr(out, "dtype") else type(out).__name__
        raise StoreError(f"{name} is {what}: a tensor {list(shape)} {features.dtype} is needed")
    return out


def check_ids(path, split, count, what="node"):
    """Raise StoreError unless the ids in each part of a split, a tensor, lie in [0, count) and differ."""
    for name, ids in split.items():
        low, high = (int(n) for n in torch.aminmax(ids)) if len(ids) else (0, -1)
        if low < 0 or high >= count:
            bad = low if low < 0 else high
            raise StoreError(f"{path}: {name}.npy holds {what} {bad}, and {what} ids lie in [0, {count}): it is "
                             "damaged; rebuild the store")
        if not (ids.diff() > 0).all() and len(ids.unique()) < len(ids):
            raise StoreError(f"{path}: {name}.npy holds a {what} more than once: it is damaged; rebuild the store")


def info_lines(lines, graph) -> str:
    """{name: value} and what every format has (split, source, files), a line each."""
    meta = graph.meta
    several = f", the first of {graph.num_splits}" if getattr(graph, "num_splits", 1) > 1 else ""
    lines = {**lines, "split": ", ".join(f"{name} {len(ids):,}" for name, ids in graph.split.items()) + several,
             "source": meta.get("source") or "unknown", "format": meta["format_version"],
             **{name: readable_size(record["bytes"]) for name, record in sorted(meta["files"].items())}}
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())


def array_like(name, values):
    """`values` if they have shape, dtype and slices (arrays, tensors, `Rows`), a list as an array; else StoreError."""
    try:
        values = np.asarray(values) if type(values) in (list, tuple, range) else values
        values.shape, values.dtype
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{name} is a {type(values).__name__} that makes no array: {error}") from error
    if getattr(values, "layout", torch.strided) != torch.strided or hasattr(values, "toarray"):
        raise StoreError(f"{name} is sparse: give a dense array")
    return values


def integers(name, values) -> np.ndarray:
    """`values` as int64, refusing what is not a whole number."""
    try:
        values = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise StoreError(f"{name} is a {type(values).__name__} that makes no array: {error}") from error
    if values.size and values.dtype.kind not in "iu":
        raise StoreError(f"{name} has dtype {values.dtype}: integers are needed")
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise StoreError(f"{name} holds {values.max()}: whole numbers below 2^63 are needed")
    return values.astype(np.int64, copy=False)


def whole_numbers(name, values) -> np.ndarray:
    """`values` [n] as int64; they may be floats that are whole."""
    values = np.asarray(values)
    if values.dtype.kind != "f":
        return integers(name, values)
    bad = np.flatnonzero(~(np.abs(values) <= 1 << 53) | (values != np.rint(values)))
    if len(bad):
        raise StoreError(
            f"{name}[{bad[0]}] is {values[bad[0]]}: whole numbers are needed; of finer times give a multiple"
        )
    return values.astype(np.int64)


def row_dtype(name, rows) -> str:
    """The dtype in which rows are stored, by name; StoreError where it is none of DTYPES."""
    dtype = rows.dtype
    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    dtype = "uint8" if dtype == "bool" else dtype
    if dtype not in DTYPES:
        raise StoreError(f"{name} has dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    return dtype


def check_finite(name, rows, first=0):
    """Raise StoreError for NaN or infinity in rows [r, F], the first of which is row `first` of `name`."""
    if rows.is_floating_point() and not torch.isfinite(rows).all():
        row, column = (~torch.isfinite(rows)).nonzero()[0].tolist()
        raise StoreError(f"{name}[{first + row}, {column}] is {rows[row, column].item()}: every value must be finite")


def _ids(name, values, labels, what) -> np.ndarray:
    """A part of a split as int64 ids; it may be a mask of booleans."""
    values = array_like(f"split {name!r}", values)
    if values.dtype not in (np.bool_, torch.bool):
        return integers(f"split {name!r}", values)
    if tuple(values.shape) != labels.shape:
        raise StoreError(
            f"split {name!r} is a mask of shape {list(values.shape)}: one of [{len(labels)}], or {what} ids, are needed"
        )
    return np.flatnonzero(values)


def check_splits(splits, labels) -> dict[str, np.ndarray]:
    """A split of nodes as int64 ids [n] for each of SPLITS, or a list of K of them as [K, n], rows filled up by -1."""
    known = labels if labels.ndim == 1 else labels.min(1)
    if isinstance(splits, dict):
        return check_split(splits, known)
    if not 1 <= len(splits) <= MAX_SPLITS:
        raise StoreError(f"split is a list of {len(splits)}: from 1 to {MAX_SPLITS} are possible")
    checked = []
    for number, split in enumerate(splits):
        try:
            checked.append(check_split(split, known))
        except StoreError as error:
            raise StoreError(f"of {len(splits)} splits, number {number}: {error}") from error
    rows = {}
    for name in SPLITS:
        rows[name] = np.full((len(checked), max(len(split[name]) for split in checked)), -1)
        for row, split in zip(rows[name], checked):
            row[: len(split[name])] = split[name]
    return rows


def row_of_split(ids, number):
    """The ids of split `number` out of [K, n], or out of [n] where there is one -> int64 [n]."""
    return ids if ids.ndim == 1 else ids[number][ids[number] >= 0]


def check_split(split, labels, what="node") -> dict[str, np.ndarray]:
    """Ids (or masks) as int64 ids for each of SPLITS: disjoint, in range, labelled; of nodes, some are for training."""
    unknown = set(split) - set(SPLITS)
    if unknown:
        raise StoreError(f"split has a part {min(unknown)!r}: its parts are {', '.join(SPLITS)}")
    split = {name: _ids(name, split.get(name, ()), labels, what) for name in SPLITS}
    owner = np.full(len(labels), -1, np.int8)
    for part, (name, ids) in enumerate(split.items()):
        if ids.ndim != 1:
            raise StoreError(f"split {name!r} has shape {list(ids.shape)}: one dimension is needed")
        bad = np.flatnonzero((ids < 0) | (ids >= len(labels)))
        if len(bad):
            raise StoreError(f"split {name!r} holds {what} {ids[bad[0]]}: {what} ids lie in [0, {len(labels)})")
        bad = np.flatnonzero(owner[ids] >= 0)
        if len(bad):
            raise StoreError(f"{what} {ids[bad[0]]} is in split {SPLITS[owner[ids[bad[0]]]]!r} and in {name!r}: "
                             "the parts must not overlap")
        owner[ids] = part
        if np.count_nonzero(owner == part) != len(ids):
            values, counts = np.unique(ids, return_counts=True)
            raise StoreError(f"split {name!r} holds {what} {values[counts > 1][0]} more than once")
        bad = np.flatnonzero(labels[ids] < 0)
        if len(bad):
            raise StoreError(f"split {name!r} holds {what} {ids[bad[0]]}, which has no label (-1)")
    if what == "node" and not len(split["train"]) and (labels >= 0).any():
        raise StoreError("split 'train' is empty: at least one node is needed")
    return split
