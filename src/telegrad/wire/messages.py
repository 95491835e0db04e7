"""Every message two workers exchange, as a frozen typed record. One line each says what it means.

A record holds ids and numbers only. A user's values travel beside it as the frame's payload (pickled, tensors taken
out) and its tensors as the frame's tensor table; control messages have neither, and nothing in them is ever pickled.
Decoding checks types and counts, so a record that exists is well-formed; whether an id names something, only the
receiver can know. What the ends of a connection tell each other about memory is in `block_notices.py`.
"""

import msgspec

from telegrad.ids import ContextId, ForkId, Incarnation, MessageId, PassId, PeerId, RRefId, WorkerId
from telegrad.wire.block_notices import AnyBlockNotice


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all records; on the wire a record is an array that starts with its tag."""


# --- calls ------------------------------------------------------------------------------------------------------------


class PythonCall(Message, frozen=True, tag=1):
    """Run a function; the payload holds (args, kwargs)."""

    function: int  # its number in the sender's table of functions for this link; 0: only in `definition`
    definition: bytes  # the function itself, the first time its number is used; later, what has changed for it


class PythonReply(Message, frozen=True, tag=2):
    """The function returned; the payload holds what."""


class ExceptionReply(Message, frozen=True, tag=3):
    """The request failed on `worker`; the payload holds the exception itself where it can be pickled, else nothing."""

    worker: str
    type_name: str
    text: str
    traceback: str


class PythonRemoteCall(Message, frozen=True, tag=4):
    """Run a function and keep what it returns as the value of a new reference; the reply confirms the caller's fork."""

    rref_id: RRefId
    fork_id: ForkId
    function: int
    definition: bytes


class Ack(Message, frozen=True, tag=5):
    """The request was carried out and there is nothing to return."""


# --- references -------------------------------------------------------------------------------------------------------


class RRefFetch(Message, frozen=True, tag=10):
    """Send me the value of this reference, as soon as it exists."""

    rref_id: RRefId


class RRefFetchReply(Message, frozen=True, tag=11):
    """The value of the reference that was asked for, in the payload."""


class RRefUserDelete(Message, frozen=True, tag=12):
    """These forks of references that you own are gone."""

    forks: tuple[tuple[RRefId, ForkId], ...]


class RRefForkRequest(Message, frozen=True, tag=13):
    """`holder` has this new fork of a reference that you own; keep the value for it."""

    rref_id: RRefId
    fork_id: ForkId
    holder: PeerId


class RRefChildAccept(Message, frozen=True, tag=14):
    """The owners know these forks that you sent here: you need not keep yours for them any longer."""

    fork_ids: tuple[ForkId, ...]


class RRefAck(Message, frozen=True, tag=15):
    """I own this reference and know of your fork."""

    rref_id: RRefId
    fork_id: ForkId


class RRefCreationFailed(Message, frozen=True, tag=18):
    """The request that should have created this reference never left me: whoever waits for the value gets an error."""

    rref_id: RRefId
    fork_id: ForkId


class RRefFlush(Message, frozen=True, tag=19):
    """A worker died. When you know it too, and have said all you had to say about forks from it, say `RRefFlushed`."""

    dead: PeerId


class RRefFlushed(Message, frozen=True, tag=50):
    """Everything I had to say about the dead worker's forks has been said; `forks` are those that were under way."""

    dead: PeerId
    forks: tuple[tuple[RRefId, ForkId], ...]


class RRefBackward(Message, frozen=True, tag=16):
    """Start a backward pass of this context at the value of this reference, which you own."""

    rref_id: RRefId
    context_id: ContextId
    retain_graph: bool


class RRefBackwardReply(Message, frozen=True, tag=17):
    """The backward pass that started at the reference is complete on all its workers."""


# --- autograd ---------------------------------------------------------------------------------------------------------


class AutogradMetadata(Message, frozen=True):
    """Which context a call or reply belongs to, and which Send and Recv it ties together."""

    context_id: ContextId
    message_id: MessageId


class RpcWithAutograd(Message, frozen=True, tag=20):
    """A call made inside a context; its tensors that require grad come from the Send named in the metadata. In a strict
    context, calls that the callee makes outside of it are an error there, too."""

    metadata: AutogradMetadata
    call: PythonCall | PythonRemoteCall | RRefFetch
    strict: bool


class RpcWithAutogradReply(Message, frozen=True, tag=21):
    """The reply of such a call, with every worker the call touched in that context."""

    metadata: AutogradMetadata
    reply: PythonReply | RRefFetchReply | Ack
    participants: tuple[WorkerId, ...]


class BeginPass(Message, frozen=True, tag=22):
    """A backward pass of this context has begun at `root`; take part, though there is no gradient for you here.
    `participants` are those who know. From the root, the reply comes when you are done."""

    context_id: ContextId
    pass_id: PassId
    root: WorkerId
    retain_graph: bool
    participants: tuple[WorkerId, ...]


class PropagateGradients(Message, frozen=True, tag=23):
    """Gradients for the tensors of the Send named in the metadata: the tensor table holds those marked in `present`; an
    empty `present` says that none will come. Begins the pass where it is not known yet. From the root, the reply comes
    when the receiver is done."""

    metadata: AutogradMetadata
    pass_id: PassId
    root: WorkerId
    retain_graph: bool
    participants: tuple[WorkerId, ...]
    present: tuple[bool, ...]


class WithGraph(Message, frozen=True, tag=66):
    """A message of a pass beyond the first order. Its gradients have a graph (`create_graph`), or are asked of some
    tensors only: `inputs` says of how many on each worker. `recorded`: the id under which the gradients in it left a
    Send, to be received like those of a call; -1 if they have no graph."""

    message: BeginPass | PropagateGradients
    create_graph: bool
    only_inputs: bool
    inputs: tuple[tuple[WorkerId, int], ...]
    recorded: MessageId


class TooLateForPass(Message, frozen=True, tag=51):
    """The message of the Send named in the metadata came when I had begun this pass: no gradient will come for it. This
    does not begin the pass. The reply is an Ack."""

    metadata: AutogradMetadata
    pass_id: PassId


class PropagateGradientsReply(Message, frozen=True, tag=28):
    """The gradients were taken."""


class PassDone(Message, frozen=True, tag=24):
    """I have heard all my Sends and run all my regions; `participants` are the workers I know of in this context.
    `gradients` for Sends of the root that had not left by then come along: the message of each, and which of its
    gradients are in the tensor table."""

    participants: tuple[WorkerId, ...]
    gradients: tuple[tuple[MessageId, tuple[bool, ...]], ...]


class PassDoneWithInputs(Message, frozen=True, tag=67):
    """A `PassDone`, and which of the tensors asked of this worker have a gradient, by their position."""

    done: PassDone
    found: tuple[int, ...]


class AbortPass(Message, frozen=True, tag=25):
    """The pass has failed on `worker`; give it up. If a participant died, `dead` names it, and the context is lost."""

    context_id: ContextId
    pass_id: PassId
    worker: str
    text: str
    dead: str  # empty if nobody did
    incarnation: int


class ParticipantDied(Message, frozen=True, tag=27):
    """You opened this context, in which I have a part, and so had a worker that died: you may know of neither."""

    context_id: ContextId
    dead: str
    incarnation: int


class CleanupAutogradContext(Message, frozen=True, tag=26):
    """This context has ended; forget it, and tell those you know of that are not among `told`."""

    context_id: ContextId
    told: tuple[WorkerId, ...]


class CleanupAutogradContexts(Message, frozen=True, tag=33):
    """The same of several contexts with the same participants, which ended shortly after one another."""

    contexts: tuple[ContextId, ...]
    told: tuple[WorkerId, ...]


class CleanupAutogradContextReply(Message, frozen=True, tag=29):
    """The context is forgotten here, or all of them are."""


# --- profiling --------------------------------------------------------------------------------------------------------


class RpcWithTrace(Message, frozen=True, tag=32):
    """A call made under an OpenTelemetry span, whose context is in `carrier`; it is answered as the call itself is."""

    method: str
    carrier: tuple[tuple[str, str], ...]
    call: PythonCall | PythonRemoteCall | RRefFetch | RpcWithAutograd


class RpcWithProfiling(Message, frozen=True, tag=30):
    """A call made under a profiler: profile it as well, with the same `options`, and return the events."""

    key: str  # what the call is named in the caller's profile
    options: int
    call: PythonCall | PythonRemoteCall | RRefFetch | RpcWithAutograd | RpcWithTrace


class RpcWithProfilingReply(Message, frozen=True, tag=31):
    """The reply of such a call, with the events of its profile as msgpack."""

    events: bytes
    reply: PythonReply | RRefFetchReply | Ack | RpcWithAutogradReply


# --- membership and the link itself -----------------------------------------------------------------------------------


class Ping(Message, frozen=True, tag=40):
    """Are you there? Answered by an Ack, or by any other message."""


class Exhausted(Message, frozen=True, tag=48):
    """What you ask waits: all my threads are taken, or I read no more until some of your requests are done. Neither, as
    two zeros, if I read on."""

    threads: int
    running: int  # requests of yours: the most I take


class Barrier(Message, frozen=True, tag=41):
    """I am at the barrier `key`; the reply comes when all are. `activity` counts what I ever sent and served."""

    key: str
    worker: str
    activity: int


class BarrierReply(Message, frozen=True, tag=42):
    """Everyone reached the barrier; `activity` is the sum over all workers."""

    activity: int
    missing: tuple[str, ...]


class Goodbye(Message, frozen=True, tag=45):
    """I am leaving on purpose; what you still ask of me will not be answered."""

    incarnation: Incarnation
    ending: str  # in words, if its program ended without calling shutdown; else empty


class DialBack(Message, frozen=True, tag=49):
    """Connect to me at the address I published, and answer with an Ack if that works."""


class DebugWaits(Message, frozen=True, tag=46):
    """Tell me what you are waiting for; the reply is a WaitsReply."""


class WaitsReply(Message, frozen=True, tag=47):
    """What a worker waits for, one line each, with the worker waited on where there is one."""

    waits: tuple[tuple[str, int], ...]


class CancelCall(Message, frozen=True, tag=64):
    """Nobody waits any more for the call sent on this link under `request_id`: stop it, if that can be done."""

    request_id: int


class GivenUp(Message, frozen=True, tag=65):
    """Which calls sent on your link does nobody wait for any more? I read no more of it. The reply names them."""

    link: int
    request_ids: tuple[int, ...]


class Observe(Message, frozen=True, tag=60):
    """Tell me about yourself: `what` says what, `data` is what that needs. Answered even if all threads are taken."""

    what: str
    data: bytes


class Observed(Message, frozen=True, tag=61):
    """What was asked for, as msgpack; nothing in it is pickled."""

    data: bytes


AnyMessage = (
    PythonCall
    | PythonReply
    | ExceptionReply
    | PythonRemoteCall
    | Ack
    | RRefFetch
    | RRefFetchReply
    | RRefUserDelete
    | RRefForkRequest
    | RRefChildAccept
    | RRefAck
    | RRefCreationFailed
    | RRefFlush
    | RRefFlushed
    | RRefBackward
    | RRefBackwardReply
    | RpcWithAutograd
    | RpcWithAutogradReply
    | BeginPass
    | PropagateGradients
    | PropagateGradientsReply
    | TooLateForPass
    | PassDone
    | PassDoneWithInputs
    | WithGraph
    | AbortPass
    | ParticipantDied
    | CleanupAutogradContext
    | CleanupAutogradContexts
    | CleanupAutogradContextReply
    | RpcWithProfiling
    | RpcWithProfilingReply
    | RpcWithTrace
    | Ping
    | Exhausted
    | Barrier
    | BarrierReply
    | Goodbye
    | DialBack
    | DebugWaits
    | WaitsReply
    | CancelCall
    | GivenUp
    | Observe
    | Observed
    | AnyBlockNotice
)

WITH_A_CALL = frozenset({RpcWithAutograd, RpcWithTrace, RpcWithProfiling})  # those that wrap another
DEFINING = frozenset({PythonCall, PythonRemoteCall})  # those that may define the function they call
