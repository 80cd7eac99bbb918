"""How much flat groups weigh beside mixed ones is said when it is off, once."""

from megatron_rl.records.flat_balance import ZeroVarianceBalanceAlarm


def values(flat: float, mixed: float = 1.0, samples: float = 3.0) -> dict[str, float]:
    return {
        "policy/advantage_flat": flat,
        "policy/advantage_mixed": mixed,
        "train/zero_variance_samples": samples,
    }


def test_a_warning_where_the_quotient_leaves_its_range_and_not_again_while_it_is_outside() -> None:
    balance = ZeroVarianceBalanceAlarm()
    said = [balance.note(values(flat)) for flat in (0.1, 0.01, 0.001, 0.3, 0.6, 0.02)]
    assert [text is not None for text in said] == [False, True, False, False, True, False]
    assert "raise credit.zvp_alpha" in str(said[1]) and "0.01 times the advantage" in str(said[1])
    assert "lower credit.zvp_alpha" in str(said[4])


def test_steps_without_flat_or_without_mixed_rollouts_say_nothing() -> None:
    assert ZeroVarianceBalanceAlarm().note(values(9.0, samples=0.0)) is None
    assert ZeroVarianceBalanceAlarm().note(values(9.0, mixed=0.0)) is None
    assert ZeroVarianceBalanceAlarm().note({}) is None
