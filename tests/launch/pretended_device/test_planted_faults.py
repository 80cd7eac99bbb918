"""Faults of GPU code that a CPU hides, planted one by one into the trainer, and its host waits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "tests.launch.pretended_device.planted_faults"
TWO_DEVICES = "Expected all tensors to be on the same device"
# What the message says of each fault
MESSAGES = {
    "cpu_tensor_in_the_loss": TWO_DEVICES,
    "cpu_tensor_for_a_kernel": "a Triton kernel cannot read tensors of the CPU",
    "replay_without_device": TWO_DEVICES,
    "index_of_another_device": TWO_DEVICES,
    "mask_on_the_cpu": TWO_DEVICES,
    "arange_without_device_in_megatron": TWO_DEVICES,
    "generator_of_another_device": "Expected a 'cuda:0' device type for generator",
    "float32_weight_in_bfloat16": "same dtype",
    "result_read_before_the_copy_ends": "nan",
    "pinned_memory_written_during_a_copy": "changed while a copy to the device could still be",
}
# The functions whose waits a fault adds
FUNCTIONS = {
    "item_in_the_schedule": "read: read by _local_scalar_dense",
    "cpu_copy_of_each_micro_batch": "copy: read by copy_",
    "upload_from_pageable_memory": "tensor: upload by copy_",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("faults")
    result = subprocess.run(
        [sys.executable, "-m", "launch.pretended_device", SCRIPT, str(directory)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=250,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    record: dict[str, Any] = json.loads((directory / "faults.json").read_text())
    assert record["device"] == "cuda:0"
    return record


@pytest.mark.parametrize("fault", MESSAGES)
def test_a_fault_that_a_cpu_hides_is_found(outcome: dict[str, Any], fault: str) -> None:
    assert MESSAGES[fault] in outcome["errors"][fault]


@pytest.mark.parametrize("fault", FUNCTIONS)
def test_a_wait_for_the_device_is_counted_where_it_happens(
    outcome: dict[str, Any], fault: str
) -> None:
    added_waits = outcome["added_waits"][fault]
    assert any(FUNCTIONS[fault] in place for place in added_waits), added_waits
