"""A checkpoint of tensors that were separate does not fit a model in which they are one, unless they are equal."""

import pytest
import torch
from torch import nn

import dynaquant as dq


class Language(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def restore(model, folder, **options):
    with dq.Checkpointer(folder, model, quality="lossless") as ckpt:
        ckpt.restore(only="model", **options)
        return ckpt.not_restored


LOADS = {
    "restore": restore,
    "load_into": dq.load_into,
    "follow": lambda model, folder: dq.follow(folder, model).update(),
}


def saved(folder, *models, quality="lossless"):
    with dq.Checkpointer(folder, *models, quality=quality) as ckpt:
        ckpt.save(1)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_different_values_do_not_fit_one_tensor(tmp_path, load, quality):
    saved(tmp_path, Language(tied=False), quality=quality)
    model = Language(tied=True)
    before = model.embed.weight.detach().clone()
    with pytest.raises(dq.StateError, match=r"head.weight and (model\.)?embed.weight are one tensor in the model"):
        load(model, tmp_path)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_equal_values_and_tied_checkpoints_fit(tmp_path, load):
    alike = Language(tied=False)
    alike.head.weight.data.copy_(alike.embed.weight)
    for name, source, target in [
        ("alike", alike, True),
        ("tied", Language(True), True),
        ("untied", Language(True), False),
    ]:
        saved(tmp_path / name, source)
        model = Language(tied=target)
        load(model, tmp_path / name)
        assert torch.equal(model.embed.weight, source.embed.weight)
        assert torch.equal(model.head.weight, source.head.weight)


@pytest.mark.parametrize("load", [restore, dq.load_into], ids=["restore", "load_into"])
def test_without_strict_the_first_is_loaded_and_the_other_named(tmp_path, load):
    source, model = Language(tied=False), Language(tied=True)
    saved(tmp_path, source)
    (left_out,) = load(model, tmp_path, strict=False)
    assert "head.weight" in left_out
    assert torch.equal(model.embed.weight, source.embed.weight)


def test_tensors_that_several_models_share_count_too(tmp_path):
    saved(tmp_path, {"A": Language(False), "B": Language(False)})
    models = {"A": Language(False), "B": Language(False)}
    models["B"].embed.weight = models["A"].embed.weight
    with pytest.raises(dq.StateError, match=r"model\.B\.embed\.weight and model\.A\.embed\.weight are one tensor"):
        restore(models, tmp_path)
    with pytest.raises(dq.StateError, match=r"B\.embed\.weight and A\.embed\.weight are one tensor"):
        dq.load_into(models, tmp_path)
