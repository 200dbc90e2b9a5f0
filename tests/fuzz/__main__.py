"""Fuzz everything that reads files or settings: damaged input is refused in one sentence, or works.

make fuzz                                          20,000 inputs, about half an hour on two cores
python -m tests.fuzz --inputs 1000 --seed 2        fewer, and others
python -m tests.fuzz --only "config.json 17"       one input again, with what was said
python -m tests.fuzz --readers glTF OBJ            some readers
"""

import argparse
import sys
from pathlib import Path

from tests.fuzz.readers import READERS
from tests.fuzz.run import fuzz, table


def main() -> int:
    """Print counts for each reader; 0 if nothing ended in a traceback, a hang or a crash."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=20_000, help="how many in all (default: 20000)")
    parser.add_argument("--seed", type=int, default=1, help="which inputs (default: 1)")
    parser.add_argument("--readers", nargs="+", choices=READERS, default=list(READERS), metavar="READER")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--only", metavar="'READER NUMBER'", help="one input, again")
    parser.add_argument("--out", type=Path, help="write all failures to this file")
    options = parser.parse_args()
    if options.only:
        reader, _, number = options.only.rpartition(" ")
        wanted = [(reader, int(number))]
    else:
        total = sum(READERS[reader][1] for reader in options.readers)
        shares = {reader: -(-READERS[reader][1] * options.inputs // total) for reader in options.readers}
        wanted = [(reader, number) for reader, count in shares.items() for number in range(count)]
    counts, failures, leftovers = fuzz(wanted, options.seed, options.workers, show=sys.stderr.isatty())
    shown = [f"\n{f['verdict']}: {f['reader']} {f['number']}: {f['label']}\n{f['detail']}" for f in failures]
    if options.out:
        options.out.write_text("\n".join(shown))
    print("\n".join(shown[:20]))
    print(table(counts))
    if leftovers:
        print(f"left behind: {', '.join(leftovers)}")
    return 1 if failures or leftovers else 0


if __name__ == "__main__":
    sys.exit(main())
