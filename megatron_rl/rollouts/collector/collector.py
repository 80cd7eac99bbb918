"""Collector process: runs groups of episodes on its node's engines and keeps the rollouts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.collector.episode_runner import EpisodeRunner
from megatron_rl.rollouts.collector.link import CollectorLink
from megatron_rl.rollouts.collector.progress import GroupProgress, ScoredRollout
from megatron_rl.rollouts.recording.reader import RecordingUnreadable
from megatron_rl.rollouts.recording.recorded_rollouts import UnfitRollout, load_rollout
from megatron_rl.rollouts.wire.messages import (
    Alive,
    Configure,
    Drop,
    Dropped,
    FromCollector,
    GroupDone,
    GroupRequest,
    Partial,
    Problem,
    Serve,
    Served,
    Stop,
    Store,
    ToCollector,
    partial_name,
)
from megatron_rl.rollouts.wire.repetition import repetition_of
from megatron_rl.rollouts.wire.store import GroupWriter, RolloutStore, make_rollout_ref

_ALIVE_INTERVAL_SECONDS = 1.0
# The event loop's own pool may be full of a scorer's blocking calls, so this process has another.
_THREADS = 4
# Rank 0 learns of changes of the demand once there are so many for each slot. The wait lets it
# learn of many at once.
_CHANGES_PER_SLOT = 1 / 16
_DEMAND_SECONDS = 0.01
_CHANGE_SECONDS = 0.01  # about the time in which a thread adds a response

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _RunningGroup:
    """A request that is not answered. is_complete: all of its episodes have ended."""

    request: GroupRequest
    task: asyncio.Task[None]
    progress: GroupProgress
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
        self._runner = EpisodeRunner(configuration, send, self._threads, node)
        self._tasks: set[asyncio.Task[None]] = set()
        self._shape = configuration.routes
        self._vocab_size = configuration.vocab_size
        self._running: dict[str, _RunningGroup] = {}  # by group id
        # Since the last report: how often the demand has changed, and of which groups
        self._num_changes = 0
        self._changed_ids: set[str] = set()
        self._is_reporting = False

    async def handle(self, message: ToCollector) -> bool:
        """Process one message and return False if the collector has to end."""
        match message:
            case GroupRequest():
                self._begin(message)
            case Drop(group_ids, is_reported):
                self._drop_groups(group_ids, is_reported=is_reported)
            case Serve():
                await self._serve(message)
            case Store(number):
                self._start(self._or_report(self._store_partials(number)))
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
        group_id = request.group_id
        progress = GroupProgress(
            request.prompt,
            request.sampling,
            range(request.first_sample, request.first_sample + request.num_samples),
            start=request.start,
            on_demand=partial(self._note_demand, group_id),
        )
        self._runner.announce(request)
        task = self._start(self._answer(request, progress))
        self._running[group_id] = _RunningGroup(request, task, progress)

    def _drop_groups(self, group_ids: Sequence[str], *, is_reported: bool) -> None:
        for group_id in group_ids:
            group = self._running.get(group_id)
            if group is None:
                continue
            if not is_reported:
                self._drop(group)
            elif not group.is_complete:
                self._start(self._abort(group))
        if not is_reported:
            self._store.release(group_ids)

    def _drop(self, group: _RunningGroup) -> None:
        """End a group without an answer."""
        del self._running[group.request.group_id]
        group.task.cancel()
        self._runner.forget(group.request)

    async def _abort(self, group: _RunningGroup) -> None:
        """Sample nothing more for a group, and report its tokens, unless it completes meanwhile."""
        request = group.request
        num_tokens = await self._runner.stop(request)
        if self._running.get(request.group_id) is not group or group.is_complete:
            return
        self._drop(group)
        await self._send(
            Dropped(group_id=request.group_id, generated_tokens=num_tokens, attempt=request.attempt)
        )

    def _note_demand(self, group_id: str) -> None:
        """Note that a group needs engines for more or fewer rollouts, and report it in time."""
        self._changed_ids.add(group_id)
        self._num_changes += 1
        is_due = self._num_changes >= _CHANGES_PER_SLOT * self._runner.engines.num_slots
        if is_due and not self._is_reporting:
            self._is_reporting = True
            self._start(self._report_demand())

    async def _report_demand(self) -> None:
        """Report how many rollouts need engines, of the groups where that has changed."""
        await asyncio.sleep(_DEMAND_SECONDS)
        groups = [self._running[id_] for id_ in self._changed_ids if id_ in self._running]
        self._changed_ids.clear()
        self._num_changes = 0
        self._is_reporting = False
        demand = {
            group.request.group_id: (group.request.attempt, group.progress.demand)
            for group in groups
        }
        if demand:
            await self._send(Alive(demand))

    def _start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine until it ends or the collector closes."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, state: Serve) -> None:
        """Take over the state that rank 0 wants."""
        engines = self._runner.engines
        if state.is_paused:
            # At once: what follows may wait, and an engine may be free meanwhile
            engines.pause()
        await engines.set_engines(state.engines)
        engines.set_version(state.version)
        if state.is_paused:
            self._start(self._or_report(self._report_rest(state.number)))
        else:
            engines.proceed()

    async def _report_rest(self, number: int) -> None:
        """Answer a pause once no engine works on a request."""
        engines = self._runner.engines
        await engines.rest()
        await self._send(Served(engines.num_sampled, number, engines.idle_seconds))

    async def _or_report(self, answer: Coroutine[None, None, None]) -> None:
        """Answer rank 0. An error ends the run: without a report rank 0 would wait in vain."""
        try:
            await answer
        except Exception as error:
            await self._send(_problem(error))

    async def _store_partials(self, number: int) -> None:
        """Store the sampled parts of all groups, and report each of them.

        It stores as many at a time as there are threads, because replies of engines need these too.
        """
        threads = asyncio.Semaphore(_THREADS)

        async def store(group_id: str) -> None:
            async with threads:
                group = await self._store_partial(number, group_id)
            if group is not None:
                await self._send(Partial(number, group))

        await asyncio.gather(*map(store, list(self._running)))
        await self._send(Partial(number, None))

    async def _store_partial(self, number: int, group_id: str) -> Group | None:
        """Store the sampled part of a group. Returns None if it has ended or is evaluated."""
        while group_id in self._running:
            request = self._running[group_id].request
            progress = self._running[group_id].progress
            if request.evaluation:
                return None
            if progress.is_changing:
                await asyncio.sleep(_CHANGE_SECONDS)
                continue
            # At once: everything may change while a thread stores the rollouts
            results = itertools.chain(progress.results(), progress.open_results())
            rejected_tokens = progress.count_rejected_tokens()
            rejected_tokens.update(progress.tokens_rejected_in_open_episodes())
            group = Group(
                group_id=group_id,
                prompt=request.prompt,
                rollouts=(),
                rejections=progress.count_rejections(),
                rejected_tokens=dict(rejected_tokens),
                environment_error=progress.first_environment_error(),
                open_samples=progress.open_samples(),
            )
            refs = await self._store_in_thread(partial_name(number, group_id), results)
            return msgspec.structs.replace(group, rollouts=tuple(refs))
        return None

    async def _answer(self, request: GroupRequest, progress: GroupProgress) -> None:
        """Run a group and send the result. Begin with the rest of the group if its rule says so.

        An error ends the run: without a report rank 0 would wait for the group forever.
        """
        try:
            if request.start is not None:
                await self._restore(request, progress)
            start = time.monotonic()
            runs = (
                self._runner.run(request, index, episode)
                for index, episode in progress.episodes.items()
            )
            await asyncio.gather(*runs)
            if self._is_running(request):
                self._running[request.group_id].is_complete = True
            answer = await self._store_group(request, progress, start)
            if request.extension is not None and request.extension.applies_to(answer.group):
                self._begin(request.rest())
                answer = msgspec.structs.replace(answer, is_extended=True)
            await self._send(answer)
        except Exception as error:
            await self._send(_problem(error))
        finally:
            self._runner.forget(request)
            if self._is_running(request):
                del self._running[request.group_id]

    async def _restore(self, request: GroupRequest, progress: GroupProgress) -> None:
        """Take over what a checkpoint has of a group. In a thread: it may be gigabytes."""

        def restore() -> None:
            progress.restore(self._load(request), self._shape)

        await asyncio.get_running_loop().run_in_executor(self._threads, restore)

    def _load(self, request: GroupRequest) -> dict[int, Rollout]:
        """Load the rollouts that a checkpoint has of a group, by sample index.

        It omits rollouts that cannot be read, because the checkpoint may have been removed since.
        """
        rollouts: dict[int, Rollout] = {}
        for saved in request.saved:
            try:
                rollout = load_rollout(saved, request.prompt.id, self._shape, self._vocab_size)
            except (RecordingUnreadable, UnfitRollout) as error:
                _log.warning("a rollout is sampled anew: %s", error)
                continue
            rollouts[rollout.sample_index] = rollout
        return rollouts

    def _is_running(self, request: GroupRequest) -> bool:
        group = self._running.get(request.group_id)
        return group is not None and group.request is request

    async def _store_group(
        self, request: GroupRequest, progress: GroupProgress, start: float
    ) -> GroupDone:
        """Store what the episodes of a group have sampled, and return the answer to its request.

        start: of the episodes, on the monotonic clock.
        """
        results = progress.results()
        rejected_tokens = progress.count_rejected_tokens()
        scored_at = time.monotonic()
        generated_at = max((result.generated_at for result in results), default=0.0)
        group = Group(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(await self._refs(request, results)),
            rejections=progress.count_rejections(),
            rejected_tokens=dict(rejected_tokens),
            environment_error=progress.first_environment_error(),
            generated_at=generated_at,
            scored_at=scored_at if generated_at else 0.0,
        )
        num_used = sum(result.num_generated for result in results)
        return GroupDone(
            group=group,
            generated_tokens=num_used + rejected_tokens.total(),
            attempt=request.attempt,
            seconds=time.monotonic() - start,
            engines_idle=self._runner.engines.idle_seconds,
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
        return await self._store_in_thread(request.group_id, results)

    async def _store_in_thread(
        self, name: str, results: Iterable[ScoredRollout]
    ) -> list[RolloutRef]:
        """Store rollouts under a name, and return their references.

        In a thread, because it may copy hundreds of megabytes. `results` are made there, one after
        the other. The memory is opened here, so that a release that comes meanwhile finds it.
        """
        writer = self._store.begin(name)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._store_results, writer, results)

    def _store_results(
        self, writer: GroupWriter, results: Iterable[ScoredRollout]
    ) -> list[RolloutRef]:
        with writer:
            return [self._store_result(writer, result) for result in results]

    def _store_result(self, writer: GroupWriter, result: ScoredRollout) -> RolloutRef:
        return make_rollout_ref(
            result.rollout,
            verdict=result.verdict,
            num_generated=result.num_generated,
            repetition=repetition_of(result.rollout, self._credit.repetition_ngram),
            is_repetitive=result.is_repetitive,
            location=writer.add(result.rollout),
        )


async def serve(link: CollectorLink, node: int) -> None:
    """Run a collector until it is stopped. Raises `LinkLost` when the link to rank 0 ends.

    Errors before the first request are reported to rank 0 as a `Problem`.
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
        await link.send(_problem(error))
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


def _problem(error: Exception) -> Problem:
    """Return the report of an error that ends the run."""
    if isinstance(error, PluginError):
        return Problem(str(error), ExitCode.REFUSED)
    return Problem(f"{type(error).__name__}: {error}", ExitCode.ENGINE_FAILED)
