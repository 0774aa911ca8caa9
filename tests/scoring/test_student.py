"""The student as it is trained, of families that were pre-trained with dropout."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

from rocktokens.config import parse_config
from rocktokens.scoring.student import load_student

SIZES = {"vocab_size": 40, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
FAMILIES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16,
            max_position_embeddings=32, attention_dropout=0.1, layerdrop=0.5, **SIZES,
        )
    ),
    "neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, hidden_dropout=0.1,
            attention_dropout=0.1, max_position_embeddings=32, **SIZES,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_student_in_train_mode_is_the_one_that_writes_rollouts(tmp_path: Path, name: str, checkpointing: str):
    torch.manual_seed(0)
    own = FAMILIES[name]()
    own.save_pretrained(tmp_path / "student")
    tokenizer(tmp_path / "student")
    text = f"""
    run = {{ directory = "{tmp_path}/run" }}
    models = {{ student = "{tmp_path}/student", teacher = "{tmp_path}/student", device = "cpu" }}
    training = {{ gradient_checkpointing = {checkpointing} }}
    """
    student = load_student(parse_config(text), None, "cpu").model
    ids = torch.randint(2, 40, (3, 12))
    with torch.no_grad():
        assert not torch.equal(own.train()(input_ids=ids).logits, own.eval()(input_ids=ids).logits)
        expected = student.eval()(input_ids=ids).logits
    for _ in range(2):
        assert torch.equal(student.train()(input_ids=ids).logits, expected)
    student.save_pretrained(tmp_path / "saved")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("student", "saved"))
    dropped = {key: value for key, value in before.items() if "drop" in key}
    assert dropped.items() <= after.items() and any(dropped.values())


def tokenizer(folder: Path) -> None:
    pieces = {"<pad>": 0, "<eos>": 1, **{chr(97 + index): index + 2 for index in range(26)}}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
