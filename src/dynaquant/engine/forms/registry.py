"""The registry of stored forms: for each kind of scheme, how its stream becomes a tensor."""

from __future__ import annotations

from torch import Tensor

from dynaquant.engine.forms import bounded, exact, levels, rank_one, rounded, schemes, units
from dynaquant.engine.forms.form import Coded, Decode, StoredTensor, stored_equal
from dynaquant.engine.forms.scheme import Scheme

DECODERS: dict[str, Decode] = {
    schemes.Raw.kind: exact.decode,
    schemes.BytePlanes.kind: exact.decode,
    schemes.Lossless.kind: exact.decode,
    schemes.Conditional.kind: levels.decode_conditional,
    schemes.Rearranged.kind: levels.decode_rearranged,
    schemes.RankOneFactors.kind: rank_one.decode,
    schemes.SecondMomentUnits.kind: units.decode,
    schemes.Bounded.kind: bounded.decode,
    schemes.RoundedFromMaster.kind: rounded.decode,
}
"""By kind. The kinds that are missing have no values in their file, and nothing to decode."""


def register(scheme: type[Scheme], decode: Decode) -> None:
    """Add a stored form, so that files with its scheme can be read.

    decode: makes the form of a stream. Raises ValueError if there is another scheme of this kind.
    """
    if scheme.kind in schemes.KINDS:
        raise ValueError(f"there is a scheme of the kind {scheme.kind!r} already")
    schemes.KINDS[scheme.kind] = scheme
    DECODERS[scheme.kind] = decode


def decode(scheme: Scheme, coded: Coded) -> StoredTensor:
    """Return the tensor of a stream that ``encode`` made.

    Raises ValueError if the stream is damaged, if parent or other do not fit, or if there is no stream.
    """
    if scheme.kind not in DECODERS:
        raise ValueError("its values are not in this file")
    return DECODERS[scheme.kind](scheme, coded)


def decodes_to(scheme: Scheme, coded: Coded, wanted: StoredTensor) -> bool:
    """Whether ``decode`` would return this stored tensor, bit for bit. Raises ValueError as ``decode`` does."""
    if isinstance(scheme, schemes.Lossless) and isinstance(wanted, Tensor):
        return exact.decodes_to(scheme, coded, wanted)
    return stored_equal(decode(scheme, coded), wanted)
