"""Classes of nodes: the loss, validation on sampled neighbourhoods, exact scores and predictions."""

import torch

from disk.counts import edge_line
from disk.files import StoreError
from loader import seeds_at
from model import EDGE_CONVS, GNN, cross_entropy
from sources.splits import choose_split
from store import GraphStore
from tasks.metrics import binary_cross_entropy, score


class NodeTask:
    """Learn the classes of the training nodes of a store. The other tasks have the same attributes and methods.

    Attributes:
        store: the open data, with split {part: numbers of its examples}.
        draw, load: those of `NodeLoader`. metric: --metric or its default.
        placed: the graph and its features are placed by --mode. timed_inference: exact inference of a node goes by the
            node's own time where there is one. sampled_for(args): nodes that are sampled for an example, at most.
    """

    examples, placed, timed_inference = "nodes", True, True
    widths = ("feature_dim", "num_classes", "edge_dim")  # what a network has to know of the data
    weights = "best"  # --weights by default, where there is a validation part
    prior = 0.07  # precision of a Gaussian prior of the weights: weight decay is prior / T for T training nodes
    draw = load = None
    static_steps = True  # a step can be a CUDA graph

    def __init__(self, args, path, say=print):
        self.store = store = open_graph(path, say)
        if not store.labelled and args.trains:
            raise StoreError(
                f"{path} has no labels to learn from: --resume FILE --predict FILE.npy predicts them, and --task "
                "link learns from edges"
            )
        choose_split(store, args.split, seed=args.seed, turn=args.turn, say=say)
        store.check_split()
        self.metric = args.metric or ("accuracy" if store.labels.dim() == 1 else "f1")
        self.title = self.metric.replace("_", " ")

    @staticmethod
    def network(args, widths, own=None):
        """The network of the flags, with initial weights, for data of these widths."""
        return own or gnn(args, widths, widths["num_classes"])

    def sampled_for(self, args):
        return 1

    def seeds(self):
        """The nodes that may be seeds."""
        return self.store.split["train"]

    def attach(self, ranks, args, used, indptr, indices):
        """Take the data where it was placed; used: its EdgeData."""
        self.times = used.seed_time
        if self.times is not None:
            self.draw = seeds_at(self.times)

    def prepare(self, network):
        """Give a new network what it has to know of the data."""

    def output(self, run, network, batch, key):
        """Logits [S, C] of a batch's seeds."""
        if isinstance(run.model, GNN):
            first_hop, edges = run.ring.first_hop, batch.edges or None
            return network(batch.blocks, batch.x, aggregated=first_hop, key=key, edges=edges)
        return output_of_own(run.args.model, self.store.num_classes, network, batch)

    def loss(self, network, output, y):
        """Summed over the seeds: cross-entropy of classes [S], or of 0 and 1 [S, C] averaged over C."""
        return cross_entropy(output, y) if y.dim() == 1 else binary_cross_entropy(output, y)

    def validate(self, run):
        """Figures of the validation part -> ({name: value}, the one that --early-stop goes by)."""
        nodes, found = self.store.split["valid"], None
        if nodes.numel():
            logits = run.sampled(nodes, None if self.times is None else self.times[nodes])
            found = score(self.metric, logits, self.store.labels[nodes])
        figures, features = {"valid_sampled": found}, run.ring.features
        if hasattr(features, "hit_rate"):
            figures["cache_hit_rate"] = features.hit_rate
        if hasattr(features, "counts"):
            figures.update(features.counts())
        return figures, found

    def finish(self, run, report):
        """Report exact scores, write predictions -> {part: score}."""
        args, store = run.args, self.store
        name = f"{'exact layer-wise' if run.by_layers else 'exact'} {self.title}"
        # on any rank: each saw what was free at its start
        if run.ranks.sum(store.features.large)[0] and not args.predict:
            report.tell(
                f"{name}  n/a: the features do not fit into memory; --predict computes it",
                {"exact": None},
            )
            return dict.fromkeys(store.split)
        logits = run.exact()
        exact = {
            part: score(self.metric, logits[nodes], store.labels[nodes])
            for part, nodes in store.split.items()
        }
        report.exact(name, exact)
        if args.predict:
            if args.predict_what == "embeddings":
                logits = run.exact(layers=args.num_layers - 1)
            report.write(predictions(args.predict_what, logits, store.labels.dim() == 2))
        return exact

    def lines(self, args, split, parameters):
        """What is trained, in lines."""
        graph, network, fanout = described(args, self.store)
        return (
            f"{graph}, {self.store.feature_dim} features, {self.store.num_classes} classes; {split}",
            f"model   {network}, {parameters}; {fanout}",
        )


def open_graph(path, say):
    """The store at a path; what stands out among its edges is said in a line."""
    store = GraphStore.open(path)
    if line := edge_line(store):
        say(f"graph   {line}")
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
    return GNN(
        widths["feature_dim"],
        args.hidden,
        out_dim,
        conv=args.model,
        num_layers=args.num_layers,
        heads=args.heads,
        dropout=args.dropout,
        input_dropout=args.input_dropout,
        norm=args.norm,
        residual=args.residual,
        recompute=args.checkpoint_activations,
        edge_dim=widths["edge_dim"] if args.model in EDGE_CONVS else 0,
    )


def output_of_own(name, width, network, batch):
    """What a user's network makes of a batch: float [S, width], or a sentence about what is wrong with it."""
    edges = {"edges": batch.edges} if batch.edges else {}
    try:
        output = network(batch.blocks, batch.x, **edges)
    except Exception as error:
        given = f"{len(batch.blocks)} blocks, one for each number of --fanout, and x {list(batch.x.shape)}"
        given += f", and for each block edges [E, {batch.edges[0].shape[1]}]" if edges else ""
        raise RuntimeError(f"{name} failed when it was called with {given}: {error}") from error
    needed, what = (batch.blocks[-1].num_dst, width), type(output).__name__
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() and output.shape == needed:
            return output
        what = f"{output.dtype} {list(output.shape)}"
    raise StoreError(
        f"the model returned {what} for {needed[0]} seeds: a row of {needed[1]} logits for each is needed"
    )


def predictions(what, logits, several):
    """What --predict writes: of logits [V, C] the classes [V] or their probabilities; of `several` labels a node 0 and
    1 and the probability of each [V, C]. Logits and embeddings stay as they are."""
    if what == "classes":
        return (logits > 0).to(torch.int8) if several else logits.argmax(1)
    if what == "scores":
        return logits.sigmoid() if several else logits.softmax(1)
    return logits
