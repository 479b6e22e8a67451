"""The default metric, the loss on a part of the evaluation set."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from accelerate.utils import broadcast_object_list, send_to_device

from dynaquant.search.evaluation import LossOn
from dynaquant.training import rng

BATCHES = 16
"""How many batches of the evaluation set the metric uses."""


def loss_on_evaluation_set(trainer: Any, loss_of: Callable[[Any, Any], Any]) -> LossOn | None:
    """Return the mean loss on the first batches of the evaluation set; None if the Trainer has none.

    Several evaluation sets have an equal share of the batches. All ranks get those of rank 0, so that all judge by the
    same data: all ranks must call this. Changes no random numbers.

    loss_of: returns the loss of a model on a batch.
    """
    datasets = trainer.eval_dataset
    if datasets is None:
        return None
    names = list(datasets) if isinstance(datasets, dict) else [None]
    before = rng.get_state()
    try:
        batches = [batch for name in names for batch in _first(trainer, name, max(1, BATCHES // len(names)))]
    finally:
        rng.set_state(before)
    if trainer.args.world_size > 1:
        batches = broadcast_object_list([batches])[0]
    return LossOn(batches, loss_of) if batches else None


def _first(trainer: Any, name: str | None, number: int) -> list[Any]:
    """Return the first batches of an evaluation set, on the CPU."""
    loader = trainer.get_eval_dataloader(name)
    # Accelerate's own iterator communicates, and counts as in use if it does not reach its end.
    plain = getattr(loader, "base_dataloader", loader)
    return [send_to_device(batch, "cpu") for batch in islice(plain, number)]
