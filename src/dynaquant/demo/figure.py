"""The demo's picture: size and quality by step, one row for each workload."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dynaquant.demo.comparison import Result


def draw(results: list[Result], file: Path) -> None:
    """Write the picture as a PNG file."""
    figure, rows = plt.subplots(len(results), 2, figsize=(12, 3.8 * len(results)), squeeze=False)
    for result, (left, right) in zip(results, rows, strict=True):
        _sizes(left, result)
        _quality(right, result)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _sizes(axes: Axes, result: Result) -> None:
    steps = [record.step for record in result.records]
    weights = [record.roles["weight"] for record in result.records]
    series = (
        ("whole state, raw", [record.total.raw for record in result.records], "tab:blue", ":"),
        ("whole state, stored", [record.total.stored for record in result.records], "tab:blue", "-"),
        ("weights, raw", [size.raw for size in weights], "tab:orange", ":"),
        ("weights, stored", [size.stored for size in weights], "tab:orange", "-"),
    )
    for label, sizes, color, style in series:
        axes.plot(steps, [size / 1e6 for size in sizes], style, color=color, label=label, marker=".")
    axes.set(title=f"{result.name}: size of each checkpoint", xlabel="step", ylabel="MB", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()


def _quality(axes: Axes, result: Result) -> None:
    for number, step in enumerate(result.crashed.crashes):
        axes.axvline(step, color="tab:red", alpha=0.35, linewidth=1, label=None if number else "crash")
    undisturbed = sorted(result.undisturbed.qualities.items())
    axes.plot(*zip(*undisturbed, strict=True), "-", color="tab:gray", linewidth=3, alpha=0.5, label="undisturbed")
    scored = [(record.step, record.quality) for record in result.records if record.quality]
    steps = [step for step, _ in scored]
    axes.plot(steps, [quality.original for _, quality in scored], "-", label="with crashes, in training")
    axes.plot(steps, [quality.restored for _, quality in scored], "x", label="with crashes, as restored")
    axes.set(title=f"{result.name}: {result.metric}", xlabel="step", ylabel=result.metric)
    axes.grid(alpha=0.3)
    axes.legend()
