"""An embedding table too large for one worker, cut by rows over three, with a small dense network in the trainer.

A batch of ids is sorted by owner; all owners look up their rows at the same time, and each sends only what was asked
for. Backward returns to each owner the gradient of its rows, as a sparse tensor that its optimizer applies.

    python examples/sharded_embedding.py --rows 30000 --steps 60
"""

import argparse
from pathlib import Path

import torch
from showing import Bar, curves, picture
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import telegrad
from telegrad import autograd, rpc
from telegrad.optim import DistributedOptimizer

OWNERS = ("worker1", "worker2", "worker3")
WIDTH = 8


class Shard:
    """The rows of the table whose id leaves `number` when divided by the number of owners."""

    def __init__(self, rows: int, number: int) -> None:
        torch.manual_seed(number)
        self.table = nn.Embedding(rows, WIDTH, sparse=True)

    def look_up(self, rows: Tensor) -> Tensor:
        return self.table(rows)  # type: ignore[no-any-return] # a module's call has no type in torch

    def weight(self) -> rpc.RRef[Tensor]:
        return rpc.RRef(self.table.weight)


class ShardedEmbedding:
    """The whole table, as the trainer sees it."""

    def __init__(self, rows: int) -> None:
        each = -(-rows // len(OWNERS))
        self.shards = [rpc.remote(owner, Shard, args=(each, number)) for number, owner in enumerate(OWNERS)]

    def __call__(self, ids: Tensor) -> Tensor:
        owners = ids % len(OWNERS)
        places = [(owners == number).nonzero().squeeze(1) for number in range(len(OWNERS))]
        asked = [
            shard.rpc_async().look_up(ids[mine] // len(OWNERS)) for shard, mine in zip(self.shards, places, strict=True)
        ]
        found = torch.cat([rows.wait() for rows in asked])
        return found[torch.cat(places).argsort()]  # back in the order of `ids`

    def weights(self) -> list[rpc.RRef[Tensor]]:
        return [shard.rpc_sync().weight() for shard in self.shards]


def run(rows: int, steps: int, batch: int) -> list[float]:
    """Learn a property of each id (whether it is divisible by five) from its embedding; the loss of each step."""
    table = ShardedEmbedding(rows)
    torch.manual_seed(10)
    head = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 2))
    sparse = DistributedOptimizer(torch.optim.SparseAdam, table.weights(), lr=0.05)
    dense = DistributedOptimizer(torch.optim.Adam, [rpc.RRef(parameter) for parameter in head.parameters()], lr=0.01)
    losses = []
    with Bar(steps) as bar:
        for number in range(1, steps + 1):
            ids = torch.randint(rows, (batch,))
            with autograd.context() as context_id:
                loss = F.cross_entropy(head(table(ids)), (ids % 5 == 0).long())
                autograd.backward(context_id, [loss])
                sparse.step(context_id)
                dense.step(context_id)
            losses.append(loss.item())
            bar.show(number, f"loss {losses[-1]:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="An embedding table sharded over three workers.")
    parser.add_argument("--rows", type=int, default=900)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with telegrad.local_cluster(workers=1 + len(OWNERS)):
        losses = run(options.rows, options.steps, options.batch)
    path, title = options.output / "sharded_embedding.png", f"{options.rows} rows over {len(OWNERS)} owners are learnt"
    picture(path, lambda axes: curves(axes, {"loss": losses}, "step", "loss", title))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
