"""Every test of ringblock: pytest test_all.py. Tests on real graphs skip where ../shared/data is not there.

Sections, each behind a line of dashes, and words for `pytest -k`:

    processes                       what other sections start beside the tests, and how it ends
    sampler.py                      law, cuda, exclude, time, labor: against the law in plain Python
    features.py                     ring, slot, place, share, cache; row_reader.py; lookahead.py, belady.py
    store.py                        estimate, mode; store; datasets, npz, csv, fuzz; rows that change, kills, full disks
    model.py, loader.py             model, layer, inference; loader
    train.py, ddp.py                train, procs, resume, torchrun, signal; checkpoint; link; temporal, edge_features
    what a run tells, accuracy      log, profile, timeline; learns
    attacked, bench.py, README.md   damaged, bench, readme, alone

Those that take longest run beside the others, three at a time (`_beside`); `pytest --durations=20` names them.
"""

import argparse
import atexit
import bz2
import collections
import copy
import csv
import ctypes
import datetime
import errno
import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import lzma
import math
import mmap
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import re
import resource
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import tracemalloc
import types
import warnings
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its idle threads shall not take the cores of others

import numpy as np
import pytest
import torch

from tqdm import tqdm

import allocator
import assemble
import bench
import bench_accuracy
import bench_attack
import bench_gpu
import bench_link
import bench_training
import checkpoint
import columns
import csc
import datasets
import ddp
import disk
import downloads
import exact
import features
import flags
import fused
import fused_cuda
import fused_kernels
import graph_tables
import graphs
import link
import lmdb_file
import loader
import metrics
import lookahead
import model
import molecules
import native_cuda
import plan
import report
import row_reader
import sampler
import sampler_cuda
import sampler_law
import step_graph
import store
import tables
import train
from csc import Rows
from datasets import prepare
from disk import StoreError
from features import MODES, CachedFeatures, FeatureRing, expected_visits, place, prefetch, share
from graphs import GraphDataset, Regressor, block_diagonal, build_graphs
from graphs import verify as verify_graphs
from lookahead import LookaheadCache
from model import GNN, SAGE, inference
from plan import choose_mode, estimate
from sampler import Block, NeighborSampler
from store import GraphStore, build_store, verify

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "shared" / "data"

# ---------------------------------------------------------------------------------------------------------------------
# processes


_IMPORTED_BY = os.getpid()


@functools.cache
def _forkserver():
    """A process that has imported everything: what it forks begins at once, where a new interpreter imports for 3
    seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_all", "torch._dynamo"])  # Adam imports the second
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")  # as train.py sets them
        patch.setenv("LRU_CACHE_CAPACITY", "1")
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing this file asks for a GPU, forks shall use it
        multiprocessing.forkserver.ensure_running()
    return context


def _in_fork(output, cwd, function, args):
    assert _IMPORTED_BY != os.getpid(), "the fork server has not imported test_all"

    def end_with_the_tests():
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_the_tests, daemon=True).start()
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a kill would leave
    os.chdir(cwd)
    torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
    try:
        sys.exit(function(*args))
    finally:
        atexit._run_exitfuncs()  # a fork leaves without them


def _fork(output, function, *args, cwd="."):
    """Start function(*args) in a process of its own, whose ranks are forked as well -> the process; it prints into the
    file `output`."""
    process = _forkserver().Process(target=_in_fork, args=(output, os.path.abspath(cwd), function, args))
    process.output = Path(output)
    process.output.touch()
    process.start()
    return process


def _end(process, *codes):
    """Wait until a fork ends, demand one of these exit codes (none given: 0) -> what it printed."""
    try:
        process.join(240)
    finally:
        process.kill()
        process.join()
    printed = process.output.read_text()
    assert process.exitcode in (codes or (0,)), printed
    return printed


_BESIDE = {}  # test -> function of a folder that starts the process it looks at


def _beside(start):
    """A decorator: start(folder, the test's parameters) starts the process that the test looks at, some time before it;
    the other tests need not wait for it."""

    def register(test):
        _BESIDE[test.__name__] = start
        return test

    return register


class _Queue:
    """The processes of such tests, in the tests' order, three at a time: more would starve the tests on 2 cores."""

    def __init__(self, items, new_folder):
        self.waiting = {item.name: item for item in items if getattr(item, "originalname", None) in _BESIDE}
        self.started, self.new_folder = {}, new_folder  # name -> (process, folder), or the error of its start

    def start(self, name):
        item, folder = self.waiting.pop(name), self.new_folder("beside")
        try:
            process = _BESIDE[item.originalname](folder, **(item.callspec.params if hasattr(item, "callspec") else {}))
            self.started[name] = process, folder
        except (Exception, pytest.fail.Exception) as error:  # is for the test that asks
            self.started[name] = error

    def processes(self):
        return [entry[0] for entry in self.started.values() if isinstance(entry, tuple)]

    def top_up(self):
        while self.waiting and sum(map(_is_running, self.processes())) < 3:
            self.start(next(iter(self.waiting)))

    def get(self, name):
        if name in self.waiting:
            self.start(name)
        if isinstance(self.started[name], BaseException):
            raise self.started[name]
        return self.started[name]


def _is_running(process):
    return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()


@pytest.fixture(scope="module")
def _queue(request, tmp_path_factory):
    queue = _Queue(request.session.items, tmp_path_factory.mktemp)
    yield queue
    for process in queue.processes():
        process.kill()


@pytest.fixture(autouse=True)
def _before_each_test(_queue):
    torch.manual_seed(0)  # a test draws the same whichever ran before it
    _queue.top_up()


@pytest.fixture
def beside(request, _queue):
    """(process, folder) of the test that asks."""
    return _queue.get(request.node.name)


# ---------------------------------------------------------------------------------------------------------------------
# sampler.py: the law, read slowly


def _random_graph(rng, num_nodes, mean_degree, dtype=torch.int32):
    """A CSC graph with empty rows, self-loops and multi-edges."""
    degree = rng.poisson(mean_degree, num_nodes) * (rng.random(num_nodes) > 0.2)
    degree[rng.integers(num_nodes)] += 3 * mean_degree
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(0, num_nodes, indptr[-1])
    return torch.from_numpy(indptr), torch.from_numpy(indices).to(dtype)


def _mix(z):
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def _law_picks(neighbours, v, k, key, replace, method, weights):
    """Section 4 of the design for one node: positions in its neighbour list."""

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


def _law(indptr, indices, fanouts, seeds, step, times=None, *, seed=0, replace=False, method="uniform", weights=None,
         exclude=(), edge_times=None, strict=False, layer_dependency=False, batch_dependency=1):  # fmt: skip
    """The sampling law in plain Python -> [(indptr, indices, src_nodes, edge_ids, src_times or None)] as lists,
    outermost hop first. A source is a pair of a node and a time, which is None where there are none."""
    excluded = set(exclude.nonzero().squeeze(1).tolist() if getattr(exclude, "dtype", 0) == torch.bool
                   else list(map(int, exclude)))
    indptr, indices = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (indptr, indices))
    src = list(zip(seeds.tolist(), [None] * len(seeds) if times is None else times.tolist()))
    weights = None if weights is None else weights.double().tolist()
    when, blocks = None if edge_times is None else edge_times.tolist(), []
    for hop, k in enumerate(fanouts):
        key = _mix(_mix(_mix(seed % 2**64) ^ (step // batch_dependency % 2**64)) ^ (0 if layer_dependency else hop))
        offsets, edge_ids, ends = [0], [], []
        for v, t in src:
            row = [e for e in range(int(indptr[v]), int(indptr[v + 1])) if e not in excluded]
            row = [e for e in row if t is None or when[e] < t or (when[e] == t and not strict)]
            w = None if weights is None else [weights[e] for e in row]
            taken = [row[p] for p in _law_picks([indices[e] for e in row], v, k, key, replace, method, w)]
            edge_ids += taken
            ends += [(indices[e], t) for e in taken]
            offsets.append(len(edge_ids))
        number = {pair: i for i, pair in enumerate(src)}
        local = [number.setdefault(pair, len(number)) for pair in ends]
        src = list(number)
        blocks.append((offsets, local, [v for v, _ in src], edge_ids, None if times is None else [t for _, t in src]))
    return blocks[::-1]


def _as_lists(blocks):
    return [tuple(None if t is None else t.tolist() for t in block) for block in blocks]


METHODS = {
    "uniform": {},
    "replace": {"replace": True},
    "labor": {"method": "labor"},
    "weighted": {"weights": True},
}


def _law_case(i, method):
    """The i-th random case of a method -> (indptr, indices, fanouts, seeds, step, options)."""
    rng = np.random.default_rng([i, len(method)])
    num_nodes = int(rng.integers(1, 60))
    indptr, indices = _random_graph(rng, num_nodes, int(rng.integers(1, 12)), [torch.int32, torch.int64][i % 2])
    choices = [1, 2, 3, 5, 10, 100] + ([] if method == "replace" else [-1])
    fanouts = [int(k) for k in rng.choice(choices, int(rng.integers(1, 4)))]
    seeds = torch.from_numpy(rng.permutation(num_nodes)[: rng.integers(0, num_nodes + 1)])
    options = dict(METHODS[method], seed=int(rng.integers(-(2**62), 2**62)))
    if method == "weighted":
        weights = torch.from_numpy(rng.exponential(1.0, indices.numel()) * (rng.random(indices.numel()) > 0.2))
        options["weights"] = weights.to([torch.float32, torch.float64][i % 3 > 0])
    return indptr, indices, fanouts, seeds, int(rng.integers(-5, 2**40)), options


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", METHODS)
def test_sampler_follows_the_law(method, backend):
    for i in range(60):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, method)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, threads=1 + i % 8, **options)
        assert s.backend == backend
        blocks = s.sample(seeds, step)
        assert _as_lists(blocks) == _law(indptr, indices, fanouts, seeds, step, **options), (i, fanouts)
        for block in blocks:
            assert block.indptr.dtype == block.indices.dtype == block.src_nodes.dtype == indices.dtype
            assert block.edge_ids.dtype == torch.int64
            assert torch.equal(block.src_nodes[block.indices.long()], indices[block.edge_ids])
        again = s.sample(seeds.to(torch.int32), step)  # scratch memory is back at rest; int32 seeds are the same seeds
        assert _as_lists(again) == _as_lists(blocks)


def _excluded(i, indptr, indices):
    """Edges to exclude in the i-th case: none, one, some, whole lists, all but a few; ids in any order, twice, or a
    mask."""
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


def _timed_case(i, method):
    """The i-th random case with times -> (indptr, indices, fanouts, seeds, times, step, options): lists with many edges
    of one time, times of either sign and at both ends of int64, nodes that are seeds at several times."""
    indptr, indices, fanouts, seeds, step, options = _law_case(i, "uniform" if method == "latest" else method)
    rng = np.random.default_rng([i, 11])
    spread, ends = [3, 20, 10**6][i % 3], np.iinfo(np.int64)
    when = rng.integers(-spread, spread, indices.numel())
    when = when[np.lexsort((when, np.repeat(np.arange(len(indptr) - 1), indptr.diff())))]
    times = rng.integers(-spread - 1, spread + 1, len(seeds))
    times[rng.random(len(seeds)) < 0.1] = ends.max
    times[rng.random(len(seeds)) < 0.05] = ends.min
    if i % 7 == 0:
        times[:] = times[:1]  # one for all
        when[when == when.max(initial=0)] = ends.max
        when[when == when.min(initial=0)] = ends.min
    pairs = np.stack([np.append(seeds, seeds[:5]), np.append(times, times[:5] - 1)])
    pairs = torch.from_numpy(rng.permutation(np.unique(pairs, axis=1), axis=1))
    options |= {"edge_times": torch.from_numpy(when), "strict": bool(i % 2),
                **(BY_TIME[method] if method == "latest" else {})}
    return indptr, indices, fanouts, *pairs.clone(), step, options


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", BY_TIME)
def test_sampling_by_time_follows_the_law(method, backend):
    nodes_at_several_times = cut = 0
    for i in range(100):
        indptr, indices, fanouts, seeds, times, step, options = _timed_case(i, method)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, threads=1 + i % 8, **options)
        assert s.backend == backend
        blocks = s.sample(seeds, step, times)
        assert _as_lists(blocks) == _law(indptr, indices, fanouts, seeds, step, times, **options), (i, fanouts)
        exclude = _excluded(i, indptr, indices)
        without = s.sample(seeds, step, times, exclude)
        assert _as_lists(without) == _law(indptr, indices, fanouts, seeds, step, times, exclude=exclude, **options), i
        for block in blocks + without:  # no edge from the future
            assert block.src_times.dtype == torch.int64 and block.src_nodes.dtype == indices.dtype
            until = block.src_times[: block.num_dst].repeat_interleave(block.indptr.diff())
            found = options["edge_times"][block.edge_ids]
            assert bool((found < until).all() if options.get("strict") else (found <= until).all())
            assert torch.equal(block.src_times[block.indices.long()], until)
            assert torch.equal(block.src_nodes[block.indices.long()], indices[block.edge_ids])
            nodes_at_several_times += block.src_nodes.unique().numel() < block.num_src
            cut += block.num_edges < indptr.diff()[block.src_nodes[: block.num_dst].long()].sum()
        bare, outer = s.sample(seeds, step, times, relabel_outer=False)[0], blocks[0]
        assert torch.equal(bare.indices, indices[outer.edge_ids]) and bare.num_src == bare.num_dst
        assert torch.equal(bare.src_times, outer.src_times[: outer.num_dst])
    assert nodes_at_several_times > 50 and cut > 50


def test_half_of_the_seeds_at_one_time_take_no_longer():
    """The native table sets aside as much room for each time; what does not fit must be found as quickly."""
    rng, rows, degree = np.random.default_rng(0), 300_000, 20
    indptr, indices = torch.arange(rows + 1) * degree, torch.from_numpy(rng.integers(0, rows, rows * degree))
    when, seeds = torch.arange(degree).repeat(rows), torch.arange(1024)
    times = torch.where(seeds < 512, 2000, 100 + seeds)
    mine, slow = (NeighborSampler(indptr, indices, [20, 20], edge_times=when, backend=backend, edge_ids=True)
                  for backend in ("native", "torch"))  # fmt: skip
    mine.sample(seeds[:2], 0, times[:2])  # compiled by then
    start = time.perf_counter()
    blocks = mine.sample(seeds, 0, times)
    assert time.perf_counter() - start < 2
    for block, expected in zip(blocks, slow.sample(seeds, 0, times)):
        assert all(map(torch.equal, block, expected))
    assert blocks[0].num_src > 300_000


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_seed_that_comes_twice_at_one_time_is_named(backend):
    s = NeighborSampler(**_small(backend=backend, edge_times=torch.tensor([1, 2, 0])))
    with pytest.raises(ValueError, match="seeds contains node 2 at time -5 more than once"):
        s.sample(torch.tensor([2, 1, 2, 2]), 0, torch.tensor([3, -5, -5, -5]))
    assert s.sample(torch.tensor([2, 1, 2]), 0, torch.tensor([3, -5, -5]))[0].src_times.tolist() == [3, -5, -5]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", BY_TIME)
def test_times_that_cut_nothing_change_nothing_but_the_numbers(method, backend):
    """With one time for all, later than every edge, the blocks are those of a sampler without times."""
    indptr, indices = _random_graph(np.random.default_rng(10), 400, 8)
    options = dict(BY_TIME[method])
    if method == "weighted":
        options["weights"] = torch.rand(indices.numel())
    seeds, when = torch.arange(0, 60, 2), torch.zeros(indices.numel(), dtype=torch.int64)
    with_times = NeighborSampler(indptr, indices, [4, 3], edge_ids=True, backend=backend, edge_times=when, **options)
    blocks = with_times.sample(seeds, 5, torch.zeros(30, dtype=torch.int64))
    if method == "latest":
        last = [indptr[v + 1] - blocks[1].edge_ids[blocks[1].indptr[i + 1] - 1] for i, v in enumerate(seeds)
                if indptr[v] < indptr[v + 1]]  # fmt: skip
        assert set(map(int, last)) == {1}
        return
    plain = NeighborSampler(indptr, indices, [4, 3], edge_ids=True, backend=backend, **options).sample(seeds, 5)
    assert [lists[:4] for lists in _as_lists(blocks)] == [lists[:4] for lists in _as_lists(plain)]
    assert plain[0].src_times is None and not blocks[0].src_times.any()


@pytest.mark.parametrize(
    "error, words, sampler_changes, times",
    [
        (ValueError, "times are given.*give the sampler edge_times", {}, torch.tensor([1])),
        (TypeError, r"times must be int64 \[S=1\].*NoneType", dict(edge_times=torch.tensor([1, 1, 0])), None),
        (TypeError, r"times must be int64 \[S=1\].*torch.int32", dict(edge_times=torch.tensor([1, 1, 0])),
         torch.tensor([1]).int()),
        (TypeError, r"times must be int64 \[S=1\].*\[2\]", dict(edge_times=torch.tensor([1, 1, 0])),
         torch.tensor([1, 2])),
        (ValueError, "edge_times falls from 2 to 1 in the list of node 0; sort",
         dict(edge_times=torch.tensor([2, 1, 0])), None),
        (TypeError, r"edge_times must be int64 \[M=3\]", dict(edge_times=torch.ones(3)), None),
        (TypeError, r"edge_times must be int64 \[M=3\]", dict(edge_times=torch.ones(2).long()), None),
        (ValueError, "method 'latest' goes by the times of edges; give edge_times", dict(method="latest"), None),
        (ValueError, "strict goes by the times", dict(strict=True), None),
        (ValueError, "'latest' and weights exclude each other",
         dict(method="latest", edge_times=torch.tensor([1, 1, 0]), weights=torch.ones(3)), None),
        (ValueError, "backend 'dgl' does not sample by edge_times",
         dict(backend="dgl", edge_times=torch.tensor([1, 1, 0])), None),
    ],
)
def test_sampler_names_bad_times(error, words, sampler_changes, times):
    with pytest.raises(error, match=words):
        NeighborSampler(**_small(**sampler_changes)).sample(torch.tensor([0]), 0, times)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", METHODS)
def test_excluded_edges_are_as_if_the_graph_did_not_have_them(method, backend):
    for i in range(100):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, method)
        exclude = _excluded(i, indptr, indices)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, threads=1 + i % 8, **options)
        blocks = s.sample(seeds, step, exclude=exclude)
        assert _as_lists(blocks) == _law(indptr, indices, fanouts, seeds, step, exclude=exclude,
                                         **options), (i, fanouts)
        gone = exclude
        if exclude.dtype != torch.bool:
            gone = torch.zeros(indices.numel(), dtype=torch.bool).index_fill(0, exclude.long(), True)
        assert not any(gone[block.edge_ids].any() for block in blocks)
        without = _as_lists(s.sample(seeds, step))  # the next batch has them
        assert without == _law(indptr, indices, fanouts, seeds, step, **options)
        assert without == _as_lists(s.sample(seeds, step, exclude=exclude[:0] if i % 2 else torch.zeros_like(exclude)))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", METHODS)
def test_a_hub_that_loses_many_edges(method, backend):
    """The blocks are those of the graph that was built without the edges; edge ids apart, which count the others."""
    rng = np.random.default_rng(9)
    degree = rng.poisson(5, 2000)
    degree[77] = 10**5
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(degree)]))
    indices = torch.from_numpy(rng.integers(0, 2000, int(indptr[-1])).astype(np.int32))
    gone = torch.from_numpy(rng.random(indices.numel()) < 0.3)
    row = torch.arange(2000).repeat_interleave(indptr.diff())
    options = dict(METHODS[method])
    kept = dict(options)
    if method == "weighted":
        options["weights"] = torch.from_numpy(rng.exponential(1.0, indices.numel()))
        kept["weights"] = options["weights"][~gone]
    fewer = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row[~gone], minlength=2000).cumsum(0)])
    seeds = torch.tensor([5, 77, 1500])
    for fanouts in ([100, 7], [700]) + (() if method == "replace" else ([-1],)):
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, **options)
        blocks = s.sample(seeds, 2, exclude=gone)
        theirs = NeighborSampler(fewer, indices[~gone], fanouts, edge_ids=True, backend=backend,
                                 **kept).sample(seeds, 2)
        for block, same in zip(blocks, theirs):
            assert all(torch.equal(a, b) for a, b in zip(block[:3], same[:3]))
            assert torch.equal(block.edge_ids, (~gone).nonzero().squeeze(1)[same.edge_ids])


@pytest.mark.parametrize(
    "error, words, exclude",
    [
        (IndexError, "exclude contains 3; edge ids of this graph are 0 to 2", torch.tensor([0, 3])),
        (IndexError, "exclude contains -1", torch.tensor([0, -1])),
        (TypeError, r"exclude must be .* edge ids, or a bool mask \[M=3\], not torch.bool \[2\]", torch.ones(2).bool()),
        (TypeError, "exclude must be.*float", torch.ones(3)),
        (TypeError, "exclude must be.*list", [0, 1]),
    ],
)
def test_sampler_names_bad_edges_to_exclude(error, words, exclude):
    s = NeighborSampler(**_small())
    with pytest.raises(error, match=words):
        s.sample(torch.tensor([0]), 0, exclude=exclude)
    assert s.sample(torch.tensor([0]), 0, exclude=torch.tensor([0]))[0].src_nodes.tolist() == [0, 2]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_sampler_takes_tensors_with_gaps(backend):
    """What is not contiguous, columns of a table say, is sampled as its copy would be."""
    rng = np.random.default_rng(21)
    indptr, indices = _random_graph(rng, 50, 6)
    weights, seeds = torch.rand(indices.numel()), torch.randperm(50)
    strided = [torch.stack([t, torch.full_like(t, 7)], 1)[:, 0] for t in (indptr, indices, weights)]
    assert not any(t.is_contiguous() for t in strided)
    for weighted in (False, True):
        samplers = [NeighborSampler(p, i, [3, 2], backend=backend, weights=w if weighted else None)
                    for p, i, w in ((indptr, indices, weights), strided)]  # fmt: skip
        expected = _as_lists(samplers[0].sample(seeds[::3].clone(), 0))
        assert expected == _as_lists(samplers[1].sample(seeds[::3], 0))


_EMULATOR = r"""
#include <math.h>
#include <stdlib.h>
typedef struct { long x; } dim;
static __thread dim blockIdx;  // threads of the host launch kernels beside each other
static dim blockDim = {1}, threadIdx;
#define atomicMin(p, value) do { if (*(p) > (value)) *(p) = (value); } while (0)
"""


class _EmulatedKernels:
    """native_cuda.Kernels by cc on CPU tensors; of each launch every thread runs, one at a time, in shuffled order."""

    def __init__(self, source, folder, seed=0):
        self.device, self.rng, self.launched = torch.device("cpu"), np.random.default_rng(seed), []
        self.signatures = native_cuda.signatures(source)
        self._numbers = {**native_cuda._NUMBERS, **native_cuda._typedefs(source)}
        code = _EMULATOR + source
        for name, arguments in self.signatures.items():
            passed = ", ".join(f"*({c_type}*)a[{i}]" for i, (c_type, _) in enumerate(arguments))
            code += f"""void run_{name}(const long *order, long n, void **a) {{
                for (long q = 0; q < n; q++) {{ blockIdx.x = order[q]; {name}({passed}); }} }}\n"""
        library = Path(folder, f"kernels-{hashlib.sha256(code.encode()).hexdigest()[:16]}.so")
        if not library.exists():
            command = ["cc", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-lm"]
            subprocess.run(command, input=code, text=True, check=True)
        library = ctypes.CDLL(str(library))
        self._functions = {name: getattr(library, f"run_{name}") for name in self.signatures}
        self._driver = types.SimpleNamespace(cuLaunchKernel=self._launch)

    def _launch(self, function, grid, _y, _z, block, *rest):
        order = torch.from_numpy(self.rng.permutation(grid * block))
        function(ctypes.c_void_p(order.data_ptr()), ctypes.c_long(grid * block), rest[-2])
        self.launched.append(function.__name__[4:])
        return 0

    def prepare(self, kernel, *values):
        return native_cuda.Launch(self, kernel, values)

    def run(self, kernel, threads, *numbers):
        launch = self.prepare(kernel)
        launch.pack(*numbers)
        launch(threads, 0)

    def stream(self):
        return 0

    def wait(self):
        pass

    def current(self):
        return nullcontext()


def _emulated(s, folder, seed=0):
    """Put the CUDA backend on emulated kernels into a sampler of a graph in host memory -> the backend."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    compiled = lambda name, source: _EmulatedKernels(source, folder, seed)  # noqa: E731
    return sampler_cuda.Backend(s._backend.task, s.fanouts, s.seed, sampler_law.LAW, compiled)


@pytest.mark.parametrize("method", METHODS)
def test_cuda_source_follows_the_law_with_its_threads_in_any_order(method, tmp_path):
    for i in range(60):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, method)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend="torch", **options)
        backend = _emulated(s, tmp_path, seed=i)
        expected = _law(indptr, indices, fanouts, seeds, step, **options)
        for _ in range(2):  # twice: what the first batch left in the table does not count
            blocks = backend.sample(seeds, step)[::-1]
            assert _as_lists(blocks) == expected, (i, fanouts)
            assert all(t.dtype == indices.dtype for block in blocks for t in block[:3])
        outer = backend.sample(seeds.int(), step, relabel_outer=False)[-1]
        assert outer[1].tolist() == indices[torch.tensor(expected[0][3], dtype=torch.int64)].tolist()
        assert outer[2].tolist() == expected[0][2][: len(outer[0]) - 1]
        for wrong in [-1, len(indptr) - 1, *seeds[:1].tolist()]:  # not a node, not a node, there already
            assert backend.sample(torch.cat([seeds, torch.tensor([wrong])]), step) is None
        exclude = s._edge_set(_excluded(i, indptr, indices))
        for _ in range(2):  # in turn with batches that exclude nothing
            blocks = backend.sample(seeds, step, exclude=exclude)[::-1]
            law = _law(indptr, indices, fanouts, seeds, step, exclude=() if exclude is None else exclude, **options)
            assert _as_lists(blocks) == law, (i, fanouts)
            assert _as_lists(backend.sample(seeds, step)[::-1]) == expected


@pytest.mark.parametrize("method", BY_TIME)
def test_cuda_source_samples_by_time_with_its_threads_in_any_order(method, tmp_path, monkeypatch):
    for i in range(80):
        indptr, indices, fanouts, seeds, times, step, options = _timed_case(i, method)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend="torch", **options)
        monkeypatch.setattr(sampler_cuda, "ROOM", [1 << 12, 0][i % 4 == 3])  # 0: there is too little room at first
        backend = _emulated(s, tmp_path, seed=i)
        expected = _law(indptr, indices, fanouts, seeds, step, times, **options)
        exclude = s._edge_set(_excluded(i, indptr, indices))
        law = _law(indptr, indices, fanouts, seeds, step, times, exclude=() if exclude is None else exclude, **options)
        for _ in range(2):
            assert _as_lists(backend.sample(seeds, step, times=times)[::-1]) == expected, (i, fanouts)
            assert _as_lists(backend.sample(seeds, step, exclude=exclude, times=times)[::-1]) == law, (i, fanouts)
        outer = backend.sample(seeds.int(), step, False, times=times)[-1]
        assert outer[1].tolist() == indices[torch.tensor(expected[0][3], dtype=torch.int64)].tolist()
        assert outer[4].tolist() == expected[0][4][: len(outer[0]) - 1]
        for wrong in [-1, len(indptr) - 1, *seeds[:1].tolist()]:  # not a node, not a node, there already
            time = times[:1] if len(times) else torch.tensor([0])
            assert backend.sample(torch.cat([seeds, torch.tensor([wrong])]), step,
                                  times=torch.cat([times, time])) is None
        assert _as_lists(backend.sample(seeds, step, times=times)[::-1]) == expected


@pytest.mark.parametrize("method", METHODS)
def test_cuda_batches_without_room_are_made_again(method, tmp_path, monkeypatch):
    """Where the edges of a hop are not known to fit, too little room is noticed and enlarged, and the batch is the
    same."""
    monkeypatch.setattr(sampler_cuda, "ROOM", 0)
    repeated = 0
    for i in range(30):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, method)
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend="torch", **options)
        backend = _emulated(s, tmp_path, seed=i)
        backend.most = [1 + (i + hop) % 7 for hop in range(len(fanouts))]
        for _ in range(2):
            blocks = backend.sample(seeds, step)
            repeated += backend.kernels.launched.count("begin") > 1
            assert _as_lists(blocks[::-1]) == _law(indptr, indices, fanouts, seeds, step, **options), (i, fanouts)
            backend.kernels.launched.clear()
    assert 10 < repeated < 40


@pytest.mark.parametrize("method", METHODS)
def test_cuda_notices_a_damaged_graph(method, tmp_path):
    rng = np.random.default_rng(3)
    for damage in (2**30, -(2**30), 50, -1):
        for what in ("indices", "indptr"):
            indptr, indices = _random_graph(rng, 50, 12)
            options = dict(METHODS[method], check=False)
            if method == "weighted":
                options["weights"] = torch.ones(indices.numel())
            (indices if what == "indices" else indptr)[3::7] = damage if what == "indices" else damage * 1000
            for fanouts in ([20, 20, 20], [100] if method == "replace" else [-1, 2]):
                s = NeighborSampler(indptr, indices, fanouts, backend="torch", **options)
                backend = _emulated(s, tmp_path)
                for relabel_outer in (True, False):
                    with pytest.raises(IndexError, match="the graph is damaged"):
                        backend.sample(torch.arange(50), 0, relabel_outer)
            if method in sampler_cuda.COUNTED:
                frame = _emulated(NeighborSampler(indptr, indices, [1, 20], backend="torch", **options),
                                  tmp_path).frame(50, hops=1)
                x, out = torch.zeros(50, 4), torch.zeros(frame.shape[0][1], 8)
                assert frame.aggregate(x, out)
                frame.fill(torch.arange(50), 0)
                frame.start()
                assert frame.trouble == sampler_cuda.DAMAGED


def test_cuda_tables_are_used_up(tmp_path):
    """Positions count down from batch to batch; the table is filled anew when they reach the end."""
    indptr, indices = _random_graph(np.random.default_rng(3), 300, 8)
    s = NeighborSampler(indptr, indices, [4, 3], backend="torch")
    backend, seeds, bases = _emulated(s, tmp_path), torch.arange(20), []
    for step in range(5):
        blocks = backend.sample(seeds, step)[::-1]
        assert _as_lists(blocks) == _as_lists(s.sample(seeds, step))
        (frame,) = backend.resting
        bases.append(frame.base)
        if step == 0:
            frame.base = 2 * frame.positions + 1  # two batches more
    fresh, used = sampler_cuda.NONE - frame.positions, frame.positions
    assert bases == [fresh, used + 1, 1, fresh, fresh - used]


def test_a_cuda_batch_of_three_hops_is_eleven_launches(tmp_path):
    indptr, indices = _random_graph(np.random.default_rng(3), 300, 8)
    backend = _emulated(NeighborSampler(indptr, indices, [4, 3, 2], backend="torch"), tmp_path)
    for relabel_outer, launches in ((True, 11), (False, 9)):
        backend.kernels.launched.clear()
        backend.sample(torch.arange(20), 0, relabel_outer)
        assert len(backend.kernels.launched) == launches, backend.kernels.launched


@pytest.mark.parametrize("method", METHODS)
def test_a_cuda_frame_keeps_its_shapes(method, tmp_path):
    """What a CUDA graph replays: the same launches make batches of any number of seeds, in blocks that stay in
    place."""
    for i in range(12):
        rng = np.random.default_rng(i)
        indptr, indices = _random_graph(rng, 80, 9, [torch.int32, torch.int64][i % 2])
        options = dict(METHODS[method], seed=i)
        if method == "weighted":
            options["weights"] = torch.from_numpy(rng.exponential(1.0, indices.numel()))
        s = NeighborSampler(indptr, indices, [3, 20, 2], backend="torch", **options)
        room = dict(rows=[12, 70, 80], places=[70, 300]) if method == "labor" else {}
        frame = _emulated(s, tmp_path, seed=i).frame(12, hops=2, **room)
        blocks, steps = frame.blocks, frame.steps
        for step, S in enumerate((12, 5, 1, 12)):
            seeds = torch.from_numpy(rng.permutation(80)[:S])
            frame.fill(seeds, step)
            frame.start()
            want = s.sample(seeds, step)[:0:-1]  # without the outermost hop
            assert frame.trouble == 0 and frame.steps is steps
            assert [tuple(map(torch.Tensor.tolist, block[:3])) for block in frame.cut()] == [
                tuple(map(torch.Tensor.tolist, block[:3])) for block in want]  # fmt: skip
            for (offsets, local, src, *_), block in zip(blocks, want):
                S, E, N = block.num_dst, block.num_edges, block.num_src
                assert torch.equal(offsets[: S + 1], block.indptr) and (offsets[S:] == E).all()
                assert torch.equal(local[:E], block.indices) and torch.equal(src[:N], block.src_nodes)
                assert ((src >= 0) & (src < 80)).all() and (local[E:] == -1).all()


@pytest.mark.parametrize("room", [dict(rows=[30, 90, 140]), dict(places=[120, 750]), dict(places=[180, 400])])
def test_a_cuda_frame_that_is_too_small_says_so(room, tmp_path):
    indptr, indices = _random_graph(np.random.default_rng(4), 150, 9)
    s = NeighborSampler(indptr, indices, [6, 5], seed=2, backend="torch")
    frame, seen = _emulated(s, tmp_path).frame(30, **room), set()
    for step in range(20):
        seeds = torch.from_numpy(np.random.default_rng(step).permutation(150)[: 30 - step])
        frame.fill(seeds, step)
        frame.start()
        want = s.sample(seeds, step)[::-1]
        rows, places = frame.shape[:2]
        fits = all(b.num_src <= n and b.num_edges <= e for b, n, e in zip(want, rows[1:], places))
        assert frame.trouble == (0 if fits else sampler_cuda.FULL)
        if fits:
            assert _as_lists(frame.cut()) == _as_lists(want)
        seen.add(fits)
    assert seen == {True, False}
    frame.fill(torch.tensor([5, 5, 150]), 0)
    frame.start()
    assert frame.trouble & ~sampler_cuda.FULL == sampler_cuda.REPEATED | sampler_cuda.UNKNOWN


@pytest.mark.parametrize("k", [1, 5, 15])
def test_cuda_draws_and_averages_the_outermost_hop(k, tmp_path):
    """pick_aggregate against self_and_mean of the same hop: the same bits, in any order of threads, and zeros
    beyond."""
    for i in range(8):
        rng = np.random.default_rng(i)
        indptr, indices = _random_graph(rng, 90, 9, [torch.int32, torch.int64][i % 2])
        s = NeighborSampler(indptr, indices, [4, k], seed=i, backend="torch", replace=i % 4 == 3)
        dtype, out_dtype = [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2][i % 3]
        x = torch.randn(90, [20, 7, 100][i // 2 % 3]).to(dtype)
        frame = _emulated(s, tmp_path, seed=i).frame(10, hops=1)
        out = torch.full((frame.shape[0][1], 2 * x.shape[1]), 7.0, dtype=out_dtype)
        assert frame.aggregate(x, out)
        for step, S in enumerate((10, 3)):
            seeds = torch.from_numpy(rng.permutation(90)[:S])
            frame.fill(seeds, step)
            frame.start()
            outer = s.sample(seeds, step, relabel_outer=False)[0]
            want = out.new_empty(outer.num_dst, out.shape[1])
            fused.self_and_mean(outer.indptr, outer.indices, x, outer.src_nodes, want)
            assert torch.equal(out[: outer.num_dst], want) and not out[outer.num_dst :].any()


def test_cuda_that_cannot_be_had_is_one_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(native_cuda, "_nvrtc", lambda: ctypes.CDLL("libnvrtc.so.none"))
    source, gpu = native_cuda.DIALECT + "KERNEL nothing(int n) { }\n", torch.device("cuda", 0)
    with pytest.warns(UserWarning,
                      match="the CUDA kernels of a test cannot be used, .* Reason: libnvrtc.so.none: cannot open"):
        assert native_cuda.load_cuda("a test", source, gpu) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_cuda.load_cuda("a test", source + "\n", gpu) is None


def _cuda_resources(source, arch, folder):
    """{kernel: (registers, bytes of stack, bytes spilled)} by NVRTC, or by nvcc where that is not installed."""
    try:
        log = native_cuda.compile_cuda(source, arch, ["--ptxas-options=-v"])[1]
    except OSError:
        if not shutil.which("nvcc"):
            pytest.skip("neither NVRTC nor nvcc is installed")
        Path(folder, "kernels.cu").write_text(source)
        options = ["-Xptxas", "-v", "-Werror", "all-warnings", "-diag-suppress", "177"]  # 177: unused functions
        command = ["nvcc", "-cubin", f"-arch={arch}", *options, "-o", "kernels.cubin", "kernels.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        log = done.stderr
    pattern = r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    found = {name: tuple(map(int, (used, stack, spilled)))
             for name, stack, spilled, used in re.findall(pattern, log, re.DOTALL)}
    assert found.keys() == native_cuda.signatures(source).keys()
    return found


@pytest.mark.parametrize("dtype, arch",
                         [*((torch.int32, arch) for arch in ("sm_80", "sm_90", "sm_100")), (torch.int64, "sm_90")])
def test_cuda_sampler_kernels_stay_in_registers(dtype, arch, tmp_path):
    found = _cuda_resources(sampler._Kernels(dtype).source, arch, tmp_path)
    like = [torch.empty(1, 100), torch.empty(1, 7, dtype=torch.bfloat16)]
    source, _ = sampler_cuda.aggregate_source(dtype, sampler_law.LAW, sampler_cuda.AGGREGATED, like[arch == "sm_80"],
                                              like[dtype == torch.int64])
    found |= _cuda_resources(source, arch, tmp_path)
    assert {(stack, spilled) for _, stack, spilled in found.values()} == {(0, 0)}, found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("method", METHODS)
def test_cuda_kernels_on_a_gpu_follow_the_law(method):
    for i in range(60):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, method)
        options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        s = NeighborSampler(indptr.cuda(), indices.cuda(), fanouts, edge_ids=True, backend="native", **options)
        assert s.backend == "native"
        options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        assert _as_lists(s.sample(seeds, step)) == _law(indptr, indices, fanouts, seeds, step, **options), (i, fanouts)
        exclude = _excluded(i, indptr, indices)
        law = _law(indptr, indices, fanouts, seeds, step, exclude=exclude, **options)
        assert _as_lists(s.sample(seeds, step, exclude=exclude.cuda() if i % 3 else exclude)) == law, (i, fanouts)


def test_ids_above_two_to_the_31(tmp_path):
    """A graph of 2^31 + 1000 nodes: all edges belong to the last thousand, so that indptr is a file with a hole."""
    num_nodes, last = 2**31 + 1000, 2**31
    rng = np.random.default_rng(8)
    degree = rng.integers(0, 40, 1000)
    indptr = np.memmap(tmp_path / "indptr", np.int64, "w+", shape=(num_nodes + 1,))
    indptr[last:] = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(last - 50, num_nodes, int(indptr[-1]))
    seeds = torch.from_numpy(last + rng.permutation(1000)[:64])
    for method in METHODS:
        options = dict(METHODS[method])
        if method == "weighted":
            options["weights"] = torch.from_numpy(rng.exponential(1.0, len(indices)))
        arguments = (torch.from_numpy(indptr), torch.from_numpy(indices), [5, 3])
        s = NeighborSampler(*arguments, edge_ids=True, backend="native", check=False, **options)
        blocks = _as_lists(s.sample(seeds, 1))
        assert blocks == _law(indptr, arguments[1], [5, 3], seeds, 1, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_hub_of_degree_a_million(method):
    rng = np.random.default_rng(9)
    degree = rng.poisson(5, 2000)
    degree[77] = 10**6
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(degree)]))
    indices = torch.from_numpy(rng.integers(0, 2000, int(indptr[-1])).astype(np.int32))
    options = dict(METHODS[method])
    if method == "weighted":
        options["weights"] = torch.from_numpy(rng.exponential(1.0, indices.numel()))
    seeds = torch.tensor([5, 77, 1500])
    for fanouts in ([100, 7], [700]) + (() if method == "replace" else ([-1],)):
        native, plain = (
            NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend=backend, **options).sample(seeds, 2)
            for backend in ("native", "torch")
        )
        assert all(torch.equal(a, b) for x, y in zip(native, plain) for a, b in zip(x[:4], y[:4]))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_graph_is_an_error_and_no_crash(method, backend):
    """Unchecked, as a store is opened: ids and lists outside of the graph are met while sampling."""
    rng = np.random.default_rng(3)
    for damage in (2**30, -(2**30), 50, -1):
        for what in ("indices", "indptr"):
            indptr, indices = _random_graph(rng, 50, 12)
            options = dict(METHODS[method], check=False)
            if method == "weighted":
                options["weights"] = torch.ones(indices.numel())
            (indices if what == "indices" else indptr)[3::7] = damage if what == "indices" else damage * 1000
            s = NeighborSampler(indptr, indices, [20, 20, 20], backend=backend, **options)
            with pytest.raises(sampler.DamagedGraph, match="the graph is damaged"):
                s.sample(torch.arange(50), 0)


@pytest.mark.parametrize("backend", ["torch", "native", "cuda"])
def test_any_bytes_in_indptr_are_an_error_and_no_crash(backend, tmp_path):
    """Numbers whose difference overflows among them: the length of a list may look right."""
    rng = np.random.default_rng(4)
    for pair in ([2**63 - 1, -(2**62)], *rng.integers(-(2**63), 2**63 - 1, (40, 2)).tolist()):
        indptr, indices = _random_graph(rng, 50, 12)
        indptr[3:5] = torch.tensor(pair)
        s = NeighborSampler(indptr, indices, [3], backend="torch" if backend == "cuda" else backend, check=False)
        if backend == "cuda":
            s = _emulated(s, tmp_path)
        with pytest.raises(IndexError, match="the graph is damaged"):
            s.sample(torch.tensor([3]), 0, relabel_outer=True)


def test_the_outermost_hop_can_keep_global_ids():
    indptr, indices = _random_graph(np.random.default_rng(10), 400, 8)
    for backend in ("native", "torch"):
        s = NeighborSampler(indptr, indices, [4, 3], edge_ids=True, backend=backend)
        full, bare = s.sample(torch.arange(30), 5), s.sample(torch.arange(30), 5, relabel_outer=False)
        assert _as_lists(full[1:]) == _as_lists(bare[1:])
        assert torch.equal(bare[0].indices, full[0].src_nodes[full[0].indices.long()])
        assert torch.equal(bare[0].src_nodes, full[1].src_nodes)
        assert torch.equal(bare[0].indptr, full[0].indptr) and torch.equal(bare[0].edge_ids, full[0].edge_ids)


# -- statistics that could fail: thresholds at a level of about one in a million


def _chi_square_limit(df, z=4.75):
    """The quantile of chi-square by Wilson and Hilferty; z = 4.75 leaves one in a million above it."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def _positions(degree, k, rows=100_000, step=0, **options):
    """Which of its `degree` neighbours each of many nodes took -> bool [rows, degree]."""
    indptr = torch.arange(rows + 1) * degree
    indices = torch.randint(rows, (rows * degree,), generator=torch.Generator().manual_seed(0))
    s = NeighborSampler(indptr, indices, [k], edge_ids=True, seed=11, **options)
    taken = torch.zeros(rows, degree, dtype=torch.bool)
    taken.view(-1)[s.sample(torch.arange(rows), step)[0].edge_ids] = True
    return taken


def _uniformity(taken, k):
    """Chi-square of how often each position was taken, corrected for drawing without replacement."""
    rows, n = taken.shape
    p = k / n
    return float(((taken.sum(0) - rows * p) ** 2).sum() / (rows * p * (1 - p)) * (n - 1) / n)


def test_neighbours_and_pairs_of_neighbours_are_equally_likely():
    taken = _positions(50, 10)
    assert (taken.sum(1) == 10).all()
    assert _uniformity(taken, 10) < _chi_square_limit(49)
    assert _uniformity(taken.T.reshape(50, -1).T, 10) < _chi_square_limit(49)
    x = taken.float()
    q = 10 * 9 / (50 * 49)
    pairs = (x.T @ x)[torch.triu_indices(50, 50, 1).unbind()]
    z = (pairs - len(x) * q) / math.sqrt(len(x) * q * (1 - q))
    assert z.abs().max() < 6 and 0.8 < (z**2).mean() < 1.25
    # the same statistic rejects torch-sparse 0.6's mistake, which takes the last positions at 0.84 of their share
    rng = np.random.default_rng(0)
    p = np.where(np.arange(50) < 45, 1.0, 0.84)
    skewed = np.zeros((20_000, 50), bool)
    keys = np.log(rng.random(skewed.shape)) / p
    np.put_along_axis(skewed, np.argsort(-keys, 1)[:, :10], True, 1)
    assert _uniformity(torch.from_numpy(skewed), 10) > _chi_square_limit(49)


def test_draws_of_one_node_over_steps_are_uniform():
    indptr, indices = torch.tensor([0, 20] + [20] * 20), torch.arange(1, 21)
    s = NeighborSampler(indptr, indices, [5], edge_ids=True)
    taken = torch.zeros(20_000, 20, dtype=torch.bool)
    for step in range(len(taken)):
        taken[step, s.sample(torch.tensor([0]), step)[0].edge_ids] = True
    assert _uniformity(taken, 5) < _chi_square_limit(19)


def test_draws_with_replacement_are_uniform():
    rows, degree, k = 50_000, 30, 8
    s = NeighborSampler(torch.arange(rows + 1) * degree, (torch.arange(rows * degree) % rows).int(), [k], replace=True,
                        edge_ids=True)  # fmt: skip
    counts = torch.bincount(s.sample(torch.arange(rows), 0)[0].edge_ids % degree, minlength=degree).double()
    expected = rows * k / degree
    assert ((counts - expected) ** 2).sum() / expected < _chi_square_limit(degree - 1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_allowed_neighbours_are_equally_likely_and_no_other_is_taken(backend, strict):
    """By time, and without the excluded edges: rows of three kinds see 50, 37 and 24 places, but for six of them."""
    rows, degree, k = 60_000, 50, 10
    row, place = torch.arange(rows * degree) // degree, torch.arange(rows * degree) % degree
    sees, gone = torch.tensor([50, 37, 24]), torch.isin(place, torch.tensor([0, 1, 7, 20, 35, 49]))
    indices = torch.randint(rows, (rows * degree,), generator=torch.Generator().manual_seed(0))
    s = NeighborSampler(torch.arange(rows + 1) * degree, indices, [k], edge_ids=True, backend=backend, seed=12,
                        edge_times=place, strict=strict)  # fmt: skip
    seeds = torch.arange(rows)
    block = s.sample(seeds, 0, sees[seeds % 3] - int(not strict), gone.nonzero().squeeze(1))[0]
    taken, allowed = torch.zeros(2, rows, degree, dtype=torch.bool)
    taken.view(-1)[block.edge_ids] = True
    allowed.view(-1)[:] = (place < sees[row % 3]) & ~gone
    assert (taken.sum(1) == k).all() and not (taken & ~allowed).any()
    for kind in range(3):
        of_kind, n = taken[kind::3][:, allowed[kind]], int(allowed[kind].sum())
        assert _uniformity(of_kind, k) < _chi_square_limit(n - 1)
        # the next allowed one in the place of one that is not, as a sampler might do, would be found out
        pushed = _positions(n + 1, k, rows=rows // 3)
        pushed[:, 6] |= pushed[:, 5]
        assert _uniformity(pushed[:, torch.arange(n + 1) != 5], k) > _chi_square_limit(n - 1)


@pytest.mark.parametrize("backend", ["torch", "native", "cuda"])
def test_dependent_labor_follows_the_law(backend, tmp_path):
    for i in range(40):
        indptr, indices, fanouts, seeds, step, options = _law_case(i, "labor")
        options |= {"layer_dependency": i % 3 > 0, "batch_dependency": [1, 2, 7][i % 3 - 1]}
        s = NeighborSampler(indptr, indices, fanouts, edge_ids=True, backend="torch" if backend == "cuda" else backend,
                            **options)
        kernels = _emulated(s, tmp_path, seed=i) if backend == "cuda" else None
        for step in (step, 6, 7, -1, -8):
            expected = _law(indptr, indices, fanouts, seeds, step, **options)
            blocks = kernels.sample(seeds,
                                    step // options["batch_dependency"])[::-1] if kernels else s.sample(seeds, step)
            assert _as_lists(blocks) == expected, (i, fanouts, step)


def test_dependent_labor_reads_fewer_rows():
    """Layer dependency: fewer sources in a batch. Batch dependency: more of the sources of the batch before."""
    rng = np.random.default_rng(12)
    indptr, indices = torch.arange(5001) * 40, torch.from_numpy(rng.integers(0, 5000, 200_000).astype(np.int32))
    sources = {}
    for name, options in {"plain": {}, "layer": {"layer_dependency": True}, "batch": {"batch_dependency": 4}}.items():
        s = NeighborSampler(indptr, indices, [5, 5], method="labor", **options)
        sources[name] = [set(s.sample(torch.arange(100) + 100 * step, step)[0].src_nodes.tolist()) for step in range(8)]
    first = {name: sum(map(len, sets)) for name, sets in sources.items()}
    again = {name: len(sets[1] & sets[2]) / len(sets[2]) for name, sets in sources.items()}  # steps 1 and 2 draw alike
    across = {name: len(sets[3] & sets[4]) / len(sets[4]) for name, sets in sources.items()}  # steps 3 and 4 do not
    assert first["layer"] < 0.9 * first["plain"], first
    assert again["batch"] > 1.2 * again["plain"] and abs(across["batch"] - across["plain"]) < 0.1, (again, across)


def test_labor_keeps_k_on_average_and_visits_fewer_sources():
    rng = np.random.default_rng(12)
    rows, degree, k = 20_000, 50, 10
    indices = torch.from_numpy((rows * rng.random(rows * degree) ** 2).astype(np.int32))
    indptr, seeds = torch.arange(rows + 1) * degree, torch.arange(2000)
    blocks = {
        method: NeighborSampler(indptr, indices, [k], method=method).sample(seeds, 0)[0]
        for method in ("uniform", "labor")
    }
    kept = blocks["labor"].num_edges / len(seeds)
    # sources that all draw alike make rows depend on each other: bound the mean by what distinct sources allow
    shared = len(seeds) * degree / len(indices.unique())
    spread = 6 * math.sqrt(k * (1 - k / degree) / len(seeds)) * math.sqrt(shared + 1)
    assert abs(kept - k) < spread < 2
    distinct = {method: block.num_src - block.num_dst for method, block in blocks.items()}
    print(f"LABOR visits {distinct['labor']} new sources, uniform {distinct['uniform']}")
    assert distinct["labor"] < 0.8 * distinct["uniform"]
    # an edge is kept with probability k / degree whatever its place in the list
    taken = _positions(50, 10, rows=20_000, method="labor").double()
    assert abs(taken.mean() - 0.2) < 0.005 and (taken.mean(0) - 0.2).abs().max() < 0.03


def test_weighted_frequencies_follow_the_weights():
    rows, weights = 100_000, np.array([1.0, 2.0, 0.0, 4.0, 0.5, 8.0])
    options = {"weights": torch.from_numpy(np.tile(weights, rows))}
    # k = 1: probability weight / total
    counts = _positions(6, 1, rows, **options).sum(0).double().numpy()
    alive = weights > 0
    expected = rows * weights[alive] / weights.sum()
    assert counts[2] == 0 and ((counts[alive] - expected) ** 2 / expected).sum() < _chi_square_limit(4)
    # k = 3: one after the other without replacement; inclusion probabilities by enumeration
    inclusion = np.zeros(6)

    def draw(p, left, taken):
        if len(taken) == 3:
            inclusion[taken] += p
            return
        for i in np.flatnonzero(left):
            draw(p * left[i] / left.sum(), np.where(np.arange(6) == i, 0, left), taken + [i])

    draw(1.0, weights, [])
    counts = _positions(6, 3, rows, **options).sum(0).double().numpy()
    z = (counts - rows * inclusion)[alive] / np.sqrt(rows * inclusion * (1 - inclusion))[alive]
    assert counts[2] == 0 and np.abs(z).max() < 5.5
    assert np.abs(rows * 3 * weights / weights.sum() - counts).max() > 1000  # which is not proportional to the weights


# -- compiling


def _uses(**environment):
    """What a process does that samples first with one backend, then with the other."""
    os.environ.update(environment)
    tempfile.tempdir = environment.get("TMPDIR")
    graph = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for backend in ("native", "auto"):
            s = NeighborSampler(*graph, [2], backend=backend)
    assert s.sample(torch.tensor([0]), 0)[0].src_nodes.tolist() == [0, 1, 2]
    print(s.backend, len(caught), caught[0].message if caught else "")


def _use(file, number=1, **environment):
    """The lines of so many processes that start together."""
    processes = [_fork(f"{file}{i}", functools.partial(_uses, **environment)) for i in range(number)]
    return [_end(process).splitlines()[-1] for process in processes]


def test_native_code_is_compiled_once_by_processes_that_start_together(tmp_path):
    assert _use(tmp_path / "out", 5, XDG_CACHE_HOME=str(tmp_path)) == ["native 0 "] * 5
    assert len(list((tmp_path / "ringblock").iterdir())) == 1
    folder = tmp_path / "t"
    folder.mkdir()
    assert _use(tmp_path / "no cache to write to", XDG_CACHE_HOME="/dev/null", TMPDIR=str(folder)) == ["native 0 "]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_one_warning_and_the_torch_backend(compiler, tmp_path):
    output, = _use(tmp_path / "out", CC=compiler, XDG_CACHE_HOME=str(tmp_path))
    assert output.startswith("torch 1 ") and "apt install gcc" in output


@pytest.mark.parametrize("file", ["sampler_law", "sampler_c", "native"])
def test_a_file_that_was_not_copied_along_is_named_once(file, monkeypatch):
    monkeypatch.delitem(sys.modules, "sampler_c", raising=False)
    monkeypatch.setitem(sys.modules, file, None)
    sampler._warn_missing.cache_clear()
    with pytest.warns(UserWarning, match=f"copy {file}.py beside sampler.py") as caught:
        assert [NeighborSampler(**_small()).backend for _ in range(2)] == ["torch", "torch"] and len(caught) == 1


_ANSWER = """
import ctypes, native
library = native.load_c("test", "int answer(void) { return 42; }", ["-shared", "-fPIC"], {"answer": (ctypes.c_int,)})
print(library.answer(), library._name)
"""


def _plant(good, evil, link=False, mode=0o700, owner=None, folder_mode=0o700, folder_owner=None, above=0o700):
    """Put another library in the place of a good one, under the name that it would have."""
    planted = good.with_name(good.name.replace(good.stem.split("-")[-1], hashlib.sha256(evil.read_bytes()).hexdigest()))
    good.unlink()
    planted.symlink_to(evil) if link else shutil.copy(evil, planted).chmod(mode)
    good.parent.chmod(folder_mode)
    good.parent.parent.chmod(above)
    for path, user in ((planted, owner), (good.parent, folder_owner)):
        if user:
            os.chown(path, user, user)


PLANTED = {  # how: the answer of the library that is loaded, whether it comes from the cache
    "by this user": ({}, 666, True),  # the name is right: what refuses the others is who could have written them
    "by another user": (dict(owner=65534), 42, True),
    "writable by the group": (dict(mode=0o720), 42, True),
    "writable by everybody": (dict(mode=0o702), 42, True),
    "a link": (dict(link=True), 42, True),
    "in another user's folder": (dict(folder_owner=65534), 42, False),
    "in a folder of the group": (dict(folder_mode=0o770), 42, False),
    "in a folder for everybody": (dict(folder_mode=0o707), 42, False),
    "in a sticky folder for everybody": (dict(folder_mode=0o1777), 42, False),
    "below a folder for everybody": (dict(above=0o777), 42, False),
    "below a sticky folder for everybody": (dict(above=0o1777), 666, True),
    "damaged": (None, 42, True),
}


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize("how", PLANTED)
def test_native_loads_only_what_is_this_users_own_and_undamaged(how, tmp_path):
    plant, answer, in_cache = PLANTED[how]
    if os.geteuid() and plant and {"owner", "folder_owner"} & plant.keys():
        pytest.skip("only root can give files away")
    cache, temporary, evil = tmp_path / "cache", tmp_path / "temporary", tmp_path / "evil.so"
    cache.mkdir(), temporary.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", evil], input="int answer(void) { return 666; }",
                   text=True)
    environment = {**os.environ, "PYTHONPATH": str(HERE), "XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}

    def ask():  # under the worst umask: what is made is for everybody to write, unless its maker sees to it
        command = f"umask 0; exec {shlex.quote(sys.executable)} -c {shlex.quote(_ANSWER)}"
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not list(temporary.iterdir())
        number, path = done.stdout.split()
        return int(number), Path(path)

    def digest(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    number, good = ask()
    inode = good.stat().st_ino
    assert number == 42 and good.parent == cache / "ringblock" and good.stem.endswith(digest(good))
    assert ask() == (42, good) and good.stat().st_ino == inode  # not compiled again
    if how == "damaged":
        good.write_bytes(good.read_bytes()[:5000])
    else:
        _plant(good, evil, **plant)
    number, path = ask()
    assert (number, path.parent == good.parent) == (answer, in_cache)
    assert not in_cache or path.stem.endswith(digest(path))


def _sanitized(folder):
    asan = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import sampler_c
sampler_c.FLAGS[:] = ["-O1", "-g", "-fPIC", "-shared", "-pthread", "-fsanitize=address,undefined",
                      "-fno-sanitize-recover"]
import test_all
for method in test_all.METHODS:
    test_all.test_sampler_follows_the_law(method, "native")
    test_all.test_a_hub_of_degree_a_million(method)
    test_all.test_excluded_edges_are_as_if_the_graph_did_not_have_them(method, "native")
    test_all.test_sampling_by_time_follows_the_law(method, "native")
test_all.test_the_outermost_hop_can_keep_global_ids()
print("clean")
"""
    if not Path(asan).is_file():
        script = "print('no asan')"
    # OpenMP and the interpreter keep memory for the whole run: leaks are not looked for
    environment = {**os.environ, "LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0", "XDG_CACHE_HOME": str(folder)}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


@_beside(_sanitized)
def test_native_code_under_address_and_undefined_behaviour_sanitizers(beside):
    process, folder = beside
    output, errors = process.communicate(timeout=200)
    if "no asan" in output:
        pytest.skip("the compiler has no AddressSanitizer")
    assert output.strip() == "clean", errors[-3000:]
    # node ids and weights of 4 and 8 bytes, with and without times
    assert len(list((folder / "ringblock").iterdir())) == 8


def test_the_adapter_feeds_dgls_dataloader():
    try:
        dgl = sampler.import_dgl()
    except ImportError as missing:
        pytest.skip(str(missing))
    indptr, indices = _random_graph(np.random.default_rng(13), 500, 12, torch.int64)
    graph = dgl.graph(("csc", (indptr, indices, torch.empty(0, dtype=torch.int64))), num_nodes=500)
    ours = NeighborSampler(indptr, indices, [4, 3], seed=5)
    for workers in (0, 2):
        loader = dgl.dataloading.DataLoader(graph, torch.arange(200), sampler.DGLAdapter(ours), batch_size=64,
                                            num_workers=workers)  # fmt: skip
        batches = list(loader)
        assert [len(output) for _, output, _ in batches] == [64, 64, 64, 8]
        for step, (inputs, outputs, blocks) in enumerate(batches):
            assert torch.equal(inputs, blocks[0].srcdata[dgl.NID]) and torch.equal(outputs, blocks[-1].dstdata[dgl.NID])
            if workers == 0:
                assert torch.equal(inputs, ours.sample(outputs, step)[0].src_nodes)


def test_sampler_step_seed_and_hop_key_the_draws():
    indptr, indices = _random_graph(np.random.default_rng(0), 200, 30)
    seeds = torch.arange(50)
    one = _as_lists(NeighborSampler(indptr, indices, [5, 5], seed=1).sample(seeds, 7))
    assert one == _as_lists(NeighborSampler(indptr, indices, [5, 5], seed=1).sample(seeds, 7))
    assert one != _as_lists(NeighborSampler(indptr, indices, [5, 5], seed=2).sample(seeds, 7))
    assert one != _as_lists(NeighborSampler(indptr, indices, [5, 5], seed=1).sample(seeds, 8))
    # a node draws the same neighbours whatever batch it is in: ranks and batch sizes do not change the draws
    alone = NeighborSampler(indptr, indices, [5], seed=1).sample(seeds[20:21], 7)[0]
    among = NeighborSampler(indptr, indices, [5], seed=1).sample(seeds, 7)[0]
    a, b = among.indptr[20], among.indptr[21]
    assert alone.src_nodes[alone.indices.long()].tolist() == among.src_nodes[among.indices[a:b].long()].tolist()


def test_sampler_from_many_threads_at_once():
    indptr, indices = _random_graph(np.random.default_rng(1), 3000, 20)
    s = NeighborSampler(indptr, indices, [10, 5, 3], seed=3)
    seeds = [torch.randperm(3000)[:200] for _ in range(40)]
    expected = [_as_lists(s.sample(x, i)) for i, x in enumerate(seeds)]
    with ThreadPoolExecutor(8) as pool:
        assert [_as_lists(b) for b in pool.map(s.sample, seeds, range(40))] == expected


def _small(**changes):
    arguments = dict(indptr=torch.tensor([0, 2, 3, 3]), indices=torch.tensor([1, 2, 0]), fanouts=[2])
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "error, words, changes",
    [
        (ValueError, "fanouts", dict(fanouts=[])),
        (ValueError, "fanouts", dict(fanouts=[3, 0])),
        (ValueError, "fanouts", dict(fanouts=[-2])),
        (ValueError, "fanouts.*replace", dict(fanouts=[-1], replace=True)),
        (ValueError, "method 'walk'.*labor", dict(method="walk")),
        (ValueError, "layer_dependency is for method 'labor', not 'uniform'", dict(layer_dependency=True)),
        (ValueError, "batch_dependency is for method 'labor', not 'uniform'", dict(batch_dependency=2)),
        (ValueError, "batch_dependency is 0", dict(method="labor", batch_dependency=0)),
        (ValueError, "'dgl' draws without layer_dependency",
         dict(method="labor", layer_dependency=True, backend="dgl")),
        (ValueError, "backend 'cuda'.*torch", dict(backend="cuda")),
        (ValueError, "exclude", dict(replace=True, method="labor")),
        (ValueError, "exclude", dict(weights=torch.ones(3), method="labor")),
        (TypeError, "indptr.*int32", dict(indptr=torch.tensor([0, 2, 3, 3], dtype=torch.int32))),
        (TypeError, "indices.*float", dict(indices=torch.rand(3))),
        (ValueError, "indptr falls from 3 to 2 at node 1", dict(indptr=torch.tensor([0, 3, 2, 3]))),
        (ValueError, "indptr runs from 1", dict(indptr=torch.tensor([1, 2, 3, 3]))),
        (ValueError, "indptr runs from 0 to 4", dict(indptr=torch.tensor([0, 2, 3, 4]))),
        (ValueError, "indices contains 3", dict(indices=torch.tensor([1, 3, 0]))),
        (ValueError, "indices contains -1", dict(indices=torch.tensor([1, -1, 0]))),
        (TypeError, "weights", dict(weights=torch.ones(2))),
        (ValueError, "weights.*negative", dict(weights=torch.tensor([1.0, -1.0, 0.0]))),
        (ValueError, "weights.*NaN", dict(weights=torch.tensor([1.0, float("nan"), 0.0]))),
    ],
)
def test_sampler_names_the_bad_argument(error, words, changes):
    with pytest.raises(error, match=words):
        NeighborSampler(**_small(**changes))


@pytest.mark.parametrize(
    "error, words, seeds",
    [
        (IndexError, "seeds contains 3; .* 0 to 2", torch.tensor([0, 3])),
        (IndexError, "seeds contains -1", torch.tensor([-1])),
        (ValueError, "seeds contains node 1 more than once", torch.tensor([0, 1, 2, 1])),
        (TypeError, "seeds must be.*float", torch.tensor([0.5])),
        (TypeError, "seeds must be.*list", [0, 1]),
        (TypeError, "seeds must be.*1-D", torch.tensor([[0]])),
    ],
)
def test_sampler_names_bad_seeds_and_goes_on(error, words, seeds):
    s = NeighborSampler(**_small())
    with pytest.raises(error, match=words):
        s.sample(seeds, 0)
    assert s.sample(torch.tensor([2, 0]), 0)[0].src_nodes.tolist() == [2, 0, 1]


def test_dgl_backend_and_block_conversions():
    pytest.importorskip("scipy")  # DGL's own dependency: there where DGL is
    try:
        dgl = sampler.import_dgl()
    except ImportError as missing:
        pytest.skip(str(missing))
    for dtype in (torch.int32, torch.int64):
        indptr, indices = _random_graph(np.random.default_rng(2), 300, 12, dtype)
        seeds = torch.tensor([5, 2, 9])
        for method in METHODS:
            options = dict(METHODS[method])
            if method == "weighted":
                options["weights"] = (torch.arange(indices.numel()) % 3 > 0).float()
            s = NeighborSampler(indptr, indices, [4, 3], edge_ids=True, backend="dgl", **options)
            outer, inner = s.sample(seeds, 0)
            assert inner.src_nodes[:3].tolist() == seeds.tolist()
            assert torch.equal(outer.src_nodes[: outer.num_dst], inner.src_nodes)
            for block in (outer, inner):
                assert torch.equal(block.src_nodes[block.indices.long()], indices[block.edge_ids])
                destination = torch.repeat_interleave(block.src_nodes[: block.num_dst], block.indptr.diff().long())
                v = destination.long()
                assert ((indptr[v] <= block.edge_ids) & (block.edge_ids < indptr[v + 1])).all()
                if method == "weighted":
                    assert (options["weights"][block.edge_ids] > 0).all()
            assert _as_lists(s.sample(seeds, 0)) == _as_lists([outer, inner])
            with pytest.raises(ValueError, match="'dgl' cannot exclude edges.*'native'"):
                s.sample(seeds, 0, exclude=torch.tensor([1]))
            bare = s.sample(seeds, 0, relabel_outer=False)[0]
            assert torch.equal(bare.indices, indices[outer.edge_ids]) and torch.equal(bare.src_nodes, inner.src_nodes)
    block = NeighborSampler(indptr, indices, [4], edge_ids=True).sample(seeds, 0)[0]
    there, x = block.to_dgl(), torch.randn(block.num_src, 7)
    assert torch.equal(there.srcdata[dgl.NID], block.src_nodes)
    assert torch.equal(there.edata[dgl.EID], block.edge_ids)
    there.srcdata["x"] = x
    there.update_all(dgl.function.copy_u("x", "m"), dgl.function.mean("m", "mean"))
    mine = model.mean_neighbours(block.indptr, block.indices, x)
    torch.testing.assert_close(there.dstdata["mean"], mine)
    (src, dst), edge_ids, size = block.to_pyg()
    assert size == (block.num_src, block.num_dst) and edge_ids is block.edge_ids
    total = torch.zeros(block.num_dst, 7).index_add_(0, dst, x[src])
    torch.testing.assert_close(total / block.indptr.diff().clamp(min=1)[:, None], mine)


def test_a_missing_dgl_gives_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(ImportError, match="pip install dgl"):
        NeighborSampler(**_small(backend="dgl"))


# ---------------------------------------------------------------------------------------------------------------------
# features.py


def test_prefetch_gives_the_same_results_in_order_for_any_depth_and_threads():
    indptr, indices = _random_graph(np.random.default_rng(4), 500, 10)
    table, labels = torch.randn(500, 9), torch.arange(500)
    s = NeighborSampler(indptr, indices, [5, 3])
    batches = list(torch.randperm(500).split(33))
    expected = None
    for depth, threads in [(0, 1), (1, 1), (2, 1), (3, 2), (8, 4)]:
        ring = FeatureRing(table, labels, slots=depth + 1)
        got = []
        for batch in prefetch(lambda x, slot: ring.fetch(slot, s.sample(x, 1)), batches, depth=depth, threads=threads):
            batch.wait()
            time.sleep(0.001)  # workers run ahead meanwhile: a slot used too early would show
            got.append((batch.x.clone(), batch.y, _as_lists(batch.blocks)))
        for (x, y, blocks), seeds in zip(got, batches):
            assert torch.equal(x, table[blocks[0][2]]) and torch.equal(y, labels[seeds])
        expected = expected or got
        assert all(torch.equal(a[0], b[0]) and a[2] == b[2] for a, b in zip(got, expected)) and len(got) == len(batches)
        kept = {buffer.data_ptr() for buffer in ring.buffers if buffer is not None}
        assert len(kept) <= depth + 1


def test_prefetch_never_gives_one_slot_to_two_live_results():
    rng, live, lock = np.random.default_rng(5), {}, threading.Lock()
    delays = rng.random(200) * 0.002

    def make(i, slot):
        with lock:
            assert slot not in live, f"slot {slot} still holds {live.get(slot)}"
            live[slot] = i
        time.sleep(delays[i])
        return i, slot

    for i, (item, slot) in enumerate(prefetch(make, range(200), depth=3, threads=3)):
        assert item == i and live[slot] == i
        time.sleep(delays[-i - 1])
        del live[slot]


def test_prefetch_hands_on_the_exception_with_the_workers_traceback():
    def make(item, slot):
        if item == 3:
            raise KeyError("feature row 7")  # raised in the worker
        return item

    got = []
    with pytest.raises(KeyError, match="feature row 7") as caught:
        got.extend(prefetch(make, range(9), depth=2, threads=2))
    assert "raised in the worker" in str(caught.traceback[-1].statement)
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_prefetch_closes_cleanly_and_runs_ahead_no_further_than_depth():
    started = []

    def make(item, slot):
        started.append(item)
        return item

    stream = prefetch(make, iter(range(10**9)), depth=4, threads=2)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    stream.close()
    assert len(started) <= 3 + 4
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_ring_grows_and_keeps_its_buffers():
    table = torch.randn(1000, 4)
    ring = FeatureRing(table, torch.zeros(1000, dtype=torch.int64), slots=1)
    block = lambda n: [Block(torch.zeros(1), torch.zeros(0), torch.arange(n))]  # noqa: E731
    sizes, addresses = [10, 900, 700, 900, 5, 0], []
    for n in sizes:
        x = ring.fetch(0, block(n)).x
        assert torch.equal(x, table[:n])
        addresses.append(ring.buffers[0].data_ptr())
    assert len(set(addresses[1:])) == 1


# ---------------------------------------------------------------------------------------------------------------------
# features.py: the ring


class _SlowDevice:
    """A device that copies later: a thread for each stream, random delays. It notes what the ring must never do."""

    def __init__(self, rng, streams):
        self.delays, self.local, self.faults = rng.random(4096) * 4e-4, threading.local(), []
        self.under_way, self.count, self.lock = {}, 0, threading.Lock()
        self.queues = [queue.SimpleQueue() for _ in range(streams)]
        self.threads = [threading.Thread(target=self._run, args=(q,), daemon=True) for q in self.queues]
        for thread in self.threads:
            thread.start()

    def _run(self, jobs):
        while (job := jobs.get()) is not None:
            job()

    def close(self):
        for jobs, thread in zip(self.queues, self.threads):
            jobs.put(None)
            thread.join()

    @contextmanager
    def stream(self, slot, blocks=()):
        self.local.slot, self.local.jobs = slot, self.queues[slot % len(self.queues)]
        yield

    def buffer(self, shape, dtype):
        if self.under_way.get(self.local.slot):
            self.faults.append(f"slot {self.local.slot} was grown under a copy")
        return torch.full(shape, -1, dtype=dtype)

    def copy(self, tensor):
        with self.lock:
            self.count += 1
            delay, slot = self.delays[self.count % 4096], self.local.slot
            is_row = tensor.ndim == 2
            self.under_way[slot] = self.under_way.get(slot, 0) + is_row
        result = torch.empty_like(tensor)

        def later():
            time.sleep(delay)
            result.copy_(tensor)
            with self.lock:
                self.under_way[slot] -= is_row

        self.local.jobs.put(later)
        return result

    def event(self):
        done = threading.Event()
        done.synchronize = done.wait
        self.local.jobs.put(done.set)
        return done


class _InstantDevice(_SlowDevice):
    def copy(self, tensor):
        return tensor.clone()


class _Forgets(list):
    """A list of events that never has one."""

    def __getitem__(self, i):
        return None


def _seed_blocks(ids):
    return [Block(torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), ids)]


def _ring_faults(seed, broken=False):
    """Push random batches through a ring with a slow device -> list of what went wrong."""
    rng = np.random.default_rng(seed)
    depth, threads, streams = (int(n) for n in (rng.integers(0, 6), rng.integers(1, 5), rng.integers(1, 4)))
    table = torch.arange(200.0).repeat_interleave(3).view(200, 3)
    device = _SlowDevice(rng, streams)
    ring = FeatureRing(table, torch.arange(200), slots=depth + 1, streams=streams, copies=device, log=lambda line: None)
    if broken:
        ring.copied = _Forgets(ring.copied)
    sizes = rng.integers(1, 40, 14) * rng.choice([1, 1, 1, 4], 14)  # some outgrow the buffers
    items = [torch.from_numpy(rng.integers(0, 200, n)) for n in sizes]
    got = []
    for batch in prefetch(lambda ids, slot: ring.fetch(slot, _seed_blocks(ids)), items, depth=depth, threads=threads):
        got.append(batch)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 4e-4)
    for batch in got:
        batch.ready.synchronize()
    device.close()
    same = lambda batch, ids: torch.equal(batch.x, table[ids]) and torch.equal(batch.y, ids[:1])  # noqa: E731
    wrong = [i for i, (batch, ids) in enumerate(zip(got, items, strict=True)) if not same(batch, ids)]
    return device.faults + [f"batch {i} of depth {depth}, threads {threads}, streams {streams}" for i in wrong]


def _edge_faults(seed, slow, broken=False):
    """Push blocks of random edges through a ring that has features of edges -> whether a batch came out wrong."""
    rng = np.random.default_rng(seed)
    depth, threads = int(rng.integers(0, 4)), int(rng.integers(1, 4))
    table, device = torch.arange(900.0).view(300, 3), slow and _SlowDevice(rng, 2)
    ring = FeatureRing(torch.zeros(50, 2), torch.arange(50), slots=depth + 1, copies=device, edge_features=table,
                       reuse=bool(slow))
    if broken:
        ring.copied, ring.edge_ring.copied = _Forgets(ring.copied), _Forgets(ring.edge_ring.copied)
    items = [[torch.from_numpy(rng.integers(0, 300, n * rng.choice([1, 8]))) for n in rng.integers(0, 30, 2)]
             for _ in range(14)]

    def load(item, slot):
        blocks = [Block(torch.tensor([0, len(ids)]), torch.zeros_like(ids), torch.arange(1), ids) for ids in item]
        return ring.fetch(slot, blocks)

    batches = list(prefetch(load, items, depth=depth, threads=threads))
    if slow:
        batches[-1].ready.wait()
        device.close()
    return any(not torch.equal(rows, table[ids]) for batch, item in zip(batches, items)
               for rows, ids in zip(batch.edges, item, strict=True))


@pytest.mark.parametrize("slow", [False, True])
def test_features_ring_brings_the_rows_of_each_blocks_edges(slow):
    assert not any(_edge_faults(seed, slow) for seed in range(12))
    assert not slow or any(_edge_faults(seed, slow, broken=True) for seed in range(40))


def test_features_no_slot_is_refilled_before_its_copy_is_done():
    assert [fault for seed in range(300) for fault in _ring_faults(seed)] == []


def test_features_a_ring_that_ignores_its_events_is_caught():
    caught = [_ring_faults(seed, broken=True) for seed in range(40)]
    assert sum(map(bool, caught)) > 20
    assert any("grown" in fault for faults in caught for fault in faults)


def test_features_ring_grows_by_powers_of_two_and_says_so():
    table, lines = torch.randn(1000, 16), []  # rows of 64 bytes
    ring = FeatureRing(table, torch.zeros(1000, dtype=torch.int64), slots=2, log=lines.append)
    for n in (0, 8, 300, 10, 512, 513, 600, 1000, 1):
        for slot in (0, 1):
            assert torch.equal(ring.fetch(slot, _seed_blocks(torch.arange(n))).x, table[:n])
    rows = [8, 512, 1024]
    assert [buffer.shape[0] for buffer in ring.buffers] == [1024, 1024]
    assert len(lines) == 3
    assert all(f"{r:,} rows" in line and f"{64 * r:,} bytes" in line for r, line in zip(rows, lines))


@pytest.mark.parametrize("device", [None, _InstantDevice])
def test_features_ring_aggregates_the_first_hop(device):
    indptr, indices, train = _skewed(200)
    table, labels = torch.randn(200, 3), torch.arange(200)

    def aggregate(indptr, indices, features, nodes, out):
        sums = torch.zeros(len(nodes), 3).index_add_(0, torch.arange(len(nodes)).repeat_interleave(indptr.diff()),
                                                     features[indices.long()])  # fmt: skip
        return out.copy_(torch.cat([features[nodes.long()], sums], 1))

    copies = device and device(np.random.default_rng(0), 1)
    ring = FeatureRing(table, labels, slots=1, aggregate=aggregate, dtype=torch.float64, copies=copies)
    assert ring.first_hop and not FeatureRing(_Rows(table), labels, slots=1, aggregate=aggregate).first_hop
    blocks = [NeighborSampler(indptr, indices, [3, 2],
                              backend="torch").sample(train[:9] % 200, 5, relabel_outer=relabel)
              for relabel in (False, True)]  # fmt: skip
    batch, (plain, _) = ring.fetch(0, blocks[0]), blocks[1]
    dst = torch.arange(plain.num_dst).repeat_interleave(plain.indptr.diff())
    sums = torch.zeros(plain.num_dst, 3).index_add_(0, dst, table[plain.src_nodes.long()][plain.indices.long()])
    expected = torch.cat([table[plain.src_nodes[: plain.num_dst].long()], sums], 1)
    assert batch.x.dtype == torch.float64 and torch.allclose(batch.x, expected.double())
    assert torch.equal(batch.y, train[:9] % 200)
    if not copies:  # without a buffer, as on a GPU that reads the features in place: in its own type from the start
        kept = FeatureRing(table, labels, slots=1, aggregate=aggregate, dtype=torch.float64,
                           reuse=False).fetch(0, blocks[0])
        assert torch.equal(kept.x, batch.x)
    if copies:
        copies.close()


# ---------------------------------------------------------------------------------------------------------------------
# features.py: placement and shared memory


class _Rows:
    """Features behind a gather, as a store's are."""

    def __init__(self, tensor):
        self.rows, self.shape, self.dtype, self.asked = tensor, tensor.shape, tensor.dtype, []

    def gather(self, ids, out=None):
        self.asked += ids.tolist()
        return torch.index_select(self.rows, 0, ids, out=out)


def _arrays(dtype=torch.float32):
    indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0], dtype=torch.int32)
    return [indptr, indices, torch.tensor([0, 1, 1]), torch.randn(3, 5).to(dtype)]


def test_features_place_keeps_or_copies(monkeypatch):
    arrays = _arrays()
    for mode in ("cpu-cpu", "cpu-cuda"):
        assert all(a is b for a, b in zip(place(*arrays, mode, "cpu"), arrays))
    monkeypatch.setattr(features, "CHUNK_BYTES", 40)  # two rows at a time
    for source in (arrays[3], _Rows(arrays[3])):
        placed = place(*arrays[:3], source, "cuda-cuda", "cpu")  # any device will do to see that it copies
        for a, b in zip(placed, arrays):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.data_ptr() != b.data_ptr()
    with pytest.raises(ValueError, match="mode 'gpu' is unknown: choose one of cuda-cuda, pinned-cuda, cpu-cuda"):
        place(*arrays, "gpu")


def test_features_share_alone_keeps_values_and_types():
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        arrays = [*_arrays(dtype), torch.zeros(0, 4), _Rows(torch.randn(70, 9))]
        shared = share(arrays)
        for a, b in zip(shared, [*arrays[:-1], arrays[-1].rows]):
            assert torch.equal(a, b) and a.dtype == b.dtype
            assert not a.numel() or a.data_ptr() % mmap.PAGESIZE == 0  # a page has one owner


class _Cudart:
    """Records calls in the place of torch.cuda.cudart(); refuses the piece number `refuse`."""

    cudaError = int

    def __init__(self, refuse=None):
        self.refuse, self.pieces, self.undone = refuse, [], []

    def cudaHostRegister(self, start, size, flags):
        assert flags == 2 and start % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        if len(self.pieces) == self.refuse:
            return 712
        self.pieces.append((start, size))
        return 0

    def cudaHostUnregister(self, start):
        self.undone.append(start)
        return 0

    def cudaGetErrorString(self, code):
        return f"text of {code}"


class _NoGuard:
    def __init__(self, device):
        pass

    __enter__ = __exit__ = lambda self, *exc: None


@pytest.mark.parametrize("spare, near", [(0, []), (87, []), (88, ["indptr"]), (208, ["indptr", "indices"])])
def test_features_pinned_graphs_move_to_the_gpu_that_has_room(spare, near, monkeypatch):
    arrays = {"indptr": torch.arange(11), "indices": torch.arange(30).int(), "labels": torch.arange(10),
              "features": torch.ones(10, 3)}
    viewed = []
    monkeypatch.setattr(features, "gpu_view", lambda array, device: viewed.append(array) or array)
    placed = place(*arrays.values(), "pinned-cuda", "cpu", spare=spare)
    assert all(map(torch.equal, placed, arrays.values()))
    assert [name for name, array in arrays.items() if not any(array is view for view in viewed)] == near


def test_features_registered_pieces_cover_memory_and_never_overlap():
    page = mmap.PAGESIZE
    for nbytes in (1, page - 1, page, page + 1, 5 * page, 12 * page + 7):
        for piece in (page, 3 * page, 100 * page):
            pieces = features.page_pieces(64 * page, nbytes, piece)
            ends = [start + size for start, size in pieces]
            assert [start for start, _ in pieces] == [64 * page, *ends[:-1]]
            assert 0 <= ends[-1] - 64 * page - nbytes < page and all(0 < size <= piece for _, size in pieces)
    with pytest.raises(ValueError, match=r"does not start on a page: copy it with share\(\) first"):
        features.page_pieces(64 * page + 8, 100)


def test_features_gpu_view_registers_and_checks_every_code(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", _NoGuard)
    monkeypatch.setattr(features, "page_pieces", lambda p, n, cut=features.page_pieces: cut(p, n, mmap.PAGESIZE))
    rows, wide = share([torch.zeros(50, 30), torch.randn(6, 7).bfloat16()])
    host, interface = features._host_array(wide).host, features._host_array(wide).__cuda_array_interface__
    assert host is wide and interface["shape"] == (6, 7) and interface["typestr"] == "<i2"
    assert interface["data"] == (wide.data_ptr(), False) and interface.get("strides") is None
    good = _Cudart()
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.host)
    assert features.gpu_view(rows, "cpu", good) is not None and len(good.pieces) == 2 and not good.undone
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: array.host.clone())  # a GPU without UVA
    with pytest.raises(RuntimeError, match="does not address host memory in place"):
        features.gpu_view(rows, "cpu", _Cudart())
    bad = _Cudart(refuse=1)
    with pytest.raises(RuntimeError, match=r"cudaHostRegister of 4,096 bytes at 0x\w+ .* 712 \(text of 712\)"):
        features.gpu_view(rows, "cpu", bad)
    assert bad.undone == [rows.data_ptr()]


def _total(rank, table, barrier):
    """An all-reduce of up to two numbers."""

    def total(*values):
        table[2 * rank : 2 * rank + len(values)] = values
        barrier.wait(60)
        sums = [sum(table[i::2]) for i in range(len(values))]
        barrier.wait(60)
        return sums

    return total


def _status(name, file):
    return next(int(line.split()[1]) * 1024 for line in Path(file).read_text().splitlines() if line.startswith(name))


def _shares(rank, table, barrier, results):
    values = torch.arange(16 << 20, dtype=torch.int32).view(-1, 4) if rank == 0 else torch.empty(4 << 20, 4).int()
    shared, more = share([values, torch.ones(3)], leads=rank == 0, total=_total(rank, table, barrier))
    del values
    checksum = int(shared.sum(dtype=torch.int64)) + int(more.sum())  # reads every page
    barrier.wait(60)
    results.put((checksum, _status("Pss_Shmem:", "/proc/self/smaps_rollup")))
    time.sleep(600)


def test_features_processes_share_one_copy_and_a_kill_leaves_nothing():
    before, files = _status("Shmem:", "/proc/meminfo"), set(os.listdir("/dev/shm"))
    context = multiprocessing.get_context("spawn")
    table, barrier, results = context.Array("d", 6, lock=False), context.Barrier(3), context.Queue()
    processes = [context.Process(target=_shares, args=(i, table, barrier, results), daemon=True) for i in range(3)]
    for process in processes:
        process.start()
    try:
        checksums, pss = zip(*(results.get(timeout=90) for _ in processes))
        assert set(checksums) == {sum(range(16 << 20)) + 3}
        assert 64 << 20 <= sum(pss) < 66 << 20  # three mappings of one copy of 64 MiB
    finally:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
    deadline = time.monotonic() + 10
    while _status("Shmem:", "/proc/meminfo") - before > 32 << 20 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _status("Shmem:", "/proc/meminfo") - before < 32 << 20
    mine = [f for f in set(os.listdir("/dev/shm")) - files if not f.startswith("sem.")]  # barrier: named, not ours
    assert mine == []


# ---------------------------------------------------------------------------------------------------------------------
# features.py: the cache


def _skewed(num_nodes=2000, degree=12, seed=0):
    """A graph whose sources are drawn by rank^-0.8, with a tenth of its nodes for training."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 2 * degree, num_nodes)
    indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]))
    weight = np.arange(1, num_nodes + 1) ** -0.8
    indices = rng.permutation(num_nodes)[rng.choice(num_nodes, int(indptr[-1]), p=weight / weight.sum())]
    return indptr, torch.from_numpy(indices.astype(np.int32)), torch.from_numpy(rng.permutation(num_nodes)[:200])


def _sampled(indptr, indices, train, fanouts, batch_size, batches):
    """The input nodes of batches, sampled."""
    generator, s = torch.Generator().manual_seed(1), NeighborSampler(indptr, indices, fanouts, backend="torch")
    for step in range(batches):
        seeds = train[torch.randperm(len(train), generator=generator)[:batch_size]]
        yield s.sample(seeds, step)[0].src_nodes


@pytest.mark.parametrize("fanouts", [[4, 3], [2, 2, 2], [-1, 2]])
def test_features_expected_visits_are_what_sampling_counts(fanouts, monkeypatch):
    indptr, indices, train = _skewed()
    monkeypatch.setattr(features, "CHUNK_EDGES", 1000)
    visits, counts, batches = expected_visits(indptr, indices, train, fanouts, 20), torch.zeros(2000), 600
    for ids in _sampled(indptr, indices, train, fanouts, 20, batches):
        counts[ids.long()] += 1
    seen = counts / batches
    assert abs(visits.sum() / seen.sum() - 1) < 0.03
    noise = (visits * (1 - visits) / batches).sqrt() + 1 / batches
    assert ((visits - seen).abs() / noise).mean() < 1.5, ((visits - seen).abs() / noise).mean()
    monkeypatch.setattr(features, "CHUNK_EDGES", 1 << 22)
    assert torch.allclose(visits, expected_visits(indptr, indices, train, fanouts, 20), atol=1e-6)


def test_features_expected_visits_by_hand():
    # 0 <- 1, 2 (degree 2) and 1 <- 2 (degree 1); every batch is node 0, and takes one neighbour a hop
    indptr, indices = torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 2])
    visits = expected_visits(indptr, indices, torch.tensor([0]), [1], 1)
    assert visits.tolist() == [1, 0.5, 0.5]
    # second hop: 0 draws again (3/4 that a given neighbour was taken in two draws), 1 takes 2 if it was there
    visits = expected_visits(indptr, indices, torch.tensor([0]), [1, 1], 1)
    assert torch.allclose(visits, torch.tensor([1, 0.75, 1 - 0.25 * 0.5]))


def test_features_cache_gives_the_same_rows_for_any_budget(monkeypatch):
    monkeypatch.setattr(features, "CHUNK_BYTES", 1000)  # several pieces
    indptr, indices, train = _skewed(300)
    table = torch.randn(300, 7)
    visits, ids = expected_visits(indptr, indices, train % 300, [3, 2]), torch.randint(300, (500,), dtype=torch.int32)
    for budget in (0, 27, 28, 2800, 10**6):
        behind = _Rows(table)
        for source in (table, behind):
            cached = CachedFeatures(source, visits, budget)
            behind.asked.clear()
            out = torch.empty(500, 7)
            assert cached.gather(ids, out=out) is out and torch.equal(out, table[ids.long()])
            assert torch.equal(cached.gather(ids[:0]), table[:0]) and cached.shape == (300, 7)
        rows = min(300, budget // 28)
        hot = set(visits.topk(rows).indices.tolist())
        missed = [i for i in ids.tolist() if i not in hot]
        assert behind.asked == missed  # the misses alone
        assert cached.cache.shape[0] == rows and cached.hit_rate == pytest.approx(1 - len(missed) / 500)
        for device in (None, _InstantDevice(np.random.default_rng(0), 2)):  # on the host; before the host, on a device
            ring = FeatureRing(CachedFeatures(behind, visits, budget), torch.arange(300), slots=2, copies=device)
            for slot in (0, 1, 0):
                assert torch.equal(ring.fetch(slot, _seed_blocks(ids[slot:])).x, table[ids[slot:].long()])
            if device:
                assert all(b.shape[0] <= 2 * len(missed) for b in ring.buffers)  # the slots hold misses alone
                device.close()


def test_features_cache_counts_hits_from_many_threads():
    table = torch.randn(100, 2)
    cached = CachedFeatures(table, torch.arange(100.0), 50 * 8)
    list(prefetch(lambda ids, slot: cached.gather(ids), [torch.arange(100)] * 400, depth=8, threads=8))
    assert (cached.hits, cached.lookups) == (400 * 50, 400 * 100)


def test_features_cache_by_visits_hits_more_than_by_chance_or_degree():
    indptr, indices, train = _skewed(seed=3)
    table = torch.zeros(2000, 1)
    fanouts, budget = [4, 3], 4 * 200  # a tenth of the rows
    scores = {"visits": expected_visits(indptr, indices, train, fanouts, 20), "in-degree": indptr.diff(),
              "out-degree": torch.bincount(indices, minlength=2000), "chance": torch.rand(2000)}  # fmt: skip
    caches = {name: CachedFeatures(table, score, budget) for name, score in scores.items()}
    for ids in _sampled(indptr, indices, train, fanouts, 20, 100):
        for cached in caches.values():
            cached.gather(ids)
    rates = {name: cached.hit_rate for name, cached in caches.items()}
    assert rates["visits"] > 0.3 > 2 * rates["chance"]
    assert rates["visits"] > max(rates["in-degree"], rates["out-degree"]) - 0.005, rates


# ---------------------------------------------------------------------------------------------------------------------
# row_reader.py


def _table(tmp_path, rows, row_bytes, offset=4096, seed=0):
    """A file with a table of random bytes behind `offset` others -> (path, uint8 [rows, row_bytes])."""
    table = np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)
    path = tmp_path / "table"
    path.write_bytes(bytes(offset) + table.tobytes())
    return path, torch.from_numpy(table)


def _opened(path, table, offset=4096, **options):
    reader = row_reader.open_rows(path, offset, table.shape[1], len(table), **options)
    return reader or pytest.skip("no C code: a Linux with a C compiler is needed")


ENGINES = [dict(engine=engine, direct=direct) for engine in ("io_uring", "threads") for direct in (True, False)]


@pytest.mark.parametrize("options", ENGINES, ids=lambda o: f"{o['engine']} {'direct' if o['direct'] else 'cached'}")
@pytest.mark.parametrize("row_bytes, offset",
                         [(1, 128), (400, 128), (512, 4096), (1000, 4096), (4096, 128), (70_000, 4096)])
def test_rows_are_read_from_the_disk_as_they_lie_there(row_bytes, offset, options, tmp_path):
    path, table = _table(tmp_path, max(40, 500_000 // row_bytes), row_bytes, offset)
    reader, rng = _opened(path, table, offset, **options, depth=5), np.random.default_rng(1)
    for ids in (rng.integers(0, len(table), 700), np.arange(len(table))[::-1][:300], [0, len(table) - 1, 0], []):
        ids = torch.as_tensor(np.array(ids, np.int64))
        out = torch.zeros(len(ids), row_bytes, dtype=torch.uint8)
        assert reader.read(ids, out) is out and torch.equal(out, table[ids])
        places = torch.from_numpy(rng.permutation(2 * len(ids))[: len(ids)])
        out = torch.zeros(2 * len(ids), row_bytes, dtype=torch.uint8)
        assert torch.equal(reader.read(ids.int(), out, places)[places], table[ids])
        assert out.any(1).sum() <= len(ids)  # and no other row was touched
    for bad in (-1, len(table)):
        with pytest.raises(IndexError, match=f"node {bad} is out of range"):
            reader.read(torch.tensor([0, bad]), torch.zeros(2, row_bytes, dtype=torch.uint8))


def test_neighbouring_rows_are_one_request_and_bytes_are_counted(tmp_path):
    path, table = _table(tmp_path, 1000, 1024)
    reader = _opened(path, table)
    if not reader.direct:
        pytest.skip("this file system has no direct reads")
    ids = torch.randperm(1000)[:150]
    reader.read(ids, torch.empty(150, 1024, dtype=torch.uint8))
    rows, gaps = ids.sort().values, ids.sort().values.diff() - 1
    assert 0 < int((gaps > 4).sum()) < 149 and reader.bytes_read == 1024 * _rows_read(rows.tolist())
    before = reader.bytes_read
    reader.read(torch.tensor([7, 8, 9, 8, 500, 9]), torch.empty(6, 1024, dtype=torch.uint8))
    assert reader.bytes_read - before == 4 * 1024  # whole blocks, each once


def _rows_read(rows, gap=4, most=64):
    """Rows of 1 KiB that are read for these, ascending: requests of at most 64 KiB, with gaps of at most 4 KiB."""
    total, start, end = 0, rows[0], rows[0]
    for row in rows:
        if row - end > gap or row + 1 - start > most:
            total, start = total + end - start, row
        end = row + 1
    return total + end - start


def test_many_threads_and_forked_processes_read_with_one_reader(tmp_path):
    path, table = _table(tmp_path, 3000, 600)
    reader, failed = _opened(path, table, depth=8), []

    def read(seed, times=20):
        rng = np.random.default_rng(seed)
        for _ in range(times):
            ids = torch.from_numpy(rng.integers(0, 3000, 100))
            if not torch.equal(reader.read(ids, torch.empty(100, 600, dtype=torch.uint8)), table[ids]):
                failed.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    [thread.start() for thread in threads]
    assert [_in_child(lambda: (read(9), sys.exit(bool(failed)) if failed else None)) for _ in range(3)] == [0] * 3
    [thread.join() for thread in threads]
    assert not failed


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_file_that_was_cut_short_is_one_sentence_and_the_reader_works_on(engine, tmp_path):
    path, table = _table(tmp_path, 1000, 1000)
    reader, whole = _opened(path, table, engine=engine), path.read_bytes()
    out = torch.empty(100, 1000, dtype=torch.uint8)
    for length in (4096 + 900_500, 4096 + 500, 0):
        os.truncate(path, length)
        with pytest.raises(StoreError, match="table ends at byte [0-9,]+ in the middle of its rows"):
            reader.read(torch.arange(901, 1000), out)
    assert torch.equal(reader.read(torch.arange(0), out[:0]), out[:0])
    path.write_bytes(whole)
    ids = torch.randint(1000, (100,))
    assert torch.equal(reader.read(ids, out), table[ids])


@pytest.mark.parametrize("engine, direct", [("io_uring", True), ("threads", True), ("threads", False)])
def test_short_and_interrupted_reads_go_on_and_errors_are_one_sentence(engine, direct, tmp_path, monkeypatch):
    """The C code with a device that answers in parts, is interrupted and, for the last rows, broken."""
    path, table = _table(tmp_path, 1000, 3000)
    flaky = """static i64 flaky(call_t *call, slot_t *slot, i64 result) {
      static atomic_int count;
      int turn = atomic_fetch_add(&count, 1) % 5;
      if (slot->request->offset > 4096 + 950 * 3000) return -EIO;
      return turn == 1 ? -EINTR : turn == 2 ? -EAGAIN : turn == 3 && result > 1024 ? result / 2 : result;
    }
    static request_t *take_request"""
    text = row_reader.SOURCE.replace("static request_t *take_request", flaky, 1)
    for arguments in ("call, slot, result", "call, &reader->slots[number], result->res"):
        assert text.count(f"read_on({arguments})") == 1
        flaky_result = arguments.rpartition(", ")[2]
        slot = arguments.split(", ")[1]
        text = text.replace(f"read_on({arguments})", f"read_on(call, {slot}, flaky(call, {slot}, {flaky_result}))")
    monkeypatch.setattr(row_reader, "SOURCE", text)
    row_reader._library.cache_clear()
    try:
        reader = _opened(path, table, engine=engine, direct=direct)
        ids, out = torch.randint(900, (2000,)), torch.empty(2000, 3000, dtype=torch.uint8)
        assert torch.equal(reader.read(ids, out), table[ids])
        for _ in range(3):
            with pytest.raises(StoreError, match=r"table cannot be read at byte [0-9,]+: Input/output error"):
                reader.read(torch.randint(1000, (2000,)), out)
            assert torch.equal(reader.read(ids, out), table[ids])
    finally:
        monkeypatch.undo()  # first: a reader that is closed asks for the library again
        row_reader._library.cache_clear()


@pytest.mark.parametrize("slow", ["io_uring", "threads"])
def test_the_faster_engine_reads_and_each_is_tried_anew(slow, tmp_path, monkeypatch):
    path, table = _table(tmp_path, 2000, 64)
    reader, used, now = _opened(path, table), [], [0.0]
    if reader.engine != "io_uring":
        pytest.skip("no io_uring here")
    choose = reader._engine

    def chosen(n):
        used.append(choose(n))
        return used[-1]

    def clock():  # a read by the slow engine takes 2 seconds, one by the other 1
        now[0] += 2 if used and used[-1] == slow else 1
        return now[0]

    monkeypatch.setattr(reader, "_engine", chosen)
    monkeypatch.setattr(row_reader, "time", types.SimpleNamespace(perf_counter=clock))
    ids = torch.randint(2000, (row_reader.LARGE,))
    for _ in range(2 * row_reader.TRY):
        assert torch.equal(reader.read(ids, torch.empty(len(ids), 64, dtype=torch.uint8)), table[ids])
    assert used.count(slow) == 2 and reader.engine != slow
    assert choose(10) == "io_uring"  # few rows


FORBIDDEN = """
import ctypes, struct, sys
import torch
import row_reader
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7fff0000)]  # io_uring_setup: EPERM
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(code), ctypes.addressof(filter))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
reader = row_reader.open_rows(sys.argv[1], 4096, 1000, 500)
print(reader.engine, reader.read(torch.arange(500), torch.empty(500, 1000, dtype=torch.uint8)).sum().item())
"""


def test_where_io_uring_is_forbidden_threads_read(tmp_path):
    path, table = _table(tmp_path, 500, 1000)
    _opened(path, table)
    done = subprocess.run([sys.executable, "-c", FORBIDDEN, path], cwd=HERE, capture_output=True, text=True)
    if "AssertionError" in done.stderr:
        pytest.skip("no seccomp here")
    assert done.stdout.split() == ["threads", str(table.sum().item())], done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# lookahead.py, belady.py


def _fewest_reads(trace, places):
    """Misses that no cache of so many places can avoid, by trying every set of rows to keep after every batch."""
    states = {frozenset(): 0}
    for batch in trace:
        found = {}
        for kept, misses in states.items():
            misses += len(batch - kept)
            there = kept | batch
            for rows in itertools.combinations(sorted(there), min(places, len(there))):
                state = frozenset(rows)
                found[state] = min(misses, found.get(state, misses))
        states = found
    return min(states.values())


class _Cache:
    """Carries out what a Planner decides, with ids for rows."""

    def __init__(self, num_rows, places, window, level=None):
        if lookahead.library() is None:
            pytest.skip("no C compiler")
        self.planner, self.held, self.misses = lookahead.Planner(num_rows, places, window, level), [-1] * places, 0
        self.there = set()  # rows that were read and not given up: what the cache holds, unless plans are given up

    def plan(self, carry_out=True):
        ids, source, keep = self.planner.plan()
        if carry_out and self.there is not None:
            assert all((place >= 0) == (node in self.there) for node, place in zip(ids.tolist(), source.tolist()))
            self.there = (self.there | set(ids.tolist())) - set(self.planner.given_up().tolist())
            assert len(self.there) <= len(self.held)
        if carry_out:
            for node, place in zip(ids.tolist(), source.tolist()):
                assert place == -1 or self.held[place] == node
                self.misses += place == -1
            for node, place in zip(ids.tolist(), keep.tolist()):
                if place >= 0:
                    self.held[place] = node
        kept = {(node, place) for node, place in zip(ids.tolist(), keep.tolist()) if place >= 0}
        assert len(kept) == len({node for node, _ in kept}) == len({place for _, place in kept})
        return keep

    def run(self, trace, window):
        waiting = 0
        for batch in trace:
            self.planner.expect(torch.tensor(sorted(batch), dtype=torch.int64))
            waiting += 1
            if waiting > window:
                self.plan()
                waiting -= 1
        for _ in range(waiting):
            self.plan()


def test_what_is_kept_is_what_reads_least():
    rng = np.random.default_rng(0)
    for _ in range(150):
        trace = [set(rng.permutation(7)[: rng.integers(5)].tolist()) for _ in range(rng.integers(9))]
        places, window = rng.integers(5), rng.integers(10)
        fewest = _fewest_reads(trace, places)
        cache = _Cache(7, places, window)
        cache.run(trace, window)
        asked = sum(map(len, trace))
        assert asked - cache.planner.min_hits == fewest, trace  # whatever the window: MIN is counted with all batches
        assert cache.misses == fewest if window >= len(trace) else cache.misses >= fewest, trace


def test_what_min_reads_is_counted_exactly_on_long_traces():
    """Beside a plain MIN: after each batch the rows whose next use is nearest stay."""
    rng, V = np.random.default_rng(0), 300
    trace = [set((V * rng.random(rng.integers(1, 40)) ** 2).astype(int).tolist()) for _ in range(400)]
    for places in (0, 1, 30, 150, 300):
        kept, misses = set(), 0
        for t, batch in enumerate(trace):
            misses += len(batch - kept)
            next_use = {row: next((u for u in range(t + 1, 400) if row in trace[u]), 1000) for row in kept | batch}
            kept = set(sorted(next_use, key=next_use.get)[:places])
        reads = []
        for window in (0, 3, 50, 400):
            cache = _Cache(V, places, window)
            cache.run(trace, window)
            assert sum(map(len, trace)) - cache.planner.min_hits == misses, places
            reads.append(cache.misses)
        assert reads[-1] == misses and reads == sorted(reads, reverse=True), reads


def test_rows_that_come_twice_in_a_batch_are_kept_once():
    rng = np.random.default_rng(0)
    for places, window in ((0, 2), (5, 0), (12, 4), (12, 30), (25, 30)):
        once = [set(rng.integers(0, 25, 8).tolist()) for _ in range(60)]
        twice = [[*batch, *rng.choice(sorted(batch), 3)] for batch in once]
        expected, cache = _Cache(25, places, window), _Cache(25, places, window)
        expected.run(once, window), cache.run(twice, window)
        assert cache.planner.min_hits == expected.planner.min_hits + 3 * len(once)
        assert cache.misses <= expected.misses + 3 * len(once)
        assert places > 0 or cache.misses == expected.misses + 3 * len(once)


def test_without_a_window_the_hottest_rows_stay():
    level = torch.arange(20, dtype=torch.uint8)
    cache = _Cache(20, 5, 0, level)
    for _ in range(3):
        cache.run([set(range(a, 20, 3)) for a in (2, 1, 0)], 0)
    assert sorted(cache.held) == [15, 16, 17, 18, 19]


def test_what_was_given_up_is_not_in_the_cache():
    """Batches are expected, planned and carried out, or all given up, in any order: a hit is never another row."""
    rng, cache = np.random.default_rng(0), _Cache(10, 4, 6)
    cache.there = None
    for _ in range(3000):
        batch, what = torch.from_numpy(np.sort(rng.permutation(10)[: rng.integers(6)])), rng.integers(9)
        if what < 5 and len(cache.planner.expected) < 6:
            cache.planner.expect(batch)
        elif what < 8 and cache.planner.expected:
            cache.plan()
        elif what == 8:
            given_up = [cache.plan(carry_out=False) for _ in range(min(rng.integers(4), len(cache.planner.expected)))]
            for keep in given_up:
                cache.planner.release(keep)
            cache.planner.forget()
    assert 100 < cache.misses < 4000


def _large(tmp_path, monkeypatch, width=24, num_nodes=600):
    """A store whose features stay on disk -> GraphStore; `.x` is what they are."""
    x = torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(0))
    path = build_store(tmp_path / "g", **dict(_graph(num_nodes, 12 * num_nodes), features=x))
    monkeypatch.setattr(store, "free_host_bytes", lambda: 1000)
    graph = GraphStore.open(path)
    graph.x = x
    if graph.features.reader() is None or lookahead.library() is None:
        pytest.skip("no C compiler, or no Linux")
    return graph


def _advice(tensor):
    """The kernel's flags of the memory map that a tensor lies in: "rr" where it does not read ahead."""
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if ends := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(ends[1], 16) <= tensor.data_ptr() < int(ends[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    return flags.split()


def test_a_graph_on_disk_is_sampled_by_many_threads_to_the_same_blocks(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    assert "rr" in _advice(graph.sampled_indices) and "rr" not in _advice(graph.indices)
    assert graph.sampling_threads == store.SAMPLERS
    drawn = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=50)
    assert drawn.sampler.indices.data_ptr() == graph.sampled_indices.data_ptr()
    for batch in drawn:
        alone = NeighborSampler(graph.indptr.clone(), graph.indices.clone(), [3, 3])
        for block, other in zip(batch.blocks, alone.sample(batch.seeds, batch.global_step), strict=True):
            assert all(torch.equal(*pair) for pair in zip(block[:3], other[:3], strict=True))
    monkeypatch.undo()
    graph = GraphStore.open(graph.path)
    assert graph.sampling_threads is None and graph.sampled_indices is graph.indices


def test_rows_go_through_the_page_cache_where_it_can_keep_a_share_of_them(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    table, edges = graph.x.nbytes, graph.indptr.nbytes + graph.indices.nbytes
    if not graph.features.reader().direct:
        pytest.skip("this file system has no direct reads")
    for free, cache, direct in ((edges + table // 2, 0, False), (edges + table // 2 - 1, 0, True),
                                (edges + table // 2, 1, True), (edges + table, table // 2, False)):  # fmt: skip
        monkeypatch.setattr(store, "free_host_bytes", lambda free=free: free)
        features = GraphStore.open(graph.path).features
        features.beside += cache
        assert features.reader().direct is direct
    for free, share in ((8 * (edges + table), 8), (8 * (edges + table // 2) // 7 + 8, 8), (edges + table // 2, 2)):
        monkeypatch.setattr(store, "free_host_bytes", lambda free=free: free)
        assert GraphStore.open(graph.path).features.default_cache() == free // share


@pytest.mark.parametrize("budget, window", [(0, 3), (96 * 50, 0), (96 * 50, 1), (96 * 200, None), (10**6, 100)])
def test_batches_through_a_cache_that_looks_ahead_are_the_same(budget, window, tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    threads_before = threading.active_count()
    for depth, threads in ((0, 1), (2, 1), (3, 4)):
        cache = LookaheadCache(graph.features, budget, window)
        ring = FeatureRing(cache, graph.labels, slots=depth + 1)
        batches = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=4, ring=ring, depth=depth,
                                    threads=threads)
        asked = []
        for epoch in range(3):
            for i, batch in enumerate(batches):
                assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
                asked.append(batch.blocks[0].src_nodes)
                if epoch == 1 and i == 5:
                    break  # what was planned and not fetched is given up
        counts = cache.counts()
        assert counts["rows"] >= sum(map(len, asked)) and counts["hits"] <= counts["rows"]
        if budget == 0:
            assert counts["hits"] == 0 and counts["bytes_min"] == counts["rows"] * 96
        if budget == 10**6:
            assert counts["bytes_min"] <= counts["bytes_read"]
            assert len(torch.cat(asked).unique()) * 96 <= counts["bytes_read"]
        assert torch.equal(cache.gather(torch.tensor([5, 5, 0])), graph.x[[5, 5, 0]])  # beside the batches
    assert threading.active_count() == threads_before


@pytest.mark.parametrize("offset, row_bytes", [(4096, 1024), (128, 400), (4096, 4096), (192, 5000), (0, 1)])
def test_the_pages_of_rows(offset, row_bytes):
    if lookahead.library() is None:
        pytest.skip("no C compiler")
    ids = torch.randint(300, (50,))
    ends = [(offset + i * row_bytes, offset + (i + 1) * row_bytes - 1) for i in ids.tolist()]
    expected = [page for first, last in ends for page in range(first // 4096, last // 4096 + 1)]
    pages = torch.empty(len(expected), dtype=torch.int64)
    for out in (None, pages.data_ptr()):
        assert lookahead.library().la_pages(ids.data_ptr(), 50, offset, row_bytes, 4096, out) == len(expected)
    assert pages.tolist() == expected


def _resident(file):
    """Which pages of a file are in the page cache -> bool array; without mapping or touching one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as data, mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        found = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(memory, np.uint8)
        arguments = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(found.ctypes.data)
        assert libc.mincore(*arguments) == 0
        del view
    return (found & 1).astype(bool)


def _on_disk(tmp_path, monkeypatch, width, share=0.5):
    """A store whose features go through the page cache, with room for a share of them -> GraphStore, their file."""
    graph = _large(tmp_path, monkeypatch, width, num_nodes=6000)
    file = graph.path / "features.npy"
    beside = graph.indptr.nbytes + graph.indices.nbytes
    room = int(share * graph.x.nbytes / lookahead.ROOM) + 1
    monkeypatch.setattr(store, "KEPT", 0)
    monkeypatch.setattr(store, "free_host_bytes", lambda: beside + room)
    x, graph = graph.x, GraphStore.open(graph.path)
    graph.x = x
    with open(file, "rb") as data:  # the kernel may still be reading ahead of the header, in pieces that stay whole
        os.fsync(data.fileno())
        for _ in range(500):
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not _resident(file).any():
                return graph, file
            time.sleep(0.01)
    pytest.skip("this file system keeps all pages")


def _read_first(monkeypatch, file, pages):
    """Have so many pages of a file in the page cache before training starts, in the place of the thread that reads in
    order: a page that is given up while the disk is still at it stays."""
    monkeypatch.setattr(lookahead, "_read_in_order", lambda *words: None)
    with open(file, "rb") as data:
        os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in range(pages):
            os.pread(data.fileno(), 1, page * mmap.PAGESIZE)
    assert _resident(file)[:pages].all()


def _when_filled():
    """Wait until the thread that has a table read in order has asked for all of it."""
    for thread in threading.enumerate():
        if thread.name == "in order":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("width, budget", [(256, 0), (256, 1024 * 300), (100, 0), (1300, 5200 * 50)])
def test_the_page_cache_keeps_the_pages_that_are_planned(width, budget, tmp_path, monkeypatch):
    graph, file = _on_disk(tmp_path, monkeypatch, width)
    cache = LookaheadCache(graph.features, budget, 40)
    ring, places = FeatureRing(cache, graph.labels, slots=1), -(-cache.room // 4096)
    _read_first(monkeypatch, file, places)
    planned, drop = [], lookahead.KeptPages.drop
    monkeypatch.setattr(lookahead.KeptPages, "drop", lambda self, pages: (planned.append(pages), drop(self, pages)))
    batches = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=2, ring=ring, depth=0, threads=1)
    most = 0
    for batch in itertools.chain(batches, batches):
        assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
        most = max(most, int(_resident(file).sum()))
    in_flight = 6 * 2 * 16 * {256: 1, 100: 1.2, 1300: 3}[width]  # pages of the batches that are read ahead, at most
    assert places / 2 < most <= places + in_flight < len(_resident(file)) and sum(map(len, planned)) > 100
    assert cache.pages.planner.min_hits > 0


def test_epochs_that_are_left_early_leave_no_pages_behind(tmp_path, monkeypatch):
    graph, file = _on_disk(tmp_path, monkeypatch, 256)
    planned, dropped, plan, drop = [], [], lookahead.KeptPages.plan, lookahead.KeptPages.drop

    def plans(self):
        planned.append(plan(self))
        return planned[-1]

    monkeypatch.setattr(lookahead.KeptPages, "plan", plans)
    monkeypatch.setattr(lookahead.KeptPages, "drop", lambda self, pages: (dropped.append(pages), drop(self, pages)))
    cache = LookaheadCache(graph.features, 0, 40)
    ring = FeatureRing(cache, graph.labels, slots=3)
    for seed in range(12):
        batches = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=2, ring=ring, seed=seed)
        for batch in itertools.islice(batches, 6):
            assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
    given_up = torch.cat([pages for _, pages in planned]).tolist()
    assert sorted(given_up) == sorted(torch.cat([*dropped, *cache.given_up]).tolist()) and len(planned) > 12 * 6


def test_processes_of_a_machine_share_the_reading_and_leave_the_rest_to_the_kernel(tmp_path, monkeypatch):
    graph, file = _on_disk(tmp_path, monkeypatch, 256)
    for rank in (0, 1):
        cache = LookaheadCache(graph.features, 1024 * 300, None, share=(rank, 2))
        ring = FeatureRing(cache, graph.labels, slots=1)
        batches = loader.NodeLoader(graph, graph.split["train"][:20], [3, 3], batch_size=20, ring=ring, depth=0)
        for batch in batches:
            assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
        _when_filled()
        half, deadline = len(_resident(file)) // 2 // 2, time.monotonic() + 60
        while not _resident(file)[rank * half : (rank + 1) * half - 1].all():  # the kernel was asked to read them
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert cache.pages is None
        assert rank or _resident(file)[half : 2 * half].mean() < 0.5


def test_few_batches_do_not_pay_for_pages(tmp_path, monkeypatch):
    graph, file = _on_disk(tmp_path, monkeypatch, 256)
    for batches, kept in ((1, False), (1000, True)):
        cache = LookaheadCache(graph.features, 1024 * 300, batches=batches)
        ring = FeatureRing(cache, graph.labels, slots=1)
        next(iter(loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=20, ring=ring, depth=0)))
        assert (cache.pages is not None) is kept is bool(cache.room)


def test_counts_do_not_depend_on_threads(tmp_path, monkeypatch):
    graph, found = _large(tmp_path, monkeypatch), []
    for depth, threads in ((0, 1), (2, 1), (4, 3)):
        cache = LookaheadCache(graph.features, 96 * 100, 4, torch.rand(600, generator=torch.Generator().manual_seed(0)))
        ring = FeatureRing(cache, graph.labels, slots=depth + 1)
        batches = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=4, ring=ring, depth=depth,
                                    threads=threads)
        for _ in range(2):
            trace = [set(batch.blocks[0].src_nodes.tolist()) for batch in batches]
        found.append(cache.counts())
    assert found[0] == found[1] == found[2] and 0 < found[0]["hits"] < found[0]["rows"] and trace
    assert found[0]["bytes_min"] <= 96 * (found[0]["rows"] - found[0]["hits"]) <= found[0]["bytes_read"]


def test_a_failing_disk_leaves_the_cache_right(tmp_path, monkeypatch):
    graph = _large(tmp_path, monkeypatch)
    cache = LookaheadCache(graph.features, 96 * 300, 20)
    batches = loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=2,
                                ring=FeatureRing(cache, graph.labels, slots=3))
    read, turn = cache.reader.read, itertools.count()

    def fails(ids, out, places=None):
        if next(turn) % 7 == 5:
            raise StoreError("the disk fails")
        return read(ids, out, places)

    cache.reader.read, failures = fails, 0
    for _ in range(20):
        try:
            for batch in batches:
                assert torch.equal(batch.x, graph.x[batch.blocks[0].src_nodes.long()])
        except StoreError:
            failures += 1
    assert failures > 10 and cache.hits > 0


# ---------------------------------------------------------------------------------------------------------------------
# store.py: what fits where


def _plain_store(path):
    """V = 1000, M = 5000, F = 16, C = 4, with 100 training nodes."""
    rng = np.random.default_rng(0)
    split = {"train": np.arange(100), "valid": np.arange(100, 110)}
    return build_store(path, edge_index=rng.integers(0, 1000, (2, 5000)), split=split, labels=rng.integers(0, 4, 1000),
                       features=rng.standard_normal((1000, 16), np.float32), num_classes=4)  # fmt: skip


GIB = 1 << 30
ARRAYS = 8 * 1001 + 4 * 5000 + 8 * 1000 + 64 * 1000  # indptr, indices, labels, features


def test_store_estimate_adds_up(tmp_path):
    path = _plain_store(tmp_path / "g")
    found = estimate(path, 2, fanout=[3, 2], batch_size=10, hidden=8, prefetch=1, free_gpu=4 * GIB, free_host=8 * GIB)
    nodes, edges = [10, 40, 120], [30, 80]
    batch = 120 * 64 + 4 * (2 * sum(nodes) + sum(edges))
    compute = 8 * (40 * (16 + 3 * 8) + 10 * (8 + 3 * 4)) + 32 * (16 * 8 + 8 * 4)
    expected = {
        "cuda-cuda": {"gpu": GIB + ARRAYS + 4000, "gpu_step": 2 * batch + compute, "rank_step": 0, "shared": 0},
        "pinned-cuda": {"gpu": GIB + 4000, "gpu_step": 2 * batch + compute, "rank_step": 0, "shared": ARRAYS},
        "cpu-cuda": {"gpu": GIB, "gpu_step": 2 * batch + compute, "rank_step": 4 * batch, "shared": 0},
        "cpu-cpu": {"gpu": 0, "gpu_step": 0, "rank_step": 2 * batch + compute, "shared": 0},
    }
    for mode, figures in expected.items():
        assert found["modes"][mode].items() >= {**figures, "rank": GIB // 2, "fits": True}.items(), mode
        assert found["modes"][mode]["largest_batch"] == 100
    assert found["mode"] == "cuda-cuda" and found["backend"] == "mmap"
    # edges carry 8 + 4 * 3 bytes each, and those of a batch take their features along; nodes have times
    rng = np.random.default_rng(0)
    timed = build_store(tmp_path / "t", **_graph(1000, 5000, 16), edge_time=rng.integers(0, 9, 5000),
                        node_time=np.arange(1000),
                        edge_features=np.ones((5000, 3), np.float32))  # fmt: skip
    options = dict(fanout=[3, 2], batch_size=10, hidden=8, prefetch=1, free_gpu=4 * GIB, free_host=8 * GIB)
    assert estimate(timed, 2, **options)["modes"]["pinned-cuda"]["shared"] == ARRAYS + 5000 * 20 + 8000
    assert estimate(timed, 2, **options)["modes"]["cpu-cuda"]["rank_step"] == 4 * (batch + sum(edges) * (12 + 8))
    # no hop has more than all nodes and edges
    step = estimate(path, fanout=[-1, 900], batch_size=10, hidden=8, prefetch=0)["modes"]["cpu-cpu"]["rank_step"]
    assert step == 1000 * 64 + 4 * (2 * 2010 + 2 * 5000) + 8 * (1000 * 40 + 10 * 20) + 32 * (16 * 8 + 8 * 4)


def test_store_estimate_counts_what_sampling_and_training_take(tmp_path):
    graph = GraphStore.open(_plain_store(tmp_path / "g"))
    blocks = NeighborSampler(graph.indptr, graph.indices, [3, 2], backend="torch").sample(graph.split["train"][:10], 0)
    held = sum(t.numel() * t.element_size() for b in blocks for t in b[:3]) + blocks[0].num_src * 64
    step = estimate(graph, fanout=[3, 2], batch_size=10, hidden=8, prefetch=0)["modes"]["cpu-cpu"]["rank_step"]
    least = estimate(graph, fanout=[3, 2], batch_size=5, hidden=8, prefetch=0)["modes"]["cpu-cpu"]["rank_step"]
    assert held < step < 2 * least  # an upper bound that grows with the batch


def test_a_run_on_cpu_asks_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: 1 / 0)
    path = _plain_store(tmp_path / "g")
    assert choose_mode(path)[0] == choose_mode(path, mode="cpu-cpu")[0] == "cpu-cpu"


def test_store_estimate_counts_the_static_memory_of_step_graphs(tmp_path):
    """Where the GPU reads features: at least what the frames and input pairs of all slots take, and a step again."""
    graph = GraphStore.open(_plain_store(tmp_path / "g"))
    options = dict(fanout=[3, 2, 2], batch_size=10, hidden=8, prefetch=1)
    of = lambda graphs: estimate(graph, 1, graphs=graphs, free_gpu=4 * GIB, **options)["modes"]  # noqa: E731
    s, without = NeighborSampler(graph.indptr, graph.indices, options["fanout"], backend="torch"), of(0)
    for hops, width in ((2, 2 * 16), (3, 16)):
        counted, frame = of(hops), _emulated(s, tmp_path).frame(10, hops=hops)
        assert all(counted[mode] == without[mode] for mode in ("cpu-cuda", "cpu-cpu"))
        tensors = [frame.memory, frame.given, frame.input, frame.sizes, frame.keys, frame.read, *frame.kept.values()]
        rows = frame.shape[0]
        slot = sum(t.nbytes for t in tensors) + torch.empty(rows[-1], width).nbytes
        compute = sum(8 * n * (a + 3 * b) for n, a, b in zip(rows[2::-1], (16, 8, 8), (8, 8, 4)))
        for mode in ("cuda-cuda", "pinned-cuda"):
            tables, static = (counted[mode][name] - without[mode][name] for name in ("gpu", "gpu_step"))
            assert tables == 2 * frame.table.nbytes
            assert 2 * slot + compute <= static < 1.5 * (2 * slot + compute)
    options |= {"free_gpu": 4 * GIB, "free_host": 8 * GIB}
    lines, counted = plan.estimate_lines(tmp_path / "g", gpus=1, **options), estimate(graph, 1, graphs=2, **options)
    assert counted["sums"]["cuda-cuda"] in lines and "of static shapes" in lines
    wide = plan.estimate_lines(tmp_path / "g", gpus=1, **{**options, "fanout": [3, 49]})
    assert "of the shapes of their batches" in wide
    words = ["--gpus", "1", "--fanout", "3,2,2", "--batch-size", "10", "--hidden", "8", "--prefetch", "1"]
    for more, graphs in (("", 2), ("--model gcn", 3), ("--sampler labor", 0), ("--accumulate 2", 0)):
        asked = []
        with pytest.MonkeyPatch.context() as patch:
            args = train.parse_args([*words[2:], *more.split()])
            args.gpus, args.precision = 1, "tf32"
            patch.setattr(assemble, "choose_mode", lambda *_, **sizes: (asked.append(sizes["graphs"]), 1 / 0))
            with pytest.raises(ZeroDivisionError):
                assemble.open_data(ddp.Ranks(), args, tmp_path / "g")
        assert asked == [graphs]


def test_store_estimate_largest_batch_is_the_last_that_fits(tmp_path):
    path = _plain_store(tmp_path / "g")
    options = {"fanout": [3, 2], "hidden": 8, "free_host": GIB // 2 + 100_000}
    largest = estimate(path, batch_size=1, **options)["modes"]["cpu-cpu"]["largest_batch"]
    assert 1 < largest < 100
    for batch_size, fits in ((largest, True), (largest + 1, False)):
        assert estimate(path, batch_size=batch_size, **options)["modes"]["cpu-cpu"]["fits"] is fits
    half = estimate(path, procs=2, batch_size=1, **{**options, "free_host": GIB + 200_000})
    assert half["modes"]["cpu-cpu"]["largest_batch"] == largest  # each rank has its own


def test_store_estimate_chooses_by_what_is_free(tmp_path):
    path = _plain_store(tmp_path / "g")
    options = {"fanout": [3, 2], "batch_size": 10, "hidden": 8, "prefetch": 1}
    figures = estimate(path, 2, free_gpu=4 * GIB, free_host=8 * GIB, **options)["modes"]
    need = {mode: p["gpu"] + p["gpu_step"] for mode, p in figures.items()}
    host = {mode: 2 * (p["rank"] + p["rank_step"]) + p["shared"] for mode, p in figures.items()}
    for free_gpu, free_host, mode in (
        (need["cuda-cuda"], 8 * GIB, "cuda-cuda"),
        (need["cuda-cuda"] - 1, 8 * GIB, "pinned-cuda"),
        (need["cuda-cuda"] - 1, host["pinned-cuda"], "pinned-cuda"),
        (need["cuda-cuda"] - 1, host["pinned-cuda"] - 1, "cpu-cuda"),
        (need["cpu-cuda"], 8 * GIB, "cpu-cuda"),
    ):
        chosen, line = choose_mode(path, 2, free_gpu=free_gpu, free_host=free_host, **options)
        assert chosen == mode and line.startswith(f"mode {mode}: each GPU 1.07 GB + ") and "\n" not in line
        assert f"{disk.readable_size(free_gpu)} free" in line and "may be too large" not in line
    chosen, line = choose_mode(path, 2, free_gpu=GIB, free_host=8 * GIB, **options)
    assert chosen == "cpu-cuda" and "a batch may be too large; 0 seeds fit for certain" in line
    large = {**options, "batch_size": 100, "free_gpu": GIB + ARRAYS + 4000, "free_host": 8 * GIB, "fanout": [40, 10]}
    assert estimate(path, 2, **large)["modes"]["cuda-cuda"]["possible"]  # but no mode has room for such a batch
    assert choose_mode(path, 2, **large)[0] == "cpu-cuda"
    assert choose_mode(path, free_host=8 * GIB, **options)[0] == "cpu-cpu"
    assert choose_mode(path, 2, "pinned-cuda", free_gpu=4 * GIB, free_host=8 * GIB, **options)[0] == "pinned-cuda"
    for asked, gpus, free_gpu, free_host, words in (
        ("cuda-cuda", 2, GIB + ARRAYS, 8 * GIB, "1.07 GB .* of 1.07 GB free.*; mode pinned-cuda can"),
        ("pinned-cuda", 2, 4 * GIB, GIB + ARRAYS - 1,
         r"100 KB shared = .* of 1.07 GB free: .* cannot .* cuda-cuda can"),
        ("auto", 2, GIB - 1, 8 * GIB, "mode cpu-cuda: each GPU 1.07 GB .* cannot work here$"),
        ("auto", 0, None, GIB // 2 - 1, r"mode cpu-cpu: host 1 x \(537 MB .* of 537 MB free: this cannot work here$"),
    ):
        with pytest.raises(StoreError, match=words):
            choose_mode(path, gpus, asked, free_gpu=free_gpu, free_host=free_host, **options)
    large = estimate(path, fanout=[2], free_host=ARRAYS - 1)
    assert large["backend"] == "mmap" and large["mode"] is None and "behind --cache" in large["backend_why"]
    larger = estimate(path, fanout=[2], free_host=GraphStore.open(path).indices.nbytes)
    assert "neighbour lists as they are sampled" in larger["backend_why"]


def test_store_estimate_free_host_memory_is_what_the_cgroups_leave(tmp_path):
    def write(file, text):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n")
    assert store.free_host_bytes("/") > 1 << 20
    write("proc/self/cgroup", "0::/a/b\n")
    assert store.free_host_bytes(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.current", "100\n")
    write("sys/fs/cgroup/a/b/memory.stat", "anon 40\ninactive_file 50\n")
    assert store.free_host_bytes(tmp_path) == 8000 * 1024
    for folder, limit, free in (("a", 5_000_000, 4_999_950), ("a/b", 4_000_000, 3_999_950), ("", 3_000_000, 2_999_950)):
        write(f"sys/fs/cgroup/{folder}/memory.max", f"{limit}\n")
        write(f"sys/fs/cgroup/{folder}/memory.current", "100\n")
        write(f"sys/fs/cgroup/{folder}/memory.stat", "anon 40\ninactive_file 50\n")
        assert store.free_host_bytes(tmp_path) == free  # the tightest of a group and those above it
    write("proc/self/cgroup", "4:memory:/job\n1:cpu:/x\n0::/nowhere/else\n")
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "6000\n")
    write("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 70\n")
    assert store.free_host_bytes(tmp_path) == 1070
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8000\n")
    assert store.free_host_bytes(tmp_path) == 0


def test_store_estimate_command_line(tmp_path, capsys):
    path = _plain_store(tmp_path / "g")
    words = ["estimate", str(path), "--fanout", "3,2", "--hidden", "8", "--batch-size", "10"]
    assert store.main(words) == 0
    text = capsys.readouterr().out
    assert all(f"\n{mode} " in text for mode in MODES) and "features 68.1 KB" in text
    if not torch.cuda.is_available():
        assert text.count("no GPU here") == 3
    assert "\nmode           cpu-cpu\n" in text and "\nfeatures       mmap: graph and features take 100 KB" in text
    assert store.main([*words, "--gpus", "2", "--free-gpu", "80"]) == 0
    text = capsys.readouterr().out
    assert "of 80 GB free, host 2 x (537 MB + " in text and "\nmode           cuda-cuda\n" in text
    assert store.main(["estimate", str(tmp_path / "none")]) == 2
    for bad in ("3,x", "0", "3,-2", ""):
        with pytest.raises(SystemExit):
            store.main(["estimate", str(path), "--fanout", bad])
        assert "--fanout" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# model.py


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
            torch.testing.assert_close(inference(net, indptr, indices, x, chunk=chunk), h.float(), atol=1e-5, rtol=1e-4)
        blocks = NeighborSampler(indptr, indices, [-1, -1, -1]).sample(torch.arange(80).flip(0), 0)
        torch.testing.assert_close(net(blocks, x[blocks[0].src_nodes]), h.float().flip(0), atol=1e-5, rtol=1e-4)
    assert net.train() and inference(net, indptr, indices, x).requires_grad is False and net.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_native_layers_equal_torch_operations(dtype, ids):
    rng = np.random.default_rng(14)
    for width in (1, 5, 64, 1500):
        indptr, indices = _random_graph(rng, 50, 6, ids)
        indptr = indptr.to(ids)
        h = torch.randn(50, width).to(dtype)
        grad = torch.randn(50, 2 * width).to(dtype)
        results = []
        for on in (True, False):
            fused.use_native(on)
            try:
                x = h.clone().requires_grad_()
                pair = model.self_and_mean(indptr, indices, x)
                pair.backward(grad)
                own = torch.from_numpy(rng.permutation(50)).to(ids) if on else own  # noqa: F821
                table = model.self_and_mean(indptr, indices, h, own, torch.empty(50, 2 * width))
                results.append((pair.detach(), x.grad, table))
            finally:
                fused.use_native(True)
        tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=4e-2)
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, **tolerance)
        assert torch.equal(results[0][2][:, :width], h[own.long()].float())


@pytest.mark.parametrize("dtype, ids", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)])
def test_dropout_is_a_function_of_node_and_column(dtype, ids):
    mask, golden, seed = (1 << 64) - 1, 0x9E3779B97F4A7C15, -1234567890123456789

    def finalise(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    nodes = torch.tensor([5, 0, 2_000_000_000, 77], dtype=ids)
    for width in (1, 8, 19):
        expected = [
            [finalise(finalise(((seed ^ v) + golden) & mask) + c // 8 * golden & mask) >> 8 * (c % 8) & 255
             for c in range(width)]
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
        torch.testing.assert_close(native, torch_ops, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
        assert torch.equal(native[100:200], part)


def test_linear_is_torchs_linear(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "8")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    large = torch.randn(2000, 100), torch.randn(250, 100, requires_grad=True)  # 50 million multiplications
    assert type(fused.linear(*large).grad_fn).__name__ == "_LinearBackward"
    assert type(fused.linear(large[0][1:], large[1]).grad_fn).__name__ != "_LinearBackward"
    monkeypatch.setattr(fused, "_WORTH_COMPILING", 1)
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
        for ids in (torch.randint(1000, (3001,)), torch.randint(1000, (17,), dtype=torch.int32), torch.arange(0)):
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
    assert (kept.mean(0) - 0.7).abs().max() < 0.05 and (kept.mean(1) - 0.7).abs().max() < 0.25  # columns and rows alike
    y.sum().backward()
    torch.testing.assert_close(w.grad, (y.detach() > 0) * 2 * 256 / (256 - 77))
    h = torch.randn(10, 10)
    assert torch.equal(model.relu_dropout(h.clone(), 0.3, training=False), h.relu())


# -- fused_cuda.py and its kernels: every thread on its own, in any order


@pytest.fixture
def cuda_layers(tmp_path_factory, monkeypatch):
    """fused_cuda.py on emulated kernels for tensors in host memory -> names of the kernels that were launched."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    folder, launched = tmp_path_factory.getbasetemp(), []

    @functools.cache
    def load(ids, device):
        kernels = _EmulatedKernels(native_cuda.DIALECT + fused_kernels.source(ids), folder, seed=len(launched))
        kernels.launched = launched
        return kernels

    monkeypatch.setattr(fused_cuda, "_load", load)
    # it stands for fused.py in model.py
    monkeypatch.setattr(fused_cuda, "linear", torch.nn.functional.linear, raising=False)
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
def test_cuda_layers_equal_torch_operations(cuda_layers, dtype, ids, monkeypatch):
    torch.manual_seed(15)
    rng, S, N = np.random.default_rng(15), 40, 60
    near = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=4e-2)
    for width in (1, 7, 8, 36):
        indptr, indices = _layer_block(rng, S, N, ids)
        own = torch.from_numpy(rng.permutation(N)[:S]).to(ids)
        h = torch.randn(N, width).to(dtype)
        h = _shifted(h) if width == 8 else h
        pair, best = torch.randn(S, 2 * width).to(dtype), torch.randn(S, width).to(dtype)
        results = []
        for functions in (fused_cuda, None, fused_cuda):  # twice: threads in another order
            monkeypatch.setattr(model, "fused", functions)
            x, y = (h.clone().requires_grad_() for _ in range(2))
            means, largest = model.self_and_mean(indptr, indices, x), model.max_neighbours(indptr, indices, y)
            means.backward(pair)
            largest.backward(best)
            tables = [model.self_and_mean(indptr, indices, h, own, torch.empty(S, 2 * width, dtype=t))
                      for t in (torch.float32, torch.bfloat16)]  # fmt: skip
            results.append([means.detach(), x.grad, largest.detach(), y.grad, *tables, model.gather_rows(h, own)])
        for ours, theirs, again in zip(*results):
            torch.testing.assert_close(ours, theirs, **near)
            assert torch.equal(ours, again)
        assert "list_in_order" in cuda_layers
        if width == 36:  # padding changes nothing
            monkeypatch.setattr(model, "fused", fused_cuda)
            x, y = (torch.cat([h, h.new_zeros(9, width)]).requires_grad_() for _ in range(2))
            padded = _padded(indptr, indices, 7, S + 3)
            means, largest = model.self_and_mean(*padded, x), model.max_neighbours(*padded, y)
            means.backward(torch.cat([pair, pair.new_zeros(3, 2 * width)]))
            largest.backward(torch.cat([best, best.new_zeros(3, width)]))
            for all_rows, ours in zip((means.detach(), x.grad, largest.detach(), y.grad), results[0]):
                assert torch.equal(all_rows[: len(ours)], ours)
            assert not x.grad[N:].any() and not means[S:, width:].any()
            nowhere = torch.cat([own, own.new_full((3,), -1)])
            table = model.self_and_mean(*padded, h, nowhere, torch.empty(S + 3, 2 * width))
            assert torch.equal(table[:S], results[0][4]) and not table[S:].any()
            rows = model.gather_rows(h, nowhere)
            assert torch.equal(rows[:S], results[0][6]) and not rows[S:].any()


@pytest.mark.parametrize("dtype, ids", [(torch.float32, torch.int32), (torch.bfloat16, torch.int64)])
def test_cuda_dropout_draws_the_bytes_of_the_cpu(cuda_layers, dtype, ids, monkeypatch):
    nodes, key, step = torch.randperm(1000)[:50].to(ids), 2**64 - 12345, torch.tensor([77])
    assert model.layer_seed(key, 3) == sampler.mix(key ^ (2**64 - 4)) - 2**64 * (sampler.mix(key ^ (2**64 - 4)) >> 63)
    on_device = model.layer_seed((123, step), 3)  # what a CUDA graph makes of the number of the step
    on_host = model.layer_seed(sampler.mix(123 ^ 77), 3)
    for width in (1, 8, 43):
        h, grad = torch.randn(50, width).to(dtype), torch.randn(50, width).to(dtype)
        results = []
        for functions, seed in ((fused_cuda, on_host), (fused, on_host), (None, on_host), (fused_cuda, on_device),
                                (None, on_device)):
            monkeypatch.setattr(model, "fused", functions)
            x = h.clone().requires_grad_()
            y = model.relu_dropout(x * 1, 0.3, nodes=nodes, seed=seed)
            y.backward(grad)
            inputs = model.dropout(h, 0.3, nodes, seed)
            plain = model.relu_dropout(h.clone(), 0.3, training=False)
            results.append([y.detach(), x.grad, inputs, plain])
        for first, *others in zip(*results):
            for other in others:
                torch.testing.assert_close(first, other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
                assert torch.equal(first == 0, other == 0)
    monkeypatch.setattr(model, "fused", fused_cuda)
    assert not model.relu_dropout(torch.ones(3, 5), 0.3, nodes=torch.tensor([4, -1, -1]), seed=5)[1:].any()
    assert cuda_layers.count("relu_dropout_float" if dtype == torch.float32 else "relu_dropout_bf16") > 5


def test_cuda_cross_entropy_and_its_gradient(cuda_layers, monkeypatch):
    for S, C in ((0, 3), (5, 1), (33, 47), (20, 200)):
        logits, labels = 5 * torch.randn(S, C), torch.randint(C, (S,))
        labels[::4] = -1
        x = logits.clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(x, labels, reduction="sum", ignore_index=-1)
        (0.25 * expected).backward()
        for functions in (fused_cuda, None):
            monkeypatch.setattr(model, "fused", functions)
            ours = logits.clone().requires_grad_()
            loss = model.cross_entropy(ours, labels)
            (0.25 * loss).backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(ours.grad, x.grad, rtol=1e-5, atol=1e-6)
    assert cuda_layers.count("cross_entropy") == 3  # none for no rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, width", [(1, 6), (4, 8), (9, 3)])
def test_cuda_attention_equals_torch_operations(cuda_layers, heads, width, dtype, monkeypatch):
    rng, S, N = np.random.default_rng(16), 30, 50
    near = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=5e-2, atol=1e-1)
    indptr, indices = _layer_block(rng, S, N, torch.int32)
    nodes, rows = torch.from_numpy(rng.permutation(900)[:N]).int(), torch.from_numpy(rng.permutation(N)[:S]).int()
    layer = model.GATv2Conv(5, heads * width, heads, dropout=0.4)
    source, target = torch.randn(N, heads * width).to(dtype), torch.randn(S, heads * width).to(dtype)
    layer.dst_linear = torch.nn.Identity()
    weight, results = torch.randn(S, heads * width).to(dtype), []
    for functions in (fused_cuda, None, fused_cuda):
        monkeypatch.setattr(model, "fused", functions)
        inputs = [source.clone().requires_grad_(), target.clone().requires_grad_(), layer.attn]
        out = layer.combine(indptr, indices, inputs[0], None, inputs[1], nodes=nodes[:S], seed=99)
        grads = torch.autograd.grad(out, inputs, weight)
        with torch.no_grad():
            plain = layer.eval().combine(indptr, indices, source, rows, target)
        layer.train()
        part = layer.combine(indptr[10:21] - indptr[10], indices[indptr[10] : indptr[20]], source.roll(-10, 0),
                             None, target[10:20], nodes=nodes[10:20], seed=99).detach()  # fmt: skip
        results.append([out.detach(), *grads, plain, part])
    for ours, theirs, again in zip(*results):
        torch.testing.assert_close(ours, theirs, **near)
        assert torch.equal(ours, again)
    if functions is fused_cuda:  # padding changes nothing
        x, y = source.clone().requires_grad_(), torch.cat([target, target.new_zeros(4, heads * width)]).requires_grad_()
        more = torch.cat([nodes[:S], nodes.new_full((4,), -1)])
        out = layer.combine(*_padded(indptr, indices, 7, S + 4), x, None, y, nodes=more, seed=99)
        grads = torch.autograd.grad(out, [x, y, layer.attn], torch.cat([weight, weight.new_zeros(4, heads * width)]))
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
def test_cuda_models_equal_torch_operations(cuda_layers, conv, monkeypatch):
    """Forward and gradients with dropout; recomputed; twice with threads in another order: to the last bit."""
    indptr, indices = _random_graph(np.random.default_rng(17), 200, 6)
    sample = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample
    blocks, key = sample(torch.randperm(200)[:12].int(), 1), 2**63 + 99
    x = torch.randn(blocks[0].num_src, 20)
    for options in OPTIONS[conv]:
        results = []
        for functions in (None, fused_cuda, fused_cuda):
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
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(torch.randperm(200)[:12].int(), 1)
    x, key = torch.randn(blocks[0].num_src, 20), 2**63 + 99
    zeros, numbers = ([f(block.num_edges, 3) for block in blocks] for f in (torch.zeros, torch.randn))
    for heads in (1, 4):
        plain, seeing = (_net("gat", (20, 8, 8), heads=heads, dropout=0.5, edge_dim=width) for width in (0, 3))
        seeing.load_state_dict(plain.state_dict(), strict=False)
        results = []
        for functions, net, edges in ((fused, plain, None), (fused_cuda, plain, None), (fused, seeing, zeros),
                                      (fused_cuda, seeing, zeros), (None, seeing, zeros)):  # fmt: skip
            monkeypatch.setattr(model, "fused", functions)
            logits, *grads = _trained(net, blocks, x, key, edges=edges)
            results.append([logits] + [g for g, (name, _) in zip(grads, net.named_parameters()) if "edge" not in name])
        for found in results[1:]:
            for ours, theirs in zip(found, results[0], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(_trained(seeing, blocks, x, key + 1, edges=zeros)[0], results[0][0])
    for conv, options in (("gat", {"heads": 4}), ("gine", {})):
        net, results = GNN(20, 8, 5, conv=conv, num_layers=3, norm="layer", edge_dim=3, **options), []
        for functions in (fused, fused_cuda, None):
            monkeypatch.setattr(model, "fused", functions)
            results.append(_trained(net, blocks, x, key, edges=numbers))
        for ours, kernels, theirs in zip(*results):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(kernels, theirs, rtol=1e-3, atol=1e-4)


def test_cuda_rows_are_gathered_by_one_program_whatever_the_type_of_their_ids(cuda_layers):
    """Ids of nodes and of edges differ in type: a kernel for each in the same program, by another name."""
    table = torch.randn(50, 4)
    for dtype in (torch.int32, torch.int64):
        ids = torch.randint(50, (30,), dtype=dtype)
        assert torch.equal(fused_cuda.gather_rows(table, ids), table[ids.long()])
    assert cuda_layers == ["gather_rows_int_four_t_32", "gather_rows_int_four_t_64"]
    assert fused_cuda._load.cache_info().currsize == 1


def test_cuda_graphsage_of_padded_blocks(cuda_layers, monkeypatch):
    """Static shapes: the same logits and gradients, from pairs too, with the key made of a step on the device."""
    monkeypatch.setattr(model, "fused", fused_cuda)
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(torch.randperm(300)[:12].int(), 1)
    net, x, key = _net("sage", (20, 8, 5), dropout=0.5), torch.randn(blocks[0].num_src, 20), sampler.mix(5 ^ 31)
    expected = _trained(net, blocks, x, key)
    launched = len(cuda_layers)
    pair = model.self_and_mean(blocks[0].indptr, blocks[0].indices, x)
    for ours, same in zip(_trained(net, blocks, pair, key, aggregated=True), expected):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)
    assert len(cuda_layers) - launched == 1 + 2 * 2 + 2 * 5
    rows = [block.num_dst + 5 for block in blocks] + [0]
    padded = []
    for block, S, k in zip(blocks, rows, (3, 3, 4)):
        above = len(x) + 9 if block is blocks[0] else rows[len(padded) - 1]
        src_nodes = torch.cat([block.src_nodes, block.src_nodes.new_full((above - block.num_src,), -1)])
        padded.append(Block(*_padded(block.indptr, block.indices, k, S), src_nodes, None))
    net.zero_grad()
    out = net(padded, torch.cat([x, x.new_zeros(9, 20)]), key=(5, torch.tensor([31])))
    S = blocks[-1].num_dst
    (out[:S] * torch.arange(5 * S).view(S, 5).cos()).sum().backward()
    for ours, same in zip([out[:S].detach(), *(p.grad for p in net.parameters())], expected):
        torch.testing.assert_close(ours, same, rtol=1e-5, atol=1e-6)


def test_cuda_graphsage_in_bfloat16(cuda_layers, monkeypatch):
    """As torch.autocast has it: rows and pairs in either type; parameters and their gradients are float32."""
    monkeypatch.setattr(model, "fused", fused_cuda)
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    blocks = NeighborSampler(indptr, indices, [4, 3, 3], backend="torch").sample(torch.randperm(300)[:12].int(), 1)
    net, x = _net("sage", (20, 8, 5), dropout=0.5), torch.randn(blocks[0].num_src, 20)
    expected = _trained(net, blocks, x, 7)
    pair = model.self_and_mean(blocks[0].indptr, blocks[0].indices, x)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: nullcontext())  # it would leave behind what it found
    for rows, aggregated in ((x, False), (x.bfloat16(), False), (pair, True), (pair.bfloat16(), True)):
        logits, *grads = _trained(net, blocks, rows, 7, aggregated=aggregated)
        assert logits.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)
        for ours, theirs in zip([logits.float(), *grads], expected):
            assert (ours - theirs).norm() < 0.12 * theirs.norm()


# -- step_graph.py


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
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::bincount"), f"{name} waits for the GPU"
        alias = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)
        if not name.startswith("profiler::"):
            self.calls.append(functools.partial(self._again, func, args, kwargs or {}, None if alias else out))
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
    twin = native_cuda.Launch(launch._kernels, launch._name)
    ctypes.memmove(twin._memory, launch._memory, ctypes.sizeof(launch._memory))
    for i, value in launch._structs.items():
        twin._structs[i] = type(value).from_buffer_copy(value)
        twin._pointers[i] = ctypes.addressof(twin._structs[i])
    return twin


@pytest.fixture
def cuda_graphs(cuda_layers, monkeypatch):
    """step_graph.py on the emulated kernels, with `_Graph` in the place of CUDA's."""
    go = native_cuda.Launch.__call__

    def launch(self, threads, stream):
        for graph in _Graph.recording:
            graph.calls.append(functools.partial(go, _frozen(self), threads, stream))
        go(self, threads, stream)

    nothing = lambda *a: None  # noqa: E731
    monkeypatch.setattr(native_cuda.Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda: types.SimpleNamespace(record=nothing))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(wait_event=nothing))
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    monkeypatch.setattr(torch.cuda, "set_stream", nothing)
    monkeypatch.setattr(step_graph, "captured", lambda graph, pool=None: graph)
    monkeypatch.setattr(model, "fused", fused_cuda)


def _graph_run(folder, net, optimizer, nodes, labels, x, options, word="on"):
    """StepGraphs of a small graph, --cuda-graph being `word` -> (graphs, sampler)."""
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    plain = NeighborSampler(indptr, indices, [4, 3, 3], seed=5, backend="torch", **options)
    backend = _emulated(plain, folder)
    draw = lambda seeds, step, relabel_outer: [  # noqa: E731
        Block(*fields) for fields in reversed(backend.sample(seeds, step, relabel_outer))
    ]
    draws = types.SimpleNamespace(_backend=backend, indices=indices, sample=draw)
    ring = _graph_ring(net, x, labels, slots=2)
    net.degrees = model.graph_degrees(indptr, indices)
    args = argparse.Namespace(fanout=[4, 3, 3], batch_size=12, seed=5, prefetch=1, cuda_graph=word)
    predict = lambda batch, key: net(batch.blocks, batch.x, aggregated=ring.first_hop, key=key)  # noqa: E731
    store = types.SimpleNamespace(split={"train": nodes})
    graphs = step_graph.StepGraphs(ddp.Ranks(), args, store, draws, ring, net, optimizer, predict)
    return graphs, draws


def _graph_ring(net, x, labels, slots):
    """The ring of train.py for a network: GraphSAGE averages the first hop in place, unless its features are dropped.

    x of bfloat16 is given to the network in float32.
    """
    in_place = isinstance(net.layers[0], model.SAGEConv) and not net.input_dropout
    return FeatureRing(x, labels, slots=slots, aggregate=model.self_and_mean if in_place else None,
                       gather=model.gather_rows, dtype=torch.float32)  # fmt: skip


def _no_more_than_the_smallest(self, nodes, args):
    """StepGraphs._measure, for as many edges as the smallest of a few batches has."""
    _, (rows, _) = step_graph.measured(self, nodes, args)
    draw = lambda seeds: [block.num_edges for block in self._blocks(seeds, 0)[self.first_hop :][::-1]]  # noqa: E731
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
def test_a_cuda_step_graph_takes_the_steps_of_a_run_without(cuda_graphs, conv, tight, options, tmp_path, monkeypatch):
    """Padded, with the keys made on the GPU, with batches that do not fit, the last one smaller: the same
    parameters."""
    torch.manual_seed(0)
    options = dict(options)
    nodes, labels, x = torch.randperm(300)[:53], torch.randint(5, (300,)), torch.randn(300, 20)
    x, law = x.to(options.pop("dtype", x.dtype)), dict(replace=True) if options.pop("replace", False) else {}
    ours = _net(conv, (20, 8, 5), dropout=0.5, **options)
    theirs = copy.deepcopy(ours)
    adam = lambda net: torch.optim.Adam(net.parameters(), lr=2**-7, eps=2**-10, fused=True)  # noqa: E731
    optimizers = [adam(ours), adam(theirs)]  # with the usual eps a gradient near zero makes a step of either sign
    monkeypatch.setattr(step_graph, "measured", step_graph.StepGraphs._measure, raising=False)
    if tight:
        monkeypatch.setattr(step_graph.StepGraphs, "_measure", _no_more_than_the_smallest)
    graphs, draws = _graph_run(tmp_path, ours, optimizers[0], nodes, labels, x, law)
    ring, theirs.degrees = _graph_ring(theirs, x, labels, slots=1), ours.degrees
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(p, q)  # captured and tried, and nothing has changed
    options = dict(batch_size=12, seed=5, depth=1)
    batches, fitting = loader.NodeLoader(None, nodes, [4, 3, 3], sampler=graphs, ring=graphs, **options), 0
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
        assert loss_sum.item() == pytest.approx(losses, rel=1e-5)
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
        batches = loader.NodeLoader(None, nodes, [4, 3, 3], sampler=graphs, ring=graphs, batch_size=12, seed=5, depth=1)
        repeated, done = 0, 0
        while batches.epoch < 2:
            graphs.begin()
            for batch in batches:
                graphs.step(batch)
                done += 1
                if done == stop:  # another process goes on, with graphs where there were none
                    state, moments = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
                    place, net = batches.state_dict(), copy.deepcopy(first)
                    net.load_state_dict(state)
                    optimizer = torch.optim.Adam(net.parameters(), lr=2**-7, fused=True)
                    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
                    repeated += graphs.repeated
                    word = "off" if word == "on" else "on"
                    graphs, _ = _graph_run(tmp_path, net, optimizer, nodes, labels, x, {}, word)
                    options = dict(sampler=graphs, ring=graphs, batch_size=12, seed=5, depth=1)
                    batches = loader.NodeLoader(None, nodes, [4, 3, 3], **options)
                    batches.load_state_dict(place)
                    break
        ends.append([*net.parameters(), *(t for p in net.parameters() for t in optimizer.state[p].values())])
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
    with pytest.raises(RuntimeError, match=r"input is 100.0% off, their losses are \[.*\], and \[.*\] without"):
        _graph_run(tmp_path, net, optimizer, nodes, labels, x, {})
    monkeypatch.setattr(step_graph.Slot, "sample", lambda slot: (take(slot), slot.y.zero_()))
    with pytest.raises(RuntimeError, match=r"input is 0.0% off, their losses are \[.*\], and \[.*\] without graphs"):
        _graph_run(tmp_path, net, optimizer, nodes, labels, x, {})
    assert all(map(torch.equal, before, net.parameters()))


def test_a_cuda_step_graph_that_cannot_be_says_why(cuda_layers):
    indptr, indices = _random_graph(np.random.default_rng(18), 50, 6)
    ring = types.SimpleNamespace(on_device=True, features=torch.zeros(3, 1), edge_ring=None, labels=torch.zeros(3))
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
        ("--model gat", dict(edge_ring=ring), "edges have features"),
        ("", dict(labels=torch.zeros(3, 2)), "several labels"),
        ("", {}, "the sampler's kernels are not there"),
        ("--model gin --fanout 4,49", {}, "the sampler's kernels are not there"),
        ("--input-dropout 0.1 --fanout 4,49", {}, "the sampler's kernels are not there"),
    ):
        args = train.parse_args(["--fanout", "4,3", *words.split()])
        s = NeighborSampler(indptr, indices, args.fanout, backend="torch")
        said = step_graph.obstacle(ddp.Ranks(gpus=1), args, s, types.SimpleNamespace(**{**vars(ring), **changed}))
        assert why in said, said
        assert (step_graph.hindrance(args) is None) == bool(changed or "kernels" in why)
    assert step_graph.obstacle(ddp.Ranks(), args, s, ring) == "there is no GPU"
    timed = loader.AtSeedTimes(s, torch.zeros(50, dtype=torch.int64))
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
        words = ["--dataset", TINY, "--root", tmp_path, "--model", name, "--mode", mode, "--cuda-graph", how,
                 "--fanout", "5,4,3", "--batch-size", 32]
        assert train.main([str(word) for word in (*words, "--epochs", 3, "--precision", "fp32", "--log", log)]) == 0
        losses[how] = [entry["loss"] for entry in map(json.loads, log.read_text().splitlines()) if "epoch" in entry]
    assert "CUDA graphs with room for" in capsys.readouterr().out
    assert losses["on"] == losses["off"]


def test_cuda_layers_give_way_to_torch_operations(monkeypatch):
    """Where NVRTC or the driver cannot be had: one warning, None."""
    fused_cuda._load.cache_clear()
    monkeypatch.setattr(native_cuda, "_warned", set())
    monkeypatch.setattr(native_cuda, "_loaded", {})
    monkeypatch.setattr(native_cuda, "Kernels", lambda *a: (_ for _ in ()).throw(OSError("no libnvrtc")))
    cpu, h = torch.device("cuda", 0), torch.randn(5, 4)
    with pytest.warns(UserWarning, match="the CUDA kernels of layers cannot be used.*no libnvrtc"):
        assert fused_cuda._load(torch.int32, cpu) is None
    monkeypatch.setattr(fused_cuda, "_load", lambda ids, device: None)
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([4, 0, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_cuda.self_and_mean(indptr, indices, h) is None and fused_cuda.relu_dropout(h, None, 5, 8) is None
        assert fused_cuda.max_neighbours(indptr, indices, h) is None and fused_cuda.gather_rows(h, indices) is None


def _dgl():
    pytest.importorskip("scipy")
    try:
        return sampler.import_dgl()
    except ImportError as missing:
        pytest.skip(str(missing))


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
        edges = [e for s in range(40) for e in [s, *block.indices[block.indptr[s] : block.indptr[s + 1]].tolist()]]
        looped = block._replace(indptr=block.indptr + torch.arange(41, dtype=ids),
                                indices=torch.tensor(edges, dtype=ids))
        theirs = looped.to_dgl()
    for width, out_dim in ((24, 6), (6, 24)):
        layer = LAYERS[name](width, out_dim)
        for parameter in layer.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        twin = bench_training.dgl_twin(layer)
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
            layers = [bench_training.dgl_twin(layer) for layer in ours.layers]
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


def _layer_with_edges(name, width, out_dim, edge_dim=3):
    layer = model.GINEConv(width, out_dim, edge_dim=edge_dim) if name == "gine" else \
        model.GATv2Conv(width, out_dim, 2, mean=name == "gat-mean", edge_dim=edge_dim)
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def _edge_by_edge(layer, block, h, e):
    """GATv2 and GINE with features of edges as their papers write them, one destination after the other."""
    rows = []
    for v in range(block.num_dst):
        edges = range(int(block.indptr[v]), int(block.indptr[v + 1]))
        if isinstance(layer, model.GINEConv):
            total = sum((h[block.indices[i]] + layer.edge_linear(e[i])).relu() for i in edges) if edges else 0 * h[v]
            rows.append(layer.mlp((1 + layer.eps) * h[v] + total))
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
def test_model_layers_with_edges_equal_the_papers_and_pygs(name, ids, monkeypatch):
    """Forward and all gradients on a sampled block with destinations without edges, edges handled a few at a time."""
    torch.manual_seed(3)
    indptr, indices = _random_graph(np.random.default_rng(8), 60, 4, ids)
    own = indices == torch.repeat_interleave(indptr.diff())  # PyG takes such edges out
    indptr = torch.nn.functional.pad((~own).cumsum(0), (1, 0))[indptr]
    block = NeighborSampler(indptr, indices[~own], [5]).sample(torch.arange(40).to(ids), 0)[0]
    assert (block.indptr.diff() == 0).any()
    e = torch.randn(block.num_edges, 3)
    try:
        pyg = importlib.import_module("torch_geometric.nn")
    except ImportError:
        pyg = None
    for width, out_dim in ((24, 6), (6, 24)):
        layer, h = _layer_with_edges(name, width, out_dim), torch.randn(block.num_src, width, requires_grad=True)
        weight = torch.randn(40, out_dim)
        ours = layer(block, h, edges=e)
        (to_h,), sizes = _gradients(layer, ours, weight, h)
        expected = _edge_by_edge(layer, block, h, e)
        (to_h_slow,), sizes_slow = _gradients(layer, expected, weight, h)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(to_h, to_h_slow, rtol=1e-4, atol=1e-5)
        assert sizes == pytest.approx(sizes_slow, rel=1e-4, abs=1e-4)
        with monkeypatch.context() as few:
            few.setattr(model, "PIECE", 7 * width)
            torch.testing.assert_close(layer(block, h, edges=e), ours, rtol=1e-5, atol=1e-6)
            (to_h_few,), sizes_few = _gradients(layer, layer(block, h, edges=e), weight, h)
        torch.testing.assert_close(to_h_few, to_h, rtol=1e-4, atol=1e-5)
        assert sizes_few == pytest.approx(sizes, rel=1e-4, abs=1e-4)
        if pyg is None:
            continue
        edge_index, _, (_, S) = block.to_pyg()
        if name == "gine":
            twin = pyg.GINEConv(copy.deepcopy(layer.mlp), train_eps=True, edge_dim=3)  # which draws its weights anew
            twin.nn.load_state_dict(layer.mlp.state_dict())
            twin.eps.data = layer.eps.data
            twin.lin.weight.data, twin.lin.bias.data = layer.edge_linear.weight.data, layer.edge_linear.bias.data
        else:
            K, D = layer.attn.shape
            twin = pyg.GATv2Conv((width, width), D, K, concat=not layer.mean, edge_dim=3)
            twin.bias = None  # of the output, which ours leaves to the norm or the next layer
            twin.lin_l.weight.data, twin.lin_l.bias.data = layer.src_linear.weight.data, layer.src_linear.bias.data
            twin.lin_r.weight.data, twin.lin_r.bias.data = layer.dst_linear.weight.data, layer.dst_linear.bias.data
            twin.lin_edge.weight.data, twin.att.data = layer.edge_linear.weight.data, layer.attn.data.unsqueeze(0)
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
    layer, h, e = _layer_with_edges("gine", 12, 6), torch.randn(block.num_src, 12), torch.randn(block.num_edges, 3)
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
    net = GNN(12, 8, 5, conv=conv, num_layers=3, heads=2, norm="layer", residual=True, edge_dim=4).eval()
    block = Block(indptr.to(indices.dtype), indices, torch.arange(90))
    expected = net([block] * 3, x, edges=[e] * 3)
    for options in ({}, {"chunk": 7}, {"chunk_edges": 20}, {"chunk": 13, "chunk_edges": 64, "memory": 0}):
        torch.testing.assert_close(inference(net, indptr, indices, x, edges=e, **options), expected, rtol=1e-5,
                                   atol=1e-5)
    torch.testing.assert_close(inference(net, indptr, indices, x, edges=e.double().numpy()), expected, rtol=1e-5,
                               atol=1e-5)
    assert not torch.allclose(inference(net, indptr, indices, x, edges=e.flip(0)), expected, atol=0.01)
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
    monkeypatch.setattr(exact, "_nameless_file", lambda size, make=exact._nameless_file: files.append(make(size))
                        or files[-1])
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
        for options in ({}, {"chunk": 7}, {"chunk_edges": 20}, {"chunk": 13, "chunk_edges": 64, "memory": 0}):
            torch.testing.assert_close(inference(net, indptr, indices, x, **options), expected, rtol=1e-5, atol=1e-5)
        rows = _GatherOnly(x.double())
        torch.testing.assert_close(inference(net, indptr, indices, rows, chunk=10), expected, rtol=1e-5, atol=1e-5)
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
        logits = inference(net, indptr, indices, x, chunk=16, chunk_edges=100, memory=memory, rank=rank, world=2,
                           total=total)
        results.put((position, logits.numpy().copy()))  # a queue keeps the order of one rank, not of two
        barrier.wait(60)


@pytest.mark.parametrize("memory", [0, 1 << 30])
def test_model_inference_with_two_ranks(memory):
    indptr, indices = _random_graph(np.random.default_rng(12), 150, 5)
    x, nets = torch.randn(150, 12), [_net(conv) for conv in MODELS]
    context = _forkserver()
    barrier, results = context.Barrier(2), context.Queue()
    table = torch.zeros(2, 4, dtype=torch.float64).share_memory_()
    shared = [indptr, indices, x, nets, memory, barrier, table, results]
    processes = [context.Process(target=_infers, args=(rank, *shared), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    expected, seen = [inference(net, indptr, indices, x) for net in nets], []
    for _ in range(2 * len(nets)):
        position, logits = results.get(timeout=120)
        torch.testing.assert_close(torch.from_numpy(logits), expected[position], rtol=1e-5, atol=1e-5)
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
        return int(re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

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
                mean += net(blocks, x[blocks[0].src_nodes], edges=[e[block.edge_ids] for block in blocks]) / 3000
        exact = inference(net, indptr, indices, x, edges=e).double()
        assert (mean - exact).abs().mean() < 0.06 * exact.abs().mean()  # without the degrees: 0.5


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("conv", MODELS)
def test_model_a_batch_of_one_seed_or_none_trains(conv, norm):
    indptr, indices = _random_graph(np.random.default_rng(7), 30, 4)
    net = GNN(6, 8, 3, conv=conv, num_layers=2, norm=norm, residual=True, heads=2, input_dropout=0.1)
    for seeds in (torch.arange(0), torch.arange(1)):
        blocks = NeighborSampler(indptr, indices, [3, 3]).sample(seeds, 0)
        logits = net(blocks, torch.randn(blocks[0].num_src, 6))
        assert logits.shape == (len(seeds), 3)
        net.zero_grad()
        torch.nn.functional.cross_entropy(logits, seeds % 3, reduction="sum").backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_model_gin_of_two_classes_has_no_norm_through_which_nothing_passes():
    """A layer norm of two numbers leaves their signs: its gradient is zero."""
    for classes, norm, kind in ((2, "layer", ()), (1, "layer", ()), (3, "layer", torch.nn.LayerNorm),
                                (2, "batch", model.BatchNorm)):
        inner = [type(part) for part in GNN(6, 8, classes, conv="gin", num_layers=2, norm=norm).layers[-1].mlp]
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
    torch.nn.functional.cross_entropy(logits, torch.zeros(0, dtype=torch.int64), reduction="sum").backward()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# loader.py


def test_loader_twelve_lines_from_tensors_to_a_trained_model():
    """Those of the docstring, on two communities with features that say little."""
    twelve = textwrap.dedent(re.search(r"trained model:\n\n(.*?)\n\n\S", loader.__doc__, re.DOTALL)[1])
    assert sum(bool(line.strip()) for line in twelve.splitlines() if "import" not in line) <= 12
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 600)
    near = np.stack([rng.permutation(np.flatnonzero(y == c))[:200] for c in (0, 1) for _ in range(8)])
    edge_index = np.stack([near.reshape(-1), np.roll(near, 1, 1).reshape(-1)])
    x = (rng.normal(size=(600, 4)) + 0.7 * y[:, None]).astype(np.float32)
    for edge_index, x, y in ((edge_index, x, y), map(torch.from_numpy, (edge_index, x.astype(np.float64), y))):
        names = {"edge_index": edge_index, "x": x, "y": y, "train_nodes": range(300)}
        torch.manual_seed(0)
        exec(compile(twelve, "loader.py", "exec"), names)
        assert (names["classes"].numpy()[300:] == np.asarray(y)[300:]).mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_loader_from_edge_index_is_a_stable_list_of_neighbours(dtype):
    rng = np.random.default_rng(3)
    for V, M in ((1, 0), (1, 3), (50, 400), (50, 0)):
        edge_index = torch.from_numpy(rng.integers(0, V, (2, M))).to(dtype)
        lists = [sorted(u for u, v in edge_index.T.tolist() if v == node) for node in range(V)]
        for given in (edge_index, edge_index.numpy(), edge_index.tolist()):
            indptr, indices = loader.from_edge_index(given, V)
            assert indptr.dtype == torch.int64 and indices.dtype == torch.int32 and indptr[-1] == M == indices.numel()
            assert [indices[a:b].tolist() for a, b in itertools.pairwise(indptr.tolist())] == lists
    for bad, words in ((torch.zeros(3, 2).long(), r"\[3, 2\]: integers \[2, M\]"), (torch.ones(2, 3), "float32"),
                       (torch.tensor([[0, 50], [1, 2]]), "sources 0 to 50: node ids lie in .0, 50"),
                       (torch.tensor([[0, 1], [-1, 2]]), "destinations -1 to 2")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            loader.from_edge_index(bad, 50)


def _loaded(batches):
    return [(b.step, b.global_step, b.total, b.last, b.seeds.tolist(), b.x.clone(), b.y, _as_lists(b.blocks))
            for b in batches]


def _same(a, b):
    return len(a) == len(b) and all(m[:5] == n[:5] and torch.equal(m[5], n[5]) and torch.equal(m[6], n[6])
                                    and m[7] == n[7]
                                    for m, n in zip(a, b))  # fmt: skip


def _for_loading():
    indptr, indices = _random_graph(np.random.default_rng(21), 300, 6)
    return loader.Graph(indptr, indices, torch.randn(300, 5), torch.arange(300) % 7), torch.randperm(300)[:217]


def test_loader_covers_each_epoch_once_whatever_prepares_it():
    """Two epochs: the same for any depth and threads; cut among processes and passes, the seeds of a step stay what
    they are."""
    graph, seeds = _for_loading()
    plain = NeighborSampler(graph.indptr, graph.indices, [4, 2], seed=9)
    expected, steps = None, None
    for depth, threads in ((0, 1), (2, 1), (3, 2)):
        batches = loader.NodeLoader(graph, seeds, [4, 2], batch_size=60, seed=9, depth=depth, threads=threads)
        got = [_loaded(batches), _loaded(batches)]
        expected = expected or got
        assert len(batches) == 4 and batches.epoch == 2 and all(_same(a, b) for a, b in zip(got, expected))
    for epoch, batches in enumerate(expected):
        assert sorted(sum((b[4] for b in batches), [])) == sorted(seeds.tolist())
        assert [b[:4] for b in batches] == [(i, 4 * epoch + i, n, True) for i, n in enumerate((60, 60, 60, 37))]
        for _, key, _, _, ids, x, y, blocks in batches:
            law = plain.sample(torch.tensor(ids), key)
            assert _as_lists(law) == blocks and torch.equal(x, graph.features[law[0].src_nodes.long()])
            assert torch.equal(y, graph.labels[torch.tensor(ids)])
    assert expected[0][0][4] != expected[1][0][4]
    steps = [b[4] for b in expected[0]]
    for world, accumulate in ((2, 1), (3, 1), (1, 3), (2, 3)):
        size = 60 // (world * accumulate)
        ranks = [list(loader.NodeLoader(graph, seeds, [4, 2], batch_size=size, seed=9, rank=rank, world=world,
                                        accumulate=accumulate)) for rank in range(world)]  # fmt: skip
        parts = {}
        for i in range(len(ranks[0])):
            for batches in ranks:
                batch = batches[i]
                assert batch.total == len(steps[batch.step]) and batch.last == (i % accumulate == accumulate - 1)
                parts.setdefault(batch.step, []).extend(batch.seeds.tolist())
        assert list(parts.values()) == steps


def test_loader_goes_on_where_another_one_stood():
    graph, seeds = _for_loading()
    make = lambda **options: loader.NodeLoader(graph, seeds, [4, 2],
                                               **{"batch_size": 20, "seed": 1, **options})  # noqa: E731
    whole = make()
    straight = [_loaded(whole) for _ in range(3)]
    for stop in (0, 1, 5, 10, 11):
        first = make(depth=3)
        list(first)
        for i, _ in enumerate(first, 1):
            if i == stop:
                break
        state = json.loads(json.dumps(first.state_dict()))
        later = make(depth=0)
        later.load_state_dict(state)
        done = stop % 11  # a loop that ran to its end has begun the next epoch
        epoch = 1 if stop in (1, 5, 10) else 2 if stop == 0 else 1
        if stop == 11:  # left after the last batch, before the loader knew: nothing of the epoch is left
            assert list(later) == [] and later.epoch == 2
            continue
        assert _same(_loaded(later), straight[epoch][done:]) and later.epoch == epoch + 1
        assert _same(_loaded(first), straight[epoch][done:])  # so does the loop that was left
    two = [make(batch_size=10, rank=rank, world=2) for rank in range(2)]
    halfway = make()
    for i, _ in enumerate(halfway):
        if i == 3:
            break
    for part in two:
        part.load_state_dict(halfway.state_dict())
    together = [a.seeds.tolist() + b.seeds.tolist() for a, b in zip(*two)]
    assert together == [b[4] for b in straight[0][4:]]
    for other, words in ((make(seed=2), "seed 1, this one has 2"),
                         (make(batch_size=21), "total_batch 20, this one has 21"),
                         (loader.NodeLoader(graph, seeds[1:], [4, 2], batch_size=20, seed=1),
                          "seeds 217, this one has 216")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            other.load_state_dict(whole.state_dict())


def test_loader_batches_may_be_kept_unless_their_buffers_are_reused():
    graph, seeds = _for_loading()
    for dtype, rows in ((torch.float32, graph.features), (torch.float64, graph.features.double()),
                        (torch.float32, graph.features.half())):
        kept = list(loader.NodeLoader(graph._replace(features=rows), seeds, [4, 2], batch_size=20, dtype=dtype))
        assert all(torch.equal(b.x, rows[b.blocks[0].src_nodes.long()].to(dtype)) and b.x.dtype == dtype for b in kept)
    reused = list(loader.NodeLoader(graph, seeds, [4, 2], batch_size=20, reuse=True))
    assert len({batch.x.data_ptr() for batch in reused}) == 3


def test_loader_in_order_draws_the_same_in_each_epoch_and_takes_masks():
    graph, _ = _for_loading()
    mask = torch.rand(300) < 0.5
    batches = loader.NodeLoader(graph, mask, [4, 2], batch_size=64, shuffle=False)
    once = _loaded(batches)
    assert sum((b[4] for b in once), []) == mask.nonzero().flatten().tolist() and _same(once, _loaded(batches))
    for words, options in (("batch_size is 0", {"batch_size": 0}), ("depth is -1", {"depth": -1}),
                           ("threads is 0", {"threads": 0})):
        with pytest.raises(ValueError, match=words):
            loader.NodeLoader(graph, mask, [4, 2], **options)


def test_loader_says_what_does_not_fit_the_graph():
    indptr, indices = loader.from_edge_index([[0, 1, 2], [1, 2, 0]], 3)
    good = loader.Graph(indptr, indices, torch.ones(3, 2), torch.arange(3))
    for graph, seeds, options, complaint in (
        (good, torch.ones(2, dtype=torch.bool), {}, "seeds, a mask, has 2 rows: .* 3 nodes and 3 edges, and 3 rows"),
        (good, torch.ones(4, dtype=torch.bool), {}, "seeds, a mask, has 4 rows"),
        (good, [[0], [1]], {}, r"seeds is \[2, 1\]: node ids \[T\]"),
        (good._replace(features=np.ones((4, 2))), [0], {}, "features has 4 rows"),
        (good._replace(labels=torch.arange(2)), [0], {}, "labels has 2 rows"),
        (good._replace(labels=None), [0], {}, "labels is a NoneType"),
        (good, [0], {"edges": True}, "edge_features is a NoneType: .* 3 rows are needed"),
    ):
        with pytest.raises(ValueError, match=complaint):
            loader.NodeLoader(graph, seeds, [2], **options)
    batch = next(iter(loader.NodeLoader(good, [0, 2], [2])))
    with pytest.raises(ValueError, match="there are 1 blocks for 2 layers: one a layer"):
        SAGE(2, 4, 3, num_layers=2)(batch.blocks, batch.x)
    with pytest.raises(TypeError, match="indptr is a ndarray, a tensor is needed: torch.as_tensor.indptr."):
        NeighborSampler(indptr.numpy(), indices, [2])
    net = SAGE(2, 4, 3, num_layers=1)
    expected = inference(net, indptr, indices, good.features)
    assert torch.equal(inference(net, indptr.numpy(), indices.numpy(), good.features.numpy()), expected)
    with pytest.raises(ValueError, match="x has 2 rows, indptr is of 3 nodes"):
        inference(net, indptr, indices, good.features[:2])


def test_loader_reads_a_store(tmp_path):
    path = build_store(tmp_path / "g", **_graph(), backend="lmdb")
    graph = GraphStore.open(path)
    batches = list(loader.NodeLoader(graph, graph.split["train"], [3, 3], batch_size=32))
    table = torch.from_numpy(np.asarray(_graph()["features"]))
    assert all(torch.equal(b.x, table[b.blocks[0].src_nodes.long()]) for b in batches) and len(batches) == 2


def test_loader_brings_the_features_of_edges():
    graph, seeds = _for_loading()
    e = np.random.default_rng(0).random((len(graph.indices), 3))
    graph = types.SimpleNamespace(**graph._asdict(), edge_features=e)
    for options in ({}, {"reuse": True}, {"depth": 0, "dtype": torch.float64}, {"threads": 3, "depth": 4}):
        for batch in loader.NodeLoader(graph, seeds, [4, 2], batch_size=50, edges=True, **options):
            assert [len(rows) for rows in batch.edges] == [block.num_edges for block in batch.blocks]
            for rows, block in zip(batch.edges, batch.blocks):
                assert torch.equal(rows, torch.from_numpy(e)[block.edge_ids].to(options.get("dtype", torch.float32)))


def test_ring_with_too_few_slots_says_how_many():
    graph, seeds = _for_loading()
    sample = NeighborSampler(graph.indptr, graph.indices, [2]).sample
    for reuse in (True, False):
        ring = FeatureRing(graph.features, graph.labels, slots=2, reuse=reuse)
        with pytest.raises(ValueError, match=r"slot 2 of a ring with slots=2: prefetch\(depth=d\) uses d . 1 slots, so "
                                             r"give .* slots=3"):
            list(prefetch(lambda ids, slot: ring.fetch(slot, sample(ids, 0)), seeds.split(20), depth=2))


DTYPES_OF_FEATURES = ["float32", "float16", "bfloat16", "float64", "uint8", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES_OF_FEATURES)
def test_features_of_every_dtype_train_in_every_model_at_every_precision(dtype, tmp_path):
    """One step through train.py's own functions; what comes out is what float32 features give, and nothing is warned
    of."""
    graph = _graph(num_nodes=60, num_edges=400)
    table = torch.randint(0, 5, (60, 5), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    paths = {}
    for name, rows in (("plain", table.float()), ("typed", table)):
        paths[name] = build_store(tmp_path / name, **{**graph, "features": rows})
    assert disk.DTYPES == tuple(DTYPES_OF_FEATURES)
    for conv, precision in itertools.product(model.CONVS, ("fp32", "bf16", "fp64")):
        words = ["--model", conv, "--precision", precision, "--fanout", "3,3", "--hidden", "8", "--dropout", "0",
                 "--gpus", "0"]
        outputs = {}
        for name, path in paths.items():
            args, ranks = train.parse_args([*words, "--dataset", str(path)]), ddp.Ranks()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                graph_store, sampler_, ring = train.open_data(ranks, args, path)
                net = train.build_model(ranks, args, graph_store, ring)
                for batch in train.batches(args, ranks, graph_store, sampler_, ring, graph_store.split["train"]):
                    outputs[name] = train.predict(ranks, args, ring, net, batch)
                    torch.nn.functional.cross_entropy(outputs[name], batch.y).backward()
                assert train.exact_logits(ranks, args, graph_store, net).isfinite().all()
                if precision != "bf16":  # from Python, rows as they are
                    rows = graph_store.features.gather(batch.blocks[0].src_nodes)
                    assert net.eval()(batch.blocks, rows).isfinite().all()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        assert torch.equal(outputs["plain"], outputs["typed"]) or precision == "bf16"
        torch.testing.assert_close(outputs["plain"], outputs["typed"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("conv", model.CONVS)
def test_fp64_parts_of_a_batch_add_up_to_the_whole(conv):
    """What one process computes, two compute: gradients of parts against those of all, to 1e-12 of the largest."""
    graph, seeds = _for_loading()
    torch.manual_seed(2)
    net = GNN(5, 8, 7, conv=conv, num_layers=2, heads=2, norm="layer", dropout=0.0 if conv == "gat" else 0.5).double()
    net.degrees = model.graph_degrees(graph.indptr, graph.indices).double()

    def gradients(world):
        net.zero_grad()
        for rank in range(world):
            part = loader.NodeLoader(graph, seeds, [4, 3], batch_size=300 // world, rank=rank, world=world,
                                     dtype=torch.float64)
            for batch in part:
                torch.manual_seed(batch.global_step)
                torch.nn.functional.cross_entropy(net(batch.blocks, batch.x), batch.y, reduction="sum").backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    one = gradients(1)
    assert one.dtype == torch.float64
    for world in (2, 3):
        assert (gradients(world) - one).abs().max() < 1e-12 * one.abs().max()


def test_model_names_what_it_does_not_know():
    for words, options in (("conv 'GAT' is unknown: choose one of sage, sage-pool, gcn, gat, gin, gine",
                            {"conv": "GAT"}),
                           ("norm 'group' is unknown: choose one of none, layer, batch", {"norm": "group"}),
                           ("conv 'sage' with edge_dim 3: gat and gine take features", {"edge_dim": 3}),
                           ("conv 'gine' with edge_dim 0: .*gine needs them", {"conv": "gine"}),
                           ("num_layers is 0", {"num_layers": 0})):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            GNN(4, 8, 3, **options)


# ---------------------------------------------------------------------------------------------------------------------
# store.py and datasets.py


def _graph(num_nodes=200, num_edges=3000, width=5, classes=4, seed=0):
    """Keyword arguments of build_store for a random graph with self-loops, repeats and nodes without edges."""
    random = np.random.default_rng(seed)
    ids = random.permutation(num_nodes)
    return {
        "edge_index": random.integers(0, num_nodes - 3, (2, num_edges)),
        "features": random.standard_normal((num_nodes, width), np.float32),
        "labels": random.integers(0, classes, num_nodes),
        "num_classes": classes,
        "split": {"train": ids[:50], "valid": ids[50:80], "test": ids[80:150]},
    }


def _edges(graph):
    """(source, destination) pairs of an open store, as a sorted list."""
    dst = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.numpy()))
    return sorted(zip(graph.indices.tolist(), dst.tolist()))


def _sums(path):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(Path(path).iterdir())}


def _rewrite_meta(path, **changes):
    """Change fields of meta.json and keep its own checksum right."""
    meta = json.loads((path / "meta.json").read_text())
    meta.update(changes)
    (path / "meta.json").write_bytes(disk.dump_meta({k: v for k, v in meta.items() if v is not Ellipsis}))


def _run(script, *args):
    return subprocess.run([sys.executable, str(HERE / script), *map(str, args)], capture_output=True, text=True,
                          timeout=120)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_store_round_trip(tmp_path, backend, dtype):
    args = _graph()
    args["features"] = (torch.from_numpy(args["features"]).abs() * 10).to(dtype)
    path = build_store(tmp_path / "g", backend=backend, block_rows=7, **args)
    graph = GraphStore.open(path)
    assert (graph.num_nodes, graph.num_edges, graph.feature_dim, graph.num_classes) == (200, 3000, 5, 4)
    assert graph.indptr.dtype == torch.int64 and graph.indices.dtype == torch.int32
    assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    assert np.array_equal(graph.labels.numpy(), args["labels"])
    for name, ids in args["split"].items():
        assert np.array_equal(graph.split[name].numpy(), ids)
    assert graph.features.shape == (200, 5) and graph.features.dtype == dtype
    some, few = torch.randint(0, 200, (333,)), torch.tensor([199, 0, 0], dtype=torch.int32)
    for ids in (some, few, few[:0]):
        out = torch.empty(len(ids), 5, dtype=dtype)
        assert graph.features.gather(ids, out=out) is out
        assert torch.equal(out, args["features"][ids.long()])
        assert torch.equal(graph.features.gather(ids), out)
    for bad in (200, -1):
        with pytest.raises(IndexError, match=f"{bad}"):
            graph.features.gather(torch.tensor([3, bad]))
    with pytest.raises(ValueError, match="out is"):
        graph.features.gather(torch.tensor([3]), out=torch.empty(2, 5, dtype=dtype))
    assert verify(path) == []
    assert all(np.load(f, allow_pickle=False).size >= 0 for f in path.glob("*.npy"))


def test_store_neighbours_are_sorted_whatever_the_order(tmp_path, monkeypatch):
    args = _graph()
    a = build_store(tmp_path / "a", **args)
    shuffled = args["edge_index"][:, np.random.default_rng(1).permutation(3000)]
    monkeypatch.setattr(csc, "SORT_EDGES", 700)  # several ranges of destinations
    monkeypatch.setattr(csc, "EDGE_CHUNK", 101)
    b = build_store(tmp_path / "b", **dict(args, edge_index=torch.from_numpy(shuffled)))
    assert _sums(a) == _sums(b)
    graph = GraphStore.open(a)
    for v in range(graph.num_nodes):
        row = graph.indices[graph.indptr[v]:graph.indptr[v + 1]]
        assert torch.equal(row, row.sort().values)


def test_store_edges_are_gone_over_twice_however_many_ranges_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(csc, "EDGE_CHUNK", 50)
    whole, passes = _sums(build_store(tmp_path / "whole", **_graph())), []
    for sort_edges in (2000, 300, 20):
        monkeypatch.setattr(csc, "SORT_EDGES", sort_edges)
        edges = store.edge_chunks
        with monkeypatch.context() as counted:
            counted.setattr(store, "edge_chunks", lambda *args: passes.append(sort_edges) or edges(*args))
            assert _sums(build_store(tmp_path / f"{sort_edges}", **_graph())) == whole
        assert passes.count(sort_edges) == 2 and not list((tmp_path / f"{sort_edges}").glob("spilled*"))


@pytest.mark.parametrize("sort_edges", [500, 1 << 27])
@pytest.mark.parametrize("form", ["edge_index", "csc"])
@pytest.mark.parametrize("options", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_store_graph_options(tmp_path, monkeypatch, options, form, sort_edges):
    monkeypatch.setattr(csc, "SORT_EDGES", sort_edges)
    monkeypatch.setattr(csc, "EDGE_CHUNK", 333)
    args = _graph(num_nodes=60)
    args["split"] = {"train": [1]}
    pairs = list(zip(*args["edge_index"].tolist()))
    if form == "csc":
        order = np.argsort(args["edge_index"][1], kind="stable")
        args["indices"] = args["edge_index"][0][order]
        args["indptr"] = np.concatenate([[0], np.cumsum(np.bincount(args.pop("edge_index")[1], minlength=60))])
    symmetrize, drop_self_loops, drop_duplicates = map(bool, options)
    if drop_self_loops:
        pairs = [(u, v) for u, v in pairs if u != v]
    if symmetrize:
        pairs += [(v, u) for u, v in pairs]
    if drop_duplicates:
        pairs = set(pairs)
    path = build_store(tmp_path / "g", symmetrize=symmetrize, drop_self_loops=drop_self_loops,
                       drop_duplicates=drop_duplicates, **args)
    graph = GraphStore.open(path)
    assert _edges(graph) == sorted(pairs)
    assert graph.meta["options"] == {"symmetrize": symmetrize, "drop_self_loops": drop_self_loops,
                                     "drop_duplicates": drop_duplicates}
    assert verify(path) == []


def _columns_slowly(edges, options, timed):
    """What the store has to hold of edges (source, destination, time, number), in its order, in plain Python."""
    rows = [(dst, src, time, 0, number) for src, dst, time, number in edges if src != dst
            or not options["drop_self_loops"]]
    if options["symmetrize"]:
        rows += [(src, dst, time, 1, number) for dst, src, time, _, number in rows]
    rows.sort(key=lambda row: (*row[:2], row[2] if timed else 0, *row[3:]))
    if options["drop_duplicates"]:
        rows = [next(group) for _, group in itertools.groupby(rows, lambda row: row[:2])]
    return sorted(rows, key=lambda row: (row[0], row[2] if timed else 0))


@pytest.mark.parametrize("seed", range(40))
def test_store_columns_follow_their_edges(seed, tmp_path, monkeypatch):
    """Random multigraphs, every option, edges in pieces and sorted in ranges, against plain Python."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(csc, "EDGE_CHUNK", int(rng.integers(1, 200)))
    monkeypatch.setattr(csc, "SORT_EDGES", int(rng.integers(8, 2000)))
    monkeypatch.setattr(csc, "FEW_EDGES", int(rng.integers(1, 100)))
    monkeypatch.setattr(columns, "ROW_BYTES", int(rng.integers(8, 4000)))
    V, M = int(rng.integers(1, 30)), int(rng.integers(0, 300))
    src, dst = edge_index = rng.integers(0, V, (2, M))
    times, weights = rng.integers(-3, 12, M), rng.random(M) * (rng.random(M) < 0.9)
    dtype = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.float16][seed % 6]
    rows = (torch.from_numpy(rng.random((M, 3))) * 200).to(dtype)
    given = {"edge_weight": weights, "edge_time": times.astype(float), "edge_features": rows}
    given = {name: values for name, values in given.items() if rng.random() < 0.7}
    options = dict(zip(("symmetrize", "drop_self_loops", "drop_duplicates"), (rng.random(3) < 0.5).tolist()))
    graph = {"edge_index": torch.from_numpy(edge_index) if seed % 2 else edge_index}
    if seed % 3 == 0:
        order = np.argsort(dst, kind="stable")
        graph = {"indices": src[order], "indptr": np.append(0, np.cumsum(np.bincount(dst, minlength=V)))}
        given = {name: values[order] for name, values in given.items()}
        src, dst, times, weights, rows = src[order], dst[order], times[order], weights[order], rows[order]
    path = build_store(tmp_path / "g", **graph, features=np.zeros((V, 1), np.float32), labels=np.zeros(V, int),
                       split={"train": [0]}, node_time=np.arange(V), **given, **options)  # fmt: skip
    found, timed = GraphStore.open(path), "edge_time" in given
    expected = _columns_slowly(zip(*(a.tolist() for a in (src, dst, times, np.arange(M)))), options, timed)
    if "indptr" in graph and not timed and not any(options.values()):
        expected = sorted(expected, key=lambda row: row[-1])  # stored as it was
    assert np.repeat(np.arange(V), np.diff(found.indptr)).tolist() == [row[0] for row in expected]
    assert found.indices.tolist() == [row[1] for row in expected]
    numbers = torch.tensor([row[-1] for row in expected], dtype=torch.int64)
    for name, values in (("edge_weight", torch.from_numpy(weights).float()), ("edge_time", torch.from_numpy(times)),
                         ("edge_features", rows)):  # fmt: skip
        there = getattr(found, name)
        assert (there is None) == (name not in given)
        assert there is None or there.dtype == values.dtype and torch.equal(there, values[numbers]), name
    assert found.node_time.tolist() == list(range(V)) and found.edge_dim == 3 * ("edge_features" in given)
    assert verify(path) == [] and {file.name for file in path.iterdir()} == {"meta.json", *found.meta["files"]}


def test_store_csc_whose_lists_rise_in_time_is_stored_as_it_is(tmp_path):
    args = {**_graph(num_nodes=4), "edge_index": None, "split": {"train": [0]}, "indptr": [0, 3, 3, 5, 5]}
    args |= {"indices": Rows([5], np.int64, [np.array([2, 1, 0, 1, 0])]), "edge_features": np.arange(5) > 2}
    graph = GraphStore.open(build_store(tmp_path / "a", **args, edge_time=[5, 5, 7, 1, 2]))
    assert graph.indices.tolist() == [2, 1, 0, 1, 0] and graph.edge_features.tolist() == [[0], [0], [0], [1], [1]]
    args["indices"] = Rows([5], np.int64, [np.array([2, 1, 0, 1, 0])])
    with pytest.raises(StoreError, match="its lists must rise in edge_time"):
        build_store(tmp_path / "b", **args, edge_time=[5, 4, 7, 1, 2])


def test_store_columns_that_make_no_sense_are_refused(tmp_path):
    w, nan = np.ones(3000), np.ones((3000, 2))
    nan[2999, 1] = np.nan
    for changes, message in (
        ({"edge_weight": w[1:]},
         r"edge_weight is a ndarray \[2999\]: an array \[3000\] is needed, a row for each edge"),
        ({"edge_weight": nan}, r"\[3000, 2\]: an array \[3000\]"),
        ({"edge_weight": -w}, r"edge_weight\[0\] is -1.0: a weight says how likely"),
        ({"edge_weight": np.where(np.arange(3000) == 2000, 1e300, 1)}, r"edge_weight\[2000\] is 1e\+300"),
        ({"edge_weight": w * 1j}, "edge_weight has dtype complex128"),
        ({"edge_time": w / 2}, r"edge_time\[0\] is 0.5: whole numbers are needed"),
        ({"edge_time": np.full(3000, np.nan)}, r"edge_time\[0\] is nan"),
        ({"edge_time": np.full(3000, 2**64 - 1, np.uint64)}, r"whole numbers below 2\^63"),
        ({"node_time": w}, r"node_time is a ndarray \[3000\]: an array \[200\] is needed, a row for each node"),
        ({"edge_features": nan}, r"edge_features\[2999, 1\] is nan"),
        ({"edge_features": nan[:, :0]}, r"\[3000, 0\]: an array \[3000, D\]"),
        ({"edge_features": w.astype("U1")}, "edge_features has dtype str"),
        ({"edge_features": Rows([3000, 1], np.int8, [])}, r"edge_features is a Rows \[3000, 1\]: an array"),
    ):
        with pytest.raises(StoreError, match=message):
            build_store(tmp_path / "g", **_graph(), **changes)
        assert not (tmp_path / "g").exists()


def test_store_a_damaged_column_is_found_by_verify_and_old_stores_open(tmp_path):
    rng, args = np.random.default_rng(0), _graph()
    path = build_store(tmp_path / "g", **args, edge_weight=rng.random(3000), edge_time=rng.integers(0, 9, 3000),
                       edge_features=rng.random((3000, 2)), node_time=np.arange(200))  # fmt: skip
    said = store.info(path)
    assert "weight, features 2 x float64, time 0 to 8, nodes' time 0 to 199" in said and "format         3" in said
    good = json.loads((path / "meta.json").read_text())
    for name, value, problem in (("edge_weight", -1, "likely"), ("edge_time", 99, "earlier than the one"),
                                 ("edge_features", math.nan, "finite")):  # fmt: skip
        before = (path / f"{name}.npy").read_bytes()
        array = np.load(path / f"{name}.npy", mmap_mode="r+")
        array[0] = value
        array.flush()
        assert verify(path)[0].startswith(f"{name}.npy: its sha256")
        record = {**good["files"][f"{name}.npy"], "sha256": disk.sha256_of(path / f"{name}.npy").hexdigest()}
        _rewrite_meta(path, files={**good["files"], f"{name}.npy": record})
        assert any(found.startswith(f"{name}.npy: ") and problem in found for found in verify(path)), name
        (path / f"{name}.npy").write_bytes(before)
    for changes in ({"edge_dim": 3}, {"edge_dtype": "float32"}, {"edge_dim": ...}, {"edge_dtype": []}):
        _rewrite_meta(path, **{**good, **changes})
        with pytest.raises(StoreError, match="meta.json"):
            GraphStore.open(path)
    _rewrite_meta(path, **good)
    assert verify(path) == []
    old = build_store(tmp_path / "old", **args)
    assert json.loads((old / "meta.json").read_text()).keys().isdisjoint({"edge_dim", "edge_dtype"})
    _rewrite_meta(old, format_version=2)  # which differs in nothing else
    graph = GraphStore.open(old)
    assert verify(old) == [] and graph.edge_dim == 0
    assert {graph.edge_weight, graph.edge_time, graph.edge_features, graph.node_time} == {None}


def test_store_keeps_csc_in_the_given_order_and_reads_streams(tmp_path):
    args = _graph(num_nodes=4)
    x = args["features"]
    args.update(edge_index=None, split={"train": [0]}, indptr=[0, 3, 3, 5, 5],
                indices=Rows([5], np.int32, iter([np.array([3, 1, 2], np.int32), np.array([0, 0], np.int32)])),
                features=Rows([4, 5], np.float32, (x[a:a + 1] for a in range(4))))
    graph = GraphStore.open(build_store(tmp_path / "g", **args))
    assert graph.indices.tolist() == [3, 1, 2, 0, 0]
    assert torch.equal(graph.features.tensor, torch.from_numpy(x))
    args.update(indices=[3, 1, 2, 0, 0], features=Rows([4, 5], np.float32, [x[:3]]))
    with pytest.raises(StoreError, match="3 rows, 4 were announced"):
        build_store(tmp_path / "h", **args)


def test_store_without_edges_and_with_empty_splits(tmp_path):
    args = dict(_graph(), edge_index=np.empty((2, 0), np.int64), split={"train": [5]})
    for option in (False, True):
        graph = GraphStore.open(build_store(tmp_path / f"g{option}", symmetrize=option, **args))
        assert graph.num_edges == 0 and len(graph.split["test"]) == 0 and verify(graph.path) == []


def _bad_inputs():
    x, nan = np.zeros((200, 5), np.float32), np.zeros((200, 5), np.float32)
    nan[170, 3] = np.nan
    edge = np.zeros((2, 9), np.int64)
    edge[1, 7] = 200
    ok = list(range(50))
    return {
        "edge out of range": ({"edge_index": edge}, "edge 7 goes from node 0 to node 200"),
        "negative edge": ({"edge_index": [[0, -4], [0, 0]]}, "edge 1 goes from node -4"),
        "edge shape": ({"edge_index": edge.T}, "edge_index has shape"),
        "edge dtype": ({"edge_index": edge.astype(float)}, "edge_index has dtype float64"),
        "no graph": ({"edge_index": None}, "either as edge_index or as indptr"),
        "both forms": ({"indptr": [0], "indices": [0]}, "either as edge_index or as indptr"),
        "label too large": ({"labels": np.full(200, 4)}, r"labels\[0\] is 4"),
        "label below -1": ({"labels": np.full(200, -2)}, r"labels\[0\] is -2"),
        "labels dtype": ({"labels": np.zeros(200)}, "labels has dtype float64"),
        "labels length": ({"labels": [0, 1]}, r"labels has shape \[2\]: \[200\]"),
        "unlabelled in split": ({"labels": np.arange(200) % 2 - 1}, "holds node [0-9]+, which has no label"),
        "no label": ({"labels": np.full(200, -1), "num_classes": None}, "none of the 200 nodes has a label"),
        "NaN": ({"features": nan}, r"features\[170, 3\] is nan"),
        "infinity": ({"features": torch.tensor(nan).nan_to_num(torch.inf).bfloat16()}, r"features\[170, 3\] is inf"),
        "features shape": ({"features": x[0]}, "features has shape"),
        "features dtype": ({"features": x.astype(complex)}, "features has dtype complex128"),
        "split overlap": ({"split": {"train": ok, "valid": [70, 49]}}, "node 49 is in split 'train' and in 'valid'"),
        "split repeat": ({"split": {"train": [4, 9, 4]}}, "node 4 more than once"),
        "split range": ({"split": {"train": ok, "test": [200]}}, "'test' holds node 200"),
        "split empty": ({"split": {"train": [], "test": [1]}}, "'train' is empty"),
        "split name": ({"split": {"train": ok, "val": [60]}}, "part 'val'"),
        "backend": ({"backend": "sqlite"}, "backend 'sqlite'"),
        "classes": ({"num_classes": 0}, "num_classes is 0"),
        "block_rows": ({"block_rows": 0}, "block_rows is 0"),
        "indptr falls": ({"edge_index": None, "indptr": [0, 5, 3, *[9] * 198], "indices": [0] * 9},
                         "falls from 5 to 3"),
        "indptr end": ({"edge_index": None, "indptr": [0] * 201, "indices": [0] * 9}, "from 0 to 0"),
        "indptr length": ({"edge_index": None, "indptr": [0, 9], "indices": [0] * 9}, r"indptr has shape \[2\]"),
        "indices range": ({"edge_index": None, "indptr": [0] * 200 + [2], "indices": [0, 200]}, r"indices\[1\] is 200"),
    }


@pytest.mark.parametrize("case", _bad_inputs())
def test_store_refuses_bad_input_and_leaves_nothing(tmp_path, case):
    changes, message = _bad_inputs()[case]
    with pytest.raises(StoreError, match=message) as error:
        build_store(tmp_path / "g", **{**_graph(), **changes})
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"])
def test_store_takes_every_layout_of_an_array(tmp_path, dtype):
    args = _graph(num_nodes=60, num_edges=90)
    args["split"] = {"train": [1, 2], "test": _mask([5, 9], 60)}
    x = (np.abs(args["features"]) * 3).astype(dtype)
    frozen = x.copy()
    frozen.flags.writeable = False
    want = torch.from_numpy(x.astype("u1") if dtype == "?" else x)
    gaps = np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3]
    for number, features in enumerate((x, x.astype(f">{dtype}"), np.asfortranarray(x), gaps, x[::-1].copy()[::-1],
                                       frozen,
                                       torch.from_numpy(x), torch.from_numpy(gaps.copy()).T.contiguous().T)):
        labels, edges = args["labels"].astype(">i2"), np.asfortranarray(args["edge_index"].astype(">u4"))
        graph = GraphStore.open(build_store(tmp_path / str(number),
                                            **dict(args, features=features, labels=labels, edge_index=edges)))
        assert graph.features.dtype == want.dtype and torch.equal(graph.features.gather(torch.arange(60)), want)
        assert graph.labels.tolist() == args["labels"].tolist() and graph.split["test"].tolist() == [5, 9]
        assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    lists = {name: value if name in ("split", "num_classes") else value.tolist()
             for name, value in dict(args, features=x).items()}
    graph = GraphStore.open(build_store(tmp_path / "list", **lists))
    assert graph.features.dtype == {"f": torch.float64, "b": None}.get(x.dtype.kind, torch.int64) or dtype == "?"


def test_store_says_what_is_wrong_with_an_argument(tmp_path):
    good = GraphStore.open(build_store(tmp_path / "good", **_graph()))
    frame = types.SimpleNamespace(shape=(200, 5))
    for message, changes in (
        ("features is a SimpleNamespace that makes no array", {"features": frame}),
        ("features is a list that makes no array", {"features": [[1.0], [1.0, 2.0]]}),
        ("features is a NoneType", {"features": None}),
        ("features is sparse", {"features": torch.eye(200).to_sparse()}),
        ("edge_index is a str", {"edge_index": "edges"}),
        ("edge_index is a generator", {"edge_index": (_ for _ in ())}),
        ("labels is a list that makes no array", {"labels": [[1], [2, 3]]}),
        ("labels holds 18446744073709551615", {"labels": np.full(200, 2**64 - 1, np.uint64)}),
        ("num_classes is 16777217: from 1 to 16,777,216", {"num_classes": (1 << 24) + 1}),
        ("labels run up to 5,003 and 4 different", {"labels": np.arange(200) % 4 + 5000, "num_classes": None}),
        (r"split 'valid' is a mask of shape \[199\]", {"split": {"train": [1], "valid": np.ones(199, bool)}}),
        (r"split 'train' is a mask of shape \[3\]", {"split": {"train": [True, False, True]}}),
        ("split 'train' has dtype float64", {"split": {"train": [0.5]}}),
    ):
        with pytest.raises(StoreError, match=message) as error:
            build_store(tmp_path / "bad", **{**_graph(), **changes})
        assert "\n" not in str(error.value)
    build_store(tmp_path / "many_classes", **dict(_graph(), num_classes=5000, labels=np.arange(200) + 4000))
    for message, call in (
        (r"ids is \[2\] int64: an int32 or int64 tensor", lambda: good.features.gather(np.arange(2))),
        ("ids is list: an int32", lambda: good.features.gather([1, 2])),
        (r"ids is \[2\] torch.bool", lambda: good.features.gather(torch.ones(2, dtype=torch.bool))),
        (r"out is \[2, 5\] float32: a tensor \[2, 5\]",
         lambda: good.features.gather(torch.arange(2), out=np.zeros((2, 5), np.float32))),
        ("put_rows is for a store with backend lmdb",
         lambda: good.features.put_rows(torch.arange(1), torch.ones(1, 5))),
        (r"edge_index \[3\]: \[G\], \[G\] and",
         lambda: block_diagonal([2], [1], [0, 1, 1], np.ones((2, 1)), np.ones((1, 1)), np.ones((1, 1)))),
        ("edge_index has dtype float64", lambda: block_diagonal([2], [1], [[0.0], [1.5]], *[np.ones((2, 1))] * 3)),
        ("x is a ndarray that makes no tensor",
         lambda: block_diagonal([2], [1], [[0], [1]], np.array([["a"]] * 2), *[np.ones((1, 1))] * 2)),
        ("a batch has no graphs", lambda: build_graphs(tmp_path / "none", [
            block_diagonal([], [], np.empty((2, 0), int), *[np.empty((0, 2), np.float32)] * 3)])),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=message):
            call()
    batch = block_diagonal([2], [1], [[0], [1]], np.ones((2, 1), ">f4"), np.ones((1, 1), ">f8"), np.ones((1, 1), ">i4"))
    assert (batch.x.dtype, batch.e.dtype, batch.y.dtype) == (torch.float32, torch.float64, torch.int32)
    assert {entry.name for entry in tmp_path.iterdir()} == {"good", "many_classes"}


def test_store_what_is_built_can_be_opened(tmp_path, monkeypatch):
    """A build gets its name when the reader has opened it; what is larger than the disk is refused before it is
    written."""
    def refuse(path):
        raise StoreError(f"{path} cannot be opened")

    for kind, build in ((GraphStore, lambda path: build_store(path, **_graph())),
                        (GraphDataset, lambda path: build_graphs(path, [_graphs(3)]))):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "open", refuse)
            with pytest.raises(StoreError, match="cannot be opened"):
                build(tmp_path / "s")
    wide = Rows([1 << 20, 1 << 20], np.float32, iter(()))
    with pytest.raises(StoreError, match="no room for .*it takes about 4.4 TB"):
        build_store(tmp_path / "s", edge_index=[[0], [1]], features=wide, labels=np.zeros(1 << 20, int),
                    split={"train": [0]})
    assert list(tmp_path.iterdir()) == []


def test_store_existing_target_stays(tmp_path):
    path = build_store(tmp_path / "g", **_graph())
    before = _sums(path)
    with pytest.raises(StoreError, match="exists already"):
        build_store(path, **_graph(seed=1))

    def race():  # somebody else completes the target while this build is at work
        shutil.copytree(path, tmp_path / "h")
        yield _graph()["features"]

    with pytest.raises(StoreError, match="exists already"):
        build_store(tmp_path / "h", **dict(_graph(seed=1), features=Rows((200, 5), np.float32, race())))
    assert _sums(path) == _sums(tmp_path / "h") == before
    assert {p.name for p in tmp_path.iterdir()} == {"g", "h"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_store_build_that_fails_leaves_nothing(tmp_path, error):
    def rows():
        yield np.zeros((100, 5), np.float32)
        raise error

    for backend in ("mmap", "lmdb"):
        with pytest.raises(error):
            build_store(tmp_path / "g", backend=backend, **dict(_graph(), features=Rows((200, 5), np.float32, rows())))
        assert list(tmp_path.iterdir()) == []


def test_store_removes_what_dead_builds_left(tmp_path):
    """A build that lives has its folder locked, in another container as well, where its process cannot be seen."""
    stale, alive, other = (tmp_path / f".{name}.building.{n}" for n, name in enumerate(("g", "g", "other")))
    for directory in (stale, alive, other):
        directory.mkdir()
        (directory / "indices.npy").write_bytes(b"half")
    code = (f"import fcntl, os, time; fcntl.flock(os.open({str(alive)!r}, os.O_RDONLY), fcntl.LOCK_EX); "
            "print(flush=True); time.sleep(99)")
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    builder.stdout.readline()
    try:
        build_store(tmp_path / "g", **_graph())
        assert not stale.exists() and alive.exists() and other.exists()
    finally:
        builder.kill()
        builder.communicate()


def test_store_build_leaves_no_folders_behind_where_it_failed(tmp_path):
    with pytest.raises(StoreError, match="labels"):
        build_store(tmp_path / "a" / "b" / "g",
                    **dict(_graph(), split={"train": [0, 0]}, features=np.zeros((3, 2)), labels=[0]))
    with pytest.raises(StoreError, match="finite"):
        build_store(tmp_path / "a" / "b" / "g", **dict(_graph(), features=np.full((200, 5), np.nan, np.float32)))
    assert list(tmp_path.iterdir()) == []
    build_store(tmp_path / "a" / "b" / "g", **_graph())
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == ["g"]


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_full_disk(tmp_path, backend):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs takes root: {mounted.stderr.strip()}")
    try:
        before = _sums(build_store(small / "old", backend=backend, **_graph()))
        with pytest.raises(StoreError, match=r"no room for .*new.* takes about .* free") as error:
            build_store(small / "new", backend=backend, **_graph(num_nodes=20_000, width=50))
        assert "\n" not in str(error.value)
        assert [p.name for p in small.iterdir()] == ["old"] and _sums(small / "old") == before
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_open_refuses_damage(tmp_path, backend):
    path = build_store(tmp_path / "g", backend=backend, **_graph())
    good = {f.name: f.read_bytes() for f in path.iterdir()}
    for name in good:
        (path / name).write_bytes(good[name][:-5])
        sizes = "meta.json" if name == "meta.json" else f"{len(good[name]) - 5} bytes and should have {len(good[name])}"
        with pytest.raises(StoreError, match=f"{name}.*{'' if name == 'meta.json' else sizes}"):
            GraphStore.open(path)
        (path / name).unlink()
        with pytest.raises(StoreError, match=name):
            GraphStore.open(path)
        if name != "meta.json":  # another kind of file of the right size
            (path / name).write_bytes(b"x" * len(good[name]))
            with pytest.raises(StoreError, match=name):
                GraphStore.open(path)
        (path / name).write_bytes(good[name])
    GraphStore.open(path)


def test_store_open_refuses_meta_that_makes_no_sense(tmp_path):
    path = build_store(tmp_path / "g", **_graph())
    good = json.loads((path / "meta.json").read_text())
    _rewrite_meta(path, format_version=7)
    with pytest.raises(StoreError, match=r"store format 7; this code reads 2 and 3; rebuild it"):
        GraphStore.open(path)
    for name in ("format", "num_nodes", "num_edges", "num_classes", "feature_dim", "feature_dtype", "backend", "files",
                 "block_rows", "options"):
        for value in (..., None, -1, 1 << 62, 1.5, True, "x", [], {}):
            if name in ("options", "block_rows") and value == {}:
                continue
            _rewrite_meta(path, **dict(good, **{name: value}))
            with pytest.raises(StoreError, match="meta.json"):
                GraphStore.open(path)
    for record in (None, {}, dict(good["files"]["labels.npy"], shape=[199]),
                   dict(good["files"]["labels.npy"], dtype="object"), dict(good["files"]["labels.npy"], bytes="9")):
        _rewrite_meta(path, **dict(good, files=dict(good["files"], **{"labels.npy": record})))
        with pytest.raises(StoreError, match="meta.json"):
            GraphStore.open(path)
    for text in ("", "[]", "{", "[" * 100_000, "\xff\x00", json.dumps(good), json.dumps(dict(good, source="else"))):
        (path / "meta.json").write_text(text, encoding="latin1")
        with pytest.raises(StoreError, match="meta.json"):
            GraphStore.open(path)
    with pytest.raises(StoreError, match="is no store"):
        GraphStore.open(tmp_path / "nowhere")


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_verify_names_the_file_with_a_flipped_bit(tmp_path, backend):
    path = build_store(tmp_path / "g", backend=backend, **_graph(num_nodes=160, num_edges=200))
    random = np.random.default_rng(0)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for position in [0, 20, len(good) - 1, *random.integers(0, len(good), 8)]:
            bad = bytearray(good)
            bad[position] ^= 1 << int(random.integers(8))
            file.write_bytes(bad)
            problems = verify(path)
            assert problems and all(p.startswith(f"{file.name}: ") for p in problems), (file, position, problems)
            try:
                GraphStore.open(path)
            except StoreError:
                pass
        file.write_bytes(good)
    assert verify(path) == []


def test_store_verify_looks_behind_the_checksums(tmp_path, monkeypatch):
    """A store that was written wrong, with right checksums, is found out by its structure."""
    path = build_store(tmp_path / "g", **_graph())
    for name, position, value in (("indptr", 5, 1 << 40), ("indices", 3, 200), ("labels", 9, 4), ("labels", 9, -2),
                                  ("train", 0, 10**6), ("indptr", 0, 1)):
        good, meta = (path / f"{name}.npy").read_bytes(), (path / "meta.json").read_bytes()
        array = np.load(path / f"{name}.npy", mmap_mode="r+")
        array[position] = value
        array.flush()
        files = json.loads(meta)["files"]
        files[f"{name}.npy"]["sha256"] = disk.sha256_of(path / f"{name}.npy").hexdigest()
        _rewrite_meta(path, files=files)
        assert any(name in problem for problem in verify(path)), name
        (path / f"{name}.npy").write_bytes(good)
        (path / "meta.json").write_bytes(meta)


def test_store_command_line(tmp_path, capsys):
    path = build_store(tmp_path / "g", backend="lmdb", source="a test", **_graph())
    assert store.main(["info", str(path)]) == 0
    info = capsys.readouterr().out
    assert "3,000" in info and "a test" in info and "valid 30" in info
    assert store.main(["verify", str(path)]) == 0
    good = capsys.readouterr().out
    assert good.count("OK") == 8 and "BAD" not in good
    with open(path / "indices.npy", "r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    assert store.main(["verify", str(path)]) == 1
    bad = capsys.readouterr().out
    assert "BAD indices.npy" in bad and bad.count("OK") == 7
    for command in ("info", "verify"):
        assert store.main([command, str(tmp_path / "nothing")]) == 2
    none = _run("store.py", "info", tmp_path / "nothing")
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and "no store" in none.stderr


def test_store_verify_trusts_nothing(tmp_path, capsys):
    """Digests that are none, pipes and devices in the place of files, files that nobody knows."""
    path = build_store(tmp_path / "g", **_graph())
    good = (path / "meta.json").read_bytes()
    for digest in ("", "0" * 63, 7, None):
        files = json.loads(good)["files"]
        files["labels.npy"]["sha256"] = digest
        (path / "meta.json").write_bytes(disk.dump_meta(dict(json.loads(good), files=files)))
        assert verify(path)[0].startswith("meta.json: "), digest
    (path / "meta.json").unlink()
    for place in (lambda: (path / "meta.json").symlink_to("/dev/zero"), lambda: os.mkfifo(path / "meta.json")):
        place()
        assert "no regular file" in verify(path)[0]
        (path / "meta.json").unlink()
    (path / "meta.json").write_bytes(good)
    (path / "labels.npy").rename(tmp_path / "kept")
    os.mkfifo(path / "labels.npy")
    assert "no regular file" in verify(path)[0] and store.main(["verify", str(path)]) == 1
    (path / "labels.npy").unlink()
    (tmp_path / "kept").rename(path / "labels.npy")
    (path / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert store.main(["verify", str(path)]) == 0
    assert "--  notes.txt: not part of the store" in capsys.readouterr().out
    (path / "meta.json").write_bytes(good[:-2])
    assert store.main(["verify", str(path)]) == 1 and capsys.readouterr().out.startswith("BAD meta.json: ")


def _gather_in_child(features, path, queue):
    ids = torch.arange(150)
    queue.put([float(f.gather(ids).double().sum()) for f in (features, GraphStore.open(path).features) if f])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_store_lmdb_in_threads_and_processes(tmp_path, method):
    args = _graph()
    path = build_store(tmp_path / "g", backend="lmdb", block_rows=3, **args)
    features, second = GraphStore.open(path).features, GraphStore.open(path).features
    x, errors = torch.from_numpy(args["features"]), []

    def work(seed):
        ids = torch.randint(0, 200, (500,), generator=torch.Generator().manual_seed(seed))
        for f in (features, second) * 5:
            if not torch.equal(f.gather(ids), x[ids]):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_gather_in_child, args=(features if method == "fork" else None, path, queue),
                            daemon=True)  # fmt: skip
    child.start()
    assert queue.get(timeout=60) == [float(x[:150].double().sum())] * (2 if method == "fork" else 1)
    child.join()
    assert torch.equal(features.gather(torch.arange(5)), x[:5])


# ---------------------------------------------------------------------------------------------------------------------
# datasets


SMALL = "synthetic:nodes=3000,degree=12,features=8,classes=5"


def test_datasets_synthetic_is_the_same_for_the_same_seed(tmp_path, monkeypatch):
    a = prepare(SMALL, tmp_path / "a", progress=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    b = prepare(f"{SMALL},seed=0", tmp_path / "b", progress=False)
    c = prepare(f"{SMALL},seed=1", tmp_path / "b", progress=False)
    assert a.name == b.name != c.name
    assert _sums(a) == _sums(b)
    assert _sums(a)["indices.npy"] != _sums(c)["indices.npy"]
    graph = GraphStore.open(a)
    assert verify(a) == []
    degrees = graph.indptr.diff().double()
    assert 11 < degrees.mean() < 13 and 0.5 < degrees.log().std() < 0.7
    assert graph.num_classes == 5 and graph.labels.unique().tolist() == [0, 1, 2, 3, 4]
    assert [len(ids) for ids in graph.split.values()] == [240, 60, 2700]
    destination = torch.repeat_interleave(torch.arange(3000), graph.indptr.diff())
    near = (graph.indices // 150 == destination // 150).double().mean()
    assert 0.5 < near < 0.6


def test_datasets_synthetic_takes_the_graph_to_classify(tmp_path):
    """Features alone name the class of few nodes; the mean over neighbours names that of most."""
    graph = GraphStore.open(prepare("synthetic:nodes=20000,classes=10", tmp_path, progress=False))
    x, y = graph.features.tensor.clone(), graph.labels
    train, test = graph.split["train"], graph.split["test"]

    def accuracy(h):
        centroids = torch.stack([h[train[y[train] == c]].mean(0) for c in range(graph.num_classes)])
        return (torch.cdist(h[test], centroids).argmin(1) == y[test]).double().mean()

    alone = accuracy(x)
    for _ in range(2):
        x = torch.nn.functional.embedding_bag(graph.indices.long(), x, graph.indptr[:-1], mode="mean")
    assert alone < 0.6 and accuracy(x) > 0.8, (alone, accuracy(x))


def test_datasets_existing_stores_and_bad_names(tmp_path):
    path = prepare(SMALL, tmp_path, progress=False)
    before = path.stat().st_mtime_ns
    assert prepare(SMALL, tmp_path) == prepare(path) == prepare(str(path)) == path
    assert path.stat().st_mtime_ns == before
    assert prepare(SMALL, tmp_path, backend="lmdb", progress=False) != path
    for name, message in (("reddit", "synthetic, cora.*ogbn-products"), ("synthetic:nodes", "nodes.*degree"),
                          ("synthetic:size=4", "'size=4'.*nodes, degree"), ("synthetic:nodes=x", "nodes='x' is no int"),
                          ("synthetic:nodes=0", "nodes=0"), ("synthetic:train=0", "train=0"),
                          ("synthetic:train=200000", "train=200000"), ("synthetic:noise=nan", "noise"),
                          ("synthetic:train=nan", "train=nan"),
                          ("cora:x=1", "cora"), ("nothing.npz", "cannot read nothing.npz")):
        with pytest.raises(StoreError, match=message) as error:
            prepare(name, tmp_path)
        assert "\n" not in str(error.value)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(StoreError, match="nodes=0"):
        prepare("synthetic:nodes=0", tmp_path / "deep" / "root")
    assert not (tmp_path / "deep" / "root").exists()


def _prepare_in_child(root, queue):
    queue.put(str(prepare(SMALL, root, progress=False)))


def test_datasets_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_prepare_in_child, args=(tmp_path, queue), daemon=True) for _ in range(3)]
    [c.start() for c in children]
    paths = {queue.get(timeout=60) for _ in children}
    [c.join() for c in children]
    assert len(paths) == 1 and verify(paths.pop()) == [] and len(list(tmp_path.iterdir())) == 1


def _save_npz(file, seed=0, **entries):
    args = _graph(seed=seed)
    content = {"edge_index": args["edge_index"], "x": args["features"], "y": args["labels"]} | entries
    np.savez(file, **{k: v for k, v in content.items() if v is not None})
    return content


def test_datasets_npz(tmp_path):
    file = tmp_path / "own.npz"
    args = _save_npz(file, train_idx=np.arange(9), valid_idx=np.arange(9, 20), test_idx=np.arange(20, 50))
    path = prepare(file, tmp_path, progress=False)
    graph = GraphStore.open(path)
    assert torch.equal(graph.features.tensor, torch.from_numpy(args["x"]))
    assert _edges(graph) == sorted(zip(*args["edge_index"].tolist()))
    assert [len(ids) for ids in graph.split.values()] == [9, 11, 30]
    assert prepare(str(file), tmp_path) == path
    _save_npz(file, seed=1, train_idx=np.arange(9))
    assert prepare(file, tmp_path, progress=False) != path  # other contents, another store
    drawn = tmp_path / "drawn.npz"
    _save_npz(drawn, y=np.arange(200) % 3)
    path = prepare(drawn, tmp_path, seed=0, progress=False)
    assert prepare(drawn, tmp_path, seed=1, progress=False) == path  # one graph, whatever split it is taken with
    first, second, again = (GraphStore.open(path) for _ in range(3))
    for graph, seed in ((first, 0), (second, 1), (again, 1)):
        datasets.choose_split(graph, seed=seed)
    assert all(torch.equal(second.split[name], again.split[name]) for name in disk.SPLITS)
    assert [len(ids) for ids in first.split.values()] == [60, 90, 50]
    assert first.labels[first.split["train"].long()].bincount().tolist() == [20] * 3
    assert not torch.equal(first.split["train"], second.split["train"])


def test_datasets_npz_word_counts(tmp_path, capsys):
    csr = {"feat_indptr": np.arange(0, 401, 2), "feat_indices": np.tile([1, 3], 200), "feat_shape": [4, 200],
           "feat_data": np.tile([1, 3], 200), "x": None}
    csr["feat_indptr"][1:] -= 2  # a node without a word, first; the last one's are left over
    _save_npz(tmp_path / "words.npz", **csr)
    with pytest.raises(StoreError, match="feat_indptr must rise from 0 to the 400 entries"):
        prepare(tmp_path / "words.npz", tmp_path, progress=False)
    csr["feat_indptr"][-1] += 2
    csr["feat_indices"][10:12] = 2  # the same word twice: its counts are added
    capsys.readouterr()
    for kind, option, some, twice in (("u1", "", [0, 0.25, 0, 0.75], 1), ("i8", ":row_normalize=0", [0, 1, 0, 3], 4),
                                      ("f8", "", [0, 1, 0, 3], 4), ("f4", ":row_normalize=1", [0, 0.25, 0, 0.75], 1)):
        _save_npz(tmp_path / "words.npz", **dict(csr, feat_data=csr["feat_data"].astype(kind)))
        features = GraphStore.open(prepare(f"{tmp_path}/words.npz{option}", tmp_path, progress=False)).features.tensor
        assert features[5].tolist() == some and features[6].tolist() == [0, 0, twice, 0] and not features[0].any()
        assert features.dtype == (torch.float64 if kind == "f8" else torch.float32)
        said = capsys.readouterr().out
        assert ("divided by its sum" if sum(some) == 1 else "as they are") in said
        assert ("values" if "f" in kind else "counts") in said


def test_datasets_a_damaged_file_is_said_in_a_sentence(tmp_path, capsys):
    _save_npz(tmp_path / "own.npz")
    good = (tmp_path / "own.npz").read_bytes()
    random = np.random.default_rng(0)
    for number in range(40):
        bad = bytearray(good[:int(random.integers(len(good)))] if number % 2 else good)
        for at in random.integers(0, len(bad) or 1, 3):
            bad[at:at + 1] = b"\xa5"
        (tmp_path / f"bad{number}.npz").write_bytes(bad)
        with suppress(StoreError):  # and nothing else; most flips are inside an array, and found by its checksum
            datasets.build(str(tmp_path / f"bad{number}.npz"), tmp_path / f"store{number}")
    _save_npz(tmp_path / "float.npz", y=np.random.rand(50))
    assert store.main(["build", str(tmp_path / "float.npz"), str(tmp_path / "s")]) == 2
    assert re.search(r"float.npz: y\[0\] is 0.\d+: labels are whole numbers", capsys.readouterr().err)


def _refused_npz():
    """(part of the message, parameters behind the name, changes of a good file) of what must not become a store."""
    mask, csr = np.arange(200) < 50, {"x": None, "feat_indptr": np.arange(201), "feat_indices": np.arange(200) % 5}
    splits = np.stack([mask, ~mask, mask])
    return [
        ("no array edge_index or edges or adj_t; its arrays are x, y", "", {"edge_index": None}),
        ("split .train. holds node 0, which has no label", "", {"y": None, "train_idx": np.arange(3)}),
        (r"y is \[200, 4\].*one-hot", "", {"y": np.eye(4)[np.arange(200) % 4]}),
        (r"y\[7\] is 2.5: labels are whole", "", {"y": np.where(np.arange(200) == 7, 2.5, 1)}),
        (r"y\[7\] is inf", "", {"y": np.where(np.arange(200) == 7, np.inf, 1)}),
        ("y holds <U1", "", {"y": np.array(["a", "b"] * 100)}),
        ("y holds complex128", "", {"y": np.ones(200, complex)}),
        ("labels run up to 10,000,003 and 4 different ones occur: 10,000,004 .* 5.12 GB", "",
         {"y": np.arange(200) % 4 + 10**7}),
        ("labels run up to 1,000,000,000,000", "", {"y": np.arange(200) + 10**12 - 199}),
        ("labels run up to 2,199,023,255,551", "", {"y": np.full(200, 2**41 - 1)}),
        (r"y holds 18446744073709551615: whole numbers below 2\^63", "", {"y": np.full(200, 2**64 - 1, np.uint64)}),
        ("none of the 200 nodes has a label", "", {"y": np.full(200, -1)}),
        (r"labels\[0\] is -100", "", {"y": np.where(np.arange(200), 1, -100)}),
        ("edge_index holds 18446744073709551615", "", {"edge_index": np.full((2, 9), 2**64 - 1, np.uint64)}),
        ("edge_index has dtype float64", "", {"edge_index": np.zeros((2, 9))}),
        ("edge_index has dtype bool", "", {"edge_index": np.zeros((2, 9), bool)}),
        (r"edges is \[2, 9\]: \[M, 2\]", "", {"edge_index": None, "edges": np.zeros((2, 9), int)}),
        ("has edge_index and edges, which mean the same", "", {"edges": np.zeros((9, 2), int)}),
        ("has features and x, which mean the same.*ignore=x", "", {"features": np.ones((200, 2))}),
        (r"edge_weight is \[5\]: a row for each of the 3000 edges is needed; .*ignore=edge_weight", "",
         {"edge_weight": np.ones(5)}),
        (r"edge_weight\[2\] is -1.0: a weight", "", {"edge_weight": np.where(np.arange(3000) == 2, -1, 1.0)}),
        ("it has edge_time and time, which mean the same", "", {"time": np.ones(3000), "edge_time": np.ones(3000)}),
        (r"edge_time\[0\] is 1.5: whole numbers", "", {"time": np.full(3000, 1.5)}),
        (r"node_time is \[3000\]: a row for each of the 200 nodes", "", {"node_time": np.ones(3000)}),
        ("w is not used: what edges carry is called edge_weight, edge_time or edge_features", "", {"w": np.ones(3000)}),
        ("trainmask is not used: its name", "", {"trainmask": mask}),
        ("no array nothing; its arrays are", ":ignore=nothing", {}),
        ("num_nodes is 300", "", {"num_nodes": 300}),
        ("has val_idx, but no train_idx", "", {"val_idx": [1, 2]}),
        ("has train_idx and train_mask, which mean the same", "", {"train_idx": [1, 2], "train_mask": mask}),
        (r"train_mask is \[199\]: a mask is \[200\]", "", {"train_mask": mask[1:]}),
        (r"train_idx is \[199\]: a mask is", "", {"train_idx": mask[1:]}),
        ("train_mask holds values other than 0 and 1", "", {"train_mask": 2 * mask}),
        ("holds node -1", "", {"train_idx": [-1, 5]}),
        ("holds node 200", "", {"train_idx": [200, 5]}),
        ("'train' has dtype float64", "", {"train_idx": [0.5, 5]}),
        ("node 3 more than once", "", {"train_idx": [3, 3]}),
        ("'train' is empty", "", {"train_mask": mask & ~mask}),
        (r"train_idx is \[2, 5, 2\]: ids are \[n\], of K splits \[K, n\]", "",
         {"train_idx": np.arange(20).reshape(2, 5, 2)}),
        ("of 2 splits, number 1: split 'train' holds node 11 more than once", "", {"train_idx": [[0, 1], [11, 11]]}),
        ("2 and 3 splits in train_masks, val_masks", "", {"train_masks": splits, "val_masks": ~splits[:2]}),
        ("split=3 is out of range: its 3 splits", ":split=3", {"train_masks": splits}),
        ("split=0 has no effect: it has one split", ":split=0", {"train_mask": mask}),
        ("split=1 has no effect: it has no split", ":split=1", {}),
        ("radius has no effect: it holds one graph", ":radius=3", {}),
        ("row_normalize=0 has no effect: it is for a CSR matrix", ":row_normalize=0", {}),
        (r"feat_indices\[0\] is -1: columns lie in", "", {**csr, "feat_indices": np.full(200, -1)}),
        (r"feat_indices\[0\] is 9: columns lie in \[0, 5\)", "",
         {**csr, "feat_indices": np.full(200, 9), "feat_shape": [200, 5]}),
        ("feat_indices has dtype float64", "", {**csr, "feat_indices": np.ones(200)}),
        ("feat_data holds <U1", "", {**csr, "feat_data": np.full(200, "a")}),
        ("feat_data holds complex128", "", {**csr, "feat_data": np.ones(200, complex)}),
        (r"feat_data\[3\] is -1.*row_normalize=0", "", {**csr, "feat_data": np.where(np.arange(200) == 3, -1, 1)}),
        (r"feat_data \[3\]", "", {**csr, "feat_data": np.ones(3)}),
        (r"features\[7, 2\] is nan", "", {**csr, "feat_data": np.where(np.arange(200) == 7, np.nan, 1)}),
        ("feat_indptr must rise from 0 to the 200", "", {**csr, "feat_indptr": np.arange(201)[::-1]}),
        ("feat_indptr must rise from 0 to the 200", "", {**csr, "feat_indptr": np.arange(201) + 1}),
        (r"shape \[150, 5\]: 200 rows", "", {**csr, "feat_shape": [150, 5]}),
        (r"shape \[200, 1099511627776\]: 200 rows and from 1 to", "", {**csr, "feat_shape": [200, 1 << 40]}),
        (r"labels has shape \[200\]: \[100\]", "", {"x": np.ones((100, 2))}),
        ("features has dtype longdouble|features has dtype float128", "", {"x": np.ones((200, 2), np.longdouble)}),
    ]  # fmt: skip


def test_datasets_npz_bad_files(tmp_path):
    file = tmp_path / "bad.npz"
    for content, message in ((b"no zip", "cannot be read"), (b"", "cannot be read")):
        file.write_bytes(content)
        with pytest.raises(StoreError, match=message):
            prepare(file, tmp_path, progress=False)
    _save_npz(file, x=np.array([{}] * 200, object))
    with pytest.raises(StoreError, match="cannot be read"):
        prepare(file, tmp_path, progress=False)
    for message, option, entries in _refused_npz():
        _save_npz(file, **entries)
        before = set(tmp_path.iterdir())
        with pytest.raises(StoreError, match=message) as error:
            prepare(f"{file}{option}", tmp_path, progress=False)
        assert "\n" not in str(error.value) and set(tmp_path.iterdir()) == before


def _mask(ids, *shape, kind=bool):
    mask = np.zeros(shape or 200, kind)
    mask[ids] = 1
    return mask


def test_datasets_npz_splits(tmp_path, capsys):
    train, valid, test = np.arange(50), np.arange(50, 80), np.arange(80, 150)
    second = np.arange(100, 150)
    masks = {f"{name}_mask": _mask(ids) for name, ids in (("train", train), ("val", valid), ("test", test))}
    several = {"train": np.stack([_mask(train), _mask(second)]), "val": np.stack([_mask(valid)] * 2)}
    for number, (entries, option, expected, says) in enumerate((
        (dict(train_idx=train[:, None], valid_idx=valid[None], test_idx=test.astype(">u2")), "", (train, valid, test),
         ""),
        (masks, "", (train, valid, test), ""),
        ({name: mask.astype(np.uint8) for name, mask in masks.items()}, "", (train, valid, test), ""),
        ({name: mask.astype(float)[:, None] for name, mask in masks.items()}, "", (train, valid, test), ""),
        (dict(train_idx=_mask(train), test_idx=test), "", (train, [], test), ""),
        (dict(train_masks=several["train"], val_masks=several["val"]), "", (train, valid, []), ""),
        (dict(train_masks=several["train"], val_masks=several["val"]), ":split=1", (second, valid, []), ""),
        (dict(train_mask=several["train"].T, val_mask=several["val"].T, test_mask=_mask(second - 20)), ":split=1",
         (second, valid, second - 20), "refused"),
        (dict(train_mask=several["train"].T, val_mask=several["val"].T, test_mask=_mask(test[:9])), ":split=1",
         (second, valid, test[:9]), ""),
    )):  # fmt: skip
        file = tmp_path / f"{number}.npz"
        _save_npz(file, **entries)
        if says == "refused":
            with pytest.raises(StoreError, match="node 100 is in split 'train' and in 'test'"):
                prepare(f"{file}{option}", tmp_path, progress=False)
            continue
        path, other = (prepare(f"{file}{option}", tmp_path, seed=seed, progress=False) for seed in (0, 1))
        split = GraphStore.open(path).split
        assert [ids.tolist() for ids in split.values()] == [list(ids) for ids in expected], number
        assert path == other, "a seed decides on nothing here"


def test_a_store_keeps_several_splits_of_one_graph(tmp_path, capsys):
    """Ids of K splits come as [K, n] or [n, K], short rows filled up with -1; masks as [K, V]; --runs takes one after
    the other."""
    first = np.stack([np.arange(40), np.arange(100, 140), np.r_[np.arange(50, 80), np.full(10, -1)]])
    valid, test = np.stack([np.arange(150 + 10 * k, 160 + 10 * k) for k in range(3)]), np.arange(190, 200)
    masks = np.stack([_mask(ids[ids >= 0]) for ids in first])
    for number, given in enumerate((dict(train_idx=first, val_idx=valid), dict(train_idx=first.T, val_idx=valid.T),
                                    dict(train_masks=masks, val_idx=valid))):
        _save_npz(tmp_path / f"{number}.npz", test_idx=test, **given)
        path = prepare(tmp_path / f"{number}.npz", tmp_path, progress=False)
        graph = GraphStore.open(path)
        assert graph.num_splits == 3 and not verify(path) and "the first of 3" in store.info(path)
        for k in range(3):
            datasets.choose_split(graph, k)
            assert graph.split["train"].tolist() == first[k][first[k] >= 0].tolist()
            assert graph.split["valid"].tolist() == valid[k].tolist() and graph.split["test"].tolist() == test.tolist()
        datasets.choose_split(graph, turn=4)
        assert graph.split["valid"].tolist() == valid[1].tolist()
        with pytest.raises(StoreError, match="split 3 is out of range: .* has 3, counted from 0"):
            datasets.choose_split(graph, 3)
    capsys.readouterr()
    common = ["--dataset", str(path), "--fanout", "2", "--epochs", "1", "--gpus", "0"]
    assert train_main_says(["--runs", "4", *common], capsys, r"split   number (\d) of 3") == ["0", "1", "2", "0"]
    assert train_main_says(["--split", "2", *common], capsys, r"split   number (\d) of 3|train (\d+) /") == ["2", "30"]
    one = build_store(tmp_path / "one", **_graph())
    for words, message in ((["--split", "3"], "split 3 is out of range"),
                           (["--dataset", str(one), "--split", "0"], "--split 0 has no effect")):
        with pytest.raises(SystemExit):
            train.main([*common, *words])
        assert message in capsys.readouterr().err


def train_main_says(words, capsys, pattern):
    """What train.py prints that a pattern finds."""
    assert train.main(words) == 0
    return ["".join(found) if isinstance(found, tuple) else found
            for found in re.findall(pattern, capsys.readouterr().out)]


def test_datasets_npz_labels_and_arrays_that_are_not_used(tmp_path, capsys):
    y = np.arange(200) % 4
    for number, (labels, expected, says) in enumerate((
        (y.astype(float), y, ""), (y[:, None].astype(np.uint8), y, ""), (y[None].astype(">i4"), y, ""),
        (y > 1, y > 1, ""),
        (np.where(y, y, np.nan).astype(np.float32), np.where(y, y, -1), "50 of 200 in y are NaN"),
        (np.float16(y), y, ""),
    )):  # fmt: skip
        _save_npz(tmp_path / f"{number}.npz", y=labels, train_idx=[1, 2, 3])
        graph = GraphStore.open(datasets.build(tmp_path / f"{number}.npz", tmp_path / f"s{number}", symmetrize=True))
        assert graph.labels.tolist() == expected.tolist() and graph.num_classes == expected.max() + 1
        said = capsys.readouterr().out
        assert says in said and bool(says) == bool(said)
    extra = dict(edge_weight=np.ones(3000), timestamps=np.ones(3000), years=np.ones(200), names=["a", "b"],
                 num_nodes=200)
    _save_npz(tmp_path / "x.npz", train_idx=[1, 2], **extra)
    path = prepare(f"{tmp_path}/x.npz:ignore=edge_weight+timestamps", tmp_path, progress=False)
    assert "not used: years, names\n" in capsys.readouterr().out
    assert GraphStore.open(path).meta["source"] == {"dataset": "x.npz", "ignore": ["edge_weight", "timestamps"]}
    again = datasets.build(tmp_path / "x.npz", tmp_path / "again", ignore=["edge_weight", "timestamps"])
    assert _sums(path) == _sums(again)
    _save_npz(tmp_path / "edges.npz", edge_index=None, edges=np.array([[0, 1], [2, 3]]), train_idx=[1])
    assert _edges(GraphStore.open(datasets.build(tmp_path / "edges.npz", tmp_path / "edges"))) == [(0, 1), (2, 3)]


def test_datasets_npz_one_way_edges_are_said_and_made_symmetric(tmp_path, capsys, monkeypatch):
    ways = np.array([[0, 1, 2, 3, 3, 4], [1, 0, 3, 2, 3, 5]])
    for edges, says in ((ways[:, :5], ""), (ways, "1 of 6 edges have no reverse: messages go one way"),
                        (np.stack([np.arange(50), np.arange(50) + 1]), "50 of 50 edges")):  # fmt: skip
        _save_npz(tmp_path / "e.npz", edge_index=edges, train_idx=[1, 2])
        plain = prepare(tmp_path / "e.npz", tmp_path, progress=False)
        said = capsys.readouterr().out
        assert says in said and bool(says) == bool(said)
        both = prepare(tmp_path / "e.npz", tmp_path, symmetrize=True, progress=False)
        assert capsys.readouterr().out == "" and both != plain
        assert _edges(GraphStore.open(both)) == sorted([*zip(*edges.tolist()), *zip(*edges[::-1].tolist())])
    graph = GraphStore.open(build_store(tmp_path / "g", **_graph(num_edges=20_000)))
    pairs = collections.Counter(_edges(graph))
    alone = sum(count for (u, v), count in pairs.items() if (v, u) not in pairs)
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    assert csc.without_reverse(indptr, indices) == (alone, 20_000)
    shuffled = np.concatenate([np.random.default_rng(v).permutation(row)
                               for v, row in enumerate(np.split(indices, indptr[1:-1]))])
    monkeypatch.setattr(csc, "EDGE_CHUNK", 999)
    assert csc.without_reverse(indptr, shuffled, ascending=False) == (alone, 20_000)
    found, looked_at = csc.without_reverse(indptr, indices, exact=10, sample=5000)
    assert looked_at == 5000 and abs(found / 5000 - alone / 20_000) < 0.03
    for name in (plain, "synthetic", "cora"):
        with pytest.raises(StoreError, match=f"--symmetrize has no effect on {name}"):
            prepare(name, tmp_path, symmetrize=True)


def test_train_symmetrize_and_runs_build_as_many_stores_as_there_are_graphs(tmp_path, capsys):
    _save_npz(tmp_path / "own.npz", train_idx=np.arange(50), test_idx=np.arange(50, 90))
    _save_npz(tmp_path / "drawn.npz")
    common = ["--root", str(tmp_path / "data"), "--fanout", "2", "--epochs", "1", "--runs", "3", "--gpus", "0"]
    for name, words, stores in (("own", [], 1), ("own", ["--symmetrize"], 2), ("drawn", [], 3)):
        assert train.main(["--dataset", str(tmp_path / f"{name}.npz"), *common, *words]) == 0
        assert len(list((tmp_path / "data").iterdir())) == stores
        assert ("one way" in capsys.readouterr().out) == (not words)


def _zip(file, members, **options):
    """An archive of .npy members given as bytes; of a name that occurs twice both are kept."""
    with zipfile.ZipFile(file, "w", **options) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(f"{name}.npy", data)


def _npy(array, shape=None, descr=None):
    """The bytes of an array as .npy, its header perhaps declaring something else."""
    file, array = io.BytesIO(), np.asarray(array)
    np.lib.format.write_array_header_1_0(file, {"descr": descr or array.dtype.str, "fortran_order": False,
                                                "shape": shape or array.shape})
    return file.getvalue() + array.tobytes()


def test_datasets_npz_hostile_archives(tmp_path, monkeypatch):
    graph, file = _graph(), tmp_path / "h.npz"
    good = [(name, _npy(array))
            for name, array in (("edge_index", graph["edge_index"]), ("x", graph["features"]), ("y", graph["labels"]))]
    x = dict(good)["x"]
    zeros = _npy(np.zeros((200, 5), np.float32))
    for message, members, options in (
        (r"x: it is declared as \[200, 1099511627776\] float32, which does not fit its 4000",
         [("x", _npy(graph["features"], (200, 1 << 40)))], {}),
        (r"declared as \[-200, -5\]", [("x", _npy(graph["features"], (-200, -5)))], {}),
        (r"declared as \[200, 4\]", [("x", _npy(graph["features"], (200, 4)))], {}),
        ("dtype object holds no numbers", [("x", _npy(graph["features"], descr="|O"))], {}),
        ("x: it is no .npy array", [("x", b"\x93NUMPY\2\0" + b"\xff" * 4000)], {}),
        ("x: it is no .npy array", [("x", b"")], {}),
        ("its compression, number 12, is not numpy's", [("x", x)], {"compression": zipfile.ZIP_BZIP2}),
        ("its compression, number 14, is not numpy's", [("x", x)], {"compression": zipfile.ZIP_LZMA}),
        ("it holds more than one x.npy", [("x", x), ("x", zeros)], {}),
    ):
        _zip(file, [*(pair for pair in good if pair[0] != "x"), *members], **options)
        with pytest.raises(StoreError, match=message):
            datasets.build(file, tmp_path / "s")
    _zip(file, good)
    good_bytes = file.read_bytes()
    for name, at, value, message in (("encrypted", 6, b"\1", "encrypted"),
                                     ("unknown compression", 8, b"\x63", "compression")):
        data = bytearray(good_bytes)  # in the local header and in the directory
        for magic, shift in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
            data[(start := data.index(magic)) + at + shift:start + at + shift + 1] = value
        file.write_bytes(data)
        with pytest.raises(StoreError, match=message):
            datasets.build(file, tmp_path / "s")
    _zip(file, [*good, ("unused", np.random.default_rng(0).bytes(3000))])
    data = file.read_bytes()
    where = data.index(b"unused.npy") + 500
    file.write_bytes(data[:where] + b"????" + data[where + 4:])  # a bomb or damage that nobody reads
    datasets.build(file, tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    bomb = np.zeros((1 << 16, 5), np.float32)
    np.savez_compressed(file, edge_index=graph["edge_index"], x=bomb, y=np.zeros(1 << 16, int))
    monkeypatch.setattr("arrays.free_host_bytes", lambda: 1 << 20)
    with pytest.raises(StoreError,
                       match=r"x is \[65536, 5\] float32, 1.31 MB unpacked, and 1.05 MB of memory are free"):
        datasets.build(file, tmp_path / "s")
    os.mkfifo(tmp_path / "fifo.npz")
    with pytest.raises(StoreError, match="cannot read .*fifo.npz: there is no regular file"):
        prepare(tmp_path / "fifo.npz", tmp_path / "d")
    assert {entry.name for entry in tmp_path.iterdir()} == {"h.npz", "fifo.npz"}


def _plain_reading(file):
    """What an .npz file says, read by numpy and plain loops: a dict, or None where it must not become a store."""
    names = {"features": ("features", "x", "feat", "node_features"), "labels": ("labels", "y", "label", "node_labels")}
    with np.load(file, allow_pickle=False) as data:
        arrays = {name: data[name] for name in data.files}
    known = {"edge_index", "edges", "num_nodes", "feat_indptr", "feat_indices", "feat_data", "feat_shape",
             *names["features"], *names["labels"]}
    known |= {f"{part}_{kind}" for part in ("train", "val", "valid", "test") for kind in ("idx", "mask", "masks")}
    if any(re.search("edge|weight|time|mask|train", name) for name in arrays.keys() - known):
        return None
    labels = [arrays[name] for name in names["labels"] if name in arrays]
    features = [arrays[name] for name in names["features"] if name in arrays]
    edges = [np.asarray(arrays[name]) for name in ("edge_index", "edges") if name in arrays]
    has_features = len(features) + ("feat_indptr" in arrays)
    if len(labels) > 1 or len(edges) != 1 or has_features > 1 or not (labels or has_features):
        return None
    if not labels and any("_idx" in name or "_mask" in name for name in arrays):
        return None
    y = [] if labels else [-1] * (len(features[0]) if features else len(arrays["feat_indptr"]) - 1)
    for value in labels[0].reshape(-1).tolist() if labels else ():
        if value != value:
            y.append(-1)
        elif int(value) != value or value < -1:
            return None
        else:
            y.append(int(value))
    pairs = edges[0].T.tolist() if "edge_index" in arrays else edges[0].tolist()
    x, count = None, len(y)
    if features:
        x = features[0].astype(np.float64).tolist()
    elif "feat_indptr" in arrays:
        ends, columns = arrays["feat_indptr"].tolist(), arrays["feat_indices"].tolist()
        values = arrays["feat_data"] if "feat_data" in arrays else np.ones(len(columns), int)
        if "feat_shape" in arrays:
            width = next(int(n) for n in arrays["feat_shape"][::-1] if n != count)
        else:
            width = max(columns) + 1
        x = [[0.0] * width for _ in range(count)]
        for row, (a, b) in enumerate(zip(ends, ends[1:])):
            for column, value in zip(columns[a:b], values.tolist()[a:b]):
                if column < 0:
                    return None
                x[row][column] += value
            total = sum(x[row])
            if values.dtype.kind != "f" and total:
                x[row] = [value / total for value in x[row]]
    split = {}
    for part, words in (("train", ["train"]), ("valid", ["val", "valid"]), ("test", ["test"])):
        there = [(f"{word}_{kind}", kind) for word in words for kind in ("idx", "mask", "masks")
                 if f"{word}_{kind}" in arrays]
        if len(there) > 1:
            return None
        for name, kind in there:
            values = arrays[name]
            if kind != "idx" or values.dtype == bool:
                rows = values if values.ndim == 1 else values[0] if values.shape[1] == count else values[:, 0]
                if len(rows) != count or not set(np.unique(values).tolist()) <= {0, 1}:
                    return None
                split[part] = [node for node, value in enumerate(rows.tolist()) if value]
            else:
                split[part] = [int(node) for node in values.reshape(-1)]
    if split and not split.get("train"):
        return None
    return {"edges": sorted((int(u), int(v)) for u, v in pairs), "x": x, "y": y, "split": split}


def _mutated(random, arrays):
    """Change one thing about the arrays of a good file, as people and accidents do."""
    arrays = dict(arrays)
    name = random.choice([*sorted(arrays), *(name for name in sorted(arrays) if name != "x")])
    array, kind = np.array(arrays[name]), random.integers(10)
    if kind == 0:
        arrays[name] = array.astype(random.choice("f2 f4 f8 >f8 i1 i2 i4 i8 >i4 u1 u2 u4 u8 ? c8 S3".split()))
    elif kind == 1:
        arrays[name] = [np.asfortranarray(array), array[:-1], array[::-1], array.T, array[..., None],
                        array[None]][random.integers(6)]
    elif kind == 2 and array.size:
        array = array.astype(array.dtype if random.random() < 0.5 else float)
        array.reshape(-1)[random.integers(array.size)] = random.choice([-1, 0, 1, 2, 3, 7, 60, -5, 100])
        arrays[name] = array
    elif kind in (3, 4) and array.size:
        array = np.nan_to_num(array).astype(float if kind == 3 else "u8")
        odd = random.choice([np.nan, np.inf, 0.5, 2.0**63]) if kind == 3 else 2**64 - 1
        array.reshape(-1)[random.integers(array.size)] = odd
        arrays[name] = array
    elif kind == 5:
        del arrays[name]
    elif kind == 6:
        del arrays[name]
        swaps = {"x": "feat", "y": "node_labels", "train_idx": "train_mask", "train_mask": "train_idx",
                 "edge_index": "edges"}
        arrays[swaps.get(name, name + "s")] = array.T if name == "edge_index" else array
    elif kind == 7:
        twins = {"x": "features", "y": "label", "train_idx": "train_mask", "train_mask": "train_masks",
                 "edge_index": "edge_weight"}
        arrays[twins.get(name, random.choice(["weights", "times", "comment", "val_mask"]))] = array
    elif kind == 8 and "y" == name:
        arrays[name] = np.where(random.random(60) < 0.2, np.nan, array)
    elif "mask" in name:
        rows = np.stack([array, random.permutation(array), ~array.astype(bool)])
        arrays[name] = [array.astype(np.uint8), 2 * array, rows, rows.T][random.integers(4)]
    elif "idx" in name:
        arrays[name] = _mask(array % 60, 60)
    return arrays


def _reads_npz_inputs(folder):
    """Build 500 inputs and compare each store with the plain reading of its file."""
    random, outcomes = np.random.default_rng(0), collections.Counter()
    edges, y = random.integers(0, 57, (2, 200)), np.arange(60) % 4
    x = random.standard_normal((60, 5), np.float32)
    words = dict(feat_indptr=np.arange(0, 121, 2), feat_indices=random.integers(0, 7, 120), feat_shape=[60, 7])
    disk.sync = lambda path: None  # in this process; what a disk does is tested elsewhere
    bases = [dict(edge_index=edges, x=x, y=y, train_idx=np.arange(20), val_idx=np.arange(20, 30),
                  test_idx=np.arange(30, 60)),
             dict(edge_index=edges, x=x, y=y, train_mask=_mask(np.arange(20), 60),
                  test_mask=_mask(np.arange(30, 60), 60)),
             dict(edge_index=edges, x=x, y=np.arange(60) % 2),
             dict(edge_index=edges, y=y, train_idx=np.arange(20), feat_data=random.integers(1, 9, 120), **words),
             dict(edge_index=edges, y=y, train_idx=np.arange(20), test_idx=np.arange(30, 60))]  # fmt: skip
    file, path = folder / "input.npz", folder / "store"
    for number in range(500):
        arrays = bases[number % 5]
        for _ in range(random.integers(1, 3) if number % 20 else 0):
            arrays = _mutated(random, arrays)
        (np.savez_compressed if random.random() < 0.3 else np.savez)(file, **arrays)
        if number % 9 == 8 and number % 20:
            data = bytearray(file.read_bytes())
            for _ in range(random.integers(1, 4)):
                data[random.integers(len(data))] ^= 1 << random.integers(8)
            file.write_bytes(data[:random.integers(len(data))] if random.random() < 0.2 else data)
        try:
            datasets.build(file, path, progress=False)
        except StoreError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, str(error)
            outcomes["refused"] += 1
            assert number % 20, f"input {number} is good: {error}"
            continue
        outcomes["built"] += 1
        expected, graph = _plain_reading(file), GraphStore.open(path)
        assert expected is not None, (number, {name: (array.dtype, array.shape) for name, array in arrays.items()})
        assert graph.labels.tolist() == expected["y"], number
        if expected["x"] is None:
            outcomes["without features"] += 1
            assert set(_edges(graph)) == set(expected["edges"]) | {(v, u) for u, v in expected["edges"]}
        else:
            assert _edges(graph) == expected["edges"], number
            want = torch.tensor(expected["x"], dtype=torch.float64).to(graph.features.dtype)
            assert torch.equal(graph.features.gather(torch.arange(graph.num_nodes)), want), number
        split = {part: ids.tolist() for part, ids in graph.split.items() if len(ids)}
        if not expected["split"]:
            outcomes["split drawn"] += 1
            counts = [collections.Counter(expected["y"][node] for node in split.get(part, ())) for part in disk.SPLITS]
            for label in set(expected["y"]) - {-1}:
                n = expected["y"].count(label)
                drawn = [min(n, 20), min(max(n - 20, 0), 30), max(n - 50, 0)]
                if expected["x"] is None:
                    drawn[0] = counts[0][label]  # half of them, drawn from all classes, show their labels instead
                assert [part[label] for part in counts] == drawn, number
        elif expected["x"] is not None:
            assert split == {part: ids for part, ids in expected["split"].items() if ids}, number
        shutil.rmtree(path)
    print(dict(outcomes))
    assert outcomes["built"] > 100 and outcomes["refused"] > 100, outcomes


@_beside(lambda folder: _fork(folder / "out", _reads_npz_inputs, folder))
def test_datasets_npz_inputs_are_read_as_plain_numpy_reads_them(beside):
    assert "built" in _end(beside[0])


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_datasets_real_graphs(tmp_path, capsys):
    expected = {"cora": (2708, 10556, 1433, 7), "citeseer": (3327, 9104, 3703, 6),
                "amazon_computers": (13752, 491722, 767, 10)}
    for name, counts in expected.items():
        graph = GraphStore.open(prepare(DATA / f"{name}.npz", tmp_path, progress=False))
        assert (graph.num_nodes, graph.num_edges, graph.feature_dim, graph.num_classes) == counts
        sums = graph.features.tensor.sum(1)
        assert torch.all(((sums - 1).abs() < 1e-4) | (sums == 0))
    capsys.readouterr()
    graph = GraphStore.open(prepare(DATA / "ogbn_arxiv_nofeat.npz", tmp_path, progress=False))
    said = capsys.readouterr().out
    assert said.count("\n") == 2 and "half of the training nodes (45,470)" in said
    assert "not used: node_year, class_names" in said
    assert [len(ids) for ids in graph.split.values()] == [45471, 29799, 48603]
    assert graph.num_edges == 2315598  # what to_symmetric() makes of ogbn-arxiv
    shown = graph.features.tensor.any(1)
    assert shown.sum() == 45470 and not any(shown[ids].any() for ids in graph.split.values())


class _Python2Pickler(pickle._Pickler):
    """Writes strings as Python 2 did, which made the original files."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        value = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = dispatch[str] = save_bytes


def _planetoid_files(folder, name, missing=False):
    """Write a small graph in the original layout, as pickles with scipy's class; returns it for comparison."""
    sparse = types.ModuleType("scipy.sparse.csr")
    csr = type("csr_matrix", (), {"__module__": "scipy.sparse.csr"})
    sparse.csr_matrix = csr
    random = np.random.default_rng(0)
    num_nodes, labelled = 30, 22
    x = (random.random((num_nodes, 6)) < 0.4).astype(np.float32)
    y = np.eye(3, dtype=np.int32)[random.integers(0, 3, num_nodes)]
    test = random.permutation(np.arange(labelled, num_nodes))
    if missing:  # as in citeseer: node 25 is in no file
        test = test[test != 25]
        x[25], y[25] = 0, 0

    def matrix(dense):
        m, rows = csr(), [np.flatnonzero(row).astype(np.int32) for row in dense]
        m.__dict__.update(_shape=dense.shape, data=np.ones(int(dense.sum()), np.float32), maxprint=50,
                          indices=np.concatenate(rows), indptr=np.cumsum([0, *map(len, rows)]).astype(np.int32))
        return m

    graph = collections.defaultdict(list, {v: [] for v in range(num_nodes)})
    for u, v in random.integers(0, num_nodes, (40, 2)).tolist():
        graph[u].append(v)
    parts = {"x": matrix(x[:5]), "y": y[:5], "allx": matrix(x[:labelled]), "ally": y[:labelled],
             "tx": matrix(x[test]), "ty": y[test], "graph": graph}
    folder.mkdir(exist_ok=True)
    sys.modules["scipy.sparse.csr"], kept = sparse, sys.modules.get("scipy.sparse.csr")
    try:
        for part, value in parts.items():
            with open(folder / f"ind.{name}.{part}", "wb") as file:
                pickle.dump(value, file, 0) if part == "x" else _Python2Pickler(file, 2).dump(value)
    finally:
        sys.modules.pop("scipy.sparse.csr")
        if kept is not None:
            sys.modules["scipy.sparse.csr"] = kept
    (folder / f"ind.{name}.test.index").write_text("".join(f"{v}\n" for v in test))
    return x, y, test, graph


@pytest.mark.parametrize("missing", [False, True])
def test_datasets_planetoid(tmp_path, missing):
    x, y, test, graph = _planetoid_files(tmp_path, "citeseer", missing)
    path = prepare("citeseer", tmp_path, progress=False)
    result = GraphStore.open(path)
    pairs = {(u, v) for u, row in graph.items() for v in row if u != v}
    assert _edges(result) == sorted(pairs | {(v, u) for u, v in pairs})
    rows = result.features.tensor
    assert torch.allclose(rows, torch.from_numpy(x / np.maximum(x.sum(1, keepdims=True), 1)))
    assert result.labels.tolist() == [int(r.argmax()) if r.any() else -1 for r in y]
    assert result.split["train"].tolist() == list(range(5)) and result.split["valid"].tolist() == list(range(5, 22))
    assert result.split["test"].tolist() == sorted(test.tolist()) and verify(path) == []


def test_datasets_planetoid_refuses_other_pickles(tmp_path):
    _planetoid_files(tmp_path, "cora")

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/pwned",)

    for content, message in ((pickle.dumps(Evil(), 2), "posix.system|os.system"), (b"\x80\x02", "cannot be read"),
                             (pickle.dumps(io.BytesIO, 2), "BytesIO"),
                             (pickle.dumps(np.array([1, "a"], object), 2), "array of type 'O8'")):
        (tmp_path / "ind.cora.graph").write_bytes(content)
        with pytest.raises(StoreError, match=message):
            prepare("cora", tmp_path, progress=False)
    assert not (tmp_path / "pwned").exists() and not list(tmp_path.glob("cora-*"))


class _Server:
    """Serves bytes from loopback as `files[name]`; `cut` truncates the next answer, `ranges` honours Range headers."""

    def __init__(self, files, ranges=True):
        server, self.files, self.ranges, self.cut, self.requests = self, files, ranges, None, []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                data, wanted = server.files.get(self.path.rpartition("/")[2]), self.headers.get("Range")
                server.requests.append((self.path, wanted))
                if data is None:
                    return self.send_error(404)
                tag = f'"{hashlib.sha256(data).hexdigest()}"'
                same = self.headers.get("If-Range") == tag
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges and same else 0
                self.send_response(416 if start >= len(data) else 206 if start else 200)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("ETag", tag)
                self.send_header("Content-Length", str(max(len(data) - start, 0)))
                self.end_headers()
                self.wfile.write(data[start:server.cut])
                server.cut = None

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/ogb"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def _gz(array, form="%d"):
    out = io.StringIO()
    np.savetxt(out, array, form, delimiter=",")
    return gzip.compress(out.getvalue().encode())


def _ogb_zip(folder, kind, binary=False, extra=()):
    """A small archive in OGB's layout; returns its bytes and the graph."""
    args = _graph(num_nodes=120, num_edges=500)
    del args["num_classes"]
    args["split"] = {name: np.sort(ids % 120)[i::3] for i, (name, ids) in enumerate(
        (name, np.arange(120)) for name in ("train", "valid", "test"))}
    edge_index, x, y = args["edge_index"], args["features"][:120], args["labels"]
    members = {f"split/{kind}/{name}.csv.gz": _gz(ids) for name, ids in args["split"].items()}
    if binary:
        y = args["labels"] = y.astype(np.float32)[:, None]
        data, label = io.BytesIO(), io.BytesIO()
        np.savez(data, edge_index=edge_index, node_feat=x, node_year=np.zeros((120, 1), np.int64),
                 num_nodes_list=np.array([120]), num_edges_list=np.array([500]))
        np.savez(label, node_label=y)
        members |= {"raw/data.npz": data.getvalue(), "raw/node-label.npz": label.getvalue()}
    else:
        members |= {"raw/edge.csv.gz": _gz(edge_index.T), "raw/node-feat.csv.gz": _gz(x, "%.6g"),
                    "raw/node-label.csv.gz": _gz(y), "raw/num-node-list.csv.gz": _gz([120]),
                    "raw/num-edge-list.csv.gz": _gz([500]), "mapping/README.md": b"ids"}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{folder}/{name}", content)
        for name in extra:
            archive.writestr(name, b"boo")
    return out.getvalue(), args


OGB_CASES = {"ogbn-arxiv": ("arxiv", "time", False), "ogbn-products": ("products", "sales_ranking", False),
             "ogbn-papers100M": ("papers100M-bin", "time", True)}


@pytest.mark.parametrize("name", OGB_CASES)
def test_datasets_ogb(tmp_path, monkeypatch, capsys, name):
    folder, kind, binary = OGB_CASES[name]
    content, args = _ogb_zip(folder, kind, binary)
    with _Server({f"{folder}.zip": content}) as server:
        monkeypatch.setenv("RINGBLOCK_OGB_URL", server.url)
        path = prepare(name, tmp_path, progress=False)
        assert prepare(name, tmp_path, progress=False) == path and len(server.requests) == 1
    assert "reverse of every edge" in capsys.readouterr().out
    graph = GraphStore.open(path)
    pairs = list(zip(*args["edge_index"].tolist()))
    pairs += [(v, u) for u, v in pairs]
    assert _edges(graph) == sorted(pairs if name == "ogbn-products" else set(pairs))
    assert torch.allclose(graph.features.tensor, torch.from_numpy(args["features"]), atol=1e-5)
    assert graph.labels.tolist() == args["labels"].reshape(-1).astype(int).tolist()
    for part, ids in args["split"].items():
        assert graph.split[part].tolist() == ids.tolist()
    assert graph.num_classes == downloads.OGB[name][2] and graph.meta["options"]["symmetrize"]
    assert {p.name for p in tmp_path.iterdir()} == {f"{folder}.zip", path.name}


def test_datasets_ogb_unlabelled_nodes(tmp_path):
    content, args = _ogb_zip("papers100M-bin", "time", True)
    out = io.BytesIO()
    label = io.BytesIO()
    y = args["labels"].copy()
    y[100:] = np.nan
    np.savez(label, node_label=y)
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as archive:
        for name in old.namelist():
            data = label.getvalue() if name.endswith("node-label.npz") else old.read(name)
            if "/split/" in name:
                ids = np.array(gzip.decompress(data).split(), np.int64)
                data = _gz(ids[ids < 100])
            archive.writestr(name, data)
    (tmp_path / "papers100M-bin.zip").write_bytes(out.getvalue())
    graph = GraphStore.open(prepare("ogbn-papers100M", tmp_path, progress=False))
    assert (graph.labels[100:] == -1).all() and (graph.labels[:100] >= 0).all()


@pytest.mark.parametrize("ranges", [True, False])
def test_datasets_ogb_download_is_resumed(tmp_path, monkeypatch, ranges):
    content, _ = _ogb_zip("arxiv", "time")
    with _Server({"arxiv.zip": content}, ranges) as server:
        monkeypatch.setenv("RINGBLOCK_OGB_URL", server.url)
        server.cut = 1000
        with pytest.raises(StoreError, match=f"stopped at 1000 of {len(content)} bytes") as error:
            prepare("ogbn-arxiv", tmp_path, progress=False)
        assert "\n" not in str(error.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["arxiv.zip.part", "arxiv.zip.part.tag"]
        path = prepare("ogbn-arxiv", tmp_path, progress=False)
        assert server.requests[-1][1] == "bytes=1000-"
    assert verify(path) == [] and (tmp_path / "arxiv.zip").read_bytes() == content
    assert not list(tmp_path.glob("*.part*"))


def test_datasets_download_never_joins_two_versions(tmp_path):
    """What the server has now is another file than the part was begun with; and a part that is complete is used."""
    old, now = b"a" * 5000, b"b" * 5000
    with _Server({"file": old}) as server:
        server.cut = 1000
        with pytest.raises(StoreError, match="stopped at 1000 of 5000 bytes"):
            downloads.download(f"{server.url}/file", tmp_path / "file", progress=False)
        server.files["file"] = now
        downloads.download(f"{server.url}/file", tmp_path / "file", progress=False)
        assert (tmp_path / "file").read_bytes() == now
        (tmp_path / "file").rename(tmp_path / "file.part")
        (tmp_path / "file.part.tag").write_text(f'"{hashlib.sha256(now).hexdigest()}"')
        downloads.download(f"{server.url}/file", tmp_path / "file", progress=False)
        assert (tmp_path / "file").read_bytes() == now and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_datasets_ogb_download_fails(tmp_path, monkeypatch):
    with _Server({"arxiv.zip": b"x" * 10}) as server:
        monkeypatch.setenv("RINGBLOCK_OGB_URL", server.url)
        with pytest.raises(StoreError, match="answers 404"):
            prepare("ogbn-products", tmp_path, progress=False)
        (tmp_path / "arxiv.zip.part").write_bytes(b"y" * 20)
        (tmp_path / "arxiv.zip.part.tag").write_text(f'"{hashlib.sha256(b"x" * 10).hexdigest()}"')
        with pytest.raises(StoreError, match="answers 416 .*part does not fit it: remove that to begin anew"):
            prepare("ogbn-arxiv", tmp_path, progress=False)
    with pytest.raises(StoreError, match="failed"):
        prepare("ogbn-arxiv", tmp_path, progress=False)
    assert not list(tmp_path.glob("ogbn*"))


@pytest.mark.parametrize("evil", ["../evil.txt", "/tmp/evil.txt", "arxiv/../../evil.txt", "arxiv\\..\\evil.txt"])
def test_datasets_ogb_zip_that_writes_outside(tmp_path, evil):
    root = tmp_path / "root"
    root.mkdir()
    (root / "arxiv.zip").write_bytes(_ogb_zip("arxiv", "time", extra=[evil])[0])
    with pytest.raises(StoreError, match="points outside"):
        prepare("ogbn-arxiv", root, progress=False)
    assert [p.name for p in root.iterdir()] == ["arxiv.zip"] and [p.name for p in tmp_path.iterdir()] == ["root"]


def test_datasets_ogb_damaged_archive(tmp_path):
    content, _ = _ogb_zip("arxiv", "time")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        places = [archive.getinfo(f"arxiv/raw/{name}.csv.gz") for name in ("edge", "node-feat", "node-label")]
    for place in places:
        bad = bytearray(content)
        middle = place.header_offset + 60 + place.compress_size // 2
        bad[middle:middle + 8] = bytes(8)
        (tmp_path / "arxiv.zip").write_bytes(bad)
        with pytest.raises(StoreError, match="damaged|no table|bytes") as error:
            prepare("ogbn-arxiv", tmp_path, progress=False)
        assert "\n" not in str(error.value)
    (tmp_path / "arxiv.zip").write_bytes(content[:-100])
    with pytest.raises(StoreError, match="not a zip file; if it is damaged, remove it"):
        prepare("ogbn-arxiv", tmp_path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["arxiv.zip"]


def test_datasets_command_line(tmp_path, capsys):
    assert datasets.main([SMALL, "--root", str(tmp_path)]) == 0
    assert verify(capsys.readouterr().out.strip()) == []
    bad = _run("datasets.py", "reddit", "--root", tmp_path)
    assert bad.returncode == 2 and bad.stderr.count("\n") == 1 and "ogbn-arxiv" in bad.stderr


# ---------------------------------------------------------------------------------------------------------------------
# tables.py and graph_tables.py


def _table_file(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


EDGES, X, Y = "0,1\n1,2\n2,3\n3,0\n4,2\n5,4\n", "".join(f"{i}.5,{-i}\n" for i in range(6)), "0\n1\n0\n1\n0\n1\n"
EDGES_X_Y = [[0, 1, 2, 3, 4, 5], [1, 2, 3, 0, 2, 4]], [[i + 0.5, -i] for i in range(6)], [0, 1, 0, 1, 0, 1]
DAMAGE = {  # what is written instead of the table -> None: the same graph, a list: these labels, else what refuses it
    "short lines": ("e", EDGES.replace("2,3", "2\n3"),
                    "e.csv, line 3: '2' has 1 column by separator ',', the others have 2"),
    "short lines only": ("e", "0,1\n2\n3\n4,5\n", "e.csv, line 2"),
    "a long line": ("x", X.replace("2.5,-2", "2.5,-2,1"),
                    "x.csv, line 3: .* has 3 columns by separator ',', the others have 2"),
    "lines that add up": ("x", X.replace("2.5,-2\n3.5,-3", "2.5\n-2,3.5,-3"), "x.csv, line 3: "),
    "byte-order mark, labels": ("y", "\ufeff" + Y, None),
    "byte-order mark, edges": ("e", "\ufeff" + EDGES, None),
    "empty first label": ("y", '""' + Y[1:], [-1, 1, 0, 1, 0, 1]),
    "empty cell of an edge": ("e", EDGES.replace("2,3", "2,"), "e.csv, line 3: column 2 is ''"),
    "column id": ("x", "id,a,b\n" + "".join(f"{i},{line}\n" for i, line in enumerate(X.split())), None),
    "column id in disorder": ("x", "a,node_id,b\n" + "".join(f"{i}.5,{i},{-i}\n" for i in (3, 1, 0, 5, 4, 2)),
                              "y.csv has no column of ids"),
    "ids without a name": ("x", "".join(f"{i},{line}\n" for i, line in enumerate(X.split())), None),
    "the index of pandas": ("x", ",0,1\n" + "".join(f"{i},{line}\n" for i, line in enumerate(X.split())), None),
    "semicolons": ("x", X.replace(",", ";"), None),
    "tabs and a header": ("e", "src\tdst\n" + EDGES.replace(",", "\t"), None),
    "spaces": ("e", "".join("%3s  %3s\n" % tuple(line.split(",")) for line in EDGES.split()), None),
    "destination first": ("e", "target;source\n"
                          + "".join(";".join(line.split(",")[::-1]) + "\n" for line in EDGES.split()), None),
    "comments": ("e", "# an edge a line\n" + EDGES.replace("2,3", "# so far\n2,3"), None),
    "names in a comment": ("e", "# dst,src\n"
                           + "".join(",".join(line.split(",")[::-1]) + "\n" for line in EDGES.split()), None),
    "quotes": ("e", '"source","target"\n' + re.sub(r"(\d)", r'"\1"', EDGES), None),
    "carriage returns": ("y", Y.replace("\n", "\r\n"), None),
    "old carriage returns": ("y", Y.replace("\n", "\r"), None),
    "blank lines": ("x", X.replace("\n", "\n\n"), None),
    "separators at the end": ("e", EDGES.replace("\n", ",\n"), None),
    "floats as ids": ("e", re.sub(r"(\d)", r"\1.0", EDGES), None),
    "no whole number": ("e", EDGES.replace("2,3", "2,3.5"),
                        "e.csv, line 3: column 2 is '3.5', which is not a whole number"),
    "beyond int64": ("e", EDGES.replace("2,3", "2,18446744073709551619"), "e.csv, line 3: .* 64 bits"),
    "no number": ("e", EDGES.replace("2,3", "2,x"), "e.csv, line 3: column 2 is 'x'"),
    "nan as id": ("e", EDGES.replace("2,3", "2,nan"), "e.csv, line 3: column 2 is 'nan'"),
    "a minus alone": ("x", X.replace("2.5,-2", "2.5,-"), "x.csv, line 3: column 2 is '-'"),
    "bars": ("e", EDGES.replace(",", "|"), "e.csv has one column: .*a comma, a semicolon, a tab or spaces"),
    "no such node": ("e", EDGES.replace("2,3", "2,6"),
                     "e.csv, line 3: there is no node 6: .*x.csv has the nodes 0 to 5"),
    "a weight": ("e", EDGES.replace("\n", ",1\n"), "more columns than are understood, column 3"),
    "a named weight": ("e", "source,target,weight\n" + EDGES.replace("\n", ",1\n"),
                       "understood, 'weight': leave them out"),
    "a label among features": ("x", "a,label\n" + X, "x.csv has a column 'label', and features must not tell"),
    "two columns of a name": ("x", "a,a\n" + X, "x.csv has two columns called 'a'"),
    "infinity": ("x", X.replace("2.5", "inf"), "x.csv, line 3: column 1 is 'inf', which is not a finite"),
    "beyond float32": ("x", X.replace("2.5", "1e39"), "x.csv, line 3: column 1 is 1e.39, which is too large"),
    "text as labels": ("y", Y.replace("0", "no").replace("1", "yes"), None),
    "missing labels": ("y", Y[:2] + "nan\n" + Y[4:6] + "-1\n" + Y[8:], [0, -1, 0, -1, 0, 1]),
    "labels by id": ("y", "id,label\n5,1\n3,1\n1,1\n0,0\n2,0\n", [0, 1, 0, 1, -1, 1]),
    "labels by id, twice": ("y", "id,label\n5,1\n3,1\n5,1\n", "y.csv, line 4: node 5 is there for the second time"),
    "NA among labels": ("y", Y.replace("1", "NA", 1), "y.csv, line 2: column 1 is 'NA', which is not a finite number"),
    "a header too many": ("y", "topic\n" + Y.replace("0", "no").replace("1", "yes"),
                          "y.csv, line 7: there are more labels"),
    "a header of an unknown name": ("y", "topic\n" + Y, None),
    "too few labels": ("y", Y[2:], "y.csv has 5 labels, .*x.csv has 6 rows"),
    "too many labels": ("y", Y + Y, "y.csv, line 12: there are more labels than the 6 rows"),
    "half a label": ("y", Y.replace("1", "0.5", 1), "y.csv, line 2: label 0.5 is no class"),
    "no labels": ("y", "-1\n" * 6, "y.csv has no label for any node"),
    "an endless quote": ("e", EDGES.replace("2,3", '2,"3'), "e.csv, line 3: .* has a quote that does not end"),
    "a quote over two lines": ("e", EDGES.replace("2,3\n3,0", '2,"3\n3",0'), "e.csv, line 3: .* has a quote"),
    "a zero byte": ("e", EDGES.replace("2,3", "2,\0003"), "e.csv, line 3: it holds a zero byte"),
    "Latin-1": ("e", EDGES.replace("2,3", "2,\xe9").encode("latin1"), "e.csv, line 3: byte 0xe9 is not UTF-8"),
    "UTF-16": ("e", EDGES.encode("utf-16"), "e.csv, line 1: byte 0xff is not UTF-8"),
    "gzip by content": ("e", gzip.compress(EDGES.encode()), None),
    "bzip2": ("x", bz2.compress(X.encode()), None),
    "xz": ("y", lzma.compress(Y.encode()), None),
    "gzip cut off": ("e", gzip.compress(EDGES.encode() * 1000)[:-6],
                     "e.csv cannot be read beyond line .*: Compressed file ended"),
    "gzip damaged": ("e", gzip.compress(EDGES.encode())[:-8] + bytes(8),
                     "e.csv cannot be read beyond line .*CRC check failed"),
    "zip": ("e", b"PK\3\4" + bytes(30), "e.csv is a zip or zstd archive"),
    "nothing": ("y", "", "y.csv is empty"),
    "a header only": ("e", "src,dst\n", "e.csv has a header and no rows"),
    "comments only": ("e", "# 0,1\n\n", "e.csv is empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_tables_of_strangers(tmp_path, capsys, case):
    name, content, outcome = DAMAGE[case]
    e, x, y = (_table_file(tmp_path / f"{part}.csv", content if part == name else good)
               for part, good in (("e", EDGES), ("x", X), ("y", Y)))  # fmt: skip
    args = dict(features=x, labels=y, split={"train": _table_file(tmp_path / "train.csv", "2\n5\n")})
    if isinstance(outcome, str):
        with pytest.raises(StoreError, match=outcome) as error:
            datasets.build(e, tmp_path / "s", **args)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
        assert {path.name for path in tmp_path.iterdir()} == {"e.csv", "x.csv", "y.csv", "train.csv"}
        return
    graph = GraphStore.open(datasets.build(e, tmp_path / "s", **args))
    edges, features, labels = EDGES_X_Y
    assert _edges(graph) == sorted(zip(*edges)) and graph.features.tensor.tolist() == features
    assert graph.labels.tolist() == (labels if outcome is None else outcome) and graph.split["train"].tolist() == [2, 5]
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in printed] == ["x.csv", "y.csv", "e.csv", "train.csv", "e.csv"], printed


def test_tables_say_what_was_guessed(tmp_path, capsys):
    file = _table_file(tmp_path / "e.csv", "# a\n# b\n\nsrc;dst\n0;1\n#c\n1;0\n")
    graph_tables.edges(file, tmp_path / "e", graph_tables.Nodes(2, "x.csv"))
    _, nodes = graph_tables.features(_table_file(tmp_path / "x.csv", "p,.5,1\nq,1,1\nr,0,0\n"), tmp_path / "x")
    graph_tables.labels(_table_file(tmp_path / "y.csv", "r;b c\np;a\n"), nodes)
    assert capsys.readouterr().out == (
        "e.csv: 2 columns by separator ';', header src;dst, 3 comments, 1 blank line, 2 rows\n"
        "x.csv: 3 columns by separator ',', no header, column 1 names the nodes, such as p, 3 rows, 2 features\n"
        "y.csv: 2 columns by separator ';', no header, column 1 taken as ids, column 2 as labels, 2 rows, classes a, b "
        "c, "
        "1 node without a label\n")  # fmt: skip


def test_tables_nodes_with_names(tmp_path):
    """Text, and integers that are not 0 to V-1, are mapped to the rows of the features; the names are kept."""
    for kind, names in (("text", ["anna", "bob", "#c", "d, e", "é", "6"]), ("numbers", [31336, 7, 0, 1061127, 5, 10])):
        quoted = [f'"{name}"' for name in names]
        e = "from,to\n" + "".join(f"{quoted[int(u)]},{quoted[int(v)]}\n"
                                  for u, v in (line.split(",") for line in EDGES.split()))
        x = "node,a,b\n" + "".join(f"{name},{line}\n" for name, line in zip(quoted, X.split())) if kind == "text" else \
            "paper_id,a,b\n" + "".join(f"{name},{line}\n" for name, line in zip(names, X.split()))  # fmt: skip
        y = "".join(f"{name};{label}\n" for name, label in sorted(zip(quoted, Y.split())))
        e, x, y, train = (_table_file(tmp_path / f"{kind}-{part}.csv", content) for part, content in (
            ("e", e), ("x", x), ("y", y), ("train", f"{quoted[0]}\n{quoted[2]}\n")))
        path = datasets.build(e, tmp_path / kind, features=x, labels=y, split={"train": train})
        graph = GraphStore.open(path)
        assert _edges(graph) == sorted(zip(*EDGES_X_Y[0])) and graph.features.tensor.tolist() == EDGES_X_Y[1]
        assert graph.labels.tolist() == EDGES_X_Y[2] and graph.split["train"].tolist() == [0, 2] and verify(path) == []
        assert (path / "nodes.txt").read_text("utf-8") == "".join(f"{name}\n" for name in names)
        assert list(map(str, names)) == graph.node_names() and "nodes.txt" in store.info(path)
        for part, content, complaint in ((e, "from,to\nzoe,7\n", "line 2"), (y, Y, "no column of ids"),
                                         (x, X, "line 1: column 1 is '#c'|there is no node")):
            good = part.read_bytes()
            with pytest.raises(StoreError, match=complaint):
                _table_file(part, content)
                datasets.build(e, tmp_path / "bad", features=x, labels=y, split={"train": train})
            part.write_bytes(good)
    with pytest.raises(StoreError, match="holds the ids of the nodes, but b is there more than once"):
        graph_tables.features(_table_file(tmp_path / "x.csv", "a,1\nb,2\nb,3\n"), tmp_path / "x")


def test_tables_names_of_nodes_are_guarded(tmp_path):
    """nodes.txt is under the store's checksums; a store from before that, which has it beside them, opens as it did."""
    x = _table_file(tmp_path / "x.csv", "".join(f"n{i},{line}\n" for i, line in enumerate(X.split())))
    e = _table_file(tmp_path / "e.csv", re.sub(r"(\d)", r"n\1", EDGES))
    y = _table_file(tmp_path / "y.csv", "".join(f"n{i},{i % 2}\n" for i in range(6)))
    built = datasets.build(e, tmp_path / "s", features=x, labels=y,
                           split={"train": _table_file(tmp_path / "t.csv", "n0\n")})
    names = (built / "nodes.txt").read_bytes()
    for content, opens in ((names.replace(b"n3", b"n9"), True), (names[:-3], False), (names + b"n6\n", False),
                           (None, False)):
        (built / "nodes.txt").write_bytes(content) if content is not None else (built / "nodes.txt").unlink()
        problems = verify(built)
        assert len(problems) == 1 and problems[0].startswith("nodes.txt: "), problems
        assert _run("store.py", "verify", built).returncode == 1
        with nullcontext() if opens else pytest.raises(StoreError, match="nodes.txt .*rebuild the store"):
            GraphStore.open(built)
    (built / "nodes.txt").write_bytes(names)
    assert verify(built) == []
    for wrong in ({"shape": [7]}, {"dtype": "int64"}, {"sha256": None}):
        meta = json.loads((built / "meta.json").read_bytes())
        meta["files"]["nodes.txt"] = {k: v for k, v in (meta["files"]["nodes.txt"] | wrong).items() if v is not None}
        kept = (built / "meta.json").read_bytes()
        (built / "meta.json").write_bytes(disk.dump_meta(meta))
        with pytest.raises(StoreError, match="describes 'nodes.txt' as .* which does not fit the graph"):
            GraphStore.open(built)
        (built / "meta.json").write_bytes(kept)
    meta = json.loads((built / "meta.json").read_bytes())
    del meta["files"]["nodes.txt"]
    (built / "meta.json").write_bytes(disk.dump_meta(meta))
    assert GraphStore.open(built).node_names() is None and verify(built) == []


def test_store_names_of_nodes(tmp_path):
    x = np.eye(3, dtype=np.float32)
    for names, complaint in ((["a", "b"], "node_names has 2 names: 3 are needed"),
                             (["a", "b\nc", "d"], "name 1, 'b.nc', .* line"),
                             (["a", "b", "a"], "node_names holds 'a' more than once")):  # fmt: skip
        with pytest.raises(StoreError, match=complaint):
            build_store(tmp_path / "s", edge_index=[[0, 1], [1, 2]], features=x, node_names=names)
    assert not (tmp_path / "s").exists()
    path = build_store(tmp_path / "s", edge_index=[[0, 1], [1, 2]], features=x, node_names=["a", "\u2028b", ""])
    assert GraphStore.open(path).node_names() == ["a", "\u2028b", ""] and verify(path) == []


def test_tables_classes_are_kept(tmp_path):
    e, x, y = (_table_file(tmp_path / f"{name}.csv", text) for name, text in (
        ("e", EDGES), ("x", X),
        ("y", "id,topic\n" + "".join(f"{i},{t}\n" for i, t in enumerate("zoo,art,zoo,,law,art".split(","))))))
    graph = GraphStore.open(datasets.build(e, tmp_path / "s", features=x, labels=y))
    assert graph.labels.tolist() == [2, 0, 2, -1, 1, 0] and graph.meta["source"]["classes"] == ["art", "law", "zoo"]


def test_tables_ids_of_a_split(tmp_path):
    nodes = graph_tables.Nodes(9, "x.csv")
    for text in ("3\n1\n8\n", "id\n3\n1\n8\n", "train\n3\n1\n8", '"3"\r\n"1"\r\n"8"\r\n'):
        assert graph_tables.ids(_table_file(tmp_path / "t.csv", text), nodes).tolist() == [3, 1, 8]
    for text, complaint in (("", "is empty"), ("id\n", "no rows"),
                            ("0\n1\n1\n0\n", "t.csv looks like a mask of 0 and 1: the ids"),
                            ("0\n2\n2\n0\n", "line 3: node 2 is there for the second time"),
                            ("9\n", "there is no node 9"), ("0,1\n2,3\n", "has 2 columns")):  # fmt: skip
        with pytest.raises(StoreError, match=complaint):
            graph_tables.ids(_table_file(tmp_path / "t.csv", text), nodes)


def test_tables_weights_and_times(tmp_path):
    file = _table_file(tmp_path / "e.csv",
                       "w,dst,Source ID,Timestamp\n1,0,1,1700000000123456789\n.5,1,2,1700000000123456788\n")
    nodes = graph_tables.Nodes(3, "x.csv")
    keep = {"edge_weight": ["w"], "edge_time": ["4"]}
    edge_index, more = graph_tables.edges(file, tmp_path / "e", nodes, keep)
    assert edge_index.tolist() == [[1, 2], [0, 1]] and list(more) == ["edge_weight", "edge_time"]
    assert more["edge_weight"].tolist() == [1, 0.5]
    assert more["edge_time"].tolist() == [1700000000123456789, 1700000000123456788]
    _, more = graph_tables.edges(file, tmp_path / "e", nodes, {"edge_features": ["Timestamp", "w"]})
    assert more["edge_features"].tolist() == [[np.float32(1.7e18), 1], [np.float32(1.7e18), 0.5]]
    for keep, complaint in (({"edge_weight": ["w"]},
                             "understood, 'Timestamp': leave them out, or say what they are by --w"),
                            ({"edge_weight": ["W"]},
                             "has no column 'W', and there is no file of that name: it has w, dst"),
                            ({"edge_weight": ["5"]}, "has no column '5'"),
                            ({"edge_weight": ["dst"]}, "'dst' is taken for two")):  # fmt: skip
        with pytest.raises(StoreError, match=complaint):
            graph_tables.edges(file, tmp_path / "e", nodes, keep)
    for header in ("source,paper", "dst,src,dst2", "from,u,to"):
        with pytest.raises(StoreError, match="call one of them source|more columns"):
            text = f"{header}\n" + ",".join("012"[:len(header.split(","))]) + "\n"
            graph_tables.edges(_table_file(tmp_path / "e.csv", text), tmp_path / "e", nodes)


def test_tables_change_far_inside(tmp_path):
    """Pieces of a table are compared with each other, and lines are counted over all of them."""
    good, count = b"1.5,2\n", 300_000
    for bad, complaint in ((b"1,2,3,4\n" * 10, "has 4 columns"), (b"1\n2\n", "has 1 column"),
                           (b"1,x\n", "column 2 is 'x'")):
        with pytest.raises(StoreError, match=f"line {count + 1}: .*{complaint}"):
            graph_tables.features(_table_file(tmp_path / "x.csv", good * count + bad), tmp_path / "x")
    x, _ = graph_tables.features(_table_file(tmp_path / "x.csv", good * count + b'"3", 4 \n\n# c\n' + good * count),
                                 tmp_path / "x")
    assert len(x) == 2 * count + 1 and x[count].tolist() == [3, 4] and (np.delete(x, count, 0) == [1.5, 2]).all()


def test_tables_numbers_are_those_of_python(tmp_path):
    """Whether a piece is parsed by numpy at once or cell by cell, the bits are those of int and float."""
    random = np.random.default_rng(0)
    floats = [f(v) for v in random.standard_normal(300) * 10.0 ** random.integers(-300, 300, 300)
              for f in (repr, "{:.3e}".format, "{:+.25g}".format)]
    floats = [v.removeprefix("np.float64(").rstrip(")")
              for v in floats] + ["5.", ".5", "-0", "007", "1e-400", "4.9e-324", "1E5"]
    whole = [str(v) for v in random.integers(0, 1 << 62, 300)]
    whole += ["0", "9223372036854775807", "0012", "-9223372036854775808", "+7", "-0"]
    for kind, cells, dtype in (("real", floats, float), ("whole", whole[:300], int), ("whole", whole, int),
                               ("whole", ["2.0", "3e2"], float)):
        for form in ("{},{}\n", '"{}", {}\n', "{};{}\n", "{}\t{}\n", "{} {}\n", "  {}   {}\n"):
            text = "".join(form.format(*pair) for pair in zip(cells, reversed(cells))).encode()
            chunks = list(tables.Table(io.BytesIO(text), "t.csv").chunks(**{kind: [0, 1]}))
            found = np.concatenate([chunk[2 if kind == "real" else 1] for chunk in chunks])
            assert [v.tobytes() for v in found[:, 0]] == [np.array(dtype(c), found.dtype).tobytes()
                                                          for c in cells], (kind, form)
            assert [line for chunk in chunks for line in chunk[0]] == list(range(1, len(cells) + 1))
    for cell in ("1_0", "\uff11", "0x10", "1e", "--1", "1-2", "", "-", ".", "e5", "1 2", "nan", "inf", "1e999", "1,5",
                 "9" * 5000):
        for kind in ("real", "whole"):
            with pytest.raises(StoreError, match="line 2: column 2"):
                list(tables.Table(io.BytesIO(f'1,2\n1,"{cell}"\n1,2\n'.encode()), "t.csv").chunks(**{kind: [0, 1]}))
    for cell in ("9223372036854775808", "-9223372036854775809", "9007199254740992.0", "1.5", "1e-3"):
        with pytest.raises(StoreError, match="not a whole number of 64 bits"):
            list(tables.Table(io.BytesIO(f"1,2\n1,{cell}\n".encode()), "t.csv").chunks(whole=[0, 1]))


def _read_slowly(content, separator, width, trailing):
    """An independent reading: Python's csv module line by line -> rows, or None where they are not equally wide."""
    rows = []
    try:
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None
    for line in text.split("\n"):
        if line.strip(" ") == "" or line.lstrip(" ").startswith("#"):
            continue
        if separator == " ":
            line = line if '"' in line else re.sub(" +", " ", line.strip(" "))
        try:
            row = [cell.strip()
                   for cell in next(csv.reader([line], delimiter=separator, skipinitialspace=separator != " ",
                                               strict=True))]
        except csv.Error:
            return None
        if len(row) != width + trailing or trailing and row.pop() or "\0" in line or "\ufeff" in line:
            return None
        rows.append(row)
    return rows


def _slow_number(cell, whole):
    if not re.fullmatch("[-+0-9.eE]+", cell):
        raise ValueError(cell)
    value = int(cell) if re.fullmatch("[-+]?[0-9]+", cell) and whole else float(cell)
    if not (abs(value) < 1 << 63 and value == int(value) if whole else abs(value) < 3.4e38):
        raise ValueError(cell)
    return int(value) if whole else float(np.float32(value))


def _slow_meaning(kind, rows):
    """What the rows of a mutated table mean, in plain Python; None where they mean nothing."""
    def number(cell):
        return cell == "nan" or re.fullmatch("[-+0-9.][-+0-9.eE]*", cell) is not None

    if not rows:
        return None
    names = [re.sub("[^a-z0-9]", "", name.lower()) for name in rows[0]]  # spelt anyhow
    named = names == ["label"]
    if kind != "text":
        named = rows[0] != [""] and not any(map(number, rows[0])) and not rows[0][0][:1] in "+-.0123456789"
    names = names if named else None
    rows = rows[1:] if names else rows
    try:
        if kind == "edges":
            swapped = names is not None and names[0] in ("dst", "dest") and names[1] == "src"
            order = [1, 0] if swapped else [0, 1]
            pairs = [[_slow_number(row[j], True) for j in order] for row in rows]
            return pairs if pairs and all(0 <= v < 30 for pair in pairs for v in pair) else None
        if kind == "features":
            return [[_slow_number(cell, False) for cell in row] for row in rows] or None
        if len(rows) != 25:
            return None
        if kind == "labels":
            found = [-1 if cell in ("", "nan") else _slow_number(cell, True) for cell, in rows]
            return found if min(found) >= -1 else None
        classes = sorted({cell for cell, in rows} - {"", "nan"})
        return [-1 if cell in ("", "nan") else classes.index(cell) for cell, in rows]
    except (ValueError, OverflowError):
        return None


def test_tables_fuzz(tmp_path, capsys):
    """500 tables, each damaged in one or two places: read as the csv module and plain Python read them, or refused.

    RINGBLOCK_FUZZ=60000 makes it as many.
    """
    random = np.random.default_rng(0)
    nodes, counts = graph_tables.Nodes(30, "x.csv"), collections.Counter()
    for trial in range(int(os.environ.get("RINGBLOCK_FUZZ", 500))):
        kind = ("edges", "features", "labels", "text")[trial % 4]
        separator = ",;\t "[random.integers(4)] if kind in ("edges", "features") else ","
        trailing, header, quotes = (bool(random.integers(4) == 0) for _ in range(3))
        trailing &= kind in ("edges", "features") and separator != " "
        width = dict(edges=2, features=int(random.integers(1, 6))).get(kind, 1)
        separator, trailing = (",", False) if width == 1 else (separator, trailing)
        if kind == "edges":
            rows = random.integers(0, 30, (25, 2)).tolist()
        elif kind == "features":
            rows = [["%.4g" % v for v in row] for row in random.standard_normal((25, width))]
        else:
            rows = [[("cat", "dog", "c d")[v] if kind == "text" else v] for v in random.integers(0, 3, 25)]
        names = dict(edges=[["src", "dst"], ["dst", "src"]][random.integers(2)],
                     features=list("pqrst"[:width])).get(kind, ["label"])
        lines = [[f'"{cell}"' if quotes else str(cell) for cell in row] for row in ([names] if header else []) + rows]
        end = ("\n", "\r\n")[random.integers(2)]
        content = bytearray("".join(separator.join(row) + separator * trailing + end for row in lines).encode())
        for _ in range(random.integers(1, 3)):
            at, what = int(random.integers(len(content))), random.integers(8)
            if what < 4:  # put something in, or in the place of something
                alphabet = ["0", "7", "-", ".", "e", " ", "#", '"', "\n", "\r", separator, ",", ";", "\t", "\0",
                            "x", "nan", "\ufeff", "é", "99999999999"]
                content[at:at + int(what < 2)] = alphabet[random.integers(len(alphabet))].encode()
            elif what < 6:  # take something out
                del content[at:at + int(random.integers(1, 4))]
            elif what == 6:  # say something twice
                content[at:at] = content[at:at + int(random.integers(1, 9))]
            else:
                content = content[:max(at, len(content) - 20)]
        file, content = _table_file(tmp_path / "t.csv", bytes(content)), bytes(content)
        rows = _read_slowly(content, separator, width, trailing)
        expected = None if rows is None else _slow_meaning(kind, rows)
        try:
            if kind == "edges":
                found = graph_tables.edges(file, tmp_path / "e", nodes)[0].T.tolist()
            elif kind == "features":
                found = graph_tables.features(file, tmp_path / "x")[0].tolist()
            else:
                found = graph_tables.labels(file, graph_tables.Nodes(25, "x.csv"))[0].tolist()
        except StoreError as error:
            assert "\n" not in str(error) and str(file) in str(error)
            counts["refused"] += 1
            counts["needlessly"] += expected is not None
            continue
        assert found == expected, (trial, kind, content)
        counts["read"] += 1
    assert counts["read"] > 90 and counts["refused"] > 200 and counts["needlessly"] < 15, counts


def test_tables_damaged_archives(tmp_path):
    """Wherever a compressed table is cut off or changed, it is refused or read as it was."""
    random, nodes = np.random.default_rng(0), graph_tables.Nodes(1000, "x.csv")
    pairs = random.integers(0, 1000, (2000, 2))
    text = "".join(f"{u},{v}\n" for u, v in pairs).encode()
    outcomes = collections.Counter()
    for pack in (gzip.compress, bz2.compress, lzma.compress):
        good = pack(text)
        two = _table_file(tmp_path / "e.csv",
                          pack(text[:text.index(b"\n", 9000) + 1]) + pack(text[text.index(b"\n", 9000) + 1:]))
        # archives one after the other
        assert np.array_equal(graph_tables.edges(two, tmp_path / "e", nodes)[0].T, pairs)
        for trial in range(60):
            bad = bytearray(good)
            if trial % 3:
                bad[random.integers(len(bad))] ^= 1 << random.integers(8)
            else:
                bad = bad[:random.integers(1, len(bad))]
            try:
                found = graph_tables.edges(_table_file(tmp_path / "e.csv", bytes(bad)), tmp_path / "e", nodes)[0].T
            except StoreError as error:
                assert str(tmp_path / "e.csv") in str(error) and "\n" not in str(error)
                outcomes["refused"] += 1
            else:
                assert np.array_equal(found, pairs)
                outcomes["read"] += 1
    assert outcomes["refused"] > 120, outcomes


def test_tables_take_little_memory(tmp_path):
    """Lines without an end, archives that unpack to a thousand times their size: refused before they are in memory."""
    nodes = graph_tables.Nodes(10, "x.csv")
    endless, labels = gzip.compress(b"1," * (1 << 23), 1), gzip.compress(b"1\n" * (1 << 22), 1)
    comments = gzip.compress((b"#" * 999 + b"\n") * (1 << 15), 1)
    hungry = lzma.compress(b"0,1\n", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}])
    tracemalloc.start()
    try:
        for content, complaint in ((endless, "line 1: it goes on for more than 8 MiB"), (comments, "is empty"),
                                   (hungry, "Memory usage limit")):  # fmt: skip
            with pytest.raises(StoreError, match=complaint):
                graph_tables.edges(_table_file(tmp_path / "e.csv", content), tmp_path / "e", nodes)
        with pytest.raises(StoreError, match="zero, line 1: it goes on for more than"):
            graph_tables.features("/dev/zero", tmp_path / "x")
        with pytest.raises(StoreError, match="there are more labels than the 10 rows"):
            graph_tables.labels(_table_file(tmp_path / "y.csv", labels), nodes)
        assert tracemalloc.get_traced_memory()[1] < 90 << 20
    finally:
        tracemalloc.stop()


def test_tables_parquet(tmp_path, monkeypatch):
    file = _table_file(tmp_path / "e.parquet", b"PAR1" + bytes(20))
    nodes = graph_tables.Nodes(6, "x.csv")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(StoreError, match=r"e.parquet is parquet: reading it needs pyarrow \(pip install pyarrow\)"):
            graph_tables.edges(file, tmp_path / "e", nodes)
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    with pytest.raises(StoreError, match="e.parquet cannot be read as parquet"):
        graph_tables.edges(file, tmp_path / "e", nodes)
    random = np.random.default_rng(0)
    x = random.standard_normal((6, 3)).astype(np.float32)
    written = {
        "e": {"dst": pa.array(EDGES_X_Y[0][1], pa.uint8()), "src": EDGES_X_Y[0][0]},
        "x": {"id": ["#a", 'b"', "c,", " d", "é", ""], **{f"f{j}": x[:, j] for j in range(3)}},
        "y": {"label": pa.array([2, None, 0, 1, None, 1])},
    }
    for name, columns in written.items():
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    assert graph_tables.edges(file, tmp_path / "e", nodes)[0].tolist() == EDGES_X_Y[0]
    assert graph_tables.labels(tmp_path / "y.parquet", nodes)[0].tolist() == [2, -1, 0, 1, -1, 1]
    with pytest.raises(StoreError, match="a cell is empty"):
        graph_tables.features(tmp_path / "x.parquet", tmp_path / "x")
    written["x"]["id"][5] = "f"
    parquet.write_table(pa.table(written["x"]), tmp_path / "x.parquet")
    found, nodes = graph_tables.features(tmp_path / "x.parquet", tmp_path / "x")
    assert np.array_equal(found, x) and nodes.names == ["#a", 'b"', "c,", "d", "é", "f"]
    for columns, complaint in (({"src": [[1]], "dst": [[2]]}, "cannot be read as parquet"),
                               ({"src": [None, 1], "dst": [1, 2]}, "row 1: 'src' is ''"),
                               ({"src": [1.5], "dst": [2]}, "row 1: 'src' is '1.5'")):  # fmt: skip
        parquet.write_table(pa.table(columns), file)
        with pytest.raises(StoreError, match=complaint):
            graph_tables.edges(file, tmp_path / "e", graph_tables.Nodes(6, "x.csv"))


# ---------------------------------------------------------------------------------------------------------------------
# store.py at scale: rows that change, many small graphs, kills, damage, full disks


def _graphs(count, first=0, seed=0):
    """A GraphBatch of `count` random graphs; the one numbered `first + i` has that number as its target."""
    random = np.random.default_rng([seed, first, count])
    nodes = random.integers(1, 9, count)
    edges = random.integers(0, 12, count)
    edge_index = random.integers(0, np.repeat(nodes, edges), (2, edges.sum()))
    x, e = random.integers(0, 9, (nodes.sum(), 2), np.uint8), random.standard_normal((edges.sum(), 3), np.float32)
    y = np.stack([np.arange(first, first + count), nodes], 1).astype(np.float32)
    return block_diagonal(nodes, edges, edge_index, x, e, y)


def _equal(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def _in_child(work, kill_after=None):
    """Run work() in a forked process -> its wait status; with kill_after, SIGKILL comes after that many seconds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            tqdm.set_lock(threading.RLock())  # its own is shared with the parent, and would die with the child
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_store_put_rows(tmp_path, dtype):
    rows = torch.randint(0, 200, (200, 5)).to(dtype)
    path = build_store(tmp_path / "g", backend="lmdb", block_rows=7, **dict(_graph(), features=rows))
    features = GraphStore.open(path).features
    ids = torch.randperm(200)[:50]
    rows[ids] = torch.randint(0, 200, (50, 5)).to(dtype)
    features.put_rows(ids, rows[ids])
    features.put_rows(torch.tensor([9, 9]), torch.stack([rows[0], rows[9]]))  # the last one counts
    features.put_rows(torch.tensor([], dtype=torch.int64), rows[:0])
    assert torch.equal(features.gather(torch.arange(200)), rows)
    assert torch.equal(GraphStore.open(path).features.gather(ids), rows[ids]) and verify(path) == []
    for bad, words in ((rows[:2], r"rows is \[2, 5\]"), (rows[:1].double(), "float64.* is needed"),
                       (rows[:1, :3], "rows")):
        with pytest.raises(StoreError, match=words):
            features.put_rows(torch.tensor([1]), bad)
    with pytest.raises(IndexError, match="node 200 is out of range"):
        features.put_rows(torch.tensor([200]), rows[:1])
    if dtype.is_floating_point:
        with pytest.raises(StoreError, match=r"rows\[0, 2\] is nan"):
            features.put_rows(torch.tensor([1]), torch.tensor([[0, 0, float("nan"), 0, 0]]).to(dtype))
    assert torch.equal(features.gather(torch.arange(200)), rows) and verify(path) == []


def test_store_put_rows_does_not_hide_damage(tmp_path):
    x = torch.rand(200, 5)
    path = build_store(tmp_path / "g", backend="lmdb", block_rows=50, **dict(_graph(), features=x))
    data = (path / "features.lmdb").read_bytes()
    at = data.index(x[60].numpy().tobytes())
    (path / "features.lmdb").write_bytes(data[:at] + b"\xff" + data[at + 1:])
    features = GraphStore.open(path).features
    with pytest.raises(StoreError, match="block 1 is missing or damaged"):
        features.put_rows(torch.tensor([0, 70]), x[:2])
    assert torch.equal(features.gather(torch.arange(50)), x[:50])  # nothing of it was done
    assert "features.lmdb" in verify(path)[0]


def test_store_readers_see_all_of_an_update_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_file, "MAP_ROOM", 0)  # so that the file outgrows its map, here and in the child
    rows = torch.zeros(400, 64)
    args = dict(_graph(num_nodes=400), features=rows)
    features = GraphStore.open(build_store(tmp_path / "g", backend="lmdb", block_rows=9, **args)).features
    graphs = GraphDataset.open(build_graphs(tmp_path / "many", [_graphs(10)]))
    ids, seen = torch.arange(400), set()
    assert features.gather(ids).eq(0).all() and len(graphs) == 10

    def work():
        for number in range(1, 60):
            features.put_rows(ids, torch.full_like(rows, number))
            graphs.append(_graphs(50, first=len(graphs)))

    child = threading.Thread(target=lambda: seen.add(f"exit {_in_child(work)}"))
    child.start()
    while child.is_alive():
        read, count = features.gather(ids), len(graphs)
        assert read.eq(read[0, 0]).all() and count % 50 == 10
        assert graphs.batch([0, count - 1]).y[:, 0].tolist() == [0, count - 1]
        seen.add(read[0, 0].item())
    assert "exit 0" in seen and len(seen) > 5, seen
    assert features.gather(ids).eq(59).all() and len(graphs) == 10 + 59 * 50
    assert verify(tmp_path / "g") == verify_graphs(tmp_path / "many") == []


def _reads_as_nobody(path, ids, stop, results):
    """Gather as a user who may not write until told to stop -> how many gathers were torn, how many states were
    seen."""
    os.setgid(65534)
    os.setuid(65534)
    torch.set_num_threads(1)  # of the others a fork has none
    features, torn, seen = GraphStore.open(path).features, 0, set()
    while not stop.is_set():
        read = features.gather(ids)
        torn += not bool(read.eq(read[0, 0]).all())
        seen.add(read[0, 0].item())
    results.put((torn, len(seen), features.file._locks))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
def test_store_another_users_reader_sees_all_of_an_update_or_none():
    """The reader may not write the lock file, so the writer cannot know what it reads."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        rows, ids = torch.zeros(2000, 64), torch.arange(2000)
        path = build_store(Path(folder, "g"), backend="lmdb", block_rows=9,
                           **dict(_graph(num_nodes=2000), features=rows))
        context = multiprocessing.get_context("fork")
        stop, results = context.Event(), context.Queue()
        reader = context.Process(target=_reads_as_nobody, args=(path, ids, stop, results))
        features = GraphStore.open(path).features
        features.put_rows(ids[:1], rows[:1])
        reader.start()
        for number in range(1, 1001):
            features.put_rows(ids, torch.full_like(rows, number))
        stop.set()
        torn, states, locks = results.get(timeout=60)
        reader.join(20)
        assert torn == 0 and states > 20 and not locks


def test_store_a_fork_while_threads_wait_to_grow_the_map(tmp_path):
    """The child of such a fork has none of these threads and must not wait for them."""
    features = GraphStore.open(build_store(tmp_path / "g", backend="lmdb", **_graph())).features

    def reads():
        with features.file.transaction():
            time.sleep(0.2)

    for _ in range(4):
        threads = [threading.Thread(target=reads)]
        threads += [threading.Thread(target=features.file._resize, args=(1 << 31,)) for _ in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        child = multiprocessing.get_context("fork").Process(target=features.gather, args=(torch.arange(3),))
        child.start()
        child.join(20)
        child.kill()
        for thread in threads:
            thread.join()
        assert child.exitcode == 0


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
def test_store_pickles_as_its_path(tmp_path, backend):
    graph = GraphStore.open(build_store(tmp_path / "g", backend=backend, **_graph()))
    many = GraphDataset.open(build_graphs(tmp_path / "many", [_graphs(4)]))
    for thing in (graph, graph.features, many):
        data = pickle.dumps(thing)
        assert len(data) < 1000
    ids = torch.arange(9)
    assert torch.equal(pickle.loads(pickle.dumps(graph.features)).gather(ids), graph.features.gather(ids))
    assert torch.equal(pickle.loads(pickle.dumps(graph)).indices, graph.indices) and len(pickle.loads(data)) == 4


def test_store_a_transaction_keeps_its_state_while_others_write(tmp_path):
    rows = torch.zeros(400, 64)
    args = dict(_graph(num_nodes=400), features=rows)
    features = GraphStore.open(build_store(tmp_path / "g", backend="lmdb", block_rows=9, **args)).features

    with features.file.transaction() as txn:
        child = subprocess.run([sys.executable, "-c", f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import torch, store
features = store.GraphStore.open({str(tmp_path / "g")!r}).features
for number in range(1, 8):  # without regard for readers LMDB would use pages again after two of them
    features.put_rows(torch.arange(400), torch.full((400, 64), float(number)))
"""])
        assert child.returncode == 0
        assert all(not features._block(txn, number, check=True).any() for number in range(45))
    assert features.gather(torch.arange(400)).eq(7).all()


def test_store_a_later_state_that_was_damaged_is_not_passed_over_for_the_one_before(tmp_path):
    """LMDB takes the one of two states with the higher number: if that number or the state is damaged, the other
    one."""
    path = build_graphs(tmp_path / "many", [_graphs(5)])
    for more in (3, 4):
        data = (path / "graphs.lmdb").read_bytes()
        pages = 0, struct.unpack_from("<I", data, 40)[0]
        later = max(pages, key=lambda at: struct.unpack_from("<Q", data, at + 144)[0])
        for first, count in ((144, 1), (144, 8), (128, 24), (136, 8)):
            damaged = bytearray(data)
            damaged[later + first:later + first + count] = bytes(count)
            (path / "graphs.lmdb").write_bytes(damaged)
            with pytest.raises(StoreError, match="its header|a header that makes no sense|is truncated"):
                GraphDataset.open(path)
        (path / "graphs.lmdb").write_bytes(data)
        GraphDataset.open(path).append(_graphs(more, first=len(GraphDataset.open(path))))


def test_store_a_closed_file_is_opened_anew(tmp_path):
    """Of the same number on the disk, as that of a file which was removed can be; what was closed is still held."""
    pytest.importorskip("lmdb")
    closed = lmdb_file.LmdbFile(tmp_path / "f.lmdb", sync=False)
    closed.append([b"a"])
    closed.close()
    again = lmdb_file.LmdbFile(tmp_path / "f.lmdb", sync=False)
    again.append([b"b"])
    assert again.read(again.count) == 2
    again.close()


def test_store_map_grows_while_threads_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_file, "MAP_ROOM", 0)
    graphs, done = GraphDataset.open(build_graphs(tmp_path / "many", [_graphs(50)])), threading.Event()

    def read():
        while not done.is_set():
            assert graphs.batch(range(50)).y[:, 0].tolist() == list(range(50))

    def work():
        with ThreadPoolExecutor(4) as pool:
            reading = [pool.submit(read) for _ in range(4)]
            for number in range(1, 100):
                graphs.append(_graphs(50, first=50 * number))
            done.set()
            [future.result() for future in reading]
        assert len(graphs) == 5000

    assert _in_child(work) == 0
    assert verify_graphs(tmp_path / "many") == []


def test_store_lmdb_forks_while_its_threads_read(tmp_path):
    args = _graph()
    features = GraphStore.open(build_store(tmp_path / "g", backend="lmdb", block_rows=3, **args)).features
    x, ids, done = torch.from_numpy(args["features"]), torch.arange(200), threading.Event()

    def read():
        while not done.is_set():
            features.gather(ids)

    def work():
        features.put_rows(ids[:5], x[:5])
        assert torch.equal(features.gather(ids), x)

    threads = [threading.Thread(target=read) for _ in range(4)]
    [thread.start() for thread in threads]
    try:
        assert [_in_child(work) for _ in range(10)] == [0] * 10
    finally:
        done.set()
        [thread.join() for thread in threads]
    assert torch.equal(features.gather(ids), x)


@pytest.mark.parametrize("backend", ["mmap", "lmdb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_larger_than_memory_is_gathered_on_threads(tmp_path, monkeypatch, dtype, backend):
    x = torch.randn(200, 5).to(dtype)
    path = build_store(tmp_path / "g", backend=backend, **dict(_graph(), features=x))
    assert not GraphStore.open(path).features.large
    monkeypatch.setattr(store, "free_host_bytes", lambda: 1000)
    features = GraphStore.open(path).features
    assert features.large and not hasattr(features, "tensor")
    for ids in (torch.randint(200, (1000,)), torch.tensor([7], dtype=torch.int32), torch.tensor([], dtype=torch.int64)):
        assert torch.equal(features.gather(ids), x[ids.long()])
    with pytest.raises(IndexError, match="node 200"):
        features.gather(torch.tensor([200]))


def test_store_graphs_round_trip(tmp_path):
    batches = [_graphs(30), _graphs(12, first=30)]
    path = build_graphs(tmp_path / "many", batches, split={"train": [3, 1], "test": range(30, 42)}, source="a test")
    graphs = GraphDataset.open(path)
    assert len(graphs) == 42 and graphs.split["train"].tolist() == [3, 1] and len(graphs.split["valid"]) == 0
    assert (graphs.node_dim, graphs.edge_dim, graphs.target_dim, graphs.node_dtype) == (2, 3, 2, torch.uint8)
    assert _equal(graphs.batch(range(30)), batches[0]) and _equal(graphs.batch(torch.arange(30, 42)), batches[1])
    graphs.append(_graphs(8, first=42))
    picked = graphs.batch([44, 0, 44])
    assert picked.y[:, 0].tolist() == [44, 0, 44] and picked.graph_ids.bincount().tolist() == picked.y[:, 1].tolist()
    for i, number in enumerate((44, 0, 44)):  # each graph on its own is the same as inside a batch
        alone, (first, last) = graphs.batch([number]), (picked.graph_ids == i).nonzero()[[0, -1], 0].tolist()
        a, b = picked.indptr[first].item(), picked.indptr[last + 1].item()
        assert torch.equal(picked.x[first:last + 1], alone.x) and torch.equal(picked.e[a:b], alone.e)
        assert torch.equal(picked.indices[a:b] - first, alone.indices)
        assert torch.equal(picked.indptr[first:last + 2] - a, alone.indptr)
    for number in (50, -1):
        with pytest.raises(IndexError, match=f"graph {number} is out of range"):
            graphs.batch([0, number])
    assert graphs.batch([]).x.shape == (0, 2) and verify_graphs(path) == []
    assert store.main(["info", str(path)]) == store.main(["verify", str(path)]) == 0
    with pytest.raises(StoreError, match="many small graphs: open it as GraphDataset"):
        GraphStore.open(path)


def test_store_graphs_refuse_what_makes_no_graph(tmp_path):
    good = _graphs(5)
    path = build_graphs(tmp_path / "many", [good])
    graphs, before = GraphDataset.open(path), _sums(path)["graphs.lmdb"]
    for words, changes in (
        ("float64.* is needed", {"y": good.y.double()}), (r"node rows are \[\d+, 1\]", {"x": good.x[:, :1]}),
        ("do not fit", {"x": good.x[1:]}), ("do not fit", {"y": good.y[1:]}), ("do not fit", {"e": good.e[1:]}),
        ("an edge between two graphs", {"indices": good.indices.flip(0)}),
        ("an edge between two graphs", {"graph_ids": good.graph_ids.flip(0)}),
        ("target rows.* is nan", {"y": good.y * float("nan")}),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=words):
            graphs.append(good._replace(**changes))
    assert _sums(path)["graphs.lmdb"] == before
    for words, call in (
        ("batches is empty", lambda: build_graphs(tmp_path / "b", [])),
        ("holds graph 5: graph ids", lambda: build_graphs(tmp_path / "b", [good], split={"train": [5]})),
        ("exists already", lambda: build_graphs(path, [good])),
        ("edge 1 goes from node 0 to node 2",
         lambda: block_diagonal([2, 9], [2, 0], [[0, 0], [1, 2]], [0] * 11, [0] * 2, [0] * 2)),
        ("do not fit", lambda: block_diagonal([2, 0], [1, 0], [[0], [1]], [0] * 2, [0], [0] * 2)),
        ("do not fit", lambda: block_diagonal([2, 1], [1, 0], [[0], [1]], [0] * 3, [], [0] * 2)),
        ("two dimensions", lambda: build_graphs(tmp_path / "b", [good._replace(y=good.y[:, 0])])),
    ):
        with pytest.raises(StoreError, match=words):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["many"]


def test_store_killed_at_any_moment_is_the_old_one_or_the_new_one(tmp_path):
    random, args = np.random.default_rng(0), _graph(num_nodes=400)
    rows = torch.zeros(400, 5)
    path = build_store(tmp_path / "rows", backend="lmdb", block_rows=3, **dict(args, features=rows))
    many = build_graphs(tmp_path / "many", [_graphs(10)])
    built, left, went_on, seconds = 0, 0, [0, 0, 0], [0.05] * 3  # what one build, append, put_rows takes here and now

    def build():
        for number in range(built, built + 1000):
            build_store(tmp_path / f"g{number}", backend=("mmap", "lmdb")[number % 2], **args)

    def append():
        graphs = GraphDataset.open(many)
        while True:
            graphs.append(_graphs(40, first=len(graphs)))

    def put_rows():
        features = GraphStore.open(path).features
        for number in range(1 + int(features.gather(torch.tensor([0]))[0, 0]), 1 << 20):
            features.put_rows(torch.arange(400), torch.full_like(rows, number))

    for kill in range(54):
        kind = kill % 3
        status = _in_child((build, append, put_rows)[kind], kill_after=random.uniform(0.002, 0.02 + 4 * seconds[kind]))
        assert os.WTERMSIG(status) == signal.SIGKILL
        if kind == 0:
            left += any(p.name.startswith(".") for p in tmp_path.iterdir())
            while (tmp_path / f"g{built}").exists():
                assert verify(tmp_path / f"g{built}") == []
                built, went_on[0] = built + 1, went_on[0] + 1
            began = time.monotonic()
            build_store(tmp_path / f"g{built}", **args)  # the retry, which also clears away what the dead build left
            built += 1
            assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
        elif kind == 1:
            graphs = GraphDataset.open(many)
            count = len(graphs)
            assert count % 40 == 10 and verify_graphs(many) == []
            assert graphs.batch(range(count)).y[:, 0].tolist() == list(range(count))
            went_on[1], began = count, time.monotonic()
            graphs.append(_graphs(40, first=count))
        else:
            features = GraphStore.open(path).features
            read = features.gather(torch.arange(400))
            assert read.eq(read[0, 0]).all() and verify(path) == []
            went_on[2], began = read[0, 0], time.monotonic()
            features.put_rows(torch.arange(400), read + 1)
        seconds[kind] = time.monotonic() - began
    # kills did come in the middle, and the children did work of their own beside the 18 retries of each kind
    assert left and went_on[0] and went_on[1] > 10 + 18 * 40 and went_on[2] > 18, (left, went_on)


def _damaged(good, random):
    """Copies of a file's bytes, each with one thing wrong: a flipped bit, a cut, something else altogether."""
    yield from (b"", good[:-1], good + b"\0", b"x" * len(good), good[:len(good) // 2])
    # LMDB's two head pages as well
    heads = [at + i for at in (0, 4096) for i in range(0, 160, 2) if at + i < len(good)]
    for position in {0, len(good) - 1, *heads, *random.integers(0, len(good), 60).tolist()}:
        bad = bytearray(good)
        bad[position] ^= 1 << int(random.integers(8))
        yield bytes(bad)
    for length in random.integers(0, len(good), 10).tolist():
        yield good[:length]


def _reads_damaged_stores(folder):
    mapped = build_store(folder / "mmap", **_graph(num_nodes=160, num_edges=200))
    columned = build_store(folder / "columns", **_graph(num_nodes=160, num_edges=200), **_events(160, 200))
    sealed = build_store(folder / "lmdb", backend="lmdb", **_graph(num_nodes=160, num_edges=200))
    changed = build_store(folder / "changed", backend="lmdb", block_rows=9, **_graph(num_nodes=160, num_edges=200))
    for number in range(3):
        GraphStore.open(changed).features.put_rows(torch.arange(0, 160, 7), torch.full((23, 5), float(number)))
    many = build_graphs(folder / "many", [_graphs(40)], split={"train": range(30), "valid": [31]})
    GraphDataset.open(many).append(_graphs(10, first=40))

    def read(path):
        if path == many:
            graphs = GraphDataset.open(path)
            return [*graphs.batch(range(len(graphs))), *graphs.split.values()]
        graph = GraphStore.open(path)
        return [graph.features.gather(torch.arange(160)), graph.indices.clone()]

    random, cases, unnoticed = np.random.default_rng(0), 0, 0
    for path in (mapped, sealed, changed, many, columned):
        right = read(path)
        for lock in path.glob("*-lock"):
            lock.unlink()
        for file in sorted(path.iterdir()):
            good = file.read_bytes()
            for bad in _damaged(good, random):
                file.unlink()  # no mapping of the file before sees this one
                file.write_bytes(bad)
                problems = (verify_graphs if path == many else verify)(path)
                assert all(problem.startswith(f"{file.name}: ") for problem in problems), (file, problems)
                assert "already open" not in str(problems)  # nothing here holds on to the file before
                try:
                    opened = (GraphDataset if path == many else GraphStore).open(path)
                    len(opened) if path == many else opened.features.gather(torch.tensor([], dtype=torch.int64))
                except StoreError as error:
                    assert file.name in str(error) or "store format" in str(error), (file, error)
                opened = None  # holds the file open
                if not problems:  # only bytes of an LMDB file that nobody reads
                    assert file.suffix == ".lmdb" and path in (changed, many), file
                    assert all(torch.equal(a, b) for a, b in zip(read(path), right, strict=True)), file
                    unnoticed += 1
                cases += 1
            file.unlink()
            with pytest.raises(StoreError, match=file.name):
                (GraphDataset if path == many else GraphStore).open(path)
            file.write_bytes(good)
        assert (verify_graphs if path == many else verify)(path) == []
    print(f"{cases} cases, {unnoticed} without effect")
    assert cases > 500


@_beside(lambda folder: _fork(folder / "out", _reads_damaged_stores, folder))
def test_store_damage_is_named_and_never_crashes(beside):
    assert "cases" in _end(beside[0])


def test_store_what_training_starts_from_is_checked_once(tmp_path):
    graph = GraphStore.open(build_store(tmp_path / "g", **_graph()))
    graph.check_split()
    again = graph.split["train"][1]
    for number, message in ((200, "train.npy holds node 200"), (-1, "holds node -1"), (again, "more than once")):
        graph.split["train"] = graph.split["train"].clone()
        graph.split["train"][0] = number
        with pytest.raises(StoreError, match=message):
            graph.check_split()
    for label in (-1, -100, 4, 1 << 40):
        graph = GraphStore.open(tmp_path / "g")
        graph.labels = graph.labels.clone()
        graph.labels[graph.split["test"][3]] = label
        with pytest.raises(StoreError, match=f"of split 'test' has label {label}, and labels lie in .0, 4"):
            graph.check_split()
    many = GraphDataset.open(build_graphs(tmp_path / "many", [_graphs(10)], split={"train": [1, 2]}))
    many.check_split()
    many.split["train"] = torch.tensor([1, 10])
    with pytest.raises(StoreError, match="train.npy holds graph 10"):
        many.check_split()


def test_store_errors_are_one_line_whatever_they_quote():
    said = "é.csv holds '1\x1b[2J\n\x0b\udcff' \u2028"
    assert str(StoreError(said)) == "é.csv holds '1\\x1b[2J\\n\\x0b\\udcff' \\u2028"


def test_store_graphs_whose_checksum_fits_and_that_make_none(tmp_path):
    path = build_graphs(tmp_path / "many", [_graphs(10)])
    many = GraphDataset.open(path)
    good = many.file.read(lambda txn: [bytes(txn.get(lmdb_file.key(i))) for i in range(10)])
    number = next(i for i, value in enumerate(good) if np.frombuffer(value[8:12], "<u4")[0] > 1)  # it has edges
    nodes, edges = np.frombuffer(good[number], "<u4", 2, 4).tolist()
    for at, value in ((16 + 4, edges + 1), (16 + 4, -1), (16 + 4 * nodes, edges - 1), (16 + 4 * (nodes + 1), nodes),
                      (16 + 4 * (nodes + 1), -1)):  # fmt: skip
        body = bytearray(good[number])
        struct.pack_into("<i", body, at, value)
        struct.pack_into("<I", body, 12, zlib.crc32(body[16:]))
        many.file.write(lambda txn: txn.put(lmdb_file.key(number), bytes(body)))
        with pytest.raises(StoreError, match="has lists or edges that leave it"):
            many.batch(range(10))
        assert "has lists or edges that leave it" in verify_graphs(path)[0]
    many.file.write(lambda txn: txn.delete(lmdb_file.key(4)))  # nine values, the last of which is number 9
    for work in (lambda: len(many), lambda: many.append(_graphs(1)), lambda: many.batch([4])):
        with pytest.raises(StoreError, match="counts 9 values, and the last is not of that number"):
            work()


def test_store_graphs_meta_that_makes_no_sense(tmp_path):
    path = build_graphs(tmp_path / "many", [_graphs(5)])
    good = json.loads((path / "meta.json").read_text())
    for name in ("format", "node_dim", "edge_dtype", "target_dim", "files"):
        for value in (..., None, -1, 1 << 62, 1.5, True, "x", [], {}):
            _rewrite_meta(path, **dict(good, **{name: value}))
            with pytest.raises(StoreError, match="meta.json"):
                GraphDataset.open(path)
    for name, value in (("node_dim", 3), ("node_dtype", "float32"), ("target_dtype", "float64")):
        _rewrite_meta(path, **dict(good, **{name: value}))  # sane by itself, not what is in the file
        assert verify_graphs(path)[0].startswith("graphs.lmdb: ")


def test_store_full_disk_while_it_changes(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs takes root: {mounted.stderr.strip()}")

    def work():
        args = _graph(num_nodes=4000, width=20)
        path, many = build_store(small / "g", backend="lmdb", **args), build_graphs(small / "many", [_graphs(10)])
        features, graphs = GraphStore.open(path).features, GraphDataset.open(many)
        assert len(features.gather(torch.arange(9))) + len(graphs) == 19  # LMDB's lock files are there
        with open(small / "rest", "wb", buffering=0) as rest, pytest.raises(OSError):
            while True:
                rest.write(bytes(512))
        with pytest.raises(StoreError, match="features.lmdb.*as it was"):
            features.put_rows(torch.arange(4000), torch.ones(4000, 20))
        with pytest.raises(StoreError, match="graphs.lmdb.*as it was"):
            graphs.append(_graphs(1000))
        x = torch.from_numpy(args["features"])
        assert torch.equal(features.gather(torch.arange(4000)), x) and len(graphs) == 10
        assert verify(path) == verify_graphs(many) == []
        (small / "rest").unlink()
        features.put_rows(torch.arange(20), -x[:20])
        graphs.append(_graphs(100, first=10))
        assert torch.equal(features.gather(torch.arange(20)), -x[:20]) and len(graphs) == 110
        assert verify(path) == verify_graphs(many) == []

    try:
        assert _in_child(work) == 0  # which takes its open files along, so that the disk can be taken down
    finally:
        subprocess.run(["umount", small], check=True)


class _SlowRegressor:
    """The regressor written edge by edge, from the parameters of the fast one."""

    def __init__(self, fast):
        self.fast = fast

    def __call__(self, graph):
        m, outputs = self.fast, []
        for g in range(len(graph.y)):
            members = (graph.graph_ids == g).nonzero()[:, 0].tolist()
            h = {v: self.enter(m.nodes, graph.x[v]) for v in members}
            edges = [(int(graph.indices[i]), v, i) for v in members
                     for i in range(graph.indptr[v], graph.indptr[v + 1])]
            e = {i: self.enter(m.edges, graph.e[i]) for _, _, i in edges}
            for layer in m.layers:
                own, message, gate_src, gate_dst = zip(*(layer.nodes(h[v]).chunk(4) for v in members))
                at, gates = members[0], {}
                total, weights = ({v: torch.zeros(h[at].numel()) for v in members} for _ in range(2))
                for u, v, i in edges:
                    gates[i] = layer.edges(e[i]) + gate_src[u - at] + gate_dst[v - at]
                    total[v] = total[v] + torch.sigmoid(gates[i]) * message[u - at]
                    weights[v] = weights[v] + torch.sigmoid(gates[i])
                for v in members:
                    mixed = own[v - at] + total[v] / (weights[v] + 1e-6)
                    h[v] = h[v] + torch.nn.functional.silu(layer.node_norm(mixed))
                if layer.edge_norm:
                    e = {i: e[i] + torch.nn.functional.silu(layer.edge_norm(gates[i])) for i in e}
            outputs.append(m.head(sum(h.values()) / len(h)) * m.std + m.mean)
        return torch.stack(outputs)

    def enter(self, module, row):
        if row.dtype == torch.uint8:
            return sum(module.table.weight[256 * column + int(value)] for column, value in enumerate(row))
        return module(row)


def test_regressor_equals_a_reference_edge_by_edge():
    graph, other = _graphs(7), _graphs(4, first=7)
    torch.manual_seed(0)
    ours = Regressor(2, 3, 8, 2, node_dtype=torch.uint8, edge_dtype=torch.float32, num_layers=3, mean=[1.0, 2.0],
                     std=[3.0, 0.5])
    torch.testing.assert_close(ours(graph), _SlowRegressor(ours)(graph), rtol=1e-4, atol=1e-5)
    gradients = []
    for run in (ours, _SlowRegressor(ours)):
        ours.zero_grad()
        run(graph).square().sum().backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])  # and every parameter takes part
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    alone = torch.cat([ours(graph), ours(other)])  # graphs of one batch do not see each other
    joined = block_diagonal([2, 1], [2, 0], [[0, 1], [1, 0]], torch.ones(3, 2, dtype=torch.uint8), torch.ones(2, 3),
                            torch.zeros(2, 2))
    assert torch.allclose(ours(joined)[1],
                          ours(block_diagonal([1], [0], [[], []], joined.x[:1], joined.e[:0], joined.y[:1]))[0])
    assert alone.shape == (11, 2)


def test_roc_auc_is_the_share_of_pairs_in_order():
    random = np.random.default_rng(0)
    for _ in range(20):
        score, y = torch.from_numpy(random.integers(0, 6,
                                                    30)).float(), torch.from_numpy(random.integers(0, 2, 30)).float()
        pairs = [(a > b) + (a == b) / 2 for a in score[y == 1] for b in score[y == 0]]
        assert metrics.roc_auc(score, y) == pytest.approx(float(sum(pairs)) / len(pairs))


def test_metrics_are_what_their_definitions_say():
    """Plain Python, ties and classes that do not occur included; macro F1, micro F1, mean ROC-AUC, precision at each
    recall."""
    random = np.random.default_rng(0)
    for _ in range(30):
        n, C = int(random.integers(5, 30)), int(random.integers(3, 6))
        logits = torch.from_numpy(random.integers(-3, 4, (n, C))).double()
        y, several = torch.from_numpy(random.integers(0, C - 1, n)), torch.from_numpy(random.integers(0, 2, (n, C)))
        several[0, :2], several[1, :2] = 1, 0
        found, on = [max(range(C), key=lambda c: row[c]) for row in logits.tolist()], (logits > 0).long()
        plain = []
        for c in set(found) | set(y.tolist()):
            hit = sum(a == b == c for a, b in zip(found, y.tolist()))
            plain.append(2 * hit / (found.count(c) + y.tolist().count(c)))
        assert metrics.score("f1", logits, y) == pytest.approx(sum(plain) / len(plain))
        assert metrics.score("accuracy", logits, y) == pytest.approx(sum(a == b for a, b in zip(found, y.tolist())) / n)
        hit = int((on * several).sum())
        assert metrics.score("f1", logits, several) == pytest.approx(2 * hit / int(on.sum() + several.sum()))
        assert metrics.score("accuracy", logits, several) == pytest.approx((on == several).double().mean().item())
        columns = [(logits[:, c], several[:, c]) for c in range(C) if 0 < several[:, c].sum() < n]
        pairs = [[(a > b) + (a == b) / 2 for a in s[t == 1].tolist() for b in s[t == 0].tolist()] for s, t in columns]
        assert metrics.score("roc_auc", logits, several) == pytest.approx(np.mean([np.mean(p) for p in pairs]))
        score, target = logits[:, 0], several[:, 0]
        precision = recall = total = 0
        for threshold in sorted(set(score.tolist()), reverse=True):
            taken = score >= threshold
            precision, before = target[taken].double().mean().item(), recall
            recall = target[taken].sum().item() / target.sum().item()
            total += precision * (recall - before)
        assert metrics.average_precision(score, target) == pytest.approx(total)
    expected = {"mrr": 1.65 / 4, "hits@1": 0.25, "hits@10": 0.75}
    assert metrics.ranking(torch.tensor([1.0, 2, 10, 20])) == pytest.approx(expected)
    assert metrics.score("f1", logits[:0], y[:0]) is None and math.isnan(metrics.roc_auc(logits[:, 0], torch.ones(n)))


def test_metrics_are_those_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not there")
    random = np.random.default_rng(1)
    for n, C in ((200, 4), (50, 2), (1000, 7)):
        logits = torch.from_numpy(random.normal(size=(n, C)).round(1))
        y, several = random.integers(0, C, n), random.integers(0, 2, (n, C))
        p, ours = logits.softmax(1).numpy(), metrics.score
        assert ours("accuracy", logits,
                    torch.from_numpy(y)) == pytest.approx(theirs.accuracy_score(y, logits.argmax(1)))
        assert ours("f1", logits,
                    torch.from_numpy(y)) == pytest.approx(theirs.f1_score(y, logits.argmax(1), average="macro"))
        expected = theirs.roc_auc_score(y, p[:, 1]) if C == 2 else theirs.roc_auc_score(y, p, multi_class="ovr")
        assert ours("roc_auc", logits, torch.from_numpy(y)) == pytest.approx(expected)
        assert ours("f1", logits,
                    torch.from_numpy(several)) == pytest.approx(theirs.f1_score(several, logits > 0, average="micro"))
        assert ours("roc_auc", logits,
                    torch.from_numpy(several)) == pytest.approx(theirs.roc_auc_score(several, logits))
        pair = several[:, 0], logits[:, 0].numpy()
        expected = theirs.average_precision_score(*pair)
        assert metrics.average_precision(logits[:, 0], torch.from_numpy(pair[0])) == pytest.approx(expected)


def _several_labels(folder, nodes=600, labels=5):
    """A store whose nodes have several labels each, which their features show with noise, as do those of their
    neighbours."""
    rng = np.random.default_rng(0)
    y = (rng.random((nodes, labels)) < 0.3).astype(np.int64)
    x = (y + rng.normal(size=y.shape)).astype(np.float32)
    alike = [rng.choice(np.flatnonzero((y == row).all(1)), 4) for row in y]
    edges = np.stack([np.concatenate(alike), np.repeat(np.arange(nodes), 4)])
    y[-7:] = -1  # nodes without labels
    split = {"train": range(300), "valid": range(300, 400), "test": range(400, nodes - 7)}
    return build_store(folder / "several", edge_index=edges, features=x, labels=y, split=split, symmetrize=True), y


def test_train_several_labels_a_node(tmp_path):
    """BCE, micro-F1 by default, mean ROC-AUC on demand; predictions are 0 and 1, or their probabilities; 1 and 2
    processes agree."""
    path, y = _several_labels(tmp_path)
    graph = GraphStore.open(path)
    assert graph.labels.dtype == torch.int8 and graph.labels.tolist() == y.tolist() and graph.num_classes == 5
    assert not verify(path)
    common = ["--dataset", path, "--fanout", "5,5", "--hidden", 16, "--lr", 0.01, "--gpus", 0, "--precision", "fp64"]
    words = [*common, "--epochs", 8, "--early-stop", 8]
    _train(*words, "--batch-size", 60, "--log", tmp_path / "one", "--checkpoint", tmp_path / "one.pt", "--predict",
           tmp_path / "p.npy")
    _train(*words, "--batch-size", 30, "--procs", 2, "--log", tmp_path / "two")
    one, two = _log(tmp_path / "one"), _log(tmp_path / "two")
    for a, b in zip(one[:-1], two[:-1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
        assert a["valid_sampled"] == pytest.approx(b["valid_sampled"], rel=1e-9)
    assert one[-2]["loss"] < one[0]["loss"] < 0.8 and one[-1]["exact"]["test"] > 0.7
    found, test = torch.from_numpy(np.load(tmp_path / "p.npy")), slice(400, 593)
    assert found.dtype == torch.int8
    assert metrics.f1(found[test], torch.from_numpy(y[test])) == pytest.approx(one[-1]["exact"]["test"])
    _train("--resume", tmp_path / "one.pt", "--predict", tmp_path / "s.npy", "--predict-what", "scores", "--gpus", 0)
    scores = np.load(tmp_path / "s.npy")
    assert scores.dtype == np.float32 and ((scores > 0.5) == found.numpy()).all()
    assert 0 < scores.min() < scores.max() < 1
    _train(*common, "--epochs", 2, "--batch-size", 60, "--metric", "roc_auc", "--log", tmp_path / "auc", "--predict",
           tmp_path / "l.npy",
           "--predict-what", "logits")  # fmt: skip
    logits = torch.from_numpy(np.load(tmp_path / "l.npy"))
    expected = metrics.score("roc_auc", logits[test], torch.from_numpy(y[test]))
    assert _log(tmp_path / "auc")[-1]["exact"]["test"] == pytest.approx(expected)


@pytest.mark.parametrize("metric", ["roc_auc", "f1"])
def test_train_by_another_metric(metric, tiny, tmp_path):
    """Validation, early stop and the end go by it; scores are the softmax of logits."""
    log, _ = _run_here(tmp_path, "--dataset", tiny, "--fanout", "3,3", "--hidden", 16, "--batch-size", 100, "--lr",
                       0.02, "--metric", metric,
                       "--epochs", 40, "--early-stop", 2, "--predict", tmp_path / "s.npy", "--predict-what", "scores")
    valid = [entry["valid_sampled"] for entry in log[:-1]]
    assert np.argmax(valid) == len(valid) - 3 < 37
    graph, scores = GraphStore.open(tiny), torch.from_numpy(np.load(tmp_path / "s.npy"))
    assert torch.allclose(scores.sum(1), torch.ones(3000), atol=1e-5)
    for part, nodes in graph.split.items():
        assert log[-1]["exact"][part] == pytest.approx(metrics.score(metric, scores[nodes].log(), graph.labels[nodes]),
                                                       abs=1e-5)


def test_labels_of_several_a_node_that_cannot_be_meant(tmp_path):
    y = np.random.default_rng(0).integers(0, 2, (200, 3))
    for message, labels in (
        (r"labels\[5, 1\] is 2: of several labels a node each is 0 or 1",
         np.where(np.arange(600).reshape(200, 3) == 16, 2, y)),
        (r"labels\[0, 2\] is -1: of several", np.where(np.arange(600).reshape(200, 3) == 2, -1, y)),
        ("labels: none of the 200 nodes has labels", y * 0 - 1),
        (r"labels has shape \[200, 3, 1\]", y[:, :, None]),
        (r"split 'train' holds node 0, which has no label", np.where(np.arange(200)[:, None], y, -1)),
    ):
        with pytest.raises(StoreError, match=message):
            build_store(tmp_path / "s", **dict(_graph(), labels=labels, num_classes=None))
    _save_npz(tmp_path / "d.npz", y=y)
    with pytest.raises(StoreError, match="several labels each need a split of their own"):
        prepare(tmp_path / "d.npz", tmp_path, progress=False)


def test_periodic_neighbours_are_those_of_a_supercell():
    random = np.random.default_rng(0)
    for radius in (0.5, 1.1, 2.7):
        lattice, coords = np.eye(3) * 1.5 + random.uniform(-0.4, 0.4, (3, 3)), random.uniform(-2, 2, (5, 3))
        edge_index, distance = molecules.periodic_neighbours(coords, lattice, radius)
        found = collections.Counter(zip(*edge_index.tolist(), distance.round(6).tolist()))
        expected = collections.Counter()
        for image in itertools.product(range(-6, 7), repeat=3):
            for u, v in itertools.product(range(5), repeat=2):
                there = (coords[u] - np.floor(coords[u]) + image) @ lattice
                apart = np.linalg.norm(there - (coords[v] - np.floor(coords[v])) @ lattice)
                if apart <= radius and (any(image) or u != v):
                    expected[u, v, round(float(apart), 6)] += 1
        assert found == expected, radius
    fcc = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    assert len(molecules.periodic_neighbours(fcc, np.eye(3) * 3.6, 3.0)[1]) == 4 * 12  # copper's twelve nearest
    assert len(molecules.periodic_neighbours(fcc[:1], np.eye(3) * 3.0, 3.1)[1]) == 6  # an atom alone: its own images


def _molecules(file, count=40, **extra):
    random = np.random.default_rng(0)
    nodes, bonds = random.integers(2, 9, count), random.integers(0, 9, count)
    ends = np.stack([np.zeros(bonds.sum()), random.integers(1, np.repeat(nodes, bonds))]).astype(np.uint16)
    entries = dict(node_offsets=[0, *nodes.cumsum()], bond_offsets=[0, *bonds.cumsum()], bond_index_local=ends,
                   atom_feat=random.integers(0, 9, (nodes.sum(), 9), np.uint8),
                   bond_feat=np.arange(bonds.sum() * 3, dtype=np.uint8).reshape(-1, 3),
                   targets=nodes.astype(np.float32), **extra)  # fmt: skip
    np.savez(file, **entries)
    return entries


def test_datasets_molecules(tmp_path):
    made = _molecules(tmp_path / "m.npz")
    graphs = GraphDataset.open(prepare(tmp_path / "m.npz", tmp_path / "d", progress=False))
    assert [len(ids) for ids in graphs.split.values()] == [32, 4, 4]
    assert sorted(torch.cat(list(graphs.split.values())).tolist()) == list(range(40))
    assert verify_graphs(graphs.path) == []
    for g in range(40):
        graph, (a, b) = graphs.batch([g]), made["bond_offsets"][g:g + 2]
        dst = torch.repeat_interleave(graph.indptr.diff())
        found = sorted((u, v, *e) for u, v, e in zip(graph.indices.tolist(), dst.tolist(), graph.e.tolist()))
        bonds = list(zip(*made["bond_index_local"][:, a:b].tolist(), made["bond_feat"][a:b].tolist()))
        assert found == sorted([(u, v, *e) for u, v, e in bonds] + [(v, u, *e) for u, v, e in bonds])
        assert graph.y[0] == len(graph.x)
    _molecules(tmp_path / "s.npz", train_idx=range(30), val_idx=range(30, 33), test_idx=range(33, 40))
    split = GraphDataset.open(prepare(tmp_path / "s.npz", tmp_path / "d", progress=False)).split
    assert [len(ids) for ids in split.values()] == [30, 3, 7] and split["test"][0] == 33
    _molecules(tmp_path / "bad.npz", count=3, train_idx=[5])
    with pytest.raises(StoreError, match="holds graph 5"):
        prepare(tmp_path / "bad.npz", tmp_path / "d", progress=False)


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
def test_datasets_real_crystals_and_molecules(tmp_path):
    crystals = GraphDataset.open(prepare(DATA / "mlearn.npz", tmp_path, progress=False))
    assert [len(ids) for ids in crystals.split.values()] == [1246, 156, 164] and verify_graphs(crystals.path) == []
    cell = crystals.batch([0])  # 107 atoms of nickel with a vacancy, fcc: twelve neighbours within 3.1 angstrom
    assert cell.x.unique().tolist() == [28] and cell.y.item() == pytest.approx(-604.26225 / 107)
    assert cell.e.max() <= 4
    assert torch.repeat_interleave(cell.indptr.diff())[cell.e[:, 0] < 3.1].bincount().median() == 12
    molecules = GraphDataset.open(prepare(DATA / "esol.npz", tmp_path, progress=False))
    assert len(molecules) == 1128 and molecules.batch(range(1128)).indices.numel() == 2 * 15428


def test_store_build_from_csv_files(tmp_path, capsys):
    args, csv = _graph(), {}
    for name, array, form in (("edges", args["edge_index"].T, "%d"), ("x", args["features"], "%.9g"),
                              ("y", args["labels"], "%d"),
                              ("train", args["split"]["train"], "%d"), ("test", args["split"]["test"], "%d")):
        csv[name] = tmp_path / (f"{name}.csv.gz" if name in "edges x" else f"{name}.csv")
        np.savetxt(csv[name], array, form, delimiter=",", header="source,destination" if name == "edges" else "",
                   comments="")
    words = ["--features", csv["x"], "--labels", csv["y"], "--train", csv["train"], "--test", csv["test"]]
    built = _run("store.py", "build", csv["edges"], tmp_path / "g", *words, "--symmetrize", "--drop-duplicates",
                 "--drop-self-loops")
    assert built.returncode == 0 and built.stderr == ""
    assert "drop_duplicates, drop_self_loops, symmetrize" in built.stdout
    options = dict(symmetrize=True, drop_duplicates=True, drop_self_loops=True)
    same = build_store(tmp_path / "same", **dict(args, split={n: args["split"][n] for n in ("train", "test")}),
                       **options)
    assert {**_sums(tmp_path / "g"), "meta.json": 0} == {**_sums(same), "meta.json": 0}
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["g", "same"]
    csv["x"].write_bytes(gzip.compress(b"1,2\n3\n"))
    for bad, complaint in (([tmp_path / "e.doc", "h"], "is no source"),
                           ([csv["edges"], tmp_path / "h"], "features are needed"),
                           ([csv["edges"], tmp_path / "h", *words], r"x.csv.gz, line 2: '3' has 1 column"),
                           ([csv["edges"], tmp_path / "h", "--features", tmp_path / "none.csv", *words[2:]],
                            "cannot read .*none.csv: No such"),
                           ([csv["x"], tmp_path / "g", *words], "g exists already")):  # fmt: skip
        assert store.main(["build", *map(str, bad)]) == 2
        refused = capsys.readouterr().err
        assert re.search(complaint, refused) and refused.count("\n") == 1, refused
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["g", "same"]


def test_store_build_from_dgl_pyg_and_npz(tmp_path):
    args = {**_graph(), "split": {"train": np.arange(50), "valid": np.arange(50, 60), "test": np.arange(60, 90)}}
    args.pop("num_classes")
    reference = _sums(build_store(tmp_path / "reference", **args, symmetrize=True))
    x, y = torch.from_numpy(args["features"]), torch.from_numpy(args["labels"])
    masks = {f"{name}_mask": torch.zeros(200, dtype=torch.bool) for name in ("train", "val", "test")}
    for mask, ids in zip(masks.values(), args["split"].values()):
        mask[ids] = True
    graph = sampler.import_dgl().graph(tuple(torch.from_numpy(args["edge_index"])), num_nodes=200)
    graph.ndata.update({"feat": x, "label": y, **masks})
    # as PyG's Data
    data = types.SimpleNamespace(edge_index=torch.from_numpy(args["edge_index"]), x=x, y=y[:, None], **masks)
    np.savez(tmp_path / "g.npz", edge_index=args["edge_index"], x=args["features"], y=args["labels"],
             **{f"{name}_idx": ids for name, ids in args["split"].items()})  # fmt: skip
    for name, source in (("dgl", graph), ("pyg", data), ("npz", tmp_path / "g.npz")):
        built = _sums(datasets.build(source, tmp_path / name, symmetrize=True))
        assert {**built, "meta.json": 0} == {**reference, "meta.json": 0}, name
    data.x = None
    with pytest.raises(StoreError, match="SimpleNamespace has no features"):
        datasets.build(data, tmp_path / "bad")


def test_store_columns_from_every_source(tmp_path, capsys, monkeypatch):
    """The same store from arrays, .npz, DGL, PyG and tables, whose columns are named, numbered or files of their
    own."""
    monkeypatch.chdir(tmp_path)
    rng, args = np.random.default_rng(1), {**_graph(),
                                           "split": {"train": np.arange(50), "valid": np.arange(50, 60),
                                                     "test": np.arange(60, 90)}}
    src, dst = args["edge_index"]
    w, t = rng.integers(1, 9, 3000) / 8, rng.integers(0, 50, 3000)
    e, when = rng.integers(0, 9, (3000, 2)).astype(np.float32), np.arange(200)
    args.pop("num_classes")
    reference = _sums(build_store("reference", **args, symmetrize=True, edge_weight=w, edge_time=t, edge_features=e,
                                  node_time=when))
    own = {"x": args["features"], "y": args["labels"], **{f"{name}_idx": ids for name, ids in args["split"].items()}}
    tensors = {name: torch.from_numpy(values)
               for name, values in (("w", w), ("t", t), ("e", e), ("when", when), ("x", own["x"]), ("y", own["y"]))}
    np.savez("a.npz", edge_index=args["edge_index"], edge_weight=w[:, None], time=t.astype(float), edge_attr=e,
             node_time=when, **own)
    np.savez("b.npz", edge_index=args["edge_index"], edge_weight=w, edge_time=t, edge_features=e, node_time=when, **own)
    graph = sampler.import_dgl().graph((torch.from_numpy(src), torch.from_numpy(dst)), num_nodes=200)
    graph.ndata.update({"feat": tensors["x"], "label": tensors["y"], "time": tensors["when"]})
    graph.edata.update({"weight": tensors["w"], "time": tensors["t"], "feat": tensors["e"]})
    data = types.SimpleNamespace(edge_index=torch.from_numpy(args["edge_index"]), x=tensors["x"], y=tensors["y"],
                                 time=tensors["t"],
                                 edge_weight=tensors["w"], edge_attr=tensors["e"], node_time=tensors["when"])
    for number, (source, options) in enumerate((("a.npz", {}), ("b.npz", {}), (graph, {"split": args["split"]}),
                                                (data, {"split": args["split"]}))):
        built = _sums(datasets.build(source, f"s{number}", symmetrize=True, **options))
        assert {**built, "meta.json": 0} == {**reference, "meta.json": 0}, number
    said = capsys.readouterr().out
    assert "a.npz: it has edge_weight, edge_time (called time), edge_features (called edge_attr), node_time" in said
    np.savetxt("x.csv", own["x"], delimiter=",", fmt="%.9g")
    np.savetxt("y.csv", own["y"], fmt="%d")
    np.savetxt("w.csv", w, fmt="%g")
    np.savetxt("e.csv", e, delimiter=",", fmt="%g")
    np.savetxt("when.csv", np.stack([when, when], 1)[::-1], delimiter=",", fmt="%d")
    for name, ids in args["split"].items():
        np.savetxt(f"{name}.csv", ids, fmt="%d")
    np.savetxt("plain.csv", np.stack([src, dst, t], 1), delimiter=",", fmt="%d")
    np.savetxt("named.csv", np.column_stack([e[:, 0], src, dst, t, w, e[:, 1]]), delimiter=",", fmt="%g",
               header="a,src,dst,t,w,b", comments="")
    words = ["--features", "x.csv", "--labels", "y.csv", "--symmetrize", "--node-times", "when.csv"]
    words += [word for name in args["split"] for word in (f"--{name}", f"{name}.csv")]
    for edges, columns in (("plain.csv", ["--times", "3", "--weights", "w.csv", "--edge-features", "e.csv"]),
                           ("named.csv", ["--times", "t", "--weights", "5", "--edge-features", "a,b"])):  # fmt: skip
        assert store.main(["build", edges, f"from-{edges}", *words, *columns]) == 0
        built = _sums(f"from-{edges}")
        assert {**built, "meta.json": 0} == {**reference, "meta.json": 0}, edges
    for columns, complaint in ((["--weights", "4"], "has no column '4'"),
                               (["--weights", "e.csv", "--times", "3"], "e.csv has 2 columns: one is"),
                               (["--times", "3", "--weights", "y.csv"],
                                r"edge_weight is \[200\]: a row for each of the 3000"),
                               (["--times", "3", "--node-times", "y.csv"], "")):  # fmt: skip
        code = store.main(["build", "plain.csv", f"bad{len(complaint)}", *words, *columns])
        assert code == (2 if complaint else 0) and re.search(complaint, capsys.readouterr().err)
    assert store.main(["build", "a.npz", "bad", "--weights", "3"]) == 2 and "are for tables" in capsys.readouterr().err


def test_store_values_of_an_adjacency_matrix_are_weights(tmp_path, capsys):
    args = _graph(num_edges=500)
    edges = np.unique(args["edge_index"], axis=1)
    order = np.lexsort(edges)  # by destination, then source
    (src, dst), values = torch.from_numpy(edges[:, order]), torch.arange(1.0, edges.shape[1] + 1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), dst.bincount(minlength=200).cumsum(0)])
    data = types.SimpleNamespace(adj_t=types.SimpleNamespace(csr=lambda: (indptr, src, values)), x=args["features"],
                                 y=args["labels"])
    graph = GraphStore.open(datasets.build(data, tmp_path / "g"))
    assert "it has edge_weight (called values of adj_t)" in capsys.readouterr().out
    assert graph.indices.tolist() == src.tolist() and torch.equal(graph.edge_weight, values)


def test_store_build_names_a_path_that_cannot_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _save_npz("own.npz", train_idx=[1, 2])
    (tmp_path / "e.csv").write_text("0,1\n")
    (tmp_path / "folder").mkdir()
    for path, complaint in ((".", r"\. exists already"), ("..", r"\.\. exists already"),
                            ("nowhere/..", "has no name of its own"),
                            ("x" * 256, "is a name of 256 bytes"),
                            ("own.npz/s", "cannot build own.npz/s.*(Not a directory|File exists)")):  # fmt: skip
        for words in (["own.npz", path], ["e.csv", path, "--features", "e.csv", "--labels", "e.csv"]):
            assert store.main(["build", *words]) == 2
            captured = capsys.readouterr()
            assert re.search(complaint, captured.err) and captured.err.count("\n") == 1, (path, captured.err)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["e.csv", "folder", "own.npz"]
    long = "y" * 250
    assert store.main(["build", "own.npz", long]) == 0
    shutil.copy("own.npz", long[:200] + ".npz")
    assert len(prepare(long[:200] + ".npz", "data", progress=False).name) < 120
    Path("data.pt").write_bytes(b"PK")
    for name, complaint in (("e.csv", "e.csv is no .npz file.*features and labels.*store.py build e.csv my_store"),
                            ("z" * 5000, "is unknown"),
                            ("data.pt", "data.pt is neither an .npz file nor a table .*datasets.build.data"),
                            ("folder", "folder is a folder without meta.json, so no store"),
                            ("none.csv", "'none.csv' is unknown"),
                            ("own.npz:nonsense",
                             "no parameter 'nonsense': write NAME=VALUE with row_normalize, radius, split, ignore"),
                            ("own.npz:split=1,split=2", "split is given twice"),
                            ("own.npz:split=1.5e0", "split='1.5e0' is no int"),
                            ("cora:x=1", "no parameter 'x=1': it takes none")):  # fmt: skip
        with pytest.raises(StoreError, match=complaint):
            prepare(name, "data")


def test_npz_says_which_classes_have_no_node(tmp_path, capsys):
    """Labels that are counted from 1, or a class that was dropped, make an output that nothing can be."""
    for labels, said in ((np.arange(200) % 4, None), (np.arange(200) % 4 + 1, "1 of 5 classes have no node: 0"),
                         (np.arange(200) % 2 * 9, "8 of 10 classes have no node: 1, 2, 3, ...")):  # fmt: skip
        _save_npz(tmp_path / f"{labels.max()}.npz", y=labels)
        prepare(str(tmp_path / f"{labels.max()}.npz"), tmp_path, progress=False)
        output = capsys.readouterr().out
        assert f"{labels.max()}.npz: {said}\n" in output if said else "no node" not in output, output


def test_store_flags_without_effect_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _save_npz("own.npz", train_idx=[1, 2])
    _save_npz("drawn.npz", y=np.arange(200) % 2)
    _molecules("m.npz")
    (tmp_path / "e.csv").write_text("0,1\n")
    for words, complaint in (
        (["build", "own.npz", "s", "--features", "NOSUCH.csv"],
         "own.npz: it holds features, labels and split itself: features beside it"),
        (["build", "own.npz", "s", "--train", "NOSUCH.csv"], "train_idx beside it has no effect"),
        (["build", "own.npz", "s", "--seed", "3"], "seed 3 has no effect: it has a split"),
        (["build", "m.npz", "s", "--symmetrize"], "symmetrize has no effect: it holds many small graphs"),
        (["build", "m.npz:radius=3", "s"], "radius has no effect: it holds many small graphs"),
        (["build", "m.npz:row_normalize=0", "s"], "row_normalize has no effect: it holds many small graphs"),
        (["build", "e.csv", "s", "--features", "NOSUCH.csv", "--labels", "e.csv"], "NOSUCH.csv"),
        (["build", "NOSUCH.csv", "s"], "NOSUCH.csv holds edges alone: features are needed"),
        (["build", "NOSUCH.npz", "s"], "cannot read NOSUCH.npz"),
        (["info", "s", "--features", "x"], "unrecognized arguments: --features x"),
        (["verify", "s", "--gpus", "1"], "unrecognized arguments: --gpus 1"),
        (["build", "own.npz", "s", "--gpus", "1"], "unrecognized arguments: --gpus 1"),
    ):
        try:
            code = store.main(words)
        except SystemExit as stop:
            code = stop.code
        assert code == 2 and re.search(complaint, capsys.readouterr().err), words
    assert store.main(["build", "drawn.npz", "s", "--seed", "3"]) == 0
    assert GraphStore.open("s").meta["source"]["seed"] == 3
    with pytest.raises(StoreError, match="SimpleNamespace: seed 1 has no effect"):
        data = types.SimpleNamespace(edge_index=torch.tensor([[0], [1]]), x=torch.ones(3, 1), y=torch.arange(3),
                                     train_mask=torch.ones(3).bool())
        datasets.build(data, "t", seed=1)


def test_store_and_datasets_into_a_closed_pipe(tmp_path, monkeypatch):
    path = str(build_store(tmp_path / "g", **_graph()))
    for run, words in ((store.main, ["info", path]), (store.main, ["verify", path]), (datasets.main, [path])):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as nobody:
            monkeypatch.setattr(sys, "stdout", nobody)
            assert run(words) == 141
    monkeypatch.undo()


def test_store_build_from_dgl_and_pyg_refuses_what_is_not_used(tmp_path, capsys):
    args = _graph()
    edges, x, y = (torch.from_numpy(args[name]) for name in ("edge_index", "features", "labels"))
    mask = torch.from_numpy(_mask(np.arange(50)))
    masks = {"train_mask": mask, "test_mask": ~mask}
    dgl = sampler.import_dgl()

    def dgls(formats=None, **edata):
        graph = dgl.graph(tuple(edges), num_nodes=200)
        graph.ndata.update({"feat": x, "label": y, **masks})
        graph.edata.update(edata)
        return graph.formats(formats) if formats else graph

    def pygs(**changes):
        arrays = {"edge_index": edges, "x": x, "y": y, **masks, **changes}
        return types.SimpleNamespace(**{name: value for name, value in arrays.items() if value is not ...})

    order = torch.from_numpy(np.lexsort((edges[0], edges[1])))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), edges[1].bincount(minlength=200).cumsum(0)])
    ones, sources = torch.ones(3000), edges[0][order]
    plain = types.SimpleNamespace(csr=lambda: (indptr, sources, None))  # as torch_sparse's SparseTensor
    weighted = types.SimpleNamespace(csr=lambda: (indptr, sources, 2 * ones))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        csr = torch.sparse_csr_tensor(indptr, sources, ones, (200, 200))
    splits = torch.stack([mask, ~mask], 1)
    halves = {"train": np.arange(50), "test": np.arange(50, 200)}
    reference = _sums(build_store(tmp_path / "reference", **dict(args, num_classes=None, split=halves)))
    for number, (source, options) in enumerate((
        (dgls(), {}), (dgls(["csc"]), {}), (dgls(["coo"]), {}), (dgls(["csr"]), {}),
        (dgls(rank=ones), {"ignore": ["edata.rank"]}),
        (pygs(), {}), (pygs(edge_index=..., adj_t=plain), {}), (pygs(edge_index=None, adj_t=csr), {}),
        (pygs(y=y.double()[:, None], train_mask=mask.to(torch.uint8)), {}),
        (pygs(edge_attr=ones), {"ignore": ["edge_attr"]}),
        (pygs(train_mask=splits, test_mask=splits.flip(1)), {"split": 0}),
        (pygs(train_mask=splits.flip(1), test_mask=splits), {"split": 1}),
        (pygs(x=None, y=None), {"features": args["features"], "labels": args["labels"]}),
        (pygs(train_mask=splits), {"split": {"train": mask, "test": ~mask}}),
        (pygs(name="a graph", num_nodes=200, pos=x), {}),
    )):  # fmt: skip
        built = _sums(datasets.build(source, tmp_path / str(number), **options))
        assert {**built, "meta.json": 0} == {**reference, "meta.json": 0}, number
    assert "not used: name, pos" in capsys.readouterr().out
    for message, source, options in (
        ("edata.rank is not used: what edges carry is called edge_weight", dgls(rank=ones), {}),
        (r"edge_attr is \[9, 4\]: a row for each of the 3000 edges", pygs(edge_attr=torch.ones(9, 4)), {}),
        ("adj_t has values other than 1, and there is edge_weight",
         pygs(edge_index=None, adj_t=weighted, edge_weight=ones), {}),
        ("adj_t has 200 rows, there are 150 nodes",
         pygs(edge_index=None, adj_t=plain, x=x[:150], y=y[:150], train_mask=mask[:150]), {}),
        ("SimpleNamespace has no labels: give them as labels=", pygs(y=None), {}),
        ("2 splits count from 0", pygs(train_mask=splits), {"split": 2}),
        ("x is a Tensor that makes no array", pygs(x=x.to_sparse()), {}),
        ("y holds float", pygs(y=[0.5] * 200), {}), ("a dict is no source", {}, {}),
        ("a DataFrame is no source", type("DataFrame", (), {})(), {}),
        ("2 kinds of nodes and 1 of edges", dgl.heterograph({("user", "likes", "item"): ([0], [1])}), {}),
    ):  # fmt: skip
        with pytest.raises(StoreError, match=message if "float" not in message else "labels are whole numbers"):
            datasets.build(source, tmp_path / "bad", **options)
    assert not (tmp_path / "bad").exists()


def _crystals(file, **changes):
    """Three cells of copper, of 4, 1 and 2 atoms."""
    fcc = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    entries = dict(atom_offsets=[0, 4, 5, 7], Z=np.full(7, 29), frac_coords=np.concatenate([fcc, fcc[:1], fcc[:2]]),
                   lattice=np.stack([np.eye(3) * a for a in (3.6, 2.6, 4.0)]), energy=[-16.0, -4.0, -8.0],
                   train_idx=[0, 1], val_idx=[2])  # fmt: skip
    np.savez(file, **{name: value for name, value in {**entries, **changes}.items() if value is not None})


def test_datasets_molecules_and_crystals_that_are_none(tmp_path, capsys):
    _crystals(tmp_path / "good.npz", forces=np.ones((7, 3)), test_idx=[])
    good = GraphDataset.open(prepare(tmp_path / "good.npz", tmp_path, progress=False))
    assert good.batch([0, 1, 2]).y.flatten().tolist() == [-4, -4, -4] and "not used: forces" in capsys.readouterr().out
    assert prepare(tmp_path / "good.npz", tmp_path, seed=7) == good.path
    assert GraphDataset.open(prepare(f"{tmp_path}/good.npz:radius=3", tmp_path)).batch([0]).x.shape == (4, 1)
    lattice, energy = np.stack([np.eye(3) * 3.6] * 3), np.array([1.0, 2.0, 3.0])

    def cell(value):
        changed = lattice.copy()
        changed[1] = value
        return {"lattice": changed}

    flat, made = np.eye(3) * 3.6, _molecules(tmp_path / "m.npz", count=5)
    flat[2] = flat[1]
    for message, option, entries in (
        (r"lattice\[1\] is \[\[nan", "", cell(np.nan)), (r"lattice\[1\] is \[\[inf", "", cell(np.inf)),
        (r"lattice\[1\] is", "", cell(flat)),
        ("cell 1 has 1 atoms, and within radius=4 of it lie about 5", "", cell(np.eye(3) * 0.1)),
        (r"lattice\[1\] is", "", cell(np.eye(3) * 1e-5)),
        ("cell 0 has 4 atoms.*radius=60.*at most 16,384 are searched", ":radius=60", {}),
        ("radius=-1.0 is no distance", ":radius=-1", {}), ("radius=nan is no distance", ":radius=nan", {}),
        ("radius=inf", ":radius=inf", {}),
        (r"Z\[0\] is -1", "", {"Z": np.full(7, -1)}), (r"Z\[0\] is 300", "", {"Z": np.full(7, 300)}),
        ("Z has dtype float64", "", {"Z": np.full(7, np.nan)}),
        (r"frac_coords\[0, 0\] is nan", "", {"frac_coords": np.full((7, 3), np.nan)}),
        (r"frac_coords \[6, 3\]", "", {"frac_coords": np.ones((6, 3))}),
        (r"energy\[0, 0\] is nan", "", {"energy": energy * np.nan}),
        (r"energy is \[2\], and there are 3 graphs", "", {"energy": energy[:2]}),
        ("atom_offsets must rise from 0 to the 7", "", {"atom_offsets": [0, 4, 4, 7]}),
        ("atom_offsets must rise", "", {"atom_offsets": [0, 4, 5, 6]}),
        ("no array lattice", "", {"lattice": None}), ("row_normalize has no effect", ":row_normalize=1", {}),
        ("edge_attr is not used", "", {"edge_attr": np.ones(3)}), (r"'test' holds graph 7", "", {"test_idx": [7]}),
    ):  # fmt: skip
        _crystals(tmp_path / "bad.npz", **entries)
        with pytest.raises(StoreError, match=message) as error:
            prepare(f"{tmp_path}/bad.npz{option}", tmp_path, progress=False)
        assert "\n" not in str(error.value)
    for message, changes in (
        (r"targets is \[3\], and there are 5 graphs", {"targets": np.ones(3)}),
        ("no array targets or labels", {"targets": None}),
        ("targets holds <U1", {"targets": np.array(list("abcde"))}),
        (r"targets\[4, 0\] is inf", {"targets": np.array([0, 1, 2, 3, 1e300])}),
        ("bond_index_local has dtype float64", {"bond_index_local": made["bond_index_local"] * 1.5}),
        ("goes from node .* node ids lie in", {"bond_index_local": made["bond_index_local"].astype(int) + 99}),
        ("node_offsets must rise from 0", {"node_offsets": np.array(made["node_offsets"])[:-1]}),
        ("node_offsets has dtype float64", {"node_offsets": np.array(made["node_offsets"], float)}),
        ("bond_offsets tell of 4 graphs, node_offsets of 5", {"bond_offsets": np.delete(made["bond_offsets"], 2)}),
        (r"bond_feat \[\d+, 2\]|bond_index_local \[2, \d+\]: \[N, F\]", {"bond_feat": made["bond_feat"][:-1]}),
        ("atom_feat holds <U1", {"atom_feat": np.full(made["atom_feat"].shape, "C")}),
        ("train_mask is", {"train_mask": np.ones(4, bool)}),
        ("node 3|graph 3 is in split", {"train_idx": [3], "val_idx": [3]}),
    ):  # fmt: skip
        np.savez(tmp_path / "bad.npz",
                 **{name: value for name, value in {**made, **changes}.items() if value is not None})
        with pytest.raises(StoreError, match=message) as error:
            prepare(tmp_path / "bad.npz", tmp_path, progress=False)
        assert "\n" not in str(error.value)
    mask = np.arange(5) < 3
    np.savez(tmp_path / "masks.npz", **made, train_mask=mask.astype(np.uint8), val_mask=~mask)
    split = GraphDataset.open(prepare(tmp_path / "masks.npz", tmp_path, progress=False)).split
    assert [ids.tolist() for ids in split.values()] == [[0, 1, 2], [3, 4], []]


# ---------------------------------------------------------------------------------------------------------------------
# train.py and ddp.py: the real script where processes, signals and ranks are tested, else in forks


TINY = "synthetic:nodes=3000,degree=10,features=16,classes=4,train=600"


def _start(*words, launcher=(), **options):
    """Start the real script -> Popen; every output line goes to one pipe."""
    command = [sys.executable, *launcher, str(HERE / "train.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def _script(*words, launcher=(), code=0):
    """Run the real script to its end, demand the exit code -> its output."""
    return _ended(_start(*words, launcher=launcher), code)


def _ended(process, code=0):
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def _start_fork(output, *words, cwd="."):
    """Start train.py's main in a fork -> the process."""
    return _fork(output, train.main, [*map(str, words)], cwd=cwd)


def _train(*words, code=0, cwd="."):
    """Run train.py's main in a fork to its end, demand the exit code -> its output."""
    with tempfile.NamedTemporaryFile() as file:
        return _end(_start_fork(file.name, *words, cwd=cwd), code)


@pytest.mark.parametrize(
    "file, words, message",
    [
        ("indices", "--model sage", "holds 1000, and its nodes are 0 to 199"),  # the last edge; by exact inference
        ("indices", "--model gcn", "holds 1000, and its nodes are 0 to 199"),  # when degrees are counted
        ("indices", "--model sage --cache 1000", "holds 1000"),
        ("indices", "--model sage --fanout -1,-1", "a node in indices lies outside of it"),  # met while sampling
        ("indices", "--model sage --procs 2", "holds 1000, and its nodes are 0 to 199"),  # by one of two ranks
        ("indptr", "--model sage", "in indptr"),
        ("train", "--model sage", "train.npy holds node 1000"),
        ("labels", "--model sage", "has label 1000, and labels lie in [0, 4)"),
    ],
)
def test_train_a_damaged_store_ends_in_a_sentence(file, words, message, tmp_path):
    path = build_store(tmp_path / "g", **_graph())
    with open(path / f"{file}.npy", "r+b") as data:
        if file == "labels":
            data.seek(128 + 8 * int(GraphStore.open(path).split["valid"][0]))
        else:
            data.seek(-8 if file != "indices" else -4, os.SEEK_END)
            data.seek(-8 if file == "indptr" else 0, os.SEEK_CUR)  # its end is looked at when the store is opened
        data.write((1000).to_bytes(4 if file == "indices" else 8, "little"))
    sizes = ["--fanout", "1,1", "--epochs", 1, "--hidden", 8, "--batch-size", 50]
    output = _train("--dataset", path, *sizes, *words.split(), code=2)
    assert output.count("train.py: ") == 1 and message in output and "Traceback" not in output, output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A small store -> its path."""
    return str(datasets.prepare(TINY, tmp_path_factory.mktemp("tiny"), progress=False))


def _log(path):
    """The entries of --log without the first of each run, which says what it was."""
    return [entry for entry in map(json.loads, Path(path).read_text().splitlines()) if "flags" not in entry]


def _running_below(pid):
    """Process ids of a process and all below it."""
    found = [pid]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid:
                found += _running_below(int(entry.name))
    return found


def _a_rank(pid):
    """A process below this one that trains: not the resource tracker of multiprocessing."""
    return [p for p in _running_below(pid)[1:]
            if b"resource_tracker" not in Path(f"/proc/{p}/cmdline").read_bytes()][-1]


def _gone(pids, seconds=10):
    """Whether all of these processes end before long."""
    deadline = time.monotonic() + seconds
    while _alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _alive(pids)


def _alive(pids):
    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "gone"

    return [pid for pid in pids if state(pid) not in ("gone", "Z")]


def test_train_learns_logs_and_resumes(tiny, tmp_path):
    common = ["--dataset", tiny, "--batch-size", 100, "--fanout", "5,5", "--hidden", 16, "--lr", 0.01]
    output = _script(*common, "--epochs", 4, "--log", tmp_path / "log", "--checkpoint", tmp_path / "full.pt")
    log = _log(tmp_path / "log")
    assert [entry["epoch"] for entry in log[:-1]] == [1, 2, 3, 4]
    assert log[3]["loss"] < log[0]["loss"] and log[-1]["exact"]["test"] > 0.5
    for name in ("seconds", "seeds_per_s", "sample", "fetch", "stall", "forward", "backward", "optimizer",
                 "peak_bytes"):
        assert log[0][name] > 0, name
    assert "100 x 1 = 100 seeds, 6 steps an epoch" in output and "exact layer-wise accuracy" in output
    _train(*common, "--epochs", 2, "--checkpoint", tmp_path / "half.pt")
    _train(*common, "--epochs", 4, "--resume", tmp_path / "half.pt", "--checkpoint", tmp_path / "half.pt",
           "--prefetch", 0, "--batch_size", 100)  # fmt: skip
    full, half = (torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"] for name in ("full", "half"))
    assert all(torch.equal(full[name], half[name]) for name in full)
    refused = _train(*common, "--epochs", 4, "--hidden", 8, "--resume", tmp_path / "full.pt", code=2)
    assert "full.pt was made with --hidden 16, this run has 8" in refused


TORCHRUN = ["-m", "torch.distributed.run"]


def _parameters(path):
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.parametrize("net, precision, rtol",
                         [("sage", "fp64", 1e-9), ("sage", "fp32", 1e-4), ("gat", "fp64", 1e-9)])
def test_the_number_of_processes_changes_nothing(tmp_path, net, precision, rtol):
    """140 seeds in batches of 60: the last one has 20, which three ranks share as 6, 7 and 7. With dropout."""
    dataset = DATA / "cora.npz"
    if not dataset.is_file():
        pytest.skip(f"{dataset} is not there")
    common = ["--dataset", dataset, "--root", tmp_path, "--gpus", 0, "--fanout", "5,5", "--hidden", 128, "--lr", 0.01,
              "--dropout", 0.5, "--epochs", 2, "--precision", precision, "--model", net]  # fmt: skip
    runs = {"one": [1, 60, 1], "two": [2, 30, 1], "three": [3, 20, 1], "accumulated": [1, 20, 3]}
    if precision == "fp32":
        del runs["accumulated"]
    if net == "gat":
        del runs["three"], runs["accumulated"]
    for name, (procs, batch, accumulate) in runs.items():
        _train(*common, "--procs", procs, "--batch-size", batch, "--accumulate", accumulate, "--log", tmp_path / name,
               "--checkpoint", tmp_path / f"{name}.pt")  # fmt: skip
    expected, parameters = _log(tmp_path / "one"), _parameters(tmp_path / "one.pt")
    for name in list(runs)[1:]:
        log = _log(tmp_path / name)
        assert len(log) == 3  # rank 0 alone writes
        for a, b in zip(expected[:2], log):
            assert a["loss"] == pytest.approx(b["loss"], rel=rtol)
            assert a["valid_sampled"] == pytest.approx(b["valid_sampled"], abs=0.003)
        for key, value in _parameters(tmp_path / f"{name}.pt").items():
            torch.testing.assert_close(value, parameters[key], rtol=rtol, atol=rtol)


@_beside(lambda folder: _start("--root", folder, "--gpus", 0, "--epochs", 20, "--log", folder / "log"))
def test_memory_does_not_grow_over_epochs(beside):
    """Every batch has another size. Fragments of the heap are a few percent; oneDNN's products, not bounded, are 68
    %."""
    process, folder = beside
    _ended(process)
    peak = [entry["peak_bytes"] for entry in _log(folder / "log")[:20]]
    print(f"peak of epoch 20 over that of epoch 2: {peak[19] / peak[1]:.3f}")
    assert peak[19] < 1.4 * peak[1], peak


_TRIMS = """
import sys
sys.path.insert(0, {here!r})
import torch, allocator
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
allocator.keep_freed_memory()
level = allocator.trim_memory(0)
parts = [torch.ones(1 << 18) for _ in range(200)]
del parts[::2]
grown = resident()
assert grown > level + 150e6 and allocator.trim_memory(grown) == grown and resident() > grown - 50e6
assert allocator.trim_memory(level) == level and resident() < grown - 80e6, (level, grown, resident())
"""


@pytest.mark.parametrize("there", [True, False])
def test_cuda_segments_grow_only_where_that_is_safe(there, monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in (*names, "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "1")  # so that all of them are as before in the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator, "_loads", lambda library: there and library == "libnvidia-ml.so.1")
    allocator.before_torch()
    assert [os.environ.get(name) for name in names] == ["expandable_segments:True" if there else None] * 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_memory_that_is_free_is_given_back_once_the_process_has_grown():
    done = subprocess.run([sys.executable, "-c", _TRIMS.format(here=str(HERE))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torchrun_gives_the_result_of_one_process(tiny, tmp_path):
    common = ["--dataset", tiny, "--fanout", "5,5", "--hidden", 16, "--lr", 0.01, "--epochs", 2, "--gpus", 0]
    _train(*common, "--batch-size", 220, "--log", tmp_path / "one", "--checkpoint", tmp_path / "one.pt")
    _script(*common, "--batch-size", 110, "--log-file", tmp_path / "two", "--checkpoint", tmp_path / "two.pt",
            launcher=[*TORCHRUN, "--nproc-per-node", "2"])  # fmt: skip
    one, two = _log(tmp_path / "one"), _log(tmp_path / "two")
    assert [entry["loss"] for entry in one[:2]] == pytest.approx([entry["loss"] for entry in two[:2]], rel=1e-4)
    assert one[-1]["exact"]["test"] == pytest.approx(two[-1]["exact"]["test"], abs=0.01)


def test_twenty_interruptions_change_no_bit(tiny, tmp_path):
    """SIGTERM and SIGKILL at random moments, resumed with other prefetch depths and sampling threads each time."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    common = ["--dataset", tiny, "--gpus", 0, "--batch-size", 25, "--fanout", "5,5", "--hidden", 32, "--epochs", 40]

    def start(*words):
        return _start_fork(tmp_path / "out", *common, *words, cwd=tmp_path)

    began = time.monotonic()
    _end(start("--checkpoint", "straight.pt"))
    seconds = time.monotonic() - began
    resumed, hit, moments = ["--checkpoint", "resumed.pt", "--checkpoint-every", 7, "--resume", "auto"], 0, []
    for number in [signal.SIGTERM, signal.SIGKILL] * 10:
        process = start(*resumed, "--prefetch", rng.integers(4), "--sample-threads", rng.integers(1, 3))
        _wait_for(lambda: (tmp_path / "out").read_text().count("\nrun  ") >= len(moments) + 2, process, pause=0.005)
        moments.append(round(rng.uniform(0, seconds / 40), 3))  # within an epoch
        time.sleep(moments[-1])
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(process.pid, number)
        _end(process, 0, -number, 128 + number)
        hit += process.exitcode != 0
    points = re.findall(r"resume  from (epoch \d+, step \d+)", _end(start(*resumed)))
    print(f"{hit} of 20 runs were interrupted, resumed from {points}")
    assert hit > 15 and len(set(points)) > 9, moments
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "resumed.pt", "straight.pt"]
    straight, resumed = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "resumed.pt")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight), moments


def _wait_for(condition, process, seconds=180, pause=0.02):
    """Wait until condition() holds while a process runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        ended = process.poll() is not None if isinstance(process, subprocess.Popen) else not process.is_alive()
        if ended or time.monotonic() > deadline:
            process.kill()
            printed = process.communicate()[0] if isinstance(process, subprocess.Popen) else process.output.read_text()
            pytest.fail(f"{'it has ended' if ended else f'waited {seconds} s in vain'}: {printed}")
        time.sleep(pause)


def test_any_cache_of_features_on_disk_gives_the_same_bits(tiny, tmp_path):
    common = ["--dataset", tiny, "--model", "gcn", "--fanout", "5,5", "--hidden", 16, "--epochs", 2, "--batch-size", 50]
    log, expected = _run_here(tmp_path, *common)
    for words in (["--cache", "20KiB"], ["--cache", "100KiB", "--lookahead", 3, "--sample-threads", 3],
                  ["--cache", "1MiB", "--lookahead", 0, "--prefetch", 0]):  # fmt: skip
        cached, model = _run_here(tmp_path, *common, *words)
        assert [a["loss"] for a in log[:2]] == [b["loss"] for b in cached[:2]]
        assert log[-1]["exact"] == cached[-1]["exact"]
        assert all(torch.equal(expected[name], model[name]) for name in expected), words
        last = cached[1]
        assert 0 < last["cache_hit_rate"] < 1
        assert 0 < last["bytes_min"] <= 64 * (last["rows"] - last["hits"]) <= last["bytes_read"]
    assert "--lookahead 3 is for a --cache before features" in _train(*common, "--lookahead", 3, code=2)
    _train(*common, "--procs", 2, "--cache", "30KiB", "--checkpoint", tmp_path / "two.pt")
    _train(*common, "--procs", 2, "--checkpoint", tmp_path / "plain.pt")
    two, plain = _parameters(tmp_path / "two.pt"), _parameters(tmp_path / "plain.pt")
    assert all(torch.equal(two[name], plain[name]) for name in two)


def test_runs_on_disk_that_are_killed_go_on_to_the_same_bits(tiny, tmp_path):
    """SIGKILL at random moments, resumed with another cache, window and number of threads each time."""
    rng, moments = np.random.default_rng(int.from_bytes(os.urandom(4), "little")), []
    common = ["--dataset", tiny, "--model", "gcn", "--gpus", 0, "--batch-size", 25, "--fanout", "5,5", "--epochs", 60]

    def start(*words):
        return _start_fork(tmp_path / "out", *common, *words, cwd=tmp_path)

    _end(start("--checkpoint", "straight.pt"))  # features in memory
    resumed = ["--checkpoint", "resumed.pt", "--checkpoint-every", 5, "--resume", "auto"]
    checkpoint = tmp_path / "resumed.pt"
    while len(moments) < 5:
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        process = start(*resumed, "--cache", 1000 * int(rng.integers(1, 150)), "--lookahead", rng.integers(40),
                        "--prefetch", rng.integers(4), "--sample-threads", rng.integers(1, 3))  # fmt: skip
        _wait_for(lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns != before, process, pause=0.005)
        moments.append(round(rng.uniform(0, 0.05), 3))
        time.sleep(moments[-1])
        process.kill()
        _end(process, -signal.SIGKILL)
    output = _end(start(*resumed, "--cache", "50KiB"))
    assert len(set(re.findall(r"resume  from (epoch \d+, step \d+)", output))) > 1, moments
    straight, resumed = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "resumed.pt")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight), moments


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int turn;

ssize_t pread(int file, void *to, size_t count, off_t offset) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pread");
  char link[64], name[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  if (readlink(link, name, sizeof name - 1) < 0 || !strstr(name, "features.npy") || offset == 0)
    return real(file, to, count, offset);
  int now = __sync_fetch_and_add(&turn, 1), fails_at = atoi(getenv("FAILS_AT"));
  if (now % 7 == 3) usleep(20000);  // slow
  if (now % 7 == 5) { errno = EINTR; return -1; }
  if (fails_at && now >= fails_at) { errno = EIO; return -1; }
  return real(file, to, now % 3 ? count : (count + 1023) / 1024 * 512, offset);  // short
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) real = dlsym(RTLD_NEXT, "syscall");
  if (number == SYS_io_uring_setup) { errno = EPERM; return -1; }
  va_list more;
  va_start(more, number);
  long a[6];
  for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
  va_end(more);
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_train_from_a_slow_disk_that_fails(tiny, tmp_path):
    """A shim between the reader's threads and the kernel: slow, short and interrupted reads, then EIO."""
    (tmp_path / "shim.c").write_text(SHIM)
    shim, straight = tmp_path / "shim.so", tmp_path / "straight.pt"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", tmp_path / "shim.c", "-o", shim, "-ldl"], check=True)
    words = ["--dataset", tiny, "--model", "gcn", "--fanout", "3,3", "--epochs", 1, "--batch-size", 200, "--cache",
             "20KiB"]
    _train(*words[:-2], "--checkpoint", straight)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(shim)}
    for fails_at, code in ((0, 0), (10, 2)):
        command = [sys.executable, HERE / "train.py", *map(str, words), "--checkpoint", tmp_path / f"{code}.pt"]
        done = subprocess.run(command, env={**environment, "FAILS_AT": str(fails_at)}, capture_output=True, text=True,
                              timeout=120)
        assert done.returncode == code, done.stderr
        if code:
            assert re.fullmatch(r"train.py: .*features.npy cannot be read at byte [0-9,]+: Input/output error\n",
                                done.stderr)
        else:
            ours, plain = _parameters(tmp_path / "0.pt"), _parameters(straight)
            assert all(torch.equal(ours[name], plain[name]) for name in plain)


def _epochs(path):
    return len(_log(path)) if Path(path).is_file() else 0


def test_torchrun_brings_a_killed_rank_back(tiny, tmp_path):
    common = ["--dataset", tiny, "--gpus", 0, "--fanout", "5,5", "--hidden", 32, "--epochs", 25, "--batch-size", 25]
    straight = _start_fork(tmp_path / "out", *common, "--procs", 2, "--checkpoint", tmp_path / "straight.pt")
    process = _start(*common, "--checkpoint", tmp_path / "c.pt", "--checkpoint-every", 5, "--log-file",
                     tmp_path / "log",
                     launcher=[*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"])  # fmt: skip
    _wait_for(lambda: _epochs(tmp_path / "log") >= 3, process)
    ranks = _running_below(process.pid)[1:]
    os.kill(_a_rank(process.pid), signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0 and "resume  from epoch" in output, output
    _end(straight)
    straight, back = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "c.pt")
    assert all(torch.equal(straight[name], back[name]) for name in straight)
    assert _gone(ranks)


@contextmanager
def _two_hosts():
    """Two network namespaces with addresses of their own, joined by a veth pair -> ((name, interface, address),
    ...)."""
    hosts = [(f"ringblock{os.getpid()}{side}", f"rb{os.getpid() % 10**8}{side}", f"10.231.7.{n}")
             for n, side in ((1, "a"), (2, "b"))]
    (a, veth_a, _), (b, veth_b, _) = hosts
    commands = [f"netns add {a}", f"netns add {b}",
                f"link add {veth_a} netns {a} type veth peer name {veth_b} netns {b}"]
    for name, veth, address in hosts:
        commands += [f"-n {name} address add {address}/24 dev {veth}", f"-n {name} link set {veth} up",
                     f"-n {name} link set lo up"]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no right to make network namespaces: ip {command}: {done.stderr.strip()}")
        yield hosts
    except FileNotFoundError:
        pytest.skip("no command ip (apt install iproute2) to make network namespaces with")
    finally:
        for name, *_ in hosts:
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=True)


def test_two_hosts_equal_one_and_a_lost_host_comes_back(tiny, tmp_path):
    common = ["--dataset", tiny, "--gpus", 0, "--fanout", "5,5", "--hidden", 32, "--epochs", 25, "--batch-size", 25]
    straight = _start_fork(tmp_path / "out", *common, "--procs", 2, "--checkpoint", tmp_path / "straight.pt")
    with _two_hosts() as hosts:

        def agent(number):
            name, veth, address = hosts[number]
            command = [
                "ip", "netns", "exec", name, sys.executable, *TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1",
                "--max-restarts", "3",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0][2]}:29500", "--local-addr", address,
                "--rdzv-conf",
                f"is_host={1 - number},keep_alive_interval=1,keep_alive_max_attempt=4", HERE / "train.py", *common,
                "--checkpoint", tmp_path / "c.pt", "--checkpoint-every", 5, "--resume", "auto", "--log-file",
                tmp_path / "log",
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": veth,
                           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with open(tmp_path / f"out{number}", "a") as output:
                return subprocess.Popen([*map(str, command)], env=environment, stdout=output, stderr=output)

        agents = [agent(0), agent(1)]
        try:
            _wait_for(lambda: _epochs(tmp_path / "log") >= 3, agents[0])
            lost = _running_below(agents[1].pid)
            os.kill(lost[0], signal.SIGKILL)
            agents[1].wait()
            assert _gone(lost)  # its rank went with it
            agents[1] = agent(1)
            codes = [process.wait(timeout=300) for process in agents]
        finally:
            for process in agents:
                process.kill()
                process.wait()
    output = (tmp_path / "out0").read_text()
    assert codes == [0, 0] and "resume  from epoch" in output, output
    _end(straight)
    straight, back = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "c.pt")
    assert all(torch.equal(straight[name], back[name]) for name in straight)


def _stands_still(folder):
    """A run of two ranks, one of which SIGSTOP stops after two epochs."""
    words = ["--dataset", TINY, "--root", folder, "--gpus", 0, "--procs", 2, "--fanout", "5,5", "--hidden", 32,
             "--batch-size", 25]
    words += ["--epochs", 30, "--checkpoint", folder / "c.pt", "--log", folder / "log"]
    process = _start_fork(folder / "out", *words)
    _wait_for(lambda: _epochs(folder / "log") >= 2, process)
    process.rank = _a_rank(process.pid)
    os.kill(process.rank, signal.SIGSTOP)
    process.stopped = time.monotonic()
    return process


@_beside(_stands_still)
def test_a_rank_that_stands_still_for_20_seconds_goes_on(beside):
    process, folder = beside
    time.sleep(max(0, process.stopped + 20 - time.monotonic()))
    assert process.is_alive() and _epochs(folder / "log") < 30
    os.kill(process.rank, signal.SIGCONT)
    _end(process)
    assert _epochs(folder / "log") == 31


_STARTS = """
import os, sys
sys.path.insert(0, {here!r})
import ddp
def worker(ranks):
    assert ranks.sum(1) == [2]
if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        ddp.launch(worker, 2)
        print(len(os.listdir("/proc/self/fd")), flush=True)  # sockets among them
        sys.stdin.readline()
"""


def test_starts_and_stops_leave_nothing_behind(tmp_path):
    """RINGBLOCK_STARTS=100 does it a hundred times."""
    (tmp_path / "starts.py").write_text(_STARTS.format(here=str(HERE)))
    memory, starts, left = set(os.listdir("/dev/shm")), int(os.environ.get("RINGBLOCK_STARTS", 3)), set()
    process = subprocess.Popen([sys.executable, "starts.py", str(starts)], cwd=tmp_path, text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    for _ in range(starts):
        files = int(process.stdout.readline())
        left.add((files, len(_running_below(process.pid))))
        process.stdin.write("\n")
        process.stdin.flush()
    process.communicate(timeout=30)
    assert process.returncode == 0 and len(left) == 1
    assert left.pop()[1] <= 2  # with multiprocessing's own resource tracker
    assert set(os.listdir("/dev/shm")) <= memory and len(list(tmp_path.iterdir())) == 1


def test_advice_says_when_one_process_would_be_faster(tiny, tmp_path, monkeypatch):
    output = _train("--dataset", tiny, "--gpus", 0, "--procs", 2, "--fanout", "3,3", "--epochs", 1)
    found = re.search(r"advice  a step of 600 seeds is about ([\d.]+) ms .* 2 take ([\d.]+) ms and ([\d.]+) ms to "
                      r"exchange", output)
    assert found and all(float(number) > 0 for number in found.groups()), output
    # four machines, a large model and a fast network: no advice
    args = train.parse_args(["--dataset", tiny, "--batch-size", "10000", "--hidden", "512", "--fanout", "10,10"])
    args.total_batch = 10000
    graph, ranks = GraphStore.open(tiny), ddp.Ranks(world=4)
    monkeypatch.setattr(ddp.Ranks, "reduce", lambda self, tensor: tensor)
    assert plan.advice(ranks, args, graph, SAGE(16, 512, 4, num_layers=2)) is None
    operations, moved = plan.work_of_a_step(args, graph, SAGE(16, 512, 4, num_layers=2))
    rows, weights = (600, 3000), (2 * 512 * 4 + 4, 2 * 16 * 512 + 512)  # all train, then all of the 3,000 nodes
    assert operations == 6 * sum(a * b for a, b in zip(rows, weights))


def _differs(ranks):
    net = torch.nn.Linear(2, 2)
    ranks.wrap(net)  # takes rank 0's parameters
    ranks.check_equal(net)
    assert ranks.broadcast(b"ab" * ranks.rank, 2) == b"abab" and ranks.broadcast(None if ranks.rank else b"") == b""
    assert ranks.gather(ranks.rank * 2**50) == [0, 2**50, 2**51]
    with torch.no_grad():
        net.bias[1] += 1e-7 * (ranks.rank == 1)
    ranks.check_equal(net)


def test_ranks_know_when_their_parameters_differ(tmp_path):
    output = _end(_fork(tmp_path / "out", ddp.launch, _differs, 3), 1)
    assert "RuntimeError: the parameters of ranks [1] are not those of rank 0" in output


def test_ranks_are_bound_near_their_gpus(tmp_path, monkeypatch):
    gpu = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    slot = tmp_path / "bus/pci/devices/0000:3b:00.0"
    slot.mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert ddp.cores_near(gpu, tmp_path) == set(range(8))  # nothing known
    (slot / "local_cpulist").write_text("2-3,6,40-43\n")
    assert ddp.cores_near(gpu, tmp_path) == {2, 3, 6}
    (slot / "local_cpulist").write_text("40-43\n")  # all of them forbidden to this process
    assert ddp.cores_near(gpu, tmp_path) == set(range(8))


def test_a_damaged_checkpoint_is_refused_by_name(tiny, tmp_path):
    _run_here(tmp_path, "--dataset", tiny, "--batch-size", 200, "--fanout", "3,3", "--hidden", 8, "--epochs", 1)
    good, bad = (tmp_path / "here.pt").read_bytes(), tmp_path / "bad.pt"
    with zipfile.ZipFile(tmp_path / "here.pt") as archive:
        inside = max(archive.infolist(), key=lambda info: info.file_size)
    flipped = bytearray(good)
    flipped[inside.header_offset + 300] ^= 1  # in a tensor: torch.load would take it
    folders = []
    for entry in re.finditer(b"PK\x01\x02", good):  # of the central directory
        folder = bytearray(good)
        folder[entry.start() + 38] |= 0x10  # torch.load takes a small tensor there for one of zeros
        folders.append(bytes(folder))
    assert len(folders) > 5
    for damaged in (bytes(flipped), good[: len(good) // 2], b"", *folders):
        bad.write_bytes(damaged)
        with pytest.raises(StoreError, match="bad.pt is not a checkpoint"):
            checkpoint.read_checkpoint(bad)


def _run_here(tmp_path, *words):
    """Run train.py in this process -> (log entries, the model in its checkpoint)."""
    log, checkpoint = tmp_path / "log", tmp_path / "here.pt"
    log.unlink(missing_ok=True)
    assert train.main([*map(str, words), "--log", str(log), "--checkpoint", str(checkpoint), "--root",
                       str(tmp_path)]) == 0
    return _log(log), torch.load(checkpoint, weights_only=True)["model"]


def test_switches_that_must_not_change_the_result(tiny, tmp_path):
    """Accumulation, recomputed activations, torch operations for native ones, an LMDB store with a cache."""
    common = ["--dataset", tiny, "--fanout", "5,5", "--hidden", 16, "--epochs", 2, "--dropout", 0, "--lr", 0.01]
    log, expected = _run_here(tmp_path, *common, "--batch-size", 200)

    def same(log_and_model, rtol):
        for a, b in zip(log[:2], log_and_model[0][:2]):
            assert a["loss"] == pytest.approx(b["loss"], rel=rtol)
        for name, value in expected.items():
            torch.testing.assert_close(value, log_and_model[1][name], rtol=0.02, atol=2e-3)

    same(_run_here(tmp_path, *common, "--batch-size", 200, "--checkpoint-activations"), 1e-6)
    same(_run_here(tmp_path, *common, "--batch-size", 200, "--prefetch", 3, "--sample-threads", 2), 1e-6)
    lmdb = ["--dataset", TINY, "--backend", "lmdb", *common[2:], "--batch-size", 200]  # no first hop from the table
    same(_run_here(tmp_path, *lmdb), 1e-4)
    cached = _run_here(tmp_path, *lmdb, "--cache", "100KiB")
    same(cached, 1e-4)
    assert 0.3 < cached[0][-2]["cache_hit_rate"] < 1
    # two passes of 100 draw with two keys: other neighbours, so with all neighbours it is the same
    every = [*common[:2], "--fanout", "-1,-1", *common[4:]]
    log, expected = _run_here(tmp_path, *every, "--batch-size", 200)
    same(_run_here(tmp_path, *every, "--batch-size", 100, "--accumulate", 2), 1e-4)
    fused.use_native(False)
    try:
        same(_run_here(tmp_path, *every, "--batch-size", 200), 1e-4)
    finally:
        fused.use_native(True)


def test_bf16_learns_and_pictures_are_drawn(tiny, tmp_path):
    pictures = ["--profile", tmp_path / "trace.json"]
    if importlib.util.find_spec("matplotlib"):
        pictures += ["--timeline", tmp_path / "timeline.png"]
    log, _ = _run_here(tmp_path, "--dataset", tiny, "--fanout", "5,5", "--hidden", 16, "--epochs", 3, "--lr", 0.01,
                       "--batch-size", 100, "--precision", "bf16", *pictures)  # fmt: skip
    assert log[2]["loss"] < log[0]["loss"] and log[-1]["exact"]["test"] > 0.5
    assert json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    if "--timeline" in pictures:
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", model.CONVS)
def test_train_every_model_learns_and_its_checkpoint_predicts(name, tiny, tmp_path, monkeypatch):
    words = ["--dataset", tiny, "--model", name, "--fanout", "5,5", "--hidden", 16, "--norm", "layer",
             "--residual", "--epochs", 4, "--lr", 0.01, "--batch-size", 100, "--dropout", 0.25]  # fmt: skip
    log, _ = _run_here(tmp_path, *words)
    assert log[3]["loss"] < log[0]["loss"] and log[-1]["exact"]["test"] > 0.5
    saved = train.parse_args(["--resume", str(tmp_path / "here.pt")])
    assert (saved.model, saved.hidden, saved.residual, saved.dropout, saved.batch_size) == (name, 16, True, 0.25, 100)
    (tmp_path / ".classes.npy.0123456789abcdef.part").touch()  # what a run that was killed has left
    words = ["--resume", str(tmp_path / "here.pt"), "--predict", str(tmp_path / "classes.npy")]
    assert train.main(words) == 0  # what the checkpoint fixes is not said again
    classes, graph = np.load(tmp_path / "classes.npy"), GraphStore.open(tiny)
    assert classes.dtype == np.int64 and classes.shape == (3000,)
    right = (torch.from_numpy(classes) == graph.labels)[graph.split["test"]].double().mean().item()
    assert right == pytest.approx(log[-1]["exact"]["test"])
    if name == "sage":  # also where the features do not fit into memory, which leaves out the accuracy otherwise
        with monkeypatch.context() as little:
            little.setattr(store, "free_host_bytes", lambda: 1000)
            little.setattr(assemble, "choose_mode", lambda *_, **__: ("cpu-cpu", ""))
            assert train.main([*words[:2], "--mode", "cpu-cpu", "--predict", str(tmp_path / "large.npy")]) == 0
        assert (np.load(tmp_path / "large.npy") == classes).all()
        (tmp_path / "large.npy").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["classes.npy", "here.pt", "log"]


@pytest.mark.parametrize("name, norm", [("gcn", "batch"), ("gat", "none")])
def test_train_two_processes_evaluate_together(name, norm, tiny, tmp_path):
    """Each computes its part of the nodes; from one checkpoint two predict what one predicts, batch norm or not."""
    common = ["--gpus", 0, "--resume", tmp_path / "two.pt"]
    run = _script if name == "gcn" else _train  # spawned ranks, and forked ones
    run("--dataset", tiny, "--model", name, "--norm", norm, "--fanout", "4,4", "--hidden", 16, "--epochs", 5, "--lr",
        0.01,
        "--batch-size", 60, "--gpus", 0, "--procs", 2, "--checkpoint", tmp_path / "two.pt", "--log", tmp_path / "log",
        "--predict", tmp_path / "trained.npy")  # fmt: skip
    _train(*common, "--procs", 2, "--predict", tmp_path / "two.npy")
    _train(*common, "--predict", tmp_path / "one.npy")
    trained, one, two = (np.load(tmp_path / f"{name}.npy") for name in ("trained", "one", "two"))
    assert (one == two).mean() > 0.999 and (trained == two).all() and _log(tmp_path / "log")[-1]["exact"]["test"] > 0.4


def test_train_without_validation_nodes_or_a_reader(tmp_path):
    path = build_store(tmp_path / "g",
                       **dict(_graph(), split={"train": range(150), "valid": [], "test": range(150, 200)}))
    common = ["--dataset", path, "--fanout", "3,3", "--hidden", 8, "--epochs", 3, "--gpus", 0]
    assert "has no validation nodes" in _train(*common, "--early-stop", 2, code=2)
    assert "valid n/a" in _train(*common)
    process = _start(*common)
    process.stdout.close()
    assert process.wait(timeout=60) == 141


def test_train_early_stop_keeps_the_best_weights(tiny, tmp_path):
    common = ["--dataset", tiny, "--fanout", "3,3", "--hidden", 16, "--batch-size", 100, "--lr", 0.05, "--early-stop",
              3]
    log, last = _run_here(tmp_path, *common, "--epochs", 60)
    valid = [entry["valid_sampled"] for entry in log[:-1]]
    assert 4 <= len(valid) < 60 and np.argmax(valid) == len(valid) - 4
    best = torch.load(tmp_path / "here.pt", weights_only=True)["best"]
    assert best["epoch"] == len(valid) - 3 and best["score"] == max(valid)
    graph = GraphStore.open(tiny)
    net = SAGE(16, 16, 4, num_layers=2)
    net.load_state_dict(best["model"])
    right = inference(net, graph.indptr, graph.indices, graph.features.tensor).argmax(1) == graph.labels
    assert log[-1]["exact"]["test"] == pytest.approx(right[graph.split["test"]].double().mean().item(), abs=1e-3)
    # stopped in between and resumed, it stops where the straight run stops
    _run_here(tmp_path, *common, "--epochs", 3)
    resumed, weights = _run_here(tmp_path, "--resume", tmp_path / "here.pt", *common, "--epochs", 60)
    assert resumed[-2]["epoch"] == len(valid) and all(torch.equal(last[name], weights[name]) for name in last)


def test_train_runs_give_mean_and_standard_deviation(tiny, tmp_path, capsys):
    log = tmp_path / "log"
    assert train.main(["--dataset", tiny, "--fanout", "3,3", "--epochs", "1", "--runs", "3", "--seed", "5", "--log",
                       str(log)]) == 0
    runs = [entry for entry in _log(log) if "exact" in entry]
    test = [entry["exact"]["test"] for entry in runs]
    assert [entry["seed"] for entry in runs] == [5, 6, 7] and len(set(test)) > 1
    assert _log(log)[-1]["mean"]["test"] == pytest.approx(np.mean(test))
    assert _log(log)[-1]["std"]["test"] == pytest.approx(np.std(test, ddof=1))
    assert f"test {100 * np.mean(test):.2f} +- {100 * np.std(test, ddof=1):.2f}%" in capsys.readouterr().out


def test_train_cosine_schedule_is_kept_in_the_checkpoint(tiny, tmp_path):
    common = ["--dataset", tiny, "--fanout", "3,3", "--epochs", 40, "--batch-size", 25, "--lr", 0.01, "--lr-schedule",
              "cosine"]
    _train(*common, "--log", tmp_path / "log", "--checkpoint", tmp_path / "straight.pt")
    log, straight = _log(tmp_path / "log"), _parameters(tmp_path / "straight.pt")
    assert [entry["lr"]
            for entry in log[:-1]] == pytest.approx([0.01 * (1 + math.cos(math.pi * i / 40)) / 2 for i in range(40)])
    process = _start_fork(tmp_path / "out", *common, "--checkpoint", tmp_path / "c.pt")
    _wait_for(lambda: "epoch   2" in (tmp_path / "out").read_text(), process)
    process.terminate()
    _end(process, 128 + signal.SIGTERM)
    _train(*common, "--resume", tmp_path / "c.pt", "--checkpoint", tmp_path / "resumed.pt")
    resumed = _parameters(tmp_path / "resumed.pt")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_train_tensorboard(tiny, tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not there")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, _ = _run_here(tmp_path, "--dataset", tiny, "--fanout", "3,3", "--epochs", 2, "--tensorboard",
                       tmp_path / "board")
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([entry["loss"] for entry in log[:2]])
    assert board.Scalars("exact/test")[0].value == pytest.approx(log[-1]["exact"]["test"])
    hparams = b"".join(file.read_bytes() for file in (tmp_path / "board").glob("**/events.out.tfevents*"))
    assert b"batch_size" in hparams and b"_hparams_/session_start_info" in hparams


def test_train_help_fits_two_screens_and_says_units_and_defaults():
    environment = {**os.environ, "COLUMNS": "110"}
    done = subprocess.run([sys.executable, HERE / "train.py", "--help"], capture_output=True, text=True,
                          env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) <= 112 and max(map(len, lines)) <= 110
    groups = [line for line in lines if re.fullmatch(r"\w[\w ]*:", line)]
    assert groups == ["options:", "data:", "sampling:", "model:", "links:", "optimisation:", "processes and placement:",
                      "files:"]
    for action in flags.make_parser()._actions:
        assert action.help and (action.default in (None, False) or action.default == argparse.SUPPRESS
                                or "default" in flags._Defaults("")._get_help_string(action)), action.dest  # fmt: skip


def test_uneven_last_batches_do_not_hang(tmp_path):
    """601 seeds, 3 ranks of 200: the last step has one seed, two of the ranks none."""
    output = _train("--dataset", TINY.replace("train=600", "train=601"), "--root", tmp_path, "--gpus", 0, "--procs", 3,
                    "--batch-size", 200, "--epochs", 1, "--fanout", "3,3")  # fmt: skip
    assert "2 steps an epoch" in output and "exact" in output


def test_train_ctrl_c_during_the_imports_leaves_no_traceback():
    command = [sys.executable, HERE / "train.py", "--gpus", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and output == "", output


@pytest.mark.parametrize("procs", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_and_no_process(tiny, tmp_path, procs, number):
    common = ["--dataset", tiny, "--gpus", 0, "--procs", procs, "--batch-size", 50, "--fanout", "3,3", "--dropout", 0.5]
    process = _start(*common, "--epochs", 10000, "--checkpoint", tmp_path / "c.pt", start_new_session=True)
    watch = threading.Timer(180, process.kill)  # whatever goes wrong, it ends
    watch.start()
    lines = iter(process.stdout.readline, "")
    for line in lines:
        if line.startswith("epoch   2"):
            break
    family = _running_below(process.pid)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the whole group gets it
    else:
        process.terminate()
    output = "".join(lines)
    watch.cancel()
    assert process.wait(timeout=30) == 128 + number, output
    assert "stopped in epoch" in output and "Traceback" not in output, output
    assert _gone(family)
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    stopped = (state["epoch"], state["step"])
    if (procs, number) != (2, signal.SIGINT):
        return
    # the interrupted run, resumed, ends where the run that was not interrupted ends
    total = stopped[0] + 2
    _train(*common, "--epochs", total, "--resume", tmp_path / "c.pt", "--checkpoint", tmp_path / "resumed.pt")
    _train(*common, "--epochs", total, "--checkpoint", tmp_path / "straight.pt")
    a, b = (torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"] for name in ("resumed", "straight"))
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------------------------
# link.py


def _link_graph(folder, nodes=300, edges=1500, seed=0, symmetrize=True, **changes):
    """A store of random edges, several of them there twice, self-loops among them."""
    rng = np.random.default_rng(seed)
    edge_index = rng.integers(0, nodes, (2, edges))
    edge_index = np.concatenate([edge_index, edge_index[:, :20]], 1)
    x, y = rng.normal(size=(nodes, 8)).astype(np.float32), rng.integers(0, 3, nodes)
    return GraphStore.open(build_store(folder / f"links{seed}", edge_index=edge_index, features=x, labels=y,
                                       symmetrize=symmetrize,
                                       split={"train": [0]}, **changes))  # fmt: skip


def _pairs_of(graph):
    """All edges of a graph -> list of (source, destination)."""
    return list(zip(graph.indices.tolist(), torch.repeat_interleave(graph.indptr.diff()).tolist()))


@pytest.mark.parametrize("ascending", [True, False])
def test_edges_are_found_wherever_they_stand(ascending):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        indptr, indices = _random_graph(rng, 40, 6)
        lists = [sorted(part.tolist(), reverse=not ascending) for part in indices.tensor_split(indptr[1:-1])]
        indices = torch.tensor([u for part in lists for u in part], dtype=indices.dtype)
        edges, all_edges = link.Edges(indptr, indices), [(u, v) for v, part in enumerate(lists) for u in part]
        source, target = torch.arange(40).repeat_interleave(40), torch.arange(40).repeat(40)
        there = [(u, v) in set(all_edges) for u, v in zip(source.tolist(), target.tolist())]
        assert edges.has(source, target).tolist() == there
        some = torch.from_numpy(rng.integers(0, 40, (2, 30)))
        wanted = collections.Counter(zip(*some.tolist()))
        expected = sorted(place for place, edge in enumerate(all_edges) for _ in range(wanted[edge]))
        assert sorted(edges.ids(*some).tolist()) == expected
    empty = link.Edges(torch.zeros(4, dtype=torch.int64), indices[:0])
    assert not empty.has(torch.arange(3), torch.arange(3)).any()
    assert not empty.ids(torch.arange(3), torch.arange(3)).numel()


@pytest.mark.parametrize("symmetrize", [True, False])
def test_link_split_holds_edges_out_with_their_reverses(symmetrize, tmp_path):
    graph = _link_graph(tmp_path, symmetrize=symmetrize)
    view, whole = link.split_edges(graph, "80/10/10", 3), _pairs_of(graph)
    proper = {frozenset(edge) for edge in whole if edge[0] != edge[1]}
    found = {name: [tuple(pair) for pair in pairs.tolist()] for name, pairs in view.pairs.items()}
    assert set().union(*found.values()) <= set(whole)
    everything = [frozenset(pair) for pairs in found.values() for pair in pairs]
    both = sum((v, u) in set(whole) for u, v in sum(found.values(), []))
    assert set(everything) == proper and len(everything) == len(proper)
    assert [len(found[name]) for name in ("valid", "test")] == [len(proper) // 10] * 2
    held = {frozenset(pair) for name in ("valid", "test") for pair in found[name]}
    assert _pairs_of(view) == [edge for edge in whole if frozenset(edge) not in held]
    upwards = sum(u < v for u, v in sum(found.values(), [])) / len(everything)
    assert 0.4 < upwards < 0.6 and (both == len(everything)) == symmetrize
    again, other = link.split_edges(graph, "80/10/10", 3), link.split_edges(graph, "80/10/10", 4)
    assert torch.equal(again.pairs["test"], view.pairs["test"])
    assert not torch.equal(other.pairs["test"], view.pairs["test"])
    everywhere = link.split_edges(graph, "none", 3)
    assert len(everywhere.pairs["train"]) == len(proper) and everywhere.num_edges == graph.num_edges


def test_link_split_by_time_and_from_a_file(tmp_path):
    graph = _link_graph(tmp_path, symmetrize=False)
    with pytest.raises(StoreError, match="time:80/10/10 goes by the time of edges, and .* has none"):
        link.split_edges(graph, "time:80/10/10")
    graph.edge_time = torch.from_numpy(np.random.default_rng(0).permutation(graph.num_edges))
    view = link.split_edges(graph, "time:80/10/10")
    at = {}
    for edge, when in zip(_pairs_of(graph), graph.edge_time.tolist()):
        at.setdefault(frozenset(edge), []).append(when)
    when = {name: [at[frozenset(pair)] for pair in pairs.tolist()] for name, pairs in view.pairs.items()}
    # of several edges one counts
    once = {name: [times[0] for times in some if len(times) == 1] for name, some in when.items()}
    assert max(once["train"]) < min(once["valid"]) and max(once["valid"]) < min(once["test"])
    assert len(view.edge_time) == view.num_edges == len(view.indices)
    whole, file = _pairs_of(graph), tmp_path / "split.npz"
    given = {"valid": [whole[5], whole[9]], "test": [whole[200], (0, 0)]}
    np.savez(file, **given)
    view = link.split_edges(graph, str(file))
    assert {name: [tuple(pair) for pair in view.pairs[name].tolist()] for name in given} == given
    held = {frozenset(pair) for pairs in given.values() for pair in pairs}
    assert _pairs_of(view) == [edge for edge in whole if frozenset(edge) not in held]
    assert view.known.has(torch.tensor([0]), torch.tensor([0])).all(), "no negative is to be a pair of the file"
    for message, arrays in (
        (r"valid is \[3\] int64: integers \[n, 2\] are needed", {"valid": [1, 2, 3]}),
        (r"test\[1\] is \[0, 300\]: node ids lie in \[0, 300\)", {"test": [[0, 1], [0, 300]]}),
        ("has an array 'val': its arrays are train, valid, test", {"val": [[0, 1]]}),
        ("`train` has pairs that are no edges", {"train": [whole[5]], "test": [whole[5]]}),
    ):
        np.savez(file, **arrays)
        with pytest.raises(StoreError, match=message):
            link.split_edges(graph, str(file))


def _negatives_by_the_law(graph, key, numbers, sources, count, upto=None):
    """Plain Python: draw again, `count` draws further on, for as long as there is an edge or it is the node itself."""
    edges, found = set(_pairs_of(graph)), []
    for number, source in zip(numbers, sources):
        for which in range(count):
            while True:
                bits = _mix(_mix(key ^ number) ^ which) >> 11
                node = (bits >> 21) * graph.num_nodes >> 32
                if upto:
                    node = next(v for v, end in enumerate(upto) if end > int(bits * (upto[-1] / 2**53)))
                if node != source and (source, node) not in edges:
                    break
                which += count
            found.append(node)
    return torch.tensor(found).view(-1, count)


@pytest.mark.parametrize("by_degree", [False, True])
def test_negatives_follow_the_law_and_are_no_edges(by_degree, tmp_path):
    graph = _link_graph(tmp_path, nodes=60, edges=600)
    edges, degrees = link.Edges(graph.indptr, graph.indices), graph.indptr.diff() if by_degree else None
    numbers, sources = torch.randint(0, 1 << 40, (200,)), torch.randint(0, 60, (200,))
    drawn = link.Negatives(edges, 60, degrees).draw(12345, numbers, sources, 7)
    upto = list(itertools.accumulate(int(d**0.75 * 1024) for d in degrees.tolist())) if by_degree else None
    assert torch.equal(drawn, _negatives_by_the_law(graph, 12345, numbers.tolist(), sources.tolist(), 7, upto))
    assert not edges.has(sources.unsqueeze(1).expand_as(drawn), drawn).any()
    assert not (drawn == sources.unsqueeze(1)).any()
    part = link.Negatives(edges, 60, degrees).draw(12345, numbers[50:70], sources[50:70], 7)
    assert torch.equal(part, drawn[50:70]), "a function of the pair's number, not of the batch"
    unchecked = link.Negatives(None, 60, degrees).draw(12345, numbers, sources, 7)
    assert edges.has(sources.unsqueeze(1).expand_as(drawn), unchecked).any()
    assert not (unchecked == sources.unsqueeze(1)).any()


def test_negatives_are_spread_as_they_should_be():
    """Chi-square over 50 nodes: uniform, and by degree^0.75."""
    degrees = torch.arange(1, 51)
    for given, share in ((None, torch.ones(50)), (degrees, degrees.double().pow(0.75))):
        negatives = link.Negatives(None, 51,
                                   None if given is None else torch.cat([given, torch.zeros(1, dtype=torch.int64)]))
        drawn = negatives.draw(1, torch.arange(100_000), torch.full((100_000,), 50),
                               1).flatten().bincount(minlength=50).double()
        expected = 100_000 * share / share.sum()
        assert float(((drawn - expected) ** 2 / expected).sum()) < _chi_square_limit(49)


def test_a_node_with_an_edge_to_nearly_every_node_has_negatives_still():
    nodes = 500  # node 0 has an edge to all but the last
    indptr = torch.cat([torch.tensor([0]), torch.arange(nodes - 1) + 1, torch.tensor([nodes - 1])])
    edges, zeros = link.Edges(indptr, torch.zeros(nodes - 1, dtype=torch.int32)), torch.zeros(20, dtype=torch.int64)
    assert (link.Negatives(edges, nodes).draw(7, torch.arange(20), zeros, 3) == nodes - 1).all()
    full = link.Edges(torch.arange(nodes + 1), torch.zeros(nodes, dtype=torch.int32))
    with pytest.raises(StoreError, match="node 0 has an edge to every node.*--unchecked-negatives"):
        link.Negatives(full, nodes).draw(7, torch.arange(20), zeros, 3)


def _links(graph, hops=2, fanout=-1, **options):
    draw = NeighborSampler(graph.indptr, graph.indices, [fanout] * hops, edge_ids=True)
    return link.Links(graph, draw, FeatureRing(graph.features.tensor, graph.labels, slots=1, log=lambda line: None),
                      **options)


@pytest.mark.parametrize("exclude", [True, False])
def test_no_positive_of_a_step_lies_in_its_blocks(exclude, tmp_path):
    """Those of other processes neither: a step takes its pairs from all of them. Without exclusion nearly all do."""
    graph = link.split_edges(_link_graph(tmp_path), "80/10/10")
    links = _links(graph, negatives=2, exclude=exclude)
    for step in range(20):
        everyone = torch.randperm(len(graph.pairs["train"]), generator=torch.Generator().manual_seed(step))[:60]
        *blocks, y = links.sample(everyone[20:40], step, step_seeds=everyone)
        nodes = blocks[-1].src_nodes[: blocks[-1].num_dst]
        assert nodes.numel() == nodes.unique().numel() and y.shape == (20, 4)
        assert torch.equal(nodes[y[:, :2]].long(), graph.pairs["train"][everyone[20:40]])
        held = {frozenset(pair) for pair in graph.pairs["train"][everyone].tolist()}
        taken = set()
        for block in blocks:
            targets = block.src_nodes[torch.repeat_interleave(block.indptr.diff().long())]
            taken |= {frozenset(edge) for edge in zip(block.src_nodes[block.indices.long()].tolist(), targets.tolist())}
        assert bool(held & taken) != exclude
    assert torch.equal(links.sample(everyone, 3)[-1], links.sample(everyone, 3)[-1])


def _scores_while_training(graph, exclude, steps=150):
    """Train GraphSAGE to predict the edges of a graph -> ROC-AUC of the last steps' own pairs and negatives."""
    torch.manual_seed(0)
    links = _links(graph, hops=1, exclude=exclude)
    net = SAGE(graph.features.shape[1], 16, 16, num_layers=1, dropout=0.0)
    scorer, found = link.Scorer("dot", 16), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(steps):
        seeds = torch.randperm(len(graph.pairs["train"]))[:512]
        batch = links.fetch(0, links.sample(seeds, step))
        h = net(batch.blocks, batch.x)
        (links.loss(scorer, h, batch.y) / len(seeds)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [scorer(h[batch.y[:, :1]], h[batch.y[:, 1:]]).detach()] if step >= steps - 20 else []
    scores = torch.cat(found)
    y = torch.zeros_like(scores)
    y[:, 0] = 1
    valid = link.Evaluation(graph)(scorer, inference(net, graph.indptr, graph.indices, graph.features), "valid")
    return metrics.roc_auc(scores.flatten(), y.flatten()), valid["roc_auc"]


def test_a_random_graph_cannot_be_predicted_unless_positives_leak(tmp_path):
    """Edges at random between nodes of random features: nothing but an edge itself tells that it is there."""
    graph = link.split_edges(_link_graph(tmp_path, nodes=3000, edges=9000), "80/20/0")
    error = 1 / math.sqrt(6 * len(graph.pairs["valid"]))  # of a ROC-AUC that is 0.5: sqrt((2n + 1) / 12 n^2)
    trained, valid = _scores_while_training(graph, exclude=True)
    leaky, _ = _scores_while_training(graph, exclude=False)
    print(f"ROC-AUC while training {trained:.3f}, with the leak {leaky:.3f}; valid {valid:.3f}, error {error:.3f}")
    assert abs(trained - 0.5) < 0.03 and abs(valid - 0.5) < 4 * error and leaky > 0.7


@pytest.mark.parametrize("kind", ["dot", "distmult", "mlp"])
@pytest.mark.parametrize("small", [True, False])
def test_link_evaluation_is_what_plain_python_counts(kind, small, tmp_path, monkeypatch):
    monkeypatch.setattr(link, "SMALL", 1 << 14 if small else 0)
    monkeypatch.setattr(link, "CHUNK", 4000)
    whole = _link_graph(tmp_path, nodes=80, edges=300, symmetrize=False)
    graph = link.split_edges(whole, "70/10/20")
    torch.manual_seed(0)
    # with ties
    scorer, h, known = link.Scorer(kind, 6).double(), torch.randint(-3, 4, (80, 6)).double(), set(_pairs_of(whole))
    if kind == "distmult":
        torch.nn.init.normal_(scorer.relation)
    evaluation = link.Evaluation(graph)
    found = evaluation(scorer, h, "test")

    def logit(u, v):
        product = h[u] * h[v]
        return (scorer.mlp(product) if kind == "mlp"
                else (product * scorer.relation if kind == "distmult" else product).sum()).item()

    pairs, places = [tuple(pair) for pair in graph.pairs["test"].tolist()], []
    random, others = evaluation.fixed["test"]
    for number, (u, v) in enumerate(pairs):
        against = [w for w in range(80) if w not in (u, v) and (u, w) not in known]
        against = against if small else others[number].tolist()
        scores, own = [logit(u, w) for w in against], logit(u, v)
        near = [abs(s - own) < 1e-12 for s in scores]
        places.append(1 + sum(s > own and not same for s, same in zip(scores, near)) + sum(near) / 2)
    assert found["mrr"] == pytest.approx(np.mean([1 / place for place in places]))
    assert found["hits@1"] == pytest.approx(np.mean([place <= 1 for place in places]))
    assert found["hits@10"] == pytest.approx(np.mean([place <= 10 for place in places]))
    assert len(random) == len(pairs) and not known & {tuple(pair) for pair in random.tolist()}
    if not small:
        assert not known & {(u, w) for (u, _), row in zip(pairs, others.tolist()) for w in row}
    positive, negative = ([logit(u, v) for u, v in some] for some in (pairs, random.tolist()))
    assert found["roc_auc"] == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a in positive for b in negative]))
    again = link.Evaluation(link.split_edges(whole, "70/10/20"))
    again(scorer, h, "test")
    assert torch.equal(again.fixed["test"][0], random)
    parts = [ddp.Ranks(rank, 3).part(len(pairs)) for rank in range(3)]
    rows = []
    for part in parts:
        ranks = types.SimpleNamespace(part=lambda n, part=part: part, rows=lambda t: rows.append(t) or t)
        evaluation(scorer, h, "test", ranks)
    assert len(torch.cat(rows)) == len(pairs)
    assert link.ranking(torch.cat(rows)[:, 2])["mrr"] == pytest.approx(found["mrr"])
    assert evaluation(scorer, h, "valid")
    assert link.Evaluation(link.split_edges(whole, "none"))(scorer, h, "test") is None


def _timed_links(folder, nodes=200, edges=1200, **changes):
    """A store of random edges at random times, some of them there several times, others in both directions."""
    times = np.random.default_rng(5).integers(0, 500, edges + 20)
    return _link_graph(folder, nodes, edges, edge_time=times, **changes)


@pytest.mark.parametrize("symmetrize", [True, False])
def test_a_pair_has_the_time_of_the_first_edge_between_its_nodes(symmetrize, tmp_path):
    graph = _timed_links(tmp_path, nodes=40, edges=500, symmetrize=symmetrize)
    first = {}
    for (u, v), time_ in zip(_pairs_of(graph), graph.edge_time.tolist()):
        first[frozenset((u, v))] = min(time_, first.get(frozenset((u, v)), time_))
    for how in ("70/20/10", "time:70/20/10"):
        view = link.split_edges(graph, how, seed=3, timed=True)
        for part, pairs in view.pairs.items():
            assert view.pair_times[part].tolist() == [first[frozenset(pair)] for pair in pairs.tolist()]
    assert link.split_edges(graph, "70/20/10").pair_times is None


@pytest.mark.parametrize("strict", [True, False])
def test_links_at_their_times_see_no_later_edge_and_not_their_own(strict, tmp_path):
    """Neither do their negatives, which have the time of the pair; a node may be sampled for at several times."""
    graph = link.split_edges(_timed_links(tmp_path, nodes=60), "80/10/10", timed=True)
    draw = NeighborSampler(graph.indptr, graph.indices, [-1, -1], edge_ids=True, edge_times=graph.edge_time,
                           strict=strict)  # fmt: skip
    rows = FeatureRing(graph.features.tensor, graph.labels, slots=1, log=lambda line: None)
    links = link.Links(graph, draw, rows, negatives=3)
    for step in range(10):
        seeds = torch.randperm(len(graph.pairs["train"]), generator=torch.Generator().manual_seed(step))[:50]
        *blocks, y = links.sample(seeds, step)
        nodes, times = blocks[-1].src_nodes[: blocks[-1].num_dst].long(), blocks[-1].src_times[: blocks[-1].num_dst]
        assert torch.equal(nodes[y[:, :2]], graph.pairs["train"][seeds]) and len(nodes) > len(nodes.unique())
        assert (times[y] == graph.pair_times["train"][seeds].unsqueeze(1)).all()
        assert not links.edges.has(nodes[y[:, :1]].expand(-1, 3), nodes[y[:, 2:]]).any()
        held, seen = {frozenset(pair) for pair in graph.pairs["train"][seeds].tolist()}, 0
        for block in blocks:
            target = torch.repeat_interleave(block.indptr.diff().long())
            edge, until = graph.edge_time[block.edge_ids], block.src_times[target]
            assert bool((edge < until).all() if strict else (edge <= until).all())
            ends = zip(block.src_nodes[block.indices.long()].tolist(), block.src_nodes[target].tolist())
            assert not held & {frozenset(pair) for pair in ends}
            seen += len(target)
        assert seen > 200


def test_link_evaluation_at_times_takes_the_embeddings_of_each_pair(tmp_path, monkeypatch):
    """A node's embedding is here a function of node and time, which figures counted slowly are compared with."""
    graph = link.split_edges(_timed_links(tmp_path, nodes=60), "60/20/20", timed=True)
    evaluation, scorer, whole = link.Evaluation(graph), link.Scorer("dot", 2).double(), set(_pairs_of(graph))
    nodes, times = evaluation.seen("test")
    assert len(torch.stack([nodes, times]).unique(dim=1).T) == len(nodes)

    def row(node, time_):
        return torch.tensor([math.sin(7 * node + time_), math.cos(3 * node - time_)], dtype=torch.float64)

    found = evaluation(scorer, torch.stack([row(*pair) for pair in zip(nodes.tolist(), times.tolist())]), "test")
    random, others = evaluation.fixed["test"]
    pairs, when, places = graph.pairs["test"].tolist(), graph.pair_times["test"].tolist(), []
    for (u, v), t, against in zip(pairs, when, others.tolist()):
        own, scores = row(u, t) @ row(v, t), [row(u, t) @ row(w, t) for w in against]
        same = [abs(score - own) < 1e-12 for score in scores]
        places.append(1 + sum(bool(s > own) and not e for s, e in zip(scores, same)) + sum(map(int, same)) / 2)
        assert not whole & {(u, w) for w in against}
    assert found["mrr"] == pytest.approx(np.mean([1 / place for place in places]))
    positive, negative = ([row(u, t) @ row(v, t) for (u, v), t in zip(some, when)] for some in (pairs, random.tolist()))
    expected = np.mean([float(a > b) + float(a == b) / 2 for a in positive for b in negative])
    assert found["roc_auc"] == pytest.approx(expected, abs=1e-9)


def _links_told_by_the_future(path, pairs=400):
    """Two nodes meet at some time; right after it both get an edge from a third of their own, which says so."""
    rng = np.random.default_rng(0)
    u, v, third = np.arange(3 * pairs).reshape(3, pairs)
    noise, when = 3 * pairs + rng.integers(0, 100, (2, pairs)), rng.integers(100, 200, pairs)
    src, dst = np.concatenate([u, v, third, third, *noise]), np.concatenate([v, u, u, v, u, v])
    times = np.concatenate([when, when, when + 1, when + 1, *(when - rng.integers(1, 90, (2, pairs)))])
    x = np.zeros((3 * pairs + 100, 16), np.float32)
    x[third], x[3 * pairs :] = rng.standard_normal((pairs, 16)), rng.standard_normal((100, 16))
    order, both = rng.permutation(pairs), np.stack([u, v], 1)
    np.savez(path.with_suffix(".npz"), train=both[order[:200]], valid=both[order[200:280]], test=both[order[280:]])
    return build_store(path, edge_index=np.stack([src, dst]), features=x, labels=np.zeros(len(x), np.int64),
                       split={"train": [0]}, edge_time=times)  # fmt: skip


def test_links_see_no_future(tmp_path):
    """The future gives the answer away: before their own time pairs cannot be told from others, without it they can."""
    path = _links_told_by_the_future(tmp_path / "g")
    words = ["--task", "link", "--dataset", path, "--edge-split", tmp_path / "g.npz", "--gpus", 0, "--fanout", "10",
             "--hidden", 16, "--epochs", 30, "--batch-size", 50, "--lr", 0.02, "--dropout", 0]  # fmt: skip
    found = {}
    for temporal, what in (("before", "the ends of a pair and its negatives see edges before their own time"),
                           ("at", "the ends of a pair and its negatives see edges at their own time or before"),
                           ("off", "times of edges are not used: --temporal off")):  # fmt: skip
        assert what in _train(*words, "--temporal", temporal, "--log", tmp_path / temporal)
        scores = _log(tmp_path / temporal)[-1]["scores"]
        found[temporal] = scores["valid"]["roc_auc"], scores["test"]["roc_auc"]
    error = 1 / math.sqrt(6 * 80)
    assert min(found["off"]) > 0.9, found
    assert all(abs(figure - 0.5) < 4 * error for temporal in ("before", "at") for figure in found[temporal]), found


def test_links_at_their_times_are_the_same_for_any_number_of_processes_and_after_a_kill(tmp_path):
    path = _timed_links(tmp_path, nodes=120, edges=400).path
    common = [*LINK, "--dataset", path, "--epochs", 3, "--precision", "fp64", "--dropout", 0.5, "--model", "gin",
              "--temporal", "before", "--negatives", 2]  # fmt: skip
    for procs in (1, 2, 3):
        _train(*common, "--procs", procs, "--batch-size", 90 // procs, "--log", tmp_path / f"{procs}",
               "--checkpoint", tmp_path / f"{procs}.pt")  # fmt: skip
    expected = _log(tmp_path / "1")
    for procs in (2, 3):
        log = _log(tmp_path / f"{procs}")
        found, wanted = ([entry["loss"] for entry in entries[:3]] for entries in (log, expected))
        assert found == pytest.approx(wanted, rel=1e-9)
        for a, b in zip(expected[:3], log):
            assert a["valid"] == pytest.approx(b["valid"], abs=1e-3)
        assert log[-1]["scores"]["test"] == pytest.approx(expected[-1]["scores"]["test"], abs=1e-3)
    words = [*common, "--batch-size", 40, "--epochs", 12]
    _train(*words, "--checkpoint", tmp_path / "straight.pt", "--log", tmp_path / "straight")
    words += ["--checkpoint", tmp_path / "killed.pt", "--checkpoint-every", 3, "--resume", "auto"]
    process = _start_fork(tmp_path / "out", *words)
    _wait_for(lambda: "epoch   5/12" in process.output.read_text(), process)
    process.kill()
    _end(process, -signal.SIGKILL)
    _train(*words, "--log", tmp_path / "killed", "--predict", tmp_path / "h.npy")
    straight, killed = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "killed.pt")
    assert all(torch.equal(straight[name], value) for name, value in killed.items())
    assert _log(tmp_path / "straight")[-1]["scores"] == _log(tmp_path / "killed")[-1]["scores"]
    assert np.isfinite(np.load(tmp_path / "h.npy")).all() and np.load(tmp_path / "h.npy").shape == (120, 16)


def test_links_at_their_times_are_refused_in_a_sentence(tmp_path):
    timed, plain = _timed_links(tmp_path).path, _link_graph(tmp_path, seed=1).path
    np.savez(tmp_path / "none.npz", test=[[0, 0]])
    for path, words, complaint in (
        (plain, ["--temporal", "at"], "--temporal goes by the times of edges, and .* has none"),
        (timed, ["--temporal", "before", "--model", "gcn"], "--model gcn divides by the degrees of the whole graph"),
        (timed, ["--sampler", "latest"], "--sampler latest takes the last edges .* here off"),
        (timed, ["--temporal", "at", "--edge-split", tmp_path / "none.npz"],
         r"none.npz: the pair \[0, 0\] has no time, for it is no edge; --temporal off takes it"),
    ):  # fmt: skip
        assert re.search(complaint, _train(*LINK, "--dataset", path, *words, code=2))
    said = _train(*LINK, "--dataset", timed, "--temporal", "before", "--sampler", "latest", "--epochs", 1)
    assert "neighbours are the latest" in said and "times of edges are not used" not in said


LINK = ["--task", "link", "--gpus", 0, "--fanout", "4,4", "--hidden", 16, "--lr", 0.01, "--edge-split", "80/10/10"]


def test_link_task_is_the_same_for_any_number_of_processes(tmp_path):
    """In fp64 to 1e-9, dropout and the last, smaller step included: exclusion goes by the pairs of all processes."""
    path = _link_graph(tmp_path, nodes=500, edges=1000).path
    common = [*LINK, "--dataset", path, "--epochs", 3, "--precision", "fp64", "--dropout", 0.5, "--negatives", 2,
              "--scorer", "mlp"]
    for name, (procs, batch, accumulate) in {"one": [1, 300, 1], "two": [2, 150, 1], "three": [3, 100, 1],
                                             "accumulated": [1, 100, 3]}.items():
        _train(*common, "--procs", procs, "--batch-size", batch, "--accumulate", accumulate, "--log", tmp_path / name,
               "--checkpoint", tmp_path / f"{name}.pt")  # fmt: skip
    expected, parameters = _log(tmp_path / "one"), _parameters(tmp_path / "one.pt")
    for name in ("two", "three", "accumulated"):
        log = _log(tmp_path / name)
        found, wanted = ([entry["loss"] for entry in entries[:3]] for entries in (log, expected))
        assert found == pytest.approx(wanted, rel=1e-9)
        for a, b in zip(expected[:3], log):
            assert a["valid"] == pytest.approx(b["valid"], abs=1e-3)
        for key, value in _parameters(tmp_path / f"{name}.pt").items():
            torch.testing.assert_close(value, parameters[key], rtol=1e-9, atol=1e-9)


def test_link_task_goes_on_after_a_kill_as_if_nothing_had_been(tmp_path):
    path = _link_graph(tmp_path, nodes=500, edges=1000).path
    common = [*LINK, "--dataset", path, "--epochs", 40, "--batch-size", 100, "--scorer", "distmult", "--early-stop", 40]
    _train(*common, "--checkpoint", tmp_path / "straight.pt", "--log", tmp_path / "straight")
    words = [*common, "--checkpoint", tmp_path / "killed.pt", "--checkpoint-every", 3, "--resume", "auto"]
    for kills in range(3):
        process = _start_fork(tmp_path / f"out{kills}", *words, "--prefetch", kills)
        _wait_for(lambda: f"epoch  {8 * (kills + 1):>2}/40" in process.output.read_text(), process)  # noqa: B023
        process.kill()
        _end(process, -signal.SIGKILL)
    _train(*words, "--log", tmp_path / "killed")
    straight, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("straight", "killed"))
    assert all(torch.equal(straight["model"][name], value) for name, value in killed["model"].items())
    assert straight["best"]["score"] == killed["best"]["score"] and straight["best"]["epoch"] == killed["best"]["epoch"]
    assert _log(tmp_path / "straight")[-1]["scores"] == _log(tmp_path / "killed")[-1]["scores"]


@pytest.mark.parametrize("name", ["gcn", "gat", "mymodel.py:Net"])
def test_link_task_learns_writes_embeddings_and_scores(name, tmp_path):
    """On a graph of communities, whose edges can be told from their ends."""
    own = next(block for block in _readme_blocks("python") if block.startswith("# mymodel.py"))
    (tmp_path / "mymodel.py").write_text(own)
    model_of = tmp_path / name if ":" in name else name
    path = datasets.prepare("synthetic:nodes=1000,degree=10,features=16,classes=4,train=100", tmp_path, progress=False)
    common = ["--task", "link", "--gpus", 0, "--dataset", path, "--model", model_of, "--fanout", "10,10", "--hidden",
              16]
    _train(*common, "--lr", 0.01, "--epochs", 6, "--batch-size", 300, *([] if ":" in name else ["--dropout", 0]),
           "--metric", "roc_auc",
           "--early-stop", 6, "--scorer", "mlp", "--checkpoint", tmp_path / "l.pt", "--log", tmp_path / "log",
           "--predict", tmp_path / "h.npy")  # fmt: skip
    log = _log(tmp_path / "log")
    assert log[-2]["loss"] < log[0]["loss"] and log[-1]["scores"]["test"]["roc_auc"] > 0.6, log[-1]
    h, graph = np.load(tmp_path / "h.npy"), GraphStore.open(path)
    assert h.shape == (1000, 16) and h.dtype == np.float32
    again = ["--resume", tmp_path / "l.pt", "--gpus", 0, *(["--model", model_of] if ":" in name else [])]
    pairs = np.random.default_rng(0).integers(0, 1000, (50, 2))
    np.save(tmp_path / "pairs.npy", pairs)
    _train(*again, "--pairs", tmp_path / "pairs.npy", "--predict", tmp_path / "s.npy", "--log", tmp_path / "again")
    assert _log(tmp_path / "again")[-1]["scores"] == log[-1]["scores"]
    state = torch.load(tmp_path / "l.pt", weights_only=True)["best"]["model"]
    scorer = link.Scorer("mlp", 16)
    scorer.load_state_dict({key.removeprefix("scorer."): value for key, value in state.items()
                            if key.startswith("scorer.")})
    expected = link.score_pairs(scorer, torch.from_numpy(h), torch.from_numpy(pairs))
    assert torch.allclose(torch.from_numpy(np.load(tmp_path / "s.npy")), expected, atol=1e-5)
    _train(*again, "--edge-split", "none", "--predict", tmp_path / "all.npy")  # all edges carry messages
    assert not np.allclose(np.load(tmp_path / "all.npy"), h)
    if ":" not in name:
        net = checkpoint.load_model(tmp_path / "l.pt")
        assert np.allclose(inference(net, graph.indptr, graph.indices, graph.features), np.load(tmp_path / "all.npy"),
                           atol=1e-4)
    np.save(tmp_path / "pairs.npy", pairs + 990)
    assert re.search(r"--pairs .*: node ids lie in \[0, 1000\)",
                     _train(*again, "--pairs", tmp_path / "pairs.npy", "--predict", tmp_path / "s.npy", code=2))


def test_link_runs_give_mean_and_standard_deviation(tmp_path, capsys):
    path = _link_graph(tmp_path, nodes=200, edges=600).path
    common = ["--dataset", str(path), "--task", "link", "--fanout", "3", "--epochs", "1", "--gpus", "0", "--hidden",
              "8"]
    assert train.main([*common, "--runs", "3", "--log", str(tmp_path / "log")]) == 0
    figures = [entry["scores"]["test"]["roc_auc"] for entry in _log(tmp_path / "log") if "scores" in entry]
    assert len(set(figures)) == 3
    assert _log(tmp_path / "log")[-1]["mean"]["test roc_auc"] == pytest.approx(np.mean(figures))
    said = f"test roc_auc {100 * np.mean(figures):.2f} +- {100 * np.std(figures, ddof=1):.2f}%"
    assert said in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# what a checkpoint keeps, what it may be used for, and what it may not do


def _code(*words):
    """Run train.py in this process -> its exit code."""
    try:
        return train.main([*map(str, words)])
    except SystemExit as stop:
        return stop.code


COMMON = ["--fanout", "3,3", "--hidden", 16, "--batch-size", 100, "--gpus", 0]


def test_resume_keeps_the_flags_of_the_run_unless_they_are_given_again(tiny, tmp_path):
    kept = {"lr": 0.02, "lr-schedule": "cosine", "weight-decay": 1e-4, "early-stop": 30, "precision": "bf16",
            "epochs": 6}  # fmt: skip
    words = ["--dataset", tiny, *COMMON, *itertools.chain(*((f"--{name}", value) for name, value in kept.items()))]
    _, straight = _run_here(tmp_path, *words)
    _run_here(tmp_path, *words, "--epochs", 4, "--lr-schedule", "constant", "--lr", 0.01)
    shutil.copy(tmp_path / "here.pt", tmp_path / "four.pt")
    saved = train.parse_args(["--resume", str(tmp_path / "four.pt")])
    assert {**kept, "epochs": 4, "lr-schedule": "constant", "lr": 0.01} == {
        name: getattr(saved, name.replace("-", "_")) for name in kept}  # fmt: skip
    assert (saved.batch_size, saved.fanout, saved.hidden, saved.seed) == (100, [3, 3], 16, 0)
    # given again they count, from the next epoch on; the cosine falls over all epochs, those that are done as well
    more = ["--epochs", 8, "--lr", 0.05, "--lr-schedule", "cosine"]
    log, _ = _run_here(tmp_path, "--resume", tmp_path / "four.pt", *more)
    rates = [0.05 * (1 + math.cos(math.pi * i / 8)) / 2 for i in range(4, 8)]
    assert [entry["lr"] for entry in log[:-1]] == pytest.approx(rates)
    # a run in bf16 with a cosine goes on in bf16 with the cosine, to the last bit, without saying so again
    process = _start_fork(tmp_path / "out", *words, "--checkpoint", tmp_path / "half.pt", "--checkpoint-every", 4)
    _wait_for((tmp_path / "half.pt").is_file, process)
    process.kill()
    _end(process, 0, -signal.SIGKILL)
    _, resumed = _run_here(tmp_path, "--resume", tmp_path / "half.pt")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_resume_keeps_dependent_labor(tiny, tmp_path, capsys):
    """The flags are the checkpoint's; the run goes on in the middle of K steps that draw alike as if it had not
    stopped."""
    words = ["--dataset", tiny, *COMMON, "--sampler", "labor", "--layer-dependency", "--batch-dependency", 3,
             "--epochs", 4]
    _, straight = _run_here(tmp_path, *words)
    _run_here(tmp_path, *words[:-1], 2)
    shutil.copy(tmp_path / "here.pt", tmp_path / "two.pt")
    saved = train.parse_args(["--resume", str(tmp_path / "two.pt")])
    assert (saved.sampler, saved.layer_dependency, saved.batch_dependency) == ("labor", True, 3)
    _, resumed = _run_here(tmp_path, "--resume", tmp_path / "two.pt", "--epochs", 4)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    _, other = _run_here(tmp_path, *words[:-2], "--epochs", 4, "--batch-dependency", 1)
    assert any(not torch.equal(straight[name], other[name]) for name in straight)
    assert train.main(["--resume", str(tmp_path / "two.pt"), "--epochs", "4", "--batch-dependency", "2"]) == 2
    assert "was made with --batch-dependency 3, this run has 2" in capsys.readouterr().err


def test_a_run_in_tf32_goes_on_in_fp32_on_cpu(tiny, tmp_path):
    file = tmp_path / "run.pt"
    _train("--dataset", tiny, *COMMON, "--epochs", 1, "--gpus", 0, "--checkpoint", file)
    state = torch.load(file, weights_only=True)
    state["flags"]["precision"] = "tf32"  # as on a GPU
    torch.save(state, file)
    out = _train("--resume", file, "--epochs", 2, "--gpus", 0, "--checkpoint", file)
    assert "fp32, for tf32 needs a GPU" in out and "epoch   2/2" in out
    assert checkpoint.read_checkpoint(file)["flags"]["precision"] == "tf32"  # for a GPU that takes it up again
    assert "needs a CUDA GPU" in _train("--resume", file, "--epochs", 3, "--gpus", 0, "--precision", "tf32", code=2)


@pytest.mark.parametrize("before", [(), ("--epochs", "2")])
def test_the_hint_after_ctrl_c_is_the_command_that_goes_on(before, tiny, tmp_path):
    words = ["--dataset", tiny, *COMMON, "--lr", 0.01, "--lr-schedule", "cosine", "--epochs", 12, "--root", tmp_path]
    straight = ["--checkpoint", "straight.pt", "--predict", "straight.npy"]
    again = ["--checkpoint", "c.pt", "--predict", "c.npy", "--log", "log", "--prefetch", 0]
    if before:  # it began from another checkpoint
        _train(*words, *before, "--checkpoint", "first.pt", cwd=tmp_path)
        straight, again = (["--resume", "first.pt", *more] for more in (straight, again))
    _train(*words, *straight, cwd=tmp_path)
    process = _start_fork(tmp_path / "out", *words, *again, cwd=tmp_path)
    _wait_for(lambda: "epoch   4" in (tmp_path / "out").read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    printed = _end(process, 128 + signal.SIGINT)
    hint = shlex.split(re.search(r"go on with: (.*)", printed)[1])
    assert hint[:2] == ["python", "train.py"] and not (tmp_path / "c.npy").exists()
    _train(*hint[2:], cwd=tmp_path)
    epochs = [entry["epoch"] for entry in _log(tmp_path / "log") if "epoch" in entry]
    assert epochs == list(range(3 if before else 1, 13))
    a, b = (_parameters(tmp_path / f"{name}.pt") for name in ("straight", "c"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert np.array_equal(np.load(tmp_path / "straight.npy"), np.load(tmp_path / "c.npy"))


def test_resume_auto_with_predict_trains_what_is_left(tiny, tmp_path):
    words = ["--dataset", tiny, *COMMON, "--lr", 0.01, "--epochs", 8, "--checkpoint", "c.pt", "--checkpoint-every", 1,
             "--resume", "auto", "--predict", "p.npy", "--log", "log"]  # fmt: skip
    process = _start_fork(tmp_path / "out", *words, cwd=tmp_path)
    _wait_for(lambda: "epoch   2" in (tmp_path / "out").read_text(), process)
    process.kill()
    _end(process, -signal.SIGKILL)
    assert not (tmp_path / "p.npy").exists()
    _train(*words, cwd=tmp_path)
    log, graph = _log(tmp_path / "log"), GraphStore.open(tiny)
    assert [entry["epoch"] for entry in log if "epoch" in entry][-1] == 8
    right = torch.from_numpy(np.load(tmp_path / "p.npy")) == graph.labels
    assert right[graph.split["test"]].double().mean() > 0.7
    # without more epochs, and from a file without --checkpoint, nothing is trained
    for more in (words, ["--resume", "c.pt", "--predict", "q.npy"]):
        assert "nothing is trained" in _train(*more, cwd=tmp_path)
    assert "--profile t.json shows training" in _train(*more, "--profile", "t.json", code=2, cwd=tmp_path)
    assert (tmp_path / "p.npy").read_bytes() == (tmp_path / "q.npy").read_bytes()


def test_a_checkpoint_is_tied_to_its_graph_and_predicts_for_others(tmp_path, capsys):
    graph = _graph(num_nodes=300, width=6, classes=4)
    path = build_store(tmp_path / "g", **graph)
    _run_here(tmp_path, "--dataset", path, *COMMON, "--epochs", 1)
    resume = ["--resume", tmp_path / "here.pt"]
    other = _graph(num_nodes=180, width=6, classes=4, seed=1)
    other["labels"] = np.minimum(other["labels"], 2)  # one class does not occur
    others = {
        "labels": {**graph, "labels": np.roll(graph["labels"], 1)},
        "features": {**graph, "features": graph["features"] + 1},
        "width": _graph(num_nodes=300, width=7, classes=4),
        "classes": _graph(num_nodes=300, width=6, classes=5),
        "smaller": {**other, "num_classes": 3},
    }
    said = {"labels": "labels.npy in .* is not the same", "features": "features.npy in .* is not the same",
            "width": "was trained on a graph with feature_dim 6, .* has 7", "classes": "with num_classes 4, .* has 5",
            "smaller": "with num_classes 4, .* has 3"}  # fmt: skip
    for name, arrays in others.items():
        build_store(tmp_path / name, **arrays)
        assert _code(*resume, "--dataset", tmp_path / name, "--epochs", 2) == 2
        assert re.search(said[name], capsys.readouterr().err), name
        code = _code(*resume, "--dataset", tmp_path / name, "--predict", tmp_path / f"{name}.npy")
        assert code == (2 if name in ("width", "classes") else 0), name
    assert np.load(tmp_path / "smaller.npy").shape == (180,)
    shutil.rmtree(path)
    build_store(path, **others["labels"])  # under the same name
    assert _code(*resume, "--epochs", 2) == 2
    assert "labels.npy" in capsys.readouterr().err


def test_a_rank_without_a_file_takes_state_and_flags_from_the_others(tiny, tmp_path):
    _run_here(tmp_path, "--dataset", tiny, *COMMON, "--epochs", 1, "--precision", "bf16", "--lr", 0.02)
    data = (tmp_path / "here.pt").read_bytes()
    others = types.SimpleNamespace(world=2, rank=1, gather=lambda number: [1 << 28, number],
                                   broadcast=lambda mine, source: data)  # fmt: skip
    words = ["--dataset", tiny, "--checkpoint", tmp_path / "none.pt", "--resume", "auto", "--lr", 0.04]
    args = train.parse_args([*map(str, words)])
    state, path = checkpoint.common_state(others, args)
    assert state["epoch"] == 1 and path == str(tmp_path / "none.pt")
    assert (args.precision, args.lr, args.hidden, args.batch_size, args.dataset) == ("bf16", 0.04, 16, 100, tiny)


def test_features_that_lmdb_has_changed_are_not_compared(tmp_path, capsys):
    graph = _graph(num_nodes=300, width=6, classes=4)
    path = build_store(tmp_path / "g", backend="lmdb", **graph)
    _run_here(tmp_path, "--dataset", path, *COMMON, "--epochs", 1)
    GraphStore.open(path).features.put_rows(torch.tensor([3]), torch.zeros(1, 6))  # as trainers may see it happen
    assert _code("--resume", tmp_path / "here.pt", "--epochs", 2) == 0
    build_store(tmp_path / "h", backend="lmdb", **{**graph, "features": graph["features"] + 1})
    assert _code("--resume", tmp_path / "here.pt", "--epochs", 2, "--dataset", tmp_path / "h") == 2
    assert "features.lmdb" in capsys.readouterr().err


def test_what_is_read_from_a_checkpoint_names_no_file_to_write(tiny, tmp_path, capsys):
    _run_here(tmp_path, "--dataset", tiny, *COMMON, "--epochs", 1)
    state, victim = torch.load(tmp_path / "here.pt", weights_only=True), tmp_path / "victim"
    victim.write_text("mine")
    flags_key = "flags" if "flags" in state else "run"
    for flag in ("checkpoint", "log", "predict", "root", "tensorboard"):
        forged = {**state, flags_key: {**state[flags_key], flag: str(victim)}}
        torch.save(forged, tmp_path / "forged.pt")
        assert _code("--resume", tmp_path / "forged.pt", "--dataset", tiny, "--epochs", 2) == 2
        assert "is not a checkpoint of train.py" in capsys.readouterr().err
    assert victim.read_text() == "mine"
    (tmp_path / "damaged.pt").write_bytes(b"nothing")  # looked at before the default graph is built
    assert _code("--resume", tmp_path / "damaged.pt", "--root", tmp_path / "root") == 2
    assert not (tmp_path / "root").exists()


def _forged(random, state, good):
    """Bytes of a checkpoint that somebody has tampered with: a value anywhere in it, its pickle, its archive."""
    weird = [None, True, -1, 0, 7, 2**40, 2**70, -(2**63), 0.5, 1e308, math.nan, math.inf, "", "x", "../x", "\n\x1b[2J",
             "9" * 5000, b"\0", [], [0], [-1], [5, 5], [10] * 1000, {}, {"a": 1}, (), torch.zeros(()), torch.zeros(3),
             torch.zeros(1).expand(1 << 40), torch.ones(4, 4, dtype=torch.int64),
             functools.reduce(lambda inner, _: [inner, inner], range(60), [])]  # fmt: skip
    how = random.integers(10)
    if how < 7:  # a value, a key that is missing, a key too many
        forged = copy.deepcopy(state)
        for _ in range(1 if how < 5 else 3):
            place = forged
            while True:
                key = list(place)[random.integers(len(place))]
                if not isinstance(place[key], dict) or not place[key] or random.random() < 0.15:
                    break
                place = place[key]
            action = random.integers(6)
            if action == 0 and len(place) > 1:
                del place[key]
            elif action == 1:
                place[["x", 3, "root", "checkpoint"][random.integers(4)]] = weird[random.integers(len(weird))]
            else:
                place[key] = weird[random.integers(len(weird))]
        file = io.BytesIO()
        torch.save(forged, file)
        return file.getvalue()
    with zipfile.ZipFile(io.BytesIO(good)) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    if how == 7:  # other bytes in the pickle, under a checksum that fits
        damaged = bytearray(entries[name])
        for _ in range(random.integers(1, 4)):
            damaged[random.integers(len(damaged))] = random.integers(256)
        entries[name] = bytes(damaged)
    elif how == 8:  # a pickle that does something
        entries[name] = [b"cos\nsystem\n(X\x08\x00\x00\x00touch /xtR.",
                         b"cbuiltins\nbytearray\n(\x8a\x06\x00\x00\x00\x00\x00\x02tR.",
                         b"ctorch\nFloatTensor\n(\x8a\x06\x00\x00\x00\x00\x00\x02tR."][random.integers(3)]  # fmt: skip
    else:  # bytes missing, changed or compressed
        if random.random() < 0.5:
            damaged = bytearray(good[: random.integers(len(good))] if random.random() < 0.5 else good)
            for _ in range(5):
                damaged[random.integers(max(len(damaged), 1)) - 1 :][:1] = b"\xff"
            return bytes(damaged)
        entries[name] = pickle.dumps(state["flags"], 2) if random.random() < 0.5 else entries[name]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if how == 9 else zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


def test_forged_checkpoints_end_in_a_sentence(tmp_path, capsys):
    """180 of them, mutated from good ones of all tasks with a fixed seed: trained on, or refused in one sentence."""
    path = build_store(tmp_path / "g", **_graph(num_nodes=200, width=6, classes=4))
    many = build_graphs(tmp_path / "many", [_graphs(40)], split={"train": range(30), "valid": range(30, 40)})
    good = []
    for words in (["--dataset", path, "--norm", "batch", "--early-stop", 5, *COMMON],
                  ["--task", "graph", "--dataset", many, "--num-layers", 2, *COMMON[2:]],
                  ["--task", "link", "--dataset", path, "--scorer", "mlp", "--early-stop", 5, "--negatives", 2,
                   *COMMON]):  # fmt: skip
        _run_here(tmp_path, *words, "--epochs", 1)
        good.append((tmp_path / "here.pt").read_bytes())
    states = [torch.load(io.BytesIO(data), weights_only=True) for data in good]
    random, forged, codes, began = np.random.default_rng(0), tmp_path / "forged.pt", [], time.monotonic()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(180):
        which = [1, 2, 0, 0, 2, 0][i % 6]
        forged.write_bytes(_forged(random, states[which], good[which]))
        capsys.readouterr()
        codes.append(_code("--resume", forged, "--epochs", 2, "--checkpoint", tmp_path / "new.pt", "--gpus", 0))
        errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("usage:")]
        if codes[-1]:
            assert codes[-1] == 2 and len(errors) == 1 and errors[0].isprintable() and len(errors[0]) < 600, (i, errors)
        else:
            checkpoint.load_model(forged)
    print(f"{codes.count(0)} of 180 were trained on, {time.monotonic() - began:.1f} s")
    assert 3 < codes.count(0) < 60 and time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 19  # KiB: no size in a file is believed
    assert {p.name for p in tmp_path.iterdir()} <= {"g", "many", "here.pt", "log", "forged.pt", "new.pt"}


def test_predictions_are_classes_logits_or_embeddings(tiny, tmp_path):
    words = ["--dataset", tiny, "--model", "gat", "--residual", "--norm", "layer", *COMMON, "--epochs", 2]
    _run_here(tmp_path, *words, "--predict", tmp_path / "trained.npy", "--predict-what", "logits")
    arrays = {}
    for what in ("classes", "logits", "embeddings"):
        file = tmp_path / f"{what}.npy"
        assert _code("--resume", tmp_path / "here.pt", "--predict", file, "--predict-what", what) == 0
        arrays[what] = np.load(file)
    kinds = [(np.int64, (3000,)), (np.float32, (3000, 4)), (np.float32, (3000, 16))]
    assert [(array.dtype, array.shape) for array in arrays.values()] == kinds
    assert (arrays["logits"].argmax(1) == arrays["classes"]).all() and (arrays["embeddings"] >= 0).all()
    np.testing.assert_array_equal(arrays["logits"], np.load(tmp_path / "trained.npy"))
    graph, net = GraphStore.open(tiny), checkpoint.load_model(tmp_path / "here.pt")
    assert not net.training
    logits = inference(net, graph.indptr, graph.indices, graph.features)
    np.testing.assert_allclose(logits.numpy(), arrays["logits"], rtol=1e-4, atol=1e-5)
    block = Block(graph.indptr, graph.indices, torch.arange(3000), None)
    with torch.no_grad():  # the last layer over the embeddings gives the logits
        last = net.step(1, block, torch.from_numpy(arrays["embeddings"]))
    np.testing.assert_allclose(last.numpy(), arrays["logits"], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# files are written where they were asked for, and nowhere else


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "run.pt"
    disk.write_whole(file, lambda out: out.write(b"one"))
    file.chmod(0o600)
    for name in (f".run.pt.{'0' * 16}.part", ".run.pt.notes", f".run.pt2.{'0' * 16}.part"):
        (tmp_path / name).touch()  # the first is what a writer that was killed has left
    with pytest.raises(StoreError, match="run.pt could not be written: no more"):
        disk.write_whole(file, lambda out: (out.write(b"half"), (_ for _ in ()).throw(RuntimeError("no more"))))
    assert file.read_bytes() == b"one"
    disk.write_whole(file, lambda out: out.write(b"two"))
    assert file.read_bytes() == b"two" and file.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.pt.notes", f".run.pt2.{'0' * 16}.part", "run.pt"]

    def meanwhile(out):  # another writer of the same file leaves this one's part alone
        disk.write_whole(file, lambda inner: inner.write(b"inner"))
        out.write(b"outer")

    disk.write_whole(file, meanwhile)
    assert file.read_bytes() == b"outer" and len(list(tmp_path.iterdir())) == 3


def _writes_for_ever(file):
    while True:
        disk.write_whole(file, lambda out: out.write(bytes(1 << 22)))


def test_a_killed_writer_leaves_the_old_file_and_its_part_goes_at_the_next(tmp_path):
    file, left = tmp_path / "run.pt", 0
    for i in range(5):
        process = _fork(tmp_path / "out", _writes_for_ever, str(file))
        _wait_for(file.is_file, process)
        time.sleep(0.003 * i)
        process.kill()
        process.join()
        assert file.stat().st_size == 1 << 22
        left += len(list(tmp_path.glob(".run.pt.*")))
        disk.write_whole(file, lambda out: out.write(b"next"))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run.pt"]
        file.unlink()
    print(f"{left} of 5 left a part")


def test_devices_pipes_and_links_stay_what_they_are(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    disk.write_whole(pipe, lambda out: np.save(out, np.arange(3)))
    reader.join(20)
    assert np.load(io.BytesIO(got[0])).tolist() == [0, 1, 2] and pipe.is_fifo()
    (tmp_path / "link").symlink_to("target")
    disk.write_whole(tmp_path / "link", lambda out: out.write(b"through"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"through"
    if os.geteuid():
        return
    os.chown(tmp_path / "link", 12345, -1, follow_symlinks=False)  # planted by somebody else
    with pytest.raises(StoreError, match="a symbolic link of another user"):
        disk.write_whole(tmp_path / "link", lambda out: out.write(b"theirs"))
    assert (tmp_path / "target").read_bytes() == b"through"
    null = tmp_path / "null"
    with suppress(PermissionError):
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        disk.write_whole(null, lambda out: out.write(b"away"))
        assert null.is_char_device()
        assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_on_a_device_does_not_replace_it(tiny, tmp_path):
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.write_bytes(b"x")
    except PermissionError:
        pytest.skip("making a device takes root")
    _train("--dataset", tiny, *COMMON, "--epochs", 1, "--checkpoint", null)
    assert null.is_char_device()


# ---------------------------------------------------------------------------------------------------------------------
# what a run tells


def test_each_run_in_a_log_says_what_it_was(tiny, tmp_path):
    log = tmp_path / "log"
    for seed in (3, 4):
        assert _code("--dataset", tiny, *COMMON, "--epochs", 2, "--seed", seed, "--log", log) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = [("flags" in line, line.get("epoch")) for line in lines]
    assert kinds == [(True, None), (False, 1), (False, 2), (False, None)] * 2
    first, second = ({line["run"] for line in part} for part in (lines[:4], lines[4:]))
    assert len(first) == len(second) == 1 and first != second
    head = lines[4]
    assert (head["flags"]["seed"], head["flags"]["fanout"], head["flags"]["lr"]) == (4, [3, 3], 0.003)
    assert head["versions"]["torch"] == torch.__version__ and head["hardware"]["processes"] == 1


def test_a_log_that_cannot_be_written_is_said_once(tiny, tmp_path):
    output = _train("--dataset", tiny, *COMMON, "--epochs", 3, "--log", "/dev/full", "--checkpoint", tmp_path / "c.pt")
    assert output.count("/dev/full") == 1 and "No space left on device; training goes on" in output
    assert "Traceback" not in output
    assert torch.load(tmp_path / "c.pt", weights_only=True)["epoch"] == 3


def _with_small_files(*words):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # stands for a full disk
    return train.main([*map(str, words)])


def test_a_trace_that_cannot_be_written_is_no_success(tiny, tmp_path):
    words = ["--dataset", tiny, *COMMON, "--epochs", 3, "--profile", tmp_path / "t.json", "--checkpoint",
             tmp_path / "c.pt"]
    output = _end(_fork(tmp_path / "out", _with_small_files, *words), 2)
    assert output.count("--profile") == 1 and "training goes on" in output and "exact layer-wise accuracy" in output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.pt", "out"]


def test_a_trace_names_the_stages_on_every_thread(tiny, tmp_path):
    _run_here(tmp_path, "--dataset", tiny, *COMMON, "--epochs", 2, "--profile", tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.rank0.json").read_text())["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if event.get("cat") == "user_annotation"}
    assert {"sample", "fetch", "forward", "backward", "optimizer"} <= set(threads)
    assert threads["sample"] == threads["fetch"] != threads["forward"] == threads["optimizer"]


def test_the_line_of_an_epoch_fits_the_screen():
    args, seconds = types.SimpleNamespace(epochs=100), dict.fromkeys((*report.STAGES, "exchange"), 12345.67)
    figures = {"epoch": 99, "loss": 1234.56789, "seconds": 12345.678, "seeds_per_s": 1.2e7, "peak_bytes": 1e12}
    regression = {"valid": {"rmse": 1234.5, "mae": 1234.5, "rmse_of_the_mean": 1234.5}}
    for more in ({"valid_sampled": 0.99999}, {"valid_sampled": None}, regression, {"valid": None}):
        for first in (0, 123_456):
            line = report.epoch_line(args, {**figures, **more, **seconds, "first_step": first})
            assert len(line) <= 120 and "\n" not in line, line
    usual = {"first_step": 0, "valid_sampled": 0.9, "loss": 0.5, "seconds": 12.5, "seeds_per_s": 17_000,
             "peak_bytes": 1e9}
    line = report.epoch_line(args, {**figures, **dict.fromkeys(seconds, 0.5), **usual})
    assert all(stage in line for stage in ("stall", "sample", "fetch")) and "90.00% (sampled)" in line


def test_two_runs_are_drawn_on_one_axis(tmp_path):
    pytest.importorskip("matplotlib")
    laps = [(stage, i + 0.1 * j, i + 0.1 * j + 0.05, "t") for i in range(10) for j, stage in enumerate(report.STAGES)]
    report.draw_timeline({"one": laps, "none": [], "two": laps[:21]}, tmp_path / "two.png")
    report.draw_timeline({"one": laps}, tmp_path / "one.png")
    one, two = ((tmp_path / f"{name}.png").read_bytes() for name in ("one", "two"))
    height = lambda png: int.from_bytes(png[20:24], "big")  # noqa: E731
    assert one.startswith(b"\x89PNG") and height(two) > 1.8 * height(one)


# ---------------------------------------------------------------------------------------------------------------------
# accuracy, and how processes end


# data set: accuracy in ../shared/data/README.md, of which model; epochs, batch size
PUBLISHED = {"coauthor_cs": (91.3, "sage", 12, 100), "cora": (81.5, "gcn", 20, 35), "citeseer": (70.3, "gcn", 20, 40)}


def _trains_three_times(folder, name):
    _, conv, epochs, batch = PUBLISHED[name]
    words = ["--dataset", DATA / f"{name}.npz", "--root", folder, "--fanout", "10,10", "--hidden", 64, "--lr", 0.01]
    words += ["--model", conv, "--weight-decay", 5e-4, "--epochs", epochs, "--batch-size", batch, "--runs", 3, "--log",
              folder / "log"]
    return _start_fork(folder / "out", *words)


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
@pytest.mark.parametrize("name", PUBLISHED)
@_beside(_trains_three_times)
def test_published_accuracy_on_real_graphs(name, beside):
    process, folder = beside
    _end(process)
    accuracy = [100 * entry["exact"]["test"] for entry in _log(folder / "log") if "exact" in entry]
    published = PUBLISHED[name][0]
    print(f"{name}: {np.mean(accuracy):.2f} +- {np.std(accuracy):.2f} %, published {published}")
    assert len(accuracy) == 3 and np.mean(accuracy) > published - 2, accuracy


def test_the_synthetic_graph_needs_its_edges(tmp_path):
    """An MLP stays under 60 % where GraphSAGE passes 80 %; the MLP is SAGE that sees no neighbours' edges."""
    graph = GraphStore.open(prepare("synthetic", tmp_path, progress=False))
    x, y = graph.features.tensor, graph.labels
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 128), torch.nn.ReLU(),
                              torch.nn.Linear(128, graph.num_classes))
    optimizer = torch.optim.Adam(mlp.parameters(), 0.003, weight_decay=1e-3)
    nodes = graph.split["train"]
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(mlp(x[nodes]), y[nodes]).backward()
        optimizer.step()
    nodes = graph.split["test"]
    alone = 100 * (mlp(x[nodes]).argmax(1) == y[nodes]).double().mean().item()
    log, _ = _run_here(tmp_path, "--epochs", 8, "--fanout", "10,10", "--hidden", 64, "--lr", 0.01)
    together = 100 * log[-1]["exact"]["test"]
    print(f"MLP {alone:.1f} %, GraphSAGE {together:.1f} %")
    assert 20 < alone < 60 and together > 80


def _fails(ranks, how):
    ranks.sum(1)
    if ranks.rank == 1:
        print("dies at", time.time(), flush=True)
        if how == "raise":
            raise ValueError("rank one gives up")
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.sum(1)
    time.sleep(60)


@pytest.mark.parametrize("how, words",
                         [("raise", "ValueError: rank one gives up"), ("kill", "rank 1 was ended by SIGKILL")])
def test_a_rank_that_dies_takes_the_job_down_with_its_reason(tmp_path, how, words):
    output = _end(_fork(tmp_path / "out", ddp.launch, _fails, 3, how), 1, 128 + signal.SIGKILL)
    took = time.time() - float(re.search(r"dies at ([\d.]+)", output)[1])
    assert words in output, output
    print(f"down after {took:.1f} s")
    assert took < 30  # the other ranks would sleep for 60


def _prepares(ranks):
    with ranks.patience():
        if not ranks.rank:
            time.sleep(9)
    assert ranks.sum(1) == [2]


def _launch_with_a_timeout_of_6_seconds():
    ddp.TIMEOUT = datetime.timedelta(seconds=6)
    ddp.launch(_prepares, 2)


@_beside(lambda folder: _fork(folder / "out", _launch_with_a_timeout_of_6_seconds))
def test_ranks_wait_for_one_that_prepares_data_beyond_the_timeout(beside):
    _end(beside[0])


_LEAVING = """
import sys
sys.path.insert(0, {here!r})
import torch, ddp
def worker(ranks):
    sys.setswitchinterval(10)  # gloo's threads do not get the interpreter before it is taken down
    model = ranks.wrap(torch.nn.Linear(8, 8))
    with ddp.StopSignal(ranks) as stop:
        for _ in range(20):
            model(torch.ones(4, 8)).sum().backward()
            stop.agreed()
    ranks.barrier()
if __name__ == "__main__":
    for _ in range(3):  # one in two aborted
        ddp.launch(worker, 2)
"""


def _leaves(folder):
    (folder / "leaving.py").write_text(_LEAVING.format(here=str(HERE)))
    command = [sys.executable, "leaving.py"]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@_beside(_leaves)
def test_ranks_leave_while_gloo_still_holds_tensors(beside):
    printed = _ended(beside[0])
    assert "Fatal" not in printed and "terminate called" not in printed, printed


def test_a_killed_parent_leaves_no_orphans(tiny):
    process = _start("--dataset", tiny, "--gpus", 0, "--procs", 2, "--epochs", 10000, "--fanout", "3,3")
    for line in iter(process.stdout.readline, ""):
        if line.startswith("epoch   1"):
            break
    family = _running_below(process.pid)
    assert len(family) >= 3
    # this machine alone
    assert _listening(family) <= {"0100007F", "0" * 24 + "0100007F", "0000000000000000FFFF00000100007F"}
    process.kill()
    process.wait()
    process.stdout.close()
    assert _gone(family)


def _listening(pids):
    """Addresses, as the kernel writes them, on which processes accept connections."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_a_parent_killed_while_its_ranks_start_leaves_none(tiny):
    process = _start("--dataset", tiny, "--gpus", 0, "--procs", 2, "--epochs", 10000, "--fanout", "3,3")
    _wait_for(lambda: len(_running_below(process.pid)) >= 3, process)
    family = _running_below(process.pid)  # the ranks import torch now
    process.kill()
    process.wait()
    process.stdout.close()
    assert _gone(family, 20)


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--dataset", "nosuch"], "nosuch.*synthetic.*ogbn-products"),
        (["--dataset", "synthetic:nodez=5"], "nodez"),
        (["--gpus", "64"], "--gpus 64: this machine has"),
        (["--mode", "cuda-cuda", "--gpus", "0"], "--mode cuda-cuda needs a CUDA GPU"),
        (["--fanout", "15,x"], "--fanout.*15,x.*15,10,5"),
        (["--fanout", "15,0"], "--fanout.*15,0"),
        (["--fanout", "5,5", "--num-layers", "3"], "--fanout 5,5 has 2 hops, --num-layers is 3"),
        (["--batch-size", "0"], "--batch-size.*'0'"),
        (["--lr", "nan"], "--lr.*'nan'"),
        (["--precision", "tf32", "--gpus", "0"], "--precision tf32 needs a CUDA GPU"),
        (["--cuda-graph", "on", "--gpus", "0"], "--cuda-graph on needs a CUDA GPU"),
        (["--timeline", "steps.gif"], "--timeline steps.gif: .* ends in .png"),
        (["--gpu-cache", "lots"], "'lots' is no size; write it as 4GiB"),
        (["--dropout", "1"], "--dropout 1"),
        (["--model", "gat", "--hidden", "10"], "--hidden 10 cannot be shared by --heads 4"),
        (["--norm", "batch", "--checkpoint-activations"], "use --norm layer"),
        (["--runs", "3", "--checkpoint", "c.pt"], "--checkpoint c.pt is for one run, --runs is 3"),
        (["--predict", "classes.csv"], "--predict classes.csv: .* ends in .npy"),
        (["--predict", "nowhere/c.npy"], "--predict nowhere/c.npy: the folder .* does not exist"),
        (["--resume", "nowhere.pt"], "--resume nowhere.pt: no such file"),
        (["--resume", "auto"], "--resume auto goes on from the file of --checkpoint"),
        (["--checkpoint-every", "3"], "--checkpoint-every 3 needs --checkpoint FILE"),
        (["--resume", str(HERE / "LICENSE")], "LICENSE is not a checkpoint"),
        (["--predict-what", "logits"], "--predict-what logits needs --predict FILE"),
        (["--resume", str(HERE / "LICENSE"), "--runs", "2"], "LICENSE is not a checkpoint"),
        (["--predict", "e.npy", "--predict-what", "embeddings", "--fanout", "5"],
         "with --num-layers 1 the last layer is given the features"),
        (["--batch-size", "99999999999999999999"],
         "'99999999999999999999' is not a whole number above 0 and below 2.31"),
        (["--checkpoint", "nowhere/c.pt"], "--checkpoint nowhere/c.pt: the folder .* does not exist"),
        (["--log", "."], "--log .: a file cannot be written there"),
        (["--checkpoint", "."], "--checkpoint .: a file cannot be written there"),
        (["--seed", "9223372036854775808"], "--seed 9223372036854775808: .* 2.63 - 1"),
        (["--seed", "-1"], "--seed -1: give a whole number from 0"),
        (["--scorer", "mlp"], "--scorer mlp is for --task link, --task is node"),
        (["--task", "link", "--edge-split", "80/10/5"],
         "'80/10/5': write the percent of train/valid/test, as in 85/5/10"),
        (["--task", "link", "--edge-split", "90/0/10", "--early-stop", "3"],
         "goes by validation edges: --edge-split 90/0/10 has none"),
        (["--task", "link", "--metric", "f1"], "--metric f1: --task link has mrr, hits@1"),
        (["--task", "link", "--split", "1"], "--split 1 is for --task node"),
        (["--task", "link", "--pairs", "p.npy"], "--pairs p.npy needs --predict"),
        (["--task", "link", "--predict", "p.npy", "--predict-what", "logits"], "--task link writes embeddings"),
        (["--task", "graph", "--metric", "roc_auc"], "--metric roc_auc: --task graph has none"),
        *((["--task", "graph", *words.split()], f"{words} has no effect with --task graph: leave it out") for words in (
            "--fanout 3,3", "--model gin", "--norm layer", "--input-dropout 0.2", "--cache 1000", "--lookahead 3",
            "--mode cpu-cpu", "--backend lmdb")),
        (["--task", "graph", "--residual"], "--residual True has no effect with --task graph"),
        (["--task", "graph", "--heads", "3"], "--heads 3 is for --model gat, --model is sage"),
        (["--model", "gin", "--heads", "4"], "--heads 4 is for --model gat, --model is gin"),
        (["--backend", "lmdb"], "--backend lmdb has no effect on .*: it is a store already"),
        (["--gpu", "x"], "--gpu"),
        (["--bogus"], "--bogus"),
        (["--layer-dependency"], "--layer-dependency is for --sampler labor, --sampler is uniform"),
        (["--sampler", "weighted", "--batch-dependency", "2"],
         "--batch-dependency is for --sampler labor, --sampler is weighted"),
    ],
)
def test_bad_flags_get_one_sentence_and_code_2(words, complaint, tiny, tmp_path, monkeypatch, capsys):
    if "--dataset" not in words:
        words = ["--dataset", tiny, *words]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        sys.exit(train.main([*words, "--root", "root"]))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and re.search(complaint, captured.err), captured.err
    assert len(captured.err.strip().splitlines()[-1]) < 500
    assert not list(tmp_path.rglob("*.npy"))


def _regresses(folder):
    words = ["--task", "graph", "--dataset", DATA / "esol.npz", "--root", folder, "--gpus", 0, "--dropout", 0,
             "--hidden", 64]
    return _start_fork(folder / "out", *words, "--batch-size", 32, "--epochs", 25, "--log", folder / "log")


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
@_beside(_regresses)
def test_regressor_beats_the_mean_on_real_molecules(beside):
    """ESOL, random 80/10/10 split: predicting the mean has an RMSE of 2.19, literature 0.6-1.0."""
    process, folder = beside
    output, scores = _end(process), _log(folder / "log")[-1]["scores"]
    assert scores["test"]["rmse_of_the_mean"] > 2 and scores["test"]["rmse"] < 1.2, output
    assert "test   RMSE" in output and "edge-gated regressor, 3 layers, hidden 64" in output


def test_graph_task_with_two_processes_checkpoints_and_resumes(tmp_path):
    _molecules(tmp_path / "m.npz", count=200)
    common = ["--task", "graph", "--dataset", tmp_path / "m.npz", "--root", tmp_path, "--gpus", 0, "--hidden", 16]
    common += ["--num-layers", 2, "--dropout", 0]
    one, two, half = (tmp_path / f"{name}.pt" for name in ("one", "two", "half"))
    _train(*common, "--batch-size", 40, "--epochs", 4, "--checkpoint", one, "--log", tmp_path / "one")
    _train(*common, "--batch-size", 20, "--procs", 2, "--epochs", 4, "--checkpoint", two, "--log", tmp_path / "two")
    _train(*common, "--batch-size", 40, "--epochs", 2, "--checkpoint", half)
    _train(*common, "--batch-size", 40, "--epochs", 4, "--resume", half, "--checkpoint", half, "--prefetch", 0)
    one, two, half = (torch.load(path, weights_only=True)["model"] for path in (one, two, half))
    for name in one:
        assert torch.equal(one[name], half[name]), name
        torch.testing.assert_close(one[name], two[name], rtol=1e-2, atol=1e-3)
    a, b = (_log(tmp_path / name) for name in ("one", "two"))
    assert a[-1]["scores"]["test"]["rmse"] == pytest.approx(b[-1]["scores"]["test"]["rmse"], rel=1e-2)
    assert a[3]["loss"] < a[0]["loss"] and a[0]["valid"]["mae"] > 0
    refused = _train("--dataset", tmp_path / "m.npz", "--root", tmp_path, code=2)
    assert "holds many small graphs" in refused and "--task graph" in refused


def test_graph_task_needs_graphs_to_train_on(tmp_path):
    path = build_graphs(tmp_path / "many", [_graphs(10)])
    output = _train("--task", "graph", "--dataset", path, "--root", tmp_path, "--gpus", 0, code=2)
    assert f"{path} has no training graphs" in output and "Traceback" not in output


def test_graph_task_scores_binary_targets_by_roc_auc(tmp_path):
    made = _molecules(tmp_path / "m.npz", count=300)
    np.savez(tmp_path / "b.npz", **{**made, "targets": (made["targets"] > 5).astype(np.uint8)})
    output = _train("--task", "graph", "--dataset", tmp_path / "b.npz", "--root", tmp_path, "--hidden", 16, "--epochs",
                    2,
                    "--num-layers", 2, "--batch-size", 32, "--log", tmp_path / "log", "--gpus", 0)  # fmt: skip
    assert 0 <= _log(tmp_path / "log")[-1]["scores"]["test"]["roc_auc"] <= 1 and "roc auc" in output


ENOUGH = {"sage": 10, "gcn": 8, "gin": 12, "sage-pool": 15, "gat": 9}  # epochs; by default there are 25


def _learns_by_default(folder, name):
    return _start_fork(folder / "out", "--model", name, "--root", folder, "--gpus", 0, "--epochs", ENOUGH[name],
                       "--log", folder / "log")


@pytest.mark.parametrize("name", ENOUGH)
@_beside(_learns_by_default)
def test_every_model_learns_the_built_in_graph_with_its_defaults(name, beside):
    """In fewer epochs than the default takes, to spare time: the learning rate is constant, so more of them only
    help."""
    process, folder = beside
    _end(process)
    exact = _log(folder / "log")[-1]["exact"]
    print(f"{name}: {exact}")
    assert exact["test"] > 0.85 and set(ENOUGH) == set(model.CONVS)


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")
@_beside(lambda folder: _start_fork(folder / "out", "--dataset", DATA / "cora.npz", "--root", folder, "--gpus", 0,
                                    "--log", folder / "log"))
def test_a_small_graph_comes_out_right_with_nothing_but_its_name(beside):
    """140 training nodes are one step an epoch: enough epochs, and the weight decay of Planetoid's papers."""
    process, folder = beside
    output, log = _end(process), _log(folder / "log")
    assert "1 steps an epoch, 200 epochs; lr 0.003, weight decay 0.0005" in output
    assert log[-1]["exact"]["test"] >= 0.78, log[-1]


def test_defaults_depend_on_the_training_nodes_and_not_on_the_processes(tiny):
    for words, world, expected in (([], 1, (200, 1)), (["--batch-size", "100"], 1, (34, 6)),
                                   (["--batch-size", "50"], 2, (34, 6)),
                                   (["--batch-size", "10"], 1, (10, 60)), (["--epochs", "3"], 1, (3, 1))):  # fmt: skip
        args = train.parse_args(["--dataset", tiny, "--gpus", "0", *words])
        assemble.settle(ddp.Ranks(world=world), args, 600)
        assert (args.epochs, args.steps) == expected and args.weight_decay == pytest.approx(0.07 / 600)
    norms = {name: train.parse_args(["--dataset", tiny, "--model", name]).norm for name in model.CONVS}
    assert norms == {"sage": "none", "gcn": "none", "sage-pool": "layer", "gat": "layer", "gin": "layer"}


def _readme_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", (HERE / "README.md").read_text(), re.MULTILINE | re.DOTALL)


OWN_MODELS = {block.split()[1]: block for block in _readme_blocks("python") if block.startswith("# my")}
OWN_LAYERS = OWN_MODELS["mymodel.py"]
OWN = ["--fanout", "5,5", "--lr", 0.01, "--batch-size", 100, "--gpus", 0]


@pytest.mark.parametrize("library", ["mymodel.py", "mydgl.py", "mypyg.py"])
def test_own_model_trains_resumes_and_predicts(library, tiny, tmp_path):
    if library == "mydgl.py":
        _dgl()
    if library == "mypyg.py":
        pytest.importorskip("torch_geometric")
    file = tmp_path / "mynet.py"
    file.write_text(OWN_MODELS[library])
    own, log = ["--dataset", tiny, "--model", f"{file}:Net", "--model-args", "hidden=32", *OWN], tmp_path / "log"
    output = _train(*own, "--epochs", 4, "--checkpoint", tmp_path / "full.pt", "--log", log)
    assert _log(log)[-1]["exact"]["test"] > 0.5 and f"model   {file}:Net, 2 hops" in output
    assert "\nexact accuracy  train " in output and "layer-wise" not in output
    output = _train(*own, "--epochs", 2, "--checkpoint", tmp_path / "half.pt")
    assert "half.pt holds an earlier run" not in output
    said = _train(*own, "--epochs", 2, "--checkpoint", tmp_path / "half.pt")
    assert "half.pt holds an earlier run and will be replaced" in said
    words = ["--resume", tmp_path / "half.pt", "--model", f"{file}:Net"]  # arguments are the checkpoint's
    output = _train(*words, "--epochs", 4, "--checkpoint", tmp_path / "half.pt", "--gpus", 0)
    assert "not the text" not in output
    full, half = (_parameters(tmp_path / f"{name}.pt") for name in ("full", "half"))
    assert all(torch.equal(full[name], half[name]) for name in full)
    predict = ["--resume", tmp_path / "full.pt", "--model", f"{file}:Net", "--gpus", 0]
    _train(*predict, "--predict", tmp_path / "one.npy")
    if library == "mymodel.py":
        _train(*own, "--epochs", 4, "--batch-size", 50, "--procs", 2, "--log", tmp_path / "two", "--precision", "bf16")
        assert _log(tmp_path / "two")[-1]["exact"]["test"] > 0.5
        _train(*predict, "--procs", 2, "--predict", tmp_path / "two.npy")
        assert (np.load(tmp_path / "one.npy") == np.load(tmp_path / "two.npy")).mean() > 0.999
    graph = GraphStore.open(tiny)
    right = torch.from_numpy(np.load(tmp_path / "one.npy")) == graph.labels
    assert right[graph.split["test"]].double().mean().item() == pytest.approx(_log(log)[-1]["exact"]["test"])


def test_own_model_runs_only_a_file_that_was_named(tiny, tmp_path):
    """A checkpoint is input: what it says of a file never makes that file run. A changed file is said, one that does
    not fit refused."""
    file, ran = tmp_path / "net.py", tmp_path / "ran"
    file.write_text(OWN_LAYERS + f"\nopen({str(ran)!r}, 'a').write('x')\n")
    _train("--dataset", tiny, "--model", f"{file}:Net", *OWN, "--epochs", 1, "--checkpoint", tmp_path / "c.pt")
    assert ran.read_text() == "x"
    predict = ["--resume", tmp_path / "c.pt", "--gpus", 0, "--predict", tmp_path / "p.npy"]
    for words, complaint in (([], "holds weights of {}: give --model FILE.py:NAME"),
                             (["--model", "sage"], "was made with --model {}")):
        assert complaint.format(f"{file}:Net") in _train(*predict, *words, code=2)
    assert ran.read_text() == "x"
    moved = tmp_path / "elsewhere.py"
    moved.write_text(file.read_text().replace("dropout=0.3", "dropout=0.2"))
    output = _train(*predict, "--model", f"{moved}:Net")
    assert f"model   {moved}:Net is not the text that the checkpoint was made with" in output
    assert ran.read_text() == "xx"
    moved.write_text(OWN_LAYERS.replace("self.classify", "self.head"))
    assert "does not fit the model" in _train(*predict, "--model", f"{moved}:Net", code=2)


def test_a_graph_without_labels_is_predicted_on_and_not_trained_on(tiny, tmp_path):
    graph = GraphStore.open(tiny)
    dst = torch.repeat_interleave(graph.indptr.diff())
    arrays = {"edge_index": torch.stack([graph.indices.long(), dst]).numpy(), "x": graph.features.tensor.numpy()}
    np.savez(tmp_path / "bare.npz", **arrays)
    for name in ("valid", "train"):
        np.savez(tmp_path / f"{name}.npz", **arrays, train_idx=graph.split[name].numpy())
    run = ["--root", tmp_path / "root", "--gpus", 0]
    _train("--dataset", tiny, "--fanout", "3,3", "--epochs", 2, "--checkpoint", tmp_path / "c.pt", "--gpus", 0)
    for name, dataset in (("own", tiny), ("bare", tmp_path / "bare.npz")):
        output = _train("--resume", tmp_path / "c.pt", "--dataset", dataset, "--predict", tmp_path / f"{name}.npy",
                        *run)
        assert ("it has no labels: a trained model can predict" in output) == (name == "bare")
    assert np.array_equal(np.load(tmp_path / "own.npy"), np.load(tmp_path / "bare.npy"))
    said = _train("--dataset", tmp_path / "bare.npz", *run, code=2)
    assert "has no labels to learn from: --resume FILE --predict" in said
    assert "which has no label" in _train("--dataset", tmp_path / "valid.npz", *run, code=2)
    built = next((tmp_path / "root").glob("bare-*"))
    assert verify(built) == [] and "no labels" in store.info(built) and not GraphStore.open(built).labelled
    (tmp_path / "e.csv").write_text("0,1\n1,2\n")
    (tmp_path / "x.csv").write_text("1.5\n2\n3\n")
    assert store.main(["build", str(tmp_path / "e.csv"), str(tmp_path / "s"), "--features",
                       str(tmp_path / "x.csv")]) == 0
    assert not GraphStore.open(tmp_path / "s").labelled


def test_own_model_faults_are_said_in_one_sentence(tiny, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(OWN_LAYERS + "\ndef none(a, b):\n    return 3\ndef wide(a, b):\n    return Wide()\n"
                    "class Wide(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.p = "
                    "nn.Linear(1, 1)\n"
                    "    def forward(self, blocks, x):\n        return x[:, :4] * self.p.weight\n"
                    "class Pair(Wide):\n    def forward(self, blocks, x):\n        return x[:600], x\n"
                    "class Five(Wide):\n    def forward(self, blocks, x):\n        return x[:600, :5] * self.p.weight\n"
                    "class Classes(Wide):\n    def forward(self, blocks, x):\n        return x[:600].argmax(1)\n"
                    "def pair(a, b):\n    return Pair()\ndef five(a, b):\n    return Five()\n"
                    "def classes(a, b):\n    return Classes()\ndef fixed(a, b):\n    return nn.ReLU()\n")
    common = ["--dataset", tiny, "--root", tmp_path / "root", "--gpus", 0, "--fanout", "3,3"]
    for words, complaint in (
        (["--model", "nosuch.py:Net"], "--model nosuch.py:Net: nosuch.py cannot be read: No such file"),
        (["--model", f"{file}:Nett"], f"{file} defines no Nett; it has Net, none, wide, Wide, Pair, Five, "),
        (["--model", f"{file}:none"], "none returned a int, a torch.nn.Module is needed"),
        (["--model", f"{file}:wide"],
         r"the model returned torch.float32 \[\d+, 4\] for 600 seeds: a row of 4 logits for each is needed"),
        (["--model", f"{file}:pair"], "the model returned tuple for 600 seeds: a row of 4 logits"),
        (["--model", f"{file}:five"], r"the model returned torch.float32 \[600, 5\] for 600 seeds: a row of 4 logits"),
        (["--model", f"{file}:classes"], r"the model returned torch.int64 \[600\] for 600 seeds: a row of 4 logits"),
        (["--model", f"{file}:fixed"], "fixed has no parameters that could be trained"),
        (["--model", f"{file}:Net", "--model-args", "hiden=3"],
         "is called as Net.in_dim, num_classes, hiden=3.: .*unexpected.*'hiden'"),
        (["--model", f"{file}:Net", "--model-args", "3"], "'3': write NAME=VALUE"),
        (["--model", f"{file}:Net", "--model-args", "widths=[3,4],hidden=3"],
         "called as Net.in_dim, num_classes, widths=.3, 4., hidden=3.: "),
        (["--model", f"{file}:Net", "--hidden", "64"], "--hidden is for the built-in models"),
        (["--model", "GAT"], "'GAT': choose one of sage, sage-pool, gcn, gat, gin, gine, or FILE.py:NAME"),
        (["--model-args", "hidden=3"], "--model-args hidden=3 is for --model FILE.py:NAME"),
    ):
        output = _train(*common, *words, code=2)
        assert re.search(complaint, output) and "Traceback" not in output, output
    layers = _train(*common, "--model", f"{file}:Net", "--fanout", "3,3,3", "--gpus", 0, code=1)
    assert "when it was called with 3 blocks, one for each number of --fanout, and x [" in layers
    file.write_text("import nosuchmodule\n")
    assert "No module named 'nosuchmodule'" in _train(*common, "--model", f"{file}:Net", code=1)


def test_own_model_with_parameters_that_are_not_used(tiny, tmp_path):
    """They take no part in the exchange of gradients: two processes train as one does, dropout apart."""
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, in_dim, num_classes):\n"
        "        super().__init__()\n        self.a = torch.nn.Linear(in_dim, num_classes)\n"
        "        self.b = torch.nn.Linear(3, 3)\n"
        "    def forward(self, blocks, x):\n        return self.a(x[: blocks[-1].num_dst])\n")  # fmt: skip
    words = ["--dataset", tiny, "--gpus", 0, "--fanout", 5, "--epochs", 3, "--model", f"{tmp_path}/net.py:Net"]
    for procs, accumulate, batch in ((1, 1, 200), (2, 2, 50)):
        output = _train(*words, "--procs", procs, "--accumulate", accumulate, "--batch-size", batch,
                        "--checkpoint", tmp_path / f"{procs}.pt")  # fmt: skip
        assert "Warning" not in output
    one, two = (_parameters(tmp_path / f"{procs}.pt") for procs in (1, 2))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_own_model_of_our_layers_is_evaluated_layer_by_layer_like_in_batches(tiny, tmp_path, monkeypatch):
    """A function that returns a GNN gets its degrees; batches with all neighbours give what layer-wise inference
    gives."""
    file = tmp_path / "net.py"
    file.write_text("from model import GNN\ndef Net(in_dim, num_classes, conv='gcn'):\n"
                    "    return GNN(in_dim, 16, num_classes, conv=conv, num_layers=2, norm='layer')\n")  # fmt: skip
    for conv in ("gcn", "gat"):
        words = ["--dataset", tiny, "--model", f"{file}:Net", "--model-args", f"conv={conv}", "--fanout", "4,4",
                 "--gpus", "0"]
        args, ranks = train.parse_args(words), ddp.Ranks()
        graph, _, ring = train.open_data(ranks, args, tiny)
        net = train.build_model(ranks, args, graph, ring)
        assert model.layerwise(net) and (net.degrees is not None) == (conv == "gcn")
        expected = train.exact_logits(ranks, args, graph, net)
        for edges in (1 << 22, 0):  # the whole graph as one batch, and batches
            monkeypatch.setattr(train, "WHOLE_GRAPH_EDGES", edges)
            torch.testing.assert_close(train.logits_in_batches(ranks, args, graph, net), expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# what edges carry: features in the layers, weights and times in what is drawn


def _pointed_store(path):
    """Every node has six in-neighbours with a sign each, and its class is the sign of the one whose edge is marked."""
    rng = np.random.default_rng(0)
    sign = rng.integers(0, 2, 600)
    src = np.stack([rng.permutation(599)[:6] for _ in range(600)])
    src += src >= np.arange(600)[:, None]
    marked = rng.integers(0, 6, 600)
    return build_store(
        path, edge_index=np.stack([src.ravel(), np.repeat(np.arange(600), 6)]),
        labels=sign[src[np.arange(600), marked]],
        features=np.stack([2 * sign - 1, rng.standard_normal(600)], 1).astype(np.float32),
        edge_features=np.eye(6, dtype=np.float32)[:, :1][(np.arange(6) - marked[:, None]).ravel() % 6] * [1, 0.5],
        split={"train": np.arange(300), "valid": np.arange(300, 400), "test": np.arange(400, 600)},
    )  # fmt: skip


@pytest.mark.parametrize("name, least, most", [("gat", 0.95, 1), ("gine", 0.95, 1), ("gin", 0, 0.75)])
def test_train_learns_from_the_features_of_edges(name, least, most, tmp_path):
    """And resumes, predicts, and says what it does with them."""
    path = _pointed_store(tmp_path / "g")
    words = ["--dataset", path, "--gpus", 0, "--model", name, "--fanout", "6", "--hidden", 16, "--dropout", 0, "--lr",
             0.02]
    words += ["--norm", "none", "--batch-size", 100, "--log", tmp_path / "log"]
    first = _train(*words, "--epochs", 60, "--checkpoint", tmp_path / "c.pt")
    said = "not used by --model gin: gat and gine take them"
    said = "the model sees the features of edges, 2 x float64" if most == 1 else said
    assert first.count("edges   ") == 1 and said in first
    assert least <= _log(tmp_path / "log")[-1]["exact"]["test"] <= most
    _train("--resume", tmp_path / "c.pt", "--predict", tmp_path / "p.npy", "--gpus", 0)
    graph = GraphStore.open(path)
    wide = build_store(tmp_path / "wide", indptr=graph.indptr, indices=graph.indices, features=graph.features.tensor,
                       labels=graph.labels,
                       split=graph.split, edge_features=np.ones((3600, 3)))  # fmt: skip
    other = _train("--resume", tmp_path / "c.pt", "--predict", tmp_path / "q.npy", "--gpus", 0, "--dataset", wide,
                   code=2 * (most == 1))
    assert "trained on a graph with edge_dim 2, " in other or most < 1
    right = np.load(tmp_path / "p.npy") == graph.labels.numpy()
    assert right[400:].mean() == pytest.approx(_log(tmp_path / "log")[-1]["exact"]["test"])
    if name == "gine":
        plain = prepare(TINY, tmp_path, progress=False)
        said = _train("--dataset", plain, "--gpus", 0, "--model", "gine", code=2)
        assert "--model gine takes features of edges, and" in said


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

def made(in_dim, num_classes, edge_dim=0):
    return Net(in_dim, num_classes, edge_dim)

def wrong(in_dim, num_classes, edge_dim=0):
    return Blind(in_dim, num_classes, edge_dim)
"""


def test_own_model_gets_the_features_of_edges_that_it_can_take(tmp_path):
    path, file = _pointed_store(tmp_path / "g"), tmp_path / "net.py"
    file.write_text(OWN_EDGES)
    words = ["--gpus", 0, "--fanout", "6", "--lr", 0.02, "--batch-size", 100, "--log", tmp_path / "log"]
    for name, least, most in (("Net", 0.95, 1), ("Must", 0.95, 1), ("made", 0.95, 1), ("Blind", 0, 0.75)):
        said = _train(*words, "--dataset", path, "--model", f"{file}:{name}", "--epochs", 60)
        sees = "the model sees the features of edges, 2 x float64"
        assert (sees if least else f"not used by --model {file}:{name}: its forward has no argument `edges`") in said
        assert least <= _log(tmp_path / "log")[-1]["exact"]["test"] <= most, name
    plain = prepare(TINY, tmp_path, progress=False)
    for name, dataset, code, complaint in (
        ("Net", plain, 0, "exact accuracy"), ("made", plain, 0, "exact accuracy"),
        ("Must", plain, 2, "takes features of edges, and .* has none; give that argument a default to go without"),
        ("wrong", path, 2, "wrong has an argument edge_dim, and the forward of what it returned has no argument"),
    ):  # fmt: skip
        said = _train(*words, "--dataset", dataset, "--model", f"{file}:{name}", "--epochs", 1, code=code)
        assert re.search(complaint, said) and "Traceback" not in said, said
    file.write_text(OWN_EDGES.replace("def forward(self, blocks, x, edges):", "def forward(self, blocks, x, edges):\n"
                                      "        raise ValueError('no')"))  # fmt: skip
    said = _train(*words, "--dataset", path, "--model", f"{file}:Must", "--epochs", 1, code=1)
    assert re.search(r"with 1 blocks, .* and x \[\d+, 2\], and for each block edges \[E, 2\]: no", said), said


@pytest.mark.parametrize("name", ["gat", "gine", "own"])
def test_train_with_edge_features_is_the_same_for_any_number_of_processes_and_after_a_stop(name, tmp_path):
    path = _pointed_store(tmp_path / "g")
    common = ["--dataset", path, "--gpus", 0, "--lr", 0.01, "--precision", "fp64"]
    (tmp_path / "net.py").write_text(OWN_EDGES)
    own = ["--model", f"{tmp_path}/net.py:Net", "--fanout", "4"]
    common += own if name == "own" else ["--model", name, "--fanout", "4,3", "--hidden", 16, "--norm", "layer"]
    for procs in (1, 2, 3):
        _train(*common, "--epochs", 3, "--procs", procs, "--batch-size", 72 // procs, "--log", tmp_path / f"{procs}",
               "--checkpoint", tmp_path / f"{procs}.pt")  # fmt: skip
    expected = [entry["loss"] for entry in _log(tmp_path / "1")[:3]]
    for procs in (2, 3):
        assert [entry["loss"] for entry in _log(tmp_path / f"{procs}")[:3]] == pytest.approx(expected, rel=1e-9)
    parts = ["--batch-size", 72, "--checkpoint", tmp_path / "part.pt", "--prefetch", 0]
    _train(*common, "--epochs", 1, *parts)
    _train(*common, "--epochs", 3, *parts, "--resume", "auto")
    whole, part = _parameters(tmp_path / "1.pt"), _parameters(tmp_path / "part.pt")
    assert all(torch.equal(whole[key], part[key]) for key in whole)


def test_train_draws_neighbours_by_the_weights_of_edges(tmp_path):
    """Each node has one neighbour that gives its class away, of weight 1, and nine of weight 0, or of the same
    weight."""
    rng = np.random.default_rng(0)
    labels, others = rng.integers(0, 2, 500), rng.integers(0, 500, (9, 500))
    edges = np.stack([np.concatenate([np.arange(500, 1000), others.ravel()]), np.tile(np.arange(500), 10)])
    x = np.zeros((1000, 2), np.float32)
    x[np.arange(500, 1000), labels] = 1
    x[:500] = rng.standard_normal((500, 2))
    y = np.append(labels, np.full(500, -1))
    split = {"train": np.arange(300), "valid": np.arange(300, 500)}
    path = build_store(tmp_path / "g", edge_index=edges, features=x, labels=y, split=split,
                       edge_weight=np.repeat([1, 0], [500, 4500]))
    words = ["--dataset", path, "--gpus", 0, "--fanout", "1", "--dropout", 0, "--lr", 0.05, "--epochs", 30, "--log",
             tmp_path / "log"]
    said = _train(*words, "--sampler", "weighted")
    assert "neighbours are drawn by the weights of their edges; exact inference counts" in said
    assert "weights of edges are not used: --sampler weighted draws" in _train(*words)
    weighted, uniform = (entry["valid_sampled"] for entry in _log(tmp_path / "log") if entry.get("epoch") == 30)
    assert weighted > 0.97 and uniform < 0.8
    plain = prepare(TINY, tmp_path, progress=False)
    said = _train("--dataset", plain, "--gpus", 0, "--sampler", "weighted", code=2)
    assert "--sampler weighted draws neighbours by the weights" in said


def _told_by_the_future(path, nodes=400, **columns):
    """Every node has eight neighbours that say nothing before its time, and eight that have its class after it."""
    rng = np.random.default_rng(0)
    labels, when = rng.integers(0, 2, nodes), rng.integers(20, 80, nodes)
    sign = np.append(labels, [0, 1] * 100)  # 200 more nodes carry a sign
    past = nodes + rng.integers(0, 200, (8, nodes))
    future = nodes + 2 * rng.integers(0, 100, (8, nodes)) + labels
    src, dst = np.concatenate([past, future]).ravel(), np.tile(np.arange(nodes), 16)
    times = np.concatenate([when - rng.integers(0, 20, (8, nodes)), when + rng.integers(1, 20, (8, nodes))]).ravel()
    x = np.zeros((nodes + 200, 2), np.float32)
    x[nodes:, 0] = 2 * sign[nodes:] - 1
    x[:nodes, 1] = rng.standard_normal(nodes)
    return build_store(path, edge_index=np.stack([src, dst]), features=x, labels=np.append(labels, np.full(200, -1)),
                       split={"train": np.arange(200), "valid": np.arange(200, 280), "test": np.arange(280, nodes)},
                       edge_time=times, node_time=np.append(when, np.full(200, 100)), **columns)  # fmt: skip


@pytest.mark.parametrize("name", ["sage", "gin", "gat", "own"])
def test_train_sees_no_future(name, tmp_path):
    """The future gives the answer away: at each node's own time accuracy is that of guessing, without it all is
    right."""
    path = _told_by_the_future(tmp_path / "g")
    (tmp_path / "own.py").write_text(OWN_LAYERS)
    words = ["--dataset", path, "--gpus", 0, "--fanout", "10,2", "--epochs", 30, "--lr", 0.01, "--batch-size", 50]
    more = ["--model", name, "--hidden", 16, "--norm", "layer", "--dropout", 0]
    words += ["--model", f"{tmp_path}/own.py:Net"] if name == "own" else more
    exact, sampled = {}, {}
    for temporal, said in (("auto", "seeds see edges at their own time or before"),
                           ("before", "seeds see edges before their own time"),
                           ("off", "times of edges are not used: --temporal off")):  # fmt: skip
        output = _train(*words, "--temporal", temporal, "--log", tmp_path / temporal)
        assert output.count("edges   ") == 1 and said in output
        log = _log(tmp_path / temporal)
        exact[temporal], sampled[temporal] = log[-1]["exact"]["test"], log[-2]["valid_sampled"]
    for found, least, room in ((exact, 0.97, 0.15), (sampled, 0.9, 0.2)):  # 120 and 80 nodes: three standard deviations
        assert found["off"] > least and max(abs(found[temporal] - 0.5)
                                            for temporal in ("auto", "before")) < room, (exact, sampled)


def test_train_draws_the_latest_neighbours(tmp_path):
    """The last of the past edges tells the answer, the many before it are noise."""
    rng, nodes = np.random.default_rng(0), 400
    labels, when = rng.integers(0, 2, nodes), rng.integers(100, 200, nodes)
    noise, sign = rng.integers(nodes, nodes + 200, (30, nodes)), nodes + 2 * rng.integers(0, 100, nodes) + labels
    x = np.zeros((nodes + 200, 2), np.float32)
    x[nodes:, 0] = 2 * (np.arange(200) % 2) - 1
    times = np.concatenate([rng.integers(0, 90, (30, nodes)).ravel(), when])
    path = build_store(tmp_path / "g", features=x, labels=np.append(labels, np.full(200, -1)), edge_time=times,
                       edge_index=np.stack([np.append(noise.ravel(), sign), np.tile(np.arange(nodes), 31)]),
                       split={"train": np.arange(200), "valid": np.arange(200, nodes)},
                       node_time=np.append(when, np.full(200, 100)))  # fmt: skip
    words = ["--dataset", path, "--gpus", 0, "--fanout", "1", "--hidden", 8, "--epochs", 20, "--lr", 0.01,
             "--batch-size", 50, "--dropout", 0]  # fmt: skip
    found = {}
    for drawn in ("latest", "uniform"):
        output = _train(*words, "--sampler", drawn, "--log", tmp_path / drawn)
        assert ("neighbours are the latest" in output) == (drawn == "latest")
        found[drawn] = _log(tmp_path / drawn)[-2]["valid_sampled"]
    assert found["latest"] > 0.98 and found["uniform"] < 0.7, found
    assert "times of edges and nodes" in _train(*words, "--sampler", "latest", "--temporal", "off", code=2)


def test_train_at_its_own_time_is_the_same_for_any_number_of_processes(tmp_path):
    path = _told_by_the_future(tmp_path / "g")
    common = ["--dataset", path, "--gpus", 0, "--fanout", "5,3", "--hidden", 16, "--epochs", 3, "--precision", "fp64",
              "--lr", 0.01]
    for procs in (1, 2, 3):
        _train(*common, "--procs", procs, "--batch-size", 60 // procs, "--log", tmp_path / f"{procs}", "--predict",
               tmp_path / f"{procs}.npy",
               "--predict-what", "embeddings")  # fmt: skip
    expected = _log(tmp_path / "1")
    for procs in (2, 3):
        for a, b in zip(expected[:3], _log(tmp_path / f"{procs}")[:3], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9) and a["valid_sampled"] == b["valid_sampled"]
        np.testing.assert_allclose(np.load(tmp_path / f"{procs}.npy"), np.load(tmp_path / "1.npy"), rtol=1e-5,
                                   atol=1e-6)
    assert np.load(tmp_path / "1.npy").shape == (600, 16)


def test_train_at_its_own_time_goes_on_after_a_kill_to_the_last_bit(tmp_path):
    path = _told_by_the_future(tmp_path / "g", edge_features=np.random.default_rng(1).random((6400, 2)))
    common = ["--dataset", path, "--gpus", 0, "--fanout", "5,3", "--hidden", 16, "--batch-size", 10, "--model", "gat",
              "--epochs", 12]
    _train(*common, "--checkpoint", tmp_path / "straight.pt")
    killed, resume = 0, ["--checkpoint", tmp_path / "resumed.pt", "--checkpoint-every", 3, "--resume", "auto"]
    for turn in range(3):
        process = _start_fork(tmp_path / "out", *common, *resume, "--prefetch", turn)
        _wait_for(lambda: (tmp_path / "out").read_text().count("\nrun  ") >= turn + 1, process, pause=0.005)
        time.sleep(0.1 + 0.07 * turn)
        os.kill(process.pid, signal.SIGKILL)
        _end(process, 0, -signal.SIGKILL)
        killed += process.exitcode != 0
    assert killed and "resume  from epoch" in _train(*common, *resume)
    straight, resumed = _parameters(tmp_path / "straight.pt"), _parameters(tmp_path / "resumed.pt")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_train_exact_inference_at_its_own_time_is_that_of_the_graph_of_that_time(tmp_path):
    """Each node's logits are those of the graph that holds nothing but the edges which it may see."""
    rng = np.random.default_rng(3)
    path = build_store(tmp_path / "g", edge_index=rng.integers(0, 40, (2, 300)),
                       features=rng.standard_normal((40, 3)).astype("f"),
                       labels=rng.integers(0, 3, 40), split={"train": np.arange(20)}, edge_time=rng.integers(0, 9, 300),
                       node_time=rng.integers(0, 9, 40), edge_features=rng.random((300, 2)))  # fmt: skip
    graph = GraphStore.open(path)
    dst = torch.repeat_interleave(graph.indptr.diff())
    for name, temporal in itertools.product(("sage", "gat", "gin", "gine"), ("at", "before")):
        args = train.parse_args(["--dataset", str(path), "--gpus", "0", "--model", name, "--temporal", temporal,
                                 "--fanout", "3,3",
                                 "--hidden", "8", "--batch-size", "7"])  # fmt: skip
        ranks = ddp.Ranks()
        _, _, ring = train.open_data(ranks, args, path)
        net = train.build_model(ranks, args, graph, ring).eval()
        found, hidden = train.exact_logits(ranks, args, graph,
                                           net), train.exact_logits(ranks, args, graph, net, layers=1)
        slow = copy.deepcopy(net)
        slow.degrees = None
        for v in range(40):
            before, at = graph.edge_time < graph.node_time[v], graph.edge_time <= graph.node_time[v]
            keep = before if temporal == "before" else at
            indptr = torch.nn.functional.pad(torch.bincount(dst[keep], minlength=40).cumsum(0), (1, 0))
            options = {"edges": graph.edge_features[keep]}
            expected = inference(slow, indptr, graph.indices[keep], graph.features.tensor, **options)
            torch.testing.assert_close(found[v], expected[v], rtol=1e-4, atol=1e-5)
            inner = inference(slow, indptr, graph.indices[keep], graph.features.tensor, layers=1, **options)
            torch.testing.assert_close(hidden[v], inner[v], rtol=1e-4, atol=1e-5)


def test_train_says_what_times_are_missing(tmp_path):
    whole, plain = _told_by_the_future(tmp_path / "g"), prepare(TINY, tmp_path, progress=False)
    args = _graph()
    edges_alone = build_store(tmp_path / "e", **args, edge_time=np.arange(3000))
    for path, words, complaint in (
        (plain, ["--temporal", "at"], "--temporal at needs times of edges and nodes .*: .* has no times of edges"),
        (edges_alone, ["--temporal", "before"], "has no times of nodes"),
        (whole, ["--model", "gcn"],
         "--model gcn divides by the degrees of the whole graph, which count edges of the future"),
        (plain, ["--task", "graph", "--temporal", "off"], "--temporal off is for --task node"),
        (plain, ["--task", "graph", "--sampler", "weighted"], "--sampler weighted is for --task node"),
    ):
        assert re.search(complaint, _train("--dataset", path, "--gpus", 0, *words, code=2))
    said = _train("--dataset", edges_alone, "--gpus", 0, "--epochs", 1)
    assert "times of edges are not used: nodes have none" in said


# ---------------------------------------------------------------------------------------------------------------------
# attacked: 120 stores, 60 inputs and 60 checkpoints with one thing wrong, 6 processes killed; bench.py attack does more


@_beside(lambda folder: _fork(folder / "out", bench_attack.main, ["--rounds", "6", "--minutes", "30"]))
def test_what_is_damaged_or_forged_is_fine_or_refused_in_a_sentence(beside):
    table = dict(re.findall(r"^\| (?:all )?(\w+) +\| (\d+) ", _end(beside[0]), re.MULTILINE))
    assert [int(table[group]) for group in ("stores", "inputs", "checkpoints", "kills")] == [120, 60, 60, 6]


# ---------------------------------------------------------------------------------------------------------------------
# bench.py and README.md


def test_bench_inference_equals_dgls_loop(tmp_path):
    _dgl()
    words = ["inference", "--dataset", TINY, "--root", str(tmp_path), "--hidden", "8", "--fanout", "1,1", "--rounds",
             "1"]
    for conv in ("sage", "gat", "gin"):
        out = tmp_path / f"{conv}.json"
        assert bench.main([*words, "--model", conv, "--json", str(out)]) == 0
        figures = json.loads(out.read_text())
        assert len(figures["median_s"]) == 4 and max(figures["logits_apart"].values()) < 1e-3
    torch.set_num_threads(2)


def test_bench_accuracy_trains_and_cuts_graphs(tmp_path, monkeypatch, capsys):
    """Two components of three and two nodes and one alone: the largest is kept, with its features and labels."""
    features = {"feat_indptr": [0, 1, 3, 3, 4, 5, 6], "feat_indices": [0, 1, 2, 3, 0, 1], "feat_shape": [6, 4]}
    np.savez(tmp_path / "six.npz", edge_index=[[0, 4, 2, 3, 1], [4, 2, 0, 1, 3]], labels=[0, 1, 2, 3, 4, 5], **features)
    bench_accuracy.write_graph(tmp_path / "six.npz", tmp_path / "three.npz", component=True, edges=True)
    three = np.load(tmp_path / "three.npz")
    assert three["edge_index"].tolist() == [[0, 2, 1], [2, 1, 0]] and three["labels"].tolist() == [0, 2, 4]
    assert three["feat_indptr"].tolist() == [0, 1, 1, 2] and three["feat_indices"].tolist() == [0, 0]
    assert three["feat_shape"].tolist() == [3, 4]
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there")
    settings = [("", "--lr 0.02 --weight-decay 5e-4"), (":row_normalize=0", "--lr 1e-6")]
    monkeypatch.setitem(bench_accuracy.REAL, "cora",
                        ("--hidden 16 --epochs 40", *bench_accuracy.REAL["cora"][1:3], settings))
    out = tmp_path / "out.json"
    words = ["accuracy", "--dataset", "cora", "--data", str(DATA), "--runs", "2", "--threads", "1", "--json", str(out)]
    assert bench.main([*words, "--models", "mlp,gcn"]) == 0
    torch.set_num_threads(2)
    for bad, complaint in ((["--runs", "1"], "--runs 1: a standard"),
                           (["--models", "gcm"], "--models gcm: choose from mlp,sage")):
        with pytest.raises(SystemExit):
            bench.main([*words, *bad])
        assert complaint in capsys.readouterr().err
    figures = json.loads(out.read_text())["accuracy"]
    assert 40 < figures["cora, mlp, no edges"]["test"] < 65
    for how in ("all neighbours", "sampled"):
        figure = figures[f"cora, gcn, {how}"]
        assert figure["test"] > 76 and "--lr 0.02" in figure["flags"] and len(figure["trials"]) == 2


def test_bench_overlap_draws_both_median_epochs_on_one_axis(tmp_path, monkeypatch):
    """The median of --rounds, without the one that warms up; stages that overlap only where batches are prepared
    ahead."""
    drawn = {}
    monkeypatch.setattr(bench_training, "draw_timeline", lambda runs, path, steps: drawn.update(runs))
    words = ["overlap", "--dataset", TINY, "--root", str(tmp_path), "--hidden", "8", "--fanout", "3,3", "--batch-size",
             "20"]
    assert bench.main([*words, "--rounds", "3", "--json", str(tmp_path / "o.json")]) == 0
    torch.set_num_threads(2)
    alone, ahead = drawn["one after the other"], drawn["2 batches prepared ahead"]
    for laps, threads in ((alone, {"MainThread"}), (ahead, {"MainThread", "prefetch_0"})):
        assert {thread for *_, thread in laps} == threads
        assert [stage for stage, *_ in laps].count("optimizer") == [stage for stage, *_ in laps].count("fetch") == 12
    assert json.loads((tmp_path / "o.json").read_text())["ratio"] > 0


def test_bench_picture_draws_what_is_committed(tmp_path):
    pytest.importorskip("matplotlib")
    files = [str(path) for path in (HERE / "results").glob("*.json")]
    assert bench.main(["picture", *files, "--png", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_bench_gpu_without_a_gpu_is_one_sentence_and_the_others_say_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["gpu", "--root", str(tmp_path), "--threads", "2"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("bench.py: gpu needs a CUDA GPU") and said.err.count("\n") == 1
    monkeypatch.setattr(bench, "bench_sampler", lambda args: {})
    assert bench.main(["sampler", "--threads", "2", "--json", str(tmp_path / "s.json")]) == 0
    assert re.match("measured on the CPU  cpu ", capsys.readouterr().out.splitlines()[0])
    assert "gpu" not in json.loads((tmp_path / "s.json").read_text())["machine"]


def _part_that_keeps(args, record):
    record.keep(median_ms={"native": 1.5, "torch operations": 6.0}, summary=f"{args.batch_size} seeds in 1.5 ms")
    with record.attempt("PyG", optional=True):
        raise ImportError("no PyG here")


def _part_that_raises(args, record):
    with record.attempt("one contender"):
        raise ValueError("of two things the first\nand the second")
    record.keep(half=1)
    raise RuntimeError("the other half")


def _part_that_dies(args, record):
    os._exit(7)


def _part_that_hangs(args, record):
    subprocess.run(["sleep", "600"])


def test_bench_gpu_goes_on_after_parts_that_fail(tmp_path, monkeypatch, capfd):
    """An exception, a crash and a time limit are written into the part's file, and the others run."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(bench_gpu, "PROCESSES", multiprocessing.get_context("fork"))  # spawning takes seconds each
    parts = {"raises": (_part_that_raises, 60), "dies": (_part_that_dies, 60), "hangs": (_part_that_hangs, 1),
             "sampling": (_part_that_keeps, 60)}  # fmt: skip
    monkeypatch.setattr(bench_gpu, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "gpu_machine", dict)
    monkeypatch.setattr(bench_gpu, "machine", lambda: {"gpu": "some GPU"})
    words = ["gpu", "--threads", "2", "--out", str(tmp_path / "out"), "--batch-size", "7"]
    assert bench.main(words) == 1
    files = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert files.keys() == {f"gpu-{name}" for name in parts}
    for name, content in files.items():
        assert {"machine", "arguments", "part", "finished", "failed", "left_out", "seconds"} <= content.keys()
        assert content["part"] == name[4:] and content["arguments"]["what"] == "gpu"
        assert content["arguments"]["batch_size"] == 7
    assert files["gpu-raises"]["half"] == 1 and files["gpu-raises"]["failed"] == [
        "one contender: ValueError: of two things the first", "raises: RuntimeError: the other half"]  # fmt: skip
    assert files["gpu-dies"]["failed"] == ["its process ended with exit code 7"]
    assert files["gpu-hangs"]["failed"] == ["stopped after 1 s"] and files["gpu-hangs"]["seconds"] < 30
    good = files["gpu-sampling"]
    assert good["machine"] and good["finished"] and not good["failed"] and good["left_out"] == ["PyG: no PyG here"]
    text = capfd.readouterr().out
    assert "FAILED  one contender: ValueError" in text
    assert re.search(r"sampling +\| \d+ +\| 1 left out +\| 7 seeds in 1.5 ms", text)
    assert bench.main([*words, "--parts", "sampling"]) == 0
    assert bench.main([*words, "--parts", "sampling,x"]) == 2
    assert "--parts x: choose from raises" in capfd.readouterr().err
    assert bench.main([*words, "--parts", "sampling", "--minutes", "0"]) == 1
    assert json.loads((tmp_path / "out" / "gpu-sampling.json").read_text())["failed"] == ["no time left of --minutes 0"]


def test_bench_link_takes_steps_beside_dgl(tmp_path, monkeypatch, capsys):
    """Every contender takes the same kind of step: losses near the one of a coin, which is ln 2."""
    losses, took = collections.defaultdict(list), bench_link.interleave
    monkeypatch.setattr(bench_link, "OwnProcess", lambda threads, make, args: make(args))
    monkeypatch.setattr(bench_link, "interleave", lambda runs, *a,
                        **k: took(runs, *a, **k, note=lambda name, loss: losses[name].append(loss)))
    words = ["--root", str(tmp_path), "--rounds", "2", "--fanout", "3,3", "--hidden", "8", "--batch-size", "50",
             "--threads", "1"]
    assert bench.main(["link", "--dataset", TINY, *words, "--json", str(tmp_path / "l.json")]) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    assert {"ours", "ours, nothing excluded"} <= found["median_ms"].keys() == losses.keys()
    assert all(0.3 < loss < 1.5 for some in losses.values() for loss in some)
    if _has_dgl():
        assert found["ratios"].keys() == {"DGL as shipped", "DGL, malloc kept"}
        assert "times as fast as DGL" in capsys.readouterr().out


def test_bench_picture_takes_up_figures_of_a_gpu(tmp_path):
    pytest.importorskip("matplotlib")
    common = {"machine": {"gpu": "some GPU"}, "arguments": {"what": "gpu"}}
    for part, figures in (("sampling", {"median_ms": {"native": 0.2}}),
                          ("products", {"step_ms": {"cuda-cuda fp32 eager": 2.5}}), ("trace", {})):
        (tmp_path / f"gpu-{part}.json").write_text(json.dumps({**common, "part": part, **figures}))
    files = sorted(map(str, tmp_path.glob("*.json")))
    assert bench.main(["picture", *files, "--png", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert bench.main(["picture", files[2], "--png", str(tmp_path / "none.png")]) == 2  # nothing of it can be drawn


def _has_dgl():
    return importlib.util.find_spec("dgl") is not None


def _has_pyg():
    return importlib.util.find_spec("torch_geometric") is not None


def _events(num_nodes, num_edges):
    """What the edges of a graph carry, and when its nodes are classified."""
    rng = np.random.default_rng(5)
    return {"edge_weight": rng.random(num_edges), "edge_time": rng.integers(0, 100, num_edges),
            "node_time": rng.integers(0, 100, num_nodes),
            "edge_features": rng.random((num_edges, 3)).astype(np.float32)}  # fmt: skip


def _readme_commands():
    """README's shell commands that need no GPU, no download and no second graph, without their comments."""
    lines = [line.split("  #")[0].strip() for block in _readme_blocks("bash") for line in block.splitlines()]
    away = ("ogbn-", "cora", "--gpus 4", "pip install", "my_graph", "my_store", "other.npz", "PATH")
    return [line for line in lines if line.startswith("python ") and not any(word in line for word in away)]


def test_readme_commands_run_word_for_word(tmp_path):
    """All in one folder, in the order of README, with small settings behind them; train.py's in forks where it starts
    no ranks."""
    for path in HERE.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(HERE / "results", tmp_path / "results")
    for name, text in OWN_MODELS.items():
        (tmp_path / name).write_text(text)
    _save_npz(tmp_path / "events.npz", **_events(200, 3000))
    absent = [name for name, there in (("mydgl.py", _has_dgl()), ("mypyg.py", _has_pyg())) if not there]
    np.save(tmp_path / "pairs.npy", [[0, 1], [2, 3]])
    commands, known = _readme_commands(), set(flags.make_parser()._option_string_actions)
    assert len(commands) > 4
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in commands:
        assert {word for word in command.split() if word.startswith("--") and "train.py" in command} <= known, command
        if "bench.py" in command and "picture" not in command:
            continue  # they take hours; the tests above run them small
        if any(name in command for name in absent):
            continue
        if any(word in command for word in ("--timeline", "picture")) and not importlib.util.find_spec("matplotlib"):
            continue
        if "esol.npz" in command:
            if not DATA.is_dir():
                continue
            shutil.copy(DATA / "esol.npz", tmp_path)
            command += " --epochs 2"
        elif "events.npz" in command:
            command += " --epochs 2 --fanout 3,3"
        elif "train.py" in command and "--resume" not in command and "--help" not in command:
            command += f" --dataset {TINY} --epochs 2 --fanout 3,3" + (" --runs 2" if "--runs" in command else "")
        if "train.py" in command and "--procs" not in command:
            _train(*shlex.split(command)[2:], cwd=tmp_path)
            continue
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)


def test_readme_python_blocks_run(tmp_path, monkeypatch):
    """README's Python, in its order, on a small graph under the names that it uses; DGL's and PyG's where they are."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = {
        "edge_index": rng.integers(0, 400, (2, 4000)), "x": rng.normal(size=(400, 8)).astype(np.float32),
        "y": rng.integers(0, 3, 400), "train_nodes": range(200), "a": range(200), "b": range(200, 300),
        "c": range(300, 400),
        "edge_times": torch.zeros(4000).long(), "seeds": torch.arange(9), "times": torch.arange(9),
        "edge_ids": torch.arange(50),
    }  # fmt: skip
    data = {name: torch.from_numpy(names[name]) for name in ("edge_index", "x", "y")}
    names |= {{"edge_weight": "w", "edge_time": "t", "edge_features": "e"}.get(name, name): values
              for name, values in _events(400, 4000).items()}
    names["dgl_graph_or_pyg_data"] = types.SimpleNamespace(**data)  # the fields of PyG's Data that are read
    blocks = _readme_blocks("python")
    assert len(blocks) >= 4
    for block in blocks:
        if "dgl" in block and not _has_dgl() or "torch_geometric" in block and not _has_pyg():
            continue
        given = names
        if "block_diagonal" in block:  # 400 graphs of two nodes and an edge
            many = {"num_nodes": [2] * 400, "num_edges": [1] * 400, "edge_index": [[0] * 400, [1] * 400],
                    "x": np.zeros((800, 3), np.float32), "e": np.zeros((400, 2), np.uint8),
                    "y": np.zeros((400, 1), np.float32)}  # fmt: skip
            given = {**names, **many, "another_batch": block_diagonal(*many.values())}
        exec(compile(block, "README.md", "exec"), given)


# ---------------------------------------------------------------------------------------------------------------------
# each leaf alone


SAMPLES = """
import torch, warnings
from sampler import NeighborSampler
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        s = NeighborSampler(torch.tensor([0, 2, 3, 3]), torch.tensor([1, 2, 0]), [2, 2])
assert s.sample(torch.tensor([0]), 0)[-1].src_nodes.tolist() == [0, 1, 2]
caught = [str(warning.message) for warning in caught]
"""

ALONE = {  # the files that are copied: what is done with them
    "sampler": SAMPLES + "assert s.backend == 'torch' and len(caught) == 1 and 'copy sampler_law.py' in caught[0], "
                         "caught",
    "sampler sampler_law sampler_c native": SAMPLES + "assert s.backend == 'native' and not caught, caught",
    "features": """
import torch
from collections import namedtuple
from features import FeatureRing, prefetch
Block = namedtuple("Block", "src_nodes num_dst")
ring = FeatureRing(torch.eye(4), torch.arange(4), slots=3)
blocks = [[Block(torch.tensor([i, 3 - i]), 1)] for i in range(4)]
assert [b.y.item() for b in prefetch(lambda item, slot: ring.fetch(slot, item), blocks, depth=2)] == [0, 1, 2, 3]
""",
    "model": """
import torch
from model import GNN, SAGE, inference
indptr, indices = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
assert inference(SAGE(3, 4, 2, num_layers=2), indptr, indices, torch.ones(2, 3)).shape == (2, 2)
""",
    "store": """
import numpy as np, torch
from store import GraphStore, build_store, verify
split = {"train": [0], "valid": [1], "test": [2]}
build_store("s", edge_index=[[0, 1], [1, 2]], features=np.eye(3, dtype="float32"), labels=[0, 1, 1], split=split)
assert GraphStore.open("s").features.gather(torch.tensor([2])).tolist() == [[0, 0, 1]] and verify("s") == []
""",
    "link": """
import types, torch
from link import Evaluation, Scorer, split_edges
from loader import from_edge_index
ends = torch.randint(0, 30, (2, 100))
indptr, indices = from_edge_index(torch.cat([ends, ends.flip(0)], 1), 30)
graph = split_edges(types.SimpleNamespace(indptr=indptr, indices=indices, num_nodes=30), "80/10/10", seed=1)
assert 0 < Evaluation(graph)(Scorer("dot", 4), torch.randn(30, 4), "test")["mrr"] <= 1
""",
    "metrics": """
import torch
from metrics import ranking, score
assert score("accuracy", torch.eye(3), torch.arange(3)) == 1 and ranking(torch.tensor([1, 2]))["mrr"] == 0.75
""",
    "graphs": """
import torch
from graphs import GraphDataset, block_diagonal, build_graphs, verify
build_graphs("many", [block_diagonal([2, 1], [1, 0], [[0], [1]], torch.eye(3), torch.ones(1, 2), torch.eye(2))])
assert GraphDataset.open("many").batch([1, 0]).indptr.tolist() == [0, 0, 0, 1] and verify("many") == []
""",
    "ddp": """
import ddp
def worker(ranks, expected):
    assert ranks.sum(ranks.rank + 1) == [expected]
if __name__ == "__main__":
    ddp.launch(worker, 2, 3)
    ddp.launch(worker, 1, 1)
""",
}

TAKEN_ALONG = {  # what the first lines of a file say it needs
    "store": ("disk", "csc", "columns", "lmdb_file", "row_reader", "native"),
    "graphs": ("disk", "lmdb_file", "features", "metrics"),
    "link": ("disk", "loader", "features", "metrics", "sampler"),
    "model": ("exact",),
}


def test_each_leaf_works_alone_in_an_empty_folder(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    runs = {}
    for leaf, use in ALONE.items():
        folder = tmp_path / leaf
        folder.mkdir()
        for name in (*leaf.split(), *TAKEN_ALONG.get(leaf, ())):
            shutil.copy(HERE / f"{name}.py", folder)
        (folder / "use.py").write_text(use)
        runs[leaf] = subprocess.Popen([sys.executable, "use.py"], cwd=folder, env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        printed = {leaf: process.communicate(timeout=120)[0] for leaf, process in runs.items()}
    finally:
        for process in runs.values():
            process.kill()
    assert {leaf: process.returncode for leaf, process in runs.items()} == dict.fromkeys(ALONE, 0), printed
