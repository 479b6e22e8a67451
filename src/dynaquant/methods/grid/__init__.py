"""The method ``"grid"``: a uniform grid for each tensor.

- ``method.py``: what it stores, records and prepares, and how it finds the scale
- ``scale_search.py``: the search algorithm
"""
