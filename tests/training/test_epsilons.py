"""The ε of each parameter's updates, by the name of its optimizer state."""

import torch
from torch import nn

import dynaquant as dq
from dynaquant.training.collect import parameter_names
from dynaquant.training.optimizers import epsilons_of


def test_every_parameter_has_the_epsilon_of_its_group_if_that_is_a_number():
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    groups = [
        {"params": [model[0].weight]},
        {"params": [model[1].weight], "eps": 1e-6},
        {"params": [model[2].weight], "eps": (1e-30, 1e-3)},
    ]
    objects = {"model": model, "optimizer": torch.optim.Adam(groups), "other": torch.optim.SGD(model.parameters())}
    assert epsilons_of(objects, parameter_names(objects)) == {
        "optimizer.state.model.0.weight": 1e-8,
        "optimizer.state.model.1.weight": 1e-6,
    }


def test_a_dead_unit_does_not_make_checkpoints_larger(tmp_path):
    ratios = []
    for dead in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.5, 0.5))  # decays to 1e-45 in 150 steps
        with dq.Checkpointer(tmp_path / str(dead), model, optimizer, every=200) as checkpointer:
            for step in range(1, 201):
                if step == 10:
                    model[0].bias.data[:dead] = -100
                optimizer.zero_grad()
                inputs = torch.randn(32, 64)
                nn.functional.cross_entropy(model(inputs), (inputs[:, 0] > 0).long()).backward()
                optimizer.step()
            second = optimizer.state[model[0].weight]["exp_avg_sq"]
            assert bool((second[0].amax() < 1e-40) == bool(dead))
            ratios.append(checkpointer.save(200).result().ratio)
    assert ratios[1] > 0.95 * ratios[0]
