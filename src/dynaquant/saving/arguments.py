"""Checks what a ``Checkpointer`` is given: the metric, the first state, steps."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from blake3 import blake3

from dynaquant.engine.bound import Bound
from dynaquant.errors import StateError
from dynaquant.methods.named import METHODS
from dynaquant.options import Keep, Quality
from dynaquant.ranks.group import Group
from dynaquant.state.flatten import flatten
from dynaquant.state.roles import labels
from dynaquant.store.container import is_step
from dynaquant.training import supported
from dynaquant.training.collect import collect, parameter_names


def check_metric(evaluate: Any, quality: Quality, keep: Keep) -> None:
    """Raise TypeError unless the metric is a function or None, ValueError if it is missing for ``Keep(best=…)``."""
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function of the model, not {evaluate!r}")
    if keep.best is not None and (evaluate is None or quality.preset == "lossless"):
        raise ValueError(
            "Keep(best=…) needs a metric that every save evaluates: give evaluate, and a quality other than "
            "'lossless'; otherwise tag the best checkpoints, which retention keeps (Checkpointer.tag)"
        )


def check_for_shards(quality: Quality, keep: Keep, evaluate_average: Any) -> None:
    """Raise ValueError for what sharded training does not support."""
    if not METHODS[method := quality.chosen_method].supports_shards:
        raise ValueError(f'method="{method}" needs whole tensors; sharded training supports method="grid"')
    if keep.lossless_copy:
        raise ValueError(
            'Keep(lossless_copy=True) is not supported for sharded training; quality="lossless" stores all exactly'
        )
    if evaluate_average:
        raise ValueError(
            "evaluate_average is not supported for sharded training; without it, averages are stored as the preset says"
        )


def check_first_state(
    objects: Mapping[str, Any], roles: Mapping[str, str | Bound], vectors: bool, group: Group
) -> None:
    """Find mistakes now, not at the first save. Patterns for the optimizer come later: it has no state yet."""
    updated = {name: {path for each in names for path in each} for name, names in parameter_names(objects).items()}
    digest = blake3(repr({name: sorted(paths) for name, paths in updated.items()}).encode()).digest()
    given = group.all_gather((roles, list(objects), digest))
    if any(other != roles for other, _, _ in given):
        raise ValueError("roles must agree on all ranks")
    for rank, (_, names, _) in enumerate(given):
        if missing := [name for name in given[0][1] if name not in names]:
            raise StateError(
                f"rank {rank} has no {missing[0]!r}, which rank 0 has; give the same objects on all ranks (an empty "
                "dictionary will do)"
            )
    if any(other != given[0][2] for _, _, other in given):
        _refuse_other_parameters(group.all_gather(updated))
    early = {pattern: role for pattern, role in roles.items() if not pattern.startswith("optimizer.")}
    tensors = group.run_on_all_ranks(lambda: flatten(collect(objects))[1])
    supported.check_replicas(tensors, group)
    labels(tensors, objects, early, vectors)
    supported.warn_of_unsaved(objects, tensors)


def _refuse_other_parameters(updated: Sequence[Mapping[str, set[str]]]) -> None:
    """Raise StateError as the optimizers of the ranks differ. updated: of each rank, what each optimizer updates."""
    for rank, of_rank in enumerate(updated):
        for name, paths in of_rank.items():
            if different := sorted(paths ^ updated[0].get(name, set())):
                raise StateError(
                    f"{name} updates {different[0]} on rank {rank if different[0] in paths else 0}, but not on rank "
                    f"{0 if different[0] in paths else rank}, so no checkpoint could be restored; give all ranks the "
                    "same parameters to update. To divide an optimizer's state, shard the model (fully_shard)"
                )


def checked_step(step: Any) -> int:
    """Return a step as an integer. Raises ValueError if it is not one, or out of range."""
    if not hasattr(step, "__index__") or step < 0:
        raise ValueError(f"step must be an integer of at least 0, not {step!r}")
    number = operator.index(step)
    if not is_step(number):
        raise ValueError("step must be less than 2**63, the limit of the file format")
    return number
