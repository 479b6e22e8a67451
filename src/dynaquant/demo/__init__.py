"""The demonstration (``dynaquant demo``): train, kill, restore, compare.

In reading order:

- ``workloads.py``: the two trainings, and in ``models.py`` their networks
- ``train.py``: the training process, which may be killed at any moment
- ``crashes.py``: runs that process to its end and kills it on the way
- ``comparison.py``: each workload with and without crashes, and the tables that compare the two
- ``figure.py``: the picture
"""
