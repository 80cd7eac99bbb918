import pytest

from launch.simulate_selection import CUT, SMALL, UNIFORM, VARIANTS, compare, main, simulate, table


def test_beliefs_spend_half_the_tokens_of_uniform_and_less_than_half_of_oversampling() -> None:
    results = compare(SMALL, 1.0, (UNIFORM, CUT, "belief"))
    belief = results["belief"]
    assert belief["of uniform"] <= 0.5 and belief["of cut"] <= 0.45
    assert belief["unseen > 150"] <= 0.02 and belief["weight ESS"] > 0.85
    assert results[UNIFORM]["rollouts/mixed"] == pytest.approx(20, rel=0.1), "the world is that of the full size"
    assert next(line for line in table(results) if "belief" in line).startswith("| belief | 9.")


def test_prompts_that_become_solvable_are_met_soon() -> None:
    assert simulate(VARIANTS["belief"], SMALL, 0, 4.0)["newly seen"] >= 0.55


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--drift=-1"])
    assert "--drift must be from 0 to 100" in capsys.readouterr().err
