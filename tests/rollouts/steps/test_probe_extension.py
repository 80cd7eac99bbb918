"""Probes that their collector extends by the rule of the request, whatever arrives first."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import (
    DataSettings,
    RolloutSettings,
    SelectionSettings,
)
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.acceptance import Acceptance
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.queue.hub import Event
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.messages import GroupDone, GroupRequest
from tests.support.answers import make_pool
from tests.support.scripted_hub import ScriptedHub

POOL = make_pool(60)
STEPS = 3
SETTINGS = RolloutSettings(max_new_tokens=8, prompts_per_step=5, samples_per_prompt=6)
Skip = Literal["all_correct", "zero_variance"]
# Each example samples several steps
few_examples = settings(max_examples=settings.default.max_examples // 6)


def idle() -> None:
    pass


def open_sampler(hub: ScriptedHub, skip: Skip) -> RolloutSampler:
    """Open a sampler that probes every prompt with three rollouts, or with two."""
    selection = SelectionSettings(
        name="belief",
        skip=skip,
        probe_samples=3,
    )
    source = PromptSource(POOL, POOL[:1], DataSettings(source="column_addition"))
    queue = RolloutQueue(hub, SETTINGS)  # type: ignore[arg-type]
    queue.configure({})
    acceptance = Acceptance(exponent=0, target=1.0)
    selector = BeliefSelector(source, SETTINGS, selection, seed=0, acceptance=acceptance)
    return RolloutSampler(queue, SETTINGS, selector, (1,), idle)


def score(prompt_id: str, place: int) -> float:
    """Pass rates of 0, 1 and in between."""
    rate = (0.0, 0.5, 1.0)[int(prompt_id[1:]) % 3]
    return float(random.Random(f"{prompt_id}/{place}").random() < rate)


def sample(sampler: RolloutSampler, hub: ScriptedHub) -> list[RolloutBatch]:
    batches = [sampler.sample(step) for step in range(1, STEPS + 1)]
    assert sum(batch.generated_tokens for batch in batches) == hub.num_tokens
    assert sampler.count_tokens() == hub.num_tokens
    return batches


def contents(batch: RolloutBatch) -> object:
    return [
        [(group.group_id, group.prompt.id, group.rollouts, group.weight) for group in groups]
        for groups in (batch.groups, batch.stopped_groups)
    ]


def extended_by_rank_0(hub: ScriptedHub, skip: Skip) -> tuple[list[RolloutBatch], SelectorState]:
    """Sample with collectors that extend nothing: rank 0 requests the rest of each group."""
    sampler = open_sampler(hub, skip)
    submit = sampler.queue.submit

    def submit_without_rules(requests: Sequence[GroupRequest]) -> None:
        submit([msgspec.structs.replace(request, extension=None) for request in requests])

    sampler.queue.submit = submit_without_rules  # type: ignore[method-assign]
    batches = sample(sampler, hub)
    assert hub.num_extended == 0
    return batches, sampler.state()


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["all_correct", "zero_variance"])
@few_examples
@given(seed=st.integers(0, 2**32), other_seed=st.integers(0, 2**32), num_nodes=st.integers(1, 3))
def test_batches_and_beliefs_are_those_of_extensions_by_rank_0(
    skip: Skip, seed: int, other_seed: int, num_nodes: int
) -> None:
    hub = ScriptedHub(seed, score, num_nodes=num_nodes)
    sampler = open_sampler(hub, skip)
    batches = sample(sampler, hub)
    assert hub.num_extended > 0
    others, state = extended_by_rank_0(ScriptedHub(other_seed, score), skip)
    for batch, other in zip(batches, others, strict=True):
        assert contents(batch) == contents(other)
        assert batch.selection_metrics == other.selection_metrics
        assert batch.delivered_ids == other.delivered_ids
        assert batch.generated_tokens == other.generated_tokens
    assert sampler.state() == state
    assert hub.kept_ids == {id_ for batch in batches for id_ in batch.delivered_ids}


@pytest.mark.slow
@few_examples
@given(seed=st.integers(0, 2**32))
def test_a_lost_collector_changes_no_batch(seed: int) -> None:
    """Neither before nor after it has said that a probe is extended."""
    whole_batches = sample(open_sampler(hub := ScriptedHub(0, score), "all_correct"), hub)
    hub = ScriptedHub(seed, score, num_nodes=2)
    sampler = open_sampler(hub, "all_correct")
    rng = random.Random(seed)
    num_losses = Counter(left=5)
    poll: Callable[[float], tuple[int, Event] | None] = hub.poll

    def poll_with_losses(timeout_seconds: float) -> tuple[int, Event] | None:
        if num_losses["left"] and rng.random() < 0.05:
            num_losses["left"] -= 1
            hub.lose(rng.choice(hub.nodes))
        return poll(timeout_seconds)

    hub.poll = poll_with_losses  # type: ignore[method-assign]
    for step, batch in enumerate(whole_batches, 1):
        assert contents(sampler.sample(step)) == contents(batch)


@pytest.mark.slow
@few_examples
@given(seed=st.integers(0, 2**32), num_polls=st.integers(0, 60))
def test_a_step_with_extensions_can_be_dropped_and_sampled_again(seed: int, num_polls: int) -> None:
    """Answers that were on their way do not count for the new requests."""
    whole_batches = sample(open_sampler(hub := ScriptedHub(0, score), "all_correct"), hub)
    hub = ScriptedHub(seed, score, num_nodes=2)
    sampler = open_sampler(hub, "all_correct")
    start = sampler.state()
    as_completed = partial(sampler.queue.as_completed, idle_every_seconds=0.0)
    sampler.queue.as_completed = as_completed  # type: ignore[method-assign]
    for _ in range(2):
        sampler.begin_step(1)
        num_left = Counter(polls=num_polls)

        def can_continue(num_left: Counter[str] = num_left) -> bool:
            num_left["polls"] -= 1
            return num_left["polls"] > 0

        batch = sampler.finish_step(can_continue)
        if batch is not None:  # as at the end of a run
            sampler.queue.drop(batch.delivered_ids)
        sampler.drop_open()
        sampler.restore(start)
    batch = sampler.sample(1)
    assert contents(batch) == contents(whole_batches[0])
    for _ in range(300):
        hub.poll(0)
        sampler.queue.lost_groups([])
    assert hub.kept_ids == set(batch.delivered_ids)


def test_a_probe_is_extended_before_rank_0_looks() -> None:
    """As while it trains: nobody polls the hub, and the rest of the groups is being sampled."""
    hub = ScriptedHub(1, score)
    sampler = open_sampler(hub, "all_correct")
    sampler.begin_step(1)
    collector = hub.collectors[0]
    for group_id in sorted(collector.running):
        hub.complete(collector, group_id)
    assert hub.num_extended == len(collector.running) > 0
    assert all("+" in group_id for group_id in collector.running)


def test_the_time_of_an_extension_begins_when_its_probe_is_complete() -> None:
    """Not when rank 0 learns of it: the timeline of a run would show it too late, and too short."""
    hub = ScriptedHub(1, score)
    sampler = open_sampler(hub, "all_correct")
    seconds_by_id: dict[str, float] = {}
    sampler.queue.on_arrival = lambda answer, seconds: seconds_by_id.update(
        {answer.group.group_id: seconds}
    )
    sampler.begin_step(1)
    collector = hub.collectors[0]
    while collector.running:
        hub.complete(collector, min(collector.running))
    extension_ids = {id_ for id_ in collector.kept_ids if "+" in id_}
    assert len(extension_ids) == hub.num_extended > 0
    time.sleep(0.3)  # as rank 0 does not look while it trains
    sampler.finish_step()
    assert min(seconds_by_id[id_] for id_ in extension_ids) >= 0.3


def change_extensions(hub: ScriptedHub, is_extended: bool) -> None:
    """Let collectors claim that they have extended each probe, or none."""
    poll = hub.poll

    def poll_with_claims(timeout_seconds: float) -> tuple[int, Event] | None:
        message = poll(timeout_seconds)
        if message is not None and isinstance(message[1], GroupDone):
            return message[0], msgspec.structs.replace(message[1], is_extended=is_extended)
        return message

    hub.poll = poll_with_claims  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("is_extended", "text"),
    [
        (True, r"node 0 extended group step-1-\d+, which is all_correct. The rule"),
        (False, r"node 0 did not extend group step-1-\d+, which is (mixed|all_incorrect)"),
    ],
)
def test_a_collector_that_breaks_the_rule_is_refused(is_extended: bool, text: str) -> None:
    hub = ScriptedHub(1, score)
    change_extensions(hub, is_extended)
    with pytest.raises(CollectorFailed, match=text):
        open_sampler(hub, "all_correct").sample(1)


def first_requests() -> list[GroupRequest]:
    """Return the requests of the first step."""
    hub = ScriptedHub(0, score)
    open_sampler(hub, "zero_variance").begin_step(1)
    return list(hub.collectors[0].running.values())


def test_a_probe_whose_rollouts_are_rejected_here_is_not_extended() -> None:
    """Its collector could not know that their weights are too old, so the rest is withdrawn."""
    hub = ScriptedHub(2, lambda prompt_id, place: float(place == 0))
    sampler = open_sampler(hub, "zero_variance")
    old_prompt = min(request.prompt.id for request in first_requests())
    answer = hub.answer

    def with_old_correct_rollouts(request: GroupRequest) -> Group:
        group = answer(request)
        if group.prompt.id != old_prompt:
            return group
        first, *others = group.rollouts
        return msgspec.structs.replace(
            group,
            rollouts=(msgspec.structs.replace(first, tokens_by_version=((-1, 4),)), *others),
        )

    hub.answer = with_old_correct_rollouts
    batch = sampler.sample(1)
    batch_groups = {group.prompt.id: group for group in batch.all_groups}
    assert batch_groups[old_prompt] in batch.stopped_groups
    assert batch_groups[old_prompt].rejections == {"stale": 1}
    for _ in range(300):
        hub.poll(0)
        sampler.queue.lost_groups([])
    assert hub.kept_ids == set(batch.delivered_ids)
