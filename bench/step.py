"""python -m bench step | link | features | scaling: a training step beside DGL's, of nodes and of links; the ring beside
a plain copy; several processes beside one.

A contender prepares itself and returns its step, i -> loss of batch i.
"""

import collections
import contextlib
import functools
import io
import json
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import model
import train
from bench import tools
from bench.inference import call_dgl, dgl_twin
from bench.tools import alone, descend, in_own_process, interleave, medians, opened, print_table
from ddp import Ranks
from disk.files import StoreError
from features import FeatureRing
from loader import Batch
from model import gather_rows, self_and_mean
from native.layers import use_native
from run.allocator import keep_freed_memory
from sampler import Block, NeighborSampler, import_dgl
from tasks.link import Edges, Links, Scorer, split_edges

TRICKS = "sampler", "first hop", "buffers", "layers"
WITHOUT = {  # name: the tricks that `ours` does without
    "all tricks": (),
    "without the native sampler": ("sampler",),
    "without the first hop from the table": ("first hop",),
    "without kept buffers": ("buffers",),
    "without native layers and dropout": ("layers",),
    "none of them": TRICKS,
}
RATIOS = {  # pairs that compare like with like: (DGL's, ours)
    "fp32, dropout 0.5, DGL as shipped": ("DGL as shipped", "all tricks"),
    "fp32, dropout 0.5, DGL with malloc kept": ("DGL, malloc kept", "all tricks"),
    "fp32, no dropout, DGL as shipped": ("DGL as shipped, no dropout", "no dropout"),
    "fp32, no dropout, DGL with malloc kept": ("DGL, malloc kept, no dropout", "no dropout"),
    "bf16, dropout 0.5, DGL as shipped (fp32)": ("DGL as shipped", "bf16"),
}


def batches_of(count, args):
    """Numbers 0 .. count - 1 in random order, again and again, as batches: two for each round."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    places = torch.arange(2 * args.batch_size * (args.rounds + 2)) % count
    return order[places].split(args.batch_size)


def make_ring(store, features=None, *, slots=1, first_hop=True, bf16=False):
    """A ring over the features of a store, or over those given."""
    features = store.features.tensor if features is None else features
    options = {"slots": slots, "gather": gather_rows, "log": lambda line: None}
    options |= {"aggregate": self_and_mean} if first_hop else {}
    return FeatureRing(features, store.labels, dtype=torch.bfloat16 if bf16 else None, **options)


def network(args, store, links, dropout):
    """--model with --heads, of seed 0."""
    torch.manual_seed(0)
    options = {"num_layers": len(args.fanout), "dropout": dropout, "conv": args.model}
    widths = store.feature_dim, args.hidden, args.hidden if links else store.num_classes
    return model.GNN(*widths, heads=args.heads if args.model == "gat" else 1, **options)


def trainer(args, store, links=None, *, bf16=False, dropout=0.5):
    """A network of seed 0 -> function that trains it on a fetched batch, nodes or `links`, and returns the loss."""
    net = network(args, store, links, dropout)
    if net.layers[0].uses_degree:
        net.degrees = model.graph_degrees(store.indptr, store.indices)
    if links:
        net.scorer = Scorer("mlp", args.hidden)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003, fused=True)

    def train_on(batch, aggregated=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = net(batch.blocks, batch.x, aggregated=aggregated)
        if links:
            return descend(optimizer, links.loss(net.scorer, output, batch.y) / len(batch.y))
        return descend(optimizer, F.cross_entropy(output.float(), batch.y))

    return train_on


def ours(args, link=None, *, without=(), bf16=False, dropout=0.5):
    """Prepare steps as train.py takes them, one after the other, without some of TRICKS.

    link: steps of --task link, with the edges of a batch excluded ("exclude") or not ("keep").
    """
    store = opened(args.dataset, args.root)
    graph = split_edges(store, "none") if link else store
    csc = graph.indptr, graph.indices
    options = {"threads": args.threads, "backend": "torch" if "sampler" in without else "native"}
    sampler = NeighborSampler(*csc, args.fanout, check=False, **options)
    links = Links(graph, *csc, exclude=link == "exclude") if link else None
    first_hop = args.model == "sage" and "first hop" not in without
    new_ring = partial(make_ring, store, first_hop=first_hop, bf16=bf16)
    kept_ring = None if "buffers" in without else new_ring()
    train_on = trainer(args, store, links, bf16=bf16, dropout=dropout)
    batches = batches_of(len(links.pairs) if link else store.num_nodes, args)

    def step(i):
        use_native("layers" not in without)
        torch.manual_seed(i)
        ring, seeds, options, y = kept_ring or new_ring(), batches[i], {}, None
        if link:
            batch = Batch([], None, None, seeds, global_step=i, step_seeds=seeds)
            seeds, options, y = links.draw(batch)
        blocks = sampler.sample(seeds, i, relabel_outer=not ring.first_hop, **options)
        batch = ring.fetch(0, blocks)
        return train_on(batch if y is None else batch._replace(y=y), ring.first_hop)

    return step


@functools.cache
def dgl_store(dataset, root):
    """A data set as a DGL graph with its features and labels; one for all contenders of a process, as it takes 2 GB."""
    store = opened(dataset, root)
    graph = tools.dgl_graph(store.indptr, store.indices.long())
    graph.ndata["feat"] = store.features.tensor.clone()
    graph.ndata["label"] = store.labels.clone()
    return graph


def dgl(args, link=False, *, dropout=0.5):
    """Prepare the same steps with DGL's DataLoader and layers, as DGL's own examples write them."""
    load, store = import_dgl().dataloading, opened(args.dataset, args.root)
    graph = dgl_store(args.dataset, args.root)
    prefetch = {"prefetch_node_feats": ["feat"], "prefetch_labels": None if link else ["label"]}
    draw = load.NeighborSampler(args.fanout[::-1], **prefetch)
    if link:  # DGL takes the reverse of each edge by number
        source, target = graph.edges(order="eid")
        reverse = Edges(store.indptr, store.indices).first(target, source)[0]
        options = {"reverse_eids": reverse, "negative_sampler": load.negative_sampler.Uniform(1)}
        draw = load.as_edge_prediction_sampler(draw, exclude="reverse_id", **options)
    seeds = torch.cat(batches_of(store.num_edges if link else store.num_nodes, args))
    batches = iter(load.DataLoader(graph, seeds, draw, batch_size=args.batch_size))
    layers = torch.nn.ModuleList(map(dgl_twin, network(args, store, link, dropout).layers))
    scorer = Scorer("mlp", args.hidden) if link else torch.nn.Identity()
    optimizer = torch.optim.Adam([*layers.parameters(), *scorer.parameters()], lr=0.003)

    def step(i):
        _, *pairs, blocks = next(batches)
        h = tools.forward(layers, blocks, blocks[0].srcdata["feat"], dropout, call=call_dgl)
        if not link:
            return descend(optimizer, F.cross_entropy(h, blocks[-1].dstdata["label"]))
        scores = [scorer(*(h[ends] for ends in graph.edges())) for graph in pairs]
        labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
        loss = F.binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels))
        return descend(optimizer, loss)

    return step


def training_log(words):
    """Run train.py's command line in this process -> (entries of its log, what it printed)."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = tools.exit_code(train.main, [*words, "--log", f"{folder}/log"])
        if code:
            last = printed.getvalue().strip().rpartition("\n")[2]
            raise StoreError(f"train.py ended with exit code {code}: {last}")
        lines = Path(folder, "log").read_text().splitlines()
    return [json.loads(line) for line in lines], printed.getvalue()


def time_steps(args, contenders, ratios):
    """Time a step of every contender -> figures; ratios: {name: (DGL's, ours)}.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in processes of their own, in which
    glibc gives freed memory back as it does in any program.
    """
    keep_freed_memory()
    times = interleave(tools.prepared(contenders), args.rounds, twice=True)
    figures, median = tools.turned(tools.print_times("one step", times)), medians(times)
    ratios = {name: median[a] / median[b] for name, (a, b) in ratios.items() if a in median}
    print_table("DGL's time / ours", {name: {"ratio": ratio} for name, ratio in ratios.items()})
    return figures | {"ratios": ratios}


def bench_step(args):
    """Time a training step of every contender; returns the figures."""
    as_shipped = partial(in_own_process, args.threads)
    contenders = {name: partial(ours, args, without=left) for name, left in WITHOUT.items()} | {
        "without kept malloc memory": partial(as_shipped, ours, args),
        "none of them, nor kept memory": partial(as_shipped, ours, args, without=TRICKS),
        "bf16": partial(ours, args, bf16=True),
        "no dropout": partial(ours, args, dropout=0.0),
        "DGL as shipped": partial(as_shipped, dgl, args),
        "DGL, malloc kept": partial(dgl, args),
        "DGL as shipped, no dropout": partial(as_shipped, dgl, args, dropout=0.0),
        "DGL, malloc kept, no dropout": partial(dgl, args, dropout=0.0),
    }
    figures = time_steps(args, contenders, RATIOS)
    losses = {}  # without dropout they are the same within rounding
    for name in ("all tricks", "none of them"):
        step = ours(args, without=WITHOUT[name], dropout=0.0)
        losses[name] = [step(i) for i in range(min(10, 2 * args.rounds))]
    apart = max(abs(a / b - 1) for a, b in zip(*losses.values()))
    print(f"losses of ten steps, all tricks against none: at most {apart:.1e} apart (relative)")
    return figures | {"losses": losses | {"largest_relative_difference": apart}}


def bench_link(args):
    """Time a step of link prediction of every contender; returns the figures. The graph has every edge's reverse."""
    contenders = {
        "ours": partial(ours, args, "exclude", dropout=0.0),
        "ours, nothing excluded": partial(ours, args, "keep", dropout=0.0),
        "DGL as shipped": partial(in_own_process, args.threads, dgl, args, True, dropout=0.0),
        "DGL, malloc kept": partial(dgl, args, True, dropout=0.0),
    }
    return time_steps(args, contenders, {name: (name, "ours") for name in list(contenders)[2:]})


def fetch(ring, slot, ids):
    """Fetch rows `ids` as those of a batch with one seed."""
    return ring.fetch(slot, [Block(torch.zeros(2), ids[:1], ids)])


def bench_features(args):
    """Gather rows through the ring beside a plain copy, in the same run; returns the figures."""
    size, figures = 1 << 28, {}
    source, copied = torch.ones(2, size, dtype=torch.uint8)
    for row_bytes in (64, 400, 2048):
        table = torch.ones((1 << 30) // row_bytes, row_bytes // 4)
        labels = torch.zeros(len(table), dtype=torch.int64)
        ring = FeatureRing(table, labels, slots=3, log=lambda line: None, gather=gather_rows)
        picks = [torch.randint(len(table), (size // row_bytes,)) for _ in range(3)]
        steps = {
            "ring": lambda i: fetch(ring, i % 3, picks[i % 3]),
            "fresh tensor": lambda i: table[picks[i % 3]],
            "copy": lambda i: copied.copy_(source),
        }
        times = interleave(steps, args.rounds, warmup=3)
        # of one round
        share = statistics.median(copy / ring for copy, ring in zip(times["copy"], times["ring"]))
        rate = {name: size / seconds / 1e9 for name, seconds in medians(times).items()}
        figures[row_bytes] = rate | {"share_of_copy": share}
    print_table("GB/s by bytes a row", figures)
    features = opened(args.shared, args.root).meta["files"]["features.npy"]["bytes"]
    words = args.threads, read_all, args.shared, args.root
    memory = [reader() for reader in [in_own_process(*words) for _ in range(4)]]
    pss, own = (sum(figures[field] for figures in memory) for field in ("Pss", "Pss_Anon"))
    shared = {"feature_bytes": features, "pss": pss, "own": own, "ratio": pss / (features + own)}
    print_table("four processes", {"summed PSS / (features + own)": shared})
    return {"gb_per_s": figures, "memory": shared}


def read_all(dataset, root):
    """Read every feature row of a store once through a ring -> function: the memory of this process, which keeps both."""
    store = opened(dataset, root)
    ring = FeatureRing(store.features.tensor, store.labels, slots=3, log=lambda line: None)
    for i, ids in enumerate(torch.arange(store.num_nodes).split(1 << 18)):
        fetch(ring, i % 3, ids)
    return lambda ring=ring: tools.memory_of_process("smaps_rollup")


def bench_scaling(args):
    """Epochs of train.py with each number of processes and the same total batch; returns the figures."""
    store, random = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    nodes, epochs, figures = store.split["train"], collections.defaultdict(list), {}
    seeds = nodes[torch.randperm(nodes.numel(), generator=random)[: args.batch_size]]
    draw, first = NeighborSampler(store.indptr, store.indices, args.fanout, check=False), {}
    for procs in args.procs * args.rounds:
        epochs[procs] += alone(args.threads, epochs_of, args, procs)
    for procs, entries in epochs.items():
        seconds = [entry["seconds"] for entry in entries]
        # what the parts of a batch have in common is computed more than once
        parts = [seeds[Ranks(rank, procs).part(seeds.numel())] for rank in range(procs)]
        rows = sum(block.num_dst for part in parts for block in draw.sample(part, 0))
        row = {"n": len(seconds), "median_s": statistics.median(seconds), "min_s": min(seconds)}
        first = first or row | {"rows": rows}
        row["speedup"] = first["median_s"] / row["median_s"]
        row["rows / first"] = rows / first["rows"]
        for stage in ("exchange", "stall", "optimizer"):
            row[f"{stage}_s"] = statistics.median(entry.get(stage, 0) for entry in entries)
        figures[procs] = row
    return {"scaling": print_table("processes", figures)}


def epochs_of(args, procs):
    """Run four epochs of train.py in `procs` processes -> the log entries of the last three."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ranks print by themselves
    words = ["--dataset", args.dataset, "--root", args.root, "--hidden", args.hidden]
    words += ["--fanout", ",".join(map(str, args.fanout)), "--epochs", 4]
    words += ["--batch-size", args.batch_size // procs, "--gpus", procs if args.gpus else 0]
    entries, _ = training_log([*words, "--procs", 1 if args.gpus else procs])
    return [entry for entry in entries if "epoch" in entry][1:4]
