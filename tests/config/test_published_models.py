"""Published Qwen3-MoE models with their cluster layouts pass every rule, without their weights."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from megatron_rl.planning.memory import engine_memory, rank_memory
from tests.support.character_tokenizer import write_character_tokenizer
from tests.support.configurations import configuration_of, refusals

PUBLISHED = Path(__file__).parents[1] / "support" / "published"
GIB = 2**30
ENGINES = ("engine=external", "engine.urls=[http://10.0.0.7:30000]", "engine.tp=4")
LAYOUTS = {"qwen3_30b_a3b": ("pp2_ep8", 16), "qwen3_235b_a22b": ("tp4_pp8_ep16", 128)}


@pytest.fixture(params=list(LAYOUTS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(tmp_path: Path, name: str) -> Path:
    """The config.json, a tokenizer with its end of sequence, and a weights file without tensors."""
    write_character_tokenizer(tmp_path)
    text = (PUBLISHED / name / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"eos_token_id": 151645', '"eos_token_id": 1')
    )
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


def configuration(checkpoint: Path, name: str, *overrides: str) -> Configuration:
    layout, ranks = LAYOUTS[name]
    facts = LaunchFacts(world_size=ranks, local_world_size=8, num_gpus=8)
    model = (f"model={name}", f"model.path={checkpoint}", f"parallel={layout}")
    return configuration_of(["experiment=smoke", *model, *ENGINES, *overrides], facts=facts)


@pytest.mark.slow
def test_the_cluster_layout_passes_every_rule(checkpoint: Path, name: str) -> None:
    c = configuration(checkpoint, name)
    assert (c.model.dtype, c.engine.dtype, c.model.recompute) == ("bfloat16", "bfloat16", "full")


def test_it_fits_on_gpus_of_80_gb_with_long_responses(checkpoint: Path, name: str) -> None:
    c = configuration(
        checkpoint, name, "rollout.max_new_tokens=8192", "rollout.prompts_per_step=128"
    )
    shape = read_shape(checkpoint)
    ranks = LAYOUTS[name][1]
    for stage in range(c.parallel.pp):
        memory = rank_memory(c, shape, world_size=ranks, stage=stage)
        print(name, stage, {part: round(size / GIB, 2) for part, size in memory.parts.items()})
        assert memory.total < 76 * GIB
    alone = replace(
        c,
        parallel=replace(c.parallel, tp=1, pp=1, ep=1),
    )
    assert rank_memory(alone, shape, world_size=1, stage=0).total > 400 * GIB
    print(name, engine_memory(c, shape))


@pytest.mark.slow
def test_layers_that_do_not_divide_are_refused(checkpoint: Path, name: str) -> None:
    facts = LaunchFacts(world_size=128, local_world_size=8, num_gpus=8)
    uneven = (f"model={name}", "parallel.pp=4", "parallel.vpp=7", *ENGINES)
    assert [r.key for r in refusals(checkpoint, *uneven, facts=facts)] == ["parallel.pp"]


def test_the_whole_config_json_is_read(tmp_path: Path, name: str) -> None:
    shutil.copy(PUBLISHED / name / "config.json", tmp_path)
    assert read_shape(tmp_path).num_experts == 128
