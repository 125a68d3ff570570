"""Gather from all processes repeatedly: the smallest program that needs its peers.

python -m tests.faults.collectives LOG_DIR LOST_PROCESS_TIMEOUT [FAILING_RANK | abort]

With `abort`, a process whose gather fails aborts, as native code of a collective can.
"""

import os
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from infcl_jax.runtime import distributed
from infcl_jax.runtime.process_watch import failures

folder, timeout, *failing = sys.argv[1:]
distributed.initialize(log_dir=folder, start_timeout=int(timeout), lost_process_timeout=int(timeout))
with failures():
    for number in range(1_000_000):
        try:
            multihost_utils.process_allgather(np.float32(number))
        except (ValueError, jax.errors.JaxRuntimeError):
            if failing == ["abort"]:
                os.write(2, b"terminate called after throwing an instance of 'gloo::IoException'\n")
                os.abort()
            raise
        if number == 0:
            print("running", flush=True)
        if number == 10 and failing == [str(jax.process_index())]:
            raise ValueError("expected a test, got an error")
        time.sleep(0.01)
