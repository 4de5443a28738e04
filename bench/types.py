"""python -m bench types: R-GCN by neighbour sampling on AIFB, beside the paper that introduced it (arXiv 1703.06103)."""

import csv
import gzip
import re
import tempfile
from pathlib import Path

import numpy as np

from bench.step import training_log
from bench.tools import print_table

# of the paper: 16 wide, 50 epochs of one batch, no dropout; nothing was chosen by the test nodes
FLAGS = "--epochs 50 --lr 0.01 --weight-decay 0 --batch-size 140 --weights last --model mykg.py:Net"
PUBLISHED = {"all neighbours": 95.83, "20 of each type": 94.44}  # the second: DGL's minibatches


def bench_types(args):
    """Train docs/types.md's R-GCN of nodes without features with seeds 0 .. --runs - 1, from --data."""
    figures = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, page = Path(scratch), Path(__file__).parents[1] / "docs" / "types.md"
        model = re.search(r"```python\n(# mykg.py\n.*?)```", page.read_text(), re.DOTALL)[1]
        (folder / "mykg.py").write_text(model)
        graph = read_triples(Path(args.data))
        np.savez(folder / "aifb.npz", **graph)
        sizes = f"num_nodes={len(graph['labels'])},num_types={graph['edge_type'].max() + 1}"
        for name, fanout in zip(PUBLISHED, ("-1,-1", "20,20")):
            words = f"--dataset {folder}/aifb.npz --root {folder} --runs {args.runs} {FLAGS}"
            words = words.replace("mykg.py", f"{folder}/mykg.py")
            words += f" --model-args {sizes} --fanout {fanout}"
            last = training_log(words.split())[0][-1]
            figures[name] = {"test": 100 * last["mean"]["test"], "std": 100 * last["std"]["test"]}
            figures[name] |= {"n": args.runs, "published": PUBLISHED[name]}
    print_table("types", figures)
    return {"types": figures}


def read_triples(folder):
    """AIFB's N-Triples and the persons with their affiliation -> the arrays of an .npz file; a reverse of a relation is a
    type of its own."""
    nodes, relations, classes = {}, {}, {}
    number = lambda known, name: known.setdefault(name, len(known))  # noqa: E731
    with gzip.open(folder / "aifb.nt.gz", "rt") as file:
        lines = (line.strip().removesuffix(".").strip() for line in file)
        lines = [line.split(maxsplit=2) for line in lines if line]
    triples = [(number(nodes, s), number(relations, r), number(nodes, o)) for s, r, o in lines]
    source, relation, target = np.array(triples).T
    labels, split = np.full(len(nodes), -1), {}
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
