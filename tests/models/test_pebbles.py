"""The embedded pair: what is in the package, and that it does what its card says."""

import json
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import torch

from rocktokens.models import pebbles
from rocktokens.models.fingerprints import same_tokenizer
from rocktokens.models.load import LoadedModel, load_model
from rocktokens.rollouts.encode import Sampling, make_rollouts
from rocktokens.rollouts.sampler import TransformersSampler
from rocktokens.run_dir import file_sha256
from rocktokens.tasks.wordmath import Wordmath, make_problem
from rocktokens.types import Rollout

PACKAGE = Path(pebbles.__file__).parent
CARD = PACKAGE / "card.json"
Name = Literal["teacher", "student"]
NAMES: tuple[Name, ...] = get_args(Name)
PROMPTS = Wordmath("test").prompts(200, seed=11)


@pytest.fixture(scope="module")
def pair() -> dict[str, LoadedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return {name: load_model(f"pebbles-{name}", device="cpu") for name in NAMES}


@pytest.fixture(scope="module")
def answers(pair: dict[str, LoadedModel]) -> dict[str, list[Rollout]]:
    return {name: answer(loaded) for name, loaded in pair.items()}


def answer(loaded: LoadedModel) -> list[Rollout]:
    """Both models at temperature 1, sampled as a run does."""
    sampler = TransformersSampler(loaded.model, loaded.eos_ids, loaded.tokenizer.pad_token_id, batch_size=100)
    return make_rollouts(sampler, loaded.tokenizer, PROMPTS, Sampling(1.0, 160, 11, max_prompt_length=160))


def accuracy(loaded: LoadedModel, rollouts: list[Rollout]) -> float:
    task = Wordmath("test")
    texts = loaded.tokenizer.batch_decode([r.token_ids.tolist() for r in rollouts], skip_special_tokens=True)
    return float(np.mean([task.grade(prompt, text) for prompt, text in zip(PROMPTS, texts, strict=True)]))


def test_both_speak_the_same_tokens(pair: dict[str, LoadedModel]):
    same_tokenizer(pair["student"].tokenizer, pair["teacher"].tokenizer)
    assert pair["student"].tokenizer.chat_template == pair["teacher"].tokenizer.chat_template
    assert pair["student"].eos_ids == pair["teacher"].eos_ids == {pair["student"].tokenizer.eos_token_id}


@pytest.mark.parametrize(("name", "parameters"), [("teacher", 5e6), ("student", 1e6)])
def test_sizes(pair: dict[str, LoadedModel], name: str, parameters: float):
    assert pair[name].model.num_parameters() == pytest.approx(parameters, rel=0.1)
    assert all(torch.isfinite(parameter).all() for parameter in pair[name].model.parameters())


def test_the_package_stays_small_and_holds_no_weights_but_safetensors():
    files = [path for name in NAMES for path in pebbles.directory(name).rglob("*")]
    assert sum(path.stat().st_size for path in files) <= 16e6
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}
    assert all(path.name == "model.safetensors" for path in files if path.suffix == ".safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_the_card_names_the_weights_that_are_there(name: Name):
    card = json.loads(CARD.read_text(encoding="utf-8"))
    assert card[name]["weights_sha256"] == file_sha256(pebbles.directory(name) / "model.safetensors")


@pytest.mark.parametrize(("name", "lowest", "highest"), [("teacher", 0.9, 1.0), ("student", 0.25, 0.65)])
def test_accuracy(
    pair: dict[str, LoadedModel], answers: dict[str, list[Rollout]], name: str, lowest: float, highest: float
):
    assert lowest <= accuracy(pair[name], answers[name]) <= highest


@pytest.mark.parametrize("name", NAMES)
def test_answers_end(answers: dict[str, list[Rollout]], name: str):
    assert np.mean([rollout.finished for rollout in answers[name]]) >= 0.95


def test_the_tokenizer_gives_wordmath_back_and_splits_numbers_into_digits(pair: dict[str, LoadedModel]):
    tokenizer = pair["student"].tokenizer
    assert 1000 <= len(tokenizer) <= 2000
    for index in range(300):
        text = make_problem("test", 4, index).text + "\n\n\\(12\\times 3=36\\). **Step 2:** $\\boxed{36}$."
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        pieces = [tokenizer.decode([token]) for token in ids]
        with_digits = [piece for piece in pieces if any(character.isdigit() for character in piece)]
        assert with_digits and all(len(piece) == 1 for piece in with_digits)
