"""All faults that a run outlives, with the way to inject each, and the sessions of them."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from megatron_rl.contracts.exit_codes import ExitCode
from tests.lab.faults.follower import HELD, HOLD
from tests.lab.faults.injection import Scene
from tests.lab.faults.recovery import RecoverableFault, Session, Stage
from tests.lab.faults.servers import (
    ChangeReply,
    ServerKind,
    answer_garbage,
    answer_nan,
    answer_wrong_version,
)
from tests.lab.faults.table import (
    find_collector,
    find_engine,
    find_engine_processes,
    find_engine_supervisor,
)
from tests.support.jobs import command_line

_WAIT_SECONDS = 300.0
_PULSES = 12
_STOPPED_SECONDS = 1.0
_RUNNING_SECONDS = 0.3

Choose = Callable[[Scene], list[psutil.Process]]


def signal_first(number: signal.Signals, choose: Choose) -> Callable[[Stage], None]:
    """Send a signal to the first of chosen processes."""

    def strike(stage: Stage) -> None:
        choose(stage.follower.scene())[0].send_signal(number)

    return strike


def exhaust_memory(stage: Stage) -> float:
    """Let every further allocation of the engine fail, and wait until one does."""
    moment = time.monotonic()
    for process in find_engine_processes(stage.follower.scene()):
        _, hard_limit = process.rlimit(psutil.RLIMIT_AS)
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().rss // 2, hard_limit))
    return stage.follower.wait_for_line(_SERVES_NOT, moment, _WAIT_SECONDS)


def slow_down(stage: Stage) -> None:
    """Stop and continue the engine's scheduler, so that it runs a quarter of the time."""
    process = find_engine(stage.follower.scene())[0]

    def pulse() -> None:
        with contextlib.suppress(psutil.Error):
            for _ in range(_PULSES):
                process.suspend()
                time.sleep(_STOPPED_SECONDS)
                process.resume()
                time.sleep(_RUNNING_SECONDS)

    threading.Thread(target=pulse, daemon=True).start()


def kill_and_steal_port(stage: Stage) -> None:
    """Kill the engine, and take its port before it is started again."""
    scene = stage.follower.scene()
    servers = (command_line(process) for process in scene.find("sglang.launch_server"))
    port = next(int(m[1]) for m in (re.search(r"--port[= ](\d+)", s) for s in servers) if m)
    for process in find_engine_supervisor(scene) + find_engine(scene):
        process.kill()
    listener = stage.stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            listener.listen()
            return
        time.sleep(0.02)
    raise AssertionError(f"port {port} was not free")


def kill_collector_before_training(stage: Stage) -> float:
    """Kill the collector when a batch was sampled and is not trained yet."""
    follower = stage.follower
    (follower.root / HELD).unlink(missing_ok=True)
    (follower.root / HOLD).touch()
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (follower.root / HELD).exists():
        assert follower.watch() and time.monotonic() < deadline, follower.output[-4000:]
    moment = time.monotonic()
    find_collector(follower.scene())[0].kill()
    (follower.root / HOLD).unlink()
    return moment


def kill_collectors(stage: Stage) -> None:
    """Kill every collector that appears, until the run ends."""
    follower = stage.follower

    def hunt() -> None:
        while follower.job.poll() is None:
            with contextlib.suppress(psutil.Error):
                for process in find_collector(follower.scene()):
                    process.kill()
            time.sleep(0.2)

    threading.Thread(target=hunt, daemon=True).start()


def lie(change: ChangeReply) -> Callable[[Stage], float]:
    """Let the first engine lie until it gets no requests."""

    def strike(stage: Stage) -> float:
        moment = time.monotonic()
        stage.proxies[0].change = change
        stage.follower.wait_for_line("gets no requests until", moment, _WAIT_SECONDS)
        stage.proxies[0].change = None
        return moment

    return strike


def kill_at_request(is_due: Callable[[str, bytes], bool]) -> Callable[[Stage], float]:
    """Kill the first external engine when it gets a certain request."""

    def strike(stage: Stage) -> float:
        moments: list[float] = []

        def observe(path: str, body: bytes) -> None:
            if not moments and is_due(path, body):
                moments.append(time.monotonic())
                stage.park.kill(ServerKind(0))

        stage.proxies[0].observe = observe
        deadline = time.monotonic() + _WAIT_SECONDS
        while not moments:
            assert stage.follower.watch() and time.monotonic() < deadline, stage.follower.output
        stage.proxies[0].observe = None
        return moments[0]

    return strike


def is_weights(path: str, body: bytes) -> bool:
    """True for a part of the weights."""
    return path == "/update_weights_from_distributed"


def is_evaluation(path: str, body: bytes) -> bool:
    """True for a request of an evaluation."""
    return path == "/generate" and b'"eval-' in body


def leave(stage: Stage) -> None:
    """Remove the first external engine from the list."""
    stage.write_urls(*stage.urls[1:])


def join(stage: Stage) -> None:
    """Add all external engines to the list."""
    stage.write_urls(*stage.urls)


def join_twice(stage: Stage) -> None:
    """Add an engine to the list again under the same URL."""
    stage.write_urls(*stage.urls, stage.urls[0])


def join_of(kind: ServerKind) -> Callable[[Stage], float]:
    """Add a server of another kind."""

    def strike(stage: Stage) -> float:
        moment = time.monotonic()
        stage.write_urls(*stage.urls, stage.park.server(kind).url)
        return moment

    return strike


def change_key(stage: Stage) -> float:
    """Let an engine with other keys join: the requests that it gets hold a wrong one."""
    moment = time.monotonic()
    stage.proxies[0].key = "0" * 64
    stage.write_urls(*stage.urls[1:])
    stage.follower.wait_for_line("was removed from", moment, _WAIT_SECONDS)
    moment = time.monotonic()
    stage.write_urls(*stage.urls)
    return moment


_SERVES = r"engine .* serves$"
_SERVES_NOT = "serves no longer"
_COLLECTOR = "the collector of node 0 runs again"
_KILL = signal.SIGKILL
_STOP = signal.SIGSTOP
_KILL_ENGINE = RecoverableFault("SIGKILL engine", signal_first(_KILL, find_engine), _SERVES)
_KILL_COLLECTOR = RecoverableFault(
    "SIGKILL collector", signal_first(_KILL, find_collector), _COLLECTOR
)
_STOP_COLLECTOR = RecoverableFault(
    "SIGSTOP collector", signal_first(_STOP, find_collector), _COLLECTOR
)
_EVALUATIONS = ("eval.every=3",)
_BFLOAT16 = ("model.dtype=bfloat16", "engine.dtype=bfloat16")
_OTHER_DTYPE_SERVER = ServerKind(dtype="bfloat16")
_OTHER_MODEL_SERVER = ServerKind(rope_theta=20_000.0)
SESSIONS = [
    Session(
        "one engine",
        (
            _KILL_ENGINE,
            RecoverableFault("SIGSTOP engine", signal_first(_STOP, find_engine), _SERVES),
            RecoverableFault("slow engine", slow_down),
        ),
        _EVALUATIONS,
    ),
    Session(
        "one engine, its host",
        (
            RecoverableFault(
                "SIGKILL engine's supervisor", signal_first(_KILL, find_engine_supervisor), _SERVES
            ),
            RecoverableFault("no memory for the engine", exhaust_memory, _SERVES),
            RecoverableFault("SIGKILL engine, its port is stolen", kill_and_steal_port, _SERVES),
        ),
        _EVALUATIONS,
    ),
    Session(
        "collector",
        (
            _KILL_COLLECTOR,
            _STOP_COLLECTOR,
            RecoverableFault(
                "SIGKILL collector between sampling and training",
                kill_collector_before_training,
                _COLLECTOR,
            ),
        ),
        _EVALUATIONS,
        num_servers=1,
    ),
    Session(
        "two engines, two ranks",
        (_KILL_COLLECTOR, RecoverableFault("SIGKILL engine", _KILL_ENGINE.strike, _SERVES_NOT)),
        ("parallel=ep2", *_EVALUATIONS),
        ("engine.count=2",),
        steps=8,
        ranks=2,
    ),
    Session("bfloat16", (_KILL_ENGINE, _KILL_COLLECTOR), (*_BFLOAT16, *_EVALUATIONS), steps=8),
    Session(
        "lies",
        (
            RecoverableFault("engine answers garbage", lie(answer_garbage), _SERVES),
            RecoverableFault("engine answers NaN", lie(answer_nan), _SERVES),
            RecoverableFault("engine of a wrong version", lie(answer_wrong_version), _SERVES),
        ),
        _EVALUATIONS,
        steps=60,
        num_servers=2,
    ),
    Session(
        "during a sync",
        (
            RecoverableFault(
                "SIGKILL engine during a sync", kill_at_request(is_weights), _SERVES_NOT
            ),
        ),
        _EVALUATIONS,
        num_servers=2,
    ),
    Session(
        "during an evaluation",
        (
            RecoverableFault(
                "SIGKILL engine during an evaluation", kill_at_request(is_evaluation), _SERVES_NOT
            ),
        ),
        _EVALUATIONS,
        num_servers=2,
    ),
    Session(
        "list of engines",
        (
            RecoverableFault("engine leaves", leave, "was removed from"),
            RecoverableFault("engine joins late", join, _SERVES),
            RecoverableFault("the same URL twice", join_twice, "changes no engine"),
            RecoverableFault("engine with another key joins", change_key, "cannot serve"),
            RecoverableFault(
                "engine with another dtype joins",
                join_of(_OTHER_DTYPE_SERVER),
                "cannot serve.*dtype",
            ),
            RecoverableFault(
                "engine with another model joins",
                join_of(_OTHER_MODEL_SERVER),
                "cannot serve.*rope_theta",
            ),
        ),
        _EVALUATIONS,
        steps=60,
        num_servers=2,
        other_servers=(_OTHER_DTYPE_SERVER, _OTHER_MODEL_SERVER),
    ),
    Session(
        "no engine left",
        (RecoverableFault("all engines dead, no restart allowed", _KILL_ENGINE.strike),),
        _EVALUATIONS,
        ("recovery.restarts_per_hour=0", "run.checkpoint_every=100"),
        code=ExitCode.ENGINE_FAILED,
    ),
    Session(
        "no collector left",
        (RecoverableFault("each replacement of the collector is killed", kill_collectors),),
        _EVALUATIONS,
        ("recovery.restarts_per_hour=2", "run.checkpoint_every=100"),
        num_servers=1,
        code=ExitCode.ENGINE_FAILED,
    ),
]


def chosen_sessions(words: list[str]) -> Iterator[Session]:
    """Yield the sessions with those faults whose name, or whose session's name, has a word."""
    for session in SESSIONS:
        faults = tuple(
            fault
            for fault in session.faults
            if not words or any(word in f"{session.name}/{fault.name}" for word in words)
        )
        if faults:
            yield _replace_faults(session, faults)


def session_of(name: str) -> Session:
    """Return a session with one fault alone. name: SESSION/FAULT."""
    for session in SESSIONS:
        for fault in session.faults:
            if f"{session.name}/{fault.name}" == name:
                return _replace_faults(session, (fault,))
    raise KeyError(name)


def _replace_faults(session: Session, faults: tuple[RecoverableFault, ...]) -> Session:
    return Session(**{**session.__dict__, "faults": faults})
