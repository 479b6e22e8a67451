"""Builds checkpoint files by hand: a test can choose every byte, with correct checksums.

This is a second writer of docs/format.md. It shares no code with the package.
"""

import json
import struct
from pathlib import Path

import zstandard
from blake3 import blake3

MAGIC = b"\x89DQC\r\n\x1a\n"


def to_json(value) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def hash_of(dtype: str, shape: list[int], data: bytes) -> str:
    return blake3(f"{dtype}{shape}".encode() + data).hexdigest()


def entry(name="w", data=b"\0" * 8, dtype="float32", shape=(2,), **other) -> dict:
    """Return an entry with the raw stream ``data``. other: fields to replace or add."""
    shape = list(shape)
    return {
        "name": name,
        "role": "exact",
        "layer_type": "",
        "dtype": dtype,
        "shape": shape,
        "hash": hash_of(dtype, shape, data),
        "size": len(data),
        "coding": {"kind": "raw"},
        **other,
    }


def quantized(data: bytes, elements: int, arrangement="alone", bins=0, protected=0, protected_size=0, **other) -> dict:
    """Return an entry whose stream ``data`` is declared as levels."""
    coding = {"kind": "quantized", "bins": bins, "protected": protected, "protected_size": protected_size}
    coding["arrangement"] = arrangement
    return entry(**{"data": data, "shape": [elements], "role": "weight", "coding": coding, **other})


def header(*entries: dict, **other) -> dict:
    """Return a header with these entries and the correct identity. other: fields to replace or add; ``parent``: one."""
    if "parent" in other:
        other["parents"] = [other.pop("parent")]
    plain = {"requires": [], "step": 1, "sequence": 1, "identity": "", "parents": [], "tree": None}
    plain |= {"tensors": list(entries), "parts": [], "layouts": [], "record": {}, **other}
    if "identity" not in other:
        leaves = sorted([e["name"], e["hash"]] for e in entries)
        plain["identity"] = blake3(to_json([plain["tree"], leaves])).hexdigest()
    return plain


def file_of(
    plain: dict | bytes,
    streams: bytes = b"",
    *,
    version: int = 1,
    compress: bool = False,
    plain_size: int | None = None,
) -> bytes:
    """Return a complete file of a header and streams, with the correct checksum."""
    plain = plain if isinstance(plain, bytes) else to_json(plain)
    stored = zstandard.ZstdCompressor().compress(plain) if compress else plain
    preamble = struct.pack("<8sQ", MAGIC, version)
    checksum = blake3(preamble + stored).digest(length=16)
    size = len(plain) if plain_size is None else plain_size
    return preamble + streams + stored + struct.pack("<QQ16s8s", len(stored), size, checksum, MAGIC)


def write(folder: Path, plain: dict, streams: bytes = b"", **options) -> Path:
    """Write the file under the name of its step in a run. Returns its path."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{plain['step']:012d}.dqc"
    path.write_bytes(file_of(plain, streams, **options))
    return path
