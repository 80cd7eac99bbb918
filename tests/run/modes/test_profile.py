"""mode=profile: the rates that are written and shown, over a scripted evaluation."""

import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_rl.config.schema import EvalSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.pass_rates import Header, PassRateFile, read_file
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.records.progress import Progress
from megatron_rl.run.data import open_rates
from megatron_rl.run.modes import profile
from tests.support.configurations import configuration_of
from tests.support.failures import fails
from tests.support.groups import group

SETTINGS = EvalSettings(samples_per_prompt=10)
HEADER = Header(
    data={},
    model="m",
    samples=10,
    temperature=1.0,
    max_new_tokens=8,
    reward={"name": "r"},
    environment={},
    date="d",
)
PROMPTS = [
    Prompt(id=name, token_ids=(1,), answer="1", task="t", difficulty=label)
    for name, label in (("a", "easy"), ("b", "easy"), ("c", "hard"))
]
CORRECTNESS: dict[str, tuple[float | None, ...]] = {
    "a": (1.0,) * 10,
    "b": (1.0, 0.0) * 5,
    "c": (*(0.0,) * 9, None),
}


@dataclass(frozen=True)
class ScriptedEvaluation:
    """Returns groups with `CORRECTNESS`. failing_id: a prompt whose responses are lost."""

    prompts: list[Prompt]
    requests: list[str]
    failing_id: str = ""
    settings: EvalSettings = SETTINGS

    def sample(self, label: str) -> list[Group]:
        self.requests.extend(prompt.id for prompt in self.prompts)
        return [self._group(prompt) for prompt in self.prompts]

    def _group(self, prompt: Prompt) -> Group:
        if prompt.id == self.failing_id:
            lost_group = group(name=prompt.id)
            return msgspec.structs.replace(
                lost_group, prompt=prompt, rollouts=(), rejections={"expired": 10}
            )
        full_group = group(*CORRECTNESS[prompt.id], name=prompt.id)
        return msgspec.structs.replace(full_group, prompt=prompt)


def run(
    path: Path, *, failing_id: str = "", chunk_size: int = 256
) -> tuple[list[str], dict[str, float], str]:
    """Profile the prompts; returns the requested prompts, the metrics and the screen."""
    requests: list[str] = []
    screen = io.StringIO()
    values: dict[str, float] = {}
    metrics = SimpleNamespace(write=lambda step, metrics: values.update(metrics))
    progress = Progress(0, is_enabled=True, stream=screen)
    records: Any = SimpleNamespace(metrics=metrics, progress=progress)
    fleet = SimpleNamespace(admit_without_weights=lambda: None)
    parts: Any = SimpleNamespace(finish=lambda: None, stop=lambda: None, fleet=fleet)
    evaluation: Any = ScriptedEvaluation(PROMPTS, requests, failing_id)
    file = PassRateFile(path, HEADER)
    profile.PassRateProfile(evaluation, file, None, parts, parts, records, chunk_size).lead()
    return requests, values, screen.getvalue()


@pytest.mark.parametrize(
    ("override", "section"),
    [
        ("reward.answer=last_line", "reward"),
        ("reward=custom reward.name=json:JSONDecoder reward.options.strict=true", "reward"),
        ("environment.name=json:JSONDecoder environment.options.strict=true", "environment"),
    ],
)
def test_an_interrupted_profile_does_not_continue_under_another_judge(
    tmp_path: Path, override: str, section: str
) -> None:
    base = ["experiment=smoke", "mode=profile", f"data.pass_rates={tmp_path}/rates.jsonl"]
    open_rates(configuration_of(base))
    open_rates(configuration_of([*base, "reward.timeout_s=7", "reward.processes=1"]))
    with pytest.raises(PromptDataError, match=rf"other settings \({section}\)"):
        open_rates(configuration_of([*base, *override.split()]))


def test_every_prompt_gets_a_rate(tmp_path: Path) -> None:
    requests, values, _ = run(tmp_path / "rates.jsonl")
    assert requests == ["a", "b", "c"]
    _, rates = read_file(tmp_path / "rates.jsonl")
    counts = [(rate.id, rate.correct, rate.samples) for rate in rates]
    assert counts == [("a", 10, 10), ("b", 5, 10), ("c", 0, 9)]
    assert {rate.mean_tokens for rate in rates} == {4.0}
    assert values["profile/pass_rate"] == pytest.approx(0.5)
    for kind in ("mixed", "all_correct", "all_incorrect"):
        assert values[f"profile/{kind}"] == pytest.approx(1 / 3)


def test_table_has_a_line_for_each_label(tmp_path: Path) -> None:
    _, _, screen = run(tmp_path / "rates.jsonl")
    lines = [" ".join(line.split("] ", 1)[1].split()) for line in screen.splitlines()[-4:]]
    assert lines[0] == "difficulty prompts pass rate all incorrect mixed all correct"
    assert lines[2] == "easy 2 0.750 0.0% 50.0% 50.0%"
    assert lines[3].startswith("hard 1 0.000 100.0%")


def test_an_interrupted_profile_continues(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    with fails(ExitCode.ENGINE_FAILED):
        run(file, failing_id="b", chunk_size=1)
    assert not file.exists()
    requests, _, screen = run(file)
    assert requests == ["b", "c"]
    assert "1 of 3 prompts have rates from an earlier attempt" in screen
    assert len(read_file(file)[1]) == 3
