"""The programs, by subject. Importing this fills the table."""

from tests.features.programs import aliases, checkpoints, control_flow, subclasses

ALL = (aliases, checkpoints, control_flow, subclasses)
