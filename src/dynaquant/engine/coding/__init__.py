"""Coders: arrays to bytes and back. They know no stored form.

In reading order:

- ``conditional``: coder of levels, by entropy coding conditioned on the parent's levels
- ``rearrange``: coder of levels as published, with run lengths and Huffman codes
- ``lossless``: coder of exact values, conditioned on the parent's values
- ``prediction``: coder of levels of any size, for tensors with a bound
- ``byte_planes``: coder of exact values with zstd, for small tensors and outliers
"""
