"""The process of a run: start, signals, files, console and caches."""
