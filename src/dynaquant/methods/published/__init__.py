"""The method ``"published"``, of the paper.

- ``method.py``: what it stores, records and prepares
- ``search.py``: finds a configuration
- ``space.py``: the configurations
- ``size.py``: predicts their sizes
- ``exhaustive.py``, ``neighbourhood.py``: the two search algorithms
"""
