"""Run configurations, one Python file each.

Each has a `get_config()`. `base.py` has the defaults and `docs/settings.md` explains every setting.
"""
