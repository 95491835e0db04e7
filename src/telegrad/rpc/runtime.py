"""What all links and sessions of one worker share: its threads, its timer, its options, the layers on it.

A link or a session knows this and the events it has to tell of, and nothing of the agent above it.
"""

import logging

from telegrad.rpc.devices import Placement
from telegrad.rpc.layer import Layers
from telegrad.rpc.options import RpcBackendOptions
from telegrad.rpc.threads.delayed_flush import DelayedFlush
from telegrad.rpc.threads.io_threads import IoThreads
from telegrad.rpc.threads.reply_events import ReplyEvents
from telegrad.rpc.threads.timer import Timer
from telegrad.rpc.trust.rate import LimitedLog
from telegrad.rpc.workers import WorkerInfo
from telegrad.transport.blocks.copying import Helpers
from telegrad.transport.stripes.threads import PartThreads


class Runtime:
    """The machinery of one agent. It is started before anything is sent, and closed last."""

    placement: Placement  # where its tensors go on other workers; the agent, which knows its own record, sets it

    def __init__(self, info: WorkerInfo, options: RpcBackendOptions) -> None:
        name = f"telegrad-{info.name}"
        self.info = info
        self.options = options
        self.layers = Layers()
        self.io_threads = IoThreads(name, options.num_worker_threads)
        self.reply_events = ReplyEvents(self.io_threads)
        self.helpers = Helpers(name)  # copy parts of large tensors
        self.part_threads = PartThreads(name)  # send and receive parts of large tensors
        self.timer = Timer(name)
        self.delayed_flush = DelayedFlush(self.timer)
        self.warnings = LimitedLog(logging.getLogger("telegrad.rpc"))  # of what peers do wrong
        self.calls_made = 0
        self.calls_served = 0
        self.closing = False  # nothing new is asked or served, and whoever is lost is not looked for
        # Seconds that another worker may be silent before it counts as dead, unless it is known to be busy.
        self.patience = 3 * max(options.heartbeat, 0.1) if options.heartbeat else options.connect_timeout

    def start(self) -> None:
        """Start the first threads."""
        self.io_threads.start()
        self.reply_events.start()
        self.timer.start()

    def close(self) -> None:
        """End the threads."""
        self.timer.close()
        self.io_threads.close()
        self.reply_events.close()
        self.helpers.close()
        self.part_threads.close()
