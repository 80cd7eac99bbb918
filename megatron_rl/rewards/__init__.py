"""Scoring of responses: scorers share one interface, and a runner calls them.

`exact_match` runs in a node's collector. Verifiers and user-defined scorers run in processes of
their own.
"""

from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.opening import open_answer_reader, open_scorer
from megatron_rl.rewards.runner import RewardRunner, ScorerInThisProcess
from megatron_rl.rewards.scorer import Scorer

__all__ = [
    "ExactMatch",
    "RewardRunner",
    "Scorer",
    "ScorerInThisProcess",
    "open_answer_reader",
    "open_scorer",
]
