"""A second decoder of checkpoint files, written from docs/format.md alone: it shares no code with dynaquant."""

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from blake3 import blake3

MAGIC = b"\x89DQC\r\n\x1a\n"
BLOCK = 65_536
RUN_CLASSES = 34
LONGEST_CODE = 12


@dataclass
class Tensor:
    dtype: str
    shape: list[int]
    values: bytes  # in C order
    levels: np.ndarray | None = None  # of a quantized tensor
    bins: int = 0  # of a quantized tensor


def decode(folder, step):
    """The header of a checkpoint, and its tensors by name: dtype, shape and the bytes of the values in C order."""
    header, tensors = checkpoint(Path(folder), step)
    return header, {name: (t.dtype, t.shape, t.values) for name, t in tensors.items()}


def checkpoint(folder, step):
    header, streams = layout((folder / f"step-{step:012}.dqc").read_bytes())
    check(header["step"] == step, "step")
    parents = {}
    if header["parent"] is not None:
        parent, parents = checkpoint(folder, header["parent"]["step"])
        check(parent["identity"] == header["parent"]["identity"], "the parent's identity")
        check(parent["sequence"] < header["sequence"], "the parent's sequence")
    tensors = {}
    for entry, stream in zip(header["tensors"], streams, strict=True):
        name, shape = entry["name"], entry["shape"]
        check(name not in tensors, "unique names")
        tensor = tensors[name] = tensor_of(entry, stream, parents.get(name))
        check(len(tensor.values) == math.prod(shape) * element_size(entry["dtype"]), f"the size of {name}")
        text = f"{entry['dtype']}[{', '.join(map(str, shape))}]"
        check(blake3(text.encode() + tensor.values).hexdigest() == entry["hash"], f"the hash of {name}")
    check(identity(header) == header["identity"], "identity")
    return header, tensors


def identity(header):
    pairs = sorted([entry["name"], entry["hash"]] for entry in header["tensors"])
    text = json.dumps([header["tree"], pairs], separators=(",", ":"), ensure_ascii=False)
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


def layout(file):
    """The header of a file, and the streams of its tensors."""
    check(len(file) >= 56, "at least 56 bytes")
    check(file[:8] == MAGIC == file[-8:], "magic")
    check(struct.unpack("<Q", file[8:16]) == (1,), "format version")
    stored_size, size = struct.unpack("<QQ", file[-40:-24])
    begin = len(file) - 40 - stored_size
    check(begin >= 16, "a header within the file")
    stored = file[begin:-40]
    check(blake3(file[:16] + stored).digest()[:16] == file[-24:-8], "checksum")
    check(size <= 100 * stored_size, "a header within the limit")
    header = json.loads(stored if size == stored_size else frame(stored, size))
    streams, at = [], 16
    for entry in header["tensors"]:
        streams.append(file[at : at + entry["size"]])
        at += entry["size"]
    check(at == begin, "the sizes of the streams")
    return header, streams


def frame(stored, size):
    """The content of one zstd frame, which must be as large as expected."""
    check(zstandard.frame_content_size(stored) == size, "the size of a zstd frame's content")
    return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)


def tensor_of(entry, stream, parent):
    dtype, shape, coding = entry["dtype"], entry["shape"], entry["coding"]
    elements = math.prod(shape)
    kind = coding["kind"]
    if kind == "reference":
        check(not stream and (parent.dtype, parent.shape) == (dtype, shape), "a reference to the same tensor")
        return Tensor(dtype, shape, parent.values, parent.levels, parent.bins)
    if coding.get("arrangement") not in ("delta", "rearranged"):
        check(elements * element_size(dtype) <= 131_072 * len(stream), "a stream within the limit")
    if kind == "raw":
        return Tensor(dtype, shape, stream)
    if kind == "planes":
        return Tensor(dtype, shape, byte_planes(stream, element_size(dtype), elements))
    check(kind == "quantized", "a known kind of coding")
    bins, protected = coding["bins"], coding["protected"]
    check(bins <= 254, "at most 254 bins")
    middle, end = 4 * bins, 4 * bins + coding["protected_size"]
    centres = np.frombuffer(stream[:middle], "<f4")
    protected = np.frombuffer(byte_planes(stream[middle:end], 2, protected), "<u2")
    levels = coded_levels(stream[end:], coding["arrangement"], elements, bins, parent)
    return Tensor(dtype, shape, values_of(dtype, levels, centres, protected), levels, bins)


def element_size(dtype):
    """In bytes: names of dtypes end in their bits or, as float8_e5m2, have them before the variant."""
    return 1 if dtype == "bool" else max(1, int(re.search(r"\d+", dtype)[0]) // 8)


def byte_planes(stream, bytes_each, elements):
    planes, at = [], 0
    for _ in range(bytes_each):
        (size,) = struct.unpack_from("<Q", stream, at)
        check(at + 8 + size <= len(stream), "a byte plane within its stream")
        planes.append(np.frombuffer(frame(stream[at + 8 : at + 8 + size], elements), np.uint8))
        at += 8 + size
    check(at == len(stream), "nothing after the byte planes")
    return np.stack(planes, axis=1).tobytes()


def values_of(dtype, levels, centres, protected):
    """The bytes of a quantized tensor's values."""
    check(np.count_nonzero(levels == 1) == len(protected), "the number of protected values")
    if dtype == "bfloat16":
        centres = bfloat16(centres)
    elif dtype == "float16":
        centres, protected = centres.astype("<f2"), protected.view("<f2")
    else:  # a bfloat16 is the upper half of a float32
        protected = (protected.astype("<u4") << 16).view("<f4")
    values = np.concatenate([np.zeros(2, centres.dtype), centres])[levels]
    values[levels == 1] = protected
    return (values.astype("<f8") if dtype == "float64" else values).tobytes()


def bfloat16(values):
    """The bits of float32 values rounded to bfloat16: to nearest, ties to even."""
    bits = values.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype("<u2")


def coded_levels(stream, arrangement, elements, bins, parent):
    check(arrangement in ("alone", "delta", "rearranged"), "a known arrangement")
    modulus, groups, source = 2 + bins, 1, np.zeros(elements, np.int64)
    if arrangement != "alone":
        check(parent is not None and parent.levels is not None, "a quantized parent")
        check(len(parent.levels) == elements, "as many elements as the parent")
        modulus, source = 2 + max(bins, parent.bins), parent.levels
    if arrangement == "rearranged":
        groups = 2 + parent.bins

    blocks = -(-elements // BLOCK)
    tables_size, *sizes = struct.unpack_from(f"<{1 + blocks}I", stream)
    at = 4 + 4 * blocks
    check(at + tables_size + sum(sizes) == len(stream), "the sizes of tables and blocks")
    bits = Bits(stream[at : at + tables_size])
    tables = [huffman_table(bits, modulus + RUN_CLASSES) for _ in range(groups)]
    bits.finish()
    at += tables_size

    levels = np.empty(elements, np.int64)
    for size, first in zip(sizes, range(0, elements, BLOCK), strict=True):
        sources = source[first : first + BLOCK]
        group_of = sources if arrangement == "rearranged" else np.zeros(len(sources), np.int64)
        bits = Bits(stream[at : at + size])
        deltas = np.empty(len(sources), np.int64)
        for group, table in enumerate(tables):
            places = np.flatnonzero(group_of == group)
            deltas[places] = coded_group(bits, table, modulus, len(places))
        bits.finish()
        at += size
        levels[first : first + BLOCK] = (sources - deltas) % modulus
    check(elements == 0 or levels.max() < 2 + bins, "levels below 2 + bins")
    return levels


class Bits:
    """A bit stream: the lowest bit of each byte comes first."""

    def __init__(self, stream):
        self.stream, self.at = stream, 0

    def peek(self, count):
        byte, bit = divmod(self.at, 8)
        return int.from_bytes(self.stream[byte : byte + 4], "little") >> bit & ((1 << count) - 1)

    def number(self, count):
        number = self.peek(count)
        self.at += count
        return number

    def symbol(self, table):
        symbol, length = table[self.peek(LONGEST_CODE)]
        self.at += length
        return symbol

    def finish(self):
        check(-(-self.at // 8) == len(self.stream), "a bit stream's size")
        check(self.peek(-self.at % 8) == 0, "zeros at the end of a bit stream")


def huffman_table(bits, symbols):
    """(symbol, length of its code) for whatever the next 12 bits may be."""
    lengths = []
    while len(lengths) < symbols:
        lengths.append(bits.number(4))
        if lengths[-1] == 0:
            lengths += [0] * bits.number(4)
    check(len(lengths) == symbols and max(lengths) <= LONGEST_CODE, "code lengths")
    used = sorted((length, symbol) for symbol, length in enumerate(lengths) if length)
    check(sum(2.0**-length for length, _ in used) == 1 or [length for length, _ in used] in ([], [1]), "a prefix code")
    table, code, previous = {}, 0, 0
    for length, symbol in used:
        code <<= length - previous
        reversed_code = int(f"{code:0{length}b}"[::-1], 2)
        for rest in range(1 << (LONGEST_CODE - length)):
            table[reversed_code | rest << length] = symbol, length
        code, previous = code + 1, length
    return table


def coded_group(bits, table, modulus, elements):
    deltas = []
    while len(deltas) < elements:
        symbol = bits.symbol(table)
        if symbol < modulus:
            deltas.append(symbol)
            may_repeat = True
            continue
        check(deltas and may_repeat, "a run after a delta")
        k, e = symbol - modulus, 2 + (symbol - modulus - 8) // 2
        occurrences = k + 2 if k < 8 else (2 + k % 2) * 2**e + bits.number(e) + 2
        deltas += [deltas[-1]] * (occurrences - 1)
        may_repeat = False
    check(len(deltas) == elements, "no run beyond the end of its group")
    return deltas


def check(condition, what):
    if not condition:
        raise ValueError(f"not as the format demands: {what}")
