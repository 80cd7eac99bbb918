"""mode=profile: what is asked, written and shown. Stand-ins draw the answers."""

import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.pass_rates import Header, PassRateFile, read_file
from megatron_rl.records.progress import Progress
from megatron_rl.rollouts.evaluation import EvaluationFailed
from megatron_rl.run.modes import profile
from tests.support.groups import group

SETTINGS = EvalSettings(samples_per_prompt=2, max_rejected_share=0.5)
HEADER = Header(
    data={}, model="m", samples=2, temperature=1.0, max_new_tokens=8, reward="r", date="d"
)
PROMPTS = [
    Prompt(id=name, token_ids=(1,), answer="1", task="t", difficulty=label)
    for name, label in (("a", "easy"), ("b", "easy"), ("c", "hard"))
]
CORRECTNESS: dict[str, tuple[float | None, ...]] = {
    "a": (1.0, 1.0),
    "b": (1.0, 0.0),
    "c": (0.0, None),
}


@dataclass(frozen=True)
class Drawn:
    """An evaluation that answers with `CORRECTNESS`; fails: what it cannot ask."""

    prompts: list[Prompt]
    asked: list[str]
    fails: str = ""
    settings: EvalSettings = SETTINGS

    def sample(self, label: str) -> list[Group]:
        self.asked.extend(prompt.id for prompt in self.prompts)
        made = [
            msgspec.structs.replace(group(*CORRECTNESS[p.id], name=p.id), prompt=p)
            for p in self.prompts
        ]
        return [
            msgspec.structs.replace(g, rollouts=(), rejections={"expired": 2})
            if g.prompt.id == self.fails
            else g
            for g in made
        ]


def run(path: Path, *, fails: str = "") -> tuple[list[str], dict[str, float], str]:
    asked: list[str] = []
    screen, logged = io.StringIO(), dict[str, float]()
    log = SimpleNamespace(write=lambda step, values: logged.update(values))
    records: Any = SimpleNamespace(log=log, progress=Progress(0, enabled=True, stream=screen))
    end: Any = SimpleNamespace(finish=lambda: None, stop=lambda: None)
    evaluation: Any = Drawn(PROMPTS, asked, fails)
    profile.PassRateProfile(evaluation, PassRateFile(path, HEADER), None, end, end, records).lead()
    return asked, logged, screen.getvalue()


def test_every_prompt_gets_a_rate_and_labels_are_told_of(tmp_path: Path) -> None:
    asked, logged, screen = run(tmp_path / "rates.jsonl")
    assert asked == ["a", "b", "c"]
    _, rates = read_file(tmp_path / "rates.jsonl")
    assert [(rate.id, rate.right, rate.samples) for rate in rates] == [
        ("a", 2, 2),
        ("b", 1, 2),
        ("c", 0, 1),
    ]
    assert logged["profile/pass_rate"] == pytest.approx(0.5) and logged[
        "profile/mixed"
    ] == pytest.approx(1 / 3)
    assert logged["profile/all_right"] == logged["profile/all_wrong"] == pytest.approx(1 / 3)
    lines = [" ".join(line.split("] ", 1)[1].split()) for line in screen.splitlines()[-4:]]
    assert lines[0] == "difficulty prompts pass rate all wrong mixed all right"
    assert lines[2] == "easy 2 0.750 0.0% 50.0% 50.0%" and lines[3].startswith(
        "hard 1 0.000 100.0%"
    )


def test_a_profile_that_failed_asks_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "_AT_A_TIME", 1)
    with pytest.raises(EvaluationFailed):
        run(tmp_path / "rates.jsonl", fails="b")
    assert not (tmp_path / "rates.jsonl").exists()
    asked, _, screen = run(tmp_path / "rates.jsonl")
    assert asked == ["b", "c"] and "1 of 3 prompts have rates from an earlier attempt" in screen
    assert len(read_file(tmp_path / "rates.jsonl")[1]) == 3
