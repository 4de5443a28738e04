"""A name, a path or a graph object -> a store directory.

    path = prepare("synthetic:nodes=2449029,degree=50")          # or another of NAMES, an .npz file, a store
    path = build("mine.npz:split=3", "some/store", symmetrize=True)
    path = build("edges.csv.gz", "some/store", features="x.csv.gz", labels="y.csv", weights="w")
    path = build(dgl_graph_or_pyg_data, "some/store")

`prepare` builds a store under `root` on first use, `build` at a path that you give. A store holds a graph once, with
all the splits that it came with; `choose_split` of sources/splits.py selects or draws one.
"""

import difflib
import functools
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np
import torch

from disk import convert, files
from disk.checks import DRAWN, DRAWN_NODES, check_labels, check_split, drawn_nodes
from disk.columns import COLUMNS, EDGE_FEATURES, EDGE_TIME, EDGE_TYPE, NODE_TIME
from disk.files import StoreError, reading
from extras import extra
from sources.arrays import FEATURES, Arrays, equal_sums, from_object, is_list, open_npz
from sources.public import OGB, PLANETOID, ogb, planetoid
from sources.splits import PARTS, found
from sources.synthetic import MAG, SYNTHETIC, synthetic, synthetic_mag
from store import build_store

# what may follow the name of an .npz file, as in mine.npz:split=3,ignore=edge_weight+time
NPZ = dict(
    # 1: scale the rows of a CSR matrix to the same sum; 0: do not; default: only if the values are counts
    row_normalize=int,
    radius=float,  # cutoff for the neighbours of an atom in a crystal, angstrom
    split=int,  # the number, from 0, of the only split to keep
    target=str,  # the node type whose labels are learned, if several types have labels
    ignore=lambda names: names.split("+"),  # arrays to leave out
)
RULES = 1  # changes with what a build makes of the same files: stores of before are built anew
MIRRORED = 0.95  # share of typed edges that have a reverse from which on none is added
GENERATORS = {"synthetic": (SYNTHETIC, synthetic), "synthetic-mag": (MAG, synthetic_mag)}
NAMES = (*GENERATORS, *PLANETOID, *OGB)


def prepare(
    dataset,
    root="data",
    *,
    seed=0,
    backend="mmap",
    symmetrize=False,
    drop_duplicates=False,
    feature_dtype=None,
    progress=True,
) -> Path:
    """Return the path of a data set's store, which is built, after downloads if necessary, if it does not exist yet.

    Args:
        dataset: a store directory; `synthetic` with optional parameters (`synthetic:nodes=1000000,degree=50`, see
            `SYNTHETIC`); the path of an .npz or .pt file (see `build`), with parameters of `NPZ`; or one of NAMES.
        root: directory for downloads and for the stores built here.
        seed: for what is drawn because an .npz file lacks it, except the split of one graph (see `choose_split`); a
            synthetic graph has its own seed parameter.
        symmetrize, drop_duplicates: for .npz files of one graph. backend, feature_dtype, progress: see `build_store`.
    """
    name = str(dataset)
    root = Path(root)
    options = {"symmetrize": bool(symmetrize), "drop_duplicates": bool(drop_duplicates)}
    features = {"backend": backend, "feature_dtype": feature_dtype}
    asked = {option: value for option, value in features.items() if value not in (None, "mmap")}
    if os.path.isfile(os.path.join(name, "meta.json")):
        meta = files.read_meta(name)
        for option, value in {**options, **asked}.items():
            if value and value != {**meta, **meta.get("options", {})}.get(option):
                raise _no_effect(option, name, "it is a store; build it anew")
        return Path(dataset)
    word, key, make = _recipe(name, root, int(seed), options)
    # the oldest readable store format is part of the name: stores of older ones are built anew
    content = json.dumps([files.READABLE[0], key], sort_keys=True).encode()
    target = root / "-".join([word, hashlib.sha256(content).hexdigest()[:8], *asked.values()])
    built = functools.partial(os.path.isfile, target / "meta.json")  # where Path.is_file may raise
    if not built():
        # one process builds, the others wait for the lock
        with reading(f"--root {root}"):
            root.mkdir(parents=True, exist_ok=True)
            with files.locked(root):
                if not built():
                    try:
                        with reading(dataset):
                            make(target, progress=progress, **features)
                    except StoreError:
                        # without locks, as on some network file systems, another may have built it
                        if not built():
                            raise
    return target


def _no_effect(option, name, why) -> StoreError:
    return StoreError(f"--{option.replace('_', '-')} has no effect on {name}: {why}")


def _recipe(name, root, seed, options):
    """Return (name for the store's folder, JSON value that identifies its content, function that builds it)."""
    if npz := npz_file(name):
        file, values = npz
        # the split of one graph is drawn when it is opened
        arrays = open_npz(file, values.get("ignore", ()))
        drawn = seed if _draws(arrays) else None
        # a changed file is another data set
        key = [files.sha256_of(file).hexdigest(), values, drawn, options["symmetrize"], RULES]
        key += ["drop_duplicates"] * options["drop_duplicates"]
        key += ["vectors"] * bool(arrays.find("atom_offsets"))  # stores of before have none
        return Path(file).stem[:100], key, functools.partial(build, name, seed=drawn, **options)
    word, _, parameters = name.partition(":")
    names = {known.lower(): known for known in NAMES}
    word = names.get(word.lower().replace("_", "-"), word)
    if word not in NAMES:
        _refuse_path(name)
        close = difflib.get_close_matches(word.lower(), names, 1)
        meant = f": did you mean {names[close[0]]}? Else" if close else ":"
        raise StoreError(
            f"dataset {name!r} is unknown{meant} "
            f"give one of {', '.join(NAMES)}, a store, an .npz or a .pt file"
        )
    for option in filter(options.get, options):
        raise _no_effect(option, word, "it is for files of your own")
    defaults, draw = GENERATORS.get(word, ({}, None))
    values = parse(parameters, {n: type(value) for n, value in defaults.items()}, word)
    key = defaults | values or word
    if word in PLANETOID:
        key = [word, RULES]

    def make(path, **options):
        if word in OGB:
            with ogb(word, root, options["progress"]) as graph:
                return build_store(path, **graph, **options)
        if word in PLANETOID:
            graph = planetoid(word, root)
            how = equal_sums(torch.from_numpy(graph["features"]))
            print(f"{word}: features come with {how}")
        else:
            graph = draw(key)
        return build_store(path, **graph, **options)

    return word, key, make


def _refuse_path(name):
    """Say what a file or folder is that holds no graph, or that there is none, if a name looks like that of a file."""
    if os.path.isdir(name):
        files.read_meta(name)
    if os.path.exists(name) or os.sep in name or re.search(r"\.\w+$", name):
        with extra(".tables", name).opened(name):  # refuses what is no table
            raise StoreError(
                f"{name} is no store, .npz or .pt file: "
                f"python store.py build {name} my_store --features FILE, if it is a table of edges"
            )


def npz_file(text):
    """Split `mine.npz:split=3` -> (file, its parameters); None if it is no .npz or .pt file."""
    parts = re.fullmatch(r"(.*\.(?:npz|pth?))(?::(.*))?", text, re.DOTALL)
    return parts and (parts[1], parse(parts[2] or "", NPZ, parts[1]))


def parse(text, types, name) -> dict:
    """Parse `a=1,b=2` -> {key: value of its type in `types`}; name: what takes them, for messages."""
    values = {}
    for item in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in types or not equals:
            syntax = f"write NAME=VALUE with {', '.join(types)}" if types else "it takes none"
            raise StoreError(f"{name} has no parameter {item!r}: {syntax}")
        if key in values:
            raise StoreError(f"{name}: {key} is given twice")
        try:
            values[key] = types[key](value)
        except ValueError:
            raise StoreError(f"{name}: {key}={value!r} is no {types[key].__name__}") from None
    return values


def build(
    source,
    path,
    *,
    features=None,
    labels=None,
    targets=None,
    split=None,
    ignore=(),
    seed=None,
    **options,
):
    """Build a store at `path` -> that path.

    docs/data.md lists the names that arrays may have, and what is drawn if there is no split or there are no features.

    Args:
        source: a DGLGraph; a PyG `Data`, or a list of them, which are small graphs; an .npz file, or a .pt file of
            `torch.save(data, file)`, with parameters of `NPZ` after a colon; or a table of edges.
        features, labels: [V, F] and [V] in place of the graph's, if it has one node type; for tables, files of tables;
            for a list of G graphs, labels [G] or [G, T]. targets: in place of labels, numbers to be learned, [V] or [V, T].
        split: dict of node ids or masks in place of the graph's (for tables: of files of ids); or the number, from 0,
            of the only one of the graph's splits to keep.
        ignore: names of arrays to leave out; for tables, of columns.
        seed: for drawing the split if there is none; None: each run draws its own.
        weights, times, types, edge_features: for tables, columns of the table of edges, by name or by number from 1
            (several, with commas between them, for features), or the file of a table with a row for each edge.
        node_times: for tables, the file of a table with a time for each node. options: of `build_store`.
    """
    path = Path(path)
    is_typed = type(source) is dict
    is_file = isinstance(source, (str, os.PathLike))
    kind = str(source) if is_file else type(source).__name__
    if is_typed:
        kind = ", ".join(Path(file).name for file in source.values())
    files.refuse_existing(path)
    params = {"ignore": list(ignore)} if ignore else {}
    given = dict(features=features, labels=labels, targets=targets)
    if isinstance(split, dict):
        given |= {f"{part}_idx": ids for part, ids in convert.by_part("split", split).items()}
    elif split is not None:
        params["split"] = int(split)
    given = {name: values for name, values in given.items() if values is not None}
    columns = {}
    for name, column in COLUMNS.items():
        if (where := options.pop(column.flag, None)) is not None:
            columns[name] = where
    npz = npz_file(kind) if is_file else None
    tables = is_typed or is_file and not npz
    several_types = len(getattr(source, "node_types", getattr(source, "ntypes", [0]))) > 1
    idle = params.keys() - {"ignore"} if tables else columns
    if npz or several_types:  # which hold features, labels and split themselves
        idle = {*given, *idle}
    elif is_list(source):
        idle = {*idle, *given.keys() & {"features"}}
    if idle:
        raise StoreError(f"{kind}: {min(idle)} has no effect on a graph of this kind")
    # large tables pass through files on the disk of the store
    with reading(f"cannot build {path}: {kind}"):
        if tables:
            read_tables = extra(".graph_tables", kind).read_tables
            sources = source if is_typed else {"": given.pop("features", None), ",,": kind}
            arrays = read_tables(sources, given, columns, path.absolute().parent, ignore)
            arrays = Arrays(kind, arrays, files=given)
        elif npz:
            params = {**npz[1], **params}
            arrays = open_npz(npz[0], params.get("ignore", ()))
        else:
            arrays = from_object(source, given, ignore)
        return _build_arrays(path, arrays, params, seed, **options)


def _draws(arrays, split=False) -> bool:
    """Whether the content of a store depends on a seed: a part of the split of many graphs, the training nodes whose
    labels become features or, with `split`, the split of one graph."""
    train, valid = (arrays.find(*PARTS[part]) for part in ("train", "valid"))
    if arrays.find("node_offsets", "atom_offsets"):
        return not (train and valid)
    if arrays.is_typed:
        return split and not any(a.find(*PARTS["train"]) for a in arrays.by_type().values())
    return not arrays.find(*FEATURES) or split and not train


def _build_arrays(path, arrays, params, seed, *, backend="mmap", progress=False, **options) -> Path:
    """Build a store of `Arrays`, of one graph or of many small ones.

    Args:
        params: dict, parameters of `NPZ`. seed: for what is drawn; None: 0, and the split of one graph is drawn when
            its store is opened. options: of `build_store`.
    """
    drawn = _draws(arrays, seed is not None)
    offsets = arrays.find("node_offsets", "atom_offsets")
    if seed is not None and not drawn:
        raise arrays.error(f"seed {seed} has no effect: it has a split, and nothing else is drawn")
    understood = {None: "row_normalize", "atom_offsets": "radius"}.get(offsets)
    understood = "target" if arrays.is_typed else understood
    idle = params.keys() - {"split", "ignore", understood}
    idle |= {name for name, value in options.items() if offsets and value}
    if idle:
        held = "many small graphs" if offsets else "one graph"
        raise arrays.error(f"{min(idle)} has no effect: it holds {held}")
    source = {"dataset": Path(arrays.source).name, **params}
    if drawn:
        source["seed"] = seed or 0
    if offsets:
        small = extra(".molecules", arrays.source)
        return small.build(path, arrays, params, source, seed=seed or 0, progress=progress)
    options |= {"backend": backend, "progress": progress}
    return _build_graph(path, arrays, params, source, **options)


def _read_graph(arrays, params, source):
    """Read the `Arrays` of one graph, as of the type "" if it has no types -> ({argument of `build_store`: {type: its
    value}}; the split, empty if there is none). Names of classes go to `source`."""
    graph = {name: {} for name in ("node_types", "features", "labels", "edge_index")}
    target = params.get("target")
    labelled = []
    split = None
    for kind, of in arrays.by_type().items():
        num_nodes = num_edges = None
        names = of.names()
        if "," not in kind:
            labels = of.labels()
            features = of.features(params.get("row_normalize"))
            rows = labels if features is None else features
            if rows is None and not kind:
                of.find(*FEATURES, needed=True)
            counted = of.find("num_nodes")
            if rows is None and not counted:
                raise arrays.error(f"nodes of type {kind} are not counted: give num_nodes:{kind}")
            num_nodes = of.integers("num_nodes").item() if counted else rows.shape[0]
            if rows is not None and num_nodes != rows.shape[0]:
                raise of.error(
                    f"num_nodes is {num_nodes}, and there are {rows.shape[0]} labels or features"
                )
            graph["node_types"][kind] = num_nodes
            graph["features"][kind] = features
            labelled += [kind] if labels is not None else []
            if target in (None, kind) and (labels is not None or not kind):
                graph["labels"] = {kind: labels}
                split = found(of, num_nodes, params.get("split"))
                if of.classes:
                    source["classes"] = of.classes
        if "," in kind or not kind:
            kind = tuple(kind.split(",")) if kind else kind
            graph["edge_index"][kind] = of.edge_index()
            num_edges = graph["edge_index"][kind].shape[-1]
        for name, values in (names | of.columns()).items():
            graph.setdefault(name, {})[kind] = values
        of.close(num_nodes, num_edges)
    if len(labelled) > 1 and target is None or target and target not in labelled:
        raise arrays.error(
            f"there are labels of {', '.join(labelled) or 'no type'}: "
            "keep those of one, as target=TYPE does"
        )
    if split and not labelled:
        raise arrays.error("it has a split, and no labels (y): give them, or leave it out")
    return graph, split


def _build_graph(path, arrays, params, source, **options) -> Path:
    """Build a store of the `Arrays` of one graph; print what was drawn, how many edges lack a reverse, and whether ids
    may start at 1."""
    graph, split = _read_graph(arrays, params, source)
    labels = next(iter(graph["labels"].values()), None)
    numbers = labels is not None and labels.dtype.kind == "f"
    random = np.random.default_rng(source.get("seed", 0))
    if labels is None:
        arrays.say("it has no labels: a trained model can predict on it, --task link learn from it")
    elif not split and labels.ndim == 2 and not numbers and "seed" not in source:
        arrays.say("it has no split, and none is drawn of nodes with several labels each")
    elif not split:
        by = "by --seed of train.py"  # each run draws its own
        if "seed" in source:
            split = drawn_nodes(labels, random)
            by = f"seed {source['seed']}"
        where = "".join(f" from nodes of type {kind}" for kind in graph["labels"] if kind)
        what = DRAWN_NODES if numbers else DRAWN
        arrays.say(f"it has no split: {what} are drawn{where} ({by})")
    if NODE_TIME.name in graph or EDGE_TIME.name in graph:
        _say_whose_times(arrays, graph)
    if not arrays.is_typed:
        graph = {name: values[""] for name, values in graph.items() if name != "node_types"}
    else:
        tables = graph.get(EDGE_FEATURES.name, {})
        shapes = [np.shape(tables.get(kind, [[]])) for kind in graph["edge_index"]]
        widths = sorted({shape[1] if len(shape) > 1 else 1 for shape in shapes})
        if len(widths) > 1:
            arrays.say(
                f"edge_features have {' or '.join(map(str, widths))} columns, by type: "
                "narrower ones get zeros"
            )
    if graph["features"] is None:
        if numbers:
            arrays.find(*FEATURES, needed=True)
        num_classes = check_labels(labels, len(labels), options.get("num_classes"))[1]
        split, features, half = _labels_as_features(arrays, labels, split, num_classes, random)
        graph["features"] = features
        options["symmetrize"], how = _symmetrized(graph, options.get("symmetrize"))
        options["drop_duplicates"] = True
        source["features"] = "labels of half of the training nodes"
        arrays.say(f"it has no features: {half}, the others are trained on; {how}")
    if numbers:
        graph["targets"] = graph.pop("labels")
    build_store(path, **graph, split=split or None, source=source, **options)
    counted = files.read_meta(path)["edges"]
    if one_way := counted["one_way"]:
        arrays.say(
            f"{one_way:,} of {counted['one_way_of']:,} edges have no reverse: "
            "messages go one way; --symmetrize adds the reverses"
        )
    if "node_names" not in graph:
        for kind in counted["from_one"]:
            node = f"node 0 of type {kind}" if kind else "node 0"
            arrays.say(f"{node} has no edges: ids may start at 1")
    return path


def _say_whose_times(arrays, graph):
    """Print which edges get the times of their sources, or are always seen, and which nodes have no time."""
    kinds = graph["edge_index"].keys() - graph.get(EDGE_TIME.name, {}).keys()
    timed = graph.get(NODE_TIME.name, {})
    if kinds:
        of = f" of {'; '.join(sorted(map(','.join, kinds)))}" * arrays.is_typed
        what = "each gets that of its source (node_time)" if timed else "they are always seen"
        arrays.say(f"edges{of} have no times: {what}")
    if timed and (timeless := sorted(graph["node_types"].keys() - timed.keys())):
        arrays.say(
            f"nodes of {', '.join(timeless)} have no times: "
            "they see all edges, and those that would get their time are always seen"
        )


def _labels_as_features(arrays, labels, split, num_classes, random):
    """Turn the labels of half of the training nodes into features -> (split without these nodes, 0 and 1 [V, C], words
    that say so)."""
    if isinstance(split, list):
        raise arrays.error(
            f"it has no features, and {len(split)} splits: keep one, as split=0 does"
        )
    split = check_split(split, labels)
    shown, split["train"] = np.split(random.permutation(split["train"]), [len(split["train"]) // 2])
    features = np.zeros((len(labels), num_classes), np.float32)
    if labels.ndim == 2:
        features[shown] = labels[shown] == 1
    else:
        features[shown, labels[shown]] = 1
    how = f"half of the training nodes ({len(shown):,}) show their labels as features"
    return split, features, how


def _symmetrized(graph, asked):
    """Decide whether the edges of a graph without features get their reverses -> (bool, words that say so): unless
    `asked` for, not if they have types, and reverses, which may be of types of their own."""
    if EDGE_TYPE.name not in graph:
        return True, "edges are made symmetric"
    src, dst = convert.integers("edge_index", graph["edge_index"], 2, "M")
    num_nodes = len(graph["labels"])
    mirrored = int(np.isin(dst * num_nodes + src, src * num_nodes + dst).sum())
    if asked or mirrored < MIRRORED * len(src):
        return True, "every edge gets a reverse of its type"
    how = f"{mirrored:,} of {len(src):,} edges have a reverse, of whatever type: none is added"
    return False, how
