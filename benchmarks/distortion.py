"""Compare the estimate that stands in for a metric, the distortion of weights, with the measured degradation.

    python benchmarks/distortion.py

Trains the demo's two models, quantizes them at several steps with configurations from coarse to fine, and scores each.
Needs no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import options
from results import Table, machine, publish, sentence
from rich.console import Console
from rich.progress import track

from dynaquant.demo.workloads import WORKLOADS
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.search.distortion import distortion, mean_squared_gradients
from dynaquant.search.judge import DISTORTION_SCALE, MetricJudge
from dynaquant.search.live_model import LiveModel, score
from dynaquant.state.roles import labels
from dynaquant.training.gradients import GradientRecorder

STEPS, AT = 400, (50, 100, 200, 400)
BINS, PRUNED = (4, 8, 16, 32, 64), (0.0, 0.3)
LIMITS = (0.05, 0.01)


@dataclass(frozen=True)
class Case:
    """One configuration at one training step. weighted, plain: distortion with and without Fisher information."""

    workload: str
    step: int
    bins: int
    pruned: float
    degradation: float
    weighted: float
    plain: float


def cases(name: str, at: Sequence[int]) -> list[Case]:
    """Return a case for each configuration at each of these steps of a training."""
    work = WORKLOADS[name](STEPS, 0)
    parameters = {f"model.{path}": parameter for path, parameter in work.model.named_parameters()}
    recorder = GradientRecorder(parameters, work.optimizer, window=50)
    label_of = labels(parameters, {"model": work.model})
    found = []
    for step in track(range(1, at[-1] + 1), description=f"training the {name}"):
        work.model.train()
        work.loss(work.model, *work.next_batch()).backward()  # type: ignore[no-untyped-call]
        work.optimizer.step()
        work.optimizer.zero_grad()
        work.scheduler.step()
        if step not in at:
            continue
        weights = {path: tensor.detach() for path, tensor in parameters.items() if label_of[path].role == "weight"}
        gradients = recorder.collect()
        sketched = kmeans_weights(weights, label_of, gradients)
        mean_squares = mean_squared_gradients({path: parameters[path] for path in weights}, [work.optimizer], {})
        original = score(work.model, {}, work.evaluate)
        judge = MetricJudge(LiveModel(work.model), work.evaluate, work.higher_is_better, original, {})
        for bins, pruned in product(BINS, PRUNED):
            quantized = quantize_weights(sketched, Configuration(bins, max(bins, 16), pruned))
            found.append(
                Case(
                    name,
                    step,
                    bins,
                    pruned,
                    judge(quantized).degradation,
                    distortion(weights, quantized, mean_squares),
                    distortion(weights, quantized, {}),
                )
            )
    return found


def summary(found: list[Case]) -> Table:
    """Return a table of what the estimate accepts for a limit, and how far off it is."""
    rows = []
    for limit, (kind, field) in product(LIMITS, (("Fisher-weighted", "weighted"), ("plain", "plain"))):
        accepted = [case for case in found if DISTORTION_SCALE * getattr(case, field) <= limit]
        good = [case for case in found if case.degradation <= limit]
        worst = max((case.degradation for case in accepted), default=0.0)
        wrong = sum(case.degradation > limit for case in accepted)
        rows.append([f"{limit:.0%}, {kind}", str(len(accepted)), str(len(good)), str(wrong), f"{worst:.2%}"])
    return Table(
        f"Distortion × {DISTORTION_SCALE:g} as an estimate, {len(found)} cases",
        ["limit, distortion", "accepted", "good by the metric", "accepted and not good", "worst accepted"],
        rows,
    )


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    at = (5,) if arguments.quick else AT
    found = [case for name in WORKLOADS for case in cases(name, at)]
    table, described = summary(found), machine("numpy", "torch")
    Console().print(table.on_screen())
    page = [
        "# Distortion against degradation",
        "```\n.venv/bin/python benchmarks/distortion.py\n```",
        sentence(described),
        f"The demo's two trainings at steps {', '.join(map(str, at))}, quantized to {', '.join(map(str, BINS))} bins "
        "with nothing and with 30 % pruned. Distortion is Σ F·δ² / Σ F·w², with F the mean squared gradient of a "
        "tensor, or 1; times `DISTORTION_SCALE` it estimates the degradation. The convnet's accuracy on 597 images "
        "resolves 0.17 %.",
        table.in_markdown(),
    ]
    numbers = {"machine": described, "cases": [asdict(case) for case in found]}
    publish(arguments.out, "distortion", numbers, None, "\n\n".join(page) + "\n")


if __name__ == "__main__":
    main()
