"""A name, a path or a graph at hand -> a store directory.

    path = prepare("synthetic")                                  # planted communities, no download
    path = prepare("synthetic:nodes=2449029,degree=50,features=100,classes=47")
    path = prepare("ogbn-products", root="data")                 # ogbn-arxiv, ogbn-products, ogbn-papers100M
    path = prepare("cora")                                       # cora, citeseer, pubmed: the original Planetoid files
    path = prepare("mine.npz")                                   # edge_index, features, labels, train_idx, ...
    path = prepare("some/store")                                 # a store is taken as it is
    path = build(dgl_graph_or_pyg_data, "some/store")            # or mine.npz, or edges.csv.gz with features, labels

    python -m sources.prepare NAME [--root DIR] [--backend mmap|lmdb] [--seed N] [--symmetrize] [--drop-duplicates]

`prepare` builds a store under `root` the first time it is asked for, `build` at a path of your own. A store holds a
graph once, with all the splits that it came with, or with none: `choose_split` takes one of them, or draws one by a
seed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

from disk.files import READABLE, StoreError, read_meta, reading, sha256_of
from sources.arrays import Arrays, open_npz
from sources.build import TABLE, build, build_arrays, draws, npz_file, parse
from sources.ogb import OGB, build_ogb
from sources.planetoid import PLANETOID, build_planetoid
from sources.splits import choose_split, say_empty_parts
from sources.synthetic import SYNTHETIC, build_synthetic
from store import BACKENDS, command

__all__ = ["build", "choose_split", "known_datasets", "prepare", "say_empty_parts"]


def prepare(
    dataset,
    root="data",
    *,
    seed=0,
    backend="mmap",
    symmetrize=False,
    drop_duplicates=False,
    progress=True,
) -> Path:
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
        drop_duplicates: keep one of several equal edges, for such files.
        progress: show bars.
    """
    name, root = str(dataset), Path(root)
    options = {"symmetrize": symmetrize, "drop_duplicates": drop_duplicates}
    options = {option: True for option, on in options.items() if on}
    flags = [f"--{option.replace('_', '-')}" for option in options]
    if os.path.isfile(os.path.join(name, "meta.json")):
        if backend == "lmdb" and read_meta(name).get("backend") != backend:
            flags.append(f"--backend {backend}")
        if flags:
            raise StoreError(
                f"{flags[0]} has no effect on {name}: it is a store already; build it anew with it"
            )
        return Path(dataset)
    if backend not in BACKENDS:
        raise StoreError(f"backend {backend!r} is unknown: choose one of {', '.join(BACKENDS)}")
    key, build = _recipe(name, root, int(seed), options)
    target = root / (key if backend == "mmap" else f"{key}-{backend}")
    if not (target / "meta.json").is_file():
        with _locked(root):  # of several processes one builds, the others wait for it
            if not (target / "meta.json").is_file():
                with reading(dataset):
                    build(target, backend=backend, progress=progress)
    return target


def _recipe(name, root, seed, options):
    """(name of the store's folder, function that builds it) of a data set."""
    word, _, parameters = name.partition(":")
    if file := npz_file(name):
        file, given = file
        arrays = Arrays(file, open_npz(file), given.get("ignore", ()))
        # the split of one graph alone is drawn when it is opened
        drawn = seed if draws(arrays) else None
        content = sha256_of(file).hexdigest()  # a changed file is another data set
        key = [content, given, drawn, "symmetrize" in options]
        key += ["drop_duplicates"] * ("drop_duplicates" in options)
        build = functools.partial(build_arrays, arrays=arrays, given=given, seed=drawn, **options)
        return f"{Path(file).stem[:100]}-{_digest(key)}", build
    if word not in known_datasets():
        raise StoreError(_unknown(name))
    if options:
        flag = next(iter(options)).replace("_", "-")
        raise StoreError(f"--{flag} has no effect on {word}: it is for files of your own")
    if word == "synthetic":
        types = {name: type(value) for name, value in SYNTHETIC.items()}
        given = {**SYNTHETIC, **parse(parameters, types, word)}
        return f"{word}-{_digest(given)}", functools.partial(build_synthetic, parameters=given)
    parse(parameters, {}, word)
    make = build_planetoid if word in PLANETOID else build_ogb
    return f"{word}-{_digest(word)}", functools.partial(make, name=word, root=root)


def known_datasets() -> list[str]:
    """The names that `prepare` knows, besides paths."""
    return ["synthetic", *PLANETOID, *OGB]


def _unknown(name) -> str:
    """The sentence for a name that is no data set."""
    if os.path.isdir(name):
        return f"{name} is a folder without meta.json, so no store: give a store, or a file to build one of"
    if os.path.isfile(name) and TABLE.search(name):
        return (
            f"{name} is no .npz file; a table of edges needs features and labels as well, so build a store: "
            f"python store.py build {name} my_store --features x.csv --labels y.csv"
        )
    if os.path.isfile(name):
        return (
            f"{name} is neither an .npz file nor a table (.csv, .tsv, .txt, .parquet): load it in Python and build "
            "a store of it, datasets.build(data, 'my_store') of a DGLGraph or a PyG Data, "
            "store.build_store('my_store', ...) of arrays"
        )
    names = ", ".join(known_datasets())
    return (
        f"dataset {name!r} is unknown: it is neither a store nor an .npz file, nor one of {names}"
    )


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


def _digest(value) -> str:
    """Eight characters that stand for a JSON value and for the oldest format of a store that can still be read."""
    return hashlib.sha256(json.dumps([READABLE[0], value], sort_keys=True).encode()).hexdigest()[:8]


# ---------------------------------------------------------------------------------------------------------------------
# the command line


def main(argv=None) -> int:
    """The command line: build a data set and print the path of its store."""
    parser = argparse.ArgumentParser(
        prog="sources.prepare", description="Build a data set and print where its store is."
    )
    parser.add_argument("dataset", help=f"a path, or one of {', '.join(known_datasets())}")
    parser.add_argument("--root", default="data", help="directory for downloads and stores")
    parser.add_argument("--backend", default="mmap", choices=list(BACKENDS), help="of the features")
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the split of a data set without one"
    )
    parser.add_argument(
        "--symmetrize", action="store_true", help="add the reverse of every edge of an .npz file"
    )
    parser.add_argument(
        "--drop-duplicates",
        action="store_true",
        help="keep one of several equal edges of such a file",
    )
    args = vars(parser.parse_args(argv))
    return command(
        "sources/prepare.py", lambda: print(prepare(args.pop("dataset"), args.pop("root"), **args))
    )


if __name__ == "__main__":
    sys.exit(main())
