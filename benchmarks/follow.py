"""Send the weights of a training to another process at every step, and compare with XOR + zstd of the same weights.

    make benchmark-setup
    .venv/bin/python benchmarks/follow.py --data DIR

Trains the GPT with AdamW in float32, at the learning rate of the other benchmarks and at one of reinforcement learning.
After every optimizer step its weights, rounded to bfloat16, are saved to a run; a second process follows the run.
"""

from __future__ import annotations

import copy
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import options
import torch
import workloads
import zstandard
from numpy.typing import NDArray
from results import Table, machine, publish, sentence, show
from rich.progress import track
from torch import nn

import dynaquant as dq
from dynaquant.engine.coding import lossless
from dynaquant.engine.tensors.dtypes import bytes_of

BEFORE, UPDATES = 40, 20
"""Steps before the first update, and updates."""
POLL = 0.005
LEVEL = 3
"""Of zstd."""
LOSSLESS, KEPT, DEFAULT = 'dynaquant, `quality="lossless"`', "the same, `keep=dq.Keep(last=4)`", "dynaquant, default"
CODER = "dynaquant, only the coder of exact values"
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Update:
    """One checkpoint on its way. latency: seconds from the commit until the model has it. made, loaded: CPU seconds.

    made: from ``save`` until the commit; for other methods, to encode. loaded: to load; for others, to decode.
    """

    method: str
    step: int
    size: int
    made: float
    loaded: float
    keyframe: bool = False
    latency: float | None = None


def followed(folder: Path, model: nn.Module, pipe: Connection) -> None:
    """Follow a run until it is told to end, in a process of its own. Sends seconds for each checkpoint."""
    torch.set_num_threads(1)
    follower = dq.follow(folder, model)
    while not pipe.poll(POLL):
        cpu = time.process_time()
        step = follower.update()
        now, cpu = time.time(), time.process_time() - cpu
        if step is not None:
            committed = (folder / f"step-{step:012d}.dqc").stat().st_ctime  # when the file got its name
            digest = sum(int(t.detach().view(torch.int16).long().sum()) for t in model.parameters())
            pipe.send((step, now - committed, cpu, digest))


class Receiver:
    """A process that follows a run."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=followed, args=(folder, copy.deepcopy(model), other), daemon=True)
        self._process.start()

    def wait(self, step: int) -> tuple[float, float, int]:
        """Return the latency, the CPU seconds and the sum of all bits, once it has loaded a step."""
        found, latency, cpu, digest = self._pipe.recv()
        assert found == step
        return latency, cpu, digest

    def end(self) -> None:
        self._pipe.send("end")
        self._process.join()


def xor_zstd(data: Bytes, parent: Bytes) -> list[bytes]:
    return [zstandard.ZstdCompressor(level=LEVEL).compress((data ^ parent).data)]


def xor_zstd_back(frames: list[bytes], parent: Bytes) -> Bytes:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frames[0]), dtype=np.uint8) ^ parent


def planes(data: Bytes, parent: Bytes) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    return [compressor.compress(np.ascontiguousarray(plane).data) for plane in (data ^ parent).reshape(-1, 2).T]


def planes_back(frames: list[bytes], parent: Bytes) -> Bytes:
    out = np.empty((len(parent) // 2, 2), dtype=np.uint8)
    for k, frame in enumerate(frames):
        out[:, k] = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), dtype=np.uint8)
    return out.reshape(-1) ^ parent


def mask(data: Bytes, parent: Bytes) -> list[bytes]:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    difference = data.view(np.uint16) ^ parent.view(np.uint16)
    changed = difference[difference != 0]
    columns = np.ascontiguousarray(changed.view(np.uint8).reshape(-1, 2).T)
    return [compressor.compress(np.packbits(difference != 0).data), *(compressor.compress(c.data) for c in columns)]


def mask_back(frames: list[bytes], parent: Bytes) -> Bytes:
    decompressor = zstandard.ZstdDecompressor()
    bits, low, high = (np.frombuffer(decompressor.decompress(frame), dtype=np.uint8) for frame in frames)
    out = parent.view(np.uint16).copy()
    out[np.unpackbits(bits, count=len(out)).astype(bool)] ^= low | high.astype(np.uint16) << 8
    return out.view(np.uint8)


PEERS: dict[str, tuple[Callable[[Bytes, Bytes], list[bytes]], Callable[[list[bytes], Bytes], Bytes]]] = {
    CODER: (
        lambda data, parent: [lossless.encode(data, 2, parent)],
        lambda frames, parent: lossless.decode(frames[0], len(parent), 2, parent),
    ),
    f"XOR + zstd -{LEVEL}": (xor_zstd, xor_zstd_back),
    f"XOR + byte planes + zstd -{LEVEL}": (planes, planes_back),
    f"mask of changes + XOR of those, byte planes + zstd -{LEVEL}": (mask, mask_back),
}


def by_peers(step: int, before: dict[str, Bytes], after: dict[str, Bytes]) -> list[Update]:
    """Code the weights given those of the step before, tensor by tensor, and decode them again."""
    found = []
    for method, (encode, decode) in PEERS.items():
        start = time.process_time()
        coded = {name: encode(data, before[name]) for name, data in after.items()}
        middle = time.process_time()
        decoded = {name: decode(frames, before[name]) for name, frames in coded.items()}
        end = time.process_time()
        assert all(np.array_equal(decoded[name], data) for name, data in after.items()), method
        size = sum(len(frame) for frames in coded.values() for frame in frames)
        found.append(Update(method, step, size, middle - start, end - middle))
    return found


def raw(model: nn.Module) -> dict[str, Bytes]:
    return {name: bytes_of(tensor).copy() for name, tensor in model.named_parameters()}


def measure(data: Path, folder: Path, before: int, updates: int, rate: float | None) -> tuple[list[Update], float, int]:
    """Train, and send the weights at each of ``updates`` steps. rate: a constant learning rate from there on.

    Returns the updates, the share of weights that change at a step, and the bytes of all weights.
    """
    work = workloads.gpt(data, folder, steps=4 * (before + updates), seed=0)
    for _ in track(range(before), "training"):
        work.train_step()
    sent = copy.deepcopy(work.model).bfloat16()
    evaluate = workloads.gpt_validation(data, 2)
    options: dict[str, dict[str, Any]] = {
        LOSSLESS: {"quality": "lossless"},
        KEPT: {"quality": "lossless", "keep": dq.Keep(last=4)},
        DEFAULT: {"evaluate": evaluate},
    }
    found, shares = [], []
    runs = {way: folder / str(i) for i, way in enumerate(options)}
    ckpts = {way: dq.Checkpointer(runs[way], sent, **of) for way, of in options.items()}
    receivers = {way: Receiver(run, sent) for way, run in runs.items()}
    last: dict[str, Bytes] = {}
    for step in track(range(before + 1, before + updates + 2), "sending"):
        if rate is not None:
            work.optimizer.param_groups[0]["lr"] = rate
        work.train_step()
        with torch.no_grad():
            for target, source in zip(sent.parameters(), work.model.parameters(), strict=True):
                target.copy_(source)
        for way, ckpt in ckpts.items():
            cpu = time.process_time()
            record = ckpt.save(step).result()
            made = time.process_time() - cpu
            latency, loaded, digest = receivers[way].wait(step)
            if way != DEFAULT:
                assert digest == sum(int(t.detach().view(torch.int16).long().sum()) for t in sent.parameters())
            stored = record.total.stored
            if last:  # the first checkpoint finds a process that is still starting
                found.append(Update(way, step, stored, made, loaded, bool(record.keyframe), latency))
        weights = raw(sent)
        if last:
            found += by_peers(step, last, weights)
            changed = sum(int((weights[n].view(np.uint16) != last[n].view(np.uint16)).sum()) for n in weights)
            shares.append(changed / sum(len(data) / 2 for data in weights.values()))
        last = weights
    for way, ckpt in ckpts.items():
        ckpt.close()
        receivers[way].end()
    return found, statistics.mean(shares), sum(len(data) for data in last.values())


def table(title: str, found: list[Update], size: int) -> Table:
    rows = []
    for method in dict.fromkeys(update.method for update in found):
        deltas = [update for update in found if update.method == method and not update.keyframe]
        keyframes = [update.size for update in found if update.method == method and update.keyframe]
        middle = statistics.median(update.size for update in deltas)
        latencies = [update.latency for update in deltas if update.latency is not None]
        rows.append(
            [
                method,
                f"{middle / 1e3:.1f} kB",
                f"{size / middle:.1f}×",
                f"{statistics.mean(keyframes) / 1e3:.0f} kB" if keyframes else "–",
                f"{statistics.median(update.made for update in deltas):.3f} s",
                f"{statistics.median(update.loaded for update in deltas):.3f} s",
                f"{statistics.median(latencies):.3f} s, {max(latencies):.3f} s" if latencies else "–",
            ]
        )
    columns = ["method", "update", "smaller by", "keyframe", "CPU to make", "CPU to load", "commit to loaded, slowest"]
    return Table(title, columns, rows)


def page(tables: list[Table], described: dict[str, str | int], updates: int) -> str:
    shown = "\n\n".join(one.in_markdown() for one in tables)
    return f"""# Following a training

    make benchmark-setup
    .venv/bin/python benchmarks/follow.py --data DIR

The GPT (3.2 M weights) trains in float32 with AdamW. After each of {updates} consecutive optimizer steps its weights,
rounded to bfloat16, are saved to a run. A second process follows the run with `dq.follow`.

{shown}

## How to read it

- *update* is the median size of a delta, one optimizer step after the checkpoint before, with its header. Every 16th
  checkpoint is a *keyframe* by default. *smaller by* compares an update with all weights in bfloat16.
- *CPU to make* counts all threads from `save` to the commit: capture, search (with the default, on 2 batches of a
  metric), encoding, writing, reading back and comparing. *CPU to load* counts `update` in the other process: finding
  the file, its header, decoding, comparing hashes, writing into the model. Both are medians.
- *`keep=dq.Keep(last=4)`* re-codes the oldest kept checkpoint as a keyframe at each save, in the background. So no new
  checkpoint is one, and a process that keeps up only ever reads deltas.
- *commit to loaded* are seconds from the moment that the file gets its name until the model has the weights, the
  median and the slowest. Three runs and their followers share the cores with whatever else runs, so this is an
  upper bound. The follower looks every {POLL * 1e3:.0f} ms.
- The other rows encode and decode each tensor in memory, given the weights of the step before, and do nothing else:
  no file, no header, no hash. *{CODER}* is what the lossless rows use, measured the same way. What these
  take beyond it is hashing, syncing, reading back and comparing.
- *XOR* is of the bit patterns. *Byte planes* are all low bytes, then all high bytes. The last row stores one bit for
  each weight, and the XOR of those that have changed.
- What was decoded was compared with the weights, for each method but the default, which loses a little. Its metric is a
  loss in bfloat16, which moves in steps of 0.3 %, while a checkpoint may lose 0.13 %. So an estimate from how far the
  weights move bounds the search.

{sentence(described)}
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data="shakespeare.txt"))
    before, updates = (2, 2) if arguments.quick else (BEFORE, UPDATES)
    torch.set_num_threads(1)
    tables, numbers = [], {}
    for what, rate in (("pretraining, learning rate near 1e-3", None), ("fine-tuning, learning rate 1e-6", 1e-6)):
        with tempfile.TemporaryDirectory() as folder:
            found, share, size = measure(arguments.data, Path(folder), before, updates, rate)
        title = f"{what}: {share:.1%} of the bfloat16 weights change at a step, {size / 1e6:.2f} MB in all"
        tables.append(table(title, found, size))
        numbers[what] = {"changed": share, "bytes": size, "updates": [asdict(update) for update in found]}
        show(tables[-1], width=170)
    described = machine("torch", "zstandard")
    results = {"machine": described, "results": numbers}
    publish(arguments.out, "follow", results, None, page(tables, described, updates))


if __name__ == "__main__":
    main()
