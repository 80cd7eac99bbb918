"""Groups, experiments and defaults compose to what a user of Hydra expects."""

import datetime
import re
from pathlib import Path

import pytest

from megatron_rl.config import schema
from megatron_rl.config.compose import HYDRA_CONF, compose
from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.run_dir import resolve_run_dir
from megatron_rl.config.unknown_keys import declared_keys

EXPERIMENTS = sorted(file.stem for file in (HYDRA_CONF / "experiment").glob("*.yaml"))
NODE = LaunchFacts(world_size=8, local_world_size=8, num_gpus=16)


def test_quickstart_is_the_default(checkpoint: Path) -> None:
    model = f"model.path={checkpoint}"
    assert compose([model]) == compose([model, "experiment=quickstart"])
    config = compose([model])
    assert config.run.experiment == "quickstart"
    assert config.data.source == "column_addition"
    assert config.data.num_eval >= 500


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_accepted_as_shipped(experiment: str) -> None:
    config = compose([f"experiment={experiment}"], facts=LaunchFacts(world_size=8, local_world_size=8))
    assert config.run.experiment == experiment
    assert Path(config.model.path).is_absolute()


@pytest.mark.parametrize(
    ("name", "node"), [("grpo", schema.GrpoConfig), ("gspo", schema.GspoConfig), ("espo", schema.EspoConfig)]
)
def test_algorithms_have_their_own_schema(checkpoint: Path, name: str, node: type[schema.AlgoConfig]) -> None:
    config = compose([f"model.path={checkpoint}", f"algo={name}"])
    assert type(config.algo) is node
    assert config.algo == node()  # the YAML recipe and the schema's default agree


def test_command_line_beats_experiment(checkpoint: Path) -> None:
    overrides = [
        f"model.path={checkpoint}",
        "experiment=smoke",
        "algo=gspo",
        "algo.clip_low=0.1",
        "train.total_steps=7",
    ]
    config = compose(overrides)
    assert isinstance(config.algo, schema.GspoConfig)
    assert (config.algo.clip_low, config.train.total_steps) == (0.1, 7)


def test_free_dictionary_and_interpolation(checkpoint: Path) -> None:
    pytest.importorskip("reasoning_gym")
    task = ("data=reasoning_gym", "data.task=chain_sum", "+data.task_config.min_terms=3")
    config = compose([f"model.path={checkpoint}", *task, "sync.timeout_s=${engine.request_timeout_s}"])
    assert config.data.task_config == {"min_terms": 3}
    assert config.sync.timeout_s == config.engine.request_timeout_s


@pytest.mark.parametrize("group", ["algo", "data", "engine", "logger", "parallel", "reward"])
def test_every_option_of_a_group_sets_only_declared_keys(checkpoint: Path, tmp_path: Path, group: str) -> None:
    (tmp_path / "train.jsonl").touch()
    needed = {
        "external": ["engine.urls=['http://127.0.0.1:3']"],
        "jsonl": [f"data.train_path={tmp_path}/train.jsonl"],
        "reasoning_gym": ["data.task=chain_sum"],
    }
    for file in (HYDRA_CONF / group).glob("*.yaml"):
        if file.stem == "reasoning_gym":
            pytest.importorskip("reasoning_gym")
        compose([f"model.path={checkpoint}", f"{group}={file.stem}", *needed.get(file.stem, [])], facts=NODE)


def test_user_file_with_an_unknown_key_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    search = f"hydra.searchpath=[file://{tmp_path}]"
    overrides = [f"model.path={checkpoint}", search, "experiment=mine", "rollout.max_new_tokens=8"]
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    file.write_text("# @package _global_\ntrain:\n  total_steps: 3\n")
    assert compose(overrides).train.total_steps == 3
    file.write_text("# @package _global_\ntrain:\n  total_step: 3\n")
    with pytest.raises(Exception, match=r"train\.total_step=.*no such key.*Did you mean train\.total_steps"):
        compose(overrides)
    file.write_text("# @package _global_\ntrain: {total_steps: many}\n")
    with pytest.raises(Exception, match=r"train\.total_steps=.*whole number"):
        compose(overrides)
    file.write_text("train: [\n")
    with pytest.raises(Exception, match=r"experiment=mine: .*mine\.yaml"):
        compose(overrides)


def test_declared_keys_hold_every_section() -> None:
    keys = declared_keys()
    assert {"model.path", "algo.alpha", "algo.clip_low", "rollout.max_new_tokens", "seed"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_every_key_is_read() -> None:
    """A key that nothing reads would be a promise that nobody keeps. An algorithm's own keys go to its loss by name."""
    sources = (HYDRA_CONF.parent / "megatron_rl").rglob("*.py")
    text = "\n".join(file.read_text() for file in sources if file.name != "schema.py" and file.parent.name != "rules")
    leaves = [key for key in declared_keys() if "." in key and not key.startswith("algo.")]
    unread = [key for key in leaves if not re.search(rf"\b{key.replace('.', '[.]')}\b|\.{key.split('.')[1]}\b", text)]
    assert unread == []


def test_run_directory(tmp_path: Path) -> None:
    noon = datetime.datetime(2025, 1, 2, 12, 0, 5)
    run = schema.RunConfig(root=str(tmp_path), experiment="quickstart")
    assert resolve_run_dir(run, noon) == tmp_path / "quickstart-20250102-120005"
    run.name = "mine"
    assert resolve_run_dir(run, noon) == tmp_path / "mine"


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 3), ("", 0), ("-1", 0), ("0,2", 2), ("1,-1,2", 1), ("0,1,2,3", 3), ("GPU-5a,MIG-7", 2)]
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, gpus: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert LaunchFacts.from_environment(environment, tmp_path) == LaunchFacts(4, 2, gpus)
