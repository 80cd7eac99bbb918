"""The disk space that a run may need is required before the run starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

import megatron_rl
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.models.families import read_shape
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.run.checkpoints.disk_space import (
    checkpoint_bytes,
    require_disk_space,
    required_bytes,
)
from megatron_rl.run.checkpoints.store import CheckpointStore
from tests.support.checkpoints import save_checkpoint
from tests.support.configurations import configuration_of

ASSETS = Path(megatron_rl.__file__).parent / "models" / "assets"
MODELS = sorted(path.parent.name for path in ASSETS.glob("*/model.safetensors"))
RECORDS = "run.root (metrics and logs)"


def with_mode(mode: str, *overrides: str) -> Configuration:
    """A configuration whose mode is set afterwards: rules are not what is tested here."""
    c = configuration_of(["experiment=smoke", *overrides])
    return dataclasses.replace(c, mode=mode)  # type: ignore[arg-type]


def required_keys(c: Configuration) -> set[str]:
    return required_bytes(c, read_shape(c.model.path)).keys() - {RECORDS}


def set_free_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_bytes(nbytes: int) -> None:
        usage = type("Usage", (), {"free": nbytes})
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)

    return set_bytes


@pytest.mark.parametrize("model", MODELS)
def test_parameters_of_a_shape_are_those_of_its_checkpoint(model: str) -> None:
    with safe_open(ASSETS / model / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert num_parameters(read_shape(ASSETS / model)) == count


def test_dense_layers_and_output_tables_count() -> None:
    shape = read_shape(ASSETS / MODELS[0])
    moe = dataclasses.replace(shape, tie_word_embeddings=True)
    dense = dataclasses.replace(moe, moe_layers=moe.moe_layers[1:])
    expert = 3 * shape.hidden_size * shape.moe_ffn_hidden_size
    experts = shape.num_experts * (expert + shape.hidden_size)
    dense_mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    assert num_parameters(moe) - num_parameters(dense) == experts - dense_mlp
    with_table = dataclasses.replace(moe, tie_word_embeddings=False)
    output_table = shape.vocab_size * shape.hidden_size
    assert num_parameters(with_table) - num_parameters(moe) == output_table


def test_a_full_disk_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = configuration_of(
        [f"run.root={tmp_path}/new", "run.save_weights=true", "sync.transport=disk"]
    )
    shape = read_shape(c.model.path)
    sizes = required_bytes(c, shape)
    assert sizes["run.save_weights=true"] == 8 * num_parameters(shape)
    assert sizes["sync.transport=disk"] == 4 * num_parameters(shape)
    sync = dataclasses.replace(c.sync, transport="delta")
    changes = required_bytes(dataclasses.replace(c, sync=sync), shape)
    assert changes["sync.transport=delta"] == 8 * num_parameters(shape)
    set_free_bytes(monkeypatch)(sum(sizes.values()) - 1)
    with pytest.raises(
        Failure,
        match=r"run\.root=.*MiB.*run\.save_weights=true.*run\.save_weights=false",
    ):
        require_disk_space(c, shape)
    run = dataclasses.replace(c.run, save_weights=False)
    require_disk_space(dataclasses.replace(c, run=run), shape)
    assert not (tmp_path / "new").exists()


def test_weights_in_half_precision_take_half_the_space() -> None:
    c = configuration_of(["model.dtype=bfloat16"])
    shape = read_shape(c.model.path)
    assert required_bytes(c, shape)["run.save_weights=true"] == 4 * num_parameters(shape)


@pytest.mark.parametrize("mode", ["eval", "profile", "rollout_only"])
def test_modes_that_save_no_weights_need_no_space_for_them(mode: str) -> None:
    assert "run.save_weights=true" not in required_keys(with_mode(mode, "run.save_weights=true"))


@pytest.mark.parametrize("mode", ["train", "train_only"])
def test_modes_that_train_need_space_for_weights_and_checkpoints(mode: str) -> None:
    c = with_mode(mode, "run.save_weights=true", "run.checkpoint_every=5")
    assert {"run.save_weights=true", "run.checkpoint_every"} <= required_keys(c)


@pytest.mark.slow
def test_weights_are_counted_for_disk_transport_only_where_they_are_sent() -> None:
    transport = "sync.transport=disk"
    for mode in ("train", "rollout_only"):
        assert transport in required_keys(with_mode(mode, transport))
    for mode in ("eval", "profile", "train_only"):
        assert transport not in required_keys(with_mode(mode, transport))
    for mode in ("eval", "profile"):
        c = with_mode(mode, transport)
        run = dataclasses.replace(c.run, resume="runs/other")
        assert transport in required_keys(dataclasses.replace(c, run=run))


def test_recordings_count_every_token_with_its_routes() -> None:
    c = with_mode("rollout_only", "train.total_steps=3", "data.max_prompt_tokens=100")
    shape = read_shape(c.model.path)
    rollouts = 3 * c.rollout.prompts_per_step * c.rollout.samples_per_prompt
    tokens = rollouts * (100 + c.rollout.max_new_tokens)
    routes = len(shape.moe_layers) * shape.topk
    assert shape.num_experts <= 256
    with_routes = required_bytes(c, shape)["mode=rollout_only"]
    assert with_routes == tokens * (4 + 4 + routes)
    train = dataclasses.replace(c.train, replay="off")
    without_routes = required_bytes(dataclasses.replace(c, train=train), shape)
    assert without_routes["mode=rollout_only"] == tokens * (4 + 4)


def test_recordings_of_a_selector_count_its_whole_budget() -> None:
    c = with_mode("rollout_only")
    shape = read_shape(c.model.path)
    selection = dataclasses.replace(c.selection, name="oversample", budget=2.5)
    uniform = required_bytes(c, shape)["mode=rollout_only"]
    oversample = required_bytes(dataclasses.replace(c, selection=selection), shape)
    assert oversample["mode=rollout_only"] == pytest.approx(2.5 * uniform, rel=1e-6)


@pytest.mark.parametrize("mode", ["train", "train_only"])
def test_rollouts_that_a_run_saves_count_for_every_step_that_saves_them(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_step = with_mode("rollout_only", "train.total_steps=1")
    shape = read_shape(every_step.model.path)
    step_bytes = required_bytes(every_step, shape)["mode=rollout_only"]
    overrides = ("train.total_steps=7", f"run.root={tmp_path}", "run.save_weights=false")
    c = with_mode(mode, *overrides, "logger.save_rollouts_every=2")
    sizes = required_bytes(c, shape)
    assert sizes["logger.save_rollouts_every"] == 3 * step_bytes
    assert "logger.save_rollouts_every" not in required_keys(with_mode(mode, *overrides))
    resumed_sizes = required_bytes(c, shape, steps_done=5)
    assert resumed_sizes["logger.save_rollouts_every"] == step_bytes
    set_free_bytes(monkeypatch)(sum(sizes.values()) - 1)
    with pytest.raises(Failure, match=r"raise logger\.save_rollouts_every"):
        require_disk_space(c, shape)


def test_saved_rollouts_are_as_large_as_those_of_the_largest_phase() -> None:
    curriculum = (
        "curriculum=[{name: a, until: {steps: 2}}, {name: b, rollout.samples_per_prompt: 64}]"
    )
    overrides = ("logger.save_rollouts_every=1", "rollout.samples_per_prompt=8")
    shape = read_shape(with_mode("train").model.path)
    key = "logger.save_rollouts_every"
    plain = required_bytes(with_mode("train", *overrides), shape)[key]
    assert required_bytes(with_mode("train", *overrides, curriculum), shape)[key] == 8 * plain


def test_a_resumed_run_needs_space_for_fewer_new_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["run.checkpoint_every=5", "run.keep_checkpoints=2", "run.save_weights=false"]
    c = with_mode("train", *overrides, "run.resume=auto", "run.name=job", f"run.root={tmp_path}")
    shape = read_shape(c.model.path)
    store = CheckpointStore(tmp_path / "job" / "checkpoints")
    store.folder.mkdir(parents=True)
    paths = [save_checkpoint(store, step) for step in (5, 10, 15)]
    one_checkpoint = checkpoint_bytes(c, shape)
    records = required_bytes(c, shape)[RECORDS]
    set_free = set_free_bytes(monkeypatch)
    for checkpoint, num_new in ((None, 3), (paths[0], 2), (paths[1], 1), (paths[2], 1)):
        set_free(records + num_new * one_checkpoint)
        require_disk_space(c, shape, checkpoint)
        set_free(records + num_new * one_checkpoint - 1)
        with pytest.raises(Failure, match=r"run\.checkpoint_every"):
            require_disk_space(c, shape, checkpoint)
    other_run = dataclasses.replace(c, run=dataclasses.replace(c.run, resume=str(paths[2])))
    set_free(records + 3 * one_checkpoint - 1)
    with pytest.raises(Failure, match=r"run\.checkpoint_every"):
        require_disk_space(other_run, shape, paths[2])


@pytest.mark.parametrize(
    ("on_update", "max_staleness", "num_steps"),
    [("wait", 0, 0), ("wait", 1, 1), ("wait", 3, 1), ("resume", 1, 1), ("resume", 4, 4)],
)
def test_checkpoints_hold_the_rollouts_of_later_steps(
    on_update: str,
    max_staleness: int,
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_step = with_mode("rollout_only", "train.total_steps=1")
    shape = read_shape(one_step.model.path)
    step_bytes = required_bytes(one_step, shape)["mode=rollout_only"]
    c = with_mode(
        "train",
        "run.checkpoint_every=5",
        "run.keep_checkpoints=2",
        "run.save_weights=false",
        f"run.root={tmp_path}",
    )
    rollout = dataclasses.replace(
        c.rollout,
        on_update=on_update,  # type: ignore[arg-type]
        max_staleness=max_staleness,
    )
    c = dataclasses.replace(c, rollout=rollout)
    sizes = required_bytes(c, shape)
    assert sizes.get("rollout.max_staleness", 0) == 3 * num_steps * step_bytes
    assert "rollout.max_staleness" not in required_bytes(
        dataclasses.replace(c, mode="train_only"), shape
    )
    set_free_bytes(monkeypatch)(sum(sizes.values()) - 1)
    remedy = (
        r"lower run\.keep_checkpoints or rollout\.max_staleness" if max_staleness else "run.root"
    )
    with pytest.raises(Failure, match=remedy):
        require_disk_space(c, shape)


def test_rollouts_in_checkpoints_count_the_budget_of_a_selector_and_the_largest_phase() -> None:
    curriculum = (
        "curriculum=[{name: a, until: {steps: 2}}, {name: b, rollout.samples_per_prompt: 64}]"
    )
    overrides = (
        "run.checkpoint_every=1",
        "rollout.max_staleness=1",
        "rollout.samples_per_prompt=8",
    )
    shape = read_shape(with_mode("train").model.path)
    key = "rollout.max_staleness"
    plain = with_mode("train", *overrides)
    plain_bytes = required_bytes(plain, shape)[key]
    assert required_bytes(with_mode("train", *overrides, curriculum), shape)[key] == 8 * plain_bytes
    selection = dataclasses.replace(plain.selection, name="oversample", budget=2.5)
    larger = required_bytes(dataclasses.replace(plain, selection=selection), shape)[key]
    assert larger == pytest.approx(2.5 * plain_bytes, rel=1e-6)
