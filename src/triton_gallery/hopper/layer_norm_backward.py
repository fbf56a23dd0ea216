"""Layer norm backward of long rows, in Gluon: rows wait in shared memory between the passes over them.

Both means of a row must be known before the first number of its gradient, and the sums for weight and bias stay in
registers from the first row to the last. For both there is no room in registers when rows are long. So the rows of x
and dy, and the weight, live in shared memory, where the next rows arrive while this one is worked on. Rows of more than
12288 numbers of 16 bits or 8192 of 32, and all that begin between two multiples of 16 bytes, are cut into parts: see
``exchange``.
"""

import torch
from triton.language.extra.cuda import gdc_launch_dependents

from .._launch import cdiv, launch, num_multiprocessors
from .._vectors import rows_begin_alike
from ._gluon import async_copy, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, send
from .layer_norm_rows import (
    Plan,
    clear,
    copy_two,
    count_groups,
    cut,
    find_ends,
    load_ends,
    load_shared,
    load_two_ends,
    one_by_one,
    pays,
    row_begin,
    row_ptr,
    store_chunk,
    sum_by_vector,
    whole_vectors,
)

# Whole rows: warps of the only program on a multiprocessor, elements of a chunk, eight for each thread; chunks of the
# longest row; and rows in shared memory: one at work, one on its way. A third was slower.
_NUM_WARPS = 16
_CHUNK = _NUM_WARPS * 32 * 8
_MAX_CHUNKS = 3
_STAGES = 2
# Parts: warps of a program, chunks of a part, and rows in shared memory: one whose gradient is computed, one whose sums
# are, one on its way. A multiprocessor has programs with this many chunks in all.
_PART_WARPS = 4
_PART_CHUNKS = (4, 3)
_PART_STAGES = 3
_CHUNKS_PER_PROCESSOR = 12
# Of the rows that tl's kernel for rows in registers has left, those are taken that have more numbers than the first,
# and if they begin anywhere more than the second where x has no fewer bytes than the third. (A program takes one row at
# a time: of short ones it would take thousands.)
_LONG, _LONG_UNALIGNED, _MIN_BYTES_UNALIGNED = 8192, 4096, 32 * 2**20


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
def _load_chunk(x_smem, dy_smem, slot, c: gl.constexpr, mean, N_CHUNKS: gl.constexpr, LAYOUT: gl.constexpr):
    """How far a chunk of x is from the mean, and dy."""
    x = x_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean
    return x, dy_smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)


@gluon.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@gluon.jit
def _sums(
    x_smem, dy_smem, weight_smem, slot, mean, rstd, x_ends, g_ends, cols, end,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """What a part adds to a row's sums of g * x_hat and of g. Outside of its whole vectors, dy is 0."""
    LAYOUT: gl.constexpr = cols.type.layout
    gx_sum = gl.zeros([cols.shape[0]], gl.float32, LAYOUT)
    g_sum = gl.zeros([cols.shape[0]], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x, dy = _load_chunk(x_smem, dy_smem, slot, c, mean, N_CHUNKS, LAYOUT)
        g = dy * weight_smem.index(c).load(LAYOUT).to(gl.float32)
        gx = g * x
        if c >= N_FULL:
            # They are 0 there. But with this choice whole rows of float16 numbers take a tenth less time on an H200.
            inside = c * cols.shape[0] + cols < end
            gx, g = gl.where(inside, gx, 0.0), gl.where(inside, g, 0.0)
        gx_sum += gx
        g_sum += g
    if not ALIGNED:
        gx_sum = sum_by_vector(gx_sum, VECTOR) + g_ends * (x_ends.to(gl.float32) - mean)
        g_sum = sum_by_vector(g_sum, VECTOR) + g_ends
    gx_sum, g_sum = gl.reduce((gx_sum, g_sum), 0, _add_pairs)
    return gx_sum * rstd, g_sum


@gluon.jit
def _gradient(
    x_smem, dy_smem, weight_smem, dx_part_ptr, slot, mean, rstd, gx_mean, g_mean, dw, db, cols, begin, end,
    VECTOR: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a part of a row of dx. Returns dw and db, with what this row adds to them."""
    new_dw = ()
    new_db = ()
    for c in gl.static_range(N_CHUNKS):
        x, dy = _load_chunk(x_smem, dy_smem, slot, c, mean, N_CHUNKS, LAYOUT)
        x_hat = x * rstd
        dx = (dy * weight_smem.index(c).load(LAYOUT).to(gl.float32) - g_mean - x_hat * gx_mean) * rstd
        store_chunk(dx_part_ptr, dx, c, cols, begin, end, VECTOR, N_FULL, ALIGNED)
        new_dw += (dw[c] + dy * x_hat,)
        new_db += (db[c] + dy,)
    return new_dw, new_db


@gluon.jit
def _store_weight(weight_smem, chunks, cols):
    """Fill a part of the weight into shared memory: ones where there is none."""
    N_CHUNKS: gl.constexpr = weight_smem.shape[0]
    for c in gl.static_range(N_CHUNKS):
        if len(chunks) > 0:
            weight_smem.index(c).store(chunks[c])
        else:
            ones = gl.full([cols.shape[0]], 1.0, weight_smem.dtype, cols.type.layout)
            weight_smem.index(c).store(ones)


@gluon.jit
def _zeros(N_CHUNKS: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    zeros = ()
    for _ in gl.static_range(N_CHUNKS):
        zeros += (gl.zeros([CHUNK], gl.float32, LAYOUT),)
    return zeros


@gluon.jit
def _store_sums(
    partial_ptr, sums, end_sums, row, first, n_cols, cols, begin, end, VECTOR: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Store a program's share of the gradient of the weight or the bias, if it is asked for."""
    CHUNK: gl.constexpr = cols.shape[0]
    if partial_ptr is not None:
        # Such a row begins where in a vector all rows of this program do.
        part_ptr = row_ptr(partial_ptr, row, n_cols, VECTOR) + first
        for c in gl.static_range(len(sums)):
            apart = c * CHUNK + one_by_one(cols, ALIGNED)
            share = gl.convert_layout(sums[c], apart.type.layout)
            gl.store(part_ptr + apart, share, mask=whole_vectors(apart, begin, end, VECTOR, ALIGNED))
        if not ALIGNED:
            ends, of_part = find_ends(cols, begin, end, VECTOR)
            gl.store(part_ptr + ends, end_sums, mask=of_part)


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
    VECTOR: gl.constexpr = 8
    CHUNK: gl.constexpr = num_warps * 32 * VECTOR
    LAYOUT: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [num_warps], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHT: gl.constexpr = x_ptr.dtype.element_ty if weight_ptr is None else weight_ptr.dtype.element_ty
    x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    dy_smem = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * N_CHUNKS, CHUNK], SHARED)
    weight_smem = gl.allocate_shared_memory(WEIGHT, [N_CHUNKS, CHUNK], SHARED)
    cols = gl.arange(0, CHUNK, LAYOUT)
    program = gl.program_id(0).to(gl.int64)
    n_programs = gl.num_programs(0)
    # Ahead of the rows, so that it need not wait for them.
    weight_chunks = load_shared(weight_ptr, cols, 0, n_cols, VECTOR, N_CHUNKS, True)
    clear(x_smem, cols, STAGES, N_CHUNKS, N_FULL, True)
    clear(dy_smem, cols, STAGES, N_CHUNKS, N_FULL, True)
    for k in gl.static_range(STAGES - 1):
        copy_two(
            x_smem, dy_smem, k, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, 0, n_cols, program + k * n_programs,
            n_rows, VECTOR, N_CHUNKS, N_FULL, True,
        )  # fmt: skip
    _store_weight(weight_smem, weight_chunks, cols)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, program, n_rows, num_warps)
    step = 0
    row = program
    while row < n_rows:
        async_copy.wait_group(STAGES - 2)
        copy_two(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, 0,
            n_cols, row + (STAGES - 1) * n_programs, n_rows, VECTOR, N_CHUNKS, N_FULL, True,
        )  # fmt: skip
        mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, row + n_programs, n_rows, num_warps)
        slot = step % STAGES
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, slot, mean, rstd, None, None, cols, n_cols, VECTOR, N_CHUNKS, N_FULL, True
        )
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, row_ptr(dx_ptr, row, n_cols, VECTOR), slot, mean, rstd, gx_sum / n_cols,
            g_mean, dw, db, cols, 0, n_cols, VECTOR, N_CHUNKS, N_FULL, True, LAYOUT,
        )  # fmt: skip
        step += 1
        row += n_programs
    async_copy.wait_group(0)
    gdc_launch_dependents()
    _store_sums(dw_partial_ptr, dw, None, program, 0, n_cols, cols, 0, n_cols, VECTOR, True)
    _store_sums(db_partial_ptr, db, None, program, 0, n_cols, cols, 0, n_cols, VECTOR, True)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_bwd_kernel(
    dy_ptr,  # (n_rows, n_cols), 16-byte aligned
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    mean_ptr,  # (n_rows,), or None for RMS norm
    rstd_ptr,  # (n_rows,)
    dx_ptr,  # (n_rows, n_cols); its rows, and those of dy, begin where in a vector those of x do
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
    ALIGNED: gl.constexpr,  # all rows begin with a vector; if not, those of a program begin at the same place in one
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
    # From the vector in which a part begins, its numbers are those from `begin` to `end`.
    first = part * part_cols
    begin = row_begin(group, x_row_stride, VECTOR, ALIGNED)
    end = begin + gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    dy_ptr += first
    dx_ptr += first
    weight_part_ptr = None if weight_ptr is None else weight_ptr + (first - begin)
    weight_chunks = load_shared(weight_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
    clear(x_smem, cols, STAGES, N_CHUNKS, N_FULL, ALIGNED)
    clear(dy_smem, cols, STAGES, N_CHUNKS, N_FULL, ALIGNED)
    for k in gl.static_range(STAGES - 1):
        copy_two(
            x_smem, dy_smem, k, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, begin, end, group + k * n_groups,
            n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
    _store_weight(weight_smem, weight_chunks, cols)
    dw = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    db = _zeros(N_CHUNKS, CHUNK, LAYOUT)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group, n_rows, num_warps)
    mean, rstd = gl.max(means, 0), gl.max(rstds, 0)
    means, rstds = _load_stats(mean_ptr, rstd_ptr, group + n_groups, n_rows, num_warps)
    # What is loaded one by one is asked for two rows ahead of its gradient.
    ends, of_part = find_ends(cols, begin, end, VECTOR)
    ENDS: gl.constexpr = ends.type.layout
    x_ends = gl.zeros([CHUNK // VECTOR], x_ptr.dtype.element_ty, ENDS)
    next_x_ends = x_ends
    g_ends = gl.zeros([CHUNK // VECTOR], gl.float32, ENDS)
    end_weights, dy_ends, next_dy_ends, dw_ends, db_ends = g_ends, g_ends, g_ends, g_ends, g_ends
    if not ALIGNED:
        end_weights = gl.full([CHUNK // VECTOR], 1.0, gl.float32, ENDS)
        if weight_ptr is not None:
            end_weights = load_ends(weight_part_ptr, ends, of_part).to(gl.float32)
        x_ends, dy_ends = load_two_ends(
            x_ptr, dy_ptr, group, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
        )
        next_x_ends, next_dy_ends = load_two_ends(
            x_ptr, dy_ptr, group + n_groups, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
        )
        g_ends = dy_ends * end_weights
    async_copy.wait_group(STAGES - 2)
    gx_sum, g_sum = _sums(
        x_smem, dy_smem, weight_smem, 0, mean, rstd, x_ends, g_ends, cols, end, VECTOR, N_CHUNKS, N_CHUNKS, ALIGNED
    )
    send(mail_ptr + group * n_parts, gx_sum, g_sum, part)
    step = 0
    row = group
    while row < n_rows:
        copy_two(
            x_smem, dy_smem, (step + STAGES - 1) % STAGES, x_ptr, dy_ptr, x_row_stride, dy_row_stride, cols, begin,
            end, row + (STAGES - 1) * n_groups, n_rows, VECTOR, N_CHUNKS, N_FULL, ALIGNED,
        )  # fmt: skip
        next_row = row + n_groups
        next_g_ends = next_dy_ends * end_weights
        ahead_x_ends, ahead_dy_ends = next_x_ends, next_dy_ends
        if not ALIGNED:
            ahead_x_ends, ahead_dy_ends = load_two_ends(
                x_ptr, dy_ptr, next_row + n_groups, n_rows, x_row_stride, dy_row_stride, ends, of_part, VECTOR
            )
        next_mean, next_rstd = gl.max(means, 0), gl.max(rstds, 0)
        means, rstds = _load_stats(mean_ptr, rstd_ptr, next_row + n_groups, n_rows, num_warps)
        async_copy.wait_group(STAGES - 2)
        # After the last row there is nothing to add up, and nobody sends it.
        gx_sum, g_sum = _sums(
            x_smem, dy_smem, weight_smem, (step + 1) % STAGES, next_mean, next_rstd, next_x_ends, next_g_ends, cols,
            end, VECTOR, N_CHUNKS, N_CHUNKS, ALIGNED,
        )  # fmt: skip
        if next_row < n_rows:
            send(mail_ptr + next_row * n_parts, gx_sum, g_sum, part)
        gx_sums, g_sums, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        gx_sums = gl.where(parts < n_parts, gx_sums, 0.0)
        g_sums = gl.where(parts < n_parts, g_sums, 0.0)
        gx_sum, g_sum = gl.reduce((gx_sums, g_sums), 0, _add_pairs)
        g_mean = g_sum / n_cols if mean_ptr is not None else 0.0
        dw, db = _gradient(
            x_smem, dy_smem, weight_smem, row_ptr(dx_ptr, row, n_cols, VECTOR), step % STAGES, mean, rstd,
            gx_sum / n_cols, g_mean, dw, db, cols, begin, end, VECTOR, N_CHUNKS, N_FULL, ALIGNED, LAYOUT,
        )  # fmt: skip
        if not ALIGNED:
            x_hat_ends = (x_ends.to(gl.float32) - mean) * rstd
            dx_ends = (g_ends - g_mean - x_hat_ends * (gx_sum / n_cols)) * rstd
            dx_ends = dx_ends.to(dx_ptr.dtype.element_ty)
            gl.store(row_ptr(dx_ptr, row, n_cols, VECTOR) + ends, dx_ends, mask=of_part)
            dw_ends += dy_ends * x_hat_ends
            db_ends += dy_ends
        x_ends, dy_ends, g_ends = next_x_ends, next_dy_ends, next_g_ends
        next_x_ends, next_dy_ends = ahead_x_ends, ahead_dy_ends
        mean, rstd = next_mean, next_rstd
        step += 1
        row = next_row
    async_copy.wait_group(0)
    gdc_launch_dependents()
    _store_sums(dw_partial_ptr, dw, dw_ends, group, first, n_cols, cols, begin, end, VECTOR, ALIGNED)
    _store_sums(db_partial_ptr, db, db_ends, group, first, n_cols, cols, begin, end, VECTOR, ALIGNED)


def plan_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> Plan | None:
    """What suits these rows; None where no kernel can take them, or it does not pay."""
    n_cols, size = x.shape[1], x.element_size()
    if size > 4 or dy.element_size() != size or (weight is not None and weight.element_size() > 4):
        return None
    vector = 16 // size
    aligned = n_cols % vector == 0
    if not pays(x, aligned, _LONG, _LONG_UNALIGNED, _MIN_BYTES_UNALIGNED):
        return None
    if not rows_begin_alike(vector, n_cols, dy, x):
        return None
    n_processors = num_multiprocessors(x.device)
    if aligned and size == 2 and n_cols <= _MAX_CHUNKS * _CHUNK:
        return Plan(aligned, 1, n_cols, cdiv(n_cols, _CHUNK), n_processors)
    chunk = _PART_WARPS * 32 * vector
    late = 0 if aligned else 16  # room for what parts may begin late by
    plans = []
    for n_chunks in _PART_CHUNKS:
        n_parts, part_cols = cut(n_cols, n_chunks * chunk - late, 16, vector)
        max_groups = count_groups(_CHUNKS_PER_PROCESSOR // n_chunks * n_processors, n_parts, n_cols, vector)
        plans.append(Plan(aligned, n_parts, part_cols, n_chunks, max_groups))
    # As many rows at a time as there can be, and of two such plans the one with fewer parts.
    plan = max(plans, key=lambda plan: plan.max_groups)
    return plan if plan.max_groups > 0 else None


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
    plan: Plan,
) -> None:
    """Write dx, and what each of n_groups adds to the gradients of weight and bias."""
    n_rows, n_cols = x.shape
    arguments = dy, x, weight, mean, rstd, dx, dw_partial, db_partial
    strides = dy.stride(0), x.stride(0)
    aligned, n_parts, part_cols, n_chunks, _ = plan
    if n_parts == 1 and aligned:
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
        VECTOR=vector, N_CHUNKS=n_chunks, N_FULL=last_cols // (_PART_WARPS * 32 * vector), STAGES=_PART_STAGES,
        MAX_PARTS=max_parts(n_parts, _PART_WARPS), ALIGNED=aligned, num_warps=_PART_WARPS,
        **at_a_time(_CHUNKS_PER_PROCESSOR // n_chunks, _PART_WARPS),
    )  # fmt: skip
