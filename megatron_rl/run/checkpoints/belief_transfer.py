"""What another run believed of its prompts, read from its checkpoint: `selection.beliefs_from`."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.run.checkpoints.manifest import changed_files, read_manifest
from megatron_rl.run.checkpoints.resume import checkpoints_at
from megatron_rl.run.checkpoints.state_file import NAME, read_state


class BeliefsUnavailable(Failure):
    """selection.beliefs_from names no checkpoint of a run that had some."""

    exit_code = ExitCode.BAD_DATA


def read_transferred_beliefs(c: Configuration, own: RunState | None = None) -> TransferredBeliefs | None:
    """Those that a run begins with, from the newest whole checkpoint; None where it has its own, or
    is told of none.

    own: what the run goes on from. Weights are not read. Raises `BeliefsUnavailable`.
    """
    given = c.selection.beliefs_from
    if (
        given is None
        or c.selection.name != "belief"
        or (own is not None and own.position.selection.beliefs is not None)
    ):
        return None
    damaged: list[str] = []
    for checkpoint in checkpoints_at(Path(given)):
        try:
            state = _whole_state(checkpoint)
        except ValueError as error:
            damaged.append(f"{checkpoint}: {error}")
            continue
        return _inherited(f"selection.beliefs_from={given}", checkpoint, state, damaged)
    raise BeliefsUnavailable(
        f"selection.beliefs_from={given}: no whole checkpoint is there ({' | '.join(damaged)}). Give the directory of a run "
        "with selection=belief and run.checkpoint_every, or of one of its checkpoints"
    )


def _whole_state(checkpoint: Path) -> RunState:
    """Raises ValueError, and its kind `DamagedCheckpoint`."""
    if problems := changed_files(checkpoint, read_manifest(checkpoint), [NAME]):
        raise ValueError("; ".join(problems))
    return read_state(checkpoint)


def _inherited(
    told: str, checkpoint: Path, state: RunState, damaged: list[str]
) -> TransferredBeliefs:
    selection = state.position.selection
    if selection.beliefs is None:
        name = state.settings.get("selection.name", "uniform")
        raise BeliefsUnavailable(
            f"{told}: the run that saved {checkpoint} had selection.name={name} and believed nothing of its prompts. "
            "Give one with selection=belief, or leave it null"
        )
    passed = tuple(f"a damaged checkpoint is passed over: {one}" for one in damaged)
    return TransferredBeliefs(
        f"{told} ({checkpoint.name})", selection.prompts.digest, selection.beliefs, passed
    )
