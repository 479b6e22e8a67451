"""``Gradients``: an extra that stores gradients, for saves in the middle of an accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import holds_unreduced_gradients, is_sharded
from dynaquant.state.wrappers import bare, named_parameters


class Gradients:
    """The gradients of a model as an extra: ``Checkpointer(…, extras={"gradients": dq.Gradients(model)})``.

    Without it, a save between two micro-batches loses what was accumulated. It takes as much space as the gradients,
    which are stored exactly, unless ``optimizer.zero_grad()`` has removed them. A restore gives each parameter the
    gradient that it had; parameters without one get none.

    model: a module, which may be wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise StateError(f"dq.Gradients needs a torch.nn.Module, not a {type(model).__qualname__}")
        self._model = model

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(named_parameters(bare(self._model)))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the gradients by the names of their parameters. Sparse ones become dense.

        Raises StateError if FSDP2 holds gradients that are not in the parameters yet.
        """
        if holds_unreduced_gradients(self._model):
            raise StateError(
                "FSDP2 holds gradients that it has not added up over the ranks, which dq.Gradients cannot store; save "
                "after a backward pass with set_requires_gradient_sync(True)"
            )
        gradients = {name: p.grad.detach() for name, p in self._parameters().items() if p.grad is not None}
        return {name: each.to_dense() if each.is_sparse else each for name, each in gradients.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the gradients. Raises StateError, before anything changes, if one does not fit its parameter."""
        parameters = self._parameters()
        for name, gradient in state.items():
            own = parameters.get(name)
            if own is None or own.shape != gradient.shape or own.dtype != gradient.dtype:
                has = "there is none" if own is None else f"the model has {own.dtype} {list(own.shape)}"
                raise StateError(f"the gradient of {name} is {gradient.dtype} {list(gradient.shape)}, but {has}")
        gradients = {name: _like(parameters[name], gradient) for name, gradient in state.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)


def _like(parameter: Tensor, gradient: Any) -> Tensor:
    """Return a gradient on the device of its parameter, and divided as that is."""
    if is_sharded(parameter) and not is_sharded(gradient):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (takes long to import)

        whole = gradient.to(parameter.device)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return gradient.to(parameter.device)  # type: ignore[no-any-return]
