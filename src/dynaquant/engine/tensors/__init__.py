"""What tensors and their parts are: element types, codebooks, boxes, shards, hashes.

In reading order:

- ``element_types``: names and sizes of the element types
- ``dtypes``: the element types of PyTorch, casts to them, and the bytes of a tensor
- ``strides``: the order in which the values of a tensor lie in memory
- ``codebook``: levels, and the centres, grids and logarithmic grids that turn them into values
- ``box``: a region of a tensor
- ``shard``: what one rank holds of a tensor
- ``hashing``: hashes of values
- ``log_histogram``: histogram and quantiles of a tensor's values
- ``lazy_mapping``: a mapping of tensors that are made when they are looked up
"""
