import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.errors import RocktokensError
from rocktokens.models.head import hidden_states
from rocktokens.models.load import end_ids, load_model, load_tokenizer, resolve_device

IDS_RL = torch.tensor([[5, 9, 13, 21]])


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def byte_tokenizer():
    """One token a byte and an end token; id 256."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def saved(tmp_path):
    """A model directory whose three files name three different end tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        eos_token_id=3,
        bos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[4, 3], bos_token_id=1)
    directory = tmp_path / "base"
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory, model.eval()


def test_a_directory_loads_as_it_was_saved(saved):
    directory, model = saved
    loaded = load_model(str(directory), device="cpu")
    assert loaded.name == str(directory) and not loaded.model.training
    torch.testing.assert_close(loaded.model(IDS_RL).logits, model(IDS_RL).logits, atol=0, rtol=0)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("So, 7.\n")) == "So, 7.\n"
    assert load_model(str(directory), "bfloat16", "cpu").model.dtype == torch.bfloat16


def test_every_end_token_of_every_file_counts(saved):
    directory, _ = saved
    assert load_model(str(directory), device="cpu").eos_ids == {3, 4, 256}


def test_a_model_without_end_tokens_has_none(saved):
    model, tokenizer = saved[1], byte_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token = None
    assert end_ids(model, tokenizer) == frozenset()


def save_adapter(model, path, base_name):
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    expected = hidden_states(wrapped, IDS_RL)
    wrapped.peft_config["default"].base_model_name_or_path = base_name
    wrapped.save_pretrained(path, save_embedding_layers=False)
    return expected


def test_an_adapter_directory_loads_merged_on_its_base(saved, tmp_path):
    directory, model = saved
    plain = hidden_states(model, IDS_RL)
    expected = save_adapter(model, tmp_path / "adapter", str(directory))
    loaded = load_model(str(tmp_path / "adapter"), device="cpu")
    states = hidden_states(loaded.model, IDS_RL)
    assert (states - plain).abs().max() > 1e-2
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    assert isinstance(loaded.model, LlamaForCausalLM)
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert loaded.eos_ids == {3, 4, 256}


def test_a_tokenizer_is_that_of_the_model(saved, tmp_path):
    directory, model, *_ = saved
    save_adapter(model, tmp_path / "adapter", str(directory))
    for name in (str(directory), str(tmp_path / "adapter"), "pebbles-student"):
        assert load_tokenizer(name).get_vocab() == load_model(name, device="cpu").tokenizer.get_vocab()
    (directory / "tokenizer.json").unlink()
    for name in (directory, tmp_path / "adapter"):
        with pytest.raises(RocktokensError, match=r"tokenizer of .+ cannot be loaded \(.+\): save it beside the model"):
            load_tokenizer(str(name))
    with pytest.raises(RocktokensError, match="neither a directory nor a hub id"):
        load_tokenizer("/no/where")


def test_an_adapter_without_its_base_says_what_to_correct(saved, tmp_path):
    save_adapter(saved[1], tmp_path / "adapter", str(tmp_path / "moved-away"))
    with pytest.raises(RocktokensError, match=r"moved-away.*correct base_model_name_or_path"):
        load_model(str(tmp_path / "adapter"), device="cpu")


def test_pickled_weights_are_not_read(saved):
    directory, _ = saved
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(RocktokensError, match=r"no \*.safetensors file"):
        load_model(str(directory), device="cpu")


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_truncated_weights_are_named(saved, tmp_path, size):
    directory, model = saved
    save_adapter(model, tmp_path / "adapter", str(directory))
    for name, weights in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        path = tmp_path / name / weights
        whole = path.read_bytes()
        path.write_bytes(whole[:size])
        with pytest.raises(RocktokensError, match=rf"{name}' cannot be loaded \(.+\): "):
            load_model(str(tmp_path / name), device="cpu")
        path.write_bytes(whole)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_adapter_config_is_named(saved, tmp_path, content):
    save_adapter(saved[1], tmp_path / "adapter", str(saved[0]))
    (tmp_path / "adapter" / "adapter_config.json").write_text(content)
    with pytest.raises(RocktokensError, match=r"adapter' cannot be loaded \(.+\): restore it"):
        load_model(str(tmp_path / "adapter"), device="cpu")


def test_the_context_length_is_that_of_the_config(saved):
    assert load_model(str(saved[0]), device="cpu").context_length == 32


@pytest.mark.parametrize("name", ["./no-such-directory", "/no/such/directory"])
def test_a_path_that_leads_nowhere_is_never_looked_for_on_the_hub(name):
    with pytest.raises(RocktokensError, match=f"model '{name}' is neither a directory"):
        load_model(name, device="cpu")


@pytest.mark.parametrize("name", ["no/such-model", "pebbles"])
def test_an_unknown_model_is_one_clear_sentence(name):
    with pytest.raises(RocktokensError, match=f"model '{name}' cannot be loaded") as error:
        load_model(name, device="cpu")
    assert "\n" not in str(error.value) and "pebbles-student" in str(error.value)


def test_a_directory_of_an_unknown_architecture_is_named(saved):
    directory, _ = saved
    config = json.loads((directory / "config.json").read_text()) | {"model_type": "no-such-type"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(RocktokensError, match=r"cannot be loaded.*no-such-type"):
        load_model(str(directory), device="cpu")


def test_devices_and_dtypes_that_do_not_exist_are_named():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(RocktokensError, match=r"models.device is 'gpu'"):
        resolve_device("gpu")
    with pytest.raises(RocktokensError, match=r"models.device is 'cuda:99'"):
        resolve_device("cuda:99")
    with pytest.raises(RocktokensError, match=r"models.dtype is 'int8'"):
        load_model("pebbles-student", dtype="int8", device="cpu")


# Files that say odd things


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "TypeError: "),
        (lambda folder: (folder / "config.json").write_text(DEEP), "RecursionError: "),
        (lambda folder: rewrite(folder / "config.json", hidden_size="x"), "Field 'hidden_size' expected int, got str"),
        (lambda folder: rewrite(folder / "config.json", vocab_size=None), "Field 'vocab_size' expected int"),
        (lambda folder: rewrite(folder / "config.json", num_attention_heads=0), "ZeroDivisionError: "),
        (lambda folder: rewrite(folder / "config.json", hidden_act="odd"), "KeyError: 'odd'"),
        (lambda folder: rewrite(folder / "config.json", dtype="odd"), "has no attribute 'odd'"),
        (lambda folder: rewrite(folder / "config.json", pad_token_id=999_999), "AssertionError: Padding_idx must be"),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), "TypeError: "),
        (lambda folder: (folder / "generation_config.json").write_text(""), "generation_config.json' is not a valid"),
        (
            lambda folder: (folder / "generation_config.json").write_bytes(b"\xff"),
            "generation_config.json' is not a valid",
        ),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "AttributeError: "),
        (lambda folder: (folder / "tokenizer_config.json").write_text(DEEP), "RecursionError: "),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "cannot be loaded ("),
    ],
)
def test_a_model_whose_files_are_odd_is_one_sentence(saved, damage, problem):
    folder, _ = saved
    damage(folder)
    with pytest.raises(RocktokensError) as refused:
        load_model(str(folder), device="cpu")
    sentence = str(refused.value)
    assert sentence.startswith(f"model {str(folder)!r} cannot be loaded (") and problem in sentence
    assert len(sentence.splitlines()) == 1


def test_a_model_without_a_generation_config_ends_as_its_config_says(saved):
    folder, _ = saved
    (folder / "generation_config.json").unlink()
    assert load_model(str(folder), device="cpu").eos_ids == {3, 256}


def test_an_end_that_is_no_token_id(saved):
    folder, _ = saved
    rewrite(folder / "generation_config.json", eos_token_id="x")
    with pytest.raises(RocktokensError, match=r"eos_token_id of .* is 'x', which is no token id"):
        load_model(str(folder), device="cpu")


def test_a_model_with_fewer_tokens_than_its_tokenizer(saved):
    folder, model = saved
    model.resize_token_embeddings(200)
    model.save_pretrained(folder)
    with pytest.raises(RocktokensError, match="has embeddings for 200 tokens, and a tokenizer of 256"):
        load_model(str(folder), device="cpu")


def test_tokens_that_were_added_to_a_tokenizer_may_have_no_embedding(saved):
    folder, model = saved
    model.resize_token_embeddings(256)
    model.save_pretrained(folder)
    assert load_model(str(folder), device="cpu").tokenizer.vocab_size == 256


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (DEEP, "it is nested too deep"),
        ('{"base_model_name_or_path": 3}', "base_model_name_or_path is 3, which is no name"),
        ('{"base_model_name_or_path": "HERE"}', "is an adapter of itself"),
        ('{"base_model_name_or_path": "BASE", "peft_type": "LORA", "r": "x"}', "TypeError: "),
        (
            '{"base_model_name_or_path": "BASE", "peft_type": "LORA", "megatron_config": {}}',
            "it is no LoRA adapter of a",
        ),
        (
            '{"base_model_name_or_path": "BASE", "peft_type": "LORA", "target_modules": ["q_proj"], "r": 2, '
            '"modules_to_save": ["["]}',
            "unterminated character set",
        ),
        ('{"base_model_name_or_path": "BASE", "peft_type": "IA3"}', "it is no LoRA adapter of a transformers model"),
    ],
)
def test_an_adapter_whose_config_is_odd_is_one_sentence(saved, tmp_path, content, problem):
    (folder, _), adapter = saved, tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    text = content.replace("HERE", str(adapter)).replace("BASE", str(folder))
    (adapter / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(RocktokensError) as refused:
        load_model(str(adapter), device="cpu")
    assert problem in str(refused.value) and len(str(refused.value).splitlines()) == 1


def test_an_adapter_imports_no_module_that_its_config_names(saved, tmp_path, monkeypatch):
    """As PEFT does with what a config for Megatron names."""
    (folder, _), adapter = saved, tmp_path / "adapter"
    adapter.mkdir()
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (adapter / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = {
        "base_model_name_or_path": str(folder),
        "peft_type": "LORA",
        "target_modules": ["q_proj"],
        "megatron_config": {"a": 1},
        "megatron_core": "planted",
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(RocktokensError, match="it is no LoRA adapter of a transformers model"):
        load_model(str(adapter), device="cpu")
