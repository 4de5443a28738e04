"""Tests: run/plan.py and --dry-run: the mode that fits into free memory."""

import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import ddp
import train
from disk import files
from disk.files import StoreError
from extras import pinned as uva
from extras.graph_store import build_graphs
from extras.relational import NodeInputs
from features import MODES
from model import GNN
from run import placement, plan
from run.plan import batches_ahead, choose_mode, estimate, placements, weight_bytes
from run.run import open_run
from sampler import NeighborSampler
from store import GraphStore, build_store
from tests.common import _code, _emulated, _frame, _graph, _rows, _stops
from tests.stores import _graphs


def _plain_store(path):
    """Make a store with V = 1000, M = 5000, F = 16, C = 4 and 100 training nodes -> GraphStore."""
    split = {"train": np.arange(100), "valid": np.arange(100, 110)}
    return GraphStore.open(build_store(path, **_graph(1000, 5000, 16) | {"split": split}))


GIB = 1 << 30
ARRAYS = 8 * 1001 + 4 * 5000 + 8 * 1000 + 64 * 1000  # indptr, indices, labels, features
SMALL = {"fanout": [3, 2], "batch_size": 10, "hidden": 8}
ROOM = {"free_gpu": 4 * GIB, "free_host": 8 * GIB}


def _dry(words, capsys, code=0):
    """Run `python train.py --dry-run` -> what it prints."""
    assert _code(words, "--dry-run") == code
    return capsys.readouterr().out


def test_estimate_adds_up(tmp_path):
    graph = _plain_store(tmp_path / "g")
    modes, best = estimate(graph, 2, **SMALL, prefetch=1, **ROOM)
    nodes, edges = [10, 40, 120], [30, 80]
    batch = 120 * 64 + 4 * (2 * sum(nodes) + sum(edges))
    compute = 8 * (40 * (16 + 3 * 8) + 10 * (8 + 3 * 4)) + 32 * (16 * 8 + 8 * 4)
    step = 2 * batch + compute
    # batches that are drawn take less
    sampler = NeighborSampler(graph.indptr, graph.indices, [3, 2], backend="torch")
    blocks = sampler.sample(graph.split["train"][:10], 0)
    held = sum(t.numel() * t.element_size() for b in blocks for t in b[:3]) + blocks[0].num_src * 64
    assert held < batch + compute
    expected = {
        "cuda-cuda": (GIB + ARRAYS + 4000, step, 0, 0),
        "pinned-cuda": (GIB + 4000, step, 0, ARRAYS),
        "cpu-cuda": (GIB, step, 4 * batch, 0),
        "cpu-cpu": (0, 0, step, 0),
    }
    for mode, figures in expected.items():
        assert modes[mode].placement == figures and modes[mode].fits, mode
        assert modes[mode].largest_batch == 100
    assert best == "cuda-cuda"
    # edges carry 8 + 4 * 3 bytes each, and those of a batch take their features along; nodes have times
    columns = {"edge_time": np.arange(5000), "node_time": np.arange(1000)}
    columns |= {"edge_features": np.ones((5000, 3), np.float32)}
    columns |= {"labels": np.ones((1000, 300), np.int64), "num_classes": 300}  # a byte each
    timed = build_store(tmp_path / "t", **_graph(1000, 5000, 16) | columns)
    modes, _ = estimate(GraphStore.open(timed), 2, **SMALL, prefetch=1, **ROOM)
    labels = 300_000 - 8000
    assert modes["pinned-cuda"].placement.shared == ARRAYS + labels + 5000 * 20 + 8000
    assert modes["cpu-cuda"].placement.rank_step == 4 * (batch + sum(edges) * (12 + 8))
    # rows that other machines ask for, and rows that arrive
    parts, _ = estimate(graph, 2, **SMALL, prefetch=1, split=True, **ROOM)
    assert parts["cpu-cuda"].placement.rank_step == 2 * 4 * batch
    # no hop has more than all nodes and edges
    all_of_them = 1000 * 64 + 4 * (2 * 2010 + 2 * 5000) + 8 * (1000 * 40 + 10 * 20)
    all_drawn = {"fanout": [-1, 900], "batch_size": 10, "hidden": 8, "prefetch": 0}
    modes, _ = estimate(graph, **all_drawn, **ROOM)
    assert modes["cpu-cpu"].placement.rank_step == all_of_them + 32 * (16 * 8 + 8 * 4)


def test_a_run_on_cpu_asks_no_gpu(tmp_path, monkeypatch):
    """That would take memory on it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: 1 / 0)
    args = train.parse_args("--gpus 0 --fanout 3,2 --hidden 8".split())
    assert open_run(ddp.Ranks(), args, _plain_store(tmp_path / "g").path).plan.mode == "cpu-cpu"


def test_estimate_counts_the_static_memory_of_step_graphs(tmp_path):
    """If the GPU reads features: at least the frames and input pairs of all slots, and a step once more."""
    graph = _plain_store(tmp_path / "g")
    options = dict(fanout=[3, 2, 2], batch_size=10, hidden=8, prefetch=1)
    of = lambda graphs: estimate(graph, 1, graphs=graphs, **options, **ROOM)[0]  # noqa: E731
    s = NeighborSampler(graph.indptr, graph.indices, options["fanout"], backend="torch")
    without = of(0)
    for hops, width in ((2, 2 * 16), (3, 16)):
        counted, frame = of(hops), _frame(_emulated(s, tmp_path), 10, hops)
        assert all(counted[mode] == without[mode] for mode in ("cpu-cuda", "cpu-cpu"))
        kept = (getattr(frame, name) for name in "host_inputs input results read".split())
        rows = frame.shape[0]
        slot = sum(t.nbytes for t in (*frame.memory, *kept, *frame.kept.values()))
        slot += torch.empty(rows[-1], width).nbytes
        compute = sum(8 * n * (a + 3 * b) for n, a, b in zip(rows[2::-1], (16, 8, 8), (8, 8, 4)))
        for mode in ("cuda-cuda", "pinned-cuda")[: hops - 1]:
            tables, static = (
                getattr(counted[mode].placement, name) - getattr(without[mode].placement, name)
                for name in ("gpu", "gpu_step")
            )
            assert tables == 2 * frame.table.nbytes
            assert 2 * slot + compute <= static < 1.5 * (2 * slot + compute)
    assert of(2)["pinned-cuda"] == of(3)["pinned-cuda"]  # which reads rows, not pairs
    uniform, weighted, timed = (
        estimate(graph, 1, graphs=3, **options, **ROOM, **law)[0]["cuda-cuda"].placement.gpu_step
        for law in ({}, {"counted": False}, {"counted": False, "timed": True})
    )
    # draws by weight keep edges and keys, here of 30 + 80 + 240 places; with times pairs, too
    assert weighted - uniform >= 2 * 16 * (30 + 80 + 240)
    times = torch.zeros(graph.num_edges, dtype=torch.int64)
    csc = graph.indptr, graph.indices, options["fanout"]
    s = NeighborSampler(*csc, backend="torch", edge_times=times)
    frame = _frame(_emulated(s, tmp_path), 10, 3)
    table = sum(t.nbytes for t in (frame.pairs, frame.table, frame.times))
    assert timed - weighted >= 2 * table


def test_gpus_hold_together_what_one_has_no_room_for(tmp_path, capsys):
    graph = _plain_store(tmp_path / "g")
    sizes = {**SMALL, "prefetch": 1, **ROOM}
    whole = estimate(graph, 4, **sizes)[0]["cuda-cuda"].placement
    parts = estimate(graph, 4, **sizes, split=4)[0]["cuda-cuda"].placement
    assert parts == whole._replace(gpu=whole.gpu - 3 * 64000 // 4)
    full = {**sizes, "free_gpu": parts.gpu - 1}
    assert estimate(graph, 4, **full)[1] == "pinned-cuda"
    assert estimate(graph, 4, **full, split=4)[1] == "cpu-cuda"  # the host has no use for parts
    path = build_store(tmp_path / "large", **_graph(20000, 50000, 1000))
    words = f"--dataset {path} --fanout 3,2 --batch-size 10 --hidden 8 --gpus 4"
    words += f" --free-gpu {GIB + 60_000_000}"  # features take 80 MB
    hint = "\nmemory  --split-features would hold them in the memory of 4 GPUs"
    assert hint in _dry(words, capsys)
    assert "\nmode           cuda-cuda\n" in _dry(f"{words} --split-features", capsys)


def test_a_run_estimates_with_the_hops_of_its_step_graphs(tmp_path, monkeypatch):
    asked, graph = [], _plain_store(tmp_path / "g")
    choose = lambda *_, **sizes: (asked.append(sizes["graphs"]), 1 / 0)  # noqa: E731
    monkeypatch.setattr(placement, "choose_mode", choose)
    sizes = "--fanout 3,2,2 --batch-size 10 --hidden 8 --prefetch 1"
    labor = "--sampler labor, --sampler labor --batch-dependency 2"
    for words in f"--lr 1, --accumulate 2, --model gcn, --task link, {labor}".split(", "):
        args = replace(train.parse_args(f"{sizes} {words}".split()), gpus=1, precision="tf32")
        with pytest.raises(ZeroDivisionError):
            open_run(ddp.Ranks(), args, graph.path)
    assert asked == [2, 2, 3, 3, 3, 3]


def test_ranks_have_one_mode_and_share_memory_with_those_of_their_machine(tmp_path, monkeypatch):
    """Where another rank, on another machine, has little memory left."""
    graph, ranks, shared = _plain_store(tmp_path / "g"), ddp.Ranks(1, 2, 0, 1, gpus=1), []
    words = "--gpus 0 --precision bf16 --fanout 3,2 --hidden 8 --batch-size 10 --prefetch 0"
    args = replace(train.parse_args(words.split()), gpus=1)
    modes, _ = estimate(graph, 1, **SMALL, **ROOM)
    least = (modes["cuda-cuda"].placement.gpu, 8 * GIB, 2)  # none for batches
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4 * GIB, 8 * GIB))
    other = lambda value: least if isinstance(value, tuple) else value  # noqa: E731
    monkeypatch.setattr(ddp.Ranks, "gather", lambda self, value: [other(value), value])
    share = lambda arrays, leads, total: (shared.append(total(5, 6)), 1 / 0)  # noqa: E731
    monkeypatch.setattr(uva, "share", share)
    with pytest.raises(ZeroDivisionError):
        open_run(ranks, args, graph.path)
    assert shared == [[5, 6]]


def test_batches_sampled_at_once_follow_cores_and_mode_unless_given(tmp_path):
    for mode in MODES:
        assert batches_ahead(mode, cores=2) == (1, 2)
        assert batches_ahead(mode, 64, sample_threads=3) == (3, 4)
        assert batches_ahead(mode, 16) == ((4, 5) if mode == "cpu-cuda" else (1, 2))
    assert [batches_ahead("cpu-cuda", n) for n in (8, 96)] == [(2, 3), (4, 5)]
    assert [batches_ahead("cpu-cuda", 16, prefetch=n) for n in (2, 0)] == [(2, 2), (1, 0)]
    # memory follows: two more batches, in pinned memory and on the GPU
    graph = _plain_store(tmp_path / "g")
    few, many = (placements(graph, cores=n) for n in (4, 16))
    assert few.pop("cpu-cuda").rank_step / 3 == many.pop("cpu-cuda").rank_step / 6
    assert few == many


def test_estimate_largest_batch_is_the_last_that_fits(tmp_path):
    graph = _plain_store(tmp_path / "g")
    options = {"fanout": [3, 2], "hidden": 8, "free_gpu": None, "free_host": GIB // 2 + 100_000}
    fit = lambda **more: estimate(graph, **{**options, **more})[0]["cpu-cpu"]  # noqa: E731
    largest = fit(batch_size=1).largest_batch
    assert 1 < largest < 100
    assert fit(batch_size=largest).fits and not fit(batch_size=largest + 1).fits
    # each rank has its own
    assert fit(procs=2, batch_size=1, free_host=GIB + 200_000).largest_batch == largest


def test_estimate_chooses_by_what_is_free(tmp_path, monkeypatch, capsys):
    graph = _plain_store(tmp_path / "g")
    options = {**SMALL, "prefetch": 1}
    modes, _ = estimate(graph, 2, **ROOM, **options)
    placed = {mode: fit.placement for mode, fit in modes.items()}
    need = {mode: p.gpu + p.gpu_step for mode, p in placed.items()}
    host = {mode: 2 * (GIB // 2 + p.rank_step) + p.shared for mode, p in placed.items()}
    for free_gpu, free_host, mode in (
        (need["cuda-cuda"], 8 * GIB, "cuda-cuda"),
        (need["cuda-cuda"] - 1, host["pinned-cuda"], "pinned-cuda"),
        (need["cuda-cuda"] - 1, host["pinned-cuda"] - 1, "cpu-cuda"),
        (need["cpu-cuda"], 8 * GIB, "cpu-cuda"),
    ):
        room = {"free_gpu": free_gpu, "free_host": free_host}
        chosen, line, warning = choose_mode(graph, 2, **options, **room)
        assert chosen == mode and line.startswith(f"mode {mode}: ") and not warning
    chosen, _, warning = choose_mode(graph, 2, free_gpu=GIB, free_host=8 * GIB, **options)
    assert chosen == "cpu-cuda" and "may be too large for the free memory: 0 seeds fit" in warning
    large = {**options, "batch_size": 100, "fanout": [40, 10]}
    large |= {"free_gpu": GIB + ARRAYS + 4000, "free_host": 8 * GIB}
    # but no mode has room for such a batch
    assert estimate(graph, 2, **large)[0]["cuda-cuda"].possible
    assert choose_mode(graph, 2, **large)[0] == "cpu-cuda"
    assert choose_mode(graph, 2, "pinned-cuda", **ROOM, **options)[0] == "pinned-cuda"
    kilobytes = r"100 KB shared = .* of 1.07 GB free: .* cannot .* cuda-cuda can"
    alone = r"mode cpu-cpu: host 1 x \(537 MB .* of 537 MB free: this cannot work here$"
    full = "1.07 GB .* of 1.07 GB free.*; mode pinned-cuda can"
    none = "mode cpu-cuda: each GPU 1.07 GB .* cannot work here$"
    for asked, gpus, free_gpu, free_host, words in (
        ("cuda-cuda", 2, GIB + ARRAYS, 8 * GIB, full),
        ("pinned-cuda", 2, 4 * GIB, GIB + ARRAYS - 1, kilobytes),
        ("auto", 2, GIB - 1, 8 * GIB, none),
        ("auto", 0, None, GIB // 2 - 1, alone),
    ):
        with pytest.raises(StoreError, match=words):
            choose_mode(graph, gpus, asked, free_gpu=free_gpu, free_host=free_host, **options)
    for free_host, said in (
        (ARRAYS - 1, "behind --cache"),
        (graph.indices.nbytes, "neighbour lists as they are sampled"),
    ):
        monkeypatch.setattr(plan, "free_host_bytes", lambda: free_host)
        lines = _dry(f"--dataset {graph.path} --gpus 0 --fanout 2", capsys, code=2)
        assert " 0 seeds fit" not in lines
        assert said in lines and "mode           none fits" in lines


TOO_LARGE = """
--fanout 3,3,3 --hidden 2000000            | 128 TB, .*; lower --hidden 2000000, --num-layers 3 or --batch-size 1024$
--fanout 3,3,3 --hidden 2147483647         | --hidden 2147483647: .*overflow
--fanout 9,9,9,9,9,9,9,9,9 --hidden 300000 | hidden 300000, --num-layers 9 or
--fanout 3,3,3 --hidden 70000              | free for each process; lower --hidden 70000
--task link --negatives 100000000          | a batch at least .*batch-size 1024, or --negatives
--task graph --hidden 1000000              | lower --hidden 1000000, --num-layers 3 or
"""


def test_a_run_whose_weights_cannot_fit_is_refused_before_anything_is_allocated(tmp_path, capsys):
    path = _plain_store(tmp_path / "g").path
    graphs = build_graphs(tmp_path / "graphs", [_graphs(20)], split={"train": range(20)})
    for words, said in _rows(TOO_LARGE):
        data = graphs if "graph" in words else path
        assert _code(f"--gpus 0 --epochs 1 --dataset {data}", words) == 2
        assert re.search(said, (error := capsys.readouterr().err).strip()), error


def test_weights_of_a_network_are_counted_with_what_training_adds():
    """All but the gradient of a table of embeddings, which is sparse."""
    made = {"out_dim": 2, "num_layers": 1, "inputs": NodeInputs([(9, 5), (7, 0)], 4)}
    network = GNN(5, 4, **made)
    count, table = sum(p.numel() for p in network.parameters()), 7 * 4
    assert weight_bytes(network, trained=False) == 4 * count
    assert weight_bytes(network, itemsize=8) == 8 * (4 * count - table)


def test_estimate_free_host_memory_is_what_the_cgroups_leave(tmp_path):
    def write(file, text):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    write("proc/self/cgroup", "0::/a/b\n")
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\n")
    assert 1 << 20 < files.free_host_bytes("/") <= files.free_host_bytes(tmp_path) == everything
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\n")
    assert files.free_host_bytes(tmp_path) == 8000 * 1024
    for folder, limit, free in (
        ("a/b", "max", 8000 * 1024),
        ("a", 5_000_000, 4_999_950),
        ("a/b", 4_000_000, 3_999_950),
        ("", 3_000_000, 2_999_950),
    ):
        write(f"sys/fs/cgroup/{folder}/memory.max", f"{limit}\n")
        write(f"sys/fs/cgroup/{folder}/memory.current", "100\n")
        write(f"sys/fs/cgroup/{folder}/memory.stat", "anon 40\ninactive_file 50\n")
        assert files.free_host_bytes(tmp_path) == free  # the tightest of a group and those above it
    write("proc/self/cgroup", "4:memory:/job\n1:cpu:/x\n0::/nowhere/else\n")
    (tmp_path / "sys/fs/cgroup/memory.max").unlink()
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "7000\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "6000\n")
    write("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 70\n")
    assert files.free_host_bytes(tmp_path) == 1070
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "8000\n")
    assert files.free_host_bytes(tmp_path) == 0


def test_a_dry_run_prints_memory_and_plan_and_writes_nothing(tmp_path, capsys):
    path = _plain_store(tmp_path / "g").path
    words = f"--dataset {path} --fanout 3,2 --hidden 8 --batch-size 10"
    files = f"--checkpoint {tmp_path}/run.pt --log {tmp_path}/log --predict {tmp_path}/p.npy"
    before = sorted(tmp_path.rglob("*"))
    text = _dry(f"{words} --gpus 0 {files}", capsys)
    assert sorted(tmp_path.rglob("*")) == before
    assert text.count("no GPU here") == 3 and "\nmode           cpu-cpu\n" in text
    assert "\nfeatures       mmap: graph and features take 100 KB" in text
    assert "\nplan    mode cpu-cpu, precision fp32, weights of the best epoch, 2 batches" in text
    assert "epochs of 10 steps" in text and "\nepoch " not in text
    text = _dry(f"{words} --gpus 2 --free-gpu 80GB", capsys)
    assert "of 80 GB free, host 2 x (537 MB + " in text and "\nmode           cuda-cuda\n" in text
    assert "10 x 2 processes = 20 nodes" in text and "precision tf32" in text
    graphs = build_graphs(tmp_path / "graphs", [_graphs(20)], split={"train": range(20)})
    assert "mode store" in _dry(f"--task graph --gpus 0 --dataset {graphs}", capsys)
    _stops(capsys, "--free-gpu 80000000000 is for --dry-run", f"{words} --gpus 0 --free-gpu 80GB")
    _stops(capsys, "of 0 B free: this cannot work here", f"{words} --gpus 0 --free-host 0")
