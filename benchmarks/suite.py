"""Make all pages of docs/results, one after another. Tables go to the screen, JSON, pictures and pages to docs/results.

    make bench DATA=DIR            # DIR holds shakespeare.txt and cifar10.zip
    make bench DATA=DIR QUICK=1    # a few steps of nearly everything, only to see that it works

Long trainings are kept in build/benchmarks, so a suite that was stopped continues there. Quick results go to
build/bench-quick; a quick run leaves out two reports of which tests run a few steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from options import CACHE, QUICK, RESULTS
from rich.console import Console
from workloads import WORKLOADS

HERE = Path(__file__).parent
STEP = 0.12
"""Seconds of a training step of the ResNet on one core of the machine on which the minutes below were measured."""


@dataclass(frozen=True)
class Report:
    """One command.

    minutes: what it takes alone, with an empty cache: in full, and quick; 0 if a quick run leaves it out, because tests
    run the same trainings for a few steps.
    """

    script: str
    what: str
    minutes: tuple[float, float]
    needs_data: bool = True


REPORTS = [
    Report("failure_recovery.py", "ten restores by every method", (100, 2)),
    Report("kernel_speed.py", "quantiles and clustering against libraries", (8, 1), needs_data=False),
    Report("coding_speed.py", "coding of levels against libraries", (5, 1), needs_data=False),
    Report("delta_ablation.py", "what each stage of the delta coder saves", (4, 1)),
    Report("transfer.py", "a pretrained model, compressed and fine-tuned", (20, 1)),
    Report("bounds.py", "a bound on every value's error, against ZFP and SZ3", (3, 1)),
    Report("promise.py", "where restored trainings of eight kinds end", (120, 1)),
    Report("tiny_loss.py", "trainings without noise, to tiny losses", (12, 1), needs_data=False),
    Report("optimizers.py", "one restore with every optimizer", (20, 1)),
    Report("frameworks.py", "killed trainings under three frameworks", (20, 0)),
    Report("sharded.py", "ranks that are killed, other numbers of ranks", (30, 0)),
    Report("real_size.py", "a GPT of 33 million weights, killed three times", (60, 1)),
    Report("chain.py", "how long saves block, how fast chains load", (8, 1), needs_data=False),
    Report("long_run.py", "3,000 checkpoints: saves, restores, listings", (30, 1), needs_data=False),
    Report("throughput.py", "saves and restores against archives and managers", (12, 1), needs_data=False),
    Report("lossless.py", "exact values against lossless coders", (8, 1)),
    Report("save.py", "dq.save beside torch.save and safetensors", (3, 1), needs_data=False),
    Report("series.py", "old checkpoints, packed", (12, 1)),
    Report("follow.py", "weights sent to another process at every step", (2, 1)),
    Report("minilm.py", "one pretrained model as one small file", (10, 1), needs_data=False),
    Report("levels.py", "levels per second", (1, 1), needs_data=False),
    Report("entropy.py", "the coder beside the entropy of levels", (4, 1), needs_data=False),
    Report("candidate.py", "one candidate of a search", (2, 1), needs_data=False),
    Report("distortion.py", "the estimate that stands in for a metric", (4, 1), needs_data=False),
    Report("scale.py", "up to 1,024 simulated ranks", (10, 1), needs_data=False),
]


def slower(data: Path, cache: Path) -> float:
    """Return how many times as long a training step takes here as on the machine of the estimates."""
    torch.set_num_threads(1)
    work = WORKLOADS["resnet"](data, cache, 10, 0)
    work.train_step()
    start = perf_counter()
    for _ in range(5):
        work.train_step()
    return (perf_counter() - start) / 5 / STEP


def spoken(minutes: float) -> str:
    return f"{minutes / 60:.1f} hours" if minutes > 90 else f"{max(minutes, 1):.0f} minutes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds shakespeare.txt and cifar10.zip")
    parser.add_argument("--quick", action="store_true", help="a few steps of most reports, only to see that they work")
    arguments = parser.parse_args()
    quick = arguments.quick
    cache, out = (QUICK, QUICK) if quick else (CACHE, RESULTS)
    cache.mkdir(parents=True, exist_ok=True)

    console = Console()
    factor = slower(arguments.data, cache)
    reports = [report for report in REPORTS if report.minutes[quick]]
    expected = sum(report.minutes[quick] for report in reports) * factor
    console.print(
        f"{len(reports)} reports, about {spoken(expected)} here (training takes {factor:.1f} times as long as on the "
        f"machine of the estimates). Trainings that {cache} already has take no time. Results go to {out}"
    )
    failed = []
    began = perf_counter()
    for i, report in enumerate(reports, 1):
        about = spoken(report.minutes[quick] * factor)
        console.rule(f"{i} of {len(reports)}: {report.script}, {report.what}, about {about}")
        command = [sys.executable, str(HERE / report.script)]
        command += ["--data", str(arguments.data)] if report.needs_data else []
        command += ["--quick"] if quick else []
        start = perf_counter()
        if subprocess.run(command, check=False).returncode:
            failed.append(report.script)
        console.print(f"{report.script}: {(perf_counter() - start) / 60:.1f} minutes")
    console.rule(f"{(perf_counter() - began) / 60:.0f} minutes, results in {out}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; run again to continue")


if __name__ == "__main__":
    main()
