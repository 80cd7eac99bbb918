"""Two ranks compute and store what one rank does, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import ParallelSettings
from tests.mcore.parity_cases import NAN_GRADIENT, PARITY, LayoutCase
from tests.support.torchrun import torchrun

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_rank(megatron: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.mcore.parity_worker import run_case

    out = tmp_path_factory.mktemp("one")
    run_case(LayoutCase(ParallelSettings()), megatron, checkpoint, out)
    return out


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each case, written by one job of two processes."""
    out = tmp_path_factory.mktemp("two")
    torchrun(Path(__file__).with_name("parity_worker.py"), str(checkpoint), str(out), ranks=2)
    return out


def read(out: Path, kind: str = "") -> dict[str, torch.Tensor]:
    """Read all tensors of the files whose names start with `kind`."""
    files = sorted(out.glob(f"{kind}*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", PARITY)
def test_export_of_two_ranks_is_bit_exact(two_ranks: Path, checkpoint: Path, name: str) -> None:
    original = read(checkpoint)
    export = read(two_ranks / name / "export")
    assert export.keys() == original.keys()
    assert all(torch.equal(export[tensor], original[tensor]) for tensor in original)


@pytest.mark.parametrize("name", PARITY)
def test_losses_and_gradients_of_two_ranks_match_one_rank(
    one_rank: Path, two_ranks: Path, name: str
) -> None:
    expected_losses = read(one_rank, "losses")
    losses = read(two_ranks / name, "losses")
    assert losses.keys() == expected_losses.keys()
    for batch, loss in expected_losses.items():
        torch.testing.assert_close(losses[batch], loss, rtol=0, atol=1e-5)
    expected_tensors = read(one_rank, "gradients")
    gradients = read(two_ranks / name, "gradients")
    assert gradients.keys() == expected_tensors.keys()
    errors = {
        name: float((gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        for name, gradient in expected_tensors.items()
    }
    # Tensor parallelism adds partial products in another order.
    limit = 5e-6 if "tp2" in name else 1e-6
    largest = sorted(((round(error, 9), name) for name, error in errors.items()), reverse=True)
    assert max(errors.values()) < limit, largest[:6]


@pytest.mark.parametrize("name", PARITY)
def test_random_initialization_is_the_same_in_every_layout(
    one_rank: Path, two_ranks: Path, name: str
) -> None:
    expected_tensors = read(one_rank / "random")
    weights = read(two_ranks / name / "random")
    assert weights.keys() == expected_tensors.keys()
    assert all(
        torch.equal(weights[tensor], expected_tensors[tensor]) for tensor in expected_tensors
    )


def test_random_initialization_repeats_no_expert_and_no_layer(one_rank: Path) -> None:
    weights = read(one_rank / "random")
    matrices = {name: tensor for name, tensor in weights.items() if tensor.ndim == 2}
    starts = {tuple(tensor.flatten()[:4].tolist()) for tensor in matrices.values()}
    assert len(starts) == len(matrices)


def test_random_initialization_has_the_deviations_of_megatron(one_rank: Path) -> None:
    weights = read(one_rank / "random")
    expected_deviations = {
        "model.embed_tokens.weight": (0.5, 0.1),
        "lm_head.weight": (0.02, 0.1),
        "model.layers.0.mlp.experts.3.down_proj.weight": (0.02 / 8**0.5, 0.2),
        "model.layers.0.mlp.experts.3.up_proj.weight": (0.02, 0.2),
    }
    for name, (deviation, tolerance) in expected_deviations.items():
        assert float(weights[name].std()) == pytest.approx(deviation, rel=tolerance)
    norms = [tensor for tensor in weights.values() if tensor.ndim == 1]
    assert all(float(norm.std()) == 0 and float(norm[0]) == 1 for norm in norms)


@pytest.mark.parametrize("name", NAN_GRADIENT)
def test_nan_on_one_rank_stops_the_step_on_all_ranks(two_ranks: Path, name: str) -> None:
    results = [(two_ranks / name / str(rank)).read_text() for rank in (0, 1)]
    assert results == ["applied=False unchanged=True"] * 2
