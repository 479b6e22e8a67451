"""A metric with adjustable strictness, for any model."""

from torch import nn


class Movement:
    """A metric: 1 for the weights in training, and higher (worse) for all others.

    The degradation is ``strictness`` times the squared error of the weights, relative to their squares. ``calls``
    counts evaluations.
    """

    def __init__(self, model: nn.Module, strictness: float) -> None:
        self.model, self.strictness = model, strictness
        self.calls = 0
        self.remember()

    def remember(self) -> None:
        """Use the current weights as those in training."""
        self.weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def moved(self, model: nn.Module) -> float:
        """Return the squared error of the weights, relative to their squares."""
        pairs = [(p - self.weights[name], self.weights[name]) for name, p in model.named_parameters()]
        squares = [(error.double().square().sum(), w.double().square().sum()) for error, w in pairs]
        return float(sum(error for error, _ in squares) / sum(w for _, w in squares))

    def __call__(self, model: nn.Module) -> float:
        self.calls += 1
        return 1 + self.strictness * self.moved(model)
