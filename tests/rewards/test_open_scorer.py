"""Opening a scorer: built-in, user-defined and invalid ones."""

import pytest

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import ExactMatch, Scorer, open_scorer
from tests.support.questions import make_question


class Inherits(Scorer):
    def __init__(self, limit: int) -> None:
        self.limit = limit

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


class OnlyScores:
    """Lacks `check_answer`."""

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


class Blocks(Scorer):
    def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        return Verdict(reward=1.0, correctness=1.0)


class Empty(Scorer):
    """Inherits the protocol's empty method `score`."""


def settings_of(cls: type, **options: object) -> RewardSettings:
    return RewardSettings(name=f"{__name__}:{cls.__name__}", options=options)


def test_exact_match_gets_its_settings() -> None:
    scorer = open_scorer(RewardSettings(answer="boxed"))
    assert isinstance(scorer, ExactMatch)
    with pytest.raises(ValueError, match=r"reward\.answer=boxed"):
        scorer.check_answer(make_question(" "))


def test_inherited_check_accepts_every_reference() -> None:
    scorer = open_scorer(settings_of(Inherits, limit=3))
    assert isinstance(scorer, Inherits) and scorer.limit == 3
    scorer.check_answer(make_question(""))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (settings_of(OnlyScores), r"reward\.name=.*:OnlyScores: it has no method `check_answer`"),
        (
            settings_of(Empty),
            r"reward\.name=.*:Empty: it has no method `score`\. Define",
        ),
        (
            settings_of(Blocks),
            r"reward\.name=.*:Blocks: `score` is not asynchronous\. Write `async def score`",
        ),
        (
            settings_of(Inherits, limitt=3),
            r"reward\.options\.limitt: .*Inherits\(limit\).*Did you mean limit\?",
        ),
    ],
)
def test_invalid_scorers_are_refused(settings: RewardSettings, message: str) -> None:
    with pytest.raises(PluginError, match=message) as error:
        open_scorer(settings)
    assert error.value.exit_code is ExitCode.REFUSED
