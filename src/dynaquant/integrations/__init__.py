"""Trainers of other packages that save to a run. Each is imported only by its users, as each needs its own package.

- ``transformers/``: ``Trainer`` of Transformers, and a mixin for subclasses of it
"""
