"""The element types that a file can hold, by name. Reading a header needs nothing else of them, and no PyTorch."""

ITEM_SIZES = {
    "bool": 1,
    **{"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8},
    **{"int8": 1, "int16": 2, "int32": 4, "int64": 8},
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
    **{"float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1},
    "float4_e2m1fn_x2": 1,
    **{"complex32": 4, "bcomplex32": 4, "complex64": 8, "complex128": 16},
}
"""Bytes of one element by the name of its type, which is PyTorch's name.

Left out: PyTorch's old quantized types, and types of less than a byte, which PyTorch cannot copy.
"""
QUANTIZABLE = ("float32", "bfloat16", "float16", "float64")
"""Names of the element types that can be quantized."""
