"""Under torchrun: two ranks execute what rank 0 says, then rank 0 finishes."""

import torch
import torch.distributed as dist

from megatron_rl.contracts.commands import Poll, Save, Sync
from megatron_rl.training.dispatcher import Dispatcher


def main() -> None:
    dist.init_process_group("gloo")
    rank, done = dist.get_rank(), []

    def collective(command: Sync) -> int:
        total = torch.tensor([command.version + rank])
        dist.all_reduce(total)
        done.append(f"sync {int(total)}")
        return int(total)

    table = {
        Poll: lambda command: done.append("wait"),
        Sync: collective,
        Save: lambda command: done.append(command.path),
    }
    dispatcher = Dispatcher(dist.group.WORLD, table)
    if rank == 0:
        dispatcher.run(Poll())
        assert dispatcher.run(Sync(version=20)) == 41
        dispatcher.run(Save("somewhere"))
        dispatcher.finish()
    else:
        dispatcher.follow()
    everyone: list[list[str]] = [[], []]
    dist.all_gather_object(everyone, done)
    if rank == 0:
        print(f"RESULT {everyone}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
