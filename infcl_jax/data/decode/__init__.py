"""Image decoders: encoded files to uint8 [H, W, 3]."""

from infcl_jax.data.decode.api import DECODERS, choose_decoder, decode_example, gpu_decoder_installed
from infcl_jax.data.decode.pillow import decode

__all__ = ["DECODERS", "choose_decoder", "decode", "decode_example", "gpu_decoder_installed"]
