"""Refusals of quantized engines, by what the model and the machine do not allow."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.configurations import BF16, NODE, MakeCheckpoint, accept, refusals

FP8 = "engine.quantization=fp8"
EXTERNAL = ("engine=external", "engine.urls=['http://127.0.0.1:3']")
# hidden, queries, keys and experts are multiples of 128
DIVIDED: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}


@pytest.fixture
def divided_model(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**DIVIDED)


@pytest.mark.slow
def test_fp8_engines_are_accepted(divided_model: Path) -> None:
    for options in ((), EXTERNAL, (BF16,)):
        assert accept(divided_model, FP8, *options).engine.quantization == "fp8"
    c = accept(
        divided_model, FP8, "engine.unquantized_first_layers=1", "engine.unquantized_last_layers=2"
    )
    assert c.engine.unquantized_last_layers == 2
    assert accept(divided_model, FP8, BF16, facts=NODE).engine.quantization == "fp8"


@pytest.mark.parametrize("mode", [(), EXTERNAL])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": 192}, "hidden_size=192"),
        ({"head_dim": 16}, "heads x head_dim=64"),
        ({"num_key_value_heads": 1}, "key-value heads x head_dim=64"),
        ({"moe_intermediate_size": 192}, "moe_intermediate_size=192"),
        ({"mlp_only_layers": [1], "intermediate_size": 160}, "intermediate_size=160"),
    ],
)
def test_blocks_that_do_not_divide_are_named(
    make_checkpoint: MakeCheckpoint, mode: tuple[str, ...], changes: dict[str, Any], part: str
) -> None:
    results = refusals(make_checkpoint(**DIVIDED | changes), FP8, *mode)
    rules = [refusal.rule for refusal in results if refusal.key == "engine.quantization"]
    assert any(f"and {part} is no multiple of 128" in rule for rule in rules), rules


def test_parallel_sizes_that_cut_a_block_are_named(divided_model: Path) -> None:
    results = refusals(divided_model, FP8, BF16, "engine.tp=4", facts=NODE)
    remedies = {r.rule: r.remedy for r in results if r.key == "engine.quantization"}
    experts = "moe_intermediate_size=64 on each of engine.tp=4 ranks is no multiple of 128"
    assert any(experts in rule for rule in remedies)
    assert all("Lower engine.tp" in remedy for remedy in remedies.values())


def test_expert_parallel_engines_are_the_remedy(make_checkpoint: MakeCheckpoint) -> None:
    path = make_checkpoint(**DIVIDED | {"moe_intermediate_size": 128, "head_dim": 128})
    (refusal,) = refusals(path, FP8, BF16, "engine.tp=2", facts=NODE)
    assert refusal.key == "engine.quantization" and "moe_intermediate_size=64" in refusal.rule
    assert refusal.remedy == "Use engine.ep=2, or lower engine.tp"
    assert accept(path, FP8, BF16, "engine.tp=2", "engine.ep=2", facts=NODE).engine.ep == 2
    # CPU engines cannot divide experts
    (refusal,) = refusals(path, FP8, "engine.tp=2")
    assert refusal.key == "engine.quantization" and refusal.remedy == "Lower engine.tp"


@pytest.mark.parametrize("options", [(), (BF16,)])
def test_fp8_engines_of_two_ranks_are_accepted_on_cpus(
    make_checkpoint: MakeCheckpoint, options: tuple[str, ...]
) -> None:
    path = make_checkpoint(**DIVIDED | {"head_dim": 128})
    assert accept(path, FP8, "engine.tp=2", *options).engine.tp == 2


@pytest.mark.parametrize(
    ("options", "key", "reason"),
    [
        (("engine.unquantized_first_layers=4",), "engine.unquantized_first_layers", "4 layers"),
        (
            ("engine.unquantized_first_layers=1", "engine.unquantized_last_layers=3"),
            "engine.unquantized_last_layers",
            "4 layers",
        ),
        (("mode=eval",), "engine.quantization", "sends no weights"),
        (
            ("mode=profile", "data.pass_rates=r.jsonl"),
            "engine.quantization",
            "sends no weights",
        ),
    ],
)
def test_settings_that_contradict_fp8_are_named(
    divided_model: Path, options: tuple[str, ...], key: str, reason: str
) -> None:
    results = [r for r in refusals(divided_model, FP8, *options) if r.key == key]
    assert results and reason in results[0].rule
