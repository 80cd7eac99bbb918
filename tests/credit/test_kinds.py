import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.credit.kinds import Kind, classify, eliminate

NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


def verdict(correctness: float | None, reward: float | None = None) -> Verdict:
    if correctness is None:
        return Verdict(reward=None, correctness=None, reason="timeout")
    return Verdict(reward=correctness if reward is None else reward, correctness=correctness)


def group(*verdicts: Verdict, name: str = "g") -> Group:
    samples = tuple(
        RolloutRef(
            rollout_id=f"{name}/{i}",
            prompt_id=name,
            sample_index=i,
            num_inputs=9,
            num_trainable=4,
            finish_reason=FinishReason.STOP,
            versions=(0,),
            verdict=v,
            location=NOWHERE,
        )
        for i, v in enumerate(verdicts)
    )
    return Group(group_id=name, prompt=Prompt(id=name, token_ids=(1,), answer="1", task="t"), samples=samples)


@pytest.mark.parametrize(
    ("correctness", "kind"),
    [
        ([1, 0, 0], Kind.MIXED),
        ([1, 1, 1], Kind.FLAT_RIGHT),
        ([0, 0], Kind.FLAT_WRONG),
        ([0.3, 0.3], Kind.FLAT_WRONG),
        ([0.3, 0.4], Kind.MIXED),
        ([1, None, 0], Kind.MIXED),
        ([1, None, 1], Kind.FLAT_RIGHT),
        ([1, None, None], Kind.TOO_FEW_VERDICTS),
        ([None, None], Kind.TOO_FEW_VERDICTS),
        ([], Kind.TOO_FEW_VERDICTS),
    ],
)
def test_kinds(correctness: list[float | None], kind: Kind) -> None:
    assert classify(group(*map(verdict, correctness))) is kind


def test_shaping_never_decides() -> None:
    shaped_apart = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert classify(shaped_apart) is Kind.FLAT_WRONG
    shaped_together = group(verdict(1.0, reward=0.5), verdict(0.0, reward=0.5))
    assert classify(shaped_together) is Kind.MIXED


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, None]), max_size=5), max_size=12))
def test_kept_and_counted_add_up(batch: list[list[float | None]]) -> None:
    groups = [group(*map(verdict, scores), name=str(i)) for i, scores in enumerate(batch)]
    result = eliminate(groups)
    assert sum(result.counts.values()) == len(groups)
    assert len(result.kept) == result.counts[Kind.MIXED]
    assert [g.group_id for g in result.kept] == [g.group_id for g in groups if classify(g) is Kind.MIXED]
    assert set(result.counts) == set(Kind)


def test_the_rate_by_hand() -> None:
    scores = [(1, 0), (1, 1), (0, 0), (0, 0), (1, None)]
    result = eliminate([group(*map(verdict, s)) for s in scores])
    assert result.zero_variance_rate == 3 / 4  # of four groups with two verdicts three are flat
    assert eliminate([]).zero_variance_rate == 0.0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algo\.zero_variance=keep: .*drop"):
        eliminate([], "keep")
