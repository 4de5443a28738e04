"""Tests: CUDA without a GPU: a step as graphs on emulated kernels, the order of work on streams."""

import argparse
import copy
import ctypes
import functools
import gc
import itertools
import os
import re
import sys
import types
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp
import loader
import model
import train
from extras import links as link
from extras import step_graphs as cuda_graphs
from extras.graphs import GraphTask
from extras.links import LinkTask
from extras.regression import NodeNumbers, Scale
from extras.relational import NodeInputs
from extras.times import degrees_at
from features import CachedFeatures, FeatureRing
from loader import Batch, Graph, NodeLoader
from native import build, sampler_gpu
from run import adam, own_model
from run.placement import Used
from run.report import Clock
from run.run import Run
from sampler import Block, NeighborSampler
from store import CodedFeatures
from tasks import metrics
from tasks.node import NodeTask
from tests import common
from tests.common import TINY, _end, _fork, _on_kernels, _random_graph, _run_here
from tests.stores import _molecules
from tests.test_ddp import _launch_within
from tests.test_layers import _emulate_layers, _net, _use, cuda_layers, layers_gpu  # noqa: F401
from tests.test_types import _typed_graph


class _Graph(torch.utils._python_dispatch.TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph on the CPU: a replay repeats the operations of its body in the same memory."""

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
        waits = "aten::_local_scalar_dense", "aten::nonzero", "aten::bincount"
        assert name not in waits, f"{name} waits for the GPU"
        alias = func._schema.is_mutable or any(r.alias_info for r in func._schema.returns)
        if not name.startswith("profiler::"):
            given = func, args, kwargs or {}, None if alias else out
            self.calls.append(functools.partial(self._again, *given))
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
    """Copy a launch with its current arguments, as a CUDA graph keeps it."""
    twin = build.Launch(launch._kernels, launch._name)
    ctypes.memmove(twin._memory, launch._memory, ctypes.sizeof(launch._memory))
    for i, value in launch._structs.items():
        twin._structs[i] = type(value).from_buffer_copy(value)
        twin._pointers[i] = ctypes.addressof(twin._structs[i])
    return twin


@pytest.fixture
def emulated_graphs(request, monkeypatch):
    """Run extras/step_graphs.py on the emulated kernels, with `_Graph` instead of CUDA's."""
    request.getfixturevalue("cuda_layers")
    _emulate_graphs(monkeypatch)


def _emulate_graphs(monkeypatch):
    go = build.Launch.__call__

    def launch(self, threads, stream):
        for graph in _Graph.recording:
            twin = _frozen(self)  # on the stream of the replay
            graph.calls.append(lambda twin=twin: go(twin, threads, twin._kernels.stream()))
        go(self, threads, stream)

    nothing = lambda *a: None  # noqa: E731
    monkeypatch.setattr(build.Launch, "__call__", launch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: types.SimpleNamespace(record=nothing, synchronize=nothing)
    )
    stream = types.SimpleNamespace(wait_event=nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    capturing = lambda: bool(_Graph.recording)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(torch.cuda, "set_stream", nothing)
    monkeypatch.setattr(cuda_graphs, "captured", lambda graph, pool=None, stream=None: graph)
    _use(layers_gpu, monkeypatch)
    monkeypatch.setattr(adam, "layers", layers_gpu)
    monkeypatch.setattr(metrics, "layers", layers_gpu)


def _sampling_on_gpu(s, folder):
    """Return what a run uses of a sampler on a GPU, on emulated kernels."""
    sample, backend = _on_kernels(s, folder)
    given = {"indices": s.engine.spec.indices, "edge_type": s.edge_type}
    return types.SimpleNamespace(engine=backend, sample=sample, **given)


def _graph_ring(net, x, labels, slots, **options):
    """Build the ring as train.py does: GraphSAGE averages the first hop in place, unless features have dropout."""
    in_place = isinstance(net.layers[0], model.SAGEConv) and not (net.input_dropout or net.edge_dim)
    options |= dict(aggregate=model.self_and_mean if in_place else None, gather=model.gather_rows)
    return FeatureRing(x, labels, slots=slots, dtype=torch.float32, **options)


def _step_graphs(
    draws,
    ring,
    net,
    optimizer,
    nodes,
    word="on",
    ranks=None,
    *,
    make=None,
    task=None,
    name="sage",
    **sizes,
):
    sizes = dict(batch_size=12, accumulate=1, negatives=2) | sizes
    sizes |= dict(fanout=[4, 3, 3], seed=5, prefetch=1)
    args = argparse.Namespace(**sizes, cuda_graph=word, precision="fp32", model=name)
    args.total_batch = args.batch_size * args.accumulate
    if task is None:
        # without a data set
        task = object.__new__(NodeNumbers if ring.labels.is_floating_point() else NodeTask)
        task.loss_kind = "mae"
        task.store = types.SimpleNamespace(split={"train": nodes}, num_classes=5)
        task.class_weight = None
    given = {"used": Used(), "sampler": draws, "ring": ring, "model": net}
    run = Run(ranks or ddp.Ranks(), args, task, **given)
    return (make or cuda_graphs.StepGraphs)(run, optimizer)


_LAW = ("replace", "weighted", "method", "layer_dependency", "batch_dependency")


def _small_run(folder, net, labels, x, degree=6, weighted=False, **law):
    """Make a sampler of a small graph, and the ring of a network -> (sampler, ring). Features of edges are in bfloat16."""
    indptr, indices = _random_graph(np.random.default_rng(18), 300, degree)
    if weighted:  # some nodes have fewer edges to draw than their degree
        law["weights"] = torch.arange(len(indices)) % 3 / 2
    net.degrees = model.graph_degrees(indptr, indices)
    features = {}
    if x.dtype == torch.int8:
        x = CodedFeatures(x, torch.linspace(0.01, 1, 2 * x.shape[1]).view(2, -1))
    if net.edge_dim:
        law["edge_ids"] = True
        features["edge_features"] = _EDGES[: len(indices), : net.edge_dim].bfloat16()
    s = NeighborSampler(indptr, indices, [4, 3, 3], seed=5, backend="torch", **law)
    return _sampling_on_gpu(s, folder), _graph_ring(net, x, labels, slots=2, **features)


def _run_of(folder, conv="sage", degree=6, **options):
    """Make what a step on a small graph takes -> (sampler, ring, network, optimizer)."""
    net, labels = _net(conv, (20, 8, 5), **options), torch.randint(5, (300,))
    return *_small_run(folder, net, labels, torch.randn(300, 20), degree), net, _adam(net)


def _batches(nodes, batch_size=12, **options):
    """Return a loader of nodes; options: `load_batch` of the graphs, or sampler and ring."""
    given = dict(batch_size=batch_size, seed=5, depth=1)
    return loader.NodeLoader(None, nodes, [4, 3, 3], **given, **options)


def _epoch(stepper, batches):
    """Take the steps of an epoch; yields each batch, and the sum of the losses so far."""
    losses = stepper.begin()
    for batch in batches:
        assert len(batch.y) == len(batch.seeds)
        stepper.step(batch, Clock(False))
        yield batch, losses.total.item()


_EDGES = torch.randn(9000, 3)
_STATIC_ROOM = cuda_graphs.static_room


def _no_more_than_the_smallest(sampler, task, args, first_hop, which=0):
    """Stands in for static_room, with room only for as many edges as the smallest (or a larger one) of a few batches has."""
    nodes = task.store.split["train"]
    _, room = _STATIC_ROOM(sampler, task, args, first_hop)
    # blocks on the CPU with as many sources as destinations are searched for global ids, which waits
    rows = [n + hop for hop, n in enumerate(room.rows)]
    drawn_later = len(args.fanout) - len(room.places)

    def draw(seeds):
        batch = Batch(seeds=seeds, step_seeds=seeds)
        trial = cuda_graphs.drawn(task, batch)
        blocks = sampler.sample(trial.nodes, 0, relabel_outer=not first_hop, **trial.options)
        return trial, [block.num_edges for block in blocks[drawn_later:][::-1]]

    batches = map(draw, nodes.split(args.batch_size)[:-1])
    trial, places = sorted(batches, key=lambda drawn: sum(drawn[1]))[which]
    return trial, room._replace(rows=rows, places=places)


@pytest.mark.parametrize(
    "conv, options, V, size",
    [
        ("rgcn", {"bases": 2, "edge_dim": 3}, 300, 12),
        ("rgcn", {}, 3000, 100),
        ("rgat", {"heads": 2}, 300, 12),
        ("gin", {}, 300, 12),
    ],
)
def test_a_step_of_a_typed_graph_is_a_cuda_graph(emulated_graphs, conv, options, V, size, tmp_path):
    """Edge types or degrees, and nodes with features or embeddings; compared with eager steps in each batch's shapes. With
    batches of 100 a slot holds one of a single seed, and fewer nodes in all than there is room for seeds."""
    M, count = (1800, 41) if V == 300 else (6000, 101)
    indptr, indices, kinds, _ = _typed_graph(np.random.default_rng(1), V, M, 3)
    labels, nodes = torch.randint(5, (V,)), torch.randperm(V)[:count]
    x, law, features = torch.randn(2 * V // 3, 7), {}, {}
    inputs = NodeInputs([(len(x), 7), (V // 3, 0)], 16)
    if conv != "gin":
        law["edge_type"] = kinds
        options = {"num_types": 3, **options}
    if "edge_dim" in options:
        features["edge_features"] = _EDGES[:M]
        law["edge_ids"] = True
    net = model.GNN(7, 16, 5, conv=conv, num_layers=3, dropout=0.5, inputs=inputs, **options)
    net.degrees = model.graph_degrees(indptr, indices)
    plain = copy.deepcopy(net)
    s = NeighborSampler(indptr, indices, [4, 3, 3], seed=5, backend="torch", **law)
    draws = _sampling_on_gpu(s, tmp_path)
    ring = _graph_ring(net, x, labels, slots=2, **features)
    clipped = {"clip_norm": 1e-3}  # below it Adam's eps counts
    graphs = _step_graphs(draws, ring, net, _adam(net, **clipped), nodes, batch_size=size)
    assert graphs.captured
    static = _steps(graphs, _batches(nodes, size, load_batch=graphs.load_batch))
    plain_steps = _eager(graphs, plain, **clipped)
    eager = _steps(plain_steps, _batches(nodes, size, sampler=draws, ring=ring))
    ours, theirs = ([loss for _, loss in steps] for steps in (static, eager))
    assert ours == pytest.approx(theirs, rel=1e-4)
    for one, other in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_update_is_one_function_eager_and_captured(
    accumulate, emulated_graphs, tmp_path, monkeypatch
):
    """A change of `Adam.step`, and of the rate at each step, acts in both steppers."""
    step = adam.Adam.step

    def halved(self):
        step(self)
        with torch.no_grad():
            torch._foreach_mul_(self.param_groups[0]["params"], 0.5)

    monkeypatch.setattr(adam.Adam, "step", halved)
    nodes = torch.randperm(300)[:53]
    draws, ring, net, optimizer = _run_of(tmp_path, "gcn")
    plain = copy.deepcopy(net)
    graphs = _step_graphs(draws, ring, net, optimizer, nodes, accumulate=accumulate)
    assert graphs.captured
    loaders = [
        _batches(nodes, accumulate=accumulate, **given)
        for given in ({"load_batch": graphs.load_batch}, {"sampler": draws, "ring": ring})
    ]
    sizes = []
    for stepper, batches in zip((graphs, _eager(graphs, plain)), loaders):
        assert len([*_steps(stepper, batches)]) == 2 * batches.steps * accumulate
        sizes.append([p.detach().abs().max().item() for p in stepper.run.model.parameters()])
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3) and max(sizes[0]) < 0.1


def _adam(net, state=None, **options):
    # with the usual eps a gradient near zero makes a step of either sign
    optimizer = adam.Adam(net.parameters(), eps=2**-10, fused=True, **options)
    if state:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return optimizer


def test_captured_adam_steps_in_pieces_have_the_same_bits(monkeypatch):
    """Of a parameter that is cut, one that ends a piece, one that is not contiguous, and small ones. A gradient from a vector of all may have another layout than the parameter."""
    values, sizes = [torch.randn(n) for n in ((300, 20), (2048,), (7,), (1, 1))], []
    values.insert(2, torch.randn(90, 30).t())
    fused_adam = torch._fused_adam_

    def noted(params, *args, **options):
        sizes.extend(p.numel() for p in params)
        fused_adam(params, *args, **options)

    monkeypatch.setattr(torch, "_fused_adam_", noted)
    ends = []
    for captured in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        params = [v.clone().requires_grad_() for v in values]
        optimizer = adam.Adam(params, lr=0.01, weight_decay=0.003, fused=True)
        optimizer.param_groups[0].update(capturable=captured, lr=torch.tensor(0.01))
        sizes.clear()
        for step in range(3):
            torch.manual_seed(step)
            for p in params:
                grad = torch.randn(p.shape)
                p.grad = grad if captured else torch.empty_like(p).copy_(grad)
            optimizer.step()
        ends.append([*params, *(t for p in params for t in optimizer.state[p].values())])
    assert sizes == [2048, 2048, 1904, 2048, 2700, 7, 1] * 3
    assert len(ends[0]) == 20 and all(map(torch.equal, *ends))


def _eager(graphs, net, **options):
    """Return the eager stepper of the same run for another network."""
    run = copy.copy(graphs.run)
    run.model = net
    return train.Eager(run, net, _adam(net, **options))


@pytest.mark.parametrize("conv, degree", [("gcn", 6), ("sage", 0)])
def test_a_cuda_step_graph_has_room_for_more_seeds_than_there_are(
    emulated_graphs, conv, degree, tmp_path
):
    """Also in a graph without edges."""
    nodes, run = torch.randperm(300)[:10], _run_of(tmp_path, conv, degree)
    graphs = _step_graphs(*run, nodes, batch_size=600)
    (batch,) = _batches(nodes, 600, load_batch=graphs.load_batch)
    assert graphs.captured and batch.x.shape == graphs.slots[0].x.shape


def test_a_cuda_step_graph_has_no_less_room_for_sources_than_for_destinations():
    """Of two hops, of which the inner one varies more: the outer one reaches all nodes that there are to reach."""
    nodes, block = itertools.cycle([(250, 230), (250, 250)]), types.SimpleNamespace
    draw = lambda *a, **k: [block(num_src=n, num_edges=1) for n in next(nodes)]  # noqa: E731
    engine = block(shapes=lambda S: ([S, 900, 900], [900, 900]))
    args = argparse.Namespace(seed=5, batch_size=9, total_batch=9, fanout=[4, 4])
    draws = block(sample=draw, engine=engine)
    task = object.__new__(NodeTask)
    task.store = block(split={"train": torch.arange(90)})
    rows = cuda_graphs.static_room(draws, task, args, False)[1].rows
    assert rows == [9, 512, 512]


def _steps(graphs, batches):
    """Take the steps of two epochs, each with a learning rate of its own; yields each batch and its loss."""
    while batches.epoch < 2:
        graphs.optimizer.set_rate(2.0 ** -(7 + batches.epoch))
        before = 0
        for batch, losses in _epoch(graphs, batches):
            yield batch, losses - before
            before = losses


@pytest.mark.parametrize(
    "conv, room, options",
    [
        ("sage", "enough", dict(norm="layer", replace=True, dtype=torch.bfloat16)),
        ("sage", "tight", dict(method="labor", batch_dependency=3, dtype=torch.int8)),
        ("sage", "tight", dict(weighted=True)),
        ("sage", "tight, refused", dict(input_dropout=0.3, edge_dim=3, several=True)),
        ("sage-pool", "tight", dict(norm="layer", residual=True, replace=True)),
        ("gcn", "tight", dict(method="labor", layer_dependency=True, dtype=torch.bfloat16)),
        ("gcn", "enough", dict(recompute=True, dtype=torch.int8, several=True)),
        ("gat", "tight", dict(edge_dim=3, weighted=True)),
        ("gine", "enough", dict(edge_dim=3, norm="layer")),
        ("gcn", "tight", dict(target_scale=Scale(5))),
    ],
)
def test_a_cuda_step_gives_the_same_bits_with_graphs_and_without(
    emulated_graphs, conv, room, options, tmp_path, monkeypatch
):
    """Also if capture is refused, with batches that do not fit, and from checkpoints; compared with eager steps."""
    nodes, refused = torch.randperm(300)[:53], "refused" in room
    several, dtype = options.pop("several", False), options.pop("dtype", torch.float)
    labels = torch.randint(2, (300, 5)).to(torch.int8) if several else torch.randint(5, (300,))
    if "target_scale" in options:  # numbers, which may be -1
        labels = -torch.randint(5, (300, 5)).double()
    law = {word: options.pop(word) for word in _LAW if word in options}
    x, first = torch.randn(300, 20).to(dtype), _net(conv, (20, 8, 5), dropout=0.5, **options)
    if "tight" in room:
        monkeypatch.setattr(cuda_graphs, "static_room", _no_more_than_the_smallest)
    if refused:
        graph = lambda: (_ for _ in ()).throw(RuntimeError("no capture here"))  # noqa: E731
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    ends = []
    for parts in ([("on", 10)], [("off", 4), ("on", 3), ("off", 3)]):
        given, state, place, repeated, losses = first, None, None, 0, []
        for word, count in parts:  # each goes on from the checkpoint of the one before
            net = copy.deepcopy(given)
            draws, ring = _small_run(tmp_path, net, labels, x, **law)
            graphs = _step_graphs(draws, ring, net, _adam(net, copy.deepcopy(state)), nodes, word)
            # captured and tried, and nothing has changed
            assert all(map(torch.equal, graphs.parameters, given.parameters()))
            assert graphs.captured == (word == "on" and not refused)
            assert ("no capture here" in str(graphs.failure)) == (refused and word == "on")
            batches = _batches(nodes, load_batch=graphs.load_batch)
            if place:
                batches.load_state_dict(place)
            for batch, loss in itertools.islice(_steps(graphs, batches), count):
                assert torch.equal(batch.y, labels[batch.seeds])
                losses.append(loss)
                place = batches.state_dict()
            repeated += graphs.repeated
            given, state = net, graphs.optimizer.state_dict()["state"]
        assert len(losses) == 10 and (0 < repeated < 10) == ("tight" in room)
        moments = (t for state in graphs.optimizer.state.values() for t in state.values())
        ends.append([losses, *graphs.parameters, *moments])
    assert ends[0].pop(0) == ends[1].pop(0) == losses
    assert len(ends[0]) > 20 and all(map(torch.equal, *ends))
    net = copy.deepcopy(first)
    draws, ring = _small_run(tmp_path, net, labels, x, **law)
    eager = _steps(_eager(graphs, net), _batches(nodes, sampler=draws, ring=ring))
    assert losses == pytest.approx([loss for _, loss in eager], rel=1e-4)
    theirs = [*net.parameters()]
    torch.testing.assert_close(ends[0][: len(theirs)], theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "law",
    [
        {},
        dict(method="labor", batch_dependency=3),
        dict(weights=True),
        dict(edge_type=True),
        dict(disjoint=True, edge_times=True),
    ],
)
def test_a_captured_frame_takes_each_batch_s_excluded_edges_and_step(
    emulated_graphs, law, tmp_path
):
    """Samples are the sampler's; edges in any order, some of them twice. More than there is room for set FULL."""
    indptr, indices, kinds, _ = _typed_graph(np.random.default_rng(2), 120, 900, 3)
    M = len(indices)
    columns = dict(weights=torch.arange(M) % 5 / 2, edge_times=torch.arange(M), edge_type=kinds)
    law = {word: columns.get(word, value) for word, value in law.items()}
    s = NeighborSampler(indptr, indices, [4, 3], seed=5, backend="torch", edge_ids=True, **law)
    frame = common._frame(common._emulated(s, tmp_path), 12, 2, excludes=40)
    frame.fill(torch.arange(12), 0, times=torch.zeros(12).long() if s.timed else None)
    frame.start()
    with _Graph() as graph:
        frame.start()
    for step in range(-2, 8):
        seeds = torch.randperm(120)[: 10 - step]
        times = torch.randint(M, seeds.shape) if s.timed else None
        edges = s.sample(seeds, step, times)[-1].edge_ids
        exclude = [None, edges, edges.flip(0).repeat(2), edges[:5]][step % 4]
        fits = exclude is None or len(exclude) <= 40
        frame.fill(seeds, step, exclude=exclude, times=times)
        graph.replay()
        assert frame.status == (0 if fits else sampler_gpu.FULL)
        want = s.sample(seeds, step, times, exclude=exclude)[::-1]
        for block, expected in zip(frame.cut(), want) if fits else ():
            assert all(map(torch.equal, block[:4], expected[:4]))
            assert not s.spec.disjoint or torch.equal(block.src_seed, expected.src_seed)
            assert exclude is None or not torch.isin(block.edge_ids, exclude).any()


class _Mark:
    """An object that can be referred to weakly."""


@pytest.mark.parametrize("conv", ["sage", "gat"])
def test_no_node_of_an_earlier_step_is_alive_when_a_capture_begins(
    emulated_graphs, conv, tmp_path, monkeypatch
):
    """Autograd would wait for the stream of a parameter's node, which ends a capture. Also with losses in cycles. Sampling is
    captured on the ring's stream: a graph's kernels have the priority of that one, on whichever they are replayed."""
    marks, captures, work = [], [], Run.loss
    draws, ring, net, optimizer = _run_of(tmp_path, conv, dropout=0.5)
    side, current = object(), [torch.cuda.current_stream()]
    alive = lambda: sum(mark() is not None for mark in marks)  # noqa: E731

    def loss(run, *args):
        value = work(run, *args)
        for p in net.parameters():
            node = p.view_as(p).grad_fn.next_functions[0][0]
            node.metadata["mark"] = mark = _Mark()  # lives as long as the node
            marks.append(weakref.ref(mark))
        if not captures:
            del mark, node
            assert alive()
            cycle = [value]
            cycle.append(cycle)
        return value

    @contextmanager
    def on_side(slot, blocks=()):
        current.append(side)
        yield
        current.pop()

    def captured(graph, pool=None, stream=None):
        captures.append((stream, alive()))
        return graph

    monkeypatch.setattr(Run, "loss", loss)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(ring, "stream", on_side)
    monkeypatch.setattr(cuda_graphs, "captured", captured)
    gc.disable()  # nothing else collects
    try:
        assert _step_graphs(draws, ring, net, optimizer, torch.arange(40)).captured
    finally:
        gc.enable()
    # of the first slot: `_Graph` keeps tensors of what it captures
    assert captures[:2] == [(side, 0), (None, 0)]
    assert [stream for stream, _ in captures[2:]] == [side, None]


@pytest.mark.parametrize("fails", [None, "body", "end", "both"])
def test_a_failed_capture_has_ended_for_the_allocator_too(fails, monkeypatch):
    """CUDAGraph.capture_end tells neither it nor, in torch 2.11, the generator; the first error is reported. No finalizer runs
    during a capture."""
    told, finalized, given = [], [], []

    @contextmanager
    def graph(*args, **options):
        given.append((args, options))
        try:
            yield
        finally:
            if fails in ("end", "both"):
                raise RuntimeError("of capture_end")

    def body():
        cycle = [_Mark()]
        weakref.finalize(cycle[0], finalized.append, "a finalizer that synchronizes")
        cycle.append(cycle)
        del cycle
        made = [[] for _ in range(3 * gc.get_threshold()[0])]
        assert made and not finalized
        if fails in ("body", "both"):
            raise AttributeError("of the body")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    state = lambda of: told.append(("generator", of))  # noqa: E731
    generator = types.SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=state)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        tell = functools.partial(lambda name, *args: told.append((name, *args)), name)
        monkeypatch.setattr(torch._C, name, tell, raising=False)
    error = {"body": AttributeError, "both": AttributeError, "end": RuntimeError}.get(fails)
    with pytest.raises(error, match="of the body|of capture") if error else nullcontext():
        with cuda_graphs.captured("a graph", stream="a stream"):
            body()
    expected = [(f"_cuda_{name}", 1, (0, 7)) for name in ("endAllocateToPool", "releasePool")]
    assert told == [*expected, ("generator", "before")] * bool(fails) and gc.isenabled()
    mode = dict(capture_error_mode="thread_local")
    assert given == [(("a graph", (0, 7), "a stream"), mode)]
    gc.collect()
    assert finalized


def _drawing_task(kind, timed):
    """Make a task whose batches are drawn -> (task, columns of its edges), for pairs or for nodes at their times."""
    indptr, indices = _random_graph(np.random.default_rng(18), 300, 6)
    times = torch.randint(20, (300,))
    row = torch.repeat_interleave(indptr.diff())
    edge_time = torch.randint(20, (len(indices),))
    edge_time = edge_time[(row * 20 + edge_time).argsort(stable=True)]
    graph = types.SimpleNamespace(indptr=indptr, indices=indices, num_nodes=300)
    if timed:
        graph.edge_time = edge_time
    if kind == "node":
        task = object.__new__(NodeTask)
        task.store, task.draw = graph, loader.seeds_at(times)
        graph.split = {"train": torch.randperm(300)[:49]}  # the last pass has no seeds
    else:
        task = object.__new__(LinkTask)
        task.store = link.split_edges(graph, "3/48/49", timed=timed)
        csc = task.store.indptr, task.store.indices
        common = link.CommonNeighbours(link.Edges(*csc), task.store.edge_time if timed else None)
        common = common if kind == "softmax" else None
        task.links = link.Links(
            task.store, *csc, negatives=2, softmax=kind == "softmax", common=common
        )
        task.draw = task.links.draw
    return task, {"edge_times": task.store.edge_time, "window": 15} if timed else {}


@pytest.mark.parametrize(
    "kind, conv, timed, tight",
    [
        ("link", "sage", False, False),
        ("softmax", "gcn", True, True),
        ("node", "sage", True, False),
        ("node", "gin", True, True),
    ],
)
def test_a_step_of_drawn_batches_is_a_cuda_graph(
    emulated_graphs, kind, conv, timed, tight, tmp_path, monkeypatch
):
    """Pairs with their negatives, without the step's own edges, and seeds with times, two passes a step: the losses of eager
    steps in the shapes of each batch, and the same bits with CUDA graphs and without."""
    task, law = _drawing_task(kind, timed)
    if tight:
        narrow = functools.partial(_no_more_than_the_smallest, which=-1)
        monkeypatch.setattr(cuda_graphs, "static_room", narrow)
    x, labels = torch.randn(300, 20), torch.randint(5, (300,))
    first = _net(conv, (20, 8, 5), dropout=0.5, norm="layer" if conv == "gin" else "none")
    if kind != "node":
        first.scorer = link.Scorer("ncn" if kind == "softmax" else "mlp", 5)
    csc = task.store.indptr, task.store.indices
    if conv == "gcn":
        first.degrees = model.graph_degrees(*csc)
    s = NeighborSampler(*csc, [4, 3, 3], seed=5, backend="torch", **law)
    ends, sums, answers = [], [], []
    examples = task.store.split["train"]
    draws = _sampling_on_gpu(s, tmp_path)
    for word in ("on", "off", "eager"):
        net = copy.deepcopy(first)
        ring = _graph_ring(net, x, labels, slots=2)
        if conv == "gin":  # degrees by the kernel and by torch operations
            engine = None if word == "eager" else draws.engine
            net.degrees = degrees_at(types.SimpleNamespace(spec=s.spec, engine=engine))
        if word != "eager":
            given = {"task": task, "accumulate": 2}
            stepper = graphs = _step_graphs(draws, ring, net, _adam(net), examples, word, **given)
            options = {"load_batch": graphs.load_batch}
        else:
            stepper = _eager(graphs, net)
            options = {"sampler": draws, "ring": ring, "draw": task.draw}
        batches = _batches(examples, accumulate=2, **options)
        steps = [(b.y.clone(), losses) for b, losses in _epoch(stepper, batches)]
        answers.append([y for y, _ in steps])
        sums.append([losses for _, losses in steps])
        if word == "on":
            assert graphs.captured and (0 < graphs.repeated < len(steps)) == tight
        ends.append([p.detach() for p in net.parameters()])
    assert all(map(torch.equal, answers[0], answers[-1]))
    assert len(examples) % 12 and sums[0] == sums[1] == pytest.approx(sums[2], rel=1e-5)
    assert all(map(torch.equal, *ends[:2]))
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "answers, words",
    [
        ({"targets": np.where(np.arange(90).reshape(30, 3) % 7, [[2.5, 1, 0]], np.nan)}, ""),
        ({"labels": np.arange(30) % 3}, "--batch-size 3 --accumulate 2"),
        ({"labels": np.arange(90).reshape(30, 3) % 5 % 2}, "--precision bf16 --pooling max"),
    ],
)
def test_a_step_of_small_graphs_is_a_cuda_graph(
    emulated_graphs, answers, words, tmp_path, monkeypatch
):
    """With targets, some of them missing, classes, several labels; compared with eager steps. One
    process of a step may have no graph."""
    pytest.importorskip("lmdb")
    np.savez(tmp_path / "m.npz", **_molecules(tmp_path / "m.npz", count=30) | answers)
    ignored = ":ignore=targets" * ("labels" in answers)
    words = f"--task graph --dataset {tmp_path}/m.npz{ignored} --root {tmp_path} --hidden 8 --num-layers 2 {words}"
    words += " --max-nodes 30 --max-edges 40 --dropout 0.5 --gpus 0"
    args = train.parse_args(words.split())
    path = train.prepare(args)
    stub = dict(stream=lambda slot: nullcontext(), copy=torch.clone, event=lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)

    def begin(word):
        task = GraphTask(args, path, lambda line: None)
        plan = copy.copy(args)
        vars(plan).update(prefetch=1, sample_threads=1, cuda_graph=word, **task.settled(args))
        task.attach(ddp.Ranks(), plan)
        task.copies = types.SimpleNamespace(**stub)
        torch.manual_seed(3)
        net = task.build(plan)
        task.set_buffers(net)
        run = Run(ddp.Ranks(), plan, task, used=Used(), sampler=None, ring=None, model=net)
        if word == "eager":
            return run, train.Eager(run, None, _adam(net))
        assert task.unsupported() is None
        return run, cuda_graphs.StepGraphs(run, _adam(net))

    ends = []
    for word in ("eager", "off", "on"):
        run, stepper = begin(word)
        assert word == "eager" or stepper.captured == (word == "on")
        batches = run.loader(run.store.split["train"], load_batch=stepper.load_batch)
        sums = [losses for _, losses in _epoch(stepper, batches)]
        none = stepper.load_batch(Batch(seeds=torch.arange(0), total=3), 0)
        assert [losses for _, losses in _epoch(stepper, [none])] == [0]
        ends.append((sums, [p.detach().clone() for p in run.model.parameters()]))
    assert all(map(torch.equal, ends[1][1], ends[2][1])) and ends[1][0] == ends[2][0]
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-2 if "bf16" in words else 1e-5)
    if "bf16" not in words:
        torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-3, atol=1e-5)


def test_a_cuda_step_graph_that_differs_is_not_used(emulated_graphs, tmp_path, monkeypatch):
    """A graph whose loss differs, or counts padding, is detected before it trains; the batch of the trial has fewer examples
    than there is room for."""
    run = _run_of(tmp_path, dropout=0.5)
    before = [p.detach().clone() for p in run[2].parameters()]
    take = cuda_graphs.Slot.sample
    mean = lambda task, net, output, y: output.square().mean() * 12  # noqa: E731
    for owner, name, wrong, off in (
        (NodeTask, "loss", mean, "0.0"),
        (cuda_graphs.Slot, "sample", lambda slot: (slot.frame.start(), slot.x.zero_()), "100.0"),
        (cuda_graphs.Slot, "sample", lambda slot: (take(slot), slot.y.zero_()), "0.0"),
    ):
        words = rf"input is {off}% off, their losses are \[.*\], and \[.*\] without graphs"
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=words):
            patch.setattr(owner, name, wrong)
            _step_graphs(*run, torch.arange(40))
    assert all(map(torch.equal, before, run[2].parameters()))


def test_padding_has_no_degree_at_a_time(tmp_path):
    """Nor is its place before the offsets read."""
    offsets = torch.tensor([-9, 0, 2, 3])[1:]
    times = torch.tensor([1, 5, 3])
    s = NeighborSampler(offsets, torch.tensor([1, 0, 1]), [2], edge_times=times, backend="torch")
    _, backend = _on_kernels(s, tmp_path)
    degrees = backend.degrees(torch.tensor([0, -1, 1]), torch.tensor([2, 9, 9]))
    assert degrees.tolist() == [1, 0, 1]
    assert not backend.outcome.any()


@pytest.mark.parametrize("conv, listed", [("sage", 2), ("gcn", 2), ("gat", 3)])
def test_the_sampling_graph_lists_edges_for_the_training_graph(
    emulated_graphs, conv, listed, tmp_path, request
):
    """Those of blocks whose rows have a gradient; GCN's shares need what the model computes."""
    launched = request.getfixturevalue("cuda_layers")
    run = _run_of(tmp_path, conv)
    for word in ("on", "off"):
        graphs = _step_graphs(*run, torch.arange(40), word)
        for slot in graphs.slots:
            launched.clear()
            graphs._sample(slot, cuda_graphs.Drawn(torch.arange(12), {}, None, 7))
            sampling = [*launched]
            launched.clear()
            graphs._train(slot)
            assert slot.frame.listing
            assert {"list_sizes", "list_edges", "destinations"}.isdisjoint(sampling + launched)
            for launches in (sampling, launched):
                late = launches is launched
                assert launches.count("list_in_order") == (late == (conv == "gcn")) * listed
    batch = graphs.load_batch(Batch(seeds=torch.tensor([1, 1]), total=2), 0)
    with pytest.raises(ValueError, match="comes twice"):
        graphs.step(batch, Clock(False))


# where one rank fails while the graphs of a run are made: function, which of its calls, whether the others go on without
_FAILING = [
    (cuda_graphs, "static_room", 0, False),
    (cuda_graphs.StepGraphs, "_compute", 2, False),
    (cuda_graphs.StepGraphs, "_compute", 4, True),  # in the capture
    (cuda_graphs.StepGraphs, "_train", 1, False),
    (cuda_graphs.StepGraphs, "_restore", 2, False),
]


def _one_rank_fails(ranks, folder):
    """Build the graphs of a run while rank 1 fails, at one place after another."""
    with pytest.MonkeyPatch.context() as patch:
        _emulate_layers(folder, patch)
        _emulate_graphs(patch)
        patch.setattr(cuda_graphs, "unsupported", lambda run: None)
        torch.manual_seed(0)
        for owner, name, which, go_on in _FAILING:
            calls, work, run = itertools.count(), getattr(owner, name), _run_of(folder)

            def fails(*args, **options):
                if next(calls) == which and ranks.rank == 1:
                    raise RuntimeError(f"no room for {name}")
                return work(*args, **options)

            with patch.context() as failing:
                failing.setattr(owner, name, fails)
                both = dict(ranks=ranks, make=cuda_graphs.build)
                graphs, said = _step_graphs(*run, torch.arange(40), **both, accumulate=2)
            assert (graphs is not None) == go_on and next(calls) > which, (name, which, said)
            why = [cuda_graphs.ELSEWHERE, f"no room for {name}"][ranks.rank]
            assert why in said, (name, which, said)
            if graphs:  # rank 0 replays what rank 1 launches
                assert graphs.captured == (ranks.rank == 0) and not graphs.begin().total
                options = dict(rank=ranks.rank, world=2, accumulate=2, load_batch=graphs.load_batch)
                sums, reduce = [], cuda_graphs.dist.all_reduce
                noted = lambda flat: sums.append(reduce(flat))  # noqa: E731
                with patch.context() as counting:
                    counting.setattr(cuda_graphs.dist, "all_reduce", noted)
                    list(_epoch(graphs, _batches(torch.arange(40), **options)))
                assert len(sums) == 1  # of two batches
                assert graphs.loss_sum and ranks.check_equal(run[2]) is None
    assert ranks.sum(1) == [2]


def test_a_cuda_step_graph_that_fails_on_one_rank_leaves_no_other_waiting(tmp_path):
    _end(_fork(tmp_path / "out", _launch_within, 90, _one_rank_fails, 2, tmp_path))


def test_training_prints_why_there_are_no_cuda_graphs(tiny, monkeypatch, capsys):
    monkeypatch.setattr(cuda_graphs, "build", lambda run, optimizer: (None, "of a reason"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = f"train.py --gpus 0 --dataset {tiny} --epochs 1 --fanout 3,3"
    monkeypatch.setattr(sys, "argv", words.split())
    assert train.main() == 0
    assert "graph   no CUDA graphs: of a reason" in capsys.readouterr().out
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # a run on the CPU takes no memory of a GPU


_OWN = """
from torch import nn
from torch.nn import functional as F

from model import SAGEConv


class Bare(nn.Module):
    def __init__(self, in_dim, num_classes, reads_padding=False):
        super().__init__()
        self.conv = SAGEConv(in_dim, num_classes)
        self.reads_padding = reads_padding

    def forward(self, blocks, x):
        for block in blocks[:-1]:
            x = x[: block.num_dst]
        out = self.conv(blocks[-1], F.dropout(x, 0.5, self.training))
        last = x[blocks[-1].indices.long()].sum(0) if self.reads_padding else x.new_zeros(20)
        return out + last[: out.shape[1]]


class Net(Bare):
    padded = True


class Mine(SAGEConv):
    edge_features = "can"
"""


def test_a_network_of_the_user_is_captured_if_it_skips_padding(emulated_graphs, tmp_path):
    """Dropout is torch's: its masks, by step and seeds, are the same with graphs and without, and each batch has its own."""
    name, nodes, ends = f"{tmp_path}/own.py:Net", torch.arange(50), []
    (tmp_path / "own.py").write_text(_OWN)
    labels, x = torch.randint(5, (300,)), torch.randn(300, 20)

    def begin(word, **options):
        torch.manual_seed(1)
        net = own_model.build(name, [f"{key}={value}" for key, value in options.items()], 20, 5)
        net.input_dropout, net.edge_dim, net.layers = 0, 0, [None]  # what `_small_run` asks a GNN
        run = _small_run(tmp_path, net, labels, x)
        return _step_graphs(*run, net, _adam(net), nodes, word, name=name)

    for word in ("on", "off"):
        graphs = begin(word)
        steps = _epoch(graphs, _batches(nodes, load_batch=graphs.load_batch))
        losses = [losses for _, losses in steps]
        assert graphs.captured == (word == "on") and graphs.repeated == 0
        ends.append([torch.tensor(losses), *graphs.run.model.parameters()])
        with pytest.raises(RuntimeError, match="their losses are"):
            begin(word, reads_padding=True)
    assert all(map(torch.equal, *ends)) and graphs.run.model.training


def test_a_seed_that_a_cuda_graph_would_repeat_is_refused(monkeypatch):
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    with pytest.raises(RuntimeError, match="dropout needs a seed"):
        model.relu_dropout(torch.ones(2, 3), 0.5)


def test_a_cuda_step_graph_that_cannot_be_says_why(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(_OWN)
    indptr, indices = _random_graph(np.random.default_rng(18), 50, 6)
    ring = dict(on_device=True, features=torch.zeros(3, 1))
    typed, edges = {"node_types": {"a": (3, 1)}}, {"used": Used(edges=torch.zeros(3, 3))}
    kernels = "the sampler's kernels are not there"  # all else would do
    for words, changed, why in (
        ("--norm batch", {}, "--norm batch"),
        (f"--model {own}:Bare", {}, f"--model {own}:Bare does not state padded = True"),
        (f"--model {own}:Mine --checkpoint-activations", {}, "a layer of your own"),
        ("--precision fp64", {}, "--precision fp64"),
        ("--accumulate 2", typed, "and --accumulate 2 adds up whole"),
        ("--fanout=-1,4", {}, "--fanout -1,4 has no bound"),
        ("--fanout 4", {}, "one layer"),
        ("--mode cpu-cpu", dict(on_device=False), "--mode cpu-cpu"),
        ("", dict(features=None), "behind a cache"),
        ("--model gine", dict(used=Used(edges=torch.zeros(0, 3))), "there are no edges"),
        ("", dict(padded=False), "the loss of --task node may count padding"),
        ("--model gat", edges, kernels),
        ("--fanout 4,49", dict(used=Used(seen={"edge_times": 1})), kernels),
        (f"--model {own}:Net", {}, kernels),
        ("--model rgat --fanout any=3,49", typed, kernels),
        ("--checkpoint-activations --accumulate 2", {}, kernels),
    ):
        args = train.parse_args(["--fanout", "4,3", *words.split()])
        s = NeighborSampler(indptr, indices, [4, 3], backend="torch")
        has = {"labels": torch.zeros(3), "node_types": {}, "used": Used()}
        has |= {"placed": True, "padded": True, "are_links": False}
        data = types.SimpleNamespace(**{**has, **ring, **changed})
        data.store = data
        run = dict(plan=args, sampler=s, ring=data, store=data, task=data, used=data.used)
        said = cuda_graphs.unsupported(types.SimpleNamespace(**run, ranks=ddp.Ranks(gpus=1)))
        assert why in said, said
        is_placement = "on_device" in changed or "cache" in why or "kernels" in why
        assert bool(cuda_graphs.unsupported_reasons(args, data, data.used)) != is_placement
    run = types.SimpleNamespace(**run, ranks=ddp.Ranks())
    assert cuda_graphs.unsupported(run) == "there is no GPU"
    sage = types.SimpleNamespace(conv=model.SAGEConv, input_dropout=0.0, mode="cuda-cuda")
    for asked, averages in ((True, False), (None, True)):
        sage.edge_features = asked
        assert cuda_graphs.averages_in_place(sage, data, torch.float32) == averages
    assert not cuda_graphs.averages_in_place(sage, data, torch.int8)  # integers, not codes
    data.features = CodedFeatures(torch.zeros(3, 2, dtype=torch.int8), torch.ones(2, 2))
    assert cuda_graphs.averages_in_place(sage, data, torch.int8, torch.bfloat16)
    sage.mode = "cpu-cpu"
    assert cuda_graphs.averages_in_place(sage, data, torch.int8)
    for mode, dtype in (("cpu-cuda", torch.int8), ("pinned-cuda", torch.float32)):
        sage.mode = mode  # codes move as they are; a row a node moves over PCIe
        assert not cuda_graphs.averages_in_place(sage, data, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, mode",
    [(name, "cuda-cuda") for name in ("sage", "sage-pool", "gcn", "gin", "gat")]
    + [("sage", "pinned-cuda"), ("gcn", "pinned-cuda")],
)
def test_a_cuda_step_graph_on_a_gpu_gives_the_losses_of_a_run_without(name, mode, tmp_path, capsys):
    words = f"--dataset {TINY} --model {name} --mode {mode} --fanout 5,4,3 --batch-size 32"
    words += " --epochs 3 --precision fp32 --cuda-graph "
    on, off = (_run_here(tmp_path, words + how)[0] for how in ("on", "off"))
    assert "CUDA graphs with room for" in capsys.readouterr().out
    losses, expected = ([entry["loss"] for entry in log if "epoch" in entry] for log in (on, off))
    assert losses == expected and len(losses) == 3


_CUDA = torch.device("cuda", 0)
_TO, _DEVICE = torch.Tensor.to, torch.Tensor.device


class _Stream:
    """Stands in for a stream. clock: {stream or "host": number of its last access ordered before this stream}."""

    device, device_index = _CUDA, 0

    def __init__(self, order, name):
        self.order, self.name, self.clock, self.cuda_stream = order, name, {}, id(self)

    def wait_event(self, event):
        _join(self.clock, event.clock)

    def wait_stream(self, stream):
        _join(self.clock, stream.clock)

    def record_event(self, event):
        event.clock = dict(self.clock)
        return event

    def synchronize(self):
        _join(self.order.host, self.clock)

    def query(self):
        return True


class _Event:
    def __init__(self, order):
        self.order, self.clock = order, {}

    def record(self):
        self.order.current.record_event(self)

    def synchronize(self):
        _join(self.order.host, self.clock)


def _join(clock, other):
    for who, number in other.items():
        clock[who] = max(number, clock.get(who, 0))


class _Order(TorchDispatchMode):
    """CUDA emulated on host memory: operations run at once, and each access must be ordered after earlier ones to the
    same memory: by its stream, an event, a wait of the host or, for memory that is freed, record_stream.

    Attributes:
        faults: accesses that are not ordered. host: the accesses that the host has waited for.
    """

    def __init__(self, patch):
        super().__init__()
        self.faults, self.host, self.memory, self.number = [], {"host": 0}, {}, 0
        self.current = self.default = _Stream(self, "default")
        self.event = lambda enable_timing=False: _Event(self)
        self.set_stream = lambda stream: setattr(self, "current", stream)
        self.streams = [self.default]
        for name, stand_in in {
            "Stream": self._new_stream,
            "Event": self.event,
            # of a GPU that is named: tensors may lie on another than the current one
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "current_device": lambda: 0,
            "device": contextmanager(lambda device: (yield)),
            "synchronize": lambda: [stream.synchronize() for stream in self.streams],
            "_lazy_init": lambda: None,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.Tensor, "is_cuda", property(self._on_gpu))
        device = lambda t: _CUDA if self._on_gpu(t) else _DEVICE.__get__(t)  # noqa: E731
        patch.setattr(torch.Tensor, "device", property(device))
        patch.setattr(torch.Tensor, "to", lambda t, *args, **how: self._to(t, *args, **how))
        patch.setattr(torch.Tensor, "cpu", lambda t: self._to(t, "cpu"))
        patch.setattr(torch.Tensor, "record_stream", lambda t, s: self._of(t).recorded.add(s.name))
        patch.setattr(common._EmulatedKernels, "stream", lambda kernels: self.current.cuda_stream)
        patch.setattr(common._EmulatedKernels, "wait", lambda kernels: self.current.synchronize())
        seen = lambda kernels, *launch: self._launched(kernels, *launch)  # noqa: E731
        patch.setattr(common._EmulatedKernels, "seen", seen)
        status = sampler_gpu.Frame.status.fget

        def told(frame):  # before anything else that the GPU says of a batch
            self._use("what the GPU said, read", "host", [frame.read], [])
            return status(frame)

        patch.setattr(sampler_gpu.Frame, "status", property(told))

    def _new_stream(self, device, priority):
        self.streams.append(_Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def gpu(self, tensor):
        """Return the tensor as if the current stream had put it on the GPU."""
        tensor = tensor.detach().clone()
        self._add(tensor, "gpu")
        self._use("a copy to the GPU", self.current, [], [tensor])
        return tensor

    def _add(self, tensor, kind):
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        use = dict(gone=StorageWeakRef(storage), written={}, read={}, recorded=set())
        use |= dict(kind=kind, home=self.current, start=start, end=end)
        self.memory[storage._cdata] = types.SimpleNamespace(**use)

    def _of(self, tensor):
        return self.memory.get(tensor.untyped_storage()._cdata)

    def _on_gpu(self, tensor):
        memory = self._of(tensor)
        return memory is not None and memory.kind == "gpu"

    def _to(self, tensor, *args, **options):
        devices = (a for a in args if isinstance(a, (str, torch.device)))
        device = options.get("device", next(devices, None))
        if device is None or not self._on_gpu(tensor):
            return _TO(tensor, *args, **options)
        if torch.device(device).type == "cuda":
            return tensor
        return torch.ops.aten._to_copy(tensor, device=torch.device("cpu"))

    def _use(self, what, who, read, written):
        """Check and record an access by a stream, or by the host if `who` is "host"."""
        self._go()
        name, clock = (who, self.host) if who == "host" else (who.name, who.clock)
        _join(clock, self.host)  # it was launched after all that the host has waited for
        self.number += 1
        clock[name] = self.number
        for tensors, kinds in ((read, ["written"]), (written, ["written", "read"])):
            for memory in tensors:
                memory = memory if hasattr(memory, "written") else self._of(memory)
                for kind in kinds if memory else ():
                    for other, number in getattr(memory, kind).items():
                        if number > clock.get(other, 0):
                            fault = f"{other} may not have {kind} it yet"
                            self.faults.append(f"{what} on {name}: {fault}")
                if memory and tensors is written:
                    memory.written, memory.read = {name: self.number}, {}
                elif memory:
                    memory.read[name] = self.number

    def _go(self):
        """Return freed memory to its stream, even if others still use it: that is a fault."""
        for key, memory in [*self.memory.items()]:
            if memory.gone.expired():
                del self.memory[key]
                home = {**memory.home.clock}
                _join(home, self.host)
                for who, number in {**memory.read, **memory.written}.items():
                    late = number > home.get(who, 0) and who not in memory.recorded
                    if memory.kind == "gpu" and late:
                        self.faults.append(f"memory goes that {who} may still use")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func._schema.name
        device = kwargs.get("device")
        to_gpu, pinned = device is not None and device.type == "cuda", kwargs.get("pin_memory")
        kwargs.update({"device": torch.device("cpu")} if to_gpu else {})
        kwargs.update({"pin_memory": False} if pinned else {})
        waits = not kwargs.get("non_blocking", name == "aten::copy_" and len(args) > 2 and args[2])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        written = [
            t
            for argument, value in zip(func._schema.arguments, args)
            if argument.alias_info and argument.alias_info.is_write
            for t in tree_leaves(value)
        ] + [kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs]
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        on_gpu = to_gpu or any(map(self._on_gpu, given))
        old = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in old]
        for t in new:
            if pinned or to_gpu or device is None and on_gpu:
                self._add(t, "pinned" if pinned else "gpu")
        if made and not new and not written or "empty" in name:
            return out  # a view; nothing is accessed
        read = [t for t in given if not any(t is w for w in written)]
        if not on_gpu:
            self._use(name, "host", read, [*written, *new])
        else:
            self._use(name, self.current, read, [*written, *new])
            to_host = not made or not all(map(self._on_gpu, made))
            if to_host and waits:
                self.current.synchronize()
        return out

    def _launched(self, kernels, name, pointers, handle):
        """Record a launch of an emulated kernel: an access to all memory that its pointers lead to."""
        stream = next((s for s in self.streams if s.cuda_stream == handle), self.default)
        words = re.search(rf"^KERNEL {name}\(([^)]*)\)", kernels.source, re.MULTILINE)[1].split(",")
        read, written = [], []
        for word, address in zip(words, pointers):
            structs = {"batch_t": sampler_gpu.Batch, "part_t": sampler_gpu.Part}
            if struct := structs.get(word.split()[0]):
                value, source = struct.from_address(address), kernels.source
                nested = [kind for _, kind in struct._fields_ if hasattr(kind, "_fields_")]
                for field, c_type in [pair for one in (struct, *nested) for pair in one._fields_]:
                    if c_type is ctypes.c_void_p:
                        constant = re.search(rf"const \w+ \*{field};", source)
                        (read if constant else written).append(getattr(value, field))
            elif "*" in word:
                pointer = ctypes.c_void_p.from_address(address).value
                (read if "const" in word else written).append(pointer)
        lead = lambda pointers: [  # noqa: E731
            m for p in pointers for m in self.memory.values() if p and m.start <= p < m.end
        ]
        self._use(name, stream, lead(read), lead(written))


@pytest.fixture
def order(monkeypatch):
    order = _Order(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with order:
        yield order


def _ahead(ring, batches, sample, inside):
    """Prepare each batch before the previous one is used, as `prefetch` with depth 1; every third is not used."""
    before = None
    for i, seeds in enumerate(batches):
        with ring.stream(i % 2) if inside else nullcontext():
            batch = ring.fetch(i % 2, sample(seeds, i))
        if before and i % 3:
            before.wait()
            ids = (b.indices for b in before.blocks)
            [t.sum() for t in (before.x, before.y, *before.edges, *ids)]
        before = batch
        del batch


def _sampled_on_gpu(order, folder, fanouts=(4, 3)):
    indptr, indices = _random_graph(np.random.default_rng(1), 200, 6)
    s = NeighborSampler(indptr, indices, list(fanouts), seed=3, backend="torch", edge_ids=True)
    for name in ("indptr", "indices"):
        s.engine.spec = s.engine.spec._replace(**{name: order.gpu(getattr(s.engine.spec, name))})
    return _sampling_on_gpu(s, folder)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(
    "features, cached, blocks",
    [
        ("host", False, "host"),
        ("host", True, "host"),
        ("gpu", False, "host"),
        ("gpu", False, "gpu"),
        ("gpu", False, "gpu, the caller's"),
    ],
)
def test_streams_of_a_ring_are_in_order(order, features, cached, blocks, streams, tmp_path):
    put = order.gpu if features == "gpu" else lambda tensor: tensor
    table, labels, edges = map(put, (torch.randn(200, 4), torch.arange(200), torch.randn(3000, 2)))
    if blocks == "gpu":
        sample = _sampled_on_gpu(order, tmp_path).sample
    else:
        indptr, indices = _random_graph(np.random.default_rng(1), 200, 6)
        options = dict(seed=3, backend="torch", edge_ids=True)
        sample = on_host = NeighborSampler(indptr, indices, [4, 3], **options).sample
    if blocks == "gpu, the caller's":
        put = lambda block: Block(*map(order.gpu, block[:4]))  # noqa: E731
        sample = lambda seeds, step: list(map(put, on_host(seeds, step)))  # noqa: E731
    if cached:
        table = CachedFeatures(table, torch.arange(200.0), 100 * 16, _CUDA)
    options = dict(streams=streams, edge_features=edges)
    ring = FeatureRing(table, labels, slots=2, device=_CUDA, **options)
    _ahead(ring, torch.randperm(200).split(20), sample, blocks != "gpu, the caller's")
    order._go()
    assert order.faults == []


@pytest.mark.parametrize("seeds", [torch.arange(150), torch.arange(200) < 150])
def test_streams_of_a_loader_are_in_order(order, seeds, tmp_path):
    """Where node ids, or a mask, are given on the GPU."""
    graph = Graph(None, None, *map(order.gpu, (torch.randn(200, 4), torch.arange(200))))
    ring = FeatureRing(*graph[2:], slots=1, device="cuda")
    assert ring.copies.device == _CUDA  # the current GPU of this thread, also in others
    given = {"sampler": _sampled_on_gpu(order, tmp_path), "ring": ring, "depth": 0}
    loader = NodeLoader(graph, order.gpu(seeds), [4, 3], batch_size=20, **given)
    for _ in range(2):
        graph.features.add_(1)  # in place, before an epoch
        for batch in loader:
            assert batch.y.sum() == batch.seeds.sum()
            del batch
    order._go()
    assert order.faults == []


class _Descent(torch.optim.Optimizer):
    """An optimizer that does not read the learning rate from the GPU."""

    def prepare_capture(self, device):
        pass

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for p in group["params"]:
            p.sub_(p.grad * group["lr"])


@pytest.mark.usefixtures("emulated_graphs")
@pytest.mark.parametrize("conv, word", [("sage", "off"), ("gcn", "on")])
def test_streams_of_a_cuda_step_graph_are_in_order(order, conv, word, tmp_path, monkeypatch):
    """Each batch is sampled while the previous one is trained on; some do not fit."""
    monkeypatch.setattr(torch.cuda, "Event", order.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: order.current)
    monkeypatch.setattr(torch.cuda, "set_stream", order.set_stream)
    monkeypatch.setattr(cuda_graphs, "static_room", _no_more_than_the_smallest)
    net = _net(conv, (20, 8, 5), dropout=0.5)
    for p in net.parameters():
        p.data = order.gpu(p.data)
    optimizer = _Descent(net.parameters(), dict(lr=0.1))
    x, labels = order.gpu(torch.randn(200, 20)), order.gpu(torch.randint(5, (200,)))
    draws = _sampled_on_gpu(order, tmp_path, (4, 3, 3))
    ring = _graph_ring(net, x, labels, slots=2, device=_CUDA)
    net.degrees = order.gpu(model.graph_degrees(*_random_graph(np.random.default_rng(1), 200, 6)))
    nodes, ranks = torch.randperm(200)[:80], ddp.Ranks(gpus=1)
    graphs = _step_graphs(draws, ring, net, optimizer, nodes, word, ranks)
    graphs.begin()
    before = None
    for step, seeds in enumerate(nodes.split(12)):
        batch = Batch([], None, None, seeds, step, step, len(seeds))
        batch = graphs.load_batch(batch, step % 2)
        ahead = [s.clock[s.name] > order.host.get(s.name, 0) for s in order.streams[1:] if s.clock]
        assert any(ahead), "the host has waited for the batch"
        if before:
            before.wait()
            graphs.step(before, Clock(False))
        before = batch
    assert graphs.captured == (word == "on") and 0 < graphs.repeated < 7
    order._go()
    assert order.faults == []
