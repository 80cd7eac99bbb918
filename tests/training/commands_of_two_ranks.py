"""A torchrun script: two ranks execute the commands of rank 0, then rank 0 finishes."""

import torch
import torch.distributed as dist

from megatron_rl.contracts.commands import Poll, Save, Sync
from megatron_rl.training.dispatcher import Dispatcher


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    calls: list[str] = []

    def collective(command: Sync) -> int:
        total = torch.tensor([command.version + rank])
        dist.all_reduce(total)
        calls.append(f"sync {int(total)}")
        return int(total)

    table = {
        Poll: lambda command: calls.append("poll"),
        Sync: collective,
        Save: lambda command: calls.append(command.path),
    }
    dispatcher = Dispatcher(dist.group.WORLD, table)
    if rank == 0:
        dispatcher.run(Poll())
        assert dispatcher.run(Sync(version=20)) == 41
        dispatcher.run(Save("somewhere"))
        dispatcher.finish()
    else:
        dispatcher.follow()
    calls_by_rank: list[list[str]] = [[], []]
    dist.all_gather_object(calls_by_rank, calls)
    if rank == 0:
        print(f"RESULT {calls_by_rank}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
