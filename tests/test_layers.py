"""Tests: native/layers.py: kernels of both compilers beside torch operations."""

import ctypes
import functools
import importlib.util
import itertools
import os
import shutil
import sys
import threading
import types
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

import model
import sampler
from inference import inference
from model import GNN, Neighborhood
from native import attention, build, sampler_gpu
from native import kernels as on_tensors
from native import layers as fused
from sampler import NeighborSampler
from tasks import metrics
from tests.common import (
    _as_lists,
    _cuda_resources,
    _EmulatedKernels,
    _end,
    _fork,
    _mix,
    _random_graph,
)


def _second(module):
    """Load a module of native/ once more."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_on_gpu", module.__file__)
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    return second


# a second native/layers.py, which takes CPU tensors for those of a GPU
kernels_gpu = _second(on_tensors)
kernels_gpu.is_gpu = lambda device: True
with mock.patch.dict(sys.modules, {on_tensors.__name__: kernels_gpu}):
    attention_gpu = _second(attention)
    layers_gpu = _second(fused)


def _use(functions, monkeypatch):
    """Let model.py use native/layers.py (`fused`), its second one, or None, with the attention of the same kernels."""
    monkeypatch.setattr(model, "fused", functions)
    monkeypatch.setattr(model, "attention", attention_gpu if functions is layers_gpu else attention)


def _emulate_layers(folder, monkeypatch):
    launched = []

    def load_cuda(name, source, device):
        kernels = _EmulatedKernels(source, folder, seed=len(launched), checked=True)
        kernels.launched = launched
        return kernels

    kernels_gpu.load.cache_clear()
    compiler = types.SimpleNamespace(**vars(build) | {"load_cuda": load_cuda})
    monkeypatch.setattr(kernels_gpu, "build", compiler)
    return launched


@pytest.fixture
def cuda_layers(tmp_path_factory, monkeypatch):
    """Put layers_gpu on emulated kernels -> the growing list of kernel names launched."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    return _emulate_layers(tmp_path_factory.getbasetemp(), monkeypatch)


@pytest.fixture(params=["emulated GPU", "CPU"])
def kernels(request, cuda_layers):
    """Return native/layers.py on two kinds of kernels: emulated, one thread at a time, or C with OpenMP."""
    return layers_gpu if request.param == "emulated GPU" else fused


def _equal_to_torch(run, kernels, monkeypatch, **near):
    """Assert that tensors run() are those of torch operations, twice with the same bits, in another order of threads."""
    results = []
    for functions in (kernels, None, kernels):
        _use(functions, monkeypatch)
        results.append(run())
    torch.testing.assert_close(results[0], results[1], **near)
    assert all(map(torch.equal, results[0], results[2]))
    return results[0]


def _with_grads(function, weight, *inputs):
    """Return [function(*inputs), gradients of its inputs]; weight: the output's gradient. Parameters are not copied."""
    inputs = [t if t.requires_grad else t.clone().requires_grad_() for t in inputs]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight)]


def _layer_block(rng, S, N, ids, degree=6):
    """Return indptr and indices of a block with empty destinations and a source that most destinations have."""
    counts = torch.from_numpy(rng.integers(0, degree, S))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.from_numpy(rng.integers(0, N, int(indptr[-1])))
    indices[::3] = N - 1
    return indptr.to(ids), indices.to(ids)


def _padded(indptr, indices, k, rows):
    """Return the same block with k places for each of `rows` destinations, padded with -1."""
    out = torch.full((rows, k), -1, dtype=indices.dtype)
    for s, (a, b) in enumerate(itertools.pairwise(indptr.tolist())):
        out[s, : b - a] = indices[a:b]
    return (torch.arange(rows + 1) * k).to(indptr.dtype), out.view(-1)


def _more_rows(t, count, value=0):
    return torch.cat([t, t.new_full((count, *t.shape[1:]), value)])


def _row_operations(indptr, indices, h, own, pair, best, alpha, beta, gamma):
    """Return outputs and gradients of the operations on rows h of a block's sources."""
    block, width = (indptr, indices), h.shape[1]
    tables = (torch.empty(len(own), 2 * width, dtype=t) for t in (torch.float32, torch.bfloat16))
    return [
        *_with_grads(lambda x: model.self_and_mean(*block, x), pair, h),
        *_with_grads(lambda x: model.max_neighbours(*block, x), best, h),
        *_with_grads(lambda x, a: model.own_plus_mean(*block, x, a, beta), best, h, alpha),
        *_with_grads(lambda x: model.own_plus_mean(*block, x, alpha, beta, gamma=gamma), best, h),
        *(model.self_and_mean(*block, h, own, out) for out in tables),
        model.own_plus_mean(*block, h, alpha, beta, self_rows=own),
        model.gather_rows(h, own),
    ]


@pytest.mark.parametrize(
    "dtype, ids", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)]
)
def test_kernels_equal_torch_operations(kernels, cuda_layers, dtype, ids, monkeypatch):
    rng, S, N = np.random.default_rng(15), 40, 60
    near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=4e-2)
    for width in (1, 7, 8, 36):
        indptr, indices = _layer_block(rng, S, N, ids)
        own = torch.from_numpy(rng.permutation(N)[:S]).to(ids)
        h = torch.randn(N, width).to(dtype)
        if width == 8:  # at an address that is no multiple of 16 bytes
            h = torch.cat([h.new_zeros(1), h.view(-1)])[1:].view(h.shape)
        pair, best = torch.randn(S, 2 * width).to(dtype), torch.randn(S, width).to(dtype)
        given = h, own, pair, best, *torch.rand(2, S), torch.rand(N)
        run = functools.partial(_row_operations, indptr, indices, *given)
        results = _equal_to_torch(run, kernels, monkeypatch, **near)
        assert ("list_in_order" in cuda_layers) == (kernels is layers_gpu)
        if width == 36 and kernels is layers_gpu:  # padding changes nothing
            more = _more_rows(h, 9), _more_rows(own, 3, -1), *(_more_rows(t, 3) for t in given[2:6])
            more += (_more_rows(given[6], 9),)
            padded = _row_operations(*_padded(indptr, indices, 7, S + 3), *more)
            for ours, all_rows in zip(results, padded):
                assert torch.equal(all_rows[: len(ours)], ours)
            padded[0] = padded[0][:, width:]  # the means
            assert not any(t[len(ours) :].any() for ours, t in zip(results, padded))


@pytest.mark.parametrize(
    "ids, arch, pairs",
    [
        (torch.int32, "sm_80", "float-float int8-bf16"),
        (torch.int64, "sm_90", "bf16-bf16 float-bf16"),
    ],
)
def test_cuda_programs_stay_in_registers(ids, arch, pairs):
    """The other tests compile as C; what C accepts may not be valid C++."""
    id_option, is_old = {"ID": sampler_gpu.IDS[ids]}, arch == "sm_80"
    for pair in pairs.split():
        read, made = pair.split("-")
        text = build.read_source("layers.cu", IN=read, OUT=made, **id_option)
        assert "self_and_mean_grad" in _cuda_resources(text, arch)
    typed_options = id_option | {"WEIGHT": "double"} | ({} if is_old else {"TYPE": "unsigned char"})
    programs = [
        build.read_source("sampler.cu", rule, **typed_options)
        for rule in ("positions", "labor", "weights")
    ]
    wide, odd = torch.empty(1, 100), torch.empty(1, 7, dtype=torch.bfloat16)
    rows = (wide.to(torch.int8), wide) if is_old else (wide, odd)
    outer, _ = sampler_gpu.aggregate_source(ids, sampler_gpu.AGGREGATED, *rows)
    programs += [outer, build.read_source("links.cu", **id_option)]
    programs.append(build.read_source("norm.cu", IN=made, OUT=made, WIDTH=512, **id_option))
    found = [used for text in programs for used in _cuda_resources(text, arch).values()]
    assert {(stack, spilled) for _, stack, spilled in found} == {(0, 0)}, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_and_its_gradient_are_one_kernel(cuda_layers, dtype, monkeypatch):
    """Rows without a class have neither, and what is not finite is not hidden."""
    near = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=1e-2, atol=1e-3)
    weight = torch.tensor(0.25)
    for classes in (1, 5, 16, 47):
        logits = (5 * torch.randn(20, classes)).to(dtype).requires_grad_()
        y = torch.randint(-1, classes, (20,))
        y[-1], y[0] = -1, classes - 1
        results = []
        for functions in (fused, layers_gpu):  # the first leaves the CPU to torch
            monkeypatch.setattr(metrics, "layers", functions)
            loss = metrics.cross_entropy(logits if functions is layers_gpu else logits.float(), y)
            results.append((loss.detach(), *torch.autograd.grad(loss, logits, weight)))
        (want, to_logits), (loss, grad) = results
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, to_logits, **near)
        assert grad[0].any() == (classes > 1) and not grad[y < 0].any()
    assert cuda_layers == ["cross_entropy"] * 4
    for odd in (float("nan"), float("inf")):
        logits = torch.tensor([[1.0, odd], [3.0, 0.0]]).to(dtype)
        assert not layers_gpu.cross_entropy(logits, torch.tensor([0, 0])).isfinite()
    assert layers_gpu.cross_entropy(logits.double(), y[:2]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 36, 260])
def test_norm_relu_and_dropout_are_one_kernel_each_way(cuda_layers, dtype, width, monkeypatch):
    """With and without residual and dropout; nodes below 0 are padding; threads add up one row, or several."""
    near = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=3e-2, atol=6e-2)
    S = 11
    h, residual, weight = torch.randn(3, S, width).to(dtype)
    norm = model.LayerNorm(width)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    nodes = torch.randperm(S).int()
    nodes[-2:] = -1
    weight[-2:] = 0
    for runs, drop, more in (
        (1 << 20, 0, False),
        (1 << 20, 0.5, True),
        (3, 0.5, False),
        (3, 0, True),
    ):
        monkeypatch.setattr(layers_gpu, "RUNS", runs)
        inputs = [h, *[residual] * more, norm.weight, norm.bias]

        def step(h, *rest):
            given = {"norm": norm, "residual": rest[0] if more else None}  # noqa: B023
            return model.relu_dropout(h, drop, nodes=nodes, seed=7, **given)  # noqa: B023

        def run():
            out, *grads = _with_grads(step, weight, *inputs)  # noqa: B023
            if model.fused:
                assert out.dtype == dtype and not out[-2:].any() and not grads[0][-2:].any()
            return [out[:-2], *grads]

        _equal_to_torch(run, layers_gpu, monkeypatch, **near)
    assert cuda_layers == ["norm_relu", "norm_relu_grad"] * 8


def test_a_norm_that_is_no_plain_layer_norm_is_left_to_torch(cuda_layers, monkeypatch):
    _use(layers_gpu, monkeypatch)
    h, plain = torch.randn(5, 6), model.LayerNorm(6)
    hooked, cast = model.LayerNorm(6), model.LayerNorm(6).double()
    hooked.register_forward_hook(lambda *a: None)
    unbiased = torch.nn.LayerNorm(6, bias=False)
    for norm in (hooked, unbiased, model.LayerNorm(6, elementwise_affine=False), plain, cast):
        rows = h.double() if norm is cast else h
        out = model.relu_dropout(rows, 0, norm=norm, residual=rows)
        torch.testing.assert_close(out, torch.relu(norm(rows + rows)), rtol=1e-5, atol=1e-6)
    assert cuda_layers.count("norm_relu") == 1
    wide = torch.randn(2, 1025), model.LayerNorm(1025), None
    for rows, norm, residual in ((h, plain, h.bfloat16()), wide):
        assert layers_gpu.norm_relu_dropout(rows, norm, None, 0, 0, residual=residual) is None


_LOCKSTEP = """
#include <pthread.h>
#define WARP 8
#define LANE (int)(blockIdx.x %% WARP)
#define sum_of_warp(x) ((__typeof__(x))sum_of_lanes(x, WARP))
#define before_in_warp(x) ((long long)sum_of_lanes(x, LANE))
#define votes(yes, at) ((unsigned)sum_of_lanes((unsigned)(yes) << (at), WARP))
static pthread_barrier_t barrier;
static double sum_of_lanes(double x, int end);
%s
static double sum_of_lanes(double x, int end) {
  static double lanes[WARP];
  lanes[LANE] = x;
  pthread_barrier_wait(&barrier);
  double sum = 0;
  for (int q = 0; q < end; q++) sum += lanes[q];
  pthread_barrier_wait(&barrier);
  return sum;
}
__attribute__((constructor)) static void make_barrier(void) { pthread_barrier_init(&barrier, 0, WARP); }
"""


class _InLockstep(_EmulatedKernels):
    """Emulated kernels whose threads of a warp of 8 run beside each other."""

    def __init__(self, source, folder):
        super().__init__(_LOCKSTEP % source, folder)

    def _launch(self, function, grid, _y, _z, block, *rest):
        lanes = [torch.arange(lane, grid * block, 8) for lane in range(8)]
        size = ctypes.c_long(len(lanes[0]))
        threads = []
        for order in lanes:
            given = ctypes.c_void_p(order.data_ptr()), size, rest[-2]
            threads.append(threading.Thread(target=function, args=given, daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
        assert not any(t.is_alive() for t in threads), "a thread is missing from a sum of its warp"
        self.launched.append(function.__name__[4:])
        return 0


@pytest.mark.parametrize("width", [7, 36, 70])
def test_threads_of_a_warp_share_a_row(cuda_layers, width, tmp_path, monkeypatch):
    """As one thread has it, within rounding; no row is in two blocks."""
    assert not build.BLOCK % layers_gpu.WARP
    h, residual, weight = torch.randn(3, 19, width)
    norm = model.LayerNorm(width)
    monkeypatch.setattr(layers_gpu, "RUNS", 5)
    _use(layers_gpu, monkeypatch)

    def step(h, residual, *_):
        return model.relu_dropout(h, 0.5, seed=3, norm=norm, residual=residual)

    inputs = h, residual, norm.weight, norm.bias
    alone = _with_grads(step, weight, *inputs)
    text = kernels_gpu.program(torch.int32, h.dtype, h.dtype, width)
    code = kernels_gpu.Code(_InLockstep(text, tmp_path))
    monkeypatch.setattr(kernels_gpu, "load", lambda *a: code)
    together = _with_grads(step, weight, *inputs)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    assert code.compiled.launched == ["norm_relu", "norm_relu_grad"]


@pytest.mark.parametrize("rule", [{}, {"method": "labor"}])
def test_threads_of_a_warp_sample_together(rule, tmp_path):
    """The blocks of the CPU, for numbers of rows and edges that fill no warp."""
    graph = _random_graph(np.random.default_rng(3), 6000, 9)
    s = NeighborSampler(*graph, [9, 70, 2], seed=4, **rule)
    compiled = lambda name, source: _InLockstep(source, tmp_path)  # noqa: E731
    backend = sampler_gpu.Backend(s.engine.spec, s.fanouts, s.seed, compiled)
    for step, count in enumerate((77, 5)):
        seeds = torch.randperm(6000)[:count]
        assert _as_lists(backend.sample(seeds, step)[::-1]) == _as_lists(s.sample(seeds, step))
    marked = backend.kernels.launched
    assert marked.count("mark") == marked.count("number") == 6


@pytest.mark.parametrize("most", [31, 300])
def test_the_lists_of_hubs_are_summed_in_tiles(cuda_layers, most, monkeypatch):
    """Always in the same order. Maxima of lists without a whole tile have the bits of the CPU, where there are no tiles; a
    tile may begin with a duplicate edge."""
    indptr, indices = _layer_block(np.random.default_rng(23), 100, 120, torch.int32, degree=12)
    indices[::3] = torch.arange(len(indices[::3])) % 119
    indices[100 : 100 + most] = 7
    indices[indices == 7] = torch.where(torch.arange((indices == 7).sum()) < most, 7, 8).int()
    short = torch.bincount(indices, minlength=120) < 32
    h, target = torch.randn(120, 12), torch.randn(100, 12)
    pair, (alpha, beta) = torch.randn(100, 24), torch.rand(2, 100)
    gamma = torch.rand(120)
    results = []
    for functions, attend in (
        (layers_gpu, attention_gpu),
        (layers_gpu, attention_gpu),
        (fused, attention),
    ):
        block = indptr, indices.clone()
        if len(results) == 1:
            kernels_gpu.static(types.SimpleNamespace(indptr=block[0], indices=block[1]))
        mean = _with_grads(lambda x: functions.self_and_mean(*block, x), pair, h)  # noqa: B023
        scaled = lambda x: functions.own_plus_mean(*block, x, alpha, beta, gamma=gamma)  # noqa: B023, E731
        best = lambda x: functions.max_neighbours(*block, x)  # noqa: B023, E731
        attended = lambda x, y: attend.attend(*block, x, y, torch.ones(3, 4))  # noqa: B023, E731
        both = _with_grads(attended, target, h, target)
        results.append(
            [mean[1], _with_grads(scaled, target, h)[1], _with_grads(best, target, h)[1], both[1]]
        )
    ours, again, on_cpu = results
    assert all(map(torch.equal, ours, again)) and (most < 32 or not short[7])
    for one, other in zip(ours, on_cpu):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert short.sum() > 40 and torch.equal(ours[2][short], on_cpu[2][short])
    assert cuda_layers.count("attention_source_grad") == 4


@pytest.mark.parametrize("last", ["weighted", "plain"])
def test_layers_on_one_static_block_have_their_own_shares(cuda_layers, last, monkeypatch):
    """Whichever asks for its lists first, which is the last layer."""
    _use(layers_gpu, monkeypatch)
    block = _layer_block(np.random.default_rng(33), 40, 60, torch.int32)
    h, (alpha, beta), weight = torch.randn(60, 8), torch.rand(2, 40), torch.randn(40, 8)
    weighted = lambda x: model.own_plus_mean(*block, x, alpha, beta)  # noqa: E731
    plain = lambda x: model.self_and_mean(*block, x)[:, 8:]  # noqa: E731
    sums = {
        "weighted": lambda x: plain(x) + weighted(x),
        "plain": lambda x: plain(x) + (weighted(x) + plain(x)),
    }
    expected = _with_grads(sums[last], weight, h)
    kernels_gpu.static(types.SimpleNamespace(indptr=block[0], indices=block[1]))
    for _ in range(2):
        torch.testing.assert_close(_with_grads(sums[last], weight, h), expected)


@pytest.mark.parametrize("dtype, ids", [(torch.float, torch.int32), (torch.bfloat16, torch.int64)])
def test_dropout_is_a_function_of_seed_node_and_column(cuda_layers, dtype, ids, monkeypatch):
    """In torch operations, C and CUDA, with the seed from the host or computed from the step on the device."""
    with pytest.raises(ValueError, match="dropout is 1.5: a probability below 1"):
        model.relu_dropout(torch.ones(2, 3), 1.5)
    on_device = model.layer_seed((123, torch.tensor([77])), 3)
    key = sampler.mix(123 ^ 77)
    on_host = model.layer_seed(key, 3)
    assert on_host % 2**64 == _mix(key ^ (2**64 - 4)) and -(2**63) <= on_host < 2**63
    near = dict(rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    nodes = torch.cat([torch.tensor([5, 0, 2_000_000_000]), 6 + torch.randperm(1000)[:57]]).to(ids)
    rows = [_mix((on_host ^ v) % 2**64) for v in nodes.tolist()]
    for width in (1, 8, 43):
        word = lambda row, c: _mix(row + (c // 8 - 1) * 0x9E3779B97F4A7C15)  # noqa: E731
        drawn = [[word(row, c) >> 8 * (c % 8) & 255 for c in range(width)] for row in rows]
        scale = (torch.tensor(drawn) >= 77).to(dtype) * (256 / (256 - 77))  # 0.3 is 77 / 256
        h, grad = torch.randn(60, width).to(dtype), torch.randn(60, width).to(dtype)
        for functions in (layers_gpu, fused, None):
            _use(functions, monkeypatch)
            for seed in (on_host, on_device)[: 1 + (functions is not fused)]:
                drop = lambda x: model.relu_dropout(x * 1, 0.3, nodes=nodes, seed=seed)  # noqa: E731
                y, to_h = _with_grads(drop, grad, h)
                torch.testing.assert_close(y, h.relu() * scale, **near)
                torch.testing.assert_close(to_h, grad * (h > 0) * scale, **near)
                torch.testing.assert_close(model.dropout(h, nodes, seed, 77), h * scale, **near)
            assert torch.equal(model.relu_dropout(h.clone(), 0.3, training=False), h.relu())
            # what is not finite is not hidden; the second is CUDA's NaN
            nan = torch.tensor([[2**31 - 1, -1]], dtype=torch.int32).view(torch.float32)
            assert model.relu_dropout(nan.clone(), 0).isnan().all()
            pair = torch.empty(1, 4, dtype=torch.bfloat16)
            one = torch.tensor([0, 1], dtype=ids)
            assert model.self_and_mean(one, one[:1], nan, None, pair).isnan().all()
    _use(layers_gpu, monkeypatch)
    padded = model.relu_dropout(torch.ones(3, 5), 0.3, nodes=torch.tensor([4, -1, -1]), seed=5)
    assert not padded[1:].any()
    assert cuda_layers.count("relu_dropout") > 5


def test_what_has_no_gradient_in_fused_steps_is_left_to_torch_or_raises(monkeypatch):
    """Learned rows, edge features and factors; second-order gradients."""
    indptr, indices = _layer_block(np.random.default_rng(18), 9, 12, torch.int64)
    block = sampler.Block(indptr, indices, torch.arange(12))
    h, beta, gamma, edges = (torch.rand(*n) for n in ((12, 4), (9,), (12,), (len(indices), 3)))
    attention, gine = model.GATv2Conv(4, 4, edge_dim=3), model.GINEConv(4, 4, edge_dim=3)
    weight, net, gin = torch.randn(9, 4), GNN(4, 4, 4, num_layers=1), model.GINConv(4, 4)
    own, degree = torch.arange(9).flip(0), torch.rand(12, 2)
    for function, *inputs in (
        (lambda rows: model.gather_rows(rows, indices[:9]), h),
        (lambda b, g: model.own_plus_mean(*block[:2], h, beta, b, gamma=g), beta, gamma),
        (lambda x: model.self_and_mean(*block[:2], x, own)[:, 2:6], h),
        (lambda x, a: model.own_plus_mean(*block[:2], x, a, beta, self_rows=own), h, beta),
        (lambda x: attention.combine(Neighborhood(*block[:2], x, h[:9], own, edges=edges)), h),
        (lambda x: gin(block, x, degree.double()), h),
        (lambda x: model.own_plus_mean(*block[:2], x, beta, beta, gamma=degree[:, 1]), h),
        (lambda e: attention(block, h, edges=e), edges),
        (lambda e: gine(block, h, edges=e), edges),
        (lambda pair: net([block], pair, aggregated=True), torch.rand(9, 8)),
    ):
        run = functools.partial(_with_grads, function, weight, *inputs)
        _equal_to_torch(run, fused, monkeypatch)
    x = h.clone().requires_grad_()
    # autograd.grad would not visit a node that raises, only leave the terms that come through it out
    for layer in (attention, gine, lambda block, x, edges: net([block], x)):
        made = layer(block, x, edges=edges).square().sum()
        with pytest.raises(RuntimeError, match="no second derivatives"):
            torch.autograd.grad(made, x, create_graph=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(h, 2 * h)
        moved = torch.autograd.forward_ad.unpack_dual(model.gather_rows(dual, own)).tangent
    assert torch.equal(moved, 2 * h[own])


def test_linear_is_torchs_linear(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # 50 million multiplications
    x, weight = torch.randn(2000, 100), torch.randn(250, 100, requires_grad=True)
    for rows, ours in ((x, True), (x[1:], False)):
        assert ours == (type(fused.linear(rows, weight).grad_fn).__name__ == "_LinearBackward")
    monkeypatch.setattr(fused, "WORTH_COMPILING", 1)
    for S, width, D in (([1], 3, 2), ([300], 50, 20), ([0], 3, 2), ([2, 3], 50, 4)):
        given = torch.randn(*S, D), torch.randn(*S, width), torch.randn(D, width), torch.randn(D)
        both = [_with_grads(f, *given) for f in (fused.linear, torch.nn.functional.linear)]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-3)
        assert fused.linear(*given[1:3]).shape == (*S, D)
    # in torch.func and torch.compile kernels are left to torch
    left = torch.compile(lambda x: fused.linear(x, weight), backend="eager")(x)
    assert type(left.grad_fn).__name__ != "_LinearBackward"
    assert torch.func.grad(lambda w: fused.linear(x, w).sum())(weight.detach()).shape == (250, 100)
    tables, ids = torch.randn(3, 9, 4), torch.tensor([8, 0])
    assert torch.equal(torch.vmap(lambda t: model.gather_rows(t, ids))(tables), tables[:, ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_long_linear_on_a_gpu(cuda_layers, dtype, monkeypatch):
    """Sums over runs of rows, in TF32 products of slices for the weight's gradient; with second derivatives, which kernels
    do not have."""
    near = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=3e-2, atol=6e-2)
    products, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *rows: products.append(rows[0].shape) or bmm(*rows))
    monkeypatch.setattr(layers_gpu, "LONG", 20)
    monkeypatch.setattr(kernels_gpu, "ENOUGH", 64)
    for precision in ("high", "highest"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda word=precision: word)
        for S, width, D in ((192, 6, 12), (23, 3, 7), (19, 3, 7)):
            given = torch.randn(S, D), torch.randn(S, width), torch.randn(D, width), torch.randn(D)
            given = [t.to(dtype) for t in given]
            both = [_with_grads(f, *given) for f in (layers_gpu.linear, torch.nn.functional.linear)]
            torch.testing.assert_close(*both, **near)
    assert cuda_layers == ["column_sums"] * 4
    assert products == [(64, 12, 3)] * (dtype == torch.float32)
    weight, *inputs = [t.double().requires_grad_() for t in (given[0][:2], *given[1:])]
    monkeypatch.setattr(layers_gpu, "LONG", 1)
    torch.autograd.gradgradcheck(layers_gpu.linear, (inputs[0][:2], *inputs[1:]), (weight,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gather_rows_is_index_select(cuda_layers, dtype):
    """On a GPU by one kernel whatever the types of rows and ids; rows of ids below zero are zero there."""
    for width in (1, 3, 100, 700):
        table, few = torch.randn(1000, width).to(dtype), torch.randint(1000, (17,)).int()
        for ids in (torch.randint(1000, (3001,)), few, torch.arange(0)):
            out = torch.empty(len(ids), width, dtype=dtype)
            assert torch.equal(model.gather_rows(table, ids), table[ids.long()])
            assert model.gather_rows(table, ids, out) is out and torch.equal(out, table[ids.long()])
    assert torch.equal(layers_gpu.gather_rows(table, few), table[few.long()])
    rows = layers_gpu.gather_rows(table[:, :5].contiguous(), torch.tensor([7, -1]))
    assert torch.equal(rows[0], table[7, :5]) and not rows[1].any()
    assert cuda_layers == ["gather_rows"] * 2 and kernels_gpu.load.cache_info().currsize == 1
    assert layers_gpu.gather_rows(table, few, torch.empty(17, 700, device="meta")) is None
    for bad in (-1, 1000):
        with pytest.raises(IndexError):
            model.gather_rows(table, torch.tensor([0, bad]))
    # beyond the end of what is too short C would write
    assert model.gather_rows(table, few, torch.empty(0, 700, dtype=dtype)).shape == (17, 700)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_codes_are_decoded_as_they_are_read(cuda_layers, dtype):
    """Gathered, or as own rows and means of neighbours; rows without a node or without edges are zero, as in the padding."""
    rng = np.random.default_rng(3)
    near = dict(rtol=2e-2, atol=0.5) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-4)
    for width in (8, 7):
        codes = torch.randint(-128, 128, (50, width)).to(torch.int8)
        scale = torch.randn(2, width)
        table = _more_rows(codes * scale[0] + scale[1], 1)
        ids = torch.tensor([7, -1, 49, 7])
        rows = layers_gpu.gather_rows(codes, ids, torch.ones(4, width, dtype=dtype), scale=scale)
        assert torch.equal(rows, table[ids].to(dtype))
        indptr, indices = _layer_block(rng, 20, 50, torch.int64)
        own = torch.randperm(50)[:20]
        block = indptr, indices, codes, own
        out = torch.empty(20, 2 * width, dtype=dtype)
        assert layers_gpu.self_and_mean(*block, out) is None  # codes of what?
        slow = model.self_and_mean.__wrapped__(*block, out.clone(), scale=scale)
        assert layers_gpu.self_and_mean(*block, out, scale=scale) is out
        torch.testing.assert_close(out, slow, **near)
        assert torch.equal(out[:, :width], slow[:, :width])
        assert not out[indptr.diff() == 0, width:].any()
        padded = _padded(indptr, indices, 7, 22)
        more = torch.ones(22, 2 * width, dtype=dtype)
        layers_gpu.self_and_mean(*padded, codes, _more_rows(own, 2, -1), more, scale=scale)
        assert torch.equal(more, _more_rows(out, 2))
    assert cuda_layers == ["gather_codes", "plain_self_and_mean", "plain_self_and_mean"] * 2


@pytest.mark.parametrize(
    "heads, width, dtype",
    [
        (1, 6, torch.float32),
        (4, 8, torch.bfloat16),
        (9, 3, torch.float32),
        (9, 3, torch.bfloat16),
        (2, 20, torch.float32),
        (1, 257, torch.bfloat16),
    ],
)
def test_attention_kernels_equal_torch_operations(kernels, heads, width, dtype, monkeypatch):
    rng, S, N, D = np.random.default_rng(16), 30, 50, heads * width
    rtol, atol = 1e-4, max(1e-5, width / 5e6)
    if dtype == torch.bfloat16:
        rtol, atol = 5e-2, max(1e-1, width / 500)
    indptr, indices = _layer_block(rng, S, N, torch.int32)
    nodes = torch.from_numpy(rng.permutation(900)[:S]).int()
    rows = torch.from_numpy(rng.permutation(N)[:S]).int()
    layer = model.GATv2Conv(5, D, heads, dropout=0.4)
    layer.dst_linear = torch.nn.Identity()
    source, target, weight = (torch.randn(n, D).to(dtype) for n in (N, S, S))

    def attend(indptr, indices, nodes, weight, source, target):
        def combine(source, target, attn):
            return layer.combine(
                Neighborhood(indptr, indices, source, target, nodes=nodes, seed=99)
            )

        return _with_grads(combine, weight, source, target, layer.attn)

    def run():
        out = attend(indptr, indices, nodes, weight, source, target)
        with torch.no_grad():
            out.append(layer.eval().combine(Neighborhood(indptr, indices, source, target, rows)))
        layer.train()
        return out

    results = _equal_to_torch(run, kernels, monkeypatch, rtol=rtol, atol=atol)
    if kernels is layers_gpu:  # padding changes nothing
        more = _more_rows(nodes, 4, -1), _more_rows(weight, 4), source, _more_rows(target, 4)
        for padded, ours in zip(attend(*_padded(indptr, indices, 7, S + 4), *more)[:3], results):
            assert torch.equal(padded[: len(ours)], ours)


@pytest.mark.parametrize("conv", ["gine", "gat", "sage", "gcn", "rgcn", "rgat"])
def test_features_of_edges_that_pad_a_block_do_not_matter(cuda_layers, conv, monkeypatch):  # noqa: F811
    """Forward and backward."""
    _use(layers_gpu, monkeypatch)
    rng, S, N = np.random.default_rng(16), 30, 50
    indptr, indices = _layer_block(rng, S, N, torch.int32)
    options = {"num_types": 2} if model.CONVS[conv].uses_types else {}
    layer = model.CONVS[conv](8, 8, edge_dim=3, **options)
    h, weight, edges = torch.randn(N, 8), torch.randn(S, 8), torch.randn(len(indices), 3)

    def run(indptr, indices, edges, weight):
        S = len(indptr) - 1
        types = torch.arange(len(indices)) % 2

        def combine(h, *parameters):
            sent = layer.message(h, torch.ones(N, 2))
            near = Neighborhood(indptr, indices, sent, h[:S], degree=torch.ones(S, 2), seed=9)
            return layer.combine(near._replace(edges=edges, types=types))

        return _with_grads(combine, weight, h, *layer.parameters())

    ours = run(indptr, indices, edges, weight)
    block = _more_rows(indptr, 1, len(indices)), _more_rows(indices, 700, -1)
    found = run(*block, _more_rows(edges, 700, torch.nan), _more_rows(weight, 1))
    assert torch.equal(found[0][:S], ours[0]) and torch.equal(found[1], ours[1])
    torch.testing.assert_close(found[2:], ours[2:], rtol=1e-4, atol=1e-5)


def test_attention_counts_threads_of_more_edges_than_31_bits(tmp_path):
    """The first self-loop behind so many edges, with one head; a sum that overflowed ended every thread."""
    source = kernels_gpu.program(torch.int32, torch.float32, torch.float32)
    kernels = _EmulatedKernels(source, tmp_path, checked=True)
    tensors = {"source": torch.ones(1, 4), "target": torch.ones(1, 4), "attn": torch.ones(4)}
    tensors |= {"indptr": torch.zeros(2, dtype=torch.int32), "weights": torch.zeros(1)}
    nothing = dict.fromkeys(("indices", "self_rows", "dst", "edges", "by", "slopes"))
    E = 2**31 - 1
    launch = kernels.prepare(
        "attention_scores", **tensors, **nothing, S=1, E=E, K=1, D=4, whole=1, wide=0
    )
    order = torch.tensor([E])
    given = ctypes.c_void_p(order.data_ptr()), ctypes.c_long(1), launch._pointers
    kernels._functions["attention_scores"](*given)
    assert kernels.what_failed() is None and tensors["weights"].item() == 8


def test_attention_and_the_rows_after_it_are_dropped_independently(kernels, monkeypatch):
    """The weights of 512 self-loops, against each column of the row that the layer's output becomes."""
    S, layer = 512, model.GATv2Conv(1, 1, dropout=0.5)
    none = torch.zeros(S + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    near = Neighborhood(*none, torch.ones(S, 1), torch.ones(S, 1), seed=99)
    for functions in (kernels, None):
        _use(functions, monkeypatch)
        kept = layer.combine(near) > 0
        same = (model.relu_dropout(torch.ones(S, 16), 0.5, seed=99) > 0) == kept
        assert (same.sum(0) - S / 2).abs().max() < 80  # 7 standard deviations


MODELS = {
    "sage": {},
    "sage with edges": {"edge_dim": 3},
    "sage-pool": {"norm": "layer"},
    "gcn": {"residual": True},
    "gcn with edges": {"edge_dim": 3},
    "gat": {"heads": 2, "residual": True},
    "gin": {"norm": "batch"},
    "gine": {"norm": "layer", "residual": True, "edge_dim": 3},
    "gat with edges": {"heads": 4, "norm": "layer", "edge_dim": 3},
}


def _net(name, widths=(12, 8, 5), **options):
    torch.manual_seed(4)
    net = GNN(*widths, conv=name.split()[0], num_layers=3, **{**MODELS.get(name, {}), **options})
    for norm in net.norms:
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    return net


def _three_blocks():
    """Sample blocks of 12 seeds -> (blocks, features of their sources [N, 20], edge features [E, 3] for each block)."""
    indptr, indices = _random_graph(np.random.default_rng(17), 200, 6)
    sample = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample
    blocks = sample(torch.randperm(200)[:12].int(), 1)
    edges = [torch.randn(block.num_edges, 3) for block in blocks]
    return blocks, torch.randn(blocks[0].num_src, 20), edges


def _trained(net, blocks, x, key=2**63 + 99, **options):
    net.zero_grad()
    logits = net(blocks, x, key=key, **options)
    (logits * torch.arange(logits.numel()).view_as(logits).cos()).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize(
    "name, options",
    [
        ("sage", {}),
        ("sage", {"norm": "layer", "residual": True}),
        ("sage", {"input_dropout": 0.25}),
        ("sage-pool", {"norm": "none"}),
        ("gcn", {"residual": False}),
        ("gat", {"heads": 2, "residual": True}),
        ("gin", {"norm": "none"}),
        ("sage with edges", {}),
        ("gcn with edges", {}),
        ("gine", {}),
        ("gat with edges", {}),
    ],
)
def test_models_on_kernels_equal_torch_operations(kernels, cuda_layers, name, options, monkeypatch):
    """Forward and gradients with dropout, also recomputed; bitwise equal with threads in another order."""
    for module in (on_tensors, kernels_gpu):  # a thread adds up more than a row for the bias
        monkeypatch.setattr(module, "ENOUGH", 64)
    blocks, x, edges = _three_blocks()
    given = {"edges": edges} if "edge_dim" in MODELS[name] else {}
    widths = (
        20,
        12 if options else 8,
        5,
    )  # threads have two vectors of 4 columns; a row may end after one
    make = functools.partial(_net, name, widths, **options)
    run = lambda: _trained(make(), blocks, x, **given)  # noqa: E731
    ours = _equal_to_torch(run, kernels, monkeypatch, rtol=1e-4, atol=1e-5)
    recomputed = _trained(make(recompute=True), blocks, x, **given)
    torch.testing.assert_close(ours, recomputed, rtol=1e-5, atol=1e-6)
    kernel = {"gine": "edge_sums_grad", "gat with edges": "edge_matrix_grad"}.get(name)
    normed = _net(name, **options).norms[0].__class__ is model.LayerNorm
    kernel = kernel or ("norm_relu_grad" if normed else "relu_dropout_grad")
    assert (kernel in cuda_layers) == (kernels is layers_gpu)


class _Twice(torch.nn.Linear):
    """As the Linear of an adapter: its weight is not all that it is."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", MODELS)
def test_linears_that_were_replaced_or_have_hooks_are_called(name):
    """So are layers with hooks; what a hook, also one of all modules, was given is not overwritten."""
    blocks, x, edges = _three_blocks()
    twice, replaced, hooked = (_net(name, (20, 8, 5)).eval() for _ in range(3))
    for net in (twice, replaced, hooked):
        for linear in (m for m in net.modules() if isinstance(m, model.Linear)):
            if net is replaced:
                linear.__class__ = _Twice
            elif net is hooked:
                linear.register_forward_hook(lambda linear, given, made: 2 * made)
            else:
                linear.load_state_dict({n: 2 * p for n, p in linear.state_dict().items()})
    for part in (hooked.layers[0], getattr(hooked.layers[0], "pool_linear", hooked.norms[0])):
        part.register_full_backward_hook(lambda *given: None)  # ReLU is not in place then
    expected = twice(blocks, x, edges=edges)
    for net in (replaced, hooked):
        torch.testing.assert_close(net(blocks, x, edges=edges), expected)
    net, seen = _net(name, (20, 8, 5)).eval(), []
    expected = net(blocks, x, edges=edges)
    watch = lambda part, given, made: seen.append((made, made.clone()))  # noqa: E731
    for part in (net.layers[0], net.norms[1]):
        part.register_forward_hook(watch)
    assert torch.equal(net(blocks, x, edges=edges), expected) and len(seen) == 2
    of_all = torch.nn.modules.module
    backward = of_all.register_module_full_backward_hook(lambda *given: None)
    with backward, of_all.register_module_forward_hook(watch):
        _net(name, (20, 8, 5))(blocks, x, edges=edges).sum().backward()
    assert len(seen) > 4 and all(torch.equal(*both) for both in seen)


@pytest.mark.filterwarnings("ignore")  # of the tracer
@pytest.mark.parametrize("name", MODELS)
def test_a_bias_may_be_none_and_a_model_traced(name):
    """None is a bias of zeros; torch.jit.trace records no call of a kernel, only torch operations."""
    blocks, x, edges = _three_blocks()
    net = _net(name, (20, 8, 5), residual=False).eval().requires_grad_(False)
    biased = [m for m in net.modules() if isinstance(m, torch.nn.Linear | model.GCNConv)]
    biased = [m for m in biased if getattr(m, "bias", None) is not None]
    for module in biased:
        module.bias.zero_()
    graph = _random_graph(np.random.default_rng(17), 40, 6)
    table, features = torch.randn(40, 20), torch.randn(len(graph[1]), 3)
    run = lambda x: (net(blocks, x, edges=edges), inference(net, *graph, table, edges=features))  # noqa: E731
    expected = run(2 * x)
    for module in biased:
        module.bias = None
    torch.testing.assert_close(run(2 * x), expected)
    traced = torch.jit.trace(lambda x: net(blocks, x, edges=edges), x, check_trace=False)
    torch.testing.assert_close(traced(2 * x), expected[0])


def test_cuda_graphsage_in_bfloat16(cuda_layers, monkeypatch):
    """As under torch.autocast: rows and pairs in either dtype; parameters and their gradients are float32."""
    _use(layers_gpu, monkeypatch)
    blocks, x, _ = _three_blocks()
    net = _net("sage", (20, 8, 5), dropout=0.5)
    expected = _trained(net, blocks, x)
    pair, launched = model.self_and_mean(*blocks[0][:2], x), len(cuda_layers)
    same = _trained(net, blocks, pair, aggregated=True)
    torch.testing.assert_close(same, expected, rtol=1e-5, atol=1e-6)
    # ReLU and dropout where rows are read; lists of sources in four launches, sums over tiles, then over lists
    assert len(cuda_layers) - launched == 2 + 2 * 6
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    # it would leave behind what it found
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: nullcontext())
    half = x.bfloat16(), pair.bfloat16()
    for rows, aggregated in ((x, False), (half[0], False), (pair, True), (half[1], True)):
        logits, *grads = _trained(net, blocks, rows, aggregated=aggregated)
        assert logits.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)
        for ours, theirs in zip([logits.float(), *grads], expected):
            assert (ours - theirs).norm() < 0.15 * theirs.norm()


def test_cuda_layers_give_way_to_torch_operations(monkeypatch):
    kernels_gpu.load.cache_clear()
    monkeypatch.setattr(build, "load_cuda", lambda *a: None)  # which has warned
    block, h = (torch.tensor([0, 1, 3]), torch.tensor([4, 0, 2])), torch.randn(5, 4)
    monkeypatch.setattr(kernels_gpu, "build", build)
    assert layers_gpu.self_and_mean(*block, h) is layers_gpu.max_neighbours(*block, h) is None
    assert layers_gpu.relu_dropout(h, None, 5, 8) is layers_gpu.gather_rows(h, block[1]) is None
    kernels_gpu.load.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_take_tables_of_2_to_the_32_numbers(kernels, dtype, tmp_path):
    """The last rows of sparse files, at numbers whose product with the width overflows 32 bits. Adam's skips negative rows,
    which torch operations would not."""
    width, N, S = 32, 8, 5
    places = torch.arange(N).int()
    files = (str(tmp_path / name) for name in ("table", "mean", "square"))
    sparse = (torch.from_file(file, shared=True, size=1 << 32, dtype=dtype) for file in files)
    table, *moments = (t.view(-1, width) for t in sparse)
    far, h = len(table) - N, torch.randn(N, width).to(dtype)
    table[-N:] = h
    on_gpu, results = kernels is layers_gpu, []
    indptr, near = torch.arange(S + 1).int() * 2, torch.randint(N, (2 * S,)).int()
    kernels_of_edges = attention_gpu if on_gpu else attention
    for rows, more in ((h, 0), (table, far)):
        block, own = (indptr, near + more, rows), places[:S] + more
        attn, edges = torch.ones(2, width // 2), (torch.ones(2 * S, 0), torch.ones(0, width))
        results.append(
            [
                kernels.self_and_mean(*block, own, torch.empty(S, 2 * width)),
                kernels.own_plus_mean(*block, *torch.ones(2, S), self_rows=own),
                kernels.mean_neighbours(*block),
                kernels.max_neighbours(*block),
                kernels.gather_rows(rows, own),
                kernels_of_edges.attend(*block, h[:S], attn, self_rows=own),
                kernels_of_edges.edge_sums(*block, *edges),
            ]
        )
    assert all(map(torch.equal, *results))
    code = (kernels_gpu if on_gpu else on_tensors).load(torch.int32, dtype, dtype, h.device)
    if on_gpu:  # a thread has four columns
        with pytest.raises(RuntimeError, match="4,294,967,296 threads"):
            code.run("relu_dropout", 1 << 30, width=16)
    # an edge of each source, and its destination
    lists = dict(start=places, size=torch.ones(N).int(), destination=places + far, N=N, whole=1)
    lists |= dict.fromkeys(["indices", "edge", "end", "tile_sums", "tiles"])
    given = dict(share=torch.ones(N), alpha=None, gamma=None, S=0, kept=None, scale=1.0)
    given |= dict(
        width=width // 2, runs=N, run=1, sums=None, out=torch.empty(N, width // 2).to(dtype)
    )
    code.run("self_and_mean_grad", N, **lists, **given, grad=table)
    assert torch.equal(given["out"], h[:, width // 2 :])
    if dtype == torch.float32:
        rows, rates = torch.tensor([1, far, -1]), torch.tensor([0.1, 1.0])
        numbers = dict(first=0.0, second=0.0, eps=0.0, rates=rates)
        assert kernels.adam_rows(rows, torch.ones(3, width), *moments, table, **numbers)
        h[0] -= 0.1
        torch.testing.assert_close(table[-N:], h)
        assert table[[0, 1], 0].tolist() == [0, pytest.approx(-0.1)]


def test_blocks_and_rows_that_do_not_fit_are_left_to_torch():
    """C code read or wrote past the end of tensors."""
    offsets, h, one = torch.tensor([0, 1, 2]), torch.randn(4, 8), torch.ones(2)
    ids, left = torch.tensor([0, 1]), []
    for indptr, indices in (
        (offsets, ids + 3),
        (offsets, ids - 1),
        (offsets + 1, torch.tensor([0, 1, 2])),
        (offsets, ids[:1]),
        (offsets, torch.tensor([0, 1, 2])),
        (torch.tensor([0, 9, 2]), ids),
    ):
        block, edges = (indptr, indices), torch.ones(len(indices), 0)
        left += [
            fused.self_and_mean(*block, h),
            fused.max_neighbours(*block, h),
            fused.own_plus_mean(*block, h, one, one),
            fused.mean_neighbours(*block, h),
            attention.attend(*block, h, h[:2], torch.ones(2, 4)),
            attention.edge_sums(*block, h, edges, torch.ones(0, 8)),
        ]
    block, none = (offsets, ids), torch.ones(4, 0)
    left += [
        fused.self_and_mean(*block, h[:1]),
        fused.self_and_mean(*block, h, out=torch.empty(9, 16)),
        fused.self_and_mean(*block, h, out=torch.empty(2, 8)),
        fused.self_and_mean(*block, h, ids + 3),
        fused.self_and_mean(*block, h, ids[:1]),
        fused.self_and_mean(*(t.to("meta") for t in (*block, h))),
        fused.own_plus_mean(*block, h, none[:2], one),
        fused.own_plus_mean(*block, h, torch.ones(3), torch.ones(3)),
        fused.own_plus_mean(*block, h, one, one.to("meta")),
        fused.own_plus_mean(*block, h, one, one, gamma=none),
        fused.relu_dropout(h, none.long(), 1, 8),
        fused.relu_dropout(h, ids, 1, 8),
    ]
    for target, nodes in ((h[:3], None), (h[:1], None), (h[:2], ids[:1])):
        given = h, target, torch.ones(2, 4)
        left.append(attention.attend(*block, *given, drawn=(nodes, 0, 0)))
    assert all(rows is None for rows in left)
    weight, moment = torch.ones(4, 8), torch.zeros(4, 8)
    numbers = {"first": 0.0, "second": 0.0, "eps": 0.0, "rates": torch.ones(2)}
    for rows, grad, mean in (
        (ids + 3, h[:2], moment),
        (ids, h[:1], moment),
        (ids.int(), h[:2], moment),
        (ids, torch.ones(2, 9), moment),
        (ids, h[:2], moment[:1]),
        (ids, h[:2], moment.double()),
    ):
        assert not fused.adam_rows(rows, grad, mean, moment, weight, **numbers)


# clang's __BIGGEST_ALIGNMENT__ is below that of vectors and its OpenMP runtime another package; icx has fast math
LIKE_CLANG_AND_ICX = """#!/bin/sh
case "$*" in *openmp*) exit 1; esac
exec cc -ffast-math "$@" -U__BIGGEST_ALIGNMENT__ -D__BIGGEST_ALIGNMENT__=16 -O0
"""


def _start_threads(number, compiler, cache):
    os.environ.update(CC=compiler, XDG_CACHE_HOME=cache)
    torch.set_num_threads(number)
    code = fused.load(torch.int32, torch.float32, torch.bfloat16, torch.device("cpu"))
    h = torch.full((9999, 64), 2**31 - 1).int().view(torch.float32)
    out = torch.zeros(9999, 64, dtype=torch.bfloat16)

    def work():
        before = os.listdir("/proc/self/task")
        code.relu_dropout(h, fused.Dropout.of(None, 3, 0), out)
        started = len(os.listdir("/proc/self/task")) - len(before)
        print(code.columns, started, out.isnan().all().item())
        ctypes.c_void_p.in_dll(code.compiled, "parallel").value = None  # a torch without OpenMP
        code.relu_dropout(h, fused.Dropout.of(None, 3, 0), out.zero_())
        print(out.isnan().all().item())

    thread = threading.Thread(target=work)  # which OpenMP counts for itself
    thread.start()
    thread.join()


def test_cpu_kernels_run_on_torchs_threads_whatever_the_compiler(tmp_path):
    (compiler := tmp_path / "cc").write_text(LIKE_CLANG_AND_ICX)
    compiler.chmod(0o700)
    columns = fused.load(torch.int32, torch.float32, torch.float32, torch.device("cpu")).columns
    for number in (1, 3):
        given = number, str(compiler), str(tmp_path)
        printed = _end(_fork(tmp_path / f"{number}", _start_threads, *given))
        assert printed.split() == [str(columns), str(number - 1), "True", "True"]
