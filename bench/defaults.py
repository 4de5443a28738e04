"""python -m bench defaults: every model at its defaults beside other settings, on small graphs of many kinds."""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from bench.accuracy import add, real_graph, trained
from bench.tools import print_table, read_json
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
NOISY = partial(planted, EVEN, 0.5 * np.eye(8) + 0.5 / 8, degree=12, noise=1.5, train=0.2)
AFFINE = 0.4 * RING + 0.4 * RING.T + 0.2 / 8
CIRCLE = partial(planted, EVEN, AFFINE, degree=12, noise=0.8, train=0.5)
UNEVEN, APART = [0.78, 0.22], [[0.6, 0.4], [0.75, 0.25]]
OPPOSED = partial(planted, UNEVEN, APART, degree=20, noise=1.2, train=0.5)
# what defaults are chosen by, and what they are shown on: what makes it, or a real graph and what is cut out
GRAPHS = {
    "choose: cora, 1,000 nodes, 200 words": ("cora", around, 200),
    "choose: amazon_computers, every fifth node, 200 words": ("amazon_computers", every_fifth, 200),
    "choose: mines": partial(minesweeper, 30),
    "choose: noisy features": NOISY,
    "choose: synthetic:nodes=1500,valid=0.1": None,
    "show: citeseer, 1,000 nodes, 200 words": ("citeseer", around, 200),
    "show: coauthor_cs, 1,000 nodes, 200 words": ("coauthor_cs", around, 200),
    "show: ogbn_arxiv_nofeat, 1,000 nodes": ("ogbn_arxiv_nofeat", around, None),
    "show: opposites": OPPOSED,
    "show: ring of classes": CIRCLE,
    "show: synthetic:nodes=1500,valid=0.1,degree=5,noise=0.3,local=0.7,classes=8": None,
}
TWO_CLASSES = "choose: mines", "show: opposites"
TUNED = (  # what a model at its defaults is compared with
    "--norm none --no-residual",
    "--norm none --residual",
    "--norm layer --no-residual",
    "--norm layer --residual",
    "--norm layer --residual --lr 0.01 --input-dropout 0.5",
)


def bench_defaults(args):
    """Test scores of every model at its defaults and with the settings in TUNED, over --runs seeds and splits.

    The best setting of a model on a graph is the one of the highest validation score. The graphs of "choose" are what the
    defaults were chosen by; how far they are from the best setting is to be seen on the others. --json FILE is written
    after each row, and rows of as many seeds that it has are not run again.
    """
    figures, rows = read_json(args.json).get("defaults", {}), {}
    for name, made in GRAPHS.items():
        flags = "--metric roc_auc" if name in TWO_CLASSES else ""
        with tempfile.TemporaryDirectory() as scratch:
            data = Path(scratch, "graph.npz") if made else name.partition(": ")[2]
            if isinstance(made, tuple):
                made = partial(real_graph, Path(args.data, f"{made[0]}.npz"), *made[1:])
            if made:
                np.savez(data, **made())
            for model in (args.models or ",".join(CONVS)).split(","):
                where, scores = f"{name}: {model}", {}
                for setting in ("", *TUNED):
                    if scores and setting == flags_of(scores[""]):  # what the defaults are
                        continue
                    key = f"{where} {setting}".strip()
                    if figures.get(key, {}).get("n") != args.runs:
                        said = f"--model {model} {flags} {setting} --runs {args.runs} --prefetch 0"
                        add(args, figures, key, trained(data, scratch, said) | {"n": args.runs})
                    scores[setting] = figures[key]
                best = max(scores, key=lambda setting: scores[setting]["valid"])
                rows[where] = {
                    "defaults": scores[""]["test"],
                    "std": scores[""]["std"],
                    "best by validation": scores[best]["test"],
                    "its std": scores[best]["std"],
                    "its setting": best or "defaults",
                    "difference": scores[best]["test"] - scores[""]["test"],
                }
    print_table("graph and model", rows)
    return {"defaults": figures}


def flags_of(figure):
    """The setting that a run had, in the words of TUNED."""
    return f"--norm {figure['norm']} --{'' if figure['residual'] else 'no-'}residual"
