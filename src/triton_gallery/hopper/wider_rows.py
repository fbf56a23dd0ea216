"""What Triton 3.8 cannot compile, in rows that it can.

Rows of 129 to 192 columns lie in shared memory in three pieces of 64, and attention's kernels see the first two of a
tile as one. Triton 3.8 refuses that where all tiles together have an odd number of pieces: a view would have to be as
large as what it is a view of. (Those before it and after it do not ask.) So such rows are copied to rows of 256. The
zeros behind them add nothing to a score, and nobody reads what becomes of them.
"""

import torch

from . import attention_backward, attention_forward


def __getattr__(name: str):
    return getattr(attention_forward, name)


def _wider(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 256 - x.shape[-1])) if 128 < x.shape[-1] <= 192 else x


def _copy_back(wider: torch.Tensor, x: torch.Tensor) -> None:
    if wider is not x:
        x.copy_(wider[..., : x.shape[-1]])


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    lower: int | None, upper: int | None, scale: float,
) -> None:  # fmt: skip
    """What `attention_forward.forward` does."""
    wider = _wider(out)  # memory for it, whatever it holds
    attention_forward.forward(_wider(q), _wider(k), _wider(v), wider, lse, lower, upper, scale)
    _copy_back(wider, out)


def backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    lower: int | None, upper: int | None, scale: float,
) -> None:  # fmt: skip
    """What `attention_backward.backward` does."""
    gradients = dq, dk, dv
    wider = [_wider(x) for x in gradients]
    attention_backward.backward(
        _wider(dout), dlse, _wider(q), _wider(k), _wider(v), _wider(out), lse, *wider, lower, upper, scale
    )
    for computed, gradient in zip(wider, gradients, strict=True):
        _copy_back(computed, gradient)
