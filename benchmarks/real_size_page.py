"""Tables, picture and page of ``real_size.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from real_size_runs import ANOTHER, DEFAULT, FINE, UNDISTURBED, Line, Plan, Run
from real_size_training import HELD_OUT
from results import Table, plain_ticks, sentence

Found = Mapping[str, Run]
"""Runs by name: at least the undisturbed one and that of the default quality."""
PARTS = 4
"""Parts of the training whose checkpoints are summed up."""
BUSY = 1.1
"""A core is shared with other programs if steps take more than so many times their CPU seconds."""
COLOURS = {UNDISTURBED: "black", ANOTHER: "tab:gray", DEFAULT: "tab:blue", FINE: "tab:orange"}


def _qualities(found: Found) -> dict[str, Run]:
    """Return the runs that dynaquant has saved."""
    return {name: run for name, run in found.items() if run.records}


def _label(name: str) -> str:
    return name if name in (UNDISTURBED, ANOTHER) else f"`{name}`"


def worse(found: Found, name: str) -> float:
    """Return how much higher the held-out loss of a run is at the end than that of the undisturbed one, relative."""
    return found[name].final / found[UNDISTURBED].final - 1


def ends(found: Found) -> Table:
    """Return where the runs end, and what all their checkpoints take."""
    columns = ["run", "kills", "steps repeated", "loss at the end", "worse", "checkpoints", "all of them", "smaller"]
    of_torch = found[UNDISTURBED].stored
    rows = []
    for name, run in found.items():
        count = len(run.records) or len(run.of("save"))
        sizes = [str(count), f"{run.stored / 1e6:,.0f} MB", f"{of_torch / run.stored:.1f}×"] if count else [""] * 3
        repeated = str(sum(one.repeated for one in run.restores)) if run.restores else ""
        difference = "" if name == UNDISTURBED else f"{worse(found, name):+.2%}"
        kills = str(len(run.restores))
        rows.append([_label(name), kills, repeated, f"{run.final:.4f}", difference, *sizes])
    return Table("End of the training, and all its checkpoints", columns, rows)


def saves(found: Found) -> Table:
    """Return what saves take."""

    def row(label: str, lines: list[Line]) -> list[str]:
        def middle(key: str) -> float:
            return float(median(line[key] for line in lines))

        seconds = [f"{middle(key):.2f} s" for key in ("blocked", "blocked_cpu", "disk", "cpu")]
        return [label, *seconds, f"{middle('bytes') / 1e6:.2f} MB"]

    columns = ["", "blocks", "CPU of that", "on the disk after", "CPU in all", "size"]
    rows = [row("`torch.save` and fsync", found[UNDISTURBED].of("save"))]
    for name, run in _qualities(found).items():
        lines = run.of("save")
        rows += [row(f"`{name}`, first save", lines[:1]), row(f"`{name}`, later saves", lines[1:])]
    return Table("A save (medians)", columns, rows)


def steps(found: Found) -> Table:
    """Return what steps take, the share of the time that saves block, and memory."""
    columns = ["run", "a step", "CPU of that", "saves block", "peak before the first save", "peak", "peak of a restore"]
    rows = []
    for name, run in found.items():
        lines, blocked = run.of("step"), [line["blocked"] for line in run.of("save")]
        trained = sum(line["seconds"] for line in lines)
        first = [line for line in run.attempts[0] if "step" in line and line["step"] <= run.first_save]
        cells = [f"{median(line[key] for line in lines):.2f} s" for key in ("seconds", "cpu")]
        cells.append(f"{sum(blocked) / (trained + sum(blocked)):.0%} of the time" if blocked else "")
        cells.append(_megabytes(first))
        cells.append(_megabytes([line for attempt in run.attempts for line in attempt if "peak" in line]))
        cells.append(_megabytes([line for line in run.of("restored") if line["restored"]]))
        rows.append([_label(name), *cells])
    return Table("Steps and memory", columns, rows)


def _megabytes(lines: list[Line]) -> str:
    return f"{max(line['peak'] for line in lines) / 1e6:,.0f} MB" if lines else ""


def restores(found: Found) -> Table:
    """Return what restores take."""
    columns = ["", "killed after step", "goes on from", "repeats", "files read", "takes", "CPU"]
    rows = []
    for name, run in _qualities(found).items():
        for one in run.restores:
            numbers = [str(number) for number in (one.until, one.step, one.repeated, run.files_of(one.step))]
            rows.append([f"`{name}`", *numbers, f"{one.seconds:.2f} s", f"{one.cpu:.2f} s"])
    loaded = found[UNDISTURBED].loaded
    assert loaded is not None
    seconds = [f"{loaded[key]:.2f} s" for key in ("loaded", "cpu")]
    rows.append(["`torch.load` and `load_state_dict`", "", "", "", "1", *seconds])
    return Table("Restores in new processes", columns, rows)


def over_time(found: Found) -> Table:
    """Return sizes, limits and what searches have found, by parts of the training."""
    columns = ["", "steps", "a checkpoint", "smaller", "limit", "metric is worse by", "evaluations", "scale"]
    rows = []
    for name, run in _qualities(found).items():
        last = run.records[-1]["step"]
        for part in range(PARTS):
            low, high = last * part // PARTS, last * (part + 1) // PARTS
            inside = [one for one in run.records if low < one["step"] <= high]
            if inside:
                rows.append([f"`{name}`", f"{low + 1} to {high}", *_middle_of(inside)])
    return Table("Checkpoints over the training (medians)", columns, rows)


def _middle_of(records: list[Line]) -> list[str]:
    ratio = sum(one["raw"] for one in records) / sum(one["stored"] for one in records)

    def middle(key: str, form: str) -> str:
        numbers = [one[key] for one in records if one[key] is not None]
        return format(median(numbers), form) if numbers else ""

    scales = [one["configuration"]["scale"] for one in records if one["configuration"] is not None]
    return [
        f"{median(one['stored'] for one in records) / 1e6:.2f} MB",
        f"{ratio:.1f}×",
        middle("limit", ".2%"),
        middle("degradation", "+.3%"),
        middle("equivalents", ".1f"),
        " to ".join(str(scale) for scale in sorted({min(scales), max(scales)})) if scales else "",
    ]


def tables(found: Found) -> list[Table]:
    """Return all tables in the order of the page."""
    return [ends(found), saves(found), steps(found), restores(found), over_time(found)]


def numbers(found: Found, plan: Plan) -> dict[str, Any]:
    """Return the results as JSON values."""
    return {
        "training": {**asdict(plan.training), "data": ""},
        "runs": {
            name: {
                "final": run.final,
                "losses": [round(loss, 5) for loss in run.losses],
                "steps": {key: median(line[key] for line in run.of("step")) for key in ("seconds", "cpu")},
                "saves": run.of("save"),
                "records": run.records,
                "restores": [asdict(one) for one in run.restores],
                "loaded": run.loaded,
            }
            for name, run in found.items()
        },
    }


def plot(found: Found, plan: Plan, path: Path) -> None:
    """Draw losses, their differences from the undisturbed run, and sizes."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    losses, apart, sizes = figure.subplots(1, 3)
    every, reference = plan.training.every, found[UNDISTURBED].means(plan.training.every)
    for name, run in found.items():
        means = run.means(every)
        at = [min((i + 1) * every, len(run.losses)) for i in range(len(means))]
        losses.plot(at, means, color=COLOURS[name], label=name, linewidth=1)
        if run.records:
            differences = [100 * (own / other - 1) for own, other in zip(means, reference, strict=True)]
            apart.plot(at, differences, color=COLOURS[name], label=name)
    for name, run in _qualities(found).items():
        records = run.records
        points = [one["step"] for one in records], [one["stored"] / 1e6 for one in records]
        sizes.plot(*points, "o-", color=COLOURS[name], label=name, markersize=3)
        key = [one for one in records if one["parent"] is None]
        marks = [one["step"] for one in key], [one["stored"] / 1e6 for one in key]
        sizes.plot(*marks, "s", color=COLOURS[name], markersize=7, fillstyle="none")
    lines = found[UNDISTURBED].of("save")
    sizes.plot([line["save"] for line in lines], [line["bytes"] / 1e6 for line in lines], "k-", label="torch.save")
    losses.set(title=f"Loss in training, mean of {every} steps", xlabel="step", ylabel="nats per token")
    apart.set(title="The same, beside the undisturbed run", xlabel="step", ylabel="higher by, %")
    apart.axhline(0, color="black", linewidth=0.8)
    sizes.set(title="Size of a checkpoint (squares: keyframes)", xlabel="step", ylabel="MB", yscale="log")
    plain_ticks(sizes.yaxis)
    _finish([losses, apart, sizes], plan.kills_of(DEFAULT))
    figure.savefig(path, dpi=110)


def _finish(panels: list[Axes], kills: list[int]) -> None:
    for axes in panels:
        for i, kill in enumerate(kills):
            axes.axvline(kill, color="tab:red", linestyle=":", linewidth=1, label="kill" if i == 0 else None)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[-1].legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0.93))  # below the line of torch.save


def page(found: Found, plan: Plan, described: dict[str, str | int]) -> str:
    """Return the page."""
    training = plan.training
    run = found[DEFAULT]
    weights = run.of("final")[-1]["weights"]
    shown = "\n\n".join(table.in_markdown() for table in tables(found)[1:])
    return f"""\
# A training at real size

```
.venv/bin/python benchmarks/real_size.py --data DIR
```

`DIR` holds `shakespeare.txt`. {sentence(described)} Every run has one thread.

A GPT of {weights / 1e6:.1f} M weights (width {training.width}, layers: {training.layers}, tied head) trains on
Shakespeare in {training.vocabulary:,} byte pairs: {training.steps} steps of {training.batch * training.context} tokens
with AdamW, a linear warm-up and half a cosine. The last {HELD_OUT:.0%} of the text are held out.

- **{UNDISTURBED}**: nothing but `torch.save` and fsync after every {training.every} steps.
- **{ANOTHER}**: other weights at the start and another order of the data, without checkpoints. It shows what chance
  does.
- **`{DEFAULT}`**, **`{FINE}`**: a `Checkpointer` with that `quality` saves every {training.every} steps in the
  background. Its metric is `LossOn` with {training.metric} held-out batches, each {training.batch} × {training.context}
  tokens. The process is killed (SIGKILL) after steps {", ".join(map(str, plan.kills_of(DEFAULT)))}. A new process goes
  on from the newest checkpoint with the same batches.

The loss at the end is that on the whole held-out text, in nats per token. *Worse* compares it with the undisturbed run
(negative is better).

{ends(found).in_markdown()}

![losses, differences from the undisturbed run, sizes](real_size.png)

## In words

{in_words(found)}

{shown}

*CPU in all* is that of all threads until the checkpoint is on the disk, less that of the training steps in this time.
*Evaluations* counts those on all batches of the metric. *Peak* is the resident memory of the process. Files that are
restored or loaded are in the system's page cache.
"""


def in_words(found: Found) -> str:
    """Return the results in words, one paragraph."""
    parts = []
    for name, run in _qualities(found).items():
        repeated, kills = sum(one.repeated for one in run.restores), len(run.restores)
        parts.append(
            f"`{name}` stores all checkpoints in {found[UNDISTURBED].stored / run.stored:.1f} times fewer bytes than "
            f"`torch.save`. After {kills} kills, which cost {repeated} steps, it ends {worse(found, name):+.2%} worse "
            f"than the undisturbed run. Its first {same_losses(found, name)} losses are the same bit for bit."
        )
    if ANOTHER in found:
        parts.append(f"Another seed ends {worse(found, ANOTHER):+.2%} worse.")
    parts.append("A restore reads all files from the last keyframe on, so it takes longer the more there are.")
    busy = {name: factor for name, run in found.items() if (factor := slowed(run)) > BUSY}
    if busy:
        factors = ", ".join(f"{_label(name)} {factor:.2f}" for name, factor in busy.items())
        parts.append(
            f"Other programs ran on the same core during some runs: a step took more than its CPU seconds ({factors} "
            "times as long, median). Compare CPU seconds there rather than wall time."
        )
    return " ".join(parts)


def slowed(run: Run) -> float:
    """Return how many times its CPU seconds a step takes in wall time (median)."""
    return float(median(line["seconds"] / line["cpu"] for line in run.of("step")))


def same_losses(found: Found, name: str) -> int:
    """Return how many steps at the beginning have the same loss as in the undisturbed run, bit for bit."""
    pairs = zip(found[name].losses, found[UNDISTURBED].losses, strict=True)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
