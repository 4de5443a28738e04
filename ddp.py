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

The ranks of a machine share its cores, unless OMP_NUM_THREADS says how many threads each has; with GPUs each is bound to
the cores nearest to its GPU.
"""

import atexit
import ctypes
import functools
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

with suppress(ImportError):
    from extras import elsewhere

    __getattr__ = elsewhere(__name__)

TIMEOUT = timedelta(minutes=30)  # of a collective
# in gloo's errors; the second where a timeout broke a connection that others wait for
OF_GLOO = re.compile("gloo|pair closure", re.IGNORECASE)
LOOPBACK = "127.0.0.1"
# SIGHUP: the terminal was closed; nohup ignores it
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class Ranks(NamedTuple):
    """This process's rank, and the collectives of its group."""

    rank: int = 0  # among all processes
    world: int = 1  # number of processes
    local_rank: int = 0  # among those on this machine
    local_world: int = 1
    gpus: int = 0  # GPUs used on this machine; 0 trains on CPU

    @property
    def device(self):
        """The torch.device this process trains on."""
        return torch.device("cuda", self.local_rank) if self.gpus else torch.device("cpu")

    @property
    def leads(self):
        """True on rank 0, which prints and writes."""
        return self.rank == 0

    def say(self, line):
        """Print a line on rank 0, unless it is empty."""
        if self.leads and line:
            print(line, flush=True)

    def wrap(self, model, unused=False):
        """Wrap a model in DistributedDataParallel, if there are several ranks: they start from rank 0's parameters
        (embedding tables with sparse gradients have to be equal) and average gradients. unused: some parameters may
        take no part in the loss."""
        if self.world == 1:
            return model
        distributed = torch.nn.parallel.DistributedDataParallel
        sparse = [f"{name}.weight" for name, module in model.named_modules() if _is_sparse(module)]
        distributed._set_params_and_buffers_to_ignore_for_model(model, sparse)
        parallel = distributed(
            model, device_ids=[self.device] if self.gpus else None, find_unused_parameters=unused
        )
        self.check_equal(model)
        # on CPU time every step, for `exchange` of run/report.py; on a GPU DDP times every hundredth, at no cost
        if not self.gpus:
            parallel.reducer._set_ddp_runtime_logging_sample_rate(1)
        return parallel

    def average_sparse(self, model):
        """Average sparse gradients over the ranks, through host memory: DistributedDataParallel cannot on GPUs."""
        if self.world == 1:
            return
        for weight in (module.weight for module in model.modules() if _is_sparse(module)):
            if weight.requires_grad:
                grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                grad = (grad.coalesce() if grad.is_sparse else grad.to_sparse(1)).cpu()
                weight.grad = self.reduce(grad).to(weight.device) / self.world

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
        """Sum numbers over the ranks of this machine -> list; a collective of all ranks of all machines."""
        return [sum(part) for part in zip(*self.gather_here(values))]

    def machines(self):
        """Return the ranks of each machine, a list of ranges; a collective of all ranks."""
        firsts = sorted({*self.gather(self.rank - self.local_rank)})
        return [range(*ends) for ends in pairwise([*firsts, self.world])]

    def group_here(self):
        """Make a process group of the ranks of this machine, with gloo; a collective of all ranks of all machines."""
        return dist.new_subgroups_by_enumeration([*map(list, self.machines())], TIMEOUT, "gloo")[0]

    def reduce(self, tensor):
        """Sum a tensor over all ranks, in place -> the tensor."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value):
        """Gather a value (number, tensor, ...) from every rank -> list, by rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def gather_here(self, value):
        """Gather a value from every rank of this machine -> list, by local rank; a collective of all ranks of all machines."""
        first = self.rank - self.local_rank
        return self.gather(value)[first : first + self.local_world]

    def broadcast(self, data, source=0):
        """Broadcast bytes from rank `source` -> bytes; `data` of the other ranks is ignored."""
        values = [data]
        if self.world > 1:
            dist.broadcast_object_list(values, source, device=torch.device("cpu"))
        return values[0]

    def barrier(self):
        """Wait until every rank has called this."""
        self.sum(0)

    @contextmanager
    def patience(self):
        """Context in which one rank may work for hours: the others wait at its end, up to two days, not TIMEOUT."""
        if self.world == 1:
            yield
            return
        group = dist.new_group(backend="gloo", timeout=timedelta(days=2))
        yield
        dist.barrier(group)
        dist.destroy_process_group(group)

    def part(self, n):
        """Return this rank's contiguous slice of n items: the slices cover each item once, sizes differ by <= 1."""
        return slice(n * self.rank // self.world, n * (self.rank + 1) // self.world)


def _is_sparse(module):
    return isinstance(module, torch.nn.Embedding) and module.sparse


def under_torchrun():
    """Return True if torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(worker, nprocs, *args, gpus=0):
    """Run worker(ranks, *args) in nprocs processes on this machine, or as one rank under torchrun. SystemExit with the
    exit code of the first rank that fails.

    With nprocs=1 the worker runs in the calling process. Under torchrun, which starts a process for each rank, `launch` does
    not return: the process runs the worker and exits with its code. What comes after training belongs into the worker,
    under `if ranks.leads`, so that it runs in both cases. If a rank raises, its traceback is printed and the others are
    killed. SIGINT, SIGTERM and SIGHUP are passed on to the ranks, which may finish their step (see StopSignal); a
    second SIGINT kills them.

    Args:
        worker: a function that can be imported, because the processes are spawned; its return value is the exit code.
            It has to wait for its asynchronous collectives: they end with the process.
        nprocs: processes on this machine; under torchrun its --nproc-per-node counts instead.
        gpus: GPUs on this machine, one per process; 0 for CPU. ValueError if torch sees fewer.
    """
    if gpus and gpus > (count := torch.cuda.device_count()):
        raise ValueError(f"gpus is {gpus}: of CUDA GPUs torch sees {count} on this machine")
    if under_torchrun():
        return _join(worker, args, gpus)
    if nprocs == 1:
        if code := worker(Ranks(gpus=gpus), *args):
            sys.exit(code)
        return
    if worker.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"{getattr(worker, '__name__', worker)} is defined in a notebook or session: "
            "define it in a file, from which processes can import it"
        )
    # The parent hosts the rendezvous on a free loopback port: torch's own store would listen on every address.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # torch 2.6's libuv store refuses an open socket
    )
    rank_main = functools.partial(
        _spawned, worker=worker, args=args, world=nprocs, gpus=gpus, port=port, parent=os.getpid()
    )
    _supervise(rank_main, nprocs)
    del store  # the ranks need it until here


def _join(worker, args, gpus):
    """Run the worker as the rank that torchrun's environment variables name."""
    env = os.environ
    store = None
    try:
        rank = int(env["RANK"])
        world = int(env["WORLD_SIZE"])
        if not 0 <= rank < world:
            sys.exit(f"RANK is {rank}: with WORLD_SIZE {world} ranks are 0 to {world - 1}")
        local_rank = int(env.get("LOCAL_RANK", rank))
        local_world = int(env.get("LOCAL_WORLD_SIZE", world))
        if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # the agent's store outlives a restart (torch 2.13): without a prefix a rank could read a dead one's address
            store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
            attempt = env.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt {attempt}", store)
        _run(worker, Ranks(rank, world, local_rank, local_world, gpus), store, args)
    except (ValueError, dist.DistError) as error:
        sys.exit(
            "ranks cannot join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: "
            f"{str(error).splitlines()[0]}"
        )


@contextmanager
def _handling(handler):
    """Context in which `handler` handles the signals in STOPS that are not ignored; on a thread that is not the main one,
    where Python sets no handlers, none."""
    stops = STOPS if threading.current_thread() is threading.main_thread() else ()
    previous = {
        number: signal.signal(number, handler)
        for number in stops
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _supervise(rank_main, nprocs):
    """Spawn ranks that run rank_main(rank), wait for them and pass signals on; if one fails, kill the rest and exit with
    its code."""
    received = []
    others = set(mp.active_children())

    def forward(number, frame):
        received.append(number)
        for process in set(mp.active_children()) - others:
            if received.count(signal.SIGINT) > 1:
                process.kill()
            else:
                process.terminate()

    # torch logs a warning for each process it terminates
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with _handling(forward):
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                resource_tracker.ensure_running()  # whose start unblocks SIGINT
                # ranks inherit the mask: Ctrl-C reaches the whole process group, also while they import torch
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                context = mp.spawn(rank_main, (), nprocs, join=False)
            except OSError as error:
                sys.exit(f"{nprocs} processes could not be started: {error}")
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if received:  # perhaps before the last rank was started
                forward(received.pop(), None)
            while not context.join(grace_period=2):
                pass
        except mp.ProcessExitedException as failure:
            if received:
                sys.exit(128 + received[0])
            if name := failure.signal_name:
                why = ", as the system does when memory runs out" * (name == "SIGKILL")
                print(f"rank {failure.error_index} was killed by {name}{why}", file=sys.stderr)
            code = failure.exit_code
            sys.exit(code if code > 0 else 128 - code)
        finally:
            for process in set(mp.active_children()) - others:
                process.kill()


def _spawned(rank, *, worker, args, world, gpus, port, parent):
    _end_with_the_parent()
    if os.getppid() != parent:  # the parent was killed while this process imported torch
        os._exit(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    # a terminal sends these to the whole process group; the parent passes them on as SIGTERM
    for number in set(STOPS) - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # see `_supervise`
    store = dist.TCPStore(LOOPBACK, port, is_master=False)
    _run(worker, Ranks(rank, world, rank, world, gpus), store, args)


def _end_with_the_parent():
    """Make the kernel kill this process when its parent dies for any reason (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(worker, ranks, store, args):
    """Join the process group, run the worker and exit the process with its code, or 1 if it raised."""
    _end_with_the_parent()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # which waits for C++ code, and that for other ranks
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    share_cores(ranks.local_world)
    if ranks.gpus:
        torch.cuda.set_device(ranks.device)
        os.sched_setaffinity(0, cores_near(torch.cuda.get_device_properties(ranks.device)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ranks.gpus else "gloo",
        timeout=TIMEOUT,
        rank=ranks.rank,
        world_size=ranks.world,
        store=store,
        # given it, NCCL connects now and never guesses a device
        device_id=ranks.device if ranks.gpus else None,
    )
    try:
        ranks.barrier()  # a rank that ends breaks the connections that others still make
        code = worker(ranks, *args) or 0
        if ranks.gpus and not code:
            torch.cuda.synchronize()  # NCCL's kernels would end with this process
    except Exception as error:
        if lost_another(error):
            # a peer failed first: its traceback is the one to show, and the parent kills this rank within 2 s
            time.sleep(3)
            # without the place in gloo's code, and its advice
            why = re.sub(r"\[\S*gloo\S*\] |\. This is typically.*", "", str(error).splitlines()[0])
            print(
                f"rank {ranks.rank} lost another rank, which ended or does not answer: {why}",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
        code = 1
    # Exit without finalization: Gloo's threads abort if they release tensors during it (pytorch issue 190489). And
    # without destroy_process_group: in torch 2.6 it joins these threads while it holds the GIL, which they may wait for.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)  # stream is None if it was closed
        except OSError:  # a closed pipe or a full disk
            code = code or 120  # as the interpreter ends then
    os._exit(code)


def share_cores(processes):
    """Give torch in this process as many threads as each of the machine's processes has cores, unless OMP_NUM_THREADS is set,
    which torch goes by. torchrun sets it to 1 where it is not: under torchrun that is no choice of a person."""
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is None or asked == "1" and under_torchrun():
        cores = os.cpu_count()
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // processes))


def lost_another(error):
    """Return whether a collective raised this because another rank failed."""
    return isinstance(error, dist.DistError) or bool(OF_GLOO.search(str(error)))


def cores_near(gpu, sysfs="/sys"):
    """Return this process's cores nearest to a GPU (torch.cuda.get_device_properties), or all if sysfs lists none."""
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
    """Make all ranks stop after the same step once one receives SIGINT, SIGTERM or SIGHUP. The answer comes one step
    late, from an asynchronous all-reduce on the CPU. A second SIGINT ends the process at once."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.received = 0  # number of the signal
        self.work = None  # the all-reduce of `flag` in progress
        self.answer = False
        self.handling = _handling(self._receive)

    def __enter__(self):
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
        """Ask all ranks to stop, as if SIGTERM had been received."""
        self.received = self.received or signal.SIGTERM

    def agreed(self):
        """Return True on every rank, in the same call, once any rank received a signal. Call it once per step."""
        if self.ranks.world == 1:
            self.answer = self.received != 0
        else:
            if self.work is not None:
                self.work.wait()
                self.answer = bool(self.flag.item())
            self.flag = torch.tensor([int(self.received)])
            self.work = None
            if not self.answer:
                self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, async_op=True)
        return self.answer

    @property
    def exit_code(self):
        """The shell's exit code for the signal: 130 for SIGINT, 143 for SIGTERM or if only another rank got one."""
        return 128 + (self.received or signal.SIGTERM)
