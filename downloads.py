"""Archives of OGB and files of Planetoid: downloaded, resumed, read without unpacking -> a store.

    build_ogb("data/ogbn-arxiv", "ogbn-arxiv", root="data")
    build_planetoid("data/cora", "cora", root="data")

This file needs store.py and tables.py.
"""

from __future__ import annotations

import collections
import http.client
import os
import pickle
import re
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from csc import Rows
from disk import SPLITS, StoreError, sync
from store import build_store
from tables import Table, spool

PLANETOID_URL = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
PLANETOID = ("cora", "citeseer", "pubmed")
OGB_URL = "https://snap.stanford.edu/ogb/data/nodeproppred"
OGB = {  # name: (archive, kind of split, C, drop duplicates after the reverse of every edge was added)
    "ogbn-arxiv": ("arxiv.zip", "time", 40, True),
    "ogbn-products": ("products.zip", "sales_ranking", 47, False),
    "ogbn-papers100M": ("papers100M-bin.zip", "time", 172, True),
}


# ---------------------------------------------------------------------------------------------------------------------
# Planetoid


def build_planetoid(path, name, root, *, backend="mmap", progress=False) -> Path:
    """Build cora, citeseer or pubmed from the eight original files, with the public split (arXiv 1603.08861).

    Args:
        path: directory of the store.
        name: one of PLANETOID.
        root: the files `ind.NAME.*` are looked for here and in root/planetoid, else downloaded into the latter.
        backend, progress: as in `build_store`.

    Returns:
        The path of the store.

    Raises:
        StoreError: if a file cannot be had, or holds anything but arrays, sparse matrices and dicts.
    """
    parts = {}
    for part in ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index"):
        file = Path(root) / f"ind.{name}.{part}"
        if not file.is_file():
            file = Path(root) / "planetoid" / file.name
            url = os.environ.get("RINGBLOCK_PLANETOID_URL", PLANETOID_URL)
            download(f"{url}/{file.name}", file, progress=False)
        parts[part] = np.loadtxt(file, np.int64, ndmin=1) if part == "test.index" else _read_pickle(file)
    # Row i of tx belongs to node test.index[i]. Citeseer lacks some of these: isolated nodes without features or label.
    test, allx = parts["test.index"], parts["allx"]
    num_nodes = max(len(allx), test.max() + 1, len(parts["graph"]))
    features = np.zeros((num_nodes, allx.shape[1]), np.float32)
    onehot = np.zeros((num_nodes, parts["ally"].shape[1]), np.int64)
    features[:len(allx)], onehot[:len(allx)] = allx, parts["ally"]
    features[test], onehot[test] = parts["tx"], parts["ty"]
    features /= np.maximum(features.sum(1, keepdims=True), 1e-12)
    labels = np.where(onehot.any(1), onehot.argmax(1), -1)
    edges = np.array([(u, v) for v, sources in parts["graph"].items() for u in sources], np.int64).reshape(-1, 2).T
    train = len(parts["y"])
    split = dict(train=np.arange(train), valid=np.arange(train, min(train + 500, len(allx))), test=np.sort(test))
    return build_store(path, edge_index=edges, features=features, labels=labels, num_classes=onehot.shape[1],
                       split=split, backend=backend, symmetrize=True, drop_self_loops=True, drop_duplicates=True,
                       source=dict(dataset=name, row_normalize=1), progress=progress)


class _Dtype:
    """What a pickled numpy.dtype becomes: one of a few numeric types, whatever else the file says of it."""

    def __init__(self, name, *_):
        self.dtype = {"f4": np.float32, "f8": np.float64, "i4": np.int32, "i8": np.int64}.get(name)
        if self.dtype is None:
            raise StoreError(f"it holds an array of type {name!r}, which has no place in a Planetoid file")

    def __setstate__(self, state):
        if len(state) < 2 or state[1] not in ("<", "|", "="):
            raise StoreError(f"it holds an array of byte order {state[1:2]}, which has no place in a Planetoid file")


class _Array:
    """What a pickled numpy.ndarray becomes: its bytes, looked at as numbers."""

    def __init__(self, *_):
        self.array = np.empty(0)

    def __setstate__(self, state):
        _, shape, kind, fortran, data = state
        data = data.encode("latin1") if isinstance(data, str) else data
        self.array = np.frombuffer(data, kind.dtype).reshape(shape, order="F" if fortran else "C")


class _Csr:
    """What a pickled scipy.sparse.csr_matrix becomes: its attributes."""

    def __init__(self, *_):
        pass

    def __setstate__(self, state):
        self.indptr, self.indices, self.data = (state[name].array for name in ("indptr", "indices", "data"))
        self.shape = state.get("_shape", state.get("shape"))


class _PlanetoidUnpickler(pickle.Unpickler):
    """Reads what the Planetoid files hold and nothing else: a file can neither run code nor make numpy's objects."""

    admitted = {
        "numpy.ndarray": _Array, "numpy.dtype": _Dtype, "numpy.core.multiarray._reconstruct": _Array,
        "scipy.sparse.csr.csr_matrix": _Csr, "collections.defaultdict": collections.defaultdict,
        "builtins.list": list, "builtins.object": object, "copyreg._reconstructor": _Csr,
        "_codecs.encode": lambda text, _: text.encode("latin1"),  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module, name):
        # Python 2, numpy 2 and later versions of scipy have other names for the same modules
        module = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy._core.multiarray": "numpy.core.multiarray",
                  "scipy.sparse._csr": "scipy.sparse.csr"}.get(module, module)
        if f"{module}.{name}" not in self.admitted:
            raise StoreError(f"it asks for {module}.{name}, which has no place in a Planetoid file")
        return self.admitted[f"{module}.{name}"]


def _read_pickle(file):
    """A Planetoid file: a dense array, the dense array of a sparse matrix, or a dict of lists."""
    try:
        with open(file, "rb") as data:
            value = _PlanetoidUnpickler(data, encoding="latin1").load()
        return _dense(value) if isinstance(value, _Csr) else value.array if isinstance(value, _Array) else dict(value)
    except Exception as error:  # a damaged pickle may raise anything
        raise StoreError(f"{file} cannot be read: {error}") from error


def _dense(matrix) -> np.ndarray:
    rows, columns = (int(n) for n in matrix.shape)
    if not 0 <= rows * columns < 1 << 31 or len(matrix.indptr) != rows + 1:
        raise StoreError(f"its matrix is {rows} x {columns} with {len(matrix.indptr)} row offsets, which does not fit")
    dense = np.zeros((rows, columns), np.float32)
    dense[np.repeat(np.arange(rows), np.diff(matrix.indptr)), matrix.indices] = matrix.data
    return dense


# ---------------------------------------------------------------------------------------------------------------------
# OGB


def build_ogb(path, name, root, *, backend="mmap", progress=False) -> Path:
    """Build an OGB node-property graph from OGB's own archive (arXiv 2005.00687), which is read without unpacking.

    The archive is downloaded into `root`, and resumed there when a part of it was; RINGBLOCK_OGB_URL names a mirror.
    As in OGB's reference examples every edge gets its reverse; for arxiv and papers100M duplicates are then dropped.

    Args:
        path: directory of the store.
        name: one of OGB.
        root: directory for the archive and for temporary files.
        backend, progress: as in `build_store`.

    Returns:
        The path of the store.

    Raises:
        StoreError: if the download fails, or the archive is damaged or would write outside its folder.
    """
    archive, kind, classes, drop_duplicates = OGB[name]
    file = Path(root) / archive
    download(f"{os.environ.get('RINGBLOCK_OGB_URL', OGB_URL)}/{archive}", file, progress)
    for stale in Path(root).glob(".ogb-*"):
        shutil.rmtree(stale, ignore_errors=True)
    print(f"{name}: adding the reverse of every edge" + (" and dropping duplicates" if drop_duplicates else "")
          + ", as OGB's reference examples do")
    try:
        with zipfile.ZipFile(file) as outer, tempfile.TemporaryDirectory(dir=root, prefix=".ogb-") as folder:
            members = {}
            for member in outer.namelist():
                if member.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", member):
                    raise StoreError(f"{file}: its member {member!r} points outside the archive; it is not used")
                members[member.partition("/")[2]] = member

            def member(name):
                if name not in members:
                    raise StoreError(f"{file} has no member {name}; remove it to have it downloaded again")
                return outer.open(members[name])

            def table(name, dtype=np.int64):
                try:
                    found = Table(member(f"{name}.csv.gz"), f"{file}: {name}.csv.gz")
                    kind, columns = "whole" if dtype == np.int64 else "real", range(found.width)
                    for _, whole, real, _ in found.chunks(**{kind: columns}, missing=True):
                        yield whole if dtype == np.int64 else real.astype(dtype)
                except StoreError as error:
                    raise StoreError(f"{error}; remove the archive to have it downloaded again") from error

            def column(name, dtype=np.int64):
                return np.concatenate([*table(name, dtype)])[:, 0]

            if "raw/data.npz" in members:
                shape, dtype, chunks = _npy_chunks(member("raw/data.npz"), "edge_index")
                edge_index = spool(Path(folder) / "edges", chunks, dtype, shape[1])
                features = Rows(*_npy_chunks(member("raw/data.npz"), "node_feat"))
                labels = np.concatenate(list(_npy_chunks(member("raw/node-label.npz"), "node_label")[2])).reshape(-1)
            else:
                nodes, edges = (int(column(f"raw/num-{what}-list").sum()) for what in ("node", "edge"))
                edge_index = spool(Path(folder) / "edges", table("raw/edge"), np.int64, 2).T
                if edge_index.shape != (2, edges):
                    raise StoreError(f"{file} has {edge_index.shape[1]} edges, and {edges} in its list of them; remove "
                                     "it to have it downloaded again")
                width = next(table("raw/node-feat", np.float32)).shape[1]
                features = Rows((nodes, width), np.float32, table("raw/node-feat", np.float32))
                labels = column("raw/node-label", np.float64)
            labels = np.where(np.isnan(labels), -1, labels).astype(np.int64)
            split = {name: column(f"split/{kind}/{name}") for name in SPLITS}
            return build_store(path, edge_index=edge_index, features=features, labels=labels, num_classes=classes,
                               split=split, backend=backend, symmetrize=True, drop_duplicates=drop_duplicates,
                               source=dict(dataset=name, archive=archive), progress=progress)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{file} cannot be used: {error}; if it is damaged, remove it to have it downloaded "
                         "again") from error


def _npy_chunks(file, name):
    """(shape, dtype, chunks of rows) of an array in an .npz file; a row of more than 2^22 numbers comes in pieces."""
    data = zipfile.ZipFile(file).open(f"{name}.npy")
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, fortran_order, dtype = read_header[np.lib.format.read_magic(data)](data)
    if fortran_order or len(shape) != 2:
        raise StoreError(f"array {name} in {file.name} is {list(shape)}: two dimensions in C order are needed")
    width = shape[1] if shape[1] <= 1 << 22 else 1

    def chunks():
        left, step = shape[0] * shape[1], (1 << 22) // width * width
        while left:
            count = min(step, left)
            raw = _read(data, count * dtype.itemsize)
            if len(raw) < count * dtype.itemsize:
                raise StoreError(f"array {name} in {file.name} ends early; remove the archive to download it again")
            yield np.frombuffer(raw, dtype).reshape(-1, width)
            left -= count

    return shape, dtype, chunks()


def _read(file, size) -> bytes:
    try:
        return file.read(size)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{file.name} is damaged: {error}; remove its archive to have it downloaded again") from error


# ---------------------------------------------------------------------------------------------------------------------
# downloads


def download(url, target, progress):
    """Fetch a URL into a file, resuming what an earlier try left in target.part; does nothing if it is there.

    A part is resumed only while the server's file is the one it was begun with: its ETag or date lies in
    target.part.tag.

    Raises:
        StoreError: for whatever fails, in a sentence; what has arrived stays for the next try.
    """
    part, tag = Path(f"{target}.part"), Path(f"{target}.part.tag")
    if target.is_file():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.is_file() and tag.is_file() else 0
        ranges = {"Range": f"bytes={have}-", "If-Range": tag.read_text()} if have else {}
        with urllib.request.urlopen(urllib.request.Request(url, headers=ranges), timeout=60) as response:
            if response.status != 206:  # a server without ranges, or with another file than before, sends everything
                have = 0
            version = response.headers.get("ETag", "W/")
            version = (
                response.headers.get("Last-Modified") if version.startswith("W/") else version
            )  # weak: not of bytes
            tag.write_text(version) if version else tag.unlink(missing_ok=True)
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            with open(part, "ab" if have else "wb") as file, \
                    tqdm(total=total, initial=have, desc=target.name, unit="B", unit_scale=True,
                         disable=None if progress else True) as bar:
                while data := response.read(1 << 20):
                    file.write(data)
                    bar.update(len(data))
                size = file.tell()
    except urllib.error.HTTPError as error:
        whole = str(error.headers.get("Content-Range", "")).rpartition("/")[2]
        if error.code != 416 or whole != str(have):  # 416: nothing is left to send, because the part is all of it
            raise StoreError(
                f"cannot download {url}: the server answers {error.code} {error.reason}"
                + (f"; {part} does not fit it: remove that to begin anew" if error.code == 416 else "")
            ) from error
        size = total = have
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(f"the download of {url} failed: {error}; run it again to go on from where it stopped, or put "
                         f"the file at {target}") from error
    if total is not None and size != total:
        raise StoreError(f"the download of {url} stopped at {size} of {total} bytes; run it again to go on from there")
    try:
        sync(part)
        os.replace(part, target)
        sync(target.parent)
        tag.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{part} could not be renamed to {target}: {error.strerror}") from error
