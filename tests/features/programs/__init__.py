"""The programs, by subject. Importing this fills the table."""

from tests.features.programs import aliases, checkpoints, control_flow, hooks, subclasses

ALL = (aliases, checkpoints, control_flow, hooks, subclasses)
