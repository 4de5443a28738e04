"""What several test files use: graphs, processes, runs."""

import os

# set before torch is imported: its idle threads must not spin on cores that other processes need
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GPUs are for tests marked gpu
os.environ.setdefault("TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import atexit
import ctypes
import functools
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import sampler
import train
from extras.exclude import edge_set
from native import build, sampler_gpu
from sources import prepare as datasets
from store import build_store

# tests run in one process per core, and OpenMP's threads would not survive the fork of these
torch.set_num_threads(1)
# under nohup and in a shell's background, runs would ignore these
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).resolve().parents[1]
DATA = HERE.parent / "shared" / "data"
COMMON = "--fanout 3,3 --hidden 16 --batch-size 100 --gpus 0".split()
TINY = "synthetic:nodes=3000,degree=10,features=16,classes=4,train=600"
_IMPORTED_BY = os.getpid()


@functools.cache
def _forkserver():
    """Start a fork server that has imported everything, which takes an interpreter 3 s -> multiprocessing context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_all", "torch._dynamo"])  # Adam imports the second
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        for name, value in {
            "OMP_NUM_THREADS": 1,
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 0,  # this and the next as train.py sets them
            "LRU_CACHE_CAPACITY": 1,
            "PYTORCH_NVML_BASED_CUDA_CHECK": 1,  # asking for a GPU here leaves it to forks
        }.items():
            patch.setenv(name, str(value))
        multiprocessing.forkserver.ensure_running()
    return context


def _in_fork(output, cwd, function, args):
    assert _IMPORTED_BY != os.getpid(), "the fork server has not imported test_all"

    def end_with_the_tests():
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_the_tests, daemon=True).start()
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(cwd)
    torch.set_num_threads(torch.get_num_threads())  # see tests/parallel.py
    gc.freeze()  # as there
    spawn = torch.multiprocessing.start_processes
    torch.multiprocessing.spawn = functools.partial(spawn, start_method="fork")
    default = functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=default)  # as in a new interpreter
    try:
        sys.exit(function(*args))
    finally:
        atexit._run_exitfuncs()  # a forked process exits without running them


def _fork(output, function, *args, cwd="."):
    """Start function(*args) in a fork, its ranks in forks too -> the process, which prints into `output`."""
    arguments = output, os.path.abspath(cwd), function, args
    process = _forkserver().Process(target=_in_fork, args=arguments)
    process.output = Path(output)
    process.output.touch()
    process.start()
    return process


def _end(process, *codes):
    """Wait until a fork ends, assert one of these exit codes (default: 0) -> what it printed."""
    try:
        process.join(600)
    finally:
        process.kill()
        process.join()
    printed = process.output.read_text()
    assert process.exitcode in (codes or (0,)), printed
    return printed


@pytest.fixture(autouse=True)
def _before_each_test(request, monkeypatch):
    torch.manual_seed(0)  # a test draws the same numbers whichever ran before it
    torch.set_num_threads(1)  # a run in this process may have set more, which a fork has not
    if not request.node.get_closest_marker("gpu"):
        # for a process that has used one
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ["TEST_GPUS"])
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


def _random_graph(rng, num_nodes, mean_degree, dtype=torch.int32):
    """Return (indptr, indices) of a random CSC graph with empty rows, self-loops and multi-edges."""
    degree = rng.poisson(mean_degree, num_nodes) * (rng.random(num_nodes) > 0.2)
    degree[rng.integers(num_nodes)] += 3 * mean_degree
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = rng.integers(0, num_nodes, indptr[-1])
    return torch.from_numpy(indptr), torch.from_numpy(indices).to(dtype)


def _mix(z):
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def _as_lists(blocks):
    return [tuple(None if t is None else t.tolist() for t in block) for block in blocks]


_EMULATOR = r"""
#include <math.h>
#include <stdlib.h>
#include <setjmp.h>
typedef struct { long x; } dim;
static __thread dim blockIdx;  // threads of the host launch kernels beside each other
static dim blockDim = {1}, threadIdx;
__attribute__((no_sanitize("thread"), noinline)) static void be(long number) { blockIdx.x = number; }
#define atomicMin(p, value) \
  do { \
    int new_ = value, old_ = __atomic_load_n(p, 0); \
    while (new_ < old_ && !__atomic_compare_exchange_n(p, &old_, new_, 0, 0, 0)); \
  } while (0)
void begin_launch(char *frame, jmp_buf *stop);
void begin_thread(long number);
"""

# With `checked` the compiler calls these at every memory access, and on unaligned accesses and signed overflow.
# Threads of a launch are unordered: what one of them writes, no other may read or write except by atomics.
_CHECKER = r"""
#include <setjmp.h>
enum { NOBODY, MANY = -1, CELLS = 1 << 20 };
typedef struct { unsigned long address, launch; long writer, reader, atomic; } cell_t;
static cell_t cells[CELLS];
static unsigned long launch;
static long thread, used;
static char *top;
static jmp_buf *leave;
static const char *fault;
void begin_launch(char *frame, jmp_buf *stop) { launch++; used = 0; fault = 0; top = frame; leave = stop; }
void begin_thread(long number) { thread = number + 1; }
const char *what_failed(void) { return fault; }
static void fail(const char *what) { fault = what; longjmp(*leave, 1); }
static int other(long who) { return who != NOBODY && who != thread; }
enum { READ, WRITE, ATOMIC };
static void touch(char *p, int size, int how) {
  if ((char *)__builtin_frame_address(0) < p && p < top) return;  // the thread's own stack
  unsigned long a = (unsigned long)p / 2, end = ((unsigned long)p + size + 1) / 2;
  if (size == 1) end = 1 + (a = ~(unsigned long)p);  // single bytes have cells of their own
  for (; a < end; a++) {
    unsigned long at = a * 0x9e3779b97f4a7c15UL >> 44;
    while (cells[at].launch == launch && cells[at].address != a) at = (at + 1) % CELLS;
    cell_t *c = &cells[at];
    if (c->launch != launch) {
      if (++used > CELLS / 2) fail("the launch is too large to be checked");
      *c = (cell_t){a, launch, NOBODY, NOBODY, NOBODY};
    }
    if (other(c->writer)) fail("two threads share memory that one of them writes without an atomic");
    if (how == WRITE && (other(c->reader) || other(c->atomic)))
      fail("a thread writes without an atomic what another one uses");
    long *who = how == READ ? &c->reader : how == WRITE ? &c->writer : &c->atomic;
    *who = other(*who) ? MANY : thread;
  }
}
#define ACCESS(n) \
  void __tsan_read##n(void *p) { touch(p, n, READ); } \
  void __tsan_write##n(void *p) { touch(p, n, WRITE); } \
  void __tsan_unaligned_read##n(void *p) { touch(p, n, READ); } \
  void __tsan_unaligned_write##n(void *p) { touch(p, n, WRITE); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void *p, long n) { touch(p, (int)n, READ); }
void __tsan_write_range(void *p, long n) { touch(p, (int)n, WRITE); }
void *__tsan_memcpy(void *to, const void *from, unsigned long n) {
  touch((char *)from, (int)n, READ), touch(to, (int)n, WRITE); return __builtin_memcpy(to, from, n); }
void *__tsan_memset(void *p, int v, unsigned long n) { touch(p, (int)n, WRITE); return __builtin_memset(p, v, n); }
void __tsan_init(void) {}
void __tsan_func_entry(void *p) {}
void __tsan_func_exit(void) {}
#define ATOMICS(n, type) \
  type __tsan_atomic##n##_load(type *p, int o) { return *p; } \
  type __tsan_atomic##n##_fetch_add(type *p, type v, int o) { \
    touch((char *)p, n / 8, ATOMIC); return __sync_fetch_and_add(p, v); } \
  type __tsan_atomic##n##_fetch_or(type *p, type v, int o) { \
    touch((char *)p, n / 8, ATOMIC); return __sync_fetch_and_or(p, v); } \
  int __tsan_atomic##n##_compare_exchange_strong(type *p, type *e, type v, int o, int f) { \
    touch((char *)p, n / 8, ATOMIC); return __atomic_compare_exchange_n(p, e, v, 0, 0, 0); } \
  type __tsan_atomic##n##_compare_exchange_val(type *p, type e, type v, int o, int f) { \
    touch((char *)p, n / 8, ATOMIC); return __sync_val_compare_and_swap(p, e, v); }
ATOMICS(32, int) ATOMICS(64, long long)
void __tsan_atomic8_store(char *p, char v, int o) { touch(p, 1, ATOMIC); *p = v; }
#define UNDEFINED(name, what) void __ubsan_handle_##name(void *d, void *a, void *b) { fail(what); }
UNDEFINED(type_mismatch_v1, "an access is not aligned")
UNDEFINED(out_of_bounds, "an index is outside of its array")
UNDEFINED(add_overflow, "a signed sum overflows")
UNDEFINED(sub_overflow, "a signed difference overflows")
UNDEFINED(mul_overflow, "a signed product overflows")
UNDEFINED(negate_overflow, "a signed negation overflows")
UNDEFINED(divrem_overflow, "a quotient overflows")
"""
_ONE_LAUNCH = threading.Lock()  # the checker has one global state
_SANITIZED = "-fsanitize=thread,alignment,signed-integer-overflow,bounds"


_compiled = {}  # source -> library; tests that run in one process share them


def _compile(code, folder, checked):
    """Compile C code in a folder -> the loaded library."""
    if (code, checked) in _compiled:
        return _compiled[code, checked]
    cc = ["cc", "-O1", "-ffp-contract=off", "-fPIC", "-x", "c", "-"]
    with tempfile.TemporaryDirectory(dir=folder) as made:
        library, objects = f"{made}/kernels.so", [f"{made}/kernels.o", f"{made}/checker.o"]
        if not checked:
            command = [*cc, "-shared", "-o", library, "-lm"]
            subprocess.run(command, input=code, text=True, check=True)
        else:
            for text, output, flag in zip((code, _CHECKER), objects, (_SANITIZED, "-O2")):
                subprocess.run([*cc, flag, "-c", "-o", output], input=text, text=True, check=True)
            subprocess.run(["cc", "-shared", "-o", library, *objects, "-lm"], check=True)
        return _compiled.setdefault((code, checked), ctypes.CDLL(library))


class _EmulatedKernels:
    """build.Kernels compiled by cc for CPU tensors; a launch runs its threads one at a time, in shuffled order.

    checked: also assert that no thread depends on another, that accesses are aligned, and that nothing overflows.
    """

    def __init__(self, source, folder, seed=0, checked=False):
        self.device, self.rng, self.launched = torch.device("cpu"), np.random.default_rng(seed), []
        self.signatures, self.checked, self.source = build.signatures(source), checked, source
        self.bound = int(re.search(r"__launch_bounds__\((\d+)\)", source)[1])
        code = _EMULATOR + source
        for name, arguments in self.signatures.items():
            passed = enumerate(arguments.values())
            passed = ", ".join(f"*({c_type}*)a[{i}]" for i, c_type in passed)
            check = "jmp_buf stop; begin_launch(__builtin_frame_address(0), &stop); if (setjmp(stop)) return;"
            code += f"""void run_{name}(const long *order, long n, void **a) {{
                {check if checked else ""}
                for (long q = 0; q < n; q++) {{
                    {"begin_thread(order[q]);" if checked else ""}
                    be(order[q]);
                    {name}({passed});
                }} }}\n"""
        library = _compile(code, folder, checked)
        self._functions = {name: getattr(library, f"run_{name}") for name in self.signatures}
        self._driver = types.SimpleNamespace(cuLaunchKernel=self._launch)
        if checked:
            library.what_failed.restype = ctypes.c_char_p
            self.what_failed = library.what_failed

    def _launch(self, function, grid, _y, _z, block, *rest):
        assert block <= self.bound, f"{block} threads a block, the kernels are for {self.bound}"
        assert rest[3] == self.stream(), "a launch on another stream than the current one"
        order = torch.from_numpy(self.rng.permutation(grid * block))
        with _ONE_LAUNCH if self.checked else nullcontext():
            function(ctypes.c_void_p(order.data_ptr()), ctypes.c_long(grid * block), rest[-2])
            failed = self.checked and self.what_failed()
        self.launched.append(function.__name__[4:])
        self.seen(self.launched[-1], rest[-2], rest[3])
        assert not failed, f"kernel {self.launched[-1]}: {failed.decode()}"
        return 0

    def prepare(self, kernel, **values):
        launch = build.Launch(self, kernel)
        launch.pack(values)
        return launch

    def run(self, kernel, threads, values):
        self.prepare(kernel, **values)(threads, self.stream())

    def seen(self, name, arguments, stream):
        """Called at each launch."""

    def stream(self):
        return 0x57EA

    def wait(self):
        pass

    def current(self):
        return nullcontext()


def _cuda_resources(source, arch):
    """Compile by NVRTC -> {kernel: (registers, bytes of stack, bytes spilled)}."""
    try:
        module, log = build.compile_cuda(source, arch, ["--ptxas-options=-v"])
    except OSError:
        pytest.skip("NVRTC is not installed")
    if not module.startswith(b"\x7fELF"):
        pytest.skip(f"this NVRTC is older than {arch}")
    pattern = r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    resources = {
        name: tuple(map(int, (used, stack, spilled)))
        for name, stack, spilled, used in re.findall(pattern, log, re.DOTALL)
    }
    assert resources.keys() == build.signatures(source).keys()
    return resources


def _emulated(s, folder, seed=0, checked=False):
    """Build the CUDA backend of a sampler with emulated kernels, for a graph in host memory -> the backend."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    compiled = lambda name, source: _EmulatedKernels(source, folder, seed, checked)  # noqa: E731
    return sampler_gpu.Backend(s.engine.spec, s.fanouts, s.seed, compiled)


def _on_kernels(s, folder, **options):
    """Build emulated kernels for a sampler -> (its `sample` on them, the backend); options: of `_emulated`."""
    backend = _emulated(s, folder, **options)

    def sample(seeds, step, times=None, exclude=None, relabel_outer=True):
        exclude = None if exclude is None else edge_set(exclude, s.indices, ordered=False)
        blocks = backend.sample(seeds, step, relabel_outer, exclude, times)
        if blocks is None:
            raise ValueError("kernels found a seed that is no node or comes twice")
        blocks = blocks[::-1]
        return blocks if s.edge_type is None else list(map(s.spec.label, blocks))

    return sample, backend


def _frame(backend, seeds, hops, **room):
    """Build a Frame of sampler_gpu for `seeds` seeds and `hops` hops; room: rows, places."""
    rows, places = backend.shapes(seeds)
    return backend.frame(**{"rows": rows[: hops + 1], "places": places[:hops], **room})


def _dgl():
    pytest.importorskip("scipy")
    try:
        return sampler.import_dgl()
    except ImportError as missing:
        pytest.skip(str(missing))


def _graph(num_nodes=200, num_edges=3000, width=5, classes=4, seed=0):
    """Return keyword arguments of build_store for a random graph with self-loops, multi-edges and isolated nodes."""
    random = np.random.default_rng(seed)
    ids = random.permutation(num_nodes)
    return {
        "edge_index": random.integers(0, num_nodes - 3, (2, num_edges)),
        "features": random.standard_normal((num_nodes, width), np.float32),
        "labels": random.integers(0, classes, num_nodes),
        "num_classes": classes,
        "split": {"train": ids[:50], "valid": ids[50:80], "test": ids[80:150]},
    }


def _store(path, num_nodes=200, **changes):
    """Build a store of a random graph; changes: of build_store's arguments -> its path."""
    return build_store(path, **{**_graph(num_nodes), **changes})


def _in_child(work):
    """Run work() in a forked process -> its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


@contextmanager
def _threads(work, count=4):
    """Call work() again and again on `count` threads beside the body; their exceptions are raised at its end."""
    done = threading.Event()

    def again():
        while not done.is_set():
            work()

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(again) for _ in range(count)]
        try:
            yield
        finally:
            done.set()
        [future.result() for future in futures]


def _rows(table):
    """Split a table of text, a line a row with | between the cells -> list of rows, lists of text."""
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _split(words):
    """Split a command line into words; a string may hold several."""
    parts = (word.split() if isinstance(word, str) else [str(word)] for word in words)
    return [word for part in parts for word in part]


def _start(*words, script="train.py", env=(), **options):
    """Start the real script, with `env` in its environment -> Popen, with stdout and stderr in one pipe."""
    command = [sys.executable, str(HERE / script), *_split(words)]
    options["env"] = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **dict(env)}
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, **pipe, **options)


def _start_fork(output, *words, cwd="."):
    """Start train.py's main in a fork -> the process."""
    return _fork(output, train.main, _split(words), cwd=cwd)


def _train(*words, code=0, cwd="."):
    """Run train.py's main in a fork to its end, assert the exit code -> its output."""
    with tempfile.NamedTemporaryFile() as file:
        return _end(_start_fork(file.name, *words, cwd=cwd), code)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Build a small store -> its path."""
    return str(datasets.prepare(TINY, tmp_path_factory.mktemp("tiny"), progress=False))


def _log(path):
    """Read the entries of --log, without the first of each run, which describes it."""
    entries = map(json.loads, Path(path).read_text().splitlines())
    return [entry for entry in entries if "flags" not in entry]


def _parameters(path):
    return torch.load(path, weights_only=True)["model"]


def _same_weights(*files):
    """Return whether the models in checkpoints are equal, bit for bit."""
    first, *others = map(_parameters, files)
    return all(torch.equal(first[name], other[name]) for other in others for name in first)


def _wait_for(condition, process, pause=0.02):
    """Wait until condition() holds while a process runs, for at most three minutes."""
    deadline = time.monotonic() + 180
    is_popen = isinstance(process, subprocess.Popen)
    while not condition():
        running = process.poll() is None if is_popen else process.is_alive()
        if not running or time.monotonic() > deadline:
            process.kill()
            printed = process.communicate()[0] if is_popen else process.output.read_text()
            pytest.fail(f"{'timed out' if running else 'the process ended'}: {printed}")
        time.sleep(pause)


def _same_for_any_number_of_processes(folder, words, runs, epochs=3):
    """Train in fp64 with each (processes, batch size, passes of a step) and assert equal losses and
    weights to 1e-9, equal scores to 0.003 and predictions. Leaves N.pt, N.npy and logN of run N."""
    logs, weights, predicted = [], [], []
    for number, (procs, batch, accumulate) in enumerate(runs):
        sizes = f"--procs {procs} --batch-size {batch} --accumulate {accumulate} --epochs {epochs}"
        files = f"--log {folder}/log{number} --checkpoint {folder}/{number}.pt"
        files += f" --predict {folder}/{number}.npy"
        _train(words, sizes, files, "--gpus 0 --precision fp64")
        predicted.append(np.load(folder / f"{number}.npy"))
        logs.append(_log(folder / f"log{number}"))
        weights.append(_parameters(folder / f"{number}.pt"))
    for log, model, rows in zip(logs[1:], weights[1:], predicted[1:]):
        assert len(log) == epochs + 1  # only rank 0 writes
        assert np.isclose(rows, predicted[0], rtol=1e-5, atol=1e-6).mean() > 0.999
        for a, b in zip(logs[0][:epochs], log):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
        for a, b in zip(logs[0], log):
            for name in {"valid", "valid_sampled", "exact"}.intersection(a):
                assert a[name] == pytest.approx(b[name], abs=0.003)
        torch.testing.assert_close(model, weights[0], rtol=1e-9, atol=1e-9)


def _run_here(tmp_path, *words):
    """Run train.py in this process -> (log entries, the model in its checkpoint)."""
    log, checkpoint = tmp_path / "log", tmp_path / "here.pt"
    log.unlink(missing_ok=True)
    files = f"--log {log} --checkpoint {checkpoint} --root {tmp_path}"
    assert train.main(_split([*words, files])) == 0
    return _log(log), _parameters(checkpoint)


def _code(*words, main=train.main):
    """Run train.py, or another main, in this process -> its exit code."""
    try:
        return main(_split(words))
    except SystemExit as stop:
        return stop.code


def _says(capsys, said, *words, code=0):
    """Run train.py in this process, assert its exit code and that it prints `said`, a text or a regular expression."""
    capsys.readouterr()
    assert _code(*words) == code
    text = "".join(capsys.readouterr())
    assert said in text or re.search(said, text), text


_stops = functools.partial(_says, code=2)


def _readme_blocks(language):
    """Return the code blocks of a language in README and docs/, README first; docs/own_graph.md and docs/movies.md are examples."""
    pages = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages if page.stem not in ("own_graph", "movies"))
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


OWN_MODELS = {b.split()[1]: b for b in _readme_blocks("python") if b.startswith("# my")}
OWN_LAYERS = OWN_MODELS["mymodel.py"]
