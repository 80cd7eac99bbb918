"""The parts of a rehearsal. Each compares `te` with `local`, or opens what only `te` has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.families import read_shape
from tests.lab.te_rehearsal.checkpoints import checkpoint_differences
from tests.lab.te_rehearsal.families import FAMILIES, write_full_config, write_tiny_model
from tests.lab.te_rehearsal.models import Machine, differences, export_differences
from tests.lab.te_rehearsal.pretended_cuda import BLACKWELL, HOPPER
from tests.lab.te_rehearsal.report import Report
from tests.lab.te_rehearsal.steps import Gap, StepOutcome, cast_difference, gap, run_step

# In float32 only the order of additions differs. The first step of Adam moves a weight by the sign
# of its gradient, so that the smallest gradients decide its error.
FLOAT32 = Gap(logprobs=1e-5, gradients=1e-5, movement=5e-3)
# In bfloat16 both specs round, at different places: so many times `local`'s error is allowed.
BFLOAT16_RATIO = 2.0
# Of log-probabilities in nats and of the gradients' norm, from a model in float32 with random
# weights: e4m3 has four bits of precision
FP8 = Gap(logprobs=1.0, gradients=0.5, movement=1.0)

_FULL = {"recompute": "full"}
_DENSE = {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
_LATENT = {"recompute": "selective", "recompute_modules": ["layernorm", "mla_up_proj", "moe_act"]}
_EXPERTS = {"recompute": "selective", "recompute_modules": ["moe", "shared_experts"]}
# Recomputations of the steps in bfloat16, by family
_RECOMPUTATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3": ({}, _FULL, _DENSE),
    "qwen3_moe": ({}, _FULL),
    "mixtral": (_FULL,),
    "deepseek_v3": (_LATENT, _EXPERTS),
}
_SHARED_STEPS: tuple[tuple[str, dict[str, Any], dict[str, Any], Gap], ...] = (
    ("qwen3_moe", {"dtype": "float32"}, {"tp": 2, "ep": 2}, FLOAT32),
    ("qwen3", {"dtype": "float32"}, {"tp": 2}, FLOAT32),
    (
        "qwen3",
        {"dtype": "bfloat16", "fp8": "tensorwise"},
        {"tp": 2},
        FP8,
    ),
)
_RECIPES = (("tensorwise", HOPPER), ("blockwise", HOPPER), ("mxfp8", BLACKWELL))


@dataclass(frozen=True)
class Stage:
    """The machine, the rank and the report of every part. scratch: a directory for models."""

    machine: Machine
    layout: RankLayout
    scratch: Path
    report: Report

    def tiny_model(self, family: str) -> Path:
        """Write the tiny model of a family once, and return its directory."""
        directory = self.scratch / family
        if not directory.exists():
            write_tiny_model(family, directory)
        return directory

    def step(self, family: str, spec: Any, **settings: Any) -> StepOutcome:
        """Run a training step of a tiny model."""
        checkpoint = self.tiny_model(family)
        model = ModelSettings(path=str(checkpoint), **settings)
        return run_step(self.machine, self.layout, checkpoint, model, spec)


def check_models(stage: Stage) -> None:
    """Compare parameters, checkpoint places and exports of the tiny models."""
    for family in FAMILIES:
        path = stage.tiny_model(family)
        shape = read_shape(path)
        for dtype in ("float32", "bfloat16"):
            options: dict[str, Any] = {"dtype": dtype}
            settings = ModelSettings(path=str(path), **options)
            build = _builder(stage.machine.build, shape, settings)
            stage.report.expect_nothing(f"{family} {dtype} parameters", differences(build, shape))
            faults = export_differences(build("te"), shape, path)
            stage.report.expect_nothing(f"{family} {dtype} export", faults)


def check_sizes(stage: Stage) -> None:
    """Compare parameters and checkpoint places of published models, without data."""
    for family in FAMILIES:
        path = stage.scratch / f"{family}-full"
        path.mkdir()
        write_full_config(family, path)
        shape = read_shape(path)
        settings = ModelSettings(path=str(path), dtype="bfloat16")
        build = _builder(stage.machine.build_on_meta, shape, settings)
        stage.report.expect_nothing(f"{family} at full size", differences(build, shape))


def check_checkpoints(stage: Stage) -> None:
    """Save a model with its optimizer in one spec, and load it in the other."""
    for family in FAMILIES:
        path = stage.tiny_model(family)
        settings = ModelSettings(path=str(path), dtype="bfloat16")
        directions: list[tuple[Spec, Spec]] = [("te", "local"), ("local", "te")]
        for source, target in directions:
            faults = checkpoint_differences(
                stage.machine, path, settings, source, target, stage.scratch
            )
            stage.report.expect_nothing(f"{family} from {source} to {target}", faults)


def check_steps(stage: Stage) -> None:
    """Compare whole training steps with replayed routes."""
    for family, recomputations in _RECOMPUTATIONS.items():
        start = load_file(stage.tiny_model(family) / "model.safetensors")
        reference = stage.step(family, "local", dtype="float32")
        outcome = stage.step(family, "te", dtype="float32")
        _report_gap(
            stage.report,
            f"{family} float32",
            outcome.ratio_deviation,
            gap(outcome, reference, start),
            FLOAT32,
        )
        local = gap(stage.step(family, "local", dtype="bfloat16"), reference, start)
        limit = Gap(*(BFLOAT16_RATIO * value for value in vars(local).values()))
        for options in recomputations:
            outcome = stage.step(family, "te", dtype="bfloat16", **options)
            modules = "+".join(options.get("recompute_modules", [options.get("recompute", "none")]))
            name = f"{family} bfloat16 recompute {modules}"
            _report_gap(
                stage.report, name, outcome.ratio_deviation, gap(outcome, reference, start), limit
            )


def check_fp8(stage: Stage) -> None:
    """Run steps in every FP8 recipe, and check that packs without padding are refused."""
    for recipe, capability in _RECIPES:
        with _gpu(stage, capability):
            for family in ("qwen3", "qwen3_moe"):
                start = load_file(stage.tiny_model(family) / "model.safetensors")
                reference = stage.step(family, "local", dtype="float32")
                outcome = stage.step(family, "te", dtype="bfloat16", fp8=recipe)
                measured_gap = gap(outcome, reference, start)
                _report_gap(
                    stage.report, f"{family} {recipe}", outcome.ratio_deviation, measured_gap, FP8
                )
            for family in ("qwen3", "qwen3_moe"):
                difference = _cast_difference(stage, family, recipe)
                stage.report.add(
                    f"{family} {recipe} weights after a step",
                    difference == 0,
                    f"logprobs differ by {difference:.2g} from a new model's",
                )
            stage.report.add(f"{recipe} without padding", *_refusal_of_odd_rows(stage, recipe))


def check_ranks(stage: Stage) -> None:
    """Compare steps that two ranks share, over gloo."""
    for family, options, grid, limit in _SHARED_STEPS:
        path = stage.tiny_model(family)
        module = ["-m", "tests.lab.te_rehearsal.ranks"]
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *module]
        arguments = [str(path), json.dumps(options), json.dumps(grid)]
        process = subprocess.run(
            [sys.executable, *command, *arguments], capture_output=True, text=True, check=False
        )
        name = f"{family} {' '.join(map(str, options.values()))} {'_'.join(grid)}"
        line = re.search(r"^RESULT (.*)$", process.stdout, re.MULTILINE)
        if line is None:
            stage.report.add(name, False, process.stderr[-600:])
            continue
        result = json.loads(line[1])
        deviation = result.pop("ratio_deviation")
        _report_gap(stage.report, name, deviation, Gap(**result), limit)


PARTS: dict[str, Callable[[Stage], None]] = {
    "models": check_models,
    "sizes": check_sizes,
    "checkpoints": check_checkpoints,
    "steps": check_steps,
    "fp8": check_fp8,
    "ranks": check_ranks,
}


def _builder(build: Any, shape: Any, settings: ModelSettings) -> Callable[[Any], Any]:
    return lambda spec: build(shape, settings, spec)


def _report_gap(report: Report, name: str, deviation: float, distance: Gap, limit: Gap) -> None:
    """Record the distances of a step, each with its limit, and the ratio of both passes."""
    pairs = [(key, value, getattr(limit, key)) for key, value in vars(distance).items()]
    is_ok = deviation == 0 and all(value <= bound for _, value, bound in pairs)
    texts = [f"{key} {value:.2g} (at most {bound:.2g})" for key, value, bound in pairs]
    report.add(name, is_ok, f"{', '.join(texts)}, first ratio - 1 {deviation:.2g}")


def _cast_difference(stage: Stage, family: str, recipe: str) -> float:
    path = stage.tiny_model(family)
    options: dict[str, Any] = {"dtype": "bfloat16", "fp8": recipe, "spec": "te"}
    settings = ModelSettings(path=str(path), **options)
    return cast_difference(stage.layout, path, settings)


def _refusal_of_odd_rows(stage: Stage, recipe: str) -> tuple[bool, str]:
    """Tell whether a forward pass of 45 rows is refused, and how."""
    path = stage.tiny_model("qwen3")
    options: dict[str, Any] = {"dtype": "bfloat16", "fp8": recipe}
    settings = ModelSettings(path=str(path), **options)
    (model,) = stage.machine.build(read_shape(path), settings, "te")
    from tests.support.packed_sequences import pack

    batch = pack(range(4))
    try:
        model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(),
        )
    except (AssertionError, ValueError) as error:
        return True, f"{batch.num_tokens} rows are refused: {str(error)[:80]}"
    return False, f"{batch.num_tokens} rows were accepted"


@contextmanager
def _gpu(stage: Stage, capability: tuple[int, int]) -> Iterator[None]:
    """Report a GPU of another generation."""
    stage.machine.cuda.become(capability)
    try:
        yield
    finally:
        stage.machine.cuda.become(HOPPER)
