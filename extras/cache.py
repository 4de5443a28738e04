"""--cache: a static cache of feature rows, the hottest, chosen once, on the GPU or in RAM.

    visits = expected_visits(indptr, indices, train_nodes, fanouts)       # [V], the larger the hotter
    features = CachedFeatures(features, visits, budget=1 << 30, device="cuda")     # of a `FeatureRing`

To copy this file, also take features.py and extras/__init__.py.
"""

import threading
import types
from functools import partial

import torch

from extras import MissingExtra, extra
from features import MODES, ask, copy_rows, rows_of_a_chunk, stored, take

CHUNK_EDGES = 1 << 22  # edges handled at a time


def expected_visits(indptr, indices, train_nodes, fanouts, batch_size=1024):
    """Estimate the probability that each node is an input node of a batch -> float32 [V], to rank rows for a cache.

    The vertex-inclusion recursion of SALIENT++ (arXiv 2305.03152), for blocks in which every hop expands all nodes of
    the batch so far, with fresh draws. Neighbours are assumed independent. One pass over the edges per layer.

    Args:
        indptr: int64 [V+1], indices: [M], the graph. train_nodes: [T] ids of the nodes that batches take seeds from.
        fanouts: one number per layer from the seeds outward, -1 for all neighbours. batch_size: seeds per batch.

    Raises:
        IndexError: for offsets or node ids out of range.
    """
    num_nodes = indptr.numel() - 1
    num_edges = indices.numel()
    device = indptr.device
    degree = indptr.diff()
    if bool((degree < 0).any()) or int(indptr[0]) != 0 or int(indptr[-1]) != num_edges:
        raise IndexError("the graph is damaged: an offset in indptr is out of range or decreases")
    # five values per node from here on: V may be large
    degree = degree.float()
    train_nodes = train_nodes.to(device)
    seed = min(1.0, batch_size / max(1, train_nodes.numel()))
    # probabilities that a node is in the batch, and that it has drawn a given neighbour
    held, picked = torch.zeros(2, num_nodes, device=device)
    held[train_nodes] = seed
    for k in fanouts:
        log_unpicked = held.sub_(picked)
        if k >= 0:
            log_unpicked.mul_((k / degree).clamp_(max=1))
        picked.add_(log_unpicked).clamp_(0, 1)
        torch.neg(picked, out=log_unpicked).log1p_()
        total = torch.zeros_like(picked)
        for a in range(0, num_edges, CHUNK_EDGES):
            b = min(a + CHUNK_EDGES, num_edges)
            ends = torch.tensor([a + 1, b], device=device)
            first, last = torch.searchsorted(indptr, ends).tolist()
            counts = indptr[first - 1 : last + 1].clamp(a, b).diff()
            values = log_unpicked[first - 1 : last].repeat_interleave(counts, output_size=b - a)
            total.index_add_(0, indices[a:b], values)
        held = total.exp_()
        held[train_nodes] *= 1 - seed
        held.neg_().add_(1)
    return held


class CachedFeatures:
    """Features with a static cache of the hottest rows: on the GPU for features in host memory, in RAM for a store.
    Rows in the cache stay as they are now: those that `put_rows` changes later need a cache made later.

    Args:
        features: the features behind the cache. device: where to keep rows.
        visits: [V], the larger the hotter: `expected_visits`, or the degree.
        budget: bytes of rows to keep. A map from node to cached row takes another 4 bytes a node.
        behind: function of nearer, this map, int32 [V], -1 for rows that are not kept -> the features that these are read
            from; None: the same.
        keep: function of the hottest rows, as features -> tensor of them; None: a copy on the device.

    Attributes:
        cache: [rows, F] on the device. shape, dtype: of the features. device: where `gather` looks ids up.
        hits, lookups: rows found in the cache and rows asked for since the start. hit_rate: hits / lookups.
    """

    def __init__(self, features, visits, budget, device="cpu", *, behind=None, keep=None):
        features = getattr(features, "tensor", features)
        self.shape = tuple(features.shape)
        self.dtype = features.dtype
        self.device = getattr(features, "device", torch.device("cpu"))
        num_nodes, width = self.shape
        rows = min(num_nodes, int(budget) // (width * self.dtype.itemsize))
        # rows of misses read at a time: a large temporary costs more in page faults than in copying
        self.piece = rows_of_a_chunk(features)
        # ascending, so that a disk is read sequentially
        hot = visits.to(self.device).topk(rows).indices.sort().values
        self.position = torch.full((num_nodes,), -1, dtype=torch.int32, device=self.device)
        self.position[hot] = torch.arange(rows, dtype=torch.int32, device=self.device)
        if keep:
            hottest = types.SimpleNamespace(shape=(rows, width), dtype=self.dtype)
            hottest.gather = lambda ids, out: take(features, hot[ids])
            self.cache = keep(hottest)
        else:
            cache = torch.empty(rows, width, dtype=self.dtype, device=device)
            self.cache = copy_rows(features, cache, hot)
        self.kept_on = self.cache.device.type
        self.features = behind(nearer=self.position) if behind else features
        self.collective = ask(self.features, "collective")
        if ahead := ask(self.features, "looking_ahead"):
            self.looking_ahead = ahead
        self.hits = 0
        self.lookups = 0
        self.lock = threading.Lock()

    @property
    def hit_rate(self):
        return self.hits / max(1, self.lookups)

    def counts(self):
        """Return the share of rows found in the cache, and the counts of the features behind it."""
        counts = ask(self.features, "counts")()
        counts["cache_hit_rate"] = self.hit_rate
        if tiers := counts.get("tiers"):  # shares of all rows
            behind = {name: (1 - self.hit_rate) * share for name, share in tiers.items()}
            counts["tiers"] = {"GPU": self.hit_rate, **behind}
        return counts

    def gather(self, ids, out=None, missing=None):
        """Gather rows, hits from the cache and misses from the features behind it -> [n, F] on the cache's device.

        Args:
            ids: int32 or int64 [n] node ids, repeats allowed. out: [n, F] on the cache's device, or None.
            missing: function of ids [m] -> their rows [m, F] on the cache's device; reads the features when None.
        """
        ids = ids.to(self.device)
        on = self.cache.device
        position = self.position.index_select(0, ids)
        misses = (position < 0).nonzero().squeeze(1)
        with self.lock:
            self.hits += ids.numel() - misses.numel()
            self.lookups += ids.numel()
        if out is None:
            out = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype, device=on)
        if len(self.cache):
            # a miss copies row 0, overwritten below: cheaper than selecting the hits
            rows = position.clamp_(min=0).to(on, non_blocking=True)
            torch.index_select(self.cache, 0, rows, out=out)
        self._read(ids, misses, out, missing)
        return out

    def _read(self, ids, misses, out, missing):
        """Copy rows ids[misses] to out[misses]; see `gather`."""
        on = out.device
        # `missing` is called once: again, it would refill the slot's buffer during the copy out of it
        at_once = missing or self.collective
        for some in [misses] if at_once else misses.split(self.piece):
            rows = missing(ids[some]) if missing else take(self.features, ids[some]).to(on)
            out.index_copy_(0, some.to(on, non_blocking=True), rows)


def row_caches(plan):
    """Return the bytes of --cache in GPU memory, and in host memory."""
    return (0, plan.cache) if plan.mode == "cpu-cpu" else (plan.cache, 0)


def on_disk(ranks, plan, store):
    """Return whether features stay on disk, behind a cache that looks ahead: the same on all ranks."""
    rows = stored(store.features)
    paged = plan.mode in MODES[2:] and ask(rows, "paged") and not plan.split_features
    return all(ranks.gather(paged and (rows.large or row_caches(plan)[1] > 0)))


def cached(ranks, plan, task, used, features):
    """Put caches in front of the features, of the rows that batches use most often -> the first of them, one per process, or
    the features as they are. --cache is GPU memory in cpu-cuda and pinned-cuda; in cpu-cpu it is host memory. Over memory-mapped
    features that stay on disk the cache in host memory looks ahead and plans the page cache too; of these --dry-run prints where
    rows are, and how fast the disk delivers them."""
    # here: the cache takes only features.py
    from disk.files import StoreError, free_host_bytes, readable_size
    from run.allocator import trim_memory
    from run.placement import reading_all_edges

    store = task.store
    rows = stored(store.features)
    lookahead = looking_ahead(ranks) if on_disk(ranks, plan, store) else None
    budget = min(ranks.gather(plan.cache))  # processes fill their caches together
    if plan.lookahead is not None and not lookahead:
        raise StoreError(
            f"--lookahead {plan.lookahead} needs memory-mapped features, with columns in the checkpoint's order, behind a "
            "--cache in mode cpu-cpu, or larger than memory in mode cpu-cuda, and no --split-features"
        )
    row_bytes = rows.shape[1] * rows.dtype.itemsize
    copies = 1 if lookahead else ranks.local_world
    gpu, host = row_caches(plan)
    host = min(host * ranks.local_world, rows.shape[0] * row_bytes * copies)
    if max(ranks.gather(host - free_host_bytes())) > 0:
        raise StoreError(
            f"--cache: rows of {readable_size(host)} do not fit into the {readable_size(free_host_bytes())} of free memory"
        )
    if plan.mode == MODES[0]:
        ranks.say(budget and "memory  --cache has no effect: all features are in GPU memory")
        return features
    if not lookahead and (plan.dry_run or not budget):
        return features
    batch_size = plan.batch_size * task.seeds_per_example(plan)
    with reading_all_edges():
        visits = expected_visits(
            store.indptr, store.indices, task.seeds(), used.draws(plan), batch_size
        )
    visits = visits[: features.shape[0]]  # the other nodes have no features
    trim_memory(1)  # return freed heap pages before allocating the cache
    if not lookahead:
        if plan.mode == "cpu-cpu":
            ask(rows, "reserve")(budget * ranks.local_world)
        return CachedFeatures(features, visits, budget, ranks.device)
    batch = int(visits.sum()) * row_bytes
    # the ring's buffers are powers of two; an estimate alone should not leave pages without room
    ring = ranks.local_world * (plan.prefetch + 1) << batch.bit_length()
    rows.reserve(min(ring, rows.room() // 2))
    tiers = lookahead.settled_tiers(rows, visits, gpu, host, ranks.local_world)
    ranks.say(f"memory  {tiers.line}")
    if plan.dry_run:
        if tiers.reads >= 1:
            speed = lookahead.reads_per_second(rows)
            most = speed / tiers.reads / ranks.local_world
            ranks.say(
                f"memory  this disk: {speed:,.0f} random pages/s, at most {most:,.1f} batches/s a process"
            )
        return features
    host, room = map(min, zip(*ranks.gather((tiers.host, tiers.room))))
    rows.reserve(host)
    together = None
    if max(ranks.gather(ranks.local_world)) > 1:
        together = lookahead.Together(ranks.group_here())
    behind = partial(
        lookahead.LookaheadCache,
        rows,
        host,
        plan.lookahead,
        hot=visits,
        batches=plan.epochs * plan.steps * plan.accumulate,
        together=together,
        room=room,
    )
    if not gpu:
        return behind()
    return CachedFeatures(features, visits, gpu, ranks.device, behind=behind)


def looking_ahead(ranks):
    """Return the module of the cache that looks ahead; None after a line that says so if its file is not there."""
    try:
        return extra(".lookahead", "looking ahead")
    except MissingExtra as error:
        ranks.say(f"memory  rows are cached, pages are left to the kernel: {error}")
        return None


def flags(kinds):
    """Declare the flag of the cache."""
    return {
        "mode": dict(
            cache=kinds.free(
                kinds.SIZE,
                0,
                "feature rows cached by each GPU, or process of cpu-cpu (default: see docs/disk.md)",
                needs=[features_off_gpu],
            )
        )
    }


def features_off_gpu(flags):
    """Refuse a cache of rows that are all in GPU memory."""
    if flags.mode == MODES[0]:
        return f"has no effect: --mode {MODES[0]} has all on the GPU"
