"""Mismatched arguments raise errors that name them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from towers import RNG, SEPARATE, batch_sharding, contrastive, mlp_batch, mlp_params

from infcl_jax import Replay, cached_value_and_grad, chunk_rows

MLP = {"encoders": SEPARATE, "loss_fn": contrastive, "chunk_size": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoders": {}}, "at least one encoder"),
        ({"chunk_size": 0}, "chunk_size of 'image' to be an integer of at least 1, got 0"),
        ({"chunk_size": 4.0}, "chunk_size of 'image' to be an integer"),
        ({"chunk_size": {"image": 8}}, r"chunk_size for every encoder, got none for \['text'\]"),
        (
            {"chunk_size": {"image": 8, "text": 8, "audio": 8}},
            r"chunk_size to name .*\['image', 'text'\], got \['audio'\]",
        ),
        ({"keep": -1}, "keep of 'image' to be an integer of at least 0, got -1"),
        ({"keep": {"audio": 1}}, r"keep to name encoders .* got \['audio'\]"),
        ({"frozen": ("audio",)}, r"frozen to name encoders .* got \['audio'\]"),
        ({"frozen": "image"}, "frozen to be a collection of names, got 'image'"),
        ({"keep_names": "hidden"}, "keep_names to be a collection of names, got 'hidden'"),
        ({"offload": "disk"}, r"offload to be one of \('none', 'host'\), got 'disk'"),
        ({"sharding": P("data")}, "sharding to be a NamedSharding of the leading axis alone"),
        (
            {"sharding": NamedSharding(Mesh(np.array(jax.devices()[:1]), "d"), P(None))},
            "sharding to be a NamedSharding",
        ),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        cached_value_and_grad(**(MLP | options))


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({}, {"batch": {"image": np.zeros((8, 8))}}, r"got \['image'\] without \['text'\]"),
        ({}, {"batch": {"image": [np.zeros((8, 8)), np.zeros((7, 8))]}}, "common leading axis in batch entry 'image'"),
        ({}, {"batch": {"image": np.float32(0)}}, r"leading axis in batch entry 'image', got shapes \[\(\)\]"),
        ({}, {"batch": {"image": np.zeros((0, 8))}}, "rows of image that 1 devices can share evenly, got 0"),
        ({}, {"batch": {"image": Replay(8, None)}}, r"with offload 'none', got Replay for \['image'\]"),
        ({"offload": "host"}, {"batch": {"mask": Replay(8, None)}}, r"without an encoder, got Replay for \['mask'\]"),
        ({"offload": "host"}, {"batch": {"image": Replay(16, lambda _: np.zeros((3, 8)))}}, r"8 rows from load\(0\)"),
        (
            {"sharding": 4},
            {"batch": {"image": np.zeros((6, 8))}},
            "rows of image that 4 devices can share evenly, got 6",
        ),
        ({"sharding": 4, "chunk_size": 6}, {}, "chunk_size of image that 4 devices can share evenly, got 6"),
        ({}, {"params": {"image": jnp.int32(1)}}, r"floating parameters, got int32 at \['image'\]; separate"),
        ({}, {"params": {"image": jax.nn.relu}}, r"floating parameters, got \w+ at \['image'\]; separate"),
        ({}, {"rng": 3}, "rng to be one PRNG key"),
        ({}, {"rng": jax.random.split(RNG)}, "rng to be one PRNG key"),
        ({"loss_fn": lambda p, f: f["image"]}, {}, r"loss_fn to return a floating scalar, got float32\[16, 16\]"),
        ({"encoders": {"image": lambda p, x, _: x[:3]}}, {}, "features with 8 rows for 8 rows, got float32"),
        ({"encoders": {"image": lambda p, x, _: x > 0}}, {}, "encoder 'image' to return floating features"),
    ],
)
def test_calls_that_do_not_fit(options, changes, message):
    if "sharding" in options:
        options = options | {"sharding": batch_sharding(options["sharding"])}
    batch = mlp_batch(16) | changes.get("batch", {})
    batch = changes["batch"] if set(changes.get("batch", ())) == {"image"} and "without" in message else batch
    with pytest.raises(ValueError, match=message):
        cached_value_and_grad(**(MLP | options))(changes.get("params", mlp_params()), batch, changes.get("rng"))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_batch_on_several_devices_without_sharding_gives_a_warning(compiled):
    batch = jax.device_put(mlp_batch(16), batch_sharding(4))
    f = cached_value_and_grad(**MLP)
    with pytest.warns(UserWarning, match=r"\{'data': 4\}, got None: every device encodes every row"):
        (jax.jit(f) if compiled else f)(mlp_params(), batch)


def test_host_form_cannot_be_traced():
    f = cached_value_and_grad(**MLP, offload="host")
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda params: f(params, mlp_batch(16)))(mlp_params())


@pytest.mark.parametrize(
    ("number", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 8, 9]), (2, [4, 5, 10, 11]), (3, None), (-1, None)]
)
def test_rows_of_a_chunk(number, expected):
    if expected is None:
        with pytest.raises(ValueError, match="0 to 2"):
            chunk_rows(number, 12, 4, 2)
    else:
        assert chunk_rows(number, 12, 4, 2).tolist() == expected
