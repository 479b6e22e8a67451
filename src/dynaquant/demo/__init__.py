"""The demonstration: train, kill, restore, compare (``dynaquant demo``)."""
