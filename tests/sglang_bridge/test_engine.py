"""An engine's address and parallel sizes."""

import msgspec
import pytest

from sglang_bridge.engine import Engine


def test_engine_survives_serialization() -> None:
    engine = Engine(url="http://127.0.0.1:1", node=1, tp=2, ep=2, quantization="fp8")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(engine), type=Engine) == engine


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"ep": 0}, {"tp": 2, "ep": 3}, {"tp": 3, "ep": 2}])
def test_invalid_parallel_sizes_are_refused(sizes: dict) -> None:
    with pytest.raises(ValueError, match=r"engine\.ep=.* with engine\.tp="):
        Engine(url="http://127.0.0.1:1", **sizes)
