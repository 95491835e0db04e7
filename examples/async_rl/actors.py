"""Asynchronous reinforcement learning: the policy lives on one worker, and several actors play without waiting for it.

Actors balance poles, a few each. For each move they ask the policy's worker, which answers all that have asked since it
last looked at once. What an actor lived through goes back to the policy, which learns from it while the actors go on.

    python examples/async_rl/actors.py --actors 3 --unrolls 60
"""

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from poles import LONGEST, Poles
from policy import Policy, Unroll

import telegrad
from telegrad import rpc

sys.path.append(str(Path(__file__).parents[1]))
from showing import BLUE, GREEN, Bar, curves, picture

COUNT, LENGTH = 8, 64  # poles of an actor; moves in an unroll


def play(policy: "rpc.RRef[Policy]", history: "rpc.RRef[History]", unrolls: int, seed: int) -> None:
    """An actor's whole life, on a worker of its own."""
    torch.set_num_threads(1)
    world = Poles(COUNT, seed)
    learning: rpc.Future[None] | None = None
    for _ in range(unrolls):
        views, actions, likely, over, versions, lengths = [world.state], [], [], [], [], []
        for _ in range(LENGTH):
            chosen, how_likely, version = policy.rpc_sync().act(views[-1])
            ended, lasted = world.step(chosen)
            views.append(world.state)
            actions.append(chosen)
            likely.append(how_likely)
            over.append(ended)
            versions.append(version)
            lengths += lasted
        if learning is not None:
            learning.wait()  # at most one unroll of each actor is on its way
        rows = [torch.stack(column) for column in (views, actions, likely, over)]
        learning = policy.rpc_async().learn(Unroll(rows[0], rows[1], rows[2], rows[3], versions[0]))
        history.rpc_sync().add(lengths)
    if learning is not None:
        learning.wait()


class History:
    """How long the poles stood, told by the actors to the process that shows it."""

    def __init__(self, bar: Bar) -> None:
        self.lengths: list[int] = []
        self._bar, self._unrolls, self._lock = bar, 0, threading.Lock()

    def add(self, lengths: list[int]) -> None:
        with self._lock:
            self.lengths += lengths
            self._unrolls += 1
            latest = self.lengths[-50:] or [0]
            self._bar.show(self._unrolls, f"poles stand for {sum(latest) / len(latest):.0f} moves")


def run(actors: int, unrolls: int) -> tuple[list[int], Counter[int], Counter[int]]:
    """Train; how long each episode lasted, how many asked at once, and how old what was learnt from was."""
    policy = rpc.remote("policy", Policy)
    with Bar(actors * unrolls, "unroll") as bar:
        history = History(bar)
        told = rpc.RRef(history)
        playing = [rpc.rpc_async(f"actor{i}", play, args=(policy, told, unrolls, i), timeout=0) for i in range(actors)]
        for actor in playing:
            actor.wait()
    return history.lengths, *policy.rpc_sync().seen()


def draw(path: Path, lengths: list[int], batches: Counter[int], ages: Counter[int]) -> None:
    def fill(left: Any, middle: Any, right: Any) -> None:
        curves(left, {"": lengths}, "episode", "moves", f"How long a pole stands (at most {LONGEST})")
        for axes, counts, colour in ((middle, batches, BLUE), (right, ages, GREEN)):
            axes.bar(list(counts), list(counts.values()), color=colour)
            axes.set_xticks(sorted(counts))
        middle.set(title="Actors answered by one forward pass", xlabel="actors", ylabel="passes")
        right.set(title="How old the policy was that played", xlabel="versions behind the one that learns")

    picture(path, fill, panels=3, width=15)


def main() -> None:
    parser = argparse.ArgumentParser(description="Asynchronous reinforcement learning with one policy, many actors.")
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--unrolls", type=int, default=60, help=f"of each actor, {LENGTH} moves of {COUNT} poles each")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    names = ["main", "policy", *(f"actor{i}" for i in range(options.actors))]
    with telegrad.local_cluster(names=names):
        lengths, batches, ages = run(options.actors, options.unrolls)
    draw(options.output / "async_rl.png", lengths, batches, ages)
    first, last = lengths[:50], lengths[-50:]
    print(f"a pole stands for {sum(first) / len(first):.0f} -> {sum(last) / len(last):.0f} moves")


if __name__ == "__main__":
    main()
