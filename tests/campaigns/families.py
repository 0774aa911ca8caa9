"""Distil one step with a tiny model of every causal LM family that transformers has, or be refused in a sentence.

1. Every entry of transformers' table of causal LMs is a case. Its config is made small by setting, of the names in
   ``SMALL``, those it knows; what a family needs besides is in ``BESIDES``. Random weights, a byte-level tokenizer.
2. A family that cannot be made small like this (it is made of several models, or needs another package) is counted as
   not built, and shows nothing.
3. ``rocktokens distill`` takes one step with a student and a teacher of the family: load, sample, score, update,
   write. It must end with 0, what was sampled having the log-probabilities that it is scored with, or with 2 and one
   sentence.
4. ``rocktokens trace`` must then replay the checkpoint that was written.
"""

import inspect
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import Outcome, changed, rocktokens
from frame import BrokenPromiseError, Campaign, Judge
from tiny_pair import END_IDS, EOS, PAD, byte_tokenizer, tiny_toml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rocktokens.rollouts.store import read_rollouts
from rocktokens.run_dir import RunDir
from rocktokens.traces.store import TraceStore

NAME = "families"
MOST_PARAMETERS = 4_000_000
CLOSE = 2e-3
"""Nats between the log-probability of a token when it was sampled and when it is scored; both are float32."""
_WIDTHS = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "feed_forward_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "sliding_window", "attention_window_size"), 32),
}
_LAYERS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset", "first_k_dense_replace"), 1),
    "attention_layers": ["global", "local"],
    "attention_types": [[["global", "local"], 1]],
    "num_kv_shared_layers": 0,
}
_HEADS = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "index_head_dim", "kv_channels", "rotary_dim", "index_topk"), 8),
    **dict.fromkeys(("q_lora_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("kv_lora_rank", "qk_head_dim"), 16),
    "laurel_rank": 4,
}
_EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
}
_STATES = {
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_d_head", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("conv_kernel", "time_step_rank", "mamba_dt_rank"), 4),
    "mamba_d_ssm": 64,
}
_TEXT = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), PAD + 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_seq_length"), 128),
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "is_decoder": True,
    "initializer_range": 0.2,
}
SMALL: dict[str, Any] = {**_WIDTHS, **_LAYERS, **_HEADS, **_EXPERTS, **_STATES, **_TEXT}
"""What makes a model small, by the names that configs have for it."""
_PAD_AMONG_POSITIONS, _SOME_START = {"pad_token_id": 1}, {"bos_token_id": 0}
_AS_MANY_KEYS, _ONE_OF_FOUR_ATTENDS = {"num_key_value_heads": 4}, {"num_hidden_layers": 4}
_SECOND_ATTENDS = {"layer_types": ["linear_attention", "full_attention"]}
BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), _PAD_AMONG_POSITIONS),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl", "xmod", "prophetnet", "xglm"), _PAD_AMONG_POSITIONS),
    **dict.fromkeys(("cwm", "modernbert-decoder"), _SOME_START),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), _AS_MANY_KEYS),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _AS_MANY_KEYS),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _ONE_OF_FOUR_ATTENDS),
    **{name: {**_AS_MANY_KEYS, **_SECOND_ATTENDS} for name in ("bailing_hybrid", "kimi_linear")},
    "granitemoehybrid": _SECOND_ATTENDS,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16), "attn_layers": ["local", "local"]},
    "zaya": {"num_experts_per_tok": 1},
}
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@contextmanager
def opened(folder: Path) -> Iterator[Judge]:
    """Judge families in a folder that is emptied before each."""

    def judge(family: str, _number: int) -> str:
        place = folder / "family"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return judge_family(family, place)

    yield judge


def judge_family(family: str, place: Path) -> str:
    """Distil one step and replay it."""
    for name, seed in (("student", 1), ("teacher", 2)):
        if not write_model(family, place / name, seed):
            return "not built"
    (place / "task.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n', encoding="utf-8")
    text = tiny_toml(place, place / "run").replace("max_steps = 6", "max_steps = 1")
    (place / "run.toml").write_text(text + "[trace]\nnum_prompts = 1\ntop_k = 0\n", encoding="utf-8")
    outcome = rocktokens("distill", place / "run.toml", *changed("training.warmup_steps=0"))
    if _is_refusal("distill", outcome):
        return "refused"
    require_scored_as_sampled(place / "run")
    if _is_refusal("trace", rocktokens("trace", place / "run.toml", *changed("training.warmup_steps=0"))):
        raise BrokenPromiseError("distilled, and then its checkpoint is refused")
    return "distilled"


def write_model(family: str, folder: Path, seed: int) -> bool:
    """Write a tiny model of a family with a tokenizer; whether there is a way to make one."""
    try:
        config = small_config(family)
        with torch.device("meta"):
            size = sum(own.numel() for own in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return False
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception:  # whatever its author raises where these settings do not fit
        return False
    model.generation_config.eos_token_id = END_IDS
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return True


def small_config(family: str) -> PreTrainedConfig:
    """The config of a family with what makes it small, as far as it has names for that."""
    kind = CONFIG_MAPPING[family]
    same: dict[str, str] = kind.attribute_map or {}
    known = set(same)
    for own in kind.__mro__[:-1]:
        known |= {*getattr(own, "__annotations__", {}), *inspect.signature(own.__init__).parameters}
    settings = {key: value for key, value in SMALL.items() if key in known and same.get(key) not in SMALL}
    return kind(**{**settings, **BESIDES.get(family, {})})


def require_scored_as_sampled(run: Path) -> None:
    """Refuse a run whose sampled log-probabilities are not those that were scored."""
    [part] = [entry.path for entry in RunDir(run).files("rollouts/training/")]
    rows = TraceStore(run, source="training", threads=1).table().order_by(["rollout_id", "position"]).to_pyarrow()
    rollouts = sorted(read_rollouts(RunDir(run), part), key=lambda own: own.rollout_id)
    sampled = np.concatenate([own.logprobs for own in rollouts])
    gap = float(np.abs(sampled - rows["logp_student"].to_numpy()).max())
    if not math.isfinite(gap) or gap > CLOSE:
        raise BrokenPromiseError(
            f"a token was sampled with a log-probability that is off by {gap:.3g} when it is scored"
        )


def _is_refusal(what: str, outcome: Outcome) -> bool:
    if outcome.code not in (0, 2) or "Traceback" in outcome.stderr:
        raise BrokenPromiseError(f"{what}: code {outcome.code}, {outcome.stderr[-1000:]}")
    said = [line for line in outcome.stderr.splitlines() if line.startswith("rocktokens: ")]
    if outcome.code == 2 and len(said) != 1:
        raise BrokenPromiseError(f"{what}: no sentence, {outcome.stderr[-800:]}")
    return outcome.code == 2


SAMPLE = dict.fromkeys(("gpt2", "qwen3_moe", "mamba", "bart"), 1)
CAMPAIGN = Campaign(NAME, dict.fromkeys(FAMILIES, 1), SAMPLE, limit=180.0, opened=opened)
