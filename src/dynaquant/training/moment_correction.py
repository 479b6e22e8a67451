"""Corrects the bias of first moments that a restore has set to zero, in the first steps after it (method 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dynaquant.ranks.dtensors import local_of
from dynaquant.training.first_moments import MomentRule, MomentUpdate, rule_of
from dynaquant.training.gradients import Scaling
from dynaquant.training.hooks import not_compiled, records_graph

log = logging.getLogger("dynaquant")

_LAST_FACTOR = 1.01
"""A correction ends with the first factor that is not larger: with β = 0.9 after 44 steps.

The corrected moment has the length of one that was never lost, so nothing jumps when the optimizer goes on alone.
"""


@dataclass(frozen=True)
class RebuiltMoment:
    """How much of one first moment has been built up again (method 3.2).

    kept: the sum of the weights of the gradients that it contains; ``1 - β^k`` for k steps after a moment of zero.
    whole: the same sum without a restore; ``1 - β^t`` at step t, so nearly 1. factor: by which it is multiplied now.
    """

    kept: float
    whole: float
    factor: float = 1.0

    def after_step(self, decay: float, largest: float) -> RebuiltMoment:
        """Return how much is built up after one more step. decay: β of this step. largest: the limit of the factor."""
        kept, whole = (decay * each + 1 - decay for each in (self.kept, self.whole))
        return RebuiltMoment(kept, whole, min(whole / kept, largest))


class MomentCorrection:
    """Corrects the first moments of one optimizer, until they are as long as if they had never been lost.

    Let S be the moment that the optimizer alone would build up after a restore, and c the factor of the correction.
    Before each step, a hook changes the moment so that the step itself makes c · S of it, and uses that in its update:

        m ← (c / c') · m + (c - 1) · gain / decay · g

    where c' is the factor of the step before, and g the gradient with coupled weight decay as this step uses it. All
    counting is per parameter: a step without a gradient does not count, nor does one that a ``GradScaler`` skips. If
    the step computes its gradients itself (a closure), the moment is changed right after that.

    The correction ends early if the optimizer loads another state, or if its step is captured in a CUDA graph, which
    would repeat one factor forever. A hook that has ended does nothing, but stays until ``close``: PyTorch goes through
    the hooks while they run, and they must not change meanwhile.

    dropped: the parameters whose moments a restore has set to zero.
    """

    def __init__(self, optimizer: Optimizer, rule: MomentRule, dropped: Set[Tensor]) -> None:
        self._rule = rule
        self._rebuilt = {
            parameter: RebuiltMoment(0.0, whole)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in dropped
            and (whole := _whole(optimizer.state.get(parameter, {}), rule.update(group).decay)) > 0
        }
        self.count = len(self._rebuilt)
        """The number of corrected moments."""
        self.given_up = False
        """Whether the correction ended because the step is captured in a CUDA graph."""
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(not_compiled(self._before_step)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._rebuilt.clear()),
        ]

    @property
    def active(self) -> bool:
        """Whether any moment is still to be corrected."""
        return bool(self._rebuilt)

    def close(self) -> None:
        """End the correction and remove the hooks. Must not be called by a hook of the optimizer."""
        self._rebuilt.clear()
        while self._hooks:
            self._hooks.pop().remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._rebuilt:
            return None
        if records_graph():
            self.given_up = True
            self._rebuilt.clear()
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._correct(optimizer)
            return None

        def corrected() -> Any:
            loss = closure()
            self._correct(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": corrected}
        return (args[0], corrected, *args[2:]), kwargs

    @torch.no_grad()
    def _correct(self, optimizer: Optimizer) -> None:
        """Change all moments that the coming step will update."""
        scaling = Scaling.of(optimizer)
        if scaling.found_inf is not None and float(scaling.found_inf) != 0:
            return
        unscale = 1.0 if scaling.scale is None else 1.0 / float(scaling.scale)
        for group in optimizer.param_groups:
            update = self._rule.update(group)
            same: dict[RebuiltMoment, list[tuple[Tensor, Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None or (rebuilt := self._rebuilt.get(parameter)) is None:
                    continue
                moment = optimizer.state.get(parameter, {}).get(self._rule.key)
                if not isinstance(moment, Tensor) or gradient.layout != torch.strided or not 0 < update.decay < 1:
                    del self._rebuilt[parameter]
                else:
                    same.setdefault(rebuilt, []).append((parameter, gradient, moment))
            for before, members in same.items():
                after = before.after_step(update.decay, self._rule.largest_factor)
                _change(members, before, after, update, unscale)
                for parameter, _, _ in members:
                    self._rebuilt[parameter] = after
                    if after.factor <= _LAST_FACTOR:
                        del self._rebuilt[parameter]


class MomentCorrections:
    """The corrections of all optimizers of one training.

    enabled: whether moments are corrected at all. advice: what keeps moments that cannot be corrected, for the notes;
    by default, a role of a ``Checkpointer``.
    """

    def __init__(self, enabled: bool = True, advice: str = "") -> None:
        self.enabled = enabled
        self._advice = advice
        self._corrections: dict[str, MomentCorrection] = {}
        self._notes: dict[str, str] = {}

    @property
    def count(self) -> int:
        """The number of first moments whose bias has been corrected since the last restore, or is being corrected."""
        return sum(correction.count for correction in self._corrections.values() if not correction.given_up)

    @property
    def active(self) -> bool:
        """Whether any moment is still to be corrected."""
        return any(correction.active for correction in self._corrections.values())

    @property
    def notes(self) -> list[str]:
        """Texts about moments that cannot be corrected, since the last save."""
        captured = [name for name, correction in self._corrections.items() if correction.given_up]
        what = "came back without its first moments, and they are not corrected, as a CUDA graph captured its step"
        return [*self._notes.values(), *(f"{name} {what}" for name in captured)]

    def begin(self, name: str, optimizer: Optimizer, dropped: Set[Tensor]) -> None:
        """Correct the moments of an optimizer that has just loaded a state, in place of an earlier correction.

        name: of the optimizer, for messages. dropped: as for ``MomentCorrection``. Nothing happens if it is empty.
        """
        if (before := self._corrections.pop(name, None)) is not None:
            before.close()
        self._notes.pop(name, None)
        if not dropped or not self.enabled:
            return
        if (rule := rule_of(optimizer)) is None:
            kind = type(optimizer)
            advice = self._advice or f"roles={{'{name}.*.exp_avg': 'exact'}} keeps them"
            self._notes[name] = (
                f"{name} came back without its first moments, and they are not corrected, as that cannot be done for "
                f"{kind.__module__}.{kind.__qualname__}; {advice}"
            )
        else:
            self._corrections[name] = MomentCorrection(optimizer, rule, dropped)

    def saved(self) -> None:
        """Forget the notes, which a record has now, and remove the hooks of corrections that have ended."""
        self._notes.clear()
        for name, correction in list(self._corrections.items()):
            if not correction.active:
                correction.close()
            if correction.given_up:
                del self._corrections[name]

    def close(self) -> None:
        """End all corrections and remove their hooks. May be called again, also after an interrupt."""
        for correction in self._corrections.values():
            correction.close()


def _change(
    members: Sequence[tuple[Tensor, Tensor, Tensor]],
    before: RebuiltMoment,
    after: RebuiltMoment,
    update: MomentUpdate,
    unscale: float,
) -> None:
    """Change moments of equal state. members: parameters, gradients and moments. unscale: factor of gradients."""
    # Of DTensors, what this rank holds of them: one list may have plain tensors, too.
    parameters, gradients, moments = ([local_of(each) for each in column] for column in zip(*members, strict=True))
    share = (after.factor - 1) * update.gain / update.decay
    torch._foreach_mul_(moments, after.factor / before.factor)
    torch._foreach_add_(moments, gradients, alpha=share * update.sign * unscale)
    if update.coupled:
        torch._foreach_add_(moments, parameters, alpha=share * update.coupled)


def _whole(state: Mapping[str, Any], decay: float) -> float:
    """Return the sum of the weights of all gradients in a moment without a restore; 1 if steps are not counted."""
    return 1 - decay ** float(state["step"]) if "step" in state else 1.0
