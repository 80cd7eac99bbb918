"""Every place that only a GPU executes runs on the pretended device, or is in the list below.

A place is a condition about the device, an expression such as `torch.cuda.set_device`, or a
function that nothing else calls (tests/lab/pretended_device/branches/finder.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.pretended_device.branches.finder import Place, find_places

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "tests.lab.pretended_device.gpu_places"
# Files, functions or places that the pretended device does not reach, by the reason
NOT_EXECUTED = {
    "compiled Triton kernels need a GPU, so that CPU kernels replace them (kernels.py)."
    " tests/kernels runs them in Triton's interpreter": (
        "kernels/espo_kernels/espo_groups/triton_kernel.py",
        "kernels/espo_kernels/espo_policy_loss/triton_kernels.py",
        "kernels/espo_kernels/espo_policy_loss/triton_launch.py",
        "kernels/espo_kernels/quantize_fp8_blockwise/triton_kernel.py",
        "kernels/espo_kernels/token_logprob_entropy/triton_kernels.py",
        "kernels/espo_kernels/token_logprob_entropy/triton_launch.py",
        "kernels/espo_kernels/triton_launches.py",
        "kernels/espo_kernels/triton_segments.py",
        "kernels/espo_kernels/espo_groups/groups.py _groups: backend == 'triton' is True",
        "kernels/espo_kernels/espo_policy_loss/loss.py _loss: 'triton'",
        "kernels/espo_kernels/quantize_fp8_blockwise/quantize.py quantize_fp8_blockwise: 'triton'",
        "kernels/espo_kernels/token_logprob_entropy/logprob.py _kernels",
    ),
    "Transformer Engine is not installed without a GPU. make te-rehearsal runs its layers": (
        "megatron_rl/mcore/layer_spec.py resolve_spec",
        "megatron_rl/mcore/gpu_libraries.py kernel_error",
        "megatron_rl/mcore/gpu_libraries.py transformer_engine_fault: torch.cuda.get_device_name",
    ),
}


def entry_of(place: Place) -> str | None:
    """The entry of the list that covers a place, if any."""
    names = (str(place), f"{place.file} {place.function}", place.file)
    entries = {entry for group in NOT_EXECUTED.values() for entry in group}
    return next((name for name in names if name in entries), None)


@pytest.fixture(scope="module")
def places() -> list[Place]:
    return [place for file in find_places(ROOT).values() for place in file.places.values()]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of the script, and the places that it executed."""
    directory = tmp_path_factory.mktemp("gpu_places")
    branches = directory / "branches"
    module = ["tests.lab.pretended_device", f"--branches={branches}", SCRIPT, str(directory)]
    result = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    record: dict[str, Any] = json.loads((directory / "places.json").read_text())
    texts = (json.loads(file.read_text()) for file in branches.iterdir())
    record["executed"] = {text for group in texts for text in group}
    return record


def test_every_entry_of_the_list_names_a_place(places: list[Place]) -> None:
    entries = [entry for group in NOT_EXECUTED.values() for entry in group]
    assert len(entries) == len(set(entries))
    assert set(entries) - {entry_of(place) for place in places} == set()


def test_the_places_that_everybody_knows_are_found(places: list[Place]) -> None:
    place_names = {f"{place.file} {place.function}" for place in places}
    examples = {
        "megatron_rl/mcore/job.py join",
        "megatron_rl/training/micro_batches.py Batcher._tensor",
        "megatron_rl/engines/weight_sync.py open_weight_sync",
        "sglang_bridge/weights/digests.py GpuDigest.update",
        "sglang_bridge/weights/process_group.py abort",
    }
    assert examples - place_names == set()


@pytest.mark.nightly
def test_every_place_is_executed_or_in_the_list(
    places: list[Place], outcome: dict[str, Any]
) -> None:
    executed_places = outcome["executed"]
    assert executed_places <= set(map(str, places)), "the script ran another version of the code"
    missing = [str(p) for p in places if str(p) not in executed_places and entry_of(p) is None]
    assert missing == [], "extend gpu_places.py, or give a reason in NOT_EXECUTED"


def test_no_place_in_the_list_is_executed(places: list[Place], outcome: dict[str, Any]) -> None:
    entries = {entry_of(place) for place in places if str(place) not in outcome["executed"]}
    stale = [entry for group in NOT_EXECUTED.values() for entry in group if entry not in entries]
    assert stale == [], "it is executed: remove it from NOT_EXECUTED"


def test_checkpoint_reference_and_trace_work_on_the_device(outcome: dict[str, Any]) -> None:
    assert outcome["device"] == "cuda:0"
    assert outcome["pinned_reference"]
    assert outcome["kl"][0] == 0 and outcome["kl"][1] > 0
    assert outcome["traces"] == ["step-1-rank-0.json.gz"]
    assert outcome["save_problem"] == ""
    assert outcome["loaded_weights_are_equal"] and outcome["random_numbers_repeat"]


def test_weights_arrive_on_another_device_and_are_audited(outcome: dict[str, Any]) -> None:
    """Both sides hash on their devices. A failed update aborts the group."""
    assert outcome["audit_obstacle"] == ""
    assert outcome["sync"]["sync/audit_compared"] == 39
    assert outcome["sync"]["sync/audit_mismatches"] == 0
    (line,) = outcome["failed_sync"]
    assert "no room" in line


def test_a_rank_and_an_engine_take_turns_on_a_device(outcome: dict[str, Any]) -> None:
    """A wrong order or tag ends the engine's side, too (`colocated_steps.py`)."""
    result = outcome["colocated"]
    sleep = ["pause", "sleep weights+kv_cache+cuda_graph"]
    sync = [
        "pause",
        "free",
        "wake weights",
        "fetch on GPU-00000000-0000-0000-0000-000000000000",
        "free",
        "flush",
        "wake kv_cache+cuda_graph",
        "continue",
        "audit",
    ]
    assert result["record"] == [*sleep, *sync, *sleep, "train", *sync]
    assert result["equal"] == [True, True]
    assert result["compared"] == [39, 39] and result["mismatches"] == [0, 0]
    assert (result["handles"], result["opened"]) == (2, 2)
    assert 0.8 < result["fraction"] < 0.88


def test_engines_and_kernels_are_chosen_for_the_device(outcome: dict[str, Any]) -> None:
    assert outcome["engine_gpus"] == [[1, 2], [3, 4]]
    assert outcome["fp8_engines"] == [{"quant_method": "fp8"}] * 2
    assert "A100 has compute capability 8.0" in outcome["fp8_refusal"]
    assert outcome["engine_arguments"] == ["--device=cuda"]
    assert outcome["engine_nccl"] == {"NCCL_CUMEM_ENABLE": "0"}
    assert "flashinfer_cutlass" in outcome["audit_refusal"]
    assert "--enable-deterministic-inference" in outcome["nccl_refusal"]
    assert "cuda:0" in outcome["cpu_kernel"]
    assert outcome["reference_groups_are_equal"]
    assert (outcome["triton_kernel"], outcome["kernel_waits"]) == ("triton", 0)
    assert (outcome["age_sum"], outcome["age_waits"]) == ([0.5, 1.0], 0)


@pytest.mark.parametrize(
    ("run", "setting"),
    [
        ("float32 engine", "engine.dtype=float32"),
        ("one GPU for two", "engine.count=1"),
        ("engines beside one rank", "engine.count=2"),
        ("experts that TP cuts", "engine.ep=2"),
    ],
)
def test_engines_without_their_gpu_are_refused(
    outcome: dict[str, Any], run: str, setting: str
) -> None:
    assert setting in outcome[run]
