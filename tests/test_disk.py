"""Tests: store.py at scale: rows that change, many small graphs, kills, damage, full disks."""

import collections
import contextlib
import gzip
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import sampler
import store
import train
from disk import lmdb_rows
from disk.files import StoreError, check_in_use, reading
from disk.graphs import GraphDataset, block_diagonal, build_graphs
from disk.graphs import verify as verify_graphs
from sources import molecules
from sources import prepare as datasets
from sources.prepare import prepare
from store import GraphStore, build_store, verify
from tasks import metrics
from tasks.graph import Regressor
from tests.common import (
    DATA,
    HERE,
    _beside,
    _code,
    _end,
    _events,
    _fork,
    _graph,
    _graphs,
    _in_child,
    _log,
    _mask,
    _molecules,
    _run,
    _run_here,
    _save_npz,
    _small_disk,
    _store,
    _sums,
    _train,
)


def _equal(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def _lmdb(path, rows, block_rows=None):
    """The features of a store of these rows in LMDB."""
    options = {"features": rows, "backend": "lmdb", "block_rows": block_rows}
    return GraphStore.open(_store(path, num_nodes=len(rows), **options)).features


def _many(path, count=10, **options):
    """A data set of `count` small graphs, opened."""
    return GraphDataset.open(build_graphs(path, [_graphs(count)], **options))


def _refuses(cases):
    """(message, function) each: StoreError, of one line."""
    for message, call in cases:
        with pytest.raises(StoreError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@contextlib.contextmanager
def _threads(work, count=4):
    """Threads that call work() again and again beside the body; what one raises is raised at the end."""
    done = threading.Event()

    def again():
        while not done.is_set():
            work()

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(again) for _ in range(count)]
        try:
            yield
        finally:
            done.set()
        [future.result() for future in futures]


# ---------------------------------------------------------------------------------------------------------------------
# rows that change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_store_put_rows(tmp_path, dtype):
    path, rows = tmp_path / "g", torch.randint(0, 200, (200, 5)).to(dtype)
    features, ids = _lmdb(path, rows, 7), torch.randperm(200)[:50]
    rows[ids] = torch.randint(0, 200, (50, 5)).to(dtype)
    features.put_rows(ids, rows[ids])
    features.put_rows(torch.tensor([9, 9]), torch.stack([rows[0], rows[9]]))  # the last one counts
    features.put_rows(torch.tensor([], dtype=torch.int64), rows[:0])
    assert torch.equal(features.gather(torch.arange(200)), rows)
    assert torch.equal(GraphStore.open(path).features.gather(ids), rows[ids]) and verify(path) == []
    nan = torch.tensor([[0, 0, torch.nan, 0, 0]])
    for bad, words in (
        (rows[:2], r"rows is \[2, 5\]"),
        (rows[:1].double(), "float64.* is needed"),
        (rows[:1, :3], "rows"),
        *([(nan.to(dtype), r"rows\[0, 2\] is nan")] if dtype.is_floating_point else []),
    ):
        with pytest.raises(StoreError, match=words):
            features.put_rows(torch.tensor([1]), bad)
    with pytest.raises(IndexError, match="node 200 is out of range"):
        features.put_rows(torch.tensor([200]), rows[:1])
    assert torch.equal(features.gather(torch.arange(200)), rows) and verify(path) == []


def test_store_put_rows_does_not_hide_damage(tmp_path):
    path, x = tmp_path / "g", torch.rand(200, 5)
    _lmdb(path, x, 50)
    data = (path / "features.lmdb").read_bytes()
    at = data.index(x[60].numpy().tobytes())
    (path / "features.lmdb").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    features = GraphStore.open(path).features
    with pytest.raises(StoreError, match="block 1 is missing or damaged"):
        features.put_rows(torch.tensor([0, 70]), x[:2])
    assert torch.equal(features.gather(torch.arange(50)), x[:50])  # nothing of it was done
    assert "features.lmdb" in verify(path)[0]


def test_store_readers_see_all_of_an_update_or_none(tmp_path):
    rows, ids, seen = torch.zeros(400, 64), torch.arange(400), set()
    features, graphs = _lmdb(tmp_path / "g", rows, 9), _many(tmp_path / "many")
    assert features.gather(ids).eq(0).all() and len(graphs) == 10

    def work():
        for number in range(1, 60):
            features.put_rows(ids, torch.full_like(rows, number))
            graphs.append(_graphs(50, first=len(graphs)))

    child = threading.Thread(target=lambda: seen.add(f"exit {_in_child(work)}"))
    child.start()
    while child.is_alive():
        read, count = features.gather(ids), len(graphs)
        assert read.eq(read[0, 0]).all() and count % 50 == 10
        assert graphs.batch([0, count - 1]).y[:, 0].tolist() == [0, count - 1]
        seen.add(read[0, 0].item())
    assert "exit 0" in seen and len(seen) > 5, seen
    assert features.gather(ids).eq(59).all() and len(graphs) == 10 + 59 * 50
    assert verify(tmp_path / "g") == verify_graphs(tmp_path / "many") == []


def _reads_as_nobody(path, ids, stop, results):
    """Gather as a user who may not write until told to stop -> how many gathers were torn, how many states were
    seen."""
    os.setgid(65534)
    os.setuid(65534)
    torch.set_num_threads(1)  # of the others a fork has none
    features, torn, seen = GraphStore.open(path).features, 0, set()
    while not stop.is_set():
        read = features.gather(ids)
        torn += not bool(read.eq(read[0, 0]).all())
        seen.add(read[0, 0].item())
    results.put((torn, len(seen), features.file._locks))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
def test_store_another_users_reader_sees_all_of_an_update_or_none():
    """The reader may not write the lock file, so the writer cannot know what it reads."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path, rows, ids = Path(folder, "g"), torch.zeros(2000, 64), torch.arange(2000)
        features, context = _lmdb(path, rows, 9), multiprocessing.get_context("fork")
        stop, results = context.Event(), context.Queue()
        reader = context.Process(target=_reads_as_nobody, args=(path, ids, stop, results))
        features.put_rows(ids[:1], rows[:1])
        reader.start()
        for number in range(1, 1001):
            features.put_rows(ids, torch.full_like(rows, number))
        stop.set()
        torn, states, locks = results.get(timeout=60)
        reader.join(20)
        assert torn == 0 and states > 20 and not locks


def test_store_lmdb_where_address_space_is_limited(tmp_path):
    """As under ulimit -v: the map is small, and reading and writing go on."""
    x = torch.rand(200, 5)
    path = _store(tmp_path / "g", backend="lmdb", features=x)

    def work():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
        features = GraphStore.open(path).features
        features.put_rows(torch.arange(100), -x[:100])
        assert torch.equal(features.gather(torch.arange(200)), torch.cat([-x[:100], x[100:]]))

    assert _in_child(work) == 0 and verify(path) == []


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_pickles_as_its_path(tmp_path, backend):
    graph = GraphStore.open(_store(tmp_path / "g", backend=backend))
    data = [pickle.dumps(thing) for thing in (graph, graph.features, _many(tmp_path / "many", 4))]
    again, features, many = map(pickle.loads, data)
    ids = torch.arange(9)
    assert max(map(len, data)) < 1000 and len(many) == 4
    assert torch.equal(features.gather(ids), graph.features.gather(ids))
    assert torch.equal(again.indices, graph.indices)


def test_store_a_transaction_keeps_its_state_while_others_write(tmp_path):
    rows, ids = torch.zeros(400, 64), torch.arange(400)
    features = _lmdb(tmp_path / "g", rows, 9)
    code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import torch, store
features = store.GraphStore.open({str(tmp_path / "g")!r}).features
for number in range(1, 8):  # without regard for readers LMDB would use pages again after two of them
    features.put_rows(torch.arange(400), torch.full((400, 64), float(number)))
"""
    with features.file.transaction() as txn:
        subprocess.run([sys.executable, "-c", code], check=True)
        assert all(not features._block(txn, number, check=True).any() for number in range(45))
    assert features.gather(ids).eq(7).all()


def test_store_a_later_state_that_was_damaged_is_not_passed_over_for_the_one_before(tmp_path):
    """LMDB takes the one of two states with the higher number: if that number or the state is damaged, the other
    one."""
    path = build_graphs(tmp_path / "many", [_graphs(5)])
    for more in (3, 4):
        data = (path / "graphs.lmdb").read_bytes()
        pages = 0, struct.unpack_from("<I", data, 40)[0]
        later = max(pages, key=lambda at: struct.unpack_from("<Q", data, at + 144)[0])
        for first, count in ((144, 1), (144, 8), (128, 24), (136, 8)):
            damaged = bytearray(data)
            damaged[later + first : later + first + count] = bytes(count)
            (path / "graphs.lmdb").write_bytes(damaged)
            with pytest.raises(StoreError, match="its header makes no sense|is truncated"):
                GraphDataset.open(path)
        (path / "graphs.lmdb").write_bytes(data)
        GraphDataset.open(path).append(_graphs(more, first=len(GraphDataset.open(path))))


def test_store_a_closed_file_is_opened_anew(tmp_path):
    """Of the same number on the disk, as that of a file which was removed can be; what was closed is still held."""
    pytest.importorskip("lmdb")
    closed, again = (lmdb_rows.LmdbFile(tmp_path / "f.lmdb", sync=False) for _ in range(2))
    closed.append([b"a"])
    closed.close()
    again.append([b"b"])
    assert again.read(again.count) == 2
    again.close()


def test_store_grows_while_threads_read(tmp_path):
    graphs = _many(tmp_path / "many", 50)

    def read():
        assert graphs.batch(range(50)).y[:, 0].tolist() == list(range(50))

    def work():
        with _threads(read):
            for number in range(1, 100):
                graphs.append(_graphs(50, first=50 * number))
        assert len(graphs) == 5000

    assert _in_child(work) == 0 and verify_graphs(tmp_path / "many") == []


def test_store_lmdb_forks_while_its_threads_read(tmp_path):
    x, ids = torch.rand(200, 5), torch.arange(200)
    features = _lmdb(tmp_path / "g", x, 3)

    def work():
        features.put_rows(ids[:5], x[:5])
        assert torch.equal(features.gather(ids), x)

    with _threads(lambda: features.gather(ids)):
        assert [_in_child(work) for _ in range(10)] == [0] * 10
    assert torch.equal(features.gather(ids), x)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_larger_than_memory_is_gathered_on_threads(tmp_path, monkeypatch, dtype, backend):
    x = torch.randn(200, 5).to(dtype)
    path = _store(tmp_path / "g", backend=backend, features=x)
    assert not GraphStore.open(path).features.large
    monkeypatch.setattr(store, "free_host_bytes", lambda: 1000)
    features = GraphStore.open(path).features
    assert features.large and not hasattr(features, "tensor")
    for ids in (torch.randint(200, (1000,)), torch.tensor([7], dtype=torch.int32)):
        for some in (ids, ids[:0]):
            assert torch.equal(features.gather(some), x[some.long()])
    with pytest.raises(IndexError, match="node 200"):
        features.gather(torch.tensor([200]))


def test_store_a_reader_that_is_always_overtaken_says_so(tmp_path, monkeypatch):
    features = _lmdb(tmp_path / "g", torch.rand(200, 5))
    monkeypatch.setattr(lmdb_rows, "PATIENCE", 0.1)
    monkeypatch.setattr(lmdb_rows.LmdbFile, "_overtaken", lambda self, txn: True)
    with pytest.raises(StoreError, match=r"could not be read at one moment in 0.1 s: a writer"):
        features.gather(torch.arange(9))


# ---------------------------------------------------------------------------------------------------------------------
# many small graphs


def test_store_graphs_round_trip(tmp_path):
    path, batches = tmp_path / "many", [_graphs(30), _graphs(12, first=30)]
    graphs = GraphDataset.open(
        build_graphs(path, batches, split={"train": [3, 1], "test": range(30, 42)}, source="a test")
    )
    assert len(graphs) == 42 and len(graphs.split["valid"]) == 0
    assert graphs.split["train"].tolist() == [3, 1]
    kinds = (graphs.node_dim, graphs.edge_dim, graphs.target_dim, graphs.node_dtype)
    assert kinds == (2, 3, 2, torch.uint8)
    assert _equal(graphs.batch(range(30)), batches[0])
    assert _equal(graphs.batch(torch.arange(30, 42)), batches[1])
    graphs.append(_graphs(8, first=42))
    picked = graphs.batch([44, 0, 44])
    assert picked.y[:, 0].tolist() == [44, 0, 44]
    assert picked.graph_ids.bincount().tolist() == picked.y[:, 1].tolist()
    for i, number in enumerate((44, 0, 44)):  # each graph on its own is the same as inside a batch
        alone = graphs.batch([number])
        first, last = (picked.graph_ids == i).nonzero()[[0, -1], 0].tolist()
        a, b = picked.indptr[first].item(), picked.indptr[last + 1].item()
        inside = (
            picked.indptr[first : last + 2] - a,
            picked.indices[a:b] - first,
            picked.x[first : last + 1],
            picked.e[a:b],
        )
        assert _equal(inside, (alone.indptr, alone.indices, alone.x, alone.e))
    for number in (50, -1):
        with pytest.raises(IndexError, match=f"graph {number} is out of range"):
            graphs.batch([0, number])
    assert graphs.batch([]).x.shape == (0, 2) and verify_graphs(path) == []
    assert store.main(["info", str(path)]) == store.main(["verify", str(path)]) == 0
    with pytest.raises(StoreError, match="many small graphs: open it as GraphDataset"):
        GraphStore.open(path)


def test_store_graphs_refuse_what_makes_no_graph(tmp_path):
    good = _graphs(5)
    path = build_graphs(tmp_path / "many", [good])
    graphs, before = GraphDataset.open(path), _sums(path)["graphs.lmdb"]
    _refuses(
        (words, lambda changes=changes: graphs.append(good._replace(**changes)))
        for words, changes in (
            ("float64, not ", {"y": good.y.double()}),
            (r"node rows are \[\d+, 1\]", {"x": good.x[:, :1]}),
            ("do not fit", {"x": good.x[1:]}),
            ("do not fit", {"y": good.y[1:]}),
            ("do not fit", {"e": good.e[1:]}),
            ("an edge between two graphs", {"indices": good.indices.flip(0)}),
            ("an edge between two graphs", {"graph_ids": good.graph_ids.flip(0)}),
            ("target rows.* is nan", {"y": good.y * float("nan")}),
        )
    )
    assert _sums(path)["graphs.lmdb"] == before

    def build(batches, **options):
        return lambda: build_graphs(tmp_path / "b", batches, **options)

    def joined(*args):
        return lambda: block_diagonal(*args)

    _refuses(
        (
            ("batches is empty", build([])),
            ("holds graph 5: graph ids", build([good], split={"train": [5]})),
            ("exists already", lambda: build_graphs(path, [good])),
            ("two dimensions", build([good._replace(y=good.y[:, 0])])),
            (
                "edge 1 goes from node 0 to node 2",
                joined([2, 9], [2, 0], [[0, 0], [1, 2]], [0] * 11, [0] * 2, [0] * 2),
            ),
            ("do not fit", joined([2, 0], [1, 0], [[0], [1]], [0] * 2, [0], [0] * 2)),
            ("do not fit", joined([2, 1], [1, 0], [[0], [1]], [0] * 3, [], [0] * 2)),
        )
    )
    assert [p.name for p in tmp_path.iterdir()] == ["many"]


def test_store_graphs_whose_checksum_fits_and_that_make_none(tmp_path):
    path, many = tmp_path / "many", _many(tmp_path / "many")
    good = many.file.read(lambda txn: [bytes(txn.get(lmdb_rows.key(i))) for i in range(10)])
    # it has edges
    number = next(i for i, value in enumerate(good) if np.frombuffer(value[8:12], "<u4")[0] > 1)
    nodes, edges = np.frombuffer(good[number], "<u4", 2, 4).tolist()
    for at, value in (
        (16 + 4, edges + 1),
        (16 + 4, -1),
        (16 + 4 * nodes, edges - 1),
        (16 + 4 * (nodes + 1), nodes),
        (16 + 4 * (nodes + 1), -1),
    ):
        body = bytearray(good[number])
        struct.pack_into("<i", body, at, value)
        struct.pack_into("<I", body, 12, zlib.crc32(body[16:]))
        with many.file.transaction(write=True) as txn:
            txn.put(lmdb_rows.key(number), bytes(body))
        with pytest.raises(StoreError, match="has lists or edges that leave it"):
            many.batch(range(10))
        assert "has lists or edges that leave it" in verify_graphs(path)[0]
    # nine values, the last of which is number 9
    with many.file.transaction(write=True) as txn:
        txn.delete(lmdb_rows.key(4))
    said = "counts 9 values, and the last is not of that number"
    calls = (lambda: len(many), lambda: many.append(_graphs(1)), lambda: many.batch([4]))
    _refuses((said, call) for call in calls)


# ---------------------------------------------------------------------------------------------------------------------
# kills, damage, full disks


def test_store_killed_at_any_moment_is_the_old_one_or_the_new_one(tmp_path):
    random, args = np.random.default_rng(0), _graph(num_nodes=400)
    rows, path = torch.zeros(400, 5), tmp_path / "rows"
    _lmdb(path, rows, 3)
    many = build_graphs(tmp_path / "many", [_graphs(10)])
    # what one build, append, put_rows takes here and now
    built, left, went_on, seconds = 0, 0, [0, 0, 0], [0.05] * 3

    def hidden():
        return [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]

    def build():
        for number in range(built, built + 1000):
            build_store(tmp_path / f"g{number}", backend=("mmap", "lmdb")[number % 2], **args)

    def append():
        graphs = GraphDataset.open(many)
        while True:
            graphs.append(_graphs(40, first=len(graphs)))

    def put_rows():
        features = GraphStore.open(path).features
        for number in range(1 + int(features.gather(torch.tensor([0]))[0, 0]), 1 << 20):
            features.put_rows(torch.arange(400), torch.full_like(rows, number))

    for kill in range(54):
        kind = kill % 3
        after = random.uniform(0.002, 0.02 + 4 * seconds[kind])
        status = _in_child((build, append, put_rows)[kind], kill_after=after)
        assert os.WTERMSIG(status) == signal.SIGKILL
        if kind == 0:
            left += bool(hidden())
            while (tmp_path / f"g{built}").exists():
                assert verify(tmp_path / f"g{built}") == []
                built, went_on[0] = built + 1, went_on[0] + 1
            began = time.monotonic()
            # the retry, which also clears away what the dead build left
            build_store(tmp_path / f"g{built}", **args)
            built += 1
            assert not hidden()
        elif kind == 1:
            graphs = GraphDataset.open(many)
            count = len(graphs)
            assert count % 40 == 10 and verify_graphs(many) == []
            assert graphs.batch(range(count)).y[:, 0].tolist() == list(range(count))
            went_on[1], began = count, time.monotonic()
            graphs.append(_graphs(40, first=count))
        else:
            features = GraphStore.open(path).features
            read = features.gather(torch.arange(400))
            assert read.eq(read[0, 0]).all() and verify(path) == []
            went_on[2], began = read[0, 0], time.monotonic()
            features.put_rows(torch.arange(400), read + 1)
        seconds[kind] = time.monotonic() - began
    # kills did come in the middle, and the children did work of their own beside the 18 retries of each kind
    assert left and went_on[0] and went_on[1] > 10 + 18 * 40 and went_on[2] > 18, (left, went_on)


def _damaged(good, random):
    """Copies of a file's bytes, each with one thing wrong: a flipped bit, a cut, something else altogether."""
    yield from (b"", good[:-1], good + b"\0", b"x" * len(good), good[: len(good) // 2])
    # all of LMDB's two head pages
    lmdb = good[16:20] == b"\xde\xc0\xef\xbe"
    heads = [at + i for at in (0, 4096) for i in range(0, 160, 2) if lmdb]
    count = 60 if lmdb else 20
    for position in {0, len(good) - 1, *heads, *random.integers(0, len(good), count).tolist()}:
        bad = bytearray(good)
        bad[position] ^= 1 << int(random.integers(8))
        yield bytes(bad)
    for length in random.integers(0, len(good), 10).tolist():
        yield good[:length]


def _reads_damaged_stores(folder):
    def made(name, **options):
        return build_store(folder / name, **_graph(num_nodes=160, num_edges=200), **options)

    mapped, columned = made("mmap"), made("columns", **_events(160, 200))
    sealed, changed = made("lmdb", backend="lmdb"), made("changed", backend="lmdb", block_rows=9)
    for number in range(3):
        rows = torch.full((23, 5), float(number))
        GraphStore.open(changed).features.put_rows(torch.arange(0, 160, 7), rows)
    many = build_graphs(folder / "many", [_graphs(40)], split={"train": range(30), "valid": [31]})
    GraphDataset.open(many).append(_graphs(10, first=40))

    def read(path):
        if path == many:
            graphs = GraphDataset.open(path)
            return [*graphs.batch(range(len(graphs))), *graphs.split.values()]
        graph = GraphStore.open(path)
        return [graph.features.gather(torch.arange(160)), graph.indices.clone()]

    random, cases, unnoticed = np.random.default_rng(0), 0, 0
    for path in (mapped, sealed, changed, many, columned):
        kind, check = (GraphDataset, verify_graphs) if path == many else (GraphStore, verify)
        right = read(path)
        for lock in path.glob("*-lock"):
            lock.unlink()
        for file in sorted(path.iterdir()):
            good = file.read_bytes()
            for bad in _damaged(good, random):
                file.unlink()  # no mapping of the file before sees this one
                file.write_bytes(bad)
                problems = check(path)
                named = all(problem.startswith(f"{file.name}: ") for problem in problems)
                assert named, (file, problems)
                # nothing here holds on to the file before
                assert "already open" not in str(problems)
                try:
                    opened = kind.open(path)
                    none = torch.tensor([], dtype=torch.int64)
                    len(opened) if path == many else opened.features.gather(none)
                except StoreError as error:
                    assert file.name in str(error) or "store format" in str(error), (file, error)
                opened = None  # holds the file open
                if not problems:  # only bytes of an LMDB file that nobody reads
                    assert file.suffix == ".lmdb" and path in (changed, many), file
                    assert _equal(read(path), right), file
                    unnoticed += 1
                cases += 1
            file.unlink()
            with pytest.raises(StoreError, match=file.name):
                kind.open(path)
            file.write_bytes(good)
        assert check(path) == []
    print(f"{cases} cases, {unnoticed} without effect")
    assert cases > 500


@_beside(lambda folder: _fork(folder / "out", _reads_damaged_stores, folder))
def test_store_damage_is_named_and_never_crashes(beside):
    assert "cases" in _end(beside[0])


def test_store_what_training_starts_from_is_checked_once(tmp_path):
    graph = GraphStore.open(_store(tmp_path / "g"))
    graph.check_split()
    for number, message in (
        (200, "split 'train' holds node 200: .* damaged; rebuild the store"),
        (-1, "holds node -1"),
        (graph.split["train"][1], "more than once"),
    ):
        graph.split["train"] = graph.split["train"].clone()
        graph.split["train"][0] = number
        with pytest.raises(StoreError, match=message):
            graph.check_split()
    for label in (-1, -100, 4, 1 << 40):
        graph = GraphStore.open(tmp_path / "g")
        graph.labels = graph.labels.clone()
        graph.labels[graph.split["test"][3]] = label
        said = rf"of split 'test' labels\[3\] is {label}: labels lie in .0, 4"
        with pytest.raises(StoreError, match=said if label > 0 else "which has no label"):
            graph.check_split()
    many = _many(tmp_path / "many", split={"train": [1, 2]})
    many.check_split()
    many.split["train"] = torch.tensor([1, 10])
    with pytest.raises(StoreError, match="split 'train' holds graph 10"):
        many.check_split()


@pytest.mark.parametrize(
    "error, said",
    [
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
        (KeyError("a"), "KeyError 'a'"),
        (EOFError(), "EOFError"),
        (zipfile.BadZipFile("two\nlines"), "two lines"),
        (struct.error("short"), "short"),
        (MemoryError(), "MemoryError"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "'utf-8' codec can't decode byte 0xff"),
        (RuntimeError("x" * 1000), "x" * 300),
    ],
)
def test_what_a_library_raises_at_foreign_bytes_is_one_sentence(error, said):
    with pytest.raises(StoreError, match=f"^a.npz cannot be read: {said}.*; get it again$") as got:
        with reading("a.npz", "; get it again"):
            raise error
    assert len(str(got.value)) < 400 and got.value.__cause__ is error


@pytest.mark.parametrize("error", [StoreError("so"), NameError("typo"), KeyboardInterrupt()])
def test_what_is_no_fault_of_the_bytes_passes_the_boundary(error):
    with pytest.raises(type(error)) as got, reading("a.npz"):
        raise error
    assert got.value is error


def test_store_errors_are_one_line_whatever_they_quote():
    said = "é.csv holds '1\x1b[2J\n\x0b\udcff' \u2028"
    assert str(StoreError(said)) == "é.csv holds '1\\x1b[2J\\n\\x0b\\udcff' \\u2028"


def test_store_is_a_folder_of_regular_files(tmp_path, capsys):
    """Whatever else somebody puts there is not opened: no link is followed, no pipe waited for."""
    path, many = _store(tmp_path / "g", backend="lmdb"), _many(tmp_path / "many", 3).path
    precious = tmp_path / "precious"
    for folder, kind, check in ((path, GraphStore, verify), (many, GraphDataset, verify_graphs)):
        lmdb = next(folder.glob("*.lmdb")).name
        for name in (f"{lmdb}-lock", lmdb, "meta.json", "train.npy", "notes"):
            file, kept = folder / name, tmp_path / "kept"
            for place, what in (
                (lambda: file.symlink_to(precious), "a symbolic link"),
                (lambda: file.symlink_to(tmp_path / "nowhere"), "a symbolic link"),
                (lambda: os.mkfifo(file), "a pipe"),
            ):
                precious.write_bytes(b"precious")
                there = file.exists()
                if there:
                    file.rename(kept)
                place()
                said = f"{name}: it is {what}, and no regular file"
                with pytest.raises(StoreError, match=said):
                    kind.open(folder)
                assert check(folder) == [f"{said}; remove it or rebuild the store"]
                assert store.main(["verify", str(folder)]) == 1
                assert capsys.readouterr().out == f"BAD {check(folder)[0]}\n"
                assert store.main(["info", str(folder)]) == 2
                assert precious.read_bytes() == b"precious" and not (tmp_path / "nowhere").exists()
                file.unlink()
                if there:
                    kept.rename(file)
        assert check(folder) == []


def test_store_a_link_of_a_foreseen_name_is_not_followed(tmp_path):
    path, precious = _store(tmp_path / "g", backend="lmdb"), tmp_path / "precious"
    features = GraphStore.open(path).features
    precious.write_bytes(b"precious")
    (path / ".meta.json.part").symlink_to(precious)  # while the store is open
    (path / "features.lmdb-lock").symlink_to(precious)
    for message in (".meta.json.part: it is a symbolic link", "lmdb-lock: it is a symbolic link"):
        with pytest.raises(StoreError, match=message):
            features.put_rows(torch.arange(9), torch.ones(9, 5))
        assert precious.read_bytes() == b"precious"
        (path / ".meta.json.part").unlink(missing_ok=True)
    (path / "features.lmdb-lock").unlink()
    features.put_rows(torch.arange(9), torch.ones(9, 5))
    assert verify(path) == []


def test_store_a_file_cut_under_its_user_is_a_sentence(tmp_path, monkeypatch, capsys):
    path = _store(tmp_path / "g")
    graph = GraphStore.open(path)
    check_in_use(graph)
    check, epochs = train.check_in_use, []

    def cut(graph):
        if epochs:
            os.truncate(path / "indices.npy", 1000)
        epochs.append(graph.path)
        check(graph)

    monkeypatch.setattr(train, "check_in_use", cut)
    assert _code(f"--dataset {path} --epochs 2 --fanout 2,2 --gpus 0") == 2
    said = capsys.readouterr().err
    assert epochs == [path, path]
    assert re.search("indices.npy was cut to 1000 bytes while it was in use", said)
    shutil.rmtree(path)
    check_in_use(graph)  # what was removed lives on in the maps


def test_store_full_disk_while_it_changes(tmp_path):
    def fill(small):
        with open(small / "rest", "wb", buffering=0) as rest, pytest.raises(OSError):
            while True:
                rest.write(bytes(512))

    def work(small):
        x, everything = torch.randn(4000, 20), torch.arange(4000)
        features, graphs = _lmdb(small / "g", x), _many(small / "many")
        path, many = small / "g", small / "many"
        # LMDB's lock files are there
        assert len(features.gather(torch.arange(9))) + len(graphs) == 19
        fill(small)
        _refuses(
            (
                (
                    "No space left on device",
                    lambda: features.put_rows(everything, torch.ones(4000, 20)),
                ),
                (
                    "graphs.lmdb: No space left on device; what is in it is as it was",
                    lambda: graphs.append(_graphs(1000)),
                ),
            )
        )
        # nor is there room for the lock file of LMDB, where it was removed
        (path / "features.lmdb-lock").unlink()
        os.truncate(small / "rest", 0)
        fill(small)

        def refused():
            with pytest.raises(StoreError, match="No space left on device"):
                GraphStore.open(path).features.put_rows(torch.arange(9), torch.ones(9, 20))

        assert _in_child(refused) == 0
        assert torch.equal(features.gather(everything), x) and len(graphs) == 10
        assert verify(path) == verify_graphs(many) == []
        (small / "rest").unlink()
        features.put_rows(torch.arange(20), -x[:20])
        graphs.append(_graphs(100, first=10))
        assert torch.equal(features.gather(torch.arange(20)), -x[:20]) and len(graphs) == 110
        assert verify(path) == verify_graphs(many) == []

    with _small_disk(tmp_path, "2m") as small:
        # which takes its open files along, so that the disk can be taken down
        assert _in_child(lambda: work(small)) == 0


# ---------------------------------------------------------------------------------------------------------------------
# the regressor, metrics, several labels a node


class _SlowRegressor:
    """The regressor written edge by edge, from the parameters of the fast one."""

    def __init__(self, fast):
        self.fast = fast

    def __call__(self, graph):
        m, outputs = self.fast, []
        for g in range(len(graph.y)):
            members = (graph.graph_ids == g).nonzero()[:, 0].tolist()
            h = {v: self.enter(m.nodes, graph.x[v]) for v in members}
            lists = {v: range(graph.indptr[v], graph.indptr[v + 1]) for v in members}
            edges = [(int(graph.indices[i]), v, i) for v in members for i in lists[v]]
            e = {i: self.enter(m.edges, graph.e[i]) for _, _, i in edges}
            for layer in m.layers:
                chunks = zip(*(layer.nodes(h[v]).chunk(4) for v in members))
                own, message, gate_src, gate_dst = chunks
                at, gates = members[0], {}
                zero = torch.zeros(h[at].numel())
                total, weights = dict.fromkeys(members, zero), dict.fromkeys(members, zero)
                for u, v, i in edges:
                    gates[i] = layer.edges(e[i]) + gate_src[u - at] + gate_dst[v - at]
                    total[v] = total[v] + torch.sigmoid(gates[i]) * message[u - at]
                    weights[v] = weights[v] + torch.sigmoid(gates[i])
                for v in members:
                    mixed = own[v - at] + total[v] / (weights[v] + 1e-6)
                    h[v] = h[v] + torch.nn.functional.silu(layer.node_norm(mixed))
                if layer.edge_norm:
                    e = {i: e[i] + torch.nn.functional.silu(layer.edge_norm(gates[i])) for i in e}
            outputs.append(m.head(sum(h.values()) / len(h)) * m.std + m.mean)
        return torch.stack(outputs)

    def enter(self, module, row):
        if row.dtype == torch.uint8:
            return sum(module.table.weight[256 * i + int(value)] for i, value in enumerate(row))
        return module(row)


def test_regressor_equals_a_reference_edge_by_edge():
    graph, other = _graphs(7), _graphs(4, first=7)
    torch.manual_seed(0)
    dtypes = {"node_dtype": torch.uint8, "edge_dtype": torch.float32}
    ours = Regressor(2, 3, 8, 2, **dtypes, num_layers=3, mean=[1.0, 2.0], std=[3.0, 0.5])
    torch.testing.assert_close(ours(graph), _SlowRegressor(ours)(graph), rtol=1e-4, atol=1e-5)
    gradients = []
    for run in (ours, _SlowRegressor(ours)):
        ours.zero_grad()
        run(graph).square().sum().backward()
        # and every parameter takes part
        gradients.append([p.grad.clone() for p in ours.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert torch.cat([ours(graph), ours(other)]).shape == (11, 2)
    # graphs of one batch do not see each other
    x, e, y = torch.ones(3, 2, dtype=torch.uint8), torch.ones(2, 3), torch.zeros(2, 2)
    joined = block_diagonal([2, 1], [2, 0], [[0, 1], [1, 0]], x, e, y)
    alone = block_diagonal([1], [0], [[], []], x[:1], e[:0], y[:1])
    assert torch.allclose(ours(joined)[1], ours(alone)[0])


def _pairs(score, y):
    """ROC-AUC as the share of pairs in order, ties half."""
    return np.mean([(a > b) + (a == b) / 2 for a in score[y == 1] for b in score[y == 0]])


def test_metrics_are_what_their_definitions_say():
    """Plain Python, ties and classes that do not occur included; macro F1, micro F1, mean ROC-AUC, precision at each
    recall."""
    random, near = np.random.default_rng(0), pytest.approx
    for _ in range(30):
        n, C = int(random.integers(5, 30)), int(random.integers(3, 6))
        logits = torch.from_numpy(random.integers(-3, 4, (n, C))).double()
        y = torch.from_numpy(random.integers(0, C - 1, n))
        several = torch.from_numpy(random.integers(0, 2, (n, C)))
        several[0, :2], several[1, :2] = 1, 0
        found, on = [max(range(C), key=row.__getitem__) for row in logits.tolist()], logits > 0
        plain, right = [], y.tolist()
        for c in set(found) | set(right):
            hit = sum(a == b == c for a, b in zip(found, right))
            plain.append(2 * hit / (found.count(c) + right.count(c)))
        hits = sum(a == b for a, b in zip(found, right))
        assert metrics.score("f1", logits, y) == near(sum(plain) / len(plain))
        assert metrics.score("accuracy", logits, y) == near(hits / n)
        micro = 2 * int((on * several).sum()) / int(on.sum() + several.sum())
        assert metrics.score("f1", logits, several) == near(micro)
        share = (on == several).double().mean().item()
        assert metrics.score("accuracy", logits, several) == near(share)
        columns = [(logits[:, c], several[:, c]) for c in range(C) if 0 < several[:, c].sum() < n]
        auc = [_pairs(*column) for column in columns]
        assert metrics.score("roc_auc", logits, several) == near(np.mean(auc))
        score, target = logits[:, 0], several[:, 0]
        assert metrics.roc_auc(score, target) == near(_pairs(score, target))
        recall = total = 0
        for threshold in sorted(set(score.tolist()), reverse=True):
            taken = score >= threshold
            precision, before = target[taken].double().mean().item(), recall
            recall = target[taken].sum().item() / target.sum().item()
            total += precision * (recall - before)
        assert metrics.average_precision(score, target) == near(total)
    expected = {"mrr": 1.65 / 4, "hits@1": 0.25, "hits@10": 0.75}
    assert metrics.ranking(torch.tensor([1.0, 2, 10, 20])) == near(expected)
    assert metrics.score("f1", logits[:0], y[:0]) is None
    assert math.isnan(metrics.roc_auc(logits[:, 0], torch.ones(n)))


def test_metrics_are_those_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not there")
    random, near = np.random.default_rng(1), pytest.approx
    for n, C in ((200, 4), (50, 2), (1000, 7)):
        logits = torch.from_numpy(random.normal(size=(n, C)).round(1))
        y, several = random.integers(0, C, n), random.integers(0, 2, (n, C))
        p, found = logits.softmax(1).numpy(), logits.argmax(1)
        auc = {"y_score": p[:, 1]} if C == 2 else {"y_score": p, "multi_class": "ovr"}
        expected = {
            "accuracy": theirs.accuracy_score(y, found),
            "f1": theirs.f1_score(y, found, average="macro"),
            "roc_auc": theirs.roc_auc_score(y, **auc),
        }
        ours = {name: metrics.score(name, logits, torch.from_numpy(y)) for name in expected}
        assert ours == near(expected)
        expected = {
            "f1": theirs.f1_score(several, logits > 0, average="micro"),
            "roc_auc": theirs.roc_auc_score(several, logits),
        }
        ours = {name: metrics.score(name, logits, torch.from_numpy(several)) for name in expected}
        assert ours == near(expected)
        ours = metrics.average_precision(logits[:, 0], torch.from_numpy(several[:, 0]))
        assert ours == near(theirs.average_precision_score(several[:, 0], logits[:, 0].numpy()))


def _several_labels(folder, nodes=600, labels=5):
    """A store whose nodes have several labels each, which their features show with noise, as do those of their
    neighbours."""
    rng = np.random.default_rng(0)
    y = (rng.random((nodes, labels)) < 0.3).astype(np.int64)
    x = (y + rng.normal(size=y.shape)).astype(np.float32)
    alike = [rng.choice(np.flatnonzero((y == row).all(1)), 4) for row in y]
    edges = np.stack([np.concatenate(alike), np.repeat(np.arange(nodes), 4)])
    y[-7:] = -1  # nodes without labels
    split = {"train": range(300), "valid": range(300, 400), "test": range(400, nodes - 7)}
    graph = {"edge_index": edges, "features": x, "labels": y, "split": split}
    return build_store(folder / "several", **graph, symmetrize=True), y


def test_train_several_labels_a_node(tmp_path):
    """BCE, micro-F1 by default, mean ROC-AUC on demand; predictions are 0 and 1, or their probabilities; 1 and 2
    processes agree."""
    path, y = _several_labels(tmp_path)
    graph = GraphStore.open(path)
    assert graph.labels.dtype == torch.int8 and graph.labels.tolist() == y.tolist()
    assert graph.num_classes == 5 and not verify(path)
    common = f"--dataset {path} --fanout 5,5 --hidden 16 --lr 0.01 --gpus 0 --precision fp64"
    words, one, two = f"{common} --epochs 8 --early-stop 8", tmp_path / "one", tmp_path / "two"
    _train(words, f"--batch-size 60 --log {one} --checkpoint {one}.pt --predict {tmp_path}/p.npy")
    _train(words, f"--batch-size 30 --procs 2 --log {two}")
    log = _log(one)
    for a, b in zip(log[:-1], _log(two)[:-1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
        assert a["valid_sampled"] == pytest.approx(b["valid_sampled"], rel=1e-9)
    exact, test = log[-1]["exact"]["test"], slice(400, 593)
    assert log[-2]["loss"] < log[0]["loss"] < 0.8 and exact > 0.7
    found, right = torch.from_numpy(np.load(tmp_path / "p.npy")), torch.from_numpy(y[test])
    assert found.dtype == torch.int8 and metrics.f1(found[test], right) == pytest.approx(exact)
    _train(f"--resume {one}.pt --predict {tmp_path}/s.npy --predict-what scores --gpus 0")
    scores = np.load(tmp_path / "s.npy")
    assert scores.dtype == np.float32 and ((scores > 0.5) == found.numpy()).all()
    assert 0 < scores.min() < scores.max() < 1
    words = f"{common} --epochs 2 --batch-size 60 --metric roc_auc --log {tmp_path}/auc"
    _train(words, f"--predict {tmp_path}/l.npy --predict-what logits")
    expected = metrics.score("roc_auc", torch.from_numpy(np.load(tmp_path / "l.npy"))[test], right)
    assert _log(tmp_path / "auc")[-1]["exact"]["test"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["roc_auc", "f1"])
def test_train_by_another_metric(metric, tiny, tmp_path):
    """Validation, early stop and the end go by it; scores are the softmax of logits."""
    words = f"--dataset {tiny} --fanout 3,3 --hidden 16 --batch-size 100 --lr 0.02 --epochs 40"
    words += f" --metric {metric} --early-stop 2 --predict {tmp_path}/s.npy --predict-what scores"
    log, _ = _run_here(tmp_path, words)
    valid = [entry["valid_sampled"] for entry in log[:-1]]
    assert np.argmax(valid) == len(valid) - 3 < 37
    graph, scores = GraphStore.open(tiny), torch.from_numpy(np.load(tmp_path / "s.npy"))
    assert torch.allclose(scores.sum(1), torch.ones(3000), atol=1e-5)
    for part, nodes in graph.split.items():
        expected = metrics.score(metric, scores[nodes].log(), graph.labels[nodes])
        assert log[-1]["exact"][part] == pytest.approx(expected, abs=1e-5)


def test_labels_of_several_a_node_that_cannot_be_meant(tmp_path):
    y, number = np.random.default_rng(0).integers(0, 2, (200, 3)), np.arange(600).reshape(200, 3)

    def build(labels):
        return lambda: _store(tmp_path / "s", labels=labels, num_classes=None)

    bad = r"labels\[5, 1\] is 2: of several labels a node each is 0 or 1"
    unlabelled = r"split 'train' holds node 0, which has no label"
    _save_npz(tmp_path / "d.npz", y=y)
    _refuses(
        (
            (bad, build(np.where(number == 16, 2, y))),
            (r"labels\[0, 2\] is -1: of several", build(np.where(number == 2, -1, y))),
            ("labels: none of the 200 nodes has a label", build(y * 0 - 1)),
            (r"labels has shape \[200, 3, 1\]", build(y[:, :, None])),
            (unlabelled, build(np.where(np.arange(200)[:, None], y, -1))),
            (
                "several labels each need a split of their own",
                lambda: prepare(tmp_path / "d.npz", tmp_path, progress=False),
            ),
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# molecules and crystals

FCC = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])


def test_periodic_neighbours_are_those_of_a_supercell():
    random = np.random.default_rng(0)
    for radius in (0.5, 1.1, 2.7):
        lattice = np.eye(3) * 1.5 + random.uniform(-0.4, 0.4, (3, 3))
        coords = random.uniform(-2, 2, (5, 3))
        edge_index, distance = molecules.periodic_neighbours(coords, lattice, radius)
        found = collections.Counter(zip(*edge_index.tolist(), distance.round(6).tolist()))
        expected, inside = collections.Counter(), coords - np.floor(coords)
        for image in itertools.product(range(-6, 7), repeat=3):
            for u, v in itertools.product(range(5), repeat=2):
                apart = np.linalg.norm((inside[u] + image) @ lattice - inside[v] @ lattice)
                if apart <= radius and (any(image) or u != v):
                    expected[u, v, round(float(apart), 6)] += 1
        assert found == expected, radius
    # copper's twelve nearest
    assert len(molecules.periodic_neighbours(FCC, np.eye(3) * 3.6, 3.0)[1]) == 4 * 12
    # an atom alone: its own images
    assert len(molecules.periodic_neighbours(FCC[:1], np.eye(3) * 3.0, 3.1)[1]) == 6


def _prepared(file, folder):
    """The data set of a file of many small graphs."""
    return GraphDataset.open(prepare(file, folder, progress=False))


def test_datasets_molecules(tmp_path):
    made = _molecules(tmp_path / "m.npz")
    graphs = _prepared(tmp_path / "m.npz", tmp_path / "d")
    assert [len(ids) for ids in graphs.split.values()] == [32, 4, 4]
    assert sorted(torch.cat(list(graphs.split.values())).tolist()) == list(range(40))
    assert verify_graphs(graphs.path) == []
    for g in range(40):
        graph, (a, b) = graphs.batch([g]), made["bond_offsets"][g : g + 2]
        dst = torch.repeat_interleave(graph.indptr.diff()).tolist()
        found = [(u, v, *e) for u, v, e in zip(graph.indices.tolist(), dst, graph.e.tolist())]
        ends, kinds = made["bond_index_local"][:, a:b].tolist(), made["bond_feat"][a:b].tolist()
        bonds = [(u, v, *e) for u, v, e in zip(*ends, kinds)]
        assert sorted(found) == sorted(bonds + [(v, u, *e) for u, v, *e in bonds])
        assert graph.y[0] == len(graph.x)
    split = {"train_idx": range(30), "val_idx": range(30, 33), "test_idx": range(33, 40)}
    _molecules(tmp_path / "s.npz", **split)
    split = _prepared(tmp_path / "s.npz", tmp_path / "d").split
    assert [len(ids) for ids in split.values()] == [30, 3, 7] and split["test"][0] == 33
    _molecules(tmp_path / "bad.npz", count=3, train_idx=[5])
    with pytest.raises(StoreError, match="holds graph 5"):
        prepare(tmp_path / "bad.npz", tmp_path / "d", progress=False)


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_datasets_real_crystals_and_molecules(tmp_path):
    crystals, esol = (_prepared(DATA / f"{name}.npz", tmp_path) for name in ("mlearn", "esol"))
    assert [len(ids) for ids in crystals.split.values()] == [1246, 156, 164]
    assert verify_graphs(crystals.path) == []
    # 107 atoms of nickel with a vacancy, fcc: twelve neighbours within 3.1 angstrom
    cell = crystals.batch([0])
    assert cell.x.unique().tolist() == [28] and cell.y.item() == pytest.approx(-604.26225 / 107)
    assert cell.e.max() <= 4
    assert torch.repeat_interleave(cell.indptr.diff())[cell.e[:, 0] < 3.1].bincount().median() == 12
    assert len(esol) == 1128 and esol.batch(range(1128)).indices.numel() == 2 * 15428


def _crystals(file, **changes):
    """Three cells of copper, of 4, 1 and 2 atoms."""
    entries = dict(
        atom_offsets=[0, 4, 5, 7],
        Z=np.full(7, 29),
        frac_coords=np.concatenate([FCC, FCC[:1], FCC[:2]]),
        lattice=np.stack([np.eye(3) * a for a in (3.6, 2.6, 4.0)]),
        energy=[-16.0, -4.0, -8.0],
        train_idx=[0, 1],
        val_idx=[2],
    )
    np.savez(file, **{name: a for name, a in (entries | changes).items() if a is not None})


def test_datasets_molecules_and_crystals_that_are_none(tmp_path, capsys):
    _crystals(tmp_path / "good.npz", forces=np.ones((7, 3)), test_idx=[])
    good = _prepared(tmp_path / "good.npz", tmp_path)
    assert good.batch([0, 1, 2]).y.flatten().tolist() == [-4, -4, -4]
    assert "not used: forces" in capsys.readouterr().out
    assert prepare(tmp_path / "good.npz", tmp_path, seed=7) == good.path
    assert _prepared(f"{tmp_path}/good.npz:radius=3", tmp_path).batch([0]).x.shape == (4, 1)
    lattice, energy = np.stack([np.eye(3) * 3.6] * 3), np.array([1.0, 2.0, 3.0])

    def cell(value):
        changed = lattice.copy()
        changed[1] = value
        return {"lattice": changed}

    flat, bad = np.eye(3)[[0, 1, 1]] * 3.6, tmp_path / "bad.npz"
    for message, option, entries in (
        (r"lattice\[1\] is \[\[nan", "", cell(np.nan)),
        (r"lattice\[1\] is \[\[inf", "", cell(np.inf)),
        (r"lattice\[1\] is", "", cell(flat)),
        ("cell 1 has 1 atoms, and within radius=4 of it lie about 5", "", cell(np.eye(3) * 0.1)),
        (r"lattice\[1\] is", "", cell(np.eye(3) * 1e-5)),
        ("cell 0 has 4 atoms.*radius=60.*at most 16,384 are searched", ":radius=60", {}),
        ("radius=-1.0 is no distance", ":radius=-1", {}),
        ("radius=nan is no distance", ":radius=nan", {}),
        ("radius=inf", ":radius=inf", {}),
        (r"Z\[0\] is -1", "", {"Z": np.full(7, -1)}),
        (r"Z\[0\] is 300", "", {"Z": np.full(7, 300)}),
        ("Z has dtype float64", "", {"Z": np.full(7, np.nan)}),
        (r"frac_coords\[0, 0\] is nan", "", {"frac_coords": np.full((7, 3), np.nan)}),
        (r"frac_coords is \[6, 3\]: \[7, 3\]", "", {"frac_coords": np.ones((6, 3))}),
        (r"energy\[0, 0\] is nan", "", {"energy": energy * np.nan}),
        (r"energy is \[2\], and there are 3 graphs", "", {"energy": energy[:2]}),
        ("atom_offsets must rise from 0 to the 7", "", {"atom_offsets": [0, 4, 4, 7]}),
        ("atom_offsets must rise", "", {"atom_offsets": [0, 4, 5, 6]}),
        ("no array lattice", "", {"lattice": None}),
        ("row_normalize has no effect", ":row_normalize=1", {}),
        ("edge_attr is not used", "", {"edge_attr": np.ones(3)}),
        (r"'test' holds graph 7", "", {"test_idx": [7]}),
    ):
        _crystals(bad, **entries)
        call = lambda: prepare(f"{bad}{option}", tmp_path, progress=False)  # noqa: E731
        _refuses([(message, call)])
    made = _molecules(tmp_path / "m.npz", count=5)
    ends, nodes, bonds = made["bond_index_local"], made["node_offsets"], made["bond_offsets"]
    for message, changes in (
        (r"targets is \[3\], and there are 5 graphs", {"targets": np.ones(3)}),
        ("no array targets or labels", {"targets": None}),
        ("targets holds <U1", {"targets": np.array(list("abcde"))}),
        (r"targets\[4, 0\] is inf", {"targets": np.array([0, 1, 2, 3, 1e300])}),
        ("bond_index_local has dtype float64", {"bond_index_local": ends * 1.5}),
        ("goes from node .* its graph has", {"bond_index_local": ends.astype(int) + 99}),
        ("node_offsets must rise from 0", {"node_offsets": np.array(nodes)[:-1]}),
        ("node_offsets has dtype float64", {"node_offsets": np.array(nodes, float)}),
        (r"bond_offsets is \[5\]: \[6\] is needed", {"bond_offsets": np.delete(bonds, 2)}),
        (
            r"bond_index_local is \[2, \d+\]: \[2, \d+\] is needed",
            {"bond_feat": made["bond_feat"][:-1]},
        ),
        ("atom_feat holds <U1", {"atom_feat": np.full(made["atom_feat"].shape, "C")}),
        ("train_mask is", {"train_mask": np.ones(4, bool)}),
        ("node 3|graph 3 is in split", {"train_idx": [3], "val_idx": [3]}),
    ):
        np.savez(bad, **{name: a for name, a in (made | changes).items() if a is not None})
        _refuses([(message, lambda: prepare(bad, tmp_path, progress=False))])
    mask = np.arange(5) < 3
    np.savez(tmp_path / "masks.npz", **made, train_mask=mask.astype(np.uint8), val_mask=~mask)
    split = _prepared(tmp_path / "masks.npz", tmp_path).split
    assert [ids.tolist() for ids in split.values()] == [[0, 1, 2], [3, 4], []]


# ---------------------------------------------------------------------------------------------------------------------
# building from files and objects


def _same(path, reference):
    """Whether a store has the same bytes as another, but for meta.json."""
    return {**_sums(path), "meta.json": 0} == {**_sums(reference), "meta.json": 0}


SPLIT = {"train": np.arange(50), "valid": np.arange(50, 60), "test": np.arange(60, 90)}


def test_store_build_from_csv_files(tmp_path, capsys):
    args, csv = _graph(), {}
    for name, array, form in (
        ("edges", args["edge_index"].T, "%d"),
        ("x", args["features"], "%.9g"),
        ("y", args["labels"], "%d"),
        ("train", args["split"]["train"], "%d"),
        ("test", args["split"]["test"], "%d"),
    ):
        csv[name] = tmp_path / (f"{name}.csv.gz" if name in "edges x" else f"{name}.csv")
        header = "source,destination" if name == "edges" else ""
        np.savetxt(csv[name], array, form, delimiter=",", header=header, comments="")
    flags = {"--features": "x", "--labels": "y", "--train": "train", "--test": "test"}
    words = [word for flag, name in flags.items() for word in (flag, csv[name])]
    options = dict(symmetrize=True, drop_duplicates=True, drop_self_loops=True)
    on = [f"--{name.replace('_', '-')}" for name in options]
    built = _run("store.py", "build", csv["edges"], tmp_path / "g", *words, *on)
    assert built.returncode == 0 and built.stderr == ""
    assert "drop_duplicates, drop_self_loops, symmetrize" in built.stdout
    split = {n: args["split"][n] for n in ("train", "test")}
    assert _same(tmp_path / "g", _store(tmp_path / "same", split=split, **options))

    def folders():
        return sorted(p.name for p in tmp_path.iterdir() if p.is_dir())

    assert folders() == ["g", "same"]
    csv["x"].write_bytes(gzip.compress(b"1,2\n3\n"))
    edges, none = [csv["edges"], tmp_path / "h"], ["--features", tmp_path / "none.csv"]
    for bad, complaint in (
        ([tmp_path / "e.doc", "h"], "cannot be read: give an .npz"),
        (edges, "features are needed"),
        ([*edges, *words], r"x.csv.gz, line 2: Expected 2 columns, got 1: 3"),
        ([*edges, *none, *words[2:]], "none.csv cannot be read: No such"),
        ([csv["x"], tmp_path / "g", *words], "g exists already"),
    ):
        assert store.main(["build", *map(str, bad)]) == 2
        refused = capsys.readouterr().err
        assert re.search(complaint, refused) and refused.count("\n") == 1, refused
    assert folders() == ["g", "same"]


def test_store_columns_from_every_source(tmp_path, capsys, monkeypatch):
    """The same store from arrays, .npz, DGL, PyG and tables, whose columns are named, numbered or files of their
    own."""
    monkeypatch.chdir(tmp_path)
    rng, args = np.random.default_rng(1), {**_graph(), "split": SPLIT, "num_classes": None}
    edges, (src, dst) = args["edge_index"], args["edge_index"]
    w, t = rng.integers(1, 9, 3000) / 8, rng.integers(0, 50, 3000)
    e, when = rng.integers(0, 9, (3000, 2)).astype(np.float32), np.arange(200)
    columns = {"edge_weight": w, "edge_time": t, "edge_features": e, "node_time": when}
    reference = build_store("reference", **args, symmetrize=True, **columns)
    own = {"x": args["features"], "y": args["labels"], "edge_index": edges}
    parts = {f"{name}_idx": ids for name, ids in SPLIT.items()}
    other = {"edge_weight": w[:, None], "time": t.astype(float), "edge_attr": e, "node_time": when}
    np.savez("a.npz", **own, **parts, **other)
    np.savez("b.npz", **own, **parts, **columns)
    x, y, w_, t_, e_, when_ = map(torch.from_numpy, (own["x"], own["y"], w, t, e, when))
    graph = sampler.import_dgl().graph(tuple(torch.from_numpy(edges)), num_nodes=200)
    graph.ndata.update({"feat": x, "label": y, "time": when_})
    graph.edata.update({"weight": w_, "time": t_, "feat": e_})
    data = dict(edge_index=torch.from_numpy(edges), x=x, y=y, time=t_, edge_weight=w_)
    data = types.SimpleNamespace(**data, edge_attr=e_, node_time=when_)
    for number, source in enumerate(("a.npz", "b.npz", graph, data)):
        options = {} if isinstance(source, str) else {"split": SPLIT}
        built = datasets.build(source, f"s{number}", symmetrize=True, **options)
        assert _same(built, reference), number
    said = "a.npz: it has edge_weight, edge_time (called time), edge_features (called edge_attr), node_time"
    assert said in capsys.readouterr().out
    for name, array, form in (
        ("x", own["x"], "%.9g"),
        ("y", own["y"], "%d"),
        ("w", w, "%g"),
        ("e", e, "%g"),
        ("when", np.stack([when, when], 1)[::-1], "%d"),
        ("plain", np.stack([src, dst, t], 1), "%d"),
        ("named", np.column_stack([e[:, 0], src, dst, t, w, e[:, 1]]), "%g"),
        *((name, ids, "%d") for name, ids in SPLIT.items()),
    ):
        header = "a,src,dst,t,w,b" if name == "named" else ""
        np.savetxt(f"{name}.csv", array, form, delimiter=",", header=header, comments="")
    words = "--features x.csv --labels y.csv --symmetrize --node-times when.csv".split()
    words += [word for name in SPLIT for word in (f"--{name}", f"{name}.csv")]
    for table, flags in (
        ("plain", "--times 3 --weights w.csv --edge-features e.csv"),
        ("named", "--times t --weights 5 --edge-features a,b"),
    ):
        assert store.main(["build", f"{table}.csv", f"from-{table}", *words, *flags.split()]) == 0
        assert _same(f"from-{table}", reference), table
    for flags, complaint in (
        ("--weights 4", "has no column '4'"),
        ("--weights e.csv --times 3", "e.csv has 2 columns: one is"),
        ("--times 3 --weights y.csv", "edge_weight has 200 rows, one for each of the 3000"),
        ("--times 3 --node-times y.csv", ""),
    ):
        command = ["build", "plain.csv", f"bad{len(complaint)}", *words, *flags.split()]
        assert store.main(command) == (2 if complaint else 0)
        assert re.search(complaint, capsys.readouterr().err)
    assert store.main(["build", "a.npz", "bad", "--weights", "3"]) == 2
    assert "are for tables" in capsys.readouterr().err


def test_store_values_of_an_adjacency_matrix_are_weights(tmp_path, capsys):
    args = _graph(num_edges=500)
    edges = np.unique(args["edge_index"], axis=1)
    order = np.lexsort(edges)  # by destination, then source
    (src, dst), values = torch.from_numpy(edges[:, order]), torch.arange(1.0, edges.shape[1] + 1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dst.bincount(minlength=200).cumsum(0)])
    matrix = types.SimpleNamespace(csr=lambda: (indptr, src, values))
    data = types.SimpleNamespace(adj_t=matrix, x=args["features"], y=args["labels"])
    graph = GraphStore.open(datasets.build(data, tmp_path / "g"))
    assert "it has edge_weight\n" in capsys.readouterr().out
    assert graph.indices.tolist() == src.tolist() and torch.equal(graph.edge_weight, values)


def test_store_build_names_a_path_that_cannot_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _save_npz("own.npz", train_idx=[1, 2])
    (tmp_path / "e.csv").write_text("0,1\n")
    (tmp_path / "folder").mkdir()
    for path, complaint in (
        (".", r"\. exists already"),
        ("..", r"\.\. exists already"),
        ("nowhere/..", "has no name of its own"),
        ("x" * 256, "is a name of 256 bytes"),
        ("own.npz/s", "cannot build own.npz/s.*(Not a directory|File exists)"),
    ):
        for words in (f"own.npz {path}", f"e.csv {path} --features e.csv --labels e.csv"):
            assert store.main(["build", *words.split()]) == 2
            said = capsys.readouterr().err
            assert re.search(complaint, said) and said.count("\n") == 1, (path, said)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["e.csv", "folder", "own.npz"]
    long = "y" * 250
    assert store.main(["build", "own.npz", long]) == 0
    shutil.copy("own.npz", long[:200] + ".npz")
    assert len(prepare(long[:200] + ".npz", "data", progress=False).name) < 120
    Path("data.pt").write_bytes(b"PK")
    _refuses(
        (complaint, lambda name=name: prepare(name, "data"))
        for name, complaint in (
            ("e.csv", "e.csv is no .npz file.*features and labels.*store.py build e.csv my_store"),
            ("z" * 5000, "is unknown"),
            ("data.pt", "data.pt is neither an .npz file nor a table .*prepare.build"),
            ("folder", "folder is a folder without meta.json, so no store"),
            ("none.csv", "'none.csv' is unknown"),
            ("own.npz:nonsense", "no parameter 'nonsense': write NAME=VALUE with row_normalize"),
            ("own.npz:split=1,split=2", "split is given twice"),
            ("own.npz:split=1.5e0", "split='1.5e0' is no int"),
            ("cora:x=1", "no parameter 'x=1': it takes none"),
        )
    )


@pytest.mark.parametrize(
    "labels, said",
    [
        (np.arange(200) % 4, None),
        (np.arange(200) % 4 + 1, "1 of 5 classes have no node: 0"),
        (np.arange(200) % 2 * 9, "8 of 10 classes have no node: 1, 2, 3, ..."),
    ],
)
def test_npz_says_which_classes_have_no_node(tmp_path, capsys, labels, said):
    """Labels that are counted from 1, or a class that was dropped, make an output that nothing can be."""
    _save_npz(tmp_path / "a.npz", y=labels)
    prepare(str(tmp_path / "a.npz"), tmp_path, progress=False)
    output = capsys.readouterr().out
    assert f"a.npz: {said}\n" in output if said else "no node" not in output, output


def test_store_flags_without_effect_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _save_npz("own.npz", train_idx=[1, 2])
    _save_npz("drawn.npz", y=np.arange(200) % 2)
    _molecules("m.npz")
    (tmp_path / "e.csv").write_text("0,1\n")
    many = "has no effect: it holds many small graphs"
    for words, complaint in (
        (
            "build own.npz s --features NOSUCH.csv",
            "own.npz: it holds features, labels and split itself: features",
        ),
        ("build own.npz s --train NOSUCH.csv", "train_idx beside it has no effect"),
        ("build own.npz s --seed 3", "seed 3 has no effect: it has a split"),
        ("build m.npz s --symmetrize", f"symmetrize {many}"),
        ("build m.npz:radius=3 s", f"radius {many}"),
        ("build m.npz:row_normalize=0 s", f"row_normalize {many}"),
        ("build e.csv s --features NOSUCH.csv --labels e.csv", "NOSUCH.csv"),
        ("build NOSUCH.csv s", "NOSUCH.csv holds edges alone: features are needed"),
        ("build NOSUCH.npz s", "cannot read NOSUCH.npz"),
        ("info s --features x", "unrecognized arguments: --features x"),
        ("verify s --gpus 1", "unrecognized arguments: --gpus 1"),
        ("build own.npz s --gpus 1", "unrecognized arguments: --gpus 1"),
    ):
        try:
            code = store.main(words.split())
        except SystemExit as stop:
            code = stop.code
        assert code == 2 and re.search(complaint, capsys.readouterr().err), words
    assert store.main(["build", "drawn.npz", "s", "--seed", "3"]) == 0
    assert GraphStore.open("s").meta["source"]["seed"] == 3
    data = dict(edge_index=torch.tensor([[0], [1]]), x=torch.ones(3, 1), y=torch.arange(3))
    data = types.SimpleNamespace(**data, train_mask=torch.ones(3).bool())
    with pytest.raises(StoreError, match="SimpleNamespace: seed 1 has no effect"):
        datasets.build(data, "t", seed=1)


def test_store_and_datasets_into_a_closed_pipe(tmp_path, monkeypatch):
    path = str(_store(tmp_path / "g"))
    runs = (store.main, ["info", path]), (store.main, ["verify", path]), (datasets.main, [path])
    for run, words in runs:
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as nobody, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", nobody)
            assert run(words) == 141


def test_store_build_from_dgl_and_pyg_refuses_what_is_not_used(tmp_path, capsys):
    args = _graph()
    edges, x, y = (torch.from_numpy(args[name]) for name in ("edge_index", "features", "labels"))
    mask = torch.from_numpy(_mask(np.arange(50)))
    masks = {"train_mask": mask, "test_mask": ~mask}
    dgl = sampler.import_dgl()

    def dgls(formats=None, **edata):
        graph = dgl.graph(tuple(edges), num_nodes=200)
        graph.ndata.update({"feat": x, "label": y, **masks})
        graph.edata.update(edata)
        return graph.formats(formats) if formats else graph

    def pygs(**changes):  # as PyG's Data
        arrays = {"edge_index": edges, "x": x, "y": y, **masks, **changes}
        return types.SimpleNamespace(**{n: a for n, a in arrays.items() if a is not ...})

    order = torch.from_numpy(np.lexsort((edges[0], edges[1])))
    counts = edges[1].bincount(minlength=200)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ones, sources = torch.ones(3000), edges[0][order]
    # as torch_sparse's SparseTensor
    plain = types.SimpleNamespace(csr=lambda: (indptr, sources, None))
    weighted = types.SimpleNamespace(csr=lambda: (indptr, sources, 2 * ones))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        csr = torch.sparse_csr_tensor(indptr, sources, ones, (200, 200))
    splits = torch.stack([mask, ~mask], 1)
    halves = {"train": np.arange(50), "test": np.arange(50, 200)}
    reference = _store(tmp_path / "reference", num_classes=None, split=halves)
    given = {"features": args["features"], "labels": args["labels"]}
    for number, (source, options) in enumerate(
        (
            (dgls(), {}),
            (dgls(["csc"]), {}),
            (dgls(["coo"]), {}),
            (dgls(["csr"]), {}),
            (dgls(rank=ones), {"ignore": ["edata.rank"]}),
            (pygs(), {}),
            (pygs(edge_index=..., adj_t=plain), {}),
            (pygs(edge_index=None, adj_t=csr), {}),
            (pygs(y=y.double()[:, None], train_mask=mask.to(torch.uint8)), {}),
            (pygs(edge_attr=ones), {"ignore": ["edge_attr"]}),
            (pygs(train_mask=splits, test_mask=splits.flip(1)), {"split": 0}),
            (pygs(train_mask=splits.flip(1), test_mask=splits), {"split": 1}),
            (pygs(x=None, y=None), given),
            (pygs(train_mask=splits), {"split": {"train": mask, "test": ~mask}}),
            (pygs(name="a graph", num_nodes=200, pos=x), {}),
        )
    ):
        assert _same(datasets.build(source, tmp_path / str(number), **options), reference), number
    assert "not used: name, pos" in capsys.readouterr().out
    few = {"x": x[:150], "y": y[:150], "train_mask": mask[:150]}
    kinds = dgl.heterograph({("user", "likes", "item"): ([0], [1])})
    _refuses(
        (message, lambda a=source, options=options: datasets.build(a, tmp_path / "bad", **options))
        for message, source, options in (
            ("edata.rank is not used: what edges carry is called edge_weight", dgls(rank=ones), {}),
            (
                "edge_attr has 9 rows, one for each of the 3000",
                pygs(edge_attr=torch.ones(9, 4)),
                {},
            ),
            (
                "adj_t has values other than 1, beside edge_weight",
                pygs(edge_index=None, adj_t=weighted, edge_weight=ones),
                {},
            ),
            (
                "num_nodes is 200, and there are 150 labels",
                pygs(edge_index=None, adj_t=plain, **few),
                {},
            ),
            ("SimpleNamespace has no labels: give them as labels=", pygs(y=None), {}),
            ("SimpleNamespace has no features", pygs(x=None), {}),
            ("2 splits count from 0", pygs(train_mask=splits), {"split": 2}),
            ("x cannot be read: can.t convert Sparse", pygs(x=x.to_sparse()), {}),
            ("labels are whole numbers", pygs(y=[0.5] * 200), {}),
            ("a graph cannot be read from a dict", {}, {}),
            ("cannot be read from a DataFrame", type("DataFrame", (), {})(), {}),
            ("2 kinds of nodes and 1 of edges", kinds, {}),
        )
    )
    assert not (tmp_path / "bad").exists()
