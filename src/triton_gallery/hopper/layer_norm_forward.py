"""Layer norm forward of long rows, in Gluon: parts of a row on several multiprocessors.

A row is cut into parts, one for each program: see ``exchange``. A part is so short that its weight and bias stay in
registers from the first row to the last. Rows wait in shared memory between the passes over them, and the next arrive
there meanwhile.
"""

import torch

from .._launch import cdiv, has_fast_memory, launch, num_multiprocessors
from .._vectors import rows_begin_alike
from ._gluon import async_copy, gl, gluon
from .exchange import at_a_time, mailboxes, max_parts, receive, send
from .layer_norm_rows import (
    Plan,
    clear,
    copy_chunk,
    count_groups,
    cut,
    find_ends,
    load_ends,
    load_shared,
    pays,
    row_begin,
    row_ptr,
    store_chunk,
    sum_by_vector,
    whole_vectors,
)

# A part is a warp's: this much of a row, in chunks of so many vectors of 16 bytes for each thread. With more warps in a
# program they wait for each other, five times a row.
_PART_BYTES = 4 * 1024
_STEPS = 2
# Rows in shared memory: one that is written, one whose statistics are computed, one on its way; and programs of a
# multiprocessor: so few that each thread has the registers for its share of weight and bias.
_STAGES = 3
_PROGRAMS = 12
# Rows of more numbers than the first are taken (than the second on an H100, if they have 16 bits and begin with a
# vector). So are rows that begin anywhere, of more numbers than the third, where x has no fewer bytes than the fourth.
# tl's kernels are faster for all others: measured on an H200, and the second on an H100.
_LONG, _LONG_16_BIT, _LONG_UNALIGNED, _MIN_BYTES_UNALIGNED = 24576, 40960, 8184, 16 * 2**20


@gluon.jit
def _pack(chunks, cols, ALIGNED: gl.constexpr):
    """What `load_shared` loads, in registers as the threads of `cols` need it.

    16-bit numbers that were loaded one by one keep a register each. What is read back has two in one.
    """
    if ALIGNED or len(chunks) == 0:
        packed = chunks
    else:
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        smem = gl.allocate_shared_memory(chunks[0].dtype, [cols.shape[0]], SHARED)
        packed = ()
        for c in gl.static_range(len(chunks)):
            smem.store(chunks[c])
            packed += (smem.load(cols.type.layout),)
    return packed


@gluon.jit
def _widen(x):
    """x as float32, not before it is needed: 16-bit numbers that wait in a loop take half as many registers."""
    if x.dtype.primitive_bitwidth == 16:
        # Without this move, which the compiler does not see through, it would convert them once, ahead of the loop.
        x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x.to(gl.float32)


@gluon.jit
def _statistics(
    smem, slot, x_ends, of_part, cols, begin, end, VECTOR: gl.constexpr,
    SUBTRACT_MEAN: gl.constexpr, N_CHUNKS: gl.constexpr, N_FULL: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """The mean of a part of a row (0 for RMS norm), and the sum of the squared distances from it."""
    CHUNK: gl.constexpr = cols.shape[0]
    LAYOUT: gl.constexpr = cols.type.layout
    mean = 0.0
    if SUBTRACT_MEAN:
        total = gl.zeros([CHUNK], gl.float32, LAYOUT)
        for c in gl.static_range(N_CHUNKS):
            total += smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32)
        if not ALIGNED:
            total = sum_by_vector(total, VECTOR) + x_ends.to(gl.float32)
        mean = gl.sum(total, 0) / (end - begin)
    m2 = gl.zeros([CHUNK], gl.float32, LAYOUT)
    for c in gl.static_range(N_CHUNKS):
        x = smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean
        if c >= N_FULL or (c == 0 and not ALIGNED):
            # The zeros outside would now hold -mean.
            x = gl.where(whole_vectors(c * CHUNK + cols, begin, end, VECTOR, ALIGNED), x, 0.0)
        m2 += x * x
    if not ALIGNED:
        x = gl.where(of_part, x_ends.to(gl.float32) - mean, 0.0)
        m2 = sum_by_vector(m2, VECTOR) + x * x
    return mean, gl.sum(m2, 0)


@gluon.jit(do_not_specialize=["n_rows", "n_parts"])
def _layer_norm_parts_fwd_kernel(
    x_ptr,  # (n_rows, n_cols), 16-byte aligned
    weight_ptr,  # (n_cols,) or None
    bias_ptr,  # (n_cols,) or None
    y_ptr,  # (n_rows, n_cols), its rows beginning where in a vector those of x do
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
    ALIGNED: gl.constexpr,  # all rows begin with a vector; if not, those of a program begin at the same place in one
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
    # From the vector in which a part begins, its numbers are those from `begin` to `end`.
    first = part * part_cols
    begin = row_begin(row, x_row_stride, VECTOR, ALIGNED)
    end = begin + gl.minimum(n_cols - first, part_cols)
    x_ptr += first
    y_ptr += first
    weight_part_ptr = None if weight_ptr is None else weight_ptr + (first - begin)
    bias_part_ptr = None if bias_ptr is None else bias_ptr + (first - begin)
    clear(smem, cols, STAGES, N_CHUNKS, N_FULL, ALIGNED)
    for k in gl.static_range(STAGES):
        ahead = row + k * n_groups
        for c in gl.static_range(N_CHUNKS):
            x_part_ptr = row_ptr(x_ptr, ahead, x_row_stride, VECTOR)
            copy_chunk(smem, k * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, ahead, n_rows, VECTOR, N_FULL, ALIGNED)
        async_copy.commit_group()
        # All rows share weight and bias. Loaded again for each, they would take twice as much of the L2 cache's rate as
        # x does; loaded behind all these rows, the first row would wait for all of them.
        if k == 0:
            loaded = load_shared(weight_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
        if k == 1:
            weights = _pack(loaded, cols, ALIGNED)
            loaded = load_shared(bias_part_ptr, cols, begin, end, VECTOR, N_CHUNKS, ALIGNED)
    ends, of_part = find_ends(cols, begin, end, VECTOR)
    ENDS: gl.constexpr = ends.type.layout
    x_ends = gl.zeros([CHUNK // VECTOR], x_ptr.dtype.element_ty, ENDS)
    next_ends = x_ends
    if not ALIGNED:
        if weight_ptr is not None:
            end_weights = load_ends(weight_part_ptr, ends, of_part)
        if bias_ptr is not None:
            end_biases = load_ends(bias_part_ptr, ends, of_part)
        x_ends = load_ends(row_ptr(x_ptr, row, x_row_stride, VECTOR), ends, of_part)
        next_row = row + n_groups
        next_ends = load_ends(row_ptr(x_ptr, next_row, x_row_stride, VECTOR), ends, of_part & (next_row < n_rows))
    async_copy.wait_group(STAGES - 1)
    part_mean, part_m2 = _statistics(
        smem, 0, x_ends, of_part, cols, begin, end, VECTOR, SUBTRACT_MEAN, N_CHUNKS, N_FULL, ALIGNED
    )
    send(mail_ptr + row * n_parts, part_mean, part_m2, part)
    biases = _pack(loaded, cols, ALIGNED)
    step = 0
    while row < n_rows:
        next_row = row + n_groups
        ahead_ends = next_ends
        if not ALIGNED:
            ahead = next_row + n_groups
            ahead_ends = load_ends(row_ptr(x_ptr, ahead, x_row_stride, VECTOR), ends, of_part & (ahead < n_rows))
        if next_row < n_rows:
            async_copy.wait_group(STAGES - 2)
            next_mean, next_m2 = _statistics(
                smem, (step + 1) % STAGES, next_ends, of_part, cols, begin, end, VECTOR, SUBTRACT_MEAN, N_CHUNKS,
                N_FULL, ALIGNED,
            )  # fmt: skip
            send(mail_ptr + next_row * n_parts, next_mean, next_m2, part)
        means, m2s, parts = receive(mail_ptr + row * n_parts, n_parts, MAX_PARTS, num_warps)
        # Chan's formula joins the parts: each brings its own spread, and the distance of its mean from the row's.
        counts = gl.where(parts < n_parts, gl.minimum(n_cols - parts * part_cols, part_cols), 0).to(gl.float32)
        m2s = gl.where(parts < n_parts, m2s, 0.0)
        mean = 0.0
        if SUBTRACT_MEAN:
            # All lanes have to agree on the sum to the last bit, so no product may be fused with the first addition: a
            # choice stands between them, as in softmax.
            mean = gl.sum(gl.where(parts < n_parts, means * counts, 0.0), 0) / n_cols
            m2s += gl.where(parts < n_parts, (means - mean) * (means - mean) * counts, 0.0)
        rstd = gl.rsqrt(gl.sum(m2s, 0) / n_cols + eps)
        if part == 0:
            gl.store(rstd_ptr + row, rstd)
            if SUBTRACT_MEAN:
                gl.store(mean_ptr + row, mean)
        slot = step % STAGES
        ahead = row + STAGES * n_groups
        x_part_ptr = row_ptr(x_ptr, ahead, x_row_stride, VECTOR)
        y_part_ptr = row_ptr(y_ptr, row, n_cols, VECTOR)
        for c in gl.static_range(N_CHUNKS):
            y = (smem.index(slot * N_CHUNKS + c).load(LAYOUT).to(gl.float32) - mean) * rstd
            if weight_ptr is not None:
                y *= _widen(weights[c])
            if bias_ptr is not None:
                y += _widen(biases[c])
            store_chunk(y_part_ptr, y, c, cols, begin, end, VECTOR, N_FULL, ALIGNED)
        # One by one behind the chunks, these copies would part their instructions: each waits for all threads.
        for c in gl.static_range(N_CHUNKS):
            copy_chunk(
                smem, slot * N_CHUNKS + c, x_part_ptr, c, cols, begin, end, ahead, n_rows, VECTOR, N_FULL, ALIGNED
            )
        async_copy.commit_group()
        if not ALIGNED:
            y_ends = (x_ends.to(gl.float32) - mean) * rstd
            if weight_ptr is not None:
                y_ends *= end_weights.to(gl.float32)
            if bias_ptr is not None:
                y_ends += end_biases.to(gl.float32)
            gl.store(y_part_ptr + ends, y_ends.to(y_ptr.dtype.element_ty), mask=of_part)
        x_ends, next_ends = next_ends, ahead_ends
        row = next_row
        step += 1
    async_copy.wait_group(0)


def plan_forward(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Plan | None:
    """What suits these rows; None where the kernel cannot take them, or does not pay."""
    n_cols = x.shape[1]
    widest = max(t.element_size() for t in (x, weight, bias) if t is not None)
    if widest > 4 or not n_cols * x.element_size() < 2**31:
        return None
    vector = 16 // x.element_size()
    aligned = n_cols % vector == 0
    long = _LONG_16_BIT if aligned and vector == 8 and not has_fast_memory(x.device) else _LONG
    if not pays(x, aligned, long, _LONG_UNALIGNED, _MIN_BYTES_UNALIGNED) or not rows_begin_alike(vector, n_cols, x):
        return None
    # A part of the widest tensor is no longer than _PART_BYTES, with what it may begin late by. Parts of aligned rows
    # are whole cache lines; Triton moves whole vectors where it sees a multiple of 16.
    late, unit = (0, 64) if aligned else (vector - 1, 16)
    n_parts, part_cols = cut(n_cols, (_PART_BYTES // widest - late) // unit * unit, unit, vector)
    n_chunks = cdiv(part_cols + late, _STEPS * 32 * vector)
    max_groups = count_groups(_PROGRAMS * num_multiprocessors(x.device), n_parts, n_cols, vector)
    return Plan(aligned, n_parts, part_cols, n_chunks, max_groups) if max_groups > 0 else None


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    eps: float,
    plan: Plan,
) -> None:
    """Write y, and the mean and rstd of each row."""
    n_rows, n_cols = x.shape
    aligned, n_parts, part_cols, n_chunks, max_groups = plan
    vector = 16 // x.element_size()
    launch(
        _layer_norm_parts_fwd_kernel, (min(n_rows, max_groups) * n_parts,),
        x, weight, bias, y, mean, rstd, mailboxes(n_rows, n_parts, x.device),
        n_rows, n_parts, part_cols, n_cols, x.stride(0), eps,
        VECTOR=vector, CHUNK_STEPS=_STEPS, N_CHUNKS=n_chunks,
        N_FULL=(n_cols - (n_parts - 1) * part_cols) // (_STEPS * 32 * vector), STAGES=_STAGES,
        MAX_PARTS=max_parts(n_parts, 1), ALIGNED=aligned, num_warps=1, **at_a_time(_PROGRAMS, 1),
    )  # fmt: skip
