"""Tests: sampler.py, beside its law in plain Python."""

import contextlib
import copy
import ctypes
import functools
import hashlib
import math
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import sampler
from native import build, sampler_gpu
from native import layers as fused
from sampler import NeighborSampler
from tests.common import (
    HERE,
    _as_lists,
    _dgl,
    _emulated,
    _end,
    _fork,
    _frame,
    _mix,
    _on_kernels,
    _random_graph,
)
from tests.stores import _refuses


def _law_picks(neighbours, v, k, key, replace, method, weights):
    """Apply the rule of native/rule.h to one node -> positions in its neighbour list."""

    def draw(node, j):
        return _mix(_mix(key ^ node) ^ j) >> 32

    d = len(neighbours)
    if replace:
        return [draw(v, j) * d >> 32 for j in range(k)] if d else []
    if method == "labor":
        return [p for p in range(d) if k == -1 or draw(neighbours[p], 0) * d <= k * 2**32]
    if weights is not None:
        alive = [p for p in range(d) if weights[p] > 0]
        heaviest = sorted(alive, key=lambda p: -math.log((draw(v, p) + 0.5) / 2**32) / weights[p])
        return sorted(heaviest if k == -1 else heaviest[:k])
    if k == -1 or d <= k:
        return list(range(d))
    if method == "latest":
        return list(range(d - k, d))
    picks = []
    for j in range(k):
        t = draw(v, j) * (d - k + j + 1) >> 32
        picks.append(d - k + j if t in picks else t)
    return picks


LAW = dict(seed=0, replace=False, method="uniform", weights=None, edge_times=None, strict=False)
LAW |= dict(layer_dependency=False, batch_dependency=1, window=None, edge_type=None, disjoint=False)


def _law(indptr, indices, fanouts, seeds, step, times=None, *, exclude=(), **options):
    """Apply the sampling law in plain Python -> the fields of its blocks as lists, outermost hop
    first. A source is a node, its time, which is None if there are no times, and, if disjoint, its seed."""
    law = types.SimpleNamespace(**{**LAW, **options})
    is_mask = getattr(exclude, "dtype", 0) == torch.bool
    excluded = set(map(int, exclude.nonzero() if is_mask else exclude))
    indptr, indices = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (indptr, indices))
    seeds = seeds.tolist()
    timed = times is not None
    times = [None] * len(seeds) if not timed else times.tolist()
    src = [(v, t, i if law.disjoint else None) for i, (v, t) in enumerate(zip(seeds, times))]
    weights = None if law.weights is None else law.weights.double().tolist()
    when, blocks = None if law.edge_times is None else law.edge_times.tolist(), []
    kinds = None if law.edge_type is None else law.edge_type.tolist()
    for hop, k in enumerate(fanouts):
        base = _mix(_mix(law.seed % 2**64) ^ (step // law.batch_dependency % 2**64))
        key = _mix(base ^ (0 if law.layer_dependency else hop))
        offsets, edge_ids, ends = [0], [], []
        for v, t, seed in src:
            own_key = key if seed is None else _mix(key ^ seeds[seed])
            row = [e for e in range(int(indptr[v]), int(indptr[v + 1])) if e not in excluded]
            row = [e for e in row if t is None or when[e] < t or (when[e] == t and not law.strict)]
            row = [e for e in row if law.window is None or when[e] > t - law.window]
            taken = []
            for r in [None] if law.edge_type is None else sorted({kinds[e] for e in row}):
                part = row if r is None else [e for e in row if kinds[e] == r]
                fanout = k if r is None else k[r] if isinstance(k, list) else k
                list_key = own_key if r is None else _mix(own_key ^ (2**32 + r))
                w = None if weights is None else [weights[e] for e in part]
                how = fanout, list_key, law.replace, law.method, w
                taken += [part[p] for p in _law_picks([indices[e] for e in part], v, *how)]
            edge_ids += taken
            ends += [(indices[e], t, seed) for e in taken]
            offsets.append(len(edge_ids))
        number = {pair: i for i, pair in enumerate(src)}
        local = [number.setdefault(pair, len(number)) for pair in ends]
        src = list(number)
        nodes = [v for v, _, _ in src]
        at = [t for _, t, _ in src] if timed else None
        whose = [seed for _, _, seed in src] if law.disjoint else None
        types_drawn = None if kinds is None else [kinds[e] for e in edge_ids]
        blocks.append((offsets, local, nodes, edge_ids, at, types_drawn, whose))
    return blocks[::-1]


def test_the_law_of_the_docs_is_the_samplers():
    law = {}
    exec(re.search("```python\n(.*?)```", (HERE / "docs/design.md").read_text(), re.DOTALL)[1], law)
    indptr, indices = _random_graph(np.random.default_rng(3), 200, 8)
    for step, fanouts in enumerate(([3, 2], [-1, 4, 1], [5])):
        seeds = torch.randperm(200)[:20].int()
        blocks = NeighborSampler(indptr, indices, fanouts, seed=9).sample(seeds, step)
        lists = indptr.tolist(), indices.tolist(), fanouts, seeds.tolist()
        expected = law["sample"](*lists, step=step, seed=9)
        assert [tuple(t.tolist() for t in block[:3]) for block in blocks] == expected


METHODS = {
    "uniform": {},
    "replace": {"replace": True},
    "labor": {"method": "labor"},
    "weighted": {"weights": True},
}


def _options(method, indices, rng=None):
    """Return arguments of NeighborSampler; weights are random, or 1 without rng."""
    options = dict(METHODS[method])
    if method == "weighted":
        M = indices.numel()
        options["weights"] = torch.from_numpy(rng.exponential(size=M)) if rng else torch.ones(M)
    return options


def _with_gaps(tensor):
    """Return the same values as a non-contiguous tensor: a column of a table."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], 1)[:, 0]


def _excluded(i, indptr, indices):
    """Choose edges to exclude in the i-th case, from none to all but a few: unsorted ids with repeats, or a mask."""
    rng, M = np.random.default_rng([i, 7]), indices.numel()
    share = [0, 1 / max(M, 1), 0.1, 0.5, 0.97][i % 5]
    edges = np.flatnonzero(rng.random(M) < share)
    if M and i % 3 == 0:
        v = int(rng.integers(len(indptr) - 1))
        edges = np.union1d(edges, np.arange(int(indptr[v]), int(indptr[v + 1])))
    if i % 2:
        twice = rng.permutation(np.concatenate([edges, edges[:3]]))
        return torch.from_numpy(twice).to([torch.int32, torch.int64][i // 2 % 2])
    mask = torch.zeros(M, dtype=torch.bool)
    mask[edges] = True
    return mask


BY_TIME = {**METHODS, "latest": {"method": "latest"}}


def _times(i, rng, seeds, M):
    """Draw times of either sign, many equal, some at both ends of int64 -> those of edges [M], seeds, their times;
    a few nodes are seeds at two times."""
    spread, ends = [3, 20, 10**6][i % 3], np.iinfo(np.int64)
    when = rng.integers(-spread, spread, M)
    times = rng.integers(-spread - 1, spread + 1, len(seeds))
    times[rng.random(len(seeds)) < 0.1] = ends.max
    times[rng.random(len(seeds)) < 0.05] = ends.min
    if i % 7 == 0:
        times[:] = times[:1]  # one for all
        when[when == when.max(initial=0)] = ends.max
        when[when == when.min(initial=0)] = ends.min
    pairs = np.stack([np.append(seeds, seeds[:5]), np.append(times, times[:5] - 1)])
    return when, *rng.permutation(np.unique(pairs, axis=1), axis=1)


def _case(i, method, kind="plain"):
    """Make the i-th random case of a method -> (indptr, indices, fanouts, seeds, times or None, step, options).

    kind: "timed"; "typed", half of them timed, too; "dependent": hops or steps share draws; "disjoint", some of which are
    any of these, too; or "plain".
    """
    disjoint = kind == "disjoint"
    if disjoint:
        others = {"labor": "dependent", "latest": "timed"}
        kind = ["timed", "typed", others.get(method, "plain")][i % 3]
    rng = np.random.default_rng([i, len(method)])
    V, dtype = int(rng.integers(1, 60)), [torch.int32, torch.int64][i % 2]
    indptr, indices = _random_graph(rng, V, int(rng.integers(1, 12)), dtype)
    M, row = indices.numel(), np.repeat(np.arange(V), indptr.diff())
    fewest = 1 if method == "replace" else -1
    fanouts = rng.choice([1, 2, 3, 5, 10, 100, fewest], int(rng.integers(1, 4))).tolist()
    seeds, times = rng.permutation(V)[: rng.integers(0, V + 1)], None
    options = {**BY_TIME[method], "seed": int(rng.integers(-(2**62), 2**62))}
    if method == "weighted":
        weights = torch.from_numpy(rng.exponential(1.0, M) * (rng.random(M) > 0.2))
        options["weights"] = weights.to([torch.float32, torch.float64][i % 3 > 0])
    if kind == "dependent":
        options |= {"layer_dependency": i % 3 > 0, "batch_dependency": [1, 2, 7][i % 3 - 1]}
    types, when = np.zeros((2, M), int)
    if kind == "typed":
        wide = i % 4 == 1
        count = int(rng.integers(1, 300 if wide else 9)) if i % 6 else 1
        types = rng.integers(0, count, M)
        if i % 3:  # a number for each type
            fanouts = [rng.integers(min(fewest, 0), 6, count).tolist() for _ in fanouts]
    if kind == "timed" or kind == "typed" and (i % 2 == 0 or method == "latest"):
        when, seeds, times = _times(i, rng, seeds, M)
        times = torch.from_numpy(times)
    if disjoint:
        options["disjoint"] = True
        whose = rng.integers(0, max(len(seeds), 1), len(seeds) // 3)
        seeds = np.append(seeds, seeds[whose])
        times = None if times is None else torch.cat([times, times[whose]])
    order = np.lexsort((when, types, row))
    if kind == "typed":
        dtype = torch.uint16 if wide else torch.uint8
        options["edge_type"] = torch.from_numpy(types[order]).to(dtype)
    if times is not None:
        options |= {"edge_times": torch.from_numpy(when[order]), "strict": bool(i % 2)}
        if i % 4 == 2 or i % 16 == 15:
            options["window"] = [1, 4, 15, 10**5, 2**63 - 1][i % 5]
    arrays, step = (indptr, indices, torch.from_numpy(seeds)), int(rng.integers(-5, 2**40))
    if i % 5 == 4:
        arrays = map(_with_gaps, arrays)
        options |= {"weights": _with_gaps(options["weights"])} if "weights" in options else {}
    indptr, indices, seeds = arrays
    return indptr, indices, fanouts, seeds, times, step, options


CASES = [
    *(("plain", method) for method in METHODS),
    *((kind, method) for kind in ("timed", "typed", "disjoint") for method in BY_TIME),
    ("dependent", "labor"),
]
# "kernels": those of the GPU, emulated, with their threads in any order
WAYS = ["torch", "native", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)]


def _sampling(way, folder, i, indptr, indices, fanouts, options):
    """Return NeighborSampler.sample on a backend, and the growing list of emulated kernels launched."""
    if way == "gpu":
        indptr, indices = indptr.cuda(), indices.cuda()
        options = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    backend = {"kernels": "torch", "gpu": "native"}.get(way, way)
    options = dict(options, edge_ids=True, backend=backend, threads=1 + i % 8)
    s = NeighborSampler(indptr, indices, fanouts, **options)
    assert s.backend == backend
    if way != "kernels":
        return s.sample, []
    sample, kernels = _on_kernels(s, folder, seed=i, checked=i % 6 == 0)
    if not sampler_gpu.ROOM:
        kernels.most = [1 + (i + hop) % 7 for hop in range(len(fanouts))]
    return sample, kernels.kernels.launched


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, method", CASES)
def test_sampler_follows_the_law(kind, method, way, tmp_path, monkeypatch):
    repeated = 0
    for i in range({"typed": 60, "disjoint": 16}.get(kind, 40)):
        indptr, indices, fanouts, seeds, times, step, options = _case(i, method, kind)
        # 0: kernels have too little room at first, and make the batch again
        monkeypatch.setattr(sampler_gpu, "ROOM", [1 << 12, 0][i % 4 == 3])
        sample, launched = _sampling(way, tmp_path, i, indptr, indices, fanouts, options)
        sample = mock.Mock(side_effect=sample)
        exclude = _excluded(i, indptr, indices)
        law = functools.partial(_law, indptr, indices, fanouts, seeds, times=times, **options)
        expected, less = law(step), law(step, exclude=exclude)
        for _ in range(2):  # what an earlier batch left behind does not count
            blocks = [block.to("cpu") for block in sample(seeds, step, times)]
            assert _as_lists(blocks) == expected, (i, fanouts)
            without = [b.to("cpu") for b in sample(seeds, step, times, exclude=exclude)]
            assert _as_lists(without) == less, (i, fanouts)
        none = exclude[:0] if i % 2 else torch.zeros_like(exclude)
        again = sample(seeds.int(), step, times, exclude=none)  # the same seeds
        assert _as_lists(again) == expected
        for block in blocks + without:
            assert {t.dtype for t in block[:3]} == {indices.dtype}
            assert block.edge_ids.dtype == torch.int64
        bare, *inner = sample(seeds, step, times, relabel_outer=False)
        bare, outer = bare.to("cpu"), blocks[0]
        assert _as_lists(inner) == expected[1:]
        assert torch.equal(bare.indices, indices[outer.edge_ids]) and bare.num_src == bare.num_dst
        assert torch.equal(bare.src_nodes, outer.src_nodes[: outer.num_dst])
        if times is not None:
            assert torch.equal(bare.src_times, outer.src_times[: outer.num_dst])
        if "disjoint" in options:
            assert torch.equal(bare.src_seed, outer.src_seed[: outer.num_dst])
        again = [] if "disjoint" in options else seeds[:1].tolist()
        for wrong in (-1, len(indptr) - 1, *again) if len(seeds) else ():
            more = torch.cat([seeds, seeds.new_tensor([wrong])])
            with pytest.raises((IndexError, ValueError)):
                sample(more, step, None if times is None else torch.cat([times, times[:1]]))
        for step in (6, 7, -1, -8) if kind == "dependent" else ():
            assert _as_lists(sample(seeds, step)) == law(step), (i, fanouts, step)
        repeated += launched.count("begin") - sample.call_count
    assert way != "kernels" or (0 if kind in ("typed", "disjoint") else 5) < repeated < 4 * i


def _regular(rows, degree):
    """Make a random graph of nodes of one degree -> (indptr, indices)."""
    return torch.arange(rows + 1) * degree, torch.randint(rows, (rows * degree,))


def _equal(blocks, others):
    pairs = (pair for both in zip(blocks, others, strict=True) for pair in zip(*both))
    return all(torch.equal(a, b) for a, b in pairs if a is not None)


def test_times_with_more_pairs_than_room_take_no_longer():
    """The native table has room for each time by its seeds; what overflows, neighbours of one seed, must be found as fast."""
    M, seeds = 40_000, torch.arange(1024)
    graph, when = (torch.tensor([0] + [M] * M), torch.arange(M)), torch.zeros(M).long()
    made = (NeighborSampler(*graph, [-1], backend=b, edge_times=when) for b in WAYS[1::-1])
    mine, slow = (functools.partial(s.sample, seeds, 0, seeds) for s in made)
    assert _equal(blocks := mine(), slow()) and blocks[0].num_src > M

    def seconds(sample):
        start = time.perf_counter()
        sample()
        return time.perf_counter() - start

    assert min(seconds(mine) for _ in range(3)) < 9 * seconds(slow)


def test_more_lists_of_types_than_rows_are_drawn_side_by_side():
    graph, types = _regular(4000, 50), torch.tensor([0] * 3 + [1] * 40 + [2] * 7).repeat(4000)
    for fanouts in ([2, 2, 2], [2, 5, 2], [5, 10, 0]):
        options = dict(edge_type=types.to(torch.uint16), edge_ids=True)
        made = (NeighborSampler(*graph, [fanouts], backend=b, **options) for b in WAYS[:2])
        ours, slow = (s.sample(torch.arange(4000), 0) for s in made)
        assert ours[0].edge_type.dtype == torch.uint16
        assert torch.equal(ours[0].edge_type.long(), types[ours[0].edge_ids])
        assert _equal([ours[0]._replace(edge_type=None)], slow)


def test_cuda_prefixes_over_thousands_of_rows_are_sums_of_sums(tmp_path):
    """More than 4,096 rows of a hop, and 4,096 words of 32 edges: rows without edges count, too."""
    rng, V = np.random.default_rng(3), 30_000
    indptr, indices = _random_graph(rng, V, 13)
    for fanouts, seeds in (([3, 3], 5000), ([9], 29_000)):
        s = NeighborSampler(indptr, indices, fanouts, backend="torch")
        sample, backend = _on_kernels(s, tmp_path)
        for step, S in enumerate((seeds, 4097)):  # what the first batch left does not count
            batch = torch.from_numpy(rng.permutation(V)[:S])
            assert _equal(sample(batch, step), s.sample(batch, step))
    assert backend.most == [0] and 4096 < backend.shapes(29_000)[1][0] // 32


def test_cuda_tables_are_used_up_and_batches_that_never_fit_are_an_error(tmp_path, monkeypatch):
    """Positions count down over batches of eleven launches each; at the end the table is cleared."""
    indptr, indices = _random_graph(np.random.default_rng(3), 300, 8)
    s = NeighborSampler(indptr, indices, [4, 3, 2], backend="torch")
    backend, seeds, bases = _emulated(s, tmp_path), torch.arange(20), []
    for step in range(5):
        backend.kernels.launched.clear()
        blocks = backend.sample(seeds, step)[::-1]
        assert len(backend.kernels.launched) == 11 or step == 3
        assert _as_lists(blocks) == _as_lists(s.sample(seeds, step))
        (frame,) = backend.resting
        bases.append(frame.base)
        if step == 0:
            frame.base = 2 * frame.positions + 1  # two batches more
    fresh, used = sampler_gpu.NONE - frame.positions, frame.positions
    assert bases == [fresh, used + 1, 1, fresh, fresh - used]
    backend.kernels.launched.clear()
    backend.sample(seeds, 5, relabel_outer=False)
    assert len(backend.kernels.launched) == 9
    backend, (rows, _) = _emulated(s, tmp_path), backend.shapes(20)
    monkeypatch.setattr(sampler_gpu, "ROOM", 0)
    monkeypatch.setattr(backend, "shapes", lambda S: (rows, [1, 1, 1]))
    _refuses("20 seeds ask for ever more room", backend.sample, seeds, 0, error=RuntimeError)


@pytest.mark.parametrize("replace", [False, True])  # all that CUDA graphs draw by
def test_a_cuda_frame_keeps_its_shapes(replace, tmp_path):
    """The same launches make batches of any number of seeds, in fixed places, or report what does not fit."""
    seen = set()
    for i in range(12):
        rng = np.random.default_rng(i)
        indptr, indices = _random_graph(rng, 80, 9, [torch.int32, torch.int64][i % 2])
        options = dict(replace=replace, seed=i, backend="torch")
        s = NeighborSampler(indptr, indices, [3, 20, 2], **options)
        few = {}, dict(rows=[12, 25, 50]), dict(places=[25, 300]), dict(places=[36, 150])
        frame = _frame(_emulated(s, tmp_path, seed=i, checked=i < 2), 12, 2, **few[i % 4])
        blocks, steps, (rows, places, *_) = frame.blocks, frame.steps, frame.shape
        for step, S in enumerate((12, 8, 5, 1, 12)):
            seeds = torch.from_numpy(rng.permutation(80)[:S])
            frame.fill(seeds, step)
            frame.start()
            want = s.sample(seeds, step)[:0:-1]  # without the outermost hop
            sizes = zip(want, rows[1:], places)
            fits = all(b.num_src <= n and b.num_edges <= e for b, n, e in sizes)
            assert frame.status == (0 if fits else sampler_gpu.FULL) and frame.steps is steps
            seen.add((fits, i % 4 > 0))
            for cut, block, (offsets, local, src, *_) in zip(frame.cut(), want, blocks):
                if fits:
                    S, E, N = block.num_dst, block.num_edges, block.num_src
                    assert all(map(torch.equal, cut[:3], block[:3]))
                    assert torch.equal(offsets[: S + 1], block.indptr) and (offsets[S:] == E).all()
                    assert torch.equal(local[:E], block.indices) and (local[E:] == -1).all()
                    assert torch.equal(src[:N], block.src_nodes)
                    assert ((src >= 0) & (src < 80)).all()
        frame.fill(torch.tensor([5, 5, 80]), 0)
        frame.start()
        assert frame.status & ~sampler_gpu.FULL == sampler_gpu.REPEATED | sampler_gpu.UNKNOWN
    assert seen == {(True, False), (True, True), (False, True)}


@pytest.mark.parametrize("k", [1, 5, 15])
def test_cuda_draws_and_averages_the_outermost_hop(k, tmp_path):
    """Bitwise equal to self_and_mean of the same hop, in any order of threads, with zeros in the padding; of codes, decoded."""
    half = torch.bfloat16
    kinds = (torch.float32,) * 2, (torch.float32, half), (half, half), (half, torch.float32)
    for i in range(22):
        rng = np.random.default_rng(i)
        indptr, indices = _random_graph(rng, 90, 9, [torch.int32, torch.int64][i % 2])
        s = NeighborSampler(indptr, indices, [4, k], seed=i, backend="torch", replace=i % 4 == 3)
        dtype, out_dtype = kinds[i // 3 % 4]
        x = torch.randn(90, [24, 7, 100][i % 3]).to(dtype)
        # and at an address that is no multiple of 16 bytes
        x = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape) if i % 5 == 2 else x
        step_of, offset = scale = torch.randn(2, x.shape[1])
        codes = (30 * x.float()).clamp(-128, 127).to(torch.int8) if i % 12 >= 9 else None
        frame = _frame(_emulated(s, tmp_path, seed=i, checked=True), 10, 1)
        out = torch.full((frame.shape[0][1] + 1, 2 * x.shape[1]), 7.0, dtype=out_dtype)
        # and results at one of 16, but not of 32
        out = out.view(-1)[4 if i == 21 else 0 :][: out[1:].numel()].view(out[1:].shape)
        assert frame.aggregate(x, out) if codes is None else frame.aggregate(codes, out, scale)
        for step, S in enumerate((10, 3)):
            seeds = torch.from_numpy(rng.permutation(90)[:S])
            frame.fill(seeds, step)
            frame.start()
            outer = s.sample(seeds, step, relabel_outer=False)[0]
            want = out.new_empty(outer.num_dst, out.shape[1])
            if codes is None:
                fused.self_and_mean(outer.indptr, outer.indices, x, outer.src_nodes, want)
            else:
                pair = torch.empty(want.shape)
                fused.self_and_mean(
                    outer.indptr, outer.indices, codes.float(), outer.src_nodes, pair
                )
                own, mean = (half * step_of + offset for half in pair.chunk(2, 1))
                mean[outer.indptr.diff() == 0] = 0
                want.copy_(torch.cat([own, mean], 1))
            assert torch.equal(out[: outer.num_dst], want) and not out[outer.num_dst :].any()


def test_a_cuda_thread_of_the_outermost_hop_loads_twice_from_a_row():
    """As was fastest on a GPU, 16 bytes each if the row is cut into so many; no thread is without columns."""
    for width, dtype, threads in (
        (100, torch.float32, 13),
        (7, torch.float32, 4),
        (1, torch.bfloat16, 1),
        (128, torch.bfloat16, 8),
        (100, torch.bfloat16, 13),
        (128, torch.int8, 8),
    ):
        x, out = torch.empty(1, width, dtype=dtype), torch.empty(1, 2 * width)
        source, vec = sampler_gpu.aggregate_source(torch.int32, 5, x, out)
        assert sampler_gpu.lanes(out, vec) == threads
        assert f"#define LANES {threads}\n" in source


def test_cuda_addresses_rows_of_the_outermost_hop_in_64_bits(tmp_path):
    """The first rows are unmapped, and a 32-bit product of row and width would be another address."""
    width, far, n = 1 << 12, 1 << 21, 6
    rows = torch.randn(n, width)
    memory = (ctypes.c_float * ((far + n) * width)).from_address(rows.data_ptr() - 4 * far * width)
    x = torch.frombuffer(memory, dtype=torch.float32).view(-1, width)
    indptr = torch.cat([torch.zeros(far, dtype=torch.int64), 2 * torch.arange(n + 1)])
    indices = ((torch.arange(2 * n) + 2) % n + far).int()  # two seeds and their neighbours are all
    s = NeighborSampler(indptr, indices, [2, 2], backend="torch")
    frame = _frame(_emulated(s, tmp_path, checked=True), 2, 1)
    out = torch.empty(frame.shape[0][1], 2 * width)
    assert frame.aggregate(x, out)
    frame.fill(torch.tensor([far, far + 1]), 0)
    frame.start()
    mean = rows[(indices[:2] - far).long()].mean(0)
    torch.testing.assert_close(out[0], torch.cat([rows[0], mean]))


def test_cuda_launches_are_on_the_current_stream_in_blocks_that_fit(tmp_path, monkeypatch):
    calls = "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"  # they return 0: success
    driver = mock.Mock(**{f"{call}.return_value": 0 for call in calls})
    monkeypatch.setattr(build, "load_driver", lambda: driver)
    (image := tmp_path / "image").touch()
    monkeypatch.setattr(build, "cached", lambda *key: nullcontext(image))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    source = build.read_source("base.h") + "KERNEL nothing(int n) { }\n"
    kernels = build.Kernels("a test", source, torch.device("cuda", 1))
    for stream, n in ((7, 1), (8, 1000), (0, 10**6)):
        monkeypatch.setattr(build, "_raw_stream", lambda index: stream)
        kernels.run("nothing", n, {"n": 1})
        _, blocks, one, _, threads, _, _, shared, on, *_ = driver.cuLaunchKernel.call_args.args
        assert (one, shared, on) == (1, 0, stream)
        assert (blocks - 1) * threads < n <= blocks * threads
    _refuses("n", kernels.run, "nothing", 1, {"m": 1}, error=KeyError)


def test_cuda_that_cannot_be_had_is_one_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(build, "_nvrtc", lambda: ctypes.CDLL("libnvrtc.so.none"))
    source = build.read_source("base.h") + "KERNEL nothing(int n) {}\n"
    words = "the CUDA kernels of a test cannot be used, .* Reason: libnvrtc.so.none: cannot open"
    with pytest.warns(UserWarning, match=words):
        assert build.load_cuda("a test", source, torch.device("cuda", 0)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.load_cuda("a test", source + "\n", torch.device("cuda", 0)) is None


def test_ids_above_two_to_the_31(tmp_path):
    """A graph of 2^31 + 1000 nodes: only the last thousand have edges, so that indptr is a sparse file."""
    num_nodes, last = 2**31 + 1000, 2**31
    rng = np.random.default_rng(8)
    degree = rng.integers(0, 40, 1000)
    indptr = np.memmap(tmp_path / "indptr", np.int64, "w+", shape=(num_nodes + 1,))
    indptr[last:] = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(last - 50, num_nodes, int(indptr[-1]))
    seeds = torch.from_numpy(last + rng.permutation(1000)[:64])
    graph = torch.from_numpy(indptr), torch.from_numpy(indices)
    for method in METHODS:
        options = _options(method, graph[1], rng)
        s = NeighborSampler(*graph, [5, 3], edge_ids=True, backend="native", check=False, **options)
        law = _law(indptr, graph[1], [5, 3], seeds, 1, **options)  # a list of indptr would be large
        assert _as_lists(s.sample(seeds, 1)) == law


@pytest.mark.parametrize("method", METHODS)
def test_a_hub_of_degree_a_million(method):
    rng = np.random.default_rng(9)
    degrees = rng.poisson(5, 2000)
    degrees[77] = 10**6
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]))
    indices = torch.from_numpy(rng.integers(0, 2000, int(indptr[-1])).astype(np.int32))
    options, seeds = _options(method, indices, rng), torch.tensor([5, 77, 1500])
    gone = torch.from_numpy(rng.random(indices.numel()) < 0.3)
    for fanouts in ([100, 7], [700]) + (() if method == "replace" else ([-1],)):
        native, plain = (
            NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, **options)
            for backend in ("native", "torch")
        )
        for edges in (None, gone):
            assert _equal(*(s.sample(seeds, 2, exclude=edges) for s in (native, plain)))


def _unchecked(way, folder, graph, fanouts, **options):
    """Make a sampler that does not check its graph, as for an opened store."""
    backend = way.replace("cuda", "torch")
    s = NeighborSampler(*graph, fanouts, backend=backend, check=False, **options)
    return _emulated(s, folder) if way == "cuda" else s


@pytest.mark.parametrize("way", ["torch", "native", "cuda"])
@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_graph_is_an_error_and_no_crash(method, way, tmp_path):
    """Ids and offsets out of range, also two whose difference overflows, so that the list's length looks right."""
    rng, seeds, some = np.random.default_rng(3), torch.arange(50), slice(3, None, 7)
    damages = [(1, some, bad) for bad in (2**30, -(2**30), 50, -1)]
    damages += [(0, some, bad * 1000) for _, _, bad in damages]
    pairs = [[2**63 - 1, -(2**62)], *rng.integers(-(2**63), 2**63 - 1, (12, 2)).tolist()]
    damages += [(0, slice(3, 5), torch.tensor(pair)) for pair in pairs]
    for array, places, bad in damages:
        graph = _random_graph(rng, 50, 12)
        options = _options(method, graph[1])
        graph[array][places] = bad
        for fanouts in ([20, 20, 20], [100] if method == "replace" else [-1, 2]):
            s = _unchecked(way, tmp_path, graph, fanouts, **options)
            for relabel_outer in (True, False):
                with pytest.raises(IndexError, match="the graph is damaged"):
                    s.sample(seeds, 0, relabel_outer=relabel_outer)
        if way == "cuda" and s.spec.rule.counted:
            frame = _frame(_unchecked(way, tmp_path, graph, [1, 20], **options), 50, 1)
            assert frame.aggregate(torch.zeros(50, 4), torch.zeros(frame.shape[0][1], 8))
            frame.fill(seeds, 0)
            frame.start()
            assert frame.status == sampler_gpu.DAMAGED
    graph = _random_graph(rng, 50, 12)
    types = torch.zeros(len(graph[1]), dtype=torch.uint8)
    s = _unchecked(way, tmp_path, graph, [3, 2], edge_type=types)
    types[graph[0][3]] = 77  # there is no such type
    _refuses("damaged", s.sample, seeds, 0, relabel_outer=True, error=IndexError)


@pytest.mark.parametrize("way", ["torch", "native", "cuda"])
def test_a_node_has_below_two_to_the_31_edges(way, tmp_path):
    M, file, seeds = 1 << 31, str(tmp_path / "sparse"), torch.tensor([0])
    indices = torch.from_file(file, shared=True, size=M, dtype=torch.int32)
    indptr = torch.tensor([0, M, M])
    s = _unchecked(way, tmp_path, (indptr, indices), [3])
    with pytest.raises(IndexError, match="the graph is damaged"):
        s.sample(seeds, 0)
    with pytest.raises(ValueError, match="a node with 2,147,483,648 edges"):
        NeighborSampler(indptr, indices, [3])
    indptr[1] -= 1
    s = _unchecked(way, tmp_path, (indptr, indices), [3], edge_ids=True)
    bits = sampler.random_bits(sampler.hop_key(0, 0, 0), seeds, torch.arange(3)).tolist()
    drawn = [b * (M - 3 + j) >> 32 for j, b in enumerate(bits)]
    assert s.sample(seeds, 0)[0][3].tolist() == drawn


def test_fanouts_by_type_whose_sum_is_beyond_the_ids_are_refused():
    graph = torch.tensor([0, 5]), torch.zeros(5, dtype=torch.int32)
    types = torch.arange(5, dtype=torch.uint8)
    for count in 3, 5:  # the sum in 32 bits is negative, or above 0 again
        s = NeighborSampler(
            *graph, [[10**9] * count + [1] * (5 - count)], edge_type=types, replace=True
        )
        if s.backend == "native":
            with pytest.raises(ValueError, match="edges a hop are too many for torch.int32"):
                s.sample(torch.tensor([0]), 0)


def test_neighbours_and_pairs_of_neighbours_are_equally_likely():
    """Independently in each node and each step."""
    s = NeighborSampler(*_regular(1000, 50), [10], edge_ids=True, seed=11)
    taken = torch.zeros(100, 1000 * 50, dtype=torch.float64)
    for step, row in enumerate(taken):
        row[s.sample(torch.arange(1000), step)[0].edge_ids] = 1
    taken = taken.view(-1, 50)
    pairs = (taken.T @ taken)[torch.triu_indices(50, 50, 1).unbind()]
    for counts, p, most in (taken.sum(0), 10 / 50, 2.2), (pairs, 10 * 9 / (50 * 49), 1.25):
        z = (counts - len(taken) * p) / math.sqrt(len(taken) * p * (1 - p))
        assert z.abs().max() < 6 and 0.25 < (z**2).mean() < most


def _uses(environment):
    """Sample with one backend, then the other, and print what happened; run in a process of its own."""
    os.environ.update(environment)
    tempfile.tempdir = environment.get("TMPDIR")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for backend in ("native", "auto"):
            s = NeighborSampler(**_small(backend=backend))
    assert s.sample(torch.tensor([0]), 0)[0].src_nodes.tolist() == [0, 1, 2]
    print(s.backend, len(caught), *(warning.message for warning in caught))


def _use(file, number=1, **environment):
    """Run `_uses` in `number` processes at once -> the line that each printed."""
    processes = [_fork(f"{file}{i}", _uses, environment) for i in range(number)]
    return [_end(process).splitlines()[-1] for process in processes]


def test_native_code_is_compiled_once_by_processes_that_start_together(tmp_path):
    assert _use(tmp_path / "out", 3, XDG_CACHE_HOME=str(tmp_path)) == ["native 0"] * 3
    assert len(list((tmp_path / "ringblock").iterdir())) == 1
    (folder := tmp_path / "t").mkdir()
    environment = dict(XDG_CACHE_HOME="/dev/null", TMPDIR=str(folder))
    assert _use(tmp_path / "no cache to write to", **environment) == ["native 0"]
    assert not list(folder.iterdir())
    for compiler in ("/no/such/compiler", "false"):  # one warning and the torch backend
        (output,) = _use(tmp_path / compiler[-3:], CC=compiler, XDG_CACHE_HOME=str(folder))
        assert output.startswith("torch 1 ") and "apt install gcc" in output


def test_chunks_without_lists_to_draw_do_not_read_what_the_stack_held(tmp_path):
    """All edges of each list are taken: the kernel's record of lists that are drawn together stays unset."""
    dirty = "void dirty(void) { volatile char stack[1 << 20]; for (int i = 0; i < 1 << 20; i++) stack[i] = 1; }"
    library = build.load_c("test", dirty, ["-O0", "-shared", "-fPIC"])
    if library is None:
        pytest.skip("no C compiler")
    indptr, indices = _random_graph(np.random.default_rng(0), 50, 5)
    s = NeighborSampler(indptr, indices, [1000], backend="native", threads=1)

    def draw():
        library.dirty()
        s.sample(torch.arange(50), 0)
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=draw)
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0


def test_ctrl_c_while_arguments_are_converted_is_no_ctypes_error(monkeypatch):
    def interrupt(tensor):
        raise KeyboardInterrupt

    made = NeighborSampler(*_random_graph(np.random.default_rng(0), 50, 4), [3])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch.Tensor, "data_ptr", interrupt)
        made.sample(torch.arange(9), step=0)
    assert len(made.sample(torch.arange(9), step=0)) == 1


def _answer(how):
    """Load a library that answers 42 through the cache -> (its answer, its path)."""
    source = f"int answer(void) {{ return 42; }}  // {how}"
    library = build.load_c("test", source, ["-shared", "-fPIC"])
    return library.answer(), library._name


def _cut_short(folder):
    (good,) = folder.iterdir()
    content = good.read_bytes()
    good.unlink()  # it is mapped
    good.write_bytes(content[:5000])


CACHES = {  # what is done to a cache, whether a library is loaded from it then
    "others may write": (lambda folder: folder.chmod(0o702), False),
    "its group may write": (lambda folder: folder.chmod(0o770), False),
    "another user's": (lambda folder: os.chown(folder, 65534, 65534), False),
    "damaged": (_cut_short, True),
}


@pytest.fixture
def compile_cache(tmp_path, monkeypatch):
    """Return the folder of an empty compile cache, under umask 0; libraries compiled elsewhere leave no files."""
    temporary, umask = tmp_path / "temporary", os.umask(0)
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield tmp_path / "cache" / "ringblock"
    os.umask(umask)
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("how", CACHES)
def test_a_compile_cache_is_used_where_nobody_else_can_write_and_undamaged(
    how, compile_cache, monkeypatch
):
    change, in_cache = CACHES[how]
    if os.geteuid() and how == "another user's":
        pytest.skip("only root can give a folder away")
    assert _answer(how)[0] == 42
    (good,) = compile_cache.iterdir()
    inode, digest = good.stat().st_ino, hashlib.sha256(good.read_bytes()).hexdigest()
    assert good.stem.endswith(digest) and compile_cache.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:  # not compiled again
        patch.setattr(tempfile, "tempdir", "/no/such")
        assert _answer(how) == (42, str(good)) and good.stat().st_ino == inode
    change(compile_cache)
    number, path = _answer(how)
    assert (number, path.startswith(f"{compile_cache}/")) == (42, in_cache)


def test_a_compile_cache_that_cannot_be_written_is_read(compile_cache, monkeypatch):
    assert _answer("read")[0] == 42
    monkeypatch.setattr(build.shutil, "copyfile", lambda *a: os.open(HERE, os.O_WRONLY))  # fails
    assert _answer("read")[1].startswith(f"{compile_cache}/")
    number, path = _answer("another")
    assert number == 42 and not path.startswith(f"{compile_cache}/")


COMPILERS = {  # what a script that CC names does, "" for success; the reason in the warning
    "": "",
    "[ $2 ] || exit 0; printf 'In x:1:\\n\\377 error: bad\\n' >&2; exit 1": ".* error: bad$",
    "printf '\\377'; cc -Danswer=other \"$@\"": ".* undefined symbol: answer",
    "echo hi >&2; sleep 60": ".* timed out after 1 seconds",
}


@pytest.mark.parametrize("script", COMPILERS)
def test_a_strange_compiler_gives_a_library_or_a_reason(
    script, compile_cache, tmp_path, monkeypatch
):
    (tmp_path / "a cc").write_text(f"#!/bin/sh\n{script or 'shift; exec cc $*'}\n")
    (tmp_path / "a cc").chmod(0o700)
    monkeypatch.setenv("CC", f"'{tmp_path}/a cc' -DA" if not script else f"{tmp_path}/a cc")
    run, limit = subprocess.run, {"timeout": 1 if "sleep" in script else 60}
    monkeypatch.setattr(build.subprocess, "run", lambda *a, **k: run(*a, **k | limit))
    build._warned.discard("test")
    if not script:
        assert _answer(script)[0] == 42
        return
    with pytest.warns(
        UserWarning, match=f"test could not be compiled.*Reason: {COMPILERS[script]}"
    ):
        assert build.load_c("test", "int answer(void) { return 42; }", ["-shared", "-fPIC"]) is None
    build._warned.discard("test")


SANITIZED = f"""
import os, sys, types
del os.environ["LD_PRELOAD"]  # the compiler goes without
sys.path.insert(0, {str(HERE)!r})
from native import sampler_cpu
sampler_cpu.FLAGS[:] = "-O0 -g -fPIC -shared -pthread -fsanitize=address,undefined -fno-sanitize-recover".split()
from tests import test_sampler as ours
for method in ours.METHODS:
    for kind in ("plain", "timed"):
        ours.test_sampler_follows_the_law(kind, method, "native", None, types.SimpleNamespace(setattr=setattr))
    ours.test_a_hub_of_degree_a_million(method)
print("clean")
"""


def test_native_code_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    asan = subprocess.getoutput("gcc -print-file-name=libasan.so")
    if not Path(asan).is_file():
        pytest.skip("gcc has no AddressSanitizer")
    # OpenMP and the interpreter keep memory for the whole run: leaks are not looked for
    changes = {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0", "XDG_CACHE_HOME": tmp_path}
    changes["CC"] = "gcc"
    command, environment = [sys.executable, "-c", SANITIZED], {**os.environ, **changes}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "clean", done.stderr[-3000:]
    # node ids of 4 and 8 bytes, with and without times: of positions, LABOR, weights of 4 and of 8 bytes
    assert len(list((tmp_path / "ringblock").iterdir())) == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_the_adapter_feeds_dgls_dataloader(workers):
    dgl = _dgl()
    indptr, indices = _random_graph(np.random.default_rng(13), 500, 12, torch.int64)
    graph = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))), num_nodes=500)
    ours, load = NeighborSampler(indptr, indices, [4, 3], seed=5), dgl.dataloading.DataLoader
    options = dict(batch_size=64, num_workers=workers)
    batches = list(load(graph, torch.arange(200), sampler.DGLAdapter(ours), **options))
    assert [len(output) for _, output, _ in batches] == [64, 64, 64, 8]
    for step, (inputs, outputs, blocks) in enumerate(batches):
        assert torch.equal(inputs, blocks[0].srcdata[dgl.NID])
        assert torch.equal(outputs, blocks[-1].dstdata[dgl.NID])
        assert workers or torch.equal(inputs, ours.sample(outputs, step)[0].src_nodes)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_sampler_and_its_numbers_may_come_from_elsewhere(backend):
    """A copy, a pickled one as for a spawned process, and integers of numpy and torch."""
    graph = _random_graph(np.random.default_rng(5), 90, 9)
    make = functools.partial(NeighborSampler, *graph, [3, 3], backend=backend)
    expected = make(seed=7).sample(torch.arange(20), 3)[0].src_nodes
    for one, step in (
        (copy.deepcopy(make(seed=np.int64(7))), np.int64(3)),
        (pickle.loads(pickle.dumps(make(seed=torch.tensor(7)))), torch.tensor(3)),
    ):
        assert torch.equal(one.sample(torch.arange(20), step)[0].src_nodes, expected)
        assert one.backend == backend
        with pytest.raises(TypeError):
            one.sample(torch.arange(20), 3.0)
    seeds = torch.arange(20)
    # as after torch.set_default_device("cuda"); for validation before training
    for context in (torch.device("meta"), torch.inference_mode()):
        fresh = make(seed=7, edge_ids=True)
        for around in (context, contextlib.nullcontext()):
            with around:
                block = fresh.sample(seeds, 3)[0]
                assert torch.equal(block.src_nodes, expected) and not block.indices.is_inference()


def _small(**changes):
    graph = dict(indptr=torch.tensor([0, 2, 3, 3]), indices=torch.tensor([1, 2, 0]), fanouts=[2])
    return {**graph, **changes}


_T, _ONES = torch.tensor, torch.ones(3)
_TIMED, _TYPED = {"edge_times": _T([1, 1, 0])}, {"edge_type": _T([0, 1, 0]).to(torch.uint8)}
_MIXED = {**_TYPED, "by_type": False}
REFUSED = {  # error: what it says, arguments of NeighborSampler
    ValueError: {
        "fanouts": dict(fanouts=[]),
        "positive or -1": dict(fanouts=[3, 0]),
        "method 'walk'.*labor": dict(method="walk"),
        "layer_dep.* is for method 'labor', not 'uni": dict(layer_dependency=True),
        "batch_dependency is 0": dict(method="labor", batch_dependency=0),
        "backend 'cuda'.*torch": dict(backend="cuda"),
        "'with replacement' and .*'labor' exclude": dict(replace=True, method="labor"),
        "must rise from 0 to 3": dict(indptr=_T([0, 3, 2, 3])),
        "indptr runs from 1": dict(indptr=_T([1, 2, 3, 3])),
        "indptr runs from 0 to 4": dict(indptr=_T([0, 2, 3, 4])),
        "indices contains 3": dict(indices=_T([1, 3, 0])),
        "weights.*negative": dict(weights=_T([1.0, -1.0, 0.0])),
        "weights.*NaN": dict(weights=_T([1.0, float("nan"), 0.0])),
        "decreases in the list of node 0": dict(edge_times=_T([2, 1, 0])),
        "latest needs edge_t": dict(method="latest"),
        "strict needs edge_t": dict(strict=True),
        "'latest' and weights exc": dict(method="latest", **_TIMED, weights=_ONES),
        "backend 'dgl' has no disjoint": dict(backend="dgl", disjoint=True),
        "window is 2.9: give an int": dict(window=2.9, **_TIMED),
        "window is 0: give an int above 0": dict(window=0, **_TIMED),
        "fanouts by type need edge_type": dict(fanouts=[[3, 2]]),
        "edge_type has 2 types, one number for each": dict(fanouts=[[3]], **_TYPED),
        "one number .* hop, positive": dict(fanouts=[[3, -2]], **_TYPED),
        "below 2.31": dict(fanouts=[1 << 31]),
        "-1 .all. is not": dict(fanouts=[[3, -1]], replace=True, **_TYPED),
        "is not for fanouts by type": dict(fanouts=[[3, 3]], **_MIXED),
        "nor for edge_times: lists": {**_MIXED, **_TIMED},
        "by type, then time": dict(edge_type=_ONES.byte(), edge_times=_T([2, 1, 0])),
        "types above 32767": dict(edge_type=_T([1, 9, 36000]).to(torch.uint16)),
    },
    TypeError: {  # dtypes, shapes and devices: C code trusts them
        "no option walk": dict(walk=True),
        "'float'": dict(method="labor", batch_dependency=1.5),
        "indptr.*int32": dict(indptr=_T([0, 2, 3, 3]).int()),
        "indptr is a list.*as_tensor": dict(indptr=[0, 2, 3, 3]),
        "indices.*float": dict(indices=_ONES),
        "weights": dict(weights=torch.ones(2)),
        "weights is on meta, and indptr on cpu": dict(weights=_ONES.to("meta")),
        r"edge_times must be int64 \[M=3\]": dict(edge_times=_ONES),
        "fanouts is ..3, 2.5..: a list of": dict(fanouts=[[3, 2.5]], **_TYPED),
        "edge_type must be uint8 or uint16 .M=3., not": dict(edge_type=_T([0, 1, 0])),
    },
}


@pytest.mark.parametrize("error", REFUSED)
def test_sampler_names_the_bad_argument(error):
    for words, changes in REFUSED[error].items():
        for more in {}, {"check": False}:
            if not more or error is TypeError:
                _refuses(words, NeighborSampler, **_small(**changes), **more, error=error)


REFUSED_SEEDS = [  # error, what it says, arguments of NeighborSampler, seeds, options of sample
    (IndexError, "seeds contains 3; .* 0 to 2", {}, [0, 3], {}),
    (IndexError, "seeds contains -1", {}, [-1], {}),
    (ValueError, "seeds contains node 1 more than once", {}, [0, 1, 2, 1], {}),
    (ValueError, "node 2 at time -5 more", _TIMED, [2, 1, 2], dict(times=_T([-5, 3, -5]))),
    (TypeError, "seeds must be.*float", {}, [0.5], {}),
    (TypeError, "seeds must be.*1-D", {}, [[0]], {}),
    (ValueError, "times are given.*give the sampler edge_times", {}, [0], dict(times=_T([1]))),
    (TypeError, r"times must be int64 \[S=1\].*NoneType", _TIMED, [0], {}),
    (TypeError, r"times must.*\[S=1\].*\[2\]", _TIMED, [0], dict(times=_T([1, 2]))),
    (IndexError, "exclude contains 3; edge ids.* 0 to 2", {}, [0], dict(exclude=_T([0, 3]))),
    (TypeError, r"exclude must.*\[M=3\].*\[2\]", {}, [0], dict(exclude=torch.ones(2).bool())),
    (TypeError, "exclude must be.*list", {}, [0], dict(exclude=[0, 1])),
]


def test_sampler_names_bad_seeds_and_goes_on():
    for error, words, changes, seeds, options in REFUSED_SEEDS:
        s = NeighborSampler(**_small(**changes))
        _refuses(words, s.sample, _T(seeds), 0, **options, error=error)
        more = {"times": _T([9, 9])} if changes else {}
        assert s.sample(_T([2, 0]), 0, **more)[0].src_nodes.tolist() == [2, 0, 1]
    s = NeighborSampler(**_small())
    assert s.sample(_T([0]), 0, exclude=_T([0]))[0].src_nodes.tolist() == [0, 2]


@pytest.mark.parametrize("method", METHODS)
def test_dgl_backend_and_blocks_for_dgl_and_pyg(method):
    dgl, dtype = _dgl(), torch.int64 if method == "labor" else torch.int32
    indptr, indices = _random_graph(np.random.default_rng(2), 300, 12, dtype)
    seeds, weights = torch.tensor([5, 2, 9]), (torch.arange(indices.numel()) % 3 > 0).float()
    options = METHODS[method] | ({"weights": weights} if method == "weighted" else {})
    s = NeighborSampler(indptr, indices, [4, 3], edge_ids=True, backend="dgl", **options)
    outer, inner = s.sample(seeds, 0)
    assert inner.src_nodes[:3].tolist() == seeds.tolist()
    assert torch.equal(outer.src_nodes[: outer.num_dst], inner.src_nodes)
    for block in (outer, inner):
        assert torch.equal(block.src_nodes[block.indices.long()], indices[block.edge_ids])
        v = block.src_nodes[: block.num_dst].repeat_interleave(block.indptr.diff()).long()
        there, ((src, dst), ids, size) = block.to_dgl(), block.to_pyg()
        assert torch.equal(there.srcdata[dgl.NID], block.src_nodes)
        assert torch.equal(there.edata[dgl.EID], block.edge_ids) and ids is block.edge_ids
        assert torch.equal(src, block.indices.long())
        assert torch.equal(block.src_nodes[dst].long(), v)
        assert size == (block.num_src, block.num_dst)
        assert ((indptr[v] <= block.edge_ids) & (block.edge_ids < indptr[v + 1])).all()
        assert method != "weighted" or (weights[block.edge_ids] > 0).all()
    assert _as_lists(s.sample(seeds, 0)) == _as_lists([outer, inner])
    said = "'dgl' cannot exclude edges.*'native'"
    _refuses(said, s.sample, seeds, 0, exclude=torch.tensor([1]), error=ValueError)
    bare = s.sample(seeds, 0, relabel_outer=False)[0]
    assert torch.equal(bare.indices, indices[outer.edge_ids])
    assert torch.equal(bare.src_nodes, inner.src_nodes)


def test_a_missing_dgl_gives_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    _refuses("pip install dgl", NeighborSampler, **_small(backend="dgl"), error=ImportError)
