"""List the flags of OpenCLIP's training command, for tests/repository/test_openclip_flags.py.

Written with open_clip_torch 3.3.0:

    python tests/golden/make_open_clip_flags.py
"""

import argparse
import contextlib
import json
import pathlib

from open_clip_train.params import parse_args


def main() -> None:
    """Record what the parser adds."""
    flags, add_argument = [], argparse.ArgumentParser.add_argument

    def record(self, *names, **options):
        flags.extend(name for name in names if name.startswith("--") and name != "--help")
        return add_argument(self, *names, **options)

    argparse.ArgumentParser.add_argument = record
    with contextlib.suppress(SystemExit):
        parse_args([])
    path = pathlib.Path(__file__).with_name("open_clip_flags.json")
    path.write_text(json.dumps(sorted(flags), indent=1) + "\n")


if __name__ == "__main__":
    main()
