"""python -m bench layers: forward, backward and Adam of every model on the same sampled blocks, beside DGL's and PyG's
layers, and the matrix products alone."""

import functools
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import model
from bench.inference import call_dgl, dgl_twin
from bench.tools import descend, forward, interleave, opened, prepared, print_table
from native.layers import product
from run.allocator import keep_freed_memory
from sampler import NeighborSampler


def bench_layers(args):
    """Median ms of a step whose inputs were gathered before, dropout 0, and of its forward pass.

    Returns:
        {"layers": {model: {contender: ms, "DGL / ours": ratio, "DGL forward": ms, ...}}}
    """
    keep_freed_memory()
    store, seeds = opened(args.dataset, args.root), torch.Generator().manual_seed(0)
    sampler = NeighborSampler(store.indptr, store.indices, args.fanout, threads=args.threads)
    blocks = sampler.sample(torch.randperm(store.num_nodes, generator=seeds)[: args.batch_size], 0)
    x = store.features.gather(blocks[0].src_nodes.long())
    y = store.labels[blocks[-1].src_nodes[: args.batch_size].long()]
    widths = [x.shape[1], *[args.hidden] * (len(blocks) - 1), store.num_classes]
    degrees, figures = model.graph_degrees(store.indptr, store.indices), {}
    for conv in args.models.split(",") if args.models else model.CONVS:
        heads, passes = args.heads if conv == "gat" else 1, {}
        shape = conv, widths, heads, blocks
        networks = {
            "ours": functools.partial(ours, *shape, degrees),
            "DGL": functools.partial(dgl, *shape),
            "PyG": functools.partial(pyg, *shape),
        }
        contenders = {
            name: functools.partial(training, make, x, y, passes.setdefault(name, []))
            for name, make in networks.items()
        }
        contenders["products"] = functools.partial(products, *shape)
        times = interleave(prepared(contenders), args.rounds, twice=True)
        row = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
        row |= {
            f"{other} / ours": row[other] / row["ours"] for other in ("DGL", "PyG") if other in row
        }
        for name in networks.keys() & times:
            row[f"{name} forward"] = 1e3 * statistics.median(passes[name])
        figures[conv] = row
    print_table("ms", figures)
    return {"layers": figures}


def training(make, x, y, passes):
    """Prepare steps of a network; the seconds of forward passes go to a list."""
    net, apply = make()
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def step(i):
        start = time.perf_counter()
        loss = F.cross_entropy(apply(x), y)
        passes.append(time.perf_counter() - start)
        return descend(optimizer, loss)

    return step


def products(conv, widths, heads, blocks):
    """Prepare the matrix products of a step alone, those with the gradients included."""
    shapes = []  # (rows, inputs, outputs, whether the inputs need a gradient)
    for i, (block, a, b) in enumerate(zip(blocks, widths, widths[1:])):
        N, S, wide = block.num_src, block.num_dst, b * heads if i == len(blocks) - 1 else b
        shapes += {
            "sage": [(S, 2 * a, b, i)],
            "sage-pool": [(N, a, a, i), (S, a, b, i), (S, a, b, 1)],
            "gcn": [(N if a > b else S, a, b, i)],
            "gat": [(N, a, wide, i), (S, a, wide, i)],
            "gin": [(S, a, b, i), (S, b, b, 1)],
        }[conv]
    work = [
        (torch.randn(n, a), torch.randn(b, a), torch.randn(n, b), wanted)
        for n, a, b, wanted in shapes
    ]

    def step(i):
        for x, weight, grad, wanted in work:
            product(x, weight)
            torch.mm(grad.t(), x)
            if wanted:
                product(grad, weight.t())

    return step


def ours(conv, widths, heads, blocks, degrees):
    """Prepare this project's network -> (module, function that applies it)."""
    options = {"num_layers": len(blocks), "dropout": 0.0, "heads": heads}
    net = model.GNN(widths[0], widths[1], widths[-1], conv=conv, **options)
    net.degrees = degrees
    return net, lambda x: net(blocks, x)


def dgl(*shape):
    """Prepare DGL's, with the same weights."""
    net = nn.ModuleList(map(dgl_twin, ours(*shape, None)[0].layers))
    graphs = [block.to_dgl() for block in shape[-1]]
    return net, lambda x: forward(net, graphs, x, call=call_dgl)


def pyg(conv, widths, heads, blocks):
    """Prepare PyG's, of plain torch operations."""
    from torch_geometric import nn as layers

    if conv == "gcn":
        raise NotImplementedError("PyG's GCNConv takes graphs, not blocks")
    mlp = lambda a, b: nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))  # noqa: E731
    make = {
        "sage": lambda a, b, last: layers.SAGEConv((a, a), b),
        "sage-pool": lambda a, b, last: layers.SAGEConv((a, a), b, aggr="max", project=True),
        "gat": lambda a, b, last: layers.GATv2Conv(
            (a, a), b if last else b // heads, heads, concat=not last, add_self_loops=False
        ),
        "gin": lambda a, b, last: layers.GINConv(mlp(a, b), train_eps=True),
    }[conv]
    net = nn.ModuleList(make(a, b, b == widths[-1]) for a, b in zip(widths, widths[1:]))
    edges = [(block.to_pyg()[0], block.num_dst) for block in blocks]
    call = lambda layer, block, h, last: layer((h, h[: block[1]]), block[0])  # noqa: E731
    return net, lambda x: forward(net, edges, x, call=call)
