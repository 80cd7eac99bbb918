"""What rank 0 and the collectors say to each other."""

from __future__ import annotations

import msgspec

from megatron_rl.config.schema import (
    CreditSettings,
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.contracts.wire_types import Count
from sglang_bridge.engine import Engine

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
ENGINE_FAILURE = "engine"  # the reason in `Group.rejections` for requests that no engine answered
# ... for those whose engine fell silent until their deadline, with nothing to be kept
EXPIRED = "expired"
ENVIRONMENT_FAILURE = "environment"  # ... and for exceptions of the environment


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """The collector's whole configuration; the first message. engines: those of its node.

    api_key: opens the engines. routes None: routes are neither requested nor kept. vocab_size: of
    the model; sampled tokens are below it. seed: the run's; what each response is drawn by follows
    from it.
    """

    engines: tuple[Engine, ...]
    api_key: str | None
    model_path: str
    routes: RouteShape | None
    engine: EngineSettings
    rollout: RolloutSettings
    reward: RewardSettings
    environment: EnvironmentSettings
    credit: CreditSettings = CreditSettings()
    vocab_size: int | None = None
    seed: int = 0


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Draw `num_samples` rollouts of one prompt and judge them. evaluation: verdicts alone, no
    rollouts, no routes.

    first_sample: how many of its group were drawn before, by another request.
    """

    group_id: str
    prompt: Prompt
    num_samples: Count
    sampling: Sampling
    first_sample: Count = 0
    evaluation: bool = False


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Free the rollouts of groups."""

    group_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the collector."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The collector's event loop turns; the first one says that it is there."""


class GroupDone(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """A group is complete: every rollout has a verdict or was rejected. generated_tokens: drawn by
    engines for it.
    """

    group: Group
    generated_tokens: Count


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Rank 0, which has the admin key, shall have an engine abort a request whose deadline is over."""

    url: str
    rid: str


class EngineLeftOut(msgspec.Struct, frozen=True, tag="engine_left_out"):
    """An engine failed several times in a row and is asked for nothing until `EngineBack`."""

    url: str
    reason: str


class EngineBack(msgspec.Struct, frozen=True, tag="engine_back"):
    """An engine that was left out is used again."""

    url: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The collector cannot go on.

    refused: because of a class of the user's own that does not open.
    """

    reason: str
    refused: bool = False


ToCollector = Configure | GroupRequest | Release | Stop
FromCollector = Alive | GroupDone | AbortRequest | EngineLeftOut | EngineBack | Failed
