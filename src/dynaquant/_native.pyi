from typing import Any

from numpy import float32, float64, int64, uint8, uint16, uint32
from numpy.typing import NDArray

LEVEL_PRUNED: int
LEVEL_PROTECTED: int
UNDECIDED: int

def threads() -> int: ...
def log_histogram(values: NDArray[uint32] | NDArray[uint16], counts: NDArray[int64]) -> None: ...
def assign_levels(
    values: NDArray[uint32] | NDArray[uint16],
    table: NDArray[uint8],
    sensitivity: NDArray[uint32],
    sensitivity_table: NDArray[uint8],
    levels: NDArray[uint8],
) -> None: ...
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
def grid_fits(
    values: NDArray[float32],
    products: NDArray[float64],
    squares: NDArray[float64],
    inverses: NDArray[float32],
    fits: NDArray[float64],
) -> None: ...
def divide_by_roots(values: NDArray[float32], seconds: NDArray[float32], out: NDArray[float32]) -> None: ...
def multiply_by_roots(values: NDArray[float32], seconds: NDArray[float32]) -> None: ...
def extremes(values: NDArray[float32]) -> tuple[float, float]: ...
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
) -> bytes: ...
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
