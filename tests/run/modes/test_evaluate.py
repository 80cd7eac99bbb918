"""mode=eval: what is measured, written and shown. Stand-ins draw the answers."""

import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.contracts.group import Group
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.evaluation import EvaluationFailed
from megatron_rl.run.modes.evaluate import EvaluationRun
from tests.support.groups import group

SETS = {"easy": [group(1.0, 1.0), group(1.0, 0.0)], "hard": [group(0.0, 0.0), group(0.0, 1.0)]}


class Stand:
    """Notes what is asked of it, as dispatcher, queue, weights and log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}

    def next_command(self) -> Sync:
        return Sync(version=0, audit=True)

    def run(self, command: Sync) -> dict[str, float]:
        self.said.append("sync")
        return {"sync/version": 0.0}

    def set_version(self, version: int) -> None:
        self.said.append(f"version {version}")

    def finish(self) -> None:
        self.said.append("finish")

    def stop(self) -> None:
        self.said.append("stop")

    def write(self, step: int, values: dict[str, float]) -> None:
        self.logged[step] = dict(values)

    def evaluation(self, groups: list[Group]) -> Any:
        def sample(name: str) -> list[Group]:
            self.said.append(name)
            return groups

        return SimpleNamespace(settings=EvalSettings(samples_per_prompt=2), sample=sample)


def measure(stand: Stand, sets: dict[str, list[Group]], *, resumed: bool) -> str:
    screen = io.StringIO()
    records: Any = SimpleNamespace(log=stand, progress=Progress(0, enabled=True, stream=screen))
    evaluations = {name: stand.evaluation(groups) for name, groups in sets.items()}
    end: Any = stand
    EvaluationRun(evaluations, end if resumed else None, end, end, records).lead()
    return screen.getvalue()


@pytest.mark.parametrize("resumed", [True, False])
def test_every_set_is_measured_with_the_weights_of_the_checkpoint(resumed: bool) -> None:
    stand = Stand()
    screen = measure(stand, SETS, resumed=resumed)
    assert stand.said == [
        *(("sync", "version 0") if resumed else ()),
        "easy",
        "hard",
        "finish",
        "stop",
    ]
    (values,) = stand.logged.values()
    assert ("sync/version" in values) == resumed
    # easy: 2 of 2 and 1 of 2 right; hard: 0 and 1 of 2
    assert (
        values["eval/easy/accuracy"],
        values["eval/easy/pass@1"],
        values["eval/easy/pass@2"],
    ) == (0.75, 0.75, 1.0)
    assert (values["eval/hard/accuracy"], values["eval/hard/pass@2"]) == (0.25, 0.5)
    assert (
        values["eval/hard/pass@2_ci95"] == pytest.approx(1.959964 * 0.5)
        and values["eval/hard/questions"] == 2
    )
    head, easy, hard = (line.split("] ")[1].split("  ") for line in screen.splitlines())
    assert [cell.strip() for cell in head if cell][:5] == [
        "set",
        "questions",
        "avg@2",
        "pass@1",
        "pass@2",
    ]
    assert "0.750 ± 0.490" in easy and "0.250 ± 0.490" in hard


def test_what_was_measured_before_engines_fail_is_kept() -> None:
    stand = Stand()
    with pytest.raises(EvaluationFailed):
        measure(
            stand,
            SETS | {"lost": [msgspec.structs.replace(group(), rejections={"expired": 2})]},
            resumed=False,
        )
    assert stand.logged[0]["eval/hard/accuracy"] == 0.25 and "finish" not in stand.said
