"""Tests: model.py."""

import argparse
import copy
import ctypes
import datetime
import errno
import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import types
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import ddp
import loader
import model
import sampler
import train
from bench.inference import dgl_twin
from features import FeatureRing
from model import GNN, SAGE, inference
from native import build
from native import layers as fused
from run import step_graph
from sampler import Block, NeighborSampler
from tests.common import (
    TINY,
    _beside,
    _dgl,
    _emulated,
    _EmulatedKernels,
    _end,
    _fork,
    _forkserver,
    _random_graph,
)


def _dense_mean(indptr, indices, num_nodes):
    """The mean aggregator as a dense [V, V] matrix."""
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    for v in range(num_nodes):
        for u in indices[indptr[v] : indptr[v + 1]].tolist():
            matrix[v, u] += 1
    return matrix / matrix.sum(1, keepdim=True).clamp(min=1)


def test_full_blocks_layerwise_inference_and_dense_algebra_agree():
    indptr, indices = _random_graph(np.random.default_rng(6), 80, 6)
    x, mean = torch.randn(80, 40), _dense_mean(indptr, indices, 80)
    for widths in ((40, 16, 5), (40, 64, 5)):  # projecting before the mean, and after it
        net = SAGE(widths[0], widths[1], widths[2], num_layers=3, dropout=0.5).eval()
        h = x.double()
        for layer in net.layers:
            h = layer.self_linear.double()(h) + layer.neigh_linear.double()(mean @ h)
            h = h if layer is net.layers[-1] else h.relu()
        net.float()
        for chunk in (7, 1000):
            torch.testing.assert_close(
                inference(net, indptr, indices, x, chunk=chunk), h.float(), atol=1e-5, rtol=1e-4
            )
        blocks = NeighborSampler(indptr, indices, [-1, -1, -1]).sample(torch.arange(80).flip(0), 0)
        torch.testing.assert_close(
            net(blocks, x[blocks[0].src_nodes]), h.float().flip(0), atol=1e-5, rtol=1e-4
        )
    assert (
        net.train() and inference(net, indptr, indices, x).requires_grad is False and net.training
    )


@pytest.mark.parametrize(
    "dtype, ids", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)]
)
def test_dropout_is_a_function_of_node_and_column(dtype, ids):
    mask, golden, seed = (1 << 64) - 1, 0x9E3779B97F4A7C15, -1234567890123456789

    def finalise(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    nodes = torch.tensor([5, 0, 2_000_000_000, 77], dtype=ids)
    for width in (1, 8, 19):
        expected = [
            [
                finalise(finalise(((seed ^ v) + golden) & mask) + c // 8 * golden & mask)
                >> 8 * (c % 8)
                & 255
                for c in range(width)
            ]
            for v in nodes.tolist()
        ]
        assert model._random_bytes(nodes, width, seed).tolist() == expected
    h = torch.randn(300, 43).to(dtype)
    nodes = torch.randperm(1000)[:300].to(ids)
    results = []
    for on, rows in ((True, slice(None)), (False, slice(None)), (True, slice(100, 200))):
        fused.use_native(on)
        try:
            torch.manual_seed(3)
            x = h[rows].clone().requires_grad_()
            y = model.relu_dropout(x * 1, 0.3, nodes=nodes[rows])
            y.backward(h[rows])
        finally:
            fused.use_native(True)
        results.append((y.detach(), x.grad))
    for native, torch_ops, part in zip(*results):  # the same in both, and for a part of the rows
        torch.testing.assert_close(
            native, torch_ops, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
        )
        assert torch.equal(native[100:200], part)


def test_linear_is_torchs_linear(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # 50 million multiplications
    large = torch.randn(2000, 100), torch.randn(250, 100, requires_grad=True)
    assert type(fused.linear(*large).grad_fn).__name__ == "_LinearBackward"
    assert type(fused.linear(large[0][1:], large[1]).grad_fn).__name__ != "_LinearBackward"
    monkeypatch.setattr(fused, "WORTH_COMPILING", 1)
    for shape in ((1, 3, 2), (300, 50, 20), (0, 3, 2)):
        S, width, D = shape
        x, weight, bias = torch.randn(S, width), torch.randn(D, width), torch.randn(D)
        results = []
        for function in (fused.linear, torch.nn.functional.linear):
            inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
            y = function(*inputs)
            (y * y).sum().backward()
            results.append([y.detach(), *(t.grad for t in inputs)])
        for ours, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    assert fused.linear(x, weight).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gather_rows_is_index_select(dtype):
    for width in (1, 3, 100, 700):
        table = torch.randn(1000, width).to(dtype)
        for ids in (
            torch.randint(1000, (3001,)),
            torch.randint(1000, (17,), dtype=torch.int32),
            torch.arange(0),
        ):
            out = torch.empty(len(ids), width, dtype=dtype)
            assert torch.equal(model.gather_rows(table, ids), table[ids.long()])
            assert model.gather_rows(table, ids, out) is out and torch.equal(out, table[ids.long()])
    for bad in (-1, 1000):
        with pytest.raises(IndexError):
            model.gather_rows(table, torch.tensor([0, bad]))


def test_dropout_keeps_its_share():
    torch.manual_seed(0)
    w = torch.ones(2000, 100, requires_grad=True)
    y = model.relu_dropout(w * 2, 0.3)
    assert abs((y > 0).double().mean().item() - 0.7) < 0.006 and abs(y.mean().item() - 2) < 0.02
    kept = (y.detach() > 0).double()
    # columns and rows alike
    assert (kept.mean(0) - 0.7).abs().max() < 0.05 and (kept.mean(1) - 0.7).abs().max() < 0.25
    y.sum().backward()
    torch.testing.assert_close(w.grad, (y.detach() > 0) * 2 * 256 / (256 - 77))
    h = torch.randn(10, 10)
    assert torch.equal(model.relu_dropout(h.clone(), 0.3, training=False), h.relu())


def _layers_on_gpu():
    """A second native/layers.py, which takes CPU tensors for those of a GPU."""
    spec = importlib.util.spec_from_file_location("layers_on_gpu", fused.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.is_gpu = lambda device: True
    return module


layers_gpu = _layers_on_gpu()


@pytest.fixture
def cuda_layers(tmp_path_factory, monkeypatch):
    """layers_gpu on emulated kernels -> names of the kernels that were launched."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    return _emulate_layers(tmp_path_factory.getbasetemp(), monkeypatch)


@pytest.fixture(params=["emulated GPU", "CPU"])
def kernels(request, cuda_layers):
    """native/layers.py with kernels that another compiler runs in another way: one thread at a time, or OpenMP's."""
    return layers_gpu if request.param == "emulated GPU" else fused


def _emulate_layers(folder, monkeypatch):
    launched = []

    def load_cuda(name, source, device):
        kernels = _EmulatedKernels(source, folder, seed=len(launched), checked=True)
        kernels.launched = launched
        return kernels

    layers_gpu.load.cache_clear()
    compiler = types.SimpleNamespace(**vars(build) | {"load_cuda": load_cuda})
    monkeypatch.setattr(layers_gpu, "build", compiler)
    return launched


def _layer_block(rng, S, N, ids, degree=6):
    """indptr and indices of a block with destinations without edges and a source that most have."""
    counts = torch.from_numpy(rng.integers(0, degree, S))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.from_numpy(rng.integers(0, N, int(indptr[-1])))
    indices[::3] = N - 1
    return indptr.to(ids), indices.to(ids)


def _padded(indptr, indices, k, rows):
    """The same block with k places for each of `rows` destinations."""
    out = torch.full((rows, k), -1, dtype=indices.dtype)
    for s, (a, b) in enumerate(itertools.pairwise(indptr.tolist())):
        out[s, : b - a] = indices[a:b]
    return (torch.arange(rows + 1) * k).to(indptr.dtype), out.view(-1)


def _shifted(t):
    """The same tensor at an address that is no multiple of 16 bytes."""
    return torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_kernels_equal_torch_operations(kernels, cuda_layers, dtype, ids, monkeypatch):
    torch.manual_seed(15)
    rng, S, N = np.random.default_rng(15), 40, 60
    near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=4e-2)
    for width in (1, 7, 8, 36):
        indptr, indices = _layer_block(rng, S, N, ids)
        own = torch.from_numpy(rng.permutation(N)[:S]).to(ids)
        h = torch.randn(N, width).to(dtype)
        h = _shifted(h) if width == 8 else h
        pair, best = torch.randn(S, 2 * width).to(dtype), torch.randn(S, width).to(dtype)
        results, scales = [], torch.rand(2 * S)
        for functions in (kernels, None, kernels):  # twice: threads in another order
            monkeypatch.setattr(model, "fused", functions)
            x, y = (h.clone().requires_grad_() for _ in range(2))
            means, largest = (
                model.self_and_mean(indptr, indices, x),
                model.max_neighbours(indptr, indices, y),
            )
            means.backward(pair)
            largest.backward(best)
            z, alpha = h.clone().requires_grad_(), scales[:S].clone().requires_grad_()
            sums = model.own_plus_mean(indptr, indices, z, alpha, scales[S:])
            sums.backward(best)
            tables = [
                model.self_and_mean(indptr, indices, h, own, torch.empty(S, 2 * width, dtype=t))
                for t in (torch.float32, torch.bfloat16)
            ]
            results.append(
                [
                    means.detach(),
                    x.grad,
                    largest.detach(),
                    y.grad,
                    *tables,
                    model.gather_rows(h, own),
                    sums.detach(),
                    z.grad,
                    alpha.grad,
                    model.own_plus_mean(indptr, indices, h, scales[:S], scales[S:], own),
                ]
            )
        for ours, theirs, again in zip(*results):
            torch.testing.assert_close(ours, theirs, **near)
            assert torch.equal(ours, again)
        assert ("list_in_order" in cuda_layers) == (kernels is layers_gpu)
        if width == 36 and kernels is layers_gpu:  # padding changes nothing
            monkeypatch.setattr(model, "fused", layers_gpu)
            x, y = (torch.cat([h, h.new_zeros(9, width)]).requires_grad_() for _ in range(2))
            padded = _padded(indptr, indices, 7, S + 3)
            means, largest = model.self_and_mean(*padded, x), model.max_neighbours(*padded, y)
            means.backward(torch.cat([pair, pair.new_zeros(3, 2 * width)]))
            largest.backward(torch.cat([best, best.new_zeros(3, width)]))
            for all_rows, ours in zip(
                (means.detach(), x.grad, largest.detach(), y.grad), results[0]
            ):
                assert torch.equal(all_rows[: len(ours)], ours)
            assert not x.grad[N:].any() and not means[S:, width:].any()
            nowhere = torch.cat([own, own.new_full((3,), -1)])
            table = model.self_and_mean(*padded, h, nowhere, torch.empty(S + 3, 2 * width))
            assert torch.equal(table[:S], results[0][4]) and not table[S:].any()
            rows = model.gather_rows(h, nowhere)
            assert torch.equal(rows[:S], results[0][6]) and not rows[S:].any()


def _behind(rows, tensor):
    """A tensor whose last rows are these, behind others that nothing may touch: there is no memory."""
    size = tensor.element_size() * tensor.shape[1]
    start = tensor.data_ptr() - rows * size
    memory = (ctypes.c_char * (rows * size + tensor.nbytes)).from_address(start)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(-1, tensor.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_layers_address_rows_in_64_bits(cuda_layers, dtype, monkeypatch):
    """Rows of which a 32-bit product of number and width would be another address."""
    width, far, N, S = 1 << 12, 1 << 19, 8, 5
    indptr = torch.arange(S + 1, dtype=torch.int32) * 2
    near, own = torch.randint(N, (2 * S,), dtype=torch.int32), torch.arange(S).int()
    h, target = torch.randn(N, width).to(dtype), torch.randn(S, width).to(dtype)
    monkeypatch.setattr(model, "fused", layers_gpu)
    results = []
    for table, more in ((h, 0), (_behind(far, h), far)):
        ids, rows = near + more, own + more
        attn = torch.ones(2, width // 2)
        results.append(
            [
                model.self_and_mean(indptr, ids, table, rows, torch.empty(S, 2 * width)),
                model.max_neighbours(indptr, ids, table),
                model.gather_rows(_behind(8 * more, h), own + 8 * more),  # in words of 16 bytes
                layers_gpu.attend(indptr, ids, table, target, attn, rows, (None, 0, 0)),
            ]
        )
    for close, distant in zip(*results):
        assert torch.equal(close, distant)
    code = layers_gpu.load(torch.int32, dtype, dtype, h.device)
    # an edge of each source, and its destination
    lists = torch.arange(N).int(), torch.ones(N).int(), torch.arange(far, far + N).int()
    share, out = torch.ones(N), torch.empty(N, width // 2, dtype=dtype)
    pair, sizes = _behind(far, h), (0, N, width // 2, 1)
    given = *lists, share, pair, None, *sizes, None, 1.0
    code.run("self_and_mean_grad", N * width // 8, *given, out)
    assert torch.equal(out, h[:, width // 2 :])
    winner = torch.arange(N).int()[:, None].expand(N, width).contiguous()
    out, winners = torch.empty_like(h), _behind(far, winner)
    code.run("max_neighbours_grad", N * width // 4, *lists, pair, winners, N, width, 1, out)
    assert torch.equal(out, h)


@pytest.mark.parametrize(
    "dtype, ids", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)]
)
def test_cuda_dropout_draws_the_bytes_of_the_cpu(cuda_layers, dtype, ids, monkeypatch):
    nodes, key, step = torch.randperm(1000)[:50].to(ids), 2**64 - 12345, torch.tensor([77])
    assert model.layer_seed(key, 3) == sampler.mix(key ^ (2**64 - 4)) - 2**64 * (
        sampler.mix(key ^ (2**64 - 4)) >> 63
    )
    # what a CUDA graph makes of the number of the step
    on_device = model.layer_seed((123, step), 3)
    on_host = model.layer_seed(sampler.mix(123 ^ 77), 3)
    for width in (1, 8, 43):
        h, grad = torch.randn(50, width).to(dtype), torch.randn(50, width).to(dtype)
        results = []
        for functions, seed in (
            (layers_gpu, on_host),
            (fused, on_host),
            (None, on_host),
            (layers_gpu, on_device),
            (None, on_device),
        ):
            monkeypatch.setattr(model, "fused", functions)
            x = h.clone().requires_grad_()
            y = model.relu_dropout(x * 1, 0.3, nodes=nodes, seed=seed)
            y.backward(grad)
            inputs = model.dropout(h, 0.3, nodes, seed)
            plain = model.relu_dropout(h.clone(), 0.3, training=False)
            results.append([y.detach(), x.grad, inputs, plain])
        for first, *others in zip(*results):
            for other in others:
                torch.testing.assert_close(
                    first, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
                )
                assert torch.equal(first == 0, other == 0)
    monkeypatch.setattr(model, "fused", layers_gpu)
    assert not model.relu_dropout(torch.ones(3, 5), 0.3, nodes=torch.tensor([4, -1, -1]), seed=5)[
        1:
    ].any()
    for functions in (layers_gpu, fused, None):  # what is not finite is not hidden
        monkeypatch.setattr(model, "fused", functions)
        y = model.relu_dropout(torch.tensor([[float("nan"), -1.0, 2.0]]), 0)
        assert y[0, 0].isnan() and y[0, 1:].tolist() == [0, 2]
    assert cuda_layers.count("relu_dropout") > 5


def test_cuda_cross_entropy_and_its_gradient(cuda_layers, monkeypatch):
    for S, C in ((0, 3), (5, 1), (33, 47), (20, 200)):
        logits, labels = 5 * torch.randn(S, C), torch.randint(C, (S,))
        labels[::4] = -1
        x = logits.clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(x, labels, reduction="sum", ignore_index=-1)
        (0.25 * expected).backward()
        for functions in (layers_gpu, None):
            monkeypatch.setattr(model, "fused", functions)
            ours = logits.clone().requires_grad_()
            loss = model.cross_entropy(ours, labels)
            (0.25 * loss).backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(ours.grad, x.grad, rtol=1e-5, atol=1e-6)
    assert cuda_layers.count("cross_entropy") == 3  # none for no rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, width", [(1, 6), (4, 8), (9, 3), (2, 20)])
def test_attention_kernels_equal_torch_operations(kernels, heads, width, dtype, monkeypatch):
    rng, S, N = np.random.default_rng(16), 30, 50
    near = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=5e-2, atol=1e-1)
    indptr, indices = _layer_block(rng, S, N, torch.int32)
    nodes, rows = (
        torch.from_numpy(rng.permutation(900)[:N]).int(),
        torch.from_numpy(rng.permutation(N)[:S]).int(),
    )
    layer = model.GATv2Conv(5, heads * width, heads, dropout=0.4)
    source, target = (
        torch.randn(N, heads * width).to(dtype),
        torch.randn(S, heads * width).to(dtype),
    )
    layer.dst_linear = torch.nn.Identity()
    weight, results = torch.randn(S, heads * width).to(dtype), []
    for functions in (kernels, None, kernels):
        monkeypatch.setattr(model, "fused", functions)
        inputs = [source.clone().requires_grad_(), target.clone().requires_grad_(), layer.attn]
        out = layer.combine(indptr, indices, inputs[0], None, inputs[1], nodes=nodes[:S], seed=99)
        grads = torch.autograd.grad(out, inputs, weight)
        with torch.no_grad():
            plain = layer.eval().combine(indptr, indices, source, rows, target)
        layer.train()
        part = layer.combine(
            indptr[10:21] - indptr[10],
            indices[indptr[10] : indptr[20]],
            source.roll(-10, 0),
            None,
            target[10:20],
            nodes=nodes[10:20],
            seed=99,
        ).detach()
        results.append([out.detach(), *grads, plain, part])
    for ours, theirs, again in zip(*results):
        torch.testing.assert_close(ours, theirs, **near)
        assert torch.equal(ours, again)
    if kernels is layers_gpu:  # padding changes nothing
        x, y = (
            source.clone().requires_grad_(),
            torch.cat([target, target.new_zeros(4, heads * width)]).requires_grad_(),
        )
        more = torch.cat([nodes[:S], nodes.new_full((4,), -1)])
        out = layer.combine(*_padded(indptr, indices, 7, S + 4), x, None, y, nodes=more, seed=99)
        grads = torch.autograd.grad(
            out, [x, y, layer.attn], torch.cat([weight, weight.new_zeros(4, heads * width)])
        )
        assert torch.equal(out[:S].detach(), results[0][0])
        for padded, ours in zip(grads[:2], results[0][1:]):
            assert torch.equal(padded[: len(ours)], ours)


def _trained(net, blocks, x, key, **options):
    """Logits and gradients of a pass."""
    net.zero_grad()
    logits = net(blocks, x, key=key, **options)
    (logits * torch.arange(logits.numel()).view_as(logits).cos()).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in net.parameters())]


OPTIONS = {
    "sage": [{}, {"norm": "layer", "residual": True}, {"input_dropout": 0.25}],
    "sage-pool": [{"norm": "none"}],
    "gcn": [{"residual": False}],
    "gat": [{"heads": 2, "residual": True}],
    "gin": [{"norm": "none"}],
}


@pytest.mark.parametrize("conv", OPTIONS)
def test_models_on_kernels_equal_torch_operations(kernels, conv, monkeypatch):
    """Forward and gradients with dropout; recomputed; twice with threads in another order: to the last bit."""
    indptr, indices = _random_graph(np.random.default_rng(17), 200, 6)
    sample = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample
    blocks, key = sample(torch.randperm(200)[:12].int(), 1), 2**63 + 99
    x = torch.randn(blocks[0].num_src, 20)
    for options in OPTIONS[conv]:
        results = []
        for functions in (None, kernels, kernels):
            monkeypatch.setattr(model, "fused", functions)
            results.append(_trained(_net(conv, (20, 8, 5), **options), blocks, x, key))
        results.append(_trained(_net(conv, (20, 8, 5), recompute=True, **options), blocks, x, key))
        for theirs, ours, again, recomputed in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
            assert torch.equal(ours, again)
            torch.testing.assert_close(ours, recomputed, rtol=1e-5, atol=1e-6)


def test_cuda_models_with_features_of_edges_drop_what_they_drop_without(cuda_layers, monkeypatch):
    """Edges whose features are zeros change nothing, dropout of attention included: torch operations beside kernels."""
    torch.manual_seed(17)
    indptr, indices = _random_graph(np.random.default_rng(17), 200, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(
        torch.randperm(200)[:12].int(), 1
    )
    x, key = torch.randn(blocks[0].num_src, 20), 2**63 + 99
    zeros, numbers = (
        [f(block.num_edges, 3) for block in blocks] for f in (torch.zeros, torch.randn)
    )
    for heads in (1, 4):
        plain, seeing = (
            _net("gat", (20, 8, 8), heads=heads, dropout=0.5, edge_dim=width) for width in (0, 3)
        )
        seeing.load_state_dict(plain.state_dict(), strict=False)
        results = []
        for functions, net, edges in (
            (fused, plain, None),
            (layers_gpu, plain, None),
            (fused, seeing, zeros),
            (layers_gpu, seeing, zeros),
            (None, seeing, zeros),
        ):
            monkeypatch.setattr(model, "fused", functions)
            logits, *grads = _trained(net, blocks, x, key, edges=edges)
            results.append(
                [logits]
                + [g for g, (name, _) in zip(grads, net.named_parameters()) if "edge" not in name]
            )
        for found in results[1:]:
            for ours, theirs in zip(found, results[0], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(
            _trained(seeing, blocks, x, key + 1, edges=zeros)[0], results[0][0]
        )
    for conv, options in (("gat", {"heads": 4}), ("gine", {})):
        net, results = (
            GNN(20, 8, 5, conv=conv, num_layers=3, norm="layer", edge_dim=3, **options),
            [],
        )
        for functions in (fused, layers_gpu, None):
            monkeypatch.setattr(model, "fused", functions)
            results.append(_trained(net, blocks, x, key, edges=numbers))
        for ours, kernels, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(kernels, theirs, rtol=1e-3, atol=1e-4)
    assert cuda_layers.count("edge_matrix_grad") == 3 * 4 and "edge_sums_grad" in cuda_layers


def test_cuda_rows_are_gathered_by_one_program_whatever_the_type_of_their_ids(cuda_layers):
    """Ids of nodes and of edges differ in type: the same kernel takes both."""
    table = torch.randn(50, 4)
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(50, (30,), dtype=dtype)
        assert torch.equal(layers_gpu.gather_rows(table, ids), table[ids.long()])
    assert cuda_layers == ["gather_rows"] * 2
    assert layers_gpu.load.cache_info().currsize == 1


def test_cuda_graphsage_of_padded_blocks(cuda_layers, monkeypatch):
    """Static shapes: the same logits and gradients, from pairs too, with the key made of a step on the device."""
    monkeypatch.setattr(model, "fused", layers_gpu)
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(
        torch.randperm(300)[:12].int(), 1
    )
    net, x, key = (
        _net("sage", (20, 8, 5), dropout=0.5),
        torch.randn(blocks[0].num_src, 20),
        sampler.mix(5 ^ 31),
    )
    expected = _trained(net, blocks, x, key)
    launched = len(cuda_layers)
    pair = model.self_and_mean(blocks[0].indptr, blocks[0].indices, x)
    for ours, same in zip(_trained(net, blocks, pair, key, aggregated=True), expected):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)
    assert len(cuda_layers) - launched == 1 + 2 * 2 + 2 * 6
    rows = [block.num_dst + 5 for block in blocks] + [0]
    padded = []
    for block, S, k in zip(blocks, rows, (3, 3, 4)):
        above = len(x) + 9 if block is blocks[0] else rows[len(padded) - 1]
        src_nodes = torch.cat(
            [block.src_nodes, block.src_nodes.new_full((above - block.num_src,), -1)]
        )
        padded.append(Block(*_padded(block.indptr, block.indices, k, S), src_nodes, None))
    net.zero_grad()
    out = net(padded, torch.cat([x, x.new_zeros(9, 20)]), key=(5, torch.tensor([31])))
    S = blocks[-1].num_dst
    (out[:S] * torch.arange(5 * S).view(S, 5).cos()).sum().backward()
    for ours, same in zip([out[:S].detach(), *(p.grad for p in net.parameters())], expected):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)


def test_cuda_graphsage_in_bfloat16(cuda_layers, monkeypatch):
    """As torch.autocast has it: rows and pairs in either type; parameters and their gradients are float32."""
    monkeypatch.setattr(model, "fused", layers_gpu)
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(
        torch.randperm(300)[:12].int(), 1
    )
    net, x = _net("sage", (20, 8, 5), dropout=0.5), torch.randn(blocks[0].num_src, 20)
    expected = _trained(net, blocks, x, 7)
    pair = model.self_and_mean(blocks[0].indptr, blocks[0].indices, x)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    # it would leave behind what it found
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: nullcontext())
    for rows, aggregated in (
        (x, False),
        (x.bfloat16(), False),
        (pair, True),
        (pair.bfloat16(), True),
    ):
        logits, *grads = _trained(net, blocks, rows, 7, aggregated=aggregated)
        assert logits.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)
        for ours, theirs in zip([logits.float(), *grads], expected):
            assert (ours - theirs).norm() < 0.12 * theirs.norm()


class _Graph(torch.utils._python_dispatch.TorchDispatchMode):
    """torch.cuda.CUDAGraph for tensors in host memory: what its body does is done again at each replay, in the same
    memory."""

    recording = []

    def __init__(self):
        super().__init__()
        self.calls = []

    def __enter__(self):
        _Graph.recording.append(self)
        return super().__enter__()

    def __exit__(self, *exc):
        _Graph.recording.remove(self)
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func._schema.name, func(*args, **(kwargs or {}))
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::bincount"), (
            f"{name} waits for the GPU"
        )
        alias = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)
        if not name.startswith("profiler::"):
            self.calls.append(
                functools.partial(self._again, func, args, kwargs or {}, None if alias else out)
            )
        return out

    @staticmethod
    def _again(func, args, kwargs, out):
        found = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            out.copy_(found)
        elif isinstance(out, (list, tuple)):
            [a.copy_(b) for a, b in zip(out, found) if isinstance(a, torch.Tensor)]

    @torch.no_grad()
    def replay(self):
        for call in self.calls:
            call()

    def pool(self):
        return None


def _frozen(launch):
    """A launch with the arguments that it has now, as a CUDA graph keeps it."""
    twin = build.Launch(launch._kernels, launch._name)
    ctypes.memmove(twin._memory, launch._memory, ctypes.sizeof(launch._memory))
    for i, value in launch._structs.items():
        twin._structs[i] = type(value).from_buffer_copy(value)
        twin._pointers[i] = ctypes.addressof(twin._structs[i])
    return twin


@pytest.fixture
def cuda_graphs(cuda_layers, monkeypatch):
    """run/step_graph.py on the emulated kernels, with `_Graph` in the place of CUDA's."""
    _emulate_graphs(monkeypatch)


def _again(go, launch, threads):
    """A graph's launch, on the stream of the replay."""
    go(launch, threads, launch._kernels.stream())


def _emulate_graphs(monkeypatch):
    go = build.Launch.__call__

    def launch(self, threads, stream):
        for graph in _Graph.recording:
            graph.calls.append(functools.partial(_again, go, _frozen(self), threads))
        go(self, threads, stream)

    nothing = lambda *a: None  # noqa: E731
    monkeypatch.setattr(build.Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda: types.SimpleNamespace(record=nothing))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: types.SimpleNamespace(wait_event=nothing)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(torch.cuda, "set_stream", nothing)
    monkeypatch.setattr(step_graph, "captured", lambda graph, pool=None: graph)
    monkeypatch.setattr(model, "fused", layers_gpu)


def _graph_run(folder, net, optimizer, nodes, labels, x, options, word="on", ranks=None, make=None):
    """StepGraphs of a small graph, --cuda-graph being `word` -> (graphs, sampler)."""
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    plain = NeighborSampler(indptr, indices, [4, 3, 3], seed=5, backend="torch", **options)
    backend = _emulated(plain, folder)
    draw = lambda seeds, step, relabel_outer: [  # noqa: E731
        Block(*fields) for fields in reversed(backend.sample(seeds, step, relabel_outer))
    ]
    draws = types.SimpleNamespace(engine=backend, indices=indices, sample=draw)
    ring = _graph_ring(net, x, labels, slots=2)
    net.degrees = model.graph_degrees(indptr, indices)
    args = argparse.Namespace(fanout=[4, 3, 3], batch_size=12, seed=5, prefetch=1, cuda_graph=word)
    predict = lambda batch, key: net(batch.blocks, batch.x, aggregated=ring.first_hop, key=key)  # noqa: E731
    store = types.SimpleNamespace(split={"train": nodes})
    run = types.SimpleNamespace(
        ranks=ranks or ddp.Ranks(),
        args=args,
        store=store,
        sampler=draws,
        ring=ring,
        model=net,
        forward=predict,
    )
    return (make or step_graph.StepGraphs)(run, optimizer), draws


def _graph_ring(net, x, labels, slots):
    """The ring of train.py for a network: GraphSAGE averages the first hop in place, unless its features are dropped.

    x of bfloat16 is given to the network in float32.
    """
    in_place = isinstance(net.layers[0], model.SAGEConv) and not net.input_dropout
    return FeatureRing(
        x,
        labels,
        slots=slots,
        aggregate=model.self_and_mean if in_place else None,
        gather=model.gather_rows,
        dtype=torch.float32,
    )


def _no_more_than_the_smallest(self, nodes, args):
    """StepGraphs._measure, for as many edges as the smallest of a few batches has."""
    _, (rows, _) = step_graph.measured(self, nodes, args)

    def draw(seeds):
        blocks = self._blocks(seeds, 0)[self.first_hop :]
        return [block.num_edges for block in blocks[::-1]]

    seeds = min(nodes.split(args.batch_size)[:-1], key=lambda seeds: sum(draw(seeds)))
    return seeds, (rows, draw(seeds))


@pytest.mark.parametrize(
    "conv, tight, options",
    [
        ("sage", False, {}),
        ("sage", True, {}),
        ("sage", False, dict(norm="layer", residual=True)),
        ("sage", False, dict(replace=True)),
        ("sage", True, dict(input_dropout=0.3)),
        ("sage-pool", False, dict(norm="layer")),
        ("gcn", True, dict(dtype=torch.bfloat16)),
        ("gin", False, dict(norm="layer", residual=True)),
        ("gat", True, {}),
    ],
)
def test_a_cuda_step_graph_takes_the_steps_of_a_run_without(
    cuda_graphs, conv, tight, options, tmp_path, monkeypatch
):
    """Padded, with the keys made on the GPU, with batches that do not fit, the last one smaller: the same
    parameters."""
    torch.manual_seed(0)
    options = dict(options)
    nodes, labels, x = torch.randperm(300)[:53], torch.randint(5, (300,)), torch.randn(300, 20)
    x, law = (
        x.to(options.pop("dtype", x.dtype)),
        dict(replace=True) if options.pop("replace", False) else {},
    )
    ours = _net(conv, (20, 8, 5), dropout=0.5, **options)
    theirs = copy.deepcopy(ours)
    adam = lambda net: torch.optim.Adam(net.parameters(), lr=2**-7, eps=2**-10, fused=True)  # noqa: E731
    # with the usual eps a gradient near zero makes a step of either sign
    optimizers = [adam(ours), adam(theirs)]
    monkeypatch.setattr(step_graph, "measured", step_graph.StepGraphs._measure, raising=False)
    if tight:
        monkeypatch.setattr(step_graph.StepGraphs, "_measure", _no_more_than_the_smallest)
    graphs, draws = _graph_run(tmp_path, ours, optimizers[0], nodes, labels, x, law)
    ring, theirs.degrees = _graph_ring(theirs, x, labels, slots=1), ours.degrees
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)  # captured and tried, and nothing has changed
    options = dict(batch_size=12, seed=5, depth=1)
    batches, fitting = (loader.NodeLoader(None, nodes, [4, 3, 3], load=graphs.load, **options), 0)
    for epoch in range(2):
        optimizers[0].param_groups[0]["lr"] = 2.0 ** -(7 + epoch)
        loss_sum, losses = graphs.begin(), 0
        for batch in batches:
            fitting += any(batch.x is slot.x for slot in graphs.slots)
            graphs.step(batch)
            blocks = draws.sample(batch.seeds, batch.global_step, relabel_outer=not ring.first_hop)
            plain, key = ring.fetch(0, blocks), sampler.mix(sampler.mix(5) ^ batch.global_step)
            logits = theirs(plain.blocks, plain.x, aggregated=ring.first_hop, key=key)
            loss = torch.nn.functional.cross_entropy(logits, labels[batch.seeds], reduction="sum")
            (loss / batch.total).backward()
            optimizers[1].param_groups[0]["lr"] = 2.0 ** -(7 + epoch)
            optimizers[1].step()
            optimizers[1].zero_grad()
            losses += loss.item()
            assert torch.equal(batch.y, labels[batch.seeds])
        assert loss_sum.total.item() == pytest.approx(losses, rel=1e-5)
    assert fitting == 10 - graphs.repeated and (0 < graphs.repeated < 10) == tight
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "conv, tight, refused",
    [("sage", False, False), ("sage", True, False), ("sage", True, True)]
    + [(conv, True, False) for conv in ("sage-pool", "gcn", "gin", "gat")],
)
def test_a_cuda_step_gives_the_same_bits_with_graphs_and_without(
    cuda_graphs, conv, tight, refused, tmp_path, monkeypatch
):
    """--cuda-graph on and off, where a capture is refused, with batches that do not fit; and from a checkpoint on."""
    torch.manual_seed(0)
    nodes, labels, x = torch.randperm(300)[:53], torch.randint(5, (300,)), torch.randn(300, 20)
    first = _net(conv, (20, 8, 5), dropout=0.5, norm="layer" if conv == "gin" else "none")
    monkeypatch.setattr(step_graph, "measured", step_graph.StepGraphs._measure, raising=False)
    if tight:
        monkeypatch.setattr(step_graph.StepGraphs, "_measure", _no_more_than_the_smallest)
    ends = []
    for word, stop in (("on", None), ("off", None), ("on", 4), ("off", 4)):
        net = copy.deepcopy(first)
        optimizer = torch.optim.Adam(net.parameters(), lr=2**-7, fused=True)
        graph = lambda: (_ for _ in ()).throw(RuntimeError("no capture here"))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph if refused else _Graph)
        graphs, _ = _graph_run(tmp_path, net, optimizer, nodes, labels, x, {}, word)
        assert graphs.captured == (word == "on" and not refused)
        assert ("no capture here" in graphs.said) == (refused and word == "on")
        batches = loader.NodeLoader(
            None, nodes, [4, 3, 3], load=graphs.load, batch_size=12, seed=5, depth=1
        )
        repeated, done = 0, 0
        while batches.epoch < 2:
            graphs.begin()
            for batch in batches:
                graphs.step(batch)
                done += 1
                if done == stop:  # another process goes on, with graphs where there were none
                    state, moments = (
                        copy.deepcopy(net.state_dict()),
                        copy.deepcopy(optimizer.state_dict()["state"]),
                    )
                    place, net = batches.state_dict(), copy.deepcopy(first)
                    net.load_state_dict(state)
                    optimizer = torch.optim.Adam(net.parameters(), lr=2**-7, fused=True)
                    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
                    repeated += graphs.repeated
                    word = "off" if word == "on" else "on"
                    graphs, _ = _graph_run(tmp_path, net, optimizer, nodes, labels, x, {}, word)
                    options = dict(load=graphs.load, batch_size=12, seed=5, depth=1)
                    batches = loader.NodeLoader(None, nodes, [4, 3, 3], **options)
                    batches.load_state_dict(place)
                    break
        ends.append(
            [*net.parameters(), *(t for p in net.parameters() for t in optimizer.state[p].values())]
        )
        assert (0 < repeated + graphs.repeated) == tight and done == 10
    for end in ends[1:]:
        assert len(end) > 20 and all(map(torch.equal, end, ends[0]))


def test_a_cuda_step_graph_that_differs_is_not_used(cuda_graphs, tmp_path, monkeypatch):
    """A graph whose loss is another one's is noticed before it trains."""
    nodes, labels, x = torch.arange(40), torch.randint(5, (300,)), torch.randn(300, 20)
    net = _net("sage", (20, 8, 5), dropout=0.5)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    before = [p.detach().clone() for p in net.parameters()]
    take, wrong = step_graph.Slot.sample, lambda slot: (slot.frame.start(), slot.x.zero_())
    monkeypatch.setattr(step_graph.Slot, "sample", wrong)
    with pytest.raises(
        RuntimeError, match=r"input is 100.0% off, their losses are \[.*\], and \[.*\] without"
    ):
        _graph_run(tmp_path, net, optimizer, nodes, labels, x, {})
    monkeypatch.setattr(step_graph.Slot, "sample", lambda slot: (take(slot), slot.y.zero_()))
    with pytest.raises(
        RuntimeError, match=r"input is 0.0% off, their losses are \[.*\], and \[.*\] without graphs"
    ):
        _graph_run(tmp_path, net, optimizer, nodes, labels, x, {})
    assert all(map(torch.equal, before, net.parameters()))


# where one rank fails while the graphs of a run are made: function, which of its calls, whether the others go on without
_FAILING = [
    (step_graph.StepGraphs, "_measure", 0, False),
    (step_graph.Slot, "__init__", 1, False),
    (step_graph.StepGraphs, "_compute", 0, False),
    (step_graph.StepGraphs, "_compute", 2, False),
    (step_graph.StepGraphs, "_restore", 0, False),
    (step_graph.StepGraphs, "_compute", 4, True),  # in the capture
    (step_graph.StepGraphs, "_train", 1, False),
    (step_graph.StepGraphs, "_sample", 2, False),
    (step_graph.StepGraphs, "_restore", 2, False),
]


def _one_rank_fails(ranks, folder):
    """Make the graphs of a run, which fails on rank 1 in a place after the other."""
    with pytest.MonkeyPatch.context() as patch:
        _emulate_layers(folder, patch)
        _emulate_graphs(patch)
        patch.setattr(step_graph, "obstacle", lambda *run: None)
        torch.manual_seed(0)
        run = torch.arange(40), torch.randint(5, (300,)), torch.randn(300, 20)
        for owner, name, which, go_on in _FAILING:
            net = _net("sage", (20, 8, 5))
            optimizer, calls = torch.optim.Adam(net.parameters(), fused=True), itertools.count()
            work = getattr(owner, name)

            def fails(*args, **options):
                if next(calls) == which and ranks.rank == 1:
                    raise RuntimeError(f"no room for {name}")
                return work(*args, **options)

            with patch.context() as failing:
                failing.setattr(owner, name, fails)
                (graphs, said), _ = _graph_run(
                    folder, net, optimizer, *run, {}, ranks=ranks, make=step_graph.build
                )
            assert (graphs is not None) == go_on and next(calls) > which, (name, which, said)
            why = [step_graph.ELSEWHERE, f"no room for {name}"][ranks.rank]
            assert why in said, (name, which, said)
    assert ranks.sum(1) == [2]


def _launch_one_that_fails(folder):
    ddp.TIMEOUT = datetime.timedelta(seconds=90)
    ddp.launch(_one_rank_fails, 2, folder)


@_beside(lambda folder: _fork(folder / "out", _launch_one_that_fails, folder))
def test_a_cuda_step_graph_that_fails_on_one_rank_leaves_no_other_waiting(beside):
    _end(beside[0])


def test_a_cuda_step_graph_that_cannot_be_says_why(cuda_layers):
    indptr, indices = _random_graph(np.random.default_rng(18), 50, 6)
    ring = types.SimpleNamespace(
        on_device=True, features=torch.zeros(3, 1), edge_features=None, labels=torch.zeros(3)
    )
    for words, changed, why in (
        ("--model gine", {}, "for --model sage, sage-pool, gcn, gat, gin, this is gine"),
        ("--norm batch", {}, "--norm batch"),
        ("--checkpoint-activations", {}, "--checkpoint-activations"),
        ("--precision fp64", {}, "--precision fp64"),
        ("--accumulate 2", {}, "--accumulate 2"),
        ("--fanout 4,49", {}, "--fanout 4,49: the last number is 48 at most"),
        ("--fanout -1,4", {}, "--fanout -1,4"),
        ("--fanout 4", {}, "one layer"),
        ("--sampler labor", {}, "not drawn uniformly"),
        ("--mode cpu-cpu", dict(on_device=False), "--mode cpu-cpu"),
        ("", dict(features=None), "behind a cache"),
        ("--model gat", dict(edge_features=ring), "edges have features"),
        ("", dict(labels=torch.zeros(3, 2)), "several labels"),
        ("", {}, "the sampler's kernels are not there"),
        ("--model gin --fanout 4,49", {}, "the sampler's kernels are not there"),
        ("--input-dropout 0.1 --fanout 4,49", {}, "the sampler's kernels are not there"),
    ):
        args = train.parse_args(["--fanout", "4,3", *words.split()])
        s = NeighborSampler(indptr, indices, args.fanout, backend="torch")
        said = step_graph.obstacle(
            ddp.Ranks(gpus=1), args, s, types.SimpleNamespace(**{**vars(ring), **changed})
        )
        assert why in said, said
        assert (step_graph.hindrance(args) is None) == bool(changed or "kernels" in why)
    assert step_graph.obstacle(ddp.Ranks(), args, s, ring) == "there is no GPU"
    times = torch.zeros(len(indices), dtype=torch.int64)
    timed = NeighborSampler(indptr, indices, args.fanout, backend="torch", edge_times=times)
    assert "by their times" in step_graph.obstacle(ddp.Ranks(gpus=1), args, timed, ring)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(
    "name, mode",
    [(name, "cuda-cuda") for name in ("sage", "sage-pool", "gcn", "gin", "gat")]
    + [("sage", "pinned-cuda"), ("gcn", "pinned-cuda")],
)
def test_a_cuda_step_graph_on_a_gpu_gives_the_losses_of_a_run_without(name, mode, tmp_path, capsys):
    losses = {}
    for how in ("off", "on"):
        log = tmp_path / how
        words = [
            "--dataset",
            TINY,
            "--root",
            tmp_path,
            "--model",
            name,
            "--mode",
            mode,
            "--cuda-graph",
            how,
            "--fanout",
            "5,4,3",
            "--batch-size",
            32,
        ]
        assert (
            train.main(
                [str(word) for word in (*words, "--epochs", 3, "--precision", "fp32", "--log", log)]
            )
            == 0
        )
        losses[how] = [
            entry["loss"]
            for entry in map(json.loads, log.read_text().splitlines())
            if "epoch" in entry
        ]
    assert "CUDA graphs with room for" in capsys.readouterr().out
    assert losses["on"] == losses["off"]


def test_cuda_layers_give_way_to_torch_operations(monkeypatch):
    """Where NVRTC or the driver cannot be had: one warning, None."""
    layers_gpu.load.cache_clear()
    monkeypatch.setattr(build, "_warned", set())
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "Kernels", lambda *a: (_ for _ in ()).throw(OSError("no libnvrtc")))
    gpu, real, h = torch.device("cuda", 0), torch.float32, torch.randn(5, 4)
    with pytest.warns(UserWarning, match="the CUDA kernels of layers cannot be used.*no libnvrtc"):
        assert layers_gpu.load(torch.int32, real, real, gpu) is None
    monkeypatch.setattr(layers_gpu, "load", lambda *a: None)
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([4, 0, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for done in (
            layers_gpu.self_and_mean(indptr, indices, h),
            layers_gpu.relu_dropout(h, None, 5, 8),
            layers_gpu.max_neighbours(indptr, indices, h),
            layers_gpu.gather_rows(h, indices),
        ):
            assert done is None


def _gradients(module, output, weight, *inputs):
    """Gradients of a weighted sum of the output: of the inputs, then of every parameter by its sorted absolute sum."""
    module.zero_grad()
    grads = torch.autograd.grad((output * weight).sum(), [*inputs, *module.parameters()])
    return grads[: len(inputs)], sorted(g.abs().sum().item() for g in grads[len(inputs) :])


LAYERS = {
    "sage": lambda a, b: model.SAGEConv(a, b),
    "sage-pool": lambda a, b: model.SAGEPoolConv(a, b),
    "gcn": lambda a, b: model.GCNConv(a, b),
    "gat": lambda a, b: model.GATv2Conv(a, b, heads=3),
    "gat, mean": lambda a, b: model.GATv2Conv(a, b, heads=2, mean=True),
    "gin": lambda a, b: model.GINConv(a, b),
}


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", LAYERS)
def test_model_layers_equal_dgls(name, ids):
    """Forward and gradients on a sampled block with destinations without edges, a wide and a narrow input."""
    _dgl()
    torch.manual_seed(3)
    indptr, indices = _random_graph(np.random.default_rng(8), 120, 7, ids)
    block = NeighborSampler(indptr, indices, [5]).sample(torch.arange(40).to(ids), 0)[0]
    theirs = block.to_dgl()
    if name.startswith(("gcn", "gat")):
        edges = [
            e
            for s in range(40)
            for e in [s, *block.indices[block.indptr[s] : block.indptr[s + 1]].tolist()]
        ]
        looped = block._replace(
            indptr=block.indptr + torch.arange(41, dtype=ids),
            indices=torch.tensor(edges, dtype=ids),
        )
        theirs = looped.to_dgl()
    for width, out_dim in ((24, 6), (6, 24)):
        layer = LAYERS[name](width, out_dim)
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        twin = dgl_twin(layer)
        h = torch.randn(block.num_src, width, requires_grad=True)
        ours, expected = layer(block, h), twin(theirs, h)
        if name.startswith("gat"):
            expected = expected.mean(1) if layer.mean else expected.flatten(1)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        weight = torch.randn_like(ours)
        (to_h,), sizes = _gradients(layer, ours, weight, h)
        (to_h_theirs,), sizes_theirs = _gradients(twin, expected, weight, h)
        torch.testing.assert_close(to_h, to_h_theirs, rtol=1e-4, atol=1e-5)
        assert sizes == pytest.approx(sizes_theirs, rel=1e-4, abs=1e-4)


def _grads(layer, block, h, weight, **edges):
    """The output for h and its gradients: of h, then of every parameter."""
    h = h.clone().requires_grad_()
    out = layer(block, h, **edges)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [h, *layer.parameters()])]


WITH_EDGES = ("gine", "gat with edges", "gat-mean with edges")


@pytest.mark.parametrize("name", [*LAYERS, *WITH_EDGES])
def test_layers_gradients_are_finite_differences_also_of_a_hub(name, monkeypatch):
    """In float64 by torch operations; kernels are as near to these as torch's own float32, for 100,000 edges as well."""
    torch.manual_seed(6)
    seeing = name in WITH_EDGES
    layer = _layer_with_edges(name.split()[0], 5, 4) if seeing else LAYERS[name](5, 6)
    indptr, sources = torch.tensor([0, 2, 2, 6]), torch.tensor([1, 3, 0, 4, 4, 2])
    block = Block(indptr, sources, torch.arange(5))
    exact, h = copy.deepcopy(layer).double(), torch.randn(5, 5, dtype=torch.float64)
    e = torch.randn(6, 11, dtype=torch.float64) if seeing else None

    def run(h, *parameters):
        return torch.func.functional_call(
            exact, dict(zip(dict(exact.named_parameters()), parameters)), (block, h), {"edges": e}
        )

    inputs = [t.detach().clone().requires_grad_() for t in (h, *exact.parameters())]
    assert torch.autograd.gradcheck(run, inputs)
    hub, N = 100_000, 400
    block = Block(
        torch.tensor([0, 3, 3, 3 + hub], dtype=torch.int32),
        torch.randint(N, (3 + hub,), dtype=torch.int32),
        torch.arange(N),
    )
    h, weight = torch.randn(N, 5), torch.randn(3, layer.out_dim)
    edges = {"edges": torch.randn(3 + hub, 11)} if seeing else {}
    kernels = _grads(layer, block, h, weight, **edges)
    monkeypatch.setattr(model, "fused", None)
    operations = _grads(layer, block, h, weight, **edges)
    edges = {name: rows.double() for name, rows in edges.items()}
    exactly = _grads(exact, block, h.double(), weight.double(), **edges)
    for ours, theirs, expected in zip(kernels, operations, exactly):
        room = 1e-5 * expected.norm() + 2 * (theirs - expected).norm()
        assert (ours - expected).norm() <= room


def test_model_blocks_run_dgls_and_pygs_layers():
    indptr, indices = _random_graph(np.random.default_rng(9), 100, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3]).sample(torch.arange(10), 0)
    x, ours = torch.randn(blocks[0].num_src, 12), SAGE(12, 8, 3, num_layers=2).eval()
    expected = ours(blocks, x)
    try:
        pyg = importlib.import_module("torch_geometric.nn")
    except ImportError:
        pyg = None
    for library in ("dgl", "pyg"):
        h = x
        if library == "dgl":
            _dgl()
            layers = [dgl_twin(layer) for layer in ours.layers]
        elif pyg is None:
            pytest.skip("torch_geometric is not there")
        for i, (layer, block) in enumerate(zip(ours.layers, blocks)):
            if library == "dgl":
                h = layers[i](block.to_dgl(), h)
            else:
                edge_index, _, (_, S) = block.to_pyg()
                conv = pyg.SAGEConv(layer.self_linear.in_features, layer.out_dim, "mean")
                conv.lin_l.weight.data = layer.neigh_linear.weight.data
                conv.lin_l.bias.data = layer.self_linear.bias.data
                conv.lin_r.weight.data = layer.self_linear.weight.data
                h = conv((h, h[:S]), edge_index)
            h = h.relu() if i == 0 else h
        torch.testing.assert_close(h, expected, rtol=1e-5, atol=1e-5)


def _layer_with_edges(name, width, out_dim, edge_dim=11):
    layer = (
        model.GINEConv(width, out_dim, edge_dim=edge_dim)
        if name == "gine"
        else model.GATv2Conv(width, out_dim, 2, mean=name == "gat-mean", edge_dim=edge_dim)
    )
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def _edge_by_edge(layer, block, h, e):
    """GATv2 and GINE with features of edges as their papers write them, one destination after the other."""
    rows = []
    for v in range(block.num_dst):
        edges = range(int(block.indptr[v]), int(block.indptr[v + 1]))
        if isinstance(layer, model.GINEConv):
            total = (
                sum((h[block.indices[i]] + layer.edge_linear(e[i])).relu() for i in edges)
                if edges
                else 0 * h[v]
            )
            rows.append(layer.mlp(((1 + layer.eps) * h[v] + total)[None])[0])
            continue
        of_loop = e[edges.start : edges.stop].mean(0) if edges else torch.zeros_like(e[0])
        sources = torch.stack([h[v], *(h[block.indices[i]] for i in edges)])
        given = torch.stack([of_loop, *(e[i] for i in edges)])
        K, D = layer.attn.shape
        message = layer.src_linear(sources).view(-1, K, D)
        z = message + layer.dst_linear(h[v]).view(K, D) + layer.edge_linear(given).view(-1, K, D)
        attention = (torch.nn.functional.leaky_relu(z, 0.2) * layer.attn).sum(2).softmax(0)
        heads = (attention.unsqueeze(2) * message).sum(0)
        rows.append(heads.mean(0) if layer.mean else heads.flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["gat", "gat-mean", "gine"])
def test_model_layers_with_edges_equal_the_papers_and_pygs(name, ids):
    """Forward and all gradients on a sampled block with destinations without edges."""
    torch.manual_seed(3)
    indptr, indices = _random_graph(np.random.default_rng(8), 60, 4, ids)
    own = indices == torch.repeat_interleave(indptr.diff())  # PyG takes such edges out
    indptr = torch.nn.functional.pad((~own).cumsum(0), (1, 0))[indptr]
    block = NeighborSampler(indptr, indices[~own], [5]).sample(torch.arange(40).to(ids), 0)[0]
    assert (block.indptr.diff() == 0).any()
    e = torch.randn(block.num_edges, 11)
    try:
        pyg = importlib.import_module("torch_geometric.nn")
    except ImportError:
        pyg = None
    for width, out_dim in ((24, 6), (6, 24)):
        layer, h = (
            _layer_with_edges(name, width, out_dim),
            torch.randn(block.num_src, width, requires_grad=True),
        )
        weight = torch.randn(40, out_dim)
        ours = layer(block, h, edges=e)
        (to_h,), sizes = _gradients(layer, ours, weight, h)
        expected = _edge_by_edge(layer, block, h, e)
        (to_h_slow,), sizes_slow = _gradients(layer, expected, weight, h)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(to_h, to_h_slow, rtol=1e-4, atol=1e-5)
        assert sizes == pytest.approx(sizes_slow, rel=1e-4, abs=1e-4)
        if pyg is None:
            continue
        edge_index, _, (_, S) = block.to_pyg()
        if name == "gine":
            # which draws its weights anew
            twin = pyg.GINEConv(copy.deepcopy(layer.mlp), train_eps=True, edge_dim=11)
            twin.nn.load_state_dict(layer.mlp.state_dict())
            twin.eps.data = layer.eps.data
            twin.lin.weight.data, twin.lin.bias.data = (
                layer.edge_linear.weight.data,
                layer.edge_linear.bias.data,
            )
        else:
            K, D = layer.attn.shape
            twin = pyg.GATv2Conv((width, width), D, K, concat=not layer.mean, edge_dim=11)
            twin.bias = None  # of the output, which ours leaves to the norm or the next layer
            twin.lin_l.weight.data, twin.lin_l.bias.data = (
                layer.src_linear.weight.data,
                layer.src_linear.bias.data,
            )
            twin.lin_r.weight.data, twin.lin_r.bias.data = (
                layer.dst_linear.weight.data,
                layer.dst_linear.bias.data,
            )
            twin.lin_edge.weight.data, twin.att.data = (
                layer.edge_linear.weight.data,
                layer.attn.data.unsqueeze(0),
            )
        theirs = twin((h, h[:S]), edge_index, e)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        (to_h_theirs,), sizes_theirs = _gradients(twin, theirs, weight, h)
        torch.testing.assert_close(to_h, to_h_theirs, rtol=1e-4, atol=1e-5)
        assert sorted(sizes) == pytest.approx(sorted(sizes_theirs), rel=1e-4, abs=1e-4)


def test_model_gine_equals_dgls():
    """DGL's layer adds edges as wide as nodes: it is given what ours projects."""
    dgl = _dgl()
    torch.manual_seed(4)
    indptr, indices = _random_graph(np.random.default_rng(8), 120, 7)
    block = NeighborSampler(indptr, indices, [5]).sample(torch.arange(40), 0)[0]
    layer, h, e = (
        _layer_with_edges("gine", 12, 6),
        torch.randn(block.num_src, 12),
        torch.randn(block.num_edges, 11),
    )
    theirs = dgl.nn.GINEConv(layer.mlp, learn_eps=True)
    theirs.eps.data = layer.eps.data
    expected = theirs(block.to_dgl(), (h, h[:40]), layer.edge_linear(e))
    torch.testing.assert_close(layer(block, h, edges=e), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("conv", model.EDGE_CONVS)
def test_model_with_edges_is_exact_over_all_nodes_and_needs_their_features(conv):
    """Inference in chunks is one forward pass over the whole graph, and parts of a batch add up to the whole."""
    torch.manual_seed(5)
    indptr, indices = _random_graph(np.random.default_rng(11), 90, 5)
    x, e = torch.randn(90, 12), torch.randn(indices.numel(), 4)
    net = GNN(
        12, 8, 5, conv=conv, num_layers=3, heads=2, norm="layer", residual=True, edge_dim=4
    ).eval()
    block = Block(indptr.to(indices.dtype), indices, torch.arange(90))
    expected = net([block] * 3, x, edges=[e] * 3)
    for options in (
        {},
        {"chunk": 7},
        {"chunk_edges": 20},
        {"chunk": 13, "chunk_edges": 64, "memory": 0},
    ):
        torch.testing.assert_close(
            inference(net, indptr, indices, x, edges=e, **options), expected, rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(
        inference(net, indptr, indices, x, edges=e.double().numpy()), expected, rtol=1e-5, atol=1e-5
    )
    assert not torch.allclose(
        inference(net, indptr, indices, x, edges=e.flip(0)), expected, atol=0.01
    )
    whole = e.round()  # a store keeps features of edges in a type of their own
    for dtype in (torch.float16, torch.int8, torch.float64):
        given = (net([block] * 3, x, edges=[whole.to(t)] * 3) for t in (torch.float32, dtype))
        assert torch.equal(*given)
    with pytest.raises(ValueError, match="edges is None: with edge_dim 4"):
        net([block] * 3, x)
    net.train().recompute = True
    both = []
    for kept in (True, False):
        net.recompute = not kept
        net.zero_grad()
        net([block] * 3, x, edges=[e] * 3, key=7).square().sum().backward()
        both.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    torch.testing.assert_close(*both)


MODELS = {
    "sage": {},
    "sage-pool": {"norm": "layer"},
    "gcn": {"residual": True},
    "gat": {"heads": 2, "residual": True},
    "gin": {"norm": "batch"},
}


def _net(conv, widths=(12, 8, 5), **options):
    torch.manual_seed(4)
    net = GNN(*widths, conv=conv, num_layers=3, **{**MODELS[conv], **options})
    for norm in net.norms:
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    return net


class _GatherOnly:
    """Features that are no tensor."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.asked = x, x.shape, x.dtype, 0

    def gather(self, ids, out=None):
        self.asked = max(self.asked, ids.numel())
        return torch.index_select(self.x, 0, ids, out=out)


@pytest.mark.parametrize("conv", MODELS)
def test_model_inference_is_one_forward_pass_over_the_whole_graph(conv, tmp_path, monkeypatch):
    """In chunks, with a hub, isolated nodes and self-loops, in memory or in files, from a tensor or an object."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = []
    monkeypatch.setattr(
        model,
        "_nameless_file",
        lambda size, make=model._nameless_file: files.append(make(size)) or files[-1],
    )
    indptr, indices = _random_graph(np.random.default_rng(11), 90, 5)
    hub = torch.randint(0, 90, (200,), dtype=indices.dtype)
    indices = torch.cat([indices[: indptr[50]], hub, indices[indptr[50] :]])
    indptr, everyone = torch.cat([indptr[:51], indptr[51:] + len(hub)]), torch.arange(90)
    assert (indptr.diff() == 0).sum() > 5 and indptr[-1] == indices.numel()
    x = torch.randn(90, 12)
    for widths in ((12, 8, 5), (12, 16, 20)):
        net = _net(conv, widths).eval()
        block = Block(indptr.to(indices.dtype), indices, everyone)
        expected = net([block] * 3, x)
        net.train()
        for options in (
            {},
            {"chunk": 7},
            {"chunk_edges": 20},
            {"chunk": 13, "chunk_edges": 64, "memory": 0},
        ):
            torch.testing.assert_close(
                inference(net, indptr, indices, x, **options), expected, rtol=1e-5, atol=1e-5
            )
        rows = _GatherOnly(x.double())
        torch.testing.assert_close(
            inference(net, indptr, indices, rows, chunk=10), expected, rtol=1e-5, atol=1e-5
        )
        assert rows.asked == 10 and net.training
        if net.degrees is None and net.layers[0].uses_degree:
            net.degrees = model.graph_degrees(indptr, indices)
            torch.testing.assert_close(net.eval()([block] * 3, x), expected, rtol=1e-5, atol=1e-5)
    assert len(files) >= 6 and not list(tmp_path.iterdir())
    complaint = "no room for .* GB for a layer's rows in .*: set TMPDIR to a larger disk"
    with monkeypatch.context() as full, pytest.raises(OSError, match=complaint):
        full.setattr(os, "posix_fallocate", _no_space)
        inference(net, indptr, indices, x, memory=0)
    alone = inference(net, torch.zeros(91, dtype=torch.int64), indices[:0], x)  # no edges at all
    assert alone.shape == (90, 20) and alone.isfinite().all()


def _no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _infers(rank, indptr, indices, x, nets, memory, barrier, table, results):
    def total(*values):
        table[rank, : len(values)] = torch.tensor(values, dtype=torch.float64)
        barrier.wait(60)
        sums = table[:, : len(values)].sum(0).tolist()
        barrier.wait(60)
        return sums

    torch.set_num_threads(1)
    for position, net in enumerate(nets):
        logits = inference(
            net,
            indptr,
            indices,
            x,
            chunk=16,
            chunk_edges=100,
            memory=memory,
            rank=rank,
            world=2,
            total=total,
        )
        # a queue keeps the order of one rank, not of two
        results.put((position, logits.numpy().copy()))
        barrier.wait(60)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_model_inference_with_two_ranks(memory):
    indptr, indices = _random_graph(np.random.default_rng(12), 150, 5)
    x, nets = torch.randn(150, 12), [_net(conv) for conv in MODELS]
    context = _forkserver()
    barrier, results = context.Barrier(2), context.Queue()
    table = torch.zeros(2, 4, dtype=torch.float64).share_memory_()
    shared = [indptr, indices, x, nets, memory, barrier, table, results]
    processes = [
        context.Process(target=_infers, args=(rank, *shared), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    expected, seen = [inference(net, indptr, indices, x) for net in nets], []
    for _ in range(2 * len(nets)):
        position, logits = results.get(timeout=120)
        torch.testing.assert_close(
            torch.from_numpy(logits), expected[position], rtol=1e-5, atol=1e-5
        )
        seen.append(position)
    assert sorted(seen) == sorted([*range(len(nets))] * 2)
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _infers_with_a_hub(conv):
    """Print the bytes that inference takes beside what was there."""
    V, hub = 200_000, 1_500_000
    torch.manual_seed(0)
    degree = torch.full((V,), 4)
    degree[7] = hub
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(V, (int(indptr[-1]),), dtype=torch.int32)
    x, net = torch.randn(V, 64), GNN(64, 64, 4, conv=conv, num_layers=2, heads=2)
    options = dict(chunk=2048, chunk_edges=1 << 14, memory=0)
    inference(net, torch.tensor([0, 2, 2]), indices[:2] % 2, x[:2], **options)

    def anonymous():
        return (
            int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        )

    before, peak, finish = anonymous(), [0], net.finish

    def watched(*args):
        peak.append(anonymous())
        return finish(*args)

    net.finish = watched
    inference(net, indptr, indices, x, **options)
    print(max(peak) - before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("conv, times", [("sage", 1), ("sage-pool", 1), ("gcn", 1), ("gat", 10)])
def test_model_inference_with_a_hub_stays_in_bounded_memory(conv, times, tmp_path):
    """Edges of the hub as [E, width] alone would take 384 MB; the three tables, in files, 51 MB each."""
    took = int(_end(_fork(tmp_path / "out", _infers_with_a_hub, conv)).splitlines()[-1])
    print(f"{took / 1e6:.0f} MB")
    assert took < 25e6 * times


def test_model_sampled_gcn_and_gin_are_right_on_average():
    """One layer over many sampled blocks: its mean is the layer over all neighbours."""
    indptr, indices = _random_graph(np.random.default_rng(13), 60, 12)
    x, ids = torch.randn(60, 6), torch.arange(60)
    e = torch.randn(indices.numel(), 2)
    for conv in ("gcn", "gin", "gine"):
        torch.manual_seed(5)
        net = GNN(6, 8, 4, conv=conv, num_layers=1, edge_dim=2 * (conv == "gine"))
        layer = net.layers[0]
        if conv != "gcn":
            layer.mlp = torch.nn.Linear(6, 4)  # an average passes through what is linear
        net.degrees = model.graph_degrees(indptr, indices)
        sample = NeighborSampler(indptr, indices, [3], edge_ids=True).sample
        mean = torch.zeros(60, 4, dtype=torch.float64)
        with torch.no_grad():
            for step in range(3000):
                blocks = sample(ids, step)
                mean += (
                    net(
                        blocks,
                        x[blocks[0].src_nodes],
                        edges=[e[block.edge_ids] for block in blocks],
                    )
                    / 3000
                )
        exact = inference(net, indptr, indices, x, edges=e).double()
        assert (mean - exact).abs().mean() < 0.06 * exact.abs().mean()  # without the degrees: 0.5


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("conv", MODELS)
def test_model_a_batch_of_one_seed_or_none_trains(conv, norm):
    indptr, indices = _random_graph(np.random.default_rng(7), 30, 4)
    net = GNN(
        6, 8, 3, conv=conv, num_layers=2, norm=norm, residual=True, heads=2, input_dropout=0.1
    )
    for seeds in (torch.arange(0), torch.arange(1)):
        blocks = NeighborSampler(indptr, indices, [3, 3]).sample(seeds, 0)
        logits = net(blocks, torch.randn(blocks[0].num_src, 6))
        assert logits.shape == (len(seeds), 3)
        net.zero_grad()
        torch.nn.functional.cross_entropy(logits, seeds % 3, reduction="sum").backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_model_gin_of_two_classes_has_no_norm_through_which_nothing_passes():
    """A layer norm of two numbers leaves their signs: its gradient is zero."""
    for classes, norm, kind in (
        (2, "layer", ()),
        (1, "layer", ()),
        (3, "layer", torch.nn.LayerNorm),
        (2, "batch", model.BatchNorm),
    ):
        inner = [
            type(part)
            for part in GNN(6, 8, classes, conv="gin", num_layers=2, norm=norm).layers[-1].mlp
        ]
        assert len(inner) == 3 + bool(kind) and (not kind or inner[1] is kind)


def test_model_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="width 10 cannot be shared by 4 heads"):
        GNN(6, 10, 3, conv="gat", heads=4)


def test_a_batch_without_seeds_gives_zero_gradients():
    indptr, indices = _random_graph(np.random.default_rng(7), 30, 4)
    net = SAGE(6, 8, 3, num_layers=2)
    blocks = NeighborSampler(indptr, indices, [3, 3]).sample(torch.arange(0), 0)
    logits = net(blocks, torch.zeros(0, 6))
    assert logits.shape == (0, 3)
    torch.nn.functional.cross_entropy(
        logits, torch.zeros(0, dtype=torch.int64), reduction="sum"
    ).backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())
