"""The hospital: it has the records and the labels, and neither leaves it.

It runs the first and the last layers. What it sends is activations, and gradients of what it got back; what it gets is
the output of the company's layers, and gradients of the activations.

    python examples/hospital/run.py        # starts both parties, with keys, on this machine
"""

import sys
from pathlib import Path

import torch
from parties import WIDTH, Protect, arguments, join
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from telegrad import autograd, rpc

sys.path.append(str(Path(__file__).parents[1]))
from showing import Bar, curves, picture

RECORDS, FEATURES = 512, 12


def main() -> None:
    given = arguments("hospital")
    torch.manual_seed(1)
    records = torch.randn(RECORDS, FEATURES)
    labels = ((records[:, 0] * records[:, 1] + records[:, 2]) > 0).long()
    first = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
    last = nn.Linear(WIDTH, 2)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01)
    join("hospital", 0, given)

    def guess(rows: Tensor) -> Tensor:
        activations = first(records[rows])
        sent = Protect.apply(activations, given.clip, given.noise, False)  # type: ignore[no-untyped-call] # torch's own
        back = rpc.rpc_sync("company", "forward", (sent,))
        return last(Protect.apply(back, given.clip, given.gradient_noise, True))  # type: ignore[no-any-return, no-untyped-call] # torch types neither

    def accuracy() -> float:
        with torch.no_grad():
            return float((guess(torch.arange(RECORDS)).argmax(dim=1) == labels).float().mean())

    def step() -> None:
        rows = torch.randperm(RECORDS)[:128]
        with autograd.context() as context_id:
            autograd.backward(context_id, [F.cross_entropy(guess(rows), labels[rows])])
            for parameter, gradient in autograd.get_gradients(context_id).items():
                parameter.grad = gradient
            optimizer.step()
            rpc.rpc_sync("company", "step", (context_id,))

    found = [accuracy()]
    with Bar(given.steps) as bar:
        for number in range(1, given.steps + 1):
            step()
            found.append(accuracy())
            bar.show(number, f"accuracy {found[-1]:.1%}")
    rpc.shutdown(timeout=30)
    title = "The hospital's accuracy, with layers that the company keeps"
    picture(given.output / "hospital.png", lambda axes: curves(axes, {"": found}, "step", "accuracy", title))
    print(f"accuracy {found[0]:.1%} -> {found[-1]:.1%}")


if __name__ == "__main__":
    main()
