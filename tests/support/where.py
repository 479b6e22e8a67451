"""Where trainings of the frameworks' tests run: on the CPU, or on this machine's accelerator if a variable says so.

    DYNAQUANT_TESTS_ON=accelerator pytest tests/integrations

Several ranks run on the CPU, as they may not share an accelerator.
"""

import os

import torch

_CHOSEN = os.environ.get("DYNAQUANT_TESTS_ON") == "accelerator"
if _CHOSEN:  # the same training must end the same twice
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a process that has asked CUDA may not fork trainings
    torch.use_deterministic_algorithms(True)


def on_cpu(ranks: int = 1) -> bool:
    """Whether a training runs on the CPU. ranks: of the training; a launcher's ``WORLD_SIZE`` counts if it is more."""
    return not _CHOSEN or max(ranks, int(os.environ.get("WORLD_SIZE", "1"))) > 1
