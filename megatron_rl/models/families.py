"""Model families, by the architecture that config.json names.

To add a family, write its module and list the module in `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rl.models import deepseek_v3, mixtral, qwen3, qwen3_moe
from megatron_rl.models.config_json import REMEDY, parse_config
from megatron_rl.models.names import Names
from megatron_rl.models.shape import ModelConfigError, ModelShape


class Family(NamedTuple):
    """A model family.

    shape: parses a config.json without its null keys. Raises ValueError.
    names: names of the parameters of a layer.
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
    settings = {key: value for key, value in raw.items() if value is not None}
    try:
        return _family(settings).shape(settings)
    except ValueError as error:
        raise ModelConfigError(f"{file}: {error}") from error


def parameter_names(shape: ModelShape) -> Names:
    """Return the names of a layer's parameters in Megatron and in the checkpoint."""
    return FAMILIES[shape.architecture].names


def _family(raw: dict[str, Any]) -> Family:
    architectures = parse_config(raw, _Architectures).architectures
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ValueError(
        f"architectures={architectures} is not supported; "
        f"choose a checkpoint of one of {', '.join(FAMILIES)}"
    )
