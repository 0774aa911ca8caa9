"""A random llama with peaked distributions, requests of mixed lengths, and a tokenizer of words."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rocktokens.rollouts.sampler import Completion, SampleRequest

VOCAB, EOS_IDS, PAD = 97, frozenset({1, 2, 3}), 0


def make_llama(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.35,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": PAD,
            **settings,
        }
    )
    return LlamaForCausalLM(config).eval()


def make_requests(count: int, seed: int = 0, longest: int = 40) -> list[SampleRequest]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size=count)
    return [
        SampleRequest(f"prompt-{index}", rng.integers(4, VOCAB, size=length).astype(np.int32))
        for index, length in enumerate(lengths)
    ]


def same_completion(left: Completion, right: Completion, atol: float = 1e-5) -> bool:
    return (
        np.array_equal(left.token_ids, right.token_ids)
        and np.allclose(left.logprobs, right.logprobs, atol=atol, rtol=0)
        and left.finished == right.finished
    )


def word_tokenizer(**settings: object) -> PreTrainedTokenizerFast:
    """Whitespace-separated words: "<eos>" is 1, "w5" is 5."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", **settings)
