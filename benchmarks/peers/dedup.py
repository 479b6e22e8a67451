"""Deduplication as a peer: a hash tree over chunks of the raw state finds what has changed.

Tan et al., "Scalable Incremental Checkpointing using GPU-Accelerated De-Duplication", ICPP 2023,
https://ornl.gov/publication/scalable-incremental-checkpointing-using-gpu-accelerated-de-duplication; here on the CPU.

- The state, all tensors one after another, is cut into chunks of one size, the leaves of a binary Merkle tree.
- A node with the same hash as the node in the same place of the previous checkpoint has not changed (*fixed
  duplicate*): it is not written, and the nodes below it are not compared.
- A node that the previous checkpoint has in another place becomes a reference to it. So does a chunk that occurred
  before in this checkpoint (*shifted duplicates*).
- Other chunks (*first occurrences*) are written as they are. Neighbours are listed by their common ancestor.

The three kinds of nodes and their names are those of the authors' code. There the size of chunks is an argument; we
chose it here. For weights and moments in training it does not matter, as every value moves: chunks of 128 bytes find as
little as chunks of 4096. Hashes are BLAKE3, which does not collide, and are not stored. Deviation in the peer's favour:
the lists of nodes are compressed by Zstd.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from peers.body import bytes_of, described, join, restored, split
from peers.peer import Checkpoint, Encoded, Known, Peer

Tree = list[bytes]
"""Hashes: 1 is the root, 2n and 2n + 1 are the children of n; empty where there is no data."""


@dataclass(frozen=True)
class Settings:
    """chunk: bytes of a chunk."""

    chunk: int = 512


@dataclass(frozen=True)
class Difference:
    """The nodes to write, in a tree of ``width`` leaves.

    moved: pairs of a node and the equal node of the previous checkpoint. repeated: pairs of a leaf and the equal first
    occurrence. first: leaves that are first occurrences, in order.
    """

    width: int
    moved: list[tuple[int, int]]
    repeated: list[tuple[int, int]]
    first: list[int]


def encode(checkpoint: Checkpoint, previous: Known | None, settings: Settings = Settings()) -> Encoded:
    """Encode the chunks that the previous checkpoint does not have."""
    entries, state = _flat(checkpoint)
    before = b"" if previous is None else _flat(previous.checkpoint)[1]
    found = difference(state, before, settings.chunk)

    def packed() -> bytes:
        lists = [_merged(found.first), found.moved, found.repeated]
        parts = [zstandard.compress(np.array(nodes, dtype="<u4").tobytes()) for nodes in lists]
        chunks = [state[_bytes(leaf, found.width, settings.chunk)] for leaf in found.first]
        return join([settings.chunk, found.width, len(state), entries], [*parts, b"".join(chunks)])

    return Encoded(Known(checkpoint), packed)


def decode(data: bytes, previous: Known | None) -> Known:
    """Decode a checkpoint. previous: the same that it was encoded with."""
    (chunk, width, size, entries), (*parts, chunks) = split(data)
    first, moved, repeated = (np.frombuffer(zstandard.decompress(part), dtype="<u4").tolist() for part in parts)
    before = b"" if previous is None else _flat(previous.checkpoint)[1]
    state = bytearray(before[:size].ljust(size, b"\0"))
    start = 0
    for node in sorted(first, key=lambda node: _bytes(node, width, chunk).start):
        place = _bytes(node, width, chunk)
        length = len(state[place])
        state[place] = chunks[start : start + length]
        start += length
    for nodes, source in ((moved, before), (repeated, state)):
        for node, other in zip(nodes[::2], nodes[1::2], strict=True):
            state[_bytes(node, width, chunk)] = source[_bytes(other, width, chunk)]
    result = Checkpoint({})
    start = 0
    for entry in entries:
        tensor = restored(memoryview(state)[start : start + entry["bytes"]], entry)
        result.groups()[entry["group"]][entry["name"]] = tensor
        start += entry["bytes"]
    return Known(result)


def difference(state: bytes, before: bytes, chunk: int) -> Difference:
    """Return the nodes of a state that have to be written."""
    chunks = -(-max(len(state), len(before), 1) // chunk)
    width = 1 << (chunks - 1).bit_length()
    now, then = _tree(state, chunk, width), _tree(before, chunk, width)
    known = {then[node]: node for node in range(1, 2 * width)}
    found = Difference(width, [], [], [])
    occurred: dict[bytes, int] = {}
    nodes = [1]
    while nodes:
        node = nodes.pop()
        digest = now[node]
        if digest in (then[node], b""):
            continue
        if digest in known:
            found.moved.append((node, known[digest]))
        elif node < width:
            nodes += [2 * node + 1, 2 * node]  # the left one is next
        elif digest in occurred:
            found.repeated.append((node, occurred[digest]))
        else:
            occurred[digest] = node
            found.first.append(node)
    return found


def _tree(state: bytes, chunk: int, width: int) -> Tree:
    leaves = [blake3(state[start : start + chunk]).digest() for start in range(0, len(state), chunk)]
    tree = [b""] * width + leaves + [b""] * (width - len(leaves))
    for node in range(width - 1, 0, -1):
        children = tree[2 * node] + tree[2 * node + 1]
        tree[node] = blake3(children).digest() if children else b""
    return tree


def _merged(leaves: Iterable[int]) -> list[int]:
    """Return the fewest nodes that have exactly these leaves below them."""
    found, level = [], set(leaves)
    while level:
        parents = {node // 2 for node in level if node ^ 1 in level}
        found += [node for node in level if node // 2 not in parents]
        level = parents
    return sorted(found)


def _bytes(node: int, width: int, chunk: int) -> slice:
    """Return the position of a node's data in the state. It may lie beyond the end."""
    height = width.bit_length() - node.bit_length()
    start = ((node << height) - width) * chunk
    return slice(start, start + (chunk << height))


def _flat(checkpoint: Checkpoint) -> tuple[list[dict[str, Any]], bytes]:
    """Return the descriptions and the bytes of all tensors."""
    entries, data = [], []
    for group, tensors in checkpoint.groups().items():
        for name, tensor in tensors.items():
            data.append(bytes_of(tensor))
            entries.append({"group": group, "name": name, "bytes": len(data[-1]), **described(tensor)})
    return entries, b"".join(data)


DEDUP = Peer("deduplication", (Settings(),), encode, decode, groups=("weights", "first", "second", "others"))
