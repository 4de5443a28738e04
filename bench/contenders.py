"""Training on CPU, by this project and by DGL: a contender prepares itself and returns its step, i -> loss of batch i."""

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import model
import train
from bench.tools import descend, dgl_graph, exit_code, forward, opened
from disk.files import StoreError
from features import FeatureRing
from loader import Batch
from model import gather_rows, self_and_mean
from native.layers import use_native
from sampler import NeighborSampler, import_dgl
from tasks.link import Edges, Links, Scorer, split_edges


def batches_of(count, args):
    """Numbers 0 .. count - 1 in random order, again and again, as batches: two for each round."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    places = torch.arange(2 * args.batch_size * (args.rounds + 2)) % count
    return order[places].split(args.batch_size)


def make_ring(store, features=None, *, slots=1, first_hop=True, bf16=False):
    """A ring over the features of a store, or over those given."""
    return FeatureRing(
        store.features.tensor if features is None else features,
        store.labels,
        slots=slots,
        log=lambda line: None,
        gather=gather_rows,
        aggregate=self_and_mean if first_hop else None,
        dtype=torch.bfloat16 if bf16 else None,
    )


def trainer(args, store, links=None, *, bf16=False, dropout=0.5):
    """A GraphSAGE of seed 0 -> function that trains it on a fetched batch, nodes or `links`, and returns the loss."""
    torch.manual_seed(0)
    widths = store.feature_dim, args.hidden, args.hidden if links else store.num_classes
    net = model.SAGE(*widths, num_layers=len(args.fanout), dropout=dropout)
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


def ours(
    args,
    link=None,
    *,
    native_sampler=True,
    first_hop=True,
    kept_buffers=True,
    native_layers=True,
    bf16=False,
    dropout=0.5,
):
    """Prepare steps as train.py takes them, one after the other; each trick can be left out.

    link: steps of --task link, with the edges of a batch excluded ("exclude") or not ("keep").
    """
    store = opened(args.dataset, args.root)
    graph = split_edges(store, "none") if link else store
    csc = graph.indptr, graph.indices
    options = {"threads": args.threads, "backend": "native" if native_sampler else "torch"}
    sampler = NeighborSampler(*csc, args.fanout, check=False, **options)
    links = Links(graph, *csc, exclude=link == "exclude") if link else None
    new_ring = functools.partial(make_ring, store, first_hop=first_hop, bf16=bf16)
    kept_ring = new_ring() if kept_buffers else None
    train_on = trainer(args, store, links, bf16=bf16, dropout=dropout)
    batches = batches_of(len(links.pairs) if link else store.num_nodes, args)

    def step(i):
        use_native(native_layers)
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
    graph = dgl_graph(store.indptr, store.indices.long())
    graph.ndata["feat"] = store.features.tensor.clone()
    graph.ndata["label"] = store.labels.clone()
    return graph


def dgl(args, link=False, *, dropout=0.5):
    """Prepare the same steps with DGL's DataLoader and SAGEConv, as DGL's own examples write them."""
    load, store = import_dgl().dataloading, opened(args.dataset, args.root)
    from dgl.nn import SAGEConv

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
    widths = [store.feature_dim] + [args.hidden] * len(args.fanout)
    widths[-1] = args.hidden if link else store.num_classes
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
    scorer = Scorer("mlp", args.hidden) if link else torch.nn.Identity()
    optimizer = torch.optim.Adam([*layers.parameters(), *scorer.parameters()], lr=0.003)

    def step(i):
        _, *pairs, blocks = next(batches)
        h = forward(layers, blocks, blocks[0].srcdata["feat"], dropout)
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
            code = exit_code(train.main, [*words, "--log", f"{folder}/log"])
        if code:
            last = printed.getvalue().strip().rpartition("\n")[2]
            raise StoreError(f"train.py ended with exit code {code}: {last}")
        lines = Path(folder, "log").read_text().splitlines()
    return [json.loads(line) for line in lines], printed.getvalue()
