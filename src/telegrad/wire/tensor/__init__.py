"""A tensor as bytes and back: what describes it, which memory travels, and how it is put together on arrival."""
