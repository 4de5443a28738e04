"""python -m bench network: training over machines that are network namespaces of this one, with and without --split-features.

A machine has one rank on one core, and a link to a bridge. tc limits each link, both ways, to each --rate (Gbit/s; 0: no
limit). For each of --machines, the same epochs are trained with the whole store on each machine and with --split-features,
each also with a --cache of a fifth of the rows; losses have to be equal. Needs root, and no network.

A row of a table says of a step, in the fastest epoch but the first (rank 0's, bytes are the mean over ranks):

    step       ms; that of the whole store includes the all-reduce of gradients on the same links
    waited     ms that training waited for batches
    cpu        ms of its core, of all threads: on one core, no work hides any other, only waiting is hidden
    rows       MB of feature rows received from other machines, as --log counts them
    all        MB received in all-to-alls: rows, ids, counts
    interface  MB that the interface received, less those with the whole store: headers are in it
    exchange   ms in all-to-alls, of which the other machines may have been late
    gloo       ms of all-to-alls of the same bytes alone
    link       ms that the busiest link takes at its rate
    hidden     percent of `exchange` that training did not wait for

--parts paper computes what batches of 1,024 would receive in graphs of the size of ogbn-papers100M and MAG240M on four
machines with 100 Gbit/s: rows of a batch, and of them those in a cache, are counted on a graph of 8 million nodes with the
degrees of papers100M.
"""

import collections
import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import ddp
import train
from bench import tools
from bench.tools import print_table, settle
from disk.files import StoreError
from features import expected_visits
from run import placement
from run.report import Report
from sampler import NeighborSampler
from sources import prepare
from store import GraphStore
from tasks.node import NodeTask

PORT = 29500
CACHED = 0.2  # share of the rows
APART = 0.03  # of bytes by the interface from bytes by the calls, before the benchmark fails
STAND_IN = "synthetic:nodes=8000000,degree=29,features=1,classes=172,train=0.011,valid=0"
PAPER = {  # fanout, bytes of a row
    "papers100M, 15,10,5, bf16": ([15, 10, 5], 256),
    "MAG240M, 15,10,5, fp16": ([15, 10, 5], 1536),
    "MAG240M, 25,15, fp16": ([25, 15], 1536),
}
TOOLS = "ip", "tc", "unshare", "nsenter"


# ---- machines


@contextlib.contextmanager
def namespace():
    """Context with a network namespace -> pid of the process that holds it, until its input ends: also by a kill -9."""
    holder = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # in a session of its own: Ctrl-C ends it after the ranks
    with subprocess.Popen(holder, start_new_session=True, **pipes) as process:
        if not process.stdout.readline():
            raise StoreError(f"network needs namespaces: {process.stderr.read().decode().strip()}")
        yield process.pid


def within(pid, command):
    """Run a command in a namespace."""
    words = ["nsenter", "-t", str(pid), "-n", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise StoreError(f"{command}: {done.stderr.strip()}")


@contextlib.contextmanager
def joined(count, rate):
    """Context with `count` namespaces, 10.0.0.1 and so on, on a bridge in another one -> pids that hold them.
    rate: Gbit/s of each link; 0: no limit."""
    if os.geteuid() or not all(map(shutil.which, TOOLS)):
        raise StoreError(f"network needs root and the commands {', '.join(TOOLS)}")
    with contextlib.ExitStack() as stack:
        bridge, *machines = [stack.enter_context(namespace()) for _ in range(count + 1)]
        within(bridge, "ip link add name bridge0 type bridge")
        within(bridge, "ip link set bridge0 up")
        for i, machine in enumerate(machines, 1):
            within(machine, f"ip link add eth0 type veth peer name port{i} netns {bridge}")
            within(machine, f"ip addr add 10.0.0.{i}/24 dev eth0")
            within(machine, "ip link set lo up")
            within(machine, "ip link set eth0 up")
            within(bridge, f"ip link set port{i} master bridge0 up")
            if rate:
                # what passes in 2 ms, as timers are late; at least four of the longest packets
                burst = max(1 << 18, round(rate * 250_000))
                limit = f"root tbf rate {rate}gbit burst {burst} latency 20ms"
                within(machine, f"tc qdisc add dev eth0 {limit}")
                within(bridge, f"tc qdisc add dev port{i} {limit}")
        yield machines


@contextlib.contextmanager
def started(machines, work, *words):
    """Context with a rank on each machine that calls work(*words) -> the processes, and the files of what they print.
    Processes are killed at its end."""
    context = multiprocessing.get_context("forkserver")  # imports once what ranks need
    context.set_forkserver_preload(["bench.network", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(len(machines))]
        each = enumerate(zip(machines, files))
        options = [
            (rank, len(machines), machine, file, work, words) for rank, (machine, file) in each
        ]
        ranks = [context.Process(target=run_rank, args=chosen) for chosen in options]
        try:
            for rank in ranks:
                rank.start()
            yield ranks, files
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def run_rank(rank, world, machine, file, work, words):
    """Be a rank on a machine: call work(*words), which ends the process."""
    with open(file, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    with open(f"/proc/{machine}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(PORT)}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    settle(1)
    ddp.TIMEOUT = timedelta(minutes=2)  # if this process's parent was killed, with all links
    sys.exit(work(*words))


def outputs(machines, work, *words):
    """Run ranks to their end -> the JSON lines that each printed."""
    with started(machines, work, *words) as (ranks, files):
        for process in ranks:
            process.join()
        printed = [file.read_text() for file in files]
    for rank, (process, text) in enumerate(zip(ranks, printed)):
        if process.exitcode:
            last = text.strip().rpartition("\n")[2]
            raise StoreError(f"rank {rank} ended with exit code {process.exitcode}: {last}")
    return [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in printed]


# ---- a rank


class TimedExchange(placement.Exchange):
    """Exchange that adds up, over all calls, its seconds and the bytes sent to each rank."""

    total = collections.Counter()

    def __call__(self, rows, sent=None, received=None):
        began = time.perf_counter()
        out = super().__call__(rows, sent, received)
        self.total["all_to_all"] += time.perf_counter() - began
        for rank, part in enumerate(rows.split(sent or [1] * self.world)):
            self.total[f"to_{rank}"] += part.nbytes * (rank != self.rank)
        return out


def received():
    """Return the bytes that this namespace's eth0 has received."""
    return int(re.search(r"eth0:\s*(\d+)", Path("/proc/self/net/dev").read_text())[1])


def trained(words):
    """Run a rank of train.py, without exact inference, and print each epoch's figures as JSON."""
    tell = Report.tell

    def told(report, line, figures):
        tell(report, "", figures)
        if "epoch" in figures:
            counts = {"interface": received(), "cpu": time.process_time()} | TimedExchange.total
            print(json.dumps(figures | counts), flush=True)

    no_scores = lambda task, run, report: dict.fromkeys(task.store.split)  # noqa: E731
    with (
        mock.patch.object(Report, "tell", told),
        mock.patch.object(NodeTask, "evaluate", no_scores),
        mock.patch.object(placement, "Exchange", TimedExchange),
    ):
        return train.main(words)


def all_to_alls(matrix):
    """Run a rank that times all-to-alls of bytes alone, matrix[r][s] to rank r from rank s; print the fastest as JSON."""
    ddp.launch(exchanged, 1, matrix)


def exchanged(ranks, matrix):
    incoming = matrix[ranks.rank]
    out = torch.zeros(sum(incoming), dtype=torch.uint8)
    outgoing = [row[ranks.rank] for row in matrix]
    data = torch.zeros(sum(outgoing), dtype=torch.uint8)
    taken = []
    for _ in range(6):
        ranks.barrier()
        began = time.perf_counter()
        dist.all_to_all_single(out, data, incoming, outgoing)
        taken.append(time.perf_counter() - began)
    print(json.dumps({"ms": 1e3 * min(taken[1:])}), flush=True)
    ranks.barrier()


# ---- the benchmark


def flags_of(args, store):
    """Return the flags of train.py for each way to train."""
    words = ["--dataset", store.path, "--hidden", args.hidden, "--batch-size", args.batch_size]
    words += ["--fanout", ",".join(map(str, args.fanout)), "--gpus", 0, "--epochs", 4]
    whole = [str(word) for word in (*words, "--weights", "last")]
    split = [*whole, "--split-features"]
    rows, width = store.features.shape
    cache = ["--cache", str(round(CACHED * rows * width * store.features.dtype.itemsize))]
    return {
        "whole": whole,
        "whole, cache": [*whole, *cache],
        "split": split,
        "split, cache": [*split, *cache],
    }


def epoch_of(run, i, steps):
    """Return the figures of an epoch, a step: times are rank 0's, bytes a list by rank. run: what each rank printed."""

    def grown(name):
        """What a count of each rank has grown by, a step."""
        return [(rank[i].get(name, 0) - rank[i - 1].get(name, 0)) / steps for rank in run]

    count = len(run) if "to_0" in run[0][i] else 0
    return {
        "step": 1e3 * run[0][i]["seconds"] / steps,
        "waited": 1e3 * run[0][i].get("stall", 0) / steps,
        "cpu": 1e3 * grown("cpu")[0],
        "exchange": 1e3 * grown("all_to_all")[0],
        "rows": grown("split_bytes_received"),
        "interface": grown("interface"),
        "sent": [[round(n) for n in grown(f"to_{rank}")] for rank in range(count)],
    }


def measure(args, machines, rate, store):
    """Train on `machines` -> ({way: figures of a step}, losses of each run)."""
    count = len(machines)
    steps = -(-len(store.split["train"]) // (args.batch_size * count))
    ways = flags_of(args, store)
    found = {way: [] for way in ways}
    losses = []
    for _ in range(args.rounds):
        for way, words in ways.items():
            run = outputs(machines, trained, words)
            found[way] += [epoch_of(run, i, steps) for i in range(1, len(run[0]))]
            losses.append([entry["loss"] for entry in run[0]])
    best = {way: min(epochs, key=lambda epoch: epoch["step"]) for way, epochs in found.items()}
    whole = best["whole"]
    table = {}
    for way, fastest in best.items():
        table[way] = {name: fastest[name] for name in ("step", "waited", "cpu")}
        sent = fastest["sent"]
        if not sent:
            continue
        alone = [lines[-1]["ms"] for lines in outputs(machines, all_to_alls, sent)]
        busiest = max(*map(sum, sent), *map(sum, zip(*sent)))
        mean = lambda numbers: statistics.mean(numbers) / 1e6  # noqa: E731
        longer = (fastest["waited"] - whole["waited"]) / fastest["exchange"]
        table[way] |= {
            "rows": mean(fastest["rows"]),
            "all": mean(map(sum, sent)),
            "interface": mean(fastest["interface"]) - mean(whole["interface"]),
            "exchange": fastest["exchange"],
            "gloo": max(alone),
            "link": 8e-6 * busiest / rate if rate else None,
            "hidden": 100 * min(1, max(0, 1 - longer)),
            "sent": sent,
        }
    return table, losses


def measured(args):
    """Measure each number of machines at each rate -> {"N machines, R Gbit/s": {way: figures}}, "failed": what does not agree."""
    store = GraphStore.open(prepare.prepare(args.dataset, args.root))
    figures = {}
    failed = []
    for count in args.machines:
        losses = []
        for rate in args.rate:
            name = f"{count} machines, {f'{rate:g} Gbit/s' if rate else 'no limit'}"
            with joined(count, rate) as machines:
                table, more = measure(args, machines, rate, store)
            losses += more
            figures[name] = print_table(name, table)
            for way, row in table.items():
                if "all" in row and abs(row["interface"] / row["all"] - 1) > APART:
                    failed.append(f"{name}, {way}: bytes by interface and by calls differ")
        if any(loss != losses[0] for loss in losses):
            failed.append(f"{count} machines: losses differ: {losses}")
    print("\n".join(failed) or "losses are equal; bytes by the interface and by calls agree")
    return {"figures": figures, "load": os.getloadavg(), "failed": failed}


def paper(args):
    """Compute a batch's bytes, and ms at 100 Gbit/s, for a rank of four machines -> {case: figures}."""
    store = GraphStore.open(prepare.prepare(STAND_IN, args.root))
    seeds = store.split["train"]
    figures = {}
    for name, (fanout, row_bytes) in PAPER.items():
        sampler = NeighborSampler(store.indptr, store.indices, fanout, check=False)
        visits = expected_visits(store.indptr, store.indices, seeds, fanout, 1024)
        batch = seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))[:1024]]
        nodes = sampler.sample(batch, 0)[0].src_nodes
        for share in (0, 0.1, 0.2):
            cached = torch.zeros(store.num_nodes, dtype=torch.bool)
            cached[visits.topk(round(share * store.num_nodes)).indices] = True
            missing = (~cached[nodes.long()]).sum().item()
            remote = missing * 3 / 4 * row_bytes / 1e6
            figures[f"{name}, cache of {share:.0%}"] = {
                "rows": len(nodes),
                "not cached": missing,
                "MB received": remote,
                **{f"ms, {n} GPUs a machine": n * remote / 12.5 for n in (1, 8)},
            }
    return print_table("a batch of each rank, 4 machines", figures)


def bench_network(args):
    """Run --parts -> their figures."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it cleans up, as for Ctrl-C
    parts = {"measured": measured, "paper": paper}
    figures = {name: parts[name](args) for name in tools.chosen_parts(args, parts)}
    return figures | {"failed": figures.get("measured", {}).get("failed")}
