"""A metric that asks for as many bins as it is told to, whatever the model."""

from torch import nn


class Movement:
    """1 for the weights in training; any movement away from them makes it worse.

    The degradation is ``strictness`` times their squared movement, relative to their squares. calls: evaluations.
    """

    def __init__(self, model: nn.Module, strictness: float) -> None:
        self.model, self.strictness = model, strictness
        self.calls = 0
        self.remember()

    def remember(self) -> None:
        """The weights in training have changed."""
        self.weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def moved(self, model: nn.Module) -> float:
        of = [(p - self.weights[name], self.weights[name]) for name, p in model.named_parameters()]
        return float(sum(d.double().square().sum() for d, _ in of) / sum(w.double().square().sum() for _, w in of))

    def __call__(self, model: nn.Module) -> float:
        self.calls += 1
        return 1 + self.strictness * self.moved(model)
