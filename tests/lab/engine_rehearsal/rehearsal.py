"""One rehearsal: the arguments as a run would give them, and the two processes that judge them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.quantization import engine_quantization
from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import fp8_weights
from sglang_bridge.keys import create_keys, write_server_config
from sglang_bridge.server.command import build_argv, build_environment
from sglang_bridge.server.log_tail import last_exception
from sglang_bridge.settings import ServerPlace
from tests.lab.engine_rehearsal.findings import Finding, argument_findings, weight_findings
from tests.lab.engine_rehearsal.requests import (
    EngineReply,
    EngineRequest,
    ExportRequest,
    GpuFacts,
    TensorSpec,
)

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
GPUS = {
    "h100": GpuFacts(name="NVIDIA H100 80GB HBM3", memory=int(79.2 * GIB), count=8),
    "h200": GpuFacts(name="NVIDIA H200", memory=int(139.8 * GIB), count=8),
}
Weights = Literal["bfloat16", "fp8_blockwise", "none"]
_PORT = 30_000
_SECONDS = 1800
_BLOCK = 128
_ANY_FRACTION = 0.5  # the run computes it from the trainer's memory


class EngineRehearsalFailed(Failure):
    """A process of the rehearsal ended without an answer."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class Workload:
    """The size of a rehearsal.

    layers: of the model that is loaded; 0 for all. weights: their format.
    """

    gpu: GpuFacts
    layers: int = 0
    weights: Weights = "bfloat16"


@dataclass(frozen=True)
class Rehearsal:
    """The result. arguments: what the server would get. tensors: what the trainer would send."""

    arguments: list[str]
    tensors: list[TensorSpec]
    reply: EngineReply
    findings: list[Finding]

    @property
    def parameter_bytes(self) -> int:
        """The weights of the largest rank."""
        return max((load.num_bytes for load in self.reply.ranks), default=0)


def server_place(c: Configuration) -> ServerPlace:
    """The place of the first engine of a node with GPUs."""
    return ServerPlace(
        model_path=c.model.path,
        device="cuda",
        gpus=tuple(range(c.engine.tp)),
        return_routes=c.train.replay == "rollout",
        load_format="dummy" if c.model.init == "random" else None,
        quantization=engine_quantization(c.engine, read_shape(c.model.path)),
        seed=c.seed,
        memory_fraction=_ANY_FRACTION if c.engine.colocated else None,
    )


def rehearse(c: Configuration, workload: Workload) -> Rehearsal:
    """Give SGLang the arguments and the weights of a run, on a GPU that does not exist.

    Raises `EngineRehearsalFailed` with the last lines of a process that ended without an answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        return rehearse_in(Path(folder), c, workload)


def rehearse_in(
    folder: Path,
    c: Configuration,
    workload: Workload,
    tensors: Sequence[TensorSpec] | None = None,
) -> Rehearsal:
    """See `rehearse`. folder: for its files. tensors: None asks Megatron's model for them."""
    place = server_place(c)
    model_path = write_model(folder, c.model.path, workload)
    if tensors is None:
        tensors = sent_tensors(folder, model_path, c.engine.dtype, workload.weights)
    keys = folder / "keys.yaml"
    write_server_config(create_keys(), keys)
    request = EngineRequest(
        gpu=workload.gpu,
        arguments=build_argv(c.engine, place, port=_PORT, key_config=keys)[3:],
        weight_arguments=build_argv(
            c.engine, replace(place, model_path=str(model_path)), port=_PORT, key_config=keys
        )[3:],
        tensors=list(tensors),
    )
    environment = build_environment(c.engine, place, os.environ)
    reply = _ask("engine_process", request, EngineReply, folder, environment)
    experts = read_shape(c.model.path).num_experts
    findings = list(argument_findings(reply, c.engine, place))
    if reply.ranks:
        findings += weight_findings(tensors, reply.ranks, num_experts=experts)
    return Rehearsal(request.arguments, list(tensors), reply, findings)


def write_model(folder: Path, model_path: str, workload: Workload) -> Path:
    """The folder of the model to load: with fewer layers, with FP8 weights, or the same."""
    if not workload.layers and workload.weights != "fp8_blockwise":
        return Path(model_path)
    config = json.loads((Path(model_path) / "config.json").read_text())
    if workload.layers:
        config["num_hidden_layers"] = workload.layers
    if workload.weights == "fp8_blockwise":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        }
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def sent_tensors(folder: Path, model_path: Path, dtype: str, weights: Weights) -> list[TensorSpec]:
    """The tensors that a trainer sends. In FP8, matrices have scales beside them."""
    if weights == "none":
        return []
    config = json.loads((model_path / "config.json").read_text())
    config.pop("quantization_config", None)
    trainer = folder / "trainer"
    trainer.mkdir(exist_ok=True)
    (trainer / "config.json").write_text(json.dumps(config))
    request = ExportRequest(model_path=str(trainer), dtype=dtype)
    tensors = _ask("export_process", request, list[TensorSpec], folder, dict(os.environ))
    if weights != "fp8_blockwise":
        return tensors
    return list(_with_scales(tensors, fp8_weights(read_shape(trainer)).matrices))


def _with_scales(tensors: Sequence[TensorSpec], matrices: Set[str]) -> Iterator[TensorSpec]:
    for tensor in tensors:
        if tensor.name not in matrices:
            yield tensor
            continue
        rows, columns = tensor.shape
        blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
        yield TensorSpec(tensor.name, tensor.shape, "float8_e4m3fn")
        yield TensorSpec(f"{tensor.name}_scale_inv", blocks, "float32")


def _ask[Answer](
    module: str, request: Any, answer: type[Answer], folder: Path, environment: dict[str, str]
) -> Answer:
    """Run a process of this package with a request and read its answer."""
    question = folder / f"{module}.request.json"
    reply = folder / f"{module}.reply.json"
    question.write_bytes(msgspec.json.encode(request))
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-m", f"tests.lab.engine_rehearsal.{module}", str(question), str(reply)],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    if process.returncode:
        reason = last_exception(process.stderr) or process.stderr.strip()[-600:]
        raise EngineRehearsalFailed(f"{module} ended early: {reason}")
    return msgspec.json.decode(reply.read_bytes(), type=answer)
