"""A user-defined reward: correct answers, with a penalty for long responses.

With this folder on PYTHONPATH: reward.name=my_reward:CorrectAndShort reward.options='{limit: 24}'
"""

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import Scorer
from megatron_rl.rewards.answers import canonical, last_number


class CorrectAndShort(Scorer):
    """Rewards a correct last number with 1, minus a penalty for its length.

    The penalty grows from 0 at `limit` characters to `penalty` at twice as many. Advantages are
    computed from `correctness`, and `penalty` lowers them by at most half (`credit.shaping`): a
    long correct answer stays above an incorrect one. Groups that differ only in length do not
    train. Metrics show `reward`.
    """

    def __init__(self, limit: int, penalty: float = 0.5) -> None:
        if limit < 1 or not 0 <= penalty < 1:
            raise ValueError("limit must be at least 1, penalty at least 0 and below 1")
        self.limit = limit
        self.penalty = penalty

    def check_answer(self, question: Question) -> None:
        if last_number(question.answer) is None:
            raise ValueError(f"the reference answer {question.answer!r} holds no number")

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        answer = last_number(text) if finish_reason is FinishReason.STOP else None
        if answer is None or canonical(answer) != canonical(prompt.answer):
            return Verdict(reward=0.0, correctness=0.0, answer=answer)
        excess = min(max(len(text) / self.limit - 1, 0.0), 1.0)
        penalty = self.penalty * excess
        return Verdict(reward=1.0 - penalty, correctness=1.0, penalty=penalty, answer=answer)
