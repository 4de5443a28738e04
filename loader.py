"""Mini-batches for a training loop: epochs of shuffled seed nodes, sampled and fetched ahead of the step.

    graph = Graph(*from_edge_index(edge_index, num_nodes=len(x)), x, y)     # or GraphStore.open("my_store")
    loader = NodeLoader(graph, train_nodes, [10, 10], batch_size=256)      # 10 neighbours of each seed, then 10 of each
    for batch in loader:
        torch.nn.functional.cross_entropy(net(batch.blocks, batch.x), batch.y).backward()

The seeds of a batch and their sampled neighbours depend only on the random seed, the epoch and the step, not on the
number of threads or the prefetch depth; a step's seeds, over all processes, are the same for any number of processes.
To copy this file, also take sampler.py and features.py.
"""

from contextlib import ExitStack, closing, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from features import FeatureRing, prefetch
from sampler import NeighborSampler, mix, outside


class Graph(NamedTuple):
    """A graph in memory, for `NodeLoader`: tensors or numpy arrays."""

    indptr: Any  # int64 [V+1]; the in-neighbours of v are indices[indptr[v]:indptr[v+1]]
    indices: Any  # int32 or int64 [M]
    features: Any  # [V, F]
    labels: Any  # int64 [V]


def from_edge_index(edge_index, num_nodes):
    """Edges [2, M] (COO) -> (indptr int64 [V+1], indices [M], int32 below 2^31 nodes), as they are sampled from (CSC).

    edge_index: integers [2, M], sources over destinations, as PyG has them: a tensor, an array or two lists.
    ValueError for another shape, numbers that are not integers, or a node id outside of [0, num_nodes).
    """
    edges = torch.as_tensor(edge_index).cpu()
    floats = edges.numel() and (edges.is_floating_point() or edges.dtype == torch.bool)
    if edges.shape[:-1] != (2,) or floats:
        what = f"{edges.dtype} {list(edges.shape)}"
        raise ValueError(f"edge_index is {what}: integers [2, M] are needed, sources first")
    source, destination = edges = edges.long()  # torch compares no uint16, uint32 or uint64
    if (bad := outside(edges, num_nodes)) is not None:
        raise ValueError(f"edge_index has node {bad}: ids must be in [0, {num_nodes})")
    # one int64 an edge: numpy sorts these fastest
    keys = np.sort((destination * num_nodes + source).numpy())
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(keys // max(num_nodes, 1), minlength=num_nodes), out=indptr[1:])
    indices = (keys % max(num_nodes, 1)).astype(np.int32 if num_nodes < 1 << 31 else np.int64)
    return torch.from_numpy(indptr), torch.from_numpy(indices)


def _check_sizes(graph, seeds, edges):
    """Raise ValueError unless features, labels, a mask and the features of edges have a row for each node or edge."""
    V, M = len(graph.indptr) - 1, len(graph.indices)
    # of nodes with types only the first have features
    sizes = [] if getattr(graph, "node_types", None) else [("features", graph.features, V)]
    sizes += [("labels", graph.labels, V)]
    sizes += [("seeds, a mask,", seeds, V)] if seeds.dtype == torch.bool else []
    sizes += [("edge_features", getattr(graph, "edge_features", None), M)] if edges else []
    for name, values, count in sizes:
        rows = getattr(values, "shape", (None,))[0]
        if rows != count:
            had = f"is a {type(values).__name__}" if rows is None else f"has {rows} rows"
            raise ValueError(f"{name} {had}: {count} rows are needed, for {V} nodes and {M} edges")


class Batch(NamedTuple):
    """Data of one forward and backward pass, on the training device: this process's seeds of a step, or of one pass of it."""

    blocks: list  # one for each layer, outermost hop first
    # [N, F] features of blocks[0].src_nodes; [blocks[0].num_dst, 2F] if the ring aggregates the outermost hop
    x: Tensor
    y: Tensor  # [S] labels of the seeds
    seeds: Tensor  # [S] node ids, in host memory
    step: int = 0  # of the optimizer, within the epoch
    # number of the step over all epochs, which keys all that is drawn; -1 without shuffling
    global_step: int = 0
    total: int = 0  # seeds of the whole step: all processes, all passes
    last: bool = True  # the last pass of its step: the optimizer follows
    step_seeds: Any = None  # the seeds of the whole step, int [total]
    began: Any = None  # CUDA events around the copy of x to the GPU; None where nothing is copied
    ready: Any = None
    edges: tuple = ()  # for each block the features [E, D] of its edges, where they were asked for


def seeds_at(times, nodes=None):
    """A `draw` for `NodeLoader` in which each seed sees no edge later than its own time: times int64 [V], of the nodes.

    With nodes int64 [n] seeds are indices i < n and mean node nodes[i] at times[i], with times [n], so that a node can be
    a seed at several times.
    """

    def draw(batch):
        seeds = batch.seeds.to(times.device)
        return seeds if nodes is None else nodes[seeds], {"times": times[seeds]}, None

    return draw


class NodeLoader:
    """Iterate over the batches of an epoch; each `for` is another epoch, in another order. Breaking out of a loop and
    iterating again resumes at the first unfinished step, and so does a loader given another one's `state_dict`: also in
    the middle of an epoch, and for another number of processes.

    Args:
        graph: GraphStore, `Graph` or anything else with indptr, indices, features and labels.
        seeds: node ids to train on, int [T], or a mask, bool [V].
        fanouts: neighbours that a node takes, from the seeds outward, -1 for all; a number for each layer.
        batch_size: seeds of a process in one pass. accumulate: passes of an optimizer step.
        shuffle: False takes the seeds in the order given and draws the same neighbours in each epoch: for evaluation.
        seed: any int; decides order and neighbours.
        rank, world: this process and how many there are. Each gets its part of every step, perhaps an empty one.
        device: where batches go; where the features are when None. dtype: of x.
        depth: batches prepared ahead of the one in use, 0 for none. threads: how many threads prepare them.
        reuse: True lets x lie in one of depth + 1 buffers used in turn: faster on CPU, and overwritten when the
            next batch is asked for. False: every batch may be kept. On a GPU x is a tensor of its own anyway.
        edges: True brings the features of each block's edges, rows of graph.edge_features [M, D], as batch.edges.
        types: True draws by graph.edge_type [M], see `NeighborSampler`; fanouts may then have a number for each type.
        sampler, ring: used instead of those that would be made from the arguments above.
        draw: function (Batch with its seeds alone) -> (nodes to sample for, keyword arguments of `sampler.sample`, y).
            Seeds may then index any kind of example; y None: the labels of the nodes.
        load: function of a Batch with its seeds and a slot -> `Fetched`, used instead of sampler and ring.
        timed: function of a stage, "sample" or "fetch", that returns a context to run it in.

    Attributes:
        epoch, step: of the next batch, counted from 0; may be set. steps: optimizer steps of an epoch.
    """

    def __init__(
        self,
        graph,
        seeds,
        fanouts,
        *,
        batch_size=1024,
        shuffle=True,
        seed=0,
        rank=0,
        world=1,
        accumulate=1,
        device=None,
        dtype=torch.float32,
        depth=2,
        threads=1,
        reuse=False,
        edges=False,
        types=False,
        sampler=None,
        ring=None,
        draw=None,
        load=None,
        timed=nullcontext,
    ):
        sizes = {"batch_size": (batch_size, 1), "depth": (depth, 0), "threads": (threads, 1)}
        for name, (number, least) in sizes.items():
            if number < least:
                raise ValueError(f"{name} is {number}: at least {least} is needed")
        seeds = torch.as_tensor(seeds).cpu()  # no slot's stream would wait for what a GPU cuts
        if seeds.dim() != 1:
            raise ValueError(f"seeds is {list(seeds.shape)}: node ids [T] or a mask [V] is needed")
        if not load and (sampler is None or ring is None):
            _check_sizes(graph, seeds, edges)
        self.seeds = seeds.nonzero().squeeze(1) if seeds.dtype == torch.bool else seeds  # a mask
        self.shuffle, self.seed, self.accumulate = shuffle, seed, accumulate
        self.rank, self.world = rank, world
        self.total_batch = batch_size * accumulate * world
        self.steps = -(-self.seeds.numel() // self.total_batch)
        if sampler is None and not load:
            arrays = graph.indptr, getattr(graph, "sampled_indices", graph.indices)
            disk_threads = getattr(graph, "sampling_threads", None)  # of a graph that stays on disk
            # to check that one would read all of it
            options = dict(seed=seed, edge_ids=edges, threads=disk_threads, check=not disk_threads)
            kinds = getattr(graph, "edge_type", None)
            if types and kinds is None or not types and any(isinstance(k, list) for k in fanouts):
                needed = "types=True and a graph with edge_type are needed to draw by type"
                raise ValueError(f"types is {types}, fanouts {fanouts}: {needed}")
            options["edge_type"] = torch.as_tensor(kinds) if types else None
            sampler = NeighborSampler(*map(torch.as_tensor, arrays), fanouts, **options)
        if ring is None and not load:
            rows = getattr(graph.features, "tensor", graph.features)
            rows = rows if hasattr(rows, "gather") else torch.as_tensor(rows)  # an array
            options = dict(slots=depth + 1, streams=threads, dtype=dtype, reuse=reuse)
            options["edge_features"] = torch.as_tensor(graph.edge_features) if edges else None
            device = device or getattr(rows, "device", "cpu")
            ring = FeatureRing(rows, torch.as_tensor(graph.labels), device=device, **options)
        self.sampler, self.ring, self.draw, self.load = sampler, ring, draw, load
        self.options, self.timed = {"depth": depth, "threads": threads}, timed
        self.epoch = self.step = 0

    def __len__(self):
        return self.steps * self.accumulate

    def __iter__(self):
        epoch, first = self.epoch, self.step
        looking_ahead = getattr(getattr(self.ring, "features", None), "looking_ahead", None)
        # the look-ahead cache executes its plans in order, so a single thread fetches
        options = {**self.options, "threads": 1} if looking_ahead else self.options
        with ExitStack() as stack:
            parts = self._parts(epoch, first)
            if looking_ahead:
                # Blocks wait in memory until their rows are fetched: a thousand with 10,000 input nodes each take 120 MB.
                sampled = prefetch(self._sample, parts, **self.options)
                parts = stack.enter_context(looking_ahead(stack.enter_context(closing(sampled))))
            stream = stack.enter_context(closing(prefetch(self._make, parts, **options)))
            for batch, fetched in stream:
                fetched.wait()
                self.step = batch.step + 1 if batch.last else batch.step
                yield batch
        self.epoch, self.step = epoch + 1, 0

    def _parts(self, epoch, first):
        """Cut an epoch's seeds, from step `first` on, into steps, passes and processes -> batches without blocks."""
        order = self.seeds
        if self.shuffle:
            generator = torch.Generator().manual_seed(mix(self.seed) ^ epoch)
            order = order[torch.randperm(order.numel(), generator=generator)]
        for step in range(first, self.steps):
            global_step = epoch * self.steps + step if self.shuffle else -1
            step_seeds = order[step * self.total_batch : (step + 1) * self.total_batch]
            for i, part in enumerate(step_seeds.tensor_split(self.accumulate)):
                a, b = (part.numel() * rank // self.world for rank in (self.rank, self.rank + 1))
                rest = step_seeds.numel(), i == self.accumulate - 1, step_seeds
                yield Batch([], None, None, part[a:b], step, global_step, *rest)

    def _sample(self, part, slot=0):
        with self.timed("sample"):
            nodes, options, y = self.draw(part) if self.draw else (part.seeds, {}, None)
            options = {**options, "relabel_outer": not self.ring.first_hop}
            blocks = self.sampler.sample(nodes, part.global_step, **options)
        return part._replace(blocks=blocks, y=y)

    def _make(self, part, slot):
        """Sample and fetch a batch, on a thread that runs ahead -> (batch, what the ring made of it)."""
        if self.load:
            with self.timed("fetch"):
                fetched = self.load(part, slot)
        else:
            with self.ring.stream(slot):
                part = part if part.blocks else self._sample(part)
                # on the slot's stream, before the event that the ring records
                y = part.y if part.y is None else part.y.to(self.ring.device, non_blocking=True)
                with self.timed("fetch"):
                    fetched = self.ring.fetch(slot, part.blocks)
                fetched = fetched if y is None else fetched._replace(y=y)
        return part._replace(**fetched._asdict()), fetched

    def state_dict(self):
        """The position of the loader, as plain numbers: steps whose batches were all handed out are done."""
        kept = {"seed": self.seed, "seeds": self.seeds.numel(), "total_batch": self.total_batch}
        return {"epoch": self.epoch, "step": self.step, **kept}

    def load_state_dict(self, state):
        """Go on where another loader stood; ValueError where its seed, seed nodes or step size are not the same."""
        own = self.state_dict()
        for name in ("seed", "seeds", "total_batch"):
            if state[name] != own[name]:
                raise ValueError(f"the state has {name} {state[name]}, this loader has {own[name]}")
        self.epoch, self.step = state["epoch"], state["step"]
