"""A count-sketch: vectors over the vocabulary, folded to a small width so that inner products survive on average.

1. Every vocabulary id gets a bucket and a sign from 52 hashed bits of (seed, id): the same seed gives the same sketch
   anywhere.
2. s(x)_b = Σ over the ids v of bucket b of sign_v · x_v. That is linear: the sketch of a sum is the sum of sketches.
3. ⟨s(x), s(y)⟩ is ⟨x, y⟩ on average over seeds, with variance (‖x‖²‖y‖² + ⟨x, y⟩² − 2 Σ x²y²) / m at width m.

Norms and cosines that follow from this, with their errors: rocktokens.gradients.estimates.

Charikar, Chen and Farach-Colton: https://doi.org/10.1016/S0304-3975(03)00400-6
"""

from dataclasses import dataclass

import torch

from rocktokens.errors import RocktokensError
from rocktokens.rollouts.noise import noise_bits
from rocktokens.run_dir import derive_seed


@dataclass(frozen=True, slots=True)
class CountSketch:
    """The buckets and signs of all ids of a vocabulary."""

    width: int
    seed: int
    buckets_V: torch.Tensor
    signs_V: torch.Tensor

    def __call__(self, x_nV: torch.Tensor) -> torch.Tensor:
        """Sketch the rows to (n, m), in their dtype."""
        sketch_nm = x_nV.new_zeros(len(x_nV), self.width)
        return sketch_nm.index_add_(1, self.buckets_V, x_nV * self.signs_V.to(x_nV.dtype))


def count_sketch(vocab_size: int, width: int, seed: int, device: torch.device | str = "cpu") -> CountSketch:
    """Make the sketch of a seed.

    Args:
        vocab_size: V, the length of the vectors.
        width: m, the length of their sketches.
        seed: vectors can be compared when they were sketched with the same seed and width.
        device: where the vectors are.
    """
    if width < 1:
        raise RocktokensError(f"sketch_width = {width} is not valid: give at least 1")
    key = torch.tensor([derive_seed(seed, "count-sketch")], device=device)
    bits_V = noise_bits(key, torch.zeros_like(key), vocab_size)[0]
    signs_V = (bits_V & 1).mul_(2).sub_(1).to(torch.float32)
    return CountSketch(width, seed, (bits_V >> 1) % width, signs_V)
