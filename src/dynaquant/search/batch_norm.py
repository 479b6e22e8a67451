"""Evaluates models with batch norm by the statistics of the batches, as training does.

The running statistics of a batch norm belong to the weights in training. With quantized weights they are wrong, by more
than the quantization itself (docs/decisions.md, "What is wrong with batch norm?"). Training does not use them, and
brings them up to date within a few steps after a restore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def uses_batch_statistics(models: Sequence[nn.Module]) -> bool:
    """Whether ``evaluation_mode`` uses the statistics of batches for any layer."""
    return any(_layers(model) for model in models)


@contextmanager
def evaluation_mode(models: Sequence[nn.Module], batch_statistics: bool) -> Iterator[None]:
    """Put models into evaluation mode, and back into the mode of each layer at the end.

    batch_statistics: whether batch norms normalize by the statistics of each batch. Their running statistics stay as
    they are. Layers that a training keeps in evaluation mode use running statistics. So does ``SyncBatchNorm``, which
    would communicate between ranks.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    layers = [layer for model in models for layer in _layers(model)] if batch_statistics else []
    before = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    try:
        for model in models:
            model.eval()
        for layer in layers:
            layer.training, layer.momentum, layer.num_batches_tracked = True, 0.0, None
        yield
    finally:
        for layer, (momentum, tracked) in zip(layers, before, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, tracked
        for module, mode in modes:
            module.training = mode


def _layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norms that normalize by the statistics of batches while the model trains."""
    found = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    layers = [each for each in found if not isinstance(each, nn.SyncBatchNorm)]
    if model.training:
        return [each for each in layers if each.training]
    # The whole model is in evaluation mode, e.g. after a validation. A layer whose weights train is trained.
    return [each for each in layers if any(parameter.requires_grad for parameter in each.parameters())]
