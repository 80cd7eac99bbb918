"""`Worker.train` with artificial passes, collectives and neighbours."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.schema import (
    EngineSettings,
    ModelSettings,
    TrainSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.mcore.optimizer import StepResult
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.recording.format import batch_directory
from megatron_rl.rollouts.recording.reader import read_batch_record, read_groups
from megatron_rl.rollouts.recording.recorded_rollouts import RecordedRollouts
from megatron_rl.rollouts.wire.store import RolloutGone, RolloutStore, read_rollout
from megatron_rl.training import worker as module
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.exchange.transfer_plan import Receiver
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.worker import Worker
from tests.support.batches import make_batch
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.rollouts import assert_equal

SHAPE = read_shape(TWO_DIGIT_ADDITION)


def make_plan(*num_batches: int, rollouts: Sequence[RolloutRef] = ()) -> StepPlan:
    """Plan a step. num_batches: micro-batches of each optimizer step."""
    optimizer_steps = tuple(
        OptimizerStep(
            micro_batches=(((),) * count,),
            denominators=Denominators(sequences=index + 1, tokens=9),
        )
        for index, count in enumerate(num_batches)
    )
    return StepPlan(
        step=3,
        rollouts=tuple(rollouts),
        advantages=(1.0,) * len(rollouts),
        optimizer_steps=optimizer_steps,
    )


class Passes:
    """Replaces both passes and records the updates.

    differing: percentage of rows where the trainer's routers choose other experts.
    bad_step: index of the optimizer step that is not applied. bad_norm: the norm of its gradients.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        differing: int = 0,
        bad_step: int | None = None,
        bad_norm: float = math.nan,
    ) -> None:
        self.limits: list[float | None] = []
        self._bad_norm = bad_norm
        self.updates: list[tuple[list[str], list[str], int, bool]] = []
        self._differing = differing
        self._bad_step = bad_step
        monkeypatch.setattr(module, "exchange_rollouts", lambda *_, **__: {})
        monkeypatch.setattr(module, "gather_bytes", lambda data, group: [data])
        monkeypatch.setattr(module, "compute_old_policy", self._old_policy)
        monkeypatch.setattr(module, "with_update_routes", lambda steps, *_: steps)
        monkeypatch.setattr(module, "update_policy", self._update)

    def _old_policy(
        self, policy: Any, batches: Sequence[str], metrics: MetricSums, *, version: int | None
    ) -> list[str]:
        metrics.add_mean("mismatch/route_disagreement", self._differing, 100)
        return [f"objective of {batch}" for batch in batches]

    def _update(
        self,
        policy: Any,
        optimizer: Any,
        batches: list[str],
        objectives: list[str],
        denominators: Denominators,
        *,
        reference_logprobs: list[Any],
        dp_size: int,
        first_step: bool,
        metrics: MetricSums,
        max_norm: float | None,
    ) -> StepResult:
        self.updates.append((batches, objectives, denominators.sequences, first_step))
        is_applied = len(self.updates) - 1 != self._bad_step
        lr = len(self.updates) / 8 if is_applied else 0.0
        self.limits.append(max_norm)
        return StepResult(is_applied, grad_norm=1.0 if is_applied else self._bad_norm, lr=lr)


def make_worker(
    directory: Path,
    train: TrainSettings | None = None,
    replay: Any = None,
    every: int = 0,
) -> Worker:
    def optimizer_steps(plan: StepPlan, rank: int, rollouts: Any) -> list[list[str]]:
        return [
            [f"{index}.{batch}" for batch in range(len(step.micro_batches[rank]))]
            for index, step in enumerate(plan.optimizer_steps)
        ]

    layout: Any = SimpleNamespace(rank=0, dp_rank=0, dp_size=1, control_group=None)
    batcher: Any = SimpleNamespace(optimizer_steps=optimizer_steps)
    policy: Any = SimpleNamespace(replay=replay, reference=None)
    nothing: Any = SimpleNamespace()
    receivers = [Receiver(dp_rank=0, node=0, moe_rows=())]
    optimizer: Any = SimpleNamespace(completions=[])
    optimizer.complete_weights = lambda: optimizer.completions.append("complete")
    return Worker(
        layout=layout,
        receivers=receivers,
        shape=nothing,
        policy=policy,
        optimizer=optimizer,
        batcher=batcher,
        model=ModelSettings(path="/m"),
        engine=EngineSettings(),
        settings=train or TrainSettings(total_steps=1),
        recorder=BatchRecorder(directory, every, receivers, 0, None),
    )


def folders(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def test_each_optimizer_step_trains_its_own_micro_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch)
    worker = make_worker(tmp_path)
    outcome = worker.train(make_plan(2, 1))
    optimizer: Any = worker.optimizer
    assert optimizer.completions == ["complete"]  # once, after the last optimizer step
    assert passes.updates == [
        (["0.0", "0.1"], ["objective of 0.0", "objective of 0.1"], 1, True),
        (["1.0"], ["objective of 1.0"], 2, False),
    ]
    assert (outcome.finite, outcome.optimizer_steps) == (True, 2)
    assert outcome.metrics.values()["train/lr"] == 2 / 8
    assert folders(tmp_path) == []


def test_a_nonfinite_optimizer_step_ends_the_training_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch, bad_step=1)
    outcome = make_worker(tmp_path).train(make_plan(1, 1, 1))
    assert len(passes.updates) == 2
    assert (outcome.finite, outcome.optimizer_steps) == (False, 1)
    assert outcome.metrics.values()["train/lr"] == 1 / 8  # of the step that was applied
    assert folders(tmp_path) == ["nonfinite-step-3"]


def test_a_spike_ends_the_training_step_and_its_batch_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch, bad_step=1, bad_norm=77.0)
    outcome = make_worker(tmp_path).train(make_plan(1, 1, 1), max_norm=5.0)
    assert passes.limits == [5.0, 5.0]
    assert (outcome.finite, outcome.optimizer_steps, outcome.spike) == (True, 1, 77.0)
    assert outcome.norms == (1.0,)
    assert folders(tmp_path) == ["spike-step-3"]


@pytest.mark.parametrize("check_weights", [True, False])
def test_weights_are_checked_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check_weights: bool
) -> None:
    Passes(monkeypatch)
    worker = make_worker(tmp_path)
    worker.optimizer.weights_are_finite = lambda: False  # type: ignore[method-assign]
    outcome = worker.train(make_plan(1), check_weights=check_weights)
    assert outcome.weights_finite is not check_weights


def store_batch(store: RolloutStore, count: int = 6) -> tuple[list[RolloutRef], list[Rollout]]:
    """Store rollouts of two prompts and return their references."""
    refs, rollouts, _ = make_batch(SHAPE, count)
    rollouts = [
        dataclasses.replace(rollout, prompt_id=f"p{index % 2}", sample_index=index // 2)
        for index, rollout in enumerate(rollouts)
    ]
    locations = store.put("group", rollouts)
    refs = [
        msgspec.structs.replace(
            ref,
            location=location,
            prompt_id=rollout.prompt_id,
            sample_index=rollout.sample_index,
            num_generated=3,
        )
        for ref, rollout, location in zip(refs, rollouts, locations, strict=True)
    ]
    return refs, rollouts


def test_the_batch_of_a_nonfinite_step_is_recorded_in_the_documented_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Passes(monkeypatch, bad_step=0)
    store = RolloutStore(node=0)
    refs, rollouts = store_batch(store)
    order = [5, 0, 3, 2, 1, 4]  # a plan is shuffled
    make_worker(tmp_path).train(make_plan(1, rollouts=[refs[i] for i in order]))
    pairs = read_groups(tmp_path / "nonfinite-step-3")
    assert [group.prompt.id for group, _ in pairs] == ["p1", "p0"]
    for (group, rollouts_read), prompt in zip(pairs, (1, 0), strict=True):
        for rollout_read, rollout in zip(rollouts_read, rollouts[prompt::2], strict=True):
            assert_equal(rollout_read, rollout)
        assert group.prompt.token_ids == tuple(rollouts[prompt].segments[0].tokens.tolist())
        assert [ref.verdict for ref in group.rollouts] == [ref.verdict for ref in refs[prompt::2]]
    record = read_batch_record(tmp_path / "nonfinite-step-3")
    assert (record.step, record.generated_tokens) == (3, 18)


@pytest.mark.parametrize(("every", "is_due"), [(0, False), (2, False), (3, True)])
def test_requested_batches_are_recorded_and_can_be_trained_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, is_due: bool
) -> None:
    Passes(monkeypatch)
    store = RolloutStore(node=0)
    refs, _ = store_batch(store)
    worker = make_worker(tmp_path, every=every)
    worker.train(make_plan(1, rollouts=refs))
    assert folders(tmp_path) == ([batch_directory(tmp_path, 3).name] if is_due else [])
    if is_due:
        recording = RecordedRollouts(
            tmp_path, node=0, batches=1, routes=None, vocab_size=SHAPE.vocab_size, ngram=None
        )
        assert [len(group.rollouts) for group in recording.sample(1).groups] == [3, 3]


def test_a_batch_is_recorded_although_its_collector_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Passes(monkeypatch)
    store = RolloutStore(node=0)
    refs, rollouts = store_batch(store)

    def exchange(
        *_: Any, keep: Callable[[RolloutRef], None], kept_refs: Iterable[RolloutRef]
    ) -> dict[int, Rollout]:
        for ref in kept_refs:
            keep(ref)
        store.release(["group"])
        return {}

    monkeypatch.setattr(module, "exchange_rollouts", exchange)
    worker = make_worker(tmp_path, every=3)
    worker.train(make_plan(1, rollouts=refs))
    with pytest.raises(RolloutGone):
        read_rollout(refs[0])
    recorded_rollouts = [r for _, group in read_groups(batch_directory(tmp_path, 3)) for r in group]
    assert sorted(r.rollout_id for r in recorded_rollouts) == sorted(r.rollout_id for r in rollouts)


def test_a_step_without_rollouts_runs_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch)
    outcome = make_worker(tmp_path).train(make_plan())
    assert (passes.updates, outcome.finite, outcome.optimizer_steps) == ([], True, 0)


@pytest.mark.parametrize(("differing", "limit"), [(96, 0.5), (51, 0.5), (11, 0.1)])
def test_implausible_routes_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differing: int, limit: float
) -> None:
    """Shifted or zero rows, or routes of other weights, differ nearly everywhere."""
    Passes(monkeypatch, differing=differing)
    train = TrainSettings(total_steps=1, max_route_disagreement=limit)
    with pytest.raises(Failure) as error:
        make_worker(tmp_path, train).train(make_plan(1))
    message = str(error.value)
    assert f"{differing}.0%" in message and f"train.max_route_disagreement={limit}" in message
    assert str(tmp_path / "disagreeing-step-3") in message
    assert error.value.exit_code == ExitCode.SYNC_MISMATCH
    assert folders(tmp_path) == ["disagreeing-step-3"]


def test_a_replay_fault_of_another_rank_ends_this_rank_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Passes(monkeypatch, bad_step=0)
    faults = [b"", b"layer 3, micro-batch 1: its router ran 2 times in one forward pass, not once"]
    values_of_ranks = {b"no fault here": faults}
    monkeypatch.setattr(
        module, "gather_bytes", lambda data, group: values_of_ranks.get(data, [data])
    )
    replay = SimpleNamespace(source="rollout", take_faults=lambda: "no fault here")
    with pytest.raises(Failure, match=r"step 3: .*rank 1: layer 3, micro-batch 1: .* 2 times"):
        make_worker(tmp_path, replay=replay).train(make_plan(1))
    assert folders(tmp_path) == ["unreplayed-step-3"]


@pytest.mark.parametrize(("differing", "limit"), [(0, 0.5), (50, 0.5), (100, 1.0)])
def test_routes_that_differ_by_rounding_are_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differing: int, limit: float
) -> None:
    Passes(monkeypatch, differing=differing)
    train = TrainSettings(total_steps=1, max_route_disagreement=limit)
    assert make_worker(tmp_path, train).train(make_plan(1)).finite
