"""Training of a run: what `infcl_jax.train` and `experiments.train` call."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from infcl_jax.data import TrainIterator
from infcl_jax.data.dataset_identity import check_same_data, dataset_identity, same_place
from infcl_jax.data.workers import WorkerLost, WorkersCannotStart, check_guard
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER
from infcl_jax.models.registry import MODEL_FILE
from infcl_jax.run.base import Run
from infcl_jax.run.batches import Batches, LostWorkers
from infcl_jax.run.build import build_run, start_devices
from infcl_jax.run.callbacks import Callback, Callbacks
from infcl_jax.run.loop import COMPILING, TrainLoop, announce, conclude, evaluates, is_evaluated
from infcl_jax.run.model import save_base_model, saved_config
from infcl_jax.runtime.console import say
from infcl_jax.runtime.environment import ENVIRONMENT_FILE, record_start
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.process_watch import fail, failures
from infcl_jax.runtime.processes import is_lead
from infcl_jax.runtime.workdir import CONFIG_FILE
from infcl_jax.settings import AnyConfig, RunConfig, check_config, make_config, name_changes
from infcl_jax.training import (
    Checkpointer,
    DataWait,
    MetricWriter,
    Outputs,
    Preemption,
    Profile,
    RunConsole,
    Safeguards,
    TrainState,
    WorkdirLock,
    prepare_workdir,
    rare_garbage_collection,
)
from infcl_jax.training.compiled_step import StepMemory, compile_ahead, device_memory_limit, is_out_of_memory
from infcl_jax.training.writers import check_writers


def train(config: AnyConfig, workdir: str | Path, callbacks: Sequence[Callback] = ()) -> dict[str, float]:
    """Train all steps of a run, from its latest checkpoint if there is one.

    The same as the command `experiments.train`, for notebooks and scripts. Ctrl-C, or the stop button of a notebook,
    saves a checkpoint after the step and raises `KeyboardInterrupt`; before the first step, or pressed again, it raises
    at once. The same call continues the run. Signals of schedulers save a checkpoint and raise `Interrupted`, which
    ends a script with status 75. Outside the main thread, Python delivers no signals, so only other processes of the
    run can stop it.

    Args:
      config: changed settings by name, such as `{"dataset": "photos", "optimizer": {"learning_rate": 1e-3}}`, or a
        `ConfigDict` such as those in `configs`. `docs/settings.md` lists the settings with their defaults.
      workdir: folder of checkpoints, `metrics.jsonl`, `run.log`, `config.json`, the tokenizer and plots.
      callbacks: hooks for steps, evaluations and checkpoints.

    Returns:
      Results of the final evaluation, see `infcl_jax.evaluation.Suite`.

    Raises:
      ValueError: a setting is wrong, a resumed run changes a fixed setting or a shape of its state, `workdir` is not
        writable, or an evaluation failed; the message says whether the step before it is saved.
      FileNotFoundError: a dataset is not prepared.
      ImportError: a package of the tokenizer or of a writer is not installed.
      FloatingPointError: the loss, a gradient or the state is not finite.
      OSError: the last checkpoint, or `max_failed_saves` in a row, could not be saved.
      OutOfMemory: a device ran out of memory; the message says which settings to change.
      KeyboardInterrupt: the user stopped the run.
      Interrupted: another signal stopped the run, another run uses `workdir`, or a data worker was killed.
      SystemExit: data workers cannot import the script, such as one without `if __name__ == "__main__":`.

    Examples:
      >>> settings = {"dataset": "digits", "model": "tiny", "batch_size": 64, "total_steps": 200}
      >>> results = infcl_jax.train(settings, "runs/two_hundred")
      >>> encoder = infcl_jax.load("runs/two_hundred")
    """
    check_guard()
    config = make_config(config)
    check_config(config)  # also of a `RunConfig`
    hooks = Callbacks(callbacks)
    preemption = Preemption(config.stop_timeout, workdir, interactive=True)
    try:
        with preemption:
            return _train(config, workdir, preemption, hooks)
    except Interrupted as interrupted:
        if preemption.interrupted:
            raise KeyboardInterrupt(interrupted.message) from None
        print(printable(str(interrupted)), file=sys.stderr)  # Python prints no message of a SystemExit with a status
        raise
    except WorkersCannotStart as error:
        sys.exit(f"error: {printable(str(error))}")  # only scripts are at fault, so no traceback


def train_process(config: RunConfig, workdir: str | Path) -> dict[str, float]:
    """Train a run as the only task of this process, for the command.

    Stop signals end the process, see `infcl_jax.training.Preemption`. For the rest see `train`.
    """
    with Preemption(config.stop_timeout, workdir) as preemption:
        return _train(config, workdir, preemption, Callbacks())


def _train(config: RunConfig, workdir: str | Path, preemption: Preemption, callbacks: Callback) -> dict[str, float]:
    """Train all steps of the run while stop signals are handled; see `train`."""
    mesh = start_devices(config, workdir)
    preemption.joined()
    with RunConsole(lead=is_lead()) as console, rare_garbage_collection():
        workdir, outputs = prepare_workdir(workdir), Outputs()
        checkpointer = Checkpointer(
            workdir,
            keep=config.keep_checkpoints,
            keep_every=config.keep_every,
            keep_best=config.keep_best,
            resume=config.resume,
            max_failed_saves=config.max_failed_saves,
        )
        with WorkdirLock(workdir, say):
            with checkpointer as checkpoints, failures():
                training = Training(workdir, console, outputs, checkpoints, preemption, callbacks)
                run, data, results, changed = training.train(config, mesh)
            conclude(run, workdir if changed else None, data, results, outputs)
        callbacks.on_end(run.config.total_steps, results)
        return results


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """Training of a run in this process, which has locked its work directory."""

    workdir: Path
    console: RunConsole
    outputs: Outputs
    checkpoints: Checkpointer
    preemption: Preemption
    callbacks: Callback

    def train(self, config: RunConfig, mesh: Mesh) -> tuple[Run, TrainIterator, dict[str, float], bool]:
        """Train; return the run, its closed data, the last results, and whether files of the run have changed."""
        memory_limit = device_memory_limit()
        origin, recorded = self.origin(config)
        check, doing = self.preemption.check, self.console.doing
        run = build_run(config, mesh, origin=origin, recorded=recorded, check=check, doing=doing)
        start, total = self.checkpoints.latest_step() or 0, run.config.total_steps
        if start > total:
            raise ValueError(
                f"expected total_steps >= {start}, which the run in {self.workdir} has reached, got {total}; "
                "train longer, or choose another --workdir"
            )
        trains = start < total
        if trains:
            self.start_writing(run.config)
        batch, compiled = run.batch_shapes(), None
        if trains and batch is not None:
            compiled = compile_ahead(run.step, run.init.shapes, batch)
        state = self.state(run)
        # No file of a finished run changes, except for the results of an evaluation that did not end.
        evaluated = self.resumes_in_place(run) and run.recorded is not None and evaluates(run.recorded)
        writes = trains or (evaluated and not is_evaluated(self.workdir, start))
        if writes:
            self.console.open_log(self.workdir, self.outputs)
        with contextlib.closing(self.data(run, state, trains)) as data:
            if trains and not self.resumes_in_place(run) and is_lead():  # copies of files that may move or change
                folder = self.workdir / TOKENIZER_FOLDER
                self.outputs.attempt(folder, lambda: run.tokenizer.save(folder))
                self.outputs.attempt(self.workdir / MODEL_FILE, lambda: save_base_model(run.config, self.workdir))
            memory = None
            if compiled is not None:
                with self.console.busy(COMPILING, announced=True), explained_out_of_memory(run, memory_limit):
                    memory = StepMemory.of(compiled.result(), memory_limit)
            if trains:
                path, components = self.workdir / ENVIRONMENT_FILE, {} if memory is None else memory.components
                self.outputs.attempt(path, lambda: record_start(self.workdir, start, components, memory_limit))
            announce(run, state, self.workdir, memory, data)
            if not trains:
                ending = "only exported/ is written" if run.config.export else "nothing is written"
                ending = "its last evaluation is completed" if writes else ending
                say(f"the run has all of its {start} steps: {ending}")
            with explained_out_of_memory(run, memory_limit):
                results = self.loop(run, state, data, trains=trains, writes=writes, compiled=compiled is not None)
        return run, data, results, writes

    def origin(self, config: RunConfig) -> tuple[Path | None, RunConfig | None]:
        """Open the log, unless the run is finished, and return folder and settings of the run to continue."""
        finished = False
        try:
            self.console.doing("checking the checkpoints")
            origin = self.checkpoints.origin()
            has_settings = origin is not None and (origin / CONFIG_FILE).is_file()
            recorded = saved_config(origin) if has_settings else None
            finished = recorded is not None and recorded.total_steps == self.checkpoints.latest_step()
        finally:
            if not finished:  # also for an error; a finished run may be longer now, which its data decide
                self.start_writing(config)
        return origin, recorded

    def start_writing(self, config: RunConfig) -> None:
        """Open the log and check the logins of the writers, before hours of preparation; once."""
        self.console.open_log(self.workdir, self.outputs)
        if is_lead():
            check_writers(config.writers)

    def resumes_in_place(self, run: Run) -> bool:
        """Return whether the run continues from a checkpoint of its own work directory."""
        return str(run.origin) == str(self.workdir.absolute())

    def state(self, run: Run) -> TrainState:
        """Restore the latest checkpoint, or initialize the state of a new run."""
        state = run.init.create()
        if run.origin is None:
            state = run.load_initial_weights(state)
        else:
            self.console.doing("restoring the checkpoint")
        with name_changes(run.changed):  # adds the changed settings to an error of shapes
            return self.checkpoints.restore_latest(state)

    def data(self, run: Run, state: TrainState, trains: bool) -> TrainIterator:
        """Open the training data at the position of the checkpoint, and start to read unless the run is finished."""
        self.console.doing("preparing the data")
        identity, position, recorded = dataset_identity(run.source), self.checkpoints.position(), run.recorded
        resized = position is not None and check_same_data(
            position,
            identity,
            str(run.origin),
            forked=not self.resumes_in_place(run),
            moved=recorded is not None
            and ("split" in run.changed or not same_place(recorded.dataset, run.config.dataset)),
            indexed=state.samples is not None,
        )
        data = run.training_data(self.workdir, state if trains else None, say)
        data.dataset = identity
        if resized:
            position = data.get_state() | {"next_batch": position["next_batch"]}
        if position is not None:
            data.set_state(position)
        if run.config.grad_cache.offload != "replay" and trains:
            data.start_prefetch()  # the readers start during the rest of the preparation
        return data

    def loop(
        self, run: Run, state: TrainState, data: TrainIterator, *, trains: bool, writes: bool, compiled: bool
    ) -> dict[str, float]:
        """Run the steps that are left, or evaluate a finished run; return the results of the last evaluation.

        `writes` tells whether files of the run change: it trains, or its last evaluation did not end.
        """
        config, start, lead = run.config, int(state.step), is_lead()
        writer = MetricWriter(
            self.workdir,
            writers=config.writers,
            lead=lead and writes,
            resume_step=start,
            outputs=self.outputs,
            settings=config.to_dict(),
        )
        profile = Profile(config.profile, self.workdir, lead=lead and trains)
        safeguards = Safeguards(
            config.on_nonfinite,
            limit=config.max_skipped,
            workdir=self.workdir,
            start=start,
            batch_indices=data.batch_indices,
            lead=lead,
            outputs=self.outputs,
        )
        wait = DataWait(start)
        with writer, contextlib.closing(safeguards), wait, profile, rare_garbage_collection():
            self.callbacks.on_chance(run.suite.chance)
            self.callbacks.on_start(config, self.workdir, start)
            self.console.doing("reading the first batch" if trains else "evaluation")
            batches = Batches(run, data, wait, LostWorkers(self.workdir, self.outputs), self.console)
            loop = TrainLoop(
                run,
                self.workdir,
                start,
                batches,
                self.checkpoints,
                writer,
                self.preemption,
                safeguards,
                self.outputs,
                self.callbacks,
                self.console,
                profile,
                compiled=compiled,
            )
            try:
                return loop.fit(state) if trains else loop.finish(state, writes)
            except WorkerLost as error:
                end = batches.end(error)
                fail(end)
                raise end from None


@contextlib.contextmanager
def explained_out_of_memory(run: Run, limit: int | None) -> Iterator[None]:
    """Raise `OutOfMemory`, which says what fits in the bytes of the limit, if a device runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        from infcl_jax.planner import explain_out_of_memory, plan_memory  # training plans nothing otherwise

        raise explain_out_of_memory(error, plan_memory(run.workload, limit)) from error
