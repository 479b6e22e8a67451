"""Pack a series of torch.save files into a run, and measure its size and how long it takes to open any step.

    make benchmark-setup
    .venv/bin/python benchmarks/series.py --data DIR

Trains the GPT with AdamW, saving model and optimizer as PyTorch does, then calls what `dynaquant pack` calls.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import options
import torch
import workloads
from results import Table, machine, publish, sentence
from rich.console import Console
from rich.progress import track

import dynaquant as dq
from dynaquant.interop.packing import KEYFRAME_EVERY, Packer, pack
from dynaquant.store.run import Run

CHECKPOINTS, EVERY = 100, 2
"""Checkpoints of the series, and training steps between two of them."""


@dataclass(frozen=True)
class Opened:
    """A step of the run.

    stored, raw: bytes of its file and of its torch.save file. chain: files that it is decoded from. seconds,
    one_tensor, torch_load: to load its whole state, one of its tensors, and the torch.save file.
    """

    step: int
    stored: int
    raw: int
    chain: int
    seconds: float
    one_tensor: float
    torch_load: float


def train(folder: Path, data: Path, count: int, every: int) -> dict[int, Path]:
    """Train the GPT. Returns its torch.save files by step."""
    workload = workloads.gpt(data, folder, steps=count * every, seed=0)
    files = {}
    for step in track(range(1, count * every + 1), "training"):
        workload.train_step()
        if step % every == 0:
            files[step] = folder / f"ckpt-{step}.pt"
            state = {"step": step, "model": workload.model.state_dict(), "optimizer": workload.optimizer.state_dict()}
            torch.save(state, files[step])
    return files


def measure(folder: Path, files: dict[int, Path]) -> tuple[float, list[Opened]]:
    """Pack the files and open every step in random order. Returns the seconds to pack, and what each step took."""
    start = time.perf_counter()
    for _ in track(pack(files, folder / "run", Packer()), "packing", total=len(files)):
        pass
    packing = time.perf_counter() - start
    run, opened = Run(folder / "run"), []
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    for step in track([sorted(files)[i] for i in order], "opening every step"):
        start = time.perf_counter()
        state = dq.load(run.folder, step)
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        dq.load(run.folder, step, keys=["blocks.0.up.weight"])
        one = time.perf_counter() - start
        start = time.perf_counter()
        torch.load(files[step], weights_only=True)
        plain = time.perf_counter() - start
        assert state["step"] == step
        file = run.file(step)
        raw = files[step].stat().st_size
        opened.append(Opened(step, file.size, raw, len(run.chain(file)), seconds, one, plain))
    return packing, sorted(opened, key=lambda found: found.step)


def table(packing: float, opened: list[Opened]) -> Table:
    stored, raw = sum(found.stored for found in opened), sum(found.raw for found in opened)
    slowest, mean = max(found.seconds for found in opened), sum(found.seconds for found in opened) / len(opened)
    rows = [
        ["checkpoints", str(len(opened))],
        ["torch.save files", f"{raw / 1e6:.0f} MB"],
        ["packed", f"{stored / 1e6:.1f} MB ({raw / stored:.1f}×)"],
        ["packing, per checkpoint", f"{packing / len(opened):.2f} s"],
        ["opening a step, mean", f"{mean:.2f} s"],
        ["opening a step, slowest", f"{slowest:.2f} s"],
        ["opening one tensor of a step, slowest", f"{max(found.one_tensor for found in opened):.3f} s"],
        ["torch.load, mean", f"{sum(found.torch_load for found in opened) / len(opened):.2f} s"],
        ["files read to open a step, most", str(max(found.chain for found in opened))],
    ]
    return Table("A packed series of GPT checkpoints, quality balanced, no metric", ["", ""], rows)


def draw(opened: list[Opened], path: Path) -> None:
    figure, (sizes, times) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), layout="constrained")
    steps = [found.step for found in opened]
    keyframes = [found.chain == 1 for found in opened]
    sizes.bar(steps, [found.stored / 1e3 for found in opened], width=0.8 * (steps[1] - steps[0]), label="delta")
    first = [found for found, key in zip(opened, keyframes, strict=True) if key]
    width = 0.8 * (steps[1] - steps[0])
    sizes.bar([f.step for f in first], [f.stored / 1e3 for f in first], width=width, color="C1", label="keyframe")
    sizes.set_ylabel("size (kB)")
    sizes.set_title(f"{len(opened)} checkpoints of a GPT, {opened[0].raw / 1e6:.1f} MB each as torch.save files")
    sizes.legend()
    times.plot(steps, [found.seconds for found in opened], label="whole state")
    times.plot(steps, [found.one_tensor for found in opened], label="one tensor")
    times.set_ylabel("seconds to open")
    times.set_xlabel("step")
    times.set_ylim(bottom=0)
    times.legend()
    figure.savefig(path, dpi=120)


def page(shown: Table, described: dict[str, str | int]) -> str:
    return f"""# A packed series of checkpoints

    make benchmark-setup
    .venv/bin/python benchmarks/series.py --data DIR

Model and AdamW state of the GPT (3.2 M weights) are saved with `torch.save` every few steps of a training. What
`dynaquant pack ckpt-*.pt -o run` calls then makes them a run. Every step is opened with `dq.load`, in random order.

{shown.in_markdown()}

![size and seconds to open, by step](series.png)

Every {KEYFRAME_EVERY}th checkpoint stands alone, so opening a step reads {KEYFRAME_EVERY} files at most. The
sensitivity of each tensor comes from Adam's second moments in the files. There is no metric, so an estimate decides
that the checkpoints are good enough.
{sentence(described)}
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data="shakespeare.txt"))
    with tempfile.TemporaryDirectory(dir=arguments.cache) as folder:  # torch.save takes 4 GB
        files = train(Path(folder), arguments.data, 4 if arguments.quick else CHECKPOINTS, EVERY)
        packing, opened = measure(Path(folder), files)
    shown, described = table(packing, opened), machine("torch")
    Console().print(shown.on_screen())
    numbers = {"machine": described, "packing_seconds": packing, "opened": [asdict(found) for found in opened]}
    publish(arguments.out, "series", numbers, lambda file: draw(opened, file), page(shown, described))


if __name__ == "__main__":
    main()
