"""Tests: ddp.py: ranks that start, wait, die and are brought back; signals; the real script where these are tested."""

import datetime
import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp
import train
from run.flags import make_parser
from store import GraphStore, build_store
from tests.common import (
    HERE,
    _code,
    _end,
    _fork,
    _log,
    _same_weights,
    _split,
    _start,
    _start_fork,
    _train,
    _wait_for,
)

SMALL_STEPS = "--gpus 0 --fanout 5,5 --hidden 32 --epochs 25 --batch-size 25"
PLANNED = "--mode cpu-cpu --cache 640 --lookahead 3"  # 10 rows of TINY by each process


def _processes():
    """Return {pid: (state, pid of its parent)} of all processes."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if stat := _proc(pid, "stat"):
            state, parent = stat.rsplit(")", 1)[1].split()[:2]
            found[int(pid)] = state, int(parent)
    return found


def _proc(pid, file):
    """Return the text of a file of a process, "" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    return ""


def _running_below(pid):
    """Return a process and all those below it."""
    processes, found = _processes(), [pid]
    for above in found:
        found += [below for below, (_, parent) in processes.items() if parent == above]
    return found


def _gone(pids, seconds=10):
    """Wait until no process but zombies is left of some -> whether none is."""
    alive = lambda: any(_processes().get(pid, "Z")[0] != "Z" for pid in pids)  # noqa: E731
    deadline = time.monotonic() + seconds
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive()


def _elastic_rank(*words):
    if not (child := os.fork()):
        os._exit(train.main([*words]))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(abs(code))


def _elastic(*words):
    """Run ranks as torchrun does, but forked, in a fork of its own since it does not return."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    options |= {"run_id": "x", "monitor_interval": 0.05, "max_restarts": 2}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **options)
    elastic_launch(config, _elastic_rank)(*words)


def test_torchrun_brings_a_killed_rank_back(tiny, tmp_path):
    straight, back, log = (tmp_path / name for name in ("straight.pt", "c.pt", "log"))
    common = f"--dataset {tiny} {SMALL_STEPS} --epochs 12"
    _train(common, f"--procs 2 --checkpoint {straight}")
    files = f"--checkpoint {back} --checkpoint-every 5 --log-file {log}"
    process = _fork(tmp_path / "out", _elastic, *f"{common} {files}".split())
    _wait_for(
        lambda: log.is_file() and log.read_text().count("\n") > 3, process
    )  # its head, epochs
    ranks = _running_below(process.pid)[1:]
    os.kill(ranks[-1], signal.SIGKILL)
    output = _end(process)
    assert "resume  from epoch" in output, output
    assert _same_weights(straight, back) and _gone(ranks)


def _as_rank(variables, *words):
    os.environ.update(variables)
    return train.main(words)


def _on_machines(folder, counts, *words):
    """Start train.py as torchrun does on machines of so many ranks each -> the processes, by rank. MACHINE in `words` is
    the number of the machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": sum(counts)}
    processes = []
    for machine, local_world in enumerate(counts):
        there = [word.replace("MACHINE", str(machine)) for word in _split(words)]
        for local_rank in range(local_world):
            rank = len(processes)
            own = {"RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
            own = {name: str(value) for name, value in (variables | own).items()}
            processes.append(_fork(folder / f"rank{rank}", _as_rank, own, *there))
    return processes


def _same_logs(*files):
    """Assert that runs had the same losses and scores -> their logs."""
    logs = [*map(_log, files)]
    for entries in zip(*logs, strict=True):
        for name in {"loss", "valid_sampled", "valid", "exact"}.intersection(*entries):
            assert entries[0][name] == entries[1][name]
    return logs


@pytest.mark.parametrize(
    "counts, words",
    [
        ([1, 1], "--sample-threads 2"),
        ([2, 1], "--cache 20KiB --model gat --prefetch 0 --accumulate 2"),
        ([1, 1], "--task link --edge-split 10/40/50"),
    ],
)
def test_split_features_change_no_bit(counts, words, tiny, tmp_path):
    """Batches are sampled on several threads, and asked for in order; the last one is smaller. Without split features the
    ranks of one machine, and of two, have the same result."""
    common = f"--dataset {tiny} --gpus 0 --fanout 5,3 --hidden 16 --batch-size 70 {words} --epochs"
    epochs = 1 if "link" in words else 2
    files = [f"--checkpoint {tmp_path}/{name}.pt --log {tmp_path}/{name}" for name in "abc"]
    for split, file in zip(("", "--split-features"), files):
        for process in _on_machines(tmp_path, counts, common, epochs, file, split):
            _end(process)
    assert _same_weights(tmp_path / "a.pt", tmp_path / "b.pt")
    counted = _same_logs(tmp_path / "a", tmp_path / "b")[1][epochs - 1]
    if "link" not in words:
        # the other machine holds half of the rows, the less popular ones
        share = counted["split_bytes_received"] / (counted["split_rows"] * 16 * 4)
        assert 0.2 < share < 0.6 and counted["split_seconds"] > 0
    if "threads" in words:
        _train(common, epochs, files[2], "--procs 2")
        assert _same_weights(tmp_path / "a.pt", tmp_path / "c.pt")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_machines_end_together(number, tiny, tmp_path):
    """By a signal that one of them receives, or in a sentence if one dies: no parent ends the others. They may be told to
    prepare different numbers of batches ahead."""
    words = (
        f"--dataset {tiny} --gpus 0 --batch-size 50 --fanout 3,3 --epochs 10000 --split-features"
    )
    ranks = _on_machines(tmp_path, [1, 1, 1], words, "--prefetch MACHINE")
    _wait_for(lambda: ranks[0].output.read_text().count("\nepoch ") > 2, ranks[0])
    os.kill(ranks[1].pid, number)
    if number == signal.SIGTERM:
        printed = [_end(process, 128 + number) for process in ranks]
        assert "stopped in epoch" in printed[0] and printed[1:] == ["", ""]
        return
    for rank in (0, 2):
        printed = _end(ranks[rank], 1)
        lost = f"rank {rank} lost another rank, which ended or does not answer: "
        assert printed.count(lost) == 1 and "Traceback" not in printed, printed


def _times_out(ranks):
    raise RuntimeError("Application timeout caused pair closure")


def test_a_rank_that_gloo_gives_up_is_a_sentence(tmp_path):
    """These words alone are what a backward pass raises if a peer has been silent."""
    printed = _end(_fork(tmp_path / "out", ddp.launch, _times_out, 2), 1)
    assert "does not answer: Application timeout caused pair closure\n" in printed, printed
    assert "Traceback" not in printed


def test_split_features_need_several_machines(tiny, tmp_path, capsys):
    words = f"--dataset {tiny} --gpus 0 --split-features"
    assert _code(words) == 2
    text = capsys.readouterr().err
    needs = "several GPUs or machines to split them over: --gpus N or torchrun --nnodes N"
    assert f"--split-features needs {needs}" in text
    printed = [_end(process, 2) for process in _on_machines(tmp_path, [2], words)]
    assert "--split-features in --mode cpu-cpu needs several machines: " in printed[0]


def _unlike(ranks, *words):
    return train.worker(ranks, train.parse_args(words[ranks.rank].split()), None)


def test_machines_of_other_flags_or_other_data_are_refused(tiny, tmp_path):
    graph, other = GraphStore.open(tiny), tmp_path / "other"
    parts = {"labels": graph.labels, "split": graph.split, "features": graph.features.tensor + 1}
    build_store(other, indptr=graph.indptr, indices=graph.indices, **parts)
    words = f"--gpus 0 --fanout 3,3 --epochs 1 --dataset {tiny}"
    sums = "is [0-9a-f]{64} on rank 0, [0-9a-f]{64} on rank 1"
    for name in ("Linear", "Identity"):
        (tmp_path / f"{name}.py").write_text(f"from torch.nn import {name} as Net")
    for first, second, said in (
        (
            f"--model {tmp_path}/Linear.py:Net",
            f"--model {tmp_path}/Identity.py:Net",
            f"--model's file {sums}",
        ),
        (
            "--task link",
            "--task link --edge-split 20/40/40",
            "--edge-split is 85/5/10 on rank 0, 20/40/40 on rank 1",
        ),
        ("", f"--dataset {other}", f"features.npy {sums}"),
    ):
        given = (f"{words} {more}" for more in (first, second))
        output = _end(_fork(tmp_path / "out", ddp.launch, _unlike, 2, *given), 2)
        said = f"train.py: {said}: all machines need the same flags and data"
        assert re.search(said, output), output


_STARTS = """
import os, sys
sys.path.insert(0, {here!r})
import torch, ddp
def worker(ranks):
    sys.setswitchinterval(10)  # gloo's threads do not get the interpreter before it is taken down
    model = ranks.wrap(torch.nn.Linear(8, 8))
    with ddp.StopSignal(ranks) as stop:
        for _ in range(20):
            model(torch.ones(4, 8)).sum().backward()
            stop.agreed()
    ranks.barrier()
if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        ddp.launch(worker, 2)
        print(len(os.listdir("/proc/self/fd")), flush=True)  # sockets among them
        sys.stdin.readline()
"""


def test_starts_and_stops_leave_nothing_behind(tmp_path):
    """Even if gloo still holds tensors, which aborted every other run. RINGBLOCK_STARTS=100 repeats that often."""
    (tmp_path / "starts.py").write_text(_STARTS.format(here=str(HERE)))
    memory, starts = set(os.listdir("/dev/shm")), int(os.environ.get("RINGBLOCK_STARTS", 2))
    left, pipes = set(), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "starts.py", str(starts)], cwd=tmp_path, **pipes)
    for _ in range(starts):
        files = int(process.stdout.readline())
        left.add((files, len(_running_below(process.pid))))
        process.stdin.write("\n")
        process.stdin.flush()
    process.communicate(timeout=600)
    assert process.returncode == 0 and len(left) == 1
    assert left.pop()[1] <= 2  # with multiprocessing's own resource tracker
    assert set(os.listdir("/dev/shm")) <= memory and len(list(tmp_path.iterdir())) == 1


def _differs(ranks):
    heard = []  # a worker may handle Ctrl-C itself
    signal.signal(signal.SIGINT, lambda *given: heard.append(given))
    os.kill(os.getpid(), signal.SIGINT)
    assert heard
    net = torch.nn.Linear(2, 2)
    ranks.wrap(net)  # takes rank 0's parameters
    ranks.check_equal(net)
    assert ranks.broadcast(b"ab" * ranks.rank, 2) == b"abab"
    assert ranks.broadcast(None if ranks.rank else b"") == b""
    assert ranks.gather(ranks.rank * 2**50) == [0, 2**50, 2**51]
    with torch.no_grad():
        net.bias[1] += 1e-7 * (ranks.rank == 1)
    ranks.check_equal(net)


def test_ranks_know_when_their_parameters_differ(tmp_path):
    output = _end(_fork(tmp_path / "out", ddp.launch, _differs, 3), 1)
    assert "RuntimeError: the parameters of ranks [1] are not those of rank 0" in output


def test_ranks_are_bound_near_their_gpus(tmp_path, monkeypatch):
    gpu = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    slot = tmp_path / "bus/pci/devices/0000:3b:00.0"
    slot.mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert ddp.cores_near(gpu, tmp_path) == set(range(8))  # nothing known
    (slot / "local_cpulist").write_text("2-3,6,40-43\n")
    assert ddp.cores_near(gpu, tmp_path) == {2, 3, 6}
    (slot / "local_cpulist").write_text("40-43\n")  # all of them forbidden to this process
    assert ddp.cores_near(gpu, tmp_path) == set(range(8))


@pytest.mark.parametrize("script", ["train.py", "store.py"])
def test_ctrl_c_during_the_imports_leaves_no_traceback(script):
    process = _start(script=script)
    _wait_for(lambda: "libtorch" in _proc(process.pid, "maps"), process, pause=0.001)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and output == "", output


def test_ctrl_c_during_the_exit_leaves_no_traceback():
    code = "from disk import terminal; import atexit, os; terminal.begin()"
    code += "; atexit.register(os.kill, os.getpid(), 2); terminal.ready()"  # 2: SIGINT
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def _listening(pids):
    """Return the addresses, as the kernel writes them, on which processes accept connections."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
    texts = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for text in texts for line in text.splitlines()[1:]]
    rows = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {row[1].split(":")[0] for row in rows}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_a_parent_that_ends_while_it_imports_torch(number, tiny):
    """A terminal sends Ctrl-C to the whole process group, and the import would end in a traceback; SIGKILL goes to the
    parent alone. The real script with spawned ranks."""
    process = _start(f"--dataset {tiny} --gpus 0 --procs 2", start_new_session=True)

    def importing():  # ranks alone: a child that the parent forks maps torch, too
        ranks = [p for p in _running_below(process.pid) if "spawn_main" in _proc(p, "cmdline")]
        return [rank for rank in ranks if "torch" in _proc(rank, "maps")]

    _wait_for(importing, process, pause=0.001)
    family = _running_below(process.pid)
    blocked = int(re.search(r"SigBlk:\s*(\w+)", _proc(importing()[0], "status"))[1], 16)
    assert blocked >> signal.SIGINT - 1 & 1
    os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
    output, _ = process.communicate(timeout=60)
    assert _gone(family, 60) and "Traceback" not in output, output


KILLED = "was killed by SIGKILL, as the system does when memory runs out"
SHORT = "features.npy cannot be read at byte 100,000: it was cut short after it was opened"


@pytest.mark.parametrize(
    "rank, code, sentence", [(0, 137, KILLED), (1, 137, KILLED), (2, 2, SHORT)]
)
def test_a_killed_rank_ends_the_run_in_one_sentence_and_leaves_no_semaphore(
    rank, code, sentence, tiny, tmp_path
):
    """Or a file that shrinks. Rank 0 plans the pages of both. Spawned ranks: the semaphores of forked ones have no name
    that could stay."""
    store = shutil.copytree(tiny, tmp_path / "store")
    words = f"--dataset {store} {SMALL_STEPS} --procs 2 --epochs 100000 {PLANNED}"
    process = _start(f"{words} --checkpoint {tmp_path}/c.pt")
    _wait_for((tmp_path / "c.pt").is_file, process)
    ranks = [p for p in _running_below(process.pid) if "spawn_main" in _proc(p, "cmdline")]
    if rank < 2:
        os.kill(ranks[rank], signal.SIGKILL)
    else:
        os.truncate(store / "features.npy", 100_000)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code and "memory  rows on disk: " in output
    assert output.endswith(f"{sentence}\n") and "Traceback" not in output


def _without_shared_memory(*words):
    def fails(*given):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    os.memfd_create = fails
    return train.main(words)


def test_a_full_dev_shm_is_no_limit_but_full_memory_is_one_sentence(tiny, tmp_path):
    words = f"--dataset {tiny} {SMALL_STEPS} --procs 2 --epochs 3 {PLANNED}".split()
    output = _end(_fork(tmp_path / "out", _without_shared_memory, *words), 2)
    assert "Traceback" not in output and "no memory for rows of 1.28 KB in host memory: " in output
    full = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"
    shell = ["unshare", "-rm", "sh", "-c"]
    if shutil.which(shell[0]) is None or subprocess.run([*shell, full]).returncode:
        pytest.skip("/dev/shm cannot be mounted")
    script = [f'{full} && "$@" && ls /dev/shm', "sh", sys.executable, "train.py", *words]
    done = subprocess.run([*shell, *script], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith(")\nfull\n"), done


def _in_a_session(*words):
    os.setsid()
    return train.main([*words])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_parent(number, tiny, tmp_path):
    words = f"--dataset {tiny} --gpus 0 --procs 2 --batch-size 50 --fanout 3,3 --epochs 10000"
    words += f" --checkpoint {tmp_path}/c.pt"
    process = _fork(tmp_path / "out", _in_a_session, *words.split())
    _wait_for((tmp_path / "c.pt").is_file, process)
    family = _running_below(process.pid)
    # connections are of this machine alone
    loopback = {"0100007F", "0" * 24 + "0100007F", "0000000000000000FFFF00000100007F"}
    assert len(family) == 3 and _listening(family) <= loopback
    if number == signal.SIGKILL:
        process.kill()
        assert _gone(family, 60)
        return
    os.killpg(process.pid, number)
    output = _end(process, 128 + number)
    assert _gone(family, 60) and "Traceback" not in output and "stopped in epoch" in output
    assert {path.name for path in tmp_path.iterdir()} == {"c.pt", "out"}


def _ignoring_hangups(*words):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    return train.main([*words])


@pytest.mark.parametrize("procs", [1, 2])
def test_a_closed_terminal_leaves_a_checkpoint_and_nohup_goes_on(tiny, tmp_path, procs):
    words = f"--dataset {tiny} --gpus 0 --procs {procs} --batch-size 50 --fanout 3,3 --epochs 10000"
    words += f" --checkpoint {tmp_path}"
    plain = _start_fork(tmp_path / "plain", f"{words}/c.pt")
    nohup = _fork(tmp_path / "nohup", _ignoring_hangups, *f"{words}/n.pt".split())
    epochs = lambda process: process.output.read_text().count("\nepoch ")  # noqa: E731
    for process in (plain, nohup):
        _wait_for(lambda: epochs(process) >= 1, process)
        os.kill(process.pid, signal.SIGHUP)
    assert "stopped in epoch" in _end(plain, 128 + signal.SIGHUP)
    assert (tmp_path / "c.pt").is_file()
    before = epochs(nohup)
    _wait_for(lambda: epochs(nohup) > before, nohup)
    nohup.terminate()
    _end(nohup, 128 + signal.SIGTERM)


def _printing_exchanges(*words):
    wrap = ddp.Ranks.wrap

    def exchange(state, bucket):
        print("exchange")
        return default_hooks.allreduce_hook(state, bucket)

    def wrapped(*args, **options):
        parallel = wrap(*args, **options)
        parallel.register_comm_hook(None, exchange)
        return parallel

    ddp.Ranks.wrap = wrapped
    return train.main([*words])


def _on_another_thread(*words):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(train.main, words).result()


def test_a_run_on_another_thread_leaves_signals_alone(tiny, tmp_path):
    """Python sets handlers only on the main one."""
    words = f"--dataset {tiny} {SMALL_STEPS} --epochs 1".split()
    _end(_fork(tmp_path / "out", _on_another_thread, *words))


def test_gradients_are_exchanged_once_a_step(tiny, tmp_path):
    words = f"--dataset {tiny} --fanout 3,3 --hidden 16 --batch-size 100 --accumulate 3 --gpus 0 --procs 2 --epochs 2"
    assert _end(_fork(tmp_path / "out", _printing_exchanges, *words.split())).count("exchange") == 4


WITH_DROPOUT = """
from torch import nn, ones
from model import SAGE

class Net(SAGE):
    def __init__(self, in_dim, num_classes):
        super().__init__(in_dim, 8, num_classes, num_layers=2)

    def forward(self, blocks, x):
        if self.training:
            print(f"mask {nn.functional.dropout(ones(99)).tolist()}\\n", end="")  # in one piece
        return super().forward(blocks, x)
"""


def test_dropout_of_a_custom_model_differs_by_rank_pass_and_step(tiny, tmp_path):
    (tmp_path / "net.py").write_text(WITH_DROPOUT)
    words = f"--dataset {tiny} --model {tmp_path}/net.py:Net --fanout 3,3 --batch-size 150 --gpus 0"
    words += f" --procs 2 --accumulate 2 --checkpoint {tmp_path}/c.pt --resume auto --epochs"
    for epochs in "12":
        printed = _end(_fork(tmp_path / "out", train.main, f"{words} {epochs}".split()))
    assert len({line for line in printed.splitlines() if line.startswith("mask")}) == 8


def test_each_rank_tells_nccl_which_gpu_it_has(monkeypatch):
    told, nothing = {}, lambda *a: None
    for name in "set_device get_device_properties".split():
        monkeypatch.setattr(torch.cuda, name, nothing)
    for name in "ddp._end_with_the_parent ddp.cores_near os.sched_setaffinity".split():
        monkeypatch.setattr(name, nothing)
    monkeypatch.setattr(torch, "set_num_threads", nothing)

    def init_process_group(backend, **options):
        told[backend] = options.get("device_id")
        raise StopIteration

    monkeypatch.setattr(ddp.dist, "init_process_group", init_process_group)
    for gpus in (0, 4):
        with pytest.raises(StopIteration):
            ddp._run(nothing, ddp.Ranks(5, 8, 1, 4, gpus), None, ())
    assert told == {"gloo": None, "cpu:gloo,cuda:nccl": torch.device("cuda:1")}


def test_ranks_share_the_cores_unless_a_person_says_otherwise(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    for asked, under, expected in (
        (None, {}, [2]),
        ("3", {}, []),
        ("1", {}, []),
        ("3", torchrun, []),
        ("1", torchrun, [2]),  # torchrun's default
    ):
        given = []
        monkeypatch.setattr(torch, "set_num_threads", given.append)
        environment = under if asked is None else {**under, "OMP_NUM_THREADS": asked}
        monkeypatch.setattr(os, "environ", environment)
        ddp.share_cores(2)
        assert given == expected, environment


def test_flags_that_torchrun_takes_for_its_own_have_another_name():
    from torch.distributed.run import get_args_parser

    theirs = [*get_args_parser()._option_string_actions]
    ours = make_parser()._option_string_actions
    is_free = lambda flag: not any(word.startswith(flag) for word in theirs)  # noqa: E731
    for flag, action in ours.items():
        names = [name for name in action.option_strings if name.startswith("--")]
        assert flag == "--help" or not flag.startswith("--") or any(map(is_free, names)), flag


def test_more_gpus_than_there_are_is_one_sentence():
    with pytest.raises(ValueError, match="gpus is 2: of CUDA GPUs torch sees 0 on this machine"):
        ddp.launch(_fails, 2, "raise", gpus=2)


def _fails(ranks, how):
    ranks.sum(1)
    if ranks.rank == 1:
        print("dies at", time.time(), flush=True)
        if how == "raise":
            raise ValueError("rank one gives up")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    ranks.sum(1)
    time.sleep(60)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_dies_takes_the_job_down_with_its_reason(tmp_path, how):
    words = "rank 1 was killed by SIGKILL, as the system does when memory runs out"
    words = words if how == "kill" else "ValueError: rank one gives up"
    output = _end(_fork(tmp_path / "out", ddp.launch, _fails, 3, how), 1, 128 + signal.SIGKILL)
    took = time.time() - float(re.search(r"dies at ([\d.]+)", output)[1])
    assert words in output, output
    print(f"down after {took:.1f} s")
    assert took < 30  # the other ranks would sleep for 60


def _starts(how):
    spawn = ddp.mp.spawn

    def starts(worker, args, nprocs, join):
        if how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
            return spawn(worker, args, nprocs, join=join, start_method="spawn")
        spawn(worker, args, 1, join=join)
        raise OSError("no more processes")

    ddp.mp.spawn = starts
    ddp.launch(_fails, 2, "sleep")


@pytest.mark.parametrize("how, code", [("Ctrl-C", 128 + signal.SIGINT), ("a limit", 1)])
def test_ranks_that_are_stopped_while_they_start_are_ended(tmp_path, how, code):
    began = time.time()
    output = _end(_fork(tmp_path / "out", _starts, how), code)
    assert ("2 processes could not be started: no more processes" in output) == (code == 1)
    assert time.time() - began < 30, output


def _joins_slowly():
    join = ddp.dist.init_process_group

    def init_process_group(*given, rank, **options):
        join(*given, rank=rank, **options)
        time.sleep(2 * rank)

    ddp.dist.init_process_group = init_process_group
    ddp.launch(_begins, 2)


def _begins(ranks):
    print(f"begins at {time.time()}\n", end="")  # in one write: both print at once


def test_no_rank_begins_and_perhaps_ends_before_all_have_joined(tmp_path):
    """A rank that ends breaks connections that others still make."""
    output = _end(_fork(tmp_path / "out", _joins_slowly))
    first, last = map(float, re.findall(r"begins at ([\d.]+)", output))
    assert abs(last - first) < 1


def _joins_by(variables):
    os.environ.update(word.split("=") for word in variables.split())
    ddp.launch(_begins, 1)


def test_ranks_that_cannot_join_say_so_in_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = f"RANK=0 WORLD_SIZE=1 MASTER_PORT={port}"
        reasons = {
            "RANK=x WORLD_SIZE=2": "'x'",
            "RANK=0 WORLD_SIZE=1": "environment variable MASTER_ADDR expected, but not set",
            f"{here} MASTER_ADDR=127.0.0.1": "address already in use",
        }
        for variables, said in reasons.items():
            output = _end(_fork(tmp_path / "out", _joins_by, variables), 1)
            words = "ranks cannot join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: "
            assert words in output and said in output and "Traceback" not in output, output


def test_a_worker_of_a_notebook_is_refused_before_processes_look_for_it(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(_begins, "__module__", "__main__")
    with pytest.raises(ValueError, match="_begins is defined in a notebook .* in a file"):
        ddp.launch(_begins, 2)
    ddp.launch(_begins, 1)


def test_ctrl_c_ends_a_rank_that_waits_for_others(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    process = _fork(tmp_path / "out", _joins_by, variables)
    listens = lambda: f":{port:04X} 0" in Path("/proc/net/tcp6").read_text()  # noqa: E731
    _wait_for(listens, process)
    watch = threading.Timer(60, process.kill)
    watch.start()
    os.kill(process.pid, signal.SIGINT)
    process.join()
    watch.cancel()
    _end(process, -signal.SIGINT)


def _prints_for_nobody(ranks):
    read, write = os.pipe()
    os.close(read)
    sys.stdout = open(write, "w")
    print("in a buffer until the rank ends")


def test_a_reader_gone_at_the_end_is_no_traceback(tmp_path):
    output = _end(_fork(tmp_path / "out", ddp.launch, _prints_for_nobody, 2), 120)
    assert "Traceback" not in output, output


def _launch_within(seconds, *work):
    """Call ddp.launch with another timeout, in a fork."""
    ddp.TIMEOUT = datetime.timedelta(seconds=seconds)
    ddp.launch(*work)
