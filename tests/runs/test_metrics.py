"""Rows of metrics.jsonl and eval.jsonl: damaged ones are counted and skipped, good ones stay byte by byte."""

import json
import warnings

import pytest

from shoal.core.errors import FileError
from shoal.runs import files
from shoal.runs.folder import ROWS
from shoal.runs.metrics import MetricsWriter, append_row, read_rows, trim_rows
from shoal.view.plot import plot_runs

METRICS, SCORES = "metrics.jsonl", "eval.jsonl"

SCORE = {"mean": 3.5, "std": 0.5, "episodes": 2, "length": 3.5, "interval": [1.0, 6.0]}
GOOD = {
    METRICS: {"steps": 0, "rollout/ep_rew_mean": 1.5, "train/loss": None},
    SCORES: {"steps": 0, "mean": 3.5, "groups": {"cart": SCORE}, "reports": {}},
}

DAMAGED = [b"{", b"[]", b"3", b"null", b"\0" * 50, b"\xff\xfe", b"[" * 100_000, b'{"steps": 1' + b"0" * 5000 + b"}"]
NO_NUMBERS = ["true", "1e400", "-1e400", "NaN", "9" * 400, '"1"', "[]", "{}"]
NO_STEPS = [*NO_NUMBERS, "-1", "1.0", "9223372036854775808", "null"]
BAD_VALUES = {
    METRICS: {"steps": NO_STEPS, "rollout/ep_rew_mean": NO_NUMBERS},
    SCORES: {"steps": NO_STEPS, "mean": [*NO_NUMBERS, "null"], "groups": [*NO_STEPS, '{"cart": 1}', '{"cart": {}}']},
}
REQUIRED = {METRICS: ["steps"], SCORES: ["steps", "mean", "groups"]}


def lines_of(name: str, count: int) -> list[bytes]:
    return [json.dumps({**GOOD[name], "steps": 10 * i}).encode() for i in range(count)]


def damaged_lines(name: str):
    """Lines that are no rows: damaged text, rows with another value, and rows that lack one."""
    yield from DAMAGED
    for key, values in BAD_VALUES[name].items():
        for value in values:
            yield json.dumps({**GOOD[name], key: "HERE"}).replace('"HERE"', value).encode()
    for absent in REQUIRED[name]:
        yield json.dumps({key: value for key, value in GOOD[name].items() if key != absent}).encode()


@pytest.mark.parametrize("name", [METRICS, SCORES])
def test_damaged_lines_are_counted_and_no_good_line_is_lost(tmp_path, name):
    path, good = tmp_path / name, lines_of(name, 20)
    for line in damaged_lines(name):
        path.write_bytes(b"\n".join([*good[:2], line, *good[2:]]))
        with pytest.warns(UserWarning, match=f"{name}: 1 of 21 lines are damaged and skipped"):
            rows = read_rows(path, ROWS[name])
        assert [row["steps"] for row in rows] == list(range(0, 200, 10)), line
        trim_rows(path, ROWS[name], 100)
        assert path.read_bytes() == b"".join(kept + b"\n" for kept in [*good[:2], line, *good[2:11]])


@pytest.mark.parametrize("name", [METRICS, SCORES])
def test_every_single_flipped_bit_costs_at_most_two_lines(tmp_path, name):
    """Two if it is the end of a line."""
    path, good = tmp_path / name, lines_of(name, 3)
    whole = b"".join(line + b"\n" for line in good)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bit in range(0, 8 * len(whole), 7):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            assert len(read_rows(path, ROWS[name])) >= 1
            trim_rows(path, ROWS[name], 10**18)
            assert path.read_bytes().replace(b"\n", b"") == bytes(data).replace(b"\n", b"")


def test_a_run_with_odd_rows_is_drawn(tmp_path):
    """Names that matplotlib would read as formulas, large numbers, and no numbers at all."""
    names = ["rollout/$x_{/ep_rew_mean", "rollout/\ud800/ep_rew_mean", "ep_rew_mean", "rollout/ep_rew_mean"]
    rows = [{"steps": steps, name: value} for name in names for steps, value in ((0, 1e100), (2**63 - 1, -1e100))]
    rows += [{"steps": 1, "rollout/nothing/ep_rew_mean": None}]
    rows += [{"steps": 2, f"rollout/{i}/ep_rew_mean": 1.0} for i in range(1000)]
    run = tmp_path / "a $run"
    run.mkdir()
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_runs([run]).stat().st_size > 0


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    MetricsWriter(tmp_path, pytest.fail).write(5, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert read_rows(tmp_path / METRICS, ROWS[METRICS]) == [{"steps": 5, "a": None, "b": None, "c": 1.0}]


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path, monkeypatch):
    path = tmp_path / METRICS
    append_row(path, {"steps": 1})
    write, parts = files.os.write, []

    def half(handle, data):
        if parts:
            raise OSError(28, "No space left on device")
        parts.append(data)
        return write(handle, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", half)
        with pytest.raises(FileError, match=r"metrics\.jsonl cannot be written: No space left"):
            append_row(path, {"steps": 2})
    assert path.read_text() == '{"steps": 1}\n'


def test_a_full_disk_is_warned_of_once_in_sequence(tmp_path, monkeypatch):
    said = []
    writer = MetricsWriter(tmp_path, said.append)
    (tmp_path / METRICS).mkdir()
    writer.write(1, {})
    writer.write(2, {})
    (tmp_path / METRICS).rmdir()
    writer.write(3, {})
    assert len(said) == 1
    assert [row["steps"] for row in read_rows(tmp_path / METRICS, ROWS[METRICS])] == [3]


def test_a_file_that_is_too_large_is_refused_at_once(tmp_path):
    with (tmp_path / METRICS).open("w") as file:
        file.truncate(2**40)
    with pytest.raises(FileError, match="more than"):
        read_rows(tmp_path / METRICS, ROWS[METRICS])
