"""The errors that dynaquant raises on purpose. Their texts say what is wrong, where, and what to do."""

_BEGIN, _END = 1200, 400
"""Characters of a text that is longer. A file may hold a name of a million letters."""


class DynaquantError(Exception):
    """Base of the errors below; catches everything dynaquant raises on purpose except ``TypeError``/``ValueError``.

    text: is cut in its middle where it is longer than 1,600 characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} … {text[-_END:]}")


class CheckpointError(DynaquantError):
    """A checkpoint file or run cannot be used: truncated, altered, of another version, or missing its parent."""


class MovedOnError(CheckpointError):
    """The run's writer has replaced or deleted what was being read. Readers begin again, so users hardly see it."""


class StateError(DynaquantError):
    """A training state cannot be stored, or a stored one does not fit the objects it is restored into."""


class EvaluateError(DynaquantError):
    """``evaluate`` failed, so nothing was saved: on the first weights that it was given, or on some rank of several."""
