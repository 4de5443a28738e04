"""python -m bench accuracy | labor: every model on real graphs, ten seeds each, beside published figures and an MLP;
GraphSAGE by the way neighbours are drawn."""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.contenders import training_log
from bench.sampler import LABORS, input_rows
from bench.tools import hardware, keep_figures, print_table, read_json
from model import CONVS
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore

# settings to choose from: (words of a bag of words, flags); row_normalize=0 leaves them 0 and 1
WORDS = [
    (words, f"--lr {lr} --weight-decay {decay} --dropout {p} --input-dropout {p}")
    for words in ("", ":row_normalize=0")
    for lr, decay in ((0.01, 5e-4), (0.03, 1e-4))
    for p in (0.5, 0.7)
]
LABELS = [("", "--lr 0.01 --dropout 0.3"), ("", "--lr 0.005 --dropout 0.5")]
FULL, TENS = "--fanout -1,-1 --batch-size", "--fanout 10,10 --batch-size"
# data set: (flags of every run, those of all neighbours where these fit, those of sampled ones, settings)
REAL = {
    "cora": ("--hidden 64 --epochs 200 --early-stop 50", f"{FULL} 140", f"{TENS} 64", WORDS),
    "citeseer": ("--hidden 64 --epochs 200 --early-stop 50", f"{FULL} 120", f"{TENS} 64", WORDS),
    "amazon_computers": (
        "--hidden 64 --epochs 300 --early-stop 50",
        f"{FULL} 200",
        f"{TENS} 200",
        WORDS,
    ),
    "coauthor_cs": ("--hidden 64 --epochs 40 --early-stop 10", f"{FULL} 100", f"{TENS} 100", WORDS),
    "ogbn_arxiv_nofeat": (
        "--hidden 128 --norm layer --lr-schedule cosine --epochs 15",
        None,
        "--fanout 10,10,10 --batch-size 1024",
        LABELS,
    ),
}
FOR_MODEL = {"gat": "--heads 8", "gin": "--norm layer"}
TRIAL_SEED, TRIAL_RUNS = 100, 2  # seeds, and so splits, that no row of the table uses
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


class Kept:
    """Figures by name: printed as they come, and written to --json, whose figures are kept."""

    def __init__(self, args, what):
        self.args, self.what = args, what
        self.figures = read_json(args.json).get(what, {}) if args.json else {}

    def add(self, key, figure):
        """Add a figure."""
        self.figures[key] = figure
        keep_figures(self.args, hardware(), {self.what: self.figures})
        print(f"{key}  {figure['test']:.2f} +- {figure['std']:.2f}", flush=True)

    def show(self, *columns):
        """Print these entries of all figures -> {what: figures}."""
        shown = {
            key: {column: figure.get(column) for column in columns}
            for key, figure in self.figures.items()
        }
        print_table(self.what, shown)
        return {self.what: self.figures}


def data_sets(args):
    """Names of the real graphs that are there, or --dataset."""
    there = [name for name in REAL if Path(args.data, f"{name}.npz").is_file()]
    return [args.dataset] if args.dataset in REAL else there


def bench_accuracy(args):
    """Train by train.py with seeds 0 .. --runs - 1: every model on all neighbours, two of them sampled too, and an MLP.

    A model is trained with those settings of its data set whose validation accuracy is highest over seeds of their own,
    on all neighbours where these are run. The MLP is GraphSAGE on the graph without edges. Amazon Computers is its
    largest connected component, as in the paper that published the figures (arXiv 1811.05868). --json FILE is written
    after each row, and keeps the rows it had.
    """
    kept = Kept(args, "accuracy")
    wanted = args.models.split(",") if args.models else ["mlp", *CONVS, "labels"]
    for name in data_sets(args):
        for conv in [conv for conv in ("mlp", *CONVS) if conv in wanted]:
            accuracy_of_model(args, kept, name, conv)
        if name == "ogbn_arxiv_nofeat" and "labels" in wanted:
            figure = label_propagation(args, Path(args.data, f"{name}.npz"))
            # published: from the labels of all training nodes
            kept.add(f"{name}, label propagation", figure | {"published": 68.3})
    return kept.show("test", "std", "n", "published", "published_std", "seconds")


def accuracy_of_model(args, kept, name, conv):
    """Choose the setting of a model on a data set and train with it, on all neighbours and on sampled ones."""
    flags, full, sampled, settings = REAL[name]
    run = partial(accuracy_of, args, name, edges=conv != "mlp")
    common = f"--model {conv.replace('mlp', 'sage')} {flags} {FOR_MODEL.get(conv, '')}"
    how = "no edges" if conv == "mlp" else "all neighbours" if full else "sampled"
    ways = {how: full or sampled} | ({"sampled": sampled} if conv in ("sage", "gcn") else {})
    trial = partial(run, f"{common} {full or sampled}", seed=TRIAL_SEED, runs=TRIAL_RUNS)
    valid = {setting: trial(*setting)["valid"] for setting in settings}
    best, (mean, std) = max(valid, key=valid.get), PUBLISHED.get((name, conv), (None, None))
    trials = {" ".join(setting).strip(): accuracy for setting, accuracy in valid.items()}
    for how, batches in ways.items():
        figure = run(f"{common} {batches}", *best, seed=0, runs=args.runs)
        figure |= {"trials": trials, "published": mean, "published_std": std}
        kept.add(f"{name}, {conv}, {how}", figure)


def bench_labor(args):
    """Test accuracy of GraphSAGE by the way neighbours are drawn, with --fanout, and the input rows of a batch.

    The flags of a data set are those of `python -m bench accuracy`, its first setting for all ways of drawing.
    """
    kept = Kept(args, "labor")
    for name in data_sets(args):
        flags, _, sampled, settings = REAL[name]
        hops, batch = ",".join(map(str, args.fanout)), int(sampled.split()[-1])
        common = f"--model sage {flags} --num-layers {len(args.fanout)} --fanout {hops}"
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(args.data, f"{name}.npz")
            store = GraphStore.open(prepare.prepare(file, scratch, progress=False))
            draw = partial(NeighborSampler, store.indptr, store.indices, args.fanout, check=False)
            read = input_rows(draw, store, batch)
        for drawn, options in LABORS.items():
            flags = f"{common} --batch-size {batch}"
            for option, value in options.items():
                flag = option.replace("_", "-").replace("method", "sampler")
                flags += f" --{flag}" if value is True else f" --{flag} {value}"
            runs = {"seed": 0, "runs": args.runs, "edges": True}
            figure = accuracy_of(args, name, flags, *settings[0], **runs)
            kept.add(f"{name}, {drawn}", figure | read[drawn])
    return kept.show("test", "std", "n", "rows", "rows_not_in_the_batch_before")


def label_propagation(args, file, alphas=(0.5, 0.6, 0.7, 0.8, 0.9), rounds=50):
    """What the labels that the models see as features give without a model (Correct and Smooth, arXiv 2010.13993).

    y <- alpha D^-1/2 A D^-1/2 y + (1 - alpha) y_0, clamped to 0 .. 1; alpha by validation accuracy.
    """
    tests = []
    for seed in range(args.runs):
        with tempfile.TemporaryDirectory() as scratch:
            graph = GraphStore.open(prepare.prepare(file, scratch, seed=seed, progress=False))
            known = graph.features.gather(torch.arange(graph.num_nodes))
            csr = graph.indptr, graph.indices.long(), torch.ones(graph.num_edges)
            matrix = torch.sparse_csr_tensor(*csr, (graph.num_nodes,) * 2)
            scale, scores = graph.indptr.diff().clamp(min=1).rsqrt().unsqueeze(1), []
            for alpha in alphas:
                y = known
                for _ in range(rounds):
                    y = (alpha * scale * (matrix @ (scale * y)) + (1 - alpha) * known).clamp_(0, 1)
                right = (y.argmax(1) == graph.labels).double()
                score = {part: right[nodes].mean().item() for part, nodes in graph.split.items()}
                scores.append((score["valid"], score["test"]))
            tests.append(100 * max(scores, key=lambda pair: pair[0])[1])
    return {"test": statistics.mean(tests), "std": statistics.stdev(tests), "n": args.runs}


def accuracy_of(args, name, flags, words, settings, *, seed, runs, edges):
    """Run train.py on a real graph -> its figures and flags."""
    flags = f"{flags} {settings} --seed {seed} --runs {runs}"
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, f"{name}.npz")
        largest = name == "amazon_computers"
        write_graph(Path(args.data, f"{name}.npz"), data, component=largest, edges=edges)
        figure = trained(f"{data}{words}", scratch, flags)
    return figure | {"flags": f"--dataset {name}.npz{words} {' '.join(flags.split())}", "n": runs}


def trained(dataset, root, flags):
    """Run train.py with --runs in this process -> test (mean, std) and valid in percent, seconds of all, norm, residual."""
    start = time.perf_counter()
    entries, _ = training_log(["--dataset", dataset, "--root", root, *flags.split()])
    chosen, last = entries[0]["flags"], entries[-1]
    return {
        "test": 100 * last["mean"]["test"],
        "std": 100 * last["std"]["test"],
        "valid": 100 * last["mean"]["valid"],
        "seconds": time.perf_counter() - start,
        "norm": chosen["norm"],
        "residual": chosen["residual"],
    }


def write_graph(source, target, *, component, edges):
    """Copy an .npz graph, cut down to its largest connected component or without its edges."""
    with np.load(source, allow_pickle=False) as file:
        data = dict(file)
    if component:
        src, dst = data["edge_index"]
        label = np.arange(len(data["labels"]))
        while (label[src] != label[dst]).any():  # every node takes the smallest number around it
            np.minimum.at(label, dst, label[src])
            np.minimum.at(label, src, label[dst])
            label = label[label]
        data = part_of(data, label == np.bincount(label).argmax())
    if not edges:
        data["edge_index"] = data["edge_index"][:, :0]
    np.savez(target, **data)


def part_of(data, keep, words=None):
    """The nodes of a mask [V] and the edges between them, and which of the most frequent `words` (all) they have."""
    number, edges, kept = np.cumsum(keep) - 1, data["edge_index"], int(keep.sum())
    part = {"edge_index": number[edges[:, keep[edges].all(0)]], "labels": data["labels"][keep]}
    if "feat_indptr" in data:
        lengths, width = np.diff(data["feat_indptr"]), int(data["feat_shape"][1])
        column = data["feat_indices"][np.repeat(keep, lengths)]
        row, often = np.repeat(np.arange(kept), lengths[keep]), np.zeros(width, bool)
        often[np.argsort(-np.bincount(column, minlength=width), kind="stable")[:words]] = True
        row, column = row[often[column]], (np.cumsum(often) - 1)[column[often[column]]]
        part["feat_indptr"] = np.searchsorted(row, np.arange(kept + 1))
        part |= {"feat_indices": column, "feat_shape": np.array([kept, often.sum()])}
    masks = {name: ids for name, ids in data.items() if name.endswith("_idx")}
    return part | {name: number[ids[keep[ids]]] for name, ids in masks.items()}
