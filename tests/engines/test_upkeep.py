"""A process is started again when it has ended, hangs or has to end: with a scripted process."""

import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.engines.node.node_reports import ProcessState
from megatron_rl.engines.node.restarts import RestartBudget
from megatron_rl.engines.node.upkeep import Upkeep
from sglang_bridge.errors import EngineDied, EngineError
from tests.support.clocks import FakeClock

START_TIMEOUT = 30.0


class ScriptedProcess:
    """Lives, answers and starts as a test says."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.pid = os.getpid()
        self.epoch = 0
        self.is_alive = True
        self.answers = True
        self.start_error: OSError | None = None
        self.start_time = 0.0
        self.end_requests = 0

    def poll_healthy(self) -> bool:
        self.check_alive()
        return self.answers

    def check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDied("engine http://e ended by itself", returncode=-9)

    def check_age(self, deadline_seconds: float) -> None:
        if self.clock.now - self.start_time > deadline_seconds:
            raise EngineError("engine http://e was not healthy in time")

    def request_end(self) -> None:
        self.end_requests += 1
        self.is_alive = False

    def restart(self, *, timeout: float) -> bool:
        assert not self.is_alive, "an earlier start still runs"
        if self.start_error is not None:
            raise self.start_error
        self.epoch += 1
        self.is_alive = True
        self.answers = False
        self.start_time = self.clock.now
        return True


class Scene:
    """An upkeep and all that it depends on."""

    def __init__(self, limit: int = 6) -> None:
        self.clock = FakeClock()
        self.process = ScriptedProcess(self.clock)
        self.log: list[str] = []
        self.upkeep = Upkeep(
            "engine 1 of node 0",
            self.process,
            RestartBudget(limit, clock=self.clock),
            word="answers",
            start_timeout_s=START_TIMEOUT,
            log=self.log.append,
            clock=self.clock,
        )

    def maintain(
        self, seconds: float = 0.0, *, ordered_epoch: int | None = None, reason: str = ""
    ) -> ProcessState:
        self.clock.now += seconds
        self.upkeep.maintain(ordered_epoch=ordered_epoch, order_reason=reason)
        return self.upkeep.state


DEATH = (
    "engine http://e ended by itself (SIGKILL: from outside, or by the kernel for want of memory "
    "(see dmesg))"
)


def test_a_process_that_ended_is_started_again() -> None:
    scene = Scene()
    assert scene.maintain() is ProcessState.RUNNING
    scene.process.is_alive = False
    assert scene.maintain() is ProcessState.STARTING
    assert (scene.process.epoch, scene.upkeep.reason) == (0, DEATH)
    assert scene.maintain(0.9) is ProcessState.STARTING and scene.process.epoch == 0
    assert scene.maintain(0.1) is ProcessState.STARTING and scene.process.epoch == 1
    assert scene.maintain(19.0) is ProcessState.STARTING
    scene.process.answers = True
    assert scene.maintain(1.0) is ProcessState.RUNNING
    assert scene.upkeep.reason == DEATH
    assert scene.log == [
        f"engine 1 of node 0: {DEATH}; starting it again in 1 s, restart 1 of 6 this hour",
        "engine 1 of node 0 answers again after 21 s",
    ]


def test_ten_minutes_of_answers_shorten_the_next_delay() -> None:
    """The time counts from the first answer of each start."""
    scene = Scene()
    for seconds, delay in ((600.0, 1), (599.0, 2), (600.0, 1)):
        scene.maintain(seconds)
        scene.process.is_alive = False
        scene.maintain()
        assert f"starting it again in {delay} s" in scene.log[-1]
        scene.maintain(delay)
        scene.maintain(20.0)
        scene.process.answers = True
        assert scene.maintain() is ProcessState.RUNNING


def test_a_start_that_is_too_long_counts_as_an_end() -> None:
    scene = Scene()
    scene.process.is_alive = False
    scene.maintain()
    scene.maintain(1.0)
    scene.maintain(START_TIMEOUT)
    assert scene.process.is_alive
    assert scene.maintain(0.5) is ProcessState.STARTING
    assert not scene.process.is_alive
    assert scene.upkeep.reason == "engine http://e was not healthy in time"
    assert "in 2 s, restart 2 of 6" in scene.log[-1]
    scene.maintain(2.0)
    scene.process.answers = True
    scene.maintain()
    assert scene.log[-1] == "engine 1 of node 0 answers again after 34 s"


def test_a_process_that_ends_too_often_is_given_up() -> None:
    scene = Scene(limit=2)
    for _ in range(20):
        scene.process.is_alive = False
        scene.maintain(1.0)
    limit = "recovery.restarts_per_hour=2 allows no further start"
    assert scene.upkeep.state is ProcessState.GIVEN_UP
    assert scene.process.epoch == 2
    assert scene.upkeep.reason == f"{DEATH}; {limit}"
    assert scene.log[-1] == f"engine 1 of node 0: {DEATH}; it is given up: {limit}"
    assert len(scene.log) == 3
    assert scene.maintain(4000.0) is ProcessState.GIVEN_UP, "an hour later"


def test_without_restarts_an_end_is_given_up_at_once() -> None:
    scene = Scene(limit=0)
    assert scene.maintain(5.0) is ProcessState.RUNNING
    scene.process.is_alive = False
    assert scene.maintain() is ProcessState.GIVEN_UP
    assert scene.process.end_requests == 1, "its other processes have to end"


def test_an_order_ends_the_process_of_its_epoch_only() -> None:
    scene = Scene()
    for epoch in (1, None):
        scene.maintain(ordered_epoch=epoch)
    assert scene.process.is_alive and scene.log == []
    scene.maintain(ordered_epoch=0, reason="it answers rubbish")
    assert not scene.process.is_alive
    assert scene.upkeep.reason == "engine 1 of node 0 was ended: it answers rubbish"
    assert scene.log == [
        "engine 1 of node 0 was ended: it answers rubbish; starting it again in 1 s, "
        "restart 1 of 6 this hour"
    ]
    for _ in range(9):
        scene.maintain(1.0, ordered_epoch=0)
    assert scene.process.is_alive and scene.process.epoch == 1 and len(scene.log) == 1
    scene.maintain(ordered_epoch=1, reason="again")  # while it starts
    assert not scene.process.is_alive and len(scene.log) == 2


def test_a_start_that_the_system_refuses_counts_as_an_end() -> None:
    scene = Scene(limit=2)
    scene.process.is_alive = False
    scene.process.start_error = OSError(28, "No space left on device")
    for _ in range(4):
        scene.maintain(1.0)
    assert scene.upkeep.reason.startswith("[Errno 28] No space left on device")
    assert scene.upkeep.state is ProcessState.GIVEN_UP
    assert ["; it is given up" in line for line in scene.log] == [False, False, True]


@pytest.fixture
def stopped_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        pass
    yield process
    process.kill()
    process.wait()


def test_a_process_that_hangs_is_ended_after_seven_seconds(
    stopped_process: subprocess.Popen[bytes],
) -> None:
    scene = Scene()
    scene.process.pid = stopped_process.pid
    for _ in range(14):
        assert scene.maintain(0.5) is ProcessState.RUNNING
    assert scene.maintain(0.5) is ProcessState.STARTING
    assert not scene.process.is_alive
    assert scene.upkeep.reason == (
        "engine 1 of node 0 was stopped (SIGSTOP) and not continued for 7 s: "
        f"process {stopped_process.pid}"
    )
    scene.maintain(1.0)
    assert scene.process.epoch == 1
    # Its next start hangs too, and gets seven seconds of its own
    for _ in range(14):
        scene.maintain(0.5)
    assert len(scene.log) == 1
    scene.maintain(0.5)
    assert len(scene.log) == 2


EVENTS = ("wait", "die", "answer", "stall", "order", "old order")


def play(scene: Scene, event: str, seconds: float) -> None:
    """Let an event happen, and maintain the process later."""
    if event == "die":
        scene.process.is_alive = False
    elif event in ("answer", "stall") and scene.upkeep.state is ProcessState.STARTING:
        scene.process.answers = event == "answer"
    epoch = scene.process.epoch
    order = {"order": epoch, "old order": epoch - 1}.get(event)
    scene.maintain(seconds, ordered_epoch=order, reason="it lies")


def assert_state_is_true(scene: Scene) -> None:
    if scene.upkeep.state is ProcessState.RUNNING:
        assert scene.process.is_alive and scene.process.answers
    if scene.upkeep.state is ProcessState.GIVEN_UP:
        assert not scene.process.is_alive and "allows no further start" in scene.upkeep.reason
    assert scene.upkeep.reason or not scene.process.epoch


@pytest.mark.slow
@given(
    limit=st.integers(0, 4),
    history=st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0.1, 900)), max_size=80),
)
def test_any_history_ends_in_a_state_that_is_true(
    limit: int, history: list[tuple[str, float]]
) -> None:
    """A process that runs is never started, and a report never says more than what is so."""
    scene = Scene(limit)
    restart_times: list[float] = []
    for event, seconds in history:
        epoch = scene.process.epoch
        play(scene, event, seconds)
        assert_state_is_true(scene)
        assert event != "order" or scene.upkeep.state is not ProcessState.RUNNING
        if scene.process.epoch > epoch:
            restart_times.append(scene.clock.now)
    assert scene.process.epoch == len(restart_times)
    # A start follows its permission by a minute at most and a pause between two calls
    for time in restart_times:
        assert sum(time - 3600 + 960 < t <= time for t in restart_times) <= limit
