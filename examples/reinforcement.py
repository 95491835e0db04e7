"""Reinforcement learning with one agent and several observers, each with its own copy of a tiny world.

Observers play episodes on their workers and ask the agent for each action. The agent keeps the policy and remembers
how likely its choices were; after each round it improves the policy (REINFORCE with a baseline). The world is a
corridor: one may step left or right, and the right end is worth a reward.

    python examples/reinforcement.py --rounds 40 --observers 2
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from showing import GREY, Bar, curves, picture
from torch import Tensor, nn

import telegrad
from telegrad import rpc

LENGTH, START, STEPS = 7, 2, 24
STEP_COST = 0.02


class Corridor:
    """The world: a place from 0 to LENGTH - 1; the last one is the goal."""

    def __init__(self) -> None:
        self.place = START

    def view(self) -> Tensor:
        return nn.functional.one_hot(torch.tensor(self.place), LENGTH).float()

    def step(self, action: int) -> tuple[float, bool]:
        """Go left (0) or right (1); the reward, and whether the episode is over."""
        self.place = max(0, min(LENGTH - 1, self.place + (1 if action == 1 else -1)))
        arrived = self.place == LENGTH - 1
        return (1.0 if arrived else 0.0) - STEP_COST, arrived


class Agent:
    """Owns the policy. Lives on worker0, and is called by the observers."""

    def __init__(self, observers: int) -> None:
        torch.manual_seed(0)
        self.policy = nn.Linear(LENGTH, 2)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.1)
        self.choices: dict[int, list[Tensor]] = {observer: [] for observer in range(observers)}

    def act(self, observer: int, view: Tensor) -> int:
        """Choose an action for an observer, and remember how likely it was."""
        likely = self.policy(view).log_softmax(dim=0)
        action = int(torch.multinomial(likely.exp(), 1))
        self.choices[observer].append(likely[action])
        return action

    def learn(self, rewards: list[list[float]]) -> float:
        """Improve the policy by what each observer's episode brought; the mean return."""
        returns = [sum(episode) for episode in rewards]
        losses = []
        for observer, episode in enumerate(rewards):
            to_come = torch.tensor([sum(episode[i:]) for i in range(len(episode))])
            losses.append(-(torch.stack(self.choices[observer]) * (to_come - 0.3)).sum())
            self.choices[observer].clear()
        self.optimizer.zero_grad()
        torch.autograd.backward(torch.stack(losses).mean())
        self.optimizer.step()
        return sum(returns) / len(returns)


class Observer:
    """Plays episodes, on a worker of its own."""

    def __init__(self, number: int) -> None:
        self.number = number

    def play(self, agent: rpc.RRef[Agent]) -> list[float]:
        """One episode; its rewards."""
        world, rewards = Corridor(), []
        for _ in range(STEPS):
            action = agent.rpc_sync().act(self.number, world.view())
            reward, over = world.step(action)
            rewards.append(reward)
            if over:
                break
        return rewards


def run(rounds: int, observers: int) -> list[float]:
    """Train; the mean return of each round."""
    agent = Agent(observers)
    reference = rpc.RRef(agent)
    players = [rpc.remote(f"worker{i + 1}", Observer, args=(i,)) for i in range(observers)]
    history = []
    with Bar(rounds, "round") as bar:
        for number in range(1, rounds + 1):
            episodes = [player.rpc_async().play(reference) for player in players]
            history.append(agent.learn([episode.wait() for episode in episodes]))
            bar.show(number, f"mean return {history[-1]:.2f}")
    return history


def draw(path: Path, history: list[float], best: float) -> None:
    def fill(axes: Any) -> None:
        curves(axes, {"": history}, "round", "mean return", "One agent learns from what its observers live through")
        axes.axhline(best, color=GREY, ls="--")
        axes.annotate("best possible", (1, best), va="bottom", color="grey")

    picture(path, fill)


def main() -> None:
    parser = argparse.ArgumentParser(description="One agent learns from several observers.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--observers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="folder of the plot")
    options = parser.parse_args()
    with telegrad.local_cluster(workers=1 + options.observers):
        history = run(options.rounds, options.observers)
    best = 1 - STEP_COST * (LENGTH - 1 - START)
    draw(options.output / "reinforcement.png", history, best)
    print(f"mean return {history[0]:.2f} -> {history[-1]:.2f} (best possible {best:.2f})")


if __name__ == "__main__":
    main()
