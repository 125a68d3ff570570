"""Exit statuses of the commands, which schedulers read, and the errors that decide them."""

# EX_TEMPFAIL of sysexits.h: a temporary failure, and the same command continues the run.
RESUME = 75
# Errors that a user can correct: one line and status 1. All others are defects and keep their traceback.
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


class Interrupted(SystemExit):
    """Early end of a run that the same command continues; its status is `RESUME`.

    Examples:
      >>> from infcl_jax.runtime.exit_codes import Interrupted
      >>> try:
      ...     raise Interrupted("the scheduler stopped the run after step 100")
      ... except Interrupted as interrupted:
      ...     print(interrupted.message)
      the scheduler stopped the run after step 100

    Attributes:
      message: one line that explains the end. The commands print it on stderr.
    """

    def __init__(self, message: str):
        super().__init__(RESUME)
        self.message = message

    def __str__(self) -> str:
        return self.message
