"""Stores that are cut into parts, one for each of several machines."""

import json
import os
import pickle
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import ddp
from ddp import Exchange
from disk import convert, files
from extras.graph_store import build_graphs
from extras.split import machines_by_part
from features import SplitFeatures, UnevenFeatures
from inference import inference
from model import GNN
from run.checkpoint import digests
from sources import cli
from store import GraphStore, build_store, split, verify
from tests.common import _code, _end, _fork, _in_child, _random_graph, _same_weights, _store
from tests.stores import _graphs, _refuses, _rewrite_meta, _small_disk, _sums
from tests.test_ddp import _on_machines, _same_logs


def _types(path):
    """Build a graph in which authors have no features."""
    random = np.random.default_rng(0)
    return build_store(
        path,
        node_types={"author": 30, "paper": 50, "venue": 7},
        edge_index={("author", "writes", "paper"): random.integers(0, 30, (2, 90))},
        features={"paper": random.random((50, 4)), "venue": random.random((7, 2))},
        labels={"paper": random.integers(0, 3, 50)},
    )


KINDS = {
    "mmap": _store,
    "lmdb": lambda path: _store(path, backend="lmdb", block_rows=7),
    "codes": lambda path: _store(path, feature_dtype="int8"),
    "bfloat16": lambda path: _store(
        path, feature_dtype="bfloat16", edge_features=np.random.rand(3000, 2)
    ),
    "names": lambda path: _store(path, node_names=[f"n{i}" for i in range(200)], backend="lmdb"),
    "types": _types,
    "times": lambda path: _store(path, edge_time=np.arange(3000), node_time=np.full(200, 2000)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_all_but_others_features(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ROW_BYTES", 1000)  # a few rows at a time
    whole = GraphStore.open(KINDS[kind](tmp_path / "g"))
    rows = whole.features[:]
    folder = split(tmp_path / "g", 3)
    assert folder == tmp_path / "g.parts" and verify(tmp_path / "g") == []
    ends = [len(rows) * m // 3 for m in range(4)]
    for m, (first, stop) in enumerate(zip(ends, ends[1:])):
        part = GraphStore.open(folder / f"part-{m}")
        assert verify(part.path) == [] and part.part == (m, 3)
        assert digests(part) == digests(whole)
        for name in whole.meta["files"]:
            same = os.path.samefile(part.path / name, whole.path / name)
            assert same != name.startswith("features.")
        assert part.features.shape == whole.features.shape
        assert part.features.dtype == whole.features.dtype
        held = getattr(part.features, "stored", part.features)
        assert (held.first, held.stop) == (first, stop)
        ids = torch.randint(first, stop, (40,), dtype=torch.int32)
        assert torch.equal(part.features.gather(ids), rows[ids])
        out = torch.empty_like(rows[:40])
        assert part.features.gather(ids, out) is out and torch.equal(out, rows[ids])
        assert torch.equal(pickle.loads(pickle.dumps(part.features)).gather(ids), rows[ids])
        assert part.features.gather(ids[:0]).shape == (0, rows.shape[1])
        other = stop % len(rows)
        said = f"features of node {other} are elsewhere: this part has rows {first} to {stop - 1}$"
        _refuses(said, part.features.gather, torch.tensor([first, other]))
        _refuses("is out of range", part.features.gather, torch.tensor([-1]), error=IndexError)
        if whole.features.shape[0] == whole.num_nodes:
            assert pickle.loads(pickle.dumps(part)).part == (m, 3)


def test_rows_of_a_part_change(tmp_path):
    whole = GraphStore.open(KINDS["lmdb"](tmp_path / "g"))
    folder = split(tmp_path / "g", 2, tmp_path / "cut")
    part = GraphStore.open(folder / "part-1")
    new = torch.ones(2, 5)
    part.features.put_rows(torch.tensor([100, 199]), new)
    assert torch.equal(GraphStore.open(folder / "part-1").features[[199, 100]], new)
    _refuses("node 99 are elsewhere", part.features.put_rows, torch.tensor([199, 99]), new)
    assert verify(part.path) == []
    changed = digests(GraphStore.open(folder / "part-1"))
    assert changed == {**digests(whole), "features.lmdb": None}  # no longer compared
    # a store whose rows have changed may be cut, too
    whole.features.put_rows(torch.tensor([7]), new[:1])
    again = GraphStore.open(split(tmp_path / "g", 20) / "part-0")
    assert torch.equal(again.features[[7]], new[:1]) and digests(again) == changed
    mapped = GraphStore.open(split(_store(tmp_path / "mapped"), 2) / "part-0")
    _refuses("stay as built", mapped.features.put_rows, torch.tensor([0]), new[:1])


def test_a_split_is_refused_or_complete(tmp_path, capsys, monkeypatch):
    path = _store(tmp_path / "g")
    target = tmp_path / "cut"
    for words, message in (
        ("1", "cannot be split into 1: it has 200 rows of features\n"),
        ("201", "cannot be split into 201"),
        ("two", "invalid int value: 'two'"),
        (f"2 {path}", "exists already"),
    ):
        assert _code(f"split {path} {words}", main=cli.main) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["split", str(path), "2", str(target)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == f"{target}/part-1: part 1 of 2, with features of nodes 100 to 199"
    for command, line in (
        ("info", "part 1 of 2, with features of nodes 100 to 199"),
        ("verify", "--  part 1 of 2"),
    ):
        assert cli.main([command, f"{target}/part-1"]) == 0
        assert line in capsys.readouterr().out
    _refuses("is part 0 of 2, .*: split the whole store", split, target / "part-0", 2)
    many = build_graphs(tmp_path / "many", [_graphs(10)])
    _refuses("holds many small graphs", split, many, 2)
    none = {"node_types": {"a": 4}, "edge_index": {("a", "to", "a"): [[0], [1]]}, "features": {}}
    _refuses("has no features to split", split, build_store(tmp_path / "none", **none), 2)
    # a damaged store would get checksums that fit
    bad = shutil.copytree(path, tmp_path / "bad")
    with open(bad / "features.npy", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1")
    _refuses("is damaged: features.npy: its sha256 is", split, bad, 2)
    # rows that change meanwhile could be of two moments
    moving = GraphStore.open(_store(tmp_path / "moving", backend="lmdb"))
    chunked = convert.chunked

    def moved(*args, **options):
        moving.features.put_rows(torch.tensor([0]), torch.ones(1, 5))
        return chunked(*args, **options)

    monkeypatch.setattr(convert, "chunked", moved)
    _refuses("changed while it was split: split it again", split, moving.path, 2)
    assert not (tmp_path / "moving.parts").exists() and not list(tmp_path.glob(".*"))


def test_a_split_that_is_killed_leaves_nothing(tmp_path, monkeypatch):
    path = _store(tmp_path / "g")
    sums = _sums(path)
    write = files.write_npy

    def killed(file, *args, **options):
        if file.parent.name == "part-1":
            os._exit(9)
        return write(file, *args, **options)

    monkeypatch.setattr(files, "write_npy", killed)
    assert os.waitstatus_to_exitcode(_in_child(lambda: split(path, 2))) == 9
    assert not (tmp_path / "g.parts").exists()
    monkeypatch.undo()
    split(path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "g.parts"] and _sums(path) == sums


def test_a_split_on_another_disk(tmp_path):
    """Its files are copies there, for which there may be no room."""
    path = _store(tmp_path / "g", features=np.random.rand(200, 500).astype(np.float32))

    def work(small):
        folder = split(path, 2, small / "cut")
        assert verify(folder / "part-1") == []
        shutil.rmtree(folder)
        (small / "other").write_bytes(bytes(700_000))
        _refuses("no room for .*cut: No space left on device", split, path, 2, small / "cut")
        assert os.listdir(small) == ["other"]

    with _small_disk(tmp_path, "1m") as small:
        assert _in_child(lambda: work(small)) == 0


def test_a_split_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ROW_BYTES", 1 << 22)
    path = _store(tmp_path / "g", num_nodes=3_000, features=np.zeros((3_000, 4000), np.float32))

    def work():
        status = Path("/proc/self/status").read_text()
        held = int(re.search(r"VmData:\s*(\d+)", status)[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + (12 << 20),) * 2)
        split(path, 2)

    assert _in_child(work) == 0


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_parts_that_are_forged_or_read_by_code_without_parts(backend, tmp_path, monkeypatch):
    path = split(_store(tmp_path / "g", num_nodes=199, backend=backend), 3) / "part-1"
    for part in (*json.loads('[[0, 2], [1, 201], [1], ["x", 3], 7, []]'), None, ...):
        _rewrite_meta(path, part=part)
        assert verify(path)
        assert cli.main(["info", str(path)]) == 2
    _rewrite_meta(path, part=[1, 3], whole=7)
    assert verify(path)
    monkeypatch.setattr(files, "READABLE", (2, 3))
    _refuses("store format 5; this code reads 2 to 3", GraphStore.open, path)


# training on parts

NODE = "--gpus 0 --fanout 5,3 --hidden 16 --epochs 2 --batch-size 30"


def _same_run(tmp_path, whole, counts, words, other=""):
    """Train on a whole store and on its parts, on machines of so many ranks."""
    folder = split(whole, len(counts), tmp_path / "cut")
    for name, store in (("a", whole), ("b", f"{folder}/part-MACHINE --split-features {other}")):
        files = f"--checkpoint {tmp_path}/{name}.pt --log {tmp_path}/{name} --predict-what logits --predict {tmp_path}/{name}.npy"
        processes = _on_machines(tmp_path, counts, NODE, words, files, f"--dataset {store}")
        printed = [_end(process) for process in processes]
    assert _same_weights(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    _same_logs(tmp_path / "a", tmp_path / "b")
    assert f"graph   {folder}/part-0: " in printed[0]
    assert f"\nmemory  features are split over {len(counts)} machines: each reads " in printed[0]


@pytest.mark.parametrize(
    "kind, counts, words",
    [
        ("codes", [2, 1], "--model gat --cache 2KB"),
        ("types", [1, 1], "--model rgcn"),
        ("times", [1, 1], ""),  # exact inference is in batches
    ],
)
def test_parts_train_as_the_whole_does(kind, counts, words, tmp_path):
    """Exact inference, in which ranks gather unequally often, included."""
    _same_run(tmp_path, KINDS[kind](tmp_path / "g"), counts, words)


def _exact_on_machines(ranks, machines):
    """Compute exact inference on machines of so many ranks with chunks of a few rows, and compare it with a whole store's."""
    local = [(rank, count) for count in machines for rank in range(count)]
    local_rank, local_world = local[ranks.rank]
    ranks = ranks._replace(local_rank=local_rank, local_world=local_world)
    rng = np.random.default_rng(0)
    indptr, indices = _random_graph(rng, 150, 6)
    x = torch.from_numpy(rng.standard_normal((150, 4), np.float32))
    firsts = [0, *np.cumsum(machines)[:-1].tolist()]
    ends = [150 * (m + 1) // len(machines) for m in range(len(machines))]
    for widths, reads in (((4, 8, 3), 1), ((4, 3, 3), 2)):  # messages are rows of x, or computed
        torch.manual_seed(0)
        net = GNN(*widths, conv="sage", num_layers=2)
        exchange = Exchange(ranks)
        rows = SplitFeatures(x, [*zip(ends, firsts)], exchange)
        uneven = UnevenFeatures(rows, exchange)
        here = {"rank": local_rank, "world": local_world}
        here["total"] = uneven.answering(ranks.sum_here)
        chunks = {"chunk": 7, "chunk_edges": 20}
        logits = inference(net, indptr, indices, uneven, **here, **chunks)
        uneven.finish()
        assert torch.equal(logits, inference(net, indptr, indices, x, **chunks))
        assert ranks.sum(rows.rows)[0] == reads * 150 * len(machines)


def test_machines_with_unequal_numbers_of_ranks_infer_exactly(tmp_path):
    _end(_fork(tmp_path / "out", ddp.launch, _exact_on_machines, 3, [1, 2]))


class _Machines(NamedTuple):
    """Ranks of machines that have opened these stores."""

    stores: list

    def machines(self):
        return [range(i, i + 1) for i in range(len(self.stores))]

    def gather(self, part):
        return [store.part for store in self.stores]


INCOMPLETE = """
part 0 of 2, part 0 of 2
part 0 of 3, part 1 of 3
part 0 of 2, part 1 of 2, part 1 of 2
part 0 of 2, part 1 of 3
part 0 of 2, a whole store
a whole store, part 1 of 2
part 1 of 2
"""


def test_parts_that_are_not_all_there_are_refused(tmp_path):
    whole = GraphStore.open(_store(tmp_path / "g"))
    folders = (split(whole.path, n, tmp_path / str(n)) for n in (2, 3))
    two, three = ([*map(GraphStore.open, sorted(folder.iterdir()))] for folder in folders)
    plan = SimpleNamespace(split_features=True, mode="cpu-cpu")
    place = lambda stores, plan=plan: machines_by_part(_Machines(stores), plan, stores[0])  # noqa: E731
    assert place([whole, whole, whole]) == [range(0, 1), range(1, 2), range(2, 3)]
    # whichever machine has which part
    assert place([two[1], two[0]]) == [range(1, 2), range(0, 1)]
    called = {f"part {store.part[0]} of {store.part[1]}": store for store in two + three}
    called["a whole store"] = whole
    for found in INCOMPLETE.strip().splitlines():
        stores = [called[name] for name in found.split(", ")]
        _refuses(f"one part on each of as many machines, which have {found}$", place, stores)
    off = SimpleNamespace(split_features=False, mode="cpu-cpu")
    _refuses("take --split-features and .* have part 0 of 2, part 1 of 2$", place, two, off)
    on_gpu = SimpleNamespace(split_features=True, mode="cuda-cuda")
    _refuses(
        "takes a whole store on each machine, .*: --mode cpu-cuda reads it", place, two, on_gpu
    )


def test_one_process_says_what_a_part_needs(tmp_path, capsys):
    folder = split(_store(tmp_path / "g"), 2)
    words = f"--dataset {folder}/part-1 --gpus 0"
    assert _code(words) == 2
    assert "part-1: parts of a store take --split-features and" in capsys.readouterr().err
    assert _code(f"--dataset {folder} --gpus 0") == 2
    said = f"it holds 2 parts of one: give {folder}/part-0 or another, with"
    assert said in capsys.readouterr().err
    assert _code(words, "--dry-run", "--gpus 2 --free-gpu 80GB") == 0
    printed = capsys.readouterr().out
    assert "features 6.1 KB: part 1 of 2, with features of nodes 100 to 199\n" in printed
    assert "mode           cpu-cuda\n" in printed


def test_all_ranks_say_that_a_part_is_missing(tmp_path):
    folder = split(_store(tmp_path / "g"), 2)
    shutil.rmtree(folder / "part-1")
    words = f"--dataset {folder}/part-MACHINE --gpus 0 --split-features"
    for process in _on_machines(tmp_path, [1, 1], words):
        missing = f"train.py: rank 1: {folder}/part-1 cannot be read: No such file or directory\n"
        assert _end(process, 2) == missing


def test_a_run_moves_between_a_store_and_its_parts(tmp_path):
    whole = _store(tmp_path / "g")
    cut = f"{split(whole, 2)}/part-MACHINE --split-features"
    runs = ("a", whole, 3), ("b", whole, 1), ("b", cut, 2), ("b", whole, 3)
    for name, store, epochs in runs:
        file = f"--checkpoint {tmp_path}/{name}.pt --resume auto"
        words = f"--dataset {store} --epochs {epochs}"
        for process in _on_machines(tmp_path, [1, 1], NODE, words, file):
            _end(process)
    assert _same_weights(tmp_path / "a.pt", tmp_path / "b.pt")
