"""A checkpoint can keep its weights exactly, beside its quantized state, as long as it has a tag."""

import pytest
import torch
from torch import nn

import dynaquant as dq
from dynaquant.store.run import Run
from dynaquant.store.tags import remove_tag


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(model, weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


def copies_in(folder) -> list[str]:
    return [path.name[:18] for path in Run(folder).lossless_copy_paths()]


def test_exact_weights_stay_as_long_as_the_checkpoint_has_a_tag(tmp_path):
    model, optimizer = training()
    kept = {}
    with dq.Checkpointer(tmp_path, model, optimizer, quality=dq.Quality(max_degradation=0.05)) as ckpt:
        for step in range(1, 6):
            train(model, optimizer)
            kept[step] = copied(model)
            ckpt.save(step, exact_weights=step in (2, 4)).result()
            if step == 2:
                ckpt.tag("best")
        assert copies_in(tmp_path) == ["exact-000000000002"]  # step 4 has no tag
        ckpt.restore("best", only="model")
        assert same(model, kept[2])
        ckpt.restore(4, only="model")
        assert not same(model, kept[4])
        ckpt.save(6, exact_weights=True).result()
        ckpt.tag("best", 6)
        assert copies_in(tmp_path) == ["exact-000000000006"]  # the one of step 2 has no tag any more
        remove_tag(Run(tmp_path), "best")
        ckpt.save(7).result()
    assert copies_in(tmp_path) == []


def test_every_reader_gets_the_exact_weights(tmp_path):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, quality=dq.Quality(max_degradation=0.05)) as ckpt:
        train(model, optimizer)
        ckpt.save(1, exact_weights=True).result()
        ckpt.tag("best")
        weights = copied(model)
        train(model, optimizer)
        ckpt.save(2).result()
    other, _ = training()
    dq.load_into(other, tmp_path, step="best")
    assert same(other, weights)
    stored = dq.load(tmp_path, "best")
    assert all(torch.equal(a, b) for a, b in zip(stored["model"].values(), weights, strict=True))
    assert stored["optimizer"]["state"]  # the rest is as in the checkpoint


def test_a_restore_from_exact_weights_corrects_dropped_moments(tmp_path):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, every=1000, quality=dq.Quality(max_degradation=0.05)) as ckpt:
        train(model, optimizer)
        ckpt.save(1000, exact_weights=True).result()
        weights = copied(model)
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, every=1000, quality=dq.Quality(max_degradation=0.05)) as ckpt:
        assert ckpt.restore() == 1000
        assert same(model, weights)
        assert not any(state["exp_avg"].any() for state in optimizer.state.values())
        assert ckpt.save(1001).result().moments_corrected == len(optimizer.state)


def test_replaced_and_deleted_checkpoints_leave_no_copy(tmp_path):
    model, optimizer = training()
    with dq.Checkpointer(
        tmp_path, model, optimizer, quality=dq.Quality(max_degradation=0.05), keep=dq.Keep(last=1)
    ) as ckpt:
        train(model, optimizer)
        ckpt.save(1, exact_weights=True).result()
        ckpt.tag("best")
        train(model, optimizer)
        ckpt.save(1).result()
        assert len(copies_in(tmp_path)) == 1  # of the replaced checkpoint, which has the tag
        ckpt.save(2, exact_weights=True).result()
        ckpt.tag("best")
        ckpt.save(3).result()
        ckpt.tag("best")
        ckpt.save(4).result()
    assert copies_in(tmp_path) == []
    assert Run(tmp_path).steps() == [3, 4]


@pytest.mark.parametrize("options", [{"quality": "lossless"}, {"keep": dq.Keep(lossless_copy=True)}])
def test_where_weights_are_exact_already_nothing_is_added(tmp_path, options):
    model, optimizer = training()
    with dq.Checkpointer(tmp_path, model, optimizer, **options) as ckpt:
        train(model, optimizer)
        ckpt.save(1, exact_weights=True).result()
        ckpt.tag("best")
        ckpt.save(2).result()
    assert copies_in(tmp_path) == (["exact-000000000002"] if "keep" in options else [])
