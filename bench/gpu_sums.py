"""What kernels compute of a graph in GPU memory beside C and torch on the CPU, for the part law of bench gpu: links.cu, norm.cu
and aggregate.cu, of which its samples say nothing."""

import contextlib
import copy
import types
from unittest import mock

import torch

import model
from bench.tools import print_table
from extras.common_neighbours import COMMON, CommonNeighbours
from extras.edge_split import Edges
from extras.ranking import Negatives
from sampler import NeighborSampler

PAIRS = 4096  # half of them edges
ROWS = 150_000  # of norm.cu: those of a step's outermost hop but one
# Of a row whose value is within rounding of ReLU's kink the gradient differs. One wrong row of ROWS is 2.6e-3 apart.
CLOSE = 1e-3


def moved(holder, device):
    """Copy an object to a device, with its tensors and its objects'."""
    twin = copy.copy(holder)
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.to(device))
        elif hasattr(value, "__dict__"):
            setattr(twin, name, moved(value, device))
    return twin


def inputs(args, graph):
    """Make what the kernels read, in the GPU memory of a graph -> an object of tensors."""
    V = graph.shape.nodes
    M = graph.indices.numel()
    rows = ROWS // (100 if args.quick else 1)
    on = {"device": graph.indptr.device}
    order = (torch.repeat_interleave(graph.indptr.diff()) * V + graph.indices).argsort()
    edges = Edges(graph.indptr, graph.indices[order])
    some = torch.randint(M, (PAIRS // 2,), **on)
    destinations = torch.searchsorted(graph.indptr, some, right=True) - 1
    joined = torch.stack([edges.sources[some].long(), destinations], 1)
    # weights of draws are whole numbers of powers, whose last bits differ by device
    degrees = graph.indptr.diff().cpu()
    return types.SimpleNamespace(
        edges=edges,
        features=graph.features,
        seeds=graph.seeds[: args.batch_size],
        fanout=args.fanout,
        pairs=torch.cat([joined, torch.randint(V, joined.shape, **on)]),
        pair_times=torch.randint(1200, (PAIRS,), **on),
        negatives=moved(Negatives(moved(edges, "cpu"), V, degrees), on["device"]),
        common=CommonNeighbours(edges),
        timed=CommonNeighbours(edges, torch.randint(1000, (M,), **on), strict=True),
        x=torch.randn(rows, args.hidden, **on),
        residual=torch.randn(rows, args.hidden, **on),
        grad=torch.randn(rows, args.hidden, **on),
        nodes=torch.randperm(V, **on)[:rows].int(),
    )


def normed(of):
    """Compute dropout(relu(norm(x + residual))) and its gradients."""
    norm = model.LayerNorm(of.x.shape[1]).to(of.x.device)
    x = of.x.clone().requires_grad_()
    residual = of.residual.clone().requires_grad_()
    out = model.relu_dropout(x, 0.5, nodes=of.nodes, seed=1, norm=norm, residual=residual)
    out.backward(of.grad)
    return out.detach(), x.grad, residual.grad, norm.weight.grad, norm.bias.grad


def outermost(of, dtype):
    """Draw and average the outermost hop of a batch, on a GPU in one kernel."""
    features = of.features.to(dtype)
    sampler = NeighborSampler(of.edges.indptr, of.edges.sources, of.fanout, check=False, seed=3)
    if not features.is_cuda:
        hop = sampler.sample(of.seeds, 0, relabel_outer=False)[0]
        return [model.self_and_mean(hop.indptr, hop.indices, features, hop.src_nodes)]
    rows, places = sampler.engine.shapes(len(of.seeds))
    frame = sampler.engine.frame(rows[:-1], places[:-1])
    out = features.new_empty(rows[-2], 2 * features.shape[1])
    if not frame.aggregate(features, out):
        raise RuntimeError("there is no kernel")
    frame.fill(of.seeds, 0)
    frame.start()
    torch.cuda.synchronize()
    return [out]


KERNELS = {  # name: what calls the kernels of `inputs`
    "between": lambda of: of.edges.ranges(of.pairs),
    "negatives": lambda of: of.negatives.attempts(7, of.pair_times, of.pairs, 10),
    "common": lambda of: [of.common.pair_features(of.pairs, count=len(COMMON))],
    "common, times": lambda of: [of.timed.pair_features(of.pairs, of.pair_times)],
    "paths": lambda of: [of.common.paths.between(of.pairs)],
    "norm_relu": normed,
    "pick_aggregate": lambda of: outermost(of, torch.float32),
    "pick_aggregate, bf16": lambda of: outermost(of, torch.bfloat16),
}


@contextlib.contextmanager
def torch_alone():
    """Run the body with torch operations in place of C."""
    with (
        mock.patch("native.kernels.load_links", lambda *given: None),
        mock.patch("model.fused", None),
    ):
        yield


def distance(a, b):
    """Return how far tensors on a GPU are from those on the CPU, relative to these: 0 for the same integers."""
    apart = 0.0
    for one, other in zip(a, b):
        exact = not other.is_floating_point()
        one = one[: len(other)].cpu().double()  # behind it is padding
        other = other.double()
        far = ((one - other).norm() / other.norm().clamp(min=1e-9)).item()
        apart = max(apart, far + (exact and far > 0))
    return apart


def sums(args, record, graph):
    """Compare each kernel with C and with torch operations; with torch's, paths would be dense matrices."""
    on_gpu = inputs(args, graph)
    on_cpu = moved(on_gpu, "cpu")
    rows = {}
    for name, work in KERNELS.items():
        with record.attempt(name):
            ours = work(on_gpu)
            rows[name] = {"C": distance(ours, work(on_cpu))}
            if name != "paths":
                with torch_alone():
                    rows[name]["torch"] = distance(ours, work(on_cpu))
            record.keep(sums=rows)
            if not max(rows[name].values()) < CLOSE:  # a NaN fails too
                raise RuntimeError(f"{rows[name]} apart")
    print_table("CUDA, apart from", rows)
