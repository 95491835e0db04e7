"""Patterns of calls that programs need often, built from `rpc_async`: to many workers, many in one message."""
