"""A name or a path -> a store directory, built under `root` the first time it is asked for.

    path = prepare("synthetic")                                  # planted communities, no download
    path = prepare("synthetic:nodes=2449029,degree=50,features=100,classes=47")
    path = prepare("ogbn-products", root="data")                 # ogbn-arxiv, ogbn-products, ogbn-papers100M
    path = prepare("cora")                                       # cora, citeseer, pubmed: the original Planetoid files
    path = prepare("mine.npz")                                   # edge_index, features, labels, train_idx, ...
    path = prepare("some/store")                                 # a store is taken as it is
    path = build(dgl_graph_or_pyg_data, "some/store")            # or mine.npz, or edges.csv.gz with features, labels

    python datasets.py NAME [--root DIR] [--backend mmap|lmdb] [--seed N]

Letters: V nodes and M edges of the graph, F feature width, C classes. This file needs store.py, torch and numpy.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import functools
import gzip
import hashlib
import http.client
import itertools
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

import store
from store import Rows, StoreError, build_store

PLANETOID_URL = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
PLANETOID = ("cora", "citeseer", "pubmed")
OGB_URL = "http://snap.stanford.edu/ogb/data/nodeproppred"
OGB = {  # name: (archive, kind of split, C, drop duplicates after the reverse of every edge was added)
    "ogbn-arxiv": ("arxiv.zip", "time", 40, True),
    "ogbn-products": ("products.zip", "sales_ranking", 47, False),
    "ogbn-papers100M": ("papers100M-bin.zip", "time", 172, True),
}


def prepare(dataset, root="data", *, seed=0, backend="mmap", progress=True) -> Path:
    """Find the store of a data set, building it (and downloading what it is made of) when it is not there yet.

    Args:
        dataset: a store directory; `synthetic` with optional parameters (`synthetic:nodes=1000000,degree=50`, see
            `SYNTHETIC`); the path of an .npz file; or one of the names in `known_datasets()`.
        root: directory for downloads and for the stores built here.
        seed: draws the split of a data set that comes without one; a synthetic graph has its own seed parameter.
        backend: "mmap" or "lmdb", for the features.
        progress: show bars.

    Returns:
        The path of the store.

    Raises:
        StoreError: for an unknown name, malformed parameters or data, a failed download.
    """
    name, _, parameters = str(dataset).partition(":")
    root, common = Path(root), dict(backend=backend, progress=progress)
    if (Path(dataset) / "meta.json").is_file():
        return Path(dataset)
    if backend not in store.BACKENDS:
        raise StoreError(f"backend {backend!r} is unknown: choose one of {', '.join(store.BACKENDS)}")
    if name == "synthetic":
        parameters = _parse(parameters, SYNTHETIC, name)
        key, build = f"{name}-{_digest(parameters)}", functools.partial(build_synthetic, parameters=parameters)
    elif name.endswith(".npz"):
        options = dict(_parse(parameters, NPZ, name), seed=int(seed))
        try:
            content = store._digest(name).hexdigest()
        except OSError as error:
            raise StoreError(f"cannot read {name}: {error.strerror}") from error
        key = f"{Path(name).stem}-{_digest([content, options])}"  # a changed file is another data set
        build = functools.partial(build_npz, file=name, options=options)
    elif name in PLANETOID or name in OGB:
        _parse(parameters, {}, name)
        key = f"{name}-{_digest(name)}"
        build = functools.partial(build_planetoid if name in PLANETOID else build_ogb, name=name, root=root)
    else:
        raise StoreError(f"dataset {str(dataset)!r} is unknown: it is neither a store nor an .npz file, nor one of "
                         f"{', '.join(known_datasets())}")
    target = root / (key if backend == "mmap" else f"{key}-{backend}")
    if not (target / "meta.json").is_file():
        with _locked(root):  # of several processes one builds, the others wait for it
            if not (target / "meta.json").is_file():
                with _layout(dataset):
                    build(target, **common)
    return target


@contextlib.contextmanager
def _layout(source):
    """Say in one sentence that a source does not hold what its reader expects."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{source} does not hold a graph in the layout expected: {error}") from error


def known_datasets() -> list[str]:
    """The names that `prepare` knows, besides paths."""
    return ["synthetic", *PLANETOID, *OGB]


@contextlib.contextmanager
def _locked(directory):
    """Hold a lock on a directory, which the kernel drops with the process; one made for this goes if it stays empty."""
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"cannot use {directory} for data: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            if made:
                directory.rmdir()


def _parse(text, defaults, name) -> dict:
    """`a=1,b=2` over the defaults, each value with the type of its default."""
    values = dict(defaults)
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in defaults or not equals:
            raise StoreError(f"{name} has no parameter {item!r}: write NAME=VALUE with {', '.join(defaults)}")
        try:
            values[key] = type(defaults[key])(float(value)) if "e" in value else type(defaults[key])(value)
        except (ValueError, OverflowError):
            raise StoreError(f"{name}: {key}={value!r} is no {type(defaults[key]).__name__}") from None
    return values


def _digest(value) -> str:
    """Eight characters that stand for a JSON value and for the format of the store."""
    return hashlib.sha256(json.dumps([store.VERSION, value], sort_keys=True).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# synthetic

SYNTHETIC = dict(
    nodes=100_000,  # V
    degree=20.0,  # mean in-degree
    features=64,  # F
    classes=16,  # C
    seed=0,
    train=0.08,  # nodes in the split: a count, or a fraction when below 1; the rest is the test split
    valid=0.02,
    local=0.5,  # share of edges from the same community
    sigma=0.6,  # spread of the logarithm of the in-degree
    noise=0.6,  # standard deviation per feature; centroids have length 1
    mixed=0.04,  # share of nodes whose class is drawn anew instead of being that of their community
    community=0,  # nodes per community; 0: 1,000, or less where that leaves fewer than four per class
)


def build_synthetic(path, parameters, *, backend="mmap", progress=False) -> Path:
    """Build a graph with planted communities, log-normal in-degrees and features too noisy to classify alone.

    Nodes with consecutive ids form a community, which has a class. Half of the edges come from the community of their
    destination; the others from the whole graph, node V u^3 for u uniform in [0, 1), so that low ids are hubs.
    Everything is drawn in chunks of nodes, each from its own random stream, on several threads: the bytes depend on
    the parameters alone.

    Args:
        path: directory of the store.
        parameters: dict with every key of `SYNTHETIC`.
        backend, progress: as in `build_store`.

    Returns:
        The path of the store.

    Raises:
        StoreError: for parameters out of range.
    """
    p = collections.namedtuple("Parameters", parameters)(**parameters)
    size = p.community or max(1, min(1000, p.nodes // (4 * max(p.classes, 1))))
    for name, fine in dict(nodes=1 <= p.nodes <= 1 << 31, degree=0 < p.degree < 1 << 20, features=p.features >= 1,
                           classes=1 <= p.classes <= p.nodes, seed=p.seed >= 0, local=0 <= p.local <= 1,
                           sigma=0 <= p.sigma <= 4, noise=p.noise >= 0, mixed=0 <= p.mixed <= 1,
                           community=0 <= p.community <= p.nodes, train=0 < p.train <= p.nodes,
                           valid=0 <= p.valid <= p.nodes).items():
        if not fine:
            raise StoreError(f"synthetic: {name}={parameters[name]} is out of range")

    def stream(*key):
        return np.random.Generator(np.random.SFC64([p.seed, *key]))

    communities = -(-p.nodes // size)
    labels = stream(0).permutation(np.arange(communities) % p.classes).repeat(size)[:p.nodes]
    mixed = stream(1).random(p.nodes, np.float32) < p.mixed
    labels[mixed] = stream(2).integers(0, p.classes, int(mixed.sum()))
    normal = stream(3).standard_normal(p.nodes, np.float32)
    degrees = np.maximum(1, np.rint(p.degree * np.exp(p.sigma * normal - p.sigma**2 / 2))).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    centroids = stream(4).standard_normal((p.classes, p.features), np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)

    def edges(first):
        v = np.arange(first, min(first + nodes_per_chunk, p.nodes)).astype(np.uint64)
        start = v // np.uint64(size) * np.uint64(size)
        v = np.stack([start, np.minimum(np.uint64(size), np.uint64(p.nodes) - start)])
        start, span = v.repeat(degrees[first:first + nodes_per_chunk], axis=1)
        bits = stream(5, first).integers(0, 1 << 64, len(start), np.uint64)
        position, choice = bits & np.uint64((1 << 32) - 1), bits >> np.uint64(32)
        near = start + (position * span >> np.uint64(32))
        low = position * position >> np.uint64(32)
        far = (low * position >> np.uint64(32)) * np.uint64(p.nodes) >> np.uint64(32)
        return np.where(choice < np.uint64(p.local * (1 << 32)), near, far).astype(np.int64)

    def features(first):
        rows = centroids[labels[first:first + rows_per_chunk]]
        rows += p.noise * stream(6, first).standard_normal(rows.shape, np.float32)
        return rows

    nodes_per_chunk = max(1, int((1 << 20) / p.degree))
    rows_per_chunk = max(1, (1 << 22) // p.features)
    return build_store(
        path, indptr=indptr, indices=Rows([int(indptr[-1])], np.int64, _ahead(edges, p.nodes, nodes_per_chunk)),
        features=Rows([p.nodes, p.features], np.float32, _ahead(features, p.nodes, rows_per_chunk)),
        labels=labels, num_classes=p.classes, split=_draw_split(p, stream(7)), backend=backend, progress=progress,
        source=dict(dataset="synthetic", **parameters))


def _draw_split(p, random) -> dict:
    """Random nodes for train and valid, counts or fractions of V; the rest is test."""
    counts = [round(n * p.nodes) if n < 1 else int(n) for n in (p.train, p.valid)]
    if counts[0] < 1 or sum(counts) > p.nodes:
        raise StoreError(f"synthetic: train={p.train:g} and valid={p.valid:g} do not fit {p.nodes} nodes")
    order = random.permutation(p.nodes)
    return {name: np.sort(ids) for name, ids in zip(store.SPLITS, np.split(order, np.cumsum(counts)))}


def _ahead(function, stop, step):
    """function(0), function(step), ... in order, computed a little ahead on threads (numpy releases the GIL)."""
    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        pending = collections.deque()
        for first in range(0, stop, step):
            pending.append(pool.submit(function, first))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ---------------------------------------------------------------------------------------------------------------------
# .npz

NPZ = dict(
    row_normalize=1,  # divide word counts by their sum
    radius=4.0,  # of the neighbourhood of an atom in a crystal, angstrom
)


def build_npz(path, file, options, *, backend="mmap", progress=False, **graph_options) -> Path:
    """Build a store from an .npz file.

    The file holds `edge_index` [2, M]; `features`, `x` or `feat` [V, F], or a CSR matrix in `feat_indptr`,
    `feat_indices`, `feat_shape` and perhaps `feat_data`; `labels` or `y` [V]; and perhaps `train_idx`, `val_idx` or
    `valid_idx`, and `test_idx`. Without a split, 20 nodes per class are drawn for train, 30 for valid, the rest is
    test. A CSR matrix of integers is a bag of words: counts become 1, and each row is divided by its sum. Without
    features, half of the training nodes get their label as a one-hot feature, the other half stay for training.

    A file with `node_offsets` or `atom_offsets` holds many small graphs: see `build_molecules` and `build_crystals`.

    Args:
        path: directory of the store.
        file: path of the .npz file.
        options: dict with the keys of `NPZ` and `seed`, which draws the split.
        backend, progress, graph_options: as in `build_store`.

    Returns:
        The path of the store.

    Raises:
        StoreError: for a file that does not hold such a graph.
    """
    data = _read_npz(file)
    random = np.random.default_rng(options["seed"])
    for name, build in (("node_offsets", build_molecules), ("atom_offsets", build_crystals)):
        if name in data:
            return build(path, data, file, options, progress=progress)
    edge_index = _first(data, file, "edge_index")
    labels = _first(data, file, "labels", "y").reshape(-1).astype(np.int64, casting="safe")
    features = _first(data, file, "features", "x", "feat", "feat_indptr", default=None)
    names = [("train", ["train_idx"]), ("valid", ["val_idx", "valid_idx"]), ("test", ["test_idx"])]
    split = {name: _first(data, file, *keys, default=None) for name, keys in names}
    source = dict(dataset=Path(file).name, **options)
    if split["train"] is None:
        split = _split_per_class(labels, random)
    split = {name: ids for name, ids in split.items() if ids is not None}
    if features is None:
        graph_options.update(symmetrize=True, drop_duplicates=True)
        split["train"] = random.permutation(split["train"])
        known, split["train"] = np.split(split["train"], [len(split["train"]) // 2])
        features = np.zeros((len(labels), labels.max() + 1), np.float32)
        features[known, labels[known]] = 1
        source["features"] = "labels of half of the training nodes"
        print(f"{Path(file).name} has no features: half of the training nodes ({len(known):,}) show their label as "
              f"feature, the other {len(split['train']):,} are trained on; edges are made symmetric")
    elif "feat_indptr" in data:
        features = _bag_of_words(data, file, options["row_normalize"])
    return build_store(path, edge_index=edge_index, features=features, labels=labels, split=split, backend=backend,
                       source=source, progress=progress, **graph_options)


def _read_npz(file) -> dict:
    try:
        with np.load(file, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{file} cannot be read as .npz: {error}") from error


def _first(data, file, *names, **default):
    """The first of several entries that is there."""
    for name in names:
        if name in data:
            return data[name]
    if default:
        return default["default"]
    raise StoreError(f"{file} has no entry {' or '.join(names)}; its entries are {', '.join(data)}")


def _split_per_class(labels, random) -> dict:
    """20 nodes per class for train, 30 for valid, the rest for test."""
    train, valid = [], []
    for label in range(labels.max() + 1):
        nodes = random.permutation(np.flatnonzero(labels == label))
        train.append(nodes[:20])
        valid.append(nodes[20:50])
    train, valid = np.concatenate(train), np.concatenate(valid)
    rest = np.setdiff1d(np.flatnonzero(labels >= 0), np.concatenate([train, valid]))
    return dict(train=train, valid=valid, test=rest)


def _bag_of_words(data, file, row_normalize) -> Rows:
    """Dense rows of the CSR matrix in `data`, a few thousand at a time."""
    indptr, indices = data["feat_indptr"].astype(np.int64), _first(data, file, "feat_indices")
    values = data.get("feat_data", np.ones(1, np.uint8))
    num_nodes = len(indptr) - 1
    width = [int(n) for n in data.get("feat_shape", [num_nodes, indices.max() + 1])]
    width = width[1] if width[0] == num_nodes else width[0]  # some files list columns first

    def rows(first, last):
        a, b = indptr[first], indptr[last]
        dense = np.zeros((last - first, width), np.float32)
        lengths = np.diff(indptr[first:last + 1])
        row = np.repeat(np.arange(last - first), lengths)
        if values.dtype.kind == "f":
            dense[row, indices[a:b]] = values[a:b]
        else:
            dense[row, indices[a:b]] = 1 / lengths[row] if row_normalize else 1
        return dense

    return Rows([num_nodes, width], np.float32, (rows(a, min(a + 4096, num_nodes)) for a in range(0, num_nodes, 4096)))


# ---------------------------------------------------------------------------------------------------------------------
# a graph at hand: files, DGL, PyG


def build(source, path, *, features=None, labels=None, split=None, seed=0, **options) -> Path:
    """Build a store at a path of your own.

    Args:
        source: a DGLGraph (`feat`, `label` and masks in its ndata); a PyG `Data` (`x`, `y` and masks); an .npz file
            (see `build_npz`); or a .csv or .csv.gz file, an edge a line: source, destination.
        path: directory of the store.
        features: [V, F], or for csv the file of a table with a line for each node. labels: [V], or such a file.
        split: dict of node ids or masks, for csv of files of ids; without one, 20 nodes per class train, 30 validate.
        seed: draws the split where there is none.
        options: of `build_store`: backend, symmetrize, drop_self_loops, drop_duplicates, progress.

    Returns:
        The path of the store.

    Raises:
        StoreError: for a source that is none of these, or does not hold a graph.
    """
    if hasattr(source, "ndata") or hasattr(source, "edge_index"):
        dgl = hasattr(source, "ndata")
        get = source.ndata.get if dgl else lambda name: getattr(source, name, None)
        features, labels = (get(name) if given is None else given
                            for given, name in ((features, "feat" if dgl else "x"), (labels, "label" if dgl else "y")))
        for name, given in (("features", features), ("labels", labels)):
            if given is None:
                raise StoreError(f"the {type(source).__name__} has no {name}: give them as {name}=")
        masks = {name: get(mask) for name, mask in zip(store.SPLITS, ("train_mask", "val_mask", "test_mask"))}
        split = split or {name: mask for name, mask in masks.items() if mask is not None}
        edge_index = [array.numpy() for array in (source.edges() if dgl else source.edge_index)]
        return _build(path, np.stack(edge_index), features, labels, split, seed, type(source).__name__, options)
    file = str(source)
    if file.endswith(".npz"):
        with _layout(file):
            return build_npz(path, file, dict(NPZ, seed=seed), **options)
    if not file.endswith((".csv", ".csv.gz")):
        raise StoreError(f"{file} is no source: give an .npz or .csv(.gz) file, a DGLGraph or a PyG Data")
    if features is None or labels is None:
        raise StoreError(f"{file} holds edges alone: features and labels are needed as well, a line for each node")
    path = Path(path)
    spool = path.with_name(f".{path.name}.building.{store._host()}.{os.getpid()}.csv")  # a later build clears it away
    try:
        spool.mkdir(parents=True)
        edges, rows, labels = (_spool_csv(spool / name, table, dtype) for name, table, dtype in (
            ("edges", file, np.int64), ("features", features, np.float32), ("labels", labels, np.int64)))
        if edges.shape[1] != 2:
            raise StoreError(f"{file} has {edges.shape[1]} columns: two are needed, source and destination")
        split = {name: np.concatenate(list(_table(ids, np.int64)))[:, 0] for name, ids in (split or {}).items()}
        return _build(path, edges.T, rows, labels, split, seed, Path(file).name, options)
    except OSError as error:
        raise StoreError(f"cannot build {path} from {file}: {error}") from error
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def _build(path, edge_index, features, labels, split, seed, source, options) -> Path:
    labels = np.asarray(labels).reshape(-1)
    split = {name: np.flatnonzero(ids) if np.asarray(ids).dtype == bool else ids for name, ids in split.items()}
    split = split or _split_per_class(labels, np.random.default_rng(seed))
    return build_store(path, edge_index=edge_index, features=features, labels=labels, split=split,
                       source=dict(dataset=source, seed=seed), **options)


def _table(file, dtype):
    """Chunks of rows of a .csv or .csv.gz file; a first line that is no number names the columns."""
    with gzip.open(file) if str(file).endswith(".gz") else open(file, "rb") as table:
        try:
            float(table.readline().partition(b",")[0])
            table.seek(0)
        except ValueError:
            pass
        yield from _csv_chunks(table, dtype)


def _spool_csv(target, file, dtype) -> np.memmap:
    """A table as a temporary array on disk, so that it never has to fit into memory."""
    chunks = _table(file, dtype)
    first = next(chunks, None)
    if first is None:
        raise StoreError(f"{file} is empty")
    return _spool(target, (None, first.shape[1]), dtype, itertools.chain([first], chunks))


# ---------------------------------------------------------------------------------------------------------------------
# many small graphs


def build_molecules(path, data, file, options, *, progress=False) -> Path:
    """Build a `GraphDataset` of molecules, or of any graphs in the same layout.

    Args:
        path: directory of the data set.
        data: arrays: `node_offsets` and `bond_offsets` [G+1], `atom_feat` [N, F], `bond_feat` [B, D],
            `bond_index_local` [2, B] (each bond once, atoms counted from 0 in each graph; the reverse is added),
            `targets` or `labels` [G] or [G, T], perhaps `train_idx`, `val_idx`, `test_idx`.
        file: where they come from. options: kept in meta.json; `seed` draws the split where there is none.
        progress: show a bar.

    Returns:
        The path of the data set.

    Raises:
        StoreError: for arrays that do not make such graphs.
    """
    nodes, bonds = (data[name].astype(np.int64) for name in ("node_offsets", "bond_offsets"))
    y = _targets(_first(data, file, "targets", "labels"))
    x, e, ends = (_first(data, file, name) for name in ("atom_feat", "bond_feat", "bond_index_local"))

    def batch(first):
        last = min(first + 4096, len(y))
        a, b = bonds[first], bonds[last]
        counts = np.diff(bonds[first:last + 1])
        twice = np.repeat(np.arange(b - a), 2)  # each bond, then its reverse
        edge_index = ends[:, a:b].astype(np.int64)[:, twice]
        edge_index[:, 1::2] = edge_index[::-1, 1::2].copy()
        return store.block_diagonal(np.diff(nodes[first:last + 1]), 2 * counts, edge_index,
                                    x[nodes[first]:nodes[last]], e[a:b][twice], y[first:last])

    return store.build_graphs(path, (batch(first) for first in range(0, len(y), 4096)), progress=progress,
                              split=_graph_split(data, file, len(y), options["seed"]),
                              source=dict(dataset=Path(file).name, edges="both directions of each bond", **options))


def build_crystals(path, data, file, options, *, progress=False) -> Path:
    """Build a `GraphDataset` of periodic cells, to learn the energy per atom.

    Args:
        path: directory of the data set.
        data: arrays: `atom_offsets` [G+1], atomic numbers `Z` [N], `frac_coords` [N, 3], `lattice` [G, 3, 3] (rows are
            vectors, angstrom), `energy` [G] (of the cell), perhaps `train_idx`, `val_idx`, `test_idx`.
        file: where they come from. options: `radius` of the neighbourhoods; `seed` draws the split where there is none.
        progress: show a bar.

    Returns:
        The path of the data set; x is the atomic number, e the distance.

    Raises:
        StoreError: for arrays that do not make such cells.
    """
    offsets, lattice = data["atom_offsets"].astype(np.int64), _first(data, file, "lattice").astype(np.float64)
    coords, numbers = _first(data, file, "frac_coords").astype(np.float64), _first(data, file, "Z").astype(np.uint8)
    atoms = np.diff(offsets)
    y = _targets(_first(data, file, "energy") / atoms)

    def batch(first):
        cells = range(first, min(first + 64, len(y)))
        found = [periodic_neighbours(coords[offsets[i]:offsets[i + 1]], lattice[i], options["radius"]) for i in cells]
        edge_index, distance = (np.concatenate(part, -1) for part in zip(*found))
        return store.block_diagonal(atoms[cells], [len(d) for _, d in found], edge_index,
                                    numbers[offsets[first]:offsets[cells[-1] + 1], None],
                                    distance[:, None].astype(np.float32), y[cells])

    return store.build_graphs(path, _ahead(batch, len(y), 64), progress=progress,
                              split=_graph_split(data, file, len(y), options["seed"]),
                              source=dict(dataset=Path(file).name, target="energy per atom", **options))


def periodic_neighbours(coords, lattice, radius):
    """Pairs of atoms of a crystal that are at most `radius` apart, over the borders of the cell as well.

    Args:
        coords: float64 [n, 3] fractional coordinates. lattice: float64 [3, 3], rows are the vectors of the cell.
        radius: in the unit of the lattice.

    Returns:
        (edge_index int64 [2, E], distance float64 [E]); a pair occurs once for each image within the radius, an atom
        among the neighbours of itself only as an image.
    """
    coords = coords - np.floor(coords)
    heights = 1 / np.linalg.norm(np.linalg.inv(lattice), axis=0)  # distances of opposite faces
    images = [np.arange(-n, n + 1) for n in np.ceil(radius / heights).astype(int)]
    images = np.stack(np.meshgrid(*images, indexing="ij"), -1).reshape(-1, 3)
    place = coords @ lattice
    sources = (place + (images @ lattice)[:, None]).reshape(-1, 3)  # [images * n, 3]
    squared = (sources**2).sum(1)[:, None] + (place**2).sum(1) - 2 * sources @ place.T
    src, dst = (squared <= radius**2 + 1e-6).nonzero()
    distance = np.linalg.norm(sources[src] - place[dst], axis=1)  # the sum above has lost digits
    keep = (distance <= radius) & (src != dst + (~images.any(1)).argmax() * len(coords))
    return np.stack([src[keep] % len(coords), dst[keep]]), distance[keep]


def _targets(values) -> np.ndarray:
    return np.asarray(values, np.float32).reshape(len(values), -1)


def _graph_split(data, file, count, seed) -> dict:
    """The split in the file; where it has none (or no valid part), a tenth of the graphs is drawn for it."""
    random = np.random.default_rng(seed)
    train, test = (_first(data, file, f"{name}_idx", default=None) for name in ("train", "test"))
    valid = _first(data, file, "val_idx", "valid_idx", default=None)
    if train is None:
        test, train = np.split(random.permutation(count), [count // 10])
    if valid is None:
        valid, train = np.split(random.permutation(train), [count // 10])
    return dict(train=np.sort(train), valid=np.sort(valid), test=np.sort(test if test is not None else []).astype(int))


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
            _download(f"{url}/{file.name}", file, progress=False)
        parts[part] = np.loadtxt(file, np.int64, ndmin=1) if part == "test.index" else _read_pickle(file)
    # Row i of tx belongs to node test.index[i]. Citeseer lacks some of these: isolated nodes without features or label.
    test, allx = parts["test.index"], _dense(parts["allx"])
    num_nodes = max(len(allx), test.max() + 1, len(parts["graph"]))
    features = np.zeros((num_nodes, allx.shape[1]), np.float32)
    onehot = np.zeros((num_nodes, parts["ally"].shape[1]), np.int64)
    features[:len(allx)], onehot[:len(allx)] = allx, parts["ally"]
    features[test], onehot[test] = _dense(parts["tx"]), parts["ty"]
    features /= np.maximum(features.sum(1, keepdims=True), 1e-12)
    labels = np.where(onehot.any(1), onehot.argmax(1), -1)
    edges = np.array([(u, v) for v, sources in parts["graph"].items() for u in sources], np.int64).reshape(-1, 2).T
    train = len(parts["y"])
    split = dict(train=np.arange(train), valid=np.arange(train, min(train + 500, len(allx))), test=np.sort(test))
    return build_store(path, edge_index=edges, features=features, labels=labels, num_classes=onehot.shape[1],
                       split=split, backend=backend, symmetrize=True, drop_self_loops=True, drop_duplicates=True,
                       source=dict(dataset=name, row_normalize=1), progress=progress)


class _Csr:
    """What a pickled scipy.sparse.csr_matrix becomes: an object with its attributes."""


class _PlanetoidUnpickler(pickle.Unpickler):
    """Reads the data types of the Planetoid files and nothing else, so that a file cannot run code."""

    admitted = {
        "numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype,
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],
        "scipy.sparse.csr.csr_matrix": _Csr, "collections.defaultdict": collections.defaultdict,
        "builtins.list": list, "builtins.object": object, "copyreg._reconstructor": lambda *_: _Csr(),
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
    try:
        with open(file, "rb") as data:
            return _PlanetoidUnpickler(data, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise StoreError(f"{file} cannot be read: {error}") from error


def _dense(matrix) -> np.ndarray:
    """A pickled CSR matrix as a dense array."""
    lengths = np.diff(matrix.indptr)
    dense = np.zeros((len(lengths), vars(matrix).get("_shape", vars(matrix).get("shape"))[1]), np.float32)
    dense[np.repeat(np.arange(len(lengths)), lengths), matrix.indices] = matrix.data
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
    _download(f"{os.environ.get('RINGBLOCK_OGB_URL', OGB_URL)}/{archive}", file, progress)
    for stale in Path(root).glob(".ogb-*"):
        shutil.rmtree(stale, ignore_errors=True)
    print(f"{name}: adding the reverse of every edge" + (" and dropping duplicates" if drop_duplicates else "")
          + ", as OGB's reference examples do")
    try:
        with zipfile.ZipFile(file) as outer, tempfile.TemporaryDirectory(dir=root, prefix=".ogb-") as spool:
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
                return _csv_chunks(gzip.open(member(f"{name}.csv.gz")), dtype)

            def column(name, dtype=np.int64):
                return np.concatenate([np.empty((0, 1), dtype), *table(name, dtype)])[:, 0]

            if "raw/data.npz" in members:
                edge_index = _spool(Path(spool) / "edges", *_npy_chunks(member("raw/data.npz"), "edge_index"))
                features = Rows(*_npy_chunks(member("raw/data.npz"), "node_feat"))
                labels = np.concatenate(list(_npy_chunks(member("raw/node-label.npz"), "node_label")[2])).reshape(-1)
            else:
                nodes, edges = (int(column(f"raw/num-{what}-list").sum()) for what in ("node", "edge"))
                edge_index = _spool(Path(spool) / "edges", (edges, 2), np.int64, table("raw/edge")).T
                width = next(table("raw/node-feat", np.float32)).shape[1]
                features = Rows((nodes, width), np.float32, table("raw/node-feat", np.float32))
                labels = column("raw/node-label", np.float64)
            labels = np.where(np.isnan(labels), -1, labels).astype(np.int64)
            split = {name: column(f"split/{kind}/{name}") for name in store.SPLITS}
            return build_store(path, edge_index=edge_index, features=features, labels=labels, num_classes=classes,
                               split=split, backend=backend, symmetrize=True, drop_duplicates=drop_duplicates,
                               source=dict(dataset=name, archive=archive), progress=progress)
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{file} cannot be used: {error}; if it is damaged, remove it to have it downloaded "
                         "again") from error


def _csv_chunks(file, dtype):
    """Yield [r, columns] arrays from a table of numbers, some megabytes of text at a time."""
    rest = b""
    while data := _read(file, 1 << 24):
        text, _, rest = (rest + data).rpartition(b"\n")
        yield from _parse_csv(file, text, dtype)
    yield from _parse_csv(file, rest, dtype)


def _parse_csv(file, text, dtype):
    text = text.strip()
    if text:
        columns = text.partition(b"\n")[0].count(b",") + 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                yield np.fromstring(text.replace(b"\n", b","), dtype, sep=",").reshape(-1, columns)
        except (ValueError, DeprecationWarning) as error:
            raise StoreError(f"{file.name} is no table of {columns} columns of {np.dtype(dtype)}: {error}") from error


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


def _spool(file, shape, dtype, chunks) -> np.memmap:
    """Put chunks into a temporary file, for an array that is read several times and does not fit into memory."""
    with open(file, "wb") as out:
        out.writelines(np.ascontiguousarray(chunk, dtype).reshape(-1).data for chunk in chunks)
    if shape[0] is None:
        shape = (file.stat().st_size // (shape[1] * np.dtype(dtype).itemsize), shape[1])
    if file.stat().st_size != shape[0] * shape[1] * np.dtype(dtype).itemsize:
        raise StoreError(f"the edge list has {file.stat().st_size} bytes, which is not {list(shape)} numbers; remove "
                         "its archive to have it downloaded again")
    return np.memmap(file, dtype, "r", shape=tuple(shape))


def _download(url, target, progress):
    """Fetch a URL into a file, resuming what an earlier try left in target.part; does nothing if it is there."""
    part = Path(f"{target}.part")
    if target.is_file():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        have = part.stat().st_size if part.is_file() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.status != 206:  # a server without ranges sends everything again
                have = 0
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            with open(part, "ab" if have else "wb") as file, \
                    tqdm(total=total, initial=have, desc=target.name, unit="B", unit_scale=True,
                         disable=None if progress else True) as bar:
                while data := response.read(1 << 20):
                    file.write(data)
                    bar.update(len(data))
                size = file.tell()
        if total is not None and size != total:
            raise StoreError(f"the download of {url} stopped at {size} of {total} bytes; run it again to go on from "
                             "there")
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise StoreError(f"cannot download {url}: the server answers {error.code} {error.reason}") from error
        part.unlink()  # longer than the file: it belongs to another version
        raise StoreError(f"{part} did not fit {url} and was removed; run it again") from error
    except (OSError, http.client.HTTPException) as error:
        raise StoreError(f"the download of {url} failed: {error}; run it again to go on from where it stopped, or put "
                         f"the file at {target}") from error
    os.replace(part, target)


def main(argv=None) -> int:
    """The command line: build a data set and print the path of its store."""
    parser = argparse.ArgumentParser(prog="datasets.py", description="Build a data set and print where its store is.")
    parser.add_argument("dataset", help=f"a path, or one of {', '.join(known_datasets())}")
    parser.add_argument("--root", default="data", help="directory for downloads and stores")
    parser.add_argument("--backend", default="mmap", choices=list(store.BACKENDS), help="of the features")
    parser.add_argument("--seed", type=int, default=0, help="draws the split of a data set without one")
    args = parser.parse_args(argv)
    try:
        print(prepare(args.dataset, args.root, seed=args.seed, backend=args.backend))
    except StoreError as error:
        print(f"datasets.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
