"""The network of a run: built from the flags, applied to batches, to sampled nodes and, exactly, to all nodes.

run = open_run(ranks, args, path)
logits = run.forward(batch)          # of a batch of run.loader(seeds)
logits = run.sampled(nodes)          # from neighbours drawn as in training
logits = run.exact()                 # of all nodes from all their neighbours
"""

import copy
from contextlib import nullcontext

import torch

from disk.files import StoreError
from features import FeatureRing
from loader import NodeLoader, seeds_at
from model import GNN, graph_degrees, inference, layerwise
from run import own_model
from run.checkpoint import TASKS, build_network, check_graph
from run.data import make_sampler, place_data, prepared, reading_all_edges, settle
from run.edge_data import degrees_at
from tasks.metrics import check_scores

# up to this many edges, networks that are not layer by layer are evaluated on the whole graph as one batch
WHOLE_GRAPH_EDGES = 1 << 22


def open_run(ranks, args, path, state=None, file=None):
    """Open the data, place it and build the network -> Run.

    Args:
        path: store directory, None under torchrun. state, file: of the checkpoint to go on from, which the data has to
            fit.
    """
    say = print if ranks.leads else lambda line: None
    task = TASKS[args.task](args, prepared(ranks, args, path), say)
    args, used = settle(ranks, args, task)
    precise = "high" if args.precision == "tf32" and ranks.gpus else "highest"
    torch.set_float32_matmul_precision(precise)
    if state:
        check_graph(state, file, args, task.store)
        if args.task == "node":
            # the labels of another graph may lack some
            task.store.num_classes = state["graph"]["num_classes"]
    sampler, ring = place_data(ranks, args, task, used)
    return Run(ranks, args, task, used, sampler, ring, build_model(ranks, args, task, used))


def build_model(ranks, args, task, used):
    """The network with the initial weights of --seed, the same on every rank."""
    store = task.store
    torch.manual_seed(args.seed)
    own = digest = None
    if own_model.is_own(args.model):
        sizes = (
            store.feature_dim,
            store.num_classes,
            store.edge_dim if used.features is not None else 0,
        )
        own, digest = own_model.build(args.model, args.model_args or [], *sizes)
    widths = {name: getattr(store, name, 0) for name in ("num_classes", "edge_dim")}
    model = build_network(args, {**store.meta, **widths}, own)
    model.digest = digest  # SHA-256 of the file of a user's network
    task.prepare(model)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model.to(ranks.device, dtype)
    if layerwise(model) and any(layer.uses_degree for layer in model.layers):
        with reading_all_edges():
            if used.time is not None:
                model.degrees = degrees_at(store.indptr, used.time, used.strict)
            else:
                model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device, dtype)
    return model


class Run:
    """Flags, data and network of a run.

    Attributes:
        ranks, args: of ddp.py; the settled flags. task, store: of tasks/, and its data. sampler, ring: None for a task
        that loads its batches itself. used: EdgeData. model: the network, not distributed.
        by_layers: exact inference goes layer by layer. At each node's own time every layer has rows of its own.
    """

    def __init__(self, ranks, args, task, used, sampler, ring, model):
        self.ranks, self.args, self.task, self.store = ranks, args, task, task.store
        self.sampler, self.ring, self.model = sampler, ring, model
        # for links, exact inference is that at the end of time
        self.used = used if task.timed_inference else used._replace(time=None)
        self.by_layers = layerwise(model) and self.used.time is None

    def loader(self, seeds, **options):
        """The NodeLoader of the flags: this rank's part of every step."""
        args, ranks = self.args, self.ranks
        made = {"sampler": self.sampler, "ring": self.ring, "draw": self.task.draw}
        return NodeLoader(
            self.store,
            seeds,
            args.fanout,
            batch_size=args.batch_size,
            accumulate=args.accumulate,
            seed=args.seed,
            rank=ranks.rank,
            world=ranks.world,
            depth=args.prefetch,
            threads=args.sample_threads,
            **{**made, "load": self.task.load, **options},
        )

    def forward(self, batch, key=None, network=None):
        """Logits [S, C] of a batch's seeds, embeddings, or targets of its graphs, computed in --precision; float32,
        float64 with fp64.

        In training, dropout is a function of the key: the same on all ranks, where it is drawn by node. network: the
        model inside of DistributedDataParallel.
        """
        device = self.ranks.device
        if key is not None and not isinstance(self.model, GNN):
            # torch.manual_seed takes 0.1 ms to ask for devices of all kinds
            torch.default_generator.manual_seed(key)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(key)
        bf16 = self.args.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            output = self.task.output(self, network or self.model, batch, key)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    @torch.no_grad()
    def sampled(self, nodes, times=None):
        """Outputs [n, C] of nodes [n], at times [n], from neighbours drawn as in training: an estimate that costs a few
        batches; in host memory, the same on all ranks."""
        self.model.eval()
        draw, rows = lambda batch: (nodes[batch.seeds], {}, None), None  # noqa: E731
        if times is not None:
            draw = seeds_at(times, nodes)
        for batch in self.loader(torch.arange(len(nodes)), shuffle=False, draw=draw):
            output = self.forward(batch).cpu()
            rows = output.new_zeros(len(nodes), output.shape[1]) if rows is None else rows
            rows[batch.seeds] = output
        return self.ranks.reduce(rows)

    def exact(self, layers=None):
        """Logits float32 [V, C] of all nodes from all their neighbours: layer by layer, split over the ranks of each
        machine; for a network without layers of model.py in batches, split over all ranks. With `layers` the output of
        so many of the first layers, [V, hidden]."""
        ranks, store = self.ranks, self.store
        model = copy.deepcopy(self.model).float() if self.args.precision == "fp64" else self.model
        if not self.by_layers:
            logits = self.exact_in_batches(model, layers)
        else:
            try:
                with reading_all_edges():
                    logits = inference(
                        model,
                        store.indptr,
                        store.indices,
                        getattr(store.features, "tensor", store.features),
                        rank=ranks.local_rank,
                        edges=self.used.features,
                        world=ranks.local_world,
                        total=ranks.sum_here if ranks.local_world > 1 else None,
                        layers=layers,
                    )
            except OSError as error:
                raise StoreError(f"no exact inference: {error}") from error
        check_scores(logits, "exact outputs")
        return logits

    @torch.no_grad()
    def exact_in_batches(self, model, layers=None):
        """Logits float32 [V, C] of all nodes from batches that hold all neighbours as many hops away as --fanout has
        numbers, or those that a node may see at its time: all nodes at once where the graph is small and without times,
        else --batch-size, each batch computing most of the graph again."""
        args, ranks, store, used = self.args, self.ranks, self.store, self.used
        model.eval()
        small = store.num_edges <= WHOLE_GRAPH_EDGES and used.time is None
        fanout = [-1] * (layers or len(args.fanout))
        sampler = make_sampler(
            args, store.indptr, store.indices, fanout, used._replace(weight=None)
        )
        ring = FeatureRing(
            getattr(store.features, "tensor", store.features),
            store.labels,
            slots=args.prefetch + 1,
            device=ranks.device,
            dtype=torch.float32,
            edge_features=used.features,
        )
        loader = NodeLoader(
            store,
            torch.arange(store.num_nodes),
            fanout,
            shuffle=False,
            sampler=sampler,
            ring=ring,
            draw=None if used.time is None else seeds_at(used.seed_time),
            batch_size=-(-store.num_nodes // ranks.world) if small else args.batch_size,
            rank=ranks.rank,
            world=ranks.world,
            depth=0 if small else args.prefetch,
        )
        logits = torch.zeros(store.num_nodes, args.hidden if layers else store.num_classes)
        for batch in loader:
            if isinstance(model, GNN):
                x, edges = batch.x, batch.edges or [None] * len(fanout)
                for i, block in enumerate(batch.blocks):
                    x = model.step(i, block, x, edges=edges[i])
            else:
                x = self.task.output(self, model, batch, None)
            logits[batch.seeds] = x.float().cpu()
        return ranks.reduce(logits)
