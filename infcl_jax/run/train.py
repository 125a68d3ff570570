"""Training of a run: what `infcl_jax.train` and `experiments.train` call."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from infcl_jax.data import TrainIterator
from infcl_jax.data.dataset_identity import check_same_data, dataset_identity, same_place
from infcl_jax.data.pipeline import TRUNCATED
from infcl_jax.data.text_pairs import LEFT_OUT
from infcl_jax.data.workers import WorkerLost, WorkersCannotStart, check_guard
from infcl_jax.inference.pretrained_tokenizer import TOKENIZER_FOLDER
from infcl_jax.models.registry import MODEL_FILE
from infcl_jax.run.build import Run, build_run, recorded_config
from infcl_jax.run.callbacks import Callback, Callbacks
from infcl_jax.run.devices import start_devices
from infcl_jax.run.loop import TrainLoop, evaluates, is_evaluated
from infcl_jax.run.lost_workers import LostWorkers
from infcl_jax.run.model import save_base_model
from infcl_jax.run.results import CURVES_FILE, save_curves, say_results
from infcl_jax.runtime.console import say
from infcl_jax.runtime.environment import ENVIRONMENT_FILE, record_start
from infcl_jax.runtime.exit_codes import Interrupted
from infcl_jax.runtime.printable import printable
from infcl_jax.runtime.process_watch import fail, failures
from infcl_jax.runtime.processes import is_lead
from infcl_jax.settings import (
    AnyConfig,
    RunConfig,
    check_config,
    format_changes,
    make_config,
    name_changes,
)
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
    parameter_count,
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
        return _train_on(mesh, config, workdir, preemption, callbacks, console)


def _train_on(
    mesh: Mesh,
    config: RunConfig,
    workdir: str | Path,
    preemption: Preemption,
    callbacks: Callback,
    console: RunConsole,
) -> dict[str, float]:
    """Train all steps of the run on a mesh; see `train`."""
    workdir = prepare_workdir(workdir)
    memory_limit = device_memory_limit()
    outputs = Outputs()
    checkpointer = Checkpointer(
        workdir,
        keep=config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        resume=config.resume,
        max_failed_saves=config.max_failed_saves,
    )
    with WorkdirLock(workdir, say), checkpointer as checkpoints, failures():
        with contextlib.ExitStack() as log:
            log.callback(console.open_log, workdir, outputs)  # also for an error of the next lines
            console.doing("checking the checkpoints")
            origin = checkpoints.origin()
            recorded = None if origin is None else recorded_config(origin)
            finished = recorded is not None and recorded.total_steps == checkpoints.latest_step()
            if finished:
                log.pop_all()  # opened below if the run is longer now
        resumed, own = origin is not None, str(origin) == str(workdir.absolute())
        if is_lead() and not finished:
            check_writers(config.writers)  # before hours of preparation
        built = build_run(config, mesh, origin=origin, check=preemption.check, doing=console.doing)
        config, source, changed = built.config, built.source, built.changed
        tokenizer, suite, step_fn = built.tokenizer, built.suite, built.step
        batch, ends = built.batch_shapes(), (checkpoints.latest_step() or 0) >= config.total_steps
        compiled = None if batch is None or ends else compile_ahead(step_fn, built.init.shapes, batch)
        state = built.init.create()
        if not resumed:
            state = built.initialized(state)
        console.doing("restoring the checkpoint" if resumed else "preparing the model")
        with name_changes(changed):  # adds the changed settings to an error of shapes
            state = checkpoints.restore_latest(state)
        start = int(state.step)
        if start > config.total_steps:
            raise ValueError(
                f"expected total_steps >= {start}, which the run in {workdir} has reached, got {config.total_steps}; "
                "train longer, or choose another --workdir"
            )
        trains = start < config.total_steps
        # No file of a finished run changes, except for the results of an evaluation that did not end.
        completes = not trains and own and recorded is not None and evaluates(recorded)
        completes = completes and not is_evaluated(workdir, start)
        if trains or completes:
            console.open_log(workdir, outputs)
        console.doing("preparing the data")
        identity, position = dataset_identity(source), checkpoints.position()
        resized = position is not None and check_same_data(
            position,
            identity,
            str(origin),
            forked=not own,
            moved=recorded is not None
            and not (same_place(recorded.dataset, config.dataset) and "split" not in changed),
            indexed=state.samples is not None,
        )
        data = built.training_data(workdir, state if trains else None, say)
        data.dataset = identity
        if position is not None:
            data.set_state(data.get_state() | {"next_batch": position["next_batch"]} if resized else position)
        if config.grad_cache.residency != "replay" and trains:
            data.start_prefetch()  # the readers start during the rest of the preparation
        if trains and not own and is_lead():
            # A copy, because the files that `config.tokenizer` names may move or change.
            folder = workdir / TOKENIZER_FOLDER
            outputs.attempt(folder, lambda: tokenizer.save(folder))
            outputs.attempt(workdir / MODEL_FILE, lambda: save_base_model(config, workdir))
        memory = None
        if compiled is not None:
            console.doing("compiling the training step")
            with explained_out_of_memory(built, memory_limit):
                memory = StepMemory.of(compiled.result(), memory_limit)
        if trains:
            components = {} if memory is None else memory.components
            outputs.attempt(workdir / ENVIRONMENT_FILE, lambda: record_start(workdir, start, components, memory_limit))
        announce(config, mesh, state, workdir, memory, data)
        for line in format_changes(changed):
            say(line)
        if not trains:
            ending = "only exported/ is written" if config.export else "nothing is written"
            ending = "its last evaluation is completed" if completes else ending
            say(f"the run has all of its {start} steps: {ending}")
        writer = MetricWriter(
            workdir,
            writers=config.writers,
            lead=is_lead() and (trains or completes),
            resume_step=start,
            outputs=outputs,
            settings=config.to_dict(),
        )
        profile = Profile(config.profile, workdir, lead=is_lead() and trains)
        safeguards = Safeguards(
            config.on_nonfinite,
            limit=config.max_skipped,
            workdir=workdir,
            start=start,
            batch_indices=data.batch_indices,
            lead=is_lead(),
            outputs=outputs,
        )
        data_wait, closing = DataWait(start), contextlib.closing
        with writer, closing(data), closing(safeguards), data_wait, profile, rare_garbage_collection():
            loop = TrainLoop(
                config,
                workdir,
                mesh,
                data,
                data_wait,
                suite,
                step_fn,
                checkpoints,
                writer,
                preemption,
                safeguards,
                outputs,
                LostWorkers(workdir, outputs),
                callbacks,
                console=console,
                utilization=built.utilization,
                profile=profile,
            )
            callbacks.on_chance(suite.chance)
            callbacks.on_start(config, workdir, start)
            console.doing("reading the first batch" if trains else "evaluation")
            try:
                with explained_out_of_memory(built, memory_limit):
                    results = loop.fit(state, start) if trains else loop.finish(state, completes)
            except WorkerLost as error:
                first = data.get_state()["next_batch"] + 1
                last = min(first + data.batches_ahead(error), config.total_steps)
                end = loop.lost_workers.end(error, first, last)
                fail(end)
                raise end from None
    if truncated := tokenizer.truncated + int(data.stats().get(TRUNCATED, 0)):
        say(f"truncated {truncated} captions to {tokenizer.context_length} tokens")
    if left_out := int(data.stats().get(LEFT_OUT, 0)):
        say(f"left out {left_out} hard negatives that are positives of their own query")
    if trains or completes:
        outputs.attempt(workdir / CURVES_FILE, lambda: save_curves(workdir, suite))
    if not results:
        say_results(config.total_steps, results)
    if bad_records := data.bad_records.summary():
        say(bad_records)
    outputs.retry()
    if unwritten := outputs.summary():
        say(f"warning: {unwritten}")
    callbacks.on_end(config.total_steps, results)
    return results


@contextlib.contextmanager
def explained_out_of_memory(run: Run, memory_limit: int | None) -> Iterator[None]:
    """Raise `OutOfMemory`, which says what fits, if the device runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        from infcl_jax.planner import explain_out_of_memory, plan_memory

        raise explain_out_of_memory(error, plan_memory(run.workload, memory_limit, exact=True)) from error


def announce(
    config: RunConfig, mesh: Mesh, state: TrainState, workdir: Path, memory: StepMemory | None, data: TrainIterator
) -> None:
    """Print a summary of the run, the memory of its compiled step and how it reads data."""
    platform = mesh.devices.flat[0].platform
    parameters = f"{parameter_count(state.params) / 1e6:.1f} M parameters"
    if state.frozen:
        parameters += f" ({parameter_count(state.trained) / 1e6:.1f} M trained)"
    say(
        f"{config.model or config.init.model}, {parameters}, on {mesh.size} {platform} device(s), "
        f"{jax.process_count()} process(es); {config.dataset}, batch {config.batch_size}, {config.total_steps} steps"
    )
    if memory is not None:
        say(str(memory))
    say(f"data: {data.parallelism}{', decoded on the GPUs' if data.decodes_on_gpus else ''}")
    if int(state.step):
        say(f"resumed from step {int(state.step)} in {workdir}")
