"""Memory that saves need beyond the state: two bytes per value (levels), and the buffers of one tensor."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")

TENSORS, ELEMENTS = 12, 2_000_000
VALUES = 3 * TENSORS * ELEMENTS  # weights and both moments
TENSOR = 4 * ELEMENTS  # bytes

SAVES = f"""
import ctypes
import sys
from pathlib import Path

import torch

import dynaquant as dq

torch.set_num_threads(1)
torch.manual_seed(0)


def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(kind)).split()[1])


model = torch.nn.ParameterList(torch.randn({ELEMENTS // 1000}, 1000) for _ in range({TENSORS}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for parameter in model.parameters():
    moments = {{"exp_avg": 1e-3 * torch.randn_like(parameter), "exp_avg_sq": 1e-6 * torch.rand_like(parameter)}}
    optimizer.state[parameter] = {{"step": torch.tensor(1.0), **moments}}
with dq.Checkpointer(sys.argv[1], torch.nn.Linear(2, 2)) as ckpt:
    ckpt.save(0).result()  # allocates what is needed once
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
with dq.Checkpointer(sys.argv[2], model, optimizer, quality=sys.argv[3]) as ckpt:
    for step in range(3):
        ckpt.save(step).result()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["balanced", "high"])
def test_saves_need_two_bytes_per_value_and_the_buffers_of_one_tensor(tmp_path, quality):
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    small, large = tmp_path / "small", tmp_path / "large"
    command = [sys.executable, script, small, large, quality]
    # Freed memory is returned to the system at once, so resident memory is the memory in use.
    ran = subprocess.run(
        command, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert len(list(large.glob("*.dqc"))) == 3
    assert int(ran.stdout) <= 2 * VALUES + 12 * TENSOR  # singular vectors of first moments take some of these
