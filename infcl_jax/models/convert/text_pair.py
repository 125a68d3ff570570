"""Encoders of queries and passages as BERTs of transformers and Sentence Transformers."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infcl_jax.models.config import BertConfig
from infcl_jax.models.convert import hugging_face
from infcl_jax.models.convert.api import check_export, write_model
from infcl_jax.models.convert.bert import read_config, weight_map
from infcl_jax.models.convert.reference import summary
from infcl_jax.models.convert.tensor_files import read_tensors
from infcl_jax.models.convert.weight_map import flat_shapes, to_tensors, to_variables
from infcl_jax.models.text_pair import TextPairConfig, towers_of

ENCODER_FOLDERS = {"query": "query_encoder", "passage": "passage_encoder"}
_TRAINING_FIELDS = ("dropout", "remat", "attention", "layer_scale")  # with the same features in inference
_POOLING = "1_Pooling"  # folder of Sentence Transformers
_MODULES = "sentence_transformers.models"


def check_architecture(model: TextPairConfig, theirs: BertConfig, source: str) -> None:
    """Check that a BERT from `source` has the architecture of a dual encoder.

    Raises:
      ValueError: fields differ; it lists all of them as overrides.
    """
    differing = {}
    for field in dataclasses.fields(theirs):
        if field.name in (*_TRAINING_FIELDS, "context_length"):
            continue
        ours = getattr(model.text, field.name)
        if field.name == "activation" and ours is None:
            ours = model.activation
        if ours != (value := getattr(theirs, field.name)):
            differing[f"text.{field.name}"] = value, ours
    longest = theirs.max_positions - theirs.position_offset
    if model.text.context_length > longest:
        differing["text.context_length"] = longest, model.text.context_length
    if differing:
        overrides = ",".join(f"{name}={value}" for name, (value, _) in differing.items())
        raise ValueError(
            f"expected {overrides}, as in {source}, got {', '.join(str(ours) for _, ours in differing.values())}; add "
            f"--config.model_overrides={overrides}, or set another init.text"
        )


def save_text_pair(path: str | Path, model: TextPairConfig, variables: Any, lengths: Mapping[str, int]) -> str:
    """Write both encoders, without their tokenizers, to a folder that is created if missing.

    The folder has a BERT for `transformers.AutoModel.from_pretrained` in each of `query_encoder` and `passage_encoder`.
    Sentence Transformers reads pool and normalization there too, except for the pool "pooler".

    Args:
      path: the folder.
      model: configuration of the model.
      variables: its variables.
      lengths: tokens of a query and of a passage.

    Returns:
      One line on the files, read back.

    Raises:
      ValueError: transformers' BERT has no such model, such as one with a projection.
    """
    content = _bert_config(model)
    params, parameters, names = variables["params"], 0, 0
    for name, subtree in towers_of(params).items():
        folder = Path(path) / ENCODER_FOLDERS[name]
        arrays = {f"params/text/{k}": np.asarray(x) for k, x in flat_shapes(jax.device_get(params[subtree])).items()}
        weights, file = weight_map(model.text, arrays, ()), hugging_face.WEIGHT_FILES[0]
        files = {hugging_face.CONFIG_FILE: content} | _sentence_transformers(model, lengths[name])
        write_model(folder, files, file, to_tensors(weights, arrays))
        tensors = read_tensors(folder / file)
        check_export(folder, arrays, to_variables(weights, tensors, arrays, folder), model.param_dtype)
        parameters, names = parameters + len(arrays), names + len(tensors)
    return summary(str(path), "hf", names, parameters)


def _bert_config(model: TextPairConfig) -> dict[str, Any]:
    """Return `config.json` of an encoder, the inverse of `read_config`.

    Raises:
      ValueError: transformers' BERT has no such model.
    """
    text = model.text
    if text.projection != "none":
        raise ValueError(
            f"expected text.projection='none' of a model for transformers' BERT, got {text.projection!r}; load the run "
            "with infcl_jax.load"
        )
    kind = "roberta" if text.position_offset else "bert"
    content = {
        "architectures": [{"bert": "BertModel", "roberta": "RobertaModel"}[kind]],
        "model_type": kind,
        **hugging_face.exported_tower(text, model.activation),
        "hidden_dropout_prob": text.dropout,
        "attention_probs_dropout_prob": text.dropout,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_positions,
        "type_vocab_size": text.token_types,
        "pad_token_id": text.pad_id,
        "dtype": model.param_dtype,
    }
    try:
        check_architecture(model, read_config(content, text), "transformers' BERT")
    except ValueError as error:
        raise ValueError(f"expected a model that transformers' BERT describes, got another: {error}") from error
    return content


def _sentence_transformers(model: TextPairConfig, length: int) -> dict[str, Any]:
    """Return the files of Sentence Transformers by name."""
    if model.text.pool == "pooler":  # which it does not have
        return {}
    modules = [("Transformer", ""), ("Pooling", _POOLING), *([("Normalize", "2_Normalize")] if model.normalize else [])]
    return {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{_MODULES}.{kind}"}
            for i, (kind, path) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        f"{_POOLING}/config.json": {
            "word_embedding_dimension": model.text.width,
            "pooling_mode_cls_token": model.text.pool == "cls",
            "pooling_mode_mean_tokens": model.text.pool == "mean",
        },
    }
