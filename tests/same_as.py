"""Compare this tree with an earlier commit, bit for bit: python -m tests.same_as COMMIT [WORD ...]

Runs the same command lines in a worktree of COMMIT and in this tree, on this machine, and compares the
weights in the checkpoint, the `--predict` array and every loss and score of the log. With words, only the
cases whose name contains one of them. Ends with 1 where something differs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.common import DATA, HERE, OWN_LAYERS, _graph
from tests.stores import _events

BASE = "--gpus 0 --epochs 2 --batch-size 128 --hidden 16 --seed 3 --weight-decay 0.001 --lr 0.01"
NODE = f"--dataset synthetic:nodes=2000,degree=8,features=16,classes=5 {BASE} --fanout 5,4"
PREDICT = "--predict-what logits"
EVENTS = f"--dataset events.npz {BASE} --fanout 5,4"
PAIRS = f"--task link --dataset events.npz {BASE} --fanout 5,4 --model gcn --dropout 0.5"
LINK = f"{PAIRS} --scorer dot"
TYPED = f"--dataset synthetic-mag:scale=0.0005 {BASE} --fanout 5,4"
GRAPH = f"--task graph --dataset esol.npz {BASE} --num-layers 2 --dropout 0"

CASES = {
    "sage": f"{NODE} {PREDICT}",
    "sage-pool": f"{NODE} --model sage-pool {PREDICT}",
    "gcn": f"{NODE} --model gcn {PREDICT}",
    "gin": f"{NODE} --model gin {PREDICT}",
    "gat": f"{NODE} --model gat --heads 2 {PREDICT}",
    "gat, layer norm, residual": f"{NODE} --model gat --norm layer --residual {PREDICT}",
    "sage, batch norm": f"{NODE} --norm batch",
    "input dropout": f"{NODE} --input-dropout 0.2 --dropout 0.3",
    "activations recomputed": f"{NODE} --checkpoint-activations",
    "three layers": f"{NODE},3 --prefetch 0",
    "all neighbours": f"{NODE.replace('5,4', '-1,4')} --sample-threads 2",
    "labor": f"{NODE} --sampler labor",
    "labor, dependencies": f"{NODE} --sampler labor --layer-dependency --batch-dependency 3",
    "bf16": f"{NODE} --precision bf16",
    "fp64": f"{NODE} --precision fp64 --model gcn",
    "two processes": f"{NODE} --procs 2",
    "two processes, accumulated": f"{NODE} --procs 2 --accumulate 2",
    "accumulated": f"{NODE} --accumulate 3",
    "early stop": f"{NODE} --epochs 4 --early-stop 1 --metric f1",
    "cosine": f"{NODE} --lr-schedule cosine --metric roc_auc",
    "embeddings": f"{NODE} --predict-what embeddings",
    "scores": f"{NODE} --predict-what scores",
    "lmdb": f"{NODE} --backend lmdb",
    "look-ahead cache": f"{NODE} --cache 48KiB --mode cpu-cpu",
    "look-ahead cache, window": f"{NODE} --cache 48KiB --mode cpu-cpu --lookahead 5 --procs 2",
    "torch operations": f"CC=false {NODE}",
    "own model": f"{NODE} --model mymodel.py:Net".replace("--hidden 16", ""),
    "npz": f"{EVENTS} --temporal off",
    "npz, symmetrized": f"{EVENTS} --symmetrize --temporal off --model gcn",
    "weighted": f"{EVENTS} --sampler weighted --temporal off",
    "latest": f"{EVENTS} --sampler latest",
    "temporal before": f"{EVENTS} --temporal before --model gin",
    "gine": f"{EVENTS} --model gine --temporal off",
    "gat, edge features": f"{EVENTS} --model gat --heads 2 --temporal off",
    "several labels": f"{EVENTS.replace('events', 'several')} --temporal off",
    "csv": f"--dataset csv_store {BASE} --fanout 5,4",
    "link": LINK,
    "link, two processes": f"{LINK} --procs 2 --negatives 3",
    "link, mlp": f"{PAIRS} --scorer mlp --link-loss softmax --negatives 2 --early-stop 1",
    "link, by degree": f"{PAIRS} --scorer distmult --negatives-by degree --unchecked-negatives",
    "link, before": f"{LINK.replace('gcn', 'sage')} --temporal before",
    "link, none held": f"{LINK} --edge-split none",
    "typed": f"{TYPED} --model rgcn --procs 2",
    "typed, attention": f"{TYPED} --model rgat --bases 2",
    "typed link": f"{TYPED} --task link --edge-type cites --model rgcn --dropout 0.5 --scorer dot",
    "link, what nodes have in common": f"{PAIRS} --scorer ncn",
    "graph": GRAPH,
    "graph, two processes": f"{GRAPH} --procs 2",
    "cora": f"--dataset cora.npz {BASE} --fanout 10,10 --model gcn",
}


def write_inputs(tree, folder):
    """Graphs as files: with times, weights and features of edges; several labels a node; tables, as a store too."""
    folder.mkdir()
    graph, random = _graph(1500, 12000, width=12), np.random.default_rng(0)
    edges, x, y = graph["edge_index"], graph["features"], graph["labels"]
    parts = dict(zip(("train_idx", "val_idx", "test_idx"), np.split(np.arange(1500), [900, 1200])))
    several = (random.random((1500, 5)) < 0.3).astype(np.int64)
    for name, labels, columns in (("events", y, _events(1500, 12000)), ("several", several, {})):
        arrays = {"edge_index": edges, "features": x, "labels": labels, **parts, **columns}
        np.savez(folder / f"{name}.npz", **arrays)
    np.savetxt(folder / "edges.csv", edges.T, "%d", ",", header="src,dst", comments="")
    np.savetxt(folder / "x.csv", x, "%.6g", ",")
    np.savetxt(folder / "y.csv", y, "%d")
    (folder / "mymodel.py").write_text(OWN_LAYERS)
    for file in (DATA / "cora.npz", DATA / "esol.npz"):
        if file.is_file():
            shutil.copy(file, folder)
    build = (
        "build edges.csv csv_store --features x.csv --labels y.csv --symmetrize --drop-duplicates"
    )
    command = [sys.executable, tree / "store.py", *build.split()]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)


def run(tree, folder, line):
    """Run one case in one tree -> what is compared: {what: tensor or text}."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    if line.startswith("CC=false "):  # no compiler, nor what was compiled before
        environment |= {"CC": "false", "XDG_CACHE_HOME": str(folder / "no cache")}
    words = line.removeprefix("CC=false ").split() + ["--checkpoint", "run.pt", "--log", "log"]
    if "graph" not in words:  # --task graph predicts nothing
        words += ["--predict", "out.npy"]
    for left in ("run.pt", "out.npy", "log"):
        (folder / left).unlink(missing_ok=True)
    command = [sys.executable, tree / "train.py", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    kept = "loss", "valid_sampled", "valid", "exact", "scores", "mean", "std"
    log = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
    entries = map(json.loads, log)
    found = {"scores": [[entry.get(name) for name in kept] for entry in entries]}
    if done.returncode:
        found["failed"] = f"exit code {done.returncode}: {(done.stdout + done.stderr)[-200:]}"
    if (folder / "run.pt").exists():
        state = torch.load(folder / "run.pt", weights_only=True)
        found |= {f"weights {key}": value for key, value in state["model"].items()}
        found["epoch and step"] = state["epoch"], state["step"]
    if (folder / "out.npy").exists():
        found["--predict"] = torch.from_numpy(np.load(folder / "out.npy"))
    return found


def differences(before, after):
    """The names of what is not equal, with both values where they are short."""
    for key in sorted(before.keys() | after.keys()):
        a, b = before.get(key), after.get(key)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                yield key
        elif a != b:
            yield f"{key}: {a} -> {b}"


def main(commit, *words):
    """Compare all cases -> exit code."""
    differ = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        git, tree = ["git", "-C", HERE, "worktree"], Path(scratch, "tree")
        subprocess.run([*git, "add", "-q", "--detach", tree, commit], check=True)
        try:
            sides = (tree, Path(scratch, "before")), (HERE, Path(scratch, "after"))
            for side in sides:
                write_inputs(*side)
            for name, line in CASES.items():
                if words and not any(word in name for word in words):
                    continue
                before, after = pool.map(lambda side: run(*side, line), sides)
                found = list(differences(before, after))
                failed = [before["failed"]] if "failed" in before else []
                differ += bool(found or failed)
                verdict = "DIFFERS" if found else "FAILED" if failed else "same"
                what = f"{verdict:8} {name}: {len(before)} things compared"
                print(what, *found[:4], *failed, sep="\n    ", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=False)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
