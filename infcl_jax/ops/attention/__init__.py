"""Multi-head attention over short sequences."""
