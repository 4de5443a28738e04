"""python -m bench step | link | mag | scaling: steps on nodes, links, types beside other systems; processes beside one.

A contender sets itself up and returns its step, i -> {"loss", "edges" drawn} of a batch.
"""

import collections
import functools
import itertools
import statistics
from functools import partial

import torch
from torch.nn import functional as F

import model
from bench import graphbolt, tools
from bench.inference import call_dgl, dgl_twin
from bench.tools import Elsewhere, descend, in_memory, opened
from extras.edge_split import Edges, split_edges
from extras.links import Links, Scorer
from extras.relational import NodeInputs, RGCNConv
from features import FeatureRing
from loader import NodeLoader
from model import gather_rows, self_and_mean
from native import layers
from run.adam import Adam
from sampler import NeighborSampler, import_dgl

TRICKS = "sampler", "first hop", "buffers", "layers"
WITHOUT = {  # contender: the tricks that are turned off
    "all tricks": (),
    "without the native sampler": ("sampler",),
    "without the first hop from the table": ("first hop",),
    "without kept buffers": ("buffers",),
    "without native layers and dropout": ("layers",),
    "none of them": TRICKS,
}


class Leaking(Links):
    """Links whose own edges carry messages in their step."""

    def draw(self, batch):
        nodes, _, y = super().draw(batch)
        return nodes, {}, y


def network(args, store, links, dropout, **options):
    """Build the network of --model and --heads, with initial weights of seed 0; options: of a GNN."""
    torch.manual_seed(0)
    options |= {"num_layers": len(args.fanout), "dropout": dropout, "conv": args.model}
    if "heads" in model.CONVS[args.model].takes:
        options["heads"] = args.heads
    out_dim = args.hidden if links else store.num_classes
    net = model.GNN(store.feature_dim, args.hidden, out_dim, **options)
    if net.layers[0].uses_degree:
        net.degrees = model.graph_degrees(store.indptr, store.indices)
    if links:
        net.scorer = Scorer("mlp", args.hidden)
    return net


def training(
    args,
    store,
    sampler,
    net,
    nodes,
    *,
    links=None,
    bf16=False,
    depth=0,
    features=None,
    share=None,
    **options,
):
    """Prepare steps of a loop like train.py's, over epochs of `nodes` or of the pairs of `links`.

    depth: batches prepared ahead. features: used instead of the store's. share: options of a NodeLoader, of this process's
    part of the steps. options: of a FeatureRing.
    """
    features = store.features.tensor if features is None else features
    options["dtype"] = torch.bfloat16 if bf16 else None
    ring = FeatureRing(features, store.labels, slots=depth + 1, gather=gather_rows, **options)
    options = {"batch_size": args.batch_size, "draw": links and links.draw, "depth": depth}
    loader = NodeLoader(
        store, nodes, args.fanout, sampler=sampler, ring=ring, **(share or {}), **options
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    optimizer = Adam(net.parameters(), lr=0.003, fused=True)

    def step(i):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = net(batch.blocks, batch.x, aggregated=ring.first_hop)
        if links:
            loss = links.loss(net.scorer, output, batch.y) / len(batch.y)
        else:
            loss = F.cross_entropy(output.float(), batch.y)
        edges = tools.counted(batch.blocks)["edges"]
        return {"loss": descend(loss, optimizer).item(), "edges": edges}

    return step


def ours(args, link=None, *, without=(), bf16=False, dropout=0.5):
    """Prepare steps as train.py takes them, without some of TRICKS.

    link: take steps of --task link, with the edges of a batch excluded ("exclude") or not ("keep").
    """
    store = opened(args.dataset, args.root)
    graph = split_edges(store, "none") if link else store
    csc = graph.indptr, graph.indices
    options = {"threads": args.threads, "backend": "torch" if "sampler" in without else "native"}
    sampler = NeighborSampler(*csc, args.fanout, check=False, **options)
    links = None
    if link:
        links = Links(graph, *csc) if link == "exclude" else Leaking(graph, *csc)
    options = {"links": links, "bf16": bf16, "reuse": "buffers" not in without}
    if args.model == "sage" and "first hop" not in without:
        options["aggregate"] = self_and_mean
    net = network(args, store, links, dropout)
    nodes = torch.arange(len(links.pairs) if link else store.num_nodes)
    take = training(args, store, sampler, net, nodes, **options)

    def step(i):
        model.fused = None if "layers" in without else layers
        return take(i)

    return step


@functools.cache
def dgl_store(dataset, root):
    """Return a data set as a DGL graph with features and labels; cached per process, as it takes 2 GB."""
    store = opened(dataset, root)
    graph = tools.dgl_graph(store.indptr, store.indices.long())
    graph.ndata["feat"] = store.features.tensor.clone()
    graph.ndata["label"] = store.labels.clone()
    return graph


def dgl(args, link=False, *, dropout=0.5):
    """Prepare the same steps with DGL's DataLoader and layers, as DGL's own examples write them."""
    load = import_dgl().dataloading
    store = opened(args.dataset, args.root)
    graph = dgl_store(args.dataset, args.root)
    prefetch = {"prefetch_node_feats": ["feat"], "prefetch_labels": None if link else ["label"]}
    draw = load.NeighborSampler(args.fanout[::-1], **prefetch)
    if link:  # DGL takes the id of each edge's reverse
        source, target = graph.edges(order="eid")
        reverse = Edges(store.indptr, store.indices).place(target, source)
        options = {"reverse_eids": reverse, "negative_sampler": load.negative_sampler.Uniform(1)}
        draw = load.as_edge_prediction_sampler(draw, exclude="reverse_id", **options)
    seeds = torch.arange(store.num_edges if link else store.num_nodes)
    loader = load.DataLoader(graph, seeds, draw, batch_size=args.batch_size, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    layers = torch.nn.ModuleList(map(dgl_twin, network(args, store, link, dropout).layers))
    scorer = Scorer("mlp", args.hidden) if link else torch.nn.Identity()
    optimizer = torch.optim.Adam([*layers.parameters(), *scorer.parameters()], lr=0.003)

    def step(i):
        _, *pairs, blocks = next(batches)
        h = tools.forward(layers, blocks, blocks[0].srcdata["feat"], dropout, call=call_dgl)
        if link:
            scores = [scorer(*(h[ends] for ends in graph.edges())) for graph in pairs]
            labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
            loss = F.binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels))
        else:
            loss = F.cross_entropy(h, blocks[-1].dstdata["label"])
        edges = tools.counted(blocks)["edges"]
        return {"loss": descend(loss, optimizer).item(), "edges": edges}

    return step


def bench_step(args):
    """Time a training step of every contender -> {"contenders": their figures}.

    This process keeps freed memory, as train.py does; contenders "as shipped" run in their own
    processes, in which glibc returns freed memory to the system as in any program.
    """
    contenders = {
        **{name: partial(ours, args, without=off) for name, off in WITHOUT.items()},
        "without kept malloc memory": partial(Elsewhere, ours, args),
        "none of them, nor kept memory": partial(Elsewhere, ours, args, without=TRICKS),
        "bf16": partial(ours, args, bf16=True),
        "no dropout": partial(ours, args, dropout=0.0),
        "DGL as shipped": partial(Elsewhere, dgl, args),
        "DGL, malloc kept": partial(dgl, args),
        "DGL as shipped, no dropout": partial(Elsewhere, dgl, args, dropout=0.0),
        "DGL, malloc kept, no dropout": partial(dgl, args, dropout=0.0),
    }
    return {"contenders": tools.compare("one step", contenders, args.rounds, twice=True)}


def bench_link(args):
    """Time a step of link prediction, as `bench_step` does for nodes. The graph has the reverse of every edge."""
    contenders = {
        "ours": partial(ours, args, "exclude", dropout=0.0),
        "ours, nothing excluded": partial(ours, args, "keep", dropout=0.0),
        "DGL as shipped": partial(Elsewhere, dgl, args, True, dropout=0.0),
        "DGL, malloc kept": partial(dgl, args, True, dropout=0.0),
    }
    return {"contenders": tools.compare("one step", contenders, args.rounds, twice=True)}


def relations(args, learn):
    """Prepare steps of an R-GCN in a loop like train.py's, or of its sampler alone."""
    store = opened(args.dataset, args.root)
    types = store.num_edge_types
    fanouts = [[k] * types for k in args.fanout]
    options = {"edge_type": store.edge_type, "threads": args.threads, "check": False}
    sampler = NeighborSampler(in_memory(store.indptr), in_memory(store.indices), fanouts, **options)
    nodes = store.split["train"]
    if not learn:
        seeds = graphbolt.seeds_of(args, nodes, args.rounds + 2).split(args.batch_size)
        return lambda i: tools.counted(sampler.sample(seeds[i], i))
    net = model.GNN(
        0,
        args.hidden,
        store.num_classes,
        conv=RGCNConv,
        num_types=types,
        num_layers=len(args.fanout),
        dropout=graphbolt.DROPOUT,
        inputs=NodeInputs(store.node_types.values(), args.hidden),
    )
    return training(args, store, sampler, net, nodes)


def pyg_relations(args):
    """Prepare sampling by PyG's NeighborLoader, without features, on a graph with node and edge types."""
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NeighborLoader

    store = opened(args.dataset, args.root)
    graph = HeteroData()
    counts = {name: count for name, (count, _) in store.node_types.items()}
    first = dict(zip(counts, itertools.accumulate(counts.values(), initial=0)))
    for name, count in counts.items():
        graph[name].num_nodes = count
    dst = torch.repeat_interleave(store.indptr.diff())
    for number, kind in enumerate(store.edge_types):
        source, relation, destination = kind.split(",")
        is_type = store.edge_type == number
        ends = store.indices[is_type] - first[source], dst[is_type] - first[destination]
        graph[source, relation, destination].edge_index = torch.stack(ends).long()
    seeds = graphbolt.seeds_of(args, store.split["train"], args.rounds + 2)
    fanouts = dict.fromkeys(graph.edge_types, args.fanout)
    nodes = next(iter(counts)), seeds  # of the first type, whose ids begin at 0
    batches = iter(NeighborLoader(graph, fanouts, nodes, batch_size=args.batch_size))

    def step(i):
        batch = next(batches)
        sources = sum(nodes.num_nodes for nodes in batch.node_stores)
        return {"edges": sum(e.num_edges for e in batch.edge_stores), "sources": sources}

    return step


def bench_mag(args):
    """Time R-GCN on a graph with the types and the size of ogbn-mag -> {"sampling": {name: figures}, "step": ...}.

    Contenders draw the same number of neighbours of each type for batches of training nodes, and have networks of
    the same widths: a mean and a matrix for each type, one for a node's own row, a linear map of the papers'
    features and, for the other nodes, learned rows, updated by batch.
    """
    figures = {}
    for what, learn in (("sampling", False), ("step", True)):
        contenders = {"ringblock": partial(relations, args, learn)}
        if args.graphbolt:
            other = partial(Elsewhere, graphbolt.relations, args, learn, python=args.graphbolt)
            contenders["GraphBolt"] = other
        if args.pyg and not learn:
            contenders["PyG"] = partial(Elsewhere, pyg_relations, args, python=args.pyg)
        figures[what] = tools.compare(what, contenders, args.rounds)
    return figures


def bench_scaling(args):
    """Time epochs of train.py with each number of processes and the same total batch -> the figures."""
    opened(args.dataset, args.root)
    epochs = collections.defaultdict(list)
    figures = {}
    for procs in args.procs * args.rounds:
        flags = ["--batch-size", args.batch_size // procs, "--procs", procs]
        flags += ["--epochs", 4, "--gpus", 0]
        epochs[procs] += tools.elsewhere(tools.epochs_of, args, args.dataset, *flags)[1:]
    for procs, entries in epochs.items():
        seconds = [entry["seconds"] for entry in entries]
        row = {"n": len(seconds), "median_s": statistics.median(seconds), "min_s": min(seconds)}
        figures[procs] = row
        row["speedup"] = next(iter(figures.values()))["median_s"] / row["median_s"]
        row["exchange_s"] = statistics.median(entry.get("exchange", 0) for entry in entries)
    return {"scaling": tools.print_table("processes", figures)}
