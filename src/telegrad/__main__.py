"""`python -m telegrad` is the command `telegrad`."""

import sys

from telegrad.cli import main

sys.exit(main())
