"""Exact inference: outputs for all nodes from all their neighbours, layer by layer, in bounded memory.

Copy this file and model.py into your own code: they need only torch.

    logits = inference(model, indptr, indices, x)   # [V, C], of all V nodes
"""

import copy
import functools
import inspect
import mmap
import os
import tempfile

import torch
from torch import nn

try:
    from model import GNN, Conv, check_edges, check_nodes, graph_degrees, hooked, is_gnn
except ImportError as error:
    if not (error.path and error.name == "model"):
        raise
    hides = "it hides the model.py that inference.py needs; rename it"
    raise ImportError(f"{error}: {hides}") from None


def layerwise(model):
    """Return whether `inference` can run a network layer by layer: it has finish(i, h, h_dst) and `layers` of `Conv`;
    neither it nor a layer has hooks; no layer overrides forward without message or combine; a `GNN` has its own forward,
    embed and step."""
    layers = getattr(model, "layers", None)
    ours = isinstance(layers, nn.ModuleList) and all(isinstance(layer, Conv) for layer in layers)
    ours = ours and not hooked(model, *layers)
    for layer in layers if ours else ():
        defined = (vars(kind).keys() for kind in type(layer).__mro__)
        first = next(names for names in defined if {"forward", "message", "combine"} & names)
        ours = ours and bool({"message", "combine"} & first)
    try:
        inspect.signature(model.finish).bind(0, None, None)
    except (AttributeError, TypeError):  # there is none, or another one
        return False
    return ours and (is_gnn(model) or not isinstance(model, GNN))


@torch.no_grad()
def inference(
    model,
    indptr,
    indices,
    x,
    *,
    chunk=65536,
    chunk_edges=1 << 19,
    memory=4 << 30,
    rank=0,
    world=1,
    total=None,
    layers=None,
    edges=None,
    types=None,
):
    """Compute exact predictions for all nodes from all their neighbours, layer by layer.

    Memory beside the graph and the features: at most three float32 tables [V, width] at a time, a
    layer's input, messages and output, and what one chunk of destinations needs. A layer runs on the
    model's device if its messages fit there, else on the CPU.

    Args:
        model: a network of which `layerwise` is true; computed in float32, but for torch.autocast.
        indptr: int64 [V+1], indices: [M]: the graph, in host memory.
        x: [V, F] features: a tensor on any device, an array, or an object with .shape and .gather(ids); for a network
            with node_types only of the first nodes, those with features.
        chunk, chunk_edges: destinations and edges per chunk; a node with more edges is a chunk of its
            own.
        memory: bytes of host memory for a layer's tables; beyond it they are temporary files (TMPDIR).
        rank, world: with several processes on this machine, each calls this with its rank and computes
            its part of every layer's destinations. Linux only.
        total: with several, an all-reduce of numbers over them, such as `Ranks.sum` of ddp.py.
        layers: compute only this many of the first layers; None: all.
        edges: [M, D] edge features, row for row with `indices`, for layers with an edge_dim.
        types: [M] edge types, for layers that use them.

    Returns:
        Logits float32 [V, C] in host memory, which all processes share; with `layers` the output of the
        last of these, [V, hidden], after its norm and ReLU.

    Raises:
        ValueError: if the network is another one, or x, types or edges that a layer uses have a wrong shape.
        IndexError: if the graph is damaged: an offset or a node id is out of range.
        OSError: if there is no room for the tables.
    """
    if not layerwise(model):
        needs = "finish(i, h, h_dst), `layers` of Conv without hooks, and no forward, embed or step overridden alone"
        needs += "; pass the network in a wrapper, not the wrapper"
        nodes = f"torch.arange({len(indptr) - 1})"
        batches = f"NodeLoader(graph, {nodes}, [-1, -1], shuffle=False), a -1 for each layer"
        needs += f"; any other network runs in batches of {batches}"
        raise ValueError(f"inference goes layer by layer: {type(model).__name__} needs {needs}")
    dense = getattr(x, "layout", torch.strided) == torch.strided
    if not dense or not (hasattr(x, "gather") or hasattr(x, "__array_interface__")):
        kind = f"{type(x).__name__}, sparse" if not dense else type(x).__name__
        raise ValueError(f"x is a {kind}: a dense tensor or array [V, F] is needed")
    on_host = functools.partial(torch.as_tensor, device="cpu")  # whatever the default device is
    indptr, indices = on_host(indptr), on_host(indices)
    if any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    device, V, M = next(model.parameters()).device, indptr.numel() - 1, int(indptr[-1])
    inputs = getattr(model, "inputs", None)
    if x.shape[0] != V and (inputs is None or len(inputs.linears) and x.shape[0] < inputs.first):
        sizes = f"x has {x.shape[0]} rows, indptr is of {V} nodes"
        raise ValueError(f"{sizes}: a row for each node is needed")
    edges = edges if edges is None or hasattr(edges, "gather") else on_host(edges)
    types = types if types is None else on_host(types)
    for layer in model.layers:
        if layer.edge_dim:
            check_edges(edges, len(indices), layer.edge_dim)
    if types is not None and types.shape[0] != len(indices):
        raise ValueError(f"types has {types.shape[0]} rows, the graph has {len(indices)} edges")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        on_cpu = model if device.type == "cpu" else copy.deepcopy(model).cpu()
        if any(layer.uses_degree for layer in model.layers):
            # model.degrees may be of another graph, or a function of blocks
            degrees = graph_degrees(indptr, indices)
        # cut the nodes into ranks' parts with equal numbers of edges
        ends = [int(torch.searchsorted(indptr, M * r // world)) for r in range(1, world)]
        first, last = ([0, *ends, V][i] for i in (rank, rank + 1))
        alone, total = total is None, total or (lambda *numbers: numbers)
        table = functools.partial(_table, V, rank, alone, total)
        h = x if hasattr(x, "gather") else on_host(x)
        if inputs is not None:
            out = table(inputs.out_dim, 4 * V * inputs.out_dim <= memory)
            for a in range(first, last, chunk):
                b, end = min(a + chunk, last), inputs.first  # end of the nodes with features
                nodes = torch.arange(a, b, device=device)
                out[a:b] = inputs(nodes, _rows(h, min(a, end), min(b, end), device))
            total(0)  # barrier: the rows of all processes are written
            h = out
        for i, layer in enumerate(model.layers[:layers]):
            degree = lambda a, b, on: degrees[a:b].to(on) if layer.uses_degree else None  # noqa: E731
            message, none = h, _rows(h, 0, 0, device)
            sent = layer.message(none, degree(0, 0, device))
            columns = h.shape[1] + sent.shape[1] + layer.out_dim
            in_memory = 4 * V * columns <= memory
            if sent is not none or not isinstance(h, torch.Tensor) or h.dtype != torch.float32:
                message = table(sent.shape[1], in_memory)
                for a in range(first, last, chunk):
                    b = min(a + chunk, last)
                    message[a:b] = layer.message(_rows(h, a, b, device), degree(a, b, device))
                total(0)  # barrier: the messages of all processes are written
            out, on = table(layer.out_dim, in_memory), device
            if message.device != device and device.type == "cuda":
                torch.cuda.empty_cache()  # or what torch keeps counts as used
                fits = message.nbytes < 0.8 * torch.cuda.mem_get_info(device)[0]
                on = device if fits else torch.device("cpu")
            message, network = message.to(on), model if on == device else on_cpu
            for a, b in _cut(indptr, first, last, chunk, chunk_edges):
                offsets, sources = _lists(indptr, indices, a, b, on)
                self_rows = torch.arange(a, b, dtype=sources.dtype, device=on)
                h_dst, extra = _rows(h, a, b, on), {}
                ends = int(indptr[a]), int(indptr[b])
                if layer.edge_dim:
                    extra["edges"] = _rows(edges, *ends, on)
                if layer.uses_types:
                    extra["types"] = None if types is None else types[slice(*ends)].to(on)
                lists = offsets, sources, message, self_rows, h_dst, degree(a, b, on)
                combined = network.layers[i].combine(*lists, **extra)
                out[a:b] = network.finish(i, combined, h_dst)
            total(0)  # barrier: the rows of all processes are written
            h = out
    finally:  # restore training mode, also after an error
        for module, training in modes:
            module.training = training
    return h


def _lists(indptr, indices, a, b, device):
    """Read and check the neighbour lists of nodes a .. b - 1 -> (offsets [b - a + 1], sources), in indices' dtype."""
    sources, offsets = indices[int(indptr[a]) : int(indptr[b])], indptr[a : b + 1] - indptr[a]
    check_nodes(sources, indptr.numel() - 1)
    if int(offsets[-1]) != sources.numel() or bool((offsets.diff() < 0).any()):
        where = f"an offset in indptr of nodes {a} to {b - 1} is out of range or decreases"
        raise IndexError(f"the graph is damaged: {where}")
    sources = sources.to(device)
    return offsets.to(sources), sources


def _rows(table, a, b, device):
    """Return rows a .. b - 1 of a tensor or features object, as float32 on a device."""
    is_tensor = isinstance(table, torch.Tensor)
    rows = table[a:b] if is_tensor else table.gather(torch.arange(a, b, device="cpu"))
    return rows.to(device, torch.float32)


def _cut(indptr, first, last, chunk, chunk_edges):
    """Cut nodes first .. last - 1 into chunks (a, b) of at most `chunk` nodes and `chunk_edges` edges, or one node."""
    while first < last:
        fits = int(torch.searchsorted(indptr, int(indptr[first]) + chunk_edges, right=True)) - 1
        end = min(first + chunk, max(fits, first + 1), last)
        yield first, end
        first = end


def _table(rows, rank, alone, total, width, in_memory):
    """Make a float32 table [rows, width], in memory or in a temporary file. Unless alone, processes share it: they open
    the memory or file of rank 0, which has no name and disappears with the last process that maps it."""
    if in_memory and alone or not rows * width:
        return torch.empty(rows, width, dtype=torch.float32, device="cpu")
    size, mine = 4 * rows * width, (0, 0)
    if rank == 0:
        mine = os.getpid(), os.memfd_create("ringblock") if in_memory else _nameless_file(size)
        os.ftruncate(mine[1], size)
    leader, handle = (int(n) for n in total(*mine))
    handle = handle if rank == 0 else os.open(f"/proc/{leader}/fd/{handle}", os.O_RDWR)
    mapped = mmap.mmap(handle, size)
    total(0)  # barrier: every process has opened the handle of rank 0
    os.close(handle)
    return torch.frombuffer(mapped, dtype=torch.float32).view(rows, width)


def _nameless_file(size):
    """Make a temporary file with room for `size` bytes, without a name -> its descriptor, which the caller closes."""
    with tempfile.TemporaryFile(prefix="ringblock-") as file:
        try:
            # allocate its blocks: on a full disk a write through mmap would end the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            where = f"{size / 1e9:.1f} GB for a layer's rows in {tempfile.gettempdir()}"
            reason = f"no room for {where}: set TMPDIR to a larger disk ({error.strerror})"
            raise OSError(error.errno, reason) from error
        return os.dup(file.fileno())
