"""A checkpoint is exact in the layout that saved it, goes on in every other one, and is exported
from each.
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
# Every layout is saved and loaded in another one; dp2 is EP 1.
OTHERS = (
    ("ep2-none", "dp2-none"),
    ("dp2-none", "ep2-none"),
    ("pp2_vpp2-none", "ep2-none"),
    ("tp2-none", "cp2-none"),
    ("cp2-none", "pp2_vpp2-none"),
    ("ep2-none", "tp2-none"),
)
SEQUENCES = range(8)  # whose logits the job computed
# absolute, of metrics and weights: layouts add in other orders; a lost moment moves weights by 1e-3
SAME = 2e-6

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every pair of layouts did, in one job."""
    directory = tmp_path_factory.mktemp("layouts")
    write_checkpoint(directory / "plain", **MODELS["plain"])
    _, rollouts, _ = make_batch(read_shape(directory / "plain"), BATCHES * BATCH)
    write_rollouts(directory / "rollouts", rollouts)
    pairs = [*((layout, layout) for layout in LAYOUTS), *OTHERS]
    torchrun(SCRIPT, str(directory), *map(":".join, pairs), ranks=2, timeout=500)
    return directory


def read(directory: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"{name}.pt", weights_only=True)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_is_loaded_goes_on_bit_for_bit(played: Path, layout: str) -> None:
    never_stopped, resumed = read(played, f"{layout}:"), read(played, f"{layout}:{layout}")
    assert resumed["metrics"] == never_stopped["metrics"]
    assert resumed["adam_steps"] == never_stopped["adam_steps"] == [2 * STEPS_PER_BATCH]
    different = [
        name
        for name, weight in never_stopped["weights"].items()
        if not weight.equal(resumed["weights"][name])
    ]
    assert different == []


@pytest.mark.parametrize(("saved", "loaded"), OTHERS)
def test_another_layout_goes_on_with_the_same_model_and_optimizer(
    played: Path, saved: str, loaded: str
) -> None:
    never_stopped, resumed = read(played, f"{saved}:"), read(played, f"{saved}:{loaded}")
    for name in ("train/loss", "policy/entropy", "train/grad_norm"):
        assert resumed["metrics"][name] == pytest.approx(
            never_stopped["metrics"][name], abs=SAME
        ), name
    for name, weight in never_stopped["weights"].items():
        assert float((weight - resumed["weights"][name]).abs().max()) < SAME, name


@pytest.mark.parametrize("saved", LAYOUTS)
def test_an_exported_model_is_bit_for_bit_the_one_that_was_saved(played: Path, saved: str) -> None:
    expected, directory = read(played, f"{saved}-model")["weights"], played / f"exported-{saved}"
    exported = {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert exported.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not weight.equal(exported[name])] == []


def test_logits_of_an_exported_model_are_those_of_the_trainer(played: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = read(played, "ep2-none-model")["logits"]
    loaded = AutoModelForCausalLM.from_pretrained(played / "exported-ep2-none").float().eval()
    with torch.no_grad():
        actual = torch.cat([loaded(input_ids=sequence(i)[None]).logits[0] for i in SEQUENCES])
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
