"""cuGraph-PyG on the graph of `python -m bench gpu`: sampling, loading and training, all on one GPU.

    pip install cugraph-pyg-cu13 torch_geometric          # 26.10.0 was measured
    python -m bench gpu --parts cugraph

Its graph and features are in GPU memory, rmm takes a pool of it, as its users advise, and sampling is inside the times. By
default its loader samples an epoch in as few calls as memory allows (`local_seeds_per_call`), which is its fastest way.
"""

import contextlib
import ctypes
import glob
import importlib.util
import os
import socket
import time
import types

import torch
from torch.nn import functional as F

from bench.gpu_graph import free
from bench.tools import print_table

POOL = 0.3  # share of the GPU's memory that rmm starts with
MOST = 0.72  # and may take
SECONDS = 8  # of a timed run, about


def load_libraries():
    """Load CUDA libraries of pip packages, which RAPIDS finds only beside its own."""
    roots = importlib.import_module("nvidia").__path__ if importlib.util.find_spec("nvidia") else ()
    names = "nvJitLink.so.13 cublasLt.so.13 cublas.so.13 cusparse.so.12 curand.so.10 cusolver.so.12"
    for name in [*(f"lib{name}" for name in names.split()), "libnccl.so.2"]:
        for file in [f for root in roots for f in glob.glob(f"{root}/*/lib/{name}")] + [name]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
                break


def set_up(device):
    """Prepare rmm, CuPy, NCCL and WholeGraph for one rank; import cugraph_pyg after this."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "RAPIDS_NO_INITIALIZE": "1",
    }
    load_libraries()
    import cupy
    import rmm
    from rmm.allocators.cupy import rmm_cupy_allocator

    total = torch.cuda.get_device_properties(device).total_memory
    rmm.reinitialize(
        devices=0,
        pool_allocator=True,
        managed_memory=False,
        initial_pool_size=256 * (int(total * POOL) // 256),
        maximum_pool_size=256 * (int(total * MOST) // 256),
    )
    cupy.cuda.Device(0).use()
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    from pylibwholegraph.torch.initialize import init

    init(0, 1, 0, 1, "warn")


def network(widths):
    """Make PyG's GraphSAGE, trimmed to the nodes that each layer needs."""
    from torch_geometric.nn import SAGEConv
    from torch_geometric.utils import trim_to_layer

    class Trimmed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = torch.nn.ModuleList(map(SAGEConv, widths[:-1], widths[1:]))

        def forward(self, x, edges, nodes_of_hop, edges_of_hop):
            for i, conv in enumerate(self.convs):
                x, edges, _ = trim_to_layer(i, nodes_of_hop, edges_of_hop, x, edges)
                x = conv(x, edges)
                if i < len(self.convs) - 1:
                    x = F.dropout(x.relu(), 0.5, self.training)
            return x

    return Trimmed()


class Theirs:
    """A Graph of bench/gpu_graph.py in cuGraph's stores, and what is timed on it: each method works on the first `count`
    batches of an epoch -> the number of batches."""

    def __init__(self, args, graph):
        import cugraph_pyg.data.graph_store as stores
        from cugraph_pyg.data import FeatureStore, GraphStore

        if type(stores.cudf).__name__ == "MissingModule":
            # put_edge_index asks for cudf.Series, and cudf is no dependency
            stores.cudf = types.SimpleNamespace(Series=type("Series", (), {}))
        device = graph.indptr.device
        V = graph.shape.nodes
        self.args = args
        self.shape = graph.shape
        self.device = device
        self.labels = graph.labels.to(device)
        self.seeds = graph.seeds.to(device)
        self.features = FeatureStore(location="cuda", backend="vmm")
        self.features["node", "x", None] = graph.features
        self.edges = GraphStore(location="cuda", backend="vmm")
        destinations = torch.repeat_interleave(graph.indptr.diff())
        ends = torch.stack([graph.indices.long(), destinations])
        self.edges[("node", "edge", "node"), "coo", False, (V, V)] = ends
        self.edges.finalize()

    def of(self, count):
        """Return the seeds of the first batches."""
        return self.seeds[: count * self.args.batch_size]

    def sample(self, count, in_a_call=None):
        """Sample; in_a_call: batches of a call, None: as many as memory allows."""
        from cugraph_pyg.sampler import DistributedNeighborSampler

        batch = self.args.batch_size
        draw = DistributedNeighborSampler(
            self.edges._graph,
            fanout=self.args.fanout,
            with_replacement=False,
            disjoint=False,
            num_edge_types=1,
            compression="CSR",
            compress_per_hop=False,
            deduplicate_sources=True,
            retain_original_seeds=True,
            prior_sources_behavior="exclude",
            local_seeds_per_call=in_a_call and in_a_call * batch,
        )
        calls = draw.sample_from_nodes(self.of(count), batch_size=batch, random_state=1)
        return sum(last - first + 1 for _, first, last in calls)

    def batches(self, count):
        from cugraph_pyg.loader import NeighborLoader

        return NeighborLoader(
            (self.features, self.edges),
            num_neighbors=self.args.fanout,
            input_nodes=self.of(count),
            batch_size=self.args.batch_size,
            shuffle=True,
            drop_last=False,
            replace=False,
        )

    def load(self, count):
        """Sample and fetch features."""
        return sum(1 for _ in self.batches(count))

    def training(self):
        """Make a network and its optimizer -> function that trains it."""
        args = self.args
        hidden = [args.hidden] * (len(args.fanout) - 1)
        widths = [self.shape.width, *hidden, self.shape.classes]
        net = network(widths).to(self.device).train()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.003)

        def train(count):
            steps = 0
            for b in self.batches(count):
                size = int(b.batch_size)
                hops = [[int(n) for n in ns] for ns in (b.num_sampled_nodes, b.num_sampled_edges)]
                output = net(b.x, b.edge_index, *hops)[:size]
                optimizer.zero_grad(set_to_none=True)
                y = self.labels[b.n_id[:size].to(self.device)]
                F.cross_entropy(output, y).backward()
                optimizer.step()
                steps += 1
            return steps

        return train


def timed(work, count):
    """Return the seconds of work(count), a batch."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    done = work(count)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / done


def bench_cugraph(args, record, graph):
    """Time its sampler, its loader and training with it on a Graph of bench/gpu_graph.py."""
    set_up(graph.indptr.device)
    import cugraph_pyg

    theirs = Theirs(args, graph)
    rows = {}
    free()
    most = -(-len(graph.seeds) // args.batch_size)
    works = {
        "sampling, an epoch in a call (its default)": theirs.sample,
        "sampling, 16 batches in a call": lambda count: theirs.sample(count, 16),
        "sampling, 1 batch in a call": lambda count: theirs.sample(count, 1),
        "loading with features": theirs.load,
        "training, tf32, trim_to_layer": theirs.training(),
        "training, fp32, trim_to_layer": theirs.training(),
    }
    for name, work in works.items():
        with record.attempt(name):
            torch.set_float32_matmul_precision("high" if "tf32" in name else "highest")
            work(min(4, most))  # warm-up
            once = timed(work, min(16, most))
            count = max(1, min(most, int(SECONDS / once)))
            rows[name] = {"median_ms": 1e3 * timed(work, count), "batches": count}
            record.keep(contenders=rows, cugraph_pyg=cugraph_pyg.__version__)
    print_table("cuGraph-PyG", rows)
