"""How the optimizers of ``torch.optim`` update their first moments, and how far a restored one may be corrected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from dynaquant.training.optimizers import keys_of

Kept = Literal["coarse", "fine", "always"]
"""How a first moment may be kept, see ``MomentWindow``."""
LARGEST_FACTOR: Mapping[str, float] = {"exp_avg": 3.0, "momentum_buffer": 1.0}
"""By key of a first moment: the largest factor of its correction (method 3.2). 1 means no correction.

Without a limit, the first updates after a restore are single gradients at full length, which are mostly noise. An
update of SGD is the momentum buffer itself; no second moment bounds the noise.
"""


def corrected_keys() -> list[str]:
    """Return the keys of first moments that are corrected, in the state of a parameter."""
    return [key for key, largest in LARGEST_FACTOR.items() if largest > 1]


@dataclass(frozen=True)
class MomentUpdate:
    """How one step updates a first moment: ``m ← decay · m + gain · (sign · gradient + coupled · parameter)``.

    sign: -1 if the optimizer maximizes. coupled: the weight decay that is added to the gradient.
    """

    decay: float
    gain: float
    sign: float
    coupled: float


@dataclass(frozen=True)
class MomentRule:
    """The first moment of an optimizer. key: in the state of a parameter. update: of the moments of a group."""

    key: str
    update: Callable[[Mapping[str, Any]], MomentUpdate]
    kept: Kept = "coarse"

    @property
    def largest_factor(self) -> float:
        """The largest factor of a correction."""
        return LARGEST_FACTOR[self.key]


def rule_of(optimizer: Optimizer) -> MomentRule | None:
    """Return the rule of an optimizer; None if it has no first moment that can be corrected.

    These have none: subclasses, because their ``step`` may do something else; ``SparseAdam``, which updates only some
    rows of a moment in each step; ``RMSprop``, whose buffer contains gradients divided by the root of their squares;
    differentiable optimizers, whose moments are part of an autograd graph.
    """
    return None if optimizer.defaults.get("differentiable") else RULES.get(type(optimizer))


@dataclass(frozen=True)
class MomentWindow:
    """The steps of training that a first moment averages over. steps: ``1 / (1 - β)``. lost: by a restore without it.

    kept: "coarse" if even a coarse moment is better than none, "fine" if only a fine one is, "always" if a restore
    without it loses more than these steps. reach: how far an error of the moment displaces a weight until it is
    forgotten, as a multiple of the error; None if that depends on more than the learning rate. by_row: whether a step
    has gradients for some rows only.
    """

    steps: float
    lost: float
    kept: Kept
    reach: float | None = None
    by_row: bool = False


LOST_ANYWAY = 0.5
"""The share of its window that a training loses with a first moment that a restore corrects: from 0.2 to more than 1 in
the trainings measured. SGD's momentum is not corrected, and loses no more (docs/decisions.md, "How much does a restore
lose without first moments?")."""


def windows_of(
    objects: Mapping[str, Any], parameters: Mapping[str, Sequence[Sequence[str]]], corrected: bool
) -> dict[str, MomentWindow]:
    """Return the windows of first moments by the name of their tensor, as far as β is known.

    objects: of the training, by name. parameters: the names of every optimizer's parameters, by group. corrected:
    whether restores correct moments of zero.
    """
    windows: dict[str, MomentWindow] = {}
    by_row = _embeddings(objects)
    for name, names in parameters.items():
        rule = rule_of(objects[name])
        for group, keys in zip(objects[name].param_groups, keys_of(names), strict=True):
            slot, decay = _slot_and_decay(rule, group)
            if not 0 < decay < 1:
                continue
            steps = 1 / (1 - decay)
            share = LOST_ANYWAY if rule is not None and (corrected or rule.largest_factor <= 1) else 1.0
            kept: Kept = "coarse" if rule is None else rule.kept
            window = MomentWindow(steps, share * steps, kept, float(group["lr"]) * steps if kept == "fine" else None)
            for key, parameter in zip(keys, group["params"], strict=False):
                windows[f"{name}.state.{key}.{slot}"] = replace(window, by_row=id(parameter) in by_row)
    return windows


def _embeddings(objects: Mapping[str, Any]) -> set[int]:
    """Return the ``id`` of each weight of an embedding that no other kind of layer uses."""
    embeddings: set[int] = set()
    others: set[int] = set()
    for module in (module for thing in objects.values() if isinstance(thing, nn.Module) for module in thing.modules()):
        own = embeddings if isinstance(module, nn.Embedding | nn.EmbeddingBag) else others
        own.update(map(id, module.parameters(recurse=False)))
    return embeddings - others


def _slot_and_decay(rule: MomentRule | None, group: Mapping[str, Any]) -> tuple[str, float]:
    """Return the key of the first moments of a group, and their β; ``("", 0)`` if it is not known."""
    if rule is not None:
        return rule.key, rule.update(group).decay
    betas = group.get("betas")
    if isinstance(betas, Sequence) and betas and isinstance(betas[0], int | float):
        return "exp_avg", float(betas[0])
    return "", 0.0


def _average(group: Mapping[str, Any], coupled: float = 0.0) -> MomentUpdate:
    beta = float(group["betas"][0])
    return MomentUpdate(beta, 1 - beta, _sign(group), coupled)


def _adam(group: Mapping[str, Any]) -> MomentUpdate:
    return _average(group, 0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"]))


def _sgd(group: Mapping[str, Any]) -> MomentUpdate:
    decay, gain = float(group["momentum"]), 1 - float(group["dampening"])
    return MomentUpdate(decay, gain, _sign(group), float(group["weight_decay"]))


def _muon(group: Mapping[str, Any]) -> MomentUpdate:
    momentum = float(group["momentum"])
    return MomentUpdate(momentum, 1 - momentum, 1.0, 0.0)


def _sign(group: Mapping[str, Any]) -> float:
    return -1.0 if group.get("maximize") else 1.0


RULES: dict[type[Optimizer], MomentRule] = {
    torch.optim.Adam: MomentRule("exp_avg", _adam),
    torch.optim.AdamW: MomentRule("exp_avg", _average),
    torch.optim.NAdam: MomentRule("exp_avg", _adam),
    torch.optim.RAdam: MomentRule("exp_avg", _adam),
    torch.optim.Adamax: MomentRule("exp_avg", _adam),
    torch.optim.SGD: MomentRule("momentum_buffer", _sgd, kept="fine"),
}
"""The rules of the optimizers whose first moments are known."""
if hasattr(torch.optim, "Muon"):  # since PyTorch 2.9
    RULES[torch.optim.Muon] = MomentRule("momentum_buffer", _muon, kept="always")
