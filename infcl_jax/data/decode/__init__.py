"""Image decoders: encoded files to uint8 [H, W, 3]."""

from infcl_jax.data.decode.api import decode_example
from infcl_jax.data.decode.pillow import decode

__all__ = ["decode", "decode_example"]
