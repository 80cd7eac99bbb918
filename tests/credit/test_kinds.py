import pytest

from megatron_rl.credit.kinds import Kind, kind_of
from support.groups import group, verdict


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
    assert kind_of(group(*map(verdict, correctness))) is kind


def test_shaping_never_decides() -> None:
    shaped_apart = group(verdict(0.0, reward=0.2), verdict(0.0, reward=-0.3))
    assert kind_of(shaped_apart) is Kind.FLAT_WRONG
    shaped_together = group(verdict(1.0, reward=0.5), verdict(0.0, reward=0.5))
    assert kind_of(shaped_together) is Kind.MIXED
