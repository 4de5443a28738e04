"""Memory that training needs in each mode: python store.py estimate PATH --gpus 4 --fanout 15,10,5"""

from disk.files import readable_size
from run.edge_data import edge_data
from run.flags import changed, make_parser, spelled, text_of
from run.plan import estimate
from run.step_graph import hops_held
from store import BACKENDS, GraphStore, free_host_bytes
from tasks.node import NodeTask


def estimate_lines(path, free_gpu=None, free_host=None, **flags) -> str:
    """Return what `python store.py estimate` prints: sizes on disk, memory of each mode, the mode to choose.
    flags: train.py's, --fanout among them, parsed or as typed; free_gpu, free_host: see `estimate`."""
    graph = GraphStore.open(path)
    words = [f"{spelled(name)}={text_of(value)}" for name, value in flags.items()]
    args = changed(make_parser().parse_args(words), trains=True)
    free_host = free_host_bytes() if free_host is None else free_host
    flags = {name: getattr(args, name) for name in flags}
    graphs = hops_held(args, graph, edge_data(args, NodeTask, graph)[0])
    room = {"free_gpu": free_gpu, "free_host": free_host}
    modes, best = estimate(graph, graphs=graphs, **room, **flags)
    disk = {name: record["bytes"] for name, record in graph.meta["files"].items()}
    features, size = disk.pop(BACKENDS[graph.meta["backend"]]), readable_size
    up_to = {m: f"; batches of up to {f.largest_batch:,} seeds fit" for m, f in modes.items()}
    fits = {m: f.line + (up_to[m] if f.largest_batch else "") for m, f in modes.items()}
    none = "none fits (--free-gpu GB asks about another machine's GPUs)"
    shapes = "static shapes, for CUDA graphs, in cuda-cuda and pinned-cuda"
    arrays, where = modes["pinned-cuda"].placement.shared, "the mapped file stays in it"
    if arrays > free_host:
        where = "rows are read from the mapped file's disk, behind --cache"
    if graph.indices.nbytes > free_host // 2:
        where += f", and neighbour lists as they are sampled ({size(graph.indices.nbytes)})"
    free = f"graph and features take {size(arrays)} and {size(free_host)} of host memory are free"
    lines = {
        "on disk": f"graph {size(sum(disk.values()))}, features {size(features)}",
        **fits,
        "mode": best or none,
        "steps": f"of {shapes if graphs else 'the shapes of their batches'}",
        "features": f"mmap: {free}: {where}; lmdb is for rows that change while others read them",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())
