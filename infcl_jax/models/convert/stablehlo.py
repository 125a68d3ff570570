"""Export of both encoders as StableHLO, through `jax.export`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from infcl_jax.models.clip import CLIP, TOWERS
from infcl_jax.models.config import CLIPConfig
from infcl_jax.models.convert.reference import fixed_inputs, summary
from infcl_jax.models.convert.tensor_files import read_tensors, write_tensors
from infcl_jax.models.registry import build_model, change_config, config_of

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_CPU = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="cpu", platform="cpu", num_cores=None))

_README = """# Encoders as StableHLO

Both functions take any batch size, and their weights as a dictionary. They need only JAX and safetensors:

    import pathlib
    from jax import export
    from safetensors.flax import load_file

    weights = load_file("image.safetensors")
    encode = export.deserialize(bytearray(pathlib.Path("image.stablehlo").read_bytes()))
    features = encode.call(weights, images)

- `image.stablehlo`: uint8 images [b, {size}, {size}, 3] to L2-normalized {dtype} features [b, {features}].
- `text.stablehlo`: int32 token ids [b, {length}], to L2-normalized {dtype} features [b, {features}].

Similarities are multiplied by {scale:.6g}{bias}. Platforms: {platforms}.
"""


def export_stablehlo(
    path: str | Path, model: CLIP | CLIPConfig, variables: Any, *, platforms: Sequence[str] = PLATFORMS
) -> str:
    """Write image and text encoder as portable StableHLO programs with a symbolic batch size.

    Writes `image.stablehlo`, `image.safetensors`, the same of `text`, and a `README.md` that says how to call them. The
    programs use no kernels of one device.

    Examples:
      >>> checked = export_stablehlo("stablehlo", model, variables, platforms=["cpu"])

    Args:
      path: folder, created if missing.
      model: the model, or its configuration.
      variables: its variables.
      platforms: platforms of JAX that can run the programs.

    Returns:
      One line with the largest difference of the features of the deserialized programs from the model's, on this
      device.

    Raises:
      ImportError: flatbuffers is not installed (extra "export").
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("format stablehlo needs the package flatbuffers; pip install 'infcl_jax[export]'")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model) if isinstance(model, CLIP) else model
    # Attention that runs on every device.
    portable = {
        f"{name}.attention": "xla" for name in ("vision", "text") if hasattr(getattr(config, name), "attention")
    }
    model, portable_model = build_model(config), build_model(change_config(config, **portable))
    (batch,) = export.symbolic_shape("b")
    size, length = config.vision.image_size, config.text.context_length
    inputs = {
        "image": jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
        "text": jax.ShapeDtypeStruct((batch, length), jnp.int32),
    }
    arrays = flatten_dict(jax.device_get(variables), sep="/")
    noise, tokens = fixed_inputs(config)
    examples = {"image": np.uint8(np.clip(64 * noise + 128, 0, 255)), "text": tokens}
    difference, tensors = 0.0, 0
    for tower, subtree in TOWERS.items():
        weights = {name: np.asarray(array) for name, array in arrays.items() if name.split("/")[1] == subtree}
        shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
        with use_abstract_mesh(_CPU):  # selects no kernel of this machine's devices
            program = export.export(_encoder(portable_model, tower), platforms=platforms)(shapes, inputs[tower])
        program_file, weight_file = folder / f"{tower}.stablehlo", folder / f"{tower}.safetensors"
        write_tensors(weight_file, weights)
        program_file.write_bytes(program.serialize())
        restored = export.deserialize(bytearray(program_file.read_bytes()))
        got = restored.call(read_tensors(weight_file), examples[tower])
        expected = _encoder(model, tower)(weights, examples[tower])
        difference = max(difference, float(np.abs(np.float32(got) - np.float32(expected)).max()))
        tensors += len(weights)
    scale, bias = (arrays.get(f"params/{name}") for name in ("logit_scale", "logit_bias"))
    text = _README.format(
        size=size,
        length=length,
        features=config.embed_dim,
        dtype=config.feature_dtype or config.dtype,
        scale=float(np.exp(scale)),
        bias="" if bias is None else f", and {float(bias):.6g} is added",
        platforms=", ".join(platforms),
    )
    (folder / "README.md").write_text(text)
    checked = summary(str(folder), "stablehlo", tensors, tensors)
    return f"{checked}; features differ from the model in jax {jax.__version__} by at most {difference:.1e}"


def _encoder(model: CLIP, tower: str) -> Any:
    """Return the jitted encoder of a tower, a function of weights and inputs."""

    def encode(weights: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        return model.apply(unflatten_dict(weights, sep="/"), inputs, method=f"encode_{tower}")  # type: ignore[return-value]

    return jax.jit(encode)
