"""Shapes in the signatures of public functions, and the hook that checks backends."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError, jaxtyped
from signatures import checked

import infcl_jax
from infcl_jax.models import create_model
from infcl_jax.ops.layer_norm.api import normalize
from infcl_jax.ops.pairwise.base import similarities
from infcl_jax.ops.pairwise.lse.block import LseBlock
from infcl_jax.ops.pairwise.lse.dense import dense_lse

B, D = 6, 4
SCALE = 9.0
INDEX = jnp.arange(B, dtype=jnp.int32)
MASK = INDEX > 0
IDS = {"image_ids": jnp.stack([INDEX, INDEX], 1), "text_ids": jnp.stack([INDEX, INDEX], 1)}


def features(rows=B, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(rows), (rows, D), dtype)


# Arguments of the public functions after the features of both sides.
CALLS = {
    "pairwise_lse": [
        ((SCALE,), {}),
        ((jnp.float32(SCALE), jnp.full(B, SCALE)), {"x_mask": MASK, "y_mask": MASK, "labels": INDEX}),
        ((jnp.full(B, SCALE),), {"columns": False}),
        ((SCALE,), {"x_ids": INDEX, "y_ids": INDEX, "x_mask": MASK}),
    ],
    "clip_loss": [((SCALE,), {}), ((jnp.float32(SCALE),), {"mask": MASK}), ((SCALE,), {"weights": jnp.ones(B), **IDS})],
    "siglip_loss": [((SCALE, -SCALE), {}), ((jnp.float32(SCALE), jnp.float32(-SCALE)), {"mask": MASK})],
    "retrieval_loss": [((SCALE,), {}), ((SCALE,), {"labels": INDEX, "mask": MASK, "passage_mask": MASK})],
    "global_contrastive_loss": [
        ((INDEX, infcl_jax.create_samples(B)), {"variant": "fastclip_v1", "gamma": 0.5, "logit_scale": SCALE}),
        (
            (INDEX, infcl_jax.create_samples(B, temperature=0.1)),
            {
                "variant": "isogclr",
                "gamma": jnp.float32(0.5),
                "epoch": jnp.int32(1),
                "temperature_learning_rate": 0.1,
                "mask": MASK,
            },
        ),
    ],
}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, calls in CALLS.items() for n in range(len(calls))])
def test_public_functions_match_their_signatures(name, number):
    function = jaxtyped(getattr(infcl_jax, name), typechecker=checked)
    dtype = (jnp.bfloat16, jnp.float16, jnp.float32)[number % 3]
    arguments, options = CALLS[name][number]
    x, y = features(dtype=dtype), features(dtype=dtype)
    assert jax.eval_shape(lambda x, y: function(x, y, *arguments, **options), x, y) is not None


@pytest.mark.parametrize("name", CALLS)
def test_signatures_of_public_functions_reject_other_shapes(name):
    function = jaxtyped(getattr(infcl_jax, name), typechecker=checked)
    (arguments, options), *_ = CALLS[name]
    with pytest.raises(TypeCheckError):
        function(features()[None], features(), *arguments, **options)
    with pytest.raises(ValueError, match="expected"):
        getattr(infcl_jax, name)(features()[None], features(), *arguments, **options)


def test_pair_scores_and_samples_match_their_signatures():
    scores = jaxtyped(infcl_jax.pairwise_scores_lse, typechecker=checked)
    result = scores(
        lambda params, x, y: params * x @ y.T, jnp.float32(2), features(4), features(), tile=2, labels=INDEX[:4]
    )
    assert [a.shape for a in result] == [(4,), (B,), (4,)]
    assert jaxtyped(infcl_jax.create_samples, typechecker=checked)(B, temperature=0.1).log_u.shape[1] == 2
    assert jaxtyped(infcl_jax.chunk_rows, typechecker=checked)(1, rows=B, chunk_size=4).tolist() == [4, 5]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32])
def test_the_model_matches_its_signature(dtype):
    model = create_model("tiny", init_logit_bias=-10.0)
    image = jnp.zeros((B, model.visual.image_size, model.visual.image_size, 3), dtype)
    tokens = jnp.zeros((B, model.text.context_length), jnp.int32)
    function = jaxtyped(type(model).__call__, typechecker=checked)
    output, _ = jax.eval_shape(
        lambda rng: model.init_with_output(rng, image, tokens, method=function), jax.random.key(0)
    )
    assert output.image.shape == output.text.shape == (B, output.image.shape[1])


def test_backends_reject_other_shapes():
    with pytest.raises(TypeCheckError):
        similarities(features(), features().T)
    with pytest.raises(TypeCheckError, match="scale"):
        normalize(features(), jnp.ones(D + 1), jnp.ones(D), jnp.float32)
    with pytest.raises(TypeCheckError, match="block"):  # fields of a named tuple
        dense_lse(LseBlock(features(), features(), jnp.float32(SCALE), labels=INDEX[1:]))


def test_the_library_does_not_import_the_type_checker():
    code = "import sys, infcl_jax.run; assert 'jaxtyping' in sys.modules and 'beartype' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
