"""Simulated costs of the ways to select prompts."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_rl.config.schema import SelectionSettings
from tests.lab.simulate_selection import (
    GENERALISE,
    OVERSAMPLE,
    SMALL,
    UNIFORM,
    VARIANTS,
    compare,
    main,
    simulate,
    table,
)

pytestmark = pytest.mark.slow

PRESETS = Path(__file__).parents[2] / "hydra_conf" / "selection"
SKIP = "belief, skip=zero_variance"


@pytest.mark.nightly
def test_beliefs_halve_the_tokens_of_uniform_and_of_oversampling() -> None:
    results = compare(SMALL, 1.0, (UNIFORM, OVERSAMPLE, "belief", SKIP))
    uniform = results[UNIFORM]
    default = results["belief"]
    skip = results[SKIP]
    assert uniform["rollouts/mixed"] == pytest.approx(20, rel=0.1), "as in the full size"
    assert skip["of uniform"] <= 0.55 and skip["of oversampling"] <= 0.47
    assert skip["unseen > 150"] <= 0.02
    assert 0.6 < default["of uniform"] < 0.95, "by default hard prompts are sampled as before"
    assert any(line.startswith(f"| {SKIP} | 10.") for line in table(results))


def test_prompts_that_become_solvable_are_sampled_soon() -> None:
    assert simulate(VARIANTS[SKIP], SMALL, 0, 4.0)["newly solvable, seen"] >= 0.55


def test_generalisation_is_noticed_sooner_than_with_uniform_selection() -> None:
    size = replace(GENERALISE, seeds=1)
    results = {name: simulate(VARIANTS[name], size, 0, 1.0) for name in (UNIFORM, SKIP)}
    shares = {name: result["newly solvable, seen"] for name, result in results.items()}
    assert shares[SKIP] >= 0.75 > shares[UNIFORM]
    assert results[SKIP]["ktok/mixed"] <= 0.75 * results[UNIFORM]["ktok/mixed"]


@pytest.mark.parametrize("name", ["oversample", "belief"])
def test_variants_have_the_settings_of_their_presets(name: str) -> None:
    preset = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    assert VARIANTS[name] == SelectionSettings(**preset)


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--drift=-1"])
    assert "--drift=-1: it must be from 0 to 100" in capsys.readouterr().err
