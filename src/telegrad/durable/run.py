"""`Run` is what a training loop takes: durable values, and steps that happen on all workers or on none."""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device

from telegrad import autograd, rpc
from telegrad.durable import worker
from telegrad.durable.driver import Driver, Return, Settings, next_epoch
from telegrad.durable.durable_ref import DurableRef
from telegrad.durable.optimizer import DurableOptimizer
from telegrad.durable.part import Recipe, part_of, parts_of
from telegrad.errors import DurableError, WorkerDied
from telegrad.nn import RemoteModule
from telegrad.nn.owner_side import create_module
from telegrad.rpc.current import require_agent
from telegrad.rpc.workers import check_name

log = logging.getLogger("telegrad.durable")

T = TypeVar("T")

DEFAULT_TIMEOUT = 60.0
DEFAULT_RESTART_TIMEOUT = 300.0


class Run:
    """A training run that outlives its workers.

    Examples:
        ```python
        run = durable.Run("digits")
        stem = run.module("worker1", Stem)
        optimizer = run.optimizer(torch.optim.Adam, [stem], lr=1e-3)
        scheduler = run.keep(CosineAnnealingLR(optimizer, 1000))
        for k in run.steps(1000):
            with run.step() as context_id:
                autograd.backward(context_id, [loss_of(stem(batch(k)))])
                optimizer.step(context_id)
                scheduler.step()
        ```

    This worker is its driver. Values are declared first; the steps begin with the first `next` of `steps`. If a worker
    dies, all return to the last snapshot, the lost one is waited for, and the steps since run again. If the driver
    dies and its program is started again, the run goes on where it was; so does a new job with the same `directory`.

    Args:
        name: of the run; one that is started again finds its snapshots by it.
        copies: on how many other workers each worker's state is kept.
        every: steps from one snapshot to the next.
        directory: where snapshots are written to as well; needed if `copies` is 0.
        disk_every: steps from one that is written to the next; by default ten times `every`.
        holders: further workers that take part, with no values of their own, to keep copies.
        seed: of the random generators of all members, each with its own, when the run begins.
        resume: whether to go on from what is found of an earlier incarnation; if not, that is deleted.
        timeout: seconds that one exchange of states, or the end of an abandoned step, may take.
        restart_timeout: seconds that a lost worker is waited for.
    """

    def __init__(
        self,
        name: str,
        *,
        copies: int = 1,
        every: int = 10,
        directory: str | os.PathLike[str] | None = None,
        disk_every: int | None = None,
        holders: Sequence[str] = (),
        seed: int | None = None,
        resume: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        restart_timeout: float = DEFAULT_RESTART_TIMEOUT,
    ) -> None:
        check_name(name)
        if copies < 0 or every < 1 or (disk_every is not None and disk_every < 1):
            raise ValueError(
                f"copies={copies}, every={every}, disk_every={disk_every}: a run needs 0, 1 and 1 at least"
            )
        if copies == 0 and directory is None:
            raise ValueError("a run without copies needs a directory: somewhere its state has to be safe")
        self._agent = agent = require_agent()
        if name in parts_of(agent).driven:
            raise DurableError(f"this worker has a run {name!r} already: close() it, or give this one another name")
        folder = None if directory is None else Path(directory).absolute() / name
        disk_every = disk_every or (every if copies == 0 else 10 * every)
        self._settings = Settings(name, copies, every, folder, disk_every, timeout, restart_timeout)
        self._seed = seed
        self._resume = resume
        self._recipes: dict[str, list[Recipe]] = {agent.info.name: []}
        self._incarnations: dict[str, int] = {}
        self._lost_before: list[str] = []
        self._kept_modules: dict[int, str] = {}
        self._driver: Driver | None = None
        self._loop: object | None = None  # the latest loop over the steps
        self._half_done = False  # a loop over the steps ended in the midst of one
        self._failed = False  # the last step ended with an error of its own
        self._warned = False  # of a step without its block
        self._outcome: bool | None = None  # of the step under way: done, given up, or neither yet
        if not resume and folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        # References are sent with the epoch this worker is in, and refused by those who are in a later one.
        self._declaration = part_of(agent, name).holdings.epoch = next_epoch(agent)
        self._declare(agent.info.name)
        for holder in holders:
            self._declare(agent.find(holder).name)
        parts_of(agent).driven[name] = None

    def __repr__(self) -> str:
        return f"<Run {self.name!r}: {self.completed} steps, {len(self._recipes)} workers>"

    @property
    def name(self) -> str:
        """The name of the run."""
        return self._settings.run

    @property
    def completed(self) -> int:
        """How many steps are done; goes down when the run returns to a snapshot."""
        return 0 if self._driver is None else self._driver.core.step

    @property
    def returns(self) -> list[Return]:
        """Each return to a snapshot since this process drives the run."""
        return [] if self._driver is None else self._driver.returns

    # --- values ---

    def module(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> RemoteModule:
        """A RemoteModule that is durable. Its state: parameters, all buffers, modes, which parameters are frozen."""
        place = _remote_device(remote_device)
        on = place.worker_name() if place.worker_name() is not None else place.rank()
        owner = self._agent.info.name if on is None else self._agent.find(on).name
        creation = (module_cls, tuple(args or ()), dict(kwargs or {}), str(place.device()))
        recipe = Recipe(self._new_name(name, module_cls, owner), create_module, creation)
        ref, _ = self._declare(owner, recipe)
        return RemoteModule.init_from_module_rref(f"{owner}/{place.device()}", ref)

    def remote(
        self,
        to: str,
        make: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        save: Callable[[T], Any] | None = None,
        load: Callable[[T, Any], Any] | None = None,
    ) -> DurableRef[T]:
        """A durable value made by `make(*args, **kwargs)` on worker `to`; a reference to it that outlives that worker.

        Its state is what `save(value)` returns, or `value.state_dict()`; `load(value, state)` takes it back."""
        owner = self._agent.find(to).name
        recipe = Recipe(self._new_name(name, make, owner), make, tuple(args), dict(kwargs or {}), save, load)
        ref, _ = self._declare(owner, recipe)
        return ref

    def keep(
        self,
        value: T,
        *,
        name: str | None = None,
        save: Callable[[T], Any] | None = None,
        load: Callable[[T, Any], Any] | None = None,
    ) -> T:
        """Make a value of the driver's own durable: a scheduler, a data loader, a module, a random generator."""
        owner = self._agent.info.name
        recipe = Recipe(self._new_name(name, type(value), owner), lambda: value, (), {}, save, load)
        self._declare(owner, recipe)
        if isinstance(value, nn.Module):
            self._kept_modules[id(value)] = recipe.name
        return value

    def optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *args: Any,
        name: str | None = None,
        **kwargs: Any,
    ) -> DurableOptimizer:
        """A durable DistributedOptimizer, over durable modules, or groups of these with options of their own."""
        name = self._new_name(name, optimizer_class, "")
        made = DurableOptimizer(self._declare, name, optimizer_class, self._parameters(params), args, kwargs)
        self.keep(made, name=f"{name}/groups", save=_driver_state, load=_load_driver_state)
        return made

    def _parameters(self, params: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in params:
            if isinstance(entry, Mapping):
                inner = entry["params"]
                one = isinstance(inner, nn.Module | DurableRef)
                found.append({**entry, "params": self._parameters([inner] if one else inner)})
            elif isinstance(entry, nn.Module):
                found += self._parameters_of(entry)
            else:
                found.append(entry)
        return found

    def _parameters_of(self, module: nn.Module) -> list[DurableRef[Any]]:
        ref = getattr(module, "module_rref", None) if isinstance(module, RemoteModule) else None
        if id(module) in self._kept_modules:
            ref = DurableRef(self.name, self._agent.info.name, self._kept_modules[id(module)])
        if not isinstance(ref, DurableRef):
            raise DurableError(
                f"{type(module).__name__} is not durable in run {self.name!r}: make it with run.module(), or give it "
                "to run.keep() if it is the driver's own"
            )
        names = rpc.rpc_sync(ref.owner_name(), _parameter_names, (ref,))
        return [ref.parameter(each) for each in names]

    def _new_name(self, given: str | None, made_by: Any, owner: str) -> str:
        taken = {recipe.name for recipes in self._recipes.values() for recipe in recipes}
        if given is not None:
            if given in taken:
                raise DurableError(f"run {self.name!r} has a value {given!r} already")
            return given
        stem = f"{getattr(made_by, '__name__', type(made_by).__name__)}@{owner}".removesuffix("@")
        return next(name for name in _numbered(stem) if name not in taken)

    def _declare(self, owner: str, *recipes: Recipe) -> tuple[DurableRef[Any], Any]:
        """Have a worker make a value; one that was lost meanwhile makes all it had so far as well."""
        if self._driver is not None:
            raise DurableError(f"run {self.name!r} has begun: declare all its values before the first step")
        known = self._recipes.setdefault(owner, [])
        known += recipes
        while True:
            member = self._agent.find(owner)
            anew = self._incarnations.get(owner) != member.incarnation
            args = (
                self.name,
                self._agent.info.name,
                self._declaration,
                self._seed,
                self._resume,
                tuple(known) if anew else recipes,
            )
            try:
                if owner == self._agent.info.name:
                    incarnation, said = worker.declare(*args)
                else:
                    incarnation, said = rpc.rpc_sync(owner, worker.declare, args, timeout=self._settings.timeout)
            except WorkerDied as error:
                if error.worker != owner:
                    raise
                self._agent.peers.wait_for_return(member, self._settings.restart_timeout)
                continue
            if self._incarnations.setdefault(owner, incarnation) != incarnation:
                self._lost_before.append(owner)
                self._incarnations[owner] = incarnation
            return DurableRef(self.name, owner, recipes[-1].name if recipes else ""), said

    # --- steps ---

    def steps(self, number: int) -> Iterator[int]:
        """The numbers of the steps to make, up to `number`: 0, 1, 2 and so on, going back by itself after a death.

        The work of a step stands in a block `with run.step()`. When the iterator ends, the last state is safe."""
        driver = self._begin()
        self._loop = loop = object()
        if self._half_done:
            driver.undo()
        self._half_done = True  # unless it turns out otherwise: whatever ends this loop may end it within a step
        try:
            while driver.core.step < number:
                self._outcome, self._failed = None, False
                yield driver.core.step
                if self._loop is not loop:
                    raise DurableError(f"run {self.name!r} is being stepped through by another loop")
                if self._outcome is False:
                    driver.recover()
                else:
                    if self._outcome is None:
                        self._warn_of_no_step(driver.core.step)
                    driver.step_ended(final=driver.core.step + 1 == number)
            self._half_done = False
        except GeneratorExit:
            if self._loop is loop and not self._failed and self._outcome is not False:
                if self._outcome:  # a break behind a step that was done; otherwise one before a step
                    driver.core.step_ended()
                self._half_done = False

    def _warn_of_no_step(self, step: int) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "step %d of run %r had no block `with run.step()`: a death in it is not undone, and what it changed "
                "counts as done. This is said once",
                step,
                self.name,
            )

    def _begin(self) -> Driver:
        if self._driver is None:
            driver = Driver(self._agent, self._settings, self._declaration, self._recipes, self._incarnations)
            if self._settings.copies and len(driver.members) == 1 and self._settings.folder is None:
                raise DurableError(
                    f"run {self.name!r} has no worker but its driver, so nobody can keep a copy of its state: name "
                    "some in `holders`, or give a `directory`"
                )
            self._driver = driver
            driver.begin(self._lost_before)
        return self._driver

    def step(self) -> "Step":
        """`with run.step() as context_id:` is the work of one step, in an autograd context.

        If a member of the run dies meanwhile, the block ends there, without an error, and the step comes again."""
        if self._loop is None or self._driver is None:
            raise DurableError("run.step() belongs into a loop over run.steps()")
        return Step(self, self._driver)

    def close(self) -> None:
        """The run is over: all workers forget its values and snapshots. What is on disk stays."""
        parts_of(self._agent).driven.pop(self.name, None)
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # what there is of it stays: one of this name may go on
            parts_of(self._agent).driven.pop(self.name, None)


class Step:
    """The block of one step."""

    def __init__(self, run: Run, driver: Driver) -> None:
        self._run = run
        self._driver = driver
        self._context = autograd.context()

    def __enter__(self) -> int:
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._context.__exit__(kind, error, trace)
        self._run._failed = error is not None
        if error is None:
            self._run._outcome = True
        elif isinstance(error, Exception) and self._driver.died_by(error):
            self._run._outcome = False
            return True
        return False


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    number = 2
    while True:
        yield f"{stem}/{number}"
        number += 1


def _driver_state(optimizer: DurableOptimizer) -> dict[str, Any]:
    return optimizer.driver_state()


def _load_driver_state(optimizer: DurableOptimizer, state: dict[str, Any]) -> None:
    optimizer.load_driver_state(state)


def _parameter_names(ref: DurableRef[nn.Module]) -> list[str]:
    """Runs on the owner. A shared parameter is listed once."""
    return [name for name, _ in ref.local_value().named_parameters()]
