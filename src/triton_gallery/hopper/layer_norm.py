"""Layer norm of long rows, in Gluon: a row waits on the chip between the passes over it.

Backward, both means of a row must be known before the first element of its gradient, and the sums for weight and bias
stay in registers from the first row to the last. For both there is no room in registers when rows are long. So the rows
of x and dy, and the weight, live in shared memory, where the next rows arrive while this one is worked on. Longer rows
are cut into parts, forward beyond 24576 numbers, backward beyond 12288 of 16 bits or 8192 of 32: see ``exchange``.
Forward, a part is so short that its weight and bias stay in registers from the first row to the last.
"""

from typing import NamedTuple

import torch
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, num_multiprocessors
from ._gluon import async_copy, async_copy_to_shared, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, send

# Forward, a part is a warp's: this much of a row, in chunks of so many vectors of 16 bytes for each thread. With more
# warps in a program they wait for each other, five times a row.
_PART_BYTES = 7 * 1024
_STEPS = 2
# Rows in shared memory: one that is written, one whose statistics are computed, one on its way; and programs of a
# multiprocessor: so few that each thread has the registers for its share of weight and bias.
_FWD_STAGES = 3
_FWD_PROGRAMS = 8

# Backward, whole rows: warps of the only program on a multiprocessor, elements of a chunk, eight for each thread;
# chunks of the longest row; and rows in shared memory: one at work, one on its way. A third was slower.
_NUM_WARPS = 16
_CHUNK = _NUM_WARPS * 32 * 8
_MAX_CHUNKS = 3
_STAGES = 2
# Backward, parts: warps of a program, chunks of a part, and rows in shared memory: one whose gradient is computed, one
# whose sums are, one on its way. A multiprocessor has programs with this many chunks in all.
_PART_WARPS_BWD = 4
_PART_CHUNKS = (3, 4)
_PART_STAGES = 3
_CHUNKS_PER_PROCESSOR = 12


# --- forward ----------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_chunk(smem, slot, x_part_ptr, c: gl.constexpr, cols, count, exists, N_FULL: gl.constexpr):
    """Start the copy of chunk c of a part of a row, if that row exists."""
    CHUNK: gl.constexpr = cols.shape[0]
    mask = exists & (cols >= 0)  # the second is always true, and gives the first the shape of the chunk
    if c >= N_FULL:
        mask = mask & (c * CHUNK + cols < count)
    async_copy_to_shared(smem.index(slot), x_part_ptr + c * CHUNK + cols, mask=mask)


@gluon.jit
def _load_part(ptr, cols, count, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr):
    """Load a part of weight or bias into registers, chunk by chunk; nothing where there is none."""
    CHUNK: gl.constexpr = cols.shape[0]
    chunks = ()
    if ptr is not None:
        for c in gl.static_range(N_CHUNKS):
            mask = None if c < N_FULL else c * CHUNK + cols < count
            chunks += (gl.load(ptr + c * CHUNK + cols, mask=mask),)
    return chunks


@gluon.jit
def _widen(x):
    """x as float32, not before it is needed: 16-bit numbers that wait in a loop take half as many registers."""
    if x.dtype.primitive_bitwidth == 16:
        # Without this move, which the compiler does not see through, it would convert them once, ahead of the loop.
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(gl.float32)


@gluon.jit
def _statistics(smem, slot, cols, count, SUBTRACT_MEAN: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr):
    """The mean of a part of a row (0 for RMS norm), and the sum of the squared distances from it."""
    CHUNK: gl.constexpr = cols.shape[0]
    LAYOUT: gl.constexpr = cols.type.layout
    mean = 0.0
    if SUBTRACT_MEAN:
        total = gl.zeros([CHUNK], gl.float32, LAYOUT)
        for c in gl.static_range(N_CHUNKS):
            x = smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)
            total += x if c < N_FULL else gl.where(c * CHUNK + cols < count, x, 0.0)
        mean = gl.sum(total, 0) / count
    m2 = gl.zeros([CHUNK], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x = smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean
        m2 += x * x if c < N_FULL else gl.where(c * CHUNK + cols < count, x * x, 0.0)
    return mean, gl.sum(m2, 0)


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
    STAGES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Programs 0 to n_parts - 1 own row 0, one part each, the next n_parts programs row 1, and so on.

    Such a group goes on with the row that lies as many rows further as there are groups. What a part has found of a row
    is sent before the row ahead of it is written, and asked for after that: so the other parts' have had the time of a
    whole row to come.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNK: gl.constexpr = CHUNK_STEPS * 32 * num_warps * VECTOR
    SUBTRACT_MEAN: gl.constexpr = mean_ptr is not None
    smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    row = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    # All columns count from the begin of the part.
    first = part * part_cols
    count = gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    y_ptr += first
    for k in gl.static_range(STAGES):
        ahead = row + k * n_groups
        for c in gl.static_range(N_CHUNKS):
            x_part_ptr = x_ptr + ahead * x_row_stride
            _copy_chunk(smem, k * N_CHUNKS + c, x_part_ptr, c, cols, count, ahead < n_rows, N_FULL)
        async_copy.commit_group()
    # All rows share these. Loaded again for each, they would take twice as much of the L2 cache's rate as x does.
    weights = _load_part(None if weight_ptr is None else weight_ptr + first, cols, count, N_CHUNKS, N_FULL)
    biases = _load_part(None if bias_ptr is None else bias_ptr + first, cols, count, N_CHUNKS, N_FULL)
    async_copy.wait_group(STAGES - 1)
    part_mean, part_m2 = _statistics(smem, 0, cols, count, SUBTRACT_MEAN, N_CHUNKS, N_FULL)
    send(mail_ptr + row * n_parts, part_mean, part_m2, part)
    step = 0
    while row < n_rows:
        next_row = row + n_groups
        if next_row < n_rows:
            async_copy.wait_group(STAGES - 2)
            next_mean, next_m2 = _statistics(smem, (step + 1) % STAGES, cols, count, SUBTRACT_MEAN, N_CHUNKS, N_FULL)
            send(mail_ptr + next_row * n_parts, next_mean, next_m2, part)
        means, m2s, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        # Chan's formula joins the parts: each brings its own spread, and the distance of its mean from the row's.
        counts = gl.where(parts < n_parts, gl.minimum(n_cols - parts * part_cols, part_cols), 0).to(gl.float32)
        m2s = gl.where(parts < n_parts, m2s, 0.0)
        mean = 0.0
        if SUBTRACT_MEAN:
            mean = gl.sum(means * counts, 0) / n_cols
            m2s += gl.where(parts < n_parts, (means - mean) * (means - mean) * counts, 0.0)
        rstd = gl.rsqrt(gl.sum(m2s, 0) / n_cols + eps)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if SUBTRACT_MEAN:
                gl.store(mean_ptr + row, mean)
        slot = step % STAGES
        ahead = row + STAGES * n_groups
        for c in gl.static_range(N_CHUNKS):
            y = (smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean) * rstd
            if weight_ptr is not None:
                y *= _widen(weights[c])
            if bias_ptr is not None:
                y += _widen(biases[c])
            mask = None if c < N_FULL else c * CHUNK + cols < count
            gl.store(y_ptr + row * n_cols + c * CHUNK + cols, y.to(y_ptr.dtype.element_ty), mask=mask)
            x_part_ptr = x_ptr + ahead * x_row_stride
            _copy_chunk(smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, count, ahead < n_rows, N_FULL)
        async_copy.commit_group()
        row = next_row
        step += 1
    async_copy.wait_group(0)


def _parts(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n_cols: int) -> tuple[int, int]:
    """(parts of a row, columns of a part): as long as its share of the widest tensor is no longer than _PART_BYTES."""
    widest = max(t.element_size() for t in (x, weight, bias) if t is not None)
    n_parts = cdiv(n_cols * widest, _PART_BYTES)
    part_cols = cdiv(n_cols, 64 * n_parts) * 64  # whole cache lines
    return cdiv(n_cols, part_cols), part_cols


def supports_forward(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n_cols: int) -> bool:
    """Whether the kernel can take these rows, none of which is longer than all parts on the chip at a time."""
    if any(t is not None and t.element_size() > 4 for t in (x, weight, bias)):
        return False
    # Copies of 16 bytes; Triton wants the numbers to be multiples of 16 to believe in them.
    if n_cols % 16 != 0 or x.stride(0) % 16 != 0 or x.data_ptr() % 16 != 0 or not n_cols * x.element_size() < 2**31:
        return False
    return _parts(x, weight, bias, n_cols)[0] <= _FWD_PROGRAMS * num_multiprocessors(x.device)


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
    n_parts, part_cols = _parts(x, weight, bias, n_cols)
    vector = 16 // x.element_size()
    chunk = _STEPS * 32 * vector
    n_groups = min(n_rows, _FWD_PROGRAMS * num_multiprocessors(x.device) // n_parts)
    launch(
        _layer_norm_parts_fwd_kernel, (n_groups * n_parts,),
        x, weight, bias, y, mean, rstd, mailboxes(n_rows, n_parts, x.device),
        n_rows, n_parts, part_cols, n_cols, x.stride(0), eps,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=cdiv(part_cols, chunk),
        N_FULL=(n_cols - (n_parts - 1) * part_cols) // chunk, STAGES=_FWD_STAGES, MAX_PARTS=max_parts(n_parts, 1),
        num_warps=1, **at_a_time(_FWD_PROGRAMS, 1),
    )  # fmt: skip


# --- backward ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_row(
    x_smem, dy_smem, slot, x_part_ptr, dy_part_ptr, cols, count, exists, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr
):  # fmt: skip
    """Start the copies of a part of a row of x and of dy, if that row exists."""
    for c in gl.static_range(N_CHUNKS):
        _copy_chunk(x_smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, count, exists, N_FULL)
        _copy_chunk(dy_smem, slot * N_CHUNKS + c, dy_part_ptr, c, cols, count, exists, N_FULL)
    async_copy.commit_group()


@gluon.jit
def _load_stats(mean_ptr, rstd_ptr, row, n_rows, num_warps: gl.constexpr):
    """Mean and rstd of a row, as tensors of one element: a scalar would be waited for at once."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    offsets = gl.minimum(row, n_rows - 1) + gl.arange(0, 1, ONE)
    mean = gl.zeros([1], gl.float32, ONE)
    if mean_ptr is not None:
        mean = gl.load(mean_ptr + offsets)
    return mean, gl.load(rstd_ptr + offsets)


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


@gluon.jit
def _sums(
    x_smem, dy_smem, weight_smem, slot, mean, rstd, cols, count,
    N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What a part adds to a row's sums of g * x_hat and of g."""
    CHUNK: gl.constexpr = cols.shape[0]
    gx_sum = gl.zeros([CHUNK], gl.float32, LAYOUT)
    g_sum = gl.zeros([CHUNK], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x_hat, _dy, g = _load_chunk(x_smem, dy_smem, weight_smem, slot, c, mean, rstd, N_CHUNKS, LAYOUT)
        gx = g * x_hat
        if c >= N_FULL:
            # Nothing promises what lies behind the end of the part, where nothing was copied.
            g = gl.where(c * CHUNK + cols < count, g, 0.0)
            gx = gl.where(c * CHUNK + cols < count, gx, 0.0)
        gx_sum += gx
        g_sum += g
    return gl.reduce((gx_sum, g_sum), 0, _add_pairs)


@gluon.jit
def _gradient(
    x_smem, dy_smem, weight_smem, dx_part_ptr, slot, mean, rstd, gx_mean, g_mean, dw, db, cols, count,
    N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a part of a row of dx. Returns dw and db, with what this row adds to them."""
    CHUNK: gl.constexpr = cols.shape[0]
    new_dw = ()
    new_db = ()
    for c in gl.static_range(N_CHUNKS):
        x_hat, dy, g = _load_chunk(x_smem, dy_smem, weight_smem, slot, c, mean, rstd, N_CHUNKS, LAYOUT)
        dx = (g - x_hat * gx_mean - g_mean) * rstd
        mask = None if c < N_FULL else c * CHUNK + cols < count
        gl.store(dx_part_ptr + c * CHUNK + cols, dx.to(dx_part_ptr.dtype.element_ty), mask=mask)
        new_dw += (dw[c] + dy * x_hat,)
        new_db += (db[c] + dy,)
    return new_dw, new_db


@gluon.jit
def _load_weight(weight_smem, weight_part_ptr, cols, count, N_CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """Fill a part of the weight into shared memory: ones where there is none."""
    CHUNK: gl.constexpr = cols.shape[0]
    for c in gl.static_range(N_CHUNKS):
        if weight_part_ptr is not None:
            weight = gl.load(weight_part_ptr + c * CHUNK + cols, mask=c * CHUNK + cols < count, other=0.0)
        else:
            weight = gl.full([CHUNK], 1.0, weight_smem.dtype, LAYOUT)
        weight_smem.index(c).store(weight)


@gluon.jit
def _zeros(N_CHUNKS: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(N_CHUNKS):
        zeros += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
    return zeros


@gluon.jit
def _store_sums(part_ptr, sums, cols, count):
    """Store a program's share of the gradient of the weight or the bias, if it is asked for."""
    CHUNK: gl.constexpr = cols.shape[0]
    if part_ptr is not None:
        for c in gl.static_range(len(sums)):
            gl.store(part_ptr + c * CHUNK + cols, sums[c], mask=c * CHUNK + cols < count)


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
    N_FULL: gl.constexpr,  # of these, those that need no mask
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Program i owns rows i, i + n_programs, ... and row i of the partial sums.

    dx = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd with g = dy * weight and x_hat = (x - mean) * rstd;
    dw = sum(dy * x_hat) and db = sum(dy).
    """
    CHUNK: gl.constexpr = num_warps * 32 * 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    program = gl.program_id(0).to(gl.int64)
    n_programs = gl.num_programs(0)
    for k in gl.static_range(STAGES - 1):
        row = program + k * n_programs
        _copy_row(
            x_smem, dy_smem, k, x_ptr + row * x_row_stride, dy_ptr + row * dy_row_stride, cols, n_cols, row < n_rows,
            N_CHUNKS, N_FULL,
        )  # fmt: skip
    _load_weight(weight_smem, weight_ptr, cols, n_cols, N_CHUNKS, LAYOUT)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, program, n_rows, num_warps)
    step = 0
    row = program
    while row < n_rows:
        async_copy.wait_group(STAGES - 2)
        ahead = row + (STAGES - 1) * n_programs
        _copy_row(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr + ahead * x_row_stride,
            dy_ptr + ahead * dy_row_stride, cols, n_cols, ahead < n_rows, N_CHUNKS, N_FULL,
        )  # fmt: skip
        mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, row + n_programs, n_rows, num_warps)
        slot = step % STAGES
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, slot, mean, rstd, cols, n_cols, N_CHUNKS, N_FULL, LAYOUT
        )  # fmt: skip
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, dx_ptr + row * n_cols, slot, mean, rstd, gx_sum / n_cols, g_mean, dw, db,
            cols, n_cols, N_CHUNKS, N_FULL, LAYOUT,
        )  # fmt: skip
        step += 1
        row += n_programs
    async_copy.wait_group(0)
    gdc_launch_dependents()
    offset = program * n_cols
    _store_sums(None if dw_partial_ptr is None else dw_partial_ptr + offset, dw, cols, n_cols)
    _store_sums(None if db_partial_ptr is None else db_partial_ptr + offset, db, cols, n_cols)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    x_ptr,  # (n_rows, n_cols), rows 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols)
    dw_partial_ptr,  # (n_groups, n_cols) or None
    db_partial_ptr,  # (n_groups, n_cols) or None
    mail_ptr,  # (n_rows, n_parts)
    n_rows,
    n_parts,
    part_cols,  # columns of a part; the last one may have fewer
    n_cols,
    dy_row_stride,
    x_row_stride,
    VECTOR: gl.constexpr,  # numbers in 16 bytes
    N_CHUNKS: gl.constexpr,  # chunks of a part
    N_FULL: gl.constexpr,  # of these, those that every part fills
    STAGES: gl.constexpr,
    MAX_PARTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The same for a part of each row: programs i * n_parts to (i + 1) * n_parts - 1 own rows i, i + n_groups, ...

    The sums of a row are sent before the gradient of the row ahead of it is computed, and asked for after that: so the
    other parts' have had the time of a whole row to come.
    """
    CHUNK: gl.constexpr = num_warps * 32 * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    part = gl.program_id(0) % n_parts
    group = (gl.program_id(0) // n_parts).to(gl.int64)
    n_groups = gl.num_programs(0) // n_parts
    # All columns count from the begin of the part.
    first = part * part_cols
    count = gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    dy_ptr += first
    dx_ptr += first
    for k in gl.static_range(STAGES - 1):
        row = group + k * n_groups
        _copy_row(
            x_smem, dy_smem, k, x_ptr + row * x_row_stride, dy_ptr + row * dy_row_stride, cols, count, row < n_rows,
            N_CHUNKS, N_FULL,
        )  # fmt: skip
    weight_part_ptr = None if weight_ptr is None else weight_ptr + first
    _load_weight(weight_smem, weight_part_ptr, cols, count, N_CHUNKS, LAYOUT)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group, n_rows, num_warps)
    mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group + n_groups, n_rows, num_warps)
    async_copy.wait_group(STAGES - 2)
    gx_sum, g_sum = _sums(x_smem, dy_smem, weight_smem, 0, mean, rstd, cols, count, N_CHUNKS, N_FULL, LAYOUT)
    send(mail_ptr + group * n_parts, gx_sum, g_sum, part)
    step = 0
    row = group
    while row < n_rows:
        ahead = row + (STAGES - 1) * n_groups
        _copy_row(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr + ahead * x_row_stride,
            dy_ptr + ahead * dy_row_stride, cols, count, ahead < n_rows, N_CHUNKS, N_FULL,
        )  # fmt: skip
        next_row = row + n_groups
        next_mean, next_rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, next_row + n_groups, n_rows, num_warps)
        async_copy.wait_group(STAGES - 2)
        # After the last row there is nothing to add up, and nobody sends it.
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, (step + 1) % STAGES, next_mean, next_rstd, cols, count,
            N_CHUNKS, N_FULL, LAYOUT,
        )  # fmt: skip
        if next_row < n_rows:
            send(mail_ptr + next_row * n_parts, gx_sum, g_sum, part)
        gx_sums, g_sums, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        gx_sums = gl.where(parts < n_parts, gx_sums, 0.0)
        g_sums = gl.where(parts < n_parts, g_sums, 0.0)
        gx_sum, g_sum = gl.reduce((gx_sums, g_sums), 0, _add_pairs)
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, dx_ptr + row * n_cols, step % STAGES, mean, rstd, gx_sum / n_cols, g_mean,
            dw, db, cols, count, N_CHUNKS, N_FULL, LAYOUT,
        )  # fmt: skip
        mean, rstd = next_mean, next_rstd
        step += 1
        row = next_row
    async_copy.wait_group(0)
    gdc_launch_dependents()
    offset = group * n_cols + first
    _store_sums(None if dw_partial_ptr is None else dw_partial_ptr + offset, dw, cols, count)
    _store_sums(None if db_partial_ptr is None else db_partial_ptr + offset, db, cols, count)


class BackwardPlan(NamedTuple):
    """How rows are cut, and how many groups of programs, each with a row at a time, there is room for."""

    n_parts: int
    part_cols: int
    n_chunks: int  # of a part
    max_groups: int


def plan_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> BackwardPlan | None:
    """What suits these rows; None where no kernel can take them, or they are too short for it to pay."""
    n_cols, size = x.shape[1], x.element_size()
    if size > 4 or dy.element_size() != size or (weight is not None and weight.element_size() > 4):
        return None
    # Copies of 16 bytes; Triton wants the numbers to be multiples of 16 to believe in them.
    aligned = all(t.stride(1) == 1 and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in (dy, x))
    if n_cols <= 2 * _CHUNK or n_cols % 16 != 0 or not aligned:
        return None
    n_processors = num_multiprocessors(x.device)
    if size == 2 and n_cols <= _MAX_CHUNKS * _CHUNK:
        return BackwardPlan(1, n_cols, cdiv(n_cols, _CHUNK), n_processors)
    # Parts of the length that leaves the fewest threads without a number.
    chunk = _PART_WARPS_BWD * 32 * 16 // size
    n_chunks = min(_PART_CHUNKS, key=lambda n: cdiv(n_cols, n * chunk) * n)
    part_cols = cdiv(n_cols, 16 * cdiv(n_cols, n_chunks * chunk)) * 16
    n_parts = cdiv(n_cols, part_cols)
    max_groups = _CHUNKS_PER_PROCESSOR // n_chunks * n_processors // n_parts
    return BackwardPlan(n_parts, part_cols, n_chunks, max_groups) if max_groups > 0 else None


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dw_partial: torch.Tensor | None,
    db_partial: torch.Tensor | None,
    n_groups: int,
    plan: BackwardPlan,
) -> None:
    """Write dx, and what each of n_groups adds to the gradients of weight and bias."""
    n_rows, n_cols = x.shape
    arguments = dy, x, weight, mean, rstd, dx, dw_partial, db_partial
    strides = dy.stride(0), x.stride(0)
    n_parts, part_cols, n_chunks, _ = plan
    if n_parts == 1:
        # The last chunk has a mask even where it is full: without one, 12288 columns of float16 took a tenth longer on
        # an H200.
        launch(
            _layer_norm_bwd_resident_kernel, (n_groups,), *arguments, n_rows, n_cols, *strides,
            N_CHUNKS=n_chunks, N_FULL=n_chunks - 1, STAGES=_STAGES, num_warps=_NUM_WARPS,
        )  # fmt: skip
        return
    vector = 16 // x.element_size()
    last_cols = n_cols - (n_parts - 1) * part_cols
    launch(
        _layer_norm_parts_bwd_kernel, (n_groups * n_parts,),
        *arguments, mailboxes(n_rows, n_parts, x.device), n_rows, n_parts, part_cols, n_cols, *strides,
        VECTOR=vector, N_CHUNKS=n_chunks, N_FULL=last_cols // (_PART_WARPS_BWD * 32 * vector), STAGES=_PART_STAGES,
        MAX_PARTS=max_parts(n_parts, _PART_WARPS_BWD), num_warps=_PART_WARPS_BWD,
        **at_a_time(_CHUNKS_PER_PROCESSOR // n_chunks, _PART_WARPS_BWD),
    )  # fmt: skip
