"""Child processes that report to this one, line by line."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from typing import Any

HANGS_AFTER = 60.0
"""Seconds without a report after which a child counts as hanging: it prints where it is, and ends."""


def forked(action: Callable[[Callable[[Any], None]], None]) -> tuple[int, int]:
    """Run an action in a child process. Returns its id, and a descriptor to read its reports from.

    The action gets a function that reports a JSON value; each takes a line. This process must not have started threads.
    """
    reader, out = os.pipe()
    child = os.fork()
    if child:
        os.close(out)
        return child, reader
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)

    def report(value: Any) -> None:
        os.write(out, json.dumps(value).encode() + b"\n")
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)

    try:
        action(report)
    except BaseException as error:
        report(["raised", f"{type(error).__name__}: {error}"])
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


def reports_of(reader: int) -> list[Any]:
    """Return all reports of a child until it ends."""
    with os.fdopen(reader) as lines:
        return [json.loads(line) for line in lines]
