"""Runs each fuzzer for some seconds and prints a line for it. A crash prints the input that causes it.

``make fuzz`` runs it: ``python native/fuzz/run.py BUILD SECONDS``. BUILD holds the fuzzers, and in ``seeds`` the inputs
of ``corpus.py``. ``found`` keeps inputs that reach new code, for the next run; ``crashes`` keeps those that crash.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

TARGETS = ("levels", "conditional", "lossless", "nearest", "values")
SLOWEST = 20
"""Seconds that a single input may take, on a busy machine. Most take less than a millisecond."""


def run(target: str, build: Path, seconds: int) -> bool:
    """Run one fuzzer and print what it did. Return whether it found nothing."""
    found, seeds, crashes = (build / folder / target for folder in ("found", "seeds", "crashes"))
    for folder in (found, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    program = build / f"fuzz_{target}"
    options = [f"-max_total_time={seconds}", f"-timeout={SLOWEST}", f"-artifact_prefix={crashes}/"]
    one_thread = {**os.environ, "DYNAQUANT_THREADS": "1"}  # so that an input always does the same
    done = subprocess.run(
        [program, *options, "-print_final_stats=1", found, seeds],
        env=one_thread,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    (build / f"{target}.log").write_text(done.stderr)
    executions = int((re.findall(r"number_of_executed_units: (\d+)", done.stderr) or [0])[-1])
    covered = [int(edges) for edges in re.findall(r"\bcov: (\d+)", done.stderr)] or [0]
    # The first number is that of the inputs it began with: of the golden files, and of what earlier runs have found.
    print(f"{target:12} {executions:9,} executions  coverage {covered[0]:5,} edges before, {covered[-1]:5,} after")
    if done.returncode == 0:
        return True
    reproducer = re.search(r"Test unit written to (.+)", done.stderr)
    why = re.search(r"broken contract: .+|runtime error: .+|ERROR: .+|Assertion .+", done.stderr)
    print(f"{target}: {why[0] if why else f'it ended with status {done.returncode}'}")
    print(f"  to see it again: {program} {reproducer[1]}" if reproducer else f"  it says: {build / f'{target}.log'}")
    return False


def main(build: Path, seconds: int) -> None:
    """Run all fuzzers, one after another. Exit with 1 if any of them has found something."""
    passed = [run(target, build, seconds) for target in TARGETS]
    if not all(passed):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
