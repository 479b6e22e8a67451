"""How the API reference shows docstrings: they are prose, and name an argument as ``name: what it is.``"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function

import dynaquant


class Prose(Extension):
    """Makes a list of the arguments that a docstring explains, and links of public names."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Fields of a dataclass, or arguments of ``__init__``."""
        names = (
            [p.name for p in cls.members["__init__"].parameters] if "__init__" in cls.members else list(cls.attributes)
        )
        self._rewrite(cls, names)

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Arguments of a function."""
        self._rewrite(func, [parameter.name for parameter in func.parameters])

    def _rewrite(self, documented: Class | Function, names: list[str]) -> None:
        if documented.docstring is None:
            return
        text = documented.docstring.value
        if names:
            name = "(?:" + "|".join(map(re.escape, names)) + ")"
            explained = re.compile(rf"(?:^|(?<=\n\n)|(?<=[.)]\s))({name}(?:, {name})*): ")
            text = explained.sub(
                lambda found: "\n\n- " + ", ".join(f"**`{n}`**" for n in found[1].split(", ")) + ": ", text
            )
        public = "|".join(dynaquant.__all__)
        documented.docstring.value = re.sub(rf"``({public})``", r"[`\1`][dynaquant.\1]", text)
