"""A second decoder of checkpoint files, written from docs/format.md alone: it shares no code with dynaquant.

This file reads the container and the kinds of tensors; format_streams.py and format_levels.py decode streams.
"""

import json
import math
import struct
from pathlib import Path

import numpy as np
from blake3 import blake3
from format_boxes import cut, in_one, sharded
from format_levels import Codebook, Levels, Tensor, coded_levels, conditional_levels, element_size
from format_streams import byte_planes, check, exact_values, frame

MAGIC = b"\x89DQC\r\n\x1a\n"
FLOATS = {"float32", "float64", "bfloat16", "float16"}
LARGEST = {"float16": np.float32(65_504), "bfloat16": np.float32((2 - 2**-7) * 2.0**127)}
KINDS = {"raw", "planes", "exact", "quantized", "conditional", "rank_one", "units", "bounded"}
KINDS |= {"reference", "rounding", "frozen", "omitted", "sharded"}


def decode(folder, step, known=None):
    """Return the header of a checkpoint, and its tensors by name: dtype, shape and the bytes of the values in C order.

    known: checkpoints that were decoded before, by step. New ones are added.
    """
    header, tensors = checkpoint(Path(folder), step, {} if known is None else known)
    return header, contents(tensors)


def decode_exact(folder, step):
    """Decode the lossless copy beside a checkpoint. Returns the same as ``decode``."""
    header, tensors = decoded(next(Path(folder).glob(f"exact-{step:012}-*.dqc")), step)
    check(header["parents"] == [], "a keyframe")
    beside = decode(folder, step)[0]
    check(header["sequence"] == beside["sequence"], "a copy of this commit")
    check(header["identity"] == beside["record"]["exact"], "the copy that the checkpoint names")
    return header, contents(tensors)


def decode_single(path):
    """Decode a file outside of runs, which says where its parent is. Returns the same as ``decode``."""

    def chain(path):
        header = layout(path.read_bytes())[0]
        return decoded(path, header["step"], lambda _: chain(path.parent / header["parents"][0]["file"]))

    header, tensors = chain(Path(path))
    return header, contents(tensors)


def contents(tensors):
    return {name: (t.dtype, t.shape, t.values) for name, t in tensors.items()}


def checkpoint(folder, step, known):
    if step not in known:
        file = folder / f"step-{step:012}.dqc"
        known[step] = decoded(file, step, lambda step: checkpoint(folder, step, known))
    return known[step]


def decoded(path, step, checkpoint_of=None):
    """Return the header and the tensors of a file. checkpoint_of: returns the same for the step of the parent."""
    header, streams, _ = layout(path.read_bytes())
    check(header["step"] == step, "step")
    check(len(header["parents"]) <= 1, "at most one parent")
    parents = {}
    for above in header["parents"]:
        parent, parents = checkpoint_of(above["step"])
        check(parent["identity"] == above["identity"], "the parent's identity")
        check(parent["sequence"] < header["sequence"], "the parent's sequence")

    frozen = {}  # the tensors of files of frozen parameters, by identity
    files = {}  # the parts of a sharded checkpoint, by number
    entries = {entry["name"]: (entry, stream) for entry, stream in zip(header["tensors"], streams, strict=True)}
    check(len(entries) == len(streams), "unique names")
    tensors = {}

    def tensor_named(name):
        if name not in tensors:
            entry, stream = entries[name]
            check(entry["coding"]["kind"] in KINDS, "a kind of coding of this version")
            if entry["coding"]["kind"] == "frozen":
                tensors[name] = frozen_tensor(path, entry, stream, frozen)
            elif entry["coding"]["kind"] == "sharded":
                check(not stream, "no stream of what is in parts")
                tensors[name] = sharded_tensor(path, header, entry, parents.get(name), tensor_named, files)
                return tensors[name]  # its boxes have been compared with their hashes
            else:
                tensors[name] = tensor_of(entry, stream, parents.get(name), tensor_named)
            check_tensor(entry, tensors[name])
        return tensors[name]

    with np.errstate(all="ignore"):
        tensors = {name: tensor_named(name) for name in entries if not is_omitted(*entries[name])}
    check(identity(header) == header["identity"], "identity")
    return header, tensors


def is_omitted(entry, stream):
    omitted = entry["coding"]["kind"] == "omitted"
    check(not (omitted and stream), "no stream of what is omitted")
    return omitted


def frozen_tensor(path, entry, stream, known):
    identity = entry["coding"]["file"]
    check(not stream, "no stream of what is frozen")
    if identity not in known:
        header, known[identity] = decoded(path.parent / f"frozen-{identity[:16]}.dqc", 0)
        check(header["parents"] == [], "a file of frozen parameters that stands alone")
        check(header["identity"] == identity, "the identity of the file of frozen parameters")
    return known[identity][entry["name"]]


def part_of(path, header, number, known):
    """Return the entries and streams of a part by name."""
    if number not in known:
        address, size = header["parts"][number]
        content = (path.parent / "parts" / f"{address}.dqc").read_bytes()
        found, streams, checksum = layout(content)
        check((checksum, len(content)) == (address, size), "the address and the size of a part")
        check(found["identity"] == identity(found), "the identity of a part")
        check((found["step"], found["sequence"]) == (header["step"], header["sequence"]), "a part of this checkpoint")
        pairs = zip(found["tensors"], streams, strict=True)
        known[number] = {entry["name"]: (entry, stream) for entry, stream in pairs}
    return known[number]


def sharded_tensor(path, header, entry, parent, tensor_named, files):
    """Decode all boxes of a tensor and put them together. parent: the tensor of that name in the parent."""
    second, boxes, hashed = entry["coding"]["second"], [], []
    for number, offsets, sizes in header["layouts"][entry["coding"]["layout"]]:
        own, stream = part_of(path, header, number, files)[f"{entry['name']}@{','.join(map(str, offsets))}"]
        check((own["dtype"], own["shape"]) == (entry["dtype"], sizes), "the box of that tensor")

        def of_second(name, offsets=offsets, sizes=sizes):
            check(name == f"{second}@{','.join(map(str, offsets))}", "the same box of the other tensor")
            return cut(tensor_named(second), offsets, sizes)

        box = tensor_of(own, stream, None if parent is None else cut(parent, offsets, sizes), of_second)
        check_tensor(own, box)
        boxes.append((offsets, sizes, box))
        hashed.append((offsets, sizes, own["hash"]))
    text = "boxes" + "".join(f"{offsets}{sizes}{digest}" for offsets, sizes, digest in sorted(hashed))
    check(blake3(text.encode()).hexdigest() == entry["hash"], "the hash of a sharded tensor")
    return sharded(entry["dtype"], entry["shape"], boxes)


def check_tensor(entry, tensor):
    name, shape = entry["name"], entry["shape"]
    check(len(tensor.values) == math.prod(shape) * element_size(entry["dtype"]), f"the size of {name}")
    text = f"{entry['dtype']}[{', '.join(map(str, shape))}]"
    check(blake3(text.encode() + tensor.values).hexdigest() == entry["hash"], f"the hash of {name}")


def identity(header):
    pairs = sorted([entry["name"], entry["hash"]] for entry in header["tensors"])
    text = json.dumps([header["tree"], pairs], separators=(",", ":"), ensure_ascii=False)
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


def layout(file):
    """Return the header of a file, the streams of its tensors, and the checksum in hexadecimal digits."""
    check(len(file) >= 56, "at least 56 bytes")
    check(file[:8] == MAGIC == file[-8:], "magic")
    (version,) = struct.unpack("<Q", file[8:16])
    check(version == 1, "format version")
    stored_size, size = struct.unpack("<QQ", file[-40:-24])
    begin = len(file) - 40 - stored_size
    check(begin >= 16, "a header within the file")
    stored = file[begin:-40]
    check(blake3(file[:16] + stored).digest()[:16] == file[-24:-8], "checksum")
    check(size <= 16 * stored_size, "a header within the limit")
    header = json.loads(stored if size == stored_size else frame(stored, size))
    check(header["requires"] == [], "no feature beyond version 1")
    streams, at = [], 16
    for entry in header["tensors"]:
        streams.append(file[at : at + entry["size"]])
        at += entry["size"]
    check(at == begin, "the sizes of the streams")
    return header, streams, file[-24:-8].hex()


def tensor_of(entry, stream, parent, tensor_named):
    """Decode a tensor. parent: the tensor of that name in the parent. tensor_named: returns one of this checkpoint."""
    dtype, shape, coding = entry["dtype"], entry["shape"], entry["coding"]
    elements = math.prod(shape)
    kind = coding["kind"]
    if kind == "reference":
        check(not stream and (parent.dtype, parent.shape) == (dtype, shape), "a reference to the same tensor")
        return Tensor(dtype, shape, parent.values, parent.parts, parent.boxes)
    parent = None if parent is None else in_one(parent)
    if kind == "rounding":
        whole = tensor_named(coding["of"])
        check(not stream and (whole.dtype, whole.shape) == ("float32", shape), "the rounding of a float32 tensor")
        return Tensor(dtype, shape, rounded(np.frombuffer(whole.values, "<f4"), dtype))
    if stands_alone(coding):
        check(elements * element_size(dtype) <= 131_072 * len(stream), "a stream within the limit")
    if kind == "raw":
        return Tensor(dtype, shape, stream)
    if kind == "planes":
        return Tensor(dtype, shape, byte_planes(stream, element_size(dtype), elements))
    if kind == "exact":
        above = parent.values if coding["needs_parent"] else None
        return Tensor(dtype, shape, exact_values(stream, element_size(dtype), elements, coding["needs_parent"], above))

    check(dtype in FLOATS, "a dtype that is quantized")
    parts = parent.parts if parent else {}
    if kind == "bounded":
        return bounded(coding, stream, dtype, shape, parent)
    if kind == "quantized":
        bins, protected = coding["bins"], coding["protected"]
        centres, protected, rest = values_before(stream, bins, protected, coding["protected_size"])
        levels = coded_levels(rest, coding["arrangement"], elements, bins, parts.get("levels"))
        levels = Levels(levels, Codebook("centres", bins, centres=centres))
        return Tensor(dtype, shape, rounded(values_of(levels, protected, dtype), dtype), {"levels": levels})
    if kind == "conditional":
        check(coding["size"] == len(stream), "the size of the part")
        levels, values = part(coding, stream, elements, dtype, parts.get("levels"))
        return Tensor(dtype, shape, rounded(values, dtype), {"levels": levels})
    if kind == "units":
        check(coding["units"]["size"] == len(stream), "the size of the part")
        second = tensor_named(coding["second"])
        check(second.shape == shape and set(second.parts) in ({"levels"}, {"rows", "columns"}), "a quantized second")
        levels, values = part(coding["units"], stream, elements, "float32", parts.get("units"))
        if coding["units"]["bins"] or coding["units"]["protected"]:
            values = values * np.sqrt(floats_of(second))
        return Tensor(dtype, shape, finite(values, dtype), {"units": levels})
    check(len(shape) >= 2, "two or more dimensions")
    rows, columns = coding["rows"], coding["columns"]
    middle, end = rows["size"], rows["size"] + columns["size"]
    check(end <= len(stream) and not any(stream[end:]), "zeros after the columns")
    row_levels, row = part(rows, stream[:middle], shape[0], "float32", parts.get("rows"))
    column_levels, column = part(columns, stream[middle:end], math.prod(shape[1:]), "float32", parts.get("columns"))
    values = np.multiply.outer(row, column).reshape(-1)
    return Tensor(dtype, shape, finite(values, dtype), {"rows": row_levels, "columns": column_levels})


def bounded(coding, stream, dtype, shape, parent):
    elements, step, width = math.prod(shape), coding["step"], coding["width"]
    check(0 < step < math.inf and width in (1, 2, 4, 8), "a step and a width")
    count, middle = coding["exact"], coding["positions_size"]
    end = middle + coding["exact_size"]
    check(end <= len(stream), "exact values within their stream")
    positions, exact = np.empty(0, "i8"), b""
    if count:
        gaps = np.frombuffer(byte_planes(stream[:middle], 8, count), "<u8")
        positions = np.cumsum(gaps + 1).astype("i8") - 1
        check(positions[-1] < elements, "positions within the tensor")
        exact = byte_planes(stream[middle:end], element_size(dtype), count)
    folded = np.frombuffer(exact_values(stream[end:], width, elements, False, None), f"<u{width}").astype("u8")
    levels = (folded >> 1).astype("i8") ^ -(folded & 1).astype("i8")
    rows = ([1, 1, *shape])[-2:]
    levels = levels.reshape(-1, *rows)
    for axis in range(1, coding["axes"] + 1):
        levels = np.cumsum(levels, axis=-axis)
    levels = levels.reshape(-1)
    if coding["needs_parent"]:
        check(parent.shape == shape and parent.dtype in FLOATS, "a parent of the same shape")
        above = np.frombuffer(parent.values, "<f8") if parent.dtype == "float64" else floats_of(parent).astype("f8")
        quotients, largest = np.rint(above / step), 2**52 if dtype == "float64" else 2**31 - 1
        before = 0
        for i, quotient in enumerate(quotients):
            before = int(quotient) if abs(quotient) <= largest else before
            levels[i] += before
    if dtype != "float64":
        levels = levels.astype("i4").astype("i8")
    values = levels * step
    values = values.astype("<f8").tobytes() if dtype == "float64" else rounded(values.astype("<f4"), dtype)
    values = bytearray(values)
    size = element_size(dtype)
    for i, position in enumerate(positions):
        values[size * position : size * (position + 1)] = exact[size * i : size * (i + 1)]
    return Tensor(dtype, shape, bytes(values))


def stands_alone(coding):
    parts = (coding, *(coding[key] for key in ("rows", "columns", "units") if key in coding))
    return coding.get("arrangement") not in ("delta", "rearranged") and not any(p.get("needs_parent") for p in parts)


def part(coding, stream, elements, dtype, parent):
    """Return the levels of a part, and its values as float32, which ``dtype`` can represent exactly."""
    check(len(stream) == coding["size"], "a part within its stream")
    kind, bins, needs_parent = coding["codebook"], coding["bins"], coding["needs_parent"]
    check(not needs_parent or parent is not None, "a parent with the same part")
    stored = bins if kind == "centres" else 0
    centres, protected, rest = values_before(stream, stored, coding["protected"], coding["protected_size"])
    codebook = Codebook(kind, bins, coding["first"], coding["pace"], centres)
    levels = Levels(conditional_levels(rest, elements, codebook, parent if needs_parent else None), codebook)
    return levels, values_of(levels, protected, dtype)


def values_before(stream, centres, protected, protected_size):
    """Return centres as float32, protected values (outliers) as 16 bits, and the rest of the stream: the levels."""
    check(centres <= 254, "at most 254 bins")
    middle, end = 4 * centres, 4 * centres + protected_size
    check(end <= len(stream), "values within their stream")
    planes = byte_planes(stream[middle:end], 2, protected) if protected_size else b""
    return np.frombuffer(stream[:middle], "<f4"), np.frombuffer(planes, "<u2"), stream[end:]


def values_of(levels, protected, dtype):
    """Return the values of a quantized tensor, as float32."""
    levels, codebook = levels.levels, levels.codebook
    check(codebook.bins <= 254, "at most 254 bins")
    check(np.count_nonzero(levels == 1) == len(protected), "the number of protected values")
    bins = floats(finite(codebook.values(), dtype), dtype)
    values = np.concatenate([np.zeros(2, "<f4"), bins])[levels]
    values[levels == 1] = floats(protected.tobytes(), "float16" if dtype == "float16" else "bfloat16")
    return values


def floats_of(tensor):
    return floats(tensor.values, tensor.dtype)


def floats(values, dtype):
    """Return values as float32. A bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(values, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(values, {"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]).astype("<f4")


def finite(values, dtype):
    """Do the same as ``rounded``, but for values beyond the largest number of a 16-bit dtype."""
    if dtype in LARGEST:
        values = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
    return rounded(values, dtype)


def rounded(values, dtype):
    """Return the bytes of float32 values in another dtype, rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return values.astype({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype]).tobytes()
    bits = values.view("<u4").astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype("<u2").tobytes()
