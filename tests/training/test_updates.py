"""What optimizers do between two saves: parameters that are frozen for a moment, gradients that no step has used."""

import pytest
import torch
from torch import nn
from training import bits

import dynaquant as dq


def networks():
    torch.manual_seed(0)
    generator, critic = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    return {"G": generator, "D": critic}


def optimizers_of(models):
    return {name: torch.optim.Adam(model.parameters(), 1e-3) for name, model in models.items()}


def train(models, optimizers, toggle, with_critic=True):
    generator, critic = models.values()
    noise = torch.randn(16, 16)
    if with_critic:
        critic.requires_grad_(True)
        optimizers["D"].zero_grad()
        (critic(torch.randn(16, 64)).mean() - critic(generator(noise).detach()).mean()).square().backward()
        optimizers["D"].step()
    critic.requires_grad_(not toggle)
    optimizers["G"].zero_grad()
    critic(generator(noise)).mean().backward()
    optimizers["G"].step()


@pytest.mark.parametrize("keep_gradients", [True, False], ids=["gradients stay", "gradients are removed"])
def test_a_critic_that_is_frozen_at_the_moment_of_the_save_trains(tmp_path, keep_gradients):
    ratios = {}
    for toggle in (False, True):
        models = networks()
        optimizers = optimizers_of(models)
        with dq.Checkpointer(tmp_path / str(toggle), models, optimizers, every=20) as ckpt:
            for step in range(1, 61):
                train(models, optimizers, toggle)
                if not keep_gradients:
                    for optimizer in optimizers.values():
                        optimizer.zero_grad()
                if ckpt.due(step):
                    record = ckpt.save(step).result()
                    assert record.notes == []
        ratios[toggle] = record.ratio
    assert ratios[True] == pytest.approx(ratios[False], rel=0.1)
    with dq.Checkpointer(tmp_path / "True", models := networks(), optimizers_of(models)) as ckpt:
        assert ckpt.restore() == 60


def test_what_no_optimizer_has_updated_since_the_last_save_is_frozen(tmp_path):
    models = networks()
    optimizers = optimizers_of(models)
    with dq.Checkpointer(tmp_path, models, optimizers) as ckpt:
        train(models, optimizers, toggle=True)
        kinds = []
        for step in range(1, 5):
            ckpt.save(step).result()
            train(models, optimizers, toggle=True, with_critic=False)  # the critic's last gradients are still there
            by_name = dq.load(tmp_path, step)["model"]["D"]["0.weight"]
            kinds.append(torch.equal(by_name, models["D"][0].weight))
    assert kinds == [False, True, True, True]


REPLACED = "has made no step; if another optimizer trains them now"


def test_an_optimizer_that_another_one_has_replaced_is_noted(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(with_optimizer):
        model(torch.randn(4, 8)).square().mean().backward()
        with_optimizer.step()
        with_optimizer.zero_grad()

    with dq.Checkpointer(tmp_path, model, optimizer) as ckpt:
        step(optimizer)
        assert ckpt.save(1).result().notes == []
        assert ckpt.save(2).result().notes == []  # nothing has changed
        step(torch.optim.SGD(model.parameters(), 0.1))
        (note,) = ckpt.save(3).result().notes
        assert note.startswith(f"weights have changed since the last save, but optimizer {REPLACED}")
        ckpt.restore(1)  # writes weights
        assert ckpt.save(4).result().notes == []
        step(optimizer)
        assert ckpt.save(5).result().notes == []


def test_an_optimizer_that_rests_while_another_one_has_its_weights_is_not_noted(tmp_path):
    model = nn.Linear(8, 8)
    optimizers = {name: torch.optim.SGD(model.parameters(), 0.1) for name in ("first", "second")}
    with dq.Checkpointer(tmp_path, model, optimizers) as ckpt:
        for number, optimizer in enumerate([*optimizers.values()] * 2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            assert not any(REPLACED in note for note in ckpt.save(number).result().notes)


def accumulating(optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    return model, optimizer(model.parameters(), 1e-2, **options)


def micro_steps(model, optimizer, first, last, set_to_none=True, keep=False):
    """Four micro-batches are a step. keep: remove gradients before the next one, not after the step."""
    for micro in range(first, last):
        if keep and micro % 4 == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(micro))
        model(inputs).square().mean().backward()
        if micro % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if not keep:
                optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("quality", ["lossless", "balanced"])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9, "foreach": True}),
    ],
    ids=["AdamW", "fused", "SGD"],
)
def test_only_a_save_in_the_middle_of_an_accumulation_is_noted(tmp_path, kind, keep, set_to_none, quality):
    model, optimizer = accumulating(kind[0], **kind[1])
    with dq.Checkpointer(tmp_path, model, optimizer, quality=quality) as ckpt:
        noted = []
        for end in range(1, 13):
            micro_steps(model, optimizer, end - 1, end, set_to_none, keep)
            notes = ckpt.save(end).result().notes
            noted.append(any("in the middle of an accumulation" in note for note in notes))
    assert noted == [end % 4 != 0 for end in range(1, 13)]


def test_gradients_that_another_loss_has_left_are_not_noted(tmp_path):
    models = networks()
    optimizers = optimizers_of(models)
    with dq.Checkpointer(tmp_path, models, optimizers, quality="lossless") as ckpt:
        train(models, optimizers, toggle=False)
        assert ckpt.save(1).result().notes == []


@pytest.mark.parametrize("end", [6, 8])
def test_gradients_are_stored_on_request(tmp_path, end):
    whole = accumulating()
    micro_steps(*whole, 0, 16)
    model, optimizer = accumulating()
    with dq.Checkpointer(
        tmp_path, model, optimizer, quality="lossless", extras={"gradients": dq.Gradients(model)}
    ) as ckpt:
        micro_steps(model, optimizer, 0, end)
        assert ckpt.save(end).result().notes == []
    model, optimizer = accumulating()
    model(torch.ones(1, 8)).sum().backward()
    with dq.Checkpointer(
        tmp_path, model, optimizer, quality="lossless", extras={"gradients": dq.Gradients(torch.nn.DataParallel(model))}
    ) as ckpt:
        micro_steps(model, optimizer, ckpt.restore(), 16)
    assert bits(model.state_dict()) == bits(whole[0].state_dict())


def test_no_note_takes_stored_gradients_for_an_average(tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with dq.Checkpointer(tmp_path, model, optimizer, extras={"gradients": dq.Gradients(model)}) as ckpt:
        model(torch.ones(1, 64)).sum().backward()
        record = ckpt.save(1).result()
    assert record.roles["exact"].raw > model.weight.nbytes
    assert record.notes == []


def test_sparse_gradients_are_stored_as_dense_ones(tmp_path):
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1))
    model(torch.tensor([3, 3, 7])).sum().backward()
    wanted = model[0].weight.grad.to_dense()
    with dq.Checkpointer(tmp_path, model, extras={"gradients": dq.Gradients(model)}) as checkpointer:
        checkpointer.save(1).result()
        model.zero_grad()
        checkpointer.restore()
    assert torch.equal(model[0].weight.grad, wanted)


def test_gradients_of_another_model_are_refused_and_nothing_is_changed(tmp_path):
    saved, other = nn.Linear(3, 2), nn.Linear(4, 2)
    saved(torch.ones(1, 3)).sum().backward()
    with dq.Checkpointer(tmp_path, extras={"gradients": dq.Gradients(saved)}, model=nn.Linear(2, 2)) as ckpt:
        ckpt.save(1)
    model, progress = nn.Linear(2, 2), torch.get_rng_state()
    before = bits(model.state_dict())
    with (
        dq.Checkpointer(tmp_path, model, extras={"gradients": dq.Gradients(other)}) as ckpt,
        pytest.raises(dq.StateError, match=r"the gradient of weight is torch.float32 \[2, 3\], but the model has"),
    ):
        ckpt.restore()
    assert bits(model.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), progress)
    assert other.weight.grad is None
    with pytest.raises(dq.StateError, match=r"needs a torch\.nn\.Module, not a generator"):
        dq.Gradients(model.parameters())
