"""Measure what each stage of the delta coder saves on real checkpoints (method 1.5).

    python benchmarks/delta_ablation.py --data DIR [--cache build/benchmarks] [--steps 1600 --every 160] [--quick]

Trains the GPT, or takes its snapshots from the cache. Quantizes every checkpoint with the published quantizer. Codes
the chain of deltas by the five stages of the published coder and by dynaquant's default coder. Every stream is decoded
and compared with its levels.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import parse, parser
from results import Table, machine, sentence
from rich.console import Console
from rich.progress import track
from torch import nn
from workloads import gpt_validation, new_gpt, shakespeare, snapshots

from dynaquant.engine.coding import conditional, rearrange
from dynaquant.engine.coding.rearrange import Arrangement, Levels
from dynaquant.engine.forms.form import Coded, dequantize
from dynaquant.engine.forms.levels import QuantizedTensor
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.label import Label
from dynaquant.engine.quantize.kmeans_weights import kmeans_weights, quantize_weights
from dynaquant.engine.quantize.knobs import Configuration
from dynaquant.engine.tensors.dtypes import dtype_name
from dynaquant.search.live_model import score
from dynaquant.state.roles import labels
from dynaquant.store.entry import Entry

CODINGS: dict[str, tuple[Arrangement, bool]] = {
    "Huffman": ("alone", False),
    "run length + Huffman": ("alone", True),
    "delta + Huffman": ("delta", False),
    "delta + run length + Huffman": ("delta", True),
    "delta + rearrangement + run length + Huffman": ("rearranged", True),
}
"""Arrangement of the levels, and whether run lengths are used."""
RUN_LENGTHS = (("Huffman", "run length + Huffman"), ("delta + Huffman", "delta + run length + Huffman"))
"""Codings without run lengths and with them."""
ALONE, (BEFORE, REARRANGED) = "run length + Huffman", list(CODINGS)[-2:]
CONDITIONAL = "conditional coding"
LIMIT = "entropy of the level given the parent's level"
BAR = 1.15
PAPER = {"Huffman": 25, ALONE: 28, REARRANGED: 39}
"""Total ratio on ResNet-152."""
QUICK_STEPS, QUICK_EVERY = 6, 2
BATCHES, QUICK_BATCHES = 20, 2
"""Of validation windows."""


@dataclass(frozen=True)
class Checkpoint:
    """Sizes in bytes of one quantized checkpoint.

    coded: levels by coding; for the keyframe only codings without a parent. side: centres and outliers. stored: all
    streams of the weights, as in a checkpoint file. changed: share of levels that differ from the parent's.
    """

    step: int
    coded: dict[str, float]
    side: int
    stored: int
    changed: float
    loss: float
    restored_loss: float


def conditional_entropy(levels: Levels, parent: Levels) -> float:
    """Return ``H(level | parent level)`` by the counts of a tensor, in bytes for the whole tensor."""
    shape = (parent.count, levels.count)
    pairs = np.ravel_multi_index((parent.values, levels.values), shape)
    counts = np.bincount(pairs, minlength=parent.count * levels.count).reshape(shape).astype(np.float64)
    probabilities = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(-np.sum(counts * np.log2(probabilities, where=counts > 0, out=np.zeros(shape)))) / 8


def coded_sizes(tensor: QuantizedTensor, before: QuantizedTensor | None) -> dict[str, float]:
    """Return the bytes of a tensor's levels by coding. Decodes every stream and compares."""
    levels, parent = tensor.parent_levels, before.parent_levels if before else None
    size = levels.values.size
    coded: dict[str, bytes] = {}
    decoded: dict[str, NDArray[np.uint8]] = {}
    for name, (arrangement, run_length) in CODINGS.items():
        if arrangement == "alone" or parent is not None:
            coded[name] = rearrange.encode_as(arrangement, levels, parent, run_length)
            decoded[name] = rearrange.decode(coded[name], size, levels.count, arrangement, parent).values
    if parent is not None:
        coded[CONDITIONAL] = conditional.encode(tensor, before)
        decoded[CONDITIONAL] = conditional.decode(coded[CONDITIONAL], size, tensor.codebook, before)
    for name, values in decoded.items():
        assert np.array_equal(values, levels.values), f"{name} does not decode"
    sizes: dict[str, float] = {name: len(data) for name, data in coded.items()}
    return sizes if parent is None else {**sizes, LIMIT: conditional_entropy(levels, parent)}


def stored_size(name: str, tensor: QuantizedTensor, parent: QuantizedTensor | None) -> int:
    """Return the bytes of a tensor in a checkpoint file. Decodes them and compares."""
    scheme, coded = encode(tensor, parent, "rearranged")
    entry = Entry(name, Label("weight"), dtype_name(tensor.dtype), tensor.shape, "", len(coded), scheme)
    restored = values_of(decode(entry.scheme, Coded(tensor.dtype, tensor.shape, coded, parent)))
    assert torch.equal(restored, dequantize(tensor)), f"{name} does not decode"
    return len(coded)


def load_quantized(
    snapshot: dict[str, Any], model: nn.Module, configuration: Configuration
) -> dict[str, QuantizedTensor]:
    """Return the quantized weights of a snapshot by name. Loads the snapshot into the model."""
    model.load_state_dict(snapshot["model"])
    parameters = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    label_of = labels(parameters, {"model": model})
    weights = {name: tensor for name, tensor in parameters.items() if label_of[name].role == "weight"}
    sketched = kmeans_weights(weights, label_of, snapshot["gradients"])
    assert sketched.weights.keys() == weights.keys(), sketched.notes
    return quantize_weights(sketched, configuration)


def checkpoints(
    snapshots: list[dict[str, Any]], data: Path, configuration: Configuration, batches: int
) -> tuple[list[Checkpoint], int]:
    """Quantize every snapshot and code it as a delta of the previous one. Returns the sizes, and the number of weights.

    batches: validation windows for the loss.
    """
    model = new_gpt(shakespeare(data)[2])
    evaluate = gpt_validation(data, batches)
    parents: dict[str, QuantizedTensor] = {}
    result = []
    for snapshot in track(snapshots, description="quantizing and coding"):
        quantized = load_quantized(snapshot, model, configuration)
        coded: dict[str, float] = {}
        side = stored = changed = 0
        for name, tensor in quantized.items():
            levels = tensor.parent_levels
            parent = parents[name].parent_levels if parents else None
            for scheme, size in coded_sizes(tensor, parents.get(name)).items():
                coded[scheme] = coded.get(scheme, 0) + size
            whole = stored_size(name, tensor, parents.get(name))
            side += whole - len(rearrange.encode(levels, parent)[1])
            stored += whole
            changed += 0 if parent is None else int(np.count_nonzero(levels.values != parent.values))
        values = {name.removeprefix("model."): dequantize(tensor) for name, tensor in quantized.items()}
        original, restored = score(model, {}, evaluate), score(model, values, evaluate)
        count = sum(tensor.shape.numel() for tensor in quantized.values())
        result.append(Checkpoint(snapshot["step"], coded, side, stored, changed / count, original, restored))
        parents = quantized
    return result, count


def totals(chain: list[Checkpoint]) -> dict[str, float]:
    """Return bytes by coding over the chain of deltas. Conditional coding and the entropy come last."""
    return {name: sum(checkpoint.coded[name] for checkpoint in chain) for name in [*CODINGS, CONDITIONAL, LIMIT]}


def summary(chain: list[Checkpoint], weights: int) -> Table:
    sizes = totals(chain)
    values = weights * len(chain)
    side = sum(checkpoint.side for checkpoint in chain)
    columns = ["coding", "bits per weight", "smaller than Huffman", "in the paper", "float32 ratio", "all in"]
    rows = []
    for name, size in sizes.items():
        paper = f"{PAPER[name] / PAPER['Huffman']:.2f}×" if name in PAPER else ""
        smaller = f"{sizes['Huffman'] / size:.2f}×"
        ratios = [f"{4 * values / size:.1f}×", f"{4 * values / (size + side):.1f}×"]
        rows.append([name, f"{8 * size / values:.3f}", smaller, paper, *ratios])
    return Table(f"The chain of {len(chain)} deltas, levels of {weights:,} weights each", columns, rows)


def by_step(found: list[Checkpoint], weights: int) -> Table:
    columns = ["step", "changed", *("R+H", "Δ+R+H", "rearranged", "conditional", "entropy"), "side", "stored", "ratio"]
    rows = []
    for c in found:
        sizes = [c.coded.get(name) for name in (ALONE, BEFORE, REARRANGED, CONDITIONAL, LIMIT)]
        bits = ["" if size is None else f"{8 * size / weights:.2f}" for size in [*sizes, c.side, c.stored]]
        changed = f"{c.changed:.0%}" if BEFORE in c.coded else "keyframe"
        losses = [f"{c.loss:.4f}", f"{c.restored_loss:.4f}", f"{c.restored_loss / c.loss - 1:+.2%}"]
        rows.append([str(c.step), changed, *bits, f"{4 * weights / c.stored:.1f}×", *losses])
    return Table("Bits per weight and validation loss", [*columns, "loss", "restored", "worse by"], rows)


def plot(found: list[Checkpoint], weights: int, file: Path) -> None:
    figure = Figure(figsize=(11, 5), layout="constrained")
    sizes, losses = figure.subplots(1, 2)
    chain = found[1:]
    steps = [checkpoint.step for checkpoint in chain]
    styles = ["o-", "o--", "o-", "o--", "o-", "o-", "k:"]
    for name, style in zip(totals(chain), styles, strict=True):
        bits = [8 * checkpoint.coded[name] / weights for checkpoint in chain]
        sizes.plot(steps, bits, style, markersize=4, label=name)
    sizes.set(title="Levels of a delta", xlabel="training step", ylabel="bits per weight", ylim=(0, None))
    sizes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    every = [checkpoint.step for checkpoint in found]
    losses.plot(every, [checkpoint.loss for checkpoint in found], "o-", markersize=4, label="in training")
    losses.plot(every, [checkpoint.restored_loss for checkpoint in found], "s--", markersize=4, label="restored")
    losses.set(title="Quality", xlabel="training step", ylabel="validation loss, nats per character")
    losses.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    for axes in (sizes, losses):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


def verdict(chain: list[Checkpoint]) -> str:
    sizes = totals(chain)
    gain, alone = sizes[BEFORE] / sizes[REARRANGED], sizes[ALONE] / sizes[REARRANGED]
    return (
        f"{'passed' if gain >= BAR else 'MISSED'}: over the chain of deltas, rearranged streams are {gain:.2f}× "
        f"smaller than {BEFORE} and {alone:.2f}× smaller than run length + Huffman without a delta; "
        f"at least {BAR}× wanted"
    )


def comparison(chain: list[Checkpoint]) -> str:
    """Return the gains of the paper's stages beside those found, in words."""
    sizes, last = totals(chain), chain[-1]
    paper = [PAPER[ALONE] / PAPER["Huffman"], PAPER[REARRANGED] / PAPER[ALONE]]
    changed = sum(checkpoint.changed for checkpoint in chain) / len(chain)
    return f"""\
The order is the paper's: rearrangement gains most. There, run lengths make Huffman codes {paper[0]:.2f} times smaller
and rearrangement makes that {paper[1]:.2f} times smaller. Here, both on deltas, it is
{sizes["delta + Huffman"] / sizes[BEFORE]:.2f} and {sizes[BEFORE] / sizes[REARRANGED]:.2f} times: on average,
{changed:.0%} of the levels change from one checkpoint to the next. At the last one {last.changed:.0%} change, and it is
{last.coded["delta + Huffman"] / last.coded[BEFORE]:.2f} and {last.coded[BEFORE] / last.coded[REARRANGED]:.2f} times.
The fewer levels change, the longer are the runs."""


def page(found: list[Checkpoint], weights: int, bins: int, described: dict[str, str | int], plotted: str) -> str:
    sizes = totals(found[1:])
    above, closer = (sizes[name] / sizes[LIMIT] - 1 for name in (REARRANGED, CONDITIONAL))
    gains = [f"{sizes[before] / sizes[after] - 1:.1%}" for before, after in RUN_LENGTHS]
    gain = sizes[REARRANGED] / sizes[CONDITIONAL]
    ratio = 4 * weights * len(found) / sum(checkpoint.stored for checkpoint in found)
    worst = max(checkpoint.restored_loss / checkpoint.loss - 1 for checkpoint in found)
    return f"""\
# Delta ablation

```
.venv/bin/python benchmarks/delta_ablation.py --data DIR
```

`DIR` holds `shakespeare.txt`. {sentence(described)}

A GPT is trained with AdamW for {found[-1].step} steps, with a checkpoint every {found[1].step - found[0].step}. All are
quantized by the published quantizer with its default configuration, {bins} bins. Every stream was decoded and compared.

{verdict(found[1:])}.

Run lengths gain {gains[0]} without a delta, as neighbouring weights rarely share a bin, and {gains[1]} with one: they
pay once few levels change. *{CONDITIONAL}* is dynaquant's default coder. It conditions every level on the level in the
parent ([why](../decisions.md#what-is-a-level-conditioned-on)). It makes the levels {gain:.2f}× smaller than the
rearranged streams of the paper.

![bits per weight by coding, and validation loss]({plotted})

{summary(found[1:], weights).in_markdown()}

*float32 ratio* counts only the levels, *all in* also the centres and the outliers. *In the paper* is its ablation on
ResNet-152 ({PAPER["Huffman"]}×, {PAPER[ALONE]}× and {PAPER[REARRANGED]}× in total). The rearranged streams, with their
tables, take {above:.1%} more than the entropy of the levels conditioned on the parent, because Huffman codes spend
whole bits. A better coder with the same context cannot gain more than that. Conditional coding, with its tables,
takes {closer:.1%} more: rANS spends fractions of a bit.

## What agrees with the paper, and what does not

{comparison(found[1:])}

## Every checkpoint

{by_step(found, weights).in_markdown()}

R: run length, H: Huffman, Δ: delta. *side* is centres and outliers. *stored* is all that a checkpoint file holds of the
weights with the paper's coder; there, small tensors take the arrangement that suits them best. In keyframe and deltas
together, the weights take {ratio:.1f} times less than float32. The loss on restored weights is at most {worst:.2%}
worse.
"""


def main() -> None:
    made = parser(__doc__, data="shakespeare.txt")
    made.add_argument("--steps", type=int, default=1600)
    made.add_argument("--every", type=int, default=160)
    made.add_argument("--bins", type=int, default=Configuration().bins)
    arguments = parse(made)
    out = arguments.out / "delta_ablation.json"
    steps, every = (QUICK_STEPS, QUICK_EVERY) if arguments.quick else (arguments.steps, arguments.every)

    taken = snapshots("gpt", arguments.data, arguments.cache, steps, every)
    configuration = Configuration(bins=arguments.bins, embedding_bins=arguments.bins)
    found, weights = checkpoints(taken, arguments.data, configuration, QUICK_BATCHES if arguments.quick else BATCHES)
    console = Console()
    console.width = max(console.width, 130)
    console.print(summary(found[1:], weights).on_screen())
    console.print(by_step(found, weights).on_screen())
    console.print(verdict(found[1:]))

    described = machine("numpy", "torch")
    results = {
        "machine": described,
        "weights": weights,
        "verdict": verdict(found[1:]),
        "deltas": totals(found[1:]),
        "checkpoints": [asdict(checkpoint) for checkpoint in found],
    }
    out.write_text(json.dumps(results, indent=1) + "\n")
    plotted = out.with_suffix(".png")
    plot(found, weights, plotted)
    out.with_suffix(".md").write_text(page(found, weights, arguments.bins, described, plotted.name))


if __name__ == "__main__":
    main()
