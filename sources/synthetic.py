"""Graphs with planted communities, for trying things out without a download.

    build_store("store", **synthetic({**SYNTHETIC, "nodes": 1_000_000, "degree": 50.0}))

V nodes of the graph, F feature width, C classes.
"""

import types

import numpy as np

from disk.convert import Rows
from disk.files import SPLITS, StoreError
from features import prefetch

SYNTHETIC = dict(
    nodes=100_000,  # V
    degree=20.0,  # mean in-degree
    features=64,  # F
    classes=16,  # C
    seed=0,
    # nodes in the split: a count, or a fraction when below 1; the rest is the test split
    train=0.08,
    valid=0.02,
    local=0.5,  # share of edges from the same community
    sigma=0.6,  # standard deviation of the logarithm of the in-degree
    noise=0.6,  # standard deviation per feature; centroids have length 1
    mixed=0.04,  # share of nodes with a random class instead of their community's
    # nodes per community; 0: 1,000, or fewer so that each class has at least four communities
    community=0,
)

MAG = dict(
    scale=0.02,  # 1: as large as ogbn-mag, 1.9 million nodes and 42 million edges
    features=128,  # F, of papers only
    classes=16,  # C
    seed=0,
    local=0.5,  # share of edges within a class
    noise=1.0,  # standard deviation per feature; centroids have length 1
)
RANGES = {  # lowest and highest values
    **dict.fromkeys(("nodes", "features", "classes"), (1, 1 << 31)),
    **dict.fromkeys(("train", "valid", "community"), (0, 1 << 31)),
    **dict.fromkeys(("local", "mixed"), (0, 1)),
    **dict(seed=(0, 1 << 63), degree=(1e-6, 1 << 20), sigma=(0, 4), noise=(0, 1e30)),
    "scale": (1e-6, 10),
}
MAG_NODES = dict(paper=736_389, author=1_134_649, institution=8_740, field_of_study=59_965)
MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field_of_study"): 7_505_078,
}


def synthetic_mag(parameters) -> dict:
    """Draw a graph with the types of ogbn-mag (arXiv 2005.00687) and its numbers of nodes and edges times `scale` ->
    arguments of `build_store`. Classes are ranges of ids within each type, and papers' features alone are too noisy to
    classify by. parameters: a dict with every key of `MAG`."""
    p = checked("synthetic-mag", parameters)
    random = np.random.Generator(np.random.SFC64(p.seed))
    counts = {name: max(p.classes, round(p.scale * count)) for name, count in MAG_NODES.items()}

    def edges(source, destination, count):
        src = (random.random(count) ** 2 * counts[source]).astype(np.int64)
        dst = (random.random(count) ** 2 * counts[destination]).astype(np.int64)
        near = random.random(count) < p.local
        group = dst[near] * p.classes // counts[destination]
        src[near] = (group + random.random(len(group))) * counts[source] / p.classes
        return np.stack([src, dst])

    papers = counts["paper"]
    labels = np.arange(papers) * p.classes // papers
    x = centroids_of_classes(random, p)[labels]
    x += p.noise * random.standard_normal(x.shape, np.float32)
    parts = np.split(random.permutation(papers), [papers * 8 // 10, papers * 9 // 10])
    return dict(
        node_types=counts,
        edge_index={kind: edges(*kind[::2], round(p.scale * n)) for kind, n in MAG_EDGES.items()},
        features={"paper": x},
        labels={"paper": labels},
        num_classes=p.classes,
        split=dict(zip(SPLITS, parts)),
        symmetrize=True,
        source=dict(dataset="synthetic-mag", **parameters),
    )


def checked(name, parameters):
    """Return the parameters as attributes; StoreError for one out of its range."""
    for key, value in parameters.items():
        low, high = RANGES[key]
        if not low <= value <= high:
            raise StoreError(f"{name}: {key}={value} is out of range: {low} to {high}")
    return types.SimpleNamespace(**parameters)


def centroids_of_classes(random, p):
    """Draw a random direction for each class -> float32 [C, F], of length 1."""
    centroids = random.standard_normal((p.classes, p.features), np.float32)
    return centroids / np.linalg.norm(centroids, axis=1, keepdims=True)


def synthetic(parameters) -> dict:
    """Draw a graph with planted communities, log-normal in-degrees and features too noisy to classify by alone ->
    arguments of `build_store`.

    Nodes with consecutive ids form a community, which has a class. A share `local` of the edges come from the community
    of their destination; the others from the whole graph, node V u^3 for u uniform in [0, 1), so that low ids are hubs.
    Each chunk of nodes has its own random stream and is drawn on one of several threads: the bytes depend only on the
    parameters, a dict with every key of `SYNTHETIC`.
    """
    p = checked("synthetic", parameters)
    counts = [round(n * p.nodes) if n < 1 else int(n) for n in (p.train, p.valid)]
    if counts[0] < 1 or max(sum(counts), p.classes, p.community) > p.nodes:
        parts = f"train={p.train:g}, valid={p.valid:g}"
        raise StoreError(f"synthetic: {parts}, classes or community do not fit {p.nodes} nodes")
    size = p.community or max(1, min(1000, p.nodes // (4 * p.classes)))

    def stream(*key):
        return np.random.Generator(np.random.SFC64([p.seed, *key]))

    labels = stream(0).permutation(np.arange(-(-p.nodes // size)) % p.classes)
    labels = labels.repeat(size)[: p.nodes]
    mixed = stream(1).random(p.nodes, np.float32) < p.mixed
    labels[mixed] = stream(2).integers(0, p.classes, int(mixed.sum()))
    degrees = p.sigma * stream(3).standard_normal(p.nodes, np.float32) - p.sigma**2 / 2
    degrees = np.maximum(1, np.rint(p.degree * np.exp(degrees))).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    centroids = centroids_of_classes(stream(4), p)

    def edges(first, _):
        v = np.arange(first, min(first + nodes_per_chunk, p.nodes), dtype=np.uint64)
        start = v // size * size
        span = np.minimum(size, p.nodes - start)
        counts = degrees[first : first + nodes_per_chunk]
        start = start.repeat(counts)
        span = span.repeat(counts)
        bits = stream(5, first).integers(0, 1 << 64, len(start), np.uint64)
        position = bits & (1 << 32) - 1
        choice = bits >> 32
        near = start + (position * span >> 32)
        low = position * position >> 32
        far = (low * position >> 32) * p.nodes >> 32
        return np.where(choice < int(p.local * (1 << 32)), near, far).astype(np.int64)

    def features(first, _):
        rows = centroids[labels[first : first + rows_per_chunk]]
        return rows + p.noise * stream(6, first).standard_normal(rows.shape, np.float32)

    def ahead(make, step):
        return prefetch(make, range(0, p.nodes, step), depth=4, threads=4)

    nodes_per_chunk = max(1, int((1 << 20) / p.degree))
    rows_per_chunk = max(1, (1 << 22) // p.features)
    parts = np.split(stream(7).permutation(p.nodes), np.cumsum(counts))
    return dict(
        indptr=indptr,
        indices=Rows([int(indptr[-1])], np.int64, ahead(edges, nodes_per_chunk)),
        features=Rows([p.nodes, p.features], np.float32, ahead(features, rows_per_chunk)),
        labels=labels,
        num_classes=p.classes,
        split={name: np.sort(ids) for name, ids in zip(SPLITS, parts)},
        source=dict(dataset="synthetic", **parameters),
    )
