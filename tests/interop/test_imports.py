"""PyTorch's DCP takes seconds to import, so only folders of DCP import it."""

import subprocess
import sys

import torch
from safetensors.torch import save_file

SCRIPT = """
import sys
from pathlib import Path
import dynaquant as dq
from dynaquant.interop.export import Target, export
from dynaquant.interop.packing import Packer, compress
from dynaquant.restore.stored_checkpoint import StoredCheckpoint
folder = Path(sys.argv[1])
dq.Checkpointer
compress(folder / "model.safetensors", folder / "model.dqc", Packer())
for target in (Target.SAFETENSORS, Target.HF, Target.TORCH, Target.TORCH_STATE):
    export(StoredCheckpoint(folder / "model.dqc"), target, folder / f"again-{target}")
assert "torch.distributed.checkpoint" not in sys.modules
assert "torch.distributed.tensor" not in sys.modules
export(StoredCheckpoint(folder / "model.dqc"), Target.DCP, folder / "again-dcp")
assert "torch.distributed.checkpoint" in sys.modules
"""


def test_dcp_is_imported_only_for_its_folders(tmp_path):
    save_file({"weight": torch.randn(16, 16)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
