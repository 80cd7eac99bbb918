"""Where a run's time went: seconds by stage, of the first step and of the mean of the later ones.

python launch/step_times.py runs/NAME
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.past_run import Record, RunUnreadable, read_metrics

STAGES = ("rollout", "exchange", "old_policy", "train", "sync")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "run", type=Path, help="a run's directory, such as runs/NAME; the run may be going on"
    )
    run = parser.parse_args(arguments).run
    try:
        records = read_metrics(run)
        steps = [record for record in records if _seconds(record, "step") > 0]
        if not steps:
            raise RunUnreadable(
                f"{run}: no step is complete. Wait for the first one, or give another run"
            )
    except Failure as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    print("\n".join(table(steps)))
    if evaluations := [seconds for record in records if (seconds := _seconds(record, "eval")) > 0]:
        exposed = mean(_seconds(record, "reward_exposed") for record in _later(steps))
        print(f"\n{len(evaluations)} evaluations of {mean(evaluations):.1f} s each;", end=" ")
        print(f"reward time exposed {exposed:.3f} s a step")
    return ExitCode.OK


def table(steps: Sequence[Record]) -> Iterator[str]:
    """The lines of a Markdown table."""
    first, later = steps[0], _later(steps)
    whole = mean(_seconds(record, "step") for record in later)
    yield "| stage | first step, s | later steps, s | share |"
    yield "|---|---|---|---|"
    for stage in STAGES:
        seconds = mean(_seconds(record, stage) for record in later)
        yield f"| {stage} | {_seconds(first, stage):.2f} | {seconds:.2f} | {seconds / whole:.0%} |"
    yield f"| whole step | {_seconds(first, 'step'):.2f} | {whole:.2f} | |"


def _later(steps: Sequence[Record]) -> Sequence[Record]:
    """All but the first, which compiles; of a single step, that one."""
    return steps[1:] or steps


def _seconds(record: Record, stage: str) -> float:
    return record.get(f"time/{stage}") or 0.0


if __name__ == "__main__":
    sys.exit(main())
