"""The benchmark of tiny losses: lossless checkpoints disturb nothing, and the others are restored as often."""

import pytest
import tiny_loss


@pytest.mark.parametrize("kind", tiny_loss.TRAININGS)
def test_a_lossless_training_ends_as_an_undisturbed_one(kind):
    steps = 8 * kind.every
    end, raw, stored = tiny_loss.restored(kind, 0, steps, tiny_loss.VARIANTS["lossless"])
    assert end == tiny_loss.undisturbed(kind, 0, steps)
    assert raw > stored > 0
