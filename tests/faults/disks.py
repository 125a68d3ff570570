"""Train through faults of the disk and print the outcome of each.

python -m tests.faults.disks

From the report of step 2 to that of step 4, metrics, settings, tokenizer and TensorBoard files cannot be written. The
fault "removed" deletes all but the checkpoints. The others raise the error of the kernel, since neither a full disk, a
remount nor, for root, file modes can be used in a test.
"""

import contextlib
import errno
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))  # as pytest does
ERRORS = {"full": errno.ENOSPC, "read_only": errno.EROFS, "permission": errno.EACCES}
FAULTS = ("removed", *ERRORS)

_refused: dict[str, int] = {}  # errno by folder


def _refuse(event, arguments):
    """Audit hook that refuses to open files for writing and to make folders."""
    if not _refused or event not in ("open", "os.mkdir", "os.rename", "os.remove"):
        return
    path = os.fspath(arguments[0]) if isinstance(arguments[0], str | os.PathLike) else ""
    writes = event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
    for folder, number in _refused.items():
        if writes and path.startswith(folder) and "checkpoints" not in path:
            raise OSError(number, os.strerror(number), path)


sys.addaudithook(_refuse)


@contextlib.contextmanager
def fault(name, workdir):
    """Damage the disk of a work directory, except for its checkpoints."""
    if name == "removed":
        for path in workdir.iterdir():
            if path.name != "checkpoints":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield
    else:
        number, write = ERRORS[name], os.write
        _refused[str(workdir)] = number

        def refuse(descriptor, data):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(workdir)):
                raise OSError(number, os.strerror(number))
            return write(descriptor, data)

        os.write = refuse
        try:
            yield
        finally:
            os.write = write
            del _refused[str(workdir)]


def train_through(name, workdir, until=4, **changes):
    """Train six steps with a fault from step 2 on.

    Args:
      name: one of `FAULTS`.
      workdir: directory of the run.
      until: step whose report ends the fault; None: it lasts to the end of the process.
      changes: changed settings.

    Returns:
      The steps in `metrics.jsonl`, and the lines of warnings.
    """
    import runs

    from infcl_jax import train
    from infcl_jax.run.loop import TrainLoop
    from infcl_jax.training import Checkpointer, read_metrics

    config = runs.config(**changes)
    config.evaluation.update(retrieval_dataset=None, zero_shot_dataset=None)
    report, stack = TrainLoop.report, contextlib.ExitStack()

    def damaged(self, step, *arguments):
        if step == 2:
            stack.enter_context(fault(name, workdir))
        if step == until:
            stack.close()
        return report(self, step, *arguments)

    output = io.StringIO()
    TrainLoop.report = damaged
    try:
        with stack, contextlib.redirect_stdout(output):
            train(config, workdir)
    finally:
        TrainLoop.report = report
    with Checkpointer(workdir) as checkpoints:
        assert checkpoints.latest_step() == config.total_steps
    steps = [line["step"] for line in read_metrics(workdir / "metrics.jsonl")]
    lines = [line.split("  ", 1)[1] for line in output.getvalue().splitlines()]  # without the time of day
    return steps, [line for line in lines if line.startswith("warning")]


def main():
    print("fault       lasts   outcome                metrics of steps     warnings")
    for name in FAULTS:
        for until in (4, None):
            with tempfile.TemporaryDirectory() as folder:
                steps, lines = train_through(name, Path(folder).resolve(), until, writers=("tensorboard",))
                lasts = "2 steps" if until else "to end"
                print(f"{name:11} {lasts:7} returns, saved step 6  {steps!s:20} {len(lines)}")
                print("".join(f"    {line}\n" for line in lines), end="")


if __name__ == "__main__":
    main()
