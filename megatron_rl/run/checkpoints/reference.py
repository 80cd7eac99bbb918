"""Identifies the frozen reference of the KL penalty, which a resumed run must keep."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.mcore.collectives import gather_bytes
from megatron_rl.mcore.job import Job
from megatron_rl.models.hf_checkpoint.weight_files import weight_map
from megatron_rl.run.checkpoints.resume import ResumePoint

_SHOWN_DIGITS = 12


def reference_path(c: Configuration) -> Path | None:
    """Return the checkpoint of the reference in Hugging Face format.

    None without a KL penalty, and in modes that train nothing.
    """
    if not c.algo.kl.coef or c.mode not in ("train", "train_only"):
        return None
    return Path(c.algo.kl.reference or c.model.path).expanduser()


def identify_reference(c: Configuration, resume_point: ResumePoint, job: Job) -> str:
    """Return the digest of the reference's weight files, empty without one (a collective).

    Raises `Failure` on all ranks if a run that continues (run.resume=auto) began with
    other weights.
    """
    path = reference_path(c)
    if path is None:
        return ""
    digest = _digest(path, job)
    state = resume_point.state
    if c.run.resume == "auto" and state is not None and state.reference not in ("", digest):
        raise Failure(
            f"algo.kl.reference={str(path)!r}: its weights (SHA-256 {digest[:_SHOWN_DIGITS]}…) "
            f"differ from those that this run began with ({state.reference[:_SHOWN_DIGITS]}…). "
            "Give the directory of those weights, or start a new run from the checkpoint: "
            f"run.resume={resume_point.checkpoint} under another run.name",
            ExitCode.REFUSED,
        )
    return digest


def _digest(path: Path, job: Job) -> str:
    """Hash the names and contents of the weight files. Every rank reads a share (a collective)."""
    names = sorted(set(weight_map(path).values()))
    hashes: dict[str, str] = {}
    for name in names[job.rank :: job.world_size]:
        with (path / name).open("rb") as stream:
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    all_hashes: dict[str, str] = {}
    for data in gather_bytes(msgspec.msgpack.encode(hashes), job.control_group):
        all_hashes |= msgspec.msgpack.decode(data, type=dict[str, str])
    text = "\n".join(f"{name} {all_hashes[name]}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()
