"""Trainers of other packages that save to a run. Each is imported only by its users, as each needs its own package.

- ``shared.py``: what they share, such as refusing versions of other packages that are not known
- ``accelerate.py``: ``save_state`` and ``load_state`` of an ``Accelerator``
- ``lightning/``: a ``CheckpointIO`` of Lightning
- ``torchtitan.py``: a checkpoint manager of torchtitan
- ``transformers/``: ``Trainer`` of Transformers, and a mixin for subclasses of it
"""
