"""What one rank gets of a checkpoint whose ranks held different values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from dynaquant.engine.forms.stored import values_of
from dynaquant.restore.fitting import FittingState
from dynaquant.state.flatten import unflatten
from dynaquant.state.of_ranks import OfRank, is_of_a_rank, ranks_in, tree_of
from dynaquant.state.tree import dict_items, tensor_names_in
from dynaquant.state.wrappers import bare_paths
from dynaquant.store.container import Header
from dynaquant.store.reading import Tensors
from dynaquant.training.collect import number_of_ranks
from dynaquant.training.load_state import StatesOfRanks, divides_its_state
from dynaquant.training.objects import MAIN


class SeenByRank:
    """A checkpoint as one rank sees it: with what it held itself, and of all else what rank 0 held.

    Another number of ranks than at the save gets what rank 0 held; ``fit_number_of_ranks`` then says what cannot be
    restored. size: the present number of ranks. objects: of the training, by name. Raises TypeError for a malformed
    tree.
    """

    def __init__(self, header: Header, rank: int, size: int, objects: Mapping[str, Any]) -> None:
        self._tree, self._size, self._objects = header.tree, size, objects
        self._ranks = ranks_in(header.tree)
        fits = len(self._ranks) in (0, size)
        own = self._ranks[rank] if fits and self._ranks else OfRank()
        self._names = own.tensors
        self.tree = tree_of(header.tree, own)
        """The tree of this rank's state."""
        undivided = () if fits else self._ranks
        self._undivided = {name for each in undivided for name in each.tensors}
        self._changed = {key for each in undivided for key in each.objects}
        needed = {*own.tensors.values(), *self._names_of_divided(undivided)}
        if missing := needed - header.by_name.keys():
            raise TypeError(f"its tree names {min(missing)}, which is not there")
        self.left_out = {entry.name for entry in header.entries if is_of_a_rank(entry.name)} - needed
        """Stored names of the tensors that this rank does not need."""

    def tensors(self, decoded: Tensors) -> Tensors:
        """Return the tensors of this rank's state by name. decoded: by stored name."""
        common = {name: stored for name, stored in decoded.items() if not is_of_a_rank(name)}
        return {**common, **{name: decoded[stored] for name, stored in self._names.items()}}

    def hash_of(self, name: str, header: Header) -> str:
        """Return the stored hash of a tensor of this rank's state. header: of the file that its values come from."""
        return header.by_name[self._names.get(name, name)].hash

    def fit_number_of_ranks(
        self, fit: FittingState, selected: Collection[str], state: Mapping[str, Any], decoded: Tensors
    ) -> str:
        """Correct a comparison with objects if the number of ranks has changed since the save.

        Extras that can divide their state get the states of all ranks. What differed between ranks is left out, as a
        problem. The running statistics of batch norms are estimates of the same, so those of rank 0 are taken.

        selected: names of the objects to restore. state: what rank 0 held. decoded: by stored name. Returns what to do
        about what is left out, in words; nothing if all fits.
        """
        if (before := number_of_ranks(state)) == self._size:
            return ""
        others = len(fit.problems)
        for name in selected:
            if name not in fit.states:
                continue
            if divides_its_state(self._objects[name]):
                fit.states[name] = StatesOfRanks(self._states(name, decoded, before))
            else:
                self._leave_out_undivided(name, fit, before)
        if len(fit.problems) == others:
            return ""
        return (
            f"What differs between ranks can be restored on {before} ranks; to restore it on any number, make it the "
            "same on all ranks before a save, or give the extra load_state_of_ranks(states). "
        )

    def _leave_out_undivided(self, name: str, fit: FittingState, before: int) -> None:
        """Leave out of an object what differed between the ranks. before: how many there were."""
        thing, key = self._objects[name], name.partition(".")[0]
        changed = (key if key in MAIN else name) in self._changed
        own = sorted(other.removeprefix(f"{name}.") for other in self._undivided if other.startswith(f"{name}."))
        if isinstance(thing, nn.Module):
            known = _batch_statistics(thing)
            if statistics := [path for path in own if path in known]:
                own = [path for path in own if path not in known]
                fit.notes.append(
                    f"{name}.{statistics[0]} and other statistics of batch norms differed between ranks: all ranks get "
                    "those of rank 0, as the number of ranks has changed"
                )
        if not own and not changed:
            return
        what = f"{name}.{own[0]}" if own else name
        more = f" (like {len(own) - 1} others of {name})" if len(own) > 1 else ""
        now = f"{self._size} ranks" if self._size > 1 else "one process"
        fit.problems.append(f"{what}{more} differs between the {before} ranks that saved it, and cannot go to {now}")
        if isinstance(thing, nn.Module) and not changed:
            for path in own:
                fit.states[name].pop(path, None)
        else:
            del fit.states[name]

    def _names_of_divided(self, ranks: Iterable[OfRank]) -> Iterator[str]:
        """Yield the stored names of tensors that ranks held of extras with a divided state."""
        prefixes = tuple(f"{name}." for name, thing in self._objects.items() if divides_its_state(thing))
        for each in ranks:
            yield from (stored for name, stored in each.tensors.items() if name.startswith(prefixes))

    def _states(self, name: str, decoded: Tensors, before: int) -> Iterator[Any]:
        """Yield the states of an extra on all ranks that saved it. before: how many there were."""
        for each in self._ranks or [OfRank()] * before:
            node = dict(dict_items(tree_of(self._tree, each)))[name]
            stored = {inner: decoded[each.tensors.get(inner, inner)] for inner in tensor_names_in(node)}
            yield unflatten(node, {inner: values_of(tensor).clone() for inner, tensor in stored.items()})


def _batch_statistics(module: nn.Module) -> set[str]:
    """Return the names of the running statistics of all batch norms, in the bare model."""
    paths = bare_paths(module)
    return {
        f"{paths[path]}.{name}".removeprefix(".")
        for path, child in module.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
        for name in child._buffers
    }
