"""Compare saving and restoring of a whole Adam state: dynaquant with each preset, and other formats.

    python benchmarks/throughput.py [--values 100000000 300000000] [--threads 1]

Every method has its own process. It saves three consecutive checkpoints. The third save is measured, after the process
has got its memory from the system, and a restore of the second checkpoint, which needs one parent if the method has
parents. The state is synthetic (``synthetic.py``), so it can have any size.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import options
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from memory import memory_now, peak_memory, stored_in
from peers.archives import PEERS, Peer
from peers.managers import MANAGERS, Manager, Session, Wait
from results import Table, machine, plain_ticks, publish, sentence
from rich.console import Console
from rich.progress import track
from synthetic import adam_state, advance, named_tensors
from torch import nn

import dynaquant as dq
from dynaquant.engine.tensors.hashing import tensor_hash

SIZES = (100_000_000, 300_000_000)
DYNAQUANT: dict[str, dict[str, Any]] = {
    "dynaquant lossless": {"quality": "lossless"},
    "dynaquant high": {"quality": "high"},
    "dynaquant balanced": {"quality": "balanced"},
    "dynaquant small": {"quality": "small"},
    "dynaquant published": {"quality": dq.Quality(method="published")},
}
"""Arguments of a Checkpointer by the name of the method."""
SEED = 0


@dataclass(frozen=True)
class Job:
    """One method at one size. values: float32 values of weights and moments together."""

    method: str
    values: int
    threads: int
    scratch: Path


@dataclass(frozen=True)
class Row:
    """Results of a method. Sizes and memory are in bytes, times in seconds.

    raw, stored: of the third checkpoint. blocking, saving: until training goes on, and until it is on the disk.
    saving_memory, restoring_memory: peak memory of the process above that before the first save.
    exact: whether every tensor came back bit for bit.
    """

    method: str
    values: int
    raw: int
    stored: int
    blocking: float
    saving: float
    restoring: float
    saving_memory: int
    restoring_memory: int
    exact: bool

    @property
    def ratio(self) -> float:
        return self.raw / self.stored

    def speed(self, seconds: float) -> float:
        """Gigabytes of raw state per second."""
        return self.raw / seconds / 1e9


def checkpointer(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, arguments: dict[str, Any]
) -> Session:
    """Return a session of dynaquant. A restore uses a new Checkpointer, as after a crash."""
    writing = dq.Checkpointer(folder, model, optimizer, **arguments)

    def restore(step: int) -> None:
        with dq.Checkpointer(folder, model, optimizer, **arguments) as reading:
            reading.restore(step)

    return Session(lambda step: writing.save(step).result, writing.close, restore)


def archive(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer, threads: int) -> Session:
    """Return a session of a peer, whose save blocks until it is done."""

    def save(step: int) -> Wait:
        peer.write(named_tensors(model, optimizer), folder / str(step), threads)
        return lambda: None

    def restore(step: int) -> None:
        peer.read(named_tensors(model, optimizer), folder / str(step), threads)

    return Session(save, lambda: None, restore)


def measure(job: Job) -> Row:
    """Save three times, restore once. Must run in its own process, whose memory is measured."""
    torch.set_num_threads(job.threads)
    generator = torch.Generator().manual_seed(SEED)
    model, optimizer = adam_state(job.values, generator)
    with TemporaryDirectory(dir=job.scratch) as name:
        folder = Path(name)
        resident = memory_now()
        if job.method in DYNAQUANT:
            session = checkpointer(folder, model, optimizer, DYNAQUANT[job.method])
        elif job.method in MANAGERS:
            session = MANAGERS[job.method].open(folder, model, optimizer, job.threads)
        else:
            session = archive(folder, model, optimizer, PEERS[job.method], job.threads)
        session.save(1)()
        advance(optimizer, generator)
        hashes, raw = contents(model, optimizer)
        session.save(2)()
        advance(optimizer, generator)
        before = stored_in(folder)

        memory_now()
        start = perf_counter()
        wait = session.save(3)
        blocking = perf_counter() - start
        wait()
        saving = perf_counter() - start
        saving_memory = peak_memory() - resident
        stored = stored_in(folder) - before
        session.close()

        erase(model, optimizer)
        forget_files(folder)
        memory_now()
        start = perf_counter()
        session.restore(2)
        restoring = perf_counter() - start
        restoring_memory = peak_memory() - resident
        exact = contents(model, optimizer)[0] == hashes
    return Row(job.method, job.values, raw, stored, blocking, saving, restoring, saving_memory, restoring_memory, exact)


def measured(job: Job) -> Row:
    """Return the result of ``measure`` in a new process."""
    # Forked from a process that has only done the imports, which take seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dynaquant", "matplotlib.figure", "torch._dynamo", "torch.distributed.checkpoint"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, job).result()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, str], int]:
    """Return the hash of every tensor of the state, and the bytes of all."""
    tensors = named_tensors(model, optimizer)
    hashes = {name: tensor_hash(tensor) for name, tensor in tensors.items()}
    return hashes, sum(tensor.nbytes for tensor in tensors.values())


def erase(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set all values to zero, so that what is there after a restore comes from the disk."""
    for tensor in named_tensors(model, optimizer).values():
        tensor.zero_()


def forget_files(folder: Path) -> None:
    """Ask the system to drop a folder's files from its cache, so that a restore has to read them."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def table(rows: list[Row]) -> Table:
    """Return the table of all methods at one size."""
    columns = [
        "method",
        "ratio",
        "save, blocking",
        "save, total",
        "restore",
        "memory, save",
        "memory, restore",
        "exact",
    ]
    cells = [
        [
            row.method,
            f"{row.ratio:.2f}×",
            *(f"{row.speed(seconds):.2f}" for seconds in (row.blocking, row.saving, row.restoring)),
            *(f"{memory / row.raw:.0%}" for memory in (row.saving_memory, row.restoring_memory)),
            "yes" if row.exact else "no",
        ]
        for row in rows
    ]
    return Table(f"{rows[0].values:,} values, {rows[0].raw / 1e9:.2f} GB: GB/s of raw state", columns, cells)


def plot(rows: list[Row], file: Path) -> None:
    """Draw ratio against the speed of saves and restores: dynaquant in red, a larger state with a larger marker."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    saves, restores = figure.subplots(1, 2, sharey=True)
    _scatter(saves, rows, [row.speed(row.saving) for row in rows])
    _scatter(restores, rows, [row.speed(row.restoring) for row in rows])
    saves.set(title="save, until it is on the disk (red: dynaquant)", ylabel="times smaller")
    restores.set(title="restore")
    figure.savefig(file, dpi=130)


def _scatter(axes: Axes, rows: list[Row], speeds: list[float]) -> None:
    sizes = sorted({row.values for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="GB/s of raw state")
    heights = cycle((5, 16, 27, 38, -14, -25))  # most peers have about the same ratio
    for row, speed in sorted(zip(rows, speeds, strict=True), key=lambda pair: pair[1]):
        ours = row.method in DYNAQUANT
        color = "tab:red" if ours else "tab:blue"
        axes.scatter(speed, row.ratio, s=25 + 45 * sizes.index(row.values), color=color, alpha=0.7)
        if row.values == sizes[-1]:
            label, above = row.method.removeprefix("dynaquant "), 3 if ours else next(heights)
            axes.annotate(label, (speed, row.ratio), (6, above), textcoords="offset points", fontsize=8, color=color)
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    axes.margins(0.12)
    axes.grid(alpha=0.3)


NOTES = """\
- Every method stores the same state: weights and both moments of Adam in float32, in the shapes of a transformer. It is
  synthetic, with spreads like those of a small GPT in training. Between two checkpoints, weights moved by 0.1 to 1 %
  and first moments are new. The third save of a process is measured: the first two also wait for memory from the
  system, which can take longer than the save itself. The second checkpoint is restored. dynaquant conditions it on the
  first one and decodes both, and so does [moonclip](../../benchmarks/peers/managers.py). The others use only one.
- *ratio*: raw bytes over stored bytes of this state. In a real training, dynaquant's lossy ratios are far lower
  ([measured](failure_recovery.md)). The ratio of a single save can be low: where second moments
  reach their tolerance, they take another form, once, and its first levels have no parent. *exact*: every tensor came
  back bit for bit. dynaquant had no metric, so its times contain no evaluations.
- Speeds are GB/s of raw state. *blocking* is the time until training may change the weights. dynaquant, moonclip and
  torch_checkpointing go on in the background. There dynaquant also reads its file back and compares it before it
  commits, which no other method does. torch_checkpointing returns before its copy is done: a forward and a backward
  pass may run meanwhile, but the time here includes the copy. *total* ends when the data are on the disk: fsync is
  included for all. Restores fill the tensors of the model and the optimizer. Before each, the system was asked to drop
  the files from its cache.
- *memory*: peak resident memory above that before the first save, in percent of the state. It includes mapped files,
  and what dynaquant and moonclip keep of the last checkpoint. The process that writes for torch_checkpointing does not
  count.
- All methods have the same cores and may use as many threads. zstd decompresses with one thread, and pcodec's Python
  package always uses one. ZipNN, blosc2 and pcodec compress tensor by tensor.
"""


def page(tables: list[Table], missing: list[str], picture: str, command: str, described: dict[str, str | int]) -> str:
    parts = [
        "# Throughput",
        f"```\nmake benchmark-setup\n{command}\n```",
        sentence(described),
        f"![ratio against GB/s]({picture})",
        *(shown.in_markdown() for shown in tables),
        *missing,
        "## How to read it",
        NOTES.rstrip(),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = options.parser(__doc__, data=None)
    parser.add_argument("--values", type=int, nargs="+", help="weights and moments together")
    parser.add_argument("--threads", type=int, default=1, help="cores and threads of every method")
    arguments = options.parse(parser)
    arguments.values = arguments.values or ([1_000_000] if arguments.quick else list(SIZES))

    # Child processes inherit the cores, and libraries size their thread pools by them.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    console = Console()
    console.width = max(console.width, 130)
    others: dict[str, Peer | Manager] = {**MANAGERS, **PEERS}
    missing = [
        f"{name} skipped: {peer.package} is not installed." for name, peer in others.items() if not peer.installed
    ]
    for line in missing:
        console.print(line)
    methods = [*DYNAQUANT, *(name for name, peer in others.items() if peer.installed)]
    jobs = [Job(name, size, arguments.threads, arguments.cache) for size in arguments.values for name in methods]
    rows = []
    for job in track(jobs, description="measuring", console=console):
        try:
            rows.append(measured(job))
        except Exception as error:  # keeps the results of the others, which took long
            missing.append(f"{job.method} failed at {job.values:,} values: {error!r}.")
            console.print(missing[-1])
    tables = [table(found) for size in arguments.values if (found := [row for row in rows if row.values == size])]
    for shown in tables:
        console.print(shown.on_screen())

    described = machine("numpy", *sorted({peer.package for peer in others.values() if peer.installed}))
    results = {"machine": described, "threads": arguments.threads, "rows": [asdict(row) for row in rows]}
    sizes = " ".join(map(str, arguments.values))
    command = f".venv/bin/python benchmarks/throughput.py --values {sizes} --threads {arguments.threads}"
    text = page(tables, missing, "throughput.png", command, described)
    publish(arguments.out, "throughput", results, lambda file: plot(rows, file), text)


if __name__ == "__main__":
    main()
