"""python -m bench defaults: train.py with default flags on real graphs, beside published figures and simple baselines.

Nodes, links and small graphs of --data, trained with seeds 0 .. --runs - 1, or once for each of ten test folds.
--parts takes names of rows, --code runs the train.py of another checkout. --json FILE is written after each row, and
rows that it already has are not run again.
"""

import collections
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import accuracy, tools
from disk.files import StoreError

HERE = Path(__file__).parents[1]
FOLDS = 10
EVENTS = "--model rgcn --temporal before --edge-split time:80/10/10"
# row: (file of --data, flags, score, published)
ROWS = {
    "nodes cora": ("cora", "", "accuracy", "GCN 81.5"),
    "nodes citeseer": ("citeseer", "", "accuracy", "GCN 70.3"),
    "nodes computers": ("amazon_computers", "", "accuracy", "GCN 82.6 +- 2.4"),
    "nodes cs": ("coauthor_cs", "", "accuracy", "GCN 91.1 +- 0.5"),
    "nodes arxiv": ("ogbn_arxiv_nofeat", "", "accuracy", "label propagation 68.3"),
    "links cora": ("cora", "--task link", "mrr", ""),
    "links citeseer": ("citeseer", "--task link", "mrr", ""),
    "links computers": ("amazon_computers", "--task link", "mrr", ""),
    "links cs": ("coauthor_cs", "--task link", "mrr", ""),
    "links site": ("", f"--task link {EVENTS}", "mrr", ""),
    "graphs ptc": ("tu_ptc", "--task graph", "accuracy", "GIN 64.6"),
    "graphs enzymes": ("tu_enzymes", "--task graph", "accuracy", ""),
    "graphs imdbbinary": ("tu_imdbbinary", "--task graph", "accuracy", "GIN 75.1"),
    "graphs esol": ("esol", "--task graph", "rmse", ""),
    "graphs molhiv": ("ogbg_molhiv", "--task graph", "roc_auc", "GIN 75.6"),
}


def molecules(tu):
    """Turn a set of the TU collection into the arrays of an .npz file of molecules, without a split."""
    src, dst = tu["edge_index_local"]
    once = src < dst
    graph = np.repeat(np.arange(len(tu["labels"])), np.diff(tu["edge_offsets"]))
    bonds = np.bincount(graph[once], minlength=len(tu["labels"]))
    tags = tu["node_tag"]
    if not tags.any():  # of no meaning: degrees, as in GIN's paper
        ends = np.repeat(tu["node_offsets"][:-1], np.diff(tu["edge_offsets"])) + dst
        tags = np.minimum(np.bincount(ends, minlength=len(tags)), 255)
    return {
        "node_offsets": tu["node_offsets"],
        "bond_offsets": np.append(0, bonds.cumsum()),
        "bond_index_local": np.stack([src, dst])[:, once],
        "atom_feat": tags.astype(np.uint8)[:, None],
        "bond_feat": np.zeros((once.sum(), 1), np.uint8),
        "labels": tu["labels"].astype(np.int64),
    }


def split_by_fold(fold, k):
    """Return masks [G] that test on fold k, validate on the next one, and train on the rest."""
    valid = fold == (k + 1) % FOLDS
    test = fold == k
    return {"train_mask": ~(valid | test), "valid_mask": valid, "test_mask": test}


def inputs(args, name, folder):
    """Write the .npz files of a row -> their paths, one for each run."""
    if not name:  # the example of docs/links.md
        page = (HERE / "docs/links.md").read_text()
        code = re.search(
            r"```python\n(import numpy as np\n\nrng.*?site\.npz.*?)```", page, re.DOTALL
        )[1]
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
        return [Path(folder, "site.npz")] * args.runs
    graph = accuracy.real(args, name)
    folds = graph.get("fold")
    if folds is None:
        np.savez(f"{folder}/{name}.npz", **graph)
        return [Path(folder, f"{name}.npz")] * args.runs
    for k in range(FOLDS):
        np.savez(f"{folder}/{name}{k}.npz", **molecules(graph), **split_by_fold(folds, k))
    return [Path(folder, f"{name}{k}.npz") for k in range(FOLDS)]


def logistic_regression(path):
    """Fit sums of tags and degrees of each graph, by scikit-learn -> test accuracy of the penalty best on validation."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    z = np.load(path)
    first, y = z["node_offsets"], z["labels"]
    ends = z["bond_index_local"] + np.repeat(first[:-1], np.diff(z["bond_offsets"]))
    degree = np.minimum(np.bincount(ends.ravel(), minlength=first[-1]), 40)
    kinds = [np.eye(int(of.max()) + 1)[of] for of in (z["atom_feat"][:, 0], degree)]
    x = np.add.reduceat(np.concatenate(kinds, 1), first[:-1])
    train, valid, test = (z[f"{part}_mask"] for part in ("train", "valid", "test"))
    x = StandardScaler().fit(x[train]).transform(x)
    models = [
        LogisticRegression(C=c, max_iter=3000).fit(x[train], y[train]) for c in (0.01, 0.1, 1, 10)
    ]
    best = max(models, key=lambda model: model.score(x[valid], y[valid]))
    return best.score(x[test], y[test])


def baselines(path, folds, scores, others, name):
    """Return {baseline: its test score} of a run with these scores in its log, and those of no network."""
    if folds:
        try:
            return {"logistic regression": logistic_regression(path)}
        except ImportError as error:
            print(f"left out: logistic regression ({error})")
    if name == "rmse":
        return {"the mean": scores["rmse_of_the_mean"]}
    return {other: its[name] for other, its in others.items()}


def train(args, path, seed, flags, folder):
    """Run train.py -> the last entry of its log that has test scores."""
    log = Path(folder, "log")
    log.unlink(missing_ok=True)
    words = f"--dataset {path} --root {folder} --seed {seed} --gpus 0 --log {log} {flags}"
    command = [sys.executable, "train.py", *words.split()]
    done = subprocess.run(command, cwd=args.code, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise StoreError(f"train.py ended with exit code {done.returncode}: {last}")
    entries = map(json.loads, log.read_text().splitlines())
    return [entry for entry in entries if "scores" in entry or "exact" in entry][-1]


def row(args, file, flags, name):
    """Train on a data set -> {test, std, valid: in percent, or as they are for RMSE; n; seconds; what is published and
    reached without a network}."""
    start = time.perf_counter()
    scores = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        paths = inputs(args, file, folder)
        folds = len(set(paths)) > 1
        for k, path in enumerate(paths):
            entry = train(args, path, 0 if folds else k, flags, folder)
            if "exact" in entry:
                parts = {part: {name: score} for part, score in entry["exact"].items()}
            else:
                parts = entry["scores"]
            others = entry.get("baselines", {}).get("test", {})
            beside = baselines(path, folds, parts["test"], others, name)
            figures = {"test": parts["test"][name], "valid": parts["valid"][name], **beside}
            for column, score in figures.items():
                scores[column].append(score if name == "rmse" else 100 * score)
    means = {column: statistics.mean(values) for column, values in scores.items()}
    best = max(means.keys() - {"test", "valid"}, key=means.get, default=None)
    beside = f"{best} {means[best]:.4g} +- {statistics.stdev(scores[best]):.2g}" if best else ""
    return {
        "test": means["test"],
        "std": statistics.stdev(scores["test"]),
        "valid": means["valid"],
        "n": len(paths),
        "seconds": time.perf_counter() - start,
        "best baseline": beside,
        "scores": dict(scores),
    }


def bench_defaults(args):
    """Print a table of all rows -> {"defaults": rows}."""
    rows = tools.read_json(args.json).get("defaults", {})
    for key in tools.chosen_parts(args, ROWS):
        file, flags, name, published = ROWS[key]
        if key not in rows:
            rows[key] = row(args, file, flags, name) | {"score": name, "published": published}
            tools.write_figures(args, {"defaults": rows})
            print(f"{key}  {rows[key]['test']:.4g} +- {rows[key]['std']:.2g}", flush=True)
    tools.print_table("defaults", rows)
    return {"defaults": rows}
