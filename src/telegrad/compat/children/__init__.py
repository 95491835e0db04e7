"""How child processes come along: a folder to put on PYTHONPATH, whose `sitecustomize` Python runs when it starts."""

import os

CHILDREN = os.path.dirname(os.path.abspath(__file__))
VARIABLE = "TELEGRAD_COMPAT"
