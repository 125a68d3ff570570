"""All settings of a run, as one tree of frozen dataclasses."""

import dataclasses
from collections.abc import Sequence

from infcl_jax.data.decode.pillow import MAX_PIXELS, MAX_SIDE, MIN_SIDE
from infcl_jax.data.positive_ids import POSITIVES
from infcl_jax.data.tokenizers.base import CLEANINGS
from infcl_jax.data.transforms import Augmentation
from infcl_jax.evaluation import EvaluationConfig
from infcl_jax.models import TOWERS
from infcl_jax.ops.pairwise.lse import IMPLEMENTATIONS, MULTI_POSITIVE
from infcl_jax.runtime.distributed import LOST_PROCESS_TIMEOUT, START_TIMEOUT
from infcl_jax.runtime.mesh import MESHES
from infcl_jax.schema import Range, Section, setting, settings_of
from infcl_jax.settings.model_overrides import PRECISIONS
from infcl_jax.training import (
    LOSSES,
    ON_NONFINITE,
    WRITERS,
    DistillConfig,
    EMAConfig,
    GlobalContrastiveConfig,
    GradCacheConfig,
    GuideConfig,
    OptimizerConfig,
    TextRetrievalConfig,
    UnlockedGroups,
)
from infcl_jax.training.optimizer_config import check_pairs
from infcl_jax.training.sharding import PARAMETER_SHARDINGS

_COUNT, _FROM_ZERO, _DECAY = Range(1), Range(0), Range(0, 1, below=True)
TEXT_PACKINGS = ("auto", "off")
MOST_STEPS = 2**31 - 1  # the step is an int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig(Section, prefix="init."):
    """Sources of initial parameters, which `infcl_jax.run` reads.

    The rules are ordered pairs (regular expression, name in the source). The expression matches the whole name of a
    parameter, such as "visual/proj/kernel", and the name can refer to its groups, as `\\1`. The first match applies.
    Other parameters have the same name in the source.

    Raises:
      ValueError: a rule is no pair of a regular expression and a name.
    """

    model: str | None = setting(
        None,
        "initial parameters of a new run: a folder, file or hf-hub:OWNER/NAME of OpenCLIP or Hugging Face, a model of "
        "OpenCLIP with its tag, as ViT-B-32:openai, a run's workdir or a checkpoint, see docs/models.md; without "
        "model, the run has its model and tokenizer",
    )
    image: str | None = setting(None, "initial parameters of the image tower, like init.model")
    text: str | None = setting(None, "initial parameters of the text tower, like init.model")
    rules: Sequence[tuple[str, str]] = setting(
        (),
        'names in the source by parameter name, such as (("logit_scale", ""),); an empty name keeps the initial value',
    )

    def check(self) -> None:
        """Check the rules."""
        check_pairs("init.rules", self.rules, "a name", lambda name: isinstance(name, str))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Settings of a run; see `docs/settings.md`.

    `make_config` creates one from changed settings and checks those that limit each other. `with_changes` returns a
    changed copy.

    Examples:
      >>> config = make_config({"optimizer": {"learning_rate": 1e-4}})
      >>> config.optimizer.learning_rate, config["optimizer.schedule"]
      (0.0001, 'cosine')

    Raises:
      ValueError: a value has another type or is out of range.
    """

    seed: int = setting(
        0, "seed of initial parameters, data order, augmentation and dropout", Range(0, 2**32, below=True), fixed=True
    )
    cpu_devices: int = setting(
        1, "simulated devices on the CPU; no effect on other platforms", Range(1, 1024), evaluated=True
    )
    compilation_cache: str | None = setting(
        None,
        'folder of the persistent compilation cache; "off": no cache; None: JAX_COMPILATION_CACHE_DIR if set, else '
        "infcl_jax in the user's cache folder (XDG_CACHE_HOME or ~/.cache), for runs of one process",
        evaluated=True,
    )
    mesh: str | None = setting(
        None,
        '"flat": one ring over all devices; "hosts": a ring over the hosts around a ring within each (on one host: '
        'the processes and their devices); None: "hosts" with several hosts of equally many devices',
        MESHES,
        evaluated=True,
    )
    start_timeout: int = setting(
        START_TIMEOUT,
        "seconds until all processes of the run must have started, see docs/clusters.md",
        _COUNT,
        evaluated=True,
    )
    lost_process_timeout: int = setting(
        LOST_PROCESS_TIMEOUT,
        "seconds without a heartbeat after which a process is lost and the others exit with status 75",
        _COUNT,
        evaluated=True,
    )

    dataset: str = setting(
        "shapes/quickstart",
        "shapes/quickstart, shapes/full, digits, a dataset prepared by TFDS, or a path (tar files, a table, a folder, "
        "a mixture), see docs/data.md; a resumed run may name a new path of the same records",
        shapes=True,
    )
    split: str = setting("train", 'split of the dataset, such as "train" or "train[:8192]"')
    data_dir: str = setting("data", "folder of the prepared datasets", shapes=True, evaluated=True)
    decode: str = setting(
        "auto",
        'decoder of training images; "nvimgcodec": the GPUs; "auto": the GPUs if they can, else Pillow',
        ("auto", "pillow", "nvimgcodec"),
    )
    num_workers: int | None = setting(
        None,
        "reading and decoding processes of each training process; 0: threads; None: chosen from the CPU cores",
        Range(0, 256),
    )
    max_image_pixels: int = setting(
        MAX_PIXELS,
        "largest number of pixels of an image file; larger ones are bad records, before they are decoded",
        Range(MIN_SIDE**2, MAX_SIDE**2),
        evaluated=True,
    )
    num_threads: int | None = setting(None, "reading threads without workers; None: one per CPU core", Range(1, 1024))
    prefetch_batches: int | None = setting(
        None,
        "batches read ahead, in host memory; None: 2, or 1 if 5 batches exceed a quarter of host memory",
        Range(1, 1024),
    )
    max_bad_records: float | None = setting(
        None,
        "largest number of different unreadable samples, which the next ones replace, before the run stops; below 1: "
        "fraction of the samples; None: 1 % of them, at least 100",
        _FROM_ZERO,
        before=100.0,
    )
    augmentation: Augmentation = Augmentation()

    tokenizer: str | None = setting(
        None,
        "bytes, clip, clip:PATH, hf:PATH, sentencepiece:PATH or the folder of a trained tokenizer, see "
        "docs/data.md; None: clip for models with its vocabulary of 49408 ids, bytes for those with 259",
        fixed=True,
    )
    text_cleaning: str | None = setting(
        None,
        'cleaning of captions before the tokenizer, as in OpenCLIP; None: as the tokenizer was trained, else "lower" '
        'for clip and "none" for the others',
        CLEANINGS,
        fixed=True,
    )

    text_packing: str = setting(
        "auto",
        'encoding of texts; "auto": several in each row of tokens, without the padding, where the tower allows it and '
        'it saves tokens, else "off", chosen at the start of a run; "off": padded to the context length',
        TEXT_PACKINGS,
        before="off",
    )

    model: str | None = setting(
        None,
        "tiny, tiny-shapes, a name of OpenCLIP such as ViT-B-16 or ViT-B-16-SigLIP, or the path of its JSON config (or "
        "of a folder with open_clip_config.json), see docs/models.md; for text retrieval, "
        "bert-tiny or a BERT such as bert-base-uncased; None: the model of the weights in init.model, else tiny-shapes",
        fixed=True,
        shapes=True,
        before="tiny-shapes",
    )
    model_overrides: str = setting(
        "", 'changes to the model, such as "vision.layers=6,vision.remat=dots"', shapes=True, evaluated=True
    )
    precision: str = setting(
        "auto",
        'dtype of the towers; parameters and loss are fp32; "auto": "bf16" on GPUs and TPUs, "fp32" on CPUs, chosen at '
        "the start of a run",
        PRECISIONS,
        shapes=True,
        evaluated=True,
        before="fp32",
    )
    frozen: tuple[str, ...] = setting(
        (), "frozen towers (LiT), which run in inference mode", tuple(TOWERS), shapes=True
    )
    unlocked_groups: UnlockedGroups = UnlockedGroups()

    init: InitConfig = InitConfig()

    loss: str = setting("clip", "training loss", LOSSES.keys(), shapes=True)
    implementation: str | None = setting(
        None,
        "implementation of infcl_jax.pairwise_lse; None: the best on this device",
        IMPLEMENTATIONS,
        evaluated=True,
    )
    max_logit_scale: float | None = setting(
        None,
        "limit of the logit scale, the inverse temperature, also of distill.teacher; None: CLIP's 100 for the model, "
        "no limit for a teacher or with a sigmoid loss",
        Range(1),
        before=100.0,
    )
    matryoshka: tuple[int, ...] = setting(
        (),
        "increasing sizes of the feature prefixes over which the loss is summed and which are evaluated, such as "
        "(64, 128, 256, 512); include the feature size; (): the whole features only",
        _COUNT,
        evaluated=True,
    )
    positives: str = setting(
        "pair",
        'texts that are positives of an image; "pair": its own; "caption": the texts of all pairs of the batch with '
        'the same caption, without regard to case and spaces; "image": with the same image file; "label": with the '
        "same class",
        POSITIVES,
    )
    multi_positive: str = setting(
        "mean",
        'loss "clip" of several positives; "mean": mean of their cross entropies; "any": cross entropy of the sum of '
        "their probabilities",
        MULTI_POSITIVE,
    )
    label_smoothing: float = setting(
        0.0, 'share of each target of the loss "clip" that is spread over the whole batch', _DECAY
    )
    distill: DistillConfig = DistillConfig()
    guide: GuideConfig = GuideConfig()

    global_contrastive: GlobalContrastiveConfig = GlobalContrastiveConfig()

    grad_cache: GradCacheConfig = GradCacheConfig()

    text_retrieval: TextRetrievalConfig = TextRetrievalConfig()

    batch_size: int = setting(256, "global batch size, in pairs over all devices", Range(1, 2**24), fixed=True)
    total_steps: int | None = setting(
        None, "training steps; None: from samples_seen or epochs, else 1000", Range(1, MOST_STEPS)
    )
    samples_seen: int | None = setting(None, "training samples, instead of total_steps; whole batches are used", _COUNT)
    epochs: int | None = setting(
        None,
        "epochs, instead of total_steps; each has as many steps as the dataset has whole batches",
        Range(1, 10**6),
    )
    on_nonfinite: str = setting(
        "stop",
        'reaction to a loss or gradient that is not finite; "skip": the devices leave out the update, and the '
        "sample indices go to skipped_batches.jsonl",
        ON_NONFINITE,
    )
    max_skipped: int = setting(
        10, 'skipped steps in a row after which the run stops, with on_nonfinite = "skip"', _COUNT
    )
    ema_decay: float | None = setting(
        None,
        "decay of the moving average of the parameters, which evaluations then use; None: no average",
        _DECAY,
        shapes=True,
    )
    ema_warmup: bool = setting(False, "raise the decay of the moving average from 0 to ema_decay, as timm does")
    parameter_sharding: str = setting(
        "replicated",
        'sharding of parameters and optimizer state; "fsdp": over the devices',
        PARAMETER_SHARDINGS,
        evaluated=True,
    )
    cache_frozen: str | None = setting(
        None,
        'folder for the features of frozen towers, computed once per sample; "workdir": in the work directory; None: '
        "frozen towers encode every batch",
    )

    # A run of many steps needs a warm-up, an optimizer of the library has none unless it is asked for.
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=100)

    eval_every: int = setting(500, "steps between evaluations; 0: at the end only", _FROM_ZERO)
    evaluations: tuple[str, ...] = setting(
        (),
        "further evaluations: suites (imagenet_variants, retrieval, datacomp38), benchmarks such as cifar10 or "
        "cifar10:linear_probe, paths of data, or Python files, see docs/evaluation.md",
        evaluated=True,
    )
    evaluation: EvaluationConfig = EvaluationConfig()

    log_every: int = setting(50, "steps between lines of metrics, of a plain console and of run.log", _COUNT)
    checkpoint_every: int = setting(500, "steps between checkpoints; 0: at the end only", _FROM_ZERO)
    keep_checkpoints: int = setting(2, "latest checkpoints to keep", _COUNT)
    keep_every: int = setting(0, "also keep checkpoints whose step is a multiple of this; 0: none", _FROM_ZERO)
    keep_best: str | None = setting(
        None,
        'also keep the checkpoint of the evaluation with the best value of this metric, such as "zero_shot/top1"; '
        "checkpoints are then saved at every evaluation; None: none",
    )
    resume: str = setting(
        "latest",
        '"latest": continue from the newest intact checkpoint; a step, such as "500": continue from it and set newer '
        "ones aside; a path: start from the state of that run or WORKDIR/checkpoints/STEP",
    )
    max_failed_saves: int = setting(3, "failed saves in a row that stop the run", _COUNT)
    export: bool = setting(False, "also write the final weights in OpenCLIP's format to WORKDIR/exported")
    stop_timeout: int = setting(
        60,
        "seconds from a stop signal until a run that has not saved and left is ended, see docs/reliability.md",
        _COUNT,
    )
    writers: tuple[str, ...] = setting(
        (),
        "writers of metrics beside metrics.jsonl: metrics.csv, TensorBoard, Weights & Biases; see docs/training.md",
        tuple(WRITERS),
    )
    profile: tuple[int, ...] = setting(
        (),
        "first and last step of a trace of jax.profiler, such as (100, 110), in WORKDIR/profile; (): none",
        Range(1, MOST_STEPS),
    )

    @property
    def teacher(self) -> DistillConfig | GuideConfig | None:
        """Settings of the loss that reads the features of a teacher; None without a teacher."""
        return next((section for section in (self.distill, self.guide) if section.path is not None), None)

    @property
    def ema(self) -> EMAConfig | None:
        """Settings of the moving averages; None without them."""
        return None if self.ema_decay is None else EMAConfig(decay=self.ema_decay, warmup=self.ema_warmup)


SETTINGS = settings_of(RunConfig())
