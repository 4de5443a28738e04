"""Mini-batches for a training loop: epochs of shuffled seed nodes, sampled and fetched ahead of the step.

    graph = Graph(*from_edge_index(edge_index, num_nodes=len(x)), x, y)     # or GraphStore.open("my_store")
    loader = NodeLoader(graph, train_nodes, [10, 10], batch_size=256)      # 10 neighbours of each seed, then 10 of each
    for batch in loader:
        torch.nn.functional.cross_entropy(net(batch.blocks, batch.x), batch.y).backward()

The seeds of a batch and their sampled neighbours depend only on the random seed, the epoch and the step, not on the
number of threads or the prefetch depth; a step's seeds, over all processes, are the same for any number of processes.
To copy this file, also take sampler.py, features.py and the folders disk/ and extras/.
"""

import gc
from contextlib import ExitStack, closing, nullcontext
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch

from disk.columns import EDGE_FEATURES, EDGE_TYPE
from disk.convert import as_tensor, is_sparse, kind_of, part_ids, shaped, shown
from disk.convert import from_edge_index as from_edge_index
from extras import elsewhere
from features import Batch, FeatureRing, ask, prefetch, stored
from sampler import NeighborSampler, mix

__getattr__ = elsewhere(__name__)


class Graph(NamedTuple):
    """A graph in memory for `NodeLoader`, as tensors or numpy arrays."""

    indptr: Any  # int64 [V+1]; the in-neighbours of v are indices[indptr[v]:indptr[v+1]]
    indices: Any  # int32 or int64 [M]
    features: Any  # [V, F]
    labels: Any  # int64 [V]; for a loss of your own also [V, ...] of any dtype

    @property
    def num_nodes(self):
        """V, the number of nodes."""
        return len(self.indptr) - 1

    def __repr__(self):
        return shown("Graph", self._asdict())


def _tensor(name, values):
    """Return a tensor, or features with `gather`, as they are; what else is an array as a tensor in host memory."""
    if hasattr(values, "gather") and not is_sparse(values):
        return values
    return as_tensor(name, values)


def _tables(graph, edges):
    """Return features, labels and, if used, edge_features as tensors; ValueError unless these have a row for each node, or
    edge, and for what is no graph."""
    if not all(hasattr(graph, name) for name in Graph._fields):
        raise ValueError(
            f"graph is {kind_of(graph)}: give GraphStore.open(path), after build(data, path) of "
            "sources.prepare for one of PyG or DGL, or "
            "Graph(*from_edge_index(data.edge_index, len(data.x)), data.x, data.y)"
        )
    V = len(graph.indptr) - 1
    tables = {
        "features": _tensor("features", getattr(graph.features, "tensor", graph.features)),
        "labels": _tensor("labels", graph.labels),
    }
    if not getattr(graph, "node_types", None):  # else only the first nodes have features
        shaped("features", tables["features"], V, "F")
    shaped("labels", tables["labels"], V, *tables["labels"].shape[1:])
    if edges:
        name = EDGE_FEATURES.name
        rows = _tensor(name, getattr(graph, name, None))
        tables[name] = shaped(name, rows, len(graph.indices), "F")
    return tables


def _sampler(graph, fanouts, *, seed, edges, types):
    """Make the sampler of a loader, see `NodeLoader`; ValueError for draws by type without types."""
    disk_threads = getattr(graph, "sampling_threads", None)  # if the graph stays on disk
    kinds = getattr(graph, EDGE_TYPE.name, None)
    if types and kinds is None:
        raise ValueError(f"types is {types}: a graph with edge_type is needed to draw by type")
    return NeighborSampler(
        _tensor("indptr", graph.indptr).long(),
        _tensor("indices", getattr(graph, "sampled_indices", graph.indices)),
        fanouts,
        edge_type=_tensor(EDGE_TYPE.name, kinds) if types else None,
        seed=seed,
        edge_ids=edges,
        check=not disk_threads,  # it would read all of such a graph
        threads=disk_threads,
    )


class NodeLoader:
    """Iterate over the batches of an epoch; each `for` is another epoch, in another order. After a break the next `for`
    resumes after the last step whose batches were all handed out, and so does a loader that was given another one's
    `state_dict`, even in mid-epoch and with another number of processes. Without shuffling it is only the latter that
    resumes: a loop that was left starts again. `next(iter(loader))` is such a loop: `loader.step = 0` takes it back.

    There is one loop at a time: two of them would share out the epoch. A second one, inside the first or beside it as in
    `zip(loader, loader)`, is a RuntimeError until the first has ended: by its last batch, a break or an exception, or by
    `close()` of an iterator that is still held.

    Args:
        graph: GraphStore, `Graph` or anything else with indptr, indices, features and labels.
        seeds: nodes to train on, each once: int [T], rows of features and labels, or a mask, bool [V].
        fanouts: neighbours sampled per node, one number per layer from the seeds outward; -1 for all.
        batch_size: seeds per process and pass. accumulate: passes per optimizer step.
        limits: `Limits` of extras/graphs.py, in place of an equal number of seeds: a pass takes seeds in order until the next would not fit.
        shuffle: False takes the seeds in the order given, all of them in each `for`, and draws the same neighbours in
            each: for evaluation.
        seed: any int; determines the order of the seeds and their neighbours.
        rank, world: this process's rank, the number of processes. Each gets its part of every step, maybe an empty one.
        device: where batches go; None: where the features are. dtype: of x.
        depth: batches prepared ahead of the one in use; 0: none, as for features that require a gradient, which change.
        threads: how many threads prepare them.
        reuse: True reuses depth + 1 buffers for x: faster on CPU, but x is overwritten when the next batch is asked
            for. False: every batch may be kept. On a GPU each x is new, except in CUDA graphs (extras/step_graphs.py).
        edges: True also fetches the features of each block's edges, rows of graph.edge_features [M, D], as batch.edges.
            This and edge_type are row for row with graph.indices.
        types: True samples by graph.edge_type [M], see `NeighborSampler`; fanouts may then have a number for each type.
        sampler, ring: replace those that would be made from the arguments above.
        draw: function (Batch with only its seeds) -> (nodes to sample for, keyword arguments of `sampler.sample`, y).
            Seeds may then index any kind of example; with y None, y is the labels of the nodes. For seeds that repeat
            `nodes, y = batch.seeds.unique(return_inverse=True)` gives distinct nodes, and row y[i] is that of seed i.
        load_batch: function (Batch with its seeds, slot) -> the Batch completed; it replaces sampler and ring.
        timed: function of a stage, "sample" or "fetch", that returns a context to run it in.

    Attributes:
        epoch, step: of the next batch, counted from 0; may be set. steps: optimizer steps of this epoch, the same in each
            unless there are `limits`.
        seeds: int tensor [T], in host memory; may be set between epochs.
    """

    def __init__(
        self,
        graph,
        seeds,
        fanouts,
        *,
        batch_size=1024,
        limits=None,
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
        load_batch=None,
        timed=nullcontext,
    ):
        given = locals()
        sizes = dict(batch_size=1, depth=0, threads=1, accumulate=1, rank=0, world=rank + 1)
        for name, least in sizes.items():
            if given[name] < least:
                raise ValueError(f"{name} is {given[name]}: at least {least} is needed")
        if not load_batch and (sampler is None or ring is None):
            tables = _tables(graph, edges)
        indptr = getattr(graph, "indptr", None)
        self._length = "V"  # of a mask
        if indptr is not None:
            self._length = len(indptr) - 1
        elif hasattr(graph, "__len__") and not isinstance(graph, tuple):  # small graphs
            self._length = len(graph)
        self.draw = draw
        self.load_batch = load_batch
        self.seeds = seeds
        self.shuffle = shuffle
        self.seed = index(seed)
        self.accumulate = accumulate
        self.rank = rank
        self.world = world
        self.total_batch = batch_size * accumulate * world
        self.batch_size = batch_size
        self.limits = limits
        if sampler is None and not load_batch:
            sampler = _sampler(graph, fanouts, seed=seed, edges=edges, types=types)
        if ring is None and not load_batch:
            rows = stored(tables["features"])
            depth = 0 if getattr(rows, "requires_grad", False) else depth
            ring = FeatureRing(
                tables["features"],
                tables["labels"],
                slots=depth + 1,
                device=device or getattr(rows, "device", "cpu"),
                streams=threads,
                dtype=dtype,
                reuse=reuse,
                edge_features=tables.get(EDGE_FEATURES.name),
            )
        self.node_sampler = sampler
        self.ring = ring
        self.timed = timed
        self.options = {"depth": depth, "threads": threads}
        self.epoch = 0
        self.step = 0

    reached = None  # (epoch, step) that the last loop got to
    looping = False
    steps = property(lambda self: self._steps(self.epoch))

    @property
    def seeds(self):
        return self._seeds

    @seeds.setter
    def seeds(self, seeds):
        # in host memory: a GPU would index it on a stream no slot waits for
        seeds = torch.from_numpy(part_ids("seeds", seeds, self._length))
        if not (self.draw or self.load_batch):
            ids = np.sort(seeds.numpy())
            again = ids[1:][ids[1:] == ids[:-1]]
            if len(again):
                raise ValueError(
                    f"seeds has node {again[0]} more than once: give it once, or a `draw` that samples "
                    "batch.seeds.unique(return_inverse=True)"
                )
        self._seeds = seeds
        # with limits, of all processes' passes:
        self.bounds = {}  # of one epoch: {epoch: bounds of its passes}
        self.passes = {}  # {epoch: how many}

    def __len__(self):
        return self.steps * self.accumulate

    def __repr__(self):
        return shown(
            type(self).__name__,
            {
                "seeds": self.seeds,
                "fanouts": getattr(self.node_sampler, "fanouts", None),
                "total_batch": self.total_batch,
                "steps": self.steps,
                "epoch": self.epoch,
                "step": self.step,
            },
        )

    def __iter__(self):
        if self.looping:
            gc.collect()  # which ends a loop whose iterator is in a reference cycle
        if self.looping:
            raise RuntimeError(
                "another loop over this NodeLoader has not ended: make another NodeLoader, "
                "or close() the iterator of a loop that was left"
            )
        epoch, first = self.epoch, self.step
        if not self.shuffle and (epoch, first) == self.reached:
            first = 0  # the loop was left, not resumed by another loader
        if self.ring and self.ring.copies:
            self.ring.copies.follow()  # features may have changed since the last epoch
        features = self.ring and self.ring.features
        with ExitStack() as stack:
            self.looping = True
            stack.callback(setattr, self, "looping", False)
            parts = self._parts(epoch, first)
            # all processes fetch the same batches, in this order: also those begun when a loop is left
            options = {**self.options, "finish": ask(features, "collective")}
            if looking_ahead := ask(features, "looking_ahead"):
                # blocks wait in memory for their rows: 120 MB for a thousand batches with 10,000 input nodes each
                sampled = stack.enter_context(closing(prefetch(self._sample, parts, **options)))
                parts = stack.enter_context(looking_ahead(sampled))
                options = {**options, "threads": 1}  # its plans are executed in order
            stream = stack.enter_context(closing(prefetch(self._make, parts, **options)))
            for batch in stream:
                batch.wait()
                done = batch.step + batch.last
                self.reached = (epoch, done) if done < self._steps(epoch) else (epoch + 1, 0)
                self.epoch, self.step = self.reached
                yield batch
        self.epoch = epoch + 1
        self.step = 0

    def _order(self, epoch):
        """Return the seeds of an epoch in their order."""
        if not self.shuffle:
            return self.seeds
        generator = torch.Generator().manual_seed(mix(self.seed) ^ epoch)
        return self.seeds[torch.randperm(len(self.seeds), generator=generator, device="cpu")]

    def _bounds(self, epoch):
        """Return where the passes of an epoch with limits begin in its order, over all processes, and its end -> [n + 1]."""
        if epoch not in self.bounds:
            bounds = self.limits.cut(self._order(epoch), self.batch_size)
            self.bounds = {epoch: bounds}
            self.passes[epoch] = len(bounds) - 1
        return self.bounds[epoch]

    def _steps(self, epoch):
        """Return the number of optimizer steps of an epoch."""
        if self.limits is None:
            return -(-self.seeds.numel() // self.total_batch)
        if epoch not in self.passes:
            self._bounds(epoch)
        return -(-self.passes[epoch] // (self.accumulate * self.world))

    def _passes(self, epoch, step, order):
        """Cut the seeds of a step, of an epoch's order -> (all of them, those of each pass of this process)."""
        if self.limits is None:
            seeds = order[step * self.total_batch : (step + 1) * self.total_batch]
            passes = []
            for part in seeds.tensor_split(self.accumulate):
                first = part.numel() * self.rank // self.world
                end = part.numel() * (self.rank + 1) // self.world
                passes.append(part[first:end])
            return seeds, passes
        count = self.accumulate * self.world
        bounds = self._bounds(epoch)[step * count : (step + 1) * count + 1]
        bounds += bounds[-1:] * (count + 1 - len(bounds))  # the epoch's last step may lack passes
        seeds = order[bounds[0] : bounds[-1]]
        mine = [*zip(bounds, bounds[1:])][self.rank :: self.world]
        return seeds, [order[first:end] for first, end in mine]

    def _parts(self, epoch, first):
        """Cut an epoch's seeds by step, from `first` on, pass and process -> iterator of batches without blocks."""
        order = self._order(epoch)
        before = sum(map(self._steps, range(epoch)))  # steps of earlier epochs
        for step in range(first, self._steps(epoch)):
            step_seeds, passes = self._passes(epoch, step, order)
            for i, seeds in enumerate(passes):
                yield Batch(
                    seeds=seeds,
                    step=step,
                    global_step=before + step if self.shuffle else -1,
                    total=step_seeds.numel(),
                    last=i == self.accumulate - 1,
                    step_seeds=step_seeds,
                )

    def _sample(self, part, slot=0):
        with self.timed("sample"):
            nodes, options, y = self.draw(part) if self.draw else (part.seeds, {}, None)
            blocks = self.node_sampler.sample(
                nodes, part.global_step, relabel_outer=not self.ring.first_hop, **options
            )
        return part._replace(blocks=blocks, y=y)

    def _make(self, part, slot):
        """Sample and fetch a batch, on a prefetch thread."""
        if self.load_batch:
            with self.timed("fetch"):
                return self.load_batch(part, slot)
        with self.ring.stream(slot):
            part = part if part.blocks else self._sample(part)
            with self.timed("fetch"):
                return self.ring.fetch(slot, part.blocks, part)

    def state_dict(self):
        """The loader's position as a dict of ints; a step counts as done once all its batches were handed out."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self.seed,
            "seeds": self.seeds.numel(),
            "total_batch": self.total_batch,
        }

    def load_state_dict(self, state):
        """Resume at another loader's position; ValueError unless seed, number of seed nodes and total batch match."""
        for name, value in self.state_dict().items():
            if name not in ("epoch", "step") and state[name] != value:
                raise ValueError(f"the state has {name} {state[name]}, this loader has {value}")
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.reached = None
