"""Atomically written directories of checksummed files, in which graphs are stored.

    with complete_or_not_there(path, need) as building:       # a hidden directory, renamed to path, a Path, at the end
        record = write_npy(building / "labels.npy", "int64", [V], chunks)
        write_meta(building, meta, {"labels.npy": record})
    labels = map_npy(path, "labels.npy", record)                  # a tensor over the file, shared by all processes
    write_whole("ids.npy", lambda file: np.save(file, ids))   # a single file: either its old or its new content

Arrays are .npy files of format 1.0; meta.json holds the size and the SHA-256 of every file that never changes, and a
checksum of itself. This file needs torch, numpy and tqdm.
"""

import contextlib
import errno
import fcntl
import glob
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
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from extras import MissingExtra

SPLITS = ("train", "valid", "test")
VERSION = 3
# the same with features in codes, which readers of version 3 might take for integers
CODED_VERSION = 4
PART_VERSION = 5  # of a store that is one of several parts
# version 2: no edge columns, no node times, one split, one label per node
READABLE = (2, VERSION, CODED_VERSION, PART_VERSION)
HEAD = 128  # bytes of a .npy header; 4096 where rows have to start on a disk block
FORMATS = {
    "ringblock-graph": "one graph: open it as GraphStore (train.py --task node)",
    "ringblock-graphs": "many small graphs: open it as GraphDataset (train.py --task graph)",
}
FULL = (errno.ENOSPC, errno.EDQUOT)
PLANNED = "RINGBLOCK_FREE_HOST"  # set by --free-host, for the processes of a run
RESERVED = 1 << 30  # bytes of a file to write to whose memory vm.overcommit_memory=2 may reserve


class StoreError(ValueError):
    """Invalid input or a damaged store, in one sentence; unprintable characters of foreign files are escaped."""

    def __str__(self):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())


@contextlib.contextmanager
def reading(path, advice=""):
    """Turn whatever a library raises on foreign bytes into a StoreError with the file's name and that message."""
    try:
        yield
    except (StoreError, MissingExtra, AssertionError, NameError, BrokenPipeError):
        # worded; a bug; closed stdout
        raise
    except Exception as error:
        message = getattr(error, "strerror", None) or " ".join(str(error).split())
        if not message or isinstance(error, KeyError | MemoryError):
            message = f"{type(error).__name__} {message}".strip()
        if "allow_pickle" in message:  # an array of Python objects, as of a column of pandas
            advice = "; save text by .astype(str)"
        number = getattr(error, "errno", None)
        if number not in (None, errno.ENOENT) or isinstance(error, ImportError):
            advice = ""  # the system refused, or a file of ours is not there: that tells nothing about this one
        # the disk that temporary files go to
        problem = "takes temporary files" if number in FULL else "cannot be read"
        raise StoreError(f"{path} {problem}: {message[:300]}{advice}") from error


# ---- writing


@contextlib.contextmanager
def complete_or_not_there(path, need):
    """Context manager: a hidden directory for about `need` bytes of files, fsynced and renamed to `path` at the end."""
    refuse_existing(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _part_beside(path, Path.mkdir) as building:
            if need > shutil.disk_usage(path.parent).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield building
            for file in [*building.rglob("*"), building]:
                sync(file)
            os.rename(building, path)
            sync(path.parent)
    except OSError as error:
        if error.errno in FULL:
            above = next(folder for folder in path.absolute().parents if folder.exists())
            free = readable_size(shutil.disk_usage(above).free)
            raise StoreError(
                f"no room for {path}: {error.strerror}; "
                f"it takes about {readable_size(need)}, more if edges are sorted; {free} are free"
            ) from error
        refuse_existing(path)  # another process completed it first
        raise StoreError(f"cannot build {path}: {error.strerror or error}") from error


def refuse_existing(path):
    """Raise StoreError unless a directory can be made at a path."""
    if os.path.lexists(path):
        raise StoreError(f"{path} exists already: remove it or choose another path")
    check_name(path)


def check_name(path):
    """Raise StoreError for a path too long to write a temporary file beside it and rename that."""
    path = Path(path)
    for part, text, most in (("name", path.name, 255), ("path", path.absolute(), 4000)):
        if (size := len(os.fsencode(text))) > most:
            raise StoreError(f"{str(text)[:20]}... is a {part} of {size:,} bytes: at most {most:,}")


@contextlib.contextmanager
def _part_beside(path, make):
    """Context manager: a hidden path with a random name beside `path`, for a file or folder made by make(it), which is
    removed at the end unless it was renamed. It is locked while its process lives: those without a lock were left by
    killed writers of `path` and are removed here."""
    start = os.fsdecode(os.fsencode(f".{path.name}")[:200]) + "."
    for left in path.parent.glob(glob.escape(start) + "[0-9a-f]" * 16 + ".part"):
        with contextlib.suppress(OSError), locked(left, fcntl.LOCK_NB):
            _remove(left)
    while True:
        part = path.with_name(f"{start}{secrets.token_hex(8)}.part")
        make(part)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(locked(part))
            if part.exists():  # else another writer took it for a leftover before it was locked
                try:
                    yield part
                finally:
                    _remove(part)
                return


@contextlib.contextmanager
def locked(path, at_once=0):
    """Context manager: a file or folder locked exclusively; the kernel drops the lock with the process. at_once:
    LOCK_NB raises OSError if it is locked already, 0 waits."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # some network file systems have no locks: go on, but with LOCK_NB fail, so that no leftover is removed
        with contextlib.suppress(*() if at_once else (OSError,)):
            fcntl.flock(handle, fcntl.LOCK_EX | at_once)
        yield
    finally:
        os.close(handle)


def _remove(path):
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path):
    """fsync a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, for directories
            raise
    finally:
        os.close(handle)


def write_whole(path, write):
    """Write a file atomically by write(binary file), which must not seek: readers find its old content or all of the
    new. StoreError for a full disk and other errors of the system.

    A device or a pipe is written in place; a symbolic link is followed.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            content = io.BytesIO()
            write(content)
            path.write_bytes(content.getbuffer())
            return
        path = Path(os.path.realpath(path))
        with _part_beside(path, Path.touch) as part:
            with open(part, "wb") as file:
                write(file)
            sync(part)
            with contextlib.suppress(OSError):  # no file yet, or a file system without modes
                shutil.copymode(path, part)  # last: it may be read-only
            os.replace(part, path)
        with contextlib.suppress(OSError):
            sync(path.parent)
    except (OSError, RuntimeError) as error:
        # torch.save raises RuntimeError on a full disk
        cause = error if isinstance(error, OSError) else error.__context__
        message = getattr(cause, "strerror", None) or error
        if "requested and" in str(error):  # as numpy says it
            message = f"no space may be left: {error}"
        raise StoreError(f"{path} could not be written: {message}") from error


def link_or_copy(source, target):
    """Give a file a second name, or on another file system, or one without hard links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def write_npy(path, dtype, shape, chunks, head=HEAD) -> dict:
    """Write chunks of rows as one .npy file with a header of `head` bytes -> its record for meta.json. The header
    gets the number of rows that came, whatever shape[0] says."""
    header = _npy_header(dtype, shape, head)
    digest = hashlib.sha256(header)
    rows = 0
    with open(path, "wb") as file:
        file.write(header)
        for chunk in chunks:
            data = np.ascontiguousarray(chunk, dtype).reshape(-1).view(np.uint8).data
            file.write(data)
            digest.update(data)
            rows += len(chunk)
        if rows != shape[0]:
            shape, digest = [rows, *shape[1:]], None
            file.seek(0)
            file.write(_npy_header(dtype, shape, head))
    return file_record(path, dtype, shape, digest)


def file_record(path, dtype, shape, digest=None) -> dict:
    """Return meta.json's record of a file: dtype ("str": text of shape[0] lines; nodes.txt, always text, has that of the
    names), shape, bytes, SHA-256."""
    digest = digest or sha256_of(path)
    return {
        "dtype": np.dtype(dtype).name,
        "shape": shape,
        "bytes": path.stat().st_size,
        "sha256": digest.hexdigest(),
    }


def _npy_header(dtype, shape, head):
    descr = np.dtype(dtype).newbyteorder("<").str
    shape = tuple(map(int, shape))
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", head - 10) + text.ljust(head - 11) + b"\n"


def sha256_of(path):
    """Hash a file -> hashlib's SHA-256 object."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
    return digest


# ---- meta.json


def storage_dtype(dtype) -> np.dtype:
    """Return the little-endian numpy dtype in which `dtype` is stored: int16 for bfloat16, which numpy lacks."""
    return np.dtype("int16" if dtype == "bfloat16" else dtype).newbyteorder("<")


def dump_meta(meta) -> bytes:
    """Serialise meta.json with a checksum of itself, byte for byte as `read_meta` requires it."""
    meta = {k: v for k, v in meta.items() if k != "checksum"}
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
    return (json.dumps(dict(meta, checksum=digest), indent=1, sort_keys=True) + "\n").encode()


def write_meta(folder, meta, records):
    """Write meta.json, the last file of a directory: `meta` and {file name: its record}."""
    (folder / "meta.json").write_bytes(dump_meta(dict(meta, files=records)))


def read_meta(path, form=None) -> dict:
    """Read meta.json of a directory; StoreError for anything but the bytes that `dump_meta` wrote, for another version,
    or another format than `form`, one of FORMATS (None: any). The entries themselves are not checked."""
    file = Path(path) / "meta.json"
    if not os.path.lexists(file):
        text = f"{path} is no store: there is no {file}"
        if parts := sorted(part.parent for part in Path(path).glob("part-*/meta.json")):
            text = (
                f"{path} is no store: it holds {plural(len(parts), 'part')} of one: give {parts[0]} or "
                "another, with train.py --split-features a different one on each machine"
            )
        raise StoreError(text)
    with reading(file, "; rebuild the store"):
        if regular(file).st_size > 1 << 24:
            raise ValueError("it is larger than any meta.json")
        data = file.read_bytes()
        meta = json.loads(data)
        if meta["format"] not in FORMATS:
            raise ValueError(f"its format is none of {', '.join(FORMATS)}")
        if form and meta["format"] != form:
            raise StoreError(f"{path} holds {FORMATS[meta['format']]}")
        if (version := meta.get("format_version")) not in READABLE:
            raise StoreError(
                f"{path}: store format {version!r:.200}; "
                f"this code reads {READABLE[0]} to {READABLE[-1]}; rebuild it"
            )
        if data != dump_meta(meta):
            raise ValueError("it was altered: its checksum does not match")
    return meta


def regular(file) -> os.stat_result:
    """Return the status of a store's file, before it is opened; ValueError for a link, which would have another file
    read or written, and for a pipe, which blocks for ever."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a link, a pipe or a folder, and no regular file")
    return status


# ---- reading


def map_npy(path, name, record, *, ahead=True) -> Tensor:
    """Memory-map a .npy file -> tensor; StoreError unless its size, dtype and shape are as recorded. ahead: let the kernel
    read ahead; False for random access. Processes share its pages; what is written to it stays in this process."""
    file = check_size(path, name, record)
    with reading(file, "; rebuild the store"):
        array = np.lib.format.open_memmap(file, "r")
        held = [array.dtype.name, [*array.shape]]
        if held != (wanted := [record["dtype"], record["shape"]]):
            raise ValueError(f"it holds {held}, not {wanted}")
        # a header of another length would shift the data
        if not array.flags.c_contiguous or array.offset + array.nbytes != record["bytes"]:
            raise ValueError("its header is damaged")
        memory = _copy_on_write(file)
        if memory is None:
            memory = array._mmap
        else:
            array = np.ndarray(array.shape, array.dtype, memory, array.offset)
    if not ahead:
        memory.madvise(mmap.MADV_RANDOM)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _copy_on_write(file):
    """Map a file -> mmap, of which only the pages that are written take memory of their own; None if the kernel refuses,
    or would reserve memory for all pages of a large file: that is mapped to be read alone."""
    reserves = Path("/proc/sys/vm/overcommit_memory")
    if file.stat().st_size > RESERVED and reserves.exists() and reserves.read_text()[0] == "2":
        return None
    # without, no file larger than memory is mapped; Python 3.13 names the flag
    reserve_none = getattr(mmap, "MAP_NORESERVE", 0x4000 * (sys.platform == "linux"))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    with open(file, "rb") as opened, contextlib.suppress(OSError):
        return mmap.mmap(opened.fileno(), 0, mmap.MAP_PRIVATE | reserve_none, protection)


def map_split(path, files):
    """Map the files of a split -> {part: int64 ids [n], or [K, n] for K splits}."""
    return {name: map_npy(path, f"{name}.npy", files[f"{name}.npy"]) for name in SPLITS}


def check_size(path, name, record) -> Path:
    """Check that a file exists and has its recorded size (LMDB's may have grown) -> its path."""
    file = Path(path) / name
    with reading(file, "; rebuild the store"):
        size = regular(file).st_size
        wanted = record["bytes"]
        if size < wanted or size > wanted and file.suffix != ".lmdb":
            fault = "truncated" if size < wanted else "too long"
            raise ValueError(f"it is {fault}: it has {size} bytes and should have {wanted}")
    return file


def unread(error) -> int:
    """Return the exit code for an OSError of a stdout that was closed, as with `| head`, or is a file on a full disk;
    others are raised again. The interpreter's last flush goes to /dev/null."""
    if error.errno not in (errno.EPIPE, *FULL):
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno in FULL:
        print(f"stopped: a disk is full, perhaps that of the output: {error}", file=sys.stderr)
    return 141 if error.errno == errno.EPIPE else 1


def readable_size(count) -> str:
    """Format a number of bytes: 1234567 -> '1.23 MB'."""
    count = float(f"{count:.3g}")  # 999,999 is 1 MB
    power = min(4, max(0, len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.3g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def plural(number, noun) -> str:
    """Format a count: 1, "row" -> "1 row"; 2000, "row" -> "2,000 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short(text) -> str:
    """Shorten a text to 60 characters."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(values, most=8) -> str:
    """Format values: [1, 2, 3] -> "1, 2, 3"; of more than `most` only these."""
    return ", ".join(map(str, values[:most])) + ", ..." * (len(values) > most)


def info_lines(lines, graph) -> str:
    """Format {name: value} and what all formats have (split, source, files), one per line."""
    meta = graph.meta
    several = f", the first of {graph.num_splits}" if graph.num_splits > 1 else ""
    drawn = ", drawn by seed 0" if "split" in meta else ""
    lines = {
        **lines,
        "split": ", ".join(f"{name} {len(ids):,}" for name, ids in graph.split.items())
        + several
        + drawn,
        "source": meta.get("source") or "unknown",
        "format": meta["format_version"],
        **{name: readable_size(record["bytes"]) for name, record in sorted(meta["files"].items())},
    }
    width = max(14, *map(len, lines))
    return "\n".join(f"{name:<{width}} {value}" for name, value in lines.items())


# tqdm's own lock is a system semaphore, which a killed process leaves behind
tqdm.set_lock(threading.RLock())


def progress_bar(progress, **options):
    """Make a tqdm bar, which is silent unless `progress` is true and stderr is a terminal."""
    return tqdm(unit_scale=True, disable=None if progress and sys.stderr else True, **options)


RANK_BYTES = 1 << 29  # host memory of a process that trains, besides data and batches


def free_host_bytes(root="/") -> int:
    """Return the bytes of host memory that are available to this process: of the machine, or of its cgroups if less; or as
    many as PLANNED says."""
    if os.environ.get(PLANNED):
        return int(os.environ[PLANNED])
    root = Path(root)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        available = re.search(r"MemAvailable: *(\d+)", (root / "proc/meminfo").read_text())
        groups = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    except OSError:  # not Linux
        return everything
    free = 1024 * int(available[1]) if available else everything  # an emulated Linux may not tell
    for _, controller, path in (line.split(":", 2) for line in groups):
        if controller not in ("", "memory"):
            continue
        names = ("limit_in_bytes", "usage_in_bytes") if controller else ("max", "current")
        base = root / "sys/fs/cgroup" / controller
        group = base / path.strip("/")
        for folder in [folder for folder in (group, *group.parents) if folder.is_relative_to(base)]:
            try:
                limit, usage = (int((folder / f"memory.{n}").read_text()) for n in names)
                stats = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                # page cache that the kernel frees on demand
                cache = int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))
                free = min(free, limit - usage + cache)
            except (OSError, ValueError):
                pass  # no such group here, or no limit ("max")
    return max(free, 0)
