"""Text of files and datasets for terminals and logs."""

import logging
import os
import re
import sys
import warnings

# Control characters (C0, DEL, C1), line and paragraph separators, marks and overrides of the writing direction, which
# reorder what a terminal shows (CVE-2021-42574), and surrogates, which no stream encodes.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(line: str) -> str:
    r"""Escape what would move the cursor, start a line or color a terminal.

    Examples:
      >>> printable("caption \x1b[2J of\nanother line")
      'caption \\x1b[2J of\\nanother line'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), line)


def one_line(error: BaseException) -> str:
    """Format the message of an error as one escaped line."""
    return printable(" ".join(str(error).split()))


def write_last_line(line: str, descriptor: int | None = None) -> None:
    """Write an escaped line to a descriptor or stderr at once, from any thread of a process that ends.

    Python's buffers are left out, and other processes cannot interrupt the line.
    """
    os.write(sys.stderr.fileno() if descriptor is None else descriptor, f"{printable(line)}\n".encode())


def escape_log_records(package: str) -> None:
    """Escape the messages that the loggers of a package log, whatever handler prints them."""
    create = logging.getLogRecordFactory()

    def create_escaped(name: str, *args: object, **kwargs: object) -> logging.LogRecord:
        record = create(name, *args, **kwargs)
        if name.partition(".")[0] == package:
            record.msg, record.args = printable(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(create_escaped)


def escape_warnings() -> None:
    """Escape the messages of Python warnings, which may name files and datasets."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda message, *args, **kwargs: plain(printable(str(message)), *args, **kwargs)
