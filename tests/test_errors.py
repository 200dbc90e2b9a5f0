"""What errors show: one line that a terminal only prints."""

from shoal.errors import ShoalError, excerpt, unknown


def test_control_codes_are_escaped_and_lines_kept():
    assert str(ShoalError("a \x1b[31m b\r\n  c \x85 \udcff é")) == "a \\x1b[31m b\\r\n  c \\x85 \\udcff é"


def test_an_excerpt_is_short_and_on_one_line():
    assert excerpt("a\nb\0c") == "a\\nb\\x00c"
    assert excerpt("x" * 5000, 2000) == "x" * 2000 + "…"


def test_a_name_without_alternatives_offers_none():
    assert str(unknown("group", "x", [])) == "There is no group 'x'; there is none to choose from."
    assert "did you mean 'cartpole'?" in str(unknown("world", "cartpol", ["cartpole", "pendulum"]))
