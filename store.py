"""A graph on disk, one copy for every process: build a store, open it, verify it.

A store is a directory of .npy files beside a meta.json; features are one more .npy (backend "mmap") or an LMDB file of
blocks of rows (backend "lmdb"). It appears only when it is complete; all processes that open it share its pages.

    build_store("graph", edge_index=edge_index, features=x, labels=y, split={"train": ..., "valid": ..., "test": ...})
    graph = GraphStore.open("graph")
    rows = graph.features[ids]

    python store.py build edges.csv.gz PATH --features x.csv.gz --labels y.csv --symmetrize
    python store.py info PATH       # sizes, degrees, options, source
    python store.py verify PATH     # every checksum

V nodes and M edges of the graph, F feature width, C classes. The graph is CSC over in-edges: the sources of the edges into
v are indices[indptr[v]:indptr[v+1]]; disk/columns.py lists the other arrays. To copy this file, also take disk/, extras/ and
native/; they need torch, numpy and tqdm (lmdb for backend "lmdb"). For the command line copy sources/ and features.py, too.

meta.json has a checksum of itself and a SHA-256 of every file that never changes; blocks of rows in LMDB have CRCs, the
only check of that file after the first `put_rows`. `open` checks sizes and headers and is safe on any bytes; `verify`
compares every byte with its checksum, and training refuses ids out of range. LMDB may kill the process on damage past
its file's header. Files of a store in use may be renamed or removed, but not truncated: reading past the end of a
mapped file kills the process (SIGBUS).
"""

import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # before the slow imports; does not return
    folder = Path(__file__).absolute().parent
    needed = ("disk", "extras", "native", "sources", "features.py")
    if lacking := [name for name in needed if not (folder / name).exists()]:
        text = f"the command line needs {' and '.join(lacking)}, too: copy them to {folder}"
        print(f"store.py: {text}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module("sources.cli", run_name="__main__")

import torch
from torch import Tensor

from disk import build, checks, columns, convert, files, lmdb_rows, sort
from disk.build import BACKENDS, FORMAT
from disk.columns import COLUMNS
from disk.convert import within
from disk.files import StoreError, reading
from disk.lmdb_rows import LmdbFeatures
from disk.reader import MappedRows
from extras import elsewhere, extra

__getattr__ = elsewhere(__name__)
SAMPLERS = 16  # threads that sample a graph on disk, each waiting for a page of it


def build_store(
    path,
    *,
    edge_index=None,
    indptr=None,
    indices=None,
    features,
    labels=None,
    targets=None,
    split=None,
    node_names=None,
    node_types=None,
    edge_types=None,
    feature_names=None,
    backend="mmap",
    feature_dtype=None,
    num_classes=None,
    symmetrize=False,
    drop_self_loops=False,
    drop_duplicates=False,
    block_rows=None,
    source="",
    progress=False,
    **columns,
) -> Path:
    """Write a graph to disk as a store, atomically: it is complete or not there.

    Arrays may be numpy arrays, torch tensors or anything with .shape, .dtype and slicing (a memmap), which is then read
    a piece at a time; also what docs/data.md lists as "From Python". Neighbour lists are sorted by edge_type, edge_time and source, in bounded memory (disk/sort.py);
    indptr and indices without types and times are stored as given unless an option is set.

    Args:
        path: directory to create, with its parents.
        edge_index: integers [2, M], row 0 the sources, row 1 the destinations, or a sparse matrix of ones [V, V]; or give
        indptr, indices: the graph in CSC form, integers [V + 1] and [M] (indices may be `Rows`).
        features: [V, F] of a dtype in DTYPES, without NaN or infinity (may be `Rows`); booleans are kept as uint8.
        labels: integers [V] in [0, C), or multi-label [V, C] of 0 and 1; -1 for a missing one. No split may contain a node
            without any. None: no node has one, and the graph is for predictions and links.
        targets: numbers to be learned in place of classes, [V] or [V, T], kept as float64; NaN for a missing one.
        split: dict with row numbers of nodes, not names, or masks bool [V], for "train" (not empty), "valid" (or "val")
            and "test" (each may be missing); disjoint. Or a list of K such splits of the same graph. None: 20 nodes of
            each class are drawn for train, 30 for valid, the rest for test (with targets a tenth each for valid and test), by
            seed 0, or in train.py by --seed; with several labels per node, or without labels, there is no split.
        columns: those of disk/columns.py, edge_weight, edge_type, edge_time, edge_features and node_time; edge arrays in
            the order of the given edges; an added reverse copies those of its edge. With node_time and no edge_time an
            edge, also an added reverse, has the time of its source. edge_order=True also stores the number of each edge in
            the order given (8 bytes an edge), for `GraphStore.given_edges` and `stored_edges`; or give numbers, int [M].
        node_names: V distinct names of one line each; by type {type: distinct names}. edge_types: names of the edge types.
        feature_names: F different names of the columns of features; with them predictions go by name, not by position.
            None: those of a DataFrame. By type: {type: names}.
        node_types: {name: number of nodes} of a heterogeneous graph, for which edge_index, features, labels and columns
            are dicts by type, see `flatten` of extras/typed.py.
        backend: "mmap" or "lmdb", for the features. feature_dtype: "bfloat16" or "float16" rounds float features to it:
            half the bytes of float32. "int8": to one of 256 evenly spaced values of their column; read as float32.
        num_classes: C; None: the largest label + 1.
        symmetrize: add the reverse of every edge. drop_self_loops: drop edges from a node to itself. progress: show a bar.
        drop_duplicates: keep one of the edges with the same ends and type (after symmetrizing), with its weight, time
            and features: the earliest by time; on a tie a given edge before an added reverse, then the first.
        block_rows: rows per LMDB value; None: as many as four pages hold, 16 KiB with headers.
        source: where the graph comes from, kept in meta.json: a string or a dict of JSON values.

    Returns the path; raises StoreError for invalid input, a target that exists, a full disk.
    """
    for name in columns.keys() - COLUMNS.keys():
        raise TypeError(f"build_store has no argument {name}: columns are {', '.join(COLUMNS)}")
    given = SimpleNamespace(**locals(), always=None)
    graph = build.checked(given)
    with files.complete_or_not_there(Path(path), build.bytes_needed(graph)) as building:
        build.write_store(building, graph, progress)
        GraphStore.open(building)
    for line in checks.doubts(GraphStore.open(path), given.num_classes is None):
        print(f"{Path(path).name}: {line}")
    return Path(path)


class GraphStore:
    """A graph on disk, read through memory maps that all processes share.

    Attributes:
        indptr, indices: int64 [V + 1], int32 or int64 [M], in CSC form. What is written to these and the other tensors
            stays in this process, see `files.map_npy`.
        labels: int64 [V], -1 for no label; multi-label: int8 [V, C] of 0 and 1, or -1 for a missing one; numbers to be
            learned: float64 [V, T], NaN for a missing one. targets: T, 0 of classes.
        class_names: list of the names of classes in the source data, in the order of their numbers; None without names.
        split: dict of int64 node ids for "train", "valid" and "test"; `take_split` sets it. If the
            graph was built without a split: drawn by seed 0, or empty, see `build_store`.
        features: `MmapFeatures`, `LmdbFeatures` or `CodedFeatures`, with .shape, .dtype, [ids] and .gather(ids, out=None).
        feature_names: list of the names of their columns, or None; `take_columns` puts the columns into another order.
        sampled_indices, sampling_threads: arguments of a sampler: indices and None; if indices exceed half of the free
            memory, a map of them without read-ahead and SAMPLERS threads.
        edge_weight, edge_time, edge_features, node_time: float32 [M], int64 [M], [M, D], int64 [V]; or None. Row e of
            these and of edge_type is of edge indices[e].
        edge_order: int64 [M], see `given_edges`; None unless the store was built with edge_order=True.
        edge_type: uint8 or uint16 [M] below num_edge_types; without types None, and num_edge_types is 0.
        node_types: {name: (number of nodes, feature width or 0 without features)} in the order of node ids; features
            has rows only for the types with features, which come first. edge_types: names of the edge types.
        num_nodes, num_edges, num_classes, feature_dim: V, M, C, F. edge_dim: D, 0 without edge_features.
        has_features: False where no type of nodes has any; F is then 1, the width of a table of one 0.
        kept_as: what float features are rounded to, one of KEPT_AS; "" if they are not.
        part: (m, N) of a part of a store, see extras/parts.py, else None. whole: {file of which it has a part: SHA-256 of
            the file in the whole store}.
        large: whether the features, of a part those of all parts, exceed the free memory.
        labelled: False where no node has a label. path: the directory. meta: the contents of meta.json.
    """

    def __init__(self, path, meta):
        self.path = Path(path).absolute()
        self.meta = meta
        records = meta["files"]
        for name in ("num_nodes", "num_edges", "num_classes", "feature_dim"):
            setattr(self, name, meta[name])
        self.labelled = meta.get("labelled", True)
        self.targets = meta.get("targets", 0)
        self.feature_names = meta.get("feature_names")
        source = meta.get("source")
        classes = source.get("classes") if isinstance(source, dict) else None
        # of a synthetic graph their number
        self.class_names = [*map(str, classes)] if isinstance(classes, list) else None
        self.options = [name for name, on in meta["options"].items() if on]
        for name, rows in columns.rows_of_arrays(meta).items():
            values = None
            if name not in COLUMNS or f"{name}.npy" in records:
                values = self._map(f"{name}.npy")
                if len(values) != rows:
                    raise ValueError(f"{name}.npy has {len(values)} rows, not {rows}")
            setattr(self, name, values)
        self.num_edge_types = meta.get("num_edge_types", 0)
        self.edge_types = meta.get("edge_types")
        self.edge_dim = 0
        if self.edge_features is not None:
            self.edge_dim = self.edge_features.shape[1]
            self.edge_features = self.edge_features.view(getattr(torch, meta["edge_dtype"]))
        if columns.NAMES in records:
            files.check_size(path, columns.NAMES, records[columns.NAMES])
        self._splits = files.map_split(path, records)
        train = self._splits["train"]
        self.num_splits = len(train) if train.dim() == 2 else 1
        self.take_split(self.numbered_split(0))
        if self.indptr[0] != 0 or self.indptr[-1] != self.num_edges:
            raise StoreError(f"{path}: indptr.npy is not from 0 to {self.num_edges}; rebuild it")
        self.sampled_indices = self.indices
        self.sampling_threads = None
        free = files.free_host_bytes()
        if self.indices.nbytes > free // 2:
            self.sampled_indices = self._map("indices.npy", ahead=False)
            self.sampling_threads = SAMPLERS
        self.node_types = {
            str(name): (int(count), int(width)) for name, count, width in meta.get("node_types", [])
        }
        rows = self.num_nodes
        if self.node_types:
            rows = sum(count for count, width in self.node_types.values() if width)
        self.has_features = rows > 0
        rows = max(rows, 1)
        dtype = getattr(torch, meta["feature_dtype"])
        self.large = rows * self.feature_dim * dtype.itemsize > free
        self.part = None
        self.whole = dict(meta.get("whole", {}))
        shape = rows, self.feature_dim
        if "part" in meta:
            parts = extra(".parts", "a part of a store")
            self.part = tuple(meta["part"])
            first, stop = parts.part_bounds(rows, *self.part)
            self._rows = self._open_rows((stop - first, self.feature_dim), dtype, free)
            self.features = parts.PartFeatures(self._rows, first, shape, self.path)
        else:
            self.features = self._rows = self._open_rows(shape, dtype, free)
        if "feature_scale" in meta:
            self.features = extra(".int8", "a store of codes of 8 bits").coded_features(
                self.features, meta, self.path
            )
        kept = meta["feature_dtype"]
        rounded = kept in convert.KEPT_AS and self.features.dtype.is_floating_point
        self.kept_as = kept if rounded else ""
        self._opened = {**vars(self), "split": self._splits}

    def _open_rows(self, shape, dtype, free):
        """Open all rows that are in this store, [rows, F]; they are large if they exceed `free` bytes of memory."""
        meta = self.meta
        large = math.prod(shape) * dtype.itemsize > free
        file = BACKENDS[meta["backend"]]
        record = meta["files"][file]
        if record["shape"] != [*shape]:
            raise ValueError(f"{file} has rows {record['shape']}, not {[*shape]}")
        if meta["backend"] == "lmdb":
            lmdb_rows.check_lmdb(self.path, file, record)
            return LmdbFeatures(self.path / file, shape, dtype, meta["block_rows"], large)
        table = self._table = self._map(file, ahead=not large)
        return MmapFeatures(
            table.view(dtype),
            large,
            self.path,
            head=record["bytes"] - table.nbytes,
            beside=self.indptr.nbytes + self.indices.nbytes,
        )

    @classmethod
    def open(cls, path) -> "GraphStore":
        """Open a store after checking its meta.json, the size and header of every file, and the ends of indptr;
        StoreError if the directory is no store, or one of another format version, incomplete or damaged."""
        meta = files.read_meta(path, FORMAT)
        with reading(Path(path) / "meta.json", "; rebuild the store"):
            return cls(path, meta)

    def __reduce__(self):
        """Pickle as the path and what was changed since it was opened; StoreError if the store was rebuilt since."""
        now = GraphStore.open(self.path)
        changed = {}
        records, others = ({**g.meta["files"], BACKENDS["lmdb"]: None} for g in (self, now))
        if records != others:
            raise StoreError(f"{self.path} was rebuilt after it was opened: open it again")
        for name, before in self._opened.items():
            value = getattr(self, name)
            same = value is before
            tensors = [value]
            if name == "split":  # parts may have been assigned
                tensors = [*value.values()]
                same = [*map(id, tensors)] == [*map(id, before.values())]
            written = any(  # by operations of torch
                isinstance(of, Tensor) and not of.is_inference() and of._version for of in tensors
            )
            if written and name == "_table":
                raise StoreError(
                    f"{self.path}: rows of its features were written in this process, "
                    "and another reads the file's: build a store of them"
                )
            if written or not same or name == "labels" and not torch.equal(value, now.labels):
                changed[name] = value
        return GraphStore.open, (self.path,), changed

    def __repr__(self):
        names = ["num_nodes", "num_edges", "features", *COLUMNS]
        names += ["labels", "num_classes"] if self.labelled else []
        fields = {name: getattr(self, name) for name in names} | self.split
        fields |= {"node_types": self.node_types or None, "path": str(self.path)}
        return convert.shown("GraphStore", {n: v for n, v in fields.items() if v is not None})

    def node_names(self) -> list[str] | None:
        """Return the nodes' names in the source data [V], or None without; StoreError if nodes.txt is damaged."""
        names = self.each_name()
        return names and [*names]

    def node_ids(self, values, name="ids", type=None) -> Tensor:
        """Look up nodes -> their rows in features, labels and predictions, int64 of the shape of `values`.

        Args:
            values: array or list of integers or text, of any shape. If the nodes have names, values are names, an integer
                that of its digits: 7 is the node called "7"; else row numbers, integers. To look up n of V names takes
                memory for n.
            name: of the values, for messages. type: name of the nodes' type, within which names differ and rows are counted.

        Raises:
            StoreError: for another dtype, a node that there is not, or a name that nodes of several types have; names the first.
        """
        if type is None:
            return columns.node_ids(name, values, self.num_nodes, self.each_name())
        typed = extra(".typed", "ids of a type")
        return typed.ids_within(self, type, name, values, self.each_name())

    def given_edges(self, positions) -> Tensor:
        """Return the numbers that stored edges had when they were given to `build_store` -> int64 of the shape of `positions`.

        An added reverse has the number of its edge. If edges were given by type, they are counted through all types, in the
        order of `edge_index`.

        Args:
            positions: integers, positions in `indices`, such as `edge_ids` of a block.

        Raises:
            StoreError: for a position out of range; if the store was not built with edge_order=True.
        """
        order = columns.order_given(self)
        places = torch.from_numpy(convert.integers("positions", positions))
        within("positions", places, len(order), "positions in indices")
        return order[places].to(getattr(positions, "device", "cpu"))

    def stored_edges(self, edges) -> Tensor:
        """Return the positions in `indices` of edges by their numbers in the order given, see `given_edges`: what `exclude`
        of a sampler takes. It sorts the numbers of all M edges: call it once for many.

        Args:
            edges: int [n], list or array.

        Returns:
            int64 [n], in the order of `edges`; with symmetrize [2 n], an edge and its reverse together, the smaller position
            first.

        Raises:
            StoreError: for an edge that is not stored, because it does not exist or drop_duplicates or drop_self_loops
                dropped it; if the store was not built with edge_order=True.
        """
        edges = convert.integers("edges", edges, "n")
        return torch.from_numpy(sort.places_of(columns.order_given(self).numpy(), edges))

    def each_name(self):
        """Yield the nodes' names, in order, as `node_names`; return None without."""
        record = self.meta["files"].get(columns.NAMES)
        return record and extra(".names", "a store with names of nodes").read(self.path, record)

    def take_columns(self, names):
        """Put the columns of `features` into the order of `names`, which are `feature_names` in any order; StoreError for
        other names."""
        self.features = extra(".names").reordered(self, names)
        self.feature_names = names

    def take(self, **values):
        """Take other features of the same graph, or num_classes, targets, num_edge_types or class_names of a network, which may
        have more of them than the graph."""
        vars(self).update(values)

    def take_split(self, split):
        """Set `split` to {part: ids}: one of the store's, see `numbered_split`, or another."""
        self.split = split

    def numbered_split(self, number):
        """Return {part: ids} of one of the store's splits, counted from 0; StoreError if there is no such split."""
        if not 0 <= number < self.num_splits:
            raise StoreError(
                f"split {number} is out of range: {self.path} has {self.num_splits}, counted from 0"
            )
        return {  # of several splits [K, n] a row without its padding
            name: ids if ids.dim() == 1 else ids[number][ids[number] >= 0]
            for name, ids in self._splits.items()
        }

    def check_split(self, split=None):
        """Raise StoreError unless all ids in a split, by default `split`, are nodes that have a label below C; for use
        before training."""
        split = self.split if split is None else split
        end = self.num_classes if self.labels.dim() == 1 else math.inf if self.targets else 2
        checks.check_stored(self.path, split, self.labels.numpy(), end=end)

    def verify(self):
        """Raise StoreError for the first block of features in LMDB whose checksum does not match."""
        if self.meta["backend"] == "lmdb":
            self._rows.verify()

    def _map(self, name, **options) -> Tensor:
        return files.map_npy(self.path, name, self.meta["files"][name], **options)


class StoredFeatures(convert.RowsByIndex):
    """Features that are pickled as the path of their store."""

    def __reduce__(self):
        return getattr, (GraphStore.open(self.path), "features")


class MmapFeatures(StoredFeatures, MappedRows):
    """Feature rows in a memory-mapped array, see `MappedRows` of disk/reader.py."""

    name = BACKENDS["mmap"]


def verify(path) -> list[str]:
    """Compare a whole store with its checksums -> list of problems; see `lmdb_rows.verify_directory`."""
    return lmdb_rows.verify_directory(path, FORMAT, lambda path: GraphStore.open(path).verify())


def info(path) -> str:
    """Return the sizes, degrees, options and source of a store, one per line."""
    graph = GraphStore.open(path)
    part = extra(".parts").described_part(graph) if graph.part else None
    return files.info_lines(columns.summary(graph, part), graph)
