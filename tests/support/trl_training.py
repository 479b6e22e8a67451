"""Tiny trainings with TRL: a Llama of one layer, a tokenizer of 64 words, and data that is made here."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)
from where import on_cpu

WORDS = [f"w{number}" for number in range(60)]


def tokenizer_of() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def model_of() -> LlamaForCausalLM:
    """Return a Llama of one layer."""
    set_seed(0)
    return LlamaForCausalLM(_config())


def classifier_of() -> LlamaForSequenceClassification:
    """Return the same with a head that returns one number."""
    set_seed(0)
    return LlamaForSequenceClassification(_config(num_labels=1))


def _config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **changes,
    )


def text(generator: random.Random, stride: int = 1, length: int = 6) -> str:
    """Return words that count from a random one on."""
    first = generator.randrange(60)
    return " ".join(WORDS[(first + stride * i) % 60] for i in range(length))


def texts(number: int, seed: int = 0) -> Dataset:
    """Return texts to learn."""
    generator = random.Random(seed)
    return Dataset.from_list([{"text": text(generator)} for _ in range(number)])


def preferences(number: int, seed: int = 0) -> Dataset:
    """Return prompts with a better and a worse answer."""
    generator = random.Random(seed)
    return Dataset.from_list(
        [
            {"prompt": text(generator), "chosen": " " + text(generator), "rejected": " " + text(generator, stride=7)}
            for _ in range(number)
        ]
    )


def judgements(number: int, seed: int = 0) -> Dataset:
    """Return prompts with answers that are good or bad."""
    generator = random.Random(seed)
    good = [True, False] * (number // 2)
    return Dataset.from_list(
        [
            {"prompt": text(generator), "completion": " " + text(generator, stride=1 if label else 7), "label": label}
            for label in good
        ]
    )


def prompts(number: int, seed: int = 0) -> Dataset:
    """Return prompts to complete."""
    generator = random.Random(seed)
    return Dataset.from_list([{"prompt": text(generator, length=3)} for _ in range(number)])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of even words in each answer."""
    return [sum(int(word[1:]) % 2 == 0 for word in answer.split() if word[0] == "w") / 8 for answer in completions]


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 3e-3,
    "max_steps": 12,
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "logging_steps": 2,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": on_cpu(),
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "seed": 1,
}
