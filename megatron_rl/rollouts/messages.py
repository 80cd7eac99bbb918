"""Messages between rank 0 and the collectors."""

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
from megatron_rl.prompts.selection.extension import Extension
from megatron_rl.rollouts.recording.format import SavedRollout
from sglang_bridge.engine import Engine

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# The environment variable that passes the run's key to a collector
RUN_KEY_VARIABLE = "MEGATRON_RL_RUN_KEY"
# Reasons in `Group.rejections`
ENGINE_FAILURE = "engine"  # no engine answered the request
EXPIRED = "expired"  # the engine sent nothing usable before the deadline
ENVIRONMENT_FAILURE = "environment"  # the environment raised an exception
PROCESS_LOST = "user_process"  # the process of a user-defined class was lost twice


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """Configuration of a collector, its first message.

    engines: those of its node at the start. `AddEngine` and `RemoveEngine` change them.
    api_key: of the engines.
    routes: None if routes are neither requested nor kept.
    vocab_size: of the model, the upper bound of sampled token ids.
    seed: of the run. The seed of each response is derived from it.
    open_timeout_s: the longest time that the constructors of user-defined classes may take.
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
    open_timeout_s: float = 600.0


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Sample `num_samples` rollouts of one prompt and score them.

    first_sample: number of the group's rollouts that earlier requests have sampled.
    evaluation: return verdicts only. No rollout is kept and no routes are requested.
    extension: the collector samples the rest of the group by itself, if this rule says so. None: it
    does not. attempt: larger than that of earlier requests with its id. The answer repeats it.
    start: what a checkpoint has of the group. saved: where its rollouts are, in their order.
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


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Drop requests for groups, and free what is stored for them. Others sample them."""

    group_ids: tuple[str, ...]


class AbortGroups(msgspec.Struct, frozen=True, tag="abort_groups"):
    """Sample nothing more for groups. Each is answered with `GroupAborted`.

    The answer to a group whose rollouts are complete is `GroupDone`, as usual.
    """

    group_ids: tuple[str, ...]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Free the rollouts of groups."""

    group_ids: tuple[str, ...]


class AddEngine(msgspec.Struct, frozen=True, tag="add_engine"):
    """Send requests to an engine from now on. It holds the current weights."""

    engine: Engine


class RemoveEngine(msgspec.Struct, frozen=True, tag="remove_engine"):
    """Send no further request to an engine, and repeat its running ones on others."""

    url: str


class SetVersion(msgspec.Struct, frozen=True, tag="set_version"):
    """The engines hold these weights from now on. Responses of other weights are not used."""

    version: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Send no request to an engine until `Proceed`. The answer is `Held`.

    Rank 0 aborts the running requests on the engines, and they are continued later. number: the
    answer repeats it.
    """

    number: Count


class StorePartials(msgspec.Struct, frozen=True, tag="store_partials"):
    """Store what there is of all requests. Each is answered with a `Partial`.

    number: the answer repeats it. `Release` frees each group by its `partial_name`.
    """

    number: Count


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Send requests again, and continue those that were interrupted."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the collector."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat of a collector. The first one reports that it has connected."""


class GroupDone(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """A group is complete: every rollout has a verdict or was rejected.

    generated_tokens: tokens that engines sampled for it. attempt: that of the request.
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


class GroupAborted(msgspec.Struct, frozen=True, kw_only=True, tag="group_aborted"):
    """Nothing more is sampled for a group, and none of its rollouts is kept.

    generated_tokens, attempt: as in `GroupDone`.
    """

    group_id: str
    generated_tokens: Count
    attempt: Count = 0


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Request to rank 0, which has the admin key, to abort requests on an engine.

    rid: the name of the request, or the beginning of several.
    """

    url: str
    rid: str


class EngineLeftOut(msgspec.Struct, frozen=True, tag="engine_left_out"):
    """An engine failed several times in a row, and gets no requests until `AddEngine`."""

    url: str
    reason: str


class Held(msgspec.Struct, frozen=True, tag="held"):
    """No engine works on a request of this collector, until `Proceed`.

    num_sampled: all tokens that this collector has received from engines. number: that of the
    `Hold` which it answers. engines_idle: as in `GroupDone`.
    """

    num_sampled: Count
    number: Count
    engines_idle: float = 0.0


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """The state of one request for rollouts to train on.

    number: that of `StorePartials`. group: it may be finished, and its `GroupDone` on its way.
    None: those of all requests were sent.
    """

    number: Count
    group: Group | None


class UserClassWarning(msgspec.Struct, frozen=True, tag="user_class_warning"):
    """Warning about a user-defined class, such as the end of its process."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The collector cannot continue.

    is_refusal: a user-defined class could not be opened.
    """

    reason: str
    is_refusal: bool = False


ToCollector = (
    Configure
    | GroupRequest
    | Withdraw
    | AbortGroups
    | Release
    | AddEngine
    | RemoveEngine
    | SetVersion
    | Hold
    | StorePartials
    | Proceed
    | Stop
)
FromCollector = (
    Alive
    | GroupDone
    | GroupAborted
    | AbortRequest
    | EngineLeftOut
    | Held
    | Partial
    | UserClassWarning
    | Failed
)


def partial_name(number: int, group_id: str) -> str:
    """Return the name under which a collector stores what there is of a group."""
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
