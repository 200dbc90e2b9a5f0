"""A process that prepares scenes: the module, executed as a program, reads requests and answers with files.

A process and not a thread, since parsing and building hold Python's lock, which the program that trains needs for
every launch. It ends when its input does, so it never outlives the program that started it.
"""

import json
import sys
from pathlib import Path

import torch

from shoal.core.errors import ShoalError
from shoal.scene.cache import save_arrays
from shoal.scene.sources import fetch, to_arrays


def serve() -> None:
    """Answer requests, one JSON object a line, until there are no more."""
    torch.set_num_threads(1)
    # What libraries print must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            packed = fetch(request["source"], request["up"], request["scale"])
            save_arrays(Path(request["path"]), *to_arrays(packed))
            answer = {}
        except ShoalError as error:
            answer = {"error": str(error)}
        except Exception as error:  # one scene of many: the others go on
            answer = {"error": f"{request['source']} could not be prepared: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
