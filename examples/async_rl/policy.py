"""The policy on its worker: it answers all actors that have asked at once, and learns from what they played.

Nobody waits in a thread for an answer (`async_execution`). What it learns from may have been played with older weights;
PPO's ratio allows for that, and its clipping bounds what one unroll can change.
"""

import threading
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from telegrad import rpc

DISCOUNT, TRACE, CLIP, EPOCHS = 0.98, 0.95, 0.2, 4
Choice = tuple[Tensor, Tensor, int]  # actions, the logarithm of how likely each was, and the version of the policy


class Unroll(NamedTuple):
    """What an actor lived through: a row for each move, a column for each pole."""

    views: Tensor  # one row more: what it saw last
    actions: Tensor
    likely: Tensor  # the logarithm of how likely the policy found each action then
    over: Tensor
    version: int  # of the policy, when the unroll began


class Policy:
    """What to do, and what to expect. Lives on its worker, is asked and taught by the actors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=2.5e-3)
        self.version = 0
        self.batches: Counter[int] = Counter()  # how many asked at once
        self.ages: Counter[int] = Counter()  # how many versions old what was learnt from was
        self._asked: list[tuple[Tensor, rpc.Future[Choice]]] = []
        self._asking = threading.Condition()
        self._weights = threading.Lock()
        threading.Thread(target=self._answer, daemon=True).start()

    @rpc.functions.async_execution
    def act(self, views: Tensor) -> rpc.Future[Choice]:
        """Actions for what is seen, how likely they were, and the version of the policy: soon."""
        answer: rpc.Future[Choice] = rpc.Future()
        with self._asking:
            self._asked.append((views, answer))
            self._asking.notify()
        return answer

    def _answer(self) -> None:
        """One forward pass for all that have asked meanwhile, again and again."""
        while True:
            with self._asking:
                self._asking.wait_for(lambda: self._asked)
                asked, self._asked = self._asked, []
            with self._weights, torch.no_grad():
                likely = self.net(torch.cat([views for views, _ in asked]))[:, :2].log_softmax(1)
            actions = torch.multinomial(likely.exp(), 1)
            chosen = likely.gather(1, actions)
            self.batches[len(asked)] += 1
            sizes = [len(views) for views, _ in asked]
            parts = zip(torch.split(actions[:, 0], sizes), torch.split(chosen[:, 0], sizes), asked, strict=True)
            for mine, how_likely, (_, answer) in parts:
                answer.set_result((mine.clone(), how_likely.clone(), self.version))  # not the whole batch with it

    def learn(self, unroll: Unroll) -> None:
        """Make what turned out better than expected more likely, but not by too much at once."""
        with self._weights:
            self.ages[self.version - unroll.version] += 1
            with torch.no_grad():
                expected = self.net(unroll.views)[..., 2]
            gain, gains = torch.zeros(unroll.actions.shape[1]), list[Tensor]()
            for t in reversed(range(len(unroll.actions))):
                going = 1.0 - unroll.over[t].float()
                surprise = 0.1 + DISCOUNT * going * expected[t + 1] - expected[t]  # each move is worth 0.1
                gain = surprise + DISCOUNT * TRACE * going * gain
                gains.insert(0, gain)
            better = torch.stack(gains)
            worth = better + expected[:-1]
            better = (better - better.mean()) / (better.std() + 1e-6)
            for _ in range(EPOCHS):
                out = self.net(unroll.views[:-1])
                every = out[..., :2].log_softmax(-1)
                ratio = (every.gather(-1, unroll.actions[..., None])[..., 0] - unroll.likely).exp()
                gained = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()
                spread = -(every.exp() * every).sum(-1).mean()
                loss = (out[..., 2] - worth).square().mean() - gained - 0.01 * spread
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.version += 1

    def seen(self) -> tuple[Counter[int], Counter[int]]:
        return self.batches, self.ages
