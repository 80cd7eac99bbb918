"""Starts that torchrun or Slurm should not have made end, with the reason."""

from pathlib import Path

import pytest

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.starts import End, Start, launch_of, write_starts
from megatron_rl.run.supervision.failures import describe_failure
from megatron_rl.run.supervision.restarts import (
    refusal_of_repeated_failure,
    require_reason_to_restart,
)
from tests.support.configurations import configuration_of

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "none"}
FIRST = RESTARTED | {"TORCHELASTIC_RESTART_COUNT": "0"}


def settings(root: Path, *overrides: str) -> RunSettings:
    names = (f"run.root={root}", "run.name=job", "run.checkpoint_every=1")
    return configuration_of(["experiment=smoke", *names, "run.resume=auto", *overrides]).run


def ended_run(root: Path, code: int, *, launch: str | None = None) -> None:
    """Make the directory of a run whose last start ended with `code`."""
    (root / "job").mkdir()
    write_starts(root / "job", [Start(1.0, 1, launch_of(FIRST) if launch is None else launch)])
    write_exit_record(root / "job", code, "the reason")


@pytest.mark.parametrize("code", [2, 3, 6, 8, 75, 130])
def test_ranks_that_start_again_after_a_final_end_repeat_it(tmp_path: Path, code: int) -> None:
    ended_run(tmp_path, code)
    with pytest.raises(Failure, match="has ended already") as error_info:
        require_reason_to_restart(settings(tmp_path), RESTARTED)
    reason = "the run has ended already, and starts no more: the reason"
    assert describe_failure(error_info.value) == (code, reason)


@pytest.mark.parametrize("code", [0, 1, 4, 5, 7])
def test_ranks_start_again_after_a_failure(tmp_path: Path, code: int) -> None:
    ended_run(tmp_path, code)
    require_reason_to_restart(settings(tmp_path), RESTARTED)


def test_the_end_of_an_earlier_torchrun_is_not_final(tmp_path: Path) -> None:
    """This one was killed before it began, and its first restart finds the older record."""
    ended_run(tmp_path, 75, launch="another")
    require_reason_to_restart(settings(tmp_path), RESTARTED)


def test_the_first_start_goes_on_after_any_end(tmp_path: Path) -> None:
    ended_run(tmp_path, 75)
    require_reason_to_restart(settings(tmp_path), FIRST)
    require_reason_to_restart(settings(tmp_path), {})


def test_ranks_that_start_again_need_a_run_that_resumes(tmp_path: Path) -> None:
    run = settings(tmp_path, "run.resume=never")
    require_reason_to_restart(run, FIRST)
    with pytest.raises(Failure, match=r"run\.resume='never' does not resume the run"):
        require_reason_to_restart(run, RESTARTED)


def failure(first_step: int, step: int, code: int | None = 7) -> Start:
    return Start(1.0, first_step, end=End(step, code, "rank 1 ended"))


@pytest.mark.parametrize("code", [None, 1, 4, 5, 7])
def test_a_failure_that_repeats_at_one_step_is_refused_by_name(code: int | None) -> None:
    starts = [failure(1, 4, 4), failure(1, 17, code), failure(11, 17, code)]
    refusal = refusal_of_repeated_failure(starts, 11)
    cause = "killed" if code is None else f"code {code}"
    assert f"the run failed 2 times at step 17 with {cause}, and saved" in str(refusal)
    assert "rank 1 ended. Mend the cause" in str(refusal)


@pytest.mark.parametrize(
    ("starts", "first_step"),
    [
        ([], 1),
        ([failure(1, 17)], 11),
        ([failure(1, 17), failure(11, 17)], 15),
        ([failure(1, 17), failure(11, 16)], 11),
        ([failure(1, 17, 4), failure(11, 17, 7)], 11),
        ([failure(1, 17, 75), failure(11, 17, 75)], 11),
        ([failure(1, 17, 143), failure(11, 17, 143)], 11),
        ([failure(1, 17), failure(11, 17), failure(11, 11, 2)], 11),
        ([failure(1, 17), Start(1.0, 11)], 11),
    ],
    ids=[
        "no start",
        "one failure",
        "a newer checkpoint",
        "another step",
        "another code",
        "asked to stop",
        "torchrun was killed",
        "after a refusal",
        "no end",
    ],
)
def test_other_starts_go_on(starts: list[Start], first_step: int) -> None:
    assert refusal_of_repeated_failure(starts, first_step) is None
