"""The formats that a checkpoint is exported to."""

from __future__ import annotations

from enum import StrEnum


class Target(StrEnum):
    """A format to export to.

    ``SAFETENSORS``, ``HF`` (a Hugging Face folder of safetensors files) and ``TORCH`` (``torch.save``) hold the model;
    ``TORCH_STATE`` (``torch.save``) and ``DCP`` (``torch.distributed.checkpoint``) hold the whole state.
    """

    SAFETENSORS = "safetensors"
    HF = "hf"
    TORCH = "torch"
    TORCH_STATE = "torch-state"
    DCP = "dcp"
