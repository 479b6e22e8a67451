"""Tables and page of ``frameworks.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from integrations.byte_model import BATCH, LENGTH, OWN, SEARCH_BATCHES, VALIDATED
from integrations.runs import DEFAULT, FRAMEWORKS, LATEST, QUALITIES, Kind, Plan, Run
from results import Table, sentence

Found = Mapping[Kind, Run]
NAMES: dict[str, str] = {
    OWN: "the framework's own",
    **{quality: f'`"{quality}"`' for quality in QUALITIES},
    DEFAULT: f'`"{DEFAULT}"`, the default',
    VALIDATED: '`"balanced"`, `metric="val_loss"`',
}
"""Ways to save, as the page calls them."""
LOSSY = (DEFAULT, VALIDATED, "high")
"""Ways to save of trainings that are killed, beside lossless."""


@dataclass(frozen=True)
class Pair:
    """A training that was killed, and the same seed undisturbed."""

    seed: int
    killed: Run
    alone: Run

    @property
    def worse(self) -> float:
        """The loss at the end, less that of the undisturbed training."""
        return self.killed.ended.final - self.alone.ended.final


@dataclass(frozen=True)
class Ends:
    """Where the trainings of a framework end that were killed, with one way to save."""

    framework: str
    saving: str
    pairs: list[Pair]

    @property
    def name(self) -> str:
        return _title(self.framework) + (f", {NAMES[self.saving]}" if self.saving in (VALIDATED, "high") else "")

    @property
    def mean(self) -> float:
        return fmean(pair.worse for pair in self.pairs)

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN with one seed."""
        return _deviation([pair.worse for pair in self.pairs]) / sqrt(len(self.pairs))

    @property
    def spread(self) -> float:
        """The standard deviation of the undisturbed seeds; NaN with one."""
        return _deviation([pair.alone.ended.final for pair in self.pairs])

    @property
    def is_within(self) -> bool:
        """Whether the mean is no more above the undisturbed trainings than these are apart. One seed tells nothing."""
        return len(self.pairs) == 1 or self.mean <= self.spread


def _deviation(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else float("nan")


def _title(framework: str) -> str:
    return framework.capitalize()


def ends(found: Found, savings: tuple[str, ...]) -> list[Ends]:
    """Return the trainings that were killed, by framework and way to save."""
    made = []
    for saving in savings:
        for framework in FRAMEWORKS:
            pairs = [
                Pair(kind.seed, run, found[Kind(framework, OWN, kind.seed)])
                for kind, run in found.items()
                if (kind.framework, kind.saving, kind.killed) == (framework, saving, True)
            ]
            if pairs:
                made.append(Ends(framework, saving, pairs))
    return sorted(made, key=lambda one: FRAMEWORKS.index(one.framework))


def sizes(found: Found, title: str, size_of: Callable[[Run], float]) -> Table:
    """Return the sizes of checkpoints of undisturbed trainings of the first seed. size_of: in bytes."""
    rows = []
    for saving in (OWN, *QUALITIES, VALIDATED):
        cells = []
        for framework in FRAMEWORKS:
            run, own = found.get(Kind(framework, saving, 0)), found[Kind(framework, OWN, 0)]
            if run is None:
                cells.append("–")
            else:
                ratio = "" if saving == OWN else f", {size_of(own) / size_of(run):.1f}×"
                cells.append(f"{size_of(run) / 1e3:,.0f} kB{ratio}")
        rows.append([NAMES[saving], *cells])
    return Table(title, ["", *map(_title, FRAMEWORKS)], rows)


def tables_of_sizes(found: Found) -> list[Table]:
    """Return the sizes of the last checkpoint and of the mean one."""
    return [
        sizes(found, "The last checkpoint, and how many times smaller it is", lambda run: run.ended.last),
        sizes(found, "The mean of a training's checkpoints", lambda run: run.ended.total / run.ended.checkpoints),
    ]


def saving_changes_nothing(found: Found) -> Table:
    """Return how many trainings that dynaquant saves are those that the framework saves."""
    rows = []
    for framework in FRAMEWORKS:
        own = found[Kind(framework, OWN, 0)]
        others = [
            run
            for kind, run in found.items()
            if kind.framework == framework and kind.saving != OWN and not kind.killed and kind.seed == 0
        ]
        rows.append([_title(framework), *_same([(other, own) for other in others])])
    columns = ["", "trainings", "same weights at the end", "same logs", "same number of steps"]
    return Table("Undisturbed: dynaquant's saving beside the framework's own", columns, rows)


def lossless(found: Found) -> Table:
    """Return how many trainings that are killed end as undisturbed ones."""
    rows = [[one.name, *_same([(pair.killed, pair.alone) for pair in one.pairs])] for one in ends(found, ("lossless",))]
    columns = ["", "seeds", "same weights at the end", "same logs", "same number of steps"]
    return Table('Killed, `quality="lossless"`, beside the same seed undisturbed', columns, rows)


def _same(pairs: list[tuple[Run, Run]]) -> list[str]:
    """Return how many pairs there are, and in how many both runs have the same weights, logs and steps."""

    def told(same: list[bool]) -> str:
        return f"{sum(same)} of {len(same)}" if all(same) else f"**{sum(same)} of {len(same)}**"

    ended = [(one.ended, other.ended) for one, other in pairs]
    return [
        str(len(pairs)),
        told([one.weights == other.weights for one, other in ended]),
        told([one.history == other.history for one, other in ended]),
        told([one.steps == other.steps for one, other in ended]),
    ]


def lossy(found: Found) -> Table:
    """Return how far trainings that are killed end from undisturbed ones."""
    rows = [
        [
            one.name,
            str(len(one.pairs)),
            f"{fmean(pair.alone.ended.final for pair in one.pairs):.3f}",
            f"{one.mean:+.3f} ± {one.error:.3f}",
            f"{one.spread:.3f}",
            "–" if len(one.pairs) == 1 else "yes" if one.is_within else "**no**",
            _same([(pair.killed, pair.alone) for pair in one.pairs])[-1],
        ]
        for one in ends(found, LOSSY)
    ]
    columns = [
        "",
        "seeds",
        "loss, undisturbed",
        "killed − undisturbed",
        "seeds apart",
        "within",
        "same number of steps",
    ]
    return Table("Killed, the default quality where no other is named, beside the same seed undisturbed", columns, rows)


def each(found: Found) -> Table:
    """Return every training of the table ``lossy``."""
    rows = [
        [
            f"{one.name}, {pair.seed}",
            f"{pair.alone.ended.final:.4f}",
            f"{pair.killed.ended.final:.4f}",
            f"{pair.worse:+.4f}",
            ", ".join(str(attempt.last) for attempt in pair.killed.attempts[:-1]),
            ", ".join(str(attempt.first - 1) for attempt in pair.killed.attempts[1:]),
        ]
        for one in ends(found, LOSSY)
        for pair in one.pairs
    ]
    columns = ["framework, seed", "undisturbed", "killed", "difference", "killed at", "resumed from"]
    return Table("Each training", columns, rows)


def in_words(found: Found) -> str:
    """Return the table ``lossy`` in words."""
    made = ends(found, LOSSY)
    beyond = [one for one in made if not one.is_within]
    return f"Worse by more than the seeds are apart: {', '.join(one.name for one in beyond) or 'none'}."


def page(found: Found, plan: Plan, described: dict[str, str | int]) -> str:
    training = plan.training
    shown = "\n\n".join(table.in_markdown() for table in tables_of_sizes(found))
    return f"""\
# Frameworks

```
make benchmark-setup
.venv/bin/python benchmarks/frameworks.py --data DIR
```

`DIR` holds `shakespeare.txt`. {sentence(described)}

A byte-level Llama of {training.layers} layers, 0.9 M weights, with dropout, learns Shakespeare with AdamW for
{training.steps} steps of {BATCH} windows of {LENGTH} bytes, and is saved every {training.every} steps. An epoch has
{training.epoch} steps. Model, optimizer, schedule and data are the same in all three frameworks; each draws its own
order of the data. Lightning's data come from torchdata's `StatefulDataLoader`, and it saves after each validation. Each
training is a process of its own with one thread.

## How small are the checkpoints?

{shown}

Everything of a checkpoint counts: weights, both moments of AdamW, the schedule, random numbers, logs, and the small
files that stand for a step of the run. The mean is over {training.steps // training.every} checkpoints; the first is a
keyframe. Transformers measures checkpoints by its evaluation set, and Accelerate's training by the same
{SEARCH_BATCHES} batches. Lightning's has no metric by default, so an estimate decides; the last row has one.

## Does saving change the training?

{saving_changes_nothing(found).in_markdown()}

Weights are compared by their hash. Logs are the `log_history` of Transformers, the CSV files of Lightning's
`CSVLogger`, and the losses that Accelerate's training keeps.

## Does a killed training end the same?

Each training is killed {plan.kills} times by SIGKILL, at random steps and up to {LATEST} s after them, so that some
kills come during a save. The next process goes on in the framework's own way: `train(resume_from_checkpoint=True)`,
`load_state()`, `fit(ckpt_path="last")`. It is compared with a training of the same seed that is never killed and that
the framework itself saves.

{lossless(found).in_markdown()}

{lossy(found).in_markdown()}

The loss is in nats, on {training.final:,} windows of held-out text that no search has seen. Differences are of the
same seed, with the standard error of their mean; *seeds apart* is the standard deviation of the undisturbed seeds.
*within*: the mean is no more than that above the undisturbed trainings.

{in_words(found)}

{each(found).in_markdown()}

*killed at* is the last step of a process; *resumed from* is the step of the checkpoint that the next one restored.
"""
