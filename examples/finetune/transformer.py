"""A small transformer that reads and writes text letter by letter, cut into stages, each on a worker of its own.

A stage calls the next one itself, so activations go from worker to worker; the last one has the targets, and only the
loss returns. `adapt` freezes a stage and puts low-rank adapters (LoRA) beside its linear layers: what is learnt from
then on are those alone.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from telegrad import rpc

LETTERS, WINDOW, WIDTH, HEADS = 128, 64, 64, 4


class Block(nn.Module):
    """Attention to what came before, then two layers for each letter."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_layers = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.look(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        y: Tensor = x + self.narrow(F.gelu(self.widen(self.before_layers(x))))
        return y


class Adapted(nn.Module):
    """A frozen linear layer, and a learnt change of low rank, which begins as none."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(layer.in_features, rank) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layer(x) + x @ self.down @ self.up
        return changed


class Stage(nn.Module):
    """Some blocks of the model; the first stage also reads letters, the last one writes them."""

    def __init__(self, seed: int, blocks: int, following: "rpc.RRef[Stage] | None") -> None:
        super().__init__()
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.following = following
        self.first = following is not None
        if self.first:
            self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        else:
            self.norm, self.write = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def _run(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.letters(x) + self.places(torch.arange(x.shape[1]))
        y: Tensor = self.blocks(x)
        return y if self.first else self.write(self.norm(y))

    def loss(self, x: Tensor, targets: Tensor, learning: bool = True) -> Tensor:
        """How badly the letters that follow are foretold."""
        with torch.set_grad_enabled(learning):  # of this thread: each worker sets its own
            y = self._run(x)
            if self.following is not None:
                return self.following.rpc_sync().loss(y, targets, learning)
            return F.cross_entropy(y.flatten(0, 1), targets.flatten())

    def next_letter(self, x: Tensor, temperature: float) -> int:
        """A letter that may follow."""
        with torch.no_grad():
            y = self._run(x)
            if self.following is not None:
                return self.following.rpc_sync().next_letter(y, temperature)
            return int(torch.multinomial((y[0, -1] / temperature).softmax(0), 1))

    def adapt(self, rank: int) -> None:
        """Freeze all weights, and learn adapters from now on."""
        self.requires_grad_(False)
        for block in self.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, Adapted(layer, rank))

    def learnt(self) -> list[rpc.RRef[nn.Parameter]]:
        """References to what is learnt now."""
        return [rpc.RRef(parameter) for parameter in self.parameters() if parameter.requires_grad]

    def sizes(self) -> tuple[int, int]:
        """How many numbers are learnt now, and how many there are."""
        every = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(size for size, learnt in every if learnt), sum(size for size, _ in every)
