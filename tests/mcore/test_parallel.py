from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.config.schema import ParallelSettings
from tests.mcore.parity_cases import PARITY, POISONED, LayoutCase
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
    files = sorted(out.glob(f"{kind}*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", PARITY)
def test_two_ranks_compute_what_one_computes(
    one_rank: Path, two_ranks: Path, checkpoint: Path, name: str
) -> None:
    original, exported = read(checkpoint), read(two_ranks / name / "export")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[tensor], original[tensor]) for tensor in original)
    expected_losses, losses = read(one_rank, "losses"), read(two_ranks / name, "losses")
    assert losses.keys() == expected_losses.keys()
    for batch, loss in expected_losses.items():
        torch.testing.assert_close(losses[batch], loss, rtol=0, atol=1e-5)
    expected, gradients = read(one_rank, "gradients"), read(two_ranks / name, "gradients")
    assert gradients.keys() == expected.keys()
    errors = {
        n: float((gradients[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in expected.items()
    }
    worst = max(errors, key=lambda n: errors[n])
    limit = (
        5e-6 if "tp2" in name else 1e-6
    )  # tensor parallelism adds partial products in another order
    assert errors[worst] < limit, sorted(
        ((round(e, 9), n) for n, e in errors.items()), reverse=True
    )[:6]


@pytest.mark.parametrize("name", PARITY)
def test_a_model_from_scratch_is_the_same_in_every_layout(
    one_rank: Path, two_ranks: Path, name: str
) -> None:
    expected, drawn = read(one_rank / "drawn"), read(two_ranks / name / "drawn")
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[tensor], expected[tensor]) for tensor in expected)


def test_a_model_from_scratch_repeats_no_expert_and_no_layer(one_rank: Path) -> None:
    drawn = read(one_rank / "drawn")
    firsts = {
        name: tuple(tensor.flatten()[:4].tolist())
        for name, tensor in drawn.items()
        if tensor.ndim == 2
    }
    assert len(set(firsts.values())) == len(firsts)
    deviations = {name: float(drawn[name].std()) for name in firsts}
    assert deviations["model.embed_tokens.weight"] == pytest.approx(0.5, rel=0.1)
    assert deviations["lm_head.weight"] == pytest.approx(0.02, rel=0.1)
    assert deviations["model.layers.0.mlp.experts.3.down_proj.weight"] == pytest.approx(
        0.02 / 8**0.5, rel=0.2
    )
    assert deviations["model.layers.0.mlp.experts.3.up_proj.weight"] == pytest.approx(0.02, rel=0.2)
    assert all(
        float(tensor.std()) == 0 and float(tensor[0]) == 1
        for tensor in drawn.values()
        if tensor.ndim == 1
    )


@pytest.mark.parametrize("name", POISONED)
def test_a_nan_on_one_rank_stops_the_step_on_all(two_ranks: Path, name: str) -> None:
    said = [(two_ranks / name / str(rank)).read_text() for rank in (0, 1)]
    assert said == ["stepped=False unchanged=True"] * 2
