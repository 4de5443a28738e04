"""Benchmarks, side by side: all contenders on the same graph, timed in turn.

    python -m bench sampler                      # this sampler beside DGL's; GraphBolt's with --graphbolt PYTHON
    python -m bench step                         # a training step beside DGL's, and what each trick is worth; --model gat and others
    python -m bench layers --fanout 10,10,10 --hidden 128 --dataset synthetic    # every model's layers beside DGL's, PyG's
    python -m bench link --dataset synthetic:nodes=500000,degree=50,features=100,classes=47    # beside DGL's
    python -m bench scaling --procs 1,2,4        # epochs of train.py by number of processes, same total batch
    python -m bench store                        # building, training from disk
    python -m bench inference --rounds 3         # exact inference beside DGL's layer-wise loop; --model gat and others
    python -m bench accuracy --threads 1         # ten seeds on real graphs beside published figures; --dataset cora
    python -m bench defaults --runs 3 --threads 1    # default flags on nodes, links, graphs, beside published figures
    python -m bench labor --fanout 5,5 --runs 5  # accuracy with LABOR and its dependent draws
    python -m bench types --runs 20 --threads 1  # R-GCN on AIFB beside its paper
    python -m bench mag --fanout 25,20 --hidden 128    # R-GCN on ogbn-mag's shape, beside GraphBolt's with --graphbolt PYTHON
    python -m bench roofline                     # lower bounds for a step's kernels on H100 and H200; needs no GPU
    python -m bench predict                      # what limits our kernels on an H200, and how long they take; needs no GPU
    python -m bench gpu                          # on a CUDA GPU: all what only a GPU can tell, in 4 minutes
    python -m bench attack --minutes 10          # outcomes of damaged stores, odd inputs, forged checkpoints, kill -9
    python -m bench picture                      # plots throughput beside DGL's, from the files of results/

Contenders that cannot be imported are skipped, with the reason. GraphBolt needs the torch that DGL was built for:

    python3 -m venv graphbolt && graphbolt/bin/pip install torch==2.2.1 dgl==2.1.0 torchdata==0.7.1 "numpy<2" \\
        pandas pydantic pyyaml lmdb tqdm setuptools==69.5.1
    python -m bench sampler --graphbolt graphbolt/bin/python

PyG's NeighborLoader needs torch-sparse, which is compiled for some twenty minutes:

    python3 -m venv pyg && pyg/bin/pip install torch==2.13.0 torch_geometric scipy lmdb tqdm setuptools wheel
    pyg/bin/pip install --no-build-isolation torch-scatter torch-sparse

Times are medians over --rounds; results/README.md has the figures of one machine.
"""

import importlib
import sys

from disk import terminal

if __name__ == "__main__":
    terminal.begin()

import torch

from bench.tools import hardware, settle, write_figures
from disk.files import StoreError, plural
from run.allocator import keep_freed_memory
from run.kinds import plain_layers, positive

WORKLOAD = "synthetic:nodes=2449029,degree=50,features=100,classes=47"  # the size of ogbn-products
DATASETS = {
    "scaling": "synthetic",
    "accuracy": "all",
    "labor": "all",
    "mag": "synthetic-mag:scale=1,classes=349",
}
# command: the module with its bench_COMMAND
MODULES = {
    **{name: name for name in "sampler store defaults roofline predict gpu attack picture".split()},
    **dict.fromkeys(("step", "link", "mag", "scaling"), "step"),
    **dict.fromkeys(("inference", "layers"), "inference"),
    **dict.fromkeys(("accuracy", "labor", "types"), "accuracy"),
}
whole = positive(int)
size = positive(float, zero=True)


def numbers(text):
    """Parse '15,10' -> [15, 10]."""
    return [whole(k) for k in text.split(",")]


def make_parser():
    parser = terminal.Parser("python -m bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("what", choices=list(MODULES))
    add("--dataset", help=f"default: {WORKLOAD}; " + "; ".join(map(": ".join, DATASETS.items())))
    add("--root", default="data", help="folder for built stores")
    add("--fanout", default="15,10,5", type=numbers)
    add("--batch-size", type=whole, default=1024)
    add("--hidden", type=whole, default=256)
    add("--threads", type=whole, help="threads of every contender (default: 2; gpu: one per core)")
    add("--rounds", type=whole, help="timed (default: 20; scaling, gpu: 5); attack: cases per kind")
    add("--json", metavar="FILE", help="also write the figures to this file")
    # sampler, step, layers, link, inference, scaling, mag
    add("--graphbolt", metavar="PYTHON", help="sampler, store, mag: GraphBolt's interpreter")
    add("--pyg", metavar="PYTHON", help="mag: an interpreter with torch_geometric and torch-sparse")
    add("--procs", default="1,2", type=numbers, help="scaling: processes sharing one --batch-size")
    add(
        "--model",
        default="sage",
        choices=[*plain_layers()],
        help="step, link, store, roofline, inference",
    )
    add("--heads", type=whole, default=1, help="of gat (inference, predict: 4)")
    # store
    add("--edges", type=whole, default=10_000_000, help="store: edges to build; reverses are added")
    add("--features-gb", type=size, default=0.5, help="store: size of the features to train on")
    add("--cache-gb", type=size, default=0.1, help="store: size of the row cache")
    add("--batches", type=whole, default=40, help="store: per run; the first quarter is not timed")
    # accuracy, defaults, labor, types
    add("--data", default="../shared/data", metavar="DIR", help="folder of the real graphs")
    add(
        "--models",
        metavar="A,B",
        help=f"layers, predict: some of {','.join(plain_layers())}; accuracy: also mlp",
    )
    add(
        "--runs", type=whole, default=10, help="accuracy, defaults, labor, types: seeds, at least 2"
    )
    add(
        "--code", metavar="DIR", default=".", help="defaults: another checkout, whose train.py runs"
    )
    # gpu, attack
    add("--quick", action="store_true", help="gpu: rehearse on tiny graphs, in ROOT/gpu-quick")
    add("--minutes", type=size, help="time limit (default: gpu 4, attack 10)")
    add("--seed", type=int, default=0, help="attack: seed of the cases")
    add("--only", metavar="KIND", help="attack: only cases of this kind")
    add("--case", type=int, metavar="N", help="attack, with --only: one case, with all it prints")
    add("--parts", metavar="A,B", help="gpu, store, defaults: only these parts")
    return parser


def main(argv=None):
    """Run the command line -> exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    what = args.what
    gpu = what == "gpu"
    if args.runs < 2:
        parser.error(f"--runs {args.runs}: a standard deviation needs 2 or more")
    models = [*plain_layers()] if what in ("layers", "predict") else ["mlp", *plain_layers()]
    if args.models and (unknown := {*args.models.split(",")} - {*models}):
        parser.error(f"--models {','.join(sorted(unknown))}: choose from {','.join(models)}")
    if what == "scaling" and any(args.batch_size % procs for procs in args.procs):
        parser.error(f"--batch-size {args.batch_size} must be a multiple of each of --procs")
    args.dataset = args.dataset or DATASETS.get(what, WORKLOAD)
    args.rounds = args.rounds or {"scaling": 5, "gpu": 5, "attack": -1}.get(what, 20)
    if args.minutes is None:
        args.minutes = 4 if gpu else 10
    args.threads = args.threads or (torch.get_num_threads() if gpu else 2)
    settle(args.threads)
    if what not in ("picture", "gpu"):
        machine = "  ".join(f"{name} {value}" for name, value in hardware().items())
        print(f"measured on the CPU  {machine}")
    if what in ("sampler", "step", "layers", "link", "inference", "mag"):
        keep_freed_memory()  # for all contenders, as train.py does
        sizes = f"batch {args.batch_size}  fanout {args.fanout}  {plural(args.threads, 'thread')}"
        print(f"{args.dataset}  {sizes}  n = {args.rounds}")
    try:
        module = importlib.import_module(f"bench.{MODULES[what]}")
        figures = getattr(module, f"bench_{what}")(args)
        write_figures(args, figures)
    except (StoreError, ImportError, OSError) as error:
        print(f"python -m bench: {error}", file=sys.stderr)
        return 2
    return 1 if figures.get("failed") else 0


if __name__ == "__main__":
    terminal.ready()
    sys.exit(main())
