"""Table of the settings of a run."""

import dataclasses
from collections.abc import Sequence

from infcl_jax.data.decode.pillow import MAX_PIXELS, MAX_SIDE, MIN_SIDE
from infcl_jax.data.positive_ids import POSITIVES
from infcl_jax.data.tokenizers.cleaning import CLEANINGS
from infcl_jax.losses.variants import MODES
from infcl_jax.models import TOWERS
from infcl_jax.ops.pairwise_lse import IMPLEMENTATIONS, MULTI_POSITIVE
from infcl_jax.runtime.distributed import LOST_PROCESS_TIMEOUT, START_TIMEOUT
from infcl_jax.runtime.mesh import MESHES
from infcl_jax.settings.precision import PRECISIONS
from infcl_jax.settings.setting import Range, Setting
from infcl_jax.training import BATCH_RESIDENCIES, LOSSES, ON_NONFINITE, WRITERS
from infcl_jax.training.global_contrastive import GAMMA_SCHEDULES
from infcl_jax.training.optimizer_config import OPTIMIZERS, SCHEDULES, TEMPERATURE_SCHEDULES, WARMUP_STARTS
from infcl_jax.training.rules import Rules
from infcl_jax.training.sharding import PARAMETER_SHARDINGS
from infcl_jax.training.text_retrieval import SELECTIONS

_COUNT, _FROM_ZERO, _POSITIVE = Range(1), Range(0), Range(0, above=True)
_DECAY, _FRACTION = Range(0, 1, below=True), Range(0, 1)
_EPS, _RATE, _STEPS = Range(0, 1, above=True), Range(0, 1e4, above=True), 2**31 - 1  # the step is an int32


def _shaping(*settings: Setting) -> tuple[Setting, ...]:
    """Mark settings on which names or shapes of a checkpoint's arrays can depend."""
    return tuple(dataclasses.replace(setting, shapes=True) for setting in settings)


def _evaluated(*settings: Setting) -> tuple[Setting, ...]:
    """Mark settings that an evaluation may change."""
    return tuple(dataclasses.replace(setting, evaluated=True) for setting in settings)


_RUN = (
    Setting(
        "seed",
        int,
        0,
        "seed of initial parameters, data order, augmentation and dropout",
        Range(0, 2**32, below=True),
        fixed=True,
    ),
    *_evaluated(
        Setting("cpu_devices", int, 1, "simulated devices on the CPU; no effect on other platforms", Range(1, 1024)),
        Setting(
            "compilation_cache",
            str | None,
            None,
            'folder of the persistent compilation cache; "off": no cache; None: JAX_COMPILATION_CACHE_DIR if set, else '
            "infcl_jax in the user's cache folder (XDG_CACHE_HOME or ~/.cache), for runs of one process",
        ),
        Setting(
            "mesh",
            str | None,
            None,
            '"flat": one ring over all devices; "hosts": a ring over the hosts around a ring within each (on one host: '
            'the processes and their devices); None: "hosts" with several hosts of equally many devices',
            MESHES,
        ),
        Setting(
            "start_timeout",
            int,
            START_TIMEOUT,
            "seconds until all processes of the run must have started, see docs/clusters.md",
            _COUNT,
        ),
        Setting(
            "lost_process_timeout",
            int,
            LOST_PROCESS_TIMEOUT,
            "seconds without a heartbeat after which a process is lost and the others exit with status 75",
            _COUNT,
        ),
    ),
)

_DATA = (
    Setting(
        "dataset",
        str,
        "shapes/quickstart",
        "shapes/quickstart, shapes/full, digits, a dataset prepared by TFDS, or a path (tar files, a table, a folder, "
        "a mixture), see docs/training.md; a resumed run may name a new path of the same records",
        shapes=True,
    ),
    Setting("split", str, "train", 'split of the dataset, such as "train" or "train[:8192]"'),
    Setting("data_dir", str, "data", "folder of the prepared datasets", shapes=True, evaluated=True),
    Setting(
        "decode",
        str,
        "auto",
        'decoder of training images; "nvimgcodec": the GPUs; "auto": the GPUs if they can, else Pillow',
        ("auto", "pillow", "nvimgcodec"),
    ),
    Setting(
        "num_workers",
        int | None,
        None,
        "reading and decoding processes of each training process; 0: threads; None: chosen from the CPU cores",
        Range(0, 256),
    ),
    Setting(
        "max_image_pixels",
        int,
        MAX_PIXELS,
        "largest number of pixels of an image file; larger ones are bad records, before they are decoded",
        Range(MIN_SIDE**2, MAX_SIDE**2),
        evaluated=True,
    ),
    Setting("num_threads", int | None, None, "reading threads without workers; None: one per CPU core", Range(1, 1024)),
    Setting(
        "prefetch_batches",
        int | None,
        None,
        "batches read ahead, in host memory; None: 2, or 1 if 5 batches exceed a quarter of host memory",
        Range(1, 1024),
    ),
    Setting(
        "max_bad_records",
        float | None,
        None,
        "largest number of different unreadable samples, which the next ones replace, before the run stops; below 1: "
        "fraction of the samples; None: 1 % of them, at least 100",
        _FROM_ZERO,
        before=100.0,
    ),
    Setting(
        "augmentation.scale",
        tuple[float, float],
        (0.9, 1.0),
        "area range of random crops, as a fraction of the image; (1, 1): the central square",
        Range(0, 1, above=True),
    ),
    Setting("augmentation.shift", int, 0, "largest random shift, in pixels", Range(0, 1024)),
    Setting("augmentation.flip", float, 0.0, "probability of a horizontal flip", _FRACTION),
    Setting(
        "augmentation.color_jitter",
        tuple[float, float, float, float],
        (0.0, 0.0, 0.0, 0.0),
        "ranges of brightness, contrast, saturation and hue (at most 0.5), as in OpenCLIP",
        Range(0, 10),
    ),
    Setting("augmentation.color_jitter_prob", float, 0.0, "probability of color jitter", _FRACTION),
    Setting("augmentation.gray_scale_prob", float, 0.0, "probability of a gray image", _FRACTION),
)

_TEXT = (
    Setting(
        "tokenizer",
        str | None,
        None,
        "bytes, clip, clip:PATH, hf:PATH, sentencepiece:PATH or the folder of a trained tokenizer, see "
        "docs/training.md; None: clip for models with its vocabulary of 49408 ids, bytes for those with 259",
        fixed=True,
    ),
    Setting(
        "text_cleaning",
        str | None,
        None,
        'cleaning of captions before the tokenizer, as in OpenCLIP; None: that of a trained tokenizer, else "lower" '
        'for clip and "none" for the others',
        CLEANINGS,
        fixed=True,
    ),
)

_PRECISION = Setting(
    "precision",
    str,
    "auto",
    'dtype of the towers; parameters and loss are fp32; "auto": "bf16" on GPUs and TPUs, "fp32" on CPUs, chosen at the '
    "start of a run",
    PRECISIONS,
    evaluated=True,
    before="fp32",
)

_MODEL = _shaping(
    Setting(
        "model",
        str | None,
        None,
        "tiny, tiny-shapes, a name of OpenCLIP such as ViT-B-16 or ViT-B-16-SigLIP, or the path of its JSON config (or "
        "of a folder with open_clip_config.json), see docs/training.md; for text retrieval, "
        "bert-tiny or a BERT such as bert-base-uncased; None: that of the weights of init.model, else tiny-shapes",
        fixed=True,
        before="tiny-shapes",
    ),
    Setting(
        "model_overrides",
        str,
        "",
        'changes to the model, such as "vision.layers=6,vision.remat=dots"',
        evaluated=True,
    ),
    _PRECISION,
    Setting("frozen", tuple[str, ...], (), "frozen towers (LiT), which run in inference mode", tuple(TOWERS)),
    Setting(
        "unlocked_groups.image",
        int,
        0,
        "last groups of the frozen image tower that are trained, as --lock-image-unlocked-groups of OpenCLIP",
        _FROM_ZERO,
    ),
    Setting(
        "unlocked_groups.text",
        int,
        0,
        "last groups of the frozen text tower that are trained, as --lock-text-unlocked-layers of OpenCLIP",
        _FROM_ZERO,
    ),
)

_INIT = (
    Setting(
        "init.model",
        str | None,
        None,
        "initial parameters of a new run: a folder, file or hf-hub:OWNER/NAME of OpenCLIP or Hugging Face, a model of "
        "OpenCLIP with its tag, as ViT-B-32:openai, a run's workdir or a checkpoint, see docs/weights.md; without "
        "model, the run has its model and tokenizer",
    ),
    Setting("init.image", str | None, None, "initial parameters of the image tower, like init.model"),
    Setting("init.text", str | None, None, "initial parameters of the text tower, like init.model"),
    Setting(
        "init.rules",
        Sequence[tuple[str, str]],
        (),
        'names in the source by parameter name, such as (("logit_scale", ""),); an empty name keeps the initial value',
    ),
)

_LOSS = (
    Setting("loss", str, "clip", "training loss", LOSSES.keys(), shapes=True),
    Setting(
        "implementation",
        str | None,
        None,
        "implementation of infcl_jax.pairwise_lse; None: the best on this device",
        IMPLEMENTATIONS,
        evaluated=True,
    ),
    Setting(
        "max_logit_scale",
        float | None,
        None,
        "limit of the logit scale, the inverse temperature, also of distill.teacher; None: CLIP's 100 for the model, "
        "no limit for a teacher or with a sigmoid loss",
        Range(1),
        before=100.0,
    ),
    Setting(
        "matryoshka",
        tuple[int, ...],
        (),
        "increasing sizes of the feature prefixes over which the loss is summed and which are evaluated, such as "
        "(64, 128, 256, 512); include the feature size; (): the whole features only",
        _COUNT,
        evaluated=True,
    ),
    Setting(
        "positives",
        str,
        "pair",
        'texts that are positives of an image; "pair": its own; "caption": those of all pairs of the batch with the '
        'same caption, without regard to case and spaces; "image": with the same image file; "label": with the same '
        "class",
        POSITIVES,
    ),
    Setting(
        "multi_positive",
        str,
        "mean",
        'loss "clip" of several positives; "mean": mean of their cross entropies; "any": cross entropy of the sum of '
        "their probabilities",
        MULTI_POSITIVE,
    ),
    Setting(
        "label_smoothing",
        float,
        0.0,
        'share of each target of the loss "clip" that is spread over the whole batch',
        _DECAY,
    ),
    Setting(
        "distill.teacher",
        str | None,
        None,
        "model that infcl_jax.load reads, whose similarities the student learns; None: no distillation",
    ),
    Setting("distill.weight", float, 1.0, "weight of infcl_jax.distillation_loss in addition to the loss", _POSITIVE),
    Setting(
        "distill.cache",
        str | None,
        None,
        "folder for the features of the teacher, computed once per sample from the central square of its image; "
        '"workdir": in the work directory; None: the teacher encodes every batch as the student sees it',
    ),
)

_GLOBAL_CONTRASTIVE = _shaping(
    Setting(
        "global_contrastive.mode",
        str,
        "published",
        '"published": loss of the papers; "reference": loss of the authors\' code',
        MODES,
    ),
    Setting(
        "global_contrastive.gamma_schedule",
        str | None,
        None,
        "schedule of gamma, the inner learning rate; None: default of the loss",
        GAMMA_SCHEDULES,
    ),
    Setting("global_contrastive.gamma_min", float, 0.2, "final gamma; the initial one is 1", _FRACTION),
    Setting("global_contrastive.gamma_epochs", int, 18, "epochs of the gamma schedule", Range(1, 10**6)),
    Setting("global_contrastive.rho", float, 6.5, "weight of the temperature regularizer", Range(0, 1e4)),
    Setting("global_contrastive.eps", float, 1e-14, "constant added to the sample state u", _EPS),
    Setting(
        "global_contrastive.temperature_learning_rate",
        float,
        1e-2,
        "learning rate of per-sample temperatures",
        _RATE,
    ),
    Setting(
        "global_contrastive.temperature_beta1",
        float | None,
        None,
        'beta1 of Adam for per-sample temperatures; None: optimizer.beta1 in mode "reference", else 0.9',
        _DECAY,
    ),
    Setting(
        "global_contrastive.temperature_beta2",
        float | None,
        None,
        'beta2 of Adam for per-sample temperatures; None: optimizer.beta2 in mode "reference", else 0.999',
        _DECAY,
    ),
    Setting(
        "global_contrastive.temperature_eps",
        float | None,
        None,
        'eps of Adam for per-sample temperatures; None: optimizer.eps in mode "reference", else 1e-8',
        _EPS,
    ),
)

_GRAD_CACHE = (
    Setting(
        "grad_cache.chunk_size",
        int | None,
        None,
        "pairs encoded at a time, over all devices; None: no gradient caching",
        _COUNT,
    ),
    Setting(
        "grad_cache.passage_chunk_size",
        int | None,
        None,
        "passages of text retrieval encoded at a time, over all devices; None: as many as queries, "
        "grad_cache.chunk_size",
        _COUNT,
    ),
    Setting(
        "grad_cache.keep",
        int,
        0,
        "number of chunks whose activations are stored instead of recomputed; -1: as many as fit",
        Range(-1),
    ),
    Setting(
        "grad_cache.keep_residual",
        bool,
        False,
        "store the residual streams of the other chunks; keep = -1 turns this on unless all chunks fit",
    ),
    Setting(
        "grad_cache.residency",
        str,
        "device",
        'memory that stores the batch; "replay": none, images are read again in the second pass',
        BATCH_RESIDENCIES,
    ),
)

_TEXT_RETRIEVAL = (
    Setting(
        "text_retrieval.hard_negatives",
        int,
        1,
        "hard negatives of each query in a batch, also negatives of the other queries; those that a query lacks are "
        "masked",
        Range(0, 1024),
        fixed=True,
    ),
    Setting(
        "text_retrieval.positive",
        str,
        "first",
        'positive and hard negatives of a query: the "first" ones of the file, or drawn at "random" in every epoch',
        SELECTIONS,
        fixed=True,
    ),
    Setting(
        "text_retrieval.query_length",
        int | None,
        None,
        "tokens of a query; None: as many as of a passage, text.context_length",
        Range(3, 2**16),
    ),
    Setting(
        "text_retrieval.separator",
        str,
        " ",
        'text between the title and the text of a passage; " [SEP] " with tokenizers of BERT, as in DPR',
    ),
    *_evaluated(
        Setting(
            "text_retrieval.corpus",
            str | None,
            None,
            "passages to search in evaluations, .tsv or .jsonl; None: no evaluation",
        ),
        Setting(
            "text_retrieval.questions",
            str | None,
            None,
            "questions of evaluations with answers, or queries with text_retrieval.judgments",
        ),
        Setting(
            "text_retrieval.judgments",
            str | None,
            None,
            "relevant passages of the queries, in the columns of TREC or BEIR; None: questions have answers",
        ),
    ),
)

_TRAINING = (
    Setting("batch_size", int, 256, "global batch size, in pairs over all devices", Range(1, 2**24), fixed=True),
    Setting(
        "total_steps",
        int | None,
        None,
        "training steps; None: from samples_seen or epochs, else 1000",
        Range(1, _STEPS),
    ),
    Setting(
        "samples_seen", int | None, None, "training samples, instead of total_steps; whole batches are used", _COUNT
    ),
    Setting(
        "epochs",
        int | None,
        None,
        "epochs, instead of total_steps; each has as many steps as the dataset has whole batches",
        Range(1, 10**6),
    ),
    Setting(
        "on_nonfinite",
        str,
        "stop",
        'reaction to a loss or gradient that is not finite; "skip": the devices leave out the update, and the '
        "sample indices go to skipped_batches.jsonl",
        ON_NONFINITE,
    ),
    Setting(
        "max_skipped",
        int,
        10,
        'skipped steps in a row after which the run stops, with on_nonfinite = "skip"',
        _COUNT,
    ),
    *_shaping(
        Setting(
            "ema_decay",
            float | None,
            None,
            "decay of the moving average of the parameters, which evaluations then use; None: no average",
            _DECAY,
        )
    ),
    Setting("ema_warmup", bool, False, "raise the decay of the moving average from 0 to ema_decay, as timm does"),
    Setting(
        "parameter_sharding",
        str,
        "replicated",
        'sharding of parameters and optimizer state; "fsdp": over the devices',
        PARAMETER_SHARDINGS,
        evaluated=True,
    ),
    Setting(
        "cache_frozen",
        str | None,
        None,
        'folder for the features of frozen towers, computed once per sample; "workdir": in the work directory; None: '
        "frozen towers encode every batch",
    ),
)

_OPTIMIZER = _shaping(
    Setting("optimizer.name", str, "adamw", "optimizer", OPTIMIZERS, fixed=True),
    Setting("optimizer.learning_rate", float, 1e-3, "peak learning rate, after the warm-up", _POSITIVE),
    Setting("optimizer.schedule", str, "cosine", "learning rate schedule after the warm-up", SCHEDULES),
    Setting("optimizer.warmup_steps", int, 100, "steps of linear warm-up", Range(0, _STEPS)),
    Setting(
        "optimizer.warmup_start",
        str,
        "zero",
        'learning rate of the first step; "one_step": learning_rate / warmup_steps, as in OpenCLIP',
        WARMUP_STARTS,
    ),
    Setting(
        "optimizer.final_learning_rate",
        float,
        0.0,
        'learning rate at the end of "cosine", "linear" and the cooldown',
        _FROM_ZERO,
    ),
    Setting(
        "optimizer.rsqrt_timescale",
        float,
        10_000.0,
        'steps after the warm-up in which "rsqrt" falls to 0.71 of the learning rate',
        Range(1, _STEPS),
    ),
    Setting(
        "optimizer.cooldown_steps",
        int,
        0,
        "last steps, in which the learning rate falls to optimizer.final_learning_rate, with any schedule",
        Range(0, _STEPS),
    ),
    Setting("optimizer.cooldown_power", float, 1.0, "power of the cooldown; 1: linear", Range(0, 100, above=True)),
    Setting(
        "optimizer.learning_rate_rules",
        Rules,
        (),
        'learning rate factors by parameter name, such as (("visual/.*", 0.1), (".*", 1.0)); (): 1 for all',
    ),
    Setting(
        "optimizer.layer_decay",
        tuple[float, float],
        (1.0, 1.0),
        "factors by which the learning rates of the image and the text tower fall from layer to layer; 1: none",
        Range(0, 1, above=True),
    ),
    Setting(
        "optimizer.temperature_learning_rate",
        float | None,
        None,
        "learning rate of the logit scale; None: that of the other parameters",
        _RATE,
    ),
    Setting(
        "optimizer.temperature_schedule",
        str,
        "constant",
        "schedule of optimizer.temperature_learning_rate",
        TEMPERATURE_SCHEDULES,
    ),
    Setting("optimizer.weight_decay", float, 0.2, "decoupled weight decay", Range(0, 100)),
    Setting(
        "optimizer.weight_decay_rules",
        Rules | None,
        None,
        "weight decay factors by parameter name; None: matrices and the probe of SigLIP's pool decay, as in OpenCLIP; "
        "(): only matrices decay",
        before=(),
    ),
    Setting("optimizer.beta1", float, 0.9, "decay of the first moment or the momentum", _DECAY),
    Setting("optimizer.beta2", float, 0.98, "decay of the second moment", _DECAY),
    Setting("optimizer.eps", float, 1e-6, "constant added to the root of the second moment", _EPS),
    Setting(
        "optimizer.clip_norm", float | None, None, "largest global norm of the gradient; None: no clipping", _POSITIVE
    ),
)

_EVALUATION = (
    Setting("eval_every", int, 500, "steps between evaluations; 0: at the end only", _FROM_ZERO),
    *_evaluated(
        Setting(
            "evaluations",
            tuple[str, ...],
            (),
            "further evaluations: suites (imagenet_variants, retrieval, datacomp38), benchmarks such as cifar10 or "
            "cifar10:linear_probe, paths of data, or Python files, see docs/evaluation.md",
        ),
        Setting("evaluation.data_dir", str | None, None, "folder of the benchmarks in evaluations; None: data_dir"),
        Setting(
            "evaluation.batch_size", int, 256, "images or captions encoded at a time, over all devices", Range(1, 2**17)
        ),
        Setting(
            "evaluation.retrieval_dataset",
            str | None,
            None,
            "dataset for retrieval and the validation loss; None: skip both",
        ),
        Setting(
            "evaluation.retrieval_split", str, "validation", "split of evaluation.retrieval_dataset, such as validation"
        ),
        Setting("evaluation.gallery", int | None, None, "images of the split used for retrieval; None: all", _COUNT),
        Setting("evaluation.zero_shot_dataset", str | None, None, "dataset for zero-shot classification; None: skip"),
        Setting("evaluation.zero_shot_split", str, "validation", "split of evaluation.zero_shot_dataset"),
    ),
)

_LOGS = (
    Setting("log_every", int, 50, "steps between lines of metrics, of a plain console and of run.log", _COUNT),
    Setting("checkpoint_every", int, 500, "steps between checkpoints; 0: at the end only", _FROM_ZERO),
    Setting("keep_checkpoints", int, 2, "latest checkpoints to keep", _COUNT),
    Setting("keep_every", int, 0, "also keep checkpoints whose step is a multiple of this; 0: none", _FROM_ZERO),
    Setting(
        "keep_best",
        str | None,
        None,
        'also keep the checkpoint of the evaluation with the best value of this metric, such as "zero_shot/top1"; '
        "checkpoints are then saved at every evaluation; None: none",
    ),
    Setting(
        "resume",
        str,
        "latest",
        '"latest": continue from the newest intact checkpoint; a step, such as "500": continue from it and set newer '
        "ones aside; a path: start from the state of that run or WORKDIR/checkpoints/STEP",
    ),
    Setting("max_failed_saves", int, 3, "failed saves in a row that stop the run", _COUNT),
    Setting("export", bool, False, "also write the final weights in OpenCLIP's format to WORKDIR/exported"),
    Setting(
        "stop_timeout",
        int,
        60,
        "seconds from a stop signal until a run that has not saved and left is ended, see docs/training.md",
        _COUNT,
    ),
    Setting(
        "writers",
        tuple[str, ...],
        (),
        "writers of metrics beside metrics.jsonl: metrics.csv, TensorBoard, Weights & Biases; see docs/training.md",
        tuple(WRITERS),
    ),
    Setting(
        "profile",
        tuple[int, ...],
        (),
        "first and last step of a trace of jax.profiler, such as (100, 110), in WORKDIR/profile; (): none",
        Range(1, _STEPS),
    ),
)

SECTIONS = {
    "Run": _RUN,
    "Data": _DATA,
    "Text": _TEXT,
    "Model": _MODEL,
    "Initial parameters": _INIT,
    "Loss": _LOSS,
    "Global contrastive losses (SogCLR to FastCLIP)": _GLOBAL_CONTRASTIVE,
    "Gradient caching": _GRAD_CACHE,
    "Dense text retrieval": _TEXT_RETRIEVAL,
    "Training": _TRAINING,
    "Optimizer": _OPTIMIZER,
    "Evaluation": _EVALUATION,
    "Logs and checkpoints": _LOGS,
}
SETTINGS = {setting.name: setting for section in SECTIONS.values() for setting in section}
