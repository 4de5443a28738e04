"""--split-features: each machine holds a part of the feature rows in host memory, or each GPU in its own.

    features = spread(ranks, plan, store, features)    # SplitFeatures, or one tensor of extras/peers.py

Machines exchange the rows of a batch in all-to-alls. extras/parts.py cuts a store into parts.
"""

import functools
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from ddp import TIMEOUT, under_torchrun
from disk.files import StoreError
from extras.parts import part_bounds
from extras.peers import over_gpus
from features import MODES, ask, take


class Exchange:
    """All-to-alls of rows in host memory between all ranks, on a process group of their own: another thread may be in the
    ranks' other collectives meanwhile. Every rank makes the same calls in the same order. rank, world: of this process, of all."""

    def __init__(self, ranks):
        self.rank = ranks.rank
        self.world = ranks.world
        self.group = _group_of_rows()

    def __call__(self, rows, sent=None, received=None):
        """Send the first sent[0] of `rows` to rank 0, the next sent[1] to rank 1 ... -> received[0] rows of rank 0, then those
        of the others. None: one row to and from each."""
        out = rows.new_empty(self.world if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


@functools.cache
def _group_of_rows():
    """Make a group of all ranks, once in a process."""
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


class SplitFeatures:
    """Features of which each machine holds a part of the rows: a process asks one process of each machine for the rows of
    a batch by id. Therefore all processes have to gather equally often, in the same order: for a batch without nodes, too.

    Args:
        table: features [V, F] in host memory, from which this process reads rows of its machine's part for the others.
        parts: (the id after the last row, the rank to ask for its rows) of each part, by ids.
        exchange: the all-to-all between the processes, such as `Exchange`.
    """

    collective = True
    # fetched on one thread, while others sample
    looking_ahead = staticmethod(nullcontext)

    def __init__(self, table, parts, exchange):
        self.table = table
        self.shape = tuple(table.shape)
        self.dtype = table.dtype
        self.ends, self.owners = torch.tensor(parts, device="cpu").T.contiguous()
        self.exchange = exchange
        self.sent_as = torch.int32 if self.shape[0] < 1 << 31 else torch.int64  # ids
        self.rows = self.bytes_received = 0
        self.seconds = 0.0

    def counts(self):
        """Return counts since the start: rows gathered, bytes of rows received from others, seconds that took."""
        return {
            "split_rows": self.rows,
            "split_bytes_received": self.bytes_received,
            "split_seconds": self.seconds,
        }

    def uneven(self, features):
        """Return features that are made of these rows, for processes that gather unequally often."""
        return UnevenFeatures(features, self.exchange)

    def gather(self, ids, out=None):
        """Gather rows ids [n] from all parts -> [n, F]."""
        began = time.perf_counter()
        ids = ids.long()
        owner = self.owners[torch.bucketize(ids, self.ends, right=True)]
        order = owner.argsort()
        asked = owner.bincount(minlength=self.exchange.world)
        wanted = self.exchange(asked).tolist()
        asked = asked.tolist()
        answers = take(self.table, self.exchange(ids[order].to(self.sent_as), asked, wanted))
        # as bytes: not every backend knows bfloat16
        rows = self.exchange(answers.view(torch.uint8), wanted, asked).view(self.dtype)
        if out is None:
            out = rows.new_empty(len(ids), self.shape[1])
        out.index_copy_(0, order, rows)
        self.rows += len(ids)
        self.bytes_received += (len(ids) - asked[self.exchange.rank]) * rows[:1].nbytes
        self.seconds += time.perf_counter() - began
        return out


class UnevenFeatures:
    """`SplitFeatures`, or features that are made of their rows, for processes that gather unequally often, as in exact
    inference. A process that waits for others answers them: by `answering`, and at its end by `finish`."""

    def __init__(self, features, exchange):
        self.features = features
        self.shape = features.shape
        self.exchange = exchange

    def _agree(self, more):
        """Return whether any process has more rows to gather."""
        return bool(self.exchange(torch.full((self.exchange.world,), more, device="cpu")).any())

    def gather(self, ids):
        """Gather rows -> [n, F]."""
        self._agree(True)
        return self.features.gather(ids)

    def answering(self, collective):
        """Return a function like `collective`, of all processes, before which they wait for each other in `finish`."""

        def waited(*values):
            self.finish()
            return collective(*values)

        return waited

    def finish(self):
        """Answer the other processes until all of them call this."""
        while self._agree(False):
            self.features.gather(torch.empty(0, dtype=torch.int64, device="cpu"))


def machines_by_part(ranks, plan, store):
    """Return the ranks of each machine, in the order of their parts if stores are parts of one; StoreError, on every rank,
    unless all stores are whole, or --split-features is given and each part is on one machine."""
    machines = ranks.machines()
    gathered = ranks.gather(store.part)
    if {*gathered} == {None}:
        return machines
    parts = [gathered[there[0]] for there in machines]
    every = [(m, len(machines)) for m in range(len(machines))]
    if not plan.split_features or {*parts} != {*every}:
        words = ["part {} of {}".format(*part) if part else "a whole store" for part in parts]
        raise StoreError(
            f"{store.path}: parts of a store take --split-features and one part on each of as many machines"
            f", which have {', '.join(words)}"
        )
    if plan.mode not in MODES[2:]:
        raise StoreError(
            f"--mode {plan.mode} takes a whole store on each machine, {store.path} is a part: --mode cpu-cuda reads it"
        )
    return [machines[parts.index(part)] for part in every]


def spread(ranks, plan, store, features):
    """Split features of a store over the GPUs of this machine, see `over_gpus`, or over the machines -> SplitFeatures: a
    process reads rows of its machine's part, and asks one process of each other machine for rows of theirs."""
    machines = machines_by_part(ranks, plan, store)
    if plan.mode == MODES[0]:
        return over_gpus(ranks, features)
    if len(machines) == 1:
        raise StoreError(
            f"--split-features in --mode {plan.mode} needs several machines: the processes of one share the rows in its "
            f"memory already; --mode {MODES[0]} splits them over its GPUs"
        )
    ends = [part_bounds(features.shape[0], m, len(machines))[1] for m in range(len(machines))]
    owners = [there[ranks.local_rank % len(there)] for there in machines]
    # the page cache has to hold this machine's part alone
    ask(features, "reserve")(0, share=1 / len(machines))
    ranks.say(
        f"memory  features are split over {len(machines)} machines: each reads its "
        f"{features.shape[0] // len(machines):,} rows and asks the others for theirs"
    )
    table = getattr(features, "tensor", features)
    return SplitFeatures(table, [*zip(ends, owners)], Exchange(ranks))


def flags(kinds):
    """Declare the flag of split features."""
    return {
        "mode": dict(
            split_features=kinds.alike(
                kinds.SWITCH,
                False,
                "split feature rows over the GPUs (cuda-cuda) or machines (cpu-cuda, cpu-cpu)",
                needs=[several_gpus_or_machines],
            )
        )
    }


def several_gpus_or_machines(flags):
    """Refuse --split-features where there is only one memory, or one copy is shared."""
    if flags.mode == MODES[1]:
        return f"has no effect: in --mode {MODES[1]} the GPUs of a machine share one copy"
    if flags.gpus < 2 and not under_torchrun() and not flags.dry_run:
        return "needs several GPUs or machines to split them over: --gpus N or torchrun --nnodes N"
