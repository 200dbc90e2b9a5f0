"""A process that reads inputs: a line `READER NUMBER` comes in, a line of JSON with the verdict goes out."""

import io
import json
import os
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import shoal
import shoal.cli
import shoal.runs.session
from shoal.core.errors import ShoalError
from tests.fuzz.readers import Input, make_input

FINE, REFUSED, TRACEBACK = "fine", "refused", "traceback"

PLAYED_STEPS = 3
"""Steps of an evaluation that are played."""


SMALL_ITERATION = 64
"""Env steps of an iteration that is made."""


class Began(BaseException):
    """Everything is read and the work begins: no more is wanted of this input."""


def judge(given: Input) -> tuple[str, str]:
    """Read one input: fine, refused in one sentence, or anything else, and what was said."""
    said, output = io.StringIO(), io.StringIO()
    code: Any = 0
    with redirect_stderr(said), redirect_stdout(output), warnings.catch_warnings():
        try:
            if isinstance(given.read, list):
                code = shoal.cli.main(given.read)
            else:
                result = given.read()
                code = result if isinstance(result, int) else 0
        except Began:
            return FINE, "began"
        except ShoalError as error:
            code = error.exit_code
            print(f"shoal: {error}", file=said)
        except SystemExit as stop:
            if not said.getvalue() and not output.getvalue():
                return TRACEBACK, f"SystemExit({stop.code}) without a word"
            return (REFUSED, "usage") if stop.code == 2 else (TRACEBACK, f"SystemExit({stop.code})")
        except BaseException:
            return TRACEBACK, traceback.format_exc()
    text = said.getvalue()
    lines = text.splitlines()
    sentences = [line for line in lines if line.startswith("shoal: ")]
    if "Traceback" in text:
        return TRACEBACK, text
    if code == 0:
        return (TRACEBACK, f"exit code 0 after an error: {text}") if sentences else (FINE, text[-300:])
    after = lines[lines.index(sentences[0]) + 1 :] if sentences else []
    if code != 2 or len(sentences) != 1 or any(not line.startswith("  ") for line in after):
        return TRACEBACK, f"exit code {code}, not one sentence: {text[-3000:]}"
    return REFUSED, sentences[0]


def stop_where_work_begins() -> None:
    """Training ends after its first iteration, evaluations after a few steps, and no processes are launched."""
    evaluate = shoal.runs.session.evaluate

    def watched(*given: Any, **more: Any) -> Any:
        steps = []

        def watch(world: Any, playing: Any) -> None:
            steps.append(1)
            if len(steps) > PLAYED_STEPS:
                raise Began

        return evaluate(*given, **(more | {"watch": watch}))

    for trainer in (shoal.runs.session.Trainer, shoal.runs.session.SharedTrainer):
        mock.patch.object(trainer, "iterate", partialmethod(_iterate_once, trainer.iterate)).start()
    mock.patch("shoal.runs.start.launch", mock.Mock(side_effect=Began)).start()
    mock.patch("shoal.runs.session.evaluate", watched).start()


def _iterate_once(trainer: Any, iterate: Any) -> None:
    """One iteration, where it is small: a state that was read is used."""
    if trainer.job.run.steps_per_iteration <= SMALL_ITERATION:
        iterate(trainer)
    raise Began


def main(seed: int, base: Path, folder: Path) -> None:
    """Read inputs until no more come."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    stop_where_work_begins()
    for line in sys.stdin:
        reader, _, number = line.rpartition(" ")
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = make_input(reader, int(number), seed, base, folder)
        verdict, detail = judge(given)
        row = dict(verdict=verdict, detail=detail, label=given.label[:500], intact=given.intact)
        print(json.dumps(row), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
