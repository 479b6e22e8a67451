"""Trainings with torchtitan on a CPU. For every line of input, a JSON object, it forks the ranks of one training.

It prints what the training logs, and ``ended`` with the exit status of the rank that ended first with an error, or 0.
torchtitan is made for GPUs: ``on_cpu`` replaces what asks for one. All else is torchtitan as it is installed.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, models
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class CpuModule:
    """``torch.cpu``, with what torchtitan asks of the module of an accelerator besides."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name, self._nothing)

    @staticmethod
    def _nothing(*_):
        return {}

    def get_device_name(self, _=None):
        return "CPU"

    def current_device(self):
        return 0

    def get_device_properties(self, _=None):
        return types.SimpleNamespace(total_memory=1 << 33, name="CPU")


def on_cpu():
    """Before torchtitan's trainer is imported."""
    utils.device_type, utils.device_module = "cpu", CpuModule()
    utils.get_local_device = lambda: torch.device("cpu")


on_cpu()

from torchtitan.components.checkpointer import CheckpointManager as TitanManager  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, DatasetConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402
from torchtitan_config import llama3_small  # noqa: E402

from dynaquant.integrations.torchtitan import CheckpointManager  # noqa: E402

distributed.set_pg_timeouts = lambda **_: None  # it calls what PyTorch has from 2.14 on


@dataclass
class Training:
    """What to train. ``checkpoint``: options of the manager, and ``own``: whether it is torchtitan's; None: no manager.

    kill_at: the step in which rank 0 is killed.
    """

    folder: str
    checkpoint: dict | None = field(default_factory=dict)
    own: bool = False
    steps: int = 12
    kill_at: int | None = None
    ranks: int = 1
    tensor_parallel: int = 1
    validator: bool = True
    seed: int = 1


def say(word, value):
    os.write(1, f"{word} {json.dumps(value)}\n".encode())  # in one piece, also when ranks write at once


def text_and_tokenizer(folder):
    """Write the text and a tokenizer of characters."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    vocabulary |= {"<unk>": 95, "<|begin_of_text|>": 96, "<|end_of_text|>": 97}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    (folder / "text").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast"}))
    rows = [{"text": f"Row {i} says that {i} times {i} is {i * i}. " * 6} for i in range(200)]
    (folder / "text" / "rows.json").write_text("\n".join(map(json.dumps, rows)))


def config_of(training, assets):
    config = llama3_small()
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # FlexAttention needs a GPU
    config.debug.seed, config.debug.deterministic = training.seed, True
    config.hf_assets_path, config.dump_folder = str(assets), training.folder
    config.training.local_batch_size, config.training.seq_len = 2, 64
    config.training.steps, config.training.disable_cuda_graphs = training.steps, True
    config.metrics.log_freq = 1
    config.dataloader.dataset = config.validator.dataloader.dataset = "rows"
    config.validator.enable, config.validator.steps = training.validator, 2
    config.parallelism.spmd_backend = "partial_dtensor" if training.ranks > 1 else "spmd_types"
    config.parallelism.tensor_parallel_degree = training.tensor_parallel
    manager = TitanManager if training.own else CheckpointManager
    options = {} if training.own else {"interval": 2}
    config.checkpoint = manager.Config(
        **{**options, "enable": training.checkpoint is not None, **(training.checkpoint or {})}
    )
    return config


def train(training, assets):
    torch.set_num_threads(1)
    DATASETS["rows"] = DatasetConfig(
        path=str(assets / "text"),
        loader=lambda path: load_dataset(path, split="train"),
        sample_processor=lambda sample: sample["text"],
    )
    rank = int(os.environ["RANK"])
    log, train_step = MetricsProcessor.log, Trainer.train_step

    def logged(self, step, loss, *others, **named):
        if rank == 0:
            say("step", [step, loss])
        return log(self, step, loss, *others, **named)

    def step_or_die(self, iterator):
        if self.step == training.kill_at and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self, iterator)

    MetricsProcessor.log, Trainer.train_step = logged, step_or_die
    trainer = config_of(training, assets).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that Gloo has
    trainer.train()
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in trainer.model_parts[0].parameters()]
    if rank == 0:
        joined = b"".join(weight.numpy().tobytes() for weight in weights)
        say("weights", hashlib.sha256(joined).hexdigest())
        say("tokens", trainer.ntokens_seen)
    trainer.close()
    torch.distributed.destroy_process_group()


def rank_of(training, assets, rank, port):
    """Run one rank in a forked process, and return its process number."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(training.ranks),
            "MASTER_PORT": port,
        }
        train(training, assets)
        status = 0
    except BaseException as error:
        traceback.print_exc()
        say("error", f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def main(assets):
    text_and_tokenizer(assets)
    for line in sys.stdin:
        training = Training(**json.loads(line))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        running = {rank_of(training, assets, rank, port) for rank in range(training.ranks)}
        ended = 0
        while running:
            child, status = os.wait()
            running.discard(child)
            if status and not ended:
                ended = os.waitstatus_to_exitcode(status)
                for other in running:
                    os.kill(other, signal.SIGKILL)
        say("ended", ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
