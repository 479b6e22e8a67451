"""The plotly figures that charts are made of: axes, bars and lines over the checkpoints of a run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from dynaquant.errors import MissingPackageError
from dynaquant.report.statistics import Row

try:
    from plotly.graph_objects import Figure
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ModuleNotFoundError as error:
    raise MissingPackageError("The report of a run", "plotly", "report") from error

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#3b82c4", "#d9822b", "#2e9e6b", "#9b6cd1", "#d9534f", "#8a8f98"
TURQUOISE, BROWN = "#2aa5b5", "#a0764f"
"""These colours are visible on white and on near-black."""
CROWDED = 60
"""With more checkpoints than this, bars have no gaps and markers are small."""
HEIGHT = 320
"""Height of a chart in pixels."""


def javascript() -> str:
    """Return plotly's own JavaScript, which draws the charts in the page."""
    source: str = get_plotlyjs()
    return source


def figure_for(rows: Sequence[Row], *panels: str) -> Figure:
    """Return an empty figure: one position for each checkpoint; panels one below the other, with these units."""
    panels = panels or ("",)
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    figure.update_layout(
        template="none",
        height=HEIGHT,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        barmode="stack",
        bargap=0.25 if len(rows) <= CROWDED else 0,
        hovermode="x unified",
        hoverlabel={"bgcolor": "#ffffff", "bordercolor": GREY, "font": {"color": "#1c1f24", "size": 12}},
        font={"size": 12, "family": "system-ui, sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom", "traceorder": "normal"},
        showlegend=True,
        dragmode="zoom",
    )
    # One position for each, not a linear axis: old checkpoints may be far apart, new ones close together.
    steps = steps_of(rows)
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=steps, nticks=10, automargin=True, showgrid=False
    )
    figure.update_xaxes(range=[-0.5, len(steps) - 0.5], unifiedhovertitle={"text": "step %{x}"})
    figure.update_xaxes(row=len(panels), title={"text": "step", "standoff": 8})
    figure.update_yaxes(automargin=True, gridcolor=GREY, zerolinecolor=GREY, zerolinewidth=1)
    for number, unit in enumerate(panels, start=1):
        figure.update_yaxes(row=number, title={"text": unit, "standoff": 8})
    return figure


def add_bars(
    figure: Figure, rows: Sequence[Row], heights: Sequence[float], name: str, color: str, hover: Sequence[str]
) -> None:
    """Add a bar for each checkpoint, stacked on earlier bars. hover: texts shown at the pointer."""
    hovertemplate = f"{name}: %{{customdata}}<extra></extra>"
    figure.add_bar(
        x=steps_of(rows), y=heights, name=name, marker={"color": color}, customdata=hover, hovertemplate=hovertemplate
    )


def add_line(
    figure: Figure,
    rows: Sequence[Row],
    heights: Sequence[float | None],
    name: str,
    color: str,
    hover: Sequence[Any],
    panel: int = 1,
) -> None:
    """Add a line with a marker for each checkpoint; None and infinities are gaps. hover: texts shown at the pointer."""
    figure.add_scatter(
        x=steps_of(rows),
        y=[finite(height) for height in heights],
        name=name,
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"size": 7 if len(rows) <= CROWDED else 3},
        customdata=hover,
        hovertemplate=f"{name}: %{{customdata}}<extra></extra>",
        row=panel,
        col=1,
    )


def steps_of(rows: Iterable[Row]) -> list[str]:
    """Return the steps of the checkpoints, as positions on the horizontal axis."""
    return [str(row.record.step) for row in rows]


def finite(value: float | None) -> float | None:
    """Return the value; None for infinities and NaN, which plotly cannot draw."""
    return value if value is not None and math.isfinite(value) else None


def escape(name: str) -> str:
    """Escape a name for plotly, which interprets some tags in text."""
    return html.escape(name, quote=False)
