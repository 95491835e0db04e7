"""The company: it has the layers in the middle, and its weights do not leave it.

Two functions are exported, for the hospital alone. Whatever else anyone asks is refused, and recorded.
"""

import torch
from parties import WIDTH, Protect, arguments, join
from torch import Tensor, nn

from telegrad import autograd, rpc


def main() -> None:
    given = arguments("company")
    torch.manual_seed(2)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.01)

    @rpc.export(may_call=["hospital"])
    def forward(activations: Tensor) -> Tensor:
        if activations.shape[1:] != (WIDTH,) or activations.dtype != torch.float32:
            raise ValueError("activations of another shape")
        return Protect.apply(layers(activations), given.clip, given.noise, False)  # type: ignore[no-any-return, no-untyped-call] # torch types neither

    @rpc.export(may_call=["hospital"])
    def step(context_id: int) -> None:
        optimizer.zero_grad()
        for parameter, gradient in autograd.get_gradients(context_id).items():
            parameter.grad = gradient
        optimizer.step()

    join("company", 1, given)
    rpc.shutdown()


if __name__ == "__main__":
    main()
