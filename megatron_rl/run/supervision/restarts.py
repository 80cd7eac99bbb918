"""Refuses starts that would fail as the earlier ones did.

torchrun and Slurm start a run again after a failure. A run that was told to stop, that is refused
or that fails twice at the same step ends, with its reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.run_directory import run_directory_path
from megatron_rl.records.starts import Start, launch_of, read_starts

# Another start may outlive the cause: a process died, or an error was unexpected. None stands for a
# start whose processes were all killed.
_FAILURES = (None, 1, ExitCode.ENGINE_FAILED, ExitCode.NON_FINITE, ExitCode.PEER_FAILED)
_MAX_EQUAL_FAILURES = 2


def is_restart(environment: Mapping[str, str]) -> bool:
    """True for ranks that torchrun has started before."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def require_reason_to_restart(run: RunSettings, environment: Mapping[str, str]) -> None:
    """Raise `Failure` in ranks that torchrun should not have started again.

    Every rank calls this first: it reads two files.
    """
    if not is_restart(environment):
        return
    if run.resume != "auto":
        raise Failure(
            f"torchrun has started the ranks again, and run.resume={run.resume!r} does not resume "
            "the run. Use run.resume=auto with run.name and run.checkpoint_every, or "
            "--max-restarts=0",
            ExitCode.REFUSED,
        )
    directory = run_directory_path(run, datetime.datetime.now())
    starts = read_starts(directory)
    record = read_exit_record(directory)
    if record is None or not starts or starts[-1].launch != launch_of(environment):
        return
    if record.code in set(ExitCode) - {ExitCode.OK, *_FAILURES}:
        text = f"the run has ended already, and starts no more: {record.reason}"
        raise Failure(text, record.code)


def refusal_of_repeated_failure(starts: Sequence[Start], first_step: int) -> Failure | None:
    """Return the refusal of a start if the last ones failed alike, None if it may go on.

    starts: those before this one, with their ends. first_step: the first step of this one.
    """
    ends = [start.end for start in starts[-_MAX_EQUAL_FAILURES:]]
    last = ends[-1] if ends else None
    if len(ends) < _MAX_EQUAL_FAILURES or last is None or last.code not in _FAILURES:
        return None
    if starts[-1].first_step != first_step:
        return None  # the last start has saved a checkpoint
    if any(end is None or (end.step, end.code) != (last.step, last.code) for end in ends):
        return None
    cause = "killed" if last.code is None else f"code {last.code}"
    return Failure(
        f"the run failed {_MAX_EQUAL_FAILURES} times at step {last.step} with {cause}, and saved "
        f"no checkpoint in between: {last.reason}. Mend the cause (see logs/), then start it "
        "again: a start after this refusal is let through",
        ExitCode.REFUSED,
    )
