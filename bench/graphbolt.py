"""Training with GraphBolt of DGL, features on disk as its documentation has them: for `python -m bench store --graphbolt`.

An interpreter of its own runs this, as GraphBolt needs the torch that DGL was built for (python -m bench says how to install
both), with the options of `main` as JSON. The last line that it prints is the figures of each round as JSON.
"""

import json
import mmap
import sys
from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import torch
from dgl.nn import SAGEConv
from torch.nn import functional as F

from bench.tools import descend, forget_pages, forward, settle, watched_rounds
from store import GraphStore


def main(store, fanout, batch_size, hidden, threads, advised, rounds, each):
    """Train, and print the figures; advised: the kernel is told not to read ahead."""
    settle(threads)
    store, nodes = Path(store), GraphStore.open(store).split["train"]
    meta, random = json.loads((store / "meta.json").read_text()), torch.Generator().manual_seed(0)
    epochs = -(-rounds * (each + 1) * batch_size // nodes.numel())
    order = [torch.randperm(nodes.numel(), generator=random) for _ in range(epochs)]
    seeds = nodes[torch.cat(order)]
    arrays = (np.load(store / f"{name}.npy") for name in ("indptr", "indices", "labels"))
    indptr, indices, labels = map(torch.from_numpy, arrays)
    graph = gb.fused_csc_sampling_graph(indptr, indices)
    # as `OnDiskDataset` opens it with `in_memory: false`
    table = np.load(store / "features.npy", mmap_mode="r+")
    if advised:
        table._mmap.madvise(mmap.MADV_RANDOM)
    table = gb.TorchBasedFeature(torch.as_tensor(table))
    features = gb.BasicFeatureStore({("node", None, "feat"): table})
    pipe = gb.ItemSet((seeds.to(indices.dtype), labels[seeds]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(pipe, batch_size=batch_size)
    pipe = pipe.sample_neighbor(graph, fanout[::-1])  # the outermost hop first
    batches = iter(gb.DataLoader(pipe.fetch_feature(features, node_feature_keys=["feat"])))
    widths = [meta["feature_dim"], *[hidden] * (len(fanout) - 1), meta["num_classes"]]
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

    def step():
        batch = next(batches)
        h = forward(layers, batch.blocks, batch.node_features["feat"].float(), 0.5)
        return descend(optimizer, F.cross_entropy(h, batch.labels))

    forget_pages(store)
    print(json.dumps(watched_rounds(step, rounds, each)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
