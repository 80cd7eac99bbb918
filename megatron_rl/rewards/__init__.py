"""How responses are judged: scorers behind one interface, and the runner that calls them."""

from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.runner import RewardRunner
from megatron_rl.rewards.scorer import Scorer

__all__ = ["ExactMatch", "RewardRunner", "Scorer", "build_scorer"]


def build_scorer(name: str, *, answer: str = "last_number") -> Scorer:
    """The scorer of a name: `exact_match`. Raises ValueError for others."""
    if name != "exact_match":
        raise ValueError(f"reward.name={name}: there is no such scorer. Choose exact_match")
    return ExactMatch(answer)
