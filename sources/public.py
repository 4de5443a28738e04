"""Graphs of OGB and Planetoid, downloaded as their original files -> arguments of `build_store`.

    with ogb("ogbn-arxiv", "data") as graph:        # the archive is read without unpacking
        build_store("data/ogbn-arxiv", **graph)
    build_store("data/cora", **planetoid("cora", "data"))
    download(url, Path("data/x.zip"))               # resumes an interrupted download

Planetoid's files are pickles: they are read by an unpickler that allows only arrays, sparse matrices and dicts of lists,
and nothing that runs code.
"""

import collections
import contextlib
import gzip
import http.client
import os
import pickle
import types
import urllib.request
import zipfile
from pathlib import Path

import numpy as np

from disk.convert import Rows, spool
from disk.files import SPLITS, StoreError, progress_bar, reading, sync
from extras import extra

OGB_URL = "https://snap.stanford.edu/ogb/data/nodeproppred"
# name: (archive, kind of split, C, drop duplicates after the reverse of every edge was added)
OGB = {
    "ogbn-arxiv": ("arxiv.zip", "time", 40, True),
    "ogbn-products": ("products.zip", "sales_ranking", 47, False),
    "ogbn-papers100M": ("papers100M-bin.zip", "time", 172, True),
    "ogbn-mag": ("mag.zip", "time", 349, True),
}
PLANETOID_URL = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
PLANETOID = ("cora", "citeseer", "pubmed")


@contextlib.contextmanager
def ogb(name, root, progress=False):
    """Context manager: one of OGB's node-property graphs (arXiv 2005.00687) as arguments of `build_store`.

    The archive is downloaded into `root`, which also gets temporary files; RINGBLOCK_OGB_URL names a mirror. As in
    OGB's reference examples every edge gets its reverse; duplicates are then dropped where `OGB` says so.
    """
    archive, kind, classes, drop_duplicates = OGB[name]
    file = Path(root) / archive
    download(f"{os.environ.get('RINGBLOCK_OGB_URL', OGB_URL)}/{archive}", file, progress)
    dropping = " and dropping duplicates" * drop_duplicates
    print(f"{name}: adding the reverse of every edge{dropping}, as OGB's reference examples do")
    called = f"{file} (if it is damaged, remove the archive to have it downloaded again)"
    with reading(called), zipfile.ZipFile(file) as outer:
        yield dict(
            **_arrays(_Archive(called, outer), kind, root),
            num_classes=classes,
            symmetrize=True,
            drop_duplicates=drop_duplicates,
            source=dict(dataset=name, archive=archive),
        )


class _Archive:
    """The tables of an open OGB archive; called: its name in messages."""

    def __init__(self, called, outer):
        self.called, self.outer = called, outer
        self.members = {member.partition("/")[2]: member for member in outer.namelist()}

    def open(self, name):
        return self.outer.open(self.members[name])

    def table(self, name, kind=int):
        """Yield chunks [n, columns] of a table of numbers."""
        table = extra(".tables", self.called).Table
        rows = table(self.open(f"{name}.csv.gz"), f"{self.called}: {name}.csv.gz")
        for _, columns in rows.read(dict.fromkeys(range(rows.width), kind), missing=True):
            yield np.stack(list(columns.values()), 1)

    def words(self, name):
        """Read the lines of a small table of words -> list of lists."""
        text = gzip.decompress(self.open(f"{name}.csv.gz").read()).decode()
        return [line.split(",") for line in text.split()]

    def column(self, name, kind=int):
        return np.concatenate([*self.table(name, kind)])[:, 0]

    def features(self, name, count) -> Rows:
        width = next(self.table(name, float)).shape[1]
        rows = (chunk.astype(np.float32) for chunk in self.table(name, float))
        return Rows((count, width), np.float32, rows)

    def array(self, member, name) -> Rows:
        """Stream a 2-D array of an .npz file in the archive; rows of more than 2^22 values come in pieces."""
        data = zipfile.ZipFile(self.open(f"raw/{member}.npz")).open(f"{name}.npy")
        version = np.lib.format.read_magic(data)[0]
        read = getattr(np.lib.format, f"read_array_header_{version}_0")
        shape, fortran_order, dtype = read(data)
        if fortran_order or len(shape) != 2:
            raise ValueError(f"{name} is {list(shape)}: two dimensions in C order are needed")
        width = shape[1] if shape[1] <= 1 << 22 else 1

        def chunks():
            while raw := data.read((1 << 22) // width * width * dtype.itemsize):
                yield np.frombuffer(raw, dtype).reshape(-1, width)

        return Rows(shape, dtype, chunks())


def _arrays(archive, kind, folder) -> dict:
    """Read the graph of an archive, with the split `kind`; edges go to a file in `folder`."""
    if "raw/triplet-type-list.csv.gz" in archive.members:
        return _typed_arrays(archive, kind)
    if "raw/data.npz" in archive.members:
        edges = archive.array("data", "edge_index")
        features = archive.array("data", "node_feat")
        edge_index = spool(folder, edges.chunks, edges.dtype, edges.shape[1])
        labels = np.concatenate([*archive.array("node-label", "node_label").chunks]).reshape(-1)
    else:
        nodes = int(archive.column("raw/num-node-list").sum())
        edge_index = spool(folder, archive.table("raw/edge"), np.int64, 2).T
        features = archive.features("raw/node-feat", nodes)
        labels = archive.column("raw/node-label", float)
    return dict(
        edge_index=edge_index,
        features=features,
        labels=np.where(np.isnan(labels), -1, labels).astype(np.int64),
        split={name: archive.column(f"split/{kind}/{name}") for name in SPLITS},
    )


def _typed_arrays(archive, kind) -> dict:
    """Read a graph with node and edge types -> the same arguments, as dicts by type."""
    names, counts = archive.words("raw/num-node-dict")
    counts = dict(zip(names, map(int, counts)))
    edges = {}
    for ends in map(tuple, archive.words("raw/triplet-type-list")):
        edges[ends] = np.concatenate([*archive.table(f"raw/relations/{'___'.join(ends)}/edge")]).T

    def tables(kind):
        names_of = {name: f"raw/node-{kind}/{name}/node-{kind}" for name in names}
        return {n: file for n, file in names_of.items() if f"{file}.csv.gz" in archive.members}

    labels = {name: archive.column(file) for name, file in tables("label").items()}
    return dict(
        node_types=counts,
        edge_index=edges,
        features={n: archive.features(file, counts[n]) for n, file in tables("feat").items()},
        labels=labels,
        split={n: archive.column(f"split/{kind}/{min(labels)}/{n}") for n in SPLITS},
    )


def planetoid(name, root) -> dict:
    """Read one of PLANETOID, original files and public split (arXiv 1603.08861) -> arguments of `build_store`, with the
    files' word counts as features.

    The files `ind.NAME.*` are looked for in root and in root/planetoid, else downloaded to the latter;
    RINGBLOCK_PLANETOID_URL names a mirror.
    """
    parts = {}
    for part in ("y", "tx", "ty", "allx", "ally", "graph", "test.index"):
        file = Path(root) / f"ind.{name}.{part}"
        if not file.is_file():
            file = Path(root) / "planetoid" / file.name
            url = os.environ.get("RINGBLOCK_PLANETOID_URL", PLANETOID_URL)
            download(f"{url}/{file.name}", file)
        with reading(file):
            parts[part] = np.loadtxt(file, np.int64, ndmin=1) if "." in part else _unpickled(file)
    train = len(parts["y"])
    test = parts["test.index"]
    num_allx = len(parts["allx"])
    num_nodes = max(num_allx + len(test), len(parts["graph"]))

    # Row i of tx belongs to node test.index[i]. Citeseer lacks some of these: isolated nodes without features or label.
    nodes = np.append(np.arange(num_allx), test)
    x = np.concatenate([parts["allx"], parts["tx"]])
    y = np.concatenate([parts["ally"], parts["ty"]])
    if not np.isin(y, (0, 1)).all():
        raise StoreError(f"ind.{name}.ally or ty holds values other than 0 and 1")
    features = np.zeros((num_nodes, x.shape[1]), np.float32)
    onehot = np.zeros((num_nodes, y.shape[1]), np.int64)
    features[nodes] = x
    onehot[nodes] = y
    edges = [(u, v) for v, sources in parts["graph"].items() for u in sources]
    valid = np.arange(train, min(train + 500, num_allx))
    return dict(
        edge_index=np.array(edges or [(0, 0)])[: len(edges)].T,
        features=features,
        labels=np.where(onehot.any(1), onehot.argmax(1), -1),
        num_classes=onehot.shape[1],
        split=dict(train=np.arange(train), valid=valid, test=np.sort(test)),
        symmetrize=True,
        drop_self_loops=True,
        drop_duplicates=True,
        source=dict(dataset=name),
    )


def _number(name, *_):
    """Return a built-in dtype of numpy, which no state in the pickle can change."""
    if name not in ("f4", "f8", "i4", "i8"):
        raise ValueError(f"it holds an array of type {name!r}, which is not Planetoid's")
    return np.dtype(name)


class _Unpickler(pickle.Unpickler):
    """Unpickles what the Planetoid files hold and nothing else: names are looked up in `admitted`, whatever their
    module, which differs between versions of Python, numpy and scipy."""

    admitted = {
        "ndarray": np.ndarray,
        "dtype": _number,
        "_reconstruct": np.empty(0).__reduce__()[0],
        "csr_matrix": types.SimpleNamespace,  # holds the attributes
        "_reconstructor": lambda *_: types.SimpleNamespace(),
        "defaultdict": collections.defaultdict,
        "list": list,
        "object": object,
        "encode": lambda text, _: text.encode("latin1"),  # how Python 3 writes bytes for Python 2
    }

    def find_class(self, module, name):
        if name not in self.admitted:
            raise ValueError(f"it asks for {module}.{name}, which is not Planetoid's")
        return self.admitted[name]


def _unpickled(file):
    """Unpickle a Planetoid file -> an array, dense also for a sparse matrix, or a dict of lists."""
    with open(file, "rb") as data:
        value = _Unpickler(data, encoding="latin1").load()
    if not isinstance(value, types.SimpleNamespace):
        return value if isinstance(value, np.ndarray) else dict(value)
    rows, columns = (int(n) for n in getattr(value, "_shape", None) or value.shape)
    dense = np.zeros((rows, columns), np.float32)
    if len(value.indices) and not 0 <= value.indices.min() <= value.indices.max() < columns:
        raise ValueError(f"its matrix has entries outside of columns 0 to {columns - 1}")
    dense[np.repeat(np.arange(rows), np.diff(value.indptr)), value.indices] = value.data
    return dense


def download(url, target, progress=False):
    """Download a URL to the file `target`; does nothing if it exists. What has arrived of an archive before the download
    failed is kept as target.part, and the next try goes on from there. If the server's file has changed meanwhile, the
    archive's CRCs do not match; files without CRCs begin anew."""
    part = Path(f"{target}.part")
    if target.is_file():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.is_file() and target.suffix == ".zip" else 0
        have = max(have - 1, 0)  # its last byte again: an empty range would be refused
        ranges = {"Range": f"bytes={have}-"} if have else {}
        request = urllib.request.Request(url, headers=ranges)
        with urllib.request.urlopen(request, timeout=60) as response:
            have = have if response.status == 206 else 0  # without range support all of it is sent
            length = response.headers.get("Content-Length", "")
            total = response.headers.get("Content-Range", length).rpartition("/")[2]
            total = int(total) if total.isdigit() else None
            with (
                open(part, "r+b" if have else "wb") as file,
                progress_bar(progress, total=total, initial=have, desc=part.stem, unit="B") as bar,
            ):
                file.seek(have)
                while data := response.read(1 << 20):
                    file.write(data)
                    bar.update(len(data))
        if total not in (None, size := part.stat().st_size):
            raise OSError(f"it stopped at {size} of {total} bytes")
        sync(part)
        os.replace(part, target)
        sync(target.parent)
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(
            f"the download of {url} failed: {error}; "
            f"run it again to go on (remove {part} to begin anew), or put the file at {target}"
        ) from error
