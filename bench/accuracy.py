"""python -m bench accuracy | labor | types: train.py with several seeds, beside published figures.

Every row is trained with seeds 0 .. --runs - 1 on a graph in the folder --data. --json FILE is written after each row;
rows that it already has for the same number of seeds are not run again.
"""

import csv
import gzip
import itertools
import re
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from bench import tools
from bench.sampler import LABORS
from disk.files import StoreError
from run.kinds import plain_layers

# settings to choose from: (parameters of --dataset, flags); row_normalize=0 leaves bag-of-words features 0 and 1
WORDS = [
    (words, f"--lr {lr} --weight-decay {decay} --dropout {p} --input-dropout {p}")
    for words in ("", ":row_normalize=0")
    for lr, decay in ((0.01, 5e-4), (0.03, 1e-4))
    for p in (0.5, 0.7)
]
LABELS = [("", "--lr 0.01 --dropout 0.3"), ("", "--lr 0.005 --dropout 0.5")]
FULL = "--fanout -1,-1 --batch-size"
TENS = "--fanout 10,10 --batch-size"
SMALL = "--hidden 64 --epochs"
ARXIV = "--hidden 128 --norm layer --lr-schedule cosine --epochs 15"
# data set: (flags of every run, flags for all neighbours or None if too large, flags for sampled neighbours, settings)
REAL = {
    "cora": (f"{SMALL} 200 --early-stop 50", f"{FULL} 140", f"{TENS} 64", WORDS),
    "citeseer": (f"{SMALL} 200 --early-stop 50", f"{FULL} 120", f"{TENS} 64", WORDS),
    "amazon_computers": (f"{SMALL} 300 --early-stop 50", f"{FULL} 200", f"{TENS} 200", WORDS),
    "coauthor_cs": (f"{SMALL} 40 --early-stop 10", f"{FULL} 100", f"{TENS} 100", WORDS),
    "ogbn_arxiv_nofeat": (ARXIV, None, "--fanout 10,10,10 --batch-size 1024", LABELS),
}
FOR_MODEL = {"gat": "--heads 8", "gin": "--norm layer"}
TRIALS = "--seed 100 --runs 2"  # these seeds, and so these splits, are in no row of a table
# test accuracy in percent, and its standard deviation where there is one; sources in results/README.md
PUBLISHED = {
    ("cora", "gcn"): (81.5, None),
    ("cora", "gat"): (83.0, None),
    ("citeseer", "gcn"): (70.3, None),
    ("amazon_computers", "gcn"): (82.6, 2.4),
    ("amazon_computers", "sage"): (82.4, 1.8),
    ("coauthor_cs", "gcn"): (91.1, 0.5),
    ("coauthor_cs", "sage"): (91.3, 2.8),
}
# as in the paper: width 16, 50 epochs of one batch, no dropout; nothing was tuned on the test nodes
TYPES = "--epochs 50 --lr 0.01 --weight-decay 0 --batch-size 140 --weights last"
# name: (fanout, published accuracy in percent); the second row's is of DGL's minibatches
AIFB = {"all neighbours": ("-1,-1", 95.83), "20 of each type": ("20,20", 94.44)}


class Rows:
    """Rows of a command's table, read from and written to --json as they come."""

    def __init__(self, args):
        self.args = args
        self.rows = tools.read_json(args.json).get(args.what, {})

    def has(self, key):
        """Return whether a row of --runs seeds is there."""
        return self.rows.get(key, {}).get("n") == self.args.runs

    def add(self, key, graph, flags, words="", **columns):
        """Train with seeds 0 .. --runs - 1, unless that row is there, and add the row with further columns."""
        if self.has(key):
            return
        row = trained(graph, f"{flags} --seed 0 --runs {self.args.runs}", words)
        self.rows[key] = row | {"n": self.args.runs} | columns
        tools.write_figures(self.args, {self.args.what: self.rows})
        print(f"{key}  {row['test']:.2f} +- {row['std']:.2f}", flush=True)


def trained(graph, flags, words=""):
    """Run train.py on arrays; words: appended to --dataset -> {test, std, valid: percent; seconds; flags}."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        np.savez(f"{scratch}/graph.npz", **graph)
        line = f"--dataset {scratch}/graph.npz{words} --root {scratch} {flags}"
        last = tools.training_log(line.split())[0][-1]
    return {
        "test": 100 * last["mean"]["test"],
        "std": 100 * last["std"]["test"],
        "valid": 100 * last["mean"].get("valid", 0),
        "seconds": time.perf_counter() - start,
        "flags": " ".join([words, *flags.split()]).strip(),
    }


def largest_component(data):
    """Return a mask [V] of the nodes in the largest connected component."""
    src, dst = data["edge_index"]
    label = np.arange(len(data["labels"]))
    while (label[src] != label[dst]).any():  # every node takes the smallest label around it
        np.minimum.at(label, dst, label[src])
        np.minimum.at(label, src, label[dst])
        label = label[label]
    return label == np.bincount(label).argmax()


def read_triples(folder):
    """Read AIFB's N-Triples and the persons with their affiliation -> the arrays of an .npz file;
    the reverse of a relation is a relation of its own."""
    nodes = {}
    relations = {}
    classes = {}
    number = lambda ids, name: ids.setdefault(name, len(ids))  # noqa: E731
    with gzip.open(folder / "aifb.nt.gz", "rt") as file:
        lines = (line.strip().removesuffix(".").strip() for line in file)
        lines = [line.split(maxsplit=2) for line in lines if line]
    triples = [(number(nodes, s), number(relations, r), number(nodes, o)) for s, r, o in lines]
    source, relation, target = np.array(triples).T
    labels = np.full(len(nodes), -1)
    split = {}
    for part in ("train", "test"):
        with open(folder / f"aifb_{part}.tsv", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        split[f"{part}_idx"] = np.array([nodes[f"<{row['person']}>"] for row in rows])
        labels[split[f"{part}_idx"]] = [number(classes, row["label_affiliation"]) for row in rows]
    return {
        "edge_index": np.stack([[*source, *target], [*target, *source]]),
        "edge_type": np.concatenate([relation, relation + len(relations)]),
        "features": np.zeros((len(nodes), 1), np.float32),
        "labels": labels,
        **split,
    }


def real(args, name):
    """Load the arrays of a real graph. In Amazon Computers only the largest connected component has
    labels, to train and test on as in the paper of the published figures (arXiv 1811.05868)."""
    graph = dict(np.load(Path(args.data, f"{name}.npz"), allow_pickle=False))
    if name == "amazon_computers":
        graph["labels"] = np.where(largest_component(graph), graph["labels"], -1)
    return graph


def data_sets(args):
    """Return the names of the real graphs in --data, or --dataset alone; StoreError if there is none."""
    names = REAL if args.dataset == "all" else {args.dataset} & set(REAL)
    if not (present := [name for name in names if Path(args.data, f"{name}.npz").is_file()]):
        known = f"one of {', '.join(REAL)} that --data {args.data} has"
        raise StoreError(f"--dataset {args.dataset}: give {known}")
    return present


def accuracy(args, rows):
    """Train every model on all neighbours, two of them also on sampled ones, and an MLP: GraphSAGE without edges.

    A model gets the settings of its data set with the highest validation accuracy over seeds of their own, found on
    all neighbours where these fit.
    """
    models = args.models.split(",") if args.models else ["mlp", *plain_layers()]
    for name, conv in itertools.product(data_sets(args), models):
        flags, full, sampled, settings = REAL[name]
        if conv == "mlp":
            how = "no edges"
        else:
            how = "all neighbours" if full else "sampled"
        ways = {how: full or sampled}
        if conv in ("sage", "gcn"):
            ways["sampled"] = sampled
        keys = {f"{name}, {conv}, {how}": batches for how, batches in ways.items()}
        if all(map(rows.has, keys)):
            continue
        graph = real(args, name)
        trials = {}
        if conv == "mlp":
            graph["edge_index"] = graph["edge_index"][:, :0]
        flags = f"--model {conv.replace('mlp', 'sage')} {flags} {FOR_MODEL.get(conv, '')}"
        for words, setting in settings:
            figures = trained(graph, f"{flags} {full or sampled} {setting} {TRIALS}", words)
            trials[f"{words} {setting}".strip()] = figures["valid"]
        words, setting = max(settings, key=lambda pair: trials[" ".join(pair).strip()])
        mean, std = PUBLISHED.get((name, conv), (None, None))
        columns = {"published": mean, "published_std": std, "trials": trials}
        for key, batches in keys.items():
            rows.add(key, graph, f"{flags} {batches} {setting}", words, **columns)


def labor(args, rows):
    """Train GraphSAGE with each way to draw neighbours and --fanout, in the first setting of each data set."""
    hops = f"--num-layers {len(args.fanout)} --fanout {','.join(map(str, args.fanout))}"
    for name, (drawn, options) in itertools.product(data_sets(args), LABORS.items()):
        common, _, sampled, [(words, setting), *_] = REAL[name]
        flags = f"--model sage {common} {hops} --batch-size {sampled.split()[-1]} {setting}"
        for option, value in options.items():
            flag = option.replace("_", "-").replace("method", "sampler")
            flags += f" --{flag}"
            if value is not True:
                flags += f" {value}"
        rows.add(f"{name}, {drawn}", real(args, name), flags, words)


def types(args, rows):
    """Train the R-GCN for nodes without features of docs/types.md on AIFB (arXiv 1703.06103)."""
    graph = read_triples(Path(args.data))
    page = (Path(__file__).parents[1] / "docs/types.md").read_text()
    code = re.search(r"```python\n(# mykg.py\n.*?)```", page, re.DOTALL)[1]
    sizes = f"num_nodes={len(graph['labels'])},num_types={graph['edge_type'].max() + 1}"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "mykg.py")
        file.write_text(code)
        for name, (fanout, published) in AIFB.items():
            flags = f"{TYPES} --model {file}:Net --model-args {sizes} --fanout {fanout}"
            rows.add(name, graph, flags, published=published)


def run(args, experiment):
    """Run an experiment, print its table -> {command: its rows}."""
    rows = Rows(args)
    experiment(args, rows)
    columns = ("test", "std", "n", "published", "published_std", "seconds")
    shown = {key: {c: row[c] for c in columns if c in row} for key, row in rows.rows.items()}
    tools.print_table(args.what, shown)
    return {args.what: rows.rows}


bench_accuracy = partial(run, experiment=accuracy)
bench_labor = partial(run, experiment=labor)
bench_types = partial(run, experiment=types)
