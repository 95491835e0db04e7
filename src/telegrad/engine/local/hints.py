"""What to do about errors of torch that a pass meets, where the reason lies in how passes work."""

_HINTS = {
    "modified by an inplace operation": (
        "If an optimizer changed parameters between a forward and its backward: another context stepped meanwhile. "
        "Give each context the parameters as it found them: wrap the module on the worker that owns it in "
        "telegrad.nn.SharedModule, or let one trainer at a time go from its forward to its step (docs/training.md)."
    ),
    "_will_engine_execute_node": (
        "register_multi_grad_hook over a leaf and other tensors takes it that one run of torch's engine visits all of "
        "them. This worker's part of the pass runs in several, because it was called several times in the context. "
        "Register the hook on leaves alone, or use register_post_accumulate_grad_hook and register_hook."
    ),
}


def add_hint(error: BaseException) -> None:
    """Add to an error what its reader could not know."""
    text = str(error)
    for words, hint in _HINTS.items():
        if words in text and hint not in getattr(error, "__notes__", ()):
            error.add_note(hint)
