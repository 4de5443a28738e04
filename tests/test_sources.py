"""Tests: sources/: names, .npz files, splits."""

import collections
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import types
import zipfile

import numpy as np
import pytest
import torch

import store
from disk import checks
from disk import files as disk
from extras import graph_store as disk_graphs
from sources import cli
from sources import prepare as datasets
from sources.prepare import prepare
from sources.splits import choose_split
from store import GraphStore, build_store, verify
from tests.common import _code, _graph, _store
from tests.stores import _cases, _edges, _graphs, _mask, _refuses, _rewrite_meta, _save_npz, _sums


def _opened(dataset, root, **options):
    return GraphStore.open(prepare(dataset, root, **options))


SMALL = "synthetic:nodes=3000,degree=12,features=8,classes=5"


def test_datasets_synthetic_is_the_same_for_the_same_seed(tmp_path, monkeypatch):
    a = prepare(SMALL, tmp_path / "a")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    b = prepare(f"{SMALL},seed=0", tmp_path / "b")
    c = prepare(f"{SMALL},seed=1", tmp_path / "b")
    assert a.name == b.name != c.name
    before = a.stat().st_mtime_ns  # a store that is there is taken
    assert prepare(SMALL, tmp_path / "a") == prepare(a) == prepare(str(a)) == a
    assert a.stat().st_mtime_ns == before
    assert prepare(SMALL, tmp_path / "b", backend="lmdb") != b
    half = prepare(SMALL, tmp_path / "b", feature_dtype="bfloat16")
    rows = [GraphStore.open(path).features.tensor for path in (b, half)]
    assert half != b and torch.equal(rows[1], rows[0].bfloat16()) and verify(half) == []
    assert _sums(a) == _sums(b)
    assert _sums(a)["indices.npy"] != _sums(c)["indices.npy"]
    graph = GraphStore.open(a)
    assert verify(a) == []
    degrees = graph.indptr.diff().double()
    assert 11 < degrees.mean() < 13 and 0.5 < degrees.log().std() < 0.7
    assert graph.num_classes == 5 and graph.labels.unique().tolist() == [0, 1, 2, 3, 4]
    assert [len(ids) for ids in graph.split.values()] == [240, 60, 2700]
    destination = torch.repeat_interleave(torch.arange(3000), graph.indptr.diff())
    near = (graph.indices // 150 == destination // 150).double().mean()
    assert 0.5 < near < 0.6


def test_datasets_two_processes_at_once(tmp_path):
    work = functools.partial(prepare, SMALL)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = {*pool.map(work, [tmp_path] * 3, chunksize=1)}
    assert len(paths) == 1 and verify(paths.pop()) == [] and len(list(tmp_path.iterdir())) == 1


def test_datasets_a_file_system_without_locks(tmp_path, monkeypatch):
    def second(path, **graph):
        build_store(path, **graph)  # by another process, which was quicker
        build_store(path, **graph)

    monkeypatch.setattr("sources.prepare.build_store", second)
    assert verify(prepare(SMALL, tmp_path)) == []


def test_datasets_npz(tmp_path, monkeypatch):
    file = tmp_path / "own.npz"
    _save_npz(file, train_idx=np.arange(9))
    path = prepare(file, tmp_path)
    assert prepare(str(file), tmp_path) == path
    both = prepare(file, tmp_path, symmetrize=True)
    assert prepare(both, symmetrize=True) == both  # which it is
    _refuses("--symmetrize has no effect on .*: it is a store", prepare, path, symmetrize=True)
    with monkeypatch.context() as other:  # a later version, which makes something else of the file
        other.setattr(datasets, "RULES", datasets.RULES + 1)
        assert prepare(file, tmp_path) != path
    _save_npz(file, seed=1, train_idx=np.arange(9))
    assert prepare(file, tmp_path) != path  # other contents, another store
    _save_npz(file, y=np.arange(200) % 3)
    path = prepare(file, tmp_path, seed=0)
    # one graph, whatever split it is taken with
    assert prepare(file, tmp_path, seed=1) == path
    first, second, again = (GraphStore.open(path) for _ in range(3))
    for graph, seed in ((first, 0), (second, 1), (again, 1)):
        choose_split(graph, seed=seed)
    assert all(torch.equal(second.split[name], again.split[name]) for name in disk.SPLITS)
    assert [len(ids) for ids in first.split.values()] == [60, 90, 50]
    assert first.labels[first.split["train"].long()].bincount().tolist() == [20] * 3
    assert not torch.equal(first.split["train"], second.split["train"])


def test_datasets_npz_word_counts(tmp_path, capsys):
    """Each row of counts sums to the square root of its width: of 4 columns to 2."""
    file, data = tmp_path / "words.npz", np.array([1, 3, 1, 3, 3, 9])
    # the first node has no word, the second twice the same: its counts are added
    csr = dict(feat_indptr=[0, 0, 2, 4, 5], feat_indices=[2, 2, 1, 3, 1, 3], feat_shape=[4, 4])
    graph = {"edge_index": [[0, 1, 2], [1, 2, 3]], "y": [0, 1, 0, 1]}
    np.savez(file, **graph, **csr, feat_data=data)
    said = "CSR matrix of features .* all input arrays must have the same"
    _refuses(said, prepare, file, tmp_path)
    csr["feat_indptr"][-1] += 1
    capsys.readouterr()
    scaled = [[0, 0, 0, 0], [0, 0, 2, 0], [0, 0.5, 0, 1.5], [0, 0.5, 0, 1.5]]
    given = [[0, 0, 0, 0], [0, 0, 4, 0], [0, 1, 0, 3], [0, 3, 0, 9]]
    for kind, option, expected, said in (
        ("u1", "", scaled, "features are counts, each row scaled to the sum 2, the"),
        ("i8", ":row_normalize=0", given, "features are counts, as they are"),
        ("f8", "", given, "features are values, as they are"),
        ("f4", ":row_normalize=1", scaled, "features are values, each row scaled to the sum 2,"),
    ):
        np.savez(file, **graph, **csr, feat_data=data.astype(kind))
        x = _opened(f"{file}{option}", tmp_path).features.tensor
        assert x.tolist() == expected and said in capsys.readouterr().out
        assert x.dtype == (torch.float64 if kind == "f8" else torch.float32)
    _save_npz(file, feat_indptr=np.zeros(201, int), feat_indices=np.zeros(0, int), x=None)
    assert not _opened(str(file), tmp_path).features.tensor.any()  # no row has a word
    csr = dict(feat_indptr=np.append(0, np.full(200, 3000)), feat_indices=np.zeros(3000, int))
    _save_npz(file, **csr, feat_data=np.ones(3000, "f2"), x=None)
    x = _opened(str(file), tmp_path).features.tensor
    assert x.dtype == torch.float16 and x[0, 0] == 3000  # sums in float16 end at 2,048


# parameters of --dataset and arrays of an .npz file of four nodes and three edges => what refuses it
REFUSED_NPZ = r"""
{"edge_index": null} => no array edge_index or edges; its arrays are x, y
{"y": null, "train_idx": [0, 1]} => it has a split, and no labels
{"y": [[1, 0], [0, 1], [1, 0], [0, 1]]} => y is one-hot
{"y": [[1, 0], [0, 1], [-1, -1], [0, 1]]} => one-hot.*, -1 where
{"y": [1, 1, 2.5, 1]} => y\[2\] is 2.5: .* numbers to learn are an array targets
{"y": [1, 1, -2, 1]} => bad.npz: y\[2\] is -2: labels are 0 or more
{"y": [1, 1, Infinity, 1]} => y\[2\] is inf
{"y": ["1", "NA", "1", "NA"]} => y holds NA: rename it if it is a class, write nothing if it
{"x": null, "train_masks": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]} => no features, and 3 splits: keep one, as split=0
{"x": null, "y": [[1, 1], [0, 1], [1, 1], [0, 1]]} => nodes with several labels each need a split of their own: train_idx
{"edge_index": null, "edges": [[0, 1, 2], [1, 2, 3]]} => edges has shape \[2, 3\]: \[M, 2\]
{"features": [[1], [1], [1], [1]]} => has features and x, which mean the same.*ignore=x
{"w": [1, 1, 1]} => w is not used here, and may matter.*ignore=w
{"trainmask": [1, 0, 0, 0]} => trainmask is not used here
:ignore=nothing {} => no array nothing; its arrays are
{"num_nodes": 300} => num_nodes is 300
{"val_idx": [1, 2]} => has val_idx, but no train_idx
{"train_idx": [1, 2], "train_mask": [1, 0, 0, 0]} => train_idx and train_mask, which mean the
{"train_idx": [true, false, true]} => train_idx is \[3\]: a mask is
{"train_mask": [0, 2, 0, 2]} => train_mask holds values other than 0 and 1
{"train_idx": [[[0, 1], [2, 3], [0, 1]]]} => train_idx is \[1, 3, 2\]: ids are \[n\]
{"train_idx": [[0, 1], [3, 3]]} => split 1 of 2: .* holds node 3 more than
{"train_masks": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], "val_masks": [[0, 0, 0, 1], [0, 0, 0, 1]]} => 2 and 3 splits in train_masks, val_
:split=3 {"train_masks": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]} => no split=3: it has 3 splits
:split=0 {"train_mask": [1, 0, 0, 0]} => no split=0: it has 1 split, and
:radius=3 {} => radius has no effect: it holds one graph
:row_normalize=0 {} => row_normalize has no effect: it is for a CSR matrix
CSR {"feat_indices": [-1, 0, 1, 0]} => CSR .*: found negative index -1
CSR {"feat_indices": [0, 199, 1, 0], "feat_shape": [4, 5]} => size is 5 but found index 199
CSR {"feat_data": ["a", "a", "a", "a"]} => feat_data holds <U1
CSR {"feat_data": [1, 1, -1, 1]} => feat_data\[2\] is -1.*row_normalize=0
CSR {"feat_data": [1, 1, 1]} => nnz from values: 3
CSR {"feat_data": [1, 1, NaN, 1]} => features\[2, 1\] is nan
CSR {"feat_indptr": [0, 3, 2, 3, 4]} => may not contain negative values
CSR {"feat_indptr": [1, 2, 3, 4, 5]} => CSR .*4 rows need 5 offsets from 0
CSR {"feat_shape": [400, 5]} => CSR .*400 rows need 401 offsets from 0
CSR {"feat_shape": [4, 1099511627776]} => CSR .*is sparse: dense it takes .* bytes, and .* are free
{"x": [{}, {}, {}, {}]} => x cannot be read
"""


def test_datasets_npz_bad_files(tmp_path):
    file = tmp_path / "bad.npz"
    for content in (b"no zip", b""):
        file.write_bytes(content)
        _refuses("cannot be read", prepare, file, tmp_path)
    graph = {"edge_index": [[0, 1, 2], [1, 2, 3]], "x": np.ones((4, 2)), "y": [0, 1, 0, 1]}
    csr = {"x": None, "feat_indptr": range(5), "feat_indices": [0, 1, 1, 0]}
    for changes, message in _cases(REFUSED_NPZ):
        option, brace, changes = changes.partition("{")
        arrays = graph | (csr if option == "CSR " else {}) | json.loads(brace + changes)
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
        name = str(file) + option.removeprefix("CSR").strip()
        _refuses(message, prepare, name, tmp_path)
        assert list(tmp_path.iterdir()) == [file]
    # where the system refuses to look, as in a folder that another user closed
    _refuses("--root n+ cannot be read: File name", prepare, "synthetic", "n" * 300)


def test_typed_edges_without_features_keep_the_reverses_that_they_have(tmp_path, capsys):
    """Reverses may be of a type of their own: another of the same type would make every type run both ways."""
    random, file = np.random.default_rng(0), tmp_path / "typed.npz"
    forth = random.integers(0, 200, (2, 900))
    forth = forth[:, forth[0] != forth[1]]
    both, kinds = np.concatenate([forth, forth[::-1]], 1), np.arange(2).repeat(forth.shape[1])
    split = {"x": None, "train_idx": np.arange(90)}
    given = {kind: set(map(tuple, both[:, kinds == kind].T.tolist())) for kind in (0, 1)}

    def by_type():
        graph = _opened(file, tmp_path)
        ends = torch.stack([graph.indices, torch.repeat_interleave(graph.indptr.diff())])
        return {k: set(map(tuple, ends[:, graph.edge_type == k].T.tolist())) for k in (0, 1)}

    _save_npz(file, edge_index=both, edge_type=kinds, **split)
    assert by_type() == given
    said = capsys.readouterr().out
    count = f"{both.shape[1]:,}"
    assert f"{count} of {count} edges have a reverse, of whatever type: none is added" in said
    # only some have one
    _save_npz(file, edge_index=both[:, :1000], edge_type=kinds[:1000], **split)
    made = by_type()
    assert made[0] == given[0] | given[1]
    assert "every edge gets a reverse of its type" in capsys.readouterr().out
    _save_npz(file, edge_index=both[0], edge_type=kinds, **split)
    _refuses(r"edge_index has shape \[\d+\]", prepare, file, tmp_path)


# a parameter of --dataset and arrays of an .npz file of six nodes => nodes to train on, to validate and to test
SPLIT_ARRAYS = """
{"train_idx": [[0], [1]], "valid_idx": [[2, 3]], "test_idx": [4, 5]} => [[0, 1], [2, 3], [4, 5]]
{"train_mask": [true, true, false, false, false, false], "val_mask": [false, false, true, false, false, false]} => [[0, 1], [2], []]
{"train_mask": [[1.0], [1.0], [0.0], [0.0], [0.0], [0.0]], "test_mask": [[0.0], [0.0], [0.0], [0.0], [1.0], [1.0]]} => [[0, 1], [], [4, 5]]
{"train_idx": [true, true, false, false, false, false], "test_idx": [4, 5]} => [[0, 1], [], [4, 5]]
:split=1 {"train_masks": [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]], "val_masks": [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0]]} => [[2, 3], [4], []]
:split=1 {"train_mask": [[1, 0], [1, 0], [0, 1], [0, 1], [0, 0], [0, 0]], "test_mask": [0, 0, 0, 0, 0, 1]} => [[2, 3], [], [5]]
"""


def test_datasets_npz_splits(tmp_path):
    file = tmp_path / "a.npz"
    graph = {"edge_index": [[0, 1, 2], [1, 2, 3]], "x": np.ones((6, 2)), "y": [0, 1] * 3}
    for arrays, expected in _cases(SPLIT_ARRAYS):
        option, brace, arrays = arrays.partition("{")
        arrays = map(np.asarray, (given := graph | json.loads(brace + arrays)).values())
        swapped = [array.astype(array.dtype.newbyteorder(">")) for array in arrays]
        np.savez(file, **dict(zip(given, swapped)))
        path, other = (prepare(f"{file}{option.strip()}", tmp_path, seed=seed) for seed in (0, 1))
        split = GraphStore.open(path).split
        assert [part.tolist() for part in split.values()] == json.loads(expected)
        assert path == other, "a seed decides on nothing here"


def test_a_graph_without_a_split_gets_the_same_one_however_it_is_built(tmp_path, capsys):
    """From arrays, from a file, and in stores that say elsewhere that they had none; runs draw their own."""
    args = {**_graph(), "split": None}
    _save_npz(tmp_path / "a.npz")
    arrays = build_store(tmp_path / "arrays", **args)
    file = datasets.build(tmp_path / "a.npz", tmp_path / "file", seed=3)
    assert GraphStore.open(file).meta["source"]["seed"] == 3
    file = datasets.build(tmp_path / "a.npz", tmp_path / "again")
    old = build_store(tmp_path / "old", **{**args, "split": {}})
    _rewrite_meta(old, split=..., source={"dataset": "a.npz", "split": checks.DRAWN})
    trained = {}
    for path, seed in itertools.product((arrays, file, old), (0, 1)):
        graph, lines = GraphStore.open(path), []
        opened = graph.split
        choose_split(graph, seed=seed, say=lines.append)
        assert f"the rest for testing, by seed {seed}" in lines[0]
        assert seed or all(torch.equal(opened[part], ids) for part, ids in graph.split.items())
        trained.setdefault(seed, []).append(graph.split["train"].tolist())
    zero, one = trained.values()
    assert zero == zero[:1] * 3 and one == one[:1] * 3 and zero[0] != one[0]
    assert GraphStore.open(arrays).labels[zero[0]].bincount().tolist() == [20] * 4
    assert cli.main(["info", str(arrays)]) == 0
    assert ", drawn by seed 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["val", "valid", "validation"])
def test_the_validation_part_has_three_names(word, tmp_path):
    split = {"train": [0, 1], word: [2, 3], "test": [4]}
    _save_npz(tmp_path / "a.npz", train_idx=[0, 1], **{f"{word}_mask": _mask([2, 3])})
    small = disk_graphs.build_graphs(tmp_path / "many", [_graphs(9)], split=split)
    assert disk_graphs.GraphDataset.open(small).split["valid"].tolist() == [2, 3]
    for path in (
        _store(tmp_path / "one", split=split),
        _store(tmp_path / "two", split=[split, split]),
        datasets.build(tmp_path / "a.npz", tmp_path / "file"),
    ):
        graph = GraphStore.open(path)
        assert graph.split["valid"].tolist() == [2, 3] and "split" not in graph.meta
    twice = {**split, "val": [2], "valid": [3]}
    said = "split has .*, which mean the same: keep one"
    _refuses(said, _store, tmp_path / "no", split=twice)


def test_a_store_keeps_several_splits_of_one_graph(tmp_path, capsys):
    """Ids of K splits come as [K, n], short rows padded with -1; --runs takes one after the other."""
    first = [np.arange(40), np.arange(100, 140), np.r_[np.arange(50, 80), np.full(10, -1)]]
    valid = np.stack([np.arange(150 + 10 * k, 160 + 10 * k) for k in range(3)])
    masks = np.stack([_mask(ids[ids >= 0]) for ids in first])
    first, test = np.stack(first), np.arange(190, 200)
    ids = {"train_idx": first, "val_idx": valid}
    mixed = {"train_masks": masks, "val_idx": valid}
    _save_npz(tmp_path / "a.npz", test_idx=test, **{k: v.T for k, v in ids.items()})
    _refuses("40 splits in train_idx, val_idx", prepare, tmp_path / "a.npz", tmp_path)
    for given in (ids, mixed):
        _save_npz(tmp_path / "a.npz", test_idx=test, **given)
        graph = _opened(tmp_path / "a.npz", tmp_path)
        path = graph.path
        assert graph.num_splits == 3 and not verify(path) and "the first of 3" in store.info(path)
        for k in range(3):
            choose_split(graph, k)
            expected = first[k][first[k] >= 0], valid[k], test
            assert [ids.tolist() for ids in graph.split.values()] == [e.tolist() for e in expected]
        choose_split(graph, turn=4)
        assert graph.split["valid"].tolist() == valid[1].tolist()
        _refuses("split 3 is out of range: .* has 3, counted from 0", choose_split, graph, 3)
    capsys.readouterr()
    common = ["--fanout 2 --epochs 1 --gpus 0 --dataset"]
    assert _code(*common, path, "--runs 4") == 0
    said = capsys.readouterr().out
    assert re.findall(r"split   number (\d) of 3", said) == ["0", "1", "2", "0"]
    state = tmp_path / "run.pt"
    assert _code(*common, path, f"--split 2 --checkpoint {state}") == 0
    said = capsys.readouterr().out
    assert "split   number 2 of 3" in said and "train 30 /" in said
    masks = {
        f"{part}_mask": np.stack([_mask(ids)] * 3, 1)
        for part, ids in (("train", first[0]), ("val", test))
    }
    masks["val_mask"][:, 1] = False  # of one split
    _save_npz(tmp_path / "part.npz", **masks, test_idx=np.stack([valid[0]] * 3))
    assert _code(*common, tmp_path / "part.npz", f"--root {tmp_path} --runs 3") == 0
    assert re.search(r"over 3 seeds .*valid [0-9.]+ \+- [0-9.]+% of 2", capsys.readouterr().out)
    one = build_store(tmp_path / "one", **_graph())
    # a graph without that split is predicted all the same
    for graph, more in ((path, []), (one, []), (tmp_path / "part.npz", ["--split", "0"])):
        words = f"--resume {state} --predict {tmp_path}/p.npy --dataset {graph} --root {tmp_path}"
        assert _code(words, *more) == 0
    for graph, number, said in ((path, 3, "split 3 is out of"), (one, 0, "--split 0 has no eff")):
        assert _code(*common, graph, f"--split {number}") == 2
        assert said in capsys.readouterr().err


# labels of four nodes => what is stored => what is said
STORED_LABELS = """
[0.0, 1, 2, 3] => [0, 1, 2, 3]
[[0], [1], [2], [3]] => [0, 1, 2, 3]
[false, false, true, true] => [0, 0, 1, 1]
[0, 9, 0, 9] => [0, 9, 0, 9] => 8 of 10 classes have no node: 1, 2, 3, 4, 5, 6, 7, 8; labels number
[NaN, 1, 2, 0] => [-1, 1, 2, 0] => 1 of 4 in y are NaN
["b", " a", "d", "c"] => [1, 0, 3, 2] => y is text: 4 classes
["x", "nan", "", "a"] => [1, -1, -1, 0] => y is text: 2 classes
["0", "1.0", "nan", "01"] => [0, 2, -1, 1] => y is text: 3 classes
["10", "2", "-1", "0"] => [2, 1, -1, 0] => y is text: 3 classes
"""


def test_datasets_npz_labels_and_arrays_that_are_not_used(tmp_path, capsys):
    graph = {"edge_index": [[0, 1, 2], [1, 2, 3]], "x": np.ones((4, 2)), "train_idx": [3]}
    for labels, expected, *says in _cases(STORED_LABELS):
        y, expected = np.array(json.loads(labels)), json.loads(expected)
        text = y.dtype.kind == "U"
        for form in [y, np.char.encode(y)] if text else [y]:
            np.savez(tmp_path / "y.npz", **graph, y=form)
            found = _opened(tmp_path / "y.npz", tmp_path, symmetrize=True)
            assert found.labels.tolist() == expected and found.num_classes == max(expected) + 1
            said = capsys.readouterr().out
            assert all(words in said for words in says) and bool(says) == bool(said)
            names = found.class_names
            assert not text or all(
                k < 0 or names[k] == word.strip() for k, word in zip(expected, y)
            )
    extra = dict(edge_weight=np.ones(3000), timestamps=np.ones(3000), years=np.ones(200))
    file, ignore = tmp_path / "x.npz", ["edge_weight", "timestamps"]
    _save_npz(file, train_idx=[1, 2], **extra, names=["a", "b"], num_nodes=200)
    path = prepare(f"{file}:ignore={'+'.join(ignore)}", tmp_path)
    assert "not used: years, names\n" in capsys.readouterr().out
    assert GraphStore.open(path).meta["source"] == {"dataset": "x.npz", "ignore": ignore}
    assert _sums(path) == _sums(datasets.build(file, tmp_path / "again", ignore=ignore))
    _save_npz(file, edge_index=None, edges=np.array([[0, 1], [2, 3]]), train_idx=[1])
    assert _edges(_opened(file, tmp_path)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("several", [True, False])
def test_labels_of_half_of_the_training_nodes_become_features(several, tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 200)
    if several:
        labels = np.c_[np.ones(200, int), rng.integers(-1, 2, (200, 2))]
    told = labels == 1 if several else np.eye(3)[labels]
    content = _save_npz(tmp_path / "y.npz", x=None, y=labels, train_idx=np.arange(90))
    graph = _opened(tmp_path / "y.npz", tmp_path)
    said = "half of the training nodes (45) show their labels as features"
    assert said in capsys.readouterr().out
    shown = np.setdiff1d(np.arange(90), graph.split["train"])
    x = np.zeros((200, 3))
    x[shown] = told[shown]
    assert len(shown) == 45 and np.array_equal(graph.features.tensor, x)
    del content["x"]  # of an object the same
    other = datasets.build(types.SimpleNamespace(**content), tmp_path / "other")
    assert np.array_equal(GraphStore.open(other).features.tensor, x)


def test_classes_that_may_be_none_and_one_class_alone_are_said(tmp_path, capsys):
    kinds = np.array(["1", "unknown", "Not labeled", "2"])
    _save_npz(tmp_path / "y.npz", y=kinds[np.arange(200) % 4])
    graph = _opened(tmp_path / "y.npz", tmp_path)
    said = capsys.readouterr().out
    for name in ("unknown", "Not labeled"):
        assert f"y.npz: y has {name} as a class, of 50 nodes: if it means that there is no" in said
    assert graph.num_classes == 4
    for name, labels in (("four", graph.labels), ("one", np.full(200, 2))):
        path = _store(tmp_path / name, labels=labels)
        assert _code(f"--dataset {path} --epochs 1 --fanout 2 --gpus 0") == 0
        said = "split   all training nodes are of one class: there is nothing to learn"
        assert (said in capsys.readouterr().out) == (name == "one")


# number of nodes, edges => what is said
EDGES_SAID = """
4 [[0, 1, 2, 3, 3], [1, 0, 3, 2, 3]] => nothing
6 [[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 3, 5]] => 1 of 6 edges have no reverse: messages go one way
4 [[1, 2, 3], [2, 3, 0]] => 3 of 3 edges have no reverse: messages go one way
4 [[1, 2, 2, 3], [2, 1, 3, 2]] => node 0 has no edges: ids may start at 1
4 [[0, 1, 1, 2], [1, 0, 2, 1]] => nothing
4 [[1, 2, 3, 0], [2, 3, 1, 1]] => 4 of 4 edges have no reverse: messages go one way
4 [[1, 2, 3, 1], [2, 3, 1, 0]] => 4 of 4 edges have no reverse: messages go one way
6 [[1, 2, 2, 3], [2, 1, 3, 2]] => nothing
"""


def test_edges_of_one_way_and_ids_that_may_start_at_1_are_said(tmp_path, capsys):
    """Node 0 has no edge, in either direction, and nine of ten nodes have one."""
    for graph, said in _cases(EDGES_SAID):
        count, edges = graph.split(" ", 1)
        arrays = {"x": np.ones((int(count), 2)), "y": range(int(count)), "train_idx": [1, 2]}
        np.savez(tmp_path / "e.npz", **arrays, edge_index=json.loads(edges))
        plain = prepare(tmp_path / "e.npz", tmp_path)
        found = capsys.readouterr().out
        lines = found.count("\n")
        assert lines == 0 if said == "nothing" else lines == 1 and said in found
        both = prepare(tmp_path / "e.npz", tmp_path, symmetrize=True)
        assert "one way" not in capsys.readouterr().out and both != plain
        assert GraphStore.open(both).meta["options"]["symmetrize"]
    for name in (plain, "cora"):
        said = f"--drop-duplicates has no effect on {name}"
        _refuses(said, prepare, name, tmp_path, drop_duplicates=True)
    ring, y = np.stack([np.arange(100), np.roll(np.arange(100), 1)]), np.arange(101) % 4
    x = np.ones((101, 2))
    typed = {"y:a": y, "x:a": x, "train_idx:a": [1], "num_nodes:b": 100}
    np.savez(tmp_path / "t.npz", **typed, **{"edge_index:a,to,b": ring + [[1], [0]]})
    datasets.build(tmp_path / "t.npz", tmp_path / "typed")
    assert "t.npz: node 0 of type a has no edges: ids may start at 1\n" in capsys.readouterr().out


def test_edges_are_counted_when_a_store_is_built(tmp_path, monkeypatch):
    """In any order of a list, in many pieces: as counted in plain Python."""
    graph = _graph(num_nodes=150, num_edges=2000)
    src, dst = graph["edge_index"]
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=150))])
    pairs = collections.Counter(zip(src.tolist(), dst.tolist()))
    expected = {
        "duplicates": 2000 - len(pairs),
        "self_loops": sum(count for (u, v), count in pairs.items() if u == v),
        "isolated": 150 - len({node for pair in pairs for node in pair}),
        "one_way": sum(count for (u, v), count in pairs.items() if (v, u) not in pairs),
        "one_way_of": 2000,
        "from_one": [],
    }
    assert expected["duplicates"] and expected["self_loops"] and expected["isolated"]
    monkeypatch.setattr(checks, "EDGE_CHUNK", 100)
    stored = build_store(tmp_path / "s", **graph)
    csc = dict(graph, edge_index=None, indptr=indptr, indices=src[np.argsort(dst, kind="stable")])
    for path in (stored, build_store(tmp_path / "c", **csc)):
        assert GraphStore.open(path).meta["edges"] == expected
    line = checks.edge_line(GraphStore.open(stored))
    words = r"\d+ duplicates, \d+ self loops, 3 isolated nodes, 9\d % without a reverse"
    assert re.fullmatch(f"2,000 edges: {words}, messages go one way", line)
    _rewrite_meta(stored, edges=...)  # as in stores of before
    assert checks.edge_line(GraphStore.open(stored)) == "2,000 edges"
    kinds = np.arange(2000) % 3  # edges of different types are no duplicates
    distinct = len(set(zip(src.tolist(), dst.tolist(), kinds.tolist())))
    typed = GraphStore.open(build_store(tmp_path / "t", **graph, edge_type=kinds))
    assert f" {2000 - distinct} duplicate" in checks.edge_line(typed)
    monkeypatch.setattr(checks, "EXACT", 100)
    monkeypatch.setattr(checks, "SAMPLE", 1000)
    sample = checks.count_edges(indptr, csc["indices"])
    assert sample["one_way_of"] == 1000
    assert abs(sample["one_way"] / 1000 - expected["one_way"] / 2000) < 0.05
    x = np.ones((2, 1), np.float32)
    clean = build_store(tmp_path / "clean", edge_index=[[0, 1], [1, 0]], features=x)
    clean = GraphStore.open(clean)
    assert "every edge has its reverse" in checks.edge_line(clean)
    clean.num_edges, clean.meta["edges"] = 10**7, {**dict.fromkeys(expected, 0), "one_way_of": 9000}
    for one_way, said in (
        (
            0,
            "10,000,000 edges: no duplicates or self loops, each of 9,000 edges drawn has its reverse",
        ),
        (1, ": under 1 % without a reverse, messages go one way"),
        (4500, ": 50 % without"),
        (8999, ": over 99 % without"),
        (9000, ": 100 % without"),
    ):
        clean.meta["edges"]["one_way"] = one_way
        assert said in checks.edge_line(clean)


def test_train_says_at_every_run_what_is_missing_from_its_graph(tmp_path, capsys):
    file, checkpoint = tmp_path / "g.npz", str(tmp_path / "c.pt")
    _save_npz(file, edge_index=np.array([[0, 0, 2], [1, 1, 2]]), train_idx=[1, 2])
    common = f"--fanout 2 --epochs 1 --gpus 0 --root {tmp_path} --dataset {file}"
    both = ["--drop-duplicates", "--symmetrize"]

    def said(*words):
        assert _code(common, *words) == 0
        return capsys.readouterr().out

    for words, line in (
        ([], "3 edges: 1 duplicate, 1 self loop, 197 isolated nodes, 67 % without a reverse"),
        (both, "3 edges: 1 self loop, 197 isolated nodes"),
        (both, "3 edges: 1 self loop, 197 isolated nodes"),  # from the store of the last run
    ):
        out = said(*words, "--checkpoint", checkpoint)
        assert f": 200 nodes, {line}" in out
        for empty in ("valid nodes: no epoch can", "test nodes: there will be no test score"):
            assert f"split   it has no {empty}" in out
    # from the store of the last run, which has been built with these flags
    assert _code("--resume", checkpoint, "--epochs 2 --gpus 0") == 0
    capsys.readouterr()
    _save_npz(file, y=np.arange(200) % 3, x=np.ones((200, 2)))
    assert "split   it has no" not in said()


def _zip(file, members):
    """Write an archive of .npy members given as bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(f"{name}.npy", data)


def _npy(array, shape=None, descr=None):
    """Return the bytes of an array as .npy, with another shape or dtype in the header if given."""
    file, array = io.BytesIO(), np.asarray(array)
    header = {"descr": descr or array.dtype.str, "fortran_order": False}
    np.lib.format.write_array_header_1_0(file, {**header, "shape": shape or array.shape})
    return file.getvalue() + array.tobytes()


def test_datasets_npz_hostile_archives(tmp_path, monkeypatch):
    graph, file = _graph(), tmp_path / "h.npz"
    x, names = graph["features"], {"edge_index": "edge_index", "y": "labels"}
    rest = [(name, _npy(graph[argument])) for name, argument in names.items()]

    def refused(message):
        _refuses(message, datasets.build, file, tmp_path / "s")

    for message, member in (
        ("MemoryError", _npy(x, (200, 1 << 40))),
        ("", _npy(x, (-200, -5))),
        ("it is longer than its header says", _npy(x, (200, 4))),
        ("EOF", _npy(x, (200, 6))),
        ("Object arrays", _npy(x, descr="|O")),
        ("", b"\x93NUMPY\2\0" + b"\xff" * 4000),
        ("EOF", b""),
    ):
        _zip(file, [*rest, ("x", member)])
        refused(f"x cannot be read: {message}")
    _zip(file, [*rest, ("x", _npy(x))])
    good = file.read_bytes()
    for at, value, message in ((6, b"\1", "encrypted"), (8, b"\x63", "compression")):
        data = bytearray(good)  # in the local header and in the directory
        for magic, shift in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
            data[(start := data.index(magic)) + at + shift : start + at + shift + 1] = value
        file.write_bytes(data)
        refused(message)
    _zip(file, [*rest, ("x", _npy(x)), ("unused", np.random.default_rng(0).bytes(3000))])
    data = file.read_bytes()
    where = data.index(b"unused.npy") + 500
    # a bomb or damage that nobody reads
    file.write_bytes(data[:where] + b"????" + data[where + 4 :])
    datasets.build(file, tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    bomb = np.zeros((1 << 16, 5), np.float32)
    np.savez_compressed(file, edge_index=graph["edge_index"], x=bomb, y=np.zeros(1 << 16, int))
    monkeypatch.setattr("sources.arrays.free_host_bytes", lambda: 1 << 20)
    refused("x cannot be read: 1,310,848 bytes unpacked, and 1,048,576 are")
    assert [*tmp_path.iterdir()] == [file]
