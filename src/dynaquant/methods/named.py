"""The methods by name."""

from __future__ import annotations

from dynaquant.engine.quantize.knobs import MethodName
from dynaquant.methods.grid.method import GRID
from dynaquant.methods.method import Method
from dynaquant.methods.published.method import PUBLISHED

METHODS: dict[MethodName, Method] = {"grid": GRID, "published": PUBLISHED}
