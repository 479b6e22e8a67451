"""Train a model of GPT-2's size on an accelerator, and measure what its checkpoints cost there.

    python benchmarks/gpu.py [--device cuda] [--size gpt2] [--steps 2000] [--every 100] [--crashes 3] [--out FOLDER]

Needs nothing but this repository and a device. The weights are bfloat16, with float32 master weights that AdamW
updates. The text is drawn from a random Markov chain over as many tokens as GPT-2 has. It is measured

- how long a save blocks training and when it is on the disk: dynaquant with a metric on batches and without,
  ``torch.save``, DCP's ``save`` and ``async_save``, one after another in the same training;
- how many bytes a save brings from the device to the host, by PyTorch's profiler (CUDA only);
- how much longer steps take while a Checkpointer is open;
- where a training with crashes ends, beside the same training without;
- how long histograms and clusters of 100 million values take, beside Lloyd's algorithm by PyTorch operations.

``--device cpu --size tiny`` shows within a minute that everything works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results import Table, machine, sentence, show
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.nn import functional as F

import dynaquant as dq
from dynaquant.demo.models import GPT
from dynaquant.engine.quantize.kmeans import codebook
from dynaquant.engine.tensors.log_histogram import LogHistogram

SUCCESSORS = 16
"""Tokens that may follow a token; each is half as probable as the one before."""
CLUSTERS = 16
BATCHES = 8
"""Held-out batches of the metric."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model, of its batches, and of the values that are clustered."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int
    values: int


SIZES = {
    "gpt2": Size(50_257, 256, 768, 12, 12, 16, 100_000_000),
    "tiny": Size(300, 16, 32, 2, 2, 4, 100_000),
}


class Text:
    """Batches of token ids from a Markov chain, the same for the same seed."""

    def __init__(self, size: Size, device: str, seed: int) -> None:
        self._size, self._device = size, device
        shape = size.vocabulary, SUCCESSORS
        self._successors = torch.randint(size.vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Tensor:
        """Return token ids, int64 (batch, context + 1)."""
        size = self._size
        draws = torch.rand(size.batch, size.context, generator=self._generator)
        choices = (-(1 - draws).log2()).long().clamp(max=SUCCESSORS - 1).to(self._device)
        found = [torch.randint(size.vocabulary, (size.batch,), generator=self._generator).to(self._device)]
        for at in range(size.context):
            found.append(self._successors[found[-1], choices[:, at]])
        return torch.stack(found, dim=1)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch in nats."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Training:
    """A model in bfloat16, its float32 master weights, and AdamW on these."""

    def __init__(self, size: Size, device: str) -> None:
        torch.manual_seed(0)
        self.model = GPT(size.vocabulary, size.context, size.width, size.layers, size.heads).to(device, torch.bfloat16)
        self.weights: list[Tensor] = list(self.model.parameters())
        self.masters = nn.ParameterList(nn.Parameter(weight.detach().float()) for weight in self.weights)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), 3e-4)
        self.text = Text(size, device, 1)
        held_out = Text(size, device, 2)
        self.held_out = [held_out.batch() for _ in range(BATCHES)]

    def step(self) -> None:
        loss_of(self.model, self.text.batch()).backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, list(self.masters))

    def steps(self, count: int) -> float:
        """Return the seconds that a step takes."""
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        synchronize()
        return (time.perf_counter() - began) / count

    def loss(self) -> float:
        with torch.no_grad():
            return statistics.fmean(loss_of(self.model, batch).item() for batch in self.held_out)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "masters": self.masters.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def checkpointer(self, folder: Path, metric: bool = True) -> dq.Checkpointer:
        evaluate = dq.LossOn(self.held_out, loss_of) if metric else None
        extras = {"masters": self.masters, "text": self.text._generator}
        return dq.Checkpointer(folder, self.model, self.optimizer, extras=extras, evaluate=evaluate)


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


Saver = Callable[[int], Callable[[], object]]
"""Begins to save a step; returns a function that waits until the checkpoint is on the disk."""


@contextmanager
def saver(method: str, training: Training, folder: Path) -> Iterator[Saver]:
    """Open a method of saving."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is why ``no_dist`` is given
    if method.startswith("dynaquant"):
        with training.checkpointer(folder, metric=method == "dynaquant") as checkpointer:
            yield lambda step: checkpointer.save(step).result
        return

    def to_file(step: int) -> Callable[[], object]:
        with (folder / f"{step}.pt").open("wb") as file:
            torch.save(training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def to_folder(step: int) -> Callable[[], object]:
        save_with_dcp(training.state(), checkpoint_id=folder / str(step), no_dist=True)
        return lambda: None

    def in_background(step: int) -> Callable[[], object]:
        found: Any = async_save(training.state(), checkpoint_id=folder / str(step), no_dist=True)
        wait: Callable[[], object] = getattr(found, "upload_completion", found).result
        return wait

    savers: dict[str, Saver] = {"torch.save": to_file, "DCP": to_folder, "DCP async_save": in_background}
    yield savers[method]


METHODS = "dynaquant", "dynaquant, no metric", "torch.save", "DCP", "DCP async_save"


def measure_saves(training: Training, every: int, scratch: Path) -> dict[str, dict[str, float]]:
    """Return for each method the median seconds that saves block and take, and the bytes on the disk of the last."""
    found = {}
    for method in METHODS:
        folder = scratch / method
        folder.mkdir()
        blocked, whole, sizes = [], [], [0]
        with saver(method, training, folder) as save:
            for number in range(1, 5):
                training.steps(every)
                began = time.perf_counter()
                wait = save(number)
                blocked.append(time.perf_counter() - began)
                wait()
                whole.append(time.perf_counter() - began)
                sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        later = slice(1, None)  # the first save warms up
        found[method] = {
            "blocked": statistics.median(blocked[later]),
            "on disk": statistics.median(whole[later]),
            "bytes": sizes[-1] - sizes[-2],
        }
    return found


def crossed(training: Training, folder: Path) -> int | None:
    """Return the bytes that a save copies from the device to the host; None where the profiler does not tell."""
    if not torch.cuda.is_available():
        return None
    with training.checkpointer(folder) as checkpointer:
        checkpointer.save(1).result()
        training.steps(10)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            checkpointer.save(2).result()
        trace = folder / "trace.json"
        profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return sum(int(event["args"]["bytes"]) for event in events if event.get("name", "").startswith("Memcpy DtoH"))


def overhead(training: Training, steps: int, folder: Path) -> float:
    """Return how many times as long a step takes while a Checkpointer is open, as a median of alternate turns."""
    ratios = []
    for turn in range(5):
        alone = training.steps(steps)
        with training.checkpointer(folder / str(turn)):
            ratios.append(training.steps(steps) / alone)
    return statistics.median(ratios)


def disturbed(size: Size, device: str, steps: int, every: int, crashes: int, folder: Path) -> tuple[float, float]:
    """Return the held-out loss at the end of a training without crashes, and of the same one with crashes."""
    undisturbed = Training(size, device)
    undisturbed.steps(steps)
    training, lost = Training(size, device), 1 + every // 10
    last = steps // every
    after = {max(last * (i + 1) // (crashes + 1), 1) * every + lost for i in range(crashes)}
    if len(after) < crashes:
        raise SystemExit(f"{steps} steps with a save every {every} are too few for {crashes} crashes")
    checkpointer, step = training.checkpointer(folder), 0
    while step < steps:
        training.step()
        step += 1
        if step % every == 0:
            checkpointer.save(step)
        if step in after:  # everything in memory is lost
            after.remove(step)
            checkpointer.close()
            training = Training(size, device)
            checkpointer = training.checkpointer(folder)
            restored = checkpointer.restore()
            assert restored is not None
            step = restored
    checkpointer.close()
    assert not after, "not all crashes came to pass"
    return undisturbed.loss(), training.loss()


def lloyd(values: Tensor, clusters: int, rounds: int = 25) -> Tensor:
    """Return centres of values by Lloyd's algorithm on all of them."""
    centres = torch.linspace(float(values.min()), float(values.max()), clusters, device=values.device)
    for _ in range(rounds):
        nearest = torch.bucketize(values, (centres[1:] + centres[:-1]) / 2)
        counts = torch.bincount(nearest, minlength=clusters)
        sums = torch.zeros(clusters, device=values.device).index_add_(0, nearest, values)
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), centres).sort().values
    return centres


def measure_clusters(size: Size, device: str) -> dict[str, float]:
    """Return the seconds of a histogram and of clusters from it, and of clusters from all values."""
    values = torch.randn(size.values, device=device) * 0.02

    def seconds(action: Callable[[], object]) -> float:
        action()
        synchronize()
        began = time.perf_counter()
        action()
        synchronize()
        return time.perf_counter() - began

    histogram = LogHistogram.of(values)
    return {
        "histogram": seconds(lambda: LogHistogram.of(values)),
        "clusters of the histogram": seconds(lambda: codebook(histogram, CLUSTERS)),
        "clusters of all values (Lloyd, 25 rounds)": seconds(lambda: lloyd(values, CLUSTERS)),
    }


def measure(size: Size, device: str, steps: int, every: int, crashes: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        training = Training(size, device)
        training.steps(3)  # warms up
        weights = sum(weight.numel() for weight in training.weights)
        found: dict[str, Any] = {"weights": weights, "step": training.steps(max(every // 2, 2))}
        found["saves"] = measure_saves(training, every, scratch)
        found["crossed"] = crossed(training, scratch / "crossed")
        found["overhead"] = overhead(training, max(every // 4, 2), scratch / "overhead")
        del training
        found["undisturbed"], found["crashed"] = disturbed(size, device, steps, every, crashes, scratch / "crashes")
    return found | {"clusters": measure_clusters(size, device)}


def tables(found: dict[str, Any], crashes: int) -> list[Table | str]:
    """Return what was measured, to be shown."""
    reference = found["saves"]["torch.save"]
    rows = []
    for name, each in found["saves"].items():
        seconds = [f"{each[key]:.3f} s ({each[key] / reference[key]:.2f}×)" for key in ("blocked", "on disk")]
        rows.append([name, *seconds, f"{each['bytes'] / 1e6:.1f} MB"])
    title = f"A save of {found['weights'] / 1e6:.1f} M weights with AdamW and master weights"
    shown: list[Table | str] = [Table(title, ["method", "blocks", "on disk after", "size"], rows)]
    if found["crossed"] is not None:
        per_weight = found["crossed"] / found["weights"]
        shown.append(f"A save brings {found['crossed'] / 1e6:.1f} MB to the host: {per_weight:.2f} bytes for a weight.")
    shown.append(f"A step takes {found['step'] * 1000:.1f} ms, {found['overhead']:.3f} times that with a Checkpointer.")
    worse = found["crashed"] / found["undisturbed"] - 1
    shown.append(
        f"Held-out loss at the end: {found['undisturbed']:.4f} without crashes, {found['crashed']:.4f} with {crashes} "
        f"({worse:+.2%})."
    )
    clusters = [[name, f"{value * 1000:.1f} ms"] for name, value in found["clusters"].items()]
    return [*shown, Table("Clusters", ["what", "time"], clusters)]


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--steps", type=int, default=2000, help="of the training with crashes")
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--crashes", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    arguments = parser.parse_args()
    found = measure(SIZES[arguments.size], arguments.device, arguments.steps, arguments.every, arguments.crashes)
    assert math.isfinite(found["crashed"])
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    show(*tables(found, arguments.crashes), f"Device: {device}. {sentence(machine('torch'))}", width=100)
    if arguments.out is not None:
        (arguments.out / "gpu.json").write_text(json.dumps({"device": device, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
