"""Compare ``Bound`` with ZFP and SZ3: bytes and speed at the same bound on every value's error.

    python benchmarks/bounds.py --data DIR [--cache build/benchmarks] [--quick]

Fields: terrain, geoid and rain of the package ``itur`` (grids of the International Telecommunication Union), and two
states of a turbulent flow, which is computed here. Weights: two checkpoints of the GPT of ``workloads.py``, shortly
trained, taken from the cache if they are there. Every result is decoded and every value is compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from matplotlib import cbook
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import parse, parser
from results import Table, machine, publish, sentence, show
from workloads import snapshots

import dynaquant as dq
from dynaquant.engine.forms.form import Coded, StoredTensor
from dynaquant.engine.forms.registry import decode
from dynaquant.engine.forms.stored import encode, values_of
from dynaquant.engine.quantize.bounds import quantize_bounded

BOUNDS = (1e-2, 1e-3, 1e-4, 1e-5)
"""The largest error, relative to the range of a tensor."""
STEPS, EVERY = 40, 20
"""Training steps of the GPT, and steps between its checkpoints."""
GRID, FLOW_STEPS, BETWEEN = 256, 300, 10
"""Of the flow: points along each side, time steps to the first state, and from there to the second."""
ALONE, DELTA, ZFP, SZ3 = "Bound", "Bound, with parent", "ZFP", "SZ3"
COLORS = {ALONE: "C3", DELTA: "C1", ZFP: "C0", SZ3: "C2"}
TURNS = 2
"""Turns of every method. The fastest counts."""
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Data:
    """Tensors that are compressed together, and the same tensors a checkpoint before, if there are any."""

    name: str
    tensors: list[Array]
    before: list[Array] | None = None


@dataclass(frozen=True)
class Result:
    """One method at one bound. Sizes in bytes, times in seconds. excess: the largest error as a share of the bound."""

    data: str
    method: str
    bound: float
    raw: int
    stored: int
    encoding: float
    decoding: float
    excess: float


def flow(grid: int, steps: int, between: int) -> Data:
    """Return the vorticity of a decaying two-dimensional turbulence at two times.

    The Navier-Stokes equations in vorticity form on a periodic square, pseudo-spectral, with the second-order method of
    Runge and Kutta; viscosity 1e-3, time steps of 0.0004.
    """
    draw = np.random.default_rng(0)
    k = np.fft.fftfreq(grid, 1 / grid)
    kx, ky = k[:, None], k[None, : grid // 2 + 1].copy()
    ky[0, -1] = grid // 2
    squares = kx**2 + ky**2
    inverse = np.divide(1.0, squares, out=np.zeros_like(squares), where=squares > 0)
    kept = (np.abs(kx) < grid / 3) & (np.abs(ky) < grid / 3)  # products of waves must not fold over
    energy = np.where(squares > 0, np.exp(-((np.sqrt(squares) - 8) ** 2) / 8), 0)
    vorticity = np.fft.rfft2(draw.normal(size=(grid, grid))) * energy
    vorticity *= 20 / np.abs(np.fft.irfft2(vorticity)).std()

    def change(w: NDArray[np.complex128]) -> Any:
        u, v, wx, wy = (
            np.fft.irfft2(f) for f in (1j * ky * w * inverse, -1j * kx * w * inverse, 1j * kx * w, 1j * ky * w)
        )
        return -np.fft.rfft2(u * wx + v * wy) * kept - 1e-3 * squares * w

    states = []
    for step in range(1, steps + between + 1):
        middle = vorticity + 0.0002 * change(vorticity)
        vorticity = vorticity + 0.0004 * change(middle)
        if step in (steps, steps + between):
            states.append(np.fft.irfft2(vorticity).astype(np.float32))
    return Data(f"turbulent flow, {grid} × {grid}", [states[1]], [states[0]])


def fields(quick: bool) -> list[Data]:
    """Return the measured fields, as float32. quick: only the small one that Matplotlib has."""
    if quick:
        sample: Any = cbook.get_sample_data("jacksboro_fault_dem.npz")
        elevation: NDArray[np.int16] = sample["elevation"]
        return [Data("terrain (Jacksboro)", [elevation.astype(np.float32)])]
    found = importlib.util.find_spec("itur")
    if found is None or found.origin is None:
        raise SystemExit("the fields are in the package itur: make benchmark-setup")
    folder = Path(found.origin).parent / "data"
    files = {
        "terrain": "1511/v2_topo.npz",
        "geoid": "1511/v2_egm2008.npz",
        "rain in September": "837/v7_mt_month09.npz",
    }
    return [Data(name, [_only(np.load(folder / file))]) for name, file in files.items()]


def _only(arrays: Any) -> Array:
    (name,) = arrays.files
    values: Array = arrays[name].astype(np.float32)
    return values


def weights(data: Path, cache: Path, steps: int, every: int) -> Data:
    """Return the matrices of the GPT's last checkpoint, and of the one before."""
    before, last = (
        [w.float().numpy() for w in one["model"].values() if w.ndim == 2]
        for one in snapshots("gpt", data, cache, steps, every)[-2:]
    )
    return Data(f"weights of the GPT at step {steps}", last, before)


def bounded(tensor: Array, bound: float, parent: StoredTensor | None) -> tuple[int, Callable[[], Array]]:
    original = torch.from_numpy(tensor)
    stored = quantize_bounded({"": original}, {"": dq.Bound(absolute=bound)})
    scheme, stream = encode(stored.get("", original), parent)
    return len(stream), lambda: values_of(decode(scheme, Coded(torch.float32, original.shape, stream, parent))).numpy()


def zfp(tensor: Array, bound: float) -> tuple[int, Callable[[], Array]]:
    import zfpy  # noqa: PLC0415

    stream = zfpy.compress_numpy(tensor, tolerance=bound)
    return len(stream), lambda: zfpy.decompress_numpy(stream)


def sz3(tensor: Array, bound: float) -> tuple[int, Callable[[], Array]]:
    from pysz import sz, szConfig, szErrorBoundMode  # noqa: PLC0415

    config = szConfig(*tensor.shape)
    config.errorBoundMode = szErrorBoundMode.ABS
    config.absErrorBound = bound
    stream, _ = sz.compress(tensor, config)
    return len(stream), lambda: sz.decompress(stream, np.float32, tensor.shape)[0]


def measure(data: Data, method: str, bound: float, turns: int) -> Result:
    """Compress and decompress all tensors. The fastest of ``turns`` counts, for each direction."""
    bounds = [bound * float(tensor.max() - tensor.min()) for tensor in data.tensors]
    parents: list[StoredTensor | None] = [None] * len(bounds)
    if method == DELTA:
        assert data.before is not None
        firsts = [torch.from_numpy(tensor) for tensor in data.before]
        parents = [
            quantize_bounded({"": first}, {"": dq.Bound(absolute=b)}).get("", first)
            for first, b in zip(firsts, bounds, strict=True)
        ]
    encoding = decoding = np.inf
    for _ in range(turns):
        start = perf_counter()
        if method in (ALONE, DELTA):
            coded = [bounded(*one) for one in zip(data.tensors, bounds, parents, strict=True)]
        else:
            coded = [(zfp if method == ZFP else sz3)(*one) for one in zip(data.tensors, bounds, strict=True)]
        middle = perf_counter()
        decoded = [values() for _, values in coded]
        encoding, decoding = min(encoding, middle - start), min(decoding, perf_counter() - middle)
    excess = max(
        float(np.abs(found.reshape(one.shape).astype(np.float64) - one).max()) / b
        for found, one, b in zip(decoded, data.tensors, bounds, strict=True)
    )
    raw, size = sum(tensor.nbytes for tensor in data.tensors), sum(size for size, _ in coded)
    return Result(data.name, method, bound, raw, size, encoding, decoding, excess)


def table(name: str, found: list[Result]) -> Table:
    columns = ["method", *(f"{bound:g}" for bound in sorted({r.bound for r in found}, reverse=True))]
    rows = []
    for method in dict.fromkeys(r.method for r in found):
        by_bound = sorted((r for r in found if r.method == method), key=lambda r: -r.bound)
        cells = [
            f"{r.raw / r.stored:.1f}×{'' if r.excess <= 1 else ' (missed)'}, {r.raw / r.encoding / 1e6:.0f} / "
            f"{r.raw / r.decoding / 1e6:.0f}"
            for r in by_bound
        ]
        rows.append([method, *cells])
    return Table(name, columns, rows)


def plot(found: list[Result], file: Path) -> None:
    names = list(dict.fromkeys(r.data for r in found))
    figure = Figure(figsize=(4 * len(names), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for method in dict.fromkeys(r.method for r in found if r.data == name):
            some = [r for r in found if (r.data, r.method) == (name, method)]
            ratios = [r.raw / r.stored for r in some]
            axes.loglog([r.bound for r in some], ratios, "o-", color=COLORS[method], markersize=4, label=method)
        axes.set(title=name, xlabel="bound, relative to the range")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.supylabel("times smaller")
    figure.savefig(file, dpi=130)


def who_wins(found: list[Result]) -> str:
    """Return a list of the methods that make each tensor smallest, and how much larger ``Bound`` is."""
    lines = []
    for name in dict.fromkeys(r.data for r in found):
        for bound in sorted({r.bound for r in found}, reverse=True):
            alone = {r.method: r.stored for r in found if (r.data, r.bound) == (name, bound) and r.excess <= 1}
            delta = alone.pop(DELTA, None)
            best = min(alone, key=lambda method: alone[method])
            line = f"- {name}, {bound:g}: {best}"
            if best != ALONE and ALONE in alone:
                line += f"; Bound takes {alone[ALONE] / alone[best]:.2f} times its bytes"
            if delta is not None:
                line += f"; with the parent, it takes {delta / alone[best]:.2f} times the bytes of {best}"
            lines.append(line + ".")
    return "\n".join(lines)


def page(found: list[Result], described: dict[str, str | int]) -> str:
    names = dict.fromkeys(r.data for r in found)
    missed = sorted({r.method for r in found if r.excess > 1})
    parts = [
        "# A bound on every value's error",
        "```\nmake benchmark-setup\n.venv/bin/python benchmarks/bounds.py --data DIR\n```",
        f"`DIR` holds `shakespeare.txt`. {sentence(described)}",
        "How small are fields and weights if no value may be further from the original than a bound? `Bound` is "
        "`roles={…: dq.Bound(…)}`, with its quantizer and coder. ZFP runs in its fixed-accuracy mode and SZ3 with an "
        "absolute bound and its default algorithm, both through their Python packages. The bound is a share of each "
        "tensor's range, the same for all. Everything is float32, on one thread. Each cell has how many times smaller "
        "the data get, then megabytes per second of compression / decompression. *With parent*: the state before is "
        "known, as in a run of checkpoints; ZFP and SZ3 have nothing like it. Speeds are those of one run on a busy "
        "machine: they may be off by a factor of two. Sizes are not.",
        *(table(name, [r for r in found if r.data == name]).in_markdown() for name in names),
        "![times smaller over the bound](bounds.png)",
        "## Which is smallest?",
        who_wins(found),
        "Every decoded value was compared with the original. "
        + (
            f"Beyond the bound somewhere: {', '.join(missed)}; these cells say *missed*."
            if missed
            else "All keep the bound."
        ),
        "ZFP rounds the bound down to a power of two, so its errors are smaller than they need to be. SZ3 "
        "predicts by interpolation, which smooth fields suit. `Bound` predicts by neighbours (Lorenzo) or not at "
        "all, whichever a sample says, and by the parent.",
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    made = parser(__doc__, "shakespeare.txt")
    arguments = parse(made)
    quick = arguments.quick
    torch.set_num_threads(1)
    steps, every = (4, 2) if quick else (STEPS, EVERY)
    simulated = flow(64, 20, 5) if quick else flow(GRID, FLOW_STEPS, BETWEEN)
    everything = [*fields(quick), simulated, weights(arguments.data, arguments.cache, steps, every)]
    found = []
    for data in everything:
        for bound in BOUNDS:
            for method in (ALONE, *([DELTA] if data.before else []), ZFP, SZ3):
                found.append(measure(data, method, bound, 1 if quick else TURNS))
        show(table(data.name, [r for r in found if r.data == data.name]), width=120)
    described = machine("numpy", "torch", "zfpy", "pysz")
    numbers = {"machine": described, "results": [asdict(r) for r in found]}
    publish(arguments.out, "bounds", numbers, lambda file: plot(found, file), page(found, described))


if __name__ == "__main__":
    main()
