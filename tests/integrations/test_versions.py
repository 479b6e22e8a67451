"""Versions of other packages that an integration accepts, tested on the package of the versions themselves."""

from importlib.metadata import version
from pathlib import Path

import pytest

import dynaquant as dq
from dynaquant.integrations import shared

NAME = "packaging"
FOUND = [int(number) for number in version(NAME).split(".")[:2]]


def test_the_tested_version_and_its_patches_are_accepted_silently(caplog):
    for patch in (0, 99):
        shared.check_version(NAME, f"{FOUND[0]}.{FOUND[1]}.{patch}")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("major", "minor"), [(1, 0), (-1, 0), (0, 1)], ids=["older major", "newer major", "older minor"]
)
def test_another_version_is_an_error_that_says_what_to_install(major, minor):
    tested = f"{FOUND[0] + major}.{FOUND[1] + minor}.0"
    with pytest.raises(dq.DynaquantError, match=rf"{NAME} \S+ is not supported: .*pip install '{NAME}=={tested}'"):
        shared.check_version(NAME, tested)


def test_of_major_version_0_another_minor_version_is_an_error():
    with pytest.raises(dq.DynaquantError, match="is not supported"):
        shared.check_version(NAME, "0.1.0")


def test_a_newer_minor_version_gets_a_warning_once(caplog, monkeypatch):
    monkeypatch.setattr(shared, "_told", set())
    for _ in range(2):
        shared.check_version(NAME, f"{FOUND[0]}.{FOUND[1] - 1}.0")
    assert len(caplog.messages) == 1
    assert f"{NAME} {version(NAME)} is newer than" in caplog.messages[0]


def test_the_tested_versions_are_those_that_are_installed_for_the_tests():
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().split()
    assert {f"{name}=={tested}" for name, tested in shared.TESTED.items()} <= set(constraints)


@pytest.mark.parametrize("package", ["accelerate", "lightning", "transformers"])
def test_the_versions_that_the_tests_run_with_are_accepted(package, caplog):
    shared.check_version(package)
    assert caplog.messages == []
