"""transformers loads the weights of a run in the environment that `make install` makes."""

import subprocess
import sys
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
question = AutoTokenizer.from_pretrained(sys.argv[1])("12+34=", return_tensors="pt").input_ids
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(sys.argv[1])(question).logits
print(tuple(logits.shape[:2]), bool(logits.isfinite().all()))
"""


@pytest.mark.slow
def test_transformers_loads_a_checkpoint_in_a_plain_process(tmp_path: Path) -> None:
    """No module of this project is imported first."""
    command = [sys.executable, "-c", LOAD, str(SHIPPED)]
    process = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.stdout == "(1, 6) True\n", process.stderr
