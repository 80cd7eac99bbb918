"""Process trees end with the process that holds their lifeline, however it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_bridge.server.lifeline import Lifeline, start_supervised

# A command with a child and a grandchild that ignore SIGTERM; one of them leaves the process group
# as a daemon would.
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
children = [
    subprocess.Popen([sys.executable, "-c", ignore]),
    subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True),
]
pids = [os.getpid(), *(child.pid for child in children)]
open(sys.argv[1] + ".part", "w").write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""
# A stand-in for the trainer: starts the tree on its lifeline and waits.
HOLDER = """
import os, sys, time
from sglang_bridge.server.lifeline import Lifeline, start_supervised
lifeline = Lifeline()
started = start_supervised([sys.executable, "-c", sys.argv[1], sys.argv[2]], lifeline=lifeline,
                           environment=os.environ, grace_seconds=0.5)
if len(sys.argv) > 3 and os.fork() == 0:
    time.sleep(20)  # a forked helper of the trainer that lives on
    os._exit(0)
time.sleep(300)
"""
# A process of the tree ends and leaves a named semaphore, which no process has mapped. The tracker
# removes it.
SEMAPHORE = """
import multiprocessing, os, sys, time
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
if os.fork() == 0:
    made = multiprocessing.get_context("spawn").Semaphore()
    open(sys.argv[1] + ".part", "w").write(made._semlock.name)
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    os._exit(0)
time.sleep(300)
"""


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def tree_pids(path: Path) -> list[int]:
    assert wait_for(path.exists, 20), "the tree did not start"
    return [int(pid) for pid in path.read_text().split()]


def start_tree(path: Path, lifeline: Lifeline) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", TREE, str(path)]
    return start_supervised(command, lifeline=lifeline, environment=os.environ, grace_seconds=0.5)


@pytest.mark.parametrize("extra", [[], ["forked"]], ids=["alone", "with-a-forked-helper"])
def test_killing_the_holder_ends_the_whole_tree(tmp_path: Path, extra: list[str]) -> None:
    path = tmp_path / "pids"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, TREE, str(path), *extra], env=os.environ
    )
    pids = tree_pids(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert wait_for(lambda: not any(map(is_running, pids)), 10), (
        f"of {pids}, {list(filter(is_running, pids))} live"
    )


@pytest.mark.slow
def test_closing_the_lifeline_ends_the_whole_tree(tmp_path: Path) -> None:
    lifeline = Lifeline()
    path = tmp_path / "pids"
    process = start_tree(path, lifeline)
    pids = tree_pids(path)
    lifeline.close()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not any(map(is_running, pids))


@pytest.mark.slow
def test_terminating_the_supervisor_ends_the_whole_tree(tmp_path: Path) -> None:
    lifeline = Lifeline()
    path = tmp_path / "pids"
    process = start_tree(path, lifeline)
    pids = tree_pids(path)
    process.terminate()
    process.wait(10)
    assert not any(map(is_running, pids))
    lifeline.close()


def test_killing_the_supervisor_kills_the_command(tmp_path: Path) -> None:
    lifeline = Lifeline()
    path = tmp_path / "pids"
    process = start_tree(path, lifeline)
    pids = tree_pids(path)
    process.kill()
    process.wait(10)
    try:
        assert wait_for(lambda: not is_running(pids[0]), 5)
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
        lifeline.close()


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(7)", 7), ("import os; os.abort()", 134)]
)
def test_supervisor_returns_the_exit_code_of_its_command(code: str, exit_code: int) -> None:
    lifeline = Lifeline()
    process = start_supervised(
        [sys.executable, "-c", code], lifeline=lifeline, environment=os.environ
    )
    assert process.wait(20) == exit_code
    lifeline.close()


@pytest.mark.slow
def test_processes_that_a_command_leaves_behind_are_ended(tmp_path: Path) -> None:
    lifeline = Lifeline()
    path = tmp_path / "pids"
    code = TREE.rsplit("time.sleep(300)", 1)[0]
    command = [sys.executable, "-c", code, str(path)]
    process = start_supervised(
        command, lifeline=lifeline, environment=os.environ, grace_seconds=0.2
    )
    assert process.wait(20) == 0
    assert not any(map(is_running, tree_pids(path)))
    lifeline.close()


@pytest.mark.slow
def test_semaphores_of_a_process_that_was_killed_are_removed(tmp_path: Path) -> None:
    lifeline = Lifeline()
    path = tmp_path / "name"
    command = [sys.executable, "-c", SEMAPHORE, str(path)]
    process = start_supervised(command, lifeline=lifeline, environment=os.environ, grace_seconds=0)
    assert wait_for(path.exists, 20)
    file = Path(f"/dev/shm/sem.{path.read_text().removeprefix('/')}")
    assert file.exists()
    lifeline.close()
    process.wait(20)
    assert not file.exists()


@pytest.mark.parametrize("ending", ["command", "lifeline"])
def test_a_scratch_directory_lasts_as_long_as_the_command(tmp_path: Path, ending: str) -> None:
    """A command that is killed removes nothing itself."""
    lifeline = Lifeline()
    path = tmp_path / "name"
    code = (
        "import os, pathlib, signal, sys, time\n"
        "scratch = pathlib.Path(os.environ['SCRATCH'])\n"
        "(scratch / 'file').write_text('x')\n"
        "pathlib.Path(sys.argv[1] + '.part').write_text(str(scratch))\n"
        "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == 'command' else time.sleep(300)\n"
    )
    process = start_supervised(
        [sys.executable, "-c", code, str(path), ending],
        lifeline=lifeline,
        environment=os.environ,
        grace_seconds=0,
        scratch=("SCRATCH", tmp_path / "a=b"),
    )
    assert wait_for(path.exists, 20)
    scratch = Path(path.read_text())
    assert scratch == tmp_path / "a=b" and (ending == "command" or scratch.is_dir())
    lifeline.close()
    process.wait(20)
    assert not scratch.exists()


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    lifeline = Lifeline()
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
        process = start_supervised(
            [sys.executable, "-c", code], lifeline=lifeline, environment=os.environ, log=file
        )
    process.wait(20)
    assert log.read_text().split() == ["out", "err"]
    lifeline.close()
