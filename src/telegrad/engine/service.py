"""The passes of one worker and the messages between them. The control plane is a star around each pass's root.

    root                         participant
    PropagateGradients  ------>  begins the pass; hears; runs; tells others
    or BeginPass
                        <------  PassDone, or the error, as the reply

Gradients flow between any two workers; who is done is told to the root alone. A worker that knows of a participant the
root did not name brings it in itself, and names it when it is done.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients
from telegrad.autograd.registry import Registry, registry_of
from telegrad.cuda import lanes, order
from telegrad.engine.cleanup import EndedContexts
from telegrad.engine.gradients import take_present, to_send
from telegrad.engine.on_lane import PassOnLane, RootPassOnLane
from telegrad.engine.passes import Carried, Pass
from telegrad.engine.root_pass import RootPass
from telegrad.errors import AutogradError, ContextNotFound, WorkerDied
from telegrad.ids import MessageId, PassId, WorkerId, ids_of
from telegrad.rpc.agent import Agent
from telegrad.rpc.client.link import Link
from telegrad.rpc.client.pending import Slot
from telegrad.rpc.layer import Layer
from telegrad.rpc.remote_errors import text_for_stranger, text_of_stranger, with_notes
from telegrad.rpc.request import Request
from telegrad.rpc.workers import Member, peer_of
from telegrad.wire.codec import Packed
from telegrad.wire.messages import (
    AbortPass,
    Ack,
    AnyMessage,
    AutogradMetadata,
    BeginPass,
    CleanupAutogradContext,
    ParticipantDied,
    PassDone,
    PropagateGradients,
    PropagateGradientsReply,
    TooLateForPass,
)

log = logging.getLogger("telegrad.engine")

_MOST_TEXT = 2000
_profiler_enabled = torch._C._autograd._profiler_enabled


class PassService(Layer):
    """The engine of one agent."""

    recording: "PassService | None" = None  # its other class, for passes beyond the first order (`higher/service.py`)

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.registry: Registry = registry_of(agent)
        self.here = agent.member.worker_id
        self._pass_ids: Iterator[PassId] = ids_of(peer_of(agent.member))
        self.ended = EndedContexts(agent)
        self._lock = threading.Lock()

    def name_of(self, worker: WorkerId) -> str:
        """A worker's name, for texts."""
        member = self.agent.directory.by_id(worker)
        return str(worker) if member is None else member.name

    # --- passes ---

    def open(self, context: Context, retain_graph: bool, timeout: float) -> RootPass:
        """A new pass whose root is here."""
        pass_ = (RootPassOnLane if order.active else RootPass)(
            self, context, next(self._pass_ids), retain_graph, timeout
        )
        self._enter(context, pass_)
        return pass_

    def join(
        self,
        context: Context,
        pass_id: PassId,
        root: WorkerId,
        retain_graph: bool,
        known: Iterable[WorkerId],
        to_answer: tuple[Request, ...] = (),
    ) -> tuple[Pass, bool]:
        """The pass of that id, and whether this is the first word of it here: then it will answer these requests."""
        latest = context.latest
        if latest is not None and latest.pass_id == pass_id:
            return latest, False
        made = PassOnLane if order.active else Pass
        pass_ = made(self, context, pass_id, root, retain_graph, known, to_answer)
        entered = self._enter(context, pass_)
        return entered, entered is pass_

    def _enter(self, context: Context, pass_: Pass) -> Pass:
        """Make `pass_` the latest of its context, unless another thread was first with it."""
        pass_id, root = pass_.pass_id, pass_.root
        with context.lock:
            latest: Pass | None = context.latest
            if latest is not None:
                if latest.pass_id == pass_id:
                    return latest
                self._check_may_follow(context, latest, pass_id, root)
            if not context.usable:
                context.check_usable()
            context.latest = pass_
            context.newest_pass[root] = pass_id
        if latest is not None and not latest.finished:  # its root has given it up, or it would not have begun another
            latest.fail(AutogradError(f"backward pass {latest.pass_id} was given up by its root, which began another"))
        return pass_

    def _check_may_follow(self, context: Context, latest: Pass, pass_id: PassId, root: WorkerId) -> None:
        if pass_id < context.newest_pass.get(root, pass_id):
            raise AutogradError(f"backward pass {pass_id} of context {context.context_id} is over: a later one began")
        superseded = latest.root == root and root != self.here
        if not latest.finished and not superseded:
            raise AutogradError(
                f"worker {self.agent.info.name!r} is still in another backward pass of context "
                f"{context.context_id} ({latest}); passes over one context run one after the other"
            )

    def passes(self) -> list[Pass]:
        """The latest pass of each context."""
        return [context.latest for context in self.registry.contexts() if context.latest is not None]

    def waits(self) -> list[tuple[str, int]]:
        """What the passes here wait for, and the worker of each."""
        waits = []
        for pass_ in self.passes():
            what = f"backward of context {pass_.context.context_id}, begun by {self.name_of(pass_.root)}"
            for message_id, peer in pass_.waits():
                waits.append((f"{what}, waits for {self.name_of(peer)} (message {message_id})", int(peer)))
        return waits

    # --- telling others ---

    def invite(self, pass_: Pass, worker: WorkerId) -> None:
        """Tell a worker of the pass without a gradient."""
        message = BeginPass(pass_.context.context_id, pass_.pass_id, pass_.root, pass_.retain_graph, pass_.named())
        self._request(pass_, worker, message, Packed(b"", []))

    def tell(self, pass_: Pass, worker: WorkerId, message_id: MessageId, gradients: Gradients | None) -> None:
        """Give the peer of a Recv its gradients, or tell it that none will come."""
        present, tensors = to_send(gradients)
        metadata = AutogradMetadata(pass_.context.context_id, message_id)
        named = pass_.named()
        message = PropagateGradients(metadata, pass_.pass_id, pass_.root, pass_.retain_graph, named, present)
        if pass_.to_invite:
            pass_.to_invite.discard(worker)
        pass_.ask(self.agent.standing(worker) or self._link(worker), message, Packed(b"", tensors))

    def tell_too_late(self, pass_: Pass, worker: WorkerId, message_id: MessageId) -> None:
        """Tell the sender of a message that it has no part in a pass that had begun here before it came."""
        message = TooLateForPass(AutogradMetadata(pass_.context.context_id, message_id), pass_.pass_id)
        self.agent.send(
            self._member(worker), message, timeout=0.0, what=lambda: "a notice of a late message", complete=_ignore
        )

    def _request(self, pass_: Pass, worker: WorkerId, message: AnyMessage, packed: Packed) -> None:
        pass_.to_invite.discard(worker)
        pass_.ask(self._link(worker), message, packed)

    def refused(self, pass_: Pass, error: Exception) -> None:
        """Another worker did not take what it was told. If this one is done already, the root has to be told so."""
        if pass_.finished and pass_.error is None:
            self.agent.notify(self._member(pass_.root), self.abort_message(pass_, error))
        else:
            pass_.fail(error)

    def abort_message(self, pass_: Pass, error: BaseException) -> AbortPass:
        """What others are told of a pass that failed here."""
        dead, incarnation = (error.worker, error.incarnation) if isinstance(error, WorkerDied) else ("", 0)
        text = (text_for_stranger if self.agent.layers.plain else with_notes)(error)[:_MOST_TEXT]
        return AbortPass(pass_.context.context_id, pass_.pass_id, self.agent.info.name, text, dead, incarnation)

    def _link(self, worker: WorkerId) -> Link:
        return self.agent.link(self._member(worker))

    def _member(self, worker: WorkerId) -> Member:
        member = self.agent.directory.by_id(worker)
        if member is None:
            text = f"worker {worker} has left; it had a part in this backward pass."
            raise WorkerDied(text, worker=str(worker))
        return member

    # --- hearing from others ---

    def serve_begin(self, request: Request) -> None:
        """The handler of `BeginPass`."""
        message = request.message
        assert type(message) is BeginPass
        try:
            # Even if no call of that context has come: one may be on its way, and must find the pass begun.
            context = self.registry.join(message.context_id)
            context.touch((request.caller.worker_id,))  # if that one dies, nobody else may know of this worker's part
        except ContextNotFound:
            request.reply(PassDone((), ()))
            return
        from_root = request.caller.worker_id == message.root
        answered = (request,) if from_root else ()
        pass_, is_new = self.join(
            context, message.pass_id, message.root, message.retain_graph, message.participants, answered
        )
        if not from_root:
            request.reply(PropagateGradientsReply(), lazy=True)
        if is_new:
            pass_.begin()
        elif from_root:
            pass_.answer_at_end(request)

    def serve_gradients(self, request: Request) -> None:
        """The handler of `PropagateGradients`."""
        message: PropagateGradients = request.message  # type: ignore[assignment] # this is what it is registered for
        metadata, present, root = message.metadata, message.present, message.root
        context, message_id = self.registry.find(metadata.context_id), metadata.message_id
        caller = request.session.member.worker_id
        gradients: list[Tensor | None] | None = request.take_tensors()  # type: ignore[assignment] # it is ours now
        if not gradients or len(gradients) != len(present) or not all(present):
            gradients = self._announced(message, gradients)
        # Before anything is begun: what is wrong concerns its sender, and through it the root, but not this worker.
        self.check(context, message_id, caller, gradients)
        # The root has its answer when the pass ends, so an error must end that rather than be a second answer.
        answered = (request,) if caller == root else ()
        known, pass_id, made = context.latest, message.pass_id, None
        if known is None or known.pass_id != pass_id:
            kind = PassOnLane if order.active else Pass
            made = kind(self, context, pass_id, root, message.retain_graph, message.participants, answered)
            known = self._enter(context, made)
        if known is made:
            made.begin((message_id, gradients))
        else:
            self._hear_more(known, message_id, gradients, answered)
        if not answered:
            request.reply(PropagateGradientsReply(), lazy=True)

    def _announced(self, message: PropagateGradients, tensors: Any) -> list[Tensor | None] | None:
        """Not every tensor has a gradient: those that a message says there are."""
        count = len(tensors)
        gradients = take_present(message.present, tensors)
        if tensors:
            raise AutogradError(
                f"{count} gradients came for message {message.metadata.message_id} of context "
                f"{message.metadata.context_id}, but {sum(message.present)} were announced; they were not used"
            )
        return gradients

    def _hear_more(
        self, pass_: Pass, message_id: MessageId, gradients: Gradients | None, answered: tuple[Request, ...]
    ) -> None:
        """Gradients came for a pass that was known here."""
        for request in answered:
            pass_.answer_at_end(request)
        try:
            pass_.hear_and_run(message_id, gradients)
        except Exception as error:
            if not answered:
                raise
            pass_.fail(error)

    def check(self, context: Context, message_id: MessageId, sender: WorkerId, gradients: Gradients | None) -> None:
        """Raise unless these are gradients for what this worker sent to `sender` in that message."""
        send = context.sends.get(message_id)
        if send is None:
            raise AutogradError(
                f"worker {self.name_of(sender)!r} returned gradients for message {message_id} of context "
                f"{context.context_id}, which worker {self.agent.info.name!r} never sent; they were not used"
            )
        if send.peer != sender:
            raise AutogradError(
                f"worker {self.name_of(sender)!r} returned gradients for message {message_id} of context "
                f"{context.context_id}, which went to worker {self.name_of(send.peer)!r}; they were not used"
            )
        if gradients is not None:
            send.check(gradients)
        if _profiler_enabled():
            with torch.autograd.profiler.record_function(send.name()):
                pass

    def answer(self, request: Request, ended: Pass, carried: list[Carried]) -> None:
        """Tell the root that a pass is over here. What it `carried` goes along, and is taken out: nobody else holds
        these gradients then, so that their memory can go back."""
        if ended.error is not None:
            request.fail(ended.error)
            return
        tensors: list[Tensor] = []
        marks = []
        while carried:
            present, sent = to_send(carried[0][1])
            marks.append((carried.pop(0)[0], present))
            tensors += sent
            del sent  # the reply has to be the only one that holds them
        if order.active and getattr(ended, "lane", None) is not lanes.current_lane():
            lanes.adopt(tensors)  # the pass had ended before this was asked for, on other streams
        request.reply(PassDone((*ended.context.participants,), (*marks,)), Packed(b"", tensors))

    def serve_too_late(self, request: Request) -> None:
        """The handler of `TooLateForPass`."""
        message = request.message
        assert type(message) is TooLateForPass
        context = self.registry.get(message.metadata.context_id)
        if context is not None:
            self.check(context, message.metadata.message_id, request.caller.worker_id, None)
        if context is not None and context.came_too_late(message.metadata.message_id, message.pass_id):
            pass_ = context.latest
            if pass_ is not None and pass_.pass_id == message.pass_id:
                pass_.hear_and_run(message.metadata.message_id, None)
        request.reply(Ack(), lazy=True)

    def serve_abort(self, request: Request) -> None:
        """The handler of `AbortPass`."""
        message = request.message
        assert type(message) is AbortPass
        context = self.registry.get(message.context_id)
        request.reply(Ack())  # a notice has none, but whoever sends it as a request is not left waiting
        if context is None:
            return
        pass_ = context.latest
        said = text_of_stranger(message.text) if self.agent.layers.plain else message.text
        text = f"the backward pass failed on worker {message.worker!r}: {said}"
        error: Exception = AutogradError(text)
        if message.dead:
            error = WorkerDied(text, worker=message.dead, incarnation=message.incarnation)
            context.lose(error)
        if pass_ is not None and pass_.pass_id == message.pass_id:
            pass_.fail(error)

    def lost(self, member: Member) -> None:
        """A worker is gone: contexts it opened end, contexts it had a part in cannot be used any more."""
        for context in self.registry.contexts():
            if context.opened_by == member.worker_id:
                self.registry.end(context.context_id)
                continue
            pass_ = context.latest
            if member.worker_id in context.participants or (pass_ is not None and pass_.root == member.worker_id):
                self._spoil(context, member.name, member.incarnation)
                if context.opened_by != self.here:
                    # Perhaps only the dead knew that this worker has a part in it: then nobody would tell its end.
                    self.agent.io_threads.submit(partial(self._tell_opener, context, member))

    def _spoil(self, context: Context, dead: str, incarnation: int) -> None:
        text = f"worker {dead!r}, which had a part in it, is gone."
        error = WorkerDied(text, worker=dead, incarnation=incarnation)
        context.lose(error)
        pass_ = context.latest
        if pass_ is not None:
            pass_.fail(error)

    def _tell_opener(self, context: Context, dead: Member) -> None:
        opener = self.agent.directory.by_id(context.opened_by)
        if opener is not None and not self.agent.is_dead(opener) and not context.ended:
            self.agent.notify(opener, ParticipantDied(context.context_id, dead.name, dead.incarnation))

    def serve_participant_died(self, request: Request) -> None:
        """The handler of `ParticipantDied`, on the worker that opened the context."""
        message = request.message
        assert type(message) is ParticipantDied
        context = self.registry.get(message.context_id)
        request.reply(Ack())
        if context is not None:
            context.touch((request.caller.worker_id,))
            self._spoil(context, message.dead, message.incarnation)
        if context is None or context.ended:  # asked last: whoever ends it from here on tells all that it knows of
            self.agent.notify(request.caller, CleanupAutogradContext(message.context_id, (self.here,)))


def _ignore(slot: Slot) -> None:
    """A notice that fails concerns a worker that is gone, of which everyone hears by other means."""
