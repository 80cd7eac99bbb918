"""Calls of compiled functions are held against the signatures that pybind11 writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lab.te_rehearsal.compiled.signatures import SignatureMismatch, read_signature, split_top


class DType:
    """Stands for a class of the extension."""


class Overlap:
    """Stands for a class that functions take by pointer."""


def scale() -> None: ...


scale.__doc__ = (
    "scale(x: torch.Tensor, dtype: m.DType | None, "
    "sizes: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]], *, "
    "factor: typing.SupportsFloat | typing.SupportsIndex, has_bias: bool = False, "
    "overlap: m.Overlap = None) -> list[object]\n\nScale a tensor"
)
SIGNATURE = read_signature(scale, {"DType": DType, "Overlap": Overlap})
X = torch.ones(1)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((X, None, []), {"factor": 1}),
        ((X, 4, []), {"factor": 1}),
        ((X, DType(), [[1, 2], []]), {"factor": 0.5, "has_bias": True}),
        ((X, DType()), {"sizes": ((1,),), "factor": torch.ones(()), "overlap": None}),
        ((X, DType(), []), {"factor": 1.0, "overlap": Overlap()}),
    ],
)
def test_calls_that_the_function_takes_pass(args: Any, options: Any) -> None:
    SIGNATURE.check(args, options)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((X, None, []), {}, "lacks 'factor'"),
        ((X, None, [], 1.0), {}, "takes 3 positional arguments, not 4"),
        ((X, None, []), {"factor": 1, "scaling": 2}, "has no parameter 'scaling'"),
        ((X, None, []), {"factor": 1, "x": X}, "gets 'x' twice"),
        ((None, None, []), {"factor": 1}, "'x' is NoneType, not torch.Tensor"),
        ((X, Overlap(), []), {"factor": 1}, "'dtype' is Overlap"),
        ((X, None, [1]), {"factor": 1}, "'sizes' is list"),
        ((X, None, [[1.5]]), {"factor": 1}, "'sizes' is list"),
        ((X, None, []), {"factor": "1"}, "'factor' is str"),
        ((X, None, []), {"factor": 1, "overlap": DType()}, "'overlap' is DType"),
    ],
)
def test_calls_that_the_function_refuses_are_named(args: Any, options: Any, message: str) -> None:
    with pytest.raises(SignatureMismatch, match=message):
        SIGNATURE.check(args, options)


def test_text_splits_outside_of_brackets() -> None:
    assert split_top("a: Sequence[int, str], b | c", ",") == ["a: Sequence[int, str]", "b | c"]
    assert split_top("", ",") == []


def test_a_function_without_signature_is_refused() -> None:
    with pytest.raises(ValueError, match="split_top has no signature"):
        read_signature(split_top, {})
