"""The interface of a task (node, link or graph), with defaults that most of them share."""

import torch

from disk.columns import described_types
from disk.counts import edge_line
from disk.files import StoreError
from model import EDGE_CONVS, GNN, TYPE_CONVS, is_gnn
from store import GraphStore

OF_LINKS = "edge_split edge_type scorer negatives negatives_by unchecked_negatives link_loss pairs"


class Task:
    """What a run learns, made from the flags and the path of its data: `SomeTask(args, path, say=print)`.

    Attributes:
        name: of --task. examples: what they are called. title: of its exact scores.
        metrics: choices of --metric, the default first. metric: the one of this run.
        unused: {reason: flags without effect in this task, separated by spaces}. temporal: what --temporal auto stands for.
        weights: default of --weights where there is a validation part. prior: precision of a Gaussian prior of the
            weights; weight decay is prior / T for T training examples.
        widths: names of the data's widths, keys of its meta.json, that the network is built from.
        classes_agree: --residual may go by the classes of neighbours. static_steps: a step, with the cross-entropy of
            classes as its loss, can be a CUDA graph.
        embeds: outputs are embeddings, --hidden wide, also of a user's network.
        placed: --mode places graph and features. timed_inference: exact inference of a node goes by its own time.
        timed_pairs: examples have times of their own; else they are nodes, with those of `node_time`.
        store: the open data, with split {part: numbers of its examples}. draw, load: see `NodeLoader`.
    """

    title, metrics, unused, temporal, weights, prior = "scores", (), {}, "auto", "last", 0.0
    classes_agree = static_steps = timed_inference = timed_pairs = embeds = False
    placed, draw, load, metric = True, None, None, None

    @staticmethod
    def network(args, widths, own=None):
        """The network of the flags, or `own` of a user's file, with initial weights, for data of these widths (a dict)."""

    @classmethod
    def compared(cls, args):
        """The widths that have to be the same in the data of a checkpoint."""
        sees = {"edge_dim": EDGE_CONVS, "num_edge_types": TYPE_CONVS} if cls.placed else {}
        return [name for name in cls.widths if args.model in sees.get(name, [args.model])]

    def sampled_for(self, args):
        """Nodes that are sampled for an example, at most."""
        return 1

    def seeds(self):
        """The nodes that may be seeds."""
        return self.store.split["train"]

    def attach(self, ranks, args, used, indptr, indices):
        """Take the data where it was placed; used: its `EdgeData`."""

    def prepare(self, network):
        """Give a new network what it has to know of the data."""

    def output(self, run, network, batch, key):
        """Logits [S, C] of a batch's seeds, or embeddings [S, D]."""
        if is_gnn(run.model):
            first_hop, edges = run.ring.first_hop, batch.edges or None
            return network(batch.blocks, batch.x, aggregated=first_hop, key=key, edges=edges)
        return output_of_own(run.args.model, self.store.num_classes, network, batch)

    def loss(self, network, output, y):
        """Summed over the examples of a batch."""

    def validate(self, run):
        """Figures of the validation part -> ({name: value}, the one that --early-stop goes by: the larger the better).

        The epoch line prints `valid_sampled`, from 0 to 1, or `valid`, a dict; None without such a part.
        """

    def finish(self, run, report):
        """Report exact scores, write predictions -> {part: score}."""

    def score_text(self, score):
        """The validation score of the best epoch, in words."""
        return f"{self.metric} {score:.4f}"

    def lines(self, args, split, parameters):
        """What is trained, in lines."""


def open_graph(path, say):
    """Open the store at a path, and say what can be seen of its edges."""
    store = GraphStore.open(path)
    if line := edge_line(store):
        say(f"graph   {line}")
    if store.node_types:
        say(f"nodes   by type, in the order of their ids: {described_types(store.node_types)}")
    return store


def described(args, store):
    """The graph, the network and the fanout of a run, in words."""
    inner = f"layers, hidden {args.hidden}, norm {args.norm}{', residual' * bool(args.residual)}"
    return (
        f"graph   {store.path}: {store.num_nodes:,} nodes, {store.num_edges:,} edges",
        f"{args.model}, {args.num_layers} {'hops' if ':' in args.model else inner}",
        f"fanout {','.join(map(str, args.fanout))} from the seeds outward",
    )


def gnn(args, widths, out_dim):
    """The GNN of the flags."""
    same = "hidden num_layers heads dropout input_dropout norm residual".split()
    options = {name: getattr(args, name) for name in same}
    options |= {"conv": args.model, "recompute": args.checkpoint_activations}
    options["edge_dim"] = widths["edge_dim"] if args.model in EDGE_CONVS else 0
    if args.model in TYPE_CONVS:
        options |= {"num_types": widths["num_edge_types"], "bases": args.bases}
    options["node_types"] = [(count, width) for _, count, width in widths.get("node_types") or ()]
    return GNN(widths["feature_dim"], out_dim=out_dim, **options)


def output_of_own(name, width, network, batch):
    """What a user's network makes of a batch: float [S, width], or a sentence about what is wrong with it."""
    edges = {"edges": batch.edges} if batch.edges else {}
    try:
        output = network(batch.blocks, batch.x, **edges)
    except Exception as error:
        given = f"{len(batch.blocks)} blocks, one for each number of --fanout, and x {list(batch.x.shape)}"
        given += f", and for each block edges [E, {batch.edges[0].shape[1]}]" if edges else ""
        raise RuntimeError(f"{name} failed when it was called with {given}: {error}") from error
    S, what = batch.blocks[-1].num_dst, type(output).__name__
    if isinstance(output, torch.Tensor):
        what = f"{output.dtype} {list(output.shape)}"
        if output.is_floating_point() and output.shape == (S, width):
            return output
    wanted = f"a row of {width} logits for each is needed"
    raise StoreError(f"the model returned {what} for {S} seeds: {wanted}")
