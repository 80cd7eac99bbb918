"""The configuration accepts exactly the fractions of entropy groups that the kernel accepts."""

import pytest

from espo_kernels.espo_groups.settings import MAX_DENOMINATOR, MAX_GROUPS, group_settings
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import configuration_of

SMALLEST = 1 / MAX_DENOMINATOR
TENTHS = [0.1, 0.2, 0.3, 0.4]  # as floats, these add up to exactly 1.0
THIRDS = [1 / 3, 1 / 3, 1 / 3]
ABOVE_ONE_BY_ROUNDING = [0.7, 0.1, 0.1, 0.1]


def kernel_accepts(fractions: list[float]) -> bool:
    try:
        group_settings(100, 0.02, fractions, 3e-4, None)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "fractions",
    [
        [],
        [SMALLEST],
        [SMALLEST / 2],
        [1 - SMALLEST],
        [1 - SMALLEST / 2],
        [1.0],
        [0.01] * (MAX_GROUPS - 1),
        [0.01] * MAX_GROUPS,
        TENTHS,
        THIRDS,
        ABOVE_ONE_BY_ROUNDING,
        [0.6, 0.6],
    ],
    ids=str,
)
def test_configuration_and_kernel_accept_the_same_fractions(fractions: list[float]) -> None:
    try:
        configuration_of(["experiment=smoke", "algo=espo", f"algo.fractions={fractions}"])
        is_accepted = True
    except ConfigurationRefused as refusal:
        assert "algo.fractions" in str(refusal)
        is_accepted = False
    assert is_accepted == kernel_accepts(fractions)
