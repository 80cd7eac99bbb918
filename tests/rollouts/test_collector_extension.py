"""A collector extends a probe by the rule of its request, and samples what rank 0 would request."""

import asyncio
from collections.abc import Callable

import pytest

from megatron_rl.contracts.prompt import Sampling
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.prompts.selection.selector import Extension
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.wire.messages import (
    Drop,
    FromCollector,
    GroupDone,
    GroupRequest,
    extension_id,
)
from tests.support.collectors import Outbox
from tests.support.fake_engine import Reply, configuration, fake_engine, reply, serving
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
RULE = Extension(5, (GroupKind.MIXED, GroupKind.ALL_INCORRECT))
CORRECT = "046"
INCORRECT = "047"


def probe(rule: Extension | None = RULE) -> GroupRequest:
    return GroupRequest(
        group_id="g", prompt=PROMPT, num_samples=2, sampling=SAMPLING, attempt=3, extension=rule
    )


class RecordingEngine:
    """Answers with a text by the place of the rollout, and records the seed of each rollout."""

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self.text_of = text_of
        self.seeds: dict[str, int] = {}

    def __call__(self, n: int, body: Reply) -> Reply:
        rollout_id = body["rid"].partition("#")[0]
        self.seeds[rollout_id] = body["sampling_params"]["sampling_seed"]
        return reply(body, self.text_of(int(rollout_id.rpartition("/")[2])))


def collect(engine: RecordingEngine, *requests: GroupRequest, count: int) -> list[FromCollector]:
    """Send requests and return `count` answers, after which no further one may come."""

    async def run() -> list[FromCollector]:
        async with fake_engine(engine) as url:
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(url))
            for request in requests:
                await collector.handle(request)
            answers = [await asyncio.wait_for(outbox.get(), 5) for _ in range(count)]
            await asyncio.sleep(0.2)
            assert outbox.empty()
            await collector.close()
            return answers

    return asyncio.run(run())


def one_correct(place: int) -> str:
    return CORRECT if place == 0 else INCORRECT


def test_a_mixed_probe_is_extended_at_once() -> None:
    first, rest = collect(RecordingEngine(one_correct), probe(), count=2)
    assert isinstance(first, GroupDone) and isinstance(rest, GroupDone)
    assert first.is_extended and not rest.is_extended
    assert (first.group.group_id, rest.group.group_id) == ("g", "g+2")
    assert first.attempt == rest.attempt == 3
    assert [r.sample_index for r in rest.group.rollouts] == [2, 3, 4]
    assert [r.rollout_id for r in rest.group.rollouts] == ["g+2/2", "g+2/3", "g+2/4"]


def test_the_rest_has_the_seeds_of_a_request_from_rank_0() -> None:
    engine = RecordingEngine(one_correct)
    collect(engine, probe(), count=2)
    other_engine = RecordingEngine(one_correct)
    rest = probe().rest()
    assert rest.group_id == extension_id("g", 2) and rest.extension is None
    collect(other_engine, probe(rule=None), rest, count=2)
    assert engine.seeds == other_engine.seeds
    assert len(engine.seeds) == 5


@pytest.mark.parametrize(
    ("text_of", "rule", "is_extended"),
    [
        (lambda place: CORRECT, RULE, False),
        (lambda place: INCORRECT, RULE, True),
        (lambda place: INCORRECT, Extension(5, (GroupKind.MIXED,)), False),
        (one_correct, Extension(5, (GroupKind.MIXED,)), True),
        (one_correct, None, False),
    ],
)
def test_the_rule_decides(
    text_of: Callable[[int], str], rule: Extension | None, is_extended: bool
) -> None:
    answers = collect(RecordingEngine(text_of), probe(rule), count=1 + is_extended)
    assert isinstance(answers[0], GroupDone)
    assert answers[0].is_extended is is_extended


def test_the_rest_of_a_group_can_be_withdrawn() -> None:
    """Rank 0 withdraws both, because it may not know yet that the probe is extended."""
    engine = RecordingEngine(one_correct)

    async def run() -> None:
        async with fake_engine(engine, seconds=0.3) as url:
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(url))
            await collector.handle(probe())
            first = await asyncio.wait_for(outbox.get(), 5)
            assert isinstance(first, GroupDone) and first.is_extended
            await collector.handle(Drop(("g", "g+2")))
            await asyncio.sleep(0.5)
            assert outbox.empty()
            await collector.close()

    asyncio.run(run())


def test_a_request_without_a_rule_has_no_rest() -> None:
    with pytest.raises(ValueError, match="no rule"):
        probe(rule=None).rest()
