"""Assembles the form in which a checkpoint stores each tensor of a state, with what the next save needs to know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.external import External
from dynaquant.engine.forms.form import Form, StoredTensor
from dynaquant.engine.forms.rounded import RoundedWeight
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.saving.division import Division
from dynaquant.saving.memory import Memory
from dynaquant.saving.unchanged_weights import ComparedWeights
from dynaquant.search.decision import Decision


@dataclass(frozen=True)
class Assembled:
    """Tensors as a checkpoint stores them, by name. lossless_copy: the same, with some exactly, if it is kept.

    depends_on: of a state that is divided, the names of the tensors that others must be decoded after. On all ranks.
    """

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    lossless_copy: Mapping[str, StoredTensor] | None = None
    depends_on: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Compressed:
    """The tensors of a state as they are to be stored, and how that was decided.

    assembled: empty on ranks other than 0. division: among the ranks; None if rank 0 writes all. memory: of this
    save, as far as it depends on what is here. compared: of the weights with those of the last checkpoint.
    """

    assembled: Assembled
    division: Division | None
    labels: Mapping[str, Label]
    decision: Decision
    notes: list[str]
    memory: Memory
    compared: ComparedWeights

    @property
    def quantized_weights(self) -> set[str]:
        """The names of the weights that are stored as levels, as far as this rank knows."""
        if self.decision.configuration is None:
            return set()
        return {*self.compared.unchanged, *self.decision.quantized}

    def with_last_weights(self, stored: Mapping[str, StoredTensor]) -> Compressed:
        """Return the same with the quantized weights in the memory, for the next save. stored: at least those."""
        last = self.compared.last_weights(stored)
        return replace(self, memory=replace(self.memory, last_weights=last))


def assemble(
    live: Mapping[str, Tensor],
    quantized: Mapping[str, Form],
    master_of: Mapping[str, str],
    external: Mapping[str, External],
    names: Iterable[str],
    copied_exactly: Collection[str],
) -> Assembled:
    """Return the stored form of every tensor of a state. Live tensors are copied, so training may continue.

    live: the tensors whose values are stored. quantized: the quantized forms of some of them; all others are stored
    exactly. master_of: the names of master weights, by the names of their half-precision weights; a quantized
    half-precision weight is stored under the name of its master weight. external: tensors whose values are not stored.
    names: of all tensors, in the order of the state. copied_exactly: of those that a lossless copy has exactly; it has
    the others as they are stored. Without any, there is no copy.
    """
    quantized = dict(quantized)
    quantized.update({master: quantized.pop(name) for name, master in master_of.items() if name in quantized})
    own = [name for name in live if name not in master_of]  # a half-precision weight is its master weight, rounded

    def completed(forms: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        rounded = {name: RoundedWeight(live[name].dtype, forms[master], master) for name, master in master_of.items()}
        together = {**forms, **rounded, **external}
        return {name: together[name] for name in names if name in together}

    tensors = {name: quantized[name] if name in quantized else copied(live[name]) for name in own}
    if not copied_exactly:
        return Assembled(completed(tensors))
    exact = {
        name: copied(live[name]) if name in copied_exactly and name in quantized else form
        for name, form in tensors.items()
    }
    return Assembled(completed(tensors), completed(exact))


def assemble_on_access(
    tensors: Mapping[str, Tensor], quantized: Mapping[str, Form], names: Iterable[str], copied_exactly: Collection[str]
) -> Assembled:
    """Return the stored form of every tensor of a state, each made on access, and not kept.

    For a state that nothing changes meanwhile, and that may not fit into memory. For the arguments, see ``assemble``.
    """
    names = list(names)

    def form(name: str) -> StoredTensor:
        return quantized[name] if name in quantized else tensors[name]

    def exact(name: str) -> StoredTensor:
        return tensors[name] if name in copied_exactly else form(name)

    return Assembled(LazyMapping(names, form), LazyMapping(names, exact) if copied_exactly else None)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, in C order, which training cannot change."""
    if tensor.is_cpu and tensor.numel() == 1:  # most exact tensors are counts of steps
        return tensor.detach().clone()
    return kernels.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())
