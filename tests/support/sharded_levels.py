"""Saves the same weights and moments in a layout. Run by ``launched``.

sharded_levels.py FOLDER LAYOUT
"""

import sys

import torch
from sharded_training import begin, end, folder, model_of
from torch.distributed.tensor import DTensor, distribute_tensor

import dynaquant as dq
from dynaquant.engine.quantize.knobs import GridConfiguration


def with_gradients(model, step):
    """Give each parameter a gradient that does not depend on the layout, so that weights do not, either."""
    for number, (_, parameter) in enumerate(model.named_parameters()):
        torch.manual_seed(1000 * step + number)
        whole = torch.randn(parameter.shape) * torch.rand(parameter.shape[-1:]).pow(4)
        if number % 3:  # its square has rank one
            whole = whole.sign() * torch.rand(parameter.shape[:1])[(...,) + (None,) * (parameter.ndim - 1)]
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole


def main(layout):
    begin()
    ways = {
        "searched": {"quality": "balanced", "every": 5},
        "high": {"quality": "high", "every": 5},
        "stochastic": {
            "quality": dq.Quality(configuration=GridConfiguration(-40, dithered=True)),
            "roles": {"*.words.weight": dq.Bound(relative=1e-3)},
        },
    }
    for name, way in ways.items():
        model = model_of(layout, width=40)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        with dq.Checkpointer(folder() / name, model, optimizer, **way) as ckpt:
            for step in (5, 10):
                with_gradients(model, step)
                optimizer.step()
                ckpt.save(step).result()
    end()


main(*sys.argv[2:])
