"""Targets or labels of many small graphs: an edge-gated regressor, batches read from disk, scores.

targets = Regressor(...)(GraphDataset.open("molecules").batch(ids))     # one row for each graph

python train.py --task graph --dataset molecules.npz
python train.py --task graph --dataset crystals.npz --model alignn      # sees angles between bonds
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from disk.convert import shaped
from disk.files import StoreError, plural
from disk.graphs import GraphBatch, GraphDataset
from disk.reader import library
from features import CudaCopies
from loader import Limits
from model import drawn_seed, drop_byte, dropout, edge_dst, layer_seed, summable
from sources.splits import say_empty_parts
from tasks.metrics import (
    binary_cross_entropy,
    cross_entropy,
    errors,
    mean_of_present,
    metrics_with,
    score,
)
from tasks.task import OF_LINKS, Task

ANGLES = 40  # radial basis functions of the cosine of an angle, as in ALIGNN


class EdgeGatedConv(nn.Module):
    """Edge-gated graph convolution with residuals (Bresson, Laurent, arXiv 1711.07553), as ALIGNN uses it. An edge's
    gate is computed from its features and those of its two ends; a node averages its neighbours' messages, each channel
    weighted by the gates. LayerNorm replaces BatchNorm, so that a graph's output does not depend on its batch."""

    def __init__(self, width, last):
        super().__init__()
        self.nodes = nn.Linear(width, 4 * width)
        self.edges = nn.Linear(width, width)
        self.node_norm = nn.LayerNorm(width)
        self.edge_norm = None if last else nn.LayerNorm(width)

    def forward(self, src, dst, h, e):
        """Update node features h [N, W] and features e [E, W] of edges src [E] -> dst [E]; the last layer leaves e."""
        root, message, gate_src, gate_dst = summable(self.nodes(h)).chunk(4, 1)
        gate = self.edges(e) + gate_src.index_select(0, src) + gate_dst.index_select(0, dst)
        weight = gate.sigmoid()
        both = torch.cat([weight * message.index_select(0, src), weight], 1)  # [E, 2W]
        sums = both.new_zeros(h.shape[0], both.shape[1]).index_add_(0, dst, both)
        total, weights = sums.chunk(2, 1)
        h = h + F.silu(self.node_norm(root + total / (weights + 1e-6)))
        if self.edge_norm is not None:
            e = e + F.silu(self.edge_norm(gate))
        return h, e


class Categories(nn.Module):
    """Embeds categories: uint8 [n, columns] -> [n, width], the sum of an embedding per column."""

    def __init__(self, columns, width):
        super().__init__()
        self.table = nn.Embedding(256 * columns, width)
        self.register_buffer("first", 256 * torch.arange(columns), persistent=False)

    def forward(self, x):
        return self.table(x + self.first).sum(1)


def embedding(dim, dtype, width):
    """Build the map from features [n, dim] to [n, width]: of categories if the dtype is uint8, else of numbers."""
    if dtype == torch.uint8:
        return Categories(dim, width)
    return nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, width))


def means(rows, groups, count):
    """Average rows [n, W] by group, int [n] -> [count, W]; zero for a group without rows."""
    rows = summable(rows)
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, groups, rows)
    ones = torch.ones_like(groups)  # bincount waits for a GPU
    sizes = ones.new_zeros(count).index_add_(0, groups, ones)
    return sums / sizes.clamp(min=1).unsqueeze(1)


def line_graph(indptr, indices, vectors):
    """Pair the bonds of a batch that share an atom, u -> v and v -> w, except a bond and the way back over it.

    Args:
        indptr [N+1], indices [E]: as of a `GraphBatch`. vectors: float [E, 3], which tell bonds in a crystal apart that
            join the same two atoms.

    Returns:
        first, second: int32 [L], positions of the two bonds among the E, in ascending order of the second.

    Raises:
        StoreError: for vectors of another shape, as of a batch without.
    """
    vectors = shaped("edge_vector", vectors, len(indices), 3).detach().float().contiguous()
    indptr = indptr.int()
    indices = indices.int()
    counts = indptr.diff().index_select(0, indices)
    most = int(counts.sum())
    if indices.device.type == "cpu" and (native := library("line_graph")):
        first = indices.new_empty(most)
        second = indices.new_empty(most)
        nodes = len(indptr) - 1
        count = native.bond_pairs(indptr, indices, nodes, vectors, first, second)
        return first[:count], second[:count]
    second = torch.repeat_interleave(counts, output_size=most)
    before = counts.cumsum(0) - counts
    place = torch.arange(most, device=indices.device) - before[second]
    first = indptr[indices[second]] + place
    dst = edge_dst(indptr, indices)
    apart = (vectors[first] + vectors[second]).square().sum(1)
    back = (indices[first] == dst[second]) & (apart <= 1e-6 * vectors[first].square().sum(1))
    return first[~back].int(), second[~back].int()


class Regressor(nn.Module):
    """Edge-gated convolutions, mean pooling over the nodes of each graph, and a two-layer head.

    node_dim, edge_dim: F, D; a dtype of uint8 stands for categories, others for numbers. hidden: width W. out_dim: T.
    dropout: in the head, between its two layers, with a mask as in `GNN`, in which each graph is a row.
    Buffers mean and std, float [T]: of the targets; the layers predict standardised ones.
    """

    name = "edge-gated"
    uses_vectors = False

    def __init__(
        self, node_dim, edge_dim, hidden, out_dim, *, node_dtype, edge_dtype, num_layers, dropout
    ):
        super().__init__()
        self.nodes = embedding(node_dim, node_dtype, hidden)
        self.edges = embedding(edge_dim, edge_dtype, hidden)
        last = num_layers - 1
        self.layers = nn.ModuleList(EdgeGatedConv(hidden, i == last) for i in range(num_layers))
        # the third does nothing: it keeps the name of the last one's weights
        inner = nn.Linear(hidden, hidden)
        self.head = nn.Sequential(inner, nn.SiLU(), nn.Identity(), nn.Linear(hidden, out_dim))
        self.drop = drop_byte(dropout)
        self.register_buffer("mean", torch.zeros(out_dim))
        self.register_buffer("std", torch.ones(out_dim))

    def forward(self, graph, ids=None, key=None):
        """Predict targets [G, T] for a batch of graphs with .indptr, .indices, .graph_ids, .x, .e and .y [G, T].

        In training, ids int64 [G] of the graphs (None: their positions) and `key`, an int, as for `GNN`, key dropout.
        """
        dst = torch.repeat_interleave(graph.indptr.diff(), output_size=graph.indices.numel())
        x, e = (rows if rows.dtype == torch.uint8 else rows.float() for rows in (graph.x, graph.e))
        h = self.nodes(x)
        e = self.edges(e)
        h = self.convolved(graph, dst, h, e)
        inner, activation, _, last = self.head
        h = activation(inner(means(h, graph.graph_ids, len(graph.y))))
        if self.training and self.drop:
            ids = torch.arange(len(h), device=h.device) if ids is None else ids
            seed = layer_seed(drawn_seed() if key is None else key, len(self.layers))
            h = dropout(h, ids, seed, self.drop)
        return last(h) * self.std + self.mean

    def convolved(self, graph, dst, h, e):
        """Run the layers on node features h [N, W] and features e [E, W] of edges into dst [E] -> [N, W]."""
        for layer in self.layers:
            h, e = layer(graph.indices, dst, h, e)
        return h


class ALIGNN(Regressor):
    """The regressor that sees angles (Choudhary, DeCost, arXiv 2106.14829): each layer is an edge-gated convolution on the
    line graph, whose nodes are the bonds and whose edges are pairs of them, then one on the graph. A pair's features
    are a radial basis of the cosine of its angle, which stays the same if a graph is rotated.

    Unlike ALIGNN's, pooling begins with the pairs: their mean is added to each bond, that of bonds to each atom. The
    weights of an atom's messages sum to one, so pooling of atoms alone would give all crystals of one element, whose
    messages are all alike, the same output."""

    name = "alignn"
    uses_vectors = True

    def __init__(self, *dims, **options):
        super().__init__(*dims, **options)
        width = self.head[0].in_features
        last = len(self.layers) - 1
        self.angles = embedding(ANGLES, torch.float32, width)
        self.lines = nn.ModuleList(EdgeGatedConv(width, i == last) for i in range(last + 1))
        self.register_buffer("centres", torch.linspace(-1, 1, ANGLES), persistent=False)

    def convolved(self, graph, dst, h, e):
        first, second = line_graph(graph.indptr, graph.indices, graph.edge_vector)
        ways = F.normalize(graph.edge_vector)
        cosine = -(ways.index_select(0, first) * ways.index_select(0, second)).sum(1, keepdim=True)
        a = self.angles((-((cosine - self.centres) * (ANGLES - 1) / 2).square()).exp())
        for line, layer in zip(self.lines, self.layers):
            e, a = line(first, second, e, a)
            h, e = layer(graph.indices, dst, h, e)
        return h + means(e + means(a, second, len(e)), dst, len(h))


MODELS = {model.name: model for model in (Regressor, ALIGNN)}  # of --model, the default first


def answers_and_sizes(graph):
    """Return targets or labels [G, T] of a `GraphBatch`, and numbers of nodes and edges of its graphs, int64 [G, 2]."""
    nodes = graph.graph_ids.bincount(minlength=len(graph.y))
    ends = graph.indptr.long()[nodes.cumsum(0)]
    return graph.y, torch.stack([nodes, ends.diff(prepend=ends.new_zeros(1))], 1)


class GraphTask(Task):
    """Regression on whole graphs, or classification if they have labels; seeds are graph ids.

    labels: whether they have; in a store that does not say, whether all of its split are 0 or 1.
    mean, std: float64 [T] of the training targets, which the regression loss is scaled by.
    """

    name = "graph"
    examples = "graphs"
    placed = False
    models = MODELS
    metrics = tuple(dict.fromkeys(("roc_auc", *metrics_with("of_logits"))))
    widths = "node_dim edge_dim target_dim class_dim node_dtype edge_dtype labels".split()
    unused = {
        "is for --task link, --task is graph": OF_LINKS,
        "has no effect with --task graph: leave it out": "fanout norm residual edge_features input_dropout "
        "checkpoint_activations backend mode cache split_features lookahead",
        "is not for --task graph": "sampler temporal window early_stop weights class_weights split predict runs",
    }

    def __init__(self, args, path, say=print):
        self.store = graphs = GraphDataset.open(path)
        graphs.check_split()
        if MODELS[args.model].uses_vectors and not graphs.vector_dim:
            raise StoreError(
                f"--model {args.model} takes edge_vector [E, 3], and {path} has none: build it with one, "
                "from an .npz file with that array or of crystals"
            )
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        self.labels = graphs.labels
        self.classes = None
        if graphs.classes:
            self.classes = torch.tensor(graphs.classes, dtype=torch.float64)
        self.several_classes = bool(graphs.meta["class_dim"])
        self._read_answers(say)
        self.limits = self._limits(args, say)
        if drawn := graphs.meta.get("split"):
            say(f"split   {drawn}, by seed 0 when the store was built")
        say_empty_parts(graphs.split, "graphs", say)
        self.metric = args.metric
        if self.labels and not self.metric:
            self.metric = "accuracy" if self.several_classes else "roc_auc"
        elif self.metric and not self.labels:
            raise StoreError(f"--metric {self.metric} is of labels, and {path} has targets")

    def _read_answers(self, say):
        """Read all targets or labels of the split; compute mean and std, and leave out graphs without any."""
        graphs = self.store
        split = graphs.split
        ids = torch.cat([*split.values()])  # those of training first
        batches = [answers_and_sizes(graphs.batch(part)) for part in ids.split(1024)]
        y, sizes = map(torch.cat, zip(*batches))
        self.sizes = sizes.new_zeros(len(graphs), 2).index_copy_(0, ids, sizes)
        if self.labels is None:
            self.labels = bool(((y == 0) | (y == 1)).all())
            kind = "labels, as all are 0 or 1" if self.labels else "numbers"
            say(f"targets the store does not say whether they are labels: taken for {kind}")
        graphs.meta["labels"] = self.labels  # kept in checkpoints
        y = self.numbered(y)
        present = ~y.isnan() & ((y >= 0) | (not self.labels))
        noun = "label" if self.labels else "target"
        if graphs.labels or not present.all():
            kind = graphs.kind_of_labels() if graphs.labels else f"{graphs.target_dim} a graph"
            if missing := int((~present).sum()):
                kind += f"; {missing:,} of {present.numel():,} are missing"
                kind += f", {(~present.any(1)).sum():,} of {len(ids):,} graphs left out"
            say(f"{noun + 's':8}{kind}")
        known = present.any(1).split([len(part) for part in split.values()])
        graphs.split = {part: split[part][keep] for part, keep in zip(split, known)}
        train = len(split["train"])
        if (none := ~present[:train].any(0)).any():
            which = f"{noun} {int(none.int().argmax())} of {len(none)}" if len(none) > 1 else noun
            raise StoreError(f"{graphs.path}: no training graph has a {which}")
        count = present[:train].sum(0)
        self.mean = y[:train].where(present[:train], 0).double().sum(0) / count
        # with the mean in the place of what is missing, which adds nothing to the sum of squares
        deviation = y[:train].double().where(present[:train], self.mean).std(0, correction=0)
        self.std = (deviation * (train / count).sqrt()).clamp(min=1e-12)

    def _limits(self, args, say):
        """Return the `Limits` of --max-nodes and --max-edges, None without; StoreError for a graph that is larger."""
        typed = {"nodes": args.max_nodes, "edges": args.max_edges}
        columns = [j for j, most in enumerate(typed.values()) if most]
        if not columns:
            return None
        ids = torch.cat([*self.store.split.values()])
        for j in columns:
            noun, most = [*typed.items()][j]
            largest = ids[self.sizes[ids, j].argmax()]
            if (size := int(self.sizes[largest, j])) > most:
                raise StoreError(
                    f"--max-{noun} {most}: graph {int(largest)} of {self.store.path} has {size:,} {noun}"
                    ", the most of all: give as many or more"
                )
        return Limits(self.sizes[:, columns], tuple(most for most in typed.values() if most))

    def numbered(self, y):
        """Number stored labels [G, T] as the loss takes them: classes from 0, with -1 for a missing label. Targets stay."""
        if not self.labels:
            return y
        if self.classes is None:
            return y.masked_fill(y.isnan(), -1)
        values = y.double()
        number = torch.searchsorted(self.classes, values).clamp(max=len(self.classes) - 1)
        return number.where(self.classes[number] == values, -1)

    @staticmethod
    def network(args, widths, custom=None):
        return MODELS[args.model](
            widths["node_dim"],
            widths["edge_dim"],
            args.hidden,
            widths["class_dim"] or widths["target_dim"],
            node_dtype=getattr(torch, widths["node_dtype"]),
            edge_dtype=getattr(torch, widths["edge_dtype"]),
            num_layers=args.num_layers,
            dropout=args.dropout,
        )

    def attach(self, ranks, args, *_):
        """On a GPU, prepare to copy batches to it."""
        self.most = args.batch_size
        self.pairs = MODELS[args.model].uses_vectors
        self.copies = CudaCopies(ranks.device, args.sample_threads) if ranks.gpus else None

    def obstacle(self):
        if self.limits is None or len(self.limits.most) < 2:
            return "only --max-nodes and --max-edges together make shapes static"
        return "nothing bounds the pairs of edges of the model" if self.pairs else None

    def blank(self):
        """Padding needs a node and a graph more than fit: its nodes are of the last graph, which has no answer."""
        nodes, edges = self.limits.most
        train = self.store.split["train"]
        graphs = min(self.most, self.limits.most_examples(train)) + 1
        rows = nodes + 2, edges, nodes + 1, nodes + 1, edges, graphs, edges, graphs
        tensors = *self.read(train[:1]), train
        return [t.new_zeros(n, *t.shape[1:]) for t, n in zip(tensors, rows)]

    def pad(self, drawn, *tensors):
        graph = drawn.options["graph"]
        _, indices, _, x, _, y, *_ = tensors
        nodes = len(x) - len(graph.x)
        edges = len(indices) - len(graph.indices)
        # spread evenly: sums into one row are taken one after the other
        ends = len(graph.indices) + torch.arange(1, nodes + 1) * edges // nodes
        sources = len(graph.x) + torch.arange(edges) % nodes
        padding = ends, sources, len(y) - 1, 0, 0, -1 if self.labels else math.nan, 0, 0
        for tensor, rows, rest in zip(tensors, (*graph, drawn.nodes), padding):
            tensor[: len(rows)] = rows
            tensor[len(rows) :] = rest

    def set_buffers(self, network):
        if not self.labels:
            network.mean.copy_(self.mean)
            network.std.copy_(self.std)

    def read(self, ids):
        """Read graphs, with their labels numbered -> GraphBatch."""
        graph = self.store.batch(ids)
        return graph._replace(y=self.numbered(graph.y))

    def draw(self, batch):
        return batch.seeds, {"graph": self.read(batch.seeds)}, None

    def load_batch(self, batch, slot):
        """Read the graphs with ids batch.seeds to the training device -> the Batch completed; there is no sampling."""
        tensors = *self.read(batch.seeds), batch.seeds
        if self.copies:
            with self.copies.stream(slot):
                tensors = [self.copies.copy(tensor.pin_memory()) for tensor in tensors]
                batch = batch._replace(ready=self.copies.event())
        return self.completed(batch, *tensors)

    def completed(self, batch, *tensors):
        *graph, ids = tensors
        graph = GraphBatch(*graph)
        return batch._replace(blocks=[graph, ids], x=graph.x, y=graph.y)

    def output(self, run, network, batch, key):
        """Compute targets [G, T], or logits [G, T or classes], of a batch's graphs."""
        return network(*batch.blocks, key=key)

    def loss(self, network, output, y):
        """Sum over graphs of the cross-entropy of more than two classes, or of the mean over labels or targets of the binary
        cross-entropy or the squared error, in units of the targets' standard deviation, without missing ones; targets
        are rounded as outputs are: that of a constant target is no error."""
        if self.several_classes:
            return cross_entropy(output, y.squeeze(1))
        if self.labels:
            return binary_cross_entropy(output, y)
        y = y.to(output.dtype)
        present = ~y.isnan()
        error = (output - y.where(present, output.detach())) / network.std
        return mean_of_present(error.square(), present).sum()

    def scores(self, run, part):
        """Compute the metrics of a part -> {name: value}, the same on all ranks; None without graphs."""
        ids = self.store.split[part]
        if not ids.numel():
            return None
        both = lambda batch: torch.cat([run.model(batch.blocks[0]), batch.y.double()], 1)  # noqa: E731
        loader = run.loader(ids, shuffle=False, accumulate=1)
        rows = run.rows(run.model, loader, len(self.store), both)
        columns = self.store.target_dim
        output = rows[ids, :-columns]
        y = rows[ids, -columns:]
        if not self.labels:
            return errors(output, y, self.mean)
        y = y.long().squeeze(1) if self.several_classes else y
        value = score(self.metric, output, y)
        return None if value is None else {self.metric: value}

    def validate(self, run):
        return {"valid": self.scores(run, "valid")}, None

    def evaluate(self, run, report):
        return report.scores({part: self.scores(run, part) for part in self.store.split})

    def lines(self, args, split, parameters):
        yield f"graphs  {self.store.path}: {len(self.store):,} graphs; {split}"
        of_graph = self.sizes[self.store.split["train"]].double().mean(0)
        largest = [int(n) for n in self.sizes.amax(0)]
        yield (
            f"sizes   a graph has {of_graph[0]:,.3g} nodes and {of_graph[1]:,.3g} edges in the mean, "
            f"{largest[0]:,} and {largest[1]:,} at most"
        )
        layers = f"{plural(args.num_layers, 'layer')}, hidden {args.hidden}"
        yield f"model   {args.model} regressor, {layers}, {parameters}"
