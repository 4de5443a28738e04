"""Moving feature rows: a ring of kept buffers, filled ahead of the training step on threads.

This file stands alone: copy it into your own code.

    ring = FeatureRing(features, labels, slots=depth + 1, device="cuda")
    def load(seeds, slot):
        return ring.fetch(slot, sampler.sample(seeds, step))
    for batch in prefetch(load, batches, depth=depth):
        batch.wait()
        model(batch.blocks, batch.x)

Why a ring: a fresh tensor of a hundred megabytes costs more in page faults than the gather that fills it, and only
page-locked memory is copied to a GPU while the GPU computes. So a few buffers are made once and used in turn.
`prefetch` names the slot of every batch; a slot comes round again only when the caller has asked for the batch after
the one that used it, and on CUDA when the copy out of it is done.

Letters: V nodes; S seeds, N input nodes of a batch; F feature width.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import torch


class Batch(NamedTuple):
    """One batch on the training device; on CPU `x` is valid until the next batch is taken from `prefetch`."""

    blocks: list  # L blocks, outermost hop first
    x: torch.Tensor  # [N, F] features of blocks[0].src_nodes
    y: torch.Tensor  # [S] labels of the seeds
    ready: Any = None  # CUDA event after which the tensors are there; None on CPU

    def wait(self):
        """Make the current CUDA stream wait for the copies and keep their memory until it is done with them."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for tensors in (self.x, self.y, *self.blocks):
                tensors.record_stream(stream)
        return self


class FeatureRing:
    """Gather the features and labels of a batch into kept buffers and bring them to the training device.

    Args:
        features: tensor [V, F], or any object with .shape, .dtype and .gather(ids, out=) (a GraphStore's features).
        labels: int64 [V].
        slots: number of buffers; one more than the batches prepared ahead, for the one in use.
        device: where training runs. On CUDA the buffers are page-locked and copied on a stream of their own; features
            that are on that device already are gathered there, without a buffer.
    """

    def __init__(self, features, labels, *, slots, device="cpu"):
        self.features, self.labels, self.device = features, labels, torch.device(device)
        self.on_device = isinstance(features, torch.Tensor) and features.device.type == self.device.type != "cpu"
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        self.buffers = [None] * slots
        self.copied = [None] * slots  # CUDA event: the copy out of the slot is done
        self.rows = 0  # capacity that the next buffer gets

    def fetch(self, slot, blocks):
        """Fetch what the blocks need.

        Args:
            slot: which buffer to fill; the caller sees to it that no live batch uses it (`prefetch` does).
            blocks: the sampled blocks; features are fetched for blocks[0].src_nodes, labels for the last one's seeds.

        Returns:
            Batch on the ring's device.
        """
        ids, seeds = blocks[0].src_nodes, blocks[-1].src_nodes[: blocks[-1].num_dst]
        if not self.cuda:
            return Batch(blocks, self._gather(slot, ids), self.labels.index_select(0, seeds))
        with torch.cuda.stream(self.stream):
            if self.on_device:
                x = self.features.index_select(0, ids)
            else:
                x = self._gather(slot, ids).to(self.device, non_blocking=True)
                self.copied[slot] = self.stream.record_event()
            y = self.labels.index_select(0, seeds.to(self.labels.device)).to(self.device, non_blocking=True)
            blocks = [block.to(self.device, non_blocking=True) for block in blocks]
            return Batch(blocks, x, y, self.stream.record_event())

    def _gather(self, slot, ids):
        """Gather rows into the slot's buffer -> [N, F] view of it."""
        if self.copied[slot] is not None:
            self.copied[slot].synchronize()  # back-pressure: the previous copy out of this slot
        n, buffer = ids.numel(), self.buffers[slot]
        if buffer is None or buffer.shape[0] < n:
            self.rows = max(self.rows, n + n // 8)  # batches differ by a few percent: rarely grown twice
            shape = (self.rows, self.features.shape[1])
            buffer = self.buffers[slot] = torch.empty(shape, dtype=self.features.dtype, pin_memory=self.cuda)
        if isinstance(self.features, torch.Tensor):
            return torch.index_select(self.features, 0, ids, out=buffer[:n])
        return self.features.gather(ids, out=buffer[:n])


def prefetch(make, items, *, depth=2, threads=1):
    """Run make(item, slot) ahead of the caller on threads and yield the results in the order of the items.

    The results are the same for every depth and number of threads. At most `depth` results are under way beside the
    one in the caller's hands, and two results that are alive at the same time have different slots. An exception in
    `make` reaches the caller, with the worker's traceback, when its turn comes. Closing the generator (or leaving the
    process) cancels what has not started and waits for what has.

    Args:
        make: callable (item, slot) -> result; slot is an int in 0 .. depth.
        items: iterable.
        depth: results to prepare ahead; 0 makes each one when it is asked for, on the caller's thread.
        threads: worker threads.
    """
    jobs = ((item, i % (depth + 1)) for i, item in enumerate(items))
    if depth == 0:
        yield from (make(*job) for job in jobs)
        return
    pending = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="prefetch") as pool:
        try:
            pending.extend(pool.submit(make, *job) for job in islice(jobs, depth))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(make, *job) for job in islice(jobs, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()
