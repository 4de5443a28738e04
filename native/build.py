"""Compile C with cc and CUDA with NVRTC at first use, and cache the results per user.

    library = load_c("rows", read_source("rows.c"), ["-O2", "-fPIC", "-shared", "-pthread"])
    text = read_source("layers.cu", ID="int", IN="float", OUT="float")
    kernels = load_cuda("layers", text, torch.device("cuda:0"))  # all of them None, after one warning, on failure
    values = {"indptr": indptr, "S": S, "dst": dst}
    kernels.run("destinations", S, values)                       # S threads of a kernel on torch's current stream
    load_host("layers", text, flags).run("destinations", S, values)                                 # the same on the CPU
    launch = kernels.prepare("destinations", **values)           # its own argument memory, for one host thread
    launch(S, kernels.stream())                                  # about 1 us; also inside a CUDA graph capture

NVRTC comes with torch's CUDA build. base.h explains how kernels are written. The names and types of a kernel's arguments are
read from the source: it takes those that it names from the values of a call, which kernels of one operation share.
An argument that is neither a pointer nor a number is a struct passed by value: a ctypes.Structure (`struct_type`), whose
fields may change between launches. Tensors must outlive the launches that use them.

Compiled files are cached in $XDG_CACHE_HOME/ringblock (~/.cache/ringblock) as NAME-KEY-DIGEST.so: KEY hashes everything
the content depends on; DIGEST is the file's SHA-256, checked because loading a damaged library can crash the process.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 256  # threads of a block
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_NUMBERS = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "i64": ctypes.c_longlong,
    "u64": ctypes.c_ulonglong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_warned = set()
_lock = threading.Lock()


def _kind(c_type):
    """Return the ctypes type of a C argument type; None for a struct."""
    return ctypes.c_void_p if "*" in c_type else _NUMBERS.get(c_type)


def read_source(file, rule="positions", **defines):
    """Return the text of a source file of this folder: `defines` as macros, then the file with its includes inlined, "@rule"
    as rules/RULE.h."""
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    path = Path(__file__).parent / file.replace("@rule", f"rules/{rule}.h")
    included = re.compile('^#include "(.*)"$', re.MULTILINE)
    return macros + included.sub(lambda m: read_source(m[1], rule), path.read_text("utf-8"))


def signatures(source, result="KERNEL"):
    """Parse `RESULT name(...)` at the starts of a source's lines -> {function: {argument name: C type}}."""
    functions = {}
    for name, text in re.findall(rf"^{result} ?(\w+)\(([^)]*)\)", source, re.MULTILINE):
        functions[name] = {}
        for argument in [] if text == "void" else text.split(","):
            c_type, of = re.fullmatch(r"(.*?)(\w+)", " ".join(argument.split())).groups()
            functions[name][of] = c_type.replace("const ", "").strip()
    return functions


def _in_order(signature, values):
    """Return what a signature names of the values {name: value}, in its order, tensors as pointers to their data; KeyError
    for one that is missing."""
    return [v.data_ptr() if isinstance(v := values[n], Tensor) else v or 0 for n in signature]


def struct_type(source, name):
    """Make a ctypes.Structure of a source's C struct, `typedef struct {...} name;`, with pointers, numbers and structs
    of the same source, whose fields are accessed directly."""
    body = re.search(rf"typedef struct \{{([^}}]*)\}} {name};", source)[1]
    fields = []
    nested = []
    for c_type, names in re.findall(r"(?:const )?(\w+)\s+([^;]+);", re.sub("//.*", "", body)):
        for field in names.split(","):
            kind = _kind(field if "*" in field else c_type)
            nested += [] if kind else [field.strip()]
            fields.append((field.strip(" *"), kind or struct_type(source, c_type)))
    return type(name, (ctypes.Structure,), {"_anonymous_": nested, "_fields_": fields})


def _call(function, *values):
    """Call a C function with numbers, pointers, and tensors as pointers to their data. Tensors are converted here and not
    in a from_param, where ctypes would turn Ctrl-C into an ArgumentError."""
    return function(*[v.data_ptr() if isinstance(v, Tensor) else v for v in values])


def fill(struct, **values):
    """Set fields of a ctypes.Structure; tensors become pointers to their data."""
    for name, value in values.items():
        setattr(struct, name, value.data_ptr() if isinstance(value, Tensor) else value)
    return struct


def law_fields(law):
    """Return the fields of spec_t of rule.h of a `sampler.Law`; the struct that they are filled into must not outlive it."""
    return {
        "indptr": law.indptr,
        "indices": law.indices,
        "column": law.rule.column,
        "rule": law.rule.number,
        "V": law.num_nodes,
        "M": law.indices.numel(),
        **law.native,
    }


def _warn_once(name, text, error):
    if name not in _warned:
        _warned.add(name)
        output = getattr(error, "stderr", None)  # bytes after a time-out
        output = output if isinstance(output, str) and output.strip() else str(error)
        lines = (output.strip() or repr(error)).splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])
        warnings.warn(f"{text}. Reason: {reason}", stacklevel=3)


# ---- cache


def _cache_folder():
    """Return the cache folder, created if missing, or None if that fails or others can write to it."""
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringblock"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return folder


@contextlib.contextmanager
def cached(name, key, suffix, make):
    """Context with the path of a compiled file, NAME-...SUFFIX in the cache or, if that cannot be used, in a private
    temporary folder. key: text of all that the content depends on. make: function (path) that writes the file."""
    stem = f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    folder = _cache_folder()
    for path in folder.glob(f"{stem}-*{suffix}") if folder else ():
        if path.stem == f"{stem}-{_digest(path)}":
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="ringblock-") as private:
        path = Path(private, name + suffix)
        make(path)
        if folder:
            part = folder / Path(private).name
            with contextlib.suppress(OSError):  # read-only, or full
                try:
                    shutil.copyfile(path, part)
                    path = part.replace(folder / f"{stem}-{_digest(path)}{suffix}")  # atomic
                finally:
                    part.unlink(missing_ok=True)
        yield path


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- C


def load_c(name, source, flags):
    """Compile C source into a shared library, unless it is cached, and load it -> ctypes.CDLL; None, after one warning
    per `name`, if that fails.

    Args:
        name: of this code, for the warning and the file name. source: C, as text; functions whose return type begins a
            line can be called, with tensors as pointers.
        flags: for the compiler, which is the environment variable CC, words as for a shell, or `cc`.
    """
    compiler = os.environ.get("CC") or "cc"
    cpu = Path("/proc/cpuinfo")
    options = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "check": True,
        "stdin": subprocess.DEVNULL,
        "timeout": 120,  # it may hang
    }

    def make(path):
        path.with_suffix(".c").write_text(source, "utf-8")
        subprocess.run([*compiler, *flags, path.with_suffix(".c"), "-o", path, "-lm"], **options)

    try:
        compiler = [compiler] if shutil.which(compiler) else shlex.split(compiler)
        cpu = cpu.read_text() if cpu.exists() else platform.processor()  # for -march=native
        cpu = next(re.finditer("^(flags|Features).*", cpu, re.MULTILINE), [cpu])[0]
        version = subprocess.run([*compiler, "--version"], **options).stdout
        key = [source, version, *compiler[1:], *flags, sys.platform, platform.machine(), cpu]
        with cached(name, "\0".join(key), ".so", make) as path:
            library = ctypes.CDLL(str(path))
        for c_type, result in {**_NUMBERS, "void": None, r"void \*": ctypes.c_void_p}.items():
            for symbol, arguments in signatures(source, c_type).items():
                function = getattr(library, symbol)
                function.restype = result
                function.argtypes = [*map(_kind, arguments.values())]
                setattr(library, symbol, functools.partial(_call, function))
    # AttributeError: a library lacks a function, as from a C++ compiler
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        _warn_once(
            name,
            f"the C code of {name} could not be compiled, so slower torch operations are used: "
            "apt install gcc, or name a compiler in the variable CC",
            error,
        )
        return None
    return library


def load_host(name, source, flags):
    """Compile CUDA source as C whose method `run`, as that of `Kernels`, runs a kernel's threads on those of torch's OpenMP
    runtime, which a compiler's own would compete with (on one if torch has none); those of a row one after another, if the
    kernel has a `width`. As `load_c`."""
    numbered = re.sub(r"^(KERNEL \w+\()", r"\1i64 row_, int part_, ", source, flags=re.MULTILINE)
    text = [
        "#define HOST",
        numbered,
        "void (*parallel)(void (*)(void *), void *, unsigned, unsigned);",
    ]
    kernels = signatures(source)
    for kernel, arguments in kernels.items():
        declared = [f"{c_type} {name}" for name, c_type in arguments.items()]
        read = ", ".join(f"t.{name}" for name in arguments)
        parts = "(t.width - 1) / COLUMNS + 1" if "width" in arguments else "1"
        text.append(f"""typedef struct {{ i64 *next_, threads_; {"; ".join(declared)}; }} {kernel}_t;
static void share_{kernel}(void *task) {{
  const {kernel}_t t = *({kernel}_t *)task;  // a copy, which no store can alias
  const int parts = {parts}, some = 1023 / parts + 1;
  const i64 rows = t.threads_ / parts;
  for (i64 first; (first = atomicAdd(t.next_, some)) < rows;)
    for (i64 row = first; row < first + some && row < rows; row++)
      for (int part = 0; part < parts; part++) {kernel}(row, part, {read});
}}
void run_{kernel}(int team_, i64 threads_, {", ".join(declared)}) {{
  i64 next_ = 0;
  {kernel}_t task_ = {{&next_, threads_, {", ".join(arguments)}}};
  if (parallel) parallel(share_{kernel}, &task_, team_, 0);
  else share_{kernel}(&task_);
}}""")
    library = load_c(name, "\n".join([*text, ""]), flags)
    if library:
        gomp = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)  # LLVM's has it too
        parallel = ctypes.c_void_p.in_dll(library, "parallel")
        parallel.value = ctypes.cast(gomp, ctypes.c_void_p).value
        # those of ctypes, without `_call`
        functions = {kernel: getattr(library, f"run_{kernel}").args[0] for kernel in kernels}

        def run(kernel, threads, values):
            team = torch.get_num_threads()  # which OpenMP does not know on a new thread
            functions[kernel](team, threads, *_in_order(kernels[kernel], values))

        library.run = run
        library.signatures = kernels
    return library


# ---- CUDA


@functools.cache
def load_cuda(name, source, device):
    """Compile CUDA C++ as one program, unless it is cached, and load it on a GPU, a torch.device with an index ->
    Kernels; None, after one warning per `name`, if NVRTC, the driver or the source fails. source: text, see base.h."""
    try:
        with _lock:  # a second thread finds the compiled file in the cache
            return Kernels(name, source, device)
    except (OSError, RuntimeError, AttributeError) as error:  # a library lacks a function
        _warn_once(
            name,
            f"the CUDA kernels of {name} cannot be used, so slower torch operations are",
            error,
        )


class Kernels:
    """The kernels of a source on one GPU, `device`; see `load_cuda`. signatures: of `signatures`."""

    def __init__(self, name, source, device):
        self.device = device
        self.index = device.index
        self.signatures = signatures(source)
        self._threads = threading.local()  # each host thread has its own Launch of each kernel
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        make = lambda path: path.write_bytes(compile_cuda(source, arch)[0])  # noqa: E731
        key = "\0".join([source, arch, str(torch.version.cuda)])
        with cached(f"{name}-{arch}", key, ".cubin", make) as path:
            image = path.read_bytes()
        self._driver = load_driver()
        self._functions = {}
        module = ctypes.c_void_p()
        with self.current():
            self.bind()
            code = self._driver.cuModuleLoadData(ctypes.byref(module), image)
            check_driver(code, f"cuModuleLoadData on {device}")
            for kernel in self.signatures:
                function = self._functions[kernel] = ctypes.c_void_p()
                code = self._driver.cuModuleGetFunction(
                    ctypes.byref(function), module, kernel.encode()
                )
                check_driver(code, f"{kernel} on {device}")

    def bind(self):
        """Bind the current GPU's context to this host thread, as any call of the CUDA runtime does."""
        torch.cuda.current_stream(self.device).query()

    def stream(self):
        """Return the handle of torch's current stream on this GPU, an int."""
        return _raw_stream(self.index)

    def wait(self):
        """Synchronize with torch's current stream on this GPU."""
        torch.cuda.current_stream(self.index).synchronize()

    def current(self):
        """Context in which this GPU is torch's current one."""
        return torch.cuda.device(self.index)

    def prepare(self, kernel, **values):
        """Make a `Launch` of a kernel with these arguments: numbers, tensors or pointers as ints, None, structs."""
        launch = Launch(self, kernel)
        launch.pack(values)
        return launch

    def run(self, kernel, threads, values):
        """Run `threads` threads of a kernel on torch's current stream. values: as of `prepare`."""
        launches = self._threads.__dict__
        launch = launches.get(kernel) or launches.setdefault(kernel, Launch(self, kernel))
        launch.pack(values)
        if torch.cuda.current_device() == self.index:
            launch(threads, _raw_stream(self.index))
        else:
            with self.current():
                launch(threads, _raw_stream(self.index))


class Launch:
    """A kernel and its argument memory: launch(threads, stream), by one host thread at a time, with its GPU current."""

    def __init__(self, kernels, kernel):
        self._kernels = kernels
        self._name = kernel
        self._function = kernels._functions[kernel]
        self._go = kernels._driver.cuLaunchKernel
        self._signature = kernels.signatures[kernel]
        # structs stay in the caller's memory, all else is packed into _memory
        codes = [getattr(_kind(c_type), "_type_", "") for c_type in self._signature.values()]
        self._structs = {i: None for i, code in enumerate(codes) if not code}
        packed = struct.Struct("".join(codes))
        self._memory = ctypes.create_string_buffer(packed.size)
        self._pack = functools.partial(packed.pack_into, self._memory, 0)
        memory = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(codes))()
        for i, code in enumerate(codes):
            end = struct.calcsize("".join(codes[: i + 1]))
            self._pointers[i] = memory + end - struct.calcsize(code)

    def pack(self, values):
        """Set all arguments, from {name: value}."""
        values = _in_order(self._signature, values)
        for i in reversed(self._structs):
            self._structs[i] = values.pop(i)
            self._pointers[i] = ctypes.addressof(self._structs[i])
        self._pack(*values)

    def __call__(self, threads, stream):
        if threads <= 0:
            return
        grid = (-(-threads // BLOCK), 1, 1, BLOCK, 1, 1)
        arguments = self._function, *grid, 0, stream, self._pointers, None
        code = self._go(*arguments)
        if code == INVALID_CONTEXT:  # this host thread has not called the CUDA runtime yet
            self._kernels.bind()
            code = self._go(*arguments)
        if code:
            check_driver(
                code, f"kernel {self._name} of {threads} threads on {self._kernels.device}"
            )


# what torch.compile uses: twenty times as fast as torch.cuda.current_stream; None if torch has no CUDA
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# ---- NVRTC and the driver


def compile_cuda(source, arch, options=()):
    """Compile CUDA C++ for an architecture such as "sm_90", with options of NVRTC -> (module for cuModuleLoadData, NVRTC's
    log). OSError without NVRTC; RuntimeError, with the first error, if the source does not compile.

    For a GPU newer than NVRTC knows this is PTX of the latest architecture before it, which the driver compiles. With
    the option --ptxas-options=-v the log has the registers and local memory of each kernel.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()
    count = ctypes.c_int()

    def call(function, *arguments):
        code = getattr(nvrtc, "nvrtc" + function)(*arguments)
        if code:
            raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def output(kind):
        call(f"Get{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"Get{kind}", program, buffer)
        return buffer

    call("GetNumSupportedArchs", ctypes.byref(count))
    supported = (ctypes.c_int * count.value)()
    call("GetSupportedArchs", supported)
    number = int(arch.removeprefix("sm_"))
    kind = "CUBIN" if number in supported else "PTX"
    if kind == "PTX":
        arch = f"compute_{max((n for n in supported if n < number), default=number)}"
    flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *options)]
    flags = (ctypes.c_char_p * len(flags))(*flags)
    call("CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = output("ProgramLog").value.decode(errors="replace")
        if code:
            errors = [line for line in log.splitlines() if "error" in line]
            reason = errors[0] if errors else nvrtc.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"NVRTC for {arch}: {reason}")
        return output(kind).raw, log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc():
    """Load the libnvrtc of torch's CUDA build, or the system's."""
    folder = Path(torch.__file__).parent
    wheels = sorted(folder.parent.glob("nvidia/*/lib/libnvrtc.so*"))
    # the first finds the libnvrtc that torch was linked with, but only beside a driver
    for name in (folder / "lib/libcaffe2_nvrtc.so", *wheels, "libnvrtc.so"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(name))
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
    raise OSError("no libnvrtc, part of torch's CUDA build (pip install nvidia-cuda-nvrtc)")


def load_driver():
    """Load libcuda, part of the NVIDIA driver."""
    library = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_uint
    pointer = ctypes.c_void_p
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library


def check_driver(code, action):
    """Raise RuntimeError unless a driver call returned 0."""
    if code:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(code, ctypes.byref(text))
        text = (text.value or b"unknown").decode()
        raise RuntimeError(f"{action}: CUDA error {code} ({text})")
