"""Tests: what edges carry: features in the layers, weights and times in what is drawn."""

import copy
import importlib
import re
from collections import Counter

import numpy as np
import pytest
import torch

import ddp
import train
from inference import inference
from model import CONVS
from run.run import open_run
from sampler import NeighborSampler
from sources.prepare import build
from store import GraphStore, build_store
from tests.common import (
    _as_lists,
    _code,
    _dgl,
    _graph,
    _log,
    _same_for_any_number_of_processes,
    _store,
    _train,
    _with_flags,
)
from tests.stores import _events, _rewrite_meta


@pytest.fixture
def pointed(tmp_path):
    """Make a store in which nodes have six signed in-neighbours, and the class is the sign behind the marked edge."""
    rng = np.random.default_rng(0)
    sign = rng.integers(0, 2, 600)
    src = np.stack([rng.permutation(599)[:6] for _ in range(600)])
    src += src >= np.arange(600)[:, None]
    marked = rng.integers(0, 6, 600)
    marks = np.eye(6, dtype=np.float32)[:, :1][(np.arange(6) - marked[:, None]).ravel() % 6]
    return build_store(
        tmp_path / "g",
        edge_index=np.stack([src.ravel(), np.repeat(np.arange(600), 6)]),
        labels=sign[src[np.arange(600), marked]],
        features=np.stack([2 * sign - 1, rng.standard_normal(600)], 1).astype(np.float32),
        edge_features=marks * [1, 0.5],
        split={"train": np.arange(300), "valid": np.arange(300, 400), "test": np.arange(400, 600)},
    )


@pytest.mark.parametrize("name", ["gat", "gine", "gin", "sage"])
def test_train_learns_from_the_features_of_edges(name, pointed, tmp_path):
    """Also resumes, predicts, and prints how it uses them."""
    sees, log = name.startswith("g") and name != "gin", tmp_path / "log"
    words = f"--dataset {pointed} --gpus 0 --model {name} --fanout 6 --hidden 16 --dropout 0"
    words += f" --lr 0.02 --norm none --batch-size 100 --epochs {60 if sees else 20} --log {log}"
    first = _train(words, f"--checkpoint {tmp_path}/c.pt")
    why = "gat and gine take them" if name == "gin" else "--edge-features makes it take them"
    blind = f"not used by --model {name}: {why}"
    said = "the model sees the features of edges, 2 x float64" if sees else blind
    assert first.count("edges   ") == 1 and said in first
    accuracy = _log(log)[-1]["exact"]["test"]
    assert accuracy >= 0.95 if sees else accuracy <= 0.75
    typed = f"--{'' if sees else 'no-'}edge-features"  # the default
    _train(f"--resume {tmp_path}/c.pt --predict {tmp_path}/p.npy --gpus 0 {typed}")
    _with_flags(tmp_path / "c.pt", edge_features=None)  # as early checkpoints have it
    _train(f"--resume {tmp_path}/c.pt --predict {tmp_path}/p.npy --gpus 0 {typed}")
    graph = GraphStore.open(pointed)
    right = np.load(tmp_path / "p.npy") == graph.labels.numpy()
    assert right[400:].mean() == pytest.approx(accuracy)
    wide = {name: getattr(graph, name) for name in ("indptr", "indices", "labels", "split")}
    wide |= {"features": graph.features.tensor, "edge_features": np.ones((3600, 3))}
    words = f"--resume {tmp_path}/c.pt --predict {tmp_path}/q.npy --gpus 0 --dataset"
    other = _train(words, build_store(tmp_path / "wide", **wide), code=2 * sees)
    assert ("trained on a graph with edge_dim 2, " in other) == sees


@pytest.mark.parametrize("name", ["sage", "gcn", "rgcn", "rgat"])
def test_features_of_edges_are_a_term_of_layers_that_are_asked(name, tmp_path, capsys):
    """The class is the sign of the mean of a node's edge features. Also resumes and predicts."""
    rng = np.random.default_rng(0)
    arrays = _graph(600, 4800)
    values = rng.standard_normal((4800, 2)).astype(np.float32)
    sums = np.zeros(600)
    np.add.at(sums, arrays["edge_index"][1], values[:, 0])
    split = {"train": np.arange(400), "test": np.arange(400, 600)}
    arrays |= {"labels": (sums > 0).astype(int), "num_classes": 2, "split": split}
    arrays["edge_type"] = rng.integers(0, 2, 4800)
    blind = build_store(tmp_path / "blind", **arrays)
    path = build_store(tmp_path / "g", **arrays, edge_features=values)
    words = f"--dataset {path} --gpus 0 --model {name} --edge-features --fanout 20"
    words += " --epochs 30 --lr 0.05 --batch-size 100"
    assert _code(f"{words} --checkpoint {tmp_path}/c.pt --predict {tmp_path}/p.npy") == 0
    assert "the model sees the features of edges, 2 x float32" in capsys.readouterr().out
    right = np.load(tmp_path / "p.npy") == arrays["labels"]
    assert right[400:].mean() > 0.75  # without features of edges half
    resumed = f"--resume {tmp_path}/c.pt --predict {tmp_path}/q.npy --gpus 0"
    assert _code(resumed) == 0
    assert np.array_equal(np.load(tmp_path / "q.npy"), np.load(tmp_path / "p.npy"))
    capsys.readouterr()
    for line, complaint in (
        (f"{resumed} --no-edge-features", "was made with --edge-features True, this run has False"),
        (f"{resumed} --dataset {blind}", f"a graph with edge_dim 2, {blind} has 0"),
        (f"{words} --dataset {blind}", f"{blind} has none; leave out --edge-features"),
        (words.replace(f"--model {name}", "--model gin"), "is for --model sage, gcn, .*gat"),
        ("--gpus 0 --model gine --no-edge-features", "is for --model sage, .* is gine"),
    ):
        assert _code(line) == 2
        assert re.search(complaint, "".join(capsys.readouterr()))


OWN_EDGES = """
import torch
from model import GATv2Conv

class Net(torch.nn.Module):
    def __init__(self, in_dim, num_classes, edge_dim):
        super().__init__()
        self.conv = GATv2Conv(in_dim, 32, edge_dim=edge_dim)
        self.out = torch.nn.Linear(32, num_classes)
        self.edge_dim = edge_dim

    def forward(self, blocks, x, edges=None):
        assert (edges is None) == (self.edge_dim == 0)
        if edges is not None:
            assert [len(e) for e in edges] == [block.num_edges for block in blocks]
        return self.out(self.conv(blocks[0], x, edges=edges and edges[0]).relu())

class Must(Net):
    def forward(self, blocks, x, edges):
        return super().forward(blocks, x, edges)

class Blind(Net):
    def forward(self, blocks, x):
        return super().forward(blocks, x)

class Compiled(Net):  # as torch.compile(net)
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

def made(in_dim, num_classes, edge_dim=0):
    return Compiled(in_dim, num_classes, edge_dim)

def wrong(in_dim, num_classes, edge_dim=0):
    return Blind(in_dim, num_classes, edge_dim)
"""


def test_own_model_gets_the_features_of_edges_that_it_can_take(pointed, tiny, tmp_path):
    file, log = tmp_path / "net.py", tmp_path / "log"
    file.write_text(OWN_EDGES)
    words = f"--gpus 0 --fanout 6 --lr 0.02 --batch-size 100 --log {log}"
    _train(words, f"--dataset {pointed} --model {file}:Net --epochs 60")
    assert _log(log)[-1]["exact"]["test"] >= 0.95
    sees = "the model sees the features of edges, 2 x float64"
    blind = f"not used by --model {file}:Blind: it does not ask for them"
    for name, dataset, code, complaint in (
        ("Net", pointed, 0, sees),
        ("Must", pointed, 0, sees),
        ("made", pointed, 0, sees),
        ("Blind", pointed, 0, blind),
        ("Net", tiny, 0, r"\(exact: all neighbours\)\n"),
        ("made", tiny, 0, r"\(exact: all neighbours\)\n"),
        ("Must", tiny, 2, "and .* has none; give that argument a default"),
        ("wrong", pointed, 2, "wrong takes edge_dim, but the forward of its result takes no"),
    ):
        said = _train(words, f"--dataset {dataset} --model {file}:{name} --epochs 1", code=code)
        assert re.search(complaint, said) and "Traceback" not in said, said
    must = "def forward(self, blocks, x, edges):"
    file.write_text(OWN_EDGES.replace(must, f"{must}\n        raise ValueError('no')"))
    said = _train(words, f"--dataset {pointed} --model {file}:Must --epochs 1", code=1)
    assert said.endswith("ValueError: no\n") and f'File "{file}", line ' in said, said


@pytest.mark.parametrize("name", ["gine", "own"])
def test_edge_features_train_the_same_by_processes(name, pointed, tmp_path):
    (tmp_path / "net.py").write_text(OWN_EDGES)
    own = f"--model {tmp_path}/net.py:Net --fanout 4"
    model = own if name == "own" else f"--model {name} --fanout 4,3 --hidden 16 --norm layer"
    common = f"--dataset {pointed} --gpus 0 --lr 0.01 --precision fp64 {model}"
    _same_for_any_number_of_processes(tmp_path, common, [(1, 72, 1), (3, 24, 1)])


DRAWN = [  # flags, what is said, columns and options of the sampler
    ("--sampler weighted --temporal off", "neighbours are drawn by weight", "weights", {}),
    ("--temporal off", "weights of edges are not used: --sampler weighted draws", "", {}),
    ("--temporal off --fanout 3,2", "times of edges are not used: --temporal off", "", {}),
    ("--sampler latest", "neighbours are the latest", "edge_times", {"method": "latest"}),
    ("--temporal auto", "seeds see edges at their own time or before", "edge_times", {}),
    ("--temporal before", "seeds see edges before their own", "edge_times", {"strict": True}),
    ("--window 9", "before it, of the last 9, in every hop", "edge_times", {"window": 9}),
    (f"--window {10**12}", "in every hop", "edge_times", {}),  # of nanoseconds, say
]


@pytest.mark.parametrize("words, said, column, options", DRAWN)
def test_a_run_draws_by_what_edges_carry(words, said, column, options, tmp_path, capsys):
    """Its batches equal those of a sampler with these columns of the store and the times of the seeds."""
    path = _store(tmp_path / "g", **_events(200, 3000))
    words = f"--dataset {path} --gpus 0 --model gin --fanout 3,2 --batch-size 20 {words}"
    run = open_run(ddp.Ranks(), train.parse_args(words.split()), path)
    assert said in capsys.readouterr().out
    graph, asked = run.store, []
    columns = {"weights": graph.edge_weight, "edge_times": graph.edge_time}
    options = options | {name: rows for name, rows in columns.items() if name == column}
    alone, split = NeighborSampler(graph.indptr, graph.indices, [3, 2], **options), graph.split
    for batch in (*run.loader(split["train"]), *run.loader(split["valid"], shuffle=False)):
        times = graph.node_time[batch.seeds] if column == "edge_times" else None
        expected = alone.sample(batch.seeds, batch.global_step, times)
        assert _as_lists(b[:3] for b in batch.blocks) == _as_lists(b[:3] for b in expected)
    run.sampled = lambda nodes, times: asked.append((nodes, times)) or 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.task.validate(run)
    ((nodes, times),) = asked
    assert torch.equal(nodes, split["valid"]) and (times is None) == (column != "edge_times")
    assert times is None or torch.equal(times, graph.node_time[nodes])


def test_train_at_its_own_time_is_the_same_for_any_number_of_processes(tmp_path):
    path = _store(tmp_path / "g", **_events(200, 3000))
    words = f"--dataset {path} --gpus 0 --fanout 5,3 --hidden 16 --lr 0.01"
    what = "--predict-what embeddings"
    _same_for_any_number_of_processes(tmp_path, f"{words} {what}", [(1, 18, 1), (3, 6, 1)])
    assert np.load(tmp_path / "0.npy").shape == (200, 16)


@pytest.mark.parametrize("temporal", ["at", "before"])
@pytest.mark.parametrize("name", ["sage", "gat", "gin", "gine"])
def test_exact_inference_at_a_time_is_of_the_graph_of_that_time(name, temporal, tmp_path):
    """A node's logits are those on the graph of only the edges that it may see."""
    rng = np.random.default_rng(3)
    path = build_store(
        tmp_path / "g",
        edge_index=rng.integers(0, 40, (2, 300)),
        features=rng.standard_normal((40, 3)).astype("f"),
        labels=rng.integers(0, 3, 40),
        split={"train": np.arange(20)},
        edge_time=rng.integers(0, 9, 300),
        node_time=rng.integers(0, 9, 40),
        edge_features=rng.random((300, 2)),
    )
    graph = GraphStore.open(path)
    dst = torch.repeat_interleave(graph.indptr.diff())
    words = f"--dataset {path} --model {name} --temporal {temporal}"
    words += " --gpus 0 --fanout 3,3 --hidden 8 --batch-size 7"
    run = open_run(ddp.Ranks(), train.parse_args(words.split()), path)
    slow = copy.deepcopy(run.model.eval())
    found, hidden = run.exact(), run.exact(layers=1)
    slow.degrees = None
    for v in range(40):
        sees = torch.lt if temporal == "before" else torch.le
        keep = sees(graph.edge_time, graph.node_time[v])
        indptr = torch.bincount(dst[keep] + 1, minlength=41).cumsum(0)
        arrays, edges = (indptr, graph.indices[keep]), graph.edge_features[keep]
        for logits, layers in ((found, None), (hidden, 1)):
            expected = inference(slow, *arrays, graph.features.tensor, edges=edges, layers=layers)
            torch.testing.assert_close(logits[v], expected[v], rtol=1e-4, atol=1e-5)


def _written(source, given, folder):
    """Give a graph with times of nodes alone in the form that `source` names -> first argument, options of `build`."""
    nodes = {"x": given["features"], "y": given["labels"], "node_time": given["node_time"]}
    tensors = {name: torch.from_numpy(values) for name, values in nodes.items()}
    ends = torch.from_numpy(given["edge_index"])
    if source == "npz":
        parts = {f"{part}_idx": ids for part, ids in given["split"].items()}
        np.savez(folder / "a.npz", edge_index=given["edge_index"], **nodes, **parts)
        return folder / "a.npz", {}
    if source == "pyg":
        data = pytest.importorskip("torch_geometric.data").Data(edge_index=ends, **tensors)
        return data, {"split": given["split"]}
    if source == "dgl":
        graph = _dgl().graph(tuple(ends), num_nodes=200)
        data = {"feat": tensors["x"], "label": tensors["y"], "time": tensors["node_time"]}
        graph.ndata.update(data)
        return graph, {"split": given["split"]}
    tables = {"edges": given["edge_index"].T, **{n: v.reshape(200, -1) for n, v in nodes.items()}}
    tables |= {part: ids[:, None] for part, ids in given["split"].items()}
    for name, rows in tables.items():
        if source == "csv":
            np.savetxt(folder / f"{name}.csv", rows, "%.9g", ",")
        else:
            names = {"edges": "src dst", "x": "a b c d e"}.get(name, name).split()
            table = pytest.importorskip("pyarrow").table(dict(zip(names, rows.T)))
            importlib.import_module("pyarrow.parquet").write_table(
                table, folder / f"{name}.parquet"
            )
    files = {name: folder / f"{name}.{source}" for name in tables}
    split = {part: files[part] for part in given["split"]}
    options = {"features": files["x"], "labels": files["y"], "split": split}
    return files["edges"], {**options, "node_times": str(files["node_time"])}


@pytest.mark.parametrize("symmetrize", [False, True])
@pytest.mark.parametrize("source", ["store", "npz", "csv", "parquet", "pyg", "dgl"])
def test_with_times_of_nodes_alone_no_seed_sees_a_newer_node(source, symmetrize, tmp_path, capsys):
    """An edge, also an added reverse, has the time of its source. Compared with all edges, one by one."""
    given = _graph() | {"node_time": np.random.default_rng(0).integers(0, 100, 200)}
    if source == "store":
        path = build_store(tmp_path / "g", **given, symmetrize=symmetrize)
    else:
        (graph, options), path = _written(source, given, tmp_path), tmp_path / "g"
        build(graph, path, symmetrize=symmetrize, **options)
        said = "edges have no times: each gets that of its source (node_time)"
        assert said in capsys.readouterr().out
    words = f"--dataset {path} --gpus 0 --model gin --fanout 7,3 --batch-size 20".split()
    run = open_run(ddp.Ranks(), train.parse_args(words), path)
    assert "seeds see edges at their own time or before" in capsys.readouterr().out
    (src, dst), when = given["edge_index"], given["node_time"]
    if symmetrize:
        src, dst = np.append(src, dst), np.append(dst, src)
    drawn = 0
    for batch in run.loader(run.store.split["train"]):
        for block, most in zip(batch.blocks, (3, 7)):
            times = block.src_times.numpy()
            assert (when[block.src_nodes] <= times).all()
            for i, v in enumerate(block.src_nodes[: block.num_dst].tolist()):
                sees = sorted(src[(dst == v) & (when[src] <= times[i])].tolist())
                edges = block.indices[block.indptr[i] : block.indptr[i + 1]].long()
                taken = sorted(block.src_nodes[edges].tolist())
                assert len(taken) == min(most, len(sees)) and not Counter(taken) - Counter(sees)
                drawn += len(taken)
    assert drawn > 300


def test_a_store_with_times_of_nodes_that_do_nothing_says_so(tmp_path, capsys):
    """As stores built before edges got times from them."""
    path = _store(tmp_path / "g", node_time=np.arange(200))
    meta = GraphStore.open(path).meta
    kept = {name: entry for name, entry in meta["files"].items() if name != "edge_time.npy"}
    _rewrite_meta(path, files=kept)
    anew = f"build {path} anew: an edge then has the time of its source"
    for words in ("", "--temporal off", "--task link --batch-size 100"):
        assert _code(f"--dataset {path} --gpus 0 --epochs 1", words) == 0
        said = f"times of nodes are not used: edges have none (edge_time); {anew}"
        assert said in capsys.readouterr().out
    assert _code(f"--dataset {path} --gpus 0 --temporal at") == 2
    assert f"has no times of edges (edge_time); {anew}" in capsys.readouterr().err


def test_train_says_what_is_missing(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(CONVS["gat"], "edge_features", "must")
    whole = _store(tmp_path / "g", **_events(200, 3000))
    edges_alone = _store(tmp_path / "e", edge_time=np.arange(3000))
    for path, words, complaint in (
        (tiny, "--temporal at", "--temporal at: .* has no times of edges .edge_time"),
        (edges_alone, "--temporal before", "has no times of nodes"),
        (whole, "--model gcn", "--model gcn divides by the degrees of the whole graph"),
        (whole, "--sampler latest --temporal off", "times of edges and nodes"),
        (tiny, "--sampler weighted", "--sampler weighted draws by weights"),
        (tiny, "--model gat", "--model gat takes features of edges, and"),
        (tiny, "--task graph --temporal off", "--temporal off is not for --task graph"),
        (tiny, "--task graph --sampler weighted", "--sampler weighted is not for --task graph"),
    ):
        assert _code(f"--dataset {path} --gpus 0", words) == 2
        assert re.search(complaint, "".join(capsys.readouterr()))
    assert _code(f"--dataset {edges_alone} --gpus 0 --epochs 1") == 0
    assert "times of edges are not used: nodes have none" in capsys.readouterr().out
    # exact inference draws nothing: a graph without weights will do
    words = f"--dataset {_store(tmp_path / 'w', edge_weight=np.ones(3000))} --sampler weighted"
    assert _code(f"{words} --gpus 0 --epochs 1 --checkpoint {tmp_path}/w.pt") == 0
    predict = f"--resume {tmp_path}/w.pt --predict {tmp_path}/w.npy --dataset {edges_alone}"
    assert _code(f"{predict} --gpus 0") == 0
