"""Compare lossless coding of consecutive checkpoints: dynaquant with and without a parent, and other lossless coders.

    python benchmarks/lossless.py --data DIR

The GPT trains with AdamW. A checkpoint is conditioned on one that lies 1, 10 or 160 steps before it, tensor by tensor:
weights and moments in float32, and the weights alone in bfloat16. All methods code the same tensors, and their streams
are decoded and compared. Everything runs twice: in a process on one core, and in one on all cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import blosc2
import numpy as np
import options
import torch
import zstandard
from cores import on_cores
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone
from results import Table, machine, publish, sentence, show
from rich.progress import track
from workloads import WORKLOADS
from zipnn import ZipNN

from dynaquant.engine.coding import lossless

REPEATS, ENOUGH = 7, 2.0
"""Turns of every method on a pair of checkpoints. A method that has taken ENOUGH seconds gets no further turn."""
FIRST, APART = 240, (1, 10, 160)
"""The step of the parent, and how many steps later its children are saved."""
PEERS = ("numpy", "torch", "zipnn", "zstandard", "blosc2", "pcodec")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """A tensor's bytes and its parent's."""

    role: str
    dtype: torch.dtype
    data: Bytes
    parent: Bytes


@dataclass(frozen=True)
class Method:
    """A coder.

    encode: tensors to streams, or to the sizes of streams that it keeps itself. decode: streams and tensors (for their
    sizes) to the tensors' bytes. turn: surrounds both, and is not timed.
    """

    name: str
    encode: Callable[[list[Tensor]], list[Any]]
    decode: Callable[[list[Any], list[Tensor]], list[Any]]
    turn: Callable[[list[Tensor]], AbstractContextManager[object]] = nullcontext


@dataclass
class Row:
    """Results of a method on all tensors: bytes before and after by role, and the seconds of the fastest turns."""

    method: str
    raw: dict[str, int]
    coded: dict[str, int]
    encoding: float = 0.0
    decoding: float = 0.0

    def ratio(self, role: str | None = None) -> float:
        """Return how many times smaller the tensors of a role are, or all tensors."""
        roles = self.raw if role is None else [role]
        return sum(self.raw[r] for r in roles) / sum(self.coded[r] for r in roles)

    def speeds(self) -> tuple[float, float]:
        """Gigabytes of tensors encoded and decoded per second."""
        raw = sum(self.raw.values()) * 1e-9
        return raw / self.encoding, raw / self.decoding


def bytes_of(tensor: torch.Tensor) -> Bytes:
    data: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def float_tensors(snapshot: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return all floating-point tensors with more than one value, by role and name; tensors that share memory once."""
    state = torch.load(snapshot, weights_only=True)
    named = {("weights and buffers", name): tensor for name, tensor in state["model"].items()}
    for index, slots in state["optimizer"]["state"].items():
        named |= {(role, str(index)): value for role, value in slots.items() if torch.is_tensor(value)}
    distinct = {tensor.data_ptr(): key for key, tensor in named.items()}
    kept = set(distinct.values())
    return {k: t for k, t in named.items() if k in kept and t.is_floating_point() and t.numel() > 1}


def trained(data: Path, folder: Path, first: int, apart: Sequence[int]) -> dict[int, Path]:
    """Train the GPT, and save it with ``torch.save`` after ``first`` steps and so many steps later."""
    files = {step: folder / f"{step}.pt" for step in (first, *(first + steps for steps in apart))}
    work = WORKLOADS["gpt"](data, folder, 2 * max(files), 0)
    for step in track(range(1, max(files) + 1), description="training the GPT"):
        work.train_step()
        if step in files:
            torch.save({"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}, files[step])
    return files


def load_pair(parent: Path, child: Path, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the tensors of a checkpoint that its parent has, too. dtype: if given, only weights, rounded to it."""
    before, after = float_tensors(parent), float_tensors(child)
    if dtype is not None:
        before, after = (
            {key: tensor.to(dtype) for key, tensor in tensors.items() if key[0] == "weights and buffers"}
            for tensors in (before, after)
        )
    return [Tensor(key[0], t.dtype, bytes_of(t), bytes_of(before[key])) for key, t in after.items() if key in before]


def each(name: str, encode: Callable[[Tensor], Any], decode: Callable[[Any, Tensor], Any]) -> Method:
    """Return a coder of one tensor at a time."""
    return Method(
        name,
        lambda tensors: [encode(tensor) for tensor in tensors],
        lambda streams, tensors: [decode(stream, tensor) for stream, tensor in zip(streams, tensors, strict=True)],
    )


def zstd_method(level: int, planes: bool) -> Method:
    compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def encode(tensor: Tensor) -> list[bytes]:
        if not planes:
            return [compressor.compress(tensor.data.data)]
        columns = tensor.data.reshape(-1, tensor.dtype.itemsize).T
        return [compressor.compress(np.ascontiguousarray(column).data) for column in columns]

    def decode(stream: list[bytes], tensor: Tensor) -> Bytes:
        if not planes:
            return np.frombuffer(decompressor.decompress(stream[0]), dtype=np.uint8)
        out = np.empty((tensor.data.size // len(stream), len(stream)), dtype=np.uint8)
        for k, frame in enumerate(stream):
            out[:, k] = np.frombuffer(decompressor.decompress(frame), dtype=np.uint8)
        return out.reshape(-1)

    return each(f"byte planes + zstd -{level}" if planes else f"zstd -{level}", encode, decode)


def zipnn_method(cores: int) -> Method:
    coders = {
        dtype: ZipNN(input_format="byte", bytearray_dtype=name, threads=cores)
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"))
    }
    return each(
        "ZipNN",
        lambda tensor: coders[tensor.dtype].compress(bytearray(tensor.data)),
        lambda stream, tensor: coders[tensor.dtype].decompress(stream),
    )


def blosc2_method(cores: int) -> Method:
    blosc2.set_nthreads(cores)
    return each(
        "blosc2, shuffle + zstd",
        lambda tensor: blosc2.compress2(
            tensor.data, typesize=tensor.dtype.itemsize, codec=blosc2.Codec.ZSTD, filters=[blosc2.Filter.SHUFFLE]
        ),
        lambda stream, _: blosc2.decompress2(stream),
    )


def pcodec_method() -> Method:
    def encode(tensor: Tensor) -> Any:
        values = tensor.data.view(np.float32 if tensor.dtype == torch.float32 else np.uint16)
        return standalone.simple_compress(values, ChunkConfig())

    return each("pcodec", encode, lambda stream, _: standalone.simple_decompress(stream))


def moonclip_method(cores: int) -> Method:
    # Both are read when the first store is made.
    os.environ |= {"MOONCLIP_THREADS": str(cores), "MOONCLIP_FSYNC": "0"}
    from moonclip import MoonclipManager  # noqa: PLC0415

    stores: list[Any] = []

    def arrays(tensors: list[Tensor], of: Callable[[Tensor], Bytes]) -> dict[str, Any]:
        return {str(i): torch.from_numpy(of(tensor)).view(tensor.dtype) for i, tensor in enumerate(tensors)}

    @contextmanager
    def turn(tensors: list[Tensor]) -> Iterator[None]:
        """Store the parents in a new folder. They stay in memory, as in a training."""
        with TemporaryDirectory() as folder:
            stores.append(MoonclipManager(folder, async_save=False))
            stores[0].save_tensors(0, arrays(tensors, lambda tensor: tensor.parent))
            yield
            stores.clear()

    def encode(tensors: list[Tensor]) -> list[int]:
        stored = stores[0].describe(stores[0].save_tensors(1, arrays(tensors, lambda tensor: tensor.data)))
        sizes = {entry["name"]: int(entry["compressed_size"]) for entry in stored["tensors"]}
        return [sizes[str(i)] for i in range(len(tensors))]

    def decode(_sizes: list[int], tensors: list[Tensor]) -> list[bytearray]:
        found = stores[0].load_latest()[1]
        return [found[str(i)] for i in range(len(tensors))]

    return Method("moonclip, given the parent", encode, decode, turn)


def methods(cores: int) -> list[Method]:
    return [
        each(
            "dynaquant, given the parent",
            lambda t: lossless.encode(t.data, t.dtype.itemsize, t.parent),
            lambda stream, t: lossless.decode(stream, t.data.size, t.dtype.itemsize, t.parent),
        ),
        each(
            "dynaquant, alone",
            lambda t: lossless.encode(t.data, t.dtype.itemsize, None),
            lambda stream, t: lossless.decode(stream, t.data.size, t.dtype.itemsize, None),
        ),
        *([moonclip_method(cores)] if find_spec("moonclip") else []),
        zipnn_method(cores),
        pcodec_method(),
        blosc2_method(cores),
        zstd_method(1, planes=False),
        zstd_method(3, planes=False),
        zstd_method(3, planes=True),
        zstd_method(19, planes=True),
    ]


def size_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    return sum(len(frame) for frame in stream) if isinstance(stream, list) else len(stream)


def take_turn(method: Method, tensors: list[Tensor], row: Row, best: list[float], first: bool) -> float:
    """Code all tensors once. Lowers ``best`` if it was faster. Returns the seconds it took."""
    with method.turn(tensors):
        start = perf_counter()
        streams = method.encode(tensors)
        encoded = perf_counter()
        values = method.decode(streams, tensors)
        decoded = perf_counter()
    best[:] = min(best[0], encoded - start), min(best[1], decoded - encoded)
    if first:
        for tensor, stream, value in zip(tensors, streams, values, strict=True):
            assert np.frombuffer(value, dtype=np.uint8).tobytes() == tensor.data.tobytes(), method.name
            row.raw[tensor.role] = row.raw.get(tensor.role, 0) + tensor.data.size
            row.coded[tensor.role] = row.coded.get(tensor.role, 0) + size_of(stream)
    return decoded - start


def measure(parent: Path, child: Path, dtype: torch.dtype | None) -> list[Row]:
    """Return the results of all coders on the tensors of a checkpoint, on the cores of this process."""
    tensors = load_pair(parent, child, dtype)
    coders = methods(len(os.sched_getaffinity(0)))
    rows = [Row(method.name, {}, {}) for method in coders]
    best = [[float("inf"), float("inf")] for _ in coders]
    spent = [0.0] * len(coders)
    for turn in track(range(REPEATS), "turns of all coders"):
        for i, method in enumerate(coders):
            if spent[i] < ENOUGH:
                spent[i] += take_turn(method, tensors, rows[i], best[i], first=turn == 0)
    for row, (encoding, decoding) in zip(rows, best, strict=True):
        row.encoding, row.decoding = encoding, decoding
    return rows


def table(title: str, one: list[Row], every: list[Row], cores: int) -> Table:
    roles = list(one[0].raw)
    columns = ["method", "ratio", *(roles if len(roles) > 1 else [])]
    rows = []
    for a, b in zip(one, every, strict=True):
        by_role = [f"{a.ratio(role):.3f}" for role in roles] if len(roles) > 1 else []
        speeds = [f"{speed:.2g}" for speed in (*a.speeds(), *b.speeds())]
        rows.append([a.method, f"{a.ratio():.4f}", *by_role, *speeds])
    timed = [f"{way}, {n} core{'s' * (n > 1)}" for n in (1, cores) for way in ("encode", "decode")]
    return Table(title, [*columns, *timed], rows)


NOTES = """\
- *given the parent* means conditioned on the parent.
- *ratio* is the size of the tensors over the size of their streams, for all tensors together and by role. Speeds are
  GB/s of tensors, the best of several turns. Compare them only within a table.
- Every tensor is coded by its own call, as in a checkpoint. Every stream was decoded and compared.
- moonclip stores checkpoints, not tensors. It gets all tensors at once, and its times include files and their hashes,
  but no fsync. Its sizes are those of the tensors in its file, without its manifest.
- ZipNN gets the data type (`bytearray_dtype`), with which it is smallest, and the number of cores. pcodec has no
  bfloat16 and sees the values as unsigned integers. pcodec and zstd use one core. blosc2 has its default level.
- *bfloat16* are the same weights, rounded. Checkpoints of released models look like this.
"""


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data="shakespeare.txt"))
    first, apart = (2, APART[:1]) if arguments.quick else (FIRST, APART)

    cores = os.sched_getaffinity(0)
    tables, measured = [], {}
    with TemporaryDirectory(dir=arguments.cache) as folder:
        files = trained(arguments.data, Path(folder), first, apart)
        for steps, dtype in product(apart, (None, torch.bfloat16)):
            values = "bfloat16 weights" if dtype else "weights and optimizer"
            title = f"{values}, {steps} step{'s'[: steps > 1]} after the parent"
            one, every = (
                on_cores(some, measure, files[first], files[first + steps], dtype) for some in ({min(cores)}, cores)
            )
            tables.append(table(title, one, every, len(cores)))
            measured[title] = {"1 core": [asdict(r) for r in one], "all cores": [asdict(r) for r in every]}
            show(tables[-1], width=150)

    described = machine(*PEERS, *(["moonclip"] if find_spec("moonclip") else []))
    page = [
        "# Lossless\n\n```\nmake benchmark-setup\n.venv/bin/python benchmarks/lossless.py --data DIR\n```\n",
        f"`DIR` holds `shakespeare.txt`. {sentence(described)}\n",
        f"A GPT of 3.2 M weights trains with AdamW. The parent is its checkpoint after {first} steps.\n",
        *(shown.in_markdown() + "\n" for shown in tables),
        "## How to read it\n\n" + NOTES,
    ]
    publish(arguments.out, "lossless", {"machine": described, "results": measured}, None, "\n".join(page))


if __name__ == "__main__":
    main()
