"""Script: goes to the places of the trainer that only a GPU executes.

Usage: python -m tests.lab.pretended_device --branches=DIR
tests.lab.pretended_device.gpu_places OUT. It trains, saves, resumes, sends weights to an engine
over NCCL, and asks for engines on GPUs. It writes OUT/places.json: what each part found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import numpy as np
import torch

import megatron_rl
from espo_kernels import espo_groups, token_logprob_entropy
from espo_kernels.backends import resolve_backend
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.commands import Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.engines.members import Members
from megatron_rl.engines.quantization import require_fp8_gpu
from megatron_rl.engines.server_places import server_places
from megatron_rl.engines.weight_sync import open_weight_sync
from megatron_rl.losses.mismatch import mismatch_by_age
from megatron_rl.mcore import parallel
from megatron_rl.mcore.checkpoint import load_random_state, load_tensors, random_state_file
from megatron_rl.mcore.job import join
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.run.checkpoints.saving import CheckpointWriter
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.features.profiler.step_profiler import StepProfiler
from megatron_rl.training.worker import Worker
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import create_keys
from sglang_bridge.server.command import build_argv, build_environment
from sglang_bridge.server.nccl import require_same_nccl
from sglang_bridge.weights.audit import require_auditable
from tests.lab.pretended_device.colocated_steps import run_colocated_steps
from tests.lab.pretended_device.pretend import current
from tests.support.policies import COLUMN_ADDITION
from tests.support.workers import ALLOW_RANDOM_ROUTES, configure, make_rollouts, open_worker

ASSETS = Path(megatron_rl.__file__).parent / "models" / "assets"
PEER = "tests.lab.pretended_device.engine_peer"
STEPS = 2


def main() -> None:
    out = Path(sys.argv[1])
    c = configure(
        COLUMN_ADDITION,
        out,
        "model.init=checkpoint",
        "algo.kl.coef=0.01",
        "train.optimizer_steps_per_batch=1",
        "train.tokens_per_micro_batch=64",
        "rollout.max_new_tokens=32",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=0",
        "sync.bucket_mb=0.05",
        "sync.timeout_s=20",
        ALLOW_RANDOM_ROUTES,
    )
    worker = open_worker(c, out)
    result = {
        "device": str(worker.layout.device),
        **train(c, worker, out),
        **save_and_resume(c, worker, out),
        **send_weights(c, worker, out),
        "colocated": colocate(c, worker, out),
        **choose_kernels(),
        **compare_ages(),
        **place_engines(c),
        **refuse_settings(out),
    }
    (out / "places.json").write_text(json.dumps(result, indent=1))
    parallel.shutdown()


def train(c: Configuration, worker: Worker, out: Path) -> dict[str, Any]:
    """Train with a KL penalty, whose reference is in pinned memory, and open a profiler."""
    reference = worker.policy.reference
    assert reference is not None
    store, plans = make_plans(c, worker)
    kl = [worker.train(plan).metrics.values()["policy/kl_reference"] for plan in plans]
    store.release(["batch"])
    profiler = StepProfiler({1}, rank=0, directory=out / "profiles", log=print)
    with profiler.profile_step(1):
        pass  # torch has no events of this device, and would complain of each operation
    return {
        "pinned_reference": all(weight.is_pinned() for weight in reference._others),
        "kl": kl,
        "traces": sorted(file.name for file in (out / "profiles").iterdir()),
    }


def make_plans(c: Configuration, worker: Worker) -> tuple[Any, list[StepPlan]]:
    store, refs, advantages = make_rollouts(worker.shape, 4, prompt=8, response=24, seed=0)
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=0)
    return store, [planner.plan(step, refs, advantages) for step in range(STEPS)]


def save_and_resume(c: Configuration, worker: Worker, out: Path) -> dict[str, Any]:
    """Save in the background, change weights and random numbers, and load them again."""
    store = CheckpointStore(out / "checkpoints")
    background = torch.distributed.new_group(backend="gloo")
    writer = CheckpointWriter(worker, store, nbytes=1, keep=1, background=background)
    weights = weights_of(worker)
    writer.save(Checkpoint(step=STEPS, state=b"{}", background=True))
    samples = torch.rand(4, device="cuda").tolist()
    result = writer.wait_for_save(WaitForSave())
    assert result is not None
    with torch.no_grad():
        for model in worker.policy.models:
            for weight in model.parameters():
                weight.add_(1.0)
    checkpoint = store.path(STEPS)
    load_tensors(worker.policy.models, worker.optimizer, checkpoint, optimizer_steps=STEPS)
    load_random_state(random_state_file(checkpoint, 0))
    loaded_weights = weights_of(worker)
    return {
        "save_problem": result.problem,
        "loaded_weights_are_equal": all(
            torch.equal(weight, loaded_weights[name]) for name, weight in weights.items()
        ),
        "random_numbers_repeat": torch.rand(4, device="cuda").tolist() == samples,
    }


def weights_of(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in worker.export().stream_all()}


def send_weights(c: Configuration, worker: Worker, out: Path) -> dict[str, Any]:
    """Send the weights to an engine, audit them, and abort the group after a failure."""
    members = Members()
    lines: list[str] = []
    with open_peer(out) as url:
        members.add("engine", Engine(url=url))
        members.answer("engine", 0)
        sync = open_weight_sync(
            members,
            create_keys(),
            c.sync,
            c.engine,
            worker.shape,
            directory=out / "sync",
            model_path=COLUMN_ADDITION,
            job=worker.layout,
            log=lines.append,
        )
        metrics = sync.send(sync.next_command(), worker.export())
        urllib.request.urlopen(urllib.request.Request(f"{url}/fail", data=b"{}"), timeout=20)
        sync.send(sync.next_command(), worker.export())
        sync.close()
    return {"sync": metrics, "audit_obstacle": sync.audit_obstacle, "failed_sync": lines}


@contextlib.contextmanager
def open_peer(out: Path) -> Iterator[str]:
    """Start an engine's side of the weight sync on a pretended device of its own."""
    file = out / "port"
    options = [option for option in sys.orig_argv if option.startswith("--branches=")]
    command = [sys.executable, "-m", "tests.lab.pretended_device", *options, PEER, str(file)]
    process = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    try:
        deadline = time.monotonic() + 180
        while not file.exists():
            assert process.poll() is None and time.monotonic() < deadline, "the peer did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{file.read_text()}"
    finally:
        process.kill()
        process.wait()


def colocate(c: Configuration, worker: Worker, out: Path) -> dict[str, Any]:
    """Take turns on the device with an engine, and train a step between two syncs."""
    store, plans = make_plans(c, worker)
    result = run_colocated_steps(c, worker, plans[0], out)
    store.release(["batch"])
    return result


def choose_kernels() -> dict[str, Any]:
    """Ask for kernels by name, and call one that does not read values of the device.

    The reference runs on the device itself.
    """
    logits = torch.randn(4, 8, device="cuda")
    with current().waits.counting() as waits:
        token_logprob_entropy(logits, torch.zeros(4, dtype=torch.long, device="cuda"))
    entropies = torch.rand(6, device="cuda")
    bounds = torch.tensor([0, 2, 6], device="cuda")
    groups, others = (
        espo_groups(entropies, bounds, vocab_size=8, alpha=0.5, fractions=(0.2,), backend=backend)
        for backend in ("auto", "reference")
    )
    return {
        "reference_groups_are_equal": torch.equal(groups.group_id, others.group_id),
        "cpu_kernel": message_of(lambda: resolve_backend("cpu", logits)),
        "triton_kernel": resolve_backend("triton", logits),
        "kernel_waits": sum(waits.values()),
    }


def place_engines(c: Configuration) -> dict[str, Any]:
    """Place engines on the node's other GPUs, and build their command lines."""
    engine = EngineSettings(dtype="bfloat16", count=2, tp=2)
    job = join(c.parallel)
    places = server_places(engine, c.model, job, seed=0, return_routes=True)
    fp8_places = server_places(
        engine, c.model, job, seed=0, return_routes=True, quantization={"quant_method": "fp8"}
    )
    argv = build_argv(engine, places[1], port=1, key_config=Path("keys"))
    environment = build_environment(engine, places[1], {})
    info = {"device": "cuda", "moe_runner_backend": "flashinfer_cutlass"}
    one = Engine(url="http://127.0.0.1:1")
    return {
        "engine_gpus": [place.gpus for place in places],
        "engine_arguments": [word for word in argv if word.startswith("--device")],
        "engine_nccl": {name: environment.get(name) for name in ("NCCL_CUMEM_ENABLE",)},
        "fp8_engines": [place.quantization for place in fp8_places],
        "fp8_refusal": message_of(partial(require_fp8_gpu, (8, 0), "A100")),
        "audit_refusal": message_of(lambda: require_auditable(one, info, "cuda")),
        "nccl_refusal": message_of(refuse_other_nccl),
    }


def refuse_other_nccl() -> None:
    """Compare a deterministic engine on two GPUs with a trainer without NCCL's variables."""
    info = {"device": "cuda", "enable_deterministic_inference": True}
    require_same_nccl(Engine(url="http://127.0.0.1:1", tp=2), info, {})


def compare_ages() -> dict[str, Any]:
    """Compare log-probabilities of tokens of two ages on the device."""
    old = torch.tensor([-1.0, -2.0, -3.0], device="cuda")
    new = torch.tensor([-1.0, -2.5, -3.0], device="cuda")
    with current().waits.counting() as waits:
        sums = mismatch_by_age(old, new, np.array([0, 1, -1]))
    name = "mismatch/age/1/logprob_abs_mean"
    return {"age_sum": sums[name].tolist(), "age_waits": sum(waits.values())}


def write_wide_heads(directory: Path) -> Path:
    """Write a model whose experts are whole on each of two ranks only with engine.ep=2."""
    path = directory / "wide_heads"
    shutil.copytree(ASSETS / "qwen3_moe_fp8_blank", path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 128}))
    return path


def refuse_settings(out: Path) -> dict[str, Any]:
    """Compose runs whose engines or ranks have no GPU, or the wrong one."""
    node = LaunchFacts(num_gpus=2)
    few = LaunchFacts(num_gpus=1, world_size=2, local_world_size=2)
    runs = {
        "float32 engine": (node, ["model.dtype=float32"]),
        "engines beside one rank": (
            node,
            [
                "model.dtype=bfloat16",
                "engine.colocated=true",
                "sync.transport=ipc",
                "engine.count=2",
            ],
        ),
        "experts that TP cuts": (
            LaunchFacts(num_gpus=4),
            [
                "model=fp8_tiny",
                f"model.path={write_wide_heads(out)}",
                "model.dtype=bfloat16",
                "engine.quantization=fp8",
                "engine.tp=2",
            ],
        ),
        "one GPU for two": (few, ["model.dtype=bfloat16", "parallel=ep2"]),
    }
    return {
        name: message_of(partial(compose, ["experiment=smoke", *overrides], facts=facts))
        for name, (facts, overrides) in runs.items()
    }


def message_of(function: Callable[[], Any]) -> str:
    """The message of the error that a function raises; empty if there is none."""
    try:
        function()
    except (Failure, EngineError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
