"""A random pair of heads and states, and its divergences by their definitions, in float64 and with autograd."""

import torch

from rocktokens.models.head import LMHead

T, D, E, V = 13, 7, 5, 29
DIVERGENCES = ("reverse", "forward", "jsd")


def example(seed=0, dtype=torch.float64, v_student=V, v_teacher=V, n=T):
    """States, head weights and ids of a pair whose distributions are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((n, D), (v_student, D), (n, E), (v_teacher, E))
    h_s, w_s, h_t, w_t = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    ids = torch.randint(min(v_student, v_teacher), (n,), generator=generator)
    return h_s, w_s, h_t, w_t, ids


def oracle_logits(h, head):
    """z in float64, written out."""
    head = head if isinstance(head, LMHead) else LMHead(head)
    z = h.double() @ head.weight_VD.double().T
    z = z if head.bias_V is None else z + head.bias_V.double()
    z = z * head.scale
    return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)


def oracle_divergence(z_s, z_t, divergence, temperature):
    """The definitions, with no thought for rounding; differentiable."""
    width = min(z_s.shape[-1], z_t.shape[-1])
    log_p, log_q = (torch.log_softmax(z[..., :width] / temperature, -1) for z in (z_s, z_t))
    p, q = log_p.exp(), log_q.exp()
    log_m = ((p + q) / 2).log()
    return {
        "reverse": (p * (log_p - log_q)).sum(-1),
        "forward": (q * (log_q - log_p)).sum(-1),
        "jsd": 0.5 * (q * (log_q - log_m)).sum(-1) + 0.5 * (p * (log_p - log_m)).sum(-1),
    }[divergence]


def heads(w_s, w_t, generator_seed=1):
    generator = torch.Generator().manual_seed(generator_seed)
    b_s, b_t = (torch.randn(len(w), generator=generator, dtype=torch.float64).to(w.dtype) for w in (w_s, w_t))
    return LMHead(w_s, b_s, scale=0.7, softcap=3.0), LMHead(w_t, b_t, scale=1.9, softcap=None)


def oracle_coarse(z_s, z_t, divergence, temperature, classes):
    """The divergence between the distributions in which each class is one outcome; differentiable."""
    members = [v for ids in classes for v in ids]
    others = [v for v in range(min(z_s.shape[-1], z_t.shape[-1])) if v not in members]

    def summed(z):
        log_p = torch.log_softmax(z[..., : len(members) + len(others)] / temperature, -1)
        sums = [log_p[..., list(ids)].logsumexp(-1, keepdim=True) for ids in classes]
        return torch.cat([log_p[..., others], *sums], -1)  # these are their own softmax

    return oracle_divergence(summed(z_s), summed(z_t), divergence, 1.0)
