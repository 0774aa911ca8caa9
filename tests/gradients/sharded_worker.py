"""One of two processes that hold a shard each of the student; run by test_sharded_gradients.py.

Arguments: ``fsdp`` (shards), ``hsdp`` (both processes whole, by a mesh of replicas), and the file to write to.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from gradient_oracle import make_rollouts, tiny_gpt2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rocktokens.errors import RocktokensError
from rocktokens.gradients.adam import AdamSettings
from rocktokens.gradients.parameter_space import gradient_shares

SETS = {"rocks": {1, 4, 7, 20}, "control": {2, 3, 11, 12, 13}}
ROLLOUTS = make_rollouts(7, seed=9)
MESHES = {"fsdp": ((2,), ("shard",)), "hsdp": ((2, 1), ("replicate", "shard"))}


def measure(student):
    """Three micro-batches or so a batch, so that the processes do not get equally many."""
    generator = torch.Generator().manual_seed(6)
    state = {}
    for name, parameter in student.named_parameters():
        state[f"{name}/exp_avg"] = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        state[f"{name}/exp_avg_sq"] = 0.1 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        state[f"{name}/step"] = torch.tensor(3.0)
    decay = {"lm_head.weight": 0.2, "transformer.h.0.mlp.c_fc.weight": 0.1}
    adam = AdamSettings(0.01, 0.9, 0.95, 1e-8, decay, max_grad_norm=0.1)
    return gradient_shares(
        student,
        tiny_gpt2(12, 2),
        ROLLOUTS,
        SETS,
        batches=2,
        adam=adam,
        optimizer_state=state,
        tokens_per_forward=20,
    )


def refusal(student, teacher) -> str:
    """What is said against a pair."""
    try:
        gradient_shares(student, teacher, ROLLOUTS, SETS, batches=1)
    except RocktokensError as error:
        return str(error)
    return ""


def main(kinds: list[str], target: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for kind in kinds:
        shape, names = MESHES[kind]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        student = tiny_gpt2(8, 1)
        for layer in student.transformer.h:
            fully_shard(layer, mesh=mesh)
        fully_shard(student, mesh=mesh)
        assert all(isinstance(parameter, DTensor) for parameter in student.parameters())
        shares = measure(student)
        found |= {f"{kind}_gradient": shares.gradient_gram_NBAA, f"{kind}_step": shares.step_gram_NBPP}
        assert all(parameter.grad is None for parameter in student.parameters())
    partly = tiny_gpt2(8, 1)
    fully_shard(partly.transformer.h[0])
    found |= {"partly": refusal(partly, tiny_gpt2(12, 2)), "teacher": refusal(tiny_gpt2(8, 1), fully_shard(partly))}
    np.savez(f"{target}-{dist.get_rank()}.npz", **found)
    dist.barrier()  # neither rank takes the store away while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:-1], sys.argv[-1])
