"""Sharded checkpoints, written by one process part by part."""

import torch

from dynaquant.engine.forms.stored import cut
from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import Box
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.state.tree import state_dict_tree
from dynaquant.store.container import Parent
from dynaquant.store.layout import Place, Plan
from dynaquant.store.writing import Checkpoint, base_of_boxes, depends_on, planned, write_part


def by_rows(shape, parts):
    """Return a box of rows for each part, the first ones larger; a part may get none."""
    if not shape:
        return [Place(0, Box((), ()))]
    places, begin = [], 0
    for part in range(parts):
        rows = -(-(shape[0] - begin) // (parts - part))
        if rows:
            places.append(Place(part, Box((begin, *[0] * (len(shape) - 1)), (rows, *shape[1:]))))
        begin += rows
    return places


def by_columns(shape, parts):
    """Return a box of columns for each part."""
    turned = by_rows(tuple(reversed(shape)), parts)
    return [Place(p.part, Box(tuple(reversed(p.box.offsets)), tuple(reversed(p.box.sizes)))) for p in turned]


def interleaved(shape, parts):
    """Return single rows, in turn for the parts, as a strided shard holds them."""
    return [Place(row % parts, Box((row, *[0] * (len(shape) - 1)), (1, *shape[1:]))) for row in range(shape[0])]


def plan_of(tensors, labels, places_of, parts):
    layouts = {}
    found = []
    for name, stored in tensors.items():
        layout = tuple(places_of(tuple(stored.shape), parts))
        index = layouts.setdefault(layout, len(layouts))
        label = labels.get(name, Label("exact"))
        found.append(planned(name, label, dtype_name(stored.dtype), stored.shape, index, depends_on(stored)))
    return Plan(tuple(found), tuple(layouts), parts)


def commit_sharded(run, step, tensors, places_of=by_rows, parts=3, parent=None, labels=None):
    """Commit stored tensors as a checkpoint in parts."""
    plan = plan_of(tensors, labels or {}, places_of, parts)
    above = None if parent is None else Parent(parent.header.step, parent.header.identity)
    draft = run.begin(step, above, parts=True)
    tree = {"dict": [["model", state_dict_tree(tensors)]]}
    written = []
    for number in range(parts):
        own = plan.boxes_of(number)
        boxes = {(entry.name, box): cut(tensors[entry.name], box) for entry, box in own}
        base = None if parent is None else base_of_boxes(run.chain(parent), own)
        written.append(write_part(run.parts_folder, own, boxes, draft, base)[0])
    return run.publish(draft, Checkpoint(step, tree, {}, {}), plan=plan, parts=written)[0]


def random_state(seed=0, rows=12):
    """Return stored tensors of several forms: a weight, its moments, a bias, a scalar, integers, an empty tensor."""
    from whole_tensors import quantize_first_moment, quantize_rank_one

    from dynaquant.engine.quantize.grid import quantize

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 8, generator=torch.Generator().manual_seed(7)) + 0.1 * seed
    second = quantize_rank_one(torch.rand(rows, 8, generator=generator) + 0.1)
    first = quantize_first_moment(torch.randn(rows, 8, generator=generator), second, "w.second", 0.5)
    return {
        "w": quantize(weight, -8),
        "w.first": first,
        "w.second": second,
        "bias": quantize(torch.randn(rows, generator=generator), -20),
        "step": torch.tensor(float(seed)),
        "ids": torch.arange(rows * 3).reshape(rows, 3),
        "empty": torch.empty(0, 4),
    }
