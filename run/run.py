"""A run: data, sampler, ring and network built from the flags; outputs of batches, in training too, and of all nodes.

run = open_run(ranks, flags, path)
logits = run.forward(batch)          # of a batch of run.loader(seeds)
logits = run.sampled(nodes)          # from neighbours drawn as in training
logits = run.exact()                 # of all nodes from all their neighbours
"""

import copy
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from disk.files import StoreError
from extras import extra
from features import ask, stored
from inference import inference, layerwise
from loader import NodeLoader
from model import graph_degrees, is_gnn
from run import own_model
from run.flags import TASKS, Plan
from run.placement import cached, place_data, reading_all_edges, settle, used_of
from run.plan import memory_lines
from run.report import plan_lines
from sampler import NeighborSampler, mix
from sources import prepare as datasets
from tasks.metrics import check_scores

# up to this many edges, networks that cannot be evaluated layer by layer are evaluated full-batch
WHOLE_GRAPH_EDGES = 1 << 22


def prepare(flags):
    """Build the store of --dataset on first use -> its directory."""
    names = "seed backend symmetrize drop_duplicates feature_dtype".split()
    options = {name: getattr(flags, name) for name in names}
    return datasets.prepare(flags.dataset, flags.root, **options)


def prepared(ranks, flags):
    """Prepare --dataset: local rank 0 builds the store while the other ranks of its machine wait -> its directory.
    StoreError, on every rank, if there is none on one machine."""
    problem = None
    with ranks.patience():
        try:
            if ranks.local_rank == 0:
                prepare(flags)
        except StoreError as error:
            problem = str(error)
    for rank, text in enumerate(ranks.gather(problem)):
        if text:
            raise StoreError(f"rank {rank}: {text}" if rank else text)
    return prepare(flags)


def open_run(ranks, flags, path, fits=lambda plan, task: {}):
    """Open the store at a path, place it and build the network -> Run. fits: function(plan, task) that raises if the data
    do not match the checkpoint to resume, and returns more for `Used.seen`."""
    task = TASKS[flags.task].opened(flags, path, ranks.say)
    plan, used = settle(ranks, flags, task)
    tf32 = plan.precision == "tf32" and ranks.gpus
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    used = used._replace(seen=used.seen | fits(plan, task))
    sampler, ring = place_data(ranks, plan, task, used)
    torch.manual_seed(plan.seed)  # of initial weights, the same on every rank
    model, digest = build_model(plan, task, used)
    place_model(ranks, model, plan, task, sampler)
    return Run(ranks, plan, task, used, sampler, ring, model, digest)


def build_model(plan, task, used):
    """Build the network, with random weights -> (network, SHA-256 of its file or None)."""
    store = task.store
    digest = own_model.load(plan.model)[1] if own_model.is_own(plan.model) else None
    if plan.conv:
        return task.build(plan), digest
    if task.placed and store.features.shape[0] < store.num_nodes:
        raise StoreError(
            f"--model {plan.model}: {store.path} has types of "
            "nodes without features, for which built-in models learn rows"
        )
    widths = task.own_widths(used.edges is not None)
    network = own_model.build(plan.model, plan.model_args or [], *widths, blocks=task.placed)
    if plan.predict and plan.predict_what == "embeddings" and not hasattr(network, "embeddings"):
        if used.times is not None or not layerwise(network):
            raise StoreError(
                f"--predict-what embeddings: {plan.model} needs a method embeddings(blocks, x), "
                "which returns a row for each seed"
            )
    return task.build(plan, network), digest


def place_model(ranks, model, plan, task, sampler):
    """Set what a network takes from the data, and move it to this rank's device."""
    store = task.store
    task.set_buffers(model)
    dtype = torch.float64 if plan.precision == "fp64" else torch.float32
    model.to(ranks.device, dtype)
    if not any(getattr(module, "uses_degree", False) for module in model.modules()):
        return
    if sampler.timed:
        model.degrees = extra(".times").degrees_at(sampler)
    else:
        with reading_all_edges():
            model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device, dtype)


def dry_run(ranks, flags, path):
    """Print what the data need in memory in each mode, and the plan, as training would settle it. ranks: of one process that
    stands for all."""
    task = TASKS[flags.task].opened(flags, path, ranks.say)
    if task.placed:
        ranks.say("\n".join(memory_lines(ranks, flags, task, used_of(flags, task))))
    plan, used = settle(ranks, flags, task)
    if task.placed:
        cached(ranks, plan, task, used, task.store.features)
    with torch.device("meta" if plan.conv else "cpu"):
        model, _ = build_model(plan, task, used)
    ranks.say("\n".join(plan_lines(ranks, plan, task, model, plan.trains)))
    ranks.say(
        f"plan    mode {plan.mode}, precision {plan.precision}, weights of the {plan.weights} epoch, "
        f"{plan.prefetch} batches ahead, {plan.sample_threads} sampled at once"
    )


@dataclass
class Run:
    """Plan, data and network of a run. digest: SHA-256 of the file of a user's network, else None. by_layers: exact
    inference goes layer by layer, which it cannot with times: a node's row in each layer then depends on the time at
    which it is seen. custom: the network is a user's, with torch's dropout."""

    ranks: object  # `Ranks` of ddp.py
    plan: Plan
    task: object  # `Task`
    used: object  # its `Used`
    sampler: object  # `NeighborSampler`, and
    ring: object  # `FeatureRing`; None for a task that reads its own batches
    model: nn.Module
    digest: str | None = None

    def __post_init__(self):
        self.store = self.task.store
        self.custom = own_model.conv_of(self.plan.model) is None
        self.by_layers = layerwise(self.model) and self.used.times is None
        if self.custom and getattr(self.model, "target_scale", None):
            self.by_layers = is_gnn(self.model)  # which scales its outputs

    @cached_property
    def trained(self):
        """Keys of the training examples, also of a checkpoint that training began from, int64 [n], ascending; None if the
        task has none."""
        if self.task.are_links:
            return None
        keys = self.task.keys(self.store.split["train"])
        before = self.task.trained
        return keys.sort().values if before is None else torch.cat([keys, before]).unique()

    def loader(self, seeds, **options):
        """Build the NodeLoader of this rank's part of every step, from the plan; `options` override it."""
        plan = self.plan
        settings = {
            "batch_size": plan.batch_size,
            "accumulate": plan.accumulate,
            "seed": plan.seed,
            "rank": self.ranks.rank,
            "world": self.ranks.world,
            "depth": plan.prefetch,
            "threads": plan.sample_threads,
            "sampler": self.sampler,
            "ring": self.ring,
            "draw": self.task.draw,
            "load_batch": self.task.load_batch,
            "limits": self.task.limits,
        }
        return NodeLoader(self.store, seeds, plan.fanout, **settings | options)

    def forward(self, batch, key=None, network=None):
        """Run the network on a batch, in --precision -> logits or embeddings [S, C] of its seeds,
        or targets of its graphs; float32, or float64 with fp64. key: seed of dropout. network: the
        model wrapped in DistributedDataParallel; None: the bare one."""
        device = self.ranks.device
        bf16 = self.plan.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            output = self.task.output(self, self.model if network is None else network, batch, key)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def reseed(self, batch, step):
        """Seed torch's generators for the dropout of a user's network on a batch."""
        if not self.custom:
            return
        device = self.ranks.device
        # a different mask on each rank and in each pass
        seed = mix(mix(self.plan.seed) ^ step) ^ int(batch.seeds[:1].sum())
        # torch.manual_seed spends 0.1 ms on querying devices of all kinds
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)

    def loss(self, batch, step, network=None):
        """Compute the loss of a training batch, as `Task.loss`. step: counted over all epochs, which keys dropout; in a
        CUDA graph an int64 tensor [1] on the GPU: `reseed` before. network: as for `forward`."""
        key = mix(self.plan.seed)
        if isinstance(step, torch.Tensor):
            # a GPU computes the same, see `layer_seed` of model.py, from the key as a signed int64
            key = key - (key >> 63 << 64), step
        else:
            key = mix(key ^ step)
            self.reseed(batch, step)
        output = self.forward(batch, key, network)
        return self.task.loss(self.model, output, batch.y)

    def sampled(self, nodes, times=None):
        """Estimate outputs [n, C] of nodes [n], at times [n], from neighbours drawn as in training,
        for the cost of a few batches; in host memory, the same on all ranks."""
        draw = lambda batch: (nodes[batch.seeds], {}, None)  # noqa: E731
        if times is not None:
            draw = extra(".times").seeds_at(times, nodes)
        return self.rows(torch.arange(len(nodes)), len(nodes), self.forward, draw=draw)

    @torch.no_grad()
    def rows(self, seeds, count, output, **options):
        """Collect output(batch) over all batches of the `loader` of these seeds -> [count, C] in host memory, the same on all
        ranks."""
        self.model.eval()
        rows = None
        for batch in self.loader(seeds, shuffle=False, **options):
            part = output(batch).cpu()
            rows = part.new_zeros(count, part.shape[1]) if rows is None else rows
            rows[batch.seeds] = part
        return self.ranks.reduce(rows)

    def exact(self, layers=None):
        """Compute logits float32 [V, C] of all nodes from all their neighbours: layer by layer, on Linux split over
        the ranks of each machine; in batches, split over all ranks, for other networks.
        With `layers`, return the output of that many first layers, [V, hidden], or, of a network that does not go layer
        by layer and is no GNN, its `embeddings`."""
        ranks = self.ranks
        store = self.store
        self.model.eval()
        model = self.model
        if self.plan.precision == "fp64":
            model = copy.deepcopy(model).float()
        if not self.by_layers:
            logits = self.exact_in_batches(model, layers)
        else:
            graph = store
            # of a part of a store, ranks gather rows unequally often
            x = ask(stored(store.features), "uneven")(store.features)
            label = self.sampler.spec.label
            types = None if label is None else label.whole_graph()
            options = {"x": x, "edges": self.used.edges, "types": types}
            if self.sampler.indices.is_cuda:  # what the GPU reads in place is not copied again
                graph = self.sampler
                options["edges"] = self.ring.edge_features
                if self.plan.mode == "cuda-cuda":  # rows in host memory are read many times
                    options["x"] = self.ring.source
            if ranks.world > 1 and sys.platform == "linux":  # elsewhere each computes all nodes
                total = ask(x, "answering")(ranks.sum_here)
                options |= {"rank": ranks.local_rank, "world": ranks.local_world, "total": total}
            try:
                with reading_all_edges():
                    logits = inference(model, graph.indptr, graph.indices, layers=layers, **options)
                ask(x, "finish")()
            except OSError as error:
                raise StoreError(f"no exact inference: {error}") from error
        check_scores(logits, "exact outputs")
        return logits

    def exact_in_batches(self, model, layers=None):
        """Compute logits float32 [V, C] of all nodes from batches with all neighbours, or all that a node may
        see at its time, as many hops deep as --fanout is long. A small graph without times is one batch,
        split over the ranks; else batches are of --batch-size, and each computes most of the graph again."""
        plan = self.plan
        store = self.store
        times = self.used.times
        own = not is_gnn(model)
        fanout = [-1] * (len(plan.fanout) if own else layers or len(plan.fanout))
        seen = {"seed": plan.seed, "check": False, **self.used.seen}
        options = {
            "sampler": NeighborSampler(store.indptr, store.indices, fanout, **seen),
            "ring": None,
            "device": self.ranks.device,
            "reuse": True,
            "edges": self.used.edges is not None,
            "accumulate": 1,
            "draw": None if times is None else extra(".times").seeds_at(times),
        }
        if store.num_edges <= WHOLE_GRAPH_EDGES and times is None:
            options |= {"batch_size": -(-store.num_nodes // self.ranks.world), "depth": 0}

        def output(batch):
            if own:
                network = model if layers is None else model.embeddings
                return self.task.output(self, network, batch, None).float()
            x = model.embed(batch.blocks[0].src_nodes, batch.x)
            edges = batch.edges or [None] * len(fanout)
            for i, block in enumerate(batch.blocks):
                x = model.step(i, block, x, edges=edges[i])
            return x.float()

        return self.rows(torch.arange(store.num_nodes), store.num_nodes, output, **options)
