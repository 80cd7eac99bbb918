"""Memory of GPUs on which trainer and engines take turns."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import Configuration, EngineSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.engines.server_places import server_places
from megatron_rl.models.families import read_shape
from megatron_rl.planning.colocated import GIB, ColocatedMemory, colocated_memory, require_memory
from megatron_rl.planning.memory import engine_memory, rank_memory
from tests.support.configurations import configuration_of

PUBLISHED = Path(__file__).parents[1] / "support/published"
SHAPE = read_shape(PUBLISHED / "qwen3_30b_a3b")
FITS = ColocatedMemory(
    device=80 * GIB,
    training=70 * GIB,
    resting=30 * GIB,
    engine_weights=15 * GIB,
    engine_sequence=GIB,
)


def settings(ep: int, tp: int = 4) -> Configuration:
    c = configuration_of(["experiment=smoke", "model.recompute=full"])
    options: dict[str, Any] = {"dtype": "bfloat16"}
    return replace(
        c,
        model=replace(c.model, **options),
        parallel=ParallelSettings(ep=ep),
        engine=EngineSettings(colocated=True, tp=tp, count=8 // tp, **options),
    )


def test_both_turns_count_processes_and_the_other_side() -> None:
    # 70 + 1.5 + 2.5; 80 - 30 - 1.5 - 6
    assert FITS.trainer_turn == 74 * GIB
    assert FITS.engine_share == 42.5 * GIB
    assert FITS.fraction == 0.531
    assert list(FITS.problems()) == []
    assert require_memory(FITS) == 0.531


def test_an_engine_gets_no_more_of_an_empty_gpu_than_sglang_gives_it() -> None:
    assert replace(FITS, resting=0).fraction == 0.879


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"training": 77 * GIB}, ("77.0 GiB", "81.0 of 80.0 GiB", "model.recompute=full")),
        (
            {"engine_weights": 42 * GIB},
            ("leaves 42.5 of 80.0 GiB", "42.0 for weights", "engine.tp"),
        ),
        ({"resting": 79 * GIB}, ("79.0 GiB", "leaves 0.0", "engine.colocated=false")),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_remedies(
    changes: dict[str, int], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(Failure, match=r"^engine\.colocated=true: ") as error:
        require_memory(replace(FITS, **changes))
    for fragment in fragments:
        assert fragment in str(error.value)


def test_a_rank_rests_with_weights_gradients_optimizer_and_buckets() -> None:
    c = settings(ep=8)
    memory = colocated_memory(c, SHAPE, world_size=8, device_bytes=80 * GIB)
    rank = rank_memory(c, SHAPE, world_size=8, stage=0)
    table = SHAPE.vocab_size * SHAPE.hidden_size * 2
    lasting = rank.parameters + rank.gradients + rank.optimizer
    assert memory.resting == lasting + 4 * max(table, 256 * 2**20)
    assert memory.training == rank.total
    assert memory.engine_weights == engine_memory(c, SHAPE).parameters


def test_a_save_that_gathers_more_than_the_buckets_counts_while_engines_are_awake() -> None:
    c = settings(ep=8)
    saving = replace(c, run=replace(c.run, checkpoint_every=1))
    options = {"world_size": 8, "device_bytes": 80 * GIB}
    resting = [colocated_memory(x, SHAPE, **options).resting for x in (c, saving)]
    assert resting[1] > resting[0]


def test_a_model_of_30_billion_does_not_fit_on_eight_gpus_and_fits_on_32() -> None:
    """Eight ranks keep 4 + 2 bytes for each of their experts, and 12 of the optimizer."""
    few = colocated_memory(settings(ep=8), SHAPE, world_size=8, device_bytes=80 * GIB)
    many = colocated_memory(settings(ep=8), SHAPE, world_size=32, device_bytes=80 * GIB)
    assert list(few.problems())
    assert list(many.problems()) == []


def test_engines_get_the_gpus_of_the_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    job: Any = SimpleNamespace(local_world_size=4, node=1, num_nodes=1)
    model: Any = SimpleNamespace(path="/m", init="checkpoint")
    for tp, gpus in ((1, [(0,), (1,), (2,), (3,)]), (2, [(0, 1), (2, 3)]), (4, [(0, 1, 2, 3)])):
        engine = EngineSettings(colocated=True, tp=tp, count=4 // tp)
        places = server_places(engine, model, job, seed=0, return_routes=True, memory_fraction=0.5)
        assert [place.gpus for place in places] == gpus
        assert {place.memory_fraction for place in places} == {0.5}
    apart = server_places(EngineSettings(count=2), model, job, seed=0, return_routes=True)
    assert [place.gpus for place in apart] == [(4,), (5,)]
    assert {place.memory_fraction for place in apart} == {None}
