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
        for option in spec.options:
            if option != "weights":
                raise ValueError(f"backend 'dgl' has no {option}; use 'native' or 'torch'")
        # one thread at a time seeds and uses DGL's generator
        self.spec = spec
        self.dgl = import_dgl()
        self.lock = threading.Lock()
        small = spec.indices.dtype == torch.int32 and spec.indices.numel() < 2**31
        arrays = spec.indptr, spec.indices, spec.indices.new_empty(0)
        csc = tuple(t.to(torch.int32 if small else torch.int64) for t in arrays)
        self.graph = self.dgl.graph(("csc", csc), num_nodes=spec.num_nodes)
        if spec.rule.column is not None:
            self.graph.edata["weight"] = spec.rule.column

    def sample(self, seeds, hops, exclude, times):
        if exclude is not None:
            raise ValueError("backend 'dgl' cannot exclude edges: use 'native' or 'torch'")
        if seeds.unique().numel() < seeds.numel():
            return None
        with self.lock:
            self.dgl.seed(hops[0].key >> 33)
            src = seeds.to(self.graph.idtype)
            blocks = []
            for hop in hops:
                src, block = self._hop(src, hop)
                blocks.append(block)
        return blocks

    def _hop(self, dst, hop):
        """Sample a hop for dst [S], of DGL's dtype -> (its sources, Block)."""
        dgl, spec = self.dgl, self.spec
        if spec.rule.by_source:
            picked = dgl.sampling.sample_labors(self.graph, dst, hop.k)[0]
        else:
            picked = dgl.sampling.sample_neighbors(
                self.graph,
                dst,
                hop.k,
                prob=None if spec.rule.column is None else "weight",
                replace=spec.rule.repeats,
            )
        theirs = dgl.to_block(picked, dst)
        indptr, indices, order = theirs.adj_tensors("csc")
        edge_ids = None
        if spec.edge_ids:
            edge_ids = picked.edata[dgl.EID][theirs.edata[dgl.EID][order].long()].long()
        src = theirs.srcdata[dgl.NID]
        if not hop.relabel:
            indices = src.index_select(0, indices)
            src = dst
        dtype = spec.indices.dtype
        return src, spec.block(indptr.to(dtype), indices.to(dtype), src.to(dtype), edge_ids)


def to_dgl(block):
    """Convert a `Block` to DGL's, see `Block.to_dgl`."""
    dgl = import_dgl()
    # edge ids: without them DGL's gradients of edge values (GATv2Conv) fail
    ids = torch.arange(block.num_edges, dtype=block.indices.dtype, device=block.indices.device)
    csc = block.indptr, block.indices, ids
    theirs = dgl.create_block(("csc", csc), block.num_src, block.num_dst)
    theirs.srcdata[dgl.NID] = block.src_nodes
    theirs.dstdata[dgl.NID] = block.src_nodes[: block.num_dst]
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
        self.sampler = sampler
        self._calls = itertools.count()

    def sample(self, graph, seeds, exclude_eids=None):
        """Sample a batch for seeds int [S]; called by DGL's DataLoader -> (input_nodes, output_nodes, blocks)."""
        if exclude_eids is not None:
            raise ValueError("exclude_eids is not supported: DGLAdapter is for node batches")
        # a worker's seed differs between workers and between epochs
        worker = torch.utils.data.get_worker_info()
        step = next(self._calls) + (worker.seed << 32 if worker else 0)
        blocks = self.sampler.sample(seeds, step)
        return blocks[0].src_nodes, seeds, [block.to_dgl() for block in blocks]
