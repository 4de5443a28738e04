"""Exact inference: outputs for all nodes from all their neighbours, layer by layer, in bounded memory.

Copy this file and model.py into your own code: they need only torch.

    logits = inference(model, indptr, indices, x)   # [V, C], of all V nodes
"""

import copy
import inspect
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import GNN, Conv, Neighborhood, check_nodes, graph_degrees, hooked, is_gnn

CHUNK = 65536  # destinations at a time
CHUNK_EDGES = 1 << 19
CHUNK_BYTES = 1 << 26  # of rows that are read or converted at a time
LARGEST = 1 << 35  # bytes of a chunk on a GPU, at most: kernels count elements in 32 bits


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
    chunk=None,
    chunk_edges=None,
    memory=4 << 30,
    rank=0,
    world=1,
    total=None,
    layers=None,
    edges=None,
    types=None,
):
    """Compute exact predictions for all nodes from all their neighbours, layer by layer.

    Memory beside the graph and the features: at most three float32 tables [V, width] at a time, a layer's input, messages
    and output, and what one chunk of destinations needs. A model on a GPU has the tables in its memory if they fit; if not,
    or with several processes, the messages alone; else a layer runs on the CPU. Where graph and features are on the GPU
    too, nothing is copied before the result, and the host does not wait in between.

    Args:
        model: a network of which `layerwise` is true; computed in float32, but for torch.autocast.
        indptr: int64 [V+1], indices: [M]: the graph, on any device.
        x: [V, F] features: a tensor on any device, an array, or an object with .shape and .gather(ids); for a network
            with `inputs` only of the first nodes, those with features.
        chunk, chunk_edges: destinations and edges per chunk; a node with more edges is a chunk of its own. None: 65,536 and
            524,288, and more where a GPU has room; fewer destinations if rows of x are wide and are read or converted.
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
    V = len(indptr) - 1
    check_layerwise(model, V)
    if any(p.dtype != torch.float32 for p in model.parameters()):
        model = copy.deepcopy(model).float()
    inputs = getattr(model, "inputs", None)
    h = checked_features(x, V, inputs)
    offsets = readable(indptr)
    indptr = on_host(indptr)
    indices = readable(indices)
    edges, types = checked_columns(model, len(indices), edges, types)
    first, last = checked_part(indptr, indices, rank, world)
    with evaluating(model):
        counted = any(layer.uses_degree for layer in model.layers)
        run = Layerwise(
            model=model,
            indptr=indptr,
            offsets=offsets,
            indices=indices,
            # model.degrees may be of another graph, or a function of blocks
            degrees=graph_degrees(indptr, indices).to(indices.device) if counted else None,
            edges=edges,
            types=types,
            first=first,
            last=last,
            chunk=chunk,
            chunk_edges=chunk_edges,
            tables=Tables(V, memory, rank, total),
        )
        if inputs is not None:
            h = run.embed(inputs, h)
        for i in range(len(model.layers[:layers])):
            h = run.apply(i, h)
    return on_host(h) if isinstance(h, Tensor) else h


def check_layerwise(model, V):
    """Raise ValueError unless `inference` can run a network layer by layer on a graph of V nodes."""
    if not layerwise(model):
        raise ValueError(
            f"inference goes layer by layer: {type(model).__name__} needs finish(i, h, h_dst), `layers` of Conv without "
            "hooks, and no forward, embed or step overridden alone; pass the network in a wrapper, not the wrapper; any "
            f"other network runs in batches of NodeLoader(graph, torch.arange({V}), [-1, -1], shuffle=False), a -1 for "
            "each layer"
        )


@contextmanager
def evaluating(model):
    """Put a network into eval mode for a while; then, also after an error, each module is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.train(training)


def on_host(values):
    """Return a tensor in host memory, whatever the default device is."""
    return torch.as_tensor(values, device="cpu")


def readable(values):
    """Return a tensor, None or an object with gather as it is, and an array as a tensor in host memory."""
    return values if values is None or hasattr(values, "gather") else on_host(values)


def checked_part(indptr, indices, rank, world):
    """Return the first node that a rank computes and the one after its last; IndexError if their lists are damaged."""
    # ranks' parts have equal numbers of edges
    shares = int(indptr[-1]) * torch.arange(world + 1, device="cpu") // world
    bounds = torch.searchsorted(indptr, shares)
    bounds[0] = 0  # also if offsets are damaged
    bounds[-1] = len(indptr) - 1
    first, last = bounds[rank : rank + 2].tolist()
    ends = indptr[first : last + 1]
    low, high = ends[[0, -1]].tolist()
    if low < 0 or high > len(indices) or bool((ends[1:] < ends[:-1]).any()):
        raise IndexError(
            f"the graph is damaged: an offset in indptr of nodes {first} to {last - 1} is out of range or decreases"
        )
    check_nodes(indices[low:high], len(indptr) - 1)
    return first, last


def free_bytes(device):
    """Return the bytes that torch can allocate on a GPU, None on another device."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # or what torch keeps counts as used
    return torch.cuda.mem_get_info(device)[0]


def checked_features(x, V, inputs):
    """Return x as a tensor, or an object with gather; ValueError unless it has the rows that a network with `inputs` takes."""
    layout = getattr(x, "layout", torch.strided)
    if (
        layout != torch.strided
        or not hasattr(x, "gather")
        and not hasattr(x, "__array_interface__")
    ):
        raise ValueError(
            f"x is a {type(x).__name__}, {layout}: a dense tensor or array [V, F] is needed"
        )
    rows = x.shape[0]
    if rows != V and (inputs is None or len(inputs.linears) and rows < inputs.first):
        raise ValueError(
            f"x has {rows} rows, indptr is of {V} nodes: a row for each node is needed"
        )
    return readable(x)


def checked_columns(model, M, edges, types):
    """Return edges and types as tensors; ValueError unless they have a row for each of M edges, where layers use them."""
    edges = readable(edges)
    for layer in model.layers:
        layer.seen(edges, M)
    types = readable(types)
    if types is not None and types.shape[0] != M:
        raise ValueError(f"types has {types.shape[0]} rows, the graph has {M} edges")
    return edges, types


class Place(NamedTuple):
    """Where a layer may run."""

    device: torch.device  # of the network
    tables: torch.device  # of the tables that the layer makes
    lacks: str = ""  # what GPU memory has no room for
    grow: int = 1  # factor of CHUNK and CHUNK_EDGES


class Layerwise(NamedTuple):
    """A network in eval mode on a graph."""

    model: nn.Module
    indptr: Tensor  # int64 [V+1], in host memory
    offsets: Tensor  # the same, on any device
    indices: Tensor  # [M], on any device
    degrees: Tensor | None  # [V, 2], if a layer uses them
    edges: Tensor | None  # [M, D] features of edges, or an object with gather
    types: Tensor | None  # [M]
    first: int  # of the nodes that this process computes
    last: int  # beyond them
    chunk: int | None  # nodes at a time
    chunk_edges: int | None
    tables: "Tables"

    def rows_at_once(self, table, on, grow=1):
        """Return how many nodes to handle at a time whose rows of a table are needed on a device."""
        chunk = self.chunk or CHUNK * grow
        if _float_tensor(table) and table.device == on:
            return chunk
        return max(1, min(chunk, CHUNK_BYTES // (4 * table.shape[1])))

    def fill(self, out, compute, chunk):
        """Fill a table, a chunk at a time, with compute(a, b) of nodes a .. b - 1; wait for the other processes' rows."""
        for a in range(self.first, self.last, chunk):
            b = min(a + chunk, self.last)
            out[a:b] = compute(a, b)
        self.tables.wait()
        return out

    @property
    def device(self):
        """The network's device."""
        return next(self.model.parameters()).device

    def embed(self, inputs, x):
        """Compute the first layer's input [V, D] from features x of the first nodes."""
        on = self.device
        width = inputs.out_dim
        end = inputs.first  # of the nodes with features

        def rows(a, b):
            nodes = torch.arange(a, b, device=on)
            return inputs(nodes, _rows(x, min(a, end), min(b, end), on))

        place = self.places(tables=width, messages=0, width=width)[0]
        table = self.tables.make(width, self.tables.fit(width), place.tables)
        return self.fill(table, rows, self.rows_at_once(x, on, place.grow))

    def places(self, *, tables, messages, width):
        """List where a layer may run, the fastest first.

        Args:
            tables: columns of the tables that it makes or copies to the network's device; messages: of messages alone.
            width: columns that it computes for an edge or a node, at most.
        """
        host = torch.device("cpu")
        on = self.device
        free = free_bytes(on)
        if free is None:
            return [Place(on, host)]
        column = 4 * self.tables.num_rows
        shared = self.tables.total is not None
        places = [Place(host, host, "messages, and a layer runs on the CPU")]
        if column * messages < 0.8 * free:
            lacks = "" if shared else "tables, which are in host memory"
            places.insert(0, Place(on, host, lacks))
        if shared:  # processes have to agree: they make the same tables
            return places[:1]
        left = free - column * tables
        if left > 0.2 * free:
            # torch operations hold several rows of an edge at a time
            edges = min(left // 2, LARGEST) // (16 * width)
            places.insert(0, Place(on, on, grow=max(1, edges // CHUNK_EDGES)))
        return places

    def apply(self, i, h):
        """Apply layer i and what follows it to all nodes' rows h [V, F] -> [V, D], in the first place that has room."""
        layer = self.model.layers[i]
        none = _rows(h, 0, 0, self.device)
        message = layer.message(none, self.degree(layer, 0, 0, self.device))
        width = message.shape[1]
        unchanged = message is none
        same = unchanged and _float_tensor(h)
        messages = 0 if same and h.device == self.device else width
        places = self.places(
            tables=messages + layer.out_dim,
            messages=messages,
            width=h.shape[1] + width + layer.out_dim + layer.edge_dim,
        )
        for place in places:
            if place.lacks:
                warnings.warn(
                    f"exact inference is slower: GPU memory has no room for {place.lacks}",
                    stacklevel=4,
                )
            try:
                return self.apply_at(place, i, h, unchanged, width)
            except torch.cuda.OutOfMemoryError:
                if place is places[-1]:
                    raise

    def apply_at(self, place, i, h, unchanged, width):
        """`apply` in one place; messages have this width and are `unchanged` rows of h, or not."""
        layer = self.model.layers[i]
        in_memory = self.tables.fit(h.shape[1] + width + layer.out_dim)
        make = lambda columns: self.tables.make(columns, in_memory, place.tables)  # noqa: E731
        message = h
        if not (unchanged and _float_tensor(h)):
            on = self.device
            rows = lambda a, b: layer.message(_rows(h, a, b, on), self.degree(layer, a, b, on))  # noqa: E731
            message = self.fill(make(width), rows, self.rows_at_once(h, on, place.grow))
        out = make(layer.out_dim)
        on = place.device
        message = message.to(on)
        source = message if unchanged else h
        network = self.model if on == self.device else copy.deepcopy(self.model).to(on)
        layer = network.layers[i]
        for a, b in self.chunks_of_edges(self.rows_at_once(source, on, place.grow), place.grow):
            near = self.near(layer, a, b, message, _rows(source, a, b, on))
            out[a:b] = network.finish(i, layer.combine(near), near.x_dst)
        self.tables.wait()
        return out

    def near(self, layer, a, b, message, x_dst):
        """Return what a layer combines for nodes a .. b - 1, whose rows are `x_dst`, on the messages' device."""
        on = message.device
        first = int(self.indptr[a])
        last = int(self.indptr[b])
        indices = self.indices[first:last].to(on)
        return Neighborhood(
            (self.offsets[a : b + 1].to(on) - first).to(indices.dtype),
            indices,
            message,
            x_dst,
            self_rows=torch.arange(a, b, dtype=indices.dtype, device=on),
            degree=self.degree(layer, a, b, on),
            edges=_rows(self.edges, first, last, on) if layer.edge_dim else None,
            types=self.types[first:last].to(on)
            if layer.uses_types and self.types is not None
            else None,
        )

    def degree(self, layer, a, b, device):
        """Return the degrees [b - a, 2] of nodes a .. b - 1 for a layer that uses them, else None."""
        return self.degrees[a:b].to(device) if layer.uses_degree else None

    def chunks_of_edges(self, chunk, grow):
        """Yield the nodes a .. b - 1 of chunks of at most so many nodes with at most `chunk_edges` edges, or one node."""
        a = self.first
        while a < self.last:
            most = int(self.indptr[a]) + (self.chunk_edges or CHUNK_EDGES * grow)
            fits = int(torch.searchsorted(self.indptr, most, right=True)) - 1
            b = min(a + chunk, max(fits, a + 1), self.last)
            yield a, b
            a = b


def _float_tensor(h):
    return isinstance(h, Tensor) and h.dtype == torch.float32


def _rows(table, a, b, device):
    """Return rows a .. b - 1 of a tensor or features object, as float32 on a device."""
    if isinstance(table, Tensor):
        rows = table[a:b]
    else:
        rows = table.gather(torch.arange(a, b, device="cpu"))
    return rows.to(device, torch.float32)


class Tables(NamedTuple):
    """Makes tables float32 [num_rows, width], in memory or in temporary files. With `total` processes share them: they
    open the memory or file of rank 0, which has no name and disappears with the last process that maps it."""

    num_rows: int
    memory: int  # bytes
    rank: int
    total: Callable | None  # all-reduce of numbers over the processes; None: there is one

    def fit(self, columns):
        """Return whether so many columns may be in memory."""
        return 4 * self.num_rows * columns <= self.memory

    def wait(self):
        """Wait for the other processes, for example until their rows are written."""
        if self.total is not None:
            self.total(0)

    def make(self, width, in_memory, device):
        """Make a table of this width, on a GPU or in host memory."""
        size = 4 * self.num_rows * width
        if in_memory and self.total is None or device.type != "cpu" or not size:
            return torch.empty(self.num_rows, width, dtype=torch.float32, device=device)
        process = handle = 0
        if self.rank == 0:
            process = os.getpid()
            handle = os.memfd_create("ringblock") if in_memory else _nameless_file(size)
            os.ftruncate(handle, size)
        if self.total is not None:
            leader, number = (int(n) for n in self.total(process, handle))
            handle = handle if self.rank == 0 else os.open(f"/proc/{leader}/fd/{number}", os.O_RDWR)
        mapped = mmap.mmap(handle, size)
        self.wait()  # every process has opened the handle of rank 0
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
            raise OSError(
                error.errno,
                f"no room for {size / 1e9:.1f} GB for a layer's rows in {tempfile.gettempdir()}: "
                f"set TMPDIR to a larger disk ({error.strerror})",
            ) from error
        return os.dup(file.fileno())
