"""Tests: store.py and sources/prepare.py."""

import copy
import errno
import itertools
import json
import os
import pickle
import shutil
import types

import numpy as np
import pytest
import torch

import store
from disk import convert, sort
from disk import files as disk
from disk.columns import COLUMNS, Column
from disk.convert import Rows
from disk.files import StoreError
from extras import graph_store as graphs
from extras import graph_tables
from extras.graph_store import GraphDataset, build_graphs
from sources import cli, prepare
from store import GraphStore, build_store, verify
from tests.common import _code, _graph, _run_here, _store
from tests.stores import (
    _cases,
    _edge_forms,
    _edges,
    _forms,
    _graphs,
    _refuses,
    _reseal,
    _rewrite_meta,
    _save_npz,
    _sums,
)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_store_round_trip(tmp_path, monkeypatch, backend, dtype):
    """Also pickled, as its path and changes; from another folder; rows, larger than memory, that threads gather."""
    args = _graph()
    names = None if backend == "mmap" else ["\u2028b", "", *map(str, range(198))]
    args["features"] = x = (torch.from_numpy(args["features"]).abs() * 10).to(dtype)
    options = dict(backend=backend, block_rows=7, node_names=names)
    tmp_path /= os.fsdecode(b"\xff")  # a name that is not UTF-8
    path = build_store(tmp_path / "g", **options, **args)
    monkeypatch.chdir(tmp_path)
    graph = GraphStore.open("g")
    monkeypatch.setattr(disk, "free_host_bytes", lambda: 900)
    large = GraphStore.open("g").features
    monkeypatch.chdir("/")
    assert large.large and not hasattr(large, "tensor")
    assert graph.node_names() == names and not graph.features.large
    sizes = (graph.num_nodes, graph.num_edges, graph.feature_dim, graph.num_classes)
    assert sizes == (200, 3000, 5, 4)
    assert graph.indptr.dtype == torch.int64 and graph.indices.dtype == torch.int32
    assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    stored = {"labels": graph.labels, **graph.split}
    given = {"labels": args["labels"], **args["split"]}
    assert all(np.array_equal(stored[name], values) for name, values in given.items())
    assert graph.features.shape == (200, 5) and graph.features.dtype == dtype
    pickled = [pickle.dumps(thing) for thing in (graph, graph.features)]
    again, features = map(pickle.loads, pickled)
    assert torch.equal(again.indices, graph.indices) and max(map(len, pickled)) < 1000
    some, few = torch.randint(0, 200, (1000,)), torch.tensor([199, 0, 0], dtype=torch.int32)
    for rows, ids in itertools.product((graph.features, features, large), (some, few, few[:0])):
        out = torch.empty(len(ids), 5, dtype=dtype)
        assert rows.gather(ids, out=out) is out
        assert torch.equal(out, x[ids.long()]) and torch.equal(rows.gather(ids), out)
    for rows, bad in itertools.product((graph.features, large), (200, -1)):
        _refuses(f"node {bad}", rows.gather, torch.tensor([3, bad]), error=IndexError)
    assert verify(path) == []
    assert all(np.load(f, allow_pickle=False).size >= 0 for f in path.glob("*.npy"))
    if backend == "mmap":  # what was not read before the store is removed
        large = GraphStore.open(path).features
        shutil.rmtree(path)
        assert torch.equal(large.gather(some), x[some])


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_pickled_store_of_several_splits(tmp_path, backend):
    """A spawned process trains on the split that was taken, and is refused another graph at the same path."""
    args = {**_graph(), "split": [{"train": [0, 1]}, {"train": [2]}], "backend": backend}
    graph = GraphStore.open(build_store(tmp_path / "g", **args))
    graph.take_split(graph.numbered_split(1))
    if backend == "lmdb":  # other rows are no other store
        graph.features.put_rows(torch.tensor([0]), torch.ones(1, 5))
    assert copy.deepcopy(graph).split["train"].tolist() == [2]
    shutil.rmtree(tmp_path / "g")
    args["labels"] = np.roll(args["labels"], 1)
    build_store(tmp_path / "g", **args)
    _refuses("rebuilt after it was opened", pickle.dumps, graph)


def test_what_is_written_to_a_mapped_tensor_stays_in_its_process(tmp_path, monkeypatch):
    """Where the kernel refuses such maps, tensors are still read."""
    path = _store(tmp_path / "g", edge_features=np.ones((3000, 1)), node_time=range(200))
    x = torch.from_numpy(_graph()["features"])
    mapped = disk.mmap.mmap

    def only_to_read(*args, **options):
        if len(args) > 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapped(*args, **options)

    with monkeypatch.context() as refusing:
        refusing.setattr(disk.mmap, "mmap", only_to_read)
        read = GraphStore.open(path).features[:]
    graph, other = GraphStore.open(path), GraphStore.open(path)
    assert torch.equal(read, graph.features[:]) and torch.equal(read, x)
    arrays = "indptr indices labels edge_features node_time".split()
    of = lambda graph: [graph.split["train"], *(getattr(graph, name) for name in arrays)]  # noqa: E731
    for tensor in of(graph):
        tensor[:2] = -1
    graph.node_time = torch.ones(200)  # in the place of what is stored
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(graph))))
    assert all(map(torch.equal, of(again), of(graph)))
    graph.features.tensor[0] = 7.0
    assert graph.features[[0]].tolist() == [[7.0] * 5]
    assert not any(map(torch.equal, of(graph), of(other)))
    assert other.features[[0]].tolist() != [[7.0] * 5] and verify(path) == []
    _refuses("rows of its features were written in this process", pickle.dumps, graph)


def test_rounding_that_leaves_few_values_is_reported(tmp_path, capsys):
    """Of a store, a table and of what is trained on; and a checkpoint of other rounding."""
    x = np.random.default_rng(0).standard_normal((200, 5))
    for number, kind in enumerate(("int8", "bfloat16", "float16", None)):
        build_store(tmp_path / f"{number}", **_graph() | {"features": x}, feature_dtype=kind)
    assert capsys.readouterr().out == ""
    x[3, 1] = -999
    x[:, 2] = x[:, 3] = x[:, 4] = 1700000000 + np.arange(200)
    graph = _graph() | {"features": x.copy(), "feature_names": [*"abcde"]}
    words = f"--root {tmp_path} --fanout 2,2 --hidden 4 --gpus 0 --dataset {tmp_path}"
    few = "few different values are left of "
    for kind, of in (
        ("int8", "1 column, b (3 of 200)"),
        ("bfloat16", "3 columns, c (1 of 200), d (1 of 200), e (1 of 200)"),
    ):
        build_store(tmp_path / kind, **graph, feature_dtype=kind)
        line = f"features kept as {kind}: {few}{of}, in 200 rows looked at\n"
        assert capsys.readouterr().out == line
        assert _code(f"{words}/{kind} --epochs 1") == 0
        assert f"data    {line}" in capsys.readouterr().out
    x[:, 0] = x[:, 2]
    _save_npz(tmp_path / "g.npz", x=x)
    predict = f"--resume {tmp_path}/c.pt --predict {tmp_path}/p.csv"
    differ = "those that the network was trained on not rounded: scores may differ"
    columns = "4 columns, 0 (3 of 200), 2 (3 of 200), 3 (3 of 200), ..."
    for more, said in (
        (f"--epochs 1 --checkpoint {tmp_path}/c.pt", f"trained on as float32: {few}{columns}"),
        (f"{predict} --feature-dtype int8", f"features are int8, {differ}"),
    ):
        assert _code(f"{words}/g.npz", more) == 0
        assert said in capsys.readouterr().out
    assert _code(f"{words}/g.npz", predict) == 0 and differ not in capsys.readouterr().out
    np.savetxt(tmp_path / "x.csv", x[:, :3], delimiter=",", header="a,b,time", comments="")
    graph_tables.features(tmp_path / "x.csv", tmp_path)
    said = f"float32: {few}2 columns, a (3 of 200), time (3 of 200)"
    assert said in capsys.readouterr().out


def _columns_slowly(edges, options, node_time=None):
    """Compute in plain Python what the store holds of edges (source, destination, type, time, number), in its order;
    node_time: times of their sources in place of theirs."""
    rows = [
        (dst, src, kind, time, 0, number)
        for src, dst, kind, time, number in edges
        if src != dst or not options["drop_self_loops"]
    ]
    if options["symmetrize"]:
        rows += [(src, dst, kind, time, 1, number) for dst, src, kind, time, _, number in rows]
    if node_time is not None:
        rows = [(dst, src, kind, node_time[src], *rest) for dst, src, kind, _, *rest in rows]
    rows.sort()
    if options["drop_duplicates"]:
        rows = [next(group) for _, group in itertools.groupby(rows, lambda row: row[:3])]
    return sorted(rows, key=lambda row: (row[0], *row[2:4]))


@pytest.mark.parametrize("seed", range(48))
def test_store_edges_and_their_columns_follow_the_options(seed, tmp_path, monkeypatch):
    """Random multigraphs with every option, edges in pieces and sorted in ranges, compared with plain Python."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(sort, "EDGE_CHUNK", int(rng.integers(1, 200)))
    monkeypatch.setattr(sort, "SORT_EDGES", int(rng.integers(8, 2000)))
    monkeypatch.setattr(sort, "FEW_EDGES", int(rng.integers(1, 100)))
    monkeypatch.setattr(convert, "ROW_BYTES", int(rng.integers(8, 4000)))
    V, M = int(rng.integers(1, 30)), int(rng.integers(0, 300))
    V, M = {16: (V, 0), 17: (V, 0), 18: (1, M)}.get(seed, (V, M))  # no edges; loops alone
    edge_index = rng.integers(0, V, (2, M))
    times, weights = rng.integers(-3, 12, M), 9 * rng.random(M) * (rng.random(M) < 0.9)
    dtypes = "float32 bfloat16 float64 uint8 int64 float16 uint16 uint32 uint64".split()
    weights = torch.from_numpy(weights).to(getattr(torch, dtypes[seed % 9]))
    kinds = rng.integers(0, 3, M) if seed % 5 else rng.integers(250, 300, M)
    kinds = kinds.astype(np.min_scalar_type(kinds.max(initial=0)))
    rows = (torch.from_numpy(rng.random((M, 3))) * 200).to(getattr(torch, dtypes[seed % 6]))
    options = {"symmetrize": bool(seed & 1), "drop_self_loops": bool(seed & 2)}
    options["drop_duplicates"] = bool(seed & 4)
    graph = {"edge_index": torch.from_numpy(edge_index) if seed % 3 else edge_index}
    if seed & 8:
        order = np.argsort(edge_index[1], kind="stable")
        edge_index, times, kinds = edge_index[:, order], times[order], kinds[order]
        weights, rows = weights[order], rows[order]
        indptr = np.append(0, np.cumsum(np.bincount(edge_index[1], minlength=V)))
        graph = {"indices": edge_index[0], "indptr": indptr}
    given = {"edge_weight": weights, "edge_time": times.astype(float), "edge_features": rows}
    given["edge_type"] = kinds
    share = 0 if seed < 16 else 0.7  # at first none
    given = {name: values for name, values in given.items() if rng.random() < share}
    nodes = {"features": np.zeros((V, 1), np.float32), "labels": np.zeros(V, int)}
    nodes["split"] = {"train": [0]}
    node_time = rng.integers(-3, 3, V) if rng.random() < 0.5 else None
    source_times = None if "edge_time" in given else node_time
    nodes |= {} if node_time is None else {"node_time": node_time}
    ordered = {"edge_order": bool(rng.integers(2))}
    path = build_store(tmp_path / "g", **graph, **nodes, **given, **options, **ordered)
    found, none = GraphStore.open(path), np.zeros(M, int)
    keys = {"edge_type": kinds, "edge_time": times}
    by = [keys[name] if name in given else none for name in keys]
    rows_of_edges = zip(*(a.tolist() for a in (*edge_index, *by, np.arange(M))))
    expected = _columns_slowly(rows_of_edges, options, source_times)
    sorts = any(options.values()) or source_times is not None or keys.keys() & given.keys()
    if "indptr" in graph and not sorts:
        expected = sorted(expected, key=lambda row: row[-1])  # stored as it was
    assert np.repeat(np.arange(V), np.diff(found.indptr)).tolist() == [row[0] for row in expected]
    assert found.indices.tolist() == [row[1] for row in expected]
    numbers = torch.tensor([row[-1] for row in expected], dtype=torch.int64)
    if ordered["edge_order"]:
        assert torch.equal(found.edge_order, numbers)
        assert torch.equal(found.given_edges(torch.arange(len(numbers))), numbers)
        for wrong in (-1, len(numbers)):
            _refuses(f"positions.0. is {wrong}: pos", found.given_edges, [wrong])
        asked = rng.permutation(numbers.unique())
        positions = [np.flatnonzero(numbers == number).tolist() for number in asked]
        assert found.stored_edges(asked).tolist() == sum(positions, [])
        lacking = np.setdiff1d(np.arange(-1, M + 1), numbers)
        _refuses(
            f"edges.0. is {lacking[-1]}: stored edges have numbers up to",
            found.stored_edges,
            lacking[-1:],
        )
    else:
        for ask in (found.given_edges, found.stored_edges):
            _refuses("g does not have the order .*edge_order=True", ask, [0])
    for name, values in (
        ("edge_weight", torch.as_tensor(weights).float()),
        ("edge_time", torch.from_numpy(times)),
        ("edge_type", torch.from_numpy(kinds)),
        ("edge_features", rows),
    ):
        there = getattr(found, name)
        if name == "edge_time" and source_times is not None:
            assert there.tolist() == [row[3] for row in expected]
            continue
        assert (there is None) == (name not in given)
        if there is not None:
            wide = torch.int16 if there.dtype == torch.uint16 else there.dtype
            assert there.dtype == values.dtype
            assert torch.equal(there.view(wide), values.view(wide)[numbers]), name
    assert node_time is None or found.node_time.tolist() == node_time.tolist()
    assert found.meta["options"] == options
    assert found.edge_dim == 3 * ("edge_features" in given) and verify(path) == []
    assert {file.name for file in path.iterdir()} == {"meta.json", *found.meta["files"]}


def test_store_verify_names_the_changed_file_and_old_stores_open(tmp_path):
    rng, args = np.random.default_rng(0), _graph()
    columns = {"edge_weight": rng.random(3000), "edge_time": rng.integers(0, 9, 3000)}
    columns |= {"edge_features": rng.random((3000, 2)), "node_time": np.arange(200)}
    path = build_store(tmp_path / "g", **args, **columns)
    said = store.info(path)
    assert "weight, features 2 x float64, time 0 to 8, nodes' time 0 to 199" in said
    assert "format            3" in said
    sealed = (path / "meta.json").read_bytes()
    changes = "indptr 5, indices 3, labels 9, train 0, indptr 0, edge_weight 0, edge_time 0, edge_features 0"
    for change in changes.split(", "):
        name, position = change.split()
        good = (path / f"{name}.npy").read_bytes()
        _reseal(path, name, int(position), 200)
        resealed = [p[:12] for p in verify(path)]  # what opening looks at
        assert resealed == ["indptr.npy: "] * (change == "indptr 0")
        (path / "meta.json").write_bytes(sealed)
        (problem,) = verify(path)
        assert problem.startswith(f"{name}.npy: its sha256")
        (path / f"{name}.npy").write_bytes(good)
    good = json.loads(sealed)
    file = path / "edge_time.npy"  # longer: its header does not say so
    data, kept = file.read_bytes(), good["files"]["edge_time.npy"]
    file.write_bytes(data + bytes(8))
    longer = good["files"] | {"edge_time.npy": kept | {"bytes": len(data) + 8}}
    _rewrite_meta(path, **{**good, "files": longer})
    _refuses("edge_time.npy cannot be read: its header is damaged", GraphStore.open, path)
    file.write_bytes(data)
    _rewrite_meta(path, **good)
    assert verify(path) == []
    old = build_store(tmp_path / "old", **args)
    assert json.loads((old / "meta.json").read_text()).keys().isdisjoint({"edge_dim", "edge_dtype"})
    _rewrite_meta(old, format_version=2)  # which differs in nothing else
    graph = GraphStore.open(old)
    assert verify(old) == [] and graph.edge_dim == 0
    assert {graph.edge_weight, graph.edge_time, graph.edge_features, graph.node_time} == {None}


# of a graph of four nodes and three edges: what is given instead => what refuses it
REFUSED_ARRAYS = r"""
{"edge_index": [[0, 0], [0, 4]]} => edge 1 goes from node 0 to node 4: .*; do they count from 1\?
{"edge_index": [[0, -4], [0, 0]]} => edge 1 goes from node -4
{"edge_index": [[0, 1], [1, 2], [2, 3]]} => edge_index has shape
{"edge_index": [[0.0], [1.5]]} => edge_index has dtype float64
{"edge_index": "edges"} => edge_index is a str: an array is needed
{"edge_index": [[0, 1, 2], [1, 2]]} => edge_index has parts of lengths 2 and 3: one is
{"edge_index": null} => either as edge_index or as indptr
{"indptr": [0], "indices": [0]} => either as edge_index or as indptr and indices
{"edge_index": null, "indices": [0, 0, 0], "indptr": [0, 2, 1, 3, 3]} => indptr\[1\] is 2: the next is smaller
{"edge_index": null, "indices": [0, 0, 0], "indptr": [0, 0, 0, 0, 0]} => from 0 to 0
{"edge_index": null, "indices": [0, 0, 0], "indptr": [0, 3]} => indptr has shape \[2\]
{"edge_index": null, "indices": [0, 4], "indptr": [0, 0, 0, 0, 2]} => indices\[1\] is 4
{"feature_names": ["a", "b", "c"]} => feature_names has 3 names: 2 are needed
{"labels": [4, 0, 0, 0]} => labels\[0\] is 4
{"labels": [-2, 0, 0, 0]} => labels\[0\] is -2
{"labels": [0, 1]} => labels has shape \[2\]: \[4\]
{"labels": [18446744073709551615, 18446744073709551615, 18446744073709551615, 18446744073709551615]} => labels holds 18446744073709551615
{"labels": [0, -1, 0, 0]} => holds node 1, which has no label
{"labels": [-1, -1, -1, -1], "num_classes": null} => none of the 4 nodes has a label
{"num_classes": 0} => num_classes is 0
{"num_classes": 16777217} => num_classes is 16777217.*: from 1 to 16,777,216
{"labels": [5000, 5001, 5002, 5003], "num_classes": null} => labels run up to 5,003 and 4 different
{"features": [[1, 2], [3, 4], [5, NaN], [7, 8]]} => features\[2, 1\] is nan
{"features": [0, 0]} => features has shape
{"features": null} => features is None: an array is needed
{"features": [[1e5, 0.5], [0, 0], [0, 0], [0, 0]], "feature_dtype": "float16"} => features\[0, 0\] is 100000.0: beyond the range of float16
{"features": [[1, 2], [3, 4], [5, 6], [7, 8]], "feature_dtype": "int8"} => int8 with features of int64: features of floats can be kept as .* int8
{"features": [[0, 0], [0, 4e38], [0, 0], [0, 0]], "feature_dtype": "int8"} => column of features.1. is 4e.38: int8 needs a range
{"split": {"train": [0, 1], "valid": [2, 1]}} => node 1 is in split 'train' and in 'valid'
{"split": {"train": [0, 1], "valid": [2, 1]}, "node_names": ["a", "b", "c", "d"]} => node b is in split 'train' and in 'valid'
{"split": {"train": [2, 3, 2]}} => node 2 more than once
{"split": {"train": [0, 1, 1]}} => node 1 more than once; a mask is of bool
{"split": {"train": [0], "test": [4]}} => 'test' holds node 4
{"split": {"train": [], "test": [1]}} => 'train' is empty
{"split": {"train": [0], "vel": [1]}} => part 'vel'
{"split": {"train": [0], "valid": [1], "val": [2]}} => split has 'valid' and 'val', which
{"split": [[0, 1], [2, 3]]} => split 0 of 2: split is a list:
{"split": {"valid": [true, true, true]}} => 'valid', a mask, has shape \[3\]
{"split": {"train": [0.5]}} => split 'train' has dtype float64
{"node_names": ["a", "b"]} => node_names has 2 names: 4 are needed
{"node_names": ["a\nb", "c", "d", "e"]} => name 0, 'a.nb', .* line
{"node_names": ["a", "b", "c", "a"]} => node_names holds 'a' more than once
{"backend": "sqlite"} => backend 'sqlite'
{"block_rows": 0} => block_rows is 0
{"edge_weight": [1, 1]} => weight is a ndarray \[2\]: an array \[3\] is needed
{"edge_weight": [-1.0, 1, 1]} => edge_weight\[0\] is -1.0: a weight says how likely
{"edge_weight": [1, 1, 1e300]} => edge_weight\[2\] is 1e\+300
{"edge_weight": [1e-50, 1, 1]} => edge_weight\[0\] is 1e-50
{"edge_time": [0.5, 1, 1]} => edge_time\[0\] is 0.5: whole numbers are needed
{"edge_time": [18446744073709551615, 18446744073709551615, 18446744073709551615]} => whole numbers below 2\^63
{"node_time": [1, 1, 1]} => \[3\]: an array \[4\] is needed, a row for each node
{"edge_features": [[1, 2], [3, 4], [5, NaN]]} => edge_features\[2, 1\] is nan
{"edge_features": [[], [], []]} => \[3, 0\]: an array \[3, D\]
{"edge_type": [0, 1, 0], "edge_types": ["a\n", "b"]} => names of printable text are needed
"""


def _refused_arrays():
    """Yield (changes of build_store's arguments, part of the message), also of what JSON does not spell."""
    for changes, message in _cases(REFUSED_ARRAYS):
        yield json.loads(changes), message
    x, whole, eye = np.ones((4, 2), np.float32), np.ones((4, 2), int), torch.eye(4)
    rows = lambda *values: Rows([4, 2], np.float32, [*values])  # noqa: E731
    csc = {"edge_index": None, "indptr": [0, 0, 0, 0, 3]}
    streamed = {**csc, "indices": Rows([3], np.int32, iter([np.zeros(3, np.int32)]))}
    unsorted = "no graph options, types and times"
    yield streamed | {"edge_time": [2, 1, 0]}, unsorted
    yield streamed | {"node_time": range(4)}, unsorted
    for name, value, message in (
        ("features", x.astype(complex), "features has dtype complex128"),
        ("features", rows(x[:3]), "came with 3 rows, 4 were announced"),
        ("features", x.astype(object), r"holds objects of Python \(float\): give numbers as"),
        ("features", np.ma.masked_less(x, 2), "features cannot be read: it has masked entries"),
        ("edge_index", torch.eye(3).to_sparse(), r"has shape \[3, 3\]: \[4, 4\] is needed"),
        ("edge_index", 2 * eye.to_sparse(), "a matrix with values other than 1: give it as"),
        ("split", torch.arange(3), "split is a Tensor: .*, or a list of such"),
        ("edge_weight", np.ones(3) * 1j, "edge_weight has dtype .*complex128"),
        ("edge_time", torch.full((3,), 512).bfloat16(), "is 512.0: bfloat16 rounds .* above 256"),
        ("edge_features", Rows([3, 1], np.int8, []), r"edge_features is a Rows \[3, 1\]"),
    ):
        yield {name: value}, message
    yield {**csc, "indices": torch.ones(3).bfloat16()}, "indices cannot be read: .* BFloat16"
    yield {"features": whole.astype("u1"), "feature_dtype": "float16"}, "with features of uint8: f"


def test_store_takes_arrays_in_the_forms_that_people_have_them_in(tmp_path, monkeypatch):
    graph = _graph()
    graph["edge_index"] = edges = np.unique(graph["edge_index"], axis=1)
    weights = np.arange(edges.shape[1])
    forms = {"features": _forms(graph["features"]), "labels": _forms(graph["labels"])}
    forms |= {"edge_index": _edge_forms(edges, 200), "edge_time": _forms(weights)}
    forms["edge_features"] = _forms(weights.reshape(-1, 1).astype(np.float32))
    given = {**graph, "edge_time": weights, "edge_features": weights}
    stored = _contents(build_store(tmp_path / "g", **given))
    forms["split"] = [{**graph["split"], "train": f} for f in _forms(graph["split"]["train"])]
    for i in range(max(map(len, forms.values()))):
        some = {name: values[i % len(values)] for name, values in forms.items()}
        assert _contents(build_store(tmp_path / f"{i}", **{**given, **some})) == stored, i
    monkeypatch.setattr(convert, "free_host_bytes", lambda: 1000)
    said = "features is sparse: dense it takes 4,000 bytes, and 1,000 are free"
    sparse = forms["features"][-4]
    _refuses(said, build_store, tmp_path / "large", **{**given, "features": sparse})


def test_columns_of_a_data_frame_are_feature_names(tmp_path):
    """Also of objects, and of nodes of several types, where a name says of which."""
    frame, numbered = (_forms(_graph()["features"])[5] for _ in range(2))
    frame.columns = [*"abcde"]
    plain = types.SimpleNamespace(x=frame, edge_index=_graph()["edge_index"])
    kinds = {"edge_index": {("p", "r", "q"): [[0], [0]]}, "node_types": {"p": 200, "q": 200}}
    parts = {"p": frame, "q": frame[["b", "a"]]}
    for number, (build, args, expected) in enumerate(
        (
            (_store, {"features": frame}, [*"abcde"]),
            (_store, {"features": frame, "feature_names": [*"vwxyz"]}, [*"vwxyz"]),
            (_store, {"features": numbered}, None),
            (lambda path, source: prepare.build(source, path), {"source": plain}, [*"abcde"]),
            (build_store, {**kinds, "features": {"q": frame}}, [*"abcde"]),
            (
                build_store,
                {**kinds, "features": parts},
                ["a of p, b of q", "b of p, a of q", "c of p", "d of p", "e of p"],
            ),
            (build_store, {**kinds, "features": {**parts, "p": numbered}}, None),
        )
    ):
        graph = GraphStore.open(build(path=tmp_path / str(number), **args))
        assert graph.feature_names == expected or number == 6, number
    assert graph.feature_names[:3] == ["b of q", "a of q", "column 2"]
    twice = {"features": frame[["a", "a"]]}
    _refuses("feature_names holds .* more than once", _store, tmp_path / "b", **twice)


def test_a_build_says_which_feature_tells_the_label_and_what_labels_lack(tmp_path, capsys):
    """By value, whatever its name; not what chance may do, nor values that are nearly all different."""
    rng = np.random.default_rng(0)
    y, x = rng.integers(0, 3, 2000), rng.normal(size=(2000, 3))
    several = rng.integers(0, 2, (2000, 4))
    some = {"train": np.arange(1900)}
    tells = lambda column: {"features": np.column_stack([x, column])}  # noqa: E731
    frame = pytest.importorskip("pandas").DataFrame({"a": x[:, 0], "isFraud": y * 7})
    typed = {
        "node_types": {"a": 5, "b": 2000},
        "edge_index": {("a", "r", "b"): [[0], [0]]},
        "features": {"a": np.ones((5, 2)), "b": frame},
        "labels": {"b": y},
    }
    for number, (args, said) in enumerate(
        (
            ({}, ""),
            (tells(y), "tell the label of all 60 training nodes: [:, 3]; leave out what was"),
            ({**tells(np.array([7, 3, 5])[y]), "feature_dtype": "int8"}, "nodes: [:, 3]; leave"),
            ({"features": frame, "backend": "lmdb"}, "of all 60 training nodes: isFraud; leave"),
            (typed, "of all 60 training nodes: isFraud of b; leave"),
            (
                {**tells(y * 9 + rng.integers(0, 9, 2000)), "split": some},
                "drawn from 1,900: [:, 3]",
            ),
            ({**tells(y + rng.random(2000) / 2), "split": some}, ""),
            ({**tells(y), "split": {"train": [0, 1, 2]}}, ""),
            ({**tells(y == 1), "split": some}, ""),
            ({**tells(several[:, 2]), "labels": several, "split": some}, "1,900: [:, 3]; leave"),
            ({"labels": y + 10}, "10 of 13 classes have no node: 0, 1, 2, 3, 4, 5, 6, 7, ..."),
            ({"labels": y + 10, "num_classes": 13}, ""),
            (
                {"features": np.zeros((2000, 20000), bool)},
                "16,384 of 20,000 features were compared",
            ),
        )
    ):
        given = {"edge_index": [[0], [1]], "features": x, "labels": y, **args}
        build_store(tmp_path / str(number), **given)
        out = capsys.readouterr().out
        assert said in out and bool(said) == bool(out), (number, out)


def _contents(path):
    graph = GraphStore.open(path)
    rows = graph.features.gather(torch.arange(200)), graph.labels, graph.split["train"]
    rows += graph.indptr, graph.indices, graph.edge_time, graph.edge_features
    return [values.double().tolist() for values in rows]


def test_store_refuses_bad_input_and_leaves_nothing(tmp_path):
    graph = {"edge_index": [[0, 1, 2], [1, 2, 3]], "features": np.ones((4, 2))}
    graph |= {"labels": [0, 1, 2, 3], "num_classes": 4, "split": {"train": [0, 1], "valid": [2]}}
    for changes, message in _refused_arrays():
        _refuses(message, build_store, tmp_path / "g", **{**graph, **changes})
        assert not any(tmp_path.iterdir()), message


@pytest.mark.parametrize("dtype", "f2 f4 f8 i1 i2 i4 i8 u1 ?".split())
def test_store_takes_every_layout_of_an_array(tmp_path, dtype):
    args = _graph(num_nodes=60, num_edges=90)
    args["split"] = {"train": np.arange(3)[::-1], "test": np.isin(np.arange(60), [5, 9])}
    args["edge_index"] = np.asfortranarray(args["edge_index"].astype(">u4"))
    x = (np.abs(args["features"]) * 3).astype(dtype)
    frozen = x.copy()
    frozen.flags.writeable = False
    want = torch.from_numpy(x.astype("u1") if dtype == "?" else x)
    gaps = np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3]
    layouts = x, x.astype(f">{dtype}"), np.asfortranarray(x), gaps, x[::-1].copy()[::-1], frozen
    for number, features in enumerate((*layouts, x.tolist())):
        graph = GraphStore.open(_store(tmp_path / str(number), **{**args, "features": features}))
        if isinstance(features, list):
            want = want.to({"f": torch.float64, "b": torch.uint8}.get(x.dtype.kind, torch.int64))
        assert graph.features.dtype == want.dtype and torch.equal(graph.features[:], want)
        assert graph.split["train"].tolist() == [2, 1, 0] and graph.split["test"].tolist() == [5, 9]
        assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_features_are_indexed_as_arrays_are(backend, tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    named = {"backend": backend, "feature_names": list("abcde")}
    graph = GraphStore.open(_store(tmp_path / "g", features=x, **named))
    reordered = GraphStore.open(tmp_path / "g")
    reordered.take_columns(list("edcba"))
    for features, rows in ((graph.features, x), (reordered.features, x[:, ::-1])):
        for ids in (np.array([7, 0, 7]), np.arange(200) % 3 == 0, slice(-9, None, 2), slice(0, 0)):
            given = [ids] if isinstance(ids, slice) else [ids, ids.tolist(), torch.from_numpy(ids)]
            assert all(np.array_equal(features[form], rows[ids]) for form in given)
        for words, bad in (
            ("node 200 is out of range", [200]),
            ("node -1 is out of range", [-1]),
            (r"ids has shape \[\]: \[n\] is needed", 3),
            (r"ids, a mask, has shape \[3\]: \[200\] is", torch.ones(3) > 0),
        ):
            _refuses(words, features.__getitem__, bad, error=(StoreError, IndexError))
        assert repr(features).endswith("Features([200, 5], torch.float32)")
    _store(tmp_path / "copy", features=reordered.features)
    assert np.array_equal(GraphStore.open(tmp_path / "copy").features[:], x[:, ::-1])


def test_a_store_is_shown_by_its_sizes_and_says_what_is_wrong_with_an_argument(tmp_path):
    graph = GraphStore.open(_store(tmp_path / "g", edge_weight=np.ones(3000)))
    assert repr(graph) == (
        "GraphStore(num_nodes=200, num_edges=3000, features=[200, 5], edge_weight=[3000], labels=[200], "
        f"num_classes=4, train=[50], valid=[30], test=[70], path={str(tmp_path / 'g')!r})"
    )
    ids, rows = torch.arange(2), graph.features
    for message, call, *args in (
        ("ids is a list: an int32", rows.gather, [1, 2]),
        (r"ids is \[2\] torch.bool", rows.gather, ids.bool()),
        (r"out is \[2, 5\] float32: torch.float32", rows.gather, ids, np.zeros((2, 5), "f4")),
        ("put_rows needs a store with backend lmdb", rows.put_rows, ids[:1], torch.ones(1, 5)),
    ):
        _refuses(message, call, *args)
    _store(tmp_path / "many_classes", num_classes=5000, labels=np.arange(200) + 4000)


def test_store_what_is_built_can_be_opened(tmp_path, monkeypatch):
    """A build is renamed once the reader has opened it; what is larger than the disk is refused before."""

    def refuse(path):
        raise StoreError(f"{path} cannot be opened")

    many = lambda path: build_graphs(path, [_graphs(3)])  # noqa: E731
    for kind, build in ((GraphStore, _store), (GraphDataset, many)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "open", refuse)
            _refuses("cannot be opened", build, tmp_path / "s")
    rows = Rows(
        [1 << 20, 1 << 20], np.float32, iter(())
    )  # for int8 they are written to a file first
    wide = {"features": rows, "edge_index": [[0], [1]]}
    for size, options in ((4.4, {}), (4.4, {"backend": "lmdb"}), (5.5, {"feature_dtype": "int8"})):
        said = f"no room for .*it takes about {size} TB, .* free"
        _refuses(said, build_store, tmp_path / "s", **wide, **options)
    assert list(tmp_path.iterdir()) == []


def test_store_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A build and `write_whole` fsync what they wrote, rename it, then fsync the folder."""
    done, fsync, move = [], os.fsync, os.replace

    def synced(handle):
        done.append(os.path.basename(file := os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)
        if os.path.isdir(file):  # as on network file systems that cannot
            raise OSError(errno.EINVAL, "Invalid argument")

    def renamed(old, new):
        done.append("renamed")
        move(old, new)

    for name, function in (("fsync", synced), ("rename", renamed), ("replace", renamed)):
        monkeypatch.setattr(os, name, function)
    path = _store(tmp_path / "g")
    *before, last = done
    assert last == tmp_path.name and before[-1] == "renamed" and before.count("renamed") == 1
    assert {file.name for file in path.iterdir()} < set(before)
    done.clear()
    disk.write_whole(tmp_path / "file", lambda out: out.write(b"x"))
    part, *after = done
    assert part.startswith(".file.") and after == ["renamed", tmp_path.name]


def test_store_existing_target_stays(tmp_path):
    path = _store(tmp_path / "g")
    before, x = _sums(path), _graph()["features"]
    _refuses("exists already", build_store, path, **_graph(seed=1))

    def race():  # somebody else completes the target while this build is at work
        shutil.copytree(path, tmp_path / "h")
        yield x

    _refuses("exists already", _store, tmp_path / "h", features=Rows((200, 5), np.float32, race()))
    assert _sums(path) == _sums(tmp_path / "h") == before
    assert {p.name for p in tmp_path.iterdir()} == {"g", "h"}


def test_store_build_that_fails_leaves_nothing_and_removes_what_dead_builds_left(tmp_path):
    def rows(error):
        yield np.zeros((100, 5), np.float32)
        raise error

    path = tmp_path / "a" / "b" / "g"
    left = path.with_name(f".g.{0:016x}.part")
    for backend, error in itertools.product(("mmap", "lmdb"), (RuntimeError, KeyboardInterrupt)):
        left.mkdir(parents=True)
        (left / "indices.npy").write_bytes(b"half")
        with pytest.raises(error):
            _store(path, backend=backend, features=Rows((200, 5), np.float32, rows(error)))
        assert not any(path.parent.iterdir())
    _store(path)


def test_store_open_refuses_meta_that_makes_no_sense(tmp_path):
    path = _store(tmp_path / "g", edge_features=np.ones((3000, 2)))
    many = build_graphs(tmp_path / "many", [_graphs(5)])
    meta, many_graphs = (json.loads((folder / "meta.json").read_text()) for folder in (path, many))
    _rewrite_meta(path, format_version=7)
    _refuses(r"store format 7; this code reads 2 to 5; rebuild it", GraphStore.open, path)
    one_graph = "num_nodes num_edges feature_dim feature_dtype backend options"
    for folder, good, kind, names in (
        (path, meta, GraphStore, f"format files {one_graph}"),
        (many, many_graphs, GraphDataset, "format files node_dim edge_dtype target_dim"),
    ):
        for name in names.split():
            for value in (..., None, -1, 1 << 62, 1.5, True, "x", [], {}):
                if (name, value) == ("options", {}):  # which is sane
                    continue
                _rewrite_meta(folder, **{**good, name: value})
                assert cli.main(["verify", str(folder)]) == 1
                if not name.endswith("_dim") or kind is GraphStore:
                    _refuses("cannot be read|is not from|format", kind.open, folder)
    for change in ({"node_dim": 3}, {"node_dtype": "float32"}, {"target_dtype": "float64"}):
        # sane by itself, not what is in the file
        _rewrite_meta(many, **{**many_graphs, **change})
        assert graphs.verify(many)[0].startswith("graphs.lmdb: ")
    label = meta["files"]["labels.npy"]
    for record in (None, {}, dict(label, bytes="9")):
        _rewrite_meta(path, **dict(meta, files=dict(meta["files"], **{"labels.npy": record})))
        _refuses("meta.json|labels.npy", GraphStore.open, path)
    other = json.dumps(meta), json.dumps(dict(meta, source="else"))
    for text in ("", "[]", "{", "[" * 100_000, "\xff\x00", *other):
        (path / "meta.json").write_text(text, encoding="latin1")
        _refuses("meta.json", GraphStore.open, path)
    _refuses("is no store", GraphStore.open, tmp_path / "nowhere")


def test_store_command_line(tmp_path, capsys):
    weights = {"edge_weight": np.ones(3000, np.float32)}
    path = _store(tmp_path / "g", backend="lmdb", source="a test", **weights)
    assert cli.main(["info", str(path)]) == 0
    info = capsys.readouterr().out
    assert "3,000" in info and "a test" in info and "valid 30" in info
    assert cli.main(["verify", str(path)]) == 0
    good = capsys.readouterr().out
    assert good.count("OK") == 9 and "BAD" not in good
    (path / "notes.txt").write_text("mine")
    (path / "labels.npy").rename(tmp_path / "kept")
    (path / "labels.npy").mkdir()
    assert cli.main(["verify", str(path)]) == 1
    bad = capsys.readouterr().out
    assert "BAD labels.npy" in bad and bad.count("OK") == 8
    assert "--  notes.txt: not part of the store" in bad
    (path / "labels.npy").rmdir()
    (tmp_path / "kept").rename(path / "labels.npy")
    files = json.loads((path / "meta.json").read_text())["files"]
    for digest in ("", "0" * 63, 7, None):
        files["labels.npy"]["sha256"] = digest
        _rewrite_meta(path, files=files)
        assert verify(path)[0].startswith("labels.npy: "), digest
    for command in ("info", "verify"):
        assert cli.main([command, str(tmp_path / "nothing")]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "no store" in said


NAMES_OF = {
    "numbers": lambda rng: [str(n) for n in rng.permutation(200) + 1],
    "codes": lambda rng: [f"{n:05d}" for n in rng.permutation(200)],
    "rows": lambda rng: None,
    "text": lambda rng: ["", "é", "a b", *(f"n{n}" for n in rng.permutation(197))],
}


@pytest.mark.parametrize("kind", NAMES_OF)
def test_nodes_are_looked_up_by_name(kind, tmp_path):
    """Integers and text of any shape, as a dictionary finds them."""
    rng = np.random.default_rng(0)
    names = NAMES_OF[kind](rng)
    graph = GraphStore.open(_store(tmp_path / "g", node_names=names))
    for shape in ((), (7,), (30, 2), (2, 0), (0, 2)):
        rows = rng.integers(0, 200, shape)
        given = np.array(names)[rows] if names else rows
        forms = [given, given.tolist()]
        if names:
            forms += [given.astype(object), np.char.encode(given, "utf-8")]
        if kind in ("numbers", "rows"):
            forms += [given.astype(dtype) for dtype in "int64 int32 uint8 uint64".split()]
            forms.append(torch.tensor(given.astype(int)))
        for form in forms if shape else forms[:1]:
            ids = graph.node_ids(form)
            assert ids.dtype == torch.int64 and ids.tolist() == rows.tolist()
    if not names:
        for bad, said in (
            ([0, 200], r"ids\[1\] is 200: node ids lie in \[0, 200\)"),
            ([-1], r"ids\[0\] is -1"),
            (["7"], "ids is text, and the nodes have no names: row numbers, integers, are needed"),
            ([1.5], "ids has dtype float64: integers are needed"),
        ):
            _refuses(said, graph.node_ids, bad)
        return
    such = f"names of nodes are such as {names[0]!r}, {names[1]!r}, {names[2]!r} .nodes.txt."
    for bad, unknown in ((["zoe", names[3]], "zoe"), ([[201, 0]], "201"), ([-1], "-1")):
        _refuses(f"ids has node {unknown!r}: {such}", graph.node_ids, bad)
    for bad in ([1.0], [True]):
        _refuses("p has dtype .*: names of nodes, text or integers", graph.node_ids, bad, "p")
    _refuses("p holds objects of Python .NoneType, int.", graph.node_ids, np.array([1, None]), "p")


def _target(name, values):
    return np.asarray(values, np.float32), {}


def _column():
    """Declare a further column of nodes."""
    return Column(
        "node_target",
        of="node",
        check=_target,
        dtype="float32",
        aliases=("node_target", "target"),
        flag="node_targets",
        describe=lambda graph: "targets",
        elsewhere=lambda values: np.nan,
    )


def test_a_record_is_all_that_a_column_takes(tmp_path, monkeypatch, capsys):
    """A further column of nodes goes through every door: arrays, .npz by another name, tables, by type, and info."""
    record = _column()
    assert record.usage() == ("FILE", "tables: a row per node")
    monkeypatch.setitem(COLUMNS, record.name, record)
    args = _graph()
    target = np.random.default_rng(0).random(200)
    path = build_store(tmp_path / "arrays", **args, node_target=target)
    _save_npz(tmp_path / "a.npz", target=target)
    npz = prepare.build(tmp_path / "a.npz", tmp_path / "npz", symmetrize=True)
    for name, rows in (("edges", args["edge_index"].T), ("x", args["features"]), ("t", target)):
        np.savetxt(tmp_path / f"{name}.csv", rows, "%.17g", ",")
    files = {"features": tmp_path / "x.csv", "node_targets": tmp_path / "t.csv"}
    table = prepare.build(tmp_path / "edges.csv", tmp_path / "table", **files)
    for made in (path, npz, table):
        graph = GraphStore.open(made)
        assert graph.node_target.tolist() == np.float32(target).tolist() and verify(made) == []
        assert "targets" in store.info(made) and "node_target=[200]" in repr(graph)
    typed = build_store(
        tmp_path / "typed",
        node_types={"a": 2, "b": 3},
        edge_index={("a", "to", "b"): [[0, 1], [2, 0]]},
        features={"a": np.eye(2)},
        node_target={"b": [1, 2, 3]},
    )
    assert str(GraphStore.open(typed).node_target.tolist()) == "[nan, nan, 1.0, 2.0, 3.0]"


def test_a_column_is_not_lost_on_resuming(tmp_path, monkeypatch, capsys):
    record = _column()
    monkeypatch.setitem(COLUMNS, record.name, record)
    targets = {record.name: np.zeros(200)}
    weights = {"edge_weight": np.ones(3000)}
    full = _store(tmp_path / "full", **weights, **targets)
    words = "--gpus 0 --fanout 3,3 --hidden 8 --epochs"
    _run_here(tmp_path, f"--dataset {full} {words} 1")
    assert "edges   weights of edges are not used: --sampler weighted" in capsys.readouterr().out
    for lost, kept in (("edge_weight", targets), ("node_target", weights)):
        path = _store(tmp_path / lost, **kept)
        again = f"--resume {tmp_path}/here.pt --dataset {path} {words} 2"
        assert _code(again) == 2
        assert f"of other data: {lost}.npy in {path} is not the same" in capsys.readouterr().err
    fuller = _store(tmp_path / "fuller", **weights, **targets, edge_order=True)
    assert _code(f"--resume {tmp_path}/here.pt --dataset {fuller} {words} 2") == 0


def test_an_unknown_column_is_refused(tmp_path):
    said = "build_store has no argument edge_wieght: columns are edge_weight, edge_type, edge_time"
    for form in ({}, {"edge_index": {("a", "to", "a"): [[0], [0]]}, "node_types": {"a": 1}}):
        _refuses(said, _store, tmp_path / "g", **form, edge_wieght=np.ones(3000), error=TypeError)


def test_a_damaged_list_of_names_is_refused(tmp_path):
    graph = GraphStore.open(_store(tmp_path / "g", node_names=range(200)))
    file = graph.path / "nodes.txt"
    whole = file.read_bytes()
    shifted, cut, broken = b"\n" + whole[:-1], whole[:-1], b"\xff" + whole[1:]
    for damaged in (whole.replace(b"\n", b" ", 1), whole[:-1] + b"x", shifted, cut, broken):
        file.write_bytes(damaged)
        for function in (graph.node_names, lambda: graph.node_ids([5])):
            _refuses("nodes.txt.*rebuild", function)
