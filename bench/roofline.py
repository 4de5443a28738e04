"""python -m bench roofline: lower bounds for each kernel of a training step on a GPU, from bytes and products.

No GPU is needed; where one has run the same step (results/kernels-h200.json), the times that it took are printed beside
the bounds. The step of extras/step_graphs.py runs on the CPU in the shapes of real batches, padded as there; our
kernels only record their arguments, torch operations what they read and write. A table larger than the L2 cache whose
rows are gathered counts one row per edge, any other tensor counts once. Data that stays in the cache between two
kernels is counted all the same: small kernels can be faster than this.
"""

import contextlib
import copy
import ctypes
import functools
import types
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.step import network
from bench.tools import opened, print_table, read_json
from extras import step_graphs
from extras.int8 import CodedFeatures
from features import FeatureRing, ask, stored
from model import CONVS, gather_rows, self_and_mean
from native import build, kernels, layers, sampler_gpu
from run.adam import Adam
from sampler import NeighborSampler

# bytes and FLOP (TF32, bf16) a second, from NVIDIA's data sheets, SXM, without sparsity
GPUS = {"H100": (3.35e12, 495e12, 989e12), "H200": (4.8e12, 495e12, 989e12)}
MEASURED = Path(__file__).parents[1] / "results/kernels-h200.json"
NVLINK = 450e9  # bytes a second to a GPU from all others of its machine, by the same data sheets
PARTS = 8  # GPUs that hold the features together
IN_ORDER, GATHERED = 0.9, 0.85  # share of the bandwidth that kernels are assumed to reach
CACHE, SECTOR = 50 << 20, 32  # bytes: L2, and what a read of 4 bytes moves
# argument that has the rows
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "linear": 0, "_linear_pointwise": 0}
# kernel: the table from which it gathers a row for each edge
TABLES = {
    "self_and_mean": "h",
    "plain_self_and_mean": "h",
    "self_and_mean_grad": "grad",
    "max_neighbours": "h",
    "max_neighbours_grad": "grad",
    "gather_rows": "table",
    "gather_codes": "table",
    "attention_scores": "source",
    "attention_sum": "source",
    "attention_weight_grad": "source",
    "attention_source_grad": "grad",
    "pick_aggregate": "features",
}
# kernel of sampler.cu: bytes for each row, for each edge, look-ups of an edge in the table of nodes
DRAWS = {
    "begin": (64, 0, 0),
    "pick": (2 * SECTOR + 20, SECTOR + 8, 2),
    "claim": (0, SECTOR + 12, 2),
    "mark": (0, 5, 1),
    "number": (2 * SECTOR + 16, 8, 0),
    "finish": (0, 12, 2),
    "list_hops": (0, 16, 0),
}


class Launch(NamedTuple):
    """A launch of one of our kernels, for bench predict."""

    kernel: str
    threads: int
    source: str
    in_order: int  # bytes
    gathered: int
    values: dict  # {argument: value; a tensor's shape, a field of a structure as argument.field}


class Costs(TorchDispatchMode):
    """Counts what kernels and operations cost -> `rows` {name: [launches, bytes in order, bytes gathered, FLOP]},
    `launches` of our kernels and `fetched`, bytes of rows read from `features`."""

    def __init__(self, features):
        super().__init__()
        self.rows = {}
        self.launches = []
        self.features = features.data_ptr()
        self.fetched = 0

    def add(self, name, in_order, gathered=0, products=0):
        row = self.rows.setdefault(name, [0, 0, 0, 0])
        row[:] = [a + b for a, b in zip(row, (1, in_order, gathered, products))]

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs, outputs = (
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in (args, out)
        )
        places = {t.untyped_storage().data_ptr() for t in inputs}
        view = outputs and all(t.untyped_storage().data_ptr() in places for t in outputs)
        if "empty" in name or view and not func._schema.is_mutable:
            return out
        if name == "index_select":
            self.add(name, size(outputs), size(outputs) + size(inputs[1:]))
        elif name in PRODUCTS:
            *slices, m, n = outputs[0].shape
            k = args[PRODUCTS[name]].shape[-1]
            products = 2 * outputs[0].numel() * k
            name = "".join(f"{count} of " for count in slices)
            self.add(f"product {name}{m:,} x {k:,} x {n:,}", size(inputs + outputs), 0, products)
        else:  # tensors changed in place are read and written
            changed = [a for a, s in zip(args, func._schema.arguments) if s.alias_info]
            self.add(name, size(inputs) + size(tree_leaves(changed) if changed else outputs))
        return out


def size(tensors):
    """Return the bytes of memory behind tensors."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors if t is not None)


def flat(values):
    """Replace tensors by their shapes and structures by their fields, in C's notation -> {name: value}."""
    plain = {}
    for name, value in values.items():
        if isinstance(value, ctypes.Structure):
            fields = {field: getattr(value, field) for field, *_ in value._fields_}
            plain |= {f"{name}.{field}": of for field, of in flat(fields).items()}
        else:
            plain[name] = tuple(value.shape) if isinstance(value, torch.Tensor) else value
    return plain


class Noted:
    """build.Kernels whose launches only record what they would cost."""

    def __init__(self, costs, source):
        self.costs = costs
        self.source = source
        self.signatures = build.signatures(source)

    def prepare(self, kernel, **given):
        return lambda threads, stream: self.run(kernel, threads, given)

    def run(self, kernel, threads, given):
        given = {name: given[name] for name in self.signatures[kernel]}
        in_order, gathered = self.moved(kernel, given)
        self.costs.add(kernel, in_order, gathered)
        plain = flat(given)
        self.costs.launches.append(Launch(kernel, threads, self.source, in_order, gathered, plain))

    def moved(self, kernel, given):
        """Return the bytes that a launch moves: in order, gathered."""
        if "b" in given and kernel != "pick_aggregate":
            per_row, per_edge, asked = DRAWS.get(kernel, DRAWS["pick"])
            hop = given.get("part")
            table = 2 * SECTOR if 4 * given["b"].V > CACHE else 0
            rows, edges = (hop.rows, hop.places) if hop else (0, given["end"])
            return per_row * rows, (per_edge + asked * table) * edges
        if given.get("tiles") is not None:  # what it reads of hubs, the next launch does not
            return 0, 0
        edges, in_order, gathered = given.get("indices", given.get("destination")), 0, 0
        rows = given.get("n") if edges is None else edges.numel()
        if "b" in given:  # this kernel draws neighbours and also reads the destinations' rows
            hop = given["part"]
            gathered = SECTOR * hop.rows * (2 + hop.k)
            rows = hop.rows * (1 + hop.k)
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                table = TABLES.get(kernel) == name
                from_memory = table and value.nbytes > CACHE
                if table and value.data_ptr() == self.costs.features:
                    self.costs.fetched += rows * value[:1].nbytes
                gathered += rows * value[:1].nbytes if from_memory else 0
                in_order += 0 if from_memory else value.nbytes
        return in_order, gathered

    def stream(self):
        return 0

    def current(self):
        return contextlib.nullcontext()


def step_costs(args, store, dtype):
    """Record the cost of a step with features and activations of this dtype -> Costs."""
    features = stored(store.features)
    features = getattr(features, "tensor", features)
    features = features if ask(store.features, "coded") else features.to(dtype)
    costs = Costs(features)
    settings = {**vars(args), "total_batch": args.batch_size, "conv": CONVS[args.model]}
    settings = types.SimpleNamespace(
        **settings, input_dropout=0, edge_features=None, mode="cuda-cuda"
    )
    task = types.SimpleNamespace(store=store, draw=None, seeds_per_example=lambda args: 1)
    bf16 = dtype == torch.bfloat16
    sampler = NeighborSampler(store.indptr, store.indices, args.fanout, check=False)
    compiled = lambda name, source: Noted(costs, source)  # noqa: E731
    backend = sampler_gpu.Backend(sampler.engine.spec, args.fanout, 0, compiled)
    sampler = types.SimpleNamespace(sample=sampler.sample, engine=backend, edge_type=None)
    read = features.dtype, dtype
    in_place = self_and_mean if step_graphs.averages_in_place(settings, store, *read) else None
    options = dict(slots=1, gather=gather_rows, aggregate=in_place, dtype=dtype)
    ring = FeatureRing(ask(store.features, "over")(features), store.labels, **options)
    conv = CONVS[args.model]
    net = network(args, store, None, 0.5, norm=conv.norm, residual=conv.residual != "no")
    optimizer = Adam(net.parameters(), lr=0.003, fused=True)
    optimizer.param_groups[0]["capturable"] = True
    weight = torch.tensor(1 / args.batch_size)
    loss_sum = torch.zeros((), dtype=torch.float64)
    _, room = step_graphs.static_room(sampler, task, settings, ring.first_hop)

    @functools.cache
    def load(ids, source, target, device, width=0):
        text = kernels.program(ids, source, target, width)
        return kernels.Code(Noted(costs, text))

    with (
        patch.object(kernels, "load", load),
        patch.object(layers, "load", load),
        patch.object(kernels, "is_gpu", lambda device: True),
        patch.object(layers, "is_gpu", lambda device: True),
        patch.object(torch, "get_float32_matmul_precision", lambda: "high"),
        patch.object(torch.cuda, "Event", lambda: None),
    ):
        slot = step_graphs.Slot(types.SimpleNamespace(sampler=sampler, ring=ring), room)
        slot.frame.fill(slot.seeds, 0)
        for measured in (contextlib.nullcontext(), costs):  # the first run creates Adam's state
            costs.rows.clear()
            costs.launches.clear()
            costs.fetched = 0
            with measured:
                slot.sample()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    options = {"aggregated": ring.first_hop, "key": (0, slot.step)}
                    logits = net(slot.batch.blocks, slot.x, **options)
                loss = layers.cross_entropy(logits.float(), slot.y)
                loss.backward(weight)
                loss_sum.add_(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
    return costs


def variants(store):
    """Yield the steps that are compared: (name, dtype of activations, store); the last with features in 8 bits."""
    yield "tf32", torch.float32, store
    yield "bf16", torch.bfloat16, store
    if not ask(store.features, "coded"):
        codes = torch.zeros(store.features.shape, dtype=torch.int8)
        coded = copy.copy(store)
        coded.features = CodedFeatures(codes, torch.ones(2, store.feature_dim))
        yield "bf16, int8 features", torch.bfloat16, coded


def measured(args, store, precision):
    """Read how long a GPU took for a step's kernels, one at a time -> {kernel: us}, with the whole step's under "a step";
    {} if none has been measured with this network and in these shapes."""
    file = read_json(MEASURED)
    degree = round(store.num_edges / store.num_nodes)
    shape = {
        "nodes": store.num_nodes,
        "degree": degree,
        "features": store.feature_dim,
        "classes": store.num_classes,
        "fanout": args.fanout,
        "batch_size": args.batch_size,
        "hidden": args.hidden,
    }
    run = file.get("runs", {}).get(f"{args.model} {precision}")
    if run is None or file["shape"] != shape:
        return {}
    times = {kernel: us for kernel, (_, us) in run["kernels"].items()}
    return {**times, "a step": run["busy_us"]}


def bench_roofline(args):
    """Print tables of a step's kernels: in fp32 with TF32 products, in bf16, and with features in 8 bits -> the figures."""
    args.seed = 0
    store = opened(args.dataset, args.root)
    figures = {}
    for name, dtype, graph in variants(store):
        costs = step_costs(args, graph, dtype)
        rows = {}
        for kernel, (count, in_order, gathered, products) in costs.rows.items():
            moved = in_order + gathered
            rows[kernel] = row = {"launches": count, "MB": moved / 1e6, "GFLOP": products / 1e9}
            for gpu, (bandwidth, *peaks) in GPUS.items():
                seconds = (in_order / IN_ORDER + gathered / GATHERED) / bandwidth
                peak = peaks[dtype == torch.bfloat16]
                row[f"{gpu} us"] = 1e6 * max(seconds, products / peak)
        rows = dict(sorted(rows.items(), key=lambda item: -item[1]["MB"]))
        total = {key: sum(row[key] for row in rows.values()) for key in row}
        large = {kernel: row for kernel, row in rows.items() if row["MB"] >= total["MB"] / 100}
        rest = {key: total[key] - sum(row[key] for row in large.values()) for key in total}
        table = {**large, "others": rest, "a step": total}
        if times := measured(args, store, name):
            taken = {kernel: times[kernel] for kernel in large if kernel in times}
            taken["others"] = times["a step"] - sum(taken.values())
            taken["a step"] = times["a step"]
            for kernel, us in taken.items():
                table[kernel]["H200 measured, us"] = us
        print(f"{args.model}, {name}: {len(store.split['train']):,} training nodes")
        figures[name] = print_table("kernel", table)
        others = costs.fetched * (PARTS - 1) / PARTS
        print(
            f"--split-features on {PARTS} GPUs: {others / 1e6:,.0f} MB of feature rows from the others, "
            f"{1e6 * others / NVLINK / GATHERED:,.0f} us over NVLink (H100, H200)"
        )
    return {"kernels": figures}
