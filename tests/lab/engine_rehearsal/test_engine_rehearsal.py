"""SGLang's own checks and loaders judge the engine of a run, as on a GPU that does not exist."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from megatron_rl.models.hf_checkpoint.reader import CheckpointReader
from sglang_bridge.keys import create_keys, write_server_config
from sglang_bridge.server.command import build_argv, build_environment
from tests.lab.engine_rehearsal.__main__ import main, read_options
from tests.lab.engine_rehearsal.findings import argument_findings, summarize, weight_findings
from tests.lab.engine_rehearsal.rehearsal import GPUS, ROOT, Workload, rehearse, server_place
from tests.lab.engine_rehearsal.requests import EngineReply, EngineRequest, TensorSpec
from tests.support.configurations import configuration_of

ROUTER = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def configuration() -> Configuration:
    """The quickstart's model on engines of two GPUs, in bfloat16."""
    overrides = ["experiment=smoke", "model=column_addition", "model.dtype=bfloat16"]
    return configuration_of(
        [*overrides, "engine.tp=2", "engine.ep=2"], facts=LaunchFacts(num_gpus=8)
    )


def checkpoint_tensors(c: Configuration) -> list[TensorSpec]:
    """The tensors of the checkpoint. An export has the same ones (tests/mcore)."""
    shapes = CheckpointReader(Path(c.model.path)).shapes()
    return [TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()]


def with_other_tensor(
    tensors: list[TensorSpec], name: str, *, new_name: str = "", factors: tuple[int, ...] = (1, 1)
) -> list[TensorSpec]:
    """The tensors, one with another name, or with sizes that are multiplied."""
    (old,) = (tensor for tensor in tensors if tensor.name == name)
    sizes = tuple(size * factor for size, factor in zip(old.shape, factors, strict=True))
    new = TensorSpec(new_name or name, sizes, old.dtype)
    return [new if tensor is old else tensor for tensor in tensors]


def variants(c: Configuration, keys: Path) -> dict[str, EngineRequest]:
    """The engine as it is, and engines with one mistake each."""
    tensors = checkpoint_tensors(c)

    def request(tensors: list[TensorSpec], *options: str) -> EngineRequest:
        engine = replace(c.engine, extra_args=list(options))
        arguments = build_argv(engine, server_place(c), port=30000, key_config=keys)[3:]
        return EngineRequest(
            gpu=GPUS["h100"], arguments=arguments, weight_arguments=arguments, tensors=tensors
        )

    def other(name: str, new_name: str = "", factors: tuple[int, ...] = (1, 1)) -> EngineRequest:
        return request(with_other_tensor(tensors, name, new_name=new_name, factors=factors))

    single = [
        TensorSpec(t.name, t.shape, "float32" if t.name == OUTPUT else t.dtype) for t in tensors
    ]
    return {
        "as it is": request(tensors),
        "typo": other(ROUTER, ROUTER.replace("gate", "gates")),
        "typo in an expert": other(EXPERT, EXPERT.replace("up_proj", "up_prj")),
        "wide": other(OUTPUT, factors=(1, 2)),
        "tall": other(OUTPUT, factors=(2, 1)),
        "single precision": request(single),
        "old option": request([], "--no-such-option"),
        "attention": request([], "--attn-dp-size=2"),
        "deterministic": request([], "--enable-deterministic-inference"),
    }


@pytest.fixture(scope="module")
def requests(
    configuration: Configuration, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, EngineRequest]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write_server_config(create_keys(), keys)
    return variants(configuration, keys)


@pytest.fixture(scope="module")
def replies(
    configuration: Configuration,
    requests: dict[str, EngineRequest],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, EngineReply]:
    """The replies to `requests`, from one process."""
    folder = tmp_path_factory.mktemp("rehearsal")
    question = folder / "requests.json"
    answer = folder / "replies.json"
    question.write_bytes(msgspec.json.encode(requests))
    parent = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    process = subprocess.run(
        [sys.executable, "-m", "tests.lab.engine_rehearsal.variants", question, answer],
        env=build_environment(configuration.engine, server_place(configuration), parent),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return msgspec.json.decode(answer.read_bytes(), type=dict[str, EngineReply])


@pytest.fixture
def findings(
    configuration: Configuration,
    requests: dict[str, EngineRequest],
    replies: dict[str, EngineReply],
) -> Callable[[str], list[str]]:
    """The lines about the engine of a name."""

    def lines(name: str) -> list[str]:
        reply = replies[name]
        place = server_place(configuration)
        contradictions = list(argument_findings(reply, configuration.engine, place))
        if reply.ranks:
            experts = read_shape(configuration.model.path).num_experts
            tensors = requests[name].tensors
            contradictions += weight_findings(tensors, reply.ranks, num_experts=experts)
        return summarize(contradictions)

    return lines


pytestmark = pytest.mark.timeout(600)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_engine_on_h100_starts_as_the_run_assumes_and_keeps_every_weight(
    findings: Callable[[str], list[str]], replies: dict[str, EngineReply]
) -> None:
    reply = replies["as it is"]
    assert findings("as it is") == []
    assert reply.settings["attention_backend"] == "fa3"
    assert reply.settings["moe_runner_backend"] == "triton"
    assert reply.settings["enable_return_routed_experts"] is True
    assert [load.rank for load in reply.ranks] == [0, 1]
    shapes = {parameter.name: parameter.shape for parameter in reply.ranks[1].parameters}
    assert shapes["model.layers.0.mlp.experts.w13_weight"][0] == 4  # of 8, on two ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("typo", "model.layers.1.mlp.gates.weight"),
        ("typo in an expert", "model.layers.1.mlp.experts.5.up_prj.weight"),
        ("wide", OUTPUT),
        ("tall", OUTPUT),
        ("single precision", f"{OUTPUT}: it arrives as float32, and SGLang keeps it as bfloat16"),
        ("old option", "unrecognized arguments: --no-such-option"),
        ("attention", "runs with --enable-dp-attention=True: ranks then route different tokens"),
        ("deterministic", "NCCL_ALGO: SGLang sets allreduce:tree in the engine alone"),
    ],
)
def test_a_mistake_is_named(findings: Callable[[str], list[str]], name: str, line: str) -> None:
    assert any(line in one for one in findings(name)), findings(name)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_deterministic_engine_of_a_run_has_the_trainers_nccl(
    configuration: Configuration,
) -> None:
    """The run sets the variables that SGLang sets, for the trainer and for the engine."""
    options = ["--enable-deterministic-inference"]
    c = replace(configuration, engine=replace(configuration.engine, extra_args=options))
    rehearsal = rehearse(c, Workload(GPUS["h100"], weights="none"))
    assert summarize(rehearsal.findings) == []
    assert any(change.name == "disable_custom_all_reduce" for change in rehearsal.reply.changes)


def test_options_of_the_command_are_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, numbers, overrides = read_options(["gpu=h200", "layers=2", "engine.tp=4"])
    assert (texts["gpu"], numbers["layers"], overrides) == ("h200", 2, ["engine.tp=4"])
    for argument in ("gpu=a40", "layers=two", "weights=int4"):
        monkeypatch.setattr(sys, "argv", ["", argument])
        assert main() == 2
        assert argument.split("=")[0] in capsys.readouterr().err
