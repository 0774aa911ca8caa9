"""Which calls the attention kernels take, and how they split rows; attention_cases.py runs them."""

import pytest
import torch

from rocktokens.rollouts.attention import parts_of, suits


def call(**changed):
    """A call that the kernels are for, but for what is changed."""
    states = torch.zeros(4, 2, 64, 16, dtype=torch.bfloat16)
    plain = {"q_AH1d": torch.zeros(4, 6, 1, 16, dtype=torch.bfloat16), "k_AGLd": states, "v_AGLd": states}
    others = {"mask": torch.zeros(4, 1, 1, 64), "row_slots_2A": torch.zeros(2, 4, dtype=torch.long)}
    return {**plain, **others, "dropout": 0.0, "sliding_window": None, "is_causal": True, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"q_AH1d": torch.zeros(4, 6, 2, 16, dtype=torch.bfloat16)},
        {"q_AH1d": torch.zeros(4, 6, 1, 16)},
        {"q_AH1d": torch.zeros(4, 6, 1, 32, dtype=torch.bfloat16)},
        {"q_AH1d": torch.zeros(4, 66, 1, 16, dtype=torch.bfloat16)},
        {"v_AGLd": torch.zeros(4, 2, 64, 8, dtype=torch.bfloat16)},
        {"v_AGLd": torch.zeros(4, 64, 2, 16, dtype=torch.bfloat16).transpose(1, 2)},
        {"mask": torch.zeros(4, 1, 1, 128)},
        {"row_slots_2A": torch.zeros(2, 8, dtype=torch.long)},
        {"dropout": 0.1},
        {"softcap": 50.0},
        {"s_aux": torch.zeros(6)},
        {"position_bias": torch.zeros(4, 6, 1, 64)},
        {"sliding_window": 32},
    ],
)
def test_calls_that_are_left_to_torch(changed):
    assert suits(**call())
    assert not suits(**call(**changed))


@pytest.mark.parametrize(
    ("programs", "slots", "parts"),
    [
        (1024, 512, 1),
        (193, 4096, 1),
        (192, 512, 2),
        (96, 1536, 4),
        (16, 1536, 8),
        (2, 255, 1),
        (2, 256, 2),
        (1, 9999, 32),
    ],
)
def test_the_fewer_programs_and_the_more_slots_the_more_parts(programs, slots, parts):
    assert parts_of(programs, slots) == parts
