"""``save_state`` and ``load_state`` of an Accelerator use a run, and a training goes on as if nothing had happened."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import call
from forked_trainings import result_of, trainings
from launched import launch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, IterableDataset
from training import bits

import dynaquant as dq

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed")
pytest.importorskip("torchdata", reason="torchdata is not installed")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402
from accelerate_training import BATCHES, STEPS, accelerator_of, hash_of, model_of, prepared  # noqa: E402

from dynaquant.integrations.accelerate import attach  # noqa: E402
from dynaquant.interop.export import export  # noqa: E402
from dynaquant.interop.targets import Target  # noqa: E402
from dynaquant.restore.stored_checkpoint import StoredCheckpoint  # noqa: E402
from dynaquant.store.pointers import POINTER_FILE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata
SCRIPT = Path(__file__).parents[1] / "support" / "accelerate_training.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"


@pytest.fixture(autouse=True)
def _own_accelerator():
    """Accelerate keeps one state for a process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def train():
    with trainings(SCRIPT) as train:
        yield train


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory) -> dict:
    """What the training comes to without any checkpoint."""
    return train(tmp_path_factory.mktemp("undisturbed")).result


def step(accelerator, model, optimizer, *_) -> None:
    for _ in range(accelerator.gradient_accumulation_steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(8, 16).to(accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def attached(folder, run="run", automatic=False, **options):
    accelerator = accelerator_of(folder, automatic=automatic)
    objects = prepared(accelerator)
    return accelerator, objects, attach(accelerator, folder / run, **{"quality": "lossless", **options})


# Resuming


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_a_training_that_is_killed_three_times_ends_like_an_undisturbed_one(train, undisturbed, tmp_path, quality):
    generator = random.Random(f"accelerate {quality}")
    for at in sorted(generator.sample(range(6, STEPS), 3)):
        assert train(tmp_path, at, quality=quality, pause=0.01).ended == signal.SIGKILL
    last = train(tmp_path, quality=quality)
    assert last.resumed >= 5
    assert last.result["steps"] == undisturbed["steps"] == STEPS
    assert len(last.result["history"]) == STEPS
    if quality == "lossless":
        assert last.result == undisturbed


def test_saves_do_not_change_the_training(train, undisturbed, tmp_path):
    assert train(tmp_path, quality="balanced").result == undisturbed
    with pytest.raises(dq.CheckpointError, match="there is no checkpoint of step 40"):  # total_limit
        dq.load(tmp_path / "run", step=40)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_10", "checkpoint_11", "checkpoint_9"]


@pytest.mark.slow
def test_a_stateful_loader_resumes_in_the_middle_of_an_epoch(train, undisturbed, tmp_path):
    train(tmp_path, 22, quality="lossless", loader="stateful")
    last = train(tmp_path, quality="lossless", loader="stateful")
    assert last.resumed * 2 % BATCHES != 0
    assert last.result == undisturbed


@pytest.mark.slow
def test_ddp_resumes_exactly_after_a_kill(tmp_path):
    def ranks(folder, **options) -> tuple[int, str]:
        return launch(
            SCRIPT,
            2,
            300,
            json.dumps({"folder": str(tmp_path / folder), **options}),
            modules=("dynaquant.integrations.accelerate",),
        )

    status, output = ranks("a")
    assert status == 0, output
    status, _ = ranks("b", quality="lossless", kill_at=23)
    assert status != 0
    status, again = ranks("b", quality="lossless")
    assert status == 0, again
    assert "resumed 20" in again
    assert result_of(again) == result_of(output)


def test_the_example_goes_on_after_a_kill(tmp_path):
    with subprocess.Popen(
        [sys.executable, EXAMPLE, "0.02"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as training:
        for line in training.stdout:
            if line.startswith("saved runs/mlp/step_150"):
                training.kill()
    again = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "going on from runs/mlp/step_150" in again.stdout
    assert "step 300" in again.stdout


# What is saved


def test_everything_that_is_prepared_and_registered_comes_back(tmp_path):
    def made():
        accelerator = accelerator_of(tmp_path, automatic=False)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        model, optimizer, loader, scheduler = prepared(accelerator)
        average = torch.optim.swa_utils.AveragedModel(model_of())
        accelerator.register_for_checkpointing(average)
        notes = {"seen": 0}
        ckpt = attach(accelerator, tmp_path / "run", quality="lossless", extras={"notes": notes})
        return accelerator, model, optimizer, loader, scheduler, average, notes, ckpt

    accelerator, model, optimizer, loader, scheduler, average, notes, ckpt = made()
    for _ in range(3):
        step(accelerator, model, optimizer)
        scheduler.step()
    average.update_parameters(model)
    notes["seen"] = 3
    loader.set_epoch(7)
    accelerator.step = 1
    accelerator.save_state(tmp_path / "a")
    numbers = torch.rand(3)
    ckpt.close()

    again = made()
    again[0].load_state(tmp_path / "a")
    assert torch.equal(torch.rand(3), numbers)
    assert hash_of(again[1]) == hash_of(model)
    assert again[2].state_dict()["state"][0]["step"] == 3
    assert again[0].scaler.state_dict() == accelerator.scaler.state_dict()
    assert accelerator.scaler.state_dict()["scale"] > 8
    assert again[3].iteration == 7
    assert again[4].get_last_lr() == scheduler.get_last_lr()
    assert hash_of(again[5]) == hash_of(average)
    assert again[6] == {"seen": 3}
    assert again[0].step == 1


def test_several_models_and_compiled_ones_are_saved_by_number(tmp_path):
    accelerator = accelerator_of(tmp_path, automatic=False)
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    compiled, other, *_ = accelerator.prepare(torch.compile(first, backend="eager"), second, *optimizers)
    scored = []
    attach(accelerator, tmp_path / "run", evaluate=lambda models: scored.append(models) or 1.0)
    accelerator.save_state(tmp_path / "a")
    assert list(dq.load(tmp_path / "run")["model"]["0"]) == ["weight", "bias"]
    assert scored[0] == {"0": first, "1": second}
    first.weight.data.zero_()
    accelerator.load_state(tmp_path / "a")
    assert first.weight.count_nonzero() > 0
    assert compiled is not other


class Numbers(IterableDataset):
    def __iter__(self):
        yield from (torch.full((16,), float(i)) for i in range(40))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dispatcher_with_a_stateful_loader_goes_on_where_it_was(tmp_path, workers):
    def made():
        accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=True)
        )
        model = nn.Linear(16, 1)
        objects = accelerator.prepare(
            model, torch.optim.SGD(model.parameters()), DataLoader(Numbers(), batch_size=4, num_workers=workers)
        )
        return accelerator, objects[2], attach(accelerator, tmp_path / "run")

    accelerator, loader, ckpt = made()
    for number, batch in enumerate(loader):
        if number == 3:
            assert batch[0, 0] == 12
            accelerator.save_state(tmp_path / "a")
            break
    ckpt.close()
    again, loader, _ = made()
    again.load_state(tmp_path / "a")
    assert [int(batch[0, 0]) for batch in loader] == [16, 20, 24, 28, 32, 36]


# Folders


def test_a_folder_holds_one_small_file_and_the_run_the_rest(tmp_path):
    accelerator, objects, _ = attached(tmp_path)
    step(accelerator, *objects)
    assert accelerator.save_state(str(tmp_path / "x" / "step_1")) == tmp_path / "x" / "step_1"
    assert os.listdir(tmp_path / "x" / "step_1") == [POINTER_FILE]
    content = json.loads((tmp_path / "x" / "step_1" / POINTER_FILE).read_text())
    assert (content["run"], content["step"]) == ("../../run", 1)
    stored = dq.load(tmp_path / "x" / "step_1", part="model")
    assert all(torch.equal(stored[name], value) for name, value in objects[0].state_dict().items())


def test_folders_and_run_may_be_moved_together(tmp_path):
    accelerator, objects, ckpt = attached(tmp_path / "before")
    step(accelerator, *objects)
    accelerator.save_state(tmp_path / "before" / "a")
    ckpt.close()
    (tmp_path / "before").rename(tmp_path / "after")
    again, (model, *_), _ = attached(tmp_path / "after")
    again.load_state(tmp_path / "after" / "a")
    assert hash_of(model) == hash_of(objects[0])


def test_two_saves_between_optimizer_steps_keep_the_state_of_each(tmp_path):
    accelerator, (model, *others), ckpt = attached(tmp_path)
    step(accelerator, model, *others)
    accelerator.save_state(tmp_path / "before")
    before = hash_of(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    accelerator.save_state(tmp_path / "after")
    after = hash_of(model)
    accelerator.load_state(tmp_path / "before")
    assert hash_of(model) == before
    accelerator.load_state(tmp_path / "after")
    assert hash_of(model) == after
    assert ckpt.steps() == [1, 2]


def test_a_name_may_be_used_again(tmp_path):
    accelerator, objects, _ = attached(tmp_path)
    for _ in range(2):
        step(accelerator, *objects)
        accelerator.save_state(tmp_path / "last")
    weights = hash_of(objects[0])
    step(accelerator, *objects)
    accelerator.load_state(tmp_path / "last")
    assert hash_of(objects[0]) == weights


def test_going_back_and_training_on_leaves_every_folder_as_it_was(tmp_path):
    accelerator, (model, *others), ckpt = attached(tmp_path)
    weights = {}

    def trained_and_saved(name):
        for _ in range(2):
            step(accelerator, model, *others)
        accelerator.save_state(tmp_path / name)
        weights[name] = hash_of(model)

    trained_and_saved("epoch1")
    trained_and_saved("epoch2")
    trained_and_saved("epoch3")
    accelerator.load_state(tmp_path / "epoch1")
    torch.rand(1)  # another line of the training
    trained_and_saved("other")
    trained_and_saved("further")
    ckpt.close()
    assert len(set(weights.values())) == 5
    again, (model, *_), ckpt = attached(tmp_path)
    for name, expected in weights.items():
        again.load_state(tmp_path / name)
        assert hash_of(model) == expected
    assert ckpt.steps() == [2, 4, 5, 6, 7]


def test_a_folder_whose_step_was_saved_again_is_refused(tmp_path):
    accelerator, objects, ckpt = attached(tmp_path)
    step(accelerator, *objects)
    accelerator.save_state(tmp_path / "a")
    torch.rand(1)  # so that the states differ
    ckpt.save(1).result()
    with pytest.raises(dq.CheckpointError, match=r"a: step 1 of .*run was saved again since; load another folder"):
        accelerator.load_state(tmp_path / "a")


def test_the_folder_of_another_run_is_refused(tmp_path):
    accelerator, _, ckpt = attached(tmp_path)
    accelerator.save_state(tmp_path / "a")
    ckpt.close()
    other, _, _ = attached(tmp_path, "other")
    with pytest.raises(ValueError, match=r"a belongs to the run .*run, and this accelerator is attached to .*other;"):
        other.load_state(tmp_path / "a")


def test_folders_of_interrupted_saves_are_named(tmp_path):
    accelerator, _, _ = attached(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(dq.CheckpointError, match=r"no dynaquant\.json and no checkpoint of Accelerate"):
        accelerator.load_state(tmp_path / "a")
    (tmp_path / "a" / POINTER_FILE).write_text("{")
    with pytest.raises(dq.CheckpointError, match=r"dynaquant\.json: this pointer to a checkpoint is damaged"):
        accelerator.load_state(tmp_path / "a")
    with pytest.raises(ValueError, match="folder does not exist"):
        accelerator.load_state(tmp_path / "b")
    with pytest.raises(ValueError, match="save_state needs a folder"):
        accelerator.save_state()


def test_the_folder_of_a_run_is_named_as_one(tmp_path):
    accelerator, _, ckpt = attached(tmp_path)
    message = "run is a run, which holds many checkpoints; load_state takes a folder that save_state made"
    with pytest.raises(ValueError, match=message):
        accelerator.load_state(tmp_path / "run")
    accelerator.save_state(tmp_path / "a")
    ckpt.close()
    other, _, _ = attached(tmp_path, "other")
    with pytest.raises(ValueError, match=message):
        other.load_state(tmp_path / "run")


@pytest.mark.parametrize(("before", "after"), [("stateful", "seedable"), ("seedable", "stateful")])
def test_a_loader_that_is_stateful_no_longer_or_only_now_is_named(tmp_path, before, after):
    accelerator = accelerator_of(tmp_path, before, automatic=False)
    prepared(accelerator)
    with attach(accelerator, tmp_path / "run", quality="lossless"):
        accelerator.save_state(tmp_path / "a")
    again = accelerator_of(tmp_path, after, automatic=False)
    prepared(again)
    attach(again, tmp_path / "run", quality="lossless")
    with pytest.raises(dq.StateError, match="extra 'loader'") as raised:
        again.load_state(tmp_path / "a")
    assert any("use_stateful_dataloader" in note for note in raised.value.__notes__)


def test_without_a_folder_the_last_one_that_verifies_is_loaded(tmp_path, caplog):
    accelerator, objects, ckpt = attached(tmp_path, automatic=True)
    weights = []
    for _ in range(3):
        step(accelerator, *objects)
        accelerator.save_state()
        weights.append(hash_of(objects[0]))
    ckpt.close()
    path = tmp_path / "run" / "step-000000000003.dqc"
    path.write_bytes(path.read_bytes()[:-100])
    again, others, _ = attached(tmp_path, automatic=True)
    again.load_state()
    assert hash_of(others[0]) == weights[1]
    assert "checkpoint_2 is skipped" in caplog.text
    again.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert hash_of(others[0]) == weights[0]
    step(again, *others)
    assert again.save_state().name == "checkpoint_3"  # not one that exists


def test_a_checkpoint_that_cannot_be_read_for_a_while_keeps_its_folder(tmp_path):
    accelerator, objects, _ = attached(tmp_path, automatic=True)
    weights = []
    for _ in range(2):
        step(accelerator, *objects)
        accelerator.save_state()
        weights.append(hash_of(objects[0]))
    path = tmp_path / "run" / "step-000000000001.dqc"
    sound = path.read_bytes()
    path.write_bytes(sound[:-30] + bytes([sound[-30] ^ 1]) + sound[-29:])  # in the header
    step(accelerator, *objects)
    accelerator.save_state()
    path.write_bytes(sound)
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert hash_of(objects[0]) == weights[0]


def test_only_pointers_to_checkpoints_that_the_save_has_deleted_are_deleted(tmp_path):
    accelerator, objects, _ = attached(tmp_path, automatic=True)  # total_limit is 3
    checkpoints = tmp_path / "checkpoints"
    for number in range(3):
        step(accelerator, *objects)
        accelerator.save_state()
        (checkpoints / "checkpoint_0" / "notes.txt").write_text("mine")
        if number == 0:
            pointer = json.loads((checkpoints / "checkpoint_0" / POINTER_FILE).read_text())
            (tmp_path / "other").mkdir()
            (checkpoints / "checkpoint_90").mkdir()
            (checkpoints / "checkpoint_90" / POINTER_FILE).write_text(json.dumps({**pointer, "run": "../../other"}))
            (checkpoints / "checkpoint_91").mkdir()
            (checkpoints / "checkpoint_91" / POINTER_FILE).write_text(json.dumps({**pointer, "step": 77}))
    for _ in range(2):
        step(accelerator, *objects)
        accelerator.save_state()
    assert os.listdir(checkpoints / "checkpoint_0") == ["notes.txt"]
    names = {path.parent.name for path in checkpoints.glob(f"*/{POINTER_FILE}")}
    assert names == {f"checkpoint_{number}" for number in (2, 3, 4, 90, 91)}
    assert not (checkpoints / "checkpoint_1").exists()


def test_a_new_training_does_not_overwrite_automatic_folders(tmp_path):
    accelerator, objects, ckpt = attached(tmp_path, automatic=True)
    step(accelerator, *objects)
    accelerator.save_state()
    ckpt.close()
    again, _, _ = attached(tmp_path, automatic=True)
    with pytest.raises(ValueError, match=r"checkpoint_0 exists already; call accelerator.load_state\(\)"):
        again.save_state()


def test_a_folder_that_accelerate_wrote_is_loaded_by_accelerate(tmp_path):
    accelerator = accelerator_of(tmp_path, automatic=False)
    model, *others = prepared(accelerator)
    step(accelerator, model, *others)
    accelerator.save_state(tmp_path / "old")
    again, (other, *_), _ = attached(tmp_path)
    nn.init.zeros_(other[0].weight)
    again.load_state(tmp_path / "old")
    assert hash_of(other) == hash_of(model)


def test_a_training_that_changes_over_goes_on_counting(tmp_path):
    accelerator = accelerator_of(tmp_path, limit=None)
    objects = prepared(accelerator)
    for _ in range(3):
        step(accelerator, *objects)
        accelerator.save_state()
    for given in (None, tmp_path / "checkpoints" / "checkpoint_2"):
        again, objects, ckpt = attached(tmp_path, automatic=True)
        with pytest.raises(ValueError, match="checkpoint_0 exists already"):
            again.save_state()
        again.load_state(given)
        step(again, *objects)
        assert Path(again.save_state()).name == ("checkpoint_3" if given is None else "checkpoint_4")
        assert max(ckpt.steps()) == (4 if given is None else 5)
        ckpt.close()
    last, _, _ = attached(tmp_path, automatic=True)
    last.load_state()
    assert last.save_iteration == 5


@pytest.mark.parametrize("models", [1, 2])
def test_an_exported_checkpoint_is_continued_without_dynaquant(tmp_path, models):
    def objects():
        accelerator = accelerator_of(tmp_path, automatic=False)
        own = [prepared(accelerator) for _ in range(models)]
        counter = torch.optim.swa_utils.AveragedModel(own[0][0])
        accelerator.register_for_checkpointing(counter)
        return accelerator, own, counter

    def train(accelerator, own, counter):
        for model, optimizer, _, scheduler in own * 3:
            step(accelerator, model, optimizer)
            scheduler.step()
            counter.update_parameters(own[0][0])

    trained = objects()
    attach(trained[0], tmp_path / "run", quality="lossless", extras={"mine": {"epoch": 1}})
    train(*trained)
    trained[0].save_state(tmp_path / "saved")
    said = " ".join(call("export", tmp_path / "saved", "--to", "accelerate", "-o", tmp_path / "out").split())
    assert "does not load them: mine" in said
    assert "epoch 0, seed" in said
    train(*trained)
    torch.manual_seed(7)
    again = objects()
    again[0].load_state(tmp_path / "out")
    train(*again)
    for (model, optimizer, _, scheduler), (other, same, _, also) in zip(trained[1], again[1], strict=True):
        assert hash_of(model) == hash_of(other)
        assert bits(optimizer.state_dict()) == bits(same.state_dict())
        assert scheduler.state_dict() == also.state_dict()
    assert hash_of(trained[2]) == hash_of(again[2])


def test_an_export_says_which_weights_the_run_does_not_store(tmp_path):
    accelerator = accelerator_of(tmp_path, automatic=False)
    model, *others = prepared(accelerator)
    model[0].requires_grad_(False)
    attach(accelerator, tmp_path / "run", quality="lossless", roles={"model.0.*": "omit"})
    step(accelerator, model, *others)
    accelerator.save_state(tmp_path / "saved")
    notes = export(StoredCheckpoint(tmp_path / "saved"), Target.ACCELERATE, tmp_path / "out")
    assert notes[0] == "left out, as the run does not store them (role omit): 2 tensors, such as model.0.weight"
    nn.init.zeros_(model[0].weight)
    accelerator.load_state(tmp_path / "out", strict=False)
    assert not model[0].weight.any()


def test_hooks_of_the_user_are_called(tmp_path):
    accelerator, _, _ = attached(tmp_path)

    def saving(models, weights, folder):
        (Path(folder) / "note").write_text(f"{len(models)} {list(weights.pop())}")

    accelerator.register_save_state_pre_hook(saving)
    loaded = []
    accelerator.register_load_state_pre_hook(lambda models, folder: loaded.append((models.pop(), folder)))
    accelerator.save_state(tmp_path / "a")
    assert (tmp_path / "a" / "note").read_text().startswith("1 ['0.weight'")
    accelerator.load_state(tmp_path / "a")
    assert loaded[0][1] == str(tmp_path / "a")
    accelerator.load_state(tmp_path / "a")  # the hook got a list of its own


# Mistakes


def test_weights_of_tensor_classes_are_not_exported_under_names_that_accelerate_does_not_know(tmp_path):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)), requires_grad=False)
    accelerator = accelerator_of(tmp_path, automatic=False)
    accelerator.prepare(model, torch.optim.SGD([model.bias], lr=0.1))
    attach(accelerator, tmp_path / "run", quality="lossless")
    accelerator.save_state(tmp_path / "saved")
    with pytest.raises(dq.CheckpointError, match=r"weight is of a tensor class \(TwoTensor\).*load_into"):
        export(StoredCheckpoint(tmp_path / "saved"), Target.ACCELERATE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_attach_comes_after_prepare_and_once(tmp_path):
    accelerator = accelerator_of(tmp_path)
    with pytest.raises(ValueError, match=r"nothing is prepared yet; call attach after accelerator\.prepare"):
        attach(accelerator, tmp_path / "run")
    prepared(accelerator)
    attach(accelerator, tmp_path / "run")
    with pytest.raises(ValueError, match="attached to this accelerator already"):
        attach(accelerator, tmp_path / "other")
    with pytest.raises(TypeError, match=r"must be an accelerate\.Accelerator, not Linear"):
        attach(nn.Linear(1, 1), tmp_path / "run")


def test_objects_that_are_registered_later_are_named_as_a_mistake(tmp_path):
    accelerator, _, _ = attached(tmp_path)
    accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(model_of()))
    with pytest.raises(RuntimeError, match="registered or released since dynaquant was attached"):
        accelerator.save_state(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_loader_whose_order_cannot_be_repeated_is_named(tmp_path, caplog):
    accelerator = accelerate.Accelerator(cpu=True)
    prepared(accelerator)
    with caplog.at_level(logging.WARNING):
        attach(accelerator, tmp_path / "run")
    assert "use_seedable_sampler=True" in caplog.text
