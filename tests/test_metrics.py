"""Tests: tasks/metrics.py, extras/regressor.py, several labels a node."""

import csv
import math
import types

import numpy as np
import pytest
import torch

from disk.files import SPLITS
from extras import regressor
from extras.graph_store import block_diagonal, build_graphs
from extras.graphs import GraphTask
from extras.regressor import ALIGNN, POOLS, Regressor, line_graph
from run.flags import TASKS, make_parser, parsed
from sources.prepare import build
from store import GraphStore, build_store, verify
from tasks import metrics
from tests.common import _code, _graph, _log, _run_here, _same_for_any_number_of_processes, _store
from tests.stores import _graphs, _refuses, _save_npz

OF_GRAPHS = types.SimpleNamespace(
    metric=None, model="edge-gated", max_nodes=None, max_edges=None, typed=(), loss="mse"
)


class _SlowRegressor:
    """The regressor, graph by graph, with sums over edges as matrix products and the fast one's parameters."""

    def __init__(self, fast):
        self.fast = fast

    def __call__(self, graph):
        m, outputs = self.fast, []
        for g in range(len(graph.y)):
            nodes = (graph.graph_ids == g).nonzero()[:, 0]
            edges = torch.arange(graph.indptr[nodes[0]], graph.indptr[nodes[-1] + 1])
            src = graph.indices[edges].long() - nodes[0]
            dst = torch.repeat_interleave(graph.indptr.diff()[nodes])
            into = torch.nn.functional.one_hot(dst.long(), len(nodes)).T.float()  # [nodes, edges]
            h = self.enter(m.nodes, graph.x[nodes])
            e = self.enter(m.edges, graph.e[edges])
            for layer in m.layers:
                own, message, gate_src, gate_dst = layer.nodes(h).chunk(4, 1)
                gates = layer.edges(e) + gate_src[src] + gate_dst[dst]
                shares = torch.sigmoid(gates)
                mixed = into @ (shares * message[src])
                if m.pooling == "mean":
                    mixed = mixed / (into @ shares + 1e-6)
                h = h + torch.nn.functional.silu(layer.node_norm(own + mixed))
                if layer.edge_norm:
                    e = e + torch.nn.functional.silu(layer.edge_norm(gates))
            pooled = h.amax(0) if m.pooling == "max" else h.mean(0)
            if m.pooling == "sum":
                pooled = h.sum(0) / 4
            if m.pooling == "attention":
                pooled = m.scores(h).softmax(0).T[0] @ h
            outputs.append(m.head(pooled) * m.std + m.mean)
        return torch.stack(outputs)

    def enter(self, module, rows):
        if rows.dtype == torch.uint8:
            columns = enumerate(rows.long().unbind(1))
            return sum(module.table.weight[256 * i + values] for i, values in columns)
        return module(rows)


@pytest.mark.parametrize("pooling", POOLS)
def test_regressor_equals_a_reference_edge_by_edge(pooling):
    graph = _graphs(7)
    other = _graphs(4, first=7)
    torch.manual_seed(0)
    dtypes = {"node_dtype": torch.uint8, "edge_dtype": torch.float32}
    ours = Regressor(2, 3, 8, 2, **dtypes, num_layers=3, dropout=0.0, pooling=pooling)
    if pooling == "sum":
        ours.size.fill_(4)
    ours.mean = torch.tensor([1.0, 2.0])
    ours.std = torch.tensor([3.0, 0.5])
    torch.testing.assert_close(ours(graph), _SlowRegressor(ours)(graph), rtol=1e-4, atol=1e-5)
    gradients = []
    for run in (ours, _SlowRegressor(ours)):
        ours.zero_grad()
        run(graph).square().sum().backward()
        # and every parameter takes part
        gradients.append([p.grad.clone() for p in ours.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
    assert torch.cat([ours(graph), ours(other)]).shape == (11, 2)


def test_regressor_in_bf16_loses_no_terms():
    """Sums over 2,000 nodes and edges; in bfloat16 itself most of their terms were lost."""
    n, gradients = 2000, []
    edges = torch.stack([torch.arange(n), torch.zeros(n).long()])  # to node 0, and back
    x = torch.ones(n, 2).byte()
    e = torch.ones(2 * n, 2).byte()
    y = torch.ones(1, 2)
    graph = block_diagonal([n], [2 * n], torch.cat([edges, edges.flip(0)], 1), x=x, e=e, y=y)
    torch.manual_seed(0)
    kinds = {"node_dtype": torch.uint8, "edge_dtype": torch.uint8}
    net = Regressor(2, 2, 8, 2, **kinds, num_layers=3, dropout=0.0)
    for low in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            net(graph).float().square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    size = max(grad.norm() for grad in gradients[0])
    for exact, rounded in zip(*gradients):
        assert (exact - rounded).norm() < 0.05 * exact.norm() + 0.01 * size


def test_dropout_of_the_regressor_goes_by_key_and_graph():
    """So a GPU drops the same, and each of several processes its part: no generator of torch is asked."""
    graph = _graphs(7)
    ids = torch.tensor([8, 3, 0, 5, 11, 2, 9])
    kinds = {"node_dtype": torch.uint8, "edge_dtype": torch.float32}
    net = Regressor(2, 3, 64, 2, **kinds, num_layers=2, dropout=0.5)
    seen = []
    net.head[3].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    alone = block_diagonal([1], [0], [[], []], x=graph.x[:1], e=graph.e[:0], y=graph.y[:1])
    for key in (5, 5, 6):
        net(graph, ids, key)
    net(alone, ids[3:4], 5)
    net.eval()(graph, ids, 5)
    *dropped, full = seen
    first, again, other, one = (rows != 0 for rows in dropped)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first[3:4], one) and 0.3 < first.double().mean() < 0.7
    assert len(first.unique(dim=0)) == 7
    assert (full != 0).all() and torch.allclose(seen[0], 2 * full * first, rtol=1e-5)


def _bent(cosines=(0.0, 0.5), seed=0):
    """Return two molecules of three unit bonds at an atom, the angles with these cosines, the rest random."""
    random = np.random.default_rng(seed)
    vectors = []
    for cosine in cosines:
        way = [[1.0, 0, 0], [cosine, (1 - cosine**2) ** 0.5, 0], [0, 0, 1.0]]
        vectors += [v for bond in way for v in (bond, np.negative(bond))]
    ends = [[0, 1, 0, 2, 0, 3], [1, 0, 2, 0, 3, 0]]
    x = random.integers(0, 9, (8, 2), np.uint8)
    e = np.ones((12, 1), np.float32)
    batch = block_diagonal(
        [4, 4], [6, 6], np.tile(ends, 2), x=x, e=e, y=np.ones((2, 1)), edge_vector=vectors
    )
    return batch._replace(edge_vector=batch.edge_vector.double())


def _alignn(network=ALIGNN):
    torch.manual_seed(0)
    kinds = {"node_dtype": torch.uint8, "edge_dtype": torch.float32}
    return network(2, 1, 8, 1, **kinds, num_layers=2, dropout=0.0)


@pytest.mark.parametrize("compiled", [True, False])
def test_line_graph_is_that_of_brute_force(compiled, monkeypatch):
    """Also where bonds join the same atoms by several images, atoms to their own image, and bonds lack a way back."""
    if not compiled:
        monkeypatch.setattr(regressor, "library", lambda name: None)
    random = np.random.default_rng(0)
    for n, count in ((1, 3), (5, 30), (9, 0), (9, 12)):
        ends = random.integers(0, n, (2, count))
        vectors = random.integers(-2, 3, (count, 3)) / 3.0
        back = slice(count // 2)
        ends = np.concatenate([ends, ends[::-1, back]], 1)
        vectors = np.concatenate([vectors, -vectors[back] * (1 + 1e-6)])
        M = len(vectors)
        rows = {"x": np.ones((n, 1)), "e": np.ones((M, 1)), "y": np.ones((1, 1))}
        graph = block_diagonal([n], [M], ends, edge_vector=vectors, **rows)
        src = graph.indices.tolist()
        dst = torch.repeat_interleave(graph.indptr.diff()).tolist()
        r = graph.edge_vector
        expected = [
            (a, b)
            for b in range(M)
            for a in range(M)
            if dst[a] == src[b]
            and not (src[a] == dst[b] and torch.allclose(r[a], -r[b], atol=1e-5))
        ]
        first, second = line_graph(graph.indptr, graph.indices, r)
        assert first.dtype == second.dtype == torch.int32
        assert [*zip(first.tolist(), second.tolist())] == expected
    without = _graphs(3)._replace(e=torch.ones(13, 1))
    _refuses(r"edge_vector has shape \[13, 0\]: \[13, 3\] is", _alignn(), without)


def test_gradients_of_alignn_by_finite_differences():
    net = _alignn().double()
    graph = _bent()
    vectors = graph.edge_vector.requires_grad_()

    net.edges.register_forward_pre_hook(lambda module, args: args[0].double())
    names = ["angles.0.weight", "lines.0.nodes.weight", "lines.1.edges.bias", "layers.1.nodes.bias"]
    parameters = [dict(net.named_parameters())[name] for name in names]
    run = lambda vectors, *_: net(graph._replace(edge_vector=vectors))  # noqa: E731
    assert torch.autograd.gradcheck(run, (vectors, *parameters), eps=1e-6, atol=1e-6)


def test_alignn_sees_angles_and_no_rotation():
    net, plain = _alignn(), _alignn(Regressor)
    graph, bent = (
        g._replace(edge_vector=g.edge_vector.float()) for g in (_bent(), _bent((0, -0.5)))
    )
    turn, _ = torch.linalg.qr(torch.randn(3, 3))
    turned = graph._replace(edge_vector=graph.edge_vector @ turn)
    torch.testing.assert_close(net(turned), net(graph), rtol=1e-5, atol=1e-5)
    change = (net(bent) - net(graph)).abs().flatten()
    assert change[0] == 0 and change[1] > 1e-4 and torch.equal(plain(bent), plain(graph))
    # of one element, and all bonds alike
    same = [g._replace(x=torch.ones_like(g.x)) for g in (bent, graph)]
    assert (net(same[0]) - net(same[1])).abs()[1] > 1e-4


def test_float64_targets_keep_their_digits(tmp_path):
    """The rounding of a constant one to float32 is no error; others are scored as they are."""
    y = torch.tensor([[0.1, 1e8 + 1 + i] for i in range(7)], dtype=torch.float64)
    batch = _graphs(7)._replace(y=y)
    path = build_graphs(tmp_path / "g", [batch], split={"train": range(6), "test": [6]})
    task = GraphTask(OF_GRAPHS, path)
    scale = types.SimpleNamespace(std=task.std[:1].float())
    assert not task.labels and task.loss(scale, task.mean[:1].float(), y[:, :1]) == 0
    words = f"--task graph --dataset {tmp_path}/g --gpus 0 --hidden 8 --epochs 1"
    scores = _run_here(tmp_path, words)[0][-1]["scores"]["train"]
    assert scores["rmse_of_the_mean"] == pytest.approx((35 / 24) ** 0.5)  # of both
    assert scores["rmse"] > 1  # of outputs in float32


def _pairs(score, y):
    """Return ROC-AUC as the share of pairs in the right order; ties count half."""
    return np.mean([(a > b) + (a == b) / 2 for a in score[y == 1] for b in score[y == 0]])


def test_metrics_are_what_their_definitions_say():
    """By scikit-learn's definitions, with ties and absent classes."""
    random, near = np.random.default_rng(0), pytest.approx
    dice = lambda a, b: 2 * (a & b).sum().item() / (a.sum() + b.sum()).item()  # noqa: E731
    for _ in range(30):
        n = int(random.integers(3, 30))
        C = int(random.integers(3, 6))
        logits = torch.from_numpy(random.integers(-3, 4, (n, C))).double()
        y = torch.from_numpy(random.integers(0, C - 1, n))
        y[0] = 0
        several = torch.from_numpy(random.integers(0, 2, (n, C)))
        several[0, :2], several[1, :2] = 1, 0
        found = logits.argmax(1)
        on = logits > 0
        plain = [dice(found == c, y == c) for c in {*found.tolist(), *y.tolist()}]
        two = logits[:, :2]
        target = several[:, 0]

        def auc(score, y):
            return near(np.mean([_pairs(*of) for of in zip(score.T, y.T) if 0 < of[1].sum() < n]))  # noqa: B023

        for metric, rows, labels, expected in (
            ("f1", logits, y, near(np.mean(plain))),
            ("accuracy", logits, y, near((found == y).double().mean().item())),
            ("f1", logits, several, near(dice(on, several > 0), rel=1e-12)),
            ("accuracy", logits, several, near((on == several).double().mean().item())),
            ("roc_auc", logits, several, auc(logits, several)),
            ("roc_auc", 99 * two, target, near(_pairs(two.diff()[:, 0], target))),
        ):
            assert metrics.score(metric, rows, labels) == expected, metric
        if y.any():  # one against the rest
            expected = auc(logits.softmax(1), torch.nn.functional.one_hot(y, C))
            assert metrics.score("roc_auc", logits, y) == expected
        recall = total = 0
        score = logits[:, 0]
        for threshold in sorted(set(score.tolist()), reverse=True):
            taken = score >= threshold
            precision, before = target[taken].double().mean().item(), recall
            recall = target[taken].sum().item() / target.sum().item()
            total += precision * (recall - before)
        assert metrics.average_precision(score, target) == near(total)
    expected = {"mrr": 1.65 / 4, "hits@1": 0.25, "hits@10": 0.75}
    assert metrics.ranking(torch.tensor([1.0, 2, 10, 20])) == near(expected)
    none = metrics.ranking(torch.zeros(0))
    assert none == dict.fromkeys(expected)
    assert metrics.scores_line(none | {"ap": 0.5}) == "MRR n/a  Hits@1 n/a  Hits@10 n/a  AP 0.5000"
    large = torch.tensor([[3e30], [-1e30]])  # whose squares are beyond float32
    two_rows = {"rmse": 5**0.5 * 1e30, "mae": 2e30, "r2": None, "rmse_of_the_mean": 3e30}
    assert metrics.errors(large, 0 * large, large[0]) == near(two_rows)
    targets = torch.from_numpy(random.standard_normal((9, 3)) * [1, 9, 0] + 0.1)  # one is constant
    targets[4, 0] = torch.nan
    of = metrics.errors(0 * targets.nan_to_num(), targets, targets[0])
    r2 = [-(a.nanmean() ** 2) / ((a - a.nanmean()) ** 2).nanmean() for a in targets.T[:2]]
    assert of["r2"] == near(np.mean(r2))
    assert metrics.score("f1", logits[:0], y[:0]) is None
    assert math.isnan(metrics.roc_auc(logits[:, 0], torch.ones(n)))
    assert metrics.score("roc_auc", logits, y * 0) is None  # of one class


def test_missing_labels_and_targets_are_left_out_of_loss_and_score():
    """Each row's mean, each label's ROC-AUC, every other figure is of those present; without missing ones to the bit."""
    random, near = np.random.default_rng(0), pytest.approx
    logits = torch.from_numpy(random.standard_normal((40, 4)))
    y = torch.from_numpy(random.integers(0, 2, (40, 4)))
    plain = torch.nn.functional.binary_cross_entropy_with_logits
    one_by_one = plain(logits, y.double(), reduction="none")
    assert metrics.binary_cross_entropy(logits, y) == one_by_one.mean(1).sum()
    missing = torch.from_numpy(random.random((40, 4)) < 0.3)
    missing[5], missing[:, 2] = True, True
    some = y.masked_fill(missing, -1)
    here = ~missing
    rows = [row[kept].mean().item() for row, kept in zip(one_by_one, here) if kept.any()]
    logits.requires_grad_()
    loss = metrics.binary_cross_entropy(logits, some)
    loss.backward()
    assert loss.item() == near(sum(rows)) and not logits.grad[missing].any()
    logits = logits.detach()
    each, each_y = logits[here][:, None], y[here][:, None]
    for metric in ("accuracy", "f1"):
        assert metrics.score(metric, logits, some) == near(metrics.score(metric, each, each_y))
    auc = [_pairs(logits[here[:, c], c], y[here[:, c], c]) for c in (0, 1, 3)]
    assert metrics.score("roc_auc", logits, some) == near(np.mean(auc))
    classes = y.sum(1).clamp(max=3)
    known = here[:, 0]
    for metric in ("accuracy", "f1", "roc_auc"):
        assert metrics.score(metric, logits, some * 0 - 1) is None
        known_score = metrics.score(metric, logits[known], classes[known])
        assert metrics.score(metric, logits, classes.where(known, -1)) == known_score
    numbers = logits.masked_fill(missing, float("nan"))
    found = metrics.errors(torch.zeros(40, 4), numbers, torch.ones(4))
    expected = metrics.errors(0 * each, each, torch.ones(1))
    assert found == near(expected | {"r2": found["r2"]})  # which is of each target


def test_missing_targets_of_graphs(tmp_path):
    """Mean, deviation and loss are of those present; a target that no training graph has is refused."""
    y = _graphs(7).y.double()
    y[1, 0], y[4], y[6, 1] = torch.nan, torch.nan, torch.nan
    said = []

    def task(name):
        graphs = [_graphs(7)._replace(y=y)]
        split = {"train": range(5), "test": [5, 6]}
        return GraphTask(OF_GRAPHS, build_graphs(tmp_path / name, graphs, split=split), said.append)

    some = task("some")
    assert "targets 2 a graph; 4 of 14 are missing, 1 of 7 graphs left out" in said[0]
    assert some.store.split["train"].tolist() == [0, 1, 2, 3]
    columns = y[[0, 2, 3], 0], y[:4, 1]
    assert some.mean.tolist() == pytest.approx([column.mean().item() for column in columns])
    assert some.std.tolist() == pytest.approx([c.std(correction=0).item() for c in columns])
    output = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    loss = some.loss(some, output, y[:5])
    loss.backward()
    parts = ((output - y[:5]) / some.std).square()
    by_hand = parts[[0, 2, 3]].mean(1).sum() + parts[1, 1]
    assert loss.item() == pytest.approx(by_hand.item())
    assert output.grad.isfinite().all() and not output.grad[y[:5].isnan()].any()
    y[:5, 1] = torch.nan
    _refuses("no training graph has a target 1 of 2", task, "none")


def test_train_several_labels_a_node(tmp_path, capsys):
    """BCE, micro-F1 by default; predictions are 0 and 1, or probabilities; 1 and 2 processes agree."""
    rng = np.random.default_rng(0)
    y = (rng.random((600, 5)) < 0.3).astype(np.int64)
    x = (y + rng.normal(size=y.shape)).astype(np.float32)  # with noise, and neighbours are alike
    alike = [rng.choice(np.flatnonzero((y == row).all(1)), 4) for row in y]
    edges = np.stack([np.concatenate(alike), np.repeat(np.arange(600), 4)])
    y[-7:] = -1  # nodes without labels, and with some
    y[:60, 1], y[450:460, 3] = -1, -1
    split = {"train": range(300), "valid": range(300, 400), "test": range(400, 593)}
    bare = {"edge_index": edges, "features": x}
    for name, labels in {
        "several": {"labels": y, "split": split},
        "none": {},
        "plain": {"labels": y[:, 0], "split": split},
        "unsplit": {"labels": y},
    }.items():
        build_store(tmp_path / name, **bare, **labels, symmetrize=True)
    graph = GraphStore.open(tmp_path / "several")
    assert graph.labels.dtype == torch.int8 and graph.labels.tolist() == y.tolist()
    assert graph.num_classes == 5 and not verify(graph.path)
    words = f"--dataset {graph.path} --fanout 5,5 --hidden 16 --lr 0.01 --early-stop 8"
    _same_for_any_number_of_processes(tmp_path, words, [(1, 60, 1), (2, 30, 1)], epochs=8)
    log = _log(tmp_path / "log0")
    exact = log[-1]["exact"]["test"]
    assert log[-2]["loss"] < log[0]["loss"] < 0.8 and exact > 0.7
    found = torch.from_numpy(np.load(tmp_path / "0.npy"))
    right = graph.labels[400:593].long()
    here = right >= 0
    f1 = metrics.f1(found[400:593] * here, right * here)
    assert found.dtype == torch.int8 and f1 == pytest.approx(exact)
    again = f"--resume {tmp_path}/0.pt --predict-what scores --gpus 0 --predict {tmp_path}/s.npy"
    # of a graph without labels the same
    for name in ("several", "none", "unsplit"):
        assert _code(f"{again} --dataset {tmp_path}/{name}") == 0
        scores = np.load(tmp_path / "s.npy")
        assert scores.dtype == np.float32 and 0 < scores.min() < scores.max() < 1
        assert ((scores > 0.5) == found.numpy()).all()
    for words, said in (
        (
            f"--gpus 0 --dataset {tmp_path}/unsplit",
            "no split, and none is drawn for several labels",
        ),
        (f"{again} --dataset {tmp_path}/plain", "of several labels a node, "),
    ):
        assert _code(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("metric", ["roc_auc", "f1"])
def test_train_by_another_metric(metric, tiny, tmp_path):
    """Validation, early stopping and the final score use it; scores are the softmax of logits."""
    words = f"--dataset {tiny} --fanout 3,3 --hidden 16 --batch-size 100 --lr 0.02 --epochs 40"
    words += f" --metric {metric} --early-stop 2 --predict {tmp_path}/s.npy --predict-what scores"
    log, _ = _run_here(tmp_path, words)
    valid = [entry["valid_sampled"] for entry in log[:-1]]
    assert np.argmax(valid) == len(valid) - 3 < 37
    graph = GraphStore.open(tiny)
    scores = torch.from_numpy(np.load(tmp_path / "s.npy"))
    assert torch.allclose(scores.sum(1), torch.ones(3000), atol=1e-5)
    for part, nodes in graph.split.items():
        expected = metrics.score(metric, scores[nodes].log(), graph.labels[nodes])
        assert log[-1]["exact"][part] == pytest.approx(expected, abs=1e-5)


def test_a_roc_auc_that_is_not_defined(tmp_path, capsys):
    """In validation it is refused before training; in another part it is left out."""
    graph = _graph(num_nodes=60, classes=2)
    one = np.flatnonzero(np.asarray(graph["labels"]) == 1)
    same = one[-9:]
    rest = np.setdiff1d(np.arange(60), one[-9:])
    for name, valid, test in (("bad", same, rest[:20]), ("good", rest[:20], same)):
        split = {"train": rest[20:], "valid": valid, "test": test}
        build_store(tmp_path / name, **(graph | {"split": split}))
    words = "--fanout 2 --epochs 1 --gpus 0 --metric roc_auc"
    words += f" --log {tmp_path}/log --dataset {tmp_path}"
    assert _code(f"{words}/bad") == 2 and "the validation nodes of" in capsys.readouterr().err
    assert _code(f"{words}/good --runs 2") == 0
    assert _log(tmp_path / "log")[-1]["mean"].keys() == {"train", "valid"}


def test_labels_of_several_a_node_that_cannot_be_meant(tmp_path, capsys):
    y = np.random.default_rng(0).integers(0, 2, (200, 3))
    number = np.arange(600).reshape(200, 3)
    rows = np.arange(200)[:, None]
    for message, labels in {
        r"labels\[5, 1\] is 2: several .* are each 0 or 1": np.where(number == 16, 2, y),
        r"labels\[0, 2\] is -2: several .*, or -1 for a missing one": np.where(number == 2, -2, y),
        "labels: several .*: there is no 0": 2 * y - 1,
        "labels: none of the 200 nodes has a label": y * 0 - 1,
        r"labels has shape \[200, 3, 1\]": y[:, :, None],
        "'train' holds node 0, which has no label": np.where(rows, y, -1),
    }.items():
        _refuses(message, _store, tmp_path / "s", labels=labels, num_classes=None)
    _save_npz(tmp_path / "d.npz", y=y)
    build(tmp_path / "d.npz", tmp_path / "unsplit")
    assert "it has no split, and none is drawn of nodes with" in capsys.readouterr().out
    said = "several labels each need a split of their own"
    _refuses(said, build, tmp_path / "d.npz", tmp_path / "s", seed=3)


def test_class_weights_balance_the_classes_of_training_nodes(tiny, capsys):
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 0, 1, -1, 1])
    weight = torch.tensor([5 / 6, 5 / 4, 0.0])
    loss = metrics.cross_entropy(logits, y, weight)
    by_hand = -logits.log_softmax(1)[torch.arange(6), y] * weight.double()[y]
    assert torch.allclose(loss, by_hand[y >= 0].sum())
    words = f"--dataset {tiny} --gpus 0 --fanout 2,2 --epochs 1 --class-weights balanced".split()
    task = TASKS["node"](parsed(make_parser(), words), str(tiny), print)
    weights = task.balanced(print)
    classes = task.store.labels[task.store.split["train"]]
    parts = weights * classes.bincount(minlength=len(weights))
    assert parts.sum().item() == pytest.approx(len(classes))
    assert torch.allclose(parts[parts > 0], parts[parts > 0][:1])  # each has the same part
    capsys.readouterr()
    assert _code(*words) == 0 and "loss    a node weighs " in capsys.readouterr().out
    assert _code(*words, "--task link") == 2 and "have no classes" in capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_the_report_by_class_is_that_of_scikit_learn(several, tmp_path, capsys):
    """Of the predictions of the test score; a class that is never predicted, and labels that are missing for some."""
    sklearn = pytest.importorskip("sklearn.metrics")
    rng, more = np.random.default_rng(1), {}
    if several:
        more["labels"] = rng.integers(0, 2, (300, 4))
        more["labels"][rng.random((300, 4)) < 0.2] = -1
    given = _graph(num_nodes=300, width=8, classes=6) | more | {"num_classes": None}
    known = (given["labels"].reshape(300, -1) >= 0).any(1)
    parts = np.array_split(rng.permutation(np.flatnonzero(known)), 3)
    path = build_store(tmp_path / "g", **given | {"split": dict(zip(SPLITS, parts))})
    metric = "balanced_accuracy"
    words = f"--dataset {path} --gpus 0 --fanout 3,3 --epochs 2 --checkpoint {tmp_path}/r.pt"
    assert _code(words, f"--metric {metric} --log {tmp_path}/log") == 0
    words = f"--resume {tmp_path}/r.pt --gpus 0 --predict {tmp_path}/p.npy --report"
    assert _code(words, f"{tmp_path}/r.csv") == 0
    assert "nothing is trained" in capsys.readouterr().out
    predicted = np.load(tmp_path / "p.npy")
    with open(tmp_path / "r.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    C = given["labels"].shape[1] if several else 6
    assert [row["part"] for row in rows] == [part for part in SPLITS[::-1] for _ in range(C)]
    for part, ids in zip(SPLITS, parts):
        y, pred = given["labels"][ids], predicted[ids]
        of_part = [row for row in rows if row["part"] == part]
        matrix = np.array([[int(row[f"as {j}"]) for j in range(C)] for row in of_part])
        if not several:
            assert np.array_equal(matrix, sklearn.confusion_matrix(y, pred, labels=range(C)))
            found = _log(tmp_path / "log")[-1]["exact"][part]
            assert found == pytest.approx(sklearn.balanced_accuracy_score(y, pred))
        for j, row in enumerate(of_part):
            known = y[:, j] >= 0 if several else np.ones(len(y), bool)
            one = (y[known, j], pred[known, j]) if several else (y == j, pred == j)
            expected = sklearn.precision_recall_fscore_support(*one, labels=[1], zero_division=0)
            names = "precision", "recall", "f1", "count"
            assert [float(row[n]) for n in names] == pytest.approx([float(x[0]) for x in expected])
            (_, fp), (fn, tp) = sklearn.confusion_matrix(*one, labels=[0, 1])
            assert (matrix[j, j], int(row["predicted"]), int(row["count"])) == (
                tp,
                tp + fp,
                tp + fn,
            )
