"""A wrapped training saves the same checkpoint as the bare one, and each restores the other's."""

import json
from pathlib import Path

import pytest
import torch
from launched import launch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from training import bits, model_of, train

import dynaquant as dq
from dynaquant.search.live_model import score
from dynaquant.state import wrappers

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # from TorchDynamo
]


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def with_wrapped_layers(module: nn.Module) -> nn.Module:
    module[1] = compiled(module[1])
    module[4] = checkpoint_wrapper(module[4])
    return module


WRAPPERS = {
    "bare": lambda m: m,
    "compile": compiled,
    "compile in place": compiled_in_place,
    "DataParallel": DataParallel,
    "DDP": DistributedDataParallel,
    "compile DDP": lambda m: compiled(DistributedDataParallel(m)),
    "DDP compile": lambda m: DistributedDataParallel(compiled(m)),
    "layers": with_wrapped_layers,
    "DDP layers": lambda m: DistributedDataParallel(with_wrapped_layers(m)),
}


def training(wrap, seed=0) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return the bare model, the wrapped model, and an optimizer of the wrapped model's parameters."""
    torch.manual_seed(seed)
    bare = model_of()
    model = wrap(bare)
    return bare, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def plain(bare: nn.Module) -> dict:
    return {name: bits(p) for name, p in zip(dict(model_of().named_parameters()), bare.parameters(), strict=True)}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_training_is_saved_evaluated_and_restored_like_the_bare_one(tmp_path, wrapper):
    def evaluate(model):
        assert model is bare
        return nn.functional.cross_entropy(model.eval()(torch.arange(40)), torch.arange(40)).item()

    states = {}
    for name in ("bare", wrapper):
        bare, model, optimizer = training(WRAPPERS[name])
        with dq.Checkpointer(tmp_path / name, model, optimizer, evaluate=evaluate) as ckpt:
            train(model, optimizer, 4)
            assert ckpt.save(4).result().quality.degradation <= 0.01
        states[name] = dq.load(tmp_path / name)
    assert list(states[wrapper]["model"]) == list(model_of().state_dict())
    assert bits(states[wrapper]) == bits(states["bare"])
    for saved, restored in (("bare", wrapper), (wrapper, "bare")):
        bare, model, optimizer = training(WRAPPERS[restored], seed=1)
        with dq.Checkpointer(tmp_path / saved, model, optimizer, evaluate=evaluate) as ckpt:
            assert ckpt.restore() == 4
        assert plain(bare) == {name: bits(tensor) for name, tensor in states[saved]["model"].items()}
        assert optimizer.state[next(bare.parameters())]["step"] == 4


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_load_into_a_wrapped_model(tmp_path, wrapper):
    bare, _, optimizer = training(WRAPPERS["bare"])
    with dq.Checkpointer(tmp_path, bare, optimizer, quality="lossless") as ckpt:
        ckpt.save(1)
    other, model, _ = training(WRAPPERS[wrapper], seed=1)
    dq.load_into(model, tmp_path)
    assert plain(other) == plain(bare)


@pytest.mark.parametrize("target", ["bare", "DataParallel", "compile"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_state_dict_of_a_wrapped_model_is_loaded_into_any(tmp_path, wrapper, target):
    bare, saved, _ = training(WRAPPERS[wrapper])
    dq.save({"model": saved.state_dict(), "epoch": 3}, tmp_path / "m.dqc", quality="lossless")
    other, model, _ = training(WRAPPERS[target], seed=1)
    assert dq.load_into(model, tmp_path / "m.dqc") == []
    assert plain(other) == plain(bare)


def test_a_name_that_two_stored_tensors_could_mean_is_left_alone(tmp_path):
    weights = {f"{prefix}weight": torch.ones(2, 2) for prefix in ("module.", "_orig_mod.")}
    dq.save(weights, tmp_path / "m.dqc", quality="lossless")
    with pytest.raises(dq.StateError, match=r"module\.weight is in the checkpoint, but not in the model"):
        dq.load_into(nn.Linear(2, 2, bias=False), tmp_path / "m.dqc")


@pytest.mark.parametrize("wrap", [compiled_in_place, with_wrapped_layers])
def test_a_compiled_module_is_evaluated_with_each_candidates_values(wrap):
    model, tokens = wrap(model_of()).eval(), torch.arange(40)
    with torch.no_grad():
        before = model(tokens)
        for value in range(12):  # more often than PyTorch recompiles
            values = {"4.weight": torch.full((40, 24), float(value)), "4.bias": torch.full((40,), 0.5)}
            other = model_of().eval()
            other.load_state_dict({**wrappers.state_dict(model), **values})
            found = score(model, values, lambda m: m(tokens).square().sum())
            assert found == pytest.approx(float(other(tokens).square().sum()))
        assert torch.equal(model(tokens), before)


def test_modules_that_only_look_like_wrappers_keep_their_names(tmp_path):
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    average = AveragedModel(compiled(model))
    with dq.Checkpointer(tmp_path, model, extras={"average": average}, quality="lossless") as ckpt:
        ckpt.save(1).result()
        state = dq.load(tmp_path)
        assert list(state["model"])[1] == "0.parametrizations.weight.original0"
        assert list(state["average"])[:2] == ["n_averaged", "module.0.bias"]
        average.update_parameters(model)
        assert ckpt.restore() == 1
    assert average.n_averaged == 0


def test_a_wrapper_with_its_own_parameters_is_part_of_the_model(tmp_path):
    class Scaled(DataParallel):
        def __init__(self, module):
            super().__init__(module)
            self.scale = nn.Parameter(torch.ones(1))

    with dq.Checkpointer(tmp_path, Scaled(nn.Linear(2, 2))) as ckpt:
        ckpt.save(1)
    assert list(dq.load(tmp_path)["model"]) == ["scale", "module.weight", "module.bias"]


def test_a_training_prepared_by_accelerate_is_saved_like_the_bare_one(tmp_path):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    def prepared(seed):
        bare, model, optimizer = training(WRAPPERS["compile"], seed)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        objects = Accelerator(cpu=True).prepare(model, optimizer, scheduler)
        assert isinstance(objects[1], AcceleratedOptimizer)
        assert isinstance(objects[2], AcceleratedScheduler)
        return bare, *objects

    bare, model, optimizer, scheduler = prepared(0)
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"scheduler": scheduler}, quality="high") as ckpt:
        train(model, optimizer, 3)
        assert ckpt.save(3).result().judged_by == "fisher distortion"
    for other, other_model, other_optimizer, other_scheduler in (prepared(1), plainly(1)):
        extras = {"scheduler": other_scheduler}
        with dq.Checkpointer(tmp_path, other_model, other_optimizer, extras=extras) as ckpt:
            assert ckpt.restore() == 3
        assert plain(other) == {name: bits(tensor) for name, tensor in dq.load(tmp_path)["model"].items()}
        assert other_optimizer.state[next(iter(other.parameters()))]["step"] == 3
    assert bare is not model


def test_a_training_prepared_by_fabric_is_saved_like_the_bare_one(tmp_path):
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricModule

    def prepared(seed):
        bare, model, optimizer = training(WRAPPERS["compile"], seed)
        model, optimizer = Fabric(accelerator="cpu").setup(model, optimizer)
        assert isinstance(model, _FabricModule)
        return bare, model, optimizer

    bare, model, optimizer = prepared(0)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="high") as ckpt:
        train(bare, optimizer, 3)
        record = ckpt.save(3).result()
    assert record.judged_by == "fisher distortion"
    assert {"weight", "first_moment", "second_moment"} <= record.roles.keys()
    assert not record.notes
    for other, other_model, other_optimizer in (prepared(1), plainly(1)[:3]):
        with dq.Checkpointer(tmp_path, other_model, other_optimizer) as ckpt:
            assert ckpt.restore() == 3
        assert plain(other) == {name: bits(tensor) for name, tensor in dq.load(tmp_path)["model"].items()}
        assert other_optimizer.state[next(iter(other.parameters()))]["step"] == 3


def test_an_optimizer_of_lightning_is_a_wrapper():
    from lightning.pytorch.core.optimizer import LightningOptimizer

    optimizer = torch.optim.AdamW([torch.ones(1)])
    assert wrappers.bare(LightningOptimizer(optimizer)) is optimizer


def test_a_note_says_that_a_state_dict_has_other_names_than_the_parameters(tmp_path, caplog):
    class Outside(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.inside = inside

        def forward(self, x):
            return self.inside(x)

        def state_dict(self, *args, **options):
            return self.inside.state_dict(*args, **options)

        def load_state_dict(self, state, **options):
            return self.inside.load_state_dict(state, **options)

    model = Outside(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        train(model, optimizer, 2)
        record = ckpt.save(2).result()
    (note,) = [note for note in record.notes if "other names" in note]
    assert note.startswith(
        "model.inside.0.weight and 6 other parameters train, but state_dict() gives them other names"
    )
    assert note in caplog.messages
    bare = model.inside
    with dq.Checkpointer(tmp_path / "bare", bare, torch.optim.AdamW(bare.parameters())) as ckpt:
        assert not [note for note in ckpt.save(2).result().notes if "other names" in note]


def test_a_subclass_of_accelerates_optimizer_is_a_wrapper_too():
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    class Own(AcceleratedOptimizer):
        pass

    Accelerator(cpu=True)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert wrappers.bare(Own(optimizer)) is optimizer


def plainly(seed):
    bare, model, optimizer = training(WRAPPERS["bare"], seed)
    return bare, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


@pytest.mark.slow
def test_two_ranks_save_and_restore_trainings_with_different_wrappers(tmp_path):
    status, output = launch(SUPPORT / "wrapped_replicas.py", 2, 150, tmp_path)
    assert status == 0, output
    for rank in (0, 1):
        report = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        said = report.pop("other shapes")
        assert said.startswith(
            "the model of rank 1 differs from that of rank 0 in names or shapes of tensors, as in pipeline"
        )
        assert report.pop("failed") == [5, True]
        assert report == {"DDP compile": [1, 2], "compile DDP": [2, 3], "DDP": [3, 4]}
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dq.Checkpointer(tmp_path / "run", model, optimizer) as ckpt:
        assert ckpt.restore() == 4
