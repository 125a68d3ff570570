"""Run commands in forks of one process that has imported their packages.

Importing them takes longer than most commands. The server never starts a JAX backend, so that forks are safe.

Each line on stdin is a JSON object: `module`, `arguments`, `cpu_devices`, `output` (files for stdout and stderr) and
`seconds`, after which the command is killed. Each line on stdout is the exit status of one command.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import sys

import jax

PACKAGES = ("experiments.command", *(f"infcl_jax.{name}" for name in ("data", "evaluation", "planner", "run.train")))
LATE = ("matplotlib.figure", "sklearn.datasets")  # imported by commands when they need them
for package in PACKAGES + LATE:
    importlib.import_module(package)
gc.collect()
gc.freeze()  # so that collections in forks copy no pages; each fork ends with one

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in enumerate(request["output"], 1):
            os.dup2(os.open(path, os.O_WRONLY), descriptor)
        signal.alarm(request["seconds"])
        if request["cpu_devices"]:
            jax.config.update("jax_num_cpu_devices", request["cpu_devices"])
        sys.argv = [request["module"], *request["arguments"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
