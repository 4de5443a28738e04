"""Exact inference layer by layer: all nodes of a graph, all their neighbours, in bounded memory.

    logits = inference(model, indptr, indices, x)                 # float32 [V, C]
    h = inference(model, indptr, indices, x, layers=1)            # what the first layer makes of it
    degrees = graph_degrees(indptr, indices)                      # float32 [V, 2]

A model has `layers`, of the kind that `Conv` of model.py describes, and `finish`, which follows each of them. This file
needs nothing but torch; model.py needs it.

Letters: V nodes and M edges of the graph; S destinations, E edges of a chunk; F, D feature widths; C classes.
"""

import copy
import mmap
import os
import tempfile

import torch


def graph_degrees(indptr, indices, step=1 << 24):
    """Out- and in-degree of every node -> float32 [V, 2], in host memory; reads `step` edges at a time.

    Raises:
        IndexError: where indices holds what is no node.
    """
    out = torch.zeros(indptr.numel() - 1, dtype=torch.int64, device=indices.device)
    for part in indices.split(step):
        _check_nodes(part, out.numel())
        out += torch.bincount(part, minlength=out.numel())
    return torch.stack([out.cpu(), indptr.diff().cpu()], 1).float()


def _check_nodes(ids, V):
    """Raise IndexError unless ids [E], read from a graph that nobody has checked, are nodes."""
    low, high = (int(node) for node in ids.aminmax()) if ids.numel() else (0, -1)
    if low < 0 or high >= V:
        bad = low if low < 0 else high
        raise IndexError(f"the graph is damaged: indices holds {bad}, and its nodes are 0 to {V - 1}")


@torch.no_grad()
def inference(model, indptr, indices, x, *, chunk=65536, chunk_edges=1 << 22, memory=4 << 30, rank=0, world=1,
              total=None, layers=None, edges=None):  # fmt: skip
    """Exact predictions for all nodes from all their neighbours, layer by layer.

    Beside the graph and the features there are at most three float32 tables [V, width] at a time: a layer's input, its
    messages and its output. Everything else belongs to one chunk of destinations; on CPU a node of any degree takes no
    more than its list of edges (with "gat" also a few numbers a head and edge). A layer runs where the model is if its
    messages fit there, else on the CPU.

    Args:
        model: a GNN. indptr: int64 [V+1], indices: [M]: the graph, in host memory.
        x: [V, F] features: a tensor on any device, an array, or an object with .shape and .gather(ids).
        chunk, chunk_edges: destinations and edges handled at a time; a node with more edges is a chunk of its own.
        memory: bytes of host memory for the tables. A layer that needs more keeps them in temporary files without a
            name, memory-mapped, in the system's folder for such files (the variable TMPDIR).
        rank, world: with several processes on this machine, each calls this with the same arguments and its own rank,
            and computes a part of the destinations of every layer. Linux only.
        total: with several processes, a function that sums numbers over them and returns the sums to each (an
            all-reduce; `Ranks.sum` of ddp.py on one machine).
        layers: how many of the first layers to compute; all when None.
        edges: [M, D] features of the edges, a row for each of `indices`, for layers with an edge_dim.

    Returns:
        Logits float32 [V, C] in host memory, the same memory in all processes; with `layers` the output of the last of
        these, [V, hidden], with its norm and ReLU.

    Raises:
        ValueError: for features of another number of nodes.
        IndexError: where the graph is damaged: a list or an edge leaves it.
        OSError: where there is no room for the tables.
    """
    indptr, indices = torch.as_tensor(indptr), torch.as_tensor(indices)
    training, device, V, M = model.training, next(model.parameters()).device, indptr.numel() - 1, int(indptr[-1])
    if x.shape[0] != V:
        raise ValueError(f"x has {x.shape[0]} rows, indptr is of {V} nodes: a row for each node is needed")
    model.eval()
    on_cpu = model if device.type == "cpu" else copy.deepcopy(model).cpu()
    degrees = getattr(model, "degrees", None)
    if any(layer.uses_degree for layer in model.layers):
        whole = degrees is None or callable(degrees)  # a function is for blocks
        degrees = (graph_degrees(indptr, indices) if whole else degrees).float()
    ends = [int(torch.searchsorted(indptr, M * r // world)) for r in range(1, world)]  # ranks get as many edges each
    first, last = ([0, *ends, V][i] for i in (rank, rank + 1))
    h = x if hasattr(x, "gather") else torch.as_tensor(x)
    edges = edges if edges is None or hasattr(edges, "gather") else torch.as_tensor(edges)
    for i, layer in enumerate(model.layers[:layers]):
        width = layer.message_dim or h.shape[1]
        table = _tables(V, h.shape[1] + width + layer.out_dim, memory, rank == 0, total)
        message = h
        if layer.message_dim or not isinstance(h, torch.Tensor) or h.dtype != torch.float32:
            message = table(width)
            for a in range(first, last, chunk):
                b = min(a + chunk, last)
                degree = degrees[a:b].to(device) if layer.uses_degree else None
                message[a:b] = layer.message(_rows(h, a, b, device), degree)
            if total:
                total(0)  # a barrier: the messages of all processes are there
        out, message = table(layer.out_dim), message.to(_place_for(message, device))
        on = message.device
        network = model if on == device else on_cpu
        for a, b in _cut(indptr, first, last, chunk, chunk_edges):
            first_edge, last_edge = int(indptr[a]), int(indptr[b])
            sources, offsets = indices[first_edge:last_edge], indptr[a : b + 1] - indptr[a]
            _check_nodes(sources, V)
            if int(offsets[-1]) != sources.numel() or bool((offsets.diff() < 0).any()):
                raise IndexError(f"the graph is damaged: a list of nodes {a} to {b - 1} in indptr leaves it or falls")
            sources, own = sources.to(on), torch.arange(a, b, dtype=sources.dtype, device=on)
            offsets = offsets.to(sources)
            degree = degrees[a:b].to(on) if layer.uses_degree else None
            h_dst = _rows(h, a, b, on)
            more = {"edges": _rows(edges, first_edge, last_edge, on)} if layer.edge_dim else {}
            result = network.layers[i].combine(offsets, sources, message, own, h_dst, degree, **more)
            out[a:b] = network.finish(i, result, h_dst)
        if total:
            total(0)  # a barrier: the rows of all processes are there
        h = out
    model.train(training)
    return h


def _rows(table, a, b, device):
    """Rows a .. b - 1 of a tensor or of features, in float32 on a device."""
    rows = table[a:b] if isinstance(table, torch.Tensor) else table.gather(torch.arange(a, b))
    return rows.to(device, torch.float32)


def _place_for(table, device):
    """The device where a layer with these messages runs: the model's if they fit there, else the CPU."""
    if table.device == device or device.type != "cuda":
        return device
    return device if table.nbytes < 0.8 * torch.cuda.mem_get_info(device)[0] else torch.device("cpu")


def _cut(indptr, first, last, chunk, chunk_edges):
    """Cut nodes first .. last - 1 into chunks (a, b) of at most `chunk` nodes and `chunk_edges` edges, or one node."""
    while first < last:
        fits = int(torch.searchsorted(indptr, int(indptr[first]) + chunk_edges, right=True)) - 1
        end = min(first + chunk, max(fits, first + 1), last)
        yield first, end
        first = end


def _tables(rows, columns, memory, leads, total):
    """A function of a width that makes a float32 table [rows, width]; in a temporary file if tables of `columns`
    columns in all exceed `memory`.

    With `total` it is one table for all processes that call: they open the leader's memory or file by its number while
    the leader waits. Memory without a name (memfd) and a file without a name are both gone with the last process that
    maps them.
    """
    in_memory = 4 * rows * columns <= memory

    def table(width):
        if in_memory and not total or not rows * width:
            return torch.empty(rows, width)
        size, handle = 4 * rows * width, 0
        if leads and in_memory:
            handle = os.memfd_create("ringblock")
            os.ftruncate(handle, size)
        elif leads:
            handle = _nameless_file(size)
        if total:
            leader, number = (int(n) for n in total(os.getpid() if leads else 0, handle))
            handle = handle if leads else os.open(f"/proc/{leader}/fd/{number}", os.O_RDWR)
        mapped = mmap.mmap(handle, size)
        if total:
            total(0)  # a barrier: every process has opened the leader's
        os.close(handle)
        return torch.frombuffer(mapped, dtype=torch.float32).view(rows, width)

    return table


def _nameless_file(size):
    """A temporary file of `size` bytes that has no name -> its handle, which the caller closes."""
    with tempfile.TemporaryFile(prefix="ringblock-") as file:
        try:
            if hasattr(os, "posix_fallocate"):  # with its blocks: a write through mmap to a full disk ends the process
                os.posix_fallocate(file.fileno(), 0, size)
            os.ftruncate(file.fileno(), size)
        except OSError as error:
            where = f"{size / 1e9:.1f} GB for a layer's rows in {tempfile.gettempdir()}"
            said = f"no room for {where}: set TMPDIR to a larger disk ({error.strerror})"
            raise OSError(error.errno, said) from error
        return os.dup(file.fileno())
