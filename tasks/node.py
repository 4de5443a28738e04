"""Node classification: loss, validation on sampled neighbourhoods, exact scores and predictions."""

import hashlib
from functools import partial
from itertools import compress

import torch

from disk.files import StoreError, read_meta
from extras import extra
from sources.splits import choose_split, split_of
from tasks.metrics import ERRORS, METRICS, binary_cross_entropy, cross_entropy, metrics_with, score
from tasks.task import Task, described, gnn, open_graph, rows_of_nodes


def hash_of(name):
    """Hash a name to 64 bits, as an int64."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class NodeTask(Task):
    """Node classification, with one or several labels per node."""

    name = "node"
    examples = "nodes"
    metrics = *metrics_with("from_logits"), *ERRORS
    weights = "best"
    prior = 0.07
    least_steps = 600
    widths = "feature_dim", "num_classes", "targets", "edge_dim", "num_edge_types", "node_types"
    answers = "classes"
    told_by = "features."
    classes_agree = True
    padded = True
    class_weight = None  # [C], of --class-weights

    def __init__(self, args, path, say=print):
        self.store = store = open_graph(args, path, say)
        if not store.labelled and args.trains:
            raise StoreError(
                f"{path} has no labels to learn from: "
                "--resume FILE --predict FILE.npy predicts them, --task link needs none"
            )
        if args.trains and not len(store.split["train"]):
            raise StoreError(
                f"{path} has no split, and "
                "none is drawn for several labels a node: build it with one, or use --task link"
            )
        # a checkpoint's --split is of the graph it was trained on, perhaps another
        idle = not args.trains and store.num_splits == 1 and "split" not in args.typed
        self.number = None if idle else args.split
        choose_split(store, self.number, seed=args.seed, turn=args.turn, say=say)
        store.check_split()
        self.read_labels(args, path, say)

    @classmethod
    def opened(cls, args, path, say=print):
        numbers = args.metric in ERRORS or not args.metric and read_meta(path).get("targets")
        kind = extra(".regression", f"regression on {path}").NodeNumbers if numbers else cls
        return kind(args, path, say)

    def read_labels(self, args, path, say):
        """Choose the metric; StoreError for flags that do not fit the labels."""
        store = self.store
        if store.targets:
            raise StoreError(f"--metric {args.metric} is of classes, and {path} has targets")
        if "loss" in args.typed:
            raise StoreError(f"--loss {args.loss} is of targets, and {path} has classes")
        # multi-label; a graph without labels has as many as that of the checkpoint
        self.several = store.labels.dim() == 2
        classes = store.labels[store.split["train"]].unique()
        if args.trains and not self.several and len(classes) == 1:
            say("split   all training nodes are of one class: there is nothing to learn")
        if self.several and args.class_weights != "none":
            raise StoreError(
                f"--class-weights {args.class_weights}: the nodes of {path} have several labels; leave it out"
            )
        self.metric = args.metric or ("f1" if self.several else "accuracy")
        self.title = METRICS[self.metric].title
        valid = store.labels[store.split["valid"]]
        if self.metric == "roc_auc" and args.trains and len(valid):
            logits = torch.zeros(len(valid), store.num_classes)
            if score(self.metric, logits, valid) is None:
                raise StoreError(
                    f"--metric {self.metric}: the validation nodes of {path} are of one class"
                )

    def keys(self, ids):
        """Return the ids or, of nodes with names, hashes of these."""
        names = self.store.each_name()
        if names is None:
            return ids
        wanted = torch.zeros(self.store.num_nodes, dtype=torch.bool)
        wanted[ids] = True
        keys = torch.zeros(len(wanted), dtype=torch.int64)
        hashes = [hash_of(name) for name in compress(names, wanted.tolist())]
        keys[wanted] = torch.tensor(hashes, dtype=torch.int64)
        return keys[ids]

    def visible_labels(self):
        """Return the ids of the nodes whose labels the architecture may depend on: training and validation nodes of one
        split, whatever split a seed takes, so that all --runs train the same network."""
        split = split_of(self.store, self.number or 0)
        self.store.check_split(split)
        return torch.cat([split["train"], split["valid"]])

    @staticmethod
    def network(args, widths, custom=None):
        T = widths.get("targets")
        scale = extra(".regression", "a network of targets").Scale(T) if T else None
        if custom is None:
            return gnn(args, widths, widths["num_classes"], scale)
        if scale:
            custom.add_module("target_scale", scale)
        return custom

    def attach(self, ranks, args, used, indptr, indices):
        if args.class_weights == "balanced":
            self.class_weight = self.balanced(ranks.say).to(ranks.device)
        self.times = used.times
        self.draw = None if self.times is None else extra(".times").seeds_at(self.times)

    def balanced(self, say):
        """Compute the weight of each class -> float32 [C]: training nodes / (classes that these have x training nodes of the
        class), as scikit-learn's "balanced"."""
        store = self.store
        counts = store.labels[store.split["train"]].bincount(minlength=store.num_classes)
        present = counts[counts > 0]
        weights = counts.sum() / (len(present) * counts.clamp(min=1))
        low, high = weights[counts > 0].aminmax()
        say(
            f"loss    a node weighs {low:.3g} to {high:.3g}, by its class (--class-weights balanced)"
        )
        return weights.float()

    def loss(self, network, output, y):
        """Sum over the seeds of the cross-entropy: of classes [S], weighted by --class-weights, or of 0 and 1 [S, C] averaged
        over C."""
        if y.dim() > 1:
            return binary_cross_entropy(output, y)
        return cross_entropy(output, y, self.class_weight)

    def validate(self, run):
        nodes = self.store.split["valid"]
        result = None
        if nodes.numel():
            times = None if self.times is None else self.times[nodes]
            logits = run.sampled(nodes, times)
            result = self.scored(run, logits, self.store.labels[nodes])
        return {"valid_sampled": result, **run.ring.counts()}, result

    def evaluate(self, run, report):
        args = run.plan
        store = self.store
        # true if it is on any rank: each compared with the memory free at its own start
        if run.ranks.sum(store.large)[0] and not (args.predict or args.report):
            report.tell(
                f"result  {self.title} n/a: the features do not fit into memory; --predict computes it",
                {"exact": None},
            )
            return dict.fromkeys(store.split)
        logits = run.exact()
        scored = lambda nodes: self.scored(run, logits[nodes], store.labels[nodes])  # noqa: E731
        exact = {part: scored(nodes) for part, nodes in store.split.items()}
        how = "exact: all neighbours" + ", layer by layer" * run.by_layers
        exact = self.say_exact(report, exact, how)
        report.others(self, scored)
        if args.report and run.ranks.leads:
            extra(".class_report").write(store, args.report, logits)
        if args.predict:
            what = args.predict_what
            if what == "embeddings":
                logits = run.exact(layers=args.num_layers - 1)
            table = rows_of_nodes(store, logits, partial(self.columns, what))
            report.write(lambda: self.predicted(what, logits), table)
        return exact

    def scored(self, run, logits, y):
        """Compute the metric of logits [n, C] for labels y."""
        return score(self.metric, logits, y)

    def say_exact(self, report, exact, how):
        """Report the exact score of each part, {part: score}, computed as `how` says -> {name: score} of --runs."""
        report.exact(self.title, exact, how)
        return exact

    def score_text(self, score):
        return f"{self.title} {100 * score:.2f}% (sampled)"

    def lines(self, args, split, parameters):
        features, network, fanout = described(args, self.store)
        yield f"data    {features}, {self.store.num_classes} {self.answers}; {split}"
        yield f"model   {network}, {parameters}; {fanout}"
