"""Hashes of large data: standard BLAKE3, on no more threads than allowed, also in forked processes."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3

from dynaquant.engine.tensors.hashing import hash_of

PROGRAM = """
import json, os, signal
from threading import Thread
from dynaquant.engine.tensors.hashing import hash_of

def tasks():
    return set(os.listdir("/proc/self/task"))

parts = [bytes(range(256)) * 8192] * 4
before = tasks()
right = hash_of(parts, 1 << 23)
started = len(tasks() - before)
hashes = []
callers = [Thread(target=lambda: hashes.extend(hash_of(parts, 1 << 23) for _ in range(20))) for _ in range(3)]
[caller.start() for caller in callers]
[caller.join() for caller in callers]
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends the process if it hangs
    os._exit(0 if hash_of(parts, 1 << 23) == right else 1)
print(json.dumps([right, started, set(hashes) == {right}, os.waitpid(child, 0)[1]]))
"""


@pytest.mark.parametrize(
    ("environment", "threads"),
    [({"DYNAQUANT_THREADS": "3"}, 3), ({"DYNAQUANT_THREADS": "", "LOCAL_WORLD_SIZE": "10000"}, 0)],
)
def test_a_hash_uses_no_more_threads_than_allowed(environment, threads):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, capture_output=True, check=True, timeout=300
    )
    wanted = blake3(bytes(range(256)) * 8192 * 4).hexdigest()
    assert json.loads(ran.stdout) == [wanted, threads, True, 0]


@pytest.mark.parametrize("size", [0, 1000, (1 << 19) - 1, 1 << 19, 3_000_001])
def test_hashes_are_standard_blake3(size):
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    for _ in range(2):
        assert hash_of([data[:7], memoryview(data)[7:]], size) == blake3(data).hexdigest()


def test_a_hash_after_a_failed_one_is_right():
    def parts():
        yield b"something else" * 50_000
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - raised by this test
        hash_of(parts(), 1 << 20)
    data = b"data" * 200_000
    assert hash_of([data], len(data)) == blake3(data).hexdigest()
