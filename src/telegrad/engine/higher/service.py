"""The messages of passes beyond the first order, and which tensors of this worker a pass asks the gradients of.

It is the engine of the agent under another class: same passes, same lock, other messages.
"""

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor

from telegrad.autograd.attach import record_recv
from telegrad.autograd.context import Context
from telegrad.autograd.functions import Gradients, SendNode
from telegrad.cuda import order
from telegrad.engine.higher.on_lane import RecordedPassOnLane, RecordedRootPassOnLane
from telegrad.engine.higher.passes import Recorded, RecordedPass, RecordedRootPass
from telegrad.engine.passes import Carried, Pass
from telegrad.engine.service import PassService
from telegrad.errors import AutogradError, ContextNotFound
from telegrad.ids import MessageId, PassId, WorkerId
from telegrad.rpc.futures import Future
from telegrad.rpc.request import Request
from telegrad.wire.codec import Packed
from telegrad.wire.messages import (
    AutogradMetadata,
    BeginPass,
    PassDone,
    PassDoneWithInputs,
    PropagateGradients,
    PropagateGradientsReply,
    WithGraph,
)

NOT_RECORDED = MessageId(-1)  # gradients without a graph leave no Send and no Recv


class Asked:
    """The tensors of this worker that one pass asks the gradients of. Guarded by the service's lock."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.futures: dict[int, Future[Tensor | None]] = {}
        self.error: BaseException | None = None  # why one of them is not available
        self.waiting: Recorded | None = None  # the pass that begins when all are known


class RecordingService(PassService):
    """The engine of one agent, for passes beyond the first order."""

    _asked: "weakref.WeakKeyDictionary[Context, dict[PassId, Asked]]"

    @classmethod
    def beside(cls, service: PassService) -> "RecordingService":
        """The other class of the same engine: they share all they have."""
        made = cls.__new__(cls)
        made.__dict__ = service.__dict__
        made._asked = weakref.WeakKeyDictionary()
        return made

    @staticmethod
    def of(service: PassService) -> "RecordingService":
        """The one beside the engine of an agent, made when it is first needed."""
        made = service.recording
        if made is None:
            with service._lock:
                if service.recording is None:
                    service.recording = RecordingService.beside(service)
                made = service.recording
        assert isinstance(made, RecordingService)
        return made

    # --- passes ---

    def next_pass_id(self) -> PassId:
        """An id for a pass whose root is here."""
        return next(self._pass_ids)

    def open_recorded(
        self,
        context: Context,
        pass_id: PassId,
        retain_graph: bool,
        timeout: float,
        create_graph: bool,
        inputs: Mapping[WorkerId, int] | None,
    ) -> RecordedRootPass:
        """A new pass whose root is here."""
        made = RecordedRootPassOnLane if order.active else RecordedRootPass
        pass_ = made(self, context, pass_id, retain_graph or create_graph, timeout)
        pass_.of_kind(create_graph, inputs)
        self._enter(context, pass_)
        return pass_

    def _join_recorded(
        self, context: Context, message: BeginPass | PropagateGradients, kind: WithGraph
    ) -> tuple[Recorded, bool]:
        made = RecordedPassOnLane if order.active else RecordedPass
        pass_ = made(self, context, message.pass_id, message.root, message.retain_graph, message.participants)
        pass_.of_kind(kind.create_graph, dict(kind.inputs) if kind.only_inputs else None)
        entered = self._enter(context, pass_)
        if not isinstance(entered, Recorded):
            raise AutogradError(f"backward pass {message.pass_id} was begun as one of another kind")
        return entered, entered is pass_

    # --- telling others ---

    def invite(self, pass_: Pass, worker: WorkerId) -> None:
        """Tell a worker of the pass without a gradient."""
        message = BeginPass(pass_.context.context_id, pass_.pass_id, pass_.root, pass_.retain_graph, pass_.named())
        self._send_of_kind(pass_, worker, message, [], NOT_RECORDED)

    def tell(self, pass_: Pass, worker: WorkerId, message_id: MessageId, gradients: Gradients | None) -> None:
        """Give the peer of a Recv its gradients, or tell it that none will come. With a graph, that is recorded."""
        assert isinstance(pass_, Recorded)
        given = [gradient for gradient in gradients or () if gradient is not None]
        recorded = self._record(pass_, worker, given) if pass_.create_graph else NOT_RECORDED
        message = PropagateGradients(
            AutogradMetadata(pass_.context.context_id, message_id),
            pass_.pass_id,
            pass_.root,
            pass_.retain_graph,
            pass_.named(),
            () if gradients is None else tuple([gradient is not None for gradient in gradients]),
        )
        tensors = [gradient.detach().requires_grad_(recorded >= 0 and gradient.requires_grad) for gradient in given]
        try:
            self._send_of_kind(pass_, worker, message, tensors, recorded)
        except BaseException:
            pass_.context.unsent.add(recorded)
            raise

    def _record(self, pass_: Pass, worker: WorkerId, gradients: Sequence[Tensor]) -> MessageId:
        differentiable = [gradient for gradient in gradients if gradient.requires_grad]
        if not differentiable:
            return NOT_RECORDED
        message_id = self.registry.next_message_id()
        pass_.context.touch((worker,))
        pass_.context.add_send(SendNode(message_id, worker, differentiable))
        return message_id

    def _send_of_kind(
        self,
        pass_: Pass,
        worker: WorkerId,
        message: BeginPass | PropagateGradients,
        tensors: list[Tensor],
        recorded: MessageId,
    ) -> None:
        assert isinstance(pass_, Recorded)
        inputs = () if pass_.inputs is None else tuple(pass_.inputs.items())
        whole = WithGraph(message, pass_.create_graph, pass_.inputs is not None, inputs, recorded)
        self._request(pass_, worker, whole, Packed(b"", tensors))

    # --- hearing from others ---

    def serve_with_graph(self, request: Request) -> None:
        """The handler of `WithGraph`."""
        kind = request.message
        assert type(kind) is WithGraph
        request.message = message = kind.message
        if type(message) is BeginPass:
            self._serve_begin_of_kind(request, message, kind)
        else:
            assert type(message) is PropagateGradients
            self._serve_gradients_of_kind(request, message, kind)

    def _serve_begin_of_kind(self, request: Request, message: BeginPass, kind: WithGraph) -> None:
        try:
            context = self.registry.join(message.context_id)
            context.touch((request.caller.worker_id,))
        except ContextNotFound:
            request.reply(PassDone((), ()))
            return
        pass_, is_new = self._join_recorded(context, message, kind)
        self._answer_when_due(request, message.root, pass_)
        if is_new:
            pass_.begin()

    def _serve_gradients_of_kind(self, request: Request, message: PropagateGradients, kind: WithGraph) -> None:
        context = self.registry.find(message.metadata.context_id)
        sender, message_id = request.caller.worker_id, message.metadata.message_id
        if kind.recorded != NOT_RECORDED:  # before anything can fail: its Send must hear in a later pass
            context.arrived_in_pass(kind.recorded, sender, message.pass_id)
        tensors = request.take_tensors()
        if kind.recorded != NOT_RECORDED:
            tensors = record_recv(context, sender, kind.recorded, tensors)
        if sum(message.present) != len(tensors):
            raise AutogradError(
                f"{len(tensors)} gradients came for message {message_id} of context {context.context_id}, but "
                f"{sum(message.present)} were announced; they were not used"
            )
        arrived = iter(tensors)
        gradients = [next(arrived) if there else None for there in message.present] if message.present else None
        self.check(context, message_id, sender, gradients)
        pass_, is_new = self._join_recorded(context, message, kind)
        pass_.own_messages.add(kind.recorded)
        from_root = self._answer_when_due(request, message.root, pass_)
        try:
            pass_.hear_and_run(message_id, gradients)
        except Exception as error:
            if not from_root:
                raise
            pass_.fail(error)
        if is_new:
            pass_.begin()

    def _answer_when_due(self, request: Request, root: WorkerId, pass_: Recorded) -> bool:
        """The root is answered at the end of the pass here, anyone else at once. Says whether it is the root's."""
        if request.caller.worker_id == root:
            pass_.answer_at_end(request)
            return True
        request.reply(PropagateGradientsReply(), lazy=True)
        return False

    def answer(self, request: Request, ended: Pass, carried: Sequence[Carried]) -> None:
        """Tell the root that a pass is over here, and which inputs have a gradient."""
        if ended.error is not None:
            request.fail(ended.error)
            return
        assert isinstance(ended, Recorded)
        done = PassDone(tuple(ended.context.participants), ())
        request.reply(PassDoneWithInputs(done, tuple(ended.captured)) if ended.has_inputs else done)

    # --- the tensors that `grad` asks of ---

    def ask_of(self, context: Context, pass_id: PassId, key: int, tensor: Tensor) -> Future[Tensor | None]:
        """A pass that comes, or has come, asks the gradient of a tensor here: a future of it."""
        future: Future[Tensor | None] = Future(what=f"a gradient of backward pass {pass_id}")
        future.add_done_callback(lambda _: None)  # if the pass fails, its root says so; nobody need ask for this
        with self._lock:
            asked = self._asked_of(context, pass_id)
            asked.tensors[key], asked.futures[key] = tensor, future
        self._begin_if_all_known(asked)
        return future

    def cannot_ask_of(self, context: Context, pass_id: PassId, error: BaseException) -> None:
        """One of the tensors a pass asks of is not available."""
        with self._lock:
            asked = self._asked_of(context, pass_id)
            asked.error = error
        self._begin_if_all_known(asked)

    def may_begin(self, pass_: Recorded) -> bool:
        """Whether a pass may begin: all tensors it asks of here are known. If not, it begins when they are."""
        if not pass_.has_inputs:
            return True
        with self._lock:
            asked = self._asked_of(pass_.context, pass_.pass_id)
            if asked.error is None and len(asked.tensors) < pass_.has_inputs:
                asked.waiting = pass_
                return False
        if asked.error is not None:
            pass_.fail(asked.error)
            return False
        return True

    def _begin_if_all_known(self, asked: Asked) -> None:
        with self._lock:
            pass_, asked.waiting = asked.waiting, None
        if pass_ is not None:
            pass_.begin()

    def wanted(self, pass_: Recorded) -> dict[int, Tensor]:
        """The tensors here that a pass asks of."""
        with self._lock:
            return dict(self._asked_of(pass_.context, pass_.pass_id).tensors)

    def settle(self, pass_: Recorded) -> None:
        """A pass has ended here: whoever asked for a gradient has it, or the error."""
        with self._lock:
            asked = self._asked.get(pass_.context, {}).pop(pass_.pass_id, None)
        for key, future in asked.futures.items() if asked is not None else ():
            if pass_.error is None:
                future.set_result(pass_.captured.get(key))
            else:
                future.set_exception(pass_.error)

    def _asked_of(self, context: Context, pass_id: PassId) -> Asked:
        """Under the lock."""
        return self._asked.setdefault(context, {}).setdefault(pass_id, Asked())
