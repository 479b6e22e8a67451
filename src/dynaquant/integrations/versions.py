"""Refuses versions of other packages in which what an integration overrides may be another."""

from __future__ import annotations

import logging
from importlib.metadata import version

from packaging.version import Version

from dynaquant.errors import DynaquantError

log = logging.getLogger("dynaquant")
TESTED = {"accelerate": "1.15.0", "lightning": "2.6.6", "torchtitan": "0.3.0", "transformers": "5.23.0"}
"""The versions with which the tests of the integrations pass."""
_told: set[str] = set()


def check_version(package: str, tested: str | None = None) -> None:
    """Raise DynaquantError if the installed version of a package is not one that an integration can work with.

    An earlier minor version than the tested one is refused, and so is another major version (another minor one, if the
    major one is 0). A later minor version gets a warning, once. tested: None for that of ``TESTED``.
    """
    tested = TESTED[package] if tested is None else tested
    found, known = Version(version(package)), Version(tested)
    breaking = 1 if known.major else 2  # how many numbers of a version must be the same
    if found.release[:breaking] != known.release[:breaking] or found.release[:2] < known.release[:2]:
        raise DynaquantError(
            f"{package} {found} is not supported: dynaquant.integrations was tested with {package} {tested}; install "
            f"that version, e.g. pip install '{package}=={tested}'"
        )
    if found.release[:2] > known.release[:2] and package not in _told:
        _told.add(package)
        log.warning(
            "%s %s is newer than %s, with which dynaquant was tested: see by `dynaquant log` that checkpoints "
            "are saved",
            package,
            found,
            tested,
        )
