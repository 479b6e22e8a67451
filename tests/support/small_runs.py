"""Small trainings with a Checkpointer: the objects, a run of several checkpoints, damage to a file."""

import pytest
import torch
from torch import Tensor, nn
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.store.container import CheckpointFile


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def training_of(seed: int = 0, optimizer=adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = model_of()
    return model, optimizer(model)


PUBLISHED = {"quality": dq.Quality(configuration=dq.Configuration())}
LOSSLESS = {"quality": "lossless"}

EVERY_WAY = pytest.mark.parametrize(
    "way", [{}, {"quality": dq.Quality(method="published")}, PUBLISHED], ids=["grid", "published", "fixed"]
)
FIXED = pytest.mark.parametrize(
    "configuration", [dq.GridConfiguration(-80), dq.Configuration()], ids=["grid", "published"]
)
WITH_EXACT_MOMENTS = pytest.mark.parametrize("way", [LOSSLESS, PUBLISHED], ids=["lossless", "published"])


def loss_of(model: nn.Module) -> float:
    """A metric: the loss on every token."""
    return nn.functional.cross_entropy(model.eval()(torch.arange(40)).float(), torch.arange(40)).item()


def saved(folder, steps, seed=0, **options) -> list[dict]:
    """Train and save. Returns the state of every step as the undamaged files hold it."""
    model, optimizer = training_of(seed)
    states = []
    with dq.Checkpointer(folder, model, optimizer, **options) as ckpt:
        for step in steps:
            train(model, optimizer)
            ckpt.save(step).result()
            states.append(bits(dq.load(folder, step)))
    return states


def damage(path) -> None:
    """Flip a bit at the end of the stream of the first tensor, in its coded levels."""
    content = bytearray(path.read_bytes())
    content[16 + CheckpointFile(path).header.entries[0].size - 20] ^= 1
    path.write_bytes(content)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
