"""Configurations of runs, one Python file each, with `get_config()`; `base.py` explains every setting."""
