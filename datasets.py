"""A name, a path or a graph at hand -> a store directory.

    path = prepare("synthetic")                                  # planted communities, no download
    path = prepare("synthetic:nodes=2449029,degree=50,features=100,classes=47")
    path = prepare("ogbn-products", root="data")                 # ogbn-arxiv, ogbn-products, ogbn-papers100M
    path = prepare("cora")                                       # cora, citeseer, pubmed: the original Planetoid files
    path = prepare("mine.npz")                                   # edge_index, features, labels, train_idx, ...
    path = prepare("some/store")                                 # a store is taken as it is
    path = build(dgl_graph_or_pyg_data, "some/store")            # or mine.npz, or edges.csv.gz with features, labels

    python datasets.py NAME [--root DIR] [--backend mmap|lmdb] [--seed N] [--symmetrize]

`prepare` builds a store under `root` the first time it is asked for, `build` at a path of your own. A store holds a
graph once, with all the splits that it came with, or with none: `choose_split` takes one of them, or draws one by a
seed.

Letters: V nodes and M edges of the graph, F feature width, C classes. This file needs store.py, arrays.py,
synthetic.py, molecules.py, graph_tables.py and downloads.py.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

import graph_tables
from arrays import FEATURES, LABELS, PARTS, Arrays, Npz
from csc import without_reverse
from disk import READABLE, StoreError, check_split, read_meta, refuse_existing, scratch_folder, sha256_of
from downloads import OGB, PLANETOID, build_ogb, build_planetoid
from molecules import build_crystals, build_molecules
from store import BACKENDS, GraphStore, build_store, check_labels, command
from synthetic import SYNTHETIC, build_synthetic

TABLE = re.compile(r"\.(csv|tsv|txt|parquet)(\.(gz|bz2|xz))?$", re.IGNORECASE)  # names of files with tables
DRAWN = "20 nodes of each class for training, 30 for validation, the rest for testing"
NPZ = dict(  # what may follow the name of an .npz file, as in mine.npz:split=3,ignore=edge_weight+time
    row_normalize=int,  # 1: divide each row of a CSR matrix by its sum, 0: leave it; by default counts are divided
    radius=float,  # of the neighbourhood of an atom in a crystal, angstrom
    split=int,  # keep one of several splits alone, from 0
    ignore=lambda names: names.split("+"),  # arrays to do without
)


def prepare(dataset, root="data", *, seed=0, backend="mmap", symmetrize=False, progress=True) -> Path:
    """Find the store of a data set, building it (and downloading what it is made of) when it is not there yet.

    Args:
        dataset: a store directory; `synthetic` with optional parameters (`synthetic:nodes=1000000,degree=50`, see
            `SYNTHETIC`); the path of an .npz file (see `build`), with parameters of `NPZ`; or one of the names in
            `known_datasets()`.
        root: directory for downloads and for the stores built here.
        seed: draws what an .npz file leaves open, except the split of a graph (`choose_split` draws that); a synthetic
            graph has its own seed parameter.
        backend: "mmap" or "lmdb", for the features.
        symmetrize: add the reverse of every edge, for .npz files of one graph.
        progress: show bars.

    Returns:
        The path of the store.

    Raises:
        StoreError: for an unknown name, malformed parameters or data, an option without effect, a failed download.
    """
    name, root = str(dataset), Path(root)
    if os.path.isfile(os.path.join(name, "meta.json")):
        changed = backend == "lmdb" and read_meta(name).get("backend") != backend
        for flag, idle in (("--symmetrize", symmetrize), (f"--backend {backend}", changed)):
            if idle:
                raise StoreError(f"{flag} has no effect on {name}: it is a store already; build it anew with it")
        return Path(dataset)
    if backend not in BACKENDS:
        raise StoreError(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    word, _, parameters = name.partition(":")
    if file := _npz_file(name):
        file, given = file
        arrays = Arrays(file, Npz(file), given.get("ignore", ()))
        drawn = int(seed) if _draws(arrays) else None  # the split of one graph alone is drawn when it is opened
        content = sha256_of(file).hexdigest()  # a changed file is another data set
        key = f"{Path(file).stem[:100]}-{_digest([content, given, drawn, bool(symmetrize)])}"
        build = functools.partial(_build_arrays, arrays=arrays, given=given, seed=drawn, symmetrize=symmetrize)
    elif symmetrize and word in known_datasets():
        raise StoreError(f"--symmetrize has no effect on {word}: it is for files of your own")
    elif word == "synthetic":
        parameters = {**SYNTHETIC, **_parse(parameters, {key: type(value) for key, value in SYNTHETIC.items()}, word)}
        key, build = f"{word}-{_digest(parameters)}", functools.partial(build_synthetic, parameters=parameters)
    elif word in known_datasets():
        _parse(parameters, {}, word)
        key = f"{word}-{_digest(word)}"
        build = functools.partial(build_planetoid if word in PLANETOID else build_ogb, name=word, root=root)
    else:
        raise StoreError(_unknown(name))
    target = root / (key if backend == "mmap" else f"{key}-{backend}")
    if not (target / "meta.json").is_file():
        with _locked(root):  # of several processes one builds, the others wait for it
            if not (target / "meta.json").is_file():
                with _layout(dataset):
                    build(target, backend=backend, progress=progress)
    return target


def choose_split(graph, number=None, *, seed=0, turn=0, say=lambda line: None):
    """Have an open GraphStore hold the split to train with.

    Args:
        graph: of `prepare`.
        number: which of the splits it came with, counted from 0; None: the one whose turn it is.
        seed: draws the split of a graph that came without one.
        turn: the number of the run, from 0: each takes another of the splits, the first again after the last.
        say: function of a line that says what was taken, where there was a choice.

    Raises:
        StoreError: for a number that is not there.
    """
    drawn = isinstance(graph.meta.get("source"), dict) and graph.meta["source"].get("split") == DRAWN
    if number is not None and (drawn or graph.num_splits == 1):
        raise StoreError(f"--split {number} has no effect: {graph.path} has {'no' if drawn else 'one'} split")
    if drawn:
        graph.split = {name: torch.from_numpy(np.ascontiguousarray(ids))
                       for name, ids in _split_per_class(graph.labels.numpy(), np.random.default_rng(seed)).items()}
        say(f"split   {DRAWN}, by seed {seed}")
    elif graph.num_splits > 1:
        taken = turn % graph.num_splits if number is None else number
        graph.take_split(taken)
        another = "; --split K takes another" if number is None else ""
        say(f"split   number {taken} of {graph.num_splits}, counted from 0{another}")


def known_datasets() -> list[str]:
    """The names that `prepare` knows, besides paths."""
    return ["synthetic", *PLANETOID, *OGB]


def _unknown(name) -> str:
    """The sentence for a name that is no data set."""
    if os.path.isdir(name):
        return f"{name} is a folder without meta.json, so no store: give a store, or a file to build one of"
    if os.path.isfile(name) and TABLE.search(name):
        return (f"{name} is no .npz file; a table of edges needs features and labels as well, so build a store: "
                f"python store.py build {name} my_store --features x.csv --labels y.csv")
    if os.path.isfile(name):
        return (f"{name} is neither an .npz file nor a table (.csv, .tsv, .txt, .parquet): load it in Python and build "
                "a store of it, datasets.build(data, 'my_store') of a DGLGraph or a PyG Data, "
                "store.build_store('my_store', ...) of arrays")
    names = ", ".join(known_datasets())
    return f"dataset {name!r} is unknown: it is neither a store nor an .npz file, nor one of {names}"


@contextlib.contextmanager
def _layout(source):
    """Say in one sentence that a source does not hold what its reader expects."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{source} does not hold a graph in the layout expected: {error}") from error


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


def _parse(text, types, name) -> dict:
    """`a=1,b=2` -> the values that are given, each of its type."""
    values = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in types or not equals:
            raise StoreError(f"{name} has no parameter {item!r}: " +
                             (f"write NAME=VALUE with {', '.join(types)}" if types else "it takes none"))
        if key in values:
            raise StoreError(f"{name}: {key} is given twice")
        try:
            number = float(value) if types[key] is int and "e" in value else value
            values[key] = types[key](number)
            if isinstance(number, float) and number != values[key]:
                raise ValueError
        except (ValueError, OverflowError):
            raise StoreError(f"{name}: {key}={value!r} is no {types[key].__name__}") from None
    return values


def _digest(value) -> str:
    """Eight characters that stand for a JSON value and for the oldest format of a store that can still be read."""
    return hashlib.sha256(json.dumps([READABLE[0], value], sort_keys=True).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# a graph of one's own: .npz, csv, DGL, PyG


def build(source, path, *, features=None, labels=None, split=None, ignore=(), seed=None, weights=None, times=None,
          edge_features=None, node_times=None, **options) -> Path:
    """Build a store at a path of your own.

    An .npz file, a PyG `Data` and a DGLGraph hold arrays under these names (DGL has its own for edges): `edge_index`
    [2, M], or `edges` [M, 2]; `features`, `x`, `feat` or `node_features` [V, F], or a CSR matrix in `feat_indptr`,
    `feat_indices`, and perhaps `feat_shape` and `feat_data`; `labels`, `y`, `label` or `node_labels` [V]; perhaps what
    edges carry, by the names in `arrays.OF_EDGES`, and `node_time` [V] (in DGL's ndata `time` as well); and perhaps
    `train_idx`, `train_mask` or `train_masks` [K, V], with `val_...` or `valid_...`, and `test_...`; all K splits are
    kept. Without a split, 20 nodes per class are drawn for train, 30 for valid, the rest is test. In an .npz file
    without features, half of the training nodes get their label as a one-hot feature, the other half stay for training.
    A file with `node_offsets` or `atom_offsets` holds many small graphs: see `build_molecules` and `build_crystals`.
    Arrays that are not understood are named, and refused where they seem to say something of edges, splits, features or
    labels.

    Args:
        source: a DGLGraph; a PyG `Data`; an .npz file, with parameters of `NPZ` behind a colon; or a table of edges in
            a file (see `graph_tables.edges`), csv for short.
        path: directory of the store.
        features: [V, F] instead of the graph's; for csv the file of a table (see `graph_tables.features`).
        labels: [V] instead of the graph's; for csv such a file.
        split: dict of node ids or masks instead of the graph's, for csv of files of ids; or the number, from 0, of
            the one of the graph's splits that is kept.
        ignore: names of arrays to do without.
        seed: draws the split where there is none; 0 when None.
        weights, times, edge_features: for csv: columns of the table of edges, by name or by number from 1 (several,
            with commas between them, for features), or the file of a table with a row for each edge.
        node_times: for csv: the file of a table with a time for each node.
        options: of `build_store`: backend, symmetrize, drop_self_loops, drop_duplicates, num_classes, progress.

    Returns:
        The path of the store.

    Raises:
        StoreError: for a source that is none of these or does not hold a graph, and for an option without effect.
    """
    path, kind = Path(path), str(source) if isinstance(source, (str, os.PathLike)) else type(source).__name__
    refuse_existing(path)
    given = {"ignore": list(ignore)} if ignore else {}
    own = {name: value for name, value in (("features", features), ("labels", labels)) if value is not None}
    tables = {"edge_weight": weights, "edge_time": times, "edge_features": edge_features, "node_time": node_times}
    tables = {name: value for name, value in tables.items() if value is not None}
    if tables and (kind != str(source) or _npz_file(kind)):
        raise StoreError(f"{kind}: weights, times and edge_features are for tables: it brings its own arrays")
    if isinstance(split, dict):
        own |= {f"{part}_idx": ids for part, ids in split.items()}
    elif split is not None:
        given["split"] = int(split)
    with _layout(kind):
        if kind != str(source):
            replaced = {*(FEATURES if "features" in own else ()), *(LABELS if "labels" in own else ()),
                        *(itertools.chain(*PARTS.values()) if isinstance(split, dict) else ())}  # fmt: skip
            arrays = {name: value for name, value in _arrays_of(source).items() if name not in replaced}
            arrays = Arrays(kind, {**arrays, **own}, ignore)
            for name, names in (("features", FEATURES), ("labels", LABELS)):
                if not arrays.find(*names):
                    raise StoreError(f"the {kind} has no {name}: give them as {name}=")
        elif npz := _npz_file(kind):
            kind, given = npz[0], {**npz[1], **given}
            arrays = Arrays(kind, Npz(kind), given.get("ignore", ()))
            if own:
                raise arrays.error(f"it holds features, labels and split itself: {min(own)} beside it has no effect")
        elif not TABLE.search(kind):
            raise StoreError(f"{kind} is no source: give an .npz file, a table (.csv, .tsv or .txt, also with .gz, "
                             ".bz2 or .xz; .parquet), a DGLGraph or a PyG Data")
        elif given:
            raise StoreError(f"{kind}: {min(given)} has no effect on tables: leave it out")
        else:
            return _build_tables(path, kind, own, tables, seed, options)
        return _build_arrays(path, arrays, given, seed, **options)


def _npz_file(text):
    """(file, its parameters) of `mine.npz:split=3`; None for what is no .npz file."""
    found = re.fullmatch(r"(.*\.npz)(?::(.*))?", text, re.DOTALL)
    return found and (found[1], _parse(found[2] or "", NPZ, found[1]))


def _arrays_of(source) -> dict:
    """The arrays of a DGLGraph or a PyG Data by the names that an .npz file has for them."""
    if hasattr(source, "ndata"):
        if len(source.canonical_etypes) != 1 or len(source.ntypes) != 1:
            raise StoreError(f"the DGLGraph has {len(source.ntypes)} kinds of nodes and {len(source.canonical_etypes)} "
                             "of edges: one of each is needed (dgl.to_homogeneous)")
        edges = source.formats(["coo", "csr", "csc"]).edges()  # a graph may be there in some of them only
        edata = {f"edata.{name}": value for name, value in source.edata.items() if name != "_ID"}  # DGL's own numbers
        ndata = {"node_time" if name == "time" else name: value for name, value in source.ndata.items()}
        return {"edge_index": torch.stack(edges), "num_nodes": source.num_nodes(), **ndata, **edata}
    if not hasattr(source, "edge_index") and not hasattr(source, "adj_t"):
        raise StoreError(f"a {type(source).__name__} is no source: give an .npz or .csv file, a DGLGraph or a PyG Data")
    return dict(source.to_dict() if hasattr(source, "to_dict") else vars(source))


def _draws(arrays, split=False) -> bool:
    """Whether a seed decides on what is in a store: a part of the split of many graphs, or which training nodes of a
    graph show their label; with `split`, whether on the split of one graph."""
    many = arrays.find("node_offsets", "atom_offsets")
    if many:
        return not (arrays.part("train") and arrays.part("valid"))
    return not arrays.find(*FEATURES) or split and not arrays.part("train")


def _build_arrays(path, arrays, given, seed, *, more=None, backend="mmap", progress=False, **options) -> Path:
    """Build a store of `Arrays`, of one graph or of many small ones.

    Args:
        given: dict, parameters of `NPZ`. seed: draws what is left open; None where none was asked for: then the split
            of a graph is drawn when it is opened.
        more: dict, what meta.json keeps of the source beside that. options: of `build_store`.
    """
    drawn, many = _draws(arrays, seed is not None), arrays.find("node_offsets", "atom_offsets")
    later = not many and not drawn and not arrays.part("train") and arrays.find(*LABELS) is not None
    if seed is not None and not drawn:
        raise arrays.error(f"seed {seed} has no effect: it has a split, and nothing else is drawn")
    understood = {None: ["row_normalize"], "node_offsets": [], "atom_offsets": ["radius"]}[many]
    idle = {name for name in given if name not in ("split", "ignore", *understood)}
    idle |= {name for name, value in options.items() if many and value}
    if idle:
        raise arrays.error(f"{min(idle)} has no effect: it holds {'many small graphs' if many else 'one graph'}")
    seed, more = seed or 0, {**(more or {}), **({"split": DRAWN} if later else {})}
    source = {"dataset": Path(arrays.source).name, **given, **({"seed": seed} if drawn else {}), **more}
    if many:
        build = build_molecules if many == "node_offsets" else build_crystals
        return build(path, arrays, given, seed, source, progress=progress)
    return _build_graph(path, arrays, given, seed, source, backend=backend, progress=progress, **options)


def _build_graph(path, arrays, given, seed, source, *, num_classes=None, symmetrize=False, **options) -> Path:
    """Build a store of the `Arrays` of one graph, and say what was drawn and what messages cannot do."""
    labels, features = arrays.labels(), arrays.features(given.get("row_normalize"))
    if labels is None and features is None:
        arrays.find(*FEATURES, needed=True)
    what, rows = ("rows of features", features) if labels is None else ("labels", labels)
    num_nodes = (*rows.shape, 0)[0]
    num_classes, edge_index = check_labels(labels, num_nodes, num_classes)[1], arrays.edge_index(num_nodes)
    split = arrays.split(num_nodes, given.get("split"))
    if arrays.find("num_nodes") and (count := arrays.integers("num_nodes").item()) != num_nodes:
        raise arrays.error(f"num_nodes is {count}, and there are {num_nodes} {what}")
    if labels is not None and labels.ndim == 1:
        empty = np.flatnonzero(np.bincount(labels[labels >= 0], minlength=num_classes) == 0)
        if len(empty):
            which = "".join(f" {number}," for number in empty[:3])[:-1] + ", ..." * (len(empty) > 3)
            arrays.say(f"{len(empty)} of {num_classes} classes have no node:{which}")
    columns = arrays.columns(num_nodes, edge_index.shape[-1])
    arrays.close(num_nodes, edge_index.shape[-1])
    random = np.random.default_rng(seed)
    if labels is None:
        arrays.say("it has no labels: a trained model can predict on it, and --task link can learn from its edges")
    elif not split:
        split = _split_per_class(labels, random)
        arrays.say(
            f"it has no split: {DRAWN} are drawn ({'by --seed of train.py' if 'split' in source else f'seed {seed}'})"
        )
    if features is None:
        if labels.ndim == 2 or isinstance(split, list):
            raise arrays.error("it has no features, and labels stand for them only with one label a node and one split")
        split = check_split(split, labels)
        symmetrize = options["drop_duplicates"] = True
        known, split["train"] = np.split(random.permutation(split["train"]), [len(split["train"]) // 2])
        features = np.zeros((num_nodes, num_classes), np.float32)
        features[known, labels[known]] = 1
        source["features"] = "labels of half of the training nodes"
        arrays.say(f"it has no features: half of the training nodes ({len(known):,}) show their label as feature, the "
                   f"other {len(split['train']):,} are trained on; edges are made symmetric")
    build_store(path, edge_index=edge_index, features=features, labels=labels, split=split, num_classes=num_classes,
                source=source, symmetrize=symmetrize, **columns, **options)
    if not symmetrize:
        graph = GraphStore.open(path)
        alone, of = without_reverse(graph.indptr.numpy(), graph.indices.numpy(), ascending=graph.edge_time is None)
        if alone:
            drawn = "" if of == graph.num_edges else " drawn at random"
            arrays.say(f"{alone:,} of {of:,} edges{drawn} have no reverse: messages go one way, from source to "
                       "destination; --symmetrize adds the reverses")
    return path


def _split_per_class(labels, random) -> dict:
    """20 nodes per class for train, 30 for valid, the rest of those with a label for test."""
    if labels.ndim == 2:
        raise StoreError("nodes with several labels each need a split of their own: train_idx, val_idx, test_idx")
    order = np.argsort(labels, kind="stable")
    order = order[np.searchsorted(labels[order], 0):]
    classes = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    train, valid, test = zip(*(np.split(random.permutation(nodes), [20, 50]) for nodes in classes))
    return dict(train=np.concatenate(train), valid=np.concatenate(valid), test=np.sort(np.concatenate(test)))


def _build_tables(path, file, own, more, seed, options) -> Path:
    """Build a store of a table of edges; `own` names the files of the other tables, `more` files or columns."""
    if "features" not in own:
        raise StoreError(f"{file} holds edges alone: features are needed as well, a line for each node")
    try:
        with scratch_folder(path) as folder:
            rows, nodes = graph_tables.features(own["features"], folder / "features")
            labels, classes = graph_tables.labels(own["labels"], nodes) if "labels" in own else (None, None)
            node_time = more.pop("node_time", None)
            files = {name: value for name, value in more.items() if os.path.isfile(value)}
            keep = {name: value.split(",") if name == "edge_features" else [value] for name, value in more.items()
                    if name not in files}  # fmt: skip
            edge_index, columns = graph_tables.edges(file, folder / "edges", nodes, keep)
            columns |= {name: graph_tables.edge_rows(table, folder / name, name) for name, table in files.items()}
            if node_time is not None:
                columns["node_time"] = graph_tables.node_times(node_time, nodes)
            split = {name: graph_tables.ids(ids, nodes) for name, ids in own.items() if name.endswith("_idx")}
            arrays = Arrays(
                file,
                dict(
                    edge_index=edge_index,
                    features=rows,
                    **({} if labels is None else {"labels": labels}),
                    **split,
                    **columns,
                ),
            )
            options |= {"node_names": nodes.names}
            return _build_arrays(path, arrays, {}, seed, more={"classes": classes} if classes else None, **options)
    except OSError as error:
        raise StoreError(f"cannot build {path} from {file}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def main(argv=None) -> int:
    """The command line: build a data set and print the path of its store."""
    parser = argparse.ArgumentParser(prog="datasets.py", description="Build a data set and print where its store is.")
    parser.add_argument("dataset", help=f"a path, or one of {', '.join(known_datasets())}")
    parser.add_argument("--root", default="data", help="directory for downloads and stores")
    parser.add_argument("--backend", default="mmap", choices=list(BACKENDS), help="of the features")
    parser.add_argument("--seed", type=int, default=0, help="draws the split of a data set without one")
    parser.add_argument("--symmetrize", action="store_true", help="add the reverse of every edge of an .npz file")
    args = vars(parser.parse_args(argv))
    return command("datasets.py", lambda: print(prepare(args.pop("dataset"), args.pop("root"), **args)))


if __name__ == "__main__":
    sys.exit(main())
