"""Merging of checkpoints: tensors and directories."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.hf_checkpoint.merging import linear, merge_checkpoints, ties
from tests.support.failures import fails
from tests.support.policies import TWO_DIGIT_ADDITION


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_linear_is_the_weighted_mean() -> None:
    assert linear([t(1, 2), t(5, -2)], [3, 1]).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("weights", "scale", "changes"),
    [
        # The larger half of each change is (4, 0, 2, 0) and (-3, 2, 0, 0).
        # The signs are the signs of (1, 2, 2, 0). At index 0, only the first model is positive.
        ([1, 1], 1.0, [4, 2, 2, 0]),
        # The signs are the signs of (-2, 4, 2, 0). If one model has the sign, its weight cancels.
        ([1, 2], 1.0, [-3, 2, 2, 0]),
        ([1, 1], 0.5, [2, 1, 1, 0]),
    ],
)
def test_ties_of_two_models(weights: list[float], scale: float, changes: list[float]) -> None:
    base = t(10, 20, 30, 40)
    models = [base + t(4, -1, 2, 0.5), base + t(-3, 2, 1, -0.25)]
    assert (ties(base, models, weights, density=0.5, scale=scale) - base).tolist() == changes


def test_ties_averages_values_with_the_elected_sign_by_weight() -> None:
    models = [t(4, 0), t(1, 0), t(-2, 0)]
    assert ties(t(0, 0), models, [1, 3, 1], density=0.5, scale=1.0).tolist() == [(4 + 3) / 4, 0]


def test_ties_keeps_the_first_of_equal_changes() -> None:
    result = ties(t(0, 0, 0, 0), [t(1, -1, 1, 2)], [1], density=0.5, scale=1.0)
    assert result.tolist() == [1, 0, 0, 2]


@given(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=20), st.floats(0.01, 1))
def test_ties_of_one_model_keeps_its_largest_changes(changes: list[float], density: float) -> None:
    change = torch.tensor(changes)
    result = ties(torch.zeros(len(changes)), [change], [2.0], density=density, scale=1.0)
    mask = result != 0
    assert torch.equal(result[mask], change[mask])
    assert mask.sum() <= max(1, round(density * len(changes)))
    largest_dropped = change[~mask].abs().max() if (~mask).any() else 0
    smallest_kept = change[mask].abs().min() if mask.any() else 0
    assert largest_dropped <= smallest_kept


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Return a checkpoint, and one whose values are all 1 greater."""
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "a")
    shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / "b")
    tensors = load_file(tmp_path / "a/model.safetensors")
    write_tensors(tmp_path / "b", {name: tensor + 1 for name, tensor in tensors.items()})
    return [tmp_path / "a", tmp_path / "b"]


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return linear(tensors, [1, 1])


@pytest.mark.slow
def test_merged_checkpoint_in_shards_is_complete(sources: list[Path], tmp_path: Path) -> None:
    merge_checkpoints(
        sources,
        tmp_path / "out",
        mean,
        dtype=torch.bfloat16,
        shard_bytes=100_000,
    )
    a, b = (load_file(source / "model.safetensors") for source in sources)
    means = {
        name: ((tensor.float() + b[name].float()) / 2).bfloat16() for name, tensor in a.items()
    }
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == means.keys()
    assert len(set(index.values())) > 1
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], means[name])
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, means["lm_head.weight"])


@pytest.mark.parametrize(
    ("modify", "message"),
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
def test_failed_merge_is_explained_and_leaves_no_files(
    sources: list[Path],
    tmp_path: Path,
    modify: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    weights = load_file(sources[1] / "model.safetensors")
    modify(weights)
    write_tensors(sources[1], weights)
    with fails(ExitCode.BAD_DATA, match=message):
        merge_checkpoints(sources, tmp_path / "out", mean, dtype=torch.float16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
