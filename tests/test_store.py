"""Tests: store.py and sources/prepare.py."""

import itertools
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch

import store
from disk import columns, sort
from disk import files as disk
from disk.files import StoreError
from disk.graphs import GraphDataset, block_diagonal, build_graphs
from disk.sort import Rows
from store import GraphStore, build_store, verify
from tests.common import _edges, _graph, _graphs, _mask, _rewrite_meta, _run, _sums


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_store_round_trip(tmp_path, backend, dtype):
    args = _graph()
    args["features"] = (torch.from_numpy(args["features"]).abs() * 10).to(dtype)
    path = build_store(tmp_path / "g", backend=backend, block_rows=7, **args)
    graph = GraphStore.open(path)
    assert (graph.num_nodes, graph.num_edges, graph.feature_dim, graph.num_classes) == (
        200,
        3000,
        5,
        4,
    )
    assert graph.indptr.dtype == torch.int64 and graph.indices.dtype == torch.int32
    assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    assert np.array_equal(graph.labels.numpy(), args["labels"])
    for name, ids in args["split"].items():
        assert np.array_equal(graph.split[name].numpy(), ids)
    assert graph.features.shape == (200, 5) and graph.features.dtype == dtype
    some, few = torch.randint(0, 200, (333,)), torch.tensor([199, 0, 0], dtype=torch.int32)
    for ids in (some, few, few[:0]):
        out = torch.empty(len(ids), 5, dtype=dtype)
        assert graph.features.gather(ids, out=out) is out
        assert torch.equal(out, args["features"][ids.long()])
        assert torch.equal(graph.features.gather(ids), out)
    for bad in (200, -1):
        with pytest.raises(IndexError, match=f"{bad}"):
            graph.features.gather(torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="out is"):
        graph.features.gather(torch.tensor([3]), out=torch.empty(2, 5, dtype=dtype))
    assert verify(path) == []
    assert all(np.load(f, allow_pickle=False).size >= 0 for f in path.glob("*.npy"))


def test_store_neighbours_are_sorted_whatever_the_order(tmp_path, monkeypatch):
    args = _graph()
    a = build_store(tmp_path / "a", **args)
    shuffled = args["edge_index"][:, np.random.default_rng(1).permutation(3000)]
    monkeypatch.setattr(sort, "SORT_EDGES", 700)  # several ranges of destinations
    monkeypatch.setattr(sort, "EDGE_CHUNK", 101)
    b = build_store(tmp_path / "b", **dict(args, edge_index=torch.from_numpy(shuffled)))
    assert _sums(a) == _sums(b)
    graph = GraphStore.open(a)
    for v in range(graph.num_nodes):
        row = graph.indices[graph.indptr[v] : graph.indptr[v + 1]]
        assert torch.equal(row, row.sort().values)


def test_store_edges_are_gone_over_twice_however_many_ranges_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(sort, "EDGE_CHUNK", 50)
    whole, passes = _sums(build_store(tmp_path / "whole", **_graph())), []
    for sort_edges in (2000, 300, 20):
        monkeypatch.setattr(sort, "SORT_EDGES", sort_edges)
        edges = store.edge_chunks
        with monkeypatch.context() as counted:
            counted.setattr(
                store, "edge_chunks", lambda *args: passes.append(sort_edges) or edges(*args)
            )
            assert _sums(build_store(tmp_path / f"{sort_edges}", **_graph())) == whole
        assert passes.count(sort_edges) == 2 and not list(
            (tmp_path / f"{sort_edges}").glob("spilled*")
        )


@pytest.mark.parametrize("sort_edges", [500, 1 << 27])
@pytest.mark.parametrize("form", ["edge_index", "csc"])
@pytest.mark.parametrize("options", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_store_graph_options(tmp_path, monkeypatch, options, form, sort_edges):
    monkeypatch.setattr(sort, "SORT_EDGES", sort_edges)
    monkeypatch.setattr(sort, "EDGE_CHUNK", 333)
    args = _graph(num_nodes=60)
    args["split"] = {"train": [1]}
    pairs = list(zip(*args["edge_index"].tolist()))
    if form == "csc":
        order = np.argsort(args["edge_index"][1], kind="stable")
        args["indices"] = args["edge_index"][0][order]
        args["indptr"] = np.concatenate(
            [[0], np.cumsum(np.bincount(args.pop("edge_index")[1], minlength=60))]
        )
    symmetrize, drop_self_loops, drop_duplicates = map(bool, options)
    if drop_self_loops:
        pairs = [(u, v) for u, v in pairs if u != v]
    if symmetrize:
        pairs += [(v, u) for u, v in pairs]
    if drop_duplicates:
        pairs = set(pairs)
    path = build_store(
        tmp_path / "g",
        symmetrize=symmetrize,
        drop_self_loops=drop_self_loops,
        drop_duplicates=drop_duplicates,
        **args,
    )
    graph = GraphStore.open(path)
    assert _edges(graph) == sorted(pairs)
    assert graph.meta["options"] == {
        "symmetrize": symmetrize,
        "drop_self_loops": drop_self_loops,
        "drop_duplicates": drop_duplicates,
    }
    assert verify(path) == []


def _columns_slowly(edges, options, timed):
    """What the store has to hold of edges (source, destination, time, number), in its order, in plain Python."""
    rows = [
        (dst, src, time, 0, number)
        for src, dst, time, number in edges
        if src != dst or not options["drop_self_loops"]
    ]
    if options["symmetrize"]:
        rows += [(src, dst, time, 1, number) for dst, src, time, _, number in rows]
    rows.sort(key=lambda row: (*row[:2], row[2] if timed else 0, *row[3:]))
    if options["drop_duplicates"]:
        rows = [next(group) for _, group in itertools.groupby(rows, lambda row: row[:2])]
    return sorted(rows, key=lambda row: (row[0], row[2] if timed else 0))


@pytest.mark.parametrize("seed", range(40))
def test_store_columns_follow_their_edges(seed, tmp_path, monkeypatch):
    """Random multigraphs, every option, edges in pieces and sorted in ranges, against plain Python."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(sort, "EDGE_CHUNK", int(rng.integers(1, 200)))
    monkeypatch.setattr(sort, "SORT_EDGES", int(rng.integers(8, 2000)))
    monkeypatch.setattr(sort, "FEW_EDGES", int(rng.integers(1, 100)))
    monkeypatch.setattr(columns, "ROW_BYTES", int(rng.integers(8, 4000)))
    V, M = int(rng.integers(1, 30)), int(rng.integers(0, 300))
    src, dst = edge_index = rng.integers(0, V, (2, M))
    times, weights = rng.integers(-3, 12, M), rng.random(M) * (rng.random(M) < 0.9)
    dtype = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.float16][
        seed % 6
    ]
    rows = (torch.from_numpy(rng.random((M, 3))) * 200).to(dtype)
    given = {"edge_weight": weights, "edge_time": times.astype(float), "edge_features": rows}
    given = {name: values for name, values in given.items() if rng.random() < 0.7}
    options = dict(
        zip(("symmetrize", "drop_self_loops", "drop_duplicates"), (rng.random(3) < 0.5).tolist())
    )
    graph = {"edge_index": torch.from_numpy(edge_index) if seed % 2 else edge_index}
    if seed % 3 == 0:
        order = np.argsort(dst, kind="stable")
        graph = {
            "indices": src[order],
            "indptr": np.append(0, np.cumsum(np.bincount(dst, minlength=V))),
        }
        given = {name: values[order] for name, values in given.items()}
        src, dst, times, weights, rows = (
            src[order],
            dst[order],
            times[order],
            weights[order],
            rows[order],
        )
    path = build_store(
        tmp_path / "g",
        **graph,
        features=np.zeros((V, 1), np.float32),
        labels=np.zeros(V, int),
        split={"train": [0]},
        node_time=np.arange(V),
        **given,
        **options,
    )
    found, timed = GraphStore.open(path), "edge_time" in given
    expected = _columns_slowly(
        zip(*(a.tolist() for a in (src, dst, times, np.arange(M)))), options, timed
    )
    if "indptr" in graph and not timed and not any(options.values()):
        expected = sorted(expected, key=lambda row: row[-1])  # stored as it was
    assert np.repeat(np.arange(V), np.diff(found.indptr)).tolist() == [row[0] for row in expected]
    assert found.indices.tolist() == [row[1] for row in expected]
    numbers = torch.tensor([row[-1] for row in expected], dtype=torch.int64)
    for name, values in (
        ("edge_weight", torch.from_numpy(weights).float()),
        ("edge_time", torch.from_numpy(times)),
        ("edge_features", rows),
    ):
        there = getattr(found, name)
        assert (there is None) == (name not in given)
        assert (
            there is None or there.dtype == values.dtype and torch.equal(there, values[numbers])
        ), name
    assert found.node_time.tolist() == list(range(V)) and found.edge_dim == 3 * (
        "edge_features" in given
    )
    assert verify(path) == [] and {file.name for file in path.iterdir()} == {
        "meta.json",
        *found.meta["files"],
    }


def test_store_csc_whose_lists_rise_in_time_is_stored_as_it_is(tmp_path):
    args = {
        **_graph(num_nodes=4),
        "edge_index": None,
        "split": {"train": [0]},
        "indptr": [0, 3, 3, 5, 5],
    }
    args |= {
        "indices": Rows([5], np.int64, [np.array([2, 1, 0, 1, 0])]),
        "edge_features": np.arange(5) > 2,
    }
    graph = GraphStore.open(build_store(tmp_path / "a", **args, edge_time=[5, 5, 7, 1, 2]))
    assert graph.indices.tolist() == [2, 1, 0, 1, 0] and graph.edge_features.tolist() == [
        [0],
        [0],
        [0],
        [1],
        [1],
    ]
    args["indices"] = Rows([5], np.int64, [np.array([2, 1, 0, 1, 0])])
    with pytest.raises(StoreError, match="its lists must rise in edge_time"):
        build_store(tmp_path / "b", **args, edge_time=[5, 4, 7, 1, 2])


def test_store_columns_that_make_no_sense_are_refused(tmp_path):
    w, nan = np.ones(3000), np.ones((3000, 2))
    nan[2999, 1] = np.nan
    for changes, message in (
        (
            {"edge_weight": w[1:]},
            r"edge_weight is a ndarray \[2999\]: an array \[3000\] is needed, a row for each edge",
        ),
        ({"edge_weight": nan}, r"\[3000, 2\]: an array \[3000\]"),
        ({"edge_weight": -w}, r"edge_weight\[0\] is -1.0: a weight says how likely"),
        (
            {"edge_weight": np.where(np.arange(3000) == 2000, 1e300, 1)},
            r"edge_weight\[2000\] is 1e\+300",
        ),
        ({"edge_weight": w * 1j}, "edge_weight has dtype complex128"),
        ({"edge_time": w / 2}, r"edge_time\[0\] is 0.5: whole numbers are needed"),
        ({"edge_time": np.full(3000, np.nan)}, r"edge_time\[0\] is nan"),
        ({"edge_time": np.full(3000, 2**64 - 1, np.uint64)}, r"whole numbers below 2\^63"),
        (
            {"node_time": w},
            r"node_time is a ndarray \[3000\]: an array \[200\] is needed, a row for each node",
        ),
        ({"edge_features": nan}, r"edge_features\[2999, 1\] is nan"),
        ({"edge_features": nan[:, :0]}, r"\[3000, 0\]: an array \[3000, D\]"),
        ({"edge_features": w.astype("U1")}, "edge_features has dtype str"),
        (
            {"edge_features": Rows([3000, 1], np.int8, [])},
            r"edge_features is a Rows \[3000, 1\]: an array",
        ),
    ):
        with pytest.raises(StoreError, match=message):
            build_store(tmp_path / "g", **_graph(), **changes)
        assert not (tmp_path / "g").exists()


def test_store_a_damaged_column_is_found_by_verify_and_old_stores_open(tmp_path):
    rng, args = np.random.default_rng(0), _graph()
    path = build_store(
        tmp_path / "g",
        **args,
        edge_weight=rng.random(3000),
        edge_time=rng.integers(0, 9, 3000),
        edge_features=rng.random((3000, 2)),
        node_time=np.arange(200),
    )
    said = store.info(path)
    assert (
        "weight, features 2 x float64, time 0 to 8, nodes' time 0 to 199" in said
        and "format         3" in said
    )
    good = json.loads((path / "meta.json").read_text())
    for name, value, problem in (
        ("edge_weight", -1, "likely"),
        ("edge_time", 99, "earlier than the one"),
        ("edge_features", math.nan, "finite"),
    ):
        before = (path / f"{name}.npy").read_bytes()
        array = np.load(path / f"{name}.npy", mmap_mode="r+")
        array[0] = value
        array.flush()
        assert verify(path)[0].startswith(f"{name}.npy: its sha256")
        record = {
            **good["files"][f"{name}.npy"],
            "sha256": disk.sha256_of(path / f"{name}.npy").hexdigest(),
        }
        _rewrite_meta(path, files={**good["files"], f"{name}.npy": record})
        assert any(
            found.startswith(f"{name}.npy: ") and problem in found for found in verify(path)
        ), name
        (path / f"{name}.npy").write_bytes(before)
    for changes in (
        {"edge_dim": 3},
        {"edge_dtype": "float32"},
        {"edge_dim": ...},
        {"edge_dtype": []},
    ):
        _rewrite_meta(path, **{**good, **changes})
        with pytest.raises(
            StoreError, match="meta.json|edge_features.npy cannot be read: it holds"
        ):
            GraphStore.open(path)
    _rewrite_meta(path, **good)
    assert verify(path) == []
    old = build_store(tmp_path / "old", **args)
    assert json.loads((old / "meta.json").read_text()).keys().isdisjoint({"edge_dim", "edge_dtype"})
    _rewrite_meta(old, format_version=2)  # which differs in nothing else
    graph = GraphStore.open(old)
    assert verify(old) == [] and graph.edge_dim == 0
    assert {graph.edge_weight, graph.edge_time, graph.edge_features, graph.node_time} == {None}


def test_store_keeps_csc_in_the_given_order_and_reads_streams(tmp_path):
    args = _graph(num_nodes=4)
    x = args["features"]
    args.update(
        edge_index=None,
        split={"train": [0]},
        indptr=[0, 3, 3, 5, 5],
        indices=Rows(
            [5], np.int32, iter([np.array([3, 1, 2], np.int32), np.array([0, 0], np.int32)])
        ),
        features=Rows([4, 5], np.float32, (x[a : a + 1] for a in range(4))),
    )
    graph = GraphStore.open(build_store(tmp_path / "g", **args))
    assert graph.indices.tolist() == [3, 1, 2, 0, 0]
    assert torch.equal(graph.features.tensor, torch.from_numpy(x))
    args.update(indices=[3, 1, 2, 0, 0], features=Rows([4, 5], np.float32, [x[:3]]))
    with pytest.raises(StoreError, match="3 rows, 4 were announced"):
        build_store(tmp_path / "h", **args)


def test_store_columns_of_edges_that_are_all_left_out(tmp_path):
    loops = dict(_graph(), edge_index=np.tile(np.arange(9), (2, 1)))
    path = build_store(tmp_path / "g", drop_self_loops=True, edge_weight=np.ones(9), **loops)
    assert GraphStore.open(path).edge_weight.shape == (0,) and verify(path) == []


def test_store_without_edges_and_with_empty_splits(tmp_path):
    args = dict(_graph(), edge_index=np.empty((2, 0), np.int64), split={"train": [5]})
    for option in (False, True):
        graph = GraphStore.open(build_store(tmp_path / f"g{option}", symmetrize=option, **args))
        assert graph.num_edges == 0 and len(graph.split["test"]) == 0 and verify(graph.path) == []


def _bad_inputs():
    x, nan = np.zeros((200, 5), np.float32), np.zeros((200, 5), np.float32)
    nan[170, 3] = np.nan
    edge = np.zeros((2, 9), np.int64)
    edge[1, 7] = 200
    ok = list(range(50))
    return {
        "edge out of range": ({"edge_index": edge}, "edge 7 goes from node 0 to node 200"),
        "negative edge": ({"edge_index": [[0, -4], [0, 0]]}, "edge 1 goes from node -4"),
        "edge shape": ({"edge_index": edge.T}, "edge_index has shape"),
        "edge dtype": ({"edge_index": edge.astype(float)}, "edge_index has dtype float64"),
        "no graph": ({"edge_index": None}, "either as edge_index or as indptr"),
        "both forms": ({"indptr": [0], "indices": [0]}, "either as edge_index or as indptr"),
        "label too large": ({"labels": np.full(200, 4)}, r"labels\[0\] is 4"),
        "label below -1": ({"labels": np.full(200, -2)}, r"labels\[0\] is -2"),
        "labels dtype": ({"labels": np.zeros(200)}, "labels has dtype float64"),
        "labels length": ({"labels": [0, 1]}, r"labels has shape \[2\]: \[200\]"),
        "unlabelled in split": (
            {"labels": np.arange(200) % 2 - 1},
            "holds node [0-9]+, which has no label",
        ),
        "no label": (
            {"labels": np.full(200, -1), "num_classes": None},
            "none of the 200 nodes has a label",
        ),
        "NaN": ({"features": nan}, r"features\[170, 3\] is nan"),
        "infinity": (
            {"features": torch.tensor(nan).nan_to_num(torch.inf).bfloat16()},
            r"features\[170, 3\] is inf",
        ),
        "features shape": ({"features": x[0]}, "features has shape"),
        "features dtype": ({"features": x.astype(complex)}, "features has dtype complex128"),
        "split overlap": (
            {"split": {"train": ok, "valid": [70, 49]}},
            "node 49 is in split 'train' and in 'valid'",
        ),
        "split repeat": ({"split": {"train": [4, 9, 4]}}, "node 4 more than once"),
        "split range": ({"split": {"train": ok, "test": [200]}}, "'test' holds node 200"),
        "split empty": ({"split": {"train": [], "test": [1]}}, "'train' is empty"),
        "split name": ({"split": {"train": ok, "val": [60]}}, "part 'val'"),
        "backend": ({"backend": "sqlite"}, "backend 'sqlite'"),
        "classes": ({"num_classes": 0}, "num_classes is 0"),
        "block_rows": ({"block_rows": 0}, "block_rows is 0"),
        "indptr falls": (
            {"edge_index": None, "indptr": [0, 5, 3, *[9] * 198], "indices": [0] * 9},
            "falls from 5 to 3",
        ),
        "indptr end": (
            {"edge_index": None, "indptr": [0] * 201, "indices": [0] * 9},
            "from 0 to 0",
        ),
        "indptr length": (
            {"edge_index": None, "indptr": [0, 9], "indices": [0] * 9},
            r"indptr has shape \[2\]",
        ),
        "indices range": (
            {"edge_index": None, "indptr": [0] * 200 + [2], "indices": [0, 200]},
            r"indices\[1\] is 200",
        ),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_store_refuses_bad_input_and_leaves_nothing(tmp_path, case):
    changes, message = _bad_inputs()[case]
    with pytest.raises(StoreError, match=message) as error:
        build_store(tmp_path / "g", **{**_graph(), **changes})
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"])
def test_store_takes_every_layout_of_an_array(tmp_path, dtype):
    args = _graph(num_nodes=60, num_edges=90)
    args["split"] = {"train": [1, 2], "test": _mask([5, 9], 60)}
    x = (np.abs(args["features"]) * 3).astype(dtype)
    frozen = x.copy()
    frozen.flags.writeable = False
    want = torch.from_numpy(x.astype("u1") if dtype == "?" else x)
    gaps = np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3]
    for number, features in enumerate(
        (
            x,
            x.astype(f">{dtype}"),
            np.asfortranarray(x),
            gaps,
            x[::-1].copy()[::-1],
            frozen,
            torch.from_numpy(x),
            torch.from_numpy(gaps.copy()).T.contiguous().T,
        )
    ):
        labels, edges = (
            args["labels"].astype(">i2"),
            np.asfortranarray(args["edge_index"].astype(">u4")),
        )
        graph = GraphStore.open(
            build_store(
                tmp_path / str(number),
                **dict(args, features=features, labels=labels, edge_index=edges),
            )
        )
        assert graph.features.dtype == want.dtype and torch.equal(
            graph.features.gather(torch.arange(60)), want
        )
        assert graph.labels.tolist() == args["labels"].tolist() and graph.split[
            "test"
        ].tolist() == [5, 9]
        assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    lists = {
        name: value if name in ("split", "num_classes") else value.tolist()
        for name, value in dict(args, features=x).items()
    }
    graph = GraphStore.open(build_store(tmp_path / "list", **lists))
    assert (
        graph.features.dtype == {"f": torch.float64, "b": None}.get(x.dtype.kind, torch.int64)
        or dtype == "?"
    )


def test_store_says_what_is_wrong_with_an_argument(tmp_path):
    good = GraphStore.open(build_store(tmp_path / "good", **_graph()))
    frame = types.SimpleNamespace(shape=(200, 5))
    for message, changes in (
        ("features is a SimpleNamespace that makes no array", {"features": frame}),
        ("features is a list that makes no array", {"features": [[1.0], [1.0, 2.0]]}),
        ("features is a NoneType", {"features": None}),
        ("features is sparse", {"features": torch.eye(200).to_sparse()}),
        ("edge_index is a str", {"edge_index": "edges"}),
        ("edge_index is a generator", {"edge_index": (_ for _ in ())}),
        ("labels is a list that makes no array", {"labels": [[1], [2, 3]]}),
        ("labels holds 18446744073709551615", {"labels": np.full(200, 2**64 - 1, np.uint64)}),
        ("num_classes is 16777217: from 1 to 16,777,216", {"num_classes": (1 << 24) + 1}),
        (
            "labels run up to 5,003 and 4 different",
            {"labels": np.arange(200) % 4 + 5000, "num_classes": None},
        ),
        (
            r"split 'valid' is a mask of shape \[199\]",
            {"split": {"train": [1], "valid": np.ones(199, bool)}},
        ),
        (r"split 'train' is a mask of shape \[3\]", {"split": {"train": [True, False, True]}}),
        ("split 'train' has dtype float64", {"split": {"train": [0.5]}}),
    ):
        with pytest.raises(StoreError, match=message) as error:
            build_store(tmp_path / "bad", **{**_graph(), **changes})
        assert "\n" not in str(error.value)
    build_store(
        tmp_path / "many_classes", **dict(_graph(), num_classes=5000, labels=np.arange(200) + 4000)
    )
    for message, call in (
        (
            r"ids is \[2\] int64: an int32 or int64 tensor",
            lambda: good.features.gather(np.arange(2)),
        ),
        ("ids is list: an int32", lambda: good.features.gather([1, 2])),
        (r"ids is \[2\] torch.bool", lambda: good.features.gather(torch.ones(2, dtype=torch.bool))),
        (
            r"out is \[2, 5\] float32: a tensor \[2, 5\]",
            lambda: good.features.gather(torch.arange(2), out=np.zeros((2, 5), np.float32)),
        ),
        (
            "put_rows is for a store with backend lmdb",
            lambda: good.features.put_rows(torch.arange(1), torch.ones(1, 5)),
        ),
        (
            r"edge_index \[3\]: \[G\], \[G\] and",
            lambda: block_diagonal(
                [2], [1], [0, 1, 1], np.ones((2, 1)), np.ones((1, 1)), np.ones((1, 1))
            ),
        ),
        (
            "edge_index has dtype float64",
            lambda: block_diagonal([2], [1], [[0.0], [1.5]], *[np.ones((2, 1))] * 3),
        ),
        (
            "x is a ndarray that makes no tensor",
            lambda: block_diagonal(
                [2], [1], [[0], [1]], np.array([["a"]] * 2), *[np.ones((1, 1))] * 2
            ),
        ),
        (
            "a batch has no graphs",
            lambda: build_graphs(
                tmp_path / "none",
                [
                    block_diagonal(
                        [], [], np.empty((2, 0), int), *[np.empty((0, 2), np.float32)] * 3
                    )
                ],
            ),
        ),
    ):
        with pytest.raises(StoreError, match=message):
            call()
    batch = block_diagonal(
        [2], [1], [[0], [1]], np.ones((2, 1), ">f4"), np.ones((1, 1), ">f8"), np.ones((1, 1), ">i4")
    )
    assert (batch.x.dtype, batch.e.dtype, batch.y.dtype) == (
        torch.float32,
        torch.float64,
        torch.int32,
    )
    assert {entry.name for entry in tmp_path.iterdir()} == {"good", "many_classes"}


def test_store_what_is_built_can_be_opened(tmp_path, monkeypatch):
    """A build gets its name when the reader has opened it; what is larger than the disk is refused before it is
    written."""

    def refuse(path):
        raise StoreError(f"{path} cannot be opened")

    for kind, build in (
        (GraphStore, lambda path: build_store(path, **_graph())),
        (GraphDataset, lambda path: build_graphs(path, [_graphs(3)])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "open", refuse)
            with pytest.raises(StoreError, match="cannot be opened"):
                build(tmp_path / "s")
    wide = Rows([1 << 20, 1 << 20], np.float32, iter(()))
    with pytest.raises(StoreError, match="no room for .*it takes about 4.4 TB"):
        build_store(
            tmp_path / "s",
            edge_index=[[0], [1]],
            features=wide,
            labels=np.zeros(1 << 20, int),
            split={"train": [0]},
        )
    assert list(tmp_path.iterdir()) == []


def test_store_existing_target_stays(tmp_path):
    path = build_store(tmp_path / "g", **_graph())
    before = _sums(path)
    with pytest.raises(StoreError, match="exists already"):
        build_store(path, **_graph(seed=1))

    def race():  # somebody else completes the target while this build is at work
        shutil.copytree(path, tmp_path / "h")
        yield _graph()["features"]

    with pytest.raises(StoreError, match="exists already"):
        build_store(
            tmp_path / "h", **dict(_graph(seed=1), features=Rows((200, 5), np.float32, race()))
        )
    assert _sums(path) == _sums(tmp_path / "h") == before
    assert {p.name for p in tmp_path.iterdir()} == {"g", "h"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_store_build_that_fails_leaves_nothing(tmp_path, error):
    def rows():
        yield np.zeros((100, 5), np.float32)
        raise error

    for backend in ("mmap", "lmdb"):
        with pytest.raises(error):
            build_store(
                tmp_path / "g",
                backend=backend,
                **dict(_graph(), features=Rows((200, 5), np.float32, rows())),
            )
        assert list(tmp_path.iterdir()) == []


def test_store_removes_what_dead_builds_left(tmp_path):
    """A build that lives has its folder locked, in another container as well, where its process cannot be seen."""
    stale, alive, other = (
        tmp_path / f".{name}.building.{n}" for n, name in enumerate(("g", "g", "other"))
    )
    for directory in (stale, alive, other):
        directory.mkdir()
        (directory / "indices.npy").write_bytes(b"half")
    code = (
        f"import fcntl, os, time; fcntl.flock(os.open({str(alive)!r}, os.O_RDONLY), fcntl.LOCK_EX); "
        "print(flush=True); time.sleep(99)"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    builder.stdout.readline()
    try:
        build_store(tmp_path / "g", **_graph())
        assert not stale.exists() and alive.exists() and other.exists()
    finally:
        builder.kill()
        builder.communicate()


def test_store_build_leaves_no_folders_behind_where_it_failed(tmp_path):
    with pytest.raises(StoreError, match="labels"):
        build_store(
            tmp_path / "a" / "b" / "g",
            **dict(_graph(), split={"train": [0, 0]}, features=np.zeros((3, 2)), labels=[0]),
        )
    with pytest.raises(StoreError, match="finite"):
        build_store(
            tmp_path / "a" / "b" / "g",
            **dict(_graph(), features=np.full((200, 5), np.nan, np.float32)),
        )
    assert list(tmp_path.iterdir()) == []
    build_store(tmp_path / "a" / "b" / "g", **_graph())
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["g"]


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_full_disk(tmp_path, backend):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs takes root: {mounted.stderr.strip()}")
    try:
        before = _sums(build_store(small / "old", backend=backend, **_graph()))
        with pytest.raises(StoreError, match=r"no room for .*new.* takes about .* free") as error:
            build_store(small / "new", backend=backend, **_graph(num_nodes=20_000, width=50))
        assert "\n" not in str(error.value)
        assert [p.name for p in small.iterdir()] == ["old"] and _sums(small / "old") == before
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_open_refuses_damage(tmp_path, backend):
    path = build_store(tmp_path / "g", backend=backend, **_graph())
    good = {f.name: f.read_bytes() for f in path.iterdir()}
    for name in good:
        (path / name).write_bytes(good[name][:-5])
        sizes = (
            "meta.json"
            if name == "meta.json"
            else f"{len(good[name]) - 5} bytes and should have {len(good[name])}"
        )
        with pytest.raises(StoreError, match=f"{name}.*{'' if name == 'meta.json' else sizes}"):
            GraphStore.open(path)
        (path / name).unlink()
        with pytest.raises(StoreError, match=name):
            GraphStore.open(path)
        if name != "meta.json":  # another kind of file of the right size
            (path / name).write_bytes(b"x" * len(good[name]))
            with pytest.raises(StoreError, match=name):
                GraphStore.open(path)
        (path / name).write_bytes(good[name])
    GraphStore.open(path)


def test_store_open_refuses_meta_that_makes_no_sense(tmp_path):
    path = build_store(tmp_path / "g", **_graph())
    good = json.loads((path / "meta.json").read_text())
    _rewrite_meta(path, format_version=7)
    with pytest.raises(StoreError, match=r"store format 7; this code reads 2 and 3; rebuild it"):
        GraphStore.open(path)
    for name in (
        "format",
        "num_nodes",
        "num_edges",
        "num_classes",
        "feature_dim",
        "feature_dtype",
        "backend",
        "files",
        "block_rows",
        "options",
    ):
        for value in (..., None, -1, 1 << 62, 1.5, True, "x", [], {}):
            if name in ("options", "block_rows") and value == {}:
                continue
            _rewrite_meta(path, **dict(good, **{name: value}))
            with pytest.raises(StoreError, match="meta.json"):
                GraphStore.open(path)
    for record in (None, {}, dict(good["files"]["labels.npy"], bytes="9")):
        _rewrite_meta(path, **dict(good, files=dict(good["files"], **{"labels.npy": record})))
        with pytest.raises(StoreError, match="meta.json"):
            GraphStore.open(path)
    for text in (
        "",
        "[]",
        "{",
        "[" * 100_000,
        "\xff\x00",
        json.dumps(good),
        json.dumps(dict(good, source="else")),
    ):
        (path / "meta.json").write_text(text, encoding="latin1")
        with pytest.raises(StoreError, match="meta.json"):
            GraphStore.open(path)
    with pytest.raises(StoreError, match="is no store"):
        GraphStore.open(tmp_path / "nowhere")


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_verify_names_the_file_with_a_flipped_bit(tmp_path, backend):
    path = build_store(tmp_path / "g", backend=backend, **_graph(num_nodes=160, num_edges=200))
    random = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for position in [0, 20, len(good) - 1, *random.integers(0, len(good), 8)]:
            bad = bytearray(good)
            bad[position] ^= 1 << int(random.integers(8))
            file.write_bytes(bad)
            problems = verify(path)
            assert problems and all(p.startswith(f"{file.name}: ") for p in problems), (
                file,
                position,
                problems,
            )
            try:
                GraphStore.open(path)
            except StoreError:
                pass
        file.write_bytes(good)
    assert verify(path) == []


def test_store_verify_looks_behind_the_checksums(tmp_path, monkeypatch):
    """A store that was written wrong, with right checksums, is found out by its structure."""
    path = build_store(tmp_path / "g", **_graph())
    for name, position, value in (
        ("indptr", 5, 1 << 40),
        ("indices", 3, 200),
        ("labels", 9, 4),
        ("labels", 9, -2),
        ("train", 0, 10**6),
        ("indptr", 0, 1),
    ):
        good, meta = (path / f"{name}.npy").read_bytes(), (path / "meta.json").read_bytes()
        array = np.load(path / f"{name}.npy", mmap_mode="r+")
        array[position] = value
        array.flush()
        files = json.loads(meta)["files"]
        files[f"{name}.npy"]["sha256"] = disk.sha256_of(path / f"{name}.npy").hexdigest()
        _rewrite_meta(path, files=files)
        assert any(name in problem for problem in verify(path)), name
        (path / f"{name}.npy").write_bytes(good)
        (path / "meta.json").write_bytes(meta)


def test_store_command_line(tmp_path, capsys):
    path = build_store(tmp_path / "g", backend="lmdb", source="a test", **_graph())
    assert store.main(["info", str(path)]) == 0
    info = capsys.readouterr().out
    assert "3,000" in info and "a test" in info and "valid 30" in info
    assert store.main(["verify", str(path)]) == 0
    good = capsys.readouterr().out
    assert good.count("OK") == 8 and "BAD" not in good
    with open(path / "indices.npy", "r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    assert store.main(["verify", str(path)]) == 1
    bad = capsys.readouterr().out
    assert "BAD indices.npy" in bad and bad.count("OK") == 7
    for command in ("info", "verify"):
        assert store.main([command, str(tmp_path / "nothing")]) == 2
    none = _run("store.py", "info", tmp_path / "nothing")
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and "no store" in none.stderr


def test_store_verify_trusts_nothing(tmp_path, capsys):
    """Digests that are none, pipes and devices in the place of files, files that nobody knows."""
    path = build_store(tmp_path / "g", **_graph())
    good = (path / "meta.json").read_bytes()
    for digest in ("", "0" * 63, 7, None):
        files = json.loads(good)["files"]
        files["labels.npy"]["sha256"] = digest
        (path / "meta.json").write_bytes(disk.dump_meta(dict(json.loads(good), files=files)))
        assert verify(path)[0].startswith("meta.json: "), digest
    (path / "meta.json").unlink()
    for place in (
        lambda: (path / "meta.json").symlink_to("/dev/zero"),
        lambda: os.mkfifo(path / "meta.json"),
    ):
        place()
        assert "no regular file" in verify(path)[0]
        (path / "meta.json").unlink()
    (path / "meta.json").write_bytes(good)
    (path / "labels.npy").rename(tmp_path / "kept")
    os.mkfifo(path / "labels.npy")
    assert "no regular file" in verify(path)[0] and store.main(["verify", str(path)]) == 1
    (path / "labels.npy").unlink()
    (tmp_path / "kept").rename(path / "labels.npy")
    (path / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert store.main(["verify", str(path)]) == 0
    assert "--  notes.txt: not part of the store" in capsys.readouterr().out
    (path / "meta.json").write_bytes(good[:-2])
    assert store.main(["verify", str(path)]) == 1 and capsys.readouterr().out.startswith(
        "BAD meta.json: "
    )


def _gather_in_child(features, path, queue):
    ids = torch.arange(150)
    queue.put(
        [
            float(f.gather(ids).double().sum())
            for f in (features, GraphStore.open(path).features)
            if f
        ]
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_store_lmdb_in_threads_and_processes(tmp_path, method):
    args = _graph()
    path = build_store(tmp_path / "g", backend="lmdb", block_rows=3, **args)
    features, second = GraphStore.open(path).features, GraphStore.open(path).features
    x, errors = torch.from_numpy(args["features"]), []

    def work(seed):
        ids = torch.randint(0, 200, (500,), generator=torch.Generator().manual_seed(seed))
        for f in (features, second) * 5:
            if not torch.equal(f.gather(ids), x[ids]):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(
        target=_gather_in_child,
        args=(features if method == "fork" else None, path, queue),
        daemon=True,
    )
    child.start()
    assert queue.get(timeout=60) == [float(x[:150].double().sum())] * (2 if method == "fork" else 1)
    child.join()
    assert torch.equal(features.gather(torch.arange(5)), x[:5])
