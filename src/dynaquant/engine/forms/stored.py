"""What is asked of any stored tensor: its values and hash, equality, its stream, and boxes of it."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from dynaquant.engine import kernels
from dynaquant.engine.forms.exact import Exact
from dynaquant.engine.forms.form import Form, StoredTensor, dequantize_into
from dynaquant.engine.forms.scheme import Coder, Scheme
from dynaquant.engine.tensors.box import Box


def form_of(stored: StoredTensor) -> Form:
    """Return the form of a stored tensor. That of a plain tensor is ``Exact``."""
    return Exact(stored) if isinstance(stored, Tensor) else stored


def values_of(stored: StoredTensor) -> Tensor:
    """Return the values that a restore returns. Raises CheckpointError if external values cannot be read."""
    return stored if isinstance(stored, Tensor) else stored.values()


def values_with_hash(stored: StoredTensor) -> tuple[Tensor, str]:
    """Return the values that a restore returns, and their ``tensor_hash``. Raises as both functions do."""
    return form_of(stored).values_with_digest()


def fill(target: Tensor, stored: StoredTensor) -> None:
    """Write the values of a stored tensor into a tensor. Where kernels run, they are computed in its memory.

    A device without memory for that gets them from the host.
    """
    if not isinstance(stored, Tensor) and not stored.external and kernels.fills(target.device):
        try:
            dequantize_into(target, stored)
        except torch.OutOfMemoryError:
            if target.device == kernels.HOST:
                raise
        else:
            return
    target.copy_(values_of(stored))


def stored_hash(stored: StoredTensor) -> str:
    """Return the ``tensor_hash`` of a stored tensor's values. Raises ValueError as ``dequantize`` does."""
    return form_of(stored).digest()


def can_refer_to(stored: StoredTensor, parent: StoredTensor | None, again: bool) -> bool:
    """Whether a tensor can be stored as a reference to the parent's, which has the same values.

    again: it is re-coded. Other files may depend on its levels, so the parent's must be the same.
    """
    form = form_of(stored)
    if form.external or (parent is not None and form_of(parent).external):  # a file of frozen parameters may be deleted
        return False
    return form.can_refer_to(parent, again)


def known_by(stored: StoredTensor, other: str) -> StoredTensor:
    """Return a tensor that is decoded from another one, by another name of that one; any other as it is."""
    form = form_of(stored)
    return stored if form.other is None else form.with_other(other, form.other[1])


def encode(stored: StoredTensor, parent: StoredTensor | None, coder: Coder = "conditional") -> tuple[Scheme, bytes]:
    """Return the scheme and the stream of a tensor. parent: the parent's tensor of the same name, if it has one."""
    return form_of(stored).encode(parent, coder)


def cut(stored: StoredTensor, box: Box) -> StoredTensor:
    """Return what a stored tensor holds of a box. It has the same values there and, if they fit together, levels.

    That changes no value: levels are absolute. Raises ValueError if the box does not lie in the tensor.
    """
    if not box.fits(stored.shape):
        raise ValueError(f"it has no box {box.offsets}, {box.sizes}")
    return in_one(stored) if box == Box.whole(stored.shape) else form_of(stored).cut(box)


@overload
def in_one(stored: StoredTensor) -> StoredTensor: ...
@overload
def in_one(stored: None) -> None: ...
def in_one(stored: StoredTensor | None) -> StoredTensor | None:
    """Return a tensor of boxes as one, and any other as it is. Only so can it be the parent of a tensor in one file."""
    return stored.in_one() if isinstance(stored, Form) else stored
