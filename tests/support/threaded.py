"""What a process of its own sees of the threads of the native core: ``threaded.py MODULE FUNCTION`` prints JSON.

The core reads its environment once, and threads that it has started stay; so every test has a process of its own.
"""

import importlib.util
import json
import os
import signal
import sys
import time
from threading import Event, Thread

import numpy as np

VALUES = np.random.default_rng(0).geometric(0.3, 30 * 65_536 + 5).astype(np.uint8)  # 31 blocks
NOTHING = np.zeros(0, dtype=np.uint8)


def load(path):
    spec = importlib.util.spec_from_file_location("dynaquant._native", path)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native


def comes_back(native):
    """Whether values are the same after being coded and decoded."""
    out = np.zeros_like(VALUES)
    native.decode_lossless(native.encode_lossless(VALUES, NOTHING, 1), NOTHING, 1, out)
    return bool((out == VALUES).all())


def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}


def limit(native):
    return native.threads()


def kept(native):
    """The threads beside this one after each of several calls."""
    before = tasks()
    return [(comes_back(native), sorted(tasks() - before)) for _ in range(5)]


def together(native):
    """Several threads call at a time: what they got, and how many threads there are beside them."""
    before = tasks()
    right = []
    callers = [Thread(target=lambda: right.extend(comes_back(native) for _ in range(5))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    ended = time.monotonic() + 10  # the system forgets threads a moment after they are joined
    while len(tasks() - before) > native.threads() - 1 and time.monotonic() < ended:
        time.sleep(0.01)
    return right, len(tasks() - before)


def failing(native):
    """A level that is too high in one block of many, again and again; then whether anything is left of that."""
    levels = np.zeros_like(VALUES)
    levels[20 * 65_536] = 5
    messages = set()
    for _ in range(20):
        try:
            native.encode_levels(levels, NOTHING, 3, 1, True)
        except ValueError as error:
            messages.add(str(error))
    return sorted(messages), comes_back(native)


def narrowed(native):
    """Whether the threads follow the caller to the one processor that it has kept for itself."""
    before = tasks()
    comes_back(native)
    only = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, only)
    deadline = time.monotonic() + 30
    while any(os.sched_getaffinity(task) != only for task in tasks() - before):
        if time.monotonic() > deadline:
            return False
        comes_back(native)
    return True


def fork(native):
    """The exit status of a forked child that calls the core."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # rather than to hang
        os._exit(0 if comes_back(native) else 1)
    return os.waitpid(child, 0)[1]


def forked(native):
    """Children forked from a process whose threads wait for work."""
    comes_back(native)
    return [fork(native) for _ in range(3)]


def forked_at_work(native):
    """Children forked while other threads call."""
    stop = Event()

    def call():
        while not stop.is_set():
            comes_back(native)

    callers = [Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    children = [fork(native) for _ in range(10)]
    stop.set()
    for caller in callers:
        caller.join()
    return children


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[2]](load(sys.argv[1]))))
