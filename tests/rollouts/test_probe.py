"""A student that is sampled from with other probabilities than it is scored with is refused, and no other."""

import pytest
import torch
from tiny_sampling import EOS_IDS, PAD, VOCAB, make_llama
from transformers import BartConfig, BartForCausalLM, BertConfig, BertLMHeadModel, PreTrainedModel

from rocktokens.errors import RocktokensError
from rocktokens.rollouts.probe import require_scored_as_sampled
from rocktokens.rollouts.sampler import TransformersSampler

SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}


def sampler(model: PreTrainedModel, **settings) -> TransformersSampler:
    return TransformersSampler(model.eval(), EOS_IDS, PAD, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_keeps_its_word_passes_and_keeps_its_mode(dtype: torch.dtype):
    model = make_llama().to(dtype).train()
    require_scored_as_sampled(TransformersSampler(model, EOS_IDS, PAD))
    assert all(module.training for module in model.modules())


def test_columns_that_are_never_sampled_do_not_count():
    require_scored_as_sampled(sampler(make_llama(), vocab_size=VOCAB - 9))


def test_a_decoder_that_counts_positions_by_itself():
    """The cache of the sampler has room for more than it holds, which BART takes for its position."""
    torch.manual_seed(0)
    size = {
        "decoder_layers": 1,
        "encoder_layers": 1,
        "d_model": 32,
        "decoder_ffn_dim": 48,
        "decoder_attention_heads": 4,
    }
    model = BartForCausalLM(BartConfig(**SIZES, **size, init_std=0.3, is_decoder=True, is_encoder_decoder=False))
    with pytest.raises(RocktokensError, match=r"^BartForCausalLM is sampled from with other probabilities than it is "):
        require_scored_as_sampled(sampler(model))


def test_layers_between_trunk_and_head():
    torch.manual_seed(0)
    size = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(**SIZES, **size, initializer_range=0.3, is_decoder=True))
    with pytest.raises(RocktokensError, match="BertLMHeadModel is sampled from with other probabilities"):
        require_scored_as_sampled(sampler(model))


def test_a_model_that_raises_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    model = make_llama()
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda _: 1 / 0)
    with pytest.raises(RocktokensError, match=r"LlamaForCausalLM cannot be used here \(ZeroDivisionError: division"):
        require_scored_as_sampled(sampler(model))


def test_what_the_disk_says_stays_what_it_is(monkeypatch: pytest.MonkeyPatch):
    model = make_llama()

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", fail)
    with pytest.raises(OSError, match="Input/output error"):
        require_scored_as_sampled(sampler(model))


def test_a_context_too_short_to_try_is_not_tried():
    require_scored_as_sampled(sampler(make_llama(max_position_embeddings=8)))
