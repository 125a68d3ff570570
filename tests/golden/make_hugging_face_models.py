"""Write hugging_face_*.safetensors: small models of transformers with random weights, features and gradients.

    pip install transformers open_clip_torch safetensors
    OMP_NUM_THREADS=1 python tests/golden/make_hugging_face_models.py [NAME ...]

Written with transformers 5.23.0, open_clip_torch 3.3.0 and torch 2.13.0. The files are those of
`make_open_clip_models.py`, whose functions it uses; the configuration is that of `config.json`.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from make_open_clip_models import ROWS, SEED, random_tensors, record
from safetensors.torch import save_file

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = SHAPE | {"image_size": 32, "patch_size": 8}
TEXT = SHAPE | {"vocab_size": 64, "max_position_embeddings": 12, "bos_token_id": 62, "eos_token_id": 63}
CASES = {
    "clip": transformers.CLIPConfig(vision_config=IMAGE, text_config=TEXT | {"pad_token_id": 63}, projection_dim=8),
    "clip_gelu": transformers.CLIPConfig(
        vision_config=IMAGE | {"hidden_act": "gelu"},
        text_config=TEXT | {"hidden_act": "gelu", "eos_token_id": 61},
        projection_dim=8,
    ),
    "siglip": transformers.SiglipConfig(
        vision_config=IMAGE, text_config=TEXT | {"projection_size": 16, "pad_token_id": 1}
    ),
}


class Towers(torch.nn.Module):
    """Model of transformers with the methods of OpenCLIP's."""

    def __init__(self, model: transformers.PreTrainedModel):
        super().__init__()
        self.model = model
        self.logit_scale, self.logit_bias = model.logit_scale, getattr(model, "logit_bias", None)

    def encode_image(self, image: torch.Tensor, normalize: bool) -> torch.Tensor:
        """Return normalized image features."""
        return torch.nn.functional.normalize(self.model.get_image_features(image).pooler_output, dim=-1)

    def encode_text(self, text: torch.Tensor, normalize: bool) -> torch.Tensor:
        """Return normalized text features."""
        return torch.nn.functional.normalize(self.model.get_text_features(text).pooler_output, dim=-1)

    def named_parameters(self, *args, **kwargs):
        """Iterate over the parameters under transformers' names."""
        return self.model.named_parameters(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        """Return the tensors under transformers' names."""
        return self.model.state_dict(*args, **kwargs)


def main(names: list[str]) -> None:
    """Write the named cases, or all."""
    for name in names or CASES:
        torch.manual_seed(SEED)
        config = CASES[name]
        model = Towers(transformers.AutoModel.from_config(config, attn_implementation="eager"))
        random_tensors(model, torch.Generator().manual_seed(SEED))
        text = torch.randint(3, 60, (ROWS, TEXT["max_position_embeddings"]))
        text[torch.arange(ROWS), torch.tensor([5, 11, 8])] = config.text_config.eos_token_id
        tensors = record(model, torch.randn(ROWS, 3, IMAGE["image_size"], IMAGE["image_size"]), text)
        metadata = {"config": json.dumps(config.to_diff_dict())}
        save_file(tensors, Path(__file__).with_name(f"hugging_face_{name}.safetensors"), metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
