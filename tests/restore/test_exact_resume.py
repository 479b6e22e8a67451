"""After an exact restore, training has the same losses for a hundred steps as without an interruption."""

import pytest
import torch
from torch import nn

import dynaquant as dq

STEPS = 100

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "Adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "SGD momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
}


class Training:
    """Objects with state: batch norm, dropout from the global generator, a scheduler, a shuffled data order."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 10))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.01, total_steps=400)
        self.order = torch.Generator().manual_seed(seed)

    def checkpointer(self, folder, **settings) -> dq.Checkpointer:
        extras = {"scheduler": self.scheduler, "order": self.order}
        return dq.Checkpointer(folder, self.model, self.optimizer, extras=extras, **settings)

    def losses(self, steps: int) -> list[float]:
        """Train for this many steps and return their losses."""
        losses = []
        for _ in range(steps):
            inputs = torch.randn(16, 20, generator=self.order)
            loss = nn.functional.cross_entropy(self.model(inputs), inputs[:, :10].argmax(1))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings", [{"quality": "lossless"}, {"keep": dq.Keep(lossless_copy=True)}], ids=["lossless", "exact latest"]
)
def test_losses_after_an_exact_restore_equal_those_without_an_interruption(tmp_path, settings, optimizer):
    training = Training(optimizer, seed=0)
    with training.checkpointer(tmp_path, **settings) as ckpt:
        for step in (1, 2):
            training.losses(20)
            ckpt.save(step)
    alone = training.losses(STEPS)

    restored = Training(optimizer, seed=1)
    with restored.checkpointer(tmp_path, **settings) as ckpt:
        assert ckpt.restore() == 2
    assert restored.losses(STEPS) == alone
    assert Training(optimizer, seed=1).losses(STEPS) != alone


def test_losses_differ_after_a_restore_of_quantized_values(tmp_path):
    training = Training("AdamW", seed=0)
    with training.checkpointer(tmp_path) as ckpt:
        training.losses(20)
        ckpt.save(1)
    alone = training.losses(STEPS)
    restored = Training("AdamW", seed=1)
    with restored.checkpointer(tmp_path) as ckpt:
        ckpt.restore()
    assert restored.losses(STEPS) != alone
