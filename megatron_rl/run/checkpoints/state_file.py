"""The file of a checkpoint that holds the state of the run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_rl.contracts.run_state import STATE_FORMAT, RunState

NAME = "state.json"


def encode_state(state: RunState) -> bytes:
    """As the file `state.json`."""
    return msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"


def read_state(checkpoint: Path) -> RunState:
    """The state in a checkpoint. Raises ValueError."""
    try:
        state = msgspec.json.decode((checkpoint / NAME).read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    if state.format != STATE_FORMAT:
        raise ValueError(
            f"{NAME} is of format {state.format}, and this version reads {STATE_FORMAT}"
        )
    return state
