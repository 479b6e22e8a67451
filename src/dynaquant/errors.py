"""The errors that dynaquant raises on purpose. Their texts say what is wrong, where, and what to do."""


class DynaquantError(Exception):
    """Base of the errors below; catches everything dynaquant raises on purpose except ``TypeError``/``ValueError``."""


class CheckpointError(DynaquantError):
    """A checkpoint file or run cannot be used: truncated, altered, of another version, or missing its parent."""


class MovedOnError(CheckpointError):
    """The run's writer has replaced or deleted what was being read. Readers begin again, so users hardly see it."""


class StateError(DynaquantError):
    """A training state cannot be stored, or a stored one does not fit the objects it is restored into."""


class EvaluateError(DynaquantError):
    """``evaluate`` failed, so nothing was saved: on the first weights that it was given, or on some rank of several."""
