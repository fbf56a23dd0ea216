"""Parts of a row on different multiprocessors tell each other, through memory, what they have found.

A row that is too long for one multiprocessor fits into several, if a program for each part keeps its part on the chip
and the programs agree on the row's statistics in between. Each writes one or two numbers into a mailbox and reads those
of all parts as soon as they are there: a wait, in which other programs of the multiprocessor work. Who waits for a
program that does not run would wait for ever. Layer norm and softmax's gradient have programs that all run at a time:
*cooperative launch* starts the whole grid together, or refuses where it has no room. Softmax has more, which start as
others end, and who has waited for long does the others' work. (A product needs mailboxes for another kind of parts, and
neither of the two: see ``matmul_specialized``.)
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, next_power_of_2, scratch
from ._gluon import gl, gluon

# What a mailbox holds before a message: two NaNs with the sign bit set, which no arithmetic of the GPU makes.
EMPTY = gl.constexpr(-1)


@triton.jit(do_not_specialize=["n"])
def _empty_mailboxes_kernel(mail_ptr, n, BLOCK_SIZE: tl.constexpr):
    # A kernel launched to overlap with this one may begin.
    gdc_launch_dependents()
    i = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(mail_ptr + i, tl.full((BLOCK_SIZE,), -1, tl.int64), mask=i < n)


def mailboxes(n_rows: int, n_parts: int, device: torch.device) -> torch.Tensor:
    """An empty mailbox for each part of each row."""
    mail = scratch((n_rows, n_parts), torch.int64, device)
    launch(_empty_mailboxes_kernel, (cdiv(mail.numel(), 1024),), mail, mail.numel(), BLOCK_SIZE=1024)
    return mail


def at_a_time(n_programs: int, num_warps: int) -> dict[str, int | bool]:
    """Options of a launch whose programs must all run at a time, `n_programs` of them on each multiprocessor."""
    # Its warps are spread over its four parts. Each has 16384 registers, and gives each thread the same multiple of 8.
    registers = 16384 // (32 * cdiv(num_warps * n_programs, 4)) // 8 * 8
    return {"launch_cooperative_grid": True, "maxnreg": registers}


def max_parts(n_parts: int, num_warps: int) -> int:
    """MAX_PARTS of `receive`: at least one for each thread.

    With fewer, several threads would hold copies of one element, each with a load of its own, and the reduction over
    all elements would ask only one of them.
    """
    return max(next_power_of_2(n_parts), 32 * num_warps)


@gluon.jit
def send(mail_ptr, first, second, part):
    """Send two float32 numbers of this part of a row to all parts."""
    # One store of 64 bits, so that nobody sees the first number without the second.
    high = first.to(gl.int32, bitcast=True).to(gl.int64) << 32
    message = high | (second.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF)
    gl.atomic_xchg(mail_ptr + part, message, sem="relaxed")


@gluon.jit
def receive(mail_ptr, n_parts, MAX_PARTS: gl.constexpr, num_warps: gl.constexpr):
    """Wait for the two numbers of all parts of a row.

    Returns both for each part, and the parts' numbers; of MAX_PARTS, those from n_parts on repeat the last part.
    """
    parts = gl.arange(0, MAX_PARTS, gl.BlockedLayout([1], [32], [num_warps], [0]))
    ptrs = mail_ptr + gl.minimum(parts, n_parts - 1)
    mail = gl.load(ptrs, volatile=True)
    while gl.max((mail == EMPTY).to(gl.int32), 0) == 1:
        mail = gl.load(ptrs, volatile=True)
    return (mail >> 32).to(gl.int32).to(gl.float32, bitcast=True), mail.to(gl.int32).to(gl.float32, bitcast=True), parts


@gluon.jit
def receive_soon(mail_ptr, n_parts, MAX_PARTS: gl.constexpr, num_warps: gl.constexpr):
    """`receive`, for some milliseconds at most, and whether anything is missing."""
    parts = gl.arange(0, MAX_PARTS, gl.BlockedLayout([1], [32], [num_warps], [0]))
    ptrs = mail_ptr + gl.minimum(parts, n_parts - 1)
    mail = gl.load(ptrs, volatile=True)
    missing = gl.max((mail == EMPTY).to(gl.int32), 0) == 1
    tries = 1
    while missing & (tries < 8192):
        mail = gl.load(ptrs, volatile=True)
        missing = gl.max((mail == EMPTY).to(gl.int32), 0) == 1
        tries += 1
    first, second = (mail >> 32).to(gl.int32), mail.to(gl.int32)
    return first.to(gl.float32, bitcast=True), second.to(gl.float32, bitcast=True), parts, missing
