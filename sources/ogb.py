"""Archives of OGB: downloaded, resumed, read without unpacking -> a store.

build_ogb("data/ogbn-arxiv", "ogbn-arxiv", root="data")
download(url, target, progress=True)

"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import stat
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from disk.files import SPLITS, Rows, StoreError, reading, sync
from sources.tables import Table, spool
from store import build_store

OGB_URL = "https://snap.stanford.edu/ogb/data/nodeproppred"
# name: (archive, kind of split, C, drop duplicates after the reverse of every edge was added)
OGB = {
    "ogbn-arxiv": ("arxiv.zip", "time", 40, True),
    "ogbn-products": ("products.zip", "sales_ranking", 47, False),
    "ogbn-papers100M": ("papers100M-bin.zip", "time", 172, True),
}
AGAIN = "; if it is damaged, remove the archive to have it downloaded again"


def build_ogb(path, name, root, *, backend="mmap", progress=False) -> Path:
    """Build an OGB node-property graph from OGB's own archive (arXiv 2005.00687), which is read without unpacking.

    The archive is downloaded into `root`, and resumed there when a part of it was; RINGBLOCK_OGB_URL names a mirror.
    As in OGB's reference examples every edge gets its reverse; for arxiv and papers100M duplicates are then dropped.

    Args:
        path: directory of the store.
        name: one of OGB.
        root: directory for the archive and for temporary files.
        backend, progress: as in `build_store`.
    """
    archive, kind, classes, drop_duplicates = OGB[name]
    file = Path(root) / archive
    download(f"{os.environ.get('RINGBLOCK_OGB_URL', OGB_URL)}/{archive}", file, progress)
    for stale in Path(root).glob(".ogb-*"):
        shutil.rmtree(stale, ignore_errors=True)
    dropping = " and dropping duplicates" * drop_duplicates
    print(f"{name}: adding the reverse of every edge{dropping}, as OGB's reference examples do")
    with (
        reading(file, AGAIN),
        zipfile.ZipFile(file) as outer,
        tempfile.TemporaryDirectory(dir=root, prefix=".ogb-") as folder,
    ):
        return build_store(
            path,
            **_graph(file, outer, kind, Path(folder) / "edges"),
            num_classes=classes,
            backend=backend,
            symmetrize=True,
            drop_duplicates=drop_duplicates,
            source=dict(dataset=name, archive=archive),
            progress=progress,
        )


def _graph(file, outer, kind, spooled) -> dict:
    """The arrays of an open archive, as `build_store` takes them; edges are spooled into a file."""
    members = {}
    for member in outer.namelist():
        if member.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", member):
            raise StoreError(
                f"{file}: its member {member!r} points outside the archive; it is not used"
            )
        members[member.partition("/")[2]] = member

    def member(name):
        if name not in members:
            raise StoreError(f"{file} has no member {name}{AGAIN}")
        return outer.open(members[name])

    def table(name, dtype=np.int64):
        try:
            rows = Table(member(f"{name}.csv.gz"), f"{file}: {name}.csv.gz")
            kinds = dict.fromkeys(range(rows.width), int if dtype == np.int64 else float)
            for _, columns in rows.read(kinds, missing=True):
                yield np.stack(list(columns.values()), 1).astype(dtype, copy=False)
        except StoreError as error:
            raise StoreError(f"{error}{AGAIN}") from error

    def column(name, dtype=np.int64):
        return np.concatenate([*table(name, dtype)])[:, 0]

    if "raw/data.npz" in members:
        shape, dtype, chunks = _npy_chunks(member("raw/data.npz"), "edge_index")
        edge_index = spool(spooled, chunks, dtype, shape[1])
        features = Rows(*_npy_chunks(member("raw/data.npz"), "node_feat"))
        labels = _npy_chunks(member("raw/node-label.npz"), "node_label")[2]
        labels = np.concatenate([*labels]).reshape(-1)
    else:
        nodes, edges = (int(column(f"raw/num-{what}-list").sum()) for what in ("node", "edge"))
        edge_index = spool(spooled, table("raw/edge"), np.int64, 2).T
        if edge_index.shape != (2, edges):
            raise StoreError(
                f"{file} has {edge_index.shape[1]} edges, and {edges} in its list of them{AGAIN}"
            )
        width = next(table("raw/node-feat", np.float32)).shape[1]
        features = Rows((nodes, width), np.float32, table("raw/node-feat", np.float32))
        labels = column("raw/node-label", np.float64)
    return dict(
        edge_index=edge_index,
        features=features,
        labels=np.where(np.isnan(labels), -1, labels).astype(np.int64),
        split={name: column(f"split/{kind}/{name}") for name in SPLITS},
    )


def _npy_chunks(file, name):
    """(shape, dtype, chunks of rows) of an array in an .npz file; a row of more than 2^22 numbers comes in pieces."""
    data = zipfile.ZipFile(file).open(f"{name}.npy")
    first = np.lib.format.read_magic(data) == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(data)
    if fortran_order or len(shape) != 2:
        raise ValueError(f"{name} is {list(shape)}: two dimensions in C order are needed")
    width = shape[1] if shape[1] <= 1 << 22 else 1

    def chunks():
        left, step = shape[0] * shape[1], (1 << 22) // width * width
        while left:
            raw = data.read(min(step, left) * dtype.itemsize)
            if len(raw) < min(step, left) * dtype.itemsize:
                raise ValueError(f"{name} ends early")
            yield np.frombuffer(raw, dtype).reshape(-1, width)
            left -= min(step, left)

    return shape, dtype, chunks()


def download(url, target, progress):
    """Fetch a URL into a file, resuming what an earlier try left in target.part; does nothing if it is there.

    A part is resumed only while the server's file is the one it was begun with, by its ETag or date in
    target.part.tag. What has arrived when it fails stays for the next try.
    """
    part, tag = Path(f"{target}.part"), Path(f"{target}.part.tag")
    if target.is_file():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for file in (part, tag):
            _check_own(file)
        have = part.stat().st_size if part.is_file() and tag.is_file() else 0
        size, total = _fetch(url, part, tag, have, target.name, progress)
    except urllib.error.HTTPError as error:
        whole = str(error.headers.get("Content-Range", "")).rpartition("/")[2]
        # 416: nothing is left to send, because the part is all of it
        if error.code != 416 or whole != str(have):
            anew = f"; {part} does not fit it: remove that to begin anew" * (error.code == 416)
            raise StoreError(
                f"cannot download {url}: the server answers {error.code} {error.reason}{anew}"
            ) from error
        size = total = have
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(
            f"the download of {url} failed: {error}; run it again to go on from where it stopped, or put "
            f"the file at {target}"
        ) from error
    if total is not None and size != total:
        raise StoreError(
            f"the download of {url} stopped at {size} of {total} bytes; run it again to go on from there"
        )
    try:
        sync(part)
        os.replace(part, target)
        sync(target.parent)
        tag.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{part} could not be renamed to {target}: {error.strerror}") from error


def _fetch(url, part, tag, have, name, progress) -> tuple[int, int | None]:
    """Append to a part what is missing behind its first `have` bytes -> (its size, that of the whole)."""
    ranges = {"Range": f"bytes={have}-", "If-Range": tag.read_text()} if have else {}
    request = urllib.request.Request(url, headers=ranges)
    with urllib.request.urlopen(request, timeout=60) as response:
        # a server without ranges, or with another file than before, sends everything
        have = have if response.status == 206 else 0
        version = response.headers.get("ETag", "W/")
        if version.startswith("W/"):  # weak: not of bytes
            version = response.headers.get("Last-Modified")
        tag.unlink(missing_ok=True)
        if version:
            with open(tag, "x") as file:
                file.write(version)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        bar = dict(total=total, initial=have, desc=name, unit="B", unit_scale=True)
        with (
            open(part, "ab" if have else "wb", opener=_open_own) as file,
            tqdm(**bar, disable=None if progress else True) as bar,
        ):
            while data := response.read(1 << 20):
                file.write(data)
                bar.update(len(data))
            return file.tell(), total


def _check_own(file):
    """Refuse what another user may have put in the place of a file that is written to under a known name."""
    if os.path.lexists(file):
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
            raise StoreError(f"{file} is no regular file of yours: remove it")


def _open_own(file, flags):
    return os.open(file, flags | os.O_NOFOLLOW, 0o666)
