"""A training step as CUDA graphs: the host writes the seeds of a batch and launches twice.

    graphs, said = step_graph.build(ranks, args, store, sampler, ring, model, optimizer, predict)   # None, and why not
    for batch in NodeLoader(..., sampler=graphs, ring=graphs):
        graphs.step(batch)               # forward, loss, backward, optimizer

One graph samples a batch, fetches its features (of GraphSAGE's outermost hop it draws and averages them in one kernel)
and looks up the labels; another trains on it. Every batch in flight has a slot with memory of its own, so that the next
batch is sampled, on the slot's stream, while this one is trained on. A graph cannot change its shapes, so they are
padded: room for as many nodes and edges as the first batches of the run took, and some more. What is padded has no
edges, no label and no gradient. The number of the step, by which neighbours and dropout are drawn, is read from GPU
memory.

A batch that does not fit says so before its turn comes: it is sampled again, and trained on, in its own shapes. That is
the same batch, for what is drawn depends on the step alone; which batches these are depends on the flags alone, so a
run repeats to the last bit, interrupted or not.

The same kernels in the same shapes can be launched one by one (`--cuda-graph off`, and where a GPU refuses to capture
them): that gives the same bits. Steps that cannot be graphs (`obstacle`) are taken in the shapes of each batch; where
such a step computes what a graph could (the tests do that), sums over padded rows may be rounded differently.

With several ranks the gradients are averaged between two graphs, as one vector; DistributedDataParallel takes no part.
This file needs features.py, fused_cuda.py (and what that needs), loader.py, model.py, sampler.py and sampler_cuda.py.
"""

import gc
from contextlib import contextmanager

import torch
import torch.distributed as dist

import fused
import sampler_cuda
from features import Fetched
from loader import AtSeedTimes
from model import cross_entropy
from sampler import Block, mix

PADDED = ("sage", "sage-pool", "gcn", "gat", "gin")  # models whose kernels leave out what is padded
MEASURED = 8  # batches whose sizes say how much room there is
ELSEWHERE = "another rank cannot have them"
TRIED = 3  # steps with which graphs are compared with steps without, and more where there are more slots
APART = 0.02  # between their inputs, and their losses, before graphs are not trusted


def averages_in_place(args, *dtypes):
    """Whether the first layer is given averages straight from features of these types, and not their rows."""
    return args.model == "sage" and not args.input_dropout and {*dtypes} <= {torch.float32, torch.bfloat16}


def hindrance(args):
    """What of a run's flags keeps its steps from being CUDA graphs, in words; None where nothing does."""
    most, fanout = sampler_cuda.AGGREGATED, ",".join(map(str, args.fanout))
    for hinders, why in (
        (args.task != "node", f"they are for --task node, this is {args.task}"),
        (args.model not in PADDED, f"they are for --model {', '.join(PADDED)}, this is {args.model}"),
        (args.norm == "batch", "--norm batch would count the padding"),
        (args.checkpoint_activations, "--checkpoint-activations computes layers twice"),
        (args.precision == "fp64", "--precision fp64 has no kernels"),
        (args.accumulate > 1, f"--accumulate {args.accumulate} makes a step of several batches"),
        (len(args.fanout) < 2, "one layer is too little to be worth it"),
        (min(args.fanout) < 1, f"--fanout {fanout}: numbers from 1 on are needed"),
        (averages_in_place(args) and args.fanout[-1] > most,
         f"--fanout {fanout}: the last number is {most} at most"),
        (args.sampler != "uniform", "neighbours are not drawn uniformly"),
    ):  # fmt: skip
        if hinders:
            return why
    return None


def hops_held(args, store, used):
    """How many hops of a batch the graphs of a run would hold in GPU memory, where the GPU reads the features; 0 where
    there can be none. used: `EdgeData` of the store."""
    unlike = used.time is not None or used.features is not None or store.labels.dim() > 1
    return 0 if unlike or hindrance(args) else len(args.fanout) - averages_in_place(args, store.features.dtype)


def obstacle(ranks, args, sampler, ring):
    """Why a step of this run cannot be a CUDA graph, in words; None where it can."""
    if not ranks.gpus:
        return "there is no GPU"
    if why := hindrance(args):
        return why
    backend = getattr(sampler, "_backend", None)
    for hinders, why in (
        (isinstance(sampler, AtSeedTimes), "seeds see edges by their times (--temporal off shows them all)"),
        (not ring.on_device, f"--mode {args.mode} fetches features on the host"),
        (ring.labels.dim() > 1, "nodes have several labels"),
        (not isinstance(ring.features, torch.Tensor), "the features are no tensor, or lie behind a cache"),
        (ring.edge_ring, "edges have features"),
        (not isinstance(backend, sampler_cuda.Backend), "the sampler's kernels are not there"),
    ):  # fmt: skip
        if hinders:
            return why
    return None if fused.has_kernels(sampler.indices) else "the layers' kernels are not there"


def build(ranks, args, store, sampler, ring, model, optimizer, predict):
    """Capture the graphs of a run, or prepare the same steps without where --cuda-graph is off or capture fails, and
    try them on a batch, which leaves model and optimizer as they were.

    Args:
        ranks, args, store, sampler, ring, optimizer: those of train.py.
        model: the GNN itself, and no DistributedDataParallel around it, whose hooks would be captured.
        predict: function (batch, key) -> logits float32 [S, C].

    Returns:
        (StepGraphs, a line about them), or (None, why there are none, where they were asked for or failed). The same on
        all ranks, which call it together.
    """
    why = obstacle(ranks, args, sampler, ring)
    if ranks.sum(bool(why))[0]:
        return None, (why or ELSEWHERE) if args.cuda_graph == "on" else ""
    if ranks.world > 1:
        ranks.check_equal(model)
    stream = torch.cuda.current_stream()
    try:
        graphs = StepGraphs(ranks, args, store, sampler, ring, model, optimizer, predict)
        return graphs, graphs.said
    except (RuntimeError, AttributeError) as error:  # AttributeError: a torch without what is asked for
        torch.cuda.set_stream(stream)
        return None, reason(error)


def reason(error):
    """The first line of an exception, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Slot:
    """A batch in flight: where it is sampled, what it is trained on, and the two graphs.

    Attributes:
        frame: of sampler_cuda.py. x: [rows, F] of all nodes, or [rows, 2F], own row beside mean of the outermost hop.
            y: int64 [S], -1 where there is no seed. batch: all that as padded blocks. key: of dropout, for model.py's
            `layer_seed`.
    """

    def __init__(self, backend, ring, room, seed):
        (rows, places), labels, self.ring = room, ring.labels, ring
        self.frame = backend.frame(rows[0], len(places), rows, places)
        self.x = ring.features.new_zeros(rows[-1], ring.width, dtype=ring.dtype)
        blocks = [Block(*fields) for fields in reversed(self.frame.blocks)]
        self.seeds, self.nodes = blocks[-1].src_nodes[: rows[0]], blocks[0].src_nodes
        if ring.first_hop:  # the outermost block has no edges: they are averaged as they are drawn
            none = self.nodes[:0]
            blocks.insert(0, Block(none, none, self.nodes))
            if not self.frame.aggregate(ring.features, self.x):
                raise RuntimeError("the kernel of the outermost hop cannot be compiled")
        self.y, self.labels = labels.new_full((rows[0],), -1), labels
        self.places = torch.arange(rows[0], device=labels.device)
        self.batch = Fetched(blocks, self.x, self.y)
        mixed = mix(seed)
        self.key = mixed - (mixed >> 63 << 64), self.frame.input[:1]  # as a signed int
        self.sampling, self.training, self.trained = None, None, torch.cuda.Event()  # graphs, where they are captured

    def sample(self):
        """What the first graph holds."""
        self.frame.start()
        ring = self.ring
        if not ring.first_hop and ring.features.dtype == ring.dtype:
            ring.gather(ring.features, self.nodes, self.x)
        elif not ring.first_hop:
            self.x.copy_(ring.gather(ring.features, self.nodes))
        torch.index_select(self.labels, 0, self.seeds, out=self.y)
        self.y.masked_fill_(self.places >= self.frame.sizes[1], -1)


class StepGraphs:
    """The graphs of a run; for a NodeLoader sampler and ring at once. See the first lines of this file.

    Attributes:
        loss_sum: float64, what `step` adds the loss of each batch to. said: a line. first_hop: as the ring's.
        repeated: batches so far that did not fit. captured: whether there are graphs, or launches one by one.
    """

    def __init__(self, ranks, args, store, sampler, ring, model, optimizer, predict):
        self.ranks, self.sampler, self.ring, self.model = ranks, sampler, ring, model
        self.optimizer, self.predict, self.seed = optimizer, predict, args.seed
        self.features, self.first_hop, self.stream = ring.features, ring.first_hop, ring.stream
        self.kernels = sampler._backend.kernels
        self.repeated = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        scalar = lambda dtype: torch.zeros((), dtype=dtype, device=ranks.device)  # noqa: E731
        self.loss_sum, self.weight, self.rate = scalar(torch.float64), scalar(torch.float32), scalar(torch.float32)
        self.weighs = None  # the number in `weight`
        seeds, room = self._measure(store.split["train"], args)
        for group in optimizer.param_groups:
            group["capturable"] = True
        self.flat = self.update = None
        if ranks.world > 1:
            self.flat = torch.zeros(sum(p.numel() for p in self.parameters), device=ranks.device)
        self.slots = [Slot(sampler._backend, ring, room, args.seed) for _ in range(args.prefetch + 1)]
        kept = self._state()
        self.begin()
        try:
            gc.collect()  # what is freed during a capture is not given back
            failure = self._prepare(seeds, kept, args.cuda_graph != "off")
        finally:
            self._restore(kept)
        (rows, places), self.captured = room, self.slots[0].training is not None
        how = f"a step is {'three' if ranks.world > 1 else 'two'} CUDA graphs"
        if not self.captured:
            why = f"no CUDA graphs: {failure}" if failure else "CUDA graphs are off"
            how = f"{why}; their kernels are launched one by one,"
        self.said = (f"{how} with room for {rows[-1]:,} nodes and {sum(places):,} edges inside; larger batches are "
                     "taken without")  # fmt: skip

    def _measure(self, nodes, args):
        """Seeds of the first batch, and the (rows, places) of `Backend.frame` that a run's first batches would take."""
        order = nodes[torch.randperm(nodes.numel(), generator=torch.Generator().manual_seed(args.seed))]
        batches, hops = order.split(args.batch_size)[:MEASURED], len(args.fanout) - self.first_hop
        most = [[0, 0] for _ in range(hops)]
        for step, seeds in enumerate(batches):
            blocks = self._blocks(seeds, step)
            for sizes, block in zip(most, blocks[::-1]):
                sizes[:] = max(sizes[0], block.num_src), max(sizes[1], block.num_edges)
        rows, places = self.sampler._backend.shapes(args.batch_size)
        some_more = lambda n, bound: min(bound, -(-(n + n // 16) // 256) * 256)  # noqa: E731
        for hop, (N, E) in enumerate(most):
            rows[hop + 1], places[hop] = some_more(N, rows[hop + 1]), some_more(E, places[hop])
        return batches[0], (rows[: hops + 1], places[:hops])

    def _blocks(self, seeds, step):
        """A batch in its own shapes."""
        return self.sampler.sample(seeds, step, relabel_outer=not self.first_hop)

    def _state(self):
        """Copies of the parameters and of the optimizer's state."""
        moments = {p: {name: t.clone() for name, t in self.optimizer.state[p].items()}
                   for p in self.parameters if p in self.optimizer.state}  # fmt: skip
        return [p.detach().clone() for p in self.parameters], moments

    @torch.no_grad()
    def _restore(self, kept):
        """Put back, in place, what `_state` copied; Adam begins with zeros."""
        parameters, moments = kept
        for p, value in zip(self.parameters, parameters):
            p.copy_(value)
            for name, t in self.optimizer.state[p].items():
                t.copy_(moments[p][name]) if p in moments else t.zero_()
        self.optimizer.zero_grad(set_to_none=True)

    def _prepare(self, seeds, kept, capture):
        """Take a few steps in the shapes of a batch, capture the padded ones if asked to, and take the same steps with
        them: the losses have to agree -> why they were not captured, None where they were, or were not to be."""
        with self.stream(0):
            blocks = self._blocks(seeds, 0)
            batch, key = self.ring.fetch(0, blocks), mix(mix(self.seed))
        batch.wait()
        self.weight.fill_(1 / len(seeds))
        slots = (self.slots * TRIED)[: max(TRIED, len(self.slots))]
        expected = [self._loss(self._compute, batch, key) for _ in slots]
        self._restore(kept)
        failure = self._capture(seeds) if capture else None
        self._restore(kept)
        found, off = [], []
        for slot in slots:
            if trouble := self._sample(slot, seeds, 0):
                raise RuntimeError(f"a batch that was measured does not fit ({trouble})")
            difference = (slot.x[: len(batch.x)] - batch.x).float().norm()
            off.append((difference / batch.x.float().norm().clamp(min=1e-30)).item())
            found.append(self._loss(self._train, slot))
        right = all(abs(a - b) <= APART * abs(a) for a, b in zip(expected, found)) and all(o <= APART for o in off)
        if self.ranks.sum(not right)[0]:
            raise RuntimeError(
                f"their input is {max(off):.1%} off, their losses are {found}, and {expected} without graphs"
            )
        return failure

    def _loss(self, run, *args):
        """The loss of a step -> float."""
        self.loss_sum.zero_()
        run(*args)
        self._exchange()
        return self.loss_sum.item()

    def _capture(self, seeds):
        """Capture the graphs of all slots -> None, or why that failed on this rank or another: then there are none."""
        stream, pool, failure = torch.cuda.current_stream(), None, None
        try:
            for slot in self.slots:
                with self.stream(0):
                    slot.frame.fill(seeds, 0)
                    slot.sample()
                    self._compute(slot.batch, slot.key)  # in these shapes: what is made at first use is made now
                    torch.cuda.synchronize()
                sampling, training = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
                with captured(sampling):
                    slot.sample()
                with captured(training, pool):
                    self._compute(slot.batch, slot.key)
                slot.sampling, slot.training = sampling, training
                pool = training.pool()  # they run one after the other and leave nothing there
            if self.flat is not None:
                update = torch.cuda.CUDAGraph()
                with captured(update):
                    self._update()
                self.update = update
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            failure = reason(error)
        if self.ranks.sum(failure is not None)[0]:
            failure, self.update = failure or ELSEWHERE, None
            for slot in self.slots:
                slot.sampling = slot.training = None
        return failure

    def _compute(self, batch, key):
        """A step on one batch, padded or not; with several ranks up to the flat gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.predict(batch, key)
        loss = cross_entropy(logits, batch.y)
        (loss * self.weight).backward()
        self.loss_sum.add_(loss.detach())
        if self.flat is None:
            self.optimizer.step()
        else:
            torch.cat([p.grad.flatten() for p in self.parameters], out=self.flat)
            self.flat /= self.ranks.world

    def _train(self, slot):
        """The step of a slot's batch, up to the flat gradient with several ranks."""
        slot.training.replay() if slot.training else self._compute(slot.batch, slot.key)
        slot.trained.record()

    def _exchange(self):
        if self.flat is not None:
            dist.all_reduce(self.flat)
            self.update.replay() if self.update else self._update()

    def _update(self):
        """With several ranks: the optimizer, from the flat gradient."""
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.grad = part.view_as(p)
        self.optimizer.step()

    def _sample(self, slot, seeds, step):
        """Sample into a slot, on the current stream, and wait for it -> 0, or why it is no batch (`trouble` of
        sampler_cuda.py)."""
        torch.cuda.current_stream().wait_event(slot.trained)
        slot.frame.fill(seeds, step)
        slot.sampling.replay() if slot.sampling else slot.sample()
        self.kernels.wait()
        return slot.frame.trouble

    def begin(self):
        """Before an epoch: take the learning rate of the optimizer's groups, forget the losses -> loss_sum."""
        for group in self.optimizer.param_groups:
            self.rate.fill_(group["lr"])
            group["lr"] = self.rate
        return self.loss_sum.zero_()

    def sample(self, seeds, step, relabel_outer=False):
        """What `fetch` is to sample."""
        return seeds, step

    def fetch(self, number, wanted):
        """Sample and fetch a batch into a slot, or elsewhere where it does not fit -> `Fetched`, ready to train on."""
        slot = self.slots[number]
        if self._sample(slot, *wanted):  # damage and seeds that are not nodes are found there too
            self.repeated += 1
            return self.ring.fetch(number, self._blocks(*wanted))
        return slot.batch._replace(y=slot.y[: len(wanted[0])])

    def step(self, batch):
        """Train on a batch of the loader: forward, loss, backward, optimizer."""
        if (weight := self.ranks.world / batch.total) != self.weighs:  # seeds weigh 1 / total, see train.py
            self.weight.fill_(weight)
            self.weighs = weight
        slot = next((slot for slot in self.slots if slot.x is batch.x), None)
        if slot is None:
            self._compute(batch, mix(mix(self.seed) ^ batch.global_step))
        else:
            self._train(slot)
        self._exchange()


@contextmanager
def captured(graph, pool=None):
    """Capture the body; other threads of this process, NCCL's among them, may call CUDA meanwhile."""
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield
