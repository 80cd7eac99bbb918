"""Groups that one collector begins and another one finishes, as after a checkpoint."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import EnvironmentSettings
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.collector.progress import NOT_RESTORED
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.wire.messages import (
    Drop,
    FromCollector,
    GroupDone,
    GroupRequest,
    Partial,
    Problem,
    Served,
    Store,
)
from megatron_rl.rollouts.wire.store import RolloutGone, RolloutStore, read_rollout
from tests.support.collectors import Outbox
from tests.support.fake_engine import LAYERS, TOPK, Reply, configuration, fake_engine, serving
from tests.support.rollouts import assert_equal
from tests.support.saved_groups import save_group
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
WHOLE = [*TOKENIZER.encode("04678"), EOS]
CALL = [*TOKENIZER.encode("a3+8="), EOS]
SUM = TOKENIZER.encode("11")
REST = [*TOKENIZER.encode("b12"), EOS]
REQUEST = GroupRequest(group_id="g", prompt=PROMPT, num_samples=3, sampling=SAMPLING)
CALCULATOR = EnvironmentSettings(name="calculator")


class TrackedEngine:
    """Answers with the next tokens of a script: what follows the prompt, sums included.

    version: of its weights. largest_piece: a longer response waits after as many tokens, until
    `abort`. num_sampled: the tokens that it has sampled. Expert 0 of a row is the version that has
    recorded it.
    """

    def __init__(self, script: list[int], largest_piece: int = 2) -> None:
        self.script = script
        self.version = 0
        self.largest_piece = largest_piece
        self.num_waiting = 0
        self.num_sampled = 0
        self.seeds: list[int] = []
        self._abort = asyncio.Event()

    def abort(self) -> None:
        """Answer the requests that wait."""
        self._abort.set()
        self._abort = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, n: int, body: Reply) -> Reply:
        self.seeds.append(body["sampling_params"]["sampling_seed"])
        start = len(body["input_ids"]) - len(PROMPT.token_ids)
        ids = []
        for token in self.script[start : start + body["sampling_params"]["max_new_tokens"]]:
            ids.append(token)
            if token == EOS:
                break
        finish = "stop" if ids[-1] == EOS else "length"
        if len(ids) > self.largest_piece:
            ids = ids[: self.largest_piece]
            finish = "abort"
        self.num_sampled += len(ids)
        num_rows = len(body["input_ids"]) + len(ids) - 1 - body.get("routed_experts_start_len", 0)
        rows = np.full((num_rows, LAYERS, TOPK), self.version, np.int32)
        rows[:, :, 1] += 2
        reply = {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": finish},
                "weight_version": str(self.version),
                "output_token_logprobs": [(-0.25 * token, token, None) for token in ids],
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
            },
        }
        if finish == "abort":
            self.num_waiting += 1
            await self._abort.wait()
        return reply


class Desk:
    """A collector and what it sends."""

    def __init__(self, url: str, environment: EnvironmentSettings | None = None) -> None:
        self.outbox = Outbox()
        self.collector = Collector(0, configuration(environment), self.outbox.put)
        self._url = url

    async def serve(self, version: int, *, is_paused: bool = False) -> None:
        """Let it use its engine, which holds these weights."""
        await self.tell(serving(self._url, version=version, is_paused=is_paused))

    async def tell(self, *messages: Any) -> None:
        for message in messages:
            await self.collector.handle(message)

    async def hear(self) -> FromCollector:
        return await asyncio.wait_for(self.outbox.get(), 10)

    async def interrupt(self, engine: TrackedEngine, num_open: int = 3) -> None:
        """Stop its open responses in the middle, until it serves again."""
        async with asyncio.timeout(10):
            while engine.num_waiting < num_open:
                await asyncio.sleep(0.01)
        await self.serve(engine.version, is_paused=True)
        engine.abort()
        answer = await self.hear()
        assert isinstance(answer, Served) and answer.num_sampled == engine.num_sampled

    async def store(self, number: int = 1) -> tuple[Group, list[Rollout]]:
        """Return the sampled part of its only group, which is at rest."""
        await self.tell(Store(number))
        partial = await self.hear()
        assert isinstance(partial, Partial) and partial.number == number
        group = partial.group
        assert group is not None
        assert await self.hear() == Partial(number, None)
        return group, [read_rollout(ref) for ref in group.rollouts]


async def finish(
    engine: TrackedEngine,
    environment: EnvironmentSettings | None,
    versions: range,
    request: GroupRequest,
    num_open: int = 3,
) -> tuple[Group, list[Rollout]]:
    """Sample a group to its end, under some versions one after the other.

    num_open: rollouts that are sampled. Returns the group and its rollouts.
    """
    async with fake_engine(engine) as url:
        desk = Desk(url, environment)
        for version in versions:
            engine.version = version
            is_last = version == versions[-1]
            engine.largest_piece = 16 if is_last else 2
            await desk.serve(version)
            if version == versions[0]:
                await desk.tell(request)
            if not is_last:
                await desk.interrupt(engine, num_open)
        answer = await desk.hear()
        assert isinstance(answer, GroupDone)
        assert answer.generated_tokens == sampled_tokens(answer.group)
        rollouts = [read_rollout(ref) for ref in answer.group.rollouts]
        await desk.collector.close()
    return answer.group, rollouts


def assert_same(one: list[Rollout], other: list[Rollout]) -> None:
    for rollout, twin in zip(one, other, strict=True):
        assert_equal(rollout, twin)


async def begin(
    engine: TrackedEngine,
    environment: EnvironmentSettings | None,
    folder: Path,
    request: GroupRequest = REQUEST,
    num_versions: int = 1,
) -> SavedGroup:
    """Sample a group under the first versions, and save its sampled part in a folder."""
    async with fake_engine(engine) as url:
        desk = Desk(url, environment)
        for version in range(num_versions):
            engine.version = version
            await desk.serve(version)
            if not version:
                await desk.tell(request)
            await desk.interrupt(engine)
        group, rollouts = await desk.store()
        await desk.collector.close()
    return save_group(folder, group, rollouts)


async def resume(
    engine: TrackedEngine,
    environment: EnvironmentSettings | None,
    versions: range,
    partial: SavedGroup,
    request: GroupRequest = REQUEST,
    num_open: int = 3,
) -> tuple[Group, list[Rollout]]:
    """Sample a group to its end with another collector."""
    request = msgspec.structs.replace(request, start=partial.group, saved=partial.rollouts)
    return await finish(engine, environment, versions, request, num_open)


async def sample_twice(
    engines: list[TrackedEngine],
    environment: EnvironmentSettings | None,
    num_versions: int,
    folder: Path,
) -> tuple[SavedGroup, list[tuple[Group, list[Rollout]]]]:
    """Sample a group with the first engine, and again with the two others, one after the other.

    num_versions: of the second engine. Returns the sampled part of the group then, and both
    groups.
    """
    whole = await finish(engines[0], environment, range(3), REQUEST)
    partial = await begin(engines[1], environment, folder, num_versions=num_versions)
    second = await resume(engines[2], environment, range(num_versions, 3), partial)
    return partial, [whole, second]


def test_a_collector_that_cannot_store_open_rollouts_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(store: RolloutStore, name: str) -> None:
        raise OSError("No space left on device")

    async def run() -> FromCollector:
        engine = TrackedEngine(WHOLE)
        async with fake_engine(engine) as url:
            desk = Desk(url, None)
            await desk.serve(0)
            await desk.tell(REQUEST)
            await desk.interrupt(engine)
            monkeypatch.setattr(RolloutStore, "begin", begin)
            await desk.tell(Store(1))
            answer = await desk.hear()
            await desk.collector.close()
            return answer

    answer = asyncio.run(run())
    assert isinstance(answer, Problem)
    assert "No space left on device" in answer.text


@pytest.mark.parametrize(
    ("environment", "script"),
    [(None, WHOLE), (CALCULATOR, [*CALL, *SUM, *REST])],
    ids=["single_turn", "calculator"],
)
@pytest.mark.parametrize("num_versions", [1, 2])
def test_another_collector_continues_a_group_bit_for_bit(
    environment: EnvironmentSettings | None, script: list[int], num_versions: int, tmp_path: Path
) -> None:
    engines = [TrackedEngine(script) for _ in range(3)]
    partial, groups = asyncio.run(sample_twice(engines, environment, num_versions, tmp_path))
    (whole, whole_rollouts), (second, resumed_rollouts) = groups
    assert_stored(partial, 3 * 2 * num_versions)
    assert_same(resumed_rollouts, whole_rollouts)
    assert without_times(second) == without_times(whole)
    whole_tokens, first_tokens, last_tokens = (engine.num_sampled for engine in engines)
    assert first_tokens == partial.num_tokens
    assert first_tokens + last_tokens == whole_tokens == sampled_tokens(whole)
    assert set(engines[1].seeds) | set(engines[2].seeds) == set(engines[0].seeds)


def assert_stored(partial: SavedGroup, num_tokens: int) -> None:
    """Check that three rollouts are open in the middle."""
    assert partial.group.open_samples == (0, 1, 2)
    assert [saved.record.finish_reason for saved in partial.rollouts] == ["abort"] * 3
    assert partial.fits(REQUEST) and not partial.is_finished
    assert partial.num_tokens == num_tokens


def without_times(group: Group) -> Group:
    """Return a group without times, and without rollouts."""
    return msgspec.structs.replace(group, generated_at=0.0, scored_at=0.0, rollouts=())


def test_a_turn_that_has_ended_is_not_sampled_again(tmp_path: Path) -> None:
    """The calculator plays it again, and the second turn goes on."""
    rest = [*TOKENIZER.encode("b123456"), EOS]
    script = [*CALL, *SUM, *rest]
    engine = TrackedEngine(script, len(CALL))
    next_engine = TrackedEngine(script)

    async def run() -> tuple[SavedGroup, list[Rollout]]:
        partial = await begin(engine, CALCULATOR, tmp_path)
        _, second = await resume(next_engine, CALCULATOR, range(1, 2), partial)
        return partial, second

    partial, second = asyncio.run(run())
    assert partial.group.open_samples == (0, 1, 2)
    assert engine.num_sampled == 3 * (len(CALL) + len(CALL))
    assert next_engine.num_sampled == 3 * (len(rest) - len(CALL))
    tokens = [t for segment in second[0].segments for t in segment.tokens.tolist()]
    assert tokens == [*PROMPT.token_ids, *script]
    assert [segment.version for segment in second[0].segments] == [0, 0, 0, 0, 1]


def test_finished_rollouts_keep_their_verdicts_and_rejected_ones_stay_rejected(
    tmp_path: Path,
) -> None:
    """Rollout 0 is finished, rollout 1 was rejected and rollout 2 is open."""

    async def run() -> None:
        engine = TrackedEngine(WHOLE)
        whole, whole_rollouts = await finish(engine, None, range(3), REQUEST)
        ref = msgspec.structs.replace(
            whole.rollouts[0],
            verdict=msgspec.structs.replace(whole.rollouts[0].verdict, reward=0.25),
        )
        saved_group = Group(
            group_id="g",
            prompt=PROMPT,
            rollouts=(ref,),
            rejections={"engine": 1},
            rejected_tokens={"engine": 4},
            open_samples=(2,),
        )
        partial = save_group(tmp_path, saved_group, whole_rollouts[:1])
        assert partial.fits(REQUEST)
        next_engine = TrackedEngine(WHOLE)
        group, rollouts = await resume(next_engine, None, range(3), partial, num_open=1)
        assert_same(rollouts, [whole_rollouts[0], whole_rollouts[2]])
        assert [r.verdict.reward for r in group.rollouts] == [
            0.25,
            whole.rollouts[2].verdict.reward,
        ]
        assert group.rejections == {"engine": 1}
        assert group.rejected_tokens == {"engine": 4}
        assert next_engine.num_sampled == len(WHOLE)

    asyncio.run(run())


def test_tokens_that_the_environment_does_not_ask_for_are_counted_as_rejected(
    tmp_path: Path,
) -> None:
    """The prompt of the run has changed since, so its episodes read other tokens."""

    async def run() -> None:
        engine = TrackedEngine(WHOLE)
        async with fake_engine(engine) as url:
            desk = Desk(url, None)
            await desk.serve(0)
            await desk.tell(REQUEST)
            await desk.interrupt(engine)
            group, rollouts = await desk.store()
            await desk.collector.close()
        other_prompt = msgspec.structs.replace(PROMPT, token_ids=PROMPT.token_ids[::-1])
        request = msgspec.structs.replace(REQUEST, prompt=other_prompt)
        partial = save_group(tmp_path, group, rollouts)
        assert not partial.fits(request)
        next_engine = TrackedEngine(WHOLE)
        second, _ = await resume(next_engine, None, range(3), partial, request)
        assert second.rejected_tokens == {NOT_RESTORED: 6}
        assert next_engine.num_sampled == 3 * len(WHOLE)

    asyncio.run(run())


def test_a_finished_group_is_read_and_no_engine_is_asked(tmp_path: Path) -> None:
    async def run() -> None:
        whole, rollouts = await finish(TrackedEngine(WHOLE), None, range(3), REQUEST)
        saved = save_group(tmp_path, whole, rollouts)
        assert saved.is_finished
        desk = Desk("http://127.0.0.1:1")
        await desk.tell(msgspec.structs.replace(REQUEST, start=saved.group, saved=saved.rollouts))
        answer = await desk.hear()
        assert isinstance(answer, GroupDone)
        assert answer.generated_tokens == saved.num_tokens
        assert_same([read_rollout(ref) for ref in answer.group.rollouts], rollouts)
        assert [ref.verdict for ref in answer.group.rollouts] == [r.verdict for r in whole.rollouts]
        # Of another clock, so that there is no time between them
        assert (answer.group.generated_at, answer.group.scored_at) == (0.0, 0.0)
        assert without_times(answer.group) == without_times(whole)
        await desk.collector.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_open", [True, False])
def test_rollouts_whose_checkpoint_was_removed_are_sampled_anew(
    tmp_path: Path, is_open: bool
) -> None:
    """The group goes on as if it had none, and their tokens are counted."""

    async def run() -> None:
        whole, whole_rollouts = await finish(TrackedEngine(WHOLE), None, range(3), REQUEST)
        saved = save_group(tmp_path, whole, whole_rollouts)
        if is_open:
            saved = await begin(TrackedEngine(WHOLE), None, tmp_path)
        Path(saved.rollouts[0].part).with_suffix(".safetensors").unlink()
        engine = TrackedEngine(WHOLE)
        group, rollouts = await resume(engine, None, range(3), saved)
        assert_same(rollouts, whole_rollouts)
        assert group.rejected_tokens == {NOT_RESTORED: saved.num_tokens}
        assert engine.num_sampled == 3 * len(WHOLE)

    asyncio.run(run())


def test_stored_partials_are_freed_and_their_group_goes_on() -> None:
    async def run() -> None:
        engine = TrackedEngine(WHOLE)
        async with fake_engine(engine) as url:
            desk = Desk(url, None)
            await desk.serve(0)
            await desk.tell(REQUEST)
            await desk.interrupt(engine)
            group, _ = await desk.store(7)
            await desk.tell(Drop(("partials-7/g",)))
            with pytest.raises(RolloutGone):
                read_rollout(group.rollouts[0])
            engine.largest_piece = 16
            await desk.serve(0)
            answer = await desk.hear()
            assert isinstance(answer, GroupDone) and len(answer.group.rollouts) == 3
            await desk.collector.close()

    asyncio.run(run())


def test_evaluations_are_not_stored() -> None:
    async def run() -> None:
        async with fake_engine(lambda n, body: None) as url:
            desk = Desk(url, None)
            await desk.tell(msgspec.structs.replace(REQUEST, evaluation=True))
            await desk.tell(Store(3))
            assert await desk.hear() == Partial(3, None)
            await desk.collector.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_samples": 4},
        {"num_samples": 2},
        {"first_sample": 1},
        {"prompt": msgspec.structs.replace(PROMPT, id="other")},
    ],
)
def test_a_saved_group_fits_its_own_request_alone(changes: dict[str, Any]) -> None:
    group = Group(group_id="g", prompt=PROMPT, rollouts=(), open_samples=(0, 1, 2))
    partial = SavedGroup(group, ())
    assert partial.fits(REQUEST)
    assert not partial.fits(msgspec.structs.replace(REQUEST, **changes))
