"""Frameworks' checkpoints keep the layout of weights and moments: a lossless resume goes on bit for bit."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import bits

KINDS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
STEPS = 3


def transposed():
    """Return a network whose convolution is in channels_last, and whose layer is the transpose of a matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 6)).to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    return model


def loss(model, step):
    generator = torch.Generator().manual_seed(step)
    images, classes = torch.randn(4, 3, 4, 4, generator=generator), torch.randint(0, 6, (4,), generator=generator)
    return nn.functional.cross_entropy(model(images), classes)


def states(model, optimizer):
    """Return the bits of weights and moments, and whether each moment lies in memory as its weight does."""
    moments = [(p, optimizer.state[p]) for p in model.parameters()]
    same = [value.stride() == p.stride() for p, state in moments for value in state.values() if value.shape == p.shape]
    return bits([list(model.parameters()), [state for _, state in moments]]), same


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate(tmp_path, kind):
    accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from dynaquant.integrations.accelerate import attach

    def trained(steps, resume=False):
        accelerator = accelerate.Accelerator(cpu=True)
        model = transposed()
        model, optimizer = accelerator.prepare(model, KINDS[kind](model.parameters()))
        checkpointer = attach(accelerator, tmp_path / "run", quality="lossless")
        if resume:
            accelerator.load_state(tmp_path / "folder")
        for step in steps:
            accelerator.backward(loss(model, step))
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS - 1:
                accelerator.save_state(tmp_path / "folder")
        checkpointer.close()
        for state in (AcceleratorState, GradientState, PartialState):  # Accelerate keeps one for a process
            state._reset_state()
        return states(model, optimizer.optimizer)

    wanted = trained(range(2 * STEPS))
    assert all(wanted[1])
    assert trained(range(STEPS, 2 * STEPS), resume=True) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_lightning(tmp_path, kind):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    from dynaquant.integrations.lightning import CheckpointIO, Training

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = transposed()

        def training_step(self, _):
            return loss(self.net, self.global_step)

        def configure_optimizers(self):
            return KINDS[kind](self.parameters())

    def trained(steps, resume=None):
        training = Training()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            plugins=[CheckpointIO("lossless", training=training)],
            callbacks=[training],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        module = Module()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, DataLoader(range(2 * STEPS)), ckpt_path=resume)
        return trainer, states(module.net, trainer.optimizers[0])

    _, wanted = trained(2 * STEPS)
    assert all(wanted[1])
    trainer, _ = trained(STEPS)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert trained(2 * STEPS, tmp_path / "last.ckpt")[1] == wanted
