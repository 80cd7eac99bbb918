"""Simulated shares of prompts in the loss, by their pass rate."""

from dataclasses import replace

import pytest

from launch.studies.selection_shares import SHARE_VARIANTS, SMALL, measure, table

SIZE = replace(SMALL, prompts=400, prompts_per_step=32, steps=40, first_steps=15)


def test_seldom_sampled_pass_rates_count_less_unless_they_are_reweighted() -> None:
    results = {
        name: measure(SHARE_VARIANTS[name], SIZE)
        for name in ("uniform", "belief", "belief, reweight=10")
    }
    uniform, belief, reweighting = results.values()
    assert uniform["0.7 to 0.89"] == pytest.approx(1, abs=0.3)
    assert uniform["all correct"] == pytest.approx(1, abs=0.3)
    for column in ("0.89 to 0.96", "all correct"):
        assert belief[column] < 0.5 < 0.6 < reweighting[column]
    lines = list(table(results))
    assert lines[0].startswith("| | 0 to 0.03 | 0.03 to 0.1 |")
    assert lines[3].startswith("| belief | ")
