"""Write the sample of checks that the tests run: JSON lines, gzipped.

    python -m demo_training.write_fixture tests/data/demo_expected.jsonl.gz

A line holds `kind`, `messages` (the user's, in order) and `expected` (the answer to each, null where
it does not matter). The model is asked one message after the other, its own answers in between.
"""

import argparse
import gzip
import json
from pathlib import Path

from .checks import fixture_checks
from .entries import Dictionary, load_entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    records = [check.as_record() for check in fixture_checks(Dictionary(load_entries()))]
    text = "".join(json.dumps(record) + "\n" for record in records)
    args.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{len(records)} checks")


if __name__ == "__main__":
    main()
