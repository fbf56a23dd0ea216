"""Layer norm of long rows, in Gluon: a row waits on the chip between the passes over it.

Forward, rows have more room than a multiprocessor where each is cut into parts, see ``exchange``. Backward, both means
of a row must be known before the first element of its gradient, and the sums for weight and bias stay in registers from
the first row to the last. For both there is no room in registers when rows are long. So the rows of x and dy, and the
weight, live in shared memory, where the next rows arrive while this one is worked on.
"""

import torch
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, next_power_of_2, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon
from .exchange import at_a_time, exchange, mailboxes

# Forward, a warp has this much of a row, in chunks of so many vectors of 16 bytes for each thread. The warps of all
# programs on a multiprocessor fill half of its shared memory.
_WARP_BYTES = 4 * 1024
_STEPS = 2
_WARPS_PER_PROCESSOR = 32
# Rows of up to this many bytes, and warps of a program then: a short row wants many programs at different points of
# their work, a long one few parts that tell each other: measured on an H200.
_PART_WARPS = ((128 * 1024, 1), (512 * 1024, 2), (2**31, 4))

_NUM_WARPS = 16
_CHUNK = _NUM_WARPS * 32 * 8  # elements: eight for each thread, 16 bytes of a 16-bit dtype
_MAX_CHUNKS = 4
# Rows in shared memory: one at work, one on its way. A third was slower.
_STAGES = 2


# --- forward ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_part(smem, x_part_ptr, cols, count, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, CHUNK: gl.constexpr):
    """Start the copies of a part of a row, chunk by chunk."""
    for c in gl.static_range(N_CHUNKS):
        mask = None if c < N_FULL else c * CHUNK + cols < count
        async_copy_to_shared(smem.index(c), x_part_ptr + c * CHUNK + cols, mask=mask)
        async_copy.commit_group()


@gluon.jit
def _affine(x_hat, weight_ptr, bias_ptr, cols, mask):
    """x_hat * weight + bias for the columns `cols`."""
    y = x_hat
    if weight_ptr is not None:
        y *= gl.load(weight_ptr + cols, mask=mask, eviction_policy="evict_last").to(gl.float32)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + cols, mask=mask, eviction_policy="evict_last").to(gl.float32)
    return y


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols)
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    mail_ptr,  # (n_rows, n_parts)
    n_rows,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    n_cols,
    x_row_stride,
    eps,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    CHUNK_STEPS: gl.constexpr,  # vectors per thread in a chunk
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    MAX_PARTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own row 0, one part each, the next n_parts programs row 1, and so on.

    After as many rows as there are programs for they go on with the next ones.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNK: gl.constexpr = CHUNK_STEPS * 32 * num_warps * VECTOR
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    # All columns count from the begin of the part.
    first = part * part_cols
    count = gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    y_ptr += first
    if weight_ptr is not None:
        weight_ptr += first
    if bias_ptr is not None:
        bias_ptr += first
    _copy_part(smem, x_ptr + row * x_row_stride, cols, count, N_CHUNKS, N_FULL, CHUNK)
    while row < n_rows:
        mean = 0.0
        if mean_ptr is not None:
            total = gl.zeros([CHUNK], gl.float32, LAYOUT)
            for c in gl.static_range(N_CHUNKS):
                async_copy.wait_group(N_CHUNKS - 1 - c)
                x = smem.index(c).load(LAYOUT).to(gl.float32)
                total += x if c < N_FULL else gl.where(c * CHUNK + cols < count, x, 0.0)
            mean = gl.sum(total, 0) / count
        async_copy.wait_group(0)
        m2 = gl.zeros([CHUNK], gl.float32, LAYOUT)
        for c in gl.static_range(N_CHUNKS):
            x = smem.index(c).load(LAYOUT).to(gl.float32) - mean
            m2 += x * x if c < N_FULL else gl.where(c * CHUNK + cols < count, x * x, 0.0)
        row_mail_ptr = mail_ptr + row * n_parts
        means, m2s, parts = exchange(row_mail_ptr, mean, gl.sum(m2, 0), part, n_parts, MAX_PARTS, num_warps)
        # Chan's formula joins the parts: each brings its own spread, and the distance of its mean from the row's.
        counts = gl.where(parts < n_parts, gl.minimum(n_cols - parts * part_cols, part_cols), 0).to(gl.float32)
        m2s = gl.where(parts < n_parts, m2s, 0.0)
        if mean_ptr is not None:
            mean = gl.sum(means * counts, 0) / n_cols
            m2s += gl.where(parts < n_parts, (means - mean) * (means - mean) * counts, 0.0)
        rstd = gl.rsqrt(gl.sum(m2s, 0) / n_cols + eps)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if mean_ptr is not None:
                gl.store(mean_ptr + row, mean)
        next_row = row + gl.num_programs(0) // n_parts
        # After the last row the copies bring it again, and nobody reads them.
        next_part_ptr = x_ptr + gl.minimum(next_row, n_rows - 1) * x_row_stride
        for c in gl.static_range(N_CHUNKS):
            chunk_cols = c * CHUNK + cols
            mask = None if c < N_FULL else chunk_cols < count
            x_hat = (smem.index(c).load(LAYOUT).to(gl.float32) - mean) * rstd
            y = _affine(x_hat, weight_ptr, bias_ptr, chunk_cols, mask)
            gl.store(y_ptr + row * n_cols + chunk_cols, y.to(y_ptr.dtype.element_ty), mask=mask)
            async_copy_to_shared(smem.index(c), next_part_ptr + chunk_cols, mask=mask)
            async_copy.commit_group()
        row = next_row
    async_copy.wait_group(0)


def _parts(x: torch.Tensor, n_cols: int) -> tuple[int, int, int]:
    """(parts of a row, columns of a part, warps of a program)."""
    row_bytes = n_cols * x.element_size()
    num_warps = next(warps for limit, warps in _PART_WARPS if row_bytes <= limit)
    part_cols = num_warps * _WARP_BYTES // x.element_size()
    return cdiv(n_cols, part_cols), part_cols, num_warps


def supports_forward(x: torch.Tensor, n_cols: int) -> bool:
    """Whether the kernel can take these rows, none of which is longer than all parts on the chip at a time."""
    if x.element_size() > 4 or not n_cols * x.element_size() < 2**31:
        return False
    # Copies of 16 bytes; Triton wants the numbers to be multiples of 16 to believe in them.
    if n_cols % 16 != 0 or x.stride(0) % 16 != 0 or x.data_ptr() % 16 != 0:
        return False
    n_parts, _, num_warps = _parts(x, n_cols)
    return n_parts <= _WARPS_PER_PROCESSOR // num_warps * num_multiprocessors(x.device)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
) -> None:
    """Write y, and the mean and rstd of each row, for rows that `supports_forward` accepts."""
    n_rows, n_cols = x.shape
    n_parts, part_cols, num_warps = _parts(x, n_cols)
    vector = 16 // x.element_size()
    chunk = _STEPS * 32 * num_warps * vector
    n_programs = _WARPS_PER_PROCESSOR // num_warps
    n_groups = min(n_rows, n_programs * num_multiprocessors(x.device) // n_parts)
    launch(
        _layer_norm_parts_fwd_kernel, (n_groups * n_parts,),
        x, weight, bias, y, mean, rstd, mailboxes(n_rows, n_parts, x.device),
        n_rows, n_parts, part_cols, n_cols, x.stride(0), eps,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=part_cols // chunk,
        N_FULL=(n_cols - (n_parts - 1) * part_cols) // chunk, MAX_PARTS=next_power_of_2(n_parts),
        num_warps=num_warps, **at_a_time(n_programs, num_warps),
    )  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_row(x_smem, dy_smem, slot, x_row_ptr, dy_row_ptr, cols, n_cols, N_CHUNKS: gl.constexpr, CHUNK: gl.constexpr):
    """Start the copies of a row of x and of dy."""
    for c in gl.static_range(N_CHUNKS):
        mask = c * CHUNK + cols < n_cols
        async_copy_to_shared(x_smem.index(slot * N_CHUNKS + c), x_row_ptr + c * CHUNK + cols, mask=mask)
        async_copy_to_shared(dy_smem.index(slot * N_CHUNKS + c), dy_row_ptr + c * CHUNK + cols, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _load_chunk(
    x_smem, dy_smem, weight_smem, slot, c: gl.constexpr, mean, rstd, N_CHUNKS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """x_hat, dy and dy * weight of a chunk."""
    x_hat = (x_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean) * rstd
    dy = dy_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)
    return x_hat, dy, dy * weight_smem.index(c).load(LAYOUT).to(gl.float32)


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit(do_not_specialize=["n_rows"])
def _layer_norm_bwd_resident_kernel(
    dy_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols)
    dw_partial_ptr,  # (n_programs, n_cols) or None
    db_partial_ptr,  # (n_programs, n_cols) or None
    n_rows,
    n_cols,
    dy_row_stride,
    x_row_stride,
    N_CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program i owns rows i, i + n_programs, ... and row i of the partial sums.

    dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd with g = dy * weight and x_hat = (x - mean) * rstd;
    dw = sum(dy * x_hat) and db = sum(dy).
    """
    CHUNK: gl.constexpr = num_warps * 32 * 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    one = gl.arange(0, 1, ONE)
    program = gl.program_id(0).to(gl.int64)
    n_programs = gl.num_programs(0)
    for k in gl.static_range(STAGES - 1):
        # Past the last row the copies bring it again, and nobody reads them.
        row = gl.minimum(program + k * n_programs, n_rows - 1)
        _copy_row(
            x_smem, dy_smem, k, x_ptr + row * x_row_stride, dy_ptr + row * dy_row_stride, cols, n_cols, N_CHUNKS, CHUNK
        )
    for c in gl.static_range(N_CHUNKS):
        mask = c * CHUNK + cols < n_cols
        if weight_ptr is not None:
            weight_smem.index(c).store(gl.load(weight_ptr + c * CHUNK + cols, mask=mask, other=0.0))
        else:
            weight_smem.index(c).store(gl.full([CHUNK], 1.0, WEIGHT, LAYOUT))
    dw = ()
    db = ()
    for _ in gl.static_range(N_CHUNKS):
        dw += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
        db += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
    # Statistics are loaded a row ahead, as tensors of one element: a scalar would be waited for at once.
    next_rstd = gl.load(rstd_ptr + program + one)
    if mean_ptr is not None:
        next_mean = gl.load(mean_ptr + program + one)
    else:
        next_mean = gl.zeros([1], gl.float32, ONE)
    step = 0
    row = program
    while row < n_rows:
        async_copy.wait_group(STAGES - 2)
        ahead = gl.minimum(row + (STAGES - 1) * n_programs, n_rows - 1)
        _copy_row(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES,
            x_ptr + ahead * x_row_stride, dy_ptr + ahead * dy_row_stride, cols, n_cols, N_CHUNKS, CHUNK,
        )  # fmt: skip
        mean, rstd = gl.max(next_mean, 0), gl.max(next_rstd, 0)
        ahead = gl.minimum(row + n_programs, n_rows - 1)
        next_rstd = gl.load(rstd_ptr + ahead + one)
        if mean_ptr is not None:
            next_mean = gl.load(mean_ptr + ahead + one)
        slot = step % STAGES
        gx_sum = gl.zeros([CHUNK], gl.float32, LAYOUT)
        g_sum = gl.zeros([CHUNK], gl.float32, LAYOUT)
        for c in gl.static_range(N_CHUNKS):
            x_hat, dy, g = _load_chunk(x_smem, dy_smem, weight_smem, slot, c, mean, rstd, N_CHUNKS, LAYOUT)
            gx = g * x_hat
            if c == N_CHUNKS - 1:
                # Nothing was copied behind the end of the row, and whatever lay there may be NaN.
                g = gl.where(c * CHUNK + cols < n_cols, g, 0.0)
                gx = gl.where(c * CHUNK + cols < n_cols, gx, 0.0)
            gx_sum += gx
            g_sum += g
        gx_mean, g_mean = gl.reduce((gx_sum, g_sum), 0, _add_pairs)
        gx_mean /= n_cols
        g_mean /= n_cols
        new_dw = ()
        new_db = ()
        for c in gl.static_range(N_CHUNKS):
            x_hat, dy, g = _load_chunk(x_smem, dy_smem, weight_smem, slot, c, mean, rstd, N_CHUNKS, LAYOUT)
            dx = g - x_hat * gx_mean
            if mean_ptr is not None:
                dx -= g_mean
            dx *= rstd
            dx_ptrs = dx_ptr + row * n_cols + c * CHUNK + cols
            gl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=c * CHUNK + cols < n_cols)
            new_dw += (dw[c] + dy * x_hat,)
            new_db += (db[c] + dy,)
        dw = new_dw
        db = new_db
        step += 1
        row += n_programs
    async_copy.wait_group(0)
    gdc_launch_dependents()
    for c in gl.static_range(N_CHUNKS):
        offsets = program * n_cols + c * CHUNK + cols
        if dw_partial_ptr is not None:
            gl.store(dw_partial_ptr + offsets, dw[c], mask=c * CHUNK + cols < n_cols)
        if db_partial_ptr is not None:
            gl.store(db_partial_ptr + offsets, db[c], mask=c * CHUNK + cols < n_cols)


def supports(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, n_cols: int) -> bool:
    """Whether the kernel can take these rows, and they are long enough for it to pay."""
    return (
        x.element_size() == dy.element_size() == 2
        and (weight is None or weight.element_size() <= 4)
        and 2 * _CHUNK < n_cols <= _MAX_CHUNKS * _CHUNK
        # Copies of 16 bytes; Triton wants the numbers to be multiples of 16 to believe in them.
        and n_cols % 16 == 0
        and all(t.stride(1) == 1 and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in (dy, x))
    )


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dw_partial: torch.Tensor | None,
    db_partial: torch.Tensor | None,
    n_programs: int,
) -> None:
    """Write dx, and what each of n_programs adds to the gradients of weight and bias."""
    n_rows, n_cols = x.shape
    launch(
        _layer_norm_bwd_resident_kernel, (n_programs,),
        dy, x, weight, mean, rstd, dx, dw_partial, db_partial, n_rows, n_cols, dy.stride(0), x.stride(0),
        N_CHUNKS=cdiv(n_cols, _CHUNK), STAGES=_STAGES, num_warps=_NUM_WARPS,
    )  # fmt: skip
