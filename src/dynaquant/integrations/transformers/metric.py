"""What measures a checkpoint: the loss on a part of the evaluation set, or another number of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from accelerate.utils import broadcast_object_list, recursively_apply, send_to_device
from torch import Tensor

from dynaquant.integrations.transformers.untouched import untouched
from dynaquant.search.evaluation import Evaluate, LossOn, called_by
from dynaquant.training import rng

log = logging.getLogger("dynaquant")
BATCHES = 16
"""How many batches of the evaluation set the metric uses."""
_PREFIX = "eval_"


def without_traces(trainer: Any, evaluate: Evaluate) -> Evaluate:
    """Return the same metric, but what it changes in a Trainer is put back (``untouched``)."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        with untouched(trainer):
            return function(*arguments)

    return called_by(call, evaluate)


def loss_on_evaluation_set(trainer: Any, loss_of: Callable[[Any, Any], Any]) -> LossOn | None:
    """Return the mean loss on the first batches of the evaluation set.

    None, and a warning, if the Trainer has no evaluation set, or if its loss says nothing about the model. All
    ranks must call this. Changes no random numbers.

    loss_of: returns the loss of a model on a batch.
    """
    if hasattr(trainer, "reward_funcs"):
        reason = f"the loss of {type(trainer).__name__} depends on answers that it samples, not on how good they are"
        advice = "dynaquant={'evaluate': 'reward'} measures them by the reward in evaluations"
    elif trainer.eval_dataset is None:
        reason = "the Trainer has no eval_dataset"
        advice = "give one, or a metric, dynaquant={'evaluate': …}"
    else:
        batches = [batch for part in _batches(trainer).values() for batch in part]
        return LossOn(batches, lambda model, batch: loss_of(model, _copied(batch))) if batches else None
    log.warning(
        "checkpoints are saved without a metric, as %s: an estimate from the weights' changes decides; %s, or "
        "{'evaluate': None} if this is meant",
        reason,
        advice,
    )
    return None


def number_of_evaluation(trainer: Any, name: str) -> Evaluate:
    """Return a metric: what ``trainer.evaluate()`` returns under a name, with or without ``eval_``.

    It is computed on the first batches of the evaluation set. All ranks must call this. Changes no random numbers.

    Raises ValueError if the Trainer has no evaluation set.
    """
    if trainer.eval_dataset is None:
        raise ValueError(f"dynaquant={{'evaluate': {name!r}}} needs an evaluation set: Trainer(…, eval_dataset=…)")
    key, batches = f"{_PREFIX}{name.removeprefix(_PREFIX)}", _batches(trainer)

    def evaluate(model: Any) -> float:  # noqa: ARG001  # the Trainer's own, which has the weights to be measured
        own = {name: list(map(_copied, part)) for name, part in batches.items()}
        trainer.get_eval_dataloader = lambda dataset=None: own[dataset if isinstance(dataset, str) else None]
        try:
            found = trainer.evaluate()
        finally:
            del trainer.get_eval_dataloader
        if key not in found:
            known = sorted(each.removeprefix(_PREFIX) for each in found)
            raise ValueError(
                f"trainer.evaluate() returns no {key!r}; dynaquant={{'evaluate': …}} may be one of {known}"
            )
        return float(found[key])

    return evaluate


def _copied(batch: Any) -> Any:
    """Return a copy of a batch: ``compute_loss`` may write to it, and the next evaluation must see the same data."""
    return recursively_apply(Tensor.clone, batch)


def higher_is_better(trainer: Any, name: str) -> bool:
    """Whether a number of the evaluation is better if it is higher, as Transformers decides it."""
    best = trainer.args.metric_for_best_model
    if best is not None and best.removeprefix(_PREFIX) == name.removeprefix(_PREFIX):
        return bool(trainer.args.greater_is_better)
    return not name.endswith("loss")


def _batches(trainer: Any) -> dict[str | None, list[Any]]:
    """Return the first batches of each evaluation set by its name; None for the only one.

    Several sets have an equal share of the batches. All ranks get those of rank 0, so that all judge by the same data.
    """
    datasets = trainer.eval_dataset
    names = list(datasets) if isinstance(datasets, dict) else [None]
    before = rng.get_state()
    try:
        batches = {name: _first(trainer, name, max(1, BATCHES // len(names))) for name in names}
    finally:
        rng.set_state(before)
    if trainer.args.world_size > 1:
        found: dict[str | None, list[Any]] = broadcast_object_list([batches])[0]
        return found
    return batches


def _first(trainer: Any, name: str | None, number: int) -> list[Any]:
    """Return the first batches of an evaluation set, on the CPU."""
    loader = trainer.get_eval_dataloader(name)
    # Accelerate's own iterator communicates, and counts as in use if it does not reach its end.
    plain = getattr(loader, "base_dataloader", loader)
    return [send_to_device(batch, "cpu") for batch in islice(plain, number)]
