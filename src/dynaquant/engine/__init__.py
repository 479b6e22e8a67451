"""The engine: arrays to bytes and back. It knows no module, optimizer, process group or folder.

In reading order:

- ``kernels/``: passes over all values of a tensor, on the host or on a device
- ``tensors/``: what tensors and their parts are: dtypes, codebooks, boxes, shards, hashes
- ``coding/``: levels and exact values to bytes and back
- ``forms/``: the forms in which a checkpoint stores a tensor, one file for each
- ``label``: the label of a tensor: its role and layer type
- ``bound``: a role with a number, the largest error of a value
- ``reduction``: computations on a part of a tensor that need numbers of the whole one
- ``shards``: which part of each tensor this process holds
- ``quantize/``: values to stored forms
"""
