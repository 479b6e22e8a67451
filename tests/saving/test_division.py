"""How tensors are divided among ranks: each element has one writer, and plans agree. Ranks are PyTorch's fake ones."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynaquant.engine.label import Label
from dynaquant.engine.tensors.box import tile
from dynaquant.errors import StateError
from dynaquant.ranks.dtensors import mesh_of, shard_of
from dynaquant.saving.division import divide
from dynaquant.store.layout import layout_of

SHAPES = {"model.a": (7, 4), "model.b": (4,), "model.c": (16, 3), "a.exp_avg": (7, 4), "a.exp_avg_sq": (7, 4)}


class Told:
    """A group whose other ranks answer what they were asked before."""

    def __init__(self, rank, answers):
        self.rank, self.size, self._answers, self.reduce = rank, len(answers), answers, lambda numbers: numbers

    def all_gather(self, value):
        return self._answers if isinstance(value, list) else [value] * self.size

    def run_on_all_ranks(self, action):
        return action()


@pytest.fixture(autouse=True)
def _no_group_stays():
    yield
    if dist.is_initialized():  # the test has failed
        dist.destroy_process_group()


def state_of(rank, mesh_shape, placements):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=torch.Size(mesh_shape).numel())
    mesh = init_device_mesh("cpu", mesh_shape)
    full = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = {n: torch.distributed.tensor.distribute_tensor(t, mesh, placements) for n, t in full.items()}
    return {**state, "step": torch.zeros(())}


def divisions(mesh_shape, placements):
    """Return the state and the division of every rank."""
    spans, states, found = [], [], []
    for rank in range(torch.Size(mesh_shape).numel()):
        states.append(state_of(rank, mesh_shape, placements))
        kinds = {tuple(t.shape): t for t in states[-1].values()}
        spans.append([(shard_of(tensor).spans, mesh_of(tensor)) for tensor in kinds.values()])
        dist.destroy_process_group()
    for rank in range(len(spans)):
        state = state_of(rank, mesh_shape, placements)
        found.append(divide(state, Told(rank, spans)))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("mesh_shape", "placements"), [((4,), [Shard(0)]), ((2, 3), [Replicate(), Shard(0)]), ((6,), [Replicate()])]
)
def test_every_element_is_written_once_and_all_ranks_have_the_same_plan(mesh_shape, placements):
    found = divisions(mesh_shape, placements)
    labels = dict.fromkeys(found[0].writers, Label("weight", ""))
    plans = [division.plan(labels, {}) for division in found]
    assert all(plan == plans[0] for plan in plans)
    for tensor in plans[0].entries:
        assert tile(tensor.shape, [place.box for place in plans[0].layouts[layout_of(tensor)]])
    for rank, division in enumerate(found):
        writes = {name for name, writers in division.writers.items() if rank in dict(writers)}
        assert writes == {name for name in labels if division.writes(name)}
        if (part := division.parts.get(rank)) is not None:
            assert {tensor.name for tensor, _ in plans[0].boxes_of(part)} == writes
    assert dict(found[0].writers["step"]).keys() == {0}
    assert found[0].writers["a.exp_avg"] is found[0].writers["a.exp_avg_sq"]


def test_ranks_that_hold_the_same_share_the_writing():
    (division, *_) = divisions((6,), [Replicate()])
    written = Counter()
    for ((rank, shard),) in division.writers.values():
        written[rank] += shard.shape.numel()
    assert len(written) >= 3
    assert max(written.values()) < sum(written.values())


def test_a_rank_that_lacks_a_tensor_is_an_error_that_names_it():
    class Other(Told):
        def all_gather(self, value):
            return [value, (True, b"other names")]

        def from_rank_0(self, value):
            return [*value, "model.d"]

    state = state_of(1, (2,), [Shard(0)])
    try:
        assert isinstance(state["model.a"], DTensor)
        with pytest.raises(StateError, match=r"rank 1 has no model\.d"):
            divide(state, Other(1, [None, None]))
    finally:
        dist.destroy_process_group()
