"""Inspects the files of a run, and writes the report of a run.

In reading order:

- ``inspection.py``: tensors, levels, differences and disk use, from the files of a run
- ``statistics.py``: the statistics of a whole run, from the headers of its files; ``prices.py``: what storage costs
- ``watched.py``: the newest checkpoints of a run that a training writes to
- ``figures.py``: plotly figures with a position for each checkpoint; ``charts.py``: the charts of the statistics
- ``page.py``: the statistics and charts as one HTML file, with ``page.html``, ``page.css`` and ``page.js``
"""
