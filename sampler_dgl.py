"""DGL beside sampler.py: its operators as a backend, and this sampler in the place of its own.

Copy this file beside sampler.py, which finds it, for NeighborSampler(backend="dgl"), DGLAdapter and block.to_dgl(). DGL
is imported when one of them is used; `import_dgl` does so also under a torch that DGL was not built for.
"""

import itertools
import sys
import threading
import types

import torch


class Backend:
    """DGL's sample_neighbors or sample_labors, then to_block; DGL's random numbers, not the law's."""

    def __init__(self, task):
        self.task, self.dgl, self.lock = task, import_dgl(), threading.Lock()  # one seeds DGL's generator at a time
        dtype = torch.int32 if task.indices.dtype == torch.int32 and task.indices.numel() < 2**31 else torch.int64
        csc = (task.indptr.to(dtype), task.indices.to(dtype), task.indices.new_empty(0, dtype=dtype))
        self.graph = self.dgl.graph(("csc", csc), num_nodes=task.indptr.numel() - 1)
        if task.weights is not None:
            self.graph.edata["weight"] = task.weights

    def sample(self, seeds, hops, exclude=None, times=None):
        """Sample all hops of a batch."""
        if exclude is not None:
            raise ValueError("backend 'dgl' cannot exclude edges while it samples; use 'native' or 'torch'")
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
        dgl, task = self.dgl, self.task
        prob = None if task.weights is None else "weight"
        if task.rule == "labor":
            picked = dgl.sampling.sample_labors(self.graph, dst, hop.k, prob=prob)[0]
        else:
            picked = dgl.sampling.sample_neighbors(self.graph, dst, hop.k, prob=prob, replace=task.rule == "replace")
        block = dgl.to_block(picked, dst)
        indptr, indices, order = block.adj_tensors("csc")
        edge_ids = picked.edata[dgl.EID][block.edata[dgl.EID][order].long()].long() if task.edge_ids else None
        src = block.srcdata[dgl.NID]
        if not hop.relabel:
            src, indices = dst, src.index_select(0, indices)
        dtype = task.indices.dtype
        return src, (indptr.to(dtype), indices.to(dtype), src.to(dtype), edge_ids, None)


def _stub_attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_dgl():
    """Import DGL 2.1 also under a torch it was not built for.

    Its PyPI build fails on three parts not needed here: dgl.distributed (which pulls in GraphBolt, torchdata and
    setuptools.extern), dgl.data.movielens (pandas). They are replaced by stubs, only when the plain import fails.
    """
    try:
        import dgl
    except Exception as first:
        if isinstance(first, ModuleNotFoundError) and first.name == "dgl":
            raise ImportError("backend 'dgl' needs DGL: pip install dgl==2.1.0 (Linux, Python 3.8-3.12)") from None
        for name in [name for name in sys.modules if name.split(".")[0] == "dgl"]:
            del sys.modules[name]
        for name in ("dgl.distributed", "dgl.data.movielens"):
            stub = sys.modules[name] = types.ModuleType(name)
            stub.__getattr__ = _stub_attribute
        import dgl
    return dgl


class DGLAdapter:
    """A NeighborSampler in the place of DGL's own: DataLoader(graph, nodes, DGLAdapter(sampler), batch_size=1024).

    Each batch is DGL's (input_nodes, output_nodes, blocks). The sampler holds the graph (graph.adj_tensors("csc")
    gives indptr and indices); the DataLoader's graph is not looked at. Works in the DataLoader's worker processes too.
    """

    def __init__(self, sampler):
        self.sampler, self._calls = sampler, itertools.count()

    def sample(self, graph, seeds, exclude_eids=None):
        """What DGL's DataLoader calls for a batch of seeds int [S]."""
        if exclude_eids is not None:
            raise ValueError("exclude_eids is not supported: DGLAdapter is for node batches")
        worker = torch.utils.data.get_worker_info()  # its seed differs from worker to worker and epoch to epoch
        blocks = self.sampler.sample(seeds, next(self._calls) + (worker.seed if worker else 0))
        return blocks[0].src_nodes, seeds, [block.to_dgl() for block in blocks]
