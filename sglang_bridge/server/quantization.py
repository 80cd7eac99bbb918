"""Compares the quantization of a server that somebody else started with the trainer's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError

_OVERRIDE = "--json-model-override-args"
# Modules that no engine quantizes, whether or not a configuration lists them
_NEVER_QUANTIZED = re.compile(r"lm_head|embed_tokens|(?:.*\.)?(?:\w*norm|gate|shared_expert_gate)")


def require_quantization(
    engine: Engine, info: Mapping[str, Any], quantization: Mapping[str, Any] | None
) -> None:
    """Raise `EngineError` unless a server quantizes its model as the trainer does.

    SGLang takes the `quantization_config` of its checkpoint, which its command line may replace. It
    does not report which one it took, so both are read here.

    info: the server's `/server_info`. quantization: the expected `quantization_config`, None for an
    unquantized server.
    """
    overrides = _overrides(engine, info)
    others = sorted(overrides.keys() - {"quantization_config"})
    if others:
        raise EngineError(
            f"engine.urls: {engine.url} runs with {_OVERRIDE} that changes {', '.join(others)}: "
            "the trainer computes with the checkpoint's values; start it without them"
        )
    model_path = Path(str(info.get("model_path")))
    configuration = overrides | {
        key: value
        for key, value in read_configuration(model_path / "config.json").items()
        if key == "quantization_config" and key not in overrides
    }
    theirs = configuration.get("quantization_config")
    if quantization is None:
        _require_none(engine, info, theirs, overrides)
    else:
        _require_same(engine, info, theirs, quantization)


def _require_none(
    engine: Engine, info: Mapping[str, Any], theirs: Any, overrides: Mapping[str, Any]
) -> None:
    option = info.get("quantization")
    if option is not None:
        source = f"runs with quantization={option}"
    elif overrides.get("quantization_config"):
        source = f"runs with a quantization_config in {_OVERRIDE}"
    elif theirs:
        source = f"serves the quantized checkpoint {info.get('model_path')}"
    else:
        return
    raise EngineError(
        f"engine.quantization=null: {engine.url} {source}, and weights would be sent without "
        "scales; start it unquantized, or use engine.quantization=fp8"
    )


def _require_same(
    engine: Engine, info: Mapping[str, Any], theirs: Any, ours: Mapping[str, Any]
) -> None:
    remedy = f"start it with {_OVERRIDE} '{format_override(ours)}'"
    option = info.get("quantization")
    if not isinstance(theirs, dict) or not theirs or option not in (None, "fp8"):
        raise EngineError(
            f"engine.quantization=fp8: {engine.url} runs with quantization={option} and "
            f"quantization_config={theirs}; {remedy}"
        )
    differences = [
        f"{key}={theirs.get(key)!r} instead of {ours[key]!r}"
        for key in ("quant_method", "activation_scheme", "weight_block_size")
        if theirs.get(key) != ours[key]
    ]
    if theirs.get("scale_fmt") is not None:
        differences.append(f"scale_fmt={theirs['scale_fmt']!r} instead of float32 scales")
    their_modules = _unquantized_modules(theirs)
    our_modules = _unquantized_modules(ours)
    if their_modules != our_modules:
        differences.append(
            f"unquantized modules {_format_modules(their_modules)} instead of "
            f"{_format_modules(our_modules)}"
        )
    if differences:
        raise EngineError(
            f"engine.quantization=fp8: {engine.url} quantizes with {', '.join(differences)}; "
            f"{remedy}"
        )


def format_override(quantization: Mapping[str, Any]) -> str:
    """Return the argument of --json-model-override-args that quantizes a model like this."""
    return msgspec.json.encode({"quantization_config": dict(quantization)}).decode()


def _overrides(engine: Engine, info: Mapping[str, Any]) -> dict[str, Any]:
    text = info.get("json_model_override_args") or "{}"
    try:
        return msgspec.json.decode(str(text), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise EngineError(
            f"engine.urls: {engine.url} reports {_OVERRIDE} that is no JSON object ({error}); "
            "start it without this option"
        ) from error


def _unquantized_modules(configuration: Mapping[str, Any]) -> frozenset[str]:
    """The modules that a configuration does not quantize, except modules that nobody quantizes.

    SGLang reads the first of two keys, and takes a name with and without "model." in front.
    """
    key = "ignored_layers" if "ignored_layers" in configuration else "modules_to_not_convert"
    names = (str(name).removeprefix("model.") for name in configuration.get(key) or ())
    return frozenset(name for name in names if not _NEVER_QUANTIZED.fullmatch(name))


def _format_modules(modules: frozenset[str]) -> str:
    return "[" + ", ".join(sorted(modules)) + "]"


def read_configuration(file: Path) -> dict[str, Any]:
    """Return the contents of a config.json, empty if this machine cannot read it."""
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return content if isinstance(content, dict) else {}
