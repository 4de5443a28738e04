"""Targets or labels of many small graphs: batches read from disk, loss, scores; the networks are in regressor.py.

python train.py --task graph --dataset molecules.npz
python train.py --task graph --dataset crystals.npz --model alignn      # sees angles between bonds
"""

import math
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from disk.files import StoreError, plural
from extras.graph_store import GraphBatch, GraphDataset
from extras.regression import check_each, loss_of, moments
from extras.regressor import MODELS, POOLS, OwnRegressor
from features import CudaCopies
from loader import NodeLoader
from sources.splits import say_empty_parts
from tasks.metrics import (
    ERRORS,
    binary_cross_entropy,
    cross_entropy,
    errors,
    metrics_with,
    score,
    scores_line,
)
from tasks.task import Task

UNLIMITED = 1 << 20  # examples of a batch that `Limits` end
PASSES = 32  # of an epoch by default, of 16 to 256 graphs


class Limits(NamedTuple):
    """How much a pass holds at most, where examples differ in size."""

    sizes: torch.Tensor  # int64 [n, k]: k sizes of each example, such as nodes and edges of a graph
    most: tuple  # [k] the largest sum of each

    unlimited = UNLIMITED

    def cut(self, order, count):
        """Cut examples [n], in this order, into passes of at most `count`, each as long as it fits -> list of their bounds
        [passes + 1]; an example that is too large is a pass of its own."""
        upto = np.pad(self.sizes[order].numpy().cumsum(0), ((1, 0), (0, 0)))
        columns = [*zip(upto.T.copy(), self.most)]
        bounds = [0]
        while (at := bounds[-1]) < len(order):
            ends = [int(of.searchsorted(of[at] + most, side="right")) - 1 for of, most in columns]
            bounds.append(max(at + 1, min(at + count, *ends)))
        return bounds

    def most_examples(self, examples):
        """Return how many of these examples a pass holds at most: as many as fit of the smallest."""
        smallest = self.sizes[examples].sort(0).values.cumsum(0)
        return int((smallest <= torch.tensor(self.most)).sum(0).amin())


class GraphLoader(NodeLoader):
    """Iterate over the batches of an epoch of graphs -> (`GraphBatch`, ids int64 [G]) of each; a loop as that of a `NodeLoader`,
    which shuffles, reads ahead, and resumes.

    graphs: `GraphDataset`. ids: of the graphs, int [n] or a mask, or a part of the split, as "train"; None: all. batch_size:
    graphs per process and pass. options: shuffle, seed, rank, world, accumulate, depth, threads and limits of `NodeLoader`.
    """

    def __init__(self, graphs, ids=None, *, batch_size=32, **options):
        self.graphs = graphs
        if isinstance(ids, str):
            if ids not in graphs.split:
                raise ValueError(f"ids is {ids!r}: the parts are {', '.join(graphs.split)}")
            ids = graphs.split[ids]
        ids = range(len(graphs)) if ids is None else ids
        super().__init__(graphs, ids, (), batch_size=batch_size, load_batch=self._read, **options)

    def _read(self, batch, slot):
        return batch._replace(blocks=[self.graphs.batch(batch.seeds)])

    def __iter__(self):
        with closing(super().__iter__()) as batches:
            for batch in batches:
                yield batch.blocks[0], batch.seeds


class GraphTask(Task):
    """Regression on whole graphs, or classification if they have labels; seeds are graph ids.

    labels: whether they have; in a store that does not say, whether all of its split are 0 or 1.
    mean, std: float64 [T] of the training targets, which the regression loss is scaled by.
    y, sizes: targets or labels as stored [G, T] and numbers of nodes and edges int64 [G, 2] of the graphs of the split.
    """

    name = "graph"
    examples = "graphs"
    placed = False
    models = MODELS
    about_models = f"{' or '.join(MODELS)}, which sees angles, or own (default: {[*MODELS][0]})"
    told_by = "graphs."
    least_steps = 2000
    metrics = *dict.fromkeys(("roc_auc", *metrics_with("from_logits"))), *ERRORS
    widths = "node_dim edge_dim target_dim class_dim node_dtype edge_dtype labels".split()
    unused = {
        "has no effect with --task graph: leave it out": "fanout norm residual edge_features input_dropout "
        "checkpoint_activations backend mode cache split_features lookahead",
        "is not for --task graph": "sampler temporal window class_weights split report",
    }

    def __init__(self, args, path, say=print):
        self.store = graphs = GraphDataset.open(path)
        graphs.check_split()
        self.made = MODELS.get(args.model, OwnRegressor)
        if self.made.uses_vectors and not graphs.vector_dim:
            raise StoreError(
                f"--model {args.model} takes edge_vector [E, 3], and {path} has none: build it with one, "
                "from an .npz file with that array or of crystals"
            )
        if not graphs.split["train"].numel():
            raise StoreError(f"{path} has no training graphs; build it with a split")
        self.labels = graphs.labels
        self.several_classes = bool(graphs.meta["class_dim"])
        self._read_answers(say)
        self.limits = self._limits(args)
        if drawn := graphs.meta.get("split"):
            say(f"split   {drawn}, by seed 0 when the store was built")
        say_empty_parts(graphs.split, "graphs", say)
        kinds = ["targets", "labels"]
        default = "rmse"
        if self.labels:
            default = "accuracy" if self.several_classes else "roc_auc"
        self.metric = args.metric or default
        if self.labels and "loss" in args.typed:
            raise StoreError(
                f"--loss {args.loss} is of targets, and {path} has labels: leave it out"
            )
        self.loss_kind = args.loss
        if self.labels == (self.metric in ERRORS):
            raise StoreError(
                f"--metric {self.metric} is of {kinds[not self.labels]}, and {path} has {kinds[self.labels]}"
            )

    def _read_answers(self, say):
        """Read all targets or labels of the split; compute mean and std, and leave out graphs without any."""
        graphs = self.store
        split = graphs.split
        ids = torch.cat([*split.values()])  # those of training first
        self.y = torch.zeros(len(graphs), graphs.target_dim, dtype=graphs.target_dtype)
        self.sizes = torch.zeros(len(graphs), 2, dtype=torch.int64)
        for part in ids.split(1024):
            graph = graphs.batch(part)
            nodes = graph.graph_ids.bincount()
            ends = graph.indptr.long()[nodes.cumsum(0)]
            self.y[part] = graph.y
            self.sizes[part, 0] = nodes
            self.sizes[part, 1] = ends.diff(prepend=ends.new_zeros(1))
        y = self.y[ids]
        if self.labels is None:
            self.labels = bool(((y == 0) | (y == 1)).all())
            kind = "labels, as all are 0 or 1" if self.labels else "numbers"
            say(f"targets the store does not say whether they are labels: taken for {kind}")
        graphs.meta["labels"] = self.labels  # kept in checkpoints
        y = self.numbered(y)
        present = y >= 0 if self.labels else ~y.isnan()
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
        check_each(graphs.path, "graph", noun, present[:train])
        if self.labels and y.shape[1] == 1 and len(y[:train][present[:train]].unique()) == 1:
            say("labels  all training graphs are of one class: there is nothing to learn")
        self.mean, self.std = torch.tensor([0, 1])
        if not self.labels:
            self.mean, self.std = moments(y[:train])

    def _limits(self, args):
        """Return the `Limits` of --max-nodes and --max-edges, None without; StoreError for a graph that is larger."""
        ids = torch.cat([*self.store.split.values()])
        given = enumerate((args.max_nodes, args.max_edges))
        limits = {j: most for j, most in given if most}
        for j, most in limits.items():
            noun = ("nodes", "edges")[j]
            largest = int(ids[self.sizes[ids, j].argmax()])
            if (size := int(self.sizes[largest, j])) > most:
                raise StoreError(
                    f"--max-{noun} {most}: graph {largest} of {self.store.path} has {size:,} {noun}"
                    ", the most of all: give as many or more"
                )
        return Limits(self.sizes[:, [*limits]], (*limits.values(),)) if limits else None

    def numbered(self, y):
        """Number stored labels [G, T] as the loss takes them: classes from 0, with -1 for a missing label. Targets stay."""
        if not self.labels:
            return y
        if not self.store.classes:
            return y.masked_fill(y.isnan(), -1)
        values = y.double()
        classes = torch.tensor(self.store.classes, dtype=torch.float64)
        number = torch.searchsorted(classes, values).clamp(max=len(classes) - 1)
        return number.where(classes[number] == values, -1)

    def own_widths(self, edges):
        meta = self.store.meta
        return meta["node_dim"], meta["class_dim"] or meta["target_dim"], meta["edge_dim"]

    @staticmethod
    def network(args, widths, custom=None):
        out_dim = widths["class_dim"] or widths["target_dim"]
        if custom is not None:
            return OwnRegressor(custom, out_dim)
        return MODELS[args.model](
            widths["node_dim"],
            widths["edge_dim"],
            args.hidden,
            out_dim,
            node_dtype=getattr(torch, widths["node_dtype"]),
            edge_dtype=getattr(torch, widths["edge_dtype"]),
            num_layers=args.num_layers,
            dropout=args.dropout,
            pooling=args.pooling or "mean",
        )

    @staticmethod
    def defaults(flags):
        return {"hidden": 64, "dropout": 0.2}

    def settled(self, flags):
        size = len(self.store.split["train"]) // PASSES
        return {
            "batch_size": flags.batch_size
            or (UNLIMITED if self.limits else sorted((16, size, 256))[1]),
            "pooling": flags.pooling
            or ("sum" if self.labels or not self.store.vector_dim else "mean"),
        }

    def attach(self, ranks, args, *_):
        """On a GPU, prepare to copy batches to it."""
        self.most = args.batch_size
        self.copies = CudaCopies(ranks.device, args.sample_threads) if ranks.gpus else None

    def unsupported(self):
        """Return why batches that are read have no static shapes, or None."""
        if self.limits is None or len(self.limits.most) < 2:
            return "only --max-nodes and --max-edges together make shapes static"
        if self.made is OwnRegressor:
            return "a network of a file may count padding"
        return "nothing bounds the pairs of edges of the model" if self.made.uses_vectors else None

    def blank(self):
        """Return the tensors of a batch, in the static shapes of CUDA graphs, in host memory. Padding needs a node and a graph more than fit: its nodes are of the last graph, which has no answer."""
        nodes, edges = self.limits.most
        train = self.store.split["train"]
        graphs = min(self.most, self.limits.most_examples(train)) + 1
        rows = nodes + 2, edges, nodes + 1, nodes + 1, edges, graphs, edges, graphs
        tensors = *self.read(train[:1]), train
        return [t.new_zeros(n, *t.shape[1:]) for t, n in zip(tensors, rows)]

    def pad(self, drawn, *tensors):
        """Write what `draw` has read, in `Drawn`, into tensors like those of `blank`; padding has no part in the loss."""
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
        if network.pooling == "sum":
            network.size.fill_(self.sizes[self.store.split["train"], 0].double().mean())
        network.fit(self.mean, self.std)

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
        """Return a Batch with these tensors as its blocks, x and y."""
        *graph, ids = tensors
        graph = GraphBatch(*graph)
        return batch._replace(blocks=[graph, ids], x=graph.x, y=graph.y)

    def output(self, run, network, batch, key):
        """Compute targets [G, T], or logits [G, T or classes], of a batch's graphs."""
        return network(*batch.blocks, key=key)

    def loss(self, network, output, y):
        """Sum over graphs of the cross-entropy of more than two classes, of the mean over labels of the binary cross-entropy
        without missing ones, or of `loss_of` targets."""
        if self.several_classes:
            return cross_entropy(output, y.squeeze(1))
        if self.labels:
            return binary_cross_entropy(output, y)
        return loss_of(self.loss_kind, output, y, network.std)

    def scores(self, run, ids):
        """Compute the metrics of graphs -> {name: value}, the same on all ranks; None without graphs."""
        if not ids.numel():
            return None
        output = self.outputs(run, ids)[ids]
        return self.scored(output.double(), self.numbered(self.y[ids]).double())

    def outputs(self, run, ids):
        """Compute targets or logits of graphs -> rows of all graphs, the same on all ranks; zeros for others."""
        of = lambda batch: run.model(batch.blocks[0])  # noqa: E731
        return run.rows(ids, len(self.store), of, accumulate=1)

    def scored(self, output, y):
        """Compute the metrics of outputs for targets or numbered labels [G, T] -> {name: value}."""
        if not self.labels:
            return errors(output, y, self.mean)
        y = y.long().squeeze(1) if self.several_classes else y
        names = dict.fromkeys((self.metric, "roc_auc", "accuracy"))
        return {name: score(name, output, y) for name in names}

    def num_scored(self):
        """Return how many validation graphs tell the best epoch: none if they are of one class, for a ROC-AUC."""
        ids = self.store.split["valid"]
        if not len(ids):
            return 0
        y = self.numbered(self.y[ids])
        output = torch.zeros(len(y), self.store.meta["class_dim"] or y.shape[1])
        return len(ids) * (self.scored(output, y)[self.metric] is not None)

    def validate(self, run):
        scores = self.scores(run, self.store.split["valid"])
        watched = scores and scores[self.metric]
        return {"valid": scores}, watched if self.labels or not watched else -watched

    def score_text(self, score):
        return scores_line({self.metric: abs(score)})

    def evaluate(self, run, report):
        scored = partial(self.scores, run)
        exact = report.scores({part: scored(ids) for part, ids in self.store.split.items()})
        report.others(self, scored)
        if run.plan.predict:
            self.predict(run, report)
        return exact

    def predict(self, run, report):
        """Write --predict: predictions for all graphs of the store, also those without labels."""
        what = run.plan.predict_what if self.labels else "logits"
        self.several = not self.store.classes
        ids = torch.arange(len(self.store))
        outputs = self.outputs(run, ids)
        if self.store.classes and outputs.shape[1] == 1:  # the logit of the second of two classes
            outputs = torch.cat([torch.zeros_like(outputs), outputs], 1)
        table = {"graph": ids.numpy(), **self.columns(what, outputs)}
        report.write(lambda: self.predicted(what, outputs), iter([table]))

    def lines(self, args, split, parameters):
        yield f"graphs  {self.store.path}: {len(self.store):,} graphs; {split}"
        mean_sizes = self.sizes[self.store.split["train"]].double().mean(0)
        largest = [int(n) for n in self.sizes.amax(0)]
        yield (
            f"sizes   a graph has {mean_sizes[0]:,.3g} nodes and {mean_sizes[1]:,.3g} edges in the mean, "
            f"{largest[0]:,} and {largest[1]:,} at most"
        )
        layers = f" regressor, {plural(args.num_layers, 'layer')}, hidden {args.hidden}"
        layers = "" if self.made is OwnRegressor else layers
        yield f"model   {args.model}{layers}, {parameters}"


TASK = GraphTask


def built_in(flags):
    """Refuse --pooling of a network of a file."""
    if flags.conv is None:
        return f"is for {' and '.join(MODELS)}; {flags.model} pools as it likes"


def flags(kinds):
    """Declare the flags of --task graph."""
    limit = partial(kinds.fixed, kinds.COUNT, None)
    limits = dict(
        max_nodes=limit(
            "--task graph: as many graphs a pass as have N nodes at most (default: off)"
        ),
        max_edges=limit("--task graph: the same of edges; both may be given (default: off)"),
    )
    pooling = kinds.fixed(
        kinds.one_of(*POOLS),
        None,
        "--task graph: of nodes (default: sum; mean for targets if edges have vectors)",
        needs=[built_in],
    )
    return {"accumulate": limits, "dropout": {"pooling": pooling}}
