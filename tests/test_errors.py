"""Messages that all of Shoal shares."""

import pytest

from shoal.errors import LISTED, unknown

MANY = [f"name{i:02}" for i in range(LISTED + 3)]


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
