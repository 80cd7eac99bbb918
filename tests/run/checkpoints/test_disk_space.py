"""Room for the weights is asked for before a run starts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megatron_rl.config.cli import compose
from megatron_rl.models.families import read_shape
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.run.checkpoints.disk_space import NotEnoughDiskSpace, required_bytes, require_disk_space
from megatron_rl.run.checkpoints import disk_space as space

ASSETS = Path(space.__file__).parents[1] / "models" / "assets"


@pytest.mark.parametrize(
    "model", sorted(path.name for path in ASSETS.iterdir() if (path / "model.safetensors").exists())
)
def test_parameters_of_a_shape_are_those_of_its_checkpoint(model: str) -> None:
    with safe_open(ASSETS / model / "model.safetensors", "pt") as file:
        counted = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert num_parameters(read_shape(ASSETS / model)) == counted


def test_dense_layers_and_own_output_tables_count(tmp_path: Path) -> None:
    shape = read_shape(
        next(path for path in ASSETS.iterdir() if (path / "model.safetensors").exists())
    )
    moe = dataclasses.replace(shape, tie_word_embeddings=True)
    dense = dataclasses.replace(moe, moe_layers=moe.moe_layers[1:])
    experts = shape.num_experts * (
        3 * shape.hidden_size * shape.moe_ffn_hidden_size + shape.hidden_size
    )
    assert (
        num_parameters(moe) - num_parameters(dense)
        == experts - 3 * shape.hidden_size * shape.ffn_hidden_size
    )
    own = dataclasses.replace(moe, tie_word_embeddings=False)
    assert num_parameters(own) - num_parameters(moe) == shape.vocab_size * shape.hidden_size


def test_a_disk_without_room_is_refused_with_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = compose([f"run.root={tmp_path}/new", "run.save_weights=true", "sync.transport=disk"])
    shape = read_shape(c.model.path)
    need, parameters = required_bytes(c, shape), num_parameters(shape)
    assert (
        need["run.save_weights=true"] == 8 * parameters
        and need["sync.transport=disk"] == 4 * parameters
    )
    free: Any = lambda path: type("Usage", (), {"free": sum(need.values()) - 1})  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", free)
    with pytest.raises(
        NotEnoughDiskSpace,
        match=r"run\.root=.*MiB are free.*run\.save_weights=true.*run\.save_weights=false",
    ):
        require_disk_space(c, shape)
    without = dataclasses.replace(c, run=dataclasses.replace(c.run, save_weights=False))
    require_disk_space(without, shape)
    assert not (tmp_path / "new").exists()


def test_weights_in_half_precision_take_half_the_room() -> None:
    c = compose(["run.save_dtype=bfloat16"])
    assert required_bytes(c, read_shape(c.model.path))["run.save_weights=true"] == 4 * num_parameters(
        read_shape(c.model.path)
    )
