"""A name or a path -> a store directory, built under `root` the first time it is asked for.

    path = prepare("synthetic")                                  # planted communities, no download
    path = prepare("synthetic:nodes=2449029,degree=50,features=100,classes=47")
    path = prepare("ogbn-products", root="data")                 # ogbn-arxiv, ogbn-products, ogbn-papers100M
    path = prepare("cora")                                       # cora, citeseer, pubmed: the original Planetoid files
    path = prepare("mine.npz")                                   # edge_index, features, labels, train_idx, ...
    path = prepare("some/store")                                 # a store is taken as it is
    path = build(dgl_graph_or_pyg_data, "some/store")            # or mine.npz, or edges.csv.gz with features, labels

    python datasets.py NAME [--root DIR] [--backend mmap|lmdb] [--seed N]

Letters: V nodes and M edges of the graph, F feature width, C classes. This file needs store.py, graphs.py,
downloads.py, graph_tables.py and tables.py.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np

import graph_tables
from csc import Rows
from disk import SPLITS, VERSION, StoreError, scratch_folder, sha256_of
from downloads import OGB, PLANETOID, build_ogb, build_planetoid
from graphs import build_crystals, build_molecules
from store import BACKENDS, build_store
from tables import ahead, entry


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
    if backend not in BACKENDS:
        raise StoreError(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    if name == "synthetic":
        parameters = _parse(parameters, SYNTHETIC, name)
        key, build = f"{name}-{_digest(parameters)}", functools.partial(build_synthetic, parameters=parameters)
    elif name.endswith(".npz"):
        options = dict(_parse(parameters, NPZ, name), seed=int(seed))
        try:
            content = sha256_of(name).hexdigest()
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
    return hashlib.sha256(json.dumps([VERSION, value], sort_keys=True).encode()).hexdigest()[:8]


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
        path, indptr=indptr, indices=Rows([int(indptr[-1])], np.int64, ahead(edges, p.nodes, nodes_per_chunk)),
        features=Rows([p.nodes, p.features], np.float32, ahead(features, p.nodes, rows_per_chunk)),
        labels=labels, num_classes=p.classes, split=_draw_split(p, stream(7)), backend=backend, progress=progress,
        source=dict(dataset="synthetic", **parameters))


def _draw_split(p, random) -> dict:
    """Random nodes for train and valid, counts or fractions of V; the rest is test."""
    counts = [round(n * p.nodes) if n < 1 else int(n) for n in (p.train, p.valid)]
    if counts[0] < 1 or sum(counts) > p.nodes:
        raise StoreError(f"synthetic: train={p.train:g} and valid={p.valid:g} do not fit {p.nodes} nodes")
    order = random.permutation(p.nodes)
    return {name: np.sort(ids) for name, ids in zip(SPLITS, np.split(order, np.cumsum(counts)))}


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
    edge_index = entry(data, file, "edge_index")
    labels = entry(data, file, "labels", "y").reshape(-1).astype(np.int64, casting="safe")
    features = entry(data, file, "features", "x", "feat", "feat_indptr", default=None)
    names = [("train", ["train_idx"]), ("valid", ["val_idx", "valid_idx"]), ("test", ["test_idx"])]
    split = {name: entry(data, file, *keys, default=None) for name, keys in names}
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
    indptr, indices = data["feat_indptr"].astype(np.int64), entry(data, file, "feat_indices")
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
            (see `build_npz`); or a table of edges in a file (see `graph_tables.edges`), csv for short.
        path: directory of the store.
        features: [V, F], or for csv the file of a table (see `graph_tables.features`). labels: [V], or such a file.
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
        masks = {name: get(mask) for name, mask in zip(SPLITS, ("train_mask", "val_mask", "test_mask"))}
        split = split or {name: mask for name, mask in masks.items() if mask is not None}
        edge_index = [array.numpy() for array in (source.edges() if dgl else source.edge_index)]
        return _build(path, np.stack(edge_index), features, labels, split, seed,
                      dict(dataset=type(source).__name__, seed=seed), options)
    file = str(source)
    if file.endswith(".npz"):
        with _layout(file):
            return build_npz(path, file, dict(NPZ, seed=seed), **options)
    if not re.search(r"\.(csv|tsv|txt|parquet)(\.(gz|bz2|xz))?$", file, re.IGNORECASE):
        raise StoreError(f"{file} is no source: give an .npz file, a table (.csv, .tsv or .txt, also with .gz, .bz2 or "
                         ".xz; .parquet), a DGLGraph or a PyG Data")
    if features is None or labels is None:
        raise StoreError(f"{file} holds edges alone: features and labels are needed as well, a line for each node")
    path = Path(path)
    try:
        with scratch_folder(path) as folder:
            rows, nodes = graph_tables.features(features, folder / "features")
            labels, classes = graph_tables.labels(labels, nodes)
            edge_index, _ = graph_tables.edges(file, folder / "edges", nodes)
            split = {name: graph_tables.ids(ids, nodes) for name, ids in (split or {}).items()}
            if nodes.names is not None:
                nodes.save(folder / "nodes.txt")
            source = dict(dataset=Path(file).name, seed=seed, **({"classes": classes} if classes else {}))
            _build(path, edge_index, rows, labels, split, seed, source, options)
            if nodes.names is not None:
                os.replace(folder / "nodes.txt", path / "nodes.txt")
            return path
    except OSError as error:
        raise StoreError(f"cannot build {path} from {file}: {error}") from error


def _build(path, edge_index, features, labels, split, seed, source, options) -> Path:
    labels = np.asarray(labels).reshape(-1)
    split = {name: np.flatnonzero(ids) if np.asarray(ids).dtype == bool else ids for name, ids in split.items()}
    split = split or _split_per_class(labels, np.random.default_rng(seed))
    return build_store(path, edge_index=edge_index, features=features, labels=labels, split=split, source=source,
                       **options)


# ---------------------------------------------------------------------------------------------------------------------
# OGB


def main(argv=None) -> int:
    """The command line: build a data set and print the path of its store."""
    parser = argparse.ArgumentParser(prog="datasets.py", description="Build a data set and print where its store is.")
    parser.add_argument("dataset", help=f"a path, or one of {', '.join(known_datasets())}")
    parser.add_argument("--root", default="data", help="directory for downloads and stores")
    parser.add_argument("--backend", default="mmap", choices=list(BACKENDS), help="of the features")
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
