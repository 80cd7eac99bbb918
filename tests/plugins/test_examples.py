"""Each example file is opened by its dotted name, as a run would open it, and used."""

import asyncio
from pathlib import Path

import pytest
import torch

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.schema import DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.plugins import PluginError, missing_module
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.environments.environment import open_environment
from megatron_rl.environments.episode import Episode
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.models.families import read_shape
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.rewards import RewardRunner, open_scorer
from tests.support.scripted_model import (
    CHECKPOINT,
    PROMPT,
    TOKENIZER,
    ScriptedModel,
    Turn,
    open_episode,
)

EXAMPLES = Path(__file__).parent / "examples"
MOST_LINES = 40


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("name", ["own_reward", "own_loss", "own_source", "own_environment"])
def test_each_is_one_short_file_outside_the_packages(name: str) -> None:
    file = EXAMPLES / f"{name}.py"
    assert len(file.read_text().splitlines()) <= MOST_LINES
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(
        f"own_{door}.py" for door in ("reward", "loss", "source", "environment")
    )
    assert missing_module(f"{name}:Anything") is None


def test_own_reward_scores_texts() -> None:
    settings = RewardSettings(name="own_reward:RightAndShort", options={"limit": 4, "penalty": 0.5})
    scorer = open_scorer(settings)
    runner = RewardRunner(scorer, timeout_s=settings.timeout_s)
    prompt = Prompt(id="p", token_ids=(1,), answer="046", task="t")

    def judge(
        text: str, finish: FinishReason = FinishReason.STOP
    ) -> tuple[float | None, float | None, str | None]:
        verdict = asyncio.run(runner.judge(prompt, text, finish))
        return verdict.reward, verdict.correctness, verdict.answer

    assert judge("46") == (1.0, 1.0, "46")
    assert judge("0 = 46") == (0.75, 1.0, "46")  # half as long again: half of the penalty
    assert judge("it is surely 46") == (0.5, 1.0, "46")
    assert judge("it is surely 47") == (0.0, 0.0, "47")
    assert judge("46", FinishReason.LENGTH) == (0.0, 0.0, None)
    with pytest.raises(ValueError, match="holds no number"):
        scorer.check_answer("Paris")
    with pytest.raises(
        PluginError,
        match=r"reward\.options: own_reward:RightAndShort\(limit=0\) refuses: limit must",
    ):
        open_scorer(RewardSettings(name="own_reward:RightAndShort", options={"limit": 0}))


def test_own_loss_has_the_gradient_worked_out_by_hand() -> None:
    loss = open_loss(
        CustomAlgoSettings(name="own_loss:Cispo", options={"clip_high": 2.0}),
        read_shape(CHECKPOINT),
    )
    old = torch.tensor([-1.0, -2.0, -3.0])
    response = ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.ones(3),
        rollout_logprobs=old,
        advantages=torch.tensor([1.0, -2.0, 1.0]),
        cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    logprobs = (
        old + torch.tensor([1.0, 2.0, 5.0]).log()
    ).requires_grad_()  # ratios 1, 2 and 5; 5 is cut to 3
    result = loss.prepare(response)(logprobs, Denominators(sequences=2, tokens=4))
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 4, 2 * 2 / 4, -3 / 4])  # -min(r, 3) A / N
    assert result.sums["policy/clip_fraction_high"].tolist() == [1.0, 3.0]


def test_own_source_writes_questions_that_are_split() -> None:
    settings = DataSettings(
        source="own_source:Products", options={"digits": 3}, num_train=500, num_eval=50
    )
    check = open_scorer(RewardSettings()).check_answer
    prompts = open_prompts(settings, TOKENIZER, check)
    assert (len(prompts.train), len(prompts.held_out)) == (500, 50)
    sides = []
    for side in (prompts.train, prompts.held_out):
        factors = [
            TOKENIZER.decode(prompt.token_ids).removesuffix("=").split("*") for prompt in side
        ]
        assert [prompt.answer for prompt in side] == [str(int(a) * int(b)) for a, b in factors]
        assert all(
            prompt.demonstration == prompt.answer and prompt.task == "products" for prompt in side
        )
        sides.append({frozenset(pair) for pair in factors})
    assert sides[0].isdisjoint(sides[1])
    assert [p.id for p in open_prompts(settings, TOKENIZER, check).take(20)] == [
        p.id for p in prompts.take(20)
    ]


def play(*answers: str) -> tuple[list[str], Episode]:
    """What the model was asked, and the episode afterwards."""
    environment = open_environment(
        EnvironmentSettings(name="own_environment:SecondTry", options={"hint": " no, "})
    )
    model = ScriptedModel([Turn.saying(answer) for answer in answers])
    episode = open_episode(model, prompt=PROMPT)
    asyncio.run(environment.play(episode))
    return [TOKENIZER.decode(tokens) for tokens, _ in model.asked], episode


def test_own_environment_asks_again_after_a_wrong_answer() -> None:
    asked, episode = play("047", "046")
    assert asked == ["12+34=", "12+34=047<eos> no, "]
    assert episode.text == "046"
    assert [
        (s.role, s.trainable, TOKENIZER.decode(s.tokens.tolist()))
        for s in episode.rollout().segments
    ] == [
        (Role.PROMPT, False, "12+34="),
        (Role.RESPONSE, True, "047"),
        (Role.TOOL, False, " no, "),
        (Role.RESPONSE, True, "046"),
    ]


def test_own_environment_leaves_a_right_answer_alone() -> None:
    asked, episode = play("046")
    assert asked == ["12+34="]
    assert (episode.text, len(episode.rollout().segments)) == ("046", 2)


def test_contributing_shows_each_example_as_it_is() -> None:
    shown = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f"```python\n{file.read_text().rstrip()}\n```" in shown, (
            f"{file.name} differs from CONTRIBUTING.md"
        )
