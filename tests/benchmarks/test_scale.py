"""The benchmark of scale: it simulates what PyTorch's ranks hold, and its figures follow from the number of ranks."""

import pytest
from scale import measure, moments_of_a_rank
from scale_models import LAYOUTS, MODELS, Layout
from scale_report import extrapolated, table


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_is_gathered_grows_with_the_ranks_and_the_header_hardly(layout: Layout) -> None:
    few, many = (measure("quick", layout, ranks) for ranks in (8, 16))
    assert many.division > 1.9 * few.division
    assert many.commit > few.commit
    assert many.plain_header < 1.5 * few.plain_header
    assert few.needed <= 4
    assert few.files <= 9
    (cells,) = extrapolated([few, many], 10_000).rows
    assert int(cells[-1].replace(",", "")) > 10_000
    assert len(table([few, many], "quick").rows) == 2


def test_the_number_of_reductions_does_not_grow_with_the_ranks() -> None:
    few, many = (moments_of_a_rank("quick", ranks)[0] for ranks in (8, 64))
    assert many < 2 * few  # grids are judged a few at a time, and how many depends on the values


def test_the_models_have_the_parameters_that_their_names_say() -> None:
    def parameters(model: str) -> int:
        found = 0
        for shape, _ in MODELS[model].values():
            size = 1
            for n in shape:
                size *= n
            found += size
        return found

    assert round(parameters("7B") / 1e8) == 67
    assert round(parameters("70B") / 1e9) == 71
