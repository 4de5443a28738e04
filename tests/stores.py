"""What tests of stores share: arrays, files, refusals, a small disk."""

import hashlib
import json
import subprocess
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from disk import files as disk
from disk.files import StoreError
from extras.graph_store import block_diagonal
from tests.common import _graph


def _refuses(message, function, *args, error=StoreError, **options):
    """Assert that function(...) raises `error` with a one-line text that matches `message`, a regular expression."""
    with pytest.raises(error, match=message) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)


def _cases(table):
    """Split a table of text, a case a line, at => -> list of lists."""
    return [line.split(" => ") for line in table.strip().splitlines()]


@contextmanager
def _small_disk(folder, size):
    """Mount a file system of `size` bytes in memory; yields its folder."""
    small = folder / "small"
    small.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", small]
    mounted = subprocess.run(words, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs takes root: {mounted.stderr.strip()}")
    try:
        yield small
    finally:
        subprocess.run(["umount", small], check=True)


def _edges(graph):
    """Return the (source, destination) pairs of an open store, sorted."""
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.numpy()))
    return sorted(zip(graph.indices.tolist(), dst.tolist()))


def _edges_by_type(graph, *columns):
    """Return {edge type: sorted (source, destination, values of these columns)} of an open store."""
    dst, edges = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.numpy())), {}
    values = graph.indices, torch.from_numpy(dst), *(getattr(graph, name) for name in columns)
    for kind, *edge in zip(graph.edge_type.tolist(), *(rows.tolist() for rows in values)):
        edges.setdefault(graph.edge_types[kind], []).append(tuple(edge))
    return {name: sorted(edges) for name, edges in edges.items()}


def _sums(path):
    files = sorted(Path(path).iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _rewrite_meta(path, **changes):
    """Change fields of meta.json (Ellipsis: remove) and update its checksum."""
    meta = json.loads((path / "meta.json").read_text()) | changes
    meta = {name: value for name, value in meta.items() if value is not Ellipsis}
    (path / "meta.json").write_bytes(disk.dump_meta(meta))


def _reseal(path, name, position, value):
    """Change a value in an array of a store and update the checksums."""
    array = np.load(path / f"{name}.npy", mmap_mode="r+")
    array[position] = value
    array.flush()
    files = json.loads((path / "meta.json").read_text())["files"]
    files[f"{name}.npy"]["sha256"] = disk.sha256_of(path / f"{name}.npy").hexdigest()
    _rewrite_meta(path, files=files)


def _save_npz(file, seed=0, **entries):
    args = _graph(seed=seed)
    content = {"edge_index": args["edge_index"], "x": args["features"], "y": args["labels"]}
    content |= entries
    np.savez(file, **{k: v for k, v in content.items() if v is not None})
    return content


def _mask(ids, size=200):
    return np.isin(np.arange(size), ids)


def _graphs(count, first=0, seed=0):
    """Make a GraphBatch of `count` random graphs; targets of graph i: first + i, and its number of nodes."""
    random = np.random.default_rng([seed, first, count])
    nodes = random.integers(1, 9, count)
    edges = random.integers(0, 12, count)
    edge_index = random.integers(0, np.repeat(nodes, edges), (2, edges.sum()))
    x = random.integers(0, 9, (nodes.sum(), 2), np.uint8)
    e = random.standard_normal((edges.sum(), 3), np.float32)
    y = np.stack([np.arange(first, first + count), nodes], 1).astype(np.float32)
    return block_diagonal(nodes, edges, edge_index, x=x, e=e, y=y)


def _molecules(file, count=40, **extra):
    random = np.random.default_rng(0)
    nodes, bonds = random.integers(2, 9, count), random.integers(0, 9, count)
    ends = np.stack([np.zeros(bonds.sum()), random.integers(1, np.repeat(nodes, bonds))])
    entries = dict(
        node_offsets=[0, *nodes.cumsum()],
        bond_offsets=[0, *bonds.cumsum()],
        bond_index_local=ends.astype(np.uint16),
        atom_feat=random.integers(0, 9, (nodes.sum(), 9), np.uint8),
        bond_feat=np.arange(bonds.sum() * 3, dtype=np.uint8).reshape(-1, 3),
        targets=nodes.astype(np.float32),
        **extra,
    )
    np.savez(file, **entries)
    return entries


def _events(num_nodes, num_edges):
    """Make columns for the edges of a graph, and the times at which its nodes are classified."""
    rng = np.random.default_rng(5)
    return {
        "edge_weight": rng.random(num_edges),
        "edge_time": rng.integers(0, 100, num_edges),
        "node_time": rng.integers(0, 100, num_nodes),
        "edge_features": rng.random((num_edges, 3)).astype(np.float32),
    }


def _forms(values):
    """Return the forms that a person may have an array [n] or [n, F] in, all of the same values."""
    pandas, scipy = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    tensor, index = torch.from_numpy(values), 2 * np.arange(len(values))[::-1]
    forms = [values.tolist(), [*values], [*tensor], np.flip(np.flip(values).copy())]
    forms.append(values.astype(values.dtype.newbyteorder(">")))
    if (
        values.ndim == 1
    ):  # of a table that was filtered, and with a dtype that may hold missing values
        column = pandas.Series(values, index)
        return [*forms, column, column.convert_dtypes(), column.array, column.astype("category")]
    forms += [pandas.DataFrame(values, index), pandas.DataFrame(values).convert_dtypes()]
    forms += [scipy.csr_matrix(values), scipy.coo_array(values), scipy.csc_array(values)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        forms += [tensor.to_sparse(), tensor.to_sparse_csr()]
    return [*forms, tensor.t().contiguous().t(), tensor.clone().requires_grad_()]


def _edge_forms(edges, num_nodes):
    """Return the forms that a person may have edges [2, M] in, no two of them alike."""
    pandas, scipy = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    matrix = scipy.coo_matrix((np.ones(edges.shape[1]), tuple(edges)), (num_nodes, num_nodes))
    tensor = torch.from_numpy(edges)
    sparse = torch.sparse_coo_tensor(
        tensor, torch.ones(len(edges[0])), (num_nodes, num_nodes), check_invariants=True
    )
    columns = pandas.DataFrame(edges.T, index=np.arange(edges.shape[1])[::-1])
    pairs = [tuple(edges), [*tensor], tuple(tensor.int()), (columns[0], columns[1])]
    return [*pairs, tuple(edges.tolist()), sparse, (matrix.tocsr() > 0).todok(), matrix]
