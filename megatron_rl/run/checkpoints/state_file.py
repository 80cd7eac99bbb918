"""The file state.json of a checkpoint: the state of the run apart from tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.contracts.run_state import STATE_FORMAT, RunState

STATE_NAME = "state.json"
# The format whose features have keys of their own in the position
_WITHOUT_FEATURES = 1


class _PositionWithoutFeatures(msgspec.Struct):
    """The state of features in that format."""

    guard: dict[str, Any] = {}
    nonfinite: int = 0
    bf16_mismatch: dict[str, Any] = {}
    phase: dict[str, Any] | None = None
    uncompared_tokens: int = 0


def encode_state(state: RunState) -> bytes:
    """Encode the content of state.json."""
    return msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"


def read_state(checkpoint: Path) -> RunState:
    """Read the state in a checkpoint. Raises ValueError when it is damaged."""
    try:
        document = msgspec.json.decode((checkpoint / STATE_NAME).read_bytes(), type=dict[str, Any])
        if (
            document.setdefault("format", _WITHOUT_FEATURES) == _WITHOUT_FEATURES
            and "position" in document
        ):
            _add_features(document)
        state = msgspec.convert(document, RunState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{STATE_NAME} cannot be read ({error})") from error
    if state.format != STATE_FORMAT:
        raise ValueError(
            f"{STATE_NAME} has format {state.format}, but this version reads {STATE_FORMAT}"
        )
    return state


def _add_features(document: dict[str, Any]) -> None:
    """Bring a document to the present format: the state of each feature is under its name."""
    position = document["position"]
    earlier = msgspec.convert(position, _PositionWithoutFeatures)
    features = {
        "guards": earlier.guard | {"nonfinite": earlier.nonfinite},
        "alarms": earlier.bf16_mismatch,
        "curriculum": earlier.phase,
        "token_audit": {"uncompared_tokens": earlier.uncompared_tokens},
    }
    position["features"] = {name: state for name, state in features.items() if state}
    document["format"] = STATE_FORMAT
