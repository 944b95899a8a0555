"""Run several programs in one process, or in each process of a job: `torchrun -m tests.helpers.programs_in_turn FILE`.

FILE is a JSON list of their command lines. PyTorch is imported once for all of them.
"""

import json
import sys
from pathlib import Path

from tests.conftest import run_program

if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[1]).read_text()):
        run_program(*words)
