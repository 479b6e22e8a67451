"""Finds which tensors have changed since the last checkpoint, without reading all of them."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.tensors.dtypes import bytes_of
from dynaquant.engine.tensors.hashing import tensor_hash

log = logging.getLogger("dynaquant")

SAMPLE = 1024
"""Number of values of a tensor, roughly, that are compared to find changes."""
HASH_AFTER = 16
"""Checkpoints after which even a tensor that seems unchanged is hashed. PyTorch does not count writes through ``.data``
or by other programs."""


def sample_of(tensor: Tensor) -> bytes:
    """Return the bytes of about ``SAMPLE`` values, evenly spaced. If they differ, the tensor has changed."""
    return bytes_of(_sampled(tensor)).tobytes()


def samples_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return ``sample_of`` each tensor. Those of a device cross together."""
    found: dict[str, bytes] = {}
    on_devices: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = b""  # in the order of the tensors
        if tensor.device.type == "cpu":
            found[name] = sample_of(tensor)
        else:
            on_devices[name] = _sampled(tensor)
    crossed = kernels.small_on_host(on_devices)
    return found | {name: bytes_of(values).tobytes() for name, values in crossed.items()}


def _sampled(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    sampled = flat[:: max(1, flat.numel() // SAMPLE)]
    return sampled if tensor.is_contiguous() else sampled.clone()  # a view would keep the copy that ``reshape`` made


@dataclass
class _Hashed:
    """A tensor and its hash. version: PyTorch's count of writes at that time. used: how often the hash was reused."""

    memory: tuple[Any, ...]
    version: int
    sample: bytes
    hash: str
    used: int


class HashCache:
    """Hashes of tensors that rarely change. A tensor is hashed again only if its values may have changed.

    A tensor counts as unchanged while its memory, its version counter and a sample of its values stay the same. After
    ``HASH_AFTER`` checkpoints it is hashed in any case. If it has changed then, PyTorch did not count a write, and a
    warning is logged.
    """

    def __init__(self) -> None:
        self._hashed: dict[str, _Hashed] = {}
        self._unreliable: set[str] = set()  # tensors whose version counter has missed a write

    def of(self, name: str, tensor: Tensor, always_read: bool = False) -> str:
        """Return ``tensor_hash(tensor)``. always_read: hash all values, even if they seem unchanged."""
        memory = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        version, sample = version_of(tensor), sample_of(tensor)
        known = self._hashed.get(name)
        alike = known is not None and (known.memory, known.version, known.sample) == (memory, version, sample)
        if known is not None and alike and not always_read and known.used < HASH_AFTER and name not in self._unreliable:
            known.used += 1
            return known.hash
        digest = tensor_hash(tensor)
        if known is not None and alike and digest != known.hash:
            self._unreliable.add(name)
            log.warning(
                "%s does not train, but a write that PyTorch did not count (through .data or by another program) has "
                "changed it: some of the last %d checkpoints may hold its earlier values; write under torch.no_grad()",
                name,
                HASH_AFTER,
            )
        if version is not None:
            # Tensors start at different counts, so that they are not all hashed again at the same checkpoint.
            used = zlib.crc32(name.encode(errors="surrogatepass")) % HASH_AFTER if known is None else 0
            self._hashed[name] = _Hashed(memory, version, sample, digest, used)
        return digest


def version_of(tensor: Tensor) -> int | None:
    """Return PyTorch's count of writes to a tensor; None for tensors of inference mode, which have no counter."""
    return None if tensor.is_inference() else tensor._version
