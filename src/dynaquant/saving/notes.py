"""Notes for the record on what a checkpoint holds otherwise than its user might expect.

One is on weights that are infinite or NaN: the training has diverged, and needs an earlier checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dynaquant.engine import kernels
from dynaquant.engine.tensors.dtypes import QUANTIZABLE_DTYPES
from dynaquant.engine.tensors.strides import has_gaps
from dynaquant.ranks.group import Group
from dynaquant.saving.capture import Captured, FrozenParameters
from dynaquant.state.roles import matches, optimizer_role
from dynaquant.store.run import Run
from dynaquant.training.accumulated import Gradients
from dynaquant.training.objects import RNG, class_of, models_of, optimizers_of, parameters_of

log = logging.getLogger("dynaquant")


def notes_on_exact_tensors(
    captured: Captured,
    objects: Mapping[str, Any],
    patterns: Collection[str],
    frozen: FrozenParameters,
    master_weights: Collection[str],
) -> Iterator[str]:
    """Yield notes on tensors that are stored exactly where others like them are quantized.

    patterns: the user's, over names of tensors, which decide on what matches them. master_weights: their names.
    """
    yield from _on_parameters_without_optimizer(objects, frozen)
    yield from _on_moments(captured, objects, patterns)
    yield from _on_compared_gradients(captured)
    yield from _on_complex(captured, objects)
    # Frozen ones take no space in further checkpoints.
    yield from _on_copies(captured, objects, patterns, {*frozen.unchanged, *master_weights})


def notes_on_gaps(captured: Captured, objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if tensors cannot come back with the strides that they have. Modules keep their own memory."""
    left_out = (f"{RNG}.", *(f"{name}." for name, thing in objects.items() if isinstance(thing, nn.Module)))
    found = [name for name, tensor in captured.tensors.items() if not name.startswith(left_out) and has_gaps(tensor)]
    if found:
        more = f" and {len(found) - 1} other tensors" if len(found) > 1 else ""
        yield (
            f"{found[0]}{more} have gaps in memory, or elements that share it (views of other tensors): a restore "
            "gives them the same values in memory of their own, without gaps"
        )


def not_finite_weights(captured: Captured, quantized: Collection[str], group: Group) -> list[str]:
    """Return the names of the weights that have an infinite or NaN value on any rank. Collective.

    quantized: names of the weights that are stored as levels. All their values are finite, so they are not read again.
    """
    names = [name for name, label in captured.labels.items() if label.role == "weight" and name not in quantized]
    tensors = {name: captured.small_on_host[name] for name in names if name in captured.small_on_host}
    weights = {name: each for name, each in tensors.items() if each.dtype in QUANTIZABLE_DTYPES and each.numel()}
    found = group.all_gather(group.run_on_all_ranks(lambda: _not_finite(weights)))
    return sorted({name for names in found for name in names})


def _not_finite(weights: dict[str, Tensor]) -> list[str]:
    return [name for name, both in kernels.all_extremes(weights).items() if not all(map(math.isfinite, both))]


def note_on_not_finite(names: list[str], run: Run) -> str:
    """Return what a checkpoint with such weights means, and which one is better."""
    more = f" and {len(names) - 1} other weights have" if len(names) > 1 else " has"
    return f"{names[0]}{more} infinite or NaN values: unless they are meant, training has diverged. {_advice(run)}"


def warn_of_not_finite(step: int, run: Run) -> None:
    """Warn that the weights of a checkpoint that was restored are not finite."""
    log.warning(
        "step %d has infinite or NaN weights: unless they are meant, training had diverged. %s", step, _advice(run)
    )


def _advice(run: Run) -> str:
    finite = [summary.step for summary in run.summaries()[0] if summary.finite]
    if not finite:
        return "The run has no checkpoint with finite weights"
    return f"The newest checkpoint with finite weights is step {finite[-1]}: restore(step={finite[-1]})"


def _on_parameters_without_optimizer(objects: Mapping[str, Any], frozen: FrozenParameters) -> Iterator[str]:
    parameters = parameters_of(models_of(objects))
    if idle := [name for name, each in parameters.items() if each.requires_grad and name in frozen.names]:
        yield f"{len(idle)} parameters are in no optimizer and therefore stored exactly, such as {idle[0]}"


def _on_moments(captured: Captured, objects: Mapping[str, Any], patterns: Collection[str]) -> Iterator[str]:
    """Yield a note for every optimizer whose moments would be quantized if it were known."""
    for optimizer, reason in captured.exact_optimizers.items():
        names = [name for name in captured.tensors if name.startswith(f"{optimizer}.state.")]
        roles = {name: optimizer_role(name, captured.tensors) for name in names}
        moments = [name for name in names if roles[name] != "exact" and not _decided(name, patterns, objects)]
        if moments:
            pattern = f"{optimizer}.*.{moments[0].rpartition('.')[2]}"
            yield (
                f"the moments of {optimizer} are stored exactly, as {class_of(objects[optimizer])} may not use them as "
                f"Adam does: {reason}; roles={{{pattern!r}: {roles[moments[0]]!r}}} would quantize them"
            )


def _on_compared_gradients(captured: Captured) -> Iterator[str]:
    if exact := [name for name in sorted(captured.compared) if captured.labels[name].role == "exact"]:
        yield (
            "the optimizer compares each gradient with the last one, as LBFGS does, so the weights that it trains are "
            f"stored exactly, such as {exact[0]}: after a restore, rounding would pass for a curvature"
        )


def _on_complex(captured: Captured, objects: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if complex weights, and moments of their shape, are a tenth of the state or more."""
    weights = tuple(f"{name}." for name, thing in objects.items() if isinstance(thing, nn.Module))
    found = {name: tensor.nbytes for name, tensor in captured.tensors.items() if tensor.is_complex()}
    own = [name for name in found if name.startswith(weights)]
    if own and 10 * sum(found.values()) >= sum(tensor.nbytes for tensor in captured.tensors.values()):
        yield (
            f"complex weights and their moments are stored exactly, such as {own[0]}; a real parameter, of which the "
            "layer takes torch.view_as_complex when it is called, would be quantized"
        )


def _on_copies(
    captured: Captured, objects: Mapping[str, Any], patterns: Collection[str], uncounted: Collection[str]
) -> Iterator[str]:
    """Yield a note for each object if tensors of the shapes of weights are stored exactly and a tenth of the state.

    They may be an average of the user's own, a target network, or moments inside a wrapper of an optimizer. Stored
    gradients do not count, nor does what an optimizer itself keeps: `_on_moments` speaks of that.
    """
    tensors, labels = captured.tensors, captured.labels
    shapes = {tensors[name].shape for name, label in labels.items() if label.role == "weight"}
    gradients = (f"{name}." for name, thing in objects.items() if isinstance(thing, Gradients))
    left_out = ("model.", f"{RNG}.", *(f"{name}.state." for name in optimizers_of(objects)), *gradients)
    copies = [
        name
        for name, label in labels.items()
        if label.role == "exact"
        and not name.startswith(left_out)
        and tensors[name].shape in shapes
        and tensors[name].is_floating_point()
        and name not in uncounted
        and name not in captured.differences.names  # they have a note of their own
        and not _decided(name, patterns, objects)
    ]
    if 10 * sum(tensors[name].nbytes for name in copies) < sum(tensor.nbytes for tensor in tensors.values()):
        return
    for owner, of_owner in itertools.groupby(copies, key=lambda name: name.partition(".")[0]):
        first, *others = of_owner
        advice = f"if they are an average of weights or a target network, roles={{{f'{owner}.*'!r}: 'average'}}"
        if owner == "optimizer":
            advice = "if they are moments as Adam's, roles such as 'second_moment'"
        yield (
            f"{first} and {len(others)} more tensors with shapes of weights are stored exactly; {advice} would "
            "quantize them"
        )


def _decided(name: str, patterns: Collection[str], objects: Mapping[str, Any]) -> bool:
    return any(matches(name, pattern, objects) for pattern in patterns)
