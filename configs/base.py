"""Default settings of a run, with their meaning.

The other configurations start from these.

For example:
    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart --config.batch_size=512
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Return the default settings.

    A setting that does not exist here is an error everywhere.
    """
    config = ConfigDict()
    config.seed = 0  # of the initial parameters, data order, augmentation and dropout
    config.cpu_devices = 1  # simulated devices on the CPU; no effect on other platforms
    # Folder of the persistent compilation cache. "off": no cache. None: JAX_COMPILATION_CACHE_DIR if set, else, for
    # runs of one process only, infcl_jax in the user's cache folder (XDG_CACHE_HOME or ~/.cache).
    config.compilation_cache = placeholder(str)

    # Data
    config.dataset = "shapes/quickstart"  # dataset name, see infcl_jax.data.load_source
    config.split = "train"  # training split
    config.data_dir = "data"  # folder of the prepared datasets
    config.num_workers = 0  # reading and decoding processes; 0: threads of the training process
    config.augmentation = ConfigDict()
    config.augmentation.scale = (0.9, 1.0)  # area range of random crops, as a fraction of the image; (1, 1): no crop
    config.augmentation.shift = 0  # random shift in pixels

    # Model
    config.model = "tiny-shapes"  # model name, one of infcl_jax.models.model_names()
    config.model_overrides = ""  # changes to the model, e.g. "vision.layers=6,dtype=bfloat16,vision.remat=dots"

    config.frozen = ()  # frozen towers, "image" or "text" (LiT)

    # Loss
    config.loss = "clip"  # "clip", "siglip", "sogclr", "isogclr", or "fastclip_v0" to "fastclip_v3"
    config.implementation = placeholder(str)  # see infcl_jax.pairwise_lse; None: the best on this device

    config.global_contrastive = ConfigDict()  # SogCLR to FastCLIP, see infcl_jax.training.GlobalContrastiveConfig
    config.global_contrastive.mode = "published"  # or "reference": as in the authors' code
    config.global_contrastive.gamma_schedule = placeholder(str)  # "constant" or "cosine"; None: default of the loss
    config.global_contrastive.gamma_min = 0.2  # final inner learning rate; the initial one is 1
    config.global_contrastive.gamma_epochs = 18  # epochs of the gamma schedule
    config.global_contrastive.rho = 6.5  # weight of learned temperatures
    config.global_contrastive.eps = 1e-14
    config.global_contrastive.temperature_learning_rate = 1e-2  # of per-sample temperatures
    # Adam for per-sample temperatures. None: the optimizer's settings in mode "reference", else 0.9, 0.999 and 1e-8.
    config.global_contrastive.temperature_beta1 = placeholder(float)
    config.global_contrastive.temperature_beta2 = placeholder(float)
    config.global_contrastive.temperature_eps = placeholder(float)

    # Gradient caching, see infcl_jax.training.GradCacheConfig
    config.grad_cache = ConfigDict()
    config.grad_cache.chunk_size = placeholder(int)  # pairs encoded at a time, over all devices; None: no caching
    config.grad_cache.keep = 0  # chunks whose activations are stored instead of recomputed; -1: as many as fit
    config.grad_cache.keep_residual = False  # store the other chunks' residual streams; keep = -1 turns this on first
    config.grad_cache.residency = "device"  # of the batch: "device", "host", or "replay" (read twice)

    # Training
    config.batch_size = 256  # global, over all devices
    config.total_steps = 1000
    config.parameter_sharding = "replicated"  # "fsdp": parameters and optimizer state sharded over the devices
    config.optimizer = ConfigDict()  # see infcl_jax.training.OptimizerConfig
    config.optimizer.name = "adamw"  # "adamw", "lamb", "lion", "sgd", "adafactor"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule = "cosine"  # after the warm-up, or "constant"
    config.optimizer.warmup_steps = 100
    config.optimizer.warmup_start = "zero"  # first learning rate; "one_step": one warm-up step above zero, as OpenCLIP
    config.optimizer.final_learning_rate = 0.0
    config.optimizer.learning_rate_rules = ()  # factors by parameter name: (("visual/.*", 0.1), (".*", 1.0))
    config.optimizer.temperature_learning_rate = placeholder(float)  # of the logit scale; None: learning_rate
    config.optimizer.temperature_schedule = "constant"  # of the logit scale: or "cosine", "threshold"
    config.optimizer.weight_decay = 0.2
    config.optimizer.weight_decay_rules = ()  # factors by parameter name; (): only matrices decay
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.98
    config.optimizer.eps = 1e-6
    config.optimizer.clip_norm = placeholder(float)  # None: no clipping

    # Evaluation, see infcl_jax.evaluation.EvaluationConfig
    config.eval_every = 500  # steps between evaluations; 0: at the end only
    config.evaluation = ConfigDict()
    config.evaluation.batch_size = 256
    config.evaluation.retrieval_dataset = placeholder(str)
    config.evaluation.retrieval_split = "validation"
    config.evaluation.gallery = placeholder(int)
    config.evaluation.zero_shot_dataset = placeholder(str)
    config.evaluation.zero_shot_split = "validation"

    # Logs and checkpoints
    config.log_every = 50  # steps between console lines
    config.checkpoint_every = 500  # steps between checkpoints; 0: at the end only
    config.keep_checkpoints = 2  # latest checkpoints to keep
    config.tensorboard = False  # also write TensorBoard files
    return config.lock()
