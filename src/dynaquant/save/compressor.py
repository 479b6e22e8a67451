"""What each tensor of a state is stored as, decided at every save: weights by search, moments by tolerance, exact."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from dynaquant import kernels
from dynaquant.coding.encoder import Coder
from dynaquant.errors import StateError
from dynaquant.quantize.grid import GridConfiguration
from dynaquant.quantize.grid_weights import GridWeights, grid_weights
from dynaquant.quantize.kmeans_weights import KMeansWeights, kmeans_weights
from dynaquant.quantize.knobs import Knobs, Method
from dynaquant.quantize.moments import quantize_moments
from dynaquant.quantize.partition import Configuration
from dynaquant.save.presets import PRESETS, QualityName
from dynaquant.search.decision import Decision
from dynaquant.search.distortion import mean_squared_gradients
from dynaquant.search.manager import ConfigurationManager
from dynaquant.search.quality import Evaluate
from dynaquant.state.roles import Label, quantizable, untrained
from dynaquant.state.wrappers import named_parameters
from dynaquant.store.container import Header
from dynaquant.tensors.codebook import Grid
from dynaquant.tensors.dequantize import dequantize
from dynaquant.tensors.hashing import tensor_hash
from dynaquant.tensors.stored import External, Quantized, QuantizedTensor, RoundedWeight, StoredTensor, omitted
from dynaquant.training.changes import HashCache, sample_of
from dynaquant.training.gradients import GradientRecorder, moving_average, sum_of_squares
from dynaquant.training.master_weights import master_weights_of
from dynaquant.training.objects import models_of
from dynaquant.training.ranks import Group

GRADIENT_WINDOW = 50
"""Optimizer steps before a checkpoint whose gradients are recorded (method 1.1)."""


@dataclass(frozen=True)
class Allowance:
    """How much a checkpoint may lose, and in which way: the arguments of those names of ``Checkpointer``.

    Raises ValueError for what does not go together, TypeError for what is no configuration.
    """

    quality: QualityName
    method: Method | None
    max_degradation: float | None
    configuration: Knobs | None

    def __post_init__(self) -> None:
        if self.quality not in PRESETS:
            raise ValueError(f"quality must be one of {', '.join(PRESETS)}, not {self.quality!r}")
        if not isinstance(self.configuration, Knobs | None):
            raise TypeError(f"configuration must be a Configuration or a GridConfiguration, not {self.configuration!r}")
        if self.configuration is not None and self.max_degradation is not None:
            raise ValueError("a configuration that is given is not searched for: leave out it or max_degradation")
        if self.quality == "lossless" and (self.max_degradation, self.configuration, self.method) != (None, None, None):
            raise ValueError("a lossless checkpoint has no max_degradation, no method and no configuration")
        if self.method is not None and self.method not in get_args(Method):
            raise ValueError(f"method must be one of {', '.join(get_args(Method))}, not {self.method!r}")
        if self.method is not None and self.method not in self._fitting:
            raise ValueError(f"{type(self.configuration).__name__} is no configuration of method {self.method!r}")

    @property
    def _fitting(self) -> tuple[Method, ...]:
        if self.configuration is None:
            return get_args(Method)
        return ("grid",) if isinstance(self.configuration, GridConfiguration) else ("published", "kmeans")

    @property
    def chosen(self) -> Method:
        """The method; that of the configuration where none was named."""
        return self.method or ("grid" if self.configuration is None else self._fitting[0])


@dataclass(frozen=True)
class Compressed:
    """The tensors of a state as they are to be stored, by name (on rank 0), their labels, and how it was decided.

    lossless_copy: the exact tensors, if a lossless copy is kept. frozen: names of parameters that do not train.
    weights: what ``Compressor.saved`` remembers.
    """

    tensors: dict[str, StoredTensor]
    lossless_copy: dict[str, StoredTensor] | None
    frozen: frozenset[str]
    labels: dict[str, Label]
    decision: Decision
    notes: list[str]
    weights: dict[str, _Last]


@dataclass(frozen=True)
class _Last:
    """A weight of the last checkpoint, and what is known of the values it was made of: a sample, and their hash.

    A tensor of which it is known that it has not changed since is not quantized again, so that its values stay what
    they were. The hash is not taken of weights that change from save to save: it is known of frozen ones, after a
    restore, and once a sample was as before, so that weights that rest only now are quantized once more.
    """

    quantized: QuantizedTensor
    sample: bytes | None
    hash: str | None

    def may_be(self, sample: bytes) -> bool:
        """Whether values with that sample may be the same ones."""
        return self.sample is None or self.sample == sample


class Compressor:
    """Goes from the tensors of a state to what is stored of them, from one checkpoint to the next.

    objects: those whose state it is, among them the model. patterns: over names of tensors of which the user
    has decided what they are. keep_lossless_copy: whether to hand out the exact tensors, too. interval: steps to the
    first save, where known. Collective, like everything that takes a group.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        patterns: Collection[str],
        evaluate: Evaluate | None,
        higher_is_better: bool,
        loss: Allowance,
        keep_lossless_copy: bool,
        group: Group,
        interval: int | None,
    ) -> None:
        self._objects, self._patterns, self._group = objects, patterns, group
        self._model = models_of(objects)
        self._optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        self._preset = PRESETS[loss.quality]
        self._keep_lossless_copy = keep_lossless_copy
        self.method = loss.chosen
        most = self._preset.max_degradation if self._preset else 0.0
        self.manager = ConfigurationManager(self._model, evaluate, higher_is_better, most, loss.configuration, group)
        self._fixed = loss.configuration is not None or self._preset is None
        if loss.max_degradation is not None:
            self.max_degradation = loss.max_degradation
        asked = evaluate is None, higher_is_better, loss
        if any(other != asked for other in group.all_gather(asked)):
            raise ValueError(
                "evaluate, higher_is_better, max_degradation, quality, method and configuration must agree on all ranks"
            )
        self.vectors = self.method == "grid"
        """Whether parameters of one dimension are quantized, too: they weigh where everything else is small."""
        self._last: dict[str, _Last] = {}  # weights of the last checkpoint, by name
        self.hashes = HashCache()
        """Of tensors that do not train."""
        self._quantized_for = self.max_degradation
        self._restored_step = 0
        self._recorders: list[GradientRecorder] = []
        if self._uses_gradients(loss.configuration):
            parameters = {
                f"model.{name}": parameter
                for name, parameter in named_parameters(self._model)
                if quantizable(parameter, self.vectors)
            }
            record = sum_of_squares if self.method == "grid" else moving_average
            for optimizer in self._optimizers:
                self._recorders.append(GradientRecorder(parameters, optimizer, GRADIENT_WINDOW, interval, record))

    def _uses_gradients(self, configuration: Knobs | None) -> bool:
        if isinstance(configuration, Configuration):
            return configuration.uses_sensitivity
        return self._preset is not None

    @property
    def max_degradation(self) -> float:
        """The largest relative loss of quality that one checkpoint may cause."""
        return self.manager.max_degradation

    @max_degradation.setter
    def max_degradation(self, value: float) -> None:
        if self._fixed:
            raise ValueError("this Checkpointer is lossless or was given a configuration; nothing is searched for")
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < float("inf"):
            raise ValueError(f"max_degradation must be a number from 0 on, e.g. 0.01, not {value!r}")
        self.manager.max_degradation = float(value)

    @property
    def coder(self) -> Coder:
        """Of the levels of weights."""
        return "rearranged" if self.method == "published" else "conditional"

    def expect(self, interval: int | None) -> None:
        """The next save comes after so many steps, as far as is known."""
        for recorder in self._recorders:
            recorder.expect(interval)

    def close(self) -> None:
        """Takes hooks off the optimizer. Safe to call again, also where it was interrupted."""
        for recorder in self._recorders:
            recorder.close()

    def resume(self, header: Header, tensors: Mapping[str, StoredTensor], from_lossless_copy: bool) -> None:
        """Goes on from a checkpoint that was restored. from_lossless_copy: whether from its lossless copy."""
        self._last = {}
        for name, stored in tensors.items():
            if header.by_name[name].label.role == "weight":
                source, origin = (
                    (stored.master_name, stored.master) if isinstance(stored, RoundedWeight) else (name, stored)
                )
                if isinstance(origin, QuantizedTensor):
                    self._last[name] = _Last(origin, None, header.by_name[source].hash)
        self._quantized_for = self.max_degradation
        self._restored_step = header.step
        restored = {} if from_lossless_copy else {name: last.quantized for name, last in self._last.items()}
        self.manager.resume(header.record, restored)
        for recorder in self._recorders:
            recorder.forget()

    def compress(
        self,
        tensors: Mapping[str, Tensor],
        label_of: Mapping[str, Label],
        before: Mapping[str, str],
        held: Mapping[str, External],
        seconds: dict[str, float],
    ) -> Compressed:
        """What to store. tensors, label_of: of the whole state, by name. before: hashes of the tensors of the
        checkpoint before. held: its tensors that were omitted or lie in a file of the run. Adds to seconds by stage.

        ``saved`` is to be called once it is sure to be written.
        """
        start = time.perf_counter()
        at_rest = untrained(self._objects)
        exact_at_rest = {name for name in at_rest if name in tensors and label_of[name].role == "exact"}
        hash_of = {n: self.hashes.of(n, tensors[n]) for n in exact_at_rest if n in before}
        # What has changed although it does not train, as an average of weights, may change again.
        frozen = frozenset(n for n in exact_at_rest if hash_of.get(n) == before.get(n))
        external: dict[str, External] = {n: held[n] for n in frozen if n in held and held[n].file is not None}
        external.update(self._group.run_on_all_ranks(lambda: self._omitted(tensors, label_of, held)))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in external}
        tensors = {n: t if t.device.type in ("cpu", "cuda") else t.cpu() for n, t in tensors.items()}
        gradients = {name: kept for recorder in self._recorders for name, kept in recorder.recorded.items()}
        master_of = master_weights_of(tensors, label_of, self._objects, self._patterns)
        weights = {name: tensors[master_of.get(name, name)] for name in tensors if label_of[name].role == "weight"}
        if self.max_degradation < self._quantized_for:  # what was good enough then need not be now
            self._last = {}
        samples = {name: sample_of(tensor) for name, tensor in weights.items()} if self._preset else {}
        alike = {name for name, last in self._last.items() if name in samples and last.may_be(samples[name])}
        hashes = {name: self.hashes.of(name, weights[name]) for name in samples if name in at_rest}
        hashes.update({name: tensor_hash(weights[name]) for name in alike if name not in at_rest})
        unchanged = {n: last.quantized for n, last in self._last.items() if n in hashes and last.hash == hashes[n]}
        seconds["capture"] += time.perf_counter() - start

        start = time.perf_counter()
        changed = {name: tensor for name, tensor in weights.items() if name not in unchanged}
        decision, notes = self._decide(changed, unchanged, label_of, gradients)
        notes += self._note_on_idle(exact_at_rest)
        quantized = {} if decision.configuration is None else {**decision.quantized, **unchanged}
        seconds["search"] += time.perf_counter() - start

        start = time.perf_counter()
        stored, lossless_copy = self._group.run_on_all_ranks(
            lambda: self._stored(tensors, label_of, quantized, master_of, external)
        )
        last = {n: _Last(tensor, samples[n], hashes.get(n)) for n, tensor in quantized.items()}
        labels = {**label_of, **{master: label_of[name] for name, master in master_of.items()}}
        seconds["capture"] += time.perf_counter() - start
        return Compressed(stored, lossless_copy, frozen, labels, decision, notes, last)

    def _omitted(
        self, tensors: Mapping[str, Tensor], label_of: Mapping[str, Label], held: Mapping[str, External]
    ) -> dict[str, External]:
        """The tensors that are not to be stored. Raises StateError for one that has changed, as it would be lost."""
        found = {}
        for name in (name for name, label in label_of.items() if label.role == "omit"):
            digest = self.hashes.of(name, tensors[name])
            if name in held and held[name].file is None and held[name].hash != digest:
                raise StateError(
                    f"{name} is not stored (role 'omit'), and has changed since the last checkpoint: a restore could "
                    f"not bring it back, so nothing was saved; store it, with {name!r}: 'exact' as the last role"
                )
            found[name] = omitted(name, tensors[name].dtype, tensors[name].shape, digest)
        return found

    def _stored(
        self,
        tensors: Mapping[str, Tensor],
        label_of: Mapping[str, Label],
        quantized: Mapping[str, QuantizedTensor],
        master_of: Mapping[str, str],
        external: Mapping[str, External],
    ) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor] | None]:
        """What rank 0 is to write, and the tensors as they were if they are kept; nothing on other ranks."""
        if self._group.rank > 0:
            return {}, None
        small: dict[str, Quantized] = {**quantized, **self._moments(tensors, label_of)}
        small.update({master: small.pop(name) for name, master in master_of.items() if name in small})
        stored: dict[str, StoredTensor] = {
            n: small[n] if n in small else _copy(t) for n, t in tensors.items() if n not in master_of
        }
        stored.update({n: _rounded(tensors[n].dtype, stored[m], m) for n, m in master_of.items()})
        stored.update(external)
        stored = {name: stored[name] for name in label_of if name in stored}  # in the order of the state
        if not self._keep_lossless_copy:
            return stored, None
        kept = {n: known if isinstance(known := stored[n], Tensor) else _copy(t) for n, t in tensors.items()}
        return stored, {
            **kept,
            **{n: RoundedWeight(tensors[n].dtype, kept[m], m) for n, m in master_of.items()},
            **external,
        }

    def saved(self, compressed: Compressed, interval: int | None) -> None:
        """Goes on from what was compressed last: it is sure to be written. interval: steps to the next save."""
        self._last = compressed.weights
        self._quantized_for = self.max_degradation
        for recorder in self._recorders:
            recorder.collect()
        self.expect(interval)

    def _note_on_idle(self, at_rest: Collection[str]) -> list[str]:
        """What a user might not expect: parameters that could train are stored exactly."""
        idle = [n for n, p in named_parameters(self._model) if p.requires_grad and f"model.{n}" in at_rest]
        if not idle or self._preset is None:
            return []
        return [f"{len(idle)} parameters are in no optimizer and therefore stored exactly, such as model.{idle[0]}"]

    def _decide(
        self,
        weights: Mapping[str, Tensor],
        unchanged: Mapping[str, QuantizedTensor],
        label_of: Mapping[str, Label],
        gradients: Mapping[str, Tensor],
    ) -> tuple[Decision, list[str]]:
        if self._preset is None:
            return Decision("lossless", None), []
        parameters = {f"model.{name}": parameter for name, parameter in named_parameters(self._model)}

        def measured() -> dict[str, float]:
            # Where there are master copies, the optimizer knows only these.
            trained = {_place(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
            known = {n: trained.get(_place(t), parameters[n]) for n, t in weights.items() if n in parameters}
            # Sums of squares on the grid; averages of whole gradients otherwise.
            squares = gradients if self.method == "grid" else {n: g.square().mean() for n, g in gradients.items()}
            return mean_squared_gradients(known, self._optimizers, {n: float(s) for n, s in squares.items()})

        fisher: dict[str, float] = {}
        if self.method == "grid" or self.manager.judges_by_distortion:
            # What decides has to be the same on every rank.
            fisher = self._group.from_rank_0(self._group.run_on_all_ranks(measured))
        ready = self._group.run_on_all_ranks(lambda: self._ready(weights, label_of, gradients, fisher))
        if isinstance(ready, GridWeights):
            agreed, squares = self._group.from_rank_0((ready.fisher, ready.squares))
            ready = replace(ready, fisher=agreed, squares=squares)
        notes = list(ready.notes)
        if self.method != "grid" and self._recorders and ready.weights and not gradients:
            notes.append("no gradients were recorded before this save: magnitude stood in for sensitivity")
        known = {n.removeprefix("model."): partial(dequantize, q) for n, q in unchanged.items() if n in parameters}
        return self.manager.decide(ready, known, fisher), notes

    def _ready(
        self,
        weights: Mapping[str, Tensor],
        label_of: Mapping[str, Label],
        gradients: Mapping[str, Tensor],
        fisher: Mapping[str, float],
    ) -> KMeansWeights | GridWeights:
        """What the quantizer needs to know of the weights ahead of all configurations."""
        if self.method != "grid":
            return kmeans_weights(weights, label_of, gradients)
        books = {name: last.quantized.codebook for name, last in self._last.items()}
        before = {name: book.rung for name, book in books.items() if isinstance(book, Grid)}
        return grid_weights(weights, fisher, before, self._restored_step)

    def _moments(self, tensors: Mapping[str, Tensor], label_of: Mapping[str, Label]) -> dict[str, Quantized]:
        if self._preset is None or self.method != "grid":
            return {}
        return quantize_moments(tensors, label_of, self._preset.first_tolerance, self._preset.second_tolerance)


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Where a tensor lies. By its address alone, the first part of a tensor is that tensor."""
    return tensor.data_ptr(), tensor.shape


def _rounded(dtype: torch.dtype, master: StoredTensor, name: str) -> RoundedWeight:
    assert isinstance(master, QuantizedTensor | Tensor)
    return RoundedWeight(dtype, master, name)


def _copy(tensor: Tensor) -> Tensor:
    """A host copy that training cannot change any more."""
    return kernels.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())
