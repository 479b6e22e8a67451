"""Lossless file formats as peers: functions that write a checkpoint's tensors and read them back.

Writers return when the file is on the disk (fsync). Readers fill given tensors, as a restore of a model and an
optimizer does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

Tensors = dict[str, Tensor]
_LENGTH = 8
"""Bytes of the length before each compressed tensor."""


@dataclass(frozen=True)
class Peer:
    """write, read: take tensors, path and number of threads. package: must be installed."""

    write: Callable[[Tensors, Path, int], None]
    read: Callable[[Tensors, Path, int], None]
    package: str

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


@dataclass(frozen=True)
class Codec:
    """Compression of one tensor at a time. decompress: fills an array of the same number of bytes."""

    compress: Callable[[NDArray[np.uint8]], bytes]
    decompress: Callable[[bytes, NDArray[np.uint8]], object]


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is on the disk when the block ends."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes, sharing its memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _fill(tensors: Tensors, stored: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])


def _torch_save(tensors: Tensors, path: Path, _threads: int) -> None:
    with synced(path) as file:
        torch.save(tensors, file)


def _torch_load(tensors: Tensors, path: Path, _threads: int) -> None:
    _fill(tensors, torch.load(path, mmap=False, weights_only=True))


def _write_safetensors(tensors: Tensors, path: Path, _threads: int) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_safetensors(tensors: Tensors, path: Path, _threads: int) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))


def _quiet() -> warnings.catch_warnings[None]:
    # DCP warns that there is one process even with ``no_dist``.
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _write_dcp(tensors: Tensors, path: Path, threads: int, compressed: bool) -> None:
    extensions = [ZStandard()] if compressed else None
    writer = FileSystemWriter(path, sync_files=True, thread_count=threads, _extensions=extensions)
    with _quiet():
        save(tensors, storage_writer=writer, no_dist=True)


def _read_dcp(tensors: Tensors, path: Path, _threads: int) -> None:
    with _quiet():
        load(tensors, storage_reader=FileSystemReader(path), no_dist=True)


def _write_zstd(tensors: Tensors, path: Path, threads: int, level: int) -> None:
    compressor = zstandard.ZstdCompressor(level, threads=threads)
    with synced(path) as file, compressor.stream_writer(file, closefd=False) as stream:
        for tensor in tensors.values():
            stream.write(_bytes_of(tensor).data)


def _read_zstd(tensors: Tensors, path: Path, _threads: int) -> None:
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
        for tensor in tensors.values():
            rest = _bytes_of(tensor).data
            while rest and (count := stream.readinto(rest)):
                rest = rest[count:]


def _write_each(tensors: Tensors, path: Path, threads: int, codec: Callable[[int], Codec]) -> None:
    compress = codec(threads).compress
    with synced(path) as file:
        for tensor in tensors.values():
            data = compress(_bytes_of(tensor))
            file.write(len(data).to_bytes(_LENGTH, "little"))
            file.write(data)


def _read_each(tensors: Tensors, path: Path, threads: int, codec: Callable[[int], Codec]) -> None:
    decompress = codec(threads).decompress
    with path.open("rb") as file:
        for tensor in tensors.values():
            decompress(file.read(int.from_bytes(file.read(_LENGTH), "little")), _bytes_of(tensor))


def _planes(threads: int, level: int) -> Codec:
    def decompress(data: bytes, into: NDArray[np.uint8]) -> None:
        planes = np.frombuffer(zstandard.decompress(data), dtype=np.uint8).reshape(4, -1)
        np.copyto(into.reshape(-1, 4), planes.T)

    compressor = zstandard.ZstdCompressor(level, threads=threads)
    return Codec(lambda data: compressor.compress(np.ascontiguousarray(data.reshape(-1, 4).T).data), decompress)


def _zipnn(threads: int) -> Codec:
    from zipnn import ZipNN  # noqa: PLC0415

    zipped = ZipNN(input_format="byte", bytearray_dtype="float32", threads=threads)
    # ``compress`` changes its input in place, so it needs a copy.
    return Codec(
        lambda data: zipped.compress(bytearray(data)),
        lambda data, into: np.copyto(into, np.frombuffer(zipped.decompress(data), dtype=np.uint8)),
    )


def _blosc2(threads: int, codec: str, level: int, shuffle: str) -> Codec:
    import blosc2  # noqa: PLC0415

    settings: dict[str, Any] = {"codec": blosc2.Codec[codec], "clevel": level, "nthreads": threads, "typesize": 4}
    settings |= {"filters": [blosc2.Filter[shuffle]], "filters_meta": [0]}
    return Codec(
        lambda data: blosc2.compress2(data, **settings),
        lambda data, into: blosc2.decompress2(data, dst=into, nthreads=threads),
    )


def _pcodec(_threads: int) -> Codec:
    from pcodec import ChunkConfig, standalone  # noqa: PLC0415

    return Codec(
        lambda data: standalone.simple_compress(data.view(np.float32), ChunkConfig()),
        lambda data, into: standalone.simple_decompress_into(data, into.view(np.float32)),
    )


def _each(package: str, codec: Callable[[int], Codec]) -> Peer:
    return Peer(partial(_write_each, codec=codec), partial(_read_each, codec=codec), package)


PEERS = {
    "torch.save": Peer(_torch_save, _torch_load, "torch"),
    "safetensors": Peer(_write_safetensors, _read_safetensors, "safetensors"),
    "DCP": Peer(partial(_write_dcp, compressed=False), _read_dcp, "torch"),
    "DCP with zstd": Peer(partial(_write_dcp, compressed=True), _read_dcp, "zstandard"),
    "zstd -1": Peer(partial(_write_zstd, level=1), _read_zstd, "zstandard"),
    "zstd -3": Peer(partial(_write_zstd, level=3), _read_zstd, "zstandard"),
    "byte planes + zstd -3": _each("zstandard", partial(_planes, level=3)),
    "ZipNN": _each("zipnn", _zipnn),
    "blosc2 zstd": _each("blosc2", partial(_blosc2, codec="ZSTD", level=1, shuffle="SHUFFLE")),
    "blosc2 LZ4": _each("blosc2", partial(_blosc2, codec="LZ4", level=5, shuffle="BITSHUFFLE")),
    "pcodec": _each("pcodec", _pcodec),
}
"""Peers by name. blosc2 has the better filter for its codec, and the level above which it only becomes slower."""
