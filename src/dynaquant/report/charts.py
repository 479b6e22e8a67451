"""The charts of a report as plotly figures. The page sets the colours of text and background."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dynaquant.engine.quantize.knobs import SCALES_PER_OCTAVE, Configuration, GridConfiguration
from dynaquant.formatting import in_bytes, in_seconds, percent, plural, times, unit_of
from dynaquant.report.figures import (
    BLUE,
    BROWN,
    CROWDED,
    GREEN,
    GREY,
    HEIGHT,
    ORANGE,
    PURPLE,
    RED,
    TURQUOISE,
    add_bars,
    add_line,
    escape,
    figure_for,
    finite,
    steps_of,
)
from dynaquant.report.statistics import Row, Statistics
from dynaquant.saving.record import Size

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROLES = {
    "weight": BLUE,
    "first_moment": ORANGE,
    "second_moment": GREEN,
    "buffer": PURPLE,
    "exact": RED,
    "bound": TURQUOISE,
    "average": BROWN,
}
STAGES = {"wait": GREY, "capture": ORANGE, "search": BLUE}
MOST_TENSORS = 200
"""Rows of the heat map. More would be hard to read, and the page grows with rows times checkpoints."""
LEAST_BITS = 1 / 64
"""Values below this one have the same colour in the heat map, because its colours are logarithmic."""
MOST_BITS = 32
"""Values above have the same colour if no weight's dtype says how many bits it has. A tensor of a few values takes more
bits than its values, for its stream's own header."""
LABEL = 36
"""Characters shown of a tensor's name beside the heat map; the pointer shows the whole name."""
ROW_HEIGHT = 18


@dataclass(frozen=True)
class Chart:
    """A figure and a text about it.

    figure: None if there is nothing to draw; the text then says why. width: half or all of the page's width; scrolled
    if the figure may be larger than the window.
    """

    key: str
    title: str
    text: str
    figure: Figure | None
    width: Literal["half", "wide", "scrolled"] = "half"


def charts(statistics: Statistics) -> list[Chart]:
    """Return all charts in the order of the page."""
    drawn = (_sizes, _ratios, _degradation, _configuration, _bits, _seconds, _restore)
    return [draw(statistics) for draw in drawn]


def _sizes(statistics: Statistics) -> Chart:
    rows = statistics.by_step
    divisor, unit = unit_of(max(row.record.total.stored for row in rows))
    figure = figure_for(rows, f"{unit} on disk")
    parts = [
        (role.replace("_", " "), color, [row.record.roles.get(role, Size()).stored for row in rows])
        for role, color in ROLES.items()
    ]
    headers = [row.record.total.stored - sum(size.stored for size in row.record.roles.values()) for row in rows]
    for name, color, sizes in [*parts, ("header", GREY, headers)]:
        if any(sizes):
            add_bars(figure, rows, [size / divisor for size in sizes], name, color, [in_bytes(size) for size in sizes])
    raw, stored = statistics.whole.raw / len(rows), statistics.whole.stored / len(rows)
    text = (
        f"On average {in_bytes(stored)} for tensors of {in_bytes(raw)}. "
        "Keyframes are larger: they depend on no other checkpoint."
    )
    return Chart("sizes", "Size of each checkpoint", text, figure)


def _ratios(statistics: Statistics) -> Chart:
    rows = statistics.by_step
    figure = figure_for(rows, "ratio")
    figure.update_yaxes(rangemode="tozero", ticksuffix="×")
    whole = [row.record.ratio for row in rows]
    add_line(figure, rows, whole, "whole state", BLUE, [times(ratio) for ratio in whole])
    weights = [row.record.roles["weight"].ratio if "weight" in row.record.roles else None for row in rows]
    if any(weights):
        add_line(figure, rows, weights, "weights", ORANGE, [times(ratio or 1) for ratio in weights])
    text = f"Bytes of the tensors divided by bytes stored. All checkpoints together: {times(statistics.whole.ratio)}."
    return Chart("ratios", "Compression ratio", text, figure)


def _degradation(statistics: Statistics) -> Chart:
    rows, title = statistics.by_step, "Degradation and its limit"
    losses = [row.record.degradation for row in rows]
    unknown = [loss is None or not math.isfinite(loss) for loss in losses]
    if all(unknown):
        if any(loss is not None for loss in losses):
            return Chart("degradation", title, "No checkpoint has a finite degradation of the metric.", None)
        judges = sorted({row.record.judged_by for row in rows if row.record.judged_by})
        by = f" The search was guided by {' and '.join(judges)}." if judges else ""
        blind = any(row.record.quality for row in rows)
        why = "evaluate does not see the weights" if blind else "there was no evaluate function"
        return Chart("degradation", title, f"Nothing was measured: {why}.{by}", None)
    figure = figure_for(rows, "degradation")
    figure.update_yaxes(tickformat=".2~%", rangemode="tozero")
    limits = [row.record.limit for row in rows]
    if any(limit is not None and math.isfinite(limit) for limit in limits):
        figure.add_scatter(
            x=steps_of(rows),
            y=[finite(limit) for limit in limits],
            name="limit",
            mode="lines+markers" if len(rows) == 1 else "lines",
            line={"color": RED, "dash": "dash", "width": 2},
            customdata=[percent(limit) for limit in limits],
            hovertemplate="limit: %{customdata}<extra></extra>",
        )
    add_line(figure, rows, losses, "measured", BLUE, [percent(loss, sign=True) for loss in losses])
    if any(unknown):
        missing = [row for row, is_unknown in zip(rows, unknown, strict=True) if is_unknown]
        figure.add_scatter(
            x=steps_of(missing),
            y=[0.0] * len(missing),
            name="no number",
            mode="markers",
            marker={"color": GREY, "symbol": "x-thin-open", "size": 9, "line": {"width": 2}},
            customdata=[_why_unknown(row) for row in missing],
            hovertemplate="%{customdata}<extra></extra>",
        )
    text = (
        "How much worse the metric is with the weights that a restore returns, relative to the weights in training. No "
        "point should lie above the dashed line. Below zero the restored weights score better."
    )
    if any(unknown):
        text += f" Crosses mark checkpoints without a finite degradation: {sum(unknown)} of {len(rows)}."
    return Chart("degradation", title, text, figure)


def _why_unknown(row: Row) -> str:
    if row.record.degradation is not None:
        return f"the metric is {percent(row.record.degradation)}"
    if row.record.quality:
        return "the metric does not see the weights"
    return (
        f"no metric; the search was guided by {escape(row.record.judged_by)}" if row.record.judged_by else "no metric"
    )


def _configuration(statistics: Statistics) -> Chart:
    rows, title = statistics.by_step, "Configuration"
    chosen = [row.record.configuration for row in rows]
    grids = [knobs if isinstance(knobs, GridConfiguration) else None for knobs in chosen]
    bins = [knobs if isinstance(knobs, Configuration) else None for knobs in chosen]
    panels = (["scale, log₂"] if any(grids) else []) + (["bins", "share of weights"] if any(bins) else [])
    if not panels:
        why = "The weights of every checkpoint are stored exactly; there is no configuration."
        return Chart("configuration", title, why, None)
    figure = figure_for(rows, *panels)
    text = []
    if any(grids):
        exponents = [knobs.scale / SCALES_PER_OCTAVE if knobs else None for knobs in grids]
        dithered = [knobs is not None and knobs.dithered for knobs in grids]
        hover = [f"2^{exponent:.2f}" if exponent is not None else None for exponent in exponents]
        add_line(figure, rows, exponents, "scale of the grids", BLUE, hover)
        text.append("One more means grid steps twice as large.")
        if any(dithered):
            figure.add_scatter(
                x=steps_of(rows),
                y=[each if stochastic else None for each, stochastic in zip(exponents, dithered, strict=True)],
                name="stochastic rounding",
                mode="markers",
                marker={"color": ORANGE, "symbol": "diamond", "size": 11},
                hovertemplate="stochastic rounding, after a restore<extra></extra>",
            )
    if any(bins):
        first = len(panels) - 1
        series = (
            ("bins", "bins", BLUE, first),
            ("bins of embeddings", "embedding_bins", GREEN, first),
            ("pruned", "pruned", ORANGE, first + 1),
            ("protected (outliers)", "protected", PURPLE, first + 1),
        )
        for name, field, color, panel in series:
            values = [getattr(knobs, field) if knobs else None for knobs in bins]
            texts = [None if value is None else f"{value}" if panel == first else f"{value:.2%}" for value in values]
            add_line(figure, rows, values, name, color, texts, panel)
        figure.update_yaxes(row=first, type="log", dtick=math.log10(2))
        figure.update_yaxes(row=first + 1, tickformat=".1~%", rangemode="tozero")
        text.append("More bins and less pruning give weights closer to the original, and larger files.")
    if exact := sum(knobs is None for knobs in chosen):
        text.append(f"The weights of {plural(exact, 'checkpoint')} of {len(rows)} are stored exactly.")
    return Chart("configuration", title, " ".join(text), figure)


def _bits(statistics: Statistics) -> Chart:
    rows, title, names = statistics.by_step, "Bits per weight of each tensor", statistics.tensors
    text = "Darker is smaller. Empty: the checkpoint does not have the tensor."
    if not names:
        return Chart("bits", title, "No tensor of this run has the role weight.", None, "wide")
    if len(names) > MOST_TENSORS:
        taken = {name: sum(row.weights[name].size.stored for row in rows if name in row.weights) for name in names}
        kept = set(sorted(names, key=lambda name: -taken[name])[:MOST_TENSORS])
        text += f" The {MOST_TENSORS} largest of {len(names):,} tensors, in the order of the model."
        names = [name for name in names if name in kept]
    bits = [[row.weights[name].bits if name in row.weights else None for row in rows] for name in names]
    known = [max(value, LEAST_BITS) for values in bits for value in values if value] or [1.0]
    infos = [info for row in rows for info in row.weights.values() if info.elements]
    most = max((8 * info.size.raw / info.elements for info in infos), default=0) or MOST_BITS
    low, high = math.floor(math.log2(min(known))), math.ceil(math.log2(min(max(known), most)))
    high = max(high, low + 1)
    labels = [f"{2**power}" if power >= 0 else f"1/{2**-power}" for power in range(low, high + 1)]
    if max(known) > 2**high:
        labels[-1] += " or more"
    figure = figure_for(rows)
    figure.add_heatmap(
        x=steps_of(rows),
        y=list(range(len(names))),  # not the names: two may look the same once shortened
        z=[[value if value is None else math.log2(max(value, 2.0**low)) for value in values] for values in bits],
        customdata=[
            [[escape(name), f"{value or 0:.3f}"] for value in values] for name, values in zip(names, bits, strict=True)
        ],
        hovertemplate="%{customdata[0]}<br>step %{x}: %{customdata[1]} bits<extra></extra>",
        colorscale="Viridis",
        zmin=low,
        zmax=high,
        ygap=1,
        xgap=1 if len(rows) <= CROWDED else 0,
        colorbar={
            "title": {"text": "bits<br> "},
            "tickvals": list(range(low, high + 1)),
            "ticktext": labels,
            "len": 240,
            "lenmode": "pixels",
            "y": 1,
            "yanchor": "top",
            "thickness": 14,
            "outlinewidth": 0,
        },
    )
    figure.update_layout(height=max(HEIGHT, 90 + ROW_HEIGHT * len(names)), hovermode="closest")
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[escape(_short(name)) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )
    return Chart("bits", title, text, figure, "scrolled")


def _short(name: str) -> str:
    name = name.removeprefix("model.")
    return name if len(name) <= LABEL else f"…{name[1 - LABEL :]}"


def _seconds(statistics: Statistics) -> Chart:
    rows, title, total = statistics.by_step, "Time that training waited for each save", statistics.seconds
    whole = sum(total.values())
    if not whole:
        return Chart("seconds", title, "The files do not say how long saving took.", None)
    figure = figure_for(rows, "seconds")
    for stage in sorted(total, key=lambda stage: list(STAGES).index(stage) if stage in STAGES else len(STAGES)):
        seconds = [row.record.seconds.get(stage, 0.0) for row in rows]
        shares = [_share(value, sum(row.record.seconds.values())) for value, row in zip(seconds, rows, strict=True)]
        hover = [f"{value:.3f} s, {share}" for value, share in zip(seconds, shares, strict=True)]
        add_bars(figure, rows, seconds, escape(stage), STAGES.get(stage, PURPLE), hover)
    stages = ", ".join(f"{stage} {_share(seconds, whole)}" for stage, seconds in total.items())
    text = (
        f"All saves together {in_seconds(whole)}: {stages}. Without the time of writing, which happens in the "
        "background."
    )
    return Chart("seconds", title, text, figure)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def _restore(statistics: Statistics) -> Chart:
    rows, title = statistics.by_step, "What a restore reads"
    sizes = [row.restore.size if row.restore else None for row in rows]
    if not any(sizes):
        return Chart("restore", title, "No checkpoint of this run can be restored.", None)
    divisor, unit = unit_of(max(size or 0 for size in sizes))
    figure = figure_for(rows, unit, "files")
    read = [(size or 0) / divisor for size in sizes]
    add_bars(
        figure, rows, read, "bytes to read", BLUE, [in_bytes(size) if size else "cannot be restored" for size in sizes]
    )
    files = [row.restore.files if row.restore else None for row in rows]
    add_line(figure, rows, files, "files", ORANGE, [f"{count}" for count in files], 2)
    figure.update_yaxes(row=2, rangemode="tozero", dtick=1 if max(count or 0 for count in files) < 6 else None)
    text = "A delta needs its parents, back to the last keyframe."
    if lost := sum(size is None for size in sizes):
        text += f" {plural(lost, 'checkpoint')} cannot be restored: see Skipped, at the top."
    return Chart("restore", title, text, figure)
