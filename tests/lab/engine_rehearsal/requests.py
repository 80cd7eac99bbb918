"""Messages between the command and the two processes that it starts."""

from __future__ import annotations

from typing import Any

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """A tensor without data. dtype: torch's name without the prefix, such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the names of the tensors that a trainer sends. model_path: with config.json."""

    model_path: str
    dtype: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of a GPU. memory: bytes, as torch reports them. count: the visible devices."""

    name: str
    memory: int
    count: int
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to resolve arguments, and to load weights.

    arguments: of the server, without the interpreter and the module. weight_arguments: those with
    which the model is built. tensors: what the trainer sends; empty to build no model.
    """

    gpu: GpuFacts
    arguments: list[str]
    weight_arguments: list[str]
    tensors: list[TensorSpec] = []


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that SGLang fills in or replaces."""

    name: str
    before: str
    after: str


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter of one rank of the engine. num_missing: elements that no tensor wrote."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_missing: int


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The way of one tensor into one rank.

    parameters: the names that it is written to. num_read: elements that are read. regions: the
    parts that are read, as (offset, sizes, strides), if they are parts of the tensor itself.
    """

    tensor: str
    parameters: list[str]
    num_read: int
    regions: list[tuple[int, tuple[int, ...], tuple[int, ...]]]


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The loading of one rank. error: why it ended early, naming the tensor, or empty."""

    rank: int
    num_bytes: int
    parameters: list[Parameter]
    transfers: list[Transfer]
    warnings: list[str]
    error: str = ""


class EngineReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of SGLang to an `EngineRequest`.

    parser_error: of the command line. resolution_error: of the checks behind it. settings: the
    final values, as `/server_info` reports them. environment: variables that SGLang sets.
    option_names: every option that the parser knows. messages: lines of its log.
    """

    parser_error: str = ""
    resolution_error: str = ""
    settings: dict[str, Any] = {}
    changes: list[Change] = []
    environment: dict[str, str] = {}
    option_names: list[str] = []
    messages: list[str] = []
    ranks: list[RankLoad] = []
