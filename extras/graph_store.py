"""Many small graphs on disk: molecules and crystals, read in batches.

    build_graphs("molecules", [block_diagonal(num_nodes, num_edges, edge_index, x=x, e=e, y=y)], split={"train": ...})
    graphs = GraphDataset.open("molecules")
    batch = graphs.batch(ids)                 # one block-diagonal graph

The G graphs of a batch have N nodes and E edges in total, F node features, D edge features and T targets or labels. Each
graph is one value in an LMDB file.
"""

import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from disk import files
from disk.checks import DRAWN_GRAPHS, check_split, check_stored, classes_among, drawn_graphs
from disk.columns import write_arrays
from disk.convert import (
    as_numpy,
    as_rows,
    check_answers,
    check_finite,
    from_edge_index,
    integers,
    largest_of,
    refuse,
    row_dtype,
    shaped,
)
from disk.files import StoreError, reading
from disk.lmdb_rows import LmdbFile, check_lmdb, key, verify_directory

FORMAT = "ringblock-graphs"
PARTS = ("node", "edge", "target")
GRAPH_HEADER = np.dtype([("magic", "S4"), ("nodes", "<u4"), ("edges", "<u4"), ("crc", "<u4")])


class GraphBatch(NamedTuple):
    """A batch of graphs as one block-diagonal graph: no edge joins two of them."""

    indptr: Tensor  # int32 [N+1]: the edges into node v are indices[indptr[v]:indptr[v+1]]
    indices: Tensor  # int32 [E] sources, positions among the N nodes
    graph_ids: Tensor  # int64 [N] the graph that each node belongs to, ascending
    x: Tensor  # [N, F] node features
    e: Tensor  # [E, D] edge features, in the order of indices
    y: Tensor  # [G, T] targets or labels
    edge_vector: Tensor = torch.empty(0, 0)  # [E, 3] from source to destination; [E, 0] without

    @property
    def edge_index(self):
        """Sources and destinations of the edges, int64 [2, E], as PyG's layers take them; `graph_ids` is PyG's `batch`."""
        dst = torch.repeat_interleave(self.indptr.diff(), output_size=len(self.indices))
        return torch.stack([self.indices, dst]).long()

    def to(self, device, non_blocking=False):
        """Copy the batch to a device."""
        return GraphBatch(*(t.to(device, non_blocking=non_blocking) for t in self))

    def record_stream(self, stream):
        """Keep the memory until the work queued on the CUDA stream is done."""
        for tensor in self:
            tensor.record_stream(stream)


def block_diagonal(num_nodes, num_edges, edge_index, *, x, e, y, edge_vector=None) -> GraphBatch:
    """Batch graphs that are given as edge lists, the edges sorted by destination, then source; StoreError for shapes
    that do not fit or an edge that leaves its graph.

    Args:
        num_nodes, num_edges: integers [G], sizes of the graphs, each with at least one node.
        edge_index: integers [2, E], row 0 the sources, graph after graph; node ids start at 0 in each graph.
        x: [N, F] node features, e: [E, D] edge features, graph after graph. y: [G] or [G, T] targets or labels.
        edge_vector: [E, 3] of each edge, from its source to its destination, for models that see angles.
    """
    num_nodes = integers("num_nodes", num_nodes, "G")
    num_edges = integers("num_edges", num_edges, "G")
    src, dst = integers("edge_index", edge_index, 2, "E")
    x = as_rows("x", x)
    e = as_rows("e", e)
    y = as_rows("y", y)
    y = y.unsqueeze(1) if y.dim() == 1 else y
    vectors = torch.empty(len(e), 0)
    if edge_vector is not None:
        vectors = shaped("edge_vector", as_rows("edge_vector", edge_vector), len(e), 3).float()
    total = int(num_nodes.sum())
    first = np.cumsum(num_nodes) - num_nodes
    _must_fit(
        nodes_of_each=num_nodes,
        nodes=(total, len(x)),
        edges=(int(num_edges.sum()), len(src), len(e)),
        graphs=(len(num_nodes), len(num_edges), len(y)),
    )
    limit = np.repeat(num_nodes, num_edges)
    bad = np.flatnonzero((np.minimum(src, dst) < 0) | (np.maximum(src, dst) >= limit))
    for edge in bad[:1]:
        ends = f"from node {src[edge]} to node {dst[edge]}"
        raise StoreError(f"edge {edge} goes {ends}: its graph has {limit[edge]} nodes")
    shift = np.repeat(first, num_edges)
    ends = src + shift, dst + shift
    indptr, indices, rows = from_edge_index(ends, total, edge_order=True)
    return _of_arrays(num_nodes, indptr, indices, x, e[rows], y, vectors[rows])


def _of_arrays(nodes, indptr, indices, *rows) -> GraphBatch:
    """Make a batch of arrays or tensors and of the rows x, e, y and edge_vector. nodes: int64 [G], of each graph."""
    graph_ids = torch.from_numpy(np.repeat(np.arange(len(nodes)), nodes))
    return GraphBatch(
        torch.as_tensor(indptr).int(), torch.as_tensor(indices).int(), graph_ids, *rows
    )


def _must_fit(nodes_of_each, **sizes):
    """Raise StoreError unless the arrays imply equal counts, {name: counts}, and every graph has a node."""
    if any(len(set(counts)) > 1 for counts in sizes.values()) or (nodes_of_each < 1).any():
        counts = ", ".join(f"{name} {' or '.join(map(str, sizes[name]))}" for name in sizes)
        raise StoreError(f"the arrays of the graphs do not fit ({counts}), or a graph has no node")


def build_graphs(path, batches, *, labels=None, split=None, source="", progress=False) -> Path:
    """Write many small graphs to disk as a `GraphDataset`, atomically -> its path; StoreError for invalid input, a path
    that exists, a full disk.

    Args:
        path: directory to create; its parents are created as well.
        batches: iterable of GraphBatch, read once; the first one fixes the widths and dtypes of x, e and y, and whether
            there is an edge_vector.
        labels: whether y holds labels: a class [G, 1], any whole number, or 0 and 1 for each of T labels; None: if its
            dtype is of integers. Otherwise y holds numbers, targets of a regression. NaN stands for a missing one, in
            labels -1 as well, unless all are -1 or 1, or others are below 0 too.
        split: dict of graph ids for "train", "valid" (or "val") and "test", disjoint; each may be missing. None: a tenth of
            the graphs is drawn for test and a tenth for valid, by seed 0; the rest is for train.
        source, progress: as for `build_store`.
    """
    path = Path(path)
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise StoreError("batches is empty: at least one batch of graphs is needed")
    meta = {
        "format": FORMAT,
        "format_version": files.VERSION,
        "source": json.loads(json.dumps(source)),
    }
    for name, rows in zip(PARTS, first[3:]):
        dtype = row_dtype(f"{name} rows", rows)
        shaped(f"{name} rows", rows, "n", "width")
        meta.update({f"{name}_dim": rows.shape[1], f"{name}_dtype": dtype})
    if first.edge_vector.shape[1]:
        meta["vector_dim"] = 3
    meta["labels"] = not first.y.is_floating_point() if labels is None else bool(labels)
    largest = 0.0
    values = set()  # labels
    with files.complete_or_not_there(path, first.x.numel() * first.x.itemsize) as building:
        graphs = GraphDataset(building, dict(meta, files={}), sync=False)
        with files.progress_bar(progress, desc="graphs", unit="graph") as bar:
            for batch in itertools.chain([first], batches):
                graphs.append(batch)
                if meta["labels"]:
                    values.update(batch.y[~batch.y.isnan()].tolist())
                largest = max(largest, largest_of(batch.x), largest_of(batch.e))
                bar.update(len(batch.y))
            count = len(graphs)
        if meta["labels"] and meta["target_dim"] == 1:
            meta["classes"] = [*map(str, classes_among(values))]
        elif meta["labels"] and 0 not in values:
            raise StoreError("several labels per graph are each 0 or 1: there is no 0")
        if split is None:
            split = drawn_graphs(count, np.random.default_rng(0))
            meta["split"] = DRAWN_GRAPHS
        split = check_split(split, np.zeros(count, np.int64), "graph")
        record = {
            "dtype": "bytes",
            "shape": [],
            "bytes": graphs.file.path.stat().st_size,
            "largest": largest,
            # identifies the graphs of the split, which `append` leaves as they are
            "built": files.sha256_of(graphs.file.path).hexdigest(),
        }
        files.write_meta(building, meta, {"graphs.lmdb": record, **write_arrays(building, split)})
        GraphDataset.open(building)
    return path


class GraphDataset:
    """Many small graphs in one LMDB file, one value per graph, for random reads and appends.

    Attributes:
        split: dict of int64 graph ids for "train", "valid" and "test".
        node_dim, edge_dim, target_dim: F, D, T. node_dtype, edge_dtype, target_dtype: torch dtypes.
        vector_dim: 3, or 0 without edge_vector.
        num_splits, feature_names, kept_as, whole: as of a `GraphStore` without them.
        labels: whether y holds labels; False: targets; None in a store that does not say.
        class_names: those in meta.json, text. classes: the different labels of graphs with one each, ints in ascending order; else None.
        path: the directory. meta: the contents of meta.json, and `class_dim`: how many classes, if more than two, else 0.
    """

    num_splits = 1
    feature_names = kept_as = None
    whole = {}

    def __init__(self, path, meta, sync=True):
        self.labels = meta.get("labels")
        self.class_names = names = meta.get("classes")
        self.classes = None if names is None else [*map(int, names)]
        self.path = Path(path).absolute()
        self.meta = meta | {"class_dim": len(names) if names and len(names) > 2 else 0}
        self.file = LmdbFile(self.path / "graphs.lmdb", sync)
        self._kinds = [(meta[f"{n}_dim"], getattr(torch, meta[f"{n}_dtype"])) for n in PARTS]
        for name, (width, dtype) in zip(PARTS, self._kinds):
            vars(self).update({f"{name}_dim": width, f"{name}_dtype": dtype})
        self.vector_dim = meta.get("vector_dim", 0)
        self._kinds.append((self.vector_dim, torch.float32))
        self.split = files.map_split(path, meta["files"]) if meta["files"] else {}

    @classmethod
    def open(cls, path) -> "GraphDataset":
        """Open a data set that `build_graphs` made, after checking its meta.json and the size and header of every file;
        StoreError if it is no data set, incomplete, damaged or of another format version."""
        meta = files.read_meta(path, FORMAT)
        with reading(Path(path) / "meta.json", "; rebuild the data set"):
            check_lmdb(path, "graphs.lmdb", meta["files"]["graphs.lmdb"])
            return cls(path, meta)

    def __len__(self):
        return self.file.read(self.file.count)

    def __reduce__(self):
        return GraphDataset.open, (self.path,), {"split": self.split}  # which may have been changed

    def take(self, class_names):
        """Number the classes as in the data set that a network was trained on; StoreError for one that is not there."""
        names = set(self.class_names or ())
        if other := sorted(names.difference(class_names)):
            raise StoreError(
                f"{self.path} has {self.kind_of_labels()}; the checkpoint lacks {files.listed(other)}"
            )
        self.class_names = class_names
        self.classes = [*map(int, class_names)]

    def kind_of_labels(self):
        """Describe the labels, as '2 classes: -1, 1'."""
        if self.classes is None:
            return f"{self.target_dim} a graph, each 0 or 1"
        return f"{len(self.classes)} classes: {files.listed(self.classes)}"

    def check_split(self):
        """Raise StoreError unless the split is valid; training calls this first."""
        check_stored(self.path, self.split, np.zeros(len(self), np.int64), "graph")

    def append(self, batch):
        """Append the graphs of a GraphBatch: all of them or none, after a crash as well; StoreError for a width or
        dtype that is not this data set's, an edge between two graphs, NaN (in x or e) or infinity, a label that is none
        of its classes, a full disk."""
        self.file.append(self._values(batch))

    def batch(self, ids) -> GraphBatch:
        """Read graphs as one block-diagonal graph.

        Args:
            ids: int [G] graph ids, in any order, repeats allowed.

        Raises:
            IndexError: for an id out of range.
            StoreError: for ids that are no integers [G], a graph that is missing, differs from its checksum or is invalid.
        """
        ids = integers("ids", ids, "G").tolist()

        def read(txn):
            values = [txn.get(key(i)) if i >= 0 else None for i in ids]
            if None in values:
                missing = ids[values.index(None)]
                count = self.file.count(txn)
                if 0 <= missing < count:
                    raise StoreError(f"{self.file.path}: graph {missing} is missing; rebuild it")
                raise IndexError(f"graph {missing} is out of range: there are {count}")
            return self._joined(ids, values)

        return self.file.read(read)

    def verify(self):
        """Raise StoreError for the first graph that differs from its checksum or is invalid."""
        count = len(self)
        for first in range(0, count, 1024):
            self.batch(range(first, min(first + 1024, count)))

    def _values(self, batch):
        """Serialise each graph of a batch as bytes, an LMDB value: header, then its own indptr, indices, x, e, y and
        edge_vector."""
        if not len(batch.y):
            raise StoreError("a batch has no graphs (y is empty): at least one is needed")
        for name, rows, (width, dtype) in zip((*PARTS, "edge_vector"), batch[3:], self._kinds):
            if rows.shape[1:] != (width,) or rows.dtype != dtype:
                raise StoreError(
                    f"{name} rows are {list(rows.shape)} {rows.dtype}, not {width} {dtype}"
                )
            if name != "target":
                check_finite(f"{name} rows", rows)
        check_answers("target rows", batch.y, self.labels)
        if self.classes:
            classes = torch.tensor([-1, *self.classes])
            unknown = ~(batch.y.isnan() | torch.isin(batch.y.double(), classes.double()))
            refuse(unknown, "target rows", batch.y, f"the data set has {self.kind_of_labels()}")
        indptr, indices, graph_ids = (t.numpy().astype(np.int64) for t in batch[:3])
        nodes = np.bincount(graph_ids, minlength=len(batch.y))
        vectors = [len(batch.edge_vector)] if self.vector_dim else []
        _must_fit(
            nodes_of_each=nodes,
            nodes=(len(indptr) - 1, len(graph_ids), len(batch.x)),
            edges=(len(indices), int(indptr[-1]), len(batch.e), *vectors),
            graphs=(len(nodes), len(batch.y)),
        )
        last = np.cumsum(nodes)
        first = last - nodes
        edges = indptr[last] - indptr[first]
        falls = (np.diff(graph_ids) < 0).any() or (np.diff(indptr) < 0).any()
        local = None if falls else indices - np.repeat(first, edges)
        if falls or ((local < 0) | (local >= np.repeat(nodes, edges))).any():
            raise StoreError("graph_ids or indptr decrease, or an edge joins two graphs")
        x, e, y, vectors = map(as_numpy, batch[3:])
        values = []
        for graph, (a, b) in enumerate(zip(first, last)):
            counts = indptr[a : b + 1] - indptr[a]
            of_edges = slice(indptr[a], indptr[b])
            fields = counts.astype("<i4"), local[of_edges].astype("<i4"), x[a:b], e[of_edges]
            fields += y[graph : graph + 1], vectors[of_edges]
            data = b"".join(field.tobytes() for field in fields)
            head = struct.pack("<4sIII", b"RBG1", b - a, counts[-1], zlib.crc32(data))
            values.append(head + data)
        return values

    def _joined(self, ids, values) -> GraphBatch:
        """Decode LMDB values as one batch: each field is joined as bytes, without torch calls per graph."""
        size = GRAPH_HEADER.itemsize
        heads = b"".join([value[:size] for value in values]).ljust(size * len(values))
        heads = np.frombuffer(heads, GRAPH_HEADER)
        nodes = heads["nodes"].astype(np.int64)
        edges = heads["edges"].astype(np.int64)
        # rows of indptr, indices, x, e, y and edge_vector
        counts = [nodes + 1, edges, nodes, edges, np.ones_like(nodes), edges]
        widths = [4, 4, *(width * dtype.itemsize for width, dtype in self._kinds)]
        ends = size + np.cumsum([count * width for count, width in zip(counts, widths)], 0)
        intact = (ends[-1] == [len(value) for value in values]) & (heads["magic"] == b"RBG1")
        intact &= heads["crc"] == [zlib.crc32(value[size:]) for value in values]
        if not intact.all():
            bad = f"graph {ids[int(intact.argmin())]} differs from its checksum"
            raise StoreError(f"{self.file.path}: {bad}; rebuild it")
        # skip the 0 at the start of each indptr
        starts = np.concatenate([np.full_like(ends[:1], size + 4), ends[:-1]]).tolist()
        indptr, indices, *rows = (
            bytearray().join([value[a:b] for value, a, b in zip(values, first, last)])
            for first, last in zip(starts, ends.tolist())
        )
        indptr, local = (np.frombuffer(data, "<i4") for data in (indptr, indices))
        indptr = np.concatenate([[0], indptr + np.repeat(np.cumsum(edges) - edges, nodes)])
        valid = np.array_equal(indptr[np.cumsum(nodes)], np.cumsum(edges))
        valid = valid and (np.diff(indptr) >= 0).all() and nodes.all()
        if not (valid and ((local >= 0) & (local < np.repeat(nodes, edges))).all()):
            bad = f"among {len(ids)} graphs from {ids[0]} on, one has lists or edges that leave it"
            raise StoreError(f"{self.file.path}: {bad}; rebuild it")
        indices = local + np.repeat(np.cumsum(nodes) - nodes, edges)

        def rows_of(data, kind, count):
            width, dtype = kind
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return flat.view(int(count.sum()), width)

        return _of_arrays(nodes, indptr, indices, *map(rows_of, rows, self._kinds, counts[2:]))


def verify(path) -> list[str]:
    """Compare a whole data set with its checksums -> list of problems; see `verify_directory`."""
    return verify_directory(path, FORMAT, lambda path: GraphDataset.open(path).verify())


def info(path) -> str:
    """Describe a data set: number of graphs, widths and dtypes, one per line."""
    graphs = GraphDataset.open(path)
    lines = {"graphs": f"{len(graphs):,}"}
    for part in PARTS:
        lines[part] = f"{graphs.meta[f'{part}_dim']} x {graphs.meta[f'{part}_dtype']}"
    if graphs.labels:
        lines["target"] += f", {graphs.kind_of_labels()}"
    return files.info_lines(lines, graphs)
