"""A plugin of pytest: run the tests in as many processes as there are cores; with `pytest -s` in one, in order."""

import atexit
import gc
import itertools
import multiprocessing.connection
import os

import pytest
import torch


class _Sender:
    """Sends each report of a worker to the process that prints it."""

    def __init__(self, config, pipe):
        self.config, self.pipe = config, pipe

    @pytest.hookimpl
    def pytest_runtest_logstart(self, nodeid):
        self.pipe.send(nodeid)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        hook = self.config.hook
        self.pipe.send(hook.pytest_report_to_serializable(config=self.config, report=report))


def _take(items, taken):
    """Yield the items that no other worker has taken, then None."""
    number = -1
    while number < len(items):
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        yield items[number] if number < len(items) else None


def _work(session, taken, pipe):
    # before other threads start: if two first use torch's thread pool after a fork, one of them finds none
    torch.set_num_threads(1)
    plugins = session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its file is shared with the other workers
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    plugins.register(_Sender(session.config, pipe))
    for item, following in itertools.pairwise(_take(session.items, taken)):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
    atexit._run_exitfuncs()  # a forked process exits without running them


def _replay(session, reader, running):
    """Handle a worker's message: the name of a test that begins, a report, or the end of the worker."""
    hook = session.config.hook
    try:
        message = reader.recv()
    except EOFError:
        name = running.pop(reader)
        if name:
            session.shouldfail = f"a process of the tests ended in {name}"
        return
    if isinstance(message, str):
        running[reader] = message
        return
    report = hook.pytest_report_from_serializable(config=session.config, data=message)
    hook.pytest_runtest_logreport(report=report)
    if report.when == "teardown":
        running[reader] = None
        session.ended = getattr(session, "ended", 0) + 1


def pytest_collection_modifyitems(items):
    # first: CUDA that was asked for GPUs while they were hidden finds none later
    items.sort(key=lambda item: item.get_closest_marker("gpu") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    gc.freeze()  # what all tests imported is not searched by each gc.collect()
    option, cores = session.config.option, getattr(os, "sched_getaffinity", lambda _: [0])(0)
    workers = min(len(cores), 8, len(session.items) // 8)
    one = option.capture == "no" or option.usepdb or option.collectonly
    if workers < 2 or one or session.testsfailed:
        return None  # pytest's own loop
    fork = multiprocessing.get_context("fork")
    taken, running, processes = fork.Value("l", 0), {}, []
    for _ in range(workers):
        reader, writer = fork.Pipe(duplex=False)
        processes.append(fork.Process(target=_work, args=(session, taken, writer)))
        processes[-1].start()
        writer.close()  # or the reader would get no EOF when the worker ends
        running[reader] = None
    try:
        while running:
            for reader in multiprocessing.connection.wait(list(running)):
                _replay(session, reader, running)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    finally:
        for process in processes:
            process.terminate() if running else process.join()
    if getattr(session, "ended", 0) < len(session.items) and not session.shouldfail:
        raise session.Failed("a process of the tests ended before its tests")
    return True
