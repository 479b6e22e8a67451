"""Settings for the tests of the search."""

from dataclasses import replace

import pytest

from dynaquant.engine.quantize.step_limits import LOOSEST_LIMITS
from dynaquant.saving.presets import BALANCED, PRESETS


@pytest.fixture
def coarse_grids(monkeypatch):
    """The metric alone decides: a grid step may be larger than what a short training has learned."""
    monkeypatch.setitem(PRESETS, "balanced", replace(BALANCED, step_limits=LOOSEST_LIMITS))
