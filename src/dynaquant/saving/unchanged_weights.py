"""Finds the weights that have not changed since the last checkpoint. They keep their levels.

If such a weight were quantized again, thresholds that depend on other weights could change its values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from dynaquant.engine.forms.form import StoredTensor
from dynaquant.engine.forms.levels import QuantizedTensor, levels_of
from dynaquant.engine.forms.stored import form_of, in_one, stored_hash
from dynaquant.engine.shards import WHOLE, Shards
from dynaquant.engine.tensors.hashing import tensor_hash
from dynaquant.engine.tensors.lazy_mapping import LazyMapping
from dynaquant.store.container import Header
from dynaquant.training.hash_cache import samples_of


@dataclass(frozen=True)
class LastWeight:
    """A weight as the last checkpoint stores it, with a sample and the hash of the values it was quantized from.

    sample: None after a restore. hash: None for a weight that changes from save to save, as hashing takes time. The
    hash is known for frozen weights, after a restore, and if the sample was the same as before. So a weight that stops
    changing is quantized once more.
    """

    quantized: QuantizedTensor
    sample: bytes | None
    hash: str | None


@dataclass(frozen=True)
class ComparedWeights:
    """The weights of a state, compared with those of the last checkpoint, by name.

    samples: of all weights. hashes: of the weights that were hashed. unchanged: weights with the same hash, as the last
    checkpoint stores them. changed: all others.
    """

    samples: Mapping[str, bytes]
    hashes: Mapping[str, str]
    unchanged: Mapping[str, QuantizedTensor]
    changed: Mapping[str, Tensor]

    def last_weights(self, stored: Mapping[str, StoredTensor]) -> dict[str, LastWeight]:
        """Return what the next save compares with. stored: at least the quantized weights of this save."""
        return {
            name: LastWeight(quantized, self.samples[name], self.hashes.get(name))
            for name, form in stored.items()
            if name in self.samples and (quantized := levels_of(form)) is not None
        }


def compare_weights(
    weights: Mapping[str, Tensor],
    last: Mapping[str, LastWeight],
    untrained: Collection[str],
    hash_of: Callable[[str], str],
    shards: Shards = WHOLE,
) -> ComparedWeights:
    """Compare weights with those of the last checkpoint. Collective with shards: no rank's part may have changed.

    untrained: names of parameters that do not train. hash_of: returns the hash of one of them. Other weights are hashed
    only if their sample is unchanged.
    """
    samples = samples_of(weights)
    hashed = {name: hash_of(name) for name in weights if name in untrained}
    for name, before in last.items():
        if name in samples and name not in hashed and before.sample in (None, samples[name]):
            hashed[name] = tensor_hash(weights[name])
    unchanged = {n: before.quantized for n, before in last.items() if n in hashed and before.hash == hashed[n]}
    if shards.divided:
        anywhere = shards.any({name: name not in unchanged for name in weights})
        unchanged = {name: quantized for name, quantized in unchanged.items() if not anywhere[name]}
    changed_names = [name for name in weights if name not in unchanged]
    changed = LazyMapping(changed_names, weights.__getitem__) if unchanged else weights
    return ComparedWeights(samples, hashed, unchanged, changed)


def restored_weights(header: Header, tensors: Mapping[str, StoredTensor]) -> dict[str, LastWeight]:
    """Return the quantized weights of a restored checkpoint. tensors: what was restored, by name."""
    found: dict[str, LastWeight] = {}
    for name, stored in tensors.items():
        if header.by_name[name].label.role != "weight":
            continue
        source, form = name, in_one(stored)
        if (other := form_of(stored).other) is not None:  # it is stored as its float32 master weight
            source, form = other
        if (quantized := levels_of(form)) is not None:
            entry = header.by_name[source]
            # The hash in the header is that of a whole tensor in one box.
            own = entry.scheme.layout_number is not None or entry.shape != quantized.shape
            found[name] = LastWeight(quantized, None, stored_hash(quantized) if own else entry.hash)
    return found
