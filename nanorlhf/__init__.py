"""RLHF with nothing hidden. docs/stability.md lists what stays stable, and until when."""

import os
import sys

# figures are only written to files, and matplotlib stops the program at an unknown backend
if "MPLBACKEND" in os.environ and "ipykernel" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"

__version__ = "1.0.0"
