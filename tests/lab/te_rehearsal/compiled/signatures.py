"""Signatures of compiled functions, read from the text that pybind11 attaches to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_RULES: dict[str, Callable[[Any], bool]] = {
    "None": lambda value: value is None,
    # pybind11 takes None and numbers for it
    "bool": lambda value: value is None or isinstance(value, bool | int | float),
    "SupportsInt": lambda value: hasattr(value, "__index__"),
    "SupportsIndex": lambda value: hasattr(value, "__index__"),
    "SupportsFloat": lambda value: hasattr(value, "__float__") or hasattr(value, "__index__"),
}
_NAMES = {"torch.Tensor": torch.Tensor, "torch.dtype": torch.dtype, "str": str}


class SignatureMismatch(TypeError):
    """A call that the compiled function would refuse."""


@dataclass(frozen=True)
class Parameter:
    """One parameter. annotation: as pybind11 writes it, such as `torch.Tensor | None`."""

    name: str
    annotation: str
    is_required: bool
    is_keyword_only: bool


@dataclass(frozen=True)
class Signature:
    """The parameters of a compiled function.

    classes: the classes that the function's module defines, by name.
    """

    function: str
    parameters: tuple[Parameter, ...]
    classes: Mapping[str, type]

    def check(self, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Raise `SignatureMismatch` naming the argument if the function would refuse the call."""
        values: dict[str, Any] = {}
        positional = [p for p in self.parameters if not p.is_keyword_only]
        if len(args) > len(positional):
            raise SignatureMismatch(
                f"{self.function} takes {len(positional)} positional arguments, not {len(args)}"
            )
        for parameter, value in zip(positional, args, strict=False):
            values[parameter.name] = value
        names = {parameter.name for parameter in self.parameters}
        for name, value in options.items():
            if name not in names:
                raise SignatureMismatch(f"{self.function} has no parameter {name!r}")
            if name in values:
                raise SignatureMismatch(f"{self.function} gets {name!r} twice")
            values[name] = value
        for parameter in self.parameters:
            if parameter.name not in values:
                if parameter.is_required:
                    raise SignatureMismatch(f"{self.function} lacks {parameter.name!r}")
            elif not self._accepts(parameter.annotation, values[parameter.name]):
                kind = type(values[parameter.name]).__name__
                raise SignatureMismatch(
                    f"{self.function}: {parameter.name!r} is {kind}, not {parameter.annotation}"
                )

    def _accepts(self, annotation: str, value: Any) -> bool:
        return any(self._accepts_one(part, value) for part in split_top(annotation, "|"))

    def _accepts_one(self, annotation: str, value: Any) -> bool:
        sequence = re.fullmatch(r"(?:collections\.abc\.Sequence|list)\[(.*)\]", annotation)
        if sequence is not None:
            is_sequence = isinstance(value, list | tuple | torch.Size)
            return is_sequence and all(self._accepts(sequence[1], item) for item in value)
        name = annotation.rpartition(".")[2]
        if name in _RULES:
            return _RULES[name](value)
        if name == "DType" and isinstance(value, int):
            return True  # Transformer Engine converts its Python enumeration of the same numbers
        kind = _NAMES.get(annotation) or self.classes.get(name)
        return kind is None or isinstance(value, kind)


def read_signature(function: Any, classes: Mapping[str, type]) -> Signature:
    """Read the signature of a function of pybind11. Raises ValueError if it has no text."""
    name = function.__name__
    first_line = (function.__doc__ or "").partition("\n")[0]
    match = re.fullmatch(rf"{re.escape(name)}\((.*)\) -> .*", first_line)
    if match is None:
        raise ValueError(f"{name} has no signature: {first_line!r}")
    parameters: list[Parameter] = []
    is_keyword_only = False
    for text in split_top(match[1], ","):
        if text == "*":
            is_keyword_only = True
            continue
        declaration, _, default = text.partition(" = ")
        parameter, _, annotation = declaration.partition(": ")
        is_required = not default
        if default == "None":  # a pointer takes None, which its annotation does not tell
            annotation += " | None"
        parameters.append(Parameter(parameter, annotation, is_required, is_keyword_only))
    return Signature(name, tuple(parameters), classes)


def split_top(text: str, separator: str) -> list[str]:
    """Split a text at separators outside of brackets. An empty text has no parts."""
    parts: list[str] = [""]
    depth = 0
    for character in text:
        depth += (character in "[(<") - (character in "])>")
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
