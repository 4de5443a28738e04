"""The interface of a task (node, link or graph), with defaults that most of them share."""

from itertools import islice

import numpy as np
import torch

from disk.checks import edge_line
from disk.columns import NAMES, described_types
from disk.files import SPLITS, StoreError, plural
from extras import extra
from model import GNN, is_gnn
from store import GraphStore

CHUNK = 1 << 22  # numbers of a table of predictions converted at a time


class Task:
    """What a run learns: its data, network, loss and scores. Made as `SomeTask(args, path, say=print)`.

    Attributes:
        name: value of --task. examples: plural noun for messages. title: noun for the final scores.
        metrics: choices of --metric, the default first. metric: the one of this run, one of `metrics` or None: it is
            saved in checkpoints.
        models: names that --model takes, described for --help by about_models; None: those of layers, and files. unused: {reason:
            flags without effect in this task, separated by spaces}.
        weights: default of --weights if there is a validation part. prior: precision of a Gaussian prior of the
            weights; weight decay is prior / T for T training examples. least_steps: optimizer steps that the
            default --epochs makes, unless these are more than 200 epochs.
        widths: keys of the data's meta.json that the network is built from.
        classes_agree: the default of --residual may depend on how often neighbours share a class.
        placed: --mode places graph and features; else the task reads batches, see extras/graphs.py, and has `unsupported`,
            `blank`, `completed` and `pad` for CUDA graphs of them.
        are_links: examples are pairs of nodes: outputs, of any network, are embeddings of width --hidden, each example has
            a time of its own, and `draw` leaves edges out of a step. Else they are nodes, with the times `node_time`, or graphs.
        padded: `loss` skips rows of y that are -1: a step can be CUDA graphs.
        several: whether a node has several labels; None where that is no question.
        told_by: how the names of the files begin that number the examples. trained: `keys` of the examples that a
            checkpoint that is only used was trained on, int64 [n]; None: unknown, as for pairs.
        store: the open data, with split {part: ids of its examples}. draw, load_batch, limits: see `NodeLoader`.

    Each task also has:
        network(args, widths, custom=None): static, as a checkpoint is read without data: the network that the flags describe,
            or `custom` of a user's file; widths: dict, of the data, such as `feature_dim` and `num_classes`.
        attach(ranks, args, used, indptr, indices): take the graph where --mode has placed it; used: `Used` of run/placement.py.
        loss(network, output, y): the loss, summed over the examples of a batch; y: store.labels[seeds], or what `draw` or
            `load_batch` gave. In a CUDA graph (`padded`) rows of -1 fill y up, and rows of padding the output: they have
            no part in it.
        validate(run): evaluate the validation part -> ({name: value}, the score for --early-stop, larger is better, or
            None). The epoch line prints `valid_sampled`, from 0 to 1, or `valid`, a dict; None without a validation part.
        score_text(score): format the validation score of the best epoch, where `weights` may be "best".
        evaluate(run, report): report exact scores and write predictions -> {part: score}.
        lines(args, split, parameters): yield lines that describe data, model and sampling.
        visible_labels(): with `classes_agree`, ids of the nodes whose labels the architecture may depend on.
    """

    title = "scores"
    metrics = ()
    metric = None
    padded = False
    several = None
    models = None
    unused = {}
    weights = "last"
    prior = 0.0
    least_steps = 200
    classes_agree = False
    placed = True
    are_links = False
    trained = None
    draw = None
    load_batch = None
    limits = None

    @classmethod
    def opened(cls, args, path, say=print):
        """Return the task of these arguments, of the subclass that the data ask for."""
        return cls(args, path, say)

    def build(self, args, custom=None):
        """Return the `network` for the open data."""
        names = "num_classes", "targets", "edge_dim", "num_edge_types"
        sizes = {name: getattr(self.store, name, 0) for name in names}
        return self.network(args, self.store.meta | sizes, custom)

    def own_widths(self, edges):
        """Return widths of features, outputs and features of edges (0 unless these are used) for a network of a file."""
        store = self.store
        return store.feature_dim, store.num_classes, store.edge_dim if edges else 0

    @classmethod
    def compared(cls, args):
        """List the names of `widths` that must be the same in the data of a checkpoint."""
        if not cls.placed:
            return cls.widths
        conv = args.layer
        seen = {"edge_dim": conv.sees_edges(args.edge_features), "num_edge_types": conv.uses_types}
        return [name for name in cls.widths if seen.get(name, True)]

    @staticmethod
    def defaults(flags):
        """Return {flag: value} that replaces the default of a flag in this task."""
        return {}

    def settled(self, flags):
        """Return {flag: value} of open flags whose defaults depend on the data of this task."""
        return {}

    def seeds_per_example(self, args):
        """Return how many seed nodes an example has, at most."""
        return 1

    def seeds(self):
        """Return the ids of all nodes that may be seeds."""
        return self.store.split["train"]

    def keys(self, ids):
        """Return what identifies examples, int64 of the shape of ids."""
        return ids

    def fresh(self):
        """Return {part: bool [n], which of its examples the checkpoint was not trained on} of the held-out parts of which it
        was trained on some."""
        if self.trained is None:
            return {}
        parts = [self.store.split[part] for part in SPLITS[1:]]
        fresh = ~torch.isin(self.keys(torch.cat(parts)), self.trained)
        masks = zip(SPLITS[1:], fresh.split([*map(len, parts)]))
        return {part: mask for part, mask in masks if not mask.all()}

    def num_scored(self):
        """Return how many validation examples the metric is computed from."""
        return len(self.store.split["valid"])

    def set_buffers(self, network):
        """Set buffers of a new network that depend on the data."""

    def predicted(self, what, outputs):
        """Turn outputs into what --predict-what names: logits or embeddings as they are, scores [n, C], classes [n] or,
        of several labels, int8 [n, C]."""
        if what == "classes":
            return (outputs > 0).to(torch.int8) if self.several else outputs.argmax(1)
        if what == "scores":
            return outputs.sigmoid() if self.several else outputs.softmax(1)
        return outputs

    def columns(self, what, outputs):
        """Return the columns of a table of predictions, {name: [n]}: `class` and `score`, its probability, or a column
        for each class or label; of embeddings e0, e1, ..."""
        rows = self.predicted(what, outputs)
        if what == "embeddings":
            return numbered_columns(rows)
        count = outputs.shape[1]
        names = (self.store.class_names or [])[:count]
        names += map(str, range(len(names), count))
        if rows.dim() == 1:
            score = outputs.softmax(1).gather(1, rows.unsqueeze(1)).squeeze(1)
            classes = rows.numpy()
            if self.store.class_names:
                classes = np.array(names)[classes]
            return {"class": classes, "score": score.numpy()}
        # beside the column of nodes or graphs
        names = [f"class {name}" if name in ("node", "type", "graph") else name for name in names]
        return {name: rows[:, j].numpy() for j, name in enumerate(names)}

    def output(self, run, network, batch, key):
        """Run the network on a batch -> logits [S, C] of the seeds, or embeddings [S, D]."""
        if is_gnn(run.model):
            return network(
                batch.blocks,
                batch.x,
                key=key,
                aggregated=run.ring.first_hop,
                edges=batch.edges or None,
            )
        # of another function, `embeddings`, any width
        width = self.store.num_classes if isinstance(network, torch.nn.Module) else None
        return output_of_own(width, network, batch)


def open_graph(args, path, say):
    """Open the store at a path; print its size and counts of its edges and types, once for all --runs."""
    store = GraphStore.open(path)
    if args.turn and not args.verbose:
        return store
    say(f"graph   {path}: {store.num_nodes:,} nodes, {edge_line(store)}")
    if store.node_types:
        say(f"nodes   by type, in the order of their ids: {described_types(store.node_types)}")
    return store


def described(args, store):
    """Describe features, network and fanout of a run -> three strings."""
    features = f"{store.feature_dim:,} features" if store.has_features else "no features"
    if args.conv is None:
        shape = plural(args.num_layers, "hop")
    else:
        shape = f"{plural(args.num_layers, 'layer')}, hidden {args.hidden}"
        if args.norm != "none":
            shape += f", norm {args.norm}"
        if args.residual:
            shape += ", residual"
    fanout = (
        f"fanout {','.join(map(str, args.fanout))}: neighbours of a node, from the seeds outward"
    )
    return features, f"{args.model}, {shape}", fanout


def as_stored(store, names):
    """Convert names of nodes of a store, a list of text, to an array, int64 if they were integers."""
    return np.array(names, store.meta["files"][NAMES]["dtype"])


def rows_of_nodes(store, outputs, columns):
    """Yield a table of all nodes in chunks, {column: values}: `node`, its name or, without names, its number, within its
    `type` if nodes have types; and what columns(rows of the outputs [V, n]) returns."""
    names = store.each_name()
    for nodes in torch.arange(len(outputs)).split(max(1, CHUNK // outputs.shape[1])):
        some = names and as_stored(store, [*islice(names, len(nodes))])
        table = node_columns(store, "type", "node", nodes.numpy(), some)
        yield {**table, **columns(outputs[nodes])}


def node_columns(store, type, name, nodes, names):
    """Return columns of a table that say which nodes [n] are meant, {type: [n], name: [n]}: their types, if nodes have any,
    and their names or, if these are None, numbers within the types."""
    table = {}
    if store.node_types:
        starts = np.cumsum([0, *(count for count, _ in store.node_types.values())])
        kind = np.searchsorted(starts, nodes, side="right") - 1
        table[type] = np.array([*store.node_types])[kind]
        nodes = nodes - starts[kind]
    return {**table, name: nodes if names is None else names}


def numbered_columns(rows):
    """Return the columns of embeddings [n, D] -> {"e0": [n], "e1": ...}."""
    return {f"e{j}": rows[:, j].numpy() for j in range(rows.shape[1])}


def gnn(args, widths, out_dim, target_scale=None):
    """Build the GNN that the flags describe. target_scale: as for `GNN`."""
    conv = args.conv
    options = {}
    for name in "hidden num_layers heads dropout input_dropout norm residual".split():
        options[name] = getattr(args, name)
    if conv.uses_types:
        options["num_types"] = widths["num_edge_types"]
        options["bases"] = args.bases
    inputs = None
    if widths.get("node_types"):
        sizes = [sizes for _, *sizes in widths["node_types"]]
        inputs = extra(".relational", "a graph with types of nodes").NodeInputs(sizes, args.hidden)
    return GNN(
        widths["feature_dim"],
        out_dim=out_dim,
        conv=conv,
        recompute=args.checkpoint_activations,
        edge_dim=widths["edge_dim"] if conv.sees_edges(args.edge_features) else 0,
        inputs=inputs,
        target_scale=target_scale,
        **options,
    )


def output_of_own(width, network, batch):
    """Run a user's network, or its method `embeddings`, on a batch -> float [S, width], of any width if that is None; StoreError
    for other output, and if it fails with another number of blocks than its lists of layers have."""
    edges = {"edges": batch.edges} if batch.edges else {}
    try:
        output = network(batch.blocks, batch.x, **edges)
    except (ValueError, LookupError) as error:
        module = getattr(network, "__self__", network)
        lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList)]
        layers, *others = {*map(len, lists)} or [0]
        if others or layers in (0, len(batch.blocks)):
            raise
        raise StoreError(
            f"--fanout has {plural(len(batch.blocks), 'number')}, and the model fails with as many blocks ({error}), but "
            f"has lists of {layers}: give a number for each of its layers, such as --fanout {','.join(['10'] * layers)}"
        ) from error
    S = batch.blocks[-1].num_dst
    actual = type(output).__name__
    if isinstance(output, torch.Tensor):
        actual = f"{output.dtype} {list(output.shape)}"
        wanted = S, width or output.shape[-1]
        if output.is_floating_point() and output.shape == wanted:
            return output
    raise StoreError(
        f"the model returned {actual} for {S} seeds: a row of {f'{width} logits' if width else 'numbers'} for each is needed"
    )
