"""TRL's trainers save to a run, and train and log as they do without one."""

import pytest
import torch

from dynaquant.saving.record import record_of
from dynaquant.store.run import Run

pytest.importorskip("trl", reason="TRL is not installed")

from transformers_training import hash_of, history_of
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_training import (
    SETTINGS,
    classifier_of,
    judgements,
    model_of,
    preferences,
    prompts,
    reward,
    texts,
    tokenizer_of,
)

from dynaquant.integrations.transformers import CheckpointMixin

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # TRL's own
]
LOSSLESS = {"quality": "lossless"}


class Supervised(CheckpointMixin, SFTTrainer):
    pass


class Preferring(CheckpointMixin, DPOTrainer):
    pass


class Judging(CheckpointMixin, KTOTrainer):
    pass


class Rewarding(CheckpointMixin, RewardTrainer):
    pass


class Exploring(CheckpointMixin, GRPOTrainer):
    pass


class LeavingOut(CheckpointMixin, RLOOTrainer):
    pass


SAMPLED = {"num_generations": 4, "max_completion_length": 8}
KINDS = {
    # name: with a run, without one, configuration, model, what else, data, settings, best metric
    "sft": (Supervised, SFTTrainer, SFTConfig, model_of, {}, texts, {}, "eval_mean_token_accuracy"),
    "dpo": (Preferring, DPOTrainer, DPOConfig, model_of, {"ref_model": model_of}, preferences, {}, "rewards/margins"),
    "kto": (Judging, KTOTrainer, KTOConfig, model_of, {"ref_model": model_of}, judgements, {}, "rewards/margins"),
    "reward": (Rewarding, RewardTrainer, RewardConfig, classifier_of, {}, preferences, {}, "eval_max_reward"),
    "grpo": (Exploring, GRPOTrainer, GRPOConfig, model_of, {}, prompts, SAMPLED, "eval_reward"),
    "rloo": (LeavingOut, RLOOTrainer, RLOOConfig, model_of, {}, prompts, {**SAMPLED, "beta": 0.0}, "eval_reward"),
}
SAMPLING = ("grpo", "rloo")
"""Those whose loss is of answers that they sample."""


def trainer_of(kind, folder, dynaquant=None, **changes):
    """Return a trainer of TRL; with ``dynaquant``, one that saves to a run."""
    own, without, configuration, model, models, data, settings, best = KINDS[kind]
    changes = {"metric_for_best_model": best, "greater_is_better": True, "load_best_model_at_end": True, **changes}
    return (without if dynaquant is None else own)(
        model=model(),
        args=configuration(str(folder), **{**SETTINGS, **settings, **changes}),
        train_dataset=data(48),
        eval_dataset=data(16, 9),
        processing_class=tokenizer_of(),
        **{name: make() for name, make in models.items()},
        **({"reward_funcs": reward} if kind in SAMPLING else {}),
        **({} if dynaquant is None else {"dynaquant": dynaquant}),
    )


def logs_of(trainer) -> list[dict[str, float]]:
    return [{key: value for key, value in entry.items() if key != "step_time"} for entry in history_of(trainer)]


def judges_of(folder) -> set[str]:
    return {record_of(file).judged_by for file in Run(folder / "dynaquant").files()[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_leaves_no_trace(tmp_path, kind):
    alone = trainer_of(kind, tmp_path / "alone")
    alone.train()
    for metric, options in (("default", {}), ("best", {"evaluate": KINDS[kind][-1]})):
        own = trainer_of(kind, tmp_path / metric, options)
        own.train()
        assert logs_of(own) == logs_of(alone)
        assert own.state.best_metric == alone.state.best_metric
        assert own.state.best_global_step == alone.state.best_global_step
        unmeasured = metric == "default" and kind in SAMPLING
        assert judges_of(tmp_path / metric) == {"fisher distortion" if unmeasured else "evaluate"}


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_a_training_that_is_resumed_ends_the_same(tmp_path, kind):
    changes = {"load_best_model_at_end": False}
    undisturbed = trainer_of(kind, tmp_path, LOSSLESS, **changes)
    undisturbed.train()
    resumed = trainer_of(kind, tmp_path, LOSSLESS, **changes)
    resumed.train(resume_from_checkpoint=6)
    assert hash_of(resumed.model) == hash_of(undisturbed.model)


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_training_with_sampled_answers_goes_on(tmp_path, kind):
    first = trainer_of(kind, tmp_path, {})
    first.train()
    again = trainer_of(kind, tmp_path, {}, max_steps=15)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 15
    assert all(torch.isfinite(parameter).all() for parameter in again.model.parameters())


def test_the_log_says_why_sampled_answers_are_no_metric(tmp_path, caplog):
    trainer_of("grpo", tmp_path, {}, max_steps=3).train()
    assert "the loss of Exploring depends on answers that it samples" in caplog.text
    assert "dynaquant={'evaluate': 'reward'}" in caplog.text
