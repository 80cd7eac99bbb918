"""Groups that are sampled again with other scores: extended, used and weighted by these."""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import (
    DataSettings,
    RolloutSettings,
    SelectionSettings,
)
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.acceptance import Acceptance
from megatron_rl.prompts.selection.belief_selector import BeliefSelector
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.importance_weights import extension_weight
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch, TooManyRejected
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.rollouts.wire.messages import GroupRequest, ToCollector, first_id
from tests.support.answers import make_pool
from tests.support.groups import NOWHERE
from tests.support.scripted_hub import ScriptedHub
from tests.support.stop_requests import ScriptedStop

POOL = make_pool(90)
GROUP_SIZE = 6
Skip = Literal["all_correct", "zero_variance"]
SELECTIONS = {
    "uniform": SelectionSettings(name="uniform"),
    "oversample": SelectionSettings(name="oversample"),
    "oversample abort": SelectionSettings(name="oversample", surplus="abort"),
    **{
        f"belief {skip}": SelectionSettings(
            name="belief",
            skip=skip,
            probe_samples=3,
            reweight=4,
        )
        for skip in ("all_correct", "zero_variance")
    },
}
# Every prompt is probably useless, so that it gets a probe first
PROBE_ALL = Acceptance(exponent=1, target=1.0)
EXTENDED_KINDS = {
    "all_correct": {GroupKind.MIXED, GroupKind.ALL_INCORRECT},
    "zero_variance": {GroupKind.MIXED},
}


def score(prompt_id: str, place: int) -> float:
    """Pass rates of 0, 1 and in between."""
    rate = (0.0, 0.5, 1.0)[int(prompt_id[1:]) % 3]
    return float(random.Random(f"{prompt_id}/{place}").random() < rate)


def other_score(prompt_id: str, place: int) -> float:
    """Other pass rates, as engines have after a sync."""
    return score(f"p{int(prompt_id[1:]) // 3 + 1}", place + 1000)


@dataclass
class LossyRun:
    """Samples one step, at once or ahead, and loses groups of it before it trains.

    probes: the sizes of the first requests, by group id. num_before: the tokens that were sampled
    before the first loss. num_losses: of collectors.
    """

    name: str
    max_staleness: int
    hub: ScriptedHub

    def __post_init__(self) -> None:
        self.settings = RolloutSettings(
            max_new_tokens=8,
            prompts_per_step=5,
            samples_per_prompt=GROUP_SIZE,
            max_staleness=self.max_staleness,
        )
        self.probes: dict[str, int] = {}
        self.ahead = StepsAhead(self.max_staleness)
        self.num_before = 0
        self.num_losses = 1
        self.open()

    @property
    def step(self) -> int:
        return 1 + self.max_staleness

    def open(self) -> None:
        """Open what rank 0 has, with the collectors of the hub."""
        send = self.hub.send

        def send_and_note(node: int, message: ToCollector) -> None:
            if isinstance(message, GroupRequest) and not message.first_sample:
                self.probes.setdefault(message.group_id, message.num_samples)
            send(node, message)

        self.hub.send = send_and_note  # type: ignore[method-assign]
        source = PromptSource(POOL, POOL[:1], DataSettings(source="column_addition"))
        selection = SELECTIONS[self.name]
        selector = open_selector(source, self.settings, selection, seed=0)
        if selection.name == "belief":
            selector = BeliefSelector(
                source, self.settings, selection, seed=0, acceptance=PROBE_ALL
            )
        queue = RolloutQueue(self.hub, self.settings)  # type: ignore[arg-type]
        queue.configure({})
        self.sampler = RolloutSampler(queue, self.settings, selector, (1,), lambda: None)

    def sample(self) -> RolloutBatch:
        """Return the batch of the step before anything is lost."""
        if not self.max_staleness:
            return self.sampler.sample(1)
        first_batch = self.ahead.take(1, self.sampler)
        self.sampler.queue.drop(first_batch.delivered_ids)
        self.ahead.begin_next(1, 2, self.sampler)
        self.ahead.complete(self.sampler)
        return self.ahead.batches[2]

    def resume(self, batch: RolloutBatch) -> RolloutBatch:
        """Go on from a checkpoint that has the batch. Returns it, read by a collector."""
        self.hub = ScriptedHub(1, score, num_nodes=2)
        self.open()
        groups = tuple(
            msgspec.structs.replace(
                group,
                rollouts=tuple(
                    msgspec.structs.replace(ref, location=NOWHERE) for ref in group.rollouts
                ),
            )
            for group in batch.all_groups
        )
        num_used = len(batch.groups)
        num_stopped = len(batch.stopped_groups)
        saved_batch = RolloutBatch(
            groups[:num_used],
            batch.generated_tokens,
            stopped_groups=groups[num_used : num_used + num_stopped],
            surplus_groups=groups[num_used + num_stopped :],
            delivered_ids=tuple(group.group_id for group in groups),
            selection_metrics=batch.selection_metrics,
        ).restored(self.step)
        sampling = Sampling(max_new_tokens=8, temperature=1.0)
        starts = [SavedGroup(group, ()) for group in groups]
        self.sampler.queue.hold_saved(starts, sampling, GROUP_SIZE)
        self.ahead = StepsAhead(self.max_staleness)
        self.ahead.restore({self.step: saved_batch})
        self.ahead.complete_for_save(self.sampler, ScriptedStop())
        assert self.sampler.queue.lost_groups(saved_batch.delivered_ids) == []
        assert self.sampler.queue.num_repeated == self.sampler.count_tokens() == 0
        return self.ahead.batches[self.step]

    def lose(self, batch: RolloutBatch) -> list[str]:
        """Lose a collector. Engines give other scores from then on."""
        self.sampler.count_tokens()
        self.num_before = self.hub.num_tokens
        self.hub.score = other_score
        self.hub.score_seconds = 1.0
        self.hub.lose(self.hub.rng.choice(self.hub.nodes))
        self.drain()
        return self.sampler.queue.lost_groups(batch.delivered_ids)

    def num_kept(self, group_id: str, lost_ids: Collection[str]) -> int:
        """Return how many of the first rollouts of a group are not lost."""
        if group_id in lost_ids:
            return 0
        is_probe_left = any(first_id(id_) == group_id for id_ in lost_ids)
        return self.probes[group_id] if is_probe_left else GROUP_SIZE

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        if not self.max_staleness:
            return self.sampler.replace_lost(batch)
        return self.ahead.take(self.step, self.sampler)

    def drain(self) -> None:
        """Let collectors do all that they have to."""
        for _ in range(200):
            self.sampler.queue.lost_groups([])  # handles events

    def check(self, old_batch: RolloutBatch, old_tokens: int, batch: RolloutBatch) -> None:
        """Check what holds for any selection."""
        ids = [group.group_id for group in batch.all_groups]
        assert sorted(ids) == sorted(group.group_id for group in old_batch.all_groups)
        assert batch.generated_tokens == old_batch.generated_tokens + num_tokens(batch) - old_tokens
        # Collectors that are lost meanwhile cannot say what was sampled for them
        num_counted = self.sampler.count_tokens()
        assert num_counted <= self.hub.num_tokens - self.num_before
        assert num_counted == self.hub.num_tokens - self.num_before or self.num_losses > 1
        self.drain()
        assert self.hub.kept_ids == set(batch.delivered_ids)
        assert self.sampler.queue.lost_groups(batch.delivered_ids) == []


def num_tokens(batch: RolloutBatch) -> int:
    return sum(map(sampled_tokens, batch.all_groups))


def by_id(batch: RolloutBatch) -> dict[str, tuple[str, Group]]:
    """Return the groups of a batch with their class."""
    classes = {
        "used": batch.groups,
        "stopped": batch.stopped_groups,
        "surplus": batch.surplus_groups,
    }
    return {g.group_id: (name, g) for name, groups in classes.items() for g in groups}


def scores_of(group: Group) -> list[float | None]:
    return [ref.verdict.correctness for ref in group.rollouts]


def class_and_weight(run: LossyRun, group: Group) -> tuple[str, float]:
    """Return what the selection decides on a group of a probe, from the definitions."""
    skip = SELECTIONS[run.name].skip
    probe = run.probes[group.group_id]
    first = msgspec.structs.replace(group, rollouts=group.rollouts[:probe])
    is_whole = probe == GROUP_SIZE or kind_of(first) in EXTENDED_KINDS[skip]
    assert len(group.rollouts) == (GROUP_SIZE if is_whole else probe)
    weight = group.prompt_weight
    if is_whole and probe < GROUP_SIZE and kind_of(group) is GroupKind.MIXED:
        weight *= extension_weight(group, probe, skip=skip)
    return "used" if is_whole else "stopped", weight


def any_seed(test: Callable[..., None]) -> Callable[..., None]:
    num_examples = settings.default.max_examples // 5  # each samples a whole step several times
    return settings(max_examples=num_examples)(given(seed=st.integers(0, 2**32))(test))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("name", ["belief all_correct", "belief zero_variance"])
@any_seed
def test_lost_probes_are_decided_again(name: str, max_staleness: int, seed: int) -> None:
    """An extension that is lost alone comes for the scores of its probe."""
    run = LossyRun(name, max_staleness, ScriptedHub(seed, score, num_nodes=2))
    old_batch = run.sample()
    beliefs = run.sampler.state()
    old_groups = by_id(old_batch)
    old_tokens = num_tokens(old_batch)
    lost_ids = set(run.lose(old_batch))
    batch = run.replace_lost(old_batch)
    assert run.sampler.state() == beliefs, "the selection has learned from the lost ones"
    for group_id, (used, group) in by_id(batch).items():
        expected_use, weight = class_and_weight(run, group)
        assert used == expected_use
        num_kept = run.num_kept(group_id, lost_ids)
        assert scores_of(group) == [
            (score if place < num_kept else other_score)(group.prompt.id, place)
            for place in range(len(group.rollouts))
        ]
        if used == "used":
            assert group.weight == weight
        if num_kept == GROUP_SIZE:
            assert old_groups[group_id] == (used, group)
    run.check(old_batch, old_tokens, batch)


@pytest.mark.parametrize("name", ["belief all_correct", "belief zero_variance"])
def test_probes_change_their_class(name: str) -> None:
    """Otherwise the other tests could not fail."""
    run = LossyRun(name, 0, ScriptedHub(0, score, num_nodes=1))
    old_batch = run.sample()
    old_groups = by_id(old_batch)
    run.lose(old_batch)
    new_groups = by_id(run.replace_lost(old_batch))
    changes = {(old_groups[id_][0], used) for id_, (used, _) in new_groups.items()}
    assert changes >= {("used", "stopped"), ("stopped", "used")}
    assert max(group.prompt_weight for _, group in new_groups.values()) > 1.0


@pytest.mark.parametrize("skip", ["all_correct", "zero_variance"])
def test_the_weight_of_a_probe_that_is_stopped_the_second_time(skip: Skip) -> None:
    """The weight is the same as for a probe that is stopped at once."""
    name = f"belief {skip}"
    run = LossyRun(name, 0, ScriptedHub(0, lambda p, i: float(i % 2), num_nodes=1))
    old_batch = run.sample()
    assert not old_batch.stopped_groups
    run.lose(old_batch)
    run.hub.score = lambda p, i: 1.0
    batch = run.replace_lost(old_batch)
    other = LossyRun(name, 0, ScriptedHub(0, lambda p, i: 1.0, num_nodes=1)).sample()
    expected_weights = {group.prompt.id: group.weight for group in other.stopped_groups}
    assert batch.stopped_groups and not all(group.weight == 1 for group in batch.stopped_groups)
    for group in batch.stopped_groups:
        assert group.weight == expected_weights[group.prompt.id]


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("name", ["uniform", "oversample", "oversample abort"])
@any_seed
def test_whole_groups_are_used_by_their_new_scores(
    name: str, max_staleness: int, seed: int
) -> None:
    run = LossyRun(name, max_staleness, ScriptedHub(seed, score, num_nodes=2))
    old_batch = run.sample()
    old_tokens = num_tokens(old_batch)
    lost_ids = run.lose(old_batch)
    batch = run.replace_lost(old_batch)
    groups = sorted(batch.all_groups, key=lambda group: int(group.group_id.split("-")[2]))
    num_mixed = 0
    for group in groups:
        rule = other_score if group.group_id in lost_ids else score
        assert scores_of(group) == [rule(group.prompt.id, i) for i in range(GROUP_SIZE)]
        num_mixed += kind_of(group) is GroupKind.MIXED
        is_surplus = kind_of(group) is GroupKind.MIXED and num_mixed > 5 and name != "uniform"
        assert (group in batch.surplus_groups) == is_surplus
        assert (group in batch.groups) == (not is_surplus)
        assert group.weight == 1.0
    if name == "oversample":
        assert batch.selection_metrics["select/mixed"] == min(num_mixed, 5)
    run.check(old_batch, old_tokens, batch)


@pytest.mark.parametrize("name", list(SELECTIONS))
@any_seed
def test_groups_of_a_checkpoint_keep_their_class_and_weight(name: str, seed: int) -> None:
    """A lost one becomes a whole group with the weight of its prompt."""
    run = LossyRun(name, 1, ScriptedHub(seed, score, num_nodes=2))
    old_batch = run.sample()
    batch = run.resume(old_batch)
    assert by_id(batch) == by_id(old_batch)
    assert batch.selection_metrics == old_batch.selection_metrics
    old_groups = by_id(batch)
    old_tokens = num_tokens(batch)
    lost_ids = run.lose(batch)
    new_batch = run.replace_lost(batch)
    for group_id, (used, group) in by_id(new_batch).items():
        old_use, old_group = old_groups[group_id]
        if group_id not in lost_ids:
            assert (used, group) == (old_use, old_group)
            continue
        assert scores_of(group) == [other_score(group.prompt.id, i) for i in range(GROUP_SIZE)]
        assert group.weight == group.prompt_weight == old_group.prompt_weight
        is_surplus = old_use == "surplus" and kind_of(group) is GroupKind.MIXED
        assert used == ("surplus" if is_surplus else "used")
    run.check(batch, old_tokens, new_batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SELECTIONS))
@pytest.mark.parametrize("resumes", [False, True])
@any_seed
def test_further_losses_change_nothing(name: str, resumes: bool, seed: int) -> None:
    """Each group is there once at the end, whatever is lost while others come again."""
    run = LossyRun(name, 1, ScriptedHub(seed, score, num_nodes=3))
    old_batch = run.sample()
    if resumes:
        old_batch = run.resume(old_batch)
    old_tokens = num_tokens(old_batch)
    run.lose(old_batch)
    poll = run.hub.poll

    def poll_with_losses(timeout_seconds: float) -> Any:
        if run.num_losses < 5 and run.hub.rng.random() < 0.05:
            run.num_losses += 1
            run.hub.lose(run.hub.rng.choice(run.hub.nodes))
        return poll(timeout_seconds)

    run.hub.poll = poll_with_losses  # type: ignore[method-assign]
    batch = run.replace_lost(old_batch)
    run.hub.poll = poll  # type: ignore[method-assign]
    run.drain()
    batch = run.sampler.replace_lost(batch)
    run.check(old_batch, old_tokens, batch)
    if not resumes and name.startswith("belief"):
        for used, group in by_id(batch).values():
            assert used == class_and_weight(run, group)[0]


def test_rollouts_that_ranks_cannot_read_are_decided_again() -> None:
    """Their collector is there, but a rank did not get them."""
    run = LossyRun("belief zero_variance", 0, ScriptedHub(0, score, num_nodes=2))
    old_batch = run.sample()
    group = next(group for group in old_batch.groups if f"{group.group_id}+3" in probe_ids(run))
    run.hub.score = lambda prompt_id, place: 1.0
    batch = run.sampler.sample_again(1, old_batch, [group.rollouts[0].rollout_id])
    used, new_group = by_id(batch)[group.group_id]
    assert (used, scores_of(new_group)) == ("stopped", [1.0] * 3)
    assert batch.num_repeated == old_batch.num_repeated + 1
    run.drain()
    assert run.hub.kept_ids == set(batch.delivered_ids)


def probe_ids(run: LossyRun) -> set[str]:
    return {id_ for id_ in run.hub.kept_ids if "+" in id_}


def test_a_batch_that_is_sampled_again_in_vain_leaves_no_group_behind() -> None:
    """Its prompts may be selected again, under the same ids, also of extensions that are new."""
    run = LossyRun("belief zero_variance", 1, ScriptedHub(0, lambda p, i: 1.0, num_nodes=1))
    old_batch = run.sample()
    assert old_batch.stopped_groups and not probe_ids(run)
    run.lose(old_batch)
    answer = run.hub.answer

    def with_rejections(request: GroupRequest) -> Group:
        group = answer(request)
        num_rejected = len(group.rollouts) - 2
        return msgspec.structs.replace(
            group,
            rollouts=group.rollouts[:2],
            rejections={"engine": num_rejected},
            rejected_tokens={"engine": 4 * num_rejected},
        )

    run.hub.score = lambda prompt_id, place: float(place % 2)
    run.hub.answer = with_rejections
    run.ahead.complete_for_save(run.sampler, ScriptedStop())
    assert probe_ids(run)
    group_ids, num_dropped = run.ahead.drop(run.sampler)
    assert num_dropped == sum(map(run.sampler.queue.tokens_of, group_ids))
    run.sampler.queue.drop(group_ids)
    assert run.hub.kept_ids == set()
    run.hub.answer = answer
    run.sampler.begin_step(2)
    assert run.sampler.finish_step() is not None


def test_a_batch_that_is_sampled_again_in_vain_fails_its_step() -> None:
    run = LossyRun("uniform", 1, ScriptedHub(0, score, num_nodes=1))
    old_batch = run.sample()
    run.lose(old_batch)
    run.hub.score = lambda prompt_id, place: None
    answer = run.hub.answer

    def with_rejections(request: GroupRequest) -> Group:
        return msgspec.structs.replace(answer(request), rollouts=(), rejections={"engine": 6})

    run.hub.answer = with_rejections
    with pytest.raises(TooManyRejected, match="batch step-2"):
        run.replace_lost(old_batch)
