"""The recipes of papers: frozen settings, models, and plans on the papers' GPUs."""

import importlib
import json
import math

import jax
import pytest
import runs
from flax.traverse_util import flatten_dict
from golden.make_recipes import ARGUMENTS, settings

from configs import disco_clip, inf_cl, openclip, siglip
from infcl_jax import run
from infcl_jax.models import build_model
from infcl_jax.planner import device_named, plan_memory, step_time
from infcl_jax.planner.activations import parameter_shapes
from infcl_jax.settings import check_config, total_steps
from infcl_jax.training import OptimizerConfig, check_optimizer, learning_rate_schedule
from infcl_jax.training.optimizers import decay_factors

FROZEN = json.loads((runs.ROOT / "tests" / "golden" / "recipes.json").read_text())
NAMES = [(recipe, argument) for recipe, arguments in ARGUMENTS.items() for argument in arguments]
K = 1024
slow, full = pytest.mark.slow, pytest.mark.full  # tracing a large tower takes seconds


@pytest.mark.parametrize(("recipe", "argument"), NAMES)
def test_settings_are_frozen_and_valid(recipe, argument):
    assert settings(recipe, argument) == FROZEN[f"{recipe}:{argument}"]
    config = importlib.import_module(f"configs.{recipe}").get_config(argument)
    check_config(config)
    optimizer = OptimizerConfig(**config.optimizer)
    rate = learning_rate_schedule(optimizer, total_steps(config))
    assert float(rate(optimizer.warmup_steps)) == pytest.approx(optimizer.learning_rate)
    assert optimizer.warmup_steps < 0.2 * total_steps(config)
    build_model(run.read_model_config(config))


def test_every_frozen_recipe_is_tested():
    assert FROZEN.keys() == {":".join(name) for name in NAMES}


# Recipe, argument, GPU and number of GPUs: the papers' GPUs (an A800 computes as an A100), and H100s in place of TPUs.
PLANS = [
    (openclip, "ViT-B-32", "A100-40", 128),
    pytest.param(openclip, "ViT-B-16", "A100-40", 176, marks=full),
    pytest.param(openclip, "ViT-B-16-plus-240", "A100-40", 224, marks=full),
    pytest.param(openclip, "ViT-L-14", "A100-40", 400, marks=full),
    pytest.param(disco_clip, "laion100m", "A100-40", 64, marks=full),
    pytest.param(disco_clip, "laion100m", "A100-40", 8, marks=full),
    pytest.param(disco_clip, "laion100m,batch_size=196608", "A100-40", 64, marks=full),
    pytest.param(inf_cl, "laion400m", "A100-80", 8, marks=full),
    pytest.param(inf_cl, "laion400m,gpus=4", "A100-80", 4, marks=full),
    pytest.param(inf_cl, "laion400m,batch_size=1048576,gpus=32", "A100-80", 32, marks=full),
    pytest.param(inf_cl, "laion400m,model=ViT-L/14", "A100-80", 8, marks=full),
    pytest.param(inf_cl, "laion400m,experiment=clip,model=ViT-L/14,batch_size=262144", "A100-80", 8, marks=full),
    pytest.param(
        inf_cl, "laion400m,experiment=clip,model=ViT-L/14,offload=yes,batch_size=4194304", "A100-80", 8, marks=full
    ),
    pytest.param(siglip, "base", "H100", 32, marks=slow),
    pytest.param(siglip, "finetune", "H100", 16, marks=full),
    pytest.param(siglip, "scaled_b", "H100", 64, marks=full),
    pytest.param(siglip, "scaled_l", "H100", 128, marks=full),
    pytest.param(siglip, "siglit", "H100", 4, marks=full),
    pytest.param(siglip, "siglit_4", "H100", 4, marks=full),
]


@pytest.mark.parametrize(("recipe", "argument", "gpu", "count"), PLANS)
def test_the_run_fits_onto_the_gpus_of_the_paper(recipe, argument, gpu, count):
    config, device = recipe.get_config(argument), device_named(gpu)
    with jax.sharding.use_abstract_mesh(device.mesh):
        workload = run.workload(config, count, device.memory_limit, device.implementation)
        assert plan_memory(workload, device.memory_limit).fits
    assert step_time(workload, device).total > 0


def test_learning_rates_of_disco_clip_are_linear_in_the_batch():
    for batch, rate in ((8192, 1.25e-4), (16_384, 2.5e-4), (32_768, 5e-4), (65_536, 1e-3)):
        config = disco_clip.get_config(f"laion100m,batch_size={batch}")
        assert config.optimizer.learning_rate == rate
        assert config.total_steps == 16 * (100_000_000 // batch)


@pytest.mark.parametrize("batch", [4 * K, 64 * K, 1024 * K, 4096 * K])
def test_inf_cl_trains_8_epochs_and_warms_up_for_half_of_one(batch):
    config = inf_cl.get_config(f"laion400m,batch_size={batch}")
    assert config.total_steps == 8 * (280_321_756 // batch) and config.eval_every == config.total_steps // 8
    assert config.optimizer.warmup_steps == pytest.approx(280_321_756 / batch / 2, abs=1)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.weight_decay) == ("adafactor", 1e-3, 1e-4)
    assert (optimizer.beta1, optimizer.beta2, optimizer.schedule) == (0.9, 0.95, "cosine")
    assert tuple(config.augmentation.scale) == (0.08, 1.0)


@pytest.mark.parametrize(
    ("argument", "towers"),
    [
        ("laion400m", ((768, 12, 16), 512, "bert", 768)),
        ("laion400m,model=ViT-B/32", ((768, 12, 32), 512, "bert", 768)),
        ("laion400m,model=ViT-L/14", ((1024, 24, 14), 768, "bert", 1024)),
        ("laion400m,model=ViT-L/14,text=clip", ((1024, 24, 14), 768, "clip", 768)),
    ],
)
def test_towers_of_inf_cl(argument, towers):
    config = inf_cl.get_config(argument)
    model = run.read_model_config(config)
    kind = "bert" if hasattr(model.text, "token_types") else "clip"
    vision = (model.vision.width, model.vision.layers, model.vision.patch_size)
    assert (vision, model.embed_dim, kind, model.text.width) == towers
    assert tuple(config.frozen) == ("image",) and config.init.image.startswith("data/inf_cl/ViT-")
    assert (config.init.text is not None) == (kind == "bert") and model.dtype == "bfloat16"


def test_temperature_bias_and_towers_of_siglip():
    for argument in ARGUMENTS["siglip"]:
        config = siglip.get_config(argument)
        model = run.read_model_config(config)
        assert (model.init_logit_scale, model.init_logit_bias) == (pytest.approx(math.log(10)), -10.0)
        assert (model.text.vocab_size, model.text.causal, model.text.pool) == (32_000, False, "last")
        assert model.text.context_length == (64 if "scaled" in argument else 16)
        assert (config.cache_frozen is not None) == argument.startswith("siglit")


def test_the_fine_tuned_tower_of_siglip_does_not_decay():
    config = siglip.get_config("finetune")
    config.model_overrides += ",vision.layers=1,text.layers=1"
    optimizer = OptimizerConfig(**config.optimizer)
    shapes = parameter_shapes(build_model(run.read_model_config(config)))
    check_optimizer(optimizer, shapes)
    factors = flatten_dict(decay_factors(optimizer, shapes), sep="/")
    for name, shape in flatten_dict(shapes, sep="/").items():
        assert factors[name] == float(shape.ndim >= 2 and name.startswith("text/")), name


@pytest.mark.parametrize(
    ("recipe", "argument", "message"),
    [
        (inf_cl, "laion2b", "one of .*'laion400m'.*, got 'laion2b'"),
        (inf_cl, "cc3m,model=ViT-H/14", "model to be one of .*'ViT-L/14'.*, got 'ViT-H/14'"),
        (inf_cl, "cc3m,batch=64", "changes of .*'batch_size'.*, got 'batch'"),
        (inf_cl, "cc3m,batch_size=0", "batch_size to be a positive number, got '0'"),
        (disco_clip, "laion400m,epochs=few", "epochs to be a positive number, got 'few'"),
        (disco_clip, "laion400m,implementation=ring", "implementation to be one of .*, got 'ring'"),
        (siglip, "base,", r"changes of \('batch_size', 'millions'\), got ''"),
        (openclip, "RN50", "one of .*'ViT-B-32'.*, got 'RN50'"),
        (openclip, "ViT-B-32,gpus=8", r"changes of \(\), got 'gpus'"),
    ],
)
def test_a_mistake_in_an_argument_is_named(recipe, argument, message):
    with pytest.raises(ValueError, match=rf"^expected {message}$"):
        recipe.get_config(argument)
