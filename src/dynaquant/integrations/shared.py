"""What integrations share: the versions of other packages that they know, and what more than one of them refuses."""

from __future__ import annotations

import logging
from importlib.metadata import version

from packaging.version import Version

from dynaquant.errors import DynaquantError
from dynaquant.store.run import Run

log = logging.getLogger("dynaquant")
TESTED = {"accelerate": "1.15.0", "lightning": "2.6.6", "torchtitan": "0.3.0", "transformers": "5.23.0"}
"""The versions with which the tests of the integrations pass."""
BEST = "best"
"""The tag of the best checkpoint, and what ``exact`` says to keep its weights exactly."""
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


def check_exact(exact: str | None) -> None:
    """Raise ValueError for a bad argument ``exact``."""
    if exact not in (BEST, None):
        raise ValueError(f'exact must be "best" or None, not {exact!r}; to store all exactly, use "lossless"')


def unsupported(sharding: str) -> DynaquantError:
    """Return the error for a way of sharding with optimizers of its own."""
    return DynaquantError(f"{sharding} is not supported: its optimizer's state cannot be stored; use FSDP2 or DDP")


def free_step(run: Run, step: int) -> int:
    """Return a step, or the next one that the run does not have: another file or folder may stand for that one."""
    while run.path(step).exists():
        step += 1
    return step
