"""Tests: sources/: names, .npz files, splits."""

import collections
import functools
import io
import itertools
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
from tests.common import DATA, _code, _graph, _store
from tests.stores import _edges, _graphs, _mask, _refuses, _rewrite_meta, _save_npz, _sums


def _opened(dataset, root, **options):
    return GraphStore.open(prepare(dataset, root, progress=False, **options))


SMALL = "synthetic:nodes=3000,degree=12,features=8,classes=5"


def test_datasets_synthetic_is_the_same_for_the_same_seed(tmp_path, monkeypatch):
    a = prepare(SMALL, tmp_path / "a", progress=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    b = prepare(f"{SMALL},seed=0", tmp_path / "b", progress=False)
    c = prepare(f"{SMALL},seed=1", tmp_path / "b", progress=False)
    assert a.name == b.name != c.name
    before = a.stat().st_mtime_ns  # a store that is there is taken
    assert prepare(SMALL, tmp_path / "a") == prepare(a) == prepare(str(a)) == a
    assert a.stat().st_mtime_ns == before
    assert prepare(SMALL, tmp_path / "b", backend="lmdb", progress=False) != b
    half = prepare(SMALL, tmp_path / "b", feature_dtype="bfloat16", progress=False)
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
    work = functools.partial(prepare, SMALL, progress=False)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        paths = {*pool.map(work, [tmp_path] * 3, chunksize=1)}
    assert len(paths) == 1 and verify(paths.pop()) == [] and len(list(tmp_path.iterdir())) == 1


def test_datasets_a_file_system_without_locks(tmp_path, monkeypatch):
    def second(path, **graph):
        build_store(path, **graph)  # by another process, which was quicker
        build_store(path, **graph)

    monkeypatch.setattr("sources.prepare.build_store", second)
    assert verify(prepare(SMALL, tmp_path, progress=False)) == []


def test_datasets_npz(tmp_path, monkeypatch):
    file = tmp_path / "own.npz"
    _save_npz(file, train_idx=np.arange(9))
    path = prepare(file, tmp_path, progress=False)
    assert prepare(str(file), tmp_path) == path
    both = prepare(file, tmp_path, symmetrize=True, progress=False)
    assert prepare(both, symmetrize=True) == both  # which it is
    _refuses("--symmetrize has no effect on .*: it is a store", prepare, path, symmetrize=True)
    with monkeypatch.context() as other:  # a later version, which makes something else of the file
        other.setattr(datasets, "RULES", datasets.RULES + 1)
        assert prepare(file, tmp_path, progress=False) != path
    _save_npz(file, seed=1, train_idx=np.arange(9))
    assert prepare(file, tmp_path, progress=False) != path  # other contents, another store
    _save_npz(file, y=np.arange(200) % 3)
    path = prepare(file, tmp_path, seed=0, progress=False)
    # one graph, whatever split it is taken with
    assert prepare(file, tmp_path, seed=1, progress=False) == path
    first, second, again = (GraphStore.open(path) for _ in range(3))
    for graph, seed in ((first, 0), (second, 1), (again, 1)):
        choose_split(graph, seed=seed)
    assert all(torch.equal(second.split[name], again.split[name]) for name in disk.SPLITS)
    assert [len(ids) for ids in first.split.values()] == [60, 90, 50]
    assert first.labels[first.split["train"].long()].bincount().tolist() == [20] * 3
    assert not torch.equal(first.split["train"], second.split["train"])


def test_datasets_npz_word_counts(tmp_path, capsys):
    """Each row of counts sums to the square root of its width: of 4 columns to 2."""
    file, data = tmp_path / "words.npz", np.tile([1, 3], 200)
    data[300:] *= 3  # half of the rows sum to 12
    csr = dict(
        feat_indptr=np.arange(0, 401, 2), feat_indices=np.tile([1, 3], 200), feat_shape=[200, 4]
    )
    csr["feat_indptr"][1:] -= 2  # a node without a word, first; the last one's are left over
    _save_npz(file, **csr, feat_data=data, x=None)
    _refuses(
        "CSR matrix of features .* all input arrays must have the same", prepare, file, tmp_path
    )
    csr["feat_indptr"][-1] += 2
    csr["feat_indices"][10:12] = 2  # the same word twice: its counts are added
    capsys.readouterr()
    for kind, option, some, twice in (
        ("u1", "", [0, 0.5, 0, 1.5], 2),
        ("i8", ":row_normalize=0", [0, 1, 0, 3], 4),
        ("f8", "", [0, 1, 0, 3], 4),
        ("f4", ":row_normalize=1", [0, 0.5, 0, 1.5], 2),
    ):
        _save_npz(file, **csr, feat_data=data.astype(kind), x=None)
        x = _opened(f"{file}{option}", tmp_path).features.tensor
        assert x[5].tolist() == some and x[6].tolist() == [0, 0, twice, 0] and not x[0].any()
        assert x.dtype == (torch.float64 if kind == "f8" else torch.float32)
        scaled = twice == 2
        assert x[-1].tolist() == [0, 0.5, 0, 1.5] if scaled else [0, 3, 0, 9]
        said = capsys.readouterr().out
        how = "each row scaled to the sum 2, the" if scaled else "as they are"
        assert f"features are {'values' if 'f' in kind else 'counts'}, {how}" in said
    _save_npz(file, feat_indptr=np.zeros(201, int), feat_indices=np.zeros(0, int), x=None)
    assert not _opened(str(file), tmp_path).features.tensor.any()  # no row has a word
    csr = dict(feat_indptr=np.append(0, np.full(200, 3000)), feat_indices=np.zeros(3000, int))
    _save_npz(file, **csr, feat_data=np.ones(3000, "f2"), x=None)
    x = _opened(str(file), tmp_path).features.tensor
    assert x.dtype == torch.float16 and x[0, 0] == 3000  # sums in float16 end at 2,048


def _refused_npz():
    """Return [(part of the message, changes of a valid file, --dataset parameters)] of what must not become a store."""
    mask, y, ids = np.arange(200) < 50, np.arange(200) % 4, np.arange(200)
    csr = {"x": None, "feat_indptr": np.arange(201), "feat_indices": ids % 5}
    splits, times = np.stack([mask, ~mask, mask]), np.ones(3000)
    return [
        ("no array edge_index or edges; its arrays are x, y", dict(edge_index=None)),
        ("it has a split, and no labels", dict(y=None, train_idx=[0, 1])),
        ("y is one-hot", dict(y=np.eye(4)[y])),
        (r"one-hot.*, -1 where", dict(y=np.where(y[::-1, None] != 1, np.eye(4)[y], -1))),
        (r"y\[7\] is 2.5: .* node regression, are not", dict(y=np.where(ids == 7, 2.5, 1))),
        (r"bad.npz: y\[7\] is -2: labels are 0 or more", dict(y=np.where(ids == 7, -2, 1))),
        ("no features, and 3 splits: keep one, as split=0", dict(x=None, train_masks=splits)),
        (
            "nodes with several labels each need a split of their own: train_idx",
            dict(x=None, y=np.eye(4, 3, dtype=int)[y] + np.eye(4, 3, 1, int)[y]),
        ),
        (r"y\[7\] is inf", dict(y=np.where(ids == 7, np.inf, 1))),
        (
            "y holds NA: rename it if it is a class, write nothing if it",
            dict(y=np.array(["1", "NA"] * 100)),
        ),
        (r"edges has shape \[2, 9\]: \[M, 2\]", dict(edge_index=None, edges=np.zeros((2, 9), int))),
        ("has features and x, which mean the same.*ignore=x", dict(features=np.ones((200, 2)))),
        ("w is not used here, and may matter.*ignore=w", dict(w=times)),
        ("trainmask is not used here", dict(trainmask=mask)),
        ("no array nothing; its arrays are", {}, ":ignore=nothing"),
        ("num_nodes is 300", dict(num_nodes=300)),
        ("has val_idx, but no train_idx", dict(val_idx=[1, 2])),
        ("train_idx and train_mask, which mean the", dict(train_idx=[1, 2], train_mask=mask)),
        (r"train_idx is \[199\]: a mask is", dict(train_idx=mask[1:])),
        ("train_mask holds values other than 0 and 1", dict(train_mask=2 * mask)),
        (r"train_idx is \[2, 5, 2\]: ids are \[n\]", dict(train_idx=ids[:20].reshape(2, 5, 2))),
        ("split 1 of 2: .* holds node 11 more than", dict(train_idx=[[0, 1], [11, 11]])),
        ("2 and 3 splits in train_masks, val_", dict(train_masks=splits, val_masks=~splits[:2])),
        ("no split=3: it has 3 splits", dict(train_masks=splits), ":split=3"),
        ("no split=0: it has 1 split, and", dict(train_mask=mask), ":split=0"),
        ("radius has no effect: it holds one graph", {}, ":radius=3"),
        ("row_normalize has no effect: it is for a CSR matrix", {}, ":row_normalize=0"),
        ("CSR .*: found negative index -1", {**csr, "feat_indices": np.full(200, -1)}),
        ("size is 5 but found index 199", {**csr, "feat_indices": ids, "feat_shape": [200, 5]}),
        ("feat_data holds <U1", {**csr, "feat_data": np.full(200, "a")}),
        (r"feat_data\[3\] is -1.*row_normalize=0", {**csr, "feat_data": np.where(ids == 3, -1, 1)}),
        ("nnz from values: 3", {**csr, "feat_data": np.ones(3)}),
        (r"features\[7, 2\] is nan", {**csr, "feat_data": np.where(ids == 7, np.nan, 1)}),
        ("may not contain negative values", {**csr, "feat_indptr": np.append([0, 9], ids[1:])}),
        ("CSR .*200 rows need 201 offsets from 0", {**csr, "feat_indptr": np.arange(201) + 1}),
        ("CSR .*400 rows need 401 offsets from 0", {**csr, "feat_shape": [400, 5]}),
        (
            "CSR .*is sparse: dense it takes .* bytes, and .* are free",
            {**csr, "feat_shape": [200, 1 << 40]},
        ),
        ("x cannot be read", dict(x=np.array([{}] * 200, object))),
    ]


def test_datasets_npz_bad_files(tmp_path):
    file = tmp_path / "bad.npz"
    for content in (b"no zip", b""):
        file.write_bytes(content)
        _refuses("cannot be read", prepare, file, tmp_path)
    for message, entries, *option in _refused_npz():
        _save_npz(file, **entries)
        _refuses(message, prepare, "".join([str(file), *option]), tmp_path, progress=False)
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


def test_datasets_npz_splits(tmp_path):
    train, valid, test = np.arange(50), np.arange(50, 80), np.arange(80, 150)
    second, file = np.arange(100, 150), tmp_path / "a.npz"
    masks = dict(train_mask=_mask(train), val_mask=_mask(valid), test_mask=_mask(test))
    several = dict(train_masks=np.stack([_mask(train), _mask(second)]))
    several["val_masks"] = np.stack([_mask(valid)] * 2)
    turned = {name.removesuffix("s"): rows.T for name, rows in several.items()}
    ids = dict(train_idx=train[:, None], valid_idx=valid[None], test_idx=test.astype(">u2"))
    for entries, option, expected in (
        (ids, "", (train, valid, test)),
        (masks, "", (train, valid, test)),
        ({n: mask.astype(float)[:, None] for n, mask in masks.items()}, "", (train, valid, test)),
        (dict(train_idx=_mask(train), test_idx=test), "", (train, [], test)),
        (several, ":split=1", (second, valid, [])),
        (dict(turned, test_mask=_mask(test[:9])), ":split=1", (second, valid, test[:9])),
    ):
        _save_npz(file, **entries)
        name, options = f"{file}{option}", {"progress": False}
        path, other = (prepare(name, tmp_path, seed=seed, **options) for seed in (0, 1))
        split = GraphStore.open(path).split
        assert [part.tolist() for part in split.values()] == [list(part) for part in expected]
        assert path == other, "a seed decides on nothing here"


def test_a_graph_without_a_split_gets_the_same_one_however_it_is_built(tmp_path, capsys):
    """From arrays, from a file, and in stores that say elsewhere that they had none; runs draw their own."""
    args = {**_graph(), "split": None}
    _save_npz(tmp_path / "a.npz")
    arrays = build_store(tmp_path / "arrays", **args)
    file = datasets.build(tmp_path / "a.npz", tmp_path / "file")
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
    args, split = _graph(), {"train": [0, 1], word: [2, 3], "test": [4]}
    data = {"x": args["features"], "y": args["labels"], "edge_index": args["edge_index"]}
    _save_npz(tmp_path / "a.npz", train_idx=[0, 1], **{f"{word}_mask": _mask([2, 3])})
    small = disk_graphs.build_graphs(tmp_path / "many", [_graphs(9)], split=split)
    assert disk_graphs.GraphDataset.open(small).split["valid"].tolist() == [2, 3]
    for path in (
        build_store(tmp_path / "one", **{**args, "split": split}),
        build_store(tmp_path / "two", **{**args, "split": [split, split]}),
        datasets.build(types.SimpleNamespace(**data), tmp_path / "data", split=split),
        datasets.build(tmp_path / "a.npz", tmp_path / "file"),
    ):
        graph = GraphStore.open(path)
        assert graph.split["valid"].tolist() == [2, 3] and "split" not in graph.meta
    twice = {"split": {**split, "val": [2], "valid": [3]}}
    data = types.SimpleNamespace(**data)
    for make, given in ((datasets.build, (data, tmp_path / "no")), (_store, (tmp_path / "no",))):
        _refuses("split has .*, which mean the same: keep one", make, *given, **twice)


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


def test_datasets_npz_labels_and_arrays_that_are_not_used(tmp_path, capsys):
    y, text = np.arange(200) % 4, np.array(["b", " a", "d", "c"])
    odd = np.array([b"x", b"nan", b"", b"a"])
    written, spelled = np.array(["0", "1.0", "nan", "01"]), np.array(["10", "2", "-1", "0"])
    for labels, expected, says in (
        (y.astype(float), y, ""),
        (y[:, None].astype(">i4"), y, ""),
        (y > 1, y > 1, ""),
        (
            y % 2 * 9,
            y % 2 * 9,
            "8 of 10 classes have no node: 1, 2, 3, 4, 5, 6, 7, 8; labels number",
        ),
        (np.float32(np.where(y, y, np.nan)), np.where(y, y, -1), "50 of 200 in y are NaN"),
        (text[y], [1, 0, 3, 2] * 50, "y is text: 4 classes"),
        (odd[y], [1, -1, -1, 0] * 50, "y is text: 2 classes"),
        (written[y], [0, 2, -1, 1] * 50, "y is text: 3 classes"),
        (spelled[y], [2, 1, -1, 0] * 50, "y is text: 3 classes"),
    ):
        _save_npz(tmp_path / "y.npz", y=labels, train_idx=[3, 7, 11])
        graph = _opened(tmp_path / "y.npz", tmp_path, symmetrize=True)
        assert graph.labels.tolist() == list(expected) and graph.num_classes == max(expected) + 1
        said = capsys.readouterr().out
        assert says in said and bool(says) == bool(said.replace("classes have no node", ""))
        if "text" in says:
            names = set(np.char.strip(labels.astype(str))) - {"", "nan"}
            assert graph.meta["source"]["classes"] == sorted(
                names - {"-1"}, key=lambda name: (len(name), name)
            )
    extra = dict(edge_weight=np.ones(3000), timestamps=np.ones(3000), years=np.ones(200))
    file, ignore = tmp_path / "x.npz", ["edge_weight", "timestamps"]
    _save_npz(file, train_idx=[1, 2], **extra, names=["a", "b"], num_nodes=200)
    path = prepare(f"{file}:ignore={'+'.join(ignore)}", tmp_path, progress=False)
    assert "not used: years, names\n" in capsys.readouterr().out
    assert GraphStore.open(path).meta["source"] == {"dataset": "x.npz", "ignore": ignore}
    assert _sums(path) == _sums(datasets.build(file, tmp_path / "again", ignore=ignore))
    _save_npz(file, edge_index=None, edges=np.array([[0, 1], [2, 3]]), train_idx=[1])
    assert _edges(_opened(file, tmp_path)) == [(0, 1), (2, 3)]


def test_several_labels_of_half_of_the_training_nodes_become_features(tmp_path, capsys):
    labels = np.random.default_rng(0).integers(-1, 2, (200, 3))
    labels[:, 0] = 1
    content = _save_npz(tmp_path / "y.npz", x=None, y=labels, train_idx=np.arange(90))
    graph = _opened(tmp_path / "y.npz", tmp_path)
    assert (
        "half of the training nodes (45) show their labels as features" in capsys.readouterr().out
    )
    shown = np.setdiff1d(np.arange(90), graph.split["train"])
    x = np.zeros((200, 3))
    x[shown] = labels[shown] == 1
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


def test_datasets_npz_one_way_edges_are_said(tmp_path, capsys):
    ways = np.array([[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 3, 5]])
    for edges, says in (
        (ways[:, :5], ""),
        (ways, "1 of 6 edges have no reverse: messages go one way"),
        (np.stack([np.arange(50), np.arange(50) + 1]), "50 of 50 edges"),
    ):
        _save_npz(tmp_path / "e.npz", edge_index=edges, train_idx=[1, 2])
        plain = prepare(tmp_path / "e.npz", tmp_path, progress=False)
        said = capsys.readouterr().out
        assert says in said and bool(says) == bool(said)
        both = prepare(tmp_path / "e.npz", tmp_path, symmetrize=True, progress=False)
        assert capsys.readouterr().out == "" and both != plain
        assert GraphStore.open(both).meta["options"]["symmetrize"]
    for name in (plain, "cora"):
        said = f"--drop-duplicates has no effect on {name}"
        _refuses(said, prepare, name, tmp_path, drop_duplicates=True)


def test_ids_that_may_start_at_1_are_said(tmp_path, capsys):
    """Node 0 has no edge, in either direction, and nine of ten nodes have one."""
    ring = np.stack([np.arange(100), np.roll(np.arange(100), 1)])
    line = "node 0 has no edges: ids may start at 1\n"
    x, y = np.ones((101, 2)), np.arange(101) % 4
    for edges, rows, says in (
        (ring + 1, 101, True),
        (ring, 101, False),
        (np.append(ring + 1, [[0], [7]], 1), 101, False),
        (np.append(ring + 1, [[7], [0]], 1), 101, False),
        (ring[:, :80] + 1, 101, False),
        (np.array([[1, 2], [2, 3]]), 4, True),
    ):
        arrays = dict(edge_index=edges, x=x[:rows], y=y[:rows], train_idx=[1, 2])
        _save_npz(tmp_path / "e.npz", **arrays)
        datasets.build(tmp_path / "e.npz", tmp_path / f"s{len(list(tmp_path.iterdir()))}")
        assert (line in capsys.readouterr().out) == says
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
    assert checks.edge_line(clean).endswith(", each of 9,000 edges drawn has its reverse")
    for one_way, share in ((1, "under 1"), (4500, "50"), (8999, "over 99"), (9000, "100")):
        clean.meta["edges"]["one_way"] = one_way
        line = f"10,000,000 edges: {share} % without a reverse, messages go one way"
        assert checks.edge_line(clean) == line


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


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_datasets_arxiv_without_features(tmp_path, capsys):
    graph = _opened(DATA / "ogbn_arxiv_nofeat.npz", tmp_path)
    said = capsys.readouterr().out
    assert said.count("\n") == 2 and "half of the training nodes (45,470)" in said
    assert "not used: node_year, class_names" in said
    assert [len(ids) for ids in graph.split.values()] == [45471, 29799, 48603]
    assert graph.num_edges == 2315598  # what to_symmetric() makes of ogbn-arxiv
    shown = graph.features.tensor.any(1)
    assert shown.sum() == 45470 and not any(shown[ids].any() for ids in graph.split.values())
