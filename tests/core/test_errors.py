"""What errors show: one line that a terminal only prints."""

import pytest

from shoal.core.errors import LISTED, ShoalError, excerpt, unknown

MANY = [f"name{i:02}" for i in range(LISTED + 3)]


def test_control_codes_are_escaped_and_lines_kept():
    assert str(ShoalError("a \x1b[31m b\r\n  c \x85 \udcff é")) == "a \\x1b[31m b\\r\n  c \\x85 \\udcff é"


def test_an_excerpt_is_short_and_on_one_line():
    assert excerpt("a\nb\0c") == "a\\nb\\x00c"
    assert excerpt("x" * 5000, 2000) == "x" * 2000 + "…"


@pytest.mark.parametrize(
    ("name", "known", "remedy"),
    [
        ("cartpol", ["cartpole", "pendulum"], "did you mean 'cartpole'?"),
        ("zzz", ["cartpole", "pendulum"], "choose one of: cartpole, pendulum."),
        ("NoSuch-v1", ["Pusher-v4", "Reacher-v4"], "choose one of: Pusher-v4, Reacher-v4."),
        ("zzz", MANY, f"choose one of: {', '.join(MANY[:LISTED])} and 3 more."),
        ("zzz", [], "there is none to choose from."),
    ],
)
def test_an_unknown_name_gets_one_that_resembles_it_or_a_list(name, known, remedy):
    assert str(unknown("world", name, known)) == f"There is no world {name!r}; {remedy}"
