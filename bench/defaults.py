"""python -m bench defaults: every model at its defaults beside other settings, on small graphs of many kinds."""

import tempfile
from pathlib import Path

import numpy as np

from bench.accuracy import Kept, part_of, trained
from bench.tools import print_table
from model import CONVS


def every_fifth(data):
    """A mask [V] of nodes, whatever they are next to."""
    return np.arange(len(data["labels"])) % 5 == 0


def around(data, nodes=1000):
    """A mask [V] of `nodes` nodes, breadth-first from the one that most edges lead to."""
    src, dst = np.concatenate([data["edge_index"], data["edge_index"][::-1]], 1)
    keep = np.arange(len(data["labels"])) == np.bincount(dst).argmax()
    while (found := np.unique(dst[keep[src] & ~keep[dst]])).size and keep.sum() < nodes:
        keep[found[: nodes - keep.sum()]] = True
    return keep


def masks(random, nodes, train, splits=5):
    """Splits [K, V] with this share of the nodes for training, half of the others for validation."""
    order = np.argsort(random.random((splits, nodes)), 1)
    first, second = round(train * nodes), round((1 + train) / 2 * nodes)
    valid = (first <= order) & (order < second)
    return {"train_masks": order < first, "val_masks": valid, "test_masks": second <= order}


def minesweeper(side):
    """A grid on which 20 % of the nodes are mines; the number of mines around is known of one node in two."""
    random, (x, y) = np.random.default_rng(0), np.divmod(np.arange(side**2), side)
    far = np.maximum(abs(x[:, None] - x), abs(y[:, None] - y))
    edges = np.stack(np.nonzero(far == 1))
    labels = (random.random(side**2) < 0.2).astype(np.int64)
    mines = np.bincount(edges[1], labels[edges[0]]).astype(np.int64)
    features = np.eye(10, dtype=np.float32)[np.where(random.random(side**2) < 0.5, 9, mines)]
    graph = {"edge_index": edges, "features": features, "labels": labels}
    return graph | masks(random, side**2, 0.5)


def planted(sizes, affinity, *, nodes=1000, degree, noise, train):
    """Classes of these sizes whose nodes have neighbours in each class by the rows of `affinity`, and features that are
    their class's centroid, of length 1, plus noise."""
    random, classes = np.random.default_rng(0), len(sizes)
    labels = random.choice(classes, nodes, p=sizes)
    pull = np.exp(0.8 * random.standard_normal(nodes))
    dst = random.choice(nodes, nodes * degree // 2, p=pull / pull.sum())
    below = np.cumsum(affinity, 1)[labels[dst]] < random.random((len(dst), 1))
    of, src = below.sum(1).clip(max=classes - 1), np.zeros_like(dst)
    for label in range(classes):
        share = pull * (labels == label)
        src[of == label] = random.choice(nodes, (of == label).sum(), p=share / share.sum())
    edges = np.stack([src, dst])[:, src != dst]
    centroids = random.standard_normal((classes, 16))
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    features = (centroids[labels] + noise * random.standard_normal((nodes, 16))).astype(np.float32)
    edges = np.unique(np.concatenate([edges, edges[::-1]], 1), axis=1)
    graph = {"edge_index": edges, "features": features, "labels": labels}
    return graph | masks(random, nodes, train)


EVEN, RING = [1 / 8] * 8, np.eye(8)[[1, 2, 3, 4, 5, 6, 7, 0]]
NOISY = planted, EVEN, 0.5 * np.eye(8) + 0.5 / 8, dict(degree=12, noise=1.5, train=0.2)
CIRCLE = planted, EVEN, 0.4 * RING + 0.4 * RING.T + 0.2 / 8, dict(degree=12, noise=0.8, train=0.5)
OPPOSED = [0.78, 0.22], [[0.6, 0.4], [0.75, 0.25]], dict(degree=20, noise=1.2, train=0.5)
HALVES = {  # what defaults are chosen by, and what they are shown on: graph: (what makes it, flags of every run)
    "choose": {
        "cora, 1,000 nodes, 200 words": (("cora", around, 200), ""),
        "amazon_computers, every fifth node, 200 words": (
            ("amazon_computers", every_fifth, 200),
            "",
        ),
        "mines": ((minesweeper, 30, {}), "--metric roc_auc"),
        "noisy features": (NOISY, ""),
        "synthetic:nodes=1500,valid=0.1": (None, ""),
    },
    "show": {
        "citeseer, 1,000 nodes, 200 words": (("citeseer", around, 200), ""),
        "coauthor_cs, 1,000 nodes, 200 words": (("coauthor_cs", around, 200), ""),
        "ogbn_arxiv_nofeat, 1,000 nodes": (("ogbn_arxiv_nofeat", around, None), ""),
        "opposites": ((planted, *OPPOSED), "--metric roc_auc"),
        "ring of classes": (CIRCLE, ""),
        "synthetic:nodes=1500,valid=0.1,degree=5,noise=0.3,local=0.7,classes=8": (None, ""),
    },
}
TUNED = (  # what a model at its defaults is compared with
    "--norm none --no-residual",
    "--norm none --residual",
    "--norm layer --no-residual",
    "--norm layer --residual",
    "--norm layer --residual --lr 0.01 --input-dropout 0.5",
)


def bench_defaults(args):
    """Test scores of every model at its defaults and with the settings in TUNED, over --runs seeds and splits.

    The best setting of a model on a graph is the one of the highest validation score. The graphs of HALVES["choose"] are
    what the defaults were chosen by; how far they are from the best setting is to be seen on the others. --json FILE is
    written after each row, and rows of as many seeds that it has are not run again.
    """
    kept, rows = Kept(args, "defaults"), {}
    graphs = [
        (half, name, *graph) for half, named in HALVES.items() for name, graph in named.items()
    ]
    for half, name, made, flags in graphs:
        with tempfile.TemporaryDirectory() as scratch:
            data = write_made(args, made, Path(scratch, "graph.npz")) if made else name
            for model in (args.models or ",".join(CONVS)).split(","):
                where, scores = f"{half}: {name}: {model}", {}
                for setting in ("", *TUNED):
                    if scores and setting == flags_of(scores[""]):  # what the defaults are
                        continue
                    key = f"{where} {setting}".strip()
                    if kept.figures.get(key, {}).get("n") != args.runs:
                        said = f"--model {model} {flags} {setting} --runs {args.runs} --prefetch 0"
                        kept.add(key, trained(data, scratch, said) | {"n": args.runs})
                    scores[setting] = kept.figures[key]
                best = max(scores, key=lambda setting: scores[setting]["valid"])
                tests = {"defaults": scores[""]["test"], "std": scores[""]["std"]}
                tests |= {
                    "best by validation": scores[best]["test"],
                    "its std": scores[best]["std"],
                }
                difference = scores[best]["test"] - scores[""]["test"]
                rows[where] = tests | {"its setting": best or "defaults", "difference": difference}
    print_table("graph and model", rows)
    return {"defaults": kept.figures}


def flags_of(figure):
    """The setting that a run had, in the words of TUNED."""
    return f"--norm {figure['norm']} --{'' if figure['residual'] else 'no-'}residual"


def write_made(args, made, target):
    """Write a graph of HALVES: what a function returns, or a part of a real graph with some words of its features."""
    if callable(made[0]):
        function, *words, options = made
        graph = function(*words, **options)
    else:
        name, mask, words = made
        with np.load(Path(args.data, f"{name}.npz"), allow_pickle=False) as file:
            data = dict(file)
        graph = part_of(data, mask(data), words)
    np.savez(target, **graph)
    return target
