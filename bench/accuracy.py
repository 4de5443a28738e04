"""python -m bench accuracy | labor: every model on real graphs, ten seeds each, beside published figures and an MLP;
GraphSAGE by the way neighbours are drawn."""

import itertools
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.sampler import LABORS
from bench.step import training_log
from bench.tools import hardware, keep_figures, print_table, read_json
from model import CONVS
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
SMALL, ARXIV = "--hidden 64 --epochs", "--hidden 128 --norm layer --lr-schedule cosine --epochs 15"
# data set: (flags of every run, those of all neighbours where these fit, those of sampled ones, settings)
REAL = {
    "cora": (f"{SMALL} 200 --early-stop 50", f"{FULL} 140", f"{TENS} 64", WORDS),
    "citeseer": (f"{SMALL} 200 --early-stop 50", f"{FULL} 120", f"{TENS} 64", WORDS),
    "amazon_computers": (f"{SMALL} 300 --early-stop 50", f"{FULL} 200", f"{TENS} 200", WORDS),
    "coauthor_cs": (f"{SMALL} 40 --early-stop 10", f"{FULL} 100", f"{TENS} 100", WORDS),
    "ogbn_arxiv_nofeat": (ARXIV, None, "--fanout 10,10,10 --batch-size 1024", LABELS),
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


def add(args, figures, key, figure):
    """Print a figure, add it to the others and write them to --json, whose own are kept."""
    figures[key] = figure
    keep_figures(args, hardware(), {args.what: figures})
    print(f"{key}  {figure['test']:.2f} +- {figure['std']:.2f}", flush=True)


def show(args, figures, columns):
    """Print entries of all figures -> {command: figures}."""
    names = columns.split()
    print_table(args.what, {key: {n: row.get(n) for n in names} for key, row in figures.items()})
    return {args.what: figures}


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
    figures = read_json(args.json).get("accuracy", {})
    models = args.models.split(",") if args.models else ["mlp", *CONVS, "labels"]
    for name, conv in itertools.product(data_sets(args), models):
        if conv == "labels":
            if name == "ogbn_arxiv_nofeat":
                # published: from the labels of all training nodes
                figure = label_propagation(args, Path(args.data, f"{name}.npz"))
                add(args, figures, f"{name}, label propagation", figure | {"published": 68.3})
            continue
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
            figure = run(f"{common} {batches}", *best, runs=args.runs)
            figure |= {"trials": trials, "published": mean, "published_std": std}
            add(args, figures, f"{name}, {conv}, {how}", figure)
    return show(args, figures, "test std n published published_std seconds")


def bench_labor(args):
    """Test accuracy of GraphSAGE by the way neighbours are drawn, with --fanout.

    The flags of a data set are those of `python -m bench accuracy`, its first setting for all ways of drawing.
    """
    figures, hops = read_json(args.json).get("labor", {}), ",".join(map(str, args.fanout))
    for name, (drawn, options) in itertools.product(data_sets(args), LABORS.items()):
        common, _, sampled, settings = REAL[name]
        flags = f"--model sage {common} --num-layers {len(args.fanout)} --fanout {hops}"
        flags += f" --batch-size {sampled.split()[-1]}"
        for option, value in options.items():
            flag = option.replace("_", "-").replace("method", "sampler")
            flags += f" --{flag}" + (f" {value}" if value is not True else "")
        figure = accuracy_of(args, name, flags, *settings[0], runs=args.runs)
        add(args, figures, f"{name}, {drawn}", figure)
    return show(args, figures, "test std n")


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


def accuracy_of(args, name, flags, words, settings, *, runs, seed=0, edges=True):
    """Run train.py on a real graph -> its figures and flags."""
    flags = f"{flags} {settings} --seed {seed} --runs {runs}"
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, f"{name}.npz")
        mask = largest_component if name == "amazon_computers" else None
        graph = real_graph(Path(args.data, data.name), mask)
        np.savez(data, **graph | ({} if edges else {"edge_index": graph["edge_index"][:, :0]}))
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


def largest_component(data):
    """A mask [V] of the nodes of the largest connected component."""
    src, dst = data["edge_index"]
    label = np.arange(len(data["labels"]))
    while (label[src] != label[dst]).any():  # every node takes the smallest number around it
        np.minimum.at(label, dst, label[src])
        np.minimum.at(label, src, label[dst])
        label = label[label]
    return label == np.bincount(label).argmax()


def real_graph(file, mask=None, words=None):
    """An .npz graph as a dict, cut down to the nodes of mask(graph) [V], the edges between them and the `words` (None: all)
    that most of them have."""
    with np.load(file, allow_pickle=False) as found:
        data = dict(found)
    if mask is None:
        return data
    keep = mask(data)
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
