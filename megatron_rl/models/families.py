"""The model families, by the architecture that config.json names.

Adding one is adding a file, and a line here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rl.models import deepseek_v3, mixtral, qwen3, qwen3_moe
from megatron_rl.models.config_json import REMEDY, convert
from megatron_rl.models.names import Names
from megatron_rl.models.shape import ModelConfigError, ModelShape


class Family(NamedTuple):
    """shape: of a config.json, null keys left out; raises ValueError. names: of Megatron's
    parameters in a layer.
    """

    shape: Callable[[dict[str, Any]], ModelShape]
    names: Names


FAMILIES = {
    module.ARCHITECTURE: Family(module.shape, module.NAMES)
    for module in (qwen3_moe, qwen3, mixtral, deepseek_v3)
}


class _Architectures(msgspec.Struct):
    architectures: list[str] = []


def read_shape(model_path: str | Path) -> ModelShape:
    """Read and check `model_path/config.json`.

    Raises `ModelConfigError` naming file, key, value, rule and remedy.
    """
    file = Path(model_path) / "config.json"
    if not file.is_file():
        raise ModelConfigError(f"{file} does not exist; give a directory in Hugging Face format")
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} is not JSON: {error}; {REMEDY}") from error
    if not isinstance(raw, dict):
        raise ModelConfigError(f"{file} is not a JSON object; {REMEDY}")
    raw = {
        key: value for key, value in raw.items() if value is not None
    }  # null: as if it were not there
    try:
        return _family(raw).shape(raw)
    except ValueError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def parameter_names(shape: ModelShape) -> Names:
    """What the tensors of such a model are called."""
    return FAMILIES[shape.architecture].names


def _family(raw: dict[str, Any]) -> Family:
    given = convert(raw, _Architectures).architectures
    known = next((name for name in given if name in FAMILIES), None)
    if known is None:
        raise ValueError(
            f"architectures={given} is not supported; choose a checkpoint of one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[known]
