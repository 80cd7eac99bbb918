"""The stage `profile` reads the text of Nsight Compute."""

from __future__ import annotations

from tests.lab.gpu_stages.profile import find_refusal, read_metrics

OUTPUT = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "logprob_entropy_kernel" - 0: 0%....50%....100% - 9 passes
  logprob_entropy_kernel (16384, 1, 1)x(128, 1, 1), Context 1, Stream 7, Device 0, CC 9.0
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    DRAM Frequency                  Ghz         2.62
    SM Frequency                    Ghz         1.50
    Elapsed Cycles                cycle    1,920,350
    Memory Throughput                 %        91.70
    DRAM Throughput                   %        91.70
    Duration                         ms         1.28
    L1/TEX Cache Throughput           %        36.23
    Compute (SM) Throughput           %        54.43
    ----------------------- ----------- ------------
"""
REFUSAL = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access GPU Performance Counters
"""


def test_metrics_are_read_by_name_and_unit() -> None:
    assert read_metrics(OUTPUT) == {
        "SM Frequency [Ghz]": 1.5,
        "Memory Throughput [%]": 91.7,
        "DRAM Throughput [%]": 91.7,
        "Duration [ms]": 1.28,
        "L1/TEX Cache Throughput [%]": 36.23,
        "Compute (SM) Throughput [%]": 54.43,
    }
    assert find_refusal(OUTPUT) == ""


def test_counters_that_are_reserved_are_a_reason_to_skip() -> None:
    assert "ERR_NVGPUCTRPERM" in find_refusal(REFUSAL)
    assert read_metrics(REFUSAL) == {}
