"""Worker process that prepares scenes: reads requests from stdin and writes prepared scenes to files.

A process and not a thread, because parsing and tree building hold the GIL, which the training loop needs for every
kernel launch. It ends at the end of its stdin, so it never outlives its parent.
"""

import json
import sys
from pathlib import Path

import torch

from shoal.core.errors import ShoalError
from shoal.scene.cache import save_arrays
from shoal.scene.sources import prepare_unchecked, to_arrays


def serve() -> None:
    """Answer requests, one JSON object per line, until the end of stdin."""
    torch.set_num_threads(1)
    # Redirect prints of libraries to stderr: stdout carries only answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            packed = prepare_unchecked(request["source"], request["up"], request["scale"])
            save_arrays(Path(request["path"]), *to_arrays(packed))
            answer = {}
        except ShoalError as error:
            answer = {"error": str(error)}
        except Exception as error:  # affects one scene only; keep serving
            answer = {"error": f"{request['source']} could not be prepared: {type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    try:
        serve()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
