"""Every error Telegrad raises, as one tree. Each says who, what, and what to do next.

    TelegradError (RuntimeError)
    |-- NotInitialized            no agent runs in this process: call init_rpc first
    |-- AlreadyInitialized        init_rpc without shutdown in between
    |-- RendezvousError           the workers did not find each other, or clash
    |-- ShutdownError             a graceful shutdown could not complete: says who is missing
    |-- UnknownWorker (ValueError)         no such name, rank or id
    |-- InvalidName (ValueError)  what was given cannot be the name of a worker
    |-- RpcTimeout (TimeoutError)  a deadline passed: names what was waited for
    |-- CallCancelled             by `Future.cancel`, or by cancelling what awaited the call
    |-- WorkerDied (ConnectionError)       a worker closed or fell silent: says what it was asked
    |-- AuthenticationError       a peer did not prove that it knows the job's secret
    |-- SealBroken (ConnectionError)       a piece of a large tensor is not what its sender sealed
    |-- ProtocolError             a peer sent what is no message; that connection is closed
    |-- CallRefused (PermissionError)      a worker's rules forbid what was asked: names the rule
    |   `-- TooManyCalls          more in a second than it allows: the same may be asked later
    |-- SerializationError (TypeError)     a function, argument or result cannot be sent
    |-- RemoteError               a remote exception whose own type could not be rebuilt here
    |-- RRefError                 a reference was used in a way, place or time it cannot serve
    |-- DurableError              training that survives
    |   |-- NotRestored (WorkerDied)       a worker came back, its durable values have not yet
    |   |-- RunSuperseded         a message of a step, or of a driver, that was given up
    |   `-- StateLost             an owner died with all who kept its state: names it
    `-- AutogradError             contexts and backward passes
        |-- ContextNotFound       the id never existed here, or its context has ended
        |-- ContextFailed (WorkerDied)     the context lost a participant: names it
        `-- GradientMismatch      a gradient does not fit the tensor it belongs to

    GradientsEndHere (UserWarning)         a result that requires grad, outside any context

What is in brackets is a second base: a builtin, so that a program written for `except TimeoutError`, or for the
RuntimeError that torch raises, keeps working; or an error that calls for the same answer. An exception raised by a
user's function on another worker arrives as its own type wherever that can be rebuilt; only what cannot be becomes
`RemoteError`.
"""


class GradientsEndHere(UserWarning):
    """A result that requires grad came from a call outside any context: no gradient will go back to its owner."""


class TelegradError(RuntimeError):
    """Base of all errors that are Telegrad's own."""


class NotInitialized(TelegradError):
    """No agent runs in this process."""


class AlreadyInitialized(TelegradError):
    """`init_rpc` was called while an agent is still running in this process."""


class RendezvousError(TelegradError):
    """The workers did not find each other before the deadline, or two of them clash."""


class ShutdownError(TelegradError):
    """A graceful shutdown ended at its deadline; the agent is down all the same."""


class UnknownWorker(TelegradError, ValueError):
    """No worker of that name, rank or id belongs to the job."""


class InvalidName(TelegradError, ValueError):
    """This cannot be the name of a worker."""


class RpcTimeout(TelegradError, TimeoutError):
    """A deadline passed before what was waited for arrived."""


class CallCancelled(TelegradError):
    """Nobody waits for the call any more, because its caller said so."""


class WorkerDied(TelegradError, ConnectionError):
    """A worker closed its connection or fell silent while something waited on it."""

    def __init__(self, message: str, *, worker: str = "", incarnation: int = 0) -> None:
        super().__init__(message)
        self.worker = worker
        self.incarnation = incarnation

    def again(self) -> "WorkerDied":
        """The same error, to be raised anew: one that is kept must not collect the frames of all it is raised to."""
        return _rebuild_worker_died(type(self), str(self), self.worker, self.incarnation)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_worker_died, (type(self), str(self), self.worker, self.incarnation)


def _rebuild_worker_died(kind: type[WorkerDied], message: str, worker: str, incarnation: int) -> WorkerDied:
    return kind(message, worker=worker, incarnation=incarnation)


class AuthenticationError(TelegradError):
    """A peer could not prove that it knows the job's secret."""


class SealBroken(TelegradError, ConnectionError):
    """What came for a large tensor is not what the peer has encrypted. That connection is closed, as one that was lost
    is: what it carried is sent again over the next."""


class ProtocolError(TelegradError):
    """A peer sent bytes that are not a valid message."""


class CallRefused(TelegradError, PermissionError):
    """A worker that runs exported functions alone does not do what was asked; the text names the rule."""


class TooManyCalls(CallRefused):
    """More was asked of it in a second than it allows this worker; what was refused may be asked again later."""


class SerializationError(TelegradError, TypeError):
    """A function, argument or result cannot be sent to another worker."""

    of_result = False  # on its way to the caller, who knows what function it was
    of_script = False  # the same, of what functions of the caller's script take along, which has not been taken in


class RemoteError(TelegradError):
    """A function failed on another worker with an exception whose type cannot be rebuilt here."""


class RRefError(TelegradError):
    """A remote reference was used in a way, place or time it cannot serve."""


class DurableError(TelegradError):
    """Base of what goes wrong with durable values and the runs they belong to."""


class NotRestored(DurableError, WorkerDied):
    """A durable value is not available now: its owner was started again, or is returning to an earlier state.

    Whoever starts a step again does so for this as well; inside `run.step()` that happens by itself."""


class RunSuperseded(DurableError):
    """What was asked belongs to a part of the run, or to a driver, that was given up."""


class StateLost(DurableError):
    """A worker died, all who kept copies of its state died with it, and none is on disk. The run cannot go on."""


class AutogradError(TelegradError):
    """Base of what goes wrong with contexts and backward passes."""


class ContextNotFound(AutogradError):
    """The context id never existed on this worker, or the context has ended."""


class ContextFailed(AutogradError, WorkerDied):
    """The context lost a participant and can no longer be used. Whoever starts a step again does so for both."""


class GradientMismatch(AutogradError):
    """A gradient does not fit the tensor it belongs to: number, shape, dtype or device."""
