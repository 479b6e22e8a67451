"""Forms: how a checkpoint stores a tensor, in memory and in bytes. One file for each form.

In reading order:

- ``scheme``: what a header says of the stream of any tensor
- ``schemes``: the schemes of all built-in forms
- ``form``: what every stored form can do, and the computation of its values
- ``exact``: exact values
- ``stored``: what is asked of any stored tensor, in whatever form
- ``levels``: levels with a codebook
- ``rank_one``: rows times columns
- ``units``: a first moment in units of the root of its second moment
- ``rounded``: a weight that is rounded from its master weight
- ``bounded``: a tensor with a bound on every value's error
- ``external``: tensors whose values are outside the checkpoint
- ``patchwork``: a tensor of boxes, each with its own form
- ``registry``: which form the stream of a scheme becomes
"""
