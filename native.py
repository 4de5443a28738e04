"""C for the CPU: source text -> a loaded library, compiled at first use and kept in a per-user cache.

This file stands alone: copy it beside what uses it.

    library = load_c("sampler", source, ["-O3"], {"count": (ctypes.c_int64, ctypes.c_void_p)})
    if library is None: ...     # no compiler: a warning has said so; torch operations do the same, slower

Libraries lie in $XDG_CACHE_HOME/ringblock (~/.cache/ringblock), one for each source, compiler, flags and processor:
NAME-KEY-DIGEST.so, the digest being the SHA-256 of the file itself. What is loaded runs as this user, so the folder and
the file must be this user's and nobody else may write to them; and a file that does not have its digest (a full disk,
a flipped bit) is compiled anew, because loading it could end the process. Where the cache cannot be trusted or written,
a private temporary folder does, until the process ends.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

_warned = set()  # names of sources that could not be compiled


def load_c(name, source, flags, signatures):
    """Compile C source into a shared library, if the cache does not have it, and load it.

    Args:
        name: whose code this is, for the warning and the file's name.
        source: C, as text.
        flags: of the compiler, which is `cc` or what the environment variable CC names; with -march=native the library
            is for this processor alone, and processors never share one.
        signatures: {function: (type of its result, types of its arguments...)} in ctypes' types.

    Returns:
        ctypes.CDLL, or None where it cannot be compiled or loaded, after one warning for each `name`.
    """
    try:
        library = ctypes.CDLL(str(_compile(name, source, os.environ.get("CC", "cc"), flags)))
    except (OSError, subprocess.SubprocessError) as error:
        if name not in _warned:
            _warned.add(name)
            reason = [*(getattr(error, "stderr", None) or str(error)).strip().splitlines(), repr(error)][0]
            warnings.warn(
                f"the C code of {name} could not be compiled, so slower torch operations are used; install a C "
                f"compiler (apt install gcc) or name one in the variable CC. Reason: {reason}",
                stacklevel=2,
            )
        return None
    for function, (result, *arguments) in signatures.items():
        getattr(library, function).restype = result
        getattr(library, function).argtypes = arguments
    return library


def _compile(name, source, compiler, flags):
    """Path of the library."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = "\0".join([source, version, *flags, sys.platform, platform.machine(), _cpu_flags()])

    def make(library):
        code = library.with_suffix(".c")
        code.write_text(source)
        subprocess.run([compiler, *flags, code, "-o", library, "-lm"], capture_output=True, text=True, check=True)

    return cached(name, key, ".so", make)


def cached(name, key, suffix, make):
    """Path of a file in the cache, where it is, or made aside and then renamed: it is complete or not there.

    Args:
        name: what the file's name begins with. key: text of all that the content depends on.
        suffix: of the file's name, such as ".so".
        make: function that writes the file to the path it is given; other files beside that are removed.
    """
    stem, folder = f"{name}-{_sha256(key.encode())[:24]}", _cache()
    if folder:
        for path in folder.glob(f"{stem}-*{suffix}"):
            if _is_ours(path, stat.S_IFREG) and path.stem == f"{stem}-{_sha256(path.read_bytes())}":
                return path
    if not folder or not os.access(folder, os.W_OK):
        folder = Path(tempfile.mkdtemp(prefix="ringblock-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        file = Path(aside, name + suffix)
        make(file)
        file.chmod(0o700)  # whatever the umask: what others may write to is not loaded
        target = folder / f"{stem}-{_sha256(file.read_bytes())}{suffix}"
        os.replace(file, target)
    return target


def _cache():
    """The cache's folder, made if need be; None where it is not this user's alone or cannot be made."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringblock"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        above = [path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) for path in folder.resolve().parents]
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    # where everybody may write, and no sticky bit forbids it, another folder could be put in the place of a checked one
    return folder if _is_ours(folder, stat.S_IFDIR) and stat.S_IWOTH not in above else None


def _is_ours(path, kind):
    """Whether it is a file (kind S_IFREG) or folder (S_IFDIR) of this user, no link, that nobody else may write to."""
    status = os.lstat(path)
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(status.st_mode) == kind and status.st_uid == os.geteuid() and not writable


def _cpu_flags():
    """What tells processors apart that -march=native compiles different code for."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _sha256(content):
    return hashlib.sha256(content).hexdigest()
