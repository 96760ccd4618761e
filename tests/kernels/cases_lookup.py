"""Cases of lookups: batches, bags, dims, statistics written by lookups, admission. See kernel_scripts.py."""

import itertools

import numpy as np
from kernel_model import (
    ADAGRAD,
    ADAM,
    BF16,
    BY_BLOOM,
    BY_COUNT,
    BY_PROBABILITY,
    F32,
    MEAN,
    MEAN_OF_USES,
    NO_ROW,
    PADDING_KEY,
    ROWWISE_ADAGRAD,
    SQRT_OF_USES,
    SQRTN,
    SUM,
    U64,
    Batch,
    Feature,
    as_keys,
    make_fixed,
    make_ragged,
    single,
)
from kernel_scripts import (
    DIMS,
    HALVES,
    KINDS,
    SIZES,
    SLABS,
    Script,
    batch_with_loose_ends,
    case,
    cases,
    mostly_two,
    table_store,
)

# Batches: lookup, lookup_find, lookup_planned, update ---------------------------------------------------------


def all_batch_ops(script: Script, batch: Batch, **update) -> Script:
    """Runs all targets that take a batch; the store has some of its keys."""
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.lookup_find(batch)
    script.update(batch, row_ids, **update)
    some = np.where(script.rng.random(len(row_ids)) < 0.1, np.uint32(NO_ROW), row_ids)
    script.lookup_planned(batch, some)
    return script


@cases(*SIZES)
def batch_sizes(num_keys: int) -> Script:
    """Uses single keys, in numbers around the sizes of warps, blocks and tiles."""
    number = SIZES.index(num_keys) + 1
    script = table_store(num_keys, number, seed=num_keys)
    table = script.store.num_tables - 1
    present = script.distinct(max(num_keys, 3) // 3, low=9)
    script.fill(present, table)
    return all_batch_ops(script, Batch(single(script.mix_keys(num_keys, present), table)), row_gradient=number % 3)


@case()
def batch_large() -> Script:
    """Uses more blocks than a block has threads, and more positions than any chunk of the CPU."""
    script = Script(slabs=(100_000, 50_000), dim=1, optimizer=ADAGRAD, num_buckets=1 << 14)
    script.fill(np.arange(1000))
    keys = (2.0 ** script.rng.uniform(0, 14, 300_000)).astype(np.uint64)  # key 1 has about 20,000 uses
    batch = Batch(single(keys[:200_000], 0), make_fixed(keys[200_000:], 0, MEAN, 10))
    script.update(batch, script.lookup(batch))
    return script


@case()
def batch_slabs() -> Script:
    """Uses as many slabs as a store can have, of one row and of a hundred."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=1, optimizer=ADAM)
    script.fill(np.arange(100))
    return all_batch_ops(script, Batch(single(script.rng.permutation(np.arange(1000)), 0)))


@case()
def batch_one_key() -> Script:
    """Uses only one hot key, whose sum has 157 chunks."""
    script = table_store(5000, SIZES.index(5000) + 1, seed=2)
    script.fill(script.distinct(30, low=9), 0)
    return all_batch_ops(
        script, Batch(single(np.full(5000, 2**63, np.uint64), script.store.num_tables - 1)), row_gradient=1
    )


@cases(*KINDS)
def batch_kinds(kind: str) -> Script:
    """Uses the same keys in three tables: single, in bags of five, in ragged bags."""
    script = Script(slabs=(5, 7, 2500), num_tables=3, dim=8, optimizer=ADAGRAD)
    present, keys = KINDS[kind](script, 1000)
    keys = as_keys(keys)
    script.fill(np.repeat(as_keys(present), 3), np.tile(np.arange(3), len(present)))
    offsets = np.r_[0, np.sort(script.rng.integers(0, 1000, 63)), 1000]
    batch = Batch(
        single(keys, 0),
        make_fixed(keys[::-1], 1, MEAN, 5, script.weights(1000)),
        make_ragged(np.roll(keys, 7), 2, SQRTN, offsets),
    )
    return all_batch_ops(script, batch)


@case()
def batch_few_rows_left() -> Script:
    """Refused keys read their initial rows and take no gradient; rows go by first position, over all features."""
    script = Script(slabs=(5, 7, 20), num_tables=3, dim=12, optimizer=ADAM)
    script.fill(range(9), 0)

    def keys(num):
        return script.rng.integers(0, 40, num)

    weights = script.weights(40)
    for _ in range(2):
        batch = Batch(
            make_ragged(keys(40), 0, MEAN, np.r_[0, 0, 3, 20, 39], weights),
            single(keys(33), 1),
            make_fixed(keys(60), 0, SUM, 4),
            single(keys(10), 2),
        )
        script.update(batch, script.lookup(batch))
    script.erase(np.arange(33), 0)
    script.update(batch, script.lookup(batch))
    return script


@case()
def batch_far_too_many() -> Script:
    """Uses more new keys than entries in the index, in bags of 16."""
    script = Script(slabs=(8,), num_tables=1, num_buckets=16, dim=8)
    batch = Batch(single(script.distinct(904), 0), make_fixed(script.distinct(4096), 0, MEAN, 16))
    script.update(batch, script.lookup(batch))
    script.lookup(batch)
    return script


@case()
def batch_crowded_index() -> Script:
    """Uses keys without an entry, in bags and single."""
    script = Script(slabs=(5, 7, 300), num_tables=3, num_buckets=2, dim=7)
    keys = script.distinct(20, low=3)
    script.fill(keys[:3], 1)
    batch = Batch(
        single(script.rng.choice(keys, 33), 1),
        make_ragged(script.rng.choice(keys, 100), 2, SUM, [0, 50, 50, 90]),
        make_fixed(script.rng.choice(keys, 60), 1, MEAN, 3, script.weights(60)),
    )
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch))
    script.lookup(batch)
    return script


@case()
def batch_aimed() -> Script:
    """Rows go by first position, over features and bags."""
    script = Script(slabs=(5, 7, 588), num_buckets=4096, dim=4)
    aimed = script.rng.permutation(script.keys_of_homes([77], 300))
    batch = Batch(
        single(np.r_[aimed[:120], aimed[:30]], 0),
        make_ragged(np.r_[aimed[100:], aimed[:50]], 0, SUM, [0, 100, 100, 101, 250]),
    )
    script.lookup(batch)
    script.update(batch, script.lookup(batch))
    script.lookup_find(batch)
    return script


# Bags ----------------------------------------------------------------------------------------------------------


LENGTHS = (0, 0, 1, 500, 2, 0, 33, 257, 31, 32, 64, 0, 3, 129, 0)


def bag_features(script: Script, lengths, combiners=(SUM, MEAN, SQRTN), table=0) -> list[Feature]:
    """Returns ragged features of all combiners, without weights and with; some keys have rows, some are padding."""
    offsets = np.r_[0, np.cumsum(lengths)]
    num_keys = int(offsets[-1])
    present = script.distinct(200, low=9)
    if script.initial is None and (table, int(present[0])) not in script.store.row_of:
        script.fill(present, table)
    return [
        make_ragged(
            script.mix_keys(num_keys, present), table, combiner, offsets, script.weights(num_keys) if weighted else None
        )
        for combiner in combiners
        for weighted in (False, True)
    ]


@cases(12, 7)
def bags_ragged(dim: int) -> Script:
    """Uses bags of 0 to 500 keys, with empty bags first, in between and last."""
    script = Script(slabs=(5, 7, 4000), dim=dim, optimizer=ADAGRAD)
    return all_batch_ops(script, Batch(*bag_features(script, LENGTHS)))


@case()
def bags_one_key() -> Script:
    """Uses long bags of one new key: in the call it is found after its first position, also by its own bag."""
    script = Script(slabs=(5, 7, 300), dim=16)
    offsets = [0, 500, 500, 1000]
    batch = Batch(*(make_ragged(np.full(1000, 2**63 + c), 0, c, offsets) for c in (SUM, MEAN, SQRTN)))
    return all_batch_ops(script, batch, row_gradient=SQRT_OF_USES)


@case()
def bags_fixed() -> Script:
    """Uses 1 (with weights), 2, 5, 33, 100 and 500 keys per bag, with padding anywhere."""
    script = Script(slabs=(5, 7, 3000), dim=8, num_tables=3, optimizer=ROWWISE_ADAGRAD)
    present = script.distinct(200, low=9)
    script.fill(present, 1)
    features = [
        make_fixed(script.mix_keys(h * n, present), t % 3, 1 + t % 3, h, script.weights(h * n) if t % 2 else None)
        for t, (h, n) in enumerate([(2, 257), (1, 300), (5, 33), (33, 9), (500, 2), (100, 7)])
    ]
    return all_batch_ops(script, Batch(*features), row_gradient=MEAN_OF_USES)


@case()
def bags_many_tiles() -> Script:
    """Uses more than 256 bags per feature, and a tile of empty bags."""
    script = Script(slabs=(5, 7, 3000), dim=4)
    lengths = np.r_[np.zeros(257, int), script.rng.integers(0, 4, 400), np.zeros(30, int)]
    return all_batch_ops(script, Batch(*bag_features(script, lengths, (SUM, MEAN))))


@case()
def bags_zero_sums() -> Script:
    """Weights that cancel or vanish give zeros and no gradient for mean; sum and sqrtn have their own rules."""
    script = Script(slabs=(5, 7, 300), dim=8, optimizer=ADAM)
    script.fill(range(40), 0)
    weights = np.array([1, -1, 0, 0, 2, 1, 0.5, -0.5, 3, 0, 0, 1, -1, 1, -1, 4], F32)
    offsets = [0, 2, 4, 5, 8, 9, 11, 15, 15, 16]
    keys = script.rng.integers(0, 60, (4, 16))
    batch = Batch(*(make_ragged(keys[combiner], 0, combiner, offsets, weights) for combiner in (SUM, MEAN, SQRTN)))
    return all_batch_ops(script, batch)


@case()
def bags_empty() -> Script:
    """Uses features without keys, without bags, with neither; bags without keys, and of only padding."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(range(40), 1)
    none = np.zeros(0, np.uint64)
    batch = Batch(
        make_ragged(none, 0, SUM, [0, 0, 0, 0, 0]),
        single(none, 1),
        make_ragged(none, 2, MEAN, [0]),
        make_ragged(script.rng.integers(0, 60, 33), 1, MEAN, [0, 0, 10, 10, 33]),
        make_ragged(np.full(8, PADDING_KEY, np.uint64), 1, SQRTN, [0, 4, 4, 8]),
        make_fixed(np.full(12, PADDING_KEY, np.uint64), 2, MEAN, 4),
        make_ragged(none, 0, SUM, [0, 0]),
    )
    return all_batch_ops(script, batch)


@cases("bags", "features")
def bags_only_empty(what: str) -> Script:
    """Uses a batch without a key."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(40))
    feature = make_ragged([], 0, MEAN, [0] * 34) if what == "bags" else make_ragged([], 0, MEAN, [0])
    return all_batch_ops(script, Batch(feature))


@case()
def bags_40_features() -> Script:
    """Uses every kind of feature at once, more features than a warp has lanes, over three tables."""
    script = Script(slabs=(5, 7, 3000), dim=8, num_tables=3, optimizer=ROWWISE_ADAGRAD)
    present = script.distinct(100, low=9)
    script.fill(np.repeat(present, 3), np.tile(np.arange(3), 100))
    features = []
    for i in range(40):
        table, combiner, n = i % 3, 1 + i // 4 % 3, int(script.rng.integers(0, 70))
        weights = script.weights(n) if i % 5 == 0 else None
        unknown_zeros = table == 2
        keys = script.mix_keys(n, present)
        if i % 4 == 0:
            features.append(single(keys, table, unknown_zeros=unknown_zeros))
        elif i % 4 == 1:
            h = 1 + i // 4 % 5
            n = n // h * h
            weights = None if weights is None else weights[:n]
            features.append(make_fixed(keys[:n], table, combiner, h, weights, unknown_zeros=unknown_zeros))
        else:
            offsets = np.r_[0, np.sort(script.rng.integers(0, n + 1, i)), n]
            features.append(make_ragged(keys, table, combiner, offsets, weights, unknown_zeros=unknown_zeros))
    return all_batch_ops(script, Batch(*features), row_gradient=SQRT_OF_USES)


@case()
def bags_70_tables() -> Script:
    """Uses more tables than the GPU counts in shared memory, each with keys of the same numbers."""
    script = Script(slabs=(5, 7, 1200), dim=4, num_tables=70)
    script.fill(np.repeat(np.arange(5), 70), np.tile(np.arange(70), 5))
    keys = np.where(script.rng.random((70, 10)) < 0.1, -1, script.rng.integers(0, 12, (70, 10))).astype(U64)
    features = [single(keys[t], t) if t % 2 else make_ragged(keys[t], t, MEAN, [0, 3, 3, 10]) for t in range(70)]
    return all_batch_ops(script, Batch(*features))


@case()
def bags_unknown_zeros() -> Script:
    """In find, a key without a row gives zeros, and counts in the divisor."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(20))
    keys = script.rng.integers(0, 60, 33)
    script.lookup_find(
        Batch(
            *(make_ragged(keys, 0, c, [0, 10, 10, 33], unknown_zeros=True) for c in (SUM, MEAN, SQRTN)),
            make_ragged(keys, 0, MEAN, [0, 10, 10, 33], script.weights(33), unknown_zeros=True),
            single(keys, 0, unknown_zeros=True),
        )
    )
    return script


BATCH_OPS = ("plan_requests", "lookup_find", "lookup", "lookup_planned", "update")


def one_batch_op(script: Script, op: str, batch: Batch) -> Script:
    """Runs only one target, so that a case tests it alone."""
    row_ids = np.where(batch.is_asked, script.store.find(batch.keys, batch.tables), np.uint32(NO_ROW))
    more = {"plan_requests": (1,), "lookup_planned": (row_ids,), "update": (row_ids,)}.get(op, ())
    getattr(script, op)(batch, *more)
    return script


@cases(*BATCH_OPS)
def bags_padding_in_no_bag(op: str) -> Script:
    """Padding before the first bag and after the last is counted, as features.py makes it for a traced batch."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))

    def keys(num, first, last):
        where = np.arange(num)
        return np.where((where < first) | (where >= last), -1, script.rng.integers(0, 40, num)).astype(U64)

    return one_batch_op(script, op, batch_with_loose_ends(keys))


@cases(*BATCH_OPS)
def bags_keys_in_no_bag(op: str) -> Script:
    """Keys before the first bag and after the last are padding, whatever their values."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))
    return one_batch_op(script, op, batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)))


@cases(*BATCH_OPS)
def bags_offsets_outside(op: str) -> Script:
    """Negative offsets, and offsets past the end, are clamped."""
    script = Script(slabs=(5, 7, 300), dim=8)
    script.fill(range(20))
    keys = script.rng.integers(0, 40, 64)
    batch = Batch(
        make_ragged(keys, 0, SUM, [-(10**8), -1, 3, 60, 65, 10**9]),
        make_ragged(keys, 0, MEAN, [-(2**31), 2**31 - 1]),
        make_ragged(keys, 0, SQRTN, [0, 64, 70, 70]),
    )
    return one_batch_op(script, op, batch)


# Dims ----------------------------------------------------------------------------------------------------------


@cases(*DIMS)
def batch_dims(dim: int) -> Script:
    """Covers every shape of a row: read, initialized, combined, summed over few, some and many uses, stepped."""
    number = DIMS.index(dim)
    script = Script(slabs=SLABS[number % 3], dim=dim, num_tables=3, optimizer=number % 4, seed=dim)
    present = script.distinct(20, low=9)
    script.fill(present, 0)
    hot = mostly_two(script, present, 1250)
    lengths = (0, 33, 1, 0, 12, 2, 64, 3, 0)
    num_keys = sum(lengths)
    offsets = np.r_[0, np.cumsum(lengths)]
    batch = Batch(
        make_ragged(hot, 0, SUM, np.r_[0, np.sort(script.rng.integers(0, 1250, 60)), 1250]),
        single(script.mix_keys(40, present), 0),
        make_ragged(script.mix_keys(num_keys, present), 1, MEAN, offsets, script.weights(num_keys)),
        make_fixed(script.mix_keys(24, present), 2, SQRTN, 3),
    )
    script.lookup_find(batch)
    script.update(batch, script.lookup(batch), row_gradient=number % 3)
    return script


# Statistics written by lookups -----------------------------------------------------------------------------------


def used_batch(script: Script, num: int, num_distinct: int) -> Batch:
    """Returns features of all kinds over two tables, some over one, with a hot key and padding."""
    rng = script.rng

    def keys(size):
        drawn = rng.integers(0, num_distinct, size).astype(np.uint64) * U64(0x100000001)
        drawn[rng.random(size) < 0.11] = U64(0x100000001)
        drawn[rng.random(size) < 0.05] = PADDING_KEY
        return drawn

    offsets = np.r_[0, np.sort(rng.integers(0, num + 1, max(num // 3, 1)))]
    return Batch(
        single(keys(num), 0),
        single(keys(num), 1),
        make_fixed(keys(2 * num), 0, MEAN, 2, script.weights(2 * num)),
        make_ragged(keys(num), 0, SQRTN, offsets),
        make_ragged(keys(num), 1, SUM, np.minimum(offsets, num // 2), script.weights(num)),
        make_fixed(keys(3 * num), 1, SUM, 3),
    )


@cases(*SIZES)
def statistics_sizes(num_keys: int) -> Script:
    """Uses new keys, then the same and others; rows that are freed and reused; clocks that decrease."""
    number = SIZES.index(num_keys)
    script = Script(slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_tables=2, dim=(4, 7, 64)[number % 3])
    for clock in (3, 2**32 - 1, 0):
        script.lookup(used_batch(script, num_keys, num_keys + 2), clock=clock)
    script.erase(np.arange(0, num_keys, 2).astype(np.uint64) * U64(0x100000001), 0)
    script.lookup(used_batch(script, num_keys, num_keys + 9), clock=1)
    return script


@cases(1, 2, 3, 33, 66, 128, 201, 256, 301, 400, 513, 1024)
def statistics_dims(dim: int) -> Script:
    """Covers every shape of a row: in bags as many positions are processed at once as lanes share a row."""
    script = Script(slabs=(5, 7, 400), num_tables=2, dim=dim, seed=dim)
    script.fill(np.arange(20).astype(U64) * U64(0x100000001), 0)
    for clock in (1, 2):
        script.lookup(used_batch(script, 80, 90), clock=clock)
    return script


@cases(*itertools.product(HALVES, (3, 8, 256)))
def statistics_rows16(dtype: str, dim: int) -> Script:
    """Uses rows of 16 bits."""
    script = Script(slabs=(5, 7, 400), num_tables=2, dim=dim, dtype=HALVES[dtype])
    for clock in (1, 2):
        script.lookup(used_batch(script, 80, 90), clock=clock)
    return script


@cases("one_key", "each_key_of_a_warp_once", "pairs_in_a_warp", "all_new", "all_padding")
def statistics_warps(what: str) -> Script:
    """Uses uniform warps and warps with groups of every kind: keys with rows, then new keys."""
    script = Script(slabs=(5, 7, 3000), num_tables=2, dim=4)
    i = np.arange(2000).astype(U64)
    keys = {
        "one_key": np.full(2000, 6),
        "each_key_of_a_warp_once": i % U64(32) + U64(3),
        "pairs_in_a_warp": i % U64(32) // U64(2) * U64(19),
        "all_new": i * U64(0x100000001),
        "all_padding": np.full(2000, PADDING_KEY, np.uint64),
    }[what]
    offsets = np.r_[0, np.sort(script.rng.integers(0, 2000, 40)), 2000]
    batch = Batch(
        single(keys, 0), make_ragged(keys, 0, SUM, offsets), make_fixed(keys[::-1], 1, MEAN, 5), single(keys[:700], 1)
    )
    script.lookup(batch, clock=5)
    script.lookup(batch, clock=6)
    return script


@case()
def statistics_slabs() -> Script:
    """Uses as many slabs as a store can have."""
    script = Script(slabs=np.resize([1, 100, 1, 2, 33], 24).tolist(), dim=3, num_tables=1)
    script.fill(np.arange(100))
    script.lookup(
        Batch(single(script.rng.permutation(np.arange(1000))), make_fixed(np.arange(400), 0, SUM, 4)), clock=9
    )
    return script


@case()
def statistics_large() -> Script:
    """Uses more blocks than run on a GPU at once; hot keys in single positions and in bags."""
    script = Script(slabs=(3_000, 2_000), dim=1, num_buckets=4096)
    script.fill(np.arange(1000))
    keys = (2.0 ** script.rng.uniform(0, 12, 160_000)).astype(np.uint64)
    script.lookup(Batch(single(keys[:140_000], 0), make_fixed(keys[140_000:], 0, MEAN, 10)), clock=1)
    return script


@cases("few_rows_left", "many_new_keys_for_8_rows", "index_of_2_buckets", "keys_of_one_home")
def statistics_refused(why: str) -> Script:
    """Keys that get no row are not recorded; new keys are, once per position, in every form of input."""
    sizes = {
        "few_rows_left": {"slabs": (5, 7, 20)},
        "many_new_keys_for_8_rows": {"slabs": (8,), "num_buckets": 16},
        "index_of_2_buckets": {"slabs": (5, 7, 300), "num_buckets": 2},
        "keys_of_one_home": {"slabs": (5, 7, 588), "num_buckets": 4096},
    }[why]
    script = Script(num_tables=3, dim=8, **sizes)
    rng = script.rng
    pool = script.keys_of_homes([77], 300) if why == "keys_of_one_home" else script.distinct(300, low=3)
    script.fill(pool[:5], 1)
    for clock in range(3):
        batch = Batch(
            single(rng.choice(pool, 33), 1),
            make_ragged(rng.choice(pool, 300), 1, SUM, [0, 50, 50, 290], script.weights(300)),
            single(np.repeat(rng.choice(pool, 200), 4), 2),
            make_fixed(rng.choice(pool, 600), 1, MEAN, 3),
        )
        script.lookup(batch, clock=clock)
    return script


@case()
def statistics_loose() -> Script:
    """Positions in no bag are not used, whatever their values; offsets beyond the keys are clamped."""
    script = Script(slabs=(5, 7, 300), dim=8, num_tables=3)
    script.fill(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20))
    keys = script.rng.integers(0, 40, 64)
    script.lookup(batch_with_loose_ends(lambda num, *_: script.rng.integers(0, 40, num)), clock=1)
    script.lookup(
        Batch(
            make_ragged(keys, 0, SUM, [-(10**8), -1, 3, 60, 65, 10**9]),
            make_ragged(keys, 1, MEAN, [-(2**31), 2**31 - 1]),
        ),
        clock=2,
    )
    script.lookup(Batch(make_fixed([], 0, SUM, 2), make_ragged([], 0, SUM, [0, 0, 0])), clock=3)
    return script


# Admission -----------------------------------------------------------------------------------------------------


# By count, by Bloom filter, by probability, all keys: the words of each table from kTableAdmission on.
POLICIES = {0: (BY_COUNT, 3), 1: (BY_BLOOM, 2, 0, 800, 5), 2: (BY_PROBABILITY, 2**31), 4: (BY_COUNT, 2)}


REFUSED_READ = {0: 0.75, 1: 0.0, 4: -2.5}  # the keys of table 2 read their initial rows


def admitting(seed: int, num_tables: int = 5, **more) -> Script:
    """Returns a store whose tables have all kinds of admission."""
    return Script(seed=seed, num_tables=num_tables, admission=POLICIES, refused=REFUSED_READ, **more)


def admission_batch(script: Script, num: int, num_distinct: int) -> Batch:
    """Returns single keys, bags of one size and ragged bags, of all tables; some keys repeat, some are padding."""
    rng = script.rng

    def keys(size):
        drawn = rng.integers(0, num_distinct, size).astype(np.uint64) * U64(0x100000001)
        drawn[rng.random(size) < 0.05] = PADDING_KEY
        return drawn

    offsets = np.r_[0, np.sort(rng.integers(0, num + 1, max(num // 3, 1)))]
    return Batch(
        single(keys(num), 0),
        make_fixed(keys(2 * num), 1, MEAN, 2, script.weights(2 * num)),
        make_ragged(keys(num), 2, SQRTN, offsets),
        single(keys(num), 3),
        make_fixed(keys(3 * num), 4, SUM, 3),
        make_fixed(keys(num), 0, MEAN, 1),
    )


@cases(1, 33, 257, 2000)
def admission_sizes(num_keys: int) -> Script:
    """Makes successive lookups: keys wait, are admitted, are erased and wait again."""
    script = admitting(num_keys, slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_waiting_buckets=4096, dim=5)
    for step in range(3):
        script.lookup(admission_batch(script, num_keys, num_keys + 2), step=step)
    erased = np.arange(0, num_keys, 2).astype(np.uint64) * U64(0x100000001)
    for table in (0, 1, 2):
        script.erase(erased, table)
    script.forget([3, 1, 1, 1, 2])
    row_ids = script.lookup(batch := admission_batch(script, num_keys, num_keys + 2), step=3)
    script.lookup_planned(batch, row_ids)
    script.lookup_find(batch)
    return script


@cases(33, 5000)
def admission_uses(num_keys: int) -> Script:
    """Uses keys of all tables as owners get them: each has several uses; with unknown tables and padding."""
    script = admitting(num_keys, slabs=(9000,), dim=3, num_waiting_buckets=5000)
    rng = script.rng
    for step in range(3):
        keys, tables = rng.integers(0, 2 * num_keys, num_keys).astype(np.uint64), rng.integers(0, 6, num_keys)
        keys[rng.random(num_keys) < 0.05] = PADDING_KEY
        script.find_or_insert(keys, tables, uses=rng.integers(1, 3, num_keys), step=step)
    script.find_or_insert(keys, tables)  # without admission every key gets a row
    return script


@cases(33, 2000)
def admission_with_statistics(num_keys: int) -> Script:
    """Waiting keys are not recorded; of an admitted key all positions are."""
    script = admitting(num_keys, slabs=((5, 7, 300), (12_000,))[num_keys > 100], num_waiting_buckets=4096, dim=5)
    for step in range(4):
        script.lookup(admission_batch(script, num_keys, num_keys + 2), step=step, clock=step + 7)
    return script


@case()
def admission_one_key() -> Script:
    """All occurrences of a call count: the key is admitted with all its positions, or with none."""
    script = Script(
        slabs=(8,), num_tables=3, admission={0: (BY_COUNT, 5001), 1: (BY_COUNT, 5000), 2: (BY_BLOOM, 255, 0, 64, 3)}
    )
    keys = np.full(5000, 2**64 - 2, np.uint64)
    for table in (0, 1, 2, 0):
        script.find_or_insert(keys, table, step=0)
    return script


@case()
def admission_full_store() -> Script:
    """More keys are admitted than there are rows: the first by position get them, the others are refused for room."""
    script = admitting(1, slabs=(3, 5), num_tables=5)
    keys, tables = np.repeat(np.arange(40), 4), np.tile([0, 1, 2, 3], 40)
    for step in range(3):
        script.find_or_insert(keys, tables, step=step)
    batch = admission_batch(script, 30, 40)
    script.lookup(batch, step=4)
    return script


@case()
def admission_many_tables() -> Script:
    """Uses more tables than fit the counts in shared memory."""
    script = Script(
        num_tables=70, admission={t: (BY_COUNT, 2 + t % 3) for t in range(0, 70, 2)}, num_waiting_buckets=300
    )
    for step in range(3):
        script.find_or_insert(script.rng.integers(0, 5, 600), script.rng.integers(0, 70, 600), step=step)
    return script


@cases(*HALVES)
def admission_rows16(dtype: str) -> Script:
    """Uses rows of 16 bits: the default of a key without a row is rounded like a new row."""
    script = Script(
        seed=3,
        slabs=(600,),
        dim=12,
        dtype=HALVES[dtype],
        num_tables=5,
        admission=POLICIES,
        refused={0: 1 / 3, 1: 1e30, 4: -0.1},
    )
    for step in range(2):
        script.lookup(admission_batch(script, 40, 30), step=step)
    return script


@case()
def admission_small_filter() -> Script:
    """Uses sixteen counters for hundreds of keys: they fill up and stay full."""
    script = Script(num_tables=2, admission={0: (BY_BLOOM, 255, 0, 16, 4), 1: (BY_BLOOM, 3, 4, 64, 30)})
    for step in range(3):
        uses = script.rng.integers(1, 50, 257)
        script.find_or_insert(script.rng.integers(0, 100, 257), np.arange(257) % 2, uses=uses, step=step)
    return script


@case()
def admission_small() -> Script:
    """Covers everything once: waiting, admission, forgetting, rebuilds with more buckets and with new waiting keys."""
    script = admitting(7, slabs=(5, 95), num_waiting_buckets=16)
    batch = admission_batch(script, 6, 9)
    script.lookup(batch, step=0)
    script.find_or_insert([1, 2, 3, 3, PADDING_KEY, 1], [0, 0, 4, 4, 0, 1], uses=[1, 2, 1, 1, 5, 1], step=1)
    script.wait(32, [3, 1, 1, 1, 2], [77, 78, 79, 1, PADDING_KEY, 80], [1, 2, 3, 1, 1, 0], [0, 0, 0, 4, 0, 0])
    script.find_or_insert([77, 78, 79, 80], 0, step=1)
    script.forget([1, 1, 1, 1, 2])  # no key of table 0 waits
    script.wait(16, [3, 1, 1, 1, 2])
    row_ids = script.lookup(batch, step=2)
    script.lookup_planned(batch, row_ids)
    script.gather(batch.keys, batch.tables, row_ids)
    return script


# Bags of several tables: lookup_planned and update as partial bags call them ---------------------------------


def bags_of_tables(script: Script, num_keys: int, num_bags: int = 40) -> tuple[Batch, np.ndarray]:
    """Returns a batch of six features of as many bags, with keys of any table, and a row id or none for each key."""
    rng, store = script.rng, script.store
    script.fill(range(60), np.arange(60) % store.num_tables)
    features = []
    for combiner, weighted in itertools.product((SUM, MEAN, SQRTN), (True, False)):
        offsets = np.r_[0, np.sort(rng.integers(0, num_keys + 1, num_bags - 1)), num_keys]
        if combiner == MEAN:  # positions behind the last bag, as in data that arrives from a shard
            offsets = np.minimum(offsets, num_keys - num_keys // 3)
        keys = script.mix_keys(num_keys, range(60))
        features.append(make_ragged(keys, 0, combiner, offsets, script.weights(num_keys) if weighted else None))
    batch = Batch(*features)
    batch.tables = rng.integers(0, store.num_tables, len(batch.keys))
    row_ids = rng.integers(0, 60, len(batch.keys)).astype(np.uint32)
    row_ids[rng.random(len(row_ids)) < 0.2] = NO_ROW
    return batch, np.where(batch.keys == U64(PADDING_KEY), np.uint32(NO_ROW), row_ids)


def look_up_bags_of_tables(script: Script, num_keys: int) -> Script:
    """Uses an array per feature, per two features, and for all; tables give zeros for keys without a row, or not."""
    batch, row_ids = bags_of_tables(script, num_keys)
    script.lookup_planned(batch, row_ids, unknown_zeros=())
    script.lookup_planned(batch, row_ids, unknown_zeros=(0, 2), num_sharing=6)
    script.lookup_planned(batch, row_ids, unknown_zeros=range(script.store.num_tables), num_sharing=2)
    script.lookup_planned(Batch(*batch.features), row_ids, num_sharing=3)
    return script


@cases(*(size for size in SIZES if size not in (0, 5000)))
def planned_tables(num_keys: int) -> Script:
    """Uses keys of several tables in one bag; keys without a row read their own table's initial row, or zeros."""
    which = SIZES.index(num_keys) % 3
    script = Script(seed=num_keys, slabs=SLABS[which], num_tables=(3, 5, 70)[which], dim=(4, 8, 3)[which])
    return look_up_bags_of_tables(script, num_keys)


@cases(*DIMS)
def planned_tables_dims(dim: int) -> Script:
    """Covers rows of every shape."""
    return look_up_bags_of_tables(Script(slabs=(5, 7, 200), num_tables=4, dim=dim), 90)


@cases(*itertools.product(HALVES, (4, 7, 64)))
def planned_tables_rows16(dtype: str, dim: int) -> Script:
    """Uses rows of 16 bits, and sums of float32, as on the wire."""
    script = Script(slabs=(5, 7, 200), num_tables=4, dim=dim, dtype=HALVES[dtype], embedding_dtype=F32)
    return look_up_bags_of_tables(script, 90)


@cases(1, 4, 7, 64)
def planned_tables_narrow(dim: int) -> Script:
    """Uses rows of float32, and sums of bfloat16, as on a narrow wire."""
    return look_up_bags_of_tables(Script(slabs=(5, 7, 200), num_tables=4, dim=dim, embedding_dtype=BF16), 90)


@cases(*range(4))
def shared_gradients(optimizer: int) -> Script:
    """Steps by gradients in one array for several features, and in one per feature, with the model's bits."""
    script = Script(slabs=(5, 7, 200), num_tables=4, dim=(4, 7)[optimizer % 2], optimizer=optimizer)
    batch, row_ids = bags_of_tables(script, 90)
    for num_sharing, row_gradient in ((6, 0), (2, 1), (1, 2)):
        script.update(batch, row_ids, row_gradient=row_gradient, tables_apart=True, num_sharing=num_sharing)
    return script


@cases(4, 7)
def small_planned_tables(dim: int) -> Script:
    """Covers everything once: several tables in a bag, arrays that features share."""
    script = Script(slabs=(5, 60), num_tables=3, dim=dim)
    batch, row_ids = bags_of_tables(script, 33)
    script.lookup_planned(batch, row_ids, unknown_zeros=(1,), num_sharing=6)
    script.update(batch, row_ids, tables_apart=True, num_sharing=6)
    return script


@cases(4, 7, 72)
def small_statistics(dim: int) -> Script:
    """Makes lookups that record uses: of existing rows, of new rows, of all when no row is left."""
    script = Script(slabs=(5, 7, 60), num_tables=2, dim=dim)
    script.fill(np.arange(20).astype(U64) * U64(0x100000001), 0)
    for num_distinct in (30, 200):
        script.lookup(used_batch(script, 40, num_distinct), clock=num_distinct)
    return script


@cases(4, 7, 72)
def small_batch(dim: int) -> Script:
    """Runs lookup, lookup_find and lookup_planned: single keys, bags, tails."""
    script = Script(slabs=(5, 7, 200), dim=dim, num_tables=2)
    script.fill(range(20), 0)
    keys = script.mix_keys(40, range(30))
    batch = Batch(
        single(keys, 0),
        make_ragged(keys, 1, MEAN, [0, 0, 33, 33, 36], np.abs(script.weights(40))),
        make_fixed(keys, 0, SQRTN, 4),
    )
    script.lookup_find(batch)
    row_ids = script.lookup(batch)
    script.lookup_planned(batch, row_ids)
    return script


@cases("full", "crowded")
def small_batch_refusing(why: str) -> Script:
    """Runs out of rows, or of entries."""
    script = Script(slabs=(5, 7), dim=8, num_buckets=16 if why == "full" else 2)
    script.lookup(Batch(single(range(10, 30)), make_ragged(range(30), 0, MEAN, [0, 3, 3, 30])))
    return script
