"""The file state.json of a checkpoint: the state of the run apart from tensors."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_rl.contracts.run_state import STATE_FORMAT, RunState

STATE_NAME = "state.json"


def encode_state(state: RunState) -> bytes:
    """Encode the content of state.json."""
    return msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"


def read_state(checkpoint: Path) -> RunState:
    """Read the state in a checkpoint. Raises ValueError when it is damaged."""
    try:
        state = msgspec.json.decode((checkpoint / STATE_NAME).read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{STATE_NAME} cannot be read ({error})") from error
    if state.format != STATE_FORMAT:
        raise ValueError(
            f"{STATE_NAME} has format {state.format}, but this version reads {STATE_FORMAT}"
        )
    return state
