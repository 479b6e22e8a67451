"""Train a model of GPT-2's size on an accelerator, and measure what its checkpoints cost there.

    python benchmarks/gpu.py [--device cuda] [--size gpt2] [--steps 2000] [--every 100] [--crashes 3] [--out FOLDER]

Needs nothing but this repository and a device. The weights are bfloat16, with float32 master weights that AdamW
updates. The text is drawn from a random Markov chain over as many tokens as GPT-2 has. It is measured

- how long a save blocks training and when it is on the disk: dynaquant with a metric on batches, without one, and
  without loss, ``torch.save``, DCP's ``save`` and ``async_save``, one after another in the same training;
- how long a restore takes, and how much memory of the device saves take;
- how many bytes a save brings from the device to the host, by PyTorch's profiler (CUDA only);
- how much longer steps take while a Checkpointer is open;
- how long histograms, quantiles and clusters of 100 million values take, beside PyTorch's operations, and CuPy's if it
  is installed;
- where a training with crashes ends, beside the same training without.

``--device cpu --size tiny`` shows within a minute that everything works. Results are printed as they come; with
``--out``, they are also written as JSON and as a page.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_training import SIZES, Size, Training, synchronize
from results import Table, machine, publish, sentence, show
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from dynaquant.engine.quantize.kmeans import codebook
from dynaquant.engine.tensors.log_histogram import LogHistogram

CLUSTERS = 16
SHARES = 0.1, 0.995
"""Of the quantiles."""

SAVES = 3
"""By each method. The first one warms up."""

Saver = Callable[[int], Callable[[], object]]
"""Begins to save a step; returns a function that waits until the checkpoint is on the disk."""

OWN: dict[str, dict[str, Any]] = {
    "dynaquant": {},
    "dynaquant, no metric": {"metric": False},
    "dynaquant, lossless": {"metric": False, "quality": "lossless"},
}
"""Arguments of ``Training.checkpointer``."""
METHODS = *OWN, "torch.save", "DCP", "DCP async_save"


@contextmanager
def saver(method: str, training: Training, folder: Path) -> Iterator[Saver]:
    """Open a method of saving."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is why ``no_dist`` is given
    if method in OWN:
        with training.checkpointer(folder, **OWN[method]) as checkpointer:
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


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds an action takes, on the device, too."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def measure_saves(training: Training, every: int, scratch: Path) -> dict[str, dict[str, float]]:
    """Return for each method the median seconds that saves block and take, and the bytes on the disk of the last.

    Memory: the peak of what saves take on the device, in bytes.
    """
    found = {}
    for method in METHODS:
        folder = scratch / method
        folder.mkdir()
        blocked, whole, sizes, taken = [], [], [0], [0]
        with saver(method, training, folder) as save:
            for number in range(1, SAVES + 1):
                training.steps(every)
                before = start_of_memory()
                began = time.perf_counter()
                wait = save(number)
                blocked.append(time.perf_counter() - began)
                wait()
                whole.append(time.perf_counter() - began)
                taken.append(0 if before is None else torch.cuda.max_memory_allocated() - before)
                sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        found[method] = {
            "blocked": statistics.median(blocked[1:]),
            "on disk": statistics.median(whole[1:]),
            "bytes": sizes[-1] - sizes[-2],
            "memory": max(taken),
        }
    return found


def start_of_memory() -> int | None:
    """Return the bytes that are allocated on the device, and measure the peak from here; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure_restores(training: Training, device: str, scratch: Path) -> dict[str, float]:
    """Return the median seconds of restores of the last checkpoint, whose files are in the system's cache."""

    def median(action: Callable[[], object]) -> float:
        return statistics.median(timed(action) for _ in range(3))

    found = {}
    for method, options in OWN.items():
        with training.checkpointer(scratch / method, **options) as checkpointer:
            found[method] = median(checkpointer.restore)
    file = scratch / "torch.save" / f"{SAVES}.pt"
    found["torch.load"] = median(lambda: training.load(torch.load(file, map_location=device)))
    return found


def crossed(training: Training, folder: Path) -> int | None:
    """Return the bytes that a save copies from the device to the host; None where the profiler does not tell."""
    if not torch.cuda.is_available():
        return None
    with training.checkpointer(folder) as checkpointer:
        checkpointer.save(1).result()
        training.steps(10)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
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
    """Return the seconds of a histogram, of quantiles and clusters from it, and of the same from all values."""
    values = torch.randn(size.values, device=device) * 0.02
    histogram = LogHistogram.of(values)

    def quantiles() -> list[float]:
        found = LogHistogram.of(values)
        return [found.quantile(share) for share in SHARES]

    def sorted_quantiles() -> list[float]:
        ordered = values.abs().sort().values
        return [float(ordered[int(share * (len(ordered) - 1))]) for share in SHARES]

    tasks: dict[str, Callable[[], object]] = {
        "histogram": lambda: LogHistogram.of(values),
        "quantiles: histogram and look-up": quantiles,
        "quantiles: PyTorch's sort": sorted_quantiles,
    }
    if device == "cuda" and importlib.util.find_spec("cupy") is not None:
        import cupy  # type: ignore[import-not-found]  # noqa: PLC0415

        def quantiles_by_cupy() -> None:
            cupy.quantile(cupy.abs(cupy.from_dlpack(values)), cupy.array(SHARES))
            cupy.cuda.Device().synchronize()

        tasks["quantiles: CuPy"] = quantiles_by_cupy
    tasks |= {
        "clusters: histogram and k-means on it": lambda: codebook(LogHistogram.of(values), CLUSTERS),
        "clusters: only k-means on the histogram": lambda: codebook(histogram, CLUSTERS),
        "clusters: Lloyd on all values, 25 rounds": lambda: lloyd(values, CLUSTERS),
    }
    found = {}
    for name, task in tasks.items():
        task()  # warms up
        found[name] = statistics.median(timed(task) for _ in range(3))
    return found


Shown = list[Table | str]


def table_of_saves(found: dict[str, Any]) -> Shown:
    """Return the saves."""
    saves, restores = found["saves"], found["restores"]
    reference = saves["torch.save"]
    rows = []
    for name, each in saves.items():
        seconds = [f"{each[key]:.3f} s ({each[key] / reference[key]:.2f}×)" for key in ("blocked", "on disk")]
        restored = restores.get("torch.load" if name == "torch.save" else name)
        cell = "" if restored is None else f"{restored:.3f} s ({restored / restores['torch.load']:.2f}×)"
        memory = "" if found["crossed"] is None else f"{each['memory'] / 1e6:,.0f} MB"
        rows.append([name, *seconds, cell, f"{each['bytes'] / 1e6:,.1f} MB", memory])
    title = f"A save of {found['weights'] / 1e6:.1f} M weights with AdamW and master weights"
    columns = ["method", "blocks", "on disk after", "restore", "size", "memory of the device"]
    return [Table(title, columns, rows)]


def lines_on_steps(found: dict[str, Any]) -> Shown:
    """Return what a save brings to the host, and how long steps take."""
    shown: Shown = []
    if found["crossed"] is not None:
        per_weight = found["crossed"] / found["weights"]
        shown.append(f"A save brings {found['crossed'] / 1e6:.1f} MB to the host: {per_weight:.2f} bytes for a weight.")
    step = found["step"] * 1000
    return [*shown, f"A step takes {step:.1f} ms, {found['overhead']:.3f} times that with a Checkpointer."]


def table_of_clusters(found: dict[str, Any]) -> Shown:
    """Return histograms, quantiles and clusters."""
    rows = [[name, f"{value * 1000:.1f} ms"] for name, value in found["clusters"].items()]
    return [Table(f"{found['values']:,} values", ["what", "time"], rows)]


def line_on_crashes(found: dict[str, Any]) -> Shown:
    """Return where the trainings end."""
    worse = found["crashed"] / found["undisturbed"] - 1
    steps, crashes = found["steps"], found["crashes"]
    return [
        f"Held-out loss after {steps} steps: {found['undisturbed']:.4f} without crashes, {found['crashed']:.4f} with "
        f"{crashes} ({worse:+.2%})."
    ]


def measure(
    size: Size, device: str, steps: int, every: int, crashes: int, show_more: Callable[[Shown, dict[str, Any]], object]
) -> dict[str, Any]:
    """Return all figures. show_more: is given what there is to show, as soon as it is known, and all figures so far."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        training = Training(size, device)
        training.steps(3)  # warms up
        weights = sum(weight.numel() for weight in training.weights)
        found: dict[str, Any] = {"weights": weights, "values": size.values, "steps": steps, "crashes": crashes}
        found["step"] = training.steps(max(every // 2, 2))
        found["crossed"] = crossed(training, scratch / "crossed")
        found["saves"] = measure_saves(training, every, scratch)
        found["restores"] = measure_restores(training, device, scratch)
        show_more(table_of_saves(found), found)
        found["overhead"] = overhead(training, max(every // 4, 2), scratch / "overhead")
        show_more(lines_on_steps(found), found)
        del training
        found["clusters"] = measure_clusters(size, device)
        show_more(table_of_clusters(found), found)
        found["undisturbed"], found["crashed"] = disturbed(size, device, steps, every, crashes, scratch / "crashes")
        show_more(line_on_crashes(found), found)
    return found


def page(shown: Shown, command: str, every: int, described: str) -> str:
    """Return the page."""
    parts = [each.in_markdown() if isinstance(each, Table) else each for each in shown]
    together = "\n\n".join(parts)
    return f"""# On a GPU

```
{command}
```

{together}

- *Blocks* and *on disk after* are also given as multiples of `torch.save` with fsync; *restore* as a multiple of
  `torch.load` to the device and `load_state_dict`, with files in the system's cache. It is the third checkpoint, and
  dynaquant's default reads all three. Saves with a metric include its evaluations.
- *Memory of the device* is the peak of what a save allocates there.
- Quantiles by dynaquant take the histogram and two look-ups on the host.
- Weights are bfloat16, with float32 master weights; the text is drawn from a Markov chain. Saves are {every}
  steps apart.

{described}
"""


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--steps", type=int, default=2000, help="of the training with crashes")
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--crashes", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md")
    arguments = parser.parse_args()
    steps, every, crashes = arguments.steps, arguments.every, arguments.crashes
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    described = f"Device: {device}. {sentence(machine('torch'))}"
    chosen = f"--device {arguments.device} --size {arguments.size} --steps {steps} --every {every} --crashes {crashes}"
    command = f"python benchmarks/gpu.py {chosen} --out docs/results"
    together: Shown = []

    def show_more(new: Shown, found: dict[str, Any]) -> None:
        together.extend(new)
        show(*new, width=130)
        if arguments.out is not None:  # what is known stays if the rest is interrupted
            publish(arguments.out, "gpu", {"device": device, **found}, None, page(together, command, every, described))

    found = measure(SIZES[arguments.size], arguments.device, steps, every, crashes, show_more)
    assert math.isfinite(found["crashed"])
    show(described, width=130)


if __name__ == "__main__":
    main()
