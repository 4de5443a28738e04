"""Arrays of a file or a graph object, by name: checked on access; unused ones that matter are refused.

arrays = open_npz("mine.npz", ignore=["edge_weight"])     # or "data.pt"; from_object(a DGLGraph or a PyG Data, {})
y = arrays.labels()                      # int64 [V], -1 where there is none
x, edge_index = arrays.features(), arrays.edge_index()    # [V, F], dense or the rows of a CSR matrix; [2, M]
arrays.close(len(y), edge_index.shape[1])                 # lists unused arrays, refuses those that might matter
"""

import collections
import contextlib
import functools
import importlib
import math
import os
import pickle
import re
import zipfile

import numpy as np
import torch

from disk.checks import check_targets
from disk.columns import COLUMNS, EDGE_WEIGHT
from disk.convert import (
    LIKE_NUMBERS,
    MISSING,
    adjacency,
    array_like,
    column_names,
    integers,
    is_sparse,
    refuse,
    shaped,
)
from disk.files import StoreError, free_host_bytes, plural, reading, short
from sources.splits import PARTS

EDGES = ("edge_index", "edges")
FEATURES = ("features", "x", "feat", "node_features", "feat_indptr")
LABELS = ("labels", "y", "label", "node_labels", "targets")
NAMES = ("node_names", "feature_names", "edge_types", "class_names")
# what a saved Data or HeteroData may hold besides tensors, in torch_geometric.data
PYG = """data.Data data.DataEdgeAttr data.DataTensorAttr hetero_data.HeteroData feature_store.TensorAttr graph_store.EdgeAttr
graph_store.EdgeLayout storage.BaseStorage storage.NodeStorage storage.EdgeStorage storage.GlobalStorage storage.AttrType"""
SAVED = "if you trust it, two lines of Python read it: see docs/data.md"
# classes of these names may mean that there is no label
UNKNOWN = "unknown unk unlabeled unlabelled missing undefined unspecified unassigned notlabeled nolabel".split()
MATTERS = "edge|edata|weight|time|train|val|test|mask|split|adj|attr|feat|label|idx|index"


def open_npz(file, ignore=()) -> "Arrays":
    """Open an .npz file, whose arrays are read on access, or a .pt file, see `saved_graph`."""
    if not str(file).endswith(".npz"):
        return from_object(saved_graph(file), {}, ignore, file)
    with reading(file):
        archive = zipfile.ZipFile(file)
    read = {
        member.removesuffix(".npy"): functools.partial(_read, archive, member)
        for member in archive.namelist()
    }
    return Arrays(file, read, ignore=ignore)


def saved_graph(file):
    """Load a PyG `Data` or `HeteroData`, or a list of `Data`, written by torch.save, without running code of the file."""
    with reading(file):
        with zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():  # torch ignores checksums
                raise ValueError(f"{damaged} in it is damaged")
        # torch refuses to fill a defaultdict, in which PyG remembers names
        classes = [(lambda *_: {}, "collections.defaultdict")]
        with contextlib.suppress(ModuleNotFoundError):
            for name in PYG.split():
                module, _, kind = name.rpartition(".")
                module = importlib.import_module(f"torch_geometric.data.{module}")
                classes += filter(
                    None, [getattr(module, kind, None)]
                )  # AttrType is of later versions
        pyg = len(classes) > 1
        before = torch.serialization.get_safe_globals()
        classes += [kind for kind in before if kind is not collections.defaultdict]
        try:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(classes)
            graph = torch.load(file, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            if not pyg:
                raise StoreError(
                    f"{file} cannot be read: it takes torch_geometric.data: pip install torch_geometric"
                ) from error
            code = named[1] if named else "code"
            raise StoreError(
                f"{file} holds more than a PyG Data of tensors ({code}); {SAVED}"
            ) from error
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)
        if isinstance(graph, dict) and "total_batch" in graph:
            raise StoreError(f"{file} is a checkpoint of train.py: give it to --resume")
        if not (is_list(graph) or hasattr(graph, "edge_index") or hasattr(graph, "edge_types")):
            raise StoreError(f"{file} holds a {type(graph).__name__} and no PyG Data; {SAVED}")
    return graph


def _read(archive, member):
    size = archive.getinfo(member).file_size
    free = free_host_bytes()
    if size > free:
        raise ValueError(f"{size:,} bytes unpacked, and {free:,} are free")
    with archive.open(member) as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):  # zipfile checks the CRC when the end is read
            raise ValueError("it is longer than its header says")
        return array


def from_object(graph, extra, ignore=(), file=None) -> "Arrays":
    """Get the arrays of a DGLGraph, a PyG Data or a list of Data under the names of an .npz file; `extra` {name: array}
    replaces theirs. file: that it was read from."""
    kind = file or type(graph).__name__
    if isinstance(graph, torch.utils.data.Dataset) and len(graph) == 1:
        graph = graph[0]  # of PyG
    if is_list(graph):
        arrays = _of_graphs(kind, graph, "labels" not in extra)
    elif hasattr(graph, "ndata"):
        arrays = {}
        single = len(graph.ntypes) == len(graph.canonical_etypes) == 1
        # a graph may be restricted to some formats
        graph = graph.formats(["coo", "csr", "csc"])
        for name in graph.ntypes:
            suffix = "" if single else f":{name}"
            arrays[f"num_nodes{suffix}"] = graph.num_nodes(name)
            for key, value in graph.nodes[name].data.items():
                # `time` alone would be that of edges
                meant = [c.name for c in COLUMNS.values() if c.of == "node" and key in c.aliases]
                arrays[(meant or [key])[0] + suffix] = value
        for ends in graph.canonical_etypes:
            suffix = "" if single else f":{','.join(ends)}"
            arrays[f"edge_index{suffix}"] = torch.stack(graph.edges(etype=ends))
            for name, value in graph.edges[ends].data.items():
                if name != "_ID":  # the ids that DGL adds
                    arrays[f"edata.{name}{suffix}"] = value
    elif hasattr(graph, "node_types") and hasattr(graph, "edge_types"):
        arrays = dict(graph.to_dict().get("_global_store", {}))  # arrays without a type: refused
        arrays |= {f"num_nodes:{name}": graph[name].num_nodes for name in graph.node_types}
        for name in (*graph.node_types, *map(tuple, graph.edge_types)):
            values = _with_edge_index(dict(graph[name].items()))
            values.pop("num_nodes", None)
            type_name = name if isinstance(name, str) else ",".join(name)
            arrays |= {f"{column}:{type_name}": value for column, value in values.items()}
    elif hasattr(graph, "edge_index") or hasattr(graph, "adj_t"):
        arrays = _attributes(graph)
    else:
        raise StoreError(
            f"no graph is read from a {kind}: "
            "give a file, a DGLGraph, a PyG Data or a list of PyG Data"
        )
    replaced = []
    for names in (FEATURES, LABELS, sum(PARTS.values(), [])):
        if extra.keys() & {*names}:
            replaced += names
    kept = {name: v for name, v in arrays.items() if name.partition(":")[0] not in replaced}
    # of the only type of nodes, whose edges may have several
    suffix = next((n.removeprefix("num_nodes") for n in arrays if n.startswith("num_nodes:")), "")
    return Arrays(kind, kept | {name + suffix: v for name, v in extra.items()}, ignore=ignore)


def is_list(graphs) -> bool:
    """Return whether an object is a list of PyG graphs, or a data set of several."""
    several = isinstance(graphs, list | tuple | torch.utils.data.Dataset) and len(graphs)
    return bool(several) and all(hasattr(graph, "edge_index") for graph in graphs)


def _of_graphs(kind, graphs, answers) -> dict:
    """Join the arrays of PyG graphs as `molecules` reads them, y only if `answers`; of an attribute without a use the value
    of one graph."""
    graphs = [*map(_attributes, graphs)]
    ends = [
        integers(f"{kind}: edge_index of graph {i}", graph.pop("edge_index"), 2, "m")
        for i, graph in enumerate(graphs)
    ]
    edges = [pairs.shape[1] for pairs in ends]
    nodes = [graph.pop("num_nodes", None) for graph in graphs]
    x = _parts(kind, graphs, "x", nodes)
    if not x:
        if None in nodes:
            raise StoreError(
                f"the graphs of the {kind} have no x and no num_nodes: give features, such as degrees"
            )
        print(
            f"{kind}: no x: only edges tell nodes apart, and --pooling sum or max sees their number"
        )
        x = [np.zeros((n, 1), np.uint8) for n in nodes]
    e = _parts(kind, graphs, "edge_attr", edges) or [np.zeros((n, 1), np.uint8) for n in edges]
    y = _parts(kind, graphs, "y", [1] * len(graphs))
    arrays = {}
    for graph in graphs:
        arrays |= graph
    arrays |= {
        "node_offsets": np.cumsum([0, *map(len, x)]),
        "edge_offsets": np.cumsum([0, *edges]),
        "edge_index_local": np.concatenate(ends, 1),
    }
    parts = {"x": x, "edge_attr": e}
    if y and answers:
        parts["targets" if y[0].dtype.kind == "f" else "labels"] = y
    return arrays | {name: np.concatenate(rows) for name, rows in parts.items()}


def _parts(kind, graphs, name, counts) -> list:
    """Take an attribute out of graphs {name: value}, of which all have it or none -> its rows of each graph [n, width],
    where n is one of `counts`, any if that is None."""
    parts = []
    values = [graph.pop(name, None) for graph in graphs]
    for i, (value, count) in enumerate(zip(values, counts)):
        called = f"{kind}: {name} of graph {i}"
        if value is None and parts or value is not None and len(parts) < i:
            raise StoreError(f"{called} is there, of others not: all graphs need it, or none")
        if value is None:
            continue
        rows = np.asarray(array_like(called, value))
        if rows.ndim < 2:
            rows = rows.reshape((1, -1) if name == "y" else (-1, 1))
        width = parts[0].shape[1] if parts else "width"
        parts.append(shaped(called, rows, "n" if count is None else count, width))
    return parts


def equal_sums(x) -> str:
    """Scale the rows of non-negative x [V, F], in place, so that each but an empty one sums to the square root of F:
    short and long texts weigh alike, and the scale is that of any graph with these features -> words for a message."""
    target = math.sqrt(x.shape[1])
    total = x.sum(1, keepdim=True)
    x *= target / total.where(total > 0, 1)
    return f"each row scaled to the sum {target:.4g}, the square root of its width"


def _attributes(graph) -> dict:
    """Return what a PyG `Data`, or an object with the same attributes, holds, see `_with_edge_index`."""
    values = graph.to_dict() if hasattr(graph, "to_dict") else vars(graph)
    return _with_edge_index(dict(values))


def _with_edge_index(arrays) -> dict:
    """Replace sparse matrices by edge_index [2, M]: an edge_index whose entry i, j is an edge from i to j, or without one
    adj_t (also a SparseTensor of torch_sparse), whose row v holds the sources of the edges into v."""
    name = "adj_t" if arrays.get("edge_index") is None else "edge_index"
    if arrays.get(name) is None or name == "edge_index" and not is_sparse(arrays[name]):
        return arrays
    edges, values, count = adjacency(name, arrays.pop(name))
    weight = arrays.get(EDGE_WEIGHT.name)
    if values is None:
        values = weight
    elif weight is not None:
        raise StoreError(f"{name} has values other than 1, beside edge_weight: keep one of them")
    edges = edges.flip(0) if name == "adj_t" else edges
    return arrays | {"edge_index": edges, EDGE_WEIGHT.name: values, "num_nodes": count}


class Arrays:
    """Arrays by name; those that are read are marked as used, and `close` reports or refuses the others.

    Args:
        source: name of the file or object in messages. ignore: names of arrays to leave out.
        values: {name: array, tensor, or function that reads an array}; None stands for a missing one.
        suffix: ":TYPE" for the arrays of one type, which were called NAME:TYPE.
        files: {name: file} of arrays that have a file of their own, for messages.

    Attributes: classes: names of the classes, or None, once names or labels are read.
    """

    def __init__(self, source, values, *, ignore=(), suffix="", files=()):
        self._files = dict(files)
        self.source, self.suffix = str(source), suffix
        self._taken = set()
        self._values = {name: value for name, value in values.items() if value is not None}
        for name in ignore:
            self.find(name, needed=True)
        self._values = {n: value for n, value in self._values.items() if n not in ignore}
        self.is_typed = any(name.startswith("edge_index:") for name in self._values)

    def by_type(self) -> dict:
        """Group arrays called `x:author` or `edge_index:author,writes,paper` by type -> {type: `Arrays`}; without types
        all are of the type ""."""
        if not self.is_typed:
            return {"": self}
        types = {}
        for name, value in self._values.items():
            base, colon, kind = name.partition(":")
            if not colon or kind.count(",") not in (0, 2):
                raise self.error(f"{name} has no type: call it NAME:TYPE or NAME:FROM,RELATION,TO")
            types.setdefault(kind, {})[base] = value
        return {k: Arrays(f"{self.source}: {k}", v, suffix=f":{k}") for k, v in types.items()}

    def error(self, text) -> StoreError:
        """Make a StoreError that names the source."""
        return StoreError(f"{self.source}: {text}")

    def called(self, name):
        """Name an array for messages, with the file that it is from."""
        return f"{self._files.get(name, self.source)}: {name}"

    def say(self, text):
        """Print a line, after the name of the source."""
        print(f"{os.path.basename(self.source)}: {text}")

    def find(self, *names, needed=False):
        """Return the one of several names that has an array, or None; StoreError for two, and for none if `needed`."""
        present = [name for name in names if name in self._values]
        if len(present) > 1:
            raise self.error(
                f"it has {present[0]} and {present[1]}, "
                f"which mean the same: keep one, or ignore={present[1]}{self.suffix}"
            )
        if needed and not present:
            raise self.error(
                f"it has no array {' or '.join(names)}; "
                f"its arrays are {', '.join(self._values) or 'none'}"
            )
        return present[0] if present else None

    def read(self, name, kinds="biuf"):
        """Read an array whose dtype is of one of these kinds of numpy, "" for any, and mark it as used -> numpy array,
        or a tensor if bfloat16."""
        self.find(name, needed=True)
        self._taken.add(name)
        with reading(self.called(name)):
            value = self._values[name]
            value = array_like(self.called(name), value() if callable(value) else value)
            if getattr(value, "dtype", None) == torch.bfloat16:
                return value
            array = np.asarray(value)
        if kinds and array.dtype.kind not in kinds:
            raise StoreError(f"{self.called(name)} holds {array.dtype}, where numbers are needed")
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    __getitem__ = read

    def shaped(self, name, *shape):
        """Read a numeric array of this shape, where a str matches any size."""
        return shaped(self.called(name), self[name], *shape)

    def integers(self, name, *shape):
        """Read an array as int64, of this shape if one is given; see `shaped`."""
        return integers(self.called(name), self[name], *shape)

    def edge_index(self):
        """Return the edges [2, M], row 0 the sources: `edge_index`, or `edges` [M, 2] transposed."""
        name = self.find(*EDGES, needed=True)
        if name == "edge_index":
            return self.shaped(name, 2, "M")
        return self.shaped(name, "M", 2).T

    def columns(self):
        """Return {column of a store: array}; for one type, of the columns that fit it."""
        of = "edge" if "," in self.suffix else "node" if self.suffix else None
        arrays = {}
        words = []
        taken = set()  # by columns declared earlier: of one graph `time` is that of edges
        for column in COLUMNS.values():
            if of not in (None, column.of):
                continue
            name = self.find(*(alias for alias in column.aliases if alias not in taken))
            taken |= {*column.aliases}
            if name is None:
                continue
            values = self.read(name, "biufM" if column.timed else "biuf")
            if not column.wide and values.shape[1:] == (1,):
                values = values.reshape(-1)
            arrays[column.name] = values
            called = f" (called {name})" if name != column.name else ""
            words.append(column.name + called)
        if words:
            self.say(f"it has {', '.join(words)}")
        return arrays

    def names(self):
        """Return {argument of `build_store`: names} of nodes, features and types of edges, and take those of classes."""
        found = {name: self._values[name] for name in NAMES if self.find(name)}
        self._taken |= found.keys()
        found = {name: [*(v() if callable(v) else v)] for name, v in found.items()}
        self.classes = found.pop("class_names", None)
        return found

    def labels(self):
        """Return classes int64 [V], or multi-labels [V, C] of 0 and 1; None without such an array. -1 or NaN
        stands for no label. Classes may come as [V, 1] or as text, whose names go to `classes`. Of `targets` return
        numbers, float64 [V, T]."""
        name = self.find(*LABELS)
        if name is None:
            return None
        if name == "targets":
            return check_targets(self.called(name), self[name], "V")[0]
        values = self.read(name, "biufUS")
        if isinstance(values, torch.Tensor):
            values = values.float().numpy()
        text = values.dtype.kind in "US"
        values = self._numbered(name, values) if text else values
        if values.size in values.shape:  # perhaps [V, 1]
            values = values.reshape(-1)
        elif values.ndim == 2 and len(some := values[(values >= 0).any(1)]):
            if (some.sum(1) <= 1).all() and np.isin(some, (0, 1)).all():
                raise StoreError(f"{self.called(name)} is one-hot: use argmax(1), -1 where no 1 is")
        refuse(values < -1, self.called(name), values, "labels are 0 or more, or -1 for none")
        if values.dtype.kind != "f":
            values = values.astype(np.int8) if values.dtype == bool else values
            return integers(self.called(name), values)
        values = values.astype(np.float64)
        missing = np.isnan(values)
        bad = ~missing & ((values != np.rint(values)) | (np.abs(values) > 1 << 53))
        why = "labels are whole numbers or NaN; numbers to learn are an array targets"
        refuse(bad, self.called(name), values, why)
        if missing.any():
            count = f"{missing.sum():,} of {values.size:,}"
            empty = ", empty or -1" * text
            self.say(f"{count} in {name} are NaN{empty}: no label (-1)")
        return np.where(missing, -1, values).astype(np.int64)

    def _numbered(self, name, values):
        """Turn text labels into floats, NaN for none: indices of the sorted names of classes. Names that are whole numbers
        are sorted as such."""
        cells = np.char.strip(values.astype(str))
        labelled = ~np.isin(cells, [*MISSING, "-1"])
        names, index = np.unique(cells[labelled], return_inverse=True)
        for number, word in enumerate(names.tolist()):
            plain = re.sub(r"[\W_]", "", word.lower())
            if word.lower() in LIKE_NUMBERS:
                raise StoreError(
                    f"{self.called(name)} holds {short(word)}: rename it if it is a class, "
                    "write nothing if it means that there is no label"
                )
            if plain in UNKNOWN:
                count = plural(int((index == number).sum()), "node")
                self.say(
                    f"{name} has {short(word)} as a class, of {count}: "
                    "if it means that there is no label, write nothing in its place"
                )
        if all(re.fullmatch("-?[0-9]{1,20}", name) for name in names.tolist()):
            order = sorted(range(len(names)), key=lambda i: int(names[i]))
            index = np.argsort(order)[index]
            names = names[order]
        y = np.full(cells.shape, np.nan)
        y[labelled] = index
        self.classes = names.tolist()
        self.say(f"{name} is text: {len(names)} classes, numbered in the order of their names")
        return y

    def features(self, row_normalize=None):
        """Return features [V, F]: a dense array as it is, or the rows of a CSR matrix, which get `equal_sums` if
        row_normalize (None: if the values are counts); None if there are no features."""
        name = self.find(*FEATURES)
        if name == "feat_indptr":
            return self._csr_rows(row_normalize)
        if row_normalize is not None:
            raise self.error("row_normalize has no effect: it is for a CSR matrix of features")
        if name is None:
            return None
        values = self.shaped(name, "V", "F")
        # a DataFrame has names, too
        return values if column_names(self._values[name]) is None else self._values[name]

    def _csr_rows(self, row_normalize):
        """Make dense rows of feat_indptr, feat_indices, feat_data (or ones) and feat_shape; repeated entries add up."""
        indptr = self.integers("feat_indptr")
        indices = self.integers("feat_indices")
        data = self.find("feat_data")
        values = self[data] if data else np.ones(indices.shape, np.int8)
        shape = [len(indptr) - 1, int(indices.max(initial=0)) + 1]
        if self.find("feat_shape"):
            shape = self.integers("feat_shape").tolist()
        counts = values.dtype.kind != "f"
        normalize = counts if row_normalize is None else bool(row_normalize)
        if normalize:
            refuse(
                values < 0,
                self.called("feat_data"),
                values,
                "give row_normalize=0, to divide by no sums",
            )
        dtype = np.dtype(np.float32) if counts else values.dtype
        values = values.astype(np.promote_types(dtype, np.float32))  # to add up repeats in float16
        matrix = self.called("the CSR matrix of features")
        with reading(matrix):
            if shape[0] != len(indptr) - 1 or indptr[0]:
                raise ValueError(f"{shape[0]} rows need {shape[0] + 1} offsets from 0")
            ends = np.stack([np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)), indices])
            sparse = torch.sparse_coo_tensor(ends, values, shape, check_invariants=True)
            dense = array_like(matrix, sparse)
        how = equal_sums(dense) if normalize else "as they are"
        self.say(f"features are {'counts' if counts else 'values'}, {how}")
        return dense.to(getattr(torch, dtype.name))

    def close(self, num_nodes=None, num_edges=None):
        """Name the unused arrays; StoreError for one that seems to be of edges, a split, features or labels."""
        rest = [name for name in self._values if name not in self._taken]
        for name in rest:
            shape = ()
            value = self._values[name]
            with contextlib.suppress(ValueError):  # unreadable, but not needed either
                shape = self.read(name, "").shape if callable(value) else np.shape(value)
            per_edge = num_nodes != num_edges and tuple(shape[:1]) == (num_edges,)
            if per_edge or re.search(MATTERS, str(name).lower()):
                raise self.error(
                    f"{name}{self.suffix} is not used here, and may matter: "
                    f"docs/data.md lists those that are; drop it, or ignore={name}{self.suffix}"
                )
        if rest:
            self.say(f"not used: {', '.join(map(str, rest))}")
