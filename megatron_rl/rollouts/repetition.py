"""How much of a response repeats itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.rollout import Rollout

ALLOWED = 0.02  # of the tokens: formulas and lists repeat a little
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def repetition(tokens: npt.NDArray[np.integer], ngram: int) -> float:
    """The share of tokens in n-grams that occurred before in the response, beyond 2 %; from 0 to
    0.98.

    tokens [n]; fewer than ngram + 1 repeat nothing. A response that says one thing twice has about
    one half. 64-bit hashes of n-grams are compared, so two that differ may count as one with a
    probability of about n² / 2^65.
    """
    starts = len(tokens) - ngram + 1
    if starts < 2:
        return 0.0
    spread = _mixed(tokens.astype(np.uint64))
    hashes = np.zeros(starts, np.uint64)
    for offset in range(ngram):
        hashes = hashes * _MULTIPLIER + spread[offset : offset + starts]  # modulo 2^64
    first = np.unique(hashes, return_index=True)[1]
    again = np.ones(starts, bool)
    again[first] = False
    edges = np.zeros(len(tokens) + 1, np.int64)
    edges[:starts] += again
    edges[ngram:] -= again
    share = float((edges[:-1].cumsum() > 0).mean())
    return max(0.0, share - ALLOWED)


def sampled_tokens(rollout: Rollout) -> npt.NDArray[np.int32]:
    """What the policy wrote of a rollout, int32 [n]."""
    return np.concatenate(
        [np.empty(0, np.int32), *(s.tokens for s in rollout.segments if s.logprobs is not None)]
    )


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Token ids spread over 64 bits (splitmix64): sums of small ids times powers would coincide too
    easily.
    """
    values = values + _MULTIPLIER
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
