"""Write open_clip_parameter_counts.json: OpenCLIP's model configs and parameter counts.

Each entry has the model config as "config", and as "counts" the parameters of the image tower, text tower and model.
Models are built without memory, on torch's meta device. Counts are null where a text tower's config is on the Hugging
Face hub only. BERT and RoBERTa are built from the figures of their papers instead.

    pip install open_clip_torch timm transformers
    python tests/golden/make_open_clip_parameter_counts.py

Written with open_clip_torch 3.3.0, timm 1.0.31, transformers 5.23.0 and torch 2.13.0.
"""

import json
from pathlib import Path
from unittest import mock

import open_clip
import torch
import transformers
from open_clip import hf_model

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
TEXT_TOWERS = {
    "bert-base-uncased": transformers.BertConfig(**BASE, vocab_size=30522),
    "roberta-base": transformers.RobertaConfig(**BASE, **ROBERTA, vocab_size=50265),
    "xlm-roberta-base": transformers.XLMRobertaConfig(**BASE, **ROBERTA, vocab_size=250002),
    "xlm-roberta-large": transformers.XLMRobertaConfig(**LARGE, **ROBERTA, vocab_size=250002),
}
# A config that OpenCLIP does not have: BERT with the pooler of its pretraining.
EXTRA = {
    "bert-pooler-ViT-B-32": {
        "embed_dim": 512,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": 768, "patch_size": 32},
        "text_cfg": {"hf_model_name": "bert-base-uncased", "hf_pooler_type": "cls_pooler", "hf_proj_type": "linear"},
    }
}


def parameter_counts(config: dict) -> list[int] | None:
    """Return the parameters of image tower, text tower and model; None if the text tower is on the hub only."""
    text = config["text_cfg"]
    if "hf_model_name" in text:
        if text["hf_model_name"] not in TEXT_TOWERS:
            return None
        text = {**text, "hf_model_pretrained": False}
    arguments = {name: value for name, value in config.items() if name != "custom_text"}
    arguments["text_cfg"], model_class = text, open_clip.model.CustomTextCLIP
    if "multimodal_cfg" in config:
        model_class = open_clip.coca_model.CoCa
    load = mock.patch.object(hf_model.AutoConfig, "from_pretrained", TEXT_TOWERS.get)
    with torch.device("meta"), load:
        model = model_class(**arguments)
    return [sum(p.numel() for p in module.parameters()) for module in (model.visual, model.text, model)]


folder = Path(open_clip.__file__).parent / "model_configs"
configs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))} | EXTRA
entries = {}
for name, config in configs.items():
    entries[name] = {"config": config, "counts": parameter_counts(config)}
lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
target = Path(__file__).with_name("open_clip_parameter_counts.json")
target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
print(len(entries), "models,", target.stat().st_size, "bytes")
