"""DGL for sampler.py: its operators as a backend, our blocks as DGL blocks, our sampler in DGL's DataLoader.

DGL is imported at first use; `import_dgl` also works under a torch that DGL was not built for.
"""

import itertools
import sys
import threading
import types

import torch


class Backend:
    """Sample with DGL's sample_neighbors or sample_labors and to_block, and DGL's random numbers."""

    def __init__(self, spec):
        # one thread at a time seeds and uses DGL's generator
        self.spec = spec
        self.dgl = import_dgl()
        self.lock = threading.Lock()
        small = spec.indices.dtype == torch.int32 and spec.indices.numel() < 2**31
        arrays = spec.indptr, spec.indices, spec.indices.new_empty(0)
        csc = tuple(t.to(torch.int32 if small else torch.int64) for t in arrays)
        self.graph = self.dgl.graph(("csc", csc), num_nodes=spec.indptr.numel() - 1)
        if spec.weights is not None:
            self.graph.edata["weight"] = spec.weights

    def sample(self, seeds, hops, exclude=None, times=None):
        if exclude is not None:
            raise ValueError("backend 'dgl' cannot exclude edges: use 'native' or 'torch'")
        if seeds.unique().numel() < seeds.numel():
            return None
        with self.lock:
            self.dgl.seed(hops[0].key >> 33)
            src, blocks = seeds.to(self.graph.idtype), []
            for hop in hops:
                src, fields = self._hop(src, hop)
                blocks.append(fields)
        return blocks

    def _hop(self, dst, hop):
        dgl, spec = self.dgl, self.spec
        options = {"prob": None if spec.weights is None else "weight"}
        if spec.rule == "labor":
            picked = dgl.sampling.sample_labors(self.graph, dst, hop.k, **options)[0]
        else:
            options["replace"] = spec.rule == "replace"
            picked = dgl.sampling.sample_neighbors(self.graph, dst, hop.k, **options)
        block, edge_ids = dgl.to_block(picked, dst), None
        indptr, indices, order = block.adj_tensors("csc")
        if spec.edge_ids:
            edge_ids = picked.edata[dgl.EID][block.edata[dgl.EID][order].long()].long()
        src, dtype = block.srcdata[dgl.NID], spec.indices.dtype
        if not hop.relabel:
            src, indices = dst, src.index_select(0, indices)
        return src, (indptr.to(dtype), indices.to(dtype), src.to(dtype), edge_ids, None)


def to_dgl(block):
    """Convert a `Block` to DGL's, see `Block.to_dgl`."""
    dgl, dst = import_dgl(), block.src_nodes[: block.num_dst]
    # edge ids: without them DGL's gradients of edge values (GATv2Conv) fail
    ids = torch.arange(block.num_edges, dtype=block.indices.dtype, device=block.indices.device)
    csc, sizes = (block.indptr, block.indices, ids), (block.num_src, block.num_dst)
    theirs = dgl.create_block(("csc", csc), *sizes)
    theirs.srcdata[dgl.NID], theirs.dstdata[dgl.NID] = block.src_nodes, dst
    if block.edge_ids is not None:
        theirs.edata[dgl.EID] = block.edge_ids
    if block.edge_type is not None:
        theirs.edata[dgl.ETYPE] = block.edge_type.long()
    return theirs


def _stub_attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_dgl():
    """Import DGL 2.1, also under a torch it was not built for -> the module. Its PyPI build then fails on parts not
    needed here, dgl.distributed (GraphBolt, torchdata, setuptools.extern) and dgl.data.movielens (pandas): if the plain
    import fails, stubs replace them."""
    try:
        import dgl
    except Exception as first:
        if isinstance(first, ModuleNotFoundError) and first.name == "dgl":
            raise ImportError("DGL: pip install dgl==2.1.0 (Linux, Python 3.8-3.12)") from None
        for name in [name for name in sys.modules if name.split(".")[0] == "dgl"]:
            del sys.modules[name]
        for name in ("dgl.distributed", "dgl.data.movielens"):
            stub = sys.modules[name] = types.ModuleType(name)
            stub.__getattr__ = _stub_attribute
        import dgl
    return dgl


class DGLAdapter:
    """A NeighborSampler for DGL's DataLoader, also in worker processes: DataLoader(graph, nodes, DGLAdapter(sampler)).

    Each batch is DGL's (input_nodes, output_nodes, blocks). The sampler holds the graph (indptr and indices are in
    graph.adj_tensors("csc")); the DataLoader's graph is not used.
    """

    def __init__(self, sampler):
        self.sampler, self._calls = sampler, itertools.count()

    def sample(self, graph, seeds, exclude_eids=None):
        """Sample a batch for seeds int [S]; called by DGL's DataLoader -> (input_nodes, output_nodes, blocks)."""
        if exclude_eids is not None:
            raise ValueError("exclude_eids is not supported: DGLAdapter is for node batches")
        # a worker's seed differs between workers and between epochs
        worker = torch.utils.data.get_worker_info()
        step = next(self._calls) + (worker.seed << 32 if worker else 0)
        blocks = self.sampler.sample(seeds, step)
        return blocks[0].src_nodes, seeds, [block.to_dgl() for block in blocks]
