"""Two processes with a shard each of the head get the loss and the gradient of the whole."""

from pathlib import Path

import pytest
import sharded_head_worker
import torch.distributed as dist

from ranks import run_two_ranks


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")
def test_a_head_in_shards_is_gathered_and_its_gradient_goes_back_to_them(tmp_path: Path):
    run_two_ranks(Path(sharded_head_worker.__file__), [], tmp_path)
