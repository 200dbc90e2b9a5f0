"""Losses as pure functions, each with its equation. Samples of `weight` [batch] 0 are ignored."""

import torch


def weighted_mean(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Mean over samples of weight 1."""
    return x.mean() if weight is None else (x * weight).sum() / weight.sum().clamp(min=1.0)


def policy_gradient_loss(
    log_prob: torch.Tensor, advantage: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """L = -E[ log pi(a|s) A ]   (Williams 1992; Mnih et al. 2016)."""
    return -weighted_mean(log_prob * advantage, weight)


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    clip: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """L = -E[ min(r A, clip(r, 1 - c, 1 + c) A) ],  r = pi(a|s) / pi_old(a|s)   (Schulman et al. 2017)."""
    ratio = torch.exp(log_prob - old_log_prob)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return -weighted_mean(torch.minimum(unclipped, clipped), weight)


def value_loss(value: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """L = 1/2 E[ (V(s) - R)^2 ]."""
    return 0.5 * weighted_mean((value - target).square(), weight)


def clipped_value_loss(
    value: torch.Tensor,
    old_value: torch.Tensor,
    target: torch.Tensor,
    clip: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """L = 1/2 E[ max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) ]."""
    near = old_value + (value - old_value).clamp(-clip, clip)
    worst = torch.maximum((value - target).square(), (near - target).square())
    return 0.5 * weighted_mean(worst, weight)


def approximate_kl(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(pi_old || pi) ~ E[ (r - 1) - log r ], never negative (Schulman 2020, "Approximating KL divergence")."""
    log_ratio = log_prob - old_log_prob
    return weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)


def clip_fraction(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, clip: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Fraction of samples whose ratio is outside the clip range."""
    ratio = torch.exp(log_prob - old_log_prob)
    return weighted_mean(((ratio - 1.0).abs() > clip).float(), weight)


def variance(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Var(x) = E[ (x - E[x])^2 ] over samples of weight 1."""
    return weighted_mean((x - weighted_mean(x, weight)).square(), weight)


def explained_variance(value: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """1 - Var(R - V) / Var(R): 1 for a perfect value function, 0 for a constant one."""
    return 1.0 - variance(target - value, weight) / variance(target, weight).clamp(min=1e-8)


def moments(x: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and inverse standard deviation over samples of weight 1, for normalizing advantages."""
    return weighted_mean(x, weight), inverse_std(variance(x, weight))


def inverse_std(variance: torch.Tensor) -> torch.Tensor:
    """Inverse standard deviation."""
    return torch.rsqrt(variance + 1e-8)


def huber(error: torch.Tensor, limit: float | None = 1.0) -> torch.Tensor:
    """x^2 / 2 for |x| up to c = `limit`, else c (|x| - c / 2); the gradient is at most c (None: x^2 / 2)."""
    square = 0.5 * error.square()
    if limit is None:
        return square
    size = error.abs()
    return torch.where(size <= limit, square, limit * (size - 0.5 * limit))


RESCALE_EPS = 1e-3
"""Linear term of `rescale`, which makes its inverse Lipschitz continuous."""


def rescale(x: torch.Tensor, eps: float = RESCALE_EPS) -> torch.Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x   (Pohlen et al. 2018), in a form exact for small x."""
    return x / (torch.sqrt(x.abs() + 1.0) + 1.0) + eps * x


def inverse_rescale(y: torch.Tensor, eps: float = RESCALE_EPS) -> torch.Tensor:
    """h^-1(y) = sign(y) u (u + 2), where u = sqrt(|x| + 1) - 1 solves eps u^2 + (1 + 2 eps) u = |y|."""
    size, slope = y.abs(), 1.0 + 2.0 * eps
    u = 2.0 * size / (slope + torch.sqrt(slope * slope + 4.0 * eps * size))
    return torch.sign(y) * u * (u + 2.0)


def categorical_projection(
    probs: torch.Tensor, reward: torch.Tensor, discount: torch.Tensor, support: torch.Tensor
) -> torch.Tensor:
    """Projection of the distribution of r + d z onto the atoms z [width]   (Bellemare et al. 2017).

    m_i = sum_j p_j max(0, 1 - |clip(r + d z_j, z_0, z_n) - z_i| / (z_1 - z_0)), with probabilities p [batch, width].
    """
    moved = reward.unsqueeze(-1) + discount.unsqueeze(-1) * support
    moved = torch.minimum(torch.maximum(moved, support[0]), support[-1])
    distance = (moved.unsqueeze(-2) - support.unsqueeze(-1)).abs() / (support[1] - support[0])
    return (probs.unsqueeze(-2) * (1.0 - distance).clamp(min=0.0)).sum(dim=-1)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """-sum_i m_i log p_i, [batch] from [batch, width]."""
    return -(target * torch.log_softmax(logits, dim=-1)).sum(dim=-1)


def quantile_loss(quantile: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """sum_i E_j[ |tau_i - 1{u < 0}| huber(u) ],  u = target_j - quantile_i,  tau_i = (i + 1/2) / n.

    For quantiles [batch, n] and target samples [batch, m] (Dabney et al. 2018).
    """
    n = quantile.shape[-1]
    tau = (torch.arange(n, device=quantile.device) + 0.5) / n
    error = target.unsqueeze(-2) - quantile.unsqueeze(-1)
    weight = (tau.unsqueeze(-1) - (error.detach() < 0).float()).abs()
    return (weight * huber(error)).mean(dim=-1).sum(dim=-1)
