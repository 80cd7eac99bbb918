"""Groups, experiments and defaults compose as users of Hydra expect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_rl.config import algorithms
from megatron_rl.config.cli import HYDRA_CONF, compose
from megatron_rl.config.keys import declared_keys
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import NODE, ON_CLUSTERS, MakeCheckpoint, configuration_of

EXPERIMENTS = sorted(file.stem for file in (HYDRA_CONF / "experiment").glob("*.yaml"))
FILES = ("jsonl", "csv", "parquet", "hf_dataset")


@pytest.mark.slow
def test_quickstart_is_the_default(checkpoint: Path) -> None:
    model = f"model.path={checkpoint}"
    assert compose([model]) == compose([model, "experiment=quickstart"])
    config = compose([model])
    assert config.data.source == "column_addition"
    assert config.data.num_eval >= 500


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted({*EXPERIMENTS} - {"own"}))
def test_every_experiment_is_accepted_as_shipped(experiment: str) -> None:
    config = compose(
        [f"experiment={experiment}"], facts=LaunchFacts(world_size=8, local_world_size=8)
    )
    assert config.train.total_steps
    assert Path(config.model.path).is_absolute()


@pytest.mark.parametrize(("positions", "limit"), [(256, 124), (40960, 1024), (None, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_experiment_for_own_data_takes_its_limits_from_the_model(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    positions: int | None,
    limit: int,
    dtype: str,
) -> None:
    """Without max_position_embeddings, transformers takes 32768."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "10+11=", "answer": 21}\n')
    model = make_checkpoint(max_position_embeddings=positions)
    own = [f"model.path={model}", f"data.train_path={rows}", f"model.dtype={dtype}"]
    config = configuration_of(["experiment=own", *own])
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens) == (limit, limit)


@pytest.mark.parametrize(
    ("experiment", "source"),
    [
        pytest.param(experiment, source, marks=() if is_typical else pytest.mark.nightly)
        for experiment in ("smoke", "quickstart", "cold_start")
        for source in FILES
        for is_typical in [source == "jsonl" or experiment == "smoke"]
    ],
)
def test_prompts_of_files_have_the_limit_of_the_model(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, experiment: str, source: str
) -> None:
    """An experiment's own task has shorter prompts than a file."""
    rows = tmp_path / ("rows" if source == "hf_dataset" else f"rows.{source}")
    (rows.mkdir if source == "hf_dataset" else rows.touch)()
    model = make_checkpoint(max_position_embeddings=40960)
    data = [f"data={source}", f"data.train_path={rows}", f"model.path={model}"]
    assert configuration_of([f"experiment={experiment}", *data]).data.max_prompt_tokens == 1024
    longer = configuration_of([f"experiment={experiment}", *data, "data.max_prompt_tokens=2000"])
    assert longer.data.max_prompt_tokens == 2000


@pytest.mark.slow
def test_own_data_without_a_model_asks_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        compose(["experiment=own"])
    assert [refusal.key for refusal in refused.value.refusals] == ["model.path"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("grpo", algorithms.GrpoSettings),
        ("gspo", algorithms.GspoSettings),
        ("espo", algorithms.EspoSettings),
        ("cispo", algorithms.CispoSettings),
        ("sft", algorithms.SftSettings),
    ],
)
def test_algorithms_have_their_own_schema(
    checkpoint: Path, name: str, node: type[algorithms.AlgoSettings]
) -> None:
    demonstration = ["environment=demonstration", "train.replay=off"] if name == "sft" else []
    config = compose([f"model.path={checkpoint}", f"algo={name}", *demonstration])
    assert type(config.algo) is node
    assert config.algo == node()  # the YAML recipe and the schema's default agree


@pytest.mark.slow
def test_the_command_line_overrides_the_experiment(checkpoint: Path) -> None:
    overrides = [
        f"model.path={checkpoint}",
        "experiment=smoke",
        "algo=gspo",
        "algo.clip_low=0.1",
        "train.total_steps=7",
    ]
    config = compose(overrides)
    assert isinstance(config.algo, algorithms.GspoSettings)
    assert (config.algo.clip_low, config.train.total_steps) == (0.1, 7)


def test_free_dictionaries_and_interpolations(checkpoint: Path) -> None:
    pytest.importorskip("reasoning_gym")
    task = ("data=reasoning_gym", "data.options.task=chain_sum", "data.options.min_terms=3")
    config = compose(
        [f"model.path={checkpoint}", *task, "sync.timeout_s=${engine.request_timeout_s}"]
    )
    assert config.data.options == {"task": "chain_sum", "min_terms": 3}
    assert config.sync.timeout_s == config.engine.request_timeout_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", ["algo", "data", "engine", "environment", "logger", "parallel", "reward"]
)
def test_every_option_of_a_group_sets_only_declared_keys(
    checkpoint: Path, tmp_path: Path, group: str
) -> None:
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "train.parquet").touch()
    (tmp_path / "train.csv").touch()
    plugin = f"{group}.{'source' if group == 'data' else 'name'}=json:JSONDecoder"
    required_overrides = {
        "external": ["engine.urls=['http://127.0.0.1:3']"],
        "jsonl": [f"data.train_path={tmp_path}/train.jsonl"],
        "parquet": [f"data.train_path={tmp_path}/train.parquet"],
        "csv": [f"data.train_path={tmp_path}/train.csv"],
        "hf_dataset": [f"data.train_path={tmp_path}"],
        "mixture": ["data.sources={sums: {source: two_digit_addition, weight: 1}}"],
        "letter_sorting": ["reward.answer=last_line"],
        "reasoning_gym": ["data.options.task=chain_sum"] if group == "data" else [],
        "sft": ["environment=demonstration", "train.replay=off"],
        "demonstration": ["algo=sft", "train.replay=off"],
        "parts": ["reward.parts={sums: {name: exact_match, tasks: [sums]}}"],
        "remote": ["reward.options.url=http://127.0.0.1:9/score"],
        "custom": [plugin],
    }
    for file in (HYDRA_CONF / group).glob("*.yaml"):
        if file.stem in ON_CLUSTERS:
            continue
        if file.stem == "reasoning_gym":
            pytest.importorskip("reasoning_gym")
        overrides = [
            f"{group}={file.stem}",
            "engine.dtype=bfloat16",
            *required_overrides.get(file.stem, []),
        ]
        compose([f"model.path={checkpoint}", *overrides], facts=NODE)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in (tree or {}).items():
        if isinstance(value, dict) and name != "options":
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_files_of_groups_repeat_no_defaults() -> None:
    """Defaults stand only in the schema."""
    repetitions = []
    num_keys = 0
    for file in HYDRA_CONF.glob("*/*.yaml"):
        tree = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(tree, dict)
        tree.pop("defaults", None)
        for key, value in leaves(
            tree, "" if file.parent.name == "experiment" else f"{file.parent.name}."
        ):
            num_keys += 1
            field = declared_keys()[key]
            default = field.default_factory() if callable(field.default_factory) else field.default
            if value == default:
                repetitions.append(f"{file.name}: {key}={value}")
    assert repetitions == []
    assert num_keys > 40


@pytest.mark.slow
def test_cold_start_trains_random_weights_on_worked_responses() -> None:
    config = compose(["experiment=cold_start"])
    assert (config.model.init, config.environment.name, config.algo.name) == (
        "random",
        "demonstration",
        "sft",
    )
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (64, 1)
    assert (config.optimizer.lr, config.optimizer.decay, config.optimizer.beta1) == (
        2e-3,
        "constant",
        0.9,
    )
    assert (config.eval.start_step, config.eval.every, config.eval.stop_at) == (150, 10, 0.3)


@pytest.mark.slow
def test_mistakes_in_a_user_s_file_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    search = f"hydra.searchpath=[file://{tmp_path}]"
    overrides = [f"model.path={checkpoint}", search, "experiment=mine", "rollout.max_new_tokens=8"]
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  total_steps: 3\n")
    assert compose(overrides).train.total_steps == 3
    file.write_text("# @package _global_\ntrain:\n  total_step: 3\n")
    with pytest.raises(Exception, match=r"train\.total_step=.*train\.total_steps"):
        compose(overrides)
    file.write_text("# @package _global_\ntrain: {total_steps: many}\n")
    with pytest.raises(Exception, match=r"train\.total_steps=.*whole number"):
        compose(overrides)
    file.write_text("train: [\n")
    with pytest.raises(Exception, match=r"experiment=mine: .*mine\.yaml"):
        compose(overrides)


def test_declared_keys_hold_every_section() -> None:
    keys = declared_keys()
    assert {"model.path", "algo.alpha", "algo.clip_low", "rollout.max_new_tokens", "seed"} <= set(
        keys
    )
    assert len(keys) == len(set(keys))
