"""Checkpoints resume exactly in the layout that saved them, and in every other one.

Each is also exported from each layout.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launch.testbed.batches import make_batch
from launch.testbed.packed_sequences import sequence
from megatron_rl.models.families import read_shape
from tests.support.float64_model import write_checkpoint
from tests.support.layouts import BATCH, BATCHES, MODELS, STEPS_PER_BATCH
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
SEQUENCES = range(8)  # the job computed the logits of these
# The largest difference of metrics and weights between layouts, which add in different orders. A
# lost moment would change weights by 1e-3.
TOLERANCE = 2e-6

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of every pair of layouts, from one job."""
    directory = tmp_path_factory.mktemp("layouts")
    write_checkpoint(directory / "plain", **MODELS["plain"])
    _, rollouts, _ = make_batch(read_shape(directory / "plain"), BATCHES * BATCH)
    write_rollouts(directory / "rollouts", rollouts)
    pairs = [*((layout, layout) for layout in LAYOUTS), *PAIRS]
    torchrun(SCRIPT, str(directory), *map(":".join, pairs), ranks=2, timeout=500)
    return directory


def read(directory: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=True)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_in_the_same_layout_is_bit_exact(results: Path, layout: str) -> None:
    baseline = read(results, f"{layout}:")
    resume = read(results, f"{layout}:{layout}")
    assert resume["metrics"] == baseline["metrics"]
    assert resume["adam_steps"] == baseline["adam_steps"] == [2 * STEPS_PER_BATCH]
    different = [
        name
        for name, weight in baseline["weights"].items()
        if not weight.equal(resume["weights"][name])
    ]
    assert different == []


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
    weights = read(results, f"{layout}-model")["weights"]
    export = {
        name: tensor
        for file in (results / f"exported-{layout}").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert export.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not weight.equal(export[name])] == []


def test_logits_of_an_export_match_the_trainer(results: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer_logits = read(results, "ep2-none-model")["logits"]
    hf_model = AutoModelForCausalLM.from_pretrained(results / "exported-ep2-none").float().eval()
    with torch.no_grad():
        logits = torch.cat([hf_model(input_ids=sequence(i)[None]).logits[0] for i in SEQUENCES])
    assert trainer_logits.abs().max() > 0.5
    torch.testing.assert_close(logits, trainer_logits, rtol=0, atol=2e-5)
