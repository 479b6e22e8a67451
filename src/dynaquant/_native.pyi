from typing import Any

from numpy import float32, float64, int16, int32, int64, uint8, uint16, uint32
from numpy.typing import NDArray

LEVEL_PRUNED: int
LEVEL_PROTECTED: int
UNDECIDED: int

def threads() -> int: ...
def instructions() -> list[str]: ...
def limit_instructions(most: str) -> None: ...
def log_histogram(values: NDArray[uint32] | NDArray[uint16], counts: NDArray[int64]) -> None: ...
def assign_levels(
    values: NDArray[uint32] | NDArray[uint16],
    table: NDArray[uint8],
    sensitivity: NDArray[uint32],
    sensitivity_table: NDArray[uint8],
    levels: NDArray[uint8],
) -> None: ...
def levels_in_turns(
    values: NDArray[uint32] | NDArray[uint16],
    low: NDArray[uint8],
    high: NDArray[uint8],
    goes_up: NDArray[uint8],
    turns: NDArray[uint8],
    levels: NDArray[uint8],
) -> None: ...
def protected_places(levels: NDArray[uint8]) -> bytes: ...
def values_of_levels(
    levels: NDArray[uint8],
    table: NDArray[Any],
    protected_values: NDArray[uint16],
    out: NDArray[Any],
) -> None: ...
def encode_levels(
    levels: NDArray[uint8], parent: NDArray[uint8], modulus: int, groups: int, run_length: bool
) -> bytes: ...
def decode_levels(stream: bytes, parent: NDArray[uint8], modulus: int, groups: int, levels: NDArray[uint8]) -> None: ...
def grid_levels(
    values: NDArray[float32], inverse: float, seed: int | None, first: int, levels: NDArray[uint8]
) -> int: ...
def grid_values(
    values: NDArray[float32], inverse: float, step: float, seed: int | None, first: int, out: NDArray[float32]
) -> None: ...
def grid_errors(
    values: NDArray[float32], inverse: float, step: float, seed: int | None, first: int, levels: NDArray[uint8]
) -> tuple[float, float, int]: ...
def grid_fits(
    values: NDArray[float32],
    products: NDArray[float64],
    squares: NDArray[float64],
    inverses: NDArray[float32],
    fits: NDArray[float64],
) -> None: ...
def update_fits(
    firsts: NDArray[float32],
    seconds: NDArray[float32],
    epsilon: float,
    inverses: NDArray[float32],
    fits: NDArray[float64],
) -> tuple[float, float]: ...
def root_changes(values: NDArray[float32], decoded: NDArray[float32], negligible: float) -> tuple[bool, float, int]: ...
def matrix_magnitude(row_sums: NDArray[float64], column_sums: NDArray[float64]) -> tuple[float, float]: ...
def vector_magnitude(values: NDArray[float64]) -> tuple[float, float]: ...
def is_uneven(counts: NDArray[float64], row_sums: NDArray[float64], column_sums: NDArray[float64]) -> bool: ...
def uneven_pace(size: int) -> int: ...
def tensor_magnitude(values: NDArray[float32], rows: int) -> tuple[float, float] | None: ...
def coarsest(
    squares: float, fits: NDArray[float64], rungs: NDArray[int32], tolerance: float
) -> tuple[int, int] | None: ...
def coarsest_update(
    firsts: NDArray[float32],
    seconds: NDArray[float32],
    epsilon: float,
    rungs: NDArray[int32],
    inverses: NDArray[float32],
    tolerance: float,
) -> tuple[int, int] | None: ...
def log_bins(
    smallest: float,
    largest: float,
    positions: NDArray[int16],
    pace: int,
    threshold: int,
    turns: int,
    negligible: float,
) -> tuple[int, int] | None: ...
def rank_one(
    row_sums: NDArray[float64],
    column_sums: NDArray[float64],
    positions: NDArray[int16],
    rows: NDArray[uint8],
    columns: NDArray[uint8],
    classes: NDArray[uint16],
    negligible: float,
) -> tuple[tuple[int, int], tuple[int, int]] | None: ...
def round_up(
    levels: NDArray[uint8], bins: tuple[int, int], classes: NDArray[uint16], threshold: int
) -> tuple[int, int] | None: ...
def root_sums(
    values: NDArray[float32], down: NDArray[float32], classes: NDArray[uint16], count: int, negligible: float
) -> tuple[list[float], int]: ...
def balance(sums: NDArray[float64], count: float, pace: int) -> tuple[int, int | None, float]: ...
def first_turn(sums: NDArray[float64], rest: float, pace: int) -> int: ...
def sums_by_position(
    values: NDArray[float32], positions: NDArray[int16], pace: int, negligible: float
) -> tuple[list[float], int]: ...
def sums_by_turn(
    values: NDArray[float32],
    chunks: NDArray[uint8],
    positions: NDArray[int16],
    pace: int,
    turns: int,
    position: int,
    negligible: float,
) -> tuple[list[float], int]: ...
def changes_by_rounding(
    values: NDArray[float32],
    chunks: NDArray[uint8],
    positions: NDArray[int16],
    pace: int,
    threshold: int,
    turns: int,
    powers: NDArray[float32],
    negligible: float,
) -> tuple[bool, float, int]: ...

class SmallMoments:
    def __init__(
        self,
        positions: NDArray[int16],
        paces: list[int],
        rungs: NDArray[int32],
        inverses: NDArray[float32],
    ) -> None: ...
    def second(
        self,
        values: NDArray[float32],
        tolerance: float,
        of_rank_one: float,
        negligible: float,
        rows: NDArray[uint8],
        columns: NDArray[uint8],
        levels: NDArray[uint8],
    ) -> tuple[tuple[int, int], tuple[int, int]] | tuple[int, tuple[int, int]] | None: ...
    def first(
        self,
        values: NDArray[float32],
        second: NDArray[uint8],
        first_of_second: int,
        columns: NDArray[uint8] | None,
        first_of_columns: int,
        pace: int,
        tolerance: float,
        epsilon: float,
        zero: float,
        levels: NDArray[uint8],
    ) -> tuple[int, int] | None: ...

def divide_by_roots(values: NDArray[float32], seconds: NDArray[float32], out: NDArray[float32]) -> None: ...
def multiply_by_roots(values: NDArray[float32], seconds: NDArray[float32]) -> None: ...
def grid_levels_of_units(
    values: NDArray[float32],
    seconds: NDArray[float32],
    columns: NDArray[float32] | None,
    inverse: float,
    levels: NDArray[uint8],
) -> int: ...
def divide_by_outer_roots(
    values: NDArray[float32], rows: NDArray[float32], columns: NDArray[float32], out: NDArray[float32]
) -> None: ...
def multiply_by_outer_roots(values: NDArray[float32], rows: NDArray[float32], columns: NDArray[float32]) -> None: ...
def multiply_by_level_roots(values: NDArray[float32], levels: NDArray[uint8], table: NDArray[float32]) -> None: ...
def grid_levels_of_level_units(
    values: NDArray[float32],
    seconds: NDArray[uint8],
    table: NDArray[float32],
    inverse: float,
    levels: NDArray[uint8],
) -> int: ...
def errors(values: NDArray[float32], exact: NDArray[float32]) -> tuple[float, float]: ...
def extremes(values: NDArray[float32]) -> tuple[float, float]: ...
def extremes_from(values: NDArray[float32], limit: float) -> tuple[float, float, float]: ...
def sums(values: NDArray[float32]) -> tuple[float, float]: ...
def row_and_column_sums(
    values: NDArray[float32], row_sums: NDArray[float64], column_sums: NDArray[float64]
) -> None: ...
def encode_conditional(
    levels: NDArray[uint8],
    parent: NDArray[uint8],
    symbol_of: NDArray[uint8],
    context_of: NDArray[uint8],
    contexts: int,
    least_gain: float | None = None,
) -> bytes | None: ...
def decode_conditional(
    stream: bytes,
    parent: NDArray[uint8],
    level_of: NDArray[uint8],
    context_of: NDArray[uint8],
    contexts: int,
    symbols: int,
    levels: NDArray[uint8],
) -> None: ...
def nearest_levels(
    positions: NDArray[float64], sources: NDArray[float64], is_parent: bool, level_of: NDArray[uint8]
) -> None: ...
def symbols_of_levels(level_of: NDArray[uint8], symbols: int, symbol_of: NDArray[uint8]) -> None: ...
def encode_lossless(data: NDArray[uint8], parent: NDArray[uint8], itemsize: int) -> bytes: ...
def decode_lossless(stream: bytes, parent: NDArray[uint8], itemsize: int, data: NDArray[uint8]) -> None: ...
def decodes_to(stream: bytes, parent: NDArray[uint8], itemsize: int, data: NDArray[uint8]) -> bool: ...
