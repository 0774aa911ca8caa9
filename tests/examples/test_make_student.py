import json
import sys
from pathlib import Path

import make_student
import pytest
import torch
from make_student import keep_layers, parse_layers
from make_teacher import answer_loss
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    SmolLM3Config,
)

from rocktokens.errors import RocktokensError
from rocktokens.models.load import load_model
from rocktokens.rollouts.sampler import cpu_threads


def run(monkeypatch, out: Path, *options: str) -> None:
    monkeypatch.setattr(
        sys, "argv", ["make_student.py", "pebbles-teacher", str(out), "--template", "{prompt}", *options]
    )
    with cpu_threads(1):
        make_student.main()


def test_spans_name_layers():
    assert parse_layers("0-2,5", 6) == [0, 1, 2, 5]
    assert parse_layers("3", 4) == [3]


@pytest.mark.parametrize("text", ["", "a", "0-", "2,1", "1,1", "0-6", "-1"])
def test_layers_that_are_not_there_are_refused(text: str):
    with pytest.raises(RocktokensError, match="--layers"):
        parse_layers(text, 6)


def test_kept_layers_are_the_originals_bit_for_bit(tmp_path, monkeypatch):
    run(monkeypatch, tmp_path / "student", "--layers", "0-1,4")
    whole, pruned = (load_model(name, device="cpu").model for name in ("pebbles-teacher", str(tmp_path / "student")))
    assert pruned.config.num_hidden_layers == len(pruned.model.layers) == 3
    for place, index in enumerate([0, 1, 4]):
        own, original = pruned.model.layers[place].state_dict(), whole.model.layers[index].state_dict()
        assert all(torch.equal(own[name], original[name]) for name in original)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(pruned.state_dict()[name], whole.state_dict()[name])


def test_all_layers_give_the_same_logits_and_a_cache_works_on_fewer():
    ids = torch.arange(5, 25)[None]
    whole, same, fewer = (load_model("pebbles-teacher", device="cpu").model for _ in range(3))
    keep_layers(same, range(6))
    assert torch.equal(whole(ids).logits, same(ids).logits)
    keep_layers(fewer, [0, 3, 5])
    cached = fewer(ids[:, -1:], past_key_values=fewer(ids[:, :-1]).past_key_values).logits
    torch.testing.assert_close(cached[:, -1], fewer(ids).logits[:, -1])


COMMON = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "qwen2": Qwen2Config(**COMMON),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=6, n_head=2, n_positions=32, **ENDS),
    "opt": OPTConfig(vocab_size=40, hidden_size=16, ffn_dim=24, num_hidden_layers=6, num_attention_heads=2,
                     word_embed_proj_dim=16, max_position_embeddings=32, pad_token_id=0, **ENDS),
    "smollm3": SmolLM3Config(**COMMON, no_rope_layers=[1, 0, 0, 1, 1, 0]),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_pruned_and_loads_again_as_the_same_function(family: str, tmp_path: Path):
    """Dropped layers are those that do nothing: the logits are those of the whole model, also after loading."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    holder, name = make_student.layer_list(model, 6)
    with torch.no_grad():
        for index in (2, 3):
            for part, parameter in getattr(holder, name)[index].named_parameters():
                if any(own in part for own in ("o_proj", "out_proj", "c_proj", "down_proj", "fc2")):
                    parameter.zero_()
        ids = torch.arange(3, 20)[None]
        whole = model(ids).logits
        keep_layers(model, [0, 1, 4, 5])
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(model(ids).logits, whole) and torch.equal(again(ids).logits, whole)
    assert again.config.num_hidden_layers == 4


def test_a_model_that_would_not_load_again_is_refused():
    experts = {
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    }
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    settings = COMMON | {"num_key_value_heads": 2} | experts | latent
    config = DeepseekV3Config(**settings, first_k_dense_replace=2)
    with pytest.raises(RocktokensError, match="--layers: DeepseekV3ForCausalLM would not load again with these layers"):
        keep_layers(AutoModelForCausalLM.from_config(config), [0, 3, 4])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num-prompts", "0"], "--num-prompts is '0': give a whole number from 1 on"),
        (["--temperature", "nan"], "--temperature is 'nan': give a number from 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens is '0'"),
        (["--prompts", "nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(problems, tmp_path, monkeypatch, options, sentence):
    healing = ["--layers", "0-3", "--teacher", "pebbles-teacher", "--prompts", str(problems), *options]
    with pytest.raises(RocktokensError) as refused:
        run(monkeypatch, tmp_path / "out", *healing)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_healing_lowers_the_loss_on_the_teachers_answers_and_resumes(problems, tmp_path, monkeypatch):
    healing = ["--teacher", "pebbles-teacher", "--prompts", str(problems), "--max-new-tokens", "120"]
    healing += ["--num-prompts", "6", "--batch-size", "4", "--epochs", "3", "--learning-rate", "1e-3"]
    monkeypatch.setattr(make_student, "PART", 4)
    run(monkeypatch, tmp_path / "pruned", "--layers", "0-3")
    run(monkeypatch, tmp_path / "whole", "--layers", "0-3", *healing)

    # interrupted after the first part of the answers: that part is read, not sampled again
    made, answers = make_student.make_rollouts, []

    def interrupted(*arguments, **options):
        if options["first_rollout_id"]:
            raise KeyboardInterrupt
        answers.extend(made(*arguments, **options))
        return answers

    monkeypatch.setattr(make_student, "make_rollouts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path / "resumed", "--layers", "0-3", *healing)
    assert [path.name for path in (tmp_path / "resumed" / ".answers").glob("part-*")] == ["part-0.parquet"]
    monkeypatch.setattr(make_student, "make_rollouts", made)
    with pytest.raises(RocktokensError, match="other settings"):
        run(monkeypatch, tmp_path / "resumed", "--layers", "0-4", *healing)
    run(monkeypatch, tmp_path / "resumed", "--layers", "0-3", *healing)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "whole" / "made.json").read_text())["layers"] == [0, 1, 2, 3]

    ended = [answer for answer in answers if answer.finished]
    losses = [answer_loss(load_model(str(tmp_path / name), device="cpu"), ended) for name in ("pruned", "whole")]
    assert losses[1] < 0.9 * losses[0]


def test_teacher_and_prompts_go_together(tmp_path, monkeypatch):
    with pytest.raises(RocktokensError, match="go together"):
        run(monkeypatch, tmp_path / "x", "--layers", "0", "--teacher", "pebbles-teacher")
