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
import mmap
import os
import re
import secrets
import shutil
import stat
import struct
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
HEAD = 128  # bytes in front of an array's data; 4096 where rows are to begin on a block of the disk
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
        return "".join(
            letter if letter.isprintable() else ascii(letter)[1:-1] for letter in super().__str__()
        )


@contextlib.contextmanager
def reading(path, advice=""):
    """Turn whatever a library raises at foreign bytes into one StoreError that names the file and what it said.

    with reading("graph.npz", "; download it again"):
        arrays = np.load("graph.npz", allow_pickle=False)
    """
    try:
        yield
    except (StoreError, AssertionError, NameError):  # our own sentence, or our own mistake
        raise
    except Exception as error:
        said = getattr(error, "strerror", None) or " ".join(str(error).split())
        if not said or isinstance(error, KeyError | MemoryError):
            said = f"{type(error).__name__} {said}".strip()
        raise StoreError(f"{path} cannot be read: {said[:300]}{advice}") from error


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
                raise StoreError(
                    f"no room for {path} on its disk: it takes about {readable_size(need)} and "
                    f"{readable_size(free)} are free; free some or build it elsewhere"
                ) from error
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and os.path.lexists(path):
            raise StoreError(
                f"{path} exists already: another process completed it first"
            ) from error
        raise StoreError(f"cannot build {path}: {error.strerror or error}") from error


def refuse_existing(path):
    """Raise StoreError unless a directory can be made at a path."""
    if os.path.lexists(path):
        raise StoreError(f"{path} exists already: remove it or choose another path")
    if path.name in ("", ".."):
        raise StoreError(f"{path} has no name of its own: choose another path")
    check_name(path)


def check_name(path):
    """Raise StoreError for a path too long for what is written beside it and renamed to it."""
    path = Path(path)
    for what, text, most in (("name", path.name, 255), ("path", path.absolute(), 4000)):
        if len(os.fsencode(text)) > most:
            raise StoreError(
                f"{str(text)[:20]}... is a {what} of {len(os.fsencode(text)):,} bytes: {most:,} are possible"
            )


@contextlib.contextmanager
def scratch_folder(path):
    """A hidden folder beside `path`, made with the folders above it, and gone at the end unless it was renamed.

    It is locked for as long as its process lives, in whatever container that is. What dead builds of the same target
    left is what is not locked; it is removed here.
    """
    above = [folder for folder in path.absolute().parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(above):
        sync(folder.parent)
    for entry in path.parent.iterdir():
        if entry.name.startswith(f"{_hidden(path)}building."):
            _remove_unless_locked(entry, os.O_DIRECTORY, shutil.rmtree)
    while True:
        folder = path.with_name(f"{_hidden(path)}building.{secrets.token_hex(6)}")
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


def _remove_unless_locked(entry, flags, remove):
    """Remove a file or folder whose writer no longer lives: whoever writes holds a lock on it."""
    with contextlib.suppress(OSError):
        lock = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | flags)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(entry)
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

    The bytes go into a file beside it with an unpredictable name, which is synced and renamed to `path`. A device or a
    pipe cannot be replaced: it is written to in place. A symbolic link of this user is followed, one of another user is
    refused. What writers of this path left when they were killed is removed.

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
        raise StoreError(
            f"{path} could not be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    finally:
        if part:
            part.unlink(missing_ok=True)


def _locked_part(path):
    """A file beside `path` under a name drawn at random, locked as long as it is open -> (its path, its descriptor)."""
    while True:
        part = path.with_name(f"{_hidden(path)}{secrets.token_hex(8)}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, handle
        os.close(handle)  # another writer took it for a leftover before the lock was there


def _remove_parts(path):
    """Remove what writers of `path` left when they were killed: parts that nobody holds a lock on."""
    name = re.compile(re.escape(_hidden(path)) + r"[0-9a-f]{16}\.part")
    for entry in filter(lambda entry: name.fullmatch(entry.name), os.scandir(path.parent)):
        _remove_unless_locked(entry, os.O_NONBLOCK, os.unlink)


def _hidden(path) -> str:
    """How the names of files and folders begin that are written beside `path`."""
    return os.fsdecode(os.fsencode(f".{path.name}")[:200]) + "."


def write_npy(path, dtype, shape, chunks, head=HEAD) -> dict:
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
    with reading(file, "; rebuild the store"):
        lines = file.read_bytes().decode().split("\n")
        if lines.pop() or len(lines) != record["shape"][0]:
            raise ValueError(f"it does not have {record['shape'][0]:,} whole lines")
    return lines


def file_record(path, dtype, shape, digest) -> dict:
    """What meta.json says of a file: dtype ("str": a text of shape[0] lines), shape, bytes and digest."""
    size, sha256 = path.stat().st_size, digest.hexdigest()
    return {"dtype": np.dtype(dtype).name, "shape": shape, "bytes": size, "sha256": sha256}


def npy_header(dtype, shape, head=HEAD) -> bytes:
    """The `head` bytes in front of the data of a .npy file of format 1.0: one spelling, so that it can be compared."""
    shape = tuple(int(n) for n in shape)
    text = repr(
        {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape}
    )
    return (
        b"\x93NUMPY\x01\x00" + struct.pack("<H", head - 10) + text.encode().ljust(head - 11) + b"\n"
    )


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


def read_meta(path, form=None, spec=(), names=None) -> dict:
    """Read and check meta.json; anything but the bytes that `dump_meta` wrote is refused.

    Args:
        path: the directory.
        form: one of FORMATS, which it has to have; any when None.
        spec: {name: range of a whole number, or the words} that have to be in it.
        names: the files that the format may have.

    Raises:
        StoreError: if it is no store, of another format or version, damaged or altered.
    """
    file = Path(path) / "meta.json"
    if not os.path.lexists(file):
        raise StoreError(f"{path} is no store: there is no {file}")
    refuse_irregular(path)
    with reading(file, "; rebuild the store"):
        if file.stat().st_size > 1 << 24:
            raise StoreError(f"{file} is larger than any meta.json; rebuild the store")
        data = file.read_bytes()
        meta = json.loads(data)
        if meta["format"] not in FORMATS:
            raise ValueError(f"its format is none of {', '.join(FORMATS)}")
    if form and meta["format"] != form:
        raise StoreError(f"{path} holds {FORMATS[meta['format']]}")
    if meta.get("format_version") not in READABLE:
        raise StoreError(
            f"{path}: store format {meta.get('format_version')!r:.200}; this code reads "
            f"{' and '.join(map(str, READABLE))}; rebuild it"
        )
    for name, allowed in dict(spec).items():
        value, kind = meta.get(name), int if isinstance(allowed, range) else str
        if type(value) is not kind or value not in allowed:
            raise StoreError(
                f"{path}: meta.json has {name} = {value!r:.200}, which is no sane value; rebuild the store"
            )
    files = meta.get("files")
    if not isinstance(files, dict) or not all(_is_record(*item, names) for item in files.items()):
        raise StoreError(f"{path}: meta.json describes no files of a store; rebuild the store")
    if data != dump_meta(meta):
        raise StoreError(
            f"{path}: meta.json was altered: its checksum does not fit; rebuild the store"
        )
    return meta


def _is_record(name, record, names):
    """Whether meta.json may say this of a file; of an LMDB file, which changes, there may be no digest."""
    if not isinstance(record, dict) or names and name not in names:
        return False
    digest = record.get("sha256", "0" * 64 if name.endswith(".lmdb") else "")
    sizes = type(record.get("bytes")) is int and type(record.get("largest", 0.0)) is float
    return sizes and isinstance(digest, str) and bool(re.fullmatch("[0-9a-f]{64}", digest))


def irregular(folder) -> dict[str, str]:
    """{name: what is wrong} of the entries of a store's folder that are no regular files: a link would have another
    file read or written, a pipe waits for ever. A folder among them is never opened."""
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    with os.scandir(folder) as entries:
        modes = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in entries}
    return {
        name: f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, and no regular file; remove it or rebuild the store"
        for name, mode in sorted(modes.items())
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    }


def refuse_irregular(folder):
    """Raise StoreError unless a store is a folder of regular files; before any of them is opened."""
    for name, problem in irregular(folder).items():
        raise StoreError(f"{Path(folder, name)}: {problem}")


# ---------------------------------------------------------------------------------------------------------------------
# reading


def map_npy(path, name, record, dtype, shape, ahead=True) -> Tensor:
    """Map a .npy file; StoreError unless it is as long as recorded and holds an array of this dtype and shape (None:
    any)."""
    file = check_size(path, name, record)
    with reading(file, "; rebuild the store"):
        array = np.lib.format.open_memmap(file, "r")
        if array.dtype != np.dtype(dtype) or list(array.shape) != (shape or list(array.shape)):
            raise ValueError(f"it holds {array.dtype} {list(array.shape)}, not {dtype} {shape}")
        # a header of another length would shift what is behind it
        if not array.flags.c_contiguous or array.offset + array.nbytes != record["bytes"]:
            raise ValueError("its header is damaged")
    # read what is asked for, not what lies beside it
    if not ahead and hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def map_split(path, files) -> dict[str, Tensor]:
    """The ids in the files of a split, each [n], or each [K, n] of K splits."""
    names = {name: f"{name}.npy" for name in SPLITS}
    split = {n: map_npy(path, file, files[file], "int64", None) for n, file in names.items()}
    if len({ids.shape[:-1] for ids in split.values()}) > 1 or split["train"].dim() not in (1, 2):
        raise StoreError(f"{path}: train.npy, valid.npy and test.npy do not fit; rebuild the store")
    return split


def check_size(path, name, record) -> Path:
    """Check that a file is there and as long as recorded (LMDB's may have grown) -> its path."""
    file = Path(path) / name
    with reading(file, "; rebuild the store"):
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
    if (
        status.st_size < record["bytes"]
        or status.st_size > record["bytes"]
        and name[-5:] != ".lmdb"
    ):
        raise StoreError(
            f"{file} is {'truncated' if status.st_size < record['bytes'] else 'too long'}: it has "
            f"{status.st_size} bytes and should have {record['bytes']}; rebuild the store"
        )
    return file


def check_in_use(store):
    """Raise StoreError where a file of an open store was cut: reading it through the map would end the process."""
    for name, record in store.meta["files"].items():
        with contextlib.suppress(OSError):  # a file that was removed lives on in the maps
            if os.lstat(store.path / name).st_size < record["bytes"]:
                raise StoreError(
                    f"{store.path / name} was cut to {os.lstat(store.path / name).st_size} of "
                    f"{record['bytes']} bytes while it was in use; rebuild the store"
                )


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
            raise IndexError(
                f"node {low if low < 0 else high} is out of range: ids lie in [0, {features.shape[0]})"
            )
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
            raise StoreError(
                f"{path}: {name}.npy holds {what} {bad}, and {what} ids lie in [0, {count}): it is "
                "damaged; rebuild the store"
            )
        if not (ids.diff() > 0).all() and len(ids.unique()) < len(ids):
            raise StoreError(
                f"{path}: {name}.npy holds a {what} more than once: it is damaged; rebuild the store"
            )


def info_lines(lines, graph) -> str:
    """{name: value} and what every format has (split, source, files), a line each."""
    meta = graph.meta
    several = f", the first of {graph.num_splits}" if getattr(graph, "num_splits", 1) > 1 else ""
    lines = {
        **lines,
        "split": ", ".join(f"{name} {len(ids):,}" for name, ids in graph.split.items()) + several,
        "source": meta.get("source") or "unknown",
        "format": meta["format_version"],
        **{name: readable_size(record["bytes"]) for name, record in sorted(meta["files"].items())},
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())


def array_like(name, values):
    """`values` if they have shape, dtype and slices (arrays, tensors, `Rows`), a list as an array; else StoreError."""
    try:
        values = np.asarray(values) if type(values) in (list, tuple, range) else values
        values.shape, values.dtype
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{name} is a {type(values).__name__} that makes no array: {error}"
        ) from error
    if getattr(values, "layout", torch.strided) != torch.strided or hasattr(values, "toarray"):
        raise StoreError(f"{name} is sparse: give a dense array")
    return values


def integers(name, values) -> np.ndarray:
    """`values` as int64, refusing what is not a whole number."""
    try:
        values = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise StoreError(
            f"{name} is a {type(values).__name__} that makes no array: {error}"
        ) from error
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
    dtype = (
        str(dtype).removeprefix("torch.")
        if isinstance(dtype, torch.dtype)
        else np.dtype(dtype).name
    )
    dtype = "uint8" if dtype == "bool" else dtype
    if dtype not in DTYPES:
        raise StoreError(f"{name} has dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    return dtype


def check_finite(name, rows, first=0):
    """Raise StoreError for NaN or infinity in rows [r, F], the first of which is row `first` of `name`."""
    if rows.is_floating_point() and not torch.isfinite(rows).all():
        row, column = (~torch.isfinite(rows)).nonzero()[0].tolist()
        raise StoreError(
            f"{name}[{first + row}, {column}] is {rows[row, column].item()}: every value must be finite"
        )


def largest_of(rows) -> float:
    """The largest absolute value of a tensor of numbers, 0 without any."""
    return max(map(abs, map(float, rows.aminmax()))) if rows.numel() else 0.0


def free_host_bytes(root="/") -> int:
    """Bytes of host memory that this process may still take: what is available, or what its cgroups leave if less."""
    root = Path(root)
    try:
        free = int((root / "proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
        groups = [
            line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for controller, path in groups:
        if controller not in ("", "memory"):
            continue
        v1 = controller == "memory"
        limit, usage = (
            f"memory.{n}"
            for n in (("limit_in_bytes", "usage_in_bytes") if v1 else ("max", "current"))
        )
        base = root / "sys/fs/cgroup" / controller
        for folder in [base / path.strip("/"), *(base / path.strip("/")).parents]:
            try:
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                # given up on demand
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                free = min(
                    free,
                    int((folder / limit).read_text()) - int((folder / usage).read_text()) + cache,
                )
            except (OSError, ValueError):
                pass  # no such group here, or no limit ("max")
            if folder == base:
                break
    return max(free, 0)
