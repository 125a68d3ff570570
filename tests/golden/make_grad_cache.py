"""Write grad_cache.npz: loss and gradients of GradCache's PyTorch code on two BERTs of transformers.

    pip install torch transformers numpy
    git clone https://github.com/luyug/GradCache
    PYTHONPATH=GradCache/src python tests/golden/make_grad_cache.py

Written from luyug/GradCache, commit 906f03835fbc, with torch 2.15.0 and transformers 5.24.0.

The queries and passages have different encoders, chunks of 2 and 3, and one hard negative each. Dropout is off. The
file has the weights by transformers' name, token ids, loss, features and the gradient of every weight.
"""

from pathlib import Path

import numpy as np
import torch
from grad_cache import GradCache
from grad_cache.loss import SimpleContrastiveLoss
from transformers import BertConfig, BertModel

QUERIES, CHUNKS, PAD = 5, [2, 3], 0

torch.manual_seed(0)
config = BertConfig(
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    vocab_size=40,
    max_position_embeddings=16,
    initializer_range=0.3,
    attn_implementation="eager",
)
encoders = {name: BertModel(config, add_pooling_layer=False).eval() for name in ("query", "passage")}
rng = np.random.default_rng(0)
ids = {}
for name, rows, length in (("query", QUERIES, 8), ("passage", 2 * QUERIES, 12)):
    ids[name] = rng.integers(1, 40, (rows, length))
    for row, tokens in enumerate(rng.integers(3, length + 1, rows)):
        ids[name][row, tokens:] = PAD
inputs = [{"input_ids": torch.tensor(x), "attention_mask": torch.tensor(x != PAD).long()} for x in ids.values()]
cache = GradCache(
    models=list(encoders.values()),
    chunk_sizes=CHUNKS,
    loss_fn=SimpleContrastiveLoss(n_hard_negatives=1),
    get_rep_fn=lambda output: output.last_hidden_state[:, 0],
)
loss = cache(*inputs)
arrays = {"loss": loss.detach().numpy()}
for (name, encoder), entry in zip(encoders.items(), inputs, strict=True):
    arrays[f"{name}/ids"] = ids[name].astype(np.int32)
    with torch.no_grad():
        arrays[f"{name}/feature"] = encoder(**entry).last_hidden_state[:, 0].numpy()
    for path, parameter in encoder.named_parameters():
        arrays[f"{name}/weight/{path}"] = parameter.detach().numpy()
        arrays[f"{name}/gradient/{path}"] = parameter.grad.numpy()
np.savez_compressed(Path(__file__).with_name("grad_cache.npz"), **arrays)
