"""The formats that a checkpoint is exported to."""

from __future__ import annotations

from enum import StrEnum


class Target(StrEnum):
    """A format to export to.

    ``SAFETENSORS``, ``HF`` (a Hugging Face folder of safetensors files) and ``TORCH`` (``torch.save``) hold the model;
    ``TORCH_STATE`` (``torch.save``) and ``DCP`` (``torch.distributed.checkpoint``) hold the whole state. The others are
    what a framework's own trainer resumes from (``OF_FRAMEWORKS``).
    """

    SAFETENSORS = "safetensors"
    HF = "hf"
    TORCH = "torch"
    TORCH_STATE = "torch-state"
    DCP = "dcp"
    TRANSFORMERS = "transformers"
    ACCELERATE = "accelerate"
    LIGHTNING = "lightning"


OF_FRAMEWORKS = (Target.TRANSFORMERS, Target.ACCELERATE, Target.LIGHTNING)
"""Formats of frameworks. Only a run that the framework's integration saved can be exported to one."""
