"""python -m bench mag: R-GCN on a graph with the types and the size of ogbn-mag, sampling alone and whole steps.

Contenders draw as many neighbours of each type for batches of the training nodes, and have networks of the same widths: a mean
and a matrix for each type, one for a node's own row, a linear map of the papers' features and learned rows, updated by batch,
for the others.
"""

from functools import partial

from bench import graphbolt, tools
from bench.step import training
from bench.tools import Elsewhere, in_memory, opened
from model import GNN
from run.allocator import keep_freed_memory
from sampler import NeighborSampler


def ours(args, learn):
    """Steps of this loop."""
    store = opened(args.dataset, args.root)
    graph, types = (in_memory(store.indptr), in_memory(store.indices)), store.num_edge_types
    fanouts = [[k] * types for k in args.fanout]
    options = {"edge_type": store.edge_type, "threads": args.threads, "check": False}
    sampler = NeighborSampler(*graph, fanouts, **options)
    nodes = store.split["train"]
    if not learn:
        seeds = graphbolt.seeds_of(args, nodes, args.rounds + 2).split(args.batch_size)
        return lambda i: tools.counted(sampler.sample(seeds[i], i))
    options = {"num_types": types, "num_layers": len(args.fanout), "dropout": graphbolt.DROPOUT}
    options["node_types"] = [*store.node_types.values()]
    net = GNN(0, args.hidden, store.num_classes, conv="rgcn", **options)
    return training(args, store, sampler, net, nodes)


def bench_mag(args):
    """Time all contenders in turn -> {"sampling": {name: figures}, "step": ...}."""
    keep_freed_memory()
    figures = {}
    for what, learn in (("sampling", False), ("step", True)):
        contenders = {"ringblock": partial(ours, args, learn)}
        if args.graphbolt:
            there = partial(Elsewhere, graphbolt.relations, args, learn, python=args.graphbolt)
            contenders["GraphBolt"] = there
        figures[what] = tools.compare(what, contenders, args.rounds)
    return figures
