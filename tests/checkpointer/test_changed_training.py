"""A checkpoint that does not fit the objects is refused, and nothing is changed."""

import os

import numpy as np
import pytest
import torch
from small_runs import adamw, saved
from torch import nn
from training import bits, model_of

import dynaquant as dq
from dynaquant.training.collect import collect


class Other(torch.optim.AdamW):
    pass


def resized(model: nn.Module) -> None:
    model[4] = nn.Linear(24, 41)


def deeper(model: nn.Module) -> None:
    model.append(nn.Linear(40, 40, bias=False))


def shallower(model: nn.Module) -> None:
    del model[2]


def halved(model: nn.Module) -> None:
    model[1].to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (resized, ["model.4.weight was float32[40, 24] and is float32[41, 24]", "model.4.bias was float32[40]"]),
        (deeper, ["model.5.weight is not in the checkpoint"]),
        (
            shallower,
            ["model.3.weight is not in the checkpoint", "model.4.weight is in the checkpoint, but not in the model"],
        ),
        (halved, ["model.1.weight was float32[24, 24] and is bfloat16[24, 24]", "model.1.bias was"]),
    ],
)
def test_a_changed_model_is_refused_and_nothing_is_changed(tmp_path, change, said):
    saved(tmp_path, [1, 2])
    model = model_of()
    change(model)
    optimizer = adamw(model)
    assert_refused(tmp_path, model, optimizer, {}, said)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            ["optimizer was torch.optim.adamw.AdamW and is torch.optim.sgd.SGD"],
        ),
        (lambda m: Other(m.parameters()), [f"optimizer was torch.optim.adamw.AdamW and is {Other.__module__}.Other"]),
        (
            lambda m: torch.optim.AdamW(list(m.parameters())[:5]),
            ["optimizer had the parameter model.4.weight, which it does not have now"],
        ),
        (lambda _: None, ["the checkpoint has 'optimizer', which was not given"]),
    ],
    ids=["class", "subclass", "fewer", "none"],
)
def test_a_changed_optimizer_is_refused_and_nothing_is_changed(tmp_path, build, said):
    saved(tmp_path, [1, 2])
    model = model_of()
    assert_refused(tmp_path, model, build(model), {}, said)


def test_other_extras_are_refused_and_nothing_is_changed(tmp_path):
    saved(tmp_path, [1], extras={"shuffle": torch.Generator()})
    model = model_of()
    said = ["the checkpoint has no extra 'augment'", "the checkpoint has an extra 'shuffle', which was not given"]
    assert_refused(tmp_path, model, adamw(model), {"augment": torch.Generator()}, said)


class Faulty(nn.Linear):
    """A module whose ``state_dict`` fails while ``wrong`` is set."""

    wrong = False

    def state_dict(self, *arguments, **options):
        if self.wrong:
            raise RuntimeError("an error in the user's code")
        return super().state_dict(*arguments, **options)


class FaultyOptimizer(torch.optim.SGD):
    wrong = False

    def state_dict(self):
        if self.wrong:
            raise KeyError("an error in the user's code")
        return super().state_dict()


class FaultyLoader:
    wrong = False

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, _state):
        if self.wrong:
            raise ValueError("an error in the user's code")


@pytest.mark.parametrize("which", ["model", "optimizer", "critic", "loader"])
def test_an_error_in_the_users_code_is_raised_unchanged_and_no_checkpoint_counts_as_damaged(tmp_path, which):
    model = Faulty(4, 4)
    optimizer = FaultyOptimizer(model.parameters(), lr=0.1)
    extras = {"critic": Faulty(4, 4), "loader": FaultyLoader()}
    objects = {"model": model, "optimizer": optimizer, **extras}
    with dq.Checkpointer(tmp_path, model, optimizer, extras=extras, keep=dq.Keep(last=1)) as ckpt:
        for step in (1, 2):
            ckpt.save(step).result()
        objects[which].wrong = True
        with pytest.raises((RuntimeError, KeyError, ValueError), match="an error in the user's code"):
            ckpt.restore()
        assert ckpt.skipped == []
        objects[which].wrong = False
        ckpt.save(3).result()
        assert ckpt.restore() == 3
    assert os.listdir(tmp_path) == ["step-000000000003.dqc"]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (torch.Generator(), np.random.default_rng(1)),
        (np.random.default_rng(1), torch.Generator()),
        (np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))),
    ],
    ids=["torch numpy", "numpy torch", "PCG64 MT19937"],
)
def test_another_kind_of_generator_is_refused_and_nothing_is_changed(tmp_path, was, now):
    saved(tmp_path, [1], extras={"shuffle": was})
    model = model_of()
    assert_refused(tmp_path, model, adamw(model), {"shuffle": now}, ["shuffle"])


def assert_refused(folder, model, optimizer, extras, said) -> None:
    things = {"model": model, **({"optimizer": optimizer} if optimizer else {}), **extras}
    before = bits(collect(things))
    with dq.Checkpointer(folder, model, optimizer, extras=extras) as ckpt:
        for step in (None, 1):
            with pytest.raises(dq.StateError) as caught:
                ckpt.restore(step)
            assert "does not fit the objects to restore" in str(caught.value)
            for words in said:
                assert words in str(caught.value)
            assert bits(collect(things)) == before
