from dataclasses import replace

import pytest

from launch.studies.simulate_selection import (
    CUT,
    GENERALISE,
    SMALL,
    UNIFORM,
    VARIANTS,
    compare,
    main,
    simulate,
    table,
)

FLAT, SHARP = "belief, flat skipped", "belief, flat skipped, sharp"


def test_sharp_beliefs_spend_half_the_tokens_of_uniform_and_less_than_half_of_oversampling() -> (
    None
):
    results = compare(SMALL, 1.0, (UNIFORM, CUT, "belief", FLAT, SHARP))
    belief, gentle = results[SHARP], results[FLAT]
    assert belief["of uniform"] <= 0.5 and belief["of cut"] <= 0.45
    assert belief["unseen > 150"] <= 0.02 and belief["weight ESS"] > 0.85
    assert gentle["of uniform"] <= 0.55 and gentle["of cut"] <= 0.47, (
        "what a run does unasked costs a little more"
    )
    assert gentle["unseen > 150"] <= 0.02
    spares = results["belief"]
    assert 0.6 < spares["of uniform"] < 0.95, "hard prompts are asked as ever"
    assert results[UNIFORM]["rollouts/mixed"] == pytest.approx(20, rel=0.1), (
        "the world is that of the full size"
    )
    assert next(line for line in table(results) if "sharp" in line).startswith(
        "| belief, flat skipped, sharp | 9."
    )


def test_prompts_that_become_solvable_are_met_soon() -> None:
    assert simulate(VARIANTS[FLAT], SMALL, 0, 4.0)["newly seen"] >= 0.55


def test_what_the_policy_generalises_to_is_met_sooner_than_when_asking_all_in_turn() -> None:
    size = replace(GENERALISE, seeds=1)
    results = {name: simulate(VARIANTS[name], size, 0, 1.0) for name in (UNIFORM, FLAT, SHARP)}
    assert results[FLAT]["newly seen"] >= 0.75 > results[UNIFORM]["newly seen"]
    assert results[SHARP]["newly seen"] < 0.4, "the price of being sharp"
    assert results[FLAT]["ktok/mixed"] <= 0.75 * results[UNIFORM]["ktok/mixed"]


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--drift=-1"])
    assert "--drift must be from 0 to 100" in capsys.readouterr().err
