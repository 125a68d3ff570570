"""The table of OpenCLIP's flags is complete and names settings that exist."""

import json
import re
from pathlib import Path

from infcl_jax.settings import SETTINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "openclip_flags.md").read_text()
ROWS = re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \|", PAGE, re.MULTILINE)


def test_every_flag_has_one_row():
    flags = json.loads((ROOT / "tests" / "golden" / "open_clip_flags.json").read_text())
    assert sorted(flag for flag, _ in ROWS) == flags
    assert len(flags) == 90


def test_settings_exist():
    for flag, setting in ROWS:
        names = re.findall(r"`([^`]+)`", setting)
        assert names or setting in ("not needed", "no"), flag
        assert all(name in SETTINGS or name == "--workdir" for name in names), flag
