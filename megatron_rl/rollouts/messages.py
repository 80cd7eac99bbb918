"""What rank 0 and the collectors say to each other."""

from __future__ import annotations

import enum

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling

MAX_FRAME_BYTES = 64 * 1024 * 1024
ENGINE_FAILURE = "engine"  # the reason in `Group.rejected` for requests that an engine did not answer


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine a collector may send requests to."""

    url: str
    api_key: str | None = None


class NodeEngines(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that a node's collector uses."""

    node: int
    endpoints: tuple[EngineEndpoint, ...]


class RouteShape(msgspec.Struct, frozen=True, kw_only=True):
    """What recorded routes must look like. moe_layers: 0-based decoder layers that have experts."""

    moe_layers: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    topk: int


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """The collector's whole configuration. routes None: routes are neither requested nor kept.

    max_in_flight: requests per engine at a time; the others wait in the collector, where no deadline runs yet.
    """

    engines: tuple[EngineEndpoint, ...]
    tokenizer_path: str
    routes: RouteShape | None
    reward_name: str
    reward_answer: str
    reward_timeout_s: float
    request_timeout_s: float
    retries: int
    max_in_flight: int
    train_truncated: bool


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Draw `num_samples` responses to one prompt and judge them. keep_rollouts False (evaluation): metadata only."""

    group_id: str
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    keep_rollouts: bool = True


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Free the payloads of groups."""

    group_ids: tuple[str, ...]


class PausePolicy(enum.StrEnum):
    """What happens to requests in flight: they finish (drain), or are aborted and sent again after `Resume` (abort)."""

    DRAIN = "drain"
    ABORT = "abort"


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Send no further request to the engines."""

    policy: PausePolicy


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Go on after `Pause`."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the collector."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A collector's first message: it knows the run's key."""

    key: str
    node: int


class GroupDone(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """A group is complete: every sample has a verdict or was rejected."""

    group: Group
    generated_tokens: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The collector cannot go on."""

    reason: str


ToCollector = Configure | GroupRequest | Release | Pause | Resume | Stop
FromCollector = Hello | GroupDone | Failed


def frame(message: ToCollector | FromCollector) -> bytes:
    """Encode a message with its 4-byte length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body
