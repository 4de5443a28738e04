"""Before the slow imports of a command line: standard streams and Ctrl-C. Needs only the standard library."""

import atexit
import os
import signal
import sys


def begin():
    """Replace closed standard streams by /dev/null: their numbers would go to files or pipes, into which libraries would
    print, and errors to stdout. Characters that stdout's encoding lacks, as a path may have, are escaped. Until `ready`,
    Ctrl-C ends the process without a traceback."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")
    if sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
        os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"  # for ranks
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def ready():
    """Make Ctrl-C raise KeyboardInterrupt again, until the interpreter exits."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
