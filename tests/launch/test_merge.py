"""`launch/merge.py`: what it writes, and what it refuses before it writes."""

import json
import math
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from launch.testbed.jobs import start_job
from launch.testbed.policies import COLUMN_ADDITION, TWO_DIGIT_ADDITION
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from tests.support.recordings import write_recording
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("merge")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a start checkpoint and two that moved: one norm by +2, by +1, all
    else stands.
    """
    start = load_file(TWO_DIGIT_ADDITION / "model.safetensors")
    for name, step in (("start", 0.0), ("a", 2.0), ("b", 1.0)):
        shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / name)
        moved = start | {"model.norm.weight": start["model.norm.weight"] + step}
        save_file(moved, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "moved"),
    [
        (["linear", "--models", "a", "b", "--weights", "1", "3"], 1.25),
        (["ties", "--base", "start", "--models", "a", "b", "--density", "1", "--scale", "2"], 3.0),
    ],
)
def test_two_models_become_one(
    script: ModuleType, models: Path, arguments: list[str], moved: float
) -> None:
    assert script.main([*arguments, "--out", "made/merged"]) == ExitCode.OK
    start, merged = (
        load_file(file / "model.safetensors") for file in (models / "start", models / "made/merged")
    )
    assert merged.keys() == start.keys()
    for name, tensor in start.items():
        torch.testing.assert_close(
            merged[name], tensor + moved * (name == "model.norm.weight"), rtol=0, atol=1e-6
        )
    for file in ("config.json", "tokenizer.json"):
        assert (models / "made/merged" / file).read_bytes() == (models / "a" / file).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("linear --models a", "--models=a: at least two"),
        ("linear --models a b --weights 1", "--weights=[1.0]: 2 models need as many"),
        ("linear --models a b --weights 0 0", "not all 0"),
        ("linear --models a b --weights 2 -1", "none negative"),
        ("linear --models a b --weights nan 1", "must be finite"),
        ("linear --models a b --base start", "--base=start: linear does not use it"),
        ("linear --models a b --density 0.5", "--density=0.5: linear does not use it"),
        ("ties --models a b", "--base: ties needs"),
        ("ties --base start --models a b --density 0", "--density=0.0: it must be above 0"),
        ("ties --base start --models a b --scale inf", "--scale=inf: it must be above 0"),
        ("ties --base nowhere --models a b", "nowhere: config.json cannot be read"),
        ("linear --models a a/config.json", "a/config.json: config.json cannot be read"),
    ],
)
def test_refusals_name_the_option(
    script: ModuleType,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    assert script.main([*arguments.split(), "--out", "merged"]) == ExitCode.REFUSED
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out
    assert not (models / "merged").exists()


def test_a_directory_that_exists_is_not_written_over(
    script: ModuleType, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["linear", "--models", "a", "b", "--out", "b"]) == ExitCode.REFUSED
    assert "--out=b: it exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: edit(d / "config.json", rope_theta=5.0),
            "b: rope_theta=5.0 in config.json, and 10000.0 in a",
        ),
        (lambda d: (d / "config.json").write_text("[]"), "b: config.json is not an object"),
        (lambda d: (d / "config.json").write_text("{"), "b: config.json cannot be read"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "b: model.safetensors has 0 bytes"),
        (lambda d: (d / "tokenizer.json").unlink(), "b: b holds no tokenizer.json"),
        (
            lambda d: swap_ids(d / "tokenizer.json"),
            "b: its tokenizer gives tokens other ids than that of a",
        ),
    ],
)
def test_checkpoints_of_another_model_are_refused(
    script: ModuleType,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: object,
    message: str,
) -> None:
    spoil(models / "b")  # type: ignore[operator]
    assert script.main(["linear", "--models", "a", "b", "--out", "merged"]) == ExitCode.REFUSED
    assert message in capsys.readouterr().err


def test_what_is_found_on_the_way_is_told_too(
    script: ModuleType, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(models / "b/model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, models / "b/model.safetensors", metadata={"format": "pt"})
    assert script.main(["linear", "--models", "a", "b", "--out", "merged"]) == ExitCode.BAD_DATA
    assert (
        "checkpoint='b': tensor model.norm.weight of model.safetensors holds NaN"
        in capsys.readouterr().err
    )
    assert not list(models.glob("merged*"))


def test_the_chat_template_and_an_exact_bias_are_kept(script: ModuleType, models: Path) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name in ("a", "b"):
        (models / name / "chat_template.jinja").write_text("{{ messages }}")
        weights = load_file(models / name / "model.safetensors")
        save_file(weights | {bias: torch.tensor([0.1, 0.7])}, models / name / "model.safetensors")
    assert (
        script.main(["linear", "--models", "a", "b", "--dtype", "bfloat16", "--out", "merged"])
        == ExitCode.OK
    )
    merged = load_file(models / "merged/model.safetensors")
    assert (
        merged[bias].dtype is torch.float32 and merged["model.norm.weight"].dtype is torch.bfloat16
    )
    assert (models / "merged/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_full_disk_is_one_sentence(
    script: ModuleType,
    models: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr("megatron_rl.models.checkpoint_files.save_file", full)
    assert script.main(["linear", "--models", "a", "b", "--out", "merged"]) == ExitCode.CANNOT_WRITE
    assert capsys.readouterr().err == (
        "merged cannot be written: the disk is full. Make room there, or give another --out, and start again\n"
    )
    assert not list(models.glob("merged*"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def swap_ids(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.slow
def test_a_merged_quickstart_checkpoint_trains(script: ModuleType, tmp_path: Path) -> None:
    """From recorded rollouts, two steps; the parents are further from it than training takes it."""
    start, generator = (
        load_file(COLUMN_ADDITION / "model.safetensors"),
        torch.Generator().manual_seed(0),
    )
    for name in ("a", "b"):
        shutil.copytree(COLUMN_ADDITION, tmp_path / name)
        moved = {
            n: t + (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for n, t in start.items()
        }
        save_file(moved, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    parents = ["--models", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "float32"]
    merged = tmp_path / "merged"
    options = ["--base", str(COLUMN_ADDITION), "--density", "0.5", "--out", str(merged)]
    assert script.main(["ties", *options, *parents]) == ExitCode.OK
    write_recording(tmp_path / "rollouts/recorded", read_shape(merged), steps=2)
    job = start_job(
        tmp_path,
        "mode=train_only",
        f"rollout.recording={tmp_path}/rollouts",
        f"model.path={merged}",
        "train.total_steps=2",
        "train.max_route_disagreement=1",
        "run.save_weights=true",
        experiment="quickstart",
    )
    output, _ = job.communicate(timeout=200)
    assert job.returncode == ExitCode.OK, output[-4000:]
    last = json.loads((tmp_path / "job/metrics.jsonl").read_text().splitlines()[-1])
    assert (
        last["step"] == 2
        and last["train/optimizer_steps"] > 0
        and math.isfinite(last["train/grad_norm"])
    )
    trained, before = (
        load_file(at / "model.safetensors") for at in (tmp_path / "job/checkpoints/step-2", merged)
    )
    assert trained.keys() == before.keys() == start.keys()
    moved_by = {name: float((trained[name] - before[name]).abs().max()) for name in before}
    assert 1e-5 < max(moved_by.values()) < 0.02
    for parent in (COLUMN_ADDITION, tmp_path / "a", tmp_path / "b"):
        other = load_file(parent / "model.safetensors")
        assert max(float((trained[name] - other[name].float()).abs().max()) for name in other) > 0.1
