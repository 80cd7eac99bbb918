import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import ExactMatch, Scorer, open_scorer


class Inherits(Scorer):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


class Waits:
    """Has one of the two methods."""

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


class Blocks(Scorer):
    def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


def named(cls: type, **options: object) -> RewardSettings:
    return RewardSettings(name=f"{__name__}:{cls.__name__}", options=options)


def test_the_settings_reach_exact_match() -> None:
    scorer = open_scorer(RewardSettings(answer="boxed"))
    assert isinstance(scorer, ExactMatch)
    with pytest.raises(ValueError, match=r"reward\.answer=boxed"):
        scorer.check_answer(" ")


def test_an_inherited_check_lets_every_reference_pass() -> None:
    scorer = open_scorer(named(Inherits, limit=3))
    assert isinstance(scorer, Inherits) and scorer.limit == 3
    scorer.check_answer("")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (named(Waits), r"reward\.name=.*:Waits: it has no method `check_answer`"),
        (
            named(Blocks),
            r"reward\.name=.*:Blocks: `score` is an ordinary function\. Write `async def score`",
        ),
        (
            named(Inherits, limitt=3),
            r"reward\.options\.limitt: .*Inherits\(limit\).*Did you mean limit\?",
        ),
    ],
)
def test_what_cannot_judge_is_refused_before_the_run(
    settings: RewardSettings, message: str
) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        open_scorer(settings)
    assert caught.value.exit_code is ExitCode.REFUSED
