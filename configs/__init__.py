"""Run configurations, one Python file each.

Each has a `get_config()`. `base.py` explains every setting.
"""
