"""The programs, by subject. Importing this fills the table."""

from tests.features.programs import (
    aliases,
    checkpoints,
    control_flow,
    functions,
    hooks,
    machinery,
    modules,
    subclasses,
    values,
)

ALL = (aliases, checkpoints, control_flow, functions, hooks, machinery, modules, subclasses, values)
