"""Remote references: values that live on one worker and are named from others.

lifetime       the protocol: how long an owner keeps a value
owner_ledger   decides for the owner of a value; pure
user_ledger    decides for the workers that name it; pure
references     feeds both and performs what they decide, for one agent
handles        the two ends of a reference: beside the value, and elsewhere
travel         a handle inside a message
reference      what users see: `RRef` and `remote`
"""

from functools import partial

from telegrad.rpc.agent import Agent
from telegrad.rref.closing import debug_info, install_hooks
from telegrad.rref.reference import RRef, remote
from telegrad.rref.references import References, references_of
from telegrad.rref.serving import register
from telegrad.rref.travel import let_go_unread, reduce_reference, settle_late_reply
from telegrad.wire.codec import register_reducer

__all__ = ["RRef", "References", "debug_info", "install", "references_of", "remote"]

register_reducer(RRef, reduce_reference)


def install(agent: Agent) -> None:
    """Put references on an agent."""
    references = References(agent)
    agent.extensions[References] = references
    register(references)
    install_hooks(references)
    agent.on_death.append(references.worker_lost)
    agent.on_late_reply.append(partial(settle_late_reply, references))
    agent.on_discard.append(let_go_unread)
