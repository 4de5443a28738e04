"""python bench.py accuracy: every model on real graphs, ten seeds each, beside published figures and an MLP."""

import contextlib
import functools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import datasets
import train
from bench_sampler import rows
from bench_tools import hardware, keep_figures, print_table
from disk import StoreError
from model import CONVS
from sampler import NeighborSampler
from store import GraphStore

WORDS = [  # settings to choose from: (words of a bag of words, flags); row_normalize=0 leaves them 0 and 1
    (words, f"--lr {lr} --weight-decay {decay} --dropout {p} --input-dropout {p}")
    for words in ("", ":row_normalize=0") for lr, decay in ((0.01, 5e-4), (0.03, 1e-4)) for p in (0.5, 0.7)
]  # fmt: skip
LABELS = [("", "--lr 0.01 --dropout 0.3"), ("", "--lr 0.005 --dropout 0.5")]
REAL = {  # data set: (flags of every run, those of all neighbours where these fit, those of sampled ones, settings)
    "cora": ("--hidden 64 --epochs 200 --early-stop 50",
             "--fanout -1,-1 --batch-size 140", "--fanout 10,10 --batch-size 64", WORDS),
    "citeseer": ("--hidden 64 --epochs 200 --early-stop 50",
                 "--fanout -1,-1 --batch-size 120", "--fanout 10,10 --batch-size 64", WORDS),
    "amazon_computers": ("--hidden 64 --epochs 300 --early-stop 50",
                         "--fanout -1,-1 --batch-size 200", "--fanout 10,10 --batch-size 200", WORDS),
    "coauthor_cs": ("--hidden 64 --epochs 40 --early-stop 10",
                    "--fanout -1,-1 --batch-size 100", "--fanout 10,10 --batch-size 100", WORDS),
    "ogbn_arxiv_nofeat": ("--hidden 128 --norm layer --lr-schedule cosine --epochs 15",
                          None, "--fanout 10,10,10 --batch-size 1024", LABELS),
}  # fmt: skip
FOR_MODEL = {"gat": "--heads 8", "gin": "--norm layer"}
TRIAL_SEED, TRIAL_RUNS = 100, 2  # seeds, and so splits, that no row of the table uses
PUBLISHED = {  # test accuracy in percent, and its standard deviation where there is one; sources in results/README.md
    ("cora", "gcn"): (81.5, None), ("cora", "gat"): (83.0, None), ("citeseer", "gcn"): (70.3, None),
    ("amazon_computers", "gcn"): (82.6, 2.4), ("amazon_computers", "sage"): (82.4, 1.8),
    ("coauthor_cs", "gcn"): (91.1, 0.5), ("coauthor_cs", "sage"): (91.3, 2.8),
}  # fmt: skip


def bench_accuracy(args):
    """Train by train.py with seeds 0 .. --runs - 1: every model on all neighbours, two of them sampled too, and an MLP.

    A model is trained with those settings of its data set whose validation accuracy is highest over seeds of their own,
    on all neighbours where these are run. The MLP is GraphSAGE on the graph without edges. Amazon Computers is its
    largest connected component, as in the paper that published the figures (arXiv 1811.05868). --json FILE is written
    after each row, and keeps the rows it had.
    """
    names = [args.dataset] if args.dataset in REAL else [n for n in REAL if Path(args.data, f"{n}.npz").is_file()]
    kept = json.loads(Path(args.json).read_text())["accuracy"] if args.json and Path(args.json).exists() else {}
    wanted, rows = (args.models or ",".join(["mlp", *CONVS, "labels"])).split(","), []

    def keep(figure, name, model, how, published, seconds="-"):
        kept[f"{name}, {model}, {how}".removesuffix(", -")] = figure
        keep_figures(args, hardware(), {"accuracy": kept})
        rows.append([name, model, how, f"{figure['test']:.2f} +- {figure['std']:.2f}", published, seconds])
        print("  ".join(rows[-1]), flush=True)

    for name in names:
        flags, full, sampled, settings = REAL[name]
        for conv in [conv for conv in ("mlp", *CONVS) if conv in wanted]:
            run = functools.partial(accuracy_of, args, name, edges=conv != "mlp")
            common = f"--model {conv.replace('mlp', 'sage')} {flags} {FOR_MODEL.get(conv, '')}"
            ways = {"no edges" if conv == "mlp" else "all neighbours" if full else "sampled": full or sampled}
            if conv in ("sage", "gcn"):
                ways["sampled"] = sampled
            trial = functools.partial(run, f"{common} {full or sampled}", seed=TRIAL_SEED, runs=TRIAL_RUNS)
            valid = {setting: trial(*setting)["valid"] for setting in settings}
            best = max(valid, key=valid.get)
            mean, std = PUBLISHED.get((name, conv), (None, None))
            for how, batches in ways.items():
                figure = run(f"{common} {batches}", *best, seed=0, runs=args.runs)
                figure["trials"] = {" ".join(setting).strip(): accuracy for setting, accuracy in valid.items()}
                figure |= {"published": mean, "published_std": std}
                keep(figure, name, conv, how, f"{mean or '-'}{f' +- {std}' if std else ''}", f"{figure['seconds']:.0f}")
        if name == "ogbn_arxiv_nofeat" and "labels" in wanted:
            figure = label_propagation(args, Path(args.data, f"{name}.npz"))
            keep(figure, name, "label propagation", "-", "68.3 (all labels)")
    print_table(rows, ["data set", "model", "training", f"test %, n = {args.runs}", "published", "seconds"])
    return {"accuracy": kept}


DRAWN = {  # by way of drawing: flags of train.py
    "uniform": "", "LABOR": "--sampler labor", "LABOR, layer": "--sampler labor --layer-dependency",
    "LABOR, batch 4": "--sampler labor --batch-dependency 4",
    "LABOR, layer, batch 4": "--sampler labor --layer-dependency --batch-dependency 4",
}  # fmt: skip


def bench_labor(args):
    """Test accuracy of GraphSAGE by the way neighbours are drawn, with --fanout, and the input rows of a batch.

    The flags of a data set are those of `bench.py accuracy`, its first setting for all ways of drawing.
    """
    names = [args.dataset] if args.dataset in REAL else [n for n in REAL if Path(args.data, f"{n}.npz").is_file()]
    kept = json.loads(Path(args.json).read_text())["labor"] if args.json and Path(args.json).exists() else {}
    table = []
    for name in names:
        flags, _, sampled, settings = REAL[name]
        hops = ",".join(map(str, args.fanout))
        batch = int(sampled.split("--batch-size ")[1])
        with tempfile.TemporaryDirectory() as scratch:
            store = GraphStore.open(datasets.prepare(Path(args.data, f"{name}.npz"), scratch, progress=False))
            read = rows(
                functools.partial(NeighborSampler, store.indptr, store.indices, args.fanout, check=False), store, batch
            )
        for drawn, words in DRAWN.items():
            said = f"--model sage {flags} --num-layers {len(args.fanout)} --fanout {hops} --batch-size {batch} {words}"
            figure = accuracy_of(args, name, said, *settings[0], seed=0, runs=args.runs, edges=True) | read[drawn]
            kept[f"{name}, {drawn}"] = figure
            keep_figures(args, hardware(), {"labor": kept})
            table.append([name, drawn, f"{figure['test']:.2f} +- {figure['std']:.2f}", f"{figure['rows']:.0f}",
                          f"{figure['rows_not_in_the_batch_before']:.0f}"])  # fmt: skip
            print("  ".join(table[-1]), flush=True)
    print_table(table, ["data set", "drawing", f"test %, n = {args.runs}", "input rows", "not in the batch before"])
    return {"labor": kept}


def label_propagation(args, file, alphas=(0.5, 0.6, 0.7, 0.8, 0.9), rounds=50):
    """What the labels that the models see as features give without a model (Correct and Smooth, arXiv 2010.13993).

    y <- alpha D^-1/2 A D^-1/2 y + (1 - alpha) y_0, clamped to 0 .. 1; alpha by validation accuracy.
    """
    tests = []
    for seed in range(args.runs):
        with tempfile.TemporaryDirectory() as scratch:
            graph = GraphStore.open(datasets.prepare(file, scratch, seed=seed, progress=False))
            known, ones = graph.features.gather(torch.arange(graph.num_nodes)), torch.ones(graph.num_edges)
            matrix = torch.sparse_csr_tensor(graph.indptr, graph.indices.long(), ones, (graph.num_nodes,) * 2)
            scale, accuracy = graph.indptr.diff().clamp(min=1).rsqrt().unsqueeze(1), {}
            for alpha in alphas:
                y = known
                for _ in range(rounds):
                    y = (alpha * scale * (matrix @ (scale * y)) + (1 - alpha) * known).clamp_(0, 1)
                right = y.argmax(1) == graph.labels
                accuracy[alpha] = [right[graph.split[name]].double().mean().item() for name in ("valid", "test")]
            _, test = max(accuracy.values(), key=lambda pair: pair[0])
            tests.append(100 * test)
    return {"test": statistics.mean(tests), "std": statistics.stdev(tests), "n": args.runs}


def accuracy_of(args, name, flags, words, settings, *, seed, runs, edges):
    """Run train.py in this process -> accuracies in percent: mean, standard deviation, seconds of all runs."""
    said = f"{flags} {settings} --seed {seed} --runs {runs}".split()
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere:
        data, log = Path(scratch, f"{name}.npz"), Path(scratch, "log")
        write_graph(Path(args.data, f"{name}.npz"), data, component=name == "amazon_computers", edges=edges)
        start = time.perf_counter()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                train.main(["--dataset", f"{data}{words}", "--root", scratch, "--log", str(log), *said])
            except SystemExit as stop:
                if stop.code:
                    raise StoreError(f"train.py {' '.join(said)} ended with code {stop.code}") from None
        seconds, last = time.perf_counter() - start, json.loads(log.read_text().splitlines()[-1])
    mean, std = last["mean"], last["std"]
    return {"flags": " ".join(["--dataset", f"{name}.npz{words}", *said]), "n": runs, "test": 100 * mean["test"],
            "std": 100 * std["test"], "valid": 100 * mean["valid"], "seconds": seconds}  # fmt: skip


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
        keep = label == np.bincount(label).argmax()
        lengths = np.diff(data["feat_indptr"])
        data["edge_index"] = (np.cumsum(keep) - 1)[data["edge_index"][:, keep[src]]]
        data["feat_indices"] = data["feat_indices"][np.repeat(keep, lengths)]
        data["feat_indptr"] = np.concatenate([[0], np.cumsum(lengths[keep])])
        data["feat_shape"], data["labels"] = np.array([keep.sum(), data["feat_shape"][1]]), data["labels"][keep]
    if not edges:
        data["edge_index"] = data["edge_index"][:, :0]
    np.savez(target, **data)
