"""Remote references: values that live on one worker and are named from others.

ledger         the protocol (`lifetime`), and what decides by it for the owner of a value and for its users; pure
rref_context   feeds both ledgers and performs what they decide, for one agent
handles        the two ends of a reference: beside the value, and elsewhere
travel         a handle inside a message
rref           what users see: `RRef` and `remote`
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from telegrad.ids import WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Served
from telegrad.rref.closing import before_shutdown, debug_info
from telegrad.rref.rref import RRef, remote
from telegrad.rref.rref_context import RRefContext, rrefs_of
from telegrad.rref.serving import messages
from telegrad.rref.travel import let_go_unread, reduce_reference, settle_late_reply
from telegrad.wire.frames import Frame
from telegrad.wire.pickling.pickler import register_reducer

__all__ = ["RRef", "RRefContext", "ReferenceLayer", "debug_info", "install", "remote", "rrefs_of"]

register_reducer(RRef, reduce_reference)


class ReferenceLayer(RRefContext):
    """The references of an agent, with all that they answer and take part in."""

    def messages(self) -> Mapping[type[Any], Served]:
        """Creations, fetches, and the protocol of lifetimes."""
        return messages(self)

    def on_late_reply(self, frame: Frame, sender: WorkerId) -> None:
        """References in it were counted for this worker."""
        settle_late_reply(self, frame, sender)

    def on_discard(self, payload: Any, tensors: list[Tensor]) -> None:
        """The same of what cannot be unpacked."""
        let_go_unread(payload, tensors)

    def before_shutdown(self) -> None:
        """Let go of what is held of others, and report what they hold of this worker."""
        before_shutdown(self)


def install(agent: Agent) -> None:
    """Put references on an agent."""
    agent.install(ReferenceLayer(agent))
