"""TensorBoard event files of scalars."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infcl_jax.runtime.outputs import AppendFile, Outputs


class EventFile:
    """Append scalars to a new event file, as `tensorboardX.SummaryWriter` would.

    That class writes in a thread, which ends at the first error of the disk; from the eleventh event on, the training
    loop would then wait forever. Here every write is synchronous, and errors are those of `AppendFile`.
    """

    def __init__(self, folder: str | os.PathLike[str], resume_step: int | None, outputs: Outputs) -> None:
        """Create the file.

        Args:
          folder: folder of event files, created if missing.
          resume_step: last step of earlier files to show; None: all.
          outputs: handling of write errors.

        Raises:
          ImportError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ImportError(
                "expected tensorboardX for the writer 'tensorboard', found none; pip install tensorboardX, or remove "
                "it from writers"
            ) from error
        self._event, self._scalar, self._checksum = event_pb2.Event, summary.scalar, record_writer.masked_crc32c
        header = [self._event(wall_time=time.time(), file_version="brain.Event:2")]
        if resume_step is not None:  # TensorBoard hides events from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            header.append(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))
        path = Path(folder, f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}")
        self._file = AppendFile(path, outputs, header=b"".join(map(self._record, header)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the scalars of a step.

        Args:
          step: training step.
          scalars: values by name.
        """
        now = time.time()
        events = [self._event(wall_time=now, step=step, summary=self._scalar(name, v)) for name, v in scalars.items()]
        self._file.write(b"".join(map(self._record, events)))

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, event: Any) -> bytes:
        """Encode an event as a TFRecord: length, its checksum, data, checksum."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", self._checksum(content)) for content in (length, data))
        return length + next(checksums) + data + next(checksums)
