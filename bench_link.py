"""python bench.py link: a step of link prediction beside DGL's own example loop."""

import torch
from torch.nn import functional as F

from allocator import keep_freed_memory
from bench_tools import OwnProcess, dgl_graph, interleave, made, opened, print_times
from features import FeatureRing
from link import Edges, Links, Scorer, split_edges
from model import SAGE, gather_rows, self_and_mean
from sampler import NeighborSampler, import_dgl


class Ours:
    """A step of `train.py --task link`, one after the other: sample, fetch, train; `exclude` as it can be left out."""

    def __init__(self, args, exclude=True):
        store = opened(args.dataset, args.root)
        graph = split_edges(store, "none")
        draw = NeighborSampler(graph.indptr, graph.indices, args.fanout, check=False, threads=args.threads)
        ring = FeatureRing(store.features.tensor, store.labels, slots=1, log=lambda line: None, gather=gather_rows,
                           aggregate=self_and_mean)  # fmt: skip
        self.links, self.args = Links(graph, draw, ring, exclude=exclude), args
        torch.manual_seed(0)
        self.model = SAGE(store.feature_dim, args.hidden, args.hidden, num_layers=len(args.fanout), dropout=0.0)
        self.model.scorer = Scorer("mlp", args.hidden)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003, fused=True)

    def __call__(self, i):
        generator = torch.Generator().manual_seed(i)
        pairs = torch.randint(len(self.links.pairs), (self.args.batch_size,), generator=generator)
        batch = self.links.fetch(0, self.links.sample(pairs, i, relabel_outer=not self.links.first_hop))
        h = self.model(batch.blocks, batch.x, aggregated=self.links.first_hop)
        loss = self.links.loss(self.model.scorer, h, batch.y) / len(pairs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Dgl:
    """The same step as DGL's example link_pred.py of GraphSAGE writes it, with a scorer of one hidden layer."""

    def __init__(self, args):
        load = import_dgl().dataloading
        from dgl.nn import SAGEConv

        store = opened(args.dataset, args.root)
        graph = dgl_graph(store.indptr, store.indices.long())
        graph.ndata["feat"] = store.features.tensor.clone()
        source, target = graph.edges(order="eid")
        reverse = Edges(store.indptr, store.indices).first(target, source)[0]  # DGL takes a number for each edge
        draw = load.NeighborSampler(args.fanout[::-1], prefetch_node_feats=["feat"])
        draw = load.as_edge_prediction_sampler(draw, exclude="reverse_id", reverse_eids=reverse,
                                               negative_sampler=load.negative_sampler.Uniform(1))  # fmt: skip
        count, generator = 4 * args.batch_size * (args.rounds + 3), torch.Generator().manual_seed(0)
        seeds = torch.randint(store.num_edges, (count,), generator=generator)
        self.loader = iter(load.DataLoader(graph, seeds, draw, batch_size=args.batch_size))
        widths = [store.feature_dim] + [args.hidden] * len(args.fanout)
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
        self.scorer = Scorer("mlp", args.hidden)
        self.optimizer = torch.optim.Adam([*self.layers.parameters(), *self.scorer.parameters()], lr=0.003)

    def __call__(self, i):
        _, pairs, others, blocks = next(self.loader)
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(self.layers, blocks):
            h = layer(block, h)
            h = h if layer is self.layers[-1] else F.relu(h)
        scores = [self.scorer(*(h[ends] for ends in some.edges())) for some in (pairs, others)]
        labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
        loss = F.binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def bench_link(args):
    """Time a step of link prediction of every contender; returns the figures.

    The graph has every edge's reverse. As in `bench.py step` this process keeps freed memory, and DGL "as shipped" runs
    in a process of its own.
    """
    keep_freed_memory()
    runs = {"ours": Ours(args), "ours, nothing excluded": Ours(args, exclude=False)}
    runs |= made({"DGL as shipped": lambda: OwnProcess(args.threads, Dgl, args), "DGL, malloc kept": lambda: Dgl(args)})
    times = interleave(runs, args.rounds, twice=True)
    median, least = print_times("one step", times, "ms", 0)
    ratios = {name: median[name] / median["ours"] for name in median if name.startswith("DGL")}
    for name, ratio in ratios.items():
        print(f"{ratio:.2f} times as fast as {name}")
    return {"median_ms": median, "min_ms": least, "ratios": ratios}
