"""Lossless resumes with every optimizer of ``pytorch_optimizer``, bit for bit: they keep states of many kinds."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from training import bits

import dynaquant as dq

package = pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
ALL = [n for n in package.get_supported_optimizers() if not package.load_optimizer(n).__module__.startswith("torch.")]
STEPS, TOGETHER = 3, 15
NOT_HERE = {
    "demo": "needs einops and several processes",
    "distributedmuon": "needs several processes",
    "lorarite": "takes pairs of low-rank matrices",
}
FUSED = ("adalomo", "lomo")  # they update within the backward pass
WITH_CLOSURE = ("SAM", "alig", "bsam")
SECOND_ORDER = ("adahessian", "sophiah")
IN_C_ORDER = ("adalomo", "adamp", "sgdp", "swats")
"""They view weights or gradients in another shape, which PyTorch refuses for other layouts."""
LOW_RANK = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}


class Net(nn.Module):
    def __init__(self, transposed):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.Sequential(
            nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.GELU(), nn.Linear(8, 11)
        )
        for layer in self.layers[::2] if transposed else ():
            layer.weight.data = layer.weight.data.t().contiguous().t()

    def forward(self, ids):
        return self.layers(self.embedding(ids).flatten(1))


def plain(name, model):
    """Return an optimizer with its defaults."""
    kind = package.load_optimizer(name)
    known = inspect.signature(kind).parameters
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    parameters = model if "model" in known else list(model.parameters())
    if name in ("adago", "adamuon", "muon", "muonclip", "normuon"):
        parameters = [{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}]
    if name == "spectralsphere":
        parameters = matrices
    return kind(parameters, **{key: 16 for key in ("num_data", "num_iterations") if key in known})


def low_rank(name, model):
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, **LOW_RANK, **({"scale_type": "tensor"} if name == "apollo" else {})}]
    return package.load_optimizer(name)([*groups, {"params": vectors}])


def around(name, model):
    return getattr(package, name)(torch.optim.AdamW(model.parameters(), lr=1e-3))


def sharpness_aware(model):
    return package.SAM(model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-3)


NEW = {
    **{name: partial(plain, name) for name in ALL if name not in NOT_HERE},
    **{f"{name} of low rank": partial(low_rank, name) for name in ("apollo", "conda", "fira", "galore", "sara")},
    **{name: partial(around, name) for name in ("Lookahead", "Magma", "OrthoGrad", "ScheduleFreeWrapper", "TRAC")},
    "SAM": sharpness_aware,
}


def training(name, seed):
    torch.manual_seed(seed)
    model = Net(transposed=name not in IN_C_ORDER)
    return model, NEW[name](model)


def train(name, model, optimizer, numbers):
    if callable(begin := getattr(optimizer, "train", None)) and (optimizer.state or name == "ScheduleFreeWrapper"):
        begin()
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        ids, wanted = torch.randint(0, 11, (8, 3), generator=generator).split([2, 1], 1)

        def loss(ids=ids, wanted=wanted[:, 0]):
            return nn.functional.cross_entropy(model(ids), wanted)

        def closure(loss=loss):
            with torch.enable_grad():
                optimizer.zero_grad()
                found = loss()
                found.backward(create_graph=name in SECOND_ORDER)
            return found

        if name in FUSED:
            optimizer.fused_backward(loss(), lr=1e-3)
        else:
            closure()
            optimizer.step(*([closure] if name in WITH_CLOSURE else []))
        for parameter in model.parameters():
            parameter.grad = None


def trainings(names, seed):
    """Return models and optimizers by name, of which one Checkpointer takes all: a save of each would take longer."""
    both = {name: training(name, seed) for name in names}
    return {name: model for name, (model, _) in both.items()}, {name: each for name, (_, each) in both.items()}


def train_all(models, optimizers, numbers):
    for name, optimizer in optimizers.items():
        train(name, models[name], optimizer, numbers)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("first", range(0, len(NEW), TOGETHER))
def test_a_lossless_resume_goes_on_bit_for_bit(tmp_path, first):
    names = list(NEW)[first : first + TOGETHER]
    whole = trainings(names, seed=0)
    train_all(*whole, range(STEPS))
    with dq.Checkpointer(tmp_path, *whole, quality="lossless") as ckpt:
        ckpt.save(STEPS)
    train_all(*whole, range(STEPS, 2 * STEPS))

    resumed = trainings(names, seed=1)
    with dq.Checkpointer(tmp_path, *resumed, quality="lossless") as ckpt:
        ckpt.restore()
    train_all(*resumed, range(STEPS, 2 * STEPS))
    for one, other in zip(resumed, whole, strict=True):
        assert [name for name in names if bits(one[name].state_dict()) != bits(other[name].state_dict())] == []
