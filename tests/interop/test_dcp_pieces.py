"""DCP saves tensors of which a rank holds several pieces: a ``CheckpointableTensor``, or a class of one's own."""

from pathlib import Path

import pieces
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launched import launch
from pieces import STEPS, in_pieces, state_of, tensors_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from training import bits

import dynaquant as dq
from dynaquant.interop.dcp import StorageReader, StorageWriter
from dynaquant.store.run import Run
from dynaquant.store.verifying import verify_run
from dynaquant.store.writing import plan_of, read_boxes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP warns that there is one process, as intended
checkpointable = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="PyTorch before 2.14 has no CheckpointableTensor"
)
TOP_DOWN, BOTTOM_UP = [(0, 20), (20, 40), (40, 70)], [(40, 70), (20, 40), (0, 20)]


def run_ranks(folder, count, *arguments):
    status, output = launch(Path(pieces.__file__), count, 240, folder / "run", *arguments)
    assert status == 0, output


def relative_error(found, original):
    return float((found - original).norm() / original.norm())


@checkpointable
@pytest.mark.parametrize("quality", ["lossless", "high"])
def test_any_number_of_ranks_loads_pieces_of_any_size(tmp_path, quality):
    run_ranks(tmp_path, 4, "save", quality, 2, 11)  # two replicas; each rank has three or four pieces
    run = Run(tmp_path / "run")
    assert dict(verify_run(run)) == dict.fromkeys(STEPS)
    assert [run.file(step).header.parent is None for step in STEPS] == [True, False, False]
    for step in STEPS:
        found = tensors_of(dq.load(run.folder, step=step))
        for name, original in tensors_of(state_of(step)).items():
            if quality == "lossless":
                assert bits(found[name]) == bits(original)
            else:
                assert relative_error(found[name], original) < 0.5
        torch.save(found, tmp_path / f"wanted-{step}.pt")
    run_ranks(tmp_path, 3, "load", 3, 30)  # one piece on each rank
    run_ranks(tmp_path, 2, "load", 2, 70)  # one rank has nothing


@checkpointable
@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_pieces_are_saved_and_loaded_in_one_process(tmp_path, save):
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    saving = save(state_of(1, lambda whole: in_pieces(whole, BOTTOM_UP)), storage_writer=writer)
    if save is dcp.async_save:
        getattr(saving, "upload_completion", saving).result()
    wanted = tensors_of(state_of(1))
    assert {name: bits(t) for name, t in tensors_of(dq.load(tmp_path / "run")).items()} == {
        name: bits(tensor) for name, tensor in wanted.items()
    }


@checkpointable
def test_pieces_are_loaded_from_a_run_that_a_checkpointer_has_written(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(48, 70)
    with dq.Checkpointer(tmp_path / "run", model, quality="lossless") as ckpt:
        ckpt.save(1)
    state = {"model": {"weight": in_pieces(torch.zeros(70, 48), TOP_DOWN[1:])}}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "run"))
    assert bits(state["model"]["weight"]) == bits(in_pieces(model.weight.detach(), TOP_DOWN[1:]))


class Pieces(torch.Tensor):
    """Row ranges of a tensor, for DCP of any version."""

    def __new__(cls, whole, rows):
        found = whole.as_subclass(cls)
        found.rows = rows
        return found

    def __create_write_items__(self, name, _):
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                MetadataIndex(name, torch.Size([begin, 0])),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([end - begin, self.shape[1]])),
                    properties,
                    self.shape,
                ),
            )
            for begin, end in self.rows
        ]

    def __get_tensor_shard__(self, index):
        begin = index.offset[0]
        return self.as_subclass(torch.Tensor)[begin : dict(self.rows)[begin]]


def test_a_first_moment_is_stored_in_units_of_the_second_moment_of_its_own_piece(tmp_path):
    stored = {}
    for order in (TOP_DOWN, BOTTOM_UP):
        state = state_of(1, lambda whole: Pieces(whole, TOP_DOWN))
        moments = state["optimizer"]["state"]["weight"]
        moments["exp_avg_sq"] = Pieces(moments["exp_avg_sq"], order)
        folder = tmp_path / str(order[0][0])
        dcp.save(state, storage_writer=StorageWriter(folder, quality="high"))
        stored[str(order)] = tensors_of(dq.load(folder))
        found = Run(folder).newest().header.by_name["optimizer.state.weight.exp_avg"]
        assert found.scheme.stored < 70 * 48  # quantized: less than a byte for each value
    first, second = stored.values()
    assert {name: bits(tensor) for name, tensor in first.items()} == {name: bits(t) for name, t in second.items()}


def test_a_tensor_with_missing_pieces_is_refused_and_the_next_save_works(tmp_path):
    writer = StorageWriter(tmp_path / "run", quality="lossless")
    whole = torch.randn(70, 48)
    with pytest.raises(CheckpointException, match="StateError: w: 960 of its elements are on no rank"):
        dcp.save({"w": Pieces(whole, TOP_DOWN[1:])}, storage_writer=writer)
    assert list((tmp_path / "run").glob("step*")) == []
    dcp.save({"w": Pieces(whole, TOP_DOWN)}, storage_writer=writer)
    assert Run(tmp_path / "run").steps() == [1]
    assert bits(dq.load(tmp_path / "run")["w"]) == bits(whole)


def test_every_piece_keeps_its_grid_step_while_its_size_hardly_changes(tmp_path):
    writer = StorageWriter(tmp_path / "run")
    rows = [(begin, begin + 7) for begin in range(0, 140, 7)]
    whole = torch.randn(140, 48) * torch.logspace(-2, 2, 140)[:, None]
    rungs = []
    for factor in (1, 1.04, 1):
        dcp.save({"w": Pieces(whole * factor, rows)}, storage_writer=writer)
        chain = Run(tmp_path / "run").chain(Run(tmp_path / "run").newest())
        stored = read_boxes(chain, plan_of(chain[0].header).boxes_of(0))
        rungs.append({box: tensor.codebook.rung for (_, box), tensor in stored.items()})
    assert len(rungs[0]) == 20
    assert rungs[0] == rungs[1] == rungs[2]
