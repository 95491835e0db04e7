"""Where workers meet: the rendezvous store, the log of members in it, and what happens when its host ends."""
