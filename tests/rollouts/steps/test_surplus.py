"""Oversampling that aborts its surplus: what trains depends on no order, and tokens are counted."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group
from megatron_rl.prompts.selection.oversample import Oversample
from megatron_rl.prompts.selection.uniform import Uniform
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.saved_groups import SavedGroup, SavedGroups
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.messages import Drop, ToCollector
from tests.support.answers import make_pool
from tests.support.rollouts import make_rollout
from tests.support.scripted_hub import ScoreOf, ScriptedHub

POOL = make_pool(40)
STEPS = 3
SETTINGS = RolloutSettings(max_new_tokens=8, prompts_per_step=4, samples_per_prompt=3)


def idle() -> None:
    pass


def ignore(text: str) -> None:
    pass


def open_sampler(
    hub: ScriptedHub,
    surplus: str,
    log: Callable[[str], None] = ignore,
    abort_seconds: float = 30.0,
) -> RolloutSampler:
    settings = SelectionSettings(name="oversample", surplus=surplus)  # type: ignore[arg-type]
    source = PromptSource(POOL, POOL[:1], DataSettings(source="column_addition", shuffle=False))
    queue = RolloutQueue(
        hub,  # type: ignore[arg-type]
        SETTINGS,
        abort_seconds=abort_seconds,
        log=log,
    )
    queue.configure({})
    return RolloutSampler(queue, SETTINGS, Oversample(source, SETTINGS, settings), (1,), idle)


def sample(hub: ScriptedHub, surplus: str) -> list[RolloutBatch]:
    sampler = open_sampler(hub, surplus)
    batches = [sampler.sample(step) for step in range(1, STEPS + 1)]
    assert sum(batch.generated_tokens for batch in batches) == hub.num_tokens
    assert sampler.count_tokens() == hub.num_tokens
    return batches


def scores_of(mixed_prompts: frozenset[int]) -> ScoreOf:
    """The groups of these prompts are mixed, and the others all incorrect."""
    return lambda prompt_id, place: float(int(prompt_id[1:]) in mixed_prompts and place == 0)


def contents(groups: tuple[Group, ...]) -> list[object]:
    return [(group.group_id, group.prompt.id, group.rollouts, group.weight) for group in groups]


# Of each round of four. Then the second round has three groups that the step does not need.
THREE_OF_FOUR = frozenset(number for number in range(40) if number % 4 != 3)
MIXED_PROMPTS = st.frozensets(st.integers(0, len(POOL) - 1), min_size=6)
# Each example samples several steps
few_examples = settings(max_examples=settings.default.max_examples // 3)


@few_examples
@given(MIXED_PROMPTS, st.integers(0, 2**32), st.integers(0, 2**32), st.integers(1, 3))
def test_what_trains_depends_on_no_order_of_arrival(
    mixed_prompts: frozenset[int], seed: int, other_seed: int, num_nodes: int
) -> None:
    scores = scores_of(mixed_prompts)
    batches = sample(ScriptedHub(seed, scores), "abort")
    others = sample(ScriptedHub(other_seed, scores, num_nodes=num_nodes), "abort")
    for batch, other in zip(batches, others, strict=True):
        assert contents(batch.groups) == contents(other.groups)
        assert batch.surplus_groups == other.surplus_groups == ()
        assert batch.selection_metrics == other.selection_metrics
        assert batch.delivered_ids == tuple(group.group_id for group in batch.groups)


@few_examples
@given(MIXED_PROMPTS, st.integers(0, 2**32))
def test_the_mixed_groups_are_those_of_a_surplus_that_is_finished(
    mixed_prompts: frozenset[int], seed: int
) -> None:
    """So is their order, and the place among the prompts after each step."""
    scores = scores_of(mixed_prompts)
    batches = sample(ScriptedHub(seed, scores), "abort")
    whole_batches = sample(ScriptedHub(seed + 1, scores), "finish")
    for batch, other in zip(batches, whole_batches, strict=True):
        groups = contents(batch.groups)
        assert groups == contents(other.groups)[: len(groups)]
        left_out = contents(other.groups)[len(groups) :]
        assert not any(prompt in mixed_ids(mixed_prompts) for _, prompt, *_ in left_out)
        for name in ("prompts", "rollouts", "mixed", "unfilled", "rounds"):
            key = f"select/{name}"
            assert batch.selection_metrics[key] == other.selection_metrics[key]


def mixed_ids(mixed_prompts: frozenset[int]) -> set[str]:
    return {f"p{number}" for number in mixed_prompts}


@few_examples
@given(MIXED_PROMPTS, st.integers(0, 2**32))
def test_each_token_of_the_surplus_is_in_one_class_and_nothing_is_kept(
    mixed_prompts: frozenset[int], seed: int
) -> None:
    hub = ScriptedHub(seed, scores_of(mixed_prompts))
    batches = sample(hub, "abort")
    for batch in batches:
        kept_tokens = sum(r.num_generated for group in batch.groups for r in group.rollouts)
        assert kept_tokens + sum(batch.unused_tokens.values()) == batch.generated_tokens
        assert batch.unused_tokens.keys() <= {"surplus_cut", "surplus_aborted"}
    for _ in range(200):
        hub.poll(0)
    assert hub.kept_ids == {group_id for batch in batches for group_id in batch.delivered_ids}
    assert not any(collector.running for collector in hub.collectors.values())


def test_responses_of_the_surplus_are_aborted() -> None:
    """At least in one of several orders, and their tokens have a class of their own."""
    hubs = [ScriptedHub(seed, scores_of(THREE_OF_FOUR)) for seed in range(10)]
    batches = [batch for hub in hubs for batch in sample(hub, "abort")]
    assert sum(hub.num_aborted for hub in hubs) > 10
    assert sum(batch.unused_tokens.get("surplus_aborted", 0) for batch in batches) > 0
    assert sum(batch.unused_tokens.get("surplus_cut", 0) for batch in batches) > 0


@few_examples
@given(MIXED_PROMPTS, st.integers(0, 2**32))
def test_a_lost_collector_changes_nothing_that_trains(
    mixed_prompts: frozenset[int], seed: int
) -> None:
    scores = scores_of(mixed_prompts)
    whole = sample(ScriptedHub(seed, scores), "abort")
    hub = ScriptedHub(seed, scores, num_nodes=2)
    sampler = open_sampler(hub, "abort")
    losses = random.Random(seed)
    num_losses = Counter(left=5)
    poll = hub.poll

    def poll_with_losses(timeout_seconds: float) -> object:
        if num_losses["left"] and losses.random() < 0.05:
            num_losses["left"] -= 1
            hub.lose(losses.choice(hub.nodes))
        return poll(timeout_seconds)

    hub.poll = poll_with_losses  # type: ignore[assignment, method-assign]
    for step, batch in enumerate(whole, 1):
        assert contents(sampler.sample(step).groups) == contents(batch.groups)


def test_tokens_of_a_checkpoint_are_in_the_account_and_were_not_sampled_by_this_run() -> None:
    """One saved group decides the step, another one waits, and a third one is aborted."""
    (whole, *_) = sample(ScriptedHub(1, scores_of(THREE_OF_FOUR)), "finish")
    saved_groups = [
        saved_group(group, (2,) if group.group_id == "step-1-7" else ())
        for group in whole.all_groups
        if group.group_id in ("step-1-4", "step-1-6", "step-1-7")
    ]
    assert [group.num_tokens for group in saved_groups] == [12, 12, 12]
    hub = ScriptedHub(3, scores_of(THREE_OF_FOUR))
    hub.endless_ids = {"step-1-7"}
    sampler = open_sampler(hub, "abort")
    sampler.queue.restore(SavedGroups(saved_groups))
    batch = sampler.sample(1)
    assert [group.group_id for group in batch.groups] == [f"step-1-{index}" for index in range(5)]
    kept_tokens = sum(r.num_generated for group in batch.groups for r in group.rollouts)
    assert kept_tokens + sum(batch.unused_tokens.values()) == batch.generated_tokens
    assert batch.generated_tokens == hub.num_tokens + 3 * 12
    assert sampler.count_tokens() == hub.num_tokens


def test_tokens_of_steps_that_a_checkpoint_had_begun_are_dropped_with_the_others() -> None:
    (first, second, *_) = sample(ScriptedHub(1, scores_of(THREE_OF_FOUR)), "finish")
    hub = ScriptedHub(3, scores_of(THREE_OF_FOUR))
    sampler = open_sampler(hub, "finish")
    later_groups = [saved_group(group, ()) for group in second.all_groups[:2]]
    sampler.queue.restore(SavedGroups(later_groups))
    assert contents(sampler.sample(1).groups) == contents(first.groups)
    assert (sampler.drop_open(), sampler.drop_open()) == (24, 0)
    sampler.sample(2)
    assert sampler.count_tokens() == hub.num_tokens


def test_tokens_of_a_checkpoint_are_dropped_with_a_step_that_has_begun_again() -> None:
    """One of its groups is whole, and a collector continues another one."""
    (first, *_) = sample(ScriptedHub(1, scores_of(THREE_OF_FOUR)), "finish")
    hub = ScriptedHub(3, scores_of(THREE_OF_FOUR))
    sampler = open_sampler(hub, "finish")
    whole, part, *_ = first.all_groups
    sampler.queue.restore(SavedGroups([saved_group(whole, ()), saved_group(part, (2,))]))
    sampler.begin_step(1)
    num_tokens = sampler.drop_open()
    assert num_tokens == 24 + hub.num_tokens > 24
    assert sampler.drop_open() == 0
    assert sampler.count_tokens() == hub.num_tokens


@given(st.integers(0, 2**32), st.integers(0, 30))
def test_tokens_of_all_open_steps_are_counted_when_they_are_dropped(
    seed: int, num_polls: int
) -> None:
    """Tokens of groups that have arrived, of groups on their way, and of aborted ones."""
    hub = ScriptedHub(seed, scores_of(THREE_OF_FOUR))
    source = PromptSource(POOL, POOL[:1], DataSettings(source="column_addition", shuffle=False))
    queue = RolloutQueue(hub, SETTINGS)  # type: ignore[arg-type]
    queue.configure({})
    sampler = RolloutSampler(queue, SETTINGS, Uniform(source, SETTINGS), (1,), idle)
    for step in (1, 2, 3):
        sampler.begin_step(step)
    batch = sampler.finish_step()
    assert batch is not None
    for _ in range(num_polls):
        queue.count_in_flight()  # handles an event
    assert sampler.drop_open() == hub.num_tokens - batch.generated_tokens
    assert hub.kept_ids == set(batch.delivered_ids)
    assert sampler.open_steps == ()


def saved_group(group: Group, open_samples: tuple[int, ...]) -> SavedGroup:
    rollouts = [replace(make_rollout(2, 3), sample_index=place) for place in range(3)]
    return SavedGroup(msgspec.structs.replace(group, open_samples=open_samples), rollouts)


def test_a_finished_surplus_has_no_class_of_its_own() -> None:
    (batch, *_) = sample(ScriptedHub(1, scores_of(frozenset(range(0, 40, 2)))), "finish")
    assert batch.unused_tokens == MappingProxyType({}) == {}


class Stopped(Exception):
    """A stop request."""


def test_a_step_ends_although_its_surplus_never_does() -> None:
    hub = ScriptedHub(3, scores_of(THREE_OF_FOUR))
    hub.endless_ids = {"step-1-6", "step-1-7"}
    batch = open_sampler(hub, "abort").sample(1)
    assert [group.group_id for group in batch.groups] == [f"step-1-{index}" for index in range(5)]
    assert batch.selection_metrics["select/surplus"] == 3
    assert hub.num_aborted >= 2


def test_a_stop_while_the_surplus_is_aborted_leaves_the_step_open() -> None:
    """The step can be dropped then, and sampled again under the same ids."""
    scores = scores_of(THREE_OF_FOUR)
    (first_batch, *_) = sample(ScriptedHub(5, scores), "abort")
    hub = ScriptedHub(3, scores)
    hub.endless_ids = {"step-1-6", "step-1-7"}
    sampler = open_sampler(hub, "abort")

    def stop() -> None:
        raise Stopped

    abort = sampler.queue.abort
    sampler.queue.abort = lambda ids, idle: abort(ids, stop)  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        sampler.sample(1)
    assert sampler.open_steps == (1,)
    sampler.queue.abort = abort  # type: ignore[method-assign]
    sampler.drop_open()
    assert contents(sampler.sample(1).groups) == contents(first_batch.groups)
    assert sampler.state().prompts.position == 8


def test_a_surplus_that_is_not_aborted_in_time_ends_without_its_tokens() -> None:
    hub = ScriptedHub(3, scores_of(THREE_OF_FOUR))
    hub.endless_ids = {"step-1-6", "step-1-7"}
    send = hub.send

    def send_but_aborts(node: int, message: ToCollector) -> None:
        if not (isinstance(message, Drop) and message.is_reported):
            send(node, message)

    hub.send = send_but_aborts  # type: ignore[method-assign]
    lines: list[str] = []
    sampler = open_sampler(hub, "abort", log=lines.append, abort_seconds=0.05)
    assert len(sampler.sample(1).groups) == 5
    assert lines == [
        "warning: engines did not abort requests within 0.05 s. Their tokens are in no class of "
        "the account"
    ]
    assert not hub.collectors[0].running.keys() & hub.endless_ids, "they were withdrawn"
