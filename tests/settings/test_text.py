"""Help, documentation and configuration files made from the table of settings."""

import re
from pathlib import Path

import runs

from configs import base, fastclip
from infcl_jax.settings import SETTINGS, format_help, format_markdown, format_python

ROOT = Path(__file__).resolve().parents[2]


def test_the_help_lists_every_setting_with_default_meaning_and_values():
    text = format_help()
    words = " ".join(text.split())
    for name, setting in SETTINGS.items():
        assert f"\n  --config.{name}={setting.default!r}\n" in text
        assert f"{setting.meaning} [{setting.allowed}]" in words
    assert max(map(len, text.splitlines())) <= 120


def test_the_page_of_settings_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == format_markdown(), "run python -m infcl_jax.settings > docs/settings.md"
    assert all(f"| `{name}` |" in page for name in SETTINGS)


def read(text):
    """The configuration of a Python file."""
    names = {}
    exec(text, names)
    return names["get_config"]()


def test_a_printed_configuration_reads_back():
    changes = {
        "optimizer.learning_rate_rules": (("visual/.*", 0.1), (".*", 1.0)),
        "frozen": ("text",),
        "implementation": "ring",
        "evaluation.gallery": 5,
        "model_overrides": "dtype='bfloat16'",
    }
    for config in (base.get_config(), runs.config(**changes), fastclip.get_config("medium")):
        text = format_python(config)
        assert read(text).to_json() == config.to_json()
        marked = re.findall(r"^    config\.(\S+) = .*  # default: ", text, flags=re.MULTILINE)
        assert set(marked) == {name for name, value in runs.flat(config).items() if value != SETTINGS[name].default}
