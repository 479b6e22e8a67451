"""Coders: one stored tensor to bytes and back.

In reading order:

- ``schemes``: how a header says that a stream is coded
- ``encoder``: a stored tensor to its scheme and bytes
- ``decoder``: a scheme and bytes to the stored tensor
- ``conditional``: coder of levels, by entropy coding conditioned on the parent's levels
- ``rearrange``: coder of levels as published, with run lengths and Huffman codes
- ``lossless``: coder of exact values, conditioned on the parent's values
- ``bounded``: coder of levels of any size, for tensors with a bound
- ``byte_planes``: coder of exact values with zstd, for small tensors and outliers
"""
