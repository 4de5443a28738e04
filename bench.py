"""Side-by-side measurement: every contender on the same graph, in one process, in turn.

    python bench.py sampler                      # this sampler beside DGL's, pyg-lib's, torch-sparse's, GraphBolt's
    python bench.py sampler --json sampler.json --larger synthetic:nodes=24490290,degree=50,features=1,classes=47
    python bench.py step                         # a training step beside DGL's, and what each trick is worth
    python bench.py link --dataset synthetic:nodes=500000,degree=50,features=100,classes=47    # beside DGL's
    python bench.py overlap                      # batches prepared ahead beside one after the other; draws both
    python bench.py features                     # the ring beside a plain copy; four processes on one store
    python bench.py scaling --procs 1,2,4        # epochs of train.py with as many processes, the same total batch
    python bench.py store                        # building, training from disk, many small graphs
    python bench.py store --edges 200000000 --features-gb 32 --graphs 1000000 --json store.json
    python bench.py store --parts papers --cache-gb 3 --batches 80     # the size of ogbn-papers100M: 50 GB of disk
    python bench.py inference --rounds 3         # exact inference beside DGL's layer-wise loop; --model gat and others
    python bench.py accuracy --threads 1         # ten seeds on real graphs beside published figures; --dataset cora
    python bench.py labor --fanout 5,5 --runs 5  # LABOR and its dependent draws: accuracy, and rows that a batch reads
    python bench.py gpu                          # on a CUDA GPU: everything that is worth knowing, in 15 minutes
    python bench.py attack --minutes 10          # what comes of damaged stores, odd inputs, forged checkpoints, kill -9
    python bench.py picture results/*.json       # throughput beside DGL's, drawn from what the others wrote

Contenders that cannot be imported are left out, with the reason. GraphBolt needs the torch that DGL was built for:

    python3 -m venv graphbolt && graphbolt/bin/pip install torch==2.2.1 dgl==2.1.0 torchdata==0.7.1 "numpy<2" \\
        pandas pydantic pyyaml lmdb tqdm setuptools==69.5.1
    graphbolt/bin/python bench.py sampler
    python bench.py store --parts train --graphbolt graphbolt/bin/python

A time is the median over --rounds. Within a round the contenders follow each other, so that a slow moment of the
machine meets all of them. results/README.md holds the figures of one machine.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from bench_accuracy import bench_accuracy, bench_labor
from bench_attack import bench_attack
from bench_gpu import bench_gpu, gpu_machine
from bench_link import bench_link
from bench_sampler import bench_sampler
from bench_store import bench_store
from bench_tools import hardware, keep_figures, settle
from bench_training import bench_features, bench_inference, bench_overlap, bench_scaling, bench_step
from disk import StoreError
from model import CONVS

WORKLOAD = "synthetic:nodes=2449029,degree=50,features=100,classes=47"  # the size of ogbn-products


def bench_picture(args):
    """Draw times against DGL from result files -> results/throughput.png, or --png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {}
    for file in args.files or sorted(str(path) for path in Path("results").glob("*.json")):
        content = json.loads(Path(file).read_text())
        what = f"gpu {content['part']}" if "part" in content else content["arguments"]["what"]
        found.setdefault(what, content)  # of two the first
    on_gpu = {f"cuda-cuda {precision} {how}": f"ringblock, {precision}, {how}"
              for precision in ("fp32", "tf32", "bf16") for how in ("eager", "graph")}  # fmt: skip
    labels = {"native": "ringblock", "torch ops": "ringblock, torch ops", "torch operations": "ringblock, torch ops",
              "all tricks": "ringblock, fp32", "bf16": "ringblock, bf16",
              "ours": "ringblock", "ours, tables in files": "ringblock, tables in files",
              **on_gpu, "cuda-cuda fp32 plain": "plain version, fp32", "cpu-cuda fp32 PyG": "PyG, fp32"}  # fmt: skip
    draws = {  # command: (title, milliseconds of each contender, those that are drawn)
        "sampler": ("sampling a batch", lambda f: {name: c["median_ms"] for name, c in f["contenders"].items()},
                    ["native", "torch ops", "DGL fused, int64", "DGL unfused, int64", "GraphBolt"]),
        "step": ("a training step, dropout 0.5", lambda f: f["median_ms"],
                 ["bf16", "all tricks", "DGL, malloc kept", "DGL as shipped"]),
        "inference": ("exact inference, all nodes", lambda f: {name: 1e3 * s for name, s in f["median_s"].items()},
                      ["ours", "ours, tables in files", "DGL, 65536 nodes at a time", "DGL, 4096 nodes at a time"]),
        "gpu sampling": ("sampling a batch", lambda f: f.get("median_ms", {}),
                         ["native", "torch operations", "PyG NeighborLoader"]),
        "gpu products": ("a training step, dropout 0.5", lambda f: f.get("step_ms", {}), list(labels)),
    }  # fmt: skip
    charts = []
    for what, (title, read, names) in draws.items():
        if what in found:
            times = read(found[what])
            times = {labels.get(name, name): times[name] for name in names if name in times}
            gpu = found[what]["machine"].get("gpu") if "part" in found[what] else None
            charts += [(f"{title}, {gpu}" if gpu else title, times)] if times else []
    if not charts:
        raise StoreError(f"nothing to draw in {args.files}: give what bench.py sampler, step or inference --json wrote")
    size = 4.2 * len(charts), 2.4
    figure, axes = pyplot.subplots(1, len(charts), figsize=size, layout="constrained", squeeze=False)
    for axis, (title, times) in zip(axes[0], charts):
        colors = ["C0" if name.startswith("ringblock") else "C7" for name in times]
        bars = axis.barh(list(times), [1e3 / ms for ms in times.values()], color=colors)
        texts = [f" {ms:.{0 if ms >= 10 else 2}f} ms" if ms < 1e4 else f" {ms / 1e3:.0f} s" for ms in times.values()]
        axis.bar_label(bars, texts, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.25)
        axis.tick_params(labelsize=8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("times a second (longer is faster)", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    path = args.png or "results/throughput.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {path}")
    return {}


def main(argv=None):
    """Run the command line -> exit code."""
    runs = {"sampler": bench_sampler, "step": bench_step, "link": bench_link, "overlap": bench_overlap,
            "features": bench_features, "scaling": bench_scaling, "store": bench_store, "inference": bench_inference,
            "accuracy": bench_accuracy, "labor": bench_labor, "gpu": bench_gpu, "attack": bench_attack,
            "picture": bench_picture}  # fmt: skip
    numbers = lambda text: [int(k) for k in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=list(runs))
    add("files", nargs="*", help="picture: what the others wrote with --json (default: results/*.json)")
    add("--dataset", help=f"default: {WORKLOAD}; scaling: synthetic; accuracy, labor: all of --data")
    add("--root", default="data", help="folder for built stores")
    add("--fanout", default="15,10,5", type=numbers)
    add("--batch-size", type=int, default=1024)
    add("--hidden", type=int, default=256)
    add("--threads", type=int, help="threads of every contender (default: 2; gpu: one for each core)")
    add("--rounds", type=int, help="timed rounds (default: 20; scaling: 5 runs of 4 epochs; gpu, overlap: 5)")
    add("--json", metavar="FILE", help="write the figures here as well")
    add("--larger", metavar="DATASET", help="sampler: also compare the cost of an edge on this larger graph")
    add("--shared", default="synthetic:nodes=2500000,degree=1,features=400", metavar="DATASET",
        help="features: the store that four processes share, 4 GB")  # fmt: skip
    add("--procs", default="1,2", type=numbers, help="scaling: numbers of processes; --batch-size is their total")
    add("--gpus", action="store_true", help="scaling: a GPU for each process")
    add("--model", default="sage", choices=list(CONVS), help="inference: the model")
    add("--edges", type=int, default=10_000_000, help="store: edges to build from; their reverses are added")
    add("--features-gb", type=float, default=0.5, help="store: size of the features to train from")
    add("--cache-gb", type=float, default=0.1, help="store: size of the cache before them")
    add("--batches", type=int, default=40, help="store: batches of a training run; the first quarter is not timed")
    add("--graphbolt", metavar="PYTHON", help="store: train with GraphBolt too; the interpreter that has it")
    add("--papers", type=float, default=1, help="store: size of its part papers, 1 for that of ogbn-papers100M")
    add("--reads", type=int, default=100_000, help="store: rows to read from random places, each time")
    add("--graphs", type=int, default=50_000, help="store: number of small graphs")
    add("--data", default="../shared/data", metavar="DIR", help="accuracy, labor: folder of the real graphs")
    add("--models", metavar="A,B", help="accuracy: only these, of mlp,sage,sage-pool,gcn,gat,gin,labels")
    add("--runs", type=int, default=10, help="accuracy, labor: seeds, at least 2")
    add("--quick", action="store_true", help="gpu: tiny graphs, to rehearse; files go to gpu-quick under --root")
    add("--minutes", type=float, default=15, help="gpu, attack: time for all parts")
    add("--seed", type=int, default=0, help="attack: of the cases")
    add("--parts", metavar="A,B", help="gpu, store: only these, of those that bench_gpu.py and bench_store.py list")
    add("--out", metavar="DIR", help="gpu: folder of gpu-*.json (default: results)")
    add(
        "--png",
        metavar="FILE",
        help="where the picture goes (default: results/throughput.png; overlap: results/timeline.png)",
    )
    args = parser.parse_args(argv)
    if args.files and args.what != "picture":
        parser.error(f"{args.files[0]}: files are for picture, not for {args.what}")
    if args.runs < 2:
        parser.error(f"--runs {args.runs}: a standard deviation needs 2 or more")
    if unknown := set((args.models or "mlp").split(",")) - {"mlp", "labels", *CONVS}:
        parser.error(f"--models {','.join(sorted(unknown))}: choose from mlp,{','.join(CONVS)},labels")
    args.dataset = args.dataset or ("synthetic" if args.what == "scaling" else WORKLOAD)
    args.rounds = args.rounds or {"scaling": 5, "gpu": 5, "overlap": 5}.get(args.what, 20)
    args.threads = args.threads or (torch.get_num_threads() if args.what == "gpu" else 2)
    settle(args.threads)
    on_gpu = torch.cuda.is_available() and (args.what == "gpu" or (args.what == "scaling" and args.gpus))
    here = gpu_machine() if on_gpu else hardware()
    if args.what != "picture" and (on_gpu or args.what != "gpu"):
        where = "measured on the GPU" if on_gpu else "measured on the CPU"
        print(where, *(f"{name} {value}" for name, value in here.items()), sep="  ")
    if args.what in ("sampler", "step", "link", "overlap", "features", "inference"):
        print(f"{args.dataset}  batch {args.batch_size}  fanout {args.fanout}  {args.threads} threads  "
              f"n = {args.rounds}")  # fmt: skip
    try:
        figures = runs[args.what](args)
        keep_figures(args, here, figures)
    except (StoreError, ImportError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 1 if figures.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
