"""The threads of the native core: reused by later calls, never more than allowed, safe with forks and exits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaquant import _native

SUPPORT = Path(__file__).parents[1] / "support"

CORES = sorted(os.sched_getaffinity(0))
HALF = CORES[: max(1, len(CORES) // 2)]
ABOUT_THREADS = ("DYNAQUANT_THREADS", "LOCAL_WORLD_SIZE")


def run(function, cores=CORES, **environment):
    """Run a function of threaded.py in a process on these processors, and return the finished process."""
    return subprocess.run(
        [sys.executable, SUPPORT / "threaded.py", _native.__file__, function],
        env={key: value for key, value in os.environ.items() if key not in ABOUT_THREADS} | environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def result(function, cores=CORES, **environment):
    process = run(function, cores, **environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_threads_are_kept_from_call_to_call():
    calls = result("kept", DYNAQUANT_THREADS="4")
    assert [right for right, _ in calls] == [True] * 5
    assert {tuple(threads) for _, threads in calls} == {tuple(calls[0][1])}
    assert len(calls[0][1]) == 3  # the caller is the fourth


@pytest.mark.parametrize(
    ("cores", "environment", "wanted"),
    [
        (CORES, {}, len(CORES)),
        (CORES[:1], {}, 1),
        (CORES, {"OMP_NUM_THREADS": "1"}, len(CORES)),  # as torchrun sets it for every rank
        (CORES, {"LOCAL_WORLD_SIZE": "1"}, len(CORES)),
        (CORES, {"LOCAL_WORLD_SIZE": "2"}, len(HALF)),
        (HALF, {"LOCAL_WORLD_SIZE": "2"}, len(HALF)),  # one of two pinned ranks: it already has its share
        (CORES, {"LOCAL_WORLD_SIZE": str(len(CORES))}, 1),
        (CORES, {"LOCAL_WORLD_SIZE": str(8 * len(CORES))}, 1),
        (CORES[:1], {"LOCAL_WORLD_SIZE": "1"}, 1),
        (CORES, {"LOCAL_WORLD_SIZE": "many"}, len(CORES)),
        (CORES[:1], {"LOCAL_WORLD_SIZE": "8", "DYNAQUANT_THREADS": "5"}, 5),
        (CORES, {"DYNAQUANT_THREADS": ""}, len(CORES)),
    ],
)
def test_a_call_uses_the_threads_that_the_process_may_use(cores, environment, wanted):
    assert result("limit", cores, **environment) == wanted


@pytest.mark.parametrize("cores", [CORES[:1], CORES])
def test_ranks_start_no_more_threads_than_their_share(cores):
    for _, threads in result("kept", cores, LOCAL_WORLD_SIZE=str(len(cores))):
        assert threads == []


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", "4 "])
def test_an_invalid_number_of_threads_is_refused(wrong):
    process = run("limit", DYNAQUANT_THREADS=wrong)
    assert process.returncode != 0
    assert f"DYNAQUANT_THREADS is '{wrong}', but has to be a whole number from 1" in process.stderr


def test_concurrent_calls_share_the_pool():
    right, threads = result("together", DYNAQUANT_THREADS="4")
    assert right == [True] * 20
    assert threads == 3


def test_an_error_in_one_block_reaches_the_caller_and_later_calls_work():
    messages, right = result("failing", DYNAQUANT_THREADS="4")
    assert messages == ["a level is not below the modulus"]
    assert right


def test_pool_threads_use_only_the_processors_of_the_caller():
    assert result("narrowed", DYNAQUANT_THREADS="3")


# A child of a process whose threads are at work may hang in a lock of AddressSanitizer, which forking does not release.
AT_WORK = pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer hangs after such forks"
)


@pytest.mark.parametrize("when", ["forked", pytest.param("forked_at_work", marks=AT_WORK)])
def test_a_forked_process_has_threads_of_its_own(when):
    assert set(result(when, DYNAQUANT_THREADS="4")) == {0}
