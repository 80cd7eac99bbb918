"""Faults that a run outlives: injects them into a run, and compares what it leaves."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.faults.evidence import EVIDENCE_SETTINGS, Evidence, read_evidence
from tests.lab.faults.follower import RunFollower
from tests.lab.faults.servers import LyingProxy, ServerKind, ServerPark, open_proxy

# Reported as recovered in time, less the start of an engine
MAX_SECONDS = 60.0
_RUN_SECONDS = 1200.0
_STEP_SECONDS = 400.0
_SCRIPT = "tests/lab/faults/pausable_run.py"


@dataclass
class Stage:
    """A run that faults strike. Its external engines are behind `proxies`, in order."""

    follower: RunFollower
    park: ServerPark
    urls_file: Path
    proxies: list[LyingProxy]
    stack: contextlib.ExitStack

    def write_urls(self, *urls: str) -> None:
        """Replace the list of external engines."""
        self.urls_file.write_text("\n".join(urls) + "\n")

    @property
    def urls(self) -> list[str]:
        """The addresses of the external engines at the start."""
        return [proxy.url for proxy in self.proxies]


@dataclass(frozen=True)
class RecoverableFault:
    """A fault that a run outlives.

    strike: injects it. It may wait for what the run says, and returns the time of the fault if that
    is not the time of the call. recovery: pattern of the line that ends the recovery, empty if none
    is printed.
    """

    name: str
    strike: Callable[[Stage], float | None]
    recovery: str = ""


@dataclass(frozen=True)
class Session:
    """A run with faults, one after another. Each strikes when the one before is over.

    settings: of this run and of the undisturbed run that it is compared with. own_settings: of this
    run alone. num_servers: external engines; with 0 the run starts its engines itself.
    other_servers: those that its faults need besides. code: with which the run ends because of its
    only fault; it is resumed then.
    """

    name: str
    faults: tuple[RecoverableFault, ...]
    settings: tuple[str, ...] = ()
    own_settings: tuple[str, ...] = ()
    steps: int = 12
    ranks: int = 1
    num_servers: int = 0
    other_servers: tuple[ServerKind, ...] = ()
    code: int = 0


@dataclass(frozen=True)
class Row:
    """The effect of a fault on a run.

    seconds: from the fault to the record of a step that began after it. engine_seconds: the part of
    them in which an engine started, if the run waited for it. line: what the run said at the end.
    """

    fault: str
    seconds: float
    engine_seconds: float
    line: str

    @property
    def net_seconds(self) -> float:
        """The seconds without the start of an engine."""
        return self.seconds - self.engine_seconds


@dataclass(frozen=True)
class Outcome:
    """The result of a session. reference: the evidence of the undisturbed run."""

    rows: list[Row]
    evidence: Evidence
    reference: Evidence
    output: str
    code: int | None = 0

    @property
    def num_lost(self) -> int:
        """The rollouts that were lost."""
        return self.evidence.num_lost(self.reference)

    @property
    def has_same_weights(self) -> bool:
        """True if the weights equal the undisturbed run's."""
        return bool(self.evidence.digest) and self.evidence.digest == self.reference.digest


@dataclass
class Laboratory:
    """Runs sessions, and keeps the undisturbed runs that they are compared with.

    directory: for runs and logs.
    """

    directory: Path
    park: ServerPark
    _references: dict[tuple[object, ...], Evidence] = field(default_factory=dict)

    def reference(self, session: Session) -> Evidence:
        """Return what an undisturbed run with the settings of a session leaves."""
        key = (session.ranks, session.steps, session.settings)
        if key not in self._references:
            root = self.directory / f"undisturbed-{len(self._references)}"
            root.mkdir(parents=True)
            settings = [*_settings(session), *self._external_settings(session, root, 1)]
            with contextlib.ExitStack() as stack:
                follower = RunFollower(root, settings, ranks=session.ranks)
                stack.callback(_kill_if_running, follower)
                code = follower.wait(_RUN_SECONDS)
            assert code == 0, f"the undisturbed run ended with {code}:\n{follower.output[-4000:]}"
            self._references[key] = read_evidence(follower.run)
        return self._references[key]

    def run(self, session: Session) -> Outcome:
        """Run a session. Raises AssertionError if the run does not do what its faults say."""
        reference = self.reference(session)
        number = len(list(self.directory.iterdir()))
        root = self.directory / f"{number}-{re.sub('[^a-z0-9]+', '-', session.name)}"
        root.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            stage = self._set(session, root, stack)
            follower = stage.follower
            stack.callback(lambda: (root / "output.txt").write_text(follower.output))
            if session.code:
                rows = [self._end(stage, session)]
            else:
                rows = [self._strike(stage, fault) for fault in session.faults]
            code = follower.wait(_RUN_SECONDS)
            assert session.code or code == 0, f"ended with {code}:\n{follower.output[-6000:]}"
            evidence = read_evidence(follower.run)
            return Outcome(rows, evidence, reference, follower.output, code)

    def _set(self, session: Session, root: Path, stack: contextlib.ExitStack) -> Stage:
        """Start the servers of a session, and its run."""
        for kind in session.other_servers:
            self.park.server(kind)
            stack.callback(self.park.drop, kind)
        proxies = [
            stack.enter_context(open_proxy(self.park.server(_kind(session, number)).url))
            for number in range(session.num_servers)
        ]
        settings = [*_settings(session), *session.own_settings]
        if proxies:
            settings += self._list_settings(root, [proxy.url for proxy in proxies])
        follower = RunFollower(root, settings, ranks=session.ranks, script=_SCRIPT)
        stack.callback(_kill_if_running, follower)
        return Stage(follower, self.park, root / "urls.txt", proxies, stack)

    def _strike(self, stage: Stage, fault: RecoverableFault) -> Row:
        """Inject a fault after the next step, and wait for the recovery."""
        follower = stage.follower
        follower.wait_for_step(max(1, follower.step + 1), _STEP_SECONDS)
        moment = time.monotonic()
        moment = fault.strike(stage) or moment
        recovery_time = moment
        if fault.recovery:
            recovery_time = follower.wait_for_line(fault.recovery, moment, _STEP_SECONDS)
        while follower.step_begun_since(moment) is None and follower.watch():
            assert time.monotonic() - moment < _STEP_SECONDS, follower.output[-6000:]
        going_on = follower.step_begun_since(moment)
        assert going_on is not None, f"no step followed {fault.name}:\n{follower.output[-6000:]}"
        engine_seconds = 0.0
        births = [birth for birth in follower.server_births.values() if moment < birth < going_on]
        if births and recovery_time <= going_on:
            engine_seconds = max(0.0, recovery_time - min(births))
        ending_line = follower.find(fault.recovery, moment) if fault.recovery else None
        return Row(
            fault.name, going_on - moment, engine_seconds, ending_line[1] if ending_line else ""
        )

    def _end(self, stage: Stage, session: Session) -> Row:
        """Inject a fault that ends the run, and resume the run with the default recovery."""
        follower = stage.follower
        fault = session.faults[0]
        follower.wait_for_step(2, _STEP_SECONDS)
        moment = time.monotonic()
        fault.strike(stage)
        code = follower.wait(_RUN_SECONDS)
        seconds = time.monotonic() - moment
        ending = json.loads((follower.run / "exit.json").read_text())
        assert ending["code"] == session.code, follower.output[-6000:]
        checkpoints = sorted(path.name for path in (follower.run / "checkpoints").glob("iter_*"))
        assert checkpoints, f"ended with {code} and saved nothing:\n{follower.output[-6000:]}"
        (stage.urls_file.parent / "first-output.txt").write_text(follower.output)
        self._resume(stage, session)
        line = f"code {ending['code']}, saved {checkpoints[-1]}, resumed"
        return Row(fault.name, seconds, 0.0, line)

    def _resume(self, stage: Stage, session: Session) -> None:
        """Run the rest of a run that has ended."""
        next_settings = [*_settings(session), *session.own_settings, "run.resume=auto"]
        if session.num_servers:
            next_settings += self._list_settings(stage.urls_file.parent, stage.urls)
        next_follower = RunFollower(
            stage.urls_file.parent,
            [s for s in next_settings if not s.startswith("recovery.")],
            ranks=session.ranks,
        )
        stage.stack.callback(_kill_if_running, next_follower)
        assert next_follower.wait(_RUN_SECONDS) == 0, next_follower.output[-6000:]

    def _external_settings(self, session: Session, root: Path, count: int) -> list[str]:
        kinds = [_kind(session, number) for number in range(count)]
        return self._list_settings(root, [self.park.server(kind).url for kind in kinds])

    def _list_settings(self, root: Path, urls: Sequence[str]) -> list[str]:
        (root / "urls.txt").write_text("\n".join(urls) + "\n")
        return [
            "engine=external",
            f"engine.urls={root / 'urls.txt'}",
            f"engine.key_file={self.park.key_file}",
        ]


def _kind(session: Session, number: int) -> ServerKind:
    is_bfloat16 = "model.dtype=bfloat16" in session.settings
    return ServerKind(number, dtype="bfloat16" if is_bfloat16 else "float32")


def _settings(session: Session) -> list[str]:
    return [
        *EVIDENCE_SETTINGS,
        "logger.progress=true",
        f"train.total_steps={session.steps}",
        *session.settings,
    ]


def _kill_if_running(follower: RunFollower) -> None:
    if follower.job.poll() is None:
        follower.kill()
