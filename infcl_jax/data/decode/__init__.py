"""Image decoders: encoded files to uint8 [H, W, 3]."""

from infcl_jax.data.decode.api import DECODERS as DECODERS
from infcl_jax.data.decode.api import choose_decoder as choose_decoder
from infcl_jax.data.decode.api import decode_example as decode_example
from infcl_jax.data.decode.api import gpu_decoder_installed as gpu_decoder_installed
from infcl_jax.data.decode.pillow import decode as decode
