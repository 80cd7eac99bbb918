"""What a rank does with a planned step, with its passes, its collectives and its neighbours made
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.schema import (
    EngineSettings,
    LoggerSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.step_plan import Denominators, OptimizerStep, StepPlan
from megatron_rl.mcore.optimizer import StepResult
from megatron_rl.mcore.router_target import ReplayError
from megatron_rl.training import worker as module
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.worker import RoutesDisagree, Worker


def plan(*steps: int) -> StepPlan:
    """A step of so many micro-batches for each of its optimizer steps."""
    return StepPlan(
        step=3,
        rollouts=(),
        advantages=(),
        optimizer_steps=tuple(
            OptimizerStep(
                micro_batches=(((),) * count,),
                denominators=Denominators(sequences=index + 1, tokens=9),
            )
            for index, count in enumerate(steps)
        ),
    )


class Passes:
    """Stands in for both passes and remembers the updates."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, differing: int = 0, bad_step: int | None = None
    ) -> None:
        self.updates: list[tuple[list[str], list[str], int, bool]] = []
        self._differing, self._bad_step = differing, bad_step
        monkeypatch.setattr(module, "exchange_rollouts", lambda *_: {})
        monkeypatch.setattr(module, "gather_bytes", lambda data, group: [data])
        monkeypatch.setattr(module, "compute_old_policy", self._old_policy)
        monkeypatch.setattr(module, "with_update_routes", lambda steps, *_: steps)
        monkeypatch.setattr(module, "update_policy", self._update)

    def _old_policy(self, policy: Any, batches: Sequence[str], metrics: MetricSums) -> list[str]:
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
        dp_size: int,
        first_step: bool,
        metrics: MetricSums,
    ) -> StepResult:
        self.updates.append((batches, objectives, denominators.sequences, first_step))
        stepped = len(self.updates) - 1 != self._bad_step
        return StepResult(stepped, grad_norm=1.0, lr=len(self.updates) / 8 if stepped else 0.0)


def make_worker(directory: Path, train: TrainSettings | None = None, replay: Any = None) -> Worker:
    def optimizer_steps(planned: StepPlan, rank: int, rollouts: Any) -> list[list[str]]:
        return [
            [f"{index}.{batch}" for batch in range(len(step.micro_batches[rank]))]
            for index, step in enumerate(planned.optimizer_steps)
        ]

    made_up: dict[str, Any] = {name: SimpleNamespace() for name in ("shape", "optimizer")}
    return Worker(
        layout=SimpleNamespace(rank=0, dp_rank=0, dp_size=1, control_group=None),  # type: ignore[arg-type]
        receivers=[],
        batcher=SimpleNamespace(optimizer_steps=optimizer_steps),  # type: ignore[arg-type]
        model=ModelSettings(path="/m"),
        engine=EngineSettings(),
        run=RunSettings(),
        logger=LoggerSettings(),
        rollouts_directory=directory,
        settings=train or TrainSettings(total_steps=1),
        policy=SimpleNamespace(replay=replay),  # type: ignore[arg-type]
        **made_up,
    )


def test_each_optimizer_step_trains_its_own_micro_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch)
    outcome = make_worker(tmp_path).train(plan(2, 1))
    assert passes.updates == [
        (["0.0", "0.1"], ["objective of 0.0", "objective of 0.1"], 1, True),
        (["1.0"], ["objective of 1.0"], 2, False),
    ]
    assert (outcome.finite, outcome.optimizer_steps) == (True, 2)
    assert outcome.metrics.values()["train/lr"] == 2 / 8
    assert list(tmp_path.iterdir()) == []


def test_after_a_step_that_is_not_finite_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch, bad_step=1)
    outcome = make_worker(tmp_path).train(plan(1, 1, 1))
    assert len(passes.updates) == 2
    assert (outcome.finite, outcome.optimizer_steps) == (False, 1)
    assert outcome.metrics.values()["train/lr"] == 1 / 8, "the rate of the step that was made"
    assert [path.name for path in tmp_path.iterdir()] == ["nonfinite-step-3"]


def test_a_step_without_rollouts_runs_no_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passes = Passes(monkeypatch)
    outcome = make_worker(tmp_path).train(plan())
    assert (passes.updates, outcome.finite, outcome.optimizer_steps) == ([], True, 0)


@pytest.mark.parametrize(("differing", "limit"), [(96, 0.5), (51, 0.5), (11, 0.1)])
def test_routes_that_are_not_the_models_own_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differing: int, limit: float
) -> None:
    """Rows that are shifted, zero or of other weights: the trainer's routers would choose others
    nearly everywhere.
    """
    Passes(monkeypatch, differing=differing)
    train = TrainSettings(total_steps=1, max_route_disagreement=limit)
    with pytest.raises(
        RoutesDisagree, match=rf"step 3: .*{differing}\.0%.*train\.max_route_disagreement={limit}"
    ) as e:
        make_worker(tmp_path, train).train(plan(1))
    assert e.value.exit_code == ExitCode.SYNC_MISMATCH
    assert [path.name for path in tmp_path.iterdir()] == ["disagreeing-step-3"], (
        "the batch is kept to look at"
    )


def test_routes_that_another_rank_did_not_replay_as_recorded_stop_this_one_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Passes(monkeypatch, bad_step=0)
    faults = [b"", b"layer 3, micro-batch 1: its router ran 2 times in one forward pass, not once"]
    everyones = {b"nothing wrong here": faults}
    monkeypatch.setattr(module, "gather_bytes", lambda data, group: everyones.get(data, [data]))
    replay = SimpleNamespace(source="rollout", take_faults=lambda: "nothing wrong here")
    with pytest.raises(
        ReplayError,
        match=r"step 3: .*rank 1: layer 3, micro-batch 1: .* 2 times.*applied on no rank",
    ):
        make_worker(tmp_path, replay=replay).train(plan(1))
    assert [path.name for path in tmp_path.iterdir()] == ["unreplayed-step-3"], (
        "the batch is kept to look at"
    )


@pytest.mark.parametrize(("differing", "limit"), [(0, 0.5), (50, 0.5), (100, 1.0)])
def test_routes_that_differ_by_rounding_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, differing: int, limit: float
) -> None:
    Passes(monkeypatch, differing=differing)
    train = TrainSettings(total_steps=1, max_route_disagreement=limit)
    assert make_worker(tmp_path, train).train(plan(1)).finite
