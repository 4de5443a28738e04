"""Memory that training needs in each mode: python store.py estimate PATH --gpus 4 --fanout 15,10,5"""

import torch

from disk.files import free_host_bytes, readable_size
from run.cuda_graphs import hops_held
from run.edge_data import edge_data
from run.flags import changed, make_parser, spelled
from run.plan import estimate
from store import BACKENDS, GraphStore
from tasks.node import NodeTask


def estimate_lines(path, free_gpu=None, **flags) -> str:
    """Return what `python store.py estimate` prints: sizes on disk, memory of each mode, the mode to choose.
    flags: some of train.py's, --fanout among them; free_gpu: as for `estimate`, None: of this machine's GPU, if any."""
    graph, size = GraphStore.open(path), readable_size
    words = [spelled(name, value, "=") for name, value in flags.items()]
    args = changed(make_parser().parse_args(words), trains=True)
    flags = {name: getattr(args, name) for name in flags}
    if free_gpu is None and torch.cuda.is_available():
        free_gpu = torch.cuda.mem_get_info()[0]
    free_host = free_host_bytes()
    graphs = hops_held(args, graph, edge_data(args, NodeTask, graph)[0])
    cores = torch.get_num_threads() // (args.gpus or args.procs)
    known = {"graphs": graphs, "cores": cores, "free_gpu": free_gpu, "free_host": free_host}
    modes, best = estimate(graph, **known, **flags)
    up_to = {m: f"; batches of up to {f.largest_batch:,} seeds fit" for m, f in modes.items()}
    disk = {name: record["bytes"] for name, record in graph.meta["files"].items()}
    features = disk.pop(BACKENDS[graph.meta["backend"]])
    arrays = modes["pinned-cuda"].placement.shared
    where = "the mapped file stays in it"
    if arrays > free_host:
        where = "rows are read from the mapped file's disk, behind --cache"
    if graph.indices.nbytes > free_host // 2:
        where += f", and neighbour lists as they are sampled ({size(graph.indices.nbytes)})"
    free = f"graph and features take {size(arrays)} and {size(free_host)} of host memory are free"
    shapes = "static shapes, for CUDA graphs, in cuda-cuda and pinned-cuda"
    lines = {
        "on disk": f"graph {size(sum(disk.values()))}, features {size(features)}",
        **{m: f.line + (up_to[m] if f.largest_batch else "") for m, f in modes.items()},
        "mode": best or "none fits (--free-gpu GB asks about another machine's GPUs)",
        "steps": f"of {shapes if graphs else 'the shapes of their batches'}",
        "features": f"mmap: {free}: {where}; lmdb is for rows that change while others read them",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())
