"""Credit at its edges: exactly half right, and what the permutation control is seeded with."""

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.credit.group_kinds import Kind, kind_of
from tests.support.groups import group


def test_a_group_that_is_half_right_throughout_is_flat_right() -> None:
    assert kind_of(group(0.5, 0.5)) is Kind.ALL_CORRECT


def permuted(seed: int, step: int) -> BatchCredit:
    groups = [group(*[float(i % 2)] * 4, name=str(i)) for i in range(16)]
    return Credit(GrpoSettings(permute_rewards=True), seed=seed).assign(step, groups)


def test_the_permutation_repeats_with_seed_and_step_and_only_then() -> None:
    assert permuted(seed=1, step=2) == permuted(seed=1, step=2)
    assert permuted(seed=1, step=2) != permuted(seed=1, step=3)
    assert permuted(seed=1, step=2) != permuted(seed=2, step=2)


def test_without_normalisation_advantages_are_differences_from_the_mean() -> None:
    credited = Credit(GrpoSettings(normalize_std=False), seed=0).assign(1, [group(3.0, 1.0, 2.0)])
    assert credited.advantages == (1.0, -1.0, 0.0)
