"""Records groups of rollouts on all nodes, and the batch of a planned step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Role, Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore.collectives import gather_bytes, gather_texts
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.writer import write_batch, write_parts
from megatron_rl.rollouts.wire.store import read_rollout
from megatron_rl.training.exchange.transfer_plan import Receiver


def record_groups(
    directory: Path,
    groups: Iterable[tuple[int, Group]],
    node: int,
    *,
    is_writer: bool,
    group: dist.ProcessGroup | None,
    read: Callable[[RolloutRef], Rollout] = read_rollout,
) -> list[str]:
    """Write groups that are stored on this node (a collective) and return the parts of all nodes.

    groups: (place in the batch, group) of this node.
    is_writer: True on one rank of each node. read: reads a rollout of this node.
    """
    names: list[str] = []
    if is_writer:
        pairs = (
            (index, stored_group, [read(ref) for ref in stored_group.rollouts])
            for index, stored_group in groups
        )
        names = write_parts(directory, node, pairs)
    return gather_texts(names, group)


def groups_on_node(groups: Iterable[Group], node: int) -> Iterator[tuple[int, Group]]:
    """Yield (place in the batch, group) for the groups with rollouts on a node, and these alone.

    An extension may be sampled on another node than the probe. The first node has the groups
    without rollouts.
    """
    for index, group in enumerate(groups):
        rollouts = tuple(ref for ref in group.rollouts if ref.location.node == node)
        is_here = bool(rollouts) or not (group.rollouts or node)
        if is_here:
            yield index, msgspec.structs.replace(group, rollouts=rollouts)


@dataclass(frozen=True)
class BatchRecorder:
    """Records planned batches of a run: regular ones, and those that show a fault.

    directory: of all recorded batches of the run. every: steps between regular ones, 0: none.
    receivers: all ranks as receivers of rollouts, in rank order. rank: this rank's place in it.
    group: the group of all ranks.
    """

    directory: Path
    every: int
    receivers: Sequence[Receiver]
    rank: int
    group: dist.ProcessGroup | None

    def refs_to_record(self, plan: StepPlan) -> Iterator[RolloutRef]:
        """Yield the rollouts that this rank would write: its node's, on one rank of each node."""
        node = self._node
        if self._is_writer:
            yield from (ref for ref in plan.rollouts if ref.location.node == node)

    def record_regularly(self, plan: StepPlan, read: Callable[[RolloutRef], Rollout]) -> None:
        """Record the batch of every `every`-th step (a collective)."""
        if self.every and plan.step % self.every == 0:
            self._record(plan, read, batch_directory(self.directory, plan.step))

    def record_fault(
        self, fault: str, plan: StepPlan, read: Callable[[RolloutRef], Rollout]
    ) -> Path:
        """Record the batch of a step with a fault (a collective) and return its directory.

        fault: one word, which begins the name of the directory.
        """
        directory = self.directory / f"{fault}-step-{plan.step}"
        self._record(plan, read, directory)
        return directory

    def _record(
        self, plan: StepPlan, read: Callable[[RolloutRef], Rollout], directory: Path
    ) -> None:
        """Record the rollouts of a planned step in the format of docs/rollouts.md (a collective).

        The plan has no prompts, so recorded prompts have an id and tokens, but no answer and no
        task. A group holds the rollouts of one prompt that are stored on one node, by sample index.

        read: reads a rollout of this node. It is called on the rank that has `refs_to_record`.
        """
        node = self._node
        refs_by_prompt = _refs_by_prompt(plan)
        names = record_groups(
            directory,
            _groups_of_node(plan, refs_by_prompt, node, read),
            node,
            is_writer=self._is_writer,
            group=self.group,
            read=read,
        )
        if self.rank == 0:
            record = BatchRecord(
                step=plan.step,
                groups=len(refs_by_prompt),
                generated_tokens=sum(ref.num_generated for ref in plan.rollouts),
                engines_left_out=0,
                parts=tuple(names),
            )
            write_batch(directory, record)
        # Wait for rank 0: if another rank ended now, its launcher could kill rank 0 as well
        gather_bytes(b"", self.group)

    @property
    def _node(self) -> int:
        return self.receivers[self.rank].node

    @property
    def _is_writer(self) -> bool:
        """True on the first rank of each node."""
        node = self._node
        return self.rank == min(
            rank for rank, other in enumerate(self.receivers) if other.node == node
        )


def _refs_by_prompt(plan: StepPlan) -> list[list[RolloutRef]]:
    """Return the references of each prompt on each node."""
    refs: dict[tuple[str, int], list[RolloutRef]] = {}
    for ref in plan.rollouts:
        refs.setdefault((ref.prompt_id, ref.location.node), []).append(ref)
    return [sorted(group, key=lambda ref: ref.sample_index) for group in refs.values()]


def _groups_of_node(
    plan: StepPlan,
    refs_by_prompt: Sequence[Sequence[RolloutRef]],
    node: int,
    read: Callable[[RolloutRef], Rollout],
) -> Iterator[tuple[int, Group]]:
    for index, refs in enumerate(refs_by_prompt):
        if refs[0].location.node == node:
            group_id = f"step-{plan.step}-{index}"
            prompt = _prompt_of(read(refs[0]))
            yield index, Group(group_id=group_id, prompt=prompt, rollouts=tuple(refs))


def _prompt_of(rollout: Rollout) -> Prompt:
    prompt_tokens = [s.tokens for s in rollout.segments if s.role is Role.PROMPT]
    token_ids = tuple(int(token) for tokens in prompt_tokens[:1] for token in tokens)
    return Prompt(id=rollout.prompt_id, token_ids=token_ids, answer="", task="")
