"""The old-policy pass and the update are one computation: with the same weights every ratio is
exactly 1.

ESPO's clip widths go down to 3e-4, GSPO's are 4e-4. Where the experts' results are added up in an
order that changes from pass to pass, bfloat16 alone makes ratios differ by more, and tokens are
clipped at random.
"""

import json
from pathlib import Path

import pytest

from tests.support.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/gpu_stages/both_passes.py"


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", id="cpu", marks=pytest.mark.distributed),
        pytest.param("bfloat16", id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_both_passes_agree_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    output = torchrun(SCRIPT, str(tmp_path), dtype, ranks=1)
    result = json.loads(output.partition("RESULT ")[2].splitlines()[0])
    assert result["batches"] > 1
    assert result["same"], "the same pass again gave other log-probabilities"
    assert result["deviation"] == 0.0
    assert result["ratio_change"] > 1e-3, "ratios would be 1 whatever happened"
