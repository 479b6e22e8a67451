"""Finds which tensors have changed since the last checkpoint, without reading all of them."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynaquant.tensors.dtypes import bytes_of
from dynaquant.tensors.hashing import tensor_hash

log = logging.getLogger("dynaquant")

SAMPLE = 1024
"""Roughly how many values of a tensor are compared to find changes."""
HASH_AFTER = 16
"""Checkpoints after which even a tensor that seems unchanged is hashed. PyTorch does not count writes through ``.data``
and by other programs as changes."""


def sample_of(tensor: Tensor) -> bytes:
    """Returns some of the values, spread evenly. If they differ, the tensor has changed."""
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
    """Hashes of tensors that hardly ever change. A tensor is hashed again only if its values may have changed.

    A tensor counts as unchanged while its memory, its version counter and a sample of its values stay the same. After
    ``HASH_AFTER`` checkpoints it is hashed nevertheless. If it has changed then, PyTorch did not count the write, and a
    warning says so.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._unreliable: set[str] = set()  # names of tensors whose version counter has missed a change

    def of(self, name: str, tensor: Tensor, anew: bool = False) -> str:
        """Returns ``coding.stream.tensor_hash`` of a tensor. anew: whether to read all values, whatever is known."""
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
            # So that not all tensors are hashed at the same checkpoint.
            used = zlib.crc32(name.encode(errors="surrogatepass")) % HASH_AFTER if seen is None else 0
            self._seen[name] = _Seen(place, version, sample, digest, used)
        return digest


def _version_of(tensor: Tensor) -> int | None:
    """Returns PyTorch's count of writes to a tensor; None for tensors of inference mode, which have no counter."""
    return None if tensor.is_inference() else tensor._version
