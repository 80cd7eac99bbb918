"""A calculator that the model calls: it adds numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.episode import Episode

# At most eight numbers of nine digits, so that no text of the model causes much work. The end of
# a longer sum is no call: its result would be wrong.
_SUM = r"(?<![\d+])\d{1,9}(?:\+\d{1,9}){1,7}"
_CALL = re.compile(rf"({_SUM})=\Z", re.ASCII)
_CALL_WITH_RESULT = re.compile(rf"{_SUM}=(?=\d)", re.ASCII)
_MAX_CALLS = 32


class Calculator:
    """Answers responses that end with a call such as `3+8+1=`: the model reads the sum and goes on.

    The sum has at least two digits: `12`, `05`. The sum is no part of what trains. A response
    without a call ends the episode, and is scored. `rollout.max_new_tokens` limits all responses
    and sums together.
    """

    async def play(self, episode: Episode) -> None:
        """Play one episode: respond until a response has no call."""
        for _ in range(_MAX_CALLS):
            response = await episode.respond()
            if response.finish_reason is not FinishReason.STOP:
                return
            result = answer_call(response.text)
            if result is None:
                return
            episode.observe(result)


def answer_call(text: str) -> str | None:
    """Return the sum that a response asks for at its end, None without a valid call."""
    call = _CALL.search(text)
    return None if call is None else format_sum(map(int, call[1].split("+")))


def format_sum(numbers: Iterator[int]) -> str:
    """Return a sum as the calculator writes it, with two digits or more."""
    return f"{sum(numbers):02d}"


def demonstrate_calls(episode: Episode, demonstration: str) -> None:
    """Add a demonstration whose calls are followed by their results, such as `a3+8=11b1+3+1=05`.

    Each part up to a call is a response. The results are read and not trained. Raises ValueError
    for a result that is not the calculator's.
    """
    start = 0
    for call in _CALL_WITH_RESULT.finditer(demonstration):
        if call.start() < start:
            continue  # inside of the result before
        response = demonstration[start : call.end()]
        result = answer_call(response)
        if result is None or not demonstration.startswith(result, call.end()):
            raise ValueError(
                f"the demonstration {demonstration!r} has another result than {result} after "
                f"{response!r}"
            )
        episode.demonstrate(response)
        episode.observe(result)
        start = call.end() + len(result)
    episode.demonstrate(demonstration[start:])
