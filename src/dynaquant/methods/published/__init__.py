"""The method ``"published"``, of the paper.

- ``method.py``: what it stores, records and prepares
- ``search.py``: finds a configuration
- ``space.py``: the configurations, and the two search algorithms
- ``size.py``: predicts their sizes
"""
