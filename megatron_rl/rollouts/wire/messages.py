"""Messages between rank 0 and the collectors."""

from __future__ import annotations

import math

import msgspec

from megatron_rl.config.schema import (
    CreditSettings,
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.contracts.wire_types import Count
from megatron_rl.prompts.selection.selector import Extension
from megatron_rl.rollouts.recording.format import SavedRollout
from sglang_bridge.engine import Engine

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# The environment variable that passes the run's key to a collector
RUN_KEY_VARIABLE = "MEGATRON_RL_RUN_KEY"
# See `GroupRequest.priority`
Priority = tuple[int, int]
# Reasons in `Group.rejections`
ENGINE_FAILURE = "engine"  # no engine answered the request
EXPIRED = "expired"  # the engine sent nothing usable before the deadline
PROCESS_LOST = "user_process"  # the process of a user-defined class was lost twice


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """Configuration of a collector, its first message.

    api_key: of the engines.
    routes: None if routes are neither requested nor kept.
    vocab_size: of the model, the upper bound of sampled token ids.
    seed: of the run. The seed of each response is derived from it.
    open_timeout_s: the longest time that the constructors of user-defined classes may take.
    """

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
    open_timeout_s: float = 600.0


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Sample `num_samples` rollouts of one prompt and score them.

    first_sample: number of the group's rollouts that earlier requests have sampled.
    evaluation: return verdicts only. No rollout is kept and no routes are requested.
    extension: the collector samples the rest of the group by itself, if this rule says so. None: it
    does not. attempt: larger than in earlier requests with its id. The answer repeats it.
    start: what a checkpoint has of the group. saved: where its rollouts are, in their order.
    step: that needs it, 0 for an evaluation. expected_tokens: of each rollout, 0 if that is not
    known. Both decide the order of requests, and nothing else: see `priority`.

    Raises ValueError for expected tokens below 0 or above `sampling.max_new_tokens`.
    """

    group_id: str
    prompt: Prompt
    num_samples: Count
    sampling: Sampling
    first_sample: Count = 0
    evaluation: bool = False
    attempt: Count = 0
    start: Group | None = None
    saved: tuple[SavedRollout, ...] = ()
    extension: Extension | None = None
    step: Count = 0
    expected_tokens: Count = 0

    def __post_init__(self) -> None:
        if self.expected_tokens not in range(self.sampling.max_new_tokens + 1):
            raise ValueError(
                f"group {self.group_id}: expected_tokens={self.expected_tokens} must be a whole "
                f"number from 0 to max_new_tokens={self.sampling.max_new_tokens}. Leave it out if "
                "it is not known"
            )

    def priority(self, num_sampled: int = 0) -> Priority:
        """Return the priority of a rollout with so many sampled tokens. The smallest goes first.

        Earlier steps go before later ones, and in a step the longest expected rest goes first.
        Requests without expected tokens come last in their step.
        """
        return (self.step, -max(0, self.expected_tokens - num_sampled))

    def rest(self) -> GroupRequest:
        """Return the request for the rest of the group. Raises ValueError without `extension`."""
        if self.extension is None:
            raise ValueError(f"group {self.group_id} has no rule for an extension")
        return msgspec.structs.replace(
            self,
            group_id=extension_id(self.group_id, self.num_samples),
            num_samples=self.extension.group_size - self.num_samples,
            first_sample=self.num_samples,
            extension=None,
            start=None,
            saved=(),
        )


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Sample nothing more for groups, and free what is stored for them.

    is_reported: each is answered with `Dropped`, once no engine works on it. The answer to a group
    whose rollouts are complete is `GroupDone`, as usual, and nothing is freed.
    """

    group_ids: tuple[str, ...]
    is_reported: bool = False


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """The state that the collector is to have, whole: whoever has the last one needs no other.

    engines: the engines of all nodes that serve. A collector prefers engines of its own node. If it
    has stopped using an engine after failures, it uses the engine again only after a message
    without it. Requests of an engine that leaves are repeated by others.
    version: the weights that engines hold. Responses of other weights are not used. None: of any.
    is_paused: send no request to an engine. The answer is `Served`, once no engine works on one.
    Rank 0 aborts those that run, and they are continued later. number: the answer repeats it.
    """

    number: Count
    engines: tuple[Engine, ...] = ()
    version: int | None = None
    is_paused: bool = False


class Store(msgspec.Struct, frozen=True, tag="store"):
    """Store the sampled parts of all requests. Each is answered with a `Partial`.

    number: the answer repeats it. `Drop` frees each group by its `partial_name`.
    """

    number: Count


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the collector."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat of a collector. The first one reports that it has connected.

    demand: by id of groups where it has changed: the attempt of the request, and how many rollouts
    have a slot of an engine or wait for one.
    """

    demand: dict[str, tuple[Count, Count]] = {}


class GroupDone(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """A group is complete: every rollout has a verdict or was rejected.

    generated_tokens: tokens that engines sampled for it. attempt: as in the request.
    seconds: since the collector received the request. is_extended: the collector has begun with
    the rest of the group. engines_idle: seconds in which its engines worked on no request since
    its start, as a mean over them.
    """

    group: Group
    generated_tokens: Count
    attempt: Count = 0
    seconds: float = 0.0
    engines_idle: float = 0.0
    is_extended: bool = False


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Nothing more is sampled for a group, and none of its rollouts is kept.

    generated_tokens, attempt: as in `GroupDone`.
    """

    group_id: str
    generated_tokens: Count
    attempt: Count = 0


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Request to rank 0, which has the admin key, to abort requests on an engine."""

    url: str
    names: tuple[str, ...]


class EngineLeftOut(msgspec.Struct, frozen=True, tag="engine_left_out"):
    """An engine failed several times in a row, and gets no requests until it serves anew.

    See `Serve.engines`.
    """

    url: str
    reason: str


class Served(msgspec.Struct, frozen=True, tag="served"):
    """No engine works on a request of this collector, which is paused.

    num_sampled: all tokens that this collector has received from engines. number: as in the
    `Serve` which it answers. engines_idle: as in `GroupDone`.
    """

    num_sampled: Count
    number: Count
    engines_idle: float = 0.0


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """The state of one request for rollouts to train on.

    number: as in `Store`. group: it may be finished, and its `GroupDone` on its way.
    None: the groups of all requests were sent.
    """

    number: Count
    group: Group | None


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    """The collector has a problem.

    exit_code: the run cannot continue, and ends with it. None: this is a warning, such as one about
    the end of the process of a user-defined class.
    """

    text: str
    exit_code: ExitCode | None = None


ToCollector = Configure | GroupRequest | Drop | Serve | Store | Stop
FromCollector = (
    Alive | GroupDone | Dropped | AbortRequests | EngineLeftOut | Served | Partial | Problem
)


def slots_of_engine(max_running_requests: int) -> int:
    """Return how many requests an engine may have, so that the next ones wait at the engine.

    A quarter more than it runs: it has work until others arrive, and the rest can still go to
    another engine, in its order. That is one more at least.
    """
    return math.ceil(1.25 * max_running_requests)


def partial_name(number: int, group_id: str) -> str:
    """Return the name under which a collector stores the sampled part of a group."""
    return f"partials-{number}/{group_id}"


def extension_id(group_id: str, first_sample: int) -> str:
    """Return the id under which the rest of a group is requested.

    first_sample: number of rollouts that the group already has.
    """
    return f"{group_id}+{first_sample}"


def first_id(part_id: str) -> str:
    """Return the id of the group that a request samples, or samples the rest of."""
    return part_id.partition("+")[0]


def collector_name(node: int, epoch: int) -> str:
    """Return the name under which a collector connects. epoch: counts the starts on its node."""
    return f"{node}.{epoch}"
