"""Refusals that depend on files, on the machine, or on several settings at once."""

from pathlib import Path

import pytest

from megatron_rl.config.cli import HYDRA_CONF
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import ConfigurationRefused
from tests.support.configurations import BF16, NODE, ON_CLUSTERS, accept, refusals


def test_a_run_cannot_start_from_its_own_directory(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run = (f"run.root={tmp_path}", "run.name=a")
    own_directory = (f"run.resume={tmp_path}/a", "run.on_existing=overwrite_failed")
    assert [r.key for r in refusals(checkpoint, *run, *own_directory)] == ["run.resume"]
    assert accept(checkpoint, *run, "run.resume=auto").run.resume == "auto"


def test_jsonl_files_exist_and_differ(checkpoint: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    held_out = tmp_path / "eval.jsonl"
    train.touch()
    paths = ("data=jsonl", f"data.train_path={train}")
    assert refusals(checkpoint, *paths, f"data.eval_path={held_out}")[0].key == "data.eval_path"
    (refusal,) = refusals(checkpoint, *paths, f"data.eval_path={train}")
    assert refusal.key == "data.eval_path" and "training file" in refusal.rule
    assert accept(checkpoint, *paths).data.train_path == str(train)


@pytest.mark.parametrize(
    ("held_out", "override", "path"),
    [
        (False, "data.num_train=100", "data.train_path"),
        (True, "data.num_train=100", "data.train_path"),
        (True, "data.num_eval=100", "data.eval_path"),
        (True, "++data.num_eval=100", "data.eval_path"),
        (False, "data.num_eval=100", None),
        (True, "data.num_eval=512", None),  # the default changes nothing
        (True, "experiment=smoke", None),  # its counts belong to its own task
    ],
)
def test_a_count_is_refused_where_a_file_decides_it(
    checkpoint: Path, tmp_path: Path, held_out: bool, override: str, path: str | None
) -> None:
    overrides = ["data=jsonl", f"data.train_path={tmp_path}/train.jsonl", override]
    (tmp_path / "train.jsonl").touch()
    if held_out:
        (tmp_path / "eval.jsonl").touch()
        overrides.append(f"data.eval_path={tmp_path}/eval.jsonl")
    if path is None:
        assert accept(checkpoint, *overrides).data.source == "jsonl"
        return
    (refusal,) = refusals(checkpoint, *overrides)
    assert f"{refusal.key}={refusal.value}" == override.lstrip("+") and path in refusal.rule


@pytest.mark.parametrize(
    ("overrides", "key", "fragment"),
    [
        (("parallel.tp=8",), "parallel.tp", "4 attention heads"),
        (("parallel.tp=4",), "parallel.tp", "2 key-value heads"),
        (("parallel.pp=2", "parallel.vpp=4"), "parallel.pp", "2 stage(s) of 4 chunks each"),
        (("parallel.etp=2",), "parallel.etp", "gradients of experts"),
        (("parallel.ep=2", "parallel.etp=2"), "parallel.etp", "parallel.tp=1"),
        (("parallel.ep=4", "parallel.etp=4"), "parallel.ep", "parallel.etp x ep = 16"),
    ],
)
def test_a_split_of_the_model_is_refused(
    checkpoint: Path, overrides: tuple[str, ...], key: str, fragment: str
) -> None:
    results = refusals(checkpoint, *overrides, facts=NODE)
    assert any(r.key == key and fragment in str(r) for r in results), results


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    sorted({file.stem for file in (HYDRA_CONF / "parallel").glob("*.yaml")} - ON_CLUSTERS),
)
def test_parallel_groups_fit_a_node(checkpoint: Path, parallel: str) -> None:
    assert accept(checkpoint, f"parallel={parallel}", BF16, facts=NODE).parallel.timeout_s == 600.0


def test_engine_dtype_follows_the_model_and_is_never_wider(checkpoint: Path) -> None:
    assert accept(checkpoint, "engine.dtype=bfloat16").engine.dtype == "bfloat16"
    for facts in (NODE, LaunchFacts()):
        assert accept(checkpoint, "model.dtype=bfloat16", facts=facts).engine.dtype == "bfloat16"
    refusal = refusals(checkpoint, "model.dtype=bfloat16", "engine.dtype=float32", facts=NODE)[-1]
    assert (refusal.key, refusal.value) == ("engine.dtype", "float32")
    assert "wider" in refusal.rule and "engine.dtype=bfloat16" in refusal.remedy


def test_all_refusals_are_reported_together_in_the_order_of_sections(checkpoint: Path) -> None:
    results = refusals(
        checkpoint, "run.root=''", "data.train_path=x", "rollout.max_staleness=99999"
    )
    keys = ["data.train_path", "rollout.max_staleness", "run.root"]
    assert [refusal.key for refusal in results] == keys
    *lines, summary = str(ConfigurationRefused(results)).splitlines()
    assert [line.partition("=")[0] for line in lines] == keys
    assert summary == "3 settings are refused; nothing was started."


@pytest.mark.slow
@pytest.mark.parametrize("group", ["algo", "data", "environment", "reward"])
def test_a_missing_plugin_is_refused_without_importing_it(checkpoint: Path, group: str) -> None:
    key = f"{group}.source" if group == "data" else f"{group}.name"
    (refusal,) = refusals(checkpoint, f"{group}=custom")
    assert refusal.key == key
    assert f"Give it: {key}=..." in str(refusal) or "package.module:Name" in str(refusal)
    plugin = "no_such_package.module:Mine"
    (refusal,) = refusals(checkpoint, f"{group}=custom", f"{key}={plugin}")
    assert (refusal.key, refusal.value) == (key, plugin)
    assert "no_such_package" in refusal.rule and "PYTHONPATH" in refusal.remedy
    existing = (f"{key}=json.decoder:JSONDecoder", f"{group}.options.strict=true")
    c = accept(checkpoint, f"{group}=custom", *existing)
    assert getattr(c, group).options == {"strict": True}


@pytest.mark.slow
def test_demonstrations_need_a_source_with_worked_responses(checkpoint: Path) -> None:
    overrides = ["train.replay=off", "algo=sft"]
    demonstration = ("data=reasoning_gym", "environment=demonstration")
    refusal = refusals(checkpoint, *overrides, *demonstration)[-1]
    assert (refusal.key, refusal.value) == ("environment.name", "demonstration")
    assert "reasoning_gym" in refusal.rule
    plugin = ("environment=custom", "environment.name=json:JSONDecoder")
    c = accept(checkpoint, *overrides, *plugin)
    assert not c.algo.compares_groups(c.environment.name)


@pytest.mark.slow
def test_keys_of_another_algorithm_are_refused_in_a_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    file = tmp_path / "algo" / "mine.yaml"
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "algo=mine"]
    file.write_text("name: espo\nalpha: 0.1\n")
    assert accept(checkpoint, *overrides).algo.name == "espo"
    file.write_text("name: espo\nclip_low: 0.1\n")
    (refusal,) = refusals(checkpoint, *overrides)
    assert (refusal.key, refusal.value) == ("algo.clip_low", 0.1)
    assert "algo=grpo or algo=gspo" in refusal.remedy


def test_an_existing_run_name_and_a_root_that_is_a_file_are_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    (refusal,) = refusals(checkpoint, f"run.root={tmp_path}", "run.name=mine")
    assert refusal.key == "run.name" and "exists already" in refusal.rule
    (refusal,) = refusals(checkpoint, f"run.root={tmp_path}/file/deeper")
    assert refusal.key == "run.root" and "is a file" in refusal.rule
