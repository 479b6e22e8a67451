"""Two tiers of tests, and the CPU seconds of each test. A plugin of pytest.

``--tier quick`` runs every test function once, with its first parameters, without those marked ``slow``. Hypothesis
tries few examples there. ``--tier rest`` runs the others, and those with Hypothesis again. By default, all run.
Each run ends with its slowest tests, by the CPU seconds that they and their finished subprocesses took. A tier that
takes half as much again as its budget fails. A budget is a multiple of what a reference task takes on the same machine
before and after the tests, so a slow or busy machine does not fail it.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import launched
import pytest
from hypothesis import is_hypothesis_test, settings
from xdist.scheduler import LoadScopeScheduling

SHOWN = 10
BUDGETS = {"quick": 3_700, "rest": 7_000}
"""CPU seconds of each tier, as multiples of those of the reference task."""
EXCEEDED = 1.5
"""How much of its budget fails a tier."""
SHARING = frozenset(
    f"tests/{file}.py"
    for file in (
        "checkpointer/test_ranks_apart",
        "checkpointer/test_resuming_ranks",
        "checkpointer/test_sharded",
        "checkpointer/test_sharded_findings",
        "demo/test_demo",
        "report/test_page",
        "report/test_page_in_browser",
        "store/test_hostile",
        "training/test_ranks",
    )
)
"""Files with a fixture of the module that takes long: trainings on several ranks, a demo, readers of many files."""
BEGAN = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its subprocesses that have ended, and of ranks."""
    return sum(os.times()[:4]) + launched.cpu_seconds()


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("quick", "rest", "all"), default="all", help="quick: what is not slow, once")
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds of each test to this file, as JSON")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: not in the quick tier")
    settings.load_profile("quick" if config.getoption("--tier") == "quick" else "thorough")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


class Scheduling(LoadScopeScheduling):
    """Sends each test to the next free worker, but those of a file that shares its work to one worker."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return file if file in SHARING else nodeid


def pytest_collection_modifyitems(config, items):
    """Leave only the tests of the tier that is asked for."""
    if (tier := config.getoption("--tier")) == "all":
        return
    first = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            first.setdefault(item.nodeid.partition("[")[0], item)
    quick = set(first.values())
    chosen = quick if tier == "quick" else {item for item in items if item not in quick or by_example(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def by_example(item):
    """Whether Hypothesis chooses the examples of a test."""
    return is_hypothesis_test(item.obj)


def examples(count: int) -> settings:
    """Return settings of a property for which 100 examples are too few or too many. The quick tier tries fewer."""
    return settings(max_examples=max(10, count * settings.default.max_examples // 100))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.cpu_seconds = cpu_seconds() - item.stash[BEGAN]  # xdist passes attributes on
    return report


def reference_seconds():
    """Return the CPU seconds of the reference task: interpreted code, and a pass over memory."""
    began = time.process_time()
    numbers = list(range(1_000_000))
    assert sum(number * number % 7 for number in numbers) > 0
    hashlib.sha256(bytes(1 << 27)).hexdigest()
    return time.process_time() - began


class Report:
    """Gathers the CPU seconds of all tests, shows the slowest, and compares the sum with the tier's budget."""

    def __init__(self, config):
        self.file = config.getoption("--cpu-seconds")
        self.budget = BUDGETS.get(config.getoption("--tier"))
        self.seconds = {}
        self.reference = [reference_seconds() for _ in range(3)] if self.budget else []
        self.used = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.budget and self.seconds:
            self.reference += [reference_seconds() for _ in range(3)]
            self.used = sum(self.seconds.values()) / (sum(self.reference) / len(self.reference)) / self.budget
            if self.used > EXCEEDED and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.seconds[report.nodeid] = report.cpu_seconds

    def pytest_terminal_summary(self, terminalreporter):
        if self.file:
            Path(self.file).write_text(json.dumps(self.seconds, indent=1) + "\n")
        if not self.seconds:
            return
        total = sum(self.seconds.values())
        terminalreporter.section(f"{len(self.seconds)} tests took {total:.0f} CPU seconds, the slowest")
        for name in sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)[:SHOWN]:
            terminalreporter.line(f"{self.seconds[name]:7.1f} s  {name}")
        if self.used is not None:
            failed = f", more than {EXCEEDED:.0%}: mark tests as slow, or make them faster" * (self.used > EXCEEDED)
            terminalreporter.line(f"{self.used:.0%} of the budget of this tier{failed}")
