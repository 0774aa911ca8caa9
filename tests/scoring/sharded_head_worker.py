"""One of two processes that hold a shard each of the student's head; run by test_sharded_head.py."""

import torch
import torch.distributed as dist
from pair_oracle import T, example, heads
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rocktokens.classes import TokenClasses
from rocktokens.models.head import LMHead
from rocktokens.scoring.divergence import token_scores, weighted_kl


def main() -> None:
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    h_s, w_s, h_t, w_t, ids = example()
    student, teacher = heads(w_s, w_t)
    weights = torch.linspace(0, 1, T, dtype=torch.float64)

    mesh, mine = init_device_mesh("cpu", (ranks,)), slice(rank, None, ranks)
    for options in ({}, {"classes": TokenClasses([[3, 17], [0, 28, 9]]), "lam": 0.3}):
        whole = [x.clone().requires_grad_() for x in (h_s, student.weight_VD, student.bias_V)]
        loss, _ = weighted_kl(whole[0], LMHead(*whole[1:], 0.7, 3.0), h_t, teacher, ids, weights, float(T), **options)
        loss.backward()

        shards = [distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_() for x in whole[1:]]
        head, own_h = LMHead(*shards, 0.7, 3.0), h_s.clone().requires_grad_()
        own = (own_h[mine], head, h_t[mine], teacher, ids[mine], weights[mine])
        part, scores = weighted_kl(*own, float(T), **options)
        (part * ranks).backward()  # the average over ranks makes it the sum

        for shard, expected in zip(shards, whole[1:], strict=True):
            assert isinstance(shard.grad, DTensor) and shard.grad.placements == (Shard(0),)
            torch.testing.assert_close(shard.grad.full_tensor(), expected.grad, atol=1e-14, rtol=1e-12)
        torch.testing.assert_close(own_h.grad[mine], ranks * whole[0].grad[mine], atol=1e-14, rtol=1e-12)
    alone = token_scores(h_s[mine], head, h_t[mine], distribute_tensor(w_t, mesh, [Shard(0)]), ids[mine])
    expected = token_scores(h_s, student, h_t, w_t, ids)
    for (_, ours), (_, theirs) in zip(alone.items(), expected.items(), strict=True):
        torch.testing.assert_close(ours, theirs[mine])
    assert scores.kl[weights[mine] > 0].isfinite().all()
    dist.barrier()  # neither rank takes the store away while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
