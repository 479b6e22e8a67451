"""Which tensors have not changed since the last checkpoint, found without reading all of them."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynaquant.coding.stream import bytes_of, tensor_hash

log = logging.getLogger("dynaquant")

SAMPLE = 1024
"""Values of a tensor, about, by which most changes are found."""
HASH_AFTER = 16
"""Checkpoints after which a tensor that seems unchanged is hashed all the same: writes through ``.data`` and by other
programs do not count as changes in PyTorch."""


def sample_of(tensor: Tensor) -> bytes:
    """Some of the values, spread evenly: where they differ, the tensor has changed."""
    flat = tensor.detach().reshape(-1)
    return bytes_of(flat[:: max(1, flat.numel() // SAMPLE)]).tobytes()


@dataclass
class _Seen:
    """A tensor as it was hashed: its memory, PyTorch's count of writes to it, a sample; how often the hash was used."""

    place: tuple[Any, ...]
    version: int
    sample: bytes
    hash: str
    used: int


class Hashes:
    """Hashes of tensors that hardly ever change, each taken again only where its values may have changed.

    A tensor counts as unchanged while it has the same memory, the same version counter and the same sample of values.
    Every ``HASH_AFTER`` times it is hashed all the same; what is found changed then was written behind PyTorch's
    back, and a warning says so.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._unreliable: set[str] = set()  # names of tensors whose version counter has missed a change

    def of(self, name: str, tensor: Tensor, anew: bool = False) -> str:
        """The hash of a tensor's dtype, shape and values, as ``coding.stream.tensor_hash`` has it.

        anew: whether all values are to be read, whatever is known.
        """
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        version, sample = _version_of(tensor), sample_of(tensor)
        seen = self._seen.get(name)
        alike = seen is not None and (seen.place, seen.version, seen.sample) == (place, version, sample)
        if seen is not None and alike and not anew and seen.used < HASH_AFTER and name not in self._unreliable:
            seen.used += 1
            return seen.hash
        digest = tensor_hash(tensor)
        if seen is not None and alike and digest != seen.hash:
            self._unreliable.add(name)
            log.warning(
                "%s does not train, but a write through .data or by another program has changed it unseen: some of the "
                "last %d checkpoints may hold its earlier values; write to it under torch.no_grad() instead",
                name,
                HASH_AFTER,
            )
        if version is not None:
            # Not all tensors are due at the same checkpoint.
            used = zlib.crc32(name.encode(errors="surrogatepass")) % HASH_AFTER if seen is None else 0
            self._seen[name] = _Seen(place, version, sample, digest, used)
        return digest


def _version_of(tensor: Tensor) -> int | None:
    """How often PyTorch has written to the memory of a tensor; None for those of inference mode, which do not count."""
    return None if tensor.is_inference() else tensor._version
