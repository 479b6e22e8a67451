"""The errors that dynaquant raises on purpose. Their messages say what is wrong, where, and what to do."""

_BEGIN, _END = 1200, 400
"""Characters that are kept of a longer message. A file may hold a name of a million letters."""


class DynaquantError(Exception):
    """Base of the errors below; catches everything dynaquant raises on purpose except ``TypeError``/``ValueError``.

    text: cut in the middle if it is longer than 1,600 characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text if len(text) <= _BEGIN + _END else f"{text[:_BEGIN]} … {text[-_END:]}")


class CheckpointError(DynaquantError):
    """A checkpoint file or run cannot be used: truncated, altered, of another version, or missing its parent."""


class UnreadableError(CheckpointError):
    """A checkpoint may be sound, but not here: a newer version wrote it, or it needs a file that is not there."""


class RunChangedError(CheckpointError):
    """The writer replaced or deleted a file of the run during a read. Readers catch this and retry."""


class StateError(DynaquantError):
    """A training state cannot be stored, or a stored one does not fit the objects it is restored into."""


class EvaluateError(DynaquantError):
    """``evaluate`` failed before it had ever worked, failed on a rank of several, or changed a frozen parameter.

    Nothing was saved.
    """


class MissingPackageError(DynaquantError, ImportError):
    """A package that only an extra of dynaquant installs is missing.

    what: the feature that needs it, with a capital letter. package: by its name on PyPI. extra: of dynaquant.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'dynaquant[{extra}]'")
