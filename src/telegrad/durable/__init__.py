"""Training that survives: a run over several workers, any of which may be killed at any moment.

snapshots   names for what is copied, and who has it
core        decides for the driver when a snapshot is committed, and what to return to; pure
holdings    decides for each worker what it has, and what comes too late; pure
states      how each kind of value gives its state and takes it back
part        one worker's values and snapshots
worker      the messages of the protocol, as functions called on a worker
driver      the shell around `core`
run         what a training loop sees: `Run`
serve       what the other workers' program does meanwhile
"""

from telegrad.durable.driver import Return
from telegrad.durable.durable_ref import DurableRef
from telegrad.durable.optimizer import DurableOptimizer
from telegrad.durable.run import Run
from telegrad.durable.serve import serve

__all__ = ["DurableOptimizer", "DurableRef", "Return", "Run", "serve"]


def __dir__() -> list[str]:
    return __all__  # what users use, and not the modules behind it
