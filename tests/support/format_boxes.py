"""Boxes of tensors, for the second decoder: written from docs/format.md alone."""

import numpy as np
from format_levels import Codebook, Levels, Tensor, element_size
from format_streams import check


def index(offsets, sizes):
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def regions(part, shape, offsets, sizes):
    """Return the shape of a part, and the region of a box in it. part: its name."""
    if part == "rows":
        return shape[:1], offsets[:1], sizes[:1]
    if part == "columns":
        return shape[1:], offsets[1:], sizes[1:]
    return shape, offsets, sizes


def bytes_as_array(tensor):
    return np.frombuffer(tensor.values, "u1").reshape(*tensor.shape, element_size(tensor.dtype))


def in_one(tensor):
    """Return a tensor with the levels that it has as a whole."""
    return cut(tensor, [0] * len(tensor.shape), tensor.shape) if tensor.boxes else tensor


def cut(tensor, offsets, sizes):
    """Return a box of a tensor, with its levels."""
    if tensor.boxes:
        return from_boxes(tensor, offsets, sizes)
    parts = {}
    for name, levels in tensor.parts.items():
        shape, begin, lengths = regions(name, tensor.shape, offsets, sizes)
        inside = levels.levels.reshape(shape)[index(begin, lengths)].reshape(-1)
        parts[name] = Levels(inside, levels.codebook)
    return Tensor(tensor.dtype, sizes, bytes_as_array(tensor)[index(offsets, sizes)].tobytes(), parts)


def sharded(dtype, shape, boxes):
    """Return a tensor of boxes (offsets, sizes, tensor)."""
    values = np.zeros((*shape, element_size(dtype)), "u1")
    times = np.zeros(shape, "i8")
    for offsets, sizes, box in boxes:
        values[index(offsets, sizes)] = bytes_as_array(box)
        times[index(offsets, sizes)] += 1
    check((times == 1).all(), "boxes that cover the tensor, each element once")
    return Tensor(dtype, shape, values.tobytes(), boxes=boxes)


def from_boxes(tensor, offsets, sizes):
    """Return a box of a sharded tensor: a stored one, or put together from those that overlap it."""
    overlapping = []
    for begin, lengths, box in tensor.boxes:
        if (begin, lengths) == (list(offsets), list(sizes)):
            return box
        first = np.maximum(begin, offsets)
        last = np.minimum(np.add(begin, lengths), np.add(offsets, sizes))
        if (last > first).all():
            inside = cut(box, (first - begin).tolist(), (last - first).tolist())
            overlapping.append(((first - offsets).tolist(), (last - first).tolist(), inside))
    return put_together(tensor.dtype, list(sizes), overlapping)


def put_together(dtype, shape, boxes):
    """Return a tensor from boxes (offsets, sizes, tensor) that cover it, with levels if these fit together."""
    values = np.zeros((*shape, element_size(dtype)), "u1")
    for offsets, sizes, box in boxes:
        values[index(offsets, sizes)] = bytes_as_array(box)
    parts = {}
    kinds = {tuple(sorted(box.parts)) for _, _, box in boxes}
    for name in kinds.pop() if len(kinds) == 1 else ():
        parts[name] = levels_together(name, shape, boxes)
    return Tensor(dtype, shape, values.tobytes(), parts if None not in parts.values() else {})


def levels_together(name, shape, boxes):
    """Return the levels of one part of all boxes; None if they do not fit together."""
    codebook = common([box.parts[name].codebook for _, _, box in boxes])
    if codebook is None:
        return None
    whole = regions(name, shape, [0] * len(shape), shape)[0]
    levels, known = np.zeros(whole, "i8"), np.zeros(whole, bool)
    for offsets, sizes, box in boxes:
        _, begin, lengths = regions(name, shape, offsets, sizes)
        own = box.parts[name].codebook
        shift = own.first - codebook.first if own.kind == "log_grid" and own.bins else 0
        mine = box.parts[name].levels.reshape(lengths).astype("i8")
        mine = np.where(mine >= 2, mine + shift, mine)
        inside = index(begin, lengths)
        if (known[inside] & (levels[inside] != mine)).any():
            return None
        levels[inside], known[inside] = mine, True
    return Levels(levels.reshape(-1), codebook)


def common(codebooks):
    used = [codebook for codebook in codebooks if codebook.bins] or codebooks[:1]
    first = used[0]
    if any(codebook.kind != first.kind for codebook in used):
        return None
    most = max(codebook.bins for codebook in used)
    if first.kind == "grid":
        same = all(codebook.first == first.first for codebook in used)
        return Codebook("grid", most, first.first) if same else None
    if first.kind == "log_grid":
        lowest = min(codebook.first for codebook in used)
        bins = max(codebook.first + codebook.bins for codebook in used) - lowest
        same = all(codebook.pace == first.pace for codebook in used) and bins <= 254
        return Codebook("log_grid", bins, lowest, first.pace) if same else None
    same = all(np.array_equal(codebook.centres, first.centres) for codebook in used)
    return first if same else None
