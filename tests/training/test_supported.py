"""Objects that cannot be saved are refused with advice, before training begins or after the first step."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from pieces import in_pieces
from torch import nn
from training import model_of, train

import dynaquant as dq
from dynaquant.training import supported

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore"),  # sharding causes many warnings, e.g. about running on a CPU
]


def refused(folder, *objects, **options) -> str:
    """Return the error message of the constructor, and checks that it leaves no folder."""
    with pytest.raises(dq.StateError) as caught:
        dq.Checkpointer(folder / "run", *objects, **options)
    assert not (folder / "run").exists()
    return str(caught.value)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp_inside(model: nn.Module) -> nn.Module:
    model[1] = fsdp(model[1])
    return model


@pytest.mark.parametrize(
    ("shard", "where"),
    [
        (fsdp, "model: FullyShardedDataParallel is the first version of FSDP; shard it with FSDP2"),
        (fsdp_inside, "model.1: FullyShardedDataParallel is the first version of FSDP; shard it with FSDP2"),
    ],
    ids=["FSDP", "FSDP inside"],
)
def test_the_first_version_of_fsdp_is_refused_with_advice(tmp_path, shard, where):
    said = refused(tmp_path, shard(model_of()))
    assert said.startswith(where)
    assert said.endswith("or save with torch.distributed.checkpoint, through dynaquant.interop.dcp")


class KeysAreAttributes(dict):
    __getattr__ = dict.__getitem__


class KeysAreAttributesOrNone(dict):
    __getattr__ = dict.get


class AnythingIsNone:
    def __getattr__(self, name):
        return None


class AnythingFails:
    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize("kind", [KeysAreAttributes, KeysAreAttributesOrNone])
def test_a_dictionary_whose_keys_are_attributes_is_told_what_to_give_instead(tmp_path, kind):
    with pytest.raises(dq.StateError, match=f"progress: a value of type .*{kind.__name__} cannot be stored; make it"):
        dq.Checkpointer(tmp_path / "run", model_of(), extras={"progress": kind(epoch=1)})


@pytest.mark.parametrize("kind", [AnythingIsNone, AnythingFails])
def test_an_object_that_answers_for_every_attribute_is_no_optimizer_and_has_no_state(tmp_path, kind):
    said = refused(tmp_path, model_of(), extras={"other": kind()})
    assert said.startswith(f"other: {kind.__name__} has no state_dict() and load_state_dict(); wrap it in an object")


def test_a_sum_that_ranks_have_not_added_is_refused_by_name(tmp_path):
    from torch.distributed.tensor import DTensor, Partial

    model = model_of()
    mesh = dist.init_device_mesh("cpu", (1,))
    model[0].weight = nn.Parameter(DTensor.from_local(model[0].weight.detach(), mesh, [Partial()]))
    assert "model.0.weight: a DTensor with the placements (Partial(sum),) is a sum" in refused(tmp_path, model)


def test_a_plain_tensor_that_is_a_part_of_a_larger_one_is_refused_by_name(tmp_path):
    model = model_of()
    part = in_pieces(torch.randn(70, 24), [(0, 20), (40, 60)])
    model[0].weight = nn.Parameter(part)
    vars(model[0].weight).update(vars(part))  # PyTorch does not keep them
    said = refused(tmp_path, model)
    assert "model.0.weight: is a CheckpointableTensor, which holds parts of a larger tensor; shard it" in said
    assert said.endswith("through dynaquant.interop.dcp")


@pytest.mark.parametrize("shard", ["FSDP2", "DTensor"])
def test_sharded_models_of_one_rank_are_saved_and_restored(tmp_path, shard):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    def training():
        torch.manual_seed(0)
        model, mesh = model_of(), dist.init_device_mesh("cpu", (1,))
        model = fully_shard(model, mesh=mesh) if shard == "FSDP2" else distribute_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer

    def step(model, optimizer):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    model, optimizer = training()
    with dq.Checkpointer(tmp_path / "run", model, optimizer, quality="lossless") as ckpt:
        for number in (1, 2):
            step(model, optimizer)
            ckpt.save(number)
    other, its_optimizer = training()
    with dq.Checkpointer(tmp_path / "run", other, its_optimizer, quality="lossless") as ckpt:
        assert ckpt.restore() == 2
    for each, its_own in ((model, optimizer), (other, its_optimizer)):
        step(each, its_own)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)
    assert not list((tmp_path / "run").glob("parts/*"))


def test_an_optimizer_that_shards_its_state_is_refused(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = model_of()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    assert "use the optimizer that it wraps, on every rank" in refused(tmp_path, model, optimizer)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("fairscale.nn.data_parallel.sharded_ddp", "ShardedDataParallel"),
    ],
)
def test_sharding_engines_are_recognized_by_their_module(tmp_path, module, name):
    engine = type(name, (nn.Linear,), {"__module__": module})(2, 2)
    assert refused(tmp_path, engine).startswith(f"model: {name} shards the training; ")


def test_an_optimizer_that_was_not_initialised_is_refused(tmp_path):
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.param_groups, self.state, self.inner = inner.param_groups, {}, inner

    model = model_of()
    said = refused(tmp_path, model, Around(torch.optim.SGD(model.parameters())))
    assert "Around never called torch.optim.Optimizer.__init__; call it there, or give the optimizer" in said


class SharpnessAware(torch.optim.Optimizer):
    """Steps with an optimizer of its own, as the usual implementation of SAM does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.detach().clone()
        self.base_optimizer.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def sharpness_aware():
    torch.manual_seed(0)
    model = model_of()
    return model, SharpnessAware(model.parameters())


def test_an_optimizer_whose_state_is_in_no_state_dict_is_a_warning_and_a_note(tmp_path, caplog):
    model, optimizer = sharpness_aware()
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless") as ckpt:
        assert ckpt.save(0).result().notes == []
        for step in (1, 2):
            train(model, optimizer)
            (note,) = ckpt.save(step).result().notes
    assert note.startswith("the state of the SGD inside optimizer is not saved, as state_dict() of SharpnessAware does")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [note]


def test_an_inner_optimizer_that_is_given_before_the_outer_one_is_restored(tmp_path):
    trainings = []
    for _ in "12":
        model, optimizer = sharpness_aware()
        both = {"inner": optimizer.base_optimizer, "outer": optimizer}
        with dq.Checkpointer(tmp_path, model, both, quality="lossless") as ckpt:
            if ckpt.restore() is None:
                train(model, optimizer)
                assert ckpt.save(1).result().notes == []
        optimizer.param_groups[0]["lr"] = 0.01  # also that of the inner one
        torch.manual_seed(1)
        train(model, optimizer)
        trainings.append(model.state_dict())
    assert all(torch.equal(trainings[0][name], trainings[1][name]) for name in trainings[0])


class Codes(torch.Tensor):
    """A tensor subclass like those of quantized optimizers."""


class Quantized(torch.optim.SGD):
    """An optimizer that creates its state in the first step."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["codes"] = torch.zeros_like(parameter).as_subclass(Codes)


def test_a_state_of_tensor_subclasses_is_found_after_the_first_step(tmp_path):
    model = model_of()
    optimizer = Quantized(model.parameters(), lr=0.1)
    with dq.Checkpointer(tmp_path, model, optimizer):
        with pytest.raises(
            dq.StateError, match=r"optimizer\.state\..*Codes cannot be stored; wrap its owner, as an extra"
        ):
            train(model, optimizer)
        train(model, optimizer)  # the hook raises only once
    with pytest.raises(dq.StateError, match="Codes cannot be stored"):
        dq.Checkpointer(tmp_path, model, optimizer)


def test_the_hook_that_checks_the_first_step_is_removed_on_close(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless"):
        assert len(optimizer._optimizer_step_post_hooks) > 0
        train(model, optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 0


def test_only_the_first_step_is_checked(tmp_path, monkeypatch):
    model, checked = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with dq.Checkpointer(tmp_path, model, optimizer, quality="lossless"):
        monkeypatch.setattr(supported, "flatten", checked.append)
        for _ in range(3):
            train(model, optimizer)
    assert len(checked) == 1


def test_the_first_step_runs_the_hooks_of_others_too(tmp_path):
    """PyTorch raises RuntimeError if the hooks of an optimizer change while it runs them."""
    model, calls = model_of(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path / "a", model, optimizer), dq.Checkpointer(tmp_path / "b", model, optimizer):
        optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
        train(model, optimizer, 2)
    assert calls == ["hook", "hook"]


@dataclasses.dataclass(frozen=True)
class Frozen:
    epoch: int


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1, r"epoch is 1, a plain value.*give a dictionary.*extras=\{'progress': \{'epoch': 1\}\}"),
        ("x", r"epoch is 'x', a plain value.*\{'progress': \{'epoch': 'x'\}\}"),
        ((1, 2), r"epoch is \(1, 2\), a plain value"),
        (Frozen(1), "epoch: Frozen is frozen, so a restore could not set its fields"),
    ],
)
def test_plain_values_are_refused_with_advice_to_give_a_dictionary(tmp_path, value, said):
    with pytest.raises(dq.StateError, match=said):
        dq.Checkpointer(tmp_path, model_of(), extras={"epoch": value})
