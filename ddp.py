"""Distributed training: launch processes or join torchrun, reduce over ranks, stop together.

This file works alone: copy it into your own code. It is built on torch.distributed.

    launch(worker, nprocs, args)        # worker(ranks, *args) runs in every process
    def worker(ranks, args):
        model = ranks.wrap(model)       # DistributedDataParallel when there is more than one process
        with StopSignal(ranks) as stop:
            for batch in ...:
                ...
                if stop.agreed():       # Ctrl-C or SIGTERM reached some rank: all leave after the same step
                    break
        total, = ranks.sum(local)

The ranks of a machine share its cores; with GPUs each is bound to the cores nearest to its GPU.
"""

import atexit
import ctypes
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
import warnings
import zlib
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(minutes=30)  # of a collective
LOOPBACK = "127.0.0.1"
# SIGHUP comes from a closed terminal, and is ignored under nohup
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Ranks(NamedTuple):
    """Where this process stands among its peers."""

    rank: int = 0  # among all processes
    world: int = 1  # number of processes
    local_rank: int = 0  # among those on this machine
    local_world: int = 1
    gpus: int = 0  # GPUs used on this machine; 0 trains on CPU

    @property
    def device(self):
        """What this process trains on."""
        return torch.device("cuda", self.local_rank) if self.gpus else torch.device("cpu")

    @property
    def leads(self):
        """True on rank 0, which prints and writes."""
        return self.rank == 0

    def say(self, line):
        """Print a line, on rank 0, unless it is empty."""
        if self.leads and line:
            print(line, flush=True)

    def wrap(self, model, unused=False):
        """Average gradients over the ranks and start from rank 0's parameters, when there are several. unused: some
        parameters may take no part in the loss."""
        if self.world == 1:
            return model
        if unused:  # of a model in which all parameters take part
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        ids = [self.local_rank] if self.gpus else None
        distributed = torch.nn.parallel.DistributedDataParallel
        apart = [f"{name}.weight" for name, module in model.named_modules() if _is_sparse(module)]
        distributed._set_params_and_buffers_to_ignore_for_model(model, apart)
        parallel = distributed(model, device_ids=ids, find_unused_parameters=unused)
        self.check_equal(model)
        # on a GPU, DDP takes the time of every hundredth step, which costs nothing
        if not self.gpus:
            parallel.reducer._set_ddp_runtime_logging_sample_rate(1)
        return parallel

    def average_rows(self, model):
        """Average sparse gradients over the ranks, which DistributedDataParallel on GPUs cannot: through host memory."""
        if self.world == 1:
            return
        for weight in (module.weight for module in model.modules() if _is_sparse(module)):
            if weight.requires_grad:
                grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                grad = (grad.coalesce() if grad.is_sparse else grad.to_sparse(1)).cpu()
                weight.grad = self.reduce(grad).to(weight.device) / self.world

    def exchange(self, parallel):
        """Average seconds a step in which gradients were exchanged and the backward pass was idle."""
        times = parallel._get_ddp_logging_data()  # of the steps before the last
        names = "avg_backward_comm_time", "avg_backward_compute_comm_overlap_time"
        communication, overlap = (times.get(name, 0) for name in names)
        return (communication - overlap) / 1e9

    def check_equal(self, model):
        """Raise RuntimeError, on every rank, unless all ranks hold the same parameters, bit for bit."""
        checksum = 0
        for p in model.parameters():
            checksum = zlib.crc32(p.detach().cpu().flatten().view(torch.uint8).numpy(), checksum)
        sums = self.gather(checksum)
        if others := [rank for rank in range(self.world) if sums[rank] != sums[0]]:
            raise RuntimeError(f"the parameters of ranks {others} are not those of rank 0")

    def sum(self, *values):
        """Sum numbers over all ranks -> list of floats, the same on every rank."""
        return self.reduce(torch.tensor(values, dtype=torch.float64)).tolist()

    def sum_here(self, *values):
        """Sum numbers over the ranks of this machine -> list; all machines have to call it together."""
        first = self.rank - self.local_rank
        return [sum(part) for part in zip(*self.gather(values)[first : first + self.local_world])]

    def reduce(self, tensor):
        """Sum a tensor over all ranks, in place -> the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value):
        """Every rank's value (a number, a tensor, ...), in the order of the ranks -> list, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, data, source=0):
        """Give the bytes of rank `source` to all -> bytes; what the others pass is ignored."""
        values = [data]
        if self.world > 1:
            dist.broadcast_object_list(values, source, device=torch.device("cpu"))
        return values[0]

    def barrier(self):
        """Wait until every rank is here."""
        self.sum(0)

    @contextmanager
    def patience(self, limit=timedelta(days=2)):
        """One rank works inside, maybe for hours; the others wait at the end, beyond the timeout of collectives."""
        group = dist.new_group(backend="gloo", timeout=limit) if self.world > 1 else None
        yield
        if group is not None:
            dist.barrier(group)
            dist.destroy_process_group(group)

    def part(self, n):
        """This rank's slice of n items: contiguous, no item twice or left out, sizes that differ by at most one."""
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)


def _is_sparse(module):
    return isinstance(module, torch.nn.Embedding) and module.sparse


def under_torchrun():
    """True when torchrun (or another launcher with its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(worker, nprocs, *args, gpus=0):
    """Run worker(ranks, *args) in nprocs processes on this machine, or as one rank of torchrun's; SystemExit with the code
    that a rank failed with or returned, if it is not 0.

    With one process it runs right here. A rank that raises takes the others down; its traceback is printed. SIGINT,
    SIGTERM and SIGHUP are passed on to the ranks, which may finish what they do (see StopSignal); a second SIGINT
    kills them.

    Args:
        worker: a function of a module that can be imported (the processes are spawned).
        nprocs: processes on this machine; torchrun's own number takes its place.
        gpus: GPUs on this machine, one for each process, or 0 for CPU.
    """
    if under_torchrun():
        env, store = os.environ, None
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", world))
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # it outlives a restart (torch 2.13): without a prefix a rank could find where a dead one listened
            store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt {attempt}", store)
        return _run(worker, Ranks(rank, world, *local, gpus), store, args)
    if nprocs == 1:
        if code := worker(Ranks(gpus=gpus), *args):
            sys.exit(code)
        return
    # The parent is the rendezvous, on a free port of the loopback: torch's own would listen on every address.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    options = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
    store = dist.TCPStore(LOOPBACK, port, is_master=True, **options)
    given = worker, nprocs, gpus, port, os.getpid(), args
    # inherited: Ctrl-C reaches the whole group of a terminal, also while the ranks import torch
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = mp.spawn(_spawned, given, nprocs, join=False)
    finally:
        signal.signal(signal.SIGINT, before)
    _supervise(context)
    del store  # it is needed until here


@contextmanager
def _handling(handler):
    """Handle STOPS, except those that are ignored."""
    handled = [number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _supervise(context):
    """Wait for spawned ranks, passing signals on; exit as the first failing rank did, leaving none behind."""
    received = []

    def forward(number, frame):
        received.append(number)
        for process in filter(mp.Process.is_alive, context.processes):
            (process.kill if received.count(signal.SIGINT) > 1 else process.terminate)()

    # torch warns of each process that it terminates
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with _handling(forward):
        try:
            while not context.join(grace_period=2):
                pass
        except mp.ProcessRaisedException as failure:
            print(failure, file=sys.stderr)
            sys.exit(1)
        except mp.ProcessExitedException as failure:
            if received:
                sys.exit(128 + received[0])
            if name := failure.signal_name:
                why = ", as the system does when memory runs out" * (name == "SIGKILL")
                print(f"rank {failure.error_index} was killed by {name}{why}", file=sys.stderr)
            code = failure.exit_code
            sys.exit(code if code > 0 else 128 - code)
        finally:
            for process in context.processes:
                process.kill()


def _spawned(rank, worker, nprocs, gpus, port, parent, args):
    _end_with_the_parent()
    if os.getppid() != parent:  # it was killed while this process imported torch
        os._exit(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks are all on this machine
    # these reach the whole group of a terminal; the parent passes them on as SIGTERM
    for number in set(STOPS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    _run(worker, Ranks(rank, nprocs, rank, nprocs, gpus), store, args)


def _end_with_the_parent():
    """Have the kernel kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(worker, ranks, store, args):
    """Join the process group, run the worker, end the process with the worker's code, or 1 where it raised."""
    _end_with_the_parent()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // ranks.local_world))
    if ranks.gpus:
        torch.cuda.set_device(ranks.device)
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores_near(torch.cuda.get_device_properties(ranks.device)))
    backend = "cpu:gloo,cuda:nccl" if ranks.gpus else "gloo"
    where = {} if store is None else {"store": store, "rank": ranks.rank, "world_size": ranks.world}
    # with its GPU NCCL connects here and now, and never guesses a device
    where |= {"device_id": ranks.device} if ranks.gpus else {}
    dist.init_process_group(backend, timeout=TIMEOUT, **where)
    try:
        ranks.barrier()  # a rank that ends breaks the connections that others still make
        code = worker(ranks, *args) or 0
        if not code:  # else peers may still be waiting elsewhere
            dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            # a peer failed first: its traceback is the one to see, and the parent kills this process within 2 s
            time.sleep(3)
        traceback.print_exc()
        code = 1
    # Gloo's threads may still hold tensors, and abort if they release them while the interpreter is finalized (pytorch
    # issue 190489): the process exits before.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        print(end="", file=stream, flush=True)  # None where it was closed
    os._exit(code)


def cores_near(gpu, sysfs="/sys"):
    """Cores of this process near a GPU (torch.cuda.get_device_properties); all of them if the kernel does not know."""
    cores = os.sched_getaffinity(0)
    try:
        slot = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = Path(sysfs, "bus/pci/devices", slot, "local_cpulist").read_text()
    except (OSError, AttributeError):
        return cores
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    near = {core for a, b in spans for core in range(int(a), int(b or a) + 1)}
    return near & cores or cores


class StopSignal:
    """Agree on stopping after a SIGINT, SIGTERM or SIGHUP: all ranks leave after the same step. The answer is one step old,
    from an asynchronous all-reduce on the CPU. A second SIGINT ends the process at once."""

    def __init__(self, ranks):
        self.ranks, self.received, self.work, self.answer = ranks, 0, None, False

    def __enter__(self):
        self.handling = _handling(self._receive)
        self.handling.__enter__()
        return self

    def __exit__(self, kind, *exc):
        if self.work is not None and kind is None:
            self.work.wait()
        self.handling.__exit__(None, None, None)

    def _receive(self, number, frame):
        if self.received == number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number

    def request(self):
        """Ask all ranks to stop, as a signal would."""
        self.received = self.received or signal.SIGTERM

    def agreed(self):
        """True on every rank, in the same call, once any rank received a signal. Call it once a step on each."""
        if self.ranks.world == 1:
            self.answer = self.received != 0
        else:
            if self.work is not None:
                self.work.wait()
                self.answer = bool(self.flag.item())
            self.flag, self.work = torch.tensor([int(self.received)]), None
            if not self.answer:
                self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)
        return self.answer

    @property
    def exit_code(self):
        """The shell's code for a process that stopped on the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + (self.received or signal.SIGTERM)
