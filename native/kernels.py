"""The kernels of layers.cu for tensors of given dtypes, on a GPU and, as loops of torch's OpenMP threads, on the CPU.

    near = InEdges(indptr, indices)                     # a block's edges by destination
    code = block_kernels(near, h, out)                    # None: torch operations have to be used
    code.self_and_mean(near, h, out)
    lists = Lists.of(code, near, len(h))             # its edges by source, for the backward pass
    lists.run("max_neighbours_grad", near, grad=grad, winner=winner, N=N, width=width, ...)

layers.py puts them together. On a GPU nothing here synchronizes, and all of it can be captured in a CUDA graph.
"""

import ctypes
import functools
from typing import NamedTuple

import torch

from . import build

IDS = {torch.int32: "int", torch.int64: "i64"}
TYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
CODES = {torch.int8: "int8"}  # of 8 bits, decoded as they are read
# NaN has to stay NaN, also with a compiler whose default is fast math
FLAGS = [
    "-O3",
    "-march=native",
    "-fno-fast-math",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
]
VECTORS = {"self_and_mean": 2}  # of columns, that a GPU's thread has, where they are not one
TILE = 32  # as in layers.cu
RUN = 16  # at most this many rows of a gradient are summed by one GPU thread for the bias
ENOUGH = 1 << 21  # elements of the gradient per such row: leaves half a million threads


class InEdges(NamedTuple):
    """The edges of a block by destination, and which of the source rows are the destinations' own."""

    indptr: torch.Tensor  # [S+1]
    indices: torch.Tensor  # [E]
    self_rows: torch.Tensor | None = None  # [S], -1: none; None: the first S

    @property
    def S(self):
        return self.indptr.numel() - 1


class Scales(NamedTuple):
    """out = alpha * own row + beta * mean of gamma * row; all None: own row and mean, side by side."""

    alpha: torch.Tensor | None = None  # [S]
    beta: torch.Tensor | None = None  # [S]
    gamma: torch.Tensor | None = None  # [N]


UNSCALED = Scales()


class Dropout(NamedTuple):
    """Dropout with probability drop / 256, keyed by seed and nodes: arguments of kernels."""

    nodes: torch.Tensor | None = None  # [N]; None: 0, 1, ...
    drop: int = 0
    scale: float = 1.0
    seed: int = 0
    step: torch.Tensor | None = (
        None  # int64 [1] on the GPU: seed, step and layer make the seed there
    )
    layer: int = 0

    @classmethod
    def of(cls, nodes, seed, drop):
        """seed: int, or the tuple of model.py's `layer_seed` in a CUDA graph."""
        on_device = seed if isinstance(seed, tuple) else (seed,)
        return cls(nodes, drop, 256 / (256 - drop), *on_device)


def followed():
    """Return whether torch follows operations, and cannot follow kernels: in its tracer and compiler, in torch.func."""
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
    )


def functions(integers, source, target, width=0, *, steps=None):
    """Return the compiled `Code` for these tensors' dtypes, or None if torch operations have to be used.

    Args:
        integers: tensors of ids, of one dtype; None entries are ignored. source, target: input and output rows.
        width: see `program`. steps: float32 [2, F] of source rows that are codes, see `decode` of vectors.h.
    """
    integers = [t for t in integers if t is not None]
    ids = integers[0].dtype if integers else torch.int32
    device = source.device
    tensors = [*integers, *(t for t in (source, target, steps) if t is not None)]
    fits = (
        not followed()
        and ids in IDS
        and source.dtype in (TYPES if steps is None else CODES)
        and target.dtype in TYPES
        and all(
            # the last: meta tensors have no memory
            t.device == device and t.is_contiguous() and (t.data_ptr() or not t.numel())
            for t in tensors
        )
        # kernels count threads in 32 bits, columns and the elements of a block, some ahead, in 31
        and all(t.dtype == ids and t.numel() < 2e9 for t in integers)
        and source.dim() == target.dim() == 2
        and source.shape[1] < 1 << 31
        and target.numel() < 1 << 32
    )
    return load(ids, source.dtype, target.dtype, device, width) if fits else None


def block_kernels(near, source, target=None, *, own=True, nodes=None, steps=None):
    """Return `functions` for a block; None if it does not fit the source rows. target: None: a row of the source for each
    destination. own: destinations have a row there."""
    S = near.S
    target = source[:S] if target is None else target
    code = functions([*near, nodes], source, target, steps=steps)
    rows = len(source[:S]) if near.self_rows is None else near.self_rows.numel()
    fits = code and (rows == S or not own) and code.takes(near, len(source))
    return code if fits else None


def learned(*tensors):
    """Return whether a tensor needs a gradient or has a forward-mode tangent, for functions that support neither."""
    on = torch.is_grad_enabled()
    tangent = torch.autograd.forward_ad.unpack_dual
    return any(
        on and t.requires_grad or tangent(t).tangent is not None for t in tensors if t is not None
    )


class Fused(torch.autograd.Function):
    """Base of functions of kernels. `forward` keeps values by `save`; `gradients(code, values, grad)` gets them and the
    contiguous gradient, and returns what a backward pass has to. create_graph=True is refused: with once_differentiable of torch,
    torch.autograd.grad leaves the terms of second derivatives that pass through it out, in silence."""

    @classmethod
    def backward(cls, ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: kernels have no second derivatives; "
                "with model.fused = None, torch operations, gat and gine have them"
            )
        code, numbers = ctx.kept
        # once: with recomputed activations torch refuses a second time
        values = dict(zip(ctx.names, ctx.saved_tensors)) | numbers
        return cls.gradients(code, values, grad.contiguous())


@functools.cache
def load(ids, source, target, device, width=0):
    """Compile `Code` for ids, rows and results of these dtypes; None, after one warning, if that fails. width: see `program`."""
    compiled = compile_for(device, "layers", program(ids, source, target, width))
    return compiled and Code(compiled)


def compile_for(device, name, text):
    """Compile a program whose method `run` runs a kernel, for a GPU or the CPU; None, after one warning, if that fails."""
    if is_gpu(device):
        return build.load_cuda(name, text, device)
    return build.load_host(name, text, FLAGS)


@functools.cache
def load_links(ids, device):
    """Compile links.cu for node ids of this dtype, as `compile_for`."""
    return compile_for(device, "links", build.read_source("links.cu", ID=IDS[ids]))


def program(ids, source, target, width=0):
    """Return the text of layers.cu for ids, rows and results of these dtypes; with a width that of norm.cu, for a GPU."""
    types = {"ID": IDS[ids], "IN": (TYPES | CODES)[source], "OUT": TYPES[target]}
    if width:
        return build.read_source("norm.cu", WIDTH=width, **types)
    return build.read_source("layers.cu", **types)


def is_gpu(device):
    """Return whether tensors on this device use the CUDA kernels."""
    return device.type == "cuda"


def merged(records):
    """Return the arguments of kernels in NamedTuples or dicts, later ones count -> dict."""
    arguments = {}
    for record in records:
        arguments |= record if isinstance(record, dict) else record._asdict()
    return arguments


class Code:
    """The kernels of layers.cu; compiled: build.Kernels of a GPU, or the library of `load_host`."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.on_cpu = isinstance(compiled, ctypes.CDLL)
        self.columns = compiled.columns_of_a_thread() if self.on_cpu else 4

    def run(self, kernel, count, /, *records, **values):
        """Run a kernel on `count` rows, whose columns several threads share if it takes a `width`, or else in so many threads.
        It takes the arguments that its signature names. records: NamedTuples or dicts of arguments, later ones count."""
        arguments = merged((*records, values))
        if "width" in self.compiled.signatures[kernel]:
            count *= self.threads(arguments["width"], kernel)
        if not self.on_cpu and count >> 32:  # which kernels count in 32 bits
            raise RuntimeError(f"{kernel} would need {count:,} threads, and has 2^32 at most")
        self.compiled.run(kernel, count, arguments)

    def takes(self, near, N):
        """Return whether offsets and indices of a block fit N sources; a GPU is not waited for."""
        return not self.on_cpu or self.compiled.fits_block(*near, near.S, near.indices.numel(), N)

    def threads(self, width, kernel):
        """Return the number of a kernel's threads per row."""
        return -(-width // (self.columns * VECTORS.get(kernel, 1)))

    def runs(self, out):
        """Return the number of runs, and of rows in each, into which to cut out [n, F], for sums over each run's rows."""
        run = min(max(out.numel() // ENOUGH, 1), RUN)
        return {"runs": -(-len(out) // run), "run": run}

    def kept(self, h, kernel):
        """Return what the backward pass needs of h [N, F] after an activation by a kernel: on a GPU memory for a byte of bits
        for each of its threads of a row; on the CPU h itself, activated in place."""
        if self.on_cpu:
            return h
        return h.new_empty(len(h), self.threads(h.shape[1], kernel), dtype=torch.uint8)

    def self_and_mean(self, near, h, out, *, scales=UNSCALED, active=None, kept=None, steps=None):
        """Compute out [S, 2F], or out [S, F] with scales, from h [N, F] or, on a GPU, from dropout(relu(h)): `active` is its
        `Dropout`. kept: see `Code.kept`. steps: see `functions`."""
        self.run(
            "self_and_mean" if active else "plain_self_and_mean",
            len(out),
            near,
            scales,
            sizes(h, out),
            active or {},
            S=len(out),
            h=h,
            out=out,
            kept=kept,
            steps=steps,
        )

    def self_and_mean_grad(
        self, near, grad, num_src, *, scales=UNSCALED, own=True, kept=None, scale=1.0
    ):
        """Backward of `self_and_mean`: grad [S, 2F], or [S, F] with scales -> gradient [N, F] of h and a tensor with the same
        column sums. With kept it is that of h before its activation, and the tensor may be partial sums, float32 [fewer, F].
        """
        S, width = grad.shape
        if scales.alpha is None:
            width //= 2
        lists = Lists.of(self, near, num_src, beta=scales.beta)
        out = grad.new_empty(num_src, width)
        runs = {"runs": num_src, "run": 1} if kept is None else self.runs(out)
        sums = None
        if runs["run"] > 1:
            sums = grad.new_empty(runs["runs"], width, dtype=torch.float32)
        lists.run(
            "self_and_mean_grad",
            near,
            **scales._asdict(),
            **runs,
            S=S if own else 0,
            N=num_src,
            width=width,
            whole=aligned(width, grad),
            grad=grad,
            kept=kept,
            scale=scale,
            sums=sums,
            out=out,
        )
        return out, out if sums is None else sums

    def relu_dropout(self, h, active, out=None, *, kept=None, relu=1):
        """Apply ReLU, unless relu is 0, and `Dropout` to h [S, D], in place or into `out`; kept: see `Code.kept`."""
        out = h if out is None else out
        self.run("relu_dropout", len(h), active, sizes(h, out), h=h, relu=relu, kept=kept, out=out)

    def edge_matrix_grad(self, values, **more):
        """Compute the gradient [d, K width] of the matrix `by` that multiplies edge features; for the values see the
        kernel."""
        runs = 1024
        by = values["by"]
        to_by = by.new_empty(runs, *by.shape)
        self.run("edge_matrix_grad", runs * values["K"], values, more, runs=runs, to_by=to_by)
        return to_by.sum(0)


def sizes(rows, *others):
    """Return the sizes of rows [S, width] as arguments; whole: of `aligned`, for these and others."""
    S, width = rows.shape
    return {"S": S, "width": width, "whole": aligned(width, rows, *others)}


def save(ctx, code, *records, **numbers):
    """Keep arguments of kernels for `Fused.gradients`. records: NamedTuples or dicts of tensors, which torch saves: it refuses
    a backward pass after a change of them."""
    tensors = merged(records)
    ctx.names = [*tensors]
    ctx.kept = code, numbers
    ctx.save_for_backward(*tensors.values())


def from_values(kind, values):
    """Make a NamedTuple of this kind of {name: value}."""
    return kind(*map(values.get, kind._fields))


def aligned(width, *rows):
    """Return 1 if all rows start on a 16-byte boundary, so that kernels may read 16 bytes at once; ignored on CPU."""
    return int(width % 4 == 0 and all(t.data_ptr() % 16 == 0 for t in rows))


def destinations(code, near):
    """Compute the destination of each edge -> int32 [E]; a static block's are at hand once it has `Lists`."""
    indices = near.indices
    if is_static(near) and indices.lists:
        return indices.lists.arrays["dst"]
    out = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    code.run("destinations", near.S, near, S=near.S, dst=out)
    return out


class Lists:
    """The edges of a block by source, each source's in their order.

    A block at a fixed address (`static`) keeps its lists in an attribute of its indices. They follow from the block alone, so
    whoever samples into the block also lists its edges (`use`) and puts them in order, not each step on it, unless their shares
    are of a beta that the step computes.

    Attributes:
        weighted: whether there is a beta.
        arrays: arguments of kernels. By source: start [N + 1], end [1], size [N], and of each edge destination, edge and
            share [E] (beta [S] or 1, over the destination's edges). list [E]: edges of each source in any order. dst [E]: the
            destination of each edge of the block. All are int32 but for the share, float32.
    """

    @classmethod
    def of(cls, code, near, num_src, dst=None, *, beta=None):
        """Return the lists of a block, its own if it is static. dst: its `destinations`, if they are at hand."""
        indices = near.indices
        if not is_static(near):
            return cls(code, near, num_src, dst, beta=beta)
        if indices.lists is None:
            indices.lists = cls(code, near, num_src, beta=beta)
        lists = indices.lists
        lists.weighted |= beta is not None
        if lists.weighted:  # by another layer, perhaps
            lists.put_in_order(near, beta)
        return lists

    def __init__(self, code, near, num_src, dst=None, *, beta=None):
        self.code = code
        self.weighted = beta is not None
        indptr, indices, _ = near
        E = indices.numel()
        sizes = torch.zeros(num_src + 1, dtype=torch.int32, device=indices.device)
        start = torch.empty_like(sizes)
        slot, *arrays = sizes.new_empty(5, E)
        dst = destinations(code, near) if dst is None else dst
        self.use(dst, sizes, start, arrays)
        if code.on_cpu:
            code.compiled.list_by_source(
                indptr, indices, dst, E, num_src, start, sizes[1:], beta, *arrays[1:]
            )
            return
        values = {"S": near.S, "slot": slot, **self.arrays}
        code.run("list_sizes", E, near, values)
        torch.cumsum(sizes, 0, dtype=torch.int32, out=start)
        code.run("list_edges", E, near, values)
        self.put_in_order(near, beta)

    def use(self, dst, sizes, start, arrays):
        """Take the memory in which a sampler counts the block's edges and lists them: int32 arrays [4, E] of edges in any
        order, then destinations, edges and shares in order."""
        unordered, destination, edge, share = arrays
        self.arrays = {
            "dst": dst,
            "list": unordered,
            "start": start,
            "end": start[-1:],
            "size": sizes[1:],
            "destination": destination,
            "edge": edge,
            "share": share.view(torch.float32),
        }

    def run(self, kernel, near, *, heads=1, columns=0, **values):
        """Run a kernel that sums over the lists, on a GPU first on tiles of them: see layers.cu. columns: of a tile's sums, if
        they are not `width`."""
        values |= {**near._asdict(), **self.arrays, "tile_sums": None, "tiles": None}
        if not self.code.on_cpu:
            tiles = near.indices.numel() // TILE + 1
            sums = values["share"].new_empty(tiles, columns or values["width"])
            self.code.run(
                kernel,
                tiles * heads,
                values,
                S=0,
                N=tiles,
                runs=tiles,
                run=1,
                kept=None,
                sums=None,
                tiles=sums,
            )
            values["tile_sums"] = sums
        self.code.run(kernel, values.get("runs", values["N"]) * heads, values)

    def put_in_order(self, near, beta=None):
        """Order each source's edges, and compute their shares."""
        E = near.indices.numel()
        self.code.run("list_in_order", E, near, self.arrays, E=E, beta=beta)


def static(block):
    """Let a block of sampler.py at a fixed address, which is sampled into again and again, keep its `Lists`."""
    block.indices.lists = None
    block.indices.offsets = block.indptr.data_ptr()


def is_static(near):
    """Return whether these are the edges of a `static` block: other offsets may be given for its indices."""
    return getattr(near.indices, "offsets", None) == near.indptr.data_ptr()
