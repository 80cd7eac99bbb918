"""Merging of checkpoints: tensors by hand, directories by their files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from launch.testbed.policies import TWO_DIGIT_ADDITION
from megatron_rl.models.hf_checkpoint.merging import linear, merge_checkpoints, ties
from megatron_rl.models.hf_checkpoint.reader import CheckpointError


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_linear_is_the_weighted_mean() -> None:
    assert linear([t(1, 2), t(5, -2)], [3, 1]).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "scale", "expected"),
    [
        # the larger half of each change: (4, 0, 2, 0) and (-3, 2, 0, 0)
        ([1, 1], 1.0, [4, 2, 2, 0]),  # signs of (1, 2, 2, 0); at 0 only the first model is positive
        (
            [1, 2],
            1.0,
            [-3, 2, 2, 0],
        ),  # signs of (-2, 4, 2, 0); where one model has the sign, its weight cancels
        ([1, 1], 0.5, [2, 1, 1, 0]),
    ],
)
def test_ties_by_hand(weights: list[float], scale: float, expected: list[float]) -> None:
    base = t(10, 20, 30, 40)
    models = [base + t(4, -1, 2, 0.5), base + t(-3, 2, 1, -0.25)]
    assert (ties(base, models, weights, density=0.5, scale=scale) - base).tolist() == expected


def test_ties_averages_by_weight_those_that_agree() -> None:
    models = [t(4, 0), t(1, 0), t(-2, 0)]
    assert ties(t(0, 0), models, [1, 3, 1], density=0.5, scale=1.0).tolist() == [(4 + 3) / 4, 0]


def test_of_equal_changes_at_the_border_the_first_are_kept() -> None:
    assert ties(t(0, 0, 0, 0), [t(1, -1, 1, 2)], [1], density=0.5, scale=1.0).tolist() == [
        1,
        0,
        0,
        2,
    ]


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=20), st.floats(0.01, 1))
def test_ties_of_one_model_moves_its_largest_changes_alone(
    changes: list[float], density: float
) -> None:
    change = torch.tensor(changes)
    moved = ties(torch.zeros(len(changes)), [change], [2.0], density=density, scale=1.0)
    kept = moved != 0
    assert torch.equal(moved[kept], change[kept]) and kept.sum() <= max(
        1, round(density * len(changes))
    )
    assert (change[~kept].abs().max() if (~kept).any() else 0) <= (
        change[kept].abs().min() if kept.any() else 0
    )


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """The start checkpoint, and one whose every value is 1 more."""
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "a")
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "b")
    change(
        tmp_path / "b",
        {name: tensor + 1 for name, tensor in load_file(tmp_path / "a/model.safetensors").items()},
    )
    return [tmp_path / "a", tmp_path / "b"]


def change(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return linear(tensors, [1, 1])


def test_a_merged_checkpoint_is_whole_in_shards_too(sources: list[Path], tmp_path: Path) -> None:
    merge_checkpoints(sources, tmp_path / "out", mean, dtype=torch.bfloat16, shard_bytes=100_000)  # type: ignore[arg-type]
    a, b = (load_file(source / "model.safetensors") for source in sources)
    expected = {
        name: ((tensor.float() + b[name].float()) / 2).bfloat16() for name, tensor in a.items()
    }
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == expected.keys() and len(set(index.values())) > 1
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, expected["lm_head.weight"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "a holds model.norm.weight and .*b does not"),
        (lambda w: w.update(more=torch.ones(1)), "b holds more and .*a does not"),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(3)}),
            "model.norm.weight has the shape .* in .*a and",
        ),
        (
            lambda w: w["model.norm.weight"].fill_(float("nan")),
            "model.norm.weight of model.safetensors holds NaN",
        ),
        (
            lambda w: w["model.norm.weight"].fill_(3e38),
            "model.norm.weight would hold NaN or Inf in torch.float16",
        ),
    ],
)
def test_what_cannot_be_merged_is_named_and_leaves_nothing(
    sources: list[Path], tmp_path: Path, spoil: object, message: str
) -> None:
    weights = load_file(sources[1] / "model.safetensors")
    spoil(weights)  # type: ignore[operator]
    change(sources[1], weights)
    with pytest.raises(CheckpointError, match=message):
        merge_checkpoints(sources, tmp_path / "out", mean, dtype=torch.float16)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
