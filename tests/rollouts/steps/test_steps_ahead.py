"""Steps that are sampled ahead: each group is trained once, at the right age, in any order."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.contracts.group import Group, RolloutRef, sampled_tokens
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.engines.token_counter import TokenComparison, TokenCounter
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.selection.selector import Selector
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.queue.saved_groups import SavedGroup, SavedGroups
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch, TooManyRejected
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.rollouts.wire.messages import GroupRequest
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout
from tests.support.stop_requests import ScriptedStop

PROMPTS = [Prompt(id=f"p{n}", token_ids=(1, 2), answer="3", task="t") for n in range(40)]
ROLLOUT = make_rollout(2, 3)
REF = make_ref(ROLLOUT)


class NothingArrives(Exception):
    """The queue waits for an engine, which never comes."""


@dataclass
class SimulatedQueue:
    """Answers requests in a random order, with the version that serves at that time.

    A rollout is correct or not by its prompt and number alone. Nothing is answered while `serves`
    is False.
    """

    order: random.Random
    version: int = 0
    serves: bool = True
    num_repeated: int = 0
    engines_left_out: tuple[str, ...] = ()
    lost_ids: set[str] = field(default_factory=set)
    saved_ids: set[str] = field(default_factory=set)  # of groups that a checkpoint has
    deliveries: Counter[str] = field(default_factory=Counter)
    checkpoint: SavedGroups = field(default_factory=SavedGroups)
    rejects: bool = False  # all rollouts of the groups that are sampled
    _read_ids: set[str] = field(default_factory=set)  # of groups that are read from a checkpoint
    _ready: list[Group] = field(default_factory=list)  # that have arrived
    _outstanding: dict[str, GroupRequest] = field(default_factory=dict)
    _delivered_requests: dict[str, GroupRequest] = field(default_factory=dict)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            assert request.group_id not in self._outstanding | self._delivered_requests
            checkpoint = self.checkpoint.take(request)
            if checkpoint is not None and checkpoint.is_finished:
                self._delivered_requests[request.group_id] = request
                self._ready.append(checkpoint.group)
            else:
                self._outstanding[request.group_id] = request

    def as_completed(
        self, idle: Callable[[], None], *, is_wanted: Callable[[str], bool]
    ) -> Iterator[Group]:
        while True:
            while ready := [group for group in self._ready if is_wanted(group.group_id)]:
                self._ready.remove(ready[0])
                yield ready[0]
            if not any(map(is_wanted, self._outstanding)):
                return
            idle()
            if not self.serves:
                raise NothingArrives
            # Groups of later steps arrive meanwhile
            self._ready.append(self._answer(self.order.choice(sorted(self._outstanding))))

    def tokens_of(self, group_id: str) -> int:
        return 3 * self._delivered_requests[group_id].num_samples

    def saved_tokens_of(self, group_id: str) -> int:
        return self.tokens_of(group_id) if group_id in self._read_ids else 0

    def lost_groups(self, group_ids: Sequence[str]) -> list[str]:
        return [group_id for group_id in group_ids if group_id in self.lost_ids]

    def request_again(self, group_ids: Sequence[str]) -> int:
        num_repeated = len(set(group_ids) - self.saved_ids)
        self.num_repeated += num_repeated
        self._read_ids -= set(group_ids)
        self._read_ids |= set(group_ids) & self.saved_ids
        self.lost_ids -= set(group_ids)
        self.saved_ids -= set(group_ids)
        self.submit([self._delivered_requests.pop(group_id) for group_id in group_ids])
        return num_repeated

    def hold(self, other: SimulatedQueue, group_ids: Sequence[str]) -> None:
        """Hold delivered groups of another queue."""
        self._delivered_requests |= {id_: other._delivered_requests[id_] for id_ in group_ids}

    def hold_saved(self, other: SimulatedQueue, group_ids: Sequence[str]) -> None:
        """Hold delivered groups of another queue like groups of a checkpoint."""
        self.hold(other, group_ids)
        self.saved_ids |= set(group_ids)
        self.lost_ids |= set(group_ids)

    def drop_saved(self) -> int:
        return self.checkpoint.drop()

    def abort(self, group_ids: Sequence[str], idle: Callable[[], None]) -> tuple[int, int]:
        num_tokens = sum(map(self.tokens_of, set(group_ids) & self._delivered_requests.keys()))
        self.drop(group_ids)
        return num_tokens, 0

    def drop(self, group_ids: Sequence[str]) -> None:
        for group_id in group_ids:
            self._outstanding.pop(group_id, None)
            self._delivered_requests.pop(group_id, None)
            self._ready = [group for group in self._ready if group.group_id != group_id]

    def arrived_groups(self, group_ids: Collection[str]) -> list[Group]:
        wanted_ids = set(group_ids) - self.lost_ids
        return [group for group in self._ready if group.group_id in wanted_ids]

    def partials(self) -> list[Group]:
        """Return the state of some open groups: all their rollouts are open, and have no token."""
        return [
            Group(
                group_id=group_id,
                prompt=request.prompt,
                rollouts=(),
                open_samples=tuple(range(request.num_samples)),
            )
            for group_id, request in self._outstanding.items()
            if self.order.random() < 0.5
        ]

    @property
    def held_ids(self) -> list[str]:
        return sorted(self._delivered_requests)

    @property
    def is_empty(self) -> bool:
        return not self._outstanding

    def _answer(self, group_id: str) -> Group:
        request = self._outstanding.pop(group_id)
        self._delivered_requests[group_id] = request
        self.deliveries[group_id] += 1
        first = request.first_sample
        refs = tuple(
            self._rollout(request, number) for number in range(first, first + request.num_samples)
        )
        if self.rejects:
            rejections = {"engine": len(refs)}
            return Group(
                group_id=group_id, prompt=request.prompt, rollouts=(), rejections=rejections
            )
        return Group(group_id=group_id, prompt=request.prompt, rollouts=refs)

    def _rollout(self, request: GroupRequest, number: int) -> RolloutRef:
        is_correct = float((int(request.prompt.id[1:]) * 7 + number * number) % 3 == 0)
        verdict = msgspec.structs.replace(REF.verdict, reward=is_correct, correctness=is_correct)
        return msgspec.structs.replace(
            REF,
            rollout_id=f"{request.group_id}/{number}",
            prompt_id=request.prompt.id,
            sample_index=number,
            num_generated=3,
            verdict=verdict,
            tokens_by_version=((self.version, 3),),
        )


@dataclass
class SimulatedRun:
    """Trains `steps` steps with faults, and notes which rollouts each of them trains."""

    queue: SimulatedQueue
    sampler: RolloutSampler
    ahead: StepsAhead
    continues: bool = False
    trained_ids: dict[int, list[str]] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)

    def run(self, steps: int, faults: dict[int, str]) -> SimulatedRun:
        for step in range(1, steps + 1):
            self.ahead.begin_open(step, steps, self.sampler)
            batch = self.ahead.take(step, self.sampler)
            self.ahead.begin_next(step, steps, self.sampler)
            fault = faults.get(step, "")
            if fault == "collector ends" and self.queue.held_ids:
                lost_id = self.queue.order.choice(self.queue.held_ids)
                self.queue.lost_ids.add(lost_id)
            self._train(step, self._with_all_rollouts(step, batch))
            if self.continues:
                self.queue.version += 1
                if fault == "checkpoint":
                    self.ahead.complete_for_save(self.sampler, ScriptedStop())
                if fault == "drop":
                    self.drop_ahead()
                if fault == "kill":
                    self._resume()
            else:
                self._wait_and_sync(fault)
        return self

    def drop_ahead(self) -> None:
        """Drop what was sampled ahead, as a run does at its end."""
        group_ids, _ = self.ahead.drop(self.sampler)
        self.queue.drop(group_ids)
        assert self.queue.held_ids == [] and self.queue.is_empty

    def _resume(self) -> None:
        """End everything but a checkpoint, and go on from there."""
        open_groups = self.sampler.open_groups(self.queue.partials())
        assert tuple(open_groups) == self.sampler.open_steps
        batches = self.ahead.batches
        state = self.sampler.state()
        queue = SimulatedQueue(
            self.queue.order, self.queue.version, deliveries=self.queue.deliveries
        )
        queue.checkpoint = SavedGroups(
            SavedGroup(group, [ROLLOUT] * len(group.rollouts))
            for groups in open_groups.values()
            for group in groups
        )
        for batch in batches.values():
            queue.hold(self.queue, batch.delivered_ids)
        self.queue = queue
        scripted_queue: Any = queue
        settings = self.sampler.settings
        self.sampler = RolloutSampler(
            scripted_queue, settings, make_selector("uniform", settings), (1,), lambda: None
        )
        self.sampler.restore(state)
        self.ahead = StepsAhead(settings.max_staleness, continues_responses=True)
        restored_batches = {step: batch.restored(step) for step, batch in batches.items()}
        self.ahead.restore(restored_batches, tuple(open_groups))

    def _with_all_rollouts(self, step: int, batch: RolloutBatch) -> RolloutBatch:
        lost_ids = self.queue.lost_groups(batch.delivered_ids)
        if not lost_ids:
            return batch
        rollouts = [r.rollout_id for i in lost_ids for r in parts_of(batch)[i].rollouts]
        return self.sampler.sample_again(step, batch, rollouts)

    def _wait_and_sync(self, fault: str) -> None:
        self.queue.serves = fault != "no engine"
        self.ahead.complete(self.sampler, lambda: self.queue.serves)
        self.queue.version += 1
        self.queue.serves = True
        self.ahead.complete(self.sampler)
        assert self.queue.is_empty

    def _train(self, step: int, batch: RolloutBatch) -> None:
        rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
        self.trained_ids[step] = sorted(rollout.rollout_id for rollout in rollouts)
        for rollout in rollouts:
            self.ages[self.queue.version - rollout.tokens_by_version[0][0]] += 1
        self.queue.drop(batch.delivered_ids)


def parts_of(batch: RolloutBatch) -> dict[str, Group]:
    assert batch.sampling is not None
    return batch.sampling.parts


def make_selector(name: str, rollout: RolloutSettings) -> Selector:
    source = PromptSource(PROMPTS, PROMPTS[:1], DataSettings(source="column_addition"))
    return open_selector(source, rollout, SelectionSettings(name=name, probe_samples=2), seed=0)


def make_run(name: str, *, max_staleness: int, seed: int, continues: bool = False) -> SimulatedRun:
    rollout = RolloutSettings(
        max_new_tokens=8, prompts_per_step=4, samples_per_prompt=4, max_staleness=max_staleness
    )
    selector = make_selector(name, rollout)
    queue: Any = SimulatedQueue(random.Random(seed))
    sampler = RolloutSampler(queue, rollout, selector, (1,), lambda: None)
    ahead = StepsAhead(max_staleness, continues_responses=continues)
    return SimulatedRun(queue, sampler, ahead, continues)


@pytest.mark.slow
@settings(max_examples=2 * settings.default.max_examples)
@given(
    name=st.sampled_from(["uniform", "oversample", "belief"]),
    max_staleness=st.integers(0, 2),
    seed=st.integers(0, 2**20),
    faults=st.dictionaries(
        st.integers(1, 12), st.sampled_from(["no engine", "collector ends"]), max_size=5
    ),
)
def test_every_group_is_trained_once_and_never_too_old(
    name: str, max_staleness: int, seed: int, faults: dict[int, str]
) -> None:
    calm_run = make_run(name, max_staleness=max_staleness, seed=0).run(12, {})
    run = make_run(name, max_staleness=max_staleness, seed=seed).run(12, faults)
    assert run.trained_ids == calm_run.trained_ids
    ids = [rollout_id for ids in run.trained_ids.values() for rollout_id in ids]
    assert len(ids) == len(set(ids))
    assert max(run.ages) <= min(max_staleness, 1)
    assert run.queue.held_ids == [] and not run.queue.lost_ids
    if not faults:
        assert set(run.queue.deliveries.values()) == {1}
        assert set(run.ages) == ({0, 1} if max_staleness else {0})


@pytest.mark.slow
@settings(max_examples=4 * settings.default.max_examples)
@given(
    max_staleness=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    faults=st.dictionaries(
        st.integers(1, 12),
        st.sampled_from(["checkpoint", "collector ends", "drop", "kill"]),
        max_size=5,
    ),
)
def test_responses_that_continue_are_trained_once_and_never_too_old(
    max_staleness: int, seed: int, faults: dict[int, str]
) -> None:
    calm_run = make_run("uniform", max_staleness=0, seed=0).run(12, {})
    run = make_run("uniform", max_staleness=max_staleness, seed=seed, continues=True)
    run.run(12, faults)
    if "drop" not in faults.values():
        assert run.trained_ids == calm_run.trained_ids
    if not {"drop", "collector ends"} & set(faults.values()):
        assert set(run.queue.deliveries.values()) == {1}, "what a checkpoint has is sampled again"
    ids = [rollout_id for ids in run.trained_ids.values() for rollout_id in ids]
    assert len(ids) == len(set(ids)) == 12 * 16
    for step, rollout_ids in run.trained_ids.items():
        assert all(rollout_id.startswith(f"step-{step}-") for rollout_id in rollout_ids)
    assert max(run.ages) <= max_staleness
    assert run.queue.held_ids == [] and run.queue.is_empty


def test_a_selector_that_reads_rollouts_has_one_open_step() -> None:
    run = make_run("belief", max_staleness=3, seed=0, continues=True)
    with pytest.raises(ValueError, match="step 1 is open"):
        run.ahead.begin_open(1, 9, run.sampler)


def test_no_more_steps_are_open_than_allowed_and_none_after_the_last_one() -> None:
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.begin_open(4, 9, run.sampler)
    assert run.sampler.open_steps == (4, 5, 6)
    run.ahead.take(4, run.sampler)
    run.ahead.begin_open(5, 6, run.sampler)
    assert run.sampler.open_steps == (5, 6)


def test_steps_that_were_open_in_a_checkpoint_begin_although_their_phase_ends() -> None:
    """Otherwise their responses would draw fewer tokens of the present weights than before."""
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.restore({}, (4, 5, 6), last_step=5)
    run.ahead.begin_open(4, 4, run.sampler)
    assert run.sampler.open_steps == (4, 5)


def test_without_continued_responses_one_step_is_sampled_ahead_at_most() -> None:
    assert StepsAhead(5).max_staleness == 1
    assert StepsAhead(5, continues_responses=True).max_staleness == 5
    assert StepsAhead(0).max_staleness == 0


def test_a_step_is_sampled_while_the_one_before_trains() -> None:
    run = make_run("uniform", max_staleness=1, seed=0)
    batch = run.ahead.take(1, run.sampler)
    assert [group.group_id for group in batch.groups] == [f"step-1-{n}" for n in range(4)]
    run.ahead.begin_next(1, 3, run.sampler)
    assert run.sampler.open_steps == (2,) and not run.queue.is_empty
    run.ahead.complete(run.sampler)
    assert list(run.ahead.batches) == [2] and run.queue.is_empty
    assert run.sampler.count_tokens() == 2 * 48
    assert run.sampler.count_tokens() == 0


def test_no_step_is_sampled_beyond_the_last_one() -> None:
    run = make_run("uniform", max_staleness=2, seed=0)
    run.ahead.take(3, run.sampler)
    run.ahead.begin_next(3, 3, run.sampler)
    assert run.sampler.open_steps == ()


def test_groups_of_a_step_that_is_aborted_are_kept_unless_they_are_lost() -> None:
    run = make_run("uniform", max_staleness=1, seed=0)
    run.sampler.begin_step(1)
    arrivals = iter([True, True, True, False])
    assert run.sampler.finish_step(lambda: next(arrivals)) is None
    known_ids = {group.group_id for group in run.sampler.open_groups([])[1]}
    (last_id,) = {f"step-1-{index}" for index in range(4)} - known_ids
    assert known_ids == set(run.queue.held_ids) and len(known_ids) == 3
    run.queue.lost_ids = {run.queue.held_ids[0]}
    partial = Group(group_id=last_id, prompt=PROMPTS[0], rollouts=(), open_samples=(0,))
    groups = run.sampler.open_groups([partial])[1]
    assert {group.group_id for group in groups} == (known_ids - run.queue.lost_ids) | {last_id}
    assert run.sampler.state().prompts.position == 0  # a resumed run selects the same prompts


def test_without_an_engine_the_next_step_stays_open() -> None:
    run = make_run("uniform", max_staleness=1, seed=0)
    run.ahead.take(1, run.sampler)
    state = run.sampler.state()
    run.ahead.begin_next(1, 9, run.sampler)
    assert run.sampler.selector.state() != state
    run.ahead.complete(run.sampler, lambda: False)
    assert run.sampler.open_steps == (2,) and not run.ahead.batches
    assert run.sampler.state() == state  # a resumed run selects the same prompts
    run.ahead.complete(run.sampler)
    assert list(run.ahead.batches) == [2]
    assert run.sampler.state() != state


def test_a_batch_that_cannot_be_used_is_an_error_of_its_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run("uniform", max_staleness=1, seed=0)
    run.ahead.take(1, run.sampler)
    state = run.sampler.state()
    run.ahead.begin_next(1, 9, run.sampler)

    def refuse(batch: RolloutBatch, label: str) -> None:
        raise TooManyRejected(label)

    monkeypatch.setattr(RolloutBatch, "require", refuse)
    run.ahead.complete(run.sampler)
    assert not run.ahead.batches
    assert run.sampler.state() == state
    with pytest.raises(TooManyRejected, match="step-2"):
        run.ahead.take(2, run.sampler)


def lose(run: SimulatedRun, batch: RolloutBatch, num_groups: int) -> list[str]:
    """Lose the first groups of a batch. What is sampled from then on is rejected."""
    lost_ids = batch.delivered_ids[:num_groups]
    run.queue.lost_ids = set(lost_ids)
    run.queue.rejects = True
    return [rollout.rollout_id for id_ in lost_ids for rollout in parts_of(batch)[id_].rollouts]


@pytest.mark.parametrize("num_lost", [2, 3, 4])
@pytest.mark.parametrize("replaces", [False, True], ids=["sample_again", "replace_lost"])
def test_groups_that_are_sampled_again_may_not_be_rejected_too_often(
    num_lost: int, replaces: bool
) -> None:
    """Half of the rollouts may be rejected."""
    run = make_run("uniform", max_staleness=0, seed=0)
    batch = run.sampler.sample(1)
    rollout_ids = lose(run, batch, num_lost)

    def replace_groups() -> RolloutBatch:
        if replaces:
            new_batch = run.sampler.replace_lost(batch)
            run.sampler.require(1, new_batch)
            return new_batch
        return run.sampler.sample_again(1, batch, rollout_ids)

    if num_lost == 2:
        assert replace_groups().rejections == {"engine": 8}
        return
    with pytest.raises(TooManyRejected, match="batch step-1"):
        replace_groups()


@dataclass
class CountingQueue:
    """The engine behind a queue, which counts what it has sampled."""

    queue: SimulatedQueue
    url: str = "http://engine"

    def generated_tokens(self) -> int:
        return 4 * 3 * self.queue.deliveries.total()


@pytest.mark.parametrize("num_lost", [1, 2])
@pytest.mark.parametrize("num_readings", [1, 2, 3])
def test_the_engines_and_the_run_count_what_is_sampled_again(
    num_lost: int, num_readings: int
) -> None:
    """A collector ends after its batch was counted, with several readings before it is trained."""
    run = make_run("uniform", max_staleness=0, seed=0)
    counter = TokenCounter([CountingQueue(run.queue)], print)
    batch = run.sampler.sample(1)
    assert counter.compare(run.sampler.count_tokens()) == TokenComparison(4 * 12, 0)
    run.queue.lost_ids = set(batch.delivered_ids[:num_lost])
    counter.restart()
    for _ in range(num_readings):
        comparison = counter.compare(run.sampler.count_tokens())
        assert comparison is None or comparison == TokenComparison(0, 0)
    batch = run.sampler.replace_lost(batch)
    assert batch.generated_tokens == sum(map(sampled_tokens, batch.groups)) == 4 * 12
    comparison = counter.compare(run.sampler.count_tokens())
    assert comparison in (None, TokenComparison(num_lost * 12, 0))
    assert (comparison is None) == (num_readings == 1)
    run.sampler.sample(2)
    assert counter.compare(run.sampler.count_tokens()) == TokenComparison(4 * 12, 0)


@pytest.mark.parametrize("saves", [True, False])
def test_a_batch_that_is_sampled_again_in_vain_is_an_error_of_its_own_step(saves: bool) -> None:
    """A checkpoint finds it, or an earlier step that is taken."""
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.begin_open(1, 9, run.sampler)
    run.ahead.take(1, run.sampler)
    run.ahead.complete(run.sampler)
    state = run.ahead.state_before(3)
    lost_batch = run.ahead.batches[3]
    lose(run, lost_batch, 4)
    if saves:
        run.ahead.complete_for_save(run.sampler, ScriptedStop())
        assert list(run.ahead.batches_after(1)) == [2]
    run.ahead.take(2, run.sampler)
    assert run.ahead.batches_after(2) == {}
    assert run.ahead.place(run.sampler) == state != run.sampler.state()
    with pytest.raises(TooManyRejected, match="step-3"):
        run.ahead.take(3, run.sampler)
    assert 3 not in run.ahead.batches


def test_groups_of_a_batch_that_is_sampled_again_in_vain_are_dropped() -> None:
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.begin_open(1, 9, run.sampler)
    batch = run.ahead.take(1, run.sampler)
    run.queue.drop(batch.delivered_ids)
    run.ahead.complete(run.sampler)
    state = run.ahead.state_before(2)
    lose(run, run.ahead.batches[2], 4)
    run.ahead.complete_for_save(run.sampler, ScriptedStop())
    run.drop_ahead()
    assert run.sampler.state() == state


def test_steps_after_one_that_failed_are_selected_again_by_a_resumed_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.begin_open(1, 9, run.sampler)
    run.ahead.take(1, run.sampler)
    state = run.sampler.state()

    def refuse(batch: RolloutBatch, label: str) -> None:
        if label == "step-2":
            raise TooManyRejected(label)

    monkeypatch.setattr(RolloutBatch, "require", refuse)
    for _ in range(2):
        run.ahead.complete_for_save(run.sampler, ScriptedStop())
    assert not run.ahead.batches
    assert run.sampler.state() == state
    with pytest.raises(TooManyRejected, match="step-2"):
        run.ahead.take(2, run.sampler)
    # The failed step and the open one are counted
    later_ids = [id_ for id_ in run.queue.held_ids if not id_.startswith("step-1-")]
    assert any(id_.startswith("step-2-") for id_ in later_ids)
    num_tokens = sum(map(run.queue.tokens_of, later_ids))
    assert run.sampler.drop_open() == num_tokens > 0


@pytest.mark.parametrize("num_waits", [0, 1, 2, 5, 9])
def test_a_stop_request_ends_the_wait_for_open_steps_before_a_checkpoint(num_waits: int) -> None:
    """Steps that are complete by then stay complete, and the rest stays open."""
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.ahead.begin_open(1, 9, run.sampler)
    seconds_to_stop = ScriptedStop()

    waits = itertools.count(1)

    def idle() -> None:
        if next(waits) > num_waits:
            seconds_to_stop.request()

    run.sampler.idle = idle
    run.ahead.complete_for_save(run.sampler, seconds_to_stop)
    assert run.queue.deliveries.total() == num_waits
    complete_steps = list(run.ahead.batches)
    assert [*complete_steps, *run.sampler.open_steps] == [1, 2, 3]


def test_batches_that_are_dropped_are_counted() -> None:
    run = make_run("uniform", max_staleness=1, seed=0)
    batch = run.ahead.take(1, run.sampler)
    run.ahead.begin_next(1, 9, run.sampler)
    run.ahead.complete(run.sampler)
    group_ids, num_tokens = run.ahead.drop(run.sampler)
    assert (sorted(group_ids), num_tokens) == ([f"step-2-{n}" for n in range(4)], 48)
    run.queue.drop([*group_ids, *batch.delivered_ids])
    assert run.queue.held_ids == [] and not run.ahead.batches


@pytest.mark.parametrize("name", ["uniform", "oversample", "belief"])
@pytest.mark.parametrize("continues", [False, True])
def test_prompts_of_dropped_steps_are_selected_again(name: str, continues: bool) -> None:
    run = make_run(name, max_staleness=2, seed=0, continues=continues and name == "uniform")
    run.ahead.begin_open(1, 9, run.sampler)
    run.ahead.take(1, run.sampler)
    state = run.sampler.state()
    run.ahead.begin_next(1, 9, run.sampler)
    run.ahead.complete(run.sampler)
    assert run.sampler.state() != state
    run.ahead.drop(run.sampler)
    assert run.sampler.state() == state


def test_prompts_of_dropped_batches_of_a_checkpoint_are_not_selected_again() -> None:
    first_run = make_run("uniform", max_staleness=1, seed=0)
    first_run.ahead.take(1, first_run.sampler)
    first_run.ahead.begin_next(1, 9, first_run.sampler)
    first_run.ahead.complete(first_run.sampler)
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.sampler.restore(first_run.sampler.state())
    run.ahead.restore(first_run.ahead.batches)
    run.ahead.begin_open(2, 9, run.sampler)
    run.ahead.complete(run.sampler)
    assert list(run.ahead.batches) == [2, 3, 4]
    run.ahead.drop(run.sampler)
    assert run.sampler.state() == first_run.sampler.state()


def test_batches_of_a_checkpoint_are_all_read_when_the_first_is_taken() -> None:
    """Later the checkpoint may be gone. That they are read is no repeated request."""
    first_run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    first_run.ahead.begin_open(1, 3, first_run.sampler)
    first_run.ahead.complete(first_run.sampler)
    batches = first_run.ahead.batches
    ids = [id_ for batch in batches.values() for id_ in batch.delivered_ids]
    run = make_run("uniform", max_staleness=2, seed=0, continues=True)
    run.queue.hold_saved(first_run.queue, ids)
    run.ahead.restore({step: batch.restored(step) for step, batch in batches.items()})
    batch = run.ahead.take(1, run.sampler)
    assert run.sampler.count_tokens() == 0, "no engine has sampled them"
    assert run.queue.lost_ids == set() and set(run.queue.deliveries) == set(ids)
    assert batch.metrics()["rollout/repeated"] == 0.0
    assert batch.generated_tokens == batches[1].generated_tokens
    assert [b.num_repeated for b in run.ahead.batches.values()] == [0, 0]


def test_a_sampler_does_not_count_what_was_repeated_for_another_one() -> None:
    """Each phase of a curriculum has its own sampler."""
    run = make_run("uniform", max_staleness=0, seed=0)
    run.queue.num_repeated = 5
    assert run.sampler.sample(1).metrics()["rollout/repeated"] == 5.0
    queue: Any = run.queue
    sampler = RolloutSampler(queue, run.sampler.settings, run.sampler.selector, (1,), lambda: None)
    assert sampler.sample(2).metrics()["rollout/repeated"] == 0.0
    run.queue.num_repeated += 2
    assert sampler.sample(3).metrics()["rollout/repeated"] == 2.0


def test_ages_count_the_tokens_of_each_version() -> None:
    def group_of(*versions: tuple[int, int]) -> Group:
        ref = msgspec.structs.replace(REF, tokens_by_version=versions)
        return Group(group_id="g", prompt=PROMPTS[0], rollouts=(ref,))

    batch = RolloutBatch((group_of((3, 10), (4, 6)), group_of((5, 4))), 20)
    assert batch.age_metrics(5) == {
        "rollout/age/mean": (2 * 10 + 1 * 6) / 20,
        "rollout/age/max": 2.0,
        "rollout/age/2": 10.0,
        "rollout/age/1": 6.0,
        "rollout/age/0": 4.0,
    }
    assert RolloutBatch((), 0).age_metrics(5) == {}
