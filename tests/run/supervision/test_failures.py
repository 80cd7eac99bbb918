"""Exit codes and reasons of exceptions."""

import errno

import pytest
import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.run.supervision.failures import comes_from_engines, describe_failure
from sglang_bridge.errors import EngineDied, EngineError, WeightMismatch


class BadPrompts(Failure, ValueError):
    exit_code = ExitCode.BAD_DATA


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (BadPrompts("train.jsonl line 3: empty"), ExitCode.BAD_DATA, "train.jsonl line 3: empty"),
        (EngineError("no answer"), ExitCode.ENGINE_FAILED, "no answer"),
        (
            WeightMismatch("http://e", 3, ["lm_head.weight"]),
            ExitCode.SYNC_MISMATCH,
            "lm_head.weight",
        ),
        (
            OSError(errno.ENOSPC, "No space left", "/runs/a.bin"),
            ExitCode.CANNOT_WRITE,
            "/runs/a.bin cannot be written",
        ),
        (
            RuntimeError("I/O error: Read-only file system (os error 30)"),
            ExitCode.CANNOT_WRITE,
            "read-only",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x"), None, "FileNotFoundError"),
        (dist.DistBackendError("timed out"), ExitCode.PEER_FAILED, "timed out"),
        (
            RuntimeError("Connection closed by peer [127.0.0.1]"),
            ExitCode.PEER_FAILED,
            "another rank ended",
        ),
        (
            RuntimeError("[/gloo/unbound_buffer.cc:129] Timed out waiting 50000ms for recv"),
            ExitCode.PEER_FAILED,
            "another rank did not answer within parallel.timeout_s",
        ),
        (RuntimeError("shapes differ"), None, "RuntimeError: shapes differ"),
        (ValueError("bug"), None, "ValueError: bug"),
    ],
)
def test_exit_code_and_reason_of_an_exception(
    error: BaseException, code: ExitCode | None, text: str
) -> None:
    actual_code, reason = describe_failure(error)
    assert actual_code == code
    assert text in reason


def test_every_failure_of_the_bridge_has_a_documented_code() -> None:
    kinds = [EngineError, *EngineError.__subclasses__()]
    assert {ExitCode(kind.exit_code) for kind in kinds} == {
        ExitCode.ENGINE_FAILED,
        ExitCode.SYNC_MISMATCH,
    }


def test_only_engine_errors_may_come_from_a_dead_engine() -> None:
    assert comes_from_engines(EngineDied("gone", returncode=9))
    assert not comes_from_engines(BadPrompts("x"))
    assert not comes_from_engines(ValueError("x"))
