"""Tests: model.py and inference.py."""

import copy
import errno
import functools
import itertools
import os
import sys
import tempfile
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

import ddp
import inference as by_layers
import model
from extras.relational import RGATConv, RGCNConv
from inference import inference
from model import GNN
from sampler import Block, NeighborSampler
from tests.common import _end, _fork, _random_graph
from tests.stores import _refuses
from tests.test_features import _Rows, _status
from tests.test_layers import MODELS, _net, _with_grads

LAYERS = {
    "sage": model.SAGEConv,
    "sage with edges": functools.partial(model.SAGEConv, edge_dim=11),
    "sage-pool": model.SAGEPoolConv,
    "gcn": model.GCNConv,
    "gcn with edges": functools.partial(model.GCNConv, edge_dim=11),
    "gat": functools.partial(model.GATv2Conv, heads=3),
    "gat, mean": functools.partial(model.GATv2Conv, heads=2, mean=True),
    "gin": model.GINConv,
    "gine": functools.partial(model.GINEConv, edge_dim=11),
    "gat with edges": functools.partial(model.GATv2Conv, heads=2, edge_dim=11),
    "rgcn": functools.partial(RGCNConv, num_types=3),
    "rgcn of many types": functools.partial(RGCNConv, num_types=16),
    "rgcn with bases": functools.partial(RGCNConv, num_types=3, bases=2),
    "rgcn with edges": functools.partial(RGCNConv, num_types=3, edge_dim=11),
    "rgcn with bases and edges": functools.partial(RGCNConv, num_types=3, bases=2, edge_dim=11),
    "rgat": functools.partial(RGATConv, num_types=3),
    "rgat with bases": functools.partial(RGATConv, num_types=3, bases=2),
    "rgat, heads": functools.partial(RGATConv, num_types=3, heads=3, edge_dim=11),
    "rgat, mean": functools.partial(RGATConv, num_types=3, bases=2, heads=2, mean=True),
}


def _layer(name, width, out_dim):
    layer = LAYERS[name](width, out_dim)
    if name == "gat with edges":
        layer.edge_linear = model.Linear(11, out_dim)  # a bias that it has not of itself
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def _by_hand(layer, block, h, e=None):
    """Compute a layer as its paper writes it, one destination at a time."""
    rows, sent = [], torch.bincount(block.indices, minlength=len(h))
    sent[: block.num_dst] += 1  # GCN: every destination is its own neighbour
    for v, (a, b) in enumerate(itertools.pairwise(block.indptr.tolist())):
        ids, none = block.indices[a:b].long(), torch.zeros_like(h[:1])
        near = h[ids]
        edge_term = 0
        if e is not None and isinstance(layer, model.MeanConv) and b > a:
            edge_term = layer.edge_linear(e[a:b]).mean(0)
        if isinstance(layer, model.SAGEPoolConv):
            pooled = layer.pool_linear(near).relu().amax(0) if b > a else none[0]
            rows.append(layer.self_linear(h[v]) + layer.neigh_linear(pooled))
        elif isinstance(layer, model.SAGEConv):
            mean = near.mean(0) if b > a else none[0]
            rows.append(layer.self_linear(h[v]) + layer.neigh_linear(mean) + edge_term)
        elif isinstance(layer, model.GCNConv):
            own = torch.cat([ids, torch.tensor([v])])
            total = (h[own] / sent[own].sqrt().unsqueeze(1)).sum(0) / (b - a + 1) ** 0.5
            rows.append(layer.linear(total) + layer.bias + edge_term)
        elif isinstance(layer, model.GINConv):
            near = near if e is None else (near + layer.edge_linear(e[a:b])).relu()
            rows.append(layer.mlp(((1 + layer.eps) * h[v] + near.sum(0))[None])[0])
        elif isinstance(layer, RGCNConv):
            row, kinds = layer.self_linear(h[v]), block.edge_type[a:b]
            near = near if e is None else torch.cat([near, e[a:b]], 1)
            for r in kinds.unique():
                rows_of_type = near[kinds == r]
                score, heads = torch.zeros(len(rows_of_type), 1), 1
                if isinstance(layer, RGATConv):
                    heads = slice(r * layer.heads, (r + 1) * layer.heads)
                    score = rows_of_type @ layer.key[heads].t() + h[v] @ layer.query[heads].t()
                    heads = layer.heads
                attention = torch.nn.functional.leaky_relu(score, 0.2).softmax(0)
                each = layer.matrices()[r].chunk(heads, 1)
                each = [a @ rows_of_type @ weight for a, weight in zip(attention.t(), each)]
                mean = getattr(layer, "mean", False)
                row = row + (sum(each) / heads if mean else torch.cat(each))
            rows.append(row)
        else:
            K, D = layer.attn.shape
            message = layer.src_linear(torch.cat([h[v : v + 1], near])).view(-1, K, D)
            z = message + layer.dst_linear(h[v]).view(K, D)
            if e is not None:
                loop_edge = e[a:b].mean(0, keepdim=True) if b > a else torch.zeros_like(e[:1])
                z = z + layer.edge_linear(torch.cat([loop_edge, e[a:b]])).view(-1, K, D)
            score = torch.nn.functional.leaky_relu(z, 0.2) * layer.attn
            heads = (score.sum(2).softmax(0).unsqueeze(2) * message).sum(0)
            rows.append(heads.mean(0) if layer.mean else heads.flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("name", LAYERS)
def test_model_layers_are_those_of_their_papers(name):
    """Forward and gradients on a sampled block with empty destinations, for a wide and a narrow input."""
    ids = torch.int32 if "edges" in name or "bases" in name else torch.int64
    graph = _random_graph(np.random.default_rng(8), 120, 5, ids)
    block = NeighborSampler(*graph, [5]).sample(torch.arange(40).to(ids), 0)[0]
    assert (block.indptr.diff() == 0).any()
    block = block._replace(edge_type=torch.arange(block.num_edges) % 3)  # unsorted
    for width, out_dim in ((24, 6), (6, 24)):
        layer, h = _layer(name, width, out_dim), torch.randn(block.num_src, width)
        if "rgcn" in name:  # nothing adds to what its linear map returns
            layer.self_linear.register_full_backward_hook(lambda *given: None)
        e = torch.randn(block.num_edges, 11) if layer.edge_dim else None
        weight, parameters = torch.randn(40, out_dim), [*layer.parameters()]
        given = {"edges": e} if layer.edge_dim else {}
        ours = _with_grads(lambda h, *_: layer(block, h, **given), weight, h, *parameters)
        paper = _with_grads(lambda h, *_: _by_hand(layer, block, h, e), weight, h, *parameters)
        torch.testing.assert_close(ours, paper, rtol=1e-4, atol=1e-5)
        half = {name: e.bfloat16() for name, e in given.items()}
        low = layer.bfloat16()(block, h.bfloat16(), **half)
        assert low.dtype == torch.bfloat16 and (low - ours[0]).norm() < 0.05 * ours[0].norm()


@pytest.mark.parametrize("name", LAYERS)
def test_layers_gradients_of_a_hub_are_as_near_as_torchs(name, monkeypatch):
    """Kernels are as close to float64 as torch's float32, also for a destination with 100,000 edges."""
    layer, hub, N = _layer(name, 5, 6), 100_000, 400
    exact = copy.deepcopy(layer).double()
    indptr, indices = torch.tensor([0, 3, 3, 3 + hub]), torch.randint(N, (3 + hub,))
    types = torch.arange(3 + hub) % 3
    block = Block(indptr.int(), indices.int(), torch.arange(N), edge_type=types)
    h, weight = torch.randn(N, 5), torch.randn(3, layer.out_dim)
    e = torch.randn(3 + hub, 11)

    def grads(layer, dtype=torch.float32):
        given = {"edges": e.to(dtype)} if layer.edge_dim else {}
        inputs = weight.to(dtype), h.to(dtype), *layer.parameters()
        return _with_grads(lambda h, *_: layer(block, h, **given), *inputs)

    kernels = grads(layer)
    monkeypatch.setattr(model, "fused", None)
    for ours, theirs, expected in zip(kernels, grads(layer), grads(exact, torch.float64)):
        room = 1e-5 * expected.norm() + 2 * (theirs - expected).norm()
        assert (ours - expected).norm() <= room


@pytest.mark.parametrize("name", MODELS)
def test_model_inference_is_one_forward_pass_over_the_whole_graph(name, tmp_path, monkeypatch):
    """In chunks, with a hub, isolated nodes and self-loops, in memory or in files, from a tensor or another object."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files, make = [], by_layers._nameless_file
    monkeypatch.setattr(by_layers, "_nameless_file", lambda size: files.append(size) or make(size))
    indptr, indices = _random_graph(np.random.default_rng(11), 90, 5)
    hub = torch.randint(0, 90, (200,), dtype=indices.dtype)
    indices = torch.cat([indices[: indptr[50]], hub, indices[indptr[50] :]])
    indptr, everyone = torch.cat([indptr[:51], indptr[51:] + len(hub)]), torch.arange(90)
    assert (indptr.diff() == 0).sum() > 5 and indptr[-1] == indices.numel()
    x, e, graph = torch.randn(90, 12), torch.randn(indices.numel(), 3), (indptr, indices)
    given = {"edges": e} if "edge_dim" in MODELS[name] else {}
    near = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for widths in ((12, 8, 5), (12, 16, 20)):
        net = _net(name, widths).eval()
        block = Block(indptr.to(indices.dtype), indices, everyone)
        expected = net([block] * 3, x, edges=[e] * 3)
        net.train()
        net.norms.eval()
        in_files = {"chunk": 13, "chunk_edges": 64, "memory": 0}
        for options in ({}, {"chunk": 7}, {"chunk_edges": 20}, in_files):
            near(inference(net, *graph, x, **given, **options), expected)
        rows = _Rows(x.double())
        near(inference(net, *graph, rows, chunk=10, **given), expected)
        assert max(map(len, rows.asked)) == 10 and net.training
        assert net.layers.training and not net.norms.training  # as they were
        net.eval()
        if net.degrees is None and net.layers[0].uses_degree:
            net.degrees = model.graph_degrees(*graph)
            near(net([block] * 3, x, edges=[e] * 3), expected)
        for dtype in (torch.float64, torch.bfloat16):
            other = copy.deepcopy(net).to(dtype)
            logits = inference(other, *graph, x, **given)
            assert torch.equal(logits, inference(other.float(), *graph, x, **given))
    assert len(files) >= 6 and not list(tmp_path.iterdir())
    complaint = "no room for .* GB for a layer's rows in .*: set TMPDIR to a larger disk"
    with monkeypatch.context() as full, pytest.raises(OSError, match=complaint):
        full.setattr(os, "posix_fallocate", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
        inference(net.train(), *graph, x, memory=0, **given)
    assert net.training and not net.eval().training  # as it was, whatever happened
    none = {"edges": e[:0]} if given else {}
    alone = inference(net, torch.zeros(91, dtype=torch.int64), indices[:0], x, **none)
    assert not alone.requires_grad
    if net.layers[0].uses_degree:  # those of a graph with the same in-degrees
        net.degrees = model.graph_degrees(indptr, indices // 3)
        near(inference(net, *graph, x, **given), expected)
    net.degrees = None
    nobody = block._replace(indptr=0 * block.indptr, indices=indices[:0])
    near(alone, net([nobody] * 3, x, edges=[e[:0]] * 3))
    with torch.autocast("cpu", torch.bfloat16):
        low = inference(net, *graph, x, **given), net([block] * 3, x.bfloat16(), edges=[e] * 3)
    assert all((logits - expected).norm() < 0.05 * expected.norm() for logits in low)
    torch.set_default_dtype(torch.float64)  # that of tensors made without one
    try:
        near(inference(net, *graph, x, **given), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    if given:
        near(inference(net, *graph, x, edges=e.double().numpy()), expected)
        assert not torch.allclose(inference(net, *graph, x, edges=e.flip(0)), expected, atol=0.01)
        whole = e.round()  # a store keeps features of edges in a type of their own
        both = (net([block] * 3, x, edges=[whole.to(t)] * 3) for t in (torch.float32, torch.int8))
        assert torch.equal(*both)


@pytest.mark.parametrize("name", MODELS)
def test_model_refuses_other_rows_than_those_of_its_blocks(name):
    """C code would read beyond the end of fewer; of all nodes' rows it would take the first."""
    graph = _random_graph(np.random.default_rng(13), 90, 5)
    blocks = NeighborSampler(*graph, [3, 3, 3], edge_ids=True).sample(torch.arange(9), 0)
    net, x, edges = _net(name), torch.randn(90, 12), [torch.randn(b.num_edges, 3) for b in blocks]
    given, graph_edges = {"edges": edges[0]} if net.edge_dim else {}, torch.randn(len(graph[1]), 3)
    rows, layer = x[: blocks[0].num_src], net.layers[0]
    wide = torch.randn(90, 13)
    few = blocks[0]._replace(src_nodes=blocks[0].src_nodes[:2])
    outer = NeighborSampler(*graph, [3]).sample(torch.arange(9), 0, relabel_outer=False)
    damaged = graph[0].clone().index_fill_(0, torch.arange(1, 50), -7), graph[1]
    needed = "rows: .* are needed, one for each of block.src_nodes"
    for words, error, call in (
        (needed, ValueError, lambda: net(blocks[::-1], x, edges=edges[::-1])),
        (needed, ValueError, lambda: net(blocks, torch.randn(91, 12), edges=edges)),
        (needed, ValueError, lambda: layer(blocks[0], rows[1:], **given)),
        (needed, ValueError, lambda: layer(few, x[:2], **given)),
        ("a block has global ids", ValueError, lambda: layer(*outer, x, **given)),
        ("shape|size|must", RuntimeError, lambda: layer(blocks[0], wide[: len(rows)], **given)),
        ("shape|size|must", RuntimeError, lambda: inference(net, *graph, wide, edges=graph_edges)),
        ("in indptr of", IndexError, lambda: inference(net, *damaged, x, edges=graph_edges)),
    ):
        _refuses(words, call, error=error)
    if name == "sage":
        pair = torch.randn(2, 24)
        _refuses("x has 2 rows", net, blocks, pair, aggregated=True, error=ValueError)
    logits = net(blocks, x[blocks[0].src_nodes], edges=edges)
    blocks[1].indices.fill_(1 << 20)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()
    said = "edges is .*: features of each edge, .* are needed"
    for wrong in (edges[0][1:], edges[0][:, 1:], None) if given else ():
        _refuses(said, layer, blocks[0], rows, edges=wrong, error=ValueError)
        _refuses(said, inference, net, *graph, x, edges=wrong, error=ValueError)


@pytest.mark.parametrize("name", ["gat", "gcn"])
def test_model_inference_takes_the_fastest_place_that_gpu_memory_has_room_for(name, monkeypatch):
    """Rows and chunks on the GPU; tables in host memory; the CPU; the next of these if memory runs out nevertheless."""
    graph, net = _random_graph(np.random.default_rng(14), 90, 5), _net(name).eval()
    x, made = torch.randn(90, 12), []
    expected = inference(net, *graph, x)
    apply_at, combine = by_layers.Layerwise.apply_at, net.layers[1].combine

    def watched(run, place, *rest):
        made.append((place.lacks.split(",")[0], place.grow > 1))
        return apply_at(run, place, *rest)

    monkeypatch.setattr(by_layers.Layerwise, "apply_at", watched)
    full, wide, low = ("", True), ("tables", False), ("messages", False)
    for free, places in ((1 << 36, [full]), (4 * 90 * 15, [wide]), (100, [low])):
        monkeypatch.setattr(by_layers, "free_bytes", lambda device, free=free: free)
        made.clear()
        with nullcontext() if places == [full] else pytest.warns(UserWarning, match=places[0][0]):
            torch.testing.assert_close(inference(net, *graph, x), expected)
        assert {*made[1:2]} == {*places}
    monkeypatch.setattr(by_layers, "free_bytes", lambda device: 1 << 36)
    for failures in (2, 3):
        made.clear()
        out_of_memory = torch.cuda.OutOfMemoryError("out of memory")
        results = [out_of_memory] * failures + [mock.DEFAULT] * 3
        net.layers[1].combine = mock.Mock(wraps=combine, side_effect=results)
        with pytest.warns(UserWarning, match="slower"):
            if failures == 3:
                _refuses("out of memory", inference, net, *graph, x, error=type(out_of_memory))
            else:
                torch.testing.assert_close(inference(net, *graph, x), expected)
        assert made[1:][: failures + 1] == [full, wide, low][: failures + 1]


def _infers(ranks):
    """Run inference with the tables of all layers in memory, and in files."""
    indptr, indices = _random_graph(np.random.default_rng(12), 150, 5)
    x = torch.randn(150, 12, generator=torch.Generator().manual_seed(0))
    ours = dict(rank=ranks.rank, world=2, total=ranks.sum, chunk=16, chunk_edges=100)
    for net in [_net(name) for name in MODELS if "edge_dim" not in MODELS[name]]:
        expected = inference(net, indptr, indices, x)
        for memory in (0, 1 << 30):
            logits = inference(net, indptr, indices, x, memory=memory, **ours)
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_model_inference_with_two_ranks(tmp_path):
    _end(_fork(tmp_path / "out", ddp.launch, _infers, 2))


def _infers_with_a_hub(conv):
    """Print the bytes that inference takes on top of those in use before."""
    V, hub = 200_000, 1_500_000
    torch.manual_seed(0)
    degree = torch.full((V,), 4)
    degree[7] = hub
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(V, (int(indptr[-1]),), dtype=torch.int32)
    x, net = torch.randn(V, 64), GNN(64, 64, 4, conv=conv, num_layers=2, heads=2)
    options = dict(chunk=2048, chunk_edges=1 << 14, memory=0)
    inference(net, torch.tensor([0, 2, 2]), indices[:2] % 2, x[:2], **options)

    anonymous = functools.partial(_status, "RssAnon:", "/proc/self/status")
    before, peak, finish = anonymous(), [0], net.finish

    def watched(*args):
        peak.append(anonymous())
        return finish(*args)

    net.finish = watched
    inference(net, indptr, indices, x, **options)
    print(max(peak) - before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("conv, times", [("sage", 1), ("sage-pool", 1), ("gat", 10)])
def test_model_inference_with_a_hub_stays_in_bounded_memory(conv, times, tmp_path):
    """The hub's edges as [E, width] alone would take 384 MB; each of the three tables, in files, takes 51 MB."""
    took = int(_end(_fork(tmp_path / "out", _infers_with_a_hub, conv)).splitlines()[-1])
    print(f"{took / 1e6:.0f} MB")
    assert took < 25e6 * times


@pytest.mark.parametrize("conv", ["sage", "gat", "gine"])
def test_model_edges_of_no_destination_are_refused(conv):
    """Torch's mean counts them in the gradient of the last destination, and kernels read out of bounds."""
    options = {"num_layers": 1, "edge_dim": 2 * (conv == "gine")}
    block = Block(torch.tensor([0, 2, 3]), torch.tensor([1, 2, 0, 2, 1]), torch.arange(3), None)
    said = "ends at 3, and it has 5 indices: those of no destination have to be -1"
    given = {"edges": [torch.ones(5, 2)], "error": ValueError}
    _refuses(said, GNN(4, 8, 3, conv=conv, **options), [block], torch.ones(3, 4), **given)


@pytest.mark.parametrize("conv", ["gcn", "gin", "gine"])
def test_model_sampled_gcn_and_gin_are_right_on_average(conv):
    """The mean of one layer over many sampled blocks is the layer over all neighbours."""
    indptr, indices = _random_graph(np.random.default_rng(13), 60, 12)
    x, e, ids, steps = torch.randn(60, 6), torch.randn(len(indices), 2), torch.arange(60), 1000
    net = GNN(6, 8, 4, conv=conv, num_layers=1, edge_dim=2 * (conv == "gine"))
    if conv != "gcn":
        net.layers[0].mlp = torch.nn.Linear(6, 4)  # an average passes through what is linear
    net.degrees = model.graph_degrees(indptr, indices)
    sample = NeighborSampler(indptr, indices, [3], edge_ids=True).sample
    mean = torch.zeros(60, 4, dtype=torch.float64)
    with torch.no_grad():
        for step in range(steps):
            (block,) = sample(ids, step)
            mean += net([block], x[block.src_nodes], edges=[e[block.edge_ids]]) / steps
    exact = inference(net, indptr, indices, x, edges=e).double()
    assert (mean - exact).abs().mean() < 0.1 * exact.abs().mean()  # without the degrees: 0.5


@pytest.mark.parametrize("functions", ["fused", "torch"])
@pytest.mark.parametrize("conv", model.CONVS)
def test_model_sums_in_bf16_lose_no_terms(conv, functions, monkeypatch):
    """Gradients of a row that thousands share, and of norms; sums in bfloat16 itself were off by 8 to 100 %."""
    monkeypatch.setattr(model, "fused", model.fused if functions == "fused" else None)
    V, x, e = 3000, torch.randn(3000, 6) + 0.5, torch.randn(5999, 2)
    # node 0 has edges from all, the others one from node 0
    indices = torch.cat([torch.arange(V), torch.zeros(V - 1)]).int()
    indptr = torch.cat([torch.zeros(1), torch.arange(V, 2 * V)]).long()
    kinds = {"edge_type": torch.zeros(5999, dtype=torch.uint8), "by_type": False}
    typed = model.CONVS[conv].uses_types
    options = {"num_types": 2} if typed else {"edge_dim": 2 * (conv == "gine")}
    sampler = NeighborSampler(indptr, indices, [-1, -1], edge_ids=True, **kinds)
    blocks = sampler.sample(torch.arange(V), 0)
    torch.manual_seed(0)
    net, gradients = GNN(6, 8, 3, conv=conv, norm="layer", num_layers=2, dropout=0, **options), []
    for dtype in (torch.float64, torch.float32):
        net = net.to(dtype)
        rows = x[blocks[0].src_nodes].to(torch.bfloat16 if gradients else dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(gradients)):
            logits = net(blocks, rows, edges=[e[block.edge_ids] for block in blocks])
        net.zero_grad()
        torch.nn.functional.cross_entropy(logits.to(dtype), torch.zeros(V).long()).backward()
        gradients.append([p.grad.double() for p in net.parameters()])
    for exact, rounded in zip(*gradients):
        assert (exact - rounded).norm() < 0.1 * exact.norm() + 0.01


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("conv", ["sage", "sage-pool", "gcn", "gat", "gin"])
def test_model_a_batch_of_one_seed_or_none_trains(conv, norm):
    indptr, indices = _random_graph(np.random.default_rng(7), 30, 4)
    options = dict(norm=norm, residual=True, heads=2, input_dropout=0.1)
    net = GNN(6, 8, 3, conv=conv, num_layers=2, **options)
    for seeds in (torch.arange(0), torch.arange(1)):
        blocks = NeighborSampler(indptr, indices, [3, 3]).sample(seeds, 0)
        logits = net(blocks, torch.randn(blocks[0].num_src, 6))
        assert logits.shape == (len(seeds), 3)
        net.zero_grad()
        torch.nn.functional.cross_entropy(logits, seeds % 3, reduction="sum").backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        assert len(seeds) or not any(p.grad.any() for p in net.parameters())


def test_model_inputs_are_dropped_in_training_alone():
    """A GIN of two classes has no layer norm, through which no gradient would pass."""
    block, seen = Block(torch.arange(21), torch.arange(20), torch.arange(20), None), []
    net, x = (
        GNN(64, 3, 2, conv="gin", num_layers=1, norm="layer", input_dropout=0.25),
        torch.ones(20, 64),
    )
    assert len(net.layers[0].mlp) == 3
    net.layers[0].register_forward_pre_hook(lambda layer, given: seen.append(given[1]))
    for training in (True, False):
        net.train(training)([block], x)
    zeros = (seen[0] == 0).float().mean().item()
    assert 0.2 < zeros < 0.3 and seen[0].max() == 4 / 3 and torch.equal(seen[1], x)


def test_model_names_what_it_does_not_know():
    for words, options in (
        ("conv 'GAT' is unknown: choose one of sage, sage-pool, ", {"conv": "GAT"}),
        ("norm 'group' is unknown: choose one of none, layer, batch", {"norm": "group"}),
        ("norm 'batch' would count a recomputed", {"norm": "batch", "recompute": True}),
        ("conv 'gin' does not take edge_dim 3, .* sage, .*gat", {"conv": "gin", "edge_dim": 3}),
        ("conv 'sage' does not take num_types 5, .* rgcn, rgat", {"num_types": 5}),
        ("num_layers is 0", {"num_layers": 0}),
        ("dropout is 1: a probability below 1", {"input_dropout": 1}),
        ("width 8 cannot be shared by 3 heads", {"conv": "gat", "heads": 3}),
    ):
        _refuses(words, GNN, 4, 8, 3, **options, error=ValueError)
    for conv, option in (("gine", "edge_dim"), ("rgcn", "num_types")):
        _refuses(f"missing.*argument: '{option}'", GNN, 4, 8, 3, conv=conv, error=TypeError)


class _Twice(model.GCNConv):
    def combine(self, near):
        return 2 * super().combine(near)


class _Own(model.Conv):
    """The destinations' rows, as they are."""

    def __init__(self, width):
        super().__init__()
        self.out_dim = width

    def combine(self, near):
        return near.x_dst


class _Bounded(model.GINConv):
    def message(self, h, degree=None):
        return h.tanh()


class _Dropped(model.Linear):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5, self.training))


class _Doubled(model.SAGEConv):
    def forward(self, *block):
        return 2 * super().forward(*block)


def test_customised_parts_are_seen_by_training_and_by_inference():
    """A subclass's combine, a bias that a layer has not, torch's dropout; nothing is overwritten in place."""
    graph = _random_graph(np.random.default_rng(3), 60, 5)
    blocks = NeighborSampler(*graph, [-1, -1]).sample(torch.arange(60), 0)
    table = torch.randn(60, 6)
    x = table[blocks[0].src_nodes.long()]
    for conv, part, other in (
        ("gcn", "layers.0", _Twice(6, 6)),
        ("sage", "layers.0.neigh_linear", torch.nn.Linear(6, 6)),
        ("sage", "layers.0", _Own(6)),
        ("gin", "layers.0", _Bounded(6, 6)),
        ("sage", "layers.0.combine", _Own(6).combine),
        ("sage", "norms.0", torch.nn.Tanh()),
        ("gin", "layers.0.mlp.0", torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())),
        ("gin", "layers.0.mlp", torch.nn.Sequential(model.Linear(6, 6), torch.nn.ReLU())),
        ("sage", "norms.0", model.LayerNorm(6, elementwise_affine=False)),
        ("sage", "finish", lambda i, h, h_dst, *rest: h.tanh()),
        ("sage", "forward", None),  # its own, as accelerate's unwrap_model leaves it
    ):
        net, copies = GNN(6, 6, 3, conv=conv, num_layers=2, dropout=0.0), (x.clone(), table.clone())
        parent, _, name = part.rpartition(".")
        setattr(net.get_submodule(parent), name, other or net.forward)
        out = net(blocks, x)
        out.sum().backward()
        torch.testing.assert_close(inference(net, *graph, table), out)
        assert torch.equal(x, copies[0]) and torch.equal(table, copies[1])
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        net = GNN(6, 8, 3, conv="gcn", num_layers=2, recompute=recompute)
        net.layers[1].linear = _Dropped(8, 3, bias=False)
        net(blocks, x, key=1).square().sum().backward()
        grads.append(net.layers[1].linear.weight.grad)
    torch.testing.assert_close(*grads)
    for change in (
        lambda net: net.register_forward_hook(lambda *given: None),
        lambda net: net.layers[0].register_forward_hook(lambda *given: None),
        lambda net: net.layers.__setitem__(0, _Doubled(6, 8)),
        lambda net: setattr(net, "forward", lambda *given: None),
        lambda net: setattr(net, "forward", GNN(6, 8, 3, num_layers=2).forward),
    ):
        change(net := GNN(6, 8, 3, num_layers=2))
        _refuses("inference goes layer by layer", inference, net, *graph, table, error=ValueError)
    edges = [torch.randn(block.num_edges, 3) for block in blocks]
    for conv, part, other in (  # C code would read rows of another width or number than there are
        ("gat", "layers.0.src_linear", torch.nn.Linear(6, 4)),
        ("gine", "layers.0.edge_linear", model.Linear(3, 4)),
        ("gcn", "degrees", lambda block: torch.ones(block.num_dst - 1, 2)),
    ):
        dim = {"edge_dim": 3} if model.CONVS[conv].edge_features != "no" else {}
        net = GNN(6, 8, 3, conv=conv, num_layers=2, **dim)
        parent, _, name = part.rpartition(".")
        setattr(net.get_submodule(parent), name, other)
        _refuses("[sS]ize", net, blocks, x, edges=edges, error=RuntimeError)
    averaged = torch.optim.swa_utils.AveragedModel(GNN(6, 8, 3, num_layers=2))
    for words in (
        "pass the network in a wrapper",
        r"NodeLoader\(graph, torch.arange\(60\), \[-1, -1\], shuffle=False\), a -1 for each layer",
    ):
        _refuses(words, inference, averaged, *graph, table, error=ValueError)
