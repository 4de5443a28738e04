"""Tests: edges of several types: what is drawn of each, the layers that see them, training."""

import numpy as np
import pytest
import torch

from bench.accuracy import read_triples
from loader import Graph, NodeLoader
from model import GNN, RGCNConv, inference
from sampler import NeighborSampler
from store import GraphStore, build_store, info, verify
from tasks.link import split_edges
from tests.common import (
    DATA,
    _dgl,
    _emulated,
    _log,
    _same_for_any_number_of_processes,
    _same_weights,
    _train,
)
from tests.stores import _refuses, _reseal, _rewrite_meta
from tests.test_layers import _with_grads


def _typed_graph(rng, nodes=60, edges=700, types=5):
    """A random multigraph -> indptr, indices, edge_type, edge_index of the same edges."""
    dst, kind = rng.integers(0, nodes - 5, edges), rng.integers(0, types, edges)
    order = np.lexsort((kind, dst))
    dst, kind, src = dst[order], kind[order], rng.integers(0, nodes, edges)
    indptr = np.searchsorted(dst, np.arange(nodes + 1))
    arrays = indptr, src.astype(np.int32), kind.astype(np.uint8), np.stack([src, dst])
    return tuple(map(torch.from_numpy, arrays))


@pytest.fixture(scope="module")
def pointing(tmp_path_factory):
    """Edges of type r lead from class y + r to class y: without types neighbours say nothing."""
    rng = np.random.default_rng(0)
    nodes, edges, classes = 600, 9000, 4
    label, dst = rng.integers(0, classes, nodes), rng.integers(0, nodes, edges)
    kind, src = rng.integers(0, 5, edges), np.empty(edges, int)
    for wanted in range(classes):
        at = np.flatnonzero((label[dst] + kind) % classes == wanted)
        src[at] = rng.choice(np.flatnonzero(label == wanted), len(at))
    x = rng.standard_normal((nodes, 8)).astype(np.float32)
    x[:, :classes] += 1.2 * np.eye(classes)[label]
    arrays = {"edge_index": np.stack([src, dst]), "features": x, "labels": label, "edge_type": kind}
    folder = tmp_path_factory.mktemp("typed")
    np.savez(folder / "typed.npz", **arrays)
    arrays |= {"edge_time": rng.integers(0, 100, edges), "node_time": np.full(nodes, 80)}
    np.savez(folder / "timed.npz", **arrays)
    return folder


FLAGS = "--gpus 0 --fanout 3,3 --hidden 16 --batch-size 50 --lr 0.02 --dropout 0"


@pytest.mark.parametrize("bases, edges", [(0, 700), (3, 700), (0, 90)])
def test_rgcn_equals_dgls(bases, edges):
    """The layer and its gradients on random multigraphs, also where edges of a list are not in the order of types."""
    dgl, rng = _dgl(), np.random.default_rng(bases)
    indptr, indices, kind, (src, dst) = _typed_graph(rng, edges=edges)
    block = NeighborSampler(indptr, indices, [3], edge_type=kind).sample(torch.arange(60), 0)[0]
    assert torch.equal(block.to_dgl().edata[dgl.ETYPE], block.edge_type.long())
    ours, named = RGCNConv(9, 6, 5, bases), {"regularizer": "basis", "num_bases": bases}
    theirs = dgl.nn.RelGraphConv(9, 6, 5, **(named if bases else {}))
    pairs = [(theirs.linear_r.W, ours.weight), (theirs.h_bias, ours.self_linear.bias)]
    pairs += [(theirs.linear_r.coeff, ours.coefficients)] if bases else []
    with torch.no_grad():
        theirs.loop_weight.copy_(ours.self_linear.weight.t())
        for there, here in pairs:
            there.copy_(here)
    graph, each = dgl.graph((src, dst), num_nodes=60), dst * 5 + kind
    norm = 1 / torch.bincount(each)[each].float().unsqueeze(1)  # DGL adds the messages up
    shuffled = torch.from_numpy(np.lexsort((rng.random(len(src)), dst)))
    weight, x = torch.randn(60, 6), torch.randn(60, 9)

    def combine(order):
        lists = indptr.int(), indices[order]
        return lambda h, *_: ours.combine(*lists, h, None, h, types=kind[order])

    found, here = [], [mine for _, mine in pairs]
    for order in (torch.arange(len(src)), shuffled):
        found.append(_with_grads(combine(order), weight, x, *here))
    there = [other for other, _ in pairs]
    wanted = _with_grads(lambda h, *_: theirs(graph, h, kind.long(), norm), weight, x, *there)
    for results in zip(*found, wanted, strict=True):
        for result in results[:2]:
            torch.testing.assert_close(result, results[2], rtol=1e-5, atol=1e-5)


def test_rgcn_on_all_neighbours_is_exact_inference():
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(1))
    options = dict(conv="rgcn", num_types=5, bases=2, num_layers=2, norm="layer")
    net, x = GNN(9, 16, 4, **options).eval(), torch.randn(60, 9)
    blocks = NeighborSampler(indptr, indices, [-1, -1], edge_type=kind).sample(torch.arange(60), 0)
    exact = inference(net, indptr, indices, x, types=kind, chunk=7)
    torch.testing.assert_close(net(blocks, x[blocks[0].src_nodes.long()]), exact)
    with pytest.raises(ValueError, match="conv 'sage' with num_types 5, bases 0: rgcn needs types"):
        GNN(9, 16, 4, num_types=5)


def test_each_type_has_its_share_and_all_together_none():
    """Of a long list each edge of a type is as likely; without types the block tells them all the same."""
    rows = 4000
    kind = torch.tensor([0] * 3 + [1] * 40 + [2] * 7, dtype=torch.uint8)
    indptr, indices = torch.arange(rows + 1) * 50, torch.arange(rows * 50) % rows
    graph, kinds = (indptr, indices), kind.repeat(rows)
    typed = NeighborSampler(*graph, [[5, 10, 0]], edge_type=kinds, edge_ids=True)
    block = typed.sample(torch.arange(rows), 0)[0]
    assert torch.equal(block.edge_type, kind[block.edge_ids % 50])
    assert block.edge_type.view(rows, 13).tolist() == [[0] * 3 + [1] * 10] * rows
    taken = torch.bincount(block.edge_ids % 50, minlength=50)
    assert (taken[:3] == rows).all() and not taken[43:].any()
    z = (taken[3:43] - rows / 4) / (rows * 0.25 * 0.75) ** 0.5
    assert z.abs().max() < 5 and 0.4 < z.square().mean() < 1.8
    for numbers in ([2, 2, 2], [2, 5, 2]):  # more lists than rows are drawn side by side
        same = {"edge_type": kinds.to(torch.uint16), "edge_ids": True}
        samplers = (
            NeighborSampler(*graph, [numbers], **same, backend=b) for b in ("auto", "torch")
        )
        ours, law = (s.sample(torch.arange(rows), 0)[0] for s in samplers)
        assert ours.edge_type.dtype == torch.uint16
        assert all(map(torch.equal, ours[:4], law[:4]))
        assert ours.edge_type.tolist() == law.edge_type.tolist()
    plain = NeighborSampler(*graph, [10], edge_ids=True).sample(torch.arange(rows), 0)[0]
    mixed = NeighborSampler(*graph, [10], edge_type=kinds, by_type=False)
    (mixed,) = mixed.sample(torch.arange(rows), 0)
    assert torch.equal(mixed.indices, plain.indices) and mixed.edge_ids is None
    assert torch.equal(mixed.edge_type, kind[plain.edge_ids % 50])


def test_rgcn_of_no_destination_and_of_unknown_types():
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(5))
    s = NeighborSampler(indptr, indices, [3, 3], edge_type=kind)
    for bases in (0, 2):
        net = GNN(9, 8, 4, conv="rgcn", num_types=5, bases=bases, num_layers=2)
        assert net(s.sample(torch.arange(0), 0), torch.zeros(0, 9)).shape == (0, 4)
        few = GNN(9, 8, 4, conv="rgcn", num_types=3, bases=bases, num_layers=2)
        blocks = s.sample(torch.arange(20), 0)
        with pytest.raises(IndexError, match="types 0 to 4, the layer knows 0 to 2"):
            few(blocks, torch.zeros(blocks[0].num_src, 9))
        with pytest.raises(IndexError, match="the layer knows 0 to 2"):
            inference(few, indptr, indices, torch.zeros(60, 9), types=kind)
        with pytest.raises(ValueError, match="blocks have no edge_type"):
            net([b._replace(edge_type=None) for b in blocks], torch.zeros(blocks[0].num_src, 9))


def test_a_pair_has_the_time_of_its_first_edge_whatever_its_type(tmp_path):
    ends = {"edge_index": [[0, 0, 2], [1, 1, 1]], "edge_type": [0, 1, 0], "edge_time": [50, 10, 30]}
    nodes = {"features": np.zeros((3, 1)), "labels": [0, 0, 0], "split": {"train": [0]}}
    store = GraphStore.open(build_store(tmp_path / "g", **ends, **nodes))
    graph = split_edges(store, "none", timed=True)
    pairs = map(frozenset, graph.pairs["train"].tolist())
    assert dict(zip(pairs, graph.pair_times["train"].tolist())) == {
        frozenset((0, 1)): 10,
        frozenset((1, 2)): 30,
    }


@pytest.mark.parametrize("way", ["torch", "native", "cuda"])
def test_a_type_that_does_not_exist_is_damage(way, tmp_path):
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(2))
    options = dict(edge_type=kind, backend=way.replace("cuda", "torch"), check=False)
    s = NeighborSampler(indptr, indices, [3, 2], **options)
    sample = _emulated(s, tmp_path).sample if way == "cuda" else s.sample
    sample(torch.arange(50), 0, relabel_outer=True)
    kind[300] = 77
    with pytest.raises(IndexError, match="damaged"):
        sample(torch.arange(50), 0, relabel_outer=True)


def test_samplers_of_types_refuse():
    indptr, indices, kind, _ = _typed_graph(np.random.default_rng(3))
    typed, times = {"edge_type": kind}, torch.zeros(700, dtype=torch.int64)
    mixed, wide = {**typed, "by_type": False}, (kind.int() * 9000).to(torch.uint16)
    for said, fanouts, options in (
        ("numbers by type need edge_type", [[3, 2]], {}),
        ("edge_type has 5 types, one number for each", [[3, 2]], typed),
        ("give one number for each hop, positive or -1", [[3, 2, 1, 1, -2]], typed),
        ("-1 .all. is not for replace", [[3, 2, 1, 1, -1]], {**typed, "replace": True}),
        ("edge_type decreases within the list of node", [3], {"edge_type": kind.flip(0)}),
        ("backend 'dgl' has no edge_type", [3], {**typed, "backend": "dgl"}),
        ("which is not for edge_times, as", [3], {**mixed, "edge_times": times}),
        ("nor for numbers by type", [[3] * 5], mixed),
        ("window needs edge_times", [3], {"window": 5}),
        ("window is 2.9: give an int", [3], {"window": 2.9, "edge_times": times}),
        ("window is inf: give an int", [3], {"window": float("inf"), "edge_times": times}),
        ("by_type=False: numbers by type need edge_type", [3], {"by_type": False}),
        ("types above 32767", [3], {"edge_type": wide}),
        ("window is 0: give an int above 0", [3], {"window": 0, "edge_times": times}),
        ("each list by type, then time", [3], {**typed, "edge_times": -torch.arange(700)}),
        ("edge_type must be uint8 or uint16 .M=700., not", [3], {"edge_type": kind.long()}),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            NeighborSampler(indptr, indices, fanouts, **options)
    graph = Graph(indptr, indices, torch.zeros(60, 2), torch.zeros(60, dtype=torch.int64))
    for fanouts, kinds in (([3], True), ([[3] * 5], False)):
        with pytest.raises(ValueError, match="types=True and a graph with edge_type are needed"):
            NodeLoader(graph, torch.arange(9), fanouts, batch_size=3, types=kinds)


def test_stores_with_types_are_checked(tmp_path):
    indptr, indices, kind, ends = _typed_graph(np.random.default_rng(4))
    graph = {"features": np.zeros((60, 2)), "labels": np.zeros(60, int), "split": {"train": [0]}}
    build = lambda name, **more: build_store(tmp_path / name, **graph, **more)  # noqa: E731
    path = build("csc", indptr=indptr, indices=indices, edge_type=kind)
    there = GraphStore.open(path)
    assert torch.equal(there.indices, indices) and torch.equal(there.edge_type, kind)
    assert there.num_edge_types == 5 and "5 types" in info(path)
    for said, bad in (
        ("types are numbered from 0, and there are up to 32,768", kind.long() - 1),
        ("edge_type is a Tensor .3.: an array .700.", kind[:3]),
    ):
        _refuses(said, build, "a", edge_index=ends, edge_type=bad)
    for wrong in ("5", 5.0, True, -1, 1 << 16, [5]):
        _rewrite_meta(path, **there.meta | {"num_edge_types": wrong})
        _refuses("num_edge_types = ", GraphStore.open, path)
    _rewrite_meta(path, **there.meta)
    at = int(indptr[20]) - 1  # the last of a list with several types
    smaller = f"edge {at} is of a smaller type than the one before"
    for value, said in ((0, smaller), (9, "tells of 5")):
        _reseal(path, "edge_type", at, value)
        (problem,) = verify(path)
        assert problem.startswith("edge_type.npy: ") and said in problem


@pytest.mark.parametrize("name, least", [("rgcn", 0.9), ("sage", 0)])
def test_train_learns_from_the_types_of_edges(name, least, pointing, tmp_path):
    """And resumes, predicts, and says what it does with them; sage cannot tell the classes apart."""
    words = f"--dataset {pointing}/typed.npz --root {tmp_path} --model {name} {FLAGS}"
    said = _train(words, f"--epochs 12 --log {tmp_path}/log --checkpoint {tmp_path}/c.pt")
    line = "edges have 5 types; --fanout is for each of them, and the model sees them"
    blind = "types of edges are not used by --model sage: rgcn takes them"
    assert (line if least else blind) in said
    accuracy = _log(tmp_path / "log")[-1]["exact"]["test"]
    assert accuracy > least and (least or accuracy < 0.6)
    again = f"--resume {tmp_path}/c.pt --predict {tmp_path}/p.npy --gpus 0 --root {tmp_path}"
    _train(again)
    arrays = dict(np.load(pointing / "typed.npz"))
    right = np.load(tmp_path / "p.npy") == arrays["labels"]
    assert right.mean() == pytest.approx(accuracy, abs=0.05)
    few = arrays["edge_type"] < 4  # the graph to predict lacks a type
    arrays |= {"edge_index": arrays["edge_index"][:, few], "edge_type": arrays["edge_type"][few]}
    np.savez(tmp_path / "few.npz", **arrays)
    _train(again, f"--dataset {tmp_path}/few.npz")
    assert (np.load(tmp_path / "p.npy") == arrays["labels"]).mean() > least - 0.1
    (path,) = tmp_path.glob("typed-*/edge_type.npy")
    data = bytearray(path.read_bytes())
    data[-1] = 77
    path.write_bytes(bytes(data))
    said = _train(words, "--epochs 1", code=2 if least else 0)
    assert not least or ("damaged" in said and "Traceback" not in said)


OF_TYPES = ["--bases 2", "--task link --edge-split 90/5/5", "--sampler labor"]


@pytest.mark.parametrize("flags", OF_TYPES)
def test_types_are_the_same_for_any_number_of_processes(flags, pointing, tmp_path):
    words = f"--dataset {pointing}/typed.npz --root {tmp_path} --model rgcn {FLAGS} {flags}"
    _same_for_any_number_of_processes(tmp_path, words, [(1, 50, 2), (2, 50, 1)], epochs=2)


def test_types_with_times_in_a_window(pointing, tmp_path):
    words = f"--dataset {pointing}/timed.npz --root {tmp_path} {FLAGS} --epochs 2"
    files = [f"--checkpoint {tmp_path}/{name}.pt" for name in "abc"]
    said = _train(words, "--model rgcn --window 30", files[0])
    assert "at their own time or before it, of the last 30, in every hop" in said
    _train(words, f"--model rgcn --window {10**12}", files[1])  # of nanoseconds, say
    _train(words, "--model rgcn", files[2])
    paths = [tmp_path / f"{name}.pt" for name in "abc"]
    assert _same_weights(*paths[1:]) and not _same_weights(*paths[:2])
    for words_, complaint in (
        ("--model rgcn --fanout any=3,3", "--fanout any= draws from all types together, and"),
        ("--model sage", "has lists by type, then time, and --model sage does not see types"),
    ):
        assert complaint in _train(words, words_, code=2)


def test_aifb_is_read_as_its_paper_counts_it():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    graph = read_triples(DATA)
    assert len(graph["labels"]) == 8285 and graph["edge_index"].shape == (2, 2 * 29043)
    assert graph["edge_type"].max() + 1 == 2 * 45 and set(graph["labels"]) == {-1, 0, 1, 2, 3}
    assert [len(graph[f"{part}_idx"]) for part in ("train", "test")] == [140, 36]
