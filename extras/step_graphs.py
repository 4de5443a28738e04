"""A training step as CUDA graphs: the host writes the seeds of a batch and launches twice.

    graphs, said = cuda_graphs.build(run, optimizer)     # or None, and why not
    for batch in NodeLoader(..., load_batch=graphs.load_batch):
        graphs.step(batch, clock)        # forward, loss, backward, optimizer

One graph samples a batch, fetches its features (for GraphSAGE, one kernel samples and averages the outermost hop where
neighbours are drawn uniformly), looks up the labels and lists edges by source for the backward pass; another trains on it.
Every batch in flight has its own slot of memory, so that the next batch is sampled on the slot's stream while this one is
trained on. Shapes are static: padded to the numbers of nodes and edges in the first batches of the run, plus a margin.
Padding has no edges, no label and no gradient. The step number, which keys sampling and dropout, is read from GPU memory.
What a task draws (`Task.draw`) is drawn before, launch by launch, and copied into the slot. Batches that a task reads, not
samples (`Task.placed`), are padded on the host as far as their limits, and the first graph copies them to the GPU.

A batch that does not fit is sampled again, and trained on, in its own shapes. It is the same batch, since samples depend
only on the step; which batches do not fit depends only on the flags, so a run repeats to the last bit, interrupted or
not. The host asks whether a batch fitted when its turn to be trained on comes, --prefetch batches after it was started:
so it seldom waits, and no later batch has been trained on.

The same kernels in the same shapes can be launched one by one (`--cuda-graph off`, or if capture fails), with the same
bits. Steps that cannot be graphs (`unsupported`) use the shapes of each batch; sums that graphs take over padded rows may
round differently there.

With several ranks, or batches of a step (--accumulate), the second graph ends with one vector, the sum of the step's
gradients so far, and a third one updates the weights, after the ranks have summed it, without DistributedDataParallel.
"""

import gc
import re
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from features import Batch, stored
from native import kernels, sampler_gpu
from run.finite import LossSum
from run.own_model import conv_of, is_own, load
from run.plan import averages_in_place, counted
from sampler import Block

MEASURED = 16  # batches whose sizes decide the static shapes
ELSEWHERE = "another rank cannot have them"
REFUSALS = RuntimeError, AttributeError  # AttributeError: this torch lacks a function
TRIED = 3  # static steps, at least, that are compared with eager ones
GRAPH_RTOL = 0.02  # max relative difference between their inputs, and their losses


def in_one_kernel(args, task, used, *dtypes):
    """Return whether the graphs would draw and average the outermost hop in one kernel, see `averages_in_place`."""
    return (
        counted(args, task, used)
        and sampler_gpu.in_registers(args.fanout[-1])
        and averages_in_place(args, task.store, *dtypes)
    )


def unsupported_reasons(args, task, used):
    """Return the reasons against CUDA graphs that flags, task and data give. used: `Used` of run/placement.py."""
    layer = conv_of(args.model) or load(args.model)[0]
    fanout = ",".join(map(str, args.fanout))
    table = [  # (whether there can be graphs, why not)
        (task.padded, f"the loss of --task {args.task} may count padding"),
        (getattr(layer, "padded", False), f"--model {args.model} does not state padded = True"),
        (args.norm != "batch", "--norm batch would count the padding"),
        (
            not (args.checkpoint_activations and is_own(args.model)),
            "--checkpoint-activations would repeat a layer of your own without its dropout, if it is torch's",
        ),
        (args.precision != "fp64", "--precision fp64 has no kernels"),
        (
            args.accumulate == 1 or not task.store.node_types,
            f"nodes have types, and --accumulate {args.accumulate} adds up whole tables of gradients",
        ),
        (len(args.fanout) > 1, "one layer is too little to be worth it"),
        (not re.search("(^|,|=)-1", fanout), f"--fanout {fanout} has no bound"),
        (used.edges is None or used.edges.shape[0], "there are no edges"),
    ]
    return [reason for fine, reason in table if not fine]


def hops_held(args, task, used):
    """Return how many hops of a batch the CUDA graphs would hold in GPU memory in cuda-cuda, 0 if there can be none.
    used: `Used` of run/placement.py."""
    if unsupported_reasons(args, task, used):
        return 0
    return len(args.fanout) - in_one_kernel(args, task, used, stored(task.store.features).dtype)


def unsupported(run):
    """Return why a step of this run cannot be a CUDA graph, or None if it can."""
    if not run.ranks.gpus:
        return "there is no GPU"
    if not run.task.placed:
        return run.task.unsupported()
    if reasons := unsupported_reasons(run.plan, run.task, run.used):
        return reasons[0]
    if not run.ring.on_device:
        return f"--mode {run.plan.mode} fetches features on the host"
    if not isinstance(run.ring.features, torch.Tensor):
        return "the features are not a tensor, or are behind a cache"
    if not isinstance(run.sampler.engine, sampler_gpu.Backend):
        return "the sampler's kernels are not there"
    if run.ranks.world > 1 and run.store.node_types:
        return "ranks average the embeddings of nodes"
    if any(isinstance(module, _BatchNorm) for module in run.model.modules()):
        return "batch norm would count the padding"
    ids = run.sampler.indices.dtype
    # last: the first call compiles them
    if not kernels.load(ids, torch.float32, torch.float32, run.ranks.device):
        return "the layers' kernels are not there"
    return None


def build(run, optimizer):
    """Capture the CUDA graphs of a run (unless --cuda-graph is off) and check its static steps on a batch; model and
    optimizer are left as they were.

    run: `Run` of run/run.py; its bare network is captured, without the hooks of DistributedDataParallel.

    Returns:
        (StepGraphs, a line about them), or (None, why not; "" unless asked for or failed), alike on all ranks: a
        collective call. Ranks on which only the capture failed launch the same kernels one by one.
    """
    ranks = run.ranks
    args = run.plan
    graphs = None
    why = unsupported(run)
    if ranks.sum(bool(why))[0]:
        return None, (why or ELSEWHERE) if args.cuda_graph == "on" else ""
    stream = torch.cuda.current_stream()
    try:
        graphs = StepGraphs(run, optimizer)
    except REFUSALS as error:
        torch.cuda.set_stream(stream)
        why = reason(error)
        pad_inputs(run.model, False)
    # StepGraphs() has no collectives: a rank that fails in it leaves none waiting
    missing, uncaptured = ranks.sum(graphs is None, graphs is not None and not graphs.captured)
    if missing:
        return None, why or ELSEWHERE
    ranks.check_equal(run.model)
    rows, places, *_ = graphs.capacity
    how = f"a step is {'two' if graphs.flat is None else 'three'} CUDA graphs"
    if uncaptured:
        why = f"no CUDA graphs: {graphs.failure or ELSEWHERE}"
        if args.cuda_graph == "off":
            why = "CUDA graphs are off"
        how = f"{why}; their kernels are launched one by one,"
    how += f" with room for {rows[-1]:,} nodes and {sum(places):,} edges inside"
    return graphs, how + "; larger batches are taken without" * run.task.placed


def pad_inputs(model, padded):
    """Let a network have a row of x for every node, see `NodeInputs.pad`, or no longer."""
    for module in model.modules():
        if hasattr(module, "aligned"):  # `NodeInputs` of extras/relational.py
            module.pad(padded)


def reason(error):
    """Return the first line of an exception's message, or the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


class Drawn(NamedTuple):
    """What a batch is made from."""

    nodes: torch.Tensor  # to sample for
    options: dict  # of the sampler
    y: torch.Tensor | None  # None: the labels of the nodes
    step: int  # counted over all epochs


class Capacity(NamedTuple):
    """What batches have room for."""

    rows: list  # source nodes by hop, the nodes to sample for first
    places: list  # edges by hop
    excludes: int  # edges to leave out
    y: torch.Tensor | None  # of a full batch, as in `Drawn`


def drawn(task, batch):
    """Draw a batch of the loader, as the task does -> Drawn."""
    nodes, options, y = task.draw(batch) if task.draw else (batch.seeds, {}, None)
    return Drawn(nodes, options, y, batch.global_step)


def static_room(sampler, task, args, first_hop):
    """Measure a run's first batches -> (half of the first one, `Drawn`, for a trial; `Capacity` for batches like these).
    With `first_hop`, as the ring's, there is no room for the outermost hop if one kernel draws and averages it."""
    examples = task.store.split["train"]
    generator = torch.Generator().manual_seed(args.seed)
    order = examples[torch.randperm(examples.numel(), generator=generator)]
    size = min(args.batch_size, examples.numel())
    full = examples.numel() // size  # without a smaller last batch
    sizes = []
    for step in range(MEASURED):
        step_seeds = order[step % full * size :][: args.total_batch]
        batch = Batch(seeds=step_seeds[:size], step_seeds=step_seeds, global_step=step)
        nodes, options, y, _ = drawn(task, batch)
        blocks = sampler.sample(nodes, step, relabel_outer=not first_hop, **options)
        hops = [(block.num_src, block.num_edges) for block in blocks[::-1]]
        sizes.append([(len(nodes), len(options.get("exclude", ()))), *hops])
    least, most = torch.tensor(sizes).aminmax(dim=0)
    # the largest plus the range (largest - smallest): some five standard deviations above the mean
    (S, X), *hops = (2 * most - least).tolist()
    # not 0: `number` of sampler.cu counts a hop's sources where its edges end
    rounded = lambda n, bound: min(bound, -(-max(n, 1) // 256) * 256)  # noqa: E731
    S = rounded(S, size * task.seeds_per_example(args))
    rows, places = sampler.engine.shapes(S)
    excludes = rounded(X, X + 256) if "exclude" in options else 0
    if first_hop and sampler.engine.aggregates(excludes):
        hops = hops[:-1]
    for hop, (N, E) in enumerate(hops):
        # sources include the destinations, whose margin may be the larger one
        rows[hop + 1] = max(rows[hop], rounded(N, rows[hop + 1]))
        places[hop] = rounded(E, places[hop])
    half = Batch(seeds=order[: -(-size // 2)], step_seeds=order[: args.total_batch])
    return drawn(task, half), Capacity(rows[: len(hops) + 1], places[: len(hops)], excludes, y)


@contextmanager
def captured(graph, pool=None, stream=None):
    """Capture the body in a CUDA graph, as torch.cuda.graph does; if that fails, the first error is raised.

    Nothing is collected meanwhile: a finalizer might synchronize, as that of `gpu_view`, which ends a capture.
    """
    pool = pool or torch.cuda.graph_pool_handle()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    collects = gc.isenabled()
    first = None
    gc.disable()
    try:
        # other threads, NCCL's among them, may call CUDA during a capture
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        # torch's allocator does not hear of a failed end: it would never reuse memory that a second stream has used
        with suppress(*REFUSALS):
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        # nor does the generator of torch 2.11, which would refuse to draw
        generator.graphsafe_set_state(before)
        raise (first or error) from None
    finally:
        if collects:
            gc.enable()


class StaticBatch:
    """A batch in flight in static memory, and its two graphs: `fill` writes what it is made from, `sample` is captured.

    Attributes:
        batch: `Batch` of the memory. step: int64 [1], counted over all epochs. x, y: those of the batch.
        sampled, trained: events after these, for which refilling waits.
        drawn: `Drawn` of the batch. fits: whether there is room for what was drawn. stream: as of `CudaCopies`.
    """

    def __init__(self, batch, step, stream):
        self.batch = batch
        self.stream = stream
        self.x = batch.x
        self.y = batch.y
        self.step = step
        self.sampling = self.training = None  # CUDA graphs
        self.sampled = torch.cuda.Event()
        self.trained = torch.cuda.Event()
        self.drawn = None
        self.fits = False


class Slot(StaticBatch):
    """A static batch that is sampled.

    Attributes:
        frame: `Frame` of native/sampler_gpu.py. x: [rows, F] of all nodes, or [rows, 2F] own row and mean of the
            outermost hop. y: labels [S] or [S, C], or the task's own, padded with -1. batch: of these and the frame's blocks.
            averages: whether the outermost hop, sampled into the frame, is then averaged straight from the feature table.
    """

    def __init__(self, run, capacity):
        rows, places, excludes, y = capacity
        self.sampler = sampler = run.sampler
        self.ring = ring = run.ring
        in_one_kernel = ring.first_hop and sampler.engine.aggregates(excludes)
        self.averages = ring.first_hop and not in_one_kernel
        self.frame = sampler.engine.frame(rows, places, not self.averages, excludes)
        self.edge_type = sampler.edge_type
        blocks = self.frame.blocks[::-1]
        if self.edge_type is not None:
            self.types = self.edge_type.new_empty(sum(places))
            block_types = self.types.split(places)[::-1]
            blocks = [b._replace(edge_type=types) for b, types in zip(blocks, block_types)]
        self.listable = [*blocks]
        for block in blocks:
            kernels.static(block)
        self.seeds = blocks[-1].src_nodes[: rows[0]]
        self.nodes = blocks[0].src_nodes
        x = ring.features.new_zeros(len(self.nodes), ring.width, dtype=ring.dtype)
        if in_one_kernel:  # the outermost block has no edges: they are averaged when drawn
            none = self.nodes[:0]
            blocks.insert(0, Block(none, none, self.nodes))
            if not self.frame.aggregate(ring.features, x, **ring.coded):
                raise RuntimeError("the kernel of the outermost hop cannot be compiled")
        self.labelled = y is None
        if self.labelled:
            y = ring.labels.new_empty(rows[0], *ring.labels.shape[1:])
        y = torch.full_like(y, -1, device=ring.labels.device)
        if self.labelled:
            self.frame.look_up(ring.labels, y)
        self.listed = None
        self.edges = None  # [E, D] features of the edges of all blocks, from the seeds outward
        edges = ()
        if ring.edge_features is not None:
            self.edges = x.new_zeros(sum(places), ring.edge_features.shape[1])
            edges = self.edges.split(places)[::-1]
        super().__init__(Batch(blocks, x, y, edges=edges), self.frame.step, ring.stream)

    @staticmethod
    def measure(run):
        """Return a batch for a trial, `Drawn`, and the `Capacity` of all slots."""
        return static_room(run.sampler, run.task, run.plan, run.ring.first_hop)

    def fill(self, drawn):
        """Write what a batch is made from, for `sample` to read, if there is room."""
        y = self.y[:0] if drawn.y is None else drawn.y
        self.drawn = drawn
        self.fits = len(drawn.nodes) <= len(self.seeds) and len(y) <= len(self.y)
        if not self.fits:
            return
        self.frame.fill(drawn.nodes, drawn.step, **drawn.options)
        if not self.labelled:
            self.y[: len(y)].copy_(y)
            self.y[len(y) :].fill_(-1)

    @property
    def status(self):
        """Wait for the batch to be sampled -> 0, or a code for why the slot does not hold it (`status` of
        native/sampler_gpu.py)."""
        self.sampled.synchronize()
        return self.frame.status if self.fits else sampler_gpu.FULL

    def sample(self):
        """Launch what the first graph captures: sample and look up labels, fetch or average features of nodes, fetch those
        and types of edges, list edges."""
        ring = self.ring
        nodes = self.nodes
        # `Lists` from the seeds outward, None for a block for which no step has asked for any
        lists = [block.indices.lists for block in self.listable[::-1]]
        if lists != self.listed and any(lists):
            self.listed = lists
            self.frame.list_edges(lists)
        self.frame.start()
        if self.edge_type is not None:
            edges = self.frame.edges[len(self.seeds) :]
            torch.index_select(self.edge_type, 0, edges, out=self.types)
        if len(ring.features) < ring.labels.shape[0]:  # zeros for types of nodes without features
            used = self.frame.num_dst[len(self.batch.blocks)]
            nodes.masked_fill_(torch.arange(len(nodes), device=nodes.device) >= used, -1)
            nodes = nodes.masked_fill(nodes >= len(ring.features), -1)
        if self.averages:
            outer = self.batch.blocks[0]
            ring.aggregate(outer.indptr, outer.indices, ring.features, nodes, self.x, **ring.coded)
        elif not ring.first_hop:
            self._gather(ring.features, nodes, self.x)
        if self.edges is not None:
            self._gather(ring.edge_features, self.frame.edges[len(self.seeds) :], self.edges)
        for block in self.listable:
            lists = block.indices.lists
            if lists and not lists.weighted:
                lists.put_in_order(kernels.InEdges(block.indptr, block.indices))

    def _gather(self, table, ids, out):
        """Gather rows of a table into `out`, in its type."""
        ring = self.ring
        coded = ring.coded if table is ring.features else {}
        if coded or table.dtype == out.dtype:
            ring.gather(table, ids, out, **coded)
        else:
            rows = ring.gather(table, ids)
            out.copy_(ring.decode(rows, ids) if table is ring.features else rows)

    def fetch(self, number, drawn, batch):
        """Sample and fetch a batch in its own shapes -> the Batch completed."""
        blocks = self.sampler.sample(
            drawn.nodes, drawn.step, relabel_outer=not self.ring.first_hop, **drawn.options
        )
        return self.ring.fetch(number, blocks, batch._replace(y=drawn.y))

    def rows(self, batch):
        """Return the rows of x that are those of the same batch in its own shapes."""
        nodes = self.nodes[: batch.blocks[0].num_src]
        return self.x[: len(nodes)][(nodes >= 0) & (nodes < len(self.ring.features))]


class ReadSlot(StaticBatch):
    """A static batch that the task reads, padded, into pinned memory `host`, for `sample` to copy."""

    def __init__(self, run, capacity):
        self.task = run.task
        gpu = run.ranks.device
        blank = [*self.task.blank(), torch.zeros(1, dtype=torch.int64)]
        self.host = [t.pin_memory() if gpu.type == "cuda" else t for t in blank]
        self.copied = [t.to(gpu, copy=True) for t in blank]
        *tensors, step = self.copied
        super().__init__(self.task.completed(Batch(), *tensors), step, run.task.copies.stream)

    @staticmethod
    def measure(run):
        task = run.task
        examples = task.store.split["train"]
        first = examples[: task.limits.cut(examples, run.plan.batch_size)[1]]
        nodes, edges = task.limits.most
        return drawn(task, Batch(seeds=first)), Capacity([nodes], [edges], 0, None)

    def fill(self, drawn):
        self.drawn = drawn
        self.fits = True
        *tensors, step = self.host
        step.fill_(drawn.step)
        self.task.pad(drawn, *tensors)

    @property
    def status(self):
        """Have the current stream wait for the batch -> 0: there is room for every one."""
        torch.cuda.current_stream().wait_event(self.sampled)
        return 0

    def sample(self):
        for copy, tensor in zip(self.copied, self.host):
            copy.copy_(tensor, non_blocking=True)

    def fetch(self, number, drawn, batch):
        return self.task.load_batch(batch, number)

    def rows(self, batch):
        return self.x[: len(batch.x)]


class StepGraphs:
    """A run's training step as CUDA graphs, see the top of this file; `Eager` of train.py has the same methods.

    Attributes:
        loss_sum: float64, to which `step` adds each batch's loss. room: of `static_room`.
        repeated: batches so far that did not fit. captured: False if kernels are launched one by one. failure: why
            capture failed, or None.
    """

    parallel = None  # no DistributedDataParallel: ranks sum one vector

    def __init__(self, run, optimizer):
        self.run = run
        self.optimizer = optimizer
        self.repeated = 0
        ranks = run.ranks
        args = run.plan
        model = run.model
        pad_inputs(model, True)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self.weight = torch.zeros((), device=ranks.device)
        self.weighs = None  # the value in `weight`
        kind = Slot if run.task.placed else ReadSlot
        trial, capacity = kind.measure(run)
        optimizer.prepare_capture(ranks.device)
        self.flat = self.update = None
        if ranks.world > 1 or args.accumulate > 1:
            self.flat = torch.zeros(sum(p.numel() for p in self.parameters), device=ranks.device)
        self.slots = [kind(run, capacity) for _ in range(args.prefetch + 1)]
        kept = [t.clone() for t in self._state()]
        self.begin()
        try:
            self.failure = self._prepare(trial, kept, args.cuda_graph != "off")
        finally:
            self._restore(kept)
        self.capacity = capacity
        self.captured = self.slots[0].training is not None

    def _state(self):
        """Return the parameters, then the tensors of the optimizer's state."""
        moments = [t for p in self.parameters for t in self.optimizer.state.get(p, {}).values()]
        return [p.detach() for p in self.parameters] + moments

    def _restore(self, kept):
        """Copy back the tensors `kept`, clones of `_state`, in place; optimizer state that was made since is zeroed."""
        for t, value in zip_longest(self._state(), kept):
            t.zero_() if value is None else t.copy_(value)
        if self.flat is not None:
            self.flat.zero_()
        self.optimizer.zero_grad(set_to_none=True)

    def _prepare(self, trial, kept, capture):
        """Take a few steps on a batch `Drawn` eagerly, capture the static ones if `capture`, and take the same steps
        with them: inputs and losses have to agree -> why capture failed, or None."""
        model = self.run.model
        with self.slots[0].stream(0):
            batch = self.slots[0].fetch(0, trial, Batch(seeds=trial.nodes))
        batch.wait()
        self.weight.fill_(1 / len(batch.y))
        slots = (self.slots * TRIED)[: max(TRIED, len(self.slots))]
        # masks of torch's dropout depend on shapes
        model.train(not self.run.custom)
        expected = [self._loss(self._compute, batch, 0) for _ in slots]
        model.train()
        self._restore(kept)
        failure = self._capture(trial) if capture else None
        self._restore(kept)
        norm = batch.x.float().norm().clamp(min=1e-30)
        losses = []
        errors = []
        for slot in slots:
            self._sample(slot, trial)
            if status := slot.status:
                raise RuntimeError(f"a batch that was measured does not fit ({status})")
            errors.append(((slot.rows(batch) - batch.x).float().norm() / norm).item())
            trained = self._train, slot
            static = self._compute, slot.batch, slot.step
            model.train(not self.run.custom)
            losses.append(self._loss(*static if self.run.custom else trained))
        model.train()
        for found, step in (expected, static), (losses, trained):
            self._restore(kept)
            self.run.reseed(batch, 0)
            found.append(self._loss(*step))
        same = (abs(a - b) <= GRAPH_RTOL * abs(a) for a, b in zip(expected, losses))
        if not all(same) or not all(error <= GRAPH_RTOL for error in errors):
            raise RuntimeError(
                f"their input is {max(errors):.1%} off, "
                f"their losses are {losses}, and {expected} without graphs"
            )
        return failure

    def _loss(self, run, *args):
        """Take a step on this rank alone -> its loss, a float."""
        self.loss_sum.zero_()
        run(*args)
        self._finish()
        return self.loss_sum.item()

    def _capture(self, trial):
        """Capture the graphs of all slots -> None, or why that failed."""
        stream = torch.cuda.current_stream()
        pool = None
        try:
            for slot in self.slots:
                torch.cuda.synchronize()  # the slot's stream does not wait for what this one restores
                with slot.stream(0):
                    side = torch.cuda.current_stream()
                    slot.fill(trial)
                    slot.sample()
                    # warm up in these shapes
                    self._compute(slot.batch, slot.step)
                    slot.sample()  # with memory for the lists that the step has asked for
                    torch.cuda.synchronize()
                # what a reference cycle keeps of steps so far: autograd would wait for their streams, and end the capture
                gc.collect()
                sampling = torch.cuda.CUDAGraph()
                training = torch.cuda.CUDAGraph()
                # kernels of a graph have the priority of the stream that captured them
                with captured(sampling, stream=side):
                    slot.sample()
                with captured(training, pool):
                    self._compute(slot.batch, slot.step)
                slot.sampling = sampling
                slot.training = training
                pool = training.pool()  # shared: they run one after the other
            if self.flat is not None:
                self.update = torch.cuda.CUDAGraph()
                with captured(self.update):
                    self._update()
            return None
        except REFUSALS as error:
            torch.cuda.set_stream(stream)
            failure = reason(error)
        self.update = None
        for slot in self.slots:
            slot.sampling = slot.training = None
        gc.collect()  # the failed step, which its errors keep
        return failure

    def _compute(self, batch, step):
        """Take a step on one batch, padded or not, up to the flat gradient if there is one."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run.loss(batch, step)
        loss.backward(self.weight)
        self.loss_sum.add_(loss.detach())
        if self.flat is None:
            self.optimizer.step()
        else:
            self.flat += torch.cat([p.grad.flatten() for p in self.parameters])

    def _train(self, slot):
        """Take the step of a slot's batch, up to the flat gradient if there is one."""
        if slot.training:
            slot.training.replay()
        else:
            self._compute(slot.batch, slot.step)
        slot.trained.record()

    def _finish(self):
        """Take the rest of a step, from the flat gradient on, if there is one."""
        if self.update:
            self.update.replay()
        elif self.flat is not None:
            self._update()

    def _update(self):
        """Run the optimizer on the flat gradient, which is zero afterwards."""
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.grad = part.view_as(p)
        self.optimizer.step()
        self.flat.zero_()

    def _sample(self, slot, drawn):
        """Start sampling into a slot on the current stream."""
        slot.sampled.synchronize()  # the host writes what that read; over by now, if the batch was trained on
        torch.cuda.current_stream().wait_event(slot.trained)
        slot.fill(drawn)
        if slot.fits and slot.sampling:
            slot.sampling.replay()
        elif slot.fits:
            slot.sample()
        slot.sampled.record()

    def begin(self):
        """Reset the loss before an epoch -> LossSum."""
        return LossSum(self.loss_sum.zero_())

    def load_batch(self, batch, number):
        """Draw a batch and start sampling it into a slot -> the Batch completed, or `step` makes it again."""
        slot = self.slots[number]
        with slot.stream(number):
            self._sample(slot, drawn(self.run.task, batch))
        return batch._replace(blocks=slot.batch.blocks, x=slot.x, y=slot.y[: len(batch.seeds)])

    def step(self, batch, clock):
        """Train on a batch of the loader: forward, loss, backward, and the optimizer after the last of a step's."""
        number = next(i for i, slot in enumerate(self.slots) if slot.x is batch.x)
        slot = self.slots[number]
        with clock.timed("stall"):
            fits = not slot.status
        if not fits:
            self.repeated += 1
            with slot.stream(number):
                # also for a damaged graph or invalid seeds: `sample` raises
                batch = slot.fetch(number, slot.drawn, batch)
            batch.wait()
        with clock.timed("step", on_gpu=True):
            weight = 1 / batch.total  # of a seed: gradients are summed over passes and ranks
            if weight != self.weighs:
                self.weight.fill_(weight)
                self.weighs = weight
            if fits:
                self.run.reseed(batch, batch.global_step)
                self._train(slot)
            else:
                self._compute(batch, batch.global_step)
            if not batch.last:
                return
            if self.run.ranks.world > 1:
                dist.all_reduce(self.flat)
            self._finish()


def flags(kinds):
    """Declare the flag of CUDA graphs."""
    return {
        "sample_threads": dict(
            cuda_graph=kinds.alike(
                kinds.one_of("auto", "on", "off"),
                "auto",
                "a step as CUDA graphs; off: kernels one by one; on: print why if not (default: auto)",
                needs=[kinds.gpu_for("cuda_graph", "on")],
            )
        )
    }
