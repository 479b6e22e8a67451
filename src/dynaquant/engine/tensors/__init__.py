"""Tensors in memory: the forms in which a checkpoint stores them, their values and their hashes.

In reading order:

- ``element_types``: names and sizes of the element types
- ``dtypes``: the element types of PyTorch, and the bytes of a tensor
- ``layouts``: the order in which the values of a tensor lie in memory
- ``codebook``: levels, and the centres, grids and logarithmic grids that turn them into values
- ``bounded``: the form of a tensor with a bound on every value's error
- ``stored``: the forms in which a checkpoint stores a tensor, such as levels with a codebook
- ``dequantize``: stored form to values
- ``box``: a region of a tensor
- ``boxes``: cuts boxes out of stored tensors, and puts boxes together
- ``shard``: what one rank holds of a tensor
- ``hashing``: hashes of values
- ``log_histogram``: histogram and quantiles of a tensor's values
- ``lazy_mapping``: a mapping of tensors that are made when they are looked up
"""
