"""Tests: store.py at scale: rows that change, many small graphs, damage, full disks."""

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import struct
import tempfile
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

import store
from disk import files, lmdb_rows
from disk.convert import Rows
from disk.files import StoreError, reading
from extras.graph_store import GraphDataset, block_diagonal, build_graphs
from extras.graph_store import verify as verify_graphs
from sources import cli
from store import GraphStore, build_store, verify
from tests.common import _end, _fork, _graph, _in_child, _store, _threads
from tests.stores import _cases, _graphs, _refuses, _small_disk, _sums


def _lmdb(path, rows, block_rows=None):
    options = {"features": rows, "backend": "lmdb", "block_rows": block_rows}
    return GraphStore.open(_store(path, num_nodes=len(rows), **options)).features


def _many(path, count=10, **options):
    return GraphDataset.open(build_graphs(path, [_graphs(count)], **options))


# rows that change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_store_put_rows(tmp_path, dtype):
    path, rows = tmp_path / "g", torch.randint(0, 200, (200, 5)).to(dtype)
    features, ids = _lmdb(path, rows, 7), torch.randperm(200)[:50]
    rows[ids] = torch.randint(0, 200, (50, 5)).to(dtype)
    put = features.put_rows
    put(ids, rows[ids])
    put(torch.tensor([9, 9]), torch.stack([rows[0], rows[9]]))  # the last one counts
    put(torch.tensor([], dtype=torch.int64), rows[:0])
    assert torch.equal(GraphStore.open(path).features[:], rows) and verify(path) == []
    _refuses(r"rows is \[2, 5\]", put, torch.tensor([1]), rows[:2])
    _refuses("float64.* is needed", put, torch.tensor([1]), rows[:1].double())
    if dtype.is_floating_point:
        nan = torch.where(torch.arange(5) == 2, torch.nan, rows[:1])
        _refuses(r"rows\[0, 2\] is nan", put, torch.tensor([1]), nan)
    _refuses("node 200 is out of range", put, torch.tensor([200]), rows[:1], error=IndexError)
    assert torch.equal(features[:], rows) and verify(path) == []


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_codes_are_the_nearest_of_256_values_of_their_column(tmp_path, backend, monkeypatch):
    """Of rows in memory and of rows that come once, also larger than memory and pickled; `put_rows` keeps to the range."""
    x = torch.randn(200, 5) * torch.tensor([1e-3, 1, 1e6, 0, 1]) + torch.tensor([0, 0, 1e6, 7, 0])
    x[:, 4] = (x[:, 4] > 0).float()  # 0 is 0
    graph = {**_graph(), "backend": backend, "feature_dtype": "int8", "block_rows": 7}
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.float64)):
        given = x.to(dtype)
        if name == "b":
            given = Rows((200, 5), dtype, iter(given.split(64)))
        path = build_store(tmp_path / name, **{**graph, "features": given})
        features = GraphStore.open(path).features
        true = x.to(dtype).double()
        step = (true.amax(0) - true.amin(0)) / 255
        found = features[:].double()
        assert features.dtype == torch.float32 and ((found - true).abs() <= 0.501 * step).all()
        assert torch.equal(found[:, 3:].round(), true[:, 3:])
        assert (found[true[:, 4] == 0, 4] == 0).all()
        assert verify(path) == [] and not list(path.glob("tmp*"))
    assert "5 x int8, codes of float32" in store.info(path)
    # code of version 3 would read integers
    assert GraphStore.open(path).meta["format_version"] == 4
    again = pickle.loads(pickle.dumps(features))
    monkeypatch.setattr(files, "free_host_bytes", lambda: 900)
    large = GraphStore.open(path).features
    out, ids = torch.empty(3, 5), torch.tensor([5, 199, 5])
    assert large.stored.large and large.gather(ids, out=out) is out
    for rows in (again.gather(ids), out):
        assert torch.equal(rows.double(), found[ids])
    if backend == "mmap":
        return
    features.put_rows(ids, x[:3])
    assert (features[ids[1:]] - x[1:3]).abs().le(0.501 * step).all() and verify(path) == []
    wide, other = x[:3].clone(), x[:3].clone()
    wide[1, 1] += 100
    other[0, 3] += 0.01
    for words, rows in (
        (r"rows\[1, 1\] is 1?.*: its column was built for -.* to ", wide),
        (r"rows\[0, 3\] is 7.01.*: its column was built for 7 to 7$", other),
    ):
        _refuses(words, features.put_rows, ids, rows)


def test_store_put_rows_does_not_hide_damage(tmp_path):
    path, x = tmp_path / "g", torch.rand(200, 5)
    _lmdb(path, x, 50)
    data = (path / "features.lmdb").read_bytes()
    at = data.index(x[60].numpy().tobytes())
    (path / "features.lmdb").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    features = GraphStore.open(path).features
    _refuses("block 1 is missing or damaged", features.put_rows, torch.tensor([0, 70]), x[:2])
    assert torch.equal(features.gather(torch.arange(50)), x[:50])  # nothing of it was done
    assert "features.lmdb" in verify(path)[0]


def test_store_readers_see_all_of_what_is_appended_or_none(tmp_path):
    graphs, counts = _many(tmp_path / "many"), set()

    def work():
        for _ in range(60):
            graphs.append(_graphs(50, first=len(graphs)))

    child = threading.Thread(target=lambda: counts.add(_in_child(work)))
    child.start()
    while child.is_alive():
        counts.add(count := len(graphs))
        assert graphs.batch([0, count - 1]).y[:, 0].tolist() == [0, count - 1]
    # the exit code of the child and whole numbers of appended batches
    assert len(counts) > 5 and counts <= {0, *range(10, 10 + 61 * 50, 50)}
    assert len(graphs) == 10 + 60 * 50 and verify_graphs(graphs.path) == []


def _reads_as_nobody(path, ids, stop, results):
    """Gather as a user without write permission until told to stop -> (torn gathers, states seen, locks)."""
    os.setgid(65534)
    os.setuid(65534)
    torch.set_num_threads(1)  # of the others a fork has none
    features, torn, seen = GraphStore.open(path).features, 0, set()
    while not stop.is_set():
        read = features.gather(ids)
        torn += not bool(read.eq(read[0, 0]).all())
        seen.add(read[0, 0].item())
    results.put((torn, len(seen), features.file._env.flags()["lock"]))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
def test_store_another_users_reader_sees_all_of_an_update_or_none():
    """The reader cannot write the lock file, so the writer does not know which state it reads."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path, rows, ids = Path(folder, "g"), torch.zeros(2000, 64), torch.arange(2000)
        features, context = _lmdb(path, rows, 9), multiprocessing.get_context("fork")
        stop, results = context.Event(), context.Queue()
        reader = context.Process(target=_reads_as_nobody, args=(path, ids, stop, results))
        features.put_rows(ids[:1], rows[:1])
        reader.start()
        for number in range(1, 401):
            features.put_rows(ids, torch.full_like(rows, number))
        stop.set()
        torn, states, locks = results.get(timeout=60)
        reader.join(20)
        assert torn == 0 and states > 20 and not locks


def test_store_lmdb_where_address_space_is_limited(tmp_path):
    """As under ulimit -v: the map stays small, and reads and writes work."""
    x = torch.rand(200, 5)
    path = _store(tmp_path / "g", backend="lmdb", features=x)

    def work():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
        features = GraphStore.open(path).features
        features.put_rows(torch.arange(100), -x[:100])
        assert torch.equal(features.gather(torch.arange(200)), torch.cat([-x[:100], x[100:]]))

    assert _in_child(work) == 0 and verify(path) == []


def _puts_seven(path):
    features = GraphStore.open(path).features
    for number in range(1, 8):  # without regard for readers LMDB would use pages again after two
        features.put_rows(torch.arange(400), torch.full((400, 64), float(number)))


def test_store_a_transaction_keeps_its_state_while_others_write(tmp_path):
    features = _lmdb(tmp_path / "g", torch.zeros(400, 64), 9)
    with features.file.transaction() as txn:
        # a second object on the file must not give up the lock that tells writers of this process's readers
        GraphStore.open(tmp_path / "g").features.gather(torch.arange(3))
        _end(_fork(tmp_path / "out", _puts_seven, tmp_path / "g"))
        assert all(not features._block(txn, number, check=True).any() for number in range(45))
    assert features.gather(torch.arange(400)).eq(7).all()


def test_store_a_later_state_that_was_damaged_is_not_passed_over_for_the_one_before(tmp_path):
    """LMDB opens the state with the higher number, or the other one if that state or its number is damaged."""
    path = build_graphs(tmp_path / "many", [_graphs(5)])
    for more in (3, 4):
        data = (path / "graphs.lmdb").read_bytes()
        pages = 0, struct.unpack_from("<I", data, 40)[0]
        later = max(pages, key=lambda at: struct.unpack_from("<Q", data, at + 144)[0])
        for first, count in ((144, 1), (144, 8), (128, 24), (136, 8)):
            damaged = bytearray(data)
            damaged[later + first : later + first + count] = bytes(count)
            (path / "graphs.lmdb").write_bytes(damaged)
            _refuses("its header makes no sense|is truncated", GraphDataset.open, path)
        (path / "graphs.lmdb").write_bytes(data)
        GraphDataset.open(path).append(_graphs(more, first=len(GraphDataset.open(path))))


def test_store_lmdb_forks_while_its_threads_read(tmp_path):
    x, ids = torch.rand(200, 5), torch.arange(200)
    features = _lmdb(tmp_path / "g", x, 3)
    second = GraphStore.open(tmp_path / "g").features

    def read():
        assert torch.equal(features.gather(ids), x) and torch.equal(second.gather(ids), x)

    def work():
        features.put_rows(ids[:5], x[:5])
        read()
        assert torch.equal(GraphStore.open(tmp_path / "g").features.gather(ids), x)

    with _threads(read):
        assert [_in_child(work) for _ in range(10)] == [0] * 10
    read()


def test_store_a_reader_that_is_always_overtaken_says_so(tmp_path, monkeypatch):
    features = _lmdb(tmp_path / "g", torch.rand(200, 5))
    monkeypatch.setattr(lmdb_rows, "PATIENCE", 0.1)
    monkeypatch.setattr(lmdb_rows.LmdbFile, "_overtaken", lambda self, txn: True)
    _refuses("no consistent snapshot in 0.1 s: a writer", features.gather, torch.arange(9))


# many small graphs


def test_store_graphs_round_trip(tmp_path):
    path, batches = tmp_path / "many", [_graphs(30), _graphs(12, first=30)]
    split = {"train": [3, 1], "test": range(30, 42)}
    graphs = GraphDataset.open(build_graphs(path, batches, split=split, source="a test"))
    assert len(graphs) == 42 and len(graphs.split["valid"]) == 0
    assert graphs.split["train"].tolist() == [3, 1]
    kinds = (graphs.node_dim, graphs.edge_dim, graphs.target_dim, graphs.node_dtype)
    assert kinds == (2, 3, 2, torch.uint8)
    assert all(map(torch.equal, graphs.batch(range(30)), batches[0]))
    assert all(map(torch.equal, graphs.batch(torch.arange(30, 42)), batches[1]))
    graphs.append(_graphs(8, first=42))
    picked = graphs.batch([44, 0, 44])
    assert picked.y[:, 0].tolist() == [44, 0, 44]
    assert picked.graph_ids.bincount().tolist() == picked.y[:, 1].tolist()
    alone = [graphs.batch([number]) for number in (44, 0, 44)]
    first = [0, *itertools.accumulate(len(graph.x) for graph in alone)]
    joined = [(g.x, g.e, g.indices + start, g.indptr.diff()) for g, start in zip(alone, first)]
    found = picked.x, picked.e, picked.indices, picked.indptr.diff()
    assert all(map(torch.equal, found, map(torch.cat, zip(*joined))))
    for number in (50, -1):
        _refuses(f"graph {number} is out of range", graphs.batch, [0, number], error=IndexError)
    _refuses("ids has dtype bool: integers are", graphs.batch, torch.ones(len(graphs)) > 0)
    assert graphs.batch([]).x.shape == (0, 2) and verify_graphs(path) == []
    graphs.split = {"train": torch.arange(3)}
    pickled = pickle.dumps(graphs)  # as its path and split
    assert len(pickle.loads(pickled)) == 50 and len(pickled) < 1000
    assert pickle.loads(pickled).split["train"].tolist() == [0, 1, 2]
    assert cli.main(["info", str(path)]) == cli.main(["verify", str(path)]) == 0
    _refuses("many small graphs: open it as GraphDataset", GraphStore.open, path)


def test_store_graphs_with_vectors_of_edges(tmp_path):
    plain = _graphs(9)
    batch = plain._replace(edge_vector=torch.randn(len(plain.e), 3))
    graphs = GraphDataset.open(build_graphs(tmp_path / "many", [batch, batch]))
    assert graphs.vector_dim == 3 and verify_graphs(graphs.path) == []
    assert all(map(torch.equal, graphs.batch(range(9, 18)), batch))
    alone = torch.cat([graphs.batch([i]).edge_vector for i in range(9)])
    assert torch.equal(alone, batch.edge_vector)
    for words, vectors in (
        (r"edge_vector rows are \[56, 0\] torch.float32, not 3 torch.float32", plain.edge_vector),
        ("do not fit", batch.edge_vector[1:]),
        (r"edge_vector rows\[0, 0\] is inf", batch.edge_vector + torch.inf),
    ):
        _refuses(words, graphs.append, batch._replace(edge_vector=vectors))
    without = GraphDataset.open(build_graphs(tmp_path / "plain", [plain]))
    _refuses("edge_vector rows are", without.append, batch)
    rows = {name: np.ones((1, 1)) for name in "xey"}
    said = r"edge_vector has shape \[1, 2\]: \[1, 3\] is needed"
    _refuses(said, block_diagonal, [1], [1], [[0], [0]], **rows, edge_vector=[[0, 1]])


# numbers of nodes and of edges, edges, x, e and y of small graphs => what refuses them
REFUSED_BLOCKS = r"""
[[2, 2], [2, 0], [[0, 0], [1, 2]], [0, 0, 0, 0], [1, 1], [1, 1]] => edge 1 goes from node 0 to node 2
[[2, 0], [1, 0], [[0], [1]], [1, 1], [1], [1, 1]] => do not fit
[[2, 1], [1, 0], [[0], [1]], [0, 0, 0], [], [1, 1]] => do not fit
[[2], [1], [0, 1, 1], [1, 1], [1], [1]] => edge_index has shape \[3\]: \[2, E\] is
[[2], [1], [[0.0], [1.5]], [1, 1], [1], [1]] => edge_index has dtype float64
[[2], [1], [[0], [1]], ["a", "a"], [1], [1]] => x has dtype <U1: numbers are
"""


def test_store_graphs_refuse_what_makes_no_graph(tmp_path):
    good = _graphs(5)
    path = build_graphs(tmp_path / "many", [good])
    graphs, before = GraphDataset.open(path), _sums(path)["graphs.lmdb"]
    past, first = good.indices.clone(), good.graph_ids[good.indptr.diff().nonzero()[0]]
    past[0] = (good.graph_ids <= first).sum()  # the node behind the graph of the first edge
    for words, changes in (
        ("an edge joins two graphs", {"indices": past}),
        ("float64, not ", {"y": good.y.double()}),
        (r"node rows are \[\d+, 1\]", {"x": good.x[:, :1]}),
        ("an edge joins two graphs", {"graph_ids": good.graph_ids.flip(0)}),
        ("target rows.* is inf", {"y": (good.y + 1) * float("inf")}),
    ):
        _refuses(words, graphs.append, good._replace(**changes))
    for name in "xye":
        _refuses("do not fit", graphs.append, good._replace(**{name: getattr(good, name)[1:]}))
    assert _sums(path)["graphs.lmdb"] == before
    _refuses("exists already", build_graphs, path, [good])
    none = np.empty((0, 2), np.float32)
    empty = block_diagonal([], [], np.empty((2, 0), int), x=none, e=none, y=none)
    for words, batches, split in (
        ("batches is empty", [], {}),
        ("a batch has no graphs", [empty], {}),
        ("holds graph 5: graph ids", [good], {"split": {"train": [5]}}),
        ("target rows has shape", [good._replace(y=good.y[:, 0])], {}),
    ):
        _refuses(words, build_graphs, tmp_path / "b", batches, **split)
    for arrays, words in _cases(REFUSED_BLOCKS):
        *sizes, x, e, y = json.loads(arrays)
        _refuses(words, block_diagonal, *sizes, x=x, e=e, y=y)
    rows = {name: np.ones((1, 1), dtype) for name, dtype in (("e", ">f8"), ("y", ">i4"))}
    batch = block_diagonal([2], [1], [[0], [1]], x=np.ones((2, 1), ">f4"), **rows)
    kinds = [rows.dtype for rows in (batch.x, batch.e, batch.y)]
    assert kinds == [torch.float32, torch.float64, torch.int32]
    assert [p.name for p in tmp_path.iterdir()] == ["many"]


# labels of four graphs => their classes, or what refuses them
LABELS = r"""
[0.0, 1, -1, 1] => [0, 1]
[-1, 1, NaN, 1] => [-1, 1]
[-1.0, 1, 2, 2] => [1, 2]
[-1, -2, 0, NaN] => [-2, -1, 0]
[1, 1, -1, NaN] => [-1, 1]
[1, 1, 1, NaN] => [0, 1]
[7, 7, -1, NaN] => all labels are 7: two classes
[-1, NaN, NaN, -1] => ^no graph has a label
[1, 2, 2.5, 1] => target rows\[2, 0\] is 2.5: labels are whole numbers, .* fractions are `targets`
[[1.0, 0], [2, 1], [0, 0], [1, 1]] => target rows\[1, 0\] is 2.0: several .* are each 0 or 1
[[1, 0], [NaN, 1], [0, -1], [1, 1]] => null
[[1.0, -1], [-1, 1], [-1, -1], [1, 1]] => several labels per graph are each 0 or 1: there is no 0
"""


def test_store_graphs_with_labels(tmp_path, capsys):
    """Whole numbers are labels unless labels=False; their classes are those of all batches, and appended graphs keep to
    them."""
    first, second = (_graphs(4)._replace(y=torch.tensor([y]).T) for y in ([3, 8, 3, -1], [5] * 4))
    path = build_graphs(tmp_path / "many", [first, second])
    graphs = GraphDataset.open(path)
    assert graphs.labels is True and graphs.classes == [3, 5, 8]
    assert graphs.batch(range(4)).y.tolist() == first.y.tolist()  # as they were given
    cli.main(["info", str(path)])
    assert "1 x int64, 3 classes: 3, 5, 8" in capsys.readouterr().out
    graphs.append(first)
    _refuses(
        r"\[0, 0\] is 4: .* has 3 classes: 3, 5, 8", graphs.append, second._replace(y=second.y - 1)
    )
    numbers = build_graphs(tmp_path / "numbers", [first, second], labels=False)
    assert GraphDataset.open(numbers).labels is False and GraphDataset.open(numbers).classes is None
    floats = _graphs(4)
    assert GraphDataset.open(build_graphs(tmp_path / "floats", [floats])).labels is False
    for y, classes in _cases(LABELS):
        y, target = torch.tensor(json.loads(y)).view(4, -1), tmp_path / "y"
        if classes[0] not in "[n":
            _refuses(classes, build_graphs, target, [floats._replace(y=y)], labels=True)
            continue
        graphs = GraphDataset.open(build_graphs(target, [floats._replace(y=y)], labels=True))
        assert graphs.classes == json.loads(classes) and graphs.labels
        shutil.rmtree(target)


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
        _refuses("has lists or edges that leave it", many.batch, range(10))
        assert "has lists or edges that leave it" in verify_graphs(path)[0]
    # nine values, the last of which is number 9
    with many.file.transaction(write=True) as txn:
        txn.delete(lmdb_rows.key(4))
    said = "its last key does not fit 9 values"
    for call, *args in ((len, many), (many.append, _graphs(1)), (many.batch, [4])):
        _refuses(said, call, *args)


# damage, full disks


def test_store_what_training_starts_from_is_checked_once(tmp_path):
    path = _store(tmp_path / "g")
    GraphStore.open(path).check_split()
    nodes = GraphStore.open(path).split
    for array, position, number, message in (
        ("train", 0, 200, "split 'train' holds node 200: .* damaged; rebuild the store"),
        ("train", 0, nodes["train"][1], "more than once"),
        ("labels", nodes["test"][3], -1, "which has no label"),
        ("labels", nodes["test"][3], 4, r"of split 'test' labels\[3\] is 4: labels lie in .0, 4"),
    ):
        graph = GraphStore.open(path)
        graph.labels, graph.split["train"] = graph.labels.clone(), graph.split["train"].clone()
        (graph.labels if array == "labels" else graph.split[array])[position] = number
        _refuses(message, graph.check_split)
    many = _many(tmp_path / "many", split={"train": [1, 2]})
    many.check_split()
    many.split["train"] = torch.tensor([1, 10])
    _refuses("split 'train' holds graph 10", many.check_split)


def test_what_a_library_raises_at_foreign_bytes_is_one_sentence():
    for error, said in (
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
        (KeyError("a"), "KeyError 'a'"),
        (zipfile.BadZipFile("two\nlines"), "two lines"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("x" * 1000), "x" * 300),
    ):
        said = f"^a.npz cannot be read: {said}.*; get it again$"
        with pytest.raises(StoreError, match=said) as got, reading("a.npz", "; get it again"):
            raise error
        assert len(str(got.value)) < 400 and got.value.__cause__ is error
    # of the process or the machine: no other file would help
    with pytest.raises(StoreError, match="Too many files$"), reading("a.npz", "; get it again"):
        raise OSError(errno.EMFILE, "Too many files")
    for error in (StoreError("so"), NameError("typo"), KeyboardInterrupt()):  # not of the bytes
        with pytest.raises(type(error)) as got, reading("a.npz"):
            raise error
        assert got.value is error


def test_store_errors_are_one_line_whatever_they_quote():
    said = "é.csv holds '1\x1b[2J\n\x0b\udcff' \u2028"
    assert str(StoreError(said)) == "é.csv holds '1\\x1b[2J\\n\\x0b\\udcff' \\u2028"


def test_store_opens_regular_files_only(tmp_path):
    """No link in a stranger's store is followed, and no pipe blocks."""
    path, many = _store(tmp_path / "g", backend="lmdb"), _many(tmp_path / "many", 3).path

    def use(folder):
        if folder == many:
            return GraphDataset.open(folder).batch([0])
        return GraphStore.open(folder).features.gather(torch.arange(3))

    for folder, check in ((path, verify), (many, verify_graphs)):
        use(folder)  # makes the lock file
        lmdb = next(folder.glob("*.lmdb")).name
        for name in (lmdb, "meta.json", "train.npy", f"{lmdb}-lock"):
            file, kept, named = folder / name, tmp_path / name, name.removesuffix("-lock")
            for place in (lambda file: file.symlink_to(kept), os.mkfifo):
                file.rename(kept)
                place(file)
                _refuses(f"{named} cannot be read", use, folder)
                assert check(folder)[0].startswith(f"{named}: ")
                assert cli.main(["verify", str(folder)]) == 1
                file.unlink()
                kept.rename(file)
        assert check(folder) == []


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
        full = "lmdb cannot be written: .*; 0 B are free on its disk, nothing was written"
        _refuses("No space left", features.put_rows, everything, torch.ones(4000, 20))
        _refuses(full, graphs.append, _graphs(1000))
        # nor is there room for the lock file of LMDB, where it was removed
        (path / "features.lmdb-lock").unlink()
        os.truncate(small / "rest", 0)
        fill(small)

        def refused():
            again = GraphStore.open(path).features
            _refuses("No space left", again.put_rows, torch.arange(9), torch.ones(9, 20))

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
