"""Trainings on an accelerator: the one of this machine, and an emulated one.

On the emulated one, what a GPU would refuse fails, and what crosses between host and device is counted. It is
registered for a whole process, so these tests run in a process of their own.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynaquant as dq
from dynaquant.engine.kernels import device as device_kernels
from dynaquant.search.live_model import _TOO_SMALL
from dynaquant.store.run import Run
from dynaquant.training import rng
from dynaquant.training.gradients import Scaling, sums_of_squares

HERE = Path(__file__).parent
WIDTH = 512
if "emulated" in sys.modules:
    import emulated


def accelerator() -> str | None:
    """Return the type of the emulated device if there is one, otherwise of this machine's accelerator."""
    if "emulated" in sys.modules:
        return "emulated"
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return None if found is None else found.type


DEVICE = accelerator() or "none"
emulates = pytest.mark.skipif("emulated" not in sys.modules, reason="needs --emulated")
accelerates = pytest.mark.skipif(DEVICE == "none", reason="needs an accelerator, or --emulated")


@pytest.mark.slow
@pytest.mark.skipif("emulated" in sys.modules, reason="runs there already")
@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="PyTorch is too old for the emulated device")
def test_kernels_and_trainings_run_on_an_emulated_device():
    chosen = ["--emulated", "-k", "emulated or accelerator", "-p", "no:cacheprovider", "-p", "no:benchmark", str(HERE)]
    command = [sys.executable, "-m", "pytest", *chosen]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]


class Training:
    """A small training on a device."""

    def __init__(self, device: str, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        self.inputs, self.wanted = torch.randn(64, width).to(device), torch.randn(64, width).to(device)
        self.model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, foreach=False)  # the same on every device

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()
            self.optimizer.step()

    def loss(self, model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
        return (model(self.inputs[rows]) - self.wanted[rows]).square().mean()

    def metric(self, kind: str) -> dict[str, object]:
        if kind == "no metric":
            return {}
        if kind == "function":
            return {"evaluate": lambda model: self.loss(model).item()}
        return {"evaluate": dq.LossOn([slice(i, i + 8) for i in range(0, 64, 8)], self.loss)}


@emulates
def test_tensors_of_host_and_emulated_device_cannot_be_mixed_up():
    tensor = torch.ones(3, device="emulated")
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(3)
    with pytest.raises(TypeError, match="emulated"):
        tensor.numpy()


@accelerates
@pytest.mark.parametrize("metric", ["no metric", "function", "batches"])
@pytest.mark.parametrize("quality", ["balanced", "high", "small", "lossless", dq.Quality(method="published")], ids=str)
def test_a_training_on_an_accelerator_is_saved_and_restored(quality, metric, tmp_path):
    training = Training(DEVICE)
    with dq.Checkpointer(
        tmp_path, training.model, training.optimizer, quality=quality, **training.metric(metric)
    ) as checkpointer:
        for step in (1, 2, 3):
            training.step(4)
            assert checkpointer.save(step).result().step == step
        checkpointer.restore(2)
        loaded = dq.load(tmp_path, step=2)["model"]
        for name, parameter in training.model.named_parameters():
            assert parameter.device.type == DEVICE
            assert torch.equal(parameter.detach().cpu(), loaded[name])
        training.step()


@accelerates
def test_a_restore_sets_the_generator_of_the_accelerator(tmp_path):
    training, generators = Training(DEVICE), getattr(torch, DEVICE)
    generators.manual_seed_all(7)
    before = generators.get_rng_state()
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.step()
        checkpointer.save(1).result()
        generators.manual_seed_all(8)
        assert not torch.equal(generators.get_rng_state(), before)
        checkpointer.restore(1)
    assert torch.equal(generators.get_rng_state(), before)


@emulates
def test_states_of_generators_of_other_devices_than_the_emulated_one_are_ignored():
    before = rng.get_state()
    own = before[rng.ACCELERATORS]["emulated"]
    torch.emulated.set_rng_state(torch.Generator().manual_seed(9).get_state())
    changed = rng.get_state()
    assert not rng.same(before, changed)
    for others in ({}, {rng.ACCELERATORS: {"other": own}}):
        rng.set_state({key: value for key, value in before.items() if key != rng.ACCELERATORS} | others)
        assert rng.same(rng.get_state(), changed)
    rng.set_state(before | {rng.ACCELERATORS: {"emulated": [*own, torch.zeros(3)]}})  # a machine with two of them
    assert rng.same(rng.get_state(), before)
    with pytest.raises((TypeError, RuntimeError)):
        rng.check(before | {rng.ACCELERATORS: {"emulated": [torch.zeros(3, dtype=torch.uint8)]}})
    assert rng.same(rng.get_state(), before)


@emulates
def test_a_process_that_cannot_use_an_accelerator_after_a_fork_leaves_its_generators_alone(monkeypatch):
    before = rng.get_state()
    monkeypatch.setattr(torch.emulated, "_is_in_bad_fork", lambda: True)
    assert rng.ACCELERATORS not in rng.get_state()
    changed = torch.Generator().manual_seed(9).get_state()
    torch.emulated.set_rng_state(changed)
    rng.set_state(before)
    assert torch.equal(torch.emulated.get_rng_state(), changed)


@accelerates
@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_keeps_a_moment_on_an_accelerator_exact(value, moment, tmp_path):
    training = Training(DEVICE)
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.step(2)
        state = next(iter(training.optimizer.state.values()))
        state[moment][7, 5] = value
        checkpointer.save(1).result()
        stored = next(iter(dq.load(tmp_path)["optimizer"]["state"].values()))
    assert torch.equal(stored[moment].nan_to_num(-1.0), state[moment].cpu().nan_to_num(-1.0))


@accelerates
def test_a_training_on_an_accelerator_is_compressed_as_on_the_host(tmp_path):
    records = {}
    for device in ("cpu", DEVICE):
        training = Training(device)
        with dq.Checkpointer(
            tmp_path / device, training.model, training.optimizer, **training.metric("batches")
        ) as checkpointer:
            for step in (1, 2, 3):
                training.step(4)
                records[device] = checkpointer.save(step).result()
    host, device = records["cpu"], records[DEVICE]
    # Another device rounds otherwise when it trains, so the weights differ in their last bits.
    assert device.configuration.scale == pytest.approx(host.configuration.scale, abs=0 if DEVICE == "emulated" else 4)
    assert device.roles["weight"].stored == pytest.approx(host.roles["weight"].stored, rel=0.05)


@emulates
@pytest.mark.parametrize("metric", ["no metric", "function", "batches"])
def test_only_levels_cross_from_the_emulated_device(metric, tmp_path):
    training = Training("emulated")
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    with dq.Checkpointer(tmp_path, training.model, training.optimizer, **training.metric(metric)) as checkpointer:
        training.step(1)  # the first one takes a sample of the weights, from which the training begins
        for step in (1, 2, 3):
            before = emulated.crossings()
            training.step(4)
            stepped = emulated.crossings()
            checkpointer.save(step).result()
            saved = emulated.crossings() - stepped
            assert stepped == before  # steps wait for nothing and copy nothing
    tensors = 3 * len(list(training.model.parameters()))
    assert saved.waits + saved.copies_to_host < 8 * tensors  # each of them is a wait
    samples = 2 * 4 * 32_768 * 2  # of both moments of two weights
    assert saved.bytes_to_host < 3.1 * parameters + samples + 65_536  # a byte for each weight and moment
    tables = 2 * (2 * 65_536 + 64 * 256) + 2 * 65_536  # of second moments that go up in turns, and of first moments
    assert saved.bytes_to_device < 1.1 * parameters + tables + 65_536  # levels of second moments, and tables


@emulates
def test_gradients_are_recorded_without_a_wait_for_the_emulated_device():
    gradients = {str(i): torch.randn(8 + i, 600).to(DEVICE) for i in range(500)}
    scaling = Scaling(torch.tensor([8.0]).to(DEVICE), torch.zeros(1).to(DEVICE))
    before = emulated.crossings()
    recorded = sums_of_squares(gradients, sums_of_squares(gradients, {}, scaling), scaling)
    crossed = emulated.crossings() - before
    assert crossed.waits == crossed.copies_to_host == crossed.bytes_to_device == 0
    for name, gradient in gradients.items():
        assert float(recorded[name]) == pytest.approx(float(gradient.cpu().square().mean()) / 32, rel=1e-4)


@emulates
def test_many_small_tensors_cross_together(tmp_path):
    layers = 60
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(layers))).to("emulated")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with dq.Checkpointer(tmp_path, model, optimizer) as checkpointer:
        for step in (1, 2):
            model(torch.ones(3, 20).to("emulated")).sum().backward()
            optimizer.step()
            before = emulated.crossings()
            checkpointer.save(step).result()
    saved = emulated.crossings() - before
    assert saved.waits + saved.copies_to_host < layers  # of six weights and moments for each layer


@emulates
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_restore_fills_the_tensors_of_the_emulated_device(quality, tmp_path):
    training = Training("emulated")
    with dq.Checkpointer(tmp_path, training.model, training.optimizer, quality=quality) as checkpointer:
        training.step()
        checkpointer.save(1).result()
        kept = [*training.model.parameters(), *(s["exp_avg_sq"] for s in training.optimizer.state.values())]
        places = [tensor.data_ptr() for tensor in kept]
        with torch.no_grad():
            torch._foreach_zero_(list(training.model.parameters()))
        before = emulated.crossings()
        checkpointer.restore()
    sent = (emulated.crossings() - before).bytes_to_device
    kept = [*training.model.parameters(), *(s["exp_avg_sq"] for s in training.optimizer.state.values())]
    assert [tensor.data_ptr() for tensor in kept] == places
    loaded = dq.load(tmp_path)["model"]
    assert all(torch.equal(each.cpu(), loaded[name]) for name, each in training.model.state_dict().items())
    values = 3 * sum(parameter.numel() for parameter in training.model.parameters())
    assert sent < (4.1 if quality == "lossless" else 1.1) * values + 65_536  # of levels, a byte each


@emulates
def test_a_device_without_memory_gets_its_values_from_the_host(monkeypatch, tmp_path):
    training = Training("emulated")
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        training.step()
        checkpointer.save(1).result()

        def without_memory(*_, **__):
            raise torch.OutOfMemoryError

        with torch.no_grad():
            torch._foreach_zero_(list(training.model.parameters()))
        monkeypatch.setattr(device_kernels, "values", without_memory)
        checkpointer.restore()
    loaded = dq.load(tmp_path)["model"]
    assert all(torch.equal(each.cpu(), loaded[name]) for name, each in training.model.state_dict().items())


class TrainingWithoutMemory(Training):
    """A training whose device is full as long as there is a second model. evaluated: whether each was the first."""

    def __init__(self) -> None:
        super().__init__(DEVICE, 96)
        self.own, self.evaluated = self.model[0].weight.data_ptr(), list[bool]()

    def loss(self, model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
        self.evaluated.append(model[0].weight.data_ptr() == self.own)
        if not self.evaluated[-1]:
            raise torch.OutOfMemoryError("the device is full")
        return super().loss(model, rows)


@accelerates
@pytest.mark.parametrize("metric", ["function", "batches"])
def test_candidates_take_the_place_of_the_weights_on_an_accelerator_without_memory(metric, caplog, tmp_path):
    def identities(training: Training, folder: Path) -> list[str]:
        parameters = list(training.model.parameters())
        with dq.Checkpointer(folder, training.model, training.optimizer, **training.metric(metric)) as checkpointer:
            for step in (1, 2):
                training.step(3)
                before = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
                checkpointer.save(step).result()
                for (values, gradient), parameter in zip(before, training.model.parameters(), strict=True):
                    assert torch.equal(values, parameter)
                    assert gradient is parameter.grad
                assert list(map(id, training.model.parameters())) == list(map(id, parameters))
        return [Run(folder).file(step).header.identity for step in (1, 2)]

    full = TrainingWithoutMemory()
    assert identities(full, tmp_path / "full") == identities(Training(DEVICE, 96), tmp_path / "free")
    assert full.evaluated.count(False) == 1
    assert [each.message for each in caplog.records if "in host memory" in each.message] == [_TOO_SMALL]


@accelerates
def test_a_frozen_weight_on_an_accelerator_is_stored_as_it_is_now(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).to(DEVICE)
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), 1e-3)
    with dq.Checkpointer(tmp_path, model, optimizer, roles={"model.0.weight": "weight"}) as checkpointer:
        for step in range(1, 8):
            with torch.no_grad():
                model[0].weight.view(-1)[5 + step] += 1.0  # between two elements of the sample
            checkpointer.save(step).result()
            stored = dq.load(tmp_path, step=step)["model"]["0.weight"]
            assert float((stored - model[0].weight.cpu()).abs().max()) < 0.5


@accelerates
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metric", ["no metric", "batches"])
def test_small_weights_on_an_accelerator_are_stored_as_on_the_host(metric, dtype, tmp_path):
    """With master weights if weights are half-precision. The weights are the same on both, so all of it is."""
    records = {}
    for where in ("cpu", DEVICE):
        training = Training("cpu", width=40)
        model = training.model.to(dtype)
        masters = nn.ParameterList(nn.Parameter(p.detach().float()) for p in model.parameters())
        trained = model if dtype == torch.float32 else masters
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        for parameter in trained.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), list(trained.parameters()))
        state = optimizer.state_dict()
        model.to(where)
        masters.to(where)
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-3)
        optimizer.load_state_dict(state)
        training.inputs, training.wanted = training.inputs.to(where, dtype), training.wanted.to(where, dtype)
        options = training.metric(metric) | {"extras": {"masters": masters}}
        with dq.Checkpointer(tmp_path / where, model, optimizer, **options) as checkpointer:
            records[where] = checkpointer.save(1).result()
    host, there = records["cpu"], records[DEVICE]
    assert there.judged_by == host.judged_by == ("evaluate" if metric == "batches" else "fisher distortion")
    assert {role: each.stored for role, each in there.roles.items() if role != "exact"} == {
        role: each.stored for role, each in host.roles.items() if role != "exact"
    }


@accelerates
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        (torch.float32, lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9, foreach=False)),
        (torch.bfloat16, lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=False)),
        (torch.float16, lambda parameters: torch.optim.Adagrad(parameters, 1e-3, eps=1e-3, foreach=False)),
        (torch.float64, lambda parameters: torch.optim.Adam(parameters, 1e-3, amsgrad=True, foreach=False)),
    ],
    ids=["SGD", "bfloat16", "float16", "float64"],
)
def test_a_training_on_an_accelerator_goes_on_from_its_checkpoint(dtype, optimizer, quality, tmp_path):
    training = Training(DEVICE)
    training.inputs, training.wanted = training.inputs.to(dtype), training.wanted.to(dtype)
    training.model.to(dtype)
    training.optimizer = optimizer(training.model.parameters())
    with dq.Checkpointer(tmp_path, training.model, training.optimizer, quality=quality) as checkpointer:
        training.step(2)
        checkpointer.save(1)
        training.step(2)
        wanted = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.step(2)
        assert checkpointer.restore() == 1
        training.step(2)
    for parameter, value in zip(training.model.parameters(), wanted, strict=True):
        assert parameter.device.type == DEVICE
        assert parameter.isfinite().all()
        assert quality != "lossless" or torch.equal(parameter, value)


@pytest.fixture
def group_of_one(tmp_path):
    """A group of one process, which communicates on the accelerator."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    if how == "FSDP2":
        mesh = init_device_mesh(DEVICE, (1,))
        return fully_shard(model, mesh=mesh)
    return torch.compile(model) if how == "compiled" else model


@pytest.mark.slow
@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports deprecated modules
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.skipif(DEVICE in ("none", "emulated"), reason="needs an accelerator of this machine")
@pytest.mark.parametrize("how", ["fused", "capturable", "DDP", "FSDP2", "compiled"])
def test_a_wrapped_training_on_an_accelerator_is_saved_and_restored(how, tmp_path):
    training = Training(DEVICE)
    training.model = wrapped(training.model, how)
    options = {how: True} if how in ("fused", "capturable") else {}
    training.optimizer = torch.optim.AdamW(training.model.parameters(), 1e-3, **options)
    with dq.Checkpointer(
        tmp_path / "run", training.model, training.optimizer, **training.metric("batches")
    ) as checkpointer:
        for step in (1, 2, 3):
            training.step(3)
            checkpointer.save(step)
        assert checkpointer.restore(2) == 2
        loaded = dq.load(tmp_path / "run", step=2)["model"]
        restored = [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in training.model.parameters()]
        assert all(map(torch.equal, restored, loaded.values()))
        training.step(3)
        checkpointer.save(4).result()


@accelerates
def test_a_model_on_an_accelerator_follows_a_training(tmp_path):
    training = Training(DEVICE)
    following = Training(DEVICE).model
    with dq.Checkpointer(tmp_path, training.model, training.optimizer) as checkpointer:
        steps = dq.follow(tmp_path, following, timeout=0)
        for step in (1, 2):
            training.step()
            checkpointer.save(step).result()
            assert next(steps) == step
            loaded = dq.load(tmp_path, step=step)["model"]
            assert all(torch.equal(each.cpu(), loaded[name]) for name, each in following.state_dict().items())


@accelerates
def test_tensors_with_a_bound_and_averages_on_an_accelerator_are_restored(tmp_path):
    training = Training(DEVICE)
    average = torch.optim.swa_utils.AveragedModel(training.model)
    field = torch.randn(100, 100).to(DEVICE)
    state = {"field": field}
    roles = {"sim.field": dq.Bound(absolute=1e-3), "average.*": "average"}
    extras = {"average": average, "sim": Held(state)}
    with dq.Checkpointer(
        tmp_path, training.model, training.optimizer, extras=extras, roles=roles, **training.metric("batches")
    ) as checkpointer:
        training.step(3)
        average.update_parameters(training.model)
        before = field.cpu().clone()
        checkpointer.save(1).result()
        field.zero_()
        averages = [parameter.detach().clone() for parameter in average.parameters()]
        average.load_state_dict({name: torch.zeros_like(each) for name, each in average.state_dict().items()})
        checkpointer.restore()
    for parameter, wanted in zip(average.parameters(), averages, strict=True):
        assert torch.linalg.vector_norm(parameter - wanted) < 0.05 * torch.linalg.vector_norm(wanted)
    assert state["field"].device.type == DEVICE
    assert float((state["field"].cpu() - before).abs().max()) <= 1e-3


class Held:
    """Tensors as an object with a state."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)
