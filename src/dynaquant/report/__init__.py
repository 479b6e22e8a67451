"""Inspects the files of a run, and writes the report of a run.

In reading order:

- ``inspection.py``: tensors and disk use, from the headers of a run's files
- ``decoded.py``: levels of a tensor, differences between checkpoints
- ``statistics.py``: the statistics of a whole run, from the headers of its files
- ``watched.py``: the newest checkpoints of a run that a training writes to
- ``figures.py``: plotly figures with a position for each checkpoint; ``charts.py``: the charts of the statistics
- ``page.py``: the statistics and charts as one HTML file, with ``page.html``, ``page.css`` and ``page.js``
"""
