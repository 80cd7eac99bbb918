"""The collector process: sends prompts to the node's engines, judges responses as they arrive, keeps the payloads."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteError
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rewards import RewardRunner, build_scorer
from megatron_rl.rollouts.assembly import RolloutRejected, assemble_rollout
from megatron_rl.rollouts.engine_pool import EnginePool
from megatron_rl.rollouts.messages import (
    ENGINE_FAILURE,
    Configure,
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Pause,
    PausePolicy,
    Release,
    Resume,
    Stop,
    ToCollector,
    frame,
)
from megatron_rl.rollouts.store import RolloutStore
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import GenerationRejected


@dataclass(frozen=True)
class _Judged:
    rollout: Rollout
    verdict: Verdict
    generate_seconds: float
    generated_at: float


@dataclass(frozen=True)
class _Rejected:
    reason: str
    generated_tokens: int


class Collector:
    """Serves one connection to rank 0; `send` delivers a message to it."""

    def __init__(self, node: int, configuration: Configure, send: asyncio.Queue[FromCollector]) -> None:
        self._configuration = configuration
        self._send = send
        self._store = RolloutStore(node)
        self._tokenizer = Tokenizer.from_directory(configuration.tokenizer_path)
        scorer = build_scorer(configuration.reward_name, answer=configuration.reward_answer)
        self._rewards = RewardRunner(scorer, timeout_s=configuration.reward_timeout_s)
        self._engines = EnginePool(
            configuration.engines,
            request_timeout_s=configuration.request_timeout_s,
            retries=configuration.retries,
            max_in_flight=configuration.max_in_flight,
            route_shape=_route_shape(configuration),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, message: ToCollector) -> bool:
        """Act on one message; False once the collector shall end."""
        match message:
            case GroupRequest():
                task = asyncio.create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._settle)
            case Release():
                self._store.release(message.group_ids)
            case Pause():
                self._engines.pause(abort=message.policy is PausePolicy.ABORT)
            case Resume():
                self._engines.resume()
            case Stop():
                return False
            case Configure():
                raise ValueError("a collector is configured once")
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.close()

    def _settle(self, task: asyncio.Task[None]) -> None:
        """A group that cannot be answered ends the run; left alone, rank 0 would wait for it for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._send.put_nowait(Failed(f"{type(error).__name__}: {error}"))

    async def _answer(self, request: GroupRequest) -> None:
        results = await asyncio.gather(*(self._sample(request, i) for i in range(request.num_samples)))
        judged = [result for result in results if isinstance(result, _Judged)]
        rejected = [result for result in results if isinstance(result, _Rejected)]
        locations = self._store_payloads(request, judged)
        group = Group(
            group_id=request.group_id,
            prompt=request.prompt,
            samples=tuple(_sample_ref(j, where) for j, where in zip(judged, locations, strict=True)),
            rejected=dict(Counter(r.reason for r in rejected)),
            generated_at=max((j.generated_at for j in judged), default=0.0),
            judged_at=time.monotonic() if judged else 0.0,
        )
        tokens = sum(j.rollout.num_tokens - len(request.prompt.token_ids) for j in judged)
        wasted = sum(r.generated_tokens for r in rejected)
        await self._send.put(GroupDone(group=group, generated_tokens=tokens + wasted))

    def _store_payloads(self, request: GroupRequest, judged: list[_Judged]) -> list[RolloutLocation]:
        if request.keep_rollouts:
            return self._store.put(request.group_id, [j.rollout for j in judged])
        return [RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)] * len(judged)

    async def _sample(self, request: GroupRequest, index: int) -> _Judged | _Rejected:
        """One judged rollout, or the reason why there is none."""
        generated_tokens = 0
        rollout_id = f"{request.group_id}/{index}"
        start = time.monotonic()
        try:
            generation = await self._engines.generate(request.prompt.token_ids, request.sampling, rollout_id)
            generated_at, generated_tokens = time.monotonic(), len(generation.output_ids)
            rollout = assemble_rollout(
                request.prompt,
                generation,
                rollout_id=rollout_id,
                sample_index=index,
                routes=self._configuration.routes,
                train_truncated=self._configuration.train_truncated,
            )
        except (RolloutRejected, RouteError, GenerationRejected) as error:
            return _Rejected(error.reason, generated_tokens)
        except EngineError:
            return _Rejected(ENGINE_FAILURE, generated_tokens)
        text = self._tokenizer.decode([int(token) for token in generation.output_ids])
        verdict = await self._rewards.judge(request.prompt, text, rollout.finish_reason)
        return _Judged(rollout, verdict, generated_at - start, generated_at)


def _route_shape(configuration: Configure) -> tuple[int, int] | None:
    routes = configuration.routes
    return None if routes is None else (routes.num_hidden_layers, routes.topk)


def _sample_ref(judged: _Judged, location: RolloutLocation) -> RolloutRef:
    rollout = judged.rollout
    trainable = [segment for segment in rollout.segments if segment.trainable]
    return RolloutRef(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        num_inputs=rollout.num_tokens - 1,
        num_trainable=sum(len(segment.tokens) for segment in trainable),
        finish_reason=rollout.finish_reason,
        versions=tuple(sorted({s.version for s in rollout.segments if s.logprobs is not None})),
        verdict=judged.verdict,
        location=location,
        generate_seconds=judged.generate_seconds,
    )


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: int) -> None:
    """Run a collector over an authenticated connection until it is stopped or the connection ends.

    What goes wrong before a group can be asked for is reported to rank 0 as `Failed`.
    """
    outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
    first = await _receive(reader)
    if not isinstance(first, Configure):
        raise ValueError(f"expected the configuration first, got {type(first).__name__}")
    try:
        collector = Collector(node, first, outbox)
    except Exception as error:
        writer.write(frame(Failed(f"{type(error).__name__}: {error}")))
        await writer.drain()
        raise
    sender = asyncio.create_task(_send_all(outbox, writer))
    try:
        while await collector.handle(await _receive(reader)):
            pass
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # rank 0 is gone, and with it the reason to go on
    finally:
        sender.cancel()
        await collector.close()
        writer.close()


_decoder: msgspec.msgpack.Decoder[ToCollector] = msgspec.msgpack.Decoder(ToCollector)


async def _receive(reader: asyncio.StreamReader) -> ToCollector:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return _decoder.decode(await reader.readexactly(length))


async def _send_all(outbox: asyncio.Queue[FromCollector], writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(frame(await outbox.get()))
        await writer.drain()
