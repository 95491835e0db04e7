"""Whom a worker believes, and what it lets them do: secrets, sealed records, limits, exports, audit."""
