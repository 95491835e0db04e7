"""Remote references: values that live on one worker and are named from others.

lifetime       the protocol: how long an owner keeps a value
owner_ledger   decides for the owner of a value; pure
user_ledger    decides for the workers that name it; pure
references     feeds both and performs what they decide, for one agent
handles        the two ends of a reference: beside the value, and elsewhere
travel         a handle inside a message
reference      what users see: `RRef` and `remote`
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from telegrad.ids import WorkerId
from telegrad.rpc.agent import Agent
from telegrad.rpc.layer import Served
from telegrad.rref.closing import before_shutdown, debug_info
from telegrad.rref.reference import RRef, remote
from telegrad.rref.references import References, references_of
from telegrad.rref.serving import messages
from telegrad.rref.travel import let_go_unread, reduce_reference, settle_late_reply
from telegrad.wire.frames import Frame
from telegrad.wire.pickling.pickler import register_reducer

__all__ = ["RRef", "ReferenceLayer", "References", "debug_info", "install", "references_of", "remote"]

register_reducer(RRef, reduce_reference)


class ReferenceLayer(References):
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
