"""Cases of updates: uses, optimizers, gradients not finite, stale plans, rows of 16 bits. See kernel_scripts.py."""

import itertools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from kernel_model import (
    ADAGRAD,
    ADAM,
    F32,
    MEAN,
    MEAN_OF_USES,
    NEAREST,
    NO_ROW,
    PADDING_KEY,
    ROWWISE_ADAGRAD,
    SGD,
    SQRT_OF_USES,
    SQRTN,
    STOCHASTIC,
    SUM,
    SUM_OF_USES,
    U64,
    Batch,
    join_batches,
    make_fixed,
    make_ragged,
    nearest,
    single,
)
from kernel_scripts import HALVES, SLABS, Script, case, cases, gather_mixed, mostly_two

# Updates -------------------------------------------------------------------------------------------------------


NUM_USES = (1, 2, 31, 32, 33, 64, 1024, 1025, 5000)


USES = (
    (SGD, SUM_OF_USES, 8),
    (SGD, SQRT_OF_USES, 3),
    (ADAGRAD, SUM_OF_USES, 8),
    (ADAGRAD, MEAN_OF_USES, 7),
    (ROWWISE_ADAGRAD, SUM_OF_USES, 8),
    (ROWWISE_ADAGRAD, MEAN_OF_USES, 33),
    (ADAM, SUM_OF_USES, 8),
    (ADAM, SQRT_OF_USES, 12),
)


def keys_with_uses(script: Script, uses: Sequence[int]) -> np.ndarray:
    """Returns keys so that key i occurs uses[i] times, in random order."""
    return script.rng.permutation(np.repeat(np.arange(len(uses), dtype=np.uint64), uses))


@cases(*USES)
def update_uses(optimizer: int, row_gradient: int, dim: int) -> Script:
    """Uses rows with 1 to 5,000 uses in one batch: in a chunk, in two, in one round of lanes, in five."""
    script = Script(slabs=(5, 7, 300), dim=dim, optimizer=optimizer, seed=dim)
    script.fill(range(40))
    keys = keys_with_uses(script, [*NUM_USES, *NUM_USES[:6]])
    script.update(batch := Batch(single(keys)), script.store.find(keys, batch.tables), row_gradient=row_gradient)
    return script


@cases(SUM, MEAN, SQRTN)
def update_uses_in_bags(combiner: int) -> Script:
    """Has the same uses in weighted bags; a use has the factor of its bag."""
    script = Script(slabs=(5, 7, 300), dim=4, optimizer=ADAGRAD)
    script.fill(range(40))
    keys = keys_with_uses(script, NUM_USES)
    offsets = np.r_[0, np.sort(script.rng.integers(0, len(keys), 600)), len(keys)]
    batch = Batch(make_ragged(keys, 0, combiner, offsets, script.weights(len(keys))))
    script.update(batch, script.store.find(keys, batch.tables))
    return script


@case()
def update_many_uses() -> Script:
    """Has so many uses that they are sorted by larger tiles."""
    script = Script(slabs=(5, 7, 300), dim=4)
    script.fill(range(300))
    keys = script.rng.integers(0, 300, 600_000).astype(U64)
    script.update(batch := Batch(single(keys)), script.store.find(keys, batch.tables))
    return script


@cases(7, 8, 64)
def update_squares_overflow(dim: int) -> Script:
    """Gradients are finite although their squares are not: their rows step, and none is counted."""
    script = Script(slabs=(5, 7, 300), dim=dim, optimizer=ROWWISE_ADAGRAD)
    script.fill(range(40))
    keys = keys_with_uses(script, [1, 1, 1, 5, 40, 1])
    gradients = script.normal(len(keys), dim)
    gradients[np.isin(keys, [1, 3, 4]), dim - 1] = 1e25
    batch = Batch(single(keys))
    row_ids = script.store.find(keys, batch.tables)
    script.update(batch, row_ids, gradients=[gradients])
    assert np.isinf(script.store.states[0]).sum() == 3
    return script


@case()
def update_neighbours() -> Script:
    """A row's sum depends on only its own uses, so rows with equal uses get equal bits (decision D8)."""
    script = Script(slabs=(40,), dim=8)
    script.fill(range(3))
    script.store.rows[:3] = 0
    normal = script.normal(1100, 8)
    keys, gradients = np.full(4400, 2, np.uint64), script.normal(4400, 8)
    every_second, in_a_row = np.arange(1, 2201, 2), np.arange(3000, 4100)
    keys[every_second], gradients[every_second] = 0, normal
    keys[in_a_row], gradients[in_a_row] = 1, normal
    batch = Batch(single(keys))
    script.update(batch, script.store.find(keys, batch.tables), gradients=[gradients])
    assert (script.store.rows[0].view(np.uint32) == script.store.rows[1].view(np.uint32)).all()
    return script


@cases(SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)
@cases((SGD, 128), (ROWWISE_ADAGRAD, 128), (ADAM, 33))
@cases(*((o, 24 + 104 * (o % 2), d) for o in range(4) for d in HALVES))
def update_not_finite(optimizer: int, dim: int = 8, dtype: str = "float32") -> Script:
    """A column that is infinite or NaN, a sum that overflows, or infinities that cancel: the row stays and is counted.

    In wide rows, the row's neighbours in a warp step.
    """
    more = {"dtype": HALVES[dtype], "embedding_dtype": F32} if dtype in HALVES else {}
    script = Script(slabs=(5, 7, 300), dim=dim, num_tables=3, optimizer=optimizer, **more)
    script.fill(np.repeat(np.arange(14), 3), np.tile(np.arange(3), 14))
    keys = keys_with_uses(script, [1, 2, 2, 40, 1, 2, 1100, 3, 1, 1, 40])
    weights = np.where(keys == 8, F32(0), F32(0.5))
    gradients = script.normal(len(keys), dim)
    of = [np.flatnonzero(keys == key) for key in range(11)]
    eighth = dim // 8
    gradients[of[0], 3 * eighth] = np.inf
    gradients[of[1][1], 0] = np.nan
    gradients[of[2], dim - 1] = np.inf, -np.inf
    gradients[of[3][35], 2 * eighth] = -np.inf
    gradients[of[5], eighth] = 3e38
    gradients[of[6][1050], 4 * eighth] = np.nan
    gradients[of[8], 4 * eighth] = np.inf  # multiplied by weight zero
    gradients[of[10], 0] = 1e38
    batch = Batch(
        single(keys, 2),
        make_fixed(keys, 0, SUM, 1, weights),
        make_ragged(keys, 1, MEAN, np.arange(len(keys) + 1)),
    )
    row_ids = script.store.find(batch.keys, batch.tables)
    script.update(batch, row_ids, gradients=[gradients] * 3)
    script.update(batch, row_ids, gradients=[gradients] * 3, row_gradient=MEAN_OF_USES)
    return script


@cases(SGD, ADAGRAD)
def update_tiny(optimizer: int) -> Script:
    """Subnormal numbers are neither flushed nor treated as zero."""
    script = Script(slabs=(5, 7, 300), dim=8, optimizer=optimizer)
    script.fill(range(10))
    script.store.rows[:10] *= F32(1e-39)
    script.store.rows[7:9] = -0.0  # a sum starts from its first row, not from zero
    for state in script.store.states:
        state[:5] = 0
    keys = np.arange(10).repeat(4)
    batch = Batch(single(keys), make_fixed(keys, 0, MEAN, 4), make_fixed(keys, 0, SUM, 2, np.full(40, 1e-3, F32)))
    row_ids = script.lookup(batch)
    gradients = [script.normal(f.num_bags, 8) * F32(1e-40) for f in batch.features]
    script.update(batch, row_ids, gradients=gradients, learning_rate=0.5 if optimizer == SGD else 1e-20)
    return script


@cases("none_stale", "first_stale", "last_stale", "all_stale")
def update_stale(which: str) -> Script:
    """Uses of a plan that does not act are skipped and counted; only the other plan's rows step."""
    script = Script(slabs=(5, 7, 30), dim=8, num_tables=3, optimizer=ADAM)
    script.fill(np.repeat(np.arange(10), 3), np.tile(np.arange(3), 10))

    def keys(num):
        return np.where(script.rng.random(num) < 0.1, -1, script.rng.integers(0, 20, num)).astype(U64)

    offsets = [0, 0, 3, 30, 33]
    batches = [
        Batch(single(keys(33), 0), make_ragged(keys(40), 1, MEAN, offsets, script.weights(40))),
        Batch(make_fixed(keys(30), 1, SQRTN, 3), single(keys(33), 2), make_ragged(keys(33), 0, SUM, offsets)),
    ]
    row_ids = np.concatenate([script.lookup(batch) for batch in batches])  # the store fills up and refuses keys
    stale = {"none": [], "first": [0], "last": [1], "all": [0, 1]}[which.split("_")[0]]
    script.update(join_batches(*batches), row_ids, is_live=[p not in stale for p in range(2)])
    return script


@case()
def update_stale_zero_sum() -> Script:
    """Keys of a stale plan that had a row are counted, whatever their bag's effect on their gradient."""
    script = Script(slabs=(5, 7, 30), dim=8)
    script.fill(range(10))
    weights = np.array([1, -1, 2, 1, 0, 0], F32)
    batch = Batch(make_ragged([1, 2, 3, 4, 5, PADDING_KEY], 0, MEAN, [0, 2, 4, 6], weights))
    row_ids = np.where(batch.is_asked, script.store.find(batch.keys, batch.tables), np.uint32(NO_ROW))
    script.update(batch, row_ids, is_live=[False])
    script.update(batch, row_ids)
    return script


# Rows of 16 bits -----------------------------------------------------------------------------------------------


DIMS_16 = (1, 2, 3, 7, 8, 12, 16, 33, 64, 100, 128, 200, 256, 513, 1024)


@cases(*(("bfloat16", dim) for dim in DIMS_16), *(("float16", dim) for dim in DIMS_16[::2]))
def rows16_dims(dtype: str, dim: int) -> Script:
    """Covers every shape of a row: initialized, read, combined, summed, stepped; all embeddings and roundings."""
    number = DIMS_16.index(dim) + list(HALVES).index(dtype)
    embedding_dtype = (None, F32)[number // 2 % 2]
    script = Script(
        slabs=SLABS[number % 3],
        dim=dim,
        num_tables=3,
        optimizer=number % 4,
        seed=dim,
        dtype=HALVES[dtype],
        embedding_dtype=embedding_dtype,
    )
    present = script.distinct(20, low=9)
    script.fill(present, 0)
    hot = mostly_two(script, present, 1250)
    lengths = (0, 33, 1, 0, 12, 2, 64, 3, 0)
    num_keys = sum(lengths)
    batch = Batch(
        make_ragged(hot, 0, SUM, np.r_[0, np.sort(script.rng.integers(0, 1250, 60)), 1250]),
        single(script.mix_keys(40, present), 0),
        make_ragged(
            script.mix_keys(num_keys, present), 1, MEAN, np.r_[0, np.cumsum(lengths)], script.weights(num_keys)
        ),
        make_fixed(script.mix_keys(24, present), 2, SQRTN, 3),
    )
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.update(batch, row_ids, row_gradient=number % 3, rounding=number % 2)
    script.update(batch, row_ids, rounding=1 - number % 2, num_steps=2**32 - 1, tables_apart=True, learning_rate=1e-3)
    return script


# Covers every pair of dtype, optimizer and rounding, and every pair of dtype, optimizer and dim.
@cases(*((dtype, o, (i + o) % 2) for i, dtype in enumerate(HALVES) for o in range(4)))
@cases(*((dtype, o, STOCHASTIC, (24, 128)[(i + o) % 2]) for i, dtype in enumerate(HALVES) for o in range(4)))
def rows16_optimizers(dtype: str, optimizer: int, rounding: int, dim: int = 12) -> Script:
    """Makes three steps of every optimizer, some small, by gradients of float32, the rows' dtype and bfloat16."""
    half = HALVES[dtype]
    script = Script(slabs=(5, 7, 50), dim=dim, num_tables=3, optimizer=optimizer, dtype=half)
    script.fill(range(30), np.arange(30) % 3)
    keys = [keys_with_uses(script, [1, 2, 33, 3, 2, 9]) * U64(3) + U64(t) for t in range(3)]
    batch = Batch(*(single(keys[t], t) for t in range(3)))
    row_ids = script.store.find(batch.keys, batch.tables)
    for num_steps, learning_rate in enumerate((0.5, 1e-4, 1e-2)):
        dtype_of_gradients = (F32, half, HALVES["bfloat16"])[num_steps]
        gradients = [script.normal(f.num_bags, dim).astype(dtype_of_gradients) for f in batch.features]
        more = {"rounding": rounding, "num_steps": num_steps, "tables_apart": num_steps == 1}
        script.update(batch, row_ids, gradients=gradients, learning_rate=learning_rate, **more)
    return script


@cases(*itertools.product(range(4), (12, 128)), (ADAGRAD, 7), (ROWWISE_ADAGRAD, 300))
def bfloat16_gradients(optimizer: int, dim: int) -> Script:
    """Steps float32 rows by gradients of bfloat16: rows with one use, few, and more than 32; bags that are divided."""
    script = Script(slabs=(5, 7, 50), dim=dim, num_tables=3, optimizer=optimizer)
    script.fill(range(30), np.arange(30) % 3)
    keys = [keys_with_uses(script, [1, 2, 33, 3, 300, 9]) * U64(3) + U64(t) for t in range(3)]
    batch = Batch(single(keys[0], 0), single(keys[1], 1), make_fixed(keys[2], 2, MEAN, 4))
    row_ids = script.store.find(batch.keys, batch.tables)
    gradients = [script.normal(f.num_bags, dim).astype(HALVES["bfloat16"]) for f in batch.features]
    script.update(batch, row_ids, gradients=gradients)
    return script


@cases(*itertools.product(HALVES, (NEAREST, STOCHASTIC)))
def rows16_extremes(dtype: str, rounding: int) -> Script:
    """Covers results beyond the largest and below the least normal number, ties, signed zeros, sums that overflow."""
    half = HALVES[dtype]
    script = Script(slabs=(5, 7, 50), dim=8, dtype=half)
    script.fill(range(12))
    largest, least = F32(ml_dtypes.finfo(half).max), F32(ml_dtypes.finfo(half).smallest_subnormal)
    script.store.rows[:12] = 0
    script.store.rows[:4] = half.type(largest)
    script.store.rows[4:6] = -half.type(largest)
    script.store.rows[11] = -half.type(0)
    keys = np.arange(12)
    batch = Batch(single(keys), make_fixed(np.repeat(keys, 2), 0, SUM, 2))
    row_ids = script.lookup(batch)  # the sum of two largest numbers exceeds the largest
    steps = np.zeros((12, 8), F32)
    # With 0.2 / 64 a sum is between the largest bfloat16, to which it is rounded, and the largest float32.
    steps[:6] = np.outer([1e-3, 0.2, 1, 30, -1e-3, -1], np.arange(8)) * largest / F32(64)
    steps[6:11] = np.outer([0.125, 0.5, 1.5, 77.3, 1024], np.arange(1, 9)) * least
    gradients = [-steps, np.zeros((12, 8), F32)]
    script.update(batch, row_ids, gradients=gradients, rounding=rounding, learning_rate=1.0)
    script.lookup_planned(batch, row_ids)
    return script


@cases(*HALVES)
def rows16_refused(dtype: str) -> Script:
    """Keys without a row read their rounded initial row, or zeros; so do keys that a full store refuses."""
    script = Script(slabs=(5, 7), dim=7, num_tables=3, dtype=HALVES[dtype])
    script.fill(range(6), np.arange(6) % 3)
    keys = script.mix_keys(40, range(6))
    batch = Batch(
        *(single(keys, t, unknown_zeros=t == 1) for t in range(3)), make_fixed(keys, 0, MEAN, 4, unknown_zeros=True)
    )
    script.lookup_find(batch)
    script.lookup_planned(batch, script.lookup(batch))
    return script


@cases(*HALVES)
def rows16_gather(dtype: str) -> Script:
    """Rows are copied bit by bit, including NaN; new rows are rounded."""
    script = Script(slabs=(5, 7, 300), dim=33, num_tables=3, dtype=HALVES[dtype])
    script.store.rows[:] = nearest(script.normal(312, 33), script.store.dtype)
    script.store.rows[20:30, ::3] = np.nan
    return gather_mixed(script, 700, (1,))


@cases(SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM)
def small_update(optimizer: int) -> Script:
    """Has few uses, more than a chunk, more than a round of lanes; a bag, a NaN, a stale plan."""
    script = Script(slabs=(5, 7, 50), dim=(8, 7, 72, 33)[optimizer], optimizer=optimizer)
    script.fill(range(20))
    keys = keys_with_uses(script, [1, 2, 33, 1060, 32, 1])
    batch = join_batches(Batch(single(keys), make_ragged(keys[:40], 0, MEAN, [0, 5, 5, 40])), Batch(single(range(20))))
    gradients = [script.normal(f.num_bags, script.store.dim) for f in batch.features]
    gradients[0][keys == 0] = np.nan
    row_ids = script.store.find(batch.keys, batch.tables)
    script.update(batch, row_ids, gradients=gradients, is_live=[True, False])
    return script


@cases(*HALVES)
def small_rows16(dtype: str) -> Script:
    """Runs every launcher that reads or writes rows, once."""
    script = Script(slabs=(5, 7, 60), dim=12, num_tables=2, optimizer=ADAGRAD, dtype=HALVES[dtype])
    script.fill(range(20))
    keys = script.mix_keys(40, range(30))
    batch = Batch(single(keys, 0), make_ragged(keys, 1, MEAN, [0, 0, 33, 33, 36]))
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch))
    script.find_or_insert(np.arange(50, 60), 1)
    script.gather(np.arange(20), 0, np.arange(20) * 4)
    return script
