"""The collector process: plays groups of episodes on its node's engines and keeps the rollouts
until released.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rollouts.episode_runner import EpisodeRunner, Judged, Rejected
from megatron_rl.rollouts.link import Link
from megatron_rl.rollouts.messages import (
    Alive,
    Configure,
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Release,
    Stop,
    ToCollector,
)
from megatron_rl.rollouts.repetition import repetition, sampled_tokens
from megatron_rl.rollouts.store import RolloutStore

_ALIVE_EVERY_SECONDS = 1.0
_THREADS = 4  # a pool of our own: that of the event loop may be full of a scorer's blocked calls
_NOT_KEPT = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


class Collector:
    """Answers rank 0's requests; `send` delivers a message to it."""

    def __init__(
        self, node: int, configuration: Configure, send: Callable[[FromCollector], Awaitable[None]]
    ) -> None:
        self._send = send
        self._store = RolloutStore(node)
        self._credit = configuration.credit
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="replies")
        self._player = EpisodeRunner(configuration, send, self._threads)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, message: ToCollector) -> bool:
        """Act on one message; False once the collector shall end."""
        match message:
            case GroupRequest():
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Release():
                self._store.release(message.group_ids)
            case Stop():
                return False
            case Configure():
                raise ValueError("a collector is configured once")
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._player.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: GroupRequest) -> None:
        """A group that cannot be answered ends the run; left alone, rank 0 would wait for it for
        ever.
        """
        try:
            await self._send(await self._play(request))
        except Exception as error:
            await self._send(_failure(error))

    async def _play(self, request: GroupRequest) -> GroupDone:
        indices = range(request.first_sample, request.first_sample + request.num_samples)
        results = await asyncio.gather(*(self._player.play(request, index) for index in indices))
        judged = [result for result in results if isinstance(result, Judged)]
        rejected = [result for result in results if isinstance(result, Rejected)]
        scored_at = time.monotonic()
        refs = [_ref(j, _NOT_KEPT, 0.0) for j in judged]
        if not request.evaluation:
            run = (
                asyncio.get_running_loop().run_in_executor
            )  # copies what may be hundreds of megabytes
            refs = await run(self._threads, self._keep, request.group_id, judged)
        group = Group(
            group_id=request.group_id,
            prompt=request.prompt,
            rollouts=tuple(refs),
            rejections=dict(Counter(r.reason for r in rejected)),
            rejected_tokens={
                reason: sum(r.sampled_tokens for r in rejected if r.reason == reason)
                for reason in {r.reason for r in rejected}
            },
            generated_at=max((j.generated_at for j in judged), default=0.0),
            scored_at=scored_at if judged else 0.0,
        )
        return GroupDone(
            group=group, generated_tokens=sum(result.sampled_tokens for result in results)
        )

    def _keep(self, group_id: str, judged: Sequence[Judged]) -> list[RolloutRef]:
        locations, ngram = (
            self._store.put(group_id, [j.rollout for j in judged]),
            self._credit.repetition_ngram,
        )
        repeated = [
            0.0 if ngram is None else repetition(sampled_tokens(j.rollout), ngram) for j in judged
        ]
        return [_ref(*found) for found in zip(judged, locations, repeated, strict=True)]


def _ref(judged: Judged, location: RolloutLocation, repeated: float) -> RolloutRef:
    rollout = judged.rollout
    return RolloutRef(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        num_inputs=rollout.num_tokens - 1,
        num_trainable=sum(len(segment.tokens) for segment in rollout.segments if segment.trainable),
        num_generated=judged.sampled_tokens,
        repetition=repeated,
        finish_reason=rollout.finish_reason,
        versions=tuple(sorted({s.version for s in rollout.segments if s.logprobs is not None})),
        verdict=judged.verdict,
        location=location,
    )


async def serve(link: Link, node: int) -> None:
    """Run a collector until it is stopped. Raises `LinkLost` when rank 0 is gone.

    What goes wrong before a group can be asked for is reported to rank 0 as `Failed`.
    """
    duties = [
        asyncio.create_task(duty) for duty in (_work(link, node), _stay_alive(link), link.lost())
    ]
    try:
        done, _ = await asyncio.wait(duties, return_when=asyncio.FIRST_COMPLETED)
        for duty in done:
            duty.result()
    finally:
        for duty in duties:
            duty.cancel()
        await asyncio.gather(*duties, return_exceptions=True)


async def _work(link: Link, node: int) -> None:
    first = await link.receive()
    if not isinstance(first, Configure):
        raise ValueError(f"expected the configuration first, got {type(first).__name__}")
    try:
        # In a thread: a user's scorer may load for minutes, and rank 0 wants to hear that this
        # process lives.
        collector = await asyncio.to_thread(Collector, node, first, link.send)
    except Exception as error:
        await link.send(_failure(error))
        raise
    try:
        while await collector.handle(await link.receive()):
            pass
    finally:
        await collector.close()


async def _stay_alive(link: Link) -> None:
    while True:
        await link.send(Alive())
        await asyncio.sleep(_ALIVE_EVERY_SECONDS)


def _failure(error: Exception) -> Failed:
    if isinstance(error, PluginError):
        return Failed(str(error), refused=True)
    return Failed(f"{type(error).__name__}: {error}")
