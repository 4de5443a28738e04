"""Mini-batches for a training loop: epochs of shuffled seed nodes, sampled and fetched ahead of the step.

    graph = Graph(*from_edge_index(edge_index, num_nodes=len(x)), x, y)     # or GraphStore.open("my_store")
    loader = NodeLoader(graph, train_nodes, [10, 10], batch_size=256)      # 10 neighbours of each seed, then 10 of each
    for batch in loader:
        torch.nn.functional.cross_entropy(net(batch.blocks, batch.x), batch.y).backward()

The seeds of a batch and their sampled neighbours depend only on the random seed, the epoch and the step, not on the
number of threads or the prefetch depth; a step's seeds, over all processes, are the same for any number of processes.
To copy this file, also take sampler.py, features.py and disk/files.py.
"""

import gc
from contextlib import ExitStack, closing, nullcontext
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disk.files import as_tensor, edge_pairs, integers, is_sparse, kind_of, shown

try:
    from features import FeatureRing, prefetch
    from sampler import NeighborSampler, fanout_list, mix, outside
except ImportError as error:
    if not (error.path and error.name in ("features", "sampler")):
        raise
    hides = f"it hides the {error.name}.py that loader.py needs; rename it"
    raise ImportError(f"{error}: {hides}") from None


class Graph(NamedTuple):
    """A graph in memory for `NodeLoader`, as tensors or numpy arrays."""

    indptr: Any  # int64 [V+1]; the in-neighbours of v are indices[indptr[v]:indptr[v+1]]
    indices: Any  # int32 or int64 [M]
    features: Any  # [V, F]
    labels: Any  # int64 [V]; for a loss of your own also [V, ...] of any dtype

    def __repr__(self):
        return shown("Graph", self._asdict())


def from_edge_index(edge_index, num_nodes):
    """Convert edges from COO to CSC, as the sampler needs -> (indptr int64 [V+1], indices [M], int32 below 2^31 nodes).

    edge_index: integers [2, M], row 0 the sources, row 1 the destinations, as in PyG: a tensor, an array, two of either
    or two lists; or a sparse matrix of scipy or torch [V, V], whose entry i, j is an edge from i to j and must be 1.
    Edges are sorted by destination, then source: weights, types or times of theirs need `build_store`, which sorts both.
    ValueError for another shape, values that are not integers, or a node id outside [0, num_nodes).
    """
    edges = edge_pairs("edge_index", edge_index, num_nodes, num_nodes)
    source, destination = edges = torch.from_numpy(integers("edge_index", edges))
    if (bad := outside(edges, num_nodes)) is not None:
        raise ValueError(f"edge_index has node {bad}: ids must be in [0, {num_nodes})")
    # one int64 key per edge: numpy sorts these fastest
    keys = np.sort((destination * num_nodes + source).numpy())
    indptr = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(keys // max(num_nodes, 1), minlength=num_nodes), out=indptr[1:])
    indices = (keys % max(num_nodes, 1)).astype(np.int32 if num_nodes < 1 << 31 else np.int64)
    return torch.from_numpy(indptr), torch.from_numpy(indices)


def _tensor(name, values):
    """Return a tensor, or features with `gather`, as they are; what else is an array as a tensor in host memory."""
    as_it_is = hasattr(values, "gather") and not is_sparse(values)
    return values if as_it_is else as_tensor(name, values)


def _tables(graph, seeds, edges):
    """Return features, labels and, if used, edge_features as tensors; ValueError unless these and a mask of seeds have a
    row for each node, or edge, and for what is no graph."""
    if not all(hasattr(graph, name) for name in Graph._fields):
        ours = "GraphStore.open(path), after build(data, path) of sources.prepare for one of PyG or DGL"
        in_memory = "Graph(*from_edge_index(data.edge_index, len(data.x)), data.x, data.y)"
        raise ValueError(f"graph is {kind_of(graph)}: give {ours}, or {in_memory}")
    V, M = len(graph.indptr) - 1, len(graph.indices)
    tables = {
        "features": getattr(graph.features, "tensor", graph.features),
        "labels": graph.labels,
        "edge_features": getattr(graph, "edge_features", None) if edges else None,
    }
    tables = {name: v if v is None else _tensor(name, v) for name, v in tables.items()}
    # with node types only the first nodes have features
    sizes = [] if getattr(graph, "node_types", None) else [("features", tables["features"], V)]
    sizes += [("labels", tables["labels"], V)]
    sizes += [("seeds, a mask,", seeds, V)] if seeds.dtype == torch.bool else []
    sizes += [("edge_features", tables["edge_features"], M)] if edges else []
    for name, values, count in sizes:
        shape, table = [*getattr(values, "shape", (None,))], "features" in name
        if shape[:1] != [count] or table and len(shape) < 2:
            actual = type(values).__name__ if shape == [None] else shape
            needed = f"[{count}, F]" if table else f"[{count}]"
            raise ValueError(f"{name} is {actual}: {needed} is needed, for {V} nodes and {M} edges")
    return tables


def _seeds(seeds):
    """Convert seeds to a tensor in host memory: int [T] or bool [V]."""
    seeds = _tensor("seeds", seeds).cpu()  # a GPU would index it on a stream no slot waits for
    if seeds.dim() != 1:
        raise ValueError(f"seeds is {list(seeds.shape)}: node ids [T] or a mask [V] is needed")
    if seeds.dtype not in (torch.bool, torch.int32):
        seeds = torch.from_numpy(integers("seeds", seeds))
    return seeds


def repeated(ids):
    """Return an id that occurs more than once in a numpy array [n], or None; ids that rise are not sorted."""
    if (ids[1:] > ids[:-1]).all():
        return None
    ids = np.sort(ids)
    again = ids[1:][ids[1:] == ids[:-1]]
    return again[0] if len(again) else None


class Batch(NamedTuple):
    """Mini-batch of one forward and backward pass, on the training device: this process's share of the pass's seeds."""

    blocks: list  # one per layer, outermost hop first
    # [N, F] features of blocks[0].src_nodes; [blocks[0].num_dst, 2F] if the ring aggregates the outermost hop
    x: Tensor
    y: Tensor  # [S] labels of the seeds
    seeds: Tensor  # [S] node ids, in host memory
    step: int = 0  # of the optimizer, within the epoch
    # step counted over all epochs, which keys all random draws; -1 without shuffling
    global_step: int = 0
    total: int = 0  # seeds of the whole step: all processes, all passes
    last: bool = True  # the step's last pass: the optimizer steps after it
    step_seeds: Any = None  # the seeds of the whole step, int [total]
    began: Any = None  # CUDA events around the copy of x to the GPU; None if nothing is copied
    ready: Any = None
    edges: tuple = ()  # edge features [E, D] of each block, with NodeLoader(edges=True)

    def __repr__(self):
        return shown("Batch", {name: getattr(self, name) for name in ("blocks", "x", "y", "seeds")})


def seeds_at(times, nodes=None):
    """Return a `draw` for `NodeLoader` that samples no edge later than its seed's time. times: int64 [V], of the nodes.

    With nodes int64 [n] and times int64 [n], a seed is an index i < n and stands for node nodes[i] at times[i], so that
    a node can be a seed at several times.
    """

    def draw(batch):
        seeds = batch.seeds.to(times.device)
        return seeds if nodes is None else nodes[seeds], {"times": times[seeds]}, None

    return draw


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
        shuffle: False takes the seeds in the order given, all of them in each `for`, and draws the same neighbours in
            each: for evaluation.
        seed: any int; determines the order of the seeds and their neighbours.
        rank, world: this process's rank, the number of processes. Each gets its part of every step, maybe an empty one.
        device: where batches go; None: where the features are. dtype: of x.
        depth: batches prepared ahead of the one in use; 0: none, as for features that require a gradient, which change.
        threads: how many threads prepare them.
        reuse: True reuses depth + 1 buffers for x: faster on CPU, but x is overwritten when the next batch is asked
            for. False: every batch may be kept. On a GPU each x is new, except in CUDA graphs (run/cuda_graphs.py).
        edges: True also fetches the features of each block's edges, rows of graph.edge_features [M, D], as batch.edges.
        types: True samples by graph.edge_type [M], see `NeighborSampler`; fanouts may then have a number for each type.
        sampler, ring: replace those that would be made from the arguments above.
        draw: function (Batch with only its seeds) -> (nodes to sample for, keyword arguments of `sampler.sample`, y).
            Seeds may then index any kind of example; with y None, y is the labels of the nodes. For seeds that repeat
            `nodes, y = batch.seeds.unique(return_inverse=True)` gives distinct nodes, and row y[i] is that of seed i.
        load_batch: function (Batch with its seeds, slot) -> `Fetched`, which replaces sampler and ring.
        timed: function of a stage, "sample" or "fetch", that returns a context to run it in.

    Attributes:
        epoch, step: of the next batch, counted from 0; may be set. steps: optimizer steps per epoch.
        seeds: int tensor [T], in host memory; may be set between epochs.
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
        load_batch=None,
        timed=nullcontext,
    ):
        sizes = {"batch_size": (batch_size, 1), "depth": (depth, 0), "threads": (threads, 1)}
        sizes |= {"accumulate": (accumulate, 1), "rank": (rank, 0), "world": (world, rank + 1)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"{name} is {value}: at least {least} is needed")
        seeds = _seeds(seeds)
        if not load_batch and (sampler is None or ring is None):
            tables = _tables(graph, seeds, edges)
        self.draw, self.load_batch = draw, load_batch
        self.seeds = seeds
        self.shuffle, self.seed, self.accumulate = shuffle, index(seed), accumulate
        self.rank, self.world = rank, world
        self.total_batch = batch_size * accumulate * world
        if sampler is None and not load_batch:
            indptr = _tensor("indptr", graph.indptr).long()
            indices = _tensor("indices", getattr(graph, "sampled_indices", graph.indices))
            disk_threads = getattr(graph, "sampling_threads", None)  # if the graph stays on disk
            # checking such a graph would read all of it
            options = dict(seed=seed, edge_ids=edges, threads=disk_threads, check=not disk_threads)
            kinds, fanouts = getattr(graph, "edge_type", None), fanout_list(fanouts)
            if types and kinds is None or not types and any(isinstance(k, list) for k in fanouts):
                needed = "types=True and a graph with edge_type are needed to draw by type"
                raise ValueError(f"types is {types}, fanouts {fanouts}: {needed}")
            options["edge_type"] = _tensor("edge_type", kinds) if types else None
            sampler = NeighborSampler(indptr, indices, fanouts, **options)
        if ring is None and not load_batch:
            rows = tables["features"]
            depth = 0 if getattr(rows, "requires_grad", False) else depth
            options = dict(slots=depth + 1, streams=threads, dtype=dtype, reuse=reuse)
            options["edge_features"] = tables["edge_features"]
            device = device or getattr(rows, "device", "cpu")
            ring = FeatureRing(rows, tables["labels"], device=device, **options)
        self.node_sampler, self.ring, self.timed = sampler, ring, timed
        self.options, self.epoch, self.step = {"depth": depth, "threads": threads}, 0, 0

    reached = None  # (epoch, step) that the last loop got to
    looping = False
    steps = property(lambda self: -(-self.seeds.numel() // self.total_batch))

    @property
    def seeds(self):
        return self._seeds

    @seeds.setter
    def seeds(self, seeds):
        seeds = _seeds(seeds)
        seeds = seeds.nonzero().squeeze(1) if seeds.dtype == torch.bool else seeds
        if not (self.draw or self.load_batch) and (again := repeated(seeds.numpy())) is not None:
            way = "a `draw` that samples batch.seeds.unique(return_inverse=True)"
            raise ValueError(f"seeds has node {again} more than once: give it once, or {way}")
        self._seeds = seeds

    def __len__(self):
        return self.steps * self.accumulate

    def __repr__(self):
        fields = {"seeds": self.seeds, "fanouts": getattr(self.node_sampler, "fanouts", None)}
        names = "total_batch", "steps", "epoch", "step"
        return shown("NodeLoader", fields | {name: getattr(self, name) for name in names})

    def __iter__(self):
        if self.looping:
            gc.collect()  # which ends a loop whose iterator is in a reference cycle
        if self.looping:
            instead = "make another NodeLoader, or close() the iterator of a loop that was left"
            raise RuntimeError(f"another loop over this NodeLoader has not ended: {instead}")
        epoch, first = self.epoch, self.step
        if not self.shuffle and (epoch, first) == self.reached:
            first = 0  # the loop was left, not resumed by another loader
        if copies := getattr(self.ring, "copies", None):
            copies.follow()  # features may have changed since the last epoch
        looking_ahead = getattr(getattr(self.ring, "features", None), "looking_ahead", None)
        with ExitStack() as stack:
            self.looping = True
            stack.callback(setattr, self, "looping", False)
            parts, options = self._parts(epoch, first), self.options
            if looking_ahead:
                # blocks wait in memory for their rows: 120 MB for a thousand batches with 10,000 input nodes each
                sampled = prefetch(self._sample, parts, **options)
                parts = stack.enter_context(looking_ahead(stack.enter_context(closing(sampled))))
                options = {**options, "threads": 1}  # its plans are executed in order
            stream = stack.enter_context(closing(prefetch(self._make, parts, **options)))
            for batch, fetched in stream:
                fetched.wait()
                done = epoch * self.steps + batch.step + batch.last
                self.epoch, self.step = self.reached = divmod(done, self.steps)
                yield batch
        self.epoch, self.step = epoch + 1, 0

    def _parts(self, epoch, first):
        """Cut an epoch's seeds by step, from `first` on, pass and process -> iterator of batches without blocks."""
        order = self.seeds
        if self.shuffle:
            generator = torch.Generator().manual_seed(mix(self.seed) ^ epoch)
            order = order[torch.randperm(len(order), generator=generator, device="cpu")]
        for step in range(first, self.steps):
            global_step = epoch * self.steps + step if self.shuffle else -1
            step_seeds = order[step * self.total_batch : (step + 1) * self.total_batch]
            for i, part in enumerate(step_seeds.tensor_split(self.accumulate)):
                first_seed = part.numel() * self.rank // self.world
                end = part.numel() * (self.rank + 1) // self.world
                yield Batch(
                    blocks=[],
                    x=None,
                    y=None,
                    seeds=part[first_seed:end],
                    step=step,
                    global_step=global_step,
                    total=step_seeds.numel(),
                    last=i == self.accumulate - 1,
                    step_seeds=step_seeds,
                )

    def _sample(self, part, slot=0):
        with self.timed("sample"):
            nodes, options, y = self.draw(part) if self.draw else (part.seeds, {}, None)
            options = {**options, "relabel_outer": not self.ring.first_hop}
            blocks = self.node_sampler.sample(nodes, part.global_step, **options)
        return part._replace(blocks=blocks, y=y)

    def _make(self, part, slot):
        """Sample and fetch a batch, on a prefetch thread -> (Batch, Fetched)."""
        if self.load_batch:
            with self.timed("fetch"):
                fetched = self.load_batch(part, slot)
        else:
            with self.ring.stream(slot):
                part = part if part.blocks else self._sample(part)
                with self.timed("fetch"):
                    fetched = self.ring.fetch(slot, part.blocks, part.y)
        return part._replace(**fetched._asdict()), fetched

    def state_dict(self):
        """The loader's position as a dict of ints; a step counts as done once all its batches were handed out."""
        position = {"epoch": self.epoch, "step": self.step, "seed": self.seed}
        return position | {"seeds": self.seeds.numel(), "total_batch": self.total_batch}

    def load_state_dict(self, state):
        """Resume at another loader's position; ValueError unless seed, number of seed nodes and total batch match."""
        for name, value in self.state_dict().items():
            if name not in ("epoch", "step") and state[name] != value:
                raise ValueError(f"the state has {name} {state[name]}, this loader has {value}")
        self.epoch, self.step, self.reached = state["epoch"], state["step"], None
