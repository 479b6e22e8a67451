"""Encode or decode weights with NNCodec 2. Runs in the environment that ``make benchmark-setup`` builds for it.

build/nncodec/bin/python benchmarks/peers/nncodec_process.py encode WEIGHTS.npz WEIGHTS.nnc --qp -32
build/nncodec/bin/python benchmarks/peers/nncodec_process.py decode WEIGHTS.nnc WEIGHTS.npz
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

# ``nncodec.nnc`` imports trainings of PyTorch and TensorFlow with all their packages. Dictionaries of arrays need none.
sys.modules["nncodec.framework"] = framework = ModuleType("nncodec.framework")
for unused in ("pytorch_model", "tensorflow_model", "use_case_init"):
    setattr(framework, unused, None)

from nncodec import nnc  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("encode", "decode"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--qp", type=int, help="quantization parameter of matrices; four more double the step")
    arguments = parser.parse_args()
    if arguments.action == "encode":
        with np.load(arguments.source) as weights:
            # The last two differ from the defaults of ``compress``. They are the defaults of ``nncodec.nn.encode``.
            nnc.compress(dict(weights), str(arguments.out), qp=arguments.qp, nonweight_qp=-75, row_skipping=True)
    else:
        np.savez(arguments.out, **nnc.decompress(str(arguments.source)))


if __name__ == "__main__":
    main()
