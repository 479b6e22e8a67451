"""Methods: how the weights of a checkpoint are quantized and coded, and how their configuration is found.

- ``method.py``: what every method has; the rest of the code knows no more
- ``named.py``: the methods by name
- ``grid/``: a uniform grid for each tensor, and one scale that is searched for
- ``published/``: the method of the paper: clusters, pruning and protection
"""
