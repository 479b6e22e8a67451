"""Cuts the golden files into inputs of the fuzzers: what the native decoders get when these files are loaded.

The tensors of golden files are too small for some kinds of byte planes and of blocks of levels. So a few streams of
exact values and of levels are added.

``make fuzz`` runs it: ``python native/fuzz/corpus.py FOLDER`` fills a folder for each fuzzer in FOLDER. The comment at
the beginning of a fuzzer describes its input.
"""

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dynaquant as dq
from dynaquant import _native

GOLDEN = Path(__file__).parents[2] / "tests/golden"
PERIOD = 100
Bytes = NDArray[np.uint8]


def number(value: int, size: int) -> bytes:
    """Return a number as the fuzzers read it."""
    return value.to_bytes(size, "little")


def tile(repeated: Bytes) -> bytes:
    """Return what has to be repeated: all of it, but less if the bytes repeat after 1 or PERIOD of them."""
    for period in (1, PERIOD):
        if (repeated[period:] == repeated[:-period]).all():
            return repeated[:period].tobytes()
    return repeated.tobytes()


def levels(stream: bytes, parent: Bytes, modulus: int, groups: int, out: Bytes) -> bytes:
    """Return the input of fuzz_levels for a call of decode_levels."""
    before = tile(parent)
    return number(modulus, 2) + number(groups, 2) + number(out.size, 3) + number(len(before), 3) + before + stream


def conditional(
    stream: bytes, parent: Bytes, _: Bytes, context_of: Bytes, contexts: int, symbols: int, out: Bytes
) -> bytes:
    """Return the input of fuzz_conditional for a call of decode_conditional."""
    before, places = tile(parent), context_of[: 1 + int(parent.max(initial=0))].tobytes()[:255]
    sizes = [(symbols, 2), (contexts, 2), (out.size, 3), (len(places), 1), (len(before), 3)]
    return b"".join(number(value, size) for value, size in sizes) + places + before + stream


def lossless(stream: bytes, parent: Bytes, itemsize: int, out: Bytes) -> bytes:
    """Return the input of fuzz_lossless for a call of decode_lossless."""
    before = tile(parent)
    return number(itemsize, 1) + number(out.size // itemsize, 3) + number(len(before), 3) + before + stream


def nearest(positions: NDArray[np.float64], sources: NDArray[np.float64], is_parent: bool, _: Bytes) -> bytes:
    """Return the input of fuzz_nearest for a call of nearest_levels."""
    sizes = number(is_parent, 1) + number(positions.size, 2) + number(sources.size, 2)
    return sizes + positions.tobytes() + sources.tobytes()


def values(found: Bytes, table: NDArray[Any], protected: NDArray[np.uint16], _: NDArray[Any]) -> bytes:
    """Return the input of fuzz_values for a call of values_of_levels."""
    given = tile(found)
    sizes = [(table.itemsize == 2, 1), (table.size, 2), (found.size, 3), (len(given), 3), (0, 1)]
    return b"".join(number(value, size) for value, size in sizes) + table.tobytes() + given + protected.tobytes()


def record(name: str, input_of: Callable[..., bytes], folder: Path) -> None:
    """Write the input of each call of a native function from now on into a file of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    function = getattr(_native, name)

    def recording(*arguments: object) -> object:
        seed = input_of(*arguments)
        (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
        return function(*arguments)

    setattr(_native, name, recording)


def decode_exact_values() -> None:
    """Encode and decode values near the parent's, and values near their neighbours."""
    random = np.random.default_rng(0)
    before = random.normal(0, 1, 2000) * np.exp(random.normal(0, 2, 2000))
    after = before + random.normal(0, 1e-3, before.size)
    smooth = np.repeat(np.exp(random.normal(0, 3, 50)), 64)
    for kind, itemsize in ((np.float16, 2), (np.float32, 4), (np.float64, 8)):
        parent, near, even = (numbers.astype(kind).view(np.uint8) for numbers in (before, after, smooth))
        for exact, context in ((near, parent), (near, parent[:0]), (even, parent[:0])):
            stream = _native.encode_lossless(exact, context, itemsize)
            _native.decode_lossless(stream, context, itemsize, np.empty_like(exact))


def decode_many_levels() -> None:
    """Encode and decode so many levels that their blocks have 8, 16 and 32 states. 8 divides the numbers of levels."""
    random = np.random.default_rng(0)
    level_of = np.tile(np.arange(256, dtype=np.uint8), 256)
    context_of = np.arange(256, dtype=np.uint8)
    parent = np.minimum(random.geometric(0.5, PERIOD), 8).astype(np.uint8)
    for size in (140_000, 400_000, 800_000):
        before = np.resize(parent, size)
        after = np.where(random.random(size) < 1e-3, 9, before).astype(np.uint8)
        for given, contexts in ((before, 10), (before[:0], 1)):
            stream = _native.encode_conditional(after, given, level_of, context_of % contexts, contexts)
            assert stream is not None
            _native.decode_conditional(stream, given, level_of, context_of % contexts, contexts, 10, after)


def main(folder: Path) -> None:
    """Load every golden checkpoint, and record the calls of the native decoders."""
    record("decode_levels", levels, folder / "levels")
    record("decode_conditional", conditional, folder / "conditional")
    record("decode_lossless", lossless, folder / "lossless")
    record("nearest_levels", nearest, folder / "nearest")
    record("values_of_levels", values, folder / "values")
    for file in sorted(GOLDEN.glob("v1/step-*.dqc")):
        dq.load(file.parent, int(file.stem.removeprefix("step-")))
    decode_exact_values()
    decode_many_levels()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
