"""The model that whole steps are compared with is transformers' Qwen3-MoE."""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.float64_model import Float64Model, write_checkpoint
from tests.support.layouts import MODELS
from tests.test_import_direction import imports_of, room_imports

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("name", ["float64_model", "float64_steps"])
def test_the_replica_shares_settings_and_contracts_with_the_trainer_and_no_code(name: str) -> None:
    source = (SUPPORT / f"{name}.py").read_text()
    assert set(room_imports(source)) <= {"config", "contracts"}
    assert set(imports_of(source)) <= {
        *sys.stdlib_module_names,
        "torch",
        "safetensors",
        "megatron_rl",
        "support",
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_replica_is_transformers_model(tmp_path: Path, model: str) -> None:
    """transformers computes norms, rotations and routers in float32, whatever the weights are."""
    from transformers import AutoModelForCausalLM

    checkpoint = write_checkpoint(tmp_path, **MODELS[model])
    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    tokens = torch.randint(0, 51, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        logits, differing = Float64Model.read(checkpoint).logits(tokens, None)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert differing == 0
