"""A run: data, sampler, ring and network built from the flags; outputs of batches, in training too, and of all nodes.

run = open_run(ranks, args, path)
logits = run.forward(batch)          # of a batch of run.loader(seeds)
logits = run.sampled(nodes)          # from neighbours drawn as in training
logits = run.exact()                 # of all nodes from all their neighbours
"""

import copy
import sys
from contextlib import nullcontext

import torch

from disk.files import StoreError
from inference import inference, layerwise
from loader import NodeLoader, seeds_at
from model import graph_degrees, is_gnn
from run import own_model
from run.edge_data import degrees_at
from run.flags import TASKS
from run.placement import check_memory, make_sampler, place_data, reading_all_edges, settle
from sampler import mix
from tasks.metrics import check_scores

# up to this many edges, networks that cannot be evaluated layer by layer are evaluated full-batch
WHOLE_GRAPH_EDGES = 1 << 22


def open_run(ranks, args, path, fits=lambda args, task: None):
    """Open the store at a path, place it and build the network -> Run. fits: function(args, task), called with the
    settled flags, that raises if the data do not match the checkpoint to resume, and returns `EdgeData.numbers`."""
    task = TASKS[args.task](args, path, ranks.say)
    args, used = settle(ranks, args, task)
    precise = "high" if args.precision == "tf32" and ranks.gpus else "highest"
    torch.set_float32_matmul_precision(precise)
    used = used._replace(numbers=fits(args, task))
    if not own_model.is_own(args.model):
        check_memory(ranks, args, task)
    sampler, ring = place_data(ranks, args, task, used)
    return Run(ranks, args, task, used, sampler, ring, build_model(ranks, args, task, used))


def build_model(ranks, args, task, used):
    """Build the network, with initial weights of --seed, the same on every rank."""
    store, custom, digest = task.store, None, None
    torch.manual_seed(args.seed)
    if own_model.is_own(args.model):
        if store.features.shape[0] < store.num_nodes:
            some = "nodes without features, for which built-in models learn rows"
            raise StoreError(f"--model {args.model}: {store.path} has types of {some}")
        edge_dim = store.edge_dim if used.features is not None else 0
        sizes = store.feature_dim, store.num_classes, edge_dim
        custom, digest = own_model.build(args.model, args.model_args or [], *sizes)
    model = task.build(args, custom)
    model.digest = digest  # SHA-256 of the file of a user's network
    task.set_buffers(model)
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model.to(ranks.device, dtype)
    if not any(getattr(module, "uses_degree", False) for module in model.modules()):
        return model
    if used.time is not None and used.type is not None:
        conflict = "a layer counts degrees by time, and lists are sorted by type first"
        raise StoreError(f"--model {args.model}: {conflict}; --temporal off shows all edges")
    if used.time is not None:
        model.degrees = degrees_at(store.indptr, used)
    else:
        with reading_all_edges():
            model.degrees = graph_degrees(store.indptr, store.indices).to(ranks.device, dtype)
    return model


class Run:
    """Flags, data and network of a run. by_layers: exact inference goes layer by layer, which it
    cannot with times: a node's row in each layer then depends on the time at which it is seen."""

    def __init__(self, ranks, args, task, used, sampler, ring, model):
        self.ranks, self.args, self.task, self.store = ranks, args, task, task.store
        self.sampler, self.ring, self.model = sampler, ring, model
        # for links, exact inference is as of the end of time: it sees all edges
        self.used = used._replace(time=None) if task.timed_pairs else used
        self.by_layers = layerwise(model) and self.used.time is None

    def loader(self, seeds, **options):
        """Build the NodeLoader of this rank's part of every step, from the flags; `options` override them."""
        args, ranks, task = self.args, self.ranks, self.task
        settings = {name: getattr(args, name) for name in ("batch_size", "accumulate", "seed")}
        settings |= {"rank": ranks.rank, "world": ranks.world, "depth": args.prefetch}
        settings |= {"threads": args.sample_threads, "sampler": self.sampler, "ring": self.ring}
        settings |= {"draw": task.draw, "load_batch": task.load_batch, **options}
        return NodeLoader(self.store, seeds, args.fanout, **settings)

    def forward(self, batch, key=None, network=None):
        """Run the network on a batch, in --precision -> logits or embeddings [S, C] of its seeds,
        or targets of its graphs; float32, or float64 with fp64. key: seed of dropout. network: the
        model wrapped in DistributedDataParallel; None: the bare one."""
        device = self.ranks.device
        if key is not None and own_model.is_own(self.args.model):
            # a different mask on each rank and in each pass
            seed = key ^ int(batch.seeds[:1].sum())
            # torch.manual_seed spends 0.1 ms on querying devices of all kinds
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index].manual_seed(seed)
        bf16 = self.args.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            output = self.task.output(self, self.model if network is None else network, batch, key)
        return output.to(torch.promote_types(output.dtype, torch.float32))

    def loss(self, batch, step, network=None):
        """Compute the loss of a training batch, as `Task.loss`. step: counted over all epochs, which keys dropout; in a
        CUDA graph an int64 tensor [1] on the GPU. network: as for `forward`."""
        key = mix(self.args.seed)
        # a GPU computes the same, see `layer_seed` of model.py, from the key as a signed int64
        on_gpu = isinstance(step, torch.Tensor)
        key = (key - (key >> 63 << 64), step) if on_gpu else mix(key ^ step)
        output = self.forward(batch, key, network)
        return self.task.loss(self.model, output, batch.y)

    def sampled(self, nodes, times=None):
        """Estimate outputs [n, C] of nodes [n], at times [n], from neighbours drawn as in training,
        for the cost of a few batches; in host memory, the same on all ranks."""
        draw = lambda batch: (nodes[batch.seeds], {}, None)  # noqa: E731
        draw = draw if times is None else seeds_at(times, nodes)
        loader = self.loader(torch.arange(len(nodes)), shuffle=False, draw=draw)
        return self.rows(self.model, loader, len(nodes), self.forward)

    @torch.no_grad()
    def rows(self, model, loader, count, output):
        """Collect output(batch) over all batches of `loader` -> [count, C] in host memory, the same on all ranks."""
        model.eval()
        rows = None
        for batch in loader:
            part = output(batch).cpu()
            rows = part.new_zeros(count, part.shape[1]) if rows is None else rows
            rows[batch.seeds] = part
        return self.ranks.reduce(rows)

    def exact(self, layers=None):
        """Compute logits float32 [V, C] of all nodes from all their neighbours: layer by layer, on Linux split over
        the ranks of each machine; in batches, split over all ranks, for other networks.
        With `layers`, return the output of that many first layers, [V, hidden]."""
        ranks, store = self.ranks, self.store
        model = copy.deepcopy(self.model).float() if self.args.precision == "fp64" else self.model
        if not self.by_layers:
            logits = self.exact_in_batches(model, layers)
        else:
            x = getattr(store.features, "tensor", store.features)
            options = {
                "edges": self.used.features,
                "types": self.used.seen_types(),
                "layers": layers,
            }
            if ranks.world > 1 and sys.platform == "linux":  # elsewhere each computes all nodes
                options |= {"rank": ranks.local_rank, "world": ranks.local_world}
                options["total"] = ranks.sum_here
            try:
                with reading_all_edges():
                    logits = inference(model, store.indptr, store.indices, x, **options)
            except OSError as error:
                raise StoreError(f"no exact inference: {error}") from error
        check_scores(logits, "exact outputs")
        return logits

    def exact_in_batches(self, model, layers=None):
        """Compute logits float32 [V, C] of all nodes from batches with all neighbours, or all that a node may
        see at its time, as many hops deep as --fanout is long. A small graph without times is one batch,
        split over the ranks; else batches are of --batch-size, and each computes most of the graph again."""
        args, ranks, store, used = self.args, self.ranks, self.store, self.used
        small = store.num_edges <= WHOLE_GRAPH_EDGES and used.time is None
        fanout, drawn = [-1] * (layers or len(args.fanout)), used._replace(weight=None)
        sampler = make_sampler(args, store.indptr, store.indices, fanout, drawn)
        options = {"sampler": sampler, "ring": None, "device": ranks.device, "reuse": True}
        options |= {"edges": used.features is not None, "shuffle": False, "accumulate": 1}
        options["draw"] = None if used.time is None else seeds_at(used.seed_time)
        if small:
            options |= {"batch_size": -(-store.num_nodes // ranks.world), "depth": 0}
        loader = self.loader(torch.arange(store.num_nodes), **options)

        def output(batch):
            if not is_gnn(model):
                return self.task.output(self, model, batch, None).float()
            x = model.embed(batch.blocks[0].src_nodes, batch.x)
            edges = batch.edges or [None] * len(fanout)
            for i, block in enumerate(batch.blocks):
                x = model.step(i, block, x, edges=edges[i])
            return x.float()

        return self.rows(model, loader, store.num_nodes, output)
