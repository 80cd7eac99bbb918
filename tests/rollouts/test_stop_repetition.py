"""Responses that repeat themselves are cut off at a place that their tokens alone decide."""

import asyncio
import base64
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.schema import (
    REPETITION_CHECK_TOKENS,
    EngineSettings,
    RolloutSettings,
)
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.wire.messages import FromCollector, GroupDone, GroupRequest
from megatron_rl.rollouts.wire.repetition import RepetitionStop, repetition
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge.engine import Engine
from sglang_bridge.generation import Generation, VersionSpan
from tests.support.collectors import Outbox
from tests.support.fake_engine import LAYERS, TOPK, Reply, configuration, fake_engine, serving
from tests.support.saved_groups import save_group
from tests.support.scripted_model import EOS, PROMPT

FORM = RequestForm(api_key=None, longest_response=40, route_shape=(LAYERS, TOPK), vocab_size=48)
LOOP = [5, 6, 7, 8, *[9, 10] * 9, EOS]
# A response that repeats itself, of a length at which collectors look at it
SETTINGS = RolloutSettings(max_new_tokens=1100, stop_repetition=0.4)
LONG_LOOP = [5, 6, 7, 8, *[9, 10] * 400, EOS]
CUT = REPETITION_CHECK_TOKENS


class InterruptedEngine:
    """Samples one fixed response, and ends some requests after a few tokens of it.

    cuts: by request, the tokens after which somebody aborts it. 0: nobody does.
    """

    def __init__(self, response: list[int], cuts: tuple[int, ...] = ()) -> None:
        self.response = response
        self.cuts = list(cuts)
        self.num_sampled = 0

    def __call__(self, n: int, body: Reply) -> Reply:
        limit = body["sampling_params"]["max_new_tokens"]
        start = len(body["input_ids"]) - len(PROMPT.token_ids)
        ids = self.response[start : start + limit]
        finish = "stop" if ids[-1] == EOS else "length"
        cut = self.cuts.pop(0) if self.cuts else 0
        if 0 < cut < len(ids):
            ids = ids[:cut]
            finish = "abort"
        self.num_sampled += len(ids)
        num_rows = len(body["input_ids"]) + len(ids) - 1 - body.get("routed_experts_start_len", 0)
        rows = np.zeros((num_rows, LAYERS, TOPK), np.int32)
        rows[:, :, 1] += 2
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish},
                "weight_version": "3",
                "output_token_logprobs": [(-0.5, token, None) for token in ids],
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
            },
        }


async def ignore(message: FromCollector) -> None:
    """Drop a report."""


def stop_of(threshold: float = 0.4, every: int = 4) -> RepetitionStop:
    return RepetitionStop(threshold, ngram=2, every=every)


def sample(engine: InterruptedEngine, stop: RepetitionStop | None) -> Generation:
    async def run() -> Generation:
        async with fake_engine(engine, seconds=0.0) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            pool.set_version(3)
            task = asyncio.create_task(
                pool.generate(
                    PROMPT.token_ids,
                    Sampling(max_new_tokens=24, temperature=1.0, stop_token_ids=(EOS,)),
                    rid="g/0",
                    return_routes=True,
                    rejected_tokens=Counter(),
                    stop=stop,
                )
            )
            generation = await asyncio.wait_for(task, 10)
            assert pool.num_sampled == engine.num_sampled
            await pool.close()
            return generation

    return asyncio.run(run())


def expected_length(response: list[int], stop: RepetitionStop) -> int:
    """Return where a response is cut off: at the first check that is over the threshold."""
    for num_tokens in range(stop.every, len(response), stop.every):
        if repetition(np.array(response[:num_tokens]), stop.ngram) > stop.threshold:
            return num_tokens
    return len(response)


def test_a_response_that_repeats_itself_is_cut_off_like_one_that_is_too_long() -> None:
    stop = stop_of()
    engine = InterruptedEngine(LOOP)
    generation = sample(engine, stop)
    assert generation.output_ids.tolist() == LOOP[:12]
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.routes is not None
    assert len(generation.routes) == len(PROMPT.token_ids) + 12 - 1
    assert stop.has_stopped and engine.num_sampled == 12


def test_a_response_that_does_not_repeat_itself_is_whole() -> None:
    response = [*range(5, 21), EOS]
    stop = stop_of()
    generation = sample(InterruptedEngine(response), stop)
    whole = sample(InterruptedEngine(response), None)
    assert generation.finish_reason is whole.finish_reason is FinishReason.STOP
    assert generation.output_ids.tolist() == whole.output_ids.tolist() == response
    assert generation.logprobs.tolist() == whole.logprobs.tolist()
    assert generation.version_spans == whole.version_spans
    assert generation.routes is not None and whole.routes is not None
    assert np.array_equal(generation.routes, whole.routes)
    assert not stop.has_stopped


def test_a_response_that_is_too_long_anyway_counts_as_such() -> None:
    stop = stop_of(threshold=0.97)
    generation = sample(InterruptedEngine([9, 10] * 20), stop)
    assert len(generation.output_ids) == 24
    assert generation.finish_reason is FinishReason.LENGTH
    assert not stop.has_stopped


@pytest.mark.slow
@given(
    st.lists(st.integers(5, 7), min_size=1, max_size=23),
    st.lists(st.integers(0, 5), max_size=8),
    st.integers(1, 7),
)
def test_where_a_response_is_cut_off_does_not_depend_on_its_pieces(
    tokens: list[int], cuts: list[int], every: int
) -> None:
    """Nor on who aborts its requests in the middle."""
    response = [*tokens, EOS]
    stop = stop_of(every=every)
    length = expected_length(response, stop)
    generation = sample(InterruptedEngine(response, tuple(cuts)), stop)
    assert generation.output_ids.tolist() == response[:length]
    assert stop.has_stopped == (length < len(response))
    expected_reason = FinishReason.LENGTH if stop.has_stopped else FinishReason.STOP
    assert generation.finish_reason is expected_reason


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_a_stored_response_is_cut_off_where_it_would_have_been(num_tokens: int) -> None:
    """A checkpoint may store it after its last token and before it is looked at."""
    stop = stop_of()

    async def run() -> Generation:
        async with fake_engine(InterruptedEngine(LOOP), seconds=0.0) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            generation = await pool.generate(
                PROMPT.token_ids,
                Sampling(max_new_tokens=24, temperature=1.0, stop_token_ids=(EOS,)),
                rid="g/0",
                return_routes=True,
                rejected_tokens=Counter(),
                pieces=[stored_piece(LOOP[:num_tokens])],
                stop=stop,
            )
            await pool.close()
            return generation

    generation = asyncio.run(run())
    assert generation.output_ids.tolist() == LOOP[:12]
    assert generation.finish_reason is FinishReason.LENGTH and stop.has_stopped


def stored_piece(tokens: list[int]) -> Generation:
    num_rows = len(PROMPT.token_ids) + len(tokens) - 1
    rows = np.zeros((num_rows, LAYERS, TOPK), np.int32)
    rows[:, :, 1] += 2
    return Generation(
        output_ids=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        routes=rows,
        finish_reason=FinishReason.ABORT,
        version_spans=(VersionSpan("3", 0, len(tokens)),),
        cached_tokens=0,
        retractions=0,
    )


@pytest.mark.parametrize("num_open", [0, 1, 2])
def test_what_was_cut_off_before_a_checkpoint_counts_as_repetitive_after_it(
    num_open: int, tmp_path: Path
) -> None:
    """A rollout that is cut off stays open until it has a verdict."""
    rollouts: list[Rollout] = []
    first = collect(InterruptedEngine(LONG_LOOP), SETTINGS, rollouts=rollouts)
    group = msgspec.structs.replace(first.group, open_samples=(0, 1)[:num_open])
    saved_group = save_group(tmp_path, group, rollouts)
    engine = InterruptedEngine(LONG_LOOP)
    answer = collect(engine, SETTINGS, saved_group=saved_group)
    assert [rollout.is_repetitive for rollout in answer.group.rollouts] == [True, True]
    assert [rollout.num_generated for rollout in answer.group.rollouts] == [CUT, CUT]
    assert engine.num_sampled == 0


def collect(
    engine: InterruptedEngine,
    settings: RolloutSettings,
    *,
    rollouts: list[Rollout] | None = None,
    saved_group: SavedGroup | None = None,
    evaluation: bool = False,
) -> GroupDone:
    """Let a collector sample a group.

    rollouts: receives its rollouts. saved_group: what a checkpoint has of the group.
    """

    async def run() -> FromCollector:
        async with fake_engine(engine, seconds=0.0) as url:
            outbox = Outbox()
            collector_settings = msgspec.structs.replace(configuration(), rollout=settings)
            collector = Collector(0, collector_settings, outbox.put)
            await collector.handle(serving(url, version=3))
            sampling = Sampling(
                max_new_tokens=settings.max_new_tokens, temperature=1.0, stop_token_ids=(EOS,)
            )
            request = GroupRequest(
                group_id="g",
                prompt=PROMPT,
                num_samples=2,
                sampling=sampling,
                evaluation=evaluation,
            )
            if saved_group is not None:
                request = msgspec.structs.replace(
                    request, start=saved_group.group, saved=saved_group.rollouts
                )
            await collector.handle(request)
            message = await asyncio.wait_for(outbox.get(), 10)
            if rollouts is not None:
                assert isinstance(message, GroupDone)
                rollouts.extend(read_rollout(ref) for ref in message.group.rollouts)
            await collector.close()
            return message

    message = asyncio.run(run())
    assert isinstance(message, GroupDone)
    return message


@pytest.mark.parametrize("train_truncated", [True, False])
def test_a_rollout_that_was_cut_off_is_marked_and_treated_as_truncated(
    train_truncated: bool,
) -> None:
    engine = InterruptedEngine(LONG_LOOP)
    answer = collect(engine, replace(SETTINGS, train_truncated=train_truncated))
    for rollout in answer.group.rollouts:
        assert rollout.is_repetitive and rollout.finish_reason is FinishReason.LENGTH
        assert rollout.num_generated == CUT
        assert rollout.num_trainable == (CUT if train_truncated else 0)
        assert rollout.verdict.correctness == 0.0
    assert answer.generated_tokens == engine.num_sampled == 2 * CUT


def test_evaluations_and_default_settings_cut_nothing_off() -> None:
    for settings, evaluation in ((SETTINGS, True), (RolloutSettings(max_new_tokens=1100), False)):
        answer = collect(InterruptedEngine(LONG_LOOP), settings, evaluation=evaluation)
        assert [r.num_generated for r in answer.group.rollouts] == [len(LONG_LOOP)] * 2
        assert not any(rollout.is_repetitive for rollout in answer.group.rollouts)
