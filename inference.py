"""Exact inference: outputs for all nodes from all their neighbours, layer by layer, in bounded memory.

Copy this file and model.py into your own code: they need only torch.

    logits = inference(model, indptr, indices, x)   # [V, C], of all V nodes
"""

import copy
import inspect
import mmap
import os
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor, nn

try:
    from model import GNN, Conv, Near, check_edges, check_nodes, graph_degrees, hooked, is_gnn
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
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(of, Conv) for of in layers):
        return False
    for layer in layers:
        defined = (vars(kind).keys() for kind in type(layer).__mro__)
        first = next(names for names in defined if {"forward", "message", "combine"} & names)
        if not {"message", "combine"} & first:
            return False
    try:
        inspect.signature(model.finish).bind(0, None, None)
    except (AttributeError, TypeError):  # there is none, or another one
        return False
    return not hooked(model, *layers) and (is_gnn(model) or not isinstance(model, GNN))


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
            with `inputs` only of the first nodes, those with features.
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
    check_network(model, len(indptr) - 1)
    if any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    h = checked_features(model, x, len(indptr) - 1)
    graph = checked_graph(model, indptr, indices, edges=edges, types=types)
    # cut the nodes into ranks' parts with equal numbers of edges
    shares = [int(graph.indptr[-1]) * r // world for r in range(1, world)]
    ends = [int(torch.searchsorted(graph.indptr, share)) for share in shares]
    bounds = [0, *ends, len(graph.indptr) - 1]
    part = Part(bounds[rank], bounds[rank + 1], chunk, chunk_edges)
    tables = Tables(bounds[-1], memory, rank, total)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        run = Layerwise(model, graph, part, tables)
        if getattr(model, "inputs", None) is not None:
            h = run.embedded(h)
        for i in range(len(model.layers[:layers])):
            h = run.layer(i, h)
    finally:  # also after an error
        for module, training in modes:
            module.train(training)
    return h


def check_network(model, num_nodes):
    """Raise ValueError unless a network is `layerwise`."""
    if not layerwise(model):
        needs = "finish(i, h, h_dst), `layers` of Conv without hooks, and no forward, embed or step overridden alone"
        needs += "; pass the network in a wrapper, not the wrapper"
        nodes = f"torch.arange({num_nodes})"
        batches = f"NodeLoader(graph, {nodes}, [-1, -1], shuffle=False), a -1 for each layer"
        needs += f"; any other network runs in batches of {batches}"
        raise ValueError(f"inference goes layer by layer: {type(model).__name__} needs {needs}")


def checked_features(model, x, num_nodes):
    """Return features as a tensor in host memory, or the object with gather; ValueError unless they fit the network."""
    dense = getattr(x, "layout", torch.strided) == torch.strided
    if not dense or not (hasattr(x, "gather") or hasattr(x, "__array_interface__")):
        kind = f"{type(x).__name__}, sparse" if not dense else type(x).__name__
        raise ValueError(f"x is a {kind}: a dense tensor or array [V, F] is needed")
    rows = x.shape[0]
    inputs = getattr(model, "inputs", None)
    if rows != num_nodes and (inputs is None or len(inputs.linears) and rows < inputs.first):
        sizes = f"x has {rows} rows, indptr is of {num_nodes} nodes"
        raise ValueError(f"{sizes}: a row for each node is needed")
    return x if hasattr(x, "gather") else _on_host(x)


class Graph(NamedTuple):
    """A graph in host memory, and what layers use of it."""

    indptr: Tensor  # int64 [V+1]
    indices: Tensor  # [M]
    degrees: Tensor | None  # [V, 2], if a layer uses them
    edges: (
        object  # [M, D] features of edges, a tensor or an object with gather; None: there are none
    )
    types: Tensor | None  # [M]


def checked_graph(model, indptr, indices, *, edges, types):
    """Return the `Graph`; ValueError unless edges and types have a row for each edge, if layers use them."""
    indptr = _on_host(indptr)
    indices = _on_host(indices)
    if edges is not None and not hasattr(edges, "gather"):
        edges = _on_host(edges)
    for layer in model.layers:
        if layer.edge_dim:
            check_edges(edges, len(indices), layer.edge_dim)
    if types is not None:
        types = _on_host(types)
        if types.shape[0] != len(indices):
            raise ValueError(f"types has {types.shape[0]} rows, the graph has {len(indices)} edges")
    degrees = None
    if any(layer.uses_degree for layer in model.layers):
        # model.degrees may be of another graph, or a function of blocks
        degrees = graph_degrees(indptr, indices)
    return Graph(indptr, indices, degrees, edges, types)


class Part(NamedTuple):
    """The nodes that this process computes, first .. last - 1, and how many at a time."""

    first: int
    last: int
    chunk: int
    chunk_edges: int

    def chunks(self):
        """Yield the nodes a .. b - 1 of each chunk."""
        for a in range(self.first, self.last, self.chunk):
            yield a, min(a + self.chunk, self.last)

    def chunks_of_edges(self, indptr):
        """Yield the nodes a .. b - 1 of chunks with at most `chunk_edges` edges, or one node."""
        a = self.first
        while a < self.last:
            most = int(indptr[a]) + self.chunk_edges
            fits = int(torch.searchsorted(indptr, most, right=True)) - 1
            b = min(a + self.chunk, max(fits, a + 1), self.last)
            yield a, b
            a = b


class Layerwise:
    """A network in eval mode on a graph, of which this process computes a part."""

    def __init__(self, model, graph, part, tables):
        self.model = model
        self.graph = graph
        self.part = part
        self.tables = tables
        self.device = next(model.parameters()).device
        self.on_cpu = model if self.device.type == "cpu" else copy.deepcopy(model).cpu()

    def embedded(self, x):
        """Compute the first layer's input [V, D] from features x of the first nodes."""
        inputs = self.model.inputs
        out = self.tables.make(inputs.out_dim, self.tables.fit(inputs.out_dim))
        for a, b in self.part.chunks():
            nodes = torch.arange(a, b, device=self.device)
            end = inputs.first  # of the nodes with features
            out[a:b] = inputs(nodes, _rows(x, min(a, end), min(b, end), self.device))
        self.tables.barrier()
        return out

    def layer(self, i, h):
        """Compute layer i and what follows it, of all nodes' rows h [V, F] -> [V, D]."""
        width = self.model.layers[i].out_dim
        message, in_memory = self.messages(i, h)
        out = self.tables.make(width, in_memory)
        on = self.device
        if message.device != on and on.type == "cuda":
            torch.cuda.empty_cache()  # or what torch keeps counts as used
            fits = message.nbytes < 0.8 * torch.cuda.mem_get_info(on)[0]
            on = on if fits else torch.device("cpu")
        message = message.to(on)
        network = self.model if on == self.device else self.on_cpu
        layer = network.layers[i]
        for a, b in self.part.chunks_of_edges(self.graph.indptr):
            near = self.near(layer, a, b, message, _rows(h, a, b, on))
            out[a:b] = network.finish(i, layer.combine(near), near.own)
        self.tables.barrier()
        return out

    def messages(self, i, h):
        """Compute the messages [V, width] of layer i -> (messages, whether this layer's tables are in memory)."""
        layer = self.model.layers[i]
        none = _rows(h, 0, 0, self.device)
        sent = layer.message(none, self.degree(layer, 0, 0, self.device))
        in_memory = self.tables.fit(h.shape[1] + sent.shape[1] + layer.out_dim)
        if sent is none and isinstance(h, torch.Tensor) and h.dtype == torch.float32:
            return h, in_memory
        message = self.tables.make(sent.shape[1], in_memory)
        for a, b in self.part.chunks():
            degree = self.degree(layer, a, b, self.device)
            message[a:b] = layer.message(_rows(h, a, b, self.device), degree)
        self.tables.barrier()
        return message, in_memory

    def near(self, layer, a, b, message, own):
        """Return what a layer combines for nodes a .. b - 1, whose rows are `own`, on the messages' device."""
        on = message.device
        indptr, indices = _lists(self.graph, a, b, on)
        ends = int(self.graph.indptr[a]), int(self.graph.indptr[b])
        types = None
        if layer.uses_types and self.graph.types is not None:
            types = self.graph.types[slice(*ends)].to(on)
        return Near(
            indptr,
            indices,
            sent=message,
            own=own,
            self_rows=torch.arange(a, b, dtype=indices.dtype, device=on),
            degree=self.degree(layer, a, b, on),
            edges=_rows(self.graph.edges, *ends, on) if layer.edge_dim else None,
            types=types,
        )

    def degree(self, layer, a, b, on):
        """Return the degrees [b - a, 2] of nodes a .. b - 1 for a layer that uses them, else None."""
        return self.graph.degrees[a:b].to(on) if layer.uses_degree else None


def _on_host(values):
    return torch.as_tensor(values, device="cpu")  # whatever the default device is


def _lists(graph, a, b, device):
    """Read and check the neighbour lists of nodes a .. b - 1 -> (offsets [b - a + 1], sources), in indices' dtype."""
    sources = graph.indices[int(graph.indptr[a]) : int(graph.indptr[b])]
    offsets = graph.indptr[a : b + 1] - graph.indptr[a]
    check_nodes(sources, graph.indptr.numel() - 1)
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


class Tables:
    """Makes tables float32 [num_rows, width], in memory or in temporary files. With `total` processes share them: they
    open the memory or file of rank 0, which has no name and disappears with the last process that maps it."""

    def __init__(self, num_rows, memory, rank, total):
        self.num_rows = num_rows
        self.memory = memory
        self.rank = rank
        self.total = total

    def fit(self, columns):
        """Return whether so many columns may be in memory."""
        return 4 * self.num_rows * columns <= self.memory

    def barrier(self):
        """Wait for the other processes, for example until their rows are written."""
        if self.total is not None:
            self.total(0)

    def make(self, width, in_memory):
        """Make a table of this width."""
        size = 4 * self.num_rows * width
        if in_memory and self.total is None or not size:
            return torch.empty(self.num_rows, width, dtype=torch.float32, device="cpu")
        process = handle = 0
        if self.rank == 0:
            process = os.getpid()
            handle = os.memfd_create("ringblock") if in_memory else _nameless_file(size)
            os.ftruncate(handle, size)
        if self.total is not None:
            leader, number = (int(n) for n in self.total(process, handle))
            handle = handle if self.rank == 0 else os.open(f"/proc/{leader}/fd/{number}", os.O_RDWR)
        mapped = mmap.mmap(handle, size)
        self.barrier()  # every process has opened the handle of rank 0
        os.close(handle)
        return torch.frombuffer(mapped, dtype=torch.float32).view(self.num_rows, width)


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
