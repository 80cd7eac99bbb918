"""Starts a process of a node again when it has ended, hangs or has to end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.engines.node.frozen_processes import FrozenProcesses
from megatron_rl.engines.node.node_reports import ProcessState
from megatron_rl.engines.node.restarts import RestartBudget
from sglang_bridge.errors import EngineError

_END_SECONDS = 8.0


class Helper(Protocol):
    """A process that can be started again. epoch counts its restarts.

    It describes its end with a `Failure` or an `EngineError`.
    """

    @property
    def epoch(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def poll_healthy(self) -> bool: ...

    def check_alive(self) -> None: ...

    def check_age(self, deadline_seconds: float) -> None: ...

    def request_end(self) -> None: ...

    def restart(self, *, timeout: float) -> bool: ...


class Upkeep:
    """Looks after one process that was healthy at least once.

    name: for people. word: what it does again after a restart ("answers"). start_timeout_s: the
    time after which a start counts as an end. log: writes a line for people. generations: of its
    descendants that must not be stopped (SIGSTOP). None: all.
    """

    def __init__(
        self,
        name: str,
        helper: Helper,
        budget: RestartBudget,
        *,
        word: str,
        start_timeout_s: float,
        log: Callable[[str], None],
        generations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._helper = helper
        self._budget = budget
        self._word = word
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._clock = clock
        self._state = ProcessState.RUNNING
        self._reason = ""
        self._end_time = 0.0
        self._next_start: float | None = None
        self._generations = generations
        self._frozen_processes = FrozenProcesses(generations=generations, clock=clock)

    @property
    def state(self) -> ProcessState:
        """The state of the process."""
        return self._state

    @property
    def reason(self) -> str:
        """The reason of its last end, empty if there was none."""
        return self._reason

    def maintain(self, *, ordered_epoch: int | None, order_reason: str) -> None:
        """Look at the process, and do what is due. An end of the process raises nothing.

        ordered_epoch: if the process is still in this epoch, it is ended.
        """
        if self._state is ProcessState.GIVEN_UP:
            return
        try:
            if self._next_start is not None:
                self._start_when_due(self._next_start)
            elif ordered_epoch == self._helper.epoch:
                self._handle_end(f"{self._name} was ended: {order_reason}")
            else:
                self._observe()
        except (Failure, EngineError, OSError) as error:
            self._handle_end(str(error))

    def _start_when_due(self, next_start: float) -> None:
        if self._clock() < next_start:
            return
        self._next_start = None
        self._frozen_processes = FrozenProcesses(generations=self._generations, clock=self._clock)
        self._helper.restart(timeout=_END_SECONDS)

    def _observe(self) -> None:
        self._frozen_processes.check({self._name: self._helper.pid})
        if self._state is ProcessState.RUNNING:
            self._helper.check_alive()
        elif self._helper.poll_healthy():
            self._state = ProcessState.RUNNING
            self._budget.note_healthy()
            seconds = self._clock() - self._end_time
            self._log(f"{self._name} {self._word} again after {seconds:.0f} s")
        else:
            self._helper.check_age(self._start_timeout_s)

    def _handle_end(self, reason: str) -> None:
        if self._state is ProcessState.RUNNING:
            self._end_time = self._clock()
        self._helper.request_end()
        text = reason if reason.startswith(self._name) else f"{self._name}: {reason}"
        restart = self._budget.request(reason)
        if restart is None:
            self._state = ProcessState.GIVEN_UP
            limit = f"{self._budget.rule} allows no further start"
            self._reason = f"{reason}; {limit}"
            self._log(f"{text}; it is given up: {limit}")
            return
        self._state = ProcessState.STARTING
        self._reason = reason
        self._next_start = self._clock() + restart.delay_seconds
        self._log(
            f"{text}; starting it again in {restart.delay_seconds:.0f} s, "
            f"restart {restart.number} of {self._budget.limit} this hour"
        )
