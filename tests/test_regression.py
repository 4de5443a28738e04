"""Tests: numbers as labels of nodes."""

import numpy as np
import pytest
import torch

from inference import inference
from run.checkpoint import load_model
from sources.prepare import build
from store import GraphStore, build_store
from tests.common import _code, _log, _run_here, _stops, _train
from tests.stores import _events, _refuses

WORDS = "--gpus 0 --fanout 4,4 --batch-size 64 --lr 0.03"
BUILT_IN = "--hidden 16 --dropout 0 --model"
NET = """
from model import SAGEConv, nn

class Net(nn.Module):
    def __init__(self, in_dim, num_outputs):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(in_dim, 16), SAGEConv(16, num_outputs)])

    def forward(self, blocks, x):
        first, last = self.convs
        return last(blocks[1], first(blocks[0], x).relu())
"""


def _numbers(nodes=400, edges=3000):
    """A graph of three targets: of neighbours' features in large numbers, a small one that is missing for some with an outlier,
    and a constant one."""
    rng = np.random.default_rng(3)
    x, ends = rng.normal(size=(nodes, 6)).astype("f4"), rng.integers(0, nodes, (2, edges))
    ends[1, :nodes] = np.arange(nodes)
    mean = np.zeros(nodes)
    np.add.at(mean, ends[1], x[ends[0], 1])
    mean /= np.bincount(ends[1], minlength=nodes)
    y = np.stack([2e4 + 500 * (x[:, 0] + mean), 1e-3 * x[:, 2], np.full(nodes, 0.1)], 1)
    y[7, 1], y[rng.random(nodes) < 0.2, 1] = 5.0, np.nan
    parts = np.split(rng.permutation(nodes), [200, 300])
    split = dict(zip(("train", "valid", "test"), parts))
    return {"edge_index": ends, "features": x, "targets": y, "split": split}


def _by_sklearn(y, predicted):
    metrics = pytest.importorskip("sklearn.metrics")
    known = ~np.isnan(y)
    varied = [j for j in range(y.shape[1]) if np.nanstd(y[:, j]) > 1e-12]
    r2 = [metrics.r2_score(y[known[:, j], j], predicted[known[:, j], j]) for j in varied]
    flat = y[known], predicted[known]
    return {
        "rmse": metrics.root_mean_squared_error(*flat),
        "mae": metrics.mean_absolute_error(*flat),
        "r2": np.mean(r2),
    }


def _learns(tmp_path, path, *words, least):
    """Train for 30 epochs, compare the scores with scikit-learn's from predictions of the resumed checkpoint, and the weights
    with those of a run in two parts -> predictions."""
    store, file = GraphStore.open(path), tmp_path / "p.npy"
    words = f"--dataset {path} {WORDS} --weights last", *words
    log, straight = _run_here(tmp_path, *words, "--epochs 30")
    assert {"rmse", "mae", "r2"} <= log[0]["valid"].keys() and log[0]["loss"] > 1.3 * log[29][
        "loss"
    ]
    own = [word for word in " ".join(words).split() if ".py:" in word]
    resume = f"--resume {tmp_path}/here.pt --gpus 0", *[f"--model {word}" for word in own]
    assert _code(*resume, f"--predict {file}") == 0
    predicted = np.load(file)
    for part, ids in store.split.items():
        expected = _by_sklearn(store.labels[ids].numpy(), predicted[ids])
        scores = {name: log[-1]["scores"][part][name] for name in expected}
        assert scores == pytest.approx(expected, rel=1e-5), part
        assert expected["r2"] > least, part
    _run_here(tmp_path, *words, "--epochs 7")
    _, resumed = _run_here(tmp_path, *resume, "--epochs 30")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    return predicted


@pytest.mark.parametrize(
    "words, least",
    [
        (f"{BUILT_IN} sage", 0.8),
        (f"{BUILT_IN} gcn --residual --loss mae --metric mae", 0.5),
        (f"{BUILT_IN} gat --norm layer", 0.3),
        ("--model OWN", 0.8),
    ],
)
def test_targets_of_nodes_are_learned_in_their_units(words, least, tmp_path):
    """Several columns, missing ones, an outlier, a constant one; resumed, exact, by networks of files."""
    (tmp_path / "net.py").write_text(NET)
    path = build_store(tmp_path / "g", **_numbers())
    words = words.replace("OWN", f"{tmp_path}/net.py:Net")
    predicted = _learns(tmp_path, path, words, least=least)
    assert np.abs(predicted[:, 2] - 0.1).max() < 1e-6  # the constant one
    if "OWN" not in words and "net.py" not in words:
        store = GraphStore.open(path)
        graph = store.indptr, store.indices, store.features.tensor
        exact = inference(load_model(tmp_path / "here.pt"), *graph)
        np.testing.assert_allclose(exact, predicted, rtol=1e-5, atol=1e-5)


def test_targets_with_types_and_times_are_learned(tmp_path, capsys):
    """Of the nodes of one type; at times; by two processes as by one."""
    given = _numbers()
    times = _events(400, 3000)
    timed = {name: times[name] for name in ("edge_time", "node_time")}
    timed["node_time"] = timed["node_time"] + 100
    path = build_store(tmp_path / "timed", **given, **timed)
    _learns(tmp_path, path, BUILT_IN, "sage", least=0.8)
    losses = []
    for procs, size in ((1, 64), (2, 32)):
        words = f"--procs {procs} --batch-size {size} --epochs 2 --precision fp64"
        _train(f"--dataset {path} {WORDS} {words} --log {tmp_path}/log{procs}")
        losses.append([entry["loss"] for entry in _log(tmp_path / f"log{procs}")[:2]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    ends = given.pop("edge_index")
    typed = {name: {"house": given[name]} for name in ("features", "targets")}
    typed |= {"node_types": {"house": 400, "street": 400}, "split": given["split"]}
    edges = {("house", "in", "street"): ends, ("street", "of", "house"): ends[::-1]}
    edges["house", "near", "house"] = ends
    path = build_store(tmp_path / "typed", edge_index=edges, **typed)
    labels = GraphStore.open(path).labels
    assert labels[:400].isfinite().any(1).all() and labels[400:].isnan().all()
    _learns(tmp_path, path, BUILT_IN, "rgcn", least=0.5)


def test_targets_from_tables_are_predicted_by_name(tmp_path, capsys):
    """On a graph without targets too; nodes that the table does not name have none."""
    given = _numbers()
    names = [f"h{i}" for i in range(400)]
    tables = {
        "edges.csv": [("src", "dst"), *((names[a], names[b]) for a, b in given["edge_index"].T)],
        "x.csv": [("id", *"abcdef"), *((n, *x) for n, x in zip(names, given["features"]))],
        "y.csv": [("id", "price", "tax"), *((n, *y[:2]) for n, y in zip(names, given["targets"]))],
    }
    tables["y.csv"] = tables["y.csv"][:300]
    for file, rows in tables.items():
        text = "\n".join(",".join(map(str, row)) for row in rows)
        (tmp_path / file).write_text(text.replace("nan", ""))
    edges, x, y = (tmp_path / file for file in tables)
    _refuses(
        "numbers to learn are --targets FILE", build, edges, tmp_path / "no", features=x, labels=y
    )
    path = build(edges, tmp_path / "g", features=x, targets=y)
    store = GraphStore.open(path)
    assert [len(ids) for ids in store.split.values()] == [241, 29, 29]
    np.testing.assert_array_equal(store.labels[:299], given["targets"][:299, :2])
    _run_here(tmp_path, f"--dataset {path} {WORDS} --epochs 2 --predict {tmp_path}/a.csv")
    bare = build(edges, tmp_path / "bare", features=x)
    resume = f"--resume {tmp_path}/here.pt --gpus 0 --dataset"
    assert _code(resume, bare, f"--predict {tmp_path}/b.csv") == 0
    texts = [(tmp_path / file).read_text() for file in ("a.csv", "b.csv")]
    assert texts[0] == texts[1] and texts[0].startswith('"node","price","tax"\n"h0",')
    classes = {"targets": None, "labels": np.arange(400) % 3}
    classes = build_store(tmp_path / "classes", **{**_numbers(), **classes})
    given["targets"][given["split"]["train"], 2] = np.nan
    unknown = build_store(tmp_path / "unknown", **given)
    _stops(
        capsys,
        "--metric rmse is of targets, and .* has classes",
        resume,
        classes,
        f"--predict {tmp_path}/b.csv",
    )
    for words, said in (
        (f"{path} --metric accuracy", "--metric accuracy is of classes, and .* has targets"),
        (f"{path} --class-weights balanced", "--class-weights balanced is of classes"),
        (f"{path} --predict {y} --predict-what scores", "--predict-what scores is of classes"),
        (unknown, "no training node has a target 2 of 3"),
        (f"{classes} --metric mae", "--metric mae is of targets, and .* has classes"),
        (f"{classes} --loss mae", "--loss mae is of targets, and .* has classes"),
        (f"{path} --task link --loss mae", "--loss mae is of targets of nodes and graphs"),
    ):
        _stops(capsys, said, f"{WORDS} --dataset {words}")
    for changes, said in (
        ({"targets": np.full(400, np.nan)}, "all are NaN: no node has one"),
        ({"targets": np.full(400, 1e39)}, "float32 must hold targets"),
        ({"labels": np.arange(400)}, "give one of them"),
        ({"targets": np.where(np.arange(400) < 399, 1.0, np.nan)}, "which has no label"),
    ):
        _refuses(said, build_store, tmp_path / "no", **{**_numbers(), **changes})
