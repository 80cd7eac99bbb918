"""Options of plugins that name environment variables, such as `${oc.env:JUDGE_KEY}`.

Such a text stays as it is in the configuration, in checkpoints and in messages. Its value is read
when the plugin is constructed, by each process that constructs it.
"""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import OmegaConf

_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^},\s]+)")


def has_variable(value: Any) -> bool:
    """Return True for a text that names an environment variable."""
    return isinstance(value, str) and _VARIABLE.search(value) is not None


def keep_variables(values: Any, texts: Any) -> Any:
    """Return resolved values with the texts that name environment variables left unresolved.

    values, texts: the same tree of dicts and lists, resolved and as it was written.
    """
    if isinstance(values, dict) and isinstance(texts, dict):
        return {key: keep_variables(value, texts.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(texts, list):
        return [keep_variables(*pair) for pair in zip(values, texts, strict=True)]
    return texts if has_variable(texts) else values


def resolve_variables(value: Any) -> Any:
    """Return options with the values of their environment variables.

    Raises OmegaConf's `InterpolationResolutionError` for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: resolve_variables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [resolve_variables(inner) for inner in value]
    if not has_variable(value):
        return value
    return OmegaConf.create({"value": value})["value"]


def hide_values(text: str, options: Any) -> str:
    """Replace the values of the options' environment variables in a text by their names."""
    for name in _variable_names(options):
        value = os.environ.get(name)
        if value:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def _variable_names(options: Any) -> list[str]:
    if isinstance(options, dict):
        options = list(options.values())
    if isinstance(options, list):
        return [name for option in options for name in _variable_names(option)]
    return _VARIABLE.findall(options) if isinstance(options, str) else []
