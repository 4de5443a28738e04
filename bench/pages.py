"""python -m bench store --parts pages: bytes that features on disk cost an epoch, by what keeps rows in memory. Nothing is read:
the batches of two epochs are recorded, and each policy keeps rows or pages of them; the second epoch counts.

The graph has the shape of ogbn-papers100M (111 M nodes, 1.2 M of them to train on, 256 bytes a row), scaled so that all rows take
--features-gb; batches of 1,024 are scaled with it, and figures back. Rows are in random order in the file.
"""

import math
import types
from collections import OrderedDict

import torch

from bench import tools
from extras.cache import expected_visits
from extras.lookahead import ROOM, TOUCHES, KeptPages, settled_tiers
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore

NODES = 111_059_956
TRAIN = 1_207_179
ROW = 256  # bytes
PAGE = 4096
ON_GPU = 5e9  # bytes of rows
DISKS = 3e9, 7e9  # bytes/s


def recorded(args, folder):
    """Sample two epochs -> (input rows of each batch, as numbers of rows in the file, probability of each row)."""
    nodes = int(args.features_gb * 1e9 / ROW)
    train = TRAIN * nodes // NODES
    dataset = f"synthetic:nodes={nodes},degree=14.55,sigma=1.1,features=1,classes=2,train={train}"
    graph = GraphStore.open(prepare.prepare(dataset, folder))
    batch = max(1, 1024 * nodes // NODES)
    sampler = NeighborSampler(graph.indptr, graph.indices, args.fanout, check=False)
    seeds = graph.split["train"]
    place = torch.randperm(nodes, generator=torch.Generator().manual_seed(0))
    batches = []
    for epoch in range(2):
        order = seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(epoch))]
        for part in order.split(batch):
            rows = sampler.sample(part, len(batches))[0].src_nodes
            batches.append(place[rows.long()])
    visits = expected_visits(graph.indptr, graph.indices, seeds, args.fanout, batch)
    return batches, torch.empty_like(visits).index_copy_(0, place, visits)


def recent(batches, places):
    """Yield what each batch misses if the last used are kept."""
    kept = OrderedDict()
    for batch in batches:
        missed = [key for key in batch.tolist() if key not in kept]
        for key in batch.tolist():
            kept[key] = None
            kept.move_to_end(key)
        while len(kept) > places:
            kept.popitem(last=False)
        yield torch.tensor(missed, dtype=torch.int64)


def sieve(batches, places):
    """Yield what each batch misses with SIEVE (NSDI 2024), GraphBolt's default: a hand moves from the oldest to the newest and
    evicts the first that was not used since it passed."""
    used = OrderedDict()  # by age: whether it was used
    hand = iter(())
    for batch in batches:
        missed = []
        for key in batch.tolist():
            if key in used:
                used[key] = True
                continue
            missed.append(key)
        fresh = len(missed) - (places - len(used))
        evicted = []
        while fresh > 0 and len(evicted) < min(fresh, len(used)):
            key = next(hand, None)
            if key is None:
                hand = iter(list(used))
            elif used.get(key):
                used[key] = False
            elif key in used:
                del used[key]
                evicted.append(key)
        used.update(dict.fromkeys(missed[:places], False))
        yield torch.tensor(missed, dtype=torch.int64)


def planned(batches, places, window, last, processes=1):
    """Yield the pages that each batch, or those of several processes together, read if pages are planned."""
    table = types.SimpleNamespace(path="", offset=0, rows=last, row_bytes=PAGE)
    planner = KeptPages(table, places, window)
    steps = [batches[i : i + processes] for i in range(0, len(batches), processes)]
    for i, step in enumerate(steps):
        planner.expect(torch.cat(step))
        if i >= window:
            yield planner.plan()[0]
    for _ in steps[-window:]:
        yield planner.plan()[0]


def part_pages(args, folder):
    """Count bytes read and requests an epoch -> {policy and memory: figures}."""
    batches, visits = recorded(args, folder)
    scale = NODES / len(visits)
    rank = torch.empty(len(visits), dtype=torch.int64)
    rank[visits.argsort(descending=True)] = torch.arange(len(visits))
    pages = lambda batch: torch.unique(batch * ROW // PAGE)  # noqa: E731
    last = 1 + len(visits) * ROW // PAGE
    on_gpu = int(ON_GPU / scale) // ROW
    batches = [batch[rank[batch] >= on_gpu] for batch in batches]
    figures = {}

    def count(policy, room, missed, block=PAGE):
        missed = list(missed)
        read = scale * sum(map(len, missed[len(missed) // 2 :]))
        row = {"million reads": read / 1e6, "GB read": read * block / 1e9}
        row |= {f"s at {disk / 1e9:g} GB/s": read * block / disk for disk in DISKS}
        figures[f"{policy}, {room / 1e9:g} GB"] = row

    for room in (5e9, 10e9, 15e9, 20e9, 30e9):
        free = room / scale
        table = types.SimpleNamespace(shape=(len(visits), ROW), dtype=torch.int8)
        table.room = lambda free=free: free
        behind = lambda rows: [batch[rank[batch] >= on_gpu + rows] for batch in batches]  # noqa: E731
        pages_behind = lambda rows: list(map(pages, behind(rows)))  # noqa: E731
        count("least recently used pages", room, recent(pages_behind(0), free // PAGE))
        count("hottest rows, chosen once", room, pages_behind(free // ROW))
        count("SIEVE rows", room, map(pages, sieve(batches, int(free // ROW))))
        for processes in (1, 4):
            tiers = settled_tiers(table, visits, on_gpu * ROW, 0, processes)
            rest = pages_behind(tiers.host // ROW)
            touched = processes * sum(map(len, rest)) / len(rest)
            window = math.ceil(TOUCHES * last / touched)
            rest = planned(rest, tiers.room // PAGE, window, last, processes)
            count(f"ours, {processes} processes", room, rest)
            figures[f"ours, {processes} processes, {room / 1e9:g} GB"]["expected"] = (
                tiers.reads * len(batches) / 2 * scale / 1e6
            )
        alone = free / 8 / 4 // ROW  # each of four processes has the same rows
        lru = recent(pages_behind(alone), int(free * ROOM * 7 / 8) // PAGE)
        count("as ours, 4 processes, the kernel evicts", room, lru)
        rows = planned(batches, int(free // ROW), len(batches), len(visits))
        count("MIN over the epoch, rows", room, map(pages, rows))
    return tools.print_table("memory beside 5 GB on the GPU", figures)
