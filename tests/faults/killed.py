"""Run a command that kills itself with SIGKILL before its Nth rename of a temporary file of `replacing`.

python -m tests.faults.killed N MODULE [FLAG ...]
"""

import os
import re
import runpy
import signal
import sys

_, number, module, *arguments = sys.argv
rename, renames = os.replace, 0


def replace(source, target):
    global renames
    renames += re.fullmatch(r"\..*\.[0-9a-f]{32}(\.\w+)?", os.path.basename(source)) is not None
    if renames == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)


os.replace = replace
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
