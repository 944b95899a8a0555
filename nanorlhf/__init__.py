"""RLHF with nothing hidden. docs/stability.md says what stays as it is, and until when."""

import os
import sys

# our figures go to files only; a name that matplotlib does not know would end the program
if "MPLBACKEND" in os.environ and "ipykernel" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"

__version__ = "1.0.0"
