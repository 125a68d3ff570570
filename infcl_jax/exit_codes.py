"""Exit statuses of the commands, for schedulers that decide whether to start a run again."""

# EX_TEMPFAIL of sysexits.h: a temporary failure, and the same command continues the run.
RESUME = 75
