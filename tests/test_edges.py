"""Tests: what edges carry: features in the layers, weights and times in what is drawn."""

import copy
import importlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp
import train
from extras import time_units
from inference import inference
from model import CONVS
from run.run import open_run
from sampler import NeighborSampler
from sources.prepare import build
from store import GraphStore, build_store, info
from tests.common import (
    _as_lists,
    _code,
    _dgl,
    _graph,
    _log,
    _same_for_any_number_of_processes,
    _says,
    _stops,
    _store,
    _train,
)
from tests.stores import _events, _refuses, _rewrite_meta


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
def test_train_learns_from_the_features_of_edges(name, pointed, tmp_path, capsys):
    """Also resumes, predicts, and prints how it uses them."""
    sees, log = name.startswith("g") and name != "gin", tmp_path / "log"
    words = f"--dataset {pointed} --gpus 0 --model {name} --fanout 6 --hidden 16 --dropout 0"
    words += f" --lr 0.02 --norm none --batch-size 100 --epochs {60 if sees else 20} --log {log}"
    assert _code(words, f"--checkpoint {tmp_path}/c.pt") == 0
    first = capsys.readouterr().out
    why = "gat and gine take them" if name == "gin" else "--edge-features makes it take them"
    blind = f"not used by --model {name}: {why}"
    said = "the model sees the features of edges, 2 x float64" if sees else blind
    assert first.count("edges   ") == 1 and said in first
    accuracy = _log(log)[-1]["exact"]["test"]
    assert accuracy >= 0.95 if sees else accuracy <= 0.75
    typed = f"--{'' if sees else 'no-'}edge-features"  # the default
    predict = f"--resume {tmp_path}/c.pt --predict {tmp_path}/p.npy --gpus 0"
    assert _code(predict, typed) == 0
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    state["flags"]["edge_features"] = None  # as early checkpoints have it
    torch.save(state, tmp_path / "c.pt")
    assert _code(predict, typed) == 0
    graph = GraphStore.open(pointed)
    right = np.load(tmp_path / "p.npy") == graph.labels.numpy()
    assert right[400:].mean() == pytest.approx(accuracy)
    wide = {name: getattr(graph, name) for name in ("indptr", "indices", "labels", "split")}
    wide |= {"features": graph.features.tensor, "edge_features": np.ones((3600, 3))}
    other = build_store(tmp_path / "wide", **wide)
    assert _code(predict, "--dataset", other) == 2 * sees
    assert ("trained on a graph with edge_dim 2, " in capsys.readouterr().err) == sees


@pytest.mark.parametrize("name", ["sage", "gcn", "rgcn", "rgat"])
def test_features_of_edges_are_a_term_of_layers_that_are_asked(name, tmp_path, capsys):
    """The class is the sign of the mean of a node's edge features."""
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
    _says(
        capsys,
        "the model sees the features of edges, 2 x float32",
        f"{words} --checkpoint {tmp_path}/c.pt --predict {tmp_path}/p.npy",
    )
    right = np.load(tmp_path / "p.npy") == arrays["labels"]
    assert right[400:].mean() > 0.75  # without features of edges half
    resumed = f"--resume {tmp_path}/c.pt --gpus 0"
    for line, complaint in (
        (f"{resumed} --no-edge-features", "was made with --edge-features True, this run has False"),
        (f"{words} --dataset {blind}", f"{blind} has none; leave out --edge-features"),
        (words.replace(f"--model {name}", "--model gin"), "is for --model sage, gcn, .*gat"),
    ):
        _stops(capsys, complaint, line)


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


def test_own_model_gets_the_features_of_edges_that_it_can_take(pointed, tiny, tmp_path, capsys):
    file, log = tmp_path / "net.py", tmp_path / "log"
    file.write_text(OWN_EDGES)
    words = f"--gpus 0 --fanout 6 --lr 0.02 --batch-size 100 --log {log}"
    assert _code(words, f"--dataset {pointed} --model {file}:Net --epochs 60") == 0
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
        capsys.readouterr()
        assert _code(words, f"--dataset {dataset} --model {file}:{name} --epochs 1") == code
        assert re.search(complaint, said := "".join(capsys.readouterr())), said
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


@pytest.mark.parametrize(
    "name, temporal", [("sage", "at"), ("gat", "before"), ("gin", "before"), ("gine", "at")]
)
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


def _by_door(door, folder, given, **options):
    """Build a store of a graph {argument of build_store: values}, which comes as `door` says; options: of the build."""
    path = folder / f"s{len([*folder.iterdir()])}"
    arrays = {name: values for name, values in given.items() if name != "split"}
    x, split = given["features"], given["split"]
    if door == "store":
        return build_store(path, **given, **options)
    if door == "typed":
        of = dict.fromkeys(["edge_index", "edge_time"], ("a", "to", "a"))
        arrays = {name: {of.get(name, "a"): values} for name, values in arrays.items()}
        return build_store(path, node_types={"a": len(x)}, split=split, **arrays, **options)
    if door == "npz":
        np.savez(folder / "a.npz", **arrays, **{f"{part}_idx": ids for part, ids in split.items()})
        return build(folder / "a.npz", path, **options)
    if door == "dgl":
        data = _dgl().graph(tuple(map(torch.from_numpy, arrays["edge_index"])), num_nodes=len(x))
        names = {"features": "feat", "labels": "label", "node_time": "time"}
        data.ndata.update({names[name]: torch.from_numpy(arrays[name]) for name in names})
        return build(data, path, split=split, **options)
    tables = {"e": dict(zip(("src", "dst"), given["edge_index"])), "y": {"label": given["labels"]}}
    tables |= {"x": {f"f{i}": column for i, column in enumerate(x.T)}}
    tables |= {"t": {"t": given["node_time"]}, **{part: {"id": split[part]} for part in split}}
    if "edge_time" in given:
        tables["e"]["t"] = given["edge_time"]
        options["times"] = "t"
    files = {name: str(folder / f"{name}.{door}") for name in tables}
    for name, columns in tables.items():
        if door == "parquet":
            table = pytest.importorskip("pyarrow").table(columns)
            importlib.import_module("pyarrow.parquet").write_table(table, files[name])
        else:
            rows = [columns, *zip(*columns.values())]
            text = "".join(",".join(map(str, row)) + "\n" for row in rows)
            Path(files[name]).write_text(text)
    options |= {"features": files["x"], "labels": files["y"], "node_times": files["t"]}
    return build(files["e"], path, split={part: files[part] for part in split}, **options)


@pytest.mark.parametrize("door", "store typed npz csv parquet dgl".split())
def test_with_times_of_nodes_alone_no_seed_sees_a_newer_node(door, tmp_path, capsys):
    """An edge, also an added reverse, has the time of its source."""
    given = _graph() | {"node_time": np.random.default_rng(0).integers(0, 100, 200)}
    del given["num_classes"]
    symmetrize = door in ("typed", "parquet", "dgl")
    path = _by_door(door, tmp_path, given, symmetrize=symmetrize)
    said = "edges have no times: each gets that of its source (node_time)"
    assert door in ("store", "typed") or said in capsys.readouterr().out
    graph = GraphStore.open(path)
    assert graph.node_time.tolist() == given["node_time"].tolist()
    assert torch.equal(graph.edge_time, graph.node_time[graph.indices.long()])
    words = f"--dataset {path} --gpus 0 --fanout 7,3 --batch-size 20 --model"
    words = f"{words} {'rgcn' if door == 'typed' else 'gin'}".split()
    run = open_run(ddp.Ranks(), train.parse_args(words), path)
    assert "seeds see edges at their own time or before" in capsys.readouterr().out
    for block in itertools.chain(*(b.blocks for b in run.loader(graph.split["train"]))):
        assert (graph.node_time[block.src_nodes] <= block.src_times).all()


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
    _stops(
        capsys,
        f"has no times of edges (edge_time); {anew}",
        f"--dataset {path} --gpus 0 --temporal at",
    )


DAY = np.datetime64("2024-01-31") + np.arange(6)
RING = {
    "edge_index": np.stack([np.arange(6), np.roll(np.arange(6), -1)]),
    "features": np.eye(6, dtype=np.float32),
    "labels": np.arange(6) % 2,
    "split": {"train": np.arange(2), "test": np.arange(2, 4)},
}
DOORS = ["store", "typed", "npz", "csv", "parquet"]
BAD_TIMES = [  # the time of row 3, what is said
    (np.array("NaT", "M8[ns]"), "a missing time"),
    (np.array(-(2**63)), "NaT as a number, a missing time"),
    (np.array(-(2**63) // 10**9), "NaT as a number, a missing time"),
    (np.array(np.nan), "a missing time"),
    (np.array(2.5), "whole numbers are needed"),
    (np.array(1.7e9, "f"), "float32 rounds whole numbers above 16,777,216"),
    (
        np.array("2024-01-31T00:00:00.000000001", "M8[ns]"),
        "microseconds: round it|no time, written as",
    ),
]


@pytest.mark.parametrize("column", ["edge_time", "node_time"])
@pytest.mark.parametrize("door", DOORS)
def test_times_that_are_none_are_refused_by_every_door(door, column, tmp_path):
    for value, said in BAD_TIMES:
        if value.dtype == np.float32 and door == "csv":  # text has no dtype
            continue
        times = {name: np.zeros(6, value.dtype) for name in ("edge_time", "node_time")}
        times[column][3] = value
        row = rf"({column}( of [a,to]+)?\[3\]|line 5: 't'|line 4: 't')"
        _refuses(f"{row} is .*({said})", _by_door, door, tmp_path, RING | times)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("dtype", ["M8[D]", "M8[s]", "M8[ns]", "zoned"])
def test_dates_are_stored_in_microseconds_by_every_door(dtype, door, tmp_path, capsys):
    times = DAY.astype("M8[us]" if dtype == "zoned" else dtype)
    given = {"edge_time": times, "node_time": times}
    if dtype == "zoned" and door == "csv":
        given["edge_time"] = [f"{time}Z" for time in times]
    elif dtype == "zoned" and door == "parquet":
        pa = pytest.importorskip("pyarrow")
        given["edge_time"] = pa.array(times, pa.timestamp("ms", "Europe/Rome"))
    elif dtype == "zoned":
        pandas = pytest.importorskip("pandas")
        given["edge_time"] = pandas.Series(times).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
        if door == "npz":
            return
    graph = GraphStore.open(_by_door(door, tmp_path, RING | given))
    wanted = DAY.astype("M8[us]").astype(int).tolist()
    assert graph.node_time.tolist() == wanted and sorted(graph.edge_time.tolist()) == wanted
    assert graph.meta["time_unit"] == "us"
    assert "time 2024-01-31T00:00:00 to 2024-02-05T00:00:00, nodes' time 2024" in info(graph.path)
    given["node_time"] = np.arange(6)
    said = "edge_time( of a,to,a)? holds dates and node_time( of a)? numbers: give both as dates"
    _refuses(said, _by_door, door, tmp_path, RING | given)
    words = f"--dataset {graph.path} --gpus 0 --epochs 1 --fanout 2 --model rgcn --window {10**12}"
    if door == "typed":
        _says(capsys, f"of the last {10**12} microseconds, in", words)


# times of edges and of seeds, each from the lowest to the highest: what a run makes of them
IN_ONE_UNIT = """
0 1000        0 1000        taken
0 1000        1000 1000     taken
0 1000        1001 1100     taken
0 1000        5000 9000     taken
0 1000        1e6 1e6       taken: the end of time
0 1000        2e18 2e18     taken
0 0           1990 2020     taken: of edges nothing is known
0 1           1990 2020     taken
1990 2015     2016 2020     taken
0 1e5         1e4 2e4       taken
-1e9 1e9      1.6e9 1.7e9   taken
1.6e9 1.601e9 1.7e9 1.701e9 taken
1e8 1.6e9     1.6e9 1.6e9   taken
1.6e9 1.7e9   1.6e12 1.7e12 refused
1.6e18 1.7e18 1.6e9 1.6e9   refused
1.6e18 1.7e18 1.6e15 1.6e15 refused
20100101 20151231 1.6e9 1.7e9 refused
1990 2015     1.6e9 1.7e9   refused
0 1000        1.6e9 1.7e9   refused
0 1000        0 1e6         refused
0 1e6         0 1000        refused
0 1000        0 7e8         refused
16000 18000   1.6e9 1.7e9   refused
"""


@pytest.mark.parametrize("row", IN_ONE_UNIT.strip().splitlines())
def test_times_in_two_units_are_refused(row, tmp_path, capsys):
    """A few nodes without a time, which have 0, change nothing."""
    rng, taken = np.random.default_rng(0), "taken" in row
    low, high, first, last = (int(float(time)) for time in row.split()[:4])
    times = {"edge_time": rng.integers(low, high + 1, 3000)}
    times["node_time"] = rng.integers(first, last + 1, 200)
    times["node_time"][:2] = 0
    path = _store(tmp_path / "g", **times)
    code = _code(f"--dataset {path} --gpus 0 --epochs 1 --fanout 2 --batch-size 100 --model sage")
    out, err = capsys.readouterr()
    assert code == (0 if taken else 2)
    if not taken:
        assert re.search(r"times of edges are .*, of seeds .*; give times in one unit, or", err)
        return
    store = GraphStore.open(path)
    nodes, degrees = store.split["train"], store.indptr.diff()
    late = store.node_time.repeat_interleave(degrees) >= store.edge_time
    seen = late[torch.isin(torch.repeat_interleave(degrees), nodes)].double().mean()
    ends = [int(t) for t in (*store.edge_time.aminmax(), *store.node_time[nodes].aminmax())]
    spans = "times of edges are {} to {}; times of seeds are {} to {}".format(*ends)
    count = int((degrees[nodes] > 0).sum())
    assert f"{count} training seeds see {seen:.1%} of the edges into them; {spans}" in out


def test_of_long_lists_some_edges_stand_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(time_units, "LONG", 4)
    graph = GraphStore.open(_store(tmp_path / "g", edge_time=np.arange(3000)))
    nodes = torch.arange(0, 200, 3)
    places, index, weight = time_units.edges_into(graph, nodes)
    assert len(places) < 5 * len(nodes) < len(graph.indices) / 3
    first, last = graph.indptr[nodes], graph.indptr[nodes + 1]
    assert ((places >= first[index]) & (places < last[index])).all()
    degrees = torch.bincount(index, weight.double(), len(nodes))
    assert ((degrees >= last - first) & (degrees < last - first + weight.max())).all()


def test_seeds_that_see_no_edge_are_refused(tmp_path, capsys):
    given = {"edge_time": np.arange(3000) + 50, "node_time": np.full(200, 40)}
    late = _store(tmp_path / "late", **given)
    given["node_time"] = np.full(200, 9999)
    early = _store(tmp_path / "early", **given)
    links = "--task link --temporal at --batch-size 100"
    words = "--gpus 0 --epochs 1 --fanout 2"
    none = r"none of \d+ training seeds sees an edge into it: times of edges .*; give times in one"
    for path, more, said in (
        (late, "", none + " unit, edges from .*, or --temporal off"),
        (early, "--window 9", none + " unit and a longer --window than 9, edges from"),
    ):
        _stops(capsys, said, f"--dataset {path} {words}", more)
    _says(
        capsys,
        r"training ends of pairs see [\d.]+% of the edges",
        f"--dataset {early} {words}",
        links,
    )


@pytest.mark.parametrize("how", ["--window 80", "--sampler latest", "--temporal before", ""])
def test_a_model_trained_with_times_does_not_predict_without(how, tmp_path, capsys):
    rng = np.random.default_rng(0)
    times = rng.integers(1_600_000_000, 1_600_000_100, 3200)
    given = {"edge_time": times[200:], "node_time": times[:200]}
    path = _store(tmp_path / "g", **given)
    other = _store(tmp_path / "without")
    slower = {name: values * 1000 for name, values in given.items()}
    slower = _store(tmp_path / "slower", **slower)
    file, words = tmp_path / "c.pt", "--gpus 0 --fanout 2 --epochs 1"
    assert _code(f"--dataset {path} {words} --checkpoint {file}", how) == 0
    predict = f"--gpus 0 --resume {file} --predict {tmp_path}/p.npy --dataset"
    _stops(capsys, "has no times of edges (edge_time); --temporal off", f"{predict} {other}")
    assert _code(f"{predict} {other} --temporal off") == 0
    assert _code(f"{predict} {path}") == 0
    assert "times of nodes were" not in capsys.readouterr().out
    assert _code(f"{predict} {slower}") == 0
    said = "the first look like seconds since 1970, the second like milliseconds since 1970"
    assert "times of nodes were 16000000" in (out := capsys.readouterr().out) and said in out
    state = torch.load(file, weights_only=True)  # as checkpoints of before
    del state["graph"]["times"]
    state["flags"]["temporal"] = "auto"
    torch.save(state, file)
    if how[:5] in ("--win", "--sam"):
        _stops(capsys, "--temporal", f"{predict} {other}")


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
        (tiny, "--task graph --sampler weighted", "--sampler weighted is not for --task graph"),
    ):
        _stops(capsys, complaint, f"--dataset {path} --gpus 0", words)
    # exact inference draws nothing: a graph without weights will do
    words = f"--dataset {_store(tmp_path / 'w', edge_weight=np.ones(3000))} --sampler weighted"
    assert _code(f"{words} --gpus 0 --epochs 1 --checkpoint {tmp_path}/w.pt") == 0
    predict = f"--resume {tmp_path}/w.pt --predict {tmp_path}/w.npy --dataset {edges_alone}"
    assert _code(f"{predict} --gpus 0") == 0
