"""Nothing delays the end of a process: the reason is printed first, and the exit code follows.

Each case is a process of its own.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.shutdown import close_after_success
from megatron_rl.run.supervision.supervision import OpenParts
from megatron_rl.run.supervision.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[3]
HEAD = """
import contextlib, ctypes, os, signal, subprocess, sys, threading, time
import megatron_rl.run.supervision.failures
from pathlib import Path
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.supervision import OpenParts
from megatron_rl.run.supervision.shutdown import exit_process, report_exception
from megatron_rl.run.supervision.watchdog import Watchdog

def hang():  # wait in native code, which no signal interrupts
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    # another thread prints: this one hangs by then
    threading.Timer(0.5, lambda: print("ready", flush=True)).start()
    libc.pthread_mutex_lock(mutex)

def sleep():
    print("ready", flush=True)
    time.sleep(60)

def run(work, *, check=None, kill=None, limit=None, shutdown_seconds=2.0):
    parts = OpenParts()
    if kill:
        parts.kill_on_failure(kill)
    reporter = ExitReporter(LocalRanks(), patience_seconds=0.3)
    with Watchdog(reporter, shutdown_seconds=shutdown_seconds) as watchdog:
        if check:
            watchdog.add_check(check)
        try:
            with watchdog.interruptible():
                with watchdog.time_limit(*limit) if limit else contextlib.nullcontext():
                    work()
                reporter.report_success()
        except BaseException as error:
            report_exception(error, reporter, watchdog)
        exit_process(reporter, LocalRanks(), parts)
"""


def start_process(code: str) -> subprocess.Popen[str]:
    """Start a process and wait until it prints `ready`."""
    job = subprocess.Popen(
        [sys.executable, "-c", HEAD + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n", job.communicate()[1]
    return job


def run_process(code: str, *numbers: signal.Signals) -> tuple[int, str, float]:
    """Returns exit code, standard error, and the seconds from the first signal to the end."""
    job = start_process(code)
    start = time.monotonic()
    for number in numbers:
        job.send_signal(number)
        time.sleep(0.3)
    _, errors = job.communicate(timeout=60)
    return job.returncode, errors, time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_working_run(number: signal.Signals) -> None:
    code, errors, seconds = run_process("run(sleep)", number)
    assert code == 128 + number
    assert seconds < 20
    assert errors.strip().splitlines()[0] == f"the run was stopped ({number.name})"
    assert "Traceback" not in errors


def test_a_run_under_nohup_ignores_sighup() -> None:
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nrun(sleep)"
    status, errors, _ = run_process(code, signal.SIGHUP, signal.SIGTERM)
    assert status == 143
    assert "SIGHUP" not in errors


def test_a_signal_ends_a_run_that_hangs_in_a_collective() -> None:
    code, errors, seconds = run_process("run(hang)", signal.SIGTERM)
    assert code == 143
    assert "stopped (SIGTERM)" in errors
    assert seconds < 20


def test_a_second_signal_does_not_interrupt_the_cleanup() -> None:
    cleanup = "def clean_up():\n    time.sleep(1.0)\n    os.write(1, b'cleaned up')\n"
    job = start_process(cleanup + "run(sleep, kill=clean_up, shutdown_seconds=10.0)")
    for _ in range(3):
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, output) == (130, "cleaned up")


def test_a_cleanup_that_hangs_is_cut_off_after_the_reason_is_printed() -> None:
    code, errors, seconds = run_process("run(sleep, kill=hang)", signal.SIGTERM)
    assert code == 143
    assert "stopped (SIGTERM)" in errors
    assert 1.5 < seconds < 20


@pytest.mark.slow
def test_children_of_a_process_end_with_it_even_when_frozen() -> None:
    code = (
        "child = subprocess.Popen(['sleep', '47'], stdout=subprocess.DEVNULL, "
        "stderr=subprocess.DEVNULL)\n"
        "os.kill(child.pid, signal.SIGSTOP)\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        "run(hang)\n"
    )
    _, errors, _ = run_process(code, signal.SIGTERM)
    child = Path("/proc") / errors.split()[0]
    deadline = time.monotonic() + 20
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


@pytest.mark.parametrize("work", ["hang", "sleep"])
def test_a_dead_engine_is_noticed_while_the_main_thread_waits(work: str) -> None:
    check = (
        "from sglang_bridge.errors import EngineDied\n"
        "start = time.monotonic()\n"
        "def check():\n"
        "    if time.monotonic() > start + 1:\n"
        "        raise EngineDied('engine http://e ended by itself', returncode=137)\n"
    )
    status, errors, seconds = run_process(check + f"run({work}, check=check)")
    assert status == 4
    assert seconds < 20
    assert errors.strip().splitlines()[0].startswith("engine http://e ended by itself")


@pytest.mark.slow
@pytest.mark.parametrize("work", ["hang", "sleep"])
def test_a_time_limit_ends_a_run_that_hangs_in_user_code(work: str) -> None:
    limit = (
        "from megatron_rl.contracts.plugins import PluginError\n"
        "limit = (0.8, PluginError('the constructor does not return'))\n"
    )
    status, errors, seconds = run_process(limit + f"run({work}, limit=limit)")
    assert status == 2
    assert seconds < 20
    assert errors.strip().splitlines()[0] == "the constructor does not return"


def test_a_time_limit_ends_with_its_body() -> None:
    """Without a limit, there is no check that could find a cause."""
    watchdog = Watchdog(ExitReporter(LocalRanks()))

    def waiting_seconds() -> float:
        start = time.monotonic()
        watchdog.wait_for_check(0.5)
        return time.monotonic() - start

    with watchdog.time_limit(60.0, RuntimeError("too late")):
        assert waiting_seconds() >= 0.5
    assert waiting_seconds() < 0.5


THREAD = """
import threading, time
from megatron_rl.run.supervision.shutdown import limit_exit
threading.Thread(target=time.sleep, args=(60,)).start()
limit_exit(0, 0.3)
print("ready", flush=True)
"""


def test_threads_of_user_classes_do_not_keep_a_complete_run_from_ending() -> None:
    assert run_process(THREAD)[0] == 0


def test_a_signal_does_not_end_a_complete_run() -> None:
    code = (
        "main, thread = threading.Event(), threading.Event()\n"
        "class NotifyingWatchdog(Watchdog):\n"
        "    def _interrupt(self, *signal):\n"
        "        super()._interrupt(*signal)\n"
        "        main.set()\n"
        "    def _handle_signal(self, number):\n"
        "        super()._handle_signal(number)\n"
        "        thread.set()\n"
        "reporter = ExitReporter(LocalRanks())\n"
        "with NotifyingWatchdog(reporter, shutdown_seconds=30.0):\n"
        "    reporter.report_success()\n"
        "    print('ready', flush=True)\n"
        "    has_arrived = main.wait(20) and thread.wait(20)\n"
        "sys.exit(reporter.exit_code if has_arrived else 'no signal came')\n"
    )
    code_and_errors = run_process(code, signal.SIGTERM)[:2]
    assert code_and_errors == (0, "")


def test_an_error_while_closing_a_complete_run_is_printed_and_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise RuntimeError("no such group")

    parts = OpenParts()
    parts.callback(fail)
    close_after_success(parts)
    error = capsys.readouterr().err
    assert error.endswith("RuntimeError: no such group\n")
    assert error.count("\n") == 1


def test_open_parts_kills_processes_before_it_closes_in_reverse_order() -> None:
    calls: list[str] = []
    parts = OpenParts()
    for name in ("first", "second"):
        parts.callback(lambda name=name: calls.append(f"close {name}"))  # type: ignore[misc]
        parts.kill_on_failure(lambda name=name: calls.append(f"kill {name}"))  # type: ignore[misc]
    parts.kill_processes()
    assert calls == ["kill second", "kill first", "close second", "close first"]
