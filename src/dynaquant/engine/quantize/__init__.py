"""Quantizers: values to levels and a codebook.

In reading order:

- ``knobs``: the configuration of either quantizer, and its JSON form
- ``grid``: one tensor on a uniform grid
- ``candidate``: the weights as one configuration would store them, to be scored
- ``magnitude``: how large the values of a tensor are, without outliers
- ``step_limits``: how large a grid step may be
- ``grid_weights``: all weights of a checkpoint on grids
- ``partition``: which weights are pruned, protected or quantized
- ``kmeans``: one tensor by k-means
- ``kmeans_weights``: all weights of a checkpoint by k-means
- ``log_grid``: one tensor on a logarithmic grid
- ``moment_sample``: the elements by which the quantizers of moments are judged
- ``epsilon``: which moments are as good as zero
- ``second_moment``, ``first_moment``: one moment of an optimizer
- ``small_moments``: moments of small tensors, each in one call
- ``moments``: all moments of a checkpoint
- ``bounds``: tensors with a bound on every value's error, and the bounds of averages
"""
