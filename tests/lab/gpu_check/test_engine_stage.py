"""The stage `engine_on_cpu` with a real engine, and both devices the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import ROOT


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_engine_beside_the_trainer_in_bfloat16(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = str(ROOT / "tests/lab/gpu_check")
    options = ["--small", "--only", "engine_on_cpu", "--out", str(out)]
    result = subprocess.run([sys.executable, script, *options], timeout=380)
    (stage,) = json.loads((out / "check.json").read_text())["stages"]
    assert (result.returncode, stage["status"]) == (0, "passed"), stage
    values = stage["values"]
    assert (values["dtype"], values["engine"]) == ("bfloat16", "cpu")
    assert values["step 1 weights_compared"] > 0 and values["step 1 weights_that_differ"] == 0
    assert 0 < values["step 1 logprob_abs_mean"] < 0.05
