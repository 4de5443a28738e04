"""Tests: the order of work on CUDA streams, without a GPU."""

import ctypes
import re
import types
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp
import model
from features import CachedFeatures, FeatureRing
from loader import Batch
from native import sampler_gpu
from run import step_graph
from sampler import Block, NeighborSampler
from tests import common
from tests.common import _random_graph
from tests.test_layers import _net, cuda_layers  # noqa: F401
from tests.test_step_graph import (  # noqa: F401
    _graph_ring,
    _no_more_than_the_smallest,
    _sampling_on_gpu,
    _step_graphs,
    cuda_graphs,
)

_CUDA = torch.device("cuda", 0)
_TO, _DEVICE = torch.Tensor.to, torch.Tensor.device


class _Stream:
    """A stream: what of the others' work is behind its own, {stream or "host": number of the last such access}."""

    device_index = 0

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
    """CUDA on host memory: all is done at once, and every access is checked for something that orders it behind the
    earlier ones to the same memory: its stream, an event, a wait of the host, and for memory that goes record_stream.

    Attributes:
        faults: what was not in order. host: what the host has waited for.
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
            "current_stream": lambda device=None: self.current,
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
        begin = sampler_gpu.Frame.__init__

        def frame(frame, backend):
            begin(frame, backend)
            frame.told = _Told(self, frame.told, frame.read)

        patch.setattr(sampler_gpu.Frame, "__init__", frame)

    def _new_stream(self, device):
        self.streams.append(_Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def gpu(self, tensor):
        """The tensor as one that the current stream has put on the GPU."""
        tensor = tensor.detach().clone()
        self._add(tensor, "gpu")
        self._use("a copy to the GPU", self.current, [], [tensor])
        return tensor

    def _add(self, tensor, kind):
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        use = dict(gone=StorageWeakRef(storage), written={}, read={}, recorded=set())
        self.memory[storage._cdata] = types.SimpleNamespace(
            kind=kind, home=self.current, start=start, end=end, **use
        )

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
        """Check and note an access of a stream or, who being "host", of the host."""
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
        """Memory that has gone belongs to its stream again, whatever others still do with it."""
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
        """A launch of an emulated kernel: what its pointers lead to."""
        stream = next((s for s in self.streams if s.cuda_stream == handle), self.default)
        words = re.search(rf"^KERNEL {name}\(([^)]*)\)", kernels.source, re.MULTILINE)[1].split(",")
        read, written = [], []
        for word, address in zip(words, pointers):
            structs = dict(zip(("batch_t", "part_t"), sampler_gpu.structs()))
            struct = structs.get(word.split()[0])
            if struct:
                value, source = struct.from_address(address), kernels.source
                for field, c_type in struct._fields_:
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


class _Told:
    """Numbers in page-locked memory that the host reads."""

    def __init__(self, order, numbers, memory):
        self.order, self.numbers, self.memory = order, numbers, memory

    def __getitem__(self, i):
        self.order._use("what the GPU said, read", "host", [self.memory], [])
        return self.numbers[i]


@pytest.fixture
def order(monkeypatch):
    order = _Order(monkeypatch)
    with order:
        yield order


def _consume(batch):
    batch.wait()
    return [t.sum() for t in (batch.x, batch.y, *batch.edges, *(b.indices for b in batch.blocks))]


def _ahead(ring, batches, sample, inside):
    """Prepare each batch before the one before it is used, as `prefetch` does with depth 1; every third is not used."""
    before = None
    for i, seeds in enumerate(batches):
        with ring.stream(i % 2) if inside else nullcontext():
            batch = ring.fetch(i % 2, sample(seeds, i))
        if before and i % 3:
            _consume(before)
        before = batch
        del batch


def _sampled_on_gpu(order, folder, fanouts=(4, 3)):
    indptr, indices = _random_graph(np.random.default_rng(1), 200, 6)
    s = NeighborSampler(indptr, indices, list(fanouts), seed=3, backend="torch", edge_ids=True)
    for name in ("indptr", "indices"):
        s.engine.task = s.engine.task._replace(**{name: order.gpu(getattr(s.engine.task, name))})
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
    options = dict(streams=streams, edge_features=edges, log=lambda line: None)
    ring = FeatureRing(table, labels, slots=2, device=_CUDA, **options)
    _ahead(ring, torch.randperm(200).split(20), sample, blocks != "gpu, the caller's")
    order._go()
    assert order.faults == []


class _Descent(torch.optim.Optimizer):
    """An optimizer that does not ask the GPU for the learning rate."""

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for p in group["params"]:
            p.sub_(p.grad * group["lr"])


@pytest.mark.usefixtures("cuda_graphs")
@pytest.mark.parametrize("word", ["on", "off"])
@pytest.mark.parametrize("conv", ["sage", "gcn"])
def test_streams_of_a_cuda_step_graph_are_in_order(order, conv, word, tmp_path, monkeypatch):
    """Each batch is sampled while the one before it is trained on; some do not fit."""
    monkeypatch.setattr(torch.cuda, "Event", order.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: order.current)
    monkeypatch.setattr(torch.cuda, "set_stream", order.set_stream)
    monkeypatch.setattr(step_graph.StepGraphs, "_measure", _no_more_than_the_smallest)
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
        fetched = graphs.load(batch, step % 2)
        if before:
            before[0].wait()
            graphs.step(before[1])
        before = fetched, batch._replace(blocks=fetched.blocks, x=fetched.x, y=fetched.y)
    assert graphs.captured == (word == "on") and 0 < graphs.repeated < 7
    order._go()
    assert order.faults == []
