"""Trainer and engine that take turns on one GPU, with a stand-in for SGLang.

The trainer's side is the same as in a run with engine.colocated=true. The engine is a process that
maps the trainer's memory through CUDA's handles, and sleeps and wakes (`receiver.py`).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch
from torch.multiprocessing.reductions import reduce_tensor

from megatron_rl.config.schema import Configuration
from megatron_rl.engines.rank_part import GroupCrew, open_rank_part
from megatron_rl.mcore import parallel
from megatron_rl.mcore.dtypes import torch_dtype
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.training.worker import Worker
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.audit import audit_engine
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.ipc.transport import IpcTransport, device_name
from sglang_bridge.weights.updater import WeightUpdater
from tests.lab.gpu_stages.engines.receiver import HOST_NAME, package, share_on_host
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run
from tests.support.workers import (
    ALLOW_RANDOM_ROUTES,
    configure,
    make_rollouts,
    open_worker,
    write_model,
)

ROUNDS = 3
_TIMEOUT_S = 20.0
_MIB = 2**20
# Contexts and workspaces that grow between rounds
_MAX_GROWTH_MIB = 64.0
# CUDA's errors where a container or the system does not let processes share device memory
_REFUSALS = ("operation not supported", "OS call failed", "not permitted")


def share_device(setting: Setting, report: Report) -> None:
    """Let the engine sleep, send it weights, and train, in turns."""
    vocabulary = 512 if setting.small else 32_000
    model = setting.scratch / "model"
    shape = write_model(model, small=setting.small, layers=2, vocabulary=vocabulary)
    c = configure(model, setting.scratch, "train.optimizer_steps_per_batch=1", ALLOW_RANDOM_ROUTES)
    c = replace(
        c,
        engine=replace(c.engine, colocated=True),
        sync=replace(c.sync, transport="ipc", timeout_s=_TIMEOUT_S),
    )
    report.note("receiver", package())
    with _receiver(setting, c.model.dtype, shape.num_experts) as url:
        worker = open_worker(c, setting.scratch)
        admin = AdminClient(Engine(url=url, gpus=(0,)), create_keys(), timeout=_TIMEOUT_S)
        updater = _open_updater(worker, c, setting.scratch)
        try:
            _take_turns(worker, updater, admin, c, setting, report)
        except Exception as error:
            if any(text in str(error) for text in _REFUSALS):
                raise StageSkipped(f"CUDA refuses to share memory here: {error}") from error
            raise
        finally:
            updater.close()
    parallel.shutdown()


@contextlib.contextmanager
def _receiver(setting: Setting, dtype: str, num_experts: int) -> Iterator[str]:
    """Start the engine's process, and yield its URL."""
    file = setting.scratch / "port"
    program = "tests.lab.gpu_stages.engines.receiver"
    process = subprocess.Popen([sys.executable, "-m", program, str(file), dtype, str(num_experts)])
    deadline = time.monotonic() + setting.longest_wait(then=30.0)
    try:
        while not file.exists():
            if process.poll() is not None:
                raise RuntimeError(f"the receiver ended with code {process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError("the receiver did not start in time")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{file.read_text()}"
    finally:
        process.kill()
        process.wait()


def _open_updater(worker: Worker, c: Configuration, scratch: Path) -> WeightUpdater:
    layout = worker.layout
    on_gpu = layout.device.type == "cuda"
    transport = IpcTransport(
        crew=GroupCrew(layout.rank, layout.control_group),
        node=layout.node,
        gpu=layout.local_rank,
        device=layout.device,
        timeout_seconds=c.sync.timeout_s,
        name_device=device_name if on_gpu else lambda _: HOST_NAME,
        share=reduce_tensor if on_gpu else share_on_host,
    )
    part = open_rank_part(
        layout,
        create_keys(),
        c.sync,
        c.engine,
        directory=scratch / "sync",
        model_path=scratch,
        log=print,
        transport=transport,
    )
    return WeightUpdater(part)


def _take_turns(
    worker: Worker,
    updater: WeightUpdater,
    admin: AdminClient,
    c: Configuration,
    setting: Setting,
    report: Report,
) -> None:
    """Train and send in turns, and compare memory and weights of each turn."""
    response = 48 if setting.small else 480
    _store, refs, advantages = make_rollouts(worker.shape, 4, prompt=16, response=response, seed=0)
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=0)
    free_bytes = []
    updater.sleep([admin])
    for step in range(ROUNDS):
        worker.train(planner.plan(step, refs, advantages))
        num_bytes = _send(step, worker, updater, admin, report)
        _audit(worker, admin, step, report)
        awake_free_bytes = _free_bytes()
        updater.sleep([admin])
        free_bytes.append(_free_bytes())
        if worker.layout.device.type == "cuda":
            returned_bytes = free_bytes[-1] - awake_free_bytes
            report.note(f"round {step} engine_returns_gib", round(returned_bytes / 2**30, 3))
            report.require(f"round {step} engine_sleeps", returned_bytes > 0.9 * num_bytes)
    # The first round also loads kernels and creates workspaces.
    growth = (free_bytes[1] - free_bytes[-1]) / _MIB
    report.require_at_most("memory_growth_mib", growth, _MAX_GROWTH_MIB)


def _send(
    step: int, worker: Worker, updater: WeightUpdater, admin: AdminClient, report: Report
) -> int:
    """Wake the engine with the present weights; returns their bytes."""
    cached_bytes = torch.cuda.memory_reserved()
    start = time.perf_counter()
    updater.push(worker.export(), step, [admin])
    report.note(f"round {step} sync_s", round(time.perf_counter() - start, 3))
    is_smaller = torch.cuda.memory_reserved() <= cached_bytes
    report.require(f"round {step} trainer_frees_its_cache", is_smaller)
    num_bytes = sum(updater.summary.bytes_sent.values())
    report.note(f"round {step} gib", round(num_bytes / 2**30, 3))
    return num_bytes


def _free_bytes() -> int:
    """The bytes of the device that no process uses, once this one has freed its cache."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _audit(worker: Worker, admin: AdminClient, step: int, report: Report) -> None:
    """Compare the engine's checksums with the trainer's weights."""
    on_gpu = worker.layout.device.type == "cuda"
    expectation = WeightExpectation(
        dtype=torch_dtype(worker.model.dtype),
        num_experts=worker.shape.num_experts,
        device="cuda" if on_gpu else "cpu",
    )
    for name, tensor in worker.export().stream_all():
        expectation.add(name, tensor)
    audit = audit_engine(admin, expectation)
    report.note(f"round {step} weights_compared", audit.num_compared)
    report.require_at_most(f"round {step} weights_that_differ", len(audit.mismatches), 0)


if __name__ == "__main__":
    run(share_device)
