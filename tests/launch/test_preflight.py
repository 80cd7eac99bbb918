"""`launch/preflight.py` refuses what training refuses, and names problems of a machine."""

import importlib.metadata
import json
import threading
from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch import preflight as preflight_module
from megatron_rl.config.schema import Configuration, EngineSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from tests.support.configurations import configuration_of
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import write_recording
from tests.support.scripts import ROOT, start_script

PUBLISHED = ROOT / "tests/support/published"
ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(10, 20) for b in range(10, 15)]
SMALL = ("experiment=smoke", "data=jsonl", "data.num_eval=8", "data.train_path=sums.jsonl")


@pytest.fixture
def preflight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, in a working directory with a file of sums."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(preflight_module, "ANSWER_SECONDS", 0.1)
    return preflight_module


def failures(checks: Iterable[Any]) -> list[str]:
    return [check.name for check in checks if not check.passes]


def test_pinned_environment_passes_and_another_version_fails(preflight: ModuleType) -> None:
    constraints = (ROOT / "requirements" / "constraints.txt").read_text()
    assert failures(preflight.check_versions(constraints)) == []
    other = constraints.replace("\ntorch==2.13.0\n", "\ntorch==2.0.0\n")
    assert failures(preflight.check_versions(other)) == ["torch"]
    assert not any(check.refuses for check in preflight.check_versions(other))


@pytest.mark.parametrize(
    ("declared", "installed", "is_pinned"),
    [("3.7.1", "3.7.1", True), ("3.7.1", "3.9.0", False), (None, "3.9.0", True)],
)
def test_the_triton_of_a_cuda_build_is_the_one_that_torch_declares(
    preflight: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    declared: str | None,
    installed: str,
    is_pinned: bool,
) -> None:
    """The ordinary index has only this build for Linux."""
    requirements = ["filelock", "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'"]
    if declared is not None:
        requirements.append(f"triton=={declared}; platform_system == 'Linux'")
    installed_version = importlib.metadata.version
    metadata = preflight.importlib.metadata
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(
        metadata,
        "version",
        lambda name: installed if name == "triton" else installed_version(name),
    )
    constraints = preflight.read_constraints(with_gpus=False)
    assert failures(preflight.check_versions(constraints)) == ([] if is_pinned else ["triton"])


def test_versions_with_gpus_are_those_of_the_cuda_image(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.14.1+cu130", "triton": "3.8.0", "numpy": "2.3.5"}
    installed_version = importlib.metadata.version
    monkeypatch.setattr(
        preflight.importlib.metadata,
        "version",
        lambda name: versions.get(name) or installed_version(name),
    )
    triton = ["triton~=3.8.0"]  # as that torch declares it
    monkeypatch.setattr(preflight.importlib.metadata, "requires", lambda _: triton)
    assert "torch" in failures(
        preflight.check_versions(preflight.read_constraints(with_gpus=False))
    )
    assert failures(preflight.check_versions(preflight.read_constraints(with_gpus=True))) == []


def test_host_memory_and_run_root(preflight: ModuleType, tmp_path: Path) -> None:
    c = configuration_of(["experiment=smoke"])
    many = replace(c, engine=EngineSettings(count=10_000))
    external = replace(c, engine=EngineSettings(urls=["http://127.0.0.1:3"], count=10_000))
    assert preflight.check_memory(c, LaunchFacts()).passes
    assert not preflight.check_memory(many, LaunchFacts()).passes
    assert preflight.check_memory(external, LaunchFacts()).passes
    assert preflight.check_run_root(str(tmp_path / "not" / "yet")).passes
    assert preflight.check_run_root("/proc/nowhere").refuses
    assert [path.name for path in tmp_path.iterdir()] == ["sums.jsonl"]


def test_rank_memory_is_reported_part_by_part(preflight: ModuleType) -> None:
    shape = read_shape(PUBLISHED / "qwen3_30b_a3b")
    settings = configuration_of(["experiment=smoke", "model.recompute=full"])
    c = replace(settings, parallel=ParallelSettings(ep=8))
    facts = LaunchFacts(world_size=8, local_world_size=8, num_gpus=8)
    rank, engine = preflight.check_rank_memory(c, shape, facts, 79 * 2**30)
    # float32, experts over eight ranks: (1,541,093,376 + 28,991,029,248 / 8) x (4 + 4), and 8 / 8
    # and 8 bytes for Adam
    assert rank.refuses and engine.refuses
    parts = "parameters 19.2, gradients 19.2, optimizer 28.4, activations"
    total = "at most 79.4 of 79.0 GiB of a GPU, on pipeline stage 0"
    assert str(rank).startswith(f"FAIL  rank memory: {total}: {parts}")
    assert "model.recompute=full" in str(rank)
    assert str(engine).startswith("FAIL  engine memory: parameters 113.7, KV cache 0.656 GiB")
    assert "engine.tp" in str(engine)
    rank, engine, cache = preflight.check_rank_memory(c, shape, facts, 114 * 2**30)
    assert rank.passes and engine.passes
    assert (cache.passes, cache.refuses) == (False, False)
    external = replace(c, engine=replace(c.engine, urls=["http://127.0.0.1:3"]))
    assert list(preflight.check_rank_memory(external, shape, facts, 79 * 2**30))[1].passes


def test_memory_of_colocated_engines_is_checked_on_gpus(preflight: ModuleType) -> None:
    shape = read_shape(PUBLISHED / "qwen3_30b_a3b")
    c = configuration_of(["experiment=smoke"])
    c = replace(
        c, parallel=ParallelSettings(ep=8), engine=replace(c.engine, colocated=True, count=8)
    )
    facts = LaunchFacts(world_size=8, local_world_size=8, num_gpus=8)
    (check,) = preflight.check_colocated_memory(c, shape, facts, 80 * 2**30)
    assert check.refuses and "of 80.0 GiB" in str(check) and "engine.tp" in str(check)
    (check,) = preflight.check_colocated_memory(c, shape, facts, 1000 * 2**30)
    assert check.passes and "--mem-fraction-static=" in str(check)
    cpu = replace(facts, num_gpus=0)
    assert list(preflight.check_colocated_memory(c, shape, cpu, 2**30)) == []
    apart = replace(c, engine=replace(c.engine, colocated=False))
    assert list(preflight.check_colocated_memory(apart, shape, facts, 2**30)) == []


def test_a_node_without_the_memory_of_a_save_is_refused(preflight: ModuleType) -> None:
    shape = read_shape(PUBLISHED / "qwen3_30b_a3b")
    facts = LaunchFacts(world_size=8, local_world_size=8, num_gpus=8)
    settings = configuration_of(["experiment=smoke", "run.checkpoint_every=1"])
    c = replace(settings, parallel=ParallelSettings(ep=8))
    (check,) = preflight.check_save_memory(c, shape, facts, 400 * 2**30)
    # (1,541,093,376 + 28,991,029,248 / 8) x 20 bytes, on each of eight ranks
    assert check.refuses and "96.2 GiB for each rank, 8 of them; 400.0 available" in str(check)
    assert next(preflight.check_save_memory(c, shape, facts, 800 * 2**30)).passes
    single = replace(c, parallel=ParallelSettings())
    one_rank = LaunchFacts(world_size=1, local_world_size=1)
    (check,) = preflight.check_save_memory(single, shape, one_rank, 2**30)
    assert check.refuses and "beside the" in str(check), "without GPUs it trains in the same memory"
    assert (
        list(preflight.check_save_memory(configuration_of(["experiment=smoke"]), shape, facts, 0))
        == []
    )


MEASURED = ("experiment=smoke", "mode=eval")
EXTERNAL = ("engine=external", "engine.urls=[http://127.0.0.1:9]")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((), {"rank memory", "engine memory"}),
        (("mode=rollout_only",), {"rank memory", "engine memory"}),
        (("mode=eval",), {"engine memory"}),
        (("mode=profile", "data.pass_rates=rates.jsonl"), {"engine memory"}),
        (("mode=train_only", "rollout.recording=."), {"rank memory"}),
        (("mode=eval", *EXTERNAL), {"http://127.0.0.1:9"}),
    ],
)
def test_a_mode_needs_the_memory_of_what_it_opens(
    preflight: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    names: set[str],
) -> None:
    """A measurement builds no trainer, and train_only starts no engine."""
    others = ("data", "disk space")
    monkeypatch.setattr(preflight, "device_bytes", lambda _: 0)
    monkeypatch.setattr(preflight, "check_opening", lambda _: [])
    c = configuration_of(["experiment=smoke", *overrides])
    checks = preflight.check_all(c, LaunchFacts())
    assert {check.name for check in checks if check.refuses and check.name not in others} == names


@pytest.mark.parametrize(
    ("engine", "mode", "fails"),
    [
        ({"count": 10_000}, ["mode=train"], {"host memory", "open files"}),
        ({"urls": ["http://[::1]:9"]}, ["mode=train"], {"open files", "http://[::1]:9"}),
        ({"count": 10_000}, ["mode=train_only", "rollout.recording=."], set()),
        ({"urls": ["http://[::1]:9"]}, ["mode=train_only", "rollout.recording=."], set()),
    ],
)
def test_engines_that_are_not_started_need_nothing(
    preflight: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    mode: list[str],
    fails: set[str],
) -> None:
    monkeypatch.setattr(preflight, "check_opening", lambda _: [])
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (1, 1))
    c = configuration_of(["experiment=smoke", *mode])
    c = replace(c, engine=replace(c.engine, **engine))
    names = {"host memory", "open files", "http://[::1]:9", "engine memory"}
    checks = preflight.check_all(c, LaunchFacts())
    assert {check.name for check in checks if not check.passes and check.name in names} == fails


def test_a_measurement_loads_no_trainer_from_its_checkpoint(
    preflight: ModuleType, tmp_path: Path
) -> None:
    shape = read_shape(TWO_DIGIT_ADDITION)
    c = configuration_of([*MEASURED, f"run.resume={tmp_path}"])
    assert list(preflight.check_save_memory(c, shape, LaunchFacts(), 0)) == []
    facts = LaunchFacts(num_gpus=8)
    assert list(preflight.check_weight_groups(c, facts)) != []
    assert list(preflight.check_weight_groups(configuration_of(MEASURED), facts)) == []


def test_little_shared_memory_is_a_warning(preflight: ModuleType, tmp_path: Path) -> None:
    check = preflight.check_shared_memory(str(tmp_path / "missing"))
    assert (check.passes, check.refuses) == (False, False)
    assert str(check).startswith("warn  shared memory: 0.0 GiB free") and "--shm-size" in str(check)


def with_groups(
    engines: int, *, per_tree: int = 1, transport: Any = "distributed", **sizes: int
) -> Configuration:
    """Return a configuration with engines on each node and parallel sizes."""
    c = configuration_of(["experiment=smoke"])
    return replace(
        c,
        parallel=replace(c.parallel, **sizes),
        engine=replace(c.engine, count=engines),
        sync=replace(c.sync, engines_per_tree=per_tree, transport=transport),
    )


@pytest.mark.parametrize(
    ("groups", "gpus", "counts", "passes"),
    [
        ({"engines": 1, "ep": 8}, 8, (8, 1), True),
        ({"engines": 4, "ep": 8}, 64, (8, 32), True),
        ({"engines": 8, "ep": 8}, 64, (8, 64), False),
        ({"engines": 1, "ep": 16, "pp": 8, "tp": 4}, 512, (128, 64), False),
        ({"engines": 8, "ep": 8, "per_tree": 64}, 64, (1, 1), True),
    ],
)
def test_many_groups_for_weights_are_a_warning(
    preflight: ModuleType,
    groups: dict[str, int],
    gpus: int,
    counts: tuple[int, int],
    passes: bool,
) -> None:
    facts = LaunchFacts(world_size=gpus, local_world_size=8, num_gpus=8)
    (check,) = preflight.check_weight_groups(with_groups(**groups), facts)
    assert f"{counts[0]} on each GPU of an engine, {counts[1]} on each" in check.finding
    assert (check.passes, check.refuses) == (passes, False)
    assert "sync.timeout_s" in check.remedy


def test_groups_for_weights_are_counted_where_nccl_makes_them(preflight: ModuleType) -> None:
    facts = LaunchFacts(world_size=8, local_world_size=8, num_gpus=8)
    assert list(preflight.check_weight_groups(with_groups(1), replace(facts, num_gpus=0))) == []
    assert list(preflight.check_weight_groups(with_groups(1, transport="disk"), facts)) == []


def test_a_low_hard_limit_of_open_files_is_a_warning(preflight: ModuleType) -> None:
    c = configuration_of(["experiment=smoke"])
    engine = replace(c.engine, count=4, max_running_requests=256)
    rollout = replace(c.rollout, prompts_per_step=512, on_update="resume", max_staleness=3)
    c = replace(c, engine=engine, rollout=rollout)
    facts = LaunchFacts(world_size=8, local_world_size=4)
    need = preflight.BASE_OPEN_FILES + 512 * 4 // 2 + 4 * 320
    for limit, passes in ((need - 1, False), (need, True), (-1, True)):
        check = preflight.check_open_files(c, facts, limit)
        assert (check.passes, check.refuses) == (passes, False)
        assert f"about {need:,}" in check.finding


def test_gpus_that_torch_cannot_use_are_named(preflight: ModuleType) -> None:
    idle = list(preflight.check_devices(LaunchFacts(idle_gpus=2)))[-1]
    assert str(idle).startswith("warn  idle GPUs: 2 stay idle")
    (usable,) = preflight.check_devices(LaunchFacts(num_gpus=99))
    assert usable.refuses


INFO = {"enable_return_routed_experts": True, "tp_size": 1, "dtype": "float32"}


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """A server that answers every request with its attribute `info`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(fake.info).encode()  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as fake:
        fake.info = dict(INFO)  # type: ignore[attr-defined]
        thread = threading.Thread(target=fake.serve_forever)
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


@pytest.mark.slow
def test_external_engines_are_checked_as_training_checks_them(
    preflight: ModuleType, server: Any
) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    config = configuration_of(["experiment=smoke", "engine=external", f"engine.urls=[{url}]"])
    (check,) = preflight.check_external_engines(config)
    assert check.passes and url in str(check)
    server.info["pp_size"] = 2
    (check,) = preflight.check_external_engines(config)
    assert check.refuses and "pp_size=2" in str(check)
    server.info |= INFO | {"enable_return_routed_experts": False}
    (check,) = preflight.check_external_engines(config)
    assert check.refuses and "--enable-return-routed-experts" in str(check)


def test_engines_that_do_not_answer_are_named(preflight: ModuleType) -> None:
    config = configuration_of(
        ["experiment=smoke", "engine=external", "engine.urls=[http://127.0.0.1:9]"]
    )
    (check,) = preflight.check_external_engines(config)
    assert check.refuses and "http://127.0.0.1:9: " in str(check)


def opening(preflight: ModuleType, *overrides: str) -> dict[str, Any]:
    return {check.name: check for check in preflight.check_opening(configuration_of(overrides))}


@pytest.mark.slow
def test_data_and_classes_are_opened(preflight: ModuleType) -> None:
    checks = opening(preflight, *SMALL)
    assert [name for name, check in checks.items() if check.refuses] == []
    data = preflight.check_data(configuration_of(SMALL))
    assert not data.refuses and "38 to train, 8 held out; " in str(data)


@pytest.mark.parametrize(
    ("row", "overrides", "reason"),
    [
        ('{"prompt": "1+1="}', [], "sums.jsonl line 51: `answer`"),
        ('{"prompt": "1+1=", "answer": "two"}', [], "sums.jsonl line 51: "),
        ('{"prompt": "1Ω1=", "answer": 1}', [], "'Ω'"),
        ("", ["data.num_eval=50"], "data.num_eval=50: "),
        ("", ["rollout.prompts_per_step=39"], "rollout.prompts_per_step=39: "),
    ],
)
def test_data_that_training_refuses_fails(
    preflight: ModuleType, tmp_path: Path, row: str, overrides: list[str], reason: str
) -> None:
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write(row)
    check = preflight.check_data(configuration_of([*SMALL, *overrides]))
    assert check.refuses and reason in str(check)


def test_the_data_of_every_mode_is_read(preflight: ModuleType, tmp_path: Path) -> None:
    data = ("experiment=smoke", "data=jsonl")  # without data.train_path, which neither mode reads
    sets = (*data, "mode=eval", "eval.sets={sums: sums.jsonl}")
    assert str(preflight.check_data(configuration_of(sets))) == "ok    data: 50 in sums"
    write_recording(tmp_path / "recorded", read_shape(TWO_DIGIT_ADDITION), steps=2)
    recording = ("mode=train_only", f"rollout.recording={tmp_path}", "train.total_steps=2")
    check = preflight.check_data(configuration_of([*data, *recording]))
    assert str(check) == "ok    data: 2 recorded batches"


@pytest.mark.slow
def test_user_defined_classes_are_opened(
    preflight: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_plugins.py").write_text(
        "class Loss:\n    def __init__(self): raise KeyError('oops')\nclass Play: ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    algo = ("algo=custom", "algo.name=user_plugins:Loss")
    environment = ("environment=custom", "environment.name=user_plugins:Play")
    checks = opening(preflight, *SMALL, *algo, *environment)
    assert checks["algo"].refuses and "KeyError: 'oops'" in str(checks["algo"])
    assert checks["environment"].refuses and "`play`" in str(checks["environment"])


def test_a_disk_that_is_too_small_fails(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(2**30, 2**30, 1000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    assert opening(preflight, *SMALL)["disk space"].refuses


def test_a_missing_library_fails(preflight: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(preflight.sys.modules, "megatron_rl.losses", None)
    (check,) = opening(preflight, *SMALL).values()
    assert check.refuses and "cannot be imported" in str(check) and "make install" in str(check)


def test_one_rank_of_a_node_prints(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "check_opening", lambda _: [])
    ranks = {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert preflight.preflight(configuration_of(SMALL)) == ExitCode.OK
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    preflight.preflight(configuration_of(SMALL))
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{preflight.socket.gethostname()}: ") for line in lines)
    assert any("address: 127.0.0.1" in line for line in lines)


def test_nodes_without_a_master_are_refused(
    preflight: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    (check,) = preflight.check_addresses(LaunchFacts(world_size=4, local_world_size=2))
    assert check.refuses and "torchrun on every node" in str(check)
    assert list(preflight.check_addresses(LaunchFacts(world_size=2, local_world_size=2))) == []


@pytest.mark.slow
def test_help_and_refused_settings(tmp_path: Path) -> None:
    result = start_script("preflight", "--help", cwd=tmp_path)
    assert result.returncode == ExitCode.OK
    assert "launch/preflight.py experiment=quickstart" in result.stdout
    assert "Output" in result.stdout
    refusal = start_script("preflight", "experiment=smoke", "optimizer.lr=fast", cwd=tmp_path)
    assert (refusal.returncode, refusal.stdout) == (ExitCode.REFUSED, "")
    assert "optimizer.lr=fast: " in refusal.stderr and "Traceback" not in refusal.stderr


@pytest.mark.slow
def test_script_reports_every_check(preflight: ModuleType, tmp_path: Path) -> None:
    result = start_script("preflight", *SMALL, cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok    configuration: "), result.stderr
    assert lines[1].startswith("ok    data: ")
    names = {line[6:].partition(":")[0] for line in lines}
    assert {"host memory", "run.root", "algo", "environment", "data", "disk space"} < names
    has_failure = "FAIL" in result.stdout
    assert result.returncode == (ExitCode.REFUSED if has_failure else ExitCode.OK)


def test_refused_data_end_with_its_exit_code(
    preflight: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    c = configuration_of([*SMALL, "data.num_eval=500"])
    assert preflight.preflight(c) == ExitCode.REFUSED
    assert "FAIL  data: data.num_eval=500" in capsys.readouterr().out
