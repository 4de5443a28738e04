"""Training with GraphBolt of DGL, features on disk as its documentation has them: for `python -m bench store --graphbolt`.

    graphbolt/bin/python -m bench.graphbolt STORE order.npy 10,5 256 256 2 advised 20 30
    # fanout, batch, hidden, threads, how, rounds, batches of a round

An interpreter of its own runs this, as GraphBolt needs the torch that DGL was built for (python -m bench says how to install
both). The last line that it prints is the figures of each round as JSON.
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

from bench.tools import forget_pages, settle, watched_rounds


def on_disk(file, advised):
    """A table as `OnDiskDataset` opens it with `in_memory: false`; advised: the kernel is told not to read ahead."""
    table = np.load(file, mmap_mode="r+")
    if advised:
        table._mmap.madvise(mmap.MADV_RANDOM)
    return gb.TorchBasedFeature(torch.as_tensor(table))


def main(store, order, fanout, batch_size, hidden, threads, how, rounds, each):
    """Train, and print the figures."""
    settle(int(threads))
    store, seeds = Path(store), torch.from_numpy(np.load(order))
    fanout = [int(k) for k in fanout.split(",")]
    meta = json.loads((store / "meta.json").read_text())
    arrays = (np.load(store / f"{name}.npy") for name in ("indptr", "indices", "labels"))
    indptr, indices, labels = map(torch.from_numpy, arrays)
    graph = gb.fused_csc_sampling_graph(indptr, indices)
    features = on_disk(store / "features.npy", how == "advised")
    features = gb.BasicFeatureStore({("node", None, "feat"): features})
    pipe = gb.ItemSet((seeds.to(indices.dtype), labels[seeds]), names=("seed_nodes", "labels"))
    pipe = gb.ItemSampler(pipe, batch_size=int(batch_size))
    pipe = pipe.sample_neighbor(graph, fanout[::-1])  # the outermost hop first
    batches = iter(gb.DataLoader(pipe.fetch_feature(features, node_feature_keys=["feat"])))
    widths = [meta["feature_dim"], *[int(hidden)] * (len(fanout) - 1), meta["num_classes"]]
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in zip(widths, widths[1:]))
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.003)

    def step():
        batch = next(batches)
        h = batch.node_features["feat"].float()
        for layer, block in zip(layers, batch.blocks):
            h = layer(block, h)
            h = h if layer is layers[-1] else F.dropout(F.relu(h), 0.5)
        loss = F.cross_entropy(h, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    forget_pages(store)
    print(json.dumps(watched_rounds(step, int(rounds), int(each))))


if __name__ == "__main__":
    main(*sys.argv[1:])
