"""Tests: sources/public.py: Planetoid's and OGB's files, downloads."""

import collections
import functools
import gzip
import http.server
import io
import os
import pickle
import shutil
import sys
import threading
import types
import unittest.mock
import zipfile

import numpy as np
import pytest
import torch

from disk import files as disk
from sources import public
from sources.prepare import prepare
from store import GraphStore, verify
from tests.common import _graph
from tests.stores import _edges, _edges_by_type, _refuses


class _Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2 did, which wrote the original files."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        value = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = dispatch[str] = save_bytes


def _planetoid_files(folder, change=(None, None)):
    """Write a small graph in the original layout, as pickles with scipy's class -> the graph, for comparison. As in
    citeseer a node, 25, is in no file.

    change: (part, function of its content, or the array in it, an index and a value).
    """
    csr = type("csr_matrix", (), {"__module__": "scipy.sparse.csr"})
    random, num_nodes, labelled = np.random.default_rng(0), 30, 22
    x = (random.random((num_nodes, 6)) < 0.4).astype(np.float32)
    y = np.eye(3, dtype=np.int32)[random.integers(0, 3, num_nodes)]
    test = random.permutation(np.setdiff1d(np.arange(labelled, num_nodes), 25))
    x[25], y[25] = 0, 0

    def matrix(dense):
        m, indptr = csr(), np.append(0, dense.sum(1).cumsum())
        m._shape, m.maxprint, m.data = dense.shape, 50, dense[dense > 0]
        m.indices, m.indptr = np.nonzero(dense)[1].astype(np.int32), indptr.astype(np.int32)
        return m

    graph = collections.defaultdict(list, {v: [] for v in range(num_nodes)})
    for u, v in random.integers(0, num_nodes, (40, 2)).tolist():
        graph[u].append(v)
    parts = {"allx": matrix(x[:labelled]), "tx": matrix(x[test]), "graph": graph}
    parts |= {"y": y[:5], "ally": y[:labelled], "ty": y[test]}
    parts["test.index"] = "".join(f"{v}\n" for v in test)
    part, how = change
    if callable(how):
        parts[part] = how(parts[part])
    elif how:
        array = getattr(parts[part], how[0]) if how[0] else parts[part]
        array[how[1]] = how[2]
    folder.mkdir(exist_ok=True)
    (folder / "ind.cora.test.index").write_text(parts.pop("test.index"))
    sparse = types.SimpleNamespace(csr_matrix=csr)
    with unittest.mock.patch.dict(sys.modules, {"scipy": sparse, "scipy.sparse.csr": sparse}):
        for part, value in parts.items():
            with open(folder / f"ind.cora.{part}", "wb") as file:
                pickler, protocol = (pickle._Pickler, 0) if part == "tx" else (_Python2Pickler, 2)
                pickler(file, protocol).dump(value)
    return x, y, test, graph


def test_datasets_planetoid(tmp_path, capsys):
    x, y, test, graph = _planetoid_files(tmp_path)
    result = GraphStore.open(prepare("cora", tmp_path))
    pairs = {(u, v) for u, row in graph.items() for v in row if u != v}
    assert _edges(result) == sorted(pairs | {(v, u) for u, v in pairs})
    rows = result.features.tensor
    scaled = 6**0.5 * x / np.maximum(x.sum(1, keepdims=True), 1)
    assert torch.allclose(rows, torch.from_numpy(scaled))
    said = "cora: features come with each row scaled to the sum 2.449, the square root of its width"
    assert said in capsys.readouterr().out
    assert result.labels.tolist() == [int(r.argmax()) if r.any() else -1 for r in y]
    split = [ids.tolist() for ids in result.split.values()]
    assert split == [[*range(5)], [*range(5, 22)], sorted(test.tolist())]
    assert verify(result.path) == []


def test_datasets_planetoid_refuses_other_pickles(tmp_path):
    _planetoid_files(tmp_path)

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/pwned",)

    array = pickle.dumps(np.ones(3, np.float32), 2)
    assert array.count(b"f4") == 1
    for content, message in (
        (pickle.dumps(Evil(), 2), "posix.system|os.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (pickle.dumps(np.array([1, "a"], object), 2), "array of type 'O8'"),
        (array.replace(b"f4", b"V4"), "array of type 'V4'"),
        (array.replace(b"K\x03", b"K\x7f", 2), "buffer size|cannot be read"),
        (b"cnumpy\nndarray\n((L1000000000000000L\ntR.", "cannot be read"),
    ):
        (tmp_path / "ind.cora.graph").write_bytes(content)
        _refuses(message, prepare, "cora", tmp_path)
    assert not (tmp_path / "pwned").exists() and not list(tmp_path.glob("cora-*"))
    assert public._number("f4").itemsize == 4  # which the last of these would have changed


# (file, what is done to its content, what the refusal says)
WRONG_PLANETOID = [
    (
        "test.index",
        lambda text: text.replace("22\n", "9999999999\n"),
        "cora cannot be read: index 9999999999 is out of bounds",
    ),
    (
        "test.index",
        lambda text: text.replace("22\n", "-1\n"),
        "split .test. holds node -1: node ids lie in",
    ),
    ("test.index", lambda text: text[:-3], "cora cannot be read: shape mismatch"),
    (
        "graph",
        lambda graph: {**graph, 0: [10**30]},
        "edge_index holds objects of Python .int.: give",
    ),
    ("graph", lambda graph: {**graph, 0: 7}, "cora cannot be read: .int. object is not iterable"),
    ("tx", ("indices", 0, -1), "ind.cora.tx cannot be read: .* outside of columns 0 to 5"),
    ("allx", ("indptr", 1, -3), "ind.cora.allx cannot be read"),
    ("allx", ("data", 0, np.nan), "is nan"),
    ("ally", lambda y: y[:1], "cora cannot be read: shape mismatch"),
]


def test_datasets_planetoid_files_that_make_no_graph(tmp_path):
    for part, change, message in WRONG_PLANETOID:
        _planetoid_files(tmp_path, change=(part, change))
        _refuses(message, prepare, "cora", tmp_path)
        assert not list(tmp_path.glob("cora-*"))


class _Server:
    """Serves bytes from loopback as `files[name]`; `cut` truncates the next answer."""

    def __init__(self, files):
        server, self.files, self.cut, self.requests = self, files, None, []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                data = server.files.get(self.path.rpartition("/")[2])
                wanted, start = self.headers.get("Range"), 0
                server.requests.append((self.path, wanted))
                if data is None:
                    return self.send_error(404)
                if wanted:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                self.send_response(416 if start >= len(data) else 206 if start else 200)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", str(max(len(data) - start, 0)))
                self.end_headers()
                self.wfile.write(data[start : server.cut])
                server.cut = None

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/ogb"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def ogb_server(monkeypatch):
    """Let OGB's archives come from a `_Server` -> it."""
    server = _Server({})
    monkeypatch.setenv("RINGBLOCK_OGB_URL", server.url)
    yield server
    server.http.shutdown()
    server.http.server_close()


def _gz(array):
    out = io.BytesIO()
    np.savetxt(out, array, "%.7g", delimiter=",")
    return gzip.compress(out.getvalue())


def _npz(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _ogb_zip(name, unlabelled=0):
    """Make a small archive in OGB's layout -> its bytes, and the graph; its last nodes may have no label."""
    folder, kind = public.OGB[name][0].removesuffix(".zip"), public.OGB[name][1]
    args = _graph(num_nodes=120, num_edges=500)
    edge_index, x, y = args["edge_index"], args["features"], args["labels"].astype(np.float32)
    y[120 - unlabelled :] = np.nan
    ids = np.arange(120 - unlabelled)
    args["split"] = {part: ids[i::3] for i, part in enumerate(disk.SPLITS)}
    members = {f"split/{kind}/{part}.csv.gz": _gz(ids) for part, ids in args["split"].items()}
    if folder == "papers100M-bin":
        arrays = dict(edge_index=edge_index, node_feat=x, node_year=np.zeros((120, 1), np.int64))
        arrays |= dict(num_nodes_list=np.array([120]), num_edges_list=np.array([500]))
        members["raw/data.npz"] = _npz(**arrays)
        members["raw/node-label.npz"] = _npz(node_label=y[:, None])
    else:
        tables = {"edge": edge_index.T, "node-feat": x, "node-label": y}
        tables |= {"num-node-list": [120], "num-edge-list": [500]}
        members |= {f"raw/{name}.csv.gz": _gz(table) for name, table in tables.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(f"{folder}/{member}", content)
    return out.getvalue(), args


def test_datasets_ogb_by_type(tmp_path, ogb_server):
    """ogbn-mag's layout, as ogb.io.read_graph_raw reads it."""
    rng, counts = np.random.default_rng(0), {"author": 30, "paper": 50}
    ends = ("author", "writes", "paper"), ("paper", "cites", "paper")
    edges = {kind: rng.integers(0, [[counts[kind[0]]], [50]], (2, 80)) for kind in ends}
    x, y, ids = rng.random((50, 4), np.float32), rng.integers(0, 349, 50), rng.permutation(50)
    words = {"num-node-dict": "author,paper\n30,50\n"}
    words["triplet-type-list"] = "".join(f"{','.join(kind)}\n" for kind in ends)
    members = {f"raw/{n}.csv.gz": gzip.compress(t.encode()) for n, t in words.items()}
    for kind, pairs in edges.items():
        members[f"raw/relations/{'___'.join(kind)}/edge.csv.gz"] = _gz(pairs.T)
    for name, table in (("node-feat", x), ("node-label", y)):
        members[f"raw/{name}/paper/{name}.csv.gz"] = _gz(table)
    for part, nodes in zip(disk.SPLITS, np.split(ids, [20, 30])):
        members[f"split/time/paper/{part}.csv.gz"] = _gz(nodes)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for member, data in members.items():
            archive.writestr(f"mag/{member}", data)
    ogb_server.files["mag.zip"] = content.getvalue()
    graph = GraphStore.open(prepare("ogbn-mag", tmp_path))
    assert graph.node_types == {"paper": (50, 4), "author": (30, 0)} and graph.num_classes == 349
    names = ["author,writes,paper", "paper,cites,paper", "paper,rev_writes,author"]
    assert graph.edge_types == names and torch.allclose(graph.features.tensor, torch.from_numpy(x))
    (a, p), (s, d) = edges.values()
    wanted = {*zip(a + 50, p)}, {*zip(s, d), *zip(d, s)}, {*zip(p, a + 50)}
    assert _edges_by_type(graph) == dict(zip(names, map(sorted, wanted)))
    assert graph.labels.tolist() == [*y.tolist(), *[-1] * 30]
    assert graph.split["test"].tolist() == ids[30:].tolist()


@pytest.mark.parametrize(
    "name, unlabelled", [("ogbn-arxiv", 0), ("ogbn-products", 20), ("ogbn-papers100M", 20)]
)
def test_datasets_ogb(tmp_path, ogb_server, capsys, name, unlabelled):
    content, args = _ogb_zip(name, unlabelled)
    archive, _, classes, no_duplicates = public.OGB[name]
    ogb_server.files[archive] = content
    path = prepare(name, tmp_path)
    assert prepare(name, tmp_path) == path and len(ogb_server.requests) == 1
    assert "reverse of every edge" in capsys.readouterr().out
    graph = GraphStore.open(path)
    pairs = list(zip(*args["edge_index"].tolist()))
    pairs += [(v, u) for u, v in pairs]
    assert _edges(graph) == sorted(set(pairs) if no_duplicates else pairs)
    assert torch.allclose(graph.features.tensor, torch.from_numpy(args["features"]), atol=1e-5)
    labelled = 120 - unlabelled
    assert graph.labels.tolist() == [*args["labels"][:labelled].tolist(), *[-1] * unlabelled]
    for part, ids in args["split"].items():
        assert graph.split[part].tolist() == ids.tolist()
    assert graph.num_classes == classes and graph.meta["options"]["symmetrize"]
    assert {p.name for p in tmp_path.iterdir()} == {archive, path.name}


ARXIV = functools.partial(prepare, "ogbn-arxiv")
DAMAGED = "if it is damaged, remove the archive"


def test_datasets_ogb_download_is_resumed(tmp_path, ogb_server):
    content, file = _ogb_zip("ogbn-arxiv")[0], tmp_path / "arxiv.zip"
    ogb_server.files["arxiv.zip"], ogb_server.cut = content, 1000
    _refuses(f"stopped at 1000 of {len(content)} bytes", ARXIV, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"arxiv.zip.part"}
    path = ARXIV(tmp_path)
    assert ogb_server.requests[-1][1] == "bytes=999-"
    # killed before the complete file had its name
    file.rename(tmp_path / "arxiv.zip.part")
    public.download(f"{ogb_server.url}/arxiv.zip", file)
    assert verify(path) == [] and file.read_bytes() == content
    assert not list(tmp_path.glob("*.part*"))
    shutil.rmtree(path)
    with zipfile.ZipFile(file) as archive:
        place = archive.getinfo("arxiv/raw/node-feat.csv.gz")
    middle = place.header_offset + 60 + place.compress_size // 2
    for data in (content[:-100], content[:middle] + bytes(8) + content[middle + 8 :]):
        file.write_bytes(data)
        _refuses(DAMAGED, ARXIV, tmp_path)
        assert list(tmp_path.iterdir()) == [file]


def test_datasets_download_of_a_file_that_has_changed_meanwhile(tmp_path, ogb_server):
    """A file without checksums is never made of two versions, and an archive that is does not become a store."""
    old, now = (_ogb_zip("ogbn-arxiv", unlabelled)[0] for unlabelled in (0, 20))
    ogb_server.files = {"arxiv.zip": old, "file": old}
    download = functools.partial(public.download, f"{ogb_server.url}/file")
    for get, target in ((download, tmp_path / "file"), (ARXIV, tmp_path)):
        ogb_server.cut = 1000
        _refuses(f"stopped at 1000 of {len(old)} bytes", get, target)
    ogb_server.files = {"arxiv.zip": now, "file": now}
    download(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == now
    _refuses(DAMAGED, ARXIV, tmp_path)
    assert (tmp_path / "arxiv.zip").read_bytes() == old[:999] + now[999:]
    assert len(list(tmp_path.iterdir())) == 2


def test_datasets_ogb_download_fails(tmp_path, monkeypatch, ogb_server):
    ogb_server.files["arxiv.zip"] = b"x" * 10
    _refuses("HTTP Error 404", prepare, "ogbn-products", tmp_path)
    (tmp_path / "arxiv.zip.part").write_bytes(b"y" * 20)
    _refuses("HTTP Error 416.*remove .*arxiv.zip.part to begin anew", ARXIV, tmp_path)
    for name in ("OGB", "PLANETOID"):  # nobody listens there
        monkeypatch.setenv(f"RINGBLOCK_{name}_URL", "http://127.0.0.1:9/none")
    _refuses("failed", ARXIV, tmp_path)
    assert not list(tmp_path.glob("ogbn*"))
    _refuses("failed", prepare, "cora", tmp_path / "new")
