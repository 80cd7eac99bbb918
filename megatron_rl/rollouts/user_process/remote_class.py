"""A user-defined class in processes of its own: its calls, and what follows a loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.user_process.attempts import Attempt, Cause, Loss
from megatron_rl.rollouts.user_process.messages import OpenClass
from megatron_rl.rollouts.user_process.serving_process import ServingProcess
from sglang_bridge.server.lifeline import Lifeline

_MAX_LOSSES = 2

_log = logging.getLogger(__name__)


class RemoteClass:
    """One user-defined class, which a process holds that can be killed.

    All calls share one process. If it is lost, another one takes its place. Then, for each call:

    its own code ran     -> It is made again, alone in a process of its own, where it delays nobody
                            and nobody else can be the reason. If that is lost too, it has failed.
    another call's ran   -> It is made again. This loss does not count for it: the other call
                            leaves the shared process.
    nobody's code ran    -> It is made again once, because a stall or a lack of memory passes.
                            After a second loss it has no result, and counts as lost.

    No call is blamed for what may be another's fault, and no number of losses ends the run.

    name: key and name of the class, such as `reward.name=my_reward:Judge`. open_timeout_s: seconds
    for the constructor. report: sends a warning to rank 0.

    num_calls: the calls that have begun and not ended.
    """

    def __init__(
        self,
        name: str,
        settings: OpenClass,
        *,
        open_timeout_s: float,
        report: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._open_timeout_s = open_timeout_s
        self._report = report
        self._lifeline = Lifeline()
        self.num_calls = 0
        self._num_warnings = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._processes: set[ServingProcess] = set()
        self._is_closed = False
        self._opening: asyncio.Task[ServingProcess] | None = None
        self._turn = asyncio.Lock()  # of a call that is made alone
        self._first_process: ServingProcess | None = self._start()

    def wait_until_open(self) -> tuple[str, ...]:
        """Wait until the class is constructed, and return the `chat_roles` of an environment.

        Blocks. Raises `PluginError`.
        """
        assert self._first_process is not None
        return self._first_process.wait_until_open(self._open_timeout_s).chat_roles

    async def run(self, open_attempt: Callable[[], Attempt], *, subject: str = "") -> Outcome[Any]:
        """Make a call and return how it ended.

        open_attempt: prepares the call, and again each time that it has to be made again.
        subject: what the call works on, for warnings.
        Raises `Failure`. Cancelling this cancels the call.
        """
        self.num_calls += 1
        try:
            return await self._run(open_attempt, subject)
        finally:
            self.num_calls -= 1

    async def _run(self, open_attempt: Callable[[], Attempt], subject: str) -> Outcome[Any]:
        num_losses = 0
        is_alone = False
        while True:
            make = self._make_alone if is_alone else self._make
            result = await make(open_attempt, subject)
            if isinstance(result, Outcome):
                return result
            if result.cause is Cause.OTHER and not is_alone:
                continue
            num_losses += 1
            if num_losses == _MAX_LOSSES:
                is_own = is_alone and result.cause is Cause.OWN
                error = ChildProcessError(f"{self._name}: its process was ended: {result.reason}")
                return Outcome(Ending.RAISED if is_own else Ending.LOST, error=error)
            is_alone = result.cause is Cause.OWN

    async def close(self) -> None:
        """End the processes and everything that they have started."""
        self._is_closed = True
        await asyncio.gather(*(process.close() for process in self._processes))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lifeline.close()

    def end_now(self) -> None:
        """End the first process, outside of an event loop."""
        assert self._first_process is not None
        self._first_process.end_now()
        self._lifeline.close()

    def _start(self) -> ServingProcess:
        process = ServingProcess(
            self._name, self._settings, lifeline=self._lifeline, tell=self._tell, warn=self._warn
        )
        self._processes.add(process)
        return process

    async def _make(self, open_attempt: Callable[[], Attempt], subject: str) -> Outcome[Any] | Loss:
        """Make a call in the process that all calls share, which opens if there is none."""
        if self._is_closed:
            raise PluginError(f"{self._name}: the collector ends")
        self._forget_lost_process()
        if self._opening is None:
            self._opening = self._keep(self._open())
        process = await asyncio.shield(self._opening)
        # A process that is lost by now counts: a class whose process never stays would open it for
        # ever.
        return await process.make(open_attempt(), subject)

    def _forget_lost_process(self) -> None:
        opening = self._opening
        if opening is None or not opening.done() or opening.exception() is not None:
            return
        if not opening.result().is_serving:
            self._opening = None
            self._discard(opening.result())

    async def _open(self) -> ServingProcess:
        """Return the next process. The first one is open."""
        first = self._first_process
        self._first_process = None
        if first is not None:
            await first.serve()
            return first
        process = self._start()
        try:
            await process.open(self._open_timeout_s)
        except PluginError as error:
            self._discard(process)
            raise Failure(str(error), ExitCode.ENGINE_FAILED) from error
        return process

    async def _make_alone(
        self, open_attempt: Callable[[], Attempt], subject: str
    ) -> Outcome[Any] | Loss:
        """Make a call in a process of its own. One at a time: each may need much memory."""
        async with self._turn:
            if self._is_closed:
                raise PluginError(f"{self._name}: the collector ends")
            process = self._start()
            try:
                await process.open(self._open_timeout_s)
                return await process.make(open_attempt(), subject)
            except PluginError as error:
                # Perhaps it cannot be open twice. That must not end the run.
                return Loss(Cause.UNKNOWN, str(error))
            finally:
                self._discard(process)

    def _discard(self, process: ServingProcess) -> None:
        """End a process in the background."""

        async def close() -> None:
            await process.close()
            self._processes.discard(process)

        self._keep(close())

    def _tell(self, text: str, subject: str) -> None:
        """Warn about a call or a process that did not end as it should."""
        self._num_warnings += 1
        # The 1st, 2nd, 4th, 8th, ... The log of the collector has them all.
        self._warn(
            f"{self._name}: {text} ({subject}; number {self._num_warnings})",
            to_rank_0=self._num_warnings.bit_count() == 1,
        )

    def _warn(self, text: str, *, to_rank_0: bool = True) -> None:
        _log.warning("%s", text)
        if self._report is not None and to_rank_0:
            self._keep(self._report(text))

    def _keep(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Do something in the background, and hold it until it has ended."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                _log.warning("%s: %s: %s", self._name, type(error).__name__, error)
