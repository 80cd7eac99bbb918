"""Measure of how much a response repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_rl.config.schema import REPETITION_CHECK_TOKENS
from megatron_rl.contracts.rollout import Rollout

ALLOWED_SHARE = 0.02  # of the tokens, because formulas and lists repeat a little
NGRAM_TOKENS = 40  # longer than the phrases and formulas that a good response repeats
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def repetition(tokens: npt.NDArray[np.integer], ngram: int) -> float:
    """Return the share of tokens in n-grams that occurred earlier in the response, beyond 2 %.

    tokens [n]: the response. Fewer than ngram + 1 tokens repeat nothing.

    The result is from 0 to 0.98, and about one half for a response that consists of the same text
    twice. N-grams are compared by 64-bit hashes, which collide with a probability of about
    n² / 2^65.
    """
    num_ngrams = len(tokens) - ngram + 1
    if num_ngrams < 2:
        return 0.0
    mixed_ids = _mix(tokens.astype(np.uint64))
    hashes = np.zeros(num_ngrams, np.uint64)
    for offset in range(ngram):
        hashes = hashes * _MULTIPLIER + mixed_ids[offset : offset + num_ngrams]  # modulo 2^64
    first_occurrences = np.unique(hashes, return_index=True)[1]
    is_repeat = np.ones(num_ngrams, bool)
    is_repeat[first_occurrences] = False
    # The cumulative sum counts the repeated n-grams that cover each token
    edges = np.zeros(len(tokens) + 1, np.int64)
    edges[:num_ngrams] += is_repeat
    edges[ngram:] -= is_repeat
    share = float((edges[:-1].cumsum() > 0).mean())
    return max(0.0, share - ALLOWED_SHARE)


@dataclass
class RepetitionStop:
    """Ends the responses of one episode that repeat themselves.

    It looks at a response each time that it has another `every` tokens. What it decides depends on
    the tokens alone, and not on the pieces in which they come.

    threshold: the largest share of repeated n-grams, as `repetition` measures it. ngram: the tokens
    of an n-gram. has_stopped: True once it has ended a response.
    """

    threshold: float
    ngram: int = NGRAM_TOKENS
    every: int = REPETITION_CHECK_TOKENS
    has_stopped: bool = False

    def next_check(self, num_tokens: int) -> int:
        """Return the number of tokens at which a response is looked at again."""
        return num_tokens - num_tokens % self.every + self.every

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return True if a response ends with these tokens. token_ids: all of it so far."""
        if len(token_ids) % self.every:
            return False
        is_over = repetition(np.asarray(token_ids), self.ngram) > self.threshold
        self.has_stopped = self.has_stopped or is_over
        return is_over


def repetition_of(rollout: Rollout, ngram: int | None) -> float:
    """Return the repetition in the tokens that the policy sampled, 0 without an n-gram length.

    ngram: `credit.repetition_ngram`.
    """
    if ngram is None:
        return 0.0
    tokens = [s.tokens for s in rollout.segments if s.logprobs is not None]
    return repetition(np.concatenate([np.empty(0, np.int32), *tokens]), ngram)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread token ids over 64 bits (splitmix64).

    Without this, sums of small ids times powers of the multiplier would collide too often.
    """
    values = values + _MULTIPLIER
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
