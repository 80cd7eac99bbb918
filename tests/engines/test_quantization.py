"""Quantized engines: their configuration, and the GPUs on which they can take new weights."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.engines.quantization import engine_quantization, require_fp8_gpu
from megatron_rl.engines.server_places import server_places
from megatron_rl.models.families import read_shape
from tests.support.configurations import configuration_of
from tests.support.engine_rollouts import ONLY_RANK


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_gpus_that_keep_float32_scales_are_accepted(capability: tuple[int, int]) -> None:
    require_fp8_gpu(capability, "GPU")


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((8, 0), "compute capability 8.0: it has no FP8 products"),
        ((10, 0), "compute capability 10.0: SGLang turns float32 scales into packed powers of two"),
        ((12, 0), "compute capability 12.0"),
    ],
)
def test_gpus_that_repack_weights_are_refused(capability: tuple[int, int], reason: str) -> None:
    with pytest.raises(Failure, match=r"engine\.quantization=fp8: NVIDIA X has") as error:
        require_fp8_gpu(capability, "NVIDIA X")
    assert reason in str(error.value) and "H100" in str(error.value)


def test_places_of_quantized_engines_are_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    c = configuration_of(["experiment=smoke"])
    engine = dataclasses.replace(c.engine, quantization="fp8")
    options: dict[str, Any] = {"seed": 0, "return_routes": True}
    quantization = engine_quantization(engine, read_shape(c.model.path))
    with monkeypatch.context() as gpus, pytest.raises(Failure, match="B200"):
        gpus.setattr(torch.cuda, "device_count", lambda: 8)
        server_places(engine, c.model, ONLY_RANK, quantization=quantization, **options)
    (place,) = server_places(c.engine, c.model, ONLY_RANK, quantization=quantization, **options)
    assert place.quantization == quantization, "CPUs have no such limit"


def test_unquantized_engines_keep_the_configuration_of_their_checkpoint() -> None:
    shape = read_shape(configuration_of(["experiment=smoke"]).model.path)
    assert engine_quantization(EngineSettings(), shape) is None
    config = engine_quantization(
        EngineSettings(quantization="fp8", unquantized_first_layers=1), shape
    )
    assert config is not None and config["modules_to_not_convert"][-1] == "model.layers.0"
