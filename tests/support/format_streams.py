"""Bit streams, byte planes and exact values, for the second decoder: written from docs/format.md alone."""

import struct

import numpy as np
import zstandard

LONGEST_CODE = 12
BLOCK = 65_536
EXACT_TOTAL_BITS = 11


def check(condition, what):
    if not condition:
        raise ValueError(f"not as the format demands: {what}")


class Bits:
    """Reads a bit stream: the lowest bit of each byte comes first."""

    def __init__(self, stream):
        self.stream, self.at = stream, 0

    def peek(self, count):
        byte, bit = divmod(self.at, 8)
        return int.from_bytes(self.stream[byte : byte + 4], "little") >> bit & ((1 << count) - 1)

    def number(self, count):
        number = self.peek(count)
        self.at += count
        return number

    def zeros(self, begun, length):
        """Return the length of a run of zeros, from 4 bits. begun: index of the first zero. length: of the list."""
        count = 1 + self.number(4)
        check(begun + count <= length, "zeros within their list")
        return count

    def symbol(self, table):
        symbol, length = table[self.peek(LONGEST_CODE)]
        self.at += length
        return symbol

    def end(self):
        """Return where the next whole byte begins."""
        end = -(-self.at // 8)
        check(end <= len(self.stream), "a bit stream within its bytes")
        check(self.peek(-self.at % 8) == 0, "zeros at the end of a bit stream")
        return end

    def finish(self):
        check(self.end() == len(self.stream), "a bit stream's size")


def frame(stored, size):
    """Return the content of one zstd frame, which must have the expected size."""
    check(zstandard.frame_content_size(stored) == size, "the size of a zstd frame's content")
    return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)


def byte_planes(stream, bytes_each, elements):
    planes, at = [], 0
    for _ in range(bytes_each):
        (size,) = struct.unpack_from("<Q", stream, at)
        check(at + 8 + size <= len(stream), "a byte plane within its stream")
        planes.append(np.frombuffer(frame(stream[at + 8 : at + 8 + size], elements), np.uint8))
        at += 8 + size
    check(at == len(stream), "nothing after the byte planes")
    return np.stack(planes, axis=1).tobytes()


def block_sizes(stream, at, elements, block):
    """Return the sizes of all blocks, and where they end."""
    blocks = -(-elements // block)
    return struct.unpack_from(f"<{blocks}I", stream, at), at + 4 * blocks


def slots_of(frequencies, total_bits):
    """Return (symbol, its frequency, position within it) for every slot of a table."""
    check(sum(frequencies) in (0, 1 << total_bits), "the sum of frequencies")
    return [(symbol, f, place) for symbol, f in enumerate(frequencies) for place in range(f)]


def rans(stream, elements, states, lowest_bits, total_bits, slots):
    """Return the symbols, and where their words end. slots(i, symbols): slots of element i, from all symbols before."""
    lowest, mask = 1 << lowest_bits, (1 << total_bits) - 1
    y = list(struct.unpack_from(f"<{states}I", stream))
    check(all(lowest <= state < lowest << 16 for state in y), "states in their range")
    words = memoryview(stream)[4 * states :]
    words = words[: len(words) // 2 * 2].cast("H")  # assumes a little-endian machine
    symbols, at = [], 0
    for i in range(elements):
        state = y[i % states]
        symbol, f, place = slots(i, symbols)[state & mask]
        state = f * (state >> total_bits) + place
        if state < lowest:
            state = state << 16 | words[at]
            at += 1
        y[i % states] = state
        symbols.append(symbol)
    check(y == [lowest] * states, "the states at the end")
    return symbols, 4 * states + 2 * at


def exact_values(stream, element_size, elements, needs_parent, parent):
    """Return the bytes of a tensor. parent: the bytes of its parent, if there is one."""
    size = next(size for size in (8, 4, 2, 1) if element_size % size == 0)
    count, dtype = elements * element_size // size, f"<u{size}"
    check(stream[0] == needs_parent, "whether the parent is needed")
    sizes, at = block_sizes(stream, 1, count, BLOCK)
    check(at + sum(sizes) == len(stream), "the sizes of blocks")
    predicted = None
    if needs_parent:
        predicted = np.frombuffer(parent, dtype)
        check(len(predicted) == count, "as many elements as the parent")
    blocks = []
    for first, bytes_ in zip(range(0, count, BLOCK), sizes, strict=True):
        below = predicted[first : first + BLOCK] if needs_parent else None
        blocks.append(exact_block(stream[at : at + bytes_], min(BLOCK, count - first), 8 * size, below))
        at += bytes_
    check(needs_parent == any(differences for _, differences in blocks), "a parent that is needed")
    return np.concatenate([np.empty(0, "u8"), *(values for values, _ in blocks)]).astype(dtype).tobytes()


def exact_block(stream, elements, width, parent):
    """Return the elements as u8, and whether the block holds differences."""
    differences, at, classes = stream[0], 1, None
    check(differences in (0, 1), "values or differences")
    if differences:
        check(parent is not None, "a parent for differences")
        (t,) = struct.unpack_from("<H", stream, 1)
        at = 3
        parent = parent.astype("u8")
        if width == 8:
            exponents = (parent & 0x7F) * 2
        else:
            bits = 11 if width == 64 else 8
            exponents = parent >> (width - 1 - bits) & ((1 << bits) - 1)
        classes = np.clip(t - exponents.astype(np.int64), 0, 7).tolist()

    folded = np.zeros(elements, "u8")
    for _ in range(width // 8):
        plane, used = exact_plane(stream[at:], elements, classes)
        folded = folded << 8 | np.array(plane, "u8")
        at += used
    check(at == len(stream), "nothing after the planes of a block")

    low = max(width - 16, 0)
    sign = folded >> low & 1
    magnitude = folded & ((1 << low) - 1) | folded >> (low + 1) << low
    if not differences:
        return sign << (width - 1) | magnitude, False
    difference = np.where(sign == 1, ~magnitude, magnitude)
    return (parent + difference) & ((1 << width) - 1), True


def exact_plane(stream, elements, classes):
    """Return the bytes of a plane, and its size in the stream. classes: from the parent, in a block of differences."""
    how, at = stream[0], 1
    check(how < 5, "a known kind of plane")
    if how == 0:
        return list(stream[at : at + elements]), at + elements
    if how == 1:
        return [stream[at]] * elements, at + 1
    check(how == 2 or (how == 3) == (classes is not None), "classes by what the block holds")
    if how == 4:
        u, at = stream[at], at + 1
    bits = Bits(stream[at:])
    tables = [slots_of(exact_frequencies(bits), EXACT_TOTAL_BITS) for _ in range(1 if how == 2 else 8)]
    at += bits.end()

    def slots(i, plane):
        if how == 2:
            return tables[0]
        if how == 3:
            return tables[classes[i]]
        return tables[min(max(u - plane[i - 32], 0), 7) if i >= 32 else 0]

    plane, used = rans(stream[at:], elements, 32, 15, EXACT_TOTAL_BITS, slots)
    return plane, at + used


def exact_frequencies(bits):
    frequencies = []
    while len(frequencies) < 256:
        width = bits.number(4)
        if width:
            frequencies.append(1 << (width - 1) | bits.number(width - 1))
        else:
            frequencies += [0] * bits.zeros(len(frequencies), 256)
    return frequencies
