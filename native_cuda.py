"""CUDA for the GPU: source text -> kernels, compiled by NVRTC at first use and kept in the cache of native.py.

Copy both files beside what uses them. No CUDA toolkit, no nvcc: NVRTC comes with torch's CUDA build.

    kernels = load_cuda("sampler", source, device)   # None, after one warning, where that cannot be had
    kernels("scale", n, x, 2.0, n)                   # n threads of kernel `scale` on torch's current stream: about 5 us
    launch = kernels.prepare("scale", x, 2.0, n)     # its own argument memory, for one thread of the host
    launch(n, kernels.stream())                      # about 1 us; in a CUDA graph's capture as well
    launch[1] = 3.0                                  # one argument anew

The source begins with DIALECT and writes its kernels as `KERNEL name(type argument, ...)` at the start of a line. A
launch has blocks of 256 threads, the last of which may have some too many: `THREAD(n);` makes i the number of a thread
and ends those from n on. The types of the arguments are read out of the source; a type that is neither a pointer nor a
number is a struct passed by value, which the caller gives as a ctypes.Structure and may change between launches. A
tensor stands for the pointer to its data: whoever prepares a launch keeps it alive.

Kernels whose threads give the same result one after the other, in any order, can be tested without a GPU: with `cc`
DIALECT makes C of them, in which blockIdx, blockDim and threadIdx are variables.
"""

import ctypes
import re
import struct
import threading
import warnings
from functools import partial
from glob import glob
from pathlib import Path

import torch

from native import cached

DIALECT = r"""
typedef unsigned long long u64;
typedef long long i64;
#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define FN static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#else
#define KERNEL void
#define FN static inline
#define UNROLL
#define atomicAdd(p, value) (void)(*(p) += (value))
#define atomicOr(p, value) (void)(*(p) |= (value))
FN u64 atomicCAS(u64 *p, u64 expected, u64 value) {
  u64 there = *p;
  if (there == expected) *p = value;
  return there;
}
#endif
#define THREAD(n) i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; if (i >= (n)) return
"""

BLOCK = 256  # threads of a block
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_NUMBERS = {
    "int": ctypes.c_int, "unsigned": ctypes.c_uint, "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
_loaded, _lock, _warned = {}, threading.Lock(), set()


def load_cuda(name, source, device, options=()):
    """Compile CUDA source as one program, if the cache does not have it, and load it on a GPU.

    Args:
        name: whose code this is, for the warning and the file's name.
        source: CUDA C++, see above.
        device: the GPU, a torch.device.
        options: of NVRTC, such as ("--use_fast_math",).

    Returns:
        Kernels, the same for the same arguments; or None where NVRTC, the driver or the source fails, after one warning
        for each `name`. May be called from several threads.
    """
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    key = (source, index, tuple(options))
    with _lock:
        if key not in _loaded:
            try:
                _loaded[key] = Kernels(name, source, torch.device("cuda", index), options)
            except (OSError, RuntimeError, AttributeError) as error:  # AttributeError: a library without a function
                _loaded[key] = None
                if name not in _warned:
                    _warned.add(name)
                    reason = (str(error).strip() or repr(error)).splitlines()[0]
                    warnings.warn(f"the CUDA kernels of {name} cannot be used, so slower torch operations are. Reason: "
                                  f"{reason}", stacklevel=2)  # fmt: skip
        return _loaded[key]


class Kernels:
    """The kernels of a source on one GPU; see `load_cuda`.

    Attributes:
        device: torch.device("cuda", index).
        signatures: {kernel: [(type in C, name)]}.
    """

    def __init__(self, name, source, device, options=()):
        self.device, self.index, self.signatures = device, device.index, signatures(source)
        self._numbers = {**_NUMBERS, **_typedefs(source)}
        self._threads = threading.local()  # in each thread of the host: a launch of its own for each kernel
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}"
        key = "\0".join([source, arch, str(torch.version.cuda), *options])
        make = lambda path: path.write_bytes(compile_cuda(source, arch, options)[0])
        image = cached(f"{name}-{arch}", key, ".cubin", make).read_bytes()
        self._driver, module = _driver(), ctypes.c_void_p()
        with self.current():
            self.bind()
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
            self._functions = {kernel: self._function(module, kernel) for kernel in self.signatures}

    def _function(self, module, kernel):
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), kernel)
        return function

    def _check(self, code, what):
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()}) on {self.device}")

    def bind(self):
        """Give this thread of the host the context of the GPU, which is current: a call of the CUDA runtime does."""
        torch.cuda.current_stream(self.device).query()

    def stream(self):
        """The handle of torch's current stream on this GPU, an int."""
        return _raw_stream(self.index)

    def wait(self):
        """Wait until the GPU has done what torch's current stream was given."""
        torch.cuda.current_stream(self.index).synchronize()

    def current(self):
        """A context in which this GPU is torch's current one."""
        return torch.cuda.device(self.index)

    def prepare(self, kernel, *values):
        """A `Launch` of a kernel with these arguments; without any, they are to be set before it is called."""
        return Launch(self, kernel, values)

    def __call__(self, kernel, threads, *values):
        """Run `threads` threads of a kernel on torch's current stream; from any thread of the host."""
        launch = self._own(kernel)
        launch.set(*values)
        with self.current():
            launch(threads, self.stream())

    def run(self, kernel, threads, *numbers):
        """The same for arguments as `Launch.pack` takes them."""
        launch = self._own(kernel)
        launch.pack(*numbers)
        if torch.cuda.current_device() == self.index:
            launch(threads, _raw_stream(self.index))
        else:
            with self.current():
                launch(threads, _raw_stream(self.index))

    def _own(self, kernel):
        launches = self._threads.__dict__
        return launches.get(kernel) or launches.setdefault(kernel, Launch(self, kernel))


class Launch:
    """A kernel with argument memory of its own: launch(threads, stream) while its GPU is current (torch.cuda.device).

    launch.set(*values) sets all arguments, launch[i] = value one: a number, a tensor, a pointer as an int or None; set
    also takes a ctypes.Structure, whose fields count as they are at each launch. launch.pack(*numbers) sets all but
    those, with pointers as ints, 0 for none: in a third of the time. For one thread of the host at a time.
    """

    def __init__(self, kernels, kernel, values=()):
        self._kernels, self._name, self._function = kernels, kernel, kernels._functions[kernel]
        codes = [_code(kernels._numbers, c_type) for c_type, _ in kernels.signatures[kernel]]
        self._format, self._structs = (
            struct.Struct("".join(codes)),
            {i: None for i, code in enumerate(codes) if not code},
        )
        self._memory = ctypes.create_string_buffer(self._format.size)
        self.pack = partial(self._format.pack_into, self._memory, 0)
        sizes = [struct.calcsize("".join(codes[: i + 1])) - struct.calcsize(code) for i, code in enumerate(codes)]
        self._places = list(zip(codes, sizes))  # code of struct and offset in the memory
        start = ctypes.addressof(self._memory)
        self._pointers = (ctypes.c_void_p * len(codes))(*(start + offset for offset in sizes))
        self._go = kernels._driver.cuLaunchKernel
        if values:
            self.set(*values)

    def set(self, *values):
        """Set all arguments."""
        if len(values) != len(self._places):
            wanted = ", ".join(f"{c_type} {name}" for c_type, name in self._kernels.signatures[self._name])
            raise TypeError(f"kernel {self._name} takes {len(self._places)} arguments ({wanted}), not {len(values)}")
        for i in self._structs:
            self._structs[i], self._pointers[i] = values[i], ctypes.addressof(values[i])  # passed from where it lies
        values = [value for i, value in enumerate(values) if i not in self._structs]
        self.pack(*[v.data_ptr() if isinstance(v, torch.Tensor) else v or 0 for v in values])

    def __setitem__(self, i, value):
        code, offset = self._places[i]
        value = value.data_ptr() if isinstance(value, torch.Tensor) else value or 0
        struct.pack_into(code, self._memory, offset, value)

    def __call__(self, threads, stream):
        if threads <= 0:
            return
        grid = -(-threads // BLOCK)
        code = self._go(self._function, grid, 1, 1, BLOCK, 1, 1, 0, stream, self._pointers, None)
        if code == INVALID_CONTEXT:  # a thread of the host that has not called CUDA yet
            self._kernels.bind()
            code = self._go(self._function, grid, 1, 1, BLOCK, 1, 1, 0, stream, self._pointers, None)
        if code:
            self._kernels._check(code, f"kernel {self._name} of {threads} threads")


def signatures(source):
    """{kernel: [(type in C, name of the argument)]} of a source's `KERNEL name(...)`."""
    found = {}
    for kernel, words in re.findall(r"^KERNEL (\w+)\(([^)]*)\)", source, re.MULTILINE):
        pairs = (re.fullmatch(r"(.*?)(\w+)", " ".join(argument.split())) for argument in words.split(","))
        found[kernel] = [(pair[1].replace("const ", "").strip(), pair[2]) for pair in pairs]
    return found


def _typedefs(source):
    """The source's own names of numbers, such as i64 -> ctypes' types."""
    pairs = re.findall(r"^typedef ([\w ]+?) (\w+);", source, re.MULTILINE)
    return {name: _NUMBERS[c_type] for c_type, name in pairs if c_type in _NUMBERS}


def _code(numbers, c_type):
    """The letter of an argument in module struct; none for a struct of C, which lies with the caller."""
    return "P" if "*" in c_type else numbers[c_type]._type_ if c_type in numbers else ""


def _raw_stream(index):
    return torch.cuda.current_stream(index).cuda_stream


_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", _raw_stream
)  # twenty times as fast; torch's compiler takes it too


# ---------------------------------------------------------------------------------------------------------------------
# NVRTC and the driver


def compile_cuda(source, arch, options=()):
    """Compile CUDA C++ for an architecture such as "sm_90" -> (module as bytes for cuModuleLoadData, what NVRTC said).

    A GPU younger than NVRTC gets PTX of the latest architecture before it, which its driver compiles. With the option
    --ptxas-options=-v NVRTC says what registers and local memory each kernel takes.

    Raises:
        OSError: no NVRTC is found. RuntimeError: it refuses the source; says the first error.
    """
    nvrtc, program, size, count = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
    _check_nvrtc(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check_nvrtc(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
    number = int(arch.removeprefix("sm_"))
    kind = "CUBIN" if number in known else "PTX"
    if kind == "PTX":
        arch = f"compute_{max((n for n in known if n < number), default=number)}"
    flags = [flag.encode() for flag in (f"--gpu-architecture={arch}", *options)]
    _check_nvrtc(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.value.decode(errors="replace")
        if code:
            errors = [line for line in log.splitlines() if "error" in line]
            raise RuntimeError(f"NVRTC for {arch}: {errors[0] if errors else nvrtc.nvrtcGetErrorString(code).decode()}")
        _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, image))
        return image.raw, log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check_nvrtc(nvrtc, code):
    if code:
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


def _nvrtc():
    """The libnvrtc that torch's CUDA build brings, or the system's."""
    major, folder = str(torch.version.cuda or "").split(".")[0], Path(torch.__file__).parent
    wheels = [f"{folder.parent}/nvidia/{part}/lib/libnvrtc.so*" for part in (f"cu{major}", "cuda_nvrtc")]
    paths = [path for pattern in (*wheels, f"{folder}/lib/libnvrtc*.so*") for path in sorted(glob(pattern))]
    paths = [path for path in paths if "builtins" not in path and ".alt." not in path]
    # libcaffe2_nvrtc.so knows where its libnvrtc lies, wherever torch came from
    names = [f"libnvrtc.so.{major}", *paths, f"{folder}/lib/libcaffe2_nvrtc.so", "libnvrtc.so"]
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise OSError("libnvrtc is not there, which torch's CUDA build brings (pip install nvidia-cuda-nvrtc)")


def _driver():
    """libcuda, which the NVIDIA driver brings."""
    library = ctypes.CDLL("libcuda.so.1")
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuModuleLoadData.argtypes = [pointer, ctypes.c_char_p]
    library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    return library
