"""Training steps on CPU, this project's and DGL's: a contender is called with the number of a batch -> its loss."""

import functools

import torch
from torch.nn import functional as F

import model
from bench.tools import OwnProcess, dgl_graph, opened
from features import FeatureRing
from loader import Batch
from model import gather_rows, self_and_mean
from native.layers import use_native
from sampler import NeighborSampler, import_dgl
from tasks.link import Edges, Links, Scorer, split_edges


def batches_of(store, args):
    """Seed nodes of each batch, two for each round."""
    nodes = torch.randperm(store.num_nodes, generator=torch.Generator().manual_seed(0))
    return nodes[: 2 * args.batch_size * (args.rounds + 2)].split(args.batch_size)


def step(optimizer, loss):
    """Backward and a step of the optimizer -> the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Ours:
    """A step as train.py takes it, one after the other; each trick can be left out.

    `features` replaces the store's own, `slots` batches may live at once. link: a step of --task link, with the edges of
    a batch excluded ("exclude") or not ("keep").
    """

    def __init__(
        self,
        args,
        store=None,
        native_sampler=True,
        first_hop=True,
        kept_buffers=True,
        native_layers=True,
        bf16=False,
        dropout=0.5,
        features=None,
        slots=1,
        link=None,
    ):
        store = self.store = store or opened(args.dataset, args.root)
        self.native_layers, self.bf16, self.link, self.args = native_layers, bf16, link, args
        graph = split_edges(store, "none") if link else store
        self.draw = NeighborSampler(
            graph.indptr,
            graph.indices,
            args.fanout,
            check=False,
            threads=args.threads,
            backend="native" if native_sampler else "torch",
        )
        self.make_ring = functools.partial(
            FeatureRing,
            store.features.tensor if features is None else features,
            store.labels,
            slots=slots,
            log=lambda line: None,
            gather=gather_rows,
            aggregate=self_and_mean if first_hop else None,
            dtype=torch.bfloat16 if bf16 else None,
        )
        self.kept_ring = self.make_ring() if kept_buffers else None
        torch.manual_seed(0)
        widths = store.feature_dim, args.hidden, args.hidden if link else store.num_classes
        self.model = model.SAGE(*widths, num_layers=len(args.fanout), dropout=dropout)
        if link:
            self.model.scorer = Scorer("mlp", args.hidden)
            self.links = Links(graph, graph.indptr, graph.indices, exclude=link == "exclude")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003, fused=True)

    def seeds(self, i):
        """Nodes or pairs of batch i."""
        if self.link:
            size, random = (self.args.batch_size,), torch.Generator().manual_seed(i)
            return torch.randint(len(self.links.pairs), size, generator=random)
        return self.batches[i]

    @functools.cached_property
    def batches(self):
        return batches_of(self.store, self.args)

    def __call__(self, i):
        use_native(self.native_layers)
        torch.manual_seed(i)
        ring = self.kept_ring or self.make_ring()
        seeds, options, y = self.seeds(i), {}, None
        if self.link:
            batch = Batch([], None, None, seeds, global_step=i, step_seeds=seeds)
            seeds, options, y = self.links.draw(batch)
        blocks = self.draw.sample(seeds, i, relabel_outer=not ring.first_hop, **options)
        batch = ring.fetch(0, blocks)
        return self.train(batch if y is None else batch._replace(y=y), ring.first_hop)

    def train(self, batch, aggregated=True):
        """Forward, backward and a step of Adam on a fetched batch -> loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            output = self.model(batch.blocks, batch.x, aggregated=aggregated)
        if self.link:
            loss = self.links.loss(self.model.scorer, output, batch.y) / batch.y.shape[0]
        else:
            loss = F.cross_entropy(output.float(), batch.y)
        return step(self.optimizer, loss)


class Dgl:
    """The same step with DGL's DataLoader and SAGEConv, as DGL's own examples write it."""

    graph = None  # one for all contenders of a process: it takes 2 GB

    def __init__(self, args, dropout=0.5, link=False):
        load, store = import_dgl().dataloading, opened(args.dataset, args.root)
        from dgl.nn import SAGEConv

        if Dgl.graph is None:
            Dgl.graph = dgl_graph(store.indptr, store.indices.long())
            Dgl.graph.ndata["feat"] = store.features.tensor.clone()
            Dgl.graph.ndata["label"] = store.labels.clone()
        prefetch = {"prefetch_node_feats": ["feat"], "prefetch_labels": None if link else ["label"]}
        draw, seeds = load.NeighborSampler(args.fanout[::-1], **prefetch), None
        if link:
            # DGL takes the reverse of each edge by number
            source, target = Dgl.graph.edges(order="eid")
            reverse = Edges(store.indptr, store.indices).first(target, source)[0]
            negatives = load.negative_sampler.Uniform(1)
            draw = load.as_edge_prediction_sampler(
                draw, exclude="reverse_id", reverse_eids=reverse, negative_sampler=negatives
            )
            count, random = (
                4 * args.batch_size * (args.rounds + 3),
                torch.Generator().manual_seed(0),
            )
            seeds = torch.randint(store.num_edges, (count,), generator=random)
        seeds = torch.cat(batches_of(store, args)) if seeds is None else seeds
        self.loader = iter(load.DataLoader(Dgl.graph, seeds, draw, batch_size=args.batch_size))
        widths = [store.feature_dim] + [args.hidden] * len(args.fanout)
        widths[-1] = args.hidden if link else store.num_classes
        torch.manual_seed(0)
        convs = (SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
        self.layers, self.dropout = torch.nn.ModuleList(convs), torch.nn.Dropout(dropout)
        self.scorer = Scorer("mlp", args.hidden) if link else None
        parameters = [*self.layers.parameters(), *(self.scorer.parameters() if link else ())]
        self.optimizer = torch.optim.Adam(parameters, lr=0.003)

    def __call__(self, i):
        _, *pairs, blocks = next(self.loader)
        h = blocks[0].srcdata["feat"]
        for layer, block in zip(self.layers, blocks):
            h = layer(block, h)
            h = h if layer is self.layers[-1] else self.dropout(F.relu(h))
        if self.scorer is None:
            return step(self.optimizer, F.cross_entropy(h, blocks[-1].dstdata["label"]))
        scores = [self.scorer(*(h[ends] for ends in graph.edges())) for graph in pairs]
        labels = [torch.ones_like(scores[0]), torch.zeros_like(scores[1])]
        loss = F.binary_cross_entropy_with_logits(torch.cat(scores), torch.cat(labels))
        return step(self.optimizer, loss)


def as_shipped(kind, args, **options):
    """A contender in a process of its own, in which glibc gives freed memory back as it does in any program."""
    return OwnProcess(args.threads, kind, args, **options)
