"""`launch/checkpoint.py merge` writes one checkpoint, and refuses before it writes."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from launch import checkpoint
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.families import read_shape
from megatron_rl.run.checkpoints.merge import MergeRequest
from megatron_rl.run.checkpoints.merge import merge as run_merge
from tests.support.jobs import start_job
from tests.support.policies import COLUMN_ADDITION, TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording

OF_A_AND_B = ("linear", "--models", "a", "b")


def merge(*arguments: str, out: str = "merged") -> int:
    return checkpoint.main(["merge", *arguments, "--out", out])


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with three checkpoints: `start`, and `a` and `b` with one other norm.

    The norm of `a` has the values of `start` + 2, and the norm of `b` the values of `start` + 1.
    """
    start = load_file(TWO_DIGIT_ADDITION / "model.safetensors")
    for name, change in (("start", 0.0), ("a", 2.0), ("b", 1.0)):
        shutil.copytree(TWO_DIGIT_ADDITION, tmp_path / name)
        weights = start | {"model.norm.weight": start["model.norm.weight"] + change}
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "change"),
    [
        ([*OF_A_AND_B, "--weights", "1", "3"], 1.25),
        (["ties", "--base", "start", "--models", "a", "b", "--density", "1", "--scale", "2"], 3.0),
    ],
)
def test_two_models_become_one(models: Path, arguments: list[str], change: float) -> None:
    assert merge(*arguments, out="results/merged") == ExitCode.OK
    start = load_file(models / "start/model.safetensors")
    result = load_file(models / "results/merged/model.safetensors")
    assert result.keys() == start.keys()
    for name, tensor in start.items():
        target = tensor + change * (name == "model.norm.weight")
        torch.testing.assert_close(result[name], target, rtol=0, atol=1e-6)
    for file in ("config.json", "tokenizer.json"):
        original = (models / "a" / file).read_bytes()
        assert (models / "results/merged" / file).read_bytes() == original


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("linear --models a", "--models=a: a merge needs at least two"),
        ("linear --models a b --weights 1", "--weights=[1.0]: give one weight for each"),
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
    models: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert merge(*arguments.split()) == ExitCode.REFUSED
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err and not output.out
    assert not (models / "merged").exists()


@pytest.mark.parametrize("lacking", ["a", "b"])
def test_a_key_that_one_configuration_lacks_is_another_model(
    models: Path, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    file = models / lacking / "config.json"
    config = json.loads(file.read_text())
    del config["rope_theta"]
    file.write_text(json.dumps(config))
    assert merge(*OF_A_AND_B) == ExitCode.REFUSED
    assert "b: rope_theta=" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "growth"), [(None, 1), ("bfloat16", 1), ("float32", 2)])
def test_a_merge_needs_the_space_of_its_result(
    models: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None, growth: int
) -> None:
    size = growth * (models / "a/model.safetensors").stat().st_size
    request = MergeRequest("linear", [Path("a"), Path("b")], Path("merged"), dtype=dtype)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(Failure, match="the result may need"):
        run_merge(request)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    run_merge(request)


def test_a_directory_that_exists_is_not_overwritten(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(*OF_A_AND_B, out="b") == ExitCode.REFUSED
    assert "--out=b: this path exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: edit(folder / "config.json", rope_theta=5.0),
            "b: rope_theta=5.0 in config.json, but 10000.0 in a",
        ),
        (
            lambda folder: (folder / "config.json").write_text("[]"),
            "b: config.json is not an object",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "b: config.json cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b""),
            "b: model.safetensors has 0 bytes",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (
            lambda folder: swap_ids(folder / "tokenizer.json"),
            "b: its tokenizer assigns other token ids than the tokenizer of a",
        ),
    ],
)
def test_checkpoints_of_another_model_are_refused(
    models: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    message: str,
) -> None:
    damage(models / "b")
    assert merge(*OF_A_AND_B) == ExitCode.REFUSED
    assert message in capsys.readouterr().err


def test_a_tensor_that_is_not_finite_is_named(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(models / "b/model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, models / "b/model.safetensors", metadata={"format": "pt"})
    assert merge(*OF_A_AND_B) == ExitCode.BAD_DATA
    error = capsys.readouterr().err
    assert "checkpoint='b'" in error and "model.norm.weight" in error
    assert not list(models.glob("merged*"))


def test_the_chat_template_and_an_exact_bias_are_kept(models: Path) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    for name in ("a", "b"):
        (models / name / "chat_template.jinja").write_text("{{ messages }}")
        weights = load_file(models / name / "model.safetensors")
        save_file(weights | {bias: torch.tensor([0.1, 0.7])}, models / name / "model.safetensors")
    assert merge(*OF_A_AND_B, "--dtype", "bfloat16") == ExitCode.OK
    result = load_file(models / "merged/model.safetensors")
    assert result[bias].dtype is torch.float32
    assert result["model.norm.weight"].dtype is torch.bfloat16
    assert (models / "merged/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_full_disk_is_reported_in_one_sentence(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("megatron_rl.models.hf_checkpoint.writer.save_file", fail)
    assert merge(*OF_A_AND_B) == ExitCode.CANNOT_WRITE
    error = capsys.readouterr().err
    assert error.startswith("merged cannot be written: the disk is full")
    assert error.count("\n") == 1
    assert not list(models.glob("merged*"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def swap_ids(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))


def write_parents(tmp_path: Path) -> None:
    """Write checkpoints `a` and `b`: column addition with random changes of its weights."""
    start = load_file(COLUMN_ADDITION / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in ("a", "b"):
        shutil.copytree(COLUMN_ADDITION, tmp_path / name)
        weights = {
            n: t + (0.1 * torch.randn(t.shape, generator=generator)).to(t.dtype)
            for n, t in start.items()
        }
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})


def largest_change(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == others.keys()
    return max(float((weights[name] - others[name].float()).abs().max()) for name in others)


@pytest.mark.slow
def test_a_merged_quickstart_checkpoint_trains(tmp_path: Path) -> None:
    """Two steps from recorded rollouts; the parents are further away than training moves it."""
    write_parents(tmp_path)
    parents = ["--models", str(tmp_path / "a"), str(tmp_path / "b"), "--dtype", "float32"]
    out = tmp_path / "merged"
    base = ["--base", str(COLUMN_ADDITION), "--density", "0.5"]
    assert merge("ties", *base, *parents, out=str(out)) == ExitCode.OK
    write_recording(tmp_path / "rollouts/recorded", read_shape(out), steps=2)
    job = start_job(
        tmp_path,
        "mode=train_only",
        f"rollout.recording={tmp_path}/rollouts",
        f"model.path={out}",
        "train.total_steps=2",
        "train.max_route_disagreement=1",
        "run.save_weights=true",
        experiment="quickstart",
    )
    output, _ = job.communicate(timeout=200)
    assert job.returncode == ExitCode.OK, output[-4000:]
    last = json.loads((tmp_path / "job/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 and last["train/optimizer_steps"] > 0
    assert math.isfinite(last["train/grad_norm"])
    result = load_file(tmp_path / "job/checkpoints/step-2/model.safetensors")
    assert 1e-5 < largest_change(result, load_file(out / "model.safetensors")) < 0.02
    for parent in (COLUMN_ADDITION, tmp_path / "a", tmp_path / "b"):
        assert largest_change(result, load_file(parent / "model.safetensors")) > 0.1
