"""A Hugging Face `config.json` of a dense decoder-only model -> the mapping of a `conf/model/*.yaml`.

Key names and defaults are those of the configuration classes of huggingface/transformers. The file sets max_positions
only; how long the training sequences are is the problem's seq_len. Norms of queries and keys (Qwen3, Gemma 3), the two
further norms of a Gemma 2 layer, biases of the query-key-value product alone (Qwen2) and OPT's two spare positions are
left out: together less than 0.05 % of the parameters. Sliding windows are priced as full attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from haap_rl.problem.errors import InputError, label, positive_int, shown
from haap_rl.problem.formats.files import read_json_object

Config = Mapping[str, Any]


class Family(NamedTuple):
    """What one model_type calls its dimensions, and what its configuration class fills in.

    keys: our name -> the file's key. defaults: the file's key -> value where the file may leave it out.
    dropout: keys of the dropout probabilities.
    """

    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    gated_mlp: bool
    norm: str
    learned_positions: bool
    dropout: tuple[str, ...]
    biases: tuple[str, ...]


_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
}
_GPT2_KEYS = {
    "num_layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn": "n_inner",
    "vocab": "vocab_size",
    "max_positions": "n_positions",
}
_NO_GROUPS = {name: key for name, key in _KEYS.items() if name != "kv_heads"}
_ATTENTION = ("attention_dropout",)
# what transformers' Gemma3TextConfig fills in; released files of Gemma 3 leave these out
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def _llama_like(**defaults: Any) -> Family:
    return Family(_KEYS, defaults, True, "rmsnorm", False, _ATTENTION, ("attention_bias", "mlp_bias"))


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        _GPT2_KEYS,
        {"tie_word_embeddings": True, "n_inner": None, "biases": True, "resid_pdrop": 0.1},
        False,
        "layernorm",
        True,
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        ("biases",),
    ),
    "gpt_neox": Family(
        _NO_GROUPS,
        {"attention_bias": True},
        False,
        "layernorm",
        False,
        ("hidden_dropout", *_ATTENTION),
        ("attention_bias",),
    ),
    "opt": Family(
        {**_NO_GROUPS, "ffn": "ffn_dim"},
        {"tie_word_embeddings": True, "enable_bias": True, "dropout": 0.1},
        False,
        "layernorm",
        True,
        ("dropout", *_ATTENTION),
        ("enable_bias",),
    ),
    "llama": _llama_like(num_key_value_heads=None),
    "mistral": _llama_like(),
    "qwen2": _llama_like(),
    "qwen3": _llama_like(head_dim=128),
    "gemma": _llama_like(head_dim=256, tie_word_embeddings=True),
    "gemma2": _llama_like(head_dim=256, tie_word_embeddings=True),
    "gemma3_text": _llama_like(**_GEMMA3),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
_WAY_OUT = f"supported are {', '.join(FAMILIES)}; or start from a preset: model=llama3_8b model.hidden=..."


def read(path: object, name: str | None = None) -> dict[str, Any]:
    """The model in the `config.json` at `path`, called `name` (default: its _name_or_path, else its model_type).

    Raises InputError for what is not a dense decoder-only model of a supported family.
    """
    config = read_json_object(path, "model file")
    where = f"model file {str(path)!r}"
    family = FAMILIES[_model_type(where, config)]
    return {"name": _name(where, config, name), **_dimensions(where, family, config)}


def _model_type(where: str, config: Config) -> str:
    """The model_type, if we can plan it."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{where}: model_type={shown(model_type)} must name the architecture; {_WAY_OUT}")
    experts = any(config.get(key) not in (None, 0, 1) for key in _EXPERTS)
    if experts or "moe" in model_type or "mixtral" in model_type:
        raise InputError(
            f"{where}: model_type={shown(model_type)} is a mixture of experts, which is not supported (dense models "
            f"only); {_WAY_OUT}"
        )
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise InputError(
            f"{where}: model_type={shown(model_type)} is an encoder-decoder, which is not supported (decoder-only "
            f"models are); {_WAY_OUT}"
        )
    if isinstance(config.get("text_config"), dict):
        raise InputError(
            f"{where}: model_type={shown(model_type)} has a text_config beside other towers, which are not supported; "
            "save its text_config as a config.json of its own"
        )
    if model_type not in FAMILIES:
        raise InputError(f"{where}: model_type={shown(model_type)} is not supported; {_WAY_OUT}")
    projection = config.get("word_embed_proj_dim")
    if model_type == "opt" and projection not in (None, config.get("hidden_size")):
        raise InputError(
            f"{where}: word_embed_proj_dim={shown(projection)} differs from "
            f"hidden_size={shown(config.get('hidden_size'))}, which is not supported; choose an OPT model where they "
            "agree (all but 350m)"
        )
    return model_type


def _dimensions(where: str, family: Family, config: Config) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for ours, key in family.keys.items():
        value = _value(where, family, config, key)
        if value is not None:
            values[ours] = positive_int(where, key, value)
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("ffn", 4 * values["hidden"])
    head_dim = config.get("head_dim", family.defaults.get("head_dim"))
    if head_dim is not None:
        values["head_dim"] = positive_int(where, "head_dim", head_dim)
    elif values["hidden"] % values["heads"]:
        raise InputError(
            f"{where}: {family.keys['hidden']}={values['hidden']} is no multiple of "
            f"{family.keys['heads']}={values['heads']}; correct one, or give head_dim"
        )
    else:
        values["head_dim"] = values["hidden"] // values["heads"]
    biases = [_flag(where, family, config, key) for key in family.biases]
    dropout = [_probability(where, key, config.get(key, family.defaults.get(key))) for key in family.dropout]
    return {
        **values,
        "gated_mlp": family.gated_mlp,
        "learned_positions": family.learned_positions,
        "norm": family.norm,
        "tied_embeddings": _flag(where, family, config, "tie_word_embeddings"),
        "biases": all(biases),
        "dropout": max(dropout) > 0,
    }


def _value(where: str, family: Family, config: Config, key: str) -> Any:
    """The file's value of `key`, else the family's default; None only where that is the default."""
    value = config.get(key)
    if value is None and key not in family.defaults:
        raise InputError(f"{where}: key {key!r} is missing; is it the config.json of the model itself?")
    return family.defaults[key] if value is None else value


def _flag(where: str, family: Family, config: Config, key: str) -> bool:
    value = config.get(key)
    if value is None:
        value = family.defaults.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key}={shown(value)} must be true or false")
    return value


def _probability(where: str, key: str, value: object) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{where}: {key}={shown(value)} must be a probability from 0 to 1")
    return float(value)


def _name(where: str, config: Config, name: str | None) -> str:
    if name is not None:
        return label(where, "name", name)
    given = config.get("_name_or_path")
    last = given.rstrip("/").rpartition("/")[2] if isinstance(given, str) else ""
    return last if 1 <= len(last) <= 100 and last.isprintable() else str(config["model_type"])
