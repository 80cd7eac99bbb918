"""Each example plugin is loaded by its dotted name, as a run loads it, and used."""

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
from megatron_rl.rewards import (
    RewardRunner,
    ScorerInThisProcess,
    open_answer_reader,
    open_scorer,
)
from tests.support.questions import make_question
from tests.support.scripted_model import (
    CHECKPOINT,
    PROMPT,
    TOKENIZER,
    ScriptedModel,
    Turn,
    open_episode,
)

EXAMPLES = Path(__file__).parent / "examples"
NAMES = ["my_reward", "my_loss", "my_source", "my_environment"]
MAX_LINES = 40


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_one_short_file_outside_the_packages(name: str) -> None:
    file = EXAMPLES / f"{name}.py"
    assert len(file.read_text().splitlines()) <= MAX_LINES
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)
    assert f"={name}:" in file.read_text()
    assert missing_module(f"{name}:Anything") is None


def test_my_reward_scores_texts() -> None:
    name = "my_reward:CorrectAndShort"
    settings = RewardSettings(name=name, options={"limit": 4, "penalty": 0.5})
    scorer = open_scorer(settings)
    runner = RewardRunner(ScorerInThisProcess(scorer, timeout_s=settings.timeout_s))
    prompt = Prompt(id="p", token_ids=(1,), answer="046", task="t")

    def score(
        text: str, finish: FinishReason = FinishReason.STOP
    ) -> tuple[float | None, float | None, float, str | None]:
        verdict = asyncio.run(runner.score(prompt, text, finish))
        return verdict.reward, verdict.correctness, verdict.penalty, verdict.answer

    assert score("46") == (1.0, 1.0, 0.0, "46")
    assert score("0 = 46") == (0.75, 1.0, 0.25, "46")  # 50 % beyond the limit: half the penalty
    assert score("it is surely 46") == (0.5, 1.0, 0.5, "46")
    assert score("it is surely 47") == (0.0, 0.0, 0.0, "47")
    assert score("46", FinishReason.LENGTH) == (0.0, 0.0, 0.0, None)
    with pytest.raises(ValueError, match="holds no number"):
        scorer.check_answer(make_question("Paris"))
    message = r"reward\.options: my_reward:CorrectAndShort\(limit=0\) refuses: limit must"
    with pytest.raises(PluginError, match=message):
        open_scorer(RewardSettings(name=name, options={"limit": 0}))


def test_my_loss_has_the_gradient_derived_by_hand() -> None:
    settings = CustomAlgoSettings(name="my_loss:Cispo", options={"clip_high": 2.0})
    loss = open_loss(settings, read_shape(CHECKPOINT))
    old = torch.tensor([-1.0, -2.0, -3.0])
    response = ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.ones(3),
        rollout_logprobs=old,
        advantages=torch.tensor([1.0, -2.0, 1.0]),
        cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    ratios = torch.tensor([1.0, 2.0, 5.0])  # the last one is clipped to 3
    logprobs = (old + ratios.log()).requires_grad_()
    result = loss.prepare(response)(logprobs, Denominators(sequences=2, tokens=4))
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 4, 2 * 2 / 4, -3 / 4])  # -min(r, 3) A / N
    assert result.sums["policy/clip_fraction_high"].tolist() == [1.0, 3.0]


def test_my_source_yields_questions_that_are_split() -> None:
    settings = DataSettings(
        source="my_source:Products", options={"digits": 3}, num_train=500, num_eval=50
    )
    read_answer = open_answer_reader(RewardSettings())
    prompts = open_prompts(settings, TOKENIZER, read_answer)
    assert (len(prompts.train), len(prompts.held_out)) == (500, 50)
    sides = []
    for side in (prompts.train, prompts.held_out):
        factors = [
            TOKENIZER.decode(prompt.token_ids).removesuffix("=").split("*") for prompt in side
        ]
        assert [prompt.answer for prompt in side] == [str(int(a) * int(b)) for a, b in factors]
        assert all(prompt.demonstration == prompt.answer for prompt in side)
        assert all(prompt.task == "products" for prompt in side)
        sides.append({frozenset(pair) for pair in factors})
    assert sides[0].isdisjoint(sides[1])
    again = open_prompts(settings, TOKENIZER, read_answer)
    assert [p.id for p in again.take(20)] == [p.id for p in prompts.take(20)]


def play(*answers: str) -> tuple[list[str], Episode]:
    """Play an episode with a scripted model. Returns the texts it read, and the episode."""
    environment = open_environment(
        EnvironmentSettings(name="my_environment:SecondTry", options={"hint": " no, "})
    )
    model = ScriptedModel([Turn.saying(answer) for answer in answers])
    episode = open_episode(model, prompt=PROMPT)
    asyncio.run(environment.play(episode))
    return [TOKENIZER.decode(tokens) for tokens, _ in model.requests], episode


def test_my_environment_retries_after_an_incorrect_answer() -> None:
    requests, episode = play("047", "046")
    assert requests == ["12+34=", "12+34=047<eos> no, "]
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


def test_my_environment_accepts_a_correct_answer() -> None:
    requests, episode = play("046")
    assert requests == ["12+34="]
    assert (episode.text, len(episode.rollout().segments)) == ("046", 2)


def test_contributing_shows_one_example_and_links_to_the_others() -> None:
    contributing = (EXAMPLES.parents[2] / "CONTRIBUTING.md").read_text()
    reward = (EXAMPLES / "my_reward.py").read_text()
    assert f"```python\n{reward.rstrip()}\n```" in contributing, "my_reward.py differs"
    for name in NAMES:
        if name != "my_reward":
            assert f"(tests/plugins/examples/{name}.py)" in contributing
