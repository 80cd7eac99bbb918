"""Reads another run's beliefs about its prompts from a checkpoint (`selection.beliefs_from`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import RunState
from megatron_rl.prompts.selection.transferred_beliefs import TransferredBeliefs
from megatron_rl.run.checkpoints.manifest import changed_files, read_manifest
from megatron_rl.run.checkpoints.resume import checkpoints_at
from megatron_rl.run.checkpoints.state_file import STATE_NAME, read_state


def read_transferred_beliefs(
    c: Configuration, resume_state: RunState | None = None
) -> TransferredBeliefs | None:
    """Read the beliefs of another run from its newest complete checkpoint. Weights are not read.

    Returns None when selection.beliefs_from is not set, when the mode selects no prompts, and when
    the run resumes with its own beliefs. resume_state: the state that the run resumes from.

    Raises `Failure`.
    """
    source = c.selection.beliefs_from
    if source is None or c.selection.name != "belief" or not c.selects_prompts:
        return None
    if resume_state is not None and resume_state.position.selection.beliefs is not None:
        return None
    key = f"selection.beliefs_from={source}"
    problems: list[str] = []
    for checkpoint in checkpoints_at(Path(source)):
        try:
            state = _read_undamaged_state(checkpoint)
        except ValueError as error:
            problems.append(f"{checkpoint}: {error}")
            continue
        return _transferred_beliefs(key, checkpoint, state, problems)
    raise Failure(
        f"{key}: there is no complete checkpoint ({' | '.join(problems)}). Give the directory of "
        "a run with selection=belief and run.checkpoint_every, or one of its checkpoints",
        ExitCode.BAD_DATA,
    )


def _read_undamaged_state(checkpoint: Path) -> RunState:
    """Raises ValueError, or its subclass `DamagedCheckpoint`."""
    problems = changed_files(checkpoint, read_manifest(checkpoint), [STATE_NAME])
    if problems:
        raise ValueError("; ".join(problems))
    return read_state(checkpoint)


def _transferred_beliefs(
    key: str, checkpoint: Path, state: RunState, problems: Sequence[str]
) -> TransferredBeliefs:
    """problems: the newer checkpoints that are damaged."""
    selection = state.position.selection
    if selection.beliefs is None:
        name = state.settings.get("selection.name", "uniform")
        raise Failure(
            f"{key}: the run that saved {checkpoint} had selection.name={name}, which has no "
            "beliefs. Give a run with selection=belief, or leave selection.beliefs_from null",
            ExitCode.BAD_DATA,
        )
    warnings = tuple(f"skipping a damaged checkpoint: {problem}" for problem in problems)
    source = f"{key} ({checkpoint.name})"
    return TransferredBeliefs(source, selection.prompts.digest, selection.beliefs, warnings)
