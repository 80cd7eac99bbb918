"""Each example file is opened by its dotted name, as a run would open it, and used."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.config.schema import CustomAlgoSettings, DataSettings, EnvironmentSettings, RewardSettings
from megatron_rl.contracts.doors import DoorError, missing_module
from megatron_rl.contracts.plan import Denominators
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout
from megatron_rl.environments import Episode, open_environment
from megatron_rl.environments.episode import EpisodeRules
from megatron_rl.losses import ResponseTokens, open_loss
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.rewards import RewardRunner, open_scorer
from sglang_bridge.generation import Generation, VersionSpan

EXAMPLES = Path(__file__).parent / "examples"
MODEL = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
MOST_LINES = 40


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(MODEL)


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

    def judge(text: str, finish: FinishReason = FinishReason.STOP) -> tuple[float | None, float | None, str | None]:
        verdict = asyncio.run(runner.judge(prompt, text, finish))
        return verdict.reward, verdict.correctness, verdict.answer

    assert judge("46") == (1.0, 1.0, "46")
    assert judge("0 = 46") == (0.75, 1.0, "46")  # half as long again: half of the penalty
    assert judge("it is surely 46") == (0.5, 1.0, "46")
    assert judge("it is surely 47") == (0.0, 0.0, "47")
    assert judge("46", FinishReason.LENGTH) == (0.0, 0.0, None)
    with pytest.raises(ValueError, match="holds no number"):
        scorer.check_answer("Paris")
    with pytest.raises(DoorError, match=r"reward\.options: own_reward:RightAndShort\(limit=0\) refuses: limit must"):
        open_scorer(RewardSettings(name="own_reward:RightAndShort", options={"limit": 0}))


def test_own_loss_has_the_gradient_worked_out_by_hand() -> None:
    loss = open_loss(CustomAlgoSettings(name="own_loss:Cispo", options={"clip_high": 2.0}), read_shape(MODEL))
    old = torch.tensor([-1.0, -2.0, -3.0])
    response = ResponseTokens(
        old_logprobs=old,
        old_entropies=torch.ones(3),
        rollout_logprobs=old,
        advantages=torch.tensor([1.0, -2.0, 1.0]),
        cu_seqlens=torch.tensor([0, 2, 3], dtype=torch.int32),
    )
    logprobs = (old + torch.tensor([1.0, 2.0, 5.0]).log()).requires_grad_()  # ratios 1, 2 and 5; 5 is cut to 3
    result = loss.prepare(response)(logprobs, Denominators(sequences=2, tokens=4))
    result.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 4, 2 * 2 / 4, -3 / 4])  # -min(r, 3) A / N
    assert result.sums["policy/clip_fraction_high"].tolist() == [1.0, 3.0]


def test_own_source_writes_questions_that_are_split(tokenizer: Tokenizer) -> None:
    settings = DataSettings(source="own_source:Products", options={"digits": 3}, num_train=500, num_eval=50)
    check = open_scorer(RewardSettings()).check_answer
    prompts = open_prompts(settings, tokenizer, check)
    assert (len(prompts.train), len(prompts.held_out)) == (500, 50)
    sides = []
    for side in (prompts.train, prompts.held_out):
        factors = [tokenizer.decode(prompt.token_ids).removesuffix("=").split("*") for prompt in side]
        assert [prompt.answer for prompt in side] == [str(int(a) * int(b)) for a, b in factors]
        assert all(prompt.worked == prompt.answer and prompt.task == "products" for prompt in side)
        sides.append({frozenset(pair) for pair in factors})
    assert sides[0].isdisjoint(sides[1])
    assert [p.id for p in open_prompts(settings, tokenizer, check).take(20)] == [p.id for p in prompts.take(20)]


class Engine:
    """Stands in for the engine: gives the answers it was told to, one after the other."""

    def __init__(self, tokenizer: Tokenizer, answers: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._tokenizer = tokenizer
        self._answers = iter(answers)

    async def generate(self, tokens: Sequence[int], sampling: Sampling) -> Generation:
        self.asked.append(self._tokenizer.decode(tokens).replace("<eos>", "."))
        output = [*self._tokenizer.encode(next(self._answers)), self._tokenizer.eos_ids[0]]
        return Generation(
            output_ids=np.array(output, np.int32),
            logprobs=np.full(len(output), -0.5, np.float32),
            routes=None,
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan("3", 0, len(output)),),
            cached_tokens=0,
            retractions=0,
        )


def play(tokenizer: Tokenizer, *answers: str) -> tuple[Engine, Episode, Rollout]:
    environment = open_environment(EnvironmentSettings(name="own_environment:SecondTry", options={"hint": " no, "}))
    engine = Engine(tokenizer, answers)
    prompt = Prompt(id="p", token_ids=tokenizer.encode("12+34="), answer="46", task="t")
    rules = EpisodeRules(sampling=Sampling(max_new_tokens=20, temperature=1.0), routes=None, train_truncated=True)
    episode = Episode(prompt, engine.generate, tokenizer, rules, rollout_id="r")
    asyncio.run(environment.play(episode))
    return engine, episode, episode.rollout()


def test_own_environment_asks_again_after_a_wrong_answer(tokenizer: Tokenizer) -> None:
    engine, episode, rollout = play(tokenizer, "047", "046")
    assert engine.asked == ["12+34=", "12+34=047. no, "]
    assert episode.text == "046"
    assert [(s.role, s.trainable, tokenizer.decode(s.tokens.tolist())) for s in rollout.segments] == [
        (Role.PROMPT, False, "12+34="),
        (Role.RESPONSE, True, "047"),
        (Role.TOOL, False, " no, "),
        (Role.RESPONSE, True, "046"),
    ]


def test_own_environment_leaves_a_right_answer_alone(tokenizer: Tokenizer) -> None:
    engine, episode, rollout = play(tokenizer, "046")
    assert engine.asked == ["12+34="]
    assert (episode.text, len(rollout.segments)) == ("046", 2)


def test_contributing_shows_each_example_as_it_is() -> None:
    shown = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f"```python\n{file.read_text().rstrip()}\n```" in shown, f"{file.name} differs from CONTRIBUTING.md"
