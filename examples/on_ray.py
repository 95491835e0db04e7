"""A parameter server and a pipeline on Ray, each with an actor killed in the middle. Needs the extra `ray`.

Ray starts the killed actor again and it rejoins under its name. What it held is gone, and those who waited are told:
a trainer's share of the work is given out again, a stage of the pipeline is put back from the last checkpoint.

    python examples/on_ray.py parameter-server
    python examples/on_ray.py pipeline
"""

import argparse
from pathlib import Path

import torch
from parameter_server import TRUE_WEIGHT, ParameterServer, Progress, train
from showing import Bar, curves, picture
from torch import Tensor, nn

from telegrad import autograd, rpc
from telegrad.errors import WorkerDied
from telegrad.launch.ray import RayCluster, ray_cluster
from telegrad.optim import DistributedOptimizer

KEEP_EVERY = 5  # steps between two checkpoints of the pipeline


def parameter_server(cluster: RayCluster, steps: int, bar: Bar) -> tuple[dict[str, list[float]], float]:
    """The server is this process, the actors train; their losses, and how far the weights are from the true ones."""
    server, progress = rpc.RRef(ParameterServer()), rpc.RRef(Progress(bar))
    shares = {
        name: rpc.rpc_async(name, train, args=(server, i, steps, 0.1, progress), timeout=0)
        for i, name in enumerate(cluster.names)
    }
    losses = {}
    cluster.kill("worker1")
    for seed, (name, share) in enumerate(shares.items()):
        try:
            losses[name] = share.wait()
        except WorkerDied as error:
            print(f"lost: {error}")
            cluster.wait_for(name)
            print(f"{name} is back; its share is done again")
            losses[name] = rpc.rpc_sync(name, train, args=(server, seed + 100, steps, 0.1, progress), timeout=0)
    weight, bias = (parameter.detach() for parameter in server.local_value().parameters())
    return losses, max(float((weight - TRUE_WEIGHT).abs().max()), float((bias - 1.0).abs()))


class Stage(nn.Module):
    """A part of the network, where its actor is."""

    def __init__(self, inputs: int, outputs: int, state: dict[str, Tensor] | None) -> None:
        super().__init__()
        torch.manual_seed(inputs)
        self.layers = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))
        if state is not None:
            self.load_state_dict(state)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def state(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


SHAPES = {"worker0": (4, 8), "worker1": (8, 1)}
States = dict[str, dict[str, Tensor]]


class Pipeline:
    """Two stages on two actors, and an optimizer over both."""

    def __init__(self, states: States) -> None:
        self.stages = [rpc.remote(name, Stage, args=(*SHAPES[name], states.get(name))) for name in SHAPES]
        parameters = [reference for stage in self.stages for reference in stage.rpc_sync().references()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)

    def step(self, x: Tensor, y: Tensor) -> float:
        with autograd.context() as context_id:
            for stage in self.stages:
                x = stage.rpc_sync().forward(x)
            loss = nn.functional.mse_loss(x, y)
            autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        return loss.item()

    def states(self) -> States:
        return {name: stage.rpc_sync().state() for name, stage in zip(SHAPES, self.stages, strict=True)}


def pipeline(cluster: RayCluster, steps: int, bar: Bar) -> list[float]:
    """Train over two actors, one of which is killed half-way; the loss of each step."""
    pipe, kept, kept_at = Pipeline({}), States(), 0
    data = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=data)
    y = x.sum(1, keepdim=True).sin()
    step, killed = 0, False
    losses: list[float] = []
    while step < steps:
        try:
            if step == steps // 2 and not killed:
                killed = True
                cluster.kill("worker1")
            losses[step:] = [pipe.step(x, y)]
            step += 1
            bar.show(step, f"loss {losses[-1]:.4f}")
            if step % KEEP_EVERY == 0:
                kept, kept_at = pipe.states(), step
        except WorkerDied as error:
            print(f"step {step} lost: {error}")
            cluster.wait_for(error.worker)
            pipe, step = Pipeline(kept), kept_at
            print(f"{error.worker} is back; going on from step {kept_at}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Training on Ray with an actor killed in the middle.")
    parser.add_argument("what", choices=["parameter-server", "pipeline"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with ray_cluster(workers=2, resources={"CPU": 0.5}, max_restarts=2) as cluster:
        if options.what == "pipeline":
            with Bar(options.steps) as bar:
                series = {"loss": pipeline(cluster, options.steps, bar)}
            print(f"last loss: {series['loss'][-1]:.5f}")
        else:
            with Bar(options.steps * len(cluster.names)) as bar:
                series, error = parameter_server(cluster, options.steps, bar)
            print(f"largest error of a weight: {error:.5f}")
    path, title = options.output / f"on_ray_{options.what}.png", "An actor was killed on the way"
    picture(path, lambda axes: curves(axes, series, "step", "loss", title, scale="log"))


if __name__ == "__main__":
    main()
