"""Changes with which a rank fits: their order, which are rehearsed, and the lines about them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.measurement import Measurement, copy_model, has_equal_stages, measure
from launch.rehearsal.options import read_options
from launch.rehearsal.remedies import (
    MAX_REMEDIES,
    Candidate,
    list_candidates,
    rehearse_remedies,
    remedies,
)
from megatron_rl.config.schema import Configuration
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION

GIB = 2**30
PUBLISHED = Path(__file__).parents[2] / "support/published/qwen3_30b_a3b"
SHAPE = read_shape(PUBLISHED)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A command for Qwen3-30B-A3B, which does not fit."""
    model = tmp_path_factory.mktemp("model")
    for file in Path(TWO_DIGIT_ADDITION).glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((PUBLISHED / "config.json").read_text())
    # The end of a sequence is the tiny tokenizer's
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    return (
        "rank=2",
        "ranks=4",
        "experiment=smoke",
        "model=hf",
        f"model.path={model}",
        "model.init=random",
        "parallel.ep=4",
        "model.dtype=bfloat16",
        "engine=external",
        "engine.urls=[http://10.0.0.7:30000]",
        "out=numbers.json",
    )


@pytest.fixture(autouse=True, scope="module")
def composition() -> Iterator[None]:
    """Let commands be composed from memory: the search composes thirty."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("launch.rehearsal.options.compose", configuration_of)
        yield


def configuration(arguments: Sequence[str]) -> Configuration:
    return read_options(arguments).configuration()


def candidates(arguments: Sequence[str]) -> list[Candidate]:
    return list(list_candidates(configuration(arguments), SHAPE, arguments))


class Rehearsals:
    """Answers with a size, and records what was rehearsed."""

    def __init__(self, size: float = 60 * GIB) -> None:
        self.size = size
        self.commands: list[Sequence[str]] = []

    def __call__(
        self, arguments: Sequence[str], c: Configuration, shape: ModelShape
    ) -> Measurement:
        self.commands.append(arguments)
        if "parallel.pp=4" in arguments:
            raise RehearsalUnavailable("torch has no shapes for an operation")
        return Measurement({"update": self.size}, 2e9)


def lines(rehearse: Rehearsals, arguments: Sequence[str]) -> list[str]:
    return list(
        rehearse_remedies(
            configuration(arguments),
            SHAPE,
            arguments=arguments,
            peak=140 * GIB,
            work=1e9,
            rehearse=rehearse,
        )
    )


@pytest.fixture(scope="module")
def failing_search(arguments: tuple[str, ...], composition: None) -> tuple[Rehearsals, list[str]]:
    """The rehearsals and the lines of a search in which no change fits."""
    rehearse = Rehearsals(size=90 * GIB)
    return rehearse, lines(rehearse, arguments)


@pytest.mark.slow
def test_changes_of_settings_come_before_other_grids_and_those_before_more_ranks(
    arguments: tuple[str, ...],
) -> None:
    c = configuration((*arguments, "train.tokens_per_micro_batch=64", "model.dtype=float32"))
    changes = [remedy.arguments for remedy in remedies(c, SHAPE, ranks=8)]
    settings = [
        ("train.tokens_per_micro_batch=32",),
        ("model.recompute=full",),
        ("model.dtype=bfloat16",),
    ]
    together = tuple(argument for change in settings for argument in change)
    assert changes[:6] == [
        *settings,
        together,
        ("parallel.ep=8",),
        ("parallel.ep=8", *together),
    ]
    assert changes[6][0] == "parallel.pp=2"
    assert changes[8] == ("ranks=16",)
    assert all(change[0].startswith("ranks=") for change in changes[8:])


@pytest.mark.slow
def test_a_change_replaces_arguments_and_keeps_the_rank_s_place_in_the_pipeline(
    arguments: tuple[str, ...],
) -> None:
    by_change = {str(candidate.remedy): candidate for candidate in candidates(arguments)}
    twice = by_change["ranks=8 parallel.ep=8"]
    assert "rank=4" in twice.arguments
    assert not {"parallel.ep=4", "ranks=4", "rank=2", "out=numbers.json"} & set(twice.arguments)
    assert twice.configuration is not None
    assert twice.configuration.parallel.ep == 8


@pytest.mark.slow
def test_a_change_that_the_estimate_finds_too_large_is_not_rehearsed(
    arguments: tuple[str, ...], failing_search: tuple[Rehearsals, list[str]]
) -> None:
    rehearse, output = failing_search
    limit = read_options(arguments).gpu.memory
    accepted_by_settings = [entry for entry in candidates(arguments) if not entry.refusal]
    too_large = [entry for entry in accepted_by_settings if entry.estimate > 1.05 * limit]
    assert 0 < len(too_large) < len(accepted_by_settings)
    assert len([line for line in output if line.startswith("too large by")]) == len(too_large)
    assert len(rehearse.commands) == len(accepted_by_settings) - len(too_large)


@pytest.mark.slow
def test_the_search_ends_with_three_changes_that_fit(arguments: tuple[str, ...]) -> None:
    rehearse = Rehearsals()
    output = lines(rehearse, arguments)
    assert len(rehearse.commands) == MAX_REMEDIES == 3
    fits = [line for line in output if line.startswith("fits: ")]
    assert len(fits) == 3
    assert output[-1] == fits[-1]
    assert "60.00 GiB, 80.00 GiB less on rank " in fits[0]
    assert "2.00 times the matrix products of a row" in fits[0]
    assert "Cost: " in fits[0]


def test_changes_that_do_not_fit_are_all_tried(
    failing_search: tuple[Rehearsals, list[str]],
) -> None:
    rehearse, output = failing_search
    assert not [line for line in output if line.startswith("fits")]
    assert "Take a GPU with more memory" in output[-1]
    assert len(rehearse.commands) > MAX_REMEDIES


def test_a_change_that_cannot_be_rehearsed_is_named(
    failing_search: tuple[Rehearsals, list[str]],
) -> None:
    _, output = failing_search
    unavailable = [line for line in output if line.startswith("cannot be rehearsed: ")]
    assert unavailable
    assert all("parallel.pp=4" in line and "no shapes" in line for line in unavailable)


def test_a_change_that_the_settings_refuse_is_named(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import launch.rehearsal.remedies as module

    impossible_change = module.Remedy(("parallel.tp=3",), "nothing")
    monkeypatch.setattr(module, "remedies", lambda *_: iter([impossible_change]))
    assert lines(Rehearsals(), arguments)[0].startswith("refused: parallel.tp=3: ")


def test_shallow_models_are_continued_by_a_line() -> None:
    two = Measurement({"setup": 10.0, "update": 20.0}, 5.0)
    four = Measurement({"setup": 14.0, "update": 30.0}, 9.0)
    whole = two.extend(four, (48 - 2) / 2)
    assert whole == Measurement({"setup": 102.0, "update": 250.0}, 97.0)
    assert whole.peak == 250.0


@pytest.mark.parametrize(
    ("parallel", "changes", "is_equal"),
    [
        ({}, {}, True),
        ({}, {"num_layers": 4, "moe_layers": (0, 1, 2, 3)}, False),
        ({}, {"moe_layers": tuple(range(1, 48))}, False),
        ({"pp": 4}, {}, True),
        ({"pp": 4}, {"num_layers": 46, "moe_layers": tuple(range(46))}, False),
    ],
)
def test_only_equal_stages_are_continued(
    arguments: tuple[str, ...],
    parallel: dict[str, Any],
    changes: dict[str, Any],
    is_equal: bool,
) -> None:
    c = configuration(arguments)
    c = replace(c, parallel=replace(c.parallel, **parallel))
    assert has_equal_stages(c, replace(SHAPE, **changes)) == is_equal


def test_a_shallow_copy_of_a_model_has_no_weights(tmp_path: Path) -> None:
    source = Path(TWO_DIGIT_ADDITION)
    copy = copy_model(source, tmp_path, 2)
    assert json.loads((copy / "config.json").read_text())["num_hidden_layers"] == 2
    assert (copy / "tokenizer.json").exists()
    assert not list(copy.glob("*.safetensors"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_deep_model_needs_what_its_shallow_ones_foretell(arguments: tuple[str, ...]) -> None:
    """Eight layers, rehearsed whole and continued from two and four."""
    model = next(entry for entry in arguments if entry.startswith("model.path="))
    folder = Path(model.partition("=")[2])
    eight = copy_model(folder, folder, 8)
    others = [entry for entry in arguments if not entry.startswith(("out=", "model.path="))]
    command = [*others, f"model.path={eight}", "rollout.max_new_tokens=1000"]
    c = configuration(command)
    whole = measure(command, c, replace(SHAPE, num_layers=3))  # too few layers to continue
    estimate = measure(command, c, read_shape(eight))
    assert estimate.memory == pytest.approx(whole.memory, rel=0.002)
    assert estimate.work == pytest.approx(whole.work, rel=0.002)
