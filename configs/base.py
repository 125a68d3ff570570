"""Every setting of a run with its meaning; the other configurations start from these.

For example:
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart --config.batch_size=512
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """The defaults. Names that do not exist here are errors everywhere."""
    config = ConfigDict()
    config.seed = 0  # initial parameters, order of the data, augmentation, dropout
    config.cpu_devices = 1  # devices to simulate when running on the CPU; no effect on other platforms
    # Folder of the persistent compilation cache. None: JAX_COMPILATION_CACHE_DIR if set, else infcl_jax in the user's
    # cache folder (XDG_CACHE_HOME or ~/.cache), but only for runs of one process. "off": no cache.
    config.compilation_cache = placeholder(str)

    # Data
    config.dataset = "shapes/quickstart"  # a name of infcl_jax.data.load_source
    config.split = "train"  # its split to train on
    config.data_dir = "data"  # folder of the prepared datasets
    config.num_workers = 0  # processes that read and decode; 0: threads of the training process
    config.augmentation = ConfigDict()
    config.augmentation.scale = (0.9, 1.0)  # share of the image's area that a random crop keeps; (1, 1): no crop
    config.augmentation.shift = 0  # random shift in pixels

    # Model
    config.model = "tiny-shapes"  # a name of infcl_jax.models.model_names()
    config.model_overrides = ""  # changes to it, e.g. "vision.layers=6,dtype=bfloat16,vision.remat=dots"

    config.frozen = ()  # towers that stay as they are, "image" or "text" (LiT)

    # Loss
    config.loss = "clip"  # "clip", "siglip", "sogclr", "isogclr", or "fastclip_v0" to "fastclip_v3"
    config.implementation = placeholder(str)  # of the pairs, see infcl_jax.pairwise_lse; None: the best here

    config.global_contrastive = ConfigDict()  # of SogCLR to FastCLIP, see infcl_jax.training.GlobalContrastiveConfig
    config.global_contrastive.mode = "published"  # or "reference", as the authors' code computes
    config.global_contrastive.gamma_schedule = placeholder(str)  # "constant", "cosine"; None: as the loss has it
    config.global_contrastive.gamma_min = 0.2  # the inner learning rate starts at 1 and ends here
    config.global_contrastive.gamma_epochs = 18  # after so many epochs
    config.global_contrastive.rho = 6.5  # weight of learned temperatures
    config.global_contrastive.eps = 1e-14
    config.global_contrastive.temperature_learning_rate = 1e-2  # where every sample has its own
    # Adam of those temperatures; None: the optimizer's setting in mode "reference", else 0.9, 0.999 and 1e-8
    config.global_contrastive.temperature_beta1 = placeholder(float)
    config.global_contrastive.temperature_beta2 = placeholder(float)
    config.global_contrastive.temperature_eps = placeholder(float)

    # Gradient caching, see infcl_jax.training.GradCacheConfig
    config.grad_cache = ConfigDict()
    config.grad_cache.chunk_size = placeholder(int)  # pairs encoded at a time, over all devices; None: all, no caching
    config.grad_cache.keep = 0  # chunks whose activations are kept instead of computed twice; -1: as much as fits
    config.grad_cache.keep_residual = False  # whether the others keep their residual streams; -1 above does so first
    config.grad_cache.residency = "device"  # where the batch lives: "device", "host", or "replay": read twice

    # Training
    config.batch_size = 256  # global, over all devices
    config.total_steps = 1000
    config.parameter_sharding = "replicated"  # "fsdp": parameters and optimizer state sharded over the devices
    config.optimizer = ConfigDict()  # see infcl_jax.training.OptimizerConfig
    config.optimizer.name = "adamw"  # "adamw", "lamb", "lion", "sgd", "adafactor"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"  # after the warm-up; or "constant"
    config.optimizer.warmup_steps = 100
    config.optimizer.warmup_start = "zero"  # rate of the first step; "one_step": a warm-up step above it, as OpenCLIP
    config.optimizer.final_learning_rate = 0.0
    config.optimizer.learning_rate_rules = ()  # factors by name: (("visual/.*", 0.1), (".*", 1.0))
    config.optimizer.temperature_learning_rate = placeholder(float)  # of the logit scale; None: as the others
    config.optimizer.temperature_schedule = "constant"  # of that; or "cosine", "threshold"
    config.optimizer.weight_decay = 0.2
    config.optimizer.weight_decay_rules = ()  # likewise; none: matrices decay, vectors and scalars do not
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.98
    config.optimizer.eps = 1e-6
    config.optimizer.clip_norm = placeholder(float)  # None: no clipping

    # Evaluation, see infcl_jax.evaluation.EvaluationConfig
    config.eval_every = 500  # steps; 0: at the end only
    config.evaluation = ConfigDict()
    config.evaluation.batch_size = 256
    config.evaluation.retrieval_dataset = placeholder(str)
    config.evaluation.retrieval_split = "validation"
    config.evaluation.gallery = placeholder(int)
    config.evaluation.zero_shot_dataset = placeholder(str)
    config.evaluation.zero_shot_split = "validation"

    # Records
    config.log_every = 50  # steps between console lines
    config.checkpoint_every = 500  # steps; 0: at the end only
    config.keep_checkpoints = 2  # of the latest
    config.tensorboard = False  # also write TensorBoard files
    return config.lock()
