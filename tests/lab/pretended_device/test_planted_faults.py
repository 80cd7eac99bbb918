"""Faults of GPU code that a CPU hides, planted one by one into the trainer, and its host waits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "tests.lab.pretended_device.planted_faults"
TWO_DEVICES = "Expected all tensors to be on the same device"
# What the message says of each fault
MESSAGES = {
    "cpu_tensor_in_the_loss": TWO_DEVICES,
    "cpu_tensor_for_a_kernel": "arguments are on different devices (logits on cuda:0, targets",
    "replay_without_device": TWO_DEVICES,
    "index_of_another_device": TWO_DEVICES,
    "mask_on_the_cpu": TWO_DEVICES,
    "arange_without_device_in_megatron": TWO_DEVICES,
    "generator_of_another_device": "Expected a 'cuda:0' device type for generator",
    "float32_weight_in_bfloat16": "same dtype",
    "result_read_before_the_copy_ends": "nan",
    "pinned_memory_written_during_a_copy": "changed while a copy to the device could still be",
}
# Where the waits are counted that a fault adds
PLACES = {
    "item_in_the_schedule": "mcore/schedule.py <lambda>: read by _local_scalar_dense",
    "cpu_copy_of_each_micro_batch": "training/logprobs.py __call__: read by copy_",
    "upload_from_pageable_memory": "training/micro_batches.py pack: upload by copy_",
}
# Waits of each micro-batch in four layers: three forward passes, one of them in recomputation. All
# are Megatron's, where Transformer Engine's fused kernels are missing.
PER_MICRO_BATCH = {
    # The lengths of the sequences, for queries and for keys
    "rope_utils.py _apply_rotary_pos_emb_thd: read by _local_scalar_dense": 24,
    "rope_utils.py _apply_rotary_pos_emb_thd: read by copy_": 24,
    # The number of rows that each expert gets
    "token_dispatcher.py _maybe_dtoh_and_synchronize: synchronize by Event.synchronize": 12,
}
# Waits of an optimizer step, however many micro-batches it has
PER_STEP = {
    # The norm, for clipping and for the verdict on the step
    "clip_grads.py get_grad_norm_fp32: read by _local_scalar_dense": 1,
    # No rank applies a step that is not finite on one of them
    "optimizer.py _least_of_all_ranks: read by _local_scalar_dense": 1,
    # The share of routes that differ decides whether the run goes on
    "replay.py layer_disagreement: read by copy_": 1,
    # The metrics, in one copy, and the loss
    "metric_sums.py _move_to_host: read by copy_": 1,
    "update.py update_policy: read by _local_scalar_dense": 1,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("faults")
    result = subprocess.run(
        [sys.executable, "-m", "tests.lab.pretended_device", SCRIPT, str(directory)],
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


@pytest.mark.nightly
@pytest.mark.parametrize("fault", MESSAGES)
def test_a_fault_that_a_cpu_hides_is_found(outcome: dict[str, Any], fault: str) -> None:
    assert MESSAGES[fault] in outcome["errors"][fault]


@pytest.mark.parametrize("fault", PLACES)
def test_a_wait_for_the_device_is_counted_where_it_happens(
    outcome: dict[str, Any], fault: str
) -> None:
    added_waits = outcome["added_waits"][fault]
    assert any(PLACES[fault] in place for place in added_waits), added_waits


def test_the_host_waits_only_where_it_is_known_to(outcome: dict[str, Any]) -> None:
    two, three = (
        {short(place): n for place, n in outcome["waits"][count].items()} for count in "23"
    )
    per_micro_batch = {place: n - two.get(place, 0) for place, n in three.items()}
    assert {place: n for place, n in per_micro_batch.items() if n} == PER_MICRO_BATCH
    per_step = {place: n - 2 * PER_MICRO_BATCH.get(place, 0) for place, n in two.items()}
    assert {place: n for place, n in per_step.items() if n} == PER_STEP


def short(place: str) -> str:
    """A place without its folders."""
    file, _, function = place.partition(" ")
    return f"{file.rpartition('/')[2]} {function}"
