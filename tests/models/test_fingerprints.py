import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rocktokens.errors import RocktokensError, TokenizerMismatchError
from rocktokens.models.fingerprints import directory_fingerprint, model_identity, same_tokenizer, vocabulary_sha256
from rocktokens.run_dir import RunDir


def tokenizer(swap=False, extra=(), merges=(), prefix_space=False, metaspace_decoder=False):
    """A byte-level tokenizer with `th` and `he`; options change one thing each."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "he", *extra]
    if swap:
        pieces[-2:] = pieces[:-3:-1]
    merge_list = list(merges) or [("t", "h"), ("h", "e")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merge_list))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.Metaspace() if metaspace_decoder else decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 300), max_size=40), st.randoms())
def test_a_vocabulary_hash_ignores_order_and_nothing_else(vocab, random):
    shuffled = list(vocab.items())
    random.shuffle(shuffled)
    assert vocabulary_sha256(dict(shuffled)) == vocabulary_sha256(vocab)
    assert vocabulary_sha256({**vocab, "longer than any": 0}) != vocabulary_sha256(vocab)
    for piece, index in vocab.items():
        assert vocabulary_sha256({**vocab, piece: index + 1}) != vocabulary_sha256(vocab)


def test_the_hash_of_a_known_vocabulary_never_changes():
    written = r'[[0,"a"],[1,"b"],[1,"c"],[2,"\u00e9"]]'
    assert vocabulary_sha256({"c": 1, "b": 1, "a": 0, "é": 2}) == hashlib.sha256(written.encode()).hexdigest()


def test_a_tokenizer_that_was_saved_is_the_same_until_a_token_is_added(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    reloaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    same_tokenizer(tokenizer(), reloaded)
    reloaded.add_tokens(["zz"])
    with pytest.raises(TokenizerMismatchError, match="nothing against 'zz'"):
        same_tokenizer(tokenizer(), reloaded)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"swap": True}, r"at id 256 \('th' against 'he'\)"),
        ({"extra": ["zz"]}, r"at id 258 \(nothing against 'zz'\)"),
        ({"merges": [("h", "e"), ("t", "h")]}, "split .*Therefore.* differently"),
        ({"prefix_space": True}, "differently"),
        ({"metaspace_decoder": True}, "decode the same ids differently"),
    ],
)
def test_the_first_difference_is_named(other, message):
    with pytest.raises(TokenizerMismatchError, match=message):
        same_tokenizer(tokenizer(), tokenizer(**other))


def test_a_directory_is_known_by_its_weights(tmp_path):
    with pytest.raises(RocktokensError, match=r"no .*safetensors"):
        directory_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = directory_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "optimizer.safetensors").write_bytes(b"moments")
    assert directory_fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"weightt")
    second = directory_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert len({first, second, directory_fingerprint(tmp_path)}) == 3


def test_an_adapter_is_known_by_its_weights_scale_and_base(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"low rank")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    first = directory_fingerprint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert directory_fingerprint(tmp_path) != first


def test_a_model_is_known_by_content_where_it_has_any_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir("run")
    for folder in (run.checkpoint(3), tmp_path / "copy", tmp_path / "pebbles-student"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "optimizer.safetensors").write_bytes(folder.name.encode())
    run.adopt([f"checkpoints/step-3/{name}.safetensors" for name in ("model", "optimizer")])
    fingerprint = directory_fingerprint(tmp_path / "copy")
    assert model_identity("copy", run) == model_identity("run/checkpoints/step-3", run) == fingerprint
    (run.checkpoint(3) / "model.safetensors").unlink()
    assert model_identity("run/checkpoints/step-3", run) == fingerprint
    assert [model_identity(name, run) for name in ("pebbles-student", "org/model")] == ["pebbles-student", "org/model"]


def test_fingerprints_need_no_torch():
    code = (
        "import sys, rocktokens.models.fingerprints; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
