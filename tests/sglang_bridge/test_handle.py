"""Engine handles: roles, parallelism, and what a running server must not be."""

import msgspec
import pytest

from sglang_bridge.handle import EngineHandle, Role, refuse_unsupported_parallelism


def test_handle_survives_the_wire() -> None:
    handle = EngineHandle(urls=("http://127.0.0.1:1",), tp=2, ep=2, gpus=(0, 1), role=Role.JUDGE, epoch=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=EngineHandle) == handle
    assert handle.url == "http://127.0.0.1:1"


def test_only_rollout_engines_take_weights() -> None:
    assert EngineHandle(urls=("http://a",)).takes_weights
    assert not EngineHandle(urls=("http://a",), role=Role.JUDGE).takes_weights


@pytest.mark.parametrize("wrong", [{"urls": ()}, {"urls": ("http://a",), "tp": 0}, {"urls": ("u",), "tp": 2, "ep": 3}])
def test_impossible_handles_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="EngineHandle"):
        EngineHandle(**wrong)


@pytest.mark.parametrize("key", ["pp_size", "dp_size"])
def test_pipeline_and_plain_data_parallelism_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}=2.*start it with 1"):
        refuse_unsupported_parallelism({"tp_size": 1, key: 2}, tp=1)


def test_declared_tensor_parallelism_must_be_the_running_one() -> None:
    refuse_unsupported_parallelism({"tp_size": 2, "pp_size": 1, "dp_size": 1}, tp=2)
    with pytest.raises(ValueError, match=r"tp_size=4 but is declared with engine\.tp=2"):
        refuse_unsupported_parallelism({"tp_size": 4}, tp=2)
