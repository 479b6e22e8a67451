"""Observes the threads of the native core in a separate process: ``threaded.py MODULE FUNCTION`` prints JSON.

The core reads its environment once and keeps its threads, so every test needs a new process.
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


def round_trip_works(native):
    """Whether values are unchanged after coding and decoding."""
    out = np.zeros_like(VALUES)
    native.decode_lossless(native.encode_lossless(VALUES, NOTHING, 1), NOTHING, 1, out)
    return bool((out == VALUES).all())


def tasks():
    return {int(name) for name in os.listdir("/proc/self/task")}


def limit(native):
    return native.threads()


def kept(native):
    """Return the threads other than this one after each of several calls."""
    before = tasks()
    return [(round_trip_works(native), sorted(tasks() - before)) for _ in range(5)]


def together(native):
    """Call from several threads at once. Returns their results, and the number of other threads."""
    before = tasks()
    right = []
    callers = [Thread(target=lambda: right.extend(round_trip_works(native) for _ in range(5))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    ended = time.monotonic() + 10  # the system forgets threads a moment after they are joined
    while len(tasks() - before) > native.threads() - 1 and time.monotonic() < ended:
        time.sleep(0.01)
    return right, len(tasks() - before)


def failing(native):
    """Encode an invalid level repeatedly. Returns the errors, and whether later calls still work."""
    levels = np.zeros_like(VALUES)
    levels[20 * 65_536] = 5
    messages = set()
    for _ in range(20):
        try:
            native.encode_levels(levels, NOTHING, 3, 1, True)
        except ValueError as error:
            messages.add(str(error))
    return sorted(messages), round_trip_works(native)


def narrowed(native):
    """Whether the threads follow the caller when it restricts itself to one processor."""
    before = tasks()
    round_trip_works(native)
    only = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, only)
    deadline = time.monotonic() + 30
    while any(os.sched_getaffinity(task) != only for task in tasks() - before):
        if time.monotonic() > deadline:
            return False
        round_trip_works(native)
    return True


def fork(native):
    """Return the exit status of a forked child that calls the core."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends the child instead of hanging
        os._exit(0 if round_trip_works(native) else 1)
    return os.waitpid(child, 0)[1]


def forked(native):
    """Fork children while the threads wait for work."""
    round_trip_works(native)
    return [fork(native) for _ in range(3)]


def forked_at_work(native):
    """Fork children while other threads call the core."""
    stop = Event()

    def call():
        while not stop.is_set():
            round_trip_works(native)

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
