"""Compare this tree with an earlier commit, bit for bit: python tests/same_as.py COMMIT [WORD ...]

Runs the same command lines in a worktree of COMMIT and in this tree, on this machine, and compares the
weights in the checkpoint, the `--predict` array and every printed loss and score. With words, only the
cases whose name contains one of them. Ends with 1 where something differs.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

TREE = Path(__file__).resolve().parents[1]
BASE = "--gpus 0 --epochs 2 --batch-size 128 --hidden 16 --seed 3 --weight-decay 0.001 --lr 0.01"
NODE = f"--dataset synthetic:nodes=2000,degree=8,features=16,classes=5 {BASE} --fanout 5,4"
PREDICT = "--predict-what logits"
EVENTS = f"--dataset events.npz {BASE} --fanout 5,4"
LINK = f"--task link --dataset events.npz {BASE} --fanout 5,4 --model gcn"
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
    "torch operations": f"{NODE} CC=false",
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
    "link, mlp": f"{LINK} --scorer mlp --link-loss softmax --negatives 2 --early-stop 1",
    "link, by degree": f"{LINK} --scorer distmult --negatives-by degree --unchecked-negatives",
    "link, before": f"{LINK.replace('gcn', 'sage')} --temporal before",
    "link, none held": f"{LINK} --edge-split none",
    "graph": GRAPH,
    "graph, two processes": f"{GRAPH} --procs 2",
    "cora": f"--dataset cora.npz {BASE} --fanout 10,10 --model gcn",
}
OWN_MODEL = (TREE / "docs" / "models.md").read_text().split("# mymodel.py")[1].split("```")[0]


def write_inputs(folder):
    """Graphs as files: with times, weights and features of edges; several labels a node; tables."""
    rng = np.random.default_rng(0)
    V, M = 1500, 12000
    y = rng.integers(0, 4, V)
    src = rng.integers(0, V, M)
    dst = np.where(rng.random(M) < 0.7, rng.permutation(V)[rng.integers(0, V, M)], src)
    graph = {
        "edge_index": np.stack([src, dst]),
        "features": (rng.standard_normal((V, 12)) + np.eye(4)[y].repeat(3, 1)).astype(np.float32),
        "train_idx": np.arange(0, 900),
        "val_idx": np.arange(900, 1200),
        "test_idx": np.arange(1200, V),
    }
    columns = {
        "edge_weight": rng.random(M).astype(np.float32),
        "edge_time": rng.integers(0, 1000, M),
        "edge_features": rng.standard_normal((M, 3)).astype(np.float32),
        "node_time": rng.integers(300, 1000, V),
    }
    np.savez(folder / "events.npz", **graph, **columns, labels=y)
    np.savez(folder / "several.npz", **graph, labels=(rng.random((V, 5)) < 0.3).astype(np.int64))
    edges = graph["edge_index"].T
    np.savetxt(folder / "edges.csv", edges, "%d", ",", header="src,dst", comments="")
    np.savetxt(folder / "x.csv", graph["features"], "%.6g", ",")
    np.savetxt(folder / "y.csv", y, "%d")
    (folder / "mymodel.py").write_text(OWN_MODEL)
    for name in ("cora", "esol"):
        file = TREE.parent / "shared" / "data" / f"{name}.npz"
        if file.is_file():
            shutil.copy(file, folder)


def run(tree, folder, words):
    """One case in one tree -> what is compared: {what: tensor, array or lines}."""
    options = {"cwd": folder, "capture_output": True, "text": True}
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    words = shlex.split(words)
    if "CC=false" in words:
        words.remove("CC=false")
        options["env"] |= {"CC": "false", "XDG_CACHE_HOME": str(folder / "no cache")}
    checkpoint, predicted = folder / "run.pt", folder / "out.npy"
    checkpoint.unlink(missing_ok=True)
    words += ["--checkpoint", "run.pt"]
    if "graph" not in words:  # --task graph predicts nothing
        words += ["--predict", "out.npy"]
    if "csv_store" in words and not (folder / "csv_store").exists():
        build = [sys.executable, str(tree / "store.py"), "build", "edges.csv", "csv_store"]
        build += "--features x.csv --labels y.csv --symmetrize --drop-duplicates".split()
        subprocess.run(build, **options, check=True)
    done = subprocess.run([sys.executable, str(tree / "train.py"), *words], **options)
    found = {"exit code": done.returncode}
    if done.returncode:
        found["output"] = (done.stdout + done.stderr)[-500:]
    scores = r"(?:loss|valid|train|test) -?[\d.naif]+%?|[A-Z][\w@ -]* [01]\.\d{4}"
    found["scores"] = re.findall(scores, done.stdout)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        found |= {f"weights {key}": value for key, value in state["model"].items()}
        found["epoch and step"] = state["epoch"], state["step"]
    if predicted.exists():
        found["--predict"] = torch.from_numpy(np.load(predicted))
        predicted.unlink()
    return found


def differences(before, after):
    """The names of what is not equal, with both values where they are short."""
    for key in before.keys() | after.keys():
        a, b = before.get(key), after.get(key)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                yield key
        elif a != b:
            yield f"{key}: {a} -> {b}"


def main(commit, *words):
    """Compare all cases -> exit code."""
    differ = 0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        git, tree = ["git", "-C", str(TREE), "worktree"], str(scratch / "tree")
        subprocess.run([*git, "add", "-q", "--detach", tree, commit], check=True)
        try:
            trees = {"before": scratch / "tree", "after": TREE}
            for side in trees:
                (scratch / side).mkdir()
                write_inputs(scratch / side)
            with ThreadPoolExecutor(2) as pool:
                for name, line in CASES.items():
                    if words and not any(word in name for word in words):
                        continue
                    both = lambda side: run(trees[side], scratch / side, line)  # noqa: E731
                    before, after = pool.map(both, trees)
                    found = sorted(differences(before, after))
                    differ += bool(found)
                    what = "DIFFERS" if found else "same"
                    if before["exit code"]:
                        what += f", both end with {before['exit code']}: {before['output'][-200:]}"
                    line = f"{what:8} {name}: {len(before)} things compared"
                    print(line, *found[:4], sep="\n    ", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=False)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
