"""A graph at hand -> a store: an .npz file, tables, a DGLGraph, a PyG Data.

    path = build("mine.npz:split=3", "some/store", symmetrize=True)
    path = build("edges.csv.gz", "some/store", features="x.csv.gz", labels="y.csv", weights="w")

V nodes and M edges of the graph, F features, C classes, K splits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import torch

from disk.checks import check_labels, check_split
from disk.files import StoreError, read_meta, reading, refuse_existing, scratch_folder
from sources import graph_tables
from sources.arrays import FEATURES, LABELS, Arrays, open_npz
from sources.molecules import build_crystals, build_molecules
from sources.splits import DRAWN, PARTS, drawn_per_class, found
from store import build_store

# names of files with tables
TABLE = re.compile(r"\.(csv|tsv|txt|parquet)(\.(gz|bz2|xz))?$", re.IGNORECASE)
# what may follow the name of an .npz file, as in mine.npz:split=3,ignore=edge_weight+time
NPZ = dict(
    # 1: divide each row of a CSR matrix by its sum, 0: leave it; by default counts are divided
    row_normalize=int,
    radius=float,  # of the neighbourhood of an atom in a crystal, angstrom
    split=int,  # keep one of several splits alone, from 0
    ignore=lambda names: names.split("+"),  # arrays to do without
)


def build(source, path, *, features=None, labels=None, split=None, ignore=(), seed=None, **options):
    """Build a store at a path of your own -> its path.

    docs/data.md lists the names that arrays may have, and what is drawn where there is no split or no feature. Many
    small graphs: see `build_molecules` and `build_crystals`.

    Args:
        source: a DGLGraph; a PyG `Data`; an .npz file, with parameters of `NPZ` behind a colon; or a table of edges.
        path: directory of the store.
        features, labels: [V, F] and [V] instead of the graph's; for tables of edges the files of such tables.
        split: dict of node ids or masks instead of the graph's, for tables of files of ids; or the number, from 0, of
            the one of the graph's splits that is kept.
        ignore: names of arrays to do without.
        seed: draws the split where there is none; 0 when None.
        options: of `build_store` (backend, symmetrize, drop_self_loops, drop_duplicates, num_classes, progress); and
            for tables weights, times, edge_features: columns of the table of edges, by name or by number from 1
            (several, with commas between them, for features), or the file of a table with a row for each edge;
            node_times: the file of a table with a time for each node.
    """
    path, is_file = Path(path), isinstance(source, (str, os.PathLike))
    kind = str(source) if is_file else type(source).__name__
    refuse_existing(path)
    given = {"ignore": list(ignore)} if ignore else {}
    own = {"features": features, "labels": labels}
    if isinstance(split, dict):
        own |= {f"{part}_idx": ids for part, ids in split.items()}
    elif split is not None:
        given["split"] = int(split)
    own = {name: value for name, value in own.items() if value is not None}
    columns = dict(weights="weight", times="time", edge_features="features", node_times="")
    columns = {
        f"edge_{name}" if name else "node_time": value
        for option, name in columns.items()
        if (value := options.pop(option, None)) is not None
    }
    npz = npz_file(kind) if is_file else None
    if columns and (npz or not is_file):
        raise StoreError(
            f"{kind}: weights, times and edge_features are for tables: it brings its own arrays"
        )
    with reading(kind):
        if is_file and not npz:
            if given:
                raise StoreError(f"{kind}: {min(given)} has no effect on tables: leave it out")
            return _build_tables(path, kind, own, columns, seed, options)
        if npz and own:
            raise StoreError(
                f"{kind}: it holds features, labels and split itself: {min(own)} beside it has no effect"
            )
        if npz:
            kind, given = npz[0], {**npz[1], **given}
            arrays = Arrays(kind, open_npz(kind), given.get("ignore", ()))
        else:
            arrays = _of_object(source, kind, own, ignore)
        return build_arrays(path, arrays, given, seed, **options)


def npz_file(text):
    """(file, its parameters) of `mine.npz:split=3`; None for what is no .npz file."""
    parts = re.fullmatch(r"(.*\.npz)(?::(.*))?", text, re.DOTALL)
    return parts and (parts[1], parse(parts[2] or "", NPZ, parts[1]))


def parse(text, types, name) -> dict:
    """`a=1,b=2` -> the values that are given, each of its type."""
    values = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in types or not equals:
            known = f"write NAME=VALUE with {', '.join(types)}" if types else "it takes none"
            raise StoreError(f"{name} has no parameter {item!r}: {known}")
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


def _of_object(source, kind, own, ignore) -> Arrays:
    """The arrays of a DGLGraph or a PyG Data by the names that an .npz file has for them, `own` in place of theirs."""
    if hasattr(source, "ndata"):
        if len(source.canonical_etypes) != 1 or len(source.ntypes) != 1:
            raise StoreError(
                f"the DGLGraph has {len(source.ntypes)} kinds of nodes and {len(source.canonical_etypes)} "
                "of edges: one of each is needed (dgl.to_homogeneous)"
            )
        # a graph may be there in some of them only
        edges = source.formats(["coo", "csr", "csc"]).edges()
        arrays = {"edge_index": torch.stack(edges), "num_nodes": source.num_nodes()}
        arrays |= {"node_time" if n == "time" else n: value for n, value in source.ndata.items()}
        # without DGL's own numbers
        arrays |= {f"edata.{name}": v for name, v in source.edata.items() if name != "_ID"}
    elif hasattr(source, "edge_index") or hasattr(source, "adj_t"):
        arrays = dict(source.to_dict() if hasattr(source, "to_dict") else vars(source))
        if arrays.get("adj_t") is not None and arrays.get("edge_index") is None:
            arrays |= _of_adjacency(arrays.pop("adj_t"), arrays)
    else:
        raise StoreError(
            f"a graph cannot be read from a {kind}: give the path of an .npz or .csv file, a DGLGraph or a PyG Data"
        )
    replaced = [*(FEATURES if "features" in own else ()), *(LABELS if "labels" in own else ())]
    if any(name.endswith("_idx") for name in own):
        replaced += sum(PARTS.values(), [])
    arrays = {name: value for name, value in arrays.items() if name not in replaced}
    arrays = Arrays(kind, {**arrays, **own}, ignore)
    for name, names in (("features", FEATURES), ("labels", LABELS)):
        if not arrays.find(*names):
            raise StoreError(f"the {kind} has no {name}: give them as {name}=")
    return arrays


def _of_adjacency(matrix, arrays) -> dict:
    """adj_t, a SparseTensor of torch_sparse or of torch, whose row v holds the sources of the edges into v."""
    if isinstance(matrix, torch.Tensor):
        matrix = matrix.to_sparse_csr()
        indptr, indices, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    else:
        indptr, indices, values = matrix.csr()
    edges = torch.stack([indices, torch.repeat_interleave(indptr.diff())])
    if values is None or bool((values == 1).all()):
        values = arrays.get("edge_weight")
    elif arrays.get("edge_weight") is not None:
        raise StoreError("adj_t has values other than 1, beside edge_weight: keep one of them")
    return {"edge_index": edges, "edge_weight": values, "num_nodes": len(indptr) - 1}


def draws(arrays, split=False) -> bool:
    """Whether a seed decides on what is in a store: a part of the split of many graphs, or which training nodes of a
    graph show their label; with `split`, whether on the split of one graph."""
    train, valid = (arrays.find(*PARTS[part]) for part in ("train", "valid"))
    if arrays.find("node_offsets", "atom_offsets"):
        return not (train and valid)
    return not arrays.find(*FEATURES) or split and not train


def build_arrays(path, arrays, given, seed, *, backend="mmap", progress=False, **options) -> Path:
    """Build a store of `Arrays`, of one graph or of many small ones.

    Args:
        given: dict, parameters of `NPZ`. seed: draws what is left open; None where none was asked for: then the split
            of a graph is drawn when it is opened. options: of `build_store`.
    """
    drawn, many = draws(arrays, seed is not None), arrays.find("node_offsets", "atom_offsets")
    no_split = not arrays.find(*PARTS["train"])
    later = not many and not drawn and no_split and arrays.find(*LABELS) is not None
    if seed is not None and not drawn:
        raise arrays.error(f"seed {seed} has no effect: it has a split, and nothing else is drawn")
    understood = {None: ["row_normalize"], "node_offsets": [], "atom_offsets": ["radius"]}[many]
    idle = {name for name in given if name not in ("split", "ignore", *understood)}
    idle |= {name for name, value in options.items() if many and value}
    if idle:
        what = "many small graphs" if many else "one graph"
        raise arrays.error(f"{min(idle)} has no effect: it holds {what}")
    source = {"dataset": Path(arrays.source).name, **given}
    source |= {"seed": seed or 0} if drawn else {}
    source |= {"split": DRAWN} if later else {}
    if many:
        make = build_molecules if many == "node_offsets" else build_crystals
        return make(path, arrays, given, seed or 0, source, progress=progress)
    options |= {"backend": backend, "progress": progress}
    return _build_graph(path, arrays, given, seed or 0, source, **options)


def _build_graph(path, arrays, given, seed, source, *, num_classes=None, **options) -> Path:
    """Build a store of the `Arrays` of one graph, and say what was drawn and what messages cannot do."""
    labels, features = arrays.labels(), arrays.features(given.get("row_normalize"))
    if labels is None and features is None:
        arrays.find(*FEATURES, needed=True)
    what, rows = ("rows of features", features) if labels is None else ("labels", labels)
    num_nodes = (*rows.shape, 0)[0]
    num_classes, edges = check_labels(labels, num_nodes, num_classes)[1], arrays.edge_index()
    if arrays.find("num_nodes") and (count := arrays.integers("num_nodes").item()) != num_nodes:
        raise arrays.error(f"num_nodes is {count}, and there are {num_nodes} {what}")
    split = found(arrays, num_nodes, given.get("split"))
    if labels is not None and labels.ndim == 1:
        empty = np.flatnonzero(np.bincount(labels[labels >= 0], minlength=num_classes) == 0)
        if len(empty):
            which = ", ".join([*map(str, empty[:3]), *["..."] * (len(empty) > 3)])
            arrays.say(f"{len(empty)} of {num_classes} classes have no node: {which}")
    source |= {"classes": arrays.classes} if arrays.classes else {}
    columns = arrays.columns(num_nodes, edges.shape[-1])
    arrays.close(num_nodes, edges.shape[-1])
    random = np.random.default_rng(seed)
    if labels is None:
        arrays.say("it has no labels: a trained model can predict on it, --task link learn from it")
    elif not split:
        split = drawn_per_class(labels, random)
        by = "by --seed of train.py" if "split" in source else f"seed {seed}"
        arrays.say(f"it has no split: {DRAWN} are drawn ({by})")
    if features is None:
        split, features = _labels_as_features(arrays, labels, split, num_classes, random)
        options |= {"symmetrize": True, "drop_duplicates": True}
        source["features"] = "labels of half of the training nodes"
    of_graph = dict(features=features, labels=labels, split=split, num_classes=num_classes)
    build_store(path, edge_index=edges, source=source, **of_graph, **columns, **options)
    counts = read_meta(path)["edges"]
    if counts["one_way"]:
        arrays.say(
            f"{counts['one_way']:,} of {counts['one_way_of']:,} edges have no reverse: messages go one way, from source "
            "to destination; --symmetrize adds the reverses"
        )
    return path


def _labels_as_features(arrays, labels, split, num_classes, random):
    """(split, one-hot labels of half of the training nodes, which are taken out of it)."""
    if labels.ndim == 2 or isinstance(split, list):
        raise arrays.error(
            "it has no features, and labels stand for them only with one label a node and one split"
        )
    split = check_split(split, labels)
    shown, split["train"] = np.split(random.permutation(split["train"]), [len(split["train"]) // 2])
    features = np.zeros((len(labels), num_classes), np.float32)
    features[shown, labels[shown]] = 1
    arrays.say(
        f"it has no features: half of the training nodes ({len(shown):,}) show their label as feature, the "
        f"other {len(split['train']):,} are trained on; edges are made symmetric"
    )
    return split, features


def _build_tables(path, file, own, more, seed, options) -> Path:
    """Build a store of a table of edges; `own` names the files of the other tables, `more` files or columns."""
    if not TABLE.search(file):
        raise StoreError(
            f"{file} cannot be read: give an .npz file, or a table that ends in .csv, .tsv, .txt or .parquet "
            "(.gz, .bz2 or .xz may follow); other formats can be saved as one of these"
        )
    if "features" not in own:
        raise StoreError(
            f"{file} holds edges alone: features are needed as well, a line for each node"
        )
    try:
        with scratch_folder(path) as folder:
            arrays = _read_tables(file, own, more, folder)
            options["node_names"] = arrays.pop("node_names")
            return build_arrays(path, Arrays(file, arrays), {}, seed, **options)
    except OSError as error:
        raise StoreError(f"cannot build {path} from {file}: {error}") from error


def _read_tables(file, own, more, folder) -> dict:
    """The arrays of tables, by the names that an .npz file has for them, and node_names; some are kept in a folder."""
    rows, nodes = graph_tables.features(own.pop("features"), folder / "features")
    arrays = {"features": rows, "node_names": nodes.names}
    if "labels" in own:
        arrays["labels"] = graph_tables.labels(own.pop("labels"), nodes)
    if "node_time" in more:
        arrays["node_time"] = graph_tables.node_times(more.pop("node_time"), nodes)
    files = {name: value for name, value in more.items() if os.path.isfile(value)}
    keep = {name: [value] for name, value in more.items() if name not in files}
    if "edge_features" in keep:
        keep["edge_features"] = more["edge_features"].split(",")
    arrays["edge_index"], columns = graph_tables.edges(file, folder / "edges", nodes, keep)
    arrays |= columns
    for name, table in files.items():
        arrays[name] = graph_tables.edge_rows(table, folder / name, name)
    return arrays | {name: graph_tables.ids(ids, nodes) for name, ids in own.items()}
