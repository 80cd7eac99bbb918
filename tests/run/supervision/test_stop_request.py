"""A signal that leaves time to save ends the process only after that time.

Each case is a process of its own.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_rl.run.supervision.stop_request import (
    StopRequest,
    WaitAborted,
    seconds_of_slurm_job,
)
from tests.run.supervision.test_watchdog import HEAD, ROOT, run_process
from tests.support.torchrun import TORCHRUN

REQUEST = """
from megatron_rl.run.supervision.stop_request import StopRequest

def run_with_request(seconds, work):
    stop = StopRequest(seconds)
    stop.accept_signals()
    reporter = ExitReporter(LocalRanks(), patience_seconds=0.3)
    with Watchdog(reporter, shutdown_seconds=2.0, stop=stop) as watchdog:
        try:
            with watchdog.interruptible():
                work(stop)
        except BaseException as error:
            report_exception(error, reporter, watchdog)
        exit_process(reporter, LocalRanks(), OpenParts())

def save(stop):
    print("ready", flush=True)
    while stop.signal_name is None:
        time.sleep(0.05)
    time.sleep(1.0)
    print(f"saved after {stop.signal_name}", file=sys.stderr, flush=True)
    os._exit(75)
"""


@pytest.mark.slow
def test_a_run_has_time_to_save() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        code, errors, _ = run_process(REQUEST + "run_with_request(9.0, save)", number, number)
        assert code == 75
        assert f"saved after {number.name}" in errors


@pytest.mark.slow
def test_a_run_that_exceeds_the_time_limit_ends_without_saving() -> None:
    for work in ("sleep", "hang"):
        code, errors, seconds = run_process(
            REQUEST + f"run_with_request(1.0, lambda stop: {work}())", signal.SIGTERM
        )
        assert code == 143
        assert "stopped (SIGTERM)" in errors
        assert 1.0 < seconds < 20


def test_ctrl_c_does_not_wait_for_the_time_limit() -> None:
    code, errors, seconds = run_process(
        REQUEST + "run_with_request(30.0, lambda stop: sleep())", signal.SIGTERM, signal.SIGINT
    )
    assert code == 130
    assert "stopped (SIGINT)" in errors
    assert seconds < 20


def test_ctrl_c_saves_and_a_second_one_ends_the_run() -> None:
    now = [0.0]
    stop = StopRequest(20.0, clock=lambda: now[0])
    assert not stop.handle_signal(signal.SIGINT), "nothing can be saved yet"
    stop.accept_signals()
    assert stop.handle_signal(signal.SIGINT)
    assert stop.signal_name == "SIGINT"
    stop.is_wait_abortable = True
    now[0] = 11.0
    with pytest.raises(WaitAborted):
        stop.check_deadline()
    assert not stop.handle_signal(signal.SIGINT)


def test_sigterm_after_ctrl_c_ends_the_run_as_a_second_ctrl_c() -> None:
    """torchrun sends its ranks SIGINT after the first Ctrl-C, and SIGTERM after the second."""
    code, errors, seconds = run_process(
        REQUEST + "run_with_request(30.0, lambda stop: sleep())", signal.SIGINT, signal.SIGTERM
    )
    assert code == 130
    assert "stopped (SIGINT)" in errors
    assert seconds < 20


@pytest.mark.distributed
def test_a_second_ctrl_c_ends_the_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train_rl.py"
    script.write_text(HEAD + REQUEST + "run_with_request(60.0, lambda stop: sleep())")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n", "ready\n"]
    job.send_signal(signal.SIGINT)
    time.sleep(1.0)
    assert job.poll() is None, "the first one leaves time to save"
    start = time.monotonic()
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=100)
    assert time.monotonic() - start < 25  # the request would leave 60, torchrun leaves 30
    assert "the run was stopped (SIGINT)" in errors
    assert "Traceback" not in errors


def test_the_time_that_is_left_begins_with_the_first_signal_that_limits_it() -> None:
    now = [0.0]
    stop = StopRequest(20.0, clock=lambda: now[0])
    stop.accept_signals()
    stop.handle_signal(signal.SIGUSR1)
    assert stop.seconds_left is None
    stop.handle_signal(signal.SIGTERM)
    now[0] = 5.0
    stop.handle_signal(signal.SIGTERM)
    assert stop.seconds_left == 15.0
    now[0] = 30.0
    assert stop.seconds_left == 0.0


def test_a_sigterm_after_the_warning_has_its_own_time_limit() -> None:
    """Slurm sends it at the end of the job, and kills its processes later."""
    now = [0.0]
    stop = StopRequest(25.0, clock=lambda: now[0], seconds_of_job=lambda: 300.0)
    stop.accept_signals()
    stop.handle_signal(signal.SIGUSR1)
    assert stop.seconds_left == 300.0
    now[0] = 300.0
    assert not stop.has_expired
    stop.handle_signal(signal.SIGTERM)
    assert stop.seconds_left == 25.0
    assert not stop.has_expired
    now[0] = 326.0
    assert stop.has_expired


def test_a_warning_without_a_job_sets_no_limit() -> None:
    stop = StopRequest(25.0, seconds_of_job=lambda: None)
    stop.handle_signal(signal.SIGUSR1)
    stop.is_wait_abortable = True
    stop.check_deadline()
    assert stop.seconds_left is None and not stop.has_expired


def test_an_end_that_is_not_known_or_over_sets_no_limit() -> None:
    assert seconds_of_slurm_job({}) is None
    for end in ("", "soon", "-5", "²", "1"):
        assert seconds_of_slurm_job({"SLURM_JOB_END_TIME": end}) is None


def test_a_slurm_job_leaves_the_time_until_its_limit() -> None:
    seconds = seconds_of_slurm_job({"SLURM_JOB_END_TIME": str(int(time.time()) + 300)})
    assert seconds is not None and 290 < seconds <= 300


def test_a_run_saves_after_ctrl_c() -> None:
    code, errors, _ = run_process(REQUEST + "run_with_request(9.0, save)", signal.SIGINT)
    assert code == 75
    assert "saved after SIGINT" in errors


def test_a_wait_that_was_aborted_stays_aborted_when_the_file_is_removed(tmp_path: Path) -> None:
    now = [0.0]
    stop = StopRequest(10.0, clock=lambda: now[0], seconds_of_job=lambda: 10.0)
    file = tmp_path / "stop"
    stop.watch_file(file)
    file.touch()
    assert stop.source == "the file stop"
    stop.is_wait_abortable = True
    now[0] = 5.5
    with pytest.raises(WaitAborted):
        stop.check_deadline()
    file.unlink()
    assert stop.source == "the file stop"
