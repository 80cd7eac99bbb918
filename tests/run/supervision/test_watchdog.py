"""Nothing holds the end of a process: its reason arrives first, and its code in time. Each case is
a process.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.run.supervision.shutdown import close

ROOT = Path(__file__).resolve().parents[2]
HEAD = """
import ctypes, os, signal, subprocess, sys, threading, time
import megatron_rl.run.supervision.failures
from pathlib import Path
from megatron_rl.run.supervision.shutdown import exit_process, report_exception
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.watchdog import Watchdog

def stuck():  # a wait in native code, which no signal interrupts
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    threading.Timer(0.5, lambda: print("ready", flush=True)).start()  # from another thread: this one is stuck by then
    libc.pthread_mutex_lock(mutex)

def sleeping():
    print("ready", flush=True)
    time.sleep(60)

class Rank:
    def __init__(self, abandon):
        self.abandon = abandon

def run(work, *, check=None, rank=None, end_seconds=2.0):
    words = ExitReporter(LocalRanks(), patience_seconds=0.3)
    with Watchdog(words, end_seconds=end_seconds) as watch:
        if check:
            watch.set_check(check)
        try:
            with watch.interruptible():
                work()
                words.report_success()
        except BaseException as error:
            report_exception(error, words, watch)
        exit_process(words, LocalRanks(), rank)
"""


def run(code: str, *numbers: signal.Signals) -> tuple[int, str, float]:
    """Exit code, standard error and the seconds from the first signal (or `ready`) to the end."""
    job = subprocess.Popen(
        [sys.executable, "-c", HEAD + code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n", job.communicate()[1]
    start = time.monotonic()
    for number in numbers:
        job.send_signal(number)
        time.sleep(0.3)
    _, errors = job.communicate(timeout=60)
    return job.returncode, errors, time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_run_that_works(number: signal.Signals) -> None:
    code, errors, seconds = run("run(sleeping)", number)
    assert code == 128 + number and seconds < 5
    assert (
        errors.strip().splitlines()[0] == f"the run was told to stop ({number.name})"
        and "Traceback" not in errors
    )


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nrun(sleeping)"
    status, errors, _ = run(code, signal.SIGHUP, signal.SIGTERM)
    assert status == 143 and "SIGHUP" not in errors


def test_a_signal_ends_a_run_that_is_stuck_in_a_collective() -> None:
    code, errors, seconds = run("run(stuck)", signal.SIGTERM)
    assert code == 143 and "told to stop (SIGTERM)" in errors and seconds < 8


def test_a_second_signal_does_not_cut_the_clean_up_short() -> None:
    slow = "def abandon():\n    time.sleep(1.0)\n    Path(sys.argv[0] or '.').exists(); os.write(1, b'cleaned up')\n"
    job = subprocess.Popen(
        [sys.executable, "-c", HEAD + slow + "run(sleeping, rank=Rank(abandon), end_seconds=10.0)"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for _ in range(3):
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, output) == (130, "cleaned up")


def test_a_close_that_hangs_is_cut_off_after_the_reason_has_arrived() -> None:
    code, errors, seconds = run("run(sleeping, rank=Rank(stuck))", signal.SIGTERM)
    assert code == 143 and "told to stop" in errors and 1.5 < seconds < 8


def test_what_a_process_started_ends_with_it_even_if_it_was_stopped() -> None:
    code = (
        "child = subprocess.Popen(['sleep', '47'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "os.kill(child.pid, signal.SIGSTOP)\nprint(child.pid, file=sys.stderr, flush=True)\nrun(stuck)\n"
    )
    _, errors, _ = run(code, signal.SIGTERM)
    pid = int(errors.split()[0])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (
        not Path(f"/proc/{pid}").exists()
        or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    )


def test_a_dead_engine_is_noticed_while_the_main_thread_waits_for_it() -> None:
    code = (
        "from sglang_bridge.errors import EngineDied\nstart = time.monotonic()\n"
        "def check():\n    if time.monotonic() > start + 1:\n        raise "
        "EngineDied('engine http://e ended by itself', returncode=137)\n"
    )
    for work in ("stuck", "sleeping"):
        status, errors, seconds = run(code + f"run({work}, check=check)")
        assert status == 4 and seconds < 8
        assert errors.strip().splitlines()[0].startswith("engine http://e ended by itself")


def test_a_run_is_not_ended_by_a_signal_after_it_is_complete(tmp_path: Path) -> None:
    code = (
        "main, thread = threading.Event(), threading.Event()\n"
        "class Heard(Watchdog):\n"
        "    def _interrupt(self, *signal):\n        super()._interrupt(*signal)\n        main.set()\n"
        "    def _handle_signal(self, number):\n        super()._handle_signal(number)\n        thread.set()\n"
        "words = ExitReporter(LocalRanks())\n"
        "with Heard(words, end_seconds=30.0):\n    words.report_success()\n    print('ready', flush=True)\n"
        "    heard = main.wait(20) and thread.wait(20)\n"
        "sys.exit(words.code if heard else 'no signal came')\n"
    )
    assert run(code, signal.SIGTERM)[:2] == (0, "")


def test_trouble_with_closing_a_complete_run_is_a_line_and_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def close(self) -> None:
            raise RuntimeError("no such group")

    close(Broken())  # type: ignore[arg-type]
    assert (
        capsys.readouterr().err
        == "the run is complete; closing it met RuntimeError: no such group\n"
    )
