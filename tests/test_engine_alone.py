"""The engine needs no training: it compresses arrays where modules, optimizers and process groups cannot be used."""

import subprocess
import sys

ALONE = """
import importlib, pkgutil, sys, types
import torch

class Forbidden(types.ModuleType):
    def __getattr__(self, name):
        raise AssertionError(f"the engine uses {self.__name__}.{name}")

for name in ("torch.distributed", "torch.nn", "torch.optim"):
    sys.modules[name] = forbidden = Forbidden(name)
    setattr(torch, name.partition(".")[2], forbidden)

import dynaquant.engine
for module in pkgutil.walk_packages(dynaquant.engine.__path__, "dynaquant.engine."):
    importlib.import_module(module.name)
others = {name.split(".")[1] for name in sys.modules if name.startswith("dynaquant.")}
assert others <= {"engine", "cached", "errors", "formatting", "_native"}, others

from dynaquant.engine.forms.form import Coded
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.stored import encode
from dynaquant.engine.quantize.grid import quantize
from dynaquant.engine.forms.form import dequantize

weights = torch.linspace(-1, 1, 10_000).reshape(100, 100).sin()
parent, stored = quantize(weights, rung=-20), quantize(weights + 0.001, rung=-20)
scheme, stream = encode(stored, parent)
decoded = decode(scheme, Coded(weights.dtype, weights.shape, stream, parent))
assert len(stream) < weights.nbytes / 20, len(stream)
assert torch.equal(dequantize(decoded), dequantize(stored))
assert (dequantize(decoded) - weights).abs().max() < 0.05
scheme, stream = encode(weights, None)
assert torch.equal(decode(scheme, Coded(weights.dtype, weights.shape, stream, None)), weights)
"""


def test_the_engine_compresses_arrays_without_a_training():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
