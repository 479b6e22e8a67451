"""The training of ``real_size.py``: a GPT on words of Shakespeare, in a process that may be killed and started again.

``python benchmarks/real_size_training.py ORDERS`` is called by ``real_size_runs.py``. It prints lines of JSON:

- ``{"restored", "seconds", "cpu", "peak"}`` once, with dynaquant: the step from which it goes on;
- ``{"step", "loss", "seconds", "cpu", "peak"}`` after each step, with the CPU seconds of the thread that trains;
- ``{"save", "blocked", "blocked_cpu", "disk", "cpu", "bytes", "peak"}`` when a checkpoint is on the disk;
- ``{"final", "records", "weights"}`` at the end;
- ``{"loaded", "cpu"}``, the seconds that PyTorch takes to load a checkpoint.

Seconds are wall time; ``cpu`` is that of all threads; ``peak`` is the largest resident memory of the process so far.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from memory import peak_memory
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from workloads import gpt_loss, key_of, text_of

import dynaquant as dq
from dynaquant.demo.models import GPT
from dynaquant.options import QualityName

BY_TORCH = "torch.save"
"""Saves by ``torch.save`` and fsync, in place of dynaquant and one of its qualities."""
HELD_OUT = 0.1
"""The part of the text, at its end, that no training sees."""


@dataclass(frozen=True)
class Training:
    """What is trained. batch: windows of ``context`` tokens in a step. warm_up: the share of steps until the full rate.

    every: steps between checkpoints. metric: batches of held-out text that a search evaluates.
    """

    data: str
    steps: int
    every: int = 20
    seed: int = 0
    vocabulary: int = 8192
    context: int = 128
    batch: int = 4
    width: int = 512
    layers: int = 9
    heads: int = 8
    rate: float = 6e-4
    warm_up: float = 0.1
    metric: int = 8

    def model(self) -> GPT:
        """Return the model at the first step."""
        torch.manual_seed(self.seed)
        return GPT(self.vocabulary, self.context, self.width, self.layers, self.heads)

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step as a share of the full one: a linear rise, then half a cosine."""
        rise = max(round(self.warm_up * self.steps), 1)
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(self.steps - rise, 1)))


def tokens_of(training: Training, cache: Path) -> tuple[Tensor, Tensor]:
    """Return the text as ids of byte pairs, int64: the part to train on and the part that is held out.

    The vocabulary is made of the first part. The cache folder keeps both.
    """
    text = text_of(Path(training.data))
    file = cache / f"real_size-tokens-{key_of(text, training.vocabulary)}.pt"
    if not file.exists():
        split = int((1 - HELD_OUT) * len(text))
        parts = text[:split], text[split:]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=training.vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(parts[:1], trainer)
        unfinished = file.with_suffix(".unfinished")
        torch.save([torch.tensor(tokenizer.encode(part).ids) for part in parts], unfinished)
        unfinished.replace(file)
    train, held_out = torch.load(file)
    return train, held_out


def windows(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return windows of ``context`` tokens and the one that follows, (len(starts), context + 1)."""
    return tokens[starts[:, None] + torch.arange(context + 1)]


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch in nats per token."""
    return gpt_loss(model, ids[:, :-1], ids[:, 1:])


class Run:
    """A training in this process: model, AdamW, schedule, and the generator that draws batches."""

    def __init__(self, training: Training, cache: Path) -> None:
        self.training = training
        self.tokens, self.held_out = tokens_of(training, cache)
        self.model = training.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), training.rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, training.rate_at)
        self.order = torch.Generator().manual_seed(training.seed)

    def step(self) -> float:
        """Train for a step. Returns the loss of its batch."""
        training = self.training
        last = len(self.tokens) - training.context
        starts = torch.randint(last, (training.batch,), generator=self.order)
        loss = loss_of(self.model, windows(self.tokens, starts, training.context))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def metric(self) -> dq.LossOn:
        """Return the metric of searches: the loss on held-out batches, spread over the text."""
        training = self.training
        last = len(self.held_out) - training.context - 1
        starts = torch.linspace(0, last, training.metric * training.batch).long()
        batches = torch.split(windows(self.held_out, starts, training.context), training.batch)
        return dq.LossOn(batches, loss_of)

    @torch.no_grad()
    def final(self) -> float:
        """Return the loss on the whole held-out part, in nats per token."""
        context = self.training.context
        starts = torch.arange(0, len(self.held_out) - context, context)
        total = 0.0
        self.model.eval()
        for ids in torch.split(windows(self.held_out, starts, context), self.training.batch):
            total += loss_of(self.model, ids).item() * len(ids)
        return total / len(starts)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint of PyTorch holds."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "order": self.order.get_state(),
            "random": torch.get_rng_state(),
        }

    def load(self, file: Path) -> None:
        """Take the state of a checkpoint of PyTorch."""
        found = torch.load(file)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.scheduler.load_state_dict(found["scheduler"])
        self.order.set_state(found["order"])
        torch.set_rng_state(found["random"])

    def checkpointer(self, folder: Path, quality: QualityName) -> dq.Checkpointer:
        """Return dynaquant as the README recommends it."""
        return dq.Checkpointer(
            folder,
            self.model,
            self.optimizer,
            extras={"scheduler": self.scheduler, "order": self.order},
            evaluate=self.metric(),
            quality=quality,
            every=self.training.every,
        )


class Meter:
    """Measures saves. tell: prints a line of JSON."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._main = time.pthread_getcpuclockid(threading.get_ident())

    def _beside(self) -> float:
        """Return the CPU seconds of all threads beside the one that trains."""
        return time.process_time() - time.clock_gettime(self._main)

    def by_torch(self, run: Run, file: Path, step: int) -> None:
        """Save by ``torch.save``, over the last checkpoint."""
        began, cpu = time.perf_counter(), time.process_time()
        with file.open("wb") as stream:
            torch.save(run.state(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        seconds, cpu, size = time.perf_counter() - began, time.process_time() - cpu, file.stat().st_size
        self._report(step, blocked=seconds, blocked_cpu=cpu, disk=seconds, cpu=cpu, bytes=size)

    def by_dynaquant(self, checkpointer: dq.Checkpointer, step: int) -> None:
        """Save by dynaquant. The writing thread reports when the checkpoint is on the disk."""
        began, cpu = time.perf_counter(), time.process_time()
        saving = checkpointer.save(step)
        blocked, cpu, beside = time.perf_counter() - began, time.process_time() - cpu, self._beside()

        def report(saved: Any) -> None:
            seconds, total = time.perf_counter() - began, cpu + self._beside() - beside
            size = saved.result().total.stored
            self._report(step, blocked=blocked, blocked_cpu=cpu, disk=seconds, cpu=total, bytes=size)

        saving.add_done_callback(report)

    def _report(self, step: int, **measured: float) -> None:
        self._tell(save=step, **measured, peak=peak_memory())


def train(training: Training, cache: Path, folder: Path, saving: str | None, kill: int | None) -> None:
    """Train, or go on with what the folder has. saving: BY_TORCH or a quality. kill: the last step of this process."""
    printing = threading.Lock()

    def tell(**line: Any) -> None:
        with printing:  # the writing thread reports as well
            print(json.dumps(line), flush=True)

    run, meter, step, checkpointer = Run(training, cache), Meter(tell), 0, None
    save: Callable[[int], None] | None = None
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if saving == BY_TORCH:
            save = partial(meter.by_torch, run, folder / "state.pt")
        elif saving is not None:
            quality = next(name for name in get_args(QualityName) if name == saving)
            checkpointer = stack.enter_context(run.checkpointer(folder / "run", quality))
            began, cpu = time.perf_counter(), time.process_time()
            step = checkpointer.restore() or 0
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            tell(restored=step, seconds=seconds, cpu=cpu, peak=peak_memory())
            save = partial(meter.by_dynaquant, checkpointer)
        while step < training.steps:
            began, cpu = time.perf_counter(), time.thread_time()
            loss = run.step()
            seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
            step += 1
            tell(step=step, loss=loss, seconds=seconds, cpu=cpu, peak=peak_memory())
            if step == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if save is not None and step % training.every == 0:
                save(step)
        if checkpointer is not None:
            checkpointer.wait()
            records = [_summary(record) for record in checkpointer.records()]
    tell(final=run.final(), records=records, weights=sum(weight.numel() for weight in run.model.parameters()))


def _summary(record: dq.Record) -> dict[str, Any]:
    configuration = None if record.configuration is None else asdict(record.configuration)
    return {
        "step": record.step,
        "parent": record.parent,
        "raw": record.total.raw,
        "stored": record.total.stored,
        "roles": {name: asdict(size) for name, size in record.roles.items()},
        "configuration": configuration,
        "search": record.search,
        "limit": record.limit,
        "degradation": record.degradation,
        "equivalents": record.equivalents,
        "trials": len(record.trials),
        "seconds": record.seconds,
        "notes": record.notes,
    }


def load(training: Training, cache: Path, folder: Path) -> None:
    """Measure how long PyTorch takes to load its last checkpoint into a training."""
    run = Run(training, cache)
    began, cpu = time.perf_counter(), time.process_time()
    run.load(folder / "state.pt")
    print(json.dumps({"loaded": time.perf_counter() - began, "cpu": time.process_time() - cpu}))


def main() -> None:
    torch.set_num_threads(1)
    orders = json.loads(sys.argv[1])
    training, cache, folder = Training(**orders["training"]), Path(orders["cache"]), Path(orders["folder"])
    if orders["action"] == "load":
        load(training, cache, folder)
    else:
        train(training, cache, folder, orders["saving"], orders["kill"])


if __name__ == "__main__":
    main()
