"""What a reader must know to read a file: its format version, and the features that its header requires.

A feature that is not part of version 1 has a name. A writer lists those that a file uses, and a reader that lacks one
refuses the file and names it, before it reads anything else of the header.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaquant.engine.forms import schemes
from dynaquant.errors import UnreadableError
from dynaquant.store.entry import Entry

_CODING = "coding "
"""A feature that begins with it is a kind of coding, which follows."""


def required_features(entries: Iterable[Entry]) -> list[str]:
    """Return the features that a reader of a header with these entries must know, beyond format version 1."""
    kinds = {entry.scheme.kind for entry in entries}
    return sorted(f"{_CODING}{kind}" for kind in kinds - schemes.OF_VERSION_1)


def check_features(required: Any) -> None:
    """Raise UnreadableError if a header requires a feature that this reader lacks; ValueError if it is no list."""
    if not isinstance(required, list) or not all(isinstance(name, str) and name.isprintable() for name in required):
        raise ValueError("what it requires is not a list of names")
    known = {f"{_CODING}{kind}" for kind in schemes.KINDS}
    lacking = [name for name in required if name not in known]
    if lacking:
        raise UnreadableError(f"needs what this dynaquant cannot read: {', '.join(lacking)}; install a newer one")
