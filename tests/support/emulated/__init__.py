"""A device of the tests' own: PyTorch knows it as the accelerator ``emulated``, but the host computes for it.

Importing this module builds and registers it, for the whole process. Tensors of host and device cannot be mixed up
there, as on a GPU. So it shows whether code for GPUs would run, and what crosses between host and device.
"""

import hashlib
import os
import subprocess
import types
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("device.cpp")
BUILT = Path(__file__).parents[3] / "build" / "emulated"


def _library() -> Path:
    """Build the library, unless it has been built from the same source for the same PyTorch."""
    known = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = BUILT / f"device-{known}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        packages = Path(torch.__file__).parent
        part = library.with_suffix(f".{os.getpid()}")
        command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
        command += [f"-I{packages / 'include'}", f"-L{packages / 'lib'}", "-ltorch_cpu", "-lc10"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        subprocess.run(command, check=True)
        part.rename(library)
    return library


@dataclass(frozen=True)
class Crossings:
    """What has crossed between host and device. waits: how often the host has waited for single values."""

    copies_to_host: int
    bytes_to_host: int
    copies_to_device: int
    bytes_to_device: int
    waits: int

    def __sub__(self, other: "Crossings") -> "Crossings":
        return Crossings(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def crossings() -> Crossings:
    """Return what has crossed since the device was registered."""
    return Crossings(*torch.ops.emulated.counts())


def _module() -> types.ModuleType:
    generator = torch.Generator()
    module = types.ModuleType("torch.emulated")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.current_stream = torch.accelerator.current_stream
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda _device=0: generator.get_state()
    module.set_rng_state = lambda state, _device=0: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


torch.ops.load_library(_library())
torch.utils.rename_privateuse1_backend("emulated")
torch._register_device_module("emulated", _module())
torch.utils.generate_methods_for_privateuse1_backend()
