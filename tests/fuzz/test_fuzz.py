"""A short form of `make fuzz`: nothing ends in a traceback, a hang or a crash."""

from tests.fuzz.readers import READERS
from tests.fuzz.run import FAILURES, fuzz

INPUTS = 260


def test_damaged_input_is_refused_in_one_sentence_or_works():
    share = INPUTS / sum(count for _, count in READERS.values())
    wanted = [(reader, number) for reader, (_, count) in READERS.items() for number in range(round(share * count))]
    counts, failures, leftovers = fuzz(wanted, seed=0, workers=1)
    assert not failures
    assert not leftovers
    assert sum(each["tried"] for each in counts.values()) == len(wanted)
    assert sum(each["intact"] for each in counts.values()) > len(wanted) / 4
    assert not any(each[verdict] for each in counts.values() for verdict in FAILURES)
