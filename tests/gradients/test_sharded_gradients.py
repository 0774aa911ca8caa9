"""Two processes with a shard each of the student (FSDP2 on the CPU) measure what one with the whole does."""

from pathlib import Path

import numpy as np
import pytest
import sharded_worker
import torch.distributed as dist
from gradient_oracle import tiny_gpt2

from ranks import run_two_ranks
from rocktokens.gradients.partition import prompt_batches
from rocktokens.scoring.batch import split_by_tokens

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """What each of two processes found, by rank."""
    folder = tmp_path_factory.mktemp("sharded")
    run_two_ranks(Path(sharded_worker.__file__), [*sharded_worker.MESHES, str(folder / "found")], folder)
    return [np.load(folder / f"found-{rank}.npz") for rank in range(2)]


@pytest.fixture(scope="module")
def whole():
    return sharded_worker.measure(tiny_gpt2(8, 1))


@pytest.mark.parametrize("kind", sharded_worker.MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_give_the_inner_products_of_the_whole(by_rank, whole, kind, rank):
    found = by_rank[rank]
    np.testing.assert_allclose(found[f"{kind}_gradient"], whole.gradient_gram_NBAA, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(found[f"{kind}_step"], whole.step_gram_NBPP, rtol=1e-8, atol=1e-14)


def test_the_work_does_not_divide_evenly():
    """A process runs out of micro-batches before the other, and must keep step."""
    rollouts = sharded_worker.ROLLOUTS
    batches = [[rollouts[index] for index in indices] for indices in prompt_batches(rollouts, 2)]
    counts = [len(split_by_tokens(batch, 20)) for batch in batches]
    assert any(count % 2 for count in counts) and max(counts) > 1


def test_a_partly_sharded_student_and_a_sharded_teacher_are_refused(by_rank):
    assert "parts of the student are sharded" in str(by_rank[0]["partly"])
    assert "the teacher's parameters are sharded" in str(by_rank[0]["teacher"])
