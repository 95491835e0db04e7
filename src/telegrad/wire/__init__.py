"""Bytes to messages and back. Pure: no sockets, threads or clocks."""
