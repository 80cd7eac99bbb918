"""mode=eval: the metrics and the table of each set, over scripted parts."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.evaluation.set_result import measure_set
from megatron_rl.run.modes.evaluate import EvaluationRun, table
from tests.support.failures import fails
from tests.support.groups import group

SETS = {"easy": [group(1.0, 1.0), group(1.0, 0.0)], "hard": [group(0.0, 0.0), group(0.0, 1.0)]}


class ScriptedEngines:
    """Dispatcher, connections, weights and metrics in one object: notes calls in `calls`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}

    @property
    def fleet(self) -> ScriptedEngines:
        return self

    def admit_without_weights(self) -> None:
        self.calls.append("admit")

    def next_command(self) -> Sync:
        return Sync(version=0, audit=True)

    def run(self, command: Sync) -> dict[str, float]:
        self.calls.append("sync")
        return {"sync/version": 0.0}

    def set_version(self, version: int) -> None:
        self.calls.append(f"version {version}")

    def finish(self) -> None:
        self.calls.append("finish")

    def stop(self) -> None:
        self.calls.append("stop")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.metrics[step] = dict(values)

    def evaluation(self, groups: list[Group]) -> Any:
        def sample(name: str) -> list[Group]:
            self.calls.append(name)
            return groups

        return SimpleNamespace(settings=EvalSettings(samples_per_prompt=2), sample=sample)


def measure(
    engines: ScriptedEngines, sets: dict[str, list[Group]], *, with_checkpoint: bool
) -> str:
    """Measure the sets; returns the screen."""
    screen = io.StringIO()
    progress = Progress(0, is_enabled=True, stream=screen)
    records: Any = SimpleNamespace(metrics=engines, progress=progress)
    evaluations = {name: engines.evaluation(groups) for name, groups in sets.items()}
    parts: Any = engines
    weights = parts if with_checkpoint else None
    EvaluationRun(evaluations, weights, parts, parts, records).lead()
    return screen.getvalue()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_weights_of_a_checkpoint_are_sent_before_the_sets(with_checkpoint: bool) -> None:
    engines = ScriptedEngines()
    measure(engines, SETS, with_checkpoint=with_checkpoint)
    sync = ["sync", "version 0"] if with_checkpoint else ["admit"]
    assert engines.calls == [*sync, "easy", "hard", "finish", "stop"]
    assert ("sync/version" in engines.metrics[0]) == with_checkpoint


def test_metrics_of_every_set() -> None:
    engines = ScriptedEngines()
    measure(engines, SETS, with_checkpoint=False)
    (values,) = engines.metrics.values()
    # easy: 2 of 2 and 1 of 2 correct. hard: 0 of 2 and 1 of 2.
    assert values["eval/easy/accuracy"] == 0.75
    assert values["eval/easy/pass@1"] == 0.75
    assert values["eval/easy/pass@2"] == 1.0
    assert values["eval/hard/accuracy"] == 0.25
    assert values["eval/hard/pass@2"] == 0.5
    assert values["eval/hard/pass@2_ci95"] == pytest.approx(1.959964 * 0.5)
    assert values["eval/hard/questions"] == 2


def test_table_of_every_set() -> None:
    screen = measure(ScriptedEngines(), SETS, with_checkpoint=False)
    heading, easy, hard = (line.split("] ")[1] for line in screen.splitlines())
    assert heading.split()[:5] == ["set", "questions", "avg@2", "pass@1", "pass@2"]
    assert "0.750 ± 0.490" in easy
    assert "0.250 ± 0.490" in hard


def test_a_set_of_judged_rewards_has_no_accuracy_and_no_pass_rates() -> None:
    engines = ScriptedEngines()
    judged_group = group(*[Verdict(reward=reward, correctness=None) for reward in (0.2, 0.6)])
    screen = measure(
        engines, {"essays": [judged_group], "easy": SETS["easy"]}, with_checkpoint=False
    )
    assert engines.metrics[0]["eval/essays/reward"] == pytest.approx(0.4)
    assert {"eval/essays/accuracy", "eval/essays/pass@1"}.isdisjoint(engines.metrics[0])
    heading, essays, easy = (line.split("] ")[1] for line in screen.splitlines())
    assert heading.split()[:6] == ["set", "questions", "avg@2", "pass@1", "pass@2", "reward"]
    assert essays.split()[:6] == ["essays", "1", "-", "-", "-", "0.400"]
    assert easy.split()[:4] == ["easy", "2", "0.750", "±"]


def test_results_before_a_failure_are_written() -> None:
    engines = ScriptedEngines()
    lost_group = msgspec.structs.replace(group(), rejections={"expired": 2})
    with fails(ExitCode.ENGINE_FAILED):
        measure(engines, SETS | {"lost": [lost_group]}, with_checkpoint=False)
    assert engines.metrics[0]["eval/hard/accuracy"] == 0.25
    assert "finish" not in engines.calls


def test_sets_with_other_numbers_of_responses_share_a_table() -> None:
    engines = ScriptedEngines()
    many = engines.evaluation([group(1.0, 0.0, 1.0, 1.0)])
    many.settings = EvalSettings(samples_per_prompt=4)
    few = engines.evaluation(SETS["easy"])
    results = [
        measure_set(name, evaluation, label=name) for name, evaluation in [("m", many), ("f", few)]
    ]
    heading, first, second = table(results)
    assert heading.split()[:6] == ["set", "questions", "avg@n", "pass@1", "pass@2", "pass@4"]
    assert "0.750" in first
    assert " - " in second, "two responses have no pass@4"
