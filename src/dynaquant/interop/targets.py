"""The formats that a checkpoint is exported to."""

from __future__ import annotations

from enum import StrEnum


class Target(StrEnum):
    """What to write.

    The model as safetensors, as a Hugging Face folder of safetensors files, or as ``torch.save`` writes it; the whole
    state as ``torch.save`` writes it, or as a folder of ``torch.distributed.checkpoint``.
    """

    SAFETENSORS = "safetensors"
    HF = "hf"
    TORCH = "torch"
    TORCH_STATE = "torch-state"
    DCP = "dcp"
