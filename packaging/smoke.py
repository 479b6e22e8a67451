"""Tries an installed package, without pytest and without the sources: a training is saved, restored and inspected.

``make wheel`` and cibuildwheel run it in an environment that has only the wheel and what it depends on.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import dynaquant as dq


def training(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, dq.Checkpointer]:
    """A small model, its optimizer, and the Checkpointer of the run in the folder."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, dq.Checkpointer(folder, model, optimizer, evaluate=loss_of)


def loss_of(model: nn.Module) -> float:
    """The mean squared error on fixed data."""
    data = torch.linspace(-1, 1, 64 * 32).reshape(32, 64)
    return nn.functional.mse_loss(model(data), data).item()


def command(*arguments: str | Path) -> str:
    """What a dynaquant command prints. Raises CalledProcessError if it fails."""
    program = Path(sys.executable).with_name("dynaquant")
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Raises an error if anything does not work."""
    print(f"dynaquant {dq.__version__} from {Path(dq.__file__).parent}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        torch.manual_seed(0)
        model, optimizer, checkpointer = training(folder)
        with checkpointer:
            for step in range(1, 41):
                optimizer.zero_grad()
                data = torch.randn(32, 64)
                nn.functional.mse_loss(model(data), data).backward()
                optimizer.step()
                if step % 20 == 0:
                    checkpointer.save(step)
        restored, _, checkpointer = training(folder)
        with checkpointer:
            assert checkpointer.restore() == 40
            ratio = checkpointer.records()[-1].ratio
        before, after = loss_of(model), loss_of(restored)
        assert abs(after - before) <= 0.0101 * before, (before, after)
        assert "compress" in command("--help")
        assert "40" in command("log", folder)
        command("verify", folder)
    print(f"saved and restored, {ratio:.1f} times smaller; compilers visible: {shutil.which('c++') or 'none'}")


if __name__ == "__main__":
    main()
