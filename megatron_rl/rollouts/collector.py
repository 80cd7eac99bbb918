"""Collector process: runs groups of episodes on its node's engines and keeps the rollouts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rollouts.episode_runner import EpisodeRunner, RejectedRollout, ScoredRollout
from megatron_rl.rollouts.link import CollectorLink
from megatron_rl.rollouts.messages import (
    AbortGroups,
    AddEngine,
    Alive,
    Configure,
    Failed,
    FromCollector,
    GroupAborted,
    GroupDone,
    GroupRequest,
    Held,
    Hold,
    LiftBudgets,
    Proceed,
    Release,
    RemoveEngine,
    Settle,
    SetVersion,
    Stop,
    ToCollector,
    Withdraw,
)
from megatron_rl.rollouts.repetition import repetition, sampled_token_ids
from megatron_rl.rollouts.store import RolloutStore, make_rollout_ref

_ALIVE_INTERVAL_SECONDS = 1.0
# The event loop's own pool may be full of a scorer's blocking calls, so this process has another.
_THREADS = 4


@dataclass(eq=False)
class _RunningGroup:
    """A request that is not answered. is_complete: all of its episodes have ended."""

    request: GroupRequest
    task: asyncio.Task[None]
    is_complete: bool = False


class Collector:
    """Answers the requests of rank 0.

    send: delivers a message to rank 0.
    """

    def __init__(
        self, node: int, configuration: Configure, send: Callable[[FromCollector], Awaitable[None]]
    ) -> None:
        self._send = send
        self._store = RolloutStore(node)
        self._credit = configuration.credit
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="replies")
        self._runner = EpisodeRunner(configuration, send, self._threads)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, _RunningGroup] = {}  # by group id

    async def handle(self, message: ToCollector) -> bool:
        """Process one message and return False if the collector has to end."""
        match message:
            case GroupRequest():
                self._begin(message)
            case Withdraw():
                self._withdraw(message.group_ids)
            case AbortGroups(group_ids):
                self._abort_groups(group_ids)
            case Release():
                self._store.release(message.group_ids)
            case AddEngine() | RemoveEngine() | SetVersion():
                await self._change_engines(message)
            case Hold(keep_partials):
                self._start(self._hold(keep_partials))
            case Settle(number):
                self._start(self._settle(number))
            case LiftBudgets():
                self._runner.lift_budgets()
            case Proceed():
                self._runner.engines.proceed()
            case Stop():
                return False
            case Configure():
                raise ValueError("a collector is configured once")
        return True

    async def close(self) -> None:
        """Cancel all requests and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, request: GroupRequest) -> None:
        self._runner.announce(request)
        task = self._start(self._answer(request))
        self._running[request.group_id] = _RunningGroup(request, task)

    def _withdraw(self, group_ids: Sequence[str]) -> None:
        for group_id in group_ids:
            if group_id in self._running:
                self._drop(self._running[group_id])
        self._store.release(group_ids)

    def _drop(self, group: _RunningGroup) -> None:
        """End a group without an answer."""
        del self._running[group.request.group_id]
        group.task.cancel()
        self._runner.forget(group.request)

    def _abort_groups(self, group_ids: Sequence[str]) -> None:
        for group_id in group_ids:
            group = self._running.get(group_id)
            if group is not None and not group.is_complete:
                self._start(self._abort(group))

    async def _abort(self, group: _RunningGroup) -> None:
        """Sample nothing more for a group, and report its tokens, unless it completes meanwhile."""
        request = group.request
        num_tokens = await self._runner.stop(request)
        if self._running.get(request.group_id) is not group or group.is_complete:
            return
        self._drop(group)
        await self._send(
            GroupAborted(
                group_id=request.group_id, generated_tokens=num_tokens, attempt=request.attempt
            )
        )

    def _start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine until it ends or the collector closes."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _hold(self, keep_partials: bool) -> None:
        await self._runner.engines.hold(keep_partials=keep_partials)
        await self._report_held(0)

    async def _settle(self, number: int) -> None:
        await self._runner.settle()
        await self._report_held(number)

    async def _report_held(self, number: int) -> None:
        engines = self._runner.engines
        num_partials, num_tokens = engines.partials
        await self._send(Held(num_partials, num_tokens, engines.num_sampled, number))

    async def _change_engines(self, message: AddEngine | RemoveEngine | SetVersion) -> None:
        engines = self._runner.engines
        match message:
            case AddEngine(engine):
                await engines.remove(engine.url)
                engines.add(engine)
            case RemoveEngine(url):
                await engines.remove(url)
            case SetVersion(version):
                engines.set_version(version)

    async def _answer(self, request: GroupRequest) -> None:
        """Run a group and send the result. Begin with the rest of the group if its rule says so.

        An error ends the run: without a report rank 0 would wait for the group forever.
        """
        try:
            answer = await self._run(request)
            if request.extension is not None and request.extension.applies_to(answer.group):
                self._begin(request.rest())
                answer = msgspec.structs.replace(answer, is_extended=True)
            await self._send(answer)
        except Exception as error:
            await self._send(_failure_report(error))
        finally:
            self._runner.forget(request)
            if self._is_running(request):
                del self._running[request.group_id]

    def _is_running(self, request: GroupRequest) -> bool:
        group = self._running.get(request.group_id)
        return group is not None and group.request is request

    async def _run(self, request: GroupRequest) -> GroupDone:
        start = time.monotonic()
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        outcomes = await asyncio.gather(*(self._runner.run(request, index) for index in indices))
        if self._is_running(request):
            self._running[request.group_id].is_complete = True
        results = [outcome for outcome in outcomes if isinstance(outcome, ScoredRollout)]
        rejections = [outcome for outcome in outcomes if isinstance(outcome, RejectedRollout)]
        scored_at = time.monotonic()
        group = Group(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(await self._refs(request, results)),
            rejections=dict(Counter(rejection.reason for rejection in rejections)),
            rejected_tokens=_rejected_tokens(outcomes),
            environment_error=_first_environment_error(rejections),
            generated_at=max((result.generated_at for result in results), default=0.0),
            scored_at=scored_at if results else 0.0,
        )
        num_rejected = sum(sum(outcome.rejected_tokens.values()) for outcome in outcomes)
        num_used = sum(result.num_generated for result in results)
        return GroupDone(
            group=group,
            generated_tokens=num_used + num_rejected,
            attempt=request.attempt,
            seconds=time.monotonic() - start,
        )

    async def _refs(
        self, request: GroupRequest, results: Sequence[ScoredRollout]
    ) -> list[RolloutRef]:
        """Store the rollouts, unless they are for an evaluation, and return their references."""
        if request.evaluation:
            return [
                make_rollout_ref(
                    result.rollout,
                    verdict=result.verdict,
                    num_generated=result.num_generated,
                    repetition=0.0,
                )
                for result in results
            ]
        # In a thread, because it may copy hundreds of megabytes.
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._store_group, request, results)

    def _store_group(
        self, request: GroupRequest, results: Sequence[ScoredRollout]
    ) -> list[RolloutRef]:
        locations = self._store.put(request.group_id, [result.rollout for result in results])
        ngram = self._credit.repetition_ngram
        refs = []
        for result, location in zip(results, locations, strict=True):
            share = 0.0
            if ngram is not None:
                share = repetition(sampled_token_ids(result.rollout), ngram)
            refs.append(
                make_rollout_ref(
                    result.rollout,
                    verdict=result.verdict,
                    num_generated=result.num_generated,
                    repetition=share,
                    is_repetitive=result.is_repetitive,
                    location=location,
                )
            )
        return refs


def _first_environment_error(rejections: Sequence[RejectedRollout]) -> str:
    errors = (rejection.environment_error for rejection in rejections)
    return next((error for error in errors if error), "")


def _rejected_tokens(outcomes: Sequence[ScoredRollout | RejectedRollout]) -> dict[str, int]:
    tokens = Counter[str]()
    for outcome in outcomes:
        tokens.update(outcome.rejected_tokens)
    return dict(tokens)


async def serve(link: CollectorLink, node: int) -> None:
    """Run a collector until it is stopped. Raises `LinkLost` when the link to rank 0 ends.

    Errors before the first request are reported to rank 0 as `Failed`.
    """
    coroutines = (_work(link, node), _stay_alive(link), link.wait_until_lost())
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        finished_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished_tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _work(link: CollectorLink, node: int) -> None:
    configuration = await link.receive()
    if not isinstance(configuration, Configure):
        raise ValueError(f"expected the configuration first, got {type(configuration).__name__}")
    try:
        collector = await _open(configuration, node, link)
    except Exception as error:
        await link.send(_failure_report(error))
        raise
    try:
        while await collector.handle(await link.receive()):
            pass
    finally:
        await collector.close()


async def _open(configuration: Configure, node: int, link: CollectorLink) -> Collector:
    """Open the collector. Raises `PluginError` after `configuration.open_timeout_s`.

    In a thread: a user-defined class may load for minutes, and this process has to report to rank 0
    that it is alive.
    """
    opening = asyncio.to_thread(Collector, node, configuration, link.send)
    try:
        return await asyncio.wait_for(opening, configuration.open_timeout_s)
    except TimeoutError as error:
        raise PluginError(
            f"reward.name={configuration.reward.name}, environment.name="
            f"{configuration.environment.name}: their constructors did not return within "
            f"parallel.timeout_s={configuration.open_timeout_s:g}. Make them faster, or raise it"
        ) from error


async def _stay_alive(link: CollectorLink) -> None:
    while True:
        await link.send(Alive())
        await asyncio.sleep(_ALIVE_INTERVAL_SECONDS)


def _failure_report(error: Exception) -> Failed:
    if isinstance(error, PluginError):
        return Failed(str(error), is_refusal=True)
    return Failed(f"{type(error).__name__}: {error}")
