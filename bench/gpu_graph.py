"""A graph made in GPU memory, in seconds, and train.py's own epochs on it: no files, no validation, no exact inference.

    graph = make_graph(SHAPES["products"])
    epochs = Trained(graph, "--model", "gcn").epochs(4)       # the figures that train.py logs

Degrees are log-normal, half of the sources lie near their destination, the others are skewed to low ids.
"""

import collections
import gc
import tempfile
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

import ddp
import train
from extras import step_graphs
from extras.edge_split import split_edges
from features import place
from run import placement
from run.adam import Adam
from run.run import open_run
from sources import prepare
from store import GraphStore, MmapFeatures

CHUNK = 1 << 26  # edges made at a time
NEAR = 1000  # sources of half of the edges are among as many nodes around the destination


class Shape(NamedTuple):
    """Size of a graph. degree: mean in-degree; spread: standard deviation of its logarithm; seeds: training nodes."""

    nodes: int
    degree: float
    width: int
    classes: int
    seeds: int
    dtype: torch.dtype = torch.float32
    spread: float = 0.6


SHAPES = {
    "products": Shape(2_449_029, 50, 100, 47, 196_615),
    "papers100M": Shape(111_059_956, 14.55, 128, 172, 1_207_179, torch.bfloat16, 1.0),
    "small": Shape(250_000, 15, 100, 47, 60_000),  # for what is prepared on the CPU
}


def tiny(shape):
    """Return a Shape of few nodes that is compiled to the same programs."""
    return shape._replace(nodes=3_000, degree=min(shape.degree, 10), seeds=200)


class Graph(NamedTuple):
    """indptr: int64 [V+1], indices: int32 [M], features [V, F]: on one device. labels: int64 [V], seeds: int64 [S], in
    host memory. columns: of edges and nodes, by their name in a store."""

    indptr: Tensor
    indices: Tensor
    features: Tensor
    labels: Tensor
    seeds: Tensor
    shape: Shape
    columns: dict = {}

    def to(self, device):
        """Move graph and features to a device -> Graph."""
        moved = {name: getattr(self, name).to(device) for name in self._fields[:3]}
        return self._replace(**moved)

    def rounded(self, dtype):
        """Convert the features to a dtype -> Graph."""
        return self._replace(features=self.features.to(dtype))


def make_graph(shape, device="cuda", seed=0) -> Graph:
    """Make a graph in GPU memory; the same seed gives the same graph on the same kind of GPU."""
    torch.manual_seed(seed)
    V, options = shape.nodes, {"device": device}
    logs = torch.randn(V, **options) * shape.spread - shape.spread**2 / 2
    degrees = (logs.exp() * shape.degree).round().clamp(min=1).long()
    indptr = torch.zeros(V + 1, dtype=torch.int64, **options)
    torch.cumsum(degrees, 0, out=indptr[1:])
    M = int(indptr[-1])
    indices = torch.empty(M, dtype=torch.int32, **options)
    for a in range(0, M, CHUNK):
        b = min(a + CHUNK, M)
        first, last = (
            torch.searchsorted(indptr, edge, right=True).item() - 1 for edge in (a, b - 1)
        )
        counts = indptr[first : last + 2].clamp(a, b).diff()
        nodes = torch.arange(first, last + 1, dtype=torch.int32, **options)
        destinations = torch.repeat_interleave(nodes, counts, output_size=b - a)
        near = (torch.rand(b - a, **options) * NEAR).to(torch.int32)
        near = (destinations // NEAR * NEAR + near).clamp(max=V - 1)
        far = (torch.rand(b - a, dtype=torch.float64, **options).pow(3) * V).to(torch.int32)
        indices[a:b] = torch.where(torch.rand(b - a, **options) < 0.5, near, far)
    features = torch.empty(V, shape.width, dtype=shape.dtype, **options)
    rows = max(1, (1 << 28) // shape.width)
    for part in features.split(rows):
        part.normal_()
    labels = torch.arange(V) // NEAR % shape.classes
    generator = torch.Generator().manual_seed(seed)
    apart = (
        V // shape.seeds
    )  # one of each so many: a permutation of all nodes takes 10 s on the CPU
    seeds = torch.randint(apart, (shape.seeds,), generator=generator)
    seeds += apart * torch.arange(shape.seeds)
    return Graph(indptr, indices, features, labels, seeds, shape)


def with_columns(graph):
    """Sort the lists of a graph in host memory and add random times, features and types of edges, and times of nodes."""
    degrees = graph.indptr.diff()
    dst = torch.repeat_interleave(degrees)
    order = (dst * graph.shape.nodes + graph.indices).argsort()
    share = (torch.arange(len(dst)) - graph.indptr[dst]) / degrees[dst]  # ascends in each list
    columns = {
        "edge_time": (1000 * share).long(),
        "node_time": torch.randint(1000, degrees.shape),
        "edge_features": torch.randn(len(share), 8),
        "edge_type": (4 * share).to(torch.uint8),
    }
    return graph._replace(indices=graph.indices[order], columns=columns)


def small_store(shape, folder):
    """Build a small store with features and classes of a Shape in a folder -> its path."""
    name = f"synthetic:nodes=2000,degree=8,features={shape.width},classes={shape.classes}"
    return str(prepare.prepare(f"{name},train=256,valid=64", folder, progress=False))


def store_of(graph, path):
    """Put a graph in the place of a small store's -> a GraphStore of arrays in memory."""
    shape = graph.shape
    store = GraphStore.open(path)
    store.indptr = graph.indptr
    store.indices = store.sampled_indices = graph.indices
    store.sampling_threads = None
    store.labels = graph.labels
    store.features = MmapFeatures(graph.features)
    store.num_nodes, store.num_edges = shape.nodes, graph.indices.numel()
    for name, values in graph.columns.items():
        setattr(store, name, values)
    if store.edge_features is not None:
        store.edge_dim = store.edge_features.shape[1]
        store.meta = {**store.meta, "edge_dtype": "float32"}
    if store.edge_type is not None:
        store.num_edge_types = int(store.edge_type.max()) + 1
    store.split = {"train": graph.seeds, "valid": graph.seeds[:0], "test": graph.seeds[:0]}
    return store


def place_again(indptr, indices, labels, features, mode, *, device="cpu", more=(), **options):
    """`place` of features.py, without a second copy of what is in GPU memory."""
    arrays = indptr, indices, labels, features
    if mode != "cuda-cuda":
        return place(*arrays, mode, device=device, more=more, **options)
    return tuple(a.to(device) for a in (*arrays[:3], features.tensor, *more))


def first_pairs(store, how, *args, count, **options):
    """`split_edges` of extras/edge_split.py, with so many pairs to train on."""
    view = split_edges(store, how, *args, **options)
    view.split["train"] = view.split["train"][:count]
    return view


class Trained:
    """A run of train.py on a graph, its steps captured as CUDA graphs where train.py would.

    Attributes: stepper, StepGraphs or Eager. message: what train.py says about CUDA graphs. steps: of an epoch.
    """

    def __init__(self, graph, *words):
        self.ranks = ddp.Ranks(gpus=1)
        if (
            graph.indptr.is_cuda and "gin" not in words
        ):  # else decided by a sample of edges, on the CPU
            words = (*words, "--no-residual")
        opened_as = lambda args, path, say: store_of(graph, path)  # noqa: E731
        pairs = partial(first_pairs, count=graph.shape.seeds)
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("tasks.node.open_graph", opened_as),
            mock.patch("extras.links.open_graph", opened_as),
            mock.patch("extras.links.split_edges", pairs),
            mock.patch("tasks.node.choose_split", lambda *args, **options: None),
            mock.patch.object(placement, "place", place_again),
            mock.patch.object(placement, "check_features", lambda *given: None),
            mock.patch.object(ddp.Ranks, "say", lambda ranks, line: None),
        ):
            args = train.parse_args([str(word) for word in ("--gpus", 1, *words)])
            run = open_run(self.ranks, args, small_store(graph.shape, folder))
        names = "lr", "weight_decay", "clip_norm"
        options = {name: getattr(run.plan, name) for name in names}
        optimizer = Adam(run.model.parameters(), fused=True, **options)
        graphs, self.message = step_graphs.build(run, optimizer)
        self.stepper = graphs or train.Eager(run, run.model, optimizer)
        self.run, self.steps, self.done = run, run.plan.steps, 0

    def epochs(self, count):
        """Train for some epochs -> list of their figures."""
        figures = []
        with ddp.StopSignal(self.ranks) as stop:
            for _ in range(count):
                training = train.Training(
                    run=self.run,
                    stepper=self.stepper,
                    optimizer=self.stepper.optimizer,
                    best={},
                    report=None,
                    stop=stop,
                )
                figures.append(training.epoch(self.done, 0)[1])
                self.done += 1
        return figures


def kernels_of(work):
    """Run work() under torch's profiler -> {kernel: [launches, microseconds]}, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    rows = collections.defaultdict(lambda: [0, 0.0])
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        work()
        torch.cuda.synchronize()
    for event in traced.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()):
            rows[event.name()][0] += 1
            rows[event.name()][1] += event.duration_ns() / 1e3
    return dict(sorted(rows.items(), key=lambda row: -row[1][1]))


def free():
    """Return memory of what is no longer used to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
