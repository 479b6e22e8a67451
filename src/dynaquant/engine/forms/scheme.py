"""What a header says of the stream of any tensor (docs/format.md, "Tensor entries").

In a header a scheme is the JSON object ``coding``. Headers are read without PyTorch, which takes seconds to import.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_type_hints

Coder = Literal["conditional", "rearranged"]
"""How levels become bytes: by conditional entropy coding (method 2.2) or as published (method 1.5)."""
MAX_EXPANSION = 131_072
"""A stream that needs no other tensor decodes to at most this many times its own size (docs/format.md, "Limits").

No coder can exceed it: zstd takes at least 4 bytes for 128 KiB, coded levels take at least 5 bytes for 65,536 values.
"""


class Scheme:
    """What a header says of a tensor's stream. A scheme is a frozen dataclass; its fields are JSON values."""

    kind: ClassVar[str]
    """Its name in a header."""
    of_any_dtype: ClassVar[bool] = False
    """Whether it codes tensors of any dtype. Otherwise it codes the dtypes that can be quantized."""
    is_exact: ClassVar[bool] = False
    """Whether it decodes to exact values."""
    has_stream: ClassVar[bool] = True
    """Whether the values come from a stream. Otherwise they are in another tensor, file or part, or nowhere."""
    is_reference: ClassVar[bool] = False
    """Whether the tensor is that of the parent."""
    external: ClassVar[bool] = False
    """Whether the checkpoint has only the hash of the values."""
    coder: ClassVar[Coder] = "conditional"
    """The coder of its levels."""

    if TYPE_CHECKING:

        @property
        def needs_parent(self) -> bool:
            """Whether decoding needs the parent's tensor of the same name. A field, or an attribute of the class."""

    @property
    def depends_on(self) -> str | None:
        """The name of the other tensor of the checkpoint that must be decoded first, or None."""
        return None

    @property
    def frozen_file(self) -> str | None:
        """The identity of the file of frozen parameters that holds the values, or None."""
        return None

    @property
    def layout_number(self) -> int | None:
        """The index in the header's list of layouts of a tensor in boxes; None for any other."""
        return None

    @property
    def codebook_bins(self) -> int | None:
        """The number of bins of the codebook; None without one."""
        return None

    @property
    def is_zero(self) -> bool:
        """Whether all values are zero, as there are neither bins nor outliers."""
        return False

    def stored_size(self, size: int) -> int:
        """Return the bytes that are stored of the tensor. size: of its stream."""
        return size

    def check(self, shape: tuple[int, ...], size: int, raw_size: int) -> None:  # noqa: ARG002 - only one needs raw_size
        """Raise ValueError if no tensor of this shape has a stream of this scheme and size.

        size, raw_size: bytes of the stream and of the values.
        """
        self._check(shape, size)

    def _check(self, shape: tuple[int, ...], size: int) -> None:
        """Do what ``check`` does."""

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as a header has it."""
        return {"kind": self.kind, **_fields_of(self)}


class WithoutStream(Scheme):
    """A scheme of a tensor whose values are elsewhere."""

    of_any_dtype = True
    has_stream = False

    def _check(self, shape: tuple[int, ...], size: int) -> None:  # noqa: ARG002 - whatever its shape
        if size != 0:
            raise ValueError(f"its size is {size}")


@cache
def _types(scheme: Any) -> dict[str, type]:
    """Return the JSON type of every field of a scheme. The type of a ``Literal`` is str."""
    hints = get_type_hints(scheme)
    wanted = {field.name: hints[field.name] for field in fields(scheme)}
    return {name: each if isinstance(each, type) else str for name, each in wanted.items()}


def _fields_of(scheme: Scheme) -> dict[str, Any]:
    """Return the fields of a scheme, as ``asdict`` does in several times as long."""
    values = ((name, getattr(scheme, name)) for name in _types(cast(Any, type(scheme))))
    return {name: _fields_of(value) if isinstance(value, Scheme) else value for name, value in values}


def parsed(scheme: type[Scheme], data: dict[str, Any]) -> Scheme:
    """Return a scheme of this class from its JSON fields. Raises TypeError if they are not those of the class."""
    wanted = _types(cast(Any, scheme))
    if data.keys() != wanted.keys():
        raise TypeError(f"its scheme has the keys {sorted(data)} instead of {sorted(wanted)}")
    values: dict[str, Any] = {}
    for key, inner in wanted.items():
        value = data[key]
        if type(value) is inner:
            values[key] = value
        elif type(value) is dict and issubclass(inner, Scheme):
            values[key] = parsed(inner, value)
        else:
            raise TypeError(f"{key} is {value!r}")
    return scheme(**values)
