"""Refusals on machines with GPUs, and their remedies."""

from pathlib import Path

import pytest

from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.support.configurations import BF16, NODE, accept, refusals


def machine(ranks: int, gpus: int) -> LaunchFacts:
    return LaunchFacts(world_size=ranks, local_world_size=ranks, num_gpus=gpus)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_a_cpu_torch_runs_on_a_machine_with_gpus(checkpoint: Path, gpus: int) -> None:
    """`make train` on a workstation with a graphics card and the torch of `make install`."""
    facts = LaunchFacts(world_size=2, local_world_size=2, idle_gpus=gpus)
    assert accept(checkpoint, "parallel=ep2", facts=facts).engine.dtype == "float32"
    (refusal,) = refusals(checkpoint, "model.spec=te", BF16, facts=facts)
    assert f"{gpus} GPU(s)" in refusal.rule
    assert accept(checkpoint, "parallel=ep2", BF16, facts=facts).engine.dtype == "bfloat16"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_remedy_for_a_single_gpu(checkpoint: Path, ranks: int) -> None:
    (refusal,) = refusals(checkpoint, BF16, facts=machine(ranks, 1))
    assert refusal.key == "engine.count"
    assert f"{ranks} trainer rank(s) and 1 engine process(es)" in refusal.rule
    assert 'CUDA_VISIBLE_DEVICES=""' in refusal.remedy, "everything runs on the CPU"
    assert "engine=external" in refusal.remedy, "or the engine runs elsewhere"
    assert "--nproc-per-node" not in refusal.remedy, "no number of ranks would help"


def test_the_remedy_names_the_number_of_ranks_that_fit(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, BF16, facts=machine(2, 2))
    assert "2 trainer rank(s) and 1 engine process(es)" in refusal.rule
    assert "at most 1 rank(s) (torchrun --nproc-per-node 1)" in refusal.remedy
    (refusal,) = refusals(checkpoint, BF16, "engine.tp=2", "engine.count=2", facts=machine(8, 8))
    assert "8 trainer rank(s) and 4 engine process(es)" in str(refusal)
    assert "at most 4 rank(s)" in refusal.remedy
    (refusal,) = refusals(checkpoint, BF16, "engine.count=2", facts=machine(1, 2))
    assert "Lower engine.count or engine.tp" in refusal.remedy
    assert accept(checkpoint, BF16, facts=machine(1, 2)).engine.count == 1


def test_each_rank_needs_its_own_gpu_beside_external_engines(checkpoint: Path) -> None:
    external = ("engine=external", "engine.urls=['http://127.0.0.1:3']", BF16)
    (refusal,) = refusals(checkpoint, *external, facts=machine(2, 1))
    assert refusal.key == "engine.urls" and "1 are visible" in refusal.rule
    assert "Start at most 1 rank(s)" in refusal.remedy
    assert accept(checkpoint, *external, facts=machine(1, 1)).engine.mode == "external"


def test_float32_engines_have_no_kernels_on_gpus(checkpoint: Path) -> None:
    (refusal,) = refusals(checkpoint, facts=NODE)
    assert (refusal.key, refusal.value) == ("engine.dtype", "float32")
    assert "model.dtype=bfloat16" in refusal.remedy and 'CUDA_VISIBLE_DEVICES=""' in refusal.remedy
    assert accept(checkpoint, "engine.dtype=bfloat16", facts=NODE).model.dtype == "float32"
    assert accept(checkpoint).engine.dtype == "float32"


def test_the_key_value_cache_of_a_gpu_is_sized_by_sglang(checkpoint: Path) -> None:
    """The default of 16,384 slots for CPUs would be too few for a large GPU."""
    longer = ("rollout.max_new_tokens=20000", "data.max_prompt_tokens=16")
    assert accept(checkpoint, BF16, facts=NODE).engine.max_total_tokens is None
    results = refusals(checkpoint, *longer)
    assert any(r.key == "engine.max_total_tokens" and "20018 slots" in str(r) for r in results)
    assert not any(
        r.key == "engine.max_total_tokens" for r in refusals(checkpoint, BF16, *longer, facts=NODE)
    )
    results = refusals(checkpoint, BF16, *longer, "engine.max_total_tokens=16384", facts=NODE)
    assert any(r.key == "engine.max_total_tokens" for r in results)


def test_transformer_engine_is_refused_if_it_cannot_run(checkpoint: Path) -> None:
    with_te = LaunchFacts(world_size=8, local_world_size=8, num_gpus=16, transformer_engine=True)
    assert accept(checkpoint, "model.spec=te", BF16, facts=with_te).model.spec == "te"
    assert accept(checkpoint, "model.spec=local", BF16, facts=with_te).model.spec == "local"
    assert accept(checkpoint, facts=LaunchFacts()).model.spec is None, "null fits every machine"
    for facts, reason in ((LaunchFacts(), "No CUDA device"), (NODE, "not installed")):
        (refusal,) = [
            r
            for r in refusals(checkpoint, "model.spec=te", BF16, facts=facts)
            if r.key == "model.spec"
        ]
        assert reason in refusal.rule and "model.spec=local" in refusal.remedy
    results = refusals(checkpoint, "model.spec=te", "engine.dtype=bfloat16", facts=with_te)
    assert [r.key for r in results] == ["model.spec"] and "in float32" in str(results[0])


def test_fp8_training_is_refused_without_transformer_engine(checkpoint: Path) -> None:
    with_te = LaunchFacts(world_size=8, local_world_size=8, num_gpus=16, transformer_engine=True)
    assert accept(checkpoint, "model.fp8=blockwise", BF16, facts=with_te).model.fp8 == "blockwise"
    for facts, overrides, reason in (
        (LaunchFacts(), (), "No CUDA device"),
        (NODE, (BF16,), "not installed"),
        (with_te, (BF16, "model.spec=local"), "model.spec is local"),
    ):
        results = refusals(checkpoint, "model.fp8=blockwise", *overrides, facts=facts)
        (refusal,) = [r for r in results if r.key == "model.fp8"]
        assert "model.spec=te" in refusal.rule and reason in refusal.rule


def test_a_broken_transformer_engine_is_refused(checkpoint: Path) -> None:
    error = "ImportError: undefined symbol: _ZN3c10"
    broken_engine = LaunchFacts(num_gpus=2, transformer_engine_error=error)
    (refusal,) = refusals(checkpoint, BF16, facts=broken_engine)
    assert refusal.key == "model.spec"
    assert error in refusal.rule and "model.spec=local" in refusal.remedy
    accept(checkpoint, BF16, "model.spec=local", facts=broken_engine)
