"""The float64 model, with which whole steps are compared, equals transformers' model."""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.float64_model import Float64Model, write_checkpoint
from tests.support.layouts import MODELS
from tests.test_import_direction import imports_of

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("name", ["float64_model", "float64_steps"])
def test_float64_replica_shares_no_code_with_the_trainer(name: str) -> None:
    source = (SUPPORT / f"{name}.py").read_text()
    names = [name.split(".") for name in imports_of(source)]
    rooms = {parts[1] for parts in names if parts[0] == "megatron_rl"}
    assert rooms <= {"config", "contracts"}
    assert {parts[0] for parts in names} <= {
        *sys.stdlib_module_names,
        "torch",
        "safetensors",
        "megatron_rl",
        "tests",
    }


@pytest.mark.parametrize("model", MODELS)
def test_float64_replica_matches_transformers(tmp_path: Path, model: str) -> None:
    """transformers computes norms, rotations and routers in float32 for any weights."""
    from transformers import AutoModelForCausalLM

    checkpoint = write_checkpoint(tmp_path, **MODELS[model])
    hf_model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    tokens = torch.randint(0, 51, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hf_logits = hf_model(tokens[None]).logits[0]
        logits, num_differing = Float64Model.read(checkpoint).logits(tokens, None)
    torch.testing.assert_close(logits, hf_logits, rtol=0, atol=1e-5)
    assert num_differing == 0
