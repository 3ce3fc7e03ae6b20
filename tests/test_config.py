"""Reading config.json: both forms, every key that matters, and a named error for the rest."""

import dataclasses

import pytest

from qwen38_jax.config import ConfigError, ModelConfig
from tests.models import SMALL

TEXT = SMALL.to_hf()


def nested(**text):
    return {"model_type": "qwen3_5", "text_config": {**TEXT, **text}, "vision_config": {"depth": 1}}


def test_round_trip_of_both_forms():
    assert ModelConfig.from_hf(TEXT) == SMALL
    assert ModelConfig.from_hf(nested()) == SMALL
    assert hash(ModelConfig.from_hf(TEXT)) == hash(SMALL)


def test_flat_rope_keys_and_layer_interval():
    flat = {k: v for k, v in TEXT.items() if k not in ("rope_parameters", "layer_types")}
    flat |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    cfg = ModelConfig.from_hf(flat)
    assert (cfg.rotary_dim, cfg.rope_theta, cfg.layer_types) == (4, 1e7, SMALL.layer_types)


@pytest.mark.parametrize("level", ["root", "text", "both", "neither"])
def test_tied_at_either_level(level):
    config = nested(tie_word_embeddings=level in ("text", "both"))
    config["tie_word_embeddings"] = level in ("root", "both")
    assert ModelConfig.from_hf(config).tie_word_embeddings == (level != "neither")


@pytest.mark.parametrize("value,expected", [(3, (3,)), ([5, 3], (5, 3)), (None, ())])
def test_stop_ids_as_int_list_or_absent(value, expected):
    assert ModelConfig.from_hf({**TEXT, "eos_token_id": value}).eos_token_ids == expected


def test_stop_ids_from_the_root_when_the_text_config_has_none():
    config = nested(eos_token_id=None) | {"eos_token_id": 7}
    assert ModelConfig.from_hf(config).eos_token_ids == (7,)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_under_either_name(key):
    config = {k: v for k, v in TEXT.items() if k != "dtype"}
    assert ModelConfig.from_hf({**config, key: "float16"}).dtype == "float16"
    assert ModelConfig.from_hf(config).dtype == "bfloat16"


BAD = [
    ("model_type", "llama"),
    ("hidden_act", "gelu"),
    ("output_gate_type", "sigmoid"),
    ("attn_output_gate", False),
    ("attention_bias", True),
    ("mtp_num_hidden_layers", 2),
    ("mtp_use_dedicated_embeddings", True),
    ("num_experts", 8),
    ("layer_types", ["full_attention"] * 4),
    ("layer_types", ["linear_attention", "full_attention", "full_attention", "linear_attention"]),
    ("rope_parameters", {**TEXT["rope_parameters"], "rope_type": "yarn"}),
    ("rope_parameters", {**TEXT["rope_parameters"], "mrope_section": [1, 1, 1]}),
    ("num_attention_heads", 3),
    ("linear_num_value_heads", 3),
    ("hidden_size", 0),
    ("vocab_size", "64"),
    ("eos_token_id", 64),
    ("eos_token_id", [-1]),
    ("eos_token_id", "2"),
    ("dtype", "float8"),
    ("head_dim", None),
    ("linear_num_key_heads", None),
    ("head_dim", "16"),
    ("num_hidden_layers", "4"),
    ("layer_types", "full_attention"),
    ("rope_parameters", "default"),
    ("rope_parameters", {**TEXT["rope_parameters"], "rope_theta": "1e7"}),
    ("rope_parameters", {**TEXT["rope_parameters"], "mrope_section": [1.5, 0.5, 0]}),
    ("rope_parameters", {**TEXT["rope_parameters"], "mrope_section": [1, -1, 2]}),
    ("rope_scaling", {"type": "yarn", "factor": 4}),
    ("tie_word_embeddings", "false"),
    ("mtp_num_hidden_layers", True),
    ("full_attention_interval", 4),
    ("use_sliding_window", True),
    ("rms_norm_eps", "tiny"),
    ("rms_norm_eps", float("nan")),
    ("max_position_embeddings", 0),
]


@pytest.mark.parametrize("key,value", BAD, ids=[f"{k}={str(v)[:20]}" for k, v in BAD])
def test_unsupported_or_missing_value_names_its_key(key, value):
    word = {"rope_parameters": "rope_type|mrope_section|rope_parameters|rope_theta", "rope_scaling": "rope_type"}
    word = word.get(key, key)
    with pytest.raises(ConfigError, match=word):
        ModelConfig.from_hf({**TEXT, key: value})


def test_layers_that_are_no_whole_groups():
    with pytest.raises(ConfigError, match="groups"):
        dataclasses.replace(SMALL, num_hidden_layers=3)


def test_forms_that_are_no_config():
    with pytest.raises(ConfigError, match="text_config"):
        ModelConfig.from_hf({"text_config": []})
    with pytest.raises(ConfigError, match="full_attention_interval"):
        ModelConfig.from_hf({**TEXT, "layer_types": None, "full_attention_interval": 0})
