"""Checkpoints resume exactly in the layout that saved them, and in every other one.

Each is also exported from each layout.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.models.families import read_shape
from tests.support.batches import make_batch
from tests.support.float64_model import write_checkpoint
from tests.support.layouts import BATCH, BATCHES, MODELS, STEPS_PER_BATCH
from tests.support.packed_sequences import sequence
from tests.support.recordings import write_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("checkpoint_layouts.py")
LAYOUTS = ("ep2-none", "dp2-none", "tp2-none", "pp2_vpp2-none", "cp2-none")
# (saved, loaded): every layout is saved and loaded in another one. dp2 has no expert parallelism.
PAIRS = (
    ("ep2-none", "dp2-none"),
    ("dp2-none", "ep2-none"),
    ("pp2_vpp2-none", "ep2-none"),
    ("tp2-none", "cp2-none"),
    ("cp2-none", "pp2_vpp2-none"),
    ("ep2-none", "tp2-none"),
)
BFLOAT16_LAYOUTS = ("tp2_ep2-bfloat16", "pp2_vpp2-bfloat16", "cp2_ep2-bfloat16")
BFLOAT16_PAIRS = (
    ("tp2_ep2-bfloat16", "cp2_ep2-bfloat16"),
    ("pp2_vpp2-bfloat16", "tp2_ep2-bfloat16"),
    ("cp2_ep2-bfloat16", "pp2_vpp2-bfloat16"),
)
SEQUENCES = range(8)  # the job computed the logits of these
# The largest difference of metrics and weights between layouts, which add in different orders. A
# lost moment would change weights by 1e-3.
TOLERANCE = 2e-6
# The largest mean difference of bfloat16 matrices. Sums in other orders change some weights by one
# step of bfloat16. The batch itself moves the weights by 5e-4 on average.
BFLOAT16_TOLERANCE = 1.5e-4

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def run_job(directory: Path, pairs: Iterable[tuple[str, str]]) -> Path:
    """Save and load every pair of layouts in one job. Returns the directory of the results."""
    write_checkpoint(directory / "plain", **MODELS["plain"])
    _, rollouts, _ = make_batch(read_shape(directory / "plain"), BATCHES * BATCH)
    write_rollouts(directory / "rollouts", rollouts)
    torchrun(SCRIPT, str(directory), *map(":".join, pairs), ranks=2, timeout=500)
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every pair of layouts in float32."""
    pairs = [*((layout, layout) for layout in LAYOUTS), *PAIRS]
    return run_job(tmp_path_factory.mktemp("layouts"), pairs)


@pytest.fixture(scope="module")
def bfloat16_result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one bfloat16 layout and of its checkpoint in another one."""
    pairs = [(BFLOAT16_LAYOUTS[0], BFLOAT16_LAYOUTS[0]), BFLOAT16_PAIRS[0]]
    return run_job(tmp_path_factory.mktemp("bfloat16"), pairs)


@pytest.fixture(scope="module")
def all_bfloat16_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every other pair of layouts in bfloat16."""
    pairs = [*((layout, layout) for layout in BFLOAT16_LAYOUTS[1:]), *BFLOAT16_PAIRS[1:]]
    return run_job(tmp_path_factory.mktemp("all_bfloat16"), pairs)


def read(directory: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=True)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_in_the_same_layout_is_bit_exact(results: Path, layout: str) -> None:
    assert_resume_is_exact(results, layout)


def test_resume_in_bfloat16_is_bit_exact(bfloat16_result: Path) -> None:
    assert_resume_is_exact(bfloat16_result, BFLOAT16_LAYOUTS[0])
    assert_export_is_exact(bfloat16_result, BFLOAT16_LAYOUTS[0])
    assert_reshard_is_close(bfloat16_result, *BFLOAT16_PAIRS[0])


@pytest.mark.nightly
@pytest.mark.parametrize("layout", BFLOAT16_LAYOUTS[1:])
def test_resume_in_the_same_bfloat16_layout_is_bit_exact(
    all_bfloat16_results: Path, layout: str
) -> None:
    assert_resume_is_exact(all_bfloat16_results, layout)
    assert_export_is_exact(all_bfloat16_results, layout)


@pytest.mark.nightly
@pytest.mark.parametrize(("saved_layout", "layout"), BFLOAT16_PAIRS[1:])
def test_resume_in_another_bfloat16_layout_keeps_model_and_optimizer(
    all_bfloat16_results: Path, saved_layout: str, layout: str
) -> None:
    assert_reshard_is_close(all_bfloat16_results, saved_layout, layout)


def assert_resume_is_exact(results: Path, layout: str) -> None:
    baseline = read(results, f"{layout}:")
    resume = read(results, f"{layout}:{layout}")
    assert resume["metrics"] == baseline["metrics"]
    assert resume["adam_steps"] == baseline["adam_steps"] == [2 * STEPS_PER_BATCH]
    assert different_weights(baseline["weights"], resume["weights"]) == []


def assert_reshard_is_close(results: Path, saved_layout: str, layout: str) -> None:
    """The weights are equal after loading, and close after another bfloat16 batch."""
    saved_weights = read(results, f"{saved_layout}-model")["weights"]
    weights = read(results, f"{saved_layout}:{layout}-loaded")["weights"]
    assert different_weights(saved_weights, weights) == []
    baseline = read(results, f"{saved_layout}:")["weights"]
    resume = read(results, f"{saved_layout}:{layout}")["weights"]
    matrices = {name: weight for name, weight in baseline.items() if weight.ndim > 1}
    for name, weight in matrices.items():
        difference = float((weight.float() - resume[name].float()).abs().mean())
        assert difference < BFLOAT16_TOLERANCE, name


def different_weights(
    baseline: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> list[str]:
    assert baseline.keys() == weights.keys()
    return [name for name, weight in baseline.items() if not weight.equal(weights[name])]


@pytest.mark.parametrize(("saved_layout", "layout"), PAIRS)
def test_resume_in_another_layout_keeps_model_and_optimizer(
    results: Path, saved_layout: str, layout: str
) -> None:
    baseline = read(results, f"{saved_layout}:")
    resume = read(results, f"{saved_layout}:{layout}")
    for name in ("train/loss", "policy/entropy", "train/grad_norm"):
        metric = pytest.approx(baseline["metrics"][name], abs=TOLERANCE)
        assert resume["metrics"][name] == metric, name
    for name, weight in baseline["weights"].items():
        assert float((weight - resume["weights"][name]).abs().max()) < TOLERANCE, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_a_checkpoint_is_bit_exact(results: Path, layout: str) -> None:
    assert_export_is_exact(results, layout)


def assert_export_is_exact(results: Path, layout: str) -> None:
    weights = read(results, f"{layout}-model")["weights"]
    export = {
        name: tensor
        for file in (results / f"exported-{layout}").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert different_weights({n: w.float() for n, w in weights.items()}, export) == []


def test_logits_of_an_export_match_the_trainer(results: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer_logits = read(results, "ep2-none-model")["logits"]
    hf_model = AutoModelForCausalLM.from_pretrained(results / "exported-ep2-none").float().eval()
    with torch.no_grad():
        logits = torch.cat([hf_model(input_ids=sequence(i)[None]).logits[0] for i in SEQUENCES])
    assert trainer_logits.abs().max() > 0.5
    torch.testing.assert_close(logits, trainer_logits, rtol=0, atol=2e-5)
